"""Acceptance, one request a warp: the lanes look through 32 nodes at once for the child that the target chose.

All lanes of a warp hold the same node, length and choice, so they branch alike, and every warp operation has all lanes.
"""

from typing import Any

import numpy as np

from ddtree.kernels.numba_cuda.jit import ALL, as_array, blocks_for, cuda, empty, launch, threads
from ddtree.trees import Acceptance, DraftTree

__all__ = ["accept_tree"]


@cuda.jit
def accept_trees(  # type: ignore[no-untyped-def]
    parents, tokens, counts, choices, limits, stops, num_stops, node_indices, lengths, bonus, finished
):
    """Walk a tree a warp. ``stops`` has at least one element, whatever ``num_stops`` is."""
    b, lane = cuda.grid(1) // 32, cuda.laneid
    if b >= parents.shape[0]:
        return  # a whole warp
    count, limit = counts[b], limits[b]
    length, choice, ends = 0, -1, True  # an inert request
    node = 0 if limit > 0 else -1
    while node >= 0:
        if lane == 0:
            node_indices[b, length] = node
        length += 1
        choice = choices[b, node]
        stop = length == limit
        for s in range(lane, num_stops, 32):
            if stops[s] == choice:
                stop = True
        ends = cuda.any_sync(ALL, stop)
        child = -1
        first = node + 1  # children come after their parent
        while not ends and child < 0 and first < count:
            i = first + lane
            # Lane by lane a later node, so the lowest bit is the child of lowest index.
            found = cuda.ballot_sync(ALL, i < count and parents[b, i] == node and tokens[b, i] == choice)
            if found != 0:
                child = first + cuda.ffs(found) - 1
            first += 32
        node = child
    for k in range(length + lane, node_indices.shape[1], 32):
        node_indices[b, k] = -1
    if lane == 0:
        lengths[b], bonus[b], finished[b] = length, choice, ends


def accept_tree(
    tree: DraftTree, target_token_ids: Any, *, remaining: Any = None, stop_token_ids: Any = None
) -> Acceptance:
    """Follow the target's choices through the tree as far as they agree. See :func:`ddtree.accept_tree`."""
    B, L = tree.batch_size, tree.max_depth
    if remaining is None:
        limits = empty((B,), np.int32)
        limits.fill(L + 2)  # a path holds at most L + 1 nodes, so this never binds
    else:
        limits = as_array(remaining.clip(0, L + 2), np.int32)
    num_stops = 0 if stop_token_ids is None else int(stop_token_ids.size)
    stops = as_array(stop_token_ids, np.int64) if num_stops else empty((1,), np.int64)
    acceptance = Acceptance(
        empty((B, L + 1), np.int32), empty((B,), np.int32), empty((B,), np.int32), empty((B,), np.bool_)
    )
    block = threads(128)
    launch(
        accept_trees,
        blocks_for(32 * B, block),
        block,
        *(as_array(a, np.int32) for a in (tree.parents, tree.token_ids, tree.node_counts, target_token_ids)),
        *(limits, stops, num_stops),
        *(acceptance.node_indices, acceptance.lengths, acceptance.bonus_token_ids, acceptance.finished),
    )
    return acceptance
