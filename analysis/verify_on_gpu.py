"""``python -m ddtree.analysis.verify_on_gpu --backend cupy``: hold a backend to the reference on this machine's GPU.

Drawn inputs of every operation are compared in several processes, then the suite's laws run, then, with ``--sanitize``,
some more inputs under compute-sanitizer's four tools. ``--write`` records what held, with the hash of the kernels'
sources, in ``verified.json`` beside them, where ``ddtree info`` finds it; nothing is recorded where a result is wrong.
A run that is cut off goes on where it was with ``--resume``, which keeps each finished part in a file.
"""

from __future__ import annotations

import datetime
import importlib
import importlib.resources
import json
import multiprocessing
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import click
import ml_dtypes
import numpy as np
from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, TimeElapsedColumn
from rich.table import Table

from ddtree.analysis.environment import backend_states, commit, devices, kernel_sources, versions
from ddtree.backends import BACKENDS, SIMULATED, get_backend
from ddtree.kdtr import atomic_write

__all__ = ["main"]

TOOLS = ("memcheck", "racecheck", "initcheck", "synccheck")
AT_LEAST_ONE = click.IntRange(1)
CHUNK = 500
"""Drawn inputs a task: enough that starting Hypothesis does not show, and few enough that a bar moves."""


def compare(backend: str, op: str, examples: int, seed: int) -> tuple[str, int, int, str]:
    """``(op, examples, mismatches, the first)`` of one task, in a process of its own."""
    from ddtree.property_tests.harness import check_operation

    agreement = check_operation(backend, op, examples=examples, seed=seed)
    return op, agreement.examples, agreement.mismatches, agreement.first


class Found:
    """Finished parts of a verification, and where they are kept so that another run need not do them again.

    Parameters
    ----------
    of : dict
        What is verified, where, and how: parts of another one are of no use.
    path : Path, optional
        A file of JSON lines, ``of`` in the first; it may be there already.

    Raises
    ------
    click.ClickException
        The file is of another verification, or is none.
    """

    def __init__(self, of: dict[str, Any], path: Path | None = None) -> None:
        self._path, self._parts = path, dict[str, Any]()
        if path is None:
            return
        try:
            text = path.read_bytes() if path.exists() else b""
            if text:
                whole = text[: text.rfind(b"\n") + 1]  # what stands behind was cut off
                self._parts = _parts_of(whole.decode(), of)
                if whole != text:
                    os.truncate(path, len(whole))
            else:
                with atomic_write(path) as file:
                    file.write((json.dumps(of) + "\n").encode())
        except (OSError, ValueError, RecursionError) as error:
            raise click.ClickException(
                f"--resume must be a file of this verification, or one that can be made, got {path}: {error}; "
                "name another file, or remove this one"
            ) from error

    def __contains__(self, part: str) -> bool:
        return part in self._parts

    def __getitem__(self, part: str) -> Any:
        return self._parts[part]

    def add(self, part: str, result: Any, *, good: bool = True) -> None:
        """Take the result of a part; in the file it is kept if it is ``good``, so that others are tried again."""
        self._parts[part] = result
        if self._path is not None and good:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps([part, result]) + "\n")


def _parts_of(text: str, of: dict[str, Any]) -> dict[str, Any]:
    """The parts in a file's text, which must be one of ``of``."""
    header, *lines = [json.loads(line) for line in text.splitlines()] or [None]
    if not isinstance(header, dict) or header.keys() != of.keys():
        raise ValueError("its first line is not that of a verification")
    for name, here in of.items():
        if header[name] != here:
            raise ValueError(f"{name} was {header[name]!r} there, and is {here!r} now")
    for line in lines:
        if not isinstance(line, list) or len(line) != 2 or not isinstance(line[0], str) or not _is_result(*line):
            raise ValueError(f"{line!r} is no part")
    return dict(lines)


def _is_result(part: str, result: Any) -> bool:
    """Whether it is of drawn inputs, or what the laws or a tool said, as the part is."""
    if part == "laws" or part in TOOLS:
        return isinstance(result, str)
    return isinstance(result, list) and [type(value) for value in result] == [int, int, str]


def differential(
    backend: str, wanted: dict[str, int], jobs: int, console: Console, parts: Found
) -> dict[str, tuple[int, int, str]]:
    """Examples, mismatches and the first one, by operation."""
    context = multiprocessing.get_context("spawn")  # a process that uses CUDA must not be forked
    columns = (*Progress.get_default_columns(), MofNCompleteColumn(), TimeElapsedColumn())
    # the longest first, so that no process is left alone with them
    order = sorted(wanted, key=lambda op: op != "verify_attention")
    tasks = [(op, min(CHUNK, wanted[op] - at), at) for op in order for at in range(0, wanted[op], CHUNK)]
    left = [task for task in tasks if part_of(*task) not in parts]
    with ProcessPoolExecutor(jobs, context) as pool, Progress(*columns, console=console, transient=True) as progress:
        futures = {pool.submit(compare, backend, op, n, seed): (op, n, seed) for op, n, seed in left}
        bar = progress.add_task("drawn inputs", total=len(tasks), completed=len(tasks) - len(left))
        for future in as_completed(futures):
            result = future.result()[1:]
            parts.add(part_of(*futures[future]), result, good=result[1] == 0)
            progress.advance(bar)
    found = {op: (0, 0, "") for op in wanted}
    for task in tasks:
        before, (examples, mismatches, first) = found[task[0]], parts[part_of(*task)]
        found[task[0]] = before[0] + examples, before[1] + mismatches, before[2] or first
    return found


