"""The two records that operations pass on: a batch of draft trees and what became of them.

Letters: B requests, L draft depth limit, K candidates a depth, N = 1 + budget node slots, W = ⌈N/32⌉.
Both records hold arrays of one kind (NumPy, CuPy, or a torch tensor at the public surface), all on one device.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["Acceptance", "DraftTree", "chain_tree", "tree_from_parents"]


@dataclass(frozen=True, eq=False)
class DraftTree:
    """A batch of draft trees. Node 0 is the root, the last committed token; every parent precedes its children.

    Attributes
    ----------
    token_ids : array, int32, shape (B, N)
        Token of each node; −1 in unused slots. Token 0 is a token like any other.
    parents : array, int32, shape (B, N)
        Index of each node's parent, smaller than the node's own; −1 for the root and in unused slots.
    depths : array, int32, shape (B, N)
        Tokens between the root and the node, 0 for the root; −1 in unused slots.
    ranks : array, int32, shape (B, N)
        Which of its depth's K candidates a node is, 0 the likeliest; −1 for the root and in unused slots.
    scores : array, float64, shape (B, N)
        Sum, in depth order, of the log-probs on the node's path; +0.0 for the root, −inf in unused slots.
    node_counts : array, int32, shape (B,)
        Nodes in use, the root included; always the first ones.
    visibility_words : array, uint32, shape (B, N, W)
        Bit ``j % 32`` (least significant first) of word ``j // 32`` of row i: node i sees node j, which it does
        iff j is i or an ancestor of i. 0 in unused rows and bits.
    max_depth : int
        L, the depth limit that the tree was drafted under.
    num_candidates : int
        K, the candidates a depth that the tree was built from.
    """

    token_ids: Any
    parents: Any
    depths: Any
    ranks: Any
    scores: Any
    node_counts: Any
    visibility_words: Any
    max_depth: int
    num_candidates: int

    @property
    def batch_size(self) -> int:
        """B, the number of requests."""
        return int(self.token_ids.shape[0])

    @property
    def num_slots(self) -> int:
        """N, the node slots of a request: the node budget and the root."""
        return int(self.token_ids.shape[1])

    @property
    def used_last_rank(self) -> Any:
        """Whether a wider K might have changed the tree: bool (B,), True where a node has rank K − 1.

        A candidate of rank K would come after its sibling of rank K − 1, so a tree without the latter has no
        place for the former. With K = 0 any candidate would change a tree that has room.
        """
        if self.num_candidates == 0 and self.max_depth > 0 and self.num_slots > 1:
            return self.node_counts == self.node_counts
        return (self.ranks == self.num_candidates - 1).any(1) & (self.node_counts > 1)

    @property
    def visibility(self) -> Any:
        """``visibility_words`` as bool (B, N, N), made on demand: B · N² bytes (1 GB at B = N = 1,024)."""
        from ddtree.arrays import array_kind, array_namespace, export_array, import_array

        words = self.visibility_words
        if array_kind(words) == "dlpack":
            return export_array(replace(self, visibility_words=import_array(words)).visibility, words)
        xp = array_namespace(words)
        columns = np.arange(self.num_slots)
        if xp.__name__ == "torch":
            words = words.view(xp.int32)  # torch can hold unsigned words but not index or shift them
            at, bits = (xp.asarray(a, device=words.device) for a in (columns // 32, (columns % 32).astype(np.int32)))
        else:
            at, bits = xp.asarray(columns // 32), xp.asarray((columns % 32).astype(np.uint32))
        return (words[:, :, at] >> bits) & 1 != 0

    def rank_path(self, request: int, node: int) -> tuple[int, ...]:
        """Ranks from the root's child down to ``node`` of ``request``; empty for the root."""
        path: list[int] = []
        while node > 0:
            if not self.parents[request, node] < node:
                raise ValueError(
                    f"parents[{request}, {node}] must be an earlier node, got {int(self.parents[request, node])}"
                )
            path.append(int(self.ranks[request, node]))
            node = int(self.parents[request, node])
        return tuple(reversed(path))

    def _repr_svg_(self) -> str:
        """Show the trees in a notebook, as :func:`ddtree.svg.tree_svg` draws them."""
        from ddtree.svg import tree_svg

        return tree_svg(self)

    def __repr__(self) -> str:
        """Short where the batch is small enough to read, shapes only where it is not."""
        if self.batch_size != 1 or self.num_slots > 32:
            return f"DraftTree(B={self.batch_size}, N={self.num_slots}, L={self.max_depth}, K={self.num_candidates})"
        n = int(self.node_counts[0])
        return f"DraftTree(parents={self.parents[0, :n].tolist()}, token_ids={self.token_ids[0, :n].tolist()})"


