"""The safetensors loader: a Hugging Face directory, streamed shard by shard into a parameter tree.

Everything that can be wrong is found from the headers, before any tensor is read, and reported at once.
"""

import json
import logging
import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from rich.progress import Progress
from safetensors import SafetensorError, safe_open

from jhybrid.errors import WeightsError
from jhybrid.layers.parameter import scale_of
from jhybrid.mesh import AS_STORED, WHOLE, Layout
from jhybrid.weights.names import TensorName
from jhybrid.weights.places import (
    Coverage,
    Place,
    dotted,
    leaves,
    nest,
    same_but_for_ones,
    slices,
    stored_shape,
    taken,
    whole,
)
from jhybrid.weights.quantised import (
    CACHE_SCALES,
    LEAST_RUN,
    PACKED,
    STORED,
    UNUSED,
    VALUES,
    Kind,
    Numbers,
    Scheme,
    read_eight_bits,
    unpacked,
)
from jhybrid.weights.sharding import along_rows

log = logging.getLogger("jhybrid")

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
FLOATS = ("F64", "F32", "F16", "BF16")
COMPARED_ROWS = 4096  # of a tensor and its copy that are in memory at a time
LISTED = 20  # names of each kind that a message lists


@dataclass(frozen=True)
class Stored:
    """One tensor as a file's header describes it."""

    file: Path
    shape: tuple[int, ...]
    dtype: str
    packed: bool = False

    @property
    def eight_bits(self) -> bool:
        """Whether it needs scales."""
        return self.dtype in STORED.values()


class Form(NamedTuple):
    """How a parameter is held in 8 bits: the dtype of its values, and the columns that share a scale."""

    values: np.dtype
    run: int


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
    scheme: Scheme | None = None,
    quantisable: Collection[Place] = (),
    quantise: Kind | None = None,
    copies: Mapping[str, Sequence[str]] | None = None,
    layouts: Mapping[Place, Layout] = AS_STORED,
    progress: bool = False,
) -> dict[str, Any]:
    """Read the checkpoint in `directory` into the tree of `abstract_params`.

    `abstract_params` is a nested dict of `jax.ShapeDtypeStruct`; each leaf's dtype is converted to, and its
    sharding, if it has one, is where it goes, in the order of `layouts`. `names` must fill every element exactly once.
    `ignored` are regular expressions; a tensor that no name wants and one of them matches in full is left alone.
    `progress` draws a bar.
    `scheme` says how tensors of 8 bits are scaled. A parameter of `quantisable` whose tensors all are stays as it is,
    with its scales beside it; others are expanded. `quantise` rounds those of `quantisable` that are plain.
    `copies` are tensors that must equal another, given by its spellings, where they are stored: tied heads.

    Returns a nested dict of jax arrays. Host memory above the model itself stays at about one parameter.

    Raises WeightsError: no safetensors there, a shard missing or damaged, or (all named together) tensors missing,
    unexpected, misshapen, of a quantised dtype, parameters filled partly or twice, a copy that is none.
    """
    directory = Path(directory)
    files, indexed = _shards(directory)
    stored = _read_headers(files, indexed)
    ignored = (*ignored, *CACHE_SCALES)
    if scheme is not None:
        stored, ignored = _with_packed(stored), (*ignored, *UNUSED)
    for copy, spellings in (copies or {}).items():
        _check_copy(copy, spellings, stored)
        ignored = (*ignored, re.escape(copy))
    targets = dict(leaves(abstract_params))
    chosen = _match(directory, targets, names, stored, ignored, scheme)
    forms = _forms(targets, chosen, stored, scheme, quantisable, quantise)
    return nest(_stream(files, stored, Filling(targets, chosen, forms, layouts), chosen, scheme, progress))


def read_tensors(directory: str | Path, names: Collection[str]) -> dict[str, np.ndarray]:
    """Those of the named tensors of a checkpoint, plain and small, that it has."""
    stored = _read_headers(*_shards(Path(directory)))
    found = {}
    for name in stored.keys() & names:
        with _opened(stored[name].file) as file:
            found[name] = file.get_tensor(name)
    return found


