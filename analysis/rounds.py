"""Rounds as a table, one row a round of one request: what every acceptance statistic is made from. Pure NumPy.

The engine's rounds and those of a replayed trace give the same table, so whatever is said of one can be said of the
other. Letters: R rows, L draft depth limit.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ddtree.engine.records import Generation, Round
from ddtree.reference.portable_math import portable_exp
from ddtree.trees import Acceptance, DraftTree

__all__ = ["RoundTable", "Rounds", "as_round_table", "concatenate_rounds", "round_rows", "round_table"]

LEAST_SCORE = -1e3
"""Any score from here down has the probability 0 in float64."""


@dataclass(frozen=True, eq=False)
class RoundTable:
    """One row a round of one request, in the order in which that request's rounds came.

    A round of an inert request, which emitted nothing, has no row.

    Attributes
    ----------
    prompt : array, int64, shape (R,)
        The request, as an index among the prompts.
    position : array, int64, shape (R,)
        The root's index among the request's new tokens; 0 is the token of the prefill.
    prefix_len : array, int64, shape (R,)
        Committed rows in the cache before the round, the root's not among them; −1 where they are not known.
    tokens : array, int64, shape (R,)
        Tokens emitted, the bonus included, after stops: 1 … L + 1. Their mean is τ.
    finished : array, bool, shape (R,)
        The bonus was a stop token or the last token allowed: the walk was cut there.
    num_nodes : array, int64, shape (R,)
        Nodes drafted, the root not counted.
    tested : array, int64, shape (R,)
        The deepest depth that the walk tested: one more than it kept, if the last kept node had a child and the walk
        was not cut there; else as deep as it kept.
    expected : array, float64, shape (R,)
        Tokens that the drafter expected, 1 + Σ exp(score) over the drafted nodes: the τ that its own probabilities
        promise, under their product form (arXiv 2604.12989).
    used_last_rank : array, bool, shape (R,)
        A node has rank K − 1, so that a wider draft might have changed the tree.
    node_indices : array, int32, shape (R, L)
        Kept nodes below the root, by depth; −1 past them.
    ranks : array, int32, shape (R, L)
        Their ranks; −1 past them.
    log_probs : array, float64, shape (R, L)
        Their log-probs, each given its depth; NaN past them.
    """

    prompt: NDArray[np.int64]
    position: NDArray[np.int64]
    prefix_len: NDArray[np.int64]
    tokens: NDArray[np.int64]
    finished: NDArray[np.bool_]
    num_nodes: NDArray[np.int64]
    tested: NDArray[np.int64]
    expected: NDArray[np.float64]
    used_last_rank: NDArray[np.bool_]
    node_indices: NDArray[np.int32]
    ranks: NDArray[np.int32]
    log_probs: NDArray[np.float64]

    def __len__(self) -> int:
        return len(self.tokens)

    def __repr__(self) -> str:
        rounds, prompts = len(self), len(np.unique(self.prompt))
        tau = f", τ = {self.tau:.2f}" if rounds else ""
        return (
            f"RoundTable({rounds:,} round{'s' * (rounds != 1)} of {prompts:,} prompt{'s' * (prompts != 1)}, "
            f"L = {self.max_depth}{tau})"
        )

    @property
    def max_depth(self) -> int:
        """L, the widest of the rounds that were put together."""
        return int(self.ranks.shape[1])

    @property
    def tau(self) -> float:
        """Mean tokens emitted a round, the bonus included, after stops; NaN without a round."""
        return float(self.tokens.mean()) if len(self) else np.nan

    def take(self, rows: Any) -> RoundTable:
        """Return the rows that a mask or an array of indices picks."""
        return RoundTable(**{f.name: getattr(self, f.name)[rows] for f in fields(self)})


Rounds = Generation | Iterable[Round] | RoundTable
"""What statistics take: what ``Engine.generate`` returned, its rounds from the first on, or the table of them."""


def as_round_table(rounds: Rounds) -> RoundTable:
    """Return the table of whatever statistics take; a table as it is."""
    return rounds if isinstance(rounds, RoundTable) else round_table(rounds)


def round_table(rounds: Generation | Iterable[Round], prompt_lens: Sequence[int] | None = None) -> RoundTable:
    """Make the table of an engine's rounds.

    Parameters
    ----------
    rounds : Generation or iterable of Round
        What ``Engine.generate`` returned, or its rounds from the first on, on the host.
    prompt_lens : sequence of int, optional
        Tokens of each prompt; without them ``prefix_len`` is −1.

    Returns
    -------
    RoundTable

    Examples
    --------
    One round that drafted a chain of two, of which the target took the first:

    >>> from ddtree import accept_tree, chain_tree
    >>> tree = chain_tree(np.array([[5, 6, 7]]))
    >>> choices = np.array([[6, 0, 0]], np.int32)
    >>> table = round_table([Round((0,), tree, choices, accept_tree(tree, choices))])
    >>> table.tokens.tolist(), table.tested.tolist(), table.ranks.tolist()
    ([2], [2], [[0, -1]])
    """
    if isinstance(rounds, Generation) and rounds.num_rounds and not rounds.rounds:
        raise ValueError(
            f"rounds must be those of a generation that kept them, got one of {rounds.num_rounds} rounds without any: "
            "pass keep_rounds=True to generate, which resident rounds need"
        )
    emitted: dict[int, int] = {}
    parts = []
    for r in rounds.rounds if isinstance(rounds, Generation) else rounds:
        prompt = np.array(r.request_ids, np.int64)
        position = np.array([emitted.setdefault(p, 0) for p in r.request_ids], np.int64)
        lens = np.full(len(prompt), -1) if prompt_lens is None else np.array([prompt_lens[p] for p in r.request_ids])
        prefix_len = np.where(lens < 0, -1, lens + position)
        parts.append(round_rows(r.tree, r.acceptance, prompt=prompt, position=position, prefix_len=prefix_len))
        for p, length in zip(r.request_ids, r.acceptance.lengths.tolist(), strict=True):
            emitted[p] += length
    return concatenate_rounds(parts)


def round_rows(tree: DraftTree, kept: Acceptance, *, prompt: Any, position: Any, prefix_len: Any) -> RoundTable:
    """Make the rows of one batch of trees and what was accepted of them.

    Parameters
    ----------
    tree : DraftTree
        B trees, on the host.
    kept : Acceptance
        Of these trees.
    prompt, position, prefix_len : array, int, shape (B,)
        See :class:`RoundTable`.

    Returns
    -------
    RoundTable
        A row for each request that emitted something.
    """
    B, N = tree.parents.shape
    L = tree.max_depth
    rows = np.arange(B)[:, None]
    has_child = np.zeros((B, N + 1), np.bool_)  # the last column takes the parents that are −1
    has_child[rows, tree.parents] = True
    nodes = kept.node_indices[:, 1 : L + 1]  # (B, L)
    is_kept = nodes >= 0
    depth = kept.lengths - 1  # of the last kept node
    last = np.take_along_axis(kept.node_indices, np.maximum(depth, 0)[:, None], 1)[:, 0]
    used = np.arange(1, N) < tree.node_counts[:, None]  # (B, N − 1): drafted nodes
    above = np.where(is_kept, kept.node_indices[:, :L], 0)
    table = RoundTable(
        prompt=np.asarray(prompt, np.int64),
        position=np.asarray(position, np.int64),
        prefix_len=np.asarray(prefix_len, np.int64),
        tokens=kept.lengths.astype(np.int64),
        finished=kept.finished.astype(np.bool_),
        num_nodes=np.maximum(tree.node_counts - 1, 0).astype(np.int64),
        tested=depth.astype(np.int64) + (has_child[rows[:, 0], last] & ~kept.finished),
        expected=expected_tokens(np.where(used, tree.scores[:, 1:], -np.inf)),
        used_last_rank=np.asarray(tree.used_last_rank, np.bool_),
        node_indices=nodes.astype(np.int32),
        ranks=np.where(is_kept, tree.ranks[rows, nodes], -1).astype(np.int32),
        log_probs=np.where(is_kept, tree.scores[rows, nodes] - tree.scores[rows, above], np.nan),
    )
    return table.take(kept.lengths > 0)


def expected_tokens(scores: NDArray[np.float64]) -> NDArray[np.float64]:
    """1 + Σ exp(score) of the drafted nodes, float64 (B, n) → (B,); −inf is no node.

    Summed in the order of the nodes, by the exponential that every backend computes alike: so a compiled replay, or a
    batch with more slots, gives the same bits.
    """
    mass = np.where(scores > -np.inf, portable_exp(np.maximum(scores, LEAST_SCORE)), 0.0)
    return np.asarray(1.0 + np.cumsum(np.pad(mass, ((0, 0), (1, 0))), axis=1)[:, -1])


def concatenate_rounds(tables: Iterable[RoundTable]) -> RoundTable:
    """Put tables behind each other; columns by depth grow to the widest L, padded with −1 and NaN."""
    tables = list(tables)
    L = max((t.max_depth for t in tables), default=0)
    empty = _empty(L)
    columns = {}
    for f in fields(RoundTable):
        parts = [getattr(t, f.name) for t in tables]
        if f.name in ("node_indices", "ranks", "log_probs"):
            fill = np.nan if f.name == "log_probs" else -1
            parts = [np.pad(a, ((0, 0), (0, L - a.shape[1])), constant_values=fill) for a in parts]
        columns[f.name] = np.concatenate([getattr(empty, f.name), *parts])
    return RoundTable(**columns)


def _empty(L: int) -> RoundTable:
    whole, flags = np.zeros(0, np.int64), np.zeros(0, np.bool_)
    wide = np.zeros((0, L), np.int32)
    return RoundTable(
        whole, whole, whole, whole, flags, whole, whole, np.zeros(0), flags, wide, wide, np.zeros((0, L), np.float64)
    )
