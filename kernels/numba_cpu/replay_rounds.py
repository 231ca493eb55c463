"""Rounds over a recorded trace, one prompt a thread at a time: each tree is built and walked at once, and never stored.

The nodes come in the contract's order, so the first n of them are the tree of every smaller budget. One build at a
position so serves all *rules* (how many nodes, and when to stop before that) whose walk comes by there: of each node
that the target's tokens lead through, its place in the order says which rules keep it.

A binary heap holds the paths that may come next, as in ``build_tree``. Only equal scores need the paths themselves,
which are then compared rank by rank: with drafts of real models that is rare. The exponential is that of
:mod:`ddtree.reference`, in the same sequence of operations; it stands in this file since numba's cache notices a change
of a kernel's own file alone.
"""

from typing import Any

import numpy as np
from numba import boolean, float32, float64, int32, int64, uint16, void

from ddtree.kernels.numba_cpu.jit import compiled, in_parallel, inout, readonly
from ddtree.reference.portable_math import EXP_COEFFICIENTS, LN2_HIGH, LN2_LOW

__all__ = ["replay_rounds"]

E1, E2, E3, E4, E5 = EXP_COEFFICIENTS
NEVER = np.int32(2**31 - 1)
"""The place of a node that does not come."""


@compiled(float64(float64))
def portable_exp(x):  # type: ignore[no-untyped-def]
    """The exponential of x <= 0; 0 below −708."""
    if x < -708.0:
        return 0.0
    k = np.rint(x * 1.44269504088896338700)
    high = x - k * LN2_HIGH
    low = k * LN2_LOW
    r = high - low
    z = r * r
    c = r - ((((E5 * z + E4) * z + E3) * z + E2) * z + E1) * z
    y = 1.0 - ((low - (r * c) / (2.0 - c)) - high)
    return y * np.int64((np.int64(k) + 1023) << 52).view(np.float64)


@compiled(boolean(int32, int32, int32, int32, inout(int32, 1), inout(int32, 1), inout(int32, 1)))
def path_precedes(parent_a, rank_a, parent_b, rank_b, parents, depths, ranks):  # type: ignore[no-untyped-def]
    """Whether child ``rank_a`` of node ``parent_a`` has the earlier path; neither path continues the other."""
    while depths[parent_a] > depths[parent_b]:
        rank_a, parent_a = ranks[parent_a], parents[parent_a]
    while depths[parent_b] > depths[parent_a]:
        rank_b, parent_b = ranks[parent_b], parents[parent_b]
    while parent_a != parent_b:
        rank_a, parent_a = ranks[parent_a], parents[parent_a]
        rank_b, parent_b = ranks[parent_b], parents[parent_b]
    return rank_a < rank_b


def _rank_of(ids: Any) -> Any:
    return int32(readonly(float32, 1), readonly(ids, 1), int32, int64)


@compiled(_rank_of(uint16), _rank_of(int32))
def rank_of(log_probs, token_ids, token, topk):  # type: ignore[no-untyped-def]
    """The rank of ``token`` among the candidates of a depth, −1 if it is not drafted."""
    for k in range(topk):
        if not log_probs[k] > -np.inf:
            break
        if token_ids[k] == token:
            return k
    return -1


@compiled(int64(inout(float64, 1), int64, readonly(float64, 2), float64, int64, float64))
def nodes_of_best_rate(mass, count, costs, draft_cost, low, weight):  # type: ignore[no-untyped-def]
    """The first n, ``count`` at most, at which the expected rate no longer rises; as in ``ddtree.policies``."""
    high = min(low + 1, len(costs) - 1)
    n = 0
    rate = (1.0 + mass[0]) / (draft_cost + (costs[low, 0] * (1.0 - weight) + costs[high, 0] * weight))
    while n < count:
        cost = draft_cost + (costs[low, n + 1] * (1.0 - weight) + costs[high, n + 1] * weight)
        following = (1.0 + mass[n + 1]) / cost
        if following <= rate:
            break
        n, rate = n + 1, following
    return n