def _shards(directory: Path) -> tuple[list[Path], dict[str, str]]:
    """The safetensors files of a directory, all present, and the index's tensor -> file name (empty without one)."""
    if not directory.is_dir():
        raise WeightsError(f"{directory}: no such directory; give a local Hugging Face model directory")
    index, single = (_is_file(directory / name) for name in (INDEX_FILE, SINGLE_FILE))
    if index:
        indexed = _read_index(directory / INDEX_FILE)
        files = [directory / name for name in sorted(set(indexed.values()))]
        absent = [f.name for f in files if not f.is_file()]
        if absent:
            raise WeightsError(
                f"{directory}: {len(absent)} of {len(files)} shard files listed in {INDEX_FILE} are missing: "
                f"{_some(absent)}. Download them into this directory."
            )
        if single and directory / SINGLE_FILE not in files:
            raise WeightsError(
                f"{directory}: has two sets of weights, {SINGLE_FILE} and the {len(files)} file(s) that {INDEX_FILE} "
                "lists; which are meant cannot be known: take one set away"
            )
        return files, indexed
    if single:
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


def _is_file(path: Path) -> bool:
    """Whether a file is there. WeightsError if it is something else, or a link to nothing."""
    if path.is_symlink() and not path.exists():
        raise WeightsError(f"{path}: a link to {path.readlink()}, which is not there; download this file again")
    if path.exists() and not path.is_file():
        raise WeightsError(f"{path}: no file (a directory?); download this file again")
    return path.exists()


def _read_index(path: Path) -> dict[str, str]:
    """The `weight_map` of an index file."""
    try:
        weight_map = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
        pairs = dict(weight_map)
    except (ValueError, KeyError, TypeError, RecursionError) as error:
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


def _with_packed(stored: Mapping[str, Stored]) -> dict[str, Stored]:
    """The same, with tensors that are packed under the name and in the shape of what they hold."""
    seen = {}
    for name, header in stored.items():
        if name.endswith(PACKED) and header.dtype == "I32" and len(header.shape) == 2:
            shape = (header.shape[0], 4 * header.shape[1])
            seen[name.removesuffix(PACKED)] = Stored(header.file, shape, STORED["int8"], packed=True)
        else:
            seen[name] = header
    return seen


def _check_copy(copy: str, spellings: Sequence[str], stored: Mapping[str, Stored]) -> None:
    """Refuse a tied head of other numbers than the table's: which of the two the config means cannot be known."""
    original = next((spelling for spelling in spellings if spelling in stored), None)
    if copy not in stored or original is None:
        return
    one, other = stored[copy], stored[original]
    same = (one.shape, one.dtype) == (other.shape, other.dtype)
    if same and not one.eight_bits:
        with _opened(one.file) as left, _opened(other.file) as right:
            slices = left.get_slice(copy), right.get_slice(original)
            for at in range(0, one.shape[0], COMPARED_ROWS):
                stop = min(at + COMPARED_ROWS, one.shape[0])
                same = same and np.array_equal(*(part[at:stop] for part in slices))
    if not same:
        raise WeightsError(
            f"{one.file.parent}: config.json has tie_word_embeddings true, but {copy} ({one.dtype}) is not "
            f"{original} ({other.dtype}) over again; set tie_word_embeddings to false in config.json to use both"
        )


def _match(
    directory: Path,
    targets: Mapping[Place, Any],
    names: Sequence[TensorName],
    stored: Mapping[str, Stored],
    ignored: Sequence[str],
    scheme: Scheme | None,
) -> dict[str, list[TensorName]]:
    """Checkpoint tensor -> the places it fills. Raises WeightsError with all faults together."""
    faults = Faults()
    chosen: dict[str, list[TensorName]] = {}
    by_path: dict[Place, list[TensorName]] = {path: [] for path in targets}
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
    used = chosen.keys() | _check_scales(chosen, stored, scheme, faults)
    faults.unexpected += [n for n in stored if n not in used and not any(p.fullmatch(n) for p in harmless)]
    faults.report(directory)
    return chosen


