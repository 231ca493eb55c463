"""Laws of resident rounds: slots that requests pass through, in rounds of one shape, read late, change nothing."""

import gc
import math
import weakref
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from ddtree import reference
from ddtree.drafters import NgramDrafter, OracleDrafter
from ddtree.engine import Emission, Engine, NonFiniteLogitsError, ScriptedTarget
from ddtree.engine.prompts import MOST_PASSES, MOST_ROWS, PromptPass, parts_of
from ddtree.engine.resident import KEPT_LOOPS, LATE, TREE_ARRAYS, ResidentRun, RoundState
from ddtree.property_tests.compare import assert_same
from ddtree.property_tests.targets import VOCABULARY, AttentionTarget, RandomDrafter, repeating_drafter
from ddtree.trees import Acceptance, tree_from_parents

TOKENS = st.integers(0, VOCABULARY - 1)
PROMPTS = st.lists(st.lists(TOKENS, min_size=1, max_size=6), min_size=1, max_size=6)
TEXT = np.random.default_rng(0).integers(0, 50, 60).astype(np.int32)


def engine_on(target, drafter=None, **options):
    return Engine(target, drafter, **{"backend": "reference", "resident": True} | options)


class LookingBack:
    """Drafts on the device, by what the state says: the tokens after the root's last copy, or nothing."""

    hidden_layers = (1,)

    def __init__(self):
        self.opened = 0

    def __call__(self, context, depth, topk):
        rows = [self.looked(tokens, depth) for tokens in context.tokens]
        return np.stack([r[0] for r in rows]), np.stack([r[1] for r in rows])

    @staticmethod
    def looked(tokens, depth):
        earlier = np.flatnonzero(tokens[:-1] == tokens[-1])
        follow = tokens[earlier[-1] + 1 :][:depth] if earlier.size else tokens[:0]
        log_probs, ids = np.full((depth, 1), -np.inf, np.float32), np.full((depth, 1), -1, np.int32)
        log_probs[: len(follow), 0], ids[: len(follow), 0] = -0.5, follow
        return log_probs, ids

    def open_resident(self, state, depth, topk):
        self.opened += 1
        return Drafts(self, state, depth)


class Drafts:
    """:class:`LookingBack` at work, which sees that the state is what it has to be."""

    def __init__(self, drafter, state, depth):
        self.drafter, self.state, self.depth = drafter, state, depth
        self.of_slot = {}
        self.rows_seen = {}

    def begin(self, slot, request, tokens, prompt_len, hidden_states):
        s = self.state
        assert slot not in self.of_slot
        assert len(tokens) == prompt_len == s.prompt_lens[slot] == s.lengths[slot] - 1
        assert_same(s.tokens[slot, :prompt_len], tokens)
        assert s.kept[slot] == 0
        assert len(hidden_states[1]) == prompt_len
        self.of_slot[slot] = request
        self.rows_seen[slot] = prompt_len

    def end(self, slot):
        self.of_slot.pop(slot, None)

    def draft(self):
        s = self.state
        shape = (len(s.lengths), self.depth, 1)
        log_probs, ids = np.full(shape, np.nan, np.float32), np.full(shape, VOCABULARY + 9, np.int32)
        for slot in self.of_slot:
            if s.remaining[slot] == 0:
                continue  # finished, and the host has not read it yet
            tokens = s.tokens[slot, : s.lengths[slot]]
            assert tokens[-1] == s.roots[slot]
            self.rows_seen[slot] += int(s.kept[slot])
            assert self.rows_seen[slot] == s.lengths[slot] - 1
            assert np.isfinite(s.hidden_states[1][slot, : s.kept[slot]]).all()
            log_probs[slot], ids[slot] = self.drafter.looked(tokens, self.depth)
        return log_probs, ids


