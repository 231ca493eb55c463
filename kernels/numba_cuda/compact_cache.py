"""Cache compaction, all layers in one launch: rows move as unsigned integers, so that one kernel serves every type.

A thread moves one column of a request's rows in a layer, row after row. Indices grow along a path, so
``node_indices[k] >= k``, and whatever is read after row k has been written lies behind it: moving in order is as if all
rows were read before any is written. No thread reads what another writes, so nobody waits.
"""

from typing import Any

import numpy as np

from ddtree.kernels.numba_cuda.jit import SIMULATED, as_array, blocks_for, cuda, launch, threads
from ddtree.trees import Acceptance

__all__ = ["compact_cache"]


@cuda.jit
def move_rows(cache, page_table, prefix_lens, node_indices, lengths, pieces):  # type: ignore[no-untyped-def]
    """Move rows of ``cache`` (layers, pages, S, columns); ``pieces`` blocks share the columns of a request's layer."""
    layers, _, S, columns = cache.shape
    place = cuda.blockIdx.x // pieces
    layer, b = place % layers, place // layers
    c = cuda.blockIdx.x % pieces * cuda.blockDim.x + cuda.threadIdx.x
    if c >= columns:
        return
    prefix = np.int64(prefix_lens[b])
    for k in range(lengths[b]):
        of, to = prefix + node_indices[b, k], prefix + k
        if of != to:
            cache[layer, page_table[b, to // S], to % S, c] = cache[layer, page_table[b, of // S], of % S, c]


def compact_cache(kv_cache: Any, page_table: Any, prefix_lens: Any, acceptance: Acceptance) -> None:
    """Row prefix_len + node_indices[k] becomes row prefix_len + k, in place. See :func:`ddtree.compact_cache`."""
    if kv_cache.size == 0:
        return  # no rows, or none of any width
    words = kv_cache.view(_word(kv_cache))
    block = threads(128)
    pieces = blocks_for(words.shape[3], block)
    launch(
        move_rows,
        pieces * words.shape[0] * page_table.shape[0],
        block,
        words,
        *(as_array(a, np.int32) for a in (page_table, prefix_lens, acceptance.node_indices, acceptance.lengths)),
        pieces,
    )


def _word(array: Any) -> Any:
    """The widest unsigned integer, up to 8 bytes, that divides a row and that the memory is aligned to."""
    address = array.ctypes.data if SIMULATED else array.data.ptr
    row = array.shape[-1] * array.dtype.itemsize
    return next(np.dtype(f"u{n}") for n in (8, 4, 2, 1) if row % n == 0 and address % n == 0)
