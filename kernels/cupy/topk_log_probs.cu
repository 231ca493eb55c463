// The K likeliest tokens of each row of logits with their log-probs: by logit descending, then id ascending, exactly.
//
// Two ways, for K up to 1,024 of 32 bits or fewer, and for the rest:
//
// topk_of_tiles_*, then merge_tiles: a row is cut into tiles of 8,192 columns, one a block, so that few rows keep the
//   whole GPU busy. A block holds its tile in registers: it takes the greatest logit, the sum of exponentials relative
//   to it, and, by a bisection for a logit that K or a few more reach, its candidates; where one logit makes them too
//   many, of its columns the first. Then one block a row adds up the tiles' sums, and finds the K best candidates by a
//   bisection too and sorts them. A candidate is one word of 64 bits, an integer that sorts as the logit and behind it
//   the inverted id, so that no two are equal. If there are more than its threads hold, it first gathers those that
//   reach what K candidates of the row do: each tile says what a fair share of K of its candidates reach.
// topk_of_row_*: one block a row, for any K and type: the K-th greatest logit by radix selection, what is above it and
//   the lowest ids of what equals it, and a bitonic sort in global memory.
//
// Tiles depend on V alone and are summed up in order, so a row's result is the same whatever stands beside it.
//
//   logits      T       (rows, width), of which the first V columns count
//   log_probs   float32 (rows, K)   written in full
//   token_ids   int32   (rows, K)   written in full
//   candidates  uint64  (rows, tiles, most)   0 behind the last
//   bounds      uint32  (rows, tiles)   what K candidates of the tile reach, or 0 if it has no K
//   shares      uint32  (rows, tiles)   what `share` of the tile reach, if that is not 0; not read of the last tile
//   tops        float32 (rows, tiles)   the greatest logit
//   totals      float64 (rows, tiles)   the sum of exp(logit - top)
#include "block.cuh"

constexpr int32 TILE_THREADS = 256;
constexpr int32 VECTOR = 8;   // columns side by side
constexpr int32 VECTORS = 4;  // of a thread
constexpr int32 HELD = VECTOR * VECTORS;
constexpr int32 TILE = TILE_THREADS * HELD;
constexpr uint32 LEAST_NUMBER = 0x007FFFFF;  // of -inf

// An integer that sorts as x does; NaN counts as -inf, and -0 as 0. Of float32 by integers alone, since CuPy compiles
// with -ftz=true, by which float32 operations take subnormal numbers for 0.
__device__ __forceinline__ uint32 number_of(float x)
{
    const uint32 bits = __float_as_uint(x);
    const uint32 number = bits ^ uint32(int32(bits) >> 31 | int32(0x80000000));
    return (bits & 0x7FFFFFFF) > 0x7F800000 ? LEAST_NUMBER : bits == 0x80000000 ? 0x80000000 : number;
}
__device__ __forceinline__ uint64 number_of(double x)
{
    const int64 bits = __double_as_longlong(x > minus_infinity() ? x + 0.0 : double(minus_infinity()));
    return uint64(bits ^ (bits >> 63 | int64(0x8000000000000000ull)));
}
__device__ __forceinline__ float value_of(uint32 number)
{
    return __uint_as_float(number & 0x80000000u ? number ^ 0x80000000u : ~number);
}

__device__ __forceinline__ double sum_of_lanes(double x)
{
#pragma unroll
    for (int step = 16; step > 0; step /= 2) x += __shfl_xor_sync(ALL_LANES, x, step);
    return x;
}

__device__ __forceinline__ float log_prob_of(double x, double log_z) { return float(min(x - log_z, 0.0)); }

__device__ __forceinline__ bool is_finite(float x) { return fabsf(x) < -minus_infinity(); }

// ---------------------------------------------------------------------------------------------------- tiles

