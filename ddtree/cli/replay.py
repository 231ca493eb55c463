"""``ddtree replay``: the case of a failure once more, with what should come out beside what does."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import click

from ddtree.cli.check import CannotRun, backend_here

if TYPE_CHECKING:
    from rich.console import Console

    from ddtree.property_tests.cases import Case
    from ddtree.trees import DraftTree

ROWS_BEFORE, ROWS_AFTER = 3, 4
"""What is shown about the first difference."""


@click.command()
@click.argument("file", type=click.Path(path_type=Path))
@click.option("--backend", metavar="NAME", help="Another than the one that failed.")
def replay(file: Path, backend: str | None) -> None:
    """Run the case in FILE again, beside the reference.

    Where FILE is of a law, its test runs again on the one example that failed. Exits with 0 if the two agree or the law
    holds, 1 if not, and 2 if the file cannot be run here.
    """
    from rich.console import Console

    from ddtree.kdtr import KdtrFile
    from ddtree.property_tests._backends import Operation
    from ddtree.property_tests.cases import LAW, Case
    from ddtree.property_tests.harness import difference, input_fault, rerun

    try:
        with KdtrFile(file) as opened:
            is_law = opened.metadata.get("kind") == LAW
        if is_law:
            _run_law(file, backend)
        case = Case.read(file)
    except OSError as error:
        raise CannotRun(f"{file}: {error.strerror}") from error
    except ValueError as error:  # KdtrError too
        raise CannotRun(str(error)) from error
    found = backend_here(backend or case.backend)
    if case.op not in found.ops:
        raise CannotRun(f"{found.name} has no {case.op}; it has: {', '.join(found.ops)}")
    fault = input_fault(case)
    if fault:
        raise CannotRun(f"{file}: {fault}")
    case = rerun(case, Operation(case.op, found.name))
    told = difference(case)
    console = Console(highlight=False)
    if not told:
        console.print(f"{case.op}[{case.backend}] is the same as the reference", markup=False, soft_wrap=True)
        if "between" in case.about:
            console.print("It failed by a law between calls, which is run again:", markup=False, soft_wrap=True)
            _run_law(file, backend)
        return
    _show(console, case, told)
    raise SystemExit(1)


def _run_law(file: Path, backend: str | None) -> NoReturn:
    """Run a law's test again, on the example that failed; exit with what came of it."""
    import importlib.util
    import os
    import subprocess
    import sys

    from ddtree.property_tests.cases import Law

    try:
        law = Law.read(file)
    except ValueError as error:
        raise CannotRun(str(error)) from error
    if backend is not None:
        raise CannotRun(f"{file} is a law of {law.about['test']}: it is run on what it was run on, without --backend")
    missing = [library for library in ("pytest", "hypothesis") if importlib.util.find_spec(library) is None]
    if missing:
        raise CannotRun(f"running a law needs {' and '.join(missing)}: pip install 'ddtree[test]'")
    for what in ("failed", "seed", "blob", "tolerance", "commit", "versions"):
        if law.about.get(what):
            click.echo(f"{what}: {law.about[what]}")
    specs = [word for spec in law.backends for word in ("--ddtree-backend", spec)]
    words = ["--pyargs", law.node, *specs, "--ddtree-again", str(file)]
    click.echo(f"pytest {shlex.join(words)}")
    options = ["-q", "--no-header", "-p", "no:cacheprovider"]
    environment = os.environ | {"PYTEST_ADDOPTS": ""}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, *words],
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    click.echo(done.stdout, nl=False)
    if done.returncode not in (0, 1):
        raise CannotRun(f"{law.about['test']} could not be run again")
    click.echo("the law holds on the example" if done.returncode == 0 else "the law is still broken")
    raise SystemExit(done.returncode)


def _show(console: Console, case: Case, told: str) -> None:
    """What differs, what was given, and the place side by side."""
    import numpy as np

    from ddtree.property_tests.cases import named_leaves
    from ddtree.trees import Acceptance, DraftTree

    console.print(
        f"{case.op}[{case.backend}] differs from the reference", style="bold red", markup=False, soft_wrap=True
    )
    console.print(told, markup=False, soft_wrap=True)
    given = [
        f"{name.lstrip('/')} {value.dtype} {value.shape}" if isinstance(value, np.ndarray) else f"{name[1:]}={value}"
        for name, value in named_leaves("", case.arguments)
    ]
    console.print(f"\ngiven: {', '.join(given)}", markup=False)
    for what in ("test", "seed", "blob", "tolerance", "commit", "versions"):
        if case.about.get(what):
            console.print(f"{what}: {case.about[what]}", markup=False, soft_wrap=what in ("test", "blob"))
    if case.error:
        return
    console.print()
    if isinstance(case.expected, DraftTree) and isinstance(case.got, DraftTree):
        _show_tree(console, case.expected, case.got, case.backend)
    elif isinstance(case.expected, Acceptance) and isinstance(case.got, Acceptance):
        _show_acceptance(console, case)
    else:
        _show_arrays(console, case)


