"""Acceptance statistics of recorded rounds: rates by depth, and τ with an interval. Pure NumPy.

A *round* here is one request's row of a :class:`ddtree.engine.records.Round`; a row of an inert request, which emitted
nothing, is none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ddtree.engine.records import Generation, Round

__all__ = ["AcceptanceTable", "TauTable", "acceptance_table", "tau_by_budget", "tau_interval", "wilson_interval"]

LEVEL = 0.95
RESAMPLES = 2_000


class _Columns:
    """A table of equally long columns that can be read by rows."""

    _columns: tuple[str, ...] = ()

    def records(self) -> list[dict[str, Any]]:
        """One dict of plain Python values a row; NaN, a value that does not exist, as None."""
        rows = zip(*(np.asarray(getattr(self, name)).tolist() for name in self._columns), strict=True)
        return [dict(zip(self._columns, map(_none_if_nan, row), strict=True)) for row in rows]

    def __str__(self) -> str:
        cells = [list(self._columns)]
        cells += [[_cell(value) for value in record.values()] for record in self.records()]
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        return "\n".join("  ".join(c.rjust(w) for c, w in zip(row, widths, strict=True)) for row in cells)


def _cell(value: Any) -> str:
    return "-" if value is None else f"{value:.3f}" if isinstance(value, float) else str(value)


def _none_if_nan(value: Any) -> Any:
    return None if value != value else value


@dataclass(frozen=True, eq=False)
class AcceptanceTable(_Columns):
    """How often the target took what the tree offered, by depth.

    Attributes
    ----------
    depth : array, int64, shape (D,)
        1 … D, the depth limit of the widest tree.
    n_offered : array, int64, shape (D,)
        Rounds that tested this depth: the kept path reached depth − 1, its node there had a child, and the walk was
        not cut at that node by a stop token or by the last token allowed (then nobody asked whether a child fits).
    n_accepted : array, int64, shape (D,)
        Of these, the rounds that kept a node at this depth.
    rate : array, float64, shape (D,)
        ``n_accepted / n_offered``, the chance to go on given that the path came this far; NaN where none was offered.
    low, high : array, float64, shape (D,)
        Wilson interval of the rate, which takes rounds as independent; NaN where none was offered.
    level : float
        Coverage of every interval here.
    tau : float
        Mean tokens emitted a round, over all rounds; NaN without a round.
    tau_low, tau_high : float
        Its interval (see :func:`tau_interval`).
    n_rounds : int
        Rounds counted.
    """

    depth: NDArray[np.int64]
    n_offered: NDArray[np.int64]
    n_accepted: NDArray[np.int64]
    rate: NDArray[np.float64]
    low: NDArray[np.float64]
    high: NDArray[np.float64]
    level: float
    tau: float
    tau_low: float
    tau_high: float
    n_rounds: int

    _columns = ("depth", "n_offered", "n_accepted", "rate", "low", "high")


@dataclass(frozen=True, eq=False)
class TauTable(_Columns):
    """τ of every run of a sweep, one row a run.

    Attributes
    ----------
    mode : tuple of str
        "tree" or "chain", as the sweep was asked for.
    budget : array, int64, shape (rows,)
        Nodes besides the root.
    tau, low, high : array, float64, shape (rows,)
        Mean tokens emitted a round and its interval (see :func:`tau_interval`); NaN where there is none.
    n_rounds, n_tokens : array, int64, shape (rows,)
        Rounds of all requests, and the tokens they emitted.
    level : float
        Coverage of the intervals.
    """

    mode: tuple[str, ...]
    budget: NDArray[np.int64]
    tau: NDArray[np.float64]
    low: NDArray[np.float64]
    high: NDArray[np.float64]
    n_rounds: NDArray[np.int64]
    n_tokens: NDArray[np.int64]
    level: float

    _columns = ("mode", "budget", "tau", "low", "high", "n_rounds", "n_tokens")


def acceptance_table(
    rounds: Generation | Iterable[Round], *, level: float = LEVEL, seed: int = 0, resamples: int = RESAMPLES
) -> AcceptanceTable:
    """Count, by depth, what was offered and what was accepted.

    Parameters
    ----------
    rounds : Generation or iterable of Round
        What ``Engine.generate`` returned, or any of its rounds, on the host.
    level : float
        Coverage of the intervals, over 0 and below 1.
    seed, resamples : int
        Of the bootstrap for τ's interval.

    Returns
    -------
    AcceptanceTable

    Examples
    --------
    One round that drafted a chain of two, of which the target took the first:

    >>> from ddtree import accept_tree, chain_tree
    >>> tree = chain_tree(np.array([[5, 6, 7]]))
    >>> choices = np.array([[6, 0, 0]], np.int32)
    >>> table = acceptance_table([Round((0,), tree, choices, accept_tree(tree, choices))])
    >>> table.n_offered.tolist(), table.n_accepted.tolist(), table.tau
    ([1, 1], [1, 0], 2.0)
    """
    rounds = _rounds(rounds)
    D = max((r.tree.max_depth for r in rounds), default=0)
    counts = np.zeros((2, D), np.int64)  # offered, accepted
    for r in rounds:
        counts[:, : r.tree.max_depth] += _count(r)
    offered, accepted = counts
    tau, tau_low, tau_high = tau_interval(rounds, level=level, seed=seed, resamples=resamples)
    return AcceptanceTable(
        np.arange(1, D + 1),
        offered,
        accepted,
        np.where(offered > 0, accepted / np.maximum(offered, 1), np.nan),
        *wilson_interval(accepted, offered, level=level),
        level,
        tau,
        tau_low,
        tau_high,
        sum(int((r.acceptance.lengths > 0).sum()) for r in rounds),
    )


def tau_by_budget(
    run: Callable[[str, int], Generation],
    budgets: Mapping[str, Sequence[int]],
    *,
    level: float = LEVEL,
    seed: int = 0,
    resamples: int = RESAMPLES,
) -> TauTable:
    """Run every mode at each of its budgets and tabulate τ.

    Parameters
    ----------
    run : callable
        ``run(mode, budget)`` generates once and returns its Generation.
    budgets : mapping of str to sequence of int
        Of each mode, such as ``{"chain": (1, 2, 4), "tree": (1, 2, 4, 8)}``; in the order of the rows.
    level, seed, resamples
        Of the intervals, as in :func:`tau_interval`.

    Returns
    -------
    TauTable
    """
    keys = [(mode, budget) for mode, those in budgets.items() for budget in those]
    intervals, sums = [], []
    for mode, budget in keys:
        rounds = _rounds(run(mode, budget))
        intervals.append(tau_interval(rounds, level=level, seed=seed, resamples=resamples))
        sums.append([int(x.sum()) for x in _per_request(rounds)])
    tau, low, high = np.array(intervals, np.float64).reshape(-1, 3).T
    n_tokens, n_rounds = np.array(sums, np.int64).reshape(-1, 2).T
    return TauTable(
        tuple(mode for mode, _ in keys),
        np.array([b for _, b in keys], np.int64),
        tau,
        low,
        high,
        n_rounds,
        n_tokens,
        level,
    )


def tau_interval(
    rounds: Generation | Iterable[Round], *, level: float = LEVEL, seed: int = 0, resamples: int = RESAMPLES
) -> tuple[float, float, float]:
    """τ, the mean tokens emitted a round, and its bootstrap interval over requests.

    Rounds of one request resemble each other, so whole requests are drawn with replacement, and τ of each draw is its
    tokens over its rounds. The interval lies between the percentiles of the draws; with fewer than two requests there
    is nothing to draw from and both ends are NaN.

    Returns
    -------
    tau, low, high : float
        All NaN without a round.
    """
    _check_level(level)
    tokens, n_rounds = _per_request(_rounds(rounds))
    if not len(tokens):
        return np.nan, np.nan, np.nan
    tau = float(tokens.sum() / n_rounds.sum())
    if len(tokens) == 1:
        return tau, np.nan, np.nan
    draws = np.random.default_rng(seed).multinomial(len(tokens), np.full(len(tokens), 1 / len(tokens)), size=resamples)
    low, high = np.quantile(draws @ tokens / (draws @ n_rounds), [(1 - level) / 2, (1 + level) / 2])
    return tau, float(low), float(high)


def wilson_interval(successes: Any, trials: Any, *, level: float = LEVEL) -> tuple[NDArray[Any], NDArray[Any]]:
    """Wilson score interval of a proportion (Wilson 1927): sensible at 0 and 1, and for few trials.

    Parameters
    ----------
    successes, trials : array, int, one shape
        0 ≤ successes ≤ trials.
    level : float
        Coverage, over 0 and below 1.

    Returns
    -------
    low, high : array, float64, of that shape
        NaN where there was no trial.

    Examples
    --------
    >>> low, high = wilson_interval(8, 10)
    >>> round(float(low), 4), round(float(high), 4)
    (0.4902, 0.9433)
    """
    _check_level(level)
    z2 = NormalDist().inv_cdf((1 + level) / 2) ** 2
    k, n = np.asarray(successes, np.float64), np.asarray(trials, np.float64)
    n = np.where(n > 0, n, np.nan)
    middle = (k + z2 / 2) / (n + z2)
    half = np.sqrt(z2) / (n + z2) * np.sqrt(k * (n - k) / n + z2 / 4)
    return np.clip(middle - half, 0, k / n), np.clip(middle + half, k / n, 1)  # rounding may pass the rate by a bit


def _rounds(rounds: Generation | Iterable[Round]) -> list[Round]:
    return list(rounds.rounds if isinstance(rounds, Generation) else rounds)


def _count(round_: Round) -> NDArray[np.int64]:
    """Of one Round, the rows that offered and that accepted each depth 1 … L: int64 (2, L)."""
    tree, kept = round_.tree, round_.acceptance
    B, N = tree.parents.shape
    has_child = np.zeros((B, N + 1), np.bool_)  # the last column takes the parents that are −1
    has_child[np.arange(B)[:, None], tree.parents] = True
    above = np.arange(tree.max_depth)  # depth − 1
    last = kept.lengths[:, None] - 1  # depth of the last kept node
    node = kept.node_indices[:, : tree.max_depth]  # (B, L): the kept node above each depth, −1 where the path is over
    cut = kept.finished[:, None] & (above == last)
    offered = (node >= 0) & np.take_along_axis(has_child, node, 1) & ~cut
    return np.array([offered.sum(0), (above < last).sum(0)])


def _per_request(rounds: list[Round]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Tokens emitted and rounds taken, one entry for each request that had a round."""
    ids = np.concatenate([np.zeros(0, np.int64), *(np.asarray(r.request_ids, np.int64) for r in rounds)])
    lengths = np.concatenate([np.zeros(0, np.int64), *(r.acceptance.lengths for r in rounds)])
    tokens = np.bincount(ids, weights=lengths).astype(np.int64)
    n_rounds = np.bincount(ids[lengths > 0], minlength=len(tokens))
    return tokens[n_rounds > 0], n_rounds[n_rounds > 0]


def _check_level(level: float) -> None:
    if not 0 < level < 1:
        raise ValueError(f"level must be over 0 and below 1, got {level}")
