"""Launch of ``tree_positions.cu``."""

from typing import Any

import numpy as np

from ddtree.kernels.cupy.program import blocks_for, contiguous, empty, launch

__all__ = ["tree_positions"]

THREADS = 256


def tree_positions(depths: Any, prefix_lens: Any) -> Any:
    """``prefix_len + depth``, siblings alike; ``prefix_len`` for padding. See :func:`ddtree.tree_positions`."""
    positions = empty(depths.shape, np.int32)
    launch(
        *("tree_positions", "add_depths", blocks_for(depths.size, THREADS), THREADS),
        *(contiguous(depths, np.int32), contiguous(prefix_lens, np.int32), positions),
        *(np.int64(depths.size), np.int32(depths.shape[-1])),
    )
    return positions
