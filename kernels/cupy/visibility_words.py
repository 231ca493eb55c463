"""Launch of ``visibility_words.cu``."""

from typing import Any

import numpy as np

from ddtree.kernels.cupy.program import blocks_for, contiguous, empty, launch

__all__ = ["visibility_words"]

THREADS = 128


def visibility_words(parents: Any, node_counts: Any) -> Any:
    """Which nodes each node attends to: itself and its ancestors. See :func:`ddtree.visibility_words`."""
    B, N = parents.shape
    words = empty((B, N, (N + 31) // 32), np.uint32)
    launch(
        *("visibility_words", "fill_words", blocks_for(parents.size, THREADS), THREADS),
        *(contiguous(parents, np.int32), contiguous(node_counts, np.int32), words),
        *(np.int64(parents.size), np.int32(N)),
    )
    return words
