// y = x W^T for few rows of x, and the first half of a gated layer, silu(x G^T) * (x U^T), in one launch each.
//
// A block has some outputs of one head, and a tile of tokens (see skinny.cuh). Neighbours in the grid have the same
// outputs, so that W comes from memory once however many tokens there are. A plain product has one head.
//
//   x         token t's row of head h at x + t * x_stride + h * x_head, of D columns
//   weights   (H, O, D); of `gated`, (H, 2 O, D): gate's rows, then up's
//   gain      (D), of x's type, with which x is RMS-normalised; or null
//   residual  as y, added to it before it is rounded; or null
//   y         token t's row of head h at y + t * y_stride + h * y_head, O columns, written in full: of x's type or, if
//             `wide`, of the type that sums are in
//   silu_product: y (M, I) from x (M, 2 I)
#include "skinny.cuh"

template <bool GATED, typename X> struct Store {
    void* y;
    const void* residual;
    int64 first, stride;  // where the tile's first row lies, and from row to row
    bool wide;

    __device__ void operator()(int32 token, int32 output, Wide<X> sum, Wide<X> other) const
    {
        const int64 at = first + token * stride + output;
        if (GATED) sum = silu(sum) * other;
        if (wide) {
            if (residual) sum += static_cast<const Wide<X>*>(residual)[at];
            static_cast<Wide<X>*>(y)[at] = sum;
        } else {
            if (residual) sum += load(static_cast<const X*>(residual) + at);
            static_cast<X*>(y)[at] = rounded<X>(sum);
        }
    }
};

template <typename X, typename W> struct Product {
    const X* x;
    const W* weights;
    const X* gain;
    const void* residual;
    void* y;
    int32 M, D, O;
    int64 x_stride, x_head, y_stride, y_head;
    double eps;
    int32 wide;
};

// N columns a load; of 0, by tensor cores, with RING_ROWS rows through the ring, which takes no gain.
template <int32 TOKENS, int32 ROWS, int32 N, bool GATED, typename X, typename W>
__device__ __forceinline__ void multiply(const Product<X, W>& p)
{
    constexpr int32 OUTPUTS = GATED ? ROWS / 2 : ROWS;
    const uint32 place = blockIdx.x / (ROWS < RING_ROWS ? 1 : cluster_size());
    const int32 tiles = (p.M + TOKENS - 1) / TOKENS, first = int32(place) % tiles * TOKENS, h = blockIdx.y;
    const int32 tokens = min(TOKENS, p.M - first), block = place / tiles;
    const int32 rows = min(OUTPUTS, p.O - block * OUTPUTS);
    const X* x = p.x + h * p.x_head + first * p.x_stride;
    const W* weights = p.weights + int64(h) * (GATED ? 2 : 1) * p.O * p.D;
    const Store<GATED, X> store{p.y, p.residual, h * p.y_head + first * p.y_stride, p.y_stride, p.wide != 0};
    const auto input = [&](int32 t) { return x + t * p.x_stride; };
    if constexpr (ROWS < RING_ROWS) {
        prefetch_rows(weights + int64(block) * OUTPUTS * p.D, rows, p.D);
        if (GATED) prefetch_rows(weights + (int64(block) * OUTPUTS + p.O) * p.D, rows, p.D);
    }
    wait_for_earlier();
    if constexpr (N > 0)
        multiply_by_fma<TOKENS, ROWS, N, GATED, PastL1>(weights, p.gain, p.eps, p.O, p.D, tokens, block, input, store);
    else if constexpr (ROWS < RING_ROWS)
        multiply_by_mma<TOKENS, ROWS, GATED, PastL1>(weights, p.gain, p.eps, p.O, p.D, tokens, block, input, store);
    else
        multiply_by_ring<TOKENS, GATED>(weights, p.O, p.D, tokens, block, input, store);
}

#define MULTIPLY(name, X, W, THREADS, BLOCKS, TOKENS, ROWS, N, GATED)                                                  \
    extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)                                                      \
        name(const X* x, const W* weights, const X* gain, const void* residual, void* y, int32 M, int32 D, int32 O,    \
             int64 x_stride, int64 x_head, int64 y_stride, int64 y_head, double eps, int32 wide)                       \
    {                                                                                                                  \
        multiply<TOKENS, ROWS, N, GATED>(Product<X, W>{                                                                \
            x, weights, gain, residual, y, M, D, O, x_stride, x_head, y_stride, y_head, eps, wide});                   \
    }

