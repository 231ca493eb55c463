"""Launches of ``moe_experts.cu``."""

from typing import Any

import numpy as np

from ddtree.kernels.cupy.linear import LONG, form_of, sum_type
from ddtree.kernels.cupy.program import blocks_for, contiguous, empty, launch, suffix_of

__all__ = ["moe_experts"]

COMBINE_THREADS = 256
FEW = 4
"""Pairs of an expert, on the average, up to which it is worth having tiles of few tokens."""
ONE_TOKEN, FEW_TOKENS, FMA_TILE = (1, 8), (4, 8), (4, 4)
"""Tokens of a tile, and rows of a matrix, where tensor cores do not multiply: of float32, and of other types."""


def moe_experts(
    x: Any,
    expert_ids: Any,
    weights: Any,
    gate_up: Any,
    down: Any,
    *,
    shared: int = 0,
    gain: Any = None,
    eps: float = 0.0,
    residual: Any = None,
) -> Any:
    """Weighted sum of its experts' outputs for each token. See :func:`ddtree.model.layers.moe_experts`.

    The same bits whatever else is in the batch, and however many tokens there are.
    """
    (M, D), (E, _, inner), K = x.shape, down.shape, expert_ids.shape[1]
    gate_up, down, expert_ids = contiguous(gate_up), contiguous(down), contiguous(expert_ids, np.int32)
    wide = sum_type(x.dtype)
    pairs, routed = M * (K + shared), E - shared
    hidden, outputs, y = empty((pairs, inner), x.dtype), empty((pairs, D), wide), empty((M, D), x.dtype)
    sizes = [np.int32(n) for n in (M, K, routed, shared, D, inner)]

    def multiply(kind: str, source: Any, matrices: Any, rows: int, result: Any, *, normed: bool) -> None:
        form = form_of(source, matrices, long=D * inner >= LONG)
        source = form.taken(source)
        tile = form.tile(min(M, 8) if FEW * routed >= M * K else M) if form.by_mma else FMA_TILE
        if form.suffix == "f32" and not form.any:
            tile = ONE_TOKEN if M == 1 else FEW_TOKENS
        grid = min(M * K, routed) + shared * blocks_for(M, tile[0]), blocks_for(rows, tile[1])
        norm = (form.gain(gain, x.dtype), result, np.float64(eps)) if normed else (result,)
        launch(
            *("moe_experts", form.name(kind, tile), grid, form.threads),
            *(expert_ids, source, matrices, *norm, *sizes),
            shared=form.shared(tile),
        )

    multiply("gated", contiguous(x), gate_up, 2 * inner, hidden, normed=True)
    multiply("down", hidden, down, D, outputs, normed=False)
    launch(
        *("moe_experts", f"combine_{suffix_of(x)}", (M, blocks_for(D, COMBINE_THREADS)), COMBINE_THREADS),
        *(expert_ids, outputs, contiguous(weights, wide)),
        np.uintp(0) if residual is None else contiguous(residual, x.dtype),
        *(y, *sizes[:-1]),
    )
    return y
