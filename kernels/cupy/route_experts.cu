// A token's experts: sigmoid scores in float64, corrected by a bias, from the best groups alone; ties go to the lowest
// index, among groups too.
//
// One warp a token. Its scores stand in shared memory, expert e with lane e % 32. A lane keeps the best of its experts
// that are left, so that after each choice only the lane that lost its best looks again.
//
//   logits      (M, E)
//   bias        (E)
//   expert_ids  int32 (M, K)  written in full, best first
//   weights     (M, K)        written in full: scores without the bias, over their sum if `normalised`, times `scale`
#include "floats.cuh"

constexpr int32 LANES = 32;
constexpr int32 MOST_EXPERTS = 4096;  // `route_experts.py` says it too

__device__ __forceinline__ double less_than_all() { return __longlong_as_double(0xFFF0000000000000ll); }

// The greatest x of the warp, of equals that of the lowest index; to all lanes.
__device__ __forceinline__ void first_greatest(double& x, int32& index)
{
#pragma unroll
    for (int32 step = 16; step > 0; step /= 2) {
        const double other = __shfl_xor_sync(ALL_LANES, x, step);
        const int32 other_index = __shfl_xor_sync(ALL_LANES, index, step);
        if (other > x || (other == x && other_index < index)) x = other, index = other_index;
    }
}

template <typename T>
__device__ __forceinline__ void route(
    const T* __restrict__ logits, const T* __restrict__ bias, int32* __restrict__ expert_ids, T* __restrict__ weights,
    int32 E, int32 K, int32 groups, int32 kept_groups, int32 normalised, double scale)
{
    extern __shared__ double corrected[];  // (E), then (groups)
    double* group_scores = corrected + E;
    const int32 lane = threadIdx.x, size = E / groups;
    const int64 m = blockIdx.x;
    const auto score_of = [&](int32 e) {
        const double z = load(logits + m * E + e), small = exp(-fabs(z));
        return z >= 0 ? 1 / (1 + small) : small / (1 + small);
    };

    for (int32 e = lane; e < E; e += LANES) corrected[e] = score_of(e) + double(load(bias + e));
    // The scores, to the lanes that look at whole groups.
    __syncwarp();
    if (kept_groups < groups) {
        for (int32 g = lane; g < groups; g += LANES) {
            double best = less_than_all(), second = best;
            for (int32 e = g * size; e < (g + 1) * size; ++e) {
                const double x = corrected[e];
                if (x > best) {
                    second = best;
                    best = x;
                } else if (x > second) {
                    second = x;
                }
            }
            group_scores[g] = size > 1 ? best + second : best;
        }
        // Scores of groups, to all lanes; and all have read the experts' before some are struck out.
        __syncwarp();
        for (int32 g = lane; g < groups; g += LANES) {
            int32 better = 0;
            for (int32 h = 0; h < groups; ++h)
                better += group_scores[h] > group_scores[g] || (group_scores[h] == group_scores[g] && h < g);
            if (better < kept_groups) continue;
            for (int32 e = g * size; e < (g + 1) * size; ++e) corrected[e] = less_than_all();
        }
        // The experts that are struck out, to all lanes.
        __syncwarp();
    }

    double best = less_than_all();
    int32 expert = MOST_EXPERTS;
    const auto look = [&] {
        best = less_than_all();
        expert = MOST_EXPERTS;
        for (int32 e = lane; e < E; e += LANES)
            if (corrected[e] > best) best = corrected[e], expert = e;
    };
    look();
    double total = 0, own = 0;  // of this lane: the score of choice k with lane k % 32
    for (int32 k = 0; k < K; ++k) {
        double x = best;
        int32 chosen = expert;
        first_greatest(x, chosen);
        const double score = score_of(chosen);
        total += score;
        if (k % LANES == lane) own = score;
        if (lane == 0) expert_ids[m * K + k] = chosen;
        if (chosen % LANES == lane) {
            corrected[chosen] = less_than_all();
            look();
        }
    }
    total = normalised ? total + 1e-20 : 1.0;
    for (int32 k = lane; k < K; k += LANES)
        weights[m * K + k] = rounded<T>(Wide<T>((K <= LANES ? own : score_of(expert_ids[m * K + k])) / total * scale));
}

#define ROUTE(name, T)                                                                                             \
    extern "C" __global__ void __launch_bounds__(LANES)                                                            \
        name(const T* logits, const T* bias, int32* expert_ids, T* weights, int32 E, int32 K, int32 groups,        \
             int32 kept_groups, int32 normalised, double scale)                                                    \
    {                                                                                                              \
        route(logits, bias, expert_ids, weights, E, K, groups, kept_groups, normalised, scale);                    \
    }

DDTREE_SHARED(route_experts_f16, 2 * MOST_EXPERTS * 8);
ROUTE(route_experts_f16, __half)
DDTREE_SHARED(route_experts_bf16, 2 * MOST_EXPERTS * 8);
ROUTE(route_experts_bf16, __nv_bfloat16)
DDTREE_SHARED(route_experts_f32, 2 * MOST_EXPERTS * 8);
ROUTE(route_experts_f32, float)
DDTREE_SHARED(route_experts_f64, 2 * MOST_EXPERTS * 8);
ROUTE(route_experts_f64, double)
