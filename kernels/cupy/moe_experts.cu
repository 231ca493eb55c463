// The routed experts of a few tokens: for each the weighted sum of its experts' gated layers.
//
// Four launches. `plan` groups the M * K pairs of token and expert by expert, in tiles of at most `tile_tokens` pairs
// of one expert, so that an expert's weights are read once for all of its tokens and idle experts not at all; grids of
// the next two have room for the most tiles that there can be, and blocks without one end. `gated` and `down` are the
// products (see skinny.cuh), a pair a row; `combine` adds up each token's pairs in the order of its experts, whatever
// the order that they were grouped in.
//
//   x           (M, D)
//   expert_ids  int32 (M, K)
//   weights     (M, K)
//   gate_up     (E, 2 I, D)    gate's rows, then up's
//   down        (E, D, I)
//   pairs       int32 (M K)    pairs m * K + k, by expert
//   tiles       int32 (T, 3)   expert, first of `pairs`, how many: 0 where there is no tile
//   hidden      (M K, I)       by place in `pairs`
//   outputs     (M K, D)       by pair, float32 (of float64, float64)
//   y           (M, D)         written in full
#include "skinny.cuh"

constexpr int32 PLAN_THREADS = 1024, MOST_EXPERTS = 4096;  // `moe_experts.py` says it too
constexpr int32 COMBINE_THREADS = 256;

// The sums of `x` over the threads before this one; and of all, in `total`.
__device__ __forceinline__ int32 sum_before(int32 x, int32* warp_sums, int32& total)
{
    const int32 lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    int32 upto = x;
#pragma unroll
    for (int32 step = 1; step < 32; step *= 2) {
        const int32 before = __shfl_up_sync(ALL_LANES, upto, step);
        if (lane >= step) upto += before;
    }
    // All threads are through with the sums of the last call.
    __syncthreads();
    if (lane == 31) warp_sums[warp] = upto;
    // Each warp's sum, to all threads.
    __syncthreads();
    int32 before = 0;
    total = 0;
#pragma unroll 1
    for (int32 w = 0; w < PLAN_THREADS / 32; ++w) {
        if (w < warp) before += warp_sums[w];
        total += warp_sums[w];
    }
    return before + upto - x;
}

extern "C" __global__ void __launch_bounds__(PLAN_THREADS) plan(
    const int32* __restrict__ expert_ids, int32* __restrict__ pairs, int32* __restrict__ tiles, int32 num_pairs,
    int32 E, int32 tile_tokens, int32 num_tiles)
{
    __shared__ int32 counts[MOST_EXPERTS], places[MOST_EXPERTS], warp_sums[PLAN_THREADS / 32];
    for (int32 e = threadIdx.x; e < E; e += PLAN_THREADS) counts[e] = 0;
    // Cleared counts, to all threads.
    __syncthreads();
    for (int32 p = threadIdx.x; p < num_pairs; p += PLAN_THREADS) atomicAdd(&counts[expert_ids[p]], 1);
    // How many pairs each expert has, to all threads.
    __syncthreads();
    int32 first_pair = 0, first_tile = 0;
    for (int32 start = 0; start < E; start += PLAN_THREADS) {
        const int32 e = start + threadIdx.x, count = e < E ? counts[e] : 0;
        const int32 own_tiles = (count + tile_tokens - 1) / tile_tokens;
        int32 more_pairs, more_tiles;
        const int32 pair = first_pair + sum_before(count, warp_sums, more_pairs);
        const int32 tile = first_tile + sum_before(own_tiles, warp_sums, more_tiles);
        if (e < E) places[e] = pair;
        for (int32 i = 0; i < own_tiles; ++i) {
            tiles[3 * (tile + i)] = e;
            tiles[3 * (tile + i) + 1] = pair + i * tile_tokens;
            tiles[3 * (tile + i) + 2] = min(tile_tokens, count - i * tile_tokens);
        }
        first_pair += more_pairs;
        first_tile += more_tiles;
    }
    for (int32 tile = first_tile + threadIdx.x; tile < num_tiles; tile += PLAN_THREADS) tiles[3 * tile + 2] = 0;
    // Where each expert's pairs begin, to all threads.
    __syncthreads();
    for (int32 p = threadIdx.x; p < num_pairs; p += PLAN_THREADS) pairs[atomicAdd(&places[expert_ids[p]], 1)] = p;
}

template <typename T> struct StoreHidden {
    T* hidden;  // of the tile's first pair
    int32 width;

    __device__ void operator()(int32 token, int32 output, Wide<T> gate, Wide<T> up) const
    {
        hidden[int64(token) * width + output] = rounded<T>(silu(gate) * up);
    }
};

template <typename T> struct StoreOutput {
    Wide<T>* outputs;
    const int32* pairs;  // from the tile's first one on
    int32 width;

    __device__ void operator()(int32 token, int32 output, Wide<T> sum, Wide<T>) const
    {
        outputs[int64(pairs[token]) * width + output] = sum;
    }
};

