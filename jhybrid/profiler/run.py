"""A profile: planned, measured point by point into a journal, then fitted. A killed run goes on where it was."""

import errno
import hashlib
import json
import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np

from jhybrid.batch import Bucket
from jhybrid.engine import Engine
from jhybrid.errors import ConfigError
from jhybrid.evaluate.journal import Journal, read_journal
from jhybrid.machine import machine
from jhybrid.profiler.config import ProfileConfig
from jhybrid.profiler.floor import Floor, make_floor, measure_bandwidth
from jhybrid.profiler.latency import MODEL_FILE, LatencyModel, Observation
from jhybrid.profiler.measure import measure
from jhybrid.profiler.plan import Layout, Planned, Point, plan, resolve_state_mode
from jhybrid.profiler.stage import Stage

FORMAT = 1
ROWS_FILE = "rows.jsonl"

WRITTEN = {
    "measured": (
        *("seconds", "spread", "repeats", "buckets", "steps", "floor_seconds"),
        *(field.name for field in fields(Point)),
    ),
    "skipped": ("reason", "detail"),
}
"""What is read of rows, by their status."""

Row = dict[str, Any]


@dataclass(frozen=True)
class Profile:
    """What was measured: the artifact's head, a row for each point, and the summary; None until it is whole."""

    head: dict[str, Any]
    rows: list[Row]
    summary: dict[str, Any] | None

    @property
    def measured(self) -> list[Row]:
        return [row for row in self.rows if row["status"] == "measured"]

    @property
    def skipped(self) -> list[Row]:
        return [row for row in self.rows if row["status"] == "skipped"]


def read_profile(path: Path) -> Profile:
    """From a folder that `run_profile` filled, or its rows. Raises ConfigError for anything else."""
    path = path / ROWS_FILE if path.is_dir() else path
    try:
        if not path.is_file():
            raise ValueError("no such file" if not path.exists() else "it is no file")
        entries = read_journal(path)
        if not entries or entries[0].get("format") != FORMAT:
            raise ValueError(f"its first line is not the head of format {FORMAT}")
        _check_rows(entries[1:])
    except (OSError, ValueError) as error:
        remedy = f"name a folder that `jhybrid profile --output` filled, or its {ROWS_FILE}"
        raise ConfigError("compare", f"{path} is no profile: {error}; {remedy}") from error
    return _profile(entries[0], entries[1:])


def _check_rows(entries: list[dict[str, Any]]) -> None:
    """What follows a head must have what `run_profile` writes. Raises ValueError for a row that was changed."""
    for number, entry in enumerate(entries, 2):
        wanted = ("status", *WRITTEN.get(str(entry.get("status")), ())) if "point" in entry else ()
        absent = [name for name in wanted if name not in entry]
        if absent:
            raise ValueError(f"the point in line {number} has no {', '.join(absent)}")


def run_profile(
    engine: Engine,
    config: ProfileConfig,
    output: Path,
    progress: Callable[[int], Callable[[int], None]] = lambda total: lambda done: None,
) -> Profile:
    """Measure every point that is not in `output` yet; leave there rows.jsonl and latency_model.json.

    The engine must be idle, and made with `max_parked` of at least `config.chains`. Afterwards it holds what it held
    before, its prefix cache is empty, and what it answers is what it would have answered. `progress` is told the
    number of points and returns what is told of each that is done. Raises ConfigError for another engine or if `output`
    has another profile or none, StepError if a step fails; then the rows so far are kept, and a later call goes on.
    """
    layout = layout_of(engine)
    parked = layout.rows - layout.max_num_seqs
    if parked < config.chains:
        raise ConfigError(
            "chains",
            f"{config.chains} given, but the engine has room for {parked} beside max_num_seqs={layout.max_num_seqs}; "
            f"make it with max_parked={config.chains}",
        )
    text = read_text(engine, config)
    planned = plan(config, engine.config, layout)
    head = make_head(engine, config, text)
    with Journal(output / ROWS_FILE, head, field="output") as journal:
        try:
            _check_rows(journal.entries)
        except ValueError as error:
            raise ConfigError(
                "output", f"{output / ROWS_FILE} is no profile: {error}; remove it or name another"
            ) from error
        if not any("summary" in entry for entry in journal.entries):
            _measure_all(engine, config, planned, layout, text, journal, progress(len(planned)))
    profile = read_profile(output)
    model = fit(profile)
    if model is not None:
        model.save(output / MODEL_FILE)
    return profile


def make_folder(output: Path) -> None:
    """Raises ConfigError where it cannot be made or written, which is better known before a model is loaded."""
    try:
        output.mkdir(parents=True, exist_ok=True)
        if not os.access(output, os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(output))
    except OSError as error:
        raise ConfigError("output", f"{output} cannot be a folder to write to: {error}; name another") from error


def layout_of(engine: Engine) -> Layout:
    """What planning must know of an engine."""
    ledger, config, router = engine.ledger, engine.config, engine.model.router
    return Layout(
        page_size=config.page_size,
        has_pages=router.has_pages,
        has_state=router.has_slots,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_model_len=engine.model.max_model_len,
        pages=ledger.available_pages,
        slots=ledger.slots.size,
        rows=ledger.rows.size,
    )


