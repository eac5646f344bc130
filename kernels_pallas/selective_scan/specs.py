"""The cases on which every implementation of selective_scan is tested."""

from dataclasses import replace
from typing import Any

import jax.numpy as jnp
import numpy as np

from kernels_pallas.spans import Spans, dense_spans
from kernels_pallas.specs import LAYERS, ROWS, Spec, decode, ragged


def _case(
    name: str,
    spans: Spans,
    *,
    channels: int = 12,
    state_size: int = 8,
    layer: int = 0,
    dtype: Any = jnp.float32,
    state_dtype: Any = jnp.float32,
    dt_bias: tuple[float, ...] = (-3.0,),  # of the channels, in turn
    atol: float = 2e-5,
    **options: Any,
) -> Spec:
    T = spans.token_seq.shape[0]

    def build(seed: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
        rng = np.random.default_rng(seed)
        normal = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)  # noqa: E731
        bias = jnp.asarray([dt_bias[d % len(dt_bias)] for d in range(channels)])
        state = None if spans.kind == "dense" else normal(LAYERS * ROWS, state_size, channels).astype(state_dtype)
        args = (
            normal(T, channels).astype(dtype),
            jnp.logaddexp(0.0, normal(T, channels) + bias),
            -jnp.exp(normal(channels, state_size)),
            normal(T, state_size).astype(dtype),
            normal(T, state_size).astype(dtype),
            normal(channels),
            state,
            spans,
        )
        return args, {"base": layer * ROWS}

    return Spec(name, build, atol, rows=ROWS, **options)


_MIXED = ragged([5, 1, 19, 3], [0, 7, 4, 0])
_ALL_RATES = (-9.0, -3.0, 2.0, 120.0)
_TPU: dict[str, Any] = {"channels": 256, "state_size": 16, "layer": 1, "tpu": True}
_TPU_SLOW: dict[str, Any] = _TPU | {"slow": True}
_TPU_SMALL: dict[str, Any] = _TPU_SLOW | {"channels": 128, "state_size": 8}
_TPU_MIXED = ragged(
    [17, 1, 9, 1, 12], [0, 4, 2, 0, 6], 16, read=[0, 1, 2, 3, 2], write=[0, 1, 2, 3, 4],
    snapshots={(0, 8): 5, (1, 1): 6, (2, 9): 7},
)  # fmt: skip
_BFLOAT16: dict[str, Any] = {"dtype": jnp.bfloat16, "state_dtype": jnp.bfloat16, "atol": 0.1}

_GPU_DECODE = decode([3, 0, 1], 4, snapshots={(0, 1): 5})
_GPU_MIXED = ragged([9, 1, 3, 1], [0, 4, 2, 6], read=[0, 1, 2, 2], write=[0, 1, 2, 4], snapshots={(0, 8): 5, (1, 1): 6})

SPECS = [
    _case("one-sequence", ragged([16], [0], 16)),
    _case("one-token", ragged([1], [0], 16)),
    _case("mixed", _MIXED),
    _case("mixed-chunk64", ragged([5, 1, 70, 3], [0, 7, 4, 0], 64)),
    _case("long-odd", ragged([131], [3], 64), channels=24, state_size=16),
    _case("last-chunk-of-one", ragged([9, 17, 1], [2, 0, 5])),
    _case("fork-beside-its-origin", ragged([3, 10, 1, 1], [6, 6, 4, 4], read=[0, 0, 2, 2], write=[0, 4, 5, 2])),
    _case("fork-two-from-one", ragged([3, 10], [6, 6], write=[4, 5])),
    _case("snapshots", ragged([17, 4, 9], [0, 3, 2], snapshots={(0, 8): 5, (0, 13): 6, (2, 3): 7})),
    _case("snapshots-after-first-token", ragged([6, 5], [4, 0], snapshots={(0, 1): 5, (1, 1): 6, (1, 2): 7})),
    _case("snapshot-in-every-chunk", ragged([1], [4], 64, snapshots={(0, 1): 5})),
    _case("read-elsewhere-and-snapshot", ragged([11], [4], write=[3], snapshots={(0, 5): 6, (0, 8): 5, (0, 11): 7})),
    _case("many-of-one-token", ragged([1] * 7, [3, 0, 1, 4, 0, 6, 2])),
    _case("channels5-states3", _MIXED, channels=5, state_size=3),
    _case("last-layer-snapshots", ragged([17, 4], [0, 3], snapshots={(0, 9): 5, (0, 17): 6, (1, 2): 7}), layer=2),
    _case("bfloat16-activations", _MIXED, dtype=jnp.bfloat16, atol=0.1),
    _case("bfloat16-state", _MIXED, state_dtype=jnp.bfloat16, atol=0.05),
    _case("all-rates-of-decay", ragged([70], [5], 64), dt_bias=_ALL_RATES, atol=2e-3),
    _case("decode", decode([3, 9, 1, 5], 4)),
    _case("decode-padded", decode([3, 0, 1], 4)),
    _case("decode-one", decode([2], 1)),
    _case("decode-fork-beside-its-origin", decode([4, 4, 2, 2], 4, read=[0, 0, 2, 2], write=[0, 4, 5, 2])),
    _case("decode-forked", decode([4, 4, 4], 4, write=[3, 4, 5])),
    _case("decode-snapshots", decode([3, 7, 1], 4, snapshots={(0, 1): 5, (2, 1): 7})),
    _case("decode-snapshot-in-every-chunk", decode([3, 7], 2, snapshots={(0, 1): 5, (1, 1): 7})),
    _case("decode-last-layer", decode([3, 9, 1], 4), channels=5, state_size=3, layer=2),
    _case("decode-bfloat16-state", decode([3, 9, 1], 4), state_dtype=jnp.bfloat16, atol=0.05),
    _case("decode-all-rates-of-decay", decode([3, 9, 1], 4), dt_bias=_ALL_RATES, atol=2e-3),
    _case("gpu-mixed", _GPU_MIXED, channels=128, state_size=4, layer=1, slow=True),
    _case("gpu-decode", _GPU_DECODE, channels=128, state_dtype=jnp.bfloat16, atol=0.05, slow=True),
    _case("tpu-mixed", _TPU_MIXED, **_TPU),
    _case("tpu-mixed-bfloat16", _TPU_MIXED, **_TPU_SLOW, **_BFLOAT16),
    _case("tpu-all-rates-of-decay", ragged([70], [5], 64), **_TPU_SLOW, dt_bias=_ALL_RATES, atol=2e-3),
    _case("tpu-state8-one-lane-tile", _MIXED, **_TPU_SMALL),
    _case("tpu-single-tokens-alone", ragged([1] * 6, [0, 4, 1, 1, 0, 7], 16), **_TPU_SLOW),
    _case("tpu-decode", decode([3, 0, 1], 4, read=[0, 1, 0], write=[0, 1, 4], snapshots={(0, 1): 5}), **_TPU),
    _case("tpu-decode-bfloat16", decode([3, 0], 4), **_TPU_SLOW, **_BFLOAT16),
    _case("dense", dense_spans(2, 64)),
    _case("dense-odd-many-chunks", replace(dense_spans(3, 71), chunk_size=16)),
    _case("dense-short", dense_spans(2, 5), channels=5, state_size=3),
    _case("dense-bfloat16", dense_spans(2, 20), dtype=jnp.bfloat16, atol=0.1),
    _case("dense-all-rates-of-decay", dense_spans(2, 70), dt_bias=_ALL_RATES, atol=2e-3),
]