// The numbers of VECTOR logits from `source`, of which `present` are there; those that are not are less than all.
template <typename T>
__device__ __forceinline__ void load_vector(uint32* x, const T* source, int64 present)
{
    constexpr int32 WORDS = VECTOR * sizeof(T) / 16;
    if (present >= VECTOR && (reinterpret_cast<uint64>(source) & 15) == 0) {
        alignas(16) T raw[VECTOR];
#pragma unroll
        for (int i = 0; i < WORDS; ++i) reinterpret_cast<uint4*>(raw)[i] = reinterpret_cast<const uint4*>(source)[i];
#pragma unroll
        for (int e = 0; e < VECTOR; ++e) x[e] = number_of(load(raw + e));
    } else {
#pragma unroll
        for (int e = 0; e < VECTOR; ++e) x[e] = e < present ? number_of(load(source + e)) : 0;
    }
}

template <typename T>
__device__ __forceinline__ void topk_of_tile(
    const T* logits, int64 width, int32 V, int32 tiles, int32 K, int32 most, int32 share,
    uint64* candidates, uint32* bounds, uint32* shares, float* tops, double* totals)
{
    __shared__ uint32 sums[2][32];
    __shared__ double parts[TILE_THREADS / 32];
    Block block(sums);
    const int64 tile = blockIdx.x, row = tile / tiles;
    const int32 first_column = int32(tile % tiles) * TILE;
    const uint32 present = min(V - first_column, TILE);

    // Thread t holds columns 8 * t … 8 * t + 7 of each 2,048.
    uint32 x[HELD];
#pragma unroll
    for (int v = 0; v < VECTORS; ++v) {
        const int64 column = int64(first_column) + v * VECTOR * TILE_THREADS + VECTOR * block.t;
        load_vector(x + VECTOR * v, logits + row * width + column, V - column);
    }

    // The greatest; and a logit that at least K reach, as many as there are vectors or threads.
    uint32 vector_tops[VECTORS], thread_top = LEAST_NUMBER, least_vector_top = ~0u;
#pragma unroll
    for (int v = 0; v < VECTORS; ++v) {
        vector_tops[v] = LEAST_NUMBER;
#pragma unroll
        for (int e = 0; e < VECTOR; ++e) vector_tops[v] = max(vector_tops[v], x[VECTOR * v + e]);
        thread_top = max(thread_top, vector_tops[v]);
        least_vector_top = min(least_vector_top, vector_tops[v]);
    }
    const uint32 greatest = block.greatest(thread_top);
    const float top = value_of(greatest);
    uint32 low = block.least(K <= TILE_THREADS ? thread_top : least_vector_top), high = greatest + 1;

    double total = 0.0;
    if (is_finite(top)) {
#pragma unroll
        for (int v = 0; v < VECTORS; ++v) {
            float part[VECTOR];
#pragma unroll
            for (int e = 0; e < VECTOR; ++e) {
                const float difference = value_of(x[VECTOR * v + e]) - top;
                part[e] = difference <= 0.0f ? expf(difference) : 0.0f;  // NaN where there is no logit
            }
#pragma unroll
            for (int step = VECTOR / 2; step > 0; step /= 2)
#pragma unroll
                for (int e = 0; e < step; ++e) part[e] += part[e + step];
            total += double(part[0]);
        }
    }
    total = sum_of_lanes(total);
    if (block.lane == 0) parts[block.warp] = total;

    // What `share` vectors reach, and so as many logits or a few more.
    uint32 share_low = low, share_high = high;
    while (share > 0 && present > most && share_high - share_low > 1) {
        const uint32 middle = share_low + (share_high - share_low) / 2;
        uint32 found = 0;
#pragma unroll
        for (int v = 0; v < VECTORS; ++v) found += vector_tops[v] >= middle;
        found = block.sum(found);
        (found < share ? share_high : share_low) = middle;
        if (share <= found && found <= share + share / 4 + 8) break;
    }

    // The bound: at least K reach `low`, and fewer reach `high`.
    uint32 reached = present;
    if (present > most) {
        reached = ~0u;
        while (high - low > 1) {
            const uint32 middle = low + (high - low) / 2;
            uint32 found = 0;
#pragma unroll
            for (int i = 0; i < HELD; ++i) found += x[i] >= middle;
            found = block.sum(found);
            if (found < K) {
                high = middle;
            } else {
                low = middle;
                reached = found;
                if (found <= most) break;
            }
        }
    } else {
        low = LEAST_NUMBER;
    }
    uint32 chosen = 0;  // a bit for each that is a candidate
#pragma unroll
    for (int i = 0; i < HELD; ++i) chosen |= uint32(x[i] >= low) << i;
    if (reached > most) {  // one logit, `low`, makes them too many: what is above it, and its lowest ids
        uint32 equal = 0;
#pragma unroll
        for (int i = 0; i < HELD; ++i) equal |= uint32(x[i] == low) << i;
        chosen &= ~equal;
        uint32 taken = block.sum(__popc(chosen));
#pragma unroll
        for (int v = 0; v < VECTORS; ++v) {
            uint32 here = equal >> (VECTOR * v) & ((1u << VECTOR) - 1), found;
            uint32 place = taken + block.sum_before(__popc(here), found);
            for (; here != 0 && place < K; ++place, here &= here - 1) chosen |= (here & -here) << (VECTOR * v);
            taken += found;
        }
    }
    uint32 count;
    uint32 place = block.sum_before(__popc(chosen), count);
    candidates += tile * most;
    const uint32 chosen_by_warp = __reduce_or_sync(ALL_LANES, chosen);  // few, so most of these are passed over
#pragma unroll
    for (int i = 0; i < HELD; ++i) {
        if ((chosen_by_warp >> i & 1) == 0) continue;
        if (chosen >> i & 1) {
            const uint32 column = first_column + i / VECTOR * VECTOR * TILE_THREADS + VECTOR * block.t + i % VECTOR;
            candidates[place++] = uint64(x[i]) << 32 | ~column;
        }
    }
    for (uint32 i = count + block.t; i < most; i += TILE_THREADS) candidates[i] = 0;
    if (block.t == 0) {
        // `parts` have been written before a barrier, in the sums since.
        total = 0.0;
        for (int warp = 0; warp < TILE_THREADS / 32; ++warp) total += parts[warp];
        bounds[tile] = present >= K ? low : 0;
        shares[tile] = share_low;
        tops[tile] = top;
        totals[tile] = total;
    }
}

