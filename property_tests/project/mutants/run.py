"""Run mutants, say which no test catches, and write ``RESULTS.md``.

``make mutants``, or ``python -m ddtree.property_tests.project.mutants.run`` with options. What runs have found so far
stands in ``.mutants/`` of the current folder, for ``--resume``.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Column, Table

from ddtree.property_tests.project.mutants import Mutant, hand_made, op_of
from ddtree.protocols import OPS

HERE = Path(__file__).parent
RESULTS, EQUIVALENT = HERE / "RESULTS.md", HERE / "EQUIVALENT.md"
FOLDER = Path(".mutants")
"""Where results are kept for ``--resume``, and what numba caches of the code as it is."""

SUITE = [
    *("test_accept_tree.py", "test_build_tree.py", "test_choose_tokens.py", "test_compact_cache.py"),
    *("test_topk_log_probs.py", "test_tree_positions.py", "test_verify_attention.py", "test_visibility.py"),
    "test_field_cases.py",
]
BEYOND_OPERATIONS = [
    *("test_layers.py", "test_model.py", "project/test_checks.py", "project/test_numba_cpu.py"),
    *("test_resident.py", "test_resident_drafters.py", "project/test_model_inputs.py"),
]
"""For mutants made by machine: of the model's layers, of functions that look for faults, and of numba_cpu alone."""

VERDICTS = ("caught", "timed out", "equivalent", "survived")
Change = tuple[str, str, str]
"""A file, and the changed line before and after."""


class TestsFailError(click.ClickException):
    """The tests do not hold for the code as it is, so that a mutant which they fail for shows nothing."""


@dataclass(frozen=True)
class Outcome:
    """What came of a mutant.

    Attributes
    ----------
    verdict : str
        One of ``VERDICTS``.
    by : str
        The test that caught it, or in which its time ended.
    """

    verdict: str
    by: str = ""


def key_of(mutant: Mutant) -> str:
    """What a result is known by from run to run."""
    return hashlib.sha256(f"{mutant.file}\0{mutant.by_hand}\0{mutant.source}".encode()).hexdigest()[:16]


def outcomes(mutants: list[Mutant], *, workers: int, seed: int, folder: Path) -> Iterator[tuple[Mutant, Outcome]]:
    """Run mutants, in one process those that need the simulator and in another one the others.

    Raises
    ------
    TestsFailError
        They do so for a file as it is.
    """
    by_key = {key_of(mutant): mutant for mutant in mutants}
    for simulated in (False, True):
        those = {k: m for k, m in by_key.items() if (m.implementation == "numba_cuda") == simulated}
        if those:
            for answer in answers(those, simulated=simulated, workers=workers, seed=seed, folder=folder):
                yield by_key[answer["id"]], Outcome(answer["verdict"], answer["by"])


