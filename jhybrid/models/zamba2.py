"""Zamba2: Mamba2 layers, some of them preceded by one of a few attention-and-MLP blocks that many layers share.

Source: Zamba2 (arXiv:2411.15242), Zamba (arXiv:2405.16712, figure 2 and equation 6); numbers as in transformers 5.24.
Where that differs from itself we follow the published meaning: the step size is clamped to `time_step_limit`, which is
no clamp where the config has none (transformers clamps to `time_step_min`, and in passes of several tokens only).
"""

from dataclasses import dataclass
from typing import Any

import flax.linen as nn
import jax.numpy as jnp
from jax import Array

from jhybrid.cache.router import AnyCache, Part
from jhybrid.errors import ConfigError
from jhybrid.layers.attention import Attention, AttentionSpec, attention_names
from jhybrid.layers.decoder import Decoder
from jhybrid.layers.linear import Linear, out_std
from jhybrid.layers.mamba2 import Mamba2, Mamba2Spec, mamba2_names
from jhybrid.layers.mlp import Mlp
from jhybrid.layers.norm import RMSNorm
from jhybrid.layers.vocabulary import vocabulary_names
from jhybrid.models.hf_config import HfConfig
from jhybrid.models.hf_rope import read_rope
from jhybrid.shapes import Hidden, Tokens
from jhybrid.weights.names import TensorName
from kernels_pallas.spans import Spans

GATED_NORM_EPS = 1e-5  # no key of the published configs says so


@dataclass(frozen=True)
class Zamba2Config:
    """What a Zamba2 is. The n-th hybrid layer uses shared block n modulo `num_blocks`, with adapters of its own."""

    vocab_size: int
    hidden_size: int
    layer_kinds: tuple[str, ...]  # "mamba" | "hybrid"
    mamba: Mamba2Spec
    attention: AttentionSpec  # reads the hidden state and the embedding side by side
    intermediate_size: int
    activation: str
    bias: bool
    num_blocks: int
    adapter_rank: int
    attention_adapters: bool
    norm_eps: float
    max_position_embeddings: int | None
    tie_word_embeddings: bool

    @property
    def num_layers(self) -> int:
        return len(self.layer_kinds)

    @property
    def hybrid_layers(self) -> tuple[int, ...]:
        return tuple(i for i, kind in enumerate(self.layer_kinds) if kind == "hybrid")

    @classmethod
    def from_hf(cls, raw: dict[str, Any]) -> "Zamba2Config":
        """Read a config.json. Raises ConfigError naming the key that is missing, unknown or contradictory."""
        hf = HfConfig(raw)
        hf.one_of("use_long_context", False, default=False)
        hidden, eps = hf.integer("hidden_size"), hf.number("rms_norm_eps", least=0.0)
        layers, allowed = hf.integer("num_hidden_layers"), ("mamba", "hybrid")
        kinds = hf.layer_kinds("layers_block_type", "layer_types", allowed=allowed, layers=layers)
        return cls(
            vocab_size=hf.integer("vocab_size"),
            hidden_size=hidden,
            layer_kinds=kinds,
            mamba=_mamba_spec(hf, hidden),
            attention=_attention_spec(hf, hidden),
            intermediate_size=hf.integer("intermediate_size", default=4 * hidden),
            activation=hf.activation("hidden_act"),
            bias=hf.flag("add_bias_linear"),
            num_blocks=hf.integer("num_mem_blocks"),
            adapter_rank=hf.integer("adapter_rank"),
            attention_adapters=hf.flag("use_shared_attention_adapter"),
            norm_eps=eps,
            max_position_embeddings=hf.integer("max_position_embeddings"),
            tie_word_embeddings=hf.flag("tie_word_embeddings", default=True),
        )

    def layer_parts(
        self, *, page_size: int, kv_dtype: str, state_dtype: str, conv_dtype: str
    ) -> list[tuple[Part, ...]]:
        """What each layer keeps in the cache: hybrid ones both a slot and pages, though they share parameters."""
        slot, page = self.mamba.parts(state_dtype, conv_dtype), self.attention.parts(page_size, kv_dtype)
        return [slot + page if kind == "hybrid" else slot for kind in self.layer_kinds]


class Adapter(nn.Module):
    """A low-rank addition to a shared projection. Parameters: `down` [rank, in], `up` [out, rank]."""

    out_features: int
    rank: int
    dtype: jnp.dtype

    @nn.compact
    def __call__(self, x: Array) -> Array:
        """x [T, in] -> [T, out]."""
        h = Linear(self.rank, x.shape[1], self.dtype, name="down", exact=True)(x)
        return Linear(self.out_features, self.rank, self.dtype, name="up", exact=True)(h)


