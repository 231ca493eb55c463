"""Launch of ``linear.cu``."""

from typing import Any

import numpy as np

from ddtree.kernels.cupy.program import blocks_for, contiguous, empty, launch, suffix_of

__all__ = ["linear", "mma_bytes", "mma_rows", "multiply", "takes_mma"]

MMA_THREADS, STEP = 128, 64
"""Of a block, and columns that it reads at a time."""
FEW_ROWS, LEAST_STEPS = 4096, 4
DOT_THREADS, DOT_ROWS, DOT_TOKENS = 256, 4, 8
DOT_OUTPUTS = DOT_ROWS * DOT_THREADS // 32
"""Of a block."""


def linear(x: Any, weight: Any) -> Any:
    """``x Wᵀ`` of few rows x (M, D), by a weight (O, D), with sums in float32 (of float64, in float64).

    Rows of x may lie apart: a part of the columns of a wider array is read where it is. A row's result has the same
    bits whatever else is in the batch.
    """
    return multiply("linear", x, weight, len(weight))


def multiply(name: str, x: Any, weight: Any, outputs: int) -> Any:
    """Run a product of ``linear.cu``: ``linear``, or ``gated`` of twice ``outputs`` rows of W."""
    M, D = x.shape
    if M and D and x.strides[1] != x.dtype.itemsize:
        x = contiguous(x)
    weight = contiguous(weight)
    stride = x.strides[0] // x.dtype.itemsize if M > 1 else D
    y = empty((M, outputs), x.dtype)
    rows = 2 if name == "gated" else 1  # of W, an output
    if D > 0 and takes_mma(x, weight) and stride % 8 == 0:
        tokens = next((size for size in (8, 16, 32) if size >= M), 72)
        grid = blocks_for(M, tokens), blocks_for(outputs * rows, mma_rows(tokens))
        # A cluster of 8 where 4 would leave multiprocessors with little under way, if there are columns enough. The
        # number of tokens has no say, so that a row's sum has the same bits whatever else is in the batch.
        split = 8 if outputs * rows < FEW_ROWS and D >= 8 * LEAST_STEPS * STEP else 4
        grid = split * grid[0], grid[1]
        kernel, block, shared = f"{name}_{tokens}_by_{split}_{suffix_of(x)}", MMA_THREADS, mma_bytes(tokens)
    else:
        grid = blocks_for(M, DOT_TOKENS), blocks_for(outputs * rows, DOT_OUTPUTS)
        kernel, block, shared = f"{name}_{suffix_of(x)}", DOT_THREADS, 0
    sizes = (*(np.int32(n) for n in (M, D, outputs)), np.int64(stride))
    launch("linear", kernel, grid, block, x, weight, y, *sizes, shared=shared)
    return y


def takes_mma(*arrays: Any) -> bool:
    """Whether tensor cores take these arrays: f16 or bf16, in rows of whole chunks of 16 bytes at aligned addresses."""
    return all(a.dtype.itemsize == 2 and a.shape[-1] % 8 == 0 and a.data.ptr % 16 == 0 for a in arrays)


def mma_rows(tokens: int) -> int:
    """Rows of W that a block has beside a tile of ``tokens``."""
    return 128 if tokens > 32 else 64


def mma_bytes(tokens: int) -> int:
    """Shared memory of a block with a tile of ``tokens``: a ring of stages, each of 128 bytes a row of W and of x."""
    return (3 if tokens > 32 else 4) * (mma_rows(tokens) + tokens) * 128
