"""Launch of ``choose_tokens.cu``."""

from typing import Any

import numpy as np

from ddtree.kernels.cupy.program import contiguous, empty, launch, suffix_of

__all__ = ["choose_tokens"]

BLOCKS = 8
"""Of a row."""
THREADS = 256


def choose_tokens(
    logits: Any,
    *,
    temperature: float = 0.0,
    top_p: float = 1.0,
    seed: int = 0,
    request_ids: Any = None,
    positions: Any = None,
    place: Any = None,
) -> Any:
    """Argmax of the logits, or of logits / temperature plus keyed noise. See :func:`ddtree.choose_tokens`.

    With ``place``, an array int64 (1,), at temperature 0, ``logits`` only say of which shape and type they are, and
    ``place`` where they are when the kernel runs: the address of a contiguous array that is aligned to 16 bytes. So a
    captured graph may be given others each time.
    """
    if place is not None and temperature != 0:
        raise ValueError(f"temperature must be 0 with a place, got {temperature}")
    B, N, V = logits.shape
    chosen = empty((B, N), np.int32)
    if V == 0:
        chosen.fill(-1)
        return chosen
    if place is None:
        logits = contiguous(logits)
    step = 8 if logits.dtype.itemsize == 2 else 4  # logits that a lane reads at once
    aligned = np.int32((place is not None or logits.data.ptr % 16 == 0) and V % step == 0)
    if temperature == 0:
        launch(
            *("choose_tokens", f"choose_greedy_{suffix_of(logits)}", B * N * BLOCKS, THREADS),
            *(logits, np.uintp(0) if place is None else place, chosen, np.uint32(V), aligned),
        )
    else:
        name = "choose_from_nucleus" if top_p < 1 else "choose_sampled"
        launch(
            *("choose_tokens", f"{name}_{suffix_of(logits)}", B * N * BLOCKS, THREADS),
            *(logits, contiguous(positions, np.int32)),
            np.uintp(0) if request_ids is None else contiguous(request_ids, np.int64),
            *(chosen, np.uint32(V), np.int32(N), aligned, np.float64(temperature), np.float64(top_p)),
            *(np.uint32(seed & 0xFFFFFFFF), np.uint32(seed >> 32 & 0xFFFFFFFF)),
        )
    return chosen
