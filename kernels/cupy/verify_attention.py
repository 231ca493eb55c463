"""Launch of ``verify_attention.cu``."""

from typing import Any

import numpy as np

from ddtree.kernels.cupy.program import blocks_for, contiguous, empty, launch, multiprocessors, suffix_of
from ddtree.trees import DraftTree

__all__ = ["verify_attention"]

THREADS = 256

# version 1
PLAIN_ROWS, PLAIN_COLUMNS = 8, 512  # of a block
PLAIN_KEYS = 32
"""A tile, which is the least part of a context."""
PLAIN_PARTS = (64, 32, 16, 8, 4, 2, 1)
"""At most so many parts has a context: few sizes, so that batches of any sizes mostly share out their keys alike."""
PLAIN_BLOCKS_A_PROCESSOR = 2
"""Where so many blocks have work, the context is not split further."""

# version 2
ROWS, KEYS, LATENT, ROTATED = 64, 16, 512, 64
SHARED = 92_528
"""Bytes of shared memory a block, as the source states them."""
GREATEST = float(np.finfo(np.float32).max)

# version 3
FEW_ROWS = 16  # of a cluster
FEW_PARTS = (8, 4, 2, 1)
"""Blocks of a cluster, each of which has a part of the context."""
FEW_KEYS = 320
"""In a part of a context, up to which this version is the faster one."""
FEW_SHARED = 98_760


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
    version: int | None = None,
) -> Any:
    """Each node attends to the prefix and to the nodes it sees. See :func:`ddtree.verify_attention`.

    ``version`` is 1 for the kernel that takes every type and width, 2 for that of the tensor cores, 3 for the one of
    theirs that is made for few rows and short contexts, and by default the fastest that takes these arrays, as far as
    their shapes tell. In all, as in the reference, a key that is not finite reaches none of the nodes that do not see
    it. A node that sees one gets NaN in all columns where its score is NaN or +inf; where it is -inf, NaN in the
    columns that are infinite in that key, since 0 times infinity is NaN.
    """
    B, N, H, _ = q.shape
    result = empty((B, N, H, kv_lora_rank), q.dtype) if out is None else out
    if result.size == 0:
        return result
    arrays = (
        *(contiguous(q), contiguous(kv_cache), contiguous(page_table, np.int32), contiguous(prefix_lens, np.int32)),
        *(contiguous(tree.visibility_words, np.uint32), contiguous(tree.node_counts, np.int32)),
    )
    if version is None:
        keys = page_table.shape[1] * kv_cache.shape[1]
        few = keys <= FEW_KEYS * few_parts(B * blocks_for(N * H, FEW_ROWS), multiprocessors())
        version = 1 if not _fit_tensor_cores(*arrays[:3], result) else 3 if few else 2
    {1: _launch_plain, 2: _launch_tensor, 3: _launch_few}[version](arrays, result, scale)
    return result


def _fit_tensor_cores(q: Any, kv_cache: Any, page_table: Any, out: Any) -> bool:
    """Whether versions 2 and 3 take them: its types and widths, copies of 16 bytes, and 32-bit places in the table."""
    return (
        suffix_of(q) in ("f16", "bf16")
        and (out.shape[-1], q.shape[-1]) == (LATENT, LATENT + ROTATED)
        and all(array.data.ptr % 16 == 0 for array in (q, kv_cache, out))
        and page_table.size < 2**31
    )


def _launch_plain(arrays: tuple[Any, ...], out: Any, scale: float) -> None:
    q, kv_cache, page_table, prefix_lens, _, node_counts = arrays
    B, N, H, D = q.shape
    C, S, max_pages = out.shape[-1], kv_cache.shape[1], page_table.shape[1]
    suffix = suffix_of(q)
    real = np.float64 if suffix == "f64" else np.float32
    blocks = B * blocks_for(N * H, PLAIN_ROWS) * blocks_for(C, PLAIN_COLUMNS)
    # Lengths are on the device; the table's width says how long a context can be.
    parts = plain_parts(max_pages * S, blocks, multiprocessors())
    sums = empty((B, parts, N * H, C), real)
    tops, totals = empty((B, parts, N * H), real), empty((B, parts, N * H), real)
    launch(
        *("verify_attention", f"attend_plain_{suffix}", blocks * parts, THREADS),
        *(*arrays, sums, tops, totals, real(scale)),
        *(np.int32(size) for size in (N, H, C, D, S, max_pages, parts)),
    )
    launch(
        *("verify_attention", f"merge_plain_{suffix}", B * N * H, THREADS),
        *(sums, tops, totals, prefix_lens, node_counts, out),
        *(np.int32(size) for size in (N, H, C, parts)),
    )


