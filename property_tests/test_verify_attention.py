"""Laws of ``verify_attention``: softmax attention over the prefix and the nodes that a node sees."""

import numpy as np
import pytest
from hypothesis import given

from ddtree import reference
from ddtree.property_tests import brute_force
from ddtree.property_tests.compare import assert_same, assert_same_form
from ddtree.property_tests.nearness import LOW_TYPES, Attention, assert_near
from ddtree.property_tests.strategies import PAGE_SIZES, attention_inputs, poisoned_queries
from ddtree.property_tests.test_visibility import SHAPES
from ddtree.trees import tree_from_parents

TYPES = {"float32": np.float32, "float64": np.float64, **LOW_TYPES}


def large_case(dtype=np.float32, *, shape="random", N=33, prefixes=(70, 0, 5), page_size=16, heads=4, size=1.0, seed=0):
    """Requests of unequal prefixes, the last with unused slots; every row not in use is NaN."""
    rng, (C, R) = np.random.default_rng(seed), (32, 8)
    B = len(prefixes)
    counts = np.array([N] * (B - 1) + [max(N - 3, 1)], np.int32)
    tree = tree_from_parents(np.zeros((B, N), np.int32), np.stack([SHAPES[shape](rng, N) for _ in range(B)]), counts)
    prefix_lens = np.array(prefixes, np.int32)
    needed = -(-(prefix_lens + counts) // page_size)
    pages = rng.permutation(int(needed.sum()) + 1)
    table = np.full((B, int(needed.max())), -1, np.int32)
    data = np.full((len(pages), page_size, C + R), np.nan, dtype)
    for b in range(B):
        table[b, : needed[b]], pages = pages[: needed[b]], pages[needed[b] :]
        rows = np.arange(prefix_lens[b] + counts[b])
        values = rng.standard_normal((len(rows), C + R)).astype(dtype)
        data[table[b, rows // page_size], rows % page_size] = values
    q = poisoned_queries(rng, tree, heads, C + R, dtype, size)
    return Attention(q, data, table, prefix_lens, tree, (C + R) ** -0.5, C)


def or_skip(call):
    """The result; a backend need not take every type, but must say so."""
    try:
        return call()
    except TypeError as error:
        pytest.skip(f"not taken: {error}")


@given(case=attention_inputs(np.float32))
def test_node_attends_to_the_prefix_and_its_path(verify_attention, case):
    assert_near(case.call(verify_attention), case, small=True)


@given(case=attention_inputs(np.float64))
def test_float64_is_computed_in_float64(verify_attention, case):
    assert_near(case.call(verify_attention), case)


@pytest.mark.large
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"size": 16.0},
        {"size": 100.0},  # scores past 88, whose exponential no float32 holds
        {"prefixes": (3000, 1), "N": 9},
        {"prefixes": (3000, 1), "N": 9, "size": 16.0},
        {"N": 65, "shape": "chain"},
        {"N": 65, "shape": "star"},
        {"N": 1, "prefixes": (0, 300, 0)},
    ],
    ids=lambda options: "-".join(f"{name}={value}" for name, value in options.items()) or "plain",
)
def test_error_is_at_most_that_of_the_plain_formula(verify_attention, options, dtype):
    case = large_case(TYPES[dtype], **options)
    assert_near(or_skip(lambda: case.call(verify_attention)), case)


@pytest.mark.large
@pytest.mark.parametrize("dtype", TYPES)
def test_a_zeroed_row_would_be_noticed(verify_attention, dtype):
    case = large_case(TYPES[dtype], prefixes=(3000, 1), N=9)
    out = or_skip(lambda: case.call(verify_attention)).copy()
    out[0, 8, 3] = 0
    with pytest.raises(AssertionError, match="worst row is off by 1,"):
        assert_near(out, case)


@pytest.mark.large
@pytest.mark.parametrize("page_size", [*PAGE_SIZES, 103])
def test_page_size_does_not_matter(verify_attention, page_size):
    case = large_case(page_size=page_size)
    assert_near(case.call(verify_attention), case)


@pytest.mark.parametrize("N", [32, 33])
def test_masks_are_read_up_to_the_end_of_a_word(verify_attention, N):
    case = large_case(N=N, prefixes=(2, 0), heads=1)
    assert_near(case.call(verify_attention), case)


@given(case=attention_inputs(np.float32))
def test_out_is_written_whole_and_returned(verify_attention, case):
    out = np.full((*case.q.shape[:3], case.kv_lora_rank), np.nan, np.float32)
    assert_same(case.call(verify_attention, out=out), case.call(verify_attention))


