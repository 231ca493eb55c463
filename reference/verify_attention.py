"""Verify attention: absorbed multi-head latent attention of tree nodes (DeepSeek-V2, arXiv 2405.04434)."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ddtree.trees import DraftTree

__all__ = ["verify_attention"]


def verify_attention(
    q: NDArray[Any],
    kv_cache: NDArray[Any],
    page_table: NDArray[np.int32],
    prefix_lens: NDArray[np.int32],
    tree: DraftTree,
    *,
    scale: float,
    kv_lora_rank: int,
    out: NDArray[Any] | None = None,
) -> NDArray[Any]:
    """Each node attends to the prefix and to the nodes it sees. See :func:`ddtree.verify_attention`."""
    B, N, H, _ = q.shape
    page_size = kv_cache.shape[1]
    compute = np.float64 if q.dtype == np.float64 else np.float32
    result = np.empty((B, N, H, kv_lora_rank), q.dtype) if out is None else out
    result[...] = 0
    for b in range(B):
        prefix, count = int(prefix_lens[b]), int(tree.node_counts[b])
        rows = np.arange(prefix + count)
        keys = kv_cache[page_table[b, rows // page_size], rows % page_size].astype(compute)  # (rows, C + R)
        for i in range(count):
            words = tree.visibility_words[b, i]
            seen = [j for j in range(count) if words[j // 32] >> np.uint32(j % 32) & np.uint32(1)]
            visible = keys[[*range(prefix), *(prefix + j for j in seen)]]
            scores = compute(scale) * (q[b, i].astype(compute) @ visible.T)  # (H, visible rows)
            weights = np.exp(scores - scores.max(-1, keepdims=True))
            weights /= weights.sum(-1, keepdims=True)
            result[b, i] = weights @ visible[:, :kv_lora_rank]
    return result