#define TILES_PARAMETERS(T)                                                                                    \
    const T *__restrict__ logits, int64 width, int32 V, int32 tiles, int32 K, int32 most, int32 share,           \
        uint64 *__restrict__ candidates, uint32 *__restrict__ bounds, uint32 *__restrict__ shares,              \
        float *__restrict__ tops, double *__restrict__ totals
#define TILES logits, width, V, tiles, K, most, share, candidates, bounds, shares, tops, totals

extern "C" __global__ void __launch_bounds__(TILE_THREADS) topk_of_tiles_f16(TILES_PARAMETERS(__half))
{
    wait_for_earlier();
    topk_of_tile(TILES);
}
extern "C" __global__ void __launch_bounds__(TILE_THREADS) topk_of_tiles_bf16(TILES_PARAMETERS(__nv_bfloat16))
{
    wait_for_earlier();
    topk_of_tile(TILES);
}
extern "C" __global__ void __launch_bounds__(TILE_THREADS) topk_of_tiles_f32(TILES_PARAMETERS(float))
{
    wait_for_earlier();
    topk_of_tile(TILES);
}

// ---------------------------------------------------------------------------------------------------- merge

constexpr int32 MOST_MERGE_THREADS = 512;
constexpr int32 MOST_SORTED = 2048;
constexpr int32 GATHERED = 4096;     // of more candidates than are held, those that may count
constexpr int32 BATCH = 8;           // candidates that a thread loads at once to gather from
constexpr int32 MERGE_HELD = 8;      // candidates that a thread holds; if there are more, they are read again and again
static_assert(GATHERED == MERGE_HELD * MOST_MERGE_THREADS, "gathered candidates are held");

