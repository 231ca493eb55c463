// The routed and shared experts of some tokens: for each the weighted sum of its experts' gated layers.
//
// Three launches: `gated` and `down` are the products (see skinny.cuh), and `combine` adds up each token's pairs of
// token and expert in their order.
//
// Blocks find their work themselves. Grid x is a place for each expert that can have work: where there are fewer pairs
// than experts, one for each pair, which is its expert's if no pair before it has the same. Shared experts follow, with
// all tokens that are not padding. A block looks through the ids for the pairs of its expert, a tile at a time, and
// reads the expert's weights once for them; idle experts are not read at all.
//
// Version 1 made a plan of tiles in a launch of its own.
//
//   x           (M, D)
//   expert_ids  int32 (M, K)   -1 is no expert; a token whose first one is -1 is padding, and the shared are not its
//   weights     (M, K), of the type of sums; a shared expert's is 1
//   gain        (D), with which x is RMS-normalised; or null
//   gate_up     (E, 2 I, D)    gate's rows, then up's; the last `shared` experts are every token's
//   down        (E, D, I)
//   hidden      (M (K + shared), I)   by pair
//   outputs     (M (K + shared), D)   by pair, of the type of sums
//   residual    (M, D), added before y is rounded; or null
//   y           (M, D)         written in full
#include "skinny.cuh"

constexpr int32 COMBINE_THREADS = 256;

struct Experts {
    const int32* ids;
    int32 M, K, routed, shared;

    __device__ int32 a_token() const { return K + shared; }  // pairs

    // The expert of a place of the grid, or -1: to all threads, each of which must call this. Of a shared expert there
    // is a place for each tile, whose candidates are some tokens; a routed one's are all pairs.
    __device__ int32 at(int32 place, int32 tile_tokens, int32& candidate, int32& end) const
    {
        const int32 pairs = M * K, places = min(pairs, routed);
        candidate = 0;
        end = pairs;
        if (place >= places) {
            const int32 tiles = (M + tile_tokens - 1) / tile_tokens;
            candidate = (place - places) % tiles * tile_tokens;
            end = min(candidate + tile_tokens, M);
            return routed + (place - places) / tiles;
        }
        if (pairs >= routed) return place;
        const int32 expert = ids[place];
        bool before = false;
        for (int32 i = threadIdx.x; i < place; i += blockDim.x) before |= ids[i] == expert;
        // Whether another place has this expert, to all threads.
        const bool taken = __syncthreads_or(before);
        return taken || expert < 0 || expert >= routed ? -1 : expert;
    }

    // The expert of a place that can be told without a look at the ids, or -1: of routed ones, where few are idle.
    __device__ int32 likely_at(int32 place, int32 tile_tokens) const
    {
        const int32 pairs = M * K, places = min(pairs, routed), tiles = (M + tile_tokens - 1) / tile_tokens;
        if (place >= places) return routed + (place - places) / tiles;
        return pairs >= 2 * routed ? place : -1;
    }

    // Adds an expert's pairs among the next blockDim.x candidates to the `count` that have been found, in order.
    __device__ int32 find_pairs(int32 expert, int32 candidate, int32 end, int32 count, int32* found) const
    {
        __shared__ int32 of_warps[MMA_PARTS];
        const bool is_routed = expert < routed;
        const int32 lane = threadIdx.x % 32, warp = threadIdx.x / 32, i = candidate + threadIdx.x;
        const bool is_own = i < end && (is_routed ? ids[i] == expert : ids[int64(i) * K] >= 0);
        const uint32 own = __ballot_sync(ALL_LANES, is_own);
        if (lane == 0) of_warps[warp] = __popc(own);
        // Each warp's count, to all threads.
        __syncthreads();
        int32 place = count + __popc(own & ((1u << lane) - 1));
        for (int32 w = 0; w < blockDim.x / 32; ++w) {
            if (w < warp) place += of_warps[w];
            count += of_warps[w];
        }
        if (is_own) found[place] = is_routed ? i / K * a_token() + i % K : i * a_token() + K + expert - routed;
        // The counts are read, and the pairs found, of all threads.
        __syncthreads();
        return count;
    }
};

template <typename T> struct StoreHidden {
    T* hidden;
    const int32* pairs;
    int32 width;

    __device__ void operator()(int32 token, int32 output, Wide<T> gate, Wide<T> up) const
    {
        hidden[int64(pairs[token]) * width + output] = rounded<T>(silu(gate) * up);
    }
};

