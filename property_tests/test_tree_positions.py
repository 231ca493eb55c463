"""Laws of ``tree_positions``: a node stands at its depth behind the prefix."""

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given
from hypothesis.extra.numpy import arrays

from ddtree.property_tests import brute_force
from ddtree.property_tests.compare import assert_same
from ddtree.property_tests.strategies import MAX_BATCH, built_trees, draft_trees

TREES = draft_trees() | built_trees()
PREFIXES = arrays(np.int32, MAX_BATCH, elements=st.integers(0, 100) | st.just(2**31 - 1 - 100))


@given(tree=TREES, prefixes=PREFIXES)
def test_position_is_the_prefix_and_the_steps_from_the_root(tree_positions, tree, prefixes):
    prefixes = prefixes[: tree.batch_size]
    got = tree_positions(tree.depths, prefixes)
    expected = np.repeat(prefixes[:, None], tree.num_slots, 1)  # what unused slots have
    for b in range(tree.batch_size):
        for i in range(tree.node_counts[b]):
            expected[b, i] += len(brute_force.node_path(tree.parents[b].tolist(), i)) - 1
    assert_same(got, expected)


@pytest.mark.parametrize("B, N", [(0, 1), (0, 5), (3, 1)])
def test_roots_stand_at_the_prefix(tree_positions, B, N):
    prefixes = np.arange(B, dtype=np.int32)
    assert_same(tree_positions(np.zeros((B, N), np.int32), prefixes), np.repeat(prefixes[:, None], N, 1))
