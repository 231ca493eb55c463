"""Laws of drafters that draft where the target is: in whatever slot and company, what the host's would draft."""

import math

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import event, given

from ddtree import reference
from ddtree.drafters import BlockConfig, BlockDrafter, NgramDrafter, NoiseLaw, OracleDrafter
from ddtree.drafters import oracle as oracle_module
from ddtree.engine import Engine
from ddtree.model import golden_bundle, load_model
from ddtree.property_tests.compare import assert_close, assert_same
from ddtree.property_tests.slots import Slots, drafts_in_pairs
from ddtree.property_tests.targets import VOCABULARY, AttentionTarget
from ddtree.protocols import ResidentDrafter

SEEDS = st.integers(0, 2**32)


def random_slots(rng, *, requests=4, tokens=24, vocab_size=VOCABULARY, **options):
    """Requests of random lengths, of one token on, in fewer slots."""
    texts = [rng.integers(0, vocab_size, rng.integers(2, tokens)).astype(np.int32) for _ in range(requests)]
    lens = [int(rng.integers(1, len(text))) for text in texts]
    return Slots(texts, lens, **{"slots": int(rng.integers(1, requests)), "room": tokens + 3} | options)


@given(
    seed=SEEDS,
    depth=st.integers(1, 5),
    topk=st.integers(1, VOCABULARY + 3),
    past_end=st.none() | st.integers(0, VOCABULARY - 1),
    noise=st.sampled_from([None, NoiseLaw([[0.5, 0.25], [0.2, 0.0, 0.3]])]),
)
def test_oracle_s_table_holds_its_drafts(seed, depth, topk, past_end, noise):
    rng = np.random.default_rng(seed)
    slots = random_slots(rng, depth=depth)
    known = {r: text[n:] for r, (text, n) in enumerate(zip(slots.texts, slots.lens, strict=True))}
    known[0] = known[0][: rng.integers(len(known[0]) + 1)]  # less than the request emits
    drafter = OracleDrafter(known, VOCABULARY, past_end=past_end, noise=noise, seed=seed)
    for got, expected in drafts_in_pairs(drafter, slots, depth, topk, rng):
        assert_same(got[1], expected[1])
        assert_same(got[0], expected[0])


def test_oracle_s_table_is_made_in_pieces(monkeypatch):
    monkeypatch.setattr(oracle_module, "_DRAFTED_AT_ONCE", 3)
    rng = np.random.default_rng(1)
    slots = random_slots(rng, depth=2)
    drafter = OracleDrafter([text[n:] for text, n in zip(slots.texts, slots.lens, strict=True)], VOCABULARY)
    for got, expected in drafts_in_pairs(drafter, slots, 2, 4, rng):
        assert_same(got[1], expected[1])


@given(
    seed=SEEDS,
    depth=st.integers(1, 5),
    topk=st.integers(1, 6),
    vocab_size=st.integers(1, 4),
    orders=st.tuples(st.integers(1, 4), st.integers(0, 3)),
    recency=st.sampled_from([1e-30, 0.25, 0.9, 1.0]),
    escape=st.sampled_from([1e-30, 0.25, 1.0]),
)
def test_ngrams_of_the_index_and_of_the_slots_are_the_same_bits(seed, depth, topk, vocab_size, orders, recency, escape):
    rng = np.random.default_rng(seed)
    slots = random_slots(rng, depth=depth, vocab_size=vocab_size)
    options = {"min_ngram": orders[0], "max_ngram": sum(orders), "recency": recency, "escape": escape}
    drafted = 0
    for got, expected in drafts_in_pairs(NgramDrafter(**options), slots, depth, topk, rng):
        assert_same(got[1], expected[1])
        assert_same(got[0], expected[0])
        drafted += int((got[1] >= 0).sum())
    event("drafts" if drafted else "nothing")


