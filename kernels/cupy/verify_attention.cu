// Verify attention: absorbed multi-head latent attention of tree nodes over a paged cache, split over the context.
//
// A row is a head of a node: row i * H + h of N * H. It attends to the keys [0, prefix_len) of its request and to keys
// prefix_len + j of the nodes j that its node sees; the value of a key is its first C numbers, the latent.
//
//   q            T      (B, N, H, C + R)
//   cache        T      (pages, S, C + R)   rows behind the last node may hold anything and are not read
//   page_table   int32  (B, max_pages)      entries behind the last key may hold anything
//   prefix_lens  int32  (B)
//   words        uint32 (B, N, ceil(N / 32))  bit j % 32 of word j / 32: whether a node sees node j
//   node_counts  int32  (B)
//   out          T      (B, N, H, C)        written in full: zeros in the slots of no node
//
// Versions:
//   1  attend_plain_T, merge_plain_T: every type and width, without tensor cores, in float32 or, of float64, float64.
//   2  attend_T, merge_T: float16 and bfloat16 with C = 512 and R = 64, by tensor cores (mma.sync).
//   3  attend_few_T: the same types and widths, by tensor cores too, for few rows and short contexts: in one launch.
//
// Version 1. A block takes 8 rows of a request, up to 512 columns of the latent and one of at most `parts` equal parts of
// the context, in tiles of 32 keys as in an online softmax: a warp works out the scores of 4 keys for all rows, then weighs
// the tile for one row, then a thread adds up its two columns for every row. Sums of tiles are added up, rather than
// keys: of thousands of keys, that loses far fewer bits. A tile's keys are on their way to L2 as soon as it is known
// where they are: otherwise each load of a few of them would wait for memory. merge_plain_T has a row of the output a
// block.
//
//   sums    float or double (B, parts, N * H, C)   weighted latents, relative to the greatest score of the part
//   tops    float or double (B, parts, N * H)      greatest score of the part
//   totals  float or double (B, parts, N * H)      sum of the weights
//
// Version 2. A block of 8 warps takes 64 rows of a request and a share of its context; one block runs on a
// multiprocessor. How the contexts are shared out depends on the lengths, which are on the device: every block works
// out the same schedule (see `share_of`). Keys stream through a ring of 4 tiles of 16 in shared memory. The warps form
// two groups of 32 rows each, which are less than a step apart, so that the exchanges of one hide behind the products
// of the other. Step n has, in this order:
//
//   weights  of tile n - 1: warp k of a group, which has the scores of rows 8 k ... 8 k + 7 of its group in registers,
//            works them out, relative to a maximum that may lag behind by a factor of 2^8, rounds them to T and puts
//            them into shared memory
//   scores   of tile n: warp k multiplies 16 of each 64 numbers, with its part of q in registers
//   values   of tile n - 1: warp k adds up columns 128 k ... 128 k + 127 of all 32 rows of its group, in registers;
//            meanwhile the 4 partial sums of each score are exchanged through shared memory, and tile n + 2 is copied
//
// Weights are worked out and exchanged while the scores are multiplied: products are nearly always under way. Two
// barriers a step, which are arrived at early and waited for late, stand for all that one warp must know of others.
//
// Where a key is not seen by a row but not finite, its weight of 0 would make NaN. Such keys show in the scores; the
// values of a tile with one are multiplied in a way of their own, which only tiles behind the prefix have.
//
// A block that has the whole context writes `out`; otherwise it writes normalised partial results, which merge_T
// weighs:
//
//   schedule  int32   (B, 2)            shares of a request's context, and the slot of its first share
//   parts     float16 (slots, 64, 512)  divided by `scales`; slots of a request: by tile of 64 rows, then by share
//   stats     float   (slots, 64, 2)    greatest score in units of log 2, and sum of the weights
//   scales    float   (slots, 64, 4)    of 128 columns each: powers of 2 that keep their numbers within float16
//
// Version 3. Where there is little to do, version 2 is slow: it has 8,000 instructions in a row, its schedule is worked out
// by one warp, and its merge is a launch. Here a cluster of 8, 4, 2 or 1 blocks
// takes 16 rows of a request, each block an equal part of the context, 32 keys at a time, with the next 32 on their way.
// A step works out scores (a warp 8 keys and half of the numbers), then weights (a warp two rows), then adds up values
// (a warp 64 columns of all rows). In the end the blocks of a cluster read each other's sums from shared memory.
#include "cluster.cuh"

template <typename T> __device__ T as(float x);
template <> __device__ __forceinline__ float as<float>(float x) { return x; }
template <> __device__ __forceinline__ __half as<__half>(float x) { return __float2half_rn(x); }
template <> __device__ __forceinline__ __nv_bfloat16 as<__nv_bfloat16>(float x) { return __float2bfloat16_rn(x); }
template <typename T> __device__ T as(double x) { return x; }

// Bit k: whether a row that sees the nodes in `words` sees node first + k; keys of the prefix, k < -first, are seen.
__device__ __forceinline__ uint32 seen_from(const uint32* words, int32 first, int32 node_count)
{
    const int32 word = first >> 5, last_word = (node_count - 1) >> 5;
    const uint32 low = word < 0 ? ~0u : word <= last_word ? words[word] : 0u;
    const uint32 high = word < -1 ? ~0u : word < last_word ? words[word + 1] : 0u;
    const uint32 bits = __funnelshift_r(low, high, first & 31);
    const int32 left = node_count - first;
    return left >= 32 ? bits : left > 0 ? bits & ((1u << left) - 1) : 0u;
}

// ---------------------------------------------------------------------------------------------------------- version 1

