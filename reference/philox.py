"""Philox4x32-10, a counter-based random generator (Salmon et al., "Parallel random numbers", SC 2011)."""

import numpy as np
from numpy.typing import NDArray

__all__ = ["philox4x32"]

MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
WEYL = (0x9E3779B9, 0xBB67AE85)
LOW = np.uint64(0xFFFFFFFF)


def philox4x32(counter: NDArray[np.uint32], key: tuple[int, int]) -> NDArray[np.uint32]:
    """Four random words for each counter.

    Parameters
    ----------
    counter : array, uint32, shape (..., 4)
        Any value; equal counters give equal words.
    key : tuple of two int
        32 bits each.

    Returns
    -------
    array, uint32, shape (..., 4)
    """
    c0, c1, c2, c3 = (counter[..., i].astype(np.uint64) for i in range(4))
    k0, k1 = key
    for _ in range(10):
        p0, p1 = MULTIPLIERS[0] * c0, MULTIPLIERS[1] * c2
        c0, c1, c2, c3 = (
            (p1 >> np.uint64(32)) ^ c1 ^ np.uint64(k0),
            p1 & LOW,
            (p0 >> np.uint64(32)) ^ c3 ^ np.uint64(k1),
            p0 & LOW,
        )
        k0, k1 = (k0 + WEYL[0]) & 0xFFFFFFFF, (k1 + WEYL[1]) & 0xFFFFFFFF
    return np.stack([c0, c1, c2, c3], axis=-1).astype(np.uint32)
