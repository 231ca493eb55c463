// Attention of a block drafter's rows: to the context of committed rows, and to one another.
//
// One block a tile of QUERIES rows of a request's block, and head. It normalises and rotates the tile's queries and the
// keys of the whole block into shared memory. Its warps, each with a PART of the queries, then take 32 rows at a time,
// of the context or of the block: a lane has one row's scores, then some of the elements of the weighted sum, with the
// greatest score so far taken out. In the end the warps of a part bring their sums to one greatest score and add them
// up in turns, always in the same order.
//
//   projected       (B T, 3 H E)  queries, keys and values of each row, before norm and rotation
//   context_keys    (B, H, E, W)  of which the first min(lengths - 1, W) rows are seen
//   context_values  (B, H, W, E)
//   lengths         int32 (B)     row t of a block is at position lengths - 1 + t; of inert slots, anything
//   query_norm, key_norm  (E)
//   frequencies     float64 (E / 2)
//   mixed           (B T, H E)
#include "heads.cuh"

constexpr int32 QUERIES = 8, PART = 4;  // of a block and of a warp
constexpr int32 MOST_ELEMENTS = 256, MOST_KEYS = 4096;  // E, and T E; `block_attention.py` says them too

// Of a block; float64 takes twice the registers. `block_attention.py` says it too.
__host__ __device__ constexpr int32 threads_of(uint32 size) { return size == 8 ? 256 : 512; }

// The tile's queries, each warp's weights, and the keys of the block with their angles.
__host__ __device__ constexpr uint32 most_shared(uint32 size)
{
    return size * (QUERIES * MOST_ELEMENTS + threads_of(size) * PART + 2 * MOST_KEYS);
}

// What a warp has of each of its queries; as neighbours, they are read at once.
template <typename X> struct __align__(16) OfQueries {
    X x[PART];
};

template <typename X> __device__ __forceinline__ X warp_max(X x)
{
#pragma unroll
    for (int32 step = 16; step > 0; step /= 2) {
        const X other = __shfl_xor_sync(ALL_LANES, x, step);
        x = other > x ? other : x;
    }
    return x;
}

// The sums of one warp: PARTS elements a lane, 32 apart.
template <typename X, int32 PARTS> struct Mix {
    static constexpr int32 AHEAD = sizeof(X) == 8 ? 4 : 16;  // loads of a lane under way, at least one of each part
    X greatest[PART], total[PART], sums[PART][PARTS];

    __device__ Mix()
    {
#pragma unroll
        for (int32 q = 0; q < PART; ++q) {
            greatest[q] = X(minus_infinity());
            total[q] = 0;
#pragma unroll
            for (int32 part = 0; part < PARTS; ++part) sums[q][part] = 0;
        }
    }

    // Takes in `count` rows: key(e) is an element of this lane's row, value(r, e) one of row r. Element e of the
    // queries is queries[e * QUERIES / PART].
    template <typename Key, typename Value>
    __device__ __forceinline__ void add(
        int32 count, int32 E, int32 lane, const OfQueries<X>* queries, X scale, OfQueries<X>* weights, Key key,
        Value value)
    {
        X scores[PART] = {};
        if (lane < count) {
#pragma unroll AHEAD
            for (int32 e = 0; e < E; ++e) {
                const X k = key(e);
                const OfQueries<X> query = queries[e * (QUERIES / PART)];
#pragma unroll
                for (int32 q = 0; q < PART; ++q) scores[q] += query.x[q] * k;
            }
        }
        OfQueries<X> weight;
#pragma unroll
        for (int32 q = 0; q < PART; ++q) {
            const X score = lane < count ? scores[q] * scale : X(minus_infinity());
            const X most = warp_max(score), now = most > greatest[q] ? most : greatest[q];
            weight.x[q] = exp(score - now);
            lower_to(q, now);
            total[q] += weight.x[q];
        }
        weights[lane] = weight;
        // The weights of each row, to all lanes.
        __syncwarp();
#pragma unroll (AHEAD > PARTS ? AHEAD / PARTS : 1)
        for (int32 r = 0; r < count; ++r) {
            const OfQueries<X> of_row = weights[r];
#pragma unroll
            for (int32 part = 0; part < PARTS; ++part) {
                const int32 e = lane + 32 * part;
                const X v = e < E ? value(r, e) : X(0);
#pragma unroll
                for (int32 q = 0; q < PART; ++q) sums[q][part] += of_row.x[q] * v;
            }
        }
        // They have been read.
        __syncwarp();
    }

    // Brings what query q has so far to a greatest score that is not below its own.
    __device__ __forceinline__ void lower_to(int32 q, X now)
    {
        const X factor = exp(greatest[q] - now);
        greatest[q] = now;
        total[q] *= factor;
#pragma unroll
        for (int32 part = 0; part < PARTS; ++part) sums[q][part] *= factor;
    }
};

