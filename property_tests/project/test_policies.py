"""Each policy beside a plain one, and what is said of wrong ones."""

import math
import time
from dataclasses import replace
from typing import Any, ClassVar

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import event, given

from ddtree import build_tree, reference
from ddtree.analysis.record import record
from ddtree.analysis.replay import replay
from ddtree.costs import CostModel, fit_cost_model, measure_passes
from ddtree.engine import Engine, ScriptedTarget
from ddtree.policies import (
    all_children,
    chain,
    check_policy_tree,
    confidence,
    cost_aware,
    fixed_budget,
    likeliest_rank_paths,
    limited,
    policy_name,
    spine_first,
    static_tree,
)
from ddtree.property_tests.compare import assert_same_tree
from ddtree.property_tests.strategies import drafts
from ddtree.property_tests.targets import AttentionTarget
from ddtree.reference.build_tree import drafted_widths
from ddtree.reference.portable_math import portable_exp

COSTS = CostModel(
    np.array([0, 2, 8, 40]),
    np.array([0, 10, 100]),
    np.array([[1.0, 1.0, 1.5, 8.0], [1.0, 1.25, 2.0, 9.0], [3.0, 3.0, 3.0, 3.25]]),
    0.25,
)
PATHS = [(0,), (1,), (0, 0), (0, 1), (1, 0), (0, 0, 2), (3,), (0, 0, 2, 0)]


def candidates(draft):
    """Drafted log-probs of each request as lists of lists."""
    widths = drafted_widths(draft[0])
    return [
        [[np.float64(x) for x in row[:width]] for row, width in zip(rows, those, strict=True)]
        for rows, those in zip(draft[0], widths, strict=True)
    ]


def score_of(rows, path):
    total = np.float64(0.0)
    for row, rank in zip(rows, path, strict=False):
        total += row[rank]
    return total


def best_first_paths(rows, budget):
    """The ``budget`` first paths of the contract's order."""
    done: list[tuple[int, ...]] = []
    frontier: set[tuple[int, ...]] = {(0,)} if rows and rows[0] else set()
    while frontier and len(done) < budget:
        path = min(frontier, key=lambda p: (-score_of(rows, p), p))
        frontier.remove(path)
        done.append(path)
        if path[-1] + 1 < len(rows[len(path) - 1]):
            frontier.add((*path[:-1], path[-1] + 1))
        if len(path) < len(rows) and rows[len(path)]:
            frontier.add((*path, 0))
    return done


def plain_confidence(rows, prefix_len, budget):
    return [p for p in best_first_paths(rows, budget) if score_of(rows, p) >= math.log(0.2)]


def plain_cost_aware(rows, prefix_len, budget):
    paths = best_first_paths(rows, budget)
    mass = [np.float64(0.0)]
    for path in paths:
        mass.append(mass[-1] + portable_exp(np.maximum(score_of(rows, path), -1e3)))
    n = 0
    while n < len(paths):
        now, then = ((1 + mass[m]) / COSTS.seconds(m, prefix_len) for m in (n, n + 1))
        if then <= now:
            break
        n += 1
    return paths[:n]


def plain_static(rows, prefix_len, budget):
    return [
        p
        for p in sorted(PATHS, key=lambda p: (len(p), p))
        if len(p) <= len(rows) and all(r < len(rows[d]) for d, r in enumerate(p))
    ]


def plain_chain(rows, prefix_len, budget):
    depth = next((d for d, row in enumerate(rows) if not row), len(rows))
    return [(0,) * d for d in range(1, min(depth, budget) + 1)]


def plain_all_children(rows, prefix_len, budget, width=3):
    made: list[tuple[int, ...]] = []
    layer: list[tuple[int, ...]] = [()]
    for row in rows:
        children = [(*path, rank) for path in layer for rank in range(min(width, len(row)))]
        made += children
        layer = sorted(children, key=lambda p: -score_of(rows, p))[:width]  # stable: the earlier of equals
    return sorted(made, key=lambda p: -score_of(rows, p))[:budget]


def plain_spine_first(rows, prefix_len, budget):
    spine = plain_chain(rows, prefix_len, budget)
    others = [p for p in best_first_paths(rows, budget) if p not in spine]
    return spine + others[: budget - len(spine)]


POLICIES: dict[str, Any] = {
    "confidence": (lambda budget: confidence(budget, 0.2), plain_confidence),
    "cost_aware": (lambda budget: cost_aware(budget, COSTS), plain_cost_aware),
    "static_tree": (lambda budget: static_tree(PATHS), plain_static),
    "chain": (chain, plain_chain),
    "all_children": (lambda budget: all_children(budget, 3), plain_all_children),
    "spine_first": (spine_first, plain_spine_first),
}


