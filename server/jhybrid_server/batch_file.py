"""BatchFile: requests in OpenAI's batch format, answered into another file in their order. `jhybrid batch` runs it.

A line goes through the same application as a request over HTTP, so fields, answers and errors are the same there and
here. The answers' file is its own journal: lines are complete and in order, so a killed run goes on after the last one.
What is sampled depends on the line and `base_seed` alone, not on what runs beside it, before it, or where.
"""

import asyncio
import contextlib
import hashlib
import json
from collections import deque
from collections.abc import AsyncGenerator, Callable, Generator, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from starlette.types import ASGIApp, Message

from jhybrid.config import EngineConfig
from jhybrid.engine import Engine, fold_seed
from jhybrid.errors import ConfigError, RequestError
from jhybrid.evaluate.identity import ROOM, identity
from jhybrid.evaluate.line_file import LineFile, decoded
from jhybrid.fleet import Fleet, RayOptions
from jhybrid.request import MAX_N
from jhybrid.weights.load import find_model
from jhybrid_server.bridge import Bridge, ServedEngine
from jhybrid_server.desk import Desk
from jhybrid_server.http_errors import error_body
from jhybrid_server.http_server import application
from jhybrid_server.keys import Keys
from jhybrid_server.statuses import status_of

ENDPOINTS = ("/v1/completions", "/v1/chat/completions")
AHEAD = 16
"""Lines under way and answered but not yet written, for each line that runs at a time."""
NAMED = 5
"""Failed lines that a summary tells of; the file of answers has all."""


DIGITS = 16
"""Of each of the two digests in a line's id: of its text, and of what runs."""


@dataclass(frozen=True)
class Line:
    """One line of the file: what is asked, or what is wrong with it."""

    number: int  # from 1
    id: str  # tells it from others, and from what it was before somebody changed it
    custom_id: str | None
    url: str = ""
    body: dict[str, Any] = field(default_factory=dict)
    fault: RequestError | None = None


@dataclass(frozen=True)
class Failure:
    """A line whose answer is an error."""

    line: int
    custom_id: str | None
    message: str


@dataclass(frozen=True)
class Summary:
    """How a run went. `failed` counts lines whose answer is an error, those of before included."""

    lines: int
    resumed: int
    failed: int
    failures: tuple[Failure, ...] = ()
    """The first of them."""


def read_lines(path: Path, config: EngineConfig) -> list[Line]:
    """The lines of a batch file, empty ones left out. Raises ConfigError if it cannot be read, or has none.

    What answers depend on has a part in the lines' ids: model, versions, and settings but for those of how much runs.
    """
    run = _digest(repr(sorted(identity(config, besides=ROOM).items())))
    try:
        texts = path.read_text(encoding="utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError("input", f"{path} cannot be read as UTF-8 text: {error}") from error
    lines: list[Line] = []
    taken: set[str] = set()
    for number, text in enumerate(texts, start=1):
        if text.strip():
            lines.append(_parse(number, f"batch_req_{number}_{_digest(text.strip())}{run}", text, taken))
            taken.add(lines[-1].custom_id or "")
    if not lines:
        raise ConfigError("input", f"{path} has no lines")
    return lines


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:DIGITS]


def _parse(number: int, own_id: str, text: str, taken: set[str]) -> Line:
    custom_id = None
    try:
        record = decoded(text)
        if not isinstance(record, dict):
            raise RequestError("line", f"must be an object, got {type(record).__name__}")
        name = record.get("custom_id")
        if not isinstance(name, str) or not name:
            raise RequestError("custom_id", f"must be a non-empty string, got {name!r}")
        custom_id = name
        return Line(number, own_id, custom_id, *_asked(record, custom_id, taken))
    except RequestError as error:
        return Line(number, own_id, custom_id, fault=error)
    except ValueError as error:
        return Line(number, own_id, None, fault=RequestError("line", f"is no JSON: {error}"))


def _asked(record: dict[str, Any], custom_id: str, taken: set[str]) -> tuple[str, dict[str, Any]]:
    if custom_id in taken:
        raise RequestError("custom_id", f"{custom_id!r} is given twice; answers could not be told apart")
    unknown = sorted(set(record) - {"custom_id", "method", "url", "body"})
    if unknown:
        raise RequestError(unknown[0], "is not a field of a batch's lines; remove it")
    if record.get("method") != "POST":
        raise RequestError("method", f"must be 'POST', got {record.get('method')!r}")
    if record.get("url") not in ENDPOINTS:
        raise RequestError("url", f"must be {' or '.join(ENDPOINTS)}, got {record.get('url')!r}")
    body = record.get("body")
    if not isinstance(body, dict):
        raise RequestError("body", f"must be an object, got {type(body).__name__}")
    if body.get("stream"):
        raise RequestError("stream", "is not for batches; leave it out")
    return record["url"], body


