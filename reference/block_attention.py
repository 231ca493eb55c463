"""Attention of a block drafter's rows: to the context of committed rows, and to one another."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ddtree.reference.rms_norm import rms_norm
from ddtree.reference.rope import rope_cos_sin, rotate_halves

__all__ = ["block_attention"]


def block_attention(
    projected: NDArray[Any],
    context_keys: NDArray[Any],
    context_values: NDArray[Any],
    lengths: NDArray[np.int32],
    query_norm: NDArray[Any],
    key_norm: NDArray[Any],
    frequencies: NDArray[np.float64],
    *,
    eps: float,
) -> NDArray[Any]:
    """Attend (B · T, H · E) over the last of ``lengths - 1`` committed rows and the whole block, in both directions.

    ``projected`` (B · T, 3 · H · E) has each row's queries, keys and values, before norm and rotation; row t of a block
    is at position ``lengths - 1 + t``. The context's keys (B, H, E, W) and values (B, H, W, E) are one layer of what
    :func:`append_context` writes.
    """
    B, H, E, W = context_keys.shape
    queries, keys, values = projected.reshape(B, -1, 3, H, E).transpose(2, 0, 3, 1, 4)  # (B, H, T, E) each
    T = queries.shape[2]
    result = np.empty((B, T, H, E), projected.dtype)
    for b in range(B):
        committed = max(int(lengths[b]) - 1, 0)
        seen = min(committed, W)
        cos, sin = (t.astype(projected.dtype) for t in rope_cos_sin(committed + np.arange(T), frequencies))
        for h in range(H):
            query = rotate_halves(rms_norm(queries[b, h], query_norm, eps=eps), cos, sin)
            key = rotate_halves(rms_norm(keys[b, h], key_norm, eps=eps), cos, sin)
            visible = np.concatenate([context_keys[b, h, :, :seen].T, key])
            scores = query @ visible.T * projected.dtype.type(E**-0.5)
            weights = np.exp(scores - scores.max(-1, keepdims=True))
            weights /= weights.sum(-1, keepdims=True)
            result[b, :, h] = weights @ np.concatenate([context_values[b, h, :seen], values[b, h]])
    return result.reshape(B * T, H * E)
