"""Vocabulary: token ids to vectors, and hidden states to scores, with one table for both or one each."""

import flax.linen as nn
import jax.numpy as jnp
from jax import Array

from jhybrid.layers.linear import INIT_STD, linear
from jhybrid.layers.parameter import parameter
from jhybrid.mesh import Layout, on_all, over_shards, shard_index, shards, summed_over_shards
from jhybrid.weights.names import TensorName


class Vocabulary(nn.Module):
    """Parameters: `embedding` [V, M], and `lm_head` [V, M] unless tied."""

    vocab_size: int
    hidden_size: int
    tied: bool
    dtype: jnp.dtype

    def setup(self) -> None:
        shape, normal = (self.vocab_size, self.hidden_size), nn.initializers.normal(INIT_STD)
        self.shards = shards("vocabulary", self.vocab_size)
        layout = Layout(self.shards)
        self.embedding = parameter(self, "embedding", normal, shape, self.dtype, layout)
        self.lm_head = self.embedding if self.tied else parameter(self, "lm_head", normal, shape, self.dtype, layout)

    def embed(self, token_ids: Array) -> Array:
        """token_ids [T] -> [T, M]."""

        def look_up(table: Array, token_ids: Array) -> Array:
            if self.shards == 1:
                return table[token_ids]
            row = token_ids - shard_index(self.shards) * len(table)
            mine = (row >= 0) & (row < len(table))
            return jnp.where(mine[:, None], table[jnp.where(mine, row, 0)], 0)

        return summed_over_shards(look_up, self.shards, (0, None))(self.embedding, token_ids)

    def logits(self, hidden: Array) -> Array:
        """hidden [n, M] -> [n, V] float32."""

        def scores(hidden: Array, head: Array) -> Array:
            return linear(hidden, head, jnp.dtype(jnp.float32))

        # Told to leave the result on all devices, the compiler would gather the head there and not the scores.
        return on_all(over_shards(scores, self.shards, (None, 0), 1)(hidden, self.lm_head))


def vocabulary_names(embedding: tuple[str, ...], path: tuple[str, ...], *, tied: bool) -> list[TensorName]:
    """Tensors of the tables; `embedding` are the spellings of the first."""
    names = [TensorName(embedding, (*path, "embedding"))]
    return names if tied else [*names, TensorName(("lm_head.weight",), (*path, "lm_head"))]
