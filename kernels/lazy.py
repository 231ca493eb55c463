"""Packages whose operations are loaded when they are first asked for, one module an operation."""

import importlib
import sys
from types import ModuleType
from typing import Any

__all__ = ["load_on_demand"]


class _LazyPackage(ModuleType):
    """A package whose functions keep their names from the modules that they are in."""

    def __setattr__(self, name: str, value: Any) -> None:
        # The import system makes a module that it has loaded an attribute of the package, where the function belongs.
        own = name in self.__all__ and isinstance(value, ModuleType)
        super().__setattr__(name, getattr(value, name) if own else value)

    def __getattr__(self, name: str) -> Any:
        if name not in self.__all__:
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        return getattr(importlib.import_module(f"{self.__name__}.{name}"), name)

    def __dir__(self) -> list[str]:
        return sorted({*vars(self), *self.__all__})


def load_on_demand(package: str) -> None:
    """Make each name in ``__all__`` of ``package`` load the module of that name, and be its function of that name."""
    sys.modules[package].__class__ = _LazyPackage
