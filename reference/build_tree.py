"""The draft tree of highest total probability, by best-first search (DDTree, arXiv 2604.12989, Algorithm 1)."""

import heapq

import numpy as np
from numpy.typing import NDArray

from ddtree.reference.visibility_words import visibility_words
from ddtree.trees import DraftTree

__all__ = ["build_tree"]


def drafted_widths(log_probs: NDArray[np.float32]) -> NDArray[np.int32]:
    """Candidates of each depth before its first NaN or −inf: int32 (B, L)."""
    ends = ~(log_probs > -np.inf)  # a NaN compares false
    widths = np.where(ends.any(-1), ends.argmax(-1), log_probs.shape[-1]) if ends.size else np.zeros(ends.shape[:2])
    return np.asarray(widths, np.int32)


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
    tokens = np.full((B, N), -1, np.int32)
    parents = np.full((B, N), -1, np.int32)
    depths = np.full((B, N), -1, np.int32)
    ranks = np.full((B, N), -1, np.int32)
    scores = np.full((B, N), -np.inf, np.float64)
    counts = np.ones(B, np.int32)
    widths = drafted_widths(log_probs)

    for b in range(B):
        tokens[b, 0], depths[b, 0], scores[b, 0] = root_token_ids[b], 0, 0.0
        heap: list[tuple[float, tuple[int, ...], int]] = []

        def push(parent: int, path: tuple[int, ...], b: int = b, heap: list = heap) -> None:  # type: ignore[type-arg]
            depth = len(path)
            if depth <= L and path[-1] < widths[b, depth - 1]:
                score = scores[b, parent] + np.float64(log_probs[b, depth - 1, path[-1]])
                # Tuples compare as the contract's order does: lower negated score first, then path, prefixes first.
                heapq.heappush(heap, (-float(score), path, parent))

        push(0, (0,))
        while heap and counts[b] < N:
            negated, path, parent = heapq.heappop(heap)
            node = int(counts[b])
            counts[b] += 1
            depth, rank = len(path), path[-1]
            tokens[b, node] = token_ids[b, depth - 1, rank]
            parents[b, node], depths[b, node], ranks[b, node] = parent, depth, rank
            scores[b, node] = -negated
            push(parent, (*path[:-1], rank + 1))  # the next sibling
            push(node, (*path, 0))  # the first child

    return DraftTree(tokens, parents, depths, ranks, scores, counts, visibility_words(parents, counts), L, K)
