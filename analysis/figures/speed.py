"""Figures of cost: latency of a target pass by nodes, and what a policy emits or gains for the nodes it has checked."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ddtree.analysis.acceptance import TauTable
from ddtree.analysis.figures.style import (
    GREY,
    budget_axis,
    error_bars,
    finite_rows,
    level_of,
    new_axes,
    plain,
    series_options,
    styled,
)
from ddtree.analysis.speedup import CostTable, SpeedupTable

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["plot_frontier", "plot_latency"]

MARKERS = "osD^vPX*"
UNITS = ((1.0, "s"), (1e3, "ms"), (1e6, "µs"))


@styled
def plot_latency(costs: CostTable, *, measured: CostTable | None = None, ax: Axes | None = None) -> Axes:
    """Draw seconds of a target pass against its nodes, a line a context.

    Parameters
    ----------
    costs : CostTable
        A cost model's (see :func:`ddtree.analysis.speedup.cost_table`), as lines, or measured passes.
    measured : CostTable, optional
        Passes that were measured, as marks: then the lines have none.
    ax : Axes, optional
        Where to draw; the axis says the unit that suits the data: s, ms or µs.

    Returns
    -------
    Axes
        Named: "context 1000" and so on, and "measured at 1000".
    """
    from matplotlib import colormaps

    ax = ax or new_axes()
    contexts = np.unique(np.concatenate([costs.context, *([] if measured is None else [measured.context])]))
    seconds = costs.seconds[np.isfinite(costs.seconds)]
    scale, unit = next(((s, u) for s, u in UNITS if seconds.max(initial=0.0) * s >= 1), UNITS[-1])
    for i, context in enumerate(contexts.tolist()):
        colour = colormaps["cividis"](0.78 * i / max(len(contexts) - 1, 1))  # from dark to light as they grow
        marker = MARKERS[i % len(MARKERS)]
        rows = np.flatnonzero(costs.context == context)
        rows = rows[np.argsort(costs.nodes[rows], kind="stable")]
        ax.plot(
            costs.nodes[rows], scale * costs.seconds[rows], color=colour, label=f"{context:,}",
            marker=marker if measured is None else "", gid=f"context {context}",
        )  # fmt: skip
        if measured is not None:
            at = measured.context == context
            ax.plot(
                measured.nodes[at], scale * measured.seconds[at], color=colour, marker=marker, linestyle="",
                markerfacecolor="white", gid=f"measured at {context}",
            )  # fmt: skip
    nodes = np.concatenate([costs.nodes, *([] if measured is None else [measured.nodes])])
    budget_axis(ax, nodes, "nodes besides the root")
    ax.set_ylim(bottom=0)
    ax.set_ylabel(f"target pass, {unit}")
    if len(contexts):
        ax.legend(title="context, rows", title_fontsize=7)
    plain(ax)
    return ax


@styled
def plot_frontier(table: TauTable | SpeedupTable, *, ax: Axes | None = None) -> Axes:
    """Draw what each run gains against the nodes that it has checked, a line a policy, with the frontier of all.

    Parameters
    ----------
    table : TauTable or SpeedupTable
        τ, or the speed-up, is drawn against the mean nodes a round, the root not counted. Runs without a round are left
        out.
    ax : Axes, optional
        Where to draw.

    Returns
    -------
    Axes
        Named: each policy's line by the policy; "frontier", the steps to the best run of as many nodes or fewer.
    """
    ax = ax or new_axes(2.6)
    gained = table.tau if isinstance(table, TauTable) else table.speedup
    there = finite_rows(gained, table.nodes)
    styles = series_options(table.policy)
    for policy, options in styles.items():
        rows = np.flatnonzero(there & np.array([p == policy for p in table.policy], np.bool_))
        rows = rows[np.argsort(table.nodes[rows], kind="stable")]
        error_bars(
            ax, table.nodes[rows], gained[rows], table.low[rows], table.high[rows], **options
        )  # fmt: skip
    order = np.argsort(table.nodes[there], kind="stable")
    nodes, best = table.nodes[there][order], np.maximum.accumulate(gained[there][order])
    if len(nodes):
        # one step a node count: of equal ones the best counts
        last = np.append(np.flatnonzero(np.diff(nodes)), len(nodes) - 1)
        ax.step(
            nodes[last], best[last], where="post", color=GREY, linewidth=3, alpha=0.4, solid_joinstyle="miter",
            label="frontier", gid="frontier", zorder=1,
        )  # fmt: skip
    zero = bool(nodes.min(initial=1) == 0)  # then the axis has a linear part, and no fractions
    whole = np.append([0.0] * zero, 2.0 ** np.arange(0 if zero else -8, 16))
    span = whole[(whole >= nodes.min(initial=1) / 1.01) & (whole <= nodes.max(initial=1) * 1.01)]
    if len(span) > 1 and nodes.max() > 1.02 * span[-1]:
        span = np.append(span, nodes.max())  # the last point has its number
    budget_axis(ax, span if len(span) > 1 else nodes, "nodes checked a round, the root not counted")
    if len(nodes):
        ax.set_xlim(nodes.min() / 1.15 if nodes.min() > 0 else -0.3, nodes.max() * 1.15 + 0.1)
    ax.set_ylim(bottom=0)
    what = "τ, tokens a round" if isinstance(table, TauTable) else "speed-up over one by one"
    ax.set_ylabel(f"{what}\n({level_of(table.level)})")
    if styles:
        ax.legend(loc="lower right")
    plain(ax)
    return ax
