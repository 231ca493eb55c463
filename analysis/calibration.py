"""Calibration of a drafter: what it promised beside what came, from a trace. Pure NumPy.

A drafter's distribution is known for its K candidates of a depth alone; what they lack to 1 is the probability that the
choice is none of them. So every statistic here is of K + 1 outcomes: each candidate, and the remainder. For the fit of
a temperature the remainder is taken as what it is, the other V − K tokens of the vocabulary, with equal shares.
Positions at which nothing was drafted, or which lie past a continuation's end, are left out.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ddtree.analysis.choices import Choices, Trace, choices_of, chunks_of
from ddtree.analysis.intervals import LEVEL, check_level, wilson_interval
from ddtree.analysis.tables import Table
from ddtree.checks import INT32_MAX, integer

__all__ = ["CalibrationTable", "ReliabilityTable", "calibration_table", "reliability_table"]

GIVEN = ("accepted path", "any path")
"""Positions taken at a depth: those whose choices above all had rank 1, where a chain's walk comes, or all."""

BINS = tuple(i / 10 for i in range(11))
MOST_STEPS = 100


@dataclass(frozen=True, eq=False)
class CalibrationTable(Table):
    """How far a drafter's probabilities can be believed, by depth; first along accepted paths, then along any.

    Attributes
    ----------
    given : tuple of str, rows of them
        "accepted path": at the positions whose choices above all had rank 1, where a chain's walk comes; "any path": at
        all positions.
    depth : array, int64, shape (rows,)
        1 … L.
    n : array, int64, shape (rows,)
        Positions; the other columns are NaN without one.
    expected, realised : array, float64, shape (rows,)
        Mean probability of the likeliest candidate, and how often the target chose it.
    low, high : array, float64, shape (rows,)
        Wilson interval of ``realised``, which takes positions as independent.
    mass, covered : array, float64, shape (rows,)
        Mean probability of all K candidates, and how often the choice was among them.
    brier : array, float64, shape (rows,)
        Brier score: mean of Σ (probability − outcome)² over the K candidates and the remainder, 0 … 2 (Brier 1950).
    log_loss : array, float64, shape (rows,)
        Mean of −log of the outcome's probability, in nats.
    temperature, temperature_low, temperature_high : array, float64, shape (rows,)
        The T of greatest likelihood where each token's probability is taken to the power 1/T and they are normalised
        again (temperature scaling, arXiv 1706.04599): over 1, the drafter is too sure of itself. Assumed is that the
        V − K tokens that are no candidates share the remainder equally, and each is tempered like any other; so T is
        that of the whole vocabulary's logits as far as their tail is flat, and a little nearer to 1 where it is not; it
        hardly depends on K. The interval is the normal one of 1/T, with a variance that lets positions of one prompt
        resemble each other; NaN with fewer than two prompts. T is 0 where every choice was a likeliest token, and inf
        where no finite T beats equal probabilities; then there is no interval.
    fitted_log_loss : array, float64, shape (rows,)
        The log loss at that temperature.
    level : float
        Coverage of the intervals.
    """

    given: tuple[str, ...]
    depth: NDArray[np.int64]
    n: NDArray[np.int64]
    expected: NDArray[np.float64]
    realised: NDArray[np.float64]
    low: NDArray[np.float64]
    high: NDArray[np.float64]
    mass: NDArray[np.float64]
    covered: NDArray[np.float64]
    brier: NDArray[np.float64]
    log_loss: NDArray[np.float64]
    temperature: NDArray[np.float64]
    temperature_low: NDArray[np.float64]
    temperature_high: NDArray[np.float64]
    fitted_log_loss: NDArray[np.float64]
    level: float

    columns = (
        "given", "depth", "n", "expected", "realised", "low", "high", "mass", "covered", "brier", "log_loss",
        "temperature", "temperature_low", "temperature_high", "fitted_log_loss",
    )  # fmt: skip


