"""Policies: which tree is made of a draft. The engine and a replay take any of them, and any callable like them.

A policy is ``policy(log_probs, token_ids, root_token_ids, prefix_lens) -> DraftTree`` with an attribute ``budget``
(:class:`ddtree.protocols.Policy`). It changes how many tokens a round emits, never which. A policy of one's own is a
function that is given a budget, or an object of a class that has one:

>>> def deeper(log_probs, token_ids, root_token_ids, prefix_lens):
...     factors = 0.9 ** np.arange(log_probs.shape[1], dtype=np.float32)
...     return build_tree(log_probs * factors[:, None], token_ids, root_token_ids, budget=deeper.budget)
>>> deeper.budget = 64

The tree says which candidates of the draft are checked, by depth and rank; whatever scores it has, those that count
are the draft's. To look at fewer candidates, wrap a policy: ``limited(deeper, topk=8)``.

Letters: B requests, L draft depth limit, K candidates a depth, N ≤ 1 + budget node slots.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ddtree.arrays import array_namespace, to_numpy
from ddtree.checks import INT32_MAX, Call, check_tree_values, check_visibility, first, integer, numbers, real
from ddtree.costs import CostModel
from ddtree.ops import build_tree, visibility_words
from ddtree.protocols import Policy
from ddtree.reference.build_tree import drafted_widths
from ddtree.reference.portable_math import portable_exp
from ddtree.trees import DraftTree

__all__ = [
    "AllChildren",
    "BestFirst",
    "Limited",
    "SpineFirst",
    "StaticTree",
    "all_children",
    "chain",
    "check_policy",
    "check_policy_tree",
    "confidence",
    "cost_aware",
    "first_nodes",
    "fixed_budget",
    "likeliest_rank_paths",
    "limited",
    "policy_name",
    "spine_first",
    "static_tree",
]


def fixed_budget(budget: int) -> BestFirst:
    """DDTree (arXiv 2604.12989): the ``budget`` likeliest paths, 0 … 2³¹ − 2. See :func:`ddtree.build_tree`."""
    return BestFirst(f"fixed_budget({budget})", budget)


def confidence(budget: int, cutoff: float) -> BestFirst:
    """Of the ``budget`` likeliest paths, those of probability ``cutoff`` and up.

    Parameters
    ----------
    budget : int
        The most nodes besides the root.
    cutoff : float
        The least product of a path's drafted probabilities, over 0 and at most 1.
    """
    if not 0 < real("cutoff", cutoff) <= 1:
        raise ValueError(f"cutoff must be over 0 and at most 1, got {cutoff}")
    return BestFirst(f"confidence({budget}, {cutoff:g})", budget, least_score=math.log(cutoff))


def cost_aware(budget: int, cost_model: CostModel, *, clamp: bool = False) -> BestFirst:
    """CaDDTree (arXiv 2606.01813): nodes in best-first order until the expected rate no longer rises.

    The rate of the first n nodes is (1 + Φ(n)) / (C_d + C_v(n, context)), where Φ(n) is the sum of their paths'
    probabilities. The first n with rate(n + 1) ≤ rate(n) is kept: Φ is concave, and where C_v is convex in n, no later
    one is better.

    Parameters
    ----------
    budget : int
        The most nodes besides the root; within what was measured.
    cost_model : CostModel
        Of drafting and verifying.
    clamp : bool
        Take the nearest measured context's costs behind or before those that were measured; by default such a context
        is a ValueError in the round that meets it.
    """
    if not isinstance(cost_model, CostModel):
        raise TypeError(f"cost_model must be a ddtree.costs.CostModel, got {type(cost_model).__name__}")
    if integer("budget", budget, 0, INT32_MAX - 1) > cost_model.nodes[-1]:
        raise ValueError(
            f"budget must be at most {cost_model.nodes[-1]}, the most nodes that cost_model was measured with, "
            f"got {budget}: ask for smaller budgets, or measure with more nodes"
        )
    return BestFirst(f"cost_aware({budget})", budget, cost_model=cost_model, clamp=clamp)


def chain(depth: int) -> StaticTree:
    """The likeliest token of each depth, one after the other: ``depth`` nodes, plain speculative decoding."""
    depth = integer("depth", depth, 0, INT32_MAX - 1)
    return replace(static_tree([(0,) * d for d in range(1, depth + 1)]), label=f"chain({depth})")


def static_tree(paths: Iterable[Sequence[int]]) -> StaticTree:
    """The same rank paths every round, whatever the draft says (Medusa, arXiv 2401.10774; Sequoia, 2402.12374).

    Parameters
    ----------
    paths : iterable of sequence of int
        Rank paths, ``(0,)`` the likeliest first token, ``(0, 1)`` the second likeliest behind it; distinct, and each
        one's beginning among them. Nodes stand by depth, then by path. What a draft does not reach is left out.

    Examples
    --------
    >>> policy = static_tree([(0,), (1,), (0, 0)])
    >>> log_probs = np.log(np.array([[[0.5, 0.25], [0.5, 0.25]]], np.float32))
    >>> token_ids = np.array([[[7, 8], [9, 4]]], np.int32)
    >>> tree = policy(log_probs, token_ids, np.array([3], np.int32), np.array([0], np.int32))
    >>> tree.token_ids.tolist(), tree.parents.tolist()
    ([[3, 7, 8, 9]], [[-1, 0, 0, 1]])
    """
    listed = [tuple(integer(f"paths[{i}]", r, 0, INT32_MAX) for r in path) for i, path in enumerate(paths)]
    for i, path in enumerate(listed):
        if not path:
            raise ValueError(f"paths[{i}] must have one rank or more, got none: the root is always there")
        if len(path) > 1 and path[:-1] not in listed:
            raise ValueError(f"paths[{i}] = {path} must have its beginning {path[:-1]} among the paths")
        if path in listed[:i]:
            raise ValueError(f"paths[{i}] = {path} must stand among the paths once")
    ordered = tuple(sorted(listed, key=lambda path: (len(path), path)))
    return StaticTree(f"static_tree({len(ordered)})", ordered)


def likeliest_rank_paths(rates: ArrayLike, budget: int) -> list[tuple[int, ...]]:
    """The rank paths accepted most often, for :func:`static_tree`, if ranks of different depths are independent.

    Parameters
    ----------
    rates : array, float, shape (L, K)
        How often the target's token has that rank at that depth, 0 … 1, given that the path so far was accepted, as
        :func:`ddtree.analysis.replay.rank_rates` counts them; the sum of a depth is at most 1.
    budget : int
        How many paths; fewer where fewer have a rate over 0.

    Examples
    --------
    >>> likeliest_rank_paths([[0.6, 0.3], [0.4, 0.3]], 4)
    [(0,), (1,), (0, 0), (0, 1)]
    """
    rates = numbers("rates", rates).astype(np.float64)
    if rates.ndim != 2:
        raise ValueError(f"rates must have shape (L, K), got {rates.shape}")
    outside = ~((rates >= 0) & (rates <= 1))
    if outside.any():
        d, k = first(outside)
        raise ValueError(f"rates[{d}, {k}] must be in 0 … 1, got {rates[d, k]}")
    # Ranks in order of their rates are a draft, and the best static tree is its best-first tree.
    ranks = np.argsort(-rates, axis=1, kind="stable").astype(np.int32)
    with np.errstate(divide="ignore"):
        log_rates = np.log(np.take_along_axis(rates, ranks, 1)).astype(np.float32)
    tree = build_tree(log_rates[None], ranks[None], np.zeros(1, np.int32), budget=budget)
    paths: list[tuple[int, ...]] = [()]
    for node in range(1, int(tree.node_counts[0])):
        paths.append((*paths[tree.parents[0, node]], int(tree.token_ids[0, node])))
    return sorted(paths[1:], key=lambda path: (len(path), path))


def all_children(budget: int, width: int) -> AllChildren:
    """EAGLE-2 (arXiv 2406.16858): at each depth the ``width`` best nodes get all their children, then the best stay.

    The root gets its ``width`` likeliest children; of each depth the ``width`` nodes of highest score get theirs; of
    all those nodes the ``budget`` of highest score are kept.

    Parameters
    ----------
    budget : int
        The most nodes besides the root.
    width : int
        Children of a node and nodes of a depth that have some, 1 and up; no more than the draft has candidates.
    """
    integer("width", width, 1, INT32_MAX)
    return AllChildren(f"all_children({budget}, {width})", budget, width)


def spine_first(budget: int) -> SpineFirst:
    """The chain of likeliest tokens first, down to the last depth, then the likeliest other paths up to ``budget``."""
    return SpineFirst(f"spine_first({budget})", budget)


def limited(policy: Policy, *, depth: int | None = None, topk: int | None = None) -> Limited:
    """Let ``policy`` see no more than the first ``depth`` positions and the ``topk`` likeliest candidates of a draft.

    Parameters
    ----------
    policy : Policy
        Any.
    depth, topk : int, optional
        0 and up, 1 and up; no limit if left out.
    """
    check_policy("policy", policy)
    if depth is not None:
        integer("depth", depth, 0, INT32_MAX - 1)
    if topk is not None:
        integer("topk", topk, 1, INT32_MAX)
    limits = [f"{name}={value}" for name, value in (("depth", depth), ("topk", topk)) if value is not None]
    return Limited(", ".join([f"limited({policy_name(policy)}", *limits]) + ")", policy, depth, topk)


def policy_name(policy: Policy) -> str:
    """What tables and messages call a policy: its ``label``, else its name."""
    return str(getattr(policy, "label", None) or getattr(policy, "__name__", type(policy).__name__))


@dataclass(frozen=True)
class _Budgeted:
    """What the policies here have in common: a label for tables, and a budget."""

    label: str
    budget: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "budget", integer("budget", self.budget, 0, INT32_MAX - 1))


@dataclass(frozen=True)
class BestFirst(_Budgeted):
    """The first nodes in best-first order, and where to stop: see :func:`fixed_budget` and what stands beside it.

    Attributes
    ----------
    least_score : float
        Nodes of a lower score, the logarithm of a path's probability, are left out.
    cost_model : CostModel, optional
        Stop where the expected rate under it no longer rises; ``clamp`` as in :func:`cost_aware`.
    """

    least_score: float = -math.inf
    cost_model: CostModel | None = None
    clamp: bool = False

    def __call__(self, log_probs: Any, token_ids: Any, root_token_ids: Any, prefix_lens: Any) -> DraftTree:
        """Build the tree of the whole budget, and keep its first nodes."""
        tree = build_tree(log_probs, token_ids, root_token_ids, budget=self.budget)
        if self.least_score == -math.inf and self.cost_model is None:
            return tree
        scores = to_numpy(tree.scores)[:, 1:]
        kept = np.minimum(to_numpy(tree.node_counts) - 1, (scores >= self.least_score).sum(1))
        if self.cost_model is not None:
            costs = self.cost_model.seconds(
                np.arange(self.budget + 1), to_numpy(prefix_lens)[:, None], clamp=self.clamp
            )
            kept = np.minimum(kept, nodes_of_best_rate(scores, costs))
        return first_nodes(tree, 1 + kept)


def nodes_of_best_rate(scores: NDArray[np.float64], costs: NDArray[np.float64]) -> NDArray[np.int64]:
    """The first n with rate(n + 1) ≤ rate(n), of nodes of these scores (B, n) and rounds of these costs (B, 1 + n)."""
    mass = np.cumsum(np.where(scores > -np.inf, portable_exp(np.maximum(scores, -1e3)), 0.0), axis=1)
    rate = (1.0 + np.pad(mass, ((0, 0), (1, 0)))) / costs
    falls = np.pad(rate[:, 1:] <= rate[:, :-1], ((0, 0), (0, 1)), constant_values=True)
    result: NDArray[np.int64] = falls.argmax(1)
    return result


def first_nodes(tree: DraftTree, node_counts: NDArray[Any]) -> DraftTree:
    """The first ``node_counts`` nodes of each tree, on the host, in as many slots as the largest needs."""
    N = int(node_counts.max(initial=1))
    used = np.arange(N) < node_counts[:, None]

    def cut(array: Any, padding: Any) -> NDArray[Any]:
        host = to_numpy(array)
        return np.where(used, host[:, :N], host.dtype.type(padding))

    words = np.where(used[:, :, None], to_numpy(tree.visibility_words)[:, :N, : (N + 31) // 32], np.uint32(0))
    return replace(
        tree,
        token_ids=cut(tree.token_ids, -1),
        parents=cut(tree.parents, -1),
        depths=cut(tree.depths, -1),
        ranks=cut(tree.ranks, -1),
        scores=cut(tree.scores, -np.inf),
        node_counts=node_counts.astype(np.int32),
        visibility_words=np.ascontiguousarray(words),
    )


@dataclass(frozen=True)
class StaticTree:
    """See :func:`static_tree`."""

    label: str
    paths: tuple[tuple[int, ...], ...]
    _arrays: tuple[NDArray[Any], ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        place = {(): 0} | {path: i + 1 for i, path in enumerate(self.paths)}
        parents = np.array([-1, *(place[path[:-1]] for path in self.paths)], np.int32)
        depths = np.array([0, *map(len, self.paths)], np.int32)
        ranks = np.full((len(place), depths.max()), -1, np.int32)  # of the whole path, by depth
        for path, i in place.items():
            ranks[i, : len(path)] = path
        object.__setattr__(self, "_arrays", (parents, depths, ranks))

    @property
    def budget(self) -> int:
        """The number of paths."""
        return len(self.paths)

    def __call__(self, log_probs: Any, token_ids: Any, root_token_ids: Any, prefix_lens: Any) -> DraftTree:
        """Look the paths up in the draft."""
        log_probs, token_ids, roots = _on_host(log_probs, token_ids, root_token_ids)
        parents, depths, ranks = self._arrays
        B, L, K = log_probs.shape
        widths = drafted_widths(log_probs)
        scores, there = np.zeros((B, len(parents))), np.ones((B, len(parents)), np.bool_)
        for d in range(ranks.shape[1]):
            inside = np.flatnonzero(depths > d)
            rank = ranks[inside, d]
            reached = (rank < widths[:, d, None]) if d < L else np.zeros((B, len(inside)), np.bool_)
            there[:, inside] &= reached
            if d < L and K > 0:
                scores[:, inside] += np.where(reached, log_probs[:, d, np.minimum(rank, K - 1)], np.float32(0))
        last = ranks[np.arange(1, len(parents)), depths[1:] - 1] if len(parents) > 1 else np.zeros(0, np.int32)
        return tree_of_candidates(
            (log_probs, token_ids, roots), np.tile(parents[1:], (B, 1)), depths[1:], last, scores[:, 1:], there[:, 1:]
        )


@dataclass(frozen=True)
class AllChildren(_Budgeted):
    """See :func:`all_children`."""

    width: int = 1

    def __call__(self, log_probs: Any, token_ids: Any, root_token_ids: Any, prefix_lens: Any) -> DraftTree:
        """Expand depth by depth, then keep the best."""
        log_probs, token_ids, roots = _on_host(log_probs, token_ids, root_token_ids)
        B, L, K = log_probs.shape
        width, rows = min(self.width, K), np.arange(B)[:, None]
        drafted = np.arange(K) < drafted_widths(log_probs)[:, :, None]
        steps = np.where(drafted, log_probs, -np.inf)[:, :, :width].astype(np.float64)
        above, above_scores = np.zeros((B, 1), np.int64), np.zeros((B, 1))  # the nodes that get children
        parts: list[tuple[NDArray[Any], ...]] = []
        begin = 1
        for d in range(L):
            n = above.shape[1] * width
            scores = (above_scores[:, :, None] + steps[:, d, None, :]).reshape(B, n)
            parents = np.repeat(above, width, axis=1)
            parts.append((parents, np.full(n, d + 1), np.tile(np.arange(width), above.shape[1]), scores))
            best = np.argsort(-scores, axis=1, kind="stable")[:, : self.width]
            above, above_scores = begin + best, scores[rows, best]
            begin += n
        if not parts:
            none = np.zeros((B, 0))
            return tree_of_candidates((log_probs, token_ids, roots), none, none, none, none, none > 0)
        parents, scores = (np.concatenate([part[i] for part in parts], axis=1) for i in (0, 3))
        depths, ranks = (np.concatenate([part[i] for part in parts]) for i in (1, 2))
        # Of equal scores the node that was made first, so that a parent precedes its children.
        kept = np.argsort(-scores, axis=1, kind="stable")[:, : self.budget]
        place = np.zeros((B, 1 + parents.shape[1]), np.int64)
        place[rows, 1 + kept] = 1 + np.arange(kept.shape[1])
        scores = scores[rows, kept]
        return tree_of_candidates(
            (log_probs, token_ids, roots),
            place[rows, parents[rows, kept]],
            depths[kept],
            ranks[kept],
            scores,
            scores > -np.inf,
        )


@dataclass(frozen=True)
class SpineFirst(_Budgeted):
    """See :func:`spine_first`."""

    def __call__(self, log_probs: Any, token_ids: Any, root_token_ids: Any, prefix_lens: Any) -> DraftTree:
        """Take the spine and, of the best-first tree, the first nodes that are not on it."""
        log_probs, token_ids, roots = _on_host(log_probs, token_ids, root_token_ids)
        B, L, K = log_probs.shape
        best = build_tree(log_probs, token_ids, roots, budget=self.budget)
        slots = np.arange(1 + self.budget)
        spine = np.zeros(best.parents.shape, np.bool_)
        spine[:, 0] = True
        for node in range(1, len(slots)):
            above = np.maximum(best.parents[:, node], 0)
            spine[:, node] = (best.ranks[:, node] == 0) & spine[np.arange(B), above]
        first_drafted = (drafted_widths(log_probs) > 0).astype(np.int64)
        S = np.minimum(np.cumprod(first_drafted, axis=1).sum(1), self.budget)  # nodes of each spine
        steps = np.where(np.arange(L) < S[:, None], log_probs[:, :, 0] if K else 0.0, 0.0).astype(np.float64)
        # Slots: the spine's, as many as the deepest has; then the others in best-first order.
        wide = min(L, self.budget)
        other = ~spine & (slots < best.node_counts[:, None])
        order = np.argsort(~other, axis=1, kind="stable")
        place = np.zeros(best.parents.shape, np.int64)  # of a best-first node among those slots
        np.put_along_axis(place, order, 1 + wide + slots[None], axis=1)
        place = np.where(spine, best.depths, place)
        parents = np.take_along_axis(place, np.maximum(np.take_along_axis(best.parents, order, 1), 0), 1)
        there = np.take_along_axis(other, order, 1) & (slots < (self.budget - S)[:, None])

        def joined(of_spine: Any, of_others: Any) -> NDArray[Any]:
            on_spine = np.broadcast_to(of_spine, (B, wide))
            return np.concatenate([on_spine, np.take_along_axis(of_others, order, 1)], axis=1)

        depth = np.arange(wide)
        return tree_of_candidates(
            (log_probs, token_ids, roots),
            np.concatenate([np.broadcast_to(depth, (B, wide)), parents], axis=1),
            joined(1 + depth, best.depths),
            joined(0, best.ranks),
            joined(np.cumsum(steps, axis=1)[:, :wide], best.scores),
            np.concatenate([depth < S[:, None], there], axis=1),
        )


@dataclass(frozen=True)
class Limited:
    """See :func:`limited`."""

    label: str
    policy: Policy
    depth: int | None
    topk: int | None

    @property
    def budget(self) -> int:
        """The inner policy's."""
        return self.policy.budget

    def __call__(self, log_probs: Any, token_ids: Any, root_token_ids: Any, prefix_lens: Any) -> DraftTree:
        """Cut the draft and pass it on."""
        part = (slice(None), slice(self.depth), slice(self.topk))
        log_probs, token_ids = (_contiguous(a[part]) for a in (log_probs, token_ids))
        return self.policy(log_probs, token_ids, root_token_ids, prefix_lens)


