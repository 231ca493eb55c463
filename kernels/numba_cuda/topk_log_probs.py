"""The K likeliest tokens of a row with their log-probs, one row a block.

The row is read a few times, and lies in the second-level cache from the second time on:

1. its greatest logit, and the sum of exponentials relative to that;
2. the K-th greatest logit by radix selection: logits become integers in the same order, and of these, from the highest
   8 bits to the lowest, a histogram of what is still in question tells the next digit;
3. the logits above it, and as many of those equal to it as there is room for, lowest ids first: each warp looks through
   a contiguous part of the row, so counts of the parts before it tell where its finds go;
4. a bitonic sort of the K by (logit descending, id ascending), in global memory, whatever K is.

Sums of exponentials are float64, always added in the same order.
"""

import functools
import math
from typing import Any

import numpy as np

from ddtree.kernels.numba_cuda.jit import ALL, LOADS, contiguous, cuda, empty, kind_of, launch, raw, threads

__all__ = ["topk_log_probs"]

MOST_WARPS = 32
LEAST = np.iinfo(np.int64).min


@cuda.jit(device=True)
def number32(x):  # type: ignore[no-untyped-def]
    """An integer of 32 bits that sorts as the float32 ``x`` does; NaN counts as −inf, and −0 as 0."""
    if not x > -np.inf:
        x = np.float32(-np.inf)
    if x == 0:
        return np.int64(0)
    bits = np.int64(cuda.libdevice.float_as_int(x))
    return bits ^ 0x7FFFFFFF if bits < 0 else bits


@cuda.jit(device=True)
def number64(x):  # type: ignore[no-untyped-def]
    """An integer of 64 bits that sorts as the float64 ``x`` does; NaN counts as −inf, and −0 as 0."""
    if not x > -np.inf:
        x = -np.inf
    if x == 0:
        return np.int64(0)
    bits = np.int64(cuda.libdevice.double_as_longlong(x))
    return bits ^ 0x7FFFFFFFFFFFFFFF if bits < 0 else bits


@cuda.jit(device=True)
def sum_of_lanes(x):  # type: ignore[no-untyped-def]
    """The sum over the warp, in every lane, and the same bits in each."""
    for step in (16, 8, 4, 2, 1):
        x += cuda.shfl_xor_sync(ALL, x, step)
    return x


@cuda.jit(device=True)
def find_digit(histogram, left, found):  # type: ignore[no-untyped-def]
    """Where counts of 256 digits, from the highest digit down, reach ``left``; by one warp.

    ``found`` gets that digit, and what is left of ``left`` below the digits above it.
    """
    # Lane 0 has the 8 highest digits, and so on; above a lane's digits are those of the lanes before it.
    lane, own = cuda.laneid, np.int64(0)
    for d in range(8):
        own += histogram[255 - 8 * lane - d]
    upto = own
    for step in (1, 2, 4, 8, 16):
        before = cuda.shfl_up_sync(ALL, upto, step)
        if lane >= step:
            upto += before
    above = upto - own
    if above < left <= upto:
        d = 255 - 8 * lane
        while above + histogram[d] < left:
            above += histogram[d]
            d -= 1
        found[0], found[1] = d, left - above


