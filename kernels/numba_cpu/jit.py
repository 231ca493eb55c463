"""How the kernels here are compiled and spread over the cores."""

import contextlib
import os
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
from numba import config, njit, types
from numpy.typing import NDArray

if config.DISABLE_JIT:  # type: ignore[attr-defined]
    raise ImportError("numba's compiler is switched off by NUMBA_DISABLE_JIT: unset it, or pass backend='reference'")

__all__ = ["as_array", "compiled", "in_parallel", "inout", "native_floats", "readonly"]

PIECES_A_THREAD = 4
"""Pieces of work for each thread: enough that a thread whose core is busy elsewhere holds nobody up for long."""


def readonly(dtype: types.Type, ndim: int) -> types.Array:
    """Return the type of an input: C-contiguous, of NumPy arrays that may be written to or not."""
    return types.Array(dtype, ndim, "C", readonly=True)


def inout(dtype: types.Type, ndim: int) -> types.Array:
    """Return the type of an array that the kernel writes: C-contiguous."""
    return types.Array(dtype, ndim, "C")


def compiled(*signatures: Any, **options: Any) -> Callable[[Callable[..., Any]], Any]:
    """Compile a function now, for ``signatures`` and nothing else, or take it from numba's cache.

    Kernels run without the GIL. Fixed signatures keep a read-only or an int64 array from compiling a variant of its own
    in the middle of someone's measurement.
    """

    def decorate(function: Callable[..., Any]) -> Any:
        dispatcher = njit(nogil=True, error_model="numpy", **options)(function)
        # numba refuses to cache where neither the package's folder nor the user's cache folder can be written to.
        with contextlib.suppress(RuntimeError):
            dispatcher.enable_caching()
        for signature in signatures:
            dispatcher.compile(signature)
        dispatcher.disable_compile()
        return dispatcher

    return decorate


def as_array(array: Any, dtype: Any) -> NDArray[Any]:
    """Return ``array`` as the kernels take it: the same memory where type and layout are the contract's already."""
    return np.require(array, dtype, ["C", "A"])


def native_floats(array: NDArray[Any]) -> NDArray[Any]:
    """Return ``array`` in a type that processors calculate in: bfloat16 and float16 become float32, which is exact."""
    if array.dtype.name == "bfloat16":  # the upper half of a float32; astype would be several times slower
        return (array.view(np.uint16).astype(np.uint32) << np.uint32(16)).view(np.float32)
    return as_array(array, np.float64 if array.dtype == np.float64 else np.float32)


_pool: ThreadPoolExecutor | None = None


def _forget_pool() -> None:
    """Drop the threads of the parent process, which a fork does not carry over."""
    global _pool
    _pool = None


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_pool)


def in_parallel(kernel: Callable[..., Any], count: int, *arguments: Any, grain: int = 1) -> list[Any]:
    """Call ``kernel(*arguments, start, stop)`` on ranges that cover 0 … ``count``; results in the order of the ranges.

    Plain threads and kernels that release the GIL, rather than numba's parallel loops: those compile several times as
    long, and their always available scheduler may not be entered from two Python threads at once. The caller works
    too, and takes back what no thread has begun, so that it never waits for another caller's work.

    ``grain`` is the least length of a range that is worth a thread's attention. As many threads work as numba would
    use (``NUMBA_NUM_THREADS``).
    """
    global _pool
    threads = int(config.NUMBA_NUM_THREADS)  # type: ignore[attr-defined]
    pieces = max(1, min(threads * PIECES_A_THREAD, count // grain))
    if threads == 1 or pieces == 1:
        return [kernel(*arguments, 0, count)]
    cuts = [count * i // pieces for i in range(pieces + 1)]
    waiting = deque(range(pieces))
    results: list[Any] = [None] * pieces

    def work() -> None:
        while True:
            try:
                i = waiting.popleft()
            except IndexError:
                return
            results[i] = kernel(*arguments, cuts[i], cuts[i + 1])

    helpers: list[Future[None]] = []
    # Once the main thread has ended no thread can be started any more, and the caller does it all.
    with contextlib.suppress(RuntimeError):
        if _pool is None:
            _pool = ThreadPoolExecutor(threads, thread_name_prefix="ddtree-numba-cpu")
        for _ in range(min(threads, pieces) - 1):
            helpers.append(_pool.submit(work))  # noqa: PERF401 - those before a refusal count
    try:
        work()
    finally:
        begun = [helper for helper in helpers if not helper.cancel()]
        for helper in begun:
            helper.result()
    return results
