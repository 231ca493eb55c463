"""Texts that end in a loop: a greedy model's often do, and a loop is easy to draft, so that it inflates τ."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike

__all__ = ["LONGEST_PERIOD", "LOOP_TOKENS", "ends_in_loop", "loops_said"]

LOOP_TOKENS, LONGEST_PERIOD = 40, 24
"""A continuation loops if its last so many tokens repeat what came before, at a distance of at most the second."""


def ends_in_loop(tokens: ArrayLike) -> bool:
    """Return whether a continuation ends in a loop.

    Parameters
    ----------
    tokens : array, int, shape (n,)
        The new tokens, without the prompt.

    Examples
    --------
    >>> ends_in_loop([7, 8, *[1, 2, 3] * 15]), ends_in_loop([7, 8, 9] * 14), ends_in_loop(range(64))
    (True, False, False)
    """
    row = np.asarray(tokens)
    before = len(row) - LOOP_TOKENS
    periods = range(1, min(LONGEST_PERIOD, before) + 1)
    return any(np.array_equal(row[before:], row[before - period : -period]) for period in periods)


def loops_said(continuations: Sequence[ArrayLike]) -> str:
    """Return one sentence on how many of the continuations end in a loop; nothing where none does.

    Examples
    --------
    >>> loops_said([[1, 2] * 30])
    'The text repeats itself at the end, which is easy to draft and inflates τ.'
    >>> loops_said([range(64)])
    ''
    """
    count = sum(map(ends_in_loop, continuations))
    if not count:
        return ""
    if len(continuations) == 1:
        which = "The text repeats itself"
    else:
        which = f"{count} of {len(continuations)} texts {'repeats itself' if count == 1 else 'repeat themselves'}"
    return f"{which} at the end, which is easy to draft and inflates τ."