def tree_paths(tree, b):
    return [tree.rank_path(b, i) for i in range(1, int(tree.node_counts[b]))]


@pytest.mark.parametrize("name", POLICIES)
@given(draft=drafts(min_batch=1), budget=st.integers(0, 12), prefix_len=st.integers(0, 100))
def test_policy_keeps_the_paths_of_the_plain_one(name, draft, budget, prefix_len):
    make, plain = POLICIES[name]
    policy = make(budget)
    prefix_lens = np.full(len(draft[0]), prefix_len, np.int32)
    tree = policy(*draft, prefix_lens)
    check_policy_tree(policy, tree, *draft, budget=policy.budget)
    for b, rows in enumerate(candidates(draft)):
        assert tree_paths(tree, b) == plain(rows, prefix_len, budget)
    event("full" if (tree.node_counts == 1 + policy.budget).all() else "not full")


@given(draft=drafts(min_batch=1), budget=st.integers(0, 12), depth=st.integers(0, 4), topk=st.integers(1, 4))
def test_limits_are_those_of_a_smaller_draft(draft, budget, depth, topk):
    log_probs, token_ids, roots = draft
    policy = limited(fixed_budget(budget), depth=depth, topk=topk)
    tree = policy(*draft, np.zeros_like(roots))
    check_policy_tree(policy, tree, *draft, budget=policy.budget)
    log_probs, token_ids = (np.ascontiguousarray(a[:, :depth, :topk]) for a in (log_probs, token_ids))
    assert_same_tree(tree, build_tree(log_probs, token_ids, roots, budget=budget))
    unlimited = limited(fixed_budget(budget))(*draft, np.zeros_like(roots))
    assert_same_tree(unlimited, build_tree(*draft, budget=budget))


@given(rates=st.lists(st.lists(st.integers(0, 4), min_size=3, max_size=3), min_size=1, max_size=3), n=st.integers(0, 9))
def test_fitted_paths_have_the_highest_products_and_their_beginnings(rates, n):
    rates = np.array(rates) / 16
    paths = likeliest_rank_paths(rates, n)
    policy = static_tree(paths)  # which refuses a path without its beginning
    every: list[tuple[int, ...]] = [()]
    for row in rates:
        every += [(*p, r) for p in every if len(p) == len(every[-1]) for r in range(len(row))]
    products = sorted((np.prod([rates[d, r] for d, r in enumerate(p)]) for p in every[1:]), reverse=True)
    assert policy.budget == min(n, sum(p > 0 for p in products))
    chosen = sorted((np.prod([rates[d, r] for d, r in enumerate(p)]) for p in paths), reverse=True)
    np.testing.assert_allclose(chosen, products[: len(chosen)])


def test_names_say_what_a_policy_is():
    given_: list[Any] = [
        fixed_budget(4), confidence(8, 0.25), cost_aware(8, COSTS), chain(3), static_tree(PATHS), all_children(9, 2),
        spine_first(5), limited(fixed_budget(4), depth=2), limited(chain(3), depth=2, topk=1),
    ]  # fmt: skip
    assert [policy_name(p) for p in given_] == [
        "fixed_budget(4)", "confidence(8, 0.25)", "cost_aware(8)", "chain(3)", "static_tree(8)", "all_children(9, 2)",
        "spine_first(5)", "limited(fixed_budget(4), depth=2)", "limited(chain(3), depth=2, topk=1)",
    ]  # fmt: skip
    assert [p.budget for p in given_] == [4, 8, 8, 3, 8, 9, 5, 4, 3]


