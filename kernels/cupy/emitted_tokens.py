"""Launch of ``emitted_tokens.cu``."""

from typing import Any

import numpy as np

from ddtree.kernels.cupy.program import contiguous, empty, launch
from ddtree.trees import Acceptance, DraftTree

__all__ = ["emitted_tokens"]

THREADS = 128


def emitted_tokens(tree: DraftTree, acceptance: Acceptance) -> Any:
    """How many tokens each request emits, and which. See :func:`ddtree.reference.emitted_tokens`."""
    B, width = acceptance.node_indices.shape
    emitted = empty((B, 1 + width), np.int32)
    arrays = (tree.token_ids, acceptance.node_indices, acceptance.lengths, acceptance.bonus_token_ids)
    launch(
        *("emitted_tokens", "gather_emitted", B, THREADS),
        *(*(contiguous(array, np.int32) for array in arrays), emitted, np.int32(tree.num_slots), np.int32(width)),
    )
    return emitted
