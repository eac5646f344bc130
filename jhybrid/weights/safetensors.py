"""The safetensors loader: a Hugging Face directory, streamed shard by shard into a parameter tree.

Everything that can be wrong is found from the headers, before any tensor is read, and reported at once.
"""

import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import numpy as np
from rich.progress import Progress
from safetensors import SafetensorError, safe_open

from jhybrid.errors import WeightsError
from jhybrid.weights.names import TensorName
from jhybrid.weights.places import Coverage, dotted, leaves, nest, same_but_for_ones, slices, stored_shape, taken, whole
from jhybrid.weights.quantised import EIGHT_BIT, BlockScales, read_eight_bits

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
FLOATS = ("F64", "F32", "F16", "BF16")
LISTED = 20  # names of each kind that a message lists


@dataclass(frozen=True)
class Stored:
    """One tensor as a file's header describes it."""

    file: Path
    shape: tuple[int, ...]
    dtype: str


@dataclass
class Faults:
    """What does not fit between a checkpoint and a model, collected to be reported together."""

    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    misshapen: list[str] = field(default_factory=list)
    unreadable: list[str] = field(default_factory=list)
    uncovered: list[str] = field(default_factory=list)
    overlapping: list[str] = field(default_factory=list)

    def report(self, directory: Path) -> None:
        """Raise WeightsError if there is any fault."""
        kinds = (
            ("missing from the checkpoint", self.missing),
            ("in the checkpoint that the model does not have", self.unexpected),
            ("of the wrong shape", self.misshapen),
            ("of a dtype that cannot be read as weights", self.unreadable),
        )
        parts = [_listing(f"tensor(s) {what}", names) for what, names in kinds if names]
        if self.uncovered:
            parts.append(_listing("parameter(s) that no tensor fills completely", self.uncovered))
        if self.overlapping:
            parts.append(_listing("parameter(s) that tensors fill more than once", self.overlapping))
        if parts:
            raise WeightsError(
                f"{directory}: the checkpoint does not fit the model that its config.json describes.\n"
                + "\n".join(parts)
                + "\nCheck that config.json and the weights belong together and that the download is complete."
            )


def load_safetensors(
    directory: str | Path,
    abstract_params: Mapping[str, Any],
    names: Sequence[TensorName],
    *,
    ignored: Sequence[str] = (),
    quantised: BlockScales | None = None,
    progress: bool = False,
) -> dict[str, Any]:
    """Read the checkpoint in `directory` into the tree of `abstract_params`.

    `abstract_params` is a nested dict of `jax.ShapeDtypeStruct`; each leaf's dtype is converted to, and its
    sharding, if it has one, is where it goes. `names` must fill every element exactly once. `ignored` are regular
    expressions; a tensor that no name wants and one of them matches in full is left alone. `quantised` says how
    tensors of 8 bits are scaled. `progress` draws a bar.

    Returns a nested dict of jax arrays. Host memory above the model itself stays at about one parameter.

    Raises WeightsError: no safetensors there, a shard missing or damaged, or (all named together) tensors missing,
    unexpected, misshapen, of a quantised dtype, parameters filled partly or twice.
    """
    directory = Path(directory)
    files, indexed = _shards(directory)
    stored = _read_headers(files, indexed)
    targets = dict(leaves(abstract_params))
    chosen = _match(directory, targets, names, stored, ignored, quantised)
    return nest(_stream(files, stored, targets, chosen, quantised, progress))


def _shards(directory: Path) -> tuple[list[Path], dict[str, str]]:
    """The safetensors files of a directory, all present, and the index's tensor -> file name (empty without one)."""
    if not directory.is_dir():
        raise WeightsError(f"{directory}: no such directory; give a local Hugging Face model directory")
    if (directory / INDEX_FILE).is_file():
        indexed = _read_index(directory / INDEX_FILE)
        files = [directory / name for name in sorted(set(indexed.values()))]
        absent = [f.name for f in files if not f.is_file()]
        if absent:
            raise WeightsError(
                f"{directory}: {len(absent)} of {len(files)} shard files listed in {INDEX_FILE} are missing: "
                f"{_some(absent)}. Download them into this directory."
            )
        return files, indexed
    if (directory / SINGLE_FILE).is_file():
        return [directory / SINGLE_FILE], {}
    if loose := sorted(f.name for f in directory.glob("*.safetensors")):
        raise WeightsError(
            f"{directory}: has {_some(loose)} but neither {SINGLE_FILE} nor {INDEX_FILE}, which says what belongs "
            f"to the model; download {INDEX_FILE} too"
        )
    if pickled := sorted(f.name for f in directory.glob("pytorch_model*.bin")):
        raise WeightsError(
            f"{directory}: only PyTorch pickles ({_some(pickled)}), which can run code when opened and are not "
            f"read; convert them with transformers: AutoModelForCausalLM.from_pretrained(dir).save_pretrained(dir)"
        )
    raise WeightsError(f"{directory}: no weights; expected {SINGLE_FILE} or {INDEX_FILE} and its shards")


