// What every program shares: types, the statement of shared memory, and loads of each floating type.
// NVRTC has no <cstdint>; the sizes below are the same on every platform that CUDA supports.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

using int32 = int;
using uint32 = unsigned;
using int64 = long long;
using uint64 = unsigned long long;

constexpr uint32 ALL_LANES = 0xFFFFFFFFu;
constexpr uint32 MOST_SHARED = 101376;  // bytes a block on sm_120, static and dynamic together

// The most dynamic shared memory that kernel `name` is launched with. The launcher and the compile gate read it.
#define DDTREE_SHARED(name, bytes)                                                  \
    static_assert((bytes) <= MOST_SHARED, #name " needs more than sm_120 has");     \
    extern "C" __constant__ const uint32 ddtree_shared_##name = (bytes)

__device__ __forceinline__ float minus_infinity() { return __int_as_float(0xFF800000); }

// An element as the type that is calculated in.
__device__ __forceinline__ float load(const float* p) { return *p; }
__device__ __forceinline__ float load(const __half* p) { return __half2float(*p); }
__device__ __forceinline__ float load(const __nv_bfloat16* p) { return __bfloat162float(*p); }
__device__ __forceinline__ double load(const double* p) { return *p; }
