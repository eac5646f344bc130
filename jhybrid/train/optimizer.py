"""Optimizer: Muon for the matrices inside layers, AdamW for all else, both with Nesterov momentum.

Muon (Jordan 2024; scaled as in arXiv:2502.16982, so that one learning rate serves both) is known to need fewer tokens
than AdamW for the same loss, and tokens are what a small machine is short of. The learning rate rises, stays, and falls
at the end: a run can be lengthened, from any point before the fall, and equal one that was planned so.
"""

from typing import Any

import jax
import optax
from optax.contrib import MuonDimensionNumbers, muon

from jhybrid.train.recipe import Recipe


def schedule(recipe: Recipe) -> optax.Schedule:
    """Learning rate by step."""
    peak, start = recipe.learning_rate, recipe.decay_start
    pieces = [
        optax.linear_schedule(peak / max(recipe.warmup, 1), peak, recipe.warmup),
        optax.constant_schedule(peak),
        optax.linear_schedule(peak, 0.0, recipe.steps - start),
    ]
    return optax.join_schedules(pieces, [recipe.warmup, start])


def make_optimizer(recipe: Recipe) -> optax.GradientTransformation:
    """The transformation that a recipe asks for."""
    return optax.chain(
        optax.clip_by_global_norm(recipe.clip),
        muon(
            schedule(recipe),
            weight_decay=recipe.weight_decay,
            adam_b2=0.95,
            consistent_rms=0.2,
            muon_weight_dimension_numbers=_muon_axes,
        ),
    )


def _muon_axes(params: Any) -> Any:
    """MuonDimensionNumbers for weights [out, in] of linear layers, None (Adam) for everything else."""

    def axes(path: tuple[Any, ...], leaf: Any) -> MuonDimensionNumbers | None:
        is_linear = leaf.ndim == 2 and path[-1].key == "weight"
        return MuonDimensionNumbers(reduction_axis=1, output_axis=0) if is_linear else None

    return jax.tree_util.tree_map_with_path(axes, params)
