"""Two policies on the same prompts: a sign test over prompts, and a paired bootstrap of the difference. Pure NumPy."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ddtree.analysis.acceptance import sums_by_prompt
from ddtree.analysis.intervals import LEVEL, RESAMPLES, check_level, percentile_interval, resample_sums, sign_test
from ddtree.analysis.rounds import Rounds, as_round_table
from ddtree.analysis.tables import Table

__all__ = ["Comparison", "compare"]


@dataclass(frozen=True, eq=False)
class Comparison(Table):
    """Policy "a" against policy "b", prompt by prompt: a table of one row.

    Attributes
    ----------
    n_prompts : int
        Prompts with a round of both.
    wins, losses, ties : int
        Prompts whose τ is higher with a, higher with b, and the same. τ of a prompt is compared exactly, as a fraction.
    p_value : float
        Of the two-sided sign test over the prompts that are no ties (see :func:`~ddtree.analysis.intervals.sign_test`).
    tau_a, tau_b : float
        Mean tokens a round, over all rounds.
    difference, low, high : float
        ``tau_a − tau_b`` and its bootstrap interval: the same prompts are drawn for both.
    ratio, ratio_low, ratio_high : float
        ``tau_a / tau_b`` and its interval from the same draws: how much more a round of a may cost before b is faster.
    level : float
        Coverage of the intervals, whose ends are NaN with fewer than two prompts.
    """

    n_prompts: int
    wins: int
    losses: int
    ties: int
    p_value: float
    tau_a: float
    tau_b: float
    difference: float
    low: float
    high: float
    ratio: float
    ratio_low: float
    ratio_high: float
    level: float

    columns = (
        "n_prompts", "wins", "losses", "ties", "p_value", "tau_a", "tau_b",
        "difference", "low", "high", "ratio", "ratio_low", "ratio_high",
    )  # fmt: skip

    def records(self) -> list[dict[str, float | None]]:
        """One dict of plain Python values; NaN, a value that does not exist, as None."""
        values = {name: getattr(self, name) for name in self.columns}
        return [{name: None if value != value else value for name, value in values.items()}]


def compare(a: Rounds, b: Rounds, *, level: float = LEVEL, seed: int = 0, resamples: int = RESAMPLES) -> Comparison:
    """Compare two policies that ran on the same prompts.

    Parameters
    ----------
    a, b : Generation, iterable of Round, or RoundTable
        On the host. Prompts are matched by their index.
    level : float
        Coverage of the intervals, over 0 and below 1.
    seed, resamples : int
        Of the bootstrap.

    Returns
    -------
    Comparison

    Raises
    ------
    ValueError
        The two have other prompts, or none.
    """
    check_level(level)
    tables = as_round_table(a), as_round_table(b)
    prompts_a, prompts_b = ({*np.unique(t.prompt).tolist()} for t in tables)
    if prompts_a != prompts_b or not prompts_a:
        lacking = sorted(prompts_a ^ prompts_b)
        found = f"prompt {lacking[0]} in {'a' if lacking[0] in prompts_a else 'b'} alone" if lacking else "no rounds"
        raise ValueError(f"a and b must have rounds of the same prompts, got {found}: run both on one set of prompts")
    sums = np.concatenate([sums_by_prompt(t)[:, :2] for t in tables], axis=1)  # tokens and rounds of a, then of b
    lead = sums[:, 0] * sums[:, 3] - sums[:, 2] * sums[:, 1]  # whole numbers below 2⁵³, hence exact
    wins, losses = int((lead > 0).sum()), int((lead < 0).sum())
    tau_a, tau_b = sums[:, 0].sum() / sums[:, 1].sum(), sums[:, 2].sum() / sums[:, 3].sum()
    draws = resample_sums(sums, seed=seed, resamples=resamples)
    drawn_a, drawn_b = draws[:, 0] / draws[:, 1], draws[:, 2] / draws[:, 3]
    low, high = percentile_interval(drawn_a - drawn_b, level=level)
    ratio_low, ratio_high = percentile_interval(drawn_a / drawn_b, level=level)
    return Comparison(
        len(sums), wins, losses, len(sums) - wins - losses, sign_test(wins, losses),
        float(tau_a), float(tau_b), float(tau_a - tau_b), float(low), float(high),
        float(tau_a / tau_b), float(ratio_low), float(ratio_high), level,
    )  # fmt: skip
