"""The common array interface: what kind of array something is, and the same memory as another kind.

Nothing here imports CuPy, torch or JAX: a caller that passes such an array has imported them already. torch's arrays
and foreign ones (JAX's, and anything with ``__dlpack__``) become NumPy arrays where they lie on the CPU and CuPy arrays
where they lie on a GPU, without a copy, and results go back the same way. bfloat16 is ``ml_dtypes.bfloat16`` on NumPy
and CuPy arrays. For torch's arrays CuPy works on torch's current stream and in memory of torch's own allocator, so that
what is called is ordered as torch's own work is, and may be captured in a ``torch.cuda.graph``.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib
import os
import re
import sys
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any, Literal, NamedTuple

import numpy as np

__all__ = [
    "Device",
    "array_kind",
    "array_namespace",
    "current_stream",
    "device_of",
    "dtype_name",
    "export_array",
    "free_bytes",
    "import_array",
    "stream_of",
    "to_numpy",
    "torchs_handle",
    "torchs_stream",
    "use_stream_of",
    "wait_for",
]

ArrayKind = Literal["numpy", "cupy", "torch", "dlpack"]

_DLPACK_CPU = (1, 3)  # kDLCPU, kDLCUDAHost
_DLPACK_CUDA = (2, 13)  # kDLCUDA, kDLCUDAManaged

_ALIGNMENT = 128
"""Bytes that arrays in memory of torch's begin at a multiple of."""
_CHUNK = 8192
"""Bytes that one call's small results share: so many are few allocations."""


class Device(NamedTuple):
    """Where an array lies: ``("cpu", 0)`` or ``("cuda", number)``."""

    type: str
    number: int

    def __str__(self) -> str:
        return self.type if self.type == "cpu" else f"{self.type}:{self.number}"


def array_kind(array: Any) -> ArrayKind:
    """Return ``"numpy"``, ``"cupy"``, ``"torch"``, or ``"dlpack"`` for anything else with ``__dlpack__``.

    Raises
    ------
    TypeError
        It is none of these: a list, a number, None.
    """
    known = _KINDS.get(type(array))
    if known is not None:
        return known
    if isinstance(array, np.ndarray):
        return _remembered(array, "numpy")
    # A class from an array library can only be met once its library is loaded.
    for name, cls in (("cupy", "ndarray"), ("torch", "Tensor")):
        library = sys.modules.get(name)
        if library is not None and isinstance(array, getattr(library, cls, ())):
            return _remembered(array, name)  # type: ignore[arg-type]
    if hasattr(array, "__dlpack__") and hasattr(array, "__dlpack_device__") and not isinstance(array, np.generic):
        return "dlpack"
    got = type(array).__name__
    hint = "call this outside of jit and grad" if got.endswith("Tracer") else "pass numpy.asarray(...) of it"
    raise TypeError(f"must be a NumPy, CuPy or torch array, or anything with __dlpack__, got {got}; {hint}")


_KINDS: dict[type, ArrayKind] = {}
"""Of the classes met so far, where the class alone says it."""


def _remembered(array: Any, kind: ArrayKind) -> ArrayKind:
    _KINDS[type(array)] = kind
    return kind


def array_namespace(*arrays: Any) -> Any:
    """Return the module whose functions work on all of ``arrays``: numpy, cupy or torch.

    Raises
    ------
    TypeError
        The arrays are of different kinds, or of a kind without a namespace here.
    """
    kinds = {array_kind(a) for a in arrays}
    if len(kinds) != 1:
        raise TypeError(f"arrays must be of one kind, got {sorted(kinds)}")
    (kind,) = kinds
    if kind == "dlpack":
        raise TypeError("a DLPack array has no namespace here: pass it through import_array first")
    return sys.modules[kind]


def free_bytes(xp: Any) -> int:
    """What can still be allocated where the arrays of ``xp``, numpy or cupy, lie: on CuPy's current device."""
    if xp is np:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    pool = xp.get_default_memory_pool()
    free, limit = int(xp.cuda.Device().mem_info[0] + pool.free_bytes()), int(pool.get_limit())
    return min(free, limit - int(pool.used_bytes())) if limit else free


