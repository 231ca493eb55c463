"""Figures of the question whether a tree would pay: ranks of the target's choices, and τ expected and realised."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from ddtree.analysis.acceptance import TauTable
from ddtree.analysis.figures.style import (
    BLUE,
    COLUMN,
    INK,
    ORANGE,
    SERIES,
    SKY,
    VERMILION,
    budget_axis,
    error_bars,
    level_of,
    new_axes,
    plain,
    series_options,
    sideways,
    styled,
    thinned,
)
from ddtree.analysis.pay import ChoiceTable, PayTable

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["plot_choice_ranks", "plot_expected_tau", "plot_pay"]

BANDS = (
    ("rank 1", 0, 1, BLUE, ""),
    ("2", 1, 2, SKY, "////"),
    ("3–4", 2, 4, ORANGE, ""),
    ("5–8", 4, 8, VERMILION, "...."),
)
"""Ranks that are drawn together: name, from, to, colour, hatch."""


@styled
def plot_pay(table: PayTable, *, ax: tuple[Axes, Axes] | None = None) -> tuple[Axes, Axes]:
    """Draw both: why a tree gains, and how much.

    Parameters
    ----------
    table : PayTable
        See :func:`ddtree.analysis.pay.would_a_tree_pay`.
    ax : tuple of two Axes, optional
        Where to draw; one above the other in a new figure if left out.

    Returns
    -------
    tuple of two Axes
        As :func:`plot_choice_ranks` and :func:`plot_expected_tau` return them.
    """
    if ax is None:
        from matplotlib.figure import Figure

        upper, lower = Figure(figsize=(COLUMN, 5.2), layout="constrained").subplots(2, 1)
        ax = upper, lower
    return plot_choice_ranks(table.choices, ax=ax[0]), plot_expected_tau(table, ax=ax[1])


@styled
def plot_choice_ranks(table: ChoiceTable, *, ax: Axes | None = None) -> Axes:
    """Draw, by depth, at which rank the target's choice stood, given that the path so far was accepted.

    Of each depth the left bar is of the chain's path, the right one, narrower, of the tree's. The marks say how often
    the choice was of rank 2 … 8 where it was not of rank 1.

    Returns
    -------
    Axes
        Named: bars such as "chain: rank 1: 3", the last the depth; "chain" and "tree", the marks.
    """
    ax = ax or new_axes(2.6)
    share = np.nan_to_num(table.share)
    for path, left, width in (("chain", -0.42, 0.46), ("tree", 0.06, 0.32)):
        rows = np.flatnonzero([p == path and n > 0 for p, n in zip(table.path, table.n, strict=True)])
        bottom = np.zeros(len(rows))
        x = table.depth[rows] + left + width / 2
        for name, start, end, colour, hatch in BANDS:
            height = share[rows, start:end].sum(1)
            bars = ax.bar(
                x, height, width, bottom, color=colour, edgecolor="white", linewidth=0.4, hatch=hatch, alpha=0.85,
                label=name if path == "chain" else None,
            )  # fmt: skip
            for bar, d in zip(bars, table.depth[rows], strict=True):
                bar.set_gid(f"{path}: {name}: {d}")
            bottom += height
        _, marker, _ = SERIES[path]
        error_bars(
            ax, x, table.rescued[rows], table.low[rows], table.high[rows],
            gid=path, color=INK, marker=marker, markerfacecolor="white", linestyle="", label=f"P(2–8 | not 1), {path}",
        )  # fmt: skip
    ax.set_xticks(thinned(table.depth[table.n > 0].tolist()))
    ax.set_ylim(0, 1.04)
    ax.set_xlabel(f"depth (left: chain's path; right: tree's, budget {table.budget})")
    ax.set_ylabel("share of the target's choices")
    ax.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=3, columnspacing=1.0, handlelength=1.4)
    plain(ax)
    return ax


@styled
def plot_expected_tau(table: PayTable | TauTable, *, ax: Axes | None = None) -> Axes:
    """Draw τ by budget: as the drafter's own probabilities promise it, and as the target's choices gave it.

    Returns
    -------
    Axes
        Named: each policy's realised line by the policy, with intervals, and "tree: expected" and so on.
    """
    from matplotlib.lines import Line2D

    ax = ax or new_axes(2.6)
    handles: list[Any] = []
    aside = sideways(table.policy, table.budget)
    for policy, options in series_options(table.policy).items():
        rows = np.flatnonzero([p == policy for p in table.policy])
        rows = rows[np.argsort(table.budget[rows], kind="stable")]
        x = table.budget[rows] * aside[policy]
        bars = error_bars(ax, x, table.tau[rows], table.low[rows], table.high[rows], **options)
        own = {name: options[name] for name in ("color", "marker", "markersize") if name in options}
        ax.plot(
            x, table.expected[rows], **own, markerfacecolor="white", linestyle=":",
            linewidth=1 if len(aside) <= 2 else 0.7, gid=f"{policy}: expected", zorder=2.5 if policy == "tree" else 2,
        )  # fmt: skip
        handles.append(bars)
    ink: dict[str, Any] = {"color": INK, "marker": "o"}
    handles.append(Line2D([], [], label="realised", **ink))
    handles.append(Line2D([], [], label="expected", linestyle=":", markerfacecolor="white", **ink))
    trees = [b for p, b in zip(table.policy, table.budget, strict=True) if p == "tree"]
    budget_axis(ax, table.budget, "node budget; of a chain, its depth", first=trees)
    ax.set_ylim(bottom=0)
    ax.set_ylabel(f"τ, tokens a round\n({level_of(table.level)})")
    if table.policy:
        ax.legend(handles=handles, loc="lower right")
    plain(ax)
    return ax