def _arguments(ids: Any) -> Any:
    return void(
        readonly(float32, 3),  # log_probs (M, L, K)
        readonly(ids, 3),  # token_ids (M, L, K)
        readonly(int32, 1),  # new tokens (T,)
        readonly(int64, 1),  # new_offsets (P + 1,)
        readonly(int64, 1),  # position_offsets (P + 1,)
        int64,  # depth
        int64,  # topk
        readonly(int64, 1),  # budgets (J,)
        readonly(float64, 1),  # least_scores (J,)
        readonly(boolean, 1),  # priced (J,)
        readonly(float64, 2),  # costs (C, 1 + nodes)
        float64,  # draft_cost
        readonly(int64, 1),  # cost_row (M,)
        readonly(float64, 1),  # cost_weight (M,)
        inout(int32, 2),  # nodes (M, depth)
        inout(int32, 2),  # ranks (M, depth)
        inout(float64, 2),  # scores (M, depth)
        inout(int32, 2),  # first_child (M, depth + 1)
        inout(int32, 1),  # first_last_rank (M,)
        inout(int32, 2),  # counts (J, M), -1 where the rule does not come by
        inout(float64, 2),  # expected (J, M)
        int64,
        int64,
    )


@compiled(_arguments(uint16), _arguments(int32))
def replay_prompts(  # type: ignore[no-untyped-def]
    log_probs,
    token_ids,
    new_tokens,
    new_offsets,
    position_offsets,
    depth,
    topk,
    budgets,
    least_scores,
    priced,
    costs,
    draft_cost,
    cost_row,
    cost_weight,
    path_nodes,
    path_ranks,
    path_scores,
    first_child,
    first_last_rank,
    counts,
    expected,
    start,
    stop,
):
    """Replay prompts ``start`` … ``stop`` under every rule."""
    J = len(budgets)
    N = 1
    for j in range(J):
        N = max(N, 1 + budgets[j])
    parents = np.zeros(N, np.int32)
    depths = np.zeros(N, np.int32)
    ranks = np.zeros(N, np.int32)
    scores = np.zeros(N, np.float64)
    mass = np.zeros(N, np.float64)  # of the first n nodes
    heap_scores = np.empty(N + 2, np.float64)
    heap_parents = np.empty(N + 2, np.int32)
    heap_ranks = np.empty(N + 2, np.int32)
    at = np.zeros(J, np.int64)  # where each rule's walk stands
    ranks[0] = -1

    for p in range(start, stop):
        num_new = new_offsets[p + 1] - new_offsets[p]
        at[:] = 0
        for i in range(num_new - 1):
            budget, least = np.int64(-1), np.inf
            for j in range(J):
                if at[j] == i:
                    budget, least = max(budget, budgets[j]), min(least, least_scores[j])
            if budget < 0:
                continue
            row = position_offsets[p] + i
            next_new = new_offsets[p] + i + 1
            deepest = min(depth, num_new - 2 - i)  # a kept node deeper than that would leave no bonus
            path_nodes[row] = -1
            first_child[row] = NEVER
            first_last_rank[row] = NEVER

            # The last node of the path so far, and the rank that the target's token has behind it, −1 if it has none.
            kept, on_path, wanted = np.int64(0), np.int32(0), np.int32(-1)
            if deepest > 0:
                wanted = rank_of(log_probs[row, 0], token_ids[row, 0], new_tokens[next_new], topk)

            n, end = np.int64(0), np.int64(0)  # nodes besides the root; heap entries
            if depth > 0 and topk > 0 and log_probs[row, 0, 0] > -np.inf:
                heap_scores[0], heap_parents[0], heap_ranks[0] = 0.0 + np.float64(log_probs[row, 0, 0]), 0, 0
                end = np.int64(1)
            while n < budget and end > 0:
                score, parent, rank = heap_scores[0], heap_parents[0], heap_ranks[0]
                if score < least:
                    break  # no rule that comes by keeps it, or what follows
                n += 1
                d = np.int64(depths[parent])
                parents[n], depths[n], ranks[n], scores[n] = parent, d + 1, rank, score
                mass[n] = mass[n - 1] + portable_exp(score)
                if rank == topk - 1 and first_last_rank[row] == NEVER:
                    first_last_rank[row] = n
                if rank == 0 and d <= kept and (d == 0 or path_nodes[row, d - 1] == parent):
                    first_child[row, d] = n
                if parent == on_path and rank == wanted:
                    path_nodes[row, kept], path_ranks[row, kept], path_scores[row, kept] = n, rank, score
                    kept, on_path, wanted = kept + 1, np.int32(n), np.int32(-1)
                    if kept < deepest:
                        wanted = rank_of(log_probs[row, kept], token_ids[row, kept], new_tokens[next_new + kept], topk)

                # The path at the top gives way to its next sibling, else to its first child, else to the heap's last;
                # a child that did not get the place is pushed. Ranks stop at the first NaN or −inf.
                child = -np.inf
                if d + 1 < depth and log_probs[row, d + 1, 0] > -np.inf:
                    child = score + np.float64(log_probs[row, d + 1, 0])
                new_score, new_parent, new_rank = child, np.int32(n), np.int32(0)
                sibling = rank + 1 < topk and log_probs[row, d, rank + 1] > -np.inf
                if sibling:
                    new_score = scores[parent] + np.float64(log_probs[row, d, rank + 1])
                    new_parent, new_rank = parent, rank + np.int32(1)
                elif not child > -np.inf:
                    end -= 1
                    new_score, new_parent, new_rank = heap_scores[end], heap_parents[end], heap_ranks[end]

                place = np.int64(0)
                while True:
                    best = np.int64(2 * place + 1)
                    if best >= end:
                        break
                    other = best + 1
                    if other < end:
                        later = heap_scores[other] < heap_scores[best]
                        if heap_scores[other] == heap_scores[best]:
                            later = not path_precedes(
                                *(heap_parents[other], heap_ranks[other], heap_parents[best], heap_ranks[best]),
                                *(parents, depths, ranks),
                            )
                        if not later:
                            best = other
                    stays = new_score > heap_scores[best]
                    if new_score == heap_scores[best]:
                        stays = path_precedes(
                            *(new_parent, new_rank, heap_parents[best], heap_ranks[best]), *(parents, depths, ranks)
                        )
                    if stays:
                        break
                    heap_scores[place], heap_parents[place] = heap_scores[best], heap_parents[best]
                    heap_ranks[place] = heap_ranks[best]
                    place = best
                heap_scores[place], heap_parents[place], heap_ranks[place] = new_score, new_parent, new_rank

                if sibling and child > -np.inf:
                    place = np.int64(end)
                    end += 1
                    while place > 0:
                        above = (place - 1) >> 1
                        stays = child < heap_scores[above]
                        if child == heap_scores[above]:
                            stays = not path_precedes(
                                *(np.int32(n), np.int32(0), heap_parents[above], heap_ranks[above]),
                                *(parents, depths, ranks),
                            )
                        if stays:
                            break
                        heap_scores[place], heap_parents[place] = heap_scores[above], heap_parents[above]
                        heap_ranks[place] = heap_ranks[above]
                        place = above
                    heap_scores[place], heap_parents[place], heap_ranks[place] = child, n, 0

            for j in range(J):
                if at[j] != i:
                    continue
                count = np.int64(min(n, budgets[j]))
                while count > 0 and scores[count] < least_scores[j]:
                    count -= 1
                if priced[j]:
                    count = nodes_of_best_rate(mass, count, costs, draft_cost, cost_row[row], cost_weight[row])
                counts[j, row], expected[j, row] = count, 1.0 + mass[count]
                length = np.int64(0)
                while length < kept and path_nodes[row, length] <= count:
                    length += 1
                at[j] = i + length + 1


def replay_rounds(*arguments: Any) -> None:
    """Fill what :func:`ddtree.analysis.replay.replay_all` reads its tables from: see ``_arguments``."""
    prompts = len(arguments[4]) - 1
    in_parallel(replay_prompts, prompts, *arguments)