def _read_index(path: Path) -> dict[str, str]:
    """The `weight_map` of an index file."""
    try:
        weight_map = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
        pairs = dict(weight_map)
    except (ValueError, KeyError, TypeError) as error:
        raise WeightsError(f"{path}: not an index with a weight_map ({error!r}); download it again") from error
    for tensor, name in pairs.items():
        if not isinstance(name, str) or Path(name).name != name:
            raise WeightsError(f"{path}: {tensor} is said to be in {name!r}, which is no file name in this directory")
    if not pairs:
        raise WeightsError(f"{path}: its weight_map is empty; download it again")
    return pairs


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    """An open safetensors file; what the library says about a damaged one becomes a WeightsError."""
    try:
        with safe_open(path, framework="numpy") as file:
            yield file
    except OSError as error:
        raise WeightsError(f"{path}: cannot be read: {error}") from error
    except SafetensorError as error:
        with path.open("rb") as raw:
            pointer = raw.read(24).startswith(b"version https://git-lfs")
        remedy = "it is a Git LFS pointer: run `git lfs pull`" if pointer else "download this file again"
        raise WeightsError(f"{path}: truncated or damaged ({path.stat().st_size} bytes; {error}); {remedy}") from error


def _read_headers(files: Sequence[Path], indexed: Mapping[str, str]) -> dict[str, Stored]:
    """Every tensor of the files. Two files with the same tensor, or an index that misplaces one, are refused."""
    stored: dict[str, Stored] = {}
    twice: list[str] = []
    for path in files:
        with _opened(path) as file:
            for name in file.keys():  # noqa: SIM118 - no mapping, only looks like one
                header = file.get_slice(name)
                if name in stored:
                    twice.append(f"{name} (in {stored[name].file.name} and {path.name})")
                stored[name] = Stored(path, tuple(header.get_shape()), header.get_dtype())
    if twice:
        raise WeightsError(
            _listing(f"tensor(s) of {files[0].parent} stored in two shards", twice)
            + "\nThe directory mixes two downloads or exports; empty it and download again."
        )
    astray = [f"{n} (not in {f})" for n, f in indexed.items() if n not in stored or stored[n].file.name != f]
    if astray:
        raise WeightsError(
            _listing(f"tensor(s) missing from the shard that {files[0].parent / INDEX_FILE} names", astray)
            + "\nIndex and shards are of different versions; download both again."
        )
    return stored


def _match(
    directory: Path,
    targets: Mapping[tuple[str, ...], Any],
    names: Sequence[TensorName],
    stored: Mapping[str, Stored],
    ignored: Sequence[str],
    quantised: BlockScales | None,
) -> dict[str, list[TensorName]]:
    """Checkpoint tensor -> the places it fills. Raises WeightsError with all faults together."""
    faults = Faults()
    chosen: dict[str, list[TensorName]] = {}
    by_path: dict[tuple[str, ...], list[TensorName]] = {path: [] for path in targets}
    for name in names:
        assert name.path in by_path, f"{name} names a parameter that the model does not have"
        by_path[name.path].append(name)
    for path, target in targets.items():
        coverage = Coverage(target.shape, by_path[path])
        for name in by_path[path]:
            spelling = next((s for s in name.names if s in stored), None)
            if spelling is not None:
                _check_fit(spelling, stored[spelling], name, target, faults)
                chosen.setdefault(spelling, []).append(name)
            elif name.required:
                faults.missing.append(" or ".join(name.names))
            if spelling is not None or name.required:
                coverage.claim(name)
        if coverage.gaps:
            optional = [n.names[0] for n in by_path[path] if not n.required]
            faults.uncovered.append(f"{dotted(path)} (from {_some(optional, 3)})" if optional else dotted(path))
        if coverage.overlaps:
            faults.overlapping.append(dotted(path))
    for tensor, places in chosen.items():
        assert whole(places), f"{tensor} is not used wholly and once: {places}"
    harmless = [re.compile(pattern) for pattern in ignored]
    used = chosen.keys() | _check_scales(chosen, stored, quantised, faults)
    faults.unexpected += [n for n in stored if n not in used and not any(p.fullmatch(n) for p in harmless)]
    faults.report(directory)
    return chosen