@pytest.mark.parametrize(
    "make, error, message",
    [
        (lambda: fixed_budget(-1), ValueError, r"budget must be in 0 … \d+, got -1"),
        (lambda: confidence(4, 0.0), ValueError, r"cutoff must be over 0 and at most 1, got 0.0"),
        (lambda: confidence(4, 1.5), ValueError, r"cutoff must be over 0 and at most 1, got 1.5"),
        (lambda: cost_aware(4, 1.0), TypeError, r"cost_model must be a ddtree.costs.CostModel, got float"),
        (lambda: cost_aware(41, COSTS), ValueError, r"budget must be at most 40, the most nodes .*, got 41"),
        (lambda: chain(-1), ValueError, r"depth must be in 0 … \d+, got -1"),
        (lambda: static_tree([()]), ValueError, r"paths\[0\] must have one rank or more, got none"),
        (lambda: static_tree([(0,), (1, 0)]), ValueError, r"paths\[1\] = \(1, 0\) must have its beginning \(1,\)"),
        (lambda: static_tree([(0,), (0,)]), ValueError, r"paths\[1\] = \(0,\) must stand among the paths once"),
        (lambda: static_tree([(-1,)]), ValueError, r"paths\[0\] must be in 0 … \d+, got -1"),
        (lambda: likeliest_rank_paths([0.5], 3), ValueError, r"rates must have shape \(L, K\), got \(1,\)"),
        (lambda: likeliest_rank_paths([[0.5, math.nan]], 3), ValueError, r"rates\[0, 1\] must be in 0 … 1, got nan"),
        (lambda: likeliest_rank_paths([[0.5], [1.5]], 3), ValueError, r"rates\[1, 0\] must be in 0 … 1, got 1.5"),
        (lambda: likeliest_rank_paths([[0.5], [0.1, 0.2]], 3), ValueError, r"rates must have rows of one length, got"),
        (lambda: likeliest_rank_paths([["a"]], 3), TypeError, r"rates must hold numbers, got <U1"),
        (lambda: limited(None), TypeError, r"policy must be callable .* and have a budget, got NoneType"),
        (lambda: limited(print), TypeError, r"policy must be callable .*, got builtin_function_or_method print"),
        (lambda: all_children(4, 0), ValueError, r"width must be in 1 … \d+, got 0"),
        (lambda: limited(chain(2), depth=-1), ValueError, r"depth must be in 0 … \d+, got -1"),
        (lambda: limited(chain(2), topk=0), ValueError, r"topk must be in 1 … \d+, got 0"),
    ],
)
def test_wrong_argument_is_named(make, error, message):
    with pytest.raises(error, match=message):
        make()


class Spoiled:
    """A policy that changes one thing about a good tree."""

    budget = 3

    def __init__(self, spoil):
        self.spoil = spoil

    def __call__(self, log_probs, token_ids, root_token_ids, prefix_lens):
        return self.spoil(build_tree(log_probs, token_ids, root_token_ids, budget=3))


def with_cell(field, place, value):
    def spoil(tree):
        array = getattr(tree, field).copy()
        array[place] = value
        return replace(tree, **{field: array})

    return spoil


SPOILS: dict[str, Any] = {
    "another type": (lambda tree: tree.parents, r"must return a ddtree.DraftTree, got ndarray"),
    "a list for an array": (lambda tree: replace(tree, ranks=[[0]]), r"tree.ranks"),
    "another dtype": (lambda tree: replace(tree, ranks=tree.ranks * 1.0), r"tree.ranks must be of type int32"),
    "more than the budget": (
        lambda tree: reference.build_tree(*LIVE_DRAFT, budget=4),
        r"tree must have 1 … 4 node slots, the root's and its budget's, got 5",
    ),
    "another batch": (
        lambda tree: reference.build_tree(*(np.repeat(a, 2, 0) for a in LIVE_DRAFT), budget=3),
        r"tree must hold 1 requests, as the draft does, got 2",
    ),
    "deeper than the draft": (lambda tree: replace(tree, max_depth=9), r"tree must have max_depth <= 3 .*, got 9 and"),
    "a count of none": (with_cell("node_counts", 0, 0), r"tree.node_counts\[0\] must be in 1 … 4, got 0"),
    "a later parent": (with_cell("parents", (0, 1), 2), r"tree.parents\[0, 1\] must be in 0 … 0"),
    "a wrong depth": (with_cell("depths", (0, 1), 2), r"tree.depths\[0, 1\] must be 1"),
    "a wrong bit": (with_cell("visibility_words", (0, 3, 0), 15), r"tree.visibility_words\[0, 3\] must be what"),
    "another root": (with_cell("token_ids", (0, 0), 1), r"tree.token_ids\[0, 0\] must be the root's token 3, got 1"),
    "another token": (with_cell("token_ids", (0, 2), 7), r"tree.token_ids\[0, 2\] must be \d+, what the draft says"),
    "a rank that is not drafted": (with_cell("ranks", (0, 1), 4), r"tree.ranks\[0, 1\] must be in 0 … 3, .* got 4"),
    "garbage in padding": (
        lambda tree: replace(
            tree,
            node_counts=np.array([3], np.int32),
            visibility_words=reference.visibility_words(tree.parents, np.array([3])),
        ),
        r"tree must have -1 in unused slots",
    ),
}  # fmt: skip
LIVE_DRAFT: tuple[Any, ...] = (
    np.log(np.array([[[0.5, 0.2, 0.1, 0.05]] * 3], np.float32)),
    np.array([[[3, 4, 5, 6]] * 3], np.int32),
    np.array([2], np.int32),
)


