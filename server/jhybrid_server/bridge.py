"""Bridge: between callers in asyncio and the one thread that owns the engine and the device.

The thread takes in what callers posted (requests, aborts, questions), steps the engine, and hands the deltas to the
callers' event loops. Callers have a mailbox of their own, so a slow one holds up nobody.
"""

import asyncio
import logging
import sys
import threading
import time
import traceback
import uuid
from collections import defaultdict, deque
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from jhybrid.errors import ConfigError, EngineDeadError, JhybridError, RequestError
from jhybrid.request import Delta, Request
from jhybrid.startup import Startup
from jhybrid.tokenizer import Tokenizer

if TYPE_CHECKING:
    from jhybrid.occupancy import Occupancy

log = logging.getLogger("jhybrid_server")

Result = TypeVar("Result")

LONG_PROMPTS = 1024
"""Prompts of more characters or tokens together are checked in a thread: it takes longer than the way there."""
MANY_PROMPTS = 8
"""More prompts are, too."""


class NotReadyError(JhybridError):
    """The model is still loading, or the server is shutting down."""


class StuckError(NotReadyError):
    """There is work and no step has ended for a long time."""


class RequestChecker(Protocol):
    """The part of an engine that any thread may call."""

    def check(self, request: Request) -> list[int]: ...
    def grammar(self, request: Request) -> object | None: ...


class ServedEngine(Protocol):
    """What the bridge asks of `jhybrid.Engine`."""

    @property
    def tokenizer(self) -> Tokenizer | None: ...
    @property
    def intake(self) -> RequestChecker: ...
    @property
    def max_queue(self) -> int: ...
    @property
    def has_work(self) -> bool: ...
    @property
    def steps_ended(self) -> int: ...
    def submit(self, request: Request) -> str: ...
    def abort(self, request_id: str) -> bool: ...
    def step(self) -> list[Delta]: ...
    def idle(self) -> bool: ...
    def flush_cache(self) -> None: ...
    def status(self) -> dict: ...
    def occupancy(self) -> "Occupancy": ...
    def degraded(self) -> dict[str, str]: ...
    def model_info(self) -> dict: ...
    def close(self) -> None: ...


class Mailbox:
    """What has come for one reader since it last looked. It belongs to the reader's event loop."""

    __slots__ = ("_items", "_waiter", "loop")

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self._items: list[Delta | JhybridError] = []
        self._waiter: asyncio.Future[None] | None = None

    def put(self, item: "Delta | JhybridError") -> None:
        self._items.append(item)
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def take(self) -> "list[Delta | JhybridError]":
        """Everything, once there is something."""
        if not self._items:
            self._waiter = self.loop.create_future()
            await self._waiter
        items, self._items = self._items, []
        return items


class Stream:
    """A request while it runs. Its mailbox belongs to the caller's event loop, the counters to the engine's thread.

    Requests that were opened together share a mailbox.
    """

    def __init__(self, request: Request, mailbox: Mailbox, grammar: object | None = None):
        """`grammar` is held, so that the engine finds it compiled."""
        assert request.request_id is not None
        self.request, self.grammar = request, grammar
        self.name = request.request_id
        self.mailbox, self.loop = mailbox, mailbox.loop
        self.unfinished = request.sampling.n
        self.wanted = True
        self._held: dict[int, list[Delta]] = {}  # by answer, what its caller is not told yet

    def is_new(self, delta: Delta) -> bool:
        """Whether nothing was due of a delta's answer before."""
        return delta.index not in self._held

    def due(self, delta: Delta, interval: int) -> Iterable[Delta]:
        """What to tell now: an answer's first token at once, then `interval` tokens at a time, the rest at its end."""
        held = self._held.get(delta.index)
        if held is None:
            self._held[delta.index] = []
            return (delta,)
        if interval == 1:
            return (delta,)
        held.append(delta)
        if delta.finish_reason is None and sum(len(each.token_ids) for each in held) < interval:
            return []
        self._held[delta.index] = []
        return _gathered(held)


Told = list[tuple[Stream, Delta | JhybridError]]
"""What callers are told, in its order."""


