// The target's choice after each node: the greatest logit, or the greatest of logit / temperature + keyed Gumbel noise
// among the nucleus. Bit for bit the reference's choices; compiled with --fmad=false (see portable_math.cuh).
//
// A cluster of BLOCKS blocks a row; each warp has a contiguous part of it, a lane STEP neighbours at a time. What the
// blocks find they read from each other's shared memory, so that one launch does everything.
//
//   logits       (rows, V), f16, bf16, f32 or f64
//   place        int64 (1)         or null: of greedy choices, the address of the logits if it is known only when the
//                                  kernel runs
//   positions    int32 (rows)      of sampling
//   request_ids  int64 (rows / N)  or null: a request's id is its index
//   chosen       int32 (rows)      written in full; -1 where a row has NaN, +inf or nothing finite
//
// Sampling reads the row again for each of these, from L2:
//   1. the greatest logit, from which z = (logit - greatest) / temperature;
//   2. if top_p < 1, every mass floor(exp(z) 2^40) into bins of 1/64 of z, whose integer sums say which bin the nucleus
//      ends in; then the bin is narrowed to the range of z that is in it and divided into 2048 again, until all in it
//      are equal (at once where logits have few bits): `last` is that z, and of those equal to it the first are kept;
//   3. the noise. A bound of it in float32 rules most tokens out before any arithmetic in float64.
//
// Version 1 had one block a row, and found `last` digit by digit in eight passes, with a float64 exponential in each.
// Version 2 had the clusters and bins, but a branch at each division and exponential, so that one waited for another.
// Version 3, this one, has neither: 124 for 197 us of 65 rows of 163,840 bf16 with top-p 0.9 on an H200; greedy, 8.5.
#include "cluster.cuh"
#include "floats.cuh"
#include "portable_math.cuh"

constexpr int32 BLOCKS = 8;
constexpr int32 THREADS = 256;
// Blocks a multiprocessor: on sm_90, where a cluster's blocks must find room in 16 or 18 of them, enough for 65 rows at
// once; sm_120 has more multiprocessors.
constexpr int32 SAMPLING_BLOCKS = __CUDA_ARCH__ >= 1200 ? 3 : 4;
template <typename T> constexpr int32 NUCLEUS_BLOCKS = sizeof(T) == 8 ? 2 : 3;
constexpr int32 BINS = 2048, FIRST_BINS_A_UNIT = 64;
constexpr double LEAST_MASS = -28.0;  // below it exp(z) 2^40 is 0.76 at most, and its floor 0

// Neighbours that a lane reads at once: 16 bytes, or the four tokens of one counter.
template <typename T> constexpr int32 STEP = sizeof(T) == 2 ? 8 : 4;

// What is beyond the end of a row: 16 bytes of -inf.
template <typename T> __device__ __forceinline__ uint4 beyond_the_end()
{
    constexpr uint32 F32 = 0xFF800000u, F64 = 0xFFF00000u;  // the latter behind a lower word of 0
    constexpr uint32 WORD = sizeof(T) == 4 ? F32 : 0xFF80FF80u;  // of two bfloat16
    return sizeof(T) == 8 ? uint4{0, F64, 0, F64} : uint4{WORD, WORD, WORD, WORD};
}

template <> __device__ __forceinline__ uint4 beyond_the_end<__half>()
{
    return {0xFC00FC00u, 0xFC00FC00u, 0xFC00FC00u, 0xFC00FC00u};
}

__device__ __forceinline__ void unpack(const uint4* bits, const __nv_bfloat16*, float* x)
{
    const uint32 pairs[4] = {bits->x, bits->y, bits->z, bits->w};
#pragma unroll
    for (int32 i = 0; i < 4; ++i) {
        x[2 * i] = __uint_as_float(pairs[i] << 16);
        x[2 * i + 1] = __uint_as_float(pairs[i] & 0xFFFF0000u);
    }
}

__device__ __forceinline__ void unpack(const uint4* bits, const __half*, float* x)
{
    const uint32 pairs[4] = {bits->x, bits->y, bits->z, bits->w};
#pragma unroll
    for (int32 i = 0; i < 4; ++i) {
        x[2 * i] = __half2float(__ushort_as_half((unsigned short)(pairs[i] & 0xFFFFu)));
        x[2 * i + 1] = __half2float(__ushort_as_half((unsigned short)(pairs[i] >> 16)));
    }
}

