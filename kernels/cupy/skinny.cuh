// Products of few rows with the rows of a weight matrix, y = x W^T, which are bound by reading W once.
//
// Both forms below work on a tile: some tokens (rows of x) and some outputs (rows of W). What a tile's tokens are, and
// what becomes of a sum, its caller says: input(t) points to token t's row, store(t, o, sum, other) gets a sum as it is
// done. PAIRED takes a gate and an up matrix that lie behind each other, and gives both sums of an output at once.
#pragma once

#include "cluster.cuh"
#include "floats.cuh"

// By fused multiplications and additions, for any type, width and alignment. A warp has DOT_ROWS rows of W (of PAIRED,
// half of them gate's and half up's) and all DOT_TOKENS tokens; its lanes share the columns.
constexpr int32 DOT_THREADS = 256, DOT_ROWS = 4, DOT_TOKENS = 8;

template <bool PAIRED, typename T, typename Input, typename Store>
__device__ __forceinline__ void multiply_by_lanes(
    const T* __restrict__ weights, int32 outputs, int32 width, int32 tokens, int32 output_block, Input input,
    Store store)
{
    constexpr int32 OUTPUTS = PAIRED ? DOT_ROWS / 2 : DOT_ROWS;  // a warp
    const int32 lane = threadIdx.x % 32, first = (output_block * (DOT_THREADS / 32) + threadIdx.x / 32) * OUTPUTS;
    if (first >= outputs) return;  // a whole warp

    const T* rows[DOT_ROWS];
    const T* x[DOT_TOKENS];
#pragma unroll
    for (int32 r = 0; r < DOT_ROWS; ++r) {
        const int32 output = min(first + r % OUTPUTS, outputs - 1);  // a row too many is added up and not stored
        rows[r] = weights + (int64(r / OUTPUTS) * outputs + output) * width;
    }
#pragma unroll
    for (int32 t = 0; t < DOT_TOKENS; ++t) x[t] = input(min(t, tokens - 1));

    Wide<T> sums[DOT_ROWS][DOT_TOKENS] = {};
    for (int32 k = lane; k < width; k += 32) {
        Wide<T> w[DOT_ROWS];
#pragma unroll
        for (int32 r = 0; r < DOT_ROWS; ++r) w[r] = load(rows[r] + k);
#pragma unroll
        for (int32 t = 0; t < DOT_TOKENS; ++t) {
            const Wide<T> value = load(x[t] + k);
#pragma unroll
            for (int32 r = 0; r < DOT_ROWS; ++r) sums[r][t] += w[r] * value;
        }
    }
    Wide<T> mine = 0;  // of row lane / DOT_TOKENS and token lane % DOT_TOKENS
#pragma unroll
    for (int32 r = 0; r < DOT_ROWS; ++r) {
#pragma unroll
        for (int32 t = 0; t < DOT_TOKENS; ++t) {
            Wide<T> sum = sums[r][t];
#pragma unroll
            for (int32 step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(ALL_LANES, sum, step);
            if (lane == r * DOT_TOKENS + t) mine = sum;
        }
    }
    const Wide<T> other = __shfl_xor_sync(ALL_LANES, mine, 16);  // of PAIRED, up's for gate's
    const int32 row = lane / DOT_TOKENS, token = lane % DOT_TOKENS;
    if (row < OUTPUTS && first + row < outputs && token < tokens) store(token, first + row, mine, other);
}

// By tensor cores, for f16 and bf16 of widths that are multiples of 8 and rows that are aligned to 16 bytes. The tile
// has TOKENS tokens and mma_rows(TOKENS) rows of W (of PAIRED, half of them gate's and the same half up's): of many
// tokens more, since every tile reads its tokens from L2. W stands on the side of mma.m16n8k16 that takes 16 rows, so
// that a few tokens fill the side that takes 8. SPLIT blocks of a cluster share the columns and add up their sums in
// order of rank.
//
// Columns come 64 at a time through a ring of STAGES stages of shared memory, filled by cp.async. A row of a stage is
// 128 bytes, its 8 chunks of 16 bytes in the order chunk ^ (row % 8), so that ldmatrix meets no bank twice.
constexpr int32 MMA_THREADS = 128, STEP_BYTES = 128;

__device__ constexpr int32 mma_rows(int32 tokens) { return tokens > 32 ? 128 : 64; }
__device__ constexpr int32 mma_stages(int32 tokens) { return tokens > 32 ? 3 : 4; }

__device__ constexpr int32 mma_bytes(int32 tokens)
{
    return mma_stages(tokens) * (mma_rows(tokens) + tokens) * STEP_BYTES;
}

__device__ __forceinline__ uint32 shared_address(const void* p) { return uint32(__cvta_generic_to_shared(p)); }

// 16 bytes from global to shared memory, under way until they are waited for; zeros where `there` is false.
__device__ __forceinline__ void copy_chunk(uint32 to, const void* from, bool there)
{
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(there ? 16 : 0) : "memory");
}

