// Rows from where a number in memory says: what is read is known when the kernel runs, and not when it is captured.
//
// A thread has WORDS words of the result, a block's threads side by side.
//
//   slot  int64 (2)             address of the rows, and words of each
//   out   (count / pitch, pitch) words; behind a row's words, `fill`
#include "common.cuh"

constexpr int32 THREADS = 256;
constexpr int32 WORDS = 4;

__device__ __forceinline__ void set(unsigned short& word, uint32 fill) { word = (unsigned short)fill; }
__device__ __forceinline__ void set(uint32& word, uint32 fill) { word = fill; }
__device__ __forceinline__ void set(uint4& word, uint32 fill) { word = make_uint4(fill, fill, fill, fill); }

template <typename Word>
__device__ __forceinline__ void copy_rows(
    const int64* __restrict__ slot, Word* __restrict__ out, int64 count, int64 pitch, uint32 fill)
{
    const Word* rows = reinterpret_cast<const Word*>(slot[0]);
    const int64 width = slot[1], begin = int64(blockIdx.x) * THREADS * WORDS + threadIdx.x;
#pragma unroll
    for (int32 i = 0; i < WORDS; ++i) {
        const int64 place = begin + i * THREADS, row = place / pitch, column = place - row * pitch;
        if (place >= count) return;
        Word word;
        set(word, fill);
        if (column < width) word = rows[row * width + column];
        out[place] = word;
    }
}

#define COPY_ROWS(name, Word)                                                                                       \
    extern "C" __global__ void __launch_bounds__(THREADS) name(                                                     \
        const int64* slot, Word* out, int64 count, int64 pitch, uint32 fill)                                        \
    {                                                                                                               \
        copy_rows(slot, out, count, pitch, fill);                                                                   \
    }

COPY_ROWS(copy_rows_2, unsigned short)
COPY_ROWS(copy_rows_4, uint32)
COPY_ROWS(copy_rows_16, uint4)
