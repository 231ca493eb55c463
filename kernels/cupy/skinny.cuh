// Products of few rows with the rows of a weight matrix, y = x W^T, which are bound by reading W once.
//
// The forms below work on a tile: some tokens (rows of x) and some rows of W. What a tile's tokens are, and what
// becomes of a sum, its caller says: input(t) points to token t's row, store(t, o, sum, other) gets a sum as it is
// done. PAIRED takes a gate and an up matrix that lie behind each other, and gives both sums of an output at once.
// With a `gain`, x is RMS-normalised: its elements are multiplied by the gain on the way, and the sums by the scale,
// for which the squares are added up beside them.
//
// The warps of a block share the columns, in parts; nothing but W's type and width decides what is added up in which
// order, so that a token's sums have the same bits in every tile. W and x go from memory straight to registers, 16
// bytes a lane and load: with a part of a few loads, all of them are under way at once. The third form is for large
// matrices: its warps share the rows, and W and x come through a ring in shared memory.
#pragma once

#include "cluster.cuh"
#include "floats.cuh"

constexpr int32 FMA_PARTS = 4, MMA_PARTS = 8;  // the most warps of a block; `linear.py` says it too

// Brings the lines of some rows of W, which lie behind each other, to L2: before what they are multiplied with is there.
template <typename W> __device__ __forceinline__ void prefetch_rows(const W* rows, int64 count, int32 width)
{
    const auto* bytes = reinterpret_cast<const unsigned char*>(rows);
    for (int64 at = threadIdx.x * 128; at < count * width * int64(sizeof(W)); at += blockDim.x * 128)
        asm volatile("prefetch.global.L2 [%0];" ::"l"(bytes + at));
}

template <typename T, int32 N> struct alignas(N * sizeof(T)) Chunk {
    T values[N];
};

template <int32 N, typename T> __device__ __forceinline__ Chunk<T, N> load_chunk(const T* p)
{
    return *reinterpret_cast<const Chunk<T, N>*>(p);
}

// How W is read, of which a block needs each element once: through L1, or past it, so that x stays there.
struct ThroughL1 {
    static __device__ __forceinline__ uint4 load(const uint4* p) { return *p; }
};

struct PastL1 {
    static __device__ __forceinline__ uint4 load(const uint4* p)
    {
        uint4 x;
        asm("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
            : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
            : "l"(p));
        return x;
    }
};

template <typename Way, int32 N, typename T> __device__ __forceinline__ Chunk<T, N> load_weights(const T* p)
{
    if constexpr (sizeof(Chunk<T, N>) == sizeof(uint4)) {
        const uint4 x = Way::load(reinterpret_cast<const uint4*>(p));
        return reinterpret_cast<const Chunk<T, N>&>(x);
    } else {
        return load_chunk<N>(p);
    }
}

// The part that this warp has of `count` things, of a part a warp: the first and the end.
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
template <
    int32 TOKENS, int32 ROWS, int32 N, bool PAIRED, typename Way, typename X, typename W, typename Input, typename Store>
