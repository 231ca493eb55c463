"""A replay's rounds are a live run's, whatever the policy; and what is said of what cannot be replayed."""

from dataclasses import dataclass, fields
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import event, given, settings

from ddtree import build_tree
from ddtree.analysis import replay as replay_module
from ddtree.analysis.record import record, vocabulary_digest
from ddtree.analysis.replay import fit_static_tree, rank_rates, replay, replay_all
from ddtree.analysis.rounds import concatenate_rounds, round_table
from ddtree.analysis.trace import Trace, TraceWriter, open_trace, shipped_trace
from ddtree.costs import CostModel
from ddtree.drafters import NgramDrafter, NoiseLaw, OracleDrafter
from ddtree.engine import Engine
from ddtree.kdtr import read_kdtr
from ddtree.model import golden_bundle, load_model
from ddtree.pair import load_pair, load_prompts, pair_folder
from ddtree.policies import (
    BestFirst,
    Limited,
    all_children,
    chain,
    confidence,
    cost_aware,
    first_nodes,
    fixed_budget,
    limited,
    policy_name,
    spine_first,
    static_tree,
)
from ddtree.property_tests.compare import assert_same
from ddtree.property_tests.targets import DRAFTERS, VOCABULARY, AttentionTarget
from ddtree.property_tests.tolerances import TOLERANCE

COSTS = CostModel(np.array([0, 4, 40]), np.array([0, 64]), np.array([[1.0, 1.1, 4.0], [2.0, 2.1, 9.0]]), 0.3)


class EveryOther:
    """A callable of one's own: the best nodes alone in every other round, by the prefix length."""

    budget = 6

    def __call__(self, log_probs, token_ids, root_token_ids, prefix_lens):
        tree = build_tree(log_probs, token_ids, root_token_ids, budget=6)
        cutoffs = np.where(prefix_lens % 2, -np.inf, -1.0)
        kept = np.minimum((tree.scores[:, 1:] >= cutoffs[:, None]).sum(1), tree.node_counts - 1)
        return first_nodes(tree, 1 + kept)


def reweighted(log_probs, token_ids, root_token_ids, prefix_lens):
    """A function of one's own, whose scores are not the draft's."""
    factors = np.resize(np.array([1, 0.5, 2], np.float32), (log_probs.shape[1], 1))
    return build_tree(log_probs * factors, token_ids, root_token_ids, budget=7)


reweighted.budget = 7  # type: ignore[attr-defined]

POLICIES = [
    *(fixed_budget(b) for b in (0, 1, 2, 5, 9, 40)),
    *(confidence(20, 0.05), confidence(6, 0.3), cost_aware(30, COSTS), cost_aware(3, COSTS)),
    *(
        limited(fixed_budget(8), depth=2, topk=2),
        limited(confidence(9, 0.1), topk=3),
        limited(fixed_budget(5), depth=0),
    ),
    *(chain(3), all_children(9, 3), spine_first(7), static_tree([(0,), (1,), (0, 0)]), limited(chain(3), depth=2)),
    EveryOther(),
    reweighted,
]


class Wide:
    """A drafter whose drafts all have K candidates, so that a record of K says as much as they do."""

    def __init__(self, drafter):
        self.drafter = drafter

    def __call__(self, context, depth, topk):
        log_probs, token_ids = self.drafter(context, depth, topk)
        missing = ((0, 0), (0, 0), (0, topk - log_probs.shape[2]))
        return np.pad(log_probs, missing, constant_values=-np.inf), np.pad(token_ids, missing, constant_values=-1)


def by_prompt(table):
    return table.take(np.lexsort((table.position, table.prompt)))


def assert_same_rounds(actual, expected):
    for f in fields(expected):
        assert_same(getattr(actual, f.name), getattr(expected, f.name), f.name)


def live_rounds(target, drafter, prompts, policy, *arguments, depth, topk, **options):
    engine = Engine(target, drafter, depth=depth, topk=topk, policy=policy)
    generation = engine.generate(prompts, *arguments, **options)
    return by_prompt(round_table(generation, [len(p) for p in prompts]))


PROMPTS = [[1, 2], [3], [4, 5, 6], [7]]


@pytest.fixture(scope="module", params=["random", "repeating", "oracle with noise", "n-gram"])
def pair(request, tmp_path_factory):
    """A target, one of the drafters, and their trace in two chunks."""
    target, seed = AttentionTarget(1), 4
    expected = Engine(target).generate(PROMPTS, 16, [6], mode="autoregressive")
    drafter = Wide(DRAFTERS[request.param](expected.tokens, seed))
    folder = tmp_path_factory.mktemp("trace") / "t"
    trace = record(
        *(target, drafter, PROMPTS, folder),
        **{"depth": 3, "topk": 4, "max_new_tokens": 16, "stop_token_ids": [6], "prompts_a_chunk": 3},
    )
    return target, drafter, trace


