"""Draft trees as SVG, for a notebook or a page: pure Python, no plotting library."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from html import escape
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ddtree.arrays import to_numpy

if TYPE_CHECKING:
    from ddtree.trees import DraftTree

__all__ = ["kept_nodes", "line_width", "node_labels", "place_columns", "tree_layout", "tree_svg"]

ORANGE, VERMILION, GREY, INK = "#E69F00", "#D55E00", "#8A94A0", "#22272E"
LONGEST_LABEL = 12
MOST_TREES, MOST_NODES = 8, 400
"""What is drawn of a batch, and of a tree: its first nodes are a tree too, that of a smaller budget."""

ROW, GAP, CHARACTER, MARGIN, HEAD = 19, 40, 6.7, 8, 20
"""Pixels: between rows, between columns, of a letter of the labels' 11, around, and above each tree of several."""

Labels = Sequence[str] | Callable[[int], str]

# scoped, since a page's style sheets hold for the whole page
_STYLE = "".join(
    f".ddtree {rule}"
    for rule in (
        f"text{{font:11px ui-monospace,Menlo,Consolas,'DejaVu Sans Mono',monospace;text-anchor:middle;fill:{INK}}}",
        "text.h{text-anchor:start;font-family:sans-serif}",
        "text.k{font-weight:bold}",
        "text.r{fill:#fff}",
        f"path{{fill:none;stroke:{GREY}}}",
        f"path.k{{stroke:{VERMILION}}}",
        f"rect{{fill:#fff;stroke:{GREY}}}",
        f"rect.k{{fill:{ORANGE};stroke:{VERMILION};stroke-width:1.6}}",
        f"rect.r{{fill:{INK};stroke:{INK}}}",
    )
)

_NOT_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def tree_svg(
    tree: DraftTree,
    request: int | None = None,
    *,
    path: ArrayLike | None = None,
    labels: Labels | None = None,
) -> str:
    """Draw draft trees from left to right, likelier children above, as an SVG element.

    A line's width tells the drafter's probability of the child given its parent; pointing at a node shows its index,
    token, rank, and probabilities. Of a batch the first 8 trees are drawn, of a tree the first 400 nodes; a line below
    says what was left out.

    Parameters
    ----------
    tree : DraftTree
        Arrays of any kind; a device's are copied to the host.
    request : int, optional
        Which tree of the batch; all of them, one below the other, if left out.
    path : array of int, shape (L + 1,) or (B, L + 1), optional
        Nodes to highlight, as ``Acceptance.node_indices``: one row with ``request``, else one a request; −1 is passed
        over.
    labels : sequence of str, or callable of a token id, optional
        What to write on each node; by default its token id. A sequence goes with ``request``. Longer ones are cut at
        12 characters.

    Returns
    -------
    str
        One ``<svg>`` element, with its own white ground; all text is escaped.

    Raises
    ------
    ValueError
        A request, path, label or parent that the tree does not have.

    Examples
    --------
    >>> from ddtree import chain_tree
    >>> tree_svg(chain_tree(np.array([[5, 6, 7]]))).startswith("<svg ")
    True
    """
    B = tree.batch_size
    path = to_numpy(path) if hasattr(path, "__dlpack__") else path
    paths = None if path is None else np.atleast_2d(np.asarray(path, np.int64))
    if request is None and not (labels is None or callable(labels)):
        raise ValueError("labels must be a function of a token id where no request is chosen, got a sequence")
    if paths is not None and len(paths) != (B if request is None else 1):
        raise ValueError(f"path must have {'a row a request' if request is None else 'one row'}, got {len(paths)}")
    chosen = list(range(min(B, MOST_TREES))) if request is None else [request]
    parts: list[str] = []
    width, top = 0.0, float(MARGIN)
    for row, b in enumerate(chosen):
        if B > 1:
            parts.append(_text(MARGIN, top + 12, f"request {b}", "h"))
            top += HEAD
        body, w, h, left_out = _one(tree, b, None if paths is None else paths[row], labels)
        parts.append(f'<g transform="translate({MARGIN} {top:g})">{body}</g>')
        width, top = max(width, w + 2 * MARGIN), top + h + MARGIN
        if left_out:
            parts.append(_text(MARGIN, top + 10, f"and {left_out:,} more nodes, of smaller probability", "h"))
            width, top = max(width, 300), top + HEAD
    if request is None and B > MOST_TREES:
        parts.append(_text(MARGIN, top + 10, f"and {B - MOST_TREES:,} more requests", "h"))
        width, top = max(width, 200), top + HEAD
    if not chosen:
        parts.append(_text(MARGIN, top + 12, "no requests", "h"))
        width, top = 120, top + HEAD
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="ddtree" width="{width:g}" height="{top:g}" '
        f'viewBox="0 0 {width:g} {top:g}" role="img" aria-label="draft tree"><style>{_STYLE}</style>'
        f'<rect width="{width:g}" height="{top:g}" style="stroke:none"/>{"".join(parts)}</svg>'
    )


