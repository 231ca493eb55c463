"""Every case that is timed, and which of them a backend can do."""

from __future__ import annotations

from collections.abc import Collection

from ddtree.analysis.benchmarks.cases import CASES, Case
from ddtree.analysis.benchmarks.layer_cases import LAYER_CASES

__all__ = ["EVERY_CASE", "cases_for"]

EVERY_CASE = CASES + LAYER_CASES
"""Operations first, then a model's layers; those of a name together."""


def cases_for(available: Collection[str], *, on_gpu: bool, only: tuple[str, ...] = ()) -> tuple[Case, ...]:
    """The cases that need nothing but ``available``, each at least one of ``only`` if that is given."""
    return tuple(
        case
        for case in EVERY_CASE
        if set(case.ops) <= set(available) and (on_gpu or not case.gpu_only) and (not only or set(case.ops) & set(only))
    )
