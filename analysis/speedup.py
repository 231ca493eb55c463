"""Speed-up under a cost model: what τ is worth once each round is paid for, and up to which budget it is. Pure NumPy.

A cost model is a :class:`ddtree.costs.CostModel`, or any function ``seconds(nodes, context)`` of a target pass over
``nodes`` nodes besides the root behind ``context`` committed rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ddtree.analysis.intervals import LEVEL, RESAMPLES, check_level, percentile_interval, resample_sums
from ddtree.analysis.rounds import Rounds, RoundTable, as_round_table
from ddtree.analysis.tables import Table

__all__ = ["BreakEvenTable", "CostTable", "SpeedupTable", "cost_table", "speedup_table"]


@dataclass(frozen=True, eq=False)
class SpeedupTable(Table):
    """How many times as fast as one-token decoding each run is, one row a run.

    Attributes
    ----------
    policy : tuple of str, rows of them
        Such as "tree" or "chain".
    budget : array, int64, shape (rows,)
        Most nodes besides the root.
    tau : array, float64, shape (rows,)
        Mean tokens emitted a round; NaN without a round.
    nodes : array, float64, shape (rows,)
        Mean nodes drafted a round, the root not counted.
    round_seconds : array, float64, shape (rows,)
        Mean seconds of a round, drafting included.
    speedup, low, high : array, float64, shape (rows,)
        Seconds of the same tokens one by one, over seconds of the rounds, and its bootstrap interval over prompts.
    level : float
        Coverage of the intervals.
    """

    policy: tuple[str, ...]
    budget: NDArray[np.int64]
    tau: NDArray[np.float64]
    nodes: NDArray[np.float64]
    round_seconds: NDArray[np.float64]
    speedup: NDArray[np.float64]
    low: NDArray[np.float64]
    high: NDArray[np.float64]
    level: float

    columns = ("policy", "budget", "tau", "nodes", "round_seconds", "speedup", "low", "high")

    def break_even(self, reference: float = 1.0) -> BreakEvenTable:
        """Say up to which budget each policy is at least ``reference`` times as fast as one-token decoding.

        Nothing is said of budgets that were not run: the break-even budget lies from ``pays_to`` to ``fails_at``.

        Parameters
        ----------
        reference : float
            1 for one-token decoding itself, or the speed-up of whatever else is to be beaten.

        Returns
        -------
        BreakEvenTable
        """
        rows: list[tuple[float, float, float, float]] = []
        for policy in dict.fromkeys(self.policy):
            of = np.flatnonzero([p == policy for p in self.policy])
            of = of[np.argsort(self.budget[of], kind="stable")]
            of = of[~np.isnan(self.speedup[of])]
            paying = np.flatnonzero(self.speedup[of] >= reference)
            last = int(paying[-1]) if len(paying) else -1
            budgets = [float(b) for b in self.budget[of]]
            best = int(self.speedup[of].argmax()) if len(of) else -1
            rows.append(
                (
                    budgets[best] if len(of) else np.nan,
                    float(self.speedup[of][best]) if len(of) else np.nan,
                    budgets[last] if last >= 0 else np.nan,
                    budgets[last + 1] if last + 1 < len(budgets) else np.nan,
                )
            )
        best_budget, best_speedup, pays_to, fails_at = np.array(rows, np.float64).reshape(-1, 4).T
        names = tuple(dict.fromkeys(self.policy))
        return BreakEvenTable(names, best_budget, best_speedup, pays_to, fails_at, reference)


@dataclass(frozen=True, eq=False)
class BreakEvenTable(Table):
    """Up to which budget a policy pays, one row a policy.

    Attributes
    ----------
    policy : tuple of str, rows of them
        Whose.
    best_budget, best_speedup : array, float64, shape (rows,)
        The fastest of the budgets that were run.
    pays_to : array, float64, shape (rows,)
        The largest budget that was run and is at least ``reference`` times as fast; NaN where none is.
    fails_at : array, float64, shape (rows,)
        The next budget that was run, which is not; NaN where the largest one still pays.
    reference : float
        The speed-up to beat.
    """

    policy: tuple[str, ...]
    best_budget: NDArray[np.float64]
    best_speedup: NDArray[np.float64]
    pays_to: NDArray[np.float64]
    fails_at: NDArray[np.float64]
    reference: float

    columns = ("policy", "best_budget", "best_speedup", "pays_to", "fails_at")


@dataclass(frozen=True, eq=False)
class CostTable(Table):
    """Seconds of a target pass by nodes and context.

    Attributes
    ----------
    context : array, int64, shape (rows,)
        Committed rows.
    nodes : array, int64, shape (rows,)
        Nodes besides the root.
    seconds : array, float64, shape (rows,)
        Of the pass, without drafting.
    """

    context: NDArray[np.int64]
    nodes: NDArray[np.int64]
    seconds: NDArray[np.float64]

    columns = ("context", "nodes", "seconds")


def speedup_table(
    runs: Iterable[tuple[str, int, Rounds]],
    costs: Any,
    *,
    draft_seconds: float | None = None,
    step_seconds: float | None = None,
    level: float = LEVEL,
    seed: int = 0,
    resamples: int = RESAMPLES,
) -> SpeedupTable:
    """Tabulate the speed-up of runs under a cost model.

    Parameters
    ----------
    runs : iterable of (str, int, rounds)
        Policy, budget, and its Generation's RoundTable, made with the prompts' lengths so that contexts are known.
    costs : CostModel or callable
        Of a target pass: see the head of this module. A function is asked once for each pair of nodes and context.
    draft_seconds : float, optional
        Of the drafter's pass in each round. By default the cost model's own, and 0 for a function.
    step_seconds : float, optional
        Of one token in one-token decoding. By default the target pass over the root alone, behind the context that
        each token has.
    level, seed, resamples
        Of the bootstrap over prompts.

    Returns
    -------
    SpeedupTable

    Raises
    ------
    ValueError
        A round whose context is not known, or seconds that are not finite and over 0.

    Examples
    --------
    A tree of 16 nodes that emits 4 tokens a round, whose pass takes twice as long as one token:

    >>> from ddtree import accept_tree, chain_tree
    >>> from ddtree.analysis.rounds import round_table
    >>> from ddtree.engine import Round
    >>> tree = chain_tree(np.array([[5, *range(16)]]))
    >>> choices = np.array([[0, 1, 2, 9] + [0] * 13], np.int32)
    >>> rounds = round_table([Round((0,), tree, choices, accept_tree(tree, choices))], prompt_lens=[100])
    >>> table = speedup_table([("chain", 16, rounds)], lambda nodes, context: 1 + nodes / 16)
    >>> table.tau.tolist(), table.speedup.tolist()
    ([4.0], [2.0])
    """
    check_level(level)
    seconds, of_drafter = _verify_seconds(costs)
    draft = of_drafter if draft_seconds is None else float(draft_seconds)
    if not 0 <= draft < np.inf:
        raise ValueError(f"draft_seconds must be finite and at least 0, got {draft_seconds}")
    if step_seconds is not None and not 0 < step_seconds < np.inf:
        raise ValueError(f"step_seconds must be finite and over 0, got {step_seconds}")
    keys, rows = [], []
    for policy, budget, run in runs:
        rounds = as_round_table(run)
        sums = _sums(rounds, seconds, draft, step_seconds)
        draws = resample_sums(sums, seed=seed, resamples=resamples)
        low, high = percentile_interval(draws[:, 3] / draws[:, 2], level=level)
        tokens, drafted, spent, alone = sums.sum(0)
        n = len(rounds)
        means = (tokens / n, drafted / n, spent / n, alone / spent) if n else (np.nan,) * 4
        keys.append((policy, budget))
        rows.append((*means, low, high))
    tau, nodes, round_seconds, speedup, lowest, highest = np.array(rows, np.float64).reshape(-1, 6).T
    budgets = np.array([budget for _, budget in keys], np.int64)
    names = tuple(policy for policy, _ in keys)
    return SpeedupTable(names, budgets, tau, nodes, round_seconds, speedup, lowest, highest, level)


def cost_table(costs: Any, nodes: Sequence[int], contexts: Sequence[int]) -> CostTable:
    """Tabulate a cost model, each context's node counts together.

    Parameters
    ----------
    costs : CostModel or callable
        Of a target pass: see the head of this module.
    nodes, contexts : sequence of int
        Nodes besides the root, and committed rows.

    Returns
    -------
    CostTable
    """
    c, n = (a.ravel() for a in np.meshgrid(np.asarray(contexts, np.int64), np.asarray(nodes, np.int64), indexing="ij"))
    return CostTable(c, n, _ask(_verify_seconds(costs)[0], n, c))


Seconds = Callable[[NDArray[np.int64], NDArray[np.int64]], NDArray[np.float64]]


def _verify_seconds(costs: Any) -> tuple[Seconds, float]:
    """Seconds of target passes, from arrays to an array, and of the drafter's."""
    if hasattr(costs, "seconds") and hasattr(costs, "draft_seconds"):
        draft = float(costs.draft_seconds)
        return lambda n, c: costs.seconds(n, c) - draft, draft  # a CostModel's rounds include the drafting
    if not callable(costs):
        raise TypeError(f"costs must be a CostModel or a function seconds(nodes, context), got {type(costs).__name__}")
    each = np.frompyfunc(lambda n, c: float(costs(n, c)), 2, 1)
    return lambda n, c: each(n, c).astype(np.float64), 0.0


