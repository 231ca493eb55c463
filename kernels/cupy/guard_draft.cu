// A draft that no one has checked, without what is wrong with it.
//
// One block a request. A warp has a depth at a time, its lanes the ranks; every fault is a number that grows with depth,
// rank and code, so that the least one is the first. The drafted prefix of a depth ends before its first -inf, which the
// warp finds before it looks at values.
//
//   log_probs  float32 (B, L, K)
//   token_ids  int32   (B, L, K)
//   remaining  int32   (B)
//   guarded    float32 (B, L, K)  written in full: log_probs, or -inf for a request with a fault or nothing remaining
//   faults     int32   (B, 2)     written in full: code and place, depth K + rank, or zeros
#include "common.cuh"

constexpr int32 THREADS = 256, WARPS = THREADS / 32;
constexpr uint64 NO_FAULT = ~0ull;
constexpr uint64 CODES = 8;

extern "C" __global__ void __launch_bounds__(THREADS) find_faults(
    const float* __restrict__ log_probs, const int32* __restrict__ token_ids, const int32* __restrict__ remaining,
    float* __restrict__ guarded, int32* __restrict__ faults, int32 L, int32 K, int32 vocab_size)
{
    wait_for_earlier();
    __shared__ uint64 first;
    const int32 b = blockIdx.x, lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const float* values = log_probs + int64(b) * L * K;
    const int32* ids = token_ids + int64(b) * L * K;
    const bool running = remaining[b] > 0;
    if (threadIdx.x == 0) first = NO_FAULT;
    // The beginning of the search, to all threads.
    __syncthreads();
    uint64 found = NO_FAULT;
    for (int32 d = warp; running && d < L; d += WARPS) {
        const float* row = values + int64(d) * K;
        const int32* row_ids = ids + int64(d) * K;
        int32 end = K;
        for (int32 k = lane; k < K; k += 32)
            if (row[k] == minus_infinity()) {
                end = k;
                break;
            }
        end = __reduce_min_sync(ALL_LANES, end);
        for (int32 k = lane; k < end; k += 32) {
            const float value = row[k];
            const int32 id = row_ids[k];
            uint64 code = 0;
            if (is_greater(value, 0.0f)) {
                code = 1;
            } else if (k > 0 && is_greater(value, row[k - 1])) {
                code = 2;
            } else if (uint32(id) >= uint32(vocab_size)) {
                code = 3;
            } else {
                for (int32 left = 0; left < k; ++left)
                    if (row_ids[left] == id) code = 4;
                if (code == 0 && isnan(value)) code = 5;
            }
            if (code) found = min(found, (uint64(d) * K + k) * CODES + code);
        }
    }
    if (found != NO_FAULT) atomicMin(&first, found);
    // The first fault, to all threads.
    __syncthreads();
    const bool good = running && first == NO_FAULT;
    if (threadIdx.x < 2) {
        const uint64 part = threadIdx.x == 0 ? first % CODES : first / CODES;
        faults[2 * b + threadIdx.x] = first == NO_FAULT ? 0 : int32(part);
    }
    float* out = guarded + int64(b) * L * K;
    for (int32 i = threadIdx.x; i < L * K; i += THREADS) out[i] = good ? values[i] : minus_infinity();
}
