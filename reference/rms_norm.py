"""Root-mean-square normalisation (Zhang and Sennrich, arXiv 1910.07467)."""

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["rms_norm"]


def rms_norm(x: NDArray[Any], weight: NDArray[Any], *, eps: float) -> NDArray[Any]:
    """Divide each row of x (..., D) by its root mean square and multiply by ``weight`` (D,)."""
    rows = x.reshape(-1, x.shape[-1])
    result = np.empty_like(rows)
    for i, row in enumerate(rows):
        mean_square = sum(float(value) ** 2 for value in row) / len(row)
        result[i] = weight * (row / math.sqrt(mean_square + eps))
    return result.reshape(x.shape)