def test_ngram_shares_by_hand():
    # "7" stood twice before, and 3 and then 5 followed: votes of 1 and 1/2, beside 1/2 for none of them
    tokens = np.array([[7, 3, 7, 5, 7]], np.int32)
    votes = np.array([0, 2**52, 2**52 + 2**51], np.int64)
    options = {"depth": 1, "topk": 3, "max_ngram": 1, "min_ngram": 1, "escape": 0.5}
    log_probs, ids = reference.ngram_draft(tokens, np.array([5], np.int32), votes, **options)
    assert ids.tolist() == [[[5, 3, -1]]]
    assert log_probs[0, 0].tolist() == pytest.approx([math.log(1 / 2), math.log(1 / 4), -math.inf])


def test_an_ngram_share_that_is_too_small_for_a_number_is_not_drafted():
    """Of 1 … 1 2 … 1 3 … 1: what followed the longer suffix takes all but 2⁻⁸³ of the votes."""
    tokens = np.array([[4, 1, 2, 0, 1, 3, 4, 1]], np.int32)
    votes = np.arange(10, dtype=np.int64) << 52
    options = {"depth": 1, "topk": 4, "max_ngram": 2, "min_ngram": 1}
    # the least share that is a number: half of three of them, rounded down
    for escape, drafted in ((2.0**-83, [2, -1, -1, -1]), (1.5 * 2.0**-61, [2, 3, -1, -1])):
        log_probs, ids = reference.ngram_draft(tokens, np.array([8], np.int32), votes, **options, escape=escape)
        assert ids.tolist() == [[drafted]]
        assert ((log_probs[0, 0] > -np.inf) == (ids[0, 0] >= 0)).all()


def test_the_oracle_s_last_entry_holds_beyond_its_table():
    table = np.arange(6, dtype=np.int32).reshape(1, 3, 2, 1)
    for new, entry in ((0, [0, 1]), (1, [0, 1]), (3, [4, 5]), (9, [4, 5])):
        lengths = np.array([4 + new], np.int32)
        log_probs, ids = reference.oracle_draft(table, np.array([-0.5], np.float32), lengths, np.array([4], np.int32))
        assert ids[0, :, 0].tolist() == entry
        assert (log_probs == -0.5).all()


