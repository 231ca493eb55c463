// Products of few rows with the rows of a weight matrix, y = x W^T, which are bound by reading W once.
//
// Both forms below work on a tile: some tokens (rows of x) and some rows of W. What a tile's tokens are, and what
// becomes of a sum, its caller says: input(t) points to token t's row, store(t, o, sum, other) gets a sum as it is
// done. PAIRED takes a gate and an up matrix that lie behind each other, and gives both sums of an output at once.
// With a `gain`, x is RMS-normalised: its elements are multiplied by the gain on the way, and the sums by the scale,
// for which the squares are added up beside them.
//
// The warps of a block share the columns, in parts; nothing but W's type and width decides what is added up in which
// order, so that a token's sums have the same bits in every tile. W and x go from memory straight to registers, 16
// bytes a lane and load: with a part of a few loads, all of them are under way at once.
//
// Version 1 shared columns between the lanes of one warp, by single elements. Version 2 had a ring of stages in shared
// memory, filled by cp.async, and a cluster of blocks that shared the columns. Version 3 is this one.
#pragma once

#include "floats.cuh"

constexpr int32 MOST_PARTS = 8;  // warps of a block; `linear.py` says it too

template <typename T, int32 N> struct alignas(N * sizeof(T)) Chunk {
    T values[N];
};

template <int32 N, typename T> __device__ __forceinline__ Chunk<T, N> load_chunk(const T* p)
{
    return *reinterpret_cast<const Chunk<T, N>*>(p);
}

// The part of `warps` that this warp has of `count` things: the first and the end.
__device__ __forceinline__ void own_part(int32 count, int32& begin, int32& end)
{
    const int32 parts = blockDim.x / 32, share = (count + parts - 1) / parts;
    begin = min(int32(threadIdx.x) / 32 * share, count);
    end = min(begin + share, count);
}

// Sums of COUNT values each over a warp's lanes; a lane gets that of value lane / (32 / COUNT). In each step half of
// the values that are left go to the lane STEP away: whatever COUNT is, the same pairs of lanes are added.
template <int32 COUNT, int32 STEP = 16, typename X> __device__ __forceinline__ X sum_over_lanes(const X (&values)[COUNT])
{
    constexpr int32 LEFT = COUNT > 1 ? COUNT / 2 : 1;
    X sums[LEFT];
    const bool upper = threadIdx.x & STEP;
#pragma unroll
    for (int32 i = 0; i < LEFT; ++i) {
        const X low = values[i], high = values[COUNT > 1 ? i + LEFT : i];
        sums[i] = (upper ? high : low) + __shfl_xor_sync(ALL_LANES, upper ? low : high, STEP);
    }
    if constexpr (STEP > 1)
        return sum_over_lanes<LEFT, STEP / 2>(sums);
    else
        return sums[0];
}

