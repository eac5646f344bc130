"""TensorName: where a checkpoint tensor goes in the parameter tree.

Families list them; loaders and the exporter read them.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class FileRows:
    """Rows `start` up to `stop` of each of `groups` equal runs of `size` rows: what a place takes of a tensor that
    others share, as of projections that checkpoints interleave head by head.
    """

    start: int
    stop: int
    size: int
    groups: int = 1

    @property
    def count(self) -> int:
        """Rows of the place."""
        return self.groups * (self.stop - self.start)


@dataclass(frozen=True)
class TensorName:
    """One tensor of a Hugging Face checkpoint and its place among our parameters.

    Several tensors may share a parameter: `index` is the position on the leading (expert) axis, `rows` the
    half-open range on the axis after it (fused q/k/v, gate/up). The tensor's shape must equal that place's
    shape, but for axes of length 1 (a convolution's `[D, 1, K]` goes into `[D, K]`).

    The other way round, one tensor may fill several places of a parameter: names with the same spellings, one after
    the other, whose `file_rows` together make up the tensor.
    """

    names: tuple[str, ...]  # accepted spellings; the first is the one that an export writes
    path: tuple[str, ...]  # keys into the parameter tree
    index: int | None = None
    rows: tuple[int, int] | None = None
    required: bool = True  # False: absent is fine (then the parameter must be filled by another name)
    file_rows: FileRows | None = None  # None: the place takes the whole tensor
    file_shape: tuple[int, ...] | None = None  # what an export writes, where axes of length 1 differ from the place
