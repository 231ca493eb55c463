"""Would a tree pay? From a trace of any drafter, before any kernel is written: where the target's choice stands.

A chain of drafts ends where the drafter's likeliest token is not the target's choice. A tree goes on where the choice
is among the next candidates. So what counts is their rank, and how much τ a tree gains by it at each budget.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

import ddtree
from ddtree.analysis.acceptance import tau_table_from_sums
from ddtree.analysis.choices import Choices, Trace, choices_of, chunks_of
from ddtree.analysis.intervals import LEVEL, RESAMPLES, check_level, percentile_interval, resample_sums, wilson_interval
from ddtree.analysis.tables import Table
from ddtree.checks import INT32_MAX, integer

__all__ = ["BUDGETS", "ChoiceTable", "PayTable", "would_a_tree_pay"]

BUDGETS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
RANKS = 8
"""Ranks that are counted one by one."""

_NOWHERE = np.int64(2**31)
"""Place of a choice that the largest tree does not hold: beyond any budget."""

_TREES = 2**21
"""Node slots of the trees that are built at once."""


@dataclass(frozen=True, eq=False)
class ChoiceTable(Table):
    """Rank of the target's choice among the drafter's candidates, given that the path so far was accepted.

    Attributes
    ----------
    path : tuple of str, rows of them
        "chain": the choices above all had rank 1, at the rounds of a chain as deep as the drafter drafts; "tree": they
        stood in the tree, at the rounds of a tree of ``budget`` nodes.
    depth : array, int64, shape (rows,)
        1 … L.
    n : array, int64, shape (rows,)
        Rounds whose walk came to this depth's choice, unless it was the last token allowed.
    n_rank : array, int64, shape (rows, 8)
        Of these, the choices of rank 1 … 8.
    rescued, low, high : array, float64, shape (rows,)
        P(rank 2 … 8 | not rank 1), and its Wilson interval, which takes rounds as independent: what a tree can at most
        win back with seven siblings. NaN where rank 1 was always right.
    budget : int
        Of the tree.
    num_candidates : int
        K of the trace: a choice of rank K + 1 and on is in no count.
    level : float
        Coverage of the intervals.
    """

    path: tuple[str, ...]
    depth: NDArray[np.int64]
    n: NDArray[np.int64]
    n_rank: NDArray[np.int64]
    rescued: NDArray[np.float64]
    low: NDArray[np.float64]
    high: NDArray[np.float64]
    budget: int
    num_candidates: int
    level: float

    columns = ("path", "depth", "n", *(f"rank_{r + 1}" for r in range(RANKS)), "later", "rescued", "low", "high")

    @property
    def share(self) -> NDArray[np.float64]:
        """``n_rank / n``, (rows, 8); NaN where n is 0."""
        shares: NDArray[np.float64] = self.n_rank / np.where(self.n > 0, self.n, np.nan)[:, None]
        return shares

    def records(self) -> list[dict[str, Any]]:
        """One dict a row, in which ``rank_1`` … ``rank_8`` and ``later``, every other choice, are shares of n."""
        share = self.share
        parts = (self.path, self.depth, self.n, *share.T, 1 - share.sum(1), self.rescued, self.low, self.high)
        rows = zip(*(np.asarray(part).tolist() for part in parts), strict=True)
        return [
            {name: None if value != value else value for name, value in zip(self.columns, row, strict=True)}
            for row in rows
        ]


@dataclass(frozen=True, eq=False)
class PayTable(Table):
    """τ of chain and tree by budget, expected and realised, and what a round may cost for it; ``choices`` says why.

    Attributes
    ----------
    policy : tuple of str, rows of them
        "chain" or "tree".
    budget : array, int64, shape (rows,)
        Nodes besides the root; of a chain, its depth.
    expected : array, float64, shape (rows,)
        Mean tokens a round that the drafter's own probabilities promise, cut where the continuation ends.
    tau, low, high : array, float64, shape (rows,)
        Mean tokens a round that the target's choices gave, and its bootstrap interval over prompts.
    n_rounds, n_tokens : array, int64, shape (rows,)
        Rounds of all prompts, and the tokens they emitted.
    pays_below, pays_low, pays_high : array, float64, shape (rows,)
        τ over that of the best chain, and its interval from the same draws of prompts: the policy is faster than that
        chain while a round of it costs less than that many of the chain's.
    used_last_rank : array, int64, shape (rows,)
        Rounds whose tree has a node of rank K − 1, the last that was recorded: a wider record might have changed it.
    choices : ChoiceTable
        Rank of the target's choice by depth.
    level : float
        Coverage of every interval.
    """

    policy: tuple[str, ...]
    budget: NDArray[np.int64]
    expected: NDArray[np.float64]
    tau: NDArray[np.float64]
    low: NDArray[np.float64]
    high: NDArray[np.float64]
    n_rounds: NDArray[np.int64]
    n_tokens: NDArray[np.int64]
    pays_below: NDArray[np.float64]
    pays_low: NDArray[np.float64]
    pays_high: NDArray[np.float64]
    used_last_rank: NDArray[np.int64]
    choices: ChoiceTable
    level: float

    columns = (
        "policy", "budget", "expected", "tau", "low", "high", "n_rounds", "n_tokens",
        "pays_below", "pays_low", "pays_high", "used_last_rank",
    )  # fmt: skip

    def __str__(self) -> str:
        return f"{super().__str__()}\n\n{self.choices}"


def would_a_tree_pay(
    trace: Trace,
    budgets: Sequence[int] = BUDGETS,
    *,
    shown_budget: int | None = None,
    backend: str | None = None,
    level: float = LEVEL,
    seed: int = 0,
    resamples: int = RESAMPLES,
) -> PayTable:
    """Walk a trace with chains and trees of every budget, and say what the trees gained and why.

    One tree of the largest budget is built a position: those of smaller ones are its beginnings. Memory is that of a
    chunk.

    Parameters
    ----------
    trace : TraceChunk, or chunks that can be gone through more than once
        See :mod:`ddtree.analysis.choices`.
    budgets : sequence of int
        Of the trees, at least 1 each. Chains have every depth that the trace has.
    shown_budget : int, optional
        One of them, whose walks the ranks on tree paths are of; 64, or the largest below it, if left out.
    backend : str, optional
        Of the tree builder and the acceptance, as in :func:`ddtree.build_tree`.
    level, seed, resamples
        Of the intervals.

    Returns
    -------
    PayTable

    Raises
    ------
    ValueError, TypeError
        A bad argument, by name, or arrays of the trace that do not fit together.
    """
    check_level(level)
    budgets = sorted({integer(f"budgets[{i}]", b, 1, INT32_MAX) for i, b in enumerate(budgets)})
    if not budgets:
        raise ValueError("budgets must hold at least one, got none")
    shown = max([b for b in budgets if b <= 64], default=budgets[0]) if shown_budget is None else shown_budget
    if shown not in budgets:
        raise ValueError(f"shown_budget must be one of the budgets {budgets}, got {shown_budget}")
    sums: list[NDArray[np.float64]] = []
    counts: NDArray[np.int64] | None = None
    L = K = 0
    for chunk in chunks_of(trace):
        chosen = choices_of(chunk)
        _, L, K = chosen.log_probs.shape
        promises = _promises(chosen, budgets, backend)
        starts = np.asarray(chunk.position_offsets, np.int64)
        sums_here, visited = _walk(promises, chosen.remaining, starts)
        counted = np.stack(
            [
                _ranks(chosen, visited[:, L - 1 if L else 0], chosen.path_is_likeliest),
                _ranks(chosen, visited[:, L + budgets.index(shown)], promises.path_in_tree(shown)),
            ]
        )
        sums.append(sums_here)
        counts = counted if counts is None else counts + counted
    keys = [("chain", d) for d in range(1, L + 1)] + [("tree", b) for b in budgets]
    return _pay_table(keys, np.concatenate(sums), _choice_table(counts, shown, K, level), level, seed, resamples)


@dataclass(frozen=True, eq=False)
class _Promises:
    """What each policy would keep and expects at each position; C policies: chains of depth 1 … L, then trees.

    ``accepted`` int64 and ``expected`` float64 are (M, C), ``nodes`` int64 (M, C) too, and ``used_last_rank`` bool;
    ``place`` (M, L) is the node index of the target's choice at each depth, which is the budget from which on it is in
    the tree.
    """

    accepted: NDArray[np.int64]
    expected: NDArray[np.float64]
    nodes: NDArray[np.int64]
    used_last_rank: NDArray[np.bool_]
    place: NDArray[np.int64]

    def path_in_tree(self, budget: int) -> NDArray[np.bool_]:
        """Whether the choices above each depth are all in the tree of this budget: bool (M, L)."""
        above = np.concatenate([np.zeros((len(self.place), 1), np.int64), self.place[:, :-1]], axis=1)
        return above[:, : self.place.shape[1]] <= budget


def _promises(chosen: Choices, budgets: Sequence[int], backend: str | None) -> _Promises:
    """Build the trees a batch after the other, and look up every policy's promise at every position."""
    M, L, K = chosen.log_probs.shape
    batch = max(1, _TREES // (1 + budgets[-1]))
    parts = [_of_trees(chosen, slice(i, i + batch), budgets, backend) for i in range(0, M, batch)]
    empty = np.zeros((0, len(budgets)))
    accepted, expected, nodes, last, place = (
        np.concatenate([start, *column])
        for start, column in zip(
            (empty.astype(np.int64), empty, empty.astype(np.int64), empty > 0, np.zeros((0, L), np.int64)),
            zip(*parts, strict=True) if parts else [()] * 5,
            strict=True,
        )
    )
    depth = np.arange(1, L + 1)
    likeliest = np.logical_and.accumulate(chosen.ranks == 0, axis=1).sum(1)  # drafts of a chain that are right
    first = chosen.log_probs[:, :, 0].astype(np.float64) if K else np.full((M, L), -np.inf)
    reach = np.exp(np.cumsum(first, axis=1))
    drafted = np.logical_and.accumulate(first > -np.inf, axis=1)
    chained = np.cumsum(drafted, axis=1)
    return _Promises(
        np.concatenate([np.minimum(likeliest[:, None], depth), accepted], axis=1),
        np.concatenate(
            [1 + np.cumsum(np.where(depth < chosen.remaining[:, None], reach, 0), axis=1), expected], axis=1
        ),
        np.concatenate([chained, nodes], axis=1),
        np.concatenate([(chained > 0) & (K == 1), last], axis=1),
        place,
    )


def _of_trees(chosen: Choices, rows: slice, budgets: Sequence[int], backend: str | None) -> tuple[NDArray[Any], ...]:
    """Every column of :class:`_Promises` by budget, and the place of each depth's choice, of some positions."""
    choices, remaining = chosen.choices[rows], chosen.remaining[rows]
    tree = ddtree.build_tree(
        chosen.log_probs[rows], chosen.token_ids[rows], chosen.root_token_ids[rows], budget=budgets[-1], backend=backend
    )
    B, L = choices.shape
    # after a node of depth d on the continuation's path, the target says the choice of depth d + 1; elsewhere, anything
    padded = np.concatenate([choices, np.full((B, 1), -1, np.int32)], axis=1)
    said = np.take_along_axis(padded, np.clip(tree.depths, 0, L), axis=1)
    kept = ddtree.accept_tree(tree, said, backend=backend).node_indices[:, 1:]
    place = np.where(kept >= 0, kept.astype(np.int64), _NOWHERE)
    accepted = np.stack([(place <= b).sum(1) for b in budgets], axis=1)
    counted = (tree.depths > 0) & (tree.depths < remaining[:, None])
    expected = (
        1 + np.cumsum(np.where(counted, np.exp(np.where(counted, tree.scores, -np.inf)), 0.0), axis=1)[:, budgets]
    )
    nodes = np.minimum(tree.node_counts[:, None] - 1, budgets)
    of_last_rank = tree.ranks[:, 1:] == chosen.log_probs.shape[2] - 1
    first_of_last = np.where(of_last_rank.any(1), 1 + of_last_rank.argmax(1), _NOWHERE)
    return accepted, expected, nodes, first_of_last[:, None] <= budgets, place


def _walk(
    promises: _Promises, remaining: NDArray[np.int64], starts: NDArray[np.int64]
) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    """Go through every prompt with every policy at once, as decoding does: a round, then on by what it emitted.

    Returns tokens, rounds, nodes, expected tokens and rounds that used the last rank, float64 (P, C, 5), and where
    rounds began, bool (M, C).
    """
    M, C = promises.accepted.shape
    sums, visited = np.zeros((len(starts) - 1, C, 5)), np.zeros((M, C), np.bool_)
    prompt, policy = (a.ravel() for a in np.indices((len(starts) - 1, C)))
    at, end = starts[prompt], starts[prompt + 1]
    while True:
        going = at < end
        prompt, policy, at, end = prompt[going], policy[going], at[going], end[going]
        if not len(at):
            return sums, visited
        tokens = np.minimum(promises.accepted[at, policy] + 1, remaining[at])
        visited[at, policy] = True
        counted = (promises.nodes, promises.expected, promises.used_last_rank)
        sums[prompt, policy] += np.stack([tokens, np.ones(len(at)), *(a[at, policy] for a in counted)], axis=1)
        at = at + tokens


def _ranks(chosen: Choices, visited: NDArray[np.bool_], on_path: NDArray[np.bool_]) -> NDArray[np.int64]:
    """Count, by depth, the visited positions whose path holds so far, and their choices of each rank: (L, 1 + 8)."""
    _, L, K = chosen.log_probs.shape
    tested = visited[:, None] & on_path & (np.arange(1, L + 1) < chosen.remaining[:, None])
    of_rank = [(tested & (chosen.ranks == r)).sum(0) if r < K else np.zeros(L, np.int64) for r in range(RANKS)]
    return np.stack([tested.sum(0), *of_rank], axis=1)


def _choice_table(counts: Any, shown: int, K: int, level: float) -> ChoiceTable:
    L = counts.shape[1]
    rows = counts.reshape(2 * L, 1 + RANKS)
    n, by_rank = rows[:, 0], rows[:, 1:]
    wrong, found = n - by_rank[:, 0], by_rank[:, 1:].sum(1)
    return ChoiceTable(
        ("chain",) * L + ("tree",) * L,
        np.tile(np.arange(1, L + 1), 2),
        n,
        by_rank,
        np.divide(found, wrong, out=np.full(len(n), np.nan), where=wrong > 0),
        *wilson_interval(found, wrong, level=level),
        shown,
        K,
        level,
    )


def _pay_table(
    keys: Sequence[tuple[str, int]],
    sums: NDArray[np.float64],
    choices: ChoiceTable,
    level: float,
    seed: int,
    resamples: int,
) -> PayTable:
    """Make the table of sums by prompt (P, C, 5)."""
    sums = sums[sums[:, :, 1].sum(1) > 0]  # prompts of one new token have no round
    columns = [np.ascontiguousarray(sums[:, c, :4]) for c in range(len(keys))]
    taus = tau_table_from_sums(keys, columns, level=level, seed=seed, resamples=resamples)
    chains = [c for c, (policy, _) in enumerate(keys) if policy == "chain"]
    draws = resample_sums(sums[:, :, :2].reshape(len(sums), 2 * len(keys)), seed=seed, resamples=resamples)
    drawn = draws[:, 0::2] / draws[:, 1::2]  # τ of every policy in every draw
    best = chains[int(np.nan_to_num(taus.tau[chains]).argmax())] if chains else 0
    low, high = percentile_interval(drawn / drawn[:, best : best + 1], level=level)
    return PayTable(
        taus.policy, taus.budget, taus.expected, taus.tau, taus.low, taus.high, taus.n_rounds, taus.n_tokens,
        taus.tau / taus.tau[best], low, high, sums[:, :, 4].sum(0).astype(np.int64), choices, level,
    )  # fmt: skip
