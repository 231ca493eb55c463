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
ZERO, ONE, TWO, THREE = np.uint64(0), np.uint64(1), np.uint64(2), np.uint64(3)
RANK_BITS = np.uint64(32)
RANK_MASK = np.uint64(0xFFFFFFFF)
WORD_BITS = np.uint64(64)

# A heap entry is four words side by side, half a cache line: the key of the score, which is less for a higher score
# (the bits of its absolute value); the code; the parent's index and the rank, in the halves of a word; the parent's
# depth.
ENTRY = np.uint64(4)
NOTHING = np.uint64(0xFFFFFFFFFFFFFFFF)  # the key behind the heap's end, greater than any score's


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


@compiled(uint64(float64))
def key_of(score):  # type: ignore[no-untyped-def]
    """The key of a score, which is 0 or less."""
    return np.float64(abs(score)).view(np.uint64)


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

    # The heap grows by one entry a node at most, and ends with an empty one, so that a last entry without a right
    # neighbour needs no test.
    heap = np.empty(np.int64(ENTRY) * (N + 2), np.uint64)
    node_codes = np.zeros(N, np.uint64)
    node_bits = np.zeros(N, np.uint64)  # of their codes, those that were cut off included
    likeliest = np.empty(L, np.float64)

    for q in range(start, stop):
        q_parents, q_depths, q_ranks, q_scores = parents[q], depths[q], ranks[q], scores[q]
        tokens[q, 0], q_parents[0], q_depths[0], q_ranks[0], q_scores[0] = roots[q], -1, 0, -1, 0.0
        words[q, 0, 0] = 1
        words[q, 0, 1:] = 0
        n = ONE  # nodes so far
        end = ZERO  # of the heap
        # Whether two words may be equal. The paths, which are no siblings, then part behind the word or in a code that
        # it cuts, so at least one of them has a parent whose code fills the word.
        cut = False
        if K > 0:
            for d in range(L):
                likeliest[d] = log_probs[q, d, 0]
            if L > 0 and likeliest[0] > -np.inf:
                heap[0], heap[1], heap[2], heap[3] = key_of(likeliest[0]), ZERO, ZERO, ZERO
                heap[ENTRY] = NOTHING
                end = ENTRY

        while end > ZERO and n < np.uint64(N):
            key, code, path, depth = heap[ZERO], heap[ONE], heap[TWO], heap[THREE]
            parent, rank = path >> RANK_BITS, path & RANK_MASK
            score = 0.0 - np.uint64(key).view(np.float64)  # +0.0 for 0, as a sum would give
            used = node_bits[parent]
            bits = used + code_bits[rank]

            # The best path is replaced by the better of its next sibling and its first child, and the other one is
            # pushed. (Which is which matters to the time alone.) Ranks enter one after the other and stop at the first
            # NaN or −inf: what lies behind is never read.
            new_key, new_code, new_path, new_depth = NOTHING, ZERO, path + ONE, depth
            sibling = rank + ONE
            if sibling < np.uint64(K) and log_probs[q, depth, sibling] > -np.inf:
                new_key = key_of(q_scores[parent] + np.float64(log_probs[q, depth, sibling]))
                new_code = node_codes[parent]
                if used < WORD_BITS:
                    new_code |= rank_codes[sibling] >> used

            q_parents[n], q_depths[n], q_ranks[n], q_scores[n] = parent, depth + ONE, rank, score
            node_codes[n], node_bits[n] = code, bits
            for w in range(W):
                words[q, n, w] = words[q, parent, w]
            words[q, n, n >> np.uint64(5)] |= np.uint32(ONE << (n & np.uint64(31)))

            depth += ONE
            if depth < np.uint64(L) and likeliest[depth] > -np.inf:
                cut |= bits >= WORD_BITS
                other_key, other_code, other_path, other_depth = (
                    key_of(score + likeliest[depth]),
                    code,
                    n << RANK_BITS,
                    depth,
                )
                if other_key < new_key:
                    new_key, other_key = other_key, new_key
                    new_code, other_code = other_code, new_code
                    new_path, other_path = other_path, new_path
                    new_depth, other_depth = other_depth, new_depth
                if other_key != NOTHING:
                    j = end
                    while j > ZERO:
                        i = ((j - THREE) >> THREE) << TWO  # the entry above: (j/4 − 1) // 2
                        tied = other_key == heap[i]
                        earlier = (other_key < heap[i]) | (tied & (other_code < heap[i + ONE]))
                        if cut and tied and other_code == heap[i + ONE]:
                            earlier = path_precedes(other_path, heap[i + TWO], q_parents, q_depths, q_ranks) != ZERO
                        if not earlier:
                            break
                        heap[j], heap[j + ONE] = heap[i], heap[i + ONE]
                        heap[j + TWO], heap[j + THREE] = heap[i + TWO], heap[i + THREE]
                        j = i
                    heap[j], heap[j + ONE], heap[j + TWO], heap[j + THREE] = (
                        other_key,
                        other_code,
                        other_path,
                        other_depth,
                    )
                    end += ENTRY
                    heap[end] = NOTHING
            if new_key == NOTHING:  # the path has neither: the heap's last moves to the top
                end -= ENTRY
                new_key, new_code = heap[end], heap[end + ONE]
                new_path, new_depth = heap[end + TWO], heap[end + THREE]
                heap[end] = NOTHING
            n += ONE

            j = ZERO
            while True:
                i = (j << ONE) + ENTRY
                if i >= end:
                    break
                # Which of two is the earlier cannot be foretold, so it is computed rather than branched on. The second
                # may lie behind the end, where there is nothing.
                right = i + ENTRY
                tied = heap[right] == heap[i]
                earlier = (heap[right] < heap[i]) | (tied & (heap[right + ONE] < heap[i + ONE]))
                if cut and tied and heap[right + ONE] == heap[i + ONE]:
                    earlier = path_precedes(heap[right + TWO], heap[i + TWO], q_parents, q_depths, q_ranks) != ZERO
                i += np.uint64(earlier) << TWO
                tied = new_key == heap[i]
                stays = (new_key < heap[i]) | (tied & (new_code <= heap[i + ONE]))
                if cut and tied and new_code == heap[i + ONE]:
                    stays = path_precedes(new_path, heap[i + TWO], q_parents, q_depths, q_ranks) != ZERO
                if stays:
                    break
                heap[j], heap[j + ONE] = heap[i], heap[i + ONE]
                heap[j + TWO], heap[j + THREE] = heap[i + TWO], heap[i + THREE]
                j = i
            heap[j], heap[j + ONE], heap[j + TWO], heap[j + THREE] = new_key, new_code, new_path, new_depth

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
