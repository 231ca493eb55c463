"""Laws of the drafters: what they draft is a draft, and what each of them promises about it."""

import itertools
import math
from collections import defaultdict

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import event, given

from ddtree import reference
from ddtree.drafters import NgramDrafter, NoiseLaw, OracleDrafter
from ddtree.engine import Engine, ScriptedTarget
from ddtree.property_tests.compare import assert_same
from ddtree.property_tests.targets import VOCABULARY
from ddtree.protocols import DraftContext

TEXT = np.random.default_rng(1).integers(0, VOCABULARY, 400).astype(np.int32)
TEXTS = st.lists(st.integers(0, 3), min_size=1, max_size=30)
DEVIATIONS = 5.0
"""Standard deviations that a count may be off on a fixed seed; by chance it is once in some million seeds."""


def context_of(rows, *, began=None, ended=()):
    """The context of requests with these committed tokens, by request; all begin now where nothing else is said."""
    tokens = [np.array(row, np.int32) for row in rows.values()]
    return DraftContext(
        request_ids=list(rows),
        tokens=tokens,
        root_token_ids=np.array([row[-1] for row in tokens], np.int32),
        hidden_states=[{} for _ in rows],
        began=list(rows) if began is None else list(began),
        ended=list(ended),
    )


def assert_draft(log_probs, token_ids, shape):
    """A draft of this shape, or of fewer candidates, that says at most what it may."""
    assert (log_probs.dtype, token_ids.dtype) == (np.float32, np.int32)
    assert log_probs.shape == token_ids.shape
    assert log_probs.shape[:2] == shape[:2]
    assert 1 <= log_probs.shape[2] <= shape[2]
    assert (log_probs <= 0).all()
    drafted = log_probs > -np.inf
    for row, ids, used in zip(*(a.reshape(-1, a.shape[-1]) for a in (log_probs, token_ids, drafted)), strict=True):
        count = int(used.sum())
        assert used[:count].all()
        assert (np.diff(row[:count]) <= 0).all()
        assert len(set(ids[:count].tolist())) == count
        assert ((ids[:count] >= 0) & (ids[:count] < VOCABULARY)).all()
        assert (ids[count:] == -1).all()
        # each float32 log-prob is off by at most half of its last place, and so the sum of them
        assert math.fsum(np.exp(row[:count].astype(np.float64))) <= 1 + count * np.finfo(np.float32).eps


def oracle_row(drafter, n, depth, topk, *, request=0, prompt=3):
    """Drafts of one request with n new tokens committed."""
    tokens = [0] * prompt + drafter.continuations[request][:n].tolist()
    drafter(context_of({request: tokens[: prompt + 1]}), 1, 1)  # where the drafter sees how long the prompt is
    log_probs, token_ids = drafter(context_of({request: tokens}, began=[]), depth, topk)
    return log_probs[0], token_ids[0]


@given(
    length=st.integers(1, 12),
    n=st.integers(1, 12),
    depth=st.integers(0, 8),
    topk=st.integers(1, VOCABULARY + 4),
    past_end=st.none() | st.integers(0, VOCABULARY - 1),
)
def test_oracle_drafts_token_n_plus_depth_first_and_nothing_unknown(length, n, depth, topk, past_end):
    n = min(n, length)
    drafter = OracleDrafter([TEXT[:length]], VOCABULARY, past_end=past_end)
    log_probs, token_ids = oracle_row(drafter, n, depth, topk)
    assert_draft(log_probs[None], token_ids[None], (1, depth, topk))
    assert log_probs.shape[1] == min(topk, VOCABULARY)
    for d in range(1, depth + 1):
        if n - 1 + d < length or past_end is not None:
            wanted = TEXT[n - 1 + d] if n - 1 + d < length else past_end
            assert token_ids[d - 1, 0] == wanted
            assert (log_probs[d - 1] > -np.inf).all()
        else:
            assert (log_probs[d - 1] == -np.inf).all()


