"""Many clients at once over both protocols, some of which leave, dawdle, lie or ask too much: nothing is lost."""

import asyncio
import json
import os
import random
from collections import Counter
from collections.abc import Iterator

import grpc
import pytest

from jhybrid.errors import QueueFullError, RequestError
from jhybrid.request import Request, SamplingParams
from jhybrid_server.client import AsyncClient
from tests.server.fake_engine import FakeEngine, answer_text
from tests.server.serving import Served, eventually, serving

CLIENTS, CALLS = 200, 6
HEAD = "POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\nconnection: close\r\n"


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine(slots=16, max_queue=100, step_seconds=0.001)


@pytest.fixture
def served(engine: FakeEngine) -> Iterator[Served]:
    with serving(lambda: engine) as served:
        yield served


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


async def over_http(served: Served, dice: random.Random) -> str:
    """One call of a random kind; its outcome."""
    kind = dice.choice(["whole", "stream", "leave", "dawdle", "malformed", "huge", "half"])
    reader, writer = await asyncio.open_connection("127.0.0.1", served.http.port)
    try:
        tokens = dice.randint(1, 40)
        body = {"prompt": "abc", "max_tokens": tokens, "stream": kind in ("stream", "leave", "dawdle")}
        raw = b"{" * 50 if kind == "malformed" else json.dumps(body).encode()
        size = 10**9 if kind == "huge" else len(raw) + 100 * (kind == "half")
        writer.write(f"{HEAD}content-length: {size}\r\n\r\n".encode() + raw)
        if kind in ("half", "leave"):
            await asyncio.sleep(dice.random() * 0.05)
            return "left"
        if kind == "dawdle":
            await asyncio.sleep(dice.random() * 0.2)
        answer = (await reader.read()).decode()
    finally:
        writer.close()
    status = int(answer.split()[1])
    if status == 200:
        text = answer_text(4, tokens)
        if body["stream"]:
            events = [json.loads(line[6:]) for line in answer.splitlines() if line.startswith("data: {")]
            assert "".join(event["choices"][0]["text"] for event in events) == text
            assert answer.count("[DONE]") == 1
        else:
            assert json.loads(answer.partition("\r\n\r\n")[2])["choices"][0]["text"] == text
    else:
        assert status in {"malformed": (400,), "huge": (413,)}.get(kind, (429,)), (kind, answer)
    return str(status)


async def over_grpc(client: AsyncClient, dice: random.Random) -> str:
    kind = dice.choice(["whole", "stream", "leave", "late", "bad"])
    tokens = dice.randint(1, 40) if kind != "late" else 1900
    request = Request(prompt="abc", sampling=SamplingParams(max_tokens=-1 if kind == "bad" else tokens))
    try:
        if kind in ("stream", "leave"):
            stream, text = client.stream(request), ""
            async for delta in stream:
                text += delta.text
                if kind == "leave" and dice.random() < 0.3:
                    stream.cancel()
                    return "left"
            assert text == answer_text(4, tokens)
        else:
            answer = await client.generate(request, timeout=0.1 if kind == "late" else 60)
            assert answer.output.text == answer_text(4, tokens) and kind != "bad"
    except QueueFullError:
        return "429"
    except RequestError:
        assert kind == "bad"
        return "400"
    except grpc.RpcError as error:
        assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED, error  # pyright: ignore[reportAttributeAccessIssue]
        assert kind == "late"
        return "late"
    return "200"


def test_every_call_has_one_ending_and_leaves_nothing(served: Served, engine: FakeEngine):
    async def one(number: int, client: AsyncClient) -> list[str]:
        dice = random.Random(number)
        over = [dice.random() < 0.6 for _ in range(CALLS)]
        return [await (over_http(served, dice) if http else over_grpc(client, dice)) for http in over]

    async def all_of_them() -> Counter[str]:
        async with AsyncClient(served.target) as client:
            outcomes = await asyncio.gather(*(one(number, client) for number in range(CLIENTS)))
        return Counter(outcome for each in outcomes for outcome in each)

    before = open_files()
    outcomes = asyncio.run(all_of_them())
    assert sum(outcomes.values()) == CLIENTS * CALLS
    assert min(outcomes[name] for name in ("200", "400", "413", "left", "late")) > 10, outcomes
    eventually(lambda: not (engine.running or engine.waiting or served.bridge._streams or served.desk.running))
    eventually(lambda: open_files() <= before + 2)
    assert served.client.generate(Request(prompt="abc")).output.text == answer_text(4, 16)
