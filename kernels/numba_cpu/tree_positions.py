"""Sequence positions of tree nodes. One pass over a small array: NumPy is as fast as compiled code would be."""

import numpy as np
from numpy.typing import NDArray

__all__ = ["tree_positions"]


def tree_positions(depths: NDArray[np.int32], prefix_lens: NDArray[np.int32]) -> NDArray[np.int32]:
    """``prefix_len + depth``, siblings alike; ``prefix_len`` for padding. See :func:`ddtree.tree_positions`."""
    positions: NDArray[np.int32] = np.maximum(depths, 0, dtype=np.int32)
    positions += prefix_lens[:, None]
    return positions
