"""Launch of ``tree_inputs.cu``."""

from typing import Any

import numpy as np

from ddtree.kernels.cupy.program import blocks_for, contiguous, empty, launch
from ddtree.trees import DraftTree

__all__ = ["tree_inputs"]

THREADS = 256


def tree_inputs(tree: DraftTree, prefix_lens: Any, *, vocab_size: int, max_position: int) -> tuple[Any, Any]:
    """Tokens and positions of all slots, as a model takes them. See :func:`ddtree.reference.tree_inputs`."""
    shape = (tree.batch_size, tree.num_slots)
    input_ids, position_ids = empty(shape, np.int64), empty(shape, np.int64)
    arrays = (tree.token_ids, tree.depths, tree.node_counts, prefix_lens)
    launch(
        *("tree_inputs", "fill_inputs", blocks_for(input_ids.size, THREADS), THREADS),
        *(contiguous(array, np.int32) for array in arrays),
        *(input_ids, position_ids, np.int64(input_ids.size)),
        *(np.int32(tree.num_slots), np.int32(vocab_size - 1), np.int32(max_position)),
    )
    return input_ids, position_ids
