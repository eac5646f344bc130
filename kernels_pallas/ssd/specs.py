"""The cases on which every implementation of ssd is tested."""

from dataclasses import replace
from typing import Any

import jax.numpy as jnp
import numpy as np

from kernels_pallas.spans import Spans, dense_spans, make_spans
from kernels_pallas.specs import LAYERS, ROWS, SCRATCH, Spec, decode, ragged


def _case(
    name: str,
    spans: Spans,
    *,
    heads: int = 4,
    groups: int = 1,
    head_dim: int = 4,
    state_size: int = 8,
    layer: int = 0,
    dtype: Any = jnp.float32,
    state_dtype: Any = jnp.float32,
    dt_bias: float = -3.0,
    rates: tuple[float, ...] = (1.0,),  # factors of A of the heads, in turn
    atol: float = 2e-5,
    **options: Any,
) -> Spec:
    T = spans.token_seq.shape[0]

    def build(seed: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
        rng = np.random.default_rng(seed)
        normal = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)  # noqa: E731
        # Biases of alternating sign in the extreme cases: heads that forget at once beside heads that never do.
        signs = jnp.asarray([1.0, -1.0] * heads)[:heads] if abs(dt_bias) > 10 else 1.0
        dt = jnp.logaddexp(0.0, normal(T, heads) + dt_bias * signs)
        state = None
        if spans.kind != "dense":
            state = normal(LAYERS * ROWS, state_size, heads * head_dim).astype(state_dtype)
        args = (
            normal(T, heads, head_dim).astype(dtype),
            dt,
            -jnp.exp(normal(heads)) * jnp.asarray([rates[h % len(rates)] for h in range(heads)]),
            normal(T, groups, state_size).astype(dtype),
            normal(T, groups, state_size).astype(dtype),
            normal(heads),
            state,
            spans,
        )
        return args, {"base": layer * ROWS}

    return Spec(name, build, atol, rows=ROWS, **options)


_MIXED = ragged([5, 1, 19, 3], [0, 7, 4, 0], 8)
_SNAPSHOTS = {(0, 8): 5, (0, 13): 6, (2, 3): 7}

_EXACT = make_spans([10, 6], [0, 5], [0, 1], [0, 1], num_tokens=16, num_seqs=2, scratch_slot=SCRATCH, chunk_size=8)

_TPU: dict[str, Any] = {"groups": 2, "head_dim": 64, "state_size": 16, "layer": 1, "tpu": True}
_TPU_SLOW: dict[str, Any] = _TPU | {"slow": True}
_TPU_MIXED = ragged(
    [81, 1, 9, 1, 12], [0, 4, 2, 0, 6], 16, read=[0, 1, 2, 3, 2], write=[0, 1, 2, 3, 4],
    snapshots={(0, 8): 5, (1, 1): 6, (2, 9): 7},
)  # fmt: skip

_GPU: dict[str, Any] = {"heads": 2, "head_dim": 64, "state_size": 64, "dtype": jnp.bfloat16, "atol": 0.25}
_GPU_MIXED = ragged(
    [17, 1, 9, 1, 12], [0, 4, 2, 0, 6], 64, read=[0, 1, 2, 3, 2], write=[0, 1, 2, 3, 4],
    snapshots={(0, 8): 5, (1, 1): 6, (2, 9): 7},
)  # fmt: skip

