"""The draft tree of highest total probability: best-first search, one request a thread.

A binary heap holds the paths that may come next. Taking a path adds at most two: its next sibling and its first child.
The better of them replaces the path at the top, and the other is pushed, which mostly moves nothing: late candidates
are poor ones.

The order is total, so ties are broken while searching: among equal scores, by rank path. Comparing paths node by node
would cost more than everything else, so each path carries a code, a 64-bit word that sorts as the path does: the codes
of its ranks one after the other from the highest bit, zeros behind. A rank r has the code of r + 1 in b ones, a zero,
and its b bits below the leading one (b = ⌊log2(r + 1)⌋): codes of larger ranks are larger, none is a prefix of another,
and rank 0 is a single zero bit. Two paths have the same word if one continues the other by zeros alone, but two paths
in the heap never continue one another, since a path enters once its parent has left. So words tell paths apart, as long
as they hold whole codes: a path of d ranks under a budget of n takes at most d + 2·log2(n) + 2 bits, for example 37 at
depth 15 and budget 1,024. Where words are cut and equal, the paths are compared node by node.
"""

import numpy as np
from numba import float32, float64, int32, int64, uint32, uint64, void
from numpy.typing import NDArray

from ddtree.kernels.numba_cpu.jit import as_array, compiled, in_parallel, inout, readonly
from ddtree.trees import DraftTree

__all__ = ["build_tree"]

NODES_A_PIECE = 2048
"""Fewer nodes than this are built sooner than another thread has woken up."""

# numba wraps signed indices round as Python does, at the price of a comparison and a selection in every access: what
# indexes the heap is unsigned, and so are the constants beside it (a signed one would turn the sum into a float).
ZERO, ONE = np.uint64(0), np.uint64(1)
RANK_BITS = np.uint64(32)
RANK_MASK = np.uint64(0xFFFFFFFF)
WORD_BITS = np.uint64(64)


@compiled(uint64(uint64, uint64, inout(int32, 1), inout(int32, 1), inout(int32, 1)))
def path_precedes(a, b, parents, depths, ranks):  # type: ignore[no-untyped-def]
    """Whether path ``a`` comes before ``b`` in lexicographic order; each is a parent (upper half) and a rank."""
    parent_a, rank_a = a >> RANK_BITS, a & RANK_MASK
    parent_b, rank_b = b >> RANK_BITS, b & RANK_MASK
    while depths[parent_a] > depths[parent_b]:
        rank_a, parent_a = np.uint64(ranks[parent_a]), np.uint64(parents[parent_a])
    while depths[parent_b] > depths[parent_a]:
        rank_b, parent_b = np.uint64(ranks[parent_b]), np.uint64(parents[parent_b])
    while parent_a != parent_b:
        rank_a, parent_a = np.uint64(ranks[parent_a]), np.uint64(parents[parent_a])
        rank_b, parent_b = np.uint64(ranks[parent_b]), np.uint64(parents[parent_b])
    return np.uint64(rank_a < rank_b)


_tree_arguments = (
    readonly(float32, 3),  # log_probs (B, L, K)
    readonly(int32, 3),  # token_ids (B, L, K)
    readonly(int32, 1),  # root_token_ids (B,)
    inout(int32, 2),  # tokens (B, N)
    inout(int32, 2),  # parents (B, N)
    inout(int32, 2),  # depths (B, N)
    inout(int32, 2),  # ranks (B, N)
    inout(float64, 2),  # scores (B, N)
    inout(int32, 1),  # counts (B,)
    inout(uint32, 3),  # words (B, N, W)
    int64,
    int64,
)


