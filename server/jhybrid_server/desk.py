"""Desk: where the calls of every protocol come in. It decides who is let in, follows each call, and closes at the end.

The gRPC and the HTTP server are two skins over one desk, so that they admit, count, fail and finish alike.
"""

import asyncio
import contextlib
import functools
import logging
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace
from typing import Any, Protocol

from jhybrid.chat_template import ChatTemplate
from jhybrid.errors import ConfigError, JhybridError, RequestError, StepError
from jhybrid.request import Delta, Request
from jhybrid.tokenizer import Tokenizer
from jhybrid_server.bridge import Bridge, NotReadyError, Result, ServedEngine, Stream, StuckError
from jhybrid_server.call_metrics import CallMetrics
from jhybrid_server.dialect import Dialect, Parsers
from jhybrid_server.statuses import AbortedError, ModelNotFoundError
from jhybrid_server.usage import Timing, Usage

STALL_SECONDS = 30.0
"""How long a client may take no bytes before it is given up."""
MAX_TEXT = 2**20
"""Characters of a text to be tokenized, and tokens to be put together, in one call."""
ASK_SECONDS = 5.0
"""How long a question about the engine may wait for the step under way."""

log = logging.getLogger("jhybrid_server")


class Call:
    """One call while it runs: the answers to one or several prompts, what they cost, and how long they took."""

    def __init__(self, desk: "Desk", streams: Sequence[Stream], started: float):
        self.prompts = [stream.request.prompt_token_ids or [] for stream in streams]
        """Token ids of each prompt."""
        self.ended_well = False
        """Whether the delta just given out is the last, and no answer has failed."""
        self._desk, self._streams, self._started = desk, streams, started
        self.name = streams[0].name if streams else ""
        """Id of its first request."""
        self._numbers = {stream.name: i for i, stream in enumerate(streams)}
        self._cached = [0] * len(streams)
        self._completion_tokens = 0
        self._miss_cause: str | None = None
        self._first_token: float | None = None
        self._last_token: dict[tuple[int, int], float] = {}  # when, by number of prompt and of answer
        self._queue_seconds: float | None = None

    async def deltas(self) -> AsyncIterator[tuple[int, Delta]]:
        """Each delta with the number of the prompt that it belongs to, up to the last of each answer.

        An answer that fails lets its siblings finish; then its cause is raised: StepError, AbortedError, or
        NotReadyError where the server ended it. EngineDeadError at once if the engine's thread dies.
        """
        failures: list[Delta] = []
        left = sum(stream.request.sampling.n for stream in self._streams)
        async for delta in self._desk.bridge.deltas(self._streams):
            number = self._numbers[delta.request_id]
            left -= delta.finish_reason is not None
            if delta.finish_reason in ("error", "abort"):
                failures.append(delta)
                if delta.text:  # held back until now, of tokens that were told
                    yield number, replace(delta, finish_reason=None, error=None)
                continue
            self._saw(number, delta)
            self.ended_well = not left and not failures
            yield number, delta
        if failures:
            raise self._failure(failures)

    async def answers(self) -> dict[tuple[int, int], Delta]:
        """The whole answers, each as one delta, by number of prompt and of answer. Raises as `deltas` does."""
        parts: dict[tuple[int, int], list[Delta]] = defaultdict(list)
        async for number, delta in self.deltas():
            parts[number, delta.index].append(delta)
        return {key: Delta.joined(deltas) for key, deltas in parts.items()}

    @property
    def usage(self) -> Usage:
        """Of what has come so far; of the whole call once `deltas` has ended."""
        prompt_tokens = sum(len(prompt) for prompt in self.prompts)
        return Usage(prompt_tokens, sum(self._cached), self._completion_tokens, self._miss_cause)

    @property
    def timing(self) -> Timing:
        """Up to now."""
        first = None if self._first_token is None else self._first_token - self._started
        return Timing(first, time.monotonic() - self._started, self._queue_seconds)

    def _saw(self, number: int, delta: Delta) -> None:
        if delta.token_ids:
            self._saw_tokens((number, delta.index), len(delta.token_ids), time.monotonic())
        if self._queue_seconds is None:  # of several answers, the first to get a place
            self._queue_seconds = delta.queue_seconds
        if delta.index == 0:
            if delta.cached_tokens > self._cached[number]:
                self._cached[number] = delta.cached_tokens
            self._miss_cause = delta.miss_cause or self._miss_cause

    def _saw_tokens(self, answer: tuple[int, int], count: int, now: float) -> None:
        self._completion_tokens += count
        before = self._last_token.get(answer)
        self._last_token[answer] = now
        if self._first_token is None:
            self._first_token = now
            self._desk.metrics.first_token(now - self._started)
        elif before is not None:
            self._desk.metrics.next_token((now - before) / count, count)

    def _failure(self, failures: list[Delta]) -> JhybridError:
        broken = [delta for delta in failures if delta.finish_reason == "error"]
        if broken:
            n = sum(stream.request.sampling.n for stream in self._streams)
            where = f"answers {[delta.index for delta in broken]} of {n}: " if n > 1 else ""
            return StepError(f"{where}{broken[0].error}")
        if self._desk.draining:
            return NotReadyError("the server ended this request before its answer was complete")
        return AbortedError("the request was aborted before its answer was complete")


