// The keys and values of newly committed rows, into the contexts of a block drafter.
//
// One block a row and layer: it makes the row's cosines and sines, and its warps take a head each. The row of position
// p is row p % W of its context; rows beyond `kept`, and those that later ones of the same call would write over, write
// nothing. lengths and kept of inert slots may be anything.
//
//   projected       (B J, layers 2 H E)  keys, before norm and rotation, and values of each layer
//   context_keys    (layers, B, H, E, W), layers `key_stride` apart
//   context_values  (layers, B, H, W, E), layers `value_stride` apart
//   lengths, kept   int32 (B)            the rows are the last of lengths - 1 committed ones
//   key_norms       (layers, E)
//   frequencies     float64 (E / 2)
#include "heads.cuh"

constexpr int32 THREADS = 128;
constexpr int32 MOST_PAIRS = 128;  // E / 2; `block_attention.py` says it too

template <typename T>
__device__ __forceinline__ void append(
    T* context_keys, T* context_values, const T* __restrict__ projected, const int32* __restrict__ lengths,
    const int32* __restrict__ kept, const T* __restrict__ key_norms, const double* __restrict__ frequencies, double eps,
    int32 J, int32 H, int32 E, int32 W, int64 key_stride, int64 value_stride)
{
    wait_for_earlier();
    __shared__ Wide<T> cosines[MOST_PAIRS], sines[MOST_PAIRS];
    const int64 layers = gridDim.y, layer = blockIdx.y, b = blockIdx.x / J;
    const int32 j = blockIdx.x % J, rows = min(kept[b], J), lane = threadIdx.x % 32;
    const int64 position = int64(lengths[b]) - 1 - rows + j;
    if (j >= rows || rows - j > W || position < 0) return;
    turn_rows(position, 1, frequencies, E / 2, cosines, sines, int32(threadIdx.x), THREADS);
    // The angles, to all warps.
    __syncthreads();
    const T* keys = projected + (int64(blockIdx.x) * layers + layer) * 2 * H * E;
    const int64 row = int32(position) % W;
    for (int32 h = threadIdx.x / 32; h < H; h += THREADS / 32) {
        T* key = context_keys + layer * key_stride + (b * H + h) * E * W + row;
        place_head(keys + h * E, key_norms + layer * E, eps, E / 2, cosines, sines, lane, key, int64(W));
        T* value = context_values + layer * value_stride + ((b * H + h) * W + row) * E;
        for (int32 e = lane; e < E; e += 32) value[e] = keys[(H + h) * E + e];
    }
}

#define APPEND(name, T)                                                                                              \
    extern "C" __global__ void __launch_bounds__(THREADS) name(                                                      \
        T* context_keys, T* context_values, const T* projected, const int32* lengths, const int32* kept,             \
        const T* key_norms, const double* frequencies, double eps, int32 J, int32 H, int32 E, int32 W,               \
        int64 key_stride, int64 value_stride)                                                                        \
    {                                                                                                                \
        append(context_keys, context_values, projected, lengths, kept, key_norms, frequencies, eps, J, H, E, W,      \
               key_stride, value_stride);                                                                            \
    }

APPEND(append_context_bf16, __nv_bfloat16)
APPEND(append_context_f32, float)
APPEND(append_context_f64, double)