extern __shared__ uint64 gathered[];

// `size` is a power of 2, 64 … 2,048, and at least K: so many candidates are sorted at most.
extern "C" __global__ void __launch_bounds__(MOST_MERGE_THREADS, 1) merge_tiles(
    const uint64* __restrict__ candidates, const uint32* __restrict__ bounds, const uint32* __restrict__ shares,
    const float* __restrict__ tops, const double* __restrict__ totals,
    int32 tiles, int32 K, int32 most, int32 share, int32 size,
    float* __restrict__ log_probs, int32* __restrict__ token_ids)
{
    wait_for_earlier();
    __shared__ uint64 sorted[MOST_SORTED];
    __shared__ uint32 sums[2][32];
    __shared__ double log_z;
    __shared__ bool usable;
    Block block(sums);
    __shared__ uint32 gathered_count;
    const int64 row = blockIdx.x;
    int64 slots = int64(tiles) * most;
    candidates += row * slots;
    bounds += row * tiles;
    shares += row * tiles;
    tops += row * tiles;
    totals += row * tiles;

    // What at least K reach: the K of one tile, or the shares of all tiles but the last.
    uint32 bound = 0, least_share = ~0u;
    for (int32 tile = block.t; tile < tiles; tile += block.size) {
        bound = max(bound, bounds[tile]);
        if (tile < tiles - 1) least_share = min(least_share, shares[tile]);
    }
    if (block.t == 0) gathered_count = 0;
    uint64 low = uint64(block.greatest(bound)) << 32;
    if (low == 0) low = 1;
    if (share > 0) {
        low = max(low, uint64(block.least(least_share)) << 32);
        for (int64 base = 0; base < slots; base += BATCH * block.size) {
            uint64 batch[BATCH];
            uint32 own = 0;
#pragma unroll
            for (int i = 0; i < BATCH; ++i) {
                const int64 slot = base + i * block.size + block.t;
                batch[i] = slot < slots ? candidates[slot] : 0;
            }
#pragma unroll
            for (int i = 0; i < BATCH; ++i) own += batch[i] >= low;
            uint32 upto = own, place = 0;
#pragma unroll
            for (int step = 1; step < 32; step *= 2) {
                const uint32 other = __shfl_up_sync(ALL_LANES, upto, step);
                if (block.lane >= step) upto += other;
            }
            if (block.lane == 31) place = atomicAdd(&gathered_count, upto);
            place = __shfl_sync(ALL_LANES, place, 31) + upto - own;
#pragma unroll
            for (int i = 0; i < BATCH; ++i) {
                if (batch[i] < low) continue;
                if (place < GATHERED) gathered[place] = batch[i];
                ++place;
            }
        }
        // What has been gathered, to all.
        __syncthreads();
        if (gathered_count <= GATHERED) {
            candidates = gathered;
            slots = gathered_count;
        }
    }
    uint64 held[MERGE_HELD];
#pragma unroll
    for (int i = 0; i < MERGE_HELD; ++i) {
        const int32 slot = i * block.size + block.t;
        held[i] = slot < slots ? candidates[slot] : 0;
    }
    // Calls `use` with each of the thread's candidates.
    const auto for_each = [&](auto use) {
#pragma unroll
        for (int i = 0; i < MERGE_HELD; ++i) use(held[i]);
        for (int64 slot = MERGE_HELD * block.size + block.t; slot < slots; slot += block.size) use(candidates[slot]);
    };
    if (block.warp == 0) {
        const float own_top = block.lane < tiles ? tops[block.lane] : minus_infinity();
        double total = block.lane < tiles ? totals[block.lane] : 0.0;
        float top = own_top;
        for (int32 tile = block.lane + 32; tile < tiles; tile += 32) top = fmaxf(top, tops[tile]);
#pragma unroll
        for (int step = 16; step > 0; step /= 2) top = fmaxf(top, __shfl_xor_sync(ALL_LANES, top, step));
        // What a tile adds, relative to the greatest of all; a tile without a finite logit adds nothing.
        const auto rebased = [&](double tile_total, float tile_top) {
            return is_finite(tile_top) ? tile_total * exp(double(tile_top) - double(top)) : 0.0;
        };
        total = rebased(total, own_top);
        for (int32 tile = block.lane + 32; tile < tiles; tile += 32) total += rebased(totals[tile], tops[tile]);
        total = sum_of_lanes(total);
        if (block.lane == 0) {
            usable = is_finite(top);
            log_z = double(top) + log(total);
        }
    }

    // At least K reach `low`, and fewer reach `high`.
    uint32 greatest = 0;
    for_each([&](uint64 candidate) { greatest = max(greatest, uint32(candidate >> 32)); });
    uint64 high = (uint64(block.greatest(greatest)) + 1) << 32;
    while (high - low > 1) {
        const uint64 middle = low + (high - low) / 2;
        uint32 found = 0;
        for_each([&](uint64 candidate) { found += candidate >= middle; });
        found = block.sum(found);
        if (found < K) {
            high = middle;
        } else {
            low = middle;
            if (found <= size) break;
        }
    }
    uint32 own = 0, count;
    for_each([&](uint64 candidate) { own += candidate >= low; });
    uint32 place = block.sum_before(own, count);
    if (own > 0)
        for_each([&](uint64 candidate) {
            if (candidate >= low) sorted[place++] = candidate;
        });
    for (int32 i = count + block.t; i < size; i += block.size) sorted[i] = 0;
    // The candidates, to those who sort them; and the normalisation, to those who write.
    __syncthreads();

    const auto write = [&](uint32 rank, uint64 candidate) {
        const float x = value_of(uint32(candidate >> 32));
        log_probs[row * K + rank] = usable ? log_prob_of(x, log_z) : minus_infinity();
        token_ids[row * K + rank] = int32(~uint32(candidate));
    };
    if (size <= block.size) {
        const int32 sharing = block.size / size;  // threads a candidate, side by side in one warp
        const uint64 candidate = sorted[block.t / sharing];
        uint32 rank = 0;
        for (int32 i = block.t % sharing; i < size; i += sharing) rank += sorted[i] > candidate;
        for (int32 step = sharing / 2; step > 0; step /= 2) rank += __shfl_xor_sync(ALL_LANES, rank, step);
        if (block.t % sharing == 0 && rank < K) write(rank, candidate);
    } else {
        for (int32 span = 2; span <= size; span *= 2) {
            for (int32 step = span / 2; step > 0; step /= 2) {
                for (int32 pair = block.t; pair < size / 2; pair += block.size) {
                    const int32 i = 2 * pair - (pair & (step - 1)), j = i + step;
                    const uint64 a = sorted[i], b = sorted[j];
                    if (((i & span) == 0) == (a < b)) {
                        sorted[i] = b;
                        sorted[j] = a;
                    }
                }
                // What this step has left, to the next.
                __syncthreads();
            }
        }
        for (int32 rank = block.t; rank < K; rank += block.size) write(rank, sorted[rank]);
    }
}

