"""Engine configuration: one frozen dataclass, built once from flags or a file, validated, logged.

`os.environ` is read here and nowhere else.
"""

import os
from dataclasses import dataclass, fields
from pathlib import Path

from jhybrid.errors import ConfigError

PREFIX = "JHYBRID_"
"""Of environment variables that are settings of `jhybrid serve`."""
RESERVED = ("JHYBRID_CACHE_DIR",)
"""Those that every command reads."""
IMPLEMENTATIONS = ("auto", "gpu", "parallel", "reference", "tpu", "xla")
DTYPES = ("auto", "float32", "bfloat16")
KV_CACHE_DTYPES = (*DTYPES, "fp8")
QUANTIZATIONS = ("auto", "none", "int8", "fp8")


@dataclass(frozen=True)
class EngineConfig:
    """What an engine is asked to be. Sizes that are None are derived from the model and the memory at hand."""

    model: str = "demo"
    """Hugging Face directory, Orbax directory, or `demo` for the embedded model."""
    dtype: str = "auto"
    """Weights and activations: auto | float32 | bfloat16. auto is float32 on CPU, else bfloat16."""
    quantization: str = "auto"
    """Weights in 8 bits: auto as the checkpoint has them | none expands to dtype | int8 | fp8 rounds while loading."""
    load_format: str = "auto"
    """auto reads the checkpoint; dummy gives random weights to a directory that has only a config.json."""
    max_model_len: int | None = None
    """Most tokens of prompt and answer together. None: the model's own limit, or what num_pages hold."""
    max_num_seqs: int = 16
    """Sequences that may run at once; also the number of state slots."""
    max_num_batched_tokens: int = 512
    """Most tokens of one step, prefill chunks and decodes together."""
    page_size: int = 16
    """Tokens of one KV page."""
    num_pages: int | None = None
    """KV pages. None: what memory holds, at most what max_num_seqs sequences of max_model_len need."""
    kv_cache_dtype: str = "auto"
    """Dtype of KV pages: auto | float32 | bfloat16 | fp8 (e4m3). auto follows dtype, but is float32 on CPU."""
    state_dtype: str = "float32"
    """Dtype of the recurrent state: float32 | bfloat16."""
    enable_prefix_caching: bool = False
    """Share the cached prefixes of prompts between requests, the recurrent state included."""
    snapshot_slots: int | None = None
    """Snapshots of recurrent state to keep for prefix caching. None: four for each of max_num_seqs, memory allowing."""
    snapshot_interval: int | None = None
    """Also leave a snapshot every so many tokens of a prompt; a multiple of page_size. None: only where it pays."""
    snapshot_dtype: str = "auto"
    """How snapshots are stored: auto (as the running state), bfloat16, or int8 with a scale per head and row."""
    eviction_policy: str = "flop_aware"
    """Which cached prefix goes first: lru, or flop_aware, which also weighs what recomputing it would cost."""
    verify_hits: float = 0.0
    """Share of prefix cache hits to compute again, cold, when idle; a cached prefix that differs is forgotten."""
    host_cache_bytes: int = 0
    """Host memory for cached prefixes that leave the device; 0 for none."""
    host_cache_state_share: float | None = None
    """Share of host_cache_bytes for recurrent states alone. None: whatever was used last stays, states or KV."""
    cache_write_policy: str = "write_through"
    """When prefixes are copied to the host: write_through (when they are computed) or write_back (before eviction)."""
    disk_cache_url: str | None = None
    """Where cached prefixes outlive the engine: file:///DIRECTORY/, gs:// or s3://. None: nowhere."""
    disk_cache_bytes: int = 16 << 30
    """Most bytes under disk_cache_url for this model."""
    cache_load_timeout: float = 2.0
    """Seconds that a request waits for its prefix from host or disk before it is computed anew."""
    memory_fraction: float | None = None
    """Share of the device's free memory that weights, caches and scratch may take together. None: 0.9, on CPU 0.4."""
    max_queue: int = 4096
    """Waiting sequences beyond which a request is refused."""
    chunk_size: int = 64
    """Tokens of one chunk of the recurrent scans."""
    attention_impl: str = "auto"
    """Implementation of attention: auto | tpu | gpu | parallel | xla | reference. auto is the device's own, or the next
    best where that does not support the model; a named one refuses instead."""
    ssm_impl: str = "auto"
    """The same for the ops with recurrent state: scans, delta rule and convolution."""
    moe_impl: str = "auto"
    """The same for experts."""
    tensor_parallel_size: int = 1
    """Devices over which each layer is spread: heads, channels, experts and vocabulary are shared out among them."""
    base_seed: int = 0
    """Seed from which requests without a seed draw theirs."""
    bundle: str | None = None
    """Folder that `jhybrid compile` wrote for these settings: its programs are loaded, and nothing is compiled."""
    compilation_cache_dir: str | None = None
    """Directory that keeps compiled executables. None: $JHYBRID_CACHE_DIR or ~/.cache/jhybrid; "" for off."""
    async_scheduling: bool = True
    """Plan step n+1 while step n runs on the device."""

    def __post_init__(self) -> None:
        for name in ("max_num_seqs", "max_num_batched_tokens", "page_size", "max_queue", "chunk_size"):
            _positive(name, getattr(self, name))
        _positive("tensor_parallel_size", self.tensor_parallel_size)
        for name in ("max_model_len", "num_pages"):
            if getattr(self, name) is not None:
                _positive(name, getattr(self, name))
        for name in ("enable_prefix_caching", "async_scheduling"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(name, f"must be True or False, got {getattr(self, name)!r}")
        if isinstance(self.base_seed, bool) or not isinstance(self.base_seed, int):
            raise ConfigError("base_seed", f"must be an integer, got {self.base_seed!r}")
        for name in ("compilation_cache_dir", "bundle"):
            if getattr(self, name) is not None and not isinstance(getattr(self, name), str):
                raise ConfigError(name, f"must be a string, got {getattr(self, name)!r}")
        if self.bundle == "":
            raise ConfigError("bundle", "'' names no folder; give one that `jhybrid compile` wrote, or leave it out")
        if self.dtype not in DTYPES:
            raise ConfigError("dtype", f"{self.dtype!r} is not one of {', '.join(DTYPES)}")
        if self.quantization not in QUANTIZATIONS:
            raise ConfigError("quantization", f"{self.quantization!r} is not one of {', '.join(QUANTIZATIONS)}")
        if self.load_format not in ("auto", "dummy"):
            raise ConfigError("load_format", f"{self.load_format!r} is not one of auto, dummy")
        if self.kv_cache_dtype == "int8":
            raise ConfigError(
                "kv_cache_dtype",
                "'int8' would need a scale for each token and head beside the pages, which have none; use fp8, which "
                "takes as many bytes and needs none",
            )
        if self.kv_cache_dtype not in KV_CACHE_DTYPES:
            raise ConfigError("kv_cache_dtype", f"{self.kv_cache_dtype!r} is not one of {', '.join(KV_CACHE_DTYPES)}")
        if self.state_dtype not in ("float32", "bfloat16"):
            raise ConfigError("state_dtype", f"{self.state_dtype!r} is not one of float32, bfloat16")
        for name in ("attention_impl", "ssm_impl", "moe_impl"):
            if getattr(self, name) not in IMPLEMENTATIONS:
                raise ConfigError(name, f"{getattr(self, name)!r} is not one of {', '.join(IMPLEMENTATIONS)}")
        if self.memory_fraction is not None and not (_is_share(self.memory_fraction) and self.memory_fraction > 0):
            raise ConfigError("memory_fraction", f"{self.memory_fraction!r} is not in (0, 1]")
        if self.eviction_policy not in ("lru", "flop_aware"):
            raise ConfigError("eviction_policy", f"{self.eviction_policy!r} is not one of lru, flop_aware")
        if not _is_share(self.verify_hits):
            raise ConfigError("verify_hits", f"{self.verify_hits!r} is not in [0, 1]")
        self._check_snapshots()
        self._check_tiers()
        if self.max_model_len is not None and self.max_model_len % self.page_size:
            lower = self.max_model_len // self.page_size * self.page_size
            raise ConfigError(
                "page_size",
                f"{self.page_size} does not divide max_model_len={self.max_model_len}; "
                f"use a page_size that does, or max_model_len={lower or self.page_size}",
            )

    def _check_snapshots(self) -> None:
        slots, interval = self.snapshot_slots, self.snapshot_interval
        if self.snapshot_dtype not in ("auto", "bfloat16", "int8"):
            raise ConfigError("snapshot_dtype", f"{self.snapshot_dtype!r} is not one of auto, bfloat16, int8")
        if slots is not None and (isinstance(slots, bool) or not isinstance(slots, int) or slots < 0):
            raise ConfigError("snapshot_slots", f"must be a non-negative integer, got {slots!r}")
        if not self.enable_prefix_caching:
            asked = {"snapshot_slots": slots, "snapshot_interval": interval, "verify_hits": self.verify_hits}
            asked["snapshot_dtype"] = self.snapshot_dtype if self.snapshot_dtype != "auto" else None
            for name, value in asked.items():
                if value:
                    raise ConfigError(name, f"{value!r} has no effect without enable_prefix_caching; switch that on")
        if interval is None:
            return
        _positive("snapshot_interval", interval)
        if interval % self.page_size:
            raise ConfigError(
                "snapshot_interval",
                f"{interval} is no multiple of page_size={self.page_size}; "
                f"use {-(-interval // self.page_size) * self.page_size}",
            )

    def _check_tiers(self) -> None:
        for name, lowest in (("host_cache_bytes", 0), ("disk_cache_bytes", 1)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < lowest:
                raise ConfigError(name, f"must be an integer of at least {lowest}, got {value!r}")
        share, timeout = self.host_cache_state_share, self.cache_load_timeout
        if share is not None and not (_is_share(share) and 0 < share < 1):
            raise ConfigError("host_cache_state_share", f"{share!r} is not in (0, 1)")
        if self.cache_write_policy not in ("write_through", "write_back"):
            raise ConfigError(
                "cache_write_policy", f"{self.cache_write_policy!r} is not one of write_through, write_back"
            )
        if self.disk_cache_url is not None and "://" not in str(self.disk_cache_url):
            raise ConfigError(
                "disk_cache_url", f"{self.disk_cache_url!r} is no URL; give file:///DIRECTORY/, gs:// or s3://"
            )
        if isinstance(timeout, bool) or not isinstance(timeout, int | float) or not 0 < timeout < float("inf"):
            raise ConfigError("cache_load_timeout", f"must be a positive number of seconds, got {timeout!r}")
        if self.host_cache_bytes and not self.enable_prefix_caching:
            raise ConfigError(
                "host_cache_bytes",
                f"{self.host_cache_bytes} has no effect without enable_prefix_caching; switch that on",
            )
        if not self.host_cache_bytes:
            asked = {"disk_cache_url": self.disk_cache_url, "host_cache_state_share": share}
            for name, value in asked.items():
                if value is not None:
                    raise ConfigError(name, f"{value!r} needs host_cache_bytes, through which prefixes pass; set that")

    def memory_share(self, platform: str) -> float:
        """Share of free memory to use on a platform ("cpu", "gpu", "tpu")."""
        if self.memory_fraction is not None:
            return self.memory_fraction
        return 0.4 if platform == "cpu" else 0.9

    def compilation_cache(self) -> Path | None:
        """Where compiled executables are kept between starts, or None for nowhere."""
        given = self.compilation_cache_dir
        if given is None:
            given = os.environ.get("JHYBRID_CACHE_DIR") or str(Path.home() / ".cache" / "jhybrid")
        return Path(given) if given else None

    def describe(self) -> dict[str, object]:
        """Every field with its value, for the log."""
        return {f.name: getattr(self, f.name) for f in fields(self)}


def environment() -> dict[str, str]:
    """Environment variables that are settings."""
    return {name: value for name, value in os.environ.items() if name.startswith(PREFIX)}


def api_keys() -> tuple[str, ...]:
    """Keys for a server that the environment gives; a command line can be read by others."""
    return tuple(key for key in os.environ.get("JHYBRID_API_KEY", "").split(",") if key)


def compiler_flags() -> dict[str, str]:
    """Environment variables that change what XLA makes of a program."""
    return {name: os.environ[name] for name in ("XLA_FLAGS", "LIBTPU_INIT_ARGS") if name in os.environ}


def _is_share(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0.0 <= value <= 1.0


def _positive(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(name, f"must be a positive integer, got {value!r}")