__device__ __forceinline__ void unpack(const uint4* bits, const float*, float* x)
{
    x[0] = __uint_as_float(bits->x), x[1] = __uint_as_float(bits->y);
    x[2] = __uint_as_float(bits->z), x[3] = __uint_as_float(bits->w);
}

__device__ __forceinline__ void unpack(const uint4* bits, const double*, double* x)
{
#pragma unroll
    for (int32 i = 0; i < 2; ++i) {
        x[2 * i] = __hiloint2double(int32(bits[i].y), int32(bits[i].x));
        x[2 * i + 1] = __hiloint2double(int32(bits[i].w), int32(bits[i].z));
    }
}

// A warp's part of a row: tokens first ... end - 1, where `first` is a multiple of 32 * STEP.
template <typename T> struct Part {
    const T* row;
    uint32 first, end;  // unsigned, since a turn beyond the last token of an int32 must not overflow
    bool aligned;  // rows to 16 bytes, and their ends to STEP

    __device__ Part(const T* logits, uint32 V, bool aligned, uint32 threads)
        : row(logits + int64(blockIdx.x / BLOCKS) * V), aligned(aligned)
    {
        const uint32 warps = BLOCKS * (threads / 32), group = 32 * STEP<T>;
        const uint32 size = (V + warps * group - 1) / (warps * group) * group;
        const uint32 warp = cluster_rank() * (threads / 32) + threadIdx.x / 32;
        first = min(warp * size, V);
        end = min(first + size, V);
    }

    // use(v, x, i) for groups i of each turn of this lane, of which all are read before the first is used: STEP logits
    // x from token v on, -inf beyond the end. Then next(v) with the v of group 0. All lanes of the warp take as many
    // turns.
    template <int32 GROUPS, typename Use, typename Next>
    __device__ __forceinline__ void each_turn(Use use, Next next) const
    {
        constexpr int32 WORDS = sizeof(T) * STEP<T> / 16;
        for (uint32 start = first; start < end; start += GROUPS * 32 * STEP<T>) {
            const uint32 v = start + threadIdx.x % 32 * STEP<T>;
            Wide<T> x[GROUPS][STEP<T>];
            if (aligned) {  // so that a group is wholly in the part or wholly beyond
                uint4 words[GROUPS][WORDS];
#pragma unroll
                for (int32 i = 0; i < GROUPS; ++i) {
#pragma unroll
                    for (int32 j = 0; j < WORDS; ++j) {
                        words[i][j] = beyond_the_end<T>();
                        if (v + i * 32 * STEP<T> < end)
                            words[i][j] = reinterpret_cast<const uint4*>(row + v + i * 32 * STEP<T>)[j];
                    }
                }
#pragma unroll
                for (int32 i = 0; i < GROUPS; ++i) unpack(words[i], row, x[i]);
            } else {
#pragma unroll
                for (int32 i = 0; i < GROUPS; ++i) {
#pragma unroll
                    for (int32 j = 0; j < STEP<T>; ++j) {
                        const uint32 token = v + i * 32 * STEP<T> + j;
                        x[i][j] = token < end ? load(row + token) : Wide<T>(minus_infinity());
                    }
                }
            }
#pragma unroll
            for (int32 i = 0; i < GROUPS; ++i) use(v + i * 32 * STEP<T>, x[i], i);
            next(v);
        }
    }

    // use(v, x) for each token v whose logit x passes a quick test. Those that do are read again, so that the work on
    // them stands in the program once.
    template <typename Test, typename Use> __device__ __forceinline__ void each_passing(Test test, Use use) const
    {
        constexpr int32 GROUPS = 16 / STEP<T>;
        uint32 passing = 0;
        each_turn<GROUPS>(
            [&](uint32 v, const Wide<T>* x, int32 group) {
#pragma unroll
                for (int32 i = 0; i < STEP<T>; ++i)
                    passing |= uint32(test(x[i]) && v + i < end) << (group * STEP<T> + i);
            },
            [&](uint32 v) {
                for (; passing != 0; passing &= passing - 1) {
                    const uint32 bit = __ffs(passing) - 1, token = v + bit / STEP<T> * 32 * STEP<T> + bit % STEP<T>;
                    use(token, load(row + token));
                }
            });
    }
};

