"""``ddtree bench``: a backend's times beside its peers'."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ddtree.cli.check import CannotRun, backend_here

if TYPE_CHECKING:
    from rich.console import Console

    from ddtree.backends import Backend


@click.command()
@click.option("--backend", metavar="NAME", help="One of ddtree's, or MODULE or MODULE:OBJECT; by default the fastest.")
@click.option("--ops", metavar="OP,...", help="Operations to time; all that it has if left out.")
@click.option("--repeats", type=click.IntRange(3), default=30, show_default=True, help="Timed calls of each case.")
@click.option("--compiled", is_flag=True, help="Also time what torch.compile makes, for some sizes: a minute.")
@click.option(
    "--output", type=click.Path(path_type=Path, file_okay=False), metavar="DIR", help="Write JSON and figures."
)
def bench(backend: str | None, ops: str | None, repeats: int, compiled: bool, output: Path | None) -> None:
    """Time a backend beside its peers, at sizes of a decoding round.

    Each operation must first agree with the reference: what is wrong is not timed, and the command exits with 1. On a
    GPU, times are of CUDA graphs. Peers that need torch or Triton are left out where those are not installed.
    """
    from rich.console import Console

    from ddtree.analysis.benchmarks.bench import NotEqualError, measure
    from ddtree.analysis.benchmarks.grid import EVERY_CASE, cases_for
    from ddtree.analysis.benchmarks.report import caption, left_out, tables_of, write_report
    from ddtree.analysis.outputs import make_folder
    from ddtree.backends import BACKENDS

    console = Console(highlight=False, width=None if sys.stdout is not None and sys.stdout.isatty() else 160)
    found = backend_here(_fastest_here() if backend is None else backend)
    only = () if ops is None else tuple(op.strip() for op in ops.split(","))
    # of ours, kernels of a model's layers too
    available = dict.fromkeys(
        (*found.ops, *(getattr(found.namespace, "__all__", ()) if found.name in BACKENDS else ()))
    )
    missing = [op for op in only if op not in available]
    if missing:
        raise CannotRun(f"{found.name} has no {', '.join(missing)}; it has: {', '.join(available)}")
    cases = cases_for(available, on_gpu=found.array_kind == "cupy", only=only)
    if not cases:
        timed = ", ".join(dict.fromkeys(op for case in EVERY_CASE for op in case.ops))
        raise CannotRun(f"no case can be timed of {', '.join(only) or ', '.join(available)}; these are: {timed}")
    _agree(console, found, tuple(dict.fromkeys(op for case in cases for op in case.ops if op in found.ops)))
    make_folder(output, names=("bench.json", "bench.md"))
    with console.status("") as status:
        try:
            report = measure(
                *(found, cases),
                repeats=repeats,
                slow_peers=compiled,
                on_case=lambda case: status.update(f"{case.name}: {case.label}"),
            )
        except NotEqualError as error:
            raise click.ClickException(f"{error}. Nothing is timed that is wrong.") from error
    written = write_report(report, output) if output and not report.interrupted else []
    for table in tables_of(report):
        console.print(table)
    console.print(caption(report), markup=False)
    for reason in left_out(report):
        console.print(f"left out: {reason}", markup=False)
    for path in written:
        console.print(f"wrote {path}", soft_wrap=True, markup=False)
    if report.interrupted:
        click.echo("Interrupted: some cases are missing, and nothing was written.", err=True)
        raise SystemExit(130)


def _fastest_here() -> str:
    from ddtree.analysis.environment import backend_states

    usable = {state.name for state in backend_states() if state.reason is None}
    return next(name for name in ("cupy", "numba_cpu", "reference") if name in usable)


def _agree(console: Console, found: Backend, ops: tuple[str, ...]) -> None:
    """Compare with the reference on drawn inputs first; exit with 1 where they differ."""
    from ddtree.property_tests.harness import HypothesisMissingError, check_operation

    with console.status("") as status:
        for op in ops:
            status.update(f"{op}: beside the reference")
            try:
                agreement = check_operation(found.name, op, examples=50)
            except HypothesisMissingError as error:
                raise CannotRun(str(error)) from error
            if agreement.mismatches:
                raise click.ClickException(
                    f"{op} of {found.name} differs from the reference, so that nothing is timed: {agreement.first}. "
                    f"Find the smallest case by: ddtree check --backend {found.name} --ops {op}"
                )
