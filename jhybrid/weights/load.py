"""Load: from an engine's configuration to a model in memory. Called by the engine, before anything is compiled."""

import contextlib
import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import psutil
from jax.sharding import Mesh

from jhybrid.batch import Bucket, make_buckets
from jhybrid.bundle import Bundle, identity
from jhybrid.cache.arrays import MemoryPlan, abstract_cache, tree_bytes
from jhybrid.cache.eviction import Cost, Policy
from jhybrid.cache.ledger import Ledger
from jhybrid.cache.prefix_tree import PrefixTree
from jhybrid.cache.router import Part, Router
from jhybrid.cache.snapshots import abstract_store
from jhybrid.cache.tiers.copies import forms
from jhybrid.cache.tiers.host import HostTier
from jhybrid.cache.tiers.store import Store
from jhybrid.cache.tiers.tiers import TierConfig, Tiers
from jhybrid.cache.tuning import Tuner
from jhybrid.config import EngineConfig
from jhybrid.dispatch import target_of
from jhybrid.errors import ConfigError
from jhybrid.executables import Executables
from jhybrid.layers.attention import KV_SCALE
from jhybrid.layers.parameter import scale_of
from jhybrid.mesh import AS_STORED, Layout, make_mesh, placed, using
from jhybrid.models import (
    ModelConfig,
    abstract_params,
    family_for,
    init_params,
    layouts_of,
    quantisable_params,
    read_config,
)
from jhybrid.programs import Programs
from jhybrid.runner import Runner, device_bytes_free
from jhybrid.startup import Startup
from jhybrid.tokenizer import Tokenizer, load_tokenizer, read_eos_token_ids
from jhybrid.weights.cache_scales import with_cache_scales
from jhybrid.weights.fingerprint import fingerprint
from jhybrid.weights.orbax import is_orbax, load_orbax
from jhybrid.weights.places import Place, leaves, nest
from jhybrid.weights.quantised import Kind, Scheme, held_shapes, read_quantisation, rounded_params
from jhybrid.weights.safetensors import load_safetensors
from jhybrid.weights.sharding import along_rows
from kernels_pallas.causal_conv import window_rows

log = logging.getLogger("jhybrid")

DEMO_DIRECTORY = Path(__file__).parent.parent / "demo"
IGNORED = (
    r"((language_)?model\.)?mtp\..*",
    r"model\.(visual|vision_tower|multi_modal_projector)\..*",
    r"(vision_model|vision_projector|vision_final_layernorm|mlp1|multi_modal_projector)\..*",
    r"(audio_tower|embed_audio|sound_encoder|sound_projection)\..*",
    r".*rotary_emb\.inv_freq",
)
TIED_HEAD = "lm_head.weight"  # stored or not, where the table of embeddings is the head too
UNLIMITED_MODEL_LEN = 32768  # for models that nothing limits, unless max_model_len says otherwise


@dataclass(frozen=True)
class Model:
    """A model in memory, and what the engine must know of it besides its arrays."""

    name: str
    architecture: str
    config: ModelConfig | None
    module: nn.Module | None
    params: Any
    router: Router
    tokenizer: Tokenizer | None
    eos_token_ids: frozenset[int]
    vocab_size: int
    max_model_len: int
    dtype: str
    num_parameters: int = 0
    mesh: Mesh | None = None  # None: one device

    def info(self) -> dict[str, Any]:
        """What `Engine.model_info` returns."""
        return {
            "model": self.name,
            "architecture": self.architecture,
            "vocab_size": self.vocab_size,
            "max_model_len": self.max_model_len,
            "dtype": self.dtype,
            "num_layers": self.config.num_layers if self.config else 0,
            "num_parameters": self.num_parameters,
            "eos_token_ids": sorted(self.eos_token_ids),
            "has_tokenizer": self.tokenizer is not None,
            "bytes_per_slot": self.router.bytes_per_slot,
            "bytes_per_page": self.router.bytes_per_page,
        }