template <typename T> struct StoreOutput {
    Wide<T>* outputs;
    const int32* pairs;
    int32 width;

    __device__ void operator()(int32 token, int32 output, Wide<T> sum, Wide<T>) const
    {
        outputs[int64(pairs[token]) * width + output] = sum;
    }
};

// A tile of some pairs by the smallest form that holds them. N columns a load; of 0, by tensor cores.
template <int32 TOKENS, int32 ROWS, int32 N, bool PAIRED, typename T, typename Input, typename Store>
__device__ __forceinline__ void multiply(
    const T* weights, const T* gain, double eps, int32 outputs, int32 width, int32 tokens, int32 block, Input input,
    Store store)
{
    constexpr int32 FEWER = N > 0 ? TOKENS / 2 : TOKENS > 8 ? 8 : 0;
    if constexpr (FEWER > 0) {
        if (tokens <= FEWER) {
            multiply<FEWER, ROWS, N, PAIRED>(weights, gain, eps, outputs, width, tokens, block, input, store);
            return;
        }
    }
    if constexpr (N == 0)
        multiply_by_mma<TOKENS, ROWS, PAIRED, ThroughL1>(
            weights, gain, eps, outputs, width, tokens, block, input, store);
    else
        multiply_by_fma<TOKENS, ROWS, N, PAIRED, ThroughL1>(
            weights, gain, eps, outputs, width, tokens, block, input, store);
}

// The tiles of one place of the grid (see `Experts`), and an output block of each. GATED: from x to hidden; else from
// hidden to outputs.
template <int32 TOKENS, int32 ROWS, int32 N, bool GATED, typename T, typename Result>
__device__ __forceinline__ void expert_block(
    const Experts& experts, const T* x, const T* __restrict__ matrices, const T* __restrict__ gain,
    Result* __restrict__ result, double eps, int32 D, int32 I)
{
    __shared__ int32 pairs[TOKENS + 32 * (N > 0 ? FMA_PARTS : MMA_PARTS)];
    constexpr int32 OUTPUTS = GATED ? ROWS / 2 : ROWS;
    const int32 outputs = GATED ? I : D, width = GATED ? D : I, likely = experts.likely_at(blockIdx.x, TOKENS);
    if (TOKENS > 1 && likely >= 0) {  // one token's form has no registers left for it on sm_120, where it would spill
        const int32 first = blockIdx.y * OUTPUTS, rows = min(OUTPUTS, outputs - first);
        const T* own = matrices + (int64(likely) * (GATED ? 2 : 1) * outputs + first) * width;
        prefetch_rows(own, rows, width);
        if (GATED) prefetch_rows(own + int64(outputs) * width, rows, width);
    }
    wait_for_earlier();
    int32 candidate, end, count = 0;
    const int32 expert = experts.at(blockIdx.x, TOKENS, candidate, end);
    if (expert < 0) return;
    const T* weights = matrices + int64(expert) * (GATED ? 2 : 1) * I * D;
    const auto input = [&](int32 t) { return x + int64(GATED ? pairs[t] / experts.a_token() : pairs[t]) * width; };
    while (true) {
        for (; count < TOKENS && candidate < end; candidate += blockDim.x)
            count = experts.find_pairs(expert, candidate, end, count, pairs);
        if (count == 0) return;
        const int32 tokens = min(count, TOKENS);
        if constexpr (GATED)
            multiply<TOKENS, ROWS, N, true>(
                weights, gain, eps, outputs, width, tokens, blockIdx.y, input, StoreHidden<T>{result, pairs, I});
        else
            multiply<TOKENS, ROWS, N, false>(
                weights, gain, eps, outputs, width, tokens, blockIdx.y, input, StoreOutput<T>{result, pairs, D});
        if (candidate >= end && count == tokens) return;
        // All threads are through with this tile's pairs and sums.
        __syncthreads();
        count -= tokens;
        const int32 left = threadIdx.x < count ? pairs[tokens + threadIdx.x] : 0;
        // The pairs that are left are read, before they move to the front.
        __syncthreads();
        if (threadIdx.x < count) pairs[threadIdx.x] = left;
        // They are there, to all threads.
        __syncthreads();
    }
}