class Adapters(nn.Module):
    """What one hybrid layer adds to the projections of the block that it uses."""

    config: Zamba2Config
    dtype: jnp.dtype

    def setup(self) -> None:
        config, width = self.config, self.config.attention.hidden_size
        self.mlp = Adapter(2 * config.intermediate_size, config.adapter_rank, self.dtype)
        if config.attention_adapters:
            self.q, self.k, self.v = (Adapter(width, config.adapter_rank, self.dtype) for _ in range(3))

    def to_qkv(self, x: Array) -> tuple[Array, ...] | None:
        """x [T, 2M] -> three times [T, Hq Dh]."""
        if not self.config.attention_adapters:
            return None
        return self.q(x), self.k(x), self.v(x)

    def to_mlp(self, x: Array) -> Array:
        """x [T, M] -> [T, 2I]."""
        return self.mlp(x)


class SharedBlock(nn.Module):
    """Norm, attention, norm, MLP, with no residual."""

    config: Zamba2Config
    dtype: jnp.dtype

    def setup(self) -> None:
        config = self.config
        self.input_norm = RMSNorm(2 * config.hidden_size, config.norm_eps, self.dtype)
        self.attention = Attention(config.attention, -1, self.dtype)
        self.feed_forward_norm = RMSNorm(config.hidden_size, config.norm_eps, self.dtype)
        sizes = (config.hidden_size, config.intermediate_size, config.activation)
        self.feed_forward = Mlp(*sizes, gated=True, dtype=self.dtype, bias=config.bias)

    def __call__(
        self, x: Array, embedded: Array, adapters: Adapters, layer_id: int, cache: AnyCache, spans: Spans
    ) -> tuple[Array, AnyCache]:
        """x, embedded [T, M] -> [T, M]; `layer_id` is the layer whose pages are meant."""
        h = self.input_norm(jnp.concatenate([x, embedded], axis=1))
        h, cache = self.attention(h, cache, spans, added=adapters.to_qkv(h), layer_id=layer_id)
        h = self.feed_forward_norm(h)
        return self.feed_forward(h, added=adapters.to_mlp(h)), cache


class Layer(nn.Module):
    """Norm, Mamba2, residual; in a hybrid layer the mixer's input has the shared block's output added."""

    config: Zamba2Config
    layer_id: int
    dtype: jnp.dtype

    def setup(self) -> None:
        config, std = self.config, out_std(self.config.num_layers)
        self.input_norm = RMSNorm(config.hidden_size, config.norm_eps, self.dtype)
        self.mixer = Mamba2(config.mamba, self.layer_id, self.dtype, std)
        if config.layer_kinds[self.layer_id] == "hybrid":
            self.adapters = Adapters(config, self.dtype)
            self.linear = Linear(config.hidden_size, config.hidden_size, self.dtype)

    def __call__(
        self, x: Array, embedded: Array, block: SharedBlock | None, cache: AnyCache, spans: Spans
    ) -> tuple[Array, AnyCache]:
        """x, embedded [T, M] -> [T, M]."""
        h = x
        if block is not None:
            shared, cache = block(x, embedded, self.adapters, self.layer_id, cache, spans)
            h = x + self.linear(shared)
        h, cache = self.mixer(self.input_norm(h), cache, spans)
        return x + h, cache


class Zamba2(Decoder):
    """A Decoder whose hybrid layers are handed the embeddings and their shared block. More parameters: `blocks_0`..."""

    def setup(self) -> None:
        super().setup()
        assert isinstance(self.config, Zamba2Config)
        self.blocks = [SharedBlock(self.config, self.dtype) for _ in range(self.config.num_blocks)]

    def __call__(self, token_ids: Tokens, cache: AnyCache, spans: Spans) -> tuple[Hidden, AnyCache]:
        """token_ids [T] -> hidden states after the final norm [T, M], and the cache after this step."""
        x = embedded = self.vocabulary.embed(token_ids)  # [T, M]
        uses = self.config.hybrid_layers  # pyright: ignore[reportAttributeAccessIssue]
        for i, layer in enumerate(self.layers):
            block = self.blocks[uses.index(i) % len(self.blocks)] if i in uses else None
            x, cache = layer(x, embedded, block, cache, spans)
        return self.final_norm(x), cache


def decoder(config: Zamba2Config, dtype: jnp.dtype) -> Zamba2:
    """The model: token ids to hidden states and scores."""
    return Zamba2(Layer, config, dtype)


