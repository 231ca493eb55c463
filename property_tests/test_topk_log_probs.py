"""Laws of ``topk_log_probs``: an exact order, and values near the exact log-softmax."""

import hypothesis.strategies as st
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis.extra.numpy import arrays

from ddtree import reference
from ddtree.property_tests.compare import assert_close, assert_same
from ddtree.property_tests.nearness import ROW, assert_right_top_k
from ddtree.property_tests.strategies import LOGIT_KINDS, logit_batches


@given(logits=logit_batches(specials=(-np.inf, np.nan, np.inf)), data=st.data())
def test_order_is_exact_and_values_are_near(topk_log_probs, logits, data):
    k = data.draw(st.integers(1, logits.shape[-1]), label="k")
    assert_right_top_k(topk_log_probs(logits, k), logits, k)


@given(logits=logit_batches())
def test_equal_logits_have_equal_values_and_no_value_is_above_zero(topk_log_probs, logits):
    log_probs, token_ids = topk_log_probs(logits, logits.shape[-1])
    sorted_logits = np.take_along_axis(logits, token_ids.astype(np.int64), -1)
    equal = sorted_logits[..., 1:] == sorted_logits[..., :-1]
    assert_same(log_probs[..., 1:][equal], log_probs[..., :-1][equal])
    assert (log_probs <= 0).all()
    assert (log_probs[..., 1:] <= log_probs[..., :-1]).all()


@given(logits=logit_batches(kinds=("eighths", "sixteenths")), shift=st.integers(-64, 64), data=st.data())
def test_a_constant_added_to_a_row_changes_no_choice(topk_log_probs, logits, shift, data):
    k = data.draw(st.integers(1, logits.shape[-1]), label="k")
    log_probs, token_ids = topk_log_probs(logits, k)
    shifted_log_probs, shifted_ids = topk_log_probs(logits + np.float32(shift), k)  # exact on these grids
    assert_same(shifted_ids, token_ids)
    # Both lie within the tolerance of one exact value; |logit| and |log Z| are below this.
    assert_close(shifted_log_probs, log_probs, row=ROW, scale=2 * (abs(shift) + 8.0))


@given(
    logits=logit_batches(),
    padding=arrays(np.float32, 3, elements=st.sampled_from([0.0, 30.0, np.nan, np.inf])),
    data=st.data(),
)
def test_columns_past_the_vocabulary_take_no_part(topk_log_probs, logits, padding, data):
    V = logits.shape[-1]
    k = data.draw(st.integers(1, V), label="k")
    padded = np.concatenate([logits, np.broadcast_to(padding.astype(logits.dtype), (*logits.shape[:2], 3))], -1)
    for got, wanted in zip(topk_log_probs(padded, k, vocab_size=V), topk_log_probs(logits, k), strict=True):
        assert_same(got, wanted)


@given(logits=logit_batches(kinds=("tenths", "float64", "bfloat16")))
def test_nan_counts_as_minus_infinity(topk_log_probs, logits):
    V = logits.shape[-1]
    without = np.where(np.isnan(logits), logits.dtype.type(-np.inf), logits)
    for got, wanted in zip(topk_log_probs(logits, V), topk_log_probs(without, V), strict=True):
        assert_same(got, wanted)


@pytest.mark.parametrize(
    "row",
    [
        [np.inf, 0.0, 1.0],
        [0.0, np.inf, np.nan],
        [np.inf, np.inf, 0.0],
        [-np.inf] * 3,
        [np.nan] * 3,
        [np.nan, -np.inf, np.nan],
    ],
)
def test_a_row_without_a_distribution_is_all_minus_infinity(topk_log_probs, row):
    logits = np.array([[row, [0.0, 1.0, 2.0]]], np.float32)
    log_probs, _ = topk_log_probs(logits, 3)
    assert_same(log_probs[0, 0], np.full(3, -np.inf, np.float32))
    assert np.isfinite(log_probs[0, 1]).all(), "the row beside it keeps its values"


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float32, np.float64])
@pytest.mark.parametrize("V", [1, 31, 32, 33, *(pytest.param(V, marks=pytest.mark.large) for V in (1000, 5003))])
def test_vocabularies_of_any_size_and_type(topk_log_probs, dtype, V):
    rng = np.random.default_rng(V)
    logits = (rng.standard_normal((2, 2, V)) * [[[1], [8]]]).astype(dtype)  # 16 bits repeat themselves at once
    logits[1, 0, V // 2] = np.nan
    for k in {1, min(V, 40), V}:
        assert_right_top_k(topk_log_probs(logits, k), logits, k)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("value", [-1.0, 1.0])
def test_a_last_bit_late_in_a_row_decides(topk_log_probs, dtype, value):
    logits = np.full((1, 1, 600), np.nextafter(dtype(value), dtype(-np.inf)))
    logits[0, 0, 400] = value
    assert topk_log_probs(logits, 1)[1].tolist() == [[[400]]]
    assert topk_log_probs(logits, 3)[1].tolist() == [[[400, 0, 1]]]


def test_what_comes_late_in_a_row_finds_its_place(topk_log_probs):
    logits = np.zeros((1, 1, 600), np.float32)
    logits[0, 0, [0, 1, 400]] = 10, 5, 7
    for k in (1, 2, 3, 4):
        assert_right_top_k(topk_log_probs(logits, k), logits, k)
    logits[0, 0, :300] = -np.inf
    assert_right_top_k(topk_log_probs(logits, 2), logits, 2)


@pytest.mark.parametrize("gap", [0.0, 1e-3, 30.0, 1e4, 1e8, 3e38])
def test_sharp_and_flat_rows_stay_within_tolerance_and_below_zero(topk_log_probs, gap):
    logits = np.zeros((1, 1, 64), np.float32)
    logits[0, 0, 17] = gap
    log_probs, token_ids = topk_log_probs(logits, 64)
    assert_right_top_k((log_probs, token_ids), logits, 64)
    assert (log_probs <= 0).all()


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float32, np.float64])
@pytest.mark.parametrize("V", [40, pytest.param(5003, marks=pytest.mark.large)])
def test_subnormal_logits_keep_their_order(topk_log_probs, dtype, V):
    steps = np.random.default_rng(V).integers(-90, 90, (1, 2, V))
    logits = (steps * np.float64(ml_dtypes.finfo(dtype).smallest_subnormal)).astype(dtype)
    for k in {1, 8, V}:
        assert_right_top_k(topk_log_probs(logits, k), logits, k)


@pytest.mark.parametrize("B, L", [(0, 2), (2, 0), (0, 0)])
def test_no_rows_give_no_rows(topk_log_probs, B, L):
    assert_right_top_k(topk_log_probs(np.zeros((B, L, 4), np.float32), 2), np.zeros((B, L, 4), np.float32), 2)


@pytest.mark.large
@pytest.mark.beside_reference
@pytest.mark.parametrize("kind", LOGIT_KINDS)
def test_order_is_that_of_the_reference_on_a_large_vocabulary(topk_log_probs, kind):
    dtype, unit = LOGIT_KINDS[kind]
    logits = (np.random.default_rng(4).integers(-200, 200, (2, 3, 20_000)) * unit).astype(dtype)
    assert_same(topk_log_probs(logits, 300)[1], reference.topk_log_probs(logits, 300)[1])
