// The end of a round: what each slot emitted goes behind its committed tokens, and into the record for the host.
//
// One warp a slot; lane 0 changes the slot's numbers once all lanes have read them.
//
//   tokens       int32 (B, R)      committed tokens: n of them are appended
//   lengths, prefix_lens, roots, remaining, running, kept  int32 (B)
//   token_ids    int32 (B, N)      of the trees
//   paths        int32 (B, width)  accepted nodes, root first; `accepted` of them, which is n
//   accepted, bonus  int32 (B)
//   finished     bool  (B)
//   faults       int32 (B, 2)
//   record       int32 (B, 3 + width)  written in full: n, the fault, the emitted tokens, then -1
#include "common.cuh"

constexpr int32 THREADS = 128, SLOTS = THREADS / 32;

extern "C" __global__ void __launch_bounds__(THREADS) append_emitted(
    int32* __restrict__ tokens, int32* __restrict__ lengths, int32* __restrict__ prefix_lens,
    int32* __restrict__ roots, int32* __restrict__ remaining, int32* __restrict__ running, int32* __restrict__ kept,
    const int32* __restrict__ token_ids, const int32* __restrict__ paths, const int32* __restrict__ accepted,
    const int32* __restrict__ bonus, const bool* __restrict__ finished, const int32* __restrict__ faults,
    int32* __restrict__ record, int32 B, int32 R, int32 N, int32 width)
{
    wait_for_earlier();
    const int32 b = blockIdx.x * SLOTS + threadIdx.x / 32, lane = threadIdx.x % 32;
    if (b >= B) return;  // a whole warp
    const int32 n = accepted[b], length = lengths[b], last = bonus[b];
    int32* own = record + int64(b) * (3 + width);
    for (int32 k = lane; k < width; k += 32) {
        int32 token = -1;
        if (k < n) {
            token = k == n - 1 ? last : token_ids[int64(b) * N + paths[int64(b) * width + k + 1]];
            tokens[int64(b) * R + length + k] = token;
        }
        own[3 + k] = token;
    }
    if (lane < 2) own[1 + lane] = faults[2 * b + lane];
    // All lanes have read the length before it changes.
    __syncwarp();
    if (lane > 0) return;
    own[0] = n;
    kept[b] = n;
    if (n == 0) return;
    const int32 left = finished[b] || last < 0 ? 0 : remaining[b] - n;
    lengths[b] = length + n;
    prefix_lens[b] += n;
    roots[b] = max(last, 0);
    remaining[b] = left;
    running[b] = left > 0;
}
