"""What the servers cost over the engine alone: tokens per second and time to first token, by number of streams.

    python benchmarks/server.py [--tokens 64] [--repeats 3] [--output benchmarks/results/NAME.json]

The demo model in turns, so that each answer of the server has a partner: the engine in this process, and
`jhybrid serve` in another one, asked from here over gRPC and HTTP. Server and client share the machine's cores with the
engine, and the client's part is in the figures.
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

from jhybrid import Engine, EngineConfig, Request, SamplingParams
from jhybrid_server.client import AsyncClient

CONFIG = EngineConfig(model="demo", max_num_seqs=32, max_model_len=1024)
STREAMS = (1, 32, 200)
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


async def over_grpc(client: AsyncClient, number: int, tokens: int, first: First) -> None:
    async for delta in client.stream(request(number, tokens)):
        if delta.token_ids:
            first()


async def over_http(port: int, number: int, tokens: int, first: First) -> None:
    """With as little client as there can be, so that the server's cost is what shows."""
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


async def measure(engine: Engine, address: dict, tokens: int, repeats: int) -> Results:
    """Figures of the engine alone and of both protocols, in turns, by number of streams."""
    port = int(address["http"].rpartition(":")[2])
    async with AsyncClient(address["grpc"]) as client:

        async def alone(streams: int) -> Figures:
            return engine_alone(engine, streams, tokens)

        async def grpc(streams: int) -> Figures:
            return await served(lambda number, first: over_grpc(client, number, tokens, first), streams, tokens)

        async def http(streams: int) -> Figures:
            return await served(lambda number, first: over_http(port, number, tokens, first), streams, tokens)

        ways = {"engine": alone, "grpc": grpc, "http": http}
        for way in ways.values():
            await way(1)  # connections, imports and the like
        results: Results = {name: {str(streams): [] for streams in STREAMS} for name in ways}
        for streams in STREAMS:
            for turn in range(repeats):
                for name in (*ways, *ways)[turn % 3 : turn % 3 + 3]:
                    results[name][str(streams)].append(await ways[name](streams))
    return results


def print_table(results: Results) -> None:
    """Medians, and those of each turn's share of the engine's speed and of what it adds to its first token."""
    print(f"{'':8}{'streams':>8}{'tokens/s':>10}{'of engine':>10}{'first token ms':>16}{'added ms':>10}")
    for name, by_streams in results.items():
        for streams, runs in by_streams.items():
            pairs = list(zip(runs, results["engine"][streams], strict=True))
            speed = statistics.median(run["tokens_per_second"] for run in runs)
            share = statistics.median(run["tokens_per_second"] / own["tokens_per_second"] for run, own in pairs)
            first = statistics.median(run["first_token_ms"] for run in runs)
            added = statistics.median(run["first_token_ms"] - own["first_token_ms"] for run, own in pairs)
            print(f"{name:8}{streams:>8}{speed:>10.0f}{share:>10.0%}{first:>16.1f}{added:>10.1f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=64, help="of each answer")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--output", type=Path, help="file for the figures as JSON")
    arguments = parser.parse_args()
    tokens, repeats = arguments.tokens, arguments.repeats
    flags = ["--max-num-seqs", str(CONFIG.max_num_seqs), "--max-model-len", str(CONFIG.max_model_len)]
    command = [sys.executable, "-m", "jhybrid.cli", "serve", *flags, "--port", "0", "--grpc-port", "0", "--json"]
    with (
        Engine(CONFIG) as engine,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as server,
    ):
        assert server.stdout is not None
        try:
            results = asyncio.run(measure(engine, json.loads(server.stdout.readline()), tokens, repeats))
        finally:
            server.terminate()
    print_table(results)
    if arguments.output is not None:
        machine = {"python": platform.python_version(), "cores": os.cpu_count(), "machine": platform.machine()}
        text = {"command": f"python benchmarks/server.py --tokens {tokens} --repeats {repeats}", "machine": machine}
        arguments.output.write_text(json.dumps(text | {"results": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