def answers(
    mutants: dict[str, Mutant], *, simulated: bool, workers: int, seed: int, folder: Path
) -> Iterator[dict[str, Any]]:
    """What the process answers that forks."""
    environment = os.environ | {
        "OPENBLAS_NUM_THREADS": "1",
        "NUMBA_CACHE_DIR": str(folder.resolve() / "numba"),
        "NUMBA_OPT": "1",  # compiles sooner, and means the same
        "NUMBA_ENABLE_CUDASIM": str(int(simulated)),
        "DDTREE_PROFILE": "simulator" if simulated else "dev",
        "PYTEST_ADDOPTS": "-m 'not large' --ddtree-backend numba_cuda" if simulated else "",
    }
    tests = SUITE if all(m.by_hand for m in mutants.values()) else SUITE + BEYOND_OPERATIONS
    program = [sys.executable, "-m", "ddtree.property_tests.project.mutants.forked"]
    pipe = subprocess.PIPE
    with subprocess.Popen(
        [*program, str(folder), str(workers), str(seed), *tests],
        stdin=pipe,
        stdout=pipe,
        env=environment,
        text=True,
        encoding="utf-8",
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        for key, m in mutants.items():
            job = {"id": key, "file": m.file, "source": m.source, "by_hand": m.by_hand}
            process.stdin.write(json.dumps(job) + "\n")
        process.stdin.close()
        told = 0
        for line in process.stdout:
            answer = json.loads(line)
            if "refused" in answer:
                raise TestsFailError(answer["refused"])
            if "id" in answer:
                told += 1
                yield answer
    if told < len(mutants):
        raise TestsFailError(f"of {len(mutants)} mutants {len(mutants) - told} have no answer")


def equivalents(text: str) -> dict[Change, tuple[str, int]]:
    """Why changes are of no effect, and how many mutants each is (one line may stand in several places)."""
    found: dict[Change, tuple[str, int]] = {}
    file = reason = before = ""
    for line in text.splitlines():
        if line.startswith("## "):
            file = line[3:].strip()
        elif line.startswith("-"):
            before = line[1:].strip()
        elif line.startswith("+"):
            change = file, before, line[1:].strip()
            found[change] = reason, found.get(change, ("", 0))[1] + 1
        elif line and not line.startswith(("#", "```")):
            reason = line
    return found


def judged(found: dict[Mutant, Outcome]) -> tuple[dict[Mutant, Outcome], list[str]]:
    """Outcomes, with those that survive and are explained as equivalent; explanations that explain nothing."""
    explained = equivalents(EQUIVALENT.read_text(encoding="utf-8"))
    left = {change: count for change, (_, count) in explained.items()}
    result = dict(found)
    for mutant, outcome in found.items():
        change = (mutant.file, *mutant.change)
        if outcome.verdict == "survived" and not mutant.by_hand and left.get(change, 0) > 0:
            left[change] -= 1
            result[mutant] = Outcome("equivalent", explained[change][0])
    files = {mutant.file for mutant in found if not mutant.by_hand}
    return result, [f"{f}: {old}  →  {new}" for (f, old, new), n in left.items() if n > 0 and f in files]


def counted(found: dict[Mutant, Outcome]) -> dict[tuple[str, str], Counter[str]]:
    """Verdicts by operation and implementation."""
    counts: dict[tuple[str, str], Counter[str]] = defaultdict(Counter)
    for mutant, outcome in found.items():
        counts[mutant.op, mutant.implementation][outcome.verdict] += 1
    places = {op: i for i, op in enumerate(OPS)}
    return dict(sorted(counts.items(), key=lambda item: (places.get(item[0][0], len(OPS)), item[0])))


def chosen(ops: tuple[str, ...], files: tuple[str, ...], only: str | None) -> list[Mutant]:
    """The mutants that are asked for."""
    mutants = [] if only == "machine" else hand_made.mutants()
    if only != "hand":
        from ddtree.property_tests.project.mutants import machine_made

        wanted = [f for f in machine_made.FILES if not ops or op_of(f) in ops]
        mutants += [m for f in wanted if not files or f.endswith(files) for m in machine_made.mutants_of(f)]
    return [m for m in mutants if (not ops or m.op in ops) and (not files or m.file.endswith(files))]


@click.command(context_settings={"show_default": True})
@click.option("--op", "ops", multiple=True, help="Mutants of this operation or function alone; may be repeated.")
@click.option("--file", "files", multiple=True, help="Mutants of files that end so; may be repeated.")
@click.option("--only", type=click.Choice(["hand", "machine"]), help="Mutants made by hand, or by machine.")
@click.option("--resume", is_flag=True, help="Leave out what an earlier run has settled.")
@click.option("--workers", default=2, help="Mutants at a time.")
@click.option("--seed", default=0, help="Of the examples.")
def main(ops: tuple[str, ...], files: tuple[str, ...], only: str | None, resume: bool, workers: int, seed: int) -> None:
    """Change one place of the references and kernels at a time, and run the tests that must notice it."""
    console, start = Console(), time.time()
    with console.status("changing the code"):
        mutants = chosen(ops, files, only)
    if not mutants:
        raise click.UsageError("no mutant is of that operation, file and kind")
    FOLDER.mkdir(exist_ok=True)
    store = FOLDER / "results.jsonl"
    known = dict(json.loads(line) for line in store.read_text().splitlines()) if resume and store.exists() else {}
    explained = equivalents(EQUIVALENT.read_text(encoding="utf-8"))
    earlier = {m: Outcome(*known[key_of(m)]) for m in mutants if key_of(m) in known}
    found = {m: o for m, o in earlier.items() if o.verdict != "survived" or (m.file, *m.change) in explained}
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    with Progress(*columns, console=console) as progress, store.open("a") as kept:
        task = progress.add_task("the tests of the code as it is", total=len(mutants), completed=len(found))
        waiting = [m for m in mutants if m not in found]
        for mutant, outcome in outcomes(waiting, workers=workers, seed=seed, folder=FOLDER):
            found[mutant] = outcome
            kept.write(json.dumps([key_of(mutant), [outcome.verdict, outcome.by]]) + "\n")
            kept.flush()
            verdicts = Counter(o.verdict for o in found.values())
            progress.update(task, advance=1, description=f"{verdicts['survived']} not caught")

    found, stale = judged({m: found[m] for m in mutants})
    console.print(table_of(found))
    for mutant, outcome in found.items():
        if outcome.verdict == "survived":
            before, after = mutant.change
            console.print(f"\n{mutant.file}: {mutant.what}", style="bold", highlight=False)
            console.print(f"-{before}", style="red", markup=False, highlight=False, soft_wrap=True)
            console.print(f"+{after}", style="green", markup=False, highlight=False, soft_wrap=True)
    for change in stale:
        console.print(f"explained, but caught or no mutant: {change}", style="red", markup=False, soft_wrap=True)
    if not (ops or files or only):
        RESULTS.write_text(
            report(found, took="" if resume else f"; {(time.time() - start) / 60:.0f} minutes", seed=seed),
            encoding="utf-8",
        )
        console.print(f"written: {RESULTS.name}")
    survived = sum(outcome.verdict == "survived" for outcome in found.values())
    if survived or stale:
        raise click.ClickException(f"{survived} mutants survive, {len(stale)} explanations are out of date")


def table_of(found: dict[Mutant, Outcome]) -> Table:
    """The counts, for a terminal."""
    columns = Column("operation", min_width=16), Column("implementation", min_width=14)
    table = Table(*columns, "mutants", *VERDICTS, box=None)
    for (op, implementation), counts in counted(found).items():
        numbers = (str(counts[verdict] or "") for verdict in VERDICTS)
        table.add_row(op, implementation, str(counts.total()), *numbers)
    total = Counter(outcome.verdict for outcome in found.values())
    table.add_row("all", "", str(total.total()), *(str(total[verdict] or "") for verdict in VERDICTS), style="bold")
    return table


def report(found: dict[Mutant, Outcome], *, took: str, seed: int) -> str:
    """``RESULTS.md``."""
    installed = ("ddtree", "numpy", "numba", "numba-cuda", "hypothesis", "pytest", "cosmic-ray")
    total = Counter(outcome.verdict for outcome in found.values())
    lines = [
        "# What the suite catches",
        "",
        "Written by `make mutants`: one place of a reference or of a kernel changed at a time, and its tests run at",
        "their default number of examples.",
        "",
        f"- {date.today().isoformat()}, Python {sys.version.split()[0]}, "
        + ", ".join(f"{name} {version(name)}" for name in installed),
        f"- seed of the examples {seed}{took}",
        f"- {total.total()} mutants: {total['caught']} caught by a test, {total['timed out']} by their time, "
        f"{total['equivalent']} equivalent, {total['survived']} survived",
        "",
    ]
    for title, by_hand in (("Made by hand", True), ("Made by machine", False)):
        those = {m: o for m, o in found.items() if m.by_hand == by_hand}
        lines += [f"## {title}", "", "| operation | implementation | mutants | " + " | ".join(VERDICTS) + " |"]
        lines += ["|---|---|--:|--:|--:|--:|--:|"]
        for (op, implementation), counts in counted(those).items():
            numbers = " | ".join(str(counts[verdict] or "") for verdict in VERDICTS)
            lines.append(f"| {op} | {implementation} | {counts.total()} | {numbers} |")
        lines.append("")
    lines += [
        "## Each mutant made by hand",
        "",
        "| operation | implementation | mistake | caught by |",
        "|---|---|---|---|",
    ]
    for mutant, outcome in found.items():
        if mutant.by_hand:
            by = f"`{outcome.by}`" if outcome.verdict == "caught" else f"{outcome.verdict} {outcome.by}"
            lines.append(f"| {mutant.op} | {mutant.implementation} | {mutant.what} | {escaped(by)} |")
    lines += [
        "",
        "## Equivalent",
        "",
        "Changes that no test can see; [`EQUIVALENT.md`](EQUIVALENT.md) has the lines.",
        "",
    ]
    lines += ["| file | mutants | reason |", "|---|--:|---|"]
    reasons = Counter((m.file, o.by) for m, o in found.items() if o.verdict == "equivalent")
    lines += [f"| {file} | {count} | {escaped(reason)} |" for (file, reason), count in reasons.items()]
    survivors = [m for m, o in found.items() if o.verdict == "survived"]
    if survivors:
        lines += ["", "## Survived", ""]
        for mutant in survivors:
            before, after = mutant.change
            lines += [f"{mutant.file}: {mutant.what}", "", "```diff", f"-{before}", f"+{after}", "```", ""]
    return "\n".join(lines).rstrip() + "\n"


def escaped(text: str) -> str:
    """Text in a cell of a Markdown table."""
    return re.sub(r"(?=\|)", r"\\", text)


if __name__ == "__main__":
    main()