def read_text(engine: Engine, config: ProfileConfig) -> list[int]:
    """The tokens that chains read: enough for each to be as long as a sequence may be."""
    wanted = engine.model.max_model_len * config.chains
    if config.text is None:
        return np.random.default_rng(0).integers(0, engine.model.vocab_size, wanted).tolist()
    if engine.tokenizer is None:
        raise ConfigError("text", "this model has no tokenizer; leave text out to read random tokens")
    try:
        words = engine.tokenizer.encode(config.text.read_text(encoding="utf-8"), add_special_tokens=False)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError("text", f"{config.text} cannot be read: {error}") from error
    if not words:
        raise ConfigError("text", f"{config.text} is empty; give a text, or leave it out")
    return (words * -(-wanted // len(words)))[:wanted]


def make_head(engine: Engine, config: ProfileConfig, text: list[int]) -> dict[str, Any]:
    """What makes two runs one: format, configuration, model, machine and versions, and what was read."""
    where = machine()
    del where["load_average"]  # of each row
    own = engine.config.describe()
    del own["compilation_cache_dir"]
    head = {
        "format": FORMAT,
        "profile": asdict(config) | {"text": None if config.text is None else str(config.text)},
        "text_sha256": hashlib.sha256(np.asarray(text, np.int64).tobytes()).hexdigest(),
        "engine": own,
        "model": engine.model_info(),
        "buckets": [asdict(bucket) for bucket in engine.runner.buckets],
        "machine": where,
    }
    return json.loads(json.dumps(head))  # as it comes back from the file


def _measure_all(
    engine: Engine,
    config: ProfileConfig,
    planned: list[Planned],
    layout: Layout,
    text: list[int],
    journal: Journal,
    tell: Callable[[int], None],
) -> None:
    done = {entry["point"] for entry in journal.entries if "point" in entry}
    tell(len(done))
    floor = make_floor(engine.model, engine.config.page_size, _bandwidth(config, journal))
    compiled = engine.compilations_after_ready
    state = resolve_state_mode(config.state_mode, layout, config.chains)
    stage = Stage(engine, text, chains=config.chains, state=state, is_real=config.seed == "real")
    warm_at = time.perf_counter() + config.burn_in
    with stage:
        for one in planned:
            if one.point.key in done:
                continue
            row = _row(one, config, state)
            if one.reason is not None:
                row |= {"status": "skipped", "reason": one.reason, "detail": one.detail}
            else:
                while time.perf_counter() < warm_at:
                    stage.chain_to(one.point.chain_depth)
                    measure(stage, one.point, config, layout)
                stage.chain_to(one.point.chain_depth)
                row |= {"status": "measured"} | _measure(stage, one, config, layout, floor)
            journal.append(row)
            tell(1)
    summary = {
        "points": len(planned),
        "references": {"before": stage.baseline, "after": engine.ledger.references()},
        "compilations": engine.compilations_after_ready - compiled,
        "memory_bytes": engine.runner.memory.by_kind(),
        "floor": asdict(floor),
    }
    model = fit(_profile(journal.head, journal.entries))
    journal.append({"summary": summary | {"latency_errors": None if model is None else model.errors}})


def _bandwidth(config: ProfileConfig, journal: Journal) -> float:
    """Bytes per second: given, measured before the run was killed, or measured now."""
    if config.bandwidth is not None:
        return config.bandwidth * 1e9
    for entry in journal.entries:
        if "bandwidth" in entry:
            return entry["bandwidth"]
    journal.append({"bandwidth": measure_bandwidth()})
    return journal.entries[-1]["bandwidth"]


def _row(one: Planned, config: ProfileConfig, state: str) -> Row:
    """Where a point is, and the stamps of how it is made."""
    return {
        "point": one.point.key,
        **asdict(one.point),
        "state_mode": state,
        "kv": config.seed,
        "chain_depth": one.point.chain_depth,
        "chains": config.chains,
        **one.describe(),
    }


def _measure(stage: Stage, one: Planned, config: ProfileConfig, layout: Layout, floor: Floor) -> Row:
    found = measure(stage, one.point, config, layout)
    return found.describe() | {"floor_seconds": floor.seconds(found.steps), "load_average": os.getloadavg()[0]}


def _profile(head: dict[str, Any], entries: list[dict[str, Any]]) -> Profile:
    summaries = [entry["summary"] for entry in entries if "summary" in entry]
    return Profile(head, [entry for entry in entries if "point" in entry], summaries[0] if summaries else None)


def fit(profile: Profile) -> LatencyModel | None:
    """The latency model of a profile, with its error on a quarter of the points that it did not see. None of no points.

    Held out is a diagonal of each grid, but for points whose buckets no other point ran in.
    """
    if not profile.measured:
        return None
    kept, held = [], []
    for row, is_held in zip(profile.measured, _diagonal(profile.measured), strict=True):
        (held if is_held else kept).append(row)
    known = {bucket for row in kept for bucket in row["buckets"]}
    kept += [row for row in held if not known.issuperset(row["buckets"])]
    held = [row for row in held if known.issuperset(row["buckets"])]
    return LatencyModel.fit(
        [_observation(row) for row in kept],
        [_observation(row) for row in held],
        [Bucket(**bucket) for bucket in profile.head["buckets"]],
        profile.head["engine"]["max_num_batched_tokens"],
        profile.head["engine"]["chunk_size"],
    )


def _diagonal(rows: list[Row]) -> list[bool]:
    axes = ("batch", "depth", "new", "cached")
    ranks = {
        (kind, axis): {value: i for i, value in enumerate(sorted({row[axis] for row in rows if row["kind"] == kind}))}
        for kind in {row["kind"] for row in rows}
        for axis in axes
    }
    return [sum(ranks[row["kind"], axis][row[axis]] for axis in axes) % 4 == 2 for row in rows]


def _observation(row: Row) -> Observation:
    steps = tuple((tuple(s["decodes"]), tuple((new, cached) for new, cached in s["prefills"])) for s in row["steps"])
    return Observation(steps, row["seconds"])
