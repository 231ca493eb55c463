"""Figures of benchmarks: who took how long, and speeds under what memory and arithmetic allow."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from ddtree.analysis.figures.style import GREY, INK, MARKS, new_axes, plain

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["plot_roofline", "plot_times"]


def plot_times(
    title: str, rows: Sequence[tuple[str, Mapping[str, float]]], *, kind: str = "warm", ax: Axes | None = None
) -> Axes:
    """Draw who took how long: a line a case, a mark each, on a logarithmic axis of microseconds.

    ``rows`` are (label, microseconds by name); the first name is whose the figure is. ``kind`` says what the times are.
    Named in the Axes: the marks, by name.
    """
    ax = ax or new_axes(1.3 + 0.34 * len(rows), width=7.2)
    names = list(dict.fromkeys(name for _, times in rows for name in times))
    for i, (_, times) in enumerate(rows):
        if times:
            ax.plot([min(times.values()), max(times.values())], [i, i], color=GREY, linewidth=0.8, alpha=0.6, zorder=1)
    for k, name in enumerate(names):
        places = [(times[name], i) for i, (_, times) in enumerate(rows) if name in times]
        colour, marker = MARKS[k % len(MARKS)]
        ax.plot(
            *zip(*places, strict=True), linestyle="", color=colour, marker=marker, markersize=7, label=name, zorder=2,
            gid=name,
        )  # fmt: skip
    ax.set_xscale("log")
    ax.set_yticks(range(len(rows)), [label for label, _ in rows])
    ax.set_ylim(len(rows) - 0.5, -0.5)
    ax.set_xlabel(f"microseconds, {kind}")
    _plain_log_ticks(ax)
    ax.set_title(title, loc="left")
    ax.spines[["top", "right"]].set_visible(False)
    ax.grid(axis="x", color=GREY, alpha=0.25, linewidth=0.8)
    ax.set_axisbelow(True)
    ax.figure.legend(*ax.get_legend_handles_labels(), loc="outside lower center", ncols=3, frameon=False)
    return ax


def plot_roofline(
    title: str,
    rows: Sequence[tuple[str, float, float, Mapping[str, float]]],
    gb_per_s: float,
    tflop_per_s: float,
    *,
    ax: Axes | None = None,
) -> Axes:
    """Draw speeds under what memory and arithmetic allow.

    ``rows`` are (label, operations, bytes, microseconds by name); the two ceilings are measured ones, of which
    arithmetic's may be NaN. Named in the Axes: the marks by name, "memory" and "arithmetic".
    """
    ax = ax or new_axes(4.6, width=7.2)
    intensity = np.array([flops / moved for _, flops, moved, _ in rows])
    x = np.geomspace(intensity.min() / 2, intensity.max() * 2, 64)
    roof = np.fmin(x * gb_per_s / 1e3, tflop_per_s)
    ax.plot(x, x * gb_per_s / 1e3, color=GREY, linestyle=":", linewidth=1, gid="memory")
    ax.plot(x, roof, color=INK, linewidth=1.4, label="copy and matmul, this run", gid="arithmetic")
    for k, name in enumerate(dict.fromkeys(name for *_, times in rows for name in times)):
        places = [(f / m, f / times[name] / 1e6) for _, f, m, times in rows if name in times]
        colour, marker = MARKS[k % len(MARKS)]
        ax.plot(
            *zip(*places, strict=True), linestyle="", color=colour, marker=marker, markersize=7, label=name, gid=name
        )
    ax.set_xscale("log")
    ax.set_yscale("log")
    ax.set_ylim(top=float(np.nanmax(roof)) * 1.6)
    ax.set_xlabel("operations a byte")
    ax.set_ylabel("TFLOP/s")
    ax.set_title(title, loc="left")
    plain(ax)
    ax.figure.legend(*ax.get_legend_handles_labels(), loc="outside lower center", ncols=3, frameon=False)
    return ax


def _plain_log_ticks(ax: Axes) -> None:
    """Numbers such as 20 and 5,000 along a logarithmic x axis, at 1, 2 and 5 where powers of ten are few."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    low, high = ax.get_xlim()
    ax.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0) if high < 300 * low else (1.0,)))
    ax.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:,.0f}" if x >= 1000 else f"{x:.6g}"))
    ax.xaxis.set_minor_formatter(NullFormatter())
