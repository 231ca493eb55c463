"""What may be wrong with the values of a draft."""

import numpy as np
from numpy.typing import NDArray

__all__ = ["find_draft_fault"]


def find_draft_fault(
    log_probs: NDArray[np.float32], token_ids: NDArray[np.int32], vocab_size: int
) -> tuple[int, int, int, int]:
    """What is wrong with a draft, and where first: ``(code, b, d, k)``.

    Code 0: nothing, and b, d and k are 0. Else the first fault by request, depth, rank and code: 1, the log-prob is
    above 0; 2, it is above its left neighbour's; 3, the token id is not in 0 … ``vocab_size`` − 1 (0 … 2³¹ − 1 where
    ``vocab_size`` is −1); 4, the token id stands further left already. A row is read up to its first NaN or −inf.
    """
    B, L, K = log_probs.shape
    ids_end = 2**31 if vocab_size < 0 else vocab_size
    for b in range(B):
        for d in range(L):
            seen: set[int] = set()
            for k in range(K):
                if not log_probs[b, d, k] > -np.inf:
                    break
                if log_probs[b, d, k] > 0:
                    return 1, b, d, k
                if k > 0 and log_probs[b, d, k] > log_probs[b, d, k - 1]:
                    return 2, b, d, k
                if not 0 <= token_ids[b, d, k] < ids_end:
                    return 3, b, d, k
                if int(token_ids[b, d, k]) in seen:
                    return 4, b, d, k
                seen.add(int(token_ids[b, d, k]))
    return 0, 0, 0, 0
