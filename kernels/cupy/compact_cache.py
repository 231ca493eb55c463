"""Launch of ``compact_cache.cu``."""

from typing import Any

import numpy as np

from ddtree.kernels.cupy.program import blocks_for, contiguous, launch
from ddtree.trees import Acceptance

__all__ = ["compact_cache"]

THREADS = 128


def compact_cache(kv_cache: Any, page_table: Any, prefix_lens: Any, acceptance: Acceptance) -> None:
    """Row prefix_len + node_indices[k] becomes row prefix_len + k, in place. See :func:`ddtree.compact_cache`."""
    layers, pages, S, columns = kv_cache.shape
    B, width = acceptance.node_indices.shape
    row = columns * kv_cache.dtype.itemsize  # bytes
    if kv_cache.size == 0:
        return  # no rows, or none of any width
    word = next(size for size in (16, 8, 4, 2, 1) if row % size == 0 and kv_cache.data.ptr % size == 0)
    words = row // word
    arrays = (page_table, prefix_lens, acceptance.node_indices, acceptance.lengths)
    pieces = blocks_for(layers * words, THREADS)
    launch(
        *("compact_cache", f"move_rows_{word}", pieces * B, THREADS),
        *(kv_cache, *(contiguous(array, np.int32) for array in arrays)),
        *(np.int64(layers), np.int64(pages), np.int32(S), np.int64(words)),
        *(np.int32(page_table.shape[1]), np.int32(width), np.uint32(pieces)),
    )