template <typename T, int32 PARTS>
__device__ __forceinline__ void attend(
    const T* __restrict__ projected, const T* __restrict__ context_keys, const T* __restrict__ context_values,
    const int32* __restrict__ lengths, const T* __restrict__ query_norm, const T* __restrict__ key_norm,
    const double* __restrict__ frequencies, double eps, double scale, int32 size, int32 H, int32 E, int32 W,
    T* __restrict__ mixed)
{
    wait_for_earlier();
    using X = Wide<T>;
    constexpr int32 THREADS = threads_of(sizeof(X));
    constexpr int32 GROUPS = THREADS / 32 / (QUERIES / PART);  // of warps that share the rows
    wait_for_earlier();
    extern __shared__ __align__(16) double dynamic[];
    __shared__ X greatest[GROUPS][QUERIES], totals[GROUPS][QUERIES];
    const int32 t = threadIdx.x, lane = t % 32, warp = t / 32, half = E / 2;
    const int32 part = warp % (QUERIES / PART), group = warp / (QUERIES / PART);
    const int32 tile = blockIdx.x * QUERIES, h = blockIdx.y;
    const int64 b = blockIdx.z, committed = max(lengths[b] - 1, 0);
    const int32 seen = int32(min(committed, int64(W)));
    X* queries = reinterpret_cast<X*>(dynamic);  // (E, QUERIES)
    OfQueries<X>* weights = reinterpret_cast<OfQueries<X>*>(queries + E * QUERIES) + warp * 32;
    X* keys = queries + E * QUERIES + THREADS * PART;  // (E, size)
    X *cosines = keys + E * size, *sines = cosines + half * size;  // (size, half)
    const T* rows = projected + b * size * 3 * H * E + h * E;  // row r, part i: + (3 r + i) H E

    turn_rows(committed, size, frequencies, half, cosines, sines, t, THREADS);
    for (int32 e = t; e < E * QUERIES; e += THREADS) queries[e] = 0;
    // The angles, to all warps, and a tile without queries.
    __syncthreads();
    for (int32 r = warp; r < size + QUERIES; r += THREADS / 32) {
        const bool is_key = r < size;
        const int32 row = is_key ? r : tile + r - size;
        if (row >= size) break;
        const T* head = rows + (int64(row) * 3 + is_key) * H * E;
        X* to = is_key ? keys + r : queries + (r - size);
        place_head(head, is_key ? key_norm : query_norm, eps, half, cosines + row * half, sines + row * half, lane, to,
                   int64(is_key ? size : QUERIES));
    }
    // Queries and keys, to all warps.
    __syncthreads();

    Mix<X, PARTS> mix;
    const OfQueries<X>* mine = reinterpret_cast<const OfQueries<X>*>(queries) + part;
    const T* known_keys = context_keys + (b * H + h) * E * W;
    const T* known_values = context_values + (b * H + h) * E * W;
    for (int32 first = 32 * group; first < seen; first += 32 * GROUPS)
        mix.add(min(32, seen - first), E, lane, mine, X(scale), weights,
                [&](int32 e) { return load(known_keys + int64(e) * W + first + lane); },
                [&](int32 r, int32 e) { return load(known_values + int64(first + r) * E + e); });
    for (int32 first = 32 * (GROUPS - 1 - group); first < size; first += 32 * GROUPS)
        mix.add(min(32, size - first), E, lane, mine, X(scale), weights,
                [&](int32 e) { return keys[e * size + first + lane]; },
                [&](int32 r, int32 e) { return load(rows + (int64(first + r) * 3 + 2) * H * E + e); });

    if (lane == 0)
#pragma unroll
        for (int32 q = 0; q < PART; ++q) greatest[group][part * PART + q] = mix.greatest[q];
    // Each warp's greatest scores, to all; the queries have been read.
    __syncthreads();
#pragma unroll
    for (int32 q = 0; q < PART; ++q) {
        X most = greatest[0][part * PART + q];
        for (int32 g = 1; g < GROUPS; ++g) {
            const X other = greatest[g][part * PART + q];
            most = other > most ? other : most;
        }
        mix.lower_to(q, most);
        const X total = warp_sum(mix.total[q]);
        if (lane == 0) totals[group][part * PART + q] = total;
    }
    X* sums = queries;  // (QUERIES, E)
    for (int32 g = 0; g < GROUPS; ++g) {
        if (group == g)
#pragma unroll
            for (int32 q = 0; q < PART; ++q)
#pragma unroll
                for (int32 p = 0; p < PARTS; ++p) {
                    const int32 e = lane + 32 * p, at = (part * PART + q) * E + e;
                    if (e < E) sums[at] = mix.sums[q][p] + (g > 0 ? sums[at] : X(0));
                }
        // What the warps so far have added up, to the next.
        __syncthreads();
    }
    for (int32 i = t; i < min(QUERIES, size - tile) * E; i += THREADS) {
        const int32 q = i / E;
        X total = 0;
        for (int32 g = 0; g < GROUPS; ++g) total += totals[g][q];
        mixed[((b * size + tile + q) * H + h) * E + i % E] = rounded<T>(sums[i] / total);
    }
}