def test_replay_is_a_live_run_round_for_round(pair):
    target, drafter, trace = pair
    together = list(replay_all(trace, POLICIES))
    for j, policy in enumerate(POLICIES):
        live = live_rounds(target, drafter, PROMPTS, policy, 16, [6], depth=3, topk=4)
        assert_same_rounds(replay(trace, policy), live)
        assert_same_rounds(concatenate_rounds(tables[j] for tables in together), live)


@pytest.mark.parametrize("policy", [fixed_budget(7), EveryOther()], ids=policy_name)
@pytest.mark.parametrize("cut", [{"max_new_tokens": 5}, {"stop_token_ids": [2, 3]}, {"max_new_tokens": 1}])
def test_replay_of_less_is_a_live_run_of_less(pair, policy, cut):
    target, drafter, trace = pair
    stops = [6, *cut.get("stop_token_ids", [])]
    live = live_rounds(target, drafter, PROMPTS[:1], policy, cut.get("max_new_tokens", 16), stops, depth=3, topk=4)
    table = replay(trace, policy, **cut)
    first = table.take(table.prompt == 0)
    assert len(first) == len(live)
    if len(live):
        assert_same_rounds(first, live)
    assert table.tokens.sum() == sum(
        max(0, min([i + 1 for i, t in enumerate(c.new_tokens(p)) if t in stops] + [cut.get("max_new_tokens", 16)]) - 1)
        for c in trace.chunks()
        for p in range(c.num_prompts)
        if len(c.new_tokens(p)) > 1
    )


@given(
    seed=st.integers(0, 2**16),
    budget=st.integers(0, 33),
    cutoff=st.sampled_from([0.5, 0.1, 0.01]),
    limits=st.fixed_dictionaries({}, optional={"depth": st.integers(0, 5), "topk": st.integers(1, 5)}),
)
@settings(max_examples=15)
def test_compiled_replay_is_that_of_the_batched_trees(tmp_path_factory, seed, budget, cutoff, limits):
    """The same policies, hidden from the compiled pass."""
    rng = np.random.default_rng(seed)
    target = AttentionTarget(seed % 5)
    prompts = [rng.integers(0, VOCABULARY, n).tolist() for n in (2, 1, 3)]
    expected = Engine(target).generate(prompts, 12, mode="autoregressive")
    kind = rng.choice(list(DRAFTERS))
    drafter = Wide(DRAFTERS[kind](expected.tokens, seed))
    trace = record(
        target, drafter, prompts, tmp_path_factory.mktemp("t") / "t", depth=5, topk=5, max_new_tokens=12
    ).in_memory()
    for bare in (fixed_budget(budget), confidence(budget, cutoff), cost_aware(min(budget, 40), COSTS)):
        policy = limited(bare, **limits) if limits else bare
        table = replay(trace, policy)
        assert_same_rounds(table, replay(trace, Hidden(policy)))
        event("drafts accepted" if len(table) and table.tau > 1 else "nothing accepted")


def test_ties_of_a_stop_are_those_of_its_definition(tmp_path):
    """A drafter that is certain: a score equal to the cut-off is kept, and a rate that stays equal stops."""
    with TraceWriter(tmp_path / "t", 10, 2, 1, max_new_tokens=8) as writer:
        writer.append([1, 2, 3, 4, 5], 1, np.zeros((3, 2, 1)), np.array([[[3], [4]], [[4], [5]], [[5], [6]]]))
    trace = open_trace(tmp_path / "t")
    even = CostModel(np.array([0, 1, 2]), np.array([0, 9]), np.array([[1.0, 2.0, 3.0]] * 2))
    rising = CostModel(np.array([0, 1, 2]), np.array([0, 9]), np.array([[1.0, 1.5, 3.0]] * 2))
    for policy, nodes in ((confidence(2, 1.0), 2), (cost_aware(2, even), 0), (cost_aware(2, rising), 1)):
        for replayed in (policy, Hidden(policy)):
            assert set(replay(trace, replayed).num_nodes.tolist()) == {nodes}, policy.label


class Hidden:
    def __init__(self, policy):
        self.policy, self.budget = policy, policy.budget

    def __call__(self, *draft):
        return self.policy(*draft)


