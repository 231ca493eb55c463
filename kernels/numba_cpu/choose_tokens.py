"""The target's choice after each node, one node a thread: greedy (NumPy's argmax), or by keyed Gumbel noise.

Bit for bit the reference's choices, with less work: noise is bounded, so most tokens are seen to lose without theirs.
The logarithm, the exponential and the generator are those of :mod:`ddtree.reference`, in the same sequence of
operations; they stand in this file since numba's cache notices a change of a kernel's own file alone.
"""

from typing import Any

import numpy as np
from numba import float32, float64, int32, int64, uint64, void
from numpy.typing import NDArray

from ddtree.kernels.numba_cpu.jit import as_array, compiled, in_parallel, inout, native_floats, readonly
from ddtree.reference.choose_tokens import MASS_ONE
from ddtree.reference.philox import MULTIPLIERS, WEYL
from ddtree.reference.portable_math import EXP_COEFFICIENTS, LN2_HIGH, LN2_LOW, LOG_COEFFICIENTS

__all__ = ["choose_tokens"]

MOST_NOISE = 22.9
"""Above the greatest noise that 32 bits give: −log(−log(1 − 2⁻³³)) = 22.873…"""

ROUNDING = 1.0 + 1e-9
"""Room for the roundings of a bound, some 1e-16 each."""

LEAST_MASS = -28.0
"""Below this (of logit − greatest, over the temperature), exp(z) · 2⁴⁰ is 0.76 at most, and its floor 0."""

L1, L2, L3, L4, L5, L6, L7 = LOG_COEFFICIENTS
E1, E2, E3, E4, E5 = EXP_COEFFICIENTS
HALF, LOW = np.uint64(32), np.uint64(0xFFFFFFFF)
M0, M1 = MULTIPLIERS
W0, W1 = np.uint64(WEYL[0]), np.uint64(WEYL[1])
EXPONENT, MANTISSA = 0x7FF, (1 << 52) - 1


@compiled(float64(float64))
def portable_log(x):  # type: ignore[no-untyped-def]
    """The logarithm of a positive, finite, normal x."""
    bits = np.float64(x).view(np.int64)
    exponent = ((bits >> 52) & EXPONENT) - 1022
    mantissa = np.int64((bits & MANTISSA) | (1022 << 52)).view(np.float64)  # in [0.5, 1)
    if mantissa < 0.7071067811865476:
        mantissa, exponent = 2.0 * mantissa, exponent - 1
    k = np.float64(exponent)
    f = mantissa - 1.0
    s = f / (2.0 + f)
    z = s * s
    r = ((((((L7 * z + L6) * z + L5) * z + L4) * z + L3) * z + L2) * z + L1) * z
    half = 0.5 * f * f
    return k * LN2_HIGH - ((half - (s * (half + r) + k * LN2_LOW)) - f)


@compiled(float64(float64))
def portable_exp(x):  # type: ignore[no-untyped-def]
    """The exponential of x between −708 and 0."""
    k = np.rint(x * 1.44269504088896338700)
    high = x - k * LN2_HIGH
    low = k * LN2_LOW
    r = high - low
    z = r * r
    c = r - ((((E5 * z + E4) * z + E3) * z + E2) * z + E1) * z
    y = 1.0 - ((low - (r * c) / (2.0 - c)) - high)
    return y * np.int64((np.int64(k) + 1023) << 52).view(np.float64)


@compiled(void(uint64, uint64, uint64, uint64, uint64, inout(float64, 1)))
def fill_uniforms(block, position, request_id, key0, key1, uniforms):  # type: ignore[no-untyped-def]
    """The uniform numbers, inside (0, 1), of four tokens: the words of counter (block, position, request id)."""
    c0, c1, c2, c3 = block, position, request_id & LOW, request_id >> HALF
    for _ in range(10):
        p0, p1 = M0 * c0, M1 * c2
        c0, c1, c2, c3 = (p1 >> HALF) ^ c1 ^ key0, p1 & LOW, (p0 >> HALF) ^ c3 ^ key1, p0 & LOW
        key0, key1 = (key0 + W0) & LOW, (key1 + W1) & LOW
    uniforms[0] = (np.float64(c0) + 0.5) * 2.0**-32
    uniforms[1] = (np.float64(c1) + 0.5) * 2.0**-32
    uniforms[2] = (np.float64(c2) + 0.5) * 2.0**-32
    uniforms[3] = (np.float64(c3) + 0.5) * 2.0**-32


@compiled(int64(inout(float64, 1), uint64, uint64, uint64, uint64))
def noisiest(z, position, request_id, key0, key1):  # type: ignore[no-untyped-def]
    """The first token of greatest z plus Gumbel noise, −log(−log(u)) of a uniform u of its own.

    Noise is the greater part of the work, and a token mostly shows sooner that it cannot win: no noise is above
    ``MOST_NOISE``, and since −log(u) >= 1 − u, its score is at most z − log(1 − u), which is above ``best`` only if
    1 − u is below exp(z − best).
    """
    uniforms = np.empty(4, np.float64)
    best, token = -np.inf, 0
    block = -1  # whose uniform numbers these are
    for v in range(len(z)):
        if z[v] == -np.inf or z[v] < best - MOST_NOISE:
            continue
        if v >> 2 != block:
            block = v >> 2
            fill_uniforms(np.uint64(block), position, request_id, key0, key1, uniforms)
        u = uniforms[v & 3]
        behind = best - z[v]
        if behind > 0.0 and 1.0 - u > ROUNDING * portable_exp(-behind):
            continue
        noisy = z[v] - portable_log(-portable_log(u))
        if noisy > best:
            best, token = noisy, v
    return token