// The greatest x of a warp, of equals that of the lowest token; to all lanes.
template <typename X> __device__ __forceinline__ void first_greatest_of_lanes(X& x, int32& token)
{
#pragma unroll
    for (int32 step = 16; step > 0; step /= 2) {
        const X other = __shfl_xor_sync(ALL_LANES, x, step);
        const int32 other_token = __shfl_xor_sync(ALL_LANES, token, step);
        if (is_greater(other, x) || (!is_greater(x, other) && other_token < token)) x = other, token = other_token;
    }
}

// The greatest x of the cluster, of equals that of the lowest token; to all threads. `values` and `tokens` are shared.
template <int32 WARPS, typename X>
__device__ __forceinline__ void first_greatest(X& x, int32& token, X* values, uint32* tokens)
{
    first_greatest_of_lanes(x, token);
    if (threadIdx.x % 32 == 0) {
        values[threadIdx.x / 32] = x;
        tokens[threadIdx.x / 32] = uint32(token);
    }
    // Each warp's greatest, to the cluster.
    cluster_sync();
#pragma unroll
    for (int32 i = threadIdx.x % 32; i < BLOCKS * WARPS; i += 32) {
        const X other = read_from_block(values + i % WARPS, i / WARPS);
        const int32 other_token = int32(read_from_block(tokens + i % WARPS, i / WARPS));
        if (is_greater(other, x) || (!is_greater(x, other) && other_token < token)) x = other, token = other_token;
    }
    first_greatest_of_lanes(x, token);
    // All have read them: they may be written again, and their block may end.
    cluster_sync();
}

// The greatest logit of a lane and its token; a NaN is taken for +inf, which leaves no choice either.
template <typename T> __device__ __forceinline__ void greatest_logit(const Part<T>& part, Wide<T>& top, int32& token)
{
    top = Wide<T>(minus_infinity());
    token = 0x7FFFFFFF;
    part.template each_turn<4>(
        [&](uint32 v, const Wide<T>* x, int32) {
#pragma unroll
            for (int32 i = 0; i < STEP<T>; ++i) {
                const Wide<T> value = x[i] != x[i] ? Wide<T>(-minus_infinity()) : x[i];
                if (is_greater(value, top)) top = value, token = int32(v) + i;
            }
        },
        [](uint32) {});
}

template <typename T>
__device__ __forceinline__ void greedy(
    const T* __restrict__ logits, int32* __restrict__ chosen, uint32 V, int32 aligned)
{
    constexpr int32 WARPS = THREADS / 32;
    __shared__ Wide<T> values[WARPS];
    __shared__ uint32 tokens[WARPS];
    const Part<T> part(logits, V, aligned, THREADS);
    Wide<T> top;
    int32 token;
    greatest_logit(part, top, token);
    first_greatest<WARPS>(top, token, values, tokens);
    const bool usable = top > Wide<T>(minus_infinity()) && top < Wide<T>(-minus_infinity());
    if (cluster_rank() == 0 && threadIdx.x == 0) chosen[blockIdx.x / BLOCKS] = usable ? token : -1;
}

// A token's mass: the floor of exp(z) 2^40. Without a branch, so that those of several tokens are made at once.
__device__ __forceinline__ uint64 mass_of(double z)
{
    const uint64 mass = uint64(portable_exp(fmax(z, LEAST_MASS)) * 0x1p40);
    return z > LEAST_MASS ? mass : 0;
}

__device__ __forceinline__ uint64 sum_of_lanes(uint64 x)
{
#pragma unroll
    for (int32 step = 16; step > 0; step /= 2) x += __shfl_xor_sync(ALL_LANES, x, step);
    return x;
}

// The least and the greatest of a warp, to all lanes.
__device__ __forceinline__ void narrow_to_lanes(uint64& least, uint64& most)
{
#pragma unroll
    for (int32 step = 16; step > 0; step /= 2) {
        least = min(least, __shfl_xor_sync(ALL_LANES, least, step));
        most = max(most, __shfl_xor_sync(ALL_LANES, most, step));
    }
}

// The sum over the lanes before this one.
__device__ __forceinline__ uint64 sum_of_lanes_before(uint64 own)
{
    uint64 upto = own;
#pragma unroll
    for (int32 step = 1; step < 32; step *= 2) {
        const uint64 before = __shfl_up_sync(ALL_LANES, upto, step);
        if (threadIdx.x % 32 >= step) upto += before;
    }
    return upto - own;
}

