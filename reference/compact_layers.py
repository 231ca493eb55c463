"""Cache compaction where each layer's keys and values are an array of their own, with trees behind all prefixes."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ddtree.trees import Acceptance

__all__ = ["compact_layers", "layer_table"]


def layer_table(arrays: Sequence[NDArray[Any]], first_rows: Sequence[int]) -> list[tuple[NDArray[Any], int]]:
    """Return what :func:`compact_layers` takes.

    Parameters
    ----------
    arrays : sequence of array, shape (B, heads, rows, width)
        Keys and values of every layer, of one type; heads, rows and width are each one's own, and rows and heads may
        lie apart. They are written in place.
    first_rows : sequence of int
        Which row of the cache the first of each array is: earlier ones are no longer held.
    """
    return list(zip(arrays, first_rows, strict=True))


def compact_layers(
    table: list[tuple[NDArray[Any], int]],
    prefix_lens: NDArray[np.int32],
    tree_rows: NDArray[np.int32],
    acceptance: Acceptance,
) -> None:
    """Row tree_row + node_indices[k] becomes row prefix_len + k, in place, in every array.

    As if all were read before any is written. Rows from ``prefix_len + lengths`` on keep what they hold.

    Parameters
    ----------
    table : list
        From :func:`layer_table`.
    prefix_lens : array, int32, shape (B,)
        Committed rows of each request before this round.
    tree_rows : array, int32, shape (B,)
        Row of each request's root, at least its ``prefix_len``.
    acceptance : Acceptance
        The kept nodes.
    """
    for b, length in enumerate(acceptance.lengths):
        to = int(prefix_lens[b]) + np.arange(length)
        of = int(tree_rows[b]) + acceptance.node_indices[b, :length].astype(np.int64)
        for array, first in table:
            # indexing with an array copies, so that every row is read before any is written
            array[b][:, to - first] = array[b][:, of - first]
