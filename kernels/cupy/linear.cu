// y = x W^T for few rows of x, and the first half of a gated layer, silu(x G^T) * (x U^T), in one launch each.
//
// A block, or a cluster of SPLIT blocks that share the columns, has a tile of tokens and outputs (see skinny.cuh).
// Neighbours in the grid have the same outputs, so that W comes from memory once however many tokens there are.
//
// Version 1 gave every tile 64 rows of W, and up to 64 tokens: 65 took two tiles, and each read as much of x as of W.
// Version 2, this one, has 128 rows beside up to 72 tokens: for 65 and the output layer of 163,840 rows of 7168,
// 834 for 1,416 us on an H200, where one token takes 536.
//
//   x        (M, stride)  of which D columns are used
//   weights  (O, D); of `gated`, (2 O, D): gate's rows, then up's
//   y        (M, O)       written in full
#include "skinny.cuh"

template <bool GATED, typename T> struct Store {
    T* y;
    int32 first, outputs;

    __device__ void operator()(int32 token, int32 output, Wide<T> sum, Wide<T> other) const
    {
        y[int64(first + token) * outputs + output] = rounded<T>(GATED ? silu(sum) * other : sum);
    }
};

template <int32 TOKENS, int32 SPLIT, bool GATED, typename T>
__device__ __forceinline__ void tile_by_mma(
    const T* __restrict__ x, const T* __restrict__ weights, T* __restrict__ y, int32 M, int32 D, int32 O, int64 stride)
{
    const int32 first = blockIdx.x / SPLIT * TOKENS;
    const auto input = [&](int32 t) { return x + (first + t) * stride; };
    const int32 tokens = min(TOKENS, M - first);
    multiply_by_mma<TOKENS, SPLIT, GATED>(weights, O, D, tokens, blockIdx.y, input, Store<GATED, T>{y, first, O});
}

template <bool GATED, typename T>
__device__ __forceinline__ void tile_by_lanes(
    const T* __restrict__ x, const T* __restrict__ weights, T* __restrict__ y, int32 M, int32 D, int32 O, int64 stride)
{
    const int32 first = blockIdx.x * DOT_TOKENS;
    const auto input = [&](int32 t) { return x + (first + t) * stride; };
    const int32 tokens = min(DOT_TOKENS, M - first);
    multiply_by_lanes<GATED>(weights, O, D, tokens, blockIdx.y, input, Store<GATED, T>{y, first, O});
}

#define BY_MMA(name, T, TOKENS, SPLIT, GATED)                                                                      \
    extern "C" __global__ void __cluster_dims__(SPLIT, 1, 1) __launch_bounds__(MMA_THREADS)                        \
        name(const T* x, const T* weights, T* y, int32 M, int32 D, int32 O, int64 stride)                          \
    {                                                                                                              \
        tile_by_mma<TOKENS, SPLIT, GATED>(x, weights, y, M, D, O, stride);                                         \
    }

#define BY_LANES(name, T, GATED)                                                                                   \
    extern "C" __global__ void __launch_bounds__(DOT_THREADS)                                                      \
        name(const T* x, const T* weights, T* y, int32 M, int32 D, int32 O, int64 stride)                          \
    {                                                                                                              \
        tile_by_lanes<GATED>(x, weights, y, M, D, O, stride);                                                      \
    }