@given(
    prompts=PROMPTS,
    seed=st.integers(0, 2**32),
    depth=st.integers(1, 5),
    max_batch=st.integers(1, 4),
    max_new_tokens=st.integers(1, 14),
    stops=st.lists(TOKENS, max_size=2),
    temperature=st.sampled_from([0.0, 0.8]),
    makes=st.sampled_from([LookingBack, lambda: RandomDrafter(3), lambda: repeating_drafter]),
)
def test_resident_rounds_are_those_of_the_host(
    prompts, seed, depth, max_batch, max_new_tokens, stops, temperature, makes
):
    target = AttentionTarget(seed % 5)
    runs = []
    for resident in (False, True):
        engine = engine_on(target, makes(), depth=depth, budget=4, max_batch=max_batch, resident=resident)
        emissions: list[Emission] = []
        options = {"temperature": temperature, "seed": seed, "on_emission": emissions.append, "keep_rounds": True}
        generation = engine.generate(prompts, max_new_tokens, stops, **options)
        runs.append((generation, emissions))
    (host, host_emissions), (device, emissions) = runs
    assert device.finish_reasons == host.finish_reasons
    for request in range(len(prompts)):
        assert_same(device.tokens[request], host.tokens[request])
        assert_same(device.tokens_per_round[request], host.tokens_per_round[request])
        mine, its = ([e for e in all_ if e.request_id == request] for all_ in (emissions, host_emissions))
        assert [(e.token_ids.tolist(), e.finish_reason) for e in mine] == [
            (e.token_ids.tolist(), e.finish_reason) for e in its
        ]
        # the rounds that a request was in, each with its own tree
        for (a, i), (b, j) in zip(rounds_of(device, request), rounds_of(host, request), strict=True):
            assert_same(a.tree.token_ids[i], b.tree.token_ids[j])
            assert_same(a.tree.visibility_words[i], b.tree.visibility_words[j])
            assert_same(a.target_token_ids[i], b.target_token_ids[j])
            assert_same(a.acceptance.node_indices[i], b.acceptance.node_indices[j])


def rounds_of(generation, request):
    return [(r, r.request_ids.index(request)) for r in generation.rounds if request in r.request_ids]


def test_requests_take_the_places_of_finished_ones_and_no_more_run_at_a_time():
    prompts = [TEXT[: 3 + i] for i in range(7)]
    for resident in (False, True):
        engine = engine_on(ScriptedTarget([TEXT] * 7, 50), NgramDrafter(), max_batch=2, resident=resident)
        generation = engine.generate(prompts, 9, keep_rounds=True)
        for prompt, tokens in zip(prompts, generation.tokens, strict=True):
            assert_same(tokens, TEXT[len(prompt) :][:9])
        assert max(len(r.request_ids) for r in generation.rounds) == 2
        began = [r.request_ids for r in generation.rounds]
        assert {request for ids in began for request in ids} == set(range(7))


def test_rounds_are_kept_only_where_they_are_asked_for():
    engine = engine_on(ScriptedTarget([TEXT], 50), OracleDrafter([TEXT[5:]], 50))
    seen: list[Any] = []
    assert engine.generate([TEXT[:5]], 25).rounds == []
    assert engine.generate([TEXT[:5]], 25, on_round=seen.append).rounds == []
    assert len(engine.generate([TEXT[:5]], 25, keep_rounds=True).rounds) == len(seen) == 3


class Counting(AttentionTarget):
    def __init__(self):
        super().__init__()
        self.passes = 0

    def forward(self, *arguments, **options):
        self.passes += 1
        return super().forward(*arguments, **options)


def test_no_round_is_started_that_could_emit_nothing():
    target = Counting()
    engine_on(target).generate([[1], [2, 3]], 8, mode="autoregressive")
    assert target.passes == 1 + 7
    target = Counting()
    tokens = engine_on(target).generate([[1]], 30, mode="autoregressive").tokens[0].tolist()
    stop = tokens[9]
    target.passes = 0
    engine_on(target).generate([[1]], 30, [stop], mode="autoregressive")
    emitted = tokens.index(stop) + 1
    assert emitted <= target.passes <= emitted + LATE + 1  # the host learns of a stop late


