"""Products of many rows by cuBLAS, called through ctypes: CuPy's own calls refuse to be captured in a graph."""

import ctypes
import functools
import importlib
import threading
from typing import Any

import numpy as np

from ddtree.kernels.cupy.program import empty

__all__ = ["MOST_FEW", "matmul"]

MOST_FEW = 128
"""Rows up to which the kernels here multiply, whose results do not depend on what else is in the batch."""

WORKSPACE = 32 << 20
"""Bytes that a product may use besides: what NVIDIA recommends for Hopper."""

TRANSPOSED, PLAIN = 1, 0
DEFAULT_ALGORITHM = -1
TYPES = {"float16": 2, "bfloat16": 14, "float32": 0, "float64": 1}
COMPUTE_32F, COMPUTE_64F = 68, 70
_handles = threading.local()


def matmul(x: Any, weight: Any, y: Any, *, add: bool = False) -> None:
    """Write ``x Wᵀ`` of each head to y, or, with ``add``, add it before y is rounded.

    Parameters
    ----------
    x : array, float16, bfloat16, float32 or float64, shape (M, H, D)
        Rows and heads may lie apart; the last axis is contiguous.
    weight : array, the type of x, shape (H, O, D)
        In C order.
    y : array, the type of x, or float32, shape (M, H, O)
        Rows and heads may lie apart; the last axis is contiguous.
    add : bool
        Whether y has something in it to be added to.

    Raises
    ------
    RuntimeError
        cuBLAS is not there, or has refused.

    Notes
    -----
    Nothing waits for the GPU. A thread's first call makes cuBLAS's handle of the device, which a capture refuses. Its
    workspace is CuPy's memory, so that products on several streams do not meet in it.
    """
    (M, H, D), outputs = x.shape, weight.shape[1]
    if 0 in y.shape:
        return
    if D == 0:
        if not add:
            y[...] = 0
        return
    x, weight = (_with_leading_strides(a) for a in (x, weight))
    cupy: Any = importlib.import_module("cupy")
    library, handle = _library(), _handle()
    workspace = empty((WORKSPACE,), np.uint8)
    wide = x.dtype == np.float64
    one, beta = (np.array(n, np.float64 if wide else np.float32) for n in (1, add))
    # column by column, as cuBLAS sees it: y's rows are columns, and W's rows are to be transposed
    _check(library.cublasSetStream_v2(handle, ctypes.c_void_p(cupy.cuda.get_current_stream().ptr)), "cublasSetStream")
    _check(library.cublasSetWorkspace_v2(handle, ctypes.c_void_p(workspace.data.ptr), ctypes.c_size_t(WORKSPACE)))
    _check(
        library.cublasGemmStridedBatchedEx(
            *(handle, TRANSPOSED, PLAIN, outputs, M, D, ctypes.c_void_p(one.ctypes.data)),
            *_operand(weight, leading=1, batch=0),
            *_operand(x, leading=0, batch=1),
            ctypes.c_void_p(beta.ctypes.data),
            *_operand(y, leading=0, batch=1),
            *(H, COMPUTE_64F if wide else COMPUTE_32F, DEFAULT_ALGORITHM),
        )
    )


def _with_leading_strides(array: Any) -> Any:
    """The array itself where cuBLAS can read it: a step between rows of no less than a row."""
    size = array.dtype.itemsize
    readable = array.strides[2] == size and array.strides[0] % size == 0 and array.strides[1] % size == 0
    return array if readable else importlib.import_module("cupy").ascontiguousarray(array)


def _operand(array: Any, *, leading: int, batch: int) -> tuple[Any, ...]:
    """Address, type, elements from row to row and from head to head: axes ``leading`` and ``batch``."""
    size = array.dtype.itemsize
    step = max(array.strides[leading] // size, array.shape[2])  # of a single row, any
    return (
        ctypes.c_void_p(array.data.ptr),
        TYPES[str(array.dtype)],
        ctypes.c_int(step),
        ctypes.c_longlong(array.strides[batch] // size),
    )


@functools.cache
def _library() -> Any:
    """CuBLAS of the major version of CuPy's CUDA: from where the system looks, or else from its wheel."""
    name = f"libcublas.so.{importlib.import_module('cupy').cuda.runtime.runtimeGetVersion() // 1000}"
    try:
        return ctypes.CDLL(name)
    except OSError:
        pass
    try:
        return ctypes.CDLL(importlib.import_module("cuda.pathfinder").load_nvidia_dynamic_lib("cublas").abs_path)
    except (ImportError, OSError, RuntimeError) as error:
        raise RuntimeError(f"{name} cannot be loaded, which products of more than {MOST_FEW} rows need") from error


def _handle() -> Any:
    """The thread's handle of the current device."""
    device = importlib.import_module("cupy").cuda.runtime.getDevice()
    handles = _handles.__dict__
    key = f"of_{device}"
    if key not in handles:
        handle = ctypes.c_void_p()
        _check(_library().cublasCreate_v2(ctypes.byref(handle)), "cublasCreate")
        handles[key] = handle
    return handles[key]


def _check(status: int, what: str = "cublasGemmStridedBatchedEx") -> None:
    if status != 0:
        raise RuntimeError(f"{what} failed with status {status}")
