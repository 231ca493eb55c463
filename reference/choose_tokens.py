"""The target's choice after each node: greedy, or sampled by keyed Gumbel noise."""

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ddtree.reference.philox import philox4x32
from ddtree.reference.portable_math import portable_exp, portable_log

__all__ = ["choose_tokens"]

MASS_ONE = 2.0**40
"""The likeliest token's mass in a nucleus, as an integer: sums of integers are the same in any order."""


def gumbel_noise(vocab: int, seed: int, request_id: int, position: int) -> NDArray[np.float64]:
    """Standard Gumbel noise of each token: token v takes word ``v % 4`` of counter (v // 4, position, request id)."""
    blocks = np.arange((vocab + 3) // 4, dtype=np.uint32)
    counter = np.empty((len(blocks), 4), np.uint32)
    counter[:, 0], counter[:, 1] = blocks, position
    counter[:, 2], counter[:, 3] = request_id & 0xFFFFFFFF, request_id >> 32 & 0xFFFFFFFF
    words = philox4x32(counter, (seed & 0xFFFFFFFF, seed >> 32 & 0xFFFFFFFF)).reshape(-1)[:vocab]
    uniform = (words.astype(np.float64) + 0.5) * 2.0**-32  # inside (0, 1): neither logarithm meets a zero
    return -portable_log(-portable_log(uniform))


def nucleus(z: NDArray[np.float64], top_p: float) -> NDArray[np.bool_]:
    """Tokens kept by top-p: by (z descending, id ascending), less than ``top_p`` of the mass lies before them."""
    masses = np.floor(portable_exp(z) * MASS_ONE).astype(np.int64)
    order = np.argsort(-z, kind="stable")
    before = np.cumsum(masses[order]) - masses[order]
    kept = np.zeros(len(z), np.bool_)
    kept[order] = before < math.ceil(top_p * float(masses.sum()))
    return kept


def choose_tokens(
    logits: NDArray[Any],
    *,
    temperature: float = 0.0,
    top_p: float = 1.0,
    seed: int = 0,
    request_ids: NDArray[np.int64] | None = None,
    positions: NDArray[np.int32] | None = None,
) -> NDArray[np.int32]:
    """Argmax of the logits, or of logits / temperature plus keyed noise. See :func:`ddtree.choose_tokens`."""
    B, N, V = logits.shape
    chosen = np.full((B, N), -1, np.int32)
    for b in range(B):
        for i in range(N):
            row = logits[b, i].astype(np.float64)
            top = row.max() if V else np.nan  # NaN where any logit is
            if not np.isfinite(top):
                continue  # NaN, +inf, or nothing finite: no choice
            if temperature > 0:
                assert positions is not None
                request_id = b if request_ids is None else int(request_ids[b])
                with np.errstate(over="ignore"):  # −inf is the right rounding: the top is 0 at any temperature
                    row = (row - top) / temperature
                kept = nucleus(row, top_p) if top_p < 1 else np.True_
                row = np.where(kept, row + gumbel_noise(V, seed, request_id, int(positions[b, i])), -np.inf)
            chosen[b, i] = row.argmax()  # the first of equals
    return chosen
