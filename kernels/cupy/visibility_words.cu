// Which nodes each node attends to, as bits: itself and its ancestors.
//
// One thread a node: it clears its row and then follows its parents up to the root. Rows of padding stay 0.
//
//   parents      int32  (B, N)
//   node_counts  int32  (B)
//   words        uint32 (B, N, W)   written in full; bit j % 32 of word j / 32 is node j
#include "common.cuh"

extern "C" __global__ void __launch_bounds__(128) fill_words(
    const int32* __restrict__ parents, const int32* __restrict__ node_counts, uint32* __restrict__ words,
    int64 count, int32 N)
{
    wait_for_earlier();
    const int64 node = int64(blockIdx.x) * blockDim.x + threadIdx.x;
    if (node >= count) return;
    const int64 request = node / N;
    const int32 i = int32(node % N), W = (N + 31) / 32;
    uint32* row = words + node * W;
    for (int32 w = 0; w < W; ++w) row[w] = 0;
    if (i >= node_counts[request]) return;
    // The root's parent is -1, or anything: it is not read.
    for (int32 j = i;; j = parents[request * N + j]) {
        row[j / 32] |= 1u << (j % 32);
        if (j == 0) break;
    }
}