def test_the_host_is_as_late_as_it_may_be_and_no_later(monkeypatch):
    """However many requests begin, and in however many parts: each round that no one needs takes a GPU's time."""
    most = []
    step = ResidentRun.step

    def watched(self):
        record = step(self)
        most.append(len(self.flight))
        return record

    monkeypatch.setattr(ResidentRun, "step", watched)
    text = np.random.default_rng(1).integers(0, 50, 3000).astype(np.int32)
    prompts = [text[: 60 + i] for i in range(60)]

    class Counting(ScriptedTarget):
        rounds = 0

        def forward(self, *arguments, last_only=False, **options):
            self.rounds += not last_only
            return super().forward(*arguments, last_only=last_only, **options)

    host, resident = (Counting([text], vocab_size=50) for _ in range(2))
    options = {"max_batch": 4, "prefill_chunk": 20}
    expected = engine_on(host, resident=False, **options).generate(prompts, 400, [7], mode="autoregressive")
    found = engine_on(resident, **options).generate(prompts, 400, [7], mode="autoregressive")
    assert [t.tolist() for t in found.tokens] == [t.tolist() for t in expected.tokens]
    parts = -(-len(prompts[-1]) // 20) * options["max_batch"]
    assert max(most) <= LATE + parts + 1
    assert resident.rounds <= host.rounds + (1 + LATE) * len(prompts)


def test_rounds_of_one_token_show_their_roots():
    text = np.arange(40) % 10
    shown = [
        engine_on(ScriptedTarget([text], vocab_size=10), resident=resident)
        .generate([text[:20], text[:13]], 5, mode="autoregressive", keep_rounds=True)
        .rounds
        for resident in (False, True)
    ]
    assert len(shown[0]) == 4
    for one, other in zip(*shown, strict=True):
        for name in TREE_ARRAYS:
            assert_same(getattr(other.tree, name), getattr(one.tree, name), name)


@pytest.mark.parametrize("resident", [False, True])
def test_who_ends_in_a_round_that_fails_is_forgotten(resident):
    text, rounds = np.arange(60) % 10, iter(range(100))

    class FailsInTheThird(ScriptedTarget):
        def forward(self, tree, cache, *, last_only=False, **options):
            output = super().forward(tree, cache, last_only=last_only, **options)
            if not last_only and next(rounds) >= 2:
                output.logits[1] = np.nan  # request 1's, while request 0 meets its stop token
            return output

    forgotten: list[int] = []

    class Drafter:
        def __call__(self, context, depth, topk):
            shape = (len(context.request_ids), depth, 1)
            return np.full(shape, -np.inf, np.float32), np.full(shape, -1, np.int32)

        def forget(self, requests):
            forgotten.extend(requests)

    engine = engine_on(FailsInTheThird([text], vocab_size=10), Drafter(), depth=2, budget=2, resident=resident)
    with pytest.raises(NonFiniteLogitsError, match="request 1"):
        engine.generate([text[:20], text[:15]], 50, [3])
    assert sorted(forgotten) == [0, 1]


def test_a_loop_is_captured_once_for_many_runs():
    drafter = LookingBack()
    engine = engine_on(AttentionTarget(), drafter, depth=2, budget=2)
    first = engine.generate([[1, 2, 1]], 12).tokens[0]
    assert_same(engine.generate([[1, 2, 1]], 12).tokens[0], first)
    assert_same(engine.generate([[1, 2, 1]], 5).tokens[0], first[:5])
    assert drafter.opened == 1
    assert len(engine.generate([[1, 2, 1]], 200).tokens[0]) == 200  # needs a longer one
    assert drafter.opened == 2
    for batch in range(1, 2 + KEPT_LOOPS):
        engine.generate([[1]] * batch, 3)
    assert len(engine.loops) == KEPT_LOOPS


@given(lens=st.lists(st.integers(1, 400), min_size=1, max_size=12), chunk=st.sampled_from([1, 3, 32, 100, 128, 2048]))
def test_parts_have_every_token_once_in_order_and_small_ones_few_shapes(lens, chunk):
    parts, taken = parts_of(lens, chunk), [0] * len(lens)
    for part in parts:
        assert len(part.prompts) <= part.places
        for i in part.prompts:
            assert part.start == taken[i] < lens[i]
            count = min(lens[i] - part.start, part.most)
            assert count <= min(part.width, chunk)
            taken[i] += count
    assert taken == lens
    small = [part for part in parts if part.most < chunk or part.places * part.width <= MOST_ROWS]
    if len(small) == len(parts) and chunk >= 8:
        assert all(n & (n - 1) == 0 for part in parts for n in part[3:])
    assert len(parts) <= MOST_PASSES * -(-max(lens) // chunk)


def test_one_long_prompt_does_not_pad_the_short_ones():
    parts = parts_of([2000, *[5] * 63], 2048)
    assert sum(part.places * part.width for part in parts) <= 2560
    assert len(parts_of([2000] * 8, 2048)) == 1


def test_small_prompts_share_passes_and_large_ones_go_at_once():
    assert [part[3:] for part in parts_of([32] * 8, 2048)] == [(4, 32)] * 2
    assert [part[3:] for part in parts_of([1, 17, 8], 2048)] == [(4, 32)]
    assert [part[3:] for part in parts_of([300], 2048)] == [(1, 128), (1, 128), (1, 64)]
    assert [part[3:] for part in parts_of([900, 4], 2048)] == [(2, 900)]
    assert [part[3:] for part in parts_of([900, 4], 600)] == [(2, 600), (1, 300)]


class Watching:
    """A drafter on the host that drafts nothing, and keeps the hidden states that it is shown of prompts."""

    hidden_layers = (1,)

    def __init__(self):
        self.shown: dict[int, Any] = {}

    def __call__(self, context, depth, topk):
        for request in context.began:
            self.shown[request] = context.hidden_states[context.request_ids.index(request)][1]
        shape = (len(context.request_ids), depth, 1)
        return np.full(shape, -np.inf, np.float32), np.full(shape, -1, np.int32)


class LookingOn(Watching):
    """:class:`Watching` where the rounds are."""

    def open_resident(self, state, depth, topk):
        self.state, self.depth = state, depth
        return self

    def begin(self, slot, request, tokens, prompt_len, hidden_states):
        self.shown[request] = hidden_states[1]

    def end(self, slot):
        pass

    def draft(self):
        shape = (len(self.state.lengths), self.depth, 1)
        return np.full(shape, -np.inf, np.float32), np.full(shape, -1, np.int32)


@pytest.mark.parametrize("drafter", [Watching, LookingOn])
@pytest.mark.parametrize("chunk", [7, 64, 2048])
@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_prompts_in_passes_of_few_shapes_are_those_of_the_host(drafter, chunk, temperature, monkeypatch):
    work = PromptPass.work
    replayed: dict[PromptPass, bool] = {}

    def overwriting(self, run):  # as a graph does with what its last replay left
        for rows in self.hidden_states.values() if replayed.get(self) else ():
            rows[...] = np.nan
        replayed[self] = self.replay is not None
        work(self, run)

    monkeypatch.setattr(PromptPass, "work", overwriting)
    rng = np.random.default_rng(chunk)
    prompts = [rng.integers(0, VOCABULARY, n) for n in (1, 40, 3, 8, 9, 150, 17, 2, 64, 65, 5, 1)]
    host, resident = Watching(), drafter()
    wanted, engine = (
        Engine(
            AttentionTarget(), d, depth=2, budget=2, backend="reference", resident=r, prefill_chunk=chunk, max_batch=4
        )
        for d, r in ((host, False), (resident, True))
    )
    expected = wanted.generate(prompts, 6, temperature=temperature)
    for _ in range(3):  # as it is, captured, replayed
        resident.shown.clear()
        actual = engine.generate(prompts, 6, temperature=temperature)
        for request in range(len(prompts)):
            assert_same(actual.tokens[request], expected.tokens[request])
            np.testing.assert_allclose(resident.shown[request], host.shown[request], rtol=1e-9)
    (loop,) = engine.loops.all
    assert any(prompts.replay is not None for prompts in loop.passes.values())


def test_as_many_passes_are_kept_as_there_is_room_for(monkeypatch):
    made: list[weakref.ref[PromptPass]] = []
    init = PromptPass.__init__

    def counted(self, *arguments):
        made.append(weakref.ref(self))
        init(self, *arguments)

    monkeypatch.setattr(PromptPass, "__init__", counted)
    monkeypatch.setattr("ddtree.engine.resident.KEPT_PASSES", 2)
    engine = engine_on(AttentionTarget())
    for n in (128, 1, 9, 17, 33, 65, 1, 9, 10, 3):
        engine.generate([[1] * n], 2, mode="autoregressive")
    gc.collect()
    (loop,) = engine.loops.all
    assert list(loop.passes) == [(1, 16), (1, 8)]
    assert len(made) == 8
    assert sum(ref() is not None for ref in made) == 2


def test_runs_that_grow_outgrow_few_loops():
    made: list[int] = []

    class Making(AttentionTarget):
        def new_cache(self, num_pages, page_size):
            made.append(num_pages)
            return super().new_cache(num_pages, page_size)

    for cache_rows, wanted in ((None, [1, 2, 4, 8]), (100, [1, 2, 4, 6])):
        made.clear()
        engine = engine_on(Making(), cache_rows=cache_rows)
        for n in range(1, 90, 3):
            engine.generate([[1] * n], 3, mode="autoregressive")
        assert made == wanted


def test_a_loop_with_more_pages_than_needed_is_made_only_where_there_is_room():
    class Narrow(AttentionTarget):
        def new_cache(self, num_pages, page_size):
            if num_pages > 3:
                raise MemoryError("none left")
            return super().new_cache(num_pages, page_size)

    engine = engine_on(Narrow())
    for n in (20, 35):  # two pages, three
        assert len(engine.generate([[1] * n], 3, mode="autoregressive").tokens[0]) == 3
    with pytest.raises(MemoryError, match="no room for a cache of 4 pages"):
        engine.generate([[1] * 60], 3, mode="autoregressive")


def test_runs_of_other_seeds_and_stops_share_a_loop_where_they_may():
    engine = engine_on(AttentionTarget())
    for seed, stops in enumerate([(), (1,), (2, 3), (), (4, 5, 6, 7)]):
        engine.generate([[1, 2]], 5, stops, mode="autoregressive", seed=seed, top_p=1 - seed / 10)
    assert len(engine.loops) == 1
    engine.generate([[1, 2]], 5, mode="autoregressive", temperature=0.5, seed=1)
    engine.generate([[1, 2]], 5, mode="autoregressive", temperature=0.5, seed=2)
    assert len(engine.loops) == 3


def test_a_loop_outlives_a_run_that_is_left_or_fails_between_launches():
    engine = engine_on(AttentionTarget(), FailsOnce("raises"), depth=3, budget=3)
    with pytest.raises(RuntimeError, match="no draft today"):
        engine.generate([[1, 2], [3]], 20)
    (loop,) = engine.loops.all
    stream = engine.stream([[1, 2], [3]], 20)
    next(stream)
    stream.close()
    assert engine.loops.all == [loop]

    class Failing(AttentionTarget):
        failing = False

        def forward(self, *arguments, **options):
            if self.failing:
                raise RuntimeError("no pass")
            return super().forward(*arguments, **options)

    engine = engine_on(Failing())
    engine.generate([[1]], 4, mode="autoregressive")
    assert len(engine.loops) == 1
    engine.target.failing = True
    with pytest.raises(RuntimeError, match="no pass"):
        engine.generate([[1]], 4, mode="autoregressive")
    assert len(engine.loops) == 0


class Unusable(AttentionTarget):
    """Logits that are NaN from a position on, in one request."""

    def __init__(self, first_token, position):
        super().__init__()
        self.first_token, self.position = first_token, position

    def forward(self, tree, cache, **options):
        output = super().forward(tree, cache, **options)
        positions = reference.tree_positions(tree.depths, cache.prefix_lens)
        at = (cache.prefix_lens > 0)[:, None] & (positions >= self.position)
        of_it = (cache.page_table[:, 0] == self.first_token)[:, None]
        if output.logits.shape[1] == at.shape[1]:
            output.logits[at & of_it] = np.nan
        return output


@pytest.mark.parametrize("resident", [False, True])
def test_what_was_committed_comes_with_an_error_and_the_engine_goes_on(resident):
    prompts = [[1, 2], [3], [4, 5, 0]]
    expected = engine_on(AttentionTarget()).generate(prompts, 20, mode="autoregressive").tokens
    engine = engine_on(Unusable(2, 8), resident=resident, page_size=64)
    with pytest.raises(NonFiniteLogitsError, match=r"request 2: the target's logits after position 8 hold") as raised:
        engine.generate(prompts, 20, mode="autoregressive")
    for mine, its in zip(committed(raised.value).tokens, expected, strict=True):
        assert_same(mine, its[: len(mine)])
    assert [len(tokens) for tokens in committed(raised.value).tokens[:2]] >= [5, 5]
    engine.target.position = 10**6
    for mine, its in zip(engine.generate(prompts, 20, mode="autoregressive").tokens, expected, strict=True):
        assert_same(mine, its)


def committed(error: Any) -> Any:
    return error.generation


class FailsOnce:
    """Drafts what another drafts, but in one round raises, or gives what is no draft for one request."""

    def __init__(self, fault, request=1):
        self.fault, self.request, self.rounds = fault, request, 0

    def __call__(self, context, depth, topk):
        self.rounds += 1
        shape = (len(context.request_ids), depth, topk)
        log_probs = np.tile(np.float32(-1.0) - np.arange(topk, dtype=np.float32), (*shape[:2], 1))
        ids = np.tile(np.arange(topk, dtype=np.int32), (*shape[:2], 1))
        if self.rounds == 3:
            if self.fault == "raises":
                raise RuntimeError("no draft today")
            b = context.request_ids.index(self.request)
            log_probs[b, 1, 0] = {"nan": math.nan, "over": 0.5}.get(self.fault, log_probs[b, 1, 0])
            ids[b, 1, 0] = {"id": VOCABULARY}.get(self.fault, ids[b, 1, 0])
        return log_probs, ids


@pytest.mark.parametrize("resident", [False, True])
@pytest.mark.parametrize(
    ("fault", "error", "message"),
    [
        ("raises", RuntimeError, "no draft today"),
        (
            "nan",
            ValueError,
            r"drafter FailsOnce, request 1: log_probs must be numbers .* got NaN",
        ),
        ("over", ValueError, r"drafter FailsOnce, request 1: log_probs.* must be at most 0"),
        ("id", ValueError, rf"drafter FailsOnce, request 1: token_ids.* must be in 0 … {VOCABULARY - 1}"),
    ],
)
def test_a_drafter_that_fails_mid_run_is_named_and_no_tokens_are_lost(resident, fault, error, message):
    prompts = [[1, 2], [3], [4, 5, 0]]
    expected = engine_on(AttentionTarget()).generate(prompts, 20, mode="autoregressive").tokens
    engine = engine_on(AttentionTarget(), FailsOnce(fault), depth=3, budget=3, resident=resident)
    emissions: list[Emission] = []
    with pytest.raises(error, match=message) as raised:
        engine.generate(prompts, 20, on_emission=emissions.append)
    for request, its in enumerate(expected):
        mine = committed(raised.value).tokens[request]
        assert len(mine) >= 3
        assert_same(mine, its[: len(mine)])
    assert "requests 0, 1, 2" in " ".join(getattr(raised.value, "__notes__", [])) or fault != "raises"
    for mine, its in zip(engine.generate(prompts, 20).tokens, expected, strict=True):
        assert_same(mine, its)


def test_a_stream_that_is_left_can_be_followed_by_another_run():
    engine = engine_on(AttentionTarget(), LookingBack(), depth=3, budget=3, max_batch=2)
    expected = engine.generate([[1], [2], [3]], 15).tokens
    stream = engine.stream([[1], [2], [3]], 15)
    assert isinstance(next(stream), Emission)
    stream.close()
    for mine, its in zip(engine.generate([[1], [2], [3]], 15).tokens, expected, strict=True):
        assert_same(mine, its)


@pytest.mark.parametrize("resident", [False, True])
def test_runs_of_one_engine_may_be_interleaved(resident):
    engine = engine_on(AttentionTarget(), LookingBack(), depth=3, budget=3, resident=resident)
    expected = engine.generate([[1, 2, 1], [3]], 15).tokens
    streams = [engine.stream([[1, 2, 1], [3]], 15) for _ in range(3)]
    tokens: list[list[list[int]]] = [[[], []] for _ in streams]
    left = dict(enumerate(streams))
    while left:
        for i, stream in list(left.items()):
            emission = next(stream, None)
            if emission is None:
                del left[i]
            else:
                tokens[i][emission.request_id] += emission.token_ids.tolist()
    assert tokens == [[row.tolist() for row in expected]] * 3


@pytest.mark.parametrize("resident", [False, True])
def test_an_error_in_a_stream_has_the_tokens_too(resident):
    engine = engine_on(AttentionTarget(), FailsOnce("raises"), depth=3, budget=3, resident=resident)
    with pytest.raises(RuntimeError, match="no draft today") as raised:
        list(engine.stream([[1, 2], [3]], 20))
    assert all(len(tokens) >= 3 for tokens in committed(raised.value).tokens)


def test_no_room_for_a_pass_names_the_requests():
    class Full(AttentionTarget):
        def forward(self, tree, cache, *, last_only=False, **options):
            if not last_only:
                raise MemoryError("out of memory: 9 GB")
            return super().forward(tree, cache, last_only=last_only, **options)

    for resident in (False, True):
        with pytest.raises(MemoryError, match="no room for a round of requests 0, 1, prompts of 1, 2 tokens: out"):
            engine_on(Full(), resident=resident).generate([[1], [1, 2]], 10, mode="autoregressive")


@pytest.mark.parametrize("resident", [False, True])
def test_hidden_states_of_another_shape_are_refused(resident):
    class Few(AttentionTarget):
        def forward(self, *arguments, **options):
            output = super().forward(*arguments, **options)
            output.hidden_states[1] = output.hidden_states[1][:, :0]
            return output

    engine = engine_on(Few(), LookingBack(), depth=2, budget=2, resident=resident)
    with pytest.raises(
        ValueError, match=r"hidden states of layer 1 as an array of shape \(1, 8, D\), got \(1, 0, 12\)"
    ):
        engine.generate([[1] * 8], 5)


def test_more_new_tokens_than_the_host_has_room_for_are_said(monkeypatch):
    def full(prompts, max_new_tokens):
        raise MemoryError

    monkeypatch.setattr("ddtree.engine.run.Committed", full)
    with pytest.raises(MemoryError, match="no room for 2 requests of up to 99 new tokens"):
        engine_on(AttentionTarget()).generate([[1]] * 2, 99, mode="autoregressive")


class Silent:
    """A backend at fault: nobody accepts anything."""

    build_tree = staticmethod(reference.build_tree)
    tree_positions = staticmethod(reference.tree_positions)
    choose_tokens = staticmethod(reference.choose_tokens)
    compact_cache = staticmethod(reference.compact_cache)

    @staticmethod
    def accept_tree(tree, choices, **options):
        kept = reference.accept_tree(tree, choices, **options)
        return Acceptance(kept.node_indices, np.zeros_like(kept.lengths), kept.bonus_token_ids, kept.finished)


@pytest.mark.parametrize("resident", [False, True])
def test_rounds_that_emit_nothing_are_no_endless_loop(resident):
    engine = engine_on(AttentionTarget(), resident=resident, backend=f"{__name__}:Silent")
    with pytest.raises(RuntimeError, match="a round must emit a token"):
        engine.generate([[1], [2]], 5, mode="autoregressive")


def test_loops_of_other_batches_go_where_there_is_no_room():
    class Narrow(AttentionTarget):
        made = 0

        def new_cache(self, num_pages, page_size):
            self.made += 1
            if self.made == 2:
                raise MemoryError("none left")
            return super().new_cache(num_pages, page_size)

    engine = engine_on(Narrow())
    engine.generate([[1]], 3, mode="autoregressive")
    assert len(engine.loops) == 1
    assert len(engine.generate([[1], [2]], 3, mode="autoregressive").tokens[1]) == 3
    assert len(engine.loops) == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_batch": 0}, "max_batch must be in 1"),
        ({"cache_rows": 0}, "cache_rows must be in 1"),
        ({"resident": True, "policy": type("P", (), {"budget": 2, "__call__": lambda *a: None})()}, "resident must be"),
    ],
)
def test_wrong_options_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        engine_on(AttentionTarget(), NgramDrafter(), **options)


