"""Launch of ``guard_draft.cu``."""

from typing import Any

import numpy as np

from ddtree.kernels.cupy.program import contiguous, empty, launch

__all__ = ["guard_draft"]

THREADS = 256


def guard_draft(log_probs: Any, token_ids: Any, remaining: Any, *, vocab_size: int) -> tuple[Any, Any]:
    """A draft without what is wrong with it, and what that was. See :func:`ddtree.reference.guard_draft`."""
    B, L, K = log_probs.shape
    guarded, faults = empty((B, L, K), np.float32), empty((B, 2), np.int32)
    if log_probs.size == 0:  # no element to point at
        L, K = 0, 0
    launch(
        *("guard_draft", "find_faults", B, THREADS),
        *(contiguous(log_probs, np.float32), contiguous(token_ids, np.int32), contiguous(remaining, np.int32)),
        *(guarded, faults, np.int32(L), np.int32(K), np.int32(vocab_size)),
    )
    return guarded, faults
