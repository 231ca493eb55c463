"""Launch of ``route_experts.cu``."""

from typing import Any

import numpy as np

from ddtree.kernels.cupy.program import contiguous, empty, launch, suffix_of

__all__ = ["route_experts"]

THREADS = 128
MOST_EXPERTS = 4096


def route_experts(
    logits: Any,
    bias: Any,
    *,
    num_experts_per_tok: int,
    n_group: int,
    topk_group: int,
    norm_topk_prob: bool,
    routed_scaling_factor: float,
    node_counts: Any = None,
) -> tuple[Any, Any]:
    """Experts of each token, best first, and their weights. See :func:`ddtree.model.layers.route_experts`.

    Scores are float64, of float32 or float64 logits. At most 4,096 experts.
    """
    M, E = logits.shape
    K = num_experts_per_tok
    if E > MOST_EXPERTS:
        raise ValueError(f"logits must have at most {MOST_EXPERTS} columns, got {E}")
    if logits.dtype.itemsize < 4:
        raise TypeError(
            f"logits must be float32 or float64, got {logits.dtype}: take them by linear(..., dtype='float32')"
        )
    rows = 1 if node_counts is None else M // max(len(node_counts), 1)
    expert_ids, weights = empty((M, K), np.int32), empty((M, K), logits.dtype)
    launch(
        *("route_experts", f"route_experts_{suffix_of(logits)}", M, THREADS),
        *(contiguous(logits), contiguous(bias, logits.dtype), expert_ids, weights),
        np.uintp(0) if node_counts is None else contiguous(node_counts, np.int32),
        *(np.int32(n) for n in (rows, E, K, n_group, topk_group, norm_topk_prob)),
        np.float64(routed_scaling_factor),
        shared=(2 * E + n_group) * 8,
    )
    return expert_ids, weights
