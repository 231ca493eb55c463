"""Tree visibility as packed bits, one request a thread."""

import numpy as np
from numba import int32, int64, uint32, void
from numpy.typing import NDArray

from ddtree.kernels.numba_cpu.jit import as_array, compiled, in_parallel, inout, readonly

__all__ = ["visibility_words"]


@compiled(void(readonly(int32, 2), readonly(int32, 1), inout(uint32, 3), int64, int64))
def fill_words(parents, counts, words, start, stop):  # type: ignore[no-untyped-def]
    """Fill every row of requests ``start`` … ``stop``."""
    _, N, W = words.shape
    for b in range(start, stop):
        if counts[b] > 0:
            words[b, 0] = 0
            words[b, 0, 0] = 1
        for i in range(1, counts[b]):
            parent = parents[b, i]
            for w in range(W):
                words[b, i, w] = words[b, parent, w]
            words[b, i, i >> 5] |= np.uint32(1 << (i & 31))
        for i in range(counts[b], N):
            words[b, i] = 0


def visibility_words(parents: NDArray[np.int32], node_counts: NDArray[np.int32]) -> NDArray[np.uint32]:
    """Which nodes each node attends to: itself and its ancestors. See :func:`ddtree.visibility_words`."""
    B, N = parents.shape
    words = np.empty((B, N, (N + 31) // 32), np.uint32)
    in_parallel(
        fill_words,
        B,
        as_array(parents, np.int32),
        as_array(node_counts, np.int32),
        words,
        grain=max(1, 16384 // max(N, 1)),
    )
    return words
