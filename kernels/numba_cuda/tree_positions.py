"""Sequence positions of tree nodes, one node a thread."""

from typing import Any

import numpy as np

from ddtree.kernels.numba_cuda.jit import as_array, blocks_for, cuda, empty, launch, threads

__all__ = ["tree_positions"]


@cuda.jit
def add_depths(depths, prefix_lens, positions):  # type: ignore[no-untyped-def]
    """Fill ``positions`` (B, N)."""
    i = cuda.grid(1)
    if i < positions.size:
        b, node = i // positions.shape[1], i % positions.shape[1]
        positions[b, node] = prefix_lens[b] + max(depths[b, node], 0)


def tree_positions(depths: Any, prefix_lens: Any) -> Any:
    """``prefix_len + depth``, siblings alike; ``prefix_len`` for padding. See :func:`ddtree.tree_positions`."""
    positions = empty(depths.shape, np.int32)
    block = threads(128)
    arrays = as_array(depths, np.int32), as_array(prefix_lens, np.int32)
    launch(add_depths, blocks_for(positions.size, block), block, *arrays, positions)
    return positions
