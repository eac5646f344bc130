"""Cases every implementation of experts must get right."""

from typing import Any

import jax.numpy as jnp
import numpy as np

from kernels_pallas.scaled_matmul.specs import eight_bits
from kernels_pallas.specs import Spec


def _experts(
    name: str,
    *,
    tokens: int = 9,
    count: int = 6,
    k: int = 2,
    width: int = 128,
    inner: int = 24,
    gated: bool = True,
    activation: str = "silu",
    of: list[int] | None = None,
    idle: int = 0,
    scaled: str | None = None,
    plain: int | None = None,
    dtype: str = "float32",
    atol: float = 2e-4,
    tpu: bool = False,
) -> Spec:
    """Each token chooses k of the experts `of` (None: all, and ids that are none); the last `idle` choose none and hold
    NaN, and so does every expert that nobody chooses. `scaled` weights have 8 bits, but for the `plain` one: 0 is up, 1
    down."""

    def build(seed: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
        rng = np.random.default_rng(seed)
        among = np.arange(-1, count + 1) if of is None else np.asarray(of)
        chosen = np.stack([rng.permutation(among)[:k] for _ in range(tokens)]).astype(np.int32)
        chosen[tokens - idle :] = count
        x = rng.standard_normal((tokens, width)).astype(np.float32)
        x[tokens - idle :] = np.nan
        rows = 2 * inner if gated else inner
        shapes = (count, rows, width), (count, width, inner)
        weights = rng.standard_normal((tokens, k)).astype(np.float32)
        options = {"activation": activation}
        if scaled is not None:
            (up, up_scale), (down, down_scale) = (eight_bits(rng, shape, scaled, 1) for shape in shapes)
            arrays = [up, down, up_scale / 16, down_scale / 16]
            if plain is not None:
                whole = arrays[plain].astype(jnp.float32) * arrays[plain + 2]
                arrays[plain : plain + 1], arrays[plain + 2] = [whole.astype(dtype)], None
        else:
            up, down = (rng.standard_normal(shape) / shape[2] ** 0.5 for shape in shapes)
            unused = np.setdiff1d(np.arange(count), chosen)
            up[unused] = down[unused] = np.nan
            arrays = (jnp.asarray(up, dtype), jnp.asarray(down, dtype))
        return (jnp.asarray(x, dtype), jnp.asarray(chosen), jnp.asarray(weights), *arrays), options

    return Spec(name, build, atol, tpu=tpu)


SPECS = [
    _experts("gated", tpu=True),
    _experts("up_alone", gated=False, activation="relu2", tpu=True),
    _experts("few_are_hit", count=40, of=[3, 17, 39], idle=2, tpu=True),
    _experts("nobody_chooses", idle=9, tpu=True),
    _experts("all_choose_one", of=[4], k=1, tpu=True),
    _experts("blocks_of_sublanes", inner=64, width=512, tokens=19, tpu=True),
    _experts("blocks_of_lanes", inner=256, count=3, gated=False, activation="sigmoid", tpu=True),
    _experts("more_than_the_kernel_takes", tokens=40, tpu=True),
    _experts("bfloat16", dtype="bfloat16", inner=32, atol=0.05, tpu=True),
    _experts("gpu-gated", dtype="bfloat16", inner=64, width=128, atol=0.05, tpu=True),
    _experts(
        "gpu-up-alone",
        dtype="bfloat16",
        inner=192,
        width=256,
        count=40,
        of=[3, 17, 38, 39],
        tokens=5,
        idle=1,
        gated=False,
        activation="relu2",
        atol=0.1,
    ),
    _experts("gpu-many-tokens", dtype="bfloat16", inner=128, width=128, tokens=70, k=3, atol=0.05),
    _experts("gpu-twice", dtype="bfloat16", inner=64, width=128, tokens=130, count=2, of=[0, 1], k=1, atol=0.05),
    _experts("gpu-nobody", dtype="bfloat16", inner=64, width=128, idle=9, atol=0.0),
    _experts("gelu", activation="gelu", width=16),
    _experts("odd_sizes", tokens=7, width=11, inner=13, k=3),
    _experts("int8", scaled="int8", inner=128, atol=2e-3, tpu=True),
    _experts("int8_up_alone", scaled="int8", plain=1, inner=128, count=3, tpu=True, atol=2e-3),
    _experts("int8_down_alone", scaled="int8", plain=0, inner=128, count=3, gated=False, tpu=True, atol=2e-3),
    _experts("e4m3", scaled="float8_e4m3fn", inner=32, gated=False, activation="relu2", atol=2e-3, tpu=True),
]
