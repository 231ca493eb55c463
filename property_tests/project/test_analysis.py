"""Statistics of rounds: worked by hand, by enumeration, and by simulation where the answer is known."""

import itertools
import json
import math
import re
import subprocess
import sys

import numpy as np
import pytest

from ddtree.analysis.acceptance import (
    acceptance_table,
    length_table,
    rank_table,
    tau_by_budget,
    tau_interval,
    tau_table,
    wilson_interval,
)
from ddtree.analysis.comparison import compare
from ddtree.analysis.intervals import percentile_interval, resample_sums, sign_test
from ddtree.analysis.rounds import concatenate_rounds, round_table
from ddtree.analysis.speedup import cost_table, speedup_table
from ddtree.drafters import NgramDrafter, NoiseLaw, OracleDrafter
from ddtree.engine import Engine, Generation, ScriptedTarget
from ddtree.property_tests.project.made_traces import a_round, rounds_of

CHAIN, FORK = [-1, 0, 1, 2], [-1, 0, 0, 1]


def hand_worked_rounds():
    """Six rows, each for one reason; what each offers (o) and accepts (a) at depths 1, 2, 3 stands beside it."""
    return [
        a_round(
            [CHAIN, FORK, CHAIN],
            [[0, 1], [0, 2], []],  # o o . / a . .   o . . / a . . (node 2 has no child)   inert: no round
            [False, False, True],
        ),
        a_round(
            [CHAIN, CHAIN],
            [[0, 1], [0]],  # cut at depth 1: o . . / a . .   cut at the root: . . .
            [True, True],
        ),
        a_round([CHAIN], [[0, 1, 2, 3]], [False]),  # to the end, where nothing is left to offer: o o o / a a a
        a_round([[-1, 0, 1, 2]], [[0]], [False], counts=np.array([1])),  # no tree but its root: . . .
    ]


def test_acceptance_table_worked_by_hand():
    table = acceptance_table(hand_worked_rounds())
    assert table.depth.tolist() == [1, 2, 3]
    assert table.n_offered.tolist() == [4, 2, 1]
    assert table.n_accepted.tolist() == [4, 1, 1]
    assert table.rate.tolist() == [1.0, 0.5, 1.0]
    assert table.n_rounds == 6
    assert table.tau == (2 + 2 + 2 + 1 + 4 + 1) / 6
    np.testing.assert_array_equal([table.low, table.high], wilson_interval([4, 1, 1], [4, 2, 1]))


def test_depth_that_no_round_offers_has_no_rate():
    table = acceptance_table([a_round([CHAIN], [[0]], [False])])
    assert (table.n_offered.tolist(), table.n_accepted.tolist()) == ([1, 0, 0], [0, 0, 0])
    rows = json.loads(json.dumps(table.records(), allow_nan=False))
    assert rows[1] == {"depth": 2, "n_offered": 0, "n_accepted": 0, "rate": None, "low": None, "high": None}


def test_no_rounds_give_empty_tables():
    table = acceptance_table([])
    assert (len(table.depth), table.n_rounds) == (0, 0)
    assert math.isnan(table.tau)
    assert rank_table([]).records() == []
    assert length_table({}).records() == []
    assert length_table({"none": []}).records() == [
        dict(policy="none", tokens=1, n_rounds=0, share=None, low=None, high=None)
    ]
    (row,) = tau_table([("none", 3, [])]).records()
    assert {row[c] for c in ("tau", "low", "high", "expected", "nodes", "efficiency")} == {None}
    assert speedup_table([("none", 3, [])], lambda n, c: 1.0).records()[0]["speedup"] is None


@pytest.fixture(scope="module")
def noisy():
    """A generation by a tree of a noisy oracle, whose rounds keep nodes of several ranks."""
    texts = [np.arange(90) * 7 % 11, np.arange(90) * 5 % 13, np.arange(90) * 3 % 16]
    oracle = OracleDrafter([t[20:] for t in texts], 16, noise=NoiseLaw([[0.6, 0.2, 0.1]]))
    return Engine(ScriptedTarget(texts, 16), oracle, depth=3, budget=20).generate([t[:20] for t in texts], 60)


def test_generation_its_rounds_and_their_table_count_alike(noisy):
    table = acceptance_table(noisy)
    assert table.records() == acceptance_table(iter(noisy.rounds)).records()
    assert table.records() == acceptance_table(round_table(noisy)).records()
    assert (table.tau, table.n_rounds) == (noisy.tau, noisy.num_rounds)


