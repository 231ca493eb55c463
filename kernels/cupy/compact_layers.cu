// Cache compaction of arrays (B, heads, rows, width) of their own, all of them in one launch: row tree_row +
// node_indices[k] becomes row prefix_len + k.
//
// A block has one head of one request in one array; a thread has a word of its rows, in every row that moves, so that no
// thread reads what another writes. tree_row >= prefix_len and node_indices[k] >= k grows along a path: once row k has
// been written, nothing at or before it is read again, and moving the rows in order, some at a time, is as if all were
// read before any is written.
//
//   arrays                  (A)             see Layer
//   prefix_lens, tree_rows  int32 (B)
//   node_indices            int32 (B, width)
//   lengths                 int32 (B)
#include "common.cuh"

constexpr int32 THREADS = 128;
constexpr int32 ROWS = 8;

struct Layer {
    char* memory;
    int64 request, head, row;  // bytes from one to the next
    int64 heads, words;        // of a row
    int64 first;               // row of the cache that is the array's first
};

template <typename Word>
__device__ __forceinline__ void move_layer_rows(
    const Layer* __restrict__ arrays, const int32* __restrict__ prefix_lens, const int32* __restrict__ tree_rows,
    const int32* __restrict__ node_indices, const int32* __restrict__ lengths, int32 width)
{
    const Layer layer = arrays[blockIdx.y];
    const int64 head = blockIdx.x, b = blockIdx.z;
    if (head >= layer.heads) return;
    char* here = layer.memory + b * layer.request + head * layer.head;
    const int64 target = prefix_lens[b] - layer.first, source = tree_rows[b] - layer.first;
    const int32* path = node_indices + b * width;
    const int32 length = lengths[b];

    for (int64 column = threadIdx.x; column < layer.words; column += THREADS)
        for (int32 k = 0; k < length; k += ROWS) {
            Word moved[ROWS];
#pragma unroll
            for (int32 i = 0; i < ROWS; ++i)
                if (k + i < length)
                    moved[i] = reinterpret_cast<const Word*>(here + (source + path[k + i]) * layer.row)[column];
#pragma unroll
            for (int32 i = 0; i < ROWS; ++i)
                if (k + i < length) reinterpret_cast<Word*>(here + (target + k + i) * layer.row)[column] = moved[i];
        }
}

#define MOVE_LAYER_ROWS(name, Word)                                                                                 \
    extern "C" __global__ void __launch_bounds__(THREADS) name(                                                     \
        const Layer* arrays, const int32* prefix_lens, const int32* tree_rows, const int32* node_indices,           \
        const int32* lengths, int32 width)                                                                          \
    {                                                                                                               \
        move_layer_rows<Word>(arrays, prefix_lens, tree_rows, node_indices, lengths, width);                        \
    }

MOVE_LAYER_ROWS(move_layer_rows_2, unsigned short)
MOVE_LAYER_ROWS(move_layer_rows_4, uint32)
MOVE_LAYER_ROWS(move_layer_rows_8, uint64)
MOVE_LAYER_ROWS(move_layer_rows_16, uint4)
