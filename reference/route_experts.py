"""A token's experts: sigmoid scores, bias-corrected, from the best groups alone (DeepSeek-V3, arXiv 2412.19437)."""

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["route_experts"]


def route_experts(
    logits: NDArray[Any],
    bias: NDArray[Any],
    *,
    num_experts_per_tok: int,
    n_group: int,
    topk_group: int,
    norm_topk_prob: bool,
    routed_scaling_factor: float,
    node_counts: NDArray[np.int32] | None = None,
) -> tuple[NDArray[np.int32], NDArray[Any]]:
    """Experts of each token, best first, and their weights: (M, K) each. Equal scores go to the lowest index.

    The bias chooses and does not weigh: weights come from the bare scores. A group counts by the sum of its best two.
    Where ``node_counts`` (B,) is given, tokens are B requests' slots, of each of which so many are in use; the others
    have the id −1 and the weight 0.
    """
    M, E = logits.shape
    size = E // n_group
    expert_ids = np.empty((M, num_experts_per_tok), np.int32)
    weights = np.empty((M, num_experts_per_tok), logits.dtype)
    for m in range(M):
        if node_counts is not None and m % (M // len(node_counts)) >= node_counts[m // (M // len(node_counts))]:
            expert_ids[m], weights[m] = -1, 0
            continue
        scores = [1 / (1 + math.exp(-z)) if z >= 0 else math.exp(z) / (1 + math.exp(z)) for z in logits[m].tolist()]
        corrected = [score + float(b) for score, b in zip(scores, bias, strict=True)]
        groups = [corrected[g * size : (g + 1) * size] for g in range(n_group)]
        group_scores = [sum(sorted(group)[-2:]) for group in groups]
        best_groups = sorted(range(n_group), key=lambda g: (-group_scores[g], g))[:topk_group]
        candidates = [e for e in range(E) if e // size in best_groups]
        chosen = sorted(candidates, key=lambda e: (-corrected[e], e))[:num_experts_per_tok]
        total = sum(scores[e] for e in chosen) + 1e-20 if norm_topk_prob else 1.0
        expert_ids[m] = chosen
        weights[m] = [scores[e] / total * routed_scaling_factor for e in chosen]
    return expert_ids, weights
