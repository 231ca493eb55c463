"""Launch of ``tree_mask.cu``."""

from typing import Any

import numpy as np

from ddtree.kernels.cupy.program import blocks_for, contiguous, launch, suffix_of
from ddtree.trees import DraftTree

__all__ = ["tree_mask"]

THREADS = 256
COLUMNS = 1024
"""Of a block."""


def tree_mask(
    tree: DraftTree, prefix_lens: Any, out: Any, *, tree_row: int, first_row: int = 0, window: int | None = None
) -> None:
    """0 where a node sees a cache row, the type's least number elsewhere. See :func:`ddtree.reference.tree_mask`."""
    B, _, N, columns = out.shape
    arrays = (tree.depths, tree.node_counts, prefix_lens)
    launch(
        *("tree_mask", f"fill_mask_{suffix_of(out)}", (B * N, blocks_for(columns, COLUMNS)), THREADS),
        *(contiguous(tree.visibility_words, np.uint32), *(contiguous(array, np.int32) for array in arrays), out),
        *(np.int32(N), np.int64(columns), np.int64(tree_row), np.int64(first_row)),
        np.int64(2**62 if window is None else window),
    )