@dataclass(frozen=True, eq=False)
class Acceptance:
    """What the target accepted of a batch of draft trees.

    Attributes
    ----------
    node_indices : array, int32, shape (B, L + 1)
        Kept nodes from the root down; −1 after the last.
    lengths : array, int32, shape (B,)
        Nodes kept, the root included. It is also the number of tokens emitted: the kept drafts and the bonus.
    bonus_token_ids : array, int32, shape (B,)
        The target's choice at the last kept node: emitted now, and the root of the next round. −1 for an inert
        request, and where the choice itself is −1 (the logits were unusable).
    finished : array, bool, shape (B,)
        The bonus is a stop token or the last token allowed, or the request was inert.
    """

    node_indices: Any
    lengths: Any
    bonus_token_ids: Any
    finished: Any


def tree_from_parents(token_ids: Any, parents: Any, node_counts: Any = None) -> DraftTree:
    """Make a :class:`DraftTree` from parent indices alone (NumPy arrays, on the host).

    Parameters
    ----------
    token_ids : array, int, shape (B, N)
        Token of each node; slots past a request's count are not read.
    parents : array, int, shape (B, N)
        Index of each node's parent: ``0 <= parents[b, i] < i`` for nodes 1 and up; the root's is not read.
    node_counts : array, int, shape (B,), optional
        Nodes in use, 1 … N, the root included; all N if left out.

    Returns
    -------
    DraftTree
        Depths, ranks (a node's place among its siblings, by index) and visibility follow from the parents; scores
        are 0, since there is no drafter. Siblings with equal tokens stay, the lowest index is the one accepted.

    Raises
    ------
    ValueError, TypeError
        A shape or type, or a token, parent or count out of range, named with its place.

    Examples
    --------
    >>> tree = tree_from_parents(np.array([[5, 7, 8, 9]]), np.array([[-1, 0, 0, 1]]))
    >>> tree.depths.tolist(), tree.visibility[0, 3].tolist()
    ([[0, 1, 1, 2]], [True, True, False, True])
    """
    from ddtree.reference.visibility_words import visibility_words

    token_ids, parents = _integers("token_ids", token_ids), _integers("parents", parents)
    if token_ids.ndim != 2 or token_ids.shape != parents.shape or token_ids.shape[1] == 0:
        raise ValueError(
            f"token_ids and parents must have one shape (B, N) with N >= 1, got {token_ids.shape} and {parents.shape}"
        )
    B, N = token_ids.shape
    counts = _checked_counts(node_counts, (B, N))
    slots = np.arange(N)
    used = slots < counts[:, None]
    inner = used & (slots > 0)
    _check_tokens(token_ids, used)
    wrong = inner & ((parents < 0) | (parents >= slots))
    if wrong.any():
        b, i = (int(x) for x in np.argwhere(wrong)[0])
        raise ValueError(f"parents[{b}, {i}] must be in 0 … {i - 1}, an earlier node, got {int(parents[b, i])}")
    parents = np.asarray(np.where(inner, parents, -1), np.int32)
    depths = np.where(used, 0, -1).astype(np.int32)
    ranks = np.full((B, N), -1, np.int32)
    children = np.zeros((B, N), np.int32)
    for i in range(1, N):
        rows = np.flatnonzero(inner[:, i])
        above = parents[rows, i]
        depths[rows, i] = depths[rows, above] + 1
        ranks[rows, i] = children[rows, above]
        children[rows, above] += 1
    return DraftTree(
        token_ids=np.where(used, token_ids, -1).astype(np.int32),
        parents=parents,
        depths=depths,
        ranks=ranks,
        scores=np.where(used, 0.0, -np.inf),
        node_counts=counts,
        visibility_words=visibility_words(parents, counts),
        max_depth=max(int(depths.max(initial=0)), 0),
        num_candidates=int(ranks.max(initial=-1)) + 1,
    )


