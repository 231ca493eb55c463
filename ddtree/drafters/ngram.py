"""Prompt lookup: what followed the same words before may follow them again. It needs no training."""

from __future__ import annotations

import importlib
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ddtree import reference
from ddtree.arrays import array_namespace
from ddtree.checks import INT32_MAX, integer, real
from ddtree.protocols import DraftContext, ResidentState
from ddtree.reference.portable_math import portable_log

__all__ = ["NgramDrafter"]

_MOST_VOTERS = 1024
"""Places of an order that vote, the most recent ones."""


class NgramDrafter:
    """Drafts from a request's own tokens: every earlier place that its last n tokens match votes for what followed.

    For each n from ``max_ngram`` down, the places after which the last n tokens stand vote, a depth apart, for the
    tokens found there; the i-th most recent place has weight ``recency ** i``. A token's share of order n is its votes
    over all votes plus ``escape``; the escaped share goes to the next shorter n, and what escapes the shortest is not
    drafted (so an order without votes passes everything on, and a token that follows long matches gets most). The 1,024
    most recent places vote, as far as their weight is not below 2⁻⁵².

    Parameters
    ----------
    max_ngram, min_ngram : int
        Longest and shortest suffix that is looked up, 1 <= ``min_ngram`` <= ``max_ngram``.
    recency : float
        Weight of a place relative to the next more recent one, over 0 and at most 1 (at which all weigh the same).
    escape : float
        Votes for "none of these" at each order, over 0: the more, the less a few matches are trusted.

    Attributes
    ----------
    synthetic : bool
        False: it is a real, if simple, drafter.
    label : str
        For legends and tables.

    Notes
    -----
    Each request's index grows by its new tokens alone, so a round looks up the matches that vote, besides one
    comparison of the context with what is indexed. It is made when a request begins, or goes on from other tokens, and
    dropped when it has ended.

    What is drafted is defined to the last bit by :func:`ddtree.reference.ngram_draft`: votes and shares are whole
    numbers of 2⁻⁵² and 2⁻⁶², so that an index, plain loops and a GPU's threads, which add them up in orders of their
    own, draft the same.
    """

    synthetic = False
    label = "n-gram lookup"

    def __init__(self, *, max_ngram: int = 4, min_ngram: int = 1, recency: float = 0.9, escape: float = 0.5) -> None:
        self.max_ngram = integer("max_ngram", max_ngram, 1, INT32_MAX)
        self.min_ngram = integer("min_ngram", min_ngram, 1, self.max_ngram, "max_ngram")
        self.recency, self.escape = real("recency", recency), real("escape", escape)
        if not 0 < self.recency <= 1:
            raise ValueError(f"recency must be over 0 and at most 1, got {self.recency}")
        if self.escape <= 0:
            raise ValueError(f"escape must be over 0, got {self.escape}")
        self._vote_sums = _vote_sums(self.recency)
        self._votes = np.diff(self._vote_sums)
        self._indices: dict[int, _NgramIndex] = {}

    def __call__(self, context: DraftContext, depth: int, topk: int) -> tuple[NDArray[np.float32], NDArray[np.int32]]:
        """Return log-probs and token ids of shape (B, depth, topk), −inf where there are fewer candidates."""
        self.forget((*context.began, *context.ended))
        log_probs = np.full((len(context.request_ids), depth, topk), -np.inf, np.float32)
        token_ids = np.full(log_probs.shape, -1, np.int32)
        for b, (request, tokens) in enumerate(zip(context.request_ids, context.tokens, strict=True)):
            index = self._indices.get(request)
            if index is None or not index.began(tokens):  # another generation may have the same request numbers
                index = self._indices[request] = _NgramIndex(self.min_ngram, self.max_ngram)
            index.extend(tokens)
            places = [np.array(ends[-len(self._votes) :][::-1], np.int64) for ends in index.suffix_places(tokens)]
            for d in range(depth):
                ids, shares = self._shares(tokens, [ends + d for ends in places])
                best = np.lexsort((ids, -shares))[:topk]
                token_ids[b, d, : len(best)] = ids[best]
                # as float32, the shares are far enough apart for their logarithms to be in order
                kept = shares[best].astype(np.float32).astype(np.float64)
                log_probs[b, d, : len(best)] = portable_log(kept * 2.0**-62)
        return log_probs, token_ids

    def open_resident(self, state: ResidentState, depth: int, topk: int) -> _ResidentNgrams:
        """Return a drafter of ``state``'s slots, which drafts what ``__call__`` does, where the state's arrays are.

        A draft looks through all of a request's tokens, without an index: on a GPU in one kernel.

        Raises
        ------
        ValueError
            On a GPU: ``max_ngram`` is 32 above ``min_ngram`` or more, or there are more than 4,096 places that may vote
            (orders times voters, where a request may have more tokens than that).
        """
        return _ResidentNgrams(self, state, depth, topk)

    def forget(self, request_ids: Iterable[int]) -> None:
        """Drop the indices of these requests, which have ended."""
        for request in request_ids:
            self._indices.pop(request, None)

    def _shares(
        self, tokens: NDArray[np.int32], places: list[NDArray[np.int64]]
    ) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
        """Tokens at ``places`` (longest order first, most recent place first) and each one's share, over 0."""
        found, given, escaped = [np.empty(0, np.int32)], [np.empty(0, np.int64)], 1.0
        for followers in places:
            known = followers < len(tokens)
            votes = self._votes[: len(followers)][known]
            total = float(votes.sum()) * 2.0**-52 + self.escape
            found.append(tokens[followers[known]])
            given.append((votes * (escaped / total) * 2.0**10).astype(np.int64))
            escaped *= self.escape / total
        ids, which = np.unique(np.concatenate(found), return_inverse=True)
        shares = np.zeros(len(ids), np.int64)
        np.add.at(shares, which, np.concatenate(given))
        return ids[shares > 0], shares[shares > 0]