def plain_parts(keys: int, blocks: int, processors: int) -> int:
    """The most parts of a context of up to so many keys, where a part has so many blocks.

    >>> plain_parts(2048, 2, 132), plain_parts(112, 130, 132), plain_parts(2048, 130, 132)
    (64, 2, 2)
    """
    enough = PLAIN_BLOCKS_A_PROCESSOR * processors // blocks
    most = next(parts for parts in PLAIN_PARTS if parts <= max(enough, 1))
    return max(1, min(most, blocks_for(keys, PLAIN_KEYS)))


def _launch_tensor(arrays: tuple[Any, ...], out: Any, scale: float) -> None:
    q, kv_cache, page_table, *_, node_counts = arrays
    B, N, H, _ = q.shape
    S, max_pages = kv_cache.shape[1], page_table.shape[1]
    suffix, processors = suffix_of(q), multiprocessors()
    # As many shares as the schedule can make of contexts of any lengths; see `share_of`.
    row_tiles = B * blocks_for(N * H, ROWS)
    blocks, slots = (
        (processors, processors) if row_tiles <= processors else (row_tiles + 2 * processors, 4 * processors)
    )
    schedule = empty((B, 2), np.int32)
    parts = empty((slots, ROWS, LATENT), np.float16)
    stats, scales = empty((slots, ROWS, 2), np.float32), empty((slots, ROWS, 4), np.float32)
    launch(
        *("verify_attention", f"attend_{suffix}", blocks, THREADS, *arrays, schedule, parts, stats, scales, out),
        _scale_of_2(scale),
        *(np.int32(size) for size in (B, N, H, S)),
        *(np.uint32(number) for number in _division_by(S)),
        *(np.int32(size) for size in (max_pages, processors)),
        shared=SHARED,
    )
    rows = N * H
    # So many groups of threads share the work of a row that each multiprocessor has up to 4 blocks to do.
    split = next(split for split in (16, 4, 1) if split == 1 or B * rows * split <= 16 * processors)
    blocks_a_request = blocks_for(rows * split, 4)
    launch(
        *("verify_attention", f"merge_{suffix}", B * blocks_a_request, THREADS),
        *(parts, stats, scales, schedule, node_counts, out),
        *(np.int32(size) for size in (rows, H, split, blocks_a_request)),
    )


def _launch_few(arrays: tuple[Any, ...], out: Any, scale: float) -> None:
    q, kv_cache, page_table, *_ = arrays
    B, N, H, _ = q.shape
    S, max_pages = kv_cache.shape[1], page_table.shape[1]
    tiles = B * blocks_for(N * H, FEW_ROWS)
    parts = max(1, few_parts(tiles, multiprocessors()))
    launch(
        *("verify_attention", f"attend_few_{suffix_of(q)}", tiles * parts, THREADS, *arrays, out),
        _scale_of_2(scale),
        *(np.int32(size) for size in (N, H)),
        *(np.uint32(number) for number in (S, *_division_by(S))),
        np.int32(max_pages),
        shared=FEW_SHARED,
        cluster=parts,
    )


def few_parts(tiles: int, processors: int) -> int:
    """Parts of each context where so many tiles of rows are at work; 0 where they are too many for version 3.

    A block fills a multiprocessor, and larger clusters need some neighbours free at once: they leave half of them.

    >>> few_parts(1, 132), few_parts(17, 132), few_parts(33, 132), few_parts(132, 132), few_parts(133, 132)
    (8, 2, 2, 1, 0)
    """
    for parts in FEW_PARTS:
        if tiles * parts * (2 if parts > 2 else 1) <= processors:
            return parts
    return 0


def _scale_of_2(scale: float) -> np.float32:
    """What takes products to scores in units of log 2."""
    return np.float32(np.clip(scale * np.log2(np.e), -GREATEST, GREATEST))


def _division_by(divisor: int) -> tuple[int, int]:
    """A factor and a shift such that ``2 * x * factor >> 32 + shift`` is ``x // divisor`` for all 31-bit ``x``.

    Granlund and Montgomery, Division by invariant integers using multiplication (1994), theorem 4.2.

    >>> _division_by(48)
    (2863311531, 6)
    >>> 2 * 1007 * 2863311531 >> 32 + 6
    20
    """
    shift = (divisor - 1).bit_length()
    return (1 << 31 + shift) // divisor + 1, shift
