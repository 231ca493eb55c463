"""A peer of ``verify_attention``: one program a request, head and 32 nodes, over the whole context.

Serving engines' extend kernels are laid out so: each program keeps its head's queries and walks all keys through the
page table, the tree's rows last and masked. With one latent for all heads, every head reads the whole cache again, and
a small batch has few programs.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

__all__ = ["attend"]


@triton.jit
def _attend(  # type: ignore[no-untyped-def]
    q, cache, page_table, prefix_lens, words, node_counts, out, scale, N, H, S, max_pages, W,
    C: tl.constexpr, R: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """Programs (blocks of ROWS nodes, H, B)."""
    head, b = tl.program_id(1), tl.program_id(2)
    nodes = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    count, prefix = tl.load(node_counts + b), tl.load(prefix_lens + b)
    used = nodes < count
    latent, rotated, keys = tl.arange(0, C), tl.arange(0, R), tl.arange(0, KEYS)
    rows = ((b * N + nodes) * H + head).to(tl.int64)
    q_latent = tl.load(q + rows[:, None] * (C + R) + latent[None], mask=used[:, None], other=0.0)
    q_rotated = tl.load(q + rows[:, None] * (C + R) + C + rotated[None], mask=used[:, None], other=0.0)
    top = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    sums = tl.zeros([ROWS, C], tl.float32)
    for first in range(0, prefix + count, KEYS):
        row = first + keys
        inside = row < prefix + count
        page = tl.load(page_table + b * max_pages + row // S, mask=inside, other=0).to(tl.int64)
        place = (page * S + row % S) * (C + R)
        k_latent = tl.load(cache + place[:, None] + latent[None], mask=inside[:, None], other=0.0)
        k_rotated = tl.load(cache + place[:, None] + C + rotated[None], mask=inside[:, None], other=0.0)
        scores = (tl.dot(q_latent, tl.trans(k_latent)) + tl.dot(q_rotated, tl.trans(k_rotated))) * scale
        j = row - prefix
        of_tree = inside & (j >= 0)
        places = words + (b * N + nodes[:, None]).to(tl.int64) * W + j[None] // 32
        word = tl.load(places, mask=used[:, None] & of_tree[None], other=0)
        sees = inside[None] & ((j[None] < 0) | ((word >> (j[None] % 32)) & 1 != 0))
        scores = tl.where(sees, scores, float("-inf"))
        higher = tl.maximum(top, tl.max(scores, 1))
        base = tl.where(higher == float("-inf"), 0.0, higher)
        shrink, weights = tl.exp(top - base), tl.exp(scores - base[:, None])
        total = total * shrink + tl.sum(weights, 1)
        sums = sums * shrink[:, None] + tl.dot(weights.to(k_latent.dtype), k_latent)
        top = higher
    result = sums / tl.where(total > 0, total, 1.0)[:, None]
    tl.store(out + rows[:, None] * C + latent[None], result.to(out.dtype.element_ty), mask=(nodes < N)[:, None])


def attend(
    q: Any,
    kv_cache: Any,
    page_table: Any,
    prefix_lens: Any,
    *,
    words: Any,
    node_counts: Any,
    scale: float,
    kv_lora_rank: int,
) -> Any:
    """Like :func:`ddtree.verify_attention`, of torch tensors; ``words`` are the visibility's bits as int32."""
    B, N, H, width = q.shape
    out = torch.empty(B, N, H, kv_lora_rank, dtype=q.dtype, device=q.device)
    _attend[(triton.cdiv(N, 32), H, B)](
        *(q, kv_cache, page_table, prefix_lens, words, node_counts, out, scale),
        *(N, H, kv_cache.shape[1], page_table.shape[1], words.shape[-1]),
        C=kv_lora_rank,
        R=width - kv_lora_rank,
        ROWS=32,
        KEYS=32,
        num_warps=8,
        num_stages=1,
    )
    return out
