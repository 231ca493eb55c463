"""Launch of ``block_attention.cu``."""

from typing import Any

import numpy as np

from ddtree.kernels.cupy.program import blocks_for, empty, launch, suffix_of

__all__ = ["MOST_ELEMENTS", "MOST_KEYS", "block_attention"]

QUERIES, PART = 8, 4
MOST_ELEMENTS, MOST_KEYS = 256, 4096
"""Elements a head, and those of a block's rows together."""


def block_attention(
    projected: Any,
    context_keys: Any,
    context_values: Any,
    lengths: Any,
    query_norm: Any,
    key_norm: Any,
    frequencies: Any,
    *,
    eps: float,
) -> Any:
    """Attention of blocks to their contexts and themselves. See :func:`ddtree.reference.block_attention`.

    Raises
    ------
    ValueError
        A head, or a block of them, is larger than fits.
    """
    B, H, E, W = context_keys.shape
    size = len(projected) // B
    if E > MOST_ELEMENTS or size * E > MOST_KEYS:
        raise ValueError(
            f"head_dim must be at most {MOST_ELEMENTS} and block_size · head_dim at most {MOST_KEYS} on a GPU, "
            f"got {E} and {size} · {E}"
        )
    double = projected.dtype.itemsize == 8
    threads, size_of = (256, 8) if double else (512, 4)
    parts = 8 if double else next(parts for parts in (2, 4, 8) if 32 * parts >= E)
    mixed = empty((B * size, H * E), projected.dtype)
    launch(
        *("block_attention", f"block_attention_{parts}_{suffix_of(projected)}"),
        *((blocks_for(size, QUERIES), H, B), threads),
        *(projected, context_keys, context_values, lengths, query_norm, key_norm, frequencies),
        *(np.float64(eps), np.float64(E**-0.5), *map(np.int32, (size, H, E, W)), mixed),
        shared=size_of * (2 * size * E + QUERIES * E + threads * PART),
    )
    return mixed
