"""``ddtree sweep``: τ of many policies on recorded traces."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from ddtree.checks import INT32_MAX
from ddtree.cli.check import CannotRun
from ddtree.cli.limits import MOST_DEPTH, MOST_NODES

if TYPE_CHECKING:
    from rich.table import Table

    from ddtree.analysis.sweep import SweepTable
    from ddtree.analysis.trace import Trace

MANY = 0.05
"""Share of the rounds that used the last rank from which on a reader is told."""


def numbers(least: int, most: int) -> Callable[[Any, Any, str | None], tuple[int, ...]]:
    """Whole numbers, ``least`` … ``most``, with commas between them."""

    def parse(ctx: Any, param: Any, value: str | None) -> tuple[int, ...]:
        try:
            numbers = tuple(dict.fromkeys(int(part) for part in value.split(","))) if value is not None else ()
        except ValueError:
            raise click.BadParameter(f"{value!r} must be whole numbers with commas between them") from None
        for number in numbers:
            if not least <= number <= most:
                raise click.BadParameter(f"{number} must be in {least} … {most:,}")
        return numbers

    return parse


@click.command()
@click.argument("traces", type=click.Path(path_type=Path, file_okay=False), nargs=-1, metavar="[TRACE]...")
@click.option("--out", type=click.Path(path_type=Path, file_okay=False), required=True, metavar="DIR")
@click.option(
    "--budgets",
    callback=numbers(0, MOST_NODES),
    metavar="N,…",
    default="8,16,32,64,128,256,512",
    show_default=True,
    help="Node budgets.",
)
@click.option(
    *("--depth", "depths"),
    callback=numbers(1, MOST_DEPTH),
    metavar="N,…",
    help="Limits of L; all that was recorded if left out.",
)
@click.option(
    *("--topk", "topks"),
    callback=numbers(1, INT32_MAX),
    metavar="N,…",
    help="Limits of K; all that was recorded if left out.",
)
@click.option(
    "--policy",
    "policies",
    multiple=True,
    default=("tree", "chain"),
    show_default=True,
    metavar="KIND",
    help="tree, chain, spine-first, all-children:WIDTH, confidence:CUTOFF, cost:FILE, cost-clamped:FILE, static:TRACE. "
    "Several times.",
)
@click.option("--max-new-tokens", type=click.IntRange(1), help="Replay the first N of each prompt.", metavar="N")
@click.option("--jobs", type=click.IntRange(1), default=1, show_default=True, help="Processes.")
def sweep(
    traces: tuple[Path, ...],
    out: Path,
    budgets: tuple[int, ...],
    depths: tuple[int, ...],
    topks: tuple[int, ...],
    policies: tuple[str, ...],
    max_new_tokens: int | None,
    jobs: int,
) -> None:
    """Replay policies on each TRACE, and tabulate and draw τ.

    Without a TRACE, that of the shipped pair. Writes sweep.csv, sweep.json and figures to DIR, and every finished cell
    to DIR/cells, so that a sweep that was interrupted, or is widened, computes only what is missing.

    cost:FILE is cost-aware trees under measured latencies: FILE is the JSON that ddtree.costs.CostModel.save writes.
    Time passes of your target with ddtree.costs.measure_passes, and make a model of them with fit_cost_model. At
    contexts that were not measured, cost-clamped:FILE takes the nearest costs, and cost:FILE fails. Of the default
    budgets those of more nodes than were measured are left out for both.

    static:TRACE is one tree for all rounds, fitted to what that TRACE accepts. Where it is the one that is replayed, τ
    is in-sample, and flattered: fit on other prompts.

    The column "used K − 1" is the share of the rounds whose tree has a candidate of the last rank that the policy sees:
    with a wider record, or --topk, those trees might have been others.
    """
    from rich.console import Console

    from ddtree.analysis.figures import plot_sweep
    from ddtree.analysis.outputs import make_folder
    from ddtree.analysis.sweep import policy_grid, write_sweep
    from ddtree.analysis.sweep import sweep as run_sweep
    from ddtree.analysis.trace import open_trace, shipped_trace

    try:
        opened = [open_trace(path) for path in traces] or [shipped_trace()]
        by_default = click.get_current_context().get_parameter_source("budgets") is ParameterSource.DEFAULT
        try:
            grid = policy_grid(
                *(policies, budgets),
                depths=depths,
                topks=topks,
                depth=opened[0].manifest.depth,
                as_measured=by_default,
            )
        except OSError as error:
            raise CannotRun(f"--policy: {error.filename}: {error.strerror}") from error
        make_folder(out, "--out", names=("sweep.csv", "sweep.json"))
        with _pool(jobs) as executor:
            table = run_sweep(opened, grid, executor, folder=out, max_new_tokens=max_new_tokens)
    except (ValueError, TypeError) as error:
        raise CannotRun(str(error)) from error
    written = [*write_sweep(table, out), *plot_sweep(table, out)]
    console = Console(highlight=False, width=None if sys.stdout is not None and sys.stdout.isatty() else 120)
    console.print(_shown(table))
    left_out = _left_out(grid, budgets) if by_default else ()
    for line in (LAST_RANK, last_rank_note(table.records()), *left_out, *_in_sample(policies, opened)):
        if line:
            console.print(line, markup=False, soft_wrap=True)
    for trace in opened:
        if not trace.manifest.complete:
            console.print(f"{trace.name} is not finished: more may have been recorded by now", markup=False)
    console.print(f"wrote {', '.join(path.name for path in written)} to {out}", markup=False, soft_wrap=True)


LAST_RANK = "used K − 1: rounds whose tree has a candidate of the last rank that the policy sees."


def last_rank_note(records: list[dict[str, Any]]) -> str:
    """Say in a sentence of which policies a wider record might have changed many of the trees; "" of none."""
    several = len({r.get("trace") for r in records}) > 1
    budgets: dict[str, list[int]] = {}
    for r in records:
        if r["used_last_rank"] > MANY * r["n_rounds"]:
            budgets.setdefault(f"{r['policy']} on {r['trace']}" if several else r["policy"], []).append(r["budget"])
    if not budgets:
        return ""
    listed = "; ".join(f"{policy} of {', '.join(map(str, those))}" for policy, those in budgets.items())
    return (
        f"More than {MANY:.0%} of the rounds used the last rank, so that a wider record might have changed their "
        f"trees: {listed}."
    )


def _left_out(grid: dict[str, list[Any]], budgets: tuple[int, ...]) -> Iterator[str]:
    """Say which cost models were measured with fewer nodes than the greatest budgets have."""
    for series, policies in grid.items():
        most = max(policy.budget for policy in policies)
        if series.startswith("cost") and most < max(budgets):
            yield f"{series}: without budgets over {most}, which have more nodes than it was measured with."


def _in_sample(policies: tuple[str, ...], traces: list[Trace]) -> Iterator[str]:
    """Say which static trees are measured on the trace that they were fitted to."""
    from ddtree.analysis.trace import open_trace

    for spec in policies:
        kind, _, folder = spec.partition(":")
        if kind == "static":
            fitted = open_trace(folder).digest()
            for trace in traces:
                if trace.digest() == fitted:
                    yield f"{spec} was fitted to {trace.name} itself: its τ there is in-sample, and flattered."


@contextmanager
def _pool(jobs: int) -> Iterator[Any]:
    """Processes of their own, or None for this one."""
    if jobs == 1:
        yield None
        return
    import multiprocessing
    from concurrent.futures import ProcessPoolExecutor

    with ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("spawn")) as executor:
        yield executor


def _shown(table: SweepTable) -> Table:
    """The table for a terminal: what a reader looks at first, and rounds that a wider record might have changed."""
    from rich import box
    from rich.table import Table

    several = len(set(table.trace)) > 1
    shown = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    heads = ["trace"] * several + [
        "policy",
        "budget",
        "τ",
        f"{table.level:.0%} interval",
        "expected",
        "nodes",
        "rounds",
    ]
    for head in (*heads, "used\nK − 1"):
        shown.add_column(head, justify="left" if head in ("trace", "policy") else "right")
    for r in table.records():
        tau, low, high, expected = (_number(r[name], ".2f") for name in ("tau", "low", "high", "expected"))
        share = f"{r['used_last_rank'] / r['n_rounds']:.1%}" if r["n_rounds"] else "-"
        interval = f"{low} … {high}" if r["low"] is not None else "-"
        row = [r["policy"], str(r["budget"]), tau, interval, expected, _number(r["nodes"], ".1f"), f"{r['n_rounds']:,}"]
        shown.add_row(*([r["trace"]] if several else []), *row, share)
    return shown


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else f"{value:{form}}"
