"""Launch of ``accept_tree.cu``."""

from typing import Any

import numpy as np

from ddtree.kernels.cupy.program import contiguous, empty, launch
from ddtree.trees import Acceptance, DraftTree

__all__ = ["accept_tree"]

THREADS = 128
MOST_IN_SHARED = 4096


def accept_tree(
    tree: DraftTree, target_token_ids: Any, *, remaining: Any = None, stop_token_ids: Any = None
) -> Acceptance:
    """Follow the target's choices through the tree as far as they agree. See :func:`ddtree.accept_tree`."""
    B, L, N = tree.batch_size, tree.max_depth, tree.num_slots
    null = np.uintp(0)
    num_stops = 0 if stop_token_ids is None else int(stop_token_ids.size)
    acceptance = Acceptance(
        empty((B, L + 1), np.int32), empty((B,), np.int32), empty((B,), np.int32), empty((B,), np.bool_)
    )
    trees = (tree.parents, tree.token_ids, tree.node_counts, target_token_ids)
    launch(
        *("accept_tree", "follow_choices", B, THREADS),
        *(contiguous(array, np.int32) for array in trees),
        null if remaining is None else contiguous(remaining, np.int32),
        contiguous(stop_token_ids, np.int32) if num_stops else null,
        np.int32(num_stops),
        empty((B, N), np.int32) if N > MOST_IN_SHARED else null,
        *(acceptance.node_indices, acceptance.lengths, acceptance.bonus_token_ids, acceptance.finished),
        *(np.int32(N), np.int32(L + 1)),
    )
    return acceptance