def chain_tree(token_ids: Any, node_counts: Any = None) -> DraftTree:
    """Make the tree that is a plain sequence: node i's parent is node i − 1 (a prompt, or one token).

    Parameters
    ----------
    token_ids : array, int, shape (B, N)
        The sequences, first token first; slots past a request's count are not read.
    node_counts : array, int, shape (B,), optional
        Length of each sequence, 1 … N; all N if left out.

    Returns
    -------
    DraftTree
        On the host. Its target pass is a prefill for N > 1 and a one-token decode for N = 1.
    """
    token_ids = _integers("token_ids", token_ids)
    if token_ids.ndim != 2 or token_ids.shape[1] == 0:
        raise ValueError(f"token_ids must have shape (B, N) with N >= 1, got {token_ids.shape}")
    N = token_ids.shape[1]
    counts = _checked_counts(node_counts, token_ids.shape)
    slots = np.arange(N)
    used = slots < counts[:, None]
    _check_tokens(token_ids, used)
    # bits of each word that a row sees: all before its own, and of its own word as many as it takes
    seen = np.clip(slots[:, None] + 1 - 32 * np.arange((N + 31) // 32), 0, 32).astype(np.uint64)
    words = ((np.uint64(1) << seen) - np.uint64(1)).astype(np.uint32)
    depths = np.where(used, slots, -1).astype(np.int32)
    max_depth = int(depths.max(initial=0))
    return DraftTree(
        token_ids=np.where(used, token_ids, -1).astype(np.int32),
        parents=np.where(used, slots - 1, -1).astype(np.int32),
        depths=depths,
        ranks=np.where(used & (slots > 0), 0, -1).astype(np.int32),
        scores=np.where(used, 0.0, -np.inf),
        node_counts=counts,
        visibility_words=np.where(used[:, :, None], words, np.uint32(0)),
        max_depth=max_depth,
        num_candidates=min(max_depth, 1),
    )


def _checked_counts(node_counts: Any, shape: tuple[int, int]) -> NDArray[np.int32]:
    """Nodes in use of B trees of N slots, all of them by default."""
    B, N = shape
    counts = np.full(B, N, np.int32) if node_counts is None else _integers("node_counts", node_counts)
    if counts.shape != (B,) or ((counts < 1) | (counts > N)).any():
        raise ValueError(f"node_counts must have shape ({B},) and lie in 1 … {N}, got {counts!r}")
    return counts.astype(np.int32)


def _check_tokens(token_ids: NDArray[np.int64], used: NDArray[np.bool_]) -> None:
    outside = used & ((token_ids < 0) | (token_ids > 2**31 - 1))
    if outside.any():
        b, i = (int(x) for x in np.argwhere(outside)[0])
        raise ValueError(f"token_ids[{b}, {i}] must be in 0 … {2**31 - 1}, got {int(token_ids[b, i])}")


def _integers(name: str, values: Any) -> NDArray[np.int64]:
    array = np.asarray(values)
    if array.size and array.dtype.kind not in "iu":
        raise TypeError(f"{name} must hold integers, got {array.dtype}")
    return array.astype(np.int64)
