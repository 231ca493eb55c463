// The draft trees of highest total probability: the first `budget` rank paths by score, then by path.
//
// Two ways, for small and for large trees; each builds the trees of a batch in one launch, one request a block.
//
// small_N: for budgets to N = 64 and 128, and as many depths and paths as have codes of one word. A bound is found that
//   at least `budget` paths are below and mostly not many more; all paths below it are made level by level, each warp
//   the children of one path; and each path is compared with all. Everything lies in shared memory. Where many paths
//   have equal scores, so that too many are below the bound, one warp makes a best-first search instead, in registers:
//   node i has a list, its children in order of rank, of which the first that is not yet taken is known to lane i % 32.
//   Taking a path is one minimum over the warp, and what its successors cost is known before it is taken.
//
// grow_*: level by level, all threads at once, for any budget and depth. A bound is kept that at least `budget` paths
//   reach; of each level's children only those strictly better than it are made, a bisection over all paths made so
//   far raises it, and what is not better than it any more is dropped. So at the end all paths better than the bound are
//   there, about `budget` of them, and are sorted. If they are fewer, those that equal the bound fill the rest in the
//   order of paths. A path that equals the bound and has a parent that does too adds a candidate that changes no sum, so
//   below each first such path the tree is regular, and the place of every node in it is calculated. In shared memory
//   (grow_shared) or, for more nodes, in global memory (grow_global).
//
// fill_visibility: one warp a node, after grow_*.
//
//   log_probs         float32 (B, L, K)
//   token_ids         int32   (B, L, K)
//   root_token_ids    int32   (B)
//   tokens, parents, depths, ranks   int32 (B, N)   written in full, as all that follows
//   scores            float64 (B, N)
//   node_counts       int32   (B)
//   words             uint32  (B, N, W)   bit j % 32 of word j / 32 of row i: node i sees node j
#include "block.cuh"
#include "path_code.cuh"

extern __shared__ uint64 arena[];

struct Trees {
    const float* log_probs;
    const int32* token_ids;
    const int32* root_token_ids;
    int32 *tokens, *parents, *depths, *ranks;
    double* scores;
    int32* node_counts;
    uint32* words;
    int32 L, K, N;
};

__device__ __forceinline__ void write_node(
    const Trees& trees, int64 place, int32 token, int32 parent, int32 depth, int32 rank, double score)
{
    trees.tokens[place] = token;
    trees.parents[place] = parent;
    trees.depths[place] = depth;
    trees.ranks[place] = rank;
    trees.scores[place] = score;
}

// The first r of [from, to) of which `ends` holds, or `to`; once it holds it does so on.
template <typename Ends>
__device__ __forceinline__ uint32 first_where(uint32 from, uint32 to, Ends ends)
{
    while (from < to) {
        const uint32 middle = (from + to) / 2;
        if (ends(middle)) to = middle; else from = middle + 1;
    }
    return from;
}

// ---------------------------------------------------------------------------------------------------- small_N

constexpr int32 SMALL_THREADS = 512;
constexpr int32 SMALL_WARPS = SMALL_THREADS / 32;
constexpr int32 SMALL_DEPTHS = 44;  // most depths; the codes of SMALL_PATHS paths of that depth then fit a word
constexpr int32 SMALL_PATHS = 512;  // below the bound, the root included
static_assert(SMALL_PATHS == SMALL_THREADS, "a thread can hold each path");
constexpr uint32 SMALL_COMPARED = 192;  // more paths are cut to the best before each is compared with all

__host__ __device__ constexpr uint32 small_shared(int32 most_nodes)
{
    return (SMALL_DEPTHS + 2) * (most_nodes + 2) * sizeof(float) + SMALL_DEPTHS * most_nodes * sizeof(int32);
}

// What is known of a path beside its key and code, packed: its parent (10 bits), last rank (8), depth (6) and the
// length of its code (7).
struct Path {
    uint32 packed;
    __device__ Path(uint32 parent, uint32 rank, uint32 depth, uint32 bits)
        : packed(parent | rank << 10 | depth << 18 | bits << 24) {}
    __device__ explicit Path(uint32 packed_) : packed(packed_) {}
    __device__ uint32 parent() const { return packed & 1023; }
    __device__ uint32 rank() const { return packed >> 10 & 255; }
    __device__ uint32 depth() const { return packed >> 18 & 63; }
    __device__ uint32 bits() const { return packed >> 24; }
    __device__ Path with_next_rank() const { return Path(packed + (1 << 10)); }
};

// A draft in shared memory, of at most as many candidates as nodes.
struct Draft {
    int32 L, columns;     // two columns behind the last candidate, and two rows behind the last depth, are +inf
    const float* costs;   // (L + 2, columns)
    const uint32* widths; // (L) candidates before the first that is not drafted
    const float* chain;   // (L + 1) what the likeliest path of each length costs, about
};

