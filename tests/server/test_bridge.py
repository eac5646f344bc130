"""Bridge: what happens between event loops and the engine's thread when things cross."""

import asyncio
import threading
import time
from collections.abc import Iterator

import pytest

from jhybrid.errors import ConfigError, RequestError
from jhybrid.request import Delta, Request, SamplingParams
from jhybrid_server.bridge import Bridge, NotReadyError
from tests.server.fake_engine import FakeEngine, answer_text
from tests.server.serving import eventually

ENDLESS = SamplingParams(max_tokens=None)


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine(step_seconds=0.001)


@pytest.fixture
def bridge(engine: FakeEngine) -> Iterator[Bridge]:
    bridge = Bridge(lambda: engine)
    bridge.start()
    yield bridge
    engine.gate.set()
    assert bridge.close()


async def text_of(bridge: Bridge, request: Request) -> str:
    await bridge.ready()
    stream = await bridge.open([request])
    return "".join([delta.text async for delta in bridge.deltas(stream)])


def test_callers_from_several_event_loops(bridge: Bridge):
    texts: list[str] = []
    work = lambda: texts.append(asyncio.run(text_of(bridge, Request(prompt="abc"))))  # noqa: E731
    threads = [threading.Thread(target=work) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert texts == [answer_text(4, 16)] * 6


def test_a_reader_who_is_behind_gets_what_has_gathered_at_once(bridge: Bridge, engine: FakeEngine):
    async def work() -> list[Delta]:
        await bridge.ready()
        streams = await bridge.open(
            [Request(prompt="abc", sampling=SamplingParams(n=2, logprobs=1)), Request(prompt="nan")]
        )
        while bridge._streams:
            await asyncio.sleep(0.005)
        return [delta async for delta in bridge.deltas(streams)]

    first, second, said, failed = asyncio.run(work())
    assert [first.text, second.text] == [answer_text(4, 16), answer_text(4, 16, 1)]
    assert len(first.token_ids) == len(first.logprobs or ()) == 16 and first.finish_reason == "length"
    assert (said.text, said.finish_reason) == (answer_text(4, 2), None)
    assert (failed.token_ids, failed.finish_reason) == ([], "error")


def test_streams_in_intervals_begin_at_once(engine: FakeEngine):
    bridge = Bridge(lambda: engine, stream_interval=4)
    bridge.start()

    async def work() -> list[Delta]:
        await bridge.ready()
        streams = await bridge.open([Request(prompt="abc", sampling=SamplingParams(max_tokens=11))])
        return [delta async for delta in bridge.deltas(streams)]

    engine.step_seconds = 0.02
    deltas = asyncio.run(work())
    assert [len(delta.token_ids) for delta in deltas] == [1, 4, 4, 2]
    assert "".join(delta.text for delta in deltas) == answer_text(4, 11)
    assert bridge.close()
    with pytest.raises(ConfigError, match="stream_interval: 0 is below 1"):
        Bridge(lambda: engine, stream_interval=0)


def test_first_tokens_are_told_before_the_others_of_their_step(bridge: Bridge, engine: FakeEngine):
    told: list[tuple[str, int]] = []

    async def read(request: Request) -> None:
        async for delta in bridge.deltas(await bridge.open([request])):
            told.append((delta.request_id, delta.index))

    async def work() -> None:
        await bridge.ready()
        runs = [asyncio.create_task(read(Request("abc", sampling=ENDLESS, request_id=name))) for name in ("a", "b")]
        while len(told) < 10:
            await asyncio.sleep(0.001)
        engine.gate.clear()
        while not engine.is_held:
            await asyncio.sleep(0.001)
        late = asyncio.create_task(read(Request("abc", sampling=SamplingParams(max_tokens=3, n=2), request_id="late")))
        await asyncio.sleep(0.1)
        before = len(told)
        engine.gate.set()
        await late
        assert told[before : before + 6] == [("a", 0), ("b", 0), ("late", 0), ("late", 1), ("a", 0), ("b", 0)]
        for run in runs:
            run.cancel()
        await asyncio.gather(*runs, return_exceptions=True)

    asyncio.run(work())


def test_last_deltas_of_an_abandoned_request_reach_no_later_one_of_its_id(bridge: Bridge, engine: FakeEngine):
    request = Request(prompt="abc", sampling=SamplingParams(max_tokens=5), request_id="same")

    async def work() -> str:
        await bridge.ready()
        stream = await bridge.open([request])
        engine.gate.clear()
        bridge.abandon(stream[0])
        later = asyncio.create_task(bridge.open([request]))
        await asyncio.sleep(0.1)  # both jobs are posted while a step is held up
        engine.gate.set()
        with pytest.raises(RequestError, match="'same' is already running"):
            await later
        while bridge._streams:
            await asyncio.sleep(0.005)
        return await text_of(bridge, request)

    assert asyncio.run(work()) == answer_text(4, 5)


def test_a_caller_that_leaves_before_acceptance_is_never_submitted(bridge: Bridge, engine: FakeEngine):
    async def work() -> None:
        await bridge.ready()
        await bridge.open([Request(prompt="abc", sampling=ENDLESS, request_id="first")])
        engine.gate.clear()
        task = asyncio.create_task(bridge.open([Request(prompt="abc", request_id="second")]))
        await asyncio.sleep(0.1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        engine.gate.set()
        await bridge.ask(lambda engine: engine.status())

    asyncio.run(work())
    assert [request.request_id for request in engine.submitted] == ["first"]


def test_a_closed_event_loop_costs_its_own_requests_only(bridge: Bridge, engine: FakeEngine):
    async def leave() -> None:
        await bridge.ready()
        await bridge.open([Request(prompt="abc", sampling=ENDLESS, request_id="left")])

    asyncio.run(leave())
    eventually(lambda: engine.aborted == ["left"] and not engine.running)
    assert asyncio.run(text_of(bridge, Request(prompt="abc"))) == answer_text(4, 16)


def test_closing_tells_who_waits(engine: FakeEngine):
    async def work() -> None:
        bridge = Bridge(lambda: engine)
        bridge.start()
        await bridge.ready()
        stream = await bridge.open([Request(prompt="abc", sampling=ENDLESS)])
        assert await asyncio.to_thread(bridge.close)
        with pytest.raises(NotReadyError, match="shutting down"):
            async for _ in bridge.deltas(stream):
                pass
        with pytest.raises(NotReadyError, match="shutting down"):
            await bridge.open([Request(prompt="abc")])

    asyncio.run(work())
    assert engine.closed


class Idling(FakeEngine):
    """Steps that come back at once and end nothing."""

    def step(self) -> list[Delta]:
        if self.gate.is_set():
            return super().step()
        time.sleep(0.001)
        return []


def test_steps_that_end_nothing_count_as_a_stall():
    engine = Idling()
    bridge = Bridge(lambda: engine)
    bridge.start()

    async def work() -> None:
        await bridge.ready()
        await asyncio.sleep(0.1)
        assert bridge.stalled_seconds == 0  # nothing to do is no stall
        engine.gate.clear()
        [stream] = await bridge.open([Request(prompt="abc")])
        await asyncio.sleep(0.3)
        assert bridge.stalled_seconds > 0.25 and "in step" in bridge.stack()
        engine.gate.set()
        assert sum([len(delta.token_ids) async for delta in bridge.deltas([stream])]) == 16
        await asyncio.sleep(0.1)
        assert bridge.stalled_seconds == 0

    asyncio.run(work())
    assert bridge.close()
