// Rows from where a number in memory says: what is read is known when the kernel runs, and not when it is captured.
//
// A thread has WORDS words of a result, a block's threads side by side; grid y is the array.
//
//   slots  int64 (A, 2)                 of each array, address of its rows, and words of each
//   out    (A, count / pitch, pitch)    words; behind a row's words, `fill`
#include "common.cuh"

constexpr int32 THREADS = 256;
constexpr int32 WORDS = 4;

__device__ __forceinline__ void set(unsigned short& word, uint32 fill) { word = (unsigned short)fill; }
__device__ __forceinline__ void set(uint32& word, uint32 fill) { word = fill; }
__device__ __forceinline__ void set(uint4& word, uint32 fill) { word = make_uint4(fill, fill, fill, fill); }

template <typename Word>
__device__ __forceinline__ void copy_rows(
    const int64* __restrict__ slots, Word* __restrict__ out, int64 count, int64 pitch, uint32 fill)
{
    __shared__ int64 slot[2];
    if (threadIdx.x < 2) slot[threadIdx.x] = slots[2 * blockIdx.y + threadIdx.x];
    // The slot, to all threads: it may be in the host's memory, from where each read takes a microsecond.
    __syncthreads();
    const Word* rows = reinterpret_cast<const Word*>(slot[0]);
    const int64 width = slot[1], begin = int64(blockIdx.x) * THREADS * WORDS + threadIdx.x;
    out += blockIdx.y * count;
#pragma unroll
    for (int32 i = 0; i < WORDS; ++i) {
        const int64 place = begin + i * THREADS;
        if (place >= count) return;
        const int64 row = pitch == count ? 0 : place / pitch, column = place - row * pitch;
        Word word;
        set(word, fill);
        if (column < width) word = rows[row * width + column];
        out[place] = word;
    }
}

#define COPY_ROWS(name, Word)                                                                                       \
    extern "C" __global__ void __launch_bounds__(THREADS) name(                                                     \
        const int64* slots, Word* out, int64 count, int64 pitch, uint32 fill)                                       \
    {                                                                                                               \
        copy_rows(slots, out, count, pitch, fill);                                                                  \
    }

COPY_ROWS(copy_rows_2, unsigned short)
COPY_ROWS(copy_rows_4, uint32)
COPY_ROWS(copy_rows_16, uint4)
