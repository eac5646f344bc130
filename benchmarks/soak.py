"""Soak: many clients at once over both protocols for minutes, some of which leave, dawdle, lie or ask too much.

    python benchmarks/soak.py [--seconds 600] [--streams 200] [--output FILE] [--json] [-- FLAGS OF jhybrid serve]

Starts `jhybrid serve` in a process of its own. Fails, with exit code 1, unless every call had exactly one ending of the
kind that was due, all slots, pages and calls are given back, open files and memory stay flat, nothing was compiled or
failed, and SIGTERM ends the server with 0. `make soak` runs it.
"""

import argparse
import asyncio
import json
import os
import platform
import random
import statistics
import subprocess
import sys
import time
import urllib.request
from collections import Counter, defaultdict
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc

from jhybrid import Request, RequestError, SamplingParams
from jhybrid.errors import QueueFullError
from jhybrid_server.client import AsyncClient

FLAGS = ["--max-num-seqs", "32", "--max-model-len", "512", "--enable-prefix-caching", "--max-queue", "150"]
PATIENCE = 180.0
"""Seconds after which a call is stuck."""
SAMPLE_SECONDS = 2.0
HEAD = "POST /v1/completions HTTP/1.1\r\nhost: soak\r\ncontent-type: application/json\r\nconnection: close\r\n"


Ways = dict[str, Callable[["Asked"], Coroutine[Any, Any, str]]]
"""Protocol -> how one call is made over it."""


class Wrong(Exception):
    """A call did not end as it was due."""


class Clock:
    """Seconds during which this process ran: where the whole machine is held up, no server is to blame."""

    def __init__(self) -> None:
        self.awake = self.held_up = 0.0

    async def run(self) -> None:
        last = time.monotonic()
        while True:
            await asyncio.sleep(0.5)
            now = time.monotonic()
            self.awake += min(now - last, 1.0)
            self.held_up += max(0.0, now - last - 1.0)
            last = now

    async def patiently(self, call: Coroutine[Any, Any, str]) -> str:
        """Wait for a call. Raises Wrong when it takes too long."""
        task, started = asyncio.ensure_future(call), self.awake
        while self.awake - started < PATIENCE:
            await asyncio.wait({task}, timeout=5)
            if task.done():
                return task.result()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        raise Wrong(f"no ending after {PATIENCE:g} s")