def _check_fit(spelling: str, found: Stored, name: TensorName, target: Any, faults: Faults) -> None:
    """Note a tensor whose shape is not its place's, or whose dtype holds no plain weights."""
    shape = stored_shape(name, tuple(target.shape))
    if not same_but_for_ones(found.shape, shape):
        faults.misshapen.append(f"{spelling}: {list(found.shape)}, {dotted(name.path)} needs {list(shape)}")
    if found.dtype not in FLOATS and not found.eight_bits:
        faults.unreadable.append(f"{spelling}: {found.dtype}, only {', '.join(FLOATS)} are read")


def _check_scales(
    tensors: Iterable[str], stored: Mapping[str, Stored], scheme: Scheme | None, faults: Faults
) -> set[str]:
    """The scales that belong to tensors of 8 bits. Notes a tensor without, and scales of a wrong shape or dtype."""
    scales = set()
    for tensor in tensors:
        found = stored[tensor]
        if not found.eight_bits:
            continue
        if scheme is None:
            faults.unreadable.append(f"{tensor}: {found.dtype}, but config.json has no quantization_config")
            continue
        if found.dtype != STORED[scheme.kind]:
            faults.unreadable.append(f"{tensor}: {found.dtype}, config.json's scheme has {STORED[scheme.kind]}")
            continue
        if len(found.shape) < 2:
            faults.unreadable.append(f"{tensor}: {found.dtype} of shape {list(found.shape)}, which has no rows")
            continue
        name, shapes = _scales_of(tensor, stored, scheme), scheme.scale_shapes(found.shape)
        if name is None:
            faults.missing.append(" or ".join(scheme.scale_names(tensor)))
            continue
        scales.add(name)
        if not any(same_but_for_ones(stored[name].shape, shape) for shape in shapes):
            needed = " or ".join(str(list(shape)) for shape in shapes)
            faults.misshapen.append(f"{name}: {list(stored[name].shape)}, {tensor} needs {needed}")
        elif stored[name].dtype not in FLOATS:
            faults.unreadable.append(f"{name}: {stored[name].dtype}, only {', '.join(FLOATS)} are read")
    return scales


def _scales_of(tensor: str, stored: Mapping[str, Stored], scheme: Scheme) -> str | None:
    return next((name for name in scheme.scale_names(tensor) if name in stored), None)


def _forms(
    targets: Mapping[Place, Any],
    chosen: Mapping[str, Sequence[TensorName]],
    stored: Mapping[str, Stored],
    scheme: Scheme | None,
    quantisable: Collection[Place],
    quantise: Kind | None,
) -> dict[Place, Form]:
    """The parameters that are held in 8 bits. Says which others have tensors that are."""
    filled: dict[Place, list[bool]] = {path: [] for path in targets}
    for tensor, places in chosen.items():
        for name in places:
            filled[name.path].append(stored[tensor].eight_bits)
    forms, expanded = {}, []
    for path, eight_bits in filled.items():
        columns = targets[path].shape[-1] if targets[path].shape else 0
        if path in quantisable and scheme is not None and all(eight_bits) and scheme.run(columns) >= LEAST_RUN:
            forms[path] = Form(VALUES[scheme.kind], scheme.run(columns))
        elif path in quantisable and quantise is not None:
            forms[path] = Form(VALUES[quantise], columns)
        elif path in quantisable and any(eight_bits):
            expanded.append(dotted(path))
    if expanded:
        log.warning(
            "%d parameter(s) are expanded, because they also hold tensors that are not quantised, or scales of under "
            "%d columns: %s",
            len(expanded),
            LEAST_RUN,
            _some(expanded, 3),
        )
    return forms