@dataclass(frozen=True, eq=False)
class ReliabilityTable(Table):
    """The reliability curve: of what was promised with about the same probability, how much came true.

    Attributes
    ----------
    bin_low, bin_high : array, float64, shape (bins,)
        Probabilities from ``bin_low`` to below ``bin_high``; the last bin has its upper end too.
    n : array, int64, shape (bins,)
        Promises; the following columns are NaN without one.
    expected, realised : array, float64, shape (bins,)
        Their mean probability, and the share that the target chose.
    low, high : array, float64, shape (bins,)
        Wilson interval of ``realised``, which takes promises as independent.
    level : float
        Coverage of the intervals.
    error : float
        Expected calibration error: mean distance of ``expected`` and ``realised``, bins weighted by n.
    """

    bin_low: NDArray[np.float64]
    bin_high: NDArray[np.float64]
    n: NDArray[np.int64]
    expected: NDArray[np.float64]
    realised: NDArray[np.float64]
    low: NDArray[np.float64]
    high: NDArray[np.float64]
    level: float
    error: float

    columns = ("bin_low", "bin_high", "n", "expected", "realised", "low", "high")


def calibration_table(trace: Trace, *, vocab_size: int | None = None, level: float = LEVEL) -> CalibrationTable:
    """Tabulate a drafter's calibration by depth.

    The trace is gone through some ten times, once a step of the temperatures' fits; memory is that of a chunk.

    Parameters
    ----------
    trace : TraceChunk, or chunks that can be gone through more than once
        See :mod:`ddtree.analysis.choices`.
    vocab_size : int, optional
        V, the tokens that the drafter's distribution is over; that of the trace's manifest if left out.
    level : float
        Coverage of the intervals, over 0 and below 1.

    Returns
    -------
    CalibrationTable
        2 · L rows.

    Raises
    ------
    ValueError, TypeError
        Arrays that do not fit together, a trace that can be gone through only once, or one without a manifest and no
        ``vocab_size``.
    """
    check_level(level)
    V = _vocab_size(trace, vocab_size)
    sums = _total(trace, _scores, V)
    L = sums.shape[2]
    n, expected, realised, mass, covered, brier, log_loss = sums.reshape(7, -1)
    beta, spread = _fit_inverse_temperatures(trace, L, V)
    fitted = _total(trace, lambda cases: cases.log_loss(beta), V).ravel()
    beta, spread = beta.ravel(), NormalDist().inv_cdf((1 + level) / 2) * spread.ravel()
    with np.errstate(divide="ignore"):
        temperature, lowest, highest = 1 / beta, 1 / (beta + spread), 1 / np.maximum(beta - spread, 0)
    low, high = wilson_interval(realised, n, level=level)
    whole = np.where(n > 0, n, np.nan)
    return CalibrationTable(
        given=tuple(given for given in GIVEN for _ in range(L)),
        depth=np.tile(np.arange(1, L + 1), 2),
        n=n.astype(np.int64),
        expected=expected / whole,
        realised=realised / whole,
        low=low,
        high=high,
        mass=mass / whole,
        covered=covered / whole,
        brier=brier / whole,
        log_loss=log_loss / whole,
        temperature=np.where(n > 0, temperature, np.nan),
        temperature_low=lowest,
        temperature_high=highest,
        fitted_log_loss=fitted / whole,
        level=level,
    )