DDTREE_SHARED(merge_tiles, GATHERED * sizeof(uint64));

// ---------------------------------------------------------------------------------------------------- rows

constexpr int32 ROW_THREADS = 512;
constexpr int32 ROW_WARPS = ROW_THREADS / 32;

//   numbers  uint64 (rows, size)   to sort in, as ids; size is the next power of 2
//   ids      int32  (rows, size)
template <typename T, int DIGITS>
__device__ __forceinline__ void topk_of_row(
    const T* logits, int64 width, int32 V, int32 K, int32 size, uint64* numbers, int32* ids,
    float* log_probs, int32* token_ids)
{
    using Real = decltype(load(logits));
    __shared__ double parts[ROW_WARPS];
    __shared__ uint32 sums[2][32], histogram[256], greater_counts[ROW_WARPS], equal_counts[ROW_WARPS];
    __shared__ uint64 found_prefix;
    __shared__ uint32 found_left;
    Block block(sums);
    const int64 row = blockIdx.x;
    logits += row * width;
    numbers += row * size;
    ids += row * size;

    // The greatest logit, and the sum of exponentials.
    Real top = minus_infinity();
    for (int64 v = block.t; v < V; v += ROW_THREADS) top = max(top, load(logits + v));  // which leaves out NaN
#pragma unroll
    for (int step = 16; step > 0; step /= 2) top = max(top, __shfl_xor_sync(ALL_LANES, top, step));
    if (block.lane == 0) parts[block.warp] = top;
    // Each warp's greatest, to all.
    __syncthreads();
    for (int warp = 0; warp < ROW_WARPS; ++warp) top = max(top, Real(parts[warp]));
    const bool usable = top > minus_infinity() && top < -minus_infinity();
    double total = 0.0;
    for (int64 v = block.t; v < V && usable; v += ROW_THREADS) {
        const Real x = load(logits + v);
        if (x > minus_infinity()) total += double(exp(x - top));
    }
    total = sum_of_lanes(total);
    // All have read the greatest.
    __syncthreads();
    if (block.lane == 0) parts[block.warp] = total;
    // Each warp's sum, to all.
    __syncthreads();
    total = 0.0;
    for (int warp = 0; warp < ROW_WARPS; ++warp) total += parts[warp];

    // The K-th greatest: `prefix` is its digits so far, `left` its place among those that begin with them.
    uint64 prefix = 0;
    uint32 left = K;
    for (int32 shift = 8 * (DIGITS - 1); shift >= 0; shift -= 8) {
        for (int32 d = block.t; d < 256; d += ROW_THREADS) histogram[d] = 0;
        // The empty histogram, to all who count.
        __syncthreads();
        for (int64 v = block.t; v < V; v += ROW_THREADS) {
            const uint64 number = number_of(load(logits + v)) >> shift;
            if (number >> 8 == prefix) atomicAdd(&histogram[number & 255], 1u);
        }
        // The counts of all, to the first warp.
        __syncthreads();
        if (block.warp == 0) {
            // Lane 0 has the 8 highest digits, and so on; above a lane's digits are those of the lanes before it.
            uint32 own = 0;
            for (int32 d = 0; d < 8; ++d) own += histogram[255 - 8 * block.lane - d];
            uint32 upto = own;
            for (int32 step = 1; step < 32; step *= 2) {
                const uint32 before = __shfl_up_sync(ALL_LANES, upto, step);
                if (block.lane >= step) upto += before;
            }
            uint32 above = upto - own;
            if (above < left && left <= upto) {
                int32 digit = 255 - 8 * block.lane;
                while (above + histogram[digit] < left) above += histogram[digit--];
                found_prefix = prefix << 8 | digit;
                found_left = left - above;
            }
        }
        // The digit and the place below it, to all.
        __syncthreads();
        prefix = found_prefix;
        left = found_left;
    }

    // All above it, in places 0 … K - left - 1, and `left` of those equal to it, each in order of id: a warp looks
    // through a contiguous part of the row.
    const int64 part = (int64(V) + ROW_THREADS - 1) / ROW_THREADS * 32;
    const int64 first = min(block.warp * part, int64(V)), last = min(first + part, int64(V));
    uint32 greater = 0, equal = 0;
    for (int64 v = first + block.lane; v < last; v += 32) {
        const uint64 number = number_of(load(logits + v));
        greater += number > prefix;
        equal += number == prefix;
    }
    greater = __reduce_add_sync(ALL_LANES, greater);
    equal = __reduce_add_sync(ALL_LANES, equal);
    if (block.lane == 0) {
        greater_counts[block.warp] = greater;
        equal_counts[block.warp] = equal;
    }
    // What each warp will find, to the warps behind it.
    __syncthreads();
    greater = equal = 0;
    for (int32 warp = 0; warp < block.warp; ++warp) {
        greater += greater_counts[warp];
        equal += equal_counts[warp];
    }
    const uint32 lanes_before = (1u << block.lane) - 1;
    for (int64 start = first; start < last; start += 32) {
        const int64 v = start + block.lane;
        const uint64 number = v < last ? number_of(load(logits + v)) : 0;
        const uint32 greater_lanes = __ballot_sync(ALL_LANES, v < last && number > prefix);
        const uint32 equal_lanes = __ballot_sync(ALL_LANES, v < last && number == prefix);
        uint32 place = K;
        if (v < last && number > prefix) place = greater + __popc(greater_lanes & lanes_before);
        if (v < last && number == prefix) {
            const uint32 among = equal + __popc(equal_lanes & lanes_before);
            if (among < left) place = K - left + among;
        }
        if (place < K) {
            numbers[place] = number;
            ids[place] = int32(v);
        }
        greater += __popc(greater_lanes);
        equal += __popc(equal_lanes);
    }
    for (int32 place = K + block.t; place < size; place += ROW_THREADS) {
        numbers[place] = 0;  // behind all
        ids[place] = 0x7FFFFFFF;
    }

    for (int64 span = 2; span <= size; span *= 2) {
        for (int64 step = span / 2; step > 0; step /= 2) {
            // The pairs as the last step, or whoever filled them, has left them, to the threads that compare them.
            __syncthreads();
            for (int64 pair = block.t; pair < size / 2; pair += ROW_THREADS) {
                const int64 i = 2 * pair - (pair & (step - 1)), j = i + step;
                const uint64 a = numbers[i], b = numbers[j];
                const int32 id_a = ids[i], id_b = ids[j];
                if (((i & span) == 0) == (b > a || (b == a && id_b < id_a))) {
                    numbers[i] = b;
                    numbers[j] = a;
                    ids[i] = id_b;
                    ids[j] = id_a;
                }
            }
        }
    }
    // The sorted pairs, to all.
    __syncthreads();
    const double log_z = usable ? double(top) + log(total) : 0.0;
    for (int32 k = block.t; k < K; k += ROW_THREADS) {
        token_ids[row * K + k] = ids[k];
        const double x = load(logits + ids[k]);
        log_probs[row * K + k] = usable && x > minus_infinity() ? log_prob_of(x, log_z) : minus_infinity();
    }
}

