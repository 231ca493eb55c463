// Root-mean-square normalisation: each row of x divided by the root of its mean square + eps, times a weight a column.
//
// One block a row, which it reads twice: the second time from L1.
//
//   x        (rows, stride)  of which D columns are used
//   weight   (D)
//   y        (rows, D)       written in full
#include "floats.cuh"

constexpr int32 THREADS = 256;

__device__ __forceinline__ float root(float x) { return sqrtf(x); }
__device__ __forceinline__ double root(double x) { return sqrt(x); }

template <typename T>
__device__ __forceinline__ void normalise(
    const T* __restrict__ x, const T* __restrict__ weight, T* __restrict__ y, int32 D, int64 stride, double eps)
{
    __shared__ Wide<T> sums[THREADS / 32];
    const T* row = x + blockIdx.x * stride;
    T* out = y + int64(blockIdx.x) * D;
    Wide<T> sum = 0;
#pragma unroll 4
    for (int32 k = threadIdx.x; k < D; k += THREADS) {
        const Wide<T> value = load(row + k);
        sum += value * value;
    }
#pragma unroll
    for (int32 step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(ALL_LANES, sum, step);
    if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = sum;
    // Each warp's sum, to all threads, which add them up in the same order.
    __syncthreads();
    sum = 0;
#pragma unroll
    for (int32 w = 0; w < THREADS / 32; ++w) sum += sums[w];
    const Wide<T> scale = 1 / root(sum / D + Wide<T>(eps));
#pragma unroll 4
    for (int32 k = threadIdx.x; k < D; k += THREADS) out[k] = rounded<T>(load(row + k) * scale * load(weight + k));
}

#define NORMALISE(name, T)                                                                                         \
    extern "C" __global__ void __launch_bounds__(THREADS)                                                          \
        name(const T* x, const T* weight, T* y, int32 D, int64 stride, double eps)                                 \
    {                                                                                                              \
        normalise(x, weight, y, D, stride, eps);                                                                   \
    }

NORMALISE(rms_norm_f16, __half)
NORMALISE(rms_norm_bf16, __nv_bfloat16)
NORMALISE(rms_norm_f32, float)
NORMALISE(rms_norm_f64, double)
