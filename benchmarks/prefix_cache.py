"""Prefix caching: hit rates of policies at equal memory, what the books cost, and what a hit saves.

    python benchmarks/prefix_cache.py [--only traces books turn dtypes] [--output FILE.json]

`traces` replays synthetic traces (`traces.py`) on the ledger alone, with the shape of an 8B hybrid; it needs no device.
`books` times matching and publishing with 100,000 cached nodes. `turn` is the time to the first token of the second
turn of a 2,000-token chat on the demo model, hit against cold. `dtypes` compares ways of storing snapshots.
"""

import argparse
import itertools
import json
import platform
import statistics
import time
from pathlib import Path

import jax
import numpy as np
from rich.console import Console
from rich.progress import track
from rich.table import Table
from traces import TRACES

from jhybrid import Engine, EngineConfig, Request, SamplingParams
from jhybrid.cache.eviction import Cost, Policy
from jhybrid.cache.ledger import Hit, Ledger
from jhybrid.cache.replay import Visit, replay, sequence_of
from jhybrid.cache.tuning import Tuner
from jhybrid.sequence import Sequence

PAGE = 16
STATE_BYTES = 24 * 128 * 64 * 128 * 4  # of Nemotron-H-8B: 24 Mamba2 layers, float32
PAGE_BYTES = 4 * 2 * 8 * 128 * 2 * PAGE  # its 4 attention layers, bfloat16
COST = Cost(
    flops_per_token=2 * 8.1e9,
    flops_per_position=4 * 4096 * 4,
    page_size=PAGE,
    page_bytes=PAGE_BYTES,
    slot_bytes=STATE_BYTES,
)
CONSOLE = Console()


class Fixed(Ledger):
    """Snapshots at boundaries that do not depend on what is cached, and none is taken back."""

    def _wanted(self, sequence: Sequence, start: int, end: int) -> list[int]:
        """Boundaries in (start, end] at which to leave one."""
        raise NotImplementedError

    def _targets(self, sequence: Sequence, hit: Hit) -> list[int]:
        return []

    def snapshots_for(self, sequence: Sequence, first_pos: int, num_tokens: int) -> dict[int, int]:
        holding = sequence.holding
        assert holding is not None
        rows = {at: self._take_snapshot(None) for at in self._wanted(sequence, first_pos, first_pos + num_tokens)}
        holding.snapshots |= {at: row for at, row in rows.items() if row is not None}
        return holding.snapshots