#define OF_TYPE(suffix, T)                                                                                         \
    BY_LANES(linear_##suffix, T, false)                                                                            \
    BY_LANES(gated_##suffix, T, true)

OF_TYPE(f16, __half)
OF_TYPE(bf16, __nv_bfloat16)
OF_TYPE(f32, float)
OF_TYPE(f64, double)

DDTREE_SHARED(linear_8_by_4_f16, mma_bytes(8));
BY_MMA(linear_8_by_4_f16, __half, 8, 4, false)
DDTREE_SHARED(linear_8_by_4_bf16, mma_bytes(8));
BY_MMA(linear_8_by_4_bf16, __nv_bfloat16, 8, 4, false)
DDTREE_SHARED(linear_8_by_8_f16, mma_bytes(8));
BY_MMA(linear_8_by_8_f16, __half, 8, 8, false)
DDTREE_SHARED(linear_8_by_8_bf16, mma_bytes(8));
BY_MMA(linear_8_by_8_bf16, __nv_bfloat16, 8, 8, false)
DDTREE_SHARED(linear_16_by_4_f16, mma_bytes(16));
BY_MMA(linear_16_by_4_f16, __half, 16, 4, false)
DDTREE_SHARED(linear_16_by_4_bf16, mma_bytes(16));
BY_MMA(linear_16_by_4_bf16, __nv_bfloat16, 16, 4, false)
DDTREE_SHARED(linear_16_by_8_f16, mma_bytes(16));
BY_MMA(linear_16_by_8_f16, __half, 16, 8, false)
DDTREE_SHARED(linear_16_by_8_bf16, mma_bytes(16));
BY_MMA(linear_16_by_8_bf16, __nv_bfloat16, 16, 8, false)
DDTREE_SHARED(linear_32_by_4_f16, mma_bytes(32));
BY_MMA(linear_32_by_4_f16, __half, 32, 4, false)
DDTREE_SHARED(linear_32_by_4_bf16, mma_bytes(32));
BY_MMA(linear_32_by_4_bf16, __nv_bfloat16, 32, 4, false)
DDTREE_SHARED(linear_32_by_8_f16, mma_bytes(32));
BY_MMA(linear_32_by_8_f16, __half, 32, 8, false)
DDTREE_SHARED(linear_32_by_8_bf16, mma_bytes(32));
BY_MMA(linear_32_by_8_bf16, __nv_bfloat16, 32, 8, false)
DDTREE_SHARED(linear_72_by_4_f16, mma_bytes(72));
BY_MMA(linear_72_by_4_f16, __half, 72, 4, false)
DDTREE_SHARED(linear_72_by_4_bf16, mma_bytes(72));
BY_MMA(linear_72_by_4_bf16, __nv_bfloat16, 72, 4, false)
DDTREE_SHARED(linear_72_by_8_f16, mma_bytes(72));
BY_MMA(linear_72_by_8_f16, __half, 72, 8, false)
DDTREE_SHARED(linear_72_by_8_bf16, mma_bytes(72));
BY_MMA(linear_72_by_8_bf16, __nv_bfloat16, 72, 8, false)
DDTREE_SHARED(gated_8_by_4_f16, mma_bytes(8));
BY_MMA(gated_8_by_4_f16, __half, 8, 4, true)
DDTREE_SHARED(gated_8_by_4_bf16, mma_bytes(8));
BY_MMA(gated_8_by_4_bf16, __nv_bfloat16, 8, 4, true)
DDTREE_SHARED(gated_8_by_8_f16, mma_bytes(8));
BY_MMA(gated_8_by_8_f16, __half, 8, 8, true)
DDTREE_SHARED(gated_8_by_8_bf16, mma_bytes(8));
BY_MMA(gated_8_by_8_bf16, __nv_bfloat16, 8, 8, true)
DDTREE_SHARED(gated_16_by_4_f16, mma_bytes(16));
BY_MMA(gated_16_by_4_f16, __half, 16, 4, true)
DDTREE_SHARED(gated_16_by_4_bf16, mma_bytes(16));
BY_MMA(gated_16_by_4_bf16, __nv_bfloat16, 16, 4, true)
DDTREE_SHARED(gated_16_by_8_f16, mma_bytes(16));
BY_MMA(gated_16_by_8_f16, __half, 16, 8, true)
DDTREE_SHARED(gated_16_by_8_bf16, mma_bytes(16));
BY_MMA(gated_16_by_8_bf16, __nv_bfloat16, 16, 8, true)
DDTREE_SHARED(gated_32_by_4_f16, mma_bytes(32));
BY_MMA(gated_32_by_4_f16, __half, 32, 4, true)
DDTREE_SHARED(gated_32_by_4_bf16, mma_bytes(32));
BY_MMA(gated_32_by_4_bf16, __nv_bfloat16, 32, 4, true)
DDTREE_SHARED(gated_32_by_8_f16, mma_bytes(32));
BY_MMA(gated_32_by_8_f16, __half, 32, 8, true)
DDTREE_SHARED(gated_32_by_8_bf16, mma_bytes(32));
BY_MMA(gated_32_by_8_bf16, __nv_bfloat16, 32, 8, true)
DDTREE_SHARED(gated_72_by_4_f16, mma_bytes(72));
BY_MMA(gated_72_by_4_f16, __half, 72, 4, true)
DDTREE_SHARED(gated_72_by_4_bf16, mma_bytes(72));
BY_MMA(gated_72_by_4_bf16, __nv_bfloat16, 72, 4, true)
DDTREE_SHARED(gated_72_by_8_f16, mma_bytes(72));
BY_MMA(gated_72_by_8_f16, __half, 72, 8, true)
DDTREE_SHARED(gated_72_by_8_bf16, mma_bytes(72));
BY_MMA(gated_72_by_8_bf16, __nv_bfloat16, 72, 8, true)