namespace plain {

constexpr int32 THREADS = 256, WARPS = 8, ROWS = 8, KEYS = 32, KEYS_A_WARP = KEYS / WARPS, COLUMNS = 2 * THREADS;
constexpr int32 KEYS_AT_ONCE = 8, MOST_PARTS = 64, THREADS_A_KEY = THREADS / KEYS;
static_assert(KEYS_A_WARP * ROWS == 32, "a lane gets the score of one key and row");

template <typename Real> __device__ __forceinline__ Real sum_of_warp(Real x)
{
    for (int32 d = 16; d > 0; d /= 2) x += __shfl_xor_sync(ALL_LANES, x, d);
    return x;
}

template <typename Real> __device__ __forceinline__ Real max_of_warp(Real x)
{
    for (int32 d = 16; d > 0; d /= 2) x = fmax(x, __shfl_xor_sync(ALL_LANES, x, d));
    return x;
}

// The sum over a warp's lanes of each of 32 numbers, number i to lane i: half of them at each step to the other half of
// the lanes, in 31 exchanges where one sum after the other would take 160.
template <int32 HALF = 16, typename Real> __device__ __forceinline__ Real sums_of_warp(Real (&x)[32])
{
    const bool upper = threadIdx.x & HALF;
    #pragma unroll
    for (int32 i = 0; i < HALF; ++i) {
        const Real kept = upper ? x[i + HALF] : x[i], sent = upper ? x[i] : x[i + HALF];
        x[i] = kept + __shfl_xor_sync(ALL_LANES, sent, HALF);
    }
    if constexpr (HALF > 1)
        return sums_of_warp<HALF / 2>(x);
    else
        return x[0];
}

// Adds to the scores of a warp's keys for all rows what their elements add, W neighbours a lane at a time.
template <int32 W, typename T, typename Real>
__device__ __forceinline__ void add_products(
    Real (&scores)[KEYS_A_WARP * ROWS], const T* queries, int32 last_row, const T* const* keys, int32 D)
{
    struct alignas(W * sizeof(T)) Neighbours { T values[W]; };
    const int32 lane = threadIdx.x % 32;
    #pragma unroll 1
    for (int32 d = lane * W; d < D; d += 32 * W) {
        Neighbours x[KEYS_A_WARP], y[ROWS];
        #pragma unroll
        for (int32 k = 0; k < KEYS_A_WARP; ++k) x[k] = *reinterpret_cast<const Neighbours*>(keys[k] + d);
        #pragma unroll
        for (int32 r = 0; r < ROWS; ++r) y[r] = *reinterpret_cast<const Neighbours*>(queries + min(r, last_row) * D + d);
        #pragma unroll
        for (int32 r = 0; r < ROWS; ++r)
            #pragma unroll
            for (int32 k = 0; k < KEYS_A_WARP; ++k)
                #pragma unroll
                for (int32 w = 0; w < W; ++w)
                    scores[k * ROWS + r] += Real(load(&x[k].values[w])) * Real(load(&y[r].values[w]));
    }
}

// Adds a key's two columns, weighed, to those of all rows.
template <typename Real>
__device__ __forceinline__ void add_key(Real (&added)[ROWS][2], const Real (&x)[2], const Real* weights)
{
    Real w[ROWS];
    #pragma unroll
    for (int32 r = 0; r < ROWS; r += 16 / sizeof(Real))
        *reinterpret_cast<int4*>(w + r) = *reinterpret_cast<const int4*>(weights + r);
    if (isfinite(x[0]) && isfinite(x[1])) {
        #pragma unroll
        for (int32 r = 0; r < ROWS; ++r) {
            added[r][0] += w[r] * x[0];
            added[r][1] += w[r] * x[1];
        }
        return;
    }
    // A key that a row does not see has the weight -0 there, and is not multiplied.
    #pragma unroll
    for (int32 r = 0; r < ROWS; ++r)
        if (w[r] != 0 || !signbit(w[r])) {
            added[r][0] += w[r] * x[0];
            added[r][1] += w[r] * x[1];
        }
}

// Keys of a part: whole tiles, as few as will do, so that neither what else is in the batch nor, at short contexts, how
// many parts there may be, has a say in how a row's keys are shared out.
__device__ __forceinline__ int32 part_length(int32 context, int32 parts)
{
    const int64 most = int64(KEYS) * parts;
    return KEYS * int32((context + most - 1) / most);
}

// Grid: B * parts * column blocks * row blocks, the last fastest.
template <typename T, typename Real>
__device__ __forceinline__ void attend(
    const T* q, const T* cache, const int32* page_table, const int32* prefix_lens, const uint32* words,
    const int32* node_counts, Real* sums, Real* tops, Real* totals, Real scale, int32 N, int32 H, int32 C, int32 D,
    int32 S, int32 max_pages, int32 parts)
{
    __shared__ __align__(16) Real weights[KEYS][ROWS];
    __shared__ Real factors[ROWS];
    __shared__ const T* keys[KEYS];

    const int64 rows = int64(N) * H;
    const int32 row_blocks = int32((rows + ROWS - 1) / ROWS), column_blocks = (C + COLUMNS - 1) / COLUMNS;
    int64 block = blockIdx.x;
    const int64 first_row = block % row_blocks * ROWS;
    block /= row_blocks;
    const int32 first_column = int32(block % column_blocks) * COLUMNS;
    block /= column_blocks;
    const int32 part = int32(block % parts), b = int32(block / parts);
    const int32 t = threadIdx.x, lane = t % 32, warp = t / 32;

    const int32 prefix = prefix_lens[b], count = node_counts[b];
    const int32 context = count > 0 ? prefix + count : 0;
    const int32 length = part_length(context, parts);
    const int32 begin = int32(min(int64(part) * length, int64(context))), end = min(begin + length, context);
    const int64 used_rows = int64(count) * H;
    if (begin >= end || first_row >= used_rows) return;  // a whole block; nobody reads what it would write

    // Rows of no node repeat the last one of a node; what they add up to is not written.
    const T* queries = q + (int64(b) * rows + first_row) * D;
    const int32 last_row = int32(min(used_rows - first_row, int64(ROWS))) - 1;

    constexpr int32 WIDE = sizeof(T) > 4 ? 2 : 4, LINE = 128 / sizeof(T);
    const bool in_chunks = D % WIDE == 0 && (uint64(q) | uint64(cache)) % (WIDE * sizeof(T)) == 0;
    const int64 own_row = first_row + warp;  // that this warp weighs
    const bool own_used = own_row < used_rows;
    Real own_top = Real(minus_infinity()), own_total = 0;
    Real columns[ROWS][2] = {};
    const int32 c0 = first_column + t, c1 = c0 + THREADS;

    for (int32 start = begin; start < end; start += KEYS) {
        const int32 tile = min(KEYS, end - start);
        {
            const int32 key = min(start + t / THREADS_A_KEY, end - 1);  // a key too many is the last one again
            const T* row = cache + (int64(page_table[int64(b) * max_pages + key / S]) * S + key % S) * D;
            if (t % THREADS_A_KEY == 0) keys[t / THREADS_A_KEY] = row;
            for (int32 d = t % THREADS_A_KEY * LINE; d < D; d += THREADS_A_KEY * LINE)
                asm volatile("prefetch.global.L2 [%0];" ::"l"(row + d));
        }
        // The places of the keys, to all warps; and all are through with the weights of the last tile.
        __syncthreads();
        Real scores[KEYS_A_WARP * ROWS] = {};
        if (warp * KEYS_A_WARP < tile) {
            if (in_chunks)
                add_products<WIDE>(scores, queries, last_row, keys + warp * KEYS_A_WARP, D);
            else
                add_products<1>(scores, queries, last_row, keys + warp * KEYS_A_WARP, D);
        }
        weights[warp * KEYS_A_WARP + lane / ROWS][lane % ROWS] = scale * sums_of_warp(scores);
        // The scores of all keys, to the warp that weighs them for a row.
        __syncthreads();
        const int32 key = start + lane;
        bool seen = own_used && key < end;
        if (seen && key >= prefix) {
            const uint32* own_words = words + (int64(b) * N + own_row / H) * ((N + 31) / 32);
            seen = own_words[(key - prefix) / 32] >> ((key - prefix) % 32) & 1;
        }
        const Real score = seen ? weights[lane][warp] : Real(minus_infinity());
        const Real top = fmax(own_top, max_of_warp(score));
        // A score that overflowed to -inf weighs nothing, also where there is no top yet; a key that is not seen, -0.
        const Real weight = !seen ? Real(-0.) : score == Real(minus_infinity()) ? Real(0) : exp(score - top);
        const Real factor = own_top > Real(minus_infinity()) ? exp(own_top - top) : Real(0);
        own_total = own_total * factor + sum_of_warp(weight);
        own_top = top;
        weights[lane][warp] = weight;
        if (lane == 0) factors[warp] = factor;
        // Weights, and the factors of what was added up before, to the threads that add up columns.
        __syncthreads();
        if (c0 < C) {  // whole warps have none of few columns
            Real added[ROWS][2] = {};
            for (int32 first = 0; first < tile; first += KEYS_AT_ONCE) {
                Real x[KEYS_AT_ONCE][2];
                #pragma unroll
                for (int32 i = 0; i < KEYS_AT_ONCE; ++i) {
                    const bool there = first + i < tile;
                    x[i][0] = there ? load(keys[first + i] + c0) : Real(0);
                    x[i][1] = there && c1 < C ? load(keys[first + i] + c1) : Real(0);
                }
                #pragma unroll
                for (int32 i = 0; i < KEYS_AT_ONCE; ++i) add_key(added, x[i], weights[first + i]);
            }
            #pragma unroll
            for (int32 r = 0; r < ROWS; ++r)
                #pragma unroll
                for (int32 j = 0; j < 2; ++j) columns[r][j] = columns[r][j] * factors[r] + added[r][j];
        }
        // All threads are through with the places of these keys.
        __syncthreads();
    }

    const int64 slot = (int64(b) * parts + part) * rows;
    #pragma unroll
    for (int32 r = 0; r < ROWS; ++r) {
        if (first_row + r >= rows) break;
        Real* sum = sums + (slot + first_row + r) * C;
        if (c0 < C) sum[c0] = columns[r][0];
        if (c1 < C) sum[c1] = columns[r][1];
    }
    if (first_column == 0 && lane == 0 && own_row < rows) {
        tops[slot + own_row] = own_top;
        totals[slot + own_row] = own_total;
    }
}

// One block a row of `out`: a thread has every THREADS-th column.
template <typename T, typename Real>
__device__ __forceinline__ void merge(
    const Real* sums, const Real* tops, const Real* totals, const int32* prefix_lens, const int32* node_counts, T* out,
    int32 N, int32 H, int32 C, int32 parts)
{
    __shared__ Real factors[MOST_PARTS];
    const int64 rows = int64(N) * H, b = blockIdx.x / rows, row = blockIdx.x % rows;
    const int32 t = threadIdx.x, count = node_counts[b], context = prefix_lens[b] + count;
    T* to = out + int64(blockIdx.x) * C;
    if (row / H >= count) {
        for (int32 c = t; c < C; c += THREADS) to[c] = as<T>(Real(0));
        return;
    }
    const int32 length = part_length(context, parts), used = (context + length - 1) / length;
    const int64 first = b * parts * rows + row;
    if (t < 32) {
        Real own[MOST_PARTS / 32], totals_of[MOST_PARTS / 32], top = Real(minus_infinity()), total = 0;
        #pragma unroll
        for (int32 i = 0; i < MOST_PARTS / 32; ++i) {
            const int32 part = t + 32 * i;
            own[i] = part < used ? tops[first + part * rows] : Real(minus_infinity());
            totals_of[i] = part < used ? totals[first + part * rows] : Real(0);
            top = fmax(top, own[i]);
        }
        top = max_of_warp(top);
        #pragma unroll
        for (int32 i = 0; i < MOST_PARTS / 32; ++i) {
            own[i] = exp(own[i] - top);
            total += totals_of[i] * own[i];
        }
        total = sum_of_warp(total);
        #pragma unroll
        for (int32 i = 0; i < MOST_PARTS / 32; ++i)
            if (t + 32 * i < used) factors[t + 32 * i] = own[i] / total;
    }
    // What each part is multiplied by, to all threads.
    __syncthreads();
    for (int32 c = t; c < C; c += THREADS) {
        Real value = 0;
        #pragma unroll 8
        for (int32 part = 0; part < used; ++part) value += sums[(first + part * rows) * C + c] * factors[part];
        to[c] = as<T>(value);
    }
}

}  // namespace plain

#define DDTREE_PLAIN(suffix, T, Real, BLOCKS)                                                                       \
    extern "C" __global__ void __launch_bounds__(256, BLOCKS) attend_plain_##suffix(                                \
        const T* q, const T* cache, const int32* page_table, const int32* prefix_lens, const uint32* words,         \
        const int32* node_counts, Real* sums, Real* tops, Real* totals, Real scale, int32 N, int32 H, int32 C,      \
        int32 D, int32 S, int32 max_pages, int32 parts)                                                             \
    {                                                                                                               \
        wait_for_earlier();                                                                                         \
        plain::attend<T, Real>(q, cache, page_table, prefix_lens, words, node_counts, sums, tops, totals, scale, N, \
                               H, C, D, S, max_pages, parts);                                                       \
    }                                                                                                               \
    extern "C" __global__ void __launch_bounds__(256) merge_plain_##suffix(                                         \
        const Real* sums, const Real* tops, const Real* totals, const int32* prefix_lens, const int32* node_counts, \
        T* out, int32 N, int32 H, int32 C, int32 parts)                                                             \
    {                                                                                                               \
        wait_for_earlier();                                                                                         \
        plain::merge<T, Real>(sums, tops, totals, prefix_lens, node_counts, out, N, H, C, parts);                   \
    }
DDTREE_PLAIN(f16, __half, float, 1)
DDTREE_PLAIN(bf16, __nv_bfloat16, float, 2)
DDTREE_PLAIN(f32, float, float, 2)
DDTREE_PLAIN(f64, double, double, 1)

// ---------------------------------------------------------------------------------------------------------- version 2

extern __shared__ __align__(1024) unsigned char ddtree_shared_memory[];

