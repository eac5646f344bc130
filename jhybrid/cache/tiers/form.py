"""Form: a page, or a state, as one run of bytes, whatever arrays it has on the device."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

Blob = np.ndarray  # [bytes] uint8
Arrays = dict[str, Any]


@dataclass(frozen=True)
class Form:
    """`arrays[name]` = (layers, shape of a row, dtype), of the arrays with this kind of row, by name."""

    arrays: dict[str, tuple[int, tuple[int, ...], np.dtype]]

    @classmethod
    def of(cls, arrays: dict[str, jax.ShapeDtypeStruct], layers: dict[str, int]) -> "Form":
        """Of arrays [layers * rows, *shape]."""
        return cls({n: (layers[n], array.shape[1:], np.dtype(array.dtype)) for n, array in sorted(arrays.items())})

    def _sizes(self) -> list[tuple[str, int]]:
        return [(n, layers * math.prod(shape) * dtype.itemsize) for n, (layers, shape, dtype) in self.arrays.items()]

    @property
    def bytes(self) -> int:
        """Of one row of all layers."""
        return sum(size for _, size in self._sizes())

    def split(self, arrays: dict[str, np.ndarray], count: int) -> list[Blob]:
        """The first `count` rows of arrays [K, layers, *shape], each in memory of its own."""
        blobs = [np.empty(self.bytes, np.uint8) for _ in range(count)]
        at = 0
        for name, size in self._sizes():
            rows = np.ascontiguousarray(arrays[name]).reshape(len(arrays[name]), -1).view(np.uint8)
            for blob, row in zip(blobs, rows, strict=False):
                blob[at : at + size] = row
            at += size
        return blobs

    def join(self, blobs: Sequence[Blob], rows: int) -> dict[str, np.ndarray]:
        """Arrays [rows, layers, *shape] whose first rows are these; the others are arbitrary."""
        arrays, at = {}, 0
        for name, size in self._sizes():
            layers, shape, dtype = self.arrays[name]
            held = np.empty((rows, size), np.uint8)
            for row, blob in zip(held, blobs, strict=False):
                row[:] = blob[at : at + size]
            arrays[name] = held.view(dtype).reshape(rows, layers, *shape)
            at += size
        return arrays
