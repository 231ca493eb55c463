"""Figures of what was accepted: τ by budget, tokens a round, acceptance by depth and by rank."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from ddtree.analysis.acceptance import AcceptanceTable, LengthTable, RankTable, TauTable
from ddtree.analysis.figures.style import (
    BLUE,
    GREY,
    INK,
    VERMILION,
    budget_axis,
    by_name,
    error_bars,
    figure_of,
    find,
    level_of,
    new_axes,
    plain,
    series_options,
    series_style,
    sideways,
    styled,
    thinned,
)
from ddtree.analysis.speedup import SpeedupTable

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = [
    "plot_acceptance_by_depth",
    "plot_accepted_ranks",
    "plot_efficiency",
    "plot_lengths",
    "plot_tau_by_budget",
]


@styled
def plot_tau_by_budget(table: TauTable, *, speedups: SpeedupTable | None = None, ax: Axes | None = None) -> Axes:
    """Draw τ against the node budget, a line a policy, with intervals; and the speed-up on an axis of its own.

    Parameters
    ----------
    table : TauTable
        Any rows; of each policy by budget.
    speedups : SpeedupTable, optional
        Of the same runs. It is drawn with hollow marks, against the axis on the right, as in the DDTree paper
        (arXiv 2604.12989): τ can only rise with the budget, the speed-up need not.
    ax : Axes, optional
        Where to draw.

    Returns
    -------
    Axes
        Named: each policy's line of τ by the policy, "autoregressive", and "speed-up: " and the policy. The right axis
        is the figure's other Axes.
    """
    ax = ax or new_axes(2.5 if speedups is None else 2.7)
    styles, aside = series_options(table.policy), sideways(table.policy, table.budget)
    alone = speedups is not None and len(styles) == 1  # then colours tell the axes apart, else the policies
    handles: list[Any] = []
    for policy, options in styles.items():
        rows = np.flatnonzero([p == policy for p in table.policy])
        rows = rows[np.argsort(table.budget[rows], kind="stable")]
        bars = error_bars(
            ax, table.budget[rows] * aside[policy], table.tau[rows], table.low[rows], table.high[rows],
            **options | ({"label": "τ"} if alone else {}),
        )  # fmt: skip
        handles.append(bars)
    autoregressive = ax.axhline(1, color=GREY, linewidth=1, linestyle=":", label="one by one", gid="autoregressive")
    label = "node budget (drafted nodes checked a round)" if speedups is None else "node budget"
    budget_axis(ax, table.budget, label if speedups is None else f"{label} ({level_of(table.level)})")
    ax.set_ylim(bottom=0)
    ax.set_ylabel("τ, tokens a round" + (f" ({level_of(table.level)})" if speedups is None else ""))
    plain(ax)
    if speedups is None:
        ax.legend(handles=[*handles, autoregressive])
        return ax
    _speedup_axis(ax, speedups, VERMILION if alone else None, styles, handles)
    if alone:
        ax.yaxis.label.set_color(BLUE)
        ax.tick_params(axis="y", colors=BLUE)
    return ax


@styled
def plot_efficiency(table: TauTable, *, ax: Axes | None = None) -> Axes:
    """Draw tokens emitted for each node that the target checked against the node budget, on logarithmic axes.

    Returns
    -------
    Axes
        Named: each policy's line by the policy.
    """
    ax = ax or new_axes()
    lowest = 1.0
    aside = sideways(table.policy, table.budget)
    for policy, options in series_options(table.policy).items():
        rows = np.flatnonzero([p == policy for p in table.policy])
        rows = rows[np.argsort(table.budget[rows], kind="stable")]
        error_bars(
            ax, table.budget[rows] * aside[policy], table.efficiency[rows], table.efficiency_low[rows],
            table.efficiency_high[rows], **options,
        )  # fmt: skip
        lowest = min(lowest, np.nanmin(table.efficiency[rows], initial=1.0))
    budget_axis(ax, table.budget, "node budget (drafted nodes checked a round)")
    ax.set_yscale("log", base=2)
    lowest = 2.0 ** np.floor(np.log2(max(lowest, 2.0**-20) / 1.2))
    powers = 2.0 ** np.arange(np.log2(lowest), 1)
    ax.set_yticks(powers, ["1" if power == 1 else f"1/{1 / power:.0f}" for power in powers])
    ax.minorticks_off()
    ax.set_ylim(lowest, 1.15)
    ax.set_ylabel(f"tokens a node checked\n({level_of(table.level)})")
    if table.policy:
        ax.legend()
    plain(ax)
    return ax


def _speedup_axis(ax: Axes, speedups: SpeedupTable, colour: str | None, styles: Any, handles: list[Any]) -> None:
    """Draw speed-ups against an axis on the right, in one colour or in the policies'."""
    from matplotlib.lines import Line2D

    right = ax.twinx()
    aside = sideways([*styles, *speedups.policy], speedups.budget)
    for policy, (own, marker, line) in series_style([*styles, *speedups.policy]).items():
        rows = np.flatnonzero([p == policy for p in speedups.policy])
        rows = rows[np.argsort(speedups.budget[rows], kind="stable")]
        if len(rows):
            bars = error_bars(
                right, speedups.budget[rows] * aside[policy], speedups.speedup[rows], speedups.low[rows],
                speedups.high[rows],
                gid=f"speed-up: {policy}", color=colour or own, marker="s" if colour else marker,
                linestyle="--" if colour else line, markerfacecolor="white", label="speed-up",
            )  # fmt: skip
            if colour:
                handles.append(bars)
    right.set_ylim(bottom=0)
    right.set_ylabel("speed-up over one by one")
    right.spines[["top", "left"]].set_visible(False)
    if colour:
        right.yaxis.label.set_color(colour)
        right.tick_params(axis="y", colors=colour)
    else:
        for label, fill in (("τ", INK), ("speed-up", "white")):
            handles.append(Line2D([], [], color=INK, marker="o", linestyle="", markerfacecolor=fill, label=label))
    handles.append(find(ax, "autoregressive"))
    figure_of(ax).legend(handles=handles, loc="outside upper center", ncols=3)