def _table(console: Console, title: str, head: Sequence[str], rows: Sequence[tuple[bool, Sequence[str]]]) -> None:
    """Rows of cells; those marked stand out."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    console.print(title, markup=False)
    table = Table("", *head, box=box.SIMPLE_HEAD)
    for marked, cells in rows:
        style = "bold red" if marked else ""
        table.add_row(*(Text(cell, style) for cell in (">" if marked else "", *cells)))
    console.print(table)


def _show_tree(console: Console, expected: DraftTree, got: DraftTree, backend: str) -> None:
    """The nodes about the first that differs, by rank path, token and score."""
    import numpy as np

    columns = "token_ids", "parents", "ranks", "scores"
    if any(np.shape(getattr(got, c)) != getattr(expected, c).shape for c in columns):
        return  # the message has said so
    B, N = expected.token_ids.shape
    sides = [[[_node(tree, b, i) for i in range(N)] for b in range(B)] for tree in (expected, got)]
    wrong = [(b, i) for b in range(B) for i in range(N) if sides[0][b][i] != sides[1][b][i]]
    if not wrong:
        console.print("rank paths, tokens and scores are equal: only what follows from them differs")
        return
    b, i = wrong[0]
    shown = range(max(i - ROWS_BEFORE, 0), min(i + ROWS_AFTER, N))
    head = ["node", "reference\nrank path", "\ntoken", "\nscore", f"{backend}\nrank path", "\ntoken", "\nscore"]
    rows = [((b, j) in wrong, [str(j), *sides[0][b][j], *sides[1][b][j]]) for j in shown]
    _table(console, f"request {b}, node {i} is the first that differs; {len(wrong)} of {B * N} do", head, rows)


def _node(tree: DraftTree, b: int, i: int) -> tuple[str, str, str]:
    """Rank path, token and score of a node; of an unused slot, dashes."""
    if i >= tree.node_counts[b]:
        return "-", "-", "-"
    try:
        path = f"({', '.join(map(str, tree.rank_path(b, i)))})"
    except (ValueError, IndexError):
        path = f"no path: parent {tree.parents[b, i]}"
    return path, str(tree.token_ids[b, i]), repr(float(tree.scores[b, i]))


def _show_acceptance(console: Console, case: Case) -> None:
    """Each field of the first request that differs."""
    from dataclasses import fields

    names = [f.name for f in fields(case.expected)]
    for b in range(len(case.expected.lengths)):
        sides = [[str(getattr(side, n)[b].tolist()) for n in names] for side in (case.expected, case.got)]
        if sides[0] != sides[1]:
            rows = [(e != g, (n, e, g)) for n, e, g in zip(names, *sides, strict=True)]
            _table(console, f"request {b} is the first that differs", ["", "reference", case.backend], rows)
            return


def _show_arrays(console: Console, case: Case) -> None:
    """The row of the first wrong element, or of the worst where results need only be near."""
    import numpy as np

    from ddtree.property_tests.cases import RESULTS

    sides = [value if isinstance(value, tuple) else (value,) for value in (case.expected, case.got)]
    for name, expected, got in zip(RESULTS[case.op], *sides, strict=False):
        if not isinstance(got, np.ndarray) or got.shape != expected.shape or got.dtype != expected.dtype:
            continue  # the message has said so
        near = case.op in ("topk_log_probs", "verify_attention") and np.issubdtype(expected.dtype, np.inexact)
        if near:
            same = (expected == got) | (np.isnan(expected) & np.isnan(got))
        else:
            same = expected.view(f"u{expected.itemsize}") == got.view(f"u{got.itemsize}")
        if same.all():
            continue
        with np.errstate(invalid="ignore"):
            off = np.nan_to_num(np.abs(expected.astype(np.float64) - got.astype(np.float64)), nan=np.inf)
        off = np.where(same, 0.0, off)
        place = tuple(int(i) for i in (np.unravel_index(off.argmax(), off.shape) if near else np.argwhere(~same)[0]))
        at = place[-1]
        shown = range(max(at - ROWS_BEFORE, 0), min(at + ROWS_AFTER, expected.shape[-1]))
        rows = []
        for j in shown:
            cell = (*place[:-1], j)
            error = [f"{off[cell]:.3g}"] if near else []
            rows.append(
                (not same[cell] if not near else j == at, [str(list(cell)), *_numbers(expected, got, cell), *error])
            )
        what = f"worst element {list(place)}, off by {off[place]:.3g}" if near else f"first wrong element {list(place)}"
        head = ["element", "reference", case.backend, *(["off by"] if near else [])]
        _table(console, f"{name}: {what}; {int((~same).sum())} of {same.size} differ", head, rows)
        return


def _numbers(expected: Any, got: Any, cell: tuple[int, ...]) -> list[str]:
    return [str(side[cell]) for side in (expected, got)]
