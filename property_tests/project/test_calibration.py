"""Calibration of a drafter from a trace: by hand, by plain loops, and on traces whose temperature is known."""

import itertools
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from ddtree.analysis.calibration import calibration_table, reliability_table
from ddtree.analysis.choices import choices_of, chunks_of
from ddtree.analysis.intervals import wilson_interval
from ddtree.property_tests.project.made_traces import calibrated_chunk, chunk_of, random_chunk, tempered_chunk

ROUNDING: dict[str, Any] = dict(rtol=1e-9, atol=1e-12)


def drafted(chunk, i, d):
    """Log-probs and tokens of position i at slot d, up to the first that is not drafted."""
    row = list(zip(chunk.log_probs[i, d].tolist(), chunk.draft_token_ids[i, d].tolist(), strict=True))
    return list(itertools.takewhile(lambda candidate: candidate[0] > -math.inf, row))


def loop_over(chunk):
    """Every position of a chunk, its prompt, and the choice at each slot or None past the end."""
    for p, given in enumerate(chunk.prompt_lens.tolist()):
        new = chunk.token_ids[chunk.token_offsets[p] : chunk.token_offsets[p + 1]][given:].tolist()
        L = chunk.log_probs.shape[1]
        for i in range(len(new) - 1):
            position = int(chunk.position_offsets[p]) + i
            yield p, position, [new[i + 1 + d] if i + 1 + d < len(new) else None for d in range(L)]


@pytest.mark.parametrize("seed", range(6))
def test_choices_are_those_of_a_loop(seed):
    chunk = random_chunk(seed)
    chosen = choices_of(chunk)
    seen = 0
    for p, i, choices in loop_over(chunk):
        seen += 1
        assert chosen.prompt[i] == p
        path = True
        for d, choice in enumerate(choices):
            tokens = [token for _, token in drafted(chunk, i, d)]
            rank = -1 if choice is None else tokens.index(choice) if choice in tokens else chunk.log_probs.shape[2]
            assert chosen.ranks[i, d] == rank
            assert chosen.choices[i, d] == (-1 if choice is None else choice)
            assert chosen.path_is_likeliest[i, d] == path
            path = path and rank == 0
    assert seen == len(chosen.prompt) == len(chunk.log_probs)
    new = np.diff(chunk.token_offsets) - chunk.prompt_lens
    last = chunk.position_offsets[1:][new > 1] - 1
    assert (chosen.remaining[last] == 1).all()
    assert (
        chosen.root_token_ids[chunk.position_offsets[:-1][new > 1]]
        == chunk.token_ids[(chunk.token_offsets[:-1] + chunk.prompt_lens)[new > 1]]
    ).all()


def loss(scores, came, beta, others=1):
    """−log of the tempered probability of one outcome; the last is of so many tokens, tempered one by one."""
    tokens = [*((s, 1) for s in scores[:-1]), (scores[-1] - math.log(others), others)]
    total = sum(ways * math.exp(beta * s) for s, ways in tokens if s > -math.inf)
    return math.log(total) - beta * tokens[came][0] - math.log(tokens[came][1])


def loop_cases(chunk, d, given):
    """Scores of the K + 1 outcomes, the one that came and the prompt, of every prediction at slot d."""
    K = chunk.log_probs.shape[2]
    for p, i, choices in loop_over(chunk):
        rows = [drafted(chunk, i, j) for j in range(d + 1)]
        above = all(rows[j] and rows[j][0][1] == choices[j] for j in range(d))
        if choices[d] is None or not rows[d] or (given == "accepted path" and not above):
            continue
        rest = max(1 - sum(math.exp(s) for s, _ in rows[d]), K * 2.0**-24)
        tokens = [token for _, token in rows[d]]
        came = tokens.index(choices[d]) if choices[d] in tokens else len(tokens)
        yield [s for s, _ in rows[d]] + [math.log(rest)], came, p


