"""The target's choice after each node, one row of logits a block: greedy, or by keyed Gumbel noise.

Bit for bit the reference's choices. Logarithm, exponential and generator are those of :mod:`ddtree.reference`, in the
same sequence of operations. Compilers for GPUs fuse a multiplication and an addition into one operation that rounds
once, which changes last bits, so multiplications here are ``dmul_rn``, which is never fused.

Where a nucleus ends is found as the K-th best of ``topk_log_probs`` is, by radix selection: of masses instead of
counts, and masses are integers, so no order of adding changes them. Of the tokens at its end, the lowest ids are kept:
each warp looks through a contiguous part of the row, so counts of the parts before it tell which are the first ones.
"""

import functools
import math
from typing import Any

import numpy as np

from ddtree.kernels.numba_cuda.jit import (
    ALL,
    LOADS,
    as_array,
    contiguous,
    cuda,
    empty,
    kind_of,
    launch,
    raw,
    threads,
)
from ddtree.kernels.numba_cuda.topk_log_probs import find_digit, number64, sum_of_lanes
from ddtree.reference.choose_tokens import MASS_ONE
from ddtree.reference.philox import MULTIPLIERS, WEYL
from ddtree.reference.portable_math import EXP_COEFFICIENTS, LN2_HIGH, LN2_LOW, LOG_COEFFICIENTS

__all__ = ["choose_tokens"]

MOST_WARPS = 32
MOST_NOISE = 22.9
"""Above the greatest noise that 32 bits give: −log(−log(1 − 2⁻³³)) = 22.873…"""

LEAST_MASS = -28.0
"""Below this (of logit − greatest, over the temperature), exp(z) · 2⁴⁰ is 0.76 at most, and its floor 0."""

SHIFTER = 1.5 * 2.0**52
"""Adding and subtracting it rounds a small float64 to the nearest integer, of two the even one."""

NONE = np.iinfo(np.int64).min
"""Less than the number of any logit."""

L1, L2, L3, L4, L5, L6, L7 = LOG_COEFFICIENTS
E1, E2, E3, E4, E5 = EXP_COEFFICIENTS
HALF, LOW = np.uint64(32), np.uint64(0xFFFFFFFF)
M0, M1 = MULTIPLIERS
W0, W1 = np.uint64(WEYL[0]), np.uint64(WEYL[1])


@cuda.jit(device=True)
def portable_log(x):  # type: ignore[no-untyped-def]
    """The logarithm of a positive, finite, normal x."""
    mul = cuda.libdevice.dmul_rn
    bits = cuda.libdevice.double_as_longlong(x)
    exponent = ((bits >> 52) & 0x7FF) - 1022
    mantissa = cuda.libdevice.longlong_as_double((bits & 0xFFFFFFFFFFFFF) | (1022 << 52))  # in [0.5, 1)
    if mantissa < 0.7071067811865476:
        mantissa, exponent = 2.0 * mantissa, exponent - 1
    k = np.float64(exponent)
    f = mantissa - 1.0
    s = f / (2.0 + f)
    z = mul(s, s)
    r = mul(L7, z)
    r = mul(r + L6, z)
    r = mul(r + L5, z)
    r = mul(r + L4, z)
    r = mul(r + L3, z)
    r = mul(r + L2, z)
    r = mul(r + L1, z)
    half = mul(0.5 * f, f)
    return mul(k, LN2_HIGH) - ((half - (mul(s, half + r) + mul(k, LN2_LOW))) - f)


@cuda.jit(device=True)
def mass_of(z):  # type: ignore[no-untyped-def]
    """The mass of a token: the floor of exp(z) · 2⁴⁰."""
    if not z > LEAST_MASS:
        return np.int64(0)
    mul = cuda.libdevice.dmul_rn
    k = cuda.libdevice.dadd_rn(mul(z, 1.44269504088896338700), SHIFTER)
    k = cuda.libdevice.dadd_rn(k, -SHIFTER)
    high = z - mul(k, LN2_HIGH)
    low = mul(k, LN2_LOW)
    r = high - low
    rr = mul(r, r)
    c = mul(E5, rr)
    c = mul(c + E4, rr)
    c = mul(c + E3, rr)
    c = mul(c + E2, rr)
    c = mul(c + E1, rr)
    c = r - c
    y = 1.0 - ((low - mul(r, c) / (2.0 - c)) - high)
    power = cuda.libdevice.longlong_as_double((np.int64(k) + 1023) << 52)  # 2 to the k
    return np.int64(mul(mul(y, power), MASS_ONE))


