"""Acceptance, one request a thread: a single scan of the nodes, since the next node of the path stands further on."""

import numpy as np
from numba import boolean, int32, int64, void
from numpy.typing import NDArray

from ddtree.kernels.numba_cpu.jit import as_array, compiled, in_parallel, inout, readonly
from ddtree.trees import Acceptance, DraftTree

__all__ = ["accept_tree"]


@compiled(
    void(
        readonly(int32, 2),  # parents (B, N)
        readonly(int32, 2),  # tokens (B, N)
        readonly(int32, 1),  # counts (B,)
        readonly(int32, 2),  # choices (B, N)
        readonly(int32, 1),  # limits (B,)
        readonly(int64, 1),  # stops, any number
        inout(int32, 2),  # node_indices (B, L + 1)
        inout(int32, 1),  # lengths (B,)
        inout(int32, 1),  # bonus (B,)
        inout(boolean, 1),  # finished (B,)
        int64,
        int64,
    )
)
def accept_trees(parents, tokens, counts, choices, limits, stops, node_indices, lengths, bonus, finished, start, stop):  # type: ignore[no-untyped-def]
    """Walk the trees of requests ``start`` … ``stop``."""
    for b in range(start, stop):
        node_indices[b] = -1
        lengths[b], bonus[b], finished[b] = 0, -1, True
        if limits[b] == 0:
            continue  # an inert request
        length, node = 0, 0
        while True:
            node_indices[b, length] = node
            length += 1
            choice = choices[b, node]
            ends = length == limits[b]
            for token in stops:
                ends |= token == choice
            if ends:
                break
            # Children come after their parent, so the first match is the child of lowest index.
            i = node + 1
            while i < counts[b] and not (parents[b, i] == node and tokens[b, i] == choice):
                i += 1
            if i >= counts[b]:
                break
            node = i
        lengths[b], bonus[b], finished[b] = length, choice, ends


def accept_tree(
    tree: DraftTree,
    target_token_ids: NDArray[np.int32],
    *,
    remaining: NDArray[np.int32] | None = None,
    stop_token_ids: NDArray[np.int32] | None = None,
) -> Acceptance:
    """Follow the target's choices through the tree as far as they agree. See :func:`ddtree.accept_tree`."""
    B, L = tree.batch_size, tree.max_depth
    # A path holds at most L + 1 nodes, so a limit beyond that never binds within the round.
    limits = np.full(B, L + 2, np.int32) if remaining is None else np.minimum(remaining, L + 2)
    stops = np.empty(0, np.int64) if stop_token_ids is None else stop_token_ids
    node_indices = np.empty((B, L + 1), np.int32)
    lengths, bonus = np.empty(B, np.int32), np.empty(B, np.int32)
    finished = np.empty(B, np.bool_)
    in_parallel(
        accept_trees,
        B,
        as_array(tree.parents, np.int32),
        as_array(tree.token_ids, np.int32),
        as_array(tree.node_counts, np.int32),
        as_array(target_token_ids, np.int32),
        as_array(limits, np.int32),
        as_array(stops, np.int64),
        *(node_indices, lengths, bonus, finished),
        grain=max(1, 65536 // max(tree.num_slots, 1)),
    )
    return Acceptance(node_indices, lengths, bonus, finished)
