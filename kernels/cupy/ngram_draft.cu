// Prompt lookup: every earlier place that a request's last n tokens match votes for what followed it.
//
// One block a depth of a request. Its warps have a span of places each, the first warp the most recent ones, and go
// over them twice: once to count those of each order (a length of suffix, from `shortest` up), which gives each order
// its total, and once to vote, when the rank of each place by recency is known. Votes and shares are whole numbers, of
// 2^-52 and 2^-62, whose sums are the same in any order, so that threads may add them up in a hash table as they come.
// The candidates are then ranked by counting those that are better; where there are many, a histogram of the shares
// first leaves out those that cannot be among the best K.
//
//   tokens     int32 (B, R)     the first lengths[b] of a row count; those of inert slots may be anything
//   vote_sums  int64 (voters + 1)  votes of the most recent places together
//   log_probs  float32 (B, L, K), token_ids  int32 (B, L, K)
#include "block.cuh"
#include "portable_math.cuh"

constexpr int32 AHEAD = 4;                // steps of a warp whose tokens are loaded together
constexpr int32 MOST_ORDERS = 32;         // one a lane; `ngram_draft.py` says these too
constexpr int32 MOST_CANDIDATES = 4096;
constexpr int32 FEW = 128;                // candidates that are ranked at once
constexpr int32 BUCKETS = 512;            // of shares
constexpr int32 FREE = -1;                // the key of an unused slot

// The tokens of one request, and the longest suffix of them that is looked up.
struct Sequence {
    const int32* tokens;
    int32 length, longest;

    // How many tokens before `end`, of which the last is known to, match the last ones.
    __device__ int32 matched(int32 end) const
    {
        int32 n = 1;
        while (n < longest && n < end && tokens[end - 1 - n] == tokens[length - 1 - n]) ++n;
        return n;
    }

    // Visits this warp's places where the last token stands before, 32 at a time and the most recent first: with each
    // lane's place, and how many tokens match there, or 0.
    template <typename Visit>
    __device__ __forceinline__ void over_places(int32 warp, int32 warps, int32 lane, Visit visit) const
    {
        if (length < 2) return;
        const int32 span = (length - 2 + 32 * warps) / (32 * warps) * 32, last = tokens[length - 1];
        const int32 newest = length - 1 - warp * span, oldest = max(newest - span, 0);
        for (int32 top = newest; top > oldest; top -= 32 * AHEAD) {
            bool alike[AHEAD];
#pragma unroll
            for (int32 j = 0; j < AHEAD; ++j) {
                const int32 end = top - 32 * j - lane;
                alike[j] = end > oldest && tokens[end - 1] == last;
            }
#pragma unroll
            for (int32 j = 0; j < AHEAD; ++j) {
                if (!__any_sync(ALL_LANES, alike[j])) continue;
                const int32 end = top - 32 * j - lane;
                visit(end, alike[j] ? matched(end) : 0);
            }
        }
    }
};

// Candidates by token, with linear probing, and where they are in the order of their coming.
struct Ballot {
    uint64* shares;
    int32* keys;
    unsigned short* filled;
    int32 slots, *count;

    __device__ void vote(int32 token, uint64 share)
    {
        int32 slot = int32(__umulhi(uint32(token) * 2654435761u, uint32(slots)));
        for (;;) {
            const int32 was = atomicCAS(keys + slot, FREE, token);
            if (was == FREE) filled[atomicAdd(count, 1)] = slot;
            if (was == FREE || was == token) break;
            slot = slot + 1 < slots ? slot + 1 : 0;
        }
        atomicAdd(shares + slot, share);
    }

