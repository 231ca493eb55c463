"""Launches of ``moe_experts.cu``."""

from typing import Any

import numpy as np

from ddtree.kernels.cupy.linear import DOT_OUTPUTS, DOT_THREADS, DOT_TOKENS, MMA_THREADS, mma_bytes, mma_rows, takes_mma
from ddtree.kernels.cupy.program import blocks_for, contiguous, empty, launch, suffix_of

__all__ = ["moe_experts"]

PLAN_THREADS, COMBINE_THREADS = 1024, 256
MOST_EXPERTS = 4096


def moe_experts(x: Any, expert_ids: Any, weights: Any, gate_up: Any, down: Any) -> Any:
    """Weighted sum of its experts' outputs for each of few tokens. See :func:`ddtree.model.layers.moe_experts`.

    The same bits whatever else is in the batch. At most 4,096 experts.
    """
    (M, D), (E, _, inner), K = x.shape, down.shape, expert_ids.shape[1]
    if E > MOST_EXPERTS:
        raise ValueError(f"down must have at most {MOST_EXPERTS} experts, got {E}")
    x, gate_up, down = contiguous(x), contiguous(gate_up), contiguous(down)
    num_pairs = M * K
    if D > 0 and inner > 0 and takes_mma(x, gate_up, down):
        # a tile with room for the pairs that an expert has, on the average and somewhat more
        tile_tokens = 16 if num_pairs <= 10 * E else 48
        rows, block, shared = mma_rows(tile_tokens), MMA_THREADS, mma_bytes(tile_tokens)
        suffix = f"{tile_tokens}_{suffix_of(x)}"
    else:
        tile_tokens, rows, block, shared, suffix = DOT_TOKENS, DOT_OUTPUTS, DOT_THREADS, 0, suffix_of(x)
    # each expert that works may have one tile that is not full
    num_tiles = min(num_pairs, min(E, num_pairs) + num_pairs // tile_tokens)
    pairs, tiles = empty((num_pairs,), np.int32), empty((num_tiles, 3), np.int32)
    hidden = empty((num_pairs, inner), x.dtype)
    outputs = empty((num_pairs, D), np.float64 if x.dtype == np.float64 else np.float32)
    y = empty((M, D), x.dtype)

    sizes = (np.int32(n) for n in (num_pairs, E, tile_tokens, num_tiles))
    launch("moe_experts", "plan", 1, PLAN_THREADS, contiguous(expert_ids, np.int32), pairs, tiles, *sizes)
    launch(
        *("moe_experts", f"gated_{suffix}", (num_tiles, blocks_for(2 * inner, rows)), block),
        *(x, gate_up, pairs, tiles, hidden, np.int32(K), np.int32(D), np.int32(inner)),
        shared=shared,
    )
    launch(
        *("moe_experts", f"down_{suffix}", (num_tiles, blocks_for(D, rows)), block),
        *(hidden, down, pairs, tiles, outputs, np.int32(D), np.int32(inner)),
        shared=shared,
    )
    launch(
        *("moe_experts", f"combine_{suffix_of(x)}", (M, blocks_for(D, COMBINE_THREADS)), COMBINE_THREADS),
        *(outputs, contiguous(weights, x.dtype), y, np.int32(K), np.int32(D)),
    )
    return y