def test_resident_is_no_word():
    with pytest.raises(TypeError, match="resident must be True, False or None, got 'no'"):
        engine_on(AttentionTarget(), NgramDrafter(), resident="no")


def test_a_request_longer_than_the_cache_is_named_before_any_work():
    engine = engine_on(AttentionTarget(), NgramDrafter(), budget=4, cache_rows=40, page_size=16)
    with pytest.raises(ValueError, match=r"prompts\[1\] needs 35 cache rows, for 20 tokens, max_new_tokens = 10 and"):
        engine.generate([[1], [1] * 20], 10)


def test_no_room_for_a_cache_names_the_longest_request():
    class Full(AttentionTarget):
        def new_cache(self, num_pages, page_size):
            raise MemoryError("out of memory: 9 GB")

    with pytest.raises(MemoryError, match=r"a cache of 3 pages .* prompts\[1\], the longest, needs 2: out of"):
        engine_on(Full()).generate([[1], [1] * 20], 10, mode="autoregressive")


@given(data=st.data())
def test_guard_draft_keeps_what_is_a_draft_and_finds_the_first_fault(data):
    B, L, K, V = 2, data.draw(st.integers(0, 3)), data.draw(st.integers(1, 4)), 5
    seed = data.draw(st.integers(0, 2**32))
    rng = np.random.default_rng(seed)
    log_probs = -np.sort(rng.integers(0, 5, (B, L, K)) / 4, axis=-1).astype(np.float32)
    ids = rng.permuted(np.tile(np.arange(V), (B, L, 1)), axis=-1)[..., :K].astype(np.int32)
    log_probs[rng.random(log_probs.shape) < 0.1] = -np.inf
    remaining = rng.integers(0, 3, B).astype(np.int32)
    faulty = data.draw(st.sampled_from([None, np.nan, 0.5, "rises", "id", "below", "twice"]))
    if faulty is not None and L:
        b, d, k = (int(rng.integers(n)) for n in (B, L, K))
        if isinstance(faulty, float):
            log_probs[b, d, k] = faulty
        elif faulty == "rises":
            log_probs[b, d, k] = min(0.0, log_probs[b, d, max(k - 1, 0)] + 0.125)
        else:
            ids[b, d, k] = {"id": V, "below": -1, "twice": ids[b, d, 0]}[faulty]
    guarded, faults = reference.guard_draft(log_probs, ids, remaining, vocab_size=V)
    for b in range(B):
        code, _, d, k = reference.find_draft_fault(log_probs[b : b + 1], ids[b : b + 1], V)
        drafted = np.cumsum(log_probs[b] == -np.inf, axis=-1) == 0
        nans = np.argwhere(np.isnan(log_probs[b]) & drafted)
        first = [(d * K + k, code)] if code else []
        first += [(int(x * K + y), 5) for x, y in nans[:1]]
        # a row that is read past a NaN may hold other faults, which the search for the first does not see
        expected = min(first) if first and remaining[b] > 0 else None
        if expected is None:
            assert faults[b].tolist() == [0, 0]
            assert_same(guarded[b], log_probs[b] if remaining[b] > 0 else np.full_like(log_probs[b], -np.inf))
        else:
            assert faults[b].tolist() == [expected[1], expected[0]]
            assert (guarded[b] == -np.inf).all()


