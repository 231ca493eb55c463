"""Products with weights: of whole rows, and of each head with a weight of its own."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ddtree.reference.rms_norm import rms_norm

__all__ = ["head_linear", "linear"]


def linear(
    x: NDArray[Any],
    weight: NDArray[Any],
    *,
    gain: NDArray[Any] | None = None,
    eps: float = 0.0,
    residual: NDArray[Any] | None = None,
    dtype: Any = None,
) -> NDArray[Any]:
    """``W · x`` of each row of x (M, D), for a ``weight`` (O, D); with a ``gain`` (D,), of the row normalised by it.

    ``residual`` (M, O) is added. The result is of x's type unless ``dtype`` says another.
    """
    result = np.empty((len(x), len(weight)), x.dtype if dtype is None else dtype)
    for i, row in enumerate(x if gain is None else rms_norm(x, gain, eps=eps)):
        result[i] = weight @ row if residual is None else residual[i] + weight @ row
    return result


def head_linear(x: NDArray[Any], weight: NDArray[Any], *, out: NDArray[Any] | None = None) -> NDArray[Any]:
    """``W_h · x_h`` of each row and head of x (M, H, D), for a ``weight`` (H, O, D): (M, H, O), in ``out`` if given."""
    result = np.empty((*x.shape[:2], weight.shape[1]), x.dtype) if out is None else out
    for h, matrix in enumerate(weight):
        for i, row in enumerate(x[:, h]):
            result[i, h] = matrix @ row
    return result
