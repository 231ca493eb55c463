"""The routed experts of a mixture-of-experts layer (DeepSeekMoE, arXiv 2401.06066)."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ddtree.reference.swiglu import swiglu

__all__ = ["moe_experts"]


def moe_experts(
    x: NDArray[Any],
    expert_ids: NDArray[np.int32],
    weights: NDArray[Any],
    gate_up: NDArray[Any],
    down: NDArray[Any],
) -> NDArray[Any]:
    """Weighted sum of its experts' outputs for each row of x (M, D).

    ``expert_ids`` and ``weights`` are (M, K); ``gate_up`` (E, 2I, D) and ``down`` (E, D, I) are each expert's
    :func:`swiglu`.
    """
    result = np.zeros_like(x)
    for m in range(len(x)):
        for expert, weight in zip(expert_ids[m], weights[m], strict=True):
            result[m] += weight * swiglu(x[m : m + 1], gate_up[expert], down[expert])[0]
    return result