namespace tensor {

constexpr int32 THREADS = 256, ROWS = 64, KEYS = 16, C = 512, D = 576, STAGES = 4;
constexpr uint32 ROW_BYTES = 2 * D, STAGE_BYTES = KEYS * ROW_BYTES;

// Shared memory. A row of keys or queries is 9 segments of 128 bytes, and chunk c of 16 bytes of a segment stands at
// place c ^ (row % 8), so that the 8 rows of a matrix that ldmatrix reads lie in different banks.
constexpr uint32 INBOX = STAGES * STAGE_BYTES;  // of each warp: partial scores of 8 rows from 3 warps, 512 bytes each
constexpr uint32 KEPT = 1536;                   // in an inbox: uint32 [32][2], addresses that a lane keeps there
constexpr uint32 INBOX_BYTES = KEPT + 256;
constexpr uint32 WEIGHTS = INBOX + 8 * INBOX_BYTES;  // of each 16 rows: 512 bytes, in the order of the fragments of mma
constexpr uint32 FACTORS = WEIGHTS + 2048;      // of each group: float [8][4], at [g][k] the factor of row 8 k + g
constexpr uint32 INVERSES = FACTORS + 256;      // float [64]: one over the sum of a row's weights
constexpr uint32 GROWN = INVERSES + 4 * ROWS;   // bytes [8]: of each warp, whether the maximum of a row has grown
constexpr uint32 APART = GROWN + 8;             // bytes [8]: of each warp, whether a key must be kept apart from a row
constexpr uint32 QUERIES = STAGE_BYTES;         // before the first scores: q, where tiles 1 to 3 and the above lie
constexpr uint32 BARRIERS = QUERIES + ROWS * ROW_BYTES;
constexpr uint32 SCORED = BARRIERS, WEIGHED = SCORED + 32;  // of each group 2, for even and odd tiles
constexpr uint32 OWN = WEIGHED + 32, NODES = OWN + 48;      // NODES: int32 [64], the node of each row
constexpr uint32 SHARED = NODES + 4 * ROWS;
static_assert(APART + 8 <= BARRIERS);

__device__ __forceinline__ void copy_async(uint32 to, const void* from, uint32 bytes)  // 16, of which the rest are 0
{
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes) : "memory");
}
// In this place: the compiler would move an ordinary load to where its result has to be kept for longer.
__device__ __forceinline__ int32 load_page(const int32* from)
{
    int32 page;
    asm volatile("ld.global.s32 %0, [%1];" : "=r"(page) : "l"(from) : "memory");
    return page;
}
// The same under a condition, without the branch that the compiler would make of one.
__device__ __forceinline__ void copy_async_if(bool condition, uint32 to, const void* from, uint32 bytes)
{
    asm volatile(
        "{ .reg .pred p; setp.ne.u32 p, %3, 0; @p cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2; }" ::"r"(to),
        "l"(from), "r"(bytes), "r"(uint32(condition)) : "memory");
}
__device__ __forceinline__ void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
__device__ __forceinline__ void wait_for_all_but_last_copies() { asm volatile("cp.async.wait_group 1;" ::: "memory"); }
__device__ __forceinline__ void wait_for_all_copies() { asm volatile("cp.async.wait_all;" ::: "memory"); }

__device__ __forceinline__ void barrier_init(uint32 barrier, uint32 arrivals)
{
    asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}
// Of a warp one lane arrives, for all of them: 32 arrivals would be 32 accesses. The racecheck of compute-sanitizer
// does not follow __syncwarp and then reports hazards; with every lane arriving it must report none.
constexpr bool EVERY_LANE_ARRIVES = false;
constexpr uint32 ARRIVALS = EVERY_LANE_ARRIVES ? 32 : 1;  // of a warp
__device__ __forceinline__ void barrier_arrive(uint32 barrier, bool first_lane)
{
    // What the lanes of the warp have read and written is done, for the lane that arrives.
    __syncwarp();
    if (first_lane || EVERY_LANE_ARRIVES)
        asm volatile("{ .reg .b64 state; mbarrier.arrive.shared.b64 state, [%0]; }" ::"r"(barrier) : "memory");
}
__device__ __forceinline__ void barrier_arrive_after_copies(uint32 barrier)
{
    asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(barrier) : "memory");
}
__device__ __forceinline__ bool barrier_passed(uint32 barrier, uint32 parity)
{
    uint32 passed;
    asm volatile(
        "{ .reg .pred p; mbarrier.try_wait.parity.shared.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
        : "=r"(passed) : "r"(barrier), "r"(parity) : "memory");
    return passed != 0;
}
__device__ __forceinline__ void barrier_wait(uint32 barrier, uint32 parity)
{
    while (!barrier_passed(barrier, parity)) {}
}

__device__ __forceinline__ void load_matrices(uint32 (&x)[4], uint32 at)
{
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3]) : "r"(at) : "memory");
}
__device__ __forceinline__ void load_transposed(uint32 (&x)[4], uint32 at)
{
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3]) : "r"(at) : "memory");
}
__device__ __forceinline__ void load4(uint32 (&x)[4], uint32 at)
{
    asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3]) : "r"(at) : "memory");
}
__device__ __forceinline__ void load4(float (&x)[4], uint32 at)
{
    asm volatile("ld.shared.v4.f32 {%0,%1,%2,%3}, [%4];"
                 : "=f"(x[0]), "=f"(x[1]), "=f"(x[2]), "=f"(x[3]) : "r"(at) : "memory");
}
__device__ __forceinline__ void load2(float& x, float& y, uint32 at)
{
    asm volatile("ld.shared.v2.f32 {%0,%1}, [%2];" : "=f"(x), "=f"(y) : "r"(at) : "memory");
}
__device__ __forceinline__ void load2(uint32 (&x)[2], uint32 at)
{
    asm volatile("ld.shared.v2.u32 {%0,%1}, [%2];" : "=r"(x[0]), "=r"(x[1]) : "r"(at) : "memory");
}
__device__ __forceinline__ uint32 load_word(uint32 at)
{
    uint32 x;
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(x) : "r"(at) : "memory");
    return x;
}
__device__ __forceinline__ void store_byte(uint32 at, uint32 x)
{
    asm volatile("st.shared.u8 [%0], %1;" ::"r"(at), "r"(x) : "memory");
}
__device__ __forceinline__ void store_half(uint32 at, uint32 x)
{
    asm volatile("st.shared.u16 [%0], %1;" ::"r"(at), "h"(static_cast<unsigned short>(x)) : "memory");
}
__device__ __forceinline__ float load1(uint32 at)
{
    float x;
    asm volatile("ld.shared.f32 %0, [%1];" : "=f"(x) : "r"(at) : "memory");
    return x;
}
__device__ __forceinline__ void store2(uint32 at, float x, float y)
{
    asm volatile("st.shared.v2.f32 [%0], {%1,%2};" ::"r"(at), "f"(x), "f"(y) : "memory");
}
__device__ __forceinline__ void store1(uint32 at, float x)
{
    asm volatile("st.shared.f32 [%0], %1;" ::"r"(at), "f"(x) : "memory");
}
__device__ __forceinline__ void store1(uint32 at, uint32 x)
{
    asm volatile("st.shared.u32 [%0], %1;" ::"r"(at), "r"(x) : "memory");
}
// Keep in a register what the compiler would otherwise work out anew in every tile.
__device__ __forceinline__ void keep(uint32& x) { asm volatile("" : "+r"(x)); }
// Have what follows from x worked out in this place, and not kept in registers. ptxas for sm_120 looks through an empty
// statement, and is given a sum with 0 that it cannot know: all lanes of a warp are active.
__device__ __forceinline__ uint32 anew_on_sm_120(uint32 x)
{
#if __CUDA_ARCH__ >= 1200
    asm volatile("{ .reg .u32 mask; activemask.b32 mask; not.b32 mask, mask; add.u32 %0, %0, mask; }" : "+r"(x));
#endif
    return x;
}
__device__ __forceinline__ uint32 anew(uint32 x)
{
    asm volatile("" : "+r"(x));
    return anew_on_sm_120(x);
}
// A pointer `bytes` further on. The compiler would keep the bytes in two registers.
template <typename T> __device__ __forceinline__ const T* advanced(const T* from, uint32 bytes)
{
    const T* to;
    asm("{ .reg .u64 wide; cvt.u64.u32 wide, %2; add.u64 %0, %1, wide; }" : "=l"(to) : "l"(from), "r"(bytes));
    return to;
}
// threadIdx.x, read anew where the compiler would otherwise keep it, and what follows from it, in registers.
__device__ __forceinline__ uint32 thread_again()
{
    uint32 t;
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(t));
    return anew_on_sm_120(t);
}