def find_model(model: str) -> Path:
    """The directory that a `model` argument means. ConfigError if there is no model there."""
    directory = DEMO_DIRECTORY if model == "demo" else Path(model).expanduser()
    if directory.suffix == ".gguf" or (directory.is_dir() and _only_gguf(directory)):
        raise ConfigError(
            "model",
            f"{model!r} is GGUF, llama.cpp's own form, which is not read; use the Hugging Face directory (config.json "
            "and *.safetensors) that it was made from, with quantization int8 or fp8 if memory is short",
        )
    if not directory.is_dir():
        raise ConfigError("model", f"{model!r} is no directory; give a Hugging Face or Orbax directory, or `demo`")
    if not (directory / "config.json").exists():
        raise ConfigError("model", f"{directory} has no config.json, so it is no model directory")
    return directory


def _only_gguf(directory: Path) -> bool:
    kinds = {file.suffix for file in directory.iterdir()}
    return ".gguf" in kinds and ".safetensors" not in kinds and not is_orbax(directory)


def read_model(
    config: EngineConfig, platform: str | None = None
) -> tuple[ModelConfig, nn.Module, list[tuple[Part, ...]], str]:
    """A model's config, module, the cache parts of its layers, and dtype. Reads no weights.

    `platform` ("cpu", "gpu", "tpu") is where it is to run; None: here.
    """
    platform = platform or jax.default_backend()
    directory = find_model(config.model)
    model_config = read_config(directory)
    read_scheme(config)  # refuses what the loader cannot read
    dtype = _dtype(config.dtype, platform)
    module = family_for(model_config).module(model_config, jnp.dtype(dtype))
    # XLA's CPU code updates a 16-bit array by way of float32 copies of the whole of it.
    cache_dtype = "float32" if platform == "cpu" else dtype
    parts = model_config.layer_parts(
        page_size=config.page_size,
        kv_dtype=cache_dtype if config.kv_cache_dtype == "auto" else config.kv_cache_dtype,
        state_dtype=config.state_dtype,
        conv_dtype=cache_dtype,
    )
    if platform == "tpu":
        parts = [tuple(_aligned(part) for part in of_layer) for of_layer in parts]
    if config.enable_prefix_caching and config.snapshot_slots == 0 and Router(parts).has_slots:
        raise ConfigError(
            "snapshot_slots",
            "0 with enable_prefix_caching: this model has recurrent layers, whose prefixes cannot be continued without "
            "a snapshot of their state; use snapshot_slots of at least 1, or switch enable_prefix_caching off",
        )
    return model_config, module, parts, dtype


def _aligned(part: Part) -> Part:
    """With so many rows of a convolution's window as lie on a TPU without padding."""
    return part if part.name != "conv" else replace(part, shape=(window_rows(part.shape[0]), *part.shape[1:]))


def load_model(config: EngineConfig) -> Model:
    """Read the config, then stream the weights to their place. Raises ConfigError or WeightsError."""
    started = time.perf_counter()
    directory = find_model(config.model)
    mesh = mesh_of(config)
    with using(mesh):
        model_config, module, parts, dtype = read_model(config)
        layouts = layouts_of(module)
    max_model_len = choose_max_model_len(config, model_config)
    shapes = abstract_params(module)
    params = load_params(config, model_config, module, shared_out(shapes, layouts, mesh), layouts)
    tokenizer = load_tokenizer(directory)
    own = tokenizer.eos_token_ids[:1] if tokenizer else ()
    model = Model(
        name=config.model,
        architecture=family_for(model_config).architecture,
        config=model_config,
        module=module,
        params=params,
        router=Router(parts),
        tokenizer=tokenizer,
        eos_token_ids=frozenset(read_eos_token_ids(directory, own[0] if own else None, model_config.vocab_size)),
        vocab_size=model_config.vocab_size,
        max_model_len=max_model_len,
        dtype=dtype,
        num_parameters=sum(a.size for a in jax.tree.leaves(shapes)),
        mesh=mesh,
    )
    log.info("loaded %s: %d parameters in %.2f s", config.model, model.num_parameters, time.perf_counter() - started)
    return model