// By fused multiplications and additions, N columns a load. A thread has TOKENS times ROWS sums (of PAIRED, half of the
// rows gate's and half up's), and a warp's lanes share its part of the columns.
template <int32 TOKENS, int32 ROWS, int32 N, bool PAIRED, typename X, typename W, typename Input, typename Store>
__device__ __forceinline__ void multiply_by_fma(
    const W* __restrict__ weights, const X* __restrict__ gain, double eps, int32 outputs, int32 width, int32 tokens,
    int32 output_block, Input input, Store store)
{
    using Sum = Wide<X>;
    constexpr int32 OUTPUTS = PAIRED ? ROWS / 2 : ROWS, SUMS = TOKENS * ROWS, AT_ONCE = SUMS < 32 ? SUMS : 32;
    constexpr int32 STRIDE = 32 * N;
    __shared__ Sum partial[MOST_PARTS][SUMS + TOKENS];  // a token's ROWS sums, and behind all of them the squares
    const int32 lane = threadIdx.x % 32, warp = threadIdx.x / 32, first = output_block * OUTPUTS;

    const W* rows[ROWS];
#pragma unroll
    for (int32 r = 0; r < ROWS; ++r) {
        const int32 output = min(first + r % OUTPUTS, outputs - 1);  // a row too many is added up and not stored
        rows[r] = weights + (int64(r / OUTPUTS) * outputs + output) * width;
    }
    int32 begin, end;
    own_part((width + STRIDE - 1) / STRIDE, begin, end);
    begin = begin * STRIDE + lane * N;
    end = min(end * STRIDE, width);
    const X* x[TOKENS];
#pragma unroll
    for (int32 t = 0; t < TOKENS; ++t) x[t] = input(min(t, tokens - 1));
    Sum sums[SUMS] = {}, squares[TOKENS] = {};
#pragma unroll(TOKENS <= 2 ? 4 : 1)
    for (int32 k = begin; k < end; k += STRIDE) {
        Chunk<W, N> w[ROWS];
#pragma unroll
        for (int32 r = 0; r < ROWS; ++r) w[r] = load_chunk<N>(rows[r] + k);
        Chunk<X, N> g;
        if (gain) g = load_chunk<N>(gain + k);
#pragma unroll
        for (int32 t = 0; t < TOKENS; ++t) {
            const Chunk<X, N> own = load_chunk<N>(x[t] + k);
#pragma unroll
            for (int32 j = 0; j < N; ++j) {
                Sum value = load(&own.values[j]);
                if (gain) {
                    squares[t] += value * value;
                    value *= load(&g.values[j]);
                }
#pragma unroll
                for (int32 r = 0; r < ROWS; ++r) sums[t * ROWS + r] += value * load(&w[r].values[j]);
            }
        }
    }
#pragma unroll
    for (int32 some = 0; some < SUMS; some += AT_ONCE) {
        Sum values[AT_ONCE];
#pragma unroll
        for (int32 i = 0; i < AT_ONCE; ++i) values[i] = sums[some + i];
        const Sum sum = sum_over_lanes(values);
        if (lane % (32 / AT_ONCE) == 0) partial[warp][some + lane / (32 / AT_ONCE)] = sum;
    }
    if (gain) {
        const Sum sum = sum_over_lanes(squares);
        if (lane % (32 / TOKENS) == 0) partial[warp][SUMS + lane / (32 / TOKENS)] = sum;
    }
    // Each part's sums, to all threads.
    __syncthreads();
    for (int32 i = threadIdx.x; i < TOKENS * OUTPUTS; i += blockDim.x) {
        const int32 t = i / OUTPUTS, o = i % OUTPUTS;
        Sum sum = 0, other = 0, square = 0;
        for (int32 part = 0; part < blockDim.x / 32; ++part) {
            sum += partial[part][t * ROWS + o];
            if (PAIRED) other += partial[part][t * ROWS + OUTPUTS + o];
            if (gain) square += partial[part][SUMS + t];
        }
        if (gain) {
            const Sum scale = scale_of(square, width, eps);
            sum *= scale;
            other *= scale;
        }
        if (t < tokens && first + o < outputs) store(t, first + o, sum, other);
    }
}

// By tensor cores, for f16 and bf16 of widths that are multiples of 8 and rows that are aligned to 16 bytes. W stands on
// the side of mma.m16n8k16 that takes 16 rows, so that a few tokens fill the side that takes 8, and eights of tokens
// that are not there cost nothing. Columns may stand in any order, as long as W's and x's is the same: of 32 columns,
// a lane's load of 8 gives it both halves of two mma. The product of x and the gain is rounded to their type.
__device__ constexpr int32 mma_pitch(int32 rows) { return rows + 4; }  // of a token's sums, in floats

__device__ constexpr int32 mma_bytes(int32 tokens, int32 rows) { return MOST_PARTS * tokens * mma_pitch(rows) * 4; }

__device__ __forceinline__ void mma(float (&sums)[4], const uint4& low, const uint4& high, const uint4& x, const __half*)
{
#define DDTREE_MMA(a, b, type)                                                                                         \
    asm("mma.sync.aligned.m16n8k16.row.col.f32." type "." type ".f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "   \
        "{%0, %1, %2, %3};"                                                                                            \
        : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])                                                   \
        : "r"(low.a), "r"(high.a), "r"(low.b), "r"(high.b), "r"(x.a), "r"(x.b))
    DDTREE_MMA(x, y, "f16");
    DDTREE_MMA(z, w, "f16");
}

__device__ __forceinline__ void mma(
    float (&sums)[4], const uint4& low, const uint4& high, const uint4& x, const __nv_bfloat16*)
{
    DDTREE_MMA(x, y, "bf16");
    DDTREE_MMA(z, w, "bf16");
}

__device__ __forceinline__ float2 both(__half2 x) { return __half22float2(x); }
__device__ __forceinline__ float2 both(__nv_bfloat162 x) { return __bfloat1622float2(x); }
template <typename T> struct Twice;
template <> struct Twice<__half> { using type = __half2; };
template <> struct Twice<__nv_bfloat16> { using type = __nv_bfloat162; };

// Adds the squares of a chunk of x, and multiplies it by the gain.
template <typename T> __device__ __forceinline__ void take_gain(uint4& x, const uint4& gain, float& squares)
{
    using Two = typename Twice<T>::type;
    Two* own = reinterpret_cast<Two*>(&x);
    const Two* g = reinterpret_cast<const Two*>(&gain);
#pragma unroll
    for (int32 i = 0; i < 4; ++i) {
        const float2 two = both(own[i]);
        squares += two.x * two.x;
        squares += two.y * two.y;
        own[i] = __hmul2(own[i], g[i]);
    }
}