__device__ __forceinline__ float exp2_of(float x)
{
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
__device__ __forceinline__ uint32 pack(float low, float high, __half)
{
    uint32 pair;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
}
__device__ __forceinline__ uint32 pack(float low, float high, __nv_bfloat16)
{
    uint32 pair;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
}
__device__ __forceinline__ float2 unpack(uint32 pair, __half)
{
    float2 x;
    asm("{ .reg .b16 l, h; mov.b32 {l, h}, %2; cvt.f32.f16 %0, l; cvt.f32.f16 %1, h; }"
        : "=f"(x.x), "=f"(x.y) : "r"(pair));
    return x;
}
__device__ __forceinline__ float2 unpack(uint32 pair, __nv_bfloat16)
{
    return make_float2(__uint_as_float(pair << 16), __uint_as_float(pair & 0xFFFF0000u));
}
// c += a * b for a 16 x 16, b 16 x 8
__device__ __forceinline__ void multiply(float (&c)[4], const uint32 (&a)[4], uint32 b0, uint32 b1, __half)
{
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
__device__ __forceinline__ void multiply(float (&c)[4], const uint32 (&a)[4], uint32 b0, uint32 b1, __nv_bfloat16)
{
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// One as a number of the type, and its exponent's bits: all set where it is not finite.
__device__ constexpr uint32 one(__half) { return 0x3C00; }
__device__ constexpr uint32 one(__nv_bfloat16) { return 0x3F80; }
__device__ constexpr uint32 exponent(__half) { return 0x7C00; }
__device__ constexpr uint32 exponent(__nv_bfloat16) { return 0x7F80; }

// Of a pair, put zeros for numbers that are not finite, and let `odd` have ones there, zeros elsewhere.
template <typename T> __device__ __forceinline__ void split_not_finite(uint32& pair, uint32& odd, T type)
{
    constexpr uint32 bits = exponent(T());
    const bool low = (pair & bits) == bits, high = (pair & bits << 16) == bits << 16;
    odd = (low ? one(T()) : 0u) | (high ? one(T()) << 16 : 0u);
    pair &= (low ? 0u : 0xFFFFu) | (high ? 0u : 0xFFFF0000u);
}

// Ones for the weights of keys that are seen, zeros for the others, whose weight is -0.
template <typename T> __device__ __forceinline__ uint32 ones_where_seen(uint32 pair, T type)
{
    return ((pair & 0xFFFF) == 0x8000 ? 0u : one(T())) | (pair >> 16 == 0x8000 ? 0u : one(T()) << 16);
}

constexpr float GREATEST = 3.402823466e38f;
constexpr uint32 NOT_SEEN = 0xFFFFFFFEu;  // the score of a key that is not seen: a NaN that no operation gives
constexpr float LAZY = 8.f;  // powers of 2 that a weight may grow beyond 1 before the sums are rescaled
constexpr int32 LEAST_TILES = 4;  // of keys that are a share of a context

// What a block has to do: row tile `row_tile` of a request, and key tiles [first_tile, end_tile) of it, which are one
// of `shares` shares.
struct Share {
    int32 request, row_tile, shares, first_tile, end_tile, prefix, count;
    int32 prefix_steps;  // after the first tile, for tiles that lie wholly in the prefix
    int32 fast_steps;    // those that a round of 4 may start at: all tiles that it copies or looks up lie there too
    int32 end_key;       // of the keys to copy
    int32 first_key, table;  // the first key, and the request's first entry of the page table
};

// That of this block, in shared memory, read anew where it is needed: registers are scarce.
struct Own {
    uint32 at;

    __device__ __forceinline__ int32 field(int32 i) const { return int32(load_word(at + 4 * i)); }
    __device__ __forceinline__ int32 request() const { return field(0); }
    __device__ __forceinline__ int32 first_row() const { return field(1) * ROWS; }
    __device__ __forceinline__ int32 shares() const { return field(2); }
    __device__ __forceinline__ int32 first_tile() const { return field(3); }
    __device__ __forceinline__ int32 end_tile() const { return field(4); }
    __device__ __forceinline__ int32 prefix() const { return field(5); }
    __device__ __forceinline__ int32 count() const { return field(6); }
    __device__ __forceinline__ int32 prefix_steps() const { return field(7); }
    __device__ __forceinline__ int32 fast_steps() const { return field(8); }
    __device__ __forceinline__ int32 end_key() const { return field(9); }
    __device__ __forceinline__ void first_key_and_table(uint32 (&both)[2]) const { load2(both, at + 40); }
    __device__ __forceinline__ int32 used_rows(int32 H) const { return min(count() * H - first_row(), ROWS); }
};

// What a request has to be done, in tiles of rows and of keys.
__device__ __forceinline__ int2 tiles_of(
    const int32* prefix_lens, const int32* node_counts, int32 b, int32 B, int32 H)
{
    if (b >= B) return make_int2(0, 0);
    const int32 count = node_counts[b];
    if (count <= 0) return make_int2(0, 0);
    return make_int2(int32((int64(count) * H + ROWS - 1) / ROWS), (prefix_lens[b] + count + KEYS - 1) / KEYS);
}

template <typename Integer> __device__ __forceinline__ Integer divided_up(Integer x, Integer y)
{
    return (x + y - 1) / y;
}

// The share of a block, worked out by a warp, a lane a request; `shares` is 0 if there is none for it.
//
// If the row tiles are no more than the `processors`, shares are as short as all fit at once. Otherwise they are at
// most half of what a processor has to do, so that the longest context does not keep one busy alone. Requests that are
// shared come first, so that the index of a block is also the slot of its result. Block 0 writes the schedule for the
// merge.
__device__ __forceinline__ Share share_of(
    const int32* prefix_lens, const int32* node_counts, int2* schedule, int32 B, int32 H, int32 processors)
{
    const int32 lane = threadIdx.x % 32, index = blockIdx.x;
    const bool writes = index == 0;
    const int2 first_tiles = tiles_of(prefix_lens, node_counts, lane, B, H);  // of the first 32 requests
    auto tiles_at = [&](int32 b) { return b < 32 ? first_tiles : tiles_of(prefix_lens, node_counts, b, B, H); };

    int32 row_tiles = 0, most = 1, least = LEAST_TILES;  // least: where the processors had one request alone to do
    uint64 work = 0;
    for (int32 b = lane; b < B; b += 32) {
        const int2 tiles = tiles_at(b);
        row_tiles += tiles.x;
        work += uint64(tiles.x) * tiles.y;
        most = max(most, tiles.y);
        if (tiles.x > 0 && tiles.x <= processors) least = max(least, divided_up(tiles.y, processors / tiles.x));
    }
    row_tiles = __reduce_add_sync(ALL_LANES, row_tiles);
    most = __reduce_max_sync(ALL_LANES, most);
    least = __reduce_max_sync(ALL_LANES, least);
    work = (uint64(__reduce_add_sync(ALL_LANES, uint32(work >> 16))) << 16) +
           __reduce_add_sync(ALL_LANES, uint32(work & 0xFFFF));
    auto even = [&](uint32 blocks) {
        return int32(work < 1u << 31 ? divided_up(uint32(work), blocks) : uint32(divided_up(work, uint64(blocks))));
    };

    int32 longest;
    if (row_tiles <= processors) {
        auto fits = [&](int32 length) {
            int32 blocks = 0;
            for (int32 b = lane; b < B; b += 32) blocks += tiles_at(b).x * divided_up(tiles_at(b).y, length);
            return __reduce_add_sync(ALL_LANES, blocks) <= processors;
        };
        longest = max(least, even(processors));
        int32 enough = max(longest, most);
        if (fits(longest)) enough = longest;
        while (longest < enough) {
            const int32 middle = (longest + enough) / 2;
            if (fits(middle)) enough = middle;
            else longest = middle + 1;
        }
    } else {
        longest = max(LEAST_TILES, even(2 * processors));
    }

    Share found = {};
    int32 before = 0;  // blocks of the requests that were gone through
    for (int32 whole = 0; whole < 2; ++whole)
        for (int32 first = 0; first < B && (writes || found.shares == 0); first += 32) {
            const int2 tiles = tiles_at(first + lane);
            const int32 shares = divided_up(tiles.y, longest);
            const bool counts = (shares <= 1) == (whole == 1);
            const int32 own = counts ? tiles.x * shares : 0;
            if (!__any_sync(ALL_LANES, counts)) continue;
            int32 end = own;
            for (int32 d = 1; d < 32; d *= 2) {
                const int32 lower = __shfl_up_sync(ALL_LANES, end, d);
                if (lane >= d) end += lower;
            }
            const int32 begin = before + end - own;
            if (writes && counts && first + lane < B) schedule[first + lane] = make_int2(shares, begin);
            const uint32 owner = __ballot_sync(ALL_LANES, index >= begin && index < begin + own);
            if (owner != 0) {
                const int32 from = __ffs(owner) - 1;
                found.request = first + from;
                found.shares = __shfl_sync(ALL_LANES, shares, from);
                const int32 within = index - __shfl_sync(ALL_LANES, begin, from);
                found.row_tile = within / found.shares;
                const int32 share = within % found.shares, key_tiles = __shfl_sync(ALL_LANES, tiles.y, from);
                const int32 length = key_tiles / found.shares, left = key_tiles % found.shares;
                found.first_tile = share * length + min(share, left);
                found.end_tile = found.first_tile + length + (share < left);
            }
            before += __shfl_sync(ALL_LANES, end, 31);
        }
    if (found.shares > 0) {
        found.prefix = prefix_lens[found.request];
        found.count = node_counts[found.request];
        found.prefix_steps = min(found.prefix / KEYS, found.end_tile) - found.first_tile - 1;
        found.fast_steps = min(found.prefix / KEYS - 3, found.end_tile) - found.first_tile - 4;
        found.end_key = min(found.prefix + found.count, found.end_tile * KEYS);
    }
    return found;
}

template <bool value> struct Bool {
    static constexpr bool is = value;
};

// Write what a block has added up: through shared memory, 8 KB a warp, so that whole lines are written.
template <typename T>
__device__ __forceinline__ void store_result(
    const float (&sums)[2][16][4], float top, float total, Own own, uint32 base, __half* parts,
    float2* stats, float* scales, T* out, int32 N, int32 H)
{
    const int32 t = thread_again(), lane = t % 32, g = lane / 4, quad = t % 4;
    const int32 warp = t / 32, group = warp / 4, member = warp % 4;
    const bool shared_out = own.shares() > 1;
    const int64 slot = blockIdx.x;
    const int32 used_rows = own.used_rows(H);
    total += __shfl_xor_sync(ALL_LANES, total, 1);
    total += __shfl_xor_sync(ALL_LANES, total, 2);
    if (quad == 0) {
        const int32 row = group * 32 + member * 8 + g;
        // A share that a row sees nothing of adds nothing; of a whole context it sees itself, and where all that it sees
        // weighs nothing, of scores that are -inf, it is NaN as in the reference.
        store1(base + INVERSES + 4 * row, total == 0.f && shared_out ? 0.f : __fdividef(1.f, total));
        if (shared_out) stats[slot * ROWS + row] = make_float2(top, total);
    }
    // The factors that normalise the rows, to all warps; and all are through with the keys, whose place results take.
    __syncthreads();
    const uint32 staged = base + warp * 8192;
    #pragma unroll
    for (int32 place = 0; place < 4; ++place) {
        const int32 row = (place ^ g / 2 % 2) * 8 + g;
        float inverse = load1(base + INVERSES + 4 * (group * 32 + row));
        float size = 0.f;
        #pragma unroll
        for (int32 j = 0; j < 16; ++j)
            #pragma unroll
            for (int32 e = 0; e < 2; ++e) size = fmaxf(size, fabsf(sums[place / 2][j][place % 2 * 2 + e]));
        if (shared_out) {
            size = fmaxf(size, __shfl_xor_sync(ALL_LANES, size, 1));
            size = fmaxf(size, __shfl_xor_sync(ALL_LANES, size, 2));
            // The exponent of the greatest number, as a power of 2 whose inverse is a normal number too.
            const uint32 exponent = min(max(__float_as_uint(size * inverse) >> 23, 1u), 253u);
            inverse *= __uint_as_float((254 - exponent) << 23);
            if (quad == 0) scales[(slot * ROWS + group * 32 + row) * 4 + member] = __uint_as_float(exponent << 23);
        }
        #pragma unroll
        for (int32 j = 0; j < 16; ++j) {
            const float x = sums[place / 2][j][place % 2 * 2] * inverse;
            const float y = sums[place / 2][j][place % 2 * 2 + 1] * inverse;
            // Column block j is of 8 columns: block j % 2 of the 16 that are number j / 4 of segment j / 2 % 2.
            const int32 chunk = j / 2 % 2 * 8 + j / 4 * 2 + j % 2;
            store1(staged + row * 256 + ((chunk ^ g) << 4) + quad * 4,
                   shared_out ? pack(x, y, __half()) : pack(x, y, T()));
        }
    }
    // What a lane has staged, to the other lanes of the warp.
    __syncwarp();
    char* to = shared_out ? reinterpret_cast<char*>(parts + slot * ROWS * C)
                          : reinterpret_cast<char*>(out + (int64(own.request()) * N * H + own.first_row()) * C);
    #pragma unroll
    for (int32 i = 0; i < 16; ++i) {
        const int32 row = i * 2 + lane / 16, chunk = lane % 16, row_of_block = group * 32 + row;
        uint32 x[4];
        load4(x, staged + row * 256 + ((chunk ^ row % 8) << 4));
        if (shared_out || row_of_block < used_rows) {
            char* place = to + row_of_block * (2 * C) + member * 256 + chunk * 16;
            *reinterpret_cast<uint4*>(place) = make_uint4(x[0], x[1], x[2], x[3]);
        }
    }
}

// Grid: as many blocks as there can be shares.
template <typename T>
__device__ __forceinline__ void attend(
    const T* __restrict__ q, const T* __restrict__ cache, const int32* __restrict__ page_table,
    const int32* __restrict__ prefix_lens, const uint32* __restrict__ words, const int32* __restrict__ node_counts,
    int2* __restrict__ schedule, __half* __restrict__ parts, float2* __restrict__ stats, float* __restrict__ scales,
    T* __restrict__ out, float scale, int32 B, int32 N, int32 H, uint32 S, uint32 page_factor, uint32 page_shift,
    int32 max_pages, int32 processors)
{
    uint32 base;
    asm("mov.u32 %0, ddtree_shared_memory;" : "=r"(base));
    const int32 t = threadIdx.x, lane = t % 32;
    const int32 warp = __shfl_sync(ALL_LANES, t / 32, 0);  // the compiler then knows that it is the same in all lanes
    const int32 group = warp / 4, member = warp % 4;
    const uint32 scored = base + SCORED + 16 * group, weighed = base + WEIGHED + 16 * group;
    const uint32 weighed_by_others = base + WEIGHED + 16 - 16 * group;

    const Own own{base + OWN};
    if (warp == 0) {
        Share found = share_of(prefix_lens, node_counts, schedule, B, H, processors);
        found.table = found.request * max_pages, found.first_key = found.first_tile * KEYS;
        if (lane == 0) {
            for (int32 i = 0; i < 4; ++i) {
                barrier_init(base + SCORED + 8 * i, 4 * ARRIVALS + THREADS);
                barrier_init(base + WEIGHED + 8 * i, 8 * ARRIVALS);
            }
            *reinterpret_cast<Share*>(ddtree_shared_memory + OWN) = found;
        }
    }
    // The block's share and the barriers, from one thread to all.
    __syncthreads();
    if (own.shares() == 0) return;

    // Copies: 16 threads a row of 9 segments. Rows behind the end become zeros, and nothing is read for them.
    const int32 copied_row = 2 * warp + lane / 16;
    const uint32 copy_to = base + copied_row * ROW_BYTES + lane / 8 % 2 * 128 + ((lane % 8 ^ copied_row % 8) << 4);
    const bool copies_last = lane % 16 < 8;  // of an odd number of segments
    auto copy_row = [&](uint32 to, const T* from, bool used) {
        const uint32 bytes = used ? 16 : 0;
        #pragma unroll
        for (int32 i = 0; i < 4; ++i) copy_async(to + i * 256, from + i * 128, bytes);
        copy_async_if(copies_last, to + 1024, from + 512, bytes);
    };

    {
        const int32 used_rows = own.used_rows(H);
        if (t < ROWS) store1(base + NODES + 4 * t, uint32((own.first_row() + min(t, used_rows - 1)) / H));
        const T* first = q + (int64(own.request()) * N * H + own.first_row()) * D + lane % 16 * 8;
        #pragma unroll
        for (int32 i = 0; i < ROWS / 16; ++i) {
            const int32 row = i * 16 + copied_row;
            copy_row(copy_to + QUERIES + i * 16 * ROW_BYTES, first + (row < used_rows ? row : 0) * D, row < used_rows);
        }
        commit_copies();
    }

    // Where this thread's row of a tile is. Where tiles are bounded, a row behind the end has a page below 0.
    struct Place {
        int32 page, row;
    };
    auto find_row = [&](auto bounded, int32 tile) {
        uint32 first[2];
        own.first_key_and_table(first);
        const uint32 key = first[0] + (tile * KEYS) + thread_again() / 16;
        const uint32 entry = __umulhi(2 * key, page_factor) >> page_shift;  // key / S
        const bool used = !bounded.is || int32(key) < own.end_key();
        return Place{used ? load_page(page_table + (first[1] + entry)) : -1, int32(key - entry * S)};
    };
    auto copy_key = [&](auto bounded, uint32 to, Place place) {
        const uint64 row = uint64(uint32(bounded.is ? max(place.page, 0) : place.page)) * S + uint32(place.row);
        copy_row(to, advanced(cache + row * D, thread_again() % 16 * 16), !bounded.is || place.page >= 0);
    };
    auto copy_tile = [&](auto bounded, uint32 to, uint32 stage, Place place) {
        copy_key(bounded, to + stage * STAGE_BYTES, place);
        barrier_arrive_after_copies(base + SCORED + (stage + 1) % 2 * 8);
        barrier_arrive_after_copies(base + SCORED + (stage + 1) % 2 * 8 + 16);
    };

    const Place place0 = find_row(Bool<true>(), 0), place1 = find_row(Bool<true>(), 1);
    const Place place2 = find_row(Bool<true>(), 2);
    Place next_place = find_row(Bool<true>(), 3);
    copy_key(Bool<true>(), copy_to, place0);
    commit_copies();
    wait_for_all_but_last_copies();
    // The queries and the nodes of the rows, from the threads that have put them there to all.
    __syncthreads();

    // Octets of 8 rows stand at places p ^ member, so that the octet which a warp keeps is at place 0 in every warp.
    uint32 queries[9][2][4];
    {
        const int32 row = group * 32 + ((lane / 8 % 2 ^ member) << 3) + lane % 8;
        const uint32 at = base + QUERIES + row * ROW_BYTES + ((2 * member + lane / 16 ^ lane % 8) << 4);
        const uint32 other = at + (member & 2 ? -16 : 16) * int32(ROW_BYTES);
        #pragma unroll
        for (int32 k = 0; k < 9; ++k) {
            load_matrices(queries[k][0], at + k * 128);
            load_matrices(queries[k][1], other + k * 128);
        }
    }
    wait_for_all_copies();
    // All warps have their queries, and keys may take their place; and the first tile, copied by all, is there for all.
    __syncthreads();
    copy_tile(Bool<true>(), copy_to, 1, place1);
    copy_tile(Bool<true>(), copy_to, 2, place2);

    // Of 16 rows and 8 columns each: number 2 j + n is block n of those of load_values(j). In every second 8 lanes the
    // two octets of the 16 rows are exchanged, so that lanes 8 apart put weights into different banks.
    float sums[2][16][4] = {};
    // Of row 8 * member + lane / 4 of the group. A maximum that begins finite makes no NaN of scores that are -inf.
    float top = -GREATEST, total = 0.f;

    const int32 matrix_key = lane % 8 + lane / 16 * 8;
    uint32 keys_at = base + matrix_key * ROW_BYTES + ((2 * member + lane / 8 % 2 ^ matrix_key % 8) << 4);
    uint32 values_at = base + lane % 16 * ROW_BYTES + member * 256 + ((lane / 16 ^ lane % 8) << 4);
    uint32 lane8 = lane * 8;
    keep(lane8), keep(keys_at), keep(values_at);
    const uint32 own_inbox = base + INBOX + warp * INBOX_BYTES;
    // Where this thread puts weights and keys, read anew where it is needed.
    store1(lane8 + own_inbox + KEPT, base + WEIGHTS + t / 64 * 512 + lane * 16 + (member ^ lane / 8) % 2 * 4);
    store1(lane8 + own_inbox + KEPT + 4, copy_to);
    auto weights_to = [&] { return load_word(lane8 + own_inbox + KEPT); };
    auto keys_to = [&] { return load_word(lane8 + own_inbox + KEPT + 4); };
    const bool first_lane = lane == 0;

    float scores[2][2][4];
    uint32 keys[2][4];
    auto load_keys = [&](uint32 stage, int32 k) {
        load_matrices(keys[k % 2], keys_at + stage * STAGE_BYTES + k * 128);
    };
    // The first keys are loaded; `between` is called after each 16 of the numbers that this warp multiplies.
    auto multiply_queries = [&](uint32 stage, auto between) {
        #pragma unroll
        for (int32 i = 0; i < 2; ++i)
            #pragma unroll
            for (int32 n = 0; n < 2; ++n)
                #pragma unroll
                for (int32 e = 0; e < 4; ++e) scores[i][n][e] = 0.f;
        #pragma unroll
        for (int32 k = 0; k < 9; ++k) {
            if (k < 8) load_keys(stage, k + 1);
            #pragma unroll
            for (int32 i = 0; i < 2; ++i)
                #pragma unroll
                for (int32 n = 0; n < 2; ++n)
                    multiply(scores[i][n], queries[k][i], keys[k % 2][2 * n], keys[k % 2][2 * n + 1], T());
            between(k);
        }
    };
    float score[4], other[4];  // of keys 2 quad, 2 quad + 1, and 8 more, of this thread's row
    auto send_partial_scores = [&](uint32 turn) {
        #pragma unroll
        for (int32 p = 1; p < 4; ++p) {
            const uint32 to = anew(lane8) + (base + INBOX + (warp ^ p) * INBOX_BYTES) + (p - 1) * 512;
            #pragma unroll
            for (int32 n = 0; n < 2; ++n)
                store2(to + n * 256, scores[p / 2][n][p % 2 * 2], scores[p / 2][n][p % 2 * 2 + 1]);
        }
        #pragma unroll
        for (int32 e = 0; e < 4; ++e) score[e] = scores[0][e / 2][e % 2];
        barrier_arrive(scored + 8 * turn, first_lane);
    };
    auto receive_partial_score = [&](int32 p) {
        #pragma unroll
        for (int32 n = 0; n < 2; ++n) load2(other[2 * n], other[2 * n + 1], lane8 + own_inbox + p * 512 + n * 256);
    };
    auto add_partial_score = [&] {
        #pragma unroll
        for (int32 e = 0; e < 4; ++e) score[e] += other[e];
    };
    // A key that is not seen, but whose score is not finite, is perhaps itself not: then it must be kept apart.
    auto finish_score = [&](auto masked, uint32 seen) {
        if (masked.is) seen >>= 2 * (thread_again() % 4);
        bool apart = false;
        #pragma unroll
        for (int32 e = 0; e < 4; ++e) {
            score[e] *= scale;
            if (masked.is && !(seen & 1u << (e / 2 * 8 + e % 2))) {
                apart = apart || !(fabsf(score[e]) <= GREATEST);
                score[e] = __uint_as_float(NOT_SEEN);
            }
        }
        if (masked.is) {
            apart = __any_sync(ALL_LANES, apart);
            if (first_lane) store_byte(base + APART + thread_again() / 32, apart);
        }
    };
    // Where the greatest score of a row is by more than LAZY above the row's maximum, take it as the maximum.
    bool any_grows;
    auto raise_tops = [&] {
        float tile_top = fmaxf(fmaxf(score[0], score[1]), fmaxf(score[2], score[3]));
        any_grows = __any_sync(ALL_LANES, tile_top > top + LAZY);
        if (__builtin_expect(any_grows, 0)) {
            tile_top = fmaxf(tile_top, __shfl_xor_sync(ALL_LANES, tile_top, 1));
            tile_top = fmaxf(tile_top, __shfl_xor_sync(ALL_LANES, tile_top, 2));
            const float new_top = tile_top > top + LAZY ? tile_top : top, factor = exp2_of(top - new_top);
            top = new_top;
            total *= factor;
            const uint32 t = thread_again();
            if (t % 4 == 0) store1(base + FACTORS + t / 128 * 128 + t % 32 * 4 + t / 32 % 4 * 4, factor);
        }
    };
    uint32 low, high;  // weights
    auto weigh = [&](auto masked) {
        float weight[4];
        #pragma unroll
        for (int32 e = 0; e < 4; ++e) {
            weight[e] = exp2_of(score[e] - top);
            if (masked.is && __float_as_uint(score[e]) == NOT_SEEN) weight[e] = -0.f;
        }
        low = pack(weight[0], weight[1], T());
        high = pack(weight[2], weight[3], T());
    };
    auto send_weights = [&](uint32 turn) {
        if (first_lane) store_byte(base + GROWN + thread_again() / 32, any_grows);
        const uint32 to = weights_to();
        store1(to, low);
        store1(to + 8, high);
        barrier_arrive(weighed + 8 * turn, first_lane);
    };
    auto add_to_total = [&] {
        const float2 x = unpack(low, T()), y = unpack(high, T());
        total += (x.x + x.y) + (y.x + y.y);
    };
    auto load_grown = [&] { return load_word(base + GROWN + group * 4); };
    auto load_apart = [&] { return load_word(base + APART + group * 4) != 0; };
    // Rescale the sums of those octets of rows whose maximum has grown.
    auto rescale = [&](uint32 grown) {
        float factors[4];
        const uint32 g = thread_again() % 32 / 4;
        load4(factors, base + FACTORS + thread_again() / 128 * 128 + g * 16);
        #pragma unroll
        for (int32 place = 0; place < 4; ++place) {
            const uint32 octet = place ^ g / 2 % 2;
            const float own_factor = g / 2 % 2 ? factors[place ^ 1] : factors[place];
            const float factor = grown >> 8 * octet & 1 ? own_factor : 1.f;
            #pragma unroll
            for (int32 j = 0; j < 16; ++j) {
                sums[place / 2][j][place % 2 * 2] *= factor;
                sums[place / 2][j][place % 2 * 2 + 1] *= factor;
            }
        }
    };
    uint32 weights[2][4], values[2][4];
    auto load_weights = [&] {
        #pragma unroll
        for (int32 i = 0; i < 2; ++i) load4(weights[i], base + WEIGHTS + group * 1024 + 2 * anew(lane8) + i * 512);
    };
    // Columns 16 (j / 2) ... of segment j % 2 of this warp's two.
    auto load_values = [&](uint32 stage, int32 j) {
        load_transposed(values[j % 2], ((values_at + stage * STAGE_BYTES) ^ (j / 2 << 5)) + j % 2 * 128);
    };
    auto multiply_values = [&](int32 j) {
        #pragma unroll
        for (int32 i = 0; i < 2; ++i)
            #pragma unroll
            for (int32 n = 0; n < 2; ++n)
                multiply(sums[i][2 * j + n], weights[i], values[j % 2][2 * n], values[j % 2][2 * n + 1], T());
    };
    // The same where a key must be kept apart: what is not finite counts as 0, and makes NaN of the sums of rows that
    // see it. (Where a row sees such a key its weight is NaN, or, of a score of -inf, 0, and 0 times infinity is NaN.)
    auto multiply_values_apart = [&](int32 j) {
        #pragma unroll
        for (int32 n = 0; n < 2; ++n) {
            uint32 odd[2];
            #pragma unroll
            for (int32 e = 0; e < 2; ++e) split_not_finite(values[j % 2][2 * n + e], odd[e], T());
            #pragma unroll
            for (int32 i = 0; i < 2; ++i) {
                float (&to)[4] = sums[i][2 * j + n];
                multiply(to, weights[i], values[j % 2][2 * n], values[j % 2][2 * n + 1], T());
                uint32 sees[4];
                #pragma unroll
                for (int32 e = 0; e < 4; ++e) sees[e] = ones_where_seen(weights[i][e], T());
                float counts[4] = {};
                multiply(counts, sees, odd[0], odd[1], T());
                #pragma unroll
                for (int32 e = 0; e < 4; ++e)
                    if (counts[e] != 0) to[e] = __uint_as_float(0x7FFFFFFFu);
            }
        }
    };

    // Which keys of a tile this thread's row sees.
    auto seen_in = [&](int32 tile) -> uint32 {
        const int32 node = int32(load_word(base + NODES + thread_again() / 4 * 4));
        const uint32* seen_words = words + (int64(own.request()) * N + node) * ((anew_on_sm_120(N) + 31) / 32);
        return seen_from(seen_words, tile * KEYS - own.prefix(), own.count());
    };
    // Add up the values of a tile; its weights and first values are loaded.
    auto add_values = [&](auto masked, bool apart, uint32 stage, auto between) {
        #pragma unroll
        for (int32 j = 0; j < 8; ++j) {
            if (j < 7) load_values(stage, j + 1);
            if (masked.is && apart) multiply_values_apart(j);
            else multiply_values(j);
            between(j);
        }
    };

    load_keys(0, 0);
    multiply_queries(0, [](int32) {});
    send_partial_scores(0);
    barrier_arrive(weighed_by_others, first_lane);
    barrier_wait(scored, 0);
    #pragma unroll
    for (int32 p = 0; p < 3; ++p) {
        receive_partial_score(p);
        add_partial_score();
    }
    finish_score(Bool<true>(), seen_in(own.first_tile()));
    load_keys(1, 0);

    // Weigh tile n - 1, work out the scores of tile n, add up the values of tile n - 1 and copy tile n + 2. Each wait,
    // load and exchange stands where other products are under way, so early that its result is there when needed.
    auto step = [&](auto masked, auto bounded, uint32 stage, int32 n) {
        const uint32 before = (stage + 3) % STAGES;
        uint32 seen = 0, grown = 0;
        multiply_queries(stage, [&](int32 k) {
            if (k == 0) raise_tops();
            if (k == 1) weigh(masked);
            if (k == 2) send_weights(before % 2);
            if (k == 3) add_to_total();
            if (k == 5) {
                // The weights of tile n - 1 are there, and its partial scores have been read; and the other group is
                // through with tile n - 2.
                barrier_wait(weighed + 8 * (before % 2), before / 2);
                grown = load_grown();
            }
            if (k == 6) {
                if (__builtin_expect(grown != 0, 0)) rescale(grown);
                load_weights();
            }
            if (k == 8) load_values(before, 0);
        });
        const bool apart = masked.is && load_apart();
        if (masked.is) {
            send_partial_scores(stage % 2);
            seen = seen_in(own.first_tile() + n);
        }
        add_values(masked, apart, before, [&](int32 j) {
            if (!masked.is && j == 0) send_partial_scores(stage % 2);
            if (j == 2) copy_tile(bounded, keys_to(), (stage + 2) % STAGES, next_place);
            // The partial scores of all warps of the group are there, and all have read the weights; and tile n + 1 is.
            if (j == 4) barrier_wait(scored + 8 * (stage % 2), stage / 2);
            if (j >= 5) add_partial_score();
            if (j >= 4 && j < 7) receive_partial_score(j - 4);
            if (j == 7) {
                next_place = find_row(bounded, n + 3);
                finish_score(masked, seen);
                load_keys((stage + 1) % STAGES, 0);
            }
        });
        // This group is through with tile n - 1.
        barrier_arrive(weighed_by_others + 8 * (stage % 2), first_lane);
    };
    // Tiles that lie wholly in the prefix are seen by all; four at once have constant stages.
    int32 n = 1;
    #pragma unroll 1
    for (; n <= own.fast_steps(); n += 4) {
        step(Bool<false>(), Bool<false>(), 1, n);
        step(Bool<false>(), Bool<false>(), 2, n + 1);
        step(Bool<false>(), Bool<false>(), 3, n + 2);
        step(Bool<false>(), Bool<false>(), 0, n + 3);
    }
    #pragma unroll 1
    for (; n <= own.prefix_steps(); ++n) step(Bool<false>(), Bool<true>(), uint32(n) % STAGES, n);
    #pragma unroll 1
    for (; n < own.end_tile() - own.first_tile(); ++n) step(Bool<true>(), Bool<true>(), uint32(n) % STAGES, n);

    const uint32 last = uint32(n - 1) % STAGES;
    raise_tops();
    weigh(Bool<true>());
    send_weights(last % 2);
    add_to_total();
    barrier_wait(weighed + 8 * (last % 2), last / 2);
    const uint32 grown = load_grown();
    load_weights();
    load_values(last, 0);
    if (grown != 0) rescale(grown);
    add_values(Bool<true>(), load_apart(), last, [](int32) {});
    wait_for_all_copies();

    store_result(sums, top, total, own, base, parts, stats, scales, out, N, H);
}

// A block takes 2048 / `split` consecutive columns of the rows of a request, a thread 8, and `split` (1, 4 or 16)
// groups of threads weigh the shares in turn. Rows of no node become zeros; those that one block has worked out
// entirely are in `out` already.
template <typename T>
__device__ __forceinline__ void merge(
    const __half* parts, const float2* stats, const float* scales, const int2* schedule, const int32* node_counts,
    T* __restrict__ out, int32 rows, int32 H,
    int32 split, int32 blocks_a_request)
{
    __shared__ float gathered[THREADS][9];
    constexpr int32 AT_ONCE = 4;
    const int32 b = blockIdx.x / blocks_a_request, block = blockIdx.x % blocks_a_request, t = threadIdx.x;
    const int32 wide = THREADS / split, place = block * wide + t % wide, first_share = t / wide;
    const int32 row = place / (C / 8), chunk = place % (C / 8);
    const int2 plan = schedule[b];
    const int32 count = node_counts[b], shares = plan.x;
    if (row >= rows) return;
    T* to = out + (int64(b) * rows + row) * C;
    if (row / H >= count) {
        if (first_share == 0) reinterpret_cast<uint4*>(to)[chunk] = make_uint4(0, 0, 0, 0);
        return;
    }
    if (shares == 1) return;
    const int64 first = (int64(plan.y) + row / ROWS * shares) * ROWS + row % ROWS;  // the row in the first share's slot

    float top = -GREATEST, total = 0.f, sum[8] = {};
    float2 stat[AT_ONCE];
    uint4 part[AT_ONCE];
    float scale[AT_ONCE];
    auto fetch = [&](int32 share) {
        #pragma unroll
        for (int32 i = 0; i < AT_ONCE; ++i) {
            const int64 at = first + (share + i * split) * ROWS;
            const bool is = share + i * split < shares;
            stat[i] = is ? stats[at] : make_float2(-GREATEST, 0.f);
            part[i] = is ? reinterpret_cast<const uint4*>(parts + at * C)[chunk] : make_uint4(0, 0, 0, 0);
            scale[i] = is ? scales[at * 4 + chunk / 16] : 0.f;
        }
    };
    fetch(first_share);
    for (int32 share = t % 32; share < shares; share += 32) top = fmaxf(top, stats[first + share * ROWS].x);
    #pragma unroll
    for (int32 d = 16; d > 0; d /= 2) top = fmaxf(top, __shfl_xor_sync(ALL_LANES, top, d));
    #pragma unroll 1
    for (int32 share = first_share; share < shares; share += AT_ONCE * split) {
        if (share != first_share) fetch(share);
        #pragma unroll
        for (int32 i = 0; i < AT_ONCE; ++i) {
            const float weight = stat[i].y * exp2_of(stat[i].x - top), factor = weight * scale[i];
            const uint32 pairs[4] = {part[i].x, part[i].y, part[i].z, part[i].w};
            total += weight;
            #pragma unroll
            for (int32 e = 0; e < 4; ++e) {
                const float2 pair = unpack(pairs[e], __half());
                sum[2 * e] += factor * pair.x;
                sum[2 * e + 1] += factor * pair.y;
            }
        }
    }
    if (split > 1) {
        #pragma unroll
        for (int32 e = 0; e < 8; ++e) gathered[t][e] = sum[e];
        gathered[t][8] = total;
        // The sums of the groups of threads, to the first group.
        __syncthreads();
        if (first_share > 0) return;
        #pragma unroll 1
        for (int32 i = 1; i < split; ++i) {
            #pragma unroll
            for (int32 e = 0; e < 8; ++e) sum[e] += gathered[i * wide + t][e];
            total += gathered[i * wide + t][8];
        }
    }
    const float inverse = __fdividef(1.f, total);
    #pragma unroll
    for (int32 e = 0; e < 8; ++e) sum[e] *= inverse;
    reinterpret_cast<uint4*>(to)[chunk] = make_uint4(
        pack(sum[0], sum[1], T()), pack(sum[2], sum[3], T()), pack(sum[4], sum[5], T()), pack(sum[6], sum[7], T()));
}

}  // namespace tensor

#define DDTREE_TENSOR(suffix, T)                                                                                    \
    extern "C" __global__ void __launch_bounds__(256, 1) attend_##suffix(                                           \
        const T* q, const T* cache, const int32* page_table, const int32* prefix_lens, const uint32* words,         \
        const int32* node_counts, int2* schedule, __half* parts, float2* stats, float* scales, T* out, float scale, \
        int32 B, int32 N, int32 H, uint32 S, uint32 page_factor, uint32 page_shift, int32 max_pages,                \
        int32 processors)                                                                                           \
    {                                                                                                               \
        wait_for_earlier();                                                                                         \
        tensor::attend<T>(q, cache, page_table, prefix_lens, words, node_counts, schedule, parts, stats, scales,    \
                          out, scale, B, N, H, S, page_factor, page_shift, max_pages, processors);                  \
    }                                                                                                               \
    extern "C" __global__ void __launch_bounds__(256, 3) merge_##suffix(                                            \
        const __half* parts, const float2* stats, const float* scales, const int2* schedule,                        \
        const int32* node_counts, T* out, int32 rows, int32 H, int32 split, int32 blocks_a_request)                 \
    {                                                                                                               \
        wait_for_earlier();                                                                                         \
        tensor::merge<T>(parts, stats, scales, schedule, node_counts, out, rows, H, split,                          \
                         blocks_a_request);                                                                         \
    }
