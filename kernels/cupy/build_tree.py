"""Launch of ``build_tree.cu``."""

from typing import Any

import numpy as np

from ddtree.kernels.cupy.program import blocks_for, contiguous, empty, launch
from ddtree.trees import DraftTree

__all__ = ["build_tree"]

SMALL_THREADS = 512
SMALL_NODES = (64, 128)
SMALL_DEPTHS = 44
GROW_SHARED = 100_000
NODES_A_BLOCK = 8
"""Of ``fill_visibility``."""


def build_tree(log_probs: Any, token_ids: Any, root_token_ids: Any, *, budget: int) -> DraftTree:
    """Take the first ``budget`` rank paths by score, then by the path itself. See :func:`ddtree.build_tree`."""
    B, L, K = log_probs.shape
    N = 1 + budget
    tokens, parents, depths, ranks = (empty((B, N), np.int32) for _ in range(4))
    scores, counts = empty((B, N), np.float64), empty((B,), np.int32)
    words = empty((B, N, (N + 31) // 32), np.uint32)
    if log_probs.size == 0:  # no element to point at
        L, K = 0, 0
    columns = min(K, budget)
    arguments = (
        *(contiguous(log_probs, np.float32), contiguous(token_ids, np.int32), contiguous(root_token_ids, np.int32)),
        *(tokens, parents, depths, ranks, scores, counts, words),
        *(np.int32(L), np.int32(K), np.int32(N)),
    )
    if budget <= SMALL_NODES[-1] and L <= SMALL_DEPTHS:
        most = next(nodes for nodes in SMALL_NODES if budget <= nodes)
        shared = 4 * (L + 2) * (columns + 2) + 4 * L * columns
        launch("build_tree", f"small_{most}", B, SMALL_THREADS, *arguments, shared=shared)
    else:
        shared = paths_size(budget, L, columns, 2)
        if shared <= GROW_SHARED and max(L, most_kept(budget)) < 2**16:
            launch("build_tree", "grow_shared", B, 1024 if budget > 256 else 512, *arguments, shared=shared)
        else:
            size = paths_size(budget, L, columns, 4)
            memory = empty((B, size), np.uint8)
            launch("build_tree", "grow_global", B, 512, *arguments, memory, np.int64(size))
        launch(
            *("build_tree", "fill_visibility", blocks_for(parents.size, NODES_A_BLOCK), 32 * NODES_A_BLOCK),
            *(parents, counts, words, np.int64(parents.size), np.int32(N)),
        )
    return DraftTree(tokens, parents, depths, ranks, scores, counts, words, *log_probs.shape[1:])


def most_kept(budget: int) -> int:
    """Paths that ``grow_*`` keep of more."""
    return budget + (budget // 4 if budget >= 4 else 1)


def paths_size(budget: int, L: int, columns: int, index_size: int) -> int:
    """Bytes of a request's ``Paths`` with indices of ``index_size`` bytes, in steps of 8."""
    capacity = 2 * most_kept(budget) + 2
    size = capacity * (8 + 8 + 4 + 6 * index_size) + 4 * (1 + L + L + 2 + columns)
    return -(-size // 8) * 8
