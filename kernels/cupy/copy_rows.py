"""Launch of ``copy_rows.cu``."""

from typing import Any

import numpy as np

from ddtree.kernels.cupy.program import blocks_for, launch

__all__ = ["copy_rows", "word_of"]

THREADS = 256
WORDS = 4
"""Of a thread."""


def copy_rows(slots: Any, out: Any, *, word: int = 4, fill: int = 0) -> None:
    """Copy rows from where a number on the device says, when it runs: a graph's replay reads what is there by then.

    Parameters
    ----------
    slots : array, int64, shape (2,) or (A, 2)
        Address of contiguous rows that the GPU can read, and how many words each of them has: of ``out``, or of each of
        the A arrays that it holds.
    out : array, any type, C-contiguous, shape (…) or (A, …)
        Its rows are those along its last axis; what is behind the words that are copied becomes ``fill``.
    word : int
        Bytes of a word, 2, 4 or 16, that address and ``out`` are aligned to and rows are made of. See :func:`word_of`.
    fill : int
        The bits of a word; of one of 16 bytes, which must fill its rows, not used.
    """
    if out.size == 0:
        return
    if slots.shape not in ((2,), (len(out), 2)):
        raise ValueError(f"slots must be (2,) or ({len(out)}, 2), one for each array of out, got {slots.shape}")
    arrays = slots.size // 2
    words, pitch = out.nbytes // word // arrays, out.shape[-1] * out.dtype.itemsize // word
    launch(
        *("copy_rows", f"copy_rows_{word}", (blocks_for(words, THREADS * WORDS), arrays), THREADS),
        *(slots, out, np.int64(words), np.int64(pitch), np.uint32(fill)),
    )


def word_of(nbytes: int) -> int:
    """The widest word that rows of ``nbytes`` bytes, an even number, are made of."""
    return next(word for word in (16, 4, 2) if nbytes % word == 0)
