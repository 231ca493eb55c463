"""Where the target's choice stood among what a drafter proposed: a trace, read a chunk after the other. Pure NumPy.

A trace's prompts come in chunks of whole prompts; each chunk has plain arrays under the names of :class:`TraceChunk`.
Letters: P prompts, M positions, T tokens, L draft depth limit, K candidates a depth.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

__all__ = ["Choices", "Trace", "TraceChunk", "choices_of", "chunks_of"]


@runtime_checkable
class TraceChunk(Protocol):
    """Whole prompts, their continuations, and what the drafter proposed at each position.

    Attributes
    ----------
    token_ids : array, int32, shape (T,)
        Each prompt and its continuation, one behind the other.
    token_offsets : array, int64, shape (P + 1,)
        Prompt p has ``token_ids[token_offsets[p] : token_offsets[p + 1]]``.
    prompt_lens : array, int32, shape (P,)
        Tokens that were given; the others are new, the first of them the prefill's.
    log_probs : array, float32, shape (M, L, K)
        Candidates of depth d + 1 in slot d, non-increasing along K; from the first NaN or −inf on, nothing is drafted.
    draft_token_ids : array, int, shape (M, L, K)
        Their tokens.
    position_offsets : array, int64, shape (P + 1,)
        Prompt p has positions ``position_offsets[p] … position_offsets[p + 1] − 1``, one for each of its new tokens
        but the last: the drafts of a round whose root is that token.
    """

    @property
    def token_ids(self) -> Any: ...  # noqa: D102 - among the attributes above

    @property
    def token_offsets(self) -> Any: ...  # noqa: D102 - among the attributes above

    @property
    def prompt_lens(self) -> Any: ...  # noqa: D102 - among the attributes above

    @property
    def log_probs(self) -> Any: ...  # noqa: D102 - among the attributes above

    @property
    def draft_token_ids(self) -> Any: ...  # noqa: D102 - among the attributes above

    @property
    def position_offsets(self) -> Any: ...  # noqa: D102 - among the attributes above


Trace = TraceChunk | Iterable[TraceChunk]
"""What statistics of a trace take: one chunk, or chunks that can be gone through more than once."""


@dataclass(frozen=True, eq=False)
class Choices:
    """A chunk's positions beside the target's choices.

    Attributes
    ----------
    prompt : array, int64, shape (M,)
        The position's prompt, as an index into the chunk.
    remaining : array, int64, shape (M,)
        New tokens behind the position's root: how many a round there may still emit, at least 1.
    root_token_ids : array, int32, shape (M,)
        The last committed token.
    choices : array, int32, shape (M, L)
        The target's choice at each depth along its own continuation; −1 past the continuation's end.
    log_probs : array, float32, shape (M, L, K)
        The drafter's; −inf where nothing is drafted.
    token_ids : array, int32, shape (M, L, K)
        The candidates.
    ranks : array, int64, shape (M, L)
        Rank of the choice among the candidates, 0 the likeliest; K where it is not drafted, −1 past the end.
    """

    prompt: NDArray[np.int64]
    remaining: NDArray[np.int64]
    root_token_ids: NDArray[np.int32]
    choices: NDArray[np.int32]
    log_probs: NDArray[np.float32]
    token_ids: NDArray[np.int32]
    ranks: NDArray[np.int64]

    @property
    def path_is_likeliest(self) -> NDArray[np.bool_]:
        """Whether every depth above has its choice at rank 0, so that a chain's walk comes this far: bool (M, L)."""
        right = np.logical_and.accumulate(self.ranks == 0, axis=1)
        return np.concatenate([np.ones((len(right), 1), np.bool_), right[:, :-1]], axis=1)[:, : self.ranks.shape[1]]


def chunks_of(trace: Trace) -> Iterator[TraceChunk]:
    """Go through a trace's chunks from the first on.

    Raises
    ------
    TypeError
        The trace can be gone through only once, or is no trace.
    ValueError
        It has no chunk, or one of another L or K.
    """
    if isinstance(trace, TraceChunk):
        yield trace
        return
    if not isinstance(trace, Iterable) or isinstance(trace, Iterator):
        raise TypeError(
            "trace must have a trace's arrays, or be chunks that can be gone through more than once, such as a list, "
            f"got {type(trace).__name__}"
        )
    shape = None
    for i, chunk in enumerate(trace):
        if not isinstance(chunk, TraceChunk):
            raise TypeError(f"trace[{i}] must have a trace's arrays, got {type(chunk).__name__}")
        L, K = np.shape(chunk.log_probs)[1:]
        if shape not in (None, (L, K)):
            raise ValueError(f"trace[{i}].log_probs must have L, K = {shape}, as the chunks before, got {(L, K)}")
        shape = L, K
        yield chunk
    if shape is None:
        raise ValueError("trace must have at least one chunk, got none")


def choices_of(chunk: TraceChunk) -> Choices:
    """Find the target's choices of a chunk among its candidates.

    Parameters
    ----------
    chunk : TraceChunk
        Any object with a trace's arrays.

    Returns
    -------
    Choices

    Raises
    ------
    ValueError
        Arrays that do not fit together, by name.
    """
    tokens, offsets = np.asarray(chunk.token_ids), np.asarray(chunk.token_offsets, np.int64)
    given, at = np.asarray(chunk.prompt_lens, np.int64), np.asarray(chunk.position_offsets, np.int64)
    log_probs, ids = np.asarray(chunk.log_probs), np.asarray(chunk.draft_token_ids)
    P = len(given)
    if log_probs.ndim != 3 or log_probs.shape != ids.shape:
        raise ValueError(
            f"log_probs and draft_token_ids must have one shape (M, L, K), got {log_probs.shape} and {ids.shape}"
        )
    for name, values, end in (("token_offsets", offsets, len(tokens)), ("position_offsets", at, len(log_probs))):
        if values.shape != (P + 1,) or values[0] != 0 or values[-1] != end or (np.diff(values) < 0).any():
            raise ValueError(f"{name} must rise from 0 to {end} in {P + 1} steps, one a prompt and the end")
    new = np.diff(offsets) - given
    wrong = np.flatnonzero(np.diff(at) != np.maximum(new - 1, 0))
    if wrong.size:
        p = int(wrong[0])
        raise ValueError(
            f"position_offsets must give prompt {p} a position for each new token but the last, {max(new[p] - 1, 0)}, "
            f"got {at[p + 1] - at[p]}"
        )
    M, L, K = log_probs.shape
    prompt = np.repeat(np.arange(P), np.diff(at))
    index = np.arange(M) - at[prompt]  # of the root among the new tokens
    remaining = new[prompt] - 1 - index
    root = (offsets[:-1] + given)[prompt] + index
    ahead = np.arange(1, L + 1)
    known = ahead <= remaining[:, None]
    choices = np.where(known, tokens[np.where(known, root[:, None] + ahead, 0)], -1).astype(np.int32)
    drafted = np.logical_and.accumulate(log_probs > -np.inf, axis=2)  # NaN is not over −inf either
    hit = (ids == choices[..., None]) & drafted
    ranks = np.where(hit.any(2), hit.argmax(2), K) if K else np.full((M, L), K)
    return Choices(
        prompt=prompt,
        remaining=remaining,
        root_token_ids=tokens[root].astype(np.int32),
        choices=choices,
        log_probs=np.where(drafted, log_probs, -np.inf).astype(np.float32, order="C"),
        token_ids=ids.astype(np.int32, order="C"),
        ranks=np.where(known, ranks, -1).astype(np.int64),
    )