__device__ __forceinline__ void load_matrices(uint32 (&four)[4], uint32 address)
{
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(four[0]), "=r"(four[1]), "=r"(four[2]), "=r"(four[3])
                 : "r"(address)
                 : "memory");
}

__device__ __forceinline__ void mma(float (&sums)[4], const uint32 (&a)[4], uint32 b0, uint32 b1, const __half*)
{
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

__device__ __forceinline__ void mma(float (&sums)[4], const uint32 (&a)[4], uint32 b0, uint32 b1, const __nv_bfloat16*)
{
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

template <int32 TOKENS, int32 SPLIT, bool PAIRED, typename T, typename Input, typename Store>
__device__ __forceinline__ void multiply_by_mma(
    const T* __restrict__ weights, int32 outputs, int32 width, int32 tokens, int32 output_block, Input input,
    Store store)
{
    constexpr int32 ROWS = mma_rows(TOKENS), STAGES = mma_stages(TOKENS), STAGE_BYTES = (ROWS + TOKENS) * STEP_BYTES;
    constexpr int32 OUTPUTS = PAIRED ? ROWS / 2 : ROWS, ROW_TILES = ROWS / 64;  // the latter of 16 rows, a warp
    constexpr int32 COLUMNS = STEP_BYTES / sizeof(T), CHUNK = 16 / sizeof(T);
    constexpr int32 ROWS_AT_ONCE = MMA_THREADS / 8, X_COPIES = (TOKENS + ROWS_AT_ONCE - 1) / ROWS_AT_ONCE;
    constexpr int32 PITCH = ROWS + 4;  // of the sums, in floats
    static_assert(TOKENS * PITCH * 4 <= STAGES * STAGE_BYTES, "the sums take the place of the stages");
    extern __shared__ __align__(128) unsigned char stages[];
    const int32 lane = threadIdx.x % 32, warp = threadIdx.x / 32, first = output_block * OUTPUTS;

    // This thread's chunk of a step in each of its rows: of W every ROWS_AT_ONCE-th, and of x.
    const int32 chunk = threadIdx.x % 8, row = threadIdx.x / 8;
    const T* from_w[ROWS / ROWS_AT_ONCE];
    const T* from_x[X_COPIES];
    uint32 there = 0;
#pragma unroll
    for (int32 i = 0; i < ROWS / ROWS_AT_ONCE; ++i) {
        const int32 r = row + i * ROWS_AT_ONCE, output = first + r % OUTPUTS;
        there |= uint32(output < outputs) << i;
        from_w[i] = weights + (int64(r / OUTPUTS) * outputs + min(output, outputs - 1)) * width + chunk * CHUNK;
    }
#pragma unroll
    for (int32 i = 0; i < X_COPIES; ++i) {
        const int32 t = row + i * ROWS_AT_ONCE;
        there |= uint32(t < tokens) << (16 + i);
        from_x[i] = input(min(t, tokens - 1)) + chunk * CHUNK;
    }
    const uint32 base = shared_address(stages), place = row * STEP_BYTES + ((chunk ^ row % 8) << 4);

    const int32 all = (width + COLUMNS - 1) / COLUMNS, share = (all + SPLIT - 1) / SPLIT;
    const int32 rank = SPLIT > 1 ? int32(cluster_rank()) : 0;
    const int32 begin = min(rank * share, all), steps = min(begin + share, all) - begin;
    const auto fetch = [&](int32 step) {
        const uint32 to = base + step % STAGES * STAGE_BYTES + place;
        const int32 column = (begin + step) * COLUMNS;
        const bool inside = column + chunk * CHUNK < width;
#pragma unroll
        for (int32 i = 0; i < ROWS / ROWS_AT_ONCE; ++i) {
            const bool is_there = inside && (there >> i & 1);
            copy_chunk(to + i * ROWS_AT_ONCE * STEP_BYTES, is_there ? from_w[i] + column : weights, is_there);
        }
#pragma unroll
        for (int32 i = 0; i < X_COPIES; ++i) {
            const bool is_there = inside && (there >> (16 + i) & 1);
            if (TOKENS % ROWS_AT_ONCE == 0 || row + i * ROWS_AT_ONCE < TOKENS)
                copy_chunk(to + (ROWS + i * ROWS_AT_ONCE) * STEP_BYTES, is_there ? from_x[i] + column : weights,
                           is_there);
        }
    };

#pragma unroll
    for (int32 step = 0; step < STAGES - 1; ++step) {
        if (step < steps) fetch(step);
        asm volatile("cp.async.commit_group;" ::: "memory");
    }
    float sums[ROW_TILES][TOKENS / 8][4] = {};
    for (int32 step = 0; step < steps; ++step) {
        asm volatile("cp.async.wait_group %0;" ::"n"(STAGES - 2) : "memory");
        // The stage that has come, to all threads, which are through with the one that is filled next.
        __syncthreads();
        if (step + STAGES - 1 < steps) fetch(step + STAGES - 1);
        asm volatile("cp.async.commit_group;" ::: "memory");
        const uint32 stage = base + step % STAGES * STAGE_BYTES;
#pragma unroll
        for (int32 half = 0; half < 2; ++half) {  // of the step's four times 16 columns
            uint32 a[ROW_TILES][2][4];
#pragma unroll
            for (int32 m = 0; m < ROW_TILES; ++m) {
#pragma unroll
                for (int32 i = 0; i < 2; ++i) {
                    const int32 r = (warp * ROW_TILES + m) * 16 + lane % 16, c = half * 4 + i * 2 + lane / 16;
                    load_matrices(a[m][i], stage + r * STEP_BYTES + ((c ^ r % 8) << 4));
                }
            }
#pragma unroll
            for (int32 n = 0; n < TOKENS / 8; ++n) {
                uint32 b[4];
                const int32 r = ROWS + n * 8 + lane % 8, c = half * 4 + lane / 8;
                load_matrices(b, stage + r * STEP_BYTES + ((c ^ r % 8) << 4));
#pragma unroll
                for (int32 m = 0; m < ROW_TILES; ++m) {
                    mma(sums[m][n], a[m][0], b[0], b[1], weights);
                    mma(sums[m][n], a[m][1], b[2], b[3], weights);
                }
            }
        }
    }

    asm volatile("cp.async.wait_group 0;" ::: "memory");
    // All threads are through with the stages, whose place the sums take.
    __syncthreads();
    float* partial = reinterpret_cast<float*>(stages);  // (TOKENS, PITCH)
#pragma unroll
    for (int32 m = 0; m < ROW_TILES; ++m) {
#pragma unroll
        for (int32 n = 0; n < TOKENS / 8; ++n) {
#pragma unroll
            for (int32 i = 0; i < 4; ++i) {
                const int32 r = (warp * ROW_TILES + m) * 16 + lane / 4 + i / 2 * 8, t = n * 8 + lane % 4 * 2 + i % 2;
                partial[t * PITCH + r] = sums[m][n][i];
            }
        }
    }
    if (SPLIT > 1) {
        // The sums over this block's columns, to the cluster.
        cluster_sync();
    } else {
        // The sums, to all threads.
        __syncthreads();
    }
    constexpr int32 SHARE = OUTPUTS / SPLIT;
    for (int32 i = threadIdx.x; i < SHARE * TOKENS; i += MMA_THREADS) {
        const int32 o = rank * SHARE + i % SHARE, t = i / SHARE;
        float sum = 0, other = 0;
#pragma unroll
        for (int32 block = 0; block < SPLIT; ++block) {
            const float* own = partial + t * PITCH + o;
            sum += SPLIT > 1 ? read_from_block(own, block) : *own;
            if (PAIRED) other += SPLIT > 1 ? read_from_block(own + OUTPUTS, block) : own[OUTPUTS];
        }
        if (t < tokens && first + o < outputs) store(t, first + o, sum, other);
    }
    // All have read the sums: their blocks may end.
    if (SPLIT > 1) cluster_sync();
}