class Bridge:
    """Owns the engine's thread. Start it, await `ready`, then open streams from any event loop."""

    def __init__(
        self, make_engine: Callable[[], ServedEngine], startup: Startup | None = None, stream_interval: int = 1
    ):
        """`make_engine` is called in the thread, so that the device has one owner from the first moment.

        It keeps `startup` up to date. Callers are told of an answer's first token at once, then of `stream_interval`
        tokens at a time. Raises ConfigError unless that is at least 1.
        """
        if stream_interval < 1:
            raise ConfigError("stream_interval", f"{stream_interval} is below 1; 1 is every token as it comes")
        self._make_engine, self._stream_interval = make_engine, stream_interval
        self.startup = startup or Startup()
        self._moved: float | None = None  # when something last became known; None while there is nothing to do
        self._engine: ServedEngine | None = None
        self._started: Future[None] = Future()
        self._dead: Future[BaseException] = Future()
        self._streams: dict[str, Stream] = {}
        self._changed = threading.Condition()
        self._inbox: deque[tuple[Callable[[ServedEngine], Any], Future[Any]]] = deque()
        self._closing = False
        self._compilers = ThreadPoolExecutor(max_workers=2, thread_name_prefix="jhybrid-compile")
        self._readers = ThreadPoolExecutor(max_workers=4, thread_name_prefix="jhybrid-read")
        self._thread = threading.Thread(target=self._run, name="jhybrid-engine", daemon=True)

    def start(self) -> None:
        self._thread.start()

    async def ready(self) -> None:
        """Wait until the engine is there. Raises whatever kept it from starting."""
        await asyncio.shield(asyncio.wrap_future(self._started))

    @property
    def started(self) -> bool:
        """Whether the engine has been there."""
        return self._engine is not None

    async def death(self) -> BaseException:
        """Wait until the engine's thread dies, which it should not, and return the cause."""
        return await asyncio.shield(asyncio.wrap_future(self._dead))

    @property
    def engine(self) -> ServedEngine:
        """For what any thread may call: tokenizer, intake, model_info. NotReadyError before it is loaded."""
        if self._dead.done():
            raise _obituary(self._dead.result())
        if self._engine is None:
            raise NotReadyError(f"the model is still loading ({self.startup}); try again shortly")
        return self._engine

    @property
    def stalled_seconds(self) -> float:
        """For how long there has been work without a step that ended. 0 while there is none."""
        moved = self._moved
        return 0.0 if moved is None else time.monotonic() - moved

    def stack(self) -> str:
        """What the engine's thread is doing, for the log."""
        frame = sys._current_frames().get(self._thread.ident or 0)
        return "".join(traceback.format_stack(frame)) if frame else "(it has ended)"

    async def open(self, requests: Iterable[Request]) -> list[Stream]:
        """Check requests, long and many ones away from the event loop, and queue them: all of them or none.

        Grammars are compiled in threads of their own: one that takes long holds up nothing but others of its kind.

        Raises RequestError, QueueFullError, EngineDeadError or NotReadyError. Read `deltas` next, and `abandon` each
        stream whatever happens. A stream's request has its prompt as token ids.
        """
        engine, mailbox, requests = self.engine, Mailbox(), list(requests)

        def check() -> list[list[int]]:
            return [engine.intake.check(request) for request in requests]

        size = sum(len(request.prompt or request.prompt_token_ids or ()) for request in requests)
        is_long = size > LONG_PROMPTS or len(requests) > MANY_PROMPTS
        prompts = await self.aside(check) if is_long else check()
        streams = []
        for request, ids in zip(requests, prompts, strict=True):
            name = request.request_id or uuid.uuid4().hex
            checked = replace(request, prompt=None, prompt_token_ids=ids, request_id=name)
            streams.append(Stream(checked, mailbox, await self._grammar(engine, request)))
        answers = sum(stream.unfinished for stream in streams)
        if len(streams) > 1 and answers > engine.max_queue:
            what = f"{len(streams)} of n={streams[0].unfinished} are {answers} answers"
            raise RequestError(
                "prompt", f"{what}, which never fit in max_queue={engine.max_queue}; send fewer at a time"
            )
        try:
            await self.ask(lambda engine: self._submit(engine, streams))
        except asyncio.CancelledError:
            for stream in streams:
                self.abandon(stream)
            raise
        return streams

    async def aside(self, work: Callable[[], Result]) -> Result:
        """Do what takes as long as a text is, in threads that nothing else waits for."""
        return await asyncio.get_running_loop().run_in_executor(self._readers, work)

    async def _grammar(self, engine: ServedEngine, request: Request) -> object | None:
        if request.sampling.structured_outputs is None:
            return None
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._compilers, engine.intake.grammar, request)

    async def deltas(self, streams: Sequence[Stream]) -> AsyncIterator[Delta]:
        """What the engine adds to streams that were opened together, up to the last delta of each answer.

        A reader who is behind gets what has gathered meanwhile as one delta for each answer. EngineDeadError if the
        engine's thread dies.
        """
        left, mailbox = sum(stream.request.sampling.n for stream in streams), streams[0].mailbox
        while left:
            items = await mailbox.take()
            for delta in _gathered([item for item in items if isinstance(item, Delta)]):
                left -= delta.finish_reason is not None
                yield delta
            if isinstance(items[-1], JhybridError):
                raise items[-1]

    def abandon(self, stream: Stream) -> None:
        """The caller has gone: end its request in whatever phase it is. Harmless when it has ended already."""
        if stream.unfinished:
            self._post(lambda engine: self._drop(engine, stream)).add_done_callback(_log_failure)

    def abort_all(self) -> None:
        """End every request; callers get deltas with finish_reason `abort`."""
        self._post(lambda engine: [engine.abort(name) for name in self._streams]).add_done_callback(_log_failure)

    async def ask(self, question: Callable[[ServedEngine], Result]) -> Result:
        """Call `question` on the engine's thread, between two steps."""
        _ = self.engine
        return await asyncio.wrap_future(self._post(question))

    def close(self, timeout: float = 10.0) -> bool:
        """End the thread and close the engine. False if it did not end in time, as while it compiles."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        for pool in (self._compilers, self._readers):
            pool.shutdown(wait=False, cancel_futures=True)
        if self._thread.ident is not None:
            self._thread.join(timeout)
        return not self._thread.is_alive()

    def _post(self, job: Callable[[ServedEngine], Result]) -> "Future[Result]":
        """Hand a job to the engine's thread. Its result or error is the future's."""
        answer: Future[Result] = Future()
        with self._changed:
            if self._dead.done():
                answer.set_exception(_obituary(self._dead.result()))
            elif self._closing:
                answer.set_exception(NotReadyError("the server is shutting down"))
            else:
                self._inbox.append((job, answer))
                self._changed.notify()
        return answer

    # on the engine's thread

    def _run(self) -> None:
        try:
            engine = self._engine = self._make_engine()
        except BaseException as error:  # noqa: BLE001 - the caller of `ready` gets it
            self._started.set_exception(error)
            self._end(error)
            return
        self._started.set_result(None)
        try:
            while self._wait_for_work(engine):
                self._do_jobs(engine)
                if engine.has_work:
                    self._step(engine)
            engine.close()
        except BaseException as error:
            log.critical("the engine thread has died", exc_info=error)
            self._end(error)
        else:
            self._end(None)

    def _wait_for_work(self, engine: ServedEngine) -> bool:
        """Do what can wait, or sleep, until there is something to do; False when the bridge is closing."""
        while not (engine.has_work or self._inbox or self._closing) and engine.idle():
            pass
        if not engine.has_work:
            with self._changed:
                self._moved = None
                self._changed.wait_for(lambda: self._inbox or self._closing)
                self._moved = time.monotonic()
        return not self._closing

    def _step(self, engine: ServedEngine) -> None:
        ended = engine.steps_ended
        deltas = engine.step()
        if deltas or engine.steps_ended != ended:
            self._moved = time.monotonic()
        self._hand_out(engine, deltas)

    def _do_jobs(self, engine: ServedEngine) -> None:
        with self._changed:
            jobs, self._inbox = self._inbox, deque()
        for job, answer in jobs:
            if not answer.set_running_or_notify_cancel():
                continue
            try:
                answer.set_result(job(engine))
            except Exception as error:  # noqa: BLE001 - it belongs to whoever posted the job
                answer.set_exception(error)

    def _submit(self, engine: ServedEngine, streams: list[Stream]) -> None:
        try:
            for stream in streams:
                if stream.name in self._streams:
                    raise RequestError(
                        "request_id", f"{stream.name!r} is already running; choose another or leave it out"
                    )
                engine.submit(stream.request)
                self._streams[stream.name] = stream
        except Exception:
            for stream in streams:
                self._drop(engine, stream)
            raise

    def _drop(self, engine: ServedEngine, stream: Stream) -> None:
        """Abort a stream that still runs. It stays known until its last deltas have come, so that no later
        request of the same id can receive them."""
        stream.wanted = False
        if self._streams.get(stream.name) is stream:
            engine.abort(stream.name)

    def _hand_out(self, engine: ServedEngine, deltas: list[Delta]) -> None:
        """Put deltas into their callers' mailboxes, waking each event loop once. Those that begin an answer come first:
        somebody waits for them, while the others only have to keep up."""
        by_loop: dict[asyncio.AbstractEventLoop, tuple[Told, Told]] = defaultdict(lambda: ([], []))
        for delta in deltas:
            stream = self._streams[delta.request_id]
            if delta.finish_reason is not None:
                stream.unfinished -= 1
                if not stream.unfinished:
                    del self._streams[delta.request_id]
            if stream.wanted:
                begin, go_on = by_loop[stream.loop]
                told = begin if stream.is_new(delta) else go_on
                told.extend((stream, each) for each in stream.due(delta, self._stream_interval))
        for loop, (begin, go_on) in by_loop.items():
            items = begin + go_on
            if not _deliver(loop, items):
                log.warning("the event loop of %d requests is closed; they are aborted", len(items))
                for stream, _ in items:
                    self._drop(engine, stream)

    def _end(self, cause: BaseException | None) -> None:
        """Nothing runs any more: tell everyone who waits."""
        with self._changed:
            self._closing, self._moved = True, None
            if cause is not None:
                self._dead.set_result(cause)
            jobs, self._inbox = self._inbox, deque()
        for _, answer in jobs:
            if answer.set_running_or_notify_cancel():
                answer.set_exception(_obituary(cause))
        for stream in self._streams.values():
            _deliver(stream.loop, [(stream, _obituary(cause))])
        self._streams.clear()


def _deliver(loop: asyncio.AbstractEventLoop, items: Told) -> bool:
    """Put items into their mailboxes, in their event loop; False if it is closed."""

    def put() -> None:
        for stream, item in items:
            stream.mailbox.put(item)

    try:
        loop.call_soon_threadsafe(put)
    except RuntimeError:
        if not loop.is_closed():
            raise
        return False
    return True


def _gathered(deltas: list[Delta]) -> Iterable[Delta]:
    """The same with those of each answer together, but for ends that its tokens have no part in."""
    if len(deltas) < 2:
        return deltas
    by_answer: dict[tuple[str, int], list[Delta]] = defaultdict(list)
    for delta in deltas:
        by_answer[delta.request_id, delta.index].append(delta)
    gathered = []
    for parts in by_answer.values():
        apart = parts.pop() if parts[-1].finish_reason in ("error", "abort") else None
        gathered += [Delta.joined(parts)] if parts else []
        gathered += [apart] if apart else []
    return gathered


def _obituary(cause: BaseException | None) -> JhybridError:
    """A fresh error for each caller: tracebacks grow on the instance that is raised."""
    if cause is None:
        return NotReadyError("the server is shutting down")
    error = EngineDeadError(f"the engine thread has died: {type(cause).__name__}: {cause}; restart the server")
    error.__cause__ = cause
    return error


def _log_failure(future: "Future[Any]") -> None:
    """For jobs that nobody waits for."""
    error = None if future.cancelled() else future.exception()
    if error is not None and not isinstance(error, NotReadyError | EngineDeadError):
        log.error("a job on the engine's thread failed", exc_info=error)