class CallObserver(Protocol):
    """Told of every call at its end."""

    def write(
        self, requests: Sequence[Request], call: Call | None, outcome: str, seconds: float, error: BaseException | None
    ) -> None: ...


class Desk:
    """One for a process. `draining` closes it to new calls; `running` counts those inside."""

    def __init__(
        self,
        bridge: Bridge,
        model_name: str,
        watchdog_seconds: float = 0.0,
        observers: Sequence[CallObserver] = (),
        parsers: Parsers | None = None,
    ):
        """With work and no step that ends for `watchdog_seconds`, calls are refused until one does; 0: never."""
        self.bridge = bridge
        self.model_name = model_name
        self.watchdog_seconds = watchdog_seconds
        self._parsers = parsers or Parsers()
        self.metrics = CallMetrics()
        self.observers = list(observers)
        self.draining = False
        self.running = 0

    @contextlib.asynccontextmanager
    async def call(self, requests: Sequence[Request], model: str = "") -> AsyncIterator[Call]:
        """Let a call in; leaving the block ends whatever of it still runs, in whatever phase it is.

        Raises RequestError, ModelNotFoundError, QueueFullError, NotReadyError or EngineDeadError. Either all
        requests are queued or none is.
        """
        started = time.monotonic()
        call: Call | None = None

        def ended(outcome: str, seconds: float, error: BaseException | None) -> None:
            for observer in self.observers:
                observer.write(requests, call, outcome, seconds, error)

        with self.metrics.outcome(ended):
            self.check_model(model)
            self.check_open()
            self.running += 1
            try:
                streams = await self.bridge.open(requests)
                call = Call(self, streams, started)
                try:
                    yield call
                    if call.ended_well:
                        self.metrics.answered(call.usage, call.timing)
                finally:
                    for stream in streams:
                        self.bridge.abandon(stream)
            finally:
                self.running -= 1

    def check_open(self) -> None:
        """Raises NotReadyError while loading or draining, StuckError while stuck, EngineDeadError after a death."""
        _ = self.bridge.engine
        if self.draining:
            raise NotReadyError("the server is shutting down; try another")
        stalled = self.bridge.stalled_seconds
        if 0 < self.watchdog_seconds < stalled:
            raise StuckError(f"no step has ended for {stalled:.0f} s though there is work; try another server")

    def refusal(self) -> JhybridError | None:
        """Why calls are not let in now; None if they are."""
        try:
            self.check_open()
        except JhybridError as error:
            return error
        return None

    def check_model(self, model: str) -> None:
        """Raises ModelNotFoundError for a name other than the served one; an empty one means whichever is served."""
        if model and model != self.model_name:
            raise ModelNotFoundError(f"model: {model[:200]!r} is not served here, {self.model_name!r} is")

    @property
    def dialect(self) -> Dialect:
        """How the model writes reasoning and calls of tools."""
        return self._parsers.dialect(self.bridge.engine.tokenizer)

    def tokenizer(self, field: str) -> Tokenizer:
        """Raises RequestError naming `field` where the model has none."""
        tokenizer = self.bridge.engine.tokenizer
        if tokenizer is None:
            raise RequestError(field, "this model has no tokenizer; it takes token ids only")
        return tokenizer

    async def tokenize(self, text: str, add_special_tokens: bool = True, field: str = "text") -> list[int]:
        """Token ids of a text, found away from the event loop. RequestError of this field for one that is too long."""
        tokenizer = self.tokenizer(field)
        if len(text) > MAX_TEXT:
            raise RequestError(field, f"has {len(text)} characters, at most {MAX_TEXT} allowed; send parts of it")
        return await self.bridge.aside(lambda: tokenizer.encode(text, add_special_tokens=add_special_tokens))

    async def detokenize(self, ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        """Text of token ids. RequestError for ids that the model does not have, and for too many."""
        tokenizer, size = self.tokenizer("tokens"), self.bridge.engine.model_info()["vocab_size"]
        if len(ids) > MAX_TEXT:
            raise RequestError("tokens", f"has {len(ids)} entries, at most {MAX_TEXT} allowed; send parts of it")

        def decode() -> str:
            for at, token in enumerate(ids):
                if not 0 <= token < size:
                    raise RequestError("tokens", f"entry {at} is {token}; must be in [0, {size})")
            return tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)

        return await self.bridge.aside(decode)

    async def chat_prompt(self, rendering: Callable[[], dict[str, Any]]) -> str:
        """The prompt text of a conversation; encode it without special tokens, which the template writes itself.

        `rendering` says what the template is given; it is called away from the event loop, too.
        """
        tokenizer = self.tokenizer("messages")

        def render() -> str:
            template = _template_of(tokenizer)
            if isinstance(template, ConfigError):
                raise RequestError(template.field, f"{template.args[1]}; send a plain prompt") from template
            return template.render(**rendering())

        return await asyncio.to_thread(render)

    async def status(self) -> dict:
        """The engine's status. StuckError if its thread does not come to answer."""
        return await self._ask(lambda engine: engine.status())

    async def picture(self) -> dict:
        """The status, and who holds which slots, pages and snapshots. Raises as `status` does."""
        status, occupancy = await self._ask(lambda engine: (engine.status(), engine.occupancy()))
        return status | await asyncio.to_thread(occupancy.describe)

    async def _ask(self, question: Callable[[ServedEngine], Result]) -> Result:
        try:
            async with asyncio.timeout(ASK_SECONDS):
                return await self.bridge.ask(question)
        except TimeoutError as error:
            raise StuckError(f"the engine has been in one step for {self.bridge.stalled_seconds:.0f} s") from error

    async def flush_cache(self) -> None:
        """Forget every cached prefix that nobody uses."""
        await self.bridge.ask(lambda engine: engine.flush_cache())

    async def abort(self, request_id: str) -> bool:
        """End a running request of anybody; its caller gets AbortedError. False if it is unknown."""
        return await self.bridge.ask(lambda engine: engine.abort(request_id))

    async def drain(self, timeout: float, hurry: asyncio.Event | None = None) -> None:
        """Refuse new calls; let running ones finish until `timeout` seconds or `hurry`; abort what is left then."""
        self.draining = True
        if not await self._empty(timeout, hurry):
            log.warning("%d requests did not finish in time and are aborted", self.running)
            self.bridge.abort_all()
            await self._empty(5.0, None)

    async def _empty(self, timeout: float, hurry: asyncio.Event | None) -> bool:
        """Wait until no call runs; False if it took too long."""
        deadline = time.monotonic() + timeout
        while self.running:
            if time.monotonic() >= deadline or (hurry is not None and hurry.is_set()):
                return False
            await asyncio.sleep(0.02)
        return True


@functools.lru_cache(maxsize=4)
def _template_of(tokenizer: Tokenizer) -> ChatTemplate | ConfigError:
    """What is wrong with a model's template is kept as well, as finding it out takes a while."""
    try:
        return ChatTemplate.of(tokenizer)
    except ConfigError as error:
        return error