def reliability_table(
    trace: Trace,
    *,
    depth: int | None = None,
    rank: int | None = 1,
    given: str = "accepted path",
    bins: ArrayLike = BINS,
    level: float = LEVEL,
) -> ReliabilityTable:
    """Tabulate a drafter's reliability curve.

    Parameters
    ----------
    trace : TraceChunk, or chunks that can be gone through more than once
        See :mod:`ddtree.analysis.choices`.
    depth : int, optional
        Of this depth alone, from 1; of all depths together if left out.
    rank : int, optional
        Promises of this rank alone, 1 the likeliest; of all K candidates if None.
    given : str
        "accepted path" or "any path", as in :class:`CalibrationTable`.
    bins : array, float, shape (bins + 1,)
        Ends of the bins, rising from 0 to 1.
    level : float
        Coverage of the intervals, over 0 and below 1.

    Returns
    -------
    ReliabilityTable

    Raises
    ------
    ValueError, TypeError
        A bad argument, by name, or arrays of the trace that do not fit together.
    """
    check_level(level)
    edges = np.asarray(bins, np.float64)
    if edges.ndim != 1 or len(edges) < 2 or edges[0] != 0 or edges[-1] != 1 or not (np.diff(edges) > 0).all():
        raise ValueError(f"bins must rise from 0 to 1, got {bins!r}")
    if given not in GIVEN:
        raise ValueError(f"given must be one of {GIVEN}, got {given!r}")
    sums = np.zeros((3, len(edges) - 1))
    for cases in _cases(trace, INT32_MAX):  # of the candidates alone, whatever the remainder is made of
        _, L, K = cases.probs.shape
        for name, value, most in (("depth", depth, L), ("rank", rank, K)):
            if value is not None and not 1 <= value <= most:
                raise ValueError(f"{name} must be in 1 … {most}, as the trace has it, got {value}")
        depths = slice(None) if depth is None else slice(depth - 1, depth)
        ranks = slice(None) if rank is None else slice(rank - 1, rank)
        probs = cases.probs[:, depths, ranks]
        used = cases.used[GIVEN.index(given)][:, depths, None] & (cases.scores[:, depths, :-1][..., ranks] > -np.inf)
        hits = (cases.ranks[:, depths, None] == np.arange(K)[ranks])[used]
        probs = probs[used]
        which = np.clip(np.searchsorted(edges, probs, side="right") - 1, 0, len(edges) - 2)
        sums += [np.bincount(which, weights=w, minlength=len(edges) - 1) for w in (np.ones(len(probs)), probs, hits)]
    n, promised, came = sums
    whole = np.where(n > 0, n, np.nan)
    expected, realised = promised / whole, came / whole
    error = float(np.nansum(n * np.abs(expected - realised)) / n.sum()) if n.any() else np.nan
    low, high = wilson_interval(came, n, level=level)
    return ReliabilityTable(edges[:-1], edges[1:], n.astype(np.int64), expected, realised, low, high, level, error)


