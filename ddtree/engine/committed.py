"""What every request of a run has committed: its prompt and its new tokens."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ddtree.engine.records import FinishReason

__all__ = ["Committed"]


class Committed:
    """The committed tokens of all requests, in one array that has room for all that may come.

    Rounds append request by request, by plain numbers: their batches are small, and an operation on an array of a few
    elements costs more than these.

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
        self._rounds: list[list[int]] = [[] for _ in prompts]  # what each emitted
        # their numbers one by one
        self._token, self._start = self._tokens.data, self._starts.data
        self._length, self._left = self.lengths.data, self.remaining.data

    def __len__(self) -> int:
        return len(self.lengths)

    def tokens(self, request: int, length: int | None = None) -> NDArray[np.int32]:
        """Prompt and new tokens: a copy, which a drafter may keep, and cannot change what is committed through.

        With ``length`` those that there were when they were so many.
        """
        start = self._starts[request]
        copy = self._tokens[start : start + (self.lengths[request] if length is None else length)].copy()
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

    def standing(self, requests: list[int]) -> tuple[list[int], list[int], list[int]]:
        """The last token of each of ``requests``, how many tokens it has, and how many more it may emit."""
        token, start, length, left = self._token, self._start, self._length, self._left
        roots = [token[start[r] + length[r] - 1] for r in requests]
        return roots, [length[r] for r in requests], [left[r] for r in requests]

    def append(self, request: int, tokens: memoryview, *, of_round: bool) -> int:
        """Append int32 tokens to what a request has; return how many more it may emit."""
        count, length = len(tokens), self._length[request]
        end = self._start[request] + length
        self._token[end : end + count] = tokens
        self._length[request] = length + count
        self._left[request] = left = int(self._left[request] - count)
        if of_round:
            self._rounds[request].append(count)
        return left

    def tokens_per_round(self) -> list[NDArray[np.int32]]:
        """What each round emitted, one array a request."""
        return [np.array(counts, np.int32) for counts in self._rounds]
