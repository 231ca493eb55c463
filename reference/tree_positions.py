"""Sequence positions of tree nodes."""

import numpy as np
from numpy.typing import NDArray

__all__ = ["tree_positions"]


def tree_positions(depths: NDArray[np.int32], prefix_lens: NDArray[np.int32]) -> NDArray[np.int32]:
    """``prefix_len + depth``, siblings alike; ``prefix_len`` for padding. See :func:`ddtree.tree_positions`."""
    return prefix_lens[:, None] + np.maximum(depths, 0)
