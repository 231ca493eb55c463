"""A drafter that knows what the target will say: it proves the mechanism, and says nothing about a policy."""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ddtree import reference
from ddtree.arrays import array_namespace
from ddtree.checks import INT32_MAX, integer, real
from ddtree.protocols import DraftContext, ResidentState
from ddtree.reference.philox import philox4x32
from ddtree.tokens import token_row

__all__ = ["NoiseLaw", "OracleDrafter"]

NOISE_BLOCK = np.uint32(0xFFFFFFFF)
"""First counter word of an oracle's noise. A token's sampling noise has its id // 4 there, so the two never meet."""

_MOST_TABLE_BYTES = 1 << 32
"""Of what is drafted ahead for the slots of a resident drafter."""
_DRAFTED_AT_ONCE = 1024
"""Positions whose drafts are made together."""


@dataclass(frozen=True)
class NoiseLaw:
    """At which rank the true token stands, by depth: a table of probabilities, so any acceptance curve can be had.

    Attributes
    ----------
    rank_probs : sequence of sequence of float
        ``rank_probs[d - 1][r]`` is the probability that at depth d the truth has rank r; what a row lacks to 1 is the
        probability that it is not drafted. Depths below the table follow its last row. A chain (rank 0 alone) accepts
        depth d, having accepted those above, with probability ``rank_probs[d - 1][0]``. To have unconditional rates,
        as servers report them: :meth:`from_acceptance_rates`.

    Examples
    --------
    >>> law = NoiseLaw([[0.8, 0.1], [0.5]])
    >>> [law.rank(1, u) for u in (0.0, 0.79, 0.85, 0.95)], law.rank(9, 0.4)
    ([0, 0, 1, None], 0)
    """

    rank_probs: Sequence[Sequence[float]]

    def __post_init__(self) -> None:
        if not len(self.rank_probs):
            raise ValueError("rank_probs must have a row for depth 1, got an empty table")
        for d, row in enumerate(self.rank_probs, start=1):
            probs = np.asarray(row, np.float64)
            # A row that is meant to sum to 1 may miss it by rounding.
            if probs.ndim != 1 or not (probs >= 0).all() or not probs.sum() <= 1 + 1e-9:
                raise ValueError(
                    f"rank_probs[{d - 1}], of depth {d}, must be probabilities that sum to at most 1, got {row!r}"
                )

    @classmethod
    def from_acceptance_rates(cls, rates: Sequence[float], *, refused: Sequence[float] = ()) -> NoiseLaw:
        """Make the law under which a chain has given acceptance rates by position, as servers report them.

        Parameters
        ----------
        rates : sequence of float
            ``rates[d - 1]`` is the probability that the drafts of depths 1 … d are all accepted: unconditional rates,
            as in vLLM's log line "Per-position acceptance rate" and its option ``synthetic_acceptance_rates``. Each is
            in 0 … 1, and none is larger than the one before. Beyond the last depth nothing is accepted. A chain as
            deep as the curve so has τ = 1 + Σ rates.
        refused : sequence of float
            ``refused[i]`` is the probability that the truth has rank i + 2 where it has not rank 1, at any depth: what
            a tree can win back. They sum to at most 1; what they lack is the probability that it is not drafted.

        Returns
        -------
        NoiseLaw

        Raises
        ------
        ValueError, TypeError
            Rates that are not as above, with the place of the first.

        Examples
        --------
        >>> NoiseLaw.from_acceptance_rates([0.8, 0.4]).rank_probs
        ((0.8,), (0.5,), (0.0,))
        """
        curve = _probabilities("rates", rates)
        others = _probabilities("refused", refused)
        if not curve:
            raise ValueError("rates must have one for depth 1, got none")
        for i in range(1, len(curve)):
            if curve[i] > curve[i - 1]:
                raise ValueError(
                    f"rates[{i}] must be at most rates[{i - 1}] = {curve[i - 1]}, got {curve[i]}: rates are of all "
                    "drafts down to a depth, not of one given those above"
                )
        if sum(others) > 1 + 1e-9:
            raise ValueError(f"refused must sum to at most 1, got {sum(others)}")
        steps = [after / before if before else 0.0 for before, after in itertools.pairwise([1.0, *curve])]
        return cls(tuple((p, *((1.0 - p) * share for share in others)) for p in [*steps, 0.0]))

    def rank(self, depth: int, uniform: float) -> int | None:
        """Rank of the truth at ``depth`` (from 1) where chance is ``uniform``, in [0, 1); None: not drafted."""
        rank = int(self.ranks(depth, np.array([uniform]))[0])
        return rank if rank >= 0 else None

    def ranks(self, depth: int, uniforms: NDArray[np.float64]) -> NDArray[np.int64]:
        """Rank of the truth at ``depth`` (from 1) by each of ``uniforms``, in [0, 1); −1: not drafted."""
        row = self.rank_probs[min(depth, len(self.rank_probs)) - 1]
        ends = np.cumsum(np.asarray(row, np.float64))
        ranks = np.searchsorted(ends, uniforms, side="right")  # half-open: a probability of 0 never happens
        return np.where(ranks < len(ends), ranks, -1)


