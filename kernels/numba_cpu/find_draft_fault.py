"""The first thing wrong with the values of a draft, one (request, depth) row at a time.

It runs before every tree that is built from host arrays, so it has to be cheap beside that. A row is first asked whether
anything at all is wrong with its values, in a loop without branches that the compiler turns into vector instructions.
Equal ids are found by a hash table that is never cleared: an entry holds the id and, above it, the row that it is from.
Only a row in which something is wrong is looked at candidate by candidate.
"""

import numpy as np
from numba import float32, int32, int64, types
from numpy.typing import NDArray

from ddtree.kernels.numba_cpu.jit import as_array, compiled, in_parallel, readonly

__all__ = ["find_draft_fault"]

SLOTS_A_CANDIDATE = 64
"""Size of the hash table: 32 KB for 64 candidates, where about every second row sees two ids meet in a slot."""

# unsigned, so that numba does not make every index wrap round
ZERO, ONE, ROW_SHIFT = np.uint64(0), np.uint64(1), np.uint64(32)


@compiled(types.UniTuple(int64, 3)(readonly(float32, 2), readonly(int32, 2), int64, int64, int64))
def first_fault(log_probs, token_ids, ids_end, start, stop):  # type: ignore[no-untyped-def]
    """Code, row and rank of the first fault of rows ``start`` … ``stop``; the code 0 if there is none."""
    K = log_probs.shape[1]
    slots = 1
    while slots < SLOTS_A_CANDIDATE * K:
        slots *= 2
    mask = np.uint64(slots - 1)
    table = np.zeros(slots, np.uint64)

    for row in range(start, stop):
        values, ids = log_probs[row], token_ids[row]
        unsorted, outside = values[0] > 0, np.uint32(ids[0]) >= ids_end
        for k in range(ONE, np.uint64(K)):
            unsorted |= not (values[k] <= values[k - ONE])  # a NaN is unsorted too
            outside |= np.uint32(ids[k]) >= ids_end  # a negative id is a large unsigned one
        end = np.uint64(K)
        code = 0
        if unsorted | outside | (values[K - 1] == -np.inf):
            # Either the drafted prefix is shorter than the row, or something is wrong in it: find which, and where.
            end = ZERO
            while end < np.uint64(K) and values[end] > -np.inf:
                if values[end] > 0:
                    code = 1
                elif end > ZERO and values[end] > values[end - ONE]:
                    code = 2
                elif np.uint32(ids[end]) >= ids_end:
                    code = 3
                if code:
                    break
                end += ONE

        # An equal id before ``end`` is a fault that comes before the one found there.
        this_row = np.uint64(row - start + 1) << ROW_SHIFT
        for k in range(end):
            entry = this_row | np.uint64(ids[k])
            slot = np.uint64(ids[k]) & mask
            while table[slot] >= this_row:  # taken by a candidate of this row
                if table[slot] == entry:
                    return 4, row, np.int64(k)
                slot = (slot + ONE) & mask
            table[slot] = entry
        if code:
            return code, row, np.int64(end)
    return 0, 0, 0


def find_draft_fault(
    log_probs: NDArray[np.float32], token_ids: NDArray[np.int32], vocab_size: int
) -> tuple[int, int, int, int]:
    """What is wrong with a draft, and where first. See :func:`ddtree.reference.find_draft_fault`."""
    B, L, K = log_probs.shape
    if token_ids.dtype != np.int32:  # no id that 32 bits would change may pass for another one
        token_ids = np.where((token_ids < 0) | (token_ids >= 2**31), -1, token_ids)
    if log_probs.size == 0:
        return 0, 0, 0, 0
    faults = in_parallel(
        first_fault,
        B * L,
        as_array(log_probs, np.float32).reshape(B * L, K),
        as_array(token_ids, np.int32).reshape(B * L, K),
        2**31 if vocab_size < 0 else min(vocab_size, 2**31),
        grain=max(1, 16384 // K),
    )
    for code, row, k in faults:
        if code:
            return code, row // L, row % L, k
    return 0, 0, 0, 0