@pytest.mark.parametrize("seed, vocab_size", [(0, 6), (1, 6), (2, 40), (3, 10_000)])
def test_calibration_is_that_of_a_loop_however_the_trace_is_cut(seed, vocab_size):
    chunks = [random_chunk(10 * seed + i, prompts=4) for i in range(3)]
    table = calibration_table(chunks, vocab_size=vocab_size)
    L = chunks[0].log_probs.shape[1]
    assert table.given == ("accepted path",) * L + ("any path",) * L
    for row in table.records():
        cases = [
            (scores, came) for chunk in chunks for scores, came, _ in loop_cases(chunk, row["depth"] - 1, row["given"])
        ]
        assert row["n"] == len(cases) > 0
        probs = [[math.exp(s) for s in scores] for scores, _ in cases]
        outcomes = [came for _, came in cases]
        brier = [sum((q - (k == c)) ** 2 for k, q in enumerate(p)) for p, c in zip(probs, outcomes, strict=True)]
        np.testing.assert_allclose(row["expected"], np.mean([p[0] for p in probs]), **ROUNDING)
        np.testing.assert_allclose(row["realised"], np.mean([c == 0 for c in outcomes]), **ROUNDING)
        np.testing.assert_allclose(row["mass"], np.mean([sum(p[:-1]) for p in probs]), **ROUNDING)
        covered = np.mean([c < len(p) - 1 for p, c in zip(probs, outcomes, strict=True)])
        np.testing.assert_allclose(row["covered"], covered, **ROUNDING)
        np.testing.assert_allclose(row["brier"], np.mean(brier), **ROUNDING)
        np.testing.assert_allclose(row["log_loss"], np.mean([loss(s, c, 1.0) for s, c in cases]), **ROUNDING)
        beta = 1 / row["temperature"] if row["temperature"] else None
        if beta:  # no other temperature does better, near or far

            def mean_loss(beta, cases=cases):
                return np.mean([loss(s, c, beta, vocab_size - len(s) + 1) for s, c in cases])

            best = mean_loss(beta)
            np.testing.assert_allclose(row["fitted_log_loss"], best, **ROUNDING)
            for other in (0.0, 0.01, 0.5, 0.99, 1.01, 2.0, 100.0):
                assert mean_loss(beta * other) >= best - 1e-12


def test_calibration_worked_by_hand():
    # drafts of one depth: log(0.5, 0.25) of tokens 7 and 8, at three positions; the choices are 7, 8 and 5
    draft = np.log([[[0.5, 0.25]]] * 3), np.array([[[7, 8]]] * 3)
    given, anyhow = calibration_table(chunk_of([[1, 7, 8, 5]], [draft]), vocab_size=3).records()
    assert given == {**anyhow, "given": "accepted path"}  # at depth 1 there is no path above
    assert (given["n"], given["depth"]) == (3, 1)
    assert given["expected"] == pytest.approx(0.5)
    assert given["realised"] == pytest.approx(1 / 3)
    assert given["mass"] == pytest.approx(0.75)
    assert given["covered"] == pytest.approx(2 / 3)
    # distances: (.5, .25, .25), (.5, .75, .25), (.5, .25, .75), squared
    assert given["brier"] == pytest.approx((0.375 + 0.875 + 0.875) / 3)
    assert given["log_loss"] == pytest.approx(math.log(2 * 4 * 4) / 3)
    # each outcome came once, so equal probabilities are the likeliest: no finite temperature beats them
    assert given["temperature"] == math.inf
    assert given["fitted_log_loss"] == pytest.approx(math.log(3))
    assert given["temperature_low"] is None


def test_reliability_worked_by_hand():
    # one depth, candidates of 0.75 and 0.125, four times; the choices are the first three times and the second once
    draft = np.log([[[0.75, 0.125]]] * 4), np.array([[[7, 8]]] * 4)
    chunk = chunk_of([[1, 7, 7, 7, 8]], [draft])
    both = reliability_table(chunk, rank=None, bins=(0, 0.5, 1))
    assert (both.n.tolist(), both.realised.tolist()) == ([4, 4], [0.25, 0.75])
    np.testing.assert_allclose(both.expected, [0.125, 0.75], rtol=1e-6)  # float32 log-probs
    assert both.error == pytest.approx(0.0625, abs=1e-6)  # (0.125 + 0) / 2
    assert (both.low.tolist(), both.high.tolist()) == tuple(x.tolist() for x in wilson_interval([1, 3], [4, 4]))
    half = float(np.exp(np.float64(np.float32(np.log(0.5)))))
    at_an_end = reliability_table(chunk_of([[1, 7]], [(np.log([[[0.5]]]), [[[7]]])]), bins=(0, half, 1))
    assert at_an_end.n.tolist() == [0, 1]  # it belongs to the bin that begins there
    sure = reliability_table(chunk_of([[1, 7]], [(np.zeros((1, 1, 1)), [[[7]]])]), bins=(0, 0.5, 1))
    assert sure.n.tolist() == [0, 1]  # the last bin has its upper end too
    assert math.isnan(sure.realised[0])


