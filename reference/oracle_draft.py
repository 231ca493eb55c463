"""The drafts that a table holds for where each request stands."""

import numpy as np
from numpy.typing import NDArray

__all__ = ["oracle_draft"]


def oracle_draft(
    table: NDArray[np.int32],
    confidence: NDArray[np.float32],
    lengths: NDArray[np.int32],
    prompt_lens: NDArray[np.int32],
) -> tuple[NDArray[np.float32], NDArray[np.int32]]:
    """Draft (B, L, K) from ``table`` (B, P, L, K), whose entry j of a request is for when it has j + 1 new tokens.

    Beyond the table its last entry holds. An id of −1 is not drafted; of the others, rank k has log-prob
    ``confidence[k]``.
    """
    B, P, L, K = table.shape
    log_probs = np.full((B, L, K), -np.inf, np.float32)
    token_ids = np.empty((B, L, K), np.int32)
    for b in range(B):
        new = int(lengths[b]) - int(prompt_lens[b])
        token_ids[b] = table[b, min(max(new - 1, 0), P - 1)]
        for d in range(L):
            for k in range(K):
                if token_ids[b, d, k] >= 0:
                    log_probs[b, d, k] = confidence[k]
    return log_probs, token_ids
