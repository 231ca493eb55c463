"""What every request of a run has committed: its prompt and its new tokens."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ddtree.engine.records import FinishReason

__all__ = ["Committed"]


class Committed:
    """The committed tokens of all requests, in one array that has room for all that may come.

    Parameters
    ----------
    prompts : list of array, int32
        Prompt of each request.
    max_new_tokens : int
        The most tokens that a request emits.

    Attributes
    ----------
    lengths, prompt_lens, remaining : array, int64, shape (requests,)
        Committed tokens, those of the prompt among them, and how many more may be emitted.
    finish_reasons : list of str
        "length", until a request has met a stop token.
    """

    def __init__(self, prompts: list[NDArray[np.int32]], max_new_tokens: int) -> None:
        self.prompt_lens = np.array([len(prompt) for prompt in prompts], np.int64)
        ends = np.cumsum(self.prompt_lens + max_new_tokens)
        self._starts = ends - self.prompt_lens - max_new_tokens
        self._tokens = np.empty(int(ends[-1]) if len(ends) else 0, np.int32)
        for start, prompt in zip(self._starts, prompts, strict=True):
            self._tokens[start : start + len(prompt)] = prompt
        self.lengths = self.prompt_lens.copy()
        self.remaining = np.full(len(prompts), max_new_tokens, np.int64)
        self.finish_reasons: list[FinishReason] = ["length"] * len(prompts)
        self._rounds: list[tuple[NDArray[np.int64], NDArray[np.int64]]] = []

    def __len__(self) -> int:
        return len(self.lengths)

    def tokens(self, request: int) -> NDArray[np.int32]:
        """Prompt and new tokens: a copy, which a drafter may keep, and cannot change what is committed through."""
        start = self._starts[request]
        copy = self._tokens[start : start + self.lengths[request]].copy()
        copy.flags.writeable = False
        return copy

    def prompt(self, request: int) -> NDArray[np.int32]:
        """The prompt: a copy."""
        start = self._starts[request]
        return self._tokens[start : start + self.prompt_lens[request]].copy()

    def new_tokens(self, request: int) -> NDArray[np.int32]:
        """What has been emitted: a copy."""
        start = self._starts[request]
        return self._tokens[start + self.prompt_lens[request] : start + self.lengths[request]].copy()

    def roots(self, requests: NDArray[np.int64]) -> NDArray[np.int32]:
        """The last committed token of each of ``requests``."""
        last: NDArray[np.int32] = self._tokens[self._starts[requests] + self.lengths[requests] - 1]
        return last

    def append(
        self, requests: NDArray[np.int64], tokens: NDArray[np.int32], counts: NDArray[np.int64], *, of_round: bool
    ) -> None:
        """Append the first ``counts`` of ``tokens`` (n, width) to what the n ``requests`` have."""
        columns = np.arange(tokens.shape[1])
        new = columns < counts[:, None]
        places = (self._starts[requests] + self.lengths[requests])[:, None] + columns
        self._tokens[places[new]] = tokens[new]
        self.lengths[requests] += counts
        self.remaining[requests] -= counts
        if of_round:
            self._rounds.append((requests, counts))

    def tokens_per_round(self) -> list[NDArray[np.int32]]:
        """What each round emitted, one array a request."""
        if not self._rounds:
            return [np.empty(0, np.int32) for _ in self.lengths]
        requests, counts = (np.concatenate(column) for column in zip(*self._rounds, strict=True))
        order = np.argsort(requests, kind="stable")
        ends = np.cumsum(np.bincount(requests, minlength=len(self)))[:-1]
        return np.split(counts[order].astype(np.int32), ends)