// Masses by bin, of a block. A sum of 64 bits is two words, since adding 32 bits is what shared memory does by itself.
struct Histogram {
    static constexpr int32 WARPS = THREADS / 32;
    uint32 low[BINS], high[BINS];
    uint64 warp_totals[WARPS], total, bin, left;

    __device__ void clear()
    {
        for (int32 i = threadIdx.x; i < BINS; i += THREADS) low[i] = high[i] = 0;
    }

    __device__ __forceinline__ void add(int32 bin, uint64 mass)
    {
        const uint32 old = atomicAdd(&low[bin], uint32(mass));
        const uint32 rest = uint32(mass >> 32) + (old + uint32(mass) < old);
        if (rest > 0) atomicAdd(&high[bin], rest);
    }

    // The bin that the mass reaches `left` in, over the whole cluster, and what is left below it. Where top_p is given,
    // `left` is that share of all; returns false where it is more than all, by rounding. The bins are cleared.
    __device__ bool find(uint64& found, uint64& still_left, double top_p)
    {
        static_assert(BINS == BLOCKS * THREADS, "a bin a thread of the cluster");
        const uint32 rank = cluster_rank();
        // The masses of all blocks, to the threads that sum them.
        cluster_sync();
        uint64 own = 0;
#pragma unroll
        for (uint32 block = 0; block < BLOCKS; ++block) {
            const int32 mine = rank * THREADS + threadIdx.x;
            own += read_from_block(low + mine, block) + (uint64(read_from_block(high + mine, block)) << 32);
        }
        uint64 above = sum_of_lanes_before(own);
        if (threadIdx.x % 32 == 31) warp_totals[threadIdx.x / 32] = above + own;
        // The total of each warp's bins, to the block.
        __syncthreads();
        uint64 here = 0;
#pragma unroll
        for (int32 w = 0; w < WARPS; ++w) {
            if (w < threadIdx.x / 32) above += warp_totals[w];
            here += warp_totals[w];
        }
        if (threadIdx.x == 0) total = here;
        // The total of each block's bins, to the cluster, whose bins have been read.
        cluster_sync();
        clear();
        uint64 all = 0, before = 0;
#pragma unroll
        for (uint32 block = 0; block < BLOCKS; ++block) {
            if (block == rank) before = all;
            all += read_from_block(&total, block);
        }
        if (top_p < 1) still_left = uint64(ceil(top_p * double(all)));
        uint32 owner = BLOCKS - 1;
        uint64 upto = all;
#pragma unroll
        for (int32 block = BLOCKS - 1; block >= 0; --block) {
            if (upto >= still_left) owner = block;
            upto -= read_from_block(&total, block);
        }
        above += before;
        if (above < still_left && still_left <= above + own) {
            bin = rank * THREADS + threadIdx.x;
            left = still_left - above;
        }
        // The bin, to the cluster; and the cleared bins to the block.
        cluster_sync();
        if (still_left > all) return false;
        found = read_from_block(&bin, owner);
        still_left = read_from_block(&left, owner);
        // All have read the bin and the totals: they may be written again.
        cluster_sync();
        return true;
    }
};

// What a block of a sampling kernel shares.
struct Shared {
    static constexpr int32 WARPS = THREADS / 32;
    double values[WARPS];
    uint32 tokens[WARPS];
    uint64 least[WARPS], most[WARPS], counts[WARPS];
    uint32 cutoff;
    Histogram masses;
};

// Where the nucleus ends: kept are tokens of |z| below `last`, and of those equal to it, tokens up to `cutoff`.
struct Nucleus {
    uint64 last;  // bits of |z|, which are in its order
    int32 cutoff;
};

