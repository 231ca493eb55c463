"""``ddtree check``: a backend beside the reference on drawn inputs, without pytest."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from ddtree.backends import Backend
    from ddtree.property_tests.harness import Agreement


class CannotRun(click.ClickException):
    """What was asked for cannot be done here; the message is one line."""

    exit_code = 2


def keep_inputs(inputs: Iterable[str | Path], outputs: Iterable[Path]) -> None:
    """Refuse an output that is one of the inputs, by whatever name."""
    there = [Path(name) for name in inputs if Path(name).exists()]
    for output in outputs:
        if output.exists() and any(output.samefile(path) for path in there):
            raise CannotRun(f"{output} is an input, and would be overwritten: name another output")


def backend_here(spec: str) -> Backend:
    """The backend of that name, from the current folder too; an error if it cannot run here."""
    if "" not in sys.path:
        sys.path.insert(0, "")  # the command, unlike `python -m ddtree`, does not look there
    from ddtree.backends import BackendUnavailable, get_backend
    from ddtree.property_tests._backends import why_not

    try:
        found = get_backend(spec)
    except (BackendUnavailable, ValueError) as error:
        raise CannotRun(str(error)) from error
    except Exception as error:  # whatever a module of one's own raises when it is imported
        raise CannotRun(f"importing {spec} raised {type(error).__name__}: {error}") from error
    if not found.ops:
        raise CannotRun(f"backend {spec!r} has no operation yet")
    reason = why_not(spec)
    if reason:
        raise CannotRun(f"backend {spec!r} cannot run here: {reason}")
    return found


@click.command()
@click.option("--backend", required=True, metavar="NAME", help="One of ddtree's, or MODULE or MODULE:OBJECT.")
@click.option("--ops", metavar="OP,...", help="Operations to check; all that it has if left out.")
@click.option("--examples", type=click.IntRange(1), default=200, show_default=True, help="Inputs an operation.")
@click.option("--seed", type=int, default=0, show_default=True, help="Of the inputs.")
@click.option(
    "--output",
    type=click.Path(path_type=Path),
    default=Path("ddtree_failures"),
    show_default=True,
    metavar="DIR",
    help="Where the smallest failing cases go.",
)
def check(backend: str, ops: str | None, examples: int, seed: int, output: Path) -> None:
    """Compare a backend with the reference on drawn inputs.

    A case that differs is shrunk and written to DIR for `ddtree replay`. Exits with 1 if any differs, and with 2 if
    the backend cannot run here.
    """
    from rich.console import Console

    from ddtree.property_tests.harness import HypothesisMissingError

    found = backend_here(backend)
    wanted = found.ops if ops is None else tuple(op.strip() for op in ops.split(","))
    missing = [op for op in wanted if op not in found.ops]
    if missing:
        raise CannotRun(f"{backend} has no {', '.join(missing)}; it has: {', '.join(found.ops)}")
    console = Console(highlight=False)
    try:
        agreements = _run(console, backend, wanted, examples, seed, output)
    except HypothesisMissingError as error:
        raise CannotRun(str(error)) from error
    console.print(_table(agreements))
    wrong = [a for a in agreements if a.mismatches]
    for a in wrong:
        console.print(f"{a.op}: {a.first}", markup=False, soft_wrap=True)
        console.print(f"  case:  {a.case}\n  again: ddtree replay {a.case}", markup=False, soft_wrap=True)
    if wrong:
        raise SystemExit(1)
    console.print(f"{backend} agrees with the reference.", markup=False)


def _run(
    console: Console, backend: str, ops: tuple[str, ...], examples: int, seed: int, output: Path
) -> list[Agreement]:
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    from ddtree.property_tests.harness import check_operation

    columns = SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    agreements = []
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("", total=examples)
        for op in ops:
            progress.reset(task, description=op)
            agreements.append(
                check_operation(
                    backend,
                    op,
                    examples=examples,
                    seed=seed,
                    folder=output,
                    on_example=lambda: progress.advance(task),
                    on_shrink=lambda: progress.update(task, description="shrinking"),
                )
            )
    return agreements


def _table(agreements: list[Agreement]) -> Table:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD)
    table.add_column("operation", no_wrap=True)
    table.add_column("examples", justify="right")
    table.add_column("mismatches", justify="right")
    table.add_column("")
    for a in agreements:
        verdict = Text("DIFFERS", "bold red") if a.mismatches else Text("ok", "green")
        table.add_row(a.op, f"{a.examples:,}", f"{a.mismatches:,}", verdict)
    return table