// A tile of TOKENS pairs by tensor cores; of 0, of DOT_TOKENS by lanes.
template <int32 TOKENS, typename T>
__device__ __forceinline__ void gated_tile(
    const T* __restrict__ x, const T* __restrict__ gate_up, const int32* __restrict__ pairs,
    const int32* __restrict__ tiles, T* __restrict__ hidden, int32 K, int32 D, int32 I)
{
    const int32 expert = tiles[3 * blockIdx.x], first = tiles[3 * blockIdx.x + 1], count = tiles[3 * blockIdx.x + 2];
    if (count == 0) return;
    const T* weights = gate_up + int64(expert) * 2 * I * D;
    const auto input = [&](int32 t) { return x + int64(pairs[first + t] / K) * D; };
    const StoreHidden<T> store{hidden + int64(first) * I, I};
    if constexpr (TOKENS > 0)
        multiply_by_mma<TOKENS, 1, true>(weights, I, D, count, blockIdx.y, input, store);
    else
        multiply_by_lanes<true>(weights, I, D, count, blockIdx.y, input, store);
}

template <int32 TOKENS, typename T>
__device__ __forceinline__ void down_tile(
    const T* __restrict__ hidden, const T* __restrict__ down, const int32* __restrict__ pairs,
    const int32* __restrict__ tiles, Wide<T>* __restrict__ outputs, int32 D, int32 I)
{
    const int32 expert = tiles[3 * blockIdx.x], first = tiles[3 * blockIdx.x + 1], count = tiles[3 * blockIdx.x + 2];
    if (count == 0) return;
    const T* weights = down + int64(expert) * D * I;
    const auto input = [&](int32 t) { return hidden + int64(first + t) * I; };
    const StoreOutput<T> store{outputs, pairs + first, D};
    if constexpr (TOKENS > 0)
        multiply_by_mma<TOKENS, 1, false>(weights, D, I, count, blockIdx.y, input, store);
    else
        multiply_by_lanes<false>(weights, D, I, count, blockIdx.y, input, store);
}

template <typename T>
__device__ __forceinline__ void combine(
    const Wide<T>* __restrict__ outputs, const T* __restrict__ weights, T* __restrict__ y, int32 K, int32 D)
{
    const int32 d = blockIdx.y * COMBINE_THREADS + threadIdx.x;
    if (d >= D) return;
    const int64 m = blockIdx.x;
    Wide<T> sum = 0;
#pragma unroll 8
    for (int32 k = 0; k < K; ++k) sum += load(weights + m * K + k) * outputs[(m * K + k) * D + d];
    y[m * D + d] = rounded<T>(sum);
}

#define GATED(name, T, THREADS, TOKENS)                                                                            \
    extern "C" __global__ void __launch_bounds__(THREADS)                                                          \
        name(const T* x, const T* gate_up, const int32* pairs, const int32* tiles, T* hidden, int32 K, int32 D,    \
             int32 I)                                                                                              \
    {                                                                                                              \
        gated_tile<TOKENS>(x, gate_up, pairs, tiles, hidden, K, D, I);                                             \
    }

#define DOWN(name, T, THREADS, TOKENS)                                                                             \
    extern "C" __global__ void __launch_bounds__(THREADS)                                                          \
        name(const T* hidden, const T* down, const int32* pairs, const int32* tiles, Wide<T>* outputs, int32 D,    \
             int32 I)                                                                                              \
    {                                                                                                              \
        down_tile<TOKENS>(hidden, down, pairs, tiles, outputs, D, I);                                              \
    }

#define COMBINE(name, T)                                                                                           \
    extern "C" __global__ void __launch_bounds__(COMBINE_THREADS)                                                  \
        name(const Wide<T>* outputs, const T* weights, T* y, int32 K, int32 D)                                     \
    {                                                                                                              \
        combine<T>(outputs, weights, y, K, D);                                                                     \
    }

#define BY_LANES(suffix, T)                                                                                        \
    GATED(gated_##suffix, T, DOT_THREADS, 0)                                                                       \
    DOWN(down_##suffix, T, DOT_THREADS, 0)                                                                         \
    COMBINE(combine_##suffix, T)

BY_LANES(f16, __half)
BY_LANES(bf16, __nv_bfloat16)
BY_LANES(f32, float)
BY_LANES(f64, double)
DDTREE_SHARED(gated_16_f16, mma_bytes(16));
GATED(gated_16_f16, __half, MMA_THREADS, 16)
DDTREE_SHARED(gated_16_bf16, mma_bytes(16));
GATED(gated_16_bf16, __nv_bfloat16, MMA_THREADS, 16)
DDTREE_SHARED(gated_48_f16, mma_bytes(48));
GATED(gated_48_f16, __half, MMA_THREADS, 48)
DDTREE_SHARED(gated_48_bf16, mma_bytes(48));
GATED(gated_48_bf16, __nv_bfloat16, MMA_THREADS, 48)
DDTREE_SHARED(down_16_f16, mma_bytes(16));
DOWN(down_16_f16, __half, MMA_THREADS, 16)
DDTREE_SHARED(down_16_bf16, mma_bytes(16));
DOWN(down_16_bf16, __nv_bfloat16, MMA_THREADS, 16)
DDTREE_SHARED(down_48_f16, mma_bytes(48));
DOWN(down_48_f16, __half, MMA_THREADS, 48)
DDTREE_SHARED(down_48_bf16, mma_bytes(48));
DOWN(down_48_bf16, __nv_bfloat16, MMA_THREADS, 48)