// A bound that at least `budget` paths are below, or NOT_DRAFTED. Of the paths that leave the likeliest one at no more
// than one depth, `budget` to a quarter more lie below it: mostly that is nearly as low as the bound of all paths.
__device__ uint64 likely_bound(Block& block, const Draft& draft, uint32 budget)
{
    // Those paths as lists, one for each length and depth to leave at, in order of rank; rank 0, which does not leave,
    // is in one list a length. Costs are float32 here, and about right (subnormal ones count as 0).
    constexpr int LISTS = (SMALL_DEPTHS * (SMALL_DEPTHS + 1) / 2 + SMALL_THREADS - 1) / SMALL_THREADS;
    const float* costs[LISTS];
    float before[LISTS];
    uint32 first[LISTS], from[LISTS], to[LISTS];  // of a list, the first rank that the bound may leave out is in from … to
    float greatest = 0.0f;
    uint32 all = 0;
#pragma unroll
    for (int i = 0; i < LISTS; ++i) {
        costs[i] = draft.costs;
        before[i] = 0.0f;
        first[i] = from[i] = to[i] = 0;
        if (2 * i * SMALL_THREADS >= draft.L * (draft.L + 1)) continue;  // for all threads: there are no more lists
        const int32 list = i * SMALL_THREADS + block.t;
        int32 length = int32(0.5f * (1.0f + sqrtf(8.0f * list + 1.0f)));
        while (length * (length - 1) / 2 > list) --length;
        while (length * (length + 1) / 2 <= list) ++length;
        const int32 depth = list - length * (length - 1) / 2;
        if (length > draft.L || draft.chain[length] == -minus_infinity()) continue;
        costs[i] = draft.costs + depth * draft.columns;
        before[i] = draft.chain[length] - costs[i][0];
        first[i] = from[i] = depth + 1 == length ? 0 : 1;
        to[i] = max(draft.widths[depth], first[i]);
        all += to[i] - first[i];
        if (first[i] < to[i]) greatest = fmaxf(greatest, before[i] + costs[i][to[i] - 1]);
    }
    float low = 0.0f, high = __uint_as_float(block.greatest(__float_as_uint(greatest)));
    if (block.sum(all) < budget) return NOT_DRAFTED;
    // `budget` paths of one rank reach a bound that is sometimes right already, so it is tried first.
    const bool one_rank = 0 < budget && budget <= draft.widths[0];
    if (one_rank) high = fminf(high, draft.costs[budget - 1]);
    for (int step = 0; step < 12; ++step) {
        const float middle = one_rank && step == 0 ? high : 0.5f * (low + high);
        uint32 ends[LISTS], found = 0;
#pragma unroll
        for (int i = 0; i < LISTS; ++i) {
            ends[i] = first_where(from[i], to[i], [&](uint32 r) { return before[i] + costs[i][r] > middle; });
            found += ends[i] - first[i];
        }
        found = block.sum(found);
        const bool too_few = found < budget;
        (too_few ? low : high) = middle;
        if (!too_few && found <= budget + budget / 4) break;
#pragma unroll
        for (int i = 0; i < LISTS; ++i) {
            from[i] = too_few ? ends[i] : from[i];
            to[i] = too_few ? to[i] : ends[i];
        }
    }
    return __double_as_longlong(double(high) * (1.0 + 1e-5) + 1e-30);  // more than the sums are wrong by
}

template <int SLOTS>
struct SmallTree {
    static constexpr int32 MOST = 32 * SLOTS;
    uint64 keys[MOST + 1];
    uint32 paths[MOST + 1];  // Path, with the node that is the parent

    __device__ void set(uint32 node, uint64 key, Path path, uint32 parent)
    {
        keys[node] = key;
        paths[node] = Path(parent, path.rank(), path.depth(), 0).packed;
    }
};

// Make all paths below a likely bound, level by level, and put the first `budget` of them in order. Return the nodes,
// the root included, or 0 if there were too many.
template <int SLOTS>
__device__ uint32 grow_small(Block& block, const Draft& draft, uint32 budget, SmallTree<SLOTS>& tree)
{
    __shared__ uint64 keys[SMALL_PATHS], codes[SMALL_PATHS];
    __shared__ uint32 paths[SMALL_PATHS], own[SMALL_PATHS], nodes[SMALL_PATHS], counts[SMALL_DEPTHS];
    const int32 t = block.t;
    if (t < SMALL_DEPTHS) counts[t] = 0;
    if (t == 0) {
        keys[0] = codes[0] = 0;
        paths[0] = nodes[0] = 0;
    }
    // The root and the counts are seen by all behind the barriers in here.
    const uint64 bound = likely_bound(block, draft, budget);
    uint32 begin = 0, end = 1;
    for (int32 depth = 0; depth < draft.L && begin < end; ++depth) {
        const float* row = draft.costs + depth * draft.columns;
        const uint32 width = draft.widths[depth];
        for (uint32 parent = begin + block.warp; parent < end; parent += SMALL_WARPS) {
            const uint64 parent_key = keys[parent];
            for (uint32 rank = block.lane;; rank += 32) {
                const uint64 key = rank < width ? key_after(parent_key, row[rank]) : NOT_DRAFTED;
                const bool below = key < bound;  // as in all lanes before this one
                const int32 made = __popc(__ballot_sync(ALL_LANES, below));
                if (made == 0) break;
                uint32 first = 0;
                if (block.lane == 0) first = end + atomicAdd(&counts[depth], made);
                first = __shfl_sync(ALL_LANES, first, 0);
                if (below && first + block.lane < SMALL_PATHS) {
                    const Path above(paths[parent]);
                    keys[first + block.lane] = key;
                    codes[first + block.lane] = with_rank(codes[parent], above.bits(), rank);
                    paths[first + block.lane] = Path(parent, rank, depth + 1, above.bits() + rank_bits(rank)).packed;
                }
                if (made < 32) break;
            }
        }
        // The children and how many there are, to all.
        __syncthreads();
        begin = end;
        end += counts[depth];
        if (end > SMALL_PATHS) return 0;
    }
    const uint32 found = end - 1;
    if (found < budget && bound != NOT_DRAFTED) return 0;

    // `keys`, `codes` and `own` become those of the paths that are put in order: all, or of many the best.
    uint32 kept = found;
    if (t < end) own[t] = t;
    if (found > SMALL_COMPARED) {
        const uint64 key = 0 < t && t < end ? keys[t] : NOT_DRAFTED, code = t < end ? codes[t] : 0;
        uint64 low = keys[1], high = bound - 1;
        while (low < high) {
            const uint64 middle = low + (high - low) / 2;
            const uint32 reached = block.sum(key <= middle);
            if (reached < budget) {
                low = middle + 1;
            } else {
                high = middle;
                if (reached <= budget + budget / 4) break;
            }
        }
        const uint32 place = 1 + block.sum_before(key <= high, kept);
        if (key <= high) {
            keys[place] = key;
            codes[place] = code;
            own[place] = t;
        }
    }
    // They, to all who count; the paths lie in the order in which they were made, parents first.
    __syncthreads();
    // A path's node is the number of paths before it, the root among them; so many threads share in counting them.
    uint32 sharing = 32;
    while (sharing > 1 && kept * sharing > SMALL_THREADS) sharing /= 2;
    const uint32 path = 1 + t / sharing;
    uint32 before = 0;
    if (path <= kept) {
        const uint64 key = keys[path];
        bool tied = false;
#pragma unroll 4
        for (uint32 other = 1 + t % sharing; other <= kept; other += sharing) {
            const uint64 other_key = keys[other];
            before += other_key < key;
            tied = tied || (other_key == key && other != path);
        }
        if (tied) {
            const uint64 code = codes[path];
            for (uint32 other = 1 + t % sharing; other <= kept; other += sharing) {
                const uint64 other_code = codes[other];
                // Of equal codes, one path continues the other by zeros, and it is behind it.
                if (keys[other] == key) before += other_code < code || (other_code == code && other < path);
            }
        }
    }
    for (uint32 step = sharing / 2; step > 0; step /= 2) before += __shfl_xor_sync(ALL_LANES, before, step);
    if (path <= kept && t % sharing == 0) nodes[own[path]] = 1 + before;
    // The nodes, to those who write which is whose parent.
    __syncthreads();
    const uint32 count = min(kept, budget);
    for (uint32 i = t; i <= kept; i += SMALL_THREADS) {
        const uint32 node = i == 0 ? 0 : nodes[own[i]];
        const Path made(paths[own[i]]);
        if (node <= count) tree.set(node, keys[i], made, nodes[made.parent()]);
    }
    return 1 + count;
}

