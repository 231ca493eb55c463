"""Figures of a drafter's calibration: what it promised beside what came."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from ddtree.analysis.calibration import GIVEN, CalibrationTable, ReliabilityTable
from ddtree.analysis.figures.style import (
    BLUE,
    GREY,
    INK,
    VERMILION,
    by_name,
    error_bars,
    level_of,
    new_axes,
    plain,
    series_style,
    styled,
    thinned,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["plot_calibration_by_depth", "plot_reliability"]


@styled
def plot_reliability(tables: ReliabilityTable | Mapping[str, ReliabilityTable], *, ax: Axes | None = None) -> Axes:
    """Draw the reliability curve, with intervals: below the diagonal, the drafter is too sure of itself.

    Parameters
    ----------
    tables : ReliabilityTable, or mapping of str to ReliabilityTable
        One, with how often each probability was promised along the foot, or several by name.
    ax : Axes, optional
        Where to draw.

    Returns
    -------
    Axes
        Named: each curve by its name, "reliability" of one alone; "calibrated", the diagonal.
    """
    ax = ax or new_axes(3.2)
    named = by_name(tables, "reliability")
    styles = series_style(named) if isinstance(tables, Mapping) else {"reliability": (BLUE, "o", "-")}
    ax.plot([0, 1], [0, 1], color=GREY, linestyle="--", linewidth=1, label="calibrated", gid="calibrated")
    for name, table in named.items():
        rows = table.n > 0
        colour, marker, line = styles[name]
        error_bars(
            ax, table.expected[rows], table.realised[rows], table.low[rows], table.high[rows],
            gid=name, color=colour, marker=marker, linestyle=line, zorder=3,
            label=f"{'drafter' if name == 'reliability' else name}, error {table.error:.3f}",
        )  # fmt: skip
    if not isinstance(tables, Mapping) and tables.n.any():
        heights = 0.16 * tables.n / tables.n.max()
        middle, width = (tables.bin_low + tables.bin_high) / 2, tables.bin_high - tables.bin_low
        ax.bar(middle, heights, width * 0.9, color=GREY, alpha=0.45, zorder=1, label="promises, relative")
    ax.set_xlim(-0.01, 1.02)
    ax.set_ylim(-0.01, 1.02)
    ax.set_aspect("equal")
    ax.set_xlabel("probability that the drafter gave")
    level = next((table.level for table in named.values()), 0.95)
    ax.set_ylabel(f"share that the target chose\n({level_of(level)})")
    ax.set_xticks(np.arange(6) / 5)
    ax.legend(loc="lower left", bbox_to_anchor=(0, 1.0), ncols=2, columnspacing=1.2)
    plain(ax)
    return ax


@styled
def plot_calibration_by_depth(table: CalibrationTable, *, given: str = GIVEN[0], ax: Axes | None = None) -> Axes:
    """Draw, by depth, the mean probability of the likeliest candidate beside how often the target chose it.

    Each depth's fitted temperature stands above it: over 1, the drafter is too sure of itself there.

    Parameters
    ----------
    table : CalibrationTable
        Depths without a position are left out.
    given : str
        "accepted path" or "any path": which of its rows.
    ax : Axes, optional
        Where to draw.

    Returns
    -------
    Axes
        Named: "realised", "expected", and "temperature: " and the depth.
    """
    if given not in GIVEN:
        raise ValueError(f"given must be one of {GIVEN}, got {given!r}")
    ax = ax or new_axes()
    rows = np.flatnonzero([g == given and n > 0 for g, n in zip(table.given, table.n, strict=True)])
    depth = table.depth[rows]
    ax.plot(
        depth, table.expected[rows], color=VERMILION, marker="s", markerfacecolor="white", linestyle="--",
        label="expected", gid="expected",
    )  # fmt: skip
    error_bars(
        ax, depth, table.realised[rows], table.low[rows], table.high[rows],
        gid="realised", color=BLUE, marker="o", label="realised", zorder=3,
    )  # fmt: skip
    for d, t in zip(depth.tolist(), table.temperature[rows].tolist(), strict=True):
        if d in thinned(depth.tolist(), 8):
            ax.text(d, 1.02, f"{t:.2f}", ha="center", va="bottom", fontsize=6.5, color=INK, gid=f"temperature: {d}")
    ax.set_title("fitted temperature, above each depth", fontsize=7, pad=11)
    ax.set_xticks(thinned(depth.tolist()))
    ax.set_ylim(0, 1.0)
    ax.set_xlabel(f"depth, given {'the accepted path' if given == GIVEN[0] else given}")
    ax.set_ylabel(f"likeliest candidate\n({level_of(table.level)})")
    ax.legend(loc="lower left")
    plain(ax)
    return ax
