"""Laws of ``choose_tokens``, and of the generator and the elementary functions under it."""

import itertools
import math
from decimal import Decimal

import hypothesis.strategies as st
import ml_dtypes
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis.extra.numpy import arrays

from ddtree import reference
from ddtree.property_tests import brute_force
from ddtree.property_tests.compare import assert_same
from ddtree.property_tests.strategies import LOGIT_KINDS, logit_batches
from ddtree.property_tests.tolerances import TOLERANCE
from ddtree.reference.philox import philox4x32
from ddtree.reference.portable_math import portable_exp, portable_log

TEMPERATURES = st.sampled_from([1.0, 0.5, 0.7, 2.0])
TOP_PS = st.sampled_from([1.0, 0.5, 0.75, 0.25, 15 / 16, 2.0**-20])  # exact in binary, as the rule's edges are
SEEDS = st.integers(0, 2**64 - 1)
GREATEST_NOISE, LEAST_NOISE, EQUAL_NOISE = 105_672_652, 920_591_648, 171_344_493
"""Positions where, of seed 0 and request 0, token 2 takes the word 2³² − 1, the word 0, and that of token 1: of all 2³¹
there are few."""


def sampled_counts(choose_tokens, row, *, samples=1000, seed=0, **settings):
    """How often each token is chosen from one row of logits, over positions."""
    logits = np.broadcast_to(np.asarray(row, np.float32), (1, samples, len(row)))
    chosen = choose_tokens(logits, seed=seed, positions=np.arange(samples, dtype=np.int32)[None], **settings)
    return np.bincount(chosen[0], minlength=len(row))


def assert_drawn_from(counts, probabilities):
    """Each count lies within the table's deviations of its mean: exactly on it where the probability is 0 or 1."""
    p, n = np.asarray(probabilities), counts.sum()
    allowed = TOLERANCE["choose_tokens", "frequency"].bound * np.sqrt(n * p * (1 - p))
    assert (np.abs(counts - n * p) <= allowed).all(), f"{counts.tolist()} drawn, {(n * p).round(1).tolist()} expected"


def softmax(row, temperature=1.0):
    weights = np.exp((np.asarray(row) - np.max(row)) / temperature)
    return weights / weights.sum()


# Greedy


@given(logits=logit_batches(specials=(-np.inf, np.nan, np.inf)))
def test_greedy_choice_is_the_argmax_and_of_equals_the_lowest_id(choose_tokens, logits):
    expected = [[brute_force.choice(row.astype(float).tolist()) for row in rows] for rows in logits]
    assert_same(choose_tokens(logits), np.array(expected, np.int32).reshape(logits.shape[:2]))


@pytest.mark.large
@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float32, np.float64])
def test_greedy_choice_in_a_large_vocabulary(choose_tokens, dtype):
    logits = np.random.default_rng(0).standard_normal((2, 3, 5003)).astype(dtype)
    logits[0, 1, [4000, 4999]] = 50
    logits[0, 2, [17, 4999]] = 60
    logits[1, 2, 5002] = 70
    chosen = choose_tokens(logits)
    assert (chosen[0, 1], chosen[0, 2], chosen[1, 2]) == (4000, 17, 5002)
    assert_same(chosen, logits.astype(np.float64).argmax(-1).astype(np.int32))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(
    "row", [[0.0, np.nan, 1.0], [np.nan] * 3, [0.0, np.inf, 1.0], [-np.inf] * 3, [np.inf, np.nan, np.inf]]
)
def test_an_unusable_row_gives_minus_one_and_spares_its_neighbours(choose_tokens, row, temperature):
    logits = np.array([[[0.0, 90.0, 0.0], row, [0.0, 0.0, 90.0]]], np.float32)
    positions = np.arange(3, dtype=np.int32)[None]
    assert choose_tokens(logits, temperature=temperature, positions=positions).tolist() == [[1, -1, 2]]


