"""Laws of ``accept_tree``: the walk from the root along the target's choices."""

from dataclasses import replace

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from ddtree import reference
from ddtree.property_tests import brute_force
from ddtree.property_tests.compare import assert_same_acceptance
from ddtree.property_tests.strategies import acceptance_inputs, built_trees, draft_trees, drafts
from ddtree.trees import Acceptance, chain_tree, tree_from_parents


def expected_acceptance(inputs):
    """The acceptance by brute force."""
    tree, choices, remaining, stops = inputs
    each = [
        brute_force.accepted(
            tree.parents[b].tolist(),
            tree.token_ids[b].tolist(),
            int(tree.node_counts[b]),
            choices[b].tolist(),
            None if remaining is None else int(remaining[b]),
            () if stops is None else stops.tolist(),
        )
        for b in range(tree.batch_size)
    ]
    B, width = tree.batch_size, tree.max_depth + 1
    paths = [path + [-1] * (width - len(path)) for path, _, _ in each]
    return Acceptance(
        np.array(paths, np.int32).reshape(B, width),
        np.array([len(path) for path, _, _ in each], np.int32),
        np.array([bonus for _, bonus, _ in each], np.int32),
        np.array([finished for _, _, finished in each], np.bool_),
    )


def call(accept_tree, inputs):
    tree, choices, remaining, stops = inputs
    return accept_tree(tree, choices, remaining=remaining, stop_token_ids=stops)


def oracle_choices(tree, choose):
    """After each node, ``choose`` of the tokens on its path: what a target that depends on the context says."""
    choices = np.full(tree.token_ids.shape, -1, np.int32)
    for b in range(tree.batch_size):
        for i in range(int(tree.node_counts[b])):
            path = brute_force.node_path(tree.parents[b].tolist(), i)
            choices[b, i] = choose(tuple(tree.token_ids[b, path].tolist()))
    return choices


@given(inputs=acceptance_inputs())
def test_the_longest_path_that_the_target_agrees_with_is_kept(accept_tree, inputs):
    assert_same_acceptance(call(accept_tree, inputs), expected_acceptance(inputs))


@given(draft=drafts(), budget=st.integers(0, 20), more=st.integers(0, 20), salt=st.integers(0, 99))
def test_a_larger_tree_never_accepts_less(accept_tree, draft, budget, more, salt):
    def choose(path):
        return hash((path, salt)) % 3

    trees = [reference.build_tree(*draft, budget=n) for n in (budget, budget + more)]
    smaller, larger = (accept_tree(tree, oracle_choices(tree, choose)).lengths for tree in trees)
    assert (larger >= smaller).all()


@given(inputs=acceptance_inputs(stops=False), data=st.data())
def test_a_first_part_of_a_tree_accepts_a_first_part_of_its_path(accept_tree, inputs, data):
    counts = [data.draw(st.integers(1, int(n)), label="nodes left") for n in inputs.tree.node_counts]
    part = replace(inputs.tree, node_counts=np.array(counts, np.int32))
    whole, cut = call(accept_tree, inputs), call(accept_tree, inputs._replace(tree=part))
    for b, n in enumerate(counts):
        path = whole.node_indices[b, : whole.lengths[b]]
        assert cut.node_indices[b, : cut.lengths[b]].tolist() == path[path < n].tolist()


@given(
    tokens=st.lists(st.integers(0, 2), min_size=1, max_size=8),
    choices=st.lists(st.integers(-1, 2), min_size=8, max_size=8),
    follow=st.integers(0, 8),
)
def test_a_chain_accepts_its_leading_matches(accept_tree, tokens, choices, follow):
    n = len(tokens)
    choices = [*(tokens[1:] + choices)[:follow], *choices][:n]
    matches = [a == b for a, b in zip(tokens[1:], choices, strict=False)]
    length = 1 + ([*matches, False].index(False))
    kept = accept_tree(chain_tree(np.array([tokens], np.int32)), np.array([choices], np.int32))
    assert kept.lengths.tolist() == [length]
    assert kept.node_indices[0].tolist() == [*range(length), *[-1] * (n - length)]
    assert kept.bonus_token_ids.tolist() == [choices[length - 1]]


@given(inputs=acceptance_inputs(built_trees(min_batch=1), stops=False))
def test_a_tree_accepts_as_much_as_the_chain_along_its_accepted_path(accept_tree, inputs):
    tree, choices = inputs.tree, inputs.target_token_ids
    kept = call(accept_tree, inputs)
    for b in range(tree.batch_size):
        path = kept.node_indices[b, : kept.lengths[b]]
        chain = accept_tree(chain_tree(tree.token_ids[b : b + 1, path]), choices[b : b + 1, path])
        assert (chain.lengths[0], chain.bonus_token_ids[0]) == (kept.lengths[b], kept.bonus_token_ids[b])