@given(depth=st.integers(1, 40), extra=st.integers(0, 8), topk=st.integers(1, VOCABULARY))
def test_oracle_path_stands_before_every_decoy_at_any_depth(depth, extra, topk):
    log_probs, token_ids = OracleDrafter([TEXT], VOCABULARY)(context_of({0: [0, 0]}), depth, topk)
    tree = reference.build_tree(log_probs, token_ids, np.zeros(1, np.int32), budget=depth + extra)
    assert tree.token_ids[0, 1 : depth + 1].tolist() == TEXT[1 : depth + 1].tolist()
    assert tree.parents[0, : depth + 1].tolist() == list(range(-1, depth))
    assert tree.scores[0, depth] == pytest.approx(np.log(0.5), rel=1e-6)


def test_oracle_reads_continuations_by_request():
    drafter = OracleDrafter({4: TEXT[:9], 2: TEXT[9:18]}, VOCABULARY)
    _, token_ids = drafter(context_of({2: [0, 0, TEXT[9]], 4: [0, TEXT[0]]}), 3, 1)
    assert token_ids[:, :, 0].tolist() == [TEXT[10:13].tolist(), TEXT[1:4].tolist()]


@pytest.mark.parametrize(
    "make", [NgramDrafter, lambda: OracleDrafter([TEXT] * 2, VOCABULARY)], ids=["n-gram", "oracle"]
)
def test_what_ended_is_forgotten(make):
    drafter = make()
    [kept] = [value for name, value in vars(drafter).items() if name in ("_indices", "_prompt_lens")]
    drafter(context_of({0: [0, 0], 1: [0, 0]}), 3, 2)
    assert set(kept) == {0, 1}
    drafter(context_of({1: [0, 0, TEXT[1]]}, began=[], ended=[0]), 3, 2)
    assert set(kept) == {1}
    drafter.forget([1, 7])
    assert set(kept) == set()


LAW = NoiseLaw([[0.5, 0.25], [0.2, 0.0, 0.3], [0.0]])


def rank_of_truth(drafter, n, depth, topk=4):
    """Rank of the true token at each depth, None where it is absent."""
    log_probs, token_ids = oracle_row(drafter, n, depth, topk)
    assert_draft(log_probs[None], token_ids[None], (1, depth, topk))
    truths = drafter.continuations[0][n : n + depth]
    return [ids.tolist().index(t) if t in ids else None for ids, t in zip(token_ids, truths.tolist(), strict=True)]


def test_noise_law_is_met_by_depth():
    drafter = OracleDrafter([TEXT], VOCABULARY, noise=LAW, seed=3)
    seen = np.array([[-1 if r is None else r for r in rank_of_truth(drafter, n, 4)] for n in range(1, 390)])
    for depth, row in enumerate([*LAW.rank_probs, LAW.rank_probs[-1]]):
        for rank, p in itertools.zip_longest(range(-1, 4), [1 - sum(row), *row], fillvalue=0.0):
            count, sigma = (seen[:, depth] == rank).sum(), math.sqrt(len(seen) * p * (1 - p))
            assert abs(count - len(seen) * p) <= DEVIATIONS * sigma, (depth, rank, count)


def test_rank_of_probability_zero_is_never_taken():
    law = NoiseLaw([[0.0, 0.5, 0.0, 0.25]])
    chances = (0.0, 0.25, 0.5, 0.625, 0.75, 0.875)
    assert [law.rank(1, chance) for chance in chances] == [1, 1, 3, 3, None, None]


def test_noise_depends_on_seed_request_and_position_alone():
    rows = {0: [0, 0, *TEXT[:9]], 1: [0, *TEXT[:9]], 2: [0, 0, *TEXT[:9]]}
    starts = {r: row[:-8] for r, row in rows.items()}

    def drafted(order, seed=7):
        drafter = OracleDrafter([TEXT] * 3, VOCABULARY, noise=NoiseLaw([[0.4, 0.2, 0.2]]), seed=seed)
        drafter(context_of({r: starts[r] for r in order}), 5, 3)
        _, token_ids = drafter(context_of({r: rows[r] for r in order}, began=[]), 5, 3)
        return dict(zip(order, token_ids.tolist(), strict=True))

    assert drafted([0, 1, 2]) == drafted([2, 0, 1])
    assert drafted([0])[0] == drafted([0, 1, 2])[0]
    assert drafted([0])[0] != drafted([0], seed=8)[0]
    assert drafted([0, 2])[0] != drafted([0, 2])[2]
    # the same position, drafted from one token further on, has the same rank
    drafter = OracleDrafter([TEXT], VOCABULARY, noise=NoiseLaw([[0.4, 0.2, 0.2]]), seed=7)
    assert rank_of_truth(drafter, 5, 6)[1:] == rank_of_truth(drafter, 6, 5)


