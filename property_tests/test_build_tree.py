"""Laws of ``build_tree``: the first ``budget`` rank paths of a total order."""

import itertools
import math
from dataclasses import replace

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from ddtree import reference
from ddtree.property_tests import brute_force
from ddtree.property_tests.compare import assert_same_tree
from ddtree.property_tests.strategies import DRAFT_KINDS, budgets, drafts
from ddtree.trees import DraftTree


def expected_tree(draft, budget):
    """The tree by brute force."""
    B, L, K = draft[0].shape
    each = [brute_force.tree_fields(log_probs, ids, root, budget) for log_probs, ids, root in zip(*draft, strict=True)]
    N, W = 1 + budget, (1 + budget + 31) // 32

    def stack(name, dtype, *shape):
        return np.array([fields[name] for fields in each], dtype).reshape(B, *shape)

    return DraftTree(
        token_ids=stack("token_ids", np.int32, N),
        parents=stack("parents", np.int32, N),
        depths=stack("depths", np.int32, N),
        ranks=stack("ranks", np.int32, N),
        scores=stack("scores", np.float64, N),
        node_counts=stack("node_counts", np.int32),
        visibility_words=stack("visibility_words", np.uint32, N, W),
        max_depth=L,
        num_candidates=K,
    )


def nodes(tree, b=0):
    """Rank paths and scores of a request's nodes, without the root."""
    return list(zip(brute_force.paths_of(tree, b), tree.scores[b, 1 : tree.node_counts[b]].tolist(), strict=True))


def large_draft(kind, seed, *, L=8, K=48):
    """Two requests, too large for brute force: 1,024 nodes of them are a small part of all paths."""
    rng = np.random.default_rng(seed)
    falls = np.cumsum(rng.integers(0, 6, (2, L, K)), -1)
    tokens = rng.permuted(np.tile(np.arange(K, dtype=np.int32), (2, L, 1)), axis=-1)
    return -np.asarray(DRAFT_KINDS[kind](falls)).astype(np.float32), tokens, np.array([0, 7], np.int32)


@given(draft=drafts(), budget=budgets())
def test_tree_is_the_first_budget_paths_of_all_paths(build_tree, draft, budget):
    assert_same_tree(build_tree(*draft, budget=budget), expected_tree(draft, budget))


@pytest.mark.parametrize("unit", [1.0, 2.0**-126 / 64, 0.5])
def test_subnormal_log_probs_count(build_tree, unit):
    """Among likelier candidates of 0 and −0, and of ``unit``, some of which a conversion might take for 0 as well."""
    falls = np.random.default_rng(3).integers(0, 3, (2, 3, 6)).cumsum(-1)
    log_probs = -(np.where(falls < 4, falls * np.float64(2.0**-149), falls * unit)).astype(np.float32)
    token_ids = np.tile(np.arange(6, dtype=np.int32), (2, 3, 1))
    draft = log_probs, token_ids, np.array([0, 7], np.int32)
    for budget in (1, 9, 40, 300):
        assert_same_tree(build_tree(*draft, budget=budget), expected_tree(draft, budget))


@pytest.mark.large
@pytest.mark.parametrize("L", [1, 2, 3])
@pytest.mark.parametrize("K", [1, 2, 3])
@pytest.mark.parametrize("levels", [(0.0, -0.125, -np.inf), (-0.125, -0.25, -0.375), (-0.125, -0.25, np.nan)])
def test_every_small_draft_of_three_values_has_the_tree_of_brute_force(build_tree, L, K, levels):
    rows = list(itertools.combinations_with_replacement(levels, K))  # non-increasing, as the levels are
    log_probs = np.array(list(itertools.product(rows, repeat=L)), np.float32)  # (drafts, L, K)
    tokens = np.tile(np.arange(K, dtype=np.int32), (len(log_probs), L, 1))
    draft = log_probs, tokens, np.zeros(len(log_probs), np.int32)
    for budget in (3, 13):
        assert_same_tree(build_tree(*draft, budget=budget), expected_tree(draft, budget))


@pytest.mark.large
@pytest.mark.parametrize("kind", DRAFT_KINDS)
def test_large_tree_holds_a_path_iff_it_comes_before_every_path_left_out(build_tree, kind):
    draft = large_draft(kind, seed=1)
    tree = build_tree(*draft, budget=1024)
    for b in range(2):
        order = [(-score, path) for path, score in nodes(tree, b)]
        held = {path for _, path in order}
        assert len(held) == len(order) == 1024
        assert order == sorted(order)
        for path in held:  # closed under its parent and its left sibling
            assert len(path) == 1 or path[:-1] in held
            assert path[-1] == 0 or (*path[:-1], path[-1] - 1) in held
        values = draft[0][b].tolist()
        L, K = draft[0].shape[1:]
        border = {(*p[:-1], p[-1] + 1) for p in held if p[-1] + 1 < K} | {(*p, 0) for p in held if len(p) < L}
        # A closed set is the first part of the order iff what could join it next comes after its last.
        for path in border - held:
            score = 0.0
            for d, rank in enumerate(path):
                score += values[d][rank]
            assert (-score, path) > order[-1]


@pytest.mark.large
@pytest.mark.parametrize("kind", DRAFT_KINDS)
def test_large_tree_agrees_with_itself(build_tree, kind):
    draft = large_draft(kind, seed=2)
    tree = build_tree(*draft, budget=1024)
    for b, i in itertools.product(range(2), range(1, 1025)):
        parent, depth, rank = (int(a[b, i]) for a in (tree.parents, tree.depths, tree.ranks))
        assert 0 <= parent < i
        assert depth == tree.depths[b, parent] + 1
        assert tree.token_ids[b, i] == draft[1][b, depth - 1, rank]
        assert tree.scores[b, i] == tree.scores[b, parent] + np.float64(draft[0][b, depth - 1, rank])


