"""Decoder: embedding, a stack of layers, a norm and the head; what families of one shape share. They give the layer."""

from collections.abc import Callable
from typing import Protocol

import flax.linen as nn
import jax.numpy as jnp
from jax import Array

from jhybrid.cache.router import AnyCache
from jhybrid.layers.norm import RMSNorm
from jhybrid.layers.vocabulary import Vocabulary
from jhybrid.shapes import Hidden, Tokens
from kernels_pallas.spans import Spans


class DecoderConfig(Protocol):
    """What a Decoder asks of a family's config."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def hidden_size(self) -> int: ...

    @property
    def num_layers(self) -> int: ...

    @property
    def norm_eps(self) -> float: ...

    @property
    def tie_word_embeddings(self) -> bool: ...


class Decoder(nn.Module):
    """Token ids to hidden states; `logits` turns those of chosen tokens into scores.

    `layer(config, layer_id, dtype)` is a module `(x, cache, spans) -> (x, cache)`. Parameters: `vocabulary`,
    `layers_0` and so on, `final_norm`.
    """

    layer: Callable[..., nn.Module]
    config: DecoderConfig
    dtype: jnp.dtype = jnp.float32
    embedding_multiplier: float = 1.0
    logits_multiplier: float = 1.0
    residual_in_fp32: bool = False
    norm_offset: float = 0.0

    def setup(self) -> None:
        config = self.config
        self.vocabulary = Vocabulary(config.vocab_size, config.hidden_size, config.tie_word_embeddings, self.dtype)
        self.layers = [self.layer(config, i, self.dtype) for i in range(config.num_layers)]
        self.final_norm = RMSNorm(config.hidden_size, config.norm_eps, self.dtype, self.norm_offset)

    def __call__(self, token_ids: Tokens, cache: AnyCache, spans: Spans) -> tuple[Hidden, AnyCache]:
        """token_ids [T] -> hidden states after the final norm [T, M], and the cache after this step."""
        x = self.vocabulary.embed(token_ids) * self.embedding_multiplier  # [T, M]
        if self.residual_in_fp32:
            x = x.astype(jnp.float32)
        for layer in self.layers:
            x, cache = layer(x, cache, spans)
        return self.final_norm(x), cache

    def logits(self, hidden: Array) -> Array:
        """hidden [n, M] -> [n, V] float32."""
        return self.vocabulary.logits(hidden) * self.logits_multiplier