def test_tables_are_the_counts_of_a_walk_over_the_rounds(noisy):
    ranks: list[int] = []
    lengths: list[int] = []
    offered: list[int] = []
    accepted: list[int] = []
    for r in noisy.rounds:
        for b in range(len(r.request_ids)):
            path = [i for i in r.acceptance.node_indices[b].tolist() if i >= 0]
            ranks += [int(r.tree.ranks[b, i]) + 1 for i in path[1:]]
            lengths.append(len(path))
            accepted += range(1, len(path))
            leaf = path[-1] not in r.tree.parents[b].tolist()
            offered += range(1, len(path) + (not leaf and not r.acceptance.finished[b]))
    table = acceptance_table(noisy)
    assert table.n_offered.tolist() == [offered.count(d) for d in (1, 2, 3)]
    assert table.n_accepted.tolist() == [accepted.count(d) for d in (1, 2, 3)]
    by_rank = rank_table(noisy)
    assert len({*ranks}) >= 3
    assert by_rank.rank.tolist() == list(range(1, max(ranks) + 1))
    assert by_rank.n_accepted.tolist() == [ranks.count(r) for r in by_rank.rank]
    assert by_rank.share.tolist() == [ranks.count(r) / len(ranks) for r in by_rank.rank]
    assert sum(rank_table(noisy, depth=d).n_accepted.sum() for d in (1, 2, 3)) == len(ranks)
    histogram = length_table({"tree": noisy, "same": round_table(noisy)})
    assert histogram.policy == ("tree",) * 4 + ("same",) * 4
    assert histogram.tokens.tolist() == [1, 2, 3, 4] * 2
    assert histogram.n_rounds.tolist() == [lengths.count(n) for n in (1, 2, 3, 4)] * 2
    assert histogram.share.sum() == pytest.approx(2)


def test_rank_and_length_tables_worked_by_hand():
    # rounds that kept nodes of ranks (1, 2), (3) and none, of trees of depth 2
    rounds = rounds_of([0, 0, 1], [3, 2, 1], L=2)
    rounds.ranks[:] = [[0, 1], [2, -1], [-1, -1]]
    table = rank_table(rounds)
    assert [(row["rank"], row["n_accepted"], row["share"]) for row in table.records()] == [
        (1, 1, pytest.approx(1 / 3)),
        (2, 1, pytest.approx(1 / 3)),
        (3, 1, pytest.approx(1 / 3)),
    ]
    assert rank_table(rounds, depth=1).n_accepted.tolist() == [1, 0, 1]
    assert rank_table(rounds, depth=2).n_accepted.tolist() == [0, 1]
    low, high = wilson_interval(1, 3)
    assert (table.low[0], table.high[0]) == (low, high)
    lengths = length_table({"tree": rounds})
    assert (lengths.tokens.tolist(), lengths.n_rounds.tolist()) == ([1, 2, 3], [1, 1, 1])


def test_rank_table_refuses_a_depth_that_no_round_has(noisy):
    with pytest.raises(ValueError, match=r"depth must be in 1 … 3, the rounds' limit, got 4"):
        rank_table(noisy, depth=4)


def test_tau_table_worked_by_hand():
    # prompt 0: rounds of 1 and 3 tokens; prompt 1: one of 4. Three nodes each, hence four checked.
    (row,) = tau_table([("tree", 3, rounds_of([0, 0, 1], [1, 3, 4], nodes=3))]).records()
    assert row["tau"] == row["expected"] - 0.5 == 8 / 3
    assert (row["nodes"], row["efficiency"]) == (3, 8 / 12)
    assert (row["n_prompts"], row["n_rounds"], row["n_tokens"]) == (2, 3, 8)
    # each prompt alone is drawn in a quarter of the cases: τ 2 or 4
    assert (row["low"], row["high"]) == (2, 4)
    assert (row["efficiency_low"], row["efficiency_high"]) == (0.5, 1)


def test_one_token_decoding_and_a_chain_always_accepted_have_efficiency_one():
    table = tau_table([("alone", 0, rounds_of([0, 1], [1, 1], nodes=0)), ("chain", 7, rounds_of([0, 1], [8, 8]))])
    assert table.efficiency.tolist() == [1, 1]