class Answers:
    """The file of answers, of which complete lines are kept and go with the first lines of the input."""

    def __init__(self, path: Path, lines: Sequence[Line], model: str):
        """Raises ConfigError if the file has answers to other lines, or by another model than the one of this name."""
        self._lines = lines
        self.done = self.failed = 0
        self.failures: list[Failure] = []
        self._file = LineFile(path, "output")
        try:
            for number, text in enumerate(self._file.complete()):
                self._take(_kept(path, number, text, lines, model))
            begins = b"" if self.done == len(lines) else f'{{"id": "{lines[self.done].id}"'.encode()
            if self._file.torn[: len(begins)] != begins[: len(self._file.torn)]:
                raise ConfigError("output", f"{path}, line {self.done + 1} is no answer; name another file")
            self._file.cut()
        except BaseException:
            self._file.close()
            raise

    def append(self, record: dict[str, Any]) -> None:
        """Add a line; it survives whatever happens next."""
        self._file.append(record)
        self._take(record)

    def _take(self, record: dict[str, Any]) -> None:
        if record["error"] is not None:
            self.failed += 1
            if len(self.failures) < NAMED:
                line = self._lines[self.done]
                self.failures.append(Failure(line.number, line.custom_id, record["error"]["message"]))
        self.done += 1

    def close(self) -> None:
        self._file.close()


def _kept(path: Path, number: int, text: bytes, lines: Sequence[Line], model: str) -> dict[str, Any]:
    """An answer of before. Raises ConfigError unless it goes with the line in its place."""
    where = f"{path}, line {number + 1}"
    try:
        record = decoded(text)
        name, found, error = record["id"], record["custom_id"], record["error"]
        by = record["response"]["body"]["model"] if error is None else error["message"] and model
    except (ValueError, TypeError, KeyError) as fault:
        raise ConfigError("output", f"{where} is no answer; name another file") from fault
    if number >= len(lines) or found != lines[number].custom_id:
        raise ConfigError("output", f"{where} is of {found!r}, which is another line; name another file")
    if by != model:
        raise ConfigError("output", f"{where} was answered by {by!r}, not {model!r}; name another file")
    ours = lines[number].id
    if name != ours:
        other = f"line {lines[number].number} of the input is not what it was then"
        if isinstance(name, str) and name[:-DIGITS] == ours[:-DIGITS]:
            other = "the model's files, a setting such as quantization or base_seed, or a version is another now"
        remedy = "name another file, or take out this answer and all after it"
        raise ConfigError("output", f"{where} answers {found!r}, but {other}; {remedy}")
    return record


