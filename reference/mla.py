"""Multi-head latent attention of one layer, absorbed, over tree nodes and a paged cache (arXiv 2405.04434)."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ddtree.reference.rms_norm import rms_norm
from ddtree.reference.rope import deinterleave, rope_cos_sin, rotate_halves, rotate_pairs
from ddtree.reference.verify_attention import verify_attention
from ddtree.trees import DraftTree

__all__ = ["mla"]

LORA_NORM_EPS = 1e-6
"""Of the norms inside attention, whatever the configuration's ``rms_norm_eps`` says."""


def mla(
    hidden_states: NDArray[Any],
    kv_cache: NDArray[Any],
    page_table: NDArray[np.int32],
    prefix_lens: NDArray[np.int32],
    tree: DraftTree,
    weights: Mapping[str, NDArray[Any]],
    *,
    num_heads: int,
    frequencies: NDArray[np.float64],
    attention_factor: float,
    scale: float,
    rope_interleave: bool,
) -> NDArray[Any]:
    """Attention's output (B, N, D) for normalised hidden states (B, N, D); writes the nodes' rows of the cache first.

    ``weights`` holds Hugging Face's tensors of ``self_attn`` by their short names (``q_b_proj``, …). No key or value is
    ever expanded: as ``(W_UK c) · q = c · (W_UKᵀ q)``, the query goes to the latent space, and what attention gives
    back leaves it through W_UV. The output of unused slots is 0.
    """
    B, N, _ = hidden_states.shape
    C = len(weights["kv_a_layernorm"])
    R = len(weights["kv_a_proj_with_mqa"]) - C
    value_dim = weights["o_proj"].shape[1] // num_heads
    key_dim = len(weights["kv_b_proj"]) // num_heads - value_dim
    page_size = kv_cache.shape[1]
    kv_up = weights["kv_b_proj"].reshape(num_heads, key_dim + value_dim, C)

    def rotate(x: NDArray[Any], position: int) -> NDArray[Any]:
        cos, sin = (t.astype(x.dtype) for t in rope_cos_sin(np.array(position), frequencies, attention_factor))
        return deinterleave(rotate_pairs(x, cos, sin)) if rope_interleave else rotate_halves(x, cos, sin)

    q = np.zeros((B, N, num_heads, C + R), hidden_states.dtype)
    for b in range(B):
        for i in range(int(tree.node_counts[b])):
            x = hidden_states[b, i]
            position = int(prefix_lens[b]) + int(tree.depths[b, i])

            if "q_proj" in weights:
                queries = weights["q_proj"] @ x
            else:
                q_latent = rms_norm(weights["q_a_proj"] @ x, weights["q_a_layernorm"], eps=LORA_NORM_EPS)
                queries = weights["q_b_proj"] @ q_latent
            for h, query in enumerate(queries.reshape(num_heads, key_dim + R)):
                q[b, i, h, :C] = kv_up[h, :key_dim].T @ query[:key_dim]
                q[b, i, h, C:] = rotate(query[key_dim:], position)

            kv = weights["kv_a_proj_with_mqa"] @ x
            row = int(prefix_lens[b]) + i
            place = kv_cache[page_table[b, row // page_size], row % page_size]
            place[:C] = rms_norm(kv[:C], weights["kv_a_layernorm"], eps=LORA_NORM_EPS)
            place[C:] = rotate(kv[C:], position)

    latents = verify_attention(q, kv_cache, page_table, prefix_lens, tree, scale=scale, kv_lora_rank=C)
    output = np.zeros_like(hidden_states)
    for b in range(B):
        for i in range(int(tree.node_counts[b])):
            values = [kv_up[h, key_dim:] @ latents[b, i, h] for h in range(num_heads)]
            output[b, i] = weights["o_proj"] @ np.concatenate(values)
    return output
