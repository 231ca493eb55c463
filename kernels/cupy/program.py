"""How the CUDA C++ here is compiled and launched: each program's file and options stand in one place.

A program is one ``.cu`` file with the headers (``.cuh``) that it includes. Its kernels have plain C names, and a kernel
that takes dynamic shared memory states the most that it takes by ``DDTREE_SHARED`` (see ``common.cuh``), which the
launcher and the compile gate of the tests both read. Nothing in this module needs CuPy until a kernel is launched.
"""

import ctypes
import functools
import importlib
import importlib.resources
import re
import struct
import sys
import threading
from typing import Any

import numpy as np

__all__ = [
    "ADDED_BY_CUPY",
    "EARLY",
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
ADDED_BY_CUPY = ("-ftz=true", "--device-as-default-execution-space")
"""What CuPy adds to them, and the compile gate too: float32 operations take subnormal numbers for 0, and no version of
NVRTC takes a generic lambda for a function of the host."""

PROGRAMS: dict[str, tuple[str, ...]] = {
    "accept_tree": (),
    "append_context": (),
    "block_attention": (),
    "build_tree": (),
    "choose_tokens": ("--fmad=false",),
    "commit_round": (),
    "compact_cache": (),
    "compact_layers": (),
    "copy_rows": (),
    "embed_tokens": (),
    "emitted_tokens": (),
    "guard_draft": (),
    "linear": (),
    "moe_experts": (),
    "ngram_draft": ("--fmad=false",),
    "oracle_draft": (),
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

EARLY = {"embed_tokens", "linear", "moe_experts", "rms_norm", "rope", "route_experts", "verify_attention"}
"""Programs that may be launched early, while the launch before still runs: all their blocks call ``wait_for_earlier``
(see ``common.cuh``) before they write, or read what that launch may have written."""

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
    program: str,
    name: str,
    grid: int | tuple[int, ...],
    block: int | tuple[int, ...],
    *arguments: Any,
    shared: int = 0,
    cluster: int = 0,
) -> None:
    """Run a kernel on CuPy's current stream; on an empty grid, do nothing.

    Scalars are NumPy's, of the parameter's type; arrays are CuPy's and C-contiguous. ``shared`` is the dynamic shared
    memory in bytes, at most what the source states; ``cluster`` the blocks of a cluster, of a kernel that is not
    compiled for some.
    """
    grid = (grid,) if isinstance(grid, int) else grid
    block = (block,) if isinstance(block, int) else block
    if 0 in grid:
        return
    _launch(kernel(program, name), grid, block, arguments, shared, early=program in EARLY, cluster=cluster)


class _Attribute(ctypes.Structure):
    """A ``CUlaunchAttribute``: an id, and 64 bytes for its value at the 8th."""

    _fields_ = (("id", ctypes.c_int), ("_", ctypes.c_int), ("value", ctypes.c_int * 16))


class _Configuration(ctypes.Structure):
    """A ``CUlaunchConfig``."""

    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("count", ctypes.c_uint),
    )


CLUSTER_DIMENSION, PROGRAMMATIC_STREAM_SERIALIZATION = 4, 6
MOST_ARGUMENTS = 64
FORMATS: dict[type, str] = {
    np.int32: "i4x",
    np.uint32: "I4x",
    np.int64: "q",
    np.uint64: "Q",
    np.float32: "f4x",
    np.float64: "d",
}
"""Of scalars as :mod:`struct` has them, 8 bytes each."""


class _Room(threading.local):
    """What a launch is described in, made once a thread: eight bytes an argument, and where each of them is."""

    def __init__(self) -> None:
        self.values = (ctypes.c_uint64 * MOST_ARGUMENTS)()
        first = ctypes.addressof(self.values)
        self.pointers = (ctypes.c_void_p * MOST_ARGUMENTS)(*(first + 8 * i for i in range(MOST_ARGUMENTS)))
        self.attributes = (_Attribute * 2)()
        self.launch = _Configuration(attributes=self.attributes)

    def attribute(self, kind: int, *value: int) -> None:
        """Add an attribute to the next launch."""
        attribute = self.attributes[self.launch.count]
        attribute.id, attribute.value[: len(value)] = kind, value
        self.launch.count += 1


_room = _Room()


def _launch(
    function: Any,
    grid: tuple[int, ...],
    block: tuple[int, ...],
    arguments: tuple[Any, ...],
    shared: int,
    *,
    early: bool,
    cluster: int = 0,
) -> None:
    """Run a kernel by the driver's call, which takes an ``early`` one, as CuPy's does not, and costs less time."""
    launch = _room.launch
    launch.grid[:], launch.block[:] = (*grid, 1, 1)[:3], (*block, 1, 1)[:3]
    launch.count = 0
    if early:
        _room.attribute(PROGRAMMATIC_STREAM_SERIALIZATION, 1)
    if cluster > 1:
        _room.attribute(CLUSTER_DIMENSION, cluster, 1, 1)
    launch.shared, launch.stream = shared, _cupy().cuda.get_current_stream().ptr
    values = [a if isinstance(a, np.generic) else a.data.ptr for a in arguments]
    _packer(tuple(map(type, values))).pack_into(_room.values, 0, *values)
    status = _driver().cuLaunchKernelEx(
        ctypes.byref(launch), ctypes.c_void_p(function.kernel.ptr), _room.pointers, None
    )
    if status != 0:
        raise RuntimeError(f"cuLaunchKernelEx failed with status {status}: grid {grid}, block {block}, shared {shared}")


@functools.cache
def _packer(types: tuple[type, ...]) -> struct.Struct:
    """What writes arguments of these types, pointers among them as integers, to where a launch reads them."""
    formats: dict[type, str] = {int: "Q", **FORMATS}
    return struct.Struct("=" + "".join(formats[t] for t in types))


@functools.cache
def _driver() -> Any:
    return ctypes.CDLL("libcuda.so.1")


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
    if array.flags.c_contiguous and (dtype is None or array.dtype == dtype):
        return array
    return _cupy().ascontiguousarray(array, dtype)


def suffix_of(array: Any) -> str:
    """What the names of kernels for arrays of this floating type end in: f16, bf16, f32 or f64."""
    return _suffix(array.dtype)


@functools.cache
def _suffix(dtype: Any) -> str:
    return SUFFIXES[str(dtype)]


def _cupy() -> Any:
    return sys.modules.get("cupy") or importlib.import_module("cupy")
