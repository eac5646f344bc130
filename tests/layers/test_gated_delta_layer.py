"""GatedDelta: initialisation fit to train from, and where the rows of a checkpoint's projections go."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jhybrid.cache.router import Cache, NoCache, Router
from jhybrid.layers import gated_delta as layer
from jhybrid.layers.gated_delta import GatedDelta, GatedDeltaSpec, gated_delta_names
from jhybrid.weights.places import slices, taken
from kernels_pallas.spans import dense_spans, make_spans
from kernels_pallas.target import Target

SPEC = GatedDeltaSpec(
    hidden_size=8, num_k_heads=2, num_v_heads=4, k_dim=3, v_dim=5, conv_kernel=4, norm_eps=1e-6, bottleneck=None
)


@pytest.mark.parametrize("bottleneck", [None, 6])
def test_initialisation(bottleneck: int | None):
    by_channel = bottleneck is not None
    spec = GatedDeltaSpec(8, 64, 64, 4, 4, 4, 1e-6, channel_decay=by_channel, bottleneck=bottleneck)
    module = GatedDelta(spec, 0, jnp.dtype("bfloat16"))

    def init(key):
        return module.init(key, jnp.zeros((2, 8)), NoCache(), dense_spans(1, 2))["params"]

    params = jax.jit(init)(jax.random.key(0))
    A, dt = np.exp(params["A_log"]), np.log1p(np.exp(params["dt_bias"]))
    assert dt.shape == ((256,) if by_channel else (64,))
    assert 1 <= A.min() <= A.max() <= 16
    assert 0.00099 < dt.min() < dt.max() < 0.101
    assert params["A_log"].dtype == params["dt_bias"].dtype == params["norm"]["weight"].dtype == jnp.float32
    assert params["in_proj"]["weight"].dtype == params["conv_weight"].dtype == jnp.bfloat16


@pytest.mark.parametrize("bottleneck", [None, 128])
def test_prompts_of_bfloat16_models_are_what_the_gpu_kernel_takes(bottleneck: int | None, monkeypatch):
    """The kernel refuses what is not bfloat16 when it is traced, and forced it has nobody to leave it to."""
    monkeypatch.setattr(layer, "gated_delta", partial(layer.gated_delta, implementation="gpu"))
    spec = GatedDeltaSpec(128, 2, 2, 128, 128, 4, 1e-6, bottleneck=bottleneck)
    module, router = GatedDelta(spec, 0, jnp.dtype("bfloat16")), Router([spec.parts("float32", "bfloat16")])
    arrays = {name: jnp.zeros((3 * n, *part.shape), part.dtype) for name, (part, n) in router.arrays.items()}
    spans = make_spans([3, 1], [0, 4], [0, 1], [0, 1], num_tokens=8, num_seqs=2, scratch_slot=2)
    spans = replace(spans, target=Target(capability="9.0"))
    x, cache = jnp.zeros((8, 128), jnp.bfloat16), Cache(router, arrays)
    out, _ = jax.eval_shape(lambda: module.init_with_output(jax.random.key(0), x, cache, spans)[0])
    assert out.shape == (8, 128)
    assert out.dtype == jnp.bfloat16


def test_interleaved_rows_go_where_the_mixer_reads_them():
    """A checkpoint's rows of key head 0 (q, k, its v heads, its gates), then of key head 1."""
    names = gated_delta_names(
        ("hub",),
        (),
        SPEC,
        projections={"qkvz": ("q", "k", "v", "gate"), "ba": ("beta", "decay")},
        convolutions={},
        renamed={},
        interleaved=True,
    )
    sizes = {"q": 3, "k": 3, "v": 10, "z": 10, "b": 2, "a": 2}  # of one key head

    def labels(parts: str) -> dict[int, list[list[str]]]:
        return {head: [[f"{part}{head}.{i}" for i in range(sizes[part])] for part in parts] for head in (0, 1)}

    rows = {
        tensor: [label for head in (0, 1) for part in labels(tensor)[head] for label in part]
        for tensor in ("qkvz", "ba")
    }
    placed = {"in_proj": np.full(sum(SPEC.sizes.values()), "", object)}
    placed["control_proj"] = np.full(sum(SPEC.control_sizes.values()), "", object)
    for name in names:
        tensor = name.names[0].split(".")[1]
        if tensor in rows:
            placed[name.path[0]][slices(name)] = taken(name, np.array(rows[tensor], object)).reshape(-1)
    for module, parts in (("in_proj", "qkvz"), ("control_proj", "ba")):
        order = [label for part in parts for head in (0, 1) for label in labels(part)[head][0]]
        assert placed[module].tolist() == order
