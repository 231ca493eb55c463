"""Tokens a second of ways to decode."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING

from ddtree.analysis.figures.style import MARKS, new_axes, plain, styled

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["plot_decoding"]


@styled
def plot_decoding(
    title: str,
    rows: Sequence[tuple[str, Mapping[str, float]]],
    *,
    peer: str = "",
    compared: Collection[str] | None = None,
    ax: Axes | None = None,
) -> Axes:
    """Draw tokens a second, a bar each, in groups.

    Parameters
    ----------
    title : str
        Above the bars.
    rows : sequence of (str, mapping of str to float)
        A group's label, and tokens a second by who decodes.
    peer : str
        Whose speed is 1: the others' bars say how many times as fast they are, in groups where it is.
    compared : collection of str, optional
        Whose bars say so; all of them if left out.
    ax : Axes, optional
        Where to draw.

    Returns
    -------
    Axes
        Named: each bar by its group and whose it is, as in "float32: transformers".
    """
    names = list(dict.fromkeys(name for _, speeds in rows for name in speeds))
    bars = sum(len(speeds) for _, speeds in rows)
    ax = ax or new_axes(0.9 + 0.2 * bars + 0.18 * len(rows), width=5.2)
    place, middles = 0.0, []
    for label, speeds in rows:
        first = place
        for name, speed in speeds.items():
            (bar,) = ax.barh(place, speed, height=0.82, color=MARKS[names.index(name) % len(MARKS)][0])
            bar.set_gid(f"{label}: {name}")
            beside = peer in speeds and name != peer and (compared is None or name in compared)
            times = f", {speed / speeds[peer]:,.3g}×" if beside else ""
            figures = f"{speed:,.0f}" if speed >= 100 else f"{speed:.3g}"
            ax.annotate(
                f"{name}: {figures}{times}", (speed, place), xytext=(3, 0), textcoords="offset points", va="center",
                fontsize=7,
            )  # fmt: skip
            place += 1
        middles.append((first + place - 1) / 2)
        place += 0.9
    ax.set_yticks(middles, [label for label, _ in rows])
    ax.tick_params(axis="y", length=0)
    ax.invert_yaxis()
    most = max((speed for _, speeds in rows for speed in speeds.values()), default=1.0)
    ax.set_xlim(0, 1.55 * most)  # room for what the longest bar says
    ax.xaxis.set_major_formatter(lambda x, _: f"{x:,.0f}")
    ax.set_xlabel("new tokens a second")
    ax.set_title(title, loc="left")
    plain(ax, "")  # the bars say their numbers
    return ax