def tree_of_candidates(
    draft: tuple[NDArray[Any], ...], parents: Any, depths: Any, ranks: Any, scores: Any, there: Any
) -> DraftTree:
    """Make the trees of some candidates of a draft, closing the gaps that those which are not there leave.

    ``draft`` is (log_probs, token_ids, root_token_ids). The others are (B, n) or (n,), one entry a node besides the
    root; parents count from the root, 0, and stand before their children. A node that is there has a parent that is.
    """
    log_probs, token_ids, roots = draft
    B, L, K = log_probs.shape
    there = np.concatenate([np.ones((B, 1), np.bool_), there], axis=1)
    counts = there.sum(1)
    N = int(counts.max(initial=1))
    order = np.argsort(~there, axis=1, kind="stable")[:, :N]
    used = np.arange(N) < counts[:, None]
    place = np.cumsum(there, axis=1) - 1

    def row(values: Any, root: Any, padding: Any, dtype: Any) -> NDArray[Any]:
        whole = np.concatenate([np.full((B, 1), root), np.broadcast_to(values, (B, there.shape[1] - 1))], axis=1)
        return np.where(used, np.take_along_axis(whole, order, 1), padding).astype(dtype)

    parents, depths, ranks = (row(a, r, -1, np.int32) for a, r in ((parents, -1), (depths, 0), (ranks, -1)))
    parents = np.where(parents > 0, np.take_along_axis(place, np.maximum(parents, 0), 1), parents).astype(np.int32)
    tokens = np.where(used, roots[:, None], -1).astype(np.int32)
    if L * K:
        drafted = token_ids[np.arange(B)[:, None], np.maximum(depths - 1, 0), np.maximum(ranks, 0)]
        tokens = np.where(depths > 0, drafted, tokens).astype(np.int32)
    node_counts = counts.astype(np.int32)
    words = visibility_words(parents, node_counts)
    scores = row(scores, 0.0, -np.inf, np.float64)
    return DraftTree(tokens, parents, depths, ranks, scores, node_counts, words, L, K)


