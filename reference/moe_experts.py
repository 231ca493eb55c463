"""The routed experts of a mixture-of-experts layer (DeepSeekMoE, arXiv 2401.06066)."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ddtree.reference.rms_norm import rms_norm
from ddtree.reference.swiglu import swiglu

__all__ = ["moe_experts"]


def moe_experts(
    x: NDArray[Any],
    expert_ids: NDArray[np.int32],
    weights: NDArray[Any],
    gate_up: NDArray[Any],
    down: NDArray[Any],
    *,
    gain: NDArray[Any] | None = None,
    eps: float = 0.0,
    residual: NDArray[Any] | None = None,
    shared: int = 0,
) -> NDArray[Any]:
    """Weighted sum of its experts' outputs for each row of x (M, D).

    ``expert_ids`` and ``weights`` are (M, K); ``gate_up`` (E, 2I, D) and ``down`` (E, D, I) are each expert's
    :func:`swiglu`. The last ``shared`` experts are every row's, with weight 1. A row of ids −1 has none at all.
    With a ``gain`` (D,), x is normalised by it first; ``residual`` (M, D) is added.
    """
    result = np.zeros_like(x) if residual is None else residual.copy()
    x = x if gain is None else rms_norm(x, gain, eps=eps)
    of_all = range(len(down) - shared, len(down))
    for m in range(len(x)):
        if expert_ids[m, 0] < 0:
            continue
        chosen = [*zip(expert_ids[m], weights[m], strict=True), *((expert, 1) for expert in of_all)]
        for expert, weight in chosen:
            result[m] += weight * swiglu(x[m : m + 1], gate_up[expert], down[expert])[0]
    return result
