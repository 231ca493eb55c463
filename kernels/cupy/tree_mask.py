"""Launch of ``tree_mask.cu``."""

from typing import Any

import numpy as np

from ddtree.kernels.cupy.program import blocks_for, contiguous, launch, suffix_of
from ddtree.trees import DraftTree

__all__ = ["tree_mask"]

THREADS = 256
COLUMNS = 1024
"""Of a block."""


def tree_mask(tree: DraftTree, prefix_lens: Any, geometry: Any, out: Any, *, window: int | None = None) -> None:
    """0 where a node sees a cache row, the type's least number elsewhere. See :func:`ddtree.reference.tree_mask`."""
    B, N = tree.parents.shape
    most_columns = out.size // (B * N)  # the geometry is on the device, and may be another in a graph's next replay
    arrays = (tree.depths, tree.node_counts, prefix_lens)
    launch(
        *("tree_mask", f"fill_mask_{suffix_of(out)}", (B * N, blocks_for(most_columns, COLUMNS)), THREADS),
        *(contiguous(tree.visibility_words, np.uint32), *(contiguous(array, np.int32) for array in arrays)),
        *(contiguous(geometry, np.int64), out, np.int32(N), np.int64(2**62 if window is None else window)),
    )
