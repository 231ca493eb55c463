"""How the kernels here are compiled and launched: on a GPU through CuPy's arrays and stream, or in the simulator.

Kernel modules take ``cuda`` from here, since numba-cuda may need a hand before its first import. On a GPU the arrays
are CuPy's, on the device and the stream that CuPy works on now; nothing is copied and nothing is waited for. In the
simulator they are NumPy's.
"""

import importlib
from typing import Any

import numpy as np

# numba-cuda 0.30 names numpy.row_stack at its first compilation. NumPy 2.5 removed that alias of vstack, and before,
# naming it warns.
if "row_stack" not in vars(np):
    np.row_stack = np.vstack  # noqa: NPY201

from numba import cuda
from numba.cuda.core import config

from ddtree.kernels.numba_cuda import simulator

__all__ = [
    "ALL",
    "LOADS",
    "SIMULATED",
    "STORES",
    "as_array",
    "blocks_for",
    "contiguous",
    "cuda",
    "empty",
    "kind_of",
    "launch",
    "raw",
    "threads",
]

SIMULATED = simulator.active()
if SIMULATED:
    simulator.install()

ALL = 0xFFFFFFFF
"""The mask of a whole warp."""


def threads(on_gpu: int, simulated: int = 64) -> int:
    """Threads a block: in the simulator few, but two warps, so that what only barriers can order is seen."""
    return simulated if SIMULATED else on_gpu


def blocks_for(count: int, block: int) -> int:
    """Blocks of ``block`` threads for ``count`` of them."""
    return -(-count // block)


def empty(shape: tuple[int, ...], dtype: Any) -> Any:
    """Return a new array with anything in it: in the simulator poison, so that an element never written shows."""
    if SIMULATED:
        return simulator.poisoned(shape, dtype)
    return importlib.import_module("cupy").empty(shape, dtype)


def as_array(array: Any, dtype: Any) -> Any:
    """Return ``array`` as the kernels take it: the same memory where type and layout are the contract's already."""
    if SIMULATED:
        return np.require(array, dtype, ["C", "A"])
    return importlib.import_module("cupy").ascontiguousarray(array, dtype)


def contiguous(array: Any) -> Any:
    """Return ``array`` in C order: the same memory where it is in that order already."""
    return as_array(array, array.dtype)


def kind_of(array: Any) -> str:
    """Return the name of a floating type, a key of ``LOADS`` and ``STORES``."""
    return str(array.dtype)


def raw(array: Any) -> Any:
    """Return ``array`` as kernels see it: numba knows no bfloat16, whose bits they get as uint16."""
    return array.view(np.uint16) if kind_of(array) == "bfloat16" else array


def launch(kernel: Any, blocks: int, block: int, *arguments: Any) -> None:
    """Run ``kernel`` on a grid of ``blocks`` times ``block`` threads; of no blocks at all, do nothing."""
    if blocks == 0:
        return
    if SIMULATED:
        kernel[blocks, block](*arguments)
        return
    stream = cuda.external_stream(importlib.import_module("cupy").cuda.get_current_stream().ptr)
    # numba-cuda warns where a grid is smaller than the GPU, as that of a small batch must be.
    warns, config.CUDA_LOW_OCCUPANCY_WARNINGS = config.CUDA_LOW_OCCUPANCY_WARNINGS, 0
    try:
        configured = kernel[blocks, block, stream]
    finally:
        config.CUDA_LOW_OCCUPANCY_WARNINGS = warns
    configured(*map(_on_device, arguments))


def _on_device(argument: Any) -> Any:
    """Return an argument as numba takes it; of an array, the same memory. CuPy's stream is ours: nobody need wait."""
    return cuda.as_cuda_array(argument, sync=False) if hasattr(argument, "__cuda_array_interface__") else argument


# How an element of each type is read, as the type that is calculated in, and written.


@cuda.jit(device=True)
def load_float32(x):  # type: ignore[no-untyped-def]
    """A float16 or float32 as float32."""
    return np.float32(x)


@cuda.jit(device=True)
def load_float64(x):  # type: ignore[no-untyped-def]
    """A float64."""
    return np.float64(x)


@cuda.jit(device=True)
def load_bfloat16(bits):  # type: ignore[no-untyped-def]
    """A bfloat16, the upper half of a float32, as float32."""
    return cuda.libdevice.int_as_float(np.int32(bits) << np.int32(16))


@cuda.jit(device=True)
def store_float16(x):  # type: ignore[no-untyped-def]
    """The nearest float16."""
    return np.float16(x)


@cuda.jit(device=True)
def store_bfloat16(x):  # type: ignore[no-untyped-def]
    """The bits of the nearest bfloat16, of two the even one."""
    bits = np.int64(cuda.libdevice.float_as_int(x)) & 0xFFFFFFFF
    if x != x:
        return np.uint16(0x7FC0)
    return np.uint16((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16)


LOADS = {"float16": load_float32, "bfloat16": load_bfloat16, "float32": load_float32, "float64": load_float64}
STORES = {"float16": store_float16, "bfloat16": store_bfloat16, "float32": load_float32, "float64": load_float64}