@given(inputs=acceptance_inputs(stops=False), limit=st.integers(1, 8))
def test_remaining_cuts_path_bonus_and_count_together(accept_tree, inputs, limit):
    free = call(accept_tree, inputs)
    remaining = np.full(inputs.tree.batch_size, limit, np.int32)
    cut = call(accept_tree, inputs._replace(remaining=remaining))
    for b, length in enumerate(free.lengths.tolist()):
        n = min(length, limit)
        path = free.node_indices[b, :n]
        assert cut.node_indices[b].tolist() == [*path, *[-1] * (len(free.node_indices[b]) - n)]
        assert cut.lengths[b] == n
        assert cut.bonus_token_ids[b] == inputs.target_token_ids[b, path[-1]]
        assert cut.finished[b] == (length >= limit)


@given(inputs=acceptance_inputs(stops=False), stop=st.integers(0, 3))
def test_the_first_stop_token_is_the_last_token_emitted(accept_tree, inputs, stop):
    free = call(accept_tree, inputs)
    cut = call(accept_tree, inputs._replace(stop_token_ids=np.array([stop], np.int32)))
    for b, length in enumerate(free.lengths.tolist()):
        emitted = inputs.target_token_ids[b, free.node_indices[b, :length]].tolist()
        met = stop in emitted
        n = emitted.index(stop) + 1 if met else length
        assert (cut.lengths[b], cut.bonus_token_ids[b], cut.finished[b]) == (n, emitted[n - 1], met)
        assert cut.node_indices[b].tolist() == [*free.node_indices[b, :n], *[-1] * (len(free.node_indices[b]) - n)]


@given(inputs=acceptance_inputs(draft_trees(min_batch=1)))
def test_an_inert_request_keeps_nothing_and_is_finished(accept_tree, inputs):
    kept = call(accept_tree, inputs._replace(remaining=np.zeros(inputs.tree.batch_size, np.int32)))
    assert (kept.node_indices == -1).all()
    assert kept.lengths.tolist() == [0] * inputs.tree.batch_size
    assert (kept.bonus_token_ids == -1).all()
    assert kept.finished.all()


@given(inputs=acceptance_inputs(), junk=st.integers(-1, 3))
def test_choices_in_unused_slots_are_not_read(accept_tree, inputs, junk):
    used = np.arange(inputs.tree.num_slots) < inputs.tree.node_counts[:, None]
    changed = np.where(used, inputs.target_token_ids, np.int32(junk))
    assert_same_acceptance(
        call(accept_tree, inputs._replace(target_token_ids=changed)), call(accept_tree, inputs), "with other junk"
    )


@pytest.mark.parametrize("B, N", [(0, 1), (0, 4), (2, 1)])
def test_roots_alone_give_a_bonus_each(accept_tree, B, N):
    tree = tree_from_parents(np.zeros((B, N), np.int32), np.full((B, N), -1, np.int32), np.ones(B, np.int32))
    kept = accept_tree(tree, np.full((B, N), 6, np.int32))
    assert_same_acceptance(
        kept,
        Acceptance(np.zeros((B, 1), np.int32), np.ones(B, np.int32), np.full(B, 6, np.int32), np.zeros(B, np.bool_)),
    )


@pytest.mark.parametrize("siblings", [31, 32, 33, 1100])
def test_the_last_of_many_siblings_is_found(accept_tree, siblings):
    tokens = np.arange(siblings + 2, dtype=np.int32)[None]
    parents = np.array([[-1, *[0] * siblings, siblings]], np.int32)  # and a child of the last sibling
    choices = np.full_like(tokens, -1)
    choices[0, [0, siblings]] = siblings, siblings + 1
    kept = accept_tree(tree_from_parents(tokens, parents), choices)
    assert kept.node_indices.tolist() == [[0, siblings, siblings + 1]]


@pytest.mark.parametrize("stops", [2, 3, 33, 70])
def test_each_of_many_stop_tokens_stops(accept_tree, stops):
    # request b is a chain of which the token of index 2 is the b-th stop token, and its last one is none
    tokens = np.tile(np.array([500, 501, 0, 503], np.int32), (stops + 1, 1))
    tokens[:, 2] = [*range(100, 100 + stops), 7]
    tree = chain_tree(tokens)
    choices = np.pad(tokens[:, 1:], ((0, 0), (0, 1)), constant_values=504)
    kept = accept_tree(tree, choices, stop_token_ids=np.arange(100, 100 + stops, dtype=np.int32))
    assert kept.lengths.tolist() == [2] * stops + [4]
    assert kept.bonus_token_ids.tolist() == [*range(100, 100 + stops), 504]
    assert kept.finished.tolist() == [True] * stops + [False]


@pytest.mark.beside_reference
@pytest.mark.parametrize("length", [33, pytest.param(1200, marks=pytest.mark.large)])
def test_a_long_path_is_that_of_the_reference(accept_tree, length):
    tree = chain_tree(np.arange(2 * length, dtype=np.int32).reshape(2, length))
    choices = tree.token_ids + 1
    choices[1, length // 2] = 0
    assert_same_acceptance(accept_tree(tree, choices), reference.accept_tree(tree, choices))
