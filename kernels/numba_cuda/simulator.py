"""numba.cuda's simulator, rescheduled: it runs kernels on the CPU, and names what a GPU would do wrong in silence.

``NUMBA_ENABLE_CUDASIM=1`` in the environment, set before numba is imported, turns numba-cuda's simulator on; the first
kernel of :mod:`ddtree.kernels.numba_cuda` that is imported then puts this scheduler in place. A process has either the
simulator or the compiler. Of the simulator, an operating-system thread for each CUDA thread and a polling loop go:

* Each CUDA thread is a greenlet. It runs until it waits, and the next one runs, in a chosen order: forward, reverse, or
  shuffled anew at each wait (:func:`schedule`). A barrier costs about a microsecond a thread.
* All threads of a block must meet at the same barrier. Exited threads, two different barriers, and threads that wait
  for one another are errors that list who waits where.
* Warp operations are there. The lanes that a mask names must all arrive at the same operation with the same mask, the
  caller must be one of them, and so must the lane that a shuffle reads from.
* Shared and local memory begins as poison (NaN, 0x5A…), and reading a shared element before anything was written to it
  is an error.
* Races are found in any order: of two accesses to one element, one of them a write, either both are atomic, or a
  barrier or a syncwarp of both threads stands between them (shuffles and votes order no memory). Shared memory is
  watched, and so is every writable array that a kernel gets.
* Indices below zero or behind the end, and more threads, blocks or shared memory than an architecture has, are errors.

Kernels call ``cuda.…`` by that name, as in numba-cuda's own simulator. Not simulated: several blocks that wait for each
other, streams, and the rounding of fused multiply-adds.
"""

from __future__ import annotations

import contextlib
import contextvars
import dis
import random
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import numpy as np

__all__ = [
    "ARCHITECTURES",
    "ORDERS",
    "Limits",
    "SimulatorError",
    "active",
    "install",
    "order_of",
    "poisoned",
    "schedule",
]

ORDERS = ("forward", "reverse", "shuffle")
"""Orders in which the threads of a block take turns."""

VERSIONS = ((0, 30), (0, 31))
"""Versions of numba-cuda whose simulator has the parts that this module replaces: from the first, below the second."""

ALL_LANES = 0xFFFFFFFF


class SimulatorError(RuntimeError):
    """A kernel did what a GPU would hang on, or might give any result for. The message says which thread, and where."""


class Limits(NamedTuple):
    """What a block may use."""

    shared_bytes: int  # static and dynamic together, with the opt-in
    static_bytes: int = 49_152
    threads: int = 1024
    grid: tuple[int, int, int] = (2**31 - 1, 65_535, 65_535)


ARCHITECTURES = {"sm_90": Limits(232_448), "sm_120": Limits(101_376)}


@dataclass
class _Options:
    order: str = "forward"
    seed: int = 0
    architecture: str = "sm_120"


_options = _Options()
_launch: _Launch | None = None
"""The launch in progress; there is at most one."""


@contextlib.contextmanager
def schedule(order: str = "forward", seed: int = 0, architecture: str = "sm_120") -> Iterator[None]:
    """Run the launches inside in this order of threads, within the limits of this architecture.

    Parameters
    ----------
    order : {"forward", "reverse", "shuffle"}
        Who runs first, at the start and after each wait.
    seed : int
        Of the shuffles.
    architecture : str
        A key of ``ARCHITECTURES``.
    """
    global _options
    if order not in ORDERS:
        raise ValueError(f"order must be one of {', '.join(ORDERS)}, got {order!r}")
    if architecture not in ARCHITECTURES:
        raise ValueError(f"architecture must be one of {', '.join(ARCHITECTURES)}, got {architecture!r}")
    before, _options = _options, _Options(order, seed, architecture)
    try:
        yield
    finally:
        _options = before


def order_of(seed: int) -> dict[str, Any]:
    """Return arguments of :func:`schedule` for a number: each order in turn, shuffles by the number."""
    return {"order": ORDERS[seed % len(ORDERS)], "seed": seed}


def active() -> bool:
    """Whether numba-cuda's simulator is on in this process, its compiler off. numba-cuda must be installed."""
    from numba.cuda.core import config

    return bool(config.ENABLE_CUDASIM)


# Where in a kernel something happened: the code object and the offset of the instruction. The line is looked up for a
# message alone.
Place = tuple[Any, int]


def _line(place: Place) -> int:
    code, offset = place
    lines = [(start, line) for start, line in dis.findlinestarts(code) if start <= offset and line is not None]
    return lines[-1][1] if lines else int(code.co_firstlineno)


