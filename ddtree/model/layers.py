"""The layers' mathematics on whole arrays: NumPy and CuPy run the same code, in the type of their inputs.

Each function computes what the one of the same name in :mod:`ddtree.reference` says. Letters: M tokens, D hidden size,
E experts, K experts a token, I inner size, H heads, C kv_lora_rank, R qk_rope_head_dim. Matrices are (out, in), as
checkpoints have them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ddtree.arrays import array_namespace, to_numpy

__all__ = [
    "LORA_NORM_EPS",
    "LatentAttention",
    "moe_experts",
    "rms_norm",
    "rope_cos_sin",
    "rope_frequencies",
    "rotate_halves",
    "route_experts",
    "sigmoid",
    "swiglu",
]

LORA_NORM_EPS = 1e-6
"""Of the norms inside attention, whatever the configuration's ``rms_norm_eps`` says."""


def rms_norm(x: Any, weight: Any, *, eps: float) -> Any:
    """Root-mean-square normalisation (arXiv 1910.07467).

    Parameters
    ----------
    x : array, float, shape (..., D)
        Rows to normalise.
    weight : array, float, shape (D,)
        Gain of each column.
    eps : float
        Added to the mean square.

    Returns
    -------
    array, float, shape (..., D)
    """
    mean_square = (x * x).sum(-1, keepdims=True) / x.shape[-1]
    return x / array_namespace(x).sqrt(mean_square + eps) * weight


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
    """Frequencies of RoPE (arXiv 2104.09864), under YaRN (arXiv 2309.00071) where ``factor`` is above 1.

    Parameters
    ----------
    rope_dim : int
        R, even.
    theta : float
        Base of the geometric sequence.
    factor, original_max_position_embeddings, beta_fast, beta_slow, truncate
        YaRN's: see :class:`ddtree.model.config.Yarn`.

    Returns
    -------
    array, float64, shape (R / 2,)
        Radians a position of each rotated pair.
    """
    plain: NDArray[np.float64] = theta ** (np.arange(0, rope_dim, 2) / -rope_dim)
    if factor == 1.0:
        return plain
    # a pair's index, as a real number, from the turns that it makes within the original context
    turns = np.array([beta_fast, beta_slow])
    bounds = rope_dim * np.log(original_max_position_embeddings / (turns * 2 * math.pi)) / (2 * math.log(theta))
    low, high = (np.floor(bounds[0]), np.ceil(bounds[1])) if truncate else bounds
    low, high = max(low, 0.0), min(high, rope_dim - 1.0)
    slowed: NDArray[np.float64] = np.clip((np.arange(rope_dim // 2) - low) / (high - low or 0.001), 0.0, 1.0)
    return plain / factor * slowed + plain * (1 - slowed)


def rope_cos_sin(positions: Any, frequencies: Any, attention_factor: float = 1.0) -> tuple[Any, Any]:
    """Cosines and sines that RoPE rotates by.

    Parameters
    ----------
    positions : array, int, shape (M,)
        Sequence positions.
    frequencies : array, float64, shape (R / 2,)
        Radians a position.
    attention_factor : float
        YaRN's factor of both.

    Returns
    -------
    cos, sin : array, float64, shape (M, R / 2)
        In float64 whatever the model's type is: a float32 angle of 100,000 radians is off by 0.004.
    """
    xp = array_namespace(positions)
    angles = positions[:, None].astype(xp.float64) * frequencies
    return xp.cos(angles) * attention_factor, xp.sin(angles) * attention_factor


def rotate_halves(x: Any, cos: Any, sin: Any) -> Any:
    """Rotary embedding in the GPT-NeoX layout: pair i is elements i and R/2 + i.

    Parameters
    ----------
    x : array, float, shape (..., R)
        Vectors to rotate.
    cos, sin : array, float, shape (..., R / 2)
        Of each pair's angle, in x's type.

    Returns
    -------
    array, float, shape (..., R)
    """
    half = x.shape[-1] // 2
    a, b = x[..., :half], x[..., half:]
    return array_namespace(x).concatenate((a * cos - b * sin, b * cos + a * sin), axis=-1)


def sigmoid(x: Any) -> Any:
    """1 / (1 + e^−x) to full relative precision at both ends, without an overflow: array, float, any shape."""
    xp = array_namespace(x)
    small = xp.exp(-xp.abs(x))
    return xp.where(x < 0, small, 1) / (1 + small)


def swiglu(x: Any, gate_up: Any, down: Any) -> Any:
    """Gated feed-forward layer (arXiv 2002.05202): ``down · (silu(gate · x) * (up · x))``.

    Parameters
    ----------
    x : array, float, shape (M, D)
        Inputs.
    gate_up : array, float, shape (2I, D)
        Gate's rows, then up's.
    down : array, float, shape (D, I)
        Back to the hidden size.

    Returns
    -------
    array, float, shape (M, D)
    """
    inner = down.shape[1]
    both = x @ gate_up.T
    gate, up = both[:, :inner], both[:, inner:]
    return (gate * sigmoid(gate) * up) @ down.T


def route_experts(
    logits: Any,
    bias: Any,
    *,
    num_experts_per_tok: int,
    n_group: int,
    topk_group: int,
    norm_topk_prob: bool,
    routed_scaling_factor: float,
) -> tuple[Any, Any]:
    """Choose experts by sigmoid scores, corrected by a bias and limited to the best groups (arXiv 2412.19437).

    Parameters
    ----------
    logits : array, float, shape (M, E)
        The router's.
    bias : array, float, shape (E,)
        Added to the scores for the choice alone.
    num_experts_per_tok, n_group, topk_group, norm_topk_prob, routed_scaling_factor
        See :class:`ddtree.model.config.ModelConfig`. A group's score is the sum of its best two.

    Returns
    -------
    expert_ids : array, int64, shape (M, K)
        Best first; of equal scores the lowest index, among groups too.
    weights : array, float, shape (M, K)
        Scores without the bias, divided by their sum if ``norm_topk_prob``, times ``routed_scaling_factor``.
    """
    xp = array_namespace(logits)
    M, E = logits.shape
    scores = sigmoid(logits)
    corrected = scores + bias
    if topk_group < n_group:
        groups = corrected.reshape(M, n_group, E // n_group)
        group_scores = xp.sort(groups, axis=-1)[..., -2:].sum(-1)
        # a stable sort of the negated scores keeps equals in order of index
        dropped = xp.argsort(-group_scores, axis=-1, kind="stable")[:, topk_group:]
        groups[xp.arange(M)[:, None], dropped] = -xp.inf  # a view: this is corrected itself
    expert_ids = xp.argsort(-corrected, axis=-1, kind="stable")[:, :num_experts_per_tok]
    weights = xp.take_along_axis(scores, expert_ids, axis=-1)
    if norm_topk_prob:
        weights = weights / (weights.sum(-1, keepdims=True) + 1e-20)
    return expert_ids, weights * routed_scaling_factor


def moe_experts(x: Any, expert_ids: Any, weights: Any, gate_up: Any, down: Any) -> Any:
    """Weighted sum of its experts' outputs for each token (arXiv 2401.06066).

    Parameters
    ----------
    x : array, float, shape (M, D)
        Inputs.
    expert_ids : array, int, shape (M, K)
        Experts of each token.
    weights : array, float, shape (M, K)
        Their weights.
    gate_up, down : array, float, shapes (E, 2I, D) and (E, D, I)
        Each expert's :func:`swiglu`.

    Returns
    -------
    array, float, shape (M, D)

    Notes
    -----
    Tokens are sorted by expert, so that an expert works once, on all of its tokens, and an idle one not at all. On a
    GPU the host must know how many each has, so that the call waits for the device.
    """
    xp = array_namespace(x)
    M, K = expert_ids.shape
    flat = expert_ids.reshape(-1)
    order = xp.argsort(flat, kind="stable")
    ends = np.cumsum(to_numpy(xp.bincount(flat, minlength=len(down)))).tolist()
    inputs = x[order // K]
    outputs = xp.empty((M * K, x.shape[1]), x.dtype)
    start = 0
    for expert, end in enumerate(ends):
        if end > start:
            # straight to where the token's k-th output belongs
            outputs[order[start:end]] = swiglu(inputs[start:end], gate_up[expert], down[expert])
        start = end
    return (weights[:, None, :] @ outputs.reshape(M, K, x.shape[1]))[:, 0]


@dataclass(frozen=True)
class LatentAttention:
    """Multi-head latent attention (arXiv 2405.04434) around the softmax, with W_UK and W_UV absorbed.

    Attributes
    ----------
    down : array, float, shape (Q + C + R, D)
        Compression of the query (or, without one, the queries of all heads) and of the key, in one matrix.
    q_norm : array, float, shape (Q,), or None
        Gain of the compressed query's norm; None without compression.
    q_up : array, float, shape (H · (P + R), Q), or None
        Queries of all heads from the compressed one: P elements without position, then R rotary ones.
    kv_norm : array, float, shape (C,)
        Gain of the latent's norm.
    k_up : array, float, shape (H, P, C)
        W_UK: takes a query into the latent space.
    v_up : array, float, shape (H, C, V)
        W_UV: takes a latent to a head's value.
    out : array, float, shape (D, H · V)
        Output projection.
    """

    down: Any
    q_norm: Any
    q_up: Any
    kv_norm: Any
    k_up: Any
    v_up: Any
    out: Any

    def project(self, x: Any, cos: Any, sin: Any) -> tuple[Any, Any]:
        """What attention takes: (M, H, C + R) queries and (M, C + R) cache rows of (M, D) normalised hidden states."""
        xp = array_namespace(x)
        H, P, C = self.k_up.shape
        R = 2 * cos.shape[1]
        M, Q = len(x), len(self.down) - C - R
        compressed = x @ self.down.T
        queries = compressed[:, :Q]
        if self.q_up is not None:
            queries = rms_norm(queries, self.q_norm, eps=LORA_NORM_EPS) @ self.q_up.T
        queries = queries.reshape(M, H, P + R)
        q = xp.empty((M, H, C + R), x.dtype)
        q[..., :C] = (queries[..., :P].transpose(1, 0, 2) @ self.k_up).transpose(1, 0, 2)
        q[..., C:] = rotate_halves(queries[..., P:], cos[:, None], sin[:, None])
        rows = xp.empty((M, C + R), x.dtype)
        rows[:, :C] = rms_norm(compressed[:, Q : Q + C], self.kv_norm, eps=LORA_NORM_EPS)
        rows[:, C:] = rotate_halves(compressed[:, Q + C :], cos, sin)
        return q, rows

    def output(self, latents: Any) -> Any:
        """The layer's (M, D) output from attention's (M, H, C) latents."""
        values = latents.transpose(1, 0, 2) @ self.v_up  # (H, M, V)
        return values.transpose(1, 0, 2).reshape(len(latents), self.out.shape[1]) @ self.out.T