def test_temperature_worked_by_hand():
    # two tokens, 0.8 and the remainder 0.2; 9 of 10 times the first: 4^β = 9
    draft = np.log([[[0.8]]] * 10), np.full((10, 1, 1), 3)
    row = calibration_table(chunk_of([[0, *[3] * 9, 4]], [draft]), vocab_size=2).records()[0]
    assert row["temperature"] == pytest.approx(math.log(4) / math.log(9))
    assert row["fitted_log_loss"] == pytest.approx(-0.9 * math.log(0.9) - 0.1 * math.log(0.1))
    assert row["temperature_low"] is None  # of one prompt there is nothing to tell
    always = calibration_table(chunk_of([[0, *[3] * 10]], [draft]), vocab_size=2).records()[0]
    assert (always["temperature"], always["fitted_log_loss"]) == (0.0, 0.0)
    # the remainder of 0.2 is ten tokens of 0.02 each: 40^β = 9 · 10
    several = calibration_table(chunk_of([[0, *[3] * 9, 4]], [draft]), vocab_size=11).records()[0]
    assert several["temperature"] == pytest.approx(math.log(40) / math.log(90))
    assert several["log_loss"] == row["log_loss"]  # that none of the candidates came is one outcome
    assert several["fitted_log_loss"] == pytest.approx(row["fitted_log_loss"])


def test_a_drafter_that_is_hardly_surer_than_chance_and_always_right_is_too_unsure():
    """Eight candidates of 0.6 % of a vocabulary of 256, of which the first always comes."""
    draft = np.log(np.tile(np.linspace(0.006, 0.0055, 8), (30, 1, 1))), np.tile(np.arange(8), (30, 1, 1))
    for tokens, least, most in (([0] * 31, 0.0, 0.0), ([0] * 20 + [9] + [0] * 10, 0.0, 0.2)):
        chunk = chunk_of([tokens, tokens], [draft, draft])
        row = calibration_table(chunk, vocab_size=256).records()[0]
        assert least <= row["temperature"] <= most
        # as one outcome, the remainder of 95 % would be what the drafter was sure of
        assert calibration_table(chunk, vocab_size=9).records()[0]["temperature"] == math.inf


def test_a_choice_outside_a_sum_of_one_is_unlikely_but_not_impossible():
    draft = np.log([[[0.75, 0.25]]]), np.array([[[1, 2]]])
    row = calibration_table(chunk_of([[0, 5]], [draft]), vocab_size=9).records()[0]
    assert row["log_loss"] == pytest.approx(23 * math.log(2))  # two candidates, half of a float32's last place each


def test_temperature_of_a_drafter_that_was_sure_and_wrong():
    """Its probabilities are 1 and 0 in float64, where the curvature is nothing, and one choice is the second."""
    draft = np.array([[[0.0, -2000.0]]] * 10), np.array([[[3, 4]]] * 10)
    chunk = chunk_of([[0, *[3] * 9, 4]], [draft])
    row = calibration_table(chunk, vocab_size=3).records()[0]
    cases = [(scores, came) for scores, came, _ in loop_cases(chunk, 0, "any path")]
    assert row["fitted_log_loss"] == pytest.approx(np.mean([loss(s, c, 1 / row["temperature"]) for s, c in cases]))
    for other in (0.5, 0.99, 1.01, 2.0):
        assert np.mean([loss(s, c, other / row["temperature"]) for s, c in cases]) > row["fitted_log_loss"]


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.7])
@pytest.mark.parametrize("K, vocab_size", [(12, 12), (4, 5)])
def test_temperature_is_recovered(temperature, K, vocab_size):
    chunk = calibrated_chunk(7, prompts=40, new=60, L=3, K=K, vocab_size=vocab_size, temperature=temperature)
    table = calibration_table(chunk, vocab_size=vocab_size, level=0.9999)
    assert (table.temperature_low <= temperature).all()
    assert (temperature <= table.temperature_high).all()
    anyhow = slice(3, None)  # of the deeper positions on accepted paths there are few
    assert (table.temperature_high - table.temperature_low < 0.5 * temperature)[anyhow].all()
    assert (table.fitted_log_loss <= table.log_loss).all()


