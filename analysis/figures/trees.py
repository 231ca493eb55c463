"""A draft tree with its accepted path."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ddtree.analysis.figures.style import COLUMN, GREY, INK, ORANGE, VERMILION, figure_of, new_axes, styled
from ddtree.svg import kept_nodes, line_width, node_labels, place_columns, tree_layout
from ddtree.trees import DraftTree

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["draw_tree"]

ROW, HEIGHT, GAP = 0.2, 0.15, 0.34
"""Inches between rows, of a box, and between columns of boxes."""


@styled
def draw_tree(
    tree: DraftTree,
    request: int = 0,
    *,
    path: ArrayLike | None = None,
    labels: Sequence[str] | Callable[[int], str] | None = None,
    ax: Axes | None = None,
) -> Axes:
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
    Axes
        Named: "box 0", "text 0" and so on for each node; "edges", a line collection with one line for each node but the
        root, in order; "accepted edges", those of the path again, above them.

    Raises
    ------
    ValueError
        A request, path, label or parent that the tree does not have.
    """
    texts = node_labels(tree, request, labels)
    kept = kept_nodes(tree, request, path)
    n = len(texts)
    parents, scores = tree.parents[request, :n], tree.scores[request, :n]
    places = tree_layout(parents)
    rows = places[:, 1].max() + 1
    left, width = place_columns(texts, places, 0.12, 0.075, GAP)
    boxes = np.stack([left, places[:, 1] * ROW, width], axis=1)  # left, middle and width, in inches
    right = float((left + width).max())
    ax = ax or new_axes(max(1.1, ROW * rows + 0.75), width=max(COLUMN, right + 0.15))
    _draw_edges(ax, boxes, parents, scores, kept)
    _draw_boxes(ax, boxes, texts, kept)
    ax.set_xlim(-0.03, right + 0.03)
    ax.set_ylim((rows - 0.4) * ROW, -0.6 * ROW)
    ax.set_axis_off()
    _legend(ax)
    return ax


def _draw_edges(
    ax: Axes, boxes: NDArray[np.float64], parents: NDArray[Any], scores: NDArray[Any], kept: set[int]
) -> None:
    """Draw a curve from each parent's right side to its child's left: between two columns, it crosses no box."""
    from matplotlib.collections import LineCollection

    child = np.arange(1, len(boxes))
    parent = parents[child]
    probability = np.exp(np.minimum(scores[child] - scores[parent], 0.0))
    start = np.stack([boxes[parent, 0] + boxes[parent, 2], boxes[parent, 1]], axis=1)
    end = boxes[child, :2]
    t = np.linspace(0, 1, 25)[:, None]
    rise = 3 * t**2 - 2 * t**3  # flat at both ends
    curves = [a + (b - a) * np.hstack([t, rise]) for a, b in zip(start, end, strict=True)]
    widths = 0.7 * line_width(probability)
    on_path = np.array([i in kept and int(parents[i]) in kept for i in child], np.bool_)
    ax.add_collection(LineCollection(curves, linewidths=widths, colors=GREY, capstyle="butt", gid="edges"))
    accepted = [curve for curve, on in zip(curves, on_path, strict=True) if on]
    ax.add_collection(
        LineCollection(accepted, linewidths=widths[on_path], colors=VERMILION, capstyle="butt", gid="accepted edges")
    )


def _draw_boxes(ax: Axes, boxes: NDArray[np.float64], texts: Sequence[str], kept: set[int]) -> None:
    from matplotlib.patches import FancyBboxPatch

    for i, (x, y, width) in enumerate(boxes.tolist()):
        accepted = i in kept and i > 0
        fill, colour, edge = (
            (INK, "white", INK) if i == 0 else (ORANGE, INK, VERMILION) if accepted else ("white", INK, GREY)
        )
        box = FancyBboxPatch(
            (x, y - HEIGHT / 2), width, HEIGHT, boxstyle="round,pad=0,rounding_size=0.04",
            facecolor=fill, edgecolor=edge, linewidth=1.2 if accepted else 0.6, gid=f"box {i}",
        )  # fmt: skip
        ax.add_patch(box)
        ax.text(
            x + width / 2, y, texts[i], ha="center", va="center_baseline", fontsize=7, color=colour, parse_math=False,
            weight="bold" if i in kept else "normal", gid=f"text {i}",
        )  # fmt: skip


def _legend(ax: Axes) -> None:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    ax.legend(
        handles=[
            Patch(facecolor=INK, edgecolor=INK, label="last committed"),
            Patch(facecolor=ORANGE, edgecolor=VERMILION, label="accepted"),
            Patch(facecolor="white", edgecolor=GREY, label="not accepted"),
            *(
                Line2D([], [], color=GREY, linewidth=0.7 * float(line_width(p)), label=f"p = {p:g}")
                for p in (1.0, 0.1, 0.01)
            ),
        ],
        loc="upper center",
        bbox_to_anchor=(0.5, 0.0),
        ncols=3 if figure_of(ax).get_figwidth() < 5 else 6,
        fontsize=6.5,
        handlelength=1.6,
        columnspacing=1.2,
    )
