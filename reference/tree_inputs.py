"""What a causal language model reads of a tree: each node's token and position."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ddtree.trees import DraftTree

__all__ = ["tree_inputs"]


def tree_inputs(
    tree: DraftTree, prefix_lens: NDArray[np.int32], *, vocab_size: int, max_position: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the tokens and positions of all slots, as a model of another library takes them.

    Parameters
    ----------
    tree : DraftTree
        The trees. An unused slot is given the root's token and position: whatever comes of it is not read.
    prefix_lens : array, int32, shape (B,)
        Committed rows of each request.
    vocab_size : int
        V. A token outside 0 … V − 1, as only a draft has that is refused later, is moved to the nearest inside, so that
        no embedding is read where it is not.
    max_position : int
        The last position that the model has. Nodes beyond it are never committed, and are given this one.

    Returns
    -------
    input_ids, position_ids : array, int64, shape (B, N)
        0 … V − 1, and 0 … ``max_position``.
    """
    used = np.arange(tree.num_slots) < tree.node_counts[:, None]
    input_ids = np.where(used, tree.token_ids, tree.token_ids[:, :1]).clip(0, vocab_size - 1)
    depths: NDArray[Any] = np.where(used, tree.depths, 0).astype(np.int64)
    return input_ids.astype(np.int64), (prefix_lens[:, None] + depths).clip(0, max_position)