@pytest.mark.parametrize(
    "law, topk, rounds",
    [
        (NoiseLaw([[1.0], [1.0], [0.0]]), 1, [3] * 8),  # two drafts and the bonus
        (NoiseLaw([[0.0, 1.0]]), 1, [1] * 24),  # the truth is second, and there is only a first
        (NoiseLaw([[0.0, 1.0]]), 2, [4] * 6),
        (NoiseLaw([[1.0], [0.0, 0.0, 1.0], [1.0]]), 3, [4] * 6),
    ],
)
def test_noise_law_makes_the_acceptance(law, topk, rounds):
    text = TEXT[:40]
    drafter = OracleDrafter([text[5:]], VOCABULARY, noise=law)
    engine = Engine(ScriptedTarget([text], VOCABULARY), drafter, depth=3, budget=39, topk=topk, backend="reference")
    assert engine.generate([text[:5]], 25).tokens_per_round[0].tolist() == rounds


RATES = (0.837, 0.669, 0.524, 0.3)
"""Unconditional, as a server reports them by position."""


@pytest.mark.parametrize("topk, budget, refused", [(1, 4, ()), (3, 120, (0.5, 0.25))])
def test_a_published_curve_is_what_a_run_accepts(topk, budget, refused):
    texts = np.random.default_rng(2).integers(0, VOCABULARY, (12, 420)).astype(np.int32)
    law = NoiseLaw.from_acceptance_rates(RATES, refused=refused)
    drafter = OracleDrafter([text[5:] for text in texts], VOCABULARY, noise=law, seed=11)
    assert "synthetic" in drafter.label
    engine = Engine(ScriptedTarget(texts, VOCABULARY), drafter, depth=4, budget=budget, topk=topk, backend="reference")
    run = engine.generate([text[:5] for text in texts], 400)
    # the last rounds of a request may be cut by its end
    lengths = np.concatenate([row[: len(row) - 4] for row in run.tokens_per_round])
    n = len(lengths)
    assert n > 1_000
    won_back = sum(refused)
    wanted, rate = [], 1.0
    for before, after in itertools.pairwise((1.0, *RATES)):
        rate *= after / before + (1 - after / before) * won_back
        wanted.append(rate)
    if not refused:
        np.testing.assert_allclose(wanted, RATES)
    for depth, p in enumerate(wanted, start=1):
        sigma = math.sqrt(n * p * (1 - p))
        assert abs((lengths > depth).sum() - n * p) <= DEVIATIONS * sigma, depth
    sigma = lengths.std() / math.sqrt(n)
    assert abs(lengths.mean() - (1 + sum(wanted))) <= DEVIATIONS * sigma


def test_a_curve_is_turned_into_steps_and_ends_with_its_last_depth():
    law = NoiseLaw.from_acceptance_rates([0.8, 0.8, 0.2], refused=[0.5])
    np.testing.assert_allclose(law.rank_probs, [[0.8, 0.1], [1.0, 0.0], [0.25, 0.375], [0.0, 0.5]])
    assert law.rank(99, 0.2) == 1  # beyond the curve, rank 1 of 2 candidates is all that is left
    assert NoiseLaw.from_acceptance_rates([0.5, 0.0, 0.0]).rank_probs == ((0.5,), (0.0,), (0.0,), (0.0,))


