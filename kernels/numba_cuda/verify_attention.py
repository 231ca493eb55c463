"""Verify attention: absorbed multi-head latent attention of tree nodes over a paged cache, split over the context.

A row is a node's head. A block takes some rows of a request and a part of its context, in tiles of a few keys that lie
in shared memory, as in an online softmax: a thread a (row, key) works out a score, and then, a thread a few columns,
the latents of the tile are added up, weighted, for every row. Sums of tiles are added up, rather than keys: of
thousands of keys, that loses far fewer bits. A second kernel merges the parts, each of which has its greatest score,
the sum of its weights and its weighted latents.

Calculation is in float32, and in float64 for float64. A key that a row does not see has weight 0 and is not multiplied:
it may be NaN. Cache rows behind the last node, and table entries behind the last row, are not read.
"""

import functools
import math
from typing import Any

import numpy as np

from ddtree.kernels.numba_cuda.jit import (
    LOADS,
    SIMULATED,
    STORES,
    as_array,
    blocks_for,
    contiguous,
    cuda,
    empty,
    kind_of,
    launch,
    raw,
    threads,
)
from ddtree.trees import DraftTree

__all__ = ["verify_attention"]

TILE_BYTES = 37_000
"""Of shared memory for the keys of a tile: 16 of 512 + 64 numbers in float32. With the weights, 48 KB are not full."""

MOST_KEYS = 8 if SIMULATED else 16
KEYS_A_PART = 16 if SIMULATED else 256
"""At least so many keys are a part of the context."""

ENOUGH_BLOCKS = 16 if SIMULATED else 1024
"""Where so many blocks have work, the context is not split further."""


def sizes_for(kind: str, D: int) -> tuple[int, int, int]:
    """Threads a block, rows and keys of a tile; rows times keys are the threads."""
    block = threads(128)
    keys = MOST_KEYS
    while keys > 1 and keys * (D + 1) * (8 if kind == "float64" else 4) > TILE_BYTES:
        keys //= 2
    return block, block // keys, keys


