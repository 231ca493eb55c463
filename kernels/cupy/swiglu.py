"""The gated feed-forward layer, by the two products of ``linear.cu``."""

from typing import Any

import numpy as np

from ddtree.kernels.cupy.cublas import MOST_FEW
from ddtree.kernels.cupy.linear import linear, multiply
from ddtree.kernels.cupy.program import blocks_for, empty, launch, suffix_of

__all__ = ["swiglu"]

PRODUCT_THREADS = 256


def swiglu(x: Any, gate_up: Any, down: Any, *, gain: Any = None, eps: float = 0.0, residual: Any = None) -> Any:
    """``down · (silu(gate · x) * (up · x))`` of rows x (M, D). See :func:`ddtree.model.layers.swiglu`.

    Of few rows, gate and up are multiplied, and silu taken, in one launch; what lies between the two products is (M, I)
    in x's type.
    """
    if len(x) > MOST_FEW:
        hidden = _silu_product(linear(x, gate_up, gain=gain, eps=eps))
    else:
        hidden = multiply("gated", x[:, None], gate_up[None], gain=gain, eps=eps)[:, 0]
    return linear(hidden, down, residual=residual)


def _silu_product(both: Any) -> Any:
    """``silu(gate) * up`` of (M, 2 I): gate's columns, then up's."""
    y = empty((len(both), both.shape[1] // 2), both.dtype)
    blocks = blocks_for(y.size, PRODUCT_THREADS)
    arguments = (both, y, np.int64(y.size), np.int32(y.shape[1]))
    launch("linear", f"silu_product_{suffix_of(y)}", blocks, PRODUCT_THREADS, *arguments)
    return y