def mesh_of(config: EngineConfig) -> Mesh | None:
    """The devices to run on; None: the first one. Raises ConfigError if there are too few."""
    size, devices = config.tensor_parallel_size, jax.devices()
    if size > len(devices):
        kind = devices[0].device_kind
        raise ConfigError("tensor_parallel_size", f"{size} is more than the {len(devices)} devices here ({kind})")
    return make_mesh(devices[:size]) if size > 1 else None


def shared_out(shapes: Any, layouts: Mapping[Place, Layout], mesh: Mesh | None) -> dict[str, Any]:
    """Shapes of parameters, and of their scales, with where they lie on a mesh."""
    flat = {}
    for path, leaf in leaves(shapes):
        if path in layouts:
            flat[path] = placed(mesh, leaf, layouts[path].shared_axis)
        else:
            weight = next(p for p in layouts if (*p[:-1], scale_of(p[-1])) == path)
            axis = layouts[weight].shared_axis
            flat[path] = placed(mesh, leaf, None if axis == len(leaf.shape) - 1 else axis)
    return nest(flat)


def read_scheme(config: EngineConfig) -> tuple[Scheme | None, Kind | None]:
    """How the checkpoint's tensors are quantised, and to what plain ones are rounded.

    Raises ConfigError for a scheme that is not read, and if a checkpoint of one kind is asked for in the other.
    """
    asked = config.quantization
    kind: Kind | None = asked if asked in ("int8", "fp8") else None  # pyright: ignore[reportAssignmentType]
    scheme = read_quantisation(find_model(config.model))
    if scheme is None or kind is None:
        return scheme, kind
    if scheme.kind != kind:
        raise ConfigError("quantization", f"{asked} of a checkpoint that is {scheme.kind} already; use auto, or none")
    return scheme, None


def load_params(
    config: EngineConfig,
    model_config: ModelConfig,
    module: nn.Module,
    shapes: Any,
    layouts: Mapping[Place, Layout] = AS_STORED,
) -> dict[str, Any]:
    """The parameters of a model, in the dtypes and shardings of `shapes`, quantised as the configuration says."""
    directory = find_model(config.model)
    scheme, quantise = read_scheme(config)
    quantisable = frozenset() if config.quantization == "none" else quantisable_params(module)
    if config.load_format == "dummy":
        params = init_params(module, jax.random.key(config.base_seed), shapes, layouts)
        return params if quantise is None else _placed(rounded_params(params, quantisable, quantise), shapes)
    if is_orbax(directory):
        return load_orbax(directory, shapes, quantisable=quantisable, quantise=quantise, layouts=layouts)
    family = family_for(model_config)
    names, ignored = family.weight_names(model_config), (*IGNORED, *family.left_alone(model_config))
    of = {"scheme": scheme, "quantisable": quantisable, "quantise": quantise, "layouts": layouts}
    if model_config.tie_word_embeddings:
        of["copies"] = {TIED_HEAD: next(name.names for name in names if name.path[-1] == "embedding")}
    params = load_safetensors(directory, shapes, names, ignored=ignored, **of)
    if config.kv_cache_dtype != "fp8":
        return params
    scaled = with_cache_scales(directory, params, names)
    if config.bundle is not None and any(path[-1] == KV_SCALE for path, _ in leaves(scaled)):
        raise ConfigError(
            "bundle",
            f"{config.bundle!r} was made from a config.json, without the scales of 8-bit keys and values that this "
            "checkpoint has; serve it without a bundle, or with kv_cache_dtype bfloat16",
        )
    return scaled