@given(
    draft=drafts(min_batch=1, max_batch=1, max_depth=2, max_candidates=3, kinds=("eighths", "random")), data=st.data()
)
def test_no_other_prefix_closed_set_of_that_size_has_more_mass(build_tree, draft, data):
    paths = dict(brute_force.rank_paths(draft.log_probs[0]))
    budget = data.draw(st.integers(0, len(paths)), label="budget")
    mass = math.fsum(math.exp(score) for _, score in nodes(build_tree(*draft, budget=budget)))
    assert all(
        math.fsum(math.exp(paths[path]) for path in other) <= mass
        for other in brute_force.prefix_closed_sets(list(paths), budget)
    )


@given(draft=drafts(), budget=budgets(), data=st.data())
def test_tree_of_a_smaller_budget_is_a_prefix(build_tree, draft, budget, data):
    smaller = data.draw(st.integers(0, budget), label="smaller")
    large, small = build_tree(*draft, budget=budget), build_tree(*draft, budget=smaller)
    cut = np.minimum(large.node_counts, 1 + smaller)
    np.testing.assert_array_equal(small.node_counts, cut)
    for b in range(len(cut)):
        assert nodes(small, b) == nodes(large, b)[:smaller]
        np.testing.assert_array_equal(small.token_ids[b, : cut[b]], large.token_ids[b, : cut[b]])


@given(draft=drafts(), budget=budgets())
def test_node_count_is_the_budget_or_all_that_is_draftable(build_tree, draft, budget):
    tree = build_tree(*draft, budget=budget)
    for b, log_probs in enumerate(draft.log_probs):
        paths = sum(itertools.accumulate(brute_force.drafted_widths(log_probs), lambda n, w: n * w))
        assert tree.node_counts[b] == 1 + min(budget, paths)


@given(draft=drafts(), budget=budgets(), data=st.data())
def test_what_stands_after_a_depths_end_is_never_read(build_tree, draft, budget, data):
    log_probs, tokens = draft.log_probs.copy(), draft.token_ids.copy()
    ended = np.cumsum(~(log_probs > -np.inf), -1) > 0
    first = ended & (np.cumsum(ended, -1) == 1)
    junk = data.draw(st.sampled_from([-0.0, -1e30, np.nan, -np.inf]), label="junk")
    log_probs[ended & ~first] = junk
    log_probs[first] = data.draw(st.sampled_from([np.nan, -np.inf]), label="end")
    tokens[ended] = data.draw(st.sampled_from([0, -1, -(2**31), 2**31 - 1]), label="junk id")
    changed = build_tree(log_probs, tokens, draft.root_token_ids, budget=budget)
    assert_same_tree(changed, build_tree(*draft, budget=budget))


@given(draft=drafts(min_candidates=1), budget=budgets())
def test_used_last_rank_says_where_one_candidate_less_gives_another_tree(build_tree, draft, budget):
    narrow = build_tree(draft.log_probs[..., :-1], draft.token_ids[..., :-1], draft.root_token_ids, budget=budget)
    tree = build_tree(*draft, budget=budget)
    differs = [nodes(tree, b) != nodes(narrow, b) for b in range(tree.batch_size)]
    assert tree.used_last_rank.tolist() == differs
    assert tree.used_last_rank.dtype == np.bool_


@given(draft=drafts(), budget=budgets())
def test_a_request_has_the_tree_that_it_has_alone(build_tree, draft, budget):
    together = build_tree(*draft, budget=budget)
    for b in range(len(draft.log_probs)):
        alone = build_tree(*(array[b : b + 1] for array in draft), budget=budget)
        arrays = {name: value[b : b + 1] for name, value in vars(together).items() if isinstance(value, np.ndarray)}
        assert_same_tree(alone, replace(together, **arrays))


@given(draft=drafts(min_candidates=1, max_candidates=1, tails=False), budget=budgets())
def test_one_candidate_a_depth_gives_a_chain(build_tree, draft, budget):
    tree = build_tree(*draft, budget=budget)
    length = min(budget, draft.log_probs.shape[1])
    for b in range(tree.batch_size):
        assert tree.parents[b, : length + 1].tolist() == list(range(-1, length))
        assert tree.node_counts[b] == length + 1


@pytest.mark.parametrize(
    "B, L, K, budget, counts",
    [
        (0, 2, 2, 3, []),
        (2, 0, 2, 3, [1, 1]),
        (2, 2, 0, 3, [1, 1]),
        (2, 2, 2, 0, [1, 1]),
        (0, 0, 0, 0, []),
        (1, 2, 2, 6, [7]),
        (1, 2, 2, 100, [7]),
    ],
)
def test_nothing_to_draft_leaves_the_root(build_tree, B, L, K, budget, counts):
    draft = np.full((B, L, K), -1, np.float32), np.zeros((B, L, K), np.int32), np.full(B, 3, np.int32)
    draft[1][...] = np.arange(K)
    tree = build_tree(*draft, budget=budget)
    assert tree.node_counts.tolist() == counts
    assert_same_tree(tree, expected_tree(draft, budget))


@pytest.mark.beside_reference
@pytest.mark.parametrize("budget", [pytest.param(1024, marks=pytest.mark.large), 31, 32, 70])
@pytest.mark.parametrize("kind", DRAFT_KINDS)
def test_large_tree_has_the_bits_of_the_reference(build_tree, kind, budget):
    draft = large_draft(kind, seed=3)
    draft[0][0, 3, 5:] = np.nan
    draft[0][1, 6, 0] = -np.inf
    assert_same_tree(build_tree(*draft, budget=budget), reference.build_tree(*draft, budget=budget))
