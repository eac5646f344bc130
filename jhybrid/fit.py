"""Fit: a model's programs for devices that need not be there, and how its memory is shared out on each of them.

`jhybrid inspect --gpu h200` compiles the largest steps, `jhybrid compile` all of them, into a bundle. Plan and programs
are the engine's own (`Programs`); weights are shapes, never read.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh

from jhybrid import compilations
from jhybrid.batch import Bucket, make_buckets
from jhybrid.bundle import BundleWriter, identity
from jhybrid.cache.arrays import MemoryPlan
from jhybrid.cache.router import Router
from jhybrid.config import EngineConfig
from jhybrid.errors import ConfigError, OutOfMemoryError
from jhybrid.executables import Executables
from jhybrid.mesh import local_shape, make_mesh, using
from jhybrid.models import abstract_params, layouts_of
from jhybrid.programs import Programs
from jhybrid.runner import device_bytes_free
from jhybrid.slices import Slice
from jhybrid.startup import Startup
from jhybrid.weights.fingerprint import hashing
from jhybrid.weights.load import choose_max_model_len, held_params, make_programs, mesh_of, read_model, shared_out
from kernels_pallas.chips import chip_of
from kernels_pallas.deviceless import devices_of
from kernels_pallas.gpus import Gpu
from kernels_pallas.program_text import cycles, kernels_in, whole_copies


@dataclass(frozen=True)
class Site:
    """Where programs are to run: what is compiled for."""

    name: str
    platform: str  # "cpu" | "gpu" | "tpu"
    kind: str  # what `jax.Device.device_kind` says
    memory: int  # bytes of each device
    mesh: Callable[[], Mesh | None]  # None: the first device that is really here
    capability: str | None = None  # an NVIDIA GPU's compute capability

    @classmethod
    def gpu(cls, gpu: Gpu, size: int = 1) -> "Site":
        """GPUs of one machine that need not be there, as many as `tensor_parallel_size`. ConfigError without their
        compiler, when the mesh is made."""

        def mesh() -> Mesh:
            try:
                return make_mesh(gpu.devices(size))
            except ModuleNotFoundError as error:
                raise ConfigError("gpu", str(error)) from error

        return cls(gpu.name, "gpu", gpu.kind, gpu.memory, mesh, gpu.capability)

    @classmethod
    def slice(cls, slice_: Slice, config: EngineConfig) -> "Site":
        """The first `tensor_parallel_size` devices of a TPU slice that need not be there. ConfigError."""
        chip, size = slice_.chip, config.tensor_parallel_size

        def mesh() -> Mesh:
            try:
                devices = devices_of(slice_.topology)
            except ModuleNotFoundError as error:
                raise ConfigError("topology", "compiling for TPUs needs libtpu; install the extra `tpu`") from error
            except ValueError as error:
                raise ConfigError("topology", str(error)) from error
            if size > len(devices):
                raise ConfigError(
                    "tensor_parallel_size", f"{size} is more than the {len(devices)} devices of {slice_.topology}"
                )
            return make_mesh(devices[:size])

        return cls(slice_.topology, "tpu", chip.kinds[0], chip.hbm, mesh)

    @classmethod
    def here(cls, config: EngineConfig) -> "Site":
        """The devices of this machine."""
        mesh, device = mesh_of(config), jax.devices()[0]
        capability = getattr(device, "compute_capability", None)
        memory = device_bytes_free(mesh)
        return cls("this machine", device.platform, device.device_kind, memory, lambda: mesh, capability)


class Fit:
    """A model's programs for a site, and the memory plan that they leave."""

    def __init__(self, config: EngineConfig, site: Site):
        self.config, self.site = config, site
        self.buckets = make_buckets(config.max_num_seqs, config.max_num_batched_tokens)

    @cached_property
    def mesh(self) -> Mesh | None:
        """ConfigError where nothing compiles for the site."""
        return self.site.mesh()

    def largest(self) -> list[Bucket]:
        """The largest bucket of each kind: what decides about memory."""
        return [max(b for b in self.buckets if b.kind == kind) for kind in ("decode", "ragged")]

    def programs(self, buckets: list[Bucket], executables: Executables) -> Programs:
        """Not compiled yet. Raises ConfigError for what cannot be served."""
        config, mesh = self.config, executables.mesh
        with using(mesh):
            self._model, module, parts, self.dtype = read_model(config, self.site.platform)
            layouts = layouts_of(module)
            held = held_params(config, self._model, module, abstract_params(module))
        self.num_parameters = sum(a.size for a in jax.tree.leaves(abstract_params(module)))
        return make_programs(
            config,
            module,
            shared_out(held, layouts, mesh),
            Router(parts),
            vocab_size=self._model.vocab_size,
            max_model_len=choose_max_model_len(config, self._model),
            device_kind=self.site.kind,
            capability=self.site.capability,
            available=int(self.site.memory * config.memory_share(self.site.platform)),
            executables=executables,
            startup=Startup(),
            buckets=buckets,
        )

    def plan(self, scratch: int = 0) -> MemoryPlan:
        """How one device's memory is shared out if a step needs `scratch` bytes and nothing is spread over a mesh.
        OutOfMemoryError if it does not fit. Compiles nothing."""
        return self.programs(self.buckets, Executables(None)).plan(scratch=scratch)

    def report(self, buckets: list[Bucket] | None = None, executables: Executables | None = None) -> dict[str, Any]:
        """Compile `buckets` (None: the largest of each kind); the memory plan of each device, and what each step needs.

        OutOfMemoryError for what does not fit.
        """
        programs = self.programs(buckets or self.largest(), executables or Executables(None, self.mesh))
        programs.plan(scratch=0)  # what does not fit anyway is refused before anything is compiled
        with compilations.starting():
            try:
                programs.compile(at_once=1)
            except jax.errors.JaxRuntimeError as error:
                if "RESOURCE_EXHAUSTED" not in str(error):
                    raise
                raise OutOfMemoryError(f"the compiler for {self.site.name} refuses a step: {error}") from error
        self.compiled, memory = programs, programs.memory
        caches = {local_shape(leaf) for leaf in jax.tree.leaves(programs.abstract_cache(memory))}
        chip, steps = chip_of(self.site.kind), []
        for bucket, program in programs.steps.items():
            analysis, text = program.memory_analysis(), program.as_text()
            steps.append(
                {
                    "bucket": str(bucket),
                    "seconds": round(programs.seconds[bucket], 1),
                    "scratch": analysis.temp_size_in_bytes,
                    "arguments": analysis.argument_size_in_bytes,
                    "updated_in_place": analysis.alias_size_in_bytes,
                    "cache_copies": sum(whole_copies(text, shape) for shape in caches),
                    "kernels": kernels_in(text),
                }
            )
            if chip is not None:
                spent = cycles(text, chip)
                at_least = (spent.least + spent.kernels) / chip.clock
                steps[-1] |= {"cycles": spent._asdict(), "milliseconds_at_least": round(1e3 * at_least, 3)}
        facts = {"site": self.site.name, "num_parameters": self.num_parameters, "dtype": self.dtype}
        kinds = memory.by_kind() | {"available": memory.available}
        sizes = {"num_slots": memory.num_slots, "num_pages": memory.num_pages, "num_snapshots": memory.num_snapshots}
        fits = {"sequences": self.config.max_num_seqs, "tokens": memory.num_pages * self.config.page_size}
        return facts | {"steps": steps, "memory": kinds | sizes, "fits": fits}

    def write(self, folder: Path) -> dict[str, Any]:
        """Compile everything into a bundle; the report of it. ConfigError for a folder that it cannot be written to."""
        with BundleWriter(folder, self.mesh) as writer:
            report = self.report(self.buckets, writer)
            device = jax.devices()[0] if self.mesh is None else self.mesh.devices.flat[0]
            if self.config.disk_cache_url is not None:
                with compilations.starting():
                    hashing(self.compiled.params, writer)
            writer.close(identity(self.config, self._model, self.dtype, device), self.compiled.memory)
        return report