def _placed(params: Any, shapes: Any) -> dict[str, Any]:
    """Parameters and their scales, where the shapes of plain parameters say."""
    where, flat = dict(leaves(shapes)), {}
    for path, array in leaves(params):
        weight = path if path in where else next(p for p in where if (*p[:-1], scale_of(p[-1])) == path)
        sharding = where[weight].sharding
        if path != weight:
            sharding = sharding and along_rows(sharding)
        flat[path] = array if sharding is None else jax.device_put(array, sharding)
    return nest(flat)


def held_params(config: EngineConfig, model_config: ModelConfig, module: nn.Module, shapes: Any) -> dict[str, Any]:
    """What `load_params` gives, as shapes, as far as the configuration alone tells what a checkpoint has in 8 bits."""
    scheme, quantise = read_scheme(config)
    if config.quantization == "none" or (scheme is None and quantise is None):
        return shapes
    tensors: dict[tuple[str, ...], list[str]] = {}
    for name in family_for(model_config).weight_names(model_config):
        tensors.setdefault(name.path, []).append(name.names[0])
    kind, paths = quantise or (scheme and scheme.kind), quantisable_params(module)
    assert kind is not None
    if scheme is not None:
        paths = {path for path in paths if not any(map(scheme.excludes, tensors[path]))}
    return held_shapes(shapes, dict.fromkeys(paths, kind), scheme)


def choose_max_model_len(config: EngineConfig, model_config: ModelConfig) -> int:
    """The longest sequence to serve: what was asked, or the model's own limit rounded down to whole pages."""
    limit = model_config.max_position_embeddings
    if config.max_model_len is not None:
        if limit is not None and config.max_model_len > limit:
            raise ConfigError(
                "max_model_len", f"{config.max_model_len} is above the model's own limit {limit}; give at most that"
            )
        return config.max_model_len
    limit = limit or UNLIMITED_MODEL_LEN
    if config.num_pages is not None:
        limit = min(limit, config.num_pages * config.page_size)
    if limit < config.page_size:
        raise ConfigError("page_size", f"{config.page_size} is above the model's longest sequence {limit}; lower it")
    return limit // config.page_size * config.page_size


def make_runner(config: EngineConfig, model: Model, startup: Startup, max_parked: int = 0) -> Runner:
    """Plan memory, compile every bucket, allocate the caches, with room for `max_parked` sequences more than run."""
    if config.host_cache_bytes:
        check_tiers(config, model)  # before what takes time
    device = jax.devices()[0] if model.mesh is None else model.mesh.devices.flat[0]
    free = device_bytes_free(model.mesh) + tree_bytes(model.params)
    if config.bundle is None:
        executables = Executables(config.compilation_cache(), model.mesh)
    else:
        told = identity(config, model.config, model.dtype, device, max_parked)
        executables = Bundle(Path(config.bundle), model.mesh, told)
    programs = make_programs(
        config,
        model.module,
        model.params,
        model.router,
        vocab_size=model.vocab_size,
        max_model_len=model.max_model_len,
        device_kind=device.device_kind,
        capability=getattr(device, "compute_capability", None),
        available=int(free * config.memory_share(jax.default_backend())),
        executables=executables,
        startup=startup,
        max_parked=max_parked,
    )
    programs.compile()
    startup.phase = "allocating"
    return Runner(programs, model.params)


