"""Work on a GPU that is captured once and replayed, and copies that arrive on the host while it goes on."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["Readback", "captured"]


def captured(xp: Any, work: Callable[[], None]) -> Callable[[], None]:
    """Return a function that does ``work`` again on the current stream: for CuPy one launch of a CUDA graph.

    Parameters
    ----------
    xp : module
        numpy, where it is ``work`` itself, or cupy.
    work : callable
        Has run before, so that its kernels are loaded, and reads and writes the same arrays each time. It must not wait
        for the GPU. What it allocates comes from a pool of the graph's own, since a replay writes there whenever it
        runs: arrays that it leaves behind hold a replay's results until the next one.
    """
    if xp is np:
        return work
    pool, stream = xp.cuda.MemoryPool(), xp.cuda.Stream(non_blocking=True)
    with stream, xp.cuda.using_allocator(pool.malloc):
        stream.begin_capture()
        try:
            work()
        except BaseException:
            with contextlib.suppress(xp.cuda.runtime.CUDARuntimeError):
                stream.end_capture()  # which may say that the capture is void: the first error says why
            raise
        graph = stream.end_capture()
    graph.upload(xp.cuda.get_current_stream())

    def replay(pool: Any = pool) -> None:  # the pool lives as long as the graph
        graph.launch(xp.cuda.get_current_stream())

    return replay


class Readback:
    """Arrays on their way to the host: through pinned memory, behind what the current stream has to do."""

    def __init__(self, xp: Any, arrays: list[Any]) -> None:
        if xp is np:
            self._event, self._arrays = None, [array.copy() for array in arrays]
            return
        empty_pinned = importlib.import_module("cupyx").empty_pinned
        self._arrays = [empty_pinned(array.shape, array.dtype) for array in arrays]
        for array, host in zip(arrays, self._arrays, strict=True):
            array.get(out=host, blocking=False)
        self._event = xp.cuda.Event(disable_timing=True)
        self._event.record()

    def wait(self) -> list[NDArray[Any]]:
        """The arrays on the host, as soon as they are there."""
        if self._event is not None:
            self._event.synchronize()
        return self._arrays
