"""Cache compaction, a layer of a request a thread: rows move as bytes, so that one kernel serves every type."""

from typing import Any

import numpy as np
from numba import int32, int64, uint8, void
from numpy.typing import NDArray

from ddtree.kernels.numba_cpu.jit import as_array, compiled, in_parallel, inout, readonly
from ddtree.trees import Acceptance

__all__ = ["compact_cache"]


@compiled(
    void(
        inout(uint8, 4),  # cache (layers, pages, S, bytes of a row)
        readonly(int32, 2),  # page_table (B, max_pages)
        readonly(int32, 1),  # prefix_lens (B,)
        readonly(int32, 2),  # node_indices (B, L + 1)
        readonly(int32, 1),  # lengths (B,)
        int64,
        int64,
    )
)
def move_rows(cache, page_table, prefix_lens, node_indices, lengths, start, stop):  # type: ignore[no-untyped-def]
    """Move the rows of pairs ``start`` … ``stop`` of request and layer, the layer counting faster.

    Indices grow along a path, so ``node_indices[k] >= k``, and whatever is read after row k has been written lies
    behind it: moving in order is as if all rows were read before any is written.
    """
    layers, _, page_size, row_bytes = cache.shape
    for pair in range(start, stop):
        b, layer = pair // layers, pair % layers
        prefix = np.int64(prefix_lens[b])
        for k in range(lengths[b]):
            of, to = prefix + node_indices[b, k], prefix + k
            if of == to:
                continue
            of_page, of_row = page_table[b, of // page_size], of % page_size
            to_page, to_row = page_table[b, to // page_size], to % page_size
            for i in range(row_bytes):
                cache[layer, to_page, to_row, i] = cache[layer, of_page, of_row, i]


def compact_cache(
    kv_cache: NDArray[Any],
    page_table: NDArray[np.int32],
    prefix_lens: NDArray[np.int32],
    acceptance: Acceptance,
) -> None:
    """Row prefix_len + node_indices[k] becomes row prefix_len + k, in place. See :func:`ddtree.compact_cache`."""
    if kv_cache.size == 0:
        return  # no bytes to view
    in_parallel(
        move_rows,
        len(prefix_lens) * kv_cache.shape[0],
        kv_cache.view(np.uint8),
        as_array(page_table, np.int32),
        as_array(prefix_lens, np.int32),
        as_array(acceptance.node_indices, np.int32),
        as_array(acceptance.lengths, np.int32),
        grain=16,
    )