// Best-first search by one warp. Return the nodes, the root included.
template <int SLOTS>
__device__ uint32 search(const Draft& draft, int32 budget, SmallTree<SLOTS>& tree)
{
    const int32 lane = threadIdx.x, columns = draft.columns;
    const float* costs = draft.costs;
    // Of list 32 * s + lane: its node, the child in question, and the keys of the child's two successors.
    uint64 node_key[SLOTS], node_code[SLOTS], child_key[SLOTS], sibling_key[SLOTS], grandchild_key[SLOTS];
    uint32 packed[SLOTS];
#pragma unroll
    for (int s = 0; s < SLOTS; ++s) {
        node_key[s] = node_code[s] = 0;
        packed[s] = 0;
        child_key[s] = s == 0 && lane == 0 ? key_after(0, costs[0]) : NOT_DRAFTED;
        sibling_key[s] = key_after(0, costs[1]);
        grandchild_key[s] = key_after(child_key[s], costs[columns]);
    }
    int32 n = 1;  // nodes so far
    for (; n <= budget; ++n) {
        uint64 best = child_key[0];
        int32 slot = 0;
        bool doubt = false;  // whether another of the lane's keys equals the best
#pragma unroll
        for (int s = 1; s < SLOTS; ++s) {
            doubt = child_key[s] < best ? false : doubt || child_key[s] == best;
            slot = child_key[s] < best ? s : slot;
            best = min(best, child_key[s]);
        }
        const uint32 high = uint32(best >> 32), least_high = __reduce_min_sync(ALL_LANES, high);
        if (least_high >= uint32(NOT_DRAFTED >> 32)) break;  // nothing is left, in every lane
        uint32 lanes = __ballot_sync(ALL_LANES, high == least_high);
        if ((lanes & (lanes - 1)) != 0 || (lanes & __ballot_sync(ALL_LANES, doubt)) != 0) {
            const uint32 low = uint32(best);
            const uint32 least_low = __reduce_min_sync(ALL_LANES, high == least_high ? low : ~0u);
            bool equal = high == least_high && low == least_low;
            uint64 code = ~0ull;
#pragma unroll
            for (int s = 0; s < SLOTS; ++s) {
                const uint64 other = with_rank(node_code[s], Path(packed[s]).bits(), Path(packed[s]).rank());
                if (equal && child_key[s] == best && other <= code) {
                    code = other;
                    slot = s;
                }
            }
            const uint32 code_high = uint32(code >> 32), code_low = uint32(code);
            const uint32 least_code_high = __reduce_min_sync(ALL_LANES, equal ? code_high : ~0u);
            equal = equal && code_high == least_code_high;
            const uint32 least_code_low = __reduce_min_sync(ALL_LANES, equal ? code_low : ~0u);
            lanes = __ballot_sync(ALL_LANES, equal && code_low == least_code_low);
        }
        const int32 taker = __ffs(lanes) - 1;

        uint32 own_packed = packed[0];
        uint64 own_grandchild = grandchild_key[0], own_code = node_code[0];
#pragma unroll
        for (int s = 1; s < SLOTS; ++s) {
            own_packed = slot == s ? packed[s] : own_packed;
            own_grandchild = slot == s ? grandchild_key[s] : own_grandchild;
            own_code = slot == s ? node_code[s] : own_code;
        }
        // The path that is taken, to the lane of its own list.
        const uint64 key = __shfl_sync(ALL_LANES, best, taker);
        const uint64 first_key = __shfl_sync(ALL_LANES, own_grandchild, taker);
        const uint64 parent_code = __shfl_sync(ALL_LANES, own_code, taker);
        const Path path(__shfl_sync(ALL_LANES, own_packed, taker));
        const int32 taken_slot = __shfl_sync(ALL_LANES, slot, taker);
        const uint32 rank = path.rank(), bits = path.bits();
        if (lane == 0) tree.set(n, key, Path(0, rank, path.depth() + 1, 0), 32 * taken_slot + taker);
        const uint64 code = with_rank(parent_code, bits, rank);
        const uint32 new_packed = Path(0, 0, path.depth() + 1, bits + rank_bits(rank)).packed;
#pragma unroll
        for (int s = 0; s < SLOTS; ++s) {
            const bool taken = s == taken_slot && lane == taker, made = 32 * s + lane == n;
            node_key[s] = made ? key : node_key[s];
            node_code[s] = made ? code : node_code[s];
            packed[s] = made ? new_packed : taken ? Path(packed[s]).with_next_rank().packed : packed[s];
            child_key[s] = made ? first_key : taken ? sibling_key[s] : child_key[s];
            const float* row = costs + Path(packed[s]).depth() * columns;
            sibling_key[s] = key_after(node_key[s], row[Path(packed[s]).rank() + 1]);
            grandchild_key[s] = key_after(child_key[s], row[columns]);
        }
    }
    return n;
}

