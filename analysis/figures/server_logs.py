"""Figures of what :mod:`ddtree.analysis.server_logs` read.

Where several files or sources were read each is a series, with its own colour, mark and line.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from ddtree.analysis.figures.style import COLUMN, GREY, INK, MARKS, new_axes, plain, styled
from ddtree.analysis.server_logs import SOURCES, ServerLog

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["nothing_to_draw", "plot_positions", "plot_running", "plot_server_log", "plot_tau_over_time"]

NOTHING = {
    "tau_over_time": "no line says how many tokens a round gave",
    "by_position": "no line has rates by position",
    "by_running": "no line says how many requests ran",
}
"""What a log lacks where a figure of it would be empty."""

LINES = ("-", "--", ":", "-.")
UNITS = ((2 * 86400.0, 86400.0, "days"), (2 * 3600.0, 3600.0, "hours"), (120.0, 60.0, "minutes"), (0.0, 1.0, "seconds"))


def nothing_to_draw(log: ServerLog) -> dict[str, str]:
    """Return which of the three figures would be empty, by name, and what the log lacks for it."""
    stamped = ~np.isnan(log.windows.seconds)
    known = ~np.isnan(log.windows.tau) & (stamped if stamped.any() else True)
    some = {
        "tau_over_time": known.any(),
        "by_position": len(log.positions) > 0,
        "by_running": (log.by_running.running > 0).any(),
    }
    return {name: reason for name, reason in NOTHING.items() if not some[name]}


@styled
def plot_tau_over_time(log: ServerLog, *, ax: Axes | None = None) -> Axes:
    """Draw τ of each window against time, and as a dotted line τ over all of them.

    Windows without a time stamp stand in their order. Stretches that were warned of are shaded. Names: each series'
    own, and "alerts" for the shaded stretches.
    """
    ax = ax or new_axes(width=2 * COLUMN)
    anything, shaded = False, False
    windows = log.windows
    stamped = bool(len(windows)) and bool((~np.isnan(windows.seconds)).any())
    scale, unit = 1.0, ""
    if stamped:
        longest = np.nanmax(windows.seconds)
        scale, unit = next((scale, unit) for least, scale, unit in UNITS if longest >= least)
    for k, (name, row, rows) in enumerate(_series(log)):
        x = windows.seconds[rows] / scale if stamped else np.cumsum(windows.lines[rows])
        drawn = ~np.isnan(x) & ~np.isnan(windows.tau[rows])
        if not drawn.any():
            continue
        colour, marker = MARKS[k % len(MARKS)]
        few = drawn.sum() <= 60
        anything = True
        ax.plot(
            x[drawn],
            windows.tau[rows][drawn],
            color=colour,
            linestyle=LINES[k % len(LINES)] if k else "-",
            linewidth=1.4 if few else 0.8,
            marker=marker if few else "",
            markersize=4,
            label=f"{name}: τ = {log.sources.tau[row]:.2f}",
            gid=name,
            zorder=3,
        )
        ax.axhline(log.sources.tau[row], color=colour, linewidth=0.9, linestyle=":", zorder=2)
        lines = windows.line[rows]
        for alert in log.alerts:
            if (alert.file, alert.source) != (log.sources.file[row], log.sources.source[row]):
                continue
            first, last = (max(int(np.searchsorted(lines, at, "right")) - 1, 0) for at in alert[3:5])
            begin, end = x[first], x[min(last + 1, len(x) - 1)]
            if not np.isnan([begin, end]).any():
                label = "_" if shaded else "warned of"
                ax.axvspan(begin, end, color=GREY, alpha=0.22, linewidth=0, zorder=1, label=label, gid="alerts")
                shaded = True
    _from_one(ax, windows.tau)
    ax.set_xlabel(f"time ({unit} since the first stamp)" if stamped else "windows, in their order")
    ax.set_ylabel("τ, tokens emitted a round")
    _finished(ax, anything, NOTHING["tau_over_time"])
    return ax


@styled
def plot_positions(log: ServerLog, *, ax: Axes | None = None) -> Axes:
    """Draw acceptance by position in the draft: of all rounds (filled), and of those that came so far (hollow).

    Names: each series' own, and the same with ", conditional".
    """
    ax = ax or new_axes()
    table = log.positions
    for k, (name, row, _) in enumerate(_series(log)):
        rows = (table.file == log.sources.file[row]) & (table.source == log.sources.source[row])
        if not rows.any():
            continue
        colour, marker = MARKS[k % len(MARKS)]
        for column, label, line, fill in (
            ("unconditional", name, "-", colour),
            ("conditional", f"{name}, conditional", "--", "white"),
        ):
            ax.plot(
                table.position[rows],
                getattr(table, column)[rows],
                color=colour,
                marker=marker,
                markerfacecolor=fill,
                linestyle=line,
                label=label if len(log.sources) > 1 else column,
                gid=label,
            )
    if len(table):
        ax.set_xticks(
            np.unique(table.position) if table.position.max() <= 20 else np.arange(4, table.position.max(), 4)
        )
    ax.set_ylim(0, 1.04)
    ax.set_xlabel("position in the draft")
    ax.set_ylabel("accepted share")
    _finished(ax, len(table) > 0, NOTHING["by_position"])
    return ax


@styled
def plot_running(log: ServerLog, *, ax: Axes | None = None) -> Axes:
    """Draw τ by the number of requests running; the area of a mark tells its share of the rounds.

    Names: of each series' marks its own.
    """
    ax = ax or new_axes()
    marks = []
    table = log.by_running
    for k, (name, row, _) in enumerate(_series(log)):
        rows = (table.file == log.sources.file[row]) & (table.source == log.sources.source[row]) & (table.running > 0)
        if not rows.any():
            continue
        colour, marker = MARKS[k % len(MARKS)]
        share = table.rounds[rows] / table.rounds[rows].sum()
        middle = np.sqrt(table.running[rows] * table.most_running[rows].astype(np.float64))
        ax.plot(middle, table.tau[rows], color=colour, linewidth=0.9, linestyle=LINES[k % len(LINES)], alpha=0.7)
        drawn = ax.scatter(
            middle,
            table.tau[rows],
            s=14 + 160 * share,
            color=colour,
            marker=marker,
            edgecolors="white",
            linewidths=0.6,
            label=name,
            gid=name,
            zorder=3,
        )
        marks.append(drawn)
    if marks and table.running.max() > 8:
        from matplotlib.ticker import FuncFormatter, NullFormatter

        ax.set_xscale("log", base=2)
        ax.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}" if x >= 1 else ""))
        ax.xaxis.set_minor_formatter(NullFormatter())
    elif marks:
        ax.set_xticks(np.unique(table.running[table.running > 0]))
    _from_one(ax, table.tau)
    ax.set_xlabel("requests running (area: share of the rounds)")
    ax.set_ylabel("τ, tokens emitted a round")
    if len(marks) == 1:
        marks[0].set_label("")
    _finished(ax, bool(marks), NOTHING["by_running"])
    return ax


@styled
def plot_server_log(log: ServerLog) -> Figure:
    """Draw all three in one figure: τ over time above, by position and by number running below."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(2 * COLUMN, 5), layout="constrained")
    grid = figure.add_gridspec(2, 2, height_ratios=(1.1, 1))
    plot_tau_over_time(log, ax=figure.add_subplot(grid[0, :]))
    plot_positions(log, ax=figure.add_subplot(grid[1, 0]))
    plot_running(log, ax=figure.add_subplot(grid[1, 1]))
    return figure


