"""Launch of ``rms_norm.cu``."""

from typing import Any

import numpy as np

from ddtree.kernels.cupy.program import contiguous, empty, launch, suffix_of

__all__ = ["rms_norm"]

THREADS = 256


def rms_norm(x: Any, weight: Any, *, eps: float) -> Any:
    """Root-mean-square normalisation of rows of x (..., D). See :func:`ddtree.model.layers.rms_norm`.

    Rows of a matrix may lie apart: a part of the columns of a wider array is read where it is.
    """
    D, size = x.shape[-1], x.dtype.itemsize
    if x.ndim != 2 or x.strides[1] != size:
        x = contiguous(x)
    rows = x.size // D if D else 0
    stride = x.strides[0] // size if x.ndim == 2 and rows > 1 else D
    y = empty(x.shape, x.dtype)
    arrays = x, contiguous(weight, x.dtype), y
    launch(
        *("rms_norm", f"rms_norm_{suffix_of(x)}", rows, THREADS),
        *(*arrays, np.int32(D), np.int64(stride), np.float64(eps)),
    )
    return y
