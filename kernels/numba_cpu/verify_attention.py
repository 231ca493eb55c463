"""Verify attention, one node a thread: rows are visited, not masked.

A node's rows are listed, the prefix's and then those of the nodes that it sees, so that nothing that is not seen is
read, let alone multiplied by zero. Blocks of rows stay in the second-level cache while every head goes over them; the
softmax is an online one, its sums rescaled where a block brings a greater score.
"""

import math
from typing import Any

import numpy as np
from numba import float32, float64, int32, int64, uint32, void
from numpy.typing import NDArray

from ddtree.kernels.numba_cpu.jit import as_array, compiled, in_parallel, inout, native_floats, readonly
from ddtree.trees import DraftTree

__all__ = ["verify_attention"]

BLOCK = 64
"""Rows a block: 147 KB in float32 with 512 + 64 numbers a row."""


@compiled(*(t(readonly(t, 1), readonly(t, 1)) for t in (float32, float64)), fastmath={"reassoc", "contract"})
def dot(a, b):  # type: ignore[no-untyped-def]
    """The sum of products, in whichever order is fastest."""
    total = a[0] * b[0]
    for i in range(1, len(a)):
        total += a[i] * b[i]
    return total


@compiled(*(void(inout(t, 1), t, readonly(t, 1)) for t in (float32, float64)), fastmath={"contract"})
def add_scaled(total, weight, row):  # type: ignore[no-untyped-def]
    """Add ``weight`` times the first numbers of ``row``."""
    for c in range(len(total)):
        total[c] += weight * row[c]


@compiled(
    *(
        void(
            readonly(t, 4),  # q (B, N, H, D)
            readonly(t, 3),  # cache (pages, S, D)
            readonly(int32, 2),  # page_table (B, max_pages)
            readonly(int32, 1),  # prefix_lens (B,)
            readonly(uint32, 3),  # words (B, N, W)
            readonly(int32, 1),  # counts (B,)
            t,  # scale
            inout(t, 4),  # out (B, N, H, C)
            int64,
            int64,
        )
        for t in (float32, float64)
    )
)
def attend(q, cache, page_table, prefix_lens, words, counts, scale, out, start, stop):  # type: ignore[no-untyped-def]
    """Fill the output of nodes ``start`` … ``stop`` of the batch; zeros for unused slots."""
    _, N, H, _ = q.shape
    S, C = cache.shape[1], out.shape[3]
    scores, block_sum = np.empty(BLOCK, q.dtype), np.empty(C, q.dtype)
    tops, weights = np.empty(H, np.float64), np.empty(H, np.float64)  # greatest score, and sum of exp(score - it)
    rows = np.empty(N, np.int64)
    request, prefix = -1, 0
    for node in range(start, stop):
        b, i = node // N, node % N
        if i >= counts[b]:
            out[b, i] = 0
            continue
        if b != request:
            request, prefix = b, int(prefix_lens[b])
            rows = np.empty(prefix + N, np.int64)
            for row in range(prefix):
                rows[row] = row
        n = prefix
        for j in range(i + 1):  # nobody sees a node behind itself
            if (words[b, i, j >> 5] >> np.uint32(j & 31)) & np.uint32(1):
                rows[n] = prefix + j
                n += 1
        out[b, i] = 0
        weights[:] = 0
        for begin in range(0, n, BLOCK):
            count = min(BLOCK, n - begin)
            for h in range(H):
                query, total = q[b, i, h], out[b, i, h]
                block_top = -np.inf
                for k in range(count):
                    row = rows[begin + k]
                    scores[k] = scale * dot(query, cache[page_table[b, row // S], row % S])
                    block_top = max(block_top, scores[k])
                old_top = tops[h] if begin > 0 else -np.inf
                tops[h] = max(old_top, block_top)
                if tops[h] == -np.inf:
                    continue  # scores that overflowed weigh nothing beside any other; there may be one further on
                rescale = math.exp(old_top - tops[h])  # 0 for the first block
                # Sums of blocks are added up, rather than rows: of thousands of rows, that loses far fewer bits.
                block_weight = 0.0
                block_sum[:] = 0
                for k in range(count):
                    row = rows[begin + k]
                    weight = math.exp(scores[k] - tops[h])
                    block_weight += weight
                    add_scaled(block_sum, weight, cache[page_table[b, row // S], row % S])
                weights[h] = weights[h] * rescale + block_weight
                for c in range(C):
                    total[c] = total[c] * rescale + block_sum[c]
        for h in range(H):
            for c in range(C):
                out[b, i, h, c] /= weights[h]


def verify_attention(
    q: NDArray[Any],
    kv_cache: NDArray[Any],
    page_table: NDArray[np.int32],
    prefix_lens: NDArray[np.int32],
    tree: DraftTree,
    *,
    scale: float,
    kv_lora_rank: int,
    out: NDArray[Any] | None = None,
) -> NDArray[Any]:
    """Each node attends to the prefix and to the nodes it sees. See :func:`ddtree.verify_attention`."""
    B, N, H, D = q.shape
    result = np.empty((B, N, H, kv_lora_rank), q.dtype) if out is None else out
    if result.size == 0:
        return result
    queries = native_floats(q)
    sums = result if result.dtype == queries.dtype else np.empty(result.shape, queries.dtype)
    if kv_cache.dtype != queries.dtype:
        # Convert the pages in use, and them alone: entries of the table behind a request's last row may hold anything.
        needed = -(-(prefix_lens.astype(np.int64) + tree.node_counts) // kv_cache.shape[1])
        in_use = np.arange(page_table.shape[1]) < needed[:, None]
        pages, places = np.unique(page_table[in_use], return_inverse=True)
        kv_cache = native_floats(kv_cache[pages]).astype(queries.dtype, copy=False)
        page_table = np.zeros_like(page_table)
        page_table[in_use] = places
    in_parallel(
        attend,
        B * N,
        queries,
        as_array(kv_cache, queries.dtype),
        as_array(page_table, np.int32),
        as_array(prefix_lens, np.int32),
        as_array(tree.visibility_words, np.uint32),
        as_array(tree.node_counts, np.int32),
        queries.dtype.type(scale),
        sums,
        grain=max(1, 4096 // (H * D)),
    )
    if sums is not result:
        result[...] = sums
    return result
