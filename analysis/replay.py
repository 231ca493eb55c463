"""Replay: the rounds of any policy over a recorded trace, as a live run of the engine would have had them.

A trace holds the target's tokens and, for every position, the draft that was made there. A round at a position is so
known for every policy: build its tree, follow the tokens through it, go on behind the bonus. What the engine's passes
gave is not needed, since the target's choice on the path is the trace's next token.

Best-first policies (:class:`ddtree.policies.BestFirst`, limited or not) are built and walked by one compiled pass, that
serves many of them at once: their trees nest. Any other policy is called on batches of drafts. Both take a trace in
slices of whole prompts, so that memory does not grow with it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ddtree.analysis.rounds import RoundTable, concatenate_rounds, round_rows
from ddtree.analysis.trace import Trace, TraceChunk
from ddtree.checks import INT32_MAX, integer
from ddtree.ops import accept_tree
from ddtree.policies import (
    BestFirst,
    Limited,
    StaticTree,
    check_policy,
    check_policy_tree,
    likeliest_rank_paths,
    policy_name,
    static_tree,
)
from ddtree.protocols import Policy
from ddtree.tokens import stop_tokens

__all__ = ["fit_static_tree", "passes_of", "rank_rates", "replay", "replay_all"]

POSITIONS_A_SLICE = 1 << 15
"""Drafts that are looked at together: some MB of rows, and batches of hundreds of prompts."""


def replay(
    trace: Trace, policy: Policy, *, max_new_tokens: int | None = None, stop_token_ids: Iterable[int] = ()
) -> RoundTable:
    """Replay one policy.

    Parameters
    ----------
    trace : Trace
        As :func:`ddtree.analysis.trace.open_trace` gives it.
    policy : Policy
        Any of :mod:`ddtree.policies`, or any callable like them.
    max_new_tokens : int, optional
        Replay the first so many new tokens of each prompt, 1 and up; by default all that were recorded.
    stop_token_ids : sequence of int
        End a continuation at these too; those of the recording have ended it already.

    Returns
    -------
    RoundTable
        Every round of every prompt, by prompt and then by position, equal in all columns to what the engine's rounds
        give with this policy. ``used_last_rank`` says in which a wider record might have changed the tree.

    Raises
    ------
    ValueError, TypeError
        An argument by name; a damaged chunk, naming file and field; or a tree that the policy should not have made.
    """
    parts = replay_all(trace, [policy], max_new_tokens=max_new_tokens, stop_token_ids=stop_token_ids)
    return concatenate_rounds(tables[0] for tables in parts)


def replay_all(
    trace: Trace,
    policies: Sequence[Policy],
    *,
    max_new_tokens: int | None = None,
    stop_token_ids: Iterable[int] = (),
) -> Iterator[list[RoundTable]]:
    """Replay some policies together, a slice of the trace at a time.

    Parameters
    ----------
    trace, max_new_tokens, stop_token_ids
        As in :func:`replay`.
    policies : sequence of Policy
        Best-first ones of the same limits and cost model share their trees.

    Yields
    ------
    list of RoundTable
        One a policy, of the next prompts.
    """
    _check_trace(trace)
    limit = trace.manifest.max_new_tokens
    if max_new_tokens is not None:
        limit = integer("max_new_tokens", max_new_tokens, 1, limit, "what was recorded")
    stops = np.array(stop_tokens(stop_token_ids, trace.manifest.vocab_size), np.int32)
    policies = list(policies)
    passes = passes_of(policies, trace.manifest.depth, trace.manifest.topk)
    for chunk in trace.chunks():
        for part in _slices(chunk, limit, stops):
            tables: list[RoundTable | None] = [None] * len(policies)
            for one in passes:
                for j, table in zip(one.members, one.replay(part), strict=True):
                    tables[j] = table
            yield [table for table in tables if table is not None]


def rank_rates(trace: Trace) -> NDArray[np.float64]:
    """How often the target's token has each rank at each depth, given that the tokens before it were drafted.

    Parameters
    ----------
    trace : Trace
        Every position counts that has as many tokens behind it.

    Returns
    -------
    array, float64, shape (L, K)
        Row d − 1: of the positions whose next d − 1 tokens were all among the candidates of their depths, the share
        where token d has that rank. A row that no position reached is 0.
    """
    _check_trace(trace)
    L, K = trace.manifest.depth, trace.manifest.topk
    counts, reached = np.zeros((L, K), np.int64), np.zeros(L, np.int64)
    for chunk in trace.chunks():
        for part in _slices(chunk, trace.manifest.max_new_tokens, np.zeros(0, np.int32)):
            ranks, known = part.ranks_of_truth()
            alive = np.ones(len(ranks), np.bool_)
            for d in range(L):
                alive &= known[:, d]
                reached[d] += alive.sum()
                alive &= ranks[:, d] >= 0
                counts[d] += np.bincount(ranks[alive, d], minlength=K)
    return np.asarray(counts / np.maximum(reached, 1)[:, None])


def fit_static_tree(trace: Trace, budget: int) -> StaticTree:
    """The static tree of ``budget`` paths that this trace accepts most of, as if ranks of its depths were independent.

    See :func:`rank_rates` and :func:`ddtree.policies.likeliest_rank_paths`. Its τ on the same trace is flattered; fit
    on other prompts than are replayed.
    """
    policy = static_tree(likeliest_rank_paths(rank_rates(trace), budget))
    return replace(policy, label=f"static_tree({policy.budget}, fitted)")


def _check_trace(trace: Any) -> None:
    if not isinstance(trace, Trace):
        raise TypeError(f"trace must be a Trace, as open_trace gives it, got {type(trace).__name__}")


@dataclass(frozen=True, eq=False)
class _Slice:
    """Some prompts of a chunk, cut to what is replayed. Arrays as in :class:`TraceChunk`, with new tokens alone."""

    first_prompt: int
    prompt_lens: NDArray[np.int32]
    new_tokens: NDArray[np.int32]
    new_offsets: NDArray[np.int64]
    log_probs: NDArray[np.float32]
    draft_token_ids: NDArray[Any]
    position_offsets: NDArray[np.int64]

    @property
    def num_prompts(self) -> int:
        return len(self.prompt_lens)

    def ranks_of_truth(self) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """Of every position, (M, L): the rank of each next token, −1 if not drafted; and whether there is one."""
        M, L, _ = self.log_probs.shape
        prompts = np.repeat(np.arange(self.num_prompts), np.diff(self.position_offsets))
        root = self.new_offsets[prompts] + np.arange(M) - self.position_offsets[prompts]
        places = root[:, None] + 1 + np.arange(L)
        known = places < self.new_offsets[prompts + 1][:, None]
        truth = self.new_tokens[np.minimum(places, len(self.new_tokens) - 1)] if M else places
        drafted = np.logical_and.accumulate(self.log_probs > -np.inf, axis=-1)
        same = drafted & (self.draft_token_ids == truth[:, :, None])
        return np.where(same.any(-1) & known, same.argmax(-1), -1), known


def _slices(chunk: TraceChunk, max_new_tokens: int, stops: NDArray[np.int32]) -> Iterator[_Slice]:
    """Cut a chunk into whole prompts of some thousand positions, and the prompts to what is replayed."""
    lens = np.diff(chunk.token_offsets) - chunk.prompt_lens
    begins = chunk.token_offsets[:-1] + chunk.prompt_lens
    whole = lens <= max_new_tokens
    if not whole.all() or stops.size:
        lens = np.minimum(lens, max_new_tokens)
        for p in range(len(lens)):
            met = np.flatnonzero(np.isin(chunk.token_ids[begins[p] : begins[p] + lens[p]], stops))
            lens[p] = met[0] + 1 if met.size else lens[p]
    first = 0
    while first < len(lens):
        count = np.searchsorted(np.cumsum(lens[first:]), POSITIONS_A_SLICE, side="right")
        end = first + max(1, int(count))
        new = [chunk.token_ids[begins[p] : begins[p] + lens[p]] for p in range(first, end)]
        # Drafts stay where they are: those behind a cut are passed over.
        low, high = chunk.position_offsets[first], chunk.position_offsets[end]
        yield _Slice(
            chunk.first_prompt + first,
            chunk.prompt_lens[first:end],
            np.concatenate(new),
            np.cumsum([0, *map(len, new)], dtype=np.int64),
            chunk.log_probs[low:high],
            chunk.draft_token_ids[low:high],
            chunk.position_offsets[first : end + 1] - low,
        )
        first = end


@dataclass(frozen=True)
class _BestFirstPass:
    """Best-first policies of the same limits and cost model: ``members`` are their places among the policies."""

    members: tuple[int, ...]
    rules: tuple[BestFirst, ...]
    depth: int
    topk: int

    def replay(self, part: _Slice) -> list[RoundTable]:
        from ddtree.kernels.numba_cpu.replay_rounds import replay_rounds

        M, J, L = len(part.log_probs), len(self.rules), self.depth
        budgets = np.array([rule.budget for rule in self.rules], np.int64)
        priced = np.array([rule.cost_model is not None for rule in self.rules])
        nodes, ranks, first_child = np.empty((M, L), np.int32), np.empty((M, L), np.int32), np.empty((M, L), np.int32)
        scores, last = np.zeros((M, L)), np.empty(M, np.int32)
        counts, expected = np.full((J, M), -1, np.int32), np.empty((J, M))
        prompts = np.repeat(np.arange(part.num_prompts), np.diff(part.position_offsets))
        position = np.arange(M) - part.position_offsets[prompts]
        prefix_len = part.prompt_lens[prompts] + position
        visited = position < np.diff(part.new_offsets)[prompts] - 1
        costs, draft_cost, cost_row, cost_weight = self._costs(prefix_len, visited)
        replay_rounds(
            part.log_probs,
            part.draft_token_ids,
            part.new_tokens,
            part.new_offsets,
            part.position_offsets,
            *(L, self.topk, budgets, np.array([rule.least_score for rule in self.rules]), priced),
            *(costs, draft_cost, cost_row, cost_weight),
            *(nodes, ranks, scores, first_child, last, counts, expected),
        )
        remaining = np.diff(part.new_offsets)[prompts] - 1 - position
        tables = []
        for j in range(J):
            rows = np.flatnonzero(counts[j] >= 0)
            n = counts[j, rows]
            kept = (nodes[rows] >= 0) & (nodes[rows] <= n[:, None])
            length = 1 + kept.sum(1)
            finished = length == remaining[rows]
            # the last kept node's first child, if the path did not come to the last depth
            offered = np.zeros(len(rows), np.bool_)
            inner = length <= L
            offered[inner] = first_child[rows[inner], length[inner] - 1] <= n[inner]
            above = np.pad(scores[rows], ((0, 0), (1, 0)))[:, :L]
            tables.append(
                RoundTable(
                    prompt=part.first_prompt + prompts[rows],
                    position=position[rows],
                    prefix_len=prefix_len[rows],
                    tokens=length.astype(np.int64),
                    finished=finished,
                    num_nodes=n.astype(np.int64),
                    tested=length - 1 + (offered & ~finished),
                    expected=expected[j, rows],
                    used_last_rank=last[rows] <= n,
                    node_indices=np.where(kept, nodes[rows], -1).astype(np.int32),
                    ranks=np.where(kept, ranks[rows], -1).astype(np.int32),
                    log_probs=np.where(kept, scores[rows] - above, np.nan),
                )
            )
        return tables

    def _costs(self, prefix_len: NDArray[Any], visited: NDArray[np.bool_]) -> tuple[Any, float, Any, Any]:
        """Seconds by measured context and nodes, of drafting, and where each position's context stands among them."""
        model, clamp = self.rules[0].cost_model, self.rules[0].clamp
        M = len(prefix_len)
        if model is None:
            return np.ones((1, 1)), 0.0, np.zeros(M, np.int64), np.zeros(M)
        model.seconds(0, prefix_len[visited], clamp=clamp)  # a context that was not measured is refused there
        wide = np.arange(1 + max(rule.budget for rule in self.rules))
        table = model.seconds(wide, model.contexts[:, None]) - model.draft_seconds
        return table, model.draft_seconds, *model.place(prefix_len)


