"""Kernels in Python for NVIDIA GPUs, compiled by numba-cuda when they are first launched.

They take and return CuPy arrays and work on CuPy's current stream. With ``NUMBA_ENABLE_CUDASIM=1`` they run on the CPU
instead, on NumPy arrays, in the :mod:`~ddtree.kernels.numba_cuda.simulator`.

Importing this package imports neither numba nor a kernel: each name below loads the module of that name.
"""

import importlib
import sys
from types import ModuleType
from typing import Any

__all__ = [
    "accept_tree",
    "build_tree",
    "choose_tokens",
    "compact_cache",
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


def __getattr__(name: str) -> Any:
    """Return the function ``name``, from the module of that name."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{name}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