template <int SLOTS>
__device__ __forceinline__ void build_small(const Trees& trees)
{
    constexpr int32 MOST_WORDS = SLOTS + 1;
    __shared__ SmallTree<SLOTS> tree;
    __shared__ uint32 sums[2][32], widths[SMALL_DEPTHS];
    __shared__ float chain[SMALL_DEPTHS + 1];
    __shared__ uint32 searched;
    Block block(sums);

    const int32 L = trees.L, N = trees.N, budget = N - 1, width = min(trees.K, budget), columns = width + 2, t = block.t;
    const int64 request = blockIdx.x;
    float* costs = reinterpret_cast<float*>(arena);
    int32* tokens = reinterpret_cast<int32*>(costs + (L + 2) * columns);  // (L, width)
    for (int32 d = block.warp; d < L + 2; d += SMALL_WARPS) {
        const int64 source = (request * L + d) * trees.K;
        uint32 drafted = width;
#pragma unroll 2
        for (int32 base = 0; base < columns; base += 32) {
            const int32 r = base + block.lane;
            const bool inside = d < L && r < width;
            const float cost = inside ? cost_of(trees.log_probs[source + r]) : -minus_infinity();
            if (inside) tokens[d * width + r] = trees.token_ids[source + r];
            if (r < columns) costs[d * columns + r] = cost;
            const uint32 ends = __ballot_sync(ALL_LANES, cost == -minus_infinity());
            if (ends != 0) drafted = min(drafted, uint32(base + __ffs(ends) - 1));
        }
        if (block.lane == 0 && d < L) widths[d] = drafted;
    }
    // The draft, to all.
    __syncthreads();
    if (block.warp == 0) {
        float before = 0.0f;
        for (int32 base = 0; base < L; base += 32) {
            const int32 d = base + block.lane;
            float sum = d < L ? costs[d * columns] : 0.0f;
#pragma unroll
            for (int step = 1; step < 32; step *= 2) {
                const float other = __shfl_up_sync(ALL_LANES, sum, step);
                if (block.lane >= step) sum += other;
            }
            sum += before;
            if (d < L) chain[d + 1] = sum;
            before = __shfl_sync(ALL_LANES, sum, 31);
        }
        if (t == 0) chain[0] = 0.0f;
    }
    // The chain, to all.
    __syncthreads();
    const Draft draft = {L, columns, costs, widths, chain};
    int32 n = grow_small(block, draft, budget, tree);
    if (n == 0) {
        if (block.warp == 0) {
            n = search(draft, budget, tree);
            if (t == 0) searched = n;
        }
        // How many nodes, to all.
        __syncthreads();
        n = searched;
    }
    // The nodes, to all who write them.
    __syncthreads();

    const int32 W = (N + 31) / 32;
    if (t == 0) trees.node_counts[request] = n;
    for (int32 i = t; i < N; i += SMALL_THREADS) {
        const int64 place = request * N + i;
        uint32 seen[MOST_WORDS] = {};
        if (i == 0) {
            write_node(trees, place, trees.root_token_ids[request], -1, 0, -1, 0.0);
            seen[0] = 1;
        } else if (i < n) {
            const Path path(tree.paths[i]);
            const int32 depth = path.depth(), rank = path.rank();
            write_node(trees, place, tokens[(depth - 1) * width + rank], path.parent(), depth, rank, score_of(tree.keys[i]));
            seen[0] = 1;
            for (int32 j = i; j > 0; j = Path(tree.paths[j]).parent()) {
#pragma unroll
                for (int w = 0; w < MOST_WORDS; ++w) seen[w] |= j / 32 == w ? 1u << (j % 32) : 0u;
            }
        } else {
            write_node(trees, place, -1, -1, -1, -1, minus_infinity());
        }
#pragma unroll
        for (int w = 0; w < MOST_WORDS; ++w)
            if (w < W) trees.words[place * W + w] = seen[w];
    }
}

#define TREES_PARAMETERS                                                                                              \
    const float *__restrict__ log_probs, const int32 *__restrict__ token_ids, const int32 *__restrict__ root_token_ids, \
        int32 *__restrict__ tokens, int32 *__restrict__ parents, int32 *__restrict__ depths, int32 *__restrict__ ranks, \
        double *__restrict__ scores, int32 *__restrict__ node_counts, uint32 *__restrict__ words, int32 L, int32 K, int32 N
