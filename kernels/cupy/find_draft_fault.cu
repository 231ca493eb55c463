// What is wrong with the values of a draft, and where first.
//
// A block has a row, the candidates of one depth of one request, up to its first NaN or -inf. Of its faults that of the
// lowest rank counts, and of the rows' that of the lowest row: row << 32 | rank << 3 | code, of which the least is kept.
// Codes: 1, the log-prob is above 0; 2, it is above its left neighbour's; 3, the id is outside the vocabulary; 4, the id
// stands further left already.
//
//   log_probs   float32 (rows, K)
//   token_ids   int32 (rows, K)
//   fault       uint64 (1)          all ones before
#include "common.cuh"

constexpr int32 THREADS = 128;
constexpr uint32 NONE = 0xFFFFFFFFu;

__device__ __forceinline__ uint32 fault_of(const float* log_probs, const int32* token_ids, int32 k, int32 vocab_size)
{
    if (is_greater(log_probs[k], 0.0f)) return 1;
    if (k > 0 && is_greater(log_probs[k], log_probs[k - 1])) return 2;
    if (token_ids[k] < 0 || token_ids[k] >= vocab_size) return 3;
    for (int32 j = 0; j < k; ++j)
        if (token_ids[j] == token_ids[k]) return 4;
    return 0;
}

extern "C" __global__ void __launch_bounds__(THREADS) find_fault(
    const float* __restrict__ log_probs, const int32* __restrict__ token_ids, uint64* __restrict__ fault, int32 K,
    int32 vocab_size)
{
    __shared__ int32 end;
    __shared__ uint32 least;
    log_probs += int64(blockIdx.x) * K;
    token_ids += int64(blockIdx.x) * K;
    if (threadIdx.x == 0) end = K, least = NONE;
    // Their first values, to all threads.
    __syncthreads();
    for (int32 k = threadIdx.x; k < K; k += THREADS)
        if (!is_greater(log_probs[k], minus_infinity())) atomicMin(&end, k);
    // Where the row ends, to all threads.
    __syncthreads();
    for (int32 k = threadIdx.x; k < end; k += THREADS)
        if (const uint32 code = fault_of(log_probs, token_ids, k, vocab_size)) atomicMin(&least, uint32(k) << 3 | code);
    // The row's least fault, to the first thread.
    __syncthreads();
    if (threadIdx.x == 0 && least != NONE) atomicMin(fault, uint64(blockIdx.x) << 32 | least);
}