@compiled(void(*_tree_arguments))
def build_trees(log_probs, token_ids, roots, tokens, parents, depths, ranks, scores, counts, words, start, stop):  # type: ignore[no-untyped-def]
    """Build the trees of requests ``start`` … ``stop``, every slot of them."""
    _, L, all_candidates = log_probs.shape
    N, W = tokens.shape[1], words.shape[2]
    K = min(all_candidates, N - 1)  # rank r comes after r siblings, so no tree reaches rank ``budget``

    rank_codes = np.empty(K, np.uint64)  # left-aligned
    code_bits = np.empty(K, np.uint64)
    b = np.int64(0)
    for r in range(K):
        b += np.int64(r + 1 >= 2 << b)
        code_bits[r] = 2 * b + 1
        rank_codes[r] = np.uint64((((1 << b) - 1) << (b + 1)) | (r + 1 - (1 << b))) << np.uint64(63 - 2 * b)

    # The heap: scores, codes, and parent and rank in the halves of a word. Its size grows by one a node at most, one
    # slot more ends it with −inf, so that a last node without a right neighbour needs no test.
    heap_scores = np.empty(N + 2, np.float64)
    heap_codes = np.empty(N + 2, np.uint64)
    heap_paths = np.empty(N + 2, np.uint64)
    node_codes = np.zeros(N, np.uint64)
    node_bits = np.zeros(N, np.uint64)  # of their codes, those that were cut off included
    likeliest = np.empty(L, np.float64)

    for q in range(start, stop):
        q_parents, q_depths, q_ranks, q_scores = parents[q], depths[q], ranks[q], scores[q]
        tokens[q, 0], q_parents[0], q_depths[0], q_ranks[0], q_scores[0] = roots[q], -1, 0, -1, 0.0
        words[q, 0, 0] = 1
        words[q, 0, 1:] = 0
        n = ONE  # nodes so far
        size = ZERO  # of the heap
        # Whether two words may be equal. The paths, which are no siblings, then part behind the word or in a code that
        # it cuts, so at least one of them has a parent whose code fills the word.
        cut = False
        if K > 0:
            for d in range(L):
                likeliest[d] = log_probs[q, d, 0]
            if L > 0 and likeliest[0] > -np.inf:
                heap_scores[0], heap_codes[0], heap_paths[0] = 0.0 + likeliest[0], 0, 0
                heap_scores[1] = -np.inf
                size = ONE

        while size > ZERO and n < np.uint64(N):
            score, code = heap_scores[ZERO], heap_codes[ZERO]
            parent, rank = heap_paths[ZERO] >> RANK_BITS, heap_paths[ZERO] & RANK_MASK
            depth = np.uint64(q_depths[parent])  # of the parent, which is the row of log_probs that the node is from
            q_parents[n], q_depths[n], q_ranks[n], q_scores[n] = parent, depth + ONE, rank, score
            node_codes[n] = code
            node_bits[n] = node_bits[parent] + code_bits[rank]
            # An ancestor's row ends at its own bit: the parent's whole row, zeros included, serves the child.
            for w in range(W):
                words[q, n, w] = words[q, parent, w]
            words[q, n, n >> np.uint64(5)] |= np.uint32(ONE << (n & np.uint64(31)))

            # The best path is replaced by the better of its sibling and its child, and the other one is pushed. (Either
            # may be which: on it hangs the time, not the tree.)
            # Ranks enter one after the other and stop at the first NaN or −inf: what lies behind is never read.
            new_score, new_code, new_path = -np.inf, ZERO, ZERO
            sibling = rank + ONE
            if sibling < np.uint64(K) and log_probs[q, depth, sibling] > -np.inf:
                new_score = q_scores[parent] + np.float64(log_probs[q, depth, sibling])
                new_code = node_codes[parent]
                used = node_bits[parent]
                if used < WORD_BITS:
                    new_code |= rank_codes[sibling] >> used
                new_path = (parent << RANK_BITS) | sibling
            depth += ONE
            if depth < np.uint64(L) and likeliest[depth] > -np.inf:
                cut |= node_bits[n] >= WORD_BITS
                child_score, child_code, child_path = score + likeliest[depth], code, n << RANK_BITS
                if new_score == -np.inf:
                    new_score, new_code, new_path = child_score, child_code, child_path
                else:
                    if child_score > new_score:
                        new_score, child_score = child_score, new_score
                        new_code, child_code = child_code, new_code
                        new_path, child_path = child_path, new_path
                    j = size
                    size += ONE
                    while j > ZERO:
                        i = (j - ONE) >> ONE
                        earlier = (child_score > heap_scores[i]) | (
                            (child_score == heap_scores[i]) & (child_code < heap_codes[i])
                        )
                        if cut and child_score == heap_scores[i] and child_code == heap_codes[i]:
                            earlier = path_precedes(child_path, heap_paths[i], q_parents, q_depths, q_ranks) != ZERO
                        if not earlier:
                            break
                        heap_scores[j], heap_codes[j], heap_paths[j] = heap_scores[i], heap_codes[i], heap_paths[i]
                        j = i
                    heap_scores[j], heap_codes[j], heap_paths[j] = child_score, child_code, child_path
                    heap_scores[size] = -np.inf
            if new_score == -np.inf:  # the path has neither: the heap's last moves to the top
                size -= ONE
                new_score, new_code, new_path = heap_scores[size], heap_codes[size], heap_paths[size]
                heap_scores[size] = -np.inf
            n += ONE

            j = ZERO
            while True:
                i = (j << ONE) + ONE
                if i >= size:
                    break
                # Which of two is the earlier cannot be foretold, so it is computed rather than branched on.
                right = i + ONE
                tied = heap_scores[right] == heap_scores[i]
                swap = (heap_scores[right] > heap_scores[i]) | (tied & (heap_codes[right] < heap_codes[i]))
                if cut and tied and heap_codes[right] == heap_codes[i] and right < size:
                    swap = path_precedes(heap_paths[right], heap_paths[i], q_parents, q_depths, q_ranks) != ZERO
                i += np.uint64(swap)
                tied = new_score == heap_scores[i]
                stays = (new_score > heap_scores[i]) | (tied & (new_code <= heap_codes[i]))
                if cut and tied and new_code == heap_codes[i]:
                    stays = path_precedes(new_path, heap_paths[i], q_parents, q_depths, q_ranks) != ZERO
                if stays:
                    break
                heap_scores[j], heap_codes[j], heap_paths[j] = heap_scores[i], heap_codes[i], heap_paths[i]
                j = i
            heap_scores[j], heap_codes[j], heap_paths[j] = new_score, new_code, new_path

        counts[q] = n
        for node in range(1, np.int64(n)):
            tokens[q, node] = token_ids[q, q_depths[node] - 1, q_ranks[node]]
        for slot in range(np.int64(n), N):
            tokens[q, slot], q_parents[slot], q_depths[slot], q_ranks[slot], q_scores[slot] = -1, -1, -1, -1, -np.inf
            words[q, slot] = 0


def build_tree(
    log_probs: NDArray[np.float32],
    token_ids: NDArray[np.int32],
    root_token_ids: NDArray[np.int32],
    *,
    budget: int,
) -> DraftTree:
    """Take the first ``budget`` rank paths by score, then by the path itself. See :func:`ddtree.build_tree`."""
    B, L, K = log_probs.shape
    N = 1 + budget
    tokens, parents, depths, ranks = (np.empty((B, N), np.int32) for _ in range(4))
    scores = np.empty((B, N), np.float64)
    counts = np.empty(B, np.int32)
    words = np.empty((B, N, (N + 31) // 32), np.uint32)
    in_parallel(
        build_trees,
        B,
        as_array(log_probs, np.float32),
        as_array(token_ids, np.int32),
        as_array(root_token_ids, np.int32),
        *(tokens, parents, depths, ranks, scores, counts, words),
        grain=max(1, NODES_A_PIECE // N),
    )
    return DraftTree(tokens, parents, depths, ranks, scores, counts, words, L, K)
