// Thread block clusters: blocks that run at the same time and read each other's shared memory. sm_90 and up.
//
// A kernel is compiled for its cluster by `__cluster_dims__`, or launched with one (see `launch` of program.py). What its
// blocks share is declared `__shared__` as ever. A block may read another's memory between two `cluster_sync`: the first
// makes what was written visible, the second says that it has been read, so that its owner may write again or end.
#pragma once

#include "common.cuh"

// All threads of the cluster meet here; what they have written is visible to all behind it.
__device__ __forceinline__ void cluster_sync()
{
    asm volatile("barrier.cluster.arrive.release;\n\tbarrier.cluster.wait.acquire;" ::: "memory");
}

// The place of this block in its cluster.
__device__ __forceinline__ uint32 cluster_rank()
{
    uint32 rank;
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}

// The blocks of this cluster.
__device__ __forceinline__ uint32 cluster_size()
{
    uint32 size;
    asm("mov.u32 %0, %%cluster_nctaid.x;" : "=r"(size));
    return size;
}

// Where what lies at `own` in this block's shared memory lies in block `rank` of the cluster.
__device__ __forceinline__ uint32 address_in_block(uint32 own, uint32 rank)
{
    uint32 address;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(address) : "r"(own), "r"(rank));
    return address;
}

__device__ __forceinline__ uint32 address_in_block(const void* own, uint32 rank)
{
    return address_in_block(uint32(__cvta_generic_to_shared(own)), rank);
}

// From such an address.
__device__ __forceinline__ float load_from_cluster(uint32 at)
{
    float x;
    asm volatile("ld.shared::cluster.f32 %0, [%1];" : "=f"(x) : "r"(at) : "memory");
    return x;
}

__device__ __forceinline__ float4 load4_from_cluster(uint32 at)
{
    float4 x;
    asm volatile("ld.shared::cluster.v4.f32 {%0,%1,%2,%3}, [%4];"
                 : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w) : "r"(at) : "memory");
    return x;
}

__device__ __forceinline__ uint32 read_from_block(const uint32* own, uint32 rank)
{
    uint32 value;
    asm volatile("ld.shared::cluster.u32 %0, [%1];" : "=r"(value) : "r"(address_in_block(own, rank)) : "memory");
    return value;
}

__device__ __forceinline__ uint64 read_from_block(const uint64* own, uint32 rank)
{
    uint64 value;
    asm volatile("ld.shared::cluster.u64 %0, [%1];" : "=l"(value) : "r"(address_in_block(own, rank)) : "memory");
    return value;
}

__device__ __forceinline__ float read_from_block(const float* own, uint32 rank)
{
    return load_from_cluster(address_in_block(own, rank));
}

__device__ __forceinline__ double read_from_block(const double* own, uint32 rank)
{
    return __longlong_as_double(int64(read_from_block(reinterpret_cast<const uint64*>(own), rank)));
}
