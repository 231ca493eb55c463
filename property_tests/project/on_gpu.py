"""What tests on a GPU share: a library that finds one, and outputs full of poison."""

import importlib
from collections.abc import Iterable
from types import ModuleType
from typing import Any

import numpy as np
import pytest


def gpu_library(name: str) -> ModuleType:
    """CuPy or torch where it finds a GPU; else the test is skipped."""
    try:
        module = importlib.import_module(name)
        count = module.cuda.runtime.getDeviceCount() if name == "cupy" else module.cuda.device_count()
    except Exception:  # a missing driver shows in many ways
        count = 0
    if count == 0:
        pytest.skip("no GPU")
    return module


def poison_outputs(monkeypatch: pytest.MonkeyPatch, launchers: Iterable[str], byte: int) -> None:
    """Have launchers of ``kernels.cupy`` get arrays full of ``byte``, so that what a kernel leaves out is seen.

    0xFF makes every floating type NaN; 0x5A is no number that an integer is expected to be.
    """
    cupy = gpu_library("cupy")

    def poisoned(shape: tuple[int, ...], dtype: Any) -> Any:
        array = cupy.empty(shape, dtype)
        array.view(np.uint8).fill(byte)
        return array

    for name in launchers:
        monkeypatch.setattr(importlib.import_module(f"ddtree.kernels.cupy.{name}"), "empty", poisoned)
