"""Executables: compiled functions kept on disk, so that a later start neither traces nor compiles them.

JAX's own persistent cache saves compiling but must trace and lower to find an entry, which is half of a warm start.
Here a function is found by its key, a hash of what determines it: the source of this package and its kernels, the
machine, the versions and flags of the compiler, the facts that its owner names, and the shapes of its arguments. A key
names a program, the hash of what was lowered, so that a change of source that changes no program compiles nothing.

JAX's cache cannot serve beside it: on CPU an executable that was read from it and is written again has lost functions
(JAX 0.10.2). The files hold machine code and pickles: the folder must be one that nobody else can write to.
"""

import functools
import hashlib
import logging
import os
import platform
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import flax
import jax
import jaxlib.version
import numpy as np
from jax.experimental import serialize_executable
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import jhybrid
import kernels_pallas
from jhybrid.cache.arrays import MemoryPlan
from jhybrid.config import compiler_flags
from jhybrid.machine import processor
from jhybrid.mesh import shape_of, using
from kernels_pallas.blocks import FOLDER

log = logging.getLogger("jhybrid")

Compiled = jax.stages.Compiled


class Executables:
    """A folder of compiled functions. Processes may share it: files appear whole, and their names say their content."""

    def __init__(self, directory: Path | None, mesh: Mesh | None = None):
        """`directory` None: nothing is kept. One that cannot be used is a warning, not an error.

        Functions run on the devices of `mesh`; what does not say how it is shared out there goes to all of them.
        """
        self.mesh = mesh
        self.plan: MemoryPlan | None = None
        """The memory plan that everything was made for, where that is settled already."""
        self._folder = None
        if directory is not None:
            try:
                (directory / "executables").mkdir(mode=0o700, parents=True, exist_ok=True)
                self._folder = directory / "executables"
            except OSError as error:
                log.warning("compilation_cache_dir %s cannot be used (%s); every start compiles anew", directory, error)
        self.traced = 0
        """Functions whose key was not known."""
        self.compiled = 0
        """Of them, those whose program was not known either."""

    def get(
        self,
        name: str,
        function: Callable[..., Any],
        arguments: tuple[Any, ...],
        *,
        donate: tuple[int, ...] = (),
        result: Any,
        facts: tuple[object, ...] = (),
    ) -> Compiled:
        """`function` compiled for `arguments` (pytrees of shapes), of which those numbered in `donate` are given away.

        `result` is a pytree of the structure that it returns; its shapes say where on the mesh. `facts` are what
        `function` closes over: together with the shapes they determine it, and their `repr` must say all of it and be
        the same in every process.
        """
        started = time.perf_counter()
        trees = Trees(jax.tree.structure((arguments, {})), jax.tree.structure(result))
        arguments, shardings = jax.tree.map(self._placed, arguments), self._shardings(result)
        told = _told(name, arguments, donate, (*facts, *map(_lies, jax.tree.leaves(result))))

        def lower() -> jax.stages.Lowered:
            with using(self.mesh):
                return jax.jit(function, donate_argnums=donate, out_shardings=shardings).lower(*arguments)

        found, how = self._provide(name, told, lower, trees)
        log.info("%s %s in %.2f s", how, name, time.perf_counter() - started)
        return found

    def _provide(
        self, name: str, told: str, lower: Callable[[], jax.stages.Lowered], trees: "Trees"
    ) -> tuple[Compiled, str]:
        """A function, and how it was come by. `told` tells it from all others of the same source and compiler."""
        key = hashlib.sha256(f"{source_digest()}\n{_compiler()}\n{told}".encode()).hexdigest()
        program = self._read(f"{key}.key")
        found = None if program is None else self._load(program.decode("ascii", "replace"), trees)
        return self._make(key, lower, trees) if found is None else (found, "loaded")

    def _placed(self, shape: Any) -> jax.ShapeDtypeStruct:
        if self.mesh is None:
            return shape
        placed = shape_of(shape)
        return placed.update(sharding=placed.sharding or NamedSharding(self.mesh, PartitionSpec()))

    def _shardings(self, result: Any) -> Any:
        if self.mesh is None:
            return None
        everywhere = NamedSharding(self.mesh, PartitionSpec())
        return jax.tree.map(lambda leaf: getattr(leaf, "sharding", None) or everywhere, result)

    def _make(self, key: str, lower: Callable[[], jax.stages.Lowered], trees: "Trees") -> tuple[Compiled, str]:
        """Trace a function, and compile its program unless that is known."""
        self.traced += 1
        how, lowered = "traced", lower()
        program = hashlib.sha256(f"{_compiler()}\n{lowered.as_text()}".encode()).hexdigest()
        found = self._load(program, trees)
        if found is None:
            self.compiled += 1
            how = "compiled"
            found = lowered.compile()
            self._write(f"{program}.bin", lambda: serialized(found, trees))
        self._write(f"{key}.key", program.encode)
        return found, how

    def _load(self, program: str, trees: "Trees") -> Compiled | None:
        payload = self._read(f"{program}.bin")
        if payload is None:
            return None
        try:
            return self.deserialized(payload, trees)
        except Exception as error:  # noqa: BLE001 - whatever is wrong with a kept file, compiling replaces it
            log.warning("%s.bin in %s cannot be loaded (%r); compiling anew", program, self._folder, error)
            return None

    def deserialized(self, payload: bytes, trees: "Trees") -> Compiled:
        """A function from the bytes of `serialized`, on the devices of the mesh. Raises whatever is wrong with them."""
        devices = jax.devices()[:1] if self.mesh is None else list(self.mesh.devices.flat)
        return serialize_executable.deserialize_and_load(payload, *trees, execution_devices=devices)

    def _read(self, name: str) -> bytes | None:
        """What was written under a name; None if there is nothing, or, with a warning, something else."""
        if self._folder is None or not (self._folder / name).exists():
            return None
        try:
            head, _, content = (self._folder / name).read_bytes().partition(b"\n")
            if head != _head(name, content):
                raise ValueError("it is cut short, changed or misnamed")
        except (OSError, ValueError) as error:
            log.warning("%s in %s cannot be used (%s); making it anew", name, self._folder, error)
            return None
        return content

    def _write(self, name: str, content: Callable[[], bytes]) -> None:
        """Write a file, and give it its name once it is whole. What cannot be kept is a warning."""
        if self._folder is None:
            return
        try:
            body = content()
            handle, part = tempfile.mkstemp(dir=self._folder, suffix=".part")
            try:
                with os.fdopen(handle, "wb") as file:
                    file.write(_head(name, body) + b"\n" + body)
                os.replace(part, self._folder / name)
            finally:
                Path(part).unlink(missing_ok=True)
        except (OSError, ValueError, NotImplementedError, jax.errors.JaxRuntimeError) as error:
            log.warning("%s cannot be kept in %s (%s); the next start makes it again", name, self._folder, error)