def _at(place: Place) -> str:
    return f"{Path(place[0].co_filename).name}:{_line(place)}"


def _numbers(numbers: list[int]) -> str:
    """Numbers as ranges: "0-3, 7"; of many ranges the first ones."""
    parts: list[list[int]] = []
    for n in sorted(numbers):
        if parts and parts[-1][1] == n - 1:
            parts[-1][1] = n
        else:
            parts.append([n, n])
    shown = ", ".join(f"{first}-{last}" if first < last else str(first) for first, last in parts[:6])
    return shown if len(parts) <= 6 else f"{shown}, … ({len(numbers)} in all)"


try:
    from greenlet import GreenletExit, getcurrent, greenlet
except ImportError:  # pragma: no cover - install() says so
    GreenletExit = greenlet = getcurrent = None


class _Dim3(NamedTuple):
    x: int
    y: int
    z: int


class _Wait:
    """What a thread waits for: a barrier (``mask`` None) or a warp operation, and with which value."""

    __slots__ = ("kind", "mask", "place", "value")

    def __init__(self, kind: str, mask: int | None, place: Place, value: Any):
        self.kind, self.mask, self.place, self.value = kind, mask, place, value


class _Access(NamedTuple):
    """A read or a write: by whom, when, and where in the code."""

    thread: Any
    epoch: object  # a token that the block changes at each barrier
    clock: int  # syncwarps of the thread before it, and 1
    place: Place
    atomic: bool = False


class _Element:
    """The accesses to one element that a later one may race with."""

    __slots__ = ("epoch", "first_read", "reads", "write")

    def __init__(self) -> None:
        self.write: _Access | None = None
        self.first_read: _Access | None = None  # of all blocks
        self.epoch: object = None  # the last one with a read, and its reads, one a thread: (clock, place)
        self.reads: dict[Any, tuple[int, Place]] = {}


class _Log:
    """Accesses to one memory, by address: all arrays that a launch was given, or what a block shares.

    Every access of every thread comes by here, so what is known to be harmless is passed quickly.
    """

    def __init__(self, starts_empty: bool) -> None:
        self.elements: dict[int, _Element] = {}
        self.starts_empty = starts_empty  # reading what nobody has written is an error

    def read(self, memory: _Memory, index: Any, key: int, place: Place) -> None:
        thread = getcurrent()
        element = self.elements.get(key)
        if element is None:
            element = self.elements[key] = _Element()
        write = element.write
        if write is None:
            if self.starts_empty:
                _fail(f"{_who(thread)} reads {memory.named(index)} at {_at(place)}, which nobody has written")
        elif write[0] is not thread:
            writer, before = write[0], write[1]
            # Known to come after it: a barrier stands between, or a syncwarp of both. Else look closer.
            if writer.block is not thread.block or (
                before is thread.block.epoch and (writer.warp != thread.warp or thread.known[writer.lane] < write[2])
            ):
                self._check(thread, write, "reads", "wrote", place, memory, index)
        epoch = thread.block.epoch
        if element.epoch is not epoch:
            element.epoch, element.reads = epoch, {}
            if element.first_read is None:
                element.first_read = _Access(thread, epoch, thread.clock, place)
        element.reads[thread] = thread.clock, place

    def write(self, memory: _Memory, index: Any, key: int, place: Place, atomic: bool = False) -> None:
        thread = getcurrent()
        element = self.elements.get(key)
        if element is None:
            element = self.elements[key] = _Element()
        write, first = element.write, element.first_read
        if write is not None and write[0] is not thread and not (atomic and write.atomic):
            self._check(thread, write, "writes", "wrote", place, memory, index)
        if first is not None:
            if first.thread.block is not thread.block:
                self._check(thread, first, "writes", "read", place, memory, index)
            if element.epoch is thread.block.epoch:
                for reader, (clock, where) in element.reads.items():
                    if reader is not thread:
                        read = _Access(reader, element.epoch, clock, where)
                        self._check(thread, read, "writes", "read", place, memory, index)
        element.write = _Access(thread, thread.block.epoch, thread.clock, place, atomic)

    @staticmethod
    def _check(thread: Any, other: _Access, does: str, did: str, place: Place, memory: _Memory, index: Any) -> None:
        """Fail unless ``other``, of another thread, is known to have happened before what ``thread`` does now."""
        before, block = other.thread, thread.block
        if before.block is not block:
            why = "and blocks have no order"
        elif other.epoch is not block.epoch:
            return
        elif before.warp != thread.warp:
            why = "and no barrier stands between"
        elif thread.known[before.lane] >= other.clock:
            return
        else:
            why = "and neither a barrier nor a syncwarp of both stands between"
        whose = _who(before) if before.block is block else f"{_who(before)} of another block"
        _fail(
            f"race: {_who(thread)} {does} {memory.named(index)} at {_at(place)}, which {whose} {did} at "
            f"{_at(other.place)}, {why}"
        )


