"""Launch of ``commit_round.cu``."""

from typing import Any

import numpy as np

from ddtree.kernels.cupy.program import blocks_for, contiguous, launch
from ddtree.trees import Acceptance, DraftTree

__all__ = ["commit_round"]

THREADS = 128
SLOTS = THREADS // 32
"""Of a block."""


def commit_round(state: Any, tree: DraftTree, acceptance: Acceptance, faults: Any, record: Any) -> None:
    """Append what each slot emitted to its committed tokens. See :func:`ddtree.reference.commit_round`."""
    B, R = state.tokens.shape
    own = (state.tokens, state.lengths, state.prefix_lens, state.roots, state.remaining, state.running, state.kept)
    read = (tree.token_ids, acceptance.node_indices, acceptance.lengths, acceptance.bonus_token_ids)
    launch(
        *("commit_round", "append_emitted", blocks_for(B, SLOTS), THREADS),
        *(*own, *(contiguous(array, np.int32) for array in read), contiguous(acceptance.finished, np.bool_)),
        *(contiguous(faults, np.int32), record),
        *(np.int32(n) for n in (B, R, tree.num_slots, acceptance.node_indices.shape[1])),
    )
