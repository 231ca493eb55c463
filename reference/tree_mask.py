"""The mask of a tree behind its prefix, as it is added to attention scores."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ddtree.trees import DraftTree

__all__ = ["tree_mask"]


def tree_mask(
    tree: DraftTree,
    prefix_lens: NDArray[np.int32],
    geometry: NDArray[np.int64],
    out: NDArray[Any],
    *,
    window: int | None = None,
) -> None:
    """Write 0 where a node sees a cache row and the type's least number elsewhere.

    Column c stands for row ``first_row + c`` of a cache whose rows [0, prefix_len) are a request's committed tokens and
    whose row ``tree_row + i`` is node i, the same for all requests; rows in between are seen by none.

    Parameters
    ----------
    tree : DraftTree
        The trees. An unused slot sees what the root sees: a row of nothing has no softmax.
    prefix_lens : array, int32, shape (B,)
        Committed rows of each request, at most ``tree_row``.
    geometry : array, int64, shape (3,)
        ``tree_row``, ``first_row`` and the number of columns.
    out : array, float16, bfloat16, float32 or float64, shape (size,)
        The mask (B, 1, N, columns) is written to its beginning; what is behind stays. It is as long as the widest one
        that is asked for.
    window : int, optional
        Of a sliding window: a node at position p sees none at p − ``window`` or before.
    """
    tree_row, first_row, columns = geometry.tolist()
    B, N = tree.parents.shape
    mask = out[: B * N * columns].reshape(B, N, columns)
    rows = first_row + np.arange(columns)
    nodes = rows - tree_row
    behind = (nodes >= 0) & (nodes < N)
    mask.fill(_least(out.dtype))
    for b, visible in enumerate(tree.visibility):
        slots = np.where(np.arange(N) < tree.node_counts[b], np.arange(N), 0)
        depths, prefix = tree.depths[b], int(prefix_lens[b])
        seen = np.broadcast_to(rows < prefix, (N, columns)).copy()
        seen[:, behind] |= visible[slots][:, nodes[behind]]
        if window is not None:
            positions = np.where(behind, prefix + depths[np.where(behind, nodes, 0)], rows)
            seen &= positions > (prefix + depths[slots] - window)[:, None]
        mask[b][seen] = 0


def _least(dtype: np.dtype[Any]) -> Any:
    """The least finite number of a floating type, which is the one before −inf in its bits."""
    infinity = np.full(1, -np.inf, dtype)
    return (infinity.view(f"u{dtype.itemsize}") - 1).view(dtype)[0]
