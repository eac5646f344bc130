"""What the servers cost over the engine alone: tokens per second and time to first token, by number of streams.

    python benchmarks/server.py [--streams 1 32 200] [--tokens 64] [--repeats 3] [--output FILE] [-- FLAGS]

The demo model in turns, so that each answer of the server has a partner: the engine in this process, and
`jhybrid serve` with FLAGS in another one, asked from here over gRPC and HTTP. Server and client share the machine's
cores with the engine, and the client's part is in the figures; how much CPU time each process had per token, and of the
server's the event loop, says whose part is how large. What `--output` has of other numbers of streams, measured with
the same tokens, repeats and flags, is kept, so that they can be measured one by one. Needs Linux.
"""

import argparse
import asyncio
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import grpc.aio

from jhybrid import Engine, EngineConfig, Request, SamplingParams
from jhybrid_server import wire

CONFIG = EngineConfig(model="demo", max_num_seqs=32, max_model_len=1024)
Figures = dict[str, float]
Results = dict[str, dict[str, list[Figures]]]
"""Way -> number of streams -> a figure per turn."""
First = Callable[[], None]
"""Told when a stream has its first token."""


def request(number: int, tokens: int) -> Request:
    return Request(
        prompt=f"My lord, {number}", sampling=SamplingParams(max_tokens=tokens, ignore_eos=True, seed=number)
    )


def figures(seconds: float, firsts: list[float], streams: int, tokens: int) -> Figures:
    return {"tokens_per_second": streams * tokens / seconds, "first_token_ms": statistics.median(firsts) * 1e3}


def engine_alone(engine: Engine, streams: int, tokens: int) -> Figures:
    started, firsts = time.perf_counter(), {}
    for number in range(streams):
        engine.submit(request(number, tokens))
    while engine.has_work:
        for delta in engine.step():
            firsts.setdefault(delta.request_id, time.perf_counter() - started)
    return figures(time.perf_counter() - started, list(firsts.values()), streams, tokens)


async def over_grpc(channel: grpc.aio.Channel, number: int, tokens: int, first: First) -> None:
    """With as little client as there can be, which leaves messages unread, so that the server's cost is what shows."""
    generate = channel.unary_stream("/jhybrid.v1.InferenceService/Generate")
    async for _ in generate(wire.request_to_wire(request(number, tokens)).SerializeToString()):
        first()


async def over_http(port: int, number: int, tokens: int, first: First) -> None:
    """With as little client as there can be."""
    sampling = {"max_tokens": tokens, "ignore_eos": True, "seed": number, "stream": True}
    body = json.dumps({"prompt": f"My lord, {number}"} | sampling).encode()
    head = "POST /v1/completions HTTP/1.1\r\nhost: bench\r\nconnection: close\r\ncontent-type: application/json\r\n"
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
    seen = b""
    while line := await reader.readline():
        if line.startswith(b"data:"):
            first()
            seen = line
    assert b"[DONE]" in seen, seen
    writer.close()


async def served(stream: Callable[[int, First], Awaitable[None]], streams: int, tokens: int) -> Figures:
    started, firsts = time.perf_counter(), {}

    async def one(number: int) -> None:
        await stream(number, lambda: firsts.setdefault(number, time.perf_counter() - started))

    await asyncio.gather(*(one(number) for number in range(streams)))
    return figures(time.perf_counter() - started, list(firsts.values()), streams, tokens)


def cpu_seconds(pid: int, thread: str = "*") -> float:
    """CPU time of a process, or of one thread of it, as the scheduler counts it: to the nanosecond."""
    return sum(int(file.read_text().split()[0]) for file in Path(f"/proc/{pid}/task").glob(f"{thread}/schedstat")) / 1e9