def check_policy(name: str, policy: Any) -> None:
    """Refuse what is no policy, under the argument's name."""
    if callable(policy) and hasattr(policy, "budget"):
        return
    what = f"{name} must be callable as (log_probs, token_ids, root_token_ids, prefix_lens) and have a budget"
    if not callable(policy):
        raise TypeError(f"{what}, got {type(policy).__name__}")
    called = getattr(policy, "__name__", "policy")
    raise TypeError(
        f"{what}, the most nodes of a tree besides the root, got {type(policy).__name__} {policy_name(policy)} without "
        f"one: set it, as in {called}.budget = 64, or in its class; what makes policies must be called first"
    )


def check_policy_tree(
    policy: Policy, tree: Any, log_probs: Any, token_ids: Any, root_token_ids: Any, *, budget: int
) -> DraftTree:
    """Refuse a tree that is not made of the draft, within the policy's budget and whole; return it with its scores.

    Scores follow from the draft, the tree's depths and its ranks, so a policy need not get them right: one that ranks
    paths by another measure, such as a tempered draft's, chooses the nodes, and they have the scores of the draft.

    Parameters
    ----------
    policy : Policy
        Who made it.
    tree : DraftTree
        What it made, on any device.
    log_probs, token_ids, root_token_ids : array
        What it was made of, checked.
    budget : int
        The policy's when the run began: there is no room for more.

    Returns
    -------
    DraftTree
        The policy's own where its scores are the draft's; else the same one with those, on the host.

    Raises
    ------
    TypeError, ValueError
        Naming the policy and the field.
    """
    name = f"policy {policy_name(policy)}"
    if not isinstance(tree, DraftTree):
        raise TypeError(f"{name} must return a ddtree.DraftTree, got {type(tree).__name__}")
    log_probs, token_ids, roots = _on_host(log_probs, token_ids, root_token_ids)
    B, L, K = log_probs.shape
    try:
        host = _host_tree(tree)
        call = Call("accept_tree", None, {"target_token_ids": host.token_ids}, host)
        call.check_tree()
        slots = call.dims["N"]
        if call.dims["B"] != B:
            raise ValueError(f"tree must hold {B} requests, as the draft does, got {call.dims['B']}")
        if not 1 <= slots <= 1 + budget:
            raise ValueError(f"tree must have 1 … {1 + budget} node slots, the root's and its budget's, got {slots}")
        if host.max_depth > L or not 0 <= host.num_candidates <= K:
            raise ValueError(
                f"tree must have max_depth <= {L} and num_candidates in 0 … {K}, as the draft has, "
                f"got {host.max_depth} and {host.num_candidates}"
            )
        check_tree_values(call)
        check_visibility(call)
        _check_made_of(host, log_probs, token_ids, roots)
    except (ValueError, TypeError) as error:
        raise type(error)(f"{name}: {error}") from error
    scores = _scores_of(host, log_probs)
    return tree if (scores == host.scores).all() else replace(tree, scores=scores)


