"""``ddtree pay``: would a tree pay, by a recorded trace."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ddtree.cli.check import CannotRun
from ddtree.cli.limits import MOST_NODES
from ddtree.cli.sweep import last_rank_note, numbers

if TYPE_CHECKING:
    from rich.table import Table

    from ddtree.analysis.calibration import CalibrationTable
    from ddtree.analysis.pay import PayTable


PAYS = (
    "pays below: τ over that of the best chain. A policy is faster than that chain while a round of it costs less than "
    "that many of the chain's; where it is under 1, only if its round is cheaper."
)
REACHED = (
    "tested: rounds that came to this depth with more than one token left to emit. The last one allowed is the "
    "target's own, and no draft is compared with it; so depth 1 has fewer than there are rounds."
)


@click.command()
@click.argument("trace", type=click.Path(path_type=Path, file_okay=False), required=False)
@click.option(
    "--budgets",
    callback=numbers(1, MOST_NODES),
    metavar="N,…",
    default="1,2,4,8,16,32,64,128,256,512",
    show_default=True,
    help="Node budgets of the trees.",
)
@click.option(
    "--out", type=click.Path(path_type=Path, file_okay=False), metavar="DIR", help="Write pay.json and figures."
)
@click.option("--format", "kind", type=click.Choice(["svg", "pdf", "png"]), default="svg", show_default=True)
def pay(trace: Path | None, budgets: tuple[int, ...], out: Path | None, kind: str) -> None:
    """Say from a TRACE whether a tree would pay, and why.

    Without a TRACE, that of the shipped pair. Shows τ of chains and trees, as the drafter's probabilities promise it
    and as the target's choices give it; where the choice stands among the candidates; and how far the drafter can be
    believed. Ranks and the conclusion are of one tree: that of the largest budget up to 64, or the smallest there is.
    Where many rounds had a tree with a candidate of the last recorded rank, K − 1, it says so: with a wider record
    those trees might have been others.
    """
    from rich.console import Console

    from ddtree.analysis.calibration import calibration_table, reliability_table
    from ddtree.analysis.pay import would_a_tree_pay
    from ddtree.analysis.trace import open_trace, shipped_trace

    try:
        opened = shipped_trace() if trace is None else open_trace(trace)
        with Console(stderr=True).status(f"walking {opened.name}"):
            table = would_a_tree_pay(opened, budgets)
            calibration, reliability = calibration_table(opened), reliability_table(opened)
    except (ValueError, TypeError) as error:
        raise CannotRun(str(error)) from error
    console = Console(highlight=False)
    for shown, note in ((_budgets(table), PAYS), (_choices(table), REACHED), (_calibration(calibration), "")):
        console.print(shown)
        if note:
            console.print(f"{note}\n", markup=False)
    console.print(_verdict(table), markup=False)
    if note := last_rank_note(table.records()):
        console.print(note, markup=False)
    if not opened.manifest.complete:
        console.print(f"{opened.name} is not finished: more may have been recorded by now", markup=False)
    if out is not None:
        parts = {"budgets": table, "choices": table.choices, "calibration": calibration, "reliability": reliability}
        written = _write(out, kind, {"trace": opened.name, "level": table.level}, parts)
        console.print(f"wrote {', '.join(path.name for path in written)} to {out}", markup=False, soft_wrap=True)


def _write(out: Path, kind: str, about: dict[str, Any], parts: dict[str, Any]) -> list[Path]:
    """Write the tables and their figures, each whole or not at all; return the paths."""
    from ddtree.analysis import figures
    from ddtree.kdtr import atomic_write

    out.mkdir(parents=True, exist_ok=True)
    document = about | {name: table.records() for name, table in parts.items()}
    with atomic_write(out / "pay.json") as file:
        file.write(json.dumps(document, indent=1, ensure_ascii=False, allow_nan=False).encode() + b"\n")
    drawn: dict[str, Any] = {
        "pay": figures.plot_pay(parts["budgets"]),
        "calibration": figures.plot_calibration_by_depth(parts["calibration"]),
        "reliability": figures.plot_reliability(parts["reliability"]),
    }
    return [out / "pay.json", *(figures.save(axes, out / f"{name}.{kind}") for name, axes in drawn.items())]


def _verdict(table: PayTable) -> str:
    """What follows for the tree that is walked in the table of choices, and why it is that one."""
    budget = table.choices.budget
    row = next(r for r in table.records() if (r["policy"], r["budget"]) == ("tree", budget))
    chains = [r for r in table.records() if r["policy"] == "chain" and r["tau"] is not None]
    if row["tau"] is None or not chains:
        return "No rounds: the trace has no prompt of two new tokens, or drafts of no depth."
    best = max(chains, key=lambda r: r["tau"])
    between = "" if row["pays_low"] is None else f" ({row['pays_low']:.2f}–{row['pays_high']:.2f})"
    which = "the largest budget up to 64" if budget <= 64 else "the smallest budget"
    return (
        f"A tree of {budget} {'node' if budget == 1 else 'nodes'}, {which} of those asked for, emits "
        f"{row['pays_below']:.2f}{between} times as many tokens a round as the best chain, of depth {best['budget']}: "
        + _advice(row, any(r["pays_below"] > 1 for r in table.records() if r["policy"] == "tree"))
    )


def _advice(row: dict[str, Any], larger_pays: bool) -> str:
    """Whether to use the tree of a row of the table, and when."""
    if row["pays_below"] <= 1:
        instead = " Other budgets of the table do better." if larger_pays else ""
        return (
            f"do not use a tree {'of this size ' if larger_pays else ''}here, the chain gives as much or more.{instead}"
        )
    unsure = row["pays_low"] is not None and row["pays_low"] <= 1
    return "it is faster while its round costs less than that many of the chain's." + (
        " The interval holds 1, so that it may be no better: record more prompts." if unsure else ""
    )


def _budgets(table: PayTable) -> Table:
    level = f"{table.level:.0%} interval"
    shown = _table(
        "τ, tokens emitted a round", "policy", "budget", "expected", "τ", level, "pays below", level, "rounds"
    )
    for r in table.records():
        ends = [_ends(r[low], r[high]) for low, high in (("low", "high"), ("pays_low", "pays_high"))]
        cells = (_number(r["expected"]), _number(r["tau"]), ends[0], _number(r["pays_below"]), ends[1])
        shown.add_row(r["policy"], str(r["budget"]), *cells, f"{r['n_rounds']:,}")
    return shown


def _choices(table: PayTable) -> Table:
    choices = table.choices
    shown = _table(
        f"Rank of the target's choice, given that the path so far was accepted (tree: of {choices.budget} nodes)",
        *("path", "depth", "tested", "rank 1", "2", "3–4", "5–8", "later"),
        *("2–8, if\nnot 1", f"{choices.level:.0%}\ninterval"),
    )
    for r in choices.records():
        bands = [(1, 2), (2, 3), (3, 5), (5, 9)]
        shares = [None if not r["n"] else sum(r[f"rank_{k}"] for k in range(*band)) for band in bands]
        cells = [_share(s) for s in (*shares, r["later"], r["rescued"])]
        shown.add_row(r["path"], str(r["depth"]), f"{r['n']:,}", *cells, _ends(r["low"], r["high"], "{:.0%}"))
    return shown


def _calibration(table: CalibrationTable) -> Table:
    shown = _table(
        "The drafter's calibration along accepted paths",
        *("depth", "positions", "expected", "realised", f"{table.level:.0%}\ninterval", "Brier\nscore"),
        *("temper-\nature", f"{table.level:.0%}\ninterval"),
    )
    for r in table.records():
        if r["given"] == "accepted path":
            ends = _ends(r["low"], r["high"], "{:.0%}"), _ends(r["temperature_low"], r["temperature_high"])
            cells = (_share(r["expected"]), _share(r["realised"]), ends[0], _number(r["brier"], "{:.3f}"))
            shown.add_row(str(r["depth"]), f"{r['n']:,}", *cells, _number(r["temperature"]), ends[1])
    return shown


def _table(title: str, *columns: str) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, title=title, title_justify="left", pad_edge=False, collapse_padding=True)
    for column in columns:
        table.add_column(column, justify="left" if column in ("policy", "path") else "right", no_wrap=True)
    return table


def _number(value: float | None, form: str = "{:.2f}") -> str:
    return "-" if value is None else form.format(value)


def _share(value: float | None) -> str:
    return _number(value, "{:.1%}")


def _ends(low: float | None, high: float | None, form: str = "{:.2f}") -> str:
    return "-" if low is None or high is None else f"{form.format(low)}–{form.format(high)}"
