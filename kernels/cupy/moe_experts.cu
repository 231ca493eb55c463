// The routed and shared experts of some tokens: for each the weighted sum of its experts' gated layers.
//
// Three launches: `gated` and `down` are the products (see skinny.cuh), and `combine` adds up each token's pairs of token
// and expert in their order.
//
// Blocks find their work themselves. Grid x is a place for each expert that can have work: where there are fewer pairs
// than experts, one for each pair, which is its expert's if no pair before it has the same. Shared experts follow, whose
// tokens are all that are not padding. A block looks through the ids for the pairs of its expert, a tile at a time, and
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

constexpr int32 COMBINE_THREADS = 256, MOST_TOKENS = 72;

struct Experts {
    const int32* ids;
    int32 M, K, routed, shared;

    __device__ int32 a_token() const { return K + shared; }  // pairs

    // The expert of a place of the grid, or -1: to all threads, each of which must call this.
    __device__ int32 at(int32 place) const
    {
        const int32 pairs = M * K, places = min(pairs, routed);
        if (place >= places) return routed + place - places;
        if (pairs >= routed) return place;
        const int32 expert = ids[place];
        bool before = false;
        for (int32 i = threadIdx.x; i < place; i += blockDim.x) before |= ids[i] == expert;
        // Whether another place has this expert, to all threads.
        const bool taken = __syncthreads_or(before);
        return taken || expert < 0 || expert >= routed ? -1 : expert;
    }

