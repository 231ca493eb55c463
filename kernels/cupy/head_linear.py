"""A matrix a head, by the products of ``linear.cu``."""

from typing import Any

from ddtree.kernels.cupy.cublas import MOST_FEW, matmul
from ddtree.kernels.cupy.linear import multiply
from ddtree.kernels.cupy.program import contiguous, empty

__all__ = ["head_linear"]


def head_linear(x: Any, weight: Any, *, out: Any = None) -> Any:
    """Each head's rows of x (M, H, D) by its own matrix of (H, O, D). See :func:`ddtree.model.layers.head_linear`.

    Up to 128 rows a row's result has the same bits whatever else is in the batch; more are cuBLAS's, which must have
    been called once before a capture.
    """
    if out is not None and out.size and out.strides[2] != out.dtype.itemsize:
        raise ValueError(f"out must have neighbouring elements in its last axis, got strides {out.strides}")
    M, H, _ = x.shape
    if M <= MOST_FEW:
        return multiply("linear", x, weight, out=out)
    if x.strides[2] != x.dtype.itemsize:
        x = contiguous(x)
    y = empty((M, H, weight.shape[1]), x.dtype) if out is None else out
    matmul(x, contiguous(weight), y)
    return y
