"""Arrays that the rounds work on, and the host sees by one copy."""

from __future__ import annotations

import contextlib
from contextlib import AbstractContextManager
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from ddtree.arrays import array_namespace

__all__ = ["DeviceMirror", "HostMirror", "Where", "looked_at", "mirror_size", "new_mirror"]

Where: TypeAlias = "NDArray[Any] | tuple[tuple[int, ...], np.dtype[Any], int]"
"""Of an array: itself, or its shape, type and first byte."""
ALIGNMENT = 256
"""Bytes that an array begins at a multiple of."""


def new_mirror(like: Any, size: int) -> HostMirror | DeviceMirror:
    """Return a mirror for arrays of ``like``'s kind, NumPy or CuPy, of ``size`` bytes."""
    return HostMirror() if array_namespace(like) is np else DeviceMirror(size)


def mirror_size(*arrays: tuple[tuple[int, ...], Any]) -> int:
    """Return the bytes that arrays of these shapes and types take in a mirror."""
    return sum(_rounded(int(np.prod(shape)) * np.dtype(dtype).itemsize) for shape, dtype in arrays)


def _rounded(size: int) -> int:
    return -(-max(size, 1) // ALIGNMENT) * ALIGNMENT


class HostMirror:
    """What :class:`DeviceMirror` is where arrays are on the host already: they are themselves."""

    used = 0

    def arrays(self, begin: int = 0) -> AbstractContextManager[Any]:
        """Nothing."""
        return contextlib.nullcontext()

    def on_host(self, array: NDArray[Any]) -> NDArray[Any]:
        """The array."""
        return array

    def send(self) -> None:
        """Nothing."""

    def fetch(self) -> None:
        """Nothing."""

    def where(self, array: NDArray[Any]) -> Where:
        """The array."""
        return array

    def taken(self) -> NDArray[np.uint8] | None:
        """Nothing."""
        return None


class DeviceMirror:
    """One piece of memory on the GPU, and pinned memory of its size on the host.

    CuPy's arrays that are made while :meth:`arrays` is open lie in it, one behind the other: those of the same calls at
    the same addresses each time, as a graph wants them. Copies are asynchronous, on CuPy's current stream.

    Parameters
    ----------
    size : int
        Bytes.

    Attributes
    ----------
    used : int
        Bytes that the arrays take so far.
    """

    def __init__(self, size: int) -> None:
        import cupy

        self._cuda = cupy.cuda
        self._device = cupy.cuda.alloc(size)
        self._pinned = cupy.cuda.alloc_pinned_memory(size)
        self._host = np.frombuffer(self._pinned, np.uint8, size)
        self.size, self.used = size, 0

    def __call__(self, size: int) -> Any:
        """Return memory for an array, as CuPy asks an allocator for it."""
        begin, self.used = self.used, self.used + _rounded(size)
        if self.used > self.size:
            raise RuntimeError(f"a mirror of {self.size} bytes must hold {self.used}")
        return self._device + begin

    def arrays(self, begin: int = 0) -> AbstractContextManager[Any]:
        """Have CuPy make its arrays here, from byte ``begin`` on, which earlier ones give up."""
        self.used = begin
        return self._cuda.using_allocator(self)  # type: ignore[no-any-return]

    def on_host(self, array: Any) -> NDArray[Any]:
        """The same array in the pinned memory."""
        return looked_at(self.where(array), self._host)

    def send(self) -> None:
        """Copy what is in the pinned memory to the device."""
        self._copy(self._device.ptr, self._pinned.ptr, self._cuda.runtime.memcpyHostToDevice)

    def fetch(self) -> None:
        """Copy what is on the device to the pinned memory."""
        self._copy(self._pinned.ptr, self._device.ptr, self._cuda.runtime.memcpyDeviceToHost)

    def where(self, array: Any) -> Where:
        """Return what :func:`looked_at` finds an array by, without the memory that it is in."""
        return array.shape, array.dtype, array.data.ptr - self._device.ptr

    def taken(self) -> NDArray[np.uint8]:
        """Return a copy of what was fetched last."""
        return self._host[: self.used].copy()

    def _copy(self, to: int, of: int, kind: int) -> None:
        self._cuda.runtime.memcpyAsync(to, of, self.used, kind, self._cuda.get_current_stream().ptr)


def looked_at(where: Where, data: NDArray[np.uint8] | None) -> NDArray[Any]:
    """Return an array that was fetched, in the bytes that ``taken`` returned."""
    if isinstance(where, np.ndarray):
        return where
    shape, dtype, begin = where
    return np.ndarray(shape, dtype, data, begin)
