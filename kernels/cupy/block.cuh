// Sums, extremes and barriers of a block of whole warps.
#pragma once

#include "common.cuh"

// A block's threads, and sums over them. Each of these is a barrier: what was written before is seen by all behind it.
struct Block {
    uint32 (*const sums)[32];  // two rows, in turns: one may still be read while the other is written
    int32 turn = 0;
    const int32 size = blockDim.x, t = threadIdx.x, lane = t % 32, warp = t / 32, warps = size / 32;

    __device__ explicit Block(uint32 (*shared)[32]) : sums(shared) {}

    __device__ uint32 of_each_warp(uint32 x, bool writes)
    {
        turn ^= 1;
        if (writes) sums[turn][warp] = x;
        // Each warp's value, to all warps.
        __syncthreads();
        return sums[turn][lane];
    }

    __device__ uint32 sum(uint32 x)
    {
        x = of_each_warp(__reduce_add_sync(ALL_LANES, x), lane == 0);
        return __reduce_add_sync(ALL_LANES, lane < warps ? x : 0);
    }

    __device__ uint32 least(uint32 x)
    {
        x = of_each_warp(__reduce_min_sync(ALL_LANES, x), lane == 0);
        return __reduce_min_sync(ALL_LANES, lane < warps ? x : ~0u);
    }

    // The sum over the threads before this one; `total` is that over all.
    __device__ uint32 sum_before(uint32 x, uint32& total)
    {
        uint32 upto = x;
#pragma unroll
        for (int step = 1; step < 32; step *= 2) {
            const uint32 other = __shfl_up_sync(ALL_LANES, upto, step);
            if (lane >= step) upto += other;
        }
        const uint32 each = of_each_warp(upto, lane == 31);
        total = __reduce_add_sync(ALL_LANES, lane < warps ? each : 0);
        return upto - x + __reduce_add_sync(ALL_LANES, lane < warp ? each : 0);
    }

    __device__ uint32 greatest(uint32 x)
    {
        x = of_each_warp(__reduce_max_sync(ALL_LANES, x), lane == 0);
        return __reduce_max_sync(ALL_LANES, lane < warps ? x : 0);
    }

    __device__ void barrier()
    {
        // What the caller says.
        __syncthreads();
    }
};