#define ATTEND(name, T, PARTS)                                                                                        \
    extern "C" __global__ void __launch_bounds__(threads_of(sizeof(Wide<T>)), 1) name(                                \
        const T* projected, const T* context_keys, const T* context_values, const int32* lengths,                     \
        const T* query_norm, const T* key_norm, const double* frequencies, double eps, double scale, int32 size,      \
        int32 H, int32 E, int32 W, T* mixed)                                                                          \
    {                                                                                                                 \
        attend<T, PARTS>(projected, context_keys, context_values, lengths, query_norm, key_norm, frequencies, eps,    \
                         scale, size, H, E, W, mixed);                                                                \
    }

ATTEND(block_attention_2_bf16, __nv_bfloat16, 2)
DDTREE_SHARED(block_attention_2_bf16, most_shared(4));
ATTEND(block_attention_2_f32, float, 2)
DDTREE_SHARED(block_attention_2_f32, most_shared(4));
ATTEND(block_attention_4_bf16, __nv_bfloat16, 4)
DDTREE_SHARED(block_attention_4_bf16, most_shared(4));
ATTEND(block_attention_4_f32, float, 4)
DDTREE_SHARED(block_attention_4_f32, most_shared(4));
ATTEND(block_attention_8_bf16, __nv_bfloat16, 8)
DDTREE_SHARED(block_attention_8_bf16, most_shared(4));
ATTEND(block_attention_8_f32, float, 8)
DDTREE_SHARED(block_attention_8_f32, most_shared(4));
ATTEND(block_attention_8_f64, double, 8)
DDTREE_SHARED(block_attention_8_f64, most_shared(8));
