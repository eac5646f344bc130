"""Bundle: the programs of an engine in a folder, made by `jhybrid compile`, for an engine that is to compile nothing.

`manifest.json` says for what they were made (`identity`), under which memory plan, and which file holds which program.
The files hold machine code and pickles: load only bundles from who you trust as much as the package itself.
"""

import hashlib
import importlib.metadata
import json
import os
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh

import jhybrid
from jhybrid.cache.arrays import MemoryPlan
from jhybrid.config import EngineConfig, compiler_flags
from jhybrid.errors import ConfigError
from jhybrid.executables import Compiled, Executables, Trees, serialized, source_digest
from jhybrid.machine import processor

MANIFEST = "manifest.json"
FORM = 1  # of the manifest
COMPILERS = ("jax", "jaxlib", "flax")
COMPILERS_OF = {"tpu": ("libtpu",), "gpu": ("jax-cuda13-pjrt", "jax-cuda13-plugin")}  # and these on their platforms
VIRTUAL_DEVICES = "xla_force_host_platform_device_count"  # says what devices there are, not what is made for them
Identity = dict[str, str | int | bool | None]
SETTINGS = (  # of EngineConfig: those that programs depend on
    "page_size",
    "max_model_len",
    "max_num_seqs",
    "max_num_batched_tokens",
    "num_pages",
    "kv_cache_dtype",
    "state_dtype",
    "quantization",
    "enable_prefix_caching",
    "snapshot_slots",
    "snapshot_dtype",
    "chunk_size",
    "attention_impl",
    "ssm_impl",
    "tensor_parallel_size",
)


def identity(config: EngineConfig, model_config: object, dtype: str, device: Any, max_parked: int = 0) -> Identity:
    """What programs are made for, by name: settings, model, versions, device. Equal wherever they can run."""
    facts = {name: getattr(config, name) for name in SETTINGS}
    facts |= {"host_cache": config.host_cache_bytes > 0, "disk_cache": config.disk_cache_url is not None}
    facts |= {"max_parked": max_parked, "dtype": dtype, "model_config": _digest(repr(model_config))}
    facts |= {"jhybrid": jhybrid.__version__, "source": source_digest()[:16]}
    facts |= {name: _version(name) for name in (*COMPILERS, *COMPILERS_OF.get(device.platform, ()))}
    facts |= {"device_kind": device.device_kind, "python": "{}.{}".format(*sys.version_info)}
    facts |= {name: value for name, value in compiler_flags().items() if VIRTUAL_DEVICES not in value}
    if device.platform == "cpu":
        name, flags = processor()
        facts |= {"processor": f"{name}, {_digest(' '.join(sorted(flags)))}", "cores": os.cpu_count()}
    return facts


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


class BundleWriter(Executables):
    """Compiles, and keeps each program in a folder. `close` makes a bundle of it."""

    def __init__(self, folder: Path, mesh: Mesh | None):
        """ConfigError for a folder that has something in it already, or cannot be made."""
        super().__init__(None, mesh)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            if any(folder.iterdir()):
                raise ConfigError("output", f"{folder} is not empty; name a new folder")
        except OSError as error:
            raise ConfigError("output", f"{folder} cannot be written to: {error}") from error
        self._into = folder
        self._programs: dict[str, dict[str, str]] = {}

    def _provide(
        self, name: str, told: str, lower: Callable[[], jax.stages.Lowered], trees: Trees
    ) -> tuple[Compiled, str]:
        self.traced += 1
        self.compiled += 1
        found = lower().compile()
        payload = serialized(found, trees)
        file = re.sub(r"\W+", "-", name).strip("-") + ".bin"
        (self._into / file).write_bytes(payload)
        self._programs[name] = {"file": file, "made_for": _digest(told), "sha256": hashlib.sha256(payload).hexdigest()}
        return found, "compiled"

    def close(self, facts: Identity, plan: MemoryPlan) -> None:
        """Write the manifest, last of all: without it a folder is no bundle."""
        manifest = {"form": FORM, "identity": facts, "memory": asdict(plan), "programs": self._programs}
        (self._into / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n")


class Bundle(Executables):
    """Loads what a BundleWriter wrote, and compiles nothing."""

    def __init__(self, folder: Path, mesh: Mesh | None, facts: Identity):
        """Raises ConfigError naming every field in which it was made for something else than `facts`."""
        super().__init__(None, mesh)
        self._from = folder
        manifest = _read_manifest(folder)
        made = manifest["identity"]
        names = [name for name in (facts | made) if facts.get(name) != made.get(name)]
        if names:
            differing = "; ".join(f"{n}: {made.get(n)!r} there, {facts.get(n)!r} here" for n in names)
            raise ConfigError(
                "bundle",
                f"{folder} was made for something else ({differing}); give the settings that it was made with, or make "
                "another with `jhybrid compile`",
            )
        self.plan = MemoryPlan(**manifest["memory"])
        self._programs: Mapping[str, dict[str, str]] = manifest["programs"]

    def _provide(
        self, name: str, told: str, lower: Callable[[], jax.stages.Lowered], trees: Trees
    ) -> tuple[Compiled, str]:
        entry = self._programs.get(name)
        if entry is None or entry["made_for"] != _digest(told):
            lacks = "no program" if entry is None else "another program"
            raise ConfigError("bundle", f"{self._from} has {lacks} {name!r}; make another with `jhybrid compile`")
        try:
            payload = (self._from / entry["file"]).read_bytes()
            if hashlib.sha256(payload).hexdigest() != entry["sha256"]:
                raise ValueError("it is cut short or changed")
            return self.deserialized(payload, trees), "loaded"
        except Exception as error:
            raise ConfigError("bundle", f"{self._from / entry['file']} cannot be loaded: {error}") from error


def _read_manifest(folder: Path) -> dict[str, Any]:
    try:
        manifest = json.loads((folder / MANIFEST).read_text())
        form = manifest["form"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError("bundle", f"{folder} is no bundle that `jhybrid compile` wrote: {error!r}") from error
    if form != FORM:
        raise ConfigError("bundle", f"{folder} has form {form}, this version reads {FORM}; make another")
    return manifest
