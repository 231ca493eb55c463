"""Work on a GPU that is captured once and replayed, and copies from and to the host that run while it goes on."""

from __future__ import annotations

import contextlib
import functools
import importlib
import math
import weakref
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

__all__ = ["Inputs", "Readback", "Readbacks", "Repeated", "captured", "free_pools"]

_POOLS: deque[tuple[Any, Any]] = deque()
"""Memory pools of graphs that are gone, and their devices; arrays that were made in them may still be there."""
_CAPTURES: list[None] = []
"""One for each that is under way, in any thread: what lists do is done at once."""


def free_pools() -> None:
    """Give back the memory of graphs that are gone; what arrays still hold of it, when it is called after them.

    CuPy leaves the free blocks of a pool that goes away to nobody. That a graph is gone may turn out anywhere, in a
    collection of garbage, and to free memory waits for the GPU: hence the pools stay until this is called. While
    something is captured it does nothing.
    """
    kept = []
    try:
        while _POOLS and not _CAPTURES:
            try:
                kept.append(_POOLS.popleft())
            except IndexError:  # another thread was faster
                break
            pool, device = kept[-1]
            with device:
                pool.free_all_blocks()
                if not pool.total_bytes():
                    kept.pop()
    finally:
        _POOLS.extend(kept)


def captured(xp: Any, work: Callable[[], None]) -> Callable[..., None]:
    """Return a function that does ``work`` again: for CuPy one launch of a CUDA graph.

    It may be given the stream to launch on; left out, it is CuPy's current one.

    Parameters
    ----------
    xp : module
        numpy, where it is ``work`` itself, or cupy.
    work : callable
        Has run before, so that its kernels are loaded, and reads and writes the same arrays each time. It must not wait
        for the GPU. What it allocates comes from a pool of the graph's own, since a replay writes there whenever it
        runs: arrays that it leaves behind hold a replay's results until the next one. See :func:`free_pools`.
    """
    if xp is np:
        return lambda stream=None: work()
    free_pools()
    pool, stream = xp.cuda.MemoryPool(), xp.cuda.Stream(non_blocking=True)
    of_pool = pool, xp.cuda.Device()
    try:
        graph = _capture(xp, work, pool, stream)
        graph.upload(xp.cuda.get_current_stream())
    except BaseException:
        _POOLS.append(of_pool)
        raise

    replay = functools.partial(graph.launch)  # which costs less than a function of ours, and may be referred to weakly
    weakref.finalize(replay, _POOLS.append, of_pool).atexit = False
    return replay


def _capture(xp: Any, work: Callable[[], None], pool: Any, stream: Any) -> Any:
    with stream, xp.cuda.using_allocator(pool.malloc):
        _CAPTURES.append(None)
        try:
            stream.begin_capture()
            try:
                work()
            except BaseException:
                with contextlib.suppress(xp.cuda.runtime.CUDARuntimeError):
                    stream.end_capture()  # which may say that the capture is void: the first error says why
                raise
            return stream.end_capture()
        finally:
            _CAPTURES.pop()


class Repeated:
    """Work that is done as it is the first time, captured the second, and from then on replayed.

    Attributes
    ----------
    replay : callable or None
        What :func:`captured` returned, once it has.
    """

    def __init__(self, xp: Any) -> None:
        self.xp = xp
        self.replay: Callable[..., None] | None = None
        self._has_run = False

    def repeat(self, work: Callable[[], None], stream: Any = None) -> None:
        """Do ``work``, which is the same each time, on CuPy's current stream: ``stream`` is that one if it is given."""
        if self.replay is None and self._has_run:
            self.replay = captured(self.xp, work)
        if self.replay is None:
            work()
        else:
            self.replay(stream)
        self._has_run = True


ALIGNMENT = 256
"""Bytes that each of the arrays that are copied together begins at a multiple of."""


class _Room(NamedTuple):
    """Memory on the host that inputs are sent from."""

    data: NDArray[np.uint8]
    address: int
    arrays: dict[str, NDArray[Any]]
    sent: Any
    """Event behind the copy; None where arrays are on the host."""