#define BY_FMA(kind, suffix, X, W, BLOCKS, TOKENS, ROWS, N, GATED)                                                     \
    MULTIPLY(kind##_##TOKENS##_##suffix, X, W, 32 * FMA_PARTS, BLOCKS, TOKENS, ROWS, N, GATED)

#define FEW(kind, suffix, X, W, N, GATED)                                                                              \
    BY_FMA(kind, suffix, X, W, 5, 1, (GATED ? 8 : 4), N, GATED)                                                        \
    BY_FMA(kind, suffix, X, W, 5, 2, 4, N, GATED)                                                                      \
    BY_FMA(kind, suffix, X, W, 4, 4, 4, N, GATED)

#define ANY(suffix, X, W)                                                                                              \
    MULTIPLY(linear_any_##suffix, X, W, 32 * FMA_PARTS, 3, 8, 4, 1, false)                                             \
    MULTIPLY(gated_any_##suffix, X, W, 32 * FMA_PARTS, 3, 8, 4, 1, true)

ANY(f16, __half, __half)
ANY(bf16, __nv_bfloat16, __nv_bfloat16)
ANY(f32, float, float)
ANY(f64, double, double)
MULTIPLY(linear_any_bf16_f32, __nv_bfloat16, float, 32 * FMA_PARTS, 3, 8, 4, 1, false)
FEW(linear, f32, float, float, 4, false)
BY_FMA(linear, f32, float, float, 3, 8, 8, 4, false)
FEW(gated, f32, float, float, 4, true)
BY_FMA(gated, f32, float, float, 3, 8, 8, 4, true)
FEW(linear, f64, double, double, 2, false)
BY_FMA(linear, f64, double, double, 2, 8, 4, 2, false)
FEW(gated, f64, double, double, 2, true)
BY_FMA(gated, f64, double, double, 2, 8, 4, 2, true)
FEW(linear, bf16_f32, __nv_bfloat16, float, 4, false)
BY_FMA(linear, bf16_f32, __nv_bfloat16, float, 3, 8, 4, 4, false)

#if __CUDA_ARCH__ >= 1200
constexpr int32 RING_BLOCKS = 1;  // a multiprocessor: shared memory is short there
#else
constexpr int32 RING_BLOCKS = 4;
#endif

#define BY_MMA(kind, suffix, T, GATED)                                                                                 \
    MULTIPLY(kind##_8_##suffix, T, T, 32 * MMA_PARTS, 2, 8, 16, 0, GATED)                                              \
    MULTIPLY(kind##_32_##suffix, T, T, 32 * MMA_PARTS, 2, 32, 16, 0, GATED)                                            \
    MULTIPLY(kind##_ring_8_##suffix, T, T, RING_THREADS, RING_BLOCKS, 8, RING_ROWS, 0, GATED)                          \
    MULTIPLY(kind##_ring_32_##suffix, T, T, RING_THREADS, RING_BLOCKS, 32, RING_ROWS, 0, GATED)                        \
    MULTIPLY(kind##_ring_72_##suffix, T, T, RING_THREADS, RING_BLOCKS, 72, RING_ROWS, 0, GATED)

DDTREE_SHARED(linear_8_f16, mma_bytes(8, 16));
DDTREE_SHARED(linear_32_f16, mma_bytes(32, 16));
DDTREE_SHARED(linear_ring_8_f16, ring_bytes(8));
DDTREE_SHARED(linear_ring_32_f16, ring_bytes(32));
DDTREE_SHARED(linear_ring_72_f16, ring_bytes(72));
BY_MMA(linear, f16, __half, false)
DDTREE_SHARED(gated_8_f16, mma_bytes(8, 16));
DDTREE_SHARED(gated_32_f16, mma_bytes(32, 16));
DDTREE_SHARED(gated_ring_8_f16, ring_bytes(8));
DDTREE_SHARED(gated_ring_32_f16, ring_bytes(32));
DDTREE_SHARED(gated_ring_72_f16, ring_bytes(72));
BY_MMA(gated, f16, __half, true)
DDTREE_SHARED(linear_8_bf16, mma_bytes(8, 16));
DDTREE_SHARED(linear_32_bf16, mma_bytes(32, 16));
DDTREE_SHARED(linear_ring_8_bf16, ring_bytes(8));
DDTREE_SHARED(linear_ring_32_bf16, ring_bytes(32));
DDTREE_SHARED(linear_ring_72_bf16, ring_bytes(72));
BY_MMA(linear, bf16, __nv_bfloat16, false)
DDTREE_SHARED(gated_8_bf16, mma_bytes(8, 16));
DDTREE_SHARED(gated_32_bf16, mma_bytes(32, 16));
DDTREE_SHARED(gated_ring_8_bf16, ring_bytes(8));
DDTREE_SHARED(gated_ring_32_bf16, ring_bytes(32));
DDTREE_SHARED(gated_ring_72_bf16, ring_bytes(72));
BY_MMA(gated, bf16, __nv_bfloat16, true)

constexpr int32 PRODUCT_THREADS = 256;

#define SILU_PRODUCT(name, T)                                                                                          \
    extern "C" __global__ void __launch_bounds__(PRODUCT_THREADS) name(const T* both, T* y, int64 size, int32 I)       \
    {                                                                                                                  \
        wait_for_earlier();                                                                                            \
        const int64 at = int64(blockIdx.x) * PRODUCT_THREADS + threadIdx.x;                                            \
        if (at >= size) return;                                                                                        \
        const T* gate = both + at / I * 2 * I + at % I;                                                                \
        y[at] = rounded<T>(silu(load(gate)) * load(gate + I));                                                         \
    }

SILU_PRODUCT(silu_product_f16, __half)
SILU_PRODUCT(silu_product_bf16, __nv_bfloat16)
SILU_PRODUCT(silu_product_f32, float)
SILU_PRODUCT(silu_product_f64, double)
