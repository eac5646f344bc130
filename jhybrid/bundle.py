"""Bundle: the programs of an engine in a folder, made by `jhybrid compile`, for an engine that is to compile nothing.

`manifest.json` says for what they were made (`identity`), under which memory plan, and the hash of each program's file.
The files hold machine code and pickles: load only bundles from who you trust as much as the package itself.
"""

import contextlib
import hashlib
import importlib.metadata
import os
import re
import secrets
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, Literal, Self

import jax
from jax.sharding import Mesh
from pydantic import BaseModel, ConfigDict, ValidationError

import jhybrid
from jhybrid.cache.arrays import MemoryPlan
from jhybrid.config import EngineConfig, compiler_flags
from jhybrid.errors import ConfigError
from jhybrid.executables import Compiled, Executables, Trees, serialized, source_digest
from jhybrid.machine import processor

MANIFEST = "manifest.json"
COMPILERS = ("jax", "jaxlib", "flax")
COMPILERS_OF = {"tpu": ("libtpu",), "gpu": ("jax-cuda13-pjrt", "jax-cuda13-plugin")}  # and these on their platforms
ANEW = "compile it anew with `jhybrid compile --output`"
VIRTUAL_DEVICES = "xla_force_host_platform_device_count"  # says what devices there are, not what is made for them
Identity = dict[str, str]  # name -> value, in words
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
    "moe_impl",
    "tensor_parallel_size",
)