@given(case=attention_inputs(np.float32))
def test_a_row_that_a_node_does_not_see_does_not_matter(verify_attention, case):
    # Of each request, the row of the last node is seen by that node alone.
    before, S = case.call(verify_attention), case.kv_cache.shape[1]
    last = case.tree.node_counts - 1
    for b, i in enumerate(last):
        place = brute_force.row_place(case.page_table[b], case.prefix_lens[b] + i, S)
        case.kv_cache[place] += 7
    after = case.call(verify_attention)
    others = np.arange(case.tree.num_slots) != last[:, None]
    assert_same(after[others], before[others])


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@given(case=attention_inputs(np.float32))
def test_a_row_that_is_not_finite_reaches_no_node_that_does_not_see_it(verify_attention, value, case):
    before, S = case.call(verify_attention), case.kv_cache.shape[1]
    last = case.tree.node_counts - 1
    for b, i in enumerate(last):
        case.kv_cache[brute_force.row_place(case.page_table[b], case.prefix_lens[b] + i, S)] = value
    with np.errstate(invalid="ignore"):
        after = case.call(verify_attention)
    others = np.arange(case.tree.num_slots) != last[:, None]
    assert_same(after[others], before[others])


@pytest.mark.parametrize("B, N", [(0, 1), (0, 5)])
def test_no_request_has_no_output(verify_attention, B, N):
    tree = tree_from_parents(np.zeros((B, N), np.int32), np.zeros((B, N), np.int32))
    cache = np.full((2, 4, 6), np.nan, np.float32), np.zeros((B, 1), np.int32), np.zeros(B, np.int32)
    out = Attention(np.zeros((B, N, 2, 6), np.float32), *cache, tree, 1.0, 4).call(verify_attention)
    assert_same(out, np.zeros((B, N, 2, 4), np.float32))


@pytest.mark.beside_reference
@pytest.mark.parametrize("dtype", TYPES)
def test_types_are_those_that_the_reference_takes(verify_attention, dtype):
    case = large_case(TYPES[dtype], N=5, prefixes=(9, 0), heads=2)
    assert_same_form(or_skip(lambda: case.call(verify_attention)), case.call(reference.verify_attention))


@pytest.mark.parametrize("value", [-3e38, -np.inf])
def test_scores_that_overflow_weigh_nothing_beside_a_finite_one(verify_attention, value):
    """Whole blocks of rows whose scores are −inf must not poison a softmax that goes over rows in blocks."""
    cache = np.zeros((1, 80, 2), np.float32)
    cache[0, :64, 1] = value
    cache[0, :, 0] = 1.0
    tree = tree_from_parents(np.zeros((1, 1), np.int32), np.zeros((1, 1), np.int32))
    q = np.full((1, 1, 1, 2), 2.0, np.float32)
    with np.errstate(over="ignore"):
        out = verify_attention(
            q, cache, np.zeros((1, 1), np.int32), np.array([70], np.int32), tree, scale=1.0, kv_lora_rank=1
        )
    assert out.tolist() == [[[[1.0]]]]


def test_scores_that_overflow_in_one_head_are_no_matter_to_the_next(verify_attention):
    # rows of latents 3 and 1, half each: the first head's scores of the former are −inf, the second head's are all 0
    cache = np.zeros((1, 128, 2), np.float32)
    cache[0, :64], cache[0, 64:] = (3.0, -3e38), (1.0, 0.0)
    tree = tree_from_parents(np.zeros((1, 1), np.int32), np.zeros((1, 1), np.int32))
    q = np.array([[[[0.0, 2.0], [0.0, 0.0]]]], np.float32)
    one = np.zeros((1, 1), np.int32), np.array([127], np.int32)
    with np.errstate(over="ignore"):
        out = verify_attention(q, cache, *one, tree, scale=1.0, kv_lora_rank=1)
    assert out.tolist() == [[[[1.0], [2.0]]]]


def test_no_head_has_no_output(verify_attention):
    tree = tree_from_parents(np.zeros((1, 2), np.int32), np.array([[-1, 0]]))
    cache = np.zeros((1, 2, 6), np.float32), np.zeros((1, 1), np.int32), np.zeros(1, np.int32)
    out = verify_attention(np.zeros((1, 2, 0, 6), np.float32), *cache, tree, scale=1.0, kv_lora_rank=4)
    assert_same(out, np.zeros((1, 2, 0, 4), np.float32))