class _Memory:
    """An array inside a kernel: bounds and races are checked, and elements are NumPy scalars."""

    __slots__ = ("_array", "_base", "_log", "_name", "_strides", "dtype", "ndim", "shape", "size")

    def __init__(self, array: Any, log: _Log | None, name: str):
        self._array, self._log, self._name = array, log, name
        self._base, self._strides = array.__array_interface__["data"][0], array.strides
        self.shape, self.size, self.ndim, self.dtype = array.shape, array.size, array.ndim, array.dtype

    def __len__(self) -> int:
        return int(self.shape[0])

    def _key(self, index: Any) -> int:
        """The address of an element."""
        if type(index) is tuple:
            key = self._base
            for i, stride in zip(index, self._strides, strict=True):
                if i < 0:
                    self._fail_index(index)
                key += int(i) * stride
            return int(key)
        if index < 0:
            self._fail_index(index)
        return int(self._base + int(index) * self._strides[0])

    def named(self, index: Any) -> str:
        """An element, for a message."""
        return f"{self._name}[{', '.join(map(str, index if isinstance(index, tuple) else (index,)))}]"

    def _fail_index(self, index: Any) -> NoReturn:
        shown = ", ".join(map(str, index if isinstance(index, tuple) else (index,)))
        _fail(
            f"{_who(getcurrent())} uses index [{shown}] of {self._name}, whose shape is {self.shape}, at "
            f"{_at(_kernel_place())}"
        )

    def __getitem__(self, index: Any) -> Any:
        try:
            value = self._array[index]
        except IndexError:
            self._fail_index(index)
        if isinstance(value, np.ndarray):  # fewer indices than axes, or a slice
            return _Memory(value, self._log, self._name)
        if type(index) is tuple:
            key = self._key(index)
        elif index < 0:
            self._fail_index(index)
        else:
            key = self._base + int(index) * self._strides[0]
        if self._log is not None:
            frame = sys._getframe(1)
            self._log.read(self, index, key, (frame.f_code, frame.f_lasti))
        return value

    def __setitem__(self, index: Any, value: Any) -> None:
        if isinstance(index, slice) or (len(index) if type(index) is tuple else 1) < self.ndim:
            _fail(f"{self._name}: only single elements are assigned in the simulator, at {_at(_caller(2))}")
        key = self._key(index)
        if self._log is not None:
            frame = sys._getframe(1)
            self._log.write(self, index, key, (frame.f_code, frame.f_lasti))
        try:
            self._array[index] = value
        except IndexError:
            self._fail_index(index)

    def atomic(self, index: Any, place: Place, change: Callable[[Any], Any]) -> Any:
        """Replace an element by ``change`` of it, and return what it was."""
        try:
            old = self._array[index]
        except IndexError:
            self._fail_index(index)
        key, log = self._key(index), self._log
        if log is not None:
            element = log.elements.get(key)
            if log.starts_empty and (element is None or element.write is None):
                _fail(f"{_who(getcurrent())} changes {self.named(index)} at {_at(place)}, which nobody has written")
            log.write(self, index, key, place, atomic=True)
        self._array[index] = change(old)
        return old


def _caller(depth: int) -> Place:
    frame = sys._getframe(depth)
    return frame.f_code, frame.f_lasti


def _kernel_place() -> Place:
    """The innermost place outside this file."""
    frame = sys._getframe(1)
    while frame.f_code.co_filename == __file__ and frame.f_back is not None:
        frame = frame.f_back
    return frame.f_code, frame.f_lasti


def _who(thread: Any) -> str:
    return f"thread {thread.number}"


def _fail(message: str) -> NoReturn:
    raise SimulatorError(message)


def poisoned(shape: Any, dtype: Any) -> Any:
    """An array of NaN, of True, or of bytes 0x5A: values that a result cannot well be made of unnoticed."""
    array = np.empty(shape, dtype)
    if array.dtype.kind in "fc":
        array[...] = np.nan
    elif array.dtype.kind == "b":
        array[...] = True
    else:
        array.reshape(-1).view(np.uint8)[...] = 0x5A
    return array


def _dtype(dtype: Any) -> Any:
    from numba.cuda import types
    from numba.cuda.np import numpy_support

    return np.dtype(numpy_support.as_dtype(dtype) if isinstance(dtype, types.Type) else dtype)