@pytest.mark.parametrize(
    "k, n, low, high",
    [
        (8, 10, 0.4902, 0.9433),
        (0, 10, 0.0, 0.2775),
        (10, 10, 0.7225, 1.0),
        (1, 1, 0.2065, 1.0),
        (5, 10, 0.2366, 0.7634),
    ],
)
def test_wilson_interval_is_the_published_one(k, n, low, high):
    assert [round(float(x), 4) for x in wilson_interval(k, n)] == [low, high]


def test_wilson_interval_holds_the_rate_and_widens_with_the_level():
    k, n = np.arange(31), np.full(31, 30)
    low, high = wilson_interval(k, n)
    assert ((low >= 0) & (low <= k / n) & (k / n <= high) & (high <= 1)).all()
    wider = wilson_interval(k, n, level=0.99)
    assert ((wider[0] <= low) & (wider[1] >= high)).all()
    assert np.isnan(wilson_interval(0, 0)).all()


@pytest.mark.parametrize(
    "k, n, message",
    [
        (5, 3, "successes must be in 0 … trials, got 5 of 3"),
        ([1, -1], [2, 2], "successes must be in 0 … trials, got -1 of 2"),
        (1, -1, "successes must be in 0 … trials, got 1 of -1"),
        (np.nan, 2, "successes must be in 0 … trials, got nan of 2"),
        (1, np.inf, "successes must be in 0 … trials, got 1 of inf"),
        ([1, 2], [3, 4, 5], r"successes and trials must have shapes that broadcast, got \(2,\) and \(3,\)"),
    ],
)
def test_wilson_interval_of_what_is_no_count(k, n, message):
    with pytest.raises(ValueError, match=message):
        wilson_interval(k, n)


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_wilson_interval_covers_the_truth(p):
    """Exactly, by summing the binomial: near the level on average over n, never far below."""
    shares = []
    for n in range(20, 60):
        low, high = wilson_interval(np.arange(n + 1), np.full(n + 1, n))
        mass = np.array([math.comb(n, k) * p**k * (1 - p) ** (n - k) for k in range(n + 1)])
        shares.append(mass[(low <= p) & (p <= high)].sum())
    assert 0.94 < np.mean(shares) < 0.965
    assert min(shares) > 0.91


@pytest.mark.parametrize("level", [0, 1, 95])
def test_level_is_a_share(level):
    message = rf"level must be over 0 and below 1, got {level}"
    one = rounds_of([0], [1])
    for call in (
        lambda: wilson_interval(1, 2, level=level),
        lambda: percentile_interval([1.0], level=level),
        lambda: acceptance_table([], level=level),
        lambda: length_table({}, level=level),
        lambda: tau_table([], level=level),
        lambda: compare(one, one, level=level),
        lambda: speedup_table([], lambda n, c: 1.0, level=level),
    ):
        with pytest.raises(ValueError, match=message):
            call()


def test_resampled_sums_are_of_whole_prompts_in_any_block_size(monkeypatch):
    columns = np.array([[1.0, 10], [2, 20], [4, 40]])
    draws = resample_sums(columns, seed=3, resamples=500)
    assert draws.shape == (500, 2)
    assert (draws[:, 1] == 10 * draws[:, 0]).all()  # a prompt's columns stay together
    possible = {sum(c) for c in itertools.product((1, 2, 4), repeat=3)}
    assert {*draws[:, 0].tolist()} == possible
    # the mean of a sum is that of the prompts, within 5 standard errors
    assert abs(draws[:, 0].mean() - 7) < 5 * draws[:, 0].std() / math.sqrt(500)
    monkeypatch.setattr("ddtree.analysis.intervals._BLOCK", 7)
    np.testing.assert_array_equal(resample_sums(columns, seed=3, resamples=500), draws)
    assert resample_sums(columns[:1]).shape == (0, 2)
    with pytest.raises(ValueError, match="resamples must be at least 1, got 0"):
        resample_sums(columns, resamples=0)


def test_tau_interval_draws_whole_requests():
    # request 0 emits 4 tokens a round, request 1 one; each has two rounds
    rounds = [a_round([CHAIN, CHAIN], [[0, 1, 2, 3], [0]], [False, False]) for _ in range(2)]
    tau, low, high = tau_interval(rounds, level=0.9)
    assert (tau, low, high) == (2.5, 1.0, 4.0)  # both ends are drawn in a quarter of the cases
    assert tau_interval(rounds, seed=1) == tau_interval(rounds, seed=1)
    alike = [a_round([CHAIN, CHAIN], [[0, 1], [0, 1]], [False, False])]
    assert tau_interval(alike) == (2.0, 2.0, 2.0)