class Form(BaseModel):
    """Part of a manifest, in which nothing may be missing, of another type, or unknown."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)


class Program(Form):
    """One file of a bundle."""

    made_for: str  # hash of all that tells it from others of the same identity
    sha256: str


class Manifest(Form):
    """What `manifest.json` holds."""

    form: Literal[2]
    identity: Identity
    memory: MemoryPlan
    programs: dict[str, Program]

    @classmethod
    def read(cls, folder: Path) -> Self:
        """ConfigError for a folder without one, or with one that is damaged or of another form."""
        try:
            return cls.model_validate_json((folder / MANIFEST).read_bytes())
        except (OSError, ValidationError) as error:
            if isinstance(error, ValidationError):
                first = error.errors()[0]
                why = ": ".join(filter(None, [".".join(map(str, first["loc"])), first["msg"]]))
            else:
                why = error.strerror
            raise ConfigError(
                "bundle", f"{folder} is no bundle that this version can load ({MANIFEST}: {why}); {ANEW}"
            ) from error


def identity(config: EngineConfig, model_config: object, dtype: str, device: Any, max_parked: int = 0) -> Identity:
    """What programs are made for, by name: settings, model, versions, device. Equal wherever they can run."""
    facts: dict[str, object] = {name: getattr(config, name) for name in SETTINGS}
    facts |= {"host_cache": config.host_cache_bytes > 0, "disk_cache": config.disk_cache_url is not None}
    facts |= {"max_parked": max_parked, "dtype": dtype, "model_config": model_config}
    facts |= {"jhybrid": jhybrid.__version__, "source": source_digest()[:16]}
    facts |= {name: _version(name) for name in (*COMPILERS, *COMPILERS_OF.get(device.platform, ()))}
    facts |= {"device_kind": device.device_kind, "python": "{}.{}".format(*sys.version_info)}
    facts |= {name: value for name, value in compiler_flags().items() if VIRTUAL_DEVICES not in value}
    if device.platform == "cpu":
        name, flags = processor()
        facts |= {"processor": f"{name}, {_digest(' '.join(sorted(flags)))}", "cores": os.cpu_count()}
    return {name: text for fact in facts.items() for name, text in _in_words(*fact)}


def _in_words(name: str, value: object) -> Iterator[tuple[str, str]]:
    """A fact, and those inside it if it is a dataclass, which have its name and a dot before theirs."""
    if not is_dataclass(value):
        yield name, repr(value)
        return
    yield name, type(value).__name__
    for field in fields(value):
        yield from _in_words(f"{name}.{field.name}", getattr(value, field.name))


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _file(program: str) -> str:
    return re.sub(r"\W+", "-", program).strip("-") + ".bin"


class BundleWriter(Executables):
    """Compiles, and keeps each program in a folder beside the bundle's, which `close` gives the bundle's name.

    A context, which leaves a whole bundle or nothing. A process that is killed leaves the folder beside.
    """

    def __init__(self, folder: Path, mesh: Mesh | None):
        super().__init__(None, mesh)
        self._named, self._into = folder, Path(os.path.realpath(folder))  # a link cannot be replaced by a folder
        self._part = self._into.parent / f"{self._into.name}.partial-{secrets.token_hex(4)}"
        self._parents = [parent for parent in self._into.parents if not parent.exists()]
        self._programs: dict[str, Program] = {}

    def __enter__(self) -> Self:
        """ConfigError for a folder that has something in it already, or cannot be made."""
        if self._into == Path.cwd():  # which `--output ''` means too
            raise ConfigError("output", f"{self._named} is the working directory; name a new folder")
        with self._writing():
            self._refuse_content()
            if os.path.ismount(self._into):
                raise ConfigError("output", f"{self._named} is a mount point; name a new folder in it")
            self._part.mkdir(parents=True)
        return self

    def __exit__(self, *_: object) -> None:
        shutil.rmtree(self._part, ignore_errors=True)  # unless `close` has renamed it
        for parent in self._parents:
            with contextlib.suppress(OSError):  # not empty
                parent.rmdir()

    def _provide(
        self, name: str, told: str, lower: Callable[[], jax.stages.Lowered], trees: Trees
    ) -> tuple[Compiled, str]:
        self.traced += 1
        self.compiled += 1
        found = lower().compile()
        payload = serialized(found, trees)
        with self._writing():
            (self._part / _file(name)).write_bytes(payload)
        self._programs[name] = Program(made_for=_digest(told), sha256=hashlib.sha256(payload).hexdigest())
        return found, "compiled"

    def close(self, facts: Identity, plan: MemoryPlan) -> None:
        """Write the manifest, and make it a bundle. ConfigError if another process made one here meanwhile."""
        manifest = Manifest(form=2, identity=facts, memory=plan, programs=self._programs)
        with self._writing():
            (self._part / MANIFEST).write_text(manifest.model_dump_json(indent=2) + "\n")
            self._refuse_content()
            self._part.rename(self._into)  # fails, too, where the folder is not empty

    def _refuse_content(self) -> None:
        if self._into.exists() and any(self._into.iterdir()):
            raise ConfigError("output", f"{self._named} is not empty; name a new folder")

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise ConfigError("output", f"{self._named} cannot be written: {error}") from error


class Bundle(Executables):
    """Loads what a BundleWriter wrote, and compiles nothing."""

    def __init__(self, folder: Path, mesh: Mesh | None, facts: Identity):
        """Raises ConfigError naming every field in which it was made for something else than `facts`."""
        super().__init__(None, mesh)
        self._from = folder
        manifest = Manifest.read(folder)
        made = manifest.identity
        names = [name for name in (facts | made) if facts.get(name) != made.get(name)]
        names = [name for name in names if not any(name.startswith(f"{of}.") for of in names)]  # not what is in others
        if names:
            differing = "; ".join(f"{n}: {made.get(n)} there, {facts.get(n)} here" for n in names)
            raise ConfigError(
                "bundle",
                f"{folder} was made for something else ({differing}); give the settings that it was made with, or make "
                "another with `jhybrid compile`",
            )
        self.plan, self._programs = manifest.memory, manifest.programs

    def _provide(
        self, name: str, told: str, lower: Callable[[], jax.stages.Lowered], trees: Trees
    ) -> tuple[Compiled, str]:
        entry = self._programs.get(name)
        if entry is None or entry.made_for != _digest(told):
            lacks = "no program" if entry is None else "another program"
            raise ConfigError("bundle", f"{self._from} has {lacks} {name!r}; {ANEW}")
        try:
            payload = (self._from / _file(name)).read_bytes()
            if hashlib.sha256(payload).hexdigest() != entry.sha256:
                raise ValueError("it is cut short or changed")
            return self.deserialized(payload, trees), "loaded"
        except Exception as error:
            raise ConfigError("bundle", f"{self._from / _file(name)} cannot be loaded: {error}; {ANEW}") from error