def test_law_of_a_truth_that_is_never_drafted_leaves_the_whole_vocabulary_but_it():
    drafter = OracleDrafter([TEXT], VOCABULARY, noise=NoiseLaw([[0.0]]))
    log_probs, token_ids = oracle_row(drafter, 2, 3, VOCABULARY)
    for d in range(3):
        assert sorted(token_ids[d, :-1].tolist()) == sorted({*range(VOCABULARY)} - {int(TEXT[2 + d])})
        assert log_probs[d, -1] == -np.inf


def test_vocabulary_of_one_token_has_no_decoys():
    log_probs, token_ids = OracleDrafter([[0] * 5], 1)(context_of({0: [0, 0]}), 2, 4)
    assert token_ids.tolist() == [[[0], [0]]]
    absent, _ = OracleDrafter([[0] * 5], 1, noise=NoiseLaw([[0.0]]))(context_of({0: [0, 0]}), 2, 4)
    assert (log_probs > -np.inf).all()
    assert (absent == -np.inf).all()


def test_figures_of_an_oracle_are_labelled_synthetic():
    for noise in (None, LAW):
        drafter = OracleDrafter([TEXT], VOCABULARY, noise=noise)
        assert drafter.synthetic
        assert "synthetic" in drafter.label
    assert not NgramDrafter().synthetic


def test_oracle_forgets_requests_that_ended():
    drafter = OracleDrafter([TEXT, TEXT], VOCABULARY)
    drafter(context_of({0: [0, TEXT[0]], 1: [0, TEXT[0]]}), 1, 1)
    drafter(context_of({1: [0, *TEXT[:2]]}, began=[], ended=[0]), 1, 1)
    with pytest.raises(ValueError, match=r"request 0 must be one that began"):
        drafter(context_of({0: [0, TEXT[0]]}, began=[]), 1, 1)


@pytest.mark.parametrize(
    "make, error, message",
    [
        (lambda: OracleDrafter([[1, 11]], 11), ValueError, r"continuations\[0\]\[1\] must be in 0 … 10, got 11"),
        (lambda: OracleDrafter({3: [-1]}, 11), ValueError, r"continuations\[3\]\[0\] must be in 0 … 10, got -1"),
        (lambda: OracleDrafter([[0.5]], 11), TypeError, r"continuations\[0\] must hold integer token ids"),
        (lambda: OracleDrafter([], 0), ValueError, r"vocab_size must be in 1 … \d+, got 0"),
        (lambda: OracleDrafter([], 11, past_end=11), ValueError, r"past_end must be in 0 … 10 .*, got 11"),
        (lambda: OracleDrafter([], 11, seed=-1), ValueError, r"seed must be in 0 … \d+, got -1"),
        (lambda: OracleDrafter([], 11)(context_of({0: [1, 2]}), 1, 1), ValueError, r"request 0 .* has a continuation"),
        (
            lambda: OracleDrafter([[1]], 11)(context_of({0: [1, 2]}, began=[]), 1, 1),
            ValueError,
            r"request 0 .* began with this drafter and has not ended, got another: have a drafter for each generation",
        ),
        (lambda: NoiseLaw([]), ValueError, r"rank_probs must have a row for depth 1"),
        (lambda: NoiseLaw([[0.5], [0.7, 0.4]]), ValueError, r"rank_probs\[1\], of depth 2, .* at most 1, got \[0.7"),
        (lambda: NoiseLaw([[-0.1]]), ValueError, r"rank_probs\[0\], of depth 1, must be probabilities"),
        (lambda: NoiseLaw([[math.nan]]), ValueError, r"rank_probs\[0\], of depth 1, must be probabilities"),
        (lambda: NoiseLaw.from_acceptance_rates([]), ValueError, r"rates must have one for depth 1, got none"),
        (
            lambda: NoiseLaw.from_acceptance_rates(0.5),
            TypeError,
            r"rates must be a sequence of probabilities, got float",
        ),
        (lambda: NoiseLaw.from_acceptance_rates("0.5"), TypeError, r"rates must be a sequence .*, got str"),
        (lambda: NoiseLaw.from_acceptance_rates((0.5, "x")), TypeError, r"rates\[1\] must be a number, got str 'x'"),
        (lambda: NoiseLaw.from_acceptance_rates([67.7]), ValueError, r"rates\[0\] must be a probability .*, got 67.7"),
        (lambda: NoiseLaw.from_acceptance_rates([math.nan]), ValueError, r"rates\[0\] must be finite, got nan"),
        (
            lambda: NoiseLaw.from_acceptance_rates([0.5, 0.4, 0.6]),
            ValueError,
            r"rates\[2\] must be at most rates\[1\] = 0.4, got 0.6",
        ),
        (
            lambda: NoiseLaw.from_acceptance_rates([0.5], refused=[-0.1]),
            ValueError,
            r"refused\[0\] must be a probability in 0 … 1, got -0.1",
        ),
        (
            lambda: NoiseLaw.from_acceptance_rates([0.5], refused=[0.7, 0.7]),
            ValueError,
            r"refused must sum to at most 1, got 1.4",
        ),
        (lambda: NgramDrafter(max_ngram=0), ValueError, r"max_ngram must be in 1 … \d+, got 0"),
        (lambda: NgramDrafter(min_ngram=5), ValueError, r"min_ngram must be in 1 … 4 \(max_ngram\), got 5"),
        (lambda: NgramDrafter(recency=0.0), ValueError, r"recency must be over 0 and at most 1, got 0.0"),
        (lambda: NgramDrafter(escape=0.0), ValueError, r"escape must be over 0, got 0.0"),
    ],
)
def test_wrong_argument_is_named(make, error, message):
    with pytest.raises(error, match=message):
        make()