class EveryN(Fixed):
    """What common engines do: a state at every so many tokens of prompt and answer, and nowhere else."""

    interval = 512

    def _wanted(self, sequence: Sequence, start: int, end: int) -> list[int]:
        return list(range((start // self.interval + 1) * self.interval, end + 1, self.interval))


class LastOnly(Fixed):
    """The state at the last page boundary of the prompt, and nowhere else."""

    def _wanted(self, sequence: Sequence, start: int, end: int) -> list[int]:
        last = (sequence.prompt_len - 1) // self.page_size * self.page_size
        return [last] if start < last <= end else []


def books(kind: type[Ledger], alpha: float, memory: float, state_bytes: int = STATE_BYTES) -> Ledger:
    """A ledger over `memory` bytes, half of them for snapshots."""
    snapshots, pages = int(memory / 2 / state_bytes), int(memory / 2 / PAGE_BYTES)
    policy = Policy(COST, alpha=alpha, span=snapshots)
    return kind(page_size=PAGE, num_pages=pages, num_slots=1, num_rows=1, num_snapshots=snapshots, policy=policy)


def bound(visits: list[Visit]) -> int:
    """Tokens that any cache could have saved, with room for everything and a state at every page."""
    seen: set[int] = set()
    total = 0
    for visit in visits:
        chain = _chain(visit.prompt + visit.answer[:-1])
        known = itertools.takewhile(seen.__contains__, chain[: (len(visit.prompt) - 1) // PAGE])
        total += sum(1 for _ in known) * PAGE
        seen.update(chain)
    return total


def _chain(tokens: list[int]) -> list[int]:
    """A hash of every prefix of whole pages."""
    pages = (tuple(tokens[at : at + PAGE]) for at in range(0, len(tokens) // PAGE * PAGE, PAGE))
    return list(itertools.accumulate(pages, lambda value, page: hash((value, page)), initial=0))[1:]


def run_trace(
    visits: list[Visit], kind: type[Ledger], policy: str, memory: float, state_bytes: int = STATE_BYTES
) -> int:
    ledger = books(kind, 0.0, memory, state_bytes)
    assert ledger.tree is not None
    tuner = Tuner(ledger.tree.policy, lambda alpha: books(kind, alpha, memory, state_bytes))
    saved = 0
    for visit in visits:
        saved += replay(ledger, visit)
        if policy == "flop_aware":
            tuner.saw(visit.salt, visit.prompt + visit.answer, len(visit.prompt))
            while tuner.turn(ledger.tree.evicted_snapshots + ledger.tree.evicted_pages > 0):
                pass
    return saved


def every(interval: int) -> type[Ledger]:
    return type(f"Every{interval}", (EveryN,), {"interval": interval})


POLICIES = {
    "every 256 tokens, lru": (every(256), "lru"),
    "every 512 tokens, lru": (every(512), "lru"),
    "every 1024 tokens, lru": (every(1024), "lru"),
    "last state only, lru": (LastOnly, "lru"),
    "jhybrid, lru": (Ledger, "lru"),
    "jhybrid, flop_aware": (Ledger, "flop_aware"),
}


def traces(memories: tuple[float, ...] = (5e9, 10e9, 20e9, 40e9)) -> dict:
    """Token hit rates of every policy on every trace, at several sizes of cache."""
    figures: dict = {}
    for name, make in TRACES.items():
        visits = make(np.random.default_rng(0))
        asked = sum(len(visit.prompt) for visit in visits)
        best = bound(visits) / asked
        rates = {
            policy: [run_trace(visits, kind, how, memory) / asked for memory in memories]
            for policy, (kind, how) in track(POLICIES.items(), description=name, console=CONSOLE, transient=True)
        }
        figures[name] = {"requests": len(visits), "prompt_tokens": asked, "bound": best, "hit_rates": rates}
        table = Table("policy", *(f"{memory / 1e9:.0f} GB" for memory in memories), title=name)
        for policy, row in rates.items():
            table.add_row(policy, *(f"{rate:.1%}" for rate in row))
        table.add_row("nothing is ever forgotten", *[f"{best:.1%}"] * len(memories))
        CONSOLE.print(table)
    return {"memory_bytes": memories, "traces": figures}


def cost_of_books(nodes: int = 100_000) -> dict:
    """Milliseconds for matching, admitting and publishing one request of 2,000 tokens with so many nodes cached."""
    ledger = books(Ledger, 1.0, 4e12)
    rng = np.random.default_rng(0)
    prefixes = []
    assert ledger.tree is not None
    while ledger.tree.num_nodes < nodes:
        prefixes.append(rng.integers(0, 1 << 30, 2000).tolist())
        replay(ledger, Visit(None, prefixes[-1], [1]))
    times: dict[str, list[float]] = {"match": [], "all": []}
    for i in range(300):
        known = prefixes[int(rng.integers(len(prefixes)))]
        visit = Visit(None, known + [i] * 200, [1] * 64)
        started = time.perf_counter()
        ledger.match(sequence_of(visit))
        times["match"].append(1e3 * (time.perf_counter() - started))
        started = time.perf_counter()
        replay(ledger, visit)
        times["all"].append(1e3 * (time.perf_counter() - started))
    figures = {f"{name}_ms": statistics.median(values) for name, values in times.items()} | {
        "nodes": ledger.tree.num_nodes
    }
    CONSOLE.print(figures)
    return figures


def second_turn(repeats: int = 5) -> dict:
    """Seconds to the first token of the second turn of a 2,000-token chat on the demo model."""
    config = EngineConfig(max_num_seqs=2, max_num_batched_tokens=512, enable_prefix_caching=True)
    rng = np.random.default_rng(0)
    times: dict[str, list[float]] = {"cold": [], "hit": []}
    with Engine(config) as engine:
        length = min(2000, engine.model.max_model_len - 200)

        def first_token(prompt: list[int]) -> float:
            started = time.perf_counter()
            for delta in engine.stream(Request(prompt_token_ids=prompt, sampling=SamplingParams(max_tokens=1))):
                assert delta.token_ids
            return time.perf_counter() - started

        for _ in range(repeats):
            said = rng.integers(0, 256, length).tolist()
            sampling = SamplingParams(max_tokens=64, ignore_eos=True, temperature=0.0)
            [turn] = engine.generate([Request(prompt_token_ids=said, sampling=sampling)])
            follow_up = said + turn.token_ids + rng.integers(0, 256, 40).tolist()
            times["hit"].append(first_token(follow_up))
            engine.flush_cache()
            times["cold"].append(first_token(follow_up))
            engine.flush_cache()
    figures = {name: statistics.median(values) for name, values in times.items()}
    figures |= {"ratio": figures["cold"] / figures["hit"], "prompt_tokens": length + 104}
    CONSOLE.print(figures)
    return figures


def dtypes() -> dict:
    """What storing snapshots in fewer bits does to log-probabilities, and what the room it makes does to hit rates."""
    rng, figures = np.random.default_rng(0), {}
    text = (Path(__file__).parents[1] / "LICENSE").read_text()
    agents = TRACES["agents"](np.random.default_rng(0))
    asked = sum(len(visit.prompt) for visit in agents)
    for dtype, share in (("auto", 1.0), ("bfloat16", 0.5), ("int8", 0.25 + 1 / 64)):
        config = EngineConfig(
            max_num_seqs=2,
            max_num_batched_tokens=128,
            enable_prefix_caching=True,
            snapshot_slots=16,
            snapshot_dtype=dtype,
        )
        with Engine(config) as engine:
            assert engine.tokenizer is not None
            tokens = engine.tokenizer.encode(text)
            differences = []
            for _ in range(20):
                start, length = int(rng.integers(len(tokens) - 600)), int(rng.integers(100, 500))
                prompt = tokens[start : start + length]
                sampling = SamplingParams(max_tokens=16, temperature=0.0, logprobs=5, ignore_eos=True)
                cold, hit = (
                    engine.generate([Request(prompt_token_ids=prompt, sampling=sampling)])[0] for _ in range(2)
                )
                assert hit.cached_tokens > 0 and cold.logprobs and hit.logprobs
                same = [a == b for a, b in zip(cold.token_ids, hit.token_ids, strict=True)]
                upto = same.index(False) if False in same else len(same)
                for a, b in zip(cold.logprobs[:upto], hit.logprobs[:upto], strict=True):
                    differences += [abs(value - dict(b)[token]) for token, value in a if token in dict(b)]
                engine.flush_cache()
            memory, state_bytes = engine.runner.memory, engine.model.router.bytes_per_slot
        figures[dtype] = {
            "bytes_per_snapshot": (memory.snapshots - memory.num_staged * state_bytes) // memory.num_snapshots,
            "largest_logprob_difference": max(differences),
            "mean_logprob_difference": statistics.fmean(differences),
            "agents_hit_rate_10_GB": run_trace(agents, Ledger, "flop_aware", 10e9, int(STATE_BYTES * share)) / asked,
        }
        CONSOLE.print(dtype, figures[dtype])
    return figures


SECTIONS = {"traces": traces, "books": cost_of_books, "turn": second_turn, "dtypes": dtypes}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=SECTIONS, default=list(SECTIONS))
    parser.add_argument("--output", type=Path, help="file for the figures as JSON")
    arguments = parser.parse_args()
    figures = {name: SECTIONS[name]() for name in arguments.only}
    if arguments.output is not None:
        machine = {"processor": platform.machine(), "python": platform.python_version(), "jax": jax.__version__}
        command = "python benchmarks/prefix_cache.py"
        arguments.output.write_text(json.dumps({"command": command, "machine": machine, **figures}, indent=1) + "\n")


if __name__ == "__main__":
    main()