#define ROWS_PARAMETERS(T)                                                                                      \
    const T *__restrict__ logits, int64 width, int32 V, int32 K, int32 size, uint64 *numbers, int32 *ids,        \
        float *__restrict__ log_probs, int32 *__restrict__ token_ids
#define ROWS logits, width, V, K, size, numbers, ids, log_probs, token_ids

extern "C" __global__ void __launch_bounds__(ROW_THREADS) topk_of_row_f16(ROWS_PARAMETERS(__half))
{
    wait_for_earlier();
    topk_of_row<__half, 4>(ROWS);
}
extern "C" __global__ void __launch_bounds__(ROW_THREADS) topk_of_row_bf16(ROWS_PARAMETERS(__nv_bfloat16))
{
    wait_for_earlier();
    topk_of_row<__nv_bfloat16, 4>(ROWS);
}
extern "C" __global__ void __launch_bounds__(ROW_THREADS) topk_of_row_f32(ROWS_PARAMETERS(float))
{
    wait_for_earlier();
    topk_of_row<float, 4>(ROWS);
}
extern "C" __global__ void __launch_bounds__(ROW_THREADS) topk_of_row_f64(ROWS_PARAMETERS(double))
{
    wait_for_earlier();
    topk_of_row<double, 8>(ROWS);
}