def test_one_request_has_no_interval():
    tau, low, high = tau_interval([a_round([CHAIN], [[0, 1]], [False])])
    assert tau == 2.0
    assert math.isnan(low)
    assert math.isnan(high)


def simulated_prompts(rng, n, shift=0.0):
    """Rounds of n prompts, each with a rate of its own; over all prompts, τ is 2.5 + shift but for the draw."""
    rate = np.repeat(rng.choice([1.0, 2.0], n), 12)  # tokens beyond the first, on average
    return rounds_of(np.repeat(np.arange(n), 12), 1 + rng.poisson(rate + shift), L=40)


def test_tau_interval_covers_the_truth_where_an_interval_over_rounds_does_not():
    rng = np.random.default_rng(0)
    over_prompts, over_rounds, runs = 0, 0, 300
    for _ in range(runs):
        rounds = simulated_prompts(rng, 30)
        _, low, high = tau_interval(rounds, resamples=400)
        over_prompts += low <= 2.5 <= high
        error = 1.96 * rounds.tokens.std() / math.sqrt(len(rounds))
        over_rounds += abs(rounds.tau - 2.5) <= error
    # the standard error of 95 % in 300 runs is 1.3 %; the percentile bootstrap of 30 prompts lacks some 2 %
    assert 0.89 <= over_prompts / runs <= 0.98
    assert over_rounds / runs < 0.89


def exact_sign_test(wins, losses):
    """By enumerating every outcome of as many fair coins."""
    n, seen = wins + losses, abs(wins - losses)
    outcomes = [sum(signs) for signs in itertools.product((-1, 1), repeat=n)]
    return sum(abs(total) >= seen for total in outcomes) / len(outcomes)


def test_sign_test_is_the_enumeration():
    for wins in range(8):
        for losses in range(8):
            assert sign_test(wins, losses) == exact_sign_test(wins, losses)


def test_sign_test_of_many_is_exact_and_of_nothing_says_nothing():
    assert sign_test(0, 0) == 1
    assert sign_test(600, 600) == 1
    assert sign_test(2_000, 0) == 0.0  # below what a float holds
    assert sign_test(1_060, 0) == 2.0 ** (1 - 1_060)
    # the normal approximation with its continuity correction, 1 %
    n, k = 4_000, 1_930
    z = (n / 2 - k - 0.5) / math.sqrt(n / 4)
    assert sign_test(n - k, k) == pytest.approx(math.erfc(z / math.sqrt(2)), rel=0.01)
    with pytest.raises(ValueError, match="wins and losses must be at least 0, got -1 and 2"):
        sign_test(-1, 2)


def test_comparison_worked_by_hand():
    # prompt 0: a emits 6 in 2, b 6 in 3; prompt 1: 4 in 2 and 2 in 1, the same τ; prompt 2: 3 in 3 against 3 in 1
    a = rounds_of([0, 0, 1, 1, 2, 2, 2], [3, 3, 1, 3, 1, 1, 1])
    b = rounds_of([0, 0, 0, 1, 2], [2, 2, 2, 2, 3])
    found = compare(a, b)
    assert (found.n_prompts, found.wins, found.losses, found.ties, found.p_value) == (3, 1, 1, 1, 1.0)
    assert (found.tau_a, found.tau_b) == (13 / 7, 11 / 5)
    assert found.difference == 13 / 7 - 11 / 5
    assert found.ratio == pytest.approx(65 / 77)
    # every draw of three prompts
    sums = np.array([[6, 2, 6, 3], [4, 2, 2, 1], [3, 3, 3, 1]])
    differences = [
        t[0] / t[1] - t[2] / t[3] for t in (sums[list(c)].sum(0) for c in itertools.product(range(3), repeat=3))
    ]
    assert found.low == pytest.approx(min(differences))  # one draw in 27, hence beyond 2.5 %
    assert found.high == pytest.approx(max(differences))
    assert str(found).splitlines()[0].split()[:5] == ["n_prompts", "wins", "losses", "ties", "p_value"]
    assert compare(b, a).difference == -found.difference


def test_a_policy_against_itself_is_all_ties():
    rounds = simulated_prompts(np.random.default_rng(1), 9)
    found = compare(rounds, rounds)
    assert (found.ties, found.p_value, found.low, found.high) == (9, 1.0, 0.0, 0.0)


