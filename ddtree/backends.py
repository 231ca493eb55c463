"""Backends: modules (or objects) with functions named as the operations, and which of them serves a call."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from ddtree.arrays import Device, device_of
from ddtree.protocols import OPS

__all__ = ["BACKENDS", "DEFAULT_ORDER", "SIMULATED", "Backend", "BackendUnavailable", "get_backend", "select_backend"]


class BackendUnavailable(RuntimeError):  # noqa: N818 - it names a state, as ModuleNotFoundError does
    """A backend cannot be used here, or lacks the operation asked for. The message says what to install or to pass."""


@dataclass(frozen=True)
class _Known:
    """Where a backend of ours is, and what it needs."""

    module: str
    requires: tuple[str, ...]  # libraries, as imported
    install: str  # the command that brings it
    array_kind: str


SIMULATED = os.environ.get("NUMBA_ENABLE_CUDASIM", "0") not in ("", "0")
"""Whether numba-cuda's simulator runs the kernels of numba_cuda, on NumPy arrays: it is on for a whole process."""

BACKENDS: dict[str, _Known] = {
    "reference": _Known("ddtree.reference", (), "", "numpy"),
    "numba_cpu": _Known("ddtree.kernels.numba_cpu", ("numba",), "pip install numba", "numpy"),
    "numba_cuda": _Known(
        "ddtree.kernels.numba_cuda",
        ("numba_cuda", "greenlet") if SIMULATED else ("numba_cuda",),
        "pip install numba-cuda greenlet" if SIMULATED else "pip install 'numba-cuda[cu13]' cupy-cuda13x",
        "numpy" if SIMULATED else "cupy",
    ),
    "cupy": _Known("ddtree.kernels.cupy", ("cupy",), "pip install cupy-cuda13x (or cupy-cuda12x)", "cupy"),
}

DEFAULT_ORDER: dict[str, tuple[str, ...]] = {"cpu": ("numba_cpu", "reference"), "cuda": ("cupy",)}
"""Who serves a call without ``backend=``, by where the arrays lie: the first that has the operation."""


@dataclass(frozen=True)
class Backend:
    """A module or object whose functions are operations.

    Attributes
    ----------
    name : str
        As it was asked for.
    namespace : module or object
        Holds the functions.
    array_kind : str
        Arrays that its functions take and return: "numpy", "cupy" or "torch". A foreign backend states it in an
        attribute ``array_kind``; NumPy if it has none.
    """

    name: str
    namespace: Any
    array_kind: str

    @property
    def ops(self) -> tuple[str, ...]:
        """The operations it has, in the contract's order."""
        public = getattr(self.namespace, "__all__", None)
        if public is not None and self.name in BACKENDS:  # ours load an operation when it is first asked for
            return tuple(op for op in OPS if op in public)
        found = {op: getattr(self.namespace, op, None) for op in OPS}
        # a public function in it was imported to be called: it is not the backend's own
        return tuple(op for op in OPS if callable(found[op]) and getattr(found[op], "__module__", "") != "ddtree.ops")

    def op(self, name: str) -> Callable[..., Any]:
        """Return the function of operation ``name``.

        Raises
        ------
        BackendUnavailable
            This backend has no such operation. Another is never taken silently in its place.
        """
        if name not in self.ops:
            has = ", ".join(self.ops) or "no operation yet"
            others = [b for b in BACKENDS if b != self.name and name in _ops_of(b)]
            raise BackendUnavailable(
                f"backend {self.name!r} has no operation {name!r} (it has: {has}); "
                f"backends that have it: {', '.join(others) or 'none'}"
            )
        function: Callable[..., Any] = getattr(self.namespace, name)
        return function


@functools.cache
def _ops_of(name: str) -> tuple[str, ...]:
    """Operations of one of our backends, whether or not its library is installed (the packages are light)."""
    try:
        public = getattr(importlib.import_module(BACKENDS[name].module), "__all__", ())
    except ImportError:
        return ()
    return tuple(op for op in OPS if op in public)


