// Cache compaction, all layers in one launch: row prefix_len + node_indices[k] becomes row prefix_len + k.
//
// `pieces` blocks a request share its layers * words: a thread has one word of them, which is one column of one layer,
// in every row that moves, so that no thread reads what another writes. Indices grow along a path, so that
// node_indices[k] >= k: once row k has been written, nothing at or before it is read again, and moving the rows in
// order, some at a time, is as if all were read before any is written.
//
//   cache         (layers, pages, S, words)  of the widest word that divides a row and that memory is aligned to
//   page_table    int32 (B, max_pages)       read for rows that move
//   prefix_lens   int32 (B)
//   node_indices  int32 (B, width)           width = L + 1
//   lengths       int32 (B)
//
// Version 1 moved one row at a time: a thread waited for memory once a row.
// Version 2, this one, has the loads of ROWS rows under way at a time.
#include "common.cuh"

constexpr int32 THREADS = 128;
constexpr int32 ROWS = 8;

template <typename Word>
__device__ __forceinline__ void move_rows(
    Word* __restrict__ cache, const int32* __restrict__ page_table, const int32* __restrict__ prefix_lens,
    const int32* __restrict__ node_indices, const int32* __restrict__ lengths, int64 layers, int64 pages, int32 S,
    int64 words, int32 max_pages, int32 width, uint32 pieces)
{
    // Rows of a layer by their place in memory, of THREADS places of the path; equal where nothing moves.
    __shared__ int64 from[THREADS], to[THREADS];
    const int64 b = blockIdx.x / pieces, item = int64(blockIdx.x % pieces) * THREADS + threadIdx.x;
    const int64 layer = item / words, column = item % words;
    Word* here = cache + layer * pages * S * words + column;
    const int32 length = lengths[b];
    const int64 prefix = prefix_lens[b];

    for (int32 begin = 0; begin < length; begin += THREADS) {
        const int32 place = begin + threadIdx.x, index = place < width ? node_indices[b * width + place] : -1;
        int64 source = 0, target = 0;
        if (place < length && index != place) {
            const int64 of = prefix + index, at = prefix + place;
            source = int64(page_table[b * max_pages + of / S]) * S + of % S;
            target = int64(page_table[b * max_pages + at / S]) * S + at % S;
        }
        from[threadIdx.x] = source;
        to[threadIdx.x] = target;
        // Where rows come from and go to, to all threads.
        __syncthreads();
        const int32 count = min(length - begin, THREADS);
        for (int32 k = 0; layer < layers && k < count; k += ROWS) {
            Word moved[ROWS];
#pragma unroll
            for (int32 i = 0; i < ROWS; ++i)
                if (k + i < count && from[k + i] != to[k + i]) moved[i] = here[from[k + i] * words];
#pragma unroll
            for (int32 i = 0; i < ROWS; ++i)
                if (k + i < count && from[k + i] != to[k + i]) here[to[k + i] * words] = moved[i];
        }
        // All threads are through with the places, before those of the next part.
        __syncthreads();
    }
}

#define MOVE_ROWS(name, Word)                                                                                      \
    extern "C" __global__ void __launch_bounds__(THREADS) name(                                                    \
        Word* cache, const int32* page_table, const int32* prefix_lens, const int32* node_indices,                 \
        const int32* lengths, int64 layers, int64 pages, int32 S, int64 words, int32 max_pages, int32 width,       \
        uint32 pieces)                                                                                             \
    {                                                                                                              \
        wait_for_earlier();                                                                                        \
        move_rows(                                                                                                 \
            cache, page_table, prefix_lens, node_indices, lengths, layers, pages, S, words, max_pages, width, pieces); \
    }

MOVE_ROWS(move_rows_1, unsigned char)
MOVE_ROWS(move_rows_2, unsigned short)
MOVE_ROWS(move_rows_4, uint32)
MOVE_ROWS(move_rows_8, uint64)
MOVE_ROWS(move_rows_16, uint4)