def device_of(array: Any) -> Device:
    """Return the device that ``array`` lies on."""
    kind = array_kind(array)
    if kind == "numpy":
        return _CPU
    if kind == "cupy":
        return Device("cuda", int(array.device.id))
    if kind == "torch":
        return _torch_device(array.device)
    try:
        code, index = array.__dlpack_device__()
    except (BufferError, RuntimeError, TypeError, ValueError) as error:
        raise TypeError(f"must be an array on one device, got {type(array).__name__}: {error}") from error
    if int(code) in _DLPACK_CPU:
        return _CPU
    return Device("cuda" if int(code) in _DLPACK_CUDA else f"dlpack-{int(code)}", int(index))


_CPU = Device("cpu", 0)


@functools.cache
def _torch_device(device: Any) -> Device:
    return Device(str(device.type), int(device.index or 0))


def current_stream(array: Any) -> int | None:
    """Return the CUDA stream, as an integer handle, on which ``array``'s library works now; None on the CPU."""
    device = device_of(array)
    if device.type != "cuda":
        return None
    if array_kind(array) == "torch":
        return torchs_handle(device.number)
    return int(_cupy().cuda.get_current_stream(device.number).ptr)


def torchs_handle(number: int) -> int:
    """What ``torch.cuda.current_stream(number).cuda_stream`` is, without the objects around it."""
    handle: int = sys.modules["torch"]._C._cuda_getCurrentRawStream(number)
    return handle


def _cupy() -> Any:
    loaded = sys.modules.get("cupy")
    if loaded is not None:
        return loaded
    try:
        return importlib.import_module("cupy")
    except ImportError as error:
        raise ImportError(
            f"arrays on a CUDA device are worked on through CuPy, which cannot be imported ({error}): "
            "pip install cupy-cuda13x (or cupy-cuda12x)"
        ) from error


def dtype_name(array: Any) -> str:
    """Return the name of ``array``'s type without its library: ``"float32"``, ``"bfloat16"``, ``"int64"``."""
    return _name_of(array.dtype)


@functools.cache
def _name_of(dtype: Any) -> str:
    return str(dtype).rpartition(".")[2]  # torch says "torch.float32"


def import_array(array: Any) -> Any:
    """Return the same memory as a NumPy array (CPU) or a CuPy array (CUDA), without a copy.

    Raises
    ------
    TypeError
        Not an array, or a tensor that autograd watches.
    ValueError
        A device that neither NumPy nor CuPy reaches.
    ImportError
        It lies on a GPU, and CuPy is not installed.
    """
    kind = array_kind(array)
    if kind == "numpy":
        if type(array) is np.ndarray:
            return array
        if isinstance(array, np.ma.MaskedArray):
            raise TypeError("must not be masked: these operations know no mask; pass array.filled(...)")
        return array.view(np.ndarray)  # a matrix or another subclass would index and reduce by rules of its own
    if kind == "cupy":
        return array
    device = device_of(array)
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"must lie on the CPU or on a CUDA device, got {device}; move it with .cpu()")
    bfloat16 = kind == "torch" and dtype_name(array) == "bfloat16"
    if kind == "dlpack" and device.type == "cpu" and hasattr(array, "__array__") and dtype_name(array) == "bfloat16":
        return np.asarray(array)  # NumPy's DLPack has no bfloat16, but JAX shares its memory this way as well
    if kind == "torch":
        if array.requires_grad:
            raise TypeError("must not require gradients: these operations have none; pass tensor.detach()")
        if array.is_neg() or array.is_conj():  # views whose memory says something else than they do
            raise TypeError("must not be a lazily negated or conjugated view; pass tensor.resolve_neg()")
        if _is_plain(array):
            return _as_cupy(array, device.number) if device.type == "cuda" else _as_numpy(array)
        # DLPack has no common bfloat16: its bits travel as int16.
        array = array.view(sys.modules["torch"].int16) if bfloat16 else array
    library = np if device.type == "cpu" else _cupy()
    try:
        native = library.from_dlpack(array)
    except (BufferError, RuntimeError, TypeError, ValueError) as error:
        raise TypeError(f"cannot be shared through DLPack with {library.__name__}: {error}") from error
    if not bfloat16:
        return native
    from ml_dtypes import bfloat16 as bfloat16_type

    return native.view(bfloat16_type)


