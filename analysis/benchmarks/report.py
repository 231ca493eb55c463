"""A benchmark's report as people read it: tables for a terminal and in Markdown, figures, and the file of all times."""

from __future__ import annotations

import json
import os
import statistics
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Literal

from rich import box
from rich.table import Table

from ddtree.analysis import figures
from ddtree.analysis.benchmarks.bench import Report, Row
from ddtree.analysis.benchmarks.peers import PEERS
from ddtree.analysis.benchmarks.timing import Times
from ddtree.kdtr import atomic_write

__all__ = ["caption", "left_out", "tables_of", "write_report"]

Kind = Literal["warm", "cold"]


def compared(rows: Sequence[Row]) -> Kind:
    """Which times rows of a name are compared by: cold ones if everyone has them."""
    return "cold" if all(times.cold for row in rows for times in row.times.values()) else "warm"


def median(times: Times, kind: Kind) -> float:
    """Of the warm or the cold times."""
    return statistics.median(times.cold if kind == "cold" else times.warm)


def short(microseconds: float) -> str:
    """Four digits, or all before the point."""
    return f"{microseconds:,.0f}" if microseconds >= 1000 else f"{microseconds:.4g}"


def tables_of(report: Report) -> list[Table]:
    """A table a name: the backend's time, warm and, if taken, cold, each peer's, and how many times as long that is."""
    tables = []
    for name, rows in _by_name(report).items():
        kind, peers = compared(rows), _peers(rows)
        table = Table(title=f"[bold]{name}", title_justify="left", box=box.SIMPLE_HEAD)
        table.add_column("sizes")
        table.add_column(f"{report.backend},\nµs warm", justify="right")
        cold = _any_cold(rows)
        if cold:
            table.add_column("µs cold", justify="right")
        for peer in peers:
            table.add_column(f"{peer},\nµs {kind}", justify="right")
        for row in rows:
            ours = median(row.times[report.backend], kind)
            theirs = [median(row.times[peer], kind) if peer in row.times else None for peer in peers]
            against = ["-" if t is None else f"{short(t)} ({t / ours:,.3g}×)" for t in theirs]
            table.add_row(row.label, *_warm_and_cold(row.times[report.backend])[: 1 + cold], *against)
        tables.append(table)
    return tables


def caption(report: Report) -> str:
    """What the figures are and were taken on."""
    machine = report.machine
    kinds = "Warm: back to back; cold: after the cache was flushed" if _any_cold(report.rows) else "Back to back"
    lines = [
        f"Medians. {kinds}. n×: a peer takes n times as long.",
        "; ".join(machine["devices"])
        + "".join(f"; {n} {library} threads" for library, n in machine.get("threads", {}).items()),
    ]
    if report.ceilings:
        c = report.ceilings
        lines.append(
            f"This run's ceilings: copy {c.copy_gb_per_s:,.0f} GB/s, bfloat16 matmul {c.matmul_tflop_per_s:,.0f} "
            f"TFLOP/s, empty graph {c.empty_launch_us:.1f} µs"
        )
        hosts = [p.name for p in PEERS if p.waits and any(p.name in row.times for row in report.rows)]
        lines += [f"By the wall clock, from idle to idle: {', '.join(dict.fromkeys(hosts))}."] if hosts else []
    elif machine.get("load", 0) > (os.cpu_count() or 1) / 2:
        lines.append(f"The machine was at work already (load {machine['load']}): times of threads that wait mislead.")
    return "\n".join(lines)


def left_out(report: Report) -> list[str]:
    """Which peers could not be timed, and why: a line a reason."""
    return list(dict.fromkeys(f"{who}: {why}" for row in report.rows for who, why in row.skipped.items()))


def write_report(report: Report, folder: Path) -> list[Path]:
    """Write ``bench.json``, ``bench.md`` and the figures into a folder, each whole; return what was written."""
    folder.mkdir(parents=True, exist_ok=True)
    texts = {"bench.json": json.dumps(asdict(report), indent=1, ensure_ascii=False), "bench.md": page(report)}
    written = []
    for name, text in texts.items():
        with atomic_write(folder / name) as file:
            file.write((text + "\n").encode())
        written.append(folder / name)
    for name, rows in _by_name(report).items():
        kind, file_name = compared(rows), "_".join(name.replace(",", "").split())
        times = [(row.label, {who: median(t, kind) for who, t in row.times.items()}) for row in rows]
        ax = figures.plot_times(name, times, kind=kind)
        written.append(figures.save(ax, folder / f"{file_name}.svg"))
        # the ceiling of arithmetic is that of bfloat16
        points = [
            (row.label, row.flops, row.bytes, {who: median(t, kind) for who, t in row.times.items()})
            for row in rows
            if row.flops and row.sizes.get("type") != "float32"
        ]
        if report.ceilings and points:
            ax = figures.plot_roofline(name, points, report.ceilings.copy_gb_per_s, report.ceilings.matmul_tflop_per_s)
            written.append(figures.save(ax, folder / f"{file_name}_roofline.svg"))
    return written


def page(report: Report) -> str:
    """The tables in Markdown."""
    lines = [f"# {report.backend} beside its peers", "", *(f"{line}  " for line in caption(report).splitlines())]
    cold = _any_cold(report.rows)
    lines += [f"Of each the {'warm and the cold ' if cold else ''}time in microseconds.", ""]
    for name, rows in _by_name(report).items():
        names = [report.backend, *_peers(rows)]
        cells = [
            [
                row.label,
                *(" / ".join(_warm_and_cold(row.times[who])[: 1 + cold]) if who in row.times else "-" for who in names),
            ]
            for row in rows
        ]
        rule = ["---", *["--:"] * len(names)]
        lines += [f"## {name}", "", *(f"| {' | '.join(line)} |" for line in [["sizes", *names], rule, *cells]), ""]
    timed = {who for row in report.rows for who in row.times}
    lines += [f"* {p.name} ({p.case}): {p.about}" for p in PEERS if p.name in timed]
    return "\n".join([*lines, *(f"* left out: {reason}" for reason in left_out(report))])


def _by_name(report: Report) -> dict[str, list[Row]]:
    names = dict.fromkeys(row.name for row in report.rows)
    return {name: [row for row in report.rows if row.name == name] for name in names}


def _peers(rows: Sequence[Row]) -> list[str]:
    """Names of the peers that were timed in any of the rows."""
    return list(dict.fromkeys(who for row in rows for who in list(row.times)[1:]))


def _any_cold(rows: Sequence[Row]) -> bool:
    """Whether anybody's cache was flushed, as it is on a GPU alone."""
    return any(times.cold for row in rows for times in row.times.values())


def _warm_and_cold(times: Times) -> tuple[str, str]:
    return short(median(times, "warm")), short(median(times, "cold")) if times.cold else "-"
