// What the layers share: the type that each floating type is calculated in, rounding back to it, and their functions.
#pragma once

#include "common.cuh"

template <typename T> struct Calculated { using type = float; };
template <> struct Calculated<double> { using type = double; };
template <typename T> using Wide = typename Calculated<T>::type;

template <typename T, typename X> __device__ __forceinline__ T rounded(X x) { return T(x); }
template <> __device__ __forceinline__ __half rounded<__half, float>(float x) { return __float2half_rn(x); }
template <> __device__ __forceinline__ __nv_bfloat16 rounded<__nv_bfloat16, float>(float x)
{
    return __float2bfloat16_rn(x);
}

// x / (1 + e^-x) without an overflow.
__device__ __forceinline__ float silu(float x)
{
    const float small = expf(-fabsf(x));
    return x * (x < 0 ? small : 1.0f) / (1.0f + small);
}

__device__ __forceinline__ double silu(double x)
{
    const double small = exp(-fabs(x));
    return x * (x < 0 ? small : 1.0) / (1.0 + small);
}

__device__ __forceinline__ float one_over_root(float x) { return rsqrtf(x); }
__device__ __forceinline__ double one_over_root(double x) { return 1 / sqrt(x); }

// What RMS normalisation multiplies a row by, from its sum of squares.
template <typename X> __device__ __forceinline__ X scale_of(X squares, int32 width, double eps)
{
    return one_over_root(squares / width + X(eps));
}