@cuda.jit(device=True)
def noise_of(v, position, request_id, key0, key1):  # type: ignore[no-untyped-def]
    """The Gumbel noise of token ``v``: of word v % 4 of counter (v // 4, position, request id)."""
    c0, c1, c2, c3 = np.uint64(v >> 2), position, request_id & LOW, request_id >> HALF
    for _ in range(10):
        p0, p1 = M0 * c0, M1 * c2
        c0, c1, c2, c3 = (p1 >> HALF) ^ c1 ^ key0, p1 & LOW, (p0 >> HALF) ^ c3 ^ key1, p0 & LOW
        key0, key1 = (key0 + W0) & LOW, (key1 + W1) & LOW
    word = c0
    if v & 3 == 1:
        word = c1
    elif v & 3 == 2:
        word = c2
    elif v & 3 == 3:
        word = c3
    uniform = (np.float64(word) + 0.5) * 2.0**-32  # inside (0, 1), and exact
    return -portable_log(-portable_log(uniform))


@cuda.jit(device=True)
def first_greatest(x, v, values, ids):  # type: ignore[no-untyped-def]
    """The greatest ``x`` of all threads of the block, of equals that of the lowest ``v``; to all threads."""
    for step in (16, 8, 4, 2, 1):
        other_x, other_v = cuda.shfl_xor_sync(ALL, x, step), cuda.shfl_xor_sync(ALL, v, step)
        if other_x > x or (other_x == x and other_v < v):
            x, v = other_x, other_v
    # All threads are through with what the last call has left in both arrays.
    cuda.syncthreads()
    if cuda.laneid == 0:
        values[cuda.threadIdx.x // 32], ids[cuda.threadIdx.x // 32] = x, v
    # Each warp's greatest, to all threads.
    cuda.syncthreads()
    for w in range(cuda.blockDim.x // 32):
        if values[w] > x or (values[w] == x and ids[w] < v):
            x, v = values[w], ids[w]
    return x, v


@functools.cache
def kernel_for(kind: str) -> Any:
    """Return the kernel for logits of a type."""
    load = LOADS[kind]

    @cuda.jit
    def choose(  # type: ignore[no-untyped-def]
        logits, temperature, top_p, key0, key1, request_ids, numbered, positions, chosen
    ):
        """Choose in row ``blockIdx.x`` of (B · N, V); where ``numbered``, a request's id is its index.

        ``request_ids`` (B,) and ``positions`` (B, N) are read in sampling alone.
        """
        row, V = cuda.blockIdx.x, logits.shape[1]
        t, lane, threads_here = cuda.threadIdx.x, cuda.laneid, cuda.blockDim.x
        warp, warps = t // 32, cuda.blockDim.x // 32
        values, ids = cuda.shared.array(MOST_WARPS, np.float64), cuda.shared.array(MOST_WARPS, np.int64)
        histogram, found = cuda.shared.array(256, np.int64), cuda.shared.array(2, np.int64)
        counts = cuda.shared.array(MOST_WARPS, np.int64)

        # The greatest logit; a NaN is taken for +inf, which leaves no choice either.
        top, token = -np.inf, np.int64(V)
        for v in range(t, V, threads_here):
            x = np.float64(load(logits[row, v]))
            if x != x:
                x = np.float64(np.inf)
            if x > top:
                top, token = x, np.int64(v)
        top, token = first_greatest(top, token, values, ids)
        usable = -np.inf < top < np.inf
        if not usable:
            token = np.int64(-1)

        if usable and temperature > 0:  # alike in all threads of the block
            # Kept are all tokens above ``last``, and of those equal to it the first, while less than ``left`` lies
            # before them; without a nucleus, ``last`` is below all.
            last, left = np.int64(NONE), np.int64(0)
            if top_p < 1:
                total = np.int64(0)
                for v in range(t, V, threads_here):
                    total += mass_of((np.float64(load(logits[row, v])) - top) / temperature)
                total = sum_of_lanes(total)
                if lane == 0:
                    counts[warp] = total
                # Each warp's mass, to all threads.
                cuda.syncthreads()
                total = np.int64(0)
                for w in range(warps):
                    total += counts[w]
                left = np.int64(math.ceil(top_p * np.float64(total)))  # of the nucleus, below the digits found
                if left <= total:  # or rounding, and nothing is dropped
                    prefix = np.int64(0)
                    for digit_of in range(8):
                        shift = 8 * (7 - digit_of)
                        flip = 128 if digit_of == 0 else 0  # the highest digit has the sign
                        for d in range(t, 256, threads_here):
                            histogram[d] = 0
                        # The empty histogram, to all who add to it.
                        cuda.syncthreads()
                        for v in range(t, V, threads_here):
                            z = (np.float64(load(logits[row, v])) - top) / temperature
                            mass = mass_of(z)
                            number = number64(z) >> shift
                            if mass > 0 and (digit_of == 0 or number >> 8 == prefix):
                                cuda.atomic.add(histogram, (number & 255) ^ flip, mass)
                        # The masses of all threads, to the first warp.
                        cuda.syncthreads()
                        if warp == 0:
                            find_digit(histogram, left, found)
                        # The digit and the mass left below it, to all threads.
                        cuda.syncthreads()
                        prefix, left = prefix * 256 + found[0] if digit_of > 0 else found[0] - 128, found[1]
                    last = prefix

            part = (V + 32 * warps - 1) // (32 * warps) * 32
            first, end = min(warp * part, V), min((warp + 1) * part, V)
            equal = np.int64(0)
            if last > NONE:
                for v in range(first + lane, end, 32):
                    z = (np.float64(load(logits[row, v])) - top) / temperature
                    equal += 1 if number64(z) == last else 0
                equal = sum_of_lanes(equal)
                if lane == 0:
                    counts[warp] = equal  # where masses stood; all threads have met since they read those
                # How many equal ones each warp has, to the warps behind it.
                cuda.syncthreads()
                equal = np.int64(0)
                for w in range(warp):
                    equal += counts[w]

            best, token = -np.inf, np.int64(V)
            b = row // positions.shape[1]
            position = np.uint64(positions[b, row % positions.shape[1]]) & LOW
            request_id = np.uint64(b) if numbered else np.uint64(request_ids[b])
            for start in range(first, end, 32):
                v = start + lane
                z = (np.float64(load(logits[row, v])) - top) / temperature if v < end else -np.inf
                number = number64(z)
                kept = z > -np.inf and number > last
                if last > NONE:
                    tied = v < end and number == last
                    tied_lanes = cuda.ballot_sync(ALL, tied)
                    if tied:
                        # Less than what is left lies before it: ``before`` tokens of the same mass.
                        before = equal + cuda.popc(tied_lanes & cuda.lanemask_lt())
                        kept = before * mass_of(z) < left
                    equal += cuda.popc(tied_lanes)
                if kept and z >= best - MOST_NOISE:  # or no noise would lift it above the best
                    noisy = z + noise_of(v, position, request_id, key0, key1)
                    if noisy > best:
                        best, token = noisy, np.int64(v)
            best, token = first_greatest(best, token, values, ids)
        if t == 0:
            chosen[row] = token

    return choose


def choose_tokens(
    logits: Any,
    *,
    temperature: float = 0.0,
    top_p: float = 1.0,
    seed: int = 0,
    request_ids: Any = None,
    positions: Any = None,
) -> Any:
    """Argmax of the logits, or of logits / temperature plus keyed noise. See :func:`ddtree.choose_tokens`."""
    B, N, V = logits.shape
    chosen = empty((B * N,), np.int32)
    if V == 0:
        chosen.fill(-1)
    elif chosen.size:
        launch(
            kernel_for(kind_of(logits)),
            B * N,
            threads(512),
            raw(contiguous(logits)).reshape(B * N, V),
            *(np.float64(temperature), np.float64(top_p)),
            *(np.uint64(seed & 0xFFFFFFFF), np.uint64(seed >> 32 & 0xFFFFFFFF)),
            as_array(empty((1,), np.int64) if request_ids is None else request_ids, np.int64),
            request_ids is None,
            as_array(empty((B, N), np.int32) if positions is None else positions, np.int32),
            chosen,
        )
    return chosen.reshape(B, N)
