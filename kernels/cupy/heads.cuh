// A head's row, normalised and rotated to its position.
#pragma once

#include "floats.cuh"
#include "turn.cuh"

// Cosines and sines (rows, pairs) of rows from position `first` on, by `threads` of which this is `t`.
template <typename X>
__device__ __forceinline__ void turn_rows(
    int64 first, int32 rows, const double* frequencies, int32 pairs, X* cosines, X* sines, int32 t, int32 threads)
{
    for (int32 i = t; i < rows * pairs; i += threads) {
        double cosine, sine;
        turn(double(first + i / pairs) * frequencies[i % pairs], cosine, sine);
        cosines[i] = X(cosine);
        sines[i] = X(sine);
    }
}

template <typename X> __device__ __forceinline__ X warp_sum(X x)
{
#pragma unroll
    for (int32 step = 16; step > 0; step /= 2) x += __shfl_xor_sync(ALL_LANES, x, step);
    return x;
}

// By one warp: a head of 2 `pairs` elements, normalised by `gain` and rotated, pair p being elements p and pairs + p;
// its elements go `stride` apart.
template <typename T, typename To>
__device__ __forceinline__ void place_head(
    const T* head, const T* gain, double eps, int32 pairs, const Wide<T>* cosines, const Wide<T>* sines, int32 lane,
    To* to, int64 stride)
{
    Wide<T> squares = 0;
    for (int32 e = lane; e < 2 * pairs; e += 32) squares += load(head + e) * load(head + e);
    const Wide<T> scale = scale_of(warp_sum(squares), 2 * pairs, eps);
    for (int32 p = lane; p < pairs; p += 32) {
        const Wide<T> x = load(head + p) * scale * load(gain + p);
        const Wide<T> y = load(head + pairs + p) * scale * load(gain + pairs + p);
        to[p * stride] = rounded<To>(x * cosines[p] - y * sines[p]);
        to[(pairs + p) * stride] = rounded<To>(y * cosines[p] + x * sines[p]);
    }
}