    // Of the lanes in `voting`; where they agree, as they do while a text repeats itself, in one vote.
    __device__ void vote_together(uint32 voting, int32 lane, int32 token, uint64 share)
    {
        int32 agree;
        __match_all_sync(voting, token, &agree);
        if (!agree) {
            vote(token, share);
            return;
        }
        constexpr uint64 PART = (1 << 21) - 1;
        const uint64 low = __reduce_add_sync(voting, uint32(share & PART));
        const uint64 middle = __reduce_add_sync(voting, uint32(share >> 21 & PART));
        const uint64 high = __reduce_add_sync(voting, uint32(share >> 42));
        if (lane == __ffs(voting) - 1) vote(token, low + (middle << 21) + (high << 42));
    }
};

// Which bucket a share lies in: eight to a doubling, larger shares not below smaller ones.
__device__ __forceinline__ int32 bucket_of(uint64 share)
{
    return int32(__float_as_uint(__ull2float_rz(share)) >> 20) - (127 << 3);
}

template <int32 THREADS>
__device__ __forceinline__ void draft(
    const int32* __restrict__ tokens, const int32* __restrict__ lengths, const int64* __restrict__ vote_sums, int32 R,
    int32 voters, int32 K, int32 longest, int32 shortest, double escape, int32 slots, int32 candidates,
    float* __restrict__ log_probs, int32* __restrict__ token_ids)
{
    wait_for_earlier();
    constexpr int32 WARPS = THREADS / 32;
    extern __shared__ uint64 dynamic[];
    __shared__ uint32 sums[2][32];
    __shared__ int32 counts[WARPS][MOST_ORDERS], early[MOST_ORDERS], buckets[BUCKETS];
    __shared__ double factors[MOST_ORDERS];
    __shared__ int32 filled_count, left_count, cut;
    Block block(sums);
    const int32 t = block.t, lane = block.lane, warp = block.warp, depth = blockIdx.x, b = blockIdx.y;
    const int32 length = min(max(lengths[b], 0), R);
    const Sequence sequence{tokens + int64(b) * R, length, min(longest, length)};
    int32* keys = reinterpret_cast<int32*>(dynamic + slots);
    unsigned short* filled = reinterpret_cast<unsigned short*>(keys + slots);
    Ballot ballot{dynamic, keys, filled, slots, &filled_count};

    for (int32 i = t; i < slots; i += THREADS) {
        dynamic[i] = 0;
        keys[i] = FREE;
    }
    if (t < BUCKETS) buckets[t] = 0;
    if (t < MOST_ORDERS) early[t] = 0;
    if (t == 0) filled_count = left_count = cut = 0;
    // Nothing is counted yet, for all.
    block.barrier();

    // Lane o counts the places of order `shortest` + o, and those of them that nothing follows at this depth yet.
    int32 count = 0, count_early = 0;
    sequence.over_places(warp, WARPS, lane, [&](int32 end, int32 n) {
        const uint32 unknown = __ballot_sync(ALL_LANES, end + depth >= length);
        for (int32 o = 0;; ++o) {
            const uint32 places = __ballot_sync(ALL_LANES, n >= shortest + o);
            if (places == 0) break;
            if (lane == o) {
                count += __popc(places);
                count_early += __popc(places & unknown);
            }
        }
    });
    counts[warp][lane] = count;
    if (count_early > 0) atomicAdd(early + lane, count_early);
    // The counts of every warp, to all.
    block.barrier();
    int32 first = 0;  // rank of this warp's next place, of the lane's order
    for (int32 w = 0; w < warp; ++w) first += counts[w][lane];
    if (warp == 0) {
        int32 places = 0;
        for (int32 w = 0; w < WARPS; ++w) places += counts[w][lane];
        places = min(places, voters);
        const double total = double(vote_sums[places] - vote_sums[min(early[lane], places)]) * 0x1p-52 + escape;
        const double passed_on = escape / total;
        double escaped = 1.0;  // the longest order has all of it
        for (int32 o = MOST_ORDERS - 1; o > 0; --o) {
            const double longer = __shfl_sync(ALL_LANES, passed_on, o);
            if (o > lane) escaped *= longer;
        }
        factors[lane] = escaped / total;
    }
    // What a vote of each order is worth, to all.
    block.barrier();

    const uint32 below = (1u << lane) - 1;
    sequence.over_places(warp, WARPS, lane, [&](int32 end, int32 n) {
        uint64 share = 0;
        for (int32 o = 0;; ++o) {
            const uint32 places = __ballot_sync(ALL_LANES, n >= shortest + o);
            if (places == 0) break;
            const int32 rank = __shfl_sync(ALL_LANES, first, o) + __popc(places & below);
            if (n >= shortest + o && rank < voters)
                share += uint64(double(vote_sums[rank + 1] - vote_sums[rank]) * factors[o] * 1024.0);
            if (lane == o) first += __popc(places);
        }
        const int32 token = share > 0 && end + depth < length ? sequence.tokens[end + depth] : FREE;
        const bool votes = token >= 0;
        const uint32 voting = __ballot_sync(ALL_LANES, votes);
        if (votes) ballot.vote_together(voting, lane, token, share);
    });
    // Every vote, to all.
    block.barrier();

    int32 left = filled_count;
    const unsigned short* best = filled;
    if (left > FEW && left > K) {
        for (int32 i = t; i < left; i += THREADS) atomicAdd(buckets + bucket_of(dynamic[filled[i]]), 1);
        // The histogram, to all.
        block.barrier();
        const int32 bucket = BUCKETS - 1 - t;  // the largest shares first
        const uint32 mine = bucket >= 0 ? buckets[bucket] : 0;
        uint32 total;
        const uint32 before = block.sum_before(mine, total);
        if (before < uint32(K) && uint32(K) <= before + mine) cut = bucket;
        // The bucket of the K-th, to all.
        block.barrier();
        unsigned short* kept = filled + candidates;
        for (int32 i = t; i < left; i += THREADS)
            if (bucket_of(dynamic[filled[i]]) >= cut) kept[atomicAdd(&left_count, 1)] = filled[i];
        // Those that are left, to all.
        block.barrier();
        best = kept;
        left = left_count;
    }
    const int64 row = (int64(b) * gridDim.x + depth) * K;
    for (int32 i = t; i < left; i += THREADS) {
        const uint64 share = dynamic[best[i]];
        const int32 token = keys[best[i]];
        int32 rank = 0;
        for (int32 j = 0; j < left; ++j) {
            const uint64 other = dynamic[best[j]];
            rank += other > share || (other == share && keys[best[j]] < token);
        }
        if (rank < K) {
            token_ids[row + rank] = token;
            // As float32, the shares are far enough apart for their logarithms to be in order.
            log_probs[row + rank] = float(portable_log(double(__ull2float_rn(share)) * 0x1p-62));
        }
    }
    for (int32 k = left + t; k < K; k += THREADS) {
        token_ids[row + k] = -1;
        log_probs[row + k] = minus_infinity();
    }
}

#define DRAFT(name, THREADS)                                                                                          \
    extern "C" __global__ void __launch_bounds__(THREADS) name(                                                       \
        const int32* tokens, const int32* lengths, const int64* vote_sums, int32 R, int32 voters, int32 K,            \
        int32 longest, int32 shortest, double escape, int32 slots, int32 candidates, float* log_probs,                \
        int32* token_ids)                                                                                             \
    {                                                                                                                 \
        draft<THREADS>(tokens, lengths, vote_sums, R, voters, K, longest, shortest, escape, slots, candidates,        \
                       log_probs, token_ids);                                                                         \
    }

DRAFT(ngram_draft_512, 512)
DDTREE_SHARED(ngram_draft_512, 12 * (MOST_CANDIDATES + MOST_CANDIDATES / 2 + 1) + 4 * MOST_CANDIDATES);
DRAFT(ngram_draft_1024, 1024)
DDTREE_SHARED(ngram_draft_1024, 12 * (MOST_CANDIDATES + MOST_CANDIDATES / 2 + 1) + 4 * MOST_CANDIDATES);
