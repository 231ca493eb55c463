"""``python -m ddtree.property_tests.project.fuzz``: every target to its share of some bytes, and a closing table.

Exits with 1 if anything crashed; each crash is kept in a file, with the command that runs it again.
"""

from __future__ import annotations

import datetime
import importlib.util
import json
import math
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import click
from rich import box
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table

from ddtree.property_tests.project.fuzz.targets import TARGETS
from ddtree.property_tests.project.fuzz.worker import Tally, try_one

MODULE = "ddtree.property_tests.project.fuzz"
_PLAIN = f"import sys; from {MODULE} import worker; worker.main(sys.argv[1:])"
# guided by the coverage of what parses, and so seen before it is first imported; all of ddtree would only take time
_GUIDED = f"""
import sys, atheris
with atheris.instrument_imports(include=["ddtree.kdtr", "ddtree.model", "ddtree.cli", "ddtree.checks",
                                         "ddtree.property_tests.cases"]):
    import ddtree.cli, ddtree.kdtr, ddtree.model, ddtree.property_tests.cases
from {MODULE} import worker
worker.main(sys.argv[1:])
"""


@click.command()
@click.option("--bytes", "budget", type=click.IntRange(1), default=10_000_000, show_default=True, help="Of all inputs.")
@click.option("--seed", type=click.IntRange(0), default=0, show_default=True)
@click.option("--target", "names", multiple=True, type=click.Choice(list(TARGETS)), help="All if left out.")
@click.option("--engine", type=click.Choice(["atheris", "random"]), help="atheris where it is installed.")
@click.option("--crashes", type=click.Path(path_type=Path), default=Path("fuzz_crashes"), show_default=True)
@click.option("--results", type=click.Path(path_type=Path), help="A Markdown file for the closing table.")
@click.option("--one", nargs=2, metavar="TARGET FILE", help="Run one input again, and nothing else.")
def main(
    budget: int,
    seed: int,
    names: tuple[str, ...],
    engine: str | None,
    crashes: Path,
    results: Path | None,
    one: tuple[str, str] | None,
) -> None:
    """Fuzz what parses bytes: KDTR files, checkpoints, imports, cases and the command line."""
    if one:
        raise SystemExit(_one(*one))
    engine = engine or ("atheris" if importlib.util.find_spec("atheris") else "random")
    console, chosen = Console(highlight=False), [TARGETS[name] for name in names or TARGETS]
    whole = sum(target.share for target in chosen)
    crashes.mkdir(parents=True, exist_ok=True)
    tallies = []
    columns = TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[told]}"), TimeElapsedColumn()
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        for target in chosen:
            share = math.ceil(budget * target.share / whole)
            task = progress.add_task(target.name, total=share, told="")

            def show(tally: Tally, task: TaskID = task) -> None:
                told = f"{tally.cases:,} cases, {len(tally.crashes)} crashes"
                progress.update(task, completed=tally.bytes, told=told)

            tallies.append(_fuzzed(target.name, share, seed, crashes, engine, show))
            console.print(f"{target.name}: {_said(tallies[-1])}", markup=False, soft_wrap=True)
    console.print(_table(tallies))
    found = {path: message for tally in tallies for path, message in tally.crashes.items()}
    for path, message in found.items():
        target_name = Path(path).name.partition("-")[0]
        console.print(
            f"{message}\n  again: python -m {MODULE} --one {target_name} {path}", markup=False, soft_wrap=True
        )
    if results:
        results.write_text(_markdown(tallies, seed), encoding="utf-8")
    raise SystemExit(1 if found or any(tally.bytes == 0 for tally in tallies) else 0)


def _one(name: str, file: str) -> int:
    if name not in TARGETS or not Path(file).is_file():
        raise click.UsageError(f"--one takes one of {', '.join(TARGETS)} and a file, got {name} {file}")
    outcome, told = try_one(TARGETS[name], Path(file).read_bytes())
    click.echo(told or f"{name}: {outcome}", nl=not told)
    return int(outcome == "crash")


def _fuzzed(name: str, budget: int, seed: int, crashes: Path, engine: str, show: Callable[[Tally], None]) -> Tally:
    """Let a process of its own do it: a crash of the interpreter is then a result like any other."""
    command = [sys.executable, "-c", _GUIDED if engine == "atheris" else _PLAIN]
    command += [name, str(budget), str(seed), str(crashes), engine]
    tally = Tally(name)
    with tempfile.TemporaryFile() as errors:
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True) as process:
            assert process.stdout is not None
            for line in process.stdout:
                if line.startswith('{"target"'):
                    tally = Tally(**json.loads(line))
                    tally.outcomes = Counter(tally.outcomes)
                    show(tally)
        if process.returncode != 0:
            errors.seek(0)
            last = errors.read().decode(errors="replace").strip().splitlines()[-1:]
            tally.crashes[f"{crashes}/{name}-process"] = (
                f"the process ended with {process.returncode}: {' '.join(last)}"
            )
    return tally


def _said(tally: Tally) -> str:
    each = ", ".join(f"{what} {n:,}" for what, n in sorted(tally.outcomes.items()))
    return f"{tally.cases:,} cases, {tally.bytes:,} bytes in {tally.seconds:.0f} s ({tally.engine}): {each}"


HEAD = ("target", "engine", "cases", "bytes", "read", "documented errors", "crashes", "seconds")


def _rows(tallies: list[Tally]) -> list[tuple[str, ...]]:
    rows = [
        (t.target, t.engine, *(f"{n:,}" for n in (t.cases, t.bytes, t.outcomes["ok"], t.errors, len(t.crashes))),
         f"{t.seconds:.0f}") for t in tallies
    ]  # fmt: skip
    columns = zip(*((t.cases, t.bytes, t.outcomes["ok"], t.errors, len(t.crashes)) for t in tallies), strict=True)
    sums = [sum(column) for column in columns]
    return [*rows, ("all", "", *(f"{n:,}" for n in sums), f"{sum(t.seconds for t in tallies):.0f}")]


def _table(tallies: list[Tally]) -> Table:
    table = Table(box=box.SIMPLE_HEAD)
    for i, head in enumerate(HEAD):
        table.add_column(head.replace(" ", "\n"), justify="left" if i < 2 else "right", no_wrap=True)
    for row in _rows(tallies):
        table.add_row(*row)
    return table


def _markdown(tallies: list[Tally], seed: int) -> str:
    from ddtree.analysis.environment import commit, versions

    libraries = ", ".join(f"{name} {version}" for name, version in versions().items() if version)
    lines = ["| " + " | ".join(row) + " |" for row in (HEAD, ("---",) * len(HEAD), *_rows(tallies))]
    date = datetime.datetime.now(datetime.UTC).date()
    crashes = sum(len(tally.crashes) for tally in tallies)
    errors = (
        f"{crashes} crashed, the other errors were documented ones" if crashes else "every error was a documented one"
    )
    return "\n".join(
        [
            "# What fuzzing last found",
            "",
            f"Seed {seed}, {date}, on top of commit {commit() or 'unknown'}; {libraries}.",
            "",
            *lines,
            "",
            f'Of the inputs, "read" were still sound; {errors}. A crash is also an input that',
            "hangs, takes memory out of proportion to its size, or leaves a half-written file. `make fuzz` runs it.",
            "",
        ]
    )


if __name__ == "__main__":
    main()
