"""The K likeliest tokens of a row with their log-probs, in one pass over the row; one row a thread.

The row is read in blocks that stay in the first-level cache. Of each block, vector loops find the greatest logit and
add up the exponentials (relative to the greatest logit so far, as in an online softmax). Only a block that holds a
logit above the K-th best so far is looked at one by one; those few go through a heap whose top is the K-th best.
"""

import math
from typing import Any

import numpy as np
from numba import float32, float64, int32, int64, void
from numpy.typing import NDArray

from ddtree.kernels.numba_cpu.jit import compiled, in_parallel, inout, native_floats, readonly

__all__ = ["topk_log_probs"]

BLOCK = 256
"""Logits a block."""

NOT_SIGN = (1 << 63) - 1
LOG2_E, LN2 = 1.4426950408889634, 0.6931471805599453
SHIFTER = 1.5 * 2.0**52
"""Adding it to a small float64 rounds that to an integer, which then stands in the lowest bits of the sum."""

EXP_LEAST = -700.0
"""Where the exponential is taken as that of −700, 1e-304: nothing beside the greatest term, which is 1."""


@compiled(float64(inout(float64, 1)))
def greatest(block):  # type: ignore[no-untyped-def]
    """The greatest of a block without NaN.

    The bits of floats, negative ones with all but the sign turned over, are integers in the same order, and the
    greatest of integers is something that compilers find with vector instructions.
    """
    top = np.int64(-NOT_SIGN - 1)
    for bits in block.view(np.int64):
        top = max(top, bits ^ ((bits >> 63) & NOT_SIGN))
    return np.int64(top ^ ((top >> 63) & NOT_SIGN)).view(np.float64)


@compiled(float64(inout(float64, 1)), fastmath={"reassoc"})
def total_of(terms):  # type: ignore[no-untyped-def]
    """The sum of a block, in whichever order is fastest."""
    total = 0.0
    for x in terms:
        total += x
    return total


@compiled(void(inout(float64, 1), float64, inout(float64, 1)))
def exponentials(block, top, terms):  # type: ignore[no-untyped-def]
    """exp(x − top) of a block, each to a relative 1e-12, without a call and without a branch."""
    for i in range(BLOCK):
        y = max(block[i] - top, EXP_LEAST)
        shifted = y * LOG2_E + SHIFTER
        r = y - (shifted - SHIFTER) * LN2  # at most ln(2)/2 in size: ten terms of the series leave 2e-13
        series = 1.0
        for n in range(10, 0, -1):
            series = 1.0 + series * r * (1.0 / n)
        power = (np.float64(shifted).view(np.int64) + 1023) << 52  # the bits of 2 to that integer
        terms[i] = series * np.int64(power).view(np.float64)


@compiled(void(inout(float64, 1), inout(int32, 1), int64, float64, int32))
def sift_down(best, ids, size, x, token):  # type: ignore[no-untyped-def]
    """Put ``x`` in the place of the top of the heap of the first ``size``."""
    j = 0
    while True:
        below = 2 * j + 1
        if below >= size:
            break
        right = below + 1
        if right < size and (best[right] < best[below] or (best[right] == best[below] and ids[right] > ids[below])):
            below = right
        if not (best[below] < x or (best[below] == x and ids[below] > token)):
            break
        best[j], ids[j] = best[below], ids[below]
        j = below
    best[j], ids[j] = x, token


@compiled(*(void(readonly(t, 2), int64, inout(float32, 2), inout(int32, 2)) for t in (float32, float64)))
def fill_topk(logits, V, log_probs, token_ids):  # type: ignore[no-untyped-def]
    """Find the K best among the first V of each row."""
    rows, K = token_ids.shape
    block, terms = np.empty(BLOCK, np.float64), np.empty(BLOCK, np.float64)
    best = np.empty(K, np.float64)  # a heap, the worst of the best at the top: the least, and of equals the highest id
    for row in range(rows):
        ids = token_ids[row]
        top, total = -np.inf, 0.0  # the greatest logit so far, and the sum of exp(logit - top)
        size = 0
        for begin in range(0, V, BLOCK):
            count = min(BLOCK, V - begin)
            for i in range(count):
                x = np.float64(logits[row, begin + i])
                block[i] = x if x > -np.inf else -np.inf  # NaN counts as -inf
            for i in range(count, BLOCK):
                block[i] = -np.inf
            block_top = greatest(block)
            if block_top > top:
                if top > -np.inf and block_top < np.inf:
                    total *= math.exp(top - block_top)
                top = block_top
            if -np.inf < top < np.inf:
                exponentials(block, top, terms)
                total += total_of(terms)

            if size == K and not block_top > best[0]:
                continue  # a later id never comes before an equal logit
            for i in range(count):
                x, token = block[i], np.int32(begin + i)
                if size < K:  # the first K fill the heap
                    j = size
                    size += 1
                    while j > 0:
                        above = (j - 1) >> 1
                        if not (x < best[above] or (x == best[above] and token > ids[above])):
                            break
                        best[j], ids[j] = best[above], ids[above]
                        j = above
                    best[j], ids[j] = x, token
                elif x > best[0]:
                    sift_down(best, ids, K, x, token)

        # Taking the worst out again and again, and putting it behind the rest, sorts them best first.
        for end in range(K - 1, 0, -1):
            x, token = best[end], ids[end]
            best[end], ids[end] = best[0], ids[0]
            sift_down(best, ids, end, x, token)
        if -np.inf < top < np.inf:
            log_z = top + math.log(total)
            for k in range(K):
                log_probs[row, k] = min(best[k] - log_z, 0.0)
        else:
            log_probs[row] = -np.inf  # +inf, or nothing finite: no distribution


def topk_log_probs(
    logits: NDArray[Any], k: int, *, vocab_size: int | None = None
) -> tuple[NDArray[np.float32], NDArray[np.int32]]:
    """By logit descending, then id ascending; log-softmax over all of V. See :func:`ddtree.topk_log_probs`."""
    B, L, width = logits.shape
    V = width if vocab_size is None else vocab_size
    log_probs = np.empty((B * L, k), np.float32)
    token_ids = np.empty((B * L, k), np.int32)
    rows = logits.reshape(B * L, width)

    def work(start: int, stop: int) -> None:
        fill_topk(native_floats(rows[start:stop]), V, log_probs[start:stop], token_ids[start:stop])

    if k > 0:
        in_parallel(work, B * L)
    return log_probs.reshape(B, L, k), token_ids.reshape(B, L, k)
