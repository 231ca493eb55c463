"""The K likeliest tokens of each row of logits, with their log-probs."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["topk_log_probs"]


def topk_log_probs(
    logits: NDArray[Any], k: int, *, vocab_size: int | None = None
) -> tuple[NDArray[np.float32], NDArray[np.int32]]:
    """By logit descending, then id ascending; log-softmax over all of V. See :func:`ddtree.topk_log_probs`."""
    B, L, width = logits.shape
    V = width if vocab_size is None else vocab_size
    log_probs = np.full((B, L, k), -np.inf, np.float32)
    token_ids = np.zeros((B, L, k), np.int32)
    for b in range(B):
        for d in range(L):
            row = logits[b, d, :V].astype(np.float64)
            row[np.isnan(row)] = -np.inf
            order = np.argsort(-row, kind="stable")[:k]  # stable: equal logits stay in order of id
            token_ids[b, d] = order
            top = row[order[0]] if k > 0 else row.max()
            if np.isinf(top):
                continue  # +inf, or nothing finite: no distribution
            with np.errstate(over="ignore"):  # what float32 cannot hold is −inf, which is the right rounding
                log_z = top + np.log(np.exp(row - top).sum())
                log_probs[b, d] = np.minimum(row[order] - log_z, 0.0)
    return log_probs, token_ids