def ngram_rows(tokens, depth, topk, **options):
    """Candidates of each depth as [(token, probability), …]."""
    log_probs, token_ids = NgramDrafter(**options)(context_of({0: tokens}), depth, topk)
    assert_draft(log_probs, token_ids, (1, depth, topk))
    return [
        [(int(t), float(np.exp(p))) for t, p in zip(ids, row, strict=True) if p > -np.inf]
        for ids, row in zip(token_ids[0], log_probs[0], strict=True)
    ]


def test_longest_match_drafts_what_followed_it_and_shorter_ones_add():
    # "1 2" stood at the beginning, and 3 1 2 followed; one vote and an escape of 1/2 make 2/3 of each order's share
    rows = ngram_rows([1, 2, 3, 1, 2], 4, 2, max_ngram=2, escape=0.5)
    share = pytest.approx(2 / 3 + 1 / 3 * 2 / 3)
    assert rows == [[(3, share)], [(1, share)], [(2, share)], []]


def test_recent_matches_weigh_more():
    rows = ngram_rows([5, 7, 5, 8, 5], 1, 2, max_ngram=1, recency=0.9, escape=0.5)
    assert rows == [[(8, pytest.approx(1 / 2.4)), (7, pytest.approx(0.9 / 2.4))]]


def test_longer_matches_weigh_more_than_recent_ones():
    # after "1 5" came 7; after the more recent "2 5" came 8
    rows = ngram_rows([1, 5, 7, 2, 5, 8, 1, 5], 1, 3, max_ngram=2, recency=0.9, escape=0.5)
    assert rows == [[(7, pytest.approx(2 / 3 + 1 / 3 * 0.9 / 2.4)), (8, pytest.approx(1 / 3 * 1.0 / 2.4))]]


def test_equal_shares_are_drafted_in_order_of_id():
    assert [t for t, _ in ngram_rows([0, 9, 0, 4, 0, 6, 0], 1, 3, max_ngram=1, recency=1.0)[0]] == [4, 6, 9]
    assert [t for t, _ in ngram_rows([0, 9, 0, 4, 0, 6, 0], 1, 2, max_ngram=1, recency=1.0)[0]] == [4, 6]


@pytest.mark.parametrize("tokens, options", [([7], {}), ([1, 2, 3], {}), ([1, 2, 1], {"min_ngram": 2})])
def test_nothing_is_drafted_without_a_match(tokens, options):
    assert ngram_rows(tokens, 3, 2, **options) == [[], [], []]