@pytest.mark.parametrize("B, N", [(0, 2), (2, 0)])
def test_no_rows_give_no_choices(choose_tokens, B, N):
    positions = np.zeros((B, N), np.int32)
    for temperature in (0.0, 1.0):
        chosen = choose_tokens(np.zeros((B, N, 3), np.float32), temperature=temperature, positions=positions)
        assert_same(chosen, np.zeros((B, N), np.int32))


# Sampled


@given(
    logits=logit_batches(specials=(-np.inf, np.nan, np.inf)),
    temperature=TEMPERATURES,
    top_p=TOP_PS,
    seed=SEEDS,
    first=st.integers(0, 2**63 - 1 - 10),
    data=st.data(),
)
def test_sampled_choice_is_the_argmax_of_scaled_logits_and_keyed_noise(
    choose_tokens, logits, temperature, top_p, seed, first, data
):
    B, N, _ = logits.shape
    ids = first + np.arange(B)[::-1].astype(np.int64)
    positions = data.draw(arrays(np.int32, (B, N), elements=st.integers(0, 2**31 - 1)), label="positions")
    options = {"temperature": temperature, "top_p": top_p, "seed": seed}
    expected = [
        [
            brute_force.choice(
                logits[b, i].astype(float).tolist(), request_id=int(ids[b]), position=int(positions[b, i]), **options
            )
            for i in range(N)
        ]
        for b in range(B)
    ]
    chosen = choose_tokens(logits, request_ids=ids, positions=positions, **options)
    assert_same(chosen, np.array(expected, np.int32).reshape(B, N))


@pytest.mark.large
@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
@pytest.mark.parametrize("row", [[0.0, 0.0], [1.0, 0.0, -1.0, 0.5], [-3.0, 2.0, -np.inf, 1.75, 0.0]])
def test_sampled_frequencies_are_the_softmax_at_that_temperature(choose_tokens, row, temperature):
    counts = sampled_counts(choose_tokens, row, temperature=temperature)
    assert_drawn_from(counts, softmax(row, temperature))


@pytest.mark.large
def test_another_temperature_would_be_noticed(choose_tokens):
    row = [1.0, 0.0, -1.0, 0.5]
    counts = sampled_counts(choose_tokens, row, temperature=0.5)
    with pytest.raises(AssertionError, match="drawn"):
        assert_drawn_from(counts, softmax(row, 1.0))


@pytest.mark.large
@pytest.mark.parametrize("by", ["position", "request_id", "seed"])
def test_frequencies_are_right_along_every_key(choose_tokens, by):
    row, samples = [0.0, 1.0, -1.0], 1000
    logits = np.broadcast_to(np.array(row, np.float32), (samples, 1, 3))
    keys, zeros = np.arange(samples), np.zeros((samples, 1), np.int32)
    if by == "seed":
        chosen = [choose_tokens(logits[:1], temperature=1.0, seed=s, positions=zeros[:1])[0, 0] for s in keys.tolist()]
    else:
        ids, positions = (keys, zeros) if by == "request_id" else (0 * keys, keys[:, None].astype(np.int32))
        chosen = choose_tokens(logits, temperature=1.0, request_ids=ids, positions=positions)[:, 0]
    assert_drawn_from(np.bincount(chosen, minlength=3), softmax(row))


@pytest.mark.large
def test_neighbouring_places_draw_independently(choose_tokens):
    logits = np.zeros((40, 40, 2), np.float32)
    positions = np.tile(np.arange(40, dtype=np.int32), (40, 1))
    chosen = choose_tokens(logits, temperature=1.0, positions=positions)
    for one, other in ((chosen[1:], chosen[:-1]), (chosen[:, 1:], chosen[:, :-1])):
        assert_drawn_from(np.bincount((2 * one + other).ravel(), minlength=4), [0.25] * 4)


