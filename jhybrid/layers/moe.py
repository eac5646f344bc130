"""Mixture of experts: routers that choose, and Experts that compute on tokens sorted by expert, dropping none."""

from dataclasses import dataclass

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import Array

from jhybrid.layers.linear import INIT_STD, linear
from jhybrid.layers.mlp import GATE_UP_DOWN, activate
from jhybrid.layers.parameter import Scaled, parameter, weight
from jhybrid.mesh import Layout, shard_index, shards, summed_over_shards
from jhybrid.weights.names import TensorName
from kernels_pallas.grouped_matmul import grouped_matmul
from kernels_pallas.spans import Spans


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
    def __call__(self, x: Array, experts: Array, weights: Array, spans: Spans) -> Array:
        """x [T, D], experts and weights [T, k] -> [T, D]; padding tokens reach no expert and give 0."""
        spec = self.spec
        name, width = ("gate_up_proj", 2) if spec.gated else ("up_proj", 1)
        up_shape = (spec.num_experts, width * spec.intermediate_size, spec.input_size)
        down_shape = (spec.num_experts, spec.input_size, spec.intermediate_size)
        over = shards("experts", spec.num_experts)
        up = weight(self, name, nn.initializers.normal(INIT_STD), up_shape, self.dtype, Layout(over))
        down = weight(self, "down_proj", nn.initializers.normal(self.out_std), down_shape, self.dtype, Layout(over))
        if spans.kind != "dense":
            experts = jnp.where(spans.token_valid()[:, None], experts, spec.num_experts)
        compute = summed_over_shards(self._compute, over, (None, None, None, 0, 0))
        return compute(x, experts, weights, up, down).astype(x.dtype)

    def _compute(self, x: Array, experts: Array, weights: Array, up: Array | Scaled, down: Array | Scaled) -> Array:
        """What the experts of `up` and `down`, which may be a shard's, give: [T, D] float32."""
        spec, count = self.spec, (up.values if isinstance(up, Scaled) else up).shape[0]
        experts = experts - shard_index(spec.num_experts // count) * count
        # an expert id past the last one sorts behind every group, and belongs to none
        flat = jnp.where((experts >= 0) & (experts < count), experts, count).reshape(-1)  # [T * k]
        order = jnp.argsort(flat, stable=True)
        place = jnp.zeros_like(order).at[order].set(jnp.arange(order.size, dtype=order.dtype))
        sizes = jnp.bincount(flat, length=count + 1)[:-1].astype(jnp.int32)
        h = _by_expert(x[order // spec.top_k], up, sizes)
        h = activate(jnp.split(h, 2, axis=-1) if spec.gated else [h], spec.activation)
        y = _by_expert(h, down, sizes)[place].reshape(-1, spec.top_k, spec.input_size)  # [T, k, D]
        return jnp.einsum("tkd,tk->td", y.astype(jnp.float32), weights)


def _by_expert(x: Array, weight: Array | Scaled, sizes: Array) -> Array:
    if isinstance(weight, Scaled):
        return grouped_matmul(x, weight.values, sizes, weight.scale)
    return grouped_matmul(x, weight, sizes)


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
