// The drafts that a table holds for where each request stands: one thread a candidate.
//
//   table        int32 (B, P, L, K)  entry j of a request is for when it has j + 1 new tokens; -1: not drafted
//   confidence   float32 (K)         log-prob of each rank
//   lengths, prompt_lens  int32 (B)  of inert slots, anything
//   log_probs    float32 (B, L, K)
//   token_ids    int32 (B, L, K)
#include "common.cuh"

constexpr int32 THREADS = 256;

extern "C" __global__ void __launch_bounds__(THREADS) oracle_draft(
    const int32* __restrict__ table, const float* __restrict__ confidence, const int32* __restrict__ lengths,
    const int32* __restrict__ prompt_lens, int32 B, int32 P, int32 L, int32 K, float* __restrict__ log_probs,
    int32* __restrict__ token_ids)
{
    wait_for_earlier();
    const int64 i = int64(blockIdx.x) * THREADS + threadIdx.x, size = int64(L) * K, b = i / size;
    if (b >= B) return;
    const int64 entry = min(max(int64(lengths[b]) - prompt_lens[b] - 1, 0ll), int64(P) - 1);
    const int32 token = table[(b * P + entry) * size + i % size];
    token_ids[i] = token;
    log_probs[i] = token >= 0 ? confidence[i % K] : minus_infinity();
}
