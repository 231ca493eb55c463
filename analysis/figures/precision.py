"""Figure of a model's precision: how far a type's hidden states are from a wider type's, by layer."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ddtree.analysis.figures.style import BLUE, VERMILION, new_axes, plain, styled, thinned

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from ddtree.analysis.precision import PrecisionTable

__all__ = ["plot_precision"]


@styled
def plot_precision(table: PrecisionTable, *, ax: Axes | None = None) -> Axes:
    """Draw the relative error of the worst and the mean row after each layer, on a logarithmic axis.

    Parameters
    ----------
    table : PrecisionTable
        Errors that are 0 are not drawn.
    ax : Axes, optional
        Where to draw.

    Returns
    -------
    Axes
        Named: "worst row" and "mean row".
    """
    ax = ax or new_axes()
    places, last = np.arange(len(table.layer)), len(table.layer) - 1
    for name, values, colour, marker, line in (
        ("worst row", table.worst, VERMILION, "s", "--"),
        ("mean row", table.mean, BLUE, "o", "-"),
    ):
        shown = np.where(values > 0, values, np.nan)
        ax.plot(places, shown, color=colour, marker=marker, linestyle=line, label=name, gid=name)
    ax.set_yscale("log")
    ticks = [tick for tick in thinned(range(last), 8) if tick < last - max(1, last // 10)]
    names = {0: "emb.", last: "logits"}
    ax.set_xticks([*ticks, last], [names.get(tick, str(tick)) for tick in [*ticks, last]])
    ax.set_xlabel("after layer")
    ax.set_ylabel("relative error of a row")
    differ, n = len(table.differences.margin), table.n_positions
    tokens = f"{differ:,} of {n:,} greedy tokens differ"
    ax.set_title(f"{table.dtype} against {table.wider_dtype}: {tokens}", fontsize=7)
    ax.legend()
    plain(ax)
    return ax