def test_guard_draft_by_hand():
    """Of seven requests: one that is right, one past its end, one of each fault, and one with two at once."""
    inf = np.inf
    rows = [[-1, -1, -inf], [1, -1, -2], [-1, -0.5, -2], [-1, -2, -1.5], [-1, -2, -3], [-1, -2, -3], [1, -1, -2]]
    log_probs = np.array(rows, np.float32)[:, None]
    ids = np.array([[0, 1, 9], [0, 1, 2], [0, 1, 2], [0, 1, 2], [-1, 1, 2], [0, 1, 1], [3, 1, 2]], np.int32)[:, None]
    guarded, faults = reference.guard_draft(log_probs, ids, np.array([1, 0, *[1] * 5], np.int32), vocab_size=3)
    assert faults.tolist() == [[0, 0], [0, 0], [2, 1], [2, 2], [3, 0], [4, 2], [1, 0]]
    assert_same(guarded[0], log_probs[0])
    assert (guarded[1:] == -inf).all()


def test_emitted_tokens_by_hand():
    """A path of two and its bonus, a bonus alone, and a free place."""
    tree = tree_from_parents([[5, 6, 7], [8, 9, 9], [1, 1, 1]], [[-1, 0, 1], [-1, 0, 0], [-1, 0, 0]])
    paths = np.array([[0, 1, 2, -1], [0, -1, -1, -1], [-1] * 4], np.int32)
    lengths, bonus = np.array([3, 1, 0], np.int32), np.array([4, 2, -1], np.int32)
    emitted = reference.emitted_tokens(tree, Acceptance(paths, lengths, bonus, np.zeros(3, bool)))
    assert_same(emitted, np.array([[3, 6, 7, 4, -1], [1, 2, -1, -1, -1], [0, -1, -1, -1, -1]], np.int32))