def test_paired_interval_covers_the_difference_and_is_narrower_than_the_policies_apart():
    rng = np.random.default_rng(2)
    covered, narrower, runs = 0, 0, 200
    for _ in range(runs):
        n = 30
        rate = np.repeat(rng.choice([1.0, 2.0], n), 12)
        prompt = np.repeat(np.arange(n), 12)
        a, b = (rounds_of(prompt, 1 + rng.poisson(rate + extra), L=40) for extra in (0.3, 0.0))
        found = compare(a, b, resamples=400)
        covered += found.low <= 0.3 <= found.high
        _, low, high = tau_interval(a, resamples=400)
        narrower += found.high - found.low < (high - low) * math.sqrt(2)
    assert 0.88 <= covered / runs <= 0.99
    assert narrower == runs


def test_comparison_wants_one_set_of_prompts():
    a, b = rounds_of([0, 1], [1, 2]), rounds_of([0, 2], [1, 2])
    with pytest.raises(ValueError, match=r"a and b must have rounds of the same prompts, got prompt 1 in a alone"):
        compare(a, b)
    with pytest.raises(ValueError, match=r"the same prompts, got no rounds"):
        compare([], [])
    with pytest.raises(ValueError, match=r"got prompt 0 in b alone"):
        compare([], a)


def test_speedup_worked_by_hand():
    # prompt 0: contexts 10 and 13, 3 and 1 tokens; prompt 1: context 5, 4 tokens; 8 nodes and 0.5 s of drafting each
    rounds = rounds_of([0, 0, 1], [3, 1, 4], nodes=8, prefix_len=[10, 13, 5])
    asked = []

    def seconds(nodes, context):
        asked.append((nodes, context))
        return 1 + nodes / 8 + context / 10

    (row,) = speedup_table([("tree", 8, rounds)], seconds, draft_seconds=0.5).records()
    spent = 3 * 2.5 + 2.8
    alone = 4 * 1 + (10 + 11 + 12 + 13) / 10 + 4 * 1 + (5 + 6 + 7 + 8) / 10
    assert row["round_seconds"] == pytest.approx(spent / 3)
    assert row["speedup"] == pytest.approx(alone / spent)
    assert len(asked) == len({*asked})
    assert {n for n, _ in asked} == {0, 8}
    # by prompt: the first's and the second's speed-up are the ends
    ends = sorted([(4 + 4.6) / (2 * 2.5 + 2.3), (4 + 2.6) / (2.5 + 0.5)])
    assert [row["low"], row["high"]] == pytest.approx(ends)
    fixed = speedup_table([("tree", 8, rounds)], lambda n, c: 2.0, step_seconds=1.0)
    assert fixed.speedup[0] == pytest.approx(8 / 6)


class LinearCosts:
    """A cost model's two names: seconds of a round, drafting included, from arrays to an array."""

    draft_seconds = 0.5

    def seconds(self, nodes, context):
        return 0.5 + 1 + nodes / 8 + 0 * context


def test_a_cost_model_counts_its_own_drafting_once():
    rounds = rounds_of([0, 1], [2, 2], nodes=8, prefix_len=[1, 1])
    a = speedup_table([("t", 8, rounds)], LinearCosts())
    b = speedup_table([("t", 8, rounds)], lambda n, c: 1 + n / 8, draft_seconds=0.5)
    assert a.speedup.tolist() == b.speedup.tolist() == [2 / 2.5]
    assert cost_table(LinearCosts(), [0, 8], [3, 4]).records() == [
        dict(context=3, nodes=0, seconds=1.0),
        dict(context=3, nodes=8, seconds=2.0),
        dict(context=4, nodes=0, seconds=1.0),
        dict(context=4, nodes=8, seconds=2.0),
    ]


def test_break_even_says_only_what_was_run():
    # τ 2, 3, 4, 4 at budgets 1, 4, 16, 64; a pass takes 1 + nodes / 16
    runs = [("tree", b, rounds_of([0], [t], nodes=b, prefix_len=[0])) for b, t in ((16, 4), (1, 2), (64, 4), (4, 3))]
    table = speedup_table([*runs, ("slow", 64, runs[2][2])], lambda n, c: 1 + n / 16)
    assert table.speedup.tolist() == [4 / 2, 2 / 1.0625, 4 / 5, 3 / 1.25, 4 / 5]
    first, second = table.break_even().records()
    assert first == dict(policy="tree", best_budget=4.0, best_speedup=2.4, pays_to=16.0, fails_at=64.0)
    assert second == dict(policy="slow", best_budget=64.0, best_speedup=0.8, pays_to=None, fails_at=64.0)
    assert table.break_even(2.0).pays_to[0] == 16  # exactly as fast is fast enough
    still = table.break_even(0.5).records()[0]
    assert (still["pays_to"], still["fails_at"]) == (64.0, None)


