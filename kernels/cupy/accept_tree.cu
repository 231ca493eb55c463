// Acceptance: the walk from the root along the target's choices.
//
// One block a request. All threads first find, for every node at once, where a walk goes on from it: next[i] is the
// child of lowest index that carries the choice at node i, NO_CHILD where there is none, and ENDS where that choice is
// a stop token. Then one thread follows `next` from the root, which costs one read of shared memory a node.
//
//   parents, tokens  int32 (B, N)       of slots below node_counts
//   node_counts      int32 (B)
//   choices          int32 (B, N)       the target's token after each node
//   remaining        int32 (B)          tokens still to be emitted, or null: no limit
//   stops            int32 (num_stops)  or null where there are none
//   scratch          int32 (B, N)       room for `next` where N > MOST_IN_SHARED; else not touched
//   node_indices     int32 (B, L + 1)   written in full: the path, then -1
//   lengths, bonus   int32 (B)          written in full
//   finished         bool  (B)          written in full
//
// Version 1 looked through the tree once a step of the walk, a warp a request: each step waited for memory twice.
// Version 2, this one, does so once a tree.
#include "common.cuh"

constexpr int32 THREADS = 128;
constexpr int32 MOST_IN_SHARED = 4096;  // nodes; `accept_tree.py` says it too
constexpr int32 ENDS = -1, NO_CHILD = 0x7FFFFFFF;  // below and above every node, so that a minimum keeps them apart

extern "C" __global__ void __launch_bounds__(THREADS) follow_choices(
    const int32* __restrict__ parents, const int32* __restrict__ tokens, const int32* __restrict__ node_counts,
    const int32* __restrict__ choices, const int32* __restrict__ remaining, const int32* __restrict__ stops,
    int32 num_stops, int32* scratch, int32* __restrict__ node_indices, int32* __restrict__ lengths,
    int32* __restrict__ bonus, bool* __restrict__ finished, int32 N, int32 width)
{
    wait_for_earlier();
    __shared__ int32 next_in_shared[MOST_IN_SHARED], choice_in_shared[MOST_IN_SHARED];
    const int64 b = blockIdx.x, first = b * N;
    const bool fits = N <= MOST_IN_SHARED;
    int32* next = fits ? next_in_shared : scratch + first;
    const int32* choice = fits ? choice_in_shared : choices + first;
    const int32 count = node_counts[b];
    int32* path = node_indices + b * width;

    for (int32 k = threadIdx.x; k < width; k += THREADS) path[k] = -1;
    for (int32 i = threadIdx.x; i < count; i += THREADS) {
        const int32 token = choices[first + i];
        int32 begin = NO_CHILD;
        for (int32 s = 0; s < num_stops; ++s)
            if (stops[s] == token) begin = ENDS;
        next[i] = begin;
        if (fits) choice_in_shared[i] = token;
    }
    // Choices and the beginnings of all nodes, and the cleared path, to all threads.
    __syncthreads();
    for (int32 i = 1 + threadIdx.x; i < count; i += THREADS) {
        const int32 parent = parents[first + i];
        if (tokens[first + i] == choice[parent]) atomicMin(&next[parent], i);
    }
    // Where each node leads, to the thread that walks.
    __syncthreads();
    if (threadIdx.x > 0) return;

    const int32 limit = remaining == nullptr ? NO_CHILD : remaining[b];
    int32 length = 0, last = -1;
    bool ends = true;  // an inert request
    if (limit > 0) {
        for (int32 node = 0;;) {
            path[length++] = node;
            last = choice[node];
            node = next[node];
            ends = node == ENDS || length == limit;
            if (ends || node == NO_CHILD) break;
        }
    }
    lengths[b] = length;
    bonus[b] = last;
    finished[b] = ends;
}
