// Root-mean-square normalisation: each row of x divided by the root of its mean square + eps, times a weight a column.
//
// One block a row. Version 1 read it element by element, and a second time to write it. Version 2 has it in registers,
// in chunks of 16 bytes: `rms_norm_...` for rows of up to MOST_CHUNKS of them a thread, of whole chunks at aligned
// addresses; version 1 is what `any_rms_norm_...` is, for all others and for float64.
//
//   x        (rows, stride)  of which D columns are used
//   weight   (D)
//   y        (rows, D)       written in full
#include "floats.cuh"

constexpr int32 THREADS = 256;
constexpr int32 MOST_CHUNKS = 4;  // of 16 bytes a thread; `rms_norm.py` says it too

// The scale of a row from each thread's sum of squares.
template <typename X> __device__ __forceinline__ X scale_of_row(X sum, int32 D, double eps)
{
    __shared__ X sums[THREADS / 32];
#pragma unroll
    for (int32 step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(ALL_LANES, sum, step);
    if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = sum;
    // Each warp's sum, to all threads, which add them up in the same order.
    __syncthreads();
    sum = 0;
#pragma unroll
    for (int32 w = 0; w < THREADS / 32; ++w) sum += sums[w];
    return scale_of(sum, D, eps);
}

template <typename T>
__device__ __forceinline__ void normalise(
    const T* x, const T* __restrict__ weight, T* y, int32 D, int64 stride, double eps)
{
    wait_for_earlier();
    const T* row = x + blockIdx.x * stride;
    T* out = y + int64(blockIdx.x) * D;
    Wide<T> sum = 0;
#pragma unroll 4
    for (int32 k = threadIdx.x; k < D; k += THREADS) {
        const Wide<T> value = load(row + k);
        sum += value * value;
    }
    const Wide<T> scale = scale_of_row(sum, D, eps);
#pragma unroll 4
    for (int32 k = threadIdx.x; k < D; k += THREADS) out[k] = rounded<T>(load(row + k) * scale * load(weight + k));
}

template <typename T> struct alignas(16) Chunk {
    static constexpr int32 SIZE = 16 / sizeof(T);
    T values[SIZE];
};

template <typename T>
__device__ __forceinline__ void normalise_chunks(
    const T* x, const T* __restrict__ weight, T* y, int32 D, int64 stride, double eps)
{
    constexpr int32 SIZE = Chunk<T>::SIZE;
    wait_for_earlier();
    const int32 count = D / SIZE;
    const auto* row = reinterpret_cast<const Chunk<T>*>(x + blockIdx.x * stride);
    auto* out = reinterpret_cast<Chunk<T>*>(y + int64(blockIdx.x) * D);
    Chunk<T> own[MOST_CHUNKS], gain[MOST_CHUNKS];
#pragma unroll
    for (int32 i = 0; i < MOST_CHUNKS; ++i) {
        const int32 c = threadIdx.x + i * THREADS;
        if (c < count) {
            own[i] = row[c];
            gain[i] = reinterpret_cast<const Chunk<T>*>(weight)[c];
        }
    }
    Wide<T> sum = 0;
#pragma unroll
    for (int32 i = 0; i < MOST_CHUNKS; ++i) {
#pragma unroll
        for (int32 j = 0; j < SIZE; ++j)
            if (threadIdx.x + i * THREADS < count) sum += load(&own[i].values[j]) * load(&own[i].values[j]);
    }
    const Wide<T> scale = scale_of_row(sum, D, eps);
#pragma unroll
    for (int32 i = 0; i < MOST_CHUNKS; ++i) {
        const int32 c = threadIdx.x + i * THREADS;
#pragma unroll
        for (int32 j = 0; j < SIZE; ++j)
            own[i].values[j] = rounded<T>(load(&own[i].values[j]) * scale * load(&gain[i].values[j]));
        if (c < count) out[c] = own[i];
    }
}

#define NORMALISE(name, T, function)                                                                               \
    extern "C" __global__ void __launch_bounds__(THREADS)                                                          \
        name(const T* x, const T* weight, T* y, int32 D, int64 stride, double eps)                                 \
    {                                                                                                              \
        function(x, weight, y, D, stride, eps);                                                                    \
    }

NORMALISE(any_rms_norm_f16, __half, normalise)
NORMALISE(any_rms_norm_bf16, __nv_bfloat16, normalise)
NORMALISE(any_rms_norm_f32, float, normalise)
NORMALISE(any_rms_norm_f64, double, normalise)
NORMALISE(rms_norm_f16, __half, normalise_chunks)
NORMALISE(rms_norm_bf16, __nv_bfloat16, normalise_chunks)
NORMALISE(rms_norm_f32, float, normalise_chunks)
