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

// CuPy compiles with -ftz=true, which takes subnormal float32 numbers for 0 in conversions, comparisons and arithmetic;
// these do not.
__device__ __forceinline__ double widened(float x)
{
    double wide;
    asm("cvt.f64.f32 %0, %1;" : "=d"(wide) : "f"(x));
    return wide;
}

__device__ __forceinline__ double widened(double x) { return x; }

template <typename X> __device__ __forceinline__ X narrowed(double x) { return x; }
template <> __device__ __forceinline__ float narrowed<float>(double x)
{
    float narrow;
    asm("cvt.rn.f32.f64 %0, %1;" : "=f"(narrow) : "d"(x));
    return narrow;
}

__device__ __forceinline__ bool is_greater(float x, float y)
{
    uint32 greater;
    asm("{\n\t.reg .pred p;\n\tsetp.gt.f32 p, %1, %2;\n\tselp.u32 %0, 1, 0, p;\n\t}" : "=r"(greater) : "f"(x), "f"(y));
    return greater != 0;
}

__device__ __forceinline__ bool is_greater(double x, double y) { return x > y; }

// The launch before this one on the stream may still run, if this one was launched early (see `launch` of program.py):
// what it writes is there behind this. The launch after this one may begin at once, for which it has the same line. Only
// weights are `__restrict__` in such a kernel: what an earlier launch writes must not come by read-only loads, which may
// see what was there before.
__device__ __forceinline__ void wait_for_earlier()
{
    asm volatile("griddepcontrol.launch_dependents;\n\tgriddepcontrol.wait;" ::: "memory");
}