SPECS = [
    _case("one-sequence", ragged([16], [0], 16)),
    _case("one-token", ragged([1], [0], 16)),
    _case("no-padding", _EXACT),
    _case("one-token-continued", ragged([1], [9], 16)),
    _case("mixed-chunk8", _MIXED),
    _case("mixed-chunk16", ragged([5, 1, 19, 3], [0, 7, 4, 0], 16)),
    _case("mixed-chunk64", ragged([5, 1, 70, 3], [0, 7, 4, 0], 64)),
    _case("long-odd", ragged([131], [3], 64), head_dim=8, state_size=16),
    _case("last-chunk-of-one", ragged([9, 17, 1], [2, 0, 5], 8)),
    _case("fork-beside-its-origin", ragged([3, 10, 1, 1], [6, 6, 4, 4], 8, read=[0, 0, 2, 2], write=[0, 4, 5, 2])),
    _case("fork-two-from-one", ragged([3, 10], [6, 6], 8, write=[4, 5])),
    _case("snapshots", ragged([17, 4, 9], [0, 3, 2], 8, snapshots=_SNAPSHOTS)),
    _case("snapshots-after-first-token", ragged([6, 5], [4, 0], 8, snapshots={(0, 1): 5, (1, 1): 6, (1, 2): 7})),
    _case("snapshot-in-every-chunk", ragged([1], [4], 64, snapshots={(0, 1): 5})),
    _case("read-elsewhere-and-snapshot", ragged([11], [4], 8, write=[3], snapshots={(0, 5): 6, (0, 8): 5, (0, 11): 7})),
    _case("many-of-one-token", ragged([1] * 7, [3, 0, 1, 4, 0, 6, 2], 8)),
    _case("groups2-heads6", _MIXED, groups=2, heads=6),
    _case("heads3", _MIXED, heads=3, head_dim=5),
    _case("second-layer", _MIXED, layer=1),
    _case("last-layer-snapshots", ragged([17, 4], [0, 3], 8, snapshots={(0, 9): 5, (0, 17): 6, (1, 2): 7}), layer=2),
    _case("bfloat16-activations", _MIXED, dtype=jnp.bfloat16, atol=0.1),
    _case("bfloat16-state", _MIXED, state_dtype=jnp.bfloat16, atol=0.05),
    _case("extreme-dt", ragged([5, 1, 19, 3], [0, 7, 4, 0], 16), dt_bias=120.0, atol=2e-3),
    _case("mild-and-strong-decays", ragged([70], [5], 64), dt_bias=2.0, atol=1e-4),
    _case("decode", decode([3, 9, 1, 5], 4)),
    _case("decode-padded", decode([3, 0, 1], 4)),
    _case("decode-one", decode([2], 1)),
    _case("decode-fork-beside-its-origin", decode([4, 4, 2, 2], 4, read=[0, 0, 2, 2], write=[0, 4, 5, 2])),
    _case("decode-forked", decode([4, 4, 4], 4, write=[3, 4, 5])),
    _case("decode-snapshots", decode([3, 7, 1], 4, snapshots={(0, 1): 5, (2, 1): 7})),
    _case("decode-snapshot-in-every-chunk", decode([3, 7], 2, snapshots={(0, 1): 5, (1, 1): 7})),
    _case("decode-groups2-heads6-last-layer", decode([3, 9, 1], 4), groups=2, heads=6, layer=2),
    _case("decode-bfloat16-state", decode([3, 9, 1], 4), state_dtype=jnp.bfloat16, atol=0.05),
    _case(
        "decode-state64-fork-and-snapshot",
        decode([3, 0, 1, 3], 5, read=[0, 1, 2, 0], write=[0, 1, 2, 4], snapshots={(0, 1): 5, (1, 1): 6}),
        groups=2,
        head_dim=8,
        state_size=64,
        layer=1,
    ),
    _case("decode-state128-bfloat16", decode([5], 2), head_dim=8, state_size=128, state_dtype=jnp.bfloat16, atol=0.1),
    _case("decode-extreme-dt", decode([3, 9, 1], 4), dt_bias=120.0, atol=2e-3),
    _case("gpu-mixed", _GPU_MIXED, **_GPU, groups=2, layer=1, slow=True),
    _case("gpu-state128", ragged([70, 3], [3, 0], 64), **dict(_GPU, state_size=128, heads=1), slow=True),
    _case("gpu-state256", ragged([70, 3], [3, 0], 64), **dict(_GPU, state_size=256, heads=1), slow=True),
    _case("gpu-strong-decays", ragged([70], [5], 64), **_GPU, rates=(3000.0, 1e-3), slow=True),
    _case("tpu-mixed", _TPU_MIXED, **_TPU),
    _case("tpu-mixed-bfloat16", _TPU_MIXED, **_TPU_SLOW, dtype=jnp.bfloat16, state_dtype=jnp.bfloat16, atol=0.1),
    _case("tpu-extreme-dt", ragged([5, 1, 19, 3], [0, 7, 4, 0], 16), **_TPU_SLOW, dt_bias=120.0, atol=2e-3),
    _case("tpu-mild-and-strong-decays", ragged([70], [5], 64), **_TPU_SLOW, dt_bias=2.0, atol=1e-4),
    _case("tpu-head-dim-128", _MIXED, **dict(_TPU_SLOW, head_dim=128, groups=1)),
    _case("tpu-head-dim-32-one-group", _MIXED, **dict(_TPU_SLOW, head_dim=32, groups=1)),
    _case("tpu-no-single-tokens", ragged([17, 31], [0, 4], 16), **_TPU_SLOW),
    _case("tpu-single-tokens-alone", ragged([1] * 6, [0, 4, 1, 1, 0, 7], 16), **_TPU_SLOW),
    _case("tpu-decode", decode([3, 0, 1], 4, read=[0, 1, 0], write=[0, 1, 4], snapshots={(0, 1): 5}), **_TPU),
    _case(
        "tpu-decode-bfloat16", decode([3, 0], 4), **_TPU_SLOW, dtype=jnp.bfloat16, state_dtype=jnp.bfloat16, atol=0.1
    ),
    _case("tpu-decode-two-lanes-tiles", decode([3, 9], 4), **dict(_TPU_SLOW, groups=1)),
    _case("dense", dense_spans(2, 64)),
    _case("dense-odd-many-chunks", replace(dense_spans(3, 71), chunk_size=16)),
    _case("dense-short-groups2-heads6", dense_spans(2, 5), groups=2, heads=6),
    _case("dense-bfloat16", dense_spans(2, 20), dtype=jnp.bfloat16, atol=0.1),
    _case("dense-extreme-dt", dense_spans(2, 70), dt_bias=120.0, atol=2e-3),
]