@pytest.mark.parametrize("temperature", [0.8, 1.0, 1.4])
def test_temperature_of_a_vocabulary_is_seen_in_its_candidates(temperature):
    """Of 2,048 tokens the likeliest are kept: the temperature is nearly that of all, and hardly depends on how many."""
    V, kept = 2_048, {}
    for K in (16, 64):
        chunk = tempered_chunk(5, new=1_500, K=K, vocab_size=V, temperature=temperature)
        kept[K] = calibration_table(chunk, vocab_size=V).temperature[0]
        as_one = calibration_table(chunk, vocab_size=K + 1).temperature[0]
        assert abs(kept[K] - temperature) <= max(0.02, 0.25 * abs(as_one - temperature))
    assert kept[16] == pytest.approx(kept[64], rel=0.05)


def test_temperature_interval_covers_the_truth_though_prompts_differ():
    """1 / T of prompts that differ is their own mean only nearly, so the truth is taken from a large trace."""
    options = dict(new=20, L=1, K=6, vocab_size=6, temperature=1.3, wobble=0.5)
    truth = calibration_table(calibrated_chunk(0, prompts=4_000, **options), vocab_size=6).temperature[1]
    runs, covered = 150, 0
    for seed in range(1, runs + 1):
        row = calibration_table(calibrated_chunk(seed, prompts=40, **options), vocab_size=6).records()[1]
        covered += row["temperature_low"] <= truth <= row["temperature_high"]
    # the standard error of a coverage of 95 % in 150 runs is 1.8 %; the sandwich of 40 prompts lacks a little
    assert 0.88 <= covered / runs <= 0.99


def test_a_calibrated_drafter_is_called_so():
    chunk = calibrated_chunk(3, prompts=60, new=80, L=3, K=5, vocab_size=9)
    table = calibration_table(chunk, vocab_size=9, level=0.9999)
    assert ((table.low <= table.expected) & (table.expected <= table.high)).all()
    np.testing.assert_allclose(table.mass, table.covered, atol=0.03)  # of 4,700 positions: 4 standard errors
    for rank in (1, 2, None):
        curve = reliability_table(chunk, rank=rank, given="any path", level=0.9999)
        full = curve.n > 0
        assert ((curve.low <= curve.expected) & (curve.expected <= curve.high))[full].all()
        assert curve.error < 0.02


@pytest.mark.parametrize(
    "depth, rank, given", [*itertools.product((None, 2), (1, 3, None), ("accepted path", "any path"))]
)
def test_reliability_is_that_of_a_loop(depth, rank, given):
    chunks = [random_chunk(50 + i) for i in range(3)]
    edges = (0.0, 0.1, 0.25, 0.6, 1.0)
    table = reliability_table(chunks, depth=depth, rank=rank, given=given, bins=edges)
    promises = []
    for chunk in chunks:
        for d in range(chunk.log_probs.shape[1]) if depth is None else [depth - 1]:
            for scores, came, _ in loop_cases(chunk, d, given):
                for k, s in enumerate(scores[:-1]):
                    if rank in (None, k + 1):
                        promises.append((math.exp(s), k == came))
    for i, row in enumerate(table.records()):
        last = i == len(edges) - 2
        held = [(p, hit) for p, hit in promises if edges[i] <= p and (p < edges[i + 1] or last)]
        assert row["n"] == len(held)
        if held:
            np.testing.assert_allclose(row["expected"], np.mean([p for p, _ in held]), **ROUNDING)
            np.testing.assert_allclose(row["realised"], np.mean([hit for _, hit in held]), **ROUNDING)
    assert table.n.sum() == len(promises) > 0