@cuda.jit(device=True)
def sort_descending(numbers, ids, size):  # type: ignore[no-untyped-def]
    """Sort the first ``size`` pairs, a power of 2, by number descending and id ascending; all threads of a block."""
    half = size // 2
    span = 2
    while span <= size:
        step = span // 2
        while step > 0:
            # The pairs as the last step, or whoever filled them, has left them, to the threads that compare them.
            cuda.syncthreads()
            for pair in range(cuda.threadIdx.x, half, cuda.blockDim.x):
                i = 2 * step * (pair // step) + pair % step
                j = i + step
                before = numbers[j] > numbers[i] or (numbers[j] == numbers[i] and ids[j] < ids[i])
                if before == ((i & span) == 0):
                    numbers[i], numbers[j] = numbers[j], numbers[i]
                    ids[i], ids[j] = ids[j], ids[i]
            step //= 2
        span *= 2
    # The sorted pairs, to all threads.
    cuda.syncthreads()


@functools.cache
def kernel_for(kind: str) -> Any:
    """Return the kernel for logits of a type."""
    load, wide = LOADS[kind], kind == "float64"
    number_of, digits, real = (number64, 8, np.float64) if wide else (number32, 4, np.float32)

    @cuda.jit
    def fill_topk(logits, V, all_numbers, all_ids, log_probs, token_ids):  # type: ignore[no-untyped-def]
        """Fill row ``blockIdx.x``: the K best of its first V; ``all_numbers`` and ``all_ids`` are to sort in."""
        row, t, lane = cuda.blockIdx.x, cuda.threadIdx.x, cuda.laneid
        warp, warps = t // 32, cuda.blockDim.x // 32
        K, size = token_ids.shape[1], all_ids.shape[1]
        tops, totals = cuda.shared.array(MOST_WARPS, np.float64), cuda.shared.array(MOST_WARPS, np.float64)
        histogram, found = cuda.shared.array(256, np.int32), cuda.shared.array(2, np.int64)
        greater_counts, equal_counts = cuda.shared.array(MOST_WARPS, np.int32), cuda.shared.array(MOST_WARPS, np.int32)

        # 1. The greatest logit, and the sum of exponentials.
        top = -np.inf
        for v in range(t, V, cuda.blockDim.x):
            x = np.float64(load(logits[row, v]))
            if x > top:
                top = x
        for step in (16, 8, 4, 2, 1):
            top = max(top, cuda.shfl_xor_sync(ALL, top, step))
        if lane == 0:
            tops[warp] = top
        # Each warp's greatest, to all threads.
        cuda.syncthreads()
        for w in range(warps):
            top = max(top, tops[w])
        usable = -np.inf < top < np.inf  # or +inf, or nothing finite: no distribution
        total = 0.0
        if usable:
            for v in range(t, V, cuda.blockDim.x):
                x = load(logits[row, v])
                if x > -np.inf:
                    total += np.float64(math.exp(real(x - real(top))))
        total = sum_of_lanes(total)
        if lane == 0:
            totals[warp] = total
        # Each warp's sum, to all threads.
        cuda.syncthreads()
        total = 0.0
        for w in range(warps):
            total += totals[w]

        # 2. The K-th greatest: ``prefix`` is its digits so far, ``left`` its place among those that begin with them.
        prefix, left = np.int64(0), np.int64(K)
        for digit_of in range(digits):
            shift = 8 * (digits - 1 - digit_of)
            flip = 128 if digit_of == 0 else 0  # the highest digit has the sign: turned over, it sorts as the others
            for d in range(t, 256, cuda.blockDim.x):
                histogram[d] = 0
            # The empty histogram, to all who count.
            cuda.syncthreads()
            for v in range(t, V, cuda.blockDim.x):
                number = number_of(load(logits[row, v])) >> shift
                if digit_of == 0 or number >> 8 == prefix:
                    cuda.atomic.add(histogram, (number & 255) ^ flip, 1)
            # The counts of all threads, to the first warp.
            cuda.syncthreads()
            if warp == 0:
                find_digit(histogram, left, found)
            # The digit and the place below it, to all threads.
            cuda.syncthreads()
            prefix, left = prefix * 256 + found[0] if digit_of > 0 else found[0] - 128, found[1]

        # 3. All above it, in places 0 … K − left − 1, and ``left`` of those equal to it, each in order of id.
        part = (V + 32 * warps - 1) // (32 * warps) * 32
        first, last = min(warp * part, V), min((warp + 1) * part, V)
        greater, equal = 0, 0
        for v in range(first + lane, last, 32):
            number = number_of(load(logits[row, v]))
            greater += 1 if number > prefix else 0
            equal += 1 if number == prefix else 0
        greater, equal = sum_of_lanes(greater), sum_of_lanes(equal)
        if lane == 0:
            greater_counts[warp], equal_counts[warp] = greater, equal
        # What each warp will find, to the warps behind it.
        cuda.syncthreads()
        greater, equal = 0, 0
        for w in range(warp):
            greater += greater_counts[w]
            equal += equal_counts[w]
        numbers, ids = all_numbers[row], all_ids[row]
        for start in range(first, last, 32):
            v = start + lane
            number = number_of(load(logits[row, v])) if v < last else LEAST
            is_greater, is_equal = v < last and number > prefix, v < last and number == prefix
            greater_lanes, equal_lanes = cuda.ballot_sync(ALL, is_greater), cuda.ballot_sync(ALL, is_equal)
            place = greater + cuda.popc(greater_lanes & cuda.lanemask_lt())
            if is_equal:
                place = equal + cuda.popc(equal_lanes & cuda.lanemask_lt())
                place = K - left + place if place < left else K
            if (is_greater or is_equal) and place < K:
                numbers[place], ids[place] = number, v
            greater += cuda.popc(greater_lanes)
            equal += cuda.popc(equal_lanes)
        for place in range(K + t, size, cuda.blockDim.x):
            numbers[place], ids[place] = LEAST, 0x7FFFFFFF  # behind all

        # 4. In order.
        sort_descending(numbers, ids, size)
        log_z = top + math.log(total) if usable else 0.0
        for k in range(t, K, cuda.blockDim.x):
            token_ids[row, k] = ids[k]
            x = np.float64(load(logits[row, ids[k]]))
            log_probs[row, k] = min(x - log_z, 0.0) if usable and x > -np.inf else -np.inf

    return fill_topk


def topk_log_probs(logits: Any, k: int, *, vocab_size: int | None = None) -> tuple[Any, Any]:
    """By logit descending, then id ascending; log-softmax over all of V. See :func:`ddtree.topk_log_probs`."""
    B, L, width = logits.shape
    rows = B * L
    log_probs, token_ids = empty((rows, k), np.float32), empty((rows, k), np.int32)
    if rows * k > 0:
        size = 1 << (k - 1).bit_length()  # the next power of 2
        scratch = empty((rows, size), np.int64), empty((rows, size), np.int32)
        flat = raw(contiguous(logits)).reshape(rows, width)
        V = width if vocab_size is None else vocab_size
        launch(kernel_for(kind_of(logits)), rows, threads(512), flat, V, *scratch, log_probs, token_ids)
    return log_probs.reshape(B, L, k), token_ids.reshape(B, L, k)