def make_programs(
    config: EngineConfig,
    module: nn.Module | None,
    params: Any,
    router: Router,
    *,
    vocab_size: int,
    max_model_len: int,
    device_kind: str,
    capability: str | None,
    available: int,
    executables: Executables,
    startup: Startup,
    max_parked: int = 0,
    buckets: list[Bucket] | None = None,
) -> Programs:
    """What an engine of this configuration runs on devices of this kind, each with so many bytes; not compiled yet.

    `buckets` None: all that the configuration asks for.
    """
    return Programs(
        module,
        params,
        router,
        buckets or make_buckets(config.max_num_seqs, config.max_num_batched_tokens),
        vocab_size=vocab_size,
        max_num_seqs=config.max_num_seqs + max_parked,
        page_size=config.page_size,
        pages_per_seq=-(-max_model_len // config.page_size),
        num_pages=config.num_pages,
        chunk_size=config.chunk_size,
        target=target_of(config, device_kind, capability),
        available=available,
        executables=executables,
        startup=startup,
        prefix_caching=config.enable_prefix_caching,
        snapshot_slots=config.snapshot_slots,
        snapshot_dtype=config.snapshot_dtype,  # pyright: ignore[reportArgumentType]
        copies_pages=max_parked > 0,
        has_tiers=config.host_cache_bytes > 0,
    )


def make_ledger(config: EngineConfig, model: Model, memory: MemoryPlan, alpha: float = 0.0) -> Ledger:
    """The books of the caches that a memory plan provides for, with a prefix tree if one is asked for.

    `alpha` is the eviction policy's: 0, which is recency alone, unless the tuner has found another.
    """
    policy = None
    if config.enable_prefix_caching:
        router = model.router
        cost = Cost(
            flops_per_token=2.0 * model.num_parameters,
            flops_per_position=4.0 * (model.config.hidden_size if model.config else 0) * router.num_paged_layers,
            page_size=config.page_size,
            page_bytes=router.bytes_per_page,
            slot_bytes=router.bytes_per_slot,
        )
        policy = Policy(cost, alpha=alpha, span=memory.num_snapshots or memory.num_pages)
    return Ledger(
        page_size=config.page_size,
        num_pages=memory.num_pages,
        num_slots=memory.num_slots,
        num_rows=memory.num_rows,
        num_snapshots=memory.num_snapshots,
        max_per_step=memory.num_staged or None,
        snapshot_interval=config.snapshot_interval,
        policy=policy,
    )


def make_tiers(config: EngineConfig, model: Model, runner: Runner) -> Tiers:
    """The host tier, and the disk tier if there is to be one. Raises ConfigError."""
    check_tiers(config, model)
    tiers = TierConfig(
        host_bytes=config.host_cache_bytes,
        state_share=config.host_cache_state_share,
        policy=config.cache_write_policy,  # pyright: ignore[reportArgumentType]
        disk_url=config.disk_cache_url,
        disk_bytes=config.disk_cache_bytes,
        timeout=config.cache_load_timeout,
    )
    name = b"" if config.disk_cache_url is None else fingerprint(config, model, runner.executables)
    return Tiers(tiers, runner, name, page_size=config.page_size)


def check_tiers(config: EngineConfig, model: Model) -> None:
    """Raises ConfigError for a host tier that does not fit, or holds too little, and a disk that cannot be written."""
    free = psutil.virtual_memory().available
    if config.host_cache_bytes > free:
        raise ConfigError(
            "host_cache_bytes", f"{config.host_cache_bytes} is more than the {free} B of memory left; use less"
        )
    host = HostTier(config.host_cache_bytes, config.host_cache_state_share)
    dtype: Any = config.snapshot_dtype
    store = {} if dtype == "auto" else abstract_store(model.router, 1, dtype)
    page, state = forms(abstract_cache(model.router, slots=1, pages=1), store)
    host.check(page.bytes, state.bytes, -(-model.max_model_len // config.page_size))
    if config.disk_cache_url is not None:
        with contextlib.suppress(OSError, ValueError):  # a tier that is out, and may come back
            Store(config.disk_cache_url).probe()


def make_tuner(config: EngineConfig, model: Model, memory: MemoryPlan, tree: PrefixTree) -> Tuner:
    """A tuner of a tree's policy that tries things out on books like the engine's."""
    return Tuner(tree.policy, lambda alpha: make_ledger(config, model, memory, alpha))


def _dtype(asked: str, platform: str) -> str:
    if asked != "auto":
        return asked
    return "float32" if platform == "cpu" else "bfloat16"
