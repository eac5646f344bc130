"""Native checkpoints: a directory with `config.json`, tokenizer files and one Orbax tree under `params/`.

The trainer writes them, the engine loads them (the embedded demo is one). `config.json` is in Hugging Face's
form, so that the same reader serves both kinds of directory.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from jhybrid.errors import WeightsError
from jhybrid.weights.places import dotted, leaves

PARAMS_DIR = "params"
METADATA_FILE = "metadata.json"


def is_orbax(directory: str | Path) -> bool:
    """Whether `directory` is a native checkpoint."""
    directory = Path(directory)
    return (directory / "config.json").is_file() and (directory / PARAMS_DIR / "manifest.ocdbt").is_file()


def save_orbax(
    directory: str | Path, config_hf: Mapping[str, Any], params: Mapping[str, Any], metadata: Mapping[str, Any]
) -> None:
    """Write `config.json`, `metadata.json` and the parameter tree; replaces the tree that was there.

    Tokenizer files are the caller's to put beside them.
    """
    directory = Path(directory).absolute()
    directory.mkdir(parents=True, exist_ok=True)
    with _checkpointer() as checkpointer:
        checkpointer.save(directory / PARAMS_DIR, jax.tree.map(np.asarray, params), force=True)
    (directory / "config.json").write_text(json.dumps(config_hf, indent=2) + "\n")
    (directory / METADATA_FILE).write_text(json.dumps(metadata, indent=2) + "\n")


def load_orbax(directory: str | Path, abstract_params: Mapping[str, Any]) -> dict[str, Any]:
    """The parameters of a native checkpoint, in the structure, shapes and dtypes of `abstract_params`.

    `abstract_params` is a nested dict of anything with `shape` and `dtype` (`jax.eval_shape` of the model's init).
    Raises WeightsError naming every parameter that is missing, unexpected or of another shape, or saying that the
    tree cannot be read.
    """
    path = Path(directory).absolute() / PARAMS_DIR
    wanted = _by_name(abstract_params)
    with _checkpointer() as checkpointer:
        try:
            listing = checkpointer.metadata(path).item_metadata
            if listing is None:  # Orbax logs why it could not read the listing, and goes on
                raise ValueError("its listing of arrays is unreadable")
            _check(path, wanted, _by_name(listing.tree))
            as_numpy = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), abstract_params)
            arrays = checkpointer.restore(path, restore_args=as_numpy)
        except (OSError, ValueError) as error:
            # Tensorstore reports a truncated or missing file as a ValueError.
            raise WeightsError(f"{path}: the Orbax tree cannot be read ({error}); restore its files") from error
    return jax.tree.map(lambda leaf, array: jax.numpy.asarray(array.astype(leaf.dtype)), abstract_params, arrays)


def _check(path: Path, wanted: Mapping[str, Any], stored: Mapping[str, Any]) -> None:
    faults = [f"missing: {name} {tuple(wanted[name].shape)}" for name in wanted.keys() - stored.keys()]
    faults += [f"unexpected: {name} {tuple(stored[name].shape)}" for name in stored.keys() - wanted.keys()]
    faults += [
        f"misshapen: {name} is {tuple(stored[name].shape)}, the model has {tuple(wanted[name].shape)}"
        for name in wanted.keys() & stored.keys()
        if tuple(stored[name].shape) != tuple(wanted[name].shape)
    ]
    if faults:
        raise WeightsError(f"{path} does not fit its config.json:\n  " + "\n  ".join(sorted(faults)))


def _by_name(tree: Mapping[str, Any]) -> dict[str, Any]:
    return {dotted(path): leaf for path, leaf in leaves(tree)}


def _checkpointer() -> ocp.Checkpointer:
    # OCDBT packs all arrays into a few compressed files; one file per array would be thousands for a large model.
    return ocp.Checkpointer(ocp.PyTreeCheckpointHandler(use_ocdbt=True, use_zarr3=True))
