"""Kernels for the CPU, compiled by numba when they are first asked for.

Importing this package imports neither numba nor a kernel: each name below loads the module of that name, which compiles
its function or takes it from numba's cache.
"""

import contextlib
import importlib
import sys
import threading
from collections.abc import Iterator
from types import ModuleType
from typing import Any

__all__ = [
    "accept_tree",
    "build_tree",
    "choose_tokens",
    "compact_cache",
    "find_draft_fault",
    "find_tree_fault",
    "replay_rounds",
    "topk_log_probs",
    "tree_positions",
    "verify_attention",
    "visibility_words",
]


class _Package(ModuleType):
    """A package whose functions keep their names from the modules that they are in."""

    def __setattr__(self, name: str, value: Any) -> None:
        # The import system makes a module that it has loaded an attribute of the package, where the function belongs.
        super().__setattr__(name, getattr(value, name) if name in __all__ and isinstance(value, ModuleType) else value)


sys.modules[__name__].__class__ = _Package


@contextlib.contextmanager
def _noted_if_slow(name: str) -> Iterator[None]:
    """Tell a person who waits at a terminal what for: a first compilation takes seconds, later processes load it."""
    note = f"ddtree: compiling {name} for this machine, once …\n"
    timer = threading.Timer(1.5, sys.stderr.write, [note])
    timer.daemon = True
    if sys.stderr is not None and sys.stderr.isatty():
        timer.start()
    try:
        yield
    finally:
        timer.cancel()


def __getattr__(name: str) -> Any:
    """Return the function ``name``, from the module of that name."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    with _noted_if_slow(name):
        return getattr(importlib.import_module(f"{__name__}.{name}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