def part_of(op: str, examples: int, seed: int) -> str:
    """What a task is called among finished parts."""
    return f"{op}, {examples} inputs from seed {seed}"


def laws(backend: str, ops: tuple[str, ...], console: Console) -> str:
    """Run the suite's laws; return how many passed, as pytest says it, or raise with the end of its report."""
    tests = importlib.resources.files("ddtree.property_tests")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "ddtree._pytest", str(tests)]
    command += ["--ignore", str(tests / "project"), "--import-mode=importlib"]
    command += ["--ddtree-backend", backend, "--ddtree-ops", ",".join(ops), "--ddtree-at-least", "1000"]
    with console.status("the suite's laws"):
        run = subprocess.run(command, capture_output=True, text=True, check=False)
    if run.returncode:
        raise click.ClickException(f"the suite fails:\n{run.stdout[-6000:]}{run.stderr[-2000:]}")
    return run.stdout.strip().splitlines()[-1].partition(",")[0]


def sanitizer_path() -> str:
    """Where compute-sanitizer is."""
    path = shutil.which("compute-sanitizer")
    if path is None:
        raise click.ClickException("compute-sanitizer is not on the PATH: it comes with the CUDA toolkit")
    return path


def start_sanitizer(code: str, tools: Sequence[str] = TOOLS) -> dict[str, subprocess.Popen[str]]:
    """Start Python code under some of compute-sanitizer's tools, side by side; ``TOOL`` in it is the tool's name."""
    runs: dict[str, subprocess.Popen[str]] = {}
    tool = sanitizer_path() if tools else ""
    for name in tools:
        runs[name] = subprocess.Popen(
            [tool, "--tool", name, "--error-exitcode", "9", sys.executable, "-c", code.replace("TOOL", name)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
    return runs


def exercise(backend: str, ops: tuple[str, ...], examples: int, tool: str) -> None:
    """What runs under a tool: drawn inputs of every operation, and attention at the width of the tensor cores."""
    prepare_for_sanitizer(tool)
    wrong = [
        f"{op}: {first}" for op in ops for _, _, mismatches, first in [compare(backend, op, examples, 1)] if mismatches
    ]
    if backend == "cupy":
        wrong += _attention_at_full_width()
    if wrong:
        raise SystemExit("\n".join(wrong))


def prepare_for_sanitizer(tool: str) -> None:
    """Have every array in memory of its own, since a pool would hide what lies behind its end."""
    importlib.import_module("cupy").cuda.set_allocator(None)
    if tool == "racecheck":
        _let_every_lane_arrive()


def _let_every_lane_arrive() -> None:
    """Have each lane of verify attention arrive at barriers by itself.

    racecheck does not follow that a warp's own barrier comes before the arrival of one lane for all.
    """
    from ddtree.kernels.cupy import program

    sources, one, each = program.program_source, "EVERY_LANE_ARRIVES = false", "EVERY_LANE_ARRIVES = true"
    if one not in sources("verify_attention"):
        raise SystemExit(f"verify_attention.cu does not say {one!r}")
    program.program_source = lambda name: sources(name).replace(one, each)  # type: ignore[assignment]


def _attention_at_full_width() -> list[str]:
    """Where the tensor cores' attention is far from the exact one, on a few small inputs; both types and versions."""
    import cupy

    from ddtree.analysis.benchmarks.bench import FAR, exact_attention, some_rows, worst_error
    from ddtree.analysis.benchmarks.cases import attention_inputs
    from ddtree.property_tests.cases import map_arrays

    verify_attention, wrong = importlib.import_module("ddtree.kernels.cupy").verify_attention, []
    for dtype, page, heads, nodes, context in ((np.float16, 3, 5, 13, 50), (ml_dtypes.bfloat16, 16, 8, 17, 300)):
        inputs = attention_inputs(2, heads, nodes, context, dtype, page)
        rows = some_rows(inputs)
        exact = exact_attention(inputs, rows)
        sent = {name: map_arrays(value, cupy.asarray) for name, value in inputs.items()}
        for version in (2, 3):
            error = worst_error(cupy.asnumpy(verify_attention(**sent, version=version))[rows], exact)
            if not error <= FAR:
                wrong.append(f"verify_attention of {np.dtype(dtype).name}, version {version}: off by {error:.2g}")
    return wrong


@click.command()
@click.option("--backend", default="cupy", show_default=True, type=click.Choice(["cupy", "numba_cuda"]))
@click.option("--examples", type=AT_LEAST_ONE, default=15_000, show_default=True, help="Drawn inputs an operation.")
@click.option("--attention-examples", type=AT_LEAST_ONE, default=10_000, show_default=True, help="Of verify_attention.")
@click.option("--jobs", type=AT_LEAST_ONE, default=os.cpu_count() or 1, show_default="all cores", help="Processes.")
@click.option("--sanitize/--no-sanitize", "sanitized", default=False, help="Also under compute-sanitizer.")
@click.option("--write", is_flag=True, help="Record it in verified.json beside the kernels.")
@click.option("--output", type=click.Path(path_type=Path, dir_okay=False), help="Record it in this file as well.")
@click.option(
    "--resume", type=click.Path(path_type=Path, dir_okay=False), metavar="FILE",
    help="Keep finished parts here, and leave out those that are there.",
)  # fmt: skip
def main(
    backend: str,
    examples: int,
    attention_examples: int,
    jobs: int,
    sanitized: bool,
    write: bool,
    output: Path | None,
    resume: Path | None,
) -> None:
    """Hold a backend to the reference on this machine's GPU."""
    console = Console(highlight=False, width=None if sys.stdout is not None and sys.stdout.isatty() else 120)
    if SIMULATED:
        raise click.ClickException("NUMBA_ENABLE_CUDASIM is set: kernels would run in the simulator, not on a GPU")
    gpus = [line for line in devices() if line.startswith("GPU")]
    reason = {state.name: state.reason for state in backend_states()}[backend]
    if reason or not gpus:
        raise click.ClickException(reason or "nvidia-smi lists no GPU here")
    ops, start = get_backend(backend).ops, time.perf_counter()
    sources, gpu = kernel_sources(backend), ",".join(gpus[0].partition(": ")[2].split(",")[:2])
    with_what = {k: v for k, v in versions().items() if v}
    of = {"backend": backend, "sources_sha256": sources["sources_sha256"], "gpu": gpu, "versions": with_what}
    parts = Found(of | {"commit": commit()}, resume)
    code = f"from ddtree.analysis.verify_on_gpu import exercise; exercise({backend!r}, {ops!r}, 20, 'TOOL')"
    tools = [tool for tool in TOOLS if tool not in parts] if sanitized else []
    sanitizers = start_sanitizer(code, tools)
    wanted = {op: attention_examples if op == "verify_attention" else examples for op in ops}
    try:
        found = differential(backend, wanted, jobs, console, parts)
        if not any(wrong for _, wrong, _ in found.values()) and "laws" not in parts:
            parts.add("laws", laws(backend, ops, console))
        for name, run in sanitizers.items():
            told = run.communicate()[0]
            fault = f"it ended with status {run.returncode}\n{told}" if run.returncode else ""
            parts.add(name, fault, good=not fault)
    finally:
        for run in sanitizers.values():
            run.kill()
    table = Table(title=f"{backend} beside the reference, {time.perf_counter() - start:.0f} s")
    for column in ("operation", "examples", "mismatches"):
        table.add_column(column, justify="left" if column == "operation" else "right")
    for op, (n, wrong, _) in found.items():
        table.add_row(op, f"{n:,}", f"{wrong:,}")
    console.print(table)
    wrong_ones = [f"{op}: {first}" for op, (_, wrong, first) in found.items() if wrong]
    if wrong_ones:
        raise click.ClickException("it differs from the reference:\n" + "\n".join(wrong_ones))
    record: dict[str, Any] = {
        "gpu": gpu,
        "date": datetime.date.today().isoformat(),
        "examples": {op: n for op, (n, _, _) in found.items()},
        "laws": parts["laws"],
        "versions": with_what,
        **sources,
    }
    console.print(f"the suite's laws: {record['laws']}", markup=False)
    failed = {name: parts[name] for name in TOOLS if sanitized and parts[name]}
    if sanitized:
        record["sanitizer"] = {name: "found something" if name in failed else "nothing found" for name in TOOLS}
    beside = importlib.resources.files(BACKENDS[backend].module) / "verified.json"
    for path in [*([Path(str(beside))] if write and not failed else []), *([output] if output else [])]:
        with atomic_write(path) as file:
            file.write((json.dumps(record, indent=1, ensure_ascii=False) + "\n").encode())
        console.print(f"wrote {path}", soft_wrap=True, markup=False)
    if failed:
        raise click.ClickException(
            "\n".join(f"compute-sanitizer {name}:\n{text[-5000:]}" for name, text in failed.items())
        )


if __name__ == "__main__":
    main()
