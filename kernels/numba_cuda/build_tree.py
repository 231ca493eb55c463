"""The draft tree of highest total probability: best-first search, one request a warp.

Best-first search takes one path after the other, and each taken path adds at most two that may come next: its next
sibling and its first child. So many nodes cannot be taken at once, but the next one can be found by 32 lanes. Paths
that may come next stand in slots: the sibling in the slot of the path that was taken, the child in a new one. Of every
32 slots, a group, the earliest is known; one reduction over the groups finds the next path, and one over the slots of
its group, where an entry has changed, keeps that true. Each is five exchanges between lanes (a butterfly), whatever the
scores are, up to 1,024 slots; while there is one group, the first of them falls away.

The order is total: score, then rank path. As in ``numba_cpu``, a path carries a code, a word that sorts as the path
does: the codes of its ranks one after the other from the highest bit of 63, zeros behind. A rank r has the code of
r + 1 in b ones, a zero, and its b bits below the leading one (b = ⌊log2(r + 1)⌋): codes of larger ranks are larger,
none is a prefix of another, and rank 0 is a single zero bit. Two paths in slots never continue one another, since a
path enters when its parent has left, so words that hold whole codes tell them apart. Where words are equal, because
they are cut, the paths are compared node by node.

Slots lie in global memory, whatever the budget; a request's few kilobytes stay in the first-level cache.
"""

from typing import Any

import numpy as np

from ddtree.kernels.numba_cuda.jit import ALL, as_array, cuda, empty, launch
from ddtree.kernels.numba_cuda.visibility_words import fill_visibility
from ddtree.trees import DraftTree

__all__ = ["build_tree"]

WORD_BITS = 63  # of a code: words are compared as signed numbers


@cuda.jit(device=True)
def rank_bits(rank):  # type: ignore[no-untyped-def]
    """The length of a rank's code."""
    b = 0
    while (rank + 1) >> (b + 1) > 0:
        b += 1
    return 2 * b + 1


@cuda.jit(device=True)
def with_rank(code, bits, rank):  # type: ignore[no-untyped-def]
    """The code of a path of code ``code``, ``bits`` long, with ``rank`` behind it; what does not fit is cut off."""
    if bits >= WORD_BITS:
        return code
    length = rank_bits(rank)
    b = length >> 1
    own = (((np.int64(1) << b) - 1) << (b + 1)) | (rank + 1 - (np.int64(1) << b))
    return code | ((own << (WORD_BITS - length)) >> bits)


@cuda.jit(device=True)
def path_precedes(parent_a, rank_a, parent_b, rank_b, parents, depths, ranks):  # type: ignore[no-untyped-def]
    """Whether path a comes before path b, node by node; neither continues the other."""
    while depths[parent_a] > depths[parent_b]:
        rank_a, parent_a = ranks[parent_a], parents[parent_a]
    while depths[parent_b] > depths[parent_a]:
        rank_b, parent_b = ranks[parent_b], parents[parent_b]
    while parent_a != parent_b:
        rank_a, parent_a = ranks[parent_a], parents[parent_a]
        rank_b, parent_b = ranks[parent_b], parents[parent_b]
    return rank_a < rank_b


@cuda.jit(device=True)
def earlier(a, b, scores, codes, slot_parents, slot_ranks, parents, depths, ranks):  # type: ignore[no-untyped-def]
    """The slot of the earlier path, of slots ``a`` and ``b``; −1 is no slot, and a score of −inf no path."""
    if b < 0 or a == b:
        return a
    if a < 0:
        return b
    if scores[a] != scores[b]:
        return a if scores[a] > scores[b] else b
    if codes[a] != codes[b]:
        return a if codes[a] < codes[b] else b
    if scores[a] == -np.inf:
        return a  # neither is a path
    if path_precedes(slot_parents[a], slot_ranks[a], slot_parents[b], slot_ranks[b], parents, depths, ranks):
        return a
    return b


@cuda.jit(device=True)
def earliest(slot, scores, codes, slot_parents, slot_ranks, parents, depths, ranks):  # type: ignore[no-untyped-def]
    """The slot of the earliest path, of one slot each lane; every lane gets it."""
    for step in (16, 8, 4, 2, 1):
        other = cuda.shfl_xor_sync(ALL, slot, step)
        slot = earlier(slot, other, scores, codes, slot_parents, slot_ranks, parents, depths, ranks)
    return slot


