"""Family: a model's config reader, its module and the places of its weights, as the rest of the engine sees them."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import Array

from jhybrid.cache.router import NoCache, Part
from jhybrid.layers.parameter import LAYOUTS, QUANTISABLE
from jhybrid.mesh import AS_STORED, WHOLE, Layout
from jhybrid.weights.names import TensorName
from jhybrid.weights.places import leaves, nest
from kernels_pallas.spans import dense_spans


class ModelConfig(Protocol):
    """What every family's config can say. Each is a frozen dataclass with more fields of its own."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def hidden_size(self) -> int: ...

    @property
    def num_layers(self) -> int: ...

    @property
    def max_position_embeddings(self) -> int | None:
        """Longest context the model was made for; None where nothing limits it."""
        ...

    @property
    def tie_word_embeddings(self) -> bool: ...

    def layer_parts(
        self, *, page_size: int, kv_dtype: str, state_dtype: str, conv_dtype: str
    ) -> list[tuple[Part, ...]]:
        """What each layer keeps in the cache, for the Router."""
        ...


@dataclass(frozen=True)
class Family:
    """`module(config, dtype)` is the model; its methods are `__call__(token_ids, cache, spans) -> (hidden, cache)`
    and, with `method="logits"`, `logits(hidden) -> float32 scores`.
    """

    architecture: str  # as in config.json's `architectures`
    model_type: str
    config: Any  # the config class; `config.from_hf(raw)` reads it
    module: Callable[..., nn.Module]
    weight_names: Callable[[Any], list[TensorName]]
    also: tuple[str, ...] = ()  # the architecture and model_type of the same model beside a vision tower
    left_alone: Callable[[Any], Sequence[str]] = lambda config: ()  # regular expressions of tensors that are not served


def abstract_params(module: nn.Module) -> dict[str, Any]:
    """The parameter tree as shapes and dtypes; nothing is allocated."""
    return jax.eval_shape(lambda: _init(module, jax.random.key(0)))


def quantisable_params(module: nn.Module) -> frozenset[tuple[str, ...]]:
    """Paths of the parameters that may be held in 8 bits, as their layers declare. Nothing is allocated."""
    declared = jax.eval_shape(lambda: module.init(jax.random.key(0), *_example()).get(QUANTISABLE, {}))
    return frozenset(path for path, _ in leaves(declared))


def layouts_of(module: nn.Module) -> dict[tuple[str, ...], Layout]:
    """How each parameter, by its path, is shared out on the mesh in use. Nothing is allocated."""
    declared = jax.eval_shape(lambda: module.init(jax.random.key(0), *_example())[LAYOUTS])
    return dict(leaves(declared))


def init_params(
    module: nn.Module, key: Array, shapes: Any = None, layouts: Mapping[tuple[str, ...], Layout] = AS_STORED
) -> dict[str, Any]:
    """Fresh parameters, fit to train from; the same key gives the same ones.

    With `shapes` and `layouts` they come about where those say: no device ever holds all of what is shared out.
    """

    def held(key: Array) -> dict[str, Any]:
        fresh = leaves(_init(module, key))
        return nest({path: layouts.get(path, WHOLE).arranged(array) for path, array in fresh})

    places = None if shapes is None else jax.tree.map(lambda shape: shape.sharding, shapes)
    return jax.jit(held, out_shardings=places)(key)


def _init(module: nn.Module, key: Array) -> dict[str, Any]:
    return dict(module.init(key, *_example())["params"])


def _example() -> tuple[Any, ...]:
    return jnp.zeros(2, jnp.int32), NoCache(), dense_spans(1, 2)