@functools.cache
def kernels_for(kind: str, cache_kind: str, C: int, D: int) -> tuple[Any, Any]:
    """Return the kernels for a type of queries, one of the cache, and the widths of latents and of keys."""
    load, load_key, store = LOADS[kind], LOADS[cache_kind], STORES[kind]
    real = np.float64 if kind == "float64" else np.float32
    block, ROWS, KEYS = sizes_for(kind, D)
    COLUMNS = -(-C // block)  # of a thread
    STRIDE = D + 1  # odd for the usual widths: threads that read the same column of several keys meet no bank twice
    nothing = real(-np.inf)

    @cuda.jit
    def attend(q, cache, page_table, prefix_lens, words, counts, scale, sums, tops, totals, tiles):  # type: ignore[no-untyped-def]
        """One part of the context for ``ROWS`` rows of a request.

        ``sums`` (B, parts, N · H, C), ``tops`` and ``totals`` (B, parts, N · H) are written; a request has ``tiles``
        blocks a part.
        """
        _, N, H, _ = q.shape
        parts, S, t = tops.shape[1], cache.shape[1], cuda.threadIdx.x
        first_row = cuda.blockIdx.x % tiles * ROWS
        part = cuda.blockIdx.x // tiles % parts
        b = cuda.blockIdx.x // tiles // parts

        keys = cuda.shared.array((KEYS, STRIDE), real)
        scores, weights = cuda.shared.array((ROWS, KEYS), real), cuda.shared.array((ROWS, KEYS), real)
        rescales = cuda.shared.array(ROWS, real)
        own = cuda.local.array((ROWS, COLUMNS), real)  # sums of this thread's columns
        for r in range(ROWS):
            for j in range(COLUMNS):
                own[r, j] = 0

        prefix = np.int64(prefix_lens[b])
        context = prefix + counts[b]
        length = (context + parts * KEYS - 1) // (parts * KEYS) * KEYS  # of a part
        begin, end = min(part * length, context), min((part + 1) * length, context)
        r, k = t // KEYS, t % KEYS  # whose score this thread works out
        row = first_row + r
        i, h = row // H, row % H
        used = i < counts[b]
        top, total = nothing, real(0)

        for start in range(begin, end, KEYS):
            # All threads are through with the last tile, its weights and its factors.
            cuda.syncthreads()
            for element in range(t, KEYS * D, block):
                place, d = start + element // D, element % D
                if place < end:
                    keys[element // D, d] = load_key(cache[page_table[b, place // S], place % S, d])
            # The keys of the tile, to all threads.
            cuda.syncthreads()
            key = start + k
            seen = used and key < end
            if seen and key >= prefix:
                j = key - prefix
                seen = (words[b, i, j >> 5] >> np.uint32(j & 31)) & np.uint32(1) != 0
            score = nothing
            if seen:
                # Four sums, which depend on one another less, and round less, than one would.
                s0, s1, s2, s3 = real(0), real(0), real(0), real(0)
                for d in range(0, D - 3, 4):
                    s0 += load(q[b, i, h, d]) * keys[k, d]
                    s1 += load(q[b, i, h, d + 1]) * keys[k, d + 1]
                    s2 += load(q[b, i, h, d + 2]) * keys[k, d + 2]
                    s3 += load(q[b, i, h, d + 3]) * keys[k, d + 3]
                for d in range(D // 4 * 4, D):
                    s0 += load(q[b, i, h, d]) * keys[k, d]
                score = scale * ((s0 + s1) + (s2 + s3))
            scores[r, k] = score
            # The scores of a row, to the threads that weight its keys.
            cuda.syncthreads()
            new_top = top
            for other in range(KEYS):
                new_top = max(new_top, scores[r, other])
            # Where every score so far overflowed to −inf there is no top yet, and nothing weighs anything.
            weights[r, k] = real(math.exp(score - new_top)) if seen and new_top > nothing else real(0)
            rescale = real(math.exp(top - new_top)) if top > nothing else real(0)
            if k == 0:
                rescales[r] = rescale
            top = new_top
            # The weights of all rows, and the factors of what was added up before, to all threads.
            cuda.syncthreads()
            tile_total = real(0)
            for other in range(KEYS):
                tile_total += weights[r, other]
            total = total * rescale + tile_total
            for j in range(COLUMNS):
                c = t + j * block
                if c < C:
                    for other_row in range(ROWS):
                        tile_sum = real(0)
                        for other in range(KEYS):
                            weight = weights[other_row, other]
                            if weight != 0:
                                tile_sum += weight * keys[other, c]
                        own[other_row, j] = own[other_row, j] * rescales[other_row] + tile_sum

        for other_row in range(ROWS):
            if first_row + other_row < N * H:
                for j in range(COLUMNS):
                    c = t + j * block
                    if c < C:
                        sums[b, part, first_row + other_row, c] = own[other_row, j]
        if k == 0 and row < N * H:
            tops[b, part, row], totals[b, part, row] = top, total

    @cuda.jit
    def merge(sums, tops, totals, counts, out):  # type: ignore[no-untyped-def]
        """Fill ``out`` (B, N, H, C) from the parts, one element a thread; zeros in unused slots."""
        B, N, H, _ = out.shape
        element = cuda.grid(1)
        if element >= B * N * H * C:
            return
        c, row, b = element % C, element // C % (N * H), element // C // (N * H)
        i, h = row // H, row % H
        value, total, top = real(0), real(1), nothing
        if i < counts[b]:
            for part in range(tops.shape[1]):
                top = max(top, tops[b, part, row])
            total = real(0)
            for part in range(tops.shape[1]):
                factor = real(math.exp(tops[b, part, row] - top))
                value += sums[b, part, row, c] * factor
                total += totals[b, part, row] * factor
        out[b, i, h, c] = store(value / total)

    return attend, merge


def verify_attention(
    q: Any,
    kv_cache: Any,
    page_table: Any,
    prefix_lens: Any,
    tree: DraftTree,
    *,
    scale: float,
    kv_lora_rank: int,
    out: Any = None,
) -> Any:
    """Each node attends to the prefix and to the nodes it sees. See :func:`ddtree.verify_attention`."""
    B, N, H, D = q.shape
    C = kv_lora_rank
    result = empty((B, N, H, C), q.dtype) if out is None else out
    if result.size == 0:
        return result
    block, rows, keys = sizes_for(kind_of(q), D)
    real = np.float64 if kind_of(q) == "float64" else np.float32
    tiles = blocks_for(N * H, rows)
    # Lengths are on the device; the table's width says how long a context can be.
    longest = page_table.shape[1] * kv_cache.shape[1]
    parts = max(1, min(longest // max(KEYS_A_PART, keys), ENOUGH_BLOCKS // (tiles * B)))
    sums = empty((B, parts, N * H, C), real)
    tops, totals = empty((B, parts, N * H), real), empty((B, parts, N * H), real)
    counts = as_array(tree.node_counts, np.int32)
    attend, merge = kernels_for(kind_of(q), kind_of(kv_cache), C, D)
    launch(
        attend,
        B * parts * tiles,
        block,
        *(raw(contiguous(q)), raw(contiguous(kv_cache))),
        *(as_array(page_table, np.int32), as_array(prefix_lens, np.int32)),
        *(as_array(tree.visibility_words, np.uint32), counts, real(scale), sums, tops, totals, tiles),
    )
    launch(merge, blocks_for(result.size, threads(256)), threads(256), sums, tops, totals, counts, raw(result))
    return result
