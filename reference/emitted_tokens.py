"""What a round emits, row by row: the accepted drafts and the bonus."""

import numpy as np
from numpy.typing import NDArray

from ddtree.trees import Acceptance, DraftTree

__all__ = ["emitted_tokens"]


def emitted_tokens(tree: DraftTree, acceptance: Acceptance) -> NDArray[np.int32]:
    """Return how many tokens each request emits, and which.

    Parameters
    ----------
    tree : DraftTree
        The trees.
    acceptance : Acceptance
        What was kept of them.

    Returns
    -------
    array, int32, shape (B, L + 2)
        ``lengths``, then so many tokens: the kept drafts' and the bonus; −1 behind them.
    """
    B, width = acceptance.node_indices.shape
    emitted = np.full((B, 1 + width), -1, np.int32)
    emitted[:, 0] = acceptance.lengths
    for b, length in enumerate(acceptance.lengths.tolist()):
        if length > 0:
            emitted[b, 1:length] = tree.token_ids[b, acceptance.node_indices[b, 1:length]]
            emitted[b, length] = acceptance.bonus_token_ids[b]
    return emitted