class Clerk:
    """Answers lines at a desk, some at a time."""

    def __init__(self, desk: Desk, config: EngineConfig):
        self._desk, self._base_seed = desk, config.base_seed
        self._app = application(desk, Keys())
        at_a_time = max(1, min(4 * config.max_num_seqs, config.max_queue // MAX_N))
        self._places = asyncio.Semaphore(at_a_time)
        self._ahead = AHEAD * at_a_time

    async def answers(self, lines: Iterable[Line]) -> AsyncGenerator[dict[str, Any]]:
        """The lines' answers in their order. Raises EngineDeadError if the engine's thread dies; others can follow."""
        pending: deque[asyncio.Task[dict[str, Any]]] = deque()
        try:
            for line in lines:
                pending.append(asyncio.create_task(self._answer(line)))
                while pending and (pending[0].done() or len(pending) >= self._ahead):
                    yield await self._first(pending)
            while pending:
                yield await self._first(pending)
        finally:
            for task in pending:
                task.cancel()
            await asyncio.gather(*pending, return_exceptions=True)

    async def _first(self, pending: deque[asyncio.Task[dict[str, Any]]]) -> dict[str, Any]:
        record = await pending[0]
        self._desk.check_open()  # what a dead engine said of a line is no answer to it
        pending.popleft()
        return record

    async def _answer(self, line: Line) -> dict[str, Any]:
        if line.fault is not None:
            return record_of(line, status_of(line.fault).http, error_body(line.fault))
        body = line.body
        if body.get("seed") is None:
            body = body | {"seed": fold_seed(self._base_seed, line.number)}
        async with self._places:
            status, raw = await post(self._app, line.url, json.dumps(body).encode())
        return record_of(line, status, json.loads(raw))


def record_of(line: Line, status: int, body: dict[str, Any]) -> dict[str, Any]:
    """An answer in OpenAI's form; one that is an error has its code and message again under `error`."""
    error = body.get("error") if status >= 400 else None
    name = body.get("id", f"line-{line.number}")
    return {
        "id": line.id,
        "custom_id": line.custom_id,
        "response": {"status_code": status, "request_id": name, "body": body},
        "error": None if error is None else {"code": error["code"] or error["type"], "message": error["message"]},
    }


async def post(app: ASGIApp, path: str, raw: bytes) -> tuple[int, bytes]:
    """Status and body of a POST to an application in this process."""
    status, parts, told = 0, [], False

    async def receive() -> Message:
        nonlocal told
        if told:
            await asyncio.Event().wait()  # this client does not go away
        told = True
        return {"type": "http.request", "body": raw, "more_body": False}

    async def send(message: Message) -> None:
        nonlocal status
        if message["type"] == "http.response.start":
            status = message["status"]
        elif message["type"] == "http.response.body":
            parts.append(message.get("body", b""))

    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "root_path": "",
        "headers": [(b"content-type", b"application/json")],
        "client": None,
        "server": None,
    }
    await app(scope, receive, send)
    return status, b"".join(parts)


def run_batch(
    config: EngineConfig,
    source: Path,
    target: Path,
    served_model_name: str | None = None,
    progress: Callable[[int], Callable[[int], object]] = lambda _total: lambda _count: None,
    make_engine: Callable[[], ServedEngine] | None = None,
    cluster: RayOptions = RayOptions(),  # noqa: B008 - frozen
) -> Summary:
    """Answer the lines of `source` into `target`; `progress` is given their number, and returns what counts them.

    Raises ConfigError for files that cannot be used, and what keeps the engine from starting. `make_engine` stands in
    for the engine in tests.
    """
    lines = read_lines(source, config)
    name = served_model_name or config.model
    answers = Answers(target, lines, name)
    resumed = answers.done
    left = lines[resumed:]
    office = partial(Office, config, name, make_engine or partial(Engine, config))
    try:
        done = progress(len(lines))
        done(resumed)
        if left:
            records = _spread(cluster, config, office, left) if cluster.ray else office().answers(left)
            with contextlib.closing(records):
                for record in records:
                    answers.append(record)
                    done(1)
    finally:
        answers.close()
    return Summary(len(lines), resumed, answers.failed, tuple(answers.failures))


def _spread(
    cluster: RayOptions, config: EngineConfig, office: Callable[[], "Office"], lines: Sequence[Line]
) -> Generator[dict[str, Any]]:
    find_model(config.model)  # here too, before a cluster is asked for anything
    with Fleet(cluster, office, config.tensor_parallel_size) as fleet:
        for records in fleet.map(fleet.pieces(lines, AHEAD * config.max_num_seqs)):
            yield from records


class Office:
    """A clerk with an engine of its own, outside of any event loop."""

    def __init__(self, config: EngineConfig, name: str, make_engine: Callable[[], ServedEngine]):
        """Raises what keeps the engine from starting."""
        self._loop = asyncio.Runner()
        self._bridge = Bridge(make_engine)
        self._clerk = Clerk(Desk(self._bridge, name), config)
        try:
            self._bridge.start()
            self._loop.run(self._bridge.ready())
        except BaseException:
            self.close()
            raise

    def answers(self, lines: Sequence[Line]) -> Generator[dict[str, Any]]:
        """The lines' answers in their order, as they come; the engine ends with the last."""
        records = self._clerk.answers(lines)
        try:
            while (record := self._loop.run(_next(records))) is not None:
                yield record
        finally:
            self._loop.run(_end(records))
            self.close()

    def __call__(self, lines: Sequence[Line]) -> list[dict[str, Any]]:
        """The answers to a piece of a file; the engine stays for the next."""
        return self._loop.run(self._all(lines))

    async def _all(self, lines: Sequence[Line]) -> list[dict[str, Any]]:
        return [record async for record in self._clerk.answers(lines)]

    def close(self) -> None:
        self._bridge.close()
        self._loop.close()


async def _next(records: AsyncGenerator[dict[str, Any]]) -> dict[str, Any] | None:
    return await anext(records, None)


async def _end(records: AsyncGenerator[dict[str, Any]]) -> None:
    await records.aclose()
