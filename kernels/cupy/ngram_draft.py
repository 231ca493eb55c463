"""Launch of ``ngram_draft.cu``."""

from typing import Any

import numpy as np

from ddtree.kernels.cupy.program import empty, launch

__all__ = ["MOST_CANDIDATES", "MOST_ORDERS", "ngram_draft"]

FEW_TOKENS = 4096
"""Up to so many, smaller blocks leave room for each other."""
MOST_ORDERS, MOST_CANDIDATES = 32, 4096


def ngram_draft(
    tokens: Any,
    lengths: Any,
    vote_sums: Any,
    *,
    depth: int,
    topk: int,
    max_ngram: int,
    min_ngram: int,
    escape: float,
) -> tuple[Any, Any]:
    """Draft what followed earlier copies of each row's last tokens. See :func:`ddtree.reference.ngram_draft`.

    The bits are the reference's: shares are whole numbers, and the logarithm is portable. One block works on a depth of
    a request; what it takes grows with the tokens, and with candidates beyond a few hundred.

    Raises
    ------
    ValueError
        More orders or, among all that may vote, more candidates than a block holds.
    """
    B, R = tokens.shape
    voters, longest = len(vote_sums) - 1, min(max_ngram, R)
    orders = max(longest - min_ngram + 1, 1)
    if orders > MOST_ORDERS:
        raise ValueError(
            f"max_ngram must be below min_ngram + {MOST_ORDERS} on a GPU, got {min_ngram} … {max_ngram}: lower it"
        )
    candidates = min(orders * voters, R)
    if candidates > MOST_CANDIDATES:
        raise ValueError(
            f"at most {MOST_CANDIDATES} places may vote on a GPU, got {orders} orders of up to {voters} in {R} tokens: "
            "lower recency or max_ngram"
        )
    slots = candidates + candidates // 2 + 1
    threads = 512 if R <= FEW_TOKENS else 1024
    log_probs, token_ids = empty((B, depth, topk), np.float32), empty((B, depth, topk), np.int32)
    launch(
        *("ngram_draft", f"ngram_draft_{threads}", (depth, B), threads),
        *(tokens, lengths, vote_sums, *map(np.int32, (R, voters, topk, longest, min_ngram)), np.float64(escape)),
        *(np.int32(slots), np.int32(candidates), log_probs, token_ids),
        shared=12 * slots + 4 * candidates,
    )
    return log_probs, token_ids