template <typename T>
__device__ __forceinline__ void combine(
    const Experts& experts, const Wide<T>* outputs, const Wide<T>* weights, const T* residual, T* y, int32 D)
{
    wait_for_earlier();
    const int32 d = blockIdx.y * COMBINE_THREADS + threadIdx.x;
    if (d >= D) return;
    const int64 m = blockIdx.x, K = experts.K;
    const bool is_real = experts.ids[m * K] >= 0;
    const Wide<T>* own = outputs + m * experts.a_token() * D + d;
    Wide<T> sum = 0;
#pragma unroll 8
    for (int32 k = 0; k < K; ++k)
        if (experts.ids[m * K + k] >= 0) sum += weights[m * K + k] * own[k * int64(D)];
    for (int32 s = 0; is_real && s < experts.shared; ++s) sum += own[(K + s) * int64(D)];
    if (residual) sum += load(residual + m * D + d);
    y[m * D + d] = rounded<T>(sum);
}

#define GATED(name, T, THREADS, BLOCKS, TOKENS, ROWS, N)                                                               \
    extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)                                                      \
        name(const int32* ids, const T* x, const T* gate_up, const T* gain, T* hidden, double eps, int32 M, int32 K,   \
             int32 routed, int32 shared, int32 D, int32 I)                                                             \
    {                                                                                                                  \
        const Experts experts{ids, M, K, routed, shared};                                                              \
        expert_block<TOKENS, ROWS, N, true>(experts, x, gate_up, gain, hidden, eps, D, I);                             \
    }

#define DOWN(name, T, THREADS, BLOCKS, TOKENS, ROWS, N)                                                                \
    extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)                                                      \
        name(const int32* ids, const T* hidden, const T* down, Wide<T>* outputs, int32 M, int32 K, int32 routed,       \
             int32 shared, int32 D, int32 I)                                                                           \
    {                                                                                                                  \
        const Experts experts{ids, M, K, routed, shared};                                                              \
        expert_block<TOKENS, ROWS, N, false>(experts, hidden, down, static_cast<const T*>(nullptr), outputs, 0, D, I); \
    }

#define COMBINE(name, T)                                                                                               \
    extern "C" __global__ void __launch_bounds__(COMBINE_THREADS)                                                      \
        name(const int32* ids, const Wide<T>* outputs, const Wide<T>* weights, const T* residual, T* y, int32 M,       \
             int32 K, int32 routed, int32 shared, int32 D)                                                             \
    {                                                                                                                  \
        combine<T>(Experts{ids, M, K, routed, shared}, outputs, weights, residual, y, D);                              \
    }

#define BY_FMA(suffix, T, BLOCKS, TOKENS, ROWS, N)                                                                     \
    GATED(gated_##suffix, T, 32 * FMA_PARTS, BLOCKS, TOKENS, ROWS, N)                                                  \
    DOWN(down_##suffix, T, 32 * FMA_PARTS, BLOCKS, TOKENS, ROWS, N)

BY_FMA(any_f16, __half, 3, 4, 4, 1)
BY_FMA(any_bf16, __nv_bfloat16, 3, 4, 4, 1)
BY_FMA(any_f32, float, 3, 4, 4, 1)
BY_FMA(any_f64, double, 3, 4, 4, 1)
BY_FMA(1_f32, float, 5, 1, 8, 4)
BY_FMA(4_f32, float, 3, 4, 8, 4)
BY_FMA(4_f64, double, 3, 4, 4, 2)
COMBINE(combine_f16, __half)
COMBINE(combine_bf16, __nv_bfloat16)
COMBINE(combine_f32, float)
COMBINE(combine_f64, double)

#define BY_MMA(suffix, T)                                                                                              \
    GATED(gated_8_##suffix, T, 32 * MMA_PARTS, 2, 8, 16, 0)                                                            \
    GATED(gated_32_##suffix, T, 32 * MMA_PARTS, 2, 32, 16, 0)                                                          \
    DOWN(down_8_##suffix, T, 32 * MMA_PARTS, 2, 8, 16, 0)                                                              \
    DOWN(down_32_##suffix, T, 32 * MMA_PARTS, 2, 32, 16, 0)

DDTREE_SHARED(gated_8_f16, mma_bytes(8, 16));
DDTREE_SHARED(gated_32_f16, mma_bytes(32, 16));
DDTREE_SHARED(down_8_f16, mma_bytes(8, 16));
DDTREE_SHARED(down_32_f16, mma_bytes(32, 16));
BY_MMA(f16, __half)
DDTREE_SHARED(gated_8_bf16, mma_bytes(8, 16));
DDTREE_SHARED(gated_32_bf16, mma_bytes(32, 16));
DDTREE_SHARED(down_8_bf16, mma_bytes(8, 16));
DDTREE_SHARED(down_32_bf16, mma_bytes(32, 16));
BY_MMA(bf16, __nv_bfloat16)