class Inputs:
    """Arrays that the host writes and work reads, sent together by one copy, behind what the current stream has to do.

    Parameters
    ----------
    xp : module
        numpy or cupy.
    shapes : mapping of str to (shape, type)
        Of each array.

    Attributes
    ----------
    arrays : dict of str to array
        Where they are read, at the same addresses each time, as a graph wants them.
    """

    ROOMS = 2
    """The host writes into one while the other is being copied."""

    def __init__(self, xp: Any, shapes: Mapping[str, tuple[tuple[int, ...], Any]]) -> None:
        self._xp, self._shapes = xp, shapes
        sizes = [math.prod(shape) * np.dtype(dtype).itemsize for shape, dtype in shapes.values()]
        self._ends = np.cumsum([-(-size // ALIGNMENT) * ALIGNMENT for size in sizes]).tolist()
        self._data = xp.empty(self._ends[-1], np.uint8)
        self.arrays: dict[str, Any] = self._arrays_in(self._data)
        self._rooms = deque(self._room() for _ in range(self.ROOMS))

    def write(self) -> dict[str, NDArray[Any]]:
        """Return the arrays on the host, to be written in full: they hold anything, and no copy reads them any more."""
        room = self._rooms[0]
        if room.sent is not None:
            room.sent.synchronize()
        return room.arrays

    def send(self) -> None:
        """Send what was written, and have the next arrays written elsewhere."""
        room = self._rooms[0]
        if room.sent is None:
            self._data[...] = room.data
        else:
            _copy(self._xp, self._data.data.ptr, room.address, room.data.nbytes, "memcpyHostToDevice")
            room.sent.record()
        self._rooms.rotate(-1)

    def _room(self) -> _Room:
        data = _on_host(self._xp, (self._ends[-1],), np.uint8)
        return _Room(data, data.ctypes.data, self._arrays_in(data), _event(self._xp))

    def _arrays_in(self, data: Any) -> dict[str, Any]:
        arrays, begin = {}, 0
        for (name, (shape, dtype)), end in zip(self._shapes.items(), self._ends, strict=True):
            size = math.prod(shape) * np.dtype(dtype).itemsize
            arrays[name] = data[begin : begin + size].view(dtype).reshape(shape)
            begin = end
        return arrays


class Readbacks:
    """Copies to the host, through memory that is used again once they have been read."""

    def __init__(self, xp: Any) -> None:
        self._xp = xp
        self._free: dict[Any, list[Readback]] = {}

    def start(self, arrays: list[Any]) -> Readback:
        """Have ``arrays`` copied to the host, behind what the current stream has to do."""
        like = tuple([(array.shape, array.dtype) for array in arrays])
        free = self._free.setdefault(like, [])
        readback = free.pop() if free else Readback(self._xp, like, free)
        readback.start(arrays)
        return readback


class Readback:
    """Arrays on their way to the host: see :class:`Readbacks`."""

    def __init__(self, xp: Any, like: tuple[tuple[tuple[int, ...], Any], ...], free: list[Readback]) -> None:
        self._xp, self._event, self._free = xp, _event(xp), free
        self._hosts = [_on_host(xp, *of_one) for of_one in like]
        self._addresses = [host.ctypes.data for host in self._hosts]

    def start(self, arrays: list[Any]) -> None:
        """Begin the copies."""
        if self._event is None:
            for array, host in zip(arrays, self._hosts, strict=True):
                host[...] = array
            return
        for array, address in zip(arrays, self._addresses, strict=True):
            whole = self._xp.ascontiguousarray(array)
            _copy(self._xp, address, whole.data.ptr, whole.nbytes, "memcpyDeviceToHost")
        self._event.record()

    def wait(self) -> list[NDArray[Any]]:
        """The arrays on the host, the caller's own, as soon as they are there: once after each start."""
        if self._event is not None:
            self._event.synchronize()
        arrays = [host.copy() for host in self._hosts]
        self._free.append(self)
        return arrays


def _on_host(xp: Any, shape: tuple[int, ...], dtype: Any) -> NDArray[Any]:
    """Memory on the host that a GPU's copies take no detour to."""
    make = np.empty if xp is np else importlib.import_module("cupyx").empty_pinned
    array: NDArray[Any] = make(shape, dtype)
    return array


def _copy(xp: Any, to: int, of: int, size: int, kind: str) -> None:
    """Have bytes copied behind what the current stream has to do; an array's own method takes three times as long."""
    runtime = xp.cuda.runtime
    runtime.memcpyAsync(to, of, size, getattr(runtime, kind), xp.cuda.get_current_stream().ptr)


def _event(xp: Any) -> Any:
    return None if xp is np else xp.cuda.Event(disable_timing=True)