__device__ __forceinline__ void multiply_by_fma(
    const W* __restrict__ weights, const X* __restrict__ gain, double eps, int32 outputs, int32 width, int32 tokens,
    int32 output_block, Input input, Store store)
{
    using Sum = Wide<X>;
    constexpr int32 OUTPUTS = PAIRED ? ROWS / 2 : ROWS, SUMS = TOKENS * ROWS, AT_ONCE = SUMS < 32 ? SUMS : 32;
    constexpr int32 STRIDE = 32 * N;
    __shared__ Sum partial[FMA_PARTS][SUMS + TOKENS];  // a token's ROWS sums, and behind all of them the squares
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
#pragma unroll(SUMS <= 8 && ROWS < 8 ? 2 : 1)
    for (int32 k = begin; k < end; k += STRIDE) {
        Chunk<W, N> w[ROWS];
#pragma unroll
        for (int32 r = 0; r < ROWS; ++r) w[r] = load_weights<Way, N>(rows[r] + k);
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

__device__ constexpr int32 mma_bytes(int32 tokens, int32 rows) { return MMA_PARTS * tokens * mma_pitch(rows) * 4; }

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

template <int32 TOKENS, int32 ROWS, bool PAIRED, typename Way, typename T, typename Input, typename Store>
__device__ __forceinline__ void multiply_by_mma(
    const T* __restrict__ weights, const T* __restrict__ gain, double eps, int32 outputs, int32 width, int32 tokens,
    int32 output_block, Input input, Store store)
{
    constexpr int32 OUTPUTS = PAIRED ? ROWS / 2 : ROWS, ROW_TILES = ROWS / 16, TILES = TOKENS / 8;
    constexpr int32 STRIDE = 32, CHUNK = 8, PITCH = mma_pitch(ROWS), AT_ONCE = TOKENS == 8 ? 4 : 2;
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
    const uint4 nothing = {};
    // All lanes take part in mma, whether their columns are there or not.
    for (int32 base = begin - lane % 4 * CHUNK; base < end; base += AT_ONCE * STRIDE) {
        // All loads before the first branch, so that they are under way together.
        uint4 w[AT_ONCE][ROW_TILES][2], own[AT_ONCE][TILES], g[AT_ONCE];
#pragma unroll
        for (int32 u = 0; u < AT_ONCE; ++u) {
            const int32 k = base + u * STRIDE + lane % 4 * CHUNK;
            const bool there = k < end;
#pragma unroll
            for (int32 m = 0; m < ROW_TILES; ++m) {
#pragma unroll
                for (int32 i = 0; i < 2; ++i)
                    w[u][m][i] = there ? Way::load(reinterpret_cast<const uint4*>(rows[m][i] + k)) : nothing;
            }
#pragma unroll
            for (int32 n = 0; n < TILES; ++n)
                own[u][n] = there && n * 8 < tokens ? *reinterpret_cast<const uint4*>(x[n] + k) : nothing;
            g[u] = there && gain ? *reinterpret_cast<const uint4*>(gain + k) : nothing;
        }
#pragma unroll
        for (int32 u = 0; u < AT_ONCE; ++u) {
#pragma unroll
            for (int32 n = 0; n < TILES; ++n) {
                if (n * 8 >= tokens) break;
                if (gain) take_gain<T>(own[u][n], g[u], squares[n]);
#pragma unroll
                for (int32 m = 0; m < ROW_TILES; ++m) mma(sums[m][n], w[u][m][0], w[u][m][1], own[u][n], weights);
            }
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

// By tensor cores through a ring of some stages of shared memory, filled by cp.async, 64 columns at a time. A row of a
// stage is 128 bytes, its 8 chunks of 16 bytes in the order chunk ^ (row % 8), so that ldmatrix meets no bank twice. A
// warp has 16 rows of W (of PAIRED, the block's first half is gate's and the second up's) and all columns of the block's,
// which has all there are or, where rows are few, shares them with the others of its cluster: then each adds up some of
// the outputs over all blocks, in their order.
constexpr int32 RING_THREADS = 128, RING_ROWS = 64, STEP_BYTES = 128;

__device__ constexpr int32 ring_stages(int32 tokens) { return tokens > 32 ? 3 : 4; }

__device__ constexpr int32 ring_bytes(int32 tokens)
{
    return ring_stages(tokens) * (RING_ROWS + tokens) * STEP_BYTES;
}

__device__ __forceinline__ uint32 shared_address(const void* p) { return uint32(__cvta_generic_to_shared(p)); }

// 16 bytes from global to shared memory, under way until they are waited for; zeros where `there` is false.
__device__ __forceinline__ void copy_chunk(uint32 to, const void* from, bool there)
{
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(there ? 16 : 0) : "memory");
}

__device__ __forceinline__ void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }

template <int32 LEFT> __device__ __forceinline__ void wait_for_copies()
{
    asm volatile("cp.async.wait_group %0;" ::"n"(LEFT) : "memory");
}

__device__ __forceinline__ void load_matrices(uint32 (&four)[4], uint32 address)
{
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(four[0]), "=r"(four[1]), "=r"(four[2]), "=r"(four[3])
                 : "r"(address)
                 : "memory");
}

template <int32 TOKENS, bool PAIRED, typename T, typename Input, typename Store>
__device__ __forceinline__ void multiply_by_ring(
    const T* __restrict__ weights, int32 outputs, int32 width, int32 tokens, int32 output_block, Input input,
    Store store)
{
    constexpr int32 ROWS = RING_ROWS, OUTPUTS = PAIRED ? ROWS / 2 : ROWS, STAGE_BYTES = (ROWS + TOKENS) * STEP_BYTES;
    constexpr int32 COLUMNS = STEP_BYTES / sizeof(T), CHUNK = 16 / sizeof(T), TILES = TOKENS / 8;
    constexpr int32 ROWS_AT_ONCE = RING_THREADS / 8, X_COPIES = (TOKENS + ROWS_AT_ONCE - 1) / ROWS_AT_ONCE;
    constexpr int32 COPIES = ROWS / ROWS_AT_ONCE, OF_OUTPUTS = OUTPUTS / ROWS_AT_ONCE;
    constexpr int32 PITCH = ROWS + 4, STAGES = ring_stages(TOKENS);  // the former of the sums, in floats
    static_assert(TOKENS * PITCH * 4 <= STAGES * STAGE_BYTES, "the sums take the place of the stages");
    extern __shared__ __align__(128) float stages[];
    const int32 lane = threadIdx.x % 32, warp = threadIdx.x / 32, first = output_block * OUTPUTS;
    const int32 all_steps = (width + COLUMNS - 1) / COLUMNS, share = (all_steps + cluster_size() - 1) / cluster_size();
    const int32 begin = cluster_rank() * share * COLUMNS, own_width = min(width - begin, share * COLUMNS);
    const int32 steps = (max(own_width, 0) + COLUMNS - 1) / COLUMNS;

    // This thread's chunk of a step in each of its rows: of W every ROWS_AT_ONCE-th, and of x.
    const int32 chunk = threadIdx.x % 8, row = threadIdx.x / 8;
    const T* const from_w = weights + (int64(first) + row) * width + begin + chunk * CHUNK;
    const T* from_x[X_COPIES];
    uint32 there = 0;
#pragma unroll
    for (int32 i = 0; i < COPIES; ++i)
        there |= uint32(first + row + i % OF_OUTPUTS * ROWS_AT_ONCE < outputs) << i;
#pragma unroll
    for (int32 i = 0; i < X_COPIES; ++i) {
        const int32 t = row + i * ROWS_AT_ONCE;
        there |= uint32(t < tokens) << (16 + i);
        from_x[i] = input(min(t, tokens - 1)) + begin + chunk * CHUNK;
    }
    const uint32 base = shared_address(stages), place = row * STEP_BYTES + ((chunk ^ row % 8) << 4);
    const auto fetch = [&](int32 step) {
        const uint32 to = base + step % STAGES * STAGE_BYTES + place;
        const int32 column = step * COLUMNS;
        const bool inside = column + chunk * CHUNK < own_width;
#pragma unroll
        for (int32 i = 0; i < COPIES; ++i) {
            const bool is_there = inside && (there >> i & 1);
            const int64 below = i / OF_OUTPUTS * int64(outputs) + i % OF_OUTPUTS * ROWS_AT_ONCE;
            const T* const from = is_there ? from_w + below * width + column : from_x[0];
            copy_chunk(to + i * ROWS_AT_ONCE * STEP_BYTES, from, is_there);
        }
#pragma unroll
        for (int32 i = 0; i < X_COPIES; ++i) {
            const bool is_there = inside && (there >> (16 + i) & 1);
            const T* const from = is_there ? from_x[i] + column : from_x[0];
            if (TOKENS % ROWS_AT_ONCE == 0 || row + i * ROWS_AT_ONCE < TOKENS)
                copy_chunk(to + (ROWS + i * ROWS_AT_ONCE) * STEP_BYTES, from, is_there);
        }
    };

#pragma unroll
    for (int32 step = 0; step < STAGES - 1; ++step) {
        if (step < steps) fetch(step);
        commit_copies();
    }
    float sums[TILES][4] = {};
    for (int32 step = 0; step < steps; ++step) {
        wait_for_copies<STAGES - 2>();
        // The stage that has come, to all threads, which are through with the one that is filled next.
        __syncthreads();
        if (step + STAGES - 1 < steps) fetch(step + STAGES - 1);
        commit_copies();
        const uint32 stage = base + step % STAGES * STAGE_BYTES;
#pragma unroll
        for (int32 half = 0; half < 2; ++half) {  // of the step's four times 16 columns
            uint32 w[2][4];
#pragma unroll
            for (int32 i = 0; i < 2; ++i) {
                const int32 r = warp * 16 + lane % 16, c = half * 4 + i * 2 + lane / 16;
                load_matrices(w[i], stage + r * STEP_BYTES + ((c ^ r % 8) << 4));
            }
#pragma unroll
            for (int32 n = 0; n < TILES; ++n) {
                uint32 own[4];
                const int32 r = ROWS + n * 8 + lane % 8, c = half * 4 + lane / 8;
                load_matrices(own, stage + r * STEP_BYTES + ((c ^ r % 8) << 4));
                const uint4 low{w[0][0], w[0][2], w[1][0], w[1][2]}, high{w[0][1], w[0][3], w[1][1], w[1][3]};
                mma(sums[n], low, high, uint4{own[0], own[1], own[2], own[3]}, weights);
            }
        }
    }

    wait_for_copies<0>();
    // All threads are through with the stages, whose place the sums take.
    __syncthreads();
#pragma unroll
    for (int32 n = 0; n < TILES; ++n) {
#pragma unroll
        for (int32 i = 0; i < 4; ++i) {
            const int32 r = warp * 16 + lane / 4 + i / 2 * 8, t = n * 8 + lane % 4 * 2 + i % 2;
            stages[t * PITCH + r] = sums[n][i];
        }
    }
    // The sums over this block's columns, to the cluster.
    cluster_sync();
    const int32 split = cluster_size();
    for (int32 i = cluster_rank() * RING_THREADS + threadIdx.x; i < tokens * OUTPUTS; i += split * RING_THREADS) {
        const uint32 own = shared_address(stages + i / OUTPUTS * PITCH + i % OUTPUTS);
        float sum = 0, other = 0;
        for (int32 block = 0; block < split; ++block) {
            const uint32 at = address_in_block(own, block);
            sum += load_from_cluster(at);
            if (PAIRED) other += load_from_cluster(at + OUTPUTS * 4);
        }
        if (first + i % OUTPUTS < outputs) store(i / OUTPUTS, first + i % OUTPUTS, sum, other);
    }
    // All have read the sums: their blocks may end.
    cluster_sync();
}
