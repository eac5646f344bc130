"""TensorName: where a checkpoint tensor goes in the parameter tree.

Families list them; loaders and the exporter read them.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class TensorName:
    """One tensor of a Hugging Face checkpoint and its place among our parameters.

    Several tensors may share a parameter: `index` is the position on the leading (expert) axis, `rows` the
    half-open range on the axis after it (fused q/k/v, gate/up). The tensor's shape must equal that place's
    shape, but for axes of length 1 (a convolution's `[D, 1, K]` goes into `[D, K]`).
    """

    names: tuple[str, ...]  # accepted spellings; the first is the one that an export writes
    path: tuple[str, ...]  # keys into the parameter tree
    index: int | None = None
    rows: tuple[int, int] | None = None
    required: bool = True  # False: absent is fine (then the parameter must be filled by another name)
    file_shape: tuple[int, ...] | None = None  # what an export writes, where axes of length 1 differ from the place
