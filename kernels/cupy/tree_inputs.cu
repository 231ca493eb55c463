// What a causal language model reads of a tree: int64 tokens and positions of all slots.
//
// One thread a slot: slot `i` of request `b` is element b * N + i. An unused slot is the root once more. A token outside
// the vocabulary, which only a draft has that is refused later, is moved inside, and a position beyond the last to that.
//
//   token_ids, depths          int32 (B, N)
//   node_counts, prefix_lens   int32 (B)
//   input_ids, position_ids    int64 (B, N)   written in full
#include "common.cuh"

extern "C" __global__ void __launch_bounds__(256) fill_inputs(
    const int32* __restrict__ token_ids, const int32* __restrict__ depths, const int32* __restrict__ node_counts,
    const int32* __restrict__ prefix_lens, int64* __restrict__ input_ids, int64* __restrict__ position_ids,
    int64 count, int32 N, int32 last_token, int32 last_position)
{
    const int64 element = int64(blockIdx.x) * blockDim.x + threadIdx.x;
    if (element >= count) return;
    const int64 b = element / N;
    const bool used = element - b * N < node_counts[b];
    const int64 node = used ? element : b * N;
    const int64 position = int64(prefix_lens[b]) + (used ? depths[node] : 0);
    input_ids[element] = min(max(token_ids[node], 0), last_token);
    position_ids[element] = min(position, int64(last_position));
}