class _Local:
    """``cuda.local``."""

    def array(self, shape: Any, dtype: Any, alignment: int | None = None) -> Any:
        """Memory of one thread, poisoned."""
        return poisoned(shape, _dtype(dtype))


class _Shared:
    """``cuda.shared``: one array a call in the source, wherever on its line that stands, and a block."""

    def array(self, shape: Any, dtype: Any, alignment: int | None = None) -> Any:
        """Memory of the block: the same for every thread that comes by here."""
        place, block, dtype = _caller(2), getcurrent().block, _dtype(dtype)
        if shape == 0:
            return block.dynamic_array(dtype)
        found = block.shared.get(place)
        if found is None:
            array = poisoned(shape, dtype)
            block.take_shared(array.nbytes, place)
            found = block.shared[place] = _Memory(array, block.log, f"the shared array of {_at(place)}")
        wanted = tuple(shape) if isinstance(shape, tuple | list) else (shape,)
        if (found.shape, found.dtype) != (wanted, dtype):
            _fail(
                f"{_who(getcurrent())} asks for {dtype} {wanted} as {found._name}, where another got {found.dtype} "
                f"{found.shape}"
            )
        return found


class _Atomic:
    """``cuda.atomic``."""

    def add(self, array: Any, index: Any, value: Any) -> Any:
        return array.atomic(index, _caller(2), lambda old: old + array.dtype.type(value))

    def sub(self, array: Any, index: Any, value: Any) -> Any:
        return array.atomic(index, _caller(2), lambda old: old - array.dtype.type(value))

    def and_(self, array: Any, index: Any, value: Any) -> Any:
        return array.atomic(index, _caller(2), lambda old: old & array.dtype.type(value))

    def or_(self, array: Any, index: Any, value: Any) -> Any:
        return array.atomic(index, _caller(2), lambda old: old | array.dtype.type(value))

    def xor(self, array: Any, index: Any, value: Any) -> Any:
        return array.atomic(index, _caller(2), lambda old: old ^ array.dtype.type(value))

    def exch(self, array: Any, index: Any, value: Any) -> Any:
        return array.atomic(index, _caller(2), lambda old: value)

    def max(self, array: Any, index: Any, value: Any) -> Any:
        return array.atomic(index, _caller(2), lambda old: max(old, value))

    def min(self, array: Any, index: Any, value: Any) -> Any:
        return array.atomic(index, _caller(2), lambda old: min(old, value))

    def cas(self, array: Any, index: Any, old: Any, value: Any) -> Any:
        return array.atomic(index, _caller(2), lambda found: value if found == old else found)


class _Libdevice:
    """``cuda.libdevice``: what reads floats as integers, and arithmetic that is never fused."""

    @staticmethod
    def int_as_float(bits: Any) -> Any:
        return np.uint32(int(bits) & ALL_LANES).view(np.float32)

    @staticmethod
    def float_as_int(x: Any) -> Any:
        return np.float32(x).view(np.int32)

    @staticmethod
    def longlong_as_double(bits: Any) -> Any:
        return np.int64(bits).view(np.float64)

    @staticmethod
    def double_as_longlong(x: Any) -> Any:
        return np.float64(x).view(np.int64)

    @staticmethod
    def dmul_rn(x: Any, y: Any) -> Any:
        return np.float64(x) * np.float64(y)

    @staticmethod
    def dadd_rn(x: Any, y: Any) -> Any:
        return np.float64(x) + np.float64(y)


class _Grid:
    """``cuda.cg.this_grid()``."""

    def sync(self) -> None:
        """A barrier of the block, where the grid has no other."""
        if _launch is not None and _launch.blocks > 1:
            _fail(f"a grid of {_launch.blocks} blocks cannot meet in the simulator, at {_at(_caller(2))}")
        _barrier("grid sync", None, _caller(2))


class _Groups:
    """``cuda.cg``."""

    def this_grid(self) -> _Grid:
        return _Grid()


def _barrier(kind: str, value: Any, place: Place) -> list[Any]:
    """Wait for all threads of the block; their values."""
    thread = getcurrent()
    thread.wait = _Wait(kind, None, place, value)
    thread.parent.switch()
    return thread.result