DDTREE_TENSOR(f16, __half)
DDTREE_TENSOR(bf16, __nv_bfloat16)
DDTREE_SHARED(attend_f16, tensor::SHARED);
DDTREE_SHARED(attend_bf16, tensor::SHARED);

// ---------------------------------------------------------------------------------------------------------- version 3

namespace few {

using tensor::C, tensor::D, tensor::GREATEST, tensor::ROW_BYTES;
constexpr int32 THREADS = 256, ROWS = 16, KEYS = 32, STAGES = 2, MOST_PARTS = 8;
constexpr uint32 STAGE_BYTES = KEYS * ROW_BYTES;

// Shared memory. Rows of keys and queries lie as in version 2.
constexpr uint32 QUERIES = STAGES * STAGE_BYTES;
constexpr uint32 SCORES = QUERIES + ROWS * ROW_BYTES;         // float [2][16][40]: of each half of the segments
constexpr uint32 SCORES_PITCH = 40 * 4, SCORES_BYTES = ROWS * SCORES_PITCH;
constexpr uint32 WEIGHTS = SCORES + 2 * SCORES_BYTES;         // T [16][40]
constexpr uint32 WEIGHTS_PITCH = 40 * 2;
constexpr uint32 FACTORS = WEIGHTS + ROWS * WEIGHTS_PITCH;    // float [16]: of what was added up before
constexpr uint32 APART = FACTORS + 4 * ROWS;                  // bytes [8]: of each warp, as in version 2
constexpr uint32 TOPS = APART + 8, TOTALS = TOPS + 4 * ROWS;  // float [16] each, for the cluster
constexpr uint32 SHARED = TOTALS + 4 * ROWS;
constexpr uint32 SUMS = 0, SUMS_PITCH = 520 * 4;              // float [16][520], for the cluster, where keys were
static_assert(ROWS * SUMS_PITCH <= QUERIES);

// Adds to the sums of 16 rows and 8 columns a product with the values of 16 keys. Where a key must be APART: what is not
// finite counts as 0, and makes NaN of the sums of rows that see it.
template <bool APART, typename T>
__device__ __forceinline__ void add_values(float (&sums)[4], const uint32 (&weights)[4], uint32 low, uint32 high, T type)
{
    if (!APART) {
        tensor::multiply(sums, weights, low, high, type);
        return;
    }
    uint32 values[2] = {low, high}, odd[2], sees[4];
    #pragma unroll
    for (int32 e = 0; e < 2; ++e) tensor::split_not_finite(values[e], odd[e], type);
    #pragma unroll
    for (int32 e = 0; e < 4; ++e) sees[e] = tensor::ones_where_seen(weights[e], type);
    tensor::multiply(sums, weights, values[0], values[1], type);
    float counts[4] = {};
    tensor::multiply(counts, sees, odd[0], odd[1], type);
    #pragma unroll
    for (int32 e = 0; e < 4; ++e)
        if (counts[e] != 0) sums[e] = __uint_as_float(0x7FFFFFFFu);
}

// Grid: B * tiles of 16 rows * the blocks of a cluster, the last fastest.
template <typename T>
__device__ __forceinline__ void attend(
    const T* q, const T* cache, const int32* page_table, const int32* prefix_lens, const uint32* words,
    const int32* node_counts, T* out, float scale, int32 N, int32 H, uint32 S, uint32 page_factor, uint32 page_shift,
    int32 max_pages)
{
    uint32 base;
    asm("mov.u32 %0, ddtree_shared_memory;" : "=r"(base));
    const int32 t = threadIdx.x, lane = t % 32, warp = t / 32;
    const int32 parts = cluster_size(), part = cluster_rank();
    const int32 rows = N * H, row_tiles = (rows + ROWS - 1) / ROWS;
    const int32 tile = blockIdx.x / parts, b = tile / row_tiles, first_row = tile % row_tiles * ROWS;
    const int32 count = node_counts[b], prefix = prefix_lens[b], used_rows = count * H - first_row;
    T* to = out + (int64(b) * rows + first_row) * C;
    // What this block writes: columns of all rows, four a thread.
    const int32 chunks = C / 4 / parts, first_chunk = part * chunks;
    if (used_rows <= 0) {
        for (int32 i = t; i < ROWS * chunks; i += THREADS)
            if (first_row + i / chunks < rows)
                *reinterpret_cast<uint2*>(to + i / chunks * C + (first_chunk + i % chunks) * 4) = make_uint2(0, 0);
        return;
    }

    // Copies: 8 threads a row of 9 segments.
    const auto copy_row = [&](uint32 to, const T* from, int32 row, bool used) {
        to += row * ROW_BYTES + ((lane % 8 ^ row % 8) << 4);
        from += lane % 8 * 8;
        #pragma unroll
        for (int32 i = 0; i < 9; ++i) tensor::copy_async(to + i * 128, from + i * 64, used ? 16 : 0);
    };
    if (t / 8 < ROWS) {
        const bool used = t / 8 < used_rows;
        copy_row(base + QUERIES, q + (int64(b) * rows + first_row + (used ? t / 8 : 0)) * D, t / 8, used);
    }
    // Parts of a context are equal, in eights of keys.
    const int32 context = prefix + count, length = ((context + parts - 1) / parts + 7) / 8 * 8;
    const int32 begin = min(part * length, context), end = min(begin + length, context);
    // Where this thread's key of some 32 is, which is looked up long before it is needed.
    const auto row_of = [&](int32 first) -> int64 {
        const uint32 key = first + t / 8, entry = __umulhi(2 * key, page_factor) >> page_shift;  // key / S
        return int32(key) < end ? int64(page_table[int64(b) * max_pages + entry]) * S + (key - entry * S) : 0;
    };
    const auto copy_keys = [&](int32 first, int64 row) {
        const uint32 stage = (first - begin) / KEYS % STAGES * STAGE_BYTES;
        copy_row(base + stage, cache + row * D, t / 8, first + t / 8 < end);
        tensor::commit_copies();
    };
    const int64 rows_at_once[STAGES] = {row_of(begin), row_of(begin + KEYS)};
    int64 next_row = row_of(begin + 2 * KEYS);
    copy_keys(begin, rows_at_once[0]);
    copy_keys(begin + KEYS, rows_at_once[1]);

    const int32 own_row = 2 * warp;  // this warp weighs it and the next one
    const uint32* seen_words[2];
    #pragma unroll
    for (int32 r = 0; r < 2; ++r)
        seen_words[r] = words + (int64(b) * N + (first_row + min(own_row + r, used_rows - 1)) / H) * ((N + 31) / 32);
    float tops[2] = {-GREATEST, -GREATEST}, totals[2] = {};  // totals: what this lane's keys weigh
    float sums[8][4] = {};                                   // of all rows and this warp's segment
    uint32 queries[9][2][4];

    // Keys 8 (warp % 4) ... and 64 bytes of each segment are this warp's where scores are added up; a segment of each
    // key where values are.
    const int32 octet = warp % 4, half = warp / 4;
    const int32 own_key = octet * 8 + lane % 8;
    const uint32 keys_at = own_key * ROW_BYTES + ((4 * half + lane / 8 ^ lane % 8) << 4);
    const uint32 queries_at = base + QUERIES + lane % 16 * ROW_BYTES + ((4 * half + lane / 16 ^ lane % 8) << 4);
    const uint32 values_at = lane % 16 * ROW_BYTES + warp * 128 + ((lane / 16 ^ lane % 8) << 4);

    #pragma unroll 1
    for (int32 first = begin; first < end; first += KEYS) {
        if (first == begin) tensor::wait_for_all_but_last_copies();
        else tensor::wait_for_all_copies();
        // The keys, to all warps; and all are through with the keys before.
        __syncthreads();
        if (first > begin && first + KEYS < end) {
            copy_keys(first + KEYS, next_row);
            next_row = row_of(first + 2 * KEYS);
        }
        if (first == begin) {
            #pragma unroll
            for (int32 i = 0; i < 9; ++i)
                #pragma unroll
                for (int32 k = 0; k < 2; ++k)
                    tensor::load_matrices(queries[i][k], (queries_at ^ k << 5) + i * 128);
        }
        const uint32 stage = base + (first - begin) / KEYS % STAGES * STAGE_BYTES;

        if (first + octet * 8 < end) {
            float scores[2][4] = {};
            #pragma unroll
            for (int32 i = 0; i < 9; ++i) {
                uint32 keys[4];
                tensor::load_matrices(keys, stage + keys_at + i * 128);
                #pragma unroll
                for (int32 k = 0; k < 2; ++k)
                    tensor::multiply(scores[k], queries[i][k], keys[2 * k], keys[2 * k + 1], T());
            }
            const uint32 at =
                base + SCORES + half * SCORES_BYTES + lane / 4 * SCORES_PITCH + octet * 32 + lane % 4 * 8;
            tensor::store2(at, scores[0][0] + scores[1][0], scores[0][1] + scores[1][1]);
            tensor::store2(at + 8 * SCORES_PITCH, scores[0][2] + scores[1][2], scores[0][3] + scores[1][3]);
        }
        const int32 key = first + lane, node = key - prefix;
        uint32 seen[2];
        #pragma unroll
        for (int32 r = 0; r < 2; ++r)
            seen[r] = key >= end ? 0 : node < 0 ? 1 : seen_words[r][node / 32] >> node % 32 & 1;
        // Half sums of scores, to the warp that weighs a row.
        __syncthreads();

        bool apart = false;
        #pragma unroll
        for (int32 r = 0; r < 2; ++r) {
            const uint32 at = base + SCORES + (own_row + r) * SCORES_PITCH + lane * 4;
            const float score = (tensor::load1(at) + tensor::load1(at + SCORES_BYTES)) * scale;
            // A key that is not seen, but whose score is not finite, is perhaps itself not: then it must be kept apart.
            apart = apart || (!seen[r] && key < end && own_row + r < used_rows && !(fabsf(score) <= GREATEST));
            const float top = fmaxf(tops[r], plain::max_of_warp(seen[r] ? score : -GREATEST));
            const float factor = tensor::exp2_of(tops[r] - top);
            const uint32 weight = tensor::pack(seen[r] ? tensor::exp2_of(score - top) : -0.f, 0.f, T());
            totals[r] = totals[r] * factor + (seen[r] ? tensor::unpack(weight, T()).x : 0.f);
            tops[r] = top;
            tensor::store_half(base + WEIGHTS + (own_row + r) * WEIGHTS_PITCH + lane * 2, weight);
            if (lane == 0) tensor::store1(base + FACTORS + (own_row + r) * 4, factor);
        }
        apart = __any_sync(ALL_LANES, apart);
        if (lane == 0) tensor::store_byte(base + APART + warp, apart);
        // The weights and factors of all rows, to all warps.
        __syncthreads();

        uint32 flags[2];
        tensor::load2(flags, base + APART);
        #pragma unroll
        for (int32 r = 0; r < 2; ++r) {
            const float factor = tensor::load1(base + FACTORS + (lane / 4 + 8 * r) * 4);
            #pragma unroll
            for (int32 n = 0; n < 8; ++n) sums[n][2 * r] *= factor, sums[n][2 * r + 1] *= factor;
        }
        const uint32 weights_at = base + WEIGHTS + lane % 16 * WEIGHTS_PITCH + lane / 16 * 16;
        const auto add_up = [&](auto is_apart) {
            #pragma unroll(is_apart.is ? 1 : 2)
            for (int32 k = 0; k < KEYS; k += 16) {
                uint32 weights[4];
                tensor::load_matrices(weights, weights_at + k * 2);
                #pragma unroll
                for (int32 j = 0; j < 4; ++j) {
                    uint32 values[4];
                    tensor::load_transposed(values, ((stage + values_at) ^ j << 5) + k * ROW_BYTES);
                    add_values<is_apart.is>(sums[2 * j], weights, values[0], values[1], T());
                    add_values<is_apart.is>(sums[2 * j + 1], weights, values[2], values[3], T());
                }
            }
        };
        if (__builtin_expect((flags[0] | flags[1]) != 0, 0)) add_up(tensor::Bool<true>());
        else add_up(tensor::Bool<false>());
    }

    // The parts meet: each block puts its sums to where keys were, and adds up some columns of all.
    tensor::wait_for_all_copies();
    // All are through with the keys.
    __syncthreads();
    #pragma unroll
    for (int32 r = 0; r < 2; ++r) {
        const float total = plain::sum_of_warp(totals[r]);
        if (lane == 0) {
            tensor::store1(base + TOPS + (own_row + r) * 4, tops[r]);
            tensor::store1(base + TOTALS + (own_row + r) * 4, total);
        }
        #pragma unroll
        for (int32 n = 0; n < 8; ++n)
            tensor::store2(
                base + SUMS + (lane / 4 + 8 * r) * SUMS_PITCH + warp * 256 + n * 32 + lane % 4 * 8, sums[n][2 * r],
                sums[n][2 * r + 1]);
    }
    // What each part has added up, to the cluster.
    cluster_sync();
    for (int32 i = t; i < ROWS * chunks; i += THREADS) {
        const int32 row = i / chunks, chunk = first_chunk + i % chunks;
        float top = -GREATEST, total = 0.f, part_tops[MOST_PARTS], part_totals[MOST_PARTS];
        float4 part_sums[MOST_PARTS], sum = make_float4(0.f, 0.f, 0.f, 0.f);
        #pragma unroll
        for (int32 p = 0; p < MOST_PARTS; ++p) {
            const uint32 there = address_in_block(base, min(p, parts - 1));
            part_tops[p] = load_from_cluster(there + TOPS + row * 4);
            part_totals[p] = p < parts ? load_from_cluster(there + TOTALS + row * 4) : 0.f;
            part_sums[p] = load4_from_cluster(there + SUMS + row * SUMS_PITCH + chunk * 16);
            top = fmaxf(top, part_tops[p]);
        }
        #pragma unroll
        for (int32 p = 0; p < MOST_PARTS; ++p) {
            if (p == parts) break;
            const float factor = tensor::exp2_of(part_tops[p] - top);
            total += part_totals[p] * factor;
            sum.x += part_sums[p].x * factor, sum.y += part_sums[p].y * factor;
            sum.z += part_sums[p].z * factor, sum.w += part_sums[p].w * factor;
        }
        const float inverse = __fdividef(1.f, total);  // of 0, where all scores are -inf, NaN below
        if (first_row + row < rows)
            *reinterpret_cast<uint2*>(to + row * C + chunk * 4) =
                row < used_rows ? make_uint2(tensor::pack(sum.x * inverse, sum.y * inverse, T()),
                                             tensor::pack(sum.z * inverse, sum.w * inverse, T()))
                                : make_uint2(0, 0);
    }
    // All have read what the others have added up, and blocks may end.
    cluster_sync();
}

}  // namespace few

#define DDTREE_FEW(suffix, T)                                                                                       \
    extern "C" __global__ void __launch_bounds__(256, 1) attend_few_##suffix(                                       \
        const T* q, const T* cache, const int32* page_table, const int32* prefix_lens, const uint32* words,         \
        const int32* node_counts, T* out, float scale, int32 N, int32 H, uint32 S, uint32 page_factor,              \
        uint32 page_shift, int32 max_pages)                                                                         \
    {                                                                                                               \
        wait_for_earlier();                                                                                         \
        few::attend<T>(q, cache, page_table, prefix_lens, words, node_counts, out, scale, N, H, S, page_factor,     \
                       page_shift, max_pages);                                                                      \
    }
DDTREE_FEW(f16, __half)
DDTREE_FEW(bf16, __nv_bfloat16)
DDTREE_SHARED(attend_few_f16, few::SHARED);
DDTREE_SHARED(attend_few_bf16, few::SHARED);