    // Writes the `size` pairs of an expert from the `first` one on, in order, and returns how many there are of these.
    __device__ int32 find_pairs(int32 expert, int32 first, int32 size, int32* found) const
    {
        __shared__ int32 of_warps[MOST_PARTS];
        const bool is_routed = expert < routed;
        const int32 candidates = is_routed ? M * K : M, lane = threadIdx.x % 32, warp = threadIdx.x / 32;
        int32 count = 0;  // of the pairs before this round's
        for (int32 start = 0; start < candidates && count < first + size; start += blockDim.x) {
            const int32 i = start + threadIdx.x;
            const bool is_own = i < candidates && (is_routed ? ids[i] == expert : ids[int64(i) * K] >= 0);
            const uint32 own = __ballot_sync(ALL_LANES, is_own);
            if (lane == 0) of_warps[warp] = __popc(own);
            // Each warp's count, to all threads.
            __syncthreads();
            int32 place = count + __popc(own & ((1u << lane) - 1)) - first;
            for (int32 w = 0; w < blockDim.x / 32; ++w) {
                if (w < warp) place += of_warps[w];
                count += of_warps[w];
            }
            if (is_own && place >= 0 && place < size)
                found[place] = is_routed ? i / K * a_token() + i % K : i * a_token() + K + expert - routed;
            // The counts are read, and the pairs found, of all threads.
            __syncthreads();
        }
        return max(min(count - first, size), 0);
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
    if constexpr (N == 0) {
        multiply_by_mma<TOKENS, ROWS, PAIRED>(weights, gain, eps, outputs, width, tokens, block, input, store);
    } else if constexpr (TOKENS == 1) {
        multiply_by_fma<1, ROWS, N, PAIRED>(weights, gain, eps, outputs, width, tokens, block, input, store);
    } else {
        if (tokens <= TOKENS / 2)
            multiply<TOKENS / 2, ROWS, N, PAIRED>(weights, gain, eps, outputs, width, tokens, block, input, store);
        else
            multiply_by_fma<TOKENS, ROWS, N, PAIRED>(weights, gain, eps, outputs, width, tokens, block, input, store);
    }
}

// Of one expert (see `Experts`), an output block and every gridDim.z-th tile of its pairs. GATED: from x to hidden; else
// from hidden to outputs.
template <int32 TOKENS, int32 ROWS, int32 N, bool GATED, typename T, typename Result>
__device__ __forceinline__ void expert_block(
    const Experts& experts, const T* __restrict__ x, const T* __restrict__ matrices, const T* __restrict__ gain,
    Result* __restrict__ result, double eps, int32 D, int32 I)
{
    __shared__ int32 pairs[MOST_TOKENS];
    wait_for_earlier();
    const int32 expert = experts.at(blockIdx.x), outputs = GATED ? I : D, width = GATED ? D : I;
    if (expert < 0) return;
    const T* weights = matrices + int64(expert) * (GATED ? 2 : 1) * I * D;
    const auto input = [&](int32 t) { return x + int64(GATED ? pairs[t] / experts.a_token() : pairs[t]) * width; };
    for (int32 first = blockIdx.z * TOKENS;; first += gridDim.z * TOKENS) {
        const int32 count = experts.find_pairs(expert, first, TOKENS, pairs);
        if (count == 0) return;
        if constexpr (GATED)
            multiply<TOKENS, ROWS, N, true>(
                weights, gain, eps, outputs, width, count, blockIdx.y, input, StoreHidden<T>{result, pairs, I});
        else
            multiply<TOKENS, ROWS, N, false>(
                weights, gain, eps, outputs, width, count, blockIdx.y, input, StoreOutput<T>{result, pairs, D});
        if (count < TOKENS) return;
        // All threads are through with this tile's pairs and sums.
        __syncthreads();
    }
}

template <typename T>
__device__ __forceinline__ void combine(
    const Experts& experts, const Wide<T>* __restrict__ outputs, const Wide<T>* __restrict__ weights,
    const T* __restrict__ residual, T* __restrict__ y, int32 D)
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

#define GATED(name, T, TOKENS, ROWS, N)                                                                                \
    extern "C" __global__ void __launch_bounds__(32 * MOST_PARTS, 1)                                                   \
        name(const int32* ids, const T* x, const T* gate_up, const T* gain, T* hidden, double eps, int32 M, int32 K,   \
             int32 routed, int32 shared, int32 D, int32 I)                                                             \
    {                                                                                                                  \
        const Experts experts{ids, M, K, routed, shared};                                                              \
        expert_block<TOKENS, ROWS, N, true>(experts, x, gate_up, gain, hidden, eps, D, I);                             \
    }

#define DOWN(name, T, TOKENS, ROWS, N)                                                                                 \
    extern "C" __global__ void __launch_bounds__(32 * MOST_PARTS, 1)                                                   \
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

#define BY_FMA(suffix, T, TOKENS, ROWS, N)                                                                             \
    GATED(gated_##suffix, T, TOKENS, ROWS, N)                                                                          \
    DOWN(down_##suffix, T, TOKENS, ROWS, N)

BY_FMA(any_f16, __half, 8, 4, 1)
BY_FMA(any_bf16, __nv_bfloat16, 8, 4, 1)
BY_FMA(any_f32, float, 8, 4, 1)
BY_FMA(any_f64, double, 8, 4, 1)
BY_FMA(1_f32, float, 1, 4, 4)
BY_FMA(8_f32, float, 8, 8, 4)
BY_FMA(8_f64, double, 8, 4, 2)
COMBINE(combine_f16, __half)
COMBINE(combine_bf16, __nv_bfloat16)
COMBINE(combine_f32, float)
COMBINE(combine_f64, double)

#define BY_MMA(suffix, T)                                                                                              \
    GATED(gated_8_##suffix, T, 8, 16, 0)                                                                               \
    GATED(gated_32_##suffix, T, 32, 32, 0)                                                                             \
    GATED(gated_72_##suffix, T, 72, 32, 0)                                                                             \
    DOWN(down_8_##suffix, T, 8, 16, 0)                                                                                 \
    DOWN(down_32_##suffix, T, 32, 32, 0)                                                                               \
    DOWN(down_72_##suffix, T, 72, 32, 0)

DDTREE_SHARED(gated_8_f16, mma_bytes(8, 16));
DDTREE_SHARED(gated_32_f16, mma_bytes(32, 32));
DDTREE_SHARED(gated_72_f16, mma_bytes(72, 32));
DDTREE_SHARED(down_8_f16, mma_bytes(8, 16));
DDTREE_SHARED(down_32_f16, mma_bytes(32, 32));
DDTREE_SHARED(down_72_f16, mma_bytes(72, 32));
BY_MMA(f16, __half)
DDTREE_SHARED(gated_8_bf16, mma_bytes(8, 16));
DDTREE_SHARED(gated_32_bf16, mma_bytes(32, 32));
DDTREE_SHARED(gated_72_bf16, mma_bytes(72, 32));
DDTREE_SHARED(down_8_bf16, mma_bytes(8, 16));
DDTREE_SHARED(down_32_bf16, mma_bytes(32, 32));
DDTREE_SHARED(down_72_bf16, mma_bytes(72, 32));
BY_MMA(bf16, __nv_bfloat16)