def _one(
    tree: DraftTree, request: int, path: NDArray[np.int64] | None, labels: Labels | None
) -> tuple[str, float, float, int]:
    """One tree's elements, their width and height, and how many nodes are not among them."""
    texts = node_labels(tree, request, labels)
    kept = kept_nodes(tree, request, path)
    count = len(texts)
    n = min(count, MOST_NODES)
    parents = to_numpy(tree.parents)[request, :n]
    tokens, ranks = (to_numpy(a)[request, :n].tolist() for a in (tree.token_ids, tree.ranks))
    scores = to_numpy(tree.scores)[request, :n].astype(np.float64)
    places = tree_layout(parents)
    x, box = place_columns(texts[:n], places, 10, CHARACTER, GAP)
    y, height = places[:, 1] * ROW + ROW / 2, ROW - 4
    given = np.exp(np.minimum(scores - scores[np.maximum(parents, 0)], 0.0))
    parts = []
    for i in sorted(range(1, n), key=lambda i: {i, int(parents[i])} <= kept):  # what was accepted lies above
        p = int(parents[i])
        start, middle = x[p] + box[p], (x[p] + box[p] + x[i]) / 2
        mark = ' class="k"' if {i, p} <= kept else ""
        parts.append(
            f'<path{mark} stroke-width="{float(line_width(given[i])):.2f}" '
            f'd="M{start:g} {y[p]:g}C{middle:g} {y[p]:g} {middle:g} {y[i]:g} {x[i]:g} {y[i]:g}"/>'
        )
    for i in range(n):
        odds = f"p {given[i]:.3g}, path {np.exp(min(scores[i], 0.0)):.3g}"
        told = f"node {i}: token {tokens[i]}, rank {ranks[i] + 1}, {odds}" if i else f"root: token {tokens[0]}"
        mark = ' class="r"' if i == 0 else ' class="k"' if i in kept else ""
        parts.append(
            f"<g><title>{_clean(told)}</title>"
            f'<rect{mark} x="{x[i]:g}" y="{y[i] - height / 2:g}" width="{box[i]:g}" height="{height}" rx="4"/>'
            f"{_text(x[i] + box[i] / 2, y[i] + 4, texts[i], mark[8:-1])}</g>"
        )
    return "".join(parts), float((x + box).max()), float(y.max() + ROW / 2), count - n


def tree_layout(parents: ArrayLike) -> NDArray[np.float64]:
    """Place the nodes of a tree: column = depth, and within a column at least one row apart.

    Every leaf has a row of its own, in depth-first order; an inner node stands on the row of its first child. So the
    path of first children, a chain, runs along the top, and whatever a tree has besides hangs below it.

    Parameters
    ----------
    parents : array, int, shape (n,)
        Each node's parent, an earlier node; the root's is not read.

    Returns
    -------
    array, float64, shape (n, 2)
        (column, row), from 0.

    Raises
    ------
    ValueError
        A parent that is no earlier node.

    Examples
    --------
    >>> tree_layout([-1, 0, 0, 1]).tolist()
    [[0.0, 0.0], [1.0, 0.0], [1.0, 1.0], [2.0, 0.0]]
    """
    parents = np.asarray(parents)
    children: list[list[int]] = [[] for _ in parents]
    places = np.zeros((len(parents), 2))
    for node in range(1, len(parents)):
        parent = int(parents[node])
        if not 0 <= parent < node:
            raise ValueError(f"parents[{node}] must be an earlier node, got {parent}")
        children[parent].append(node)
        places[node, 0] = places[parent, 0] + 1
    leaves, stack = 0, [0][: len(parents)]
    while stack:
        node = stack.pop()
        stack += reversed(children[node])
        if not children[node]:
            places[node, 1] = leaves
            leaves += 1
    for node in reversed(range(len(parents))):  # children before their parent
        if children[node]:
            places[node, 1] = places[children[node][0], 1]
    return places


def place_columns(
    texts: Sequence[str], places: NDArray[np.float64], padding: float, character: float, gap: float
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Left ends and widths of the nodes' boxes, (n,) each: those of a column are as wide as its longest label needs."""
    column = places[:, 0].astype(np.int64)
    longest = np.zeros(column.max(initial=0) + 1)
    np.maximum.at(longest, column, [max(len(t), 1) for t in texts])
    widths = padding + character * longest
    lefts = np.cumsum([0.0, *(widths[:-1] + gap)])
    return lefts[column], widths[column]


def node_labels(tree: DraftTree, request: int, labels: Labels | None) -> list[str]:
    """What is written on each node in use, cut at 12 characters; its token id where nothing else is said."""
    if not 0 <= request < tree.batch_size:
        raise ValueError(f"request must be in 0 … {tree.batch_size - 1}, got {request}")
    n = int(tree.node_counts[request])
    tokens = [int(t) for t in to_numpy(tree.token_ids)[request, :n]]
    texts = [labels(t) for t in tokens] if callable(labels) else list(map(str, tokens if labels is None else labels))
    if len(texts) < n:
        raise ValueError(f"labels must have one entry a node, {n}, got {len(texts)}")
    return [t if len(t) <= LONGEST_LABEL else t[: LONGEST_LABEL - 1] + "…" for t in texts[:n]]


def kept_nodes(tree: DraftTree, request: int, path: ArrayLike | None) -> set[int]:
    """Nodes of a path, as a row of ``Acceptance.node_indices`` holds them."""
    n = int(tree.node_counts[request])
    kept = {int(i) for i in np.asarray([] if path is None else path, np.int64).ravel() if i >= 0}
    if kept and max(kept) >= n:
        raise ValueError(f"path must hold nodes 0 … {n - 1}, got {max(kept)}")
    return kept


def line_width(probability: ArrayLike) -> NDArray[np.float64]:
    """Width of the line to a child of this probability given its parent: the area tells, not the width."""
    return np.asarray(0.5 + 4.0 * np.sqrt(np.asarray(probability, np.float64)))


def _text(x: float, y: float, text: str, kind: str) -> str:
    mark = f' class="{kind}"' if kind else ""
    return f'<text{mark} x="{x:g}" y="{y:g}">{_clean(text)}</text>'


def _clean(text: str) -> str:
    """Escaped, with a sign for characters that XML cannot hold."""
    return escape(_NOT_XML.sub("\ufffd", text))
