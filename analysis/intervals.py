"""Intervals and tests that the tables share: Wilson's, the bootstrap over prompts, and the sign test. Pure NumPy."""

from __future__ import annotations

from statistics import NormalDist
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

__all__ = ["LEVEL", "RESAMPLES", "check_level", "percentile_interval", "resample_sums", "sign_test", "wilson_interval"]

LEVEL = 0.95
RESAMPLES = 2_000

_BLOCK = 2**22
"""Most prompts drawn at once, so that memory does not grow with prompts times resamples."""


def check_level(level: float) -> None:
    """Refuse a coverage that is no share between 0 and 1."""
    if not 0 < level < 1:
        raise ValueError(f"level must be over 0 and below 1, got {level}")


def wilson_interval(
    successes: ArrayLike, trials: ArrayLike, *, level: float = LEVEL
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Wilson score interval of a proportion (Wilson 1927): sensible at 0 and 1, and for few trials.

    Parameters
    ----------
    successes, trials : array, int, shapes that broadcast
        0 ≤ successes ≤ trials.
    level : float
        Coverage, over 0 and below 1.

    Returns
    -------
    low, high : array, float64, of that shape
        NaN where there was no trial.

    Raises
    ------
    ValueError
        Successes or trials that are not as above, with the first that are not.

    Examples
    --------
    >>> low, high = wilson_interval(8, 10)
    >>> round(float(low), 4), round(float(high), 4)
    (0.4902, 0.9433)
    """
    check_level(level)
    z2 = NormalDist().inv_cdf((1 + level) / 2) ** 2
    k, n = np.asarray(successes, np.float64), np.asarray(trials, np.float64)
    try:
        k, n = np.broadcast_arrays(k, n)
    except ValueError:
        raise ValueError(f"successes and trials must have shapes that broadcast, got {k.shape} and {n.shape}") from None
    wrong = ~((k >= 0) & (k <= n) & (n < np.inf))
    if wrong.any():
        raise ValueError(f"successes must be in 0 … trials, got {k[wrong].flat[0]:g} of {n[wrong].flat[0]:g}")
    n = np.where(n > 0, n, np.nan)
    middle = (k + z2 / 2) / (n + z2)
    half = np.sqrt(z2) / (n + z2) * np.sqrt(k * (n - k) / n + z2 / 4)
    return np.clip(middle - half, 0, k / n), np.clip(middle + half, k / n, 1)  # rounding may pass the rate by a bit


def resample_sums(columns: ArrayLike, *, seed: int = 0, resamples: int = RESAMPLES) -> NDArray[np.float64]:
    """Sums of each column over prompts that are drawn with replacement, as many as there are (Efron 1979).

    What belongs to one prompt stays together: rounds of one prompt resemble each other, prompts do not. A ratio of two
    of the sums is one draw of a mean, such as τ, tokens over rounds; two policies that were run on the same prompts are
    compared by columns of one table, so that each draw takes the same prompts for both.

    Parameters
    ----------
    columns : array, shape (P, C)
        One row a prompt.
    seed : int
        Of the draws.
    resamples : int
        How many, at least 1.

    Returns
    -------
    array, float64, shape (resamples, C)
        Empty, of shape (0, C), with fewer than two prompts: there is nothing to draw from.
    """
    columns = np.asarray(columns, np.float64)
    P, C = columns.shape
    if resamples < 1:
        raise ValueError(f"resamples must be at least 1, got {resamples}")
    if P < 2:
        return np.zeros((0, C))
    rng, block = np.random.default_rng(seed), max(1, _BLOCK // P)
    sums = []
    for start in range(0, resamples, block):
        size = min(block, resamples - start)
        drawn = rng.integers(0, P, (size, P)) + P * np.arange(size)[:, None]
        sums.append(np.bincount(drawn.ravel(), minlength=size * P).reshape(size, P) @ columns)
    return np.concatenate(sums)


def percentile_interval(draws: ArrayLike, *, level: float = LEVEL) -> tuple[Any, Any]:
    """Ends between which a share ``level`` of the draws lies, as much left out on either side.

    Parameters
    ----------
    draws : array, float, shape (n, …)
        Draws along the first axis.
    level : float
        Coverage, over 0 and below 1.

    Returns
    -------
    low, high : float, or array of the trailing shape
        NaN without draws.
    """
    check_level(level)
    draws = np.asarray(draws, np.float64)
    if not len(draws):
        return np.full(draws.shape[1:], np.nan)[()], np.full(draws.shape[1:], np.nan)[()]
    low, high = np.quantile(draws, [(1 - level) / 2, (1 + level) / 2], axis=0)
    return low, high


def sign_test(wins: int, losses: int) -> float:
    """Two-sided sign test: how often chance alone would be as one-sided as this or more.

    Under the null hypothesis that either is as likely, the wins among ``wins + losses`` are binomial with p = 1/2.
    Ties say nothing for either side and are left out beforehand (Dixon & Mood 1946). Exact, in integers.

    Parameters
    ----------
    wins, losses : int
        At least 0.

    Returns
    -------
    float
        p-value, over 0 and at most 1; 1 where there was neither.

    Examples
    --------
    >>> sign_test(9, 1)  # 2 · (1 + 10) / 1,024
    0.021484375
    """
    if min(wins, losses) < 0:
        raise ValueError(f"wins and losses must be at least 0, got {wins} and {losses}")
    n = int(wins + losses)
    tail, term = 0, 1
    for k in range(int(min(wins, losses)) + 1):
        tail += term
        term = term * (n - k) // (k + 1)  # the next binomial coefficient
    return float(min(1.0, 2 * tail / 2**n))
