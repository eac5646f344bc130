"""The cases on which every implementation of causal_conv is tested."""

from typing import Any

import jax.numpy as jnp
import numpy as np

from kernels_pallas.spans import Spans, dense_spans
from kernels_pallas.specs import LAYERS, ROWS, Spec, decode, ragged


def _case(
    name: str,
    spans: Spans,
    *,
    taps: int = 4,
    window_rows: int | None = None,
    width: int = 12,
    bias: bool = True,
    activation: str | None = "silu",
    layer: int = 0,
    dtype: Any = jnp.float32,
    window_dtype: Any = jnp.float32,
    atol: float = 1e-6,
    **options: Any,
) -> Spec:
    T = spans.token_seq.shape[0]

    def build(seed: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
        rng = np.random.default_rng(seed)
        normal = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)  # noqa: E731
        window = (
            None if spans.kind == "dense" else normal(LAYERS * ROWS, window_rows or taps, width).astype(window_dtype)
        )
        args = (
            normal(T, width).astype(dtype),
            normal(width, taps).astype(dtype),
            normal(width).astype(dtype) if bias else None,
            window,
            spans,
        )
        return args, {"base": layer * ROWS, "activation": activation}

    return Spec(name, build, atol, rows=ROWS, **options)


_MIXED = ragged([5, 1, 19, 3, 2], [0, 7, 4, 0, 1])
_BF16 = {"dtype": jnp.bfloat16, "window_dtype": jnp.bfloat16, "atol": 0.05}

_TPU: dict[str, Any] = {"width": 256, "layer": 1, "tpu": True}
_TPU_SLOW: dict[str, Any] = _TPU | {"slow": True}
_TPU_MIXED = ragged(
    [17, 1, 9, 1, 2], [0, 4, 2, 0, 6], 16, read=[0, 1, 2, 3, 2], write=[0, 1, 2, 3, 4],
    snapshots={(0, 8): 5, (1, 1): 6, (2, 1): 7},
)  # fmt: skip

_GPU_DECODE = decode([3, 0, 1, 3], 5, read=[0, 1, 2, 0], write=[0, 1, 2, 4], snapshots={(0, 1): 5, (1, 1): 6})

SPECS = [
    _case("one-sequence", ragged([16], [0])),
    _case("shorter-than-taps", ragged([2, 1, 3], [0, 0, 0])),
    _case("continued-before-taps-are-full", ragged([1, 2], [1, 2])),
    _case("mixed", _MIXED),
    _case("mixed-2-taps", _MIXED, taps=2),
    _case("mixed-3-taps-no-activation-no-bias", _MIXED, taps=3, activation=None, bias=False),
    _case("mixed-7-taps", _MIXED, taps=7),
    _case("fork-beside-its-origin", ragged([3, 10, 1, 1], [6, 6, 4, 4], read=[0, 0, 2, 2], write=[0, 4, 5, 2])),
    _case("fork-two-from-one", ragged([3, 10], [6, 6], write=[4, 5])),
    _case("snapshots", ragged([17, 4, 9], [0, 3, 2], snapshots={(0, 2): 5, (0, 13): 6, (2, 3): 7})),
    _case("snapshot-after-first-token", ragged([6], [0], snapshots={(0, 1): 5})),
    _case("second-layer", _MIXED, layer=1),
    _case("bfloat16", _MIXED, **_BF16),
    _case("decode", decode([3, 9, 1, 5], 4)),
    _case("decode-padded", decode([3, 0, 1], 4)),
    _case("decode-fork-beside-its-origin", decode([4, 4, 2, 2], 4, read=[0, 0, 2, 2], write=[0, 4, 5, 2])),
    _case("decode-forked", decode([4, 4, 4], 4, write=[3, 4, 5])),
    _case("decode-snapshots-last-layer", decode([3, 7, 1], 4, snapshots={(0, 1): 5, (2, 1): 7}), layer=2),
    _case("decode-2-taps-no-activation", decode([3, 9], 4), taps=2, activation=None),
    _case("decode-bfloat16", decode([3, 9], 4), **_BF16),
    _case("tpu-mixed", _TPU_MIXED, **_TPU),
    _case("tpu-mixed-bfloat16", _TPU_MIXED, **_TPU_SLOW, **_BF16),
    _case("tpu-mixed-2-taps-no-activation-no-bias", _MIXED, **_TPU_SLOW, taps=2, activation=None, bias=False),
    _case("tpu-mixed-3-taps", _TPU_MIXED, **_TPU_SLOW, taps=3, window_rows=4, activation=None),
    _case("tpu-mixed-7-taps-bfloat16", _TPU_MIXED, **_TPU_SLOW, taps=7, window_rows=8, **_BF16),
    _case("tpu-decode-3-taps", decode([3, 0, 1], 4), **_TPU_SLOW, taps=3, window_rows=4, **_BF16),
    _case("tpu-decode-7-taps", decode([3, 0, 9], 4), **_TPU_SLOW, taps=7, window_rows=8),
    _case("tpu-decode", decode([3, 0, 1], 4, read=[0, 1, 0], write=[0, 1, 4], snapshots={(0, 1): 5}), **_TPU_SLOW),
    _case("tpu-decode-bfloat16", decode([3, 0], 4), **_TPU_SLOW, **_BF16),
    _case("gpu-decode", _GPU_DECODE, width=256, layer=1, slow=True),
    _case("gpu-decode-2-taps", decode([3, 0], 3), width=128, taps=2, activation=None, bias=False, slow=True, **_BF16),
    _case("dense", dense_spans(2, 11)),
    _case("dense-shorter-than-taps", dense_spans(3, 2), bias=False),
    _case("dense-bfloat16", dense_spans(2, 11), **_BF16),
]