@pytest.mark.parametrize(
    "call, error, message",
    [
        (lambda r: speedup_table([("t", 1, r)], 3), TypeError, r"costs must be a CostModel or a function .* got int"),
        (
            lambda r: speedup_table([("t", 1, r)], lambda n, c: -1.0),
            ValueError,
            r"costs must give seconds .* got -1.0 at",
        ),
        (
            lambda r: speedup_table([("t", 1, r)], lambda n, c: math.nan),
            ValueError,
            r"costs must .* got nan at \(7, 4\)",
        ),
        (
            lambda r: speedup_table([], lambda n, c: 1.0, draft_seconds=-1),
            ValueError,
            r"draft_seconds must be finite .* -1",
        ),
        (
            lambda r: speedup_table([], lambda n, c: 1.0, step_seconds=0),
            ValueError,
            r"step_seconds must be finite .* got 0",
        ),
        (
            lambda r: speedup_table([("t", 1, rounds_of([0], [1]))], lambda n, c: 1.0),
            ValueError,
            r"runs must know each round's context: make them with round_table\(generation, prompt_lens\)",
        ),
    ],
)
def test_speedup_refuses(call, error, message):
    with pytest.raises(error, match=message):
        call(rounds_of([0], [1], prefix_len=[4]))


@pytest.fixture(scope="module")
def sweep():
    texts = [np.arange(40 + 9 * i) % 10 for i in range(3)]
    target, oracle = ScriptedTarget(texts, 10), OracleDrafter([t[9:] for t in texts], 10)

    def run(policy, budget):
        return Engine(target, oracle, depth=min(budget, 4), budget=budget).generate(
            [t[:9] for t in texts], 26, mode=policy
        )

    return tau_by_budget(run, {"chain": [1, 4], "tree": [1, 4, 9]})


def test_sweep_has_a_row_a_run(sweep):
    assert sweep.policy == ("chain", "chain", "tree", "tree", "tree")
    assert sweep.budget.tolist() == [1, 4, 1, 4, 9]
    # 25 tokens after the prefill's, in rounds of 1 + depth: 13 rounds of two (the last cut), 5 of five
    assert sweep.n_tokens.tolist() == [75] * 5
    assert sweep.n_rounds.tolist() == [39, 15, 39, 15, 15]
    assert sweep.tau.tolist() == [75 / 39, 5.0, 75 / 39, 5.0, 5.0]
    row = sweep.records()[1]
    assert (row["policy"], row["budget"], row["tau"], row["low"], row["high"]) == ("chain", 4, 5.0, 5.0, 5.0)


def test_concatenated_rounds_of_other_depths_count_together():
    shallow, deep = rounds_of([0], [2], L=1), rounds_of([1], [4], L=3)
    table = acceptance_table(concatenate_rounds([shallow, deep]))
    assert table.n_accepted.tolist() == [2, 1, 1]


def test_statistics_need_no_matplotlib():
    code = """
import sys
import ddtree.analysis.acceptance, ddtree.analysis.calibration, ddtree.analysis.comparison
import ddtree.analysis.pay, ddtree.analysis.speedup, ddtree.analysis.figures
assert "matplotlib" not in sys.modules
"""
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True)


def test_tables_and_generations_print_for_people():
    generation = Engine(ScriptedTarget([b"abcabcabcabc"], 256), NgramDrafter(), depth=2, budget=2).generate(
        [b"abcabc"], 6
    )
    assert re.fullmatch(r"Generation\(1 prompts, 6 tokens, \d rounds, tau=\d\.\d\d\)", repr(generation))
    first, *rows = str(acceptance_table(generation)).splitlines()
    assert first.split() == ["depth", "n_offered", "n_accepted", "rate", "low", "high"]
    assert [row.split()[0] for row in rows] == ["1", "2"]
    assert str(tau_by_budget(lambda policy, budget: Generation([], []), {"chain": [0]})).split()[13:16] == [
        "chain",
        "0",
        "-",
    ]
    small = str(compare(rounds_of(range(40), [2] * 40), rounds_of(range(40), [1] * 40)))
    assert "1.82e-12" in small