@styled
def plot_lengths(table: LengthTable, *, ax: Axes | None = None) -> Axes:
    """Draw how many tokens rounds emitted, a bar a policy beside each other, with intervals and each τ.

    Returns
    -------
    Axes
        Named: each bar by the policy and its tokens, such as "tree: 3", and the intervals "tree: intervals".
    """
    ax = ax or new_axes()
    styles = series_style(table.policy)
    width = 0.8 / max(len(styles), 1)
    for i, (policy, (colour, _, _)) in enumerate(styles.items()):
        rows = np.flatnonzero([p == policy for p in table.policy])
        share = np.nan_to_num(table.share[rows])
        tau = (table.tokens[rows] * share).sum()
        x = table.tokens[rows] + (i - (len(styles) - 1) / 2) * width
        bars = ax.bar(
            x, share, width, color=colour, edgecolor=INK, linewidth=0.5, label=f"{policy}, τ = {tau:.2f}",
            hatch="" if i % 2 == 0 else "////", alpha=1.0 if i % 2 == 0 else 0.75,
        )  # fmt: skip
        for bar, tokens in zip(bars, table.tokens[rows], strict=True):
            bar.set_gid(f"{policy}: {tokens}")
        error_bars(ax, x, share, table.low[rows], table.high[rows], gid=policy, fmt="none", ecolor=INK, capsize=1.5)
    ax.set_xticks(thinned(table.tokens.tolist()))
    ax.set_ylim(bottom=0)
    ax.set_xlabel("tokens emitted a round, the bonus included")
    ax.set_ylabel(f"share of rounds ({level_of(table.level)})")
    if styles:
        ax.legend()
    plain(ax)
    return ax