@dataclass
class Book:
    """What happened."""

    endings: dict[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    """Kind of call -> ending -> number."""
    faults: list[str] = field(default_factory=list)
    first: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    """Protocol -> seconds to the first token of each streamed answer."""
    whole: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    """Protocol -> seconds per answer."""


@dataclass(frozen=True)
class Asked:
    """One call to be."""

    dice: random.Random
    kind: str
    prompt: list[int]
    tokens: int

    @classmethod
    def draw(cls, dice: random.Random, kinds: dict[str, int], vocab_size: int) -> "Asked":
        [kind] = dice.choices(list(kinds), list(kinds.values()))
        shared = random.Random(dice.randrange(8))  # prefixes that others have too
        prompt = [shared.randrange(vocab_size) for _ in range(dice.randint(1, 48))]
        prompt += [dice.randrange(vocab_size) for _ in range(dice.randint(0, 16))]
        return cls(dice, kind, prompt, dice.randint(1, 48))


HTTP_KINDS = {
    "whole": 4,
    "stream": 6,
    "leave": 3,
    "slow": 2,
    "malformed": 1,
    "wrong": 1,
    "huge": 1,
    "long": 1,
    "half": 1,
}


async def over_http(port: int, asked: Asked, book: Book) -> str:
    """One call by hand, so that it can misbehave; returns its ending."""
    dice, kind = asked.dice, asked.kind
    prompt = asked.prompt * 600 if kind == "long" else asked.prompt
    streams = kind in ("stream", "leave", "slow")
    tokens = -1 if kind == "wrong" else asked.tokens
    body = {"prompt": prompt, "max_tokens": tokens, "ignore_eos": True, "stream": streams}
    raw = b"{" * 50 if kind == "malformed" else json.dumps(body).encode()
    size = 10**9 if kind == "huge" else len(raw) + 100 * (kind == "half")
    started = time.monotonic()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(f"{HEAD}content-length: {size}\r\n\r\n".encode() + raw)
        if kind in ("leave", "half"):
            await asyncio.sleep(dice.random() ** 3 * 3)
            return "left"
        status, events = 0, []
        async for line in reader:
            if not status:
                status = int(line.split()[1])
            if line.startswith(b"data: "):
                if kind == "slow":
                    await asyncio.sleep(dice.random() * 0.3)
                if not events and kind == "stream":
                    book.first["http"].append(time.monotonic() - started)
                events.append(line[6:].strip())
            elif status == 200 and line.startswith(b'{"id"'):
                events.append(line)
    finally:
        writer.close()
    due = {"malformed": 400, "wrong": 400, "long": 400, "huge": 413}.get(kind, 200)
    if status == 429 and due == 200:
        return "queue full"
    if status != due:
        raise Wrong(f"status {status} instead of {due}: {events[:1]}")
    if due == 200:
        _check_events(events, streams, asked.tokens)
        book.whole["http"].append(time.monotonic() - started)
    return "answered" if due == 200 else "refused"


def _check_events(events: list[bytes], streams: bool, tokens: int) -> None:
    """One ending: all tokens, one finish reason and, streamed, one [DONE], which is the last."""
    dones = [i for i, event in enumerate(events) if event == b"[DONE]"]
    if dones != ([len(events) - 1] if streams else []):
        raise Wrong(f"[DONE] at {dones} of {len(events)} events, the last {events[-1:]}")
    choices = [choice for event in events if event != b"[DONE]" for choice in json.loads(event)["choices"]]
    reasons = [choice["finish_reason"] for choice in choices if choice["finish_reason"] is not None]
    if reasons != ["length"]:
        raise Wrong(f"finish reasons {reasons}")
    if not streams and json.loads(events[0])["usage"]["completion_tokens"] != tokens:
        raise Wrong(f"{events[0][-300:]!r} has not {tokens} tokens")


GRPC_KINDS = {"whole": 4, "stream": 6, "cancel": 3, "slow": 1, "late": 1, "wrong": 1, "long": 1}


async def over_grpc(client: AsyncClient, asked: Asked, book: Book) -> str:
    kind = asked.kind
    tokens = -1 if kind == "wrong" else 150 if kind == "late" else asked.tokens
    prompt = asked.prompt * 600 if kind == "long" else asked.prompt
    request = Request(prompt_token_ids=prompt, sampling=SamplingParams(max_tokens=tokens, ignore_eos=True))
    started = time.monotonic()
    try:
        if kind in ("stream", "cancel", "slow"):
            if await _read(client, request, asked, book, started) == "left":
                return "left"
        else:
            answer = await client.generate(request, timeout=0.3 if kind == "late" else None)
            [completion] = answer.output.completions
            if kind in ("wrong", "long") or (completion.finish_reason, len(completion.token_ids)) != ("length", tokens):
                raise Wrong(f"{completion.finish_reason} after {len(completion.token_ids)} of {tokens} tokens")
    except QueueFullError:
        return "queue full"
    except RequestError as error:
        if kind not in ("wrong", "long"):
            raise Wrong(str(error)) from error
        return "refused"
    except grpc.aio.AioRpcError as error:
        if kind != "late" or error.code() is not grpc.StatusCode.DEADLINE_EXCEEDED:
            raise Wrong(f"{error.code()}: {error.details()}") from error
        return "late"
    book.whole["grpc"].append(time.monotonic() - started)
    return "answered"


async def _read(client: AsyncClient, request: Request, asked: Asked, book: Book, started: float) -> str:
    stream, seen, reasons = client.stream(request), 0, []
    stop_at = asked.dice.randint(0, asked.tokens) if asked.kind == "cancel" else None
    async for delta in stream:
        if not seen and asked.kind == "stream":
            book.first["grpc"].append(time.monotonic() - started)
        seen += len(delta.token_ids)
        reasons += [delta.finish_reason] if delta.finish_reason else []
        if stop_at is not None and seen >= stop_at:
            stream.cancel()
            return "left"
        if asked.kind == "slow":
            await asyncio.sleep(asked.dice.random() * 0.3)
    if reasons != ["length"] or seen != asked.tokens:
        raise Wrong(f"finish reasons {reasons} after {seen} of {asked.tokens} tokens")
    return "answered"


async def client_of(number: int, ways: Ways, until: float, book: Book, vocab: int, clock: Clock) -> None:
    """One client, call after call."""
    dice = random.Random(number)
    while time.monotonic() < until:
        protocol = dice.choice(list(ways))
        asked = Asked.draw(dice, HTTP_KINDS if protocol == "http" else GRPC_KINDS, vocab)
        try:
            ending = await clock.patiently(ways[protocol](asked))
        except (Wrong, OSError, TimeoutError, ValueError, IndexError, KeyError) as error:
            ending = "WRONG"
            book.faults.append(f"{protocol} {asked.kind}: {type(error).__name__}: {error}")
        book.endings[f"{protocol} {asked.kind}"][ending] += 1
        if ending == "queue full":
            await asyncio.sleep(dice.random() * 2)


@dataclass
class Sample:
    seconds: float
    open_files: float
    resident_bytes: float


def metrics(url: str) -> dict[str, float]:
    """Name with labels -> value, of what the server says of itself."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=60) as reply:
        lines = reply.read().decode().splitlines()
    return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))}


async def watch(url: str, samples: list[Sample]) -> None:
    """Follow the server's files and memory."""
    started = time.monotonic()
    while True:
        now = await asyncio.to_thread(metrics, url)
        files, memory = now["process_open_fds"], now["process_resident_memory_bytes"]
        samples.append(Sample(time.monotonic() - started, files, memory))
        await asyncio.sleep(SAMPLE_SECONDS)


def status(url: str) -> dict[str, Any]:
    with urllib.request.urlopen(f"{url}/v1/internal/status", timeout=60) as reply:
        return json.load(reply)


async def settled(url: str) -> list[str]:
    """What the server still holds when nobody asks for anything any more."""
    held: list[str] = []
    for _ in range(200):
        now = await asyncio.to_thread(status, url)
        pools = {name: now[name]["used"] for name in ("pages", "slots", "snapshots") if name in now}
        left = {"running": now["running"], "waiting": now["waiting"], "calls": now["calls"]} | pools
        held = [f"{count} {name} not given back" for name, count in left.items() if count]
        if not held:
            break
        await asyncio.sleep(0.1)
    return held


async def soak(facts: dict[str, Any], streams: int, seconds: float, book: Book) -> dict[str, Any]:
    """The whole of it; returns the figures."""
    url, port = f"http://{facts['http']}", int(facts["http"].rpartition(":")[2])
    samples: list[Sample] = []
    async with AsyncClient(facts["grpc"]) as client:
        vocab = (await client.model_info()).vocab_size
        before = await asyncio.to_thread(metrics, url)
        ways: Ways = {
            "http": lambda asked: over_http(port, asked, book),
            "grpc": lambda asked: over_grpc(client, asked, book),
        }
        clock = Clock()
        watchers = [asyncio.create_task(work) for work in (watch(url, samples), clock.run())]
        until = time.monotonic() + seconds
        await asyncio.gather(*(client_of(number, ways, until, book, vocab, clock) for number in range(streams)))
        for watcher in watchers:
            watcher.cancel()
    book.faults += await settled(url)
    await asyncio.sleep(1)
    after = await asyncio.to_thread(metrics, url)
    book.faults += list(_unclean(before, after, samples))
    return {
        "calls": sum(endings.total() for endings in book.endings.values()),
        "endings": {kind: dict(endings) for kind, endings in sorted(book.endings.items())},
        "held_up_seconds": round(clock.held_up, 1),
        "tokens_per_second": (_of(after, "generation_tokens_total") - _of(before, "generation_tokens_total")) / seconds,
        "latency_seconds": {
            what: {protocol: _quantiles(values) for protocol, values in seen.items()}
            for what, seen in (("first_token", book.first), ("whole_answer", book.whole))
        },
        "open_files": {"before": before["process_open_fds"], "after": after["process_open_fds"]},
        "resident_megabytes": {
            "before": before["process_resident_memory_bytes"] / 1e6,
            "early": _memory(samples, 0.2, 0.4) / 1e6,
            "late": _memory(samples, 0.8, 1.0) / 1e6,
            "after": after["process_resident_memory_bytes"] / 1e6,
        },
    }


def _unclean(before: dict[str, float], after: dict[str, float], samples: list[Sample]) -> Iterator[str]:
    """What the server's own figures say against it."""
    for name in ("compilations_after_ready", "failed_steps_total", "failed_sequences_total", "nan_events_total"):
        if _of(after, name):
            yield f"{name} is {_of(after, name):g}"
    if failed := after['jhybrid_requests_total{outcome="failed"}']:
        yield f"{failed:g} calls failed"
    if after["process_open_fds"] > before["process_open_fds"] + 5:
        yield f"{after['process_open_fds']:g} files are open, {before['process_open_fds']:g} were"
    early, late = _memory(samples, 0.2, 0.4), _memory(samples, 0.8, 1.0)
    if late > 1.05 * early + 16e6:
        yield f"memory grew from {early / 1e6:.0f} to {late / 1e6:.0f} MB"


def _of(now: dict[str, float], name: str) -> float:
    return now[f"jhybrid_{name}"]


def _memory(samples: list[Sample], start: float, end: float) -> float:
    """Median bytes between two shares of the time."""
    last = samples[-1].seconds
    return statistics.median(s.resident_bytes for s in samples if start * last <= s.seconds <= end * last)


def _quantiles(values: list[float]) -> dict[str, float]:
    ordered = sorted(values)
    return {name: ordered[int(share * (len(ordered) - 1))] for name, share in (("p50", 0.5), ("p99", 0.99))}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--streams", type=int, default=200)
    parser.add_argument("--output", type=Path, help="file for the figures as JSON")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    parser.add_argument("flags", nargs="*", help="of jhybrid serve, after --")
    arguments = parser.parse_args()
    command = [sys.executable, "-m", "jhybrid.cli", "serve", "--json", "--port", "0", "--grpc-port", "0"]
    book = Book()
    with subprocess.Popen([*command, *(arguments.flags or FLAGS)], stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            line = server.stdout.readline()
            if not line:
                sys.exit(server.wait())
            figures = asyncio.run(soak(json.loads(line), arguments.streams, arguments.seconds, book))
            server.terminate()
            if server.wait(60) != 0:
                book.faults.append(f"SIGTERM ended the server with {server.returncode}")
        finally:
            server.kill()
    machine = {"python": platform.python_version(), "cores": os.cpu_count(), "machine": platform.machine()}
    asked = f"python benchmarks/soak.py --seconds {arguments.seconds:g} --streams {arguments.streams}"
    figures = {"command": asked, "machine": machine, "faults": book.faults} | figures
    if arguments.output is not None:
        arguments.output.write_text(json.dumps(figures, indent=1) + "\n")
    print(json.dumps(figures) if arguments.json else as_text(figures))
    sys.exit(1 if book.faults else 0)


def as_text(figures: dict[str, Any]) -> str:
    lines = [f"{figures['calls']} calls, {figures['tokens_per_second']:.0f} tokens/s"]
    if figures["held_up_seconds"]:
        lines.append(f"the machine held this process up for {figures['held_up_seconds']:g} s")
    lines += [
        f"  {kind:16} {', '.join(f'{n} {e}' for e, n in ends.items())}" for kind, ends in figures["endings"].items()
    ]
    for what, seen in figures["latency_seconds"].items():
        for protocol, of in seen.items():
            lines.append(f"{what.replace('_', ' ')}, {protocol}: p50 {of['p50']:.3f} s, p99 {of['p99']:.3f} s")
    for what in ("open_files", "resident_megabytes"):
        lines.append(f"{what.replace('_', ' ')}: " + ", ".join(f"{v:.0f} {k}" for k, v in figures[what].items()))
    lines += [f"FAULT: {fault}" for fault in figures["faults"][:50]] or ["no fault"]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
