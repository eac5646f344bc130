"""Training state on disk: parameters in float32 and optimiser moments, enough to resume as if never stopped."""

import json
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from jhybrid.errors import ConfigError
from jhybrid.train.recipe import Recipe

STATE_DIR = "state"
RECIPE_FILE = "recipe.json"


def save_state(output: Path, recipe: Recipe, step: int, params: Any, opt_state: Any) -> None:
    """Write the state after `step` steps; earlier ones are deleted once it is complete."""
    root = (output / STATE_DIR).absolute()
    root.mkdir(parents=True, exist_ok=True)
    (root / RECIPE_FILE).write_text(json.dumps(_plain(recipe), indent=2) + "\n")
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
        checkpointer.save(root / str(step), _numbered((params, opt_state)), force=True)
    for old in _steps(root):
        if old != step:
            shutil.rmtree(root / str(old))


def last_step(output: Path) -> int | None:
    """The step of the newest state under `output`, None without one."""
    return max(_steps(output / STATE_DIR), default=None)


def restore_state(output: Path, recipe: Recipe, step: int, params: Any, opt_state: Any) -> tuple[Any, Any]:
    """The state after `step` steps, shaped as the fresh `params` and `opt_state` given.

    Raises ConfigError if it belongs to another recipe. A longer or shorter plan is the same recipe as long as
    neither had begun to lower its learning rate.
    """
    root = (output / STATE_DIR).absolute()
    saved = json.loads((root / RECIPE_FILE).read_text())
    asked = _plain(recipe)
    differ = sorted(key for key in asked if saved.get(key) != asked[key])
    lengthened = set(differ) <= {"steps", "decay"} and step <= min(Recipe(**saved).decay_start, recipe.decay_start)
    if differ and not lengthened:
        raise ConfigError(
            "resume", f"{root} was made with other {', '.join(differ)}; start afresh in an empty directory"
        )
    fresh = (params, opt_state)
    as_numpy = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), _numbered(fresh))
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
        leaves = checkpointer.restore(root / str(step), restore_args=as_numpy)
    arrays = [jax.numpy.asarray(leaves[key]) for key in sorted(leaves)]
    return jax.tree.unflatten(jax.tree.structure(fresh), arrays)


def _steps(root: Path) -> list[int]:
    return sorted(int(p.name) for p in root.glob("*") if p.name.isdigit()) if root.is_dir() else []


def _numbered(tree: Any) -> dict[str, Any]:
    # Optimiser states are nested named tuples; their leaves in order are all that needs keeping.
    return {f"{i:06d}": leaf for i, leaf in enumerate(jax.tree.leaves(tree))}


def _plain(recipe: Recipe) -> dict[str, Any]:
    return json.loads(json.dumps(asdict(recipe)))