@pytest.mark.large
@pytest.mark.parametrize(
    "top_p, kept", [(0.5, 1), (0.5 + 2**-20, 2), (0.75, 2), (0.75 + 2**-20, 3), (2**-30, 1), (1, 3)]
)
def test_nucleus_is_half_open_and_cuts_ties_by_id(choose_tokens, top_p, kept):
    # One half, one quarter, one quarter: a token is kept iff less than top_p of the mass lies before it.
    row, probabilities = np.log([0.25, 0.5, 0.25]), np.array([0.25, 0.5, 0.25])
    by_mass = [1, 0, 2]
    probabilities[by_mass[kept:]] = 0
    counts = sampled_counts(choose_tokens, row, temperature=1.0, top_p=top_p)
    assert_drawn_from(counts, probabilities / probabilities.sum())


@pytest.mark.large
@pytest.mark.parametrize("top_p, kept", [(0.25, 1), (0.5, 2), (0.75, 3), (1.0, 4)])
def test_nucleus_ends_where_just_its_share_lies_before(choose_tokens, top_p, kept):
    # Four equal tokens: before the second lies a quarter, which is not less than a quarter.
    counts = sampled_counts(choose_tokens, [0.0] * 4, temperature=1.0, top_p=top_p)
    assert_drawn_from(counts, [1 / kept] * kept + [0] * (4 - kept))


@pytest.mark.parametrize("top_p, kept", [(0.25, 1), (0.5, 2), (0.75, 3), (1.0, 4)])
def test_the_first_of_four_equal_tokens_are_drawn_and_no_other(choose_tokens, top_p, kept):
    counts = sampled_counts(choose_tokens, [0.0] * 4, samples=24, temperature=1.0, top_p=top_p)
    assert (counts > 0).tolist() == [v < kept for v in range(4)]


@pytest.mark.large
def test_nucleus_is_of_the_distribution_at_that_temperature(choose_tokens):
    # p = (0.6, 0.3, 0.1) becomes p² / Σp² = (0.78, 0.20, 0.02) at T = 1/2: 0.75 of the mass is now one token.
    row = np.log([0.6, 0.3, 0.1])
    assert np.flatnonzero(sampled_counts(choose_tokens, row, temperature=1.0, top_p=0.75)).tolist() == [0, 1]
    assert np.flatnonzero(sampled_counts(choose_tokens, row, temperature=0.5, top_p=0.75)).tolist() == [0]


@given(
    seed=SEEDS,
    request_id=st.integers(0, 2**63 - 1),
    position=st.integers(0, 2**31 - 1),
    vocab=st.integers(2, 9),
    data=st.data(),
)
def test_noise_is_right_to_the_last_bits(choose_tokens, seed, request_id, position, vocab, data):
    """Logits that undo the noise, and one of them 2⁻⁴⁰ more: any other noise, or a coarser sum, chooses elsewhere."""
    first = data.draw(st.integers(0, vocab - 1), label="first token of any probability")
    chosen = data.draw(st.integers(first, vocab - 1), label="chosen")
    logits = -np.array([brute_force.noise(v, seed, request_id, position) for v in range(vocab)])
    logits[:first] = -np.inf
    logits[chosen] += 2.0**-40
    keys = {"request_ids": np.array([request_id]), "positions": np.array([[position]], np.int32)}
    assert choose_tokens(logits[None, None], temperature=1.0, seed=seed, **keys).tolist() == [[chosen]]


@pytest.mark.parametrize("position, least, most", [(GREATEST_NOISE, 22.87, 22.88), (LEAST_NOISE, -3.13, -3.12)])
def test_noise_at_its_ends_decides_as_any_other(choose_tokens, position, least, most):
    noise = [brute_force.noise(v, 0, 0, position) for v in range(3)]
    assert least < noise[2] < most
    for more, chosen in ((2.0**-30, 2), (-(2.0**-30), 1)):
        logits = np.array([[[-60.0, 0.0, noise[1] - noise[2] + more]]])
        assert choose_tokens(logits, temperature=1.0, positions=np.array([[position]], np.int32)).tolist() == [[chosen]]