@dataclass(frozen=True, eq=False)
class _Cases:
    """A chunk's predictions: which count (2, M, L), and the K + 1 outcomes of each.

    ``scores`` (M, L, K + 1) are a token's log-probabilities, of the remainder's tokens the last; −inf is no outcome.
    ``log_others`` (M, L) is the log of how many tokens the remainder has. ``ranks`` (M, L) are the outcomes that came,
    K the remainder.
    """

    prompt: NDArray[np.int64]
    used: NDArray[np.bool_]
    scores: NDArray[np.float64]
    log_others: NDArray[np.float64]
    ranks: NDArray[np.int64]

    @property
    def probs(self) -> NDArray[np.float64]:
        """Of the K candidates alone, (M, L, K)."""
        return np.exp(self.scores[..., :-1])

    @property
    def outcomes(self) -> NDArray[np.float64]:
        """Log-probabilities of the K candidates and of the whole remainder, (M, L, K + 1)."""
        return np.concatenate([self.scores[..., :-1], (self.scores[..., -1] + self.log_others)[..., None]], axis=2)

    @property
    def came(self) -> NDArray[np.float64]:
        """Scores of the tokens that came, (M, L); 0 where nothing counts."""
        scores = np.take_along_axis(self.scores, np.maximum(self.ranks, 0)[..., None], 2)[..., 0]
        return np.where(self.used[1], scores, 0.0)

    @property
    def log_ways(self) -> NDArray[np.float64]:
        """Log of how many tokens the outcome that came has, (M, L): 0 of a candidate, and where nothing counts."""
        K = self.scores.shape[2] - 1
        return np.where(self.used[1] & (self.ranks == K), self.log_others, 0.0)

    def sum(self, values: NDArray[np.float64]) -> NDArray[np.float64]:
        """Sum values (M, L) or (2, M, L) over the predictions that count: (2, L)."""
        total: NDArray[np.float64] = np.where(self.used, values, 0.0).sum(1)
        return total

    def tempered(self, beta: NDArray[np.float64]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Log-normaliser (M, L) and the outcomes' probabilities (M, L, K + 1), of tokens to the power ``beta`` (L,)."""
        power = beta[:, None] * np.where(self.scores > -np.inf, self.scores, 0.0)
        power[..., -1] += self.log_others
        power = np.where(self.scores > -np.inf, power, -np.inf)
        top = power.max(2)
        shares = np.exp(power - top[..., None])
        total = shares.sum(2)
        return top + np.log(total), shares / total[..., None]

    def log_loss(self, beta: NDArray[np.float64]) -> NDArray[np.float64]:
        """Sum of −log of the tempered probabilities of what came, at inverse temperatures (2, L): (2, L)."""
        losses = [self.tempered(row)[0] - row * self.came for row in np.where(np.isfinite(beta), beta, 0.0)]
        best = self.scores == self.scores.max(2, keepdims=True)
        ways = best[..., :-1].sum(2) + np.where(best[..., -1], np.exp(self.log_others), 0.0)
        coldest = np.log(ways)  # as T goes to 0, the likeliest tokens share the probability
        return np.where(np.isfinite(beta), self.sum(np.stack(losses)), self.sum(coldest)) - self.sum(self.log_ways)

    def slopes(self, beta: NDArray[np.float64]) -> tuple[NDArray[np.float64], ...]:
        """First and second derivative of the log loss by ``beta`` (2, L), each (2, L); the first of each prompt too."""
        first, second = [], []
        finite_scores = np.where(self.scores > -np.inf, self.scores, 0.0)
        for row in beta:
            _, p = self.tempered(row)
            mean = (p * finite_scores).sum(2)
            first.append(mean - self.came)
            second.append((p * (finite_scores - mean[..., None]) ** 2).sum(2))
        gradient = np.where(self.used, np.stack(first), 0.0)  # (2, M, L)
        by_prompt = np.zeros((int(self.prompt.max(initial=-1)) + 1, *beta.shape))
        np.add.at(by_prompt, self.prompt, gradient.transpose(1, 0, 2))
        return gradient.sum(1), self.sum(np.stack(second)), by_prompt


def _vocab_size(trace: Trace, vocab_size: int | None) -> int:
    """V, as the argument or the trace's manifest has it."""
    if vocab_size is None:
        vocab_size = getattr(getattr(trace, "manifest", None), "vocab_size", None)
        if vocab_size is None:
            raise ValueError("vocab_size must be given for a trace without a manifest, got None")
    return integer("vocab_size", vocab_size, 1, INT32_MAX)


def _cases(trace: Trace, vocab_size: int) -> Iterator[_Cases]:
    for chunk in chunks_of(trace):
        yield _cases_of(choices_of(chunk), vocab_size)


def _total(trace: Trace, statistic: Callable[[_Cases], NDArray[np.float64]], vocab_size: int) -> NDArray[np.float64]:
    """Sum a statistic over the trace's chunks."""
    return functools.reduce(operator.add, map(statistic, _cases(trace, vocab_size)))


def _cases_of(chosen: Choices, vocab_size: int) -> _Cases:
    K = chosen.log_probs.shape[2]
    log_probs = chosen.log_probs.astype(np.float64)
    # float32 log-probs tell a sum apart from 1 no better than this; a choice outside must not be called impossible
    least = max(K, 1) * 2.0**-24
    remainder = np.log(np.maximum(1 - np.exp(log_probs).sum(2), least))
    counts = (chosen.ranks >= 0) & (log_probs.max(2, initial=-np.inf) > -np.inf)
    others = vocab_size - (log_probs > -np.inf).sum(2)
    if (counts & (others < np.where(chosen.ranks == K, 1, 0))).any():
        raise ValueError(
            f"vocab_size must be that of the drafter's distributions, got {vocab_size}: the trace has that many "
            "candidates at a depth, or more, and choices beside them"
        )
    log_others = np.log(np.maximum(others, 1))
    each = np.where(others > 0, remainder - log_others, -np.inf)  # of a whole vocabulary nothing remains
    return _Cases(
        chosen.prompt,
        np.stack([counts & chosen.path_is_likeliest, counts]),
        np.concatenate([log_probs, each[..., None]], axis=2),
        log_others,
        chosen.ranks,
    )


def _scores(cases: _Cases) -> NDArray[np.float64]:
    """Sums over a chunk's predictions, (7, 2, L): n, promised, came, mass, covered, Brier score, log loss."""
    K = cases.scores.shape[2] - 1
    all_probs, log_came = np.exp(cases.outcomes), cases.came + cases.log_ways
    came, first = np.exp(log_came), cases.probs[..., 0] if K else np.zeros(cases.ranks.shape)
    brier = (all_probs**2).sum(2) - 2 * came + 1
    columns = (
        np.ones_like(came), first, cases.ranks == 0, cases.probs.sum(2), cases.ranks < K, brier, -log_came,
    )  # fmt: skip
    return np.stack([cases.sum(np.asarray(column, np.float64)) for column in columns])


def _fit_inverse_temperatures(trace: Trace, L: int, vocab_size: int) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Inverse temperatures 1/T of greatest likelihood, and their standard errors: (2, L) each.

    The log loss is convex in 1/T, so its slope has one zero, or none: then 1/T is 0 (falling nowhere) or inf. Newton's
    steps are kept between what is known to lie below and above it. The error is the sandwich estimator, with prompts
    as clusters.
    """
    steepest = _total(trace, lambda cases: cases.sum(cases.scores.max(2) - cases.came), vocab_size)
    at_zero = _total(trace, lambda cases: cases.slopes(np.zeros((2, L)))[0], vocab_size)
    inner = (steepest > 0) & (at_zero < 0)
    beta, below, above = np.ones((2, L)), np.zeros((2, L)), np.full((2, L), np.inf)
    first = second = squares = clusters = np.zeros((2, L))
    for _ in range(MOST_STEPS):
        first, second, squares, clusters = np.zeros((4, 2, L))
        for cases in _cases(trace, vocab_size):
            slope, curvature, by_prompt = cases.slopes(beta)
            first, second = first + slope, second + curvature
            squares, clusters = squares + (by_prompt**2).sum(0), clusters + (by_prompt != 0).sum(0)
        below, above = np.where(first < 0, beta, below), np.where(first > 0, beta, above)
        step = np.divide(first, second, out=np.where(first == 0, 0.0, np.inf), where=second > 0)
        settled = np.abs(step) <= 1e-9 * beta
        if (settled | ~inner).all():
            break
        middle = np.where(np.isinf(above), 2 * beta, (below + np.where(np.isinf(above), 0, above)) / 2)
        between = (beta - step > below) & (beta - step < above)
        beta = np.where(settled, beta, np.where(between, beta - step, middle))
    else:
        raise ArithmeticError(f"the temperature's fit has not settled after {MOST_STEPS} steps")
    error = np.sqrt(squares) / np.where(second > 0, second, np.nan)
    error = np.where(inner & (clusters >= 2), error, np.nan)
    return np.where(inner, beta, np.where(steepest > 0, 0.0, np.inf)), error
