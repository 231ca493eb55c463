"""Prompt lookup: every earlier place that a sequence's last n tokens match votes for what followed it."""

from collections import defaultdict

import numpy as np
from numpy.typing import NDArray

from ddtree.reference.portable_math import portable_log

__all__ = ["ngram_draft"]


def ngram_draft(
    tokens: NDArray[np.int32],
    lengths: NDArray[np.int32],
    vote_sums: NDArray[np.int64],
    *,
    depth: int,
    topk: int,
    max_ngram: int,
    min_ngram: int,
    escape: float,
) -> tuple[NDArray[np.float32], NDArray[np.int32]]:
    """Draft (B, depth, topk) from the first ``lengths`` tokens of each row of ``tokens`` (B, R).

    The i-th most recent place of an order has ``vote_sums[i + 1] - vote_sums[i]`` votes of 2⁻⁵². Shares are whole
    numbers of 2⁻⁶², rounded down a vote, so that their sums do not depend on an order of addition; one of 0 is not
    drafted. Larger shares come first, then smaller ids.
    """
    B = len(lengths)
    log_probs = np.full((B, depth, topk), -np.inf, np.float32)
    token_ids = np.full((B, depth, topk), -1, np.int32)
    votes = np.diff(vote_sums).tolist()
    for b in range(B):
        row = tokens[b, : lengths[b]].tolist()
        n_tokens = len(row)
        for d in range(depth):
            shares: dict[int, int] = defaultdict(int)
            escaped = 1.0
            for n in range(min(max_ngram, n_tokens), min_ngram - 1, -1):
                suffix = row[n_tokens - n :]
                places = [end for end in range(n_tokens - 1, n - 1, -1) if row[end - n : end] == suffix]
                cast = [(vote, row[end + d]) for vote, end in zip(votes, places, strict=False) if end + d < n_tokens]
                total = float(sum(vote for vote, _ in cast)) * 2.0**-52 + escape
                for vote, token in cast:
                    shares[token] += int(vote * (escaped / total) * 2.0**10)
                escaped *= escape / total
            drafted = sorted((t for t in shares if shares[t] > 0), key=lambda t: (-shares[t], t))[:topk]
            # as float32, the shares are far enough apart for their logarithms to be in order
            kept = np.array([shares[t] for t in drafted], np.int64).astype(np.float32)
            token_ids[b, d, : len(drafted)] = drafted
            log_probs[b, d, : len(drafted)] = portable_log(kept.astype(np.float64) * 2.0**-62)
    return log_probs, token_ids