@cuda.jit
def build_trees(  # type: ignore[no-untyped-def]
    log_probs,  # (B, L, K)
    token_ids,  # (B, L, K)
    roots,  # (B,)
    all_tokens,  # (B, N), as the next three
    all_parents,
    all_depths,
    all_ranks,
    all_scores,  # (B, N), of nodes
    counts,  # (B,)
    all_slot_scores,  # (B, N), of paths that may come next, as all that follows
    all_codes,
    all_slot_parents,
    all_slot_ranks,
    all_node_codes,  # (B, N), of nodes, as the next one
    all_node_bits,
    all_firsts,  # (B, groups): the slot of the earliest path of each 32
):
    """Build the tree of request ``blockIdx.x``, by one warp: every slot but for the visibility."""
    _, L, K = log_probs.shape
    b, lane = cuda.blockIdx.x, cuda.laneid
    tokens, parents, depths, ranks = all_tokens[b], all_parents[b], all_depths[b], all_ranks[b]
    node_scores, node_codes, node_bits = all_scores[b], all_node_codes[b], all_node_bits[b]
    scores, codes, firsts = all_slot_scores[b], all_codes[b], all_firsts[b]
    slot_parents, slot_ranks = all_slot_parents[b], all_slot_ranks[b]
    N = tokens.shape[0]

    end = 1 if N > 1 and L > 0 and K > 0 and log_probs[b, 0, 0] > -np.inf else 0  # of the slots in use
    if lane == 0:
        parents[0], depths[0], ranks[0], node_scores[0], node_codes[0], node_bits[0] = -1, 0, -1, 0.0, 0, 0
        if end > 0:
            # A sum from the root's +0.0, which is never −0.0.
            scores[0], codes[0], slot_parents[0], slot_ranks[0] = 0.0 + np.float64(log_probs[b, 0, 0]), 0, 0, 0
            firsts[0] = 0
    # The root and the first slot, to all lanes.
    cuda.syncwarp(ALL)

    n = 1  # nodes so far
    while n < N:
        slot = firsts[0] if end > 0 else -1
        if end > 32:
            # The earliest of all groups, each lane over every 32nd of them first.
            slot = -1
            for group in range(lane, (end + 31) >> 5, 32):
                slot = earlier(slot, firsts[group], scores, codes, slot_parents, slot_ranks, parents, depths, ranks)
            slot = earliest(slot, scores, codes, slot_parents, slot_ranks, parents, depths, ranks)
        if slot < 0 or scores[slot] == -np.inf:
            break  # in every lane

        # All lanes work out the same node, sibling and child.
        score, code, parent, rank = scores[slot], codes[slot], slot_parents[slot], slot_ranks[slot]
        depth = depths[parent] + 1
        bits = node_bits[parent] + rank_bits(rank)
        sibling_score, sibling_code = -np.inf, np.int64(0)
        if rank + 1 < K and log_probs[b, depth - 1, rank + 1] > -np.inf:  # what lies behind the end is not read
            sibling_score = node_scores[parent] + np.float64(log_probs[b, depth - 1, rank + 1])
            sibling_code = with_rank(node_codes[parent], node_bits[parent], rank + 1)
        has_child = depth < L and log_probs[b, depth, 0] > -np.inf
        # All lanes have read the slot and its group, which lane 0 now writes.
        cuda.syncwarp(ALL)
        if lane == 0:
            parents[n], depths[n], ranks[n], node_scores[n], node_codes[n] = parent, depth, rank, score, code
            node_bits[n] = bits
            scores[slot], codes[slot], slot_ranks[slot] = sibling_score, sibling_code, rank + 1  # parent as before
            if has_child:
                scores[end], codes[end] = score + np.float64(log_probs[b, depth, 0]), code  # rank 0 is zero bits
                slot_parents[end], slot_ranks[end] = n, 0
        if has_child:
            end += 1
        # The node and its two successors, to the lanes that compare them.
        cuda.syncwarp(ALL)

        group = slot >> 5
        own = 32 * group + lane
        first = own if own < end else -1
        first = earliest(first, scores, codes, slot_parents, slot_ranks, parents, depths, ranks)
        if lane == 0:
            firsts[group] = first
            last = (end - 1) >> 5
            if has_child and last != group:  # the child is in another group, with or without others
                first = firsts[last] if (end - 1) & 31 else -1
                firsts[last] = earlier(first, end - 1, scores, codes, slot_parents, slot_ranks, parents, depths, ranks)
        # The earliest of both groups, to the lanes that look through the groups.
        cuda.syncwarp(ALL)
        n += 1

    for i in range(lane, N, 32):
        if i >= n:
            tokens[i], parents[i], depths[i], ranks[i], node_scores[i] = -1, -1, -1, -1, -np.inf
        elif i > 0:
            tokens[i] = token_ids[b, depths[i] - 1, ranks[i]]
    if lane == 0:
        tokens[0], counts[b] = roots[b], n


def build_tree(log_probs: Any, token_ids: Any, root_token_ids: Any, *, budget: int) -> DraftTree:
    """Take the first ``budget`` rank paths by score, then by the path itself. See :func:`ddtree.build_tree`."""
    B, L, K = log_probs.shape
    N = 1 + budget
    tokens, parents, depths, ranks = (empty((B, N), np.int32) for _ in range(4))
    scores, counts = empty((B, N), np.float64), empty((B,), np.int32)
    words = empty((B, N, (N + 31) // 32), np.uint32)
    if log_probs.size == 0:  # no element to point at: a depth of one candidate that ends before it
        log_probs, token_ids = empty((B, 1, 1), np.float32), empty((B, 1, 1), np.int32)
        log_probs.fill(-np.inf)
    launch(
        build_trees,
        B,
        32,
        *(as_array(log_probs, np.float32), as_array(token_ids, np.int32), as_array(root_token_ids, np.int32)),
        *(tokens, parents, depths, ranks, scores, counts),
        *(empty((B, N), dtype) for dtype in (np.float64, np.int64, np.int32, np.int32, np.int64, np.int32)),
        empty((B, (N + 31) // 32), np.int32),
    )
    fill_visibility(parents, counts, words)
    return DraftTree(tokens, parents, depths, ranks, scores, counts, words, L, K)