def _is_plain(tensor: Any) -> bool:
    """Whether a tensor is memory with strides, of a type that NumPy has a name for, and nothing besides."""
    torch = sys.modules["torch"]
    plain = type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.layout is torch.strided
    return plain and _numpy_type(tensor.dtype) is not None


@functools.cache
def _numpy_type(dtype: Any) -> np.dtype[Any] | None:
    name = _name_of(dtype)
    if name == "bfloat16":
        import ml_dtypes

        bfloat16: np.dtype[Any] = np.dtype(ml_dtypes.bfloat16)
        return bfloat16
    return np.dtype(name) if re.fullmatch(r"bool|u?int\d+|float(16|32|64)", name) else None


def _as_numpy(tensor: Any) -> np.ndarray[Any, Any]:
    dtype = _numpy_type(tensor.dtype)
    if dtype is None or dtype.kind != "V":
        return tensor.numpy()  # type: ignore[no-any-return]
    return tensor.view(sys.modules["torch"].int16).numpy().view(dtype)  # type: ignore[no-any-return]


def _as_cupy(tensor: Any, number: int) -> Any:
    """A CUDA tensor's memory as a CuPy array. DLPack, beside this, makes two streams wait, which no capture takes."""
    cupy = _cupy()
    dtype, pointer = _numpy_type(tensor.dtype), tensor.data_ptr()
    memory = cupy.cuda.UnownedMemory(pointer, tensor.nbytes, tensor, number)
    strides = None if tensor.is_contiguous() else tuple(step * tensor.element_size() for step in tensor.stride())
    return cupy.ndarray(tuple(tensor.shape), dtype, cupy.cuda.MemoryPointer(memory, 0), strides)


def export_array(array: Any, like: Any) -> Any:
    """Return ``array`` (NumPy or CuPy) as the kind of array that ``like`` is, without a copy.

    A library of the array API standard, such as JAX, takes the memory in by its ``from_dlpack``, and may copy what is
    not aligned as it wants it. What it would turn into another type (float64, where JAX has that off) stays as it is,
    and so does everything for a library with no more than ``__dlpack__``.
    """
    kind = array_kind(like)
    if kind == "dlpack":
        return _as_foreign(array, like)
    if kind != "torch":
        return array
    torch = sys.modules["torch"]
    bfloat16 = dtype_name(array) == "bfloat16"
    shared = array.view(np.int16) if bfloat16 else array
    if isinstance(array, np.ndarray):
        tensor = torch.from_numpy(shared) if array.flags.writeable else torch.from_dlpack(shared)
    else:  # without CuPy's wait for streams: it works on torch's own, see use_stream_of
        tensor = torch.from_dlpack(shared.__dlpack__(stream=-1))
    return tensor.view(torch.bfloat16) if bfloat16 else tensor


def _as_foreign(array: Any, like: Any) -> Any:
    namespace: Any = like.__array_namespace__() if hasattr(like, "__array_namespace__") else None
    if not hasattr(namespace, "from_dlpack"):
        return array
    if dtype_name(array) == "bfloat16":  # no DLPack that is common to them has it
        return namespace.asarray(array)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it would turn it into another type
        foreign = namespace.from_dlpack(array)
    return foreign if dtype_name(foreign) == dtype_name(array) else array


def to_numpy(array: Any) -> np.ndarray[Any, Any]:
    """Return ``array`` as NumPy: the same memory if it is on the CPU, a copy (which waits for the GPU) if not."""
    if isinstance(array, np.ndarray):
        return array
    with use_stream_of(array):
        native = import_array(array)
        return native if isinstance(native, np.ndarray) else np.asarray(native.get())


def stream_of(array: Any) -> Any:
    """Return the CUDA stream on which ``array``'s library works now, as CuPy has it; None on the CPU."""
    handle = current_stream(array)
    return None if handle is None else _stream(handle, device_of(array).number)