@pytest.mark.parametrize("name", SPOILS)
def test_engine_names_the_policy_and_the_field_of_a_wrong_tree(name):
    spoil, message = SPOILS[name]
    text = np.arange(20) % 10
    engine = Engine(
        ScriptedTarget([text], 10), lambda context, depth, topk: LIVE_DRAFT[:2], depth=3, topk=4, policy=Spoiled(spoil)
    )
    with pytest.raises((ValueError, TypeError), match=rf"policy Spoiled.*{message}"):
        engine.generate([text[:3]], 8)


class Tempered:
    """The likeliest paths of other temperatures, one a depth in turn, with the scores of that."""

    budget = 5

    def __init__(self, factor):
        self.factors = np.array([[1], [factor]] * 8, np.float32)

    def __call__(self, log_probs, token_ids, root_token_ids, prefix_lens):
        return build_tree(log_probs * self.factors[: log_probs.shape[1]], token_ids, root_token_ids, budget=self.budget)


@given(draft=drafts(min_batch=1), factor=st.sampled_from([0.25, 0.8, 1.0, 3.0]))
def test_scores_are_those_of_the_draft_whatever_a_policy_says(draft, factor):
    policy = Tempered(factor)
    made = policy(*draft, np.zeros(len(draft[0]), np.int32))
    tree = check_policy_tree(policy, made, *draft, budget=policy.budget)
    assert_same_tree(replace(tree, scores=made.scores), made)
    for b, rows in enumerate(candidates(draft)):
        n = int(tree.node_counts[b])
        assert tree.scores[b, :n].tolist() == [score_of(rows, tree.rank_path(b, i)) for i in range(n)]
        assert (tree.scores[b, n:] == -np.inf).all()
    if factor == 1.0:
        assert tree is made


def test_a_strided_part_of_a_draft_is_refused_with_what_to_do():
    def narrow(log_probs, token_ids, root_token_ids, prefix_lens):
        return build_tree(log_probs[:, :, :2], token_ids[:, :, :2], root_token_ids, budget=3)

    with pytest.raises(
        ValueError,
        match=r"log_probs must be C-contiguous, .*; pass a contiguous copy, as np.ascontiguousarray makes one, or "
        r"limit a policy by ddtree.policies.limited\(policy, topk=…\)",
    ):
        narrow(*LIVE_DRAFT, np.zeros(1, np.int32))


class ChangedIds:
    """Draws its tree from a draft that it has changed."""

    budget = 3

    def __call__(self, log_probs, token_ids, roots, prefix_lens):
        token_ids += 2
        return fixed_budget(3)(log_probs, token_ids, roots, prefix_lens)


class Growing:
    """Wants more each time."""

    budget = 3

    def __call__(self, *draft):
        self.budget += 8
        return fixed_budget(self.budget)(*draft)


@pytest.mark.parametrize(
    "make, message",
    [
        (ChangedIds, r"policy ChangedIds: tree.token_ids\[0, 1\] must be 3, what the draft says"),
        (Growing, r"policy Growing: tree must have 1 … 4 node slots, the root's and its budget's, got 12"),
    ],
)
def test_engine_and_replay_hold_a_policy_to_the_draft_and_the_budget_that_they_began_with(make, message, tmp_path):
    text = np.arange(20) % 10
    target, drafter = ScriptedTarget([text], 10), lambda context, depth, topk: LIVE_DRAFT[:2]
    trace = record(target, drafter, [text[:3]], tmp_path / "trace", depth=3, topk=4, max_new_tokens=8)
    for run in (
        lambda: Engine(target, drafter, depth=3, topk=4, policy=make()).generate([text[:3]], 8),
        lambda: replay(trace, make()),
    ):
        with pytest.raises(ValueError, match=message):
            run()