def naive_rows(tokens, depth, *, max_ngram, recency, escape, min_ngram=1):
    """The definition, place by place: {token: probability} of each depth."""
    result = []
    for d in range(depth):
        shares: dict[int, float] = defaultdict(float)
        escaped = 1.0
        for n in range(min(max_ngram, len(tokens)), min_ngram - 1, -1):
            votes: dict[int, float] = defaultdict(float)
            suffix = tokens[len(tokens) - n :]
            places = [end for end in range(len(tokens) - 1, n - 1, -1) if tokens[end - n : end] == suffix]
            for i, end in enumerate(places):
                if end + d < len(tokens):
                    votes[tokens[end + d]] += recency**i
            total = sum(votes.values()) + escape
            for token, count in votes.items():
                shares[token] += escaped * count / total
            escaped *= escape / total
        result.append(shares)
    return result


@given(
    tokens=TEXTS,
    depth=st.integers(0, 5),
    topk=st.integers(1, 5),
    max_ngram=st.integers(1, 4),
    recency=st.sampled_from([0.25, 0.9, 1.0]),
    escape=st.sampled_from([0.25, 1.0]),
)
def test_ngram_shares_are_those_of_the_definition(tokens, depth, topk, max_ngram, recency, escape):
    options = {"max_ngram": max_ngram, "recency": recency, "escape": escape}
    rows, wanted = ngram_rows(tokens, depth, topk, **options), naive_rows(tokens, depth, **options)
    for row, expected in zip(rows, wanted, strict=True):
        assert [p for _, p in row] == pytest.approx(sorted(expected.values(), reverse=True)[:topk])
        # two tokens whose shares differ by rounding alone may stand in either order
        assert [p for _, p in row] == pytest.approx([expected[t] for t, _ in row])
    event("drafts" if any(rows) else "nothing")


@given(first=TEXTS, rest=st.lists(TEXTS, max_size=4), other=TEXTS)
def test_index_that_grew_drafts_as_one_made_at_once(first, rest, other):
    grown, tokens = NgramDrafter(), list(first)
    grown(context_of({5: tokens, 0: other}), 3, 4)
    for more in rest:
        tokens = [*tokens, *more]
        result = grown(context_of({5: tokens, 0: other}, began=[]), 3, 4)
        for actual, expected in zip(result, NgramDrafter()(context_of({5: tokens, 0: other}), 3, 4), strict=True):
            assert_same(actual, expected)
    ended = grown(context_of({5: other}, began=[5], ended=[0]), 3, 4)  # another request of the same number
    for actual, expected in zip(ended, NgramDrafter()(context_of({5: other}), 3, 4), strict=True):
        assert_same(actual, expected)


def test_ngram_drafter_keeps_nothing_of_requests_that_ended():
    drafter = NgramDrafter()
    drafter(context_of({0: [1, 2], 1: [3, 4]}), 2, 2)
    drafter(context_of({1: [3, 4, 5]}, began=[], ended=[0]), 2, 2)
    assert list(drafter._indices) == [1]


def test_repeated_text_is_accepted_whole():
    text = np.tile(np.arange(8, dtype=np.int32), 8)
    engine = Engine(ScriptedTarget([text], 8), NgramDrafter(), depth=7, budget=7, backend="reference")
    generation = engine.generate([text[:24]], 25)
    assert_same(generation.tokens[0], text[24:49])
    assert generation.tokens_per_round[0].tolist() == [8, 8, 8]


def test_ngram_drafter_of_two_generations_at_once_drafts_as_each_alone():
    """Request numbers are those of a generation: another's tokens under the same number must not be voted for."""
    texts = [np.tile([1, 2, 3, 4], 20), np.tile([4, 3, 2, 1], 20)]

    def draft(drafter, text, n):
        tokens = np.asarray(text[:n], np.int32)
        context = DraftContext([0], [tokens], tokens[-1:], [{}], [0] if n == 30 else [], [])
        return [array.tolist() for array in drafter(context, 3, 4)]

    alone = []
    for text in texts:
        drafter = NgramDrafter()
        alone.append([draft(drafter, text, n) for n in range(30, 40)])
    shared = NgramDrafter()
    for i, n in enumerate(range(30, 40)):
        for text, expected in zip(texts, alone, strict=True):
            assert draft(shared, text, n) == expected[i]