@styled
def plot_acceptance_by_depth(
    tables: AcceptanceTable | Mapping[str, AcceptanceTable], *, ax: Axes | None = None
) -> Axes:
    """Draw the acceptance rate against the depth, with intervals.

    Parameters
    ----------
    tables : AcceptanceTable, or mapping of str to AcceptanceTable
        One, whose rounds stand below each depth, or several by policy. Depths that no round offered are left out.
    ax : Axes, optional
        Where to draw.

    Returns
    -------
    Axes
        Named: each line by the policy; "rate" of one alone.
    """
    ax = ax or new_axes()
    named = by_name(tables, "rate")
    styles = series_style(named) if isinstance(tables, Mapping) else {"rate": (BLUE, "o", "-")}
    depths: list[int] = []
    for i, (name, table) in enumerate(named.items()):
        rows = table.n_offered > 0
        colour, marker, line = styles[name]
        beside = 0.1 * (i - (len(named) - 1) / 2)  # so that intervals do not hide each other
        error_bars(
            ax, table.depth[rows] + beside, table.rate[rows], table.low[rows], table.high[rows],
            gid=name, color=colour, marker=marker, linestyle=line, label=name,
        )  # fmt: skip
        depths += table.depth[rows].tolist()
    ticks = thinned(depths)
    if isinstance(tables, Mapping):
        ax.set_xticks(ticks)
        ax.set_xlabel("depth")
        if named:
            ax.legend()
    else:
        wide = thinned(ticks, 8)  # numbers of rounds are
        n = dict(zip(tables.depth.tolist(), tables.n_offered.tolist(), strict=True))
        ax.set_xticks(ticks, [f"{d}\n{n[d]:,}" if d in wide else str(d) for d in ticks])
        ax.set_xlabel("depth; below it, the rounds that tested it")
    ax.set_ylim(0, 1.04)
    level = next((table.level for table in named.values()), 0.95)
    ax.set_ylabel(f"accepted share ({level_of(level)})")
    plain(ax)
    return ax


@styled
def plot_accepted_ranks(tables: RankTable | Mapping[str, RankTable], *, ax: Axes | None = None) -> Axes:
    """Draw the share of each rank among the accepted nodes, with intervals, on logarithmic axes.

    Parameters
    ----------
    tables : RankTable, or mapping of str to RankTable
        One, or several by policy. Ranks that were never accepted are left out.
    ax : Axes, optional
        Where to draw.

    Returns
    -------
    Axes
        Named: each line by the policy; "share" of one alone.
    """
    ax = ax or new_axes()
    named = by_name(tables, "share")
    styles = series_style(named) if isinstance(tables, Mapping) else {"share": (BLUE, "o", "")}
    lowest = 1.0
    for name, table in named.items():
        rows = table.n_accepted > 0
        colour, marker, _ = styles[name]
        error_bars(
            ax, table.rank[rows], table.share[rows], table.low[rows], table.high[rows],
            gid=name, color=colour, marker=marker, linestyle="", label=name,
        )  # fmt: skip
        lowest = min(lowest, table.low[rows].min(initial=1.0))
    most = max((int(table.rank.max(initial=1)) for table in named.values()), default=1)
    if most > 16:
        budget_axis(ax, 2.0 ** np.arange(np.ceil(np.log2(most)) + 1), "")
    else:
        ax.set_xticks(range(1, most + 1))
        ax.set_xlim(0.5, most + 0.5)
    ax.set_yscale("log")
    lowest = max(lowest, 1e-7) / 1.5
    powers = 10.0 ** np.arange(np.ceil(np.log10(lowest)), 1)
    ax.set_yticks(powers, [f"{100 * power:g}%" for power in powers])
    ax.set_ylim(lowest, 1.4)
    ax.minorticks_off()
    ax.set_xlabel("rank of the accepted child")
    level = next((table.level for table in named.values()), 0.95)
    ax.set_ylabel(f"share of accepted nodes\n({level_of(level)})")
    if isinstance(tables, Mapping) and named:
        ax.legend()
    plain(ax)
    return ax