#define TREES                                                                                                    \
    Trees { log_probs, token_ids, root_token_ids, tokens, parents, depths, ranks, scores, node_counts, words, L, K, N }

extern "C" __global__ void __launch_bounds__(SMALL_THREADS, 1) small_64(TREES_PARAMETERS)
{
    wait_for_earlier();
    build_small<2>(TREES);
}
extern "C" __global__ void __launch_bounds__(SMALL_THREADS, 1) small_128(TREES_PARAMETERS)
{
    wait_for_earlier();
    build_small<4>(TREES);
}
DDTREE_SHARED(small_64, small_shared(64));
DDTREE_SHARED(small_128, small_shared(128));

// ---------------------------------------------------------------------------------------------------- grow_*

constexpr int32 GROW_SHARED_THREADS = 1024, GROW_GLOBAL_THREADS = 512;
constexpr uint32 GROW_SHARED = 100000;  // beside what is static

// More paths than this are dropped to the `budget` best or a few more.
__host__ __device__ constexpr int64 most_kept(int64 budget) { return budget + (budget >= 4 ? budget / 4 : 1); }

// The root is path 0; parents lie before their children, and depths one after the other.
template <typename Index>
struct Paths {
    int32 capacity;
    uint64 *keys, *codes;
    uint32 *order;  // offsets of children, where paths have moved to, and at the end which path is where
    uint32 *widths, *sizes;  // of a depth: candidates that are drafted, and nodes from one on that equals the bound
    float* costs;  // of the candidates of one depth
    Index *parents, *ranks, *depths, *bits;
    Index *nexts;  // the first rank that is not yet made; at the end of use to sort
    Index *products;  // of rank + 1 along the path, which so many paths come before or equal; at the end its node

    // Mirrored in build_tree.py.
    __device__ Paths(unsigned char* memory, int32 budget, int32 L, int32 columns)
    {
        capacity = 2 * int32(most_kept(budget)) + 2;
        keys = reinterpret_cast<uint64*>(memory);
        codes = keys + capacity;
        order = reinterpret_cast<uint32*>(codes + capacity);
        widths = order + capacity + 1;
        sizes = widths + L;
        costs = reinterpret_cast<float*>(sizes + L + 2);
        parents = reinterpret_cast<Index*>(costs + columns);
        ranks = parents + capacity;
        depths = ranks + capacity;
        bits = depths + capacity;
        nexts = bits + capacity;
        products = nexts + capacity;
    }

    // Whether a path comes before another of equal score and code: node by node, and a prefix before its continuation.
    // A path is its parent and its last rank. Codes are equal where one continues the other by zeros or both are cut.
    __device__ bool precedes(uint32 parent_a, uint32 rank_a, uint32 parent_b, uint32 rank_b) const
    {
        const int32 depth_a = depths[parent_a], depth_b = depths[parent_b];
        for (int32 d = depth_a; d > depth_b; --d) {
            rank_a = ranks[parent_a];
            parent_a = parents[parent_a];
        }
        for (int32 d = depth_b; d > depth_a; --d) {
            rank_b = ranks[parent_b];
            parent_b = parents[parent_b];
        }
        if (parent_a == parent_b && rank_a == rank_b) return depth_a < depth_b;
        while (parent_a != parent_b) {
            rank_a = ranks[parent_a];
            parent_a = parents[parent_a];
            rank_b = ranks[parent_b];
            parent_b = parents[parent_b];
        }
        return rank_a < rank_b;
    }
};

// Sort the first `count` of `order` by `before`, as a bitonic network. There is room to the next power of 2, and what
// stands there is lost.
template <typename Before>
__device__ void sort_order(Block& block, uint32* order, uint32 count, Before before)
{
    constexpr uint32 NONE = ~0u;  // behind all
    uint32 size = 1;
    while (size < count) size *= 2;
    for (uint32 i = count + block.t; i < size; i += block.size) order[i] = NONE;
    for (uint32 span = 2; span <= size; span *= 2) {
        for (uint32 step = span / 2; step > 0; step /= 2) {
            // What the last step, or whoever filled it, has left, to the threads that compare it.
            __syncthreads();
            for (uint32 pair = block.t; pair < size / 2; pair += block.size) {
                const uint32 i = 2 * pair - (pair & (step - 1)), j = i + step;
                const bool ascends = (i & span) == 0;
                const uint32 a = order[ascends ? i : j], b = order[ascends ? j : i];
                if (b != NONE && (a == NONE || before(b, a))) {
                    order[ascends ? i : j] = b;
                    order[ascends ? j : i] = a;
                }
            }
        }
    }
    // The order, to all threads.
    __syncthreads();
}

template <typename Index>
struct Growth {
    const Trees& trees;
    Block& block;
    Paths<Index> paths;
    const uint32 budget, columns;
    const float* log_probs;  // (L, K), of this request
    uint64 bound = NOT_DRAFTED;  // at least `budget` paths have a key of at most this, or it is NOT_DRAFTED
    uint32 count = 1;  // paths, the root included; all of them but the root have keys below the bound
    uint32 begin = 0, end = 1;  // those of the depth whose children are made
    uint32 made_from = 1;  // the first of their children

    __device__ Growth(const Trees& trees_, Block& block_, unsigned char* memory)
        : trees(trees_), block(block_),
          paths(memory, trees_.N - 1, trees_.L, min(trees_.K, trees_.N - 1)), budget(trees_.N - 1),
          columns(min(trees_.K, trees_.N - 1)), log_probs(trees_.log_probs + int64(blockIdx.x) * trees_.L * trees_.K)
    {
    }

