"""Routers and experts against loops over tokens; padding reaches no expert."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jhybrid.layers.moe import Experts, ExpertsSpec, SigmoidRouter, SoftmaxRouter
from kernels_pallas.spans import Spans, make_spans

T, D, E, K, I = 12, 8, 6, 3, 10


def spans_of(valid: int, kind: str = "ragged") -> Spans:
    return make_spans([valid], [0], [0], [0], num_tokens=T, num_seqs=1, scratch_slot=1, kind=kind, chunk_size=4)


def random(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng([seed, *shape]).normal(size=shape).astype(np.float32)


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("crowded", [True, False])
def test_experts_equal_a_loop_over_tokens(gated: bool, crowded: bool):
    """Also when all tokens want the same experts, which a capacity would drop."""
    spec = ExpertsSpec(E, K, D, I, "silu" if gated else "relu2", gated)
    module = Experts(spec, jnp.dtype("float32"))
    x, weights = random(T, D), np.abs(random(T, K))
    rng = np.random.default_rng(1)
    chosen = np.stack([np.arange(K) if crowded else rng.permutation(E)[:K] for _ in range(T)]).astype(np.int32)
    valid = 9
    up, down = random(E, (2 if gated else 1) * I, D), random(E, D, I)
    params = {"gate_up_proj" if gated else "up_proj": up, "down_proj": down}
    poisoned = x.copy()
    poisoned[valid:] = np.nan
    ours = np.asarray(jax.jit(module.apply)({"params": params}, poisoned, chosen, weights, spans_of(valid)))
    for t in range(valid):
        total = np.zeros(D, np.float32)
        for e, w in zip(chosen[t], weights[t], strict=True):
            h = up[e] @ x[t]
            h = h[:I] / (1 + np.exp(-h[:I])) * h[I:] if gated else np.maximum(h, 0) ** 2
            total += w * (down[e] @ h)
        np.testing.assert_allclose(ours[t], total, rtol=1e-4, atol=1e-4)


def test_padding_chooses_no_expert(monkeypatch: pytest.MonkeyPatch):
    seen = []

    def record(x, chosen, *_, **__):
        seen.append(np.asarray(chosen))
        return jnp.zeros(x.shape)

    monkeypatch.setattr("jhybrid.layers.moe.experts", record)
    module = Experts(ExpertsSpec(E, K, D, I, "relu2", gated=False), jnp.dtype("float32"))
    params = {"up_proj": random(E, I, D), "down_proj": random(E, D, I)}
    chosen = np.tile(np.array([5, 0, 2], np.int32), (T, 1))
    module.apply({"params": params}, random(T, D), chosen, np.ones((T, K), np.float32), spans_of(7))
    [given] = seen
    assert given[:7].tolist() == [[5, 0, 2]] * 7
    assert np.all(given[7:] == E)


def test_softmax_router_weighs_the_chosen_among_themselves():
    x, weight = random(T, D), random(E, D)
    experts, weights = jax.jit(SoftmaxRouter(E, K, D).apply)({"params": {"weight": weight}}, x)
    logits = x @ weight.T
    for t in range(T):
        best = np.argsort(-logits[t])[:K]
        assert experts[t].tolist() == best.tolist()
        expected = np.exp(logits[t, best]) / np.exp(logits[t, best]).sum()
        np.testing.assert_allclose(weights[t], expected, rtol=1e-5)


def sigmoid_router(bias: np.ndarray, x: np.ndarray, weight: np.ndarray, **change) -> tuple[np.ndarray, np.ndarray]:
    settings = {"num_groups": 3, "top_groups": 2, "normalise": True, "scaling": 2.5} | change
    router = SigmoidRouter(E, 2, D, **settings)
    experts, weights = jax.jit(router.apply)({"params": {"weight": weight, "correction_bias": bias}}, x)
    return np.asarray(experts), np.asarray(weights)


def test_sigmoid_router_chooses_within_the_best_groups():
    x, weight, bias = random(T, D), random(E, D), random(E) * 0.3
    experts, weights = sigmoid_router(bias, x, weight)
    scores = 1 / (1 + np.exp(-(x @ weight.T)))
    grouped_differs = 0
    for t in range(T):
        choice = scores[t] + bias
        groups = choice.reshape(3, 2)
        kept = np.argsort(-groups.sum(1))[:2]
        masked = np.where(np.isin(np.arange(3), kept)[:, None], groups, -np.inf).reshape(-1)
        best = np.argsort(-masked)[:2]
        grouped_differs += set(best) != set(np.argsort(-choice)[:2])
        assert set(experts[t]) == set(best)
        np.testing.assert_allclose(weights[t], 2.5 * scores[t, experts[t]] / scores[t, experts[t]].sum(), rtol=1e-5)
    assert grouped_differs, "the groups never mattered; the test shows nothing"


def test_correction_bias_sways_the_choice_alone():
    x, weight = random(T, D), random(E, D)
    bias = np.zeros(E, np.float32)
    bias[4] = 10
    experts, weights = sigmoid_router(bias, x, weight, normalise=False, scaling=1.0)
    scores = 1 / (1 + np.exp(-(x @ weight.T)))
    assert (experts == 4).any(axis=1).all()
    np.testing.assert_allclose(weights, np.take_along_axis(scores, experts, 1), rtol=1e-5)


def test_routing_is_float32_in_a_bfloat16_model():
    x = jnp.asarray(random(T, D), jnp.bfloat16)
    router = SoftmaxRouter(E, K, D)
    params = jax.jit(router.init)(jax.random.key(0), x)["params"]
    assert params["weight"].dtype == jnp.float32
    _, weights = jax.jit(router.apply)({"params": params}, x)
    assert weights.dtype == jnp.float32