def _ask(seconds: Seconds, nodes: ArrayLike, contexts: ArrayLike) -> NDArray[np.float64]:
    """Seconds of many passes, each pair of nodes and context asked for once."""
    n, c = np.asarray(nodes, np.int64), np.asarray(contexts, np.int64)
    base = int(n.max(initial=0)) + 1
    pairs, which = np.unique(c * base + n, return_inverse=True)
    asked, behind = pairs % base, pairs // base
    answers = seconds(asked, behind)
    wrong = np.flatnonzero(~(np.isfinite(answers) & (answers > 0)))
    if wrong.size:
        at = int(wrong[0])
        raise ValueError(
            f"costs must give seconds that are finite and over 0, got {answers[at]} at ({asked[at]}, {behind[at]})"
        )
    each: NDArray[np.float64] = answers[which.reshape(-1)]
    return each


def _sums(rounds: RoundTable, seconds: Seconds, draft: float, step: float | None) -> NDArray[np.float64]:
    """Tokens, nodes, seconds in rounds and seconds one by one of each prompt with a round: float64 (P, 4)."""
    if (rounds.prefix_len < 0).any():
        raise ValueError("runs must know each round's context: make them with round_table(generation, prompt_lens)")
    in_round = draft + _ask(seconds, rounds.num_nodes, rounds.prefix_len)
    alone = np.zeros(len(rounds))
    if step is None:
        of = np.repeat(np.arange(len(rounds)), rounds.tokens)  # a token's round
        first = np.cumsum(rounds.tokens) - rounds.tokens
        context = rounds.prefix_len[of] + np.arange(len(of)) - first[of]
        alone += np.bincount(of, weights=_ask(seconds, np.zeros_like(of), context), minlength=len(rounds))
    else:
        alone += rounds.tokens * step
    columns = (rounds.tokens, rounds.num_nodes, in_round, alone, np.ones(len(rounds)))
    sums: NDArray[np.float64] = np.stack(
        [np.bincount(rounds.prompt, weights=np.asarray(c, np.float64)) for c in columns], axis=1
    )
    return sums[sums[:, 4] > 0, :4]