def test_one_candidate_twice_is_refused():
    tree = build_tree(*LIVE_DRAFT, budget=2)
    twice = replace(
        tree,
        **{
            name: np.concatenate([getattr(tree, name)[:, :2], getattr(tree, name)[:, 1:2]], 1)
            for name in ("token_ids", "parents", "depths", "ranks", "scores")
        },
        node_counts=np.array([3], np.int32),
    )
    twice = replace(twice, visibility_words=reference.visibility_words(twice.parents, twice.node_counts))
    with pytest.raises(ValueError, match=r"tree must hold each candidate of a node once, request 0 has one twice"):
        check_policy_tree(fixed_budget(2), twice, *LIVE_DRAFT, budget=2)


@pytest.mark.parametrize(
    "options, error, message",
    [
        (
            {"policy": plain_confidence},
            TypeError,
            r"policy must be callable .* and have a budget, .*, got function plain_confidence without one: set it, as "
            r"in plain_confidence.budget = 64, or in its class; what makes policies must be called first",
        ),
        ({"policy": fixed_budget}, TypeError, r"policy must be callable .*, got function fixed_budget without one"),
        ({"policy": 3}, TypeError, r"policy must be callable .* and have a budget, got int"),
        ({"policy": chain(2), "budget": 4}, ValueError, r"budget must be left out with a policy, .*, got 4"),
    ],
)
def test_engine_refuses_what_is_no_policy(options, error, message):
    with pytest.raises(error, match=message):
        Engine(ScriptedTarget([[0]], 1), lambda *a: a, **options)


def test_cost_model_is_what_was_measured_and_nothing_beyond():
    assert COSTS.seconds([0, 2, 5, 8], 0).tolist() == [1.25, 1.25, 1.5, 1.75]
    assert COSTS.seconds(2, [0, 5, 10]).tolist() == [1.25, 1.375, 1.5]
    with pytest.raises(ValueError, match=r"nodes must be within what was measured, 0 … 40, got 41: measure there"):
        COSTS.seconds(41, 0)
    with pytest.raises(ValueError, match=r"context must be within what was measured, 0 … 100, got 101"):
        COSTS.seconds(0, 101)
    for clamp in (False, True):
        with pytest.raises(ValueError, match=r"nodes must be within what was measured, 0 … 40, got nan"):
            COSTS.seconds([math.nan, 1], 0, clamp=clamp)
    with pytest.raises(ValueError, match=r"nodes and context must have shapes that broadcast, got \(3,\) and \(2,\)"):
        COSTS.seconds([1, 2, 3], [1, 2])
    assert COSTS.seconds(41, 101, clamp=True) == COSTS.seconds(40, 100)
    for clamp in (False, True):
        with pytest.raises(ValueError, match=r"nodes and context must have shapes .* got \(3,\) and \(2,\)"):
            COSTS.seconds([1, 2, 3], [1, 2], clamp=clamp)
    policy = cost_aware(8, COSTS)
    draft = LIVE_DRAFT
    with pytest.raises(ValueError, match=r"context must be within what was measured, 0 … 100, got 101"):
        policy(*draft, np.array([101], np.int32))
    clamped = cost_aware(8, COSTS, clamp=True)(*draft, np.array([101], np.int32))
    assert_same_tree(clamped, policy(*draft, np.array([100], np.int32)))


@given(
    seconds=st.lists(st.lists(st.integers(1, 40), min_size=6, max_size=6), min_size=1, max_size=3),
    repeats=st.integers(1, 2),
)
def test_fit_is_convex_rising_and_no_worse_than_its_neighbours(seconds, repeats):
    nodes, rows = np.array([0, 1, 2, 5, 9, 30]), np.array(seconds, np.float64)
    n, c = (a.ravel() for a in np.meshgrid(nodes, 100 * np.arange(len(rows))))
    model = fit_cost_model(np.tile(n, repeats), np.tile(c, repeats), np.tile(rows.ravel(), repeats))
    fitted = model.verify_seconds  # CostModel has seen that it is convex and rises
    best = ((fitted - rows) ** 2).sum(1)
    rng = np.random.default_rng(0)
    for _ in range(20):  # any other convex, rising function near it is no closer
        ramps = rng.exponential(size=len(nodes) - 1) * rng.integers(0, 2, len(nodes) - 1)
        other = rng.uniform(0, 3) + np.maximum(nodes[:, None] - nodes[:-1], 0) @ ramps
        mixed = fitted + rng.choice([0.01, 0.3, 1.0]) * (other - fitted)
        assert (((mixed - rows) ** 2).sum(1) >= best - 1e-9).all()


def test_fit_of_what_is_convex_is_that():
    nodes, curve = np.array([0, 8, 16, 64]), np.array([2.0, 2.0, 2.5, 9.0])
    model = fit_cost_model(nodes, np.zeros_like(nodes), curve, draft_seconds=0.5)
    np.testing.assert_allclose(model.verify_seconds[0], curve)
    assert model.seconds(12, 0) == pytest.approx(2.75)


