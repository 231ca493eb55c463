"""How something is timed, on the host and on a GPU, and what the machine itself can do.

On a GPU a call is captured into a CUDA graph and the graph replayed, so that launching from Python is not part of the
time; what works on the host in between cannot be captured and is timed by the wall clock, from an idle GPU to an idle
GPU. *Warm* times are of calls back to back, on data that may still lie in the second-level cache; before a *cold* one,
256 MiB are written, which no GPU's cache holds.
"""

from __future__ import annotations

import contextlib
import importlib
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

__all__ = ["Ceilings", "DeviceTimer", "Times", "time_on_host"]

FLUSH_BYTES = 256 << 20
LONG_ENOUGH_US = 400.0
"""Calls are timed in groups of about this long."""


@dataclass
class Times:
    """Microseconds a call, one value a repeat.

    Attributes
    ----------
    warm, cold : list of float
        Back to back, and each after the cache was flushed; ``cold`` is empty on the host.
    how : str
        "graph", "events" or "wall clock".
    """

    warm: list[float]
    cold: list[float] = field(default_factory=list)
    how: str = "wall clock"


@dataclass(frozen=True)
class Ceilings:
    """What this GPU reached in this run.

    Attributes
    ----------
    copy_gb_per_s : float
        A copy of 1 GiB within its memory, bytes read and bytes written both counted.
    matmul_tflop_per_s : float
        A bfloat16 product of random 8,192 × 8,192 matrices by the vendor's library; NaN without torch.
    empty_launch_us : float
        A graph of one kernel that does nothing, launched and waited for by events.
    """

    copy_gb_per_s: float
    matmul_tflop_per_s: float
    empty_launch_us: float


def time_on_host(run: Callable[[], Any], repeats: int) -> Times:
    """Time calls by the wall clock, after two that are not timed."""
    run(), run()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        result = run()
        times.append((time.perf_counter() - start) * 1e6)
        del result  # giving memory back is not part of the call
    return Times(times)


class DeviceTimer:
    """Times calls on the current GPU, on a stream of its own that CuPy and torch both work on meanwhile."""

    def __init__(self) -> None:
        self.cupy = importlib.import_module("cupy")
        self.stream = self.cupy.cuda.Stream(non_blocking=True)
        self.trash = self.cupy.empty(FLUSH_BYTES, np.uint8)
        self.start, self.end = self.cupy.cuda.Event(), self.cupy.cuda.Event()

    def time(self, run: Callable[[], Any], repeats: int, *, library: str = "cupy", waits: bool = False) -> Times:
        """Time ``run``, a call of ``library`` ("cupy" or "torch"); ``waits`` says that it works on the host too."""
        with self._on_stream(library):
            run(), run()  # compiles, and fills the memory pools
            self.stream.synchronize()
            if waits:
                return self._by_the_clock(run, repeats)
            warm_calls, copies = self._group(run, library)
            warm = [self._elapsed(warm_calls) / copies for _ in range(repeats)]

            def flushed() -> Any:
                self._flush()
                return run()

            # Each with a flush alone beside it, since a GPU's clocks drift.
            cold_calls, copies = self._group(flushed, library)
            flushes = self._capture(self._flush, copies, "cupy")
            flushes()
            cold = [(self._elapsed(cold_calls) - self._elapsed(flushes)) / copies for _ in range(repeats)]
        return Times(warm, cold, "graph")

    def ceilings(self) -> Ceilings:
        """Measure what the GPU itself can do now."""
        copy_us = self._copy_us()
        nothing = self.cupy.RawKernel('extern "C" __global__ void nothing() {}', "nothing", backend="nvrtc")
        with self._on_stream("cupy"):
            nothing((1,), (32,), ())
            once = self._capture(lambda: nothing((1,), (32,), ()), 1, "cupy")
            launch_us = float(np.median([self._elapsed(once) for _ in range(101)]))
        matmul = float("nan")
        with contextlib.suppress(ImportError):
            torch = importlib.import_module("torch")
            a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
            torch.cuda.synchronize()
            us = float(np.median(self.time(lambda: a @ b, 15, library="torch").warm))
            matmul = 2 * 8192**3 / us / 1e6
        return Ceilings(2 * (1 << 30) / copy_us / 1e3, matmul, launch_us)

    def _copy_us(self) -> float:
        source, target = self.cupy.zeros(1 << 30, np.uint8), self.cupy.empty(1 << 30, np.uint8)

        def copy() -> None:  # by the driver: a kernel of ours would copy byte by byte
            target.data.copy_from_device_async(source.data, source.nbytes, self.cupy.cuda.get_current_stream())

        return float(np.median(self.time(copy, 15).warm))

    @contextlib.contextmanager
    def _on_stream(self, library: str) -> Any:
        with contextlib.ExitStack() as stack:
            stack.enter_context(self.stream)
            if library == "torch":
                torch = importlib.import_module("torch")
                stack.enter_context(torch.cuda.stream(torch.cuda.ExternalStream(self.stream.ptr)))
            yield

    def _flush(self) -> None:
        self.trash.fill(1)

    def _group(self, run: Callable[[], Any], library: str) -> tuple[Callable[[], Any], int]:
        """A graph of so many calls that the events' own half a microsecond does not show, and how many those are."""
        once = self._capture(run, 1, library)
        once()
        copies = max(1, min(64, int(LONG_ENOUGH_US / max(self._elapsed(once), 0.5))))
        group = self._capture(run, copies, library)
        for _ in range(3):
            group()
        return group, copies

    def _capture(self, run: Callable[[], Any], copies: int, library: str) -> Callable[[], Any]:
        if library == "torch":  # its allocator must know of the capture
            torch = importlib.import_module("torch")
            torch_graph = torch.cuda.CUDAGraph()
            self.stream.synchronize()
            with torch.cuda.graph(torch_graph, stream=torch.cuda.current_stream()):
                for _ in range(copies):
                    run()
            return torch_graph.replay  # type: ignore[no-any-return]
        self.stream.begin_capture()
        try:
            for _ in range(copies):
                run()
        finally:
            graph = self.stream.end_capture()
        return lambda: graph.launch(self.stream)

    def _elapsed(self, launch: Callable[[], Any]) -> float:
        self.start.record(self.stream)
        launch()
        self.end.record(self.stream)
        self.end.synchronize()
        return float(self.cupy.cuda.get_elapsed_time(self.start, self.end)) * 1e3

    def _by_the_clock(self, run: Callable[[], Any], repeats: int) -> Times:
        times = []
        for _ in range(repeats):
            self.stream.synchronize()
            start = time.perf_counter()
            run()
            self.stream.synchronize()
            times.append((time.perf_counter() - start) * 1e6)
        return Times(times)
