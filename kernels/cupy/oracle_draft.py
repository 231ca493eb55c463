"""Launch of ``oracle_draft.cu``."""

from typing import Any

import numpy as np

from ddtree.kernels.cupy.program import blocks_for, empty, launch

__all__ = ["oracle_draft"]

THREADS = 256


def oracle_draft(table: Any, confidence: Any, lengths: Any, prompt_lens: Any) -> tuple[Any, Any]:
    """Read a table of drafts where each request stands. See :func:`ddtree.reference.oracle_draft`."""
    B, P, L, K = table.shape
    log_probs, token_ids = empty((B, L, K), np.float32), empty((B, L, K), np.int32)
    launch(
        *("oracle_draft", "oracle_draft", blocks_for(B * L * K, THREADS), THREADS),
        *(table, confidence, lengths, prompt_lens, *map(np.int32, (B, P, L, K)), log_probs, token_ids),
    )
    return log_probs, token_ids
