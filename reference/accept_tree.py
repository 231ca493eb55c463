"""Acceptance: the walk from the root along the target's choices."""

import numpy as np
from numpy.typing import NDArray

from ddtree.trees import Acceptance, DraftTree

__all__ = ["accept_tree"]


def accept_tree(
    tree: DraftTree,
    target_token_ids: NDArray[np.int32],
    *,
    remaining: NDArray[np.int32] | None = None,
    stop_token_ids: NDArray[np.int32] | None = None,
) -> Acceptance:
    """Follow the target's choices through the tree as far as they agree. See :func:`ddtree.accept_tree`."""
    B, L = tree.batch_size, tree.max_depth
    stops = set() if stop_token_ids is None else {int(t) for t in stop_token_ids}
    node_indices = np.full((B, L + 1), -1, np.int32)
    lengths = np.zeros(B, np.int32)
    bonus = np.full(B, -1, np.int32)
    finished = np.ones(B, np.bool_)

    for b in range(B):
        # A path holds at most L + 1 nodes, so a limit beyond that never binds within the round.
        limit = L + 2 if remaining is None else int(remaining[b])
        if limit == 0:
            continue  # an inert request
        node = 0
        while True:
            node_indices[b, lengths[b]] = node
            lengths[b] += 1
            choice = int(target_token_ids[b, node])
            if choice in stops or lengths[b] == limit:
                finished[b] = True
                break
            # Children come after their parent, so the first match is the child of lowest index.
            matches = [
                i
                for i in range(node + 1, int(tree.node_counts[b]))
                if tree.parents[b, i] == node and tree.token_ids[b, i] == choice
            ]
            if not matches:
                finished[b] = False
                break
            node = matches[0]
        bonus[b] = choice
    return Acceptance(node_indices, lengths, bonus, finished)