template <int32 TOKENS, int32 ROWS, bool PAIRED, typename T, typename Input, typename Store>
__device__ __forceinline__ void multiply_by_mma(
    const T* __restrict__ weights, const T* __restrict__ gain, double eps, int32 outputs, int32 width, int32 tokens,
    int32 output_block, Input input, Store store)
{
    constexpr int32 OUTPUTS = PAIRED ? ROWS / 2 : ROWS, ROW_TILES = ROWS / 16, TILES = TOKENS / 8;
    constexpr int32 STRIDE = 32, CHUNK = 8, PITCH = mma_pitch(ROWS);
    extern __shared__ __align__(16) float partial[];  // (parts, TOKENS, PITCH), the squares at ROWS
    const int32 lane = threadIdx.x % 32, warp = threadIdx.x / 32, first = output_block * OUTPUTS;

    const T* rows[ROW_TILES][2];  // lane / 4 and 8 more, of each 16
#pragma unroll
    for (int32 m = 0; m < ROW_TILES; ++m) {
#pragma unroll
        for (int32 i = 0; i < 2; ++i) {
            const int32 r = m * 16 + i * 8 + lane / 4, output = min(first + r % OUTPUTS, outputs - 1);
            rows[m][i] = weights + (int64(r / OUTPUTS) * outputs + output) * width;
        }
    }
    int32 begin, end;
    own_part((width + STRIDE - 1) / STRIDE, begin, end);
    begin = begin * STRIDE + lane % 4 * CHUNK;
    end = min(end * STRIDE, width);
    const T* x[TILES];
#pragma unroll
    for (int32 n = 0; n < TILES; ++n) x[n] = input(min(n * 8 + lane / 4, tokens - 1));
    float sums[ROW_TILES][TILES][4] = {}, squares[TILES] = {};
    // All lanes take part in mma, whether their columns are there or not.
    const uint4 nothing = {};
#pragma unroll(TOKENS == 8 ? 4 : 1)
    for (int32 k = begin, base = begin - lane % 4 * CHUNK; base < end; k += STRIDE, base += STRIDE) {
        const bool there = k < end;
        uint4 w[ROW_TILES][2], own[TILES], g = nothing;
#pragma unroll
        for (int32 m = 0; m < ROW_TILES; ++m) {
#pragma unroll
            for (int32 i = 0; i < 2; ++i)
                w[m][i] = there ? *reinterpret_cast<const uint4*>(rows[m][i] + k) : nothing;
        }
        if (gain && there) g = *reinterpret_cast<const uint4*>(gain + k);
#pragma unroll
        for (int32 n = 0; n < TILES; ++n)
            own[n] = there && n * 8 < tokens ? *reinterpret_cast<const uint4*>(x[n] + k) : nothing;
#pragma unroll
        for (int32 n = 0; n < TILES; ++n) {
            if (n * 8 >= tokens) break;
            if (gain) take_gain<T>(own[n], g, squares[n]);
#pragma unroll
            for (int32 m = 0; m < ROW_TILES; ++m) mma(sums[m][n], w[m][0], w[m][1], own[n], weights);
        }
    }
#pragma unroll
    for (int32 n = 0; n < TILES; ++n) {
        if (n * 8 >= tokens) break;
#pragma unroll
        for (int32 m = 0; m < ROW_TILES; ++m) {
#pragma unroll
            for (int32 i = 0; i < 4; ++i) {
                const int32 r = m * 16 + lane / 4 + i / 2 * 8, t = n * 8 + lane % 4 * 2 + i % 2;
                partial[(warp * TOKENS + t) * PITCH + r] = sums[m][n][i];
            }
        }
        if (gain) {
            float square = squares[n];
            square += __shfl_xor_sync(ALL_LANES, square, 1);
            square += __shfl_xor_sync(ALL_LANES, square, 2);
            if (lane % 4 == 0) partial[(warp * TOKENS + n * 8 + lane / 4) * PITCH + ROWS] = square;
        }
    }
    // Each part's sums, to all threads.
    __syncthreads();
    for (int32 i = threadIdx.x; i < tokens * OUTPUTS; i += blockDim.x) {
        const int32 t = i / OUTPUTS, o = i % OUTPUTS;
        float sum = 0, other = 0, square = 0;
        for (int32 part = 0; part < blockDim.x / 32; ++part) {
            const float* own = partial + (part * TOKENS + t) * PITCH;
            sum += own[o];
            if (PAIRED) other += own[OUTPUTS + o];
            if (gain) square += own[ROWS];
        }
        if (gain) {
            const float scale = scale_of(square, width, eps);
            sum *= scale;
            other *= scale;
        }
        if (first + o < outputs) store(t, first + o, sum, other);
    }
}
