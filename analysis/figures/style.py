"""What all figures share: colours, type, error bars, axes of budgets, and how a figure is written."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ddtree.kdtr import atomic_write
from ddtree.svg import GREY, INK, ORANGE, VERMILION

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.container import ErrorbarContainer
    from matplotlib.figure import Figure

__all__ = ["GREY", "INK", "ORANGE", "VERMILION", "find", "save"]

BLUE, GREEN, SKY, PINK = "#0072B2", "#009E73", "#56B4E9", "#CC79A7"
SERIES = {"tree": (BLUE, "o", "-"), "chain": (VERMILION, "s", "--")}
OTHERS = (
    (GREEN, "D", "-."), (PINK, "v", ":"), (ORANGE, "^", (0, (4, 1.5, 1, 1.5, 1, 1.5))),
    (SKY, "P", (0, (1, 1))), (INK, "X", (0, (5, 1))), (GREY, "*", "-"),
)  # fmt: skip
MARKS = ((BLUE, "o"), (VERMILION, "s"), (ORANGE, "^"), (GREEN, "D"), (PINK, "v"), (SKY, "P"), (INK, "X"), (GREY, "*"))
"""Colours and marks of series that have no colour of their own."""

COLUMN = 3.35
"""Inches: the width of a column of a two-column paper."""

STYLE: Any = {
    "font.family": "DejaVu Sans",  # matplotlib brings it, so that a figure is the same everywhere
    "font.size": 8,
    "axes.labelsize": 8,
    "axes.titlesize": 8,
    "axes.titlelocation": "left",
    "axes.linewidth": 0.8,
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
    "text.color": INK,
    "xtick.labelsize": 7,
    "ytick.labelsize": 7,
    "xtick.color": INK,
    "ytick.color": INK,
    "xtick.major.size": 3,
    "ytick.major.size": 3,
    "legend.fontsize": 7,
    "legend.frameon": True,  # a ground without an edge, so that no line runs through the words
    "legend.facecolor": "white",
    "legend.edgecolor": "none",
    "legend.framealpha": 0.8,
    "legend.borderpad": 0.2,
    "legend.handlelength": 2.2,
    "lines.linewidth": 1.3,
    "lines.markersize": 4,
    "errorbar.capsize": 2,
    "pdf.fonttype": 42,  # text that can be searched and edited
    "svg.fonttype": "path",
    "svg.hashsalt": "ddtree",
    "mathtext.default": "regular",
}

P = ParamSpec("P")
R = TypeVar("R")


def styled(plot: Callable[P, R]) -> Callable[P, R]:
    """Have a function draw in this style, and leave matplotlib's settings as they were."""

    @functools.wraps(plot)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> R:
        from matplotlib import rc_context

        with rc_context(STYLE):
            return plot(*args, **kwargs)

    return wrapper


def new_axes(height: float = 2.4, *, width: float = COLUMN) -> Axes:
    """Return the axes of a new figure, of these inches."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained").add_subplot()


def figure_of(ax: Axes) -> Figure:
    """Return the figure that axes belong to."""
    figure = ax.get_figure(root=True)
    assert figure is not None
    return figure


def find(ax: Axes, name: str) -> Any:
    """Return what a figure drew under a name: the artist with this ``gid``.

    Raises
    ------
    ValueError
        The axes have no such artist; those that they have are named.
    """
    found = {str(artist.get_gid()): artist for artist in ax.findobj() if artist.get_gid()}
    if name not in found:
        raise ValueError(f"name must be one of {sorted(found)}, got {name!r}")
    return found[name]


def save(figure: Figure | Axes | Iterable[Axes], path: str | os.PathLike[str]) -> Path:
    """Write a figure, or the one that axes belong to, as PDF, SVG or PNG, as the name ends; whole or not at all.

    PNG has 300 dots an inch. PDF and SVG hold no date, so that the same figure is the same file.

    Raises
    ------
    ValueError
        The name ends otherwise.
    """
    from matplotlib import rc_context
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    path = Path(path)
    kind = path.suffix.removeprefix(".").lower()
    if kind not in ("pdf", "png", "svg"):
        raise ValueError(f"path must end in .pdf, .png or .svg, got {path.name!r}")
    if not isinstance(figure, (Figure, Axes)):
        figure = next(iter(figure))
    whole = figure if isinstance(figure, Figure) else figure_of(figure)
    metadata: Any = {"pdf": {"CreationDate": None}, "svg": {"Date": None}}.get(kind)
    settings: Any = {name: STYLE[name] for name in ("pdf.fonttype", "svg.fonttype", "svg.hashsalt")}
    with atomic_write(path) as file, rc_context(settings):
        whole.savefig(file, format=kind, dpi=300, metadata=metadata)
    return path


def series_style(names: Iterable[str]) -> dict[str, tuple[str, str, Any]]:
    """Colour, marker and line of each name: tree and chain have their own, others follow in order."""
    others = iter(OTHERS * 9)
    return {name: SERIES[name] if name in SERIES else next(others) for name in dict.fromkeys(names)}


def series_options(names: Iterable[str]) -> dict[str, dict[str, Any]]:
    """How :func:`error_bars` draws each name; of more than two, thinner and paler, and the tree over all others."""
    styles = series_style(names)
    many = len(styles) > 2
    thin = {"linewidth": 1, "markersize": 3, "elinewidth": 0.6, "capsize": 1.2}
    top = "tree" if many else "chain"  # of two, what the chain covers is as large or larger
    return {
        name: {
            "gid": name, "label": name, "color": colour, "marker": marker, "linestyle": line,
            "zorder": 4 if name == top else 3,
        }
        | (thin | {"ecolor": (colour, 0.6)} if many else {})
        for name, (colour, marker, line) in styles.items()
    }  # fmt: skip


def sideways(names: Iterable[str], budgets: ArrayLike) -> dict[str, float]:
    """Factors that move each name's budgets a little to the side, so that equal values of more than two show."""
    every = [*dict.fromkeys(names)]
    positive = np.asarray(budgets, np.float64)[np.asarray(budgets, np.float64) > 0]
    if len(every) <= 2 or not len(positive):
        return dict.fromkeys(every, 1.0)
    span = max(np.log2(positive.max() / positive.min()), 1.0)
    steps = np.linspace(-0.013, 0.013, len(every)) * span
    return dict(zip(every, (2.0**steps).tolist(), strict=True))


