"""Figures of acceptance tables and draft trees. Each function draws what it is given and returns what it drew.

Figures are plain :class:`matplotlib.figure.Figure` objects: no window opens and no global state changes. Colours are
from Okabe and Ito's palette, and none of them carries a meaning alone.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ddtree.analysis.acceptance import AcceptanceTable, TauTable
from ddtree.kdtr import atomic_write
from ddtree.trees import DraftTree

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = [
    "Drawing",
    "draw_tree",
    "plot_acceptance_by_depth",
    "plot_roofline",
    "plot_tau_by_budget",
    "plot_times",
    "save",
    "tree_layout",
]

BLUE, ORANGE, VERMILION, GREY, INK = "#0072B2", "#E69F00", "#D55E00", "#8A94A0", "#22272E"
SERIES = {"tree": (BLUE, "o", "-"), "chain": (VERMILION, "s", "--")}
GREEN, SKY, PINK = "#009E73", "#56B4E9", "#CC79A7"
MARKS = ((BLUE, "o"), (VERMILION, "s"), (ORANGE, "^"), (GREEN, "D"), (PINK, "v"), (SKY, "P"), (INK, "X"), (GREY, "*"))
LONGEST_LABEL = 12


class Drawing(NamedTuple):
    """What a function drew, and where.

    Attributes
    ----------
    axes : matplotlib.axes.Axes
        The axes that were passed, or those of a new figure.
    artists : dict of str to artist or list of artists
        By what they show.
    """

    axes: Axes
    artists: dict[str, Any]

    @property
    def figure(self) -> Figure:
        """The figure that the axes belong to."""
        return self.axes.get_figure(root=True)  # type: ignore[return-value]


def plot_tau_by_budget(table: TauTable, *, ax: Axes | None = None) -> Drawing:
    """Draw τ against the node budget, a line a mode, with intervals.

    Artists: one error bar container a mode, under its name, and "autoregressive", the line at τ = 1.
    """
    ax = ax or _new_axes(6.4, 4.0)
    artists: dict[str, Any] = {}
    for mode in dict.fromkeys(table.policy):
        rows = np.array([m == mode for m in table.policy])
        colour, marker, line = SERIES.get(mode, (INK, "D", ":"))
        tau = table.tau[rows]
        artists[mode] = ax.errorbar(
            table.budget[rows],
            tau,
            yerr=_distances(tau, table.low[rows], table.high[rows]),
            color=colour,
            marker=marker,
            markerfacecolor="white" if mode == "chain" else colour,
            linestyle=line,
            markersize=5,
            capsize=3,
            label=mode,
            zorder=3 if mode == "chain" else 2,  # what it covers is as large or larger
        )
    artists["autoregressive"] = ax.axhline(1, color=GREY, linewidth=1.2, linestyle=":", label="autoregressive")
    budgets = np.unique(table.budget)
    if (budgets > 0).all():
        ax.set_xscale("log", base=2)
    ax.set_xticks(budgets, [str(b) for b in budgets])
    ax.minorticks_off()
    ax.set_ylim(bottom=0)
    ax.set_xlabel("node budget (drafted nodes checked a round)")
    ax.set_ylabel(f"τ, tokens emitted a round ({table.level:.0%} intervals)")
    ax.legend(handles=list(artists.values()), frameon=False)
    _plain(ax)
    return Drawing(ax, artists)


def plot_acceptance_by_depth(table: AcceptanceTable, *, ax: Axes | None = None) -> Drawing:
    """Draw the acceptance rate against the depth, with intervals; below each depth, the rounds that offered it.

    Artists: "rate", an error bar container. Depths that no round offered are left out.
    """
    ax = ax or _new_axes(6.4, 4.0)
    rows = table.n_offered > 0
    depth, rate = table.depth[rows], table.rate[rows]
    bars = ax.errorbar(
        depth,
        rate,
        yerr=_distances(rate, table.low[rows], table.high[rows]),
        color=BLUE,
        marker="o",
        markersize=5,
        capsize=3,
        linewidth=1.5,
    )
    ax.set_xticks(depth, [f"{d}\nn = {n:,}" for d, n in zip(depth, table.n_offered[rows], strict=True)], fontsize=8)
    ax.set_ylim(0, 1.04)
    ax.set_xlabel("depth (n: rounds that reached it with something to offer)")
    ax.set_ylabel(f"accepted share ({table.level:.0%} intervals)")
    _plain(ax)
    return Drawing(ax, {"rate": bars})


def draw_tree(
    tree: DraftTree,
    request: int = 0,
    *,
    path: ArrayLike | None = None,
    labels: Sequence[str] | Callable[[int], str] | None = None,
    ax: Axes | None = None,
) -> Drawing:
    """Draw one request's draft tree from left to right, likelier children above.

    A line's width tells the drafter's probability of the child given its parent. A new figure is sized so that
    boxes and labels stay apart and legible whatever the tree; on axes of your own, that is up to their size.

    Parameters
    ----------
    tree : DraftTree
        On the host.
    request : int
        Which tree of the batch.
    path : array of int, optional
        Nodes to highlight, as a row of ``Acceptance.node_indices``; −1 is passed over.
    labels : sequence of str, or callable of a token id, optional
        What to write on each node; by default its token id. Longer ones are cut at 12 characters.
    ax : Axes, optional
        Where to draw.

    Returns
    -------
    Drawing
        Artists: "boxes" and "texts", lists with one entry a node, and "edges", a line collection with one line for
        each node but the root, in order.
    """
    from matplotlib.collections import LineCollection
    from matplotlib.lines import Line2D
    from matplotlib.patches import FancyBboxPatch, Patch

    if not 0 <= request < tree.batch_size:
        raise ValueError(f"request must be in 0 … {tree.batch_size - 1}, got {request}")
    n = int(tree.node_counts[request])
    parents, scores = tree.parents[request, :n], tree.scores[request, :n]
    tokens = [int(t) for t in tree.token_ids[request, :n]]
    kept = {int(i) for i in np.asarray([] if path is None else path, np.int64).ravel() if i >= 0}
    if kept and max(kept) >= n:
        raise ValueError(f"path must hold nodes 0 … {n - 1}, got {max(kept)}")
    texts = (
        [labels(t) for t in tokens] if callable(labels) else [str(t) for t in (tokens if labels is None else labels)]
    )
    if len(texts) < n:
        raise ValueError(f"labels must have one entry a node, {n}, got {len(texts)}")
    texts = [t if len(t) <= LONGEST_LABEL else t[: LONGEST_LABEL - 1] + "…" for t in texts[:n]]

    places = tree_layout(parents)
    columns, rows = places.max(0) + 1
    box_inches = 0.2 + 0.085 * max(map(len, texts))
    column_inches, row_inches = box_inches + 0.55, 0.32
    ax = ax or _new_axes(max(6.4, columns * column_inches + 0.3), max(2.4, row_inches * rows + 1.1))
    width, height = box_inches / column_inches, 0.72
    aspect = column_inches / row_inches  # so that corners are round

    child = np.arange(1, n)
    probability = np.exp(np.minimum(scores[child] - scores[parents[child]], 0.0))
    gap = np.array([width / 2, 0])  # a line runs from one box's right side to the next one's left: it crosses none
    on_path = np.array([i in kept and int(parents[i]) in kept for i in child], np.bool_)
    edges = LineCollection(
        list(np.stack([places[parents[child]] + gap, places[child] - gap], axis=1)),
        linewidths=_line_width(probability),
        colors=np.where(on_path, VERMILION, GREY).tolist(),
        capstyle="butt",
    )
    ax.add_collection(edges)
    boxes, written = [], []
    for i, (x, y) in enumerate(places):
        accepted = i in kept and i > 0
        fill, colour, edge = (
            (INK, "white", INK) if i == 0 else (ORANGE, INK, VERMILION) if accepted else ("white", INK, GREY)
        )
        boxes.append(
            FancyBboxPatch(
                (x - width / 2, y - height / 2),
                width,
                height,
                boxstyle=f"round,pad=0,rounding_size={0.25 / aspect}",
                mutation_aspect=aspect,
                facecolor=fill,
                edgecolor=edge,
                linewidth=1.8 if accepted else 0.9,
            )
        )
        ax.add_patch(boxes[-1])
        weight = "bold" if i in kept else "normal"
        written.append(
            ax.text(
                x,
                y,
                texts[i],
                ha="center",
                va="center_baseline",
                fontsize=9,
                color=colour,
                weight=weight,
                parse_math=False,
            )
        )
    ax.set_xlim(-0.6, columns - 0.4)
    ax.set_ylim(rows - 0.4, -0.6)
    ax.set_axis_off()
    ax.legend(
        handles=[
            Patch(facecolor=INK, edgecolor=INK, label="last committed"),
            Patch(facecolor=ORANGE, edgecolor=VERMILION, label="accepted"),
            Patch(facecolor="white", edgecolor=GREY, label="not accepted"),
            *(
                Line2D([], [], color=GREY, linewidth=float(_line_width(p)), label=f"p = {p:g}")
                for p in (1.0, 0.1, 0.01)
            ),
        ],
        loc="upper center",
        bbox_to_anchor=(0.5, 0.0),
        ncols=6,
        frameon=False,
        fontsize=8,
        handlelength=1.6,
        columnspacing=1.2,
    )
    return Drawing(ax, {"boxes": boxes, "texts": written, "edges": edges})


def tree_layout(parents: ArrayLike) -> NDArray[np.float64]:
    """Place the nodes of a tree: column = depth, and within a column at least one row apart.

    Every leaf has a row of its own, in depth-first order; an inner node stands in the middle of its first and last
    child, hence among the rows of its own leaves.

    Parameters
    ----------
    parents : array, int, shape (n,)
        Each node's parent, an earlier node; the root's is not read.

    Returns
    -------
    array, float64, shape (n, 2)
        (column, row), from 0.
    """
    parents = np.asarray(parents)
    children: list[list[int]] = [[] for _ in parents]
    for node in range(1, len(parents)):
        children[parents[node]].append(node)
    places = np.zeros((len(parents), 2))
    for node in range(1, len(parents)):
        places[node, 0] = places[parents[node], 0] + 1
    leaves, stack = 0, [0]
    while stack:
        node = stack.pop()
        stack += reversed(children[node])
        if not children[node]:
            places[node, 1] = leaves
            leaves += 1
    for node in reversed(range(len(parents))):  # children before their parent
        if children[node]:
            places[node, 1] = (places[children[node][0], 1] + places[children[node][-1], 1]) / 2
    return places


def plot_times(
    title: str, rows: Sequence[tuple[str, Mapping[str, float]]], *, kind: str = "warm", ax: Axes | None = None
) -> Drawing:
    """Draw who took how long: a line a case, a mark each, on a logarithmic axis of microseconds.

    ``rows`` are (label, microseconds by name); the first name is whose the figure is. ``kind`` says what the times are.
    Artists: the marks by name.
    """
    ax = ax or _new_axes(7.2, 1.3 + 0.34 * len(rows))
    names = list(dict.fromkeys(name for _, times in rows for name in times))
    artists: dict[str, Any] = {}
    for i, (_, times) in enumerate(rows):
        if times:
            ax.plot([min(times.values()), max(times.values())], [i, i], color=GREY, linewidth=0.8, alpha=0.6, zorder=1)
    for k, name in enumerate(names):
        places = [(times[name], i) for i, (_, times) in enumerate(rows) if name in times]
        colour, marker = MARKS[k % len(MARKS)]
        artists[name] = ax.plot(
            *zip(*places, strict=True), linestyle="", color=colour, marker=marker, markersize=7, label=name, zorder=2
        )[0]
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
    return Drawing(ax, artists)


def plot_roofline(
    title: str,
    rows: Sequence[tuple[str, float, float, Mapping[str, float]]],
    gb_per_s: float,
    tflop_per_s: float,
    *,
    ax: Axes | None = None,
) -> Drawing:
    """Draw speeds under what memory and arithmetic allow.

    ``rows`` are (label, operations, bytes, microseconds by name); the two ceilings are measured ones, of which
    arithmetic's may be NaN. Artists: the marks by name, "memory" and "arithmetic".
    """
    ax = ax or _new_axes(7.2, 4.6)
    intensity = np.array([flops / moved for _, flops, moved, _ in rows])
    x = np.geomspace(intensity.min() / 2, intensity.max() * 2, 64)
    roof = np.fmin(x * gb_per_s / 1e3, tflop_per_s)
    artists: dict[str, Any] = {
        "memory": ax.plot(x, x * gb_per_s / 1e3, color=GREY, linestyle=":", linewidth=1)[0],
        "arithmetic": ax.plot(x, roof, color=INK, linewidth=1.4, label="measured ceilings")[0],
    }
    for k, name in enumerate(dict.fromkeys(name for *_, times in rows for name in times)):
        places = [(f / m, f / times[name] / 1e6) for _, f, m, times in rows if name in times]
        colour, marker = MARKS[k % len(MARKS)]
        artists[name] = ax.plot(
            *zip(*places, strict=True), linestyle="", color=colour, marker=marker, markersize=7, label=name
        )[0]
    ax.set_xscale("log")
    ax.set_yscale("log")
    ax.set_ylim(top=float(np.nanmax(roof)) * 1.6)
    ax.set_xlabel("operations a byte")
    ax.set_ylabel("TFLOP/s")
    ax.set_title(title, loc="left")
    _plain(ax)
    ax.figure.legend(*ax.get_legend_handles_labels(), loc="outside lower center", ncols=3, frameon=False)
    return Drawing(ax, artists)


def save(figure: Figure | Drawing, path: str | os.PathLike[str]) -> Path:
    """Write a figure, or what a function here drew, as PNG or SVG, as the name ends; whole or not at all.

    Raises
    ------
    ValueError
        The name ends otherwise.
    """
    figure = figure.figure if isinstance(figure, Drawing) else figure
    path = Path(path)
    kind = path.suffix.removeprefix(".").lower()
    if kind not in ("png", "svg"):
        raise ValueError(f"path must end in .png or .svg, got {path.name!r}")
    with atomic_write(path) as file:
        figure.savefig(file, format=kind, dpi=150, metadata={"Date": None} if kind == "svg" else None)
    return path


def _new_axes(width: float, height: float) -> Axes:
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained").add_subplot()


def _distances(middle: NDArray[Any], low: NDArray[Any], high: NDArray[Any]) -> NDArray[np.float64]:
    """Lengths of error bars, none where there is no interval."""
    distances: NDArray[np.float64] = np.nan_to_num(np.stack([middle - low, high - middle]))
    return distances


def _line_width(probability: Any) -> Any:
    return 0.5 + 4.0 * np.sqrt(probability)


def _plain_log_ticks(ax: Axes) -> None:
    """Numbers such as 20 and 5,000 along a logarithmic x axis, at 1, 2 and 5 where powers of ten are few."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    low, high = ax.get_xlim()
    ax.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0) if high < 300 * low else (1.0,)))
    ax.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:,.0f}" if x >= 1 else f"{x:g}"))
    ax.xaxis.set_minor_formatter(NullFormatter())


def _plain(ax: Axes) -> None:
    ax.spines[["top", "right"]].set_visible(False)
    ax.grid(axis="y", color=GREY, alpha=0.25, linewidth=0.8)
    ax.set_axisbelow(True)