def _vote_sums(recency: float) -> NDArray[np.int64]:
    """Votes of the i most recent places together, in units of 2⁻⁵²: int64, shape (voters + 1,)."""
    sums, weight = [0], 1.0
    while weight >= 2.0**-52 and len(sums) <= _MOST_VOTERS:
        sums.append(sums[-1] + int(weight * 2**52))
        weight *= recency
    return np.array(sums, np.int64)


class _ResidentNgrams:
    """N-gram drafts of the slots of a state: see :class:`ddtree.protocols.ResidentDraft`."""

    def __init__(self, drafter: NgramDrafter, state: ResidentState, depth: int, topk: int) -> None:
        xp = array_namespace(state.tokens)
        self._ops = reference if xp is np else importlib.import_module("ddtree.kernels.cupy")
        self._state, self._vote_sums = state, xp.asarray(drafter._vote_sums)
        self._options = {
            "depth": depth,
            "topk": topk,
            "max_ngram": drafter.max_ngram,
            "min_ngram": drafter.min_ngram,
            "escape": drafter.escape,
        }
        self.draft()  # compiles what a graph may capture, and refuses here what no draft can be made with

    def draft(self) -> tuple[Any, Any]:
        state = self._state
        draft: tuple[Any, Any] = self._ops.ngram_draft(state.tokens, state.lengths, self._vote_sums, **self._options)
        return draft

    def begin(self, slot: int, request: int, tokens: Any, prompt_len: int, hidden_states: dict[int, Any]) -> None:
        """Keep nothing: a request's tokens are all in the state."""

    def end(self, slot: int) -> None:
        """Let go of nothing."""


class _NgramIndex:
    """Where the n-grams of a growing sequence end, but for its own end, which nothing follows yet."""

    def __init__(self, min_ngram: int, max_ngram: int) -> None:
        self.min_ngram, self.max_ngram = min_ngram, max_ngram
        self.next_end = 1
        self.seen: NDArray[np.int32] = np.empty(0, np.int32)
        self.ends: dict[tuple[int, ...], list[int]] = defaultdict(list)

    def began(self, tokens: NDArray[np.int32]) -> bool:
        """Whether ``tokens`` go on from what is indexed."""
        return np.array_equal(tokens[: len(self.seen)], self.seen)

    def extend(self, tokens: NDArray[np.int32]) -> None:
        """Take in the n-grams that something follows now."""
        start = max(self.next_end - self.max_ngram, 0)
        recent = tokens[start:].tolist()
        for end in range(self.next_end - start, len(recent)):
            for n in range(self.min_ngram, min(self.max_ngram, end) + 1):
                self.ends[tuple(recent[end - n : end])].append(start + end)
        self.next_end = max(self.next_end, len(tokens))
        self.seen = tokens

    def suffix_places(self, tokens: NDArray[np.int32]) -> list[list[int]]:
        """For each order, longest first, the places right after an earlier copy of the last n tokens, oldest first."""
        longest = min(self.max_ngram, len(tokens))
        suffix = tuple(tokens[len(tokens) - longest :].tolist())
        return [self.ends.get(suffix[longest - n :], []) for n in range(longest, self.min_ngram - 1, -1)]
