"""Cache compaction: the rows of the accepted nodes move up behind the prefix."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ddtree.trees import Acceptance

__all__ = ["compact_cache"]


def compact_cache(
    kv_cache: NDArray[Any],
    page_table: NDArray[np.int32],
    prefix_lens: NDArray[np.int32],
    acceptance: Acceptance,
) -> None:
    """Row prefix_len + node_indices[k] becomes row prefix_len + k, in place. See :func:`ddtree.compact_cache`."""
    page_size = kv_cache.shape[2]
    for b in range(len(prefix_lens)):
        length = int(acceptance.lengths[b])
        to = int(prefix_lens[b]) + np.arange(length)
        of = int(prefix_lens[b]) + acceptance.node_indices[b, :length].astype(np.int64)
        # Indexing with arrays copies, so that every row is read before any is written.
        rows = kv_cache[:, page_table[b, of // page_size], of % page_size]
        kv_cache[:, page_table[b, to // page_size], to % page_size] = rows
