"""Launch of ``topk_log_probs.cu``."""

from typing import Any

import numpy as np

from ddtree.kernels.cupy.program import blocks_for, contiguous, empty, launch, suffix_of

__all__ = ["topk_log_probs"]

TILE, TILE_THREADS = 8192, 256
MERGE_THREADS = (128, 256, 512)
MERGE_HELD = 8
ROW_THREADS = 512
MOST_BY_TILES = 1024
"""K of which each tile gives candidates; for a larger K, one block works on a row."""


def topk_log_probs(logits: Any, k: int, *, vocab_size: int | None = None) -> tuple[Any, Any]:
    """By logit descending, then id ascending; log-softmax over all of V. See :func:`ddtree.topk_log_probs`."""
    B, L, width = logits.shape
    rows, V = B * L, width if vocab_size is None else vocab_size
    log_probs, token_ids = empty((B, L, k), np.float32), empty((B, L, k), np.int32)
    suffix = suffix_of(logits)
    logits = contiguous(logits)
    if suffix == "f64" or k > MOST_BY_TILES:
        size = power_of_2(k)
        launch(
            *("topk_log_probs", f"topk_of_row_{suffix}", rows, ROW_THREADS),
            *(logits, np.int64(width), np.int32(V), np.int32(k), np.int32(size)),
            *(empty((rows, size), np.uint64), empty((rows, size), np.int32), log_probs, token_ids),
        )
    else:
        tiles, most = blocks_for(V, TILE), k + max(k // 4, 64)
        threads = next((n for n in MERGE_THREADS if tiles * most <= MERGE_HELD * n), MERGE_THREADS[-1])
        # Where a row has more candidates than its merging block holds, those that may count are gathered first.
        share = blocks_for(k, tiles - 1) if tiles * most > MERGE_HELD * threads else 0
        size = power_of_2(k + k // 4) if k <= 512 else power_of_2(k)
        made = (
            *(empty((rows, tiles, most), np.uint64), empty((rows, tiles), np.uint32), empty((rows, tiles), np.uint32)),
            *(empty((rows, tiles), np.float32), empty((rows, tiles), np.float64)),
        )
        launch(
            *("topk_log_probs", f"topk_of_tiles_{suffix}", rows * tiles, TILE_THREADS),
            *(logits, np.int64(width), *map(np.int32, (V, tiles, k, most, share)), *made),
        )
        launch(
            *("topk_log_probs", "merge_tiles", rows, threads),
            *(*made, *map(np.int32, (tiles, k, most, share, max(64, size))), log_probs, token_ids),
            shared=8 * MERGE_HELD * threads if share > 0 else 0,
        )
    return log_probs, token_ids


def power_of_2(count: int) -> int:
    """The least that is not below ``count``."""
    return 1 << (count - 1).bit_length()
