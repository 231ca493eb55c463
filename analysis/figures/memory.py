"""Memory over a long run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from ddtree.analysis.figures.style import MARKS, new_axes, plain, styled

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["plot_memory"]

LINES = ("-", "--", "-.", ":")


@styled
def plot_memory(rounds: Sequence[int], memory: Mapping[str, Sequence[float]], *, ax: Axes | None = None) -> Axes:
    """Draw memory in use against rounds done, a line for each of whom it is.

    Parameters
    ----------
    rounds : sequence of int
        When it was looked at.
    memory : mapping of str to sequence of float
        MiB then, by name.
    ax : Axes, optional
        Where to draw.

    Returns
    -------
    Axes
        Named: each line by its name.
    """
    ax = ax or new_axes()
    for k, (name, mib) in enumerate(memory.items()):
        ax.plot(
            np.asarray(rounds), np.asarray(mib), color=MARKS[k % len(MARKS)][0], linestyle=LINES[k % len(LINES)],
            label=name, gid=name,
        )  # fmt: skip
    ax.set_ylim(bottom=0)
    ax.set_xlabel("rounds")
    ax.set_ylabel("memory in use, MiB")
    ax.xaxis.set_major_formatter(lambda x, _: f"{x:,.0f}")
    ax.yaxis.set_major_formatter(lambda y, _: f"{y:,.0f}")
    if len(memory) > 1:
        ax.legend()
    plain(ax)
    return ax
