// Sequence positions of tree nodes: prefix_len + depth, and prefix_len for padding, whose depth is -1.
//
// One thread a node: node `i` of request `b` is element b * N + i.
//
//   depths       int32 (B, N)
//   prefix_lens  int32 (B)
//   positions    int32 (B, N)   written in full
#include "common.cuh"

extern "C" __global__ void __launch_bounds__(256) add_depths(
    const int32* __restrict__ depths, const int32* __restrict__ prefix_lens, int32* __restrict__ positions,
    int64 count, int32 N)
{
    wait_for_earlier();
    const int64 element = int64(blockIdx.x) * blockDim.x + threadIdx.x;
    if (element < count)
        positions[element] = prefix_lens[element / N] + max(depths[element], 0);
}
