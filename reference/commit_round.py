"""The end of a round: what the trees' accepted paths add to the committed tokens."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ddtree.trees import Acceptance, DraftTree

__all__ = ["commit_round"]


def commit_round(
    state: Any, tree: DraftTree, acceptance: Acceptance, faults: NDArray[np.int32], record: NDArray[np.int32]
) -> None:
    """Append what each slot emitted to its committed tokens, in place, and write down what that was.

    Parameters
    ----------
    state : RoundState
        See ``RoundState`` of ``ddtree/engine/resident.py``. Of a slot that emitted n tokens, they are appended to
        ``tokens``, ``lengths`` and ``prefix_lens`` grow by n, ``roots`` is the last of them, ``remaining`` falls by n,
        or to 0 if the request has finished or could choose no token (−1); ``running`` is whether some remain, and
        ``kept`` is n.
    tree, acceptance
        Of this round, B slots of N nodes. A slot with nothing remaining has accepted nothing.
    faults : array, int32, shape (B, 2)
        Of :func:`ddtree.reference.guard_draft`.
    record : array, int32, shape (B, L + 4)
        Written in full: n, the fault's code and place, and the emitted tokens, −1 after the last.
    """
    record[:, 0], record[:, 1:3], record[:, 3:] = acceptance.lengths, faults, -1
    state.kept[:] = acceptance.lengths
    for b, n in enumerate(acceptance.lengths.tolist()):
        if n == 0:
            continue
        bonus = int(acceptance.bonus_token_ids[b])
        emitted = [*tree.token_ids[b, acceptance.node_indices[b, 1:n]].tolist(), bonus]
        record[b, 3 : 3 + n] = emitted
        length = int(state.lengths[b])
        state.tokens[b, length : length + n] = emitted
        state.lengths[b] += n
        state.prefix_lens[b] += n
        state.roots[b] = max(bonus, 0)
        ends = bool(acceptance.finished[b]) or bonus < 0
        state.remaining[b] = 0 if ends else state.remaining[b] - n
        state.running[b] = int(state.remaining[b] > 0)