def test_attention_of_blocks_by_hand():
    """Scores that exp cannot hold, of heads as wide as no block is long: the likeliest row has all the weight."""
    E, T = 4, 3
    projected = np.zeros((T, 3, 1, E), np.float32)
    projected[:, 0] = 1.0
    projected[:, 1, 0] = np.array([[-1, -1, -1, -1], [1, 1, 1, 1], [1, 0.2, 0.2, 0.2]], np.float32)
    projected[:, 2, 0] = np.arange(T * E).reshape(T, E)
    empty = np.zeros((1, 1, E, 2), np.float32), np.zeros((1, 1, 2, E), np.float32)
    norms, still = np.full(E, 30, np.float32), np.zeros(E // 2)
    result = reference.block_attention(
        projected.reshape(T, -1), *empty, np.array([1], np.int32), norms, norms, still, eps=1e-6
    )
    directions = projected[:, 1, 0] / np.sqrt((projected[:, 1, 0] ** 2).mean(-1, keepdims=True) + 1e-6)
    assert (directions.sum(-1) * 900 * E**-0.5 > 88).any()  # whose exp float32 does not hold
    best = int(np.argmax(directions.sum(-1)))
    assert_same(result, np.tile(projected[best, 2, 0], (T, 1)))


def test_only_the_most_recent_thousand_places_vote():
    tokens = np.array([1, *[0] * 1500], np.int32)
    tokens[1] = 2  # what followed the first 0 … of all, 1,024 places and more ago
    drafter = NgramDrafter(max_ngram=1, recency=1.0)
    slots = Slots([np.append(tokens, 0)], [1500], slots=1, room=1502, depth=1)
    for got, expected in drafts_in_pairs(drafter, slots, 1, 2, np.random.default_rng(0)):
        assert_same(got[1], expected[1])
        assert_same(got[0], expected[0])
        assert math.exp(got[0][0, 0]) == pytest.approx(1024 / 1024.5)


# --- block drafts ---


@pytest.fixture(scope="module")
def targets():
    return {dtype: load_model(golden_bundle(), dtype=dtype) for dtype in ("float32", "float64")}


def block_drafter(target, *, window=None, layers=2):
    """A random one of this target, with heads of 6 elements."""
    D = target.config.hidden_size
    config = BlockConfig(D, layers, 3, 6, 16, 6, (0, 2), context_window=window)
    rng = np.random.default_rng(5)
    weights = {name: rng.normal(size=shape) / math.sqrt(shape[-1]) for name, shape in config.tensor_shapes().items()}
    return BlockDrafter(config, weights, target)


def hidden_states_of(width, dtype):
    """Random rows, each of its layer, request and position alone."""

    def hidden(layer, request, positions):
        rows = [np.random.default_rng((layer, request, int(p))).normal(size=width) for p in positions]
        return np.array(rows).reshape(len(rows), width).astype(dtype)

    return hidden


def assert_near_draft(got, expected, dtype):
    """The same candidates, but for those whose log-probs are as near to each other as rounding brings them."""
    assert_close(got[0], expected[0], row=("draft", dtype), scale=1.0)
    for d, k in np.argwhere(got[1] != expected[1]):
        at = np.flatnonzero(expected[1][d] == got[1][d, k])
        other = expected[0][d, at[0]] if at.size else expected[0][d, -1]
        assert_close(got[0][d, k], other, row=("draft", dtype), scale=1.0)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("window", [None, 1, 4, 9, 1000])
def test_blocks_of_the_slots_are_those_of_the_host(targets, dtype, window):
    target = targets[dtype]
    width = target.config.hidden_size
    drafter = block_drafter(target, window=window)
    rng = np.random.default_rng(window or 0)
    options = {"layers": (0, 2), "width": width, "dtype": dtype, "hidden_states": hidden_states_of(width, dtype)}
    slots = random_slots(rng, requests=9, tokens=30, depth=5, vocab_size=target.vocab_size, **options)
    rounds = 0
    for got, expected in drafts_in_pairs(drafter, slots, 5, 7, rng, on_host=block_drafter(target, window=window)):
        assert_near_draft(got, expected, dtype)
        rounds += 1
    assert rounds > 12  # of requests that came, went and made room


def test_a_context_begins_anew_with_each_request(targets):
    """What an earlier request left in the slot, longer than this one's context, shows nowhere."""
    target = targets["float64"]
    width = target.config.hidden_size
    options = {"layers": (0, 2), "width": width, "hidden_states": hidden_states_of(width, "float64")}
    texts = [np.arange(n, dtype=np.int32) % 7 for n in (28, 5)]
    slots = Slots(texts, [26, 2], slots=1, room=30, depth=2, **options)
    drafter = block_drafter(target)
    for got, expected in drafts_in_pairs(drafter, slots, 2, 3, np.random.default_rng(0), on_host=block_drafter(target)):
        assert_near_draft(got, expected, "float64")


# --- with an engine ---


def makers(prompts, expected):
    law = NoiseLaw([[0.6, 0.2], [0.4, 0.1]])
    return {
        "oracle": lambda: OracleDrafter(expected, VOCABULARY),
        "oracle with noise": lambda: OracleDrafter(expected, VOCABULARY, noise=law, past_end=2),
        "n-gram": lambda: NgramDrafter(max_ngram=2),
    }


@pytest.mark.parametrize("kind", ["oracle", "oracle with noise", "n-gram"])
@pytest.mark.parametrize("mode", ["tree", "chain"])
def test_resident_runs_are_the_host_s_round_by_round(kind, mode):
    rng = np.random.default_rng(2)
    prompts = [rng.integers(0, VOCABULARY, n) for n in (3, 1, 7, 4, 2)]
    plain = Engine(AttentionTarget(), backend="reference").generate(prompts, 21, [3], mode="autoregressive")
    runs = []
    for resident in (False, True):
        drafter = makers(prompts, plain.tokens)[kind]()
        assert isinstance(drafter, ResidentDrafter)
        engine = Engine(
            AttentionTarget(), drafter, depth=4, budget=7, max_batch=2, resident=resident, backend="reference"
        )
        runs.append(engine.generate(prompts, 21, [3], mode=mode))
    for request in range(len(prompts)):
        assert_same(runs[1].tokens[request], plain.tokens[request])
        assert_same(runs[1].tokens_per_round[request], runs[0].tokens_per_round[request])


def test_resident_blocks_decode_as_the_host_s(targets):
    target = targets["float64"]
    prompts = [np.random.default_rng(i).integers(0, target.vocab_size, 5 + i) for i in range(4)]
    runs = []
    for resident in (False, True):
        engine = Engine(target, block_drafter(target, window=9), depth=5, budget=9, max_batch=3, resident=resident)
        runs.append(engine.generate(prompts, 15))
    for request in range(len(prompts)):
        assert_same(runs[1].tokens[request], runs[0].tokens[request])
        assert_same(runs[1].tokens_per_round[request], runs[0].tokens_per_round[request])


# --- what is refused ---


def test_what_cannot_be_drafted_is_named(targets, monkeypatch):
    target = targets["float64"]
    width = target.config.hidden_size
    options = {"layers": (0, 2), "width": width, "hidden_states": hidden_states_of(width, "float64")}
    slots = Slots([np.zeros(9, np.int32)], [4], slots=2, room=12, depth=2, **options)
    resident = block_drafter(target).open_resident(slots.state, 2, 3)
    rows = slots.hidden(0, 0, np.arange(4))
    with pytest.raises(ValueError, match=r"hidden_states of request 5 must have layers \[2\], got \[0\]"):
        resident.begin(0, 5, np.zeros(4, np.int32), 4, {0: rows})
    with pytest.raises(ValueError, match=r"hidden_states of request 5 must have 4 rows, those of its prompt, got 3"):
        resident.begin(0, 5, np.zeros(4, np.int32), 4, {0: rows[1:], 2: rows[1:]})
    with pytest.raises(ValueError, match=r"depth must be at most 5 .* got 6: make the engine with depth=5"):
        block_drafter(target).open_resident(slots.state, 6, 3)

    oracle = OracleDrafter({1: [1, 2, 3]}, VOCABULARY).open_resident(slots.state, 2, 3)
    with pytest.raises(ValueError, match=r"request 0 must be one that has a continuation, got another: pass it"):
        oracle.begin(0, 0, np.zeros(4, np.int32), 4, {})
    monkeypatch.setattr(oracle_module, "_MOST_TABLE_BYTES", 4 * 2 * 3 * 2 * 3 - 1)
    with pytest.raises(ValueError, match=r"table for 2 slots of 3 new tokens, 2 deep, of 3 candidates takes 0.0 GiB"):
        OracleDrafter({1: [1, 2, 3]}, VOCABULARY).open_resident(slots.state, 2, 3)


def test_no_room_for_contexts_is_said(targets, monkeypatch):
    target = targets["float64"]
    slots = Slots([np.zeros(9, np.int32)], [4], slots=2, room=12, depth=2)

    def full(*arguments):
        raise MemoryError("out of memory: 9 GB")

    drafter = block_drafter(target)
    monkeypatch.setattr(np, "empty", full)
    with pytest.raises(MemoryError, match=r"no room for .* contexts of 2 slots of 12 rows: out of memory: 9 GB; run"):
        drafter.open_resident(slots.state, 2, 3)
