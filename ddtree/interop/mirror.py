"""Arrays that the rounds work on, and the host sees by one copy."""

from __future__ import annotations

import struct
from contextlib import AbstractContextManager
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from ddtree.engine.graphs import ALIGNMENT
from ddtree.kernels.cupy.copy_rows import copy_rows

__all__ = ["Mirror", "Where", "looked_at", "mirror_size"]

Where: TypeAlias = "tuple[tuple[int, ...], np.dtype[Any], int]"
"""An array's shape, type and first byte."""
WORD = 16
"""Bytes that are copied at a time."""
SLOT = struct.Struct("=2q")
"""An address and a number of words, as ``copy_rows`` reads them."""


def mirror_size(*arrays: tuple[tuple[int, ...], Any]) -> int:
    """Return the bytes that arrays of these shapes and types take in a mirror."""
    return sum(_rounded(int(np.prod(shape)) * np.dtype(dtype).itemsize) for shape, dtype in arrays)


def _rounded(size: int) -> int:
    return -(-max(size, 1) // ALIGNMENT) * ALIGNMENT


class Mirror:
    """One piece of memory on the GPU, and pinned memory of its size on the host.

    CuPy's arrays that are made while :meth:`arrays` is open lie in it, one behind the other: those of the same calls at
    the same addresses each time, as a graph wants them. Copies are kernels on CuPy's current stream, which reach the
    pinned memory themselves: a graph of kernels alone is launched in less time than one with copies among them.

    Parameters
    ----------
    size : int
        Bytes.

    Attributes
    ----------
    host : memoryview
        The bytes on the host.
    used : int
        Bytes that the arrays take so far.
    """

    def __init__(self, size: int) -> None:
        import cupy

        self._cupy = cupy
        self.size, self.used = _rounded(size), 0
        self._device = cupy.cuda.alloc(self.size)
        self._pinned = cupy.cuda.alloc_pinned_memory(self.size + 2 * ALIGNMENT)  # behind them, what copies are told
        everything = np.frombuffer(self._pinned, np.uint8, self.size + 2 * ALIGNMENT).data
        self.host, self._slots = everything[: self.size], everything[self.size :]

    def __call__(self, size: int) -> Any:
        """Return memory for an array, as CuPy asks an allocator for it."""
        begin, self.used = self.used, self.used + _rounded(size)
        if self.used > self.size:
            raise RuntimeError(f"a mirror of {self.size} bytes must hold {self.used}")
        return self._device + begin

    def arrays(self, begin: int = 0) -> AbstractContextManager[Any]:
        """Have CuPy make its arrays here, from byte ``begin`` on, which earlier ones give up."""
        self.used = begin
        return self._cupy.cuda.using_allocator(self)  # type: ignore[no-any-return]

    def on_host(self, array: Any) -> NDArray[Any]:
        """The same array in the pinned memory."""
        return looked_at(self.where(array), self.host)

    def unsent(self, array: Any) -> Any:
        """The same array in the pinned memory, as the GPU reads it there."""
        shape, dtype, begin = self.where(array)
        return self._in_pinned(begin, shape, dtype)

    def send(self) -> None:
        """Copy what is in the pinned memory to the device."""
        self._copy(0, self._cupy.ndarray((1, self.used), np.uint8, self._device), self._pinned.ptr)

    def fetch(self) -> None:
        """Copy what is on the device to the pinned memory."""
        self._copy(1, self._in_pinned(0, (1, self.used), np.uint8), self._device.ptr)

    def where(self, array: Any) -> Where:
        """Return what :func:`looked_at` finds an array by, without the memory that it is in."""
        return array.shape, array.dtype, array.data.ptr - self._device.ptr

    def _copy(self, number: int, to: Any, address: int) -> None:
        SLOT.pack_into(self._slots, number * ALIGNMENT, address, self.used // WORD)
        copy_rows(self._in_pinned(self.size + number * ALIGNMENT, (2,), np.int64), to, word=WORD)

    def _in_pinned(self, begin: int, shape: tuple[int, ...], dtype: Any) -> Any:
        cuda, size = self._cupy.cuda, int(np.prod(shape)) * np.dtype(dtype).itemsize
        memory = cuda.UnownedMemory(self._pinned.ptr + begin, size, self._pinned, self._device.device_id)
        return self._cupy.ndarray(shape, dtype, cuda.MemoryPointer(memory, 0))


def looked_at(where: Where, data: memoryview | bytearray) -> NDArray[Any]:
    """Return an array that was fetched, in the mirror's bytes or a copy of them."""
    shape, dtype, begin = where
    return np.ndarray(shape, dtype, data, begin)
