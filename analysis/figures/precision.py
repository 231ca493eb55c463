"""Figure of a model's precision: how far a type's hidden states are from a wider type's, by layer."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

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
    _plain_log_axis(ax, np.concatenate([table.worst, table.mean]))
    ax.set_xlim(-0.04 * last - 0.1, 1.04 * last + 0.1)
    ticks = [tick for tick in thinned(range(last), 8) if last - tick > 0.12 * last]
    names = {0: "emb.", last: "logits"}
    ax.set_xticks([*ticks, last], [names.get(tick, str(tick)) for tick in [*ticks, last]])
    ax.set_xlabel("after layer")
    ax.set_ylabel("relative error of a row")
    differ, n = len(table.differences.margin), table.n_positions
    tokens = f"{differ:,} of {n:,} greedy tokens differ"
    ax.set_title(f"{table.dtype} against {table.wider_dtype}:\n{tokens}", fontsize=7)
    ax.legend()
    plain(ax)
    return ax


def _plain_log_axis(ax: Axes, values: NDArray[np.float64]) -> None:
    """A logarithmic y axis with a number at each power of ten, and at 2 and 5 of it where these are few."""
    from matplotlib.ticker import LogLocator, NullFormatter

    shown = values[np.isfinite(values) & (values > 0)]
    ax.set_yscale("log")
    if len(shown):
        ax.set_ylim(shown.min() / 1.5, shown.max() * 1.5)
    decades = np.log10(shown.max() / shown.min()) if len(shown) else 1.0
    ax.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if decades < 2 else (1,)))
    ax.yaxis.set_major_formatter(lambda value, _: f"{value:g}".replace("e-0", "e-"))
    ax.yaxis.set_minor_formatter(NullFormatter())
