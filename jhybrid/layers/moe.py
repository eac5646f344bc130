"""Mixture of experts: routers that choose, and Experts that compute, dropping no token."""

from dataclasses import dataclass
from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import Array

from jhybrid.layers.linear import INIT_STD, linear
from jhybrid.layers.mlp import GATE_UP_DOWN
from jhybrid.layers.parameter import Scaled, parameter, weight
from jhybrid.mesh import Layout, shard_index, shards, summed_over_shards
from jhybrid.weights.names import TensorName
from kernels_pallas.experts import experts
from kernels_pallas.spans import Spans
from kernels_pallas.target import Target


@dataclass(frozen=True)
class ExpertsSpec:
    """Sizes of a bank of experts."""

    num_experts: int  # E
    top_k: int
    input_size: int  # width of what experts read and write
    intermediate_size: int  # I
    activation: str
    gated: bool


class SoftmaxRouter(nn.Module):
    """The k largest logits, weighted by their softmax among themselves, or among all unless `normalise`.

    Parameter: `weight` [E, M] float32.
    """

    num_experts: int
    top_k: int
    hidden_size: int
    normalise: bool = True

    @nn.compact
    def __call__(self, x: Array) -> tuple[Array, Array]:
        """x [T, M] -> experts [T, k] int32, weights [T, k] float32."""
        logits = _router_logits(self, x, self.num_experts, self.hidden_size)
        top, experts = jax.lax.top_k(logits, self.top_k)
        if not self.normalise:
            return experts, jnp.exp(top - jax.nn.logsumexp(logits, axis=-1, keepdims=True))
        return experts, jax.nn.softmax(top, axis=-1)


class SigmoidRouter(nn.Module):
    """Sigmoid scores; a bias that sways the choice but not the weights; choice within the best groups of experts.

    DeepSeek-V3, section 2.1.2 (arXiv:2412.19437). Parameters: `weight` [E, M], `correction_bias` [E] unless not
    `biased`, both float32.
    """

    num_experts: int
    top_k: int
    hidden_size: int
    num_groups: int
    top_groups: int
    normalise: bool
    scaling: float
    biased: bool = True
    normaliser_eps: float = 1e-20

    @nn.compact
    def __call__(self, x: Array) -> tuple[Array, Array]:
        """x [T, M] -> experts [T, k] int32, weights [T, k] float32."""
        scores = jax.nn.sigmoid(_router_logits(self, x, self.num_experts, self.hidden_size))
        choice = jax.lax.stop_gradient(scores)
        if self.biased:
            choice += parameter(self, "correction_bias", nn.initializers.zeros, (self.num_experts,), jnp.float32)
        if self.top_groups < self.num_groups:
            choice = self._within_best_groups(choice)
        _, experts = jax.lax.top_k(choice, self.top_k)
        weights = jnp.take_along_axis(scores, experts, axis=1)
        if self.normalise:
            weights = weights / (weights.sum(axis=1, keepdims=True) + self.normaliser_eps)
        return experts, weights * self.scaling

    def _within_best_groups(self, choice: Array) -> Array:
        """Groups rank by the sum of their two best experts; the others' experts become -inf."""
        groups = choice.reshape(-1, self.num_groups, self.num_experts // self.num_groups)
        best_two, _ = jax.lax.top_k(groups, 2)
        _, kept = jax.lax.top_k(best_two.sum(axis=-1), self.top_groups)
        mask = jax.nn.one_hot(kept, self.num_groups, dtype=jnp.bool_).any(axis=1)  # [T, groups]
        return jnp.where(mask[:, :, None], groups, -jnp.inf).reshape(choice.shape)


class Experts(nn.Module):
    """Parameters: `up_proj` [E, I, D] or, gated, `gate_up_proj` [E, 2I, D] with the gate's rows first; `down_proj`
    [E, D, I].
    """

    spec: ExpertsSpec
    dtype: jnp.dtype
    out_std: float = INIT_STD

    @nn.compact
    def __call__(self, x: Array, chosen: Array, weights: Array, spans: Spans) -> Array:
        """x [T, D], chosen and weights [T, k] -> [T, D]; padding tokens reach no expert and give 0."""
        spec = self.spec
        name, width = ("gate_up_proj", 2) if spec.gated else ("up_proj", 1)
        up_shape = (spec.num_experts, width * spec.intermediate_size, spec.input_size)
        down_shape = (spec.num_experts, spec.input_size, spec.intermediate_size)
        over = shards("experts", spec.num_experts)
        up = weight(self, name, nn.initializers.normal(INIT_STD), up_shape, self.dtype, Layout(over))
        down = weight(self, "down_proj", nn.initializers.normal(self.out_std), down_shape, self.dtype, Layout(over))
        if spans.kind != "dense":
            chosen = jnp.where(spans.token_valid()[:, None], chosen, spec.num_experts)
        compute = summed_over_shards(partial(self._compute, spans.target), over, (None, None, None, 0, 0))
        return compute(x, chosen, weights, up, down).astype(x.dtype)

    def _compute(
        self, target: Target, x: Array, chosen: Array, weights: Array, up: Array | Scaled, down: Array | Scaled
    ) -> Array:
        """What the experts of `up` and `down`, which may be a shard's, give: [T, D] float32."""
        (up, up_scale), (down, down_scale) = (w if isinstance(w, Scaled) else (w, None) for w in (up, down))
        count = up.shape[0]
        mine = chosen - shard_index(self.spec.num_experts // count) * count
        activation = self.spec.activation
        return experts(x, mine, weights, up, down, up_scale, down_scale, activation=activation, target=target)


def gated_expert_names(
    hubs: tuple[str, ...], path: tuple[str, ...], spec: ExpertsSpec, spelled: tuple[str, str, str] = GATE_UP_DOWN
) -> list[TensorName]:
    """Tensors of gated Experts that checkpoints store expert by expert, as gate, up and down, `spelled` so."""
    width = spec.intermediate_size
    places = ("gate_up_proj", (0, width)), ("gate_up_proj", (width, 2 * width)), ("down_proj", None)
    return [
        TensorName(tuple(f"{hub}.{e}.{proj}.weight" for hub in hubs), (*path, parameter), index=e, rows=rows)
        for e in range(spec.num_experts)
        for proj, (parameter, rows) in zip(spelled, places, strict=True)
    ]


def _router_logits(module: nn.Module, x: Array, num_experts: int, hidden_size: int) -> Array:
    """[T, E] float32: routing flips on rounding, so its product is never in a narrower type."""
    weight = parameter(module, "weight", nn.initializers.normal(INIT_STD), (num_experts, hidden_size), jnp.float32)
    return linear(x.astype(jnp.float32), weight)
