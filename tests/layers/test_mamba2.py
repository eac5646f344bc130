"""Mamba2's step sizes: clamped, free of overflow, 0 for padding; and initialisation fit to train from."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np

from jhybrid.cache.router import NoCache
from jhybrid.layers.mamba2 import Mamba2, Mamba2Spec, step_size
from kernels_pallas.spans import dense_spans, make_spans

SPEC = Mamba2Spec(
    hidden_size=8,
    num_heads=4,
    head_dim=4,
    state_size=8,
    num_groups=2,
    conv_kernel=4,
    norm_groups=2,
    norm_eps=1e-5,
    conv_bias=True,
    proj_bias=False,
    dt_limit=(0.0, float("inf")),
)


def sizes(dt: list[float], limit: tuple[float, float], valid: int) -> np.ndarray:
    """`step_size` [T] of one head without bias, the tokens past `valid` being padding."""
    spans = make_spans([valid], [0], [0], [0], num_tokens=len(dt), num_seqs=1, scratch_slot=1)
    step = jax.jit(lambda dt: step_size(dt, jnp.zeros(1), limit, spans))
    return np.asarray(step(jnp.array(dt, jnp.float32)[:, None]))[:, 0]


def test_softplus_does_not_overflow():
    np.testing.assert_allclose(sizes([1000.0, -1000.0, 0.0], SPEC.dt_limit, 3), [1000.0, 0.0, np.log(2)], rtol=1e-6)


def test_clamped_to_the_limit_and_padding_is_zero():
    """The lower limit must not lift padding above 0, which would decay the state."""
    dt = sizes([1000.0, -1000.0, 0.0, -1000.0, np.nan], (0.05, 2.0), 3)
    np.testing.assert_allclose(dt, [2.0, 0.05, np.log(2), 0.0, 0.0], rtol=1e-6)


def init_params_of(module: Mamba2) -> dict:
    def init(key):
        return module.init(key, jnp.zeros((2, module.spec.hidden_size)), NoCache(), dense_spans(1, 2))["params"]

    return jax.jit(init)(jax.random.key(0))


def test_initialisation():
    many = replace(SPEC, num_heads=512, num_groups=1, norm_groups=1)
    module = Mamba2(many, 0, jnp.dtype("bfloat16"))
    params = init_params_of(module)
    A, dt = np.exp(params["A_log"]), np.log1p(np.exp(params["dt_bias"]))
    assert A.min() >= 1
    assert A.max() <= 16
    assert 7 < A.mean() < 10
    assert dt.min() > 0.00099
    assert dt.max() < 0.101
    assert abs(np.median(np.log(dt)) - np.log(0.01)) < 0.3
    islands = {"A_log", "D", "dt_bias"}
    assert {k for k, v in params.items() if k in islands and v.dtype == jnp.float32} == islands
    assert params["norm"]["weight"].dtype == jnp.float32
    assert params["in_proj"]["weight"].dtype == params["conv_weight"].dtype == jnp.bfloat16