    // Paths but for the root that are at most `key`.
    __device__ uint32 count_upto(uint64 key)
    {
        uint32 found = 0;
        for (uint32 i = 1 + block.t; i < count; i += block.size) found += paths.keys[i] <= key;
        return block.sum(found);
    }

    // Of more than most_kept(budget) paths keep those strictly better than a new bound that `budget` of them reach.
    __device__ void raise_bound()
    {
        uint64 low = paths.keys[1], high = bound - 1;  // the first is the best of all: rank 0 at depth 1
        while (low < high) {
            const uint64 middle = low + (high - low) / 2;
            const uint32 reached = count_upto(middle);
            if (reached < budget) {
                low = middle + 1;
            } else {
                high = middle;
                if (reached <= most_kept(budget)) break;
            }
        }
        bound = high;
        keep_better();
    }

    // Drop paths that are not better than the bound; the others keep their order.
    __device__ void keep_better()
    {
        uint32 kept = 0;
        for (uint32 base = 0; base < count; base += block.size) {
            const uint32 i = base + block.t, at = min(i, count - 1);
            const uint64 key = paths.keys[at], code = paths.codes[at];
            const Index parent = paths.parents[at], rank = paths.ranks[at], depth = paths.depths[at];
            const Index bits = paths.bits[at], next = paths.nexts[at], product = paths.products[at];
            const bool keeps = i < count && (i == 0 || key < bound);
            uint32 total;
            const uint32 place = kept + block.sum_before(keeps, total);
            if (i < count) paths.order[i] = place;
            // Where each has gone, to its children. All of this chunk have been read, so it may be overwritten.
            block.barrier();
            if (keeps) {
                paths.keys[place] = key;
                paths.codes[place] = code;
                paths.parents[place] = paths.order[parent];
                paths.ranks[place] = rank;
                paths.depths[place] = depth;
                paths.bits[place] = bits;
                paths.nexts[place] = next;
                paths.products[place] = product;
            }
            kept += total;
        }
        if (block.t == 0) paths.order[count] = kept;
        // The paths, to all; and where the depths begin now.
        block.barrier();
        begin = paths.order[begin];
        end = paths.order[end];
        made_from = paths.order[made_from];
        count = kept;
        // All know where the depths begin, before `order` is written again.
        block.barrier();
    }

    // Make the children of the paths of `depth` that are better than the bound.
    __device__ void grow(int32 depth)
    {
        const float* row = log_probs + int64(depth) * trees.K;
        uint32 width = columns;
        for (uint32 r = block.t; r < columns; r += block.size) {
            const float cost = cost_of(row[r]);
            paths.costs[r] = cost;
            if (cost == -minus_infinity()) width = min(width, r);
        }
        width = block.least(width);
        if (block.t == 0) paths.widths[depth] = width;
        made_from = count;
        while (true) {
            const uint32 room = paths.capacity - count;
            uint32 total = 0;
            for (uint32 base = begin; base < end; base += block.size) {
                const uint32 i = base + block.t;
                uint32 children = 0;
                if (i < end) {
                    const uint64 key = paths.keys[i];
                    const uint32 next = paths.nexts[i], limit = min(width, budget / paths.products[i]);
                    const auto is_out = [&](uint32 r) { return key_after(key, paths.costs[r]) >= bound; };
                    // No more than do not fit: so sums over a block stay in 32 bits for budgets to 1.6 million, beyond
                    // which visibility alone would take 320 GB a request.
                    children = min(first_where(next, limit, is_out) - next, room + 1);
                }
                uint32 here;
                const uint32 before = total + block.sum_before(children, here);
                if (i < end) paths.order[i] = before;
                total += here;
            }
            const uint32 making = min(total, room);
            // The offsets, to all who make children.
            block.barrier();
            for (uint32 child = block.t; child < making; child += block.size) {
                const auto is_behind = [&](uint32 i) { return paths.order[i] > child; };
                const uint32 parent = first_where(begin, end, is_behind) - 1;
                const uint32 rank = paths.nexts[parent] + child - paths.order[parent], place = count + child;
                const uint32 bits = paths.bits[parent];
                paths.keys[place] = key_after(paths.keys[parent], paths.costs[rank]);
                paths.codes[place] = with_rank(paths.codes[parent], bits, rank);
                paths.parents[place] = parent;
                paths.ranks[place] = rank;
                paths.depths[place] = depth + 1;
                paths.bits[place] = min(bits + rank_bits(rank), uint32(CODE_BITS));
                paths.nexts[place] = 0;
                paths.products[place] = paths.products[parent] * (rank + 1);
            }
            // The children, to all; and the first ranks may be changed, now that they have been read.
            block.barrier();
            count += making;
            if (total <= room) break;
            for (uint32 i = begin + block.t; i < end; i += block.size) {
                const uint32 offset = min(paths.order[i], making);
                const uint32 behind = i + 1 < end ? min(paths.order[i + 1], making) : making;
                paths.nexts[i] += behind - offset;
            }
            // The first ranks, to who moves them.
            block.barrier();
            raise_bound();
        }
        if (count - 1 > most_kept(budget)) raise_bound();
        begin = made_from;
        end = count;
    }

    __device__ bool comes_before(uint32 a, uint32 b) const
    {
        const uint64 key_a = paths.keys[a], key_b = paths.keys[b];
        if (key_a != key_b) return key_a < key_b;
        const uint64 code_a = paths.codes[a], code_b = paths.codes[b];
        if (code_a != code_b) return code_a < code_b;
        return paths.precedes(paths.parents[a], paths.ranks[a], paths.parents[b], paths.ranks[b]);
    }

