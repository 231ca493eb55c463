"""One operation held against the reference: what a call must give, where it differs, and the smallest such case.

The suite's tests, ``ddtree check``, ``ddtree replay`` and the demo compare by the rule that stands here: integers,
trees and moved bytes are equal bit for bit, log-probs and attention lie within the table of tolerances.
"""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from ddtree import ops
from ddtree.property_tests import nearness
from ddtree.property_tests._backends import RECENT, Operation
from ddtree.property_tests.cases import RESULTS, Case, Law, map_arrays, named_leaves
from ddtree.property_tests.compare import (
    BeyondToleranceError,
    assert_same,
    assert_same_acceptance,
    assert_same_form,
    assert_same_tree,
)

__all__ = ["FAILURES", "Agreement", "HypothesisMissingError", "check_operation", "difference", "first_line", "keep"]

FAILURES = Path("ddtree_failures")
"""Where cases are kept if nothing else is said, in the current folder."""
MOST_ELEMENTS = 1 << 22
"""Of what a number in a case's file, such as a budget, makes of its own: beyond that, the case is not run."""


def input_fault(case: Case) -> str:
    """Why a case read from a file cannot be given to an operation; empty if it can.

    Shapes and types are checked by the public layer. Values are not, since places that nothing may read can hold
    anything in a case; the reference, which runs first, meets an index out of range without harm.
    """
    options = {} if case.op == "topk_log_probs" else {"validate": False}
    given = {name: map_arrays(value, np.array) for name, value in case.arguments.items()}
    try:
        _check_sizes(case.op, given)
        _check_integers(given)
        getattr(ops, case.op)(**given, backend="reference", **options)
        if case.op == "verify_attention":
            _as_attention(given).dense()  # what the result is held against
    except Exception as error:  # whatever nonsense leads to
        return f"{case.op} cannot take its inputs: {first_line(error)}"
    return ""


def _check_integers(given: dict[str, Any]) -> None:
    """Refuse integers that the public layer would narrow first: a backend is never given them."""
    for name, value in given.items():
        if name != "kv_cache" and name != "request_ids":
            wide = [leaf for leaf, a in named_leaves(name, value) if getattr(a, "dtype", None) == np.int64]
            if wide:
                raise ValueError(f"{wide[0]} must be int32, as backends get it, got int64")


