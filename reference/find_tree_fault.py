"""What may be wrong with the values of a tree that someone made by hand."""

import numpy as np
from numpy.typing import NDArray

__all__ = ["find_tree_fault"]


def find_tree_fault(
    token_ids: NDArray[np.int32],
    parents: NDArray[np.int32],
    depths: NDArray[np.int32],
    node_counts: NDArray[np.int32],
    max_depth: int,
) -> tuple[int, int, int]:
    """What is wrong with a tree, and where first: ``(code, b, i)``.

    Code 0: nothing, and b and i are 0. Else the first fault by request, node and code: 1, the count is not in 1 … N
    (i is 0); 2, the parent is not an earlier node (the root's is not read); 3, the depth is not one more than the
    parent's, or not 0 at the root; 4, it is beyond ``max_depth``; 5, the token is negative. Unused slots are not read.
    """
    B, N = parents.shape
    for b in range(B):
        if not 1 <= node_counts[b] <= N:
            return 1, b, 0
        for i in range(node_counts[b]):
            if i > 0 and not 0 <= parents[b, i] < i:
                return 2, b, i
            if depths[b, i] != (depths[b, parents[b, i]] + 1 if i > 0 else 0):
                return 3, b, i
            if depths[b, i] > max_depth:
                return 4, b, i
            if token_ids[b, i] < 0:
                return 5, b, i
    return 0, 0, 0