    // How much a path costs more than the best.
    __device__ float excess(uint32 path) const
    {
        return fminf(float(__longlong_as_double(paths.keys[path]) - __longlong_as_double(paths.keys[1])), 3e38f);
    }

    // Put the paths in order: order[i] is the i-th, and the root the 0-th. They go to as many buckets of equal widths as
    // they are, and within a bucket each is compared with all; where many would be, they are sorted by a network.
    __device__ void sort_paths()
    {
        constexpr uint32 MOST_COMPARED = 128;
        float greatest = 0.0f;
        for (uint32 i = 1 + block.t; i < count; i += block.size) {
            greatest = fmaxf(greatest, excess(i));
            paths.order[i - 1] = 0;
        }
        greatest = __uint_as_float(block.greatest(__float_as_uint(greatest)));
        const uint32 buckets = count - 1;
        const float scale = greatest > 0.0f ? fminf(buckets / greatest, 1e30f) : 0.0f;
        const auto bucket_of = [&](uint32 path) { return min(uint32(excess(path) * scale), buckets - 1); };
        for (uint32 i = 1 + block.t; i < count; i += block.size)
            paths.nexts[i] = atomicAdd(&paths.order[bucket_of(i)], 1u);
        uint32 total = 0, fullest = 0;
        for (uint32 base = 0; base < buckets; base += block.size) {
            const uint32 bucket = base + block.t;
            // The counts, to those who sum them up: at first by the barrier, then they are the thread's own.
            block.barrier();
            const uint32 own = bucket < buckets ? paths.order[bucket] : 0;
            uint32 here;
            const uint32 before = total + block.sum_before(own, here);
            if (bucket < buckets) paths.order[bucket] = before;
            fullest = max(fullest, own);
            total += here;
        }
        if (block.t == 0) paths.order[buckets] = total;
        fullest = block.greatest(fullest);
        if (fullest <= MOST_COMPARED) {
            for (uint32 i = 1 + block.t; i < count; i += block.size)
                paths.products[paths.order[bucket_of(i)] + paths.nexts[i]] = i;
            // The members of the buckets, to those who compare them; places in buckets are not needed any more.
            block.barrier();
            for (uint32 i = 1 + block.t; i < count; i += block.size) {
                const uint32 bucket = bucket_of(i), end = paths.order[bucket + 1];
                uint32 place = 1 + paths.order[bucket];
                for (uint32 j = paths.order[bucket]; j < end; ++j)
                    if (paths.products[j] != i) place += comes_before(paths.products[j], i);
                paths.nexts[place] = i;
            }
            // The places, and that the buckets are not needed any more.
            block.barrier();
            for (uint32 i = block.t; i < count; i += block.size) paths.order[i] = i == 0 ? 0 : paths.nexts[i];
        } else {
            for (uint32 i = block.t; i < count; i += block.size) paths.order[i] = i;
            sort_order(block, paths.order + 1, count - 1, [&](uint32 a, uint32 b) { return comes_before(a, b); });
        }
        // The order, to all.
        block.barrier();
    }

    // Write the nodes that are better than the bound, and return how many there are. Their places go to `products`.
    __device__ uint32 write_better()
    {
        if (count > 1) sort_paths();
        else if (block.t == 0) paths.order[0] = 0;
        const uint32 better = min(count - 1, budget);
        for (uint32 i = block.t; i <= better; i += block.size) paths.products[paths.order[i]] = i;
        // The places, to those who write the parents.
        block.barrier();
        for (uint32 i = 1 + block.t; i <= better; i += block.size) {
            const uint32 path = paths.order[i];
            write(i, paths.products[paths.parents[path]], paths.depths[path], paths.ranks[path], paths.keys[path]);
        }
        return better;
    }

    __device__ void write(uint32 node, int32 parent, int32 depth, int32 rank, uint64 key)
    {
        const int64 request = blockIdx.x, source = (request * trees.L + depth - 1) * trees.K + rank;
        write_node(trees, request * trees.N + node, trees.token_ids[source], parent, depth, rank, score_of(key));
    }

