"""Tree visibility as packed bits, one node a thread.

Ancestors have smaller indices than their descendants, so a walk from a node to the root meets the words of its row from
the last to the first: each word is written once, when the walk has left it, and no two threads share one.
"""

from typing import Any

import numpy as np

from ddtree.kernels.numba_cuda.jit import as_array, blocks_for, cuda, empty, launch, threads

__all__ = ["fill_visibility", "visibility_words"]


@cuda.jit
def fill_words(parents, counts, words):  # type: ignore[no-untyped-def]
    """Fill ``words`` (B, N, W)."""
    B, N, W = words.shape
    row = cuda.grid(1)
    if row >= B * N:
        return
    b, i = row // N, row % N
    node = i if i < counts[b] else -1
    word, bits = W - 1, np.uint32(0)
    while word >= 0:
        while node >= 32 * word:
            bits |= np.uint32(1) << np.uint32(node & 31)
            node = parents[b, node] if node > 0 else -1  # the root's parent is not read
        words[b, i, word] = bits
        word, bits = word - 1, np.uint32(0)


def fill_visibility(parents: Any, node_counts: Any, words: Any) -> None:
    """Fill ``words`` from int32 arrays in C order."""
    block = threads(128)
    launch(fill_words, blocks_for(parents.size, block), block, parents, node_counts, words)


def visibility_words(parents: Any, node_counts: Any) -> Any:
    """Which nodes each node attends to: itself and its ancestors. See :func:`ddtree.visibility_words`."""
    B, N = parents.shape
    words = empty((B, N, (N + 31) // 32), np.uint32)
    fill_visibility(as_array(parents, np.int32), as_array(node_counts, np.int32), words)
    return words
