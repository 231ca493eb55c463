"""Launch of ``compact_layers.cu``."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from ddtree.kernels.cupy.program import contiguous, empty, launch
from ddtree.trees import Acceptance

__all__ = ["compact_layers", "layer_table"]

THREADS = 128


class LayerTable(NamedTuple):
    """Where the arrays lie, on the device, and what a launch needs to know of them."""

    entries: Any
    """int64 (arrays, 7): pointer; bytes from request to request, head to head, row to row; heads; words; first row."""
    word: int
    """Bytes that every row is made of and aligned to."""
    heads: int
    """The most of an array."""
    arrays: tuple[Any, ...]
    """Kept alive."""


def layer_table(arrays: Sequence[Any], first_rows: Sequence[int]) -> LayerTable:
    """Describe arrays to ``compact_layers``, by one copy to the device. See :func:`ddtree.reference.layer_table`."""
    entries = np.empty((len(arrays), 7), np.int64)
    alignment = 16
    for entry, array, first in zip(entries, arrays, first_rows, strict=True):
        row = array.shape[3] * array.dtype.itemsize
        entry[:] = (array.data.ptr, *array.strides[:3], array.shape[1], row, first)
        alignment = int(np.gcd.reduce([alignment, *entry[:4], row]))
    entries[:, 5] //= alignment
    device = empty(entries.shape, np.int64)
    device.set(entries)
    return LayerTable(device, alignment, int(entries[:, 4].max(initial=0)), tuple(arrays))


def compact_layers(table: LayerTable, prefix_lens: Any, tree_rows: Any, acceptance: Acceptance) -> None:
    """Row tree_row + node_indices[k] becomes row prefix_len + k. See :func:`ddtree.reference.compact_layers`."""
    B, width = acceptance.node_indices.shape
    arrays = (prefix_lens, tree_rows, acceptance.node_indices, acceptance.lengths)
    launch(
        *("compact_layers", f"move_layer_rows_{table.word}", (table.heads, len(table.arrays), B), THREADS),
        *(table.entries, *(contiguous(array, np.int32) for array in arrays), np.int32(width)),
    )
