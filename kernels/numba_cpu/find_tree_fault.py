"""The first thing wrong with the values of a tree, one request a thread."""

import numpy as np
from numba import int32, int64, types
from numpy.typing import NDArray

from ddtree.kernels.numba_cpu.jit import as_array, compiled, in_parallel, readonly

__all__ = ["find_tree_fault"]


@compiled(
    types.UniTuple(int64, 3)(  # type: ignore[no-untyped-call]
        readonly(int32, 2), readonly(int32, 2), readonly(int32, 2), readonly(int32, 1), int64, int64, int64
    )
)
def first_fault(token_ids, parents, depths, counts, max_depth, start, stop):  # type: ignore[no-untyped-def]
    """The first fault of requests ``start`` … ``stop``."""
    N = parents.shape[1]
    for b in range(start, stop):
        if counts[b] < 1 or counts[b] > N:
            return 1, b, 0
        for i in range(counts[b]):
            depth = 0
            if i > 0:
                parent = parents[b, i]
                if parent < 0 or parent >= i:
                    return 2, b, i
                depth = depths[b, parent] + 1
            if depths[b, i] != depth:
                return 3, b, i
            if depth > max_depth:
                return 4, b, i
            if token_ids[b, i] < 0:
                return 5, b, i
    return 0, 0, 0


def find_tree_fault(
    token_ids: NDArray[np.int32],
    parents: NDArray[np.int32],
    depths: NDArray[np.int32],
    node_counts: NDArray[np.int32],
    max_depth: int,
) -> tuple[int, int, int]:
    """What is wrong with a tree, and where first. See :func:`ddtree.reference.find_tree_fault`."""
    pieces = in_parallel(
        first_fault,
        len(node_counts),
        as_array(token_ids, np.int32),
        as_array(parents, np.int32),
        as_array(depths, np.int32),
        as_array(node_counts, np.int32),
        max_depth,
        grain=max(1, 16384 // max(parents.shape[1], 1)),
    )
    return next((fault for fault in pieces if fault[0]), (0, 0, 0))
