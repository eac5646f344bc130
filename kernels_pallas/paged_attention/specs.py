"""Cases every implementation of paged_attention must get right."""

from typing import Any

import jax.numpy as jnp
import numpy as np

from kernels_pallas.spans import Kind, dense_spans, make_spans
from kernels_pallas.specs import Spec
from kernels_pallas.words import to_words


def _paged(
    name: str,
    lens: list[int],
    first: list[int],
    *,
    heads: tuple[int, int, int] = (4, 2, 8),  # Hq, Hkv, Dh
    page: int = 4,
    num_tokens: int | None = None,
    num_seqs: int | None = None,
    kind: Kind = "ragged",
    chunk_size: int = 8,
    layers: int = 1,
    layer: int = 0,
    free_pages: int = 3,
    dtype: str = "float32",
    held_as: str | None = None,  # dtype of pages; None: the same
    atol: float = 1e-5,
    values: bool = True,
    tpu: bool = False,
    chip: str = "v5e",
    slow: bool = False,
    **options: Any,
) -> Spec:
    """Sequences of `first[i]` cached tokens and `lens[i]` new ones, on shuffled pages of one of `layers` layers.

    Everything that must not be read is NaN: free and scratch pages, the other layers, the rest of a
    sequence's last page, pages before its sliding window, and the q, k, v of padding.
    """
    num_tokens, num_seqs = num_tokens or sum(lens), num_seqs or len(lens)
    needed = [-(-(a + b) // page) for a, b in zip(first, lens, strict=True)]
    num_pages = sum(needed) + free_pages
    q_heads, kv_heads, dim = heads

    def build(seed: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
        rng = np.random.default_rng(seed)
        base = layer * (num_pages + 1)
        order = list(rng.permutation(num_pages))
        held = (2 if values else 1) * kv_heads
        pages = np.full((layers * (num_pages + 1), page, held * dim), np.nan, np.float32)
        table = []
        for cached, count in zip(first, needed, strict=True):
            table.append([int(order.pop()) for _ in range(count)])
            seen_from = max(0, cached + 1 - options.get("sliding_window", cached + 1))
            for at in range(seen_from, cached):
                pages[base + table[-1][at // page], at % page] = rng.standard_normal(held * dim)
        spans = make_spans(
            lens,
            first,
            [0] * len(lens),
            [0] * len(lens),
            table,
            num_tokens=num_tokens,
            num_seqs=num_seqs,
            scratch_slot=0,
            scratch_page=num_pages,
            table_width=max(needed) + 1,
            kind=kind,
            chunk_size=chunk_size,
        )
        shapes = [(num_tokens, q_heads, dim), (num_tokens, kv_heads, dim), (num_tokens, kv_heads, dim)]
        q, k, v = (rng.standard_normal(shape).astype(np.float32) for shape in shapes)
        for x in (q, k, v):
            x[sum(lens) :] = np.nan
        q, k, v, pages = (jnp.asarray(x, dtype) for x in (q, k, v, pages))
        pages = to_words(pages, jnp.dtype(held_as or dtype))
        return (q, k, v if values else None, pages, spans), {"scale": dim**-0.5, "base": base, **options}

    return Spec(name, build, atol, rows=num_pages + 1, tpu=tpu, chip=chip, slow=slow)


def _dense(name: str, num_seqs: int, length: int, heads: tuple[int, int, int], **options: Any) -> Spec:
    """Whole sequences with no cache."""
    q_heads, kv_heads, dim = heads

    def build(seed: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
        rng = np.random.default_rng(seed)
        q, k, v = (
            jnp.asarray(rng.standard_normal((num_seqs * length, h, dim)), jnp.float32)
            for h in (q_heads, kv_heads, kv_heads)
        )
        return (q, k, v, None, dense_spans(num_seqs, length)), {"scale": dim**-0.5, **options}

    return Spec(name, build, atol=1e-5)


_TPU_LENS = ([1, 13, 1, 20, 5, 1], [7, 0, 130, 6, 148, 0])
_TPU_MIXED: dict[str, Any] = {
    "heads": (4, 2, 128), "page": 16, "chunk_size": 16, "num_tokens": 48, "num_seqs": 7, "layers": 2, "layer": 1,
}  # fmt: skip
_TPU_128: dict[str, Any] = {"heads": (12, 2, 128), "page": 128}
_TPU_64: dict[str, Any] = {"heads": (8, 1, 64), "page": 64}
_SLOW: dict[str, Any] = {"tpu": True, "slow": True}
_FP8: dict[str, Any] = _SLOW | {"held_as": "uint8"}
_GPU: dict[str, Any] = {"page": 16, "dtype": "bfloat16", "atol": 3e-2, "slow": True}
_GPU_32: dict[str, Any] = _GPU | {"page": 32}
_GPU_64: dict[str, Any] = _GPU | {"page": 64}
_GPU_128: dict[str, Any] = _GPU | {"page": 128}

SPECS = [
    _paged("prefill", [11], [0]),
    _paged("chunks_of_one_sequence", [21], [0], chunk_size=8),
    _paged("after_a_cached_prefix", [9], [13]),
    _paged("mixed", [1, 13, 1, 20, 5, 1], [7, 0, 30, 6, 18, 0], chunk_size=16, num_tokens=48, num_seqs=7),
    _paged("padding", [1, 10, 3], [5, 3, 0], num_tokens=24, num_seqs=6),
    _paged("one_token", [1], [0]),
    _paged("page_boundary", [4, 4, 5], [4, 0, 3]),
    _paged("page_16_past_a_block", [20, 1], [150, 300], page=16, chunk_size=16),
    _paged("page_32_head_128", [3, 40], [127, 96], page=32, heads=(4, 4, 128), chunk_size=64),
    _paged("ratio_3_head_64", [7, 1, 2], [6, 17, 0], page=16, heads=(12, 4, 64)),
    _paged("one_kv_head", [7, 1], [2, 9], heads=(4, 1, 8)),
    _paged("second_layer", [5, 1], [3, 8], layers=3, layer=1, num_tokens=8, num_seqs=3),
    _paged("last_layer", [5, 1], [3, 8], layers=3, layer=2, num_tokens=8, num_seqs=3),
    _paged("sliding_window", [1, 9, 30], [40, 200, 0], sliding_window=7),
    _paged("window_of_one", [1, 9], [10, 3], sliding_window=1),
    _paged("soft_cap", [1, 9], [10, 3], soft_cap=2.0),
    _paged("window_and_cap", [1, 9], [140, 135], sliding_window=133, soft_cap=3.0, page=16),
    _paged("bfloat16", [6, 1, 2], [9, 33, 0], page=16, heads=(6, 2, 64), dtype="bfloat16", atol=3e-2),
    _paged("decode", [1] * 4, [0, 3, 4, 150], kind="decode"),
    _paged(
        "decode_padding", [1] * 3, [5, 290, 31], kind="decode", num_tokens=8, num_seqs=8, page=16, layers=2, layer=1
    ),
    _paged("decode_one", [1], [127], kind="decode", page=32, heads=(12, 4, 64)),
    _paged("decode_window_cap", [1] * 3, [300, 128, 2], kind="decode", page=16, sliding_window=20, soft_cap=4.0),
    _paged("decode_bfloat16", [1] * 3, [20, 47, 0], kind="decode", page=16, dtype="bfloat16", atol=3e-2),
    _paged("fp8", [6, 1, 2], [9, 33, 0], page=16, heads=(6, 2, 64), held_as="uint8", num_tokens=12, num_seqs=4),
    _paged("decode_fp8", [1] * 3, [20, 47, 0], kind="decode", page=16, held_as="uint8"),
    _paged("fp8_values_are_keys", [9, 3], [0, 5], heads=(4, 1, 12), values=False, held_as="uint8"),
    _paged("values_are_keys", [1, 13, 1, 20], [7, 0, 30, 6], heads=(4, 1, 12), values=False, layers=2, layer=1),
    _paged("values_are_keys_two_heads", [9, 3], [0, 5], values=False, num_tokens=16, num_seqs=3),
    _paged("decode_values_are_keys", [1] * 3, [300, 0, 2], kind="decode", page=16, heads=(4, 1, 12), values=False),
    _paged("gpu_decode_long", [1] * 3, [700, 0, 31], kind="decode", heads=(4, 1, 64), num_tokens=4, num_seqs=4, **_GPU),
    _paged(
        "gpu_decode_window",
        [1, 1],
        [130, 63],
        kind="decode",
        heads=(4, 2, 256),
        sliding_window=70,
        **_GPU_32,
    ),
    _paged("gpu_mixed_cap", [1, 40, 5], [7, 100, 0], heads=(8, 1, 64), soft_cap=2.0, **_GPU_64),
    _paged(
        "gpu_mixed_window",
        [21, 1],
        [70, 200],
        heads=(6, 2, 128),
        sliding_window=50,
        layers=2,
        layer=1,
        num_tokens=24,
        num_seqs=3,
        **_GPU_128,
    ),
    _paged("tpu_mixed", *_TPU_LENS, **_TPU_MIXED, tpu=True),
    _paged("tpu_mixed_head_64_window", *_TPU_LENS, **_TPU_MIXED | {"heads": (4, 2, 64)}, sliding_window=70, **_SLOW),
    _paged("tpu_mixed_head_256_cap", *_TPU_LENS, **_TPU_MIXED | {"heads": (4, 4, 256)}, soft_cap=2.0, **_SLOW),
    _paged("tpu_mixed_bfloat16", *_TPU_LENS, **_TPU_MIXED, dtype="bfloat16", atol=3e-2, **_SLOW),
    _paged("tpu_mixed_fp8", *_TPU_LENS, **_TPU_MIXED | {"page": 32}, **_FP8, chip="tpu7x"),
    _paged("tpu_mixed_fp8_bfloat16", *_TPU_LENS, **_TPU_MIXED | {"page": 32}, **_FP8, dtype="bfloat16", atol=3e-2),
    _paged("tpu_decode_fp8", [1] * 3, [300, 0, 127], kind="decode", **_TPU_64, **_FP8),
    _paged(
        "tpu_decode_fp8_window",
        [1] * 3,
        [300, 0, 127],
        kind="decode",
        sliding_window=20,
        **_TPU_64,
        **_FP8,
        chip="tpu7x",
    ),
    _paged("tpu_decode_page_128", [1] * 3, [300, 0, 127], kind="decode", **_TPU_128, **_SLOW),
    _paged("tpu_decode_page_64_window", [1] * 3, [300, 0, 127], kind="decode", sliding_window=20, **_TPU_64, **_SLOW),
    _dense("dense", 3, 17, (6, 2, 8)),
    _dense("dense_window_cap", 2, 20, (4, 4, 8), sliding_window=6, soft_cap=2.0),
]
