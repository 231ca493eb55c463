// A token's experts: sigmoid scores in float64, corrected by a bias, from the best groups alone; ties go to the lowest
// index, among groups too.
//
// One block a token: all its threads make the scores, and its first warp chooses. A lane keeps the best of the experts
// e with e % 32 = its own number that are left, so that after each choice only the lane that lost its best looks again.
// Scores are compared as integers in their order, for which a warp has a maximum in one instruction.
//
// Version 1 had one warp a token, which made a chosen score again and compared float64 by shuffles: 12 us for 65 tokens
// and 384 experts. Version 2, this one: 6 us, on an H200.
//
//   logits      (M, E)
//   bias        (E)
//   expert_ids  int32 (M, K)  written in full, best first
//   weights     (M, K)        written in full: scores without the bias, over their sum if `normalised`, times `scale`
//   node_counts int32 (M / N), or null: of each N rows, those from node_counts[b] on are padding: experts -1, weights 0
#include "floats.cuh"

constexpr int32 THREADS = 128, LANES = 32;
constexpr int32 MOST_EXPERTS = 4096;  // `route_experts.py` says it too

// An integer in the order of x; 0 is below that of every number, and that of NaN above 0 alone.
__device__ __forceinline__ uint64 in_order(double x)
{
    const int64 bits = __double_as_longlong(x);
    return x != x ? 1 : bits < 0 ? ~uint64(bits) : uint64(bits) | 1ull << 63;
}

__device__ __forceinline__ double number(uint64 order)
{
    return __longlong_as_double(int64(order >> 63 ? order & ~(1ull << 63) : ~order));
}

// The expert of the greatest order in the warp, of equals the lowest; to all lanes.
__device__ __forceinline__ int32 first_greatest(uint64 order, int32 expert)
{
    const uint32 high = uint32(order >> 32), greatest = __reduce_max_sync(ALL_LANES, high);
    const uint32 low = high == greatest ? uint32(order) : 0, then = __reduce_max_sync(ALL_LANES, low);
    return __reduce_min_sync(ALL_LANES, high == greatest && low == then ? expert : MOST_EXPERTS);
}

template <typename T>
__device__ __forceinline__ void route(
    const T* logits, const T* __restrict__ bias, int32* expert_ids, T* weights, const int32* node_counts,
    int32 N, int32 E, int32 K, int32 groups, int32 kept_groups, int32 normalised, double scale)
{
    extern __shared__ double scores[];  // (E), then (E) and (groups)
    uint64* corrected = reinterpret_cast<uint64*>(scores + E);  // orders; 0 of what is struck out or chosen
    double* group_scores = scores + 2 * E;
    const int32 lane = threadIdx.x % LANES, size = E / groups;
    const int64 m = blockIdx.x;

    wait_for_earlier();
    if (node_counts && m % N >= node_counts[m / N]) {
        for (int32 k = threadIdx.x; k < K; k += THREADS) {
            expert_ids[m * K + k] = -1;
            weights[m * K + k] = rounded<T>(Wide<T>(0));
        }
        return;
    }
    for (int32 e = threadIdx.x; e < E; e += THREADS) {
        const double z = load(logits + m * E + e), small = exp(-fabs(z));
        scores[e] = (z >= 0 ? 1.0 : small) / (1 + small);
        corrected[e] = in_order(scores[e] + double(load(bias + e)));
    }
    // The scores, to all threads.
    __syncthreads();
    if (kept_groups < groups) {
        for (int32 g = threadIdx.x; g < groups; g += THREADS) {
            uint64 best = 0, second = 0;
            for (int32 e = g * size; e < (g + 1) * size; ++e) {
                const uint64 order = corrected[e];
                second = max(second, min(best, order));
                best = max(best, order);
            }
            group_scores[g] = number(best) + (size > 1 ? number(second) : 0.0);
        }
        // Scores of groups, to all threads, which have read the experts' before some are struck out.
        __syncthreads();
        for (int32 g = threadIdx.x; g < groups; g += THREADS) {
            int32 better = 0;
            for (int32 h = 0; h < groups; ++h)
                better += group_scores[h] > group_scores[g] || (group_scores[h] == group_scores[g] && h < g);
            for (int32 e = g * size; better >= kept_groups && e < (g + 1) * size; ++e) corrected[e] = 0;
        }
        // The experts that are struck out, to the warp that chooses.
        __syncthreads();
    }
    if (threadIdx.x >= LANES) return;

    uint64 best;
    int32 expert;
    const auto look = [&] {
        best = 0;
        expert = MOST_EXPERTS;
#pragma unroll 4
        for (int32 e = lane; e < E; e += LANES)
            if (corrected[e] > best) best = corrected[e], expert = e;
    };
    look();
    double total = 0;
    for (int32 k = 0; k < K; ++k) {
        const int32 chosen = first_greatest(best, expert);
        total += scores[chosen];
        if (lane == 0) expert_ids[m * K + k] = chosen;
        if (chosen == expert) {
            corrected[chosen] = 0;
            look();
        }
    }
    total = normalised ? total + 1e-20 : 1.0;
    // The experts, to all lanes.
    __syncwarp();
    for (int32 k = lane; k < K; k += LANES)
        weights[m * K + k] = rounded<T>(Wide<T>(scores[expert_ids[m * K + k]] / total * scale));
}

#define ROUTE(name, T)                                                                                                 \
    extern "C" __global__ void __launch_bounds__(THREADS)                                                              \
        name(const T* logits, const T* bias, int32* expert_ids, T* weights, const int32* node_counts, int32 N,         \
             int32 E, int32 K, int32 groups, int32 kept_groups, int32 normalised, double scale)                        \
    {                                                                                                                  \
        route(logits, bias, expert_ids, weights, node_counts, N, E, K, groups, kept_groups, normalised, scale);        \
    }

DDTREE_SHARED(route_experts_f32, 3 * MOST_EXPERTS * 8);
ROUTE(route_experts_f32, float)
DDTREE_SHARED(route_experts_f64, 3 * MOST_EXPERTS * 8);
ROUTE(route_experts_f64, double)