def test_commit_round_by_hand():
    state = RoundState(
        tokens=np.array([[7, 8, 0, 0, 0, 0], [5, 0, 0, 0, 0, 0], [1, 2, 3, 0, 0, 0], [6, 6, 0, 0, 0, 0]], np.int32),
        lengths=np.array([2, 1, 3, 2], np.int32),
        roots=np.array([8, 5, 3, 6], np.int32),
        prompt_lens=np.array([1, 1, 1, 1], np.int32),
        remaining=np.array([4, 0, 2, 9], np.int32),
        kept=np.array([9, 9, 9, 9], np.int32),
        prefix_lens=np.array([1, 0, 2, 1], np.int32),
        running=np.array([1, 0, 1, 1], np.int32),
        keys=np.zeros(4, np.int64),
        page_table=np.zeros((4, 1), np.int32),
    )
    from ddtree.trees import tree_from_parents

    tree = tree_from_parents(np.array([[8, 10, 11], [5, 10, 11], [3, 12, 13], [6, 1, 2]]), np.array([[-1, 0, 1]] * 4))
    acceptance = Acceptance(
        node_indices=np.array([[0, 1, 2], [-1, -1, -1], [0, 1, -1], [0, -1, -1]], np.int32),
        lengths=np.array([3, 0, 2, 1], np.int32),
        bonus_token_ids=np.array([20, -1, 21, -1], np.int32),
        finished=np.array([False, True, True, False]),
    )
    record = np.full((4, 6), 77, np.int32)
    reference.commit_round(state, tree, acceptance, np.array([[0, 0], [0, 0], [0, 0], [4, 1]], np.int32), record)
    assert record.tolist() == [
        [3, 0, 0, 10, 11, 20],
        [0, 0, 0, -1, -1, -1],
        [2, 0, 0, 12, 21, -1],
        [1, 4, 1, -1, -1, -1],
    ]
    assert state.tokens.tolist() == [
        [7, 8, 10, 11, 20, 0],
        [5, 0, 0, 0, 0, 0],
        [1, 2, 3, 12, 21, 0],
        [6, 6, -1, 0, 0, 0],
    ]
    assert state.lengths.tolist() == [5, 1, 5, 3]
    assert state.prefix_lens.tolist() == [4, 0, 4, 2]
    assert state.roots.tolist() == [20, 5, 21, 0]
    assert state.remaining.tolist() == [1, 0, 0, 0]  # the third was finished, the last could choose nothing
    assert state.running.tolist() == [1, 0, 0, 0]
    assert state.kept.tolist() == [3, 0, 2, 1]