async def measure(engine: Engine, address: dict, pid: int, counts: list[int], tokens: int, repeats: int) -> Results:
    """Figures of the engine alone and of both protocols, in turns, by number of streams."""
    port = int(address["http"].rpartition(":")[2])
    clocks: dict[str, Callable[[], float]] = {
        "client_cpu_us": lambda: cpu_seconds(os.getpid()),
        "server_cpu_us": lambda: cpu_seconds(pid),
        "loop_cpu_us": lambda: cpu_seconds(pid, str(pid)),  # the main thread
    }
    async with grpc.aio.insecure_channel(address["grpc"]) as channel:

        async def alone(streams: int) -> Figures:
            return engine_alone(engine, streams, tokens)

        async def asked_over_grpc(streams: int) -> Figures:
            return await served(lambda number, first: over_grpc(channel, number, tokens, first), streams, tokens)

        async def asked_over_http(streams: int) -> Figures:
            return await served(lambda number, first: over_http(port, number, tokens, first), streams, tokens)

        ways = {"engine": alone, "grpc": asked_over_grpc, "http": asked_over_http}
        for way in ways.values():
            await way(1)  # connections, imports and the like
        results: Results = {name: {str(streams): [] for streams in counts} for name in ways}
        for streams in counts:
            for turn in range(repeats):
                for name in (*ways, *ways)[turn % 3 : turn % 3 + 3]:
                    before = {what: clock() for what, clock in clocks.items()}
                    found = await ways[name](streams)
                    used = {what: clocks[what]() - was for what, was in before.items()}
                    if name == "engine":  # which is in this process
                        used = {"server_cpu_us": used["client_cpu_us"]}
                    per_token = {what: seconds / (streams * tokens) * 1e6 for what, seconds in used.items()}
                    results[name][str(streams)].append(found | per_token)
    return results


def print_table(results: Results) -> None:
    """Medians, and those of each turn's share of the engine's speed and of what it adds to its first token.

    CPU time is in microseconds per token.
    """
    print(f"{'':8}{'streams':>8}{'tokens/s':>10}{'of engine':>10}{'first token ms':>16}{'added ms':>10}", end="")
    print(f"{'server CPU':>12}{'its loop':>10}{'client CPU':>12}")
    for name, by_streams in results.items():
        for streams, runs in by_streams.items():
            pairs = list(zip(runs, results["engine"][streams], strict=True))
            speed = statistics.median(run["tokens_per_second"] for run in runs)
            share = statistics.median(run["tokens_per_second"] / own["tokens_per_second"] for run, own in pairs)
            first = statistics.median(run["first_token_ms"] for run in runs)
            added = statistics.median(run["first_token_ms"] - own["first_token_ms"] for run, own in pairs)
            sides = ("server", "loop", "client")
            cpu = [statistics.median(run.get(f"{side}_cpu_us", 0.0) for run in runs) for side in sides]
            print(f"{name:8}{streams:>8}{speed:>10.0f}{share:>10.0%}{first:>16.1f}{added:>10.1f}", end="")
            print(f"{cpu[0]:>12.0f}{cpu[1]:>10.0f}{cpu[2]:>12.0f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 32, 200])
    parser.add_argument("--tokens", type=int, default=64, help="of each answer")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--output", type=Path, help="file for the figures as JSON")
    parser.add_argument("flags", nargs="*", help="of jhybrid serve, after --")
    asked = parser.parse_args()
    flags = ["--max-num-seqs", str(CONFIG.max_num_seqs), "--max-model-len", str(CONFIG.max_model_len), *asked.flags]
    command = [sys.executable, "-m", "jhybrid.cli", "serve", *flags, "--port", "0", "--grpc-port", "0", "--json"]
    with (
        Engine(CONFIG) as engine,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as server,
    ):
        assert server.stdout is not None
        try:
            address = json.loads(server.stdout.readline())
            results = asyncio.run(measure(engine, address, server.pid, asked.streams, asked.tokens, asked.repeats))
        finally:
            server.terminate()
    print_table(results)
    if asked.output is not None:
        write(asked.output, results, {"tokens": asked.tokens, "repeats": asked.repeats, "flags": asked.flags})


def write(path: Path, results: Results, how: dict) -> None:
    """The figures, beside those of other numbers of streams that were measured likewise."""
    machine = {"python": platform.python_version(), "cores": os.cpu_count(), "machine": platform.machine()}
    facts = {"command": "python benchmarks/server.py", "measured": how, "machine": machine}
    before = json.loads(path.read_text()) if path.exists() else {}
    if {name: before.get(name) for name in facts} == facts:
        results = {name: before["results"][name] | by_streams for name, by_streams in results.items()}
    path.write_text(json.dumps(facts | {"results": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