def _check_made_of(
    tree: DraftTree, log_probs: NDArray[np.float32], token_ids: NDArray[Any], roots: NDArray[Any]
) -> None:
    """Ranks that were drafted, tokens of the draft, no candidate twice, padding as it must be."""
    B, N = tree.token_ids.shape
    L, K = tree.max_depth, tree.num_candidates
    used = np.arange(N) < tree.node_counts[:, None]
    if (tree.token_ids[:, 0] != roots).any():
        (b,) = first(tree.token_ids[:, 0] != roots)
        raise ValueError(
            f"tree.token_ids[{b}, 0] must be the root's token {int(roots[b])}, got {int(tree.token_ids[b, 0])}"
        )
    for array, padding in ((tree.token_ids, -1), (tree.parents, -1), (tree.depths, -1), (tree.ranks, -1)):
        if (array[~used] != padding).any():
            raise ValueError("tree must have -1 in unused slots of token_ids, parents, depths and ranks")
    inner = used & (np.arange(N) > 0)
    rows, at = np.arange(B)[:, None], np.where(inner, tree.depths - 1, 0)
    widths = np.minimum(drafted_widths(log_probs), K)
    drafted = np.take_along_axis(widths, at, 1) if L else np.zeros((B, N), np.int32)
    wrong = inner & ~((tree.ranks >= 0) & (tree.ranks < drafted))
    if wrong.any():
        b, i = first(wrong)
        raise ValueError(
            f"tree.ranks[{b}, {i}] must be in 0 … {int(drafted[b, i]) - 1}, what is drafted at depth "
            f"{int(tree.depths[b, i])}, got {int(tree.ranks[b, i])}"
        )
    if L == 0 or K == 0:
        return
    ranks, above = np.where(inner, tree.ranks, 0), np.where(inner, tree.parents, 0)
    tokens = token_ids[rows, at, ranks]
    wrong = inner & (tree.token_ids != tokens)
    if wrong.any():
        b, i = first(wrong)
        raise ValueError(
            f"tree.token_ids[{b}, {i}] must be {tokens[b, i]}, what the draft says of its depth and rank, "
            f"got {tree.token_ids[b, i]}"
        )
    keys = np.where(inner, above.astype(np.int64) * K + ranks, -1 - np.arange(N))
    ordered = np.sort(keys, axis=1)
    if (ordered[:, 1:] == ordered[:, :-1]).any():
        (b,) = first((ordered[:, 1:] == ordered[:, :-1]).any(1))
        raise ValueError(f"tree must hold each candidate of a node once, request {b} has one twice")