def _check_fit(spelling: str, found: Stored, name: TensorName, target: Any, faults: Faults) -> None:
    """Note a tensor whose shape is not its place's, or whose dtype holds no plain weights."""
    shape = stored_shape(name, tuple(target.shape))
    if not same_but_for_ones(found.shape, shape):
        faults.misshapen.append(f"{spelling}: {list(found.shape)}, {dotted(name.path)} needs {list(shape)}")
    if found.dtype not in (*FLOATS, EIGHT_BIT):
        faults.unreadable.append(f"{spelling}: {found.dtype}, only {', '.join(FLOATS)} are read")


def _check_scales(
    tensors: Iterable[str], stored: Mapping[str, Stored], quantised: BlockScales | None, faults: Faults
) -> set[str]:
    """The scales that belong to tensors of 8 bits. Notes a tensor without, and scales of a wrong shape or dtype."""
    scales = set()
    for tensor in tensors:
        if stored[tensor].dtype != EIGHT_BIT:
            continue
        if quantised is None:
            faults.unreadable.append(f"{tensor}: {EIGHT_BIT}, but config.json has no quantization_config")
            continue
        if len(stored[tensor].shape) < 2:
            faults.unreadable.append(
                f"{tensor}: {EIGHT_BIT} of shape {list(stored[tensor].shape)}, which has no blocks"
            )
            continue
        name, shape = quantised.scale_name(tensor), quantised.scale_shape(stored[tensor].shape)
        scales.add(name)
        if name not in stored:
            faults.missing.append(name)
        elif stored[name].shape != shape:
            faults.misshapen.append(f"{name}: {list(stored[name].shape)}, {tensor} needs {list(shape)}")
        elif stored[name].dtype not in FLOATS:
            faults.unreadable.append(f"{name}: {stored[name].dtype}, only {', '.join(FLOATS)} are read")
    return scales


class Filling:
    """The parameters while they fill: a host buffer for each that has begun, a device array for each that is full."""

    def __init__(self, targets: Mapping[tuple[str, ...], Any], chosen: Mapping[str, Sequence[TensorName]]):
        self._targets = targets
        self._left = Counter(name.path for places in chosen.values() for name in places)
        self._buffers: dict[tuple[str, ...], np.ndarray] = {}
        self.params: dict[tuple[str, ...], Any] = dict.fromkeys(targets)

    def put(self, name: TensorName, tensor: np.ndarray) -> None:
        """Copy a tensor to its place, in the parameter's dtype. A full parameter's buffer is let go."""
        target = self._targets[name.path]
        if name.path not in self._buffers:
            self._buffers[name.path] = np.empty(target.shape, target.dtype)
        view = self._buffers[name.path][slices(name)]
        np.copyto(view, taken(name, tensor).reshape(view.shape), casting="unsafe")
        self._left[name.path] -= 1
        if not self._left[name.path]:
            array = jax.device_put(self._buffers.pop(name.path), target.sharding)
            self.params[name.path] = array.block_until_ready()  # else buffers in flight pile up on the host


def _stream(
    files: Sequence[Path],
    stored: Mapping[str, Stored],
    targets: Mapping[tuple[str, ...], Any],
    chosen: Mapping[str, Sequence[TensorName]],
    quantised: BlockScales | None,
    progress: bool,
) -> dict[tuple[str, ...], jax.Array]:
    """Read shard after shard, within a shard parameter after parameter, so that few buffers are open at once."""
    by_file: dict[Path, list[str]] = {path: [] for path in files}
    for tensor in chosen:
        by_file[stored[tensor].file].append(tensor)
    filling = Filling(targets, chosen)
    with Progress(disable=not progress, transient=True) as bar:
        task = bar.add_task("loading weights", total=len(chosen))
        for path, tensors in by_file.items():
            with _opened(path) as file:
                for tensor in tensors:
                    if quantised is not None and stored[tensor].dtype == EIGHT_BIT:
                        array = _expanded(tensor, stored, quantised)
                    else:
                        array = file.get_tensor(tensor)
                    for name in chosen[tensor]:
                        filling.put(name, array)
                    bar.advance(task)
    return filling.params


def _expanded(tensor: str, stored: Mapping[str, Stored], quantised: BlockScales) -> np.ndarray:
    """The numbers that a tensor of 8 bits stands for; its scales may lie in another shard."""
    name = quantised.scale_name(tensor)
    with _opened(stored[name].file) as file:
        scales = file.get_tensor(name)
    return quantised.expand(read_eight_bits(stored[tensor].file, tensor), scales)


def _listing(what: str, names: Sequence[str]) -> str:
    """`3 tensor(s) ...:` and the names, one a line."""
    shown = "".join(f"\n  {name}" for name in names[:LISTED])
    rest = f"\n  and {len(names) - LISTED} more" if len(names) > LISTED else ""
    return f"{len(names)} {what}:{shown}{rest}"


def _some(names: Iterable[str], most: int = LISTED) -> str:
    """The first few names on one line."""
    names = list(names)
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")
