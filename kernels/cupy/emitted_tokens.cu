// What a round emits: of each request how many tokens, then the accepted drafts' and the bonus, and -1 behind them.
//
// A block has a request, a thread every THREADS-th place of its path.
//
//   token_ids     int32 (B, N)
//   node_indices  int32 (B, width)       width = L + 1
//   lengths, bonus_token_ids  int32 (B)
//   emitted       int32 (B, 1 + width)   written in full
#include "common.cuh"

constexpr int32 THREADS = 128;

extern "C" __global__ void __launch_bounds__(THREADS) gather_emitted(
    const int32* __restrict__ token_ids, const int32* __restrict__ node_indices, const int32* __restrict__ lengths,
    const int32* __restrict__ bonus_token_ids, int32* __restrict__ emitted, int32 N, int32 width)
{
    const int64 b = blockIdx.x;
    const int32 length = lengths[b];
    const int32* path = node_indices + b * width;
    int32* out = emitted + b * (1 + int64(width));
    if (threadIdx.x == 0) out[0] = length;
    for (int32 k = threadIdx.x; k < width; k += THREADS) {
        const bool draft = k + 1 < length, bonus = k + 1 == length;
        out[1 + k] = draft ? token_ids[b * N + path[k + 1]] : bonus ? bonus_token_ids[b] : -1;
    }
}
