"""The operations under test: which backends have one, why one cannot run here, and how a test calls it."""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import traceback
import zlib
from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from ddtree.arrays import export_array, to_numpy
from ddtree.backends import BACKENDS, SIMULATED, get_backend
from ddtree.property_tests.cases import KEYWORDS, PARAMETERS, Case, map_arrays, named_leaves
from ddtree.protocols import OPS

WRITTEN = {("compact_cache", "kv_cache"), ("verify_attention", "out")}
"""Arguments that an operation writes into. All others are handed over read-only, and compared afterwards."""

RECENT: deque[Case] = deque(maxlen=64)
"""The last calls, of which a failing test keeps one."""
CALLS: Counter[str] = Counter()
"""Calls made, by operation and backend."""


@dataclass(frozen=True)
class Operation:
    """An operation of one backend: NumPy arrays in, NumPy arrays out, whatever the backend works on.

    An operation that works in place, ``compact_cache``, gets a copy and returns it. A backend of torch arrays gets
    them on the CPU, or on the device that its attribute ``device`` names.
    """

    name: str
    backend: str

    def __repr__(self) -> str:
        return f"{self.name}[{self.backend}]"

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        printer.text(repr(self))  # what Hypothesis shows

    @property
    def function(self) -> Any:
        """The bare function, for arrays of the backend's own kind."""
        return get_backend(self.backend).op(self.name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        given = dict(zip(PARAMETERS[self.name], args, strict=False)) | kwargs
        # copies: a test may change what it gave, and the case is what the operation saw
        case = Case(self.name, self.backend, {k: map_arrays(v, np.array) for k, v in given.items()})
        RECENT.append(case)
        CALLS[repr(self)] += 1
        try:
            case.got = self._call(given)
        except SystemExit as error:  # which would end the run, and with 0 as if all were well
            case.error = f"raised SystemExit: {error}"
            raise RuntimeError(case.error) from error
        except Exception as error:
            case.error = str(error) if isinstance(error, MisuseError) else _raised(error)
            raise
        return case.got

    def _call(self, given: dict[str, Any]) -> Any:
        backend = get_backend(self.backend)
        sent = {name: map_arrays(value, functools.partial(self._send, name)) for name, value in given.items()}
        by_name = {name: value for name, value in sent.items() if name in KEYWORDS[self.name]}
        with _order_of_threads(self.backend, given), _poisoned_memory(backend.array_kind):
            result = self.function(*(value for name, value in sent.items() if name not in by_name), **by_name)
        for name, value in given.items():
            if (self.name, name) not in WRITTEN:
                pairs = zip(_arrays(value), _arrays(sent[name]), strict=True)
                if any(a.tobytes() != to_numpy(b).tobytes() for a, b in pairs):
                    raise MisuseError(f"{self} wrote into {name}")
        if self.name == "compact_cache":
            if result is not None:
                raise MisuseError(f"{self} works in place and returns None, got {type(result).__name__}")
            return to_numpy(sent["kv_cache"])
        if given.get("out") is not None and result is not sent["out"]:
            raise MisuseError(f"{self} returns the array that was passed as out")
        return map_arrays(result, to_numpy)

    def _send(self, name: str, array: np.ndarray) -> Any:
        copy, backend = np.array(array, order="C"), get_backend(self.backend)
        if backend.array_kind == "torch":
            torch = importlib.import_module("torch")
            return export_array(copy, torch.empty(0)).to(getattr(backend.namespace, "device", "cpu"))
        if backend.array_kind == "cupy":
            return importlib.import_module("cupy").asarray(copy)
        copy.flags.writeable = (self.name, name) in WRITTEN
        return copy


def _raised(error: Exception) -> str:
    """What was raised, and the place of it that is nearest and not in a library."""
    told = f"raised {type(error).__name__}: {error}"
    frames = traceback.extract_tb(error.__traceback__)[2:]  # without the two that called the backend
    own = [f for f in frames if "site-packages" not in f.filename and "<" not in f.filename] or frames
    return f"{told}\n  at {own[-1].filename}:{own[-1].lineno}, in {own[-1].name}: {own[-1].line}" if own else told


class MisuseError(AssertionError):
    """A backend wrote where it must not, or returned what it must not."""


def chosen_backends(config: Any) -> tuple[str, ...]:
    """Backends to test: what ``--ddtree-backend`` names, else all of ours."""
    return tuple(dict.fromkeys(config.getoption("--ddtree-backend", default=None) or BACKENDS))


def operations(name: str, backends: tuple[str, ...]) -> Iterator[tuple[Operation, str | None]]:
    """``(operation, why it cannot run here or None)`` for each backend that has ``name``; the others give nothing."""
    for backend in backends:
        if name in ops_of(backend):
            yield Operation(name, backend), why_not(backend)


def ops_of(backend: str) -> tuple[str, ...]:
    """Operations that a backend declares; of one of ours also where its library is missing."""
    if backend in BACKENDS:
        public = getattr(importlib.import_module(BACKENDS[backend].module), "__all__", ())
        return tuple(op for op in OPS if op in public)
    return get_backend(backend).ops


def kind_of(backend: str) -> str:
    """The kind of arrays that a backend takes."""
    return BACKENDS[backend].array_kind if backend in BACKENDS else get_backend(backend).array_kind


def why_not(backend: str) -> str | None:
    """Why a backend cannot run on this machine; None where it can."""
    if backend == "numba_cuda":
        for module, library in (("numba_cuda", "numba-cuda"), *((("greenlet", "greenlet"),) if SIMULATED else ())):
            if importlib.util.find_spec(module) is None:
                return f"optional library {library} is not installed"
    kind = kind_of(backend)
    if kind == "cupy":
        try:
            return None if importlib.import_module("cupy").cuda.runtime.getDeviceCount() else "no GPU"
        except Exception:  # CuPy missing, or it finds no driver: both mean that no GPU can be used from here
            return "no GPU"
    if kind == "torch" and importlib.util.find_spec("torch") is None:
        return "optional library torch is not installed"
    return None


def _order_of_threads(backend: str, given: dict[str, Any]) -> contextlib.AbstractContextManager[None]:
    """In the simulator, an order that the arguments decide: another for another example, the same in a replay."""
    if backend != "numba_cuda" or not SIMULATED:
        return contextlib.nullcontext()
    from ddtree.kernels.numba_cuda import simulator

    arrays = [array for value in given.values() for array in _arrays(value)]
    return simulator.schedule(**simulator.order_of(zlib.crc32(b"".join(array.tobytes() for array in arrays))))


@contextlib.contextmanager
def _poisoned_memory(array_kind: str) -> Iterator[None]:
    """On a GPU, hand out memory full of 0x5A, so that an element never written shows."""
    if array_kind != "cupy":
        yield
        return
    cuda = importlib.import_module("cupy").cuda
    allocate = cuda.get_allocator()

    def poisoned(size: int) -> Any:
        memory = allocate(size)
        if size > 0:
            memory.memset_async(0x5A, size, cuda.get_current_stream())
        return memory

    with cuda.using_allocator(poisoned):
        yield


def _arrays(value: Any) -> list[Any]:
    return [leaf for _, leaf in named_leaves("", value) if hasattr(leaf, "dtype")]
