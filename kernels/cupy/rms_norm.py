"""Launch of ``rms_norm.cu``."""

from typing import Any

import numpy as np

from ddtree.kernels.cupy.program import contiguous, empty, launch, suffix_of

__all__ = ["rms_norm"]

THREADS, MOST_CHUNKS = 256, 4


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
    weight = contiguous(weight, x.dtype)
    in_chunks = (
        size < 8
        and D * size <= 16 * THREADS * MOST_CHUNKS
        and all(n % 16 == 0 for n in (D * size, stride * size, x.data.ptr, weight.data.ptr))
    )
    launch(
        *("rms_norm", f"{'' if in_chunks else 'any_'}rms_norm_{suffix_of(x)}", rows, THREADS),
        *(x, weight, y, np.int32(D), np.int64(stride), np.float64(eps)),
    )
    return y