def _warp(kind: str, mask: int, value: Any, place: Place) -> dict[int, Any]:
    """Wait for the lanes of ``mask``; the value of each."""
    thread, mask = getcurrent(), int(mask) & ALL_LANES
    lane = thread.lane
    if not mask >> lane & 1:
        _fail(
            f"{_who(thread)} calls {kind} with mask 0x{mask:08x}, which excludes its own lane {lane}, at {_at(place)}"
        )
    first, last = thread.number - lane, thread.block.threads - 1
    if mask >> (last - first + 1):
        beyond = [i for i in range(last - first + 1, 32) if mask >> i & 1]
        _fail(
            f"{_who(thread)} calls {kind} with mask 0x{mask:08x} at {_at(place)}: lanes {_numbers(beyond)} are behind "
            f"the block's last thread, {last}"
        )
    thread.wait = _Wait(kind, mask, place, value)
    thread.parent.switch()
    return thread.result


def _signed(bits: int) -> int:
    """A word of lanes as the 32-bit signed integer that numba-cuda makes of it."""
    return bits - (1 << 32) if bits >> 31 else bits


def _shuffle(kind: str, mask: int, value: Any, source: Callable[[int], int]) -> Any:
    """The value of lane ``source(own lane)``; the own one where there is no such lane."""
    thread, place = getcurrent(), _caller(3)
    of = source(thread.lane)
    values = _warp(kind, mask, value, place)
    if not 0 <= of < 32:
        return value
    if of not in values:
        _fail(
            f"{_who(thread)} reads lane {of} by {kind} at {_at(place)}, which mask 0x{int(mask) & ALL_LANES:08x} does "
            "not name"
        )
    return values[of]