def torchs_stream(number: int) -> Any:
    """Return the CUDA stream that torch works on now, on a device of that number, as CuPy has it."""
    return _stream(torchs_handle(number), number)


def wait_for(array: Any) -> None:
    """Wait for all work on the stream that ``array``'s library works on now; nothing on the CPU."""
    stream = stream_of(array)
    if stream is not None:
        stream.synchronize()


def use_stream_of(array: Any) -> AbstractContextManager[None]:
    """Make CuPy work on ``array``'s device and on the stream that its library works on now; nothing on the CPU.

    For torch's arrays CuPy also takes its memory from torch's allocator, which knows the stream and, in a capture, the
    graph that memory belongs to; and code may be loaded in a capture, which CUDA otherwise refuses.
    """
    device = device_of(array)
    if device.type != "cuda":
        return contextlib.nullcontext()
    if array_kind(array) != "torch":  # CuPy's own stream is the one it works on already
        return _cupy().cuda.Device(device.number)  # type: ignore[no-any-return]
    return _OnTorchsStream(device.number, current_stream(array) or 0)


class _OnTorchsStream:
    """CuPy on a device and stream of torch's, and in its memory. Written out: each operation enters it."""

    __slots__ = ("_contexts", "handle", "number")

    def __init__(self, number: int, handle: int) -> None:
        self.number, self.handle = number, handle

    def __enter__(self) -> None:
        cuda = _cupy().cuda
        contexts = [_stream(self.handle, self.number), cuda.using_allocator(_TorchMemory(self.number))]
        if cuda.runtime.getDevice() != self.number:
            contexts.insert(0, cuda.Device(self.number))
        if sys.modules["torch"].cuda.is_current_stream_capturing():
            contexts.append(_relaxed_capture())
        self._contexts: list[Any] = []
        try:
            for context in contexts:
                context.__enter__()
                self._contexts.append(context)
        except BaseException:
            self.__exit__(None, None, None)
            raise

    def __exit__(self, *error: Any) -> None:
        while self._contexts:
            self._contexts.pop().__exit__(None, None, None)


@functools.lru_cache(maxsize=64)
def _stream(handle: int, number: int) -> Any:
    """A CUDA stream of another library, as CuPy takes one in."""
    streams = _cupy().cuda
    if handle == 0:
        return streams.Stream.null
    make = getattr(streams.Stream, "from_external", None)
    return make(_ForeignStream(handle)) if make else streams.ExternalStream(handle, number)


class _ForeignStream(NamedTuple):
    handle: int

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self.handle  # version of the protocol, cudaStream_t


class _TorchMemory:
    """An allocator for CuPy that takes memory of torch's: small arrays side by side in one piece of it."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.chunk, self.used = None, _CHUNK

    def __call__(self, size: int) -> Any:
        size = -(-max(size, 1) // _ALIGNMENT) * _ALIGNMENT
        if size > _CHUNK // 2:
            return _cupy().cuda.MemoryPointer(self._taken(size), 0)
        if self.used + size > _CHUNK:
            self.chunk, self.used = self._taken(_CHUNK), 0
        begin, self.used = self.used, self.used + size
        return _cupy().cuda.MemoryPointer(self.chunk, begin)

    def _taken(self, size: int) -> Any:
        torch = sys.modules["torch"]
        tensor = torch.empty(size, dtype=torch.uint8, device=torch.device("cuda", self.number))
        return _cupy().cuda.UnownedMemory(tensor.data_ptr(), size, tensor, self.number)


@contextlib.contextmanager
def _relaxed_capture() -> Iterator[None]:
    """Let this thread load code while a stream captures: a kernel's first launch may be one that is captured."""
    mode = ctypes.c_int(2)  # CU_STREAM_CAPTURE_MODE_RELAXED
    exchange = ctypes.CDLL("nvcuda.dll" if os.name == "nt" else "libcuda.so.1").cuThreadExchangeStreamCaptureMode
    if exchange(ctypes.byref(mode)) != 0:
        raise RuntimeError("the CUDA driver does not let this thread load code while a stream captures")
    try:
        yield
    finally:
        exchange(ctypes.byref(mode))
