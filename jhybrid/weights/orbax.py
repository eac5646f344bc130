"""Native checkpoints: a directory with `config.json`, tokenizer files and one Orbax tree under `params/`.

The trainer writes them, the engine loads them (the embedded demo is one). `config.json` is in Hugging Face's
form, so that the same reader serves both kinds of directory.
"""

import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from jhybrid.errors import WeightsError
from jhybrid.layers.parameter import scale_of
from jhybrid.mesh import AS_STORED, WHOLE, Layout
from jhybrid.weights.places import Place, dotted, leaves, nest
from jhybrid.weights.quantised import VALUES, Kind, Numbers
from jhybrid.weights.sharding import along_rows

PARAMS_DIR = "params"
OWN_FILES = ("manifest.ocdbt", "_METADATA")  # of a tree; one of them tells that it is, or was, a native checkpoint
METADATA_FILE = "metadata.json"
CONCURRENT_GB = 2  # arrays on their way from disk to the device at a time


def is_orbax(directory: str | Path) -> bool:
    """Whether `directory` is a native checkpoint."""
    directory = Path(directory)
    return (directory / "config.json").is_file() and any(
        (directory / PARAMS_DIR / file).is_file() for file in OWN_FILES
    )


def save_orbax(
    directory: str | Path, config_hf: Mapping[str, Any], params: Mapping[str, Any], metadata: Mapping[str, Any]
) -> None:
    """Write `config.json`, `metadata.json` and the parameter tree; replaces the tree that was there.

    Each device writes its part of a sharded array. Tokenizer files are the caller's to put beside them.
    """
    directory = Path(directory).absolute()
    directory.mkdir(parents=True, exist_ok=True)
    with _checkpointer() as checkpointer:
        checkpointer.save(directory / PARAMS_DIR, params, force=True)
    (directory / "config.json").write_text(json.dumps(config_hf, indent=2) + "\n")
    (directory / METADATA_FILE).write_text(json.dumps(metadata, indent=2) + "\n")


def load_orbax(
    directory: str | Path,
    abstract_params: Mapping[str, Any],
    *,
    quantisable: Collection[Place] = (),
    quantise: Kind | None = None,
    layouts: Mapping[Place, Layout] = AS_STORED,
) -> dict[str, Any]:
    """The parameters of a native checkpoint, in the structure, shapes and dtypes of `abstract_params`.

    `abstract_params` is a nested dict of `jax.ShapeDtypeStruct`; a leaf's sharding, if it has one, is where it goes,
    in the order of `layouts`.
    A parameter of `quantisable` that was saved in 8 bits stays so, with its scales beside it; others are expanded.
    `quantise` rounds those of `quantisable` that are plain. Read layer by layer.

    Raises WeightsError naming every parameter that is missing, unexpected or of another shape, or saying that the
    tree cannot be read.
    """
    path = Path(directory).absolute() / PARAMS_DIR
    if absent := [file for file in OWN_FILES if not (path / file).is_file()]:
        raise WeightsError(f"{path}: lacks {absent[0]}, without which the arrays cannot be found; restore its files")
    wanted = dict(leaves(abstract_params))
    params: dict[Place, Any] = {}
    with _checkpointer() as checkpointer:
        try:
            listing = checkpointer.metadata(path).item_metadata
            if listing is None:  # Orbax logs why it could not read the listing, and goes on
                raise ValueError("its listing of arrays is unreadable")
            stored = dict(leaves(listing.tree))
            scales = _check(path, wanted, stored)
            for part in dict.fromkeys(place[0] for place in wanted):
                reading = _Reading({p: wanted[p] for p in wanted if p[0] == part}, stored, scales, layouts)
                reading.decide(quantisable, quantise)
                params |= reading.done(_restore(checkpointer, path, reading.arguments()))
        except (OSError, ValueError) as error:
            # Tensorstore reports a truncated or missing file as a ValueError.
            raise WeightsError(f"{path}: the Orbax tree cannot be read ({error}); restore its files") from error
    return nest(params)