def _probabilities(name: str, values: Sequence[float]) -> list[float]:
    """Each as a float in 0 … 1, or an error that names it."""
    if isinstance(values, (str, bytes)) or not hasattr(values, "__iter__"):
        raise TypeError(f"{name} must be a sequence of probabilities, got {type(values).__name__}")
    checked = [real(f"{name}[{i}]", value) for i, value in enumerate(values)]
    for i, p in enumerate(checked):
        if not 0 <= p <= 1:
            raise ValueError(f"{name}[{i}] must be a probability in 0 … 1, got {p}")
    return checked


class OracleDrafter:
    """Drafts the continuation that it is given, among decoys: whatever it accepts is synthetic.

    The truth has rank 0 at every depth (or where a noise law puts it), and its whole path half of the probability, so
    that a tree of ``budget >= depth`` holds it at any depth, and has branches of decoys besides.

    Parameters
    ----------
    continuations : mapping of int to array, or sequence of array, int, shape (n,)
        New tokens of each request, by its index among the prompts; the first is the one that the prefill gives.
    vocab_size : int
        V. No token outside 0 … V − 1 is drafted, or taken as a continuation.
    past_end : int, optional
        Token drafted past a continuation's end; by default nothing is.
    noise : NoiseLaw, optional
        At which rank the truth stands; at 0 everywhere if left out.
    seed : int
        0 … 2⁶⁴ − 1. The noise depends on seed, request and position alone, not on the order of calls.

    Attributes
    ----------
    synthetic : bool
        True: figures from it are not those of a drafter.
    label : str
        For legends and tables.

    Examples
    --------
    >>> from ddtree.engine import Engine, ScriptedTarget
    >>> text = np.arange(30)
    >>> engine = Engine(ScriptedTarget([text], 30), OracleDrafter([text[5:]], 30), depth=7, budget=16)
    >>> engine.generate([text[:5]], max_new_tokens=25).tau
    8.0
    """

    synthetic = True

    def __init__(
        self,
        continuations: Mapping[int, ArrayLike] | Sequence[ArrayLike],
        vocab_size: int,
        *,
        past_end: int | None = None,
        noise: NoiseLaw | None = None,
        seed: int = 0,
    ) -> None:
        self.vocab_size = integer("vocab_size", vocab_size, 1, INT32_MAX)
        items = continuations.items() if isinstance(continuations, Mapping) else enumerate(continuations)
        self.continuations = {r: token_row(f"continuations[{r}]", row, self.vocab_size) for r, row in items}
        last = self.vocab_size - 1
        self.past_end = None if past_end is None else integer("past_end", past_end, 0, last, "the vocabulary")
        self.noise = noise
        self.seed = integer("seed", seed, 0, 2**64 - 1)
        self._prompt_lens: dict[int, int] = {}

    @property
    def label(self) -> str:  # noqa: D102 - among the attributes above
        return "oracle (synthetic)" if self.noise is None else "oracle with noise law (synthetic)"

    def __call__(self, context: DraftContext, depth: int, topk: int) -> tuple[NDArray[np.float32], NDArray[np.int32]]:
        """Return log-probs and token ids of shape (B, depth, min(topk, V))."""
        for request, tokens in zip(context.request_ids, context.tokens, strict=True):
            if request in context.began:
                self._prompt_lens[request] = len(tokens) - 1  # what follows the prompt is the prefill's token
        self.forget(context.ended)

        B, K = len(context.request_ids), min(topk, self.vocab_size)
        token_ids = np.full((B, depth, K), -1, np.int32)
        for b, (request, tokens) in enumerate(zip(context.request_ids, context.tokens, strict=True)):
            if request not in self.continuations:
                raise ValueError(
                    f"request {request} must be one that has a continuation, got another: pass its continuation"
                )
            if request not in self._prompt_lens:
                raise ValueError(
                    f"request {request} must be one that began with this drafter and has not ended, got another: "
                    "have a drafter for each generation that is under way"
                )
            prompt_len = self._prompt_lens[request]
            token_ids[b] = self._drafts(request, prompt_len, len(tokens) - prompt_len, 1, depth, K)[0]
        return np.where(token_ids >= 0, _confidence(depth, K), np.float32(-np.inf)), token_ids

    def open_resident(self, state: ResidentState, depth: int, topk: int) -> _ResidentOracle:
        """Return a drafter of ``state``'s slots, which drafts what ``__call__`` does, where the state's arrays are.

        What a request will be shown at any position is made when it begins, and lies in a table from then on, of
        4 · depth · K bytes a slot and new token (those of the longest continuation, or, with ``past_end``, as many as a
        slot holds). A draft is then one look into it.

        Raises
        ------
        ValueError
            The table would take more than 4 GiB.
        """
        return _ResidentOracle(self, state, depth, topk)

    def forget(self, request_ids: Iterable[int]) -> None:
        """Drop where these requests' continuations began, which have ended."""
        for request in request_ids:
            self._prompt_lens.pop(request, None)

    def _drafts(
        self, request: int, prompt_len: int, first: int, count: int, depth: int, width: int
    ) -> NDArray[np.int32]:
        """Candidates (count, depth, width) where ``first``, ``first + 1``, … new tokens are committed; −1: none."""
        known = self.continuations[request]
        uniforms = self._uniforms(request, prompt_len + first, count + depth)
        ranks = np.arange(width)
        token_ids = np.full((count, depth, width), -1, np.int32)
        for d in range(1, depth + 1):
            index = np.arange(first - 1 + d, first - 1 + d + count)  # of the truth, among the new tokens
            given = max(min(count, len(known) - int(index[0])), 0)
            truth = np.full(count, -1 if self.past_end is None else self.past_end, np.int64)
            truth[:given] = known[index[:given]]
            at = np.zeros(count, np.int64)
            if self.noise is not None:
                at = self.noise.ranks(d, uniforms[d - 1 : d - 1 + count])
            rank = np.where((at < 0) | (at >= width), self.vocab_size, at)[:, None]
            # the truth at its rank, the others counting up from it: without it, all of the vocabulary but the truth
            offsets = np.where(ranks == rank, 0, np.where(ranks < rank, ranks + 1, ranks))
            drafted = (truth[:, None] >= 0) & (offsets < self.vocab_size)
            token_ids[:, d - 1] = np.where(drafted, (truth[:, None] + offsets) % self.vocab_size, -1)
        return token_ids

    def _uniforms(self, request: int, first_position: int, count: int) -> NDArray[np.float64]:
        """One number in [0, 1) a position, the same whichever round drafts it."""
        counter = np.empty((count, 4), np.uint32)
        counter[:, 0], counter[:, 1] = NOISE_BLOCK, first_position + np.arange(count)
        counter[:, 2], counter[:, 3] = request & 0xFFFFFFFF, request >> 32
        words = philox4x32(counter, (self.seed & 0xFFFFFFFF, self.seed >> 32))
        return words[:, 0].astype(np.float64) * 2.0**-32


