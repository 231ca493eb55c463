"""Rotary position embedding (arXiv 2104.09864) in both layouts, and its frequencies under YaRN (arXiv 2309.00071)."""

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ddtree.reference.rms_norm import rms_norm
from ddtree.trees import DraftTree

__all__ = ["deinterleave", "rope", "rope_cos_sin", "rope_frequencies", "rotate_halves", "rotate_pairs", "yarn_mscale"]


def rope(
    q: NDArray[Any],
    kv_cache: NDArray[Any],
    queries: NDArray[Any],
    latents: NDArray[Any],
    keys: NDArray[Any],
    page_table: NDArray[np.int32],
    prefix_lens: NDArray[np.int32],
    tree: DraftTree,
    *,
    gain: NDArray[Any],
    eps: float,
    frequencies: NDArray[np.float64],
    attention_factor: float = 1.0,
) -> None:
    """Rotate the queries and keys of a tree's nodes at their positions, and write their rows of a layer's cache.

    The last R elements of each of ``queries`` (B, N, H, P + R) go, rotated, to those of ``q`` (B, N, H, C + R), and 0
    in unused slots. Node i's row of ``kv_cache`` (pages, S, C + R) is its latent (B, N, C), normalised by ``gain``
    (C,), then its rotated key (B, N, R). Pairs are halves.
    """
    C, R, page_size = latents.shape[-1], keys.shape[-1], kv_cache.shape[1]
    q[..., C:] = 0
    for b in range(len(q)):
        for i in range(int(tree.node_counts[b])):
            position = np.array(int(prefix_lens[b]) + int(tree.depths[b, i]))
            cos, sin = (part.astype(q.dtype) for part in rope_cos_sin(position, frequencies, attention_factor))
            for h, query in enumerate(queries[b, i]):
                q[b, i, h, C:] = rotate_halves(query[-R:], cos, sin)
            row = int(prefix_lens[b]) + i
            place = kv_cache[page_table[b, row // page_size], row % page_size]
            place[:C] = rms_norm(latents[b, i], gain, eps=eps)
            place[C:] = rotate_halves(keys[b, i], cos, sin)


def rope_frequencies(
    rope_dim: int,
    theta: float,
    *,
    factor: float = 1.0,
    original_max_position_embeddings: int = 4096,
    beta_fast: float = 32.0,
    beta_slow: float = 1.0,
    truncate: bool = True,
) -> NDArray[np.float64]:
    """Radians a position of each rotated pair: (R / 2,). A factor above 1 is YaRN's; 1 is plain RoPE.

    YaRN keeps the pairs that turn more than ``beta_fast`` times within the original context, slows those that turn
    less than ``beta_slow`` times by ``factor``, and goes from one to the other linearly in the pair's index.
    """

    def pair_that_turns(times: float) -> float:
        return rope_dim * math.log(original_max_position_embeddings / (times * 2 * math.pi)) / (2 * math.log(theta))

    low, high = pair_that_turns(beta_fast), pair_that_turns(beta_slow)
    if truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope_dim - 1)
    if low == high:
        high += 0.001  # a step, not a division by zero

    frequencies = np.empty(rope_dim // 2)
    for pair in range(rope_dim // 2):
        plain = theta ** (-2 * pair / rope_dim)
        slowed = min(max((pair - low) / (high - low), 0.0), 1.0)
        frequencies[pair] = plain / factor * slowed + plain * (1 - slowed)
    return frequencies


def yarn_mscale(factor: float, mscale: float) -> float:
    """YaRN's attention temperature for a context ``factor`` times as long."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def rope_cos_sin(
    positions: NDArray[Any], frequencies: NDArray[np.float64], attention_factor: float = 1.0
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Cosine and sine of each pair's angle at each position, times ``attention_factor``: two arrays (..., R / 2)."""
    angles = np.multiply.outer(np.asarray(positions, np.float64), frequencies)
    return attention_factor * np.cos(angles), attention_factor * np.sin(angles)


def rotate_halves(x: NDArray[Any], cos: NDArray[Any], sin: NDArray[Any]) -> NDArray[Any]:
    """Rotate x (..., R) where pair i is elements i and R/2 + i (the GPT-NeoX layout)."""
    result = np.empty_like(x)
    half = x.shape[-1] // 2
    for i in range(half):
        a, b = x[..., i], x[..., half + i]
        result[..., i] = a * cos[..., i] - b * sin[..., i]
        result[..., half + i] = b * cos[..., i] + a * sin[..., i]
    return result


def rotate_pairs(x: NDArray[Any], cos: NDArray[Any], sin: NDArray[Any]) -> NDArray[Any]:
    """Rotate x (..., R) where pair i is elements 2i and 2i + 1 (the paper's layout)."""
    result = np.empty_like(x)
    for i in range(x.shape[-1] // 2):
        a, b = x[..., 2 * i], x[..., 2 * i + 1]
        result[..., 2 * i] = a * cos[..., i] - b * sin[..., i]
        result[..., 2 * i + 1] = b * cos[..., i] + a * sin[..., i]
    return result


def deinterleave(x: NDArray[Any]) -> NDArray[Any]:
    """From pairs to halves: the even elements of x (..., R), then the odd ones."""
    return np.concatenate([x[..., 0::2], x[..., 1::2]], axis=-1)
