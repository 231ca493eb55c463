"""The comparison and the calls of the suite notice what they are there for."""

from dataclasses import replace

import numpy as np
import pytest

from ddtree.property_tests._backends import Operation
from ddtree.property_tests.compare import (
    BeyondToleranceError,
    assert_close,
    assert_same,
    assert_same_acceptance,
    assert_same_tree,
)
from ddtree.property_tests.tolerances import TOLERANCE
from ddtree.trees import Acceptance, chain_tree

ZEROS = np.zeros((2, 3), np.int32)


def test_message_says_what_and_where_and_how_much():
    with pytest.raises(AssertionError) as caught:
        assert_same(np.eye(3, dtype=np.int32)[:2], ZEROS, "parents")
    assert str(caught.value).splitlines() == [
        "parents[0, 0]: 1, should be 0",
        "  2 of 6 differ; int32 (2, 3); 0 NaN",
        "  parents[1, 1]: 1, should be 0",
    ]


@pytest.mark.parametrize(
    "actual, expected, message",
    [
        (ZEROS.astype(np.int64), ZEROS, "is of type int64, should be int32"),
        (ZEROS[:1], ZEROS, r"is of shape \(1, 3\), should be \(2, 3\)"),
        (np.array([0.0]), np.array([-0.0]), r"\[0\]: 0.0, should be -0.0"),
        (np.array([1.0, np.nan]), np.array([1.0, np.inf]), r"\[1\]: nan, should be inf\n  1 of 2 differ; .*; 1 NaN"),
        (np.array([1.0]), np.array([np.nextafter(1.0, 2.0)]), r"\[0\]: 1.0, should be 1.0000000000000002"),
    ],
)
def test_any_difference_in_form_or_bits_is_noticed(actual, expected, message):
    with pytest.raises(AssertionError, match=message):
        assert_same(actual, expected)


def test_nan_equals_nan():
    assert_same(np.array([np.nan, -np.inf]), np.array([-np.nan, -np.inf]))


def test_lists_are_not_arrays():
    with pytest.raises(TypeError):
        assert_same([0], np.zeros(1, np.int64))


def test_closeness_is_that_of_the_table():
    row = ("topk_log_probs", "float32")
    bound = TOLERANCE[row].bound
    expected = np.array([-1.0, -np.inf, -8.0])
    assert_close(np.array([-1 - bound / 2, -np.inf, -8 - bound], np.float32), expected, row=row, scale=[1, 1, 8])
    for wrong in ([-1 - 2 * bound, -np.inf, -8], [-1, -100, -8], [-np.inf, -np.inf, -8], [-1, np.nan, -8]):
        with pytest.raises(AssertionError, match="1 of 3 differ"):
            assert_close(np.array(wrong, np.float32), expected, row=row, scale=[1, 1, 8])


@pytest.mark.parametrize(
    "name", ["token_ids", "parents", "depths", "ranks", "scores", "node_counts", "visibility_words"]
)
def test_every_array_of_a_tree_is_compared(name):
    tree = chain_tree(np.array([[4, 5, 6]]))
    with pytest.raises(AssertionError, match=rf"tree\.{name}\[0"):
        assert_same_tree(replace(tree, **{name: getattr(tree, name) + getattr(tree, name).dtype.type(1)}), tree)


@pytest.mark.parametrize("name", ["max_depth", "num_candidates"])
def test_every_number_of_a_tree_is_compared(name):
    tree = chain_tree(np.array([[4, 5, 6]]))
    with pytest.raises(AssertionError, match=rf"tree\.{name}: 9, should be"):
        assert_same_tree(replace(tree, **{name: 9}), tree)


@pytest.mark.parametrize("name", ["node_indices", "lengths", "bonus_token_ids", "finished"])
def test_every_array_of_an_acceptance_is_compared(name):
    kept = Acceptance(ZEROS, ZEROS[:, 0], ZEROS[:, 0], np.zeros(2, np.bool_))
    with pytest.raises(AssertionError, match=rf"acceptance\.{name}\[0"):
        assert_same_acceptance(replace(kept, **{name: ~getattr(kept, name)}), kept)


class Careless:
    """A backend that writes where it must not, and returns what it must not."""

    @staticmethod
    def tree_positions(depths, prefix_lens):
        depths += prefix_lens[:, None]
        return depths

    @staticmethod
    def visibility_words(parents, node_counts):
        parents.flags.writeable = True
        parents[...] = 0
        return np.zeros((*parents.shape, 1), np.uint32)

    @staticmethod
    def compact_cache(kv_cache, page_table, prefix_lens, acceptance):
        return kv_cache.copy()


CARELESS = f"{__name__}:Careless"


def test_a_write_into_an_input_is_noticed():
    with pytest.raises(ValueError, match="read-only"):
        Operation("tree_positions", CARELESS)(ZEROS, ZEROS[:, 0])
    with pytest.raises(AssertionError, match=r"visibility_words\[.*Careless\] wrote into parents"):
        Operation("visibility_words", CARELESS)(ZEROS - 1, ZEROS[:, 0])


def test_a_result_in_place_of_a_write_in_place_is_noticed():
    kept = Acceptance(ZEROS, ZEROS[:, 0], ZEROS[:, 0], np.zeros(2, np.bool_))
    with pytest.raises(AssertionError, match="works in place and returns None, got ndarray"):
        Operation("compact_cache", CARELESS)(np.zeros((1, 1, 4, 2)), ZEROS[:, :1], ZEROS[:, 0], kept)


def test_what_is_beyond_the_types_range_is_infinite_in_it():
    assert_close(np.full(1, -np.inf, np.float32), np.array([-1e300]), row=("topk_log_probs", "float32"))
    with pytest.raises(BeyondToleranceError, match=r"result\[0\]: 0.0, should be -1e\+300") as caught:
        assert_close(np.zeros(1, np.float32), np.array([-1e300]), row=("topk_log_probs", "float32"))
    assert caught.value.tolerance.startswith("topk_log_probs, float32: 1e-06 times max(1, ")