class _ResidentOracle:
    """An oracle's drafts of the slots of a state: see :class:`ddtree.protocols.ResidentDraft`."""

    def __init__(self, drafter: OracleDrafter, state: ResidentState, depth: int, topk: int) -> None:
        self._drafter, self._state = drafter, state
        self._xp = xp = array_namespace(state.tokens)
        self._ops = reference if xp is np else importlib.import_module("ddtree.kernels.cupy")
        B, self._room = state.tokens.shape
        K = min(topk, drafter.vocab_size)
        longest = max(map(len, drafter.continuations.values()), default=0)
        places = self._room if drafter.past_end is not None else min(self._room, longest)
        shape = (B, max(places, 1), depth, K)
        size = 4 * B * shape[1] * depth * K
        if size > _MOST_TABLE_BYTES:
            raise ValueError(
                f"the oracle's table for {B} slots of {shape[1]} new tokens, {depth} deep, of {K} candidates takes "
                f"{size / 2**30:.1f} GiB, and must take at most {_MOST_TABLE_BYTES / 2**30:.0f}: run fewer requests "
                "side by side, or lower topk"
            )
        self._table = xp.full(shape, -1, np.int32)
        self._confidence = xp.asarray(_confidence(depth, K))
        self.draft()  # compiles what a graph may capture

    def draft(self) -> tuple[Any, Any]:
        state = self._state
        draft: tuple[Any, Any] = self._ops.oracle_draft(self._table, self._confidence, state.lengths, state.prompt_lens)
        return draft

    def begin(self, slot: int, request: int, tokens: Any, prompt_len: int, hidden_states: dict[int, Any]) -> None:
        """Make every draft of the request; the copies to a GPU are asynchronous, from pinned memory."""
        if request not in self._drafter.continuations:
            raise ValueError(f"request {request} must be one that has a continuation, got another: pass it")
        _, places, depth, K = self._table.shape
        places = min(places, self._room - prompt_len)
        for start in range(0, places, _DRAFTED_AT_ONCE):
            count = min(places - start, _DRAFTED_AT_ONCE)
            drafts = self._drafter._drafts(request, prompt_len, 1 + start, count, depth, K)
            self._table[slot, start : start + count] = self._xp.asarray(drafts)

    def end(self, slot: int) -> None:
        """Let go of nothing: the next request's drafts take the place of these."""


def _confidence(depth: int, width: int) -> NDArray[np.float32]:
    """Log-probs of the ranks of any depth: rank 0 to the power ``depth`` is 1/2, each decoy half of the one before.

    The likeliest decoy, (1 − p) / 2 <= 1/4, so comes after the whole path of rank 0, whatever the depth.
    """
    if depth == 0:
        return np.zeros(width, np.float32)
    first = -np.log(2.0) / depth
    decoys = np.log(-np.expm1(first)) - np.log(2.0) * np.arange(1, width)
    return np.concatenate([[first], decoys]).astype(np.float32)