def weight_names(config: Zamba2Config) -> list[TensorName]:
    """Where each tensor of a checkpoint goes; a shared block and all its adapters are stored under its first layer."""
    names = vocabulary_names(("model.embed_tokens.weight",), ("vocabulary",), tied=config.tie_word_embeddings)
    uses = config.hybrid_layers
    for n, first in enumerate(uses[: config.num_blocks]):
        names += _block_names(config, f"model.layers.{first}.shared_transformer", (f"blocks_{n}",))
    for i, kind in enumerate(config.layer_kinds):
        hub, path = f"model.layers.{i}", (f"layers_{i}",)
        if kind == "hybrid":
            use = uses.index(i)
            first = f"model.layers.{uses[use % config.num_blocks]}.shared_transformer"
            names.append(TensorName((f"{hub}.linear.weight",), (*path, "linear", "weight")))
            names += _adapter_names(config, first, use, (*path, "adapters"))
            hub = f"{hub}.mamba_decoder"
        names.append(TensorName((f"{hub}.input_layernorm.weight",), (*path, "input_norm", "weight")))
        names += mamba2_names((f"{hub}.mamba",), (*path, "mixer"), config.mamba)
    names.append(TensorName(("model.final_layernorm.weight",), ("final_norm", "weight")))
    return names


def _block_names(config: Zamba2Config, hub: str, path: tuple[str, ...]) -> list[TensorName]:
    """Gate and up projections are one tensor in the file already."""
    norms = {"input_layernorm": "input_norm", "pre_ff_layernorm": "feed_forward_norm"}
    names = [TensorName((f"{hub}.{name}.weight",), (*path, ours, "weight")) for name, ours in norms.items()]
    for kind in ("weight", "bias") if config.bias else ("weight",):
        names += [
            TensorName((f"{hub}.feed_forward.{proj}.{kind}",), (*path, "feed_forward", proj, kind))
            for proj in ("gate_up_proj", "down_proj")
        ]
    return names + attention_names((f"{hub}.self_attn",), (*path, "attention"), config.attention)


def _adapter_names(config: Zamba2Config, hub: str, use: int, path: tuple[str, ...]) -> list[TensorName]:
    lists = {"mlp": "feed_forward.gate_up_proj_adapter_list"}
    if config.attention_adapters:
        lists |= {part: f"self_attn.linear_{part}_adapter_list" for part in ("q", "k", "v")}
    return [
        TensorName((f"{hub}.{name}.{use}.{n}.weight",), (*path, part, ours, "weight"))
        for part, name in lists.items()
        for n, ours in enumerate(("down", "up"))
    ]


def _mamba_spec(hf: HfConfig, hidden: int) -> Mamba2Spec:
    groups, inner = hf.integer("mamba_ngroups"), hf.integer("mamba_expand") * hidden
    heads = hf.multiple("n_mamba_heads", of=("mamba_ngroups", groups))
    if inner % heads:
        raise ConfigError("n_mamba_heads", f"{heads} heads do not divide mamba_expand * hidden_size = {inner}")
    hf.one_of("use_conv_bias", True, default=True)
    return Mamba2Spec(
        hidden_size=hidden,
        num_heads=heads,
        head_dim=inner // heads,
        state_size=hf.integer("mamba_d_state"),
        num_groups=groups,
        conv_kernel=hf.integer("mamba_d_conv", least=2),
        norm_groups=groups,
        norm_eps=GATED_NORM_EPS,
        conv_bias=True,
        proj_bias=hf.flag("add_bias_linear"),
        dt_limit=hf.dt_limit("time_step_limit"),
        dt_init=(hf.number("time_step_min", default=0.001), hf.number("time_step_max", default=0.1)),
    )


def _attention_spec(hf: HfConfig, hidden: int) -> AttentionSpec:
    """Heads make up twice the hidden size, and are scaled as if they made up the hidden size."""
    heads = hf.integer("num_attention_heads")
    hf.one_of("num_key_value_heads", heads, default=heads)
    if 2 * hidden % heads:
        raise ConfigError("num_attention_heads", f"{heads} heads do not divide 2 * hidden_size = {2 * hidden}")
    head_dim = 2 * hidden // heads
    return AttentionSpec(
        hidden_size=2 * hidden,
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=head_dim,
        scale=(head_dim / 2) ** -0.5,
        rope=read_rope(hf, head_dim, default_theta=10000.0) if hf.flag("use_mem_rope") else None,
        out_size=hidden,
    )
