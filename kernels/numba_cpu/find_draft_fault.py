"""The first thing wrong with the values of a draft, one (request, depth) row at a time.

It runs before every tree that is built from host arrays, so it has to be cheap beside that. A row is first asked
whether anything at all is wrong with its values, in a loop without branches that the compiler turns into vector
instructions; only where something may be is it looked at candidate by candidate. Equal ids are found by a hash table
that is never cleared: an entry holds the id and, above it, the row that it is from.
"""

import numpy as np
from numba import float32, int32, int64, types, uint32, uint64
from numpy.typing import NDArray

from ddtree.kernels.numba_cpu.jit import as_array, compiled, in_parallel, inout, readonly

__all__ = ["find_draft_fault"]

BLOCK = 32
"""Candidates looked at in one go: a constant, so that the compiler makes vector instructions of all of them."""

SLOTS_A_CANDIDATE = 64
"""Size of the hash table: 32 KB for 64 candidates, where about every second row sees two ids meet in a slot."""

# unsigned, so that numba does not make every index wrap round
ZERO, ONE, ROW_SHIFT = np.uint64(0), np.uint64(1), np.uint64(32)


@compiled(types.UniTuple(uint64, 2)(readonly(float32, 1), readonly(int32, 1), uint32))  # type: ignore[no-untyped-call]
def first_wrong_value(values, ids, ids_end):  # type: ignore[no-untyped-def]
    """Code and rank of the first fault of a row but for equal ids; 0 and the length of the drafted prefix if none."""
    k = ZERO
    while k < np.uint64(len(values)) and values[k] > -np.inf:
        if values[k] > 0:
            return np.uint64(1), k
        if k > ZERO and values[k] > values[k - ONE]:
            return np.uint64(2), k
        if np.uint32(ids[k]) >= ids_end:
            return np.uint64(3), k
        k += ONE
    return ZERO, k


@compiled(uint64(readonly(int32, 1), uint64, inout(uint64, 1), uint64))
def first_equal_id(ids, end, table, this_row):  # type: ignore[no-untyped-def]
    """Rank of the first id before ``end`` that stands further left already; ``end`` if there is none."""
    mask = np.uint64(len(table) - 1)
    for k in range(end):
        id_ = np.uint64(np.uint32(ids[k]))
        entry, slot = this_row | id_, id_ & mask
        while table[slot] >= this_row:  # a candidate of this row stands there
            if table[slot] == entry:
                return k
            slot = (slot + ONE) & mask
        table[slot] = entry
    return end


@compiled(types.UniTuple(int64, 3)(readonly(float32, 2), readonly(int32, 2), uint32, int64, int64))  # type: ignore[no-untyped-call]
def first_fault(log_probs, token_ids, ids_end, start, stop):  # type: ignore[no-untyped-def]
    """Code, row and rank of the first fault of rows ``start`` … ``stop``; the code 0 if there is none."""
    K = log_probs.shape[1]
    slots = 1
    while slots < SLOTS_A_CANDIDATE * K:
        slots *= 2
    table = np.zeros(slots, np.uint64)

    for row in range(start, stop):
        values, ids = log_probs[row], token_ids[row]
        suspect = np.int32(values[0] > 0) | np.int32(np.uint32(ids[0]) >= ids_end) | np.int32(K <= BLOCK)
        first = ONE
        while first < np.uint64(K) and K > BLOCK:
            begin = min(first, np.uint64(K - BLOCK))  # the last block overlaps the one before
            for i in range(np.uint64(BLOCK)):
                k = begin + i
                # A NaN is suspect too, and a negative id is a large unsigned one.
                suspect |= np.int32(not (values[k] <= values[k - ONE])) | np.int32(np.uint32(ids[k]) >= ids_end)
            first += np.uint64(BLOCK)
        code, end = ZERO, np.uint64(K)
        if suspect or values[K - 1] == -np.inf:
            code, end = first_wrong_value(values, ids, ids_end)
        repeat = first_equal_id(ids, end, table, np.uint64(row - start + 1) << ROW_SHIFT)
        if repeat < end:  # it comes before a fault at ``end``
            return 4, row, np.int64(repeat)
        if code != ZERO:
            return np.int64(code), row, np.int64(end)
    return 0, 0, 0


def find_draft_fault(
    log_probs: NDArray[np.float32], token_ids: NDArray[np.int32], vocab_size: int
) -> tuple[int, int, int, int]:
    """What is wrong with a draft, and where first. See :func:`ddtree.reference.find_draft_fault`."""
    B, L, K = log_probs.shape
    if token_ids.dtype != np.int32:  # no id that 32 bits would change may pass for another one
        token_ids = token_ids.astype(np.int64)  # unsigned types have no −1
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
