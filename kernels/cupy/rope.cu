// Rotary embedding of a layer's queries and keys, and the nodes' rows of its cache: in one launch.
//
// One block a node: it makes the node's cosines and sines in float64, once for all heads, from
// position = prefix_len + depth, and rotates each head's rotary part and the key. A pair is elements i and R/2 + i, or,
// where `pairs`, 2 i and 2 i + 1 of what comes in; what goes out has the first form. The latent, RMS-normalised on the
// way, and the rotated key go to the row prefix_len + node of the request's cache, through the page table.
//
//   queries      (B N, H, P + R)   of which the last R elements are read
//   latents      (B N, latent_stride) of which C columns are read
//   gain         (C) of the latents' norm
//   keys         (B N, key_stride) of which R columns are read
//   q            (B N, H, C + R)   its last R elements are written: zeros for padding
//   cache        (pages, S, C + R) of one layer; padding writes nothing
//   page_table   int32 (B, max_pages)
//   prefix_lens, node_counts  int32 (B)
//   depths       int32 (B, N)
//   frequencies  float64 (R / 2)
#include "floats.cuh"
#include "turn.cuh"

constexpr int32 THREADS = 256;
constexpr int32 MOST_PAIRS = 1024;  // R / 2; `rope.py` says it too
constexpr int32 AT_ONCE = 2;        // pairs of heads that a thread loads together

template <typename T> struct Pair {
    T x, y;
};

template <typename T>
__device__ __forceinline__ void rotate(
    const T* queries, const T* latents, const T* keys, const T* __restrict__ gain, T* q, T* cache,
    const int32* page_table, const int32* prefix_lens, const int32* node_counts, const int32* depths,
    const double* __restrict__ frequencies,
    double attention_factor, double eps, int32 N, int32 H, int32 P, int32 C, int32 R, int64 latent_stride,
    int64 key_stride, int32 S, int32 max_pages, int32 pairs)
{
    __shared__ Wide<T> cosines[MOST_PAIRS], sines[MOST_PAIRS], squares[THREADS / 32];
    const int64 slot = blockIdx.x, b = slot / N;
    const int32 i = int32(slot % N), half = R / 2, pairs_of_heads = H * half;
    T* q_row = q + slot * H * (C + R);
    const T* query = queries + slot * H * (P + R);
    const T* latent = latents + slot * latent_stride;
    const T* key = keys + slot * key_stride;
    const auto pair_of = [&](const T* from, int32 p) {
        return Pair<T>{from[pairs ? 2 * p : p], from[pairs ? 2 * p + 1 : half + p]};
    };
    Pair<T> some[AT_ONCE];
    const auto load_some = [&](int32 first) {
#pragma unroll
        for (int32 k = 0; k < AT_ONCE; ++k) {
            const int32 e = min(first + k * THREADS, pairs_of_heads - 1);
            some[k] = pair_of(query + int64(e / half) * (P + R) + P, e % half);
        }
    };

    wait_for_earlier();
    // What waits for no other load is read at once, whether the node is there or not.
    const int32 nodes = node_counts[b], depth = depths[slot], prefix = prefix_lens[b], row = prefix + i;
    if (threadIdx.x < pairs_of_heads) load_some(threadIdx.x);
    Wide<T> square = 0;
    for (int32 c = threadIdx.x; c < C; c += THREADS) square += load(latent + c) * load(latent + c);
    if (i >= nodes) {
        for (int32 e = threadIdx.x; e < H * R; e += THREADS)
            q_row[int64(e / R) * (C + R) + C + e % R] = rounded<T>(0.0f);
        return;
    }
    T* place = cache + (int64(page_table[b * max_pages + row / S]) * S + row % S) * (C + R);
    for (int32 p = threadIdx.x; p < half; p += THREADS) {
        double cosine, sine;
        turn(double(prefix + depth) * frequencies[p], cosine, sine);
        cosines[p] = Wide<T>(cosine * attention_factor);
        sines[p] = Wide<T>(sine * attention_factor);
    }
#pragma unroll
    for (int32 step = 16; step > 0; step /= 2) square += __shfl_xor_sync(ALL_LANES, square, step);
    if (threadIdx.x % 32 == 0) squares[threadIdx.x / 32] = square;
    // The angles, and each warp's squares, to all threads, which add them up in the same order.
    __syncthreads();
    square = 0;
#pragma unroll
    for (int32 w = 0; w < THREADS / 32; ++w) square += squares[w];
    const Wide<T> scale = scale_of(square, C, eps);
    const auto rotate_pair = [&](const Pair<T>& pair, T* to, int32 p) {
        const Wide<T> x = load(&pair.x), y = load(&pair.y);
        to[p] = rounded<T>(x * cosines[p] - y * sines[p]);
        to[half + p] = rounded<T>(y * cosines[p] + x * sines[p]);
    };
    for (int32 first = threadIdx.x; first < pairs_of_heads; first += AT_ONCE * THREADS) {
        if (first >= AT_ONCE * THREADS) load_some(first);
#pragma unroll
        for (int32 k = 0; k < AT_ONCE; ++k) {
            const int32 e = first + k * THREADS;
            if (e < pairs_of_heads) rotate_pair(some[k], q_row + int64(e / half) * (C + R) + C, e % half);
        }
    }
    for (int32 c = threadIdx.x; c < C; c += THREADS) place[c] = rounded<T>(load(latent + c) * scale * load(gain + c));
    for (int32 p = threadIdx.x; p < half; p += THREADS) rotate_pair(pair_of(key, p), place + C, p);
}

#define ROTATE(name, T)                                                                                                \
    extern "C" __global__ void __launch_bounds__(THREADS)                                                              \
        name(const T* queries, const T* latents, const T* keys, const T* gain, T* q, T* cache,                         \
             const int32* page_table, const int32* prefix_lens, const int32* node_counts, const int32* depths,         \
             const double* frequencies, double attention_factor, double eps, int32 N, int32 H, int32 P, int32 C,       \
             int32 R, int64 latent_stride, int64 key_stride, int32 S, int32 max_pages, int32 pairs)                    \
    {                                                                                                                  \
        rotate(queries, latents, keys, gain, q, cache, page_table, prefix_lens, node_counts, depths, frequencies,      \
               attention_factor, eps, N, H, P, C, R, latent_stride, key_stride, S, max_pages, pairs);                  \
    }

ROTATE(rope_f16, __half)
ROTATE(rope_bf16, __nv_bfloat16)
ROTATE(rope_f32, float)
ROTATE(rope_f64, double)
