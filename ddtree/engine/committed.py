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

    def roots(self, requests: NDArray[np.int64], lengths: NDArray[np.int64] | None = None) -> NDArray[np.int32]:
        """The last committed token of each of ``requests``; with ``lengths`` when they had so many."""
        ends = self._starts[requests] + (self.lengths[requests] if lengths is None else lengths)
        last: NDArray[np.int32] = self._tokens[ends - 1]
        return last

    def write_standing(self, requests: list[int], out: memoryview) -> list[int]:
        """Write where each of ``requests`` stands; return of each the tokens before its last one.

        Parameters
        ----------
        requests : list of int
            B of them.
        out : memoryview of int32, 3 · B numbers and up
            The last token of each; then how many are before it; then how many more may be emitted.
        """
        token, start, length, left = self._token, self._start, self._length, self._left
        count, prefix_lens = len(requests), []
        for b, request in enumerate(requests):
            prefix_len = length[request] - 1
            out[b], out[count + b], out[2 * count + b] = token[start[request] + prefix_len], prefix_len, left[request]
            prefix_lens.append(prefix_len)
        return prefix_lens

    def append(self, request: int, tokens: memoryview, *, of_round: bool) -> int:
        """Append int32 tokens to what a request has; return how many more it may emit."""
        count, length = len(tokens), self._length[request]
        end = self._start[request] + length
        self._token[end : end + count] = tokens
        self._length[request] = length + count
        self._left[request] = left = self._left[request] - count
        if of_round:
            self._rounds[request].append(count)
        return left

    def tokens_per_round(self) -> list[NDArray[np.int32]]:
        """What each round emitted, one array a request."""
        return [np.array(counts, np.int32) for counts in self._rounds]
