// The mask of a tree behind its prefix: 0 where a node sees a cache row, the type's least number elsewhere.
//
// A block has COLUMNS columns of one slot's row, of which there are as many as memory has room for; column c stands for
// row first_row + c. A request's committed tokens are rows [0, prefix_len), node j is row tree_row + j, and what lies
// between is seen by none. An unused slot sees what the root sees. A window of 2^62 is none.
//
//   visibility_words           uint32 (B, N, W)
//   depths                     int32 (B, N)
//   node_counts, prefix_lens   int32 (B)
//   geometry                   int64 (3)         tree_row, first_row, columns
//   mask                       (B, N, columns)   written in full
#include "floats.cuh"

constexpr int32 THREADS = 256;
constexpr int32 COLUMNS = 1024;

template <typename T> __device__ __forceinline__ T least();
template <> __device__ __forceinline__ __half least<__half>() { return __ushort_as_half(0xFBFF); }
template <> __device__ __forceinline__ __nv_bfloat16 least<__nv_bfloat16>() { return __ushort_as_bfloat16(0xFF7F); }
template <> __device__ __forceinline__ float least<float>() { return __int_as_float(0xFF7FFFFF); }
template <> __device__ __forceinline__ double least<double>() { return __longlong_as_double(0xFFEFFFFFFFFFFFFFLL); }

template <typename T>
__device__ __forceinline__ void fill_mask(
    const uint32* __restrict__ visibility_words, const int32* __restrict__ depths,
    const int32* __restrict__ node_counts, const int32* __restrict__ prefix_lens, const int64* __restrict__ geometry,
    T* __restrict__ mask, int32 N, int64 window)
{
    const int64 tree_row = geometry[0], first_row = geometry[1], columns = geometry[2];
    const int64 slot = blockIdx.x, b = slot / N;
    const int32 words = (N + 31) / 32;
    const int64 node = slot - b * N < node_counts[b] ? slot : b * N;
    const int64 prefix = prefix_lens[b], unseen = prefix + depths[node] - window;  // the last position out of the window
    const int64 begin = int64(blockIdx.y) * COLUMNS, end = min(begin + COLUMNS, columns);

    for (int64 column = begin + threadIdx.x; column < end; column += THREADS) {
        const int64 row = first_row + column, other = row - tree_row;
        bool seen = row < prefix && row > unseen;
        if (other >= 0 && other < N) {
            const uint32 word = visibility_words[node * words + other / 32];
            seen = (word >> (other % 32) & 1u) != 0 && prefix + depths[b * N + other] > unseen;
        }
        mask[slot * columns + column] = seen ? rounded<T>(Wide<T>(0)) : least<T>();
    }
}

#define FILL_MASK(name, T)                                                                                          \
    extern "C" __global__ void __launch_bounds__(THREADS) name(                                                     \
        const uint32* visibility_words, const int32* depths, const int32* node_counts, const int32* prefix_lens,    \
        const int64* geometry, T* mask, int32 N, int64 window)                                                      \
    {                                                                                                               \
        fill_mask(visibility_words, depths, node_counts, prefix_lens, geometry, mask, N, window);                   \
    }

FILL_MASK(fill_mask_f16, __half)
FILL_MASK(fill_mask_bf16, __nv_bfloat16)
FILL_MASK(fill_mask_f32, float)
FILL_MASK(fill_mask_f64, double)