class Filling:
    """The parameters while they fill: host buffers for each that has begun, device arrays for each that is full.

    A parameter with a form has two, its values and its scales, whose rows are filled alike.
    """

    def __init__(
        self,
        targets: Mapping[Place, Any],
        chosen: Mapping[str, Sequence[TensorName]],
        forms: Mapping[Place, Form],
        layouts: Mapping[Place, Layout],
    ):
        self._targets, self._forms, self._layouts = targets, forms, layouts
        self._left = Counter(name.path for places in chosen.values() for name in places)
        self._buffers: dict[Place, list[np.ndarray]] = {}
        self.params: dict[Place, Any] = dict.fromkeys(targets)

    def put(self, tensor: Numbers, places: Iterable[TensorName]) -> None:
        """Copy a tensor to its places, in the parameters' dtypes. A full parameter's buffers are let go."""
        made: dict[np.dtype, list[np.ndarray]] = {}
        for name in places:
            form, dtype = self._forms.get(name.path), np.dtype(self._targets[name.path].dtype)
            wanted = dtype if form is None else form.values
            if wanted not in made:
                made[wanted] = [tensor.whole(dtype)] if form is None else tensor.rounded(form.values)
            self._copy(name, made[wanted])

    def _copy(self, name: TensorName, tensors: Sequence[np.ndarray]) -> None:
        path = name.path
        if path not in self._buffers:
            self._buffers[path] = [np.empty(shape, dtype) for shape, dtype in self._held(path)]
        for buffer, tensor in zip(self._buffers[path], tensors, strict=True):
            view = buffer[slices(name)]
            np.copyto(view, taken(name, tensor).reshape(view.shape), casting="unsafe")
        self._left[path] -= 1
        if not self._left[path]:
            sharding = self._targets[path].sharding
            shardings = sharding, sharding and along_rows(sharding)
            paths = path, (*path[:-1], scale_of(path[-1]))
            for at, buffer, where in zip(paths, self._buffers.pop(path), shardings, strict=False):
                # waited for, else buffers in flight pile up on the host
                held = self._layouts.get(path, WHOLE).arranged(buffer)
                self.params[at] = jax.device_put(held, where).block_until_ready()

    def _held(self, path: Place) -> list[tuple[tuple[int, ...], np.dtype]]:
        """Shapes and dtypes of a parameter's buffers."""
        target, form = self._targets[path], self._forms.get(path)
        if form is None:
            return [(target.shape, target.dtype)]
        *rows, columns = target.shape
        return [(target.shape, form.values), ((*rows, columns // form.run), np.dtype(np.float32))]


def _stream(
    files: Sequence[Path],
    stored: Mapping[str, Stored],
    filling: Filling,
    chosen: Mapping[str, Sequence[TensorName]],
    scheme: Scheme | None,
    progress: bool,
) -> dict[Place, jax.Array]:
    """Read shard after shard, within a shard parameter after parameter, so that few buffers are open at once."""
    by_file: dict[Path, list[str]] = {path: [] for path in files}
    for tensor in chosen:
        by_file[stored[tensor].file].append(tensor)
    with Progress(disable=not progress, transient=True) as bar:
        task = bar.add_task("loading weights", total=len(chosen))
        for path, tensors in by_file.items():
            with _opened(path) as file:
                for tensor in tensors:
                    filling.put(_numbers(file, tensor, stored, scheme), chosen[tensor])
                    bar.advance(task)
    return filling.params


def _numbers(file: Any, tensor: str, stored: Mapping[str, Stored], scheme: Scheme | None) -> Numbers:
    """A tensor of an open file; its scales may lie in another shard."""
    header = stored[tensor]
    if scheme is None or not header.eight_bits:
        return Numbers(file.get_tensor(tensor))
    if header.packed:
        values = unpacked(file.get_tensor(f"{tensor}{PACKED}"))
    elif scheme.kind == "fp8":
        values = read_eight_bits(header.file, tensor)
    else:
        values = file.get_tensor(tensor)
    name = _scales_of(tensor, stored, scheme)
    assert name is not None, tensor
    with _opened(stored[name].file) as beside:
        return Numbers(values, scheme.by_row(beside.get_tensor(name), header.shape))


def _listing(what: str, names: Sequence[str]) -> str:
    """`3 tensor(s) ...:` and the names, one a line."""
    shown = "".join(f"\n  {name}" for name in names[:LISTED])
    rest = f"\n  and {len(names) - LISTED} more" if len(names) > LISTED else ""
    return f"{len(names)} {what}:{shown}{rest}"


def _some(names: Iterable[str], most: int = LISTED) -> str:
    """The first few names on one line."""
    names = list(names)
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")
