"""The operations under test: which backends have one, why one cannot run here, and how a test calls it."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import inspect
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

import numpy as np

from ddtree.arrays import to_numpy
from ddtree.backends import BACKENDS, SIMULATED, get_backend
from ddtree.protocols import OPS

WRITTEN = {("compact_cache", "kv_cache"), ("verify_attention", "out")}
"""Arguments that an operation writes into. All others are handed over read-only, and compared afterwards."""


@dataclass(frozen=True)
class Operation:
    """An operation of one backend: NumPy arrays in, NumPy arrays out, whatever the backend works on.

    An operation that works in place, ``compact_cache``, gets a copy and returns it.
    """

    name: str
    backend: str

    def __repr__(self) -> str:
        return f"{self.name}[{self.backend}]"

    @property
    def function(self) -> Any:
        """The bare function, for arrays of the backend's own kind."""
        return get_backend(self.backend).op(self.name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        names = list(inspect.signature(OPS[self.name].__call__).parameters)[1:]
        given = dict(zip(names, args, strict=False)) | kwargs
        sent = {name: _map_arrays(value, lambda a, n=name: self._send(a, n)) for name, value in given.items()}
        with _order_of_threads(self.backend, given):
            result = self.function(
                *(sent[name] for name in names[: len(args)]), **{name: sent[name] for name in kwargs}
            )
        for name, value in given.items():
            if (self.name, name) not in WRITTEN:
                pairs = zip(_arrays(value), _arrays(sent[name]), strict=True)
                assert all(a.tobytes() == to_numpy(b).tobytes() for a, b in pairs), f"{self} wrote into {name}"
        if self.name == "compact_cache":
            assert result is None, f"{self} works in place and returns None, got {type(result).__name__}"
            return to_numpy(sent["kv_cache"])
        if kwargs.get("out") is not None:
            assert result is sent["out"], f"{self} returns the array that was passed as out"
        return _map_arrays(result, to_numpy)

    def _send(self, array: np.ndarray, name: str) -> Any:
        copy, kind = np.array(array, order="C"), get_backend(self.backend).array_kind
        if kind != "numpy":
            return importlib.import_module(kind).asarray(copy)
        copy.flags.writeable = (self.name, name) in WRITTEN
        return copy


def chosen_backends(config: Any) -> tuple[str, ...]:
    """Backends to test: what ``--ddtree-backend`` names where that option is known, else all of ours."""
    return tuple(config.getoption("--ddtree-backend", default=None) or BACKENDS)


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


def why_not(backend: str) -> str | None:
    """Why a backend cannot run on this machine; None where it can."""
    if backend == "numba_cuda":
        for module, library in (("numba_cuda", "numba-cuda"), *((("greenlet", "greenlet"),) if SIMULATED else ())):
            if importlib.util.find_spec(module) is None:
                return f"optional library {library} is not installed"
    if backend in BACKENDS and BACKENDS[backend].array_kind == "cupy":
        try:
            return None if importlib.import_module("cupy").cuda.runtime.getDeviceCount() else "no GPU"
        except Exception:  # CuPy missing, or it finds no driver: both mean that no GPU can be used from here
            return "no GPU"
    return None


def _order_of_threads(backend: str, given: dict[str, Any]) -> contextlib.AbstractContextManager[None]:
    """In the simulator, an order that the arguments decide: another for another example, the same in a replay."""
    if backend != "numba_cuda" or not SIMULATED:
        return contextlib.nullcontext()
    from ddtree.kernels.numba_cuda import simulator

    arrays = [array for value in given.values() for array in _arrays(value)]
    return simulator.schedule(**simulator.order_of(zlib.crc32(b"".join(array.tobytes() for array in arrays))))


def _arrays(value: Any) -> list[Any]:
    found: list[Any] = []
    _map_arrays(value, found.append)
    return found


def _map_arrays(value: Any, change: Any) -> Any:
    if is_dataclass(value) and not isinstance(value, type):
        arrays = {f.name: getattr(value, f.name) for f in fields(value) if hasattr(getattr(value, f.name), "dtype")}
        return replace(value, **{name: change(array) for name, array in arrays.items()})
    if isinstance(value, tuple):
        return tuple(_map_arrays(v, change) for v in value)
    return change(value) if hasattr(value, "dtype") and hasattr(value, "shape") and value.shape != () else value
