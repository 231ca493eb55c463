"""The layers' mathematics on whole arrays, in the type of their inputs.

Each function computes what the one of the same name in :mod:`ddtree.reference` says. Those of whole layers have the
names and arguments of :mod:`ddtree.kernels.cupy`, so that a model is written once: these serve it on the host, those on
a GPU, for which they never wait. Letters: M tokens, D hidden size, O outputs, E experts, K experts a token, I inner
size, H heads, B requests of N slots, P elements of a head's query without position, C kv_lora_rank, R qk_rope_head_dim,
S page size. Matrices are (out, in), as checkpoints have them.

Many layers normalise what they read and add their result to the residual stream, so that both are arguments: ``gain``,
shape (D,), with ``eps``, normalises x by :func:`rms_norm` first, and ``residual``, of the result's shape, is added.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ddtree.arrays import array_namespace, to_numpy
from ddtree.trees import DraftTree

__all__ = [
    "RowsOfPass",
    "embed_tokens",
    "head_linear",
    "linear",
    "moe_experts",
    "rms_norm",
    "rope",
    "rope_cos_sin",
    "rope_frequencies",
    "rotate_halves",
    "route_experts",
    "sigmoid",
    "swiglu",
]


def embed_tokens(table: Any, token_ids: Any) -> Any:
    """Rows of an embedding.

    Parameters
    ----------
    table : array, float, shape (V, D)
        A row for each token.
    token_ids : array, int32, shape (M,)
        Tokens. One that is none, below 0 or from V on, as padding may have, is read as token 0.

    Returns
    -------
    array, the type of ``table``, shape (M, D)
    """
    rows: Any = table[np.where((token_ids >= 0) & (token_ids < len(table)), token_ids, 0)]
    return rows


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
    small = xp.exp(xp.minimum(x, 0))
    return small / (small + xp.exp(-xp.maximum(x, 0)))


def linear(x: Any, weight: Any, *, gain: Any = None, eps: float = 0.0, residual: Any = None, dtype: Any = None) -> Any:
    """Product with a weight: ``x Wᵀ``.

    Parameters
    ----------
    x : array, float, shape (M, D)
        Rows, which may be a part of the columns of a wider array.
    weight : array, float, shape (O, D)
        The weight.
    gain : array, float, shape (D,), optional
        Normalise x first, by this gain.
    eps : float
        Of the norm.
    residual : array, float, shape (M, O), optional
        Added to the product.
    dtype : type, optional
        Type of the result; x's if left out.

    Returns
    -------
    array, float, shape (M, O)
    """
    result = _normalised(x, gain, eps) @ weight.T
    if residual is not None:
        result += residual
    return result if dtype is None else result.astype(dtype, copy=False)


def head_linear(x: Any, weight: Any, *, out: Any = None) -> Any:
    """Product of each head with a weight of its own.

    Parameters
    ----------
    x : array, float, shape (M, H, D)
        Of each token and head.
    weight : array, float, shape (H, O, D)
        Of each head.
    out : array, float, shape (M, H, O), optional
        Where the result goes. Rows and heads of x and of this may lie apart, their elements may not.

    Returns
    -------
    array, float, shape (M, H, O)
        ``out`` where it is given.
    """
    heads = x.transpose(1, 0, 2), weight.transpose(0, 2, 1)
    if out is None:
        return array_namespace(x).matmul(*heads).transpose(1, 0, 2)
    array_namespace(x).matmul(*heads, out=out.transpose(1, 0, 2))
    return out


def rope(
    q: Any,
    kv_cache: Any,
    queries: Any,
    latents: Any,
    keys: Any,
    page_table: Any,
    prefix_lens: Any,
    tree: DraftTree,
    *,
    gain: Any,
    eps: float,
    frequencies: Any,
    attention_factor: float = 1.0,
) -> None:
    """Rotate a layer's queries and keys at the nodes' positions, and write the nodes' rows of its cache.

    Parameters
    ----------
    q : array, float, shape (B, N, H, C + R)
        Its last R elements of each head are written, 0 in unused slots; the rest is left alone.
    kv_cache : array, float, shape (pages, S, C + R)
        One layer of the cache. Node i's row ``prefix_len + i`` is written: its latent, normalised, then its rotated
        key. Unused slots write nothing.
    queries : array, float, shape (B, N, H, P + R)
        Queries of which the last R elements are to be rotated.
    latents : array, float, shape (B, N, C)
        Latents before their norm.
    keys : array, float, shape (B, N, R)
        Keys to be rotated.
    page_table : array, int32, shape (B, max_pages)
        Row r of request b is row ``r % S`` of page ``page_table[b, r // S]``.
    prefix_lens : array, int32, shape (B,)
        Committed rows of each request.
    tree : DraftTree
        Its depths and node counts say where nodes stand and which are in use.
    gain : array, float, shape (C,)
        Of the latents' norm.
    eps : float
        Of the same.
    frequencies : array, float64, shape (R / 2,)
        Radians a position of each pair.
    attention_factor : float
        YaRN's factor of cosines and sines.
    """
    where = RowsOfPass(prefix_lens, tree, frequencies, attention_factor, q.dtype)
    where.find_pages(page_table, kv_cache.shape[1])
    where.rope(q, kv_cache, queries, latents, keys, gain=gain, eps=eps)


class RowsOfPass:
    """Where the nodes of a pass stand, and what they are rotated by: the same in every layer, so found once.

    Parameters
    ----------
    prefix_lens, tree, frequencies, attention_factor
        As :func:`rope` takes them.
    dtype : type
        Of queries and cache.

    Attributes
    ----------
    slots, requests, rows : array, int64, shape (M,)
        Of each node in use: its place among the B · N slots, its request, and its row in that request's cache.
    """

    def __init__(
        self, prefix_lens: Any, tree: DraftTree, frequencies: Any, attention_factor: float, dtype: Any
    ) -> None:
        xp = array_namespace(prefix_lens)
        self.shape = B, N = tree.token_ids.shape
        self.used = xp.arange(N) < tree.node_counts[:, None]
        self.slots = xp.flatnonzero(self.used)
        self.all_used = len(self.slots) == B * N
        self.requests = self.slots // N
        start = prefix_lens.astype(xp.int64)  # offsets into a cache can exceed 32 bits
        self.rows = start[self.requests] + self.slots % N
        angles = rope_cos_sin((start[:, None] + tree.depths).reshape(-1), frequencies, attention_factor)
        self.cos, self.sin = (part.astype(dtype).reshape(B, N, len(frequencies)) for part in angles)

    def find_pages(self, page_table: Any, page_size: int) -> None:
        """Look up where rows lie, which must have pages."""
        self.pages, self.page_rows = page_table[self.requests, self.rows // page_size], self.rows % page_size

    def rope(self, q: Any, kv_cache: Any, queries: Any, latents: Any, keys: Any, *, gain: Any, eps: float) -> None:
        """As the function :func:`rope`, of one layer."""
        C, R, cos, sin = latents.shape[-1], keys.shape[-1], self.cos, self.sin
        q[..., C:] = rotate_halves(queries[..., -R:], cos[:, :, None], sin[:, :, None])
        rows = array_namespace(q).empty((*self.shape, C + R), q.dtype)
        rows[..., :C] = rms_norm(latents, gain, eps=eps)
        rows[..., C:] = rotate_halves(keys, cos, sin)
        if not self.all_used:
            q[~self.used, :, C:] = 0
        rows = rows.reshape(-1, C + R)
        kv_cache[self.pages, self.page_rows] = rows if self.all_used else rows[self.slots]


def swiglu(x: Any, gate_up: Any, down: Any, *, gain: Any = None, eps: float = 0.0, residual: Any = None) -> Any:
    """Gated feed-forward layer (arXiv 2002.05202): ``down · (silu(gate · x) * (up · x))``.

    Parameters
    ----------
    x : array, float, shape (M, D)
        Inputs.
    gate_up : array, float, shape (2I, D)
        Gate's rows, then up's.
    down : array, float, shape (D, I)
        Back to the hidden size.
    gain : array, float, shape (D,), optional
        Normalise x first, by this gain.
    eps : float
        Of the norm.
    residual : array, float, shape (M, D), optional
        Added to the result.

    Returns
    -------
    array, float, shape (M, D)
    """
    inner = down.shape[1]
    both = _normalised(x, gain, eps) @ gate_up.T
    gate, up = both[:, :inner], both[:, inner:]
    return linear(gate * sigmoid(gate) * up, down, residual=residual)


def route_experts(
    logits: Any,
    bias: Any,
    *,
    num_experts_per_tok: int,
    n_group: int,
    topk_group: int,
    norm_topk_prob: bool,
    routed_scaling_factor: float,
    node_counts: Any = None,
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
    node_counts : array, int32, shape (B,), optional
        The rows are B requests' slots, M / B of each, of which so many are in use. All are if left out.

    Returns
    -------
    expert_ids : array, int64, shape (M, K)
        Best first; of equal scores the lowest index, among groups too. −1 in unused slots.
    weights : array, float, shape (M, K)
        Scores without the bias, divided by their sum if ``norm_topk_prob``, times ``routed_scaling_factor``. 0 in
        unused slots.
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
    weights = weights * routed_scaling_factor
    if node_counts is None or len(node_counts) == 0:
        return expert_ids, weights
    used = (xp.arange(M // len(node_counts)) < node_counts[:, None]).reshape(M, 1)
    return xp.where(used, expert_ids, -1), xp.where(used, weights, 0)


def moe_experts(
    x: Any,
    expert_ids: Any,
    weights: Any,
    gate_up: Any,
    down: Any,
    *,
    gain: Any = None,
    eps: float = 0.0,
    residual: Any = None,
    shared: int = 0,
) -> Any:
    """Weighted sum of its experts' outputs for each token (arXiv 2401.06066), and of those that all tokens share.

    Parameters
    ----------
    x : array, float, shape (M, D)
        Inputs.
    expert_ids : array, int, shape (M, K)
        Experts of each token. A token whose ids are −1 is no token: it has no expert, the shared ones included.
    weights : array, float, shape (M, K)
        Their weights.
    gate_up, down : array, float, shapes (E, 2I, D) and (E, D, I)
        Each expert's :func:`swiglu`.
    gain : array, float, shape (D,), optional
        Normalise x first, by this gain.
    eps : float
        Of the norm.
    residual : array, float, shape (M, D), optional
        Added to the result.
    shared : int
        The last so many of the E experts are every token's, with weight 1.

    Returns
    -------
    array, float, shape (M, D)

    Notes
    -----
    Tokens are sorted by expert, so that an expert works once, on all of its tokens, and an idle one not at all. The
    host must know how many each has, so that a call on CuPy arrays waits for the GPU; those of
    :mod:`ddtree.kernels.cupy` do not.
    """
    xp = array_namespace(x)
    M, K = expert_ids.shape
    x = _normalised(x, gain, eps)
    outputs = xp.empty((M * K, x.shape[1]), x.dtype)
    idle = False
    for expert, tokens, pairs in _by_expert(expert_ids):
        # straight to where the token's k-th output belongs
        outputs[pairs] = 0 if expert < 0 else swiglu(x[tokens], gate_up[expert], down[expert])
        idle = idle or expert < 0
    result = (weights[:, None, :] @ outputs.reshape(M, K, x.shape[1]))[:, 0]
    for expert in range(len(down) - shared, len(down)):
        of_all = swiglu(x, gate_up[expert], down[expert])
        result += xp.where(expert_ids[:, :1] < 0, 0, of_all) if idle else of_all
    if residual is not None:
        result += residual
    return result


def _by_expert(expert_ids: Any) -> Iterator[tuple[int, Any, Any]]:
    """Each expert that is anyone's, −1 too, with its tokens and which of the M · K pairs these are."""
    xp = array_namespace(expert_ids)
    M, K = expert_ids.shape
    if M == 1:  # as in decoding one by one, where sorting would take as long as the products
        for k, expert in enumerate(to_numpy(expert_ids)[0].tolist()):
            yield expert, slice(0, 1), slice(k, k + 1)
        return
    flat = expert_ids.reshape(-1)
    order = xp.argsort(flat, kind="stable")
    ends = [0, *np.cumsum(to_numpy(xp.bincount(flat + 1))).tolist()]
    for expert, (start, end) in enumerate(itertools.pairwise(ends), -1):
        if end > start:
            pairs = order[start:end]
            yield expert, pairs // K, pairs


def _normalised(x: Any, gain: Any, eps: float) -> Any:
    return x if gain is None else rms_norm(x, gain, eps=eps)