class _Reading:
    """A few parameters on their way from disk: which are read straight to their devices, and which pass the host."""

    def __init__(
        self,
        wanted: Mapping[Place, Any],
        stored: Mapping[Place, Any],
        scales: Mapping[Place, Place],
        layouts: Mapping[Place, Layout],
    ):
        self._wanted, self._stored, self._scales = wanted, stored, scales
        self._layouts = {place: layouts.get(place, WHOLE) for place in wanted}
        self._rounded: dict[Place, np.dtype] = {}
        self._expanded: set[Place] = set()

    def decide(self, quantisable: Collection[Place], quantise: Kind | None) -> None:
        for place in self._wanted:
            if place in self._scales:
                if place not in quantisable:
                    self._expanded.add(place)
            elif quantise is not None and place in quantisable:
                self._rounded[place] = VALUES[quantise]

    def arguments(self) -> dict[Place, ocp.RestoreArgs]:
        """How each stored array is read."""
        found: dict[Place, ocp.RestoreArgs] = {}
        for place, leaf in self._wanted.items():
            quantised = place in self._scales
            dtype = self._stored[place].dtype if quantised else leaf.dtype
            at_host = self._passes_host(place)
            found[place] = _to_host() if at_host else _to_device(dtype, leaf.sharding)
            if quantised:
                sharding = leaf.sharding and along_rows(leaf.sharding)
                found[self._scales[place]] = _to_host() if at_host else _to_device(np.float32, sharding)
        return found

    def _passes_host(self, place: Place) -> bool:
        return place in self._rounded or place in self._expanded or self._layouts[place].order is not None

    def done(self, arrays: dict[Place, Any]) -> dict[Place, Any]:
        """The parameters, with what came to the host on its device."""
        for place in filter(self._passes_host, self._wanted):
            leaf, arranged = self._wanted[place], self._layouts[place].arranged
            values, scale = arrays[place], arrays.pop(self._scales[place]) if place in self._scales else None
            if place in self._expanded:
                values, scale = Numbers(values, scale).whole(leaf.dtype), None
            elif place in self._rounded:
                values, scale = Numbers(values).rounded(self._rounded[place])
            elif scale is None:
                values = values.astype(leaf.dtype)
            arrays[place] = jax.device_put(arranged(values), leaf.sharding)
            if scale is not None:
                sharding = leaf.sharding and along_rows(leaf.sharding)
                arrays[_scale_place(place)] = jax.device_put(arranged(scale), sharding)
        return arrays


def _restore(checkpointer: ocp.Checkpointer, path: Path, arguments: Mapping[Place, ocp.RestoreArgs]) -> dict:
    tree = nest(arguments)
    asked = ocp.args.PyTreeRestore(item=tree, restore_args=tree, partial_restore=True)
    return dict(leaves(checkpointer.restore(path, args=asked)))


def _to_host() -> ocp.RestoreArgs:
    return ocp.RestoreArgs(restore_type=np.ndarray)


def _to_device(dtype: Any, sharding: jax.sharding.Sharding | None) -> ocp.RestoreArgs:
    return ocp.ArrayRestoreArgs(dtype=np.dtype(dtype), sharding=sharding or jax.numpy.zeros(()).sharding)


def _scale_place(place: Place) -> Place:
    return (*place[:-1], scale_of(place[-1]))


def _check(path: Path, wanted: Mapping[Place, Any], stored: Mapping[Place, Any]) -> dict[Place, Place]:
    """Where the scales of the parameters that were saved in 8 bits are. WeightsError if anything does not fit."""
    scales = {place: _scale_place(place) for place in wanted if _scale_place(place) in stored}
    unexpected = stored.keys() - wanted.keys() - set(scales.values())
    faults = [f"missing: {dotted(place)} {tuple(wanted[place].shape)}" for place in wanted.keys() - stored.keys()]
    faults += [f"unexpected: {dotted(place)} {tuple(stored[place].shape)}" for place in unexpected]
    faults += [
        f"misshapen: {dotted(p)} is {tuple(stored[p].shape)}, the model has {tuple(wanted[p].shape)}"
        for p in wanted.keys() & stored.keys()
        if tuple(stored[p].shape) != tuple(wanted[p].shape)
    ]
    faults += [
        f"misshapen: {dotted(at)} is {tuple(stored[at].shape)}, for a weight of {tuple(wanted[place].shape)}"
        for place, at in scales.items()
        if tuple(stored[at].shape[:-1]) != tuple(wanted[place].shape[:-1])
        or wanted[place].shape[-1] % stored[at].shape[-1]
    ]
    if faults:
        raise WeightsError(f"{path} does not fit its config.json:\n  " + "\n  ".join(sorted(faults)))
    return scales


def _checkpointer() -> ocp.Checkpointer:
    # OCDBT packs all arrays into a few compressed files; one file per array would be thousands for a large model.
    return ocp.Checkpointer(
        ocp.PyTreeCheckpointHandler(use_ocdbt=True, use_zarr3=True, restore_concurrent_gb=CONCURRENT_GB)
    )
