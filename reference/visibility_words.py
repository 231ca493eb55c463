"""Tree visibility as packed bits."""

import numpy as np
from numpy.typing import NDArray

__all__ = ["visibility_words"]


def visibility_words(parents: NDArray[np.int32], node_counts: NDArray[np.int32]) -> NDArray[np.uint32]:
    """Which nodes each node attends to: itself and its ancestors. See :func:`ddtree.visibility_words`."""
    B, N = parents.shape
    words = np.zeros((B, N, (N + 31) // 32), np.uint32)
    for b in range(B):
        for i in range(node_counts[b]):
            if i > 0:
                words[b, i] = words[b, parents[b, i]]
            words[b, i, i // 32] |= np.uint32(1 << (i % 32))
    return words
