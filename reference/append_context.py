"""The keys and values of newly committed rows, into the contexts of a block drafter."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ddtree.reference.rms_norm import rms_norm
from ddtree.reference.rope import rope_cos_sin, rotate_halves

__all__ = ["append_context"]


def append_context(
    context_keys: NDArray[Any],
    context_values: NDArray[Any],
    projected: NDArray[Any],
    lengths: NDArray[np.int32],
    kept: NDArray[np.int32],
    key_norms: NDArray[Any],
    frequencies: NDArray[np.float64],
    *,
    eps: float,
) -> None:
    """Write the first ``kept`` of each request's rows behind its context, in place and in every layer.

    Keys are (layers, B, H, E, W) and values (layers, B, H, W, E): the row of position p is row ``p % W``, so that the
    last W stay. ``projected`` (B · J, layers · 2 · H · E) has keys, before norm and rotation, and values of each layer;
    a request's rows are the last of its ``lengths - 1`` committed ones. ``key_norms`` are (layers, E).
    """
    layers, B, H, E, W = context_keys.shape
    rows = projected.reshape(B, -1, layers, 2, H, E)
    for b in range(B):
        count = min(int(kept[b]), rows.shape[1])
        first = int(lengths[b]) - 1 - count
        for j in range(max(0, count - W, -first), count):
            cos, sin = (t.astype(projected.dtype) for t in rope_cos_sin(np.array(first + j), frequencies))
            for i in range(layers):
                for h in range(H):
                    key = rms_norm(rows[b, j, i, 0, h], key_norms[i], eps=eps)
                    context_keys[i, b, h, :, (first + j) % W] = rotate_halves(key, cos, sin)
                    context_values[i, b, h, (first + j) % W] = rows[b, j, i, 1, h]
