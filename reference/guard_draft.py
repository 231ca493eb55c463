"""A draft that no one has checked, made safe to build a tree of."""

import numpy as np
from numpy.typing import NDArray

__all__ = ["guard_draft"]


def guard_draft(
    log_probs: NDArray[np.float32], token_ids: NDArray[np.int32], remaining: NDArray[np.int32], *, vocab_size: int
) -> tuple[NDArray[np.float32], NDArray[np.int32]]:
    """A draft without what is wrong with it, and what that was: each request by itself.

    Parameters
    ----------
    log_probs, token_ids : array, float32 and int32, shape (B, L, K)
        What a drafter gave. A row is read up to its first −inf.
    remaining : array, int32, shape (B,)
        Tokens that each request may still emit. At 0 its draft is not looked at.
    vocab_size : int
        V.

    Returns
    -------
    log_probs : array, float32, shape (B, L, K)
        The same, but all −inf, so that nothing is drafted, for a request with a fault or with nothing remaining.
    faults : array, int32, shape (B, 2)
        Each request's first fault by depth, rank and code, as (code, depth · K + rank). 0: none; 1, 2, 3 and 4 as in
        :func:`ddtree.reference.find_draft_fault`; 5: the log-prob is NaN.
    """
    guarded, faults = log_probs.copy(), np.zeros((len(log_probs), 2), np.int32)
    for b in range(len(log_probs)):
        if remaining[b] > 0:
            faults[b] = _first_fault(log_probs[b], token_ids[b], vocab_size)
        if remaining[b] <= 0 or faults[b, 0]:
            guarded[b] = -np.inf
    return guarded, faults


def _first_fault(log_probs: NDArray[np.float32], token_ids: NDArray[np.int32], vocab_size: int) -> tuple[int, int]:
    L, K = log_probs.shape
    for d in range(L):
        seen: set[int] = set()
        for k in range(K):
            value, token = log_probs[d, k], int(token_ids[d, k])
            if value == -np.inf:
                break
            faults = (value > 0, k > 0 and value > log_probs[d, k - 1], not 0 <= token < vocab_size, token in seen)
            codes = [code for code, fault in enumerate((*faults, np.isnan(value)), start=1) if fault]
            if codes:
                return codes[0], d * K + k
            seen.add(token)
    return 0, 0