class Trees(NamedTuple):
    """Structure of a function's arguments and of what it returns, which files do not hold."""

    arguments: Any
    result: Any


def serialized(compiled: Compiled, trees: Trees) -> bytes:
    """A function as bytes."""
    payload, *own = serialize_executable.serialize(compiled)
    assert Trees(*own) == trees, f"{own} is not {trees}"
    return payload


def _head(name: str, content: bytes) -> bytes:
    """First line of a file."""
    return f"jhybrid {name} {hashlib.sha256(content).hexdigest()}".encode()


def _told(name: str, arguments: tuple[Any, ...], donate: tuple[int, ...], facts: tuple[object, ...]) -> str:
    """All that tells a function from others of the same source and compiler."""
    leaves = jax.tree_util.tree_leaves_with_path(arguments)
    shapes = [(jax.tree_util.keystr(path), leaf.shape, str(leaf.dtype), _lies(leaf)) for path, leaf in leaves]
    told = repr((name, shapes, donate, facts))
    assert " at 0x" not in told, f"{name} is told apart by an address: {told}"
    return told


def _lies(shape: Any) -> str:
    """Where on a mesh, in words that do not depend on whether its devices are there."""
    sharding = getattr(shape, "sharding", None)
    return f"{sharding.spec} of {dict(sharding.mesh.shape)}" if isinstance(sharding, NamedSharding) else ""


@functools.cache
def source_digest() -> str:
    """Hash of every source file, and of the tuned block sizes, that can have a say in what is compiled."""
    digest = hashlib.sha256(jhybrid.__version__.encode())
    for package in (jhybrid, kernels_pallas):
        root = Path(package.__path__[0])
        for path in sorted(root.rglob("*.py")):
            digest.update(f"\n{path.relative_to(root)}\n".encode())
            digest.update(path.read_bytes())
    for path in sorted(FOLDER.rglob("*.json")):
        digest.update(f"\n{path.relative_to(FOLDER)}\n".encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()


def _compiler() -> str:
    """What compiles, for what machine, under which flags."""
    device = jax.devices()[0]
    settings = {name: value for name, value in jax.config.values.items() if "cache" not in name and "log" not in name}  # pyright: ignore[reportAttributeAccessIssue]
    return repr(
        (
            (sys.version, jax.__version__, jaxlib.version.__version__, flax.__version__, np.__version__),
            (device.platform, device.device_kind, device.client.platform_version, jax.device_count()),
            (platform.machine(), processor(), os.cpu_count(), compiler_flags()),
            sorted(settings.items()),
        )
    )