def by_name(tables: Any, single: str) -> Mapping[str, Any]:
    """Return tables by name; one alone has the name ``single``."""
    return tables if isinstance(tables, Mapping) else {single: tables}


def error_bars(
    ax: Axes, x: ArrayLike, middle: ArrayLike, low: ArrayLike, high: ArrayLike, *, gid: str, **options: Any
) -> ErrorbarContainer:
    """Draw values with their intervals; where there is no interval, no bar. The line is named ``gid``."""
    y, ends = np.asarray(middle, np.float64), np.stack([np.asarray(low, np.float64), np.asarray(high, np.float64)])
    lengths = np.nan_to_num(np.abs(ends - y))
    bars = ax.errorbar(np.asarray(x, np.float64), y, yerr=lengths, **{"elinewidth": 0.9, **options})
    for part in (bars.lines[0], *bars.lines[2]):
        if part is not None:
            part.set_gid(gid if part is bars.lines[0] else f"{gid}: intervals")
    return bars


def budget_axis(ax: Axes, budgets: ArrayLike, label: str, *, first: ArrayLike = ()) -> None:
    """Put budgets on a logarithmic x axis, each with its number unless that would be too close to another.

    Where there is no room for all, those of ``first`` and the last go before powers of two, and these before others.
    """
    preferred = set(np.asarray(first, np.float64).tolist())
    values = np.unique(np.asarray(budgets, np.float64))
    values = values[np.isfinite(values)]
    if not len(values):
        ax.set_xticks([])
    else:
        if values[0] > 0:
            ax.set_xscale("log", base=2)
        else:
            ax.set_xscale("symlog", base=2, linthresh=1)
        scale = np.log2(np.maximum(values, 0.5))
        span = max(scale[-1] - scale[0], 1e-9)
        numbers = [f"{value:,.0f}" for value in values]

        def apart(i: int, j: int) -> bool:  # as far as their digits need, in a figure of one column
            return bool(abs(scale[i] - scale[j]) >= span * max(0.07, 0.01 + 0.012 * len(numbers[i] + numbers[j])))

        preferred.add(values[-1])
        ticks: list[int] = []
        for i in sorted(range(len(values)), key=lambda i: (values[i] not in preferred, scale[i] % 1 != 0, i)):
            if all(apart(i, j) for j in ticks):
                ticks.append(i)
        ax.set_xticks(values[sorted(ticks)], [numbers[i] for i in sorted(ticks)])
        pad = 0.05 * span if span > 1e-6 else 0.5
        ax.set_xlim(-0.3 if values[0] == 0 else 2 ** (scale[0] - pad), 2 ** (scale[-1] + pad))
    ax.minorticks_off()
    ax.set_xlabel(label)


def thinned(ticks: Iterable[int], most: int = 16) -> list[int]:
    """Every tick, or every second, third, … so that there are ``most`` at most."""
    every = sorted({*ticks})
    return every[:: max(1, -(-len(every) // most))]


def plain(ax: Axes, grid: str = "y") -> None:
    """Leave a left and a lower spine, and a light grid behind the data."""
    ax.spines[["top", "right"]].set_visible(False)
    if grid:
        ax.grid(axis=grid, color=GREY, alpha=0.25, linewidth=0.6)  # type: ignore[arg-type]
    ax.set_axisbelow(True)


def level_of(level: float) -> str:
    """An interval's level, as a label says it."""
    return f"{100 * level:g}% intervals"


def finite_rows(*columns: ArrayLike) -> NDArray[np.bool_]:
    """Rows in which every column has a value."""
    rows: NDArray[np.bool_] = np.logical_and.reduce([np.isfinite(np.asarray(c, np.float64)) for c in columns])
    return rows