def test_passes_are_measured_at_every_size_and_context():
    class Slow(AttentionTarget):
        seen: ClassVar[list[tuple[int, int]]] = []

        def forward(self, tree, cache, **options):
            self.seen.append((int(tree.node_counts[0]) - 1, int(cache.prefix_lens[0])))
            time.sleep(0.001 * (1 + self.seen[-1][0]))
            return super().forward(tree, cache, **options)

    nodes, contexts, seconds = measure_passes(Slow(), [0, 3, 8], [0, 40], repeats=2)
    assert sorted(zip(nodes, contexts, strict=True)) == sorted([(n, c) for n in (0, 3, 8) for c in (0, 40)] * 2)
    assert len(Slow.seen) == 18  # one more of each
    assert (seconds >= 0.001 * (1 + nodes)).all()
    model = fit_cost_model(nodes, contexts, seconds)
    assert model.seconds(8, 20) > model.seconds(0, 20) > 0.001


def test_cost_model_file_is_what_was_saved_and_damage_is_named(tmp_path):
    path = tmp_path / "costs.json"
    COSTS.save(path)
    again = CostModel.load(path)
    for name in ("nodes", "contexts", "verify_seconds", "draft_seconds"):
        np.testing.assert_array_equal(getattr(again, name), getattr(COSTS, name))
    text = path.read_text()
    for damaged, message in [
        (text[:-9], r"costs.json: must be JSON, got"),
        ("[]", r"costs.json: format must be 'ddtree cost model 1'"),
        (text.replace("draft_seconds", "drafts"), r"costs.json: draft_seconds is missing"),
        (text.replace("0.25", '"x"'), r"costs.json: draft_seconds must be a number, got str 'x'"),
        (text.replace("8.0", "-8.0"), r"costs.json: verify_seconds\[\d, \d\] must be finite and over 0, got -8.0"),
        (text.replace("8.0", "NaN"), r"costs.json: verify_seconds\[\d, \d\] must be finite and over 0, got nan"),
        (text.replace("8.0", "true"), r"costs.json: verify_seconds must hold numbers, got a truth value among them"),
        (text.replace("8.0", '"8.0"'), r"costs.json: verify_seconds must hold numbers, got <U"),
        (text.replace("8.0", "[8.0]"), r"costs.json: verify_seconds must have rows of one length, got lists"),
        (text.replace('"nodes": [\n  0', '"nodes": [\n  false'), r"costs.json: nodes must hold numbers, got a truth"),
        ("[" * 10**5, r"costs.json: must be JSON, got maximum recursion"),
    ]:
        path.write_text(damaged)
        with pytest.raises(ValueError, match=message):
            CostModel.load(path)


@pytest.mark.parametrize(
    "make, error, message",
    [
        (lambda: CostModel([1], [0], [[1.0]]), ValueError, r"nodes must begin at 0, a pass over the root alone, got 1"),
        (lambda: CostModel([0, 0], [0], [[1.0, 1]]), ValueError, r"nodes must have shape .* and rise, got \[0, 0\]"),
        (lambda: CostModel([0.5], [0], [[1.0]]), TypeError, r"nodes must hold integers, got float64"),
        (lambda: CostModel([0], [0], [1.0]), ValueError, r"verify_seconds must have shape \(1, 1\), got \(1,\)"),
        (lambda: CostModel([0, 1], [0], [[2.0, 1]]), ValueError, r"must be non-decreasing and convex in the nodes"),
        (lambda: CostModel([0, 1, 2], [0], [[1.0, 3, 4]]), ValueError, r"must be non-decreasing and convex"),
        (lambda: CostModel([0], [0], [[1.0]], -1), ValueError, r"draft_seconds must be .* at least 0, got -1"),
        (lambda: fit_cost_model([0], [0], [1.0, 2]), ValueError, r"must have one shape \(m,\) with m >= 1"),
        (
            lambda: fit_cost_model([0], [0], [0.0]),
            ValueError,
            r"verify_seconds\[0\] must be finite and over 0, got 0.0",
        ),
        (lambda: fit_cost_model([0, 1, 0], [0, 0, 5], [1.0] * 3), ValueError, r"got none of 1 at context 5"),
    ],
)
def test_wrong_measurement_is_named(make, error, message):
    with pytest.raises(error, match=message):
        make()