def test_positions_past_the_end_or_without_a_draft_do_not_count():
    draft = np.log([[[0.5], [0.5]], [[0.5], [0.5]]]), np.full((2, 2, 1), 1)
    rows = calibration_table(chunk_of([[0, 1, 1]], [draft]), vocab_size=9).records()
    assert [row["n"] for row in rows] == [2, 1, 2, 1]
    draft[0][1] = -np.inf
    rows = calibration_table(chunk_of([[0, 1, 1]], [draft]), vocab_size=9).records()
    assert [row["n"] for row in rows] == [1, 1, 1, 1]
    none = chunk_of([[0]], [(np.zeros((0, 2, 3)), np.zeros((0, 2, 3)))])
    nothing = calibration_table(none, vocab_size=9).records()
    assert [(row["n"], row["temperature"], row["brier"]) for row in nothing] == [(0, None, None)] * 4


CHUNK = random_chunk(0, prompts=2, longest=9)


@pytest.mark.parametrize(
    "call, error, message",
    [
        (
            lambda: calibration_table(CHUNK),
            ValueError,
            r"vocab_size must be given for a trace without a manifest, got None",
        ),
        (lambda: calibration_table(CHUNK, vocab_size=0), ValueError, r"vocab_size must be in 1 …"),
        (
            lambda: calibration_table(CHUNK, vocab_size=5),
            ValueError,
            r"vocab_size must be that of the drafter's distributions, got 5: the trace has that many candidates",
        ),
        (lambda: calibration_table([], vocab_size=6), ValueError, r"trace must have at least one chunk, got none"),
        (
            lambda: calibration_table(iter([CHUNK]), vocab_size=6),
            TypeError,
            r"gone through more than once, such as a list, got list_it",
        ),
        (lambda: calibration_table(3, vocab_size=6), TypeError, r"trace must have a trace's arrays.*got int"),
        (lambda: calibration_table((3,), vocab_size=6), TypeError, r"trace\[0\] must have a trace's arrays, got int"),
        (lambda: calibration_table(CHUNK, vocab_size=6, level=2), ValueError, r"level must be over 0"),
        (
            lambda: calibration_table([CHUNK, random_chunk(0, L=3)], vocab_size=6),
            ValueError,
            r"trace\[1\]\.log_probs must have L, K = \(4, 5\), as the chunks before, got \(3, 5\)",
        ),
        (
            lambda: choices_of(replace(CHUNK, draft_token_ids=CHUNK.draft_token_ids[..., :2])),
            ValueError,
            r"log_probs and draft_token_ids must have one shape \(M, L, K\)",
        ),
        (
            lambda: choices_of(replace(CHUNK, token_offsets=CHUNK.token_offsets + 1)),
            ValueError,
            r"token_offsets must rise from 0 to \d+ in 3 steps",
        ),
        (
            lambda: choices_of(replace(CHUNK, position_offsets=CHUNK.position_offsets[:2])),
            ValueError,
            r"position_offsets must rise from 0 to \d+ in 3 steps",
        ),
        (
            lambda: choices_of(replace(CHUNK, prompt_lens=CHUNK.prompt_lens + 1)),
            ValueError,
            r"position_offsets must give prompt 0 a position for each new token but the last, \d+, got \d+",
        ),
        (lambda: reliability_table(CHUNK, depth=5), ValueError, r"depth must be in 1 … 4, as the trace has it, got 5"),
        (lambda: reliability_table(CHUNK, rank=0), ValueError, r"rank must be in 1 … 5, as the trace has it, got 0"),
        (lambda: reliability_table(CHUNK, given="no path"), ValueError, r"given must be one of .*, got 'no path'"),
        (lambda: reliability_table(CHUNK, bins=[0, 0.5]), ValueError, r"bins must rise from 0 to 1, got \[0, 0.5\]"),
    ],
)
def test_calibration_refuses(call, error, message):
    with pytest.raises(error, match=message):
        call()


def test_chunks_are_gone_through_in_order():
    assert list(chunks_of(CHUNK)) == [CHUNK]
    assert list(chunks_of([CHUNK, CHUNK])) == [CHUNK, CHUNK]