def _series(log: ServerLog) -> Iterator[tuple[str, int, Any]]:
    """Each file and source: its name, its row of ``log.sources`` and its rows of ``log.windows``."""
    sources = log.sources
    for row in range(len(sources)):
        source = SOURCES[sources.source[row]]
        name = source if len(log.files) == 1 else f"{log.files[sources.file[row]].name}, {source}"
        rows = (log.windows.file == sources.file[row]) & (log.windows.source == sources.source[row])
        yield name, row, rows


def _finished(ax: Axes, anything: bool, otherwise: str) -> None:
    plain(ax)
    if not anything:
        ax.set_yticks([])
        ax.set_xticks([])
        ax.text(0.5, 0.5, otherwise, transform=ax.transAxes, ha="center", va="center", color=INK)
    elif ax.get_legend_handles_labels()[1]:
        from matplotlib.collections import PathCollection

        for handle in ax.legend().legend_handles:
            if isinstance(handle, PathCollection):
                handle.set_sizes([30])


def _from_one(ax: Axes, tau: Any) -> None:
    """Show τ from 1, the least there is, and leave room for marks above the highest."""
    highest = np.nanmax(tau, initial=1.5)
    ax.set_ylim(1 - 0.06 * (highest - 1), highest + 0.12 * (highest - 1))