def test_of_equal_noisy_scores_the_lowest_id_wins(choose_tokens):
    logits, positions = np.array([[[-60.0, 0.0, 0.0]]]), np.array([[EQUAL_NOISE]], np.int32)
    assert brute_force.noise(1, 0, 0, EQUAL_NOISE) == brute_force.noise(2, 0, 0, EQUAL_NOISE)
    assert choose_tokens(logits, temperature=1.0, positions=positions).tolist() == [[1]]


@pytest.mark.parametrize("more, kept", [(-0.5, True), (0.25, False)])
@pytest.mark.parametrize("below", [-0.4, -3.0])
def test_masses_of_a_nucleus_are_whole_parts_of_2_to_the_40(choose_tokens, below, more, kept):
    """Of the likeliest two, top_p ends between two wholes: half a part of mass more or less would decide otherwise."""

    def parts(z):
        return Decimal(z).exp(brute_force.EXACT) * 2**40

    z = next(z for z in np.arange(below, -9, -1 / 64).tolist() if int(parts(z)) % 2 and 0.6 < parts(z) % 1 < 0.9)
    few = [-27.5] * 4  # one part of mass each
    top_p = 2**40 / (2**40 + int(parts(z)) + 8 + more)
    row = [*few, z, 0.0, *few]
    # where the second one would be chosen
    position = next(p for p in range(1000) if brute_force.choice(row, temperature=1.0, position=p) == 4)
    at = {"top_p": top_p, "positions": np.array([[position]], np.int32)}
    assert choose_tokens(np.array([[row]]), temperature=1.0, **at).tolist() == [[4 if kept else 5]]


@pytest.mark.parametrize("more, kept", [(0.5, True), (-0.5, False)])
def test_of_equal_tokens_at_a_nucleus_end_each_takes_its_mass_and_no_more(choose_tokens, more, kept):
    row = [-0.45, -0.45, 0.0]
    mass = int(Decimal(row[0]).exp(brute_force.EXACT) * 2**40)  # of 0.46 more
    top_p = (2**40 + mass + more) / (2**40 + 2 * mass)
    position = next(p for p in range(1000) if brute_force.choice(row, temperature=1.0, position=p) == 1)
    at = {"temperature": 1.0, "top_p": top_p, "positions": np.array([[position]], np.int32)}
    assert (choose_tokens(np.array([[row]]), **at)[0, 0] == 1) == kept


@given(logits=logit_batches(min_vocab=2, max_rows=4), temperature=TEMPERATURES, top_p=TOP_PS, seed=SEEDS)
def test_choice_depends_on_row_seed_request_and_position_alone(choose_tokens, logits, temperature, top_p, seed):
    B, N, _ = logits.shape
    ids, positions = np.array([2**32 + 5, 7], np.int64)[:B], np.arange(N, dtype=np.int32) + np.zeros((B, 1), np.int32)
    options = {"temperature": temperature, "top_p": top_p, "seed": seed}
    chosen = choose_tokens(logits, request_ids=ids, positions=positions, **options)
    mirrored = choose_tokens(logits[::-1, ::-1], request_ids=ids[::-1], positions=positions[::-1, ::-1], **options)
    assert_same(mirrored, chosen[::-1, ::-1])
    for b, i in itertools.product(range(B), range(N)):
        row, place = logits[b : b + 1, i : i + 1], positions[b : b + 1, i : i + 1]
        one = choose_tokens(row, request_ids=ids[b : b + 1], positions=place, **options)
        assert one[0, 0] == chosen[b, i]


@given(logits=logit_batches(kinds=("eighths",)), shift=st.integers(-64, 64), temperature=TEMPERATURES, seed=SEEDS)
def test_a_constant_added_to_a_row_changes_no_sample(choose_tokens, logits, shift, temperature, seed):
    positions = np.zeros(logits.shape[:2], np.int32)
    options = {"temperature": temperature, "top_p": 0.75, "seed": seed, "positions": positions}
    assert_same(choose_tokens(logits + np.float32(shift), **options), choose_tokens(logits, **options))