    // Fill up with nodes whose keys equal the bound, behind the `better` ones, and return how many there are then.
    __device__ uint32 write_equal(uint32 better)
    {
        const uint32 missing = budget - better, L = trees.L;
        // How many candidates of a depth change no sum that equals the bound, ...
        for (uint32 depth = block.warp; depth < L; depth += block.warps) {
            const float* row = log_probs + int64(depth) * trees.K;
            uint32 unchanging = 0;
            for (uint32 base = 0; base < columns; base += 32) {
                const uint32 r = base + block.lane;
                const bool changes = r >= columns || key_after(bound, cost_of(row[r])) != bound;
                const uint32 lanes = __ballot_sync(ALL_LANES, changes);
                unchanging += lanes == 0 ? 32 : __ffs(lanes) - 1;
                if (lanes != 0) break;
            }
            if (block.lane == 0) paths.sizes[depth] = unchanging;
        }
        // The candidates, to the one thread that sums them up.
        block.barrier();
        if (block.t == 0) {
            // ... and so how many nodes there are from one of that depth on, as far as they matter.
            paths.sizes[L] = 1;
            for (int32 depth = int32(L) - 1; depth >= 0; --depth)
                paths.sizes[depth] = min(uint64(missing), 1 + uint64(paths.sizes[depth]) * paths.sizes[depth + 1]);
        }
        // The sizes, to all.
        block.barrier();

        // For each path the children that equal the bound: the first goes to `nexts`, the nodes from them on to `bits`.
        uint32 groups = 0;
        for (uint32 base = 0; base <= better; base += block.size) {
            const uint32 i = base + block.t;
            uint32 path = 0, nodes = 0;
            if (i <= better) {
                path = paths.order[i];
                const uint64 key = paths.keys[path];
                const uint32 depth = paths.depths[path];
                if (depth < L) {
                    const float* row = log_probs + int64(depth) * trees.K;
                    const uint32 width = paths.widths[depth];
                    const auto key_of = [&](uint32 r) { return key_after(key, cost_of(row[r])); };
                    const uint32 first = first_where(0, width, [&](uint32 r) { return key_of(r) >= bound; });
                    const uint32 last = first_where(first, width, [&](uint32 r) { return key_of(r) > bound; });
                    nodes = min(uint64(missing), uint64(last - first) * paths.sizes[depth + 1]);
                    paths.codes[path] = with_rank(paths.codes[path], paths.bits[path], first);
                    paths.nexts[path] = first;
                }
            }
            uint32 here;
            const uint32 place = groups + block.sum_before(nodes > 0, here);
            if (nodes > 0) {
                paths.order[place] = path;
                paths.bits[path] = nodes;
            }
            groups += here;
        }
        sort_order(block, paths.order, groups, [&](uint32 a, uint32 b) {
            if (paths.codes[a] != paths.codes[b]) return paths.codes[a] < paths.codes[b];
            return paths.precedes(a, paths.nexts[a], b, paths.nexts[b]);
        });

        // The nodes before each group, to `keys`.
        uint32 total = 0;
        for (uint32 base = 0; base < groups; base += block.size) {
            const uint32 i = base + block.t;
            uint32 here;
            const uint32 before = block.sum_before(i < groups ? uint32(paths.bits[paths.order[i]]) : 0, here);
            if (i < groups) paths.keys[i] = min(total + before, missing);
            total = min(total + here, missing);
        }
        // They, to all.
        block.barrier();
        for (uint32 i = block.t; i < total; i += block.size) {
            const uint32 group = first_where(0, groups, [&](uint32 g) { return paths.keys[g] > i; }) - 1;
            const uint32 path = paths.order[group];
            uint32 depth = paths.depths[path] + 1, place = paths.keys[group], parent = paths.products[path];
            uint32 rank = (i - place) / paths.sizes[depth], left = (i - place) % paths.sizes[depth];
            place += rank * paths.sizes[depth];
            rank += paths.nexts[path];
            while (left > 0) {  // further down
                parent = better + 1 + place;
                ++depth;
                rank = (left - 1) / paths.sizes[depth];
                left = (left - 1) % paths.sizes[depth];
                place += 1 + rank * paths.sizes[depth];
            }
            write(better + 1 + i, parent, depth, rank, bound);
        }
        return better + total;
    }

    __device__ void run()
    {
        if (block.t == 0) {
            paths.keys[0] = paths.codes[0] = 0;
            paths.parents[0] = paths.ranks[0] = paths.depths[0] = paths.bits[0] = paths.nexts[0] = 0;
            paths.products[0] = 1;
        }
        // The root, to all: the first depth's widths are known behind a barrier.
        for (int32 depth = 0; depth < trees.L && begin < end; ++depth) grow(depth);
        uint32 nodes = write_better();
        if (nodes < budget && bound != NOT_DRAFTED) nodes = write_equal(nodes);

        const int64 request = blockIdx.x, root = request * trees.N;
        if (block.t == 0) {
            write_node(trees, root, trees.root_token_ids[request], -1, 0, -1, 0.0);
            trees.node_counts[request] = 1 + nodes;
        }
        for (int64 i = 1 + int64(nodes) + block.t; i < trees.N; i += block.size)
            write_node(trees, root + i, -1, -1, -1, -1, minus_infinity());
    }
};

extern "C" __global__ void __launch_bounds__(GROW_SHARED_THREADS) grow_shared(TREES_PARAMETERS)
{
    wait_for_earlier();
    __shared__ uint32 sums[2][32];
    const Trees trees = TREES;
    Block block(sums);
    Growth<unsigned short>(trees, block, reinterpret_cast<unsigned char*>(arena)).run();
}
DDTREE_SHARED(grow_shared, GROW_SHARED);

//   memory  uint8 (B, memory_size)
extern "C" __global__ void __launch_bounds__(GROW_GLOBAL_THREADS, 1) grow_global(
    TREES_PARAMETERS, unsigned char* memory, int64 memory_size)
{
    wait_for_earlier();
    __shared__ uint32 sums[2][32];
    const Trees trees = TREES;
    Block block(sums);
    Growth<uint32>(trees, block, memory + blockIdx.x * memory_size).run();
}

extern "C" __global__ void __launch_bounds__(256) fill_visibility(
    const int32* __restrict__ parents, const int32* __restrict__ node_counts, uint32* __restrict__ words,
    int64 count, int32 N)
{
    wait_for_earlier();
    const int64 node = int64(blockIdx.x) * 8 + threadIdx.x / 32;
    if (node >= count) return;
    const int64 request = node / N;
    const int32 i = int32(node % N), lane = threadIdx.x % 32, W = (N + 31) / 32;
    uint32* row = words + node * W;
    const bool used = i < node_counts[request];
    // The lanes' words of 1,024 nodes at a time; the path is followed anew for each, through the first-level cache.
    for (int32 first = 0; first < W; first += 32) {
        uint32 seen = 0;
        if (used && 32 * first <= i) {
            for (int32 j = i;; j = parents[request * N + j]) {
                if (j / 32 == first + lane) seen |= 1u << (j % 32);
                if (j == 0) break;
            }
        }
        if (first + lane < W) row[first + lane] = seen;
    }
}
