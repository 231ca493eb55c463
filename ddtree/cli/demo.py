"""``ddtree demo``: run everything once, show expected beside got, and write figures."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from ddtree.analysis.demo import Findings, Settings


_WRITTEN = (
    "results.json", "tree.png",
    "tau_by_budget.png", "tau_by_budget_synthetic.png",
    "acceptance_by_depth.png", "acceptance_by_depth_synthetic.png",
)  # fmt: skip


@click.command()
@click.option(
    "--output",
    type=click.Path(path_type=Path),
    default=Path("demo_output"),
    show_default=True,
    metavar="DIR",
    help="Where figures and results.json go.",
)
@click.option("--quick", is_flag=True, help="Fewer texts, budgets and examples.")
def demo(output: Path, quick: bool) -> None:
    """Check decoding and every backend, and plot acceptance.

    Exits with 1 if anything is not as expected, and with 2 if DIR cannot be written.
    """
    from ddtree.analysis.outputs import make_folder

    make_folder(output, names=_WRITTEN)
    from rich.console import Console

    from ddtree.analysis.demo import FULL, QUICK

    console = Console(highlight=False)
    settings = QUICK if quick else FULL
    findings = _run(console, settings)
    written = _write(output, settings, findings)

    console.print(_tau_table(findings))
    console.print(_check_table(findings))
    for found in findings.values():
        for note in found.notes:
            console.print(note, markup=False)
    console.print(f"\nWritten to {output.resolve()}:", markup=False, soft_wrap=True)
    console.print(", ".join(written), markup=False)
    count = sum(len(found.checks) for found in findings.values())
    wrong = [
        f"{name}, {check.name}: {check.got}, should be {check.expected}"
        + (f" ({check.detail})" if check.detail else "")
        for name, found in findings.items()
        for check in found.checks
        if not check.ok
    ]
    if wrong:
        raise click.ClickException("\n  ".join([f"{len(wrong)} of {count} checks failed", *wrong]))
    console.print(f"All {count} checks are as expected.")


def _run(console: Console, settings: Settings) -> dict[str, Findings]:
    """Run the stages; one display shows which is under way, and a line stays of each that is done."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    from ddtree.analysis.demo import STAGES, run_stage

    columns = SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    findings = {}
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("", total=len(STAGES))
        for name in STAGES:
            progress.update(task, description=name)
            found = findings[name] = run_stage(name, settings)
            good = sum(check.ok for check in found.checks)
            console.print(f"{name:<22} {good:>2} of {len(found.checks):>2} checks ok {found.seconds:6.1f} s")
            progress.advance(task)
    return findings


def _write(folder: Path, settings: Settings, findings: dict[str, Findings]) -> list[str]:
    """Write the figures and results.json, each whole or not at all; return the names."""
    from ddtree.analysis.demo import draw
    from ddtree.analysis.environment import devices, versions
    from ddtree.analysis.figures import save
    from ddtree.kdtr import atomic_write

    figures = draw(settings, findings)
    for name, ax in figures.items():
        save(ax, folder / name)

    def as_json(found: Findings) -> dict[str, Any]:
        return {
            "checks": [asdict(check) for check in found.checks],
            "notes": found.notes,
            "synthetic": found.synthetic,
            "tau_by_budget": found.sweep and found.sweep.records(),
            "acceptance_by_depth": found.by_depth and found.by_depth.records(),
            "seconds": round(found.seconds, 2),
            "error": found.error,
        }

    document = {
        "ok": all(check.ok for found in findings.values() for check in found.checks),
        "versions": versions(),
        "devices": devices(),
        "settings": asdict(settings),
        "stages": {name: as_json(found) for name, found in findings.items()},
    }
    with atomic_write(folder / "results.json") as file:
        file.write(json.dumps(document, indent=2, ensure_ascii=False, allow_nan=False).encode() + b"\n")
    return [*figures, "results.json"]


def _tau_table(findings: dict[str, Findings]) -> Table:
    """τ of every sweep: a row a budget, a column a sweep and mode."""
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, title="τ, tokens emitted a round, by node budget", title_justify="left")
    table.add_column("node\nbudget", justify="right")
    columns: dict[str, dict[int, float]] = {}
    for name, found in findings.items():
        for row in found.sweep.records() if found.sweep else []:
            columns.setdefault(f"{name}\n{row['policy']}", {})[row["budget"]] = row["tau"]
    for head in columns:
        table.add_column(head, justify="right")
    for budget in sorted({budget for column in columns.values() for budget in column}):
        values = (column.get(budget) for column in columns.values())
        table.add_row(str(budget), *("-" if value is None else f"{value:.2f}" for value in values))
    return table


def _check_table(findings: dict[str, Findings]) -> Table:
    """Each check: what was expected, what came out."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table("check", "expected", "got", "", box=box.SIMPLE_HEAD)
    for column in table.columns:
        column.overflow = "fold"
    for name, found in findings.items():
        if found.checks:
            table.add_row(Text(name, "bold"))
        for check in found.checks:
            verdict = Text("ok", "green") if check.ok else Text("WRONG", "bold red")
            table.add_row(Text(f"  {check.name}"), Text(check.expected), Text(check.got), verdict)
    return table