@pytest.mark.parametrize(
    "kind, sampling", [("n-gram", {}), ("oracle with noise", {"temperature": 0.8, "top_p": 0.95, "seed": 3})]
)
def test_replay_of_the_golden_model_is_its_live_run(tmp_path, kind, sampling):
    arrays, _ = read_kdtr(golden_bundle())
    prompt = arrays["golden/prompt"]
    prompts = [prompt, prompt[: len(prompt) // 2], prompt[-3:]]
    model = load_model(golden_bundle(), dtype="float64")
    tokens = Engine(model).generate(prompts, 20, mode="autoregressive", **sampling).tokens
    noise = NoiseLaw([[0.6, 0.2, 0.1]])
    drafter = NgramDrafter() if kind == "n-gram" else OracleDrafter(tokens, model.vocab_size, noise=noise)
    trace = record(model, drafter, prompts, tmp_path / "t", depth=7, topk=16, max_new_tokens=20, **sampling)
    for policy in (fixed_budget(16), chain(7), cost_aware(40, COSTS, clamp=True)):
        live = live_rounds(model, drafter, prompts, policy, 20, depth=7, topk=16, **sampling)
        assert_same_rounds(replay(trace, policy), live)


@pytest.mark.parametrize("policy", [chain(7), fixed_budget(32)], ids=policy_name)
def test_replay_of_the_shipped_trace_is_a_live_run_of_the_shipped_pair(policy):
    """Round for round. Log-probs are rounded otherwise where a pass had another shape, and so are their sums."""
    target, drafter, _ = load_pair()
    prompts = load_prompts().tokens[:3]
    live = live_rounds(target, drafter, prompts, policy, 20, target.config.eos_token_ids, depth=7, topk=16)
    table = replay(shipped_trace(), policy, max_new_tokens=20)
    table = table.take(table.prompt < len(prompts))
    for f in fields(live):
        if f.name not in ("expected", "log_probs"):
            assert_same(getattr(table, f.name), getattr(live, f.name), f.name)
    assert len(live) > 10
    bound = TOLERANCE["draft", "float32"].bound
    assert np.array_equal(np.isnan(table.log_probs), np.isnan(live.log_probs))
    assert np.nanmax(np.abs(table.log_probs - live.log_probs)) < bound
    assert np.abs(table.expected - live.expected).max() < bound


def test_shipped_trace_is_what_it_is_said_to_be():
    trace, prompts = shipped_trace(), load_prompts().tokens
    manifest = trace.manifest
    assert (trace.name, manifest.target, manifest.drafter) == ("python-5m", "python-5m", "block drafter")
    assert (manifest.depth, manifest.topk, manifest.max_new_tokens, manifest.temperature) == (7, 16, 64, 0.0)
    assert manifest.vocabulary == vocabulary_digest(load_pair().vocabulary.token_bytes)
    assert manifest.complete
    counts = trace.summary()
    assert counts["prompts"] >= 60
    assert counts["positions"] >= 4000
    for chunk in trace:
        for p in range(chunk.num_prompts):
            assert_same(chunk.prompt_tokens(p)[: chunk.prompt_lens[p]], prompts[chunk.first_prompt + p])
    files = list((pair_folder() / "trace").iterdir())
    assert sum(path.stat().st_size for path in files) <= 4e6
    assert replay(trace, fixed_budget(64)).tau > replay(trace, chain(7)).tau > 3


@dataclass(frozen=True)
class OneNodeOf(BestFirst):
    """A class derived from a policy that the compiled pass knows, and does otherwise."""

    def __call__(self, *draft):
        tree = super().__call__(*draft)
        return first_nodes(tree, np.minimum(tree.node_counts, 2))


@dataclass(frozen=True)
class OneDeep(Limited):
    """Likewise of a limited one."""

    def __call__(self, *draft):
        return limited(self.policy, depth=1)(*draft)


@pytest.mark.parametrize("policy", [OneNodeOf("one", 9), OneDeep("one", fixed_budget(9), None, None)], ids=repr)
def test_replay_calls_a_policy_that_is_derived_from_one_of_ours(pair, policy):
    target, drafter, trace = pair
    live = live_rounds(
        target,
        drafter,
        PROMPTS,
        policy,
        trace.manifest.max_new_tokens,
        depth=trace.manifest.depth,
        topk=trace.manifest.topk,
    )
    assert_same_rounds(replay(trace, policy), live)
    assert live.num_nodes.max() < 9


def test_slices_do_not_change_a_table(pair, monkeypatch):
    _, _, trace = pair
    whole = [replay(trace, policy) for policy in (fixed_budget(9), chain(3))]
    monkeypatch.setattr(replay_module, "POSITIONS_A_SLICE", 1)
    parts = list(replay_all(trace, [fixed_budget(9), chain(3)]))
    assert len(parts) == len(PROMPTS)
    for j, table in enumerate(whole):
        assert_same_rounds(concatenate_rounds(tables[j] for tables in parts), table)
    assert_same_rounds(replay(trace.in_memory(), chain(3)), whole[1])


def test_used_last_rank_says_where_a_wider_record_might_change_the_tree(pair):
    _, _, trace = pair
    narrow, wide = limited(fixed_budget(6), topk=2), fixed_budget(6)
    tables = replay(trace, narrow), replay(trace, wide)
    drafts: dict[tuple[int, int], dict[Any, int]] = {}
    for policy, table in zip((narrow, wide), tables, strict=True):
        for row in range(len(table)):
            drafts.setdefault((table.prompt[row], table.position[row]), {})[policy] = row
    for rows in drafts.values():
        if len(rows) == 2 and not tables[0].used_last_rank[rows[narrow]]:
            assert tables[0].expected[rows[narrow]] == tables[1].expected[rows[wide]]


def test_rank_rates_count_what_follows_drafted_tokens(pair):
    _, _, trace = pair
    counts, reached = np.zeros((3, 4)), np.zeros(3)
    for chunk in trace.chunks():
        for p in range(chunk.num_prompts):
            new = chunk.new_tokens(p)
            for i in range(len(new) - 1):
                row = chunk.position_offsets[p] + i
                for d in range(min(3, len(new) - 1 - i)):
                    reached[d] += 1
                    end = np.flatnonzero(~(chunk.log_probs[row, d] > -np.inf))
                    ids = chunk.draft_token_ids[row, d, : end[0] if end.size else None].tolist()
                    if new[i + 1 + d] not in ids:
                        break
                    counts[d, ids.index(new[i + 1 + d])] += 1
    np.testing.assert_array_equal(rank_rates(trace), counts / np.maximum(reached, 1)[:, None])
    policy = fit_static_tree(trace, 5)
    assert policy_name(policy) == f"static_tree({policy.budget}, fitted)"
    assert replay(trace, policy).num_nodes.max(initial=0) <= policy.budget <= 5


class Greedy:
    budget = 2

    def __call__(self, log_probs, token_ids, root_token_ids, prefix_lens):
        return build_tree(log_probs, token_ids, root_token_ids, budget=3)


@pytest.mark.parametrize(
    "call, error, message",
    [
        (lambda t: replay(t, Greedy()), ValueError, r"policy Greedy: tree must have 1 … 3 node slots, .*, got 4"),
        (
            lambda t: replay(t, fixed_budget),
            TypeError,
            r"policies\[0\] must be callable .* have a budget, .* got function fixed_budget without one",
        ),
        (lambda t: replay(t, chain(2), max_new_tokens=17), ValueError, r"max_new_tokens must be in 1 … 16 .*, got 17"),
        (lambda t: replay(t, chain(2), max_new_tokens=0), ValueError, r"max_new_tokens must be in 1 … 16 .*, got 0"),
        (
            lambda t: replay(t, chain(2), stop_token_ids=[-1]),
            ValueError,
            r"stop_token_ids\[0\] must be in 0 … 10 \(the vocabulary\), got",
        ),
        (lambda t: replay(t, chain(2), stop_token_ids=[1, 999]), ValueError, r"stop_token_ids\[1\] must be in 0 … 10 "),
        (lambda t: replay(t, chain(2), stop_token_ids=5), TypeError, r"stop_token_ids must be a sequence, got int 5"),
        (lambda t: replay("x", chain(2)), TypeError, r"trace must be a Trace, as open_trace gives it, got str"),
        (lambda t: rank_rates(None), TypeError, r"trace must be a Trace, as open_trace gives it, got NoneType"),
        (
            lambda t: replay(t, cost_aware(4, CostModel(np.array([0, 4]), np.array([0, 3]), np.ones((2, 2))))),
            ValueError,
            r"context must be within what was measured, 0 … 3, got 4",
        ),
    ],
)
def test_what_cannot_be_replayed_is_named(pair, call, error, message):
    with pytest.raises(error, match=message):
        call(pair[2])


def test_rounds_print_as_a_line(pair):
    table = replay(pair[2], fixed_budget(5))
    assert repr(table) == str(table) == f"RoundTable({len(table)} rounds of 4 prompts, L = 3, τ = {table.tau:.2f})"
    assert repr(table.take([0])) == f"RoundTable(1 round of 1 prompt, L = 3, τ = {table.tokens[0]:.2f})"
    assert repr(table.take([])) == "RoundTable(0 rounds of 0 prompts, L = 3)"


def test_trace_of_no_drafts_has_no_rounds(tmp_path):
    trace = record(AttentionTarget(), NgramDrafter(), [[1]], tmp_path / "t", max_new_tokens=1, topk=4)
    for policy in (fixed_budget(4), chain(2)):
        table = replay(trace, policy)
        assert (len(table), table.max_depth) == (0, 7 if policy.budget == 4 else 0)
    assert isinstance(trace, Trace)
