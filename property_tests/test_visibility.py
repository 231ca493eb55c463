"""Laws of ``visibility_words`` and of the bool form: a node sees itself and its ancestors."""

from dataclasses import replace

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

import ddtree
from ddtree.property_tests import brute_force
from ddtree.property_tests.compare import assert_same
from ddtree.property_tests.strategies import built_trees, corrupted_masks, draft_trees, visibility_masks
from ddtree.trees import chain_tree, tree_from_parents

SHAPES = {
    "chain": lambda rng, n: np.arange(n) - 1,
    "star": lambda rng, n: np.where(np.arange(n) == 0, -1, 0),
    "random": lambda rng, n: np.array([rng.integers(0, i) if i else -1 for i in range(n)]),
    "deep": lambda rng, n: np.array([rng.integers(max(0, i - 3), i) if i else -1 for i in range(n)]),
}
EDGES = (1, 31, 32, 33, 63, 64, 65, 1025)
"""Node slots about the ends of words, and past the 1,024 threads of a block."""


def ragged_parents(shape, N):
    """Three requests of N slots: all in use, one unused, and a root alone (as far as there are slots)."""
    rng = np.random.default_rng(N)
    counts = np.array([N, max(N - 1, 1), 1], np.int32)
    parents = np.stack([SHAPES[shape](rng, N) for _ in counts]).astype(np.int32)
    parents[np.arange(N) >= counts[:, None]] = -1
    return parents, counts


def expected_words(parents, counts):
    N = parents.shape[1]
    each = [
        brute_force.packed(brute_force.ancestor_sets(p, n), N)
        for p, n in zip(parents.tolist(), counts.tolist(), strict=True)
    ]
    return np.array(each, np.uint32).reshape(*parents.shape, (N + 31) // 32)


@given(tree=draft_trees() | built_trees())
def test_node_sees_itself_and_its_ancestors(visibility_words, tree):
    words = visibility_words(tree.parents, tree.node_counts)
    assert_same(words, expected_words(tree.parents, tree.node_counts))


@pytest.mark.parametrize("N", [*EDGES[:-1], pytest.param(EDGES[-1], marks=pytest.mark.large)])
@pytest.mark.parametrize("shape", SHAPES)
def test_words_are_right_about_the_end_of_each_word(visibility_words, shape, N):
    parents, counts = ragged_parents(shape, N)
    assert_same(visibility_words(parents, counts), expected_words(parents, counts))


@pytest.mark.parametrize("B, N", [(0, 1), (0, 33), (1, 1)])
def test_no_request_has_no_words_and_a_root_sees_itself(visibility_words, B, N):
    words = visibility_words(np.full((B, N), -1, np.int32), np.ones(B, np.int32))
    assert_same(words, np.ones((B, N, (N + 31) // 32), np.uint32))


@given(tree=draft_trees(), junk=st.sampled_from([-1, 0, 2**31 - 1]))
def test_parents_in_unused_slots_are_not_read(visibility_words, tree, junk):
    slots = np.arange(tree.num_slots)
    parents = np.where(slots < tree.node_counts[:, None], tree.parents, np.int32(junk))
    parents[:, 0] = -1
    assert_same(visibility_words(parents, tree.node_counts), tree.visibility_words)


@given(tree=draft_trees() | built_trees())
def test_bool_form_is_the_ancestor_sets(tree):
    sets = [brute_force.ancestor_sets(p.tolist(), n) for p, n in zip(tree.parents, tree.node_counts, strict=True)]
    expected = [[[j in row for j in range(tree.num_slots)] for row in one] for one in sets]
    assert_same(tree.visibility, np.array(expected, np.bool_).reshape(tree.batch_size, tree.num_slots, tree.num_slots))


@pytest.mark.parametrize("N", EDGES[:-1])
@pytest.mark.parametrize("shape", SHAPES)
def test_bool_form_is_right_about_the_end_of_each_word(shape, N):
    parents, counts = ragged_parents(shape, N)
    tree = tree_from_parents(np.zeros_like(parents), parents, counts)
    numbers = [[sum(1 << j for j in np.flatnonzero(row).tolist()) for row in one] for one in tree.visibility]
    expected = [
        [sum(1 << j for j in seen) for seen in brute_force.ancestor_sets(p.tolist(), int(n))]
        for p, n in zip(parents, counts, strict=True)
    ]
    assert numbers == expected


def words_of(mask):
    """A bool mask (n, n) as words, by NumPy's own packing."""
    n = len(mask)
    padded = np.pad(mask, ((0, 0), (0, -n % 32)))
    return np.packbits(padded, axis=-1, bitorder="little").view("<u4").astype(np.uint32)


def parents_of(mask):
    """Of each node, the nearest ancestor: the largest index that it sees beside its own."""
    others = np.argmax((mask & ~np.eye(len(mask), dtype=np.bool_))[:, ::-1], axis=-1)
    return np.where(np.arange(len(mask)) == 0, -1, len(mask) - 1 - others).astype(np.int32)


@given(mask=visibility_masks())
def test_mask_and_words_say_the_same(visibility_words, mask):
    words = visibility_words(parents_of(mask)[None], np.array([len(mask)], np.int32))
    assert_same(words[0], words_of(mask))


@given(case=corrupted_masks())
def test_one_wrong_bit_is_refused_before_attention_and_its_node_named(case):
    mask, corrupted, (row, _) = case
    parents, n = parents_of(mask)[None], len(mask)
    tree = replace(tree_from_parents(np.zeros_like(parents), parents), visibility_words=words_of(corrupted)[None])
    cache = np.zeros((1, n, 2), np.float32), np.zeros((1, 1), np.int32), np.zeros(1, np.int32)
    with pytest.raises(ValueError, match=rf"tree.visibility_words\[0, {row}\] must be what the parents say"):
        ddtree.verify_attention(np.zeros((1, n, 1, 2), np.float32), *cache, tree, scale=1.0, kv_lora_rank=1)


@given(
    lens=st.lists(st.integers(1, 70), min_size=1, max_size=3),
    longest=st.integers(70, 100),
    seed=st.integers(0, 2**32),
)
def test_a_chain_is_the_tree_of_its_parents(lens, longest, seed):
    token_ids = np.random.default_rng(seed).integers(0, 2**31, (len(lens), longest))
    parents = np.broadcast_to(np.arange(-1, longest - 1), token_ids.shape)
    chain, tree = chain_tree(token_ids, lens), tree_from_parents(token_ids, parents, lens)
    for name, field in vars(tree).items():
        assert_same(np.asarray(getattr(chain, name)), np.asarray(field))