def _scores_of(tree: DraftTree, log_probs: NDArray[np.float32]) -> NDArray[np.float64]:
    """Float64 sums, in depth order from +0.0, of each path's log-probs; −inf in unused slots."""
    used = np.arange(tree.num_slots) < tree.node_counts[:, None]
    scores = np.where(used, 0.0, -np.inf)
    for depth in range(1, int(tree.depths.max(initial=0)) + 1):
        b, i = np.nonzero(used & (tree.depths == depth))
        scores[b, i] = scores[b, tree.parents[b, i]] + log_probs[b, depth - 1, tree.ranks[b, i]].astype(np.float64)
    return scores


def _contiguous(array: Any) -> Any:
    return array.contiguous() if hasattr(array, "contiguous") else array_namespace(array).ascontiguousarray(array)


def _on_host(*arrays: Any) -> list[NDArray[Any]]:
    return [np.ascontiguousarray(to_numpy(a)) for a in arrays]


def _host_tree(tree: DraftTree) -> DraftTree:
    host = {}
    for name in ("token_ids", "parents", "depths", "ranks", "scores", "node_counts", "visibility_words"):
        try:
            host[name] = to_numpy(getattr(tree, name))
        except TypeError as error:
            raise TypeError(f"tree.{name} {error}") from error
    return replace(tree, **host)  # type: ignore[arg-type]
