"""How the CUDA C++ here is compiled and launched: each program's file and options stand in one place.

A program is one ``.cu`` file with the headers (``.cuh``) that it includes. Its kernels have plain C names, and a kernel
that takes dynamic shared memory states the most that it takes by ``DDTREE_SHARED`` (see ``common.cuh``), which the
launcher and the compile gate of the tests both read. Nothing in this module needs CuPy until a kernel is launched.
"""

import functools
import importlib
import importlib.resources
import re
import sys
from typing import Any

import numpy as np

__all__ = [
    "ADDED_BY_CUPY",
    "OPTIONS",
    "PROGRAMS",
    "blocks_for",
    "contiguous",
    "empty",
    "kernel",
    "launch",
    "multiprocessors",
    "program_source",
    "suffix_of",
]

OPTIONS = ("-std=c++17",)
"""Of every program."""
ADDED_BY_CUPY = ("-ftz=true",)
"""What CuPy adds to them, and the compile gate too: float32 operations take subnormal numbers for 0."""

PROGRAMS: dict[str, tuple[str, ...]] = {
    "accept_tree": (),
    "build_tree": (),
    "choose_tokens": ("--fmad=false",),
    "compact_cache": (),
    "compact_layers": (),
    "copy_rows": (),
    "emitted_tokens": (),
    "find_draft_fault": (),
    "linear": (),
    "moe_experts": (),
    "rms_norm": (),
    "rope": (),
    "route_experts": (),
    "topk_log_probs": (),
    "tree_inputs": (),
    "tree_mask": (),
    "tree_positions": (),
    "verify_attention": (),
    "visibility_words": (),
}
"""Every program, which is the name of its file, and its own options."""

SUFFIXES = {"float16": "f16", "bfloat16": "bf16", "float32": "f32", "float64": "f64"}


@functools.cache
def program_source(name: str) -> str:
    """The text of a program with its headers in place, so that a compiler's cache sees a change in one of them."""
    return _with_headers(f"{name}.cu", set())


def _with_headers(file: str, included: set[str]) -> str:
    included.add(file)
    text = (importlib.resources.files(__package__) / file).read_text(encoding="utf-8")
    lines = [f'#line 1 "{file}"']
    for number, line in enumerate(text.splitlines(), 1):
        header = re.fullmatch(r'#include "(\w+\.cuh)"', line)
        if header is None:
            lines.append(line)
        elif header[1] not in included:
            lines += [_with_headers(header[1], included), f'#line {number + 1} "{file}"']
    return "\n".join(lines) + "\n"


def kernel(program: str, name: str) -> Any:
    """Return the kernel ``name`` of a program for the current device, compiled at its first use there."""
    return _kernel(program, name, _cupy().cuda.runtime.getDevice())


@functools.cache
def _module(program: str, device: int) -> Any:
    options = (*OPTIONS, *PROGRAMS[program])
    return _cupy().RawModule(code=program_source(program), options=options, backend="nvrtc")


@functools.cache
def _kernel(program: str, name: str, device: int) -> Any:
    module = _module(program, device)
    function = module.get_function(name)
    if f"DDTREE_SHARED({name}," in program_source(program):
        function.max_dynamic_shared_size_bytes = _stated_shared(module, name)
    return function


def _stated_shared(module: Any, name: str) -> int:
    """Read what a source states by ``DDTREE_SHARED``, once a kernel and device.

    The read is on a stream of its own: it waits for nothing but itself, and disturbs no capture of the current stream.
    """
    runtime = _cupy().cuda.runtime
    stated = np.empty((), np.uint32)
    with _cupy().cuda.Stream(non_blocking=True) as stream:
        constant = module.get_global(f"ddtree_shared_{name}").ptr
        runtime.memcpyAsync(stated.ctypes.data, constant, stated.nbytes, runtime.memcpyDeviceToHost, stream.ptr)
        stream.synchronize()
    return int(stated)


def launch(
    program: str, name: str, grid: int | tuple[int, ...], block: int | tuple[int, ...], *arguments: Any, shared: int = 0
) -> None:
    """Run a kernel on CuPy's current stream; on an empty grid, do nothing.

    Scalars are NumPy's, of the parameter's type; arrays are CuPy's and C-contiguous. ``shared`` is the dynamic shared
    memory in bytes, at most what the source states.
    """
    grid = (grid,) if isinstance(grid, int) else grid
    block = (block,) if isinstance(block, int) else block
    if 0 not in grid:
        kernel(program, name)(grid, block, arguments, shared_mem=shared)


def blocks_for(count: int, block: int) -> int:
    """Blocks of ``block`` threads for ``count`` of them."""
    return -(-count // block)


def multiprocessors() -> int:
    """Multiprocessors of the current device."""
    return _multiprocessors(_cupy().cuda.runtime.getDevice())


@functools.cache
def _multiprocessors(device: int) -> int:
    return int(_cupy().cuda.Device(device).attributes["MultiProcessorCount"])


def empty(shape: tuple[int, ...], dtype: Any) -> Any:
    """Return a new array on the current device with anything in it."""
    return _cupy().ndarray(shape, dtype)


def contiguous(array: Any, dtype: Any = None) -> Any:
    """Return ``array`` in C order and of ``dtype``: the same memory where it is so already."""
    return _cupy().ascontiguousarray(array, dtype)


def suffix_of(array: Any) -> str:
    """What the names of kernels for arrays of this floating type end in: f16, bf16, f32 or f64."""
    return SUFFIXES[str(array.dtype)]


def _cupy() -> Any:
    return sys.modules.get("cupy") or importlib.import_module("cupy")