def _check_sizes(op: str, given: dict[str, Any]) -> None:
    """Refuse numbers in a file that would ask for memory out of all proportion to it."""
    tree, acceptance, prefix_lens = (given.get(name) for name in ("tree", "acceptance", "prefix_lens"))
    if op == "build_tree":
        slots = 1 + int(given["budget"])
        if len(given["log_probs"]) * slots * (slots // 32) > MOST_ELEMENTS:
            raise ValueError(f"budget = {given['budget']} makes a tree of more than {MOST_ELEMENTS:,} words of bits")
    counts, slots = (tree.node_counts, tree.num_slots) if tree is not None else (given.get("node_counts"), 0)
    slots = given["parents"].shape[1] if op == "visibility_words" else slots
    if counts is not None and ((counts < 1) | (counts > slots)).any():
        raise ValueError(f"node_counts must be in 1 … {slots}")
    if tree is not None and tree.token_ids.shape[0] * int(tree.max_depth) > MOST_ELEMENTS:
        raise ValueError(f"tree.max_depth = {tree.max_depth} makes paths of more than {MOST_ELEMENTS:,} nodes")
    if acceptance is not None and (acceptance.lengths > acceptance.node_indices.shape[1]).any():
        raise ValueError("acceptance.lengths must be at most the width of acceptance.node_indices")
    if "page_table" in given:
        page_size = given["kv_cache"].shape[-2]
        if (prefix_lens > given["page_table"].shape[1] * page_size).any():
            raise ValueError(f"prefix_lens must be in a table of {given['page_table'].shape[1]} pages of {page_size}")


def difference(case: Case) -> str:
    """Where the result of a call differs from what it must be; empty if nowhere. Fills in ``case.expected``."""
    case.expected = Operation(case.op, "reference")(**case.arguments)
    RECENT.pop()
    if case.error:
        return case.error
    try:
        _COMPARE.get(case.op, _same_array)(case)
    except AssertionError as error:
        if isinstance(error, BeyondToleranceError):
            case.about["tolerance"] = error.tolerance
        return str(error)
    except (TypeError, ValueError, AttributeError) as error:  # what came out is not even of the right kind
        return f"the result cannot be compared: it is a {type(case.got).__name__} ({first_line(error)})"
    return ""


def rerun(case: Case, operation: Operation) -> Case:
    """The same call of another operation, or of the same one again; what it raises is part of the case."""
    with contextlib.suppress(Exception):
        operation(**case.arguments)
    return replace(RECENT.pop(), about=case.about)


def _same_array(case: Case) -> None:
    assert_same(case.got, case.expected, *RESULTS[case.op])


def _same_bytes(case: Case) -> None:
    """Moved rows keep every bit, a NaN's payload too."""
    sides = [np.asarray(side) for side in (case.got, case.expected)]
    assert_same_form(*sides, *RESULTS[case.op])
    assert_same(*(side.view(f"u{side.itemsize}") for side in sides), f"bits of {RESULTS[case.op][0]}")


def _near_log_probs(case: Case) -> None:
    logits = case.arguments["logits"][..., : case.arguments.get("vocab_size")]
    nearness.assert_right_top_k(case.got, logits, case.arguments["k"])


def _near_attention(case: Case) -> None:
    nearness.assert_near(case.got, _as_attention(case.arguments), small=True)


def _as_attention(arguments: dict[str, Any]) -> nearness.Attention:
    return nearness.Attention(**{name: value for name, value in arguments.items() if name != "out"})


_COMPARE: dict[str, Callable[[Case], None]] = {
    "build_tree": lambda case: assert_same_tree(case.got, case.expected),
    "accept_tree": lambda case: assert_same_acceptance(case.got, case.expected),
    "compact_cache": _same_bytes,
    "topk_log_probs": _near_log_probs,
    "verify_attention": _near_attention,
}


def keep(path: Path, about: dict[str, str]) -> list[str]:
    """Write the call at fault among the recent ones; return what a failure's message should say of it.

    It is the first that differs from the reference by itself. Where none does (a law between calls is broken), it is
    the last, and says so. Where a test called no operation itself (it is about an engine or a model), what is known of
    the test is written, as a :class:`~ddtree.property_tests.cases.Law`.
    """
    told = ""
    for case in RECENT.copy():
        told = difference(case)
        if told:
            break
    else:
        if not RECENT:
            Law(_origin() | about).write(path)
            return [f"law:   {path}", f"again: ddtree replay {path}"]
        case = RECENT[-1]
        about = about | {"between": "calls, none of which differs from the reference by itself"}
    case.about |= _origin() | about
    case.write(path)
    what = f"{case.op}[{case.backend}]"
    return [
        f"{what} differs from the reference: {first_line(told)}" if told else f"no call differs by itself; {what} last",
        f"case:  {path}",
        f"again: ddtree replay {path}",
    ]


@functools.cache
def _origin() -> dict[str, str]:
    """Versions, ddtree's commit and devices, as a case's metadata."""
    from ddtree.analysis.environment import commit, devices, versions

    installed = ", ".join(f"{name} {version}" for name, version in versions().items() if version)
    return {"versions": installed, "devices": "; ".join(devices())} | ({"commit": commit()} if commit() else {})


def case_path(folder: Path, name: str) -> Path:
    """The file of a case: always the same one for a name, whatever characters are in that."""
    return folder / f"{re.sub(r'[^A-Za-z0-9_.-]+', '-', name).strip('-')}.kdtr"


def first_line(error: Exception | str) -> str:
    """The first line of a message, for a table."""
    return next(iter(str(error).splitlines()), "")


@dataclass(frozen=True)
class Agreement:
    """How one operation of a backend compared with the reference.

    Attributes
    ----------
    backend, op : str
        Who was asked, and for what.
    examples, mismatches : int
        Inputs tried, and those where the two differed.
    first : str
        What differs in the smallest of them, in a line; empty if nothing does.
    case : Path or None
        Where that one is kept, if it was to be.
    """

    backend: str
    op: str
    examples: int
    mismatches: int
    first: str = ""
    case: Path | None = None


class HypothesisMissingError(RuntimeError):
    """Inputs cannot be drawn: Hypothesis is not installed."""

    def __init__(self) -> None:
        super().__init__("drawing inputs needs Hypothesis, which is not installed: pip install 'ddtree[test]'")


def check_operation(
    backend: str,
    op: str,
    *,
    examples: int = 100,
    seed: int = 0,
    folder: Path | None = None,
    on_example: Callable[[], Any] = lambda: None,
    on_shrink: Callable[[], Any] = lambda: None,
) -> Agreement:
    """Draw inputs of an operation, compare the backend with the reference on each, and shrink what differs.

    Parameters
    ----------
    backend, op : str
        What to check; it works here and has the operation.
    examples : int
        Inputs to draw.
    seed : int
        Of the inputs: the same seed draws the same ones.
    folder : Path, optional
        Where the smallest case that differs is kept, under a name of its own; nowhere if left out.
    on_example, on_shrink : callable
        Called after each input, and before what differs is shrunk: for a progress bar.

    Raises
    ------
    HypothesisMissingError
        Hypothesis is not installed.
    """
    try:
        import hypothesis
    except ImportError as error:
        raise HypothesisMissingError from error
    from hypothesis import HealthCheck, Phase, Verbosity

    from ddtree.property_tests.strategies import calls

    operation, tried, wrong, smallest = Operation(op, backend), 0, 0, ("", Case(op, backend, {}))
    shrinking = False

    def compare(arguments: dict[str, Any]) -> None:
        nonlocal tried, wrong, smallest
        case = rerun(Case(op, backend, arguments), operation)
        told = difference(case)
        if not shrinking:
            tried += 1
            wrong += bool(told)
            on_example()
        elif told:
            smallest = told, case  # of those that fail, Hypothesis tries the smallest last
            raise AssertionError(told)

    def run(*phases: Phase) -> None:
        settings = hypothesis.settings(
            max_examples=examples,
            phases=phases,
            database=None,
            deadline=None,
            report_multiple_bugs=False,
            verbosity=Verbosity.quiet,
            suppress_health_check=list(HealthCheck),
        )
        hypothesis.seed(seed)(settings(hypothesis.given(calls(op))(compare)))()

    run(Phase.generate)
    if not wrong:
        return Agreement(backend, op, tried, 0)
    shrinking = True
    on_shrink()
    try:
        run(Phase.generate, Phase.shrink)
    except Exception as error:  # ours from compare, or Hypothesis's where a kernel does not fail every time
        if not smallest[0]:
            return Agreement(backend, op, tried, wrong, f"not on every run: {first_line(error)}")
    told, case = smallest
    path = None
    if folder is not None:
        path = case_path(folder, f"{op}-{backend}")
        case.about |= _origin() | {"test": "ddtree check", "seed": str(seed)}
        case.write(path)
    return Agreement(backend, op, tried, wrong, first_line(told), path)