@functools.cache
def get_backend(spec: str) -> Backend:
    """Return the backend that ``spec`` names: asking for one means getting that one, or an error.

    Parameters
    ----------
    spec : str
        One of ``BACKENDS``, or ``"module"`` or ``"module:object"`` of your own. Its functions have the names and the
        signatures in :mod:`ddtree.protocols`; any subset will do.

    Raises
    ------
    BackendUnavailable
        Its library or module cannot be imported; the cause is chained.
    ValueError
        The name is neither known nor importable, or nothing in it is an operation.
    """
    known = BACKENDS.get(spec)
    if known is not None:
        for library in known.requires:
            try:
                importlib.import_module(library)
            except ImportError as error:
                raise BackendUnavailable(
                    f"backend {spec!r} needs {library}, which cannot be imported ({error}): {known.install}"
                ) from error
        return Backend(spec, importlib.import_module(known.module), known.array_kind)

    module_name, _, attribute = spec.partition(":")
    if "/" in spec or spec.endswith(".py"):
        raise ValueError(
            f"backend must be a module's name, not a path, got {spec!r}: run where it can be imported, "
            f"and pass {module_name.rpartition('/')[2].removesuffix('.py')!r}"
        )
    if not all(part.isidentifier() for part in module_name.split(".")):
        raise ValueError(f"backend must be one of {', '.join(BACKENDS)}, 'module' or 'module:object', got {spec!r}")
    if SIMULATED and all(map(importlib.util.find_spec, ("numba_cuda", "greenlet"))):
        # numba's own simulator passes arrays as they are, and knows no races; ours takes its place before kernels exist
        importlib.import_module("ddtree.kernels.numba_cuda.jit")
    try:
        namespace: Any = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is not None and (module_name == error.name or module_name.startswith(error.name + ".")):
            raise ValueError(
                f"backend must be one of {', '.join(BACKENDS)}, or 'module' or 'module:object' that can be imported, "
                f"got {spec!r} ({error})"
            ) from error
        raise BackendUnavailable(f"backend {spec!r} cannot be imported: {error}") from error
    except (ImportError, ValueError) as error:
        raise BackendUnavailable(f"backend {spec!r} cannot be imported: {error}") from error
    for part in attribute.split(".") if attribute else ():
        if not hasattr(namespace, part):
            raise ValueError(f"backend {spec!r}: module {module_name!r} has no object {attribute!r}")
        namespace = getattr(namespace, part)
    backend = Backend(spec, namespace, getattr(namespace, "array_kind", "numpy"))
    if backend.array_kind not in ("numpy", "cupy", "torch"):
        raise ValueError(f"backend {spec!r}: array_kind must be 'numpy', 'cupy' or 'torch', got {backend.array_kind!r}")
    if not backend.ops:
        raise ValueError(
            f"backend {spec!r} has no operation: define any of {', '.join(OPS)}, or name one of {', '.join(BACKENDS)}"
        )
    return backend


def select_backend(op: str, backend: str | Backend | None, device: Device) -> Backend:
    """Return the backend that serves ``op``: the one asked for, or the first of the default order that has it.

    Raises
    ------
    BackendUnavailable
        The backend, or its library, or the operation in it, is missing.
    """
    if isinstance(backend, Backend):
        return backend
    if backend is not None:
        if not isinstance(backend, str):
            hint = f": pass its name, {backend.__name__!r}" if isinstance(backend, ModuleType) else ""
            raise TypeError(f"backend must be a name, 'module:object' or a Backend, got {type(backend).__name__}{hint}")
        return get_backend(backend)
    order = DEFAULT_ORDER.get(device.type, ())
    for name in order:
        if op in _ops_of(name):
            return get_backend(name)
    raise BackendUnavailable(
        f"no backend serves {op!r} on {device} yet (tried: {', '.join(order) or 'none'}); "
        "move the arrays to the CPU or pass backend='module:object' of your own"
    )


def serving(op: str, array: Any, backend: str | Backend | None = None) -> Callable[..., Any]:
    """Return the function that serves ``op`` on arrays like ``array`` (NumPy or CuPy), without the public checks."""
    return select_backend(op, backend, device_of(array)).op(op)
