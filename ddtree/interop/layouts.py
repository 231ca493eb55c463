"""A draft tree as other software stores it: sibling links, masks of four kinds, and other orders of its nodes.

Letters: B requests, N node slots, W = ⌈N/32⌉. Trees may hold NumPy, CuPy or torch arrays; results are of the same kind,
on the same device. These are conversions for the border of a program: they work on the host, and wait for a GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, TypeVar

import numpy as np
from numpy.typing import NDArray

from ddtree.arrays import array_kind, export_array, import_array, to_numpy, use_stream_of
from ddtree.trees import DraftTree, tree_from_parents

__all__ = [
    "RaggedMasks",
    "RetrieveArrays",
    "additive_mask",
    "flat_masks",
    "packed_masks",
    "relabel",
    "retrieve_arrays",
    "tree_from_retrieve_arrays",
]


T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class RetrieveArrays:
    """A tree as links from node to node, as SGLang's verify kernels walk it.

    Attributes
    ----------
    index : array, int32, shape (B, N)
        Place of each node among the flattened slots of the batch, ``b * N + i``; −1 in unused slots.
    next_token : array, int32, shape (B, N)
        First child of each node by index; −1 where there is none and in unused slots.
    next_sibling : array, int32, shape (B, N)
        Next child of the same parent by index; −1 where there is none, for the root and in unused slots.
    """

    index: Any
    next_token: Any
    next_sibling: Any


@dataclass(frozen=True, eq=False)
class RaggedMasks:
    """Masks of requests of different sizes, one behind the other.

    Attributes
    ----------
    data : array, bool or uint8, shape (size,)
        Of ``flat_masks`` an element, of ``packed_masks`` eight to a byte.
    offsets : array, int64, shape (B + 1,)
        Request b's mask is ``data[offsets[b] : offsets[b + 1]]``.
    """

    data: Any
    offsets: Any


def retrieve_arrays(tree: DraftTree) -> RetrieveArrays:
    """Return the links of a tree.

    Examples
    --------
    >>> tree = tree_from_parents(np.array([[5, 7, 8, 9]]), np.array([[-1, 0, 0, 1]]))
    >>> links = retrieve_arrays(tree)
    >>> links.next_token.tolist(), links.next_sibling.tolist()
    ([[1, 3, -1, -1]], [[-1, 2, -1, -1]])
    """
    host = _on_host(tree)
    B, N = host.parents.shape
    used = _used(host)
    index = np.where(used, np.arange(B * N).reshape(B, N), -1).astype(np.int32)
    first, sibling = (np.full((B, N), -1, np.int32) for _ in range(2))
    for b in range(B):
        latest: dict[int, int] = {}  # child so far, by parent
        for i in range(1, int(host.node_counts[b])):
            parent = int(host.parents[b, i])
            if parent in latest:
                sibling[b, latest[parent]] = i
            else:
                first[b, parent] = i
            latest[parent] = i
    return _like(tree, RetrieveArrays(index, first, sibling))


def tree_from_retrieve_arrays(token_ids: Any, next_token: Any, next_sibling: Any) -> DraftTree:
    """Return the tree that links describe: the inverse of :func:`retrieve_arrays`.

    Parameters
    ----------
    token_ids : array, int, shape (B, N)
        Token of each node; anything in unused slots.
    next_token, next_sibling : array, int, shape (B, N)
        First child and next sibling of each node, −1 where there is none; both lie behind the node. What no link from
        the root leads to is not in use, and such slots are the last ones.

    Returns
    -------
    DraftTree
        As :func:`ddtree.tree_from_parents` makes it, of arrays as ``token_ids`` is.

    Raises
    ------
    ValueError
        A shape; a link that leads backwards, out of the slots or to a node twice; or an unused slot before a used one.
    """
    tokens, first, sibling = (to_numpy(a) for a in (token_ids, next_token, next_sibling))
    if tokens.ndim != 2 or not tokens.shape == first.shape == sibling.shape or tokens.shape[1] == 0:
        raise ValueError(
            "token_ids, next_token and next_sibling must have one shape (B, N) with N >= 1, "
            f"got {tokens.shape}, {first.shape} and {sibling.shape}"
        )
    B, N = tokens.shape
    parents = np.full((B, N), -1, np.int64)
    counts = np.ones(B, np.int64)
    for b in range(B):
        reached = [True] + [False] * (N - 1)
        for i in range(N):
            if not reached[i]:
                continue
            links = [("next_token", int(first[b, i]), i)]
            if i > 0:
                links.append(("next_sibling", int(sibling[b, i]), int(parents[b, i])))
            for name, to, parent in links:
                if to == -1:
                    continue
                if not i < to < N:
                    raise ValueError(f"{name}[{b}, {i}] must be -1 or in {i + 1} … {N - 1}, got {to}")
                if reached[to]:
                    raise ValueError(f"{name}[{b}, {i}] leads to node {to}, to which another link leads already")
                reached[to], parents[b, to] = True, parent
        counts[b] = sum(reached)
        if not all(reached[: counts[b]]):
            slot = reached.index(False)
            raise ValueError(f"no link leads to slot {slot} of request {b}, but one leads to a slot behind it")
    return _like(token_ids, tree_from_parents(tokens, parents, counts))


def flat_masks(tree: DraftTree, prefix_lens: Any, *, padded: bool = False) -> RaggedMasks:
    """Return each request's mask over its prefix and its tree, row after row, one request behind the other.

    Row i of request b has ``prefix_len + n`` columns: the prefix, which every node sees, then the n nodes.

    Parameters
    ----------
    tree : DraftTree
        The trees.
    prefix_lens : array, int32, shape (B,)
        Committed rows of each request.
    padded : bool
        Whether n is N for every request, unused slots being rows and columns of False, or each request's node count.

    Returns
    -------
    RaggedMasks
        Of bool.
    """
    masks = _masks(tree, prefix_lens, padded)
    return _like(tree, _ragged([mask.reshape(-1) for mask in masks], np.bool_))


def packed_masks(tree: DraftTree, prefix_lens: Any, *, padded: bool = False) -> RaggedMasks:
    """Return what :func:`flat_masks` does as bits, the first in the least significant place, as FlashInfer packs them.

    Each request begins a byte of its own; its last byte is filled with zeros.
    """
    masks = _masks(tree, prefix_lens, padded)
    return _like(tree, _ragged([np.packbits(mask.reshape(-1), bitorder="little") for mask in masks], np.uint8))


def additive_mask(
    tree: DraftTree,
    prefix_lens: Any,
    *,
    dtype: Any,
    columns: int | None = None,
    tree_column: int | None = None,
    window: int | None = None,
) -> Any:
    """Return a mask that is added to attention scores: 0 where a node sees a row, the type's least number elsewhere.

    Parameters
    ----------
    tree : DraftTree
        The trees.
    prefix_lens : array, int32, shape (B,)
        Committed rows of each request, which stand in the first columns.
    dtype : dtype or str
        float16, bfloat16, float32 or float64.
    columns : int, optional
        Width of the mask, at least that of what is seen: the greatest ``prefix_len + N``, or ``tree_column + N``. It is
        that if left out.
    tree_column : int, optional
        Column of every root, at least the greatest ``prefix_len``: node i's key is row ``tree_column + i``, and rows
        between a prefix and that are seen by none. By default each request's tree stands right behind its prefix.
    window : int, optional
        Of a sliding window, 1 and up: a node at position p sees none at p − ``window`` or before. The position is
        ``prefix_len + depth``. No window if left out.

    Returns
    -------
    array, shape (B, 1, N, columns)
        Not −inf, since a row of that has no softmax: an unused slot's row is the least number in every column.

    Raises
    ------
    ValueError
        An argument out of range, by name.
    """
    name = (str(dtype) if isinstance(dtype, str) or "torch." in str(dtype) else str(np.dtype(dtype))).rpartition(".")[2]
    if name not in ("float16", "bfloat16", "float32", "float64"):
        raise ValueError(f"dtype must be float16, bfloat16, float32 or float64, got {dtype}")
    if window is not None and window < 1:
        raise ValueError(f"window must be at least 1, got {window}")
    import ml_dtypes

    kind = np.dtype(ml_dtypes.bfloat16 if name == "bfloat16" else name)
    host, prefixes = _on_host(tree), _prefixes(tree, prefix_lens)
    B, N = host.parents.shape
    longest = int(prefixes.max(initial=0))
    if tree_column is not None and tree_column < longest:
        raise ValueError(f"tree_column must be at least {longest}, the greatest prefix_len, got {tree_column}")
    needed = (longest if tree_column is None else tree_column) + N
    width = needed if columns is None else columns
    if width < needed:
        where = "the greatest prefix_len" if tree_column is None else "tree_column"
        raise ValueError(f"columns must be at least {needed}, {where} + N, got {columns}")
    mask = np.full((B, 1, N, width), ml_dtypes.finfo(kind).min, kind)  # type: ignore[no-untyped-call]
    visible = host.visibility
    for b in range(B):
        n, prefix = int(host.node_counts[b]), int(prefixes[b])
        first = prefix if tree_column is None else tree_column
        seen_prefix, seen_nodes = np.ones((n, prefix), np.bool_), visible[b, :n, :n]
        if window is not None:
            depths = host.depths[b, :n]
            seen_prefix = np.arange(prefix) > (prefix + depths - window)[:, None]
            seen_nodes = seen_nodes & (depths > (depths - window)[:, None])
        mask[b, 0, :n, :prefix][seen_prefix] = 0
        mask[b, 0, :n, first : first + n][seen_nodes] = 0
    return _like(tree, mask)


def relabel(tree: DraftTree, order: Literal["breadth_first", "depth_first"]) -> tuple[DraftTree, Any]:
    """Return the same trees with their nodes in another order, and which node each was.

    Parameters
    ----------
    tree : DraftTree
        The trees, in any order in which parents come before their children.
    order : str
        "breadth_first": by depth; "depth_first": a node's whole subtree before its next sibling. Siblings, and nodes
        of one depth, stay in order.

    Returns
    -------
    tree : DraftTree
        Parents still come before their children; nodes keep their token, rank and score.
    old_indices : array, int32, shape (B, N)
        The former index of each node; −1 in unused slots. What belongs to the former nodes follows by
        ``take_along_axis``.
    """
    orders: dict[str, Callable[[list[int], list[int]], list[int]]] = {
        "breadth_first": lambda parents, depths: sorted(range(len(depths)), key=depths.__getitem__),
        "depth_first": _depth_first,
    }
    if order not in orders:
        raise ValueError(f"order must be {' or '.join(map(repr, orders))}, got {order!r}")
    host = _on_host(tree)
    B, N = host.parents.shape
    old, new = np.full((B, N), -1, np.int32), np.full((B, N), -1, np.int32)
    for b in range(B):
        n = int(host.node_counts[b])
        old[b, :n] = orders[order](host.parents[b, :n].tolist(), host.depths[b, :n].tolist())
        new[b, old[b, :n]] = np.arange(n)
    used, rows = _used(host), np.arange(B)[:, None]

    def moved(field: NDArray[Any]) -> NDArray[Any]:
        """Unused slots stay as they are: they are the same ones."""
        return np.where(used, field[rows, old], field).astype(field.dtype)

    parents = moved(host.parents)
    parents = np.where(used & (parents >= 0), new[rows, parents], parents).astype(np.int32)
    named: dict[str, Any] = {name: moved(getattr(host, name)) for name in ("token_ids", "depths", "ranks", "scores")}
    from ddtree.reference.visibility_words import visibility_words

    words = visibility_words(parents, host.node_counts)
    return _like(tree, replace(host, parents=parents, visibility_words=words, **named)), _like(tree, old)


def _depth_first(parents: list[int], depths: list[int]) -> list[int]:
    children: list[list[int]] = [[] for _ in parents]
    for i in range(1, len(parents)):
        children[parents[i]].append(i)
    order, stack = [], [0]
    while stack:
        order.append(stack.pop())
        stack += reversed(children[order[-1]])
    return order


def _masks(tree: DraftTree, prefix_lens: Any, padded: bool) -> list[NDArray[np.bool_]]:
    host, prefixes = _on_host(tree), _prefixes(tree, prefix_lens)
    masks = []
    for b, visible in enumerate(host.visibility):
        n = int(host.node_counts[b])
        rows = host.num_slots if padded else n
        seen = np.zeros((rows, int(prefixes[b])), np.bool_)
        seen[:n] = True
        masks.append(np.concatenate([seen, visible[:rows, :rows]], 1))
    return masks


def _ragged(parts: list[NDArray[Any]], dtype: Any) -> RaggedMasks:
    offsets = np.cumsum([0, *(len(part) for part in parts)], dtype=np.int64)
    return RaggedMasks(np.concatenate([np.empty(0, dtype), *parts]).astype(dtype), offsets)


def _prefixes(tree: DraftTree, prefix_lens: Any) -> NDArray[Any]:
    prefixes = to_numpy(prefix_lens)
    if prefixes.shape != (tree.batch_size,) or prefixes.dtype.kind not in "iu" or (prefixes < 0).any():
        raise ValueError(
            f"prefix_lens must be integers >= 0 of shape ({tree.batch_size},), got {prefixes.dtype} {prefixes.shape}"
        )
    return prefixes


def _used(tree: DraftTree) -> NDArray[np.bool_]:
    return np.asarray(np.arange(tree.num_slots) < tree.node_counts[:, None])


def _on_host(tree: DraftTree) -> DraftTree:
    host: dict[str, Any] = {name: to_numpy(v) for name, v in _arrays(tree).items()}
    return replace(tree, **host)


def _arrays(record: Any) -> dict[str, Any]:
    return {f.name: v for f in fields(record) if not isinstance(v := getattr(record, f.name), int)}


def _like(source: Any, result: T) -> T:
    """The result's arrays as the kind of array that ``source``, or the tree that it is, holds, on its device."""
    like = source.parents if isinstance(source, DraftTree) else source
    if isinstance(result, np.ndarray):
        return _sent(result, like)  # type: ignore[no-any-return]
    sent: dict[str, Any] = {name: _sent(v, like) for name, v in _arrays(result).items()}
    return replace(result, **sent)  # type: ignore[type-var]


def _sent(array: NDArray[Any], like: Any) -> Any:
    if array_kind(like) == "numpy":
        return array
    with use_stream_of(like):
        native = import_array(like)
        if not isinstance(native, np.ndarray):
            import cupy

            return export_array(cupy.asarray(array), like)
    return export_array(array, like)