@pytest.mark.large
@pytest.mark.parametrize("word", range(2))
def test_all_64_bits_of_seed_and_request_id_count(choose_tokens, word):
    logits, positions = np.zeros((1, 64, 100), np.float32), np.arange(64, dtype=np.int32)[None]

    def chosen(seed=0, request_id=0):
        ids = np.array([request_id], np.int64)
        return choose_tokens(logits, temperature=1.0, seed=seed, request_ids=ids, positions=positions)

    one = 2 ** (32 * word)
    assert (chosen() != chosen(seed=one)).sum() > 50
    assert (chosen() != chosen(request_id=one)).sum() > 50
    assert_same(chosen(), choose_tokens(logits, temperature=1.0, positions=positions))  # ids count from 0


@pytest.mark.large
def test_samples_at_a_low_temperature_are_among_the_likeliest(choose_tokens):
    logits = (np.random.default_rng(5).integers(-8, 8, (2, 50, 30)) / 8).astype(np.float32)
    positions = np.tile(np.arange(50, dtype=np.int32), (2, 1))
    for temperature in (1e-3, 1e-300):
        chosen = choose_tokens(logits, temperature=temperature, positions=positions)
        assert (np.take_along_axis(logits, chosen[..., None].astype(np.int64), -1)[..., 0] == logits.max(-1)).all()
        assert (chosen != logits.argmax(-1)).any(), "the tied are drawn, not always the first"


@pytest.mark.large
@pytest.mark.beside_reference
@pytest.mark.parametrize("top_p", [1.0, 0.9, 0.3])
@pytest.mark.parametrize("kind", LOGIT_KINDS)
def test_samples_from_a_large_vocabulary_are_those_of_the_reference(choose_tokens, kind, top_p):
    dtype, unit = LOGIT_KINDS[kind]
    logits = (np.random.default_rng(6).integers(-30, 30, (2, 4, 5003)) * unit).astype(dtype)
    options = {
        "temperature": 0.8,
        "top_p": top_p,
        "seed": 2**40 + 3,
        "positions": np.arange(8, dtype=np.int32).reshape(2, 4),
    }
    assert_same(choose_tokens(logits, **options), reference.choose_tokens(logits, **options))


# What lies under it


@pytest.mark.parametrize(
    "counter, key, words",
    [
        ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
    ],
)
def test_generator_gives_the_published_words(counter, key, words):
    counter, key, words = ([int(word, 16) for word in text.split()] for text in (counter, key, words))
    assert_same(philox4x32(np.array(counter, np.uint32), tuple(key)), np.array(words, np.uint32))
    assert brute_force.philox(counter, key) == tuple(words)


@given(counters=arrays(np.uint32, (3, 4)), key=st.tuples(*[st.integers(0, 2**32 - 1)] * 2))
def test_generator_is_its_definition_on_every_counter(counters, key):
    expected = [brute_force.philox(counter, key) for counter in counters.tolist()]
    assert_same(philox4x32(counters, key), np.array(expected, np.uint32))


def ulps(got, exact):
    """Distance of a float from an exact Decimal, in units in its last place."""
    return abs(Decimal(got) - exact) / Decimal(math.ulp(got))


@given(x=st.floats(2.0**-33, 50.0) | st.floats(0.9, 1.1))
def test_logarithm_is_within_an_ulp(x):
    exact = Decimal(x).ln(brute_force.EXACT)
    assert ulps(float(portable_log(np.array([x]))[0]), exact) <= TOLERANCE["portable_math", "float64"].bound


@given(x=st.floats(-708.0, 0.0) | st.floats(-2.0, 0.0))
@example(-708.0)
def test_exponential_is_within_an_ulp(x):
    exact = Decimal(x).exp(brute_force.EXACT)
    assert ulps(float(portable_exp(np.array([x]))[0]), exact) <= TOLERANCE["portable_math", "float64"].bound


def test_elementary_functions_are_exact_at_their_ends():
    assert portable_log(np.array([1.0])).tolist() == [0.0]
    assert portable_exp(np.array([0.0, -0.0, -709.0, -1e300, -np.inf])).tolist() == [1.0, 1.0, 0.0, 0.0, 0.0]
