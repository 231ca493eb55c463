"""Launch of ``find_draft_fault.cu``."""

from typing import Any

import numpy as np

from ddtree.kernels.cupy.program import contiguous, empty, launch

__all__ = ["decoded_fault", "find_draft_fault"]

THREADS = 128


def find_draft_fault(log_probs: Any, token_ids: Any, vocab_size: int) -> Any:
    """What is wrong with a draft, and where first, as a number on the device. See :func:`decoded_fault`.

    Parameters
    ----------
    log_probs : array, float32, shape (B, L, K)
        As of :func:`ddtree.build_tree`.
    token_ids : array, int32, shape (B, L, K)
        As of :func:`ddtree.build_tree`.
    vocab_size : int
        V.

    Returns
    -------
    array, int64, shape (1,)
        −1 where nothing is wrong.
    """
    B, L, K = log_probs.shape
    fault = empty((1,), np.int64)
    fault.fill(-1)
    launch(
        *("find_draft_fault", "find_fault", B * L if K else 0, THREADS),
        *(contiguous(log_probs, np.float32), contiguous(token_ids, np.int32), fault),
        *(np.int32(K), np.int32(vocab_size)),
    )
    return fault


def decoded_fault(fault: int, L: int) -> tuple[int, int, int, int]:
    """Return ``(code, b, d, k)`` of what :func:`find_draft_fault` found, as :mod:`ddtree.reference` has it."""
    if fault == -1:
        return 0, 0, 0, 0
    row, place = divmod(int(fault), 2**32)
    return place % 8, row // L, row % L, place // 8
