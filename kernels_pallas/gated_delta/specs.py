"""The cases on which every implementation of gated_delta is tested."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kernels_pallas.spans import Spans, dense_spans
from kernels_pallas.specs import LAYERS, ROWS, Spec, decode, ragged


def _case(
    name: str,
    spans: Spans,
    *,
    heads: tuple[int, int] = (2, 4),  # Hk, H
    dims: tuple[int, int] = (8, 4),  # dk, dv
    by_channel: bool = False,
    layer: int = 0,
    dtype: Any = jnp.float32,
    state_dtype: Any = jnp.float32,
    decay: tuple[float, ...] = (0.05,),  # typical -g of the heads, in turn
    most_beta: float = 1.0,
    alike: float = 0.0,  # what all keys and queries of a head have in common, times what is each one's own
    atol: float = 2e-5,
    **options: Any,
) -> Spec:
    T, (Hk, H), (dk, dv) = spans.token_seq.shape[0], heads, dims

    def build(seed: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
        rng = np.random.default_rng(seed)
        normal = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)  # noqa: E731
        unit = lambda x: x / jnp.linalg.norm(x, axis=-1, keepdims=True)  # noqa: E731
        common = alike * normal(1, Hk, dk) if alike else 0.0
        typical = jnp.asarray([decay[h % len(decay)] for h in range(H)])
        g = -typical * jnp.exp(normal(T, H))
        if by_channel:
            g = -typical[:, None] * jnp.exp(normal(T, H, dk))
        state = None if spans.kind == "dense" else normal(LAYERS * ROWS, H, dk, dv).astype(state_dtype)
        args = (
            unit(normal(T, Hk, dk) + common).astype(dtype),
            unit(normal(T, Hk, dk) + common).astype(dtype),
            normal(T, H, dv).astype(dtype),
            g,
            most_beta * jax.nn.sigmoid(normal(T, H)),
            state,
            spans,
        )
        return args, {"base": layer * ROWS}

    return Spec(name, build, atol, rows=ROWS, **options)


_MIXED = ragged([5, 1, 19, 3], [0, 7, 4, 0])
_LONG = ragged([70], [5], 64)
_ALL_RATES = (1e-4, 0.05, 3.0, 500.0)
_CHANNELS: dict[str, Any] = {"by_channel": True, "heads": (4, 4)}

_GPU: dict[str, Any] = {"slow": True, "atol": 0.05}
_GPU_DECODE = decode([3, 0, 1, 3], 5, read=[0, 1, 2, 0], write=[0, 1, 2, 4], snapshots={(0, 1): 5, (1, 1): 6})
_GPU_MIXED = ragged(
    [17, 1, 9, 1, 12], [0, 4, 2, 0, 6], 64, read=[0, 1, 2, 3, 2], write=[0, 1, 2, 3, 4],
    snapshots={(0, 8): 5, (1, 1): 6, (2, 9): 7},
)  # fmt: skip
# with a common part of 2, keys overlap by 0.8, and what one token changes the next ones see
_GPU_CHUNKS: dict[str, Any] = _GPU | {"atol": 0.1, "dtype": jnp.bfloat16, "heads": (1, 2), "alike": 2.0}
_GPU_REFLECTING: dict[str, Any] = _GPU_CHUNKS | {"decay": (1e-4, 0.05), "most_beta": 2.0, "atol": 0.3}
_TPU: dict[str, Any] = {"dims": (128, 128), "tpu": True, "layer": 1}
_TPU_SLOW: dict[str, Any] = _TPU | {"slow": True}
_TPU_WIDE: dict[str, Any] = _TPU_SLOW | {"dims": (128, 256), "heads": (2, 2)}
_TPU_MIXED = ragged(
    [17, 1, 9, 1, 12], [0, 4, 2, 0, 6], 16, read=[0, 1, 2, 3, 2], write=[0, 1, 2, 3, 4],
    snapshots={(0, 8): 5, (1, 1): 6, (2, 9): 7},
)  # fmt: skip
_BFLOAT16: dict[str, Any] = {"dtype": jnp.bfloat16, "state_dtype": jnp.bfloat16, "atol": 0.05}

SPECS = [
    _case("one-sequence", ragged([16], [0], 16)),
    _case("one-token", ragged([1], [0], 16)),
    _case("mixed", _MIXED),
    _case("mixed-chunk64", ragged([5, 1, 70, 3], [0, 7, 4, 0], 64)),
    _case("mixed-chunk24", ragged([5, 1, 70, 3], [0, 7, 4, 0], 24)),
    _case("long-odd", ragged([131], [3], 64), dims=(16, 8)),
    _case("last-chunk-of-one", ragged([9, 17, 1], [2, 0, 5])),
    _case("fork-beside-its-origin", ragged([3, 10, 1, 1], [6, 6, 4, 4], read=[0, 0, 2, 2], write=[0, 4, 5, 2])),
    _case("fork-two-from-one", ragged([3, 10], [6, 6], write=[4, 5])),
    _case("snapshots", ragged([17, 4, 9], [0, 3, 2], snapshots={(0, 8): 5, (0, 13): 6, (2, 3): 7})),
    _case("snapshots-after-first-token", ragged([6, 5], [4, 0], snapshots={(0, 1): 5, (1, 1): 6, (1, 2): 7})),
    _case("snapshot-in-every-chunk", ragged([1], [4], 64, snapshots={(0, 1): 5})),
    _case("read-elsewhere-and-snapshot", ragged([11], [4], write=[3], snapshots={(0, 5): 6, (0, 8): 5, (0, 11): 7})),
    _case("many-of-one-token", ragged([1] * 7, [3, 0, 1, 4, 0, 6, 2])),
    _case("one-key-head-for-all", _MIXED, heads=(1, 6), dims=(4, 12)),
    _case("heads3", _MIXED, heads=(3, 3), dims=(5, 7)),
    _case("last-layer-snapshots", ragged([17, 4], [0, 3], snapshots={(0, 9): 5, (0, 17): 6, (1, 2): 7}), layer=2),
    _case("negative-eigenvalues", _LONG, most_beta=2.0, decay=(1e-4, 0.05), atol=1e-4),
    _case("bfloat16-activations", _MIXED, dtype=jnp.bfloat16, atol=0.05),
    _case("bfloat16-state", _MIXED, state_dtype=jnp.bfloat16, atol=0.05),
    _case("all-rates-of-decay", _LONG, decay=_ALL_RATES),
    _case("channels", _MIXED, **_CHANNELS),
    _case("channels-long", ragged([131, 1, 40], [3, 2, 0], 64), dims=(16, 8), **_CHANNELS),
    _case("channels-grouped-chunk24", ragged([70], [0], 24), by_channel=True),
    _case("channels-snapshots", ragged([17, 4], [0, 3], snapshots={(0, 9): 5, (1, 2): 7}), layer=1, **_CHANNELS),
    _case("channels-all-rates-of-decay", _LONG, decay=_ALL_RATES, **_CHANNELS),
    _case("decode", decode([3, 9, 1, 5], 4)),
    _case("decode-padded", decode([3, 0, 1], 4)),
    _case("decode-one", decode([2], 1)),
    _case("decode-fork-beside-its-origin", decode([4, 4, 2, 2], 4, read=[0, 0, 2, 2], write=[0, 4, 5, 2])),
    _case("decode-forked", decode([4, 4, 4], 4, write=[3, 4, 5])),
    _case("decode-snapshots", decode([3, 7, 1], 4, snapshots={(0, 1): 5, (2, 1): 7})),
    _case("decode-snapshot-in-every-chunk", decode([3, 7], 2, snapshots={(0, 1): 5, (1, 1): 7})),
    _case("decode-heads6-last-layer", decode([3, 9, 1], 4), heads=(3, 6), dims=(5, 7), layer=2),
    _case("decode-bfloat16-state", decode([3, 9, 1], 4), state_dtype=jnp.bfloat16, atol=0.05),
    _case("decode-all-rates-of-decay", decode([3, 9, 1], 4), decay=_ALL_RATES),
    _case("decode-channels", decode([3, 0, 1], 4), decay=_ALL_RATES, **_CHANNELS),
    _case("gpu-decode", _GPU_DECODE, dims=(64, 32), decay=_ALL_RATES, layer=1, slow=True),
    _case("gpu-decode-channels", decode([3], 1), dims=(128, 16), state_dtype=jnp.bfloat16, **_CHANNELS, **_GPU),
    _case("gpu-chunks", _GPU_MIXED, dims=(64, 64), layer=1, **_GPU_CHUNKS),
    _case("gpu-chunks-keys128", ragged([70, 3], [3, 0], 64), dims=(128, 64), **_GPU_CHUNKS),
    _case("gpu-chunks-all-rates-of-decay", _LONG, dims=(64, 128), decay=_ALL_RATES, **_GPU_CHUNKS),
    _case("gpu-chunks-negative-eigenvalues", _LONG, dims=(64, 64), **_GPU_REFLECTING),
    _case("gpu-chunks-channels", _GPU_MIXED, dims=(128, 64), decay=_ALL_RATES, by_channel=True, **_GPU_CHUNKS),
    _case("tpu-mixed", _TPU_MIXED, **_TPU, atol=1e-4),
    _case("tpu-mixed-bfloat16", _TPU_MIXED, **_TPU_SLOW, **_BFLOAT16),
    _case("tpu-all-rates-of-decay", _LONG, **_TPU_SLOW, decay=_ALL_RATES, atol=1e-4),
    _case("tpu-negative-eigenvalues", _LONG, **_TPU_SLOW, most_beta=2.0, decay=(1e-4, 0.05), atol=1e-4),
    _case("tpu-wide-values", _MIXED, **_TPU_WIDE, atol=1e-4),
    _case("tpu-single-tokens-alone", ragged([1] * 6, [0, 4, 1, 1, 0, 7], 16), **_TPU_SLOW),
    _case("tpu-channels", _TPU_MIXED, **_TPU, **_CHANNELS, atol=1e-4),
    _case("tpu-channels-bfloat16", _TPU_MIXED, **_TPU_SLOW, **_CHANNELS, **_BFLOAT16),
    _case("tpu-channels-grouped", _LONG, **_TPU_SLOW, by_channel=True, atol=1e-4),
    _case("tpu-channels-all-rates-of-decay", _LONG, **_TPU_SLOW, decay=_ALL_RATES, **_CHANNELS, atol=1e-4),
    _case("tpu-decode", decode([3, 0, 1], 4, read=[0, 1, 0], write=[0, 1, 4], snapshots={(0, 1): 5}), **_TPU),
    _case("tpu-decode-bfloat16", decode([3, 0], 4), **_TPU_SLOW, **_BFLOAT16),
    _case("tpu-decode-channels", decode([3, 0, 1], 4), **_TPU_SLOW, decay=_ALL_RATES, **_CHANNELS),
    _case("dense", dense_spans(2, 64)),
    _case("dense-odd-many-chunks", replace(dense_spans(3, 71), chunk_size=16)),
    _case("dense-short-heads3", dense_spans(2, 5), heads=(3, 3), dims=(5, 7)),
    _case("dense-bfloat16", dense_spans(2, 20), dtype=jnp.bfloat16, atol=0.05),
    _case("dense-channels", replace(dense_spans(2, 71), chunk_size=40), decay=_ALL_RATES, **_CHANNELS),
]