def _module_class(base: Any) -> Any:
    """What kernels see as ``cuda``: numba-cuda's class of that purpose, with what waits or allocates replaced."""

    class Module(base):
        local, shared, atomic, cg, libdevice = _Local(), _Shared(), _Atomic(), _Groups(), _Libdevice

        @property
        def threadIdx(self) -> _Dim3:  # noqa: N802 - CUDA's name
            return getcurrent().index

        @property
        def blockIdx(self) -> _Dim3:  # noqa: N802 - CUDA's name
            return getcurrent().block.index

        @property
        def laneid(self) -> int:
            return getcurrent().lane

        def syncthreads(self) -> None:
            _barrier("syncthreads", None, _caller(2))

        def syncthreads_count(self, value: Any) -> int:
            return sum(1 for x in _barrier("syncthreads_count", value, _caller(2)) if x)

        def syncthreads_and(self, value: Any) -> int:
            return int(all(_barrier("syncthreads_and", value, _caller(2))))

        def syncthreads_or(self, value: Any) -> int:
            return int(any(_barrier("syncthreads_or", value, _caller(2))))

        def syncwarp(self, mask: int = ALL_LANES) -> None:
            _warp("syncwarp", mask, None, _caller(2))

        def shfl_sync(self, mask: int, value: Any, lane: int) -> Any:
            return _shuffle("shfl_sync", mask, value, lambda own: int(lane) % 32)

        def shfl_up_sync(self, mask: int, value: Any, delta: int) -> Any:
            return _shuffle("shfl_up_sync", mask, value, lambda own: own - int(delta))

        def shfl_down_sync(self, mask: int, value: Any, delta: int) -> Any:
            return _shuffle("shfl_down_sync", mask, value, lambda own: own + int(delta))

        def shfl_xor_sync(self, mask: int, value: Any, lanes: int) -> Any:
            return _shuffle("shfl_xor_sync", mask, value, lambda own: own ^ int(lanes))

        def ballot_sync(self, mask: int, value: Any) -> int:
            return _signed(sum(1 << lane for lane, x in _warp("ballot_sync", mask, value, _caller(2)).items() if x))

        def all_sync(self, mask: int, value: Any) -> bool:
            return all(_warp("all_sync", mask, value, _caller(2)).values())

        def any_sync(self, mask: int, value: Any) -> bool:
            return any(_warp("any_sync", mask, value, _caller(2)).values())

        def eq_sync(self, mask: int, value: Any) -> bool:
            return len({bool(x) for x in _warp("eq_sync", mask, value, _caller(2)).values()}) == 1

        def match_any_sync(self, mask: int, value: Any) -> int:
            values = _warp("match_any_sync", mask, value, _caller(2))
            return _signed(sum(1 << lane for lane, x in values.items() if x == value))

        def match_all_sync(self, mask: int, value: Any) -> tuple[int, bool]:
            same = len(set(_warp("match_all_sync", mask, value, _caller(2)).values())) == 1
            return (_signed(int(mask) & ALL_LANES) if same else 0), same

        def activemask(self) -> int:
            """The lanes that have not returned: as many as may be active together."""
            thread = getcurrent()
            alive = (t for t in thread.block.alive if t.number // 32 == thread.number // 32)
            return _signed(sum(1 << t.number % 32 for t in alive))

        def lanemask_lt(self) -> int:
            return (1 << self.laneid) - 1

        def nanosleep(self, nanoseconds: int) -> None:
            """Nothing: time does not pass here."""

        def popc(self, value: Any) -> int:
            bits = 8 * value.itemsize if isinstance(value, np.generic) else 32
            return (int(value) % (1 << max(bits, 32)) if value < 0 else int(value)).bit_count()

        def ffs(self, value: Any) -> int:
            return (int(value) & -int(value)).bit_length()

    return Module


if greenlet is not None:

    class _Thread(greenlet):
        """A CUDA thread."""

        number: int
        warp: int
        lane: int
        index: _Dim3
        block: _Block
        wait: Any  # what it waits for, a _Wait, or None
        result: Any
        clock: int  # its syncwarps so far, and 1
        known: tuple[int, ...]  # of each lane of its warp, the clock up to which this thread comes after that one


class _Block:
    """A block at work: its threads, its shared memory, and who waits for whom."""

    def __init__(self, launch: _Launch, number: int, index: _Dim3):
        self.launch, self.number, self.index = launch, number, index
        self.epoch = object()  # another one after each barrier
        self.threads = launch.block_dim.x * launch.block_dim.y * launch.block_dim.z
        self.alive: list[_Thread] = []
        self.shared: dict[Place, _Memory] = {}
        self.static_bytes = 0
        self.dynamic = poisoned(launch.dynamic_bytes, np.dtype(np.uint8)) if launch.dynamic_bytes else None
        self.log = _Log(starts_empty=True)

    def take_shared(self, nbytes: int, place: Place) -> None:
        """Count static shared memory, and fail where there is not so much."""
        self.static_bytes += nbytes
        name, dynamic = _options.architecture, self.launch.dynamic_bytes
        limits = ARCHITECTURES[name]
        if self.static_bytes + dynamic > limits.shared_bytes:
            _fail(
                f"{self.static_bytes + dynamic:,} bytes of shared memory with the array at {_at(place)} ({dynamic:,} "
                f"of them dynamic): a block of {name} has {limits.shared_bytes:,}"
            )
        if self.static_bytes > limits.static_bytes:
            _fail(
                f"{self.static_bytes:,} bytes of static shared memory with the array at {_at(place)}: no more than "
                f"{limits.static_bytes:,} compile, the rest must be dynamic"
            )

    def dynamic_array(self, dtype: Any) -> _Memory:
        """All dynamic shared memory, as elements of ``dtype``."""
        if self.dynamic is None:
            _fail(f"{_who(getcurrent())} asks for dynamic shared memory, and the launch gives none")
        whole = self.dynamic[: self.dynamic.nbytes // dtype.itemsize * dtype.itemsize]
        return _Memory(whole.view(dtype), self.log, "dynamic shared memory")

    def run(self, function: Callable[..., Any], args: tuple[Any, ...], context: contextvars.Context) -> None:
        """Run every thread to its end."""
        dim = self.launch.block_dim
        options, hub = _options, getcurrent()
        shuffle = random.Random(options.seed * 1_000_003 + self.number).shuffle
        for number in range(self.threads):
            thread = _Thread(lambda: function(*args), hub)
            thread.gr_context = context.copy()
            thread.number, thread.block, thread.wait, thread.clock = number, self, None, 1
            thread.warp, thread.lane = number // 32, number % 32
            thread.index = _Dim3(number % dim.x, number // dim.x % dim.y, number // (dim.x * dim.y))
            thread.known = (0,) * 32
            self.alive.append(thread)
        ready = list(self.alive)
        try:
            while ready:
                if options.order == "shuffle":
                    shuffle(ready)
                elif options.order == "reverse":
                    ready.reverse()
                self._take_turns(ready)
                self.alive = [thread for thread in self.alive if not thread.dead]
                ready = self._released() if self.alive else []
        finally:
            for thread in self.alive:
                if not thread.dead:
                    thread.throw(GreenletExit)

    def _take_turns(self, ready: list[_Thread]) -> None:
        """Run each thread until it waits or returns."""
        thread = None
        try:
            for thread in ready:
                thread.switch()
        except SimulatorError:
            raise
        except Exception as error:
            if thread is not None:
                error.add_note(f"in the simulator: thread {tuple(thread.index)} of block {tuple(self.index)}")
            raise

    def _released(self) -> list[_Thread]:
        """The threads that need wait no longer, in order of number."""
        released: list[_Thread] = []
        groups: dict[tuple[int, int | None, str], list[_Thread]] = {}
        for thread in self.alive:
            wait = thread.wait
            if wait.mask is not None:
                groups.setdefault((thread.warp, wait.mask, wait.kind), []).append(thread)
        for (_, mask, _kind), lanes in groups.items():
            assert mask is not None
            if len(lanes) == mask.bit_count():
                self._meet_in_warp(lanes)
                released += lanes
        if released:
            return sorted(released, key=lambda thread: thread.number)
        if groups:
            self._fail_waiting(next(iter(groups.values())))
        self._meet_at_barrier()
        return list(self.alive)

    def _meet_in_warp(self, lanes: list[_Thread]) -> None:
        self._check_one_place(lanes)
        values = {thread.lane: thread.wait.value for thread in lanes}
        if lanes[0].wait.kind != "syncwarp":  # shuffles and votes exchange values, and order no memory
            for thread in lanes:
                thread.result, thread.wait = values, None
            return
        # After it each lane comes after all that the others did, or knew of, before it.
        if len(lanes) == 32:
            known = tuple(thread.clock for thread in lanes)
        else:
            clocks = {thread.lane: thread.clock for thread in lanes}
            known = tuple(max(clocks.get(i, 0), *(thread.known[i] for thread in lanes)) for i in range(32))
        for thread in lanes:
            thread.result, thread.wait, thread.known = values, None, known
            thread.clock += 1

    def _meet_at_barrier(self) -> None:
        if len(self.alive) < self.threads:
            waiting = {thread.number for thread in self.alive}
            gone = [number for number in range(self.threads) if number not in waiting]
            _fail(
                f"divergent barrier: threads {_numbers(gone)} returned, and {self._waiting()}; all threads of the "
                "block must reach a barrier"
            )
        self._check_one_place(self.alive)
        values = [thread.wait.value for thread in self.alive]
        self.epoch = object()
        for thread in self.alive:
            thread.result, thread.wait = values, None

    def _check_one_place(self, threads: list[_Thread]) -> None:
        places = {thread.wait.place for thread in threads}
        if len(places) > 1 and len({(code, _line((code, offset))) for code, offset in places}) > 1:
            _fail(f"divergent: threads that must meet are at different lines: {self._waiting(threads)}")

    def _fail_waiting(self, lanes: list[_Thread]) -> NoReturn:
        """Say who keeps the lanes of a warp operation waiting."""
        wait, warp = lanes[0].wait, lanes[0].number // 32
        here = {thread.number for thread in lanes}
        named = [32 * warp + i for i in range(32) if wait.mask >> i & 1]
        alive = {thread.number for thread in self.alive}
        gone = [number for number in named if number not in alive]
        what = f"{wait.kind} with mask 0x{wait.mask:08x} at {_at(wait.place)}"
        if gone:
            _fail(
                f"{what}: lanes {_numbers([number % 32 for number in gone])} of warp {warp} are named and never "
                f"arrive, their threads returned; {self._waiting()}"
            )
        late = [number for number in named if number not in here]
        _fail(f"deadlock: {what} waits for lanes {_numbers([number % 32 for number in late])}; {self._waiting()}")

    def _waiting(self, threads: list[_Thread] | None = None) -> str:
        """Who waits where, for a message."""
        groups: dict[str, list[int]] = {}
        for thread in threads or self.alive:
            wait = thread.wait
            mask = "" if wait.mask is None else f" with mask 0x{wait.mask:08x}"
            groups.setdefault(f"{wait.kind}{mask} at {_at(wait.place)}", []).append(thread.number)
        return "; ".join(f"threads {_numbers(numbers)} wait in {what}" for what, numbers in groups.items())


class _Launch:
    """A kernel launch: grid, block, and the modules whose ``cuda`` is the simulated one meanwhile."""

    def __init__(self, kernel: Any, module: Any):
        self.grid_dim, self.block_dim = _Dim3(*kernel.grid_dim), _Dim3(*kernel.block_dim)
        self.blocks = self.grid_dim.x * self.grid_dim.y * self.grid_dim.z
        self.dynamic_bytes = int(kernel.dynshared_size)
        self.module = module(self.grid_dim, self.block_dim, self.dynamic_bytes)
        self._swapped: dict[int, tuple[dict[str, Any], dict[str, Any]]] = {}
        self._check_limits()

    def _check_limits(self) -> None:
        name = _options.architecture
        limits, threads = ARCHITECTURES[name], self.block_dim.x * self.block_dim.y * self.block_dim.z
        if threads > limits.threads:
            _fail(f"{threads:,} threads a block: {name} has {limits.threads:,}")
        if any(n > most for n, most in zip(self.grid_dim, limits.grid, strict=True)):
            _fail(f"a grid of {tuple(self.grid_dim)} blocks: {name} has {limits.grid}")
        if self.dynamic_bytes > limits.shared_bytes:
            _fail(
                f"{self.dynamic_bytes:,} bytes of dynamic shared memory: a block of {name} has {limits.shared_bytes:,}"
            )

    def enter(self, function: Any) -> None:
        """Let ``cuda`` mean the simulated module in the function's own module, until :meth:`leave`."""
        names = function.__globals__
        if id(names) not in self._swapped:
            real = sys.modules["numba.cuda"]
            found = {name: value for name, value in names.items() if value is real}
            self._swapped[id(names)] = names, found
            names.update(dict.fromkeys(found, self.module))

    def leave(self) -> None:
        for names, found in self._swapped.values():
            names.update(found)

    def run(self, function: Any, args: tuple[Any, ...]) -> None:
        log = _Log(starts_empty=False)
        given = tuple(
            _Memory(arg, log if arg.flags.writeable else None, f"argument {name}")
            if isinstance(arg, np.ndarray)
            else arg
            for arg, name in zip(args, function.__code__.co_varnames, strict=False)
        )
        # A GPU does not warn of overflow. NumPy's settings belong to the context, and each greenlet has its own.
        with np.errstate(all="ignore"):
            context = contextvars.copy_context()
        self.enter(function)
        try:
            for number, place in enumerate(np.ndindex(*reversed(self.grid_dim))):
                _Block(self, number, _Dim3(*reversed(place))).run(function, given, context)
        finally:
            self.leave()


def _call(kernel: Any, *args: Any) -> Any:
    """What calling a simulated kernel or device function does."""
    global _launch
    if _launch is not None:
        if kernel.entered is not _launch:
            _launch.enter(kernel.fn)
            kernel.entered = _launch
        return kernel.fn(*args)
    if kernel._device or kernel.grid_dim is None:
        _fail(f"{kernel.fn.__name__} must be called in a kernel, or launched with a grid and a block")
    _launch = _Launch(kernel, type(kernel)._ddtree_module)
    try:
        _launch.run(kernel.fn, args)
    finally:
        _launch = None
    return None


def _configured(kernel: Any, configuration: Any) -> Any:
    """What ``kernel[grid, block, stream, bytes of dynamic shared memory]`` does."""
    from numba.cuda.errors import normalize_kernel_dimensions

    kernel.grid_dim, kernel.block_dim = normalize_kernel_dimensions(*configuration[:2])
    kernel.dynshared_size = configuration[3] if len(configuration) > 3 else 0
    return kernel


def install() -> None:
    """Put this scheduler in the place of numba-cuda's. A second call does nothing.

    Raises
    ------
    ImportError
        greenlet is missing, or this numba-cuda is none that the replacement is known to fit. The message says what.
    """
    if greenlet is None:
        raise ImportError("the simulator needs greenlet: pip install greenlet")
    from importlib.metadata import version

    from numba.cuda.simulator import kernel, kernelapi

    if getattr(kernel.FakeCUDAKernel, "_ddtree_module", None) is not None:
        return
    problem = misfit(version("numba-cuda"), kernel.FakeCUDAKernel, kernelapi.FakeCUDAModule)
    if problem:
        raise ImportError(f"the simulator does not fit numba-cuda {version('numba-cuda')}: {problem}")
    module = _module_class(kernelapi.FakeCUDAModule)
    kernel.FakeCUDAKernel._ddtree_module = module
    kernel.FakeCUDAKernel.entered = None  # the last launch in which a device function was called
    kernel.FakeCUDAKernel.__call__, kernel.FakeCUDAKernel.__getitem__ = _call, _configured


def misfit(version: str, kernel: Any, module: Any) -> str | None:
    """Why this module does not fit the classes of a version of numba-cuda; None if it does."""
    low, high = VERSIONS
    if not low <= tuple(int(part) for part in version.split(".")[:2]) < high:
        return f"versions from {low[0]}.{low[1]} and below {high[0]}.{high[1]} are known to fit"
    try:
        made = kernel(lambda: None, device=False)
        missing = [
            name for name in ("fn", "_device", "grid_dim", "block_dim", "dynshared_size") if not hasattr(made, name)
        ]
        missing += [] if made[(1, 2), (3,)].block_dim == (3, 1, 1) else ["block_dim of three"]
        there = module((1, 1, 1), (1, 1, 1), 0)
        missing += [name for name in ("gridDim", "blockDim", "fp16", "grid", "gridsize") if not hasattr(there, name)]
    except Exception as error:
        return f"its classes are made in another way ({error})"
    return f"its classes have no {', '.join(missing)}" if missing else None