template <typename T> struct Sampler {
    const Part<T>& part;
    Shared& shared;
    Wide<T> top;
    double temperature, inverse;
    float slack;  // of what is tested in float32, which is off by 1e-5 at the most

    __device__ Sampler(const Part<T>& part, Shared& shared, Wide<T> top, double temperature)
        : part(part), shared(shared), top(top), temperature(temperature), inverse(1.0 / temperature),
          // beyond these temperatures float32 may overflow, and nothing is ruled out by it
          slack(temperature >= 1e-30 && temperature <= 1e30 ? 1e-3f : -minus_infinity())
    {
    }

    // (x - top) / temperature, rounded once, of COUNT logits. With the rounded inverse at hand, a first quotient and
    // two corrections by the exact remainder give the bits of the division (Markstein), as long as nothing comes near
    // the type's ends: differences of narrower types do not. Of -inf comes NaN, which is above no threshold.
    template <int32 COUNT> __device__ __forceinline__ void scale(const Wide<T>* x, double* z) const
    {
        bool far = slack > 1.0f;
#pragma unroll
        for (int32 i = 0; i < COUNT; ++i) {
            const double below = widened(x[i]) - widened(top);
            z[i] = below * inverse;
            z[i] = __fma_rn(__fma_rn(-temperature, z[i], below), inverse, z[i]);
            z[i] = __fma_rn(__fma_rn(-temperature, z[i], below), inverse, z[i]);
            if (sizeof(T) == 8) {
                const uint32 exponent = uint32(__double2hiint(below)) >> 20 & 0x7FF;
                far |= exponent < 1023 - 400 || exponent > 1023 + 400;
            }
        }
        if (far) {
#pragma unroll
            for (int32 i = 0; i < COUNT; ++i) z[i] = (widened(x[i]) - widened(top)) / temperature;
        }
    }

    __device__ __forceinline__ double z_of(Wide<T> x) const
    {
        double z;
        scale<1>(&x, &z);
        return z;
    }

    __device__ __forceinline__ float rough_z(Wide<T> x) const { return float(x - top) * float(inverse); }

    // use(token, bits of |z|) for the tokens with bits from `least` to `most`.
    template <typename Use> __device__ __forceinline__ void each_between(uint64 least, uint64 most, Use use) const
    {
        const float low = float(__longlong_as_double(least)) - slack, high = float(__longlong_as_double(most)) + slack;
        part.each_passing(
            [&](Wide<T> x) { return !(-rough_z(x) < low) && !(-rough_z(x) > high); },
            [&](uint32 token, Wide<T> x) {
                const uint64 bits = __double_as_longlong(fabs(z_of(x)));
                if (bits >= least && bits <= most) use(int32(token), bits);
            });
    }

    // Where the nucleus ends; false where it has everything.
    __device__ bool nucleus(double top_p, Nucleus& result)
    {
        constexpr int32 WARPS = Shared::WARPS;
        const int32 lane = threadIdx.x % 32, warp = threadIdx.x / 32;
        const int32 place = cluster_rank() * WARPS + warp;
        Histogram& masses = shared.masses;
        const auto weigh = [&](uint32, const Wide<T>* x, int32) {
            constexpr int32 COUNT = 2;  // at once: more take registers that more blocks need
#pragma unroll
            for (int32 start = 0; start < STEP<T>; start += COUNT) {
                bool none = true;
#pragma unroll
                for (int32 i = 0; i < COUNT; ++i) none &= rough_z(x[start + i]) < float(LEAST_MASS) - slack;
                if (none) continue;
                double z[COUNT];
                uint64 mass[COUNT];
                scale<COUNT>(x + start, z);
#pragma unroll
                for (int32 i = 0; i < COUNT; ++i) mass[i] = mass_of(z[i]);
#pragma unroll
                for (int32 i = 0; i < COUNT; ++i)
                    if (mass[i] > 0) masses.add(int32(-z[i] * FIRST_BINS_A_UNIT), mass[i]);
            }
        };
        part.template each_turn<1>(weigh, [](uint32) {});
        uint64 bin, left;
        if (!masses.find(bin, left, top_p)) return false;
        uint64 least = __double_as_longlong(double(bin) / FIRST_BINS_A_UNIT);
        uint64 most = __double_as_longlong(double(bin + 1) / FIRST_BINS_A_UNIT) - 1;

        for (;;) {
            uint64 low = ~0ull, high = 0, own = 0;
            each_between(least, most, [&](int32, uint64 bits) {
                low = min(low, bits);
                high = max(high, bits);
                ++own;
            });
            narrow_to_lanes(low, high);
            own = sum_of_lanes(own);
            if (lane == 0) shared.least[warp] = low, shared.most[warp] = high, shared.counts[warp] = own;
            // What range each warp has found, and in how many tokens, to the cluster.
            cluster_sync();
            uint64 all = 0, before = 0;  // in the row, and in the parts before this warp's
#pragma unroll
            for (int32 i = lane; i < BLOCKS * WARPS; i += 32) {
                const uint64 found = read_from_block(shared.counts + i % WARPS, i / WARPS);
                low = min(low, read_from_block(shared.least + i % WARPS, i / WARPS));
                high = max(high, read_from_block(shared.most + i % WARPS, i / WARPS));
                all += found;
                if (i < place) before += found;
            }
            narrow_to_lanes(low, high);
            all = sum_of_lanes(all);
            before = sum_of_lanes(before);
            // All have read the ranges: they may be written again.
            cluster_sync();

            if (low == high) {
                result.last = low;
                result.cutoff = cutoff(low, left, before, own, all);
                return true;
            }
            const int32 shift = max(0, 64 - __clzll(high - low) - 11);
            each_between(low, high, [&](int32, uint64 bits) {
                masses.add(int32((bits - low) >> shift), mass_of(-__longlong_as_double(bits)));
            });
            masses.find(bin, left, 1.0);
            least = low + (bin << shift);
            most = min(high, least + (1ull << shift) - 1);
        }
    }

    // The last token kept of those with |z| = `last`: less than `left` lies before it. `before` of them are in the
    // parts before this warp's, `own` in it and `all` in the row.
    __device__ int32 cutoff(uint64 last, uint64 left, uint64 before, uint64 own, uint64 all)
    {
        const uint64 mass = mass_of(-__longlong_as_double(last)), kept = (left + mass - 1) / mass;
        if (kept >= all) return 0x7FFFFFFF;
        if (before < kept && kept <= before + own) {  // it is in this warp's part
            uint64 seen = before;
            const auto look = [&](uint32 v, const Wide<T>* x, int32) {
                uint32 tied = 0;
#pragma unroll
                for (int32 i = 0; i < STEP<T>; ++i)
                    tied |= uint32(uint64(__double_as_longlong(fabs(z_of(x[i])))) == last) << i;
                const uint64 lanes_before = seen + sum_of_lanes_before(__popc(tied));
                if (lanes_before < kept && kept <= lanes_before + __popc(tied)) {
                    for (uint64 skip = kept - lanes_before - 1; skip > 0; --skip) tied &= tied - 1;
                    shared.cutoff = v + __ffs(tied) - 1;
                }
                seen = __shfl_sync(ALL_LANES, lanes_before + __popc(tied), 31);
            };
            part.template each_turn<1>(look, [](uint32) {});
        }
        // The cutoff, to the cluster: 0 in all blocks but the one that has it.
        cluster_sync();
        uint32 token = 0;
#pragma unroll
        for (uint32 block = 0; block < BLOCKS; ++block) token = max(token, read_from_block(&shared.cutoff, block));
        return int32(token);
    }
};

