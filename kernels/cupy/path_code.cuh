// Scores and rank paths of draft trees as words that sort as they do.
//
// A score is 0 or less, and the bits of its absolute value are its key: less for a higher score. Rounding is symmetric,
// so keys are added up from absolute values and give the contract's sums bit for bit.
//
// A path's code is the codes of its ranks one after the other from the highest of 64 bits, zeros behind. A rank r has
// the code of r + 1 in b ones, a zero, and its b bits below the leading one (b = floor(log2(r + 1))): codes of larger
// ranks are larger, none is a prefix of another, and rank 0 is a single zero bit. So of two paths that fit, the one of
// the lesser code comes first, and equal codes are those of a path and of its continuation by zeros.
#pragma once

#include "common.cuh"

constexpr uint64 NOT_DRAFTED = 0x7FF0000000000000ull;  // the key of -inf; a key from here on is no path
constexpr int32 CODE_BITS = 64;

// CuPy compiles with -ftz=true, by which float32 operations take subnormal numbers for 0; this does not.
__device__ __forceinline__ double widened(float x)
{
    double y;
    asm("cvt.f64.f32 %0, %1;" : "=d"(y) : "f"(x));
    return y;
}

__device__ __forceinline__ uint64 key_after(uint64 parent_key, float cost)
{
    return __double_as_longlong(__longlong_as_double(parent_key) + widened(cost));
}

// From +0.0, as a sum would give it.
__device__ __forceinline__ double score_of(uint64 key) { return 0.0 - __longlong_as_double(key); }

// What a candidate takes off a score: +inf where nothing is drafted, which a NaN says as well.
__device__ __forceinline__ float cost_of(float log_prob)
{
    const int32 bits = __float_as_int(log_prob) & 0x7FFFFFFF;  // the absolute value, subnormal or not
    return __int_as_float(log_prob > minus_infinity() ? bits : 0x7F800000);
}

__device__ __forceinline__ int32 rank_bits(uint32 rank) { return 2 * (31 - __clz(rank + 1)) + 1; }

// The code of a path of code `code`, `bits` long, with `rank` behind it; what does not fit is cut off.
__device__ __forceinline__ uint64 with_rank(uint64 code, int32 bits, uint32 rank)
{
    if (bits >= CODE_BITS) return code;
    const int32 b = 31 - __clz(rank + 1);
    const uint64 own = (((1ull << b) - 1) << (b + 1)) | (rank + 1 - (1u << b));
    return code | ((own << (CODE_BITS - 1 - 2 * b)) >> bits);
}