@dataclass(frozen=True)
class _PolicyPass:
    """Any policy, called on batches of drafts: the next round of every prompt of a slice that is not over."""

    members: tuple[int, ...]
    policy: Policy
    budget: int

    def replay(self, part: _Slice) -> list[RoundTable]:
        total = np.diff(part.new_offsets)
        position = np.zeros(part.num_prompts, np.int64)
        prompts = np.flatnonzero(position < total - 1)
        tables = []
        while len(prompts):
            i = position[prompts]
            rows = part.position_offsets[prompts] + i
            roots = part.new_tokens[part.new_offsets[prompts] + i]
            draft = part.log_probs[rows], part.draft_token_ids[rows].astype(np.int32), roots
            prefix_len = part.prompt_lens[prompts] + i
            log_probs, token_ids, _ = (a.copy() for a in draft)  # copies, as the engine gives
            tree = self.policy(log_probs, token_ids, roots.copy(), prefix_len.astype(np.int32))
            tree = check_policy_tree(self.policy, tree, *draft, budget=self.budget)
            # Off the path a choice is asked of no node, so that each node may be given the token of its depth.
            after = i[:, None] + 1 + np.maximum(tree.depths, 0)
            places = part.new_offsets[prompts][:, None] + np.minimum(after, total[prompts][:, None] - 1)
            remaining = (total[prompts] - 1 - i).astype(np.int32)
            kept = accept_tree(tree, part.new_tokens[places], remaining=remaining, validate=False)
            tables.append(round_rows(tree, kept, prompt=prompts, position=i, prefix_len=prefix_len))
            position[prompts] += kept.lengths
            prompts = prompts[~kept.finished]
        table = concatenate_rounds(tables)
        table = table.take(np.lexsort((table.position, table.prompt)))
        return [replace(table, prompt=part.first_prompt + table.prompt)]


def passes_of(policies: Sequence[Policy], depth: int, topk: int) -> list[_BestFirstPass | _PolicyPass]:
    """Group the policies that one pass can serve: the places among ``policies`` are each pass's ``members``."""
    groups: dict[Any, list[tuple[int, BestFirst]]] = {}
    passes: list[_BestFirstPass | _PolicyPass] = []
    for j, policy in enumerate(policies):
        check_policy(f"policies[{j}]", policy)
        inner, limits = policy, [depth, topk]
        while type(inner) is Limited:  # a class derived from it may do otherwise
            limits = [
                min(n, INT32_MAX if m is None else m) for n, m in zip(limits, (inner.depth, inner.topk), strict=True)
            ]
            inner = inner.policy
        if type(inner) is BestFirst:
            groups.setdefault((*limits, id(inner.cost_model), inner.clamp), []).append((j, inner))
        else:
            budget = integer(f"budget of policy {policy_name(policy)}", policy.budget, 0, INT32_MAX - 1)
            passes.append(_PolicyPass((j,), policy, budget))
    for (d, k, _, _), members in groups.items():
        passes.append(_BestFirstPass(tuple(j for j, _ in members), tuple(rule for _, rule in members), d, k))
    return passes