template <bool CUT, typename T>
__device__ __forceinline__ void sample(
    const T* __restrict__ logits, const int32* __restrict__ positions, const int64* __restrict__ request_ids,
    int32* __restrict__ chosen, uint32 V, int32 N, int32 aligned, double temperature, double top_p, uint32 key0,
    uint32 key1)
{
    constexpr int32 WARPS = Shared::WARPS;
    __shared__ Shared shared;
    const int64 row = blockIdx.x / BLOCKS;
    const Part<T> part(logits, V, aligned, THREADS);
    if (CUT) shared.masses.clear();
    if (threadIdx.x == 0) shared.cutoff = 0;

    Wide<T> top;
    int32 token;
    greatest_logit(part, top, token);
    double best = widened(top);
    first_greatest<WARPS>(best, token, shared.values, shared.tokens);  // all have cleared their bins, too
    top = narrowed<Wide<T>>(best);
    if (!(best > minus_infinity() && best < -minus_infinity())) {  // alike in all threads of the cluster
        if (cluster_rank() == 0 && threadIdx.x == 0) chosen[row] = -1;
        return;
    }

    Sampler<T> sampler(part, shared, top, temperature);
    Nucleus nucleus{~0ull, 0x7FFFFFFF};  // everything
    const bool cut = CUT && sampler.nucleus(top_p, nucleus);

    const uint32 position = uint32(positions[row]);
    const uint64 request = request_ids == nullptr ? uint64(row / N) : uint64(request_ids[row / N]);
    const auto words_of = [&](uint32 v) {
        return philox({v >> 2, position, uint32(request), uint32(request >> 32)}, key0, key1);
    };
    const auto word_of = [&](uint32 v) {
        const uint4 words = words_of(v);
        const uint32 pair = v & 1 ? words.y : words.x, other = v & 1 ? words.w : words.z;
        return v & 2 ? other : pair;
    };

    // The likeliest token is kept, and no other wins without more than it has.
    best = gumbel(word_of(token));
    float threshold = float(best) - sampler.slack;
    const float least = cut ? -float(__longlong_as_double(nucleus.last)) - sampler.slack : minus_infinity();
    const auto look = [&](uint32 v, const Wide<T>* x, int32) {
        uint32 passing = 0;
#pragma unroll
        for (int32 i = 0; i < STEP<T>; i += 4) {
            const uint4 words = words_of(v + i);
            const uint32 four[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
            for (int32 j = 0; j < 4; ++j) {
                const float z = sampler.rough_z(x[i + j]);
                const bool out = loses(z, four[j], threshold) || z < least || v + i + j >= part.end;
                passing |= uint32(!out) << (i + j);
            }
        }
        if (!__any_sync(ALL_LANES, passing != 0)) return;
        for (; passing != 0; passing &= passing - 1) {
            const int32 other = int32(v) + __ffs(passing) - 1;
            const double z = sampler.z_of(load(part.row + other));
            const uint64 bits = __double_as_longlong(fabs(z));
            const bool kept = bits < nucleus.last || (bits == nucleus.last && other <= nucleus.cutoff);
            const double noisy = z + gumbel(word_of(other));
            if (kept && (noisy > best || (noisy == best && other < token))) best = noisy, token = other;
        }
        float greatest = float(best);
#pragma unroll
        for (int32 step = 16; step > 0; step /= 2)
            greatest = fmaxf(greatest, __shfl_xor_sync(ALL_LANES, greatest, step));
        threshold = greatest - sampler.slack;
    };
    part.template each_turn<1>(look, [](uint32) {});
    first_greatest<WARPS>(best, token, shared.values, shared.tokens);
    if (cluster_rank() == 0 && threadIdx.x == 0) chosen[row] = token;
}

// The logits, to all threads of a block; one of them reads the place, which may be in the host's memory.
template <typename T> __device__ __forceinline__ const T* found(const T* logits, const int64* place)
{
    __shared__ int64 address;
    if (place == nullptr) return logits;
    if (threadIdx.x == 0) address = *place;
    // The address, to all threads.
    __syncthreads();
    return reinterpret_cast<const T*>(address);
}

#define CHOOSE_GREEDY(name, T)                                                                                     \
    extern "C" __global__ void __cluster_dims__(BLOCKS, 1, 1) __launch_bounds__(THREADS, 4)                        \
        name(const T* logits, const int64* place, int32* chosen, uint32 V, int32 aligned)                          \
    {                                                                                                              \
        greedy(found(logits, place), chosen, V, aligned);                                                          \
    }

#define CHOOSE_SAMPLED(name, T, CUT, MIN_BLOCKS)                                                                   \
    extern "C" __global__ void __cluster_dims__(BLOCKS, 1, 1) __launch_bounds__(THREADS, MIN_BLOCKS) name(         \
        const T* logits, const int32* positions, const int64* request_ids, int32* chosen, uint32 V, int32 N,       \
        int32 aligned, double temperature, double top_p, uint32 key0, uint32 key1)                                 \
    {                                                                                                              \
        sample<CUT>(logits, positions, request_ids, chosen, V, N, aligned, temperature, top_p, key0, key1);        \
    }

CHOOSE_GREEDY(choose_greedy_f16, __half)
CHOOSE_GREEDY(choose_greedy_bf16, __nv_bfloat16)
CHOOSE_GREEDY(choose_greedy_f32, float)
CHOOSE_GREEDY(choose_greedy_f64, double)
CHOOSE_SAMPLED(choose_sampled_f16, __half, false, SAMPLING_BLOCKS)
CHOOSE_SAMPLED(choose_sampled_bf16, __nv_bfloat16, false, SAMPLING_BLOCKS)
CHOOSE_SAMPLED(choose_sampled_f32, float, false, SAMPLING_BLOCKS)
CHOOSE_SAMPLED(choose_sampled_f64, double, false, SAMPLING_BLOCKS)
CHOOSE_SAMPLED(choose_from_nucleus_f16, __half, true, NUCLEUS_BLOCKS<__half>)
CHOOSE_SAMPLED(choose_from_nucleus_bf16, __nv_bfloat16, true, NUCLEUS_BLOCKS<__nv_bfloat16>)
CHOOSE_SAMPLED(choose_from_nucleus_f32, float, true, NUCLEUS_BLOCKS<float>)
CHOOSE_SAMPLED(choose_from_nucleus_f64, double, true, NUCLEUS_BLOCKS<double>)
