"""Identity: what must be the same for a run to go on from what an earlier one wrote. Journals and batches have one."""

import hashlib
from collections.abc import Container
from dataclasses import asdict
from typing import Any

import jax

import jhybrid
from jhybrid.config import EngineConfig
from jhybrid.weights.load import find_model

ROOM = ("max_num_seqs", "max_num_batched_tokens", "num_pages", "memory_fraction", "max_queue", "async_scheduling")
"""Settings that say how much runs at a time. They move log-probabilities by a rounding, and no more."""


def identity(config: EngineConfig, besides: Container[str] = ()) -> dict[str, Any]:
    """Versions, model, and settings of the engine, `besides` which they may differ. Raises ConfigError for no model."""
    own = asdict(config)
    return {
        "version": jhybrid.__version__,
        "jax": jax.__version__,
        "model": config.model,
        "model_files": _model_files(config.model),
        "engine": {name: own[name] for name in own if name != "compilation_cache_dir" and name not in besides},
    }


def _model_files(model: str) -> str:
    """A digest of the names, sizes and times of a model's files: another checkpoint in its place has another."""
    digest = hashlib.sha256()
    folder = find_model(model)
    for file in sorted(path for path in folder.rglob("*") if path.is_file()):
        facts = file.stat()
        digest.update(f"{file.relative_to(folder)} {facts.st_size} {facts.st_mtime_ns}\n".encode())
    return digest.hexdigest()