@compiled(void(inout(float64, 1), float64, inout(float64, 1), inout(int64, 1)))
def cut_to_nucleus(z, top_p, values, masses):  # type: ignore[no-untyped-def]
    """Set to −inf whatever top-p drops: less than ``top_p`` of the mass lies before a kept token, likeliest first.

    Where the nucleus ends is found by partitions, as a quickselect finds a median: the last value that is kept, and
    how much mass is left for those that are equal to it, which are kept in order of id. Masses are integers, so no
    order of adding changes them. ``values`` and ``masses`` are scratch of the row's length.
    """
    n, total = 0, 0
    for x in z:
        if x > LEAST_MASS:
            values[n] = x
            masses[n] = np.int64(np.floor(portable_exp(x) * MASS_ONE))
            total += masses[n]
            n += 1
    left = np.int64(np.ceil(top_p * np.float64(total)))  # mass of the nucleus, before what has been passed
    if left > total:
        return  # rounding: nothing is dropped
    first, last = 0, n  # the last kept value is among these
    threshold = np.inf
    while first < last:
        threshold = values[(first + last) // 2]
        # values greater than the threshold, then equal ones, then lesser ones
        greater, i, end = first, first, last
        mass_greater, mass_equal = 0, 0
        while i < end:
            x, mass = values[i], masses[i]
            if x > threshold:
                mass_greater += mass
                values[i], masses[i] = values[greater], masses[greater]
                values[greater], masses[greater] = x, mass
                greater += 1
                i += 1
            elif x == threshold:
                mass_equal += mass
                i += 1
            else:
                end -= 1
                values[i], masses[i] = values[end], masses[end]
                values[end], masses[end] = x, mass
        if mass_greater >= left:
            last = greater
        elif mass_greater + mass_equal >= left:
            left -= mass_greater
            break
        else:
            left -= mass_greater + mass_equal
            first = end
    for v in range(len(z)):
        if z[v] == threshold and left > 0:
            left -= np.int64(np.floor(portable_exp(threshold) * MASS_ONE))
        elif z[v] <= threshold:
            z[v] = -np.inf


@compiled(
    *(
        void(
            readonly(t, 2),  # logits (rows, V)
            readonly(float64, 1),  # the greatest of each row
            float64,
            float64,
            uint64,
            uint64,
            readonly(int64, 1),  # request_ids (rows,)
            readonly(int32, 1),  # positions (rows,)
            inout(int32, 1),  # chosen (rows,)
        )
        for t in (float32, float64)
    )
)
def sample(logits, tops, temperature, top_p, key0, key1, request_ids, positions, chosen):  # type: ignore[no-untyped-def]
    """Put a sampled token in the place of the likeliest one; rows without a choice, −1, stay."""
    rows, V = logits.shape
    z, values, masses = np.empty(V, np.float64), np.empty(V, np.float64), np.empty(V, np.int64)
    for row in range(rows):
        if chosen[row] < 0:
            continue
        for v in range(V):
            # at most 0, so that no small temperature overflows
            z[v] = (np.float64(logits[row, v]) - tops[row]) / temperature
        if top_p < 1.0:
            cut_to_nucleus(z, top_p, values, masses)
        position, request_id = np.uint64(positions[row]) & LOW, np.uint64(request_ids[row])
        chosen[row] = noisiest(z, position, request_id, key0, key1)


def choose_tokens(
    logits: NDArray[Any],
    *,
    temperature: float = 0.0,
    top_p: float = 1.0,
    seed: int = 0,
    request_ids: NDArray[np.int64] | None = None,
    positions: NDArray[np.int32] | None = None,
) -> NDArray[np.int32]:
    """Argmax of the logits, or of logits / temperature plus keyed noise. See :func:`ddtree.choose_tokens`."""
    B, N, V = logits.shape
    chosen = np.full(B * N, -1, np.int32)
    if V == 0:
        return chosen.reshape(B, N)
    rows = logits.reshape(B * N, V)
    ids = np.repeat(np.arange(B) if request_ids is None else as_array(request_ids, np.int64), N)
    places = np.zeros(B * N, np.int32) if positions is None else as_array(positions, np.int32).reshape(B * N)

    def work(start: int, stop: int) -> None:
        part = slice(start, stop)
        values = native_floats(rows[part])
        likeliest = values.argmax(-1)  # the first of equals, or of NaNs if there are any
        tops = np.take_along_axis(values, likeliest[:, None], -1)[:, 0].astype(np.float64)
        usable = np.isfinite(tops)  # or NaN, +inf, or nothing finite: no choice
        chosen[part][usable] = likeliest[usable]
        if temperature > 0:
            keys = seed & 0xFFFFFFFF, seed >> 32 & 0xFFFFFFFF
            sample(values, tops, float(temperature), float(top_p), *keys, ids[part], places[part], chosen[part])

    in_parallel(work, B * N, grain=max(1, 65536 // V))
    return chosen.reshape(B, N)
