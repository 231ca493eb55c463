"""Laws of the engine: a drafter decides how many tokens a round emits, and never which."""

import contextlib
import math
import tracemalloc
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import event, given

from ddtree import reference
from ddtree.costs import CostModel
from ddtree.drafters import NgramDrafter, NoiseLaw, OracleDrafter
from ddtree.engine import STAGES, Emission, Engine, NonFiniteLogitsError, Round, ScriptedTarget
from ddtree.policies import (
    all_children,
    chain,
    confidence,
    cost_aware,
    fixed_budget,
    limited,
    policy_name,
    spine_first,
    static_tree,
)
from ddtree.property_tests.compare import assert_close, assert_same
from ddtree.property_tests.targets import (
    DRAFTERS,
    VOCABULARY,
    AttentionTarget,
    RandomDrafter,
    hostile_drafter,
    repeating_drafter,
)
from ddtree.protocols import KVCache, TargetOutput
from ddtree.trees import chain_tree

TOKENS = st.integers(0, VOCABULARY - 1)
PROMPTS = st.lists(st.lists(TOKENS, min_size=1, max_size=6), min_size=1, max_size=3)
SAMPLINGS = st.sampled_from(
    [{}, {"temperature": 0.7}, {"temperature": 1.0}, {"temperature": 0.7, "top_p": 0.9}, {"temperature": 50.0}]
)
TEXT = np.random.default_rng(0).integers(0, 50, 60).astype(np.int32)
"""A text of 60 tokens below 50; the first 5 are the prompt where nothing else is said."""


def engine_on(target, drafter=None, **options):
    return Engine(target, drafter, **{"backend": "reference"} | options)


def scripted(drafter=None, *, text=TEXT, **options):
    """An engine whose target writes TEXT and whose drafter, if not given, knows all of it."""
    drafter = OracleDrafter([text[5:]], 50) if drafter is None else drafter
    return engine_on(ScriptedTarget([text], 50), drafter, **options)


def autoregressive(target, prompts, *args, **options):
    return engine_on(target).generate(prompts, *args, mode="autoregressive", **options)


def assert_same_tokens(actual, expected):
    assert len(actual.tokens) == len(expected.tokens)
    for request, (got, wanted) in enumerate(zip(actual.tokens, expected.tokens, strict=True)):
        assert_same(got, wanted, f"tokens of request {request}")
    assert actual.finish_reasons == expected.finish_reasons


def assert_accounts(generation):
    """What the rounds say, what they are counted as, and what came out are one and the same."""
    emitted: list[list[int]] = [[] for _ in generation.tokens]
    counts: list[list[int]] = [[] for _ in generation.tokens]
    for record in generation.rounds:
        kept = record.acceptance
        assert ((record.target_token_ids >= 0) == (record.tree.depths >= 0)).all()
        for b, request in enumerate(record.request_ids):
            path = kept.node_indices[b, : kept.lengths[b]]
            emitted[request] += [*record.tree.token_ids[b, path[1:]].tolist(), int(kept.bonus_token_ids[b])]
            counts[request].append(int(kept.lengths[b]))
    for request, tokens in enumerate(generation.tokens):
        assert tokens[1:].tolist() == emitted[request]  # the first is the prefill's
        assert generation.tokens_per_round[request].tolist() == counts[request]
    assert generation.num_rounds == sum(map(len, counts))


@pytest.mark.parametrize("kind", DRAFTERS)
@given(
    prompts=PROMPTS,
    seed=st.integers(0, 2**32),
    depth=st.integers(1, 5) | st.just(0),
    budget=st.integers(1, 12) | st.sampled_from([0, 33]),
    topk=st.none() | st.integers(1, VOCABULARY),
    page_size=st.sampled_from([1, 3, 16]),
    prefill_chunk=st.sampled_from([2048, 1, 3]),
    max_new_tokens=st.integers(1, 14),
    stops=st.lists(TOKENS, max_size=1),
    sampling=SAMPLINGS,
    mode=st.sampled_from(["tree", "chain"]),
    max_batch=st.none() | st.integers(1, 3),
    resident=st.booleans(),
)
def test_drafting_gives_the_autoregressive_tokens(
    engine_backend,
    kind,
    prompts,
    seed,
    depth,
    budget,
    topk,
    page_size,
    prefill_chunk,
    max_new_tokens,
    stops,
    sampling,
    mode,
    max_batch,
    resident,
):
    target, options = AttentionTarget(seed % 5), {"seed": seed, **sampling}
    expected = autoregressive(target, prompts, max_new_tokens, stops, **options)
    drafter = DRAFTERS[kind](expected.tokens, seed)
    shape = {"depth": depth, "budget": budget, "topk": topk, "page_size": page_size, "prefill_chunk": prefill_chunk}
    placed = {"max_batch": max_batch, "resident": resident}
    engine = engine_on(target, drafter, backend=engine_backend.backend, **shape, **placed)
    actual = engine.generate(prompts, max_new_tokens, stops, mode=mode, keep_rounds=True, **options)
    assert_same_tokens(actual, expected)
    for generation in (expected, actual):
        assert_accounts(generation)
    if actual.tau is not None:
        event("drafts accepted" if actual.tau > 1 else "nothing accepted")
        assert kind != "hostile" or actual.tau == 1.0


class LeastLikelyPolicy:
    """Of every depth the last candidates, in a different number each round: mostly what nobody would choose."""

    budget = 6

    def __call__(self, log_probs, token_ids, root_token_ids, prefix_lens):
        K = log_probs.shape[2]
        paths = [(K - 1,) * d for d in range(1, 4)] + ([(0,)] if K > 1 else [])
        return static_tree(paths[: int(prefix_lens.max()) % 5])(log_probs, token_ids, root_token_ids, prefix_lens)


class RootAlone:
    budget = 3

    def __call__(self, log_probs, token_ids, root_token_ids, prefix_lens):
        return chain_tree(root_token_ids[:, None])


class WritesIntoItsArguments:
    """Once its tree is made, which is right."""

    budget = 5

    def __call__(self, log_probs, token_ids, root_token_ids, prefix_lens):
        tree = fixed_budget(self.budget)(log_probs, token_ids, root_token_ids, prefix_lens)
        log_probs[:], token_ids[:], root_token_ids[:] = -9, 0, 0
        prefix_lens += 3
        return tree


COSTS = CostModel(np.array([0, 4, 40]), np.array([0, 64]), np.array([[1.0, 1.1, 4.0], [2.0, 2.1, 9.0]]))
POLICIES = [
    fixed_budget(6), confidence(12, 0.05), cost_aware(9, COSTS), chain(3), all_children(7, 2), spine_first(5),
    static_tree([(0,), (1,), (0, 0), (1, 1)]), limited(fixed_budget(8), depth=2, topk=2), LeastLikelyPolicy(),
    RootAlone(), WritesIntoItsArguments(),
]  # fmt: skip


@pytest.mark.parametrize("policy", POLICIES, ids=policy_name)
@given(
    kind=st.sampled_from(list(DRAFTERS)),
    prompts=PROMPTS,
    seed=st.integers(0, 2**32),
    max_new_tokens=st.integers(1, 14),
    stops=st.lists(TOKENS, max_size=1),
    sampling=SAMPLINGS,
)
def test_policy_changes_no_token(engine_backend, policy, kind, prompts, seed, max_new_tokens, stops, sampling):
    target, options = AttentionTarget(seed % 5), {"seed": seed, **sampling}
    expected = autoregressive(target, prompts, max_new_tokens, stops, **options)
    drafter = DRAFTERS[kind](expected.tokens, seed)
    engine = engine_on(target, drafter, depth=3, topk=4, policy=policy, backend=engine_backend.backend)
    assert engine.budget == policy.budget
    actual = engine.generate(prompts, max_new_tokens, stops, **options)
    assert_same_tokens(actual, expected)
    assert_accounts(actual)
    event("drafts accepted" if actual.tau is not None and actual.tau > 1 else "nothing accepted")


@given(prompts=PROMPTS, seed=st.integers(0, 2**32), sampling=SAMPLINGS)
def test_request_gets_the_same_tokens_alone_as_in_a_batch(engine_backend, prompts, seed, sampling):
    engine = engine_on(AttentionTarget(), RandomDrafter(seed), depth=3, budget=6, backend=engine_backend.backend)
    keys = [7 + 1000 * r for r in range(len(prompts))]
    together = engine.generate(prompts, 8, [0], seed=seed, request_ids=keys, **sampling)
    for request, prompt in enumerate(prompts):
        alone = engine.generate([prompt], 8, [0], seed=seed, request_ids=keys[request : request + 1], **sampling)
        assert_same(alone.tokens[0], together.tokens[request], f"tokens of request {request}")


def test_accepted_rows_that_are_not_compacted_change_the_tokens():
    """The laws above can fail: the same run on a backend that leaves the rows where they are differs."""
    target, prompts = AttentionTarget(), [[1, 2, 3], [5]]
    expected = autoregressive(target, prompts, 24)
    drafter = OracleDrafter(expected.tokens, VOCABULARY, noise=NoiseLaw([[0.0, 1.0]]))  # accepted, and not node 1
    assert_same_tokens(engine_on(target, drafter).generate(prompts, 24), expected)
    wrong = Engine(target, drafter, backend="ddtree.property_tests.targets:WithoutCompaction").generate(prompts, 24)
    assert [t.tolist() for t in wrong.tokens] != [t.tolist() for t in expected.tokens]


def test_default_backend_gives_the_tokens_of_the_reference():
    target, prompts = AttentionTarget(), [[1, 2, 3], [5], [4, 4]]
    samplings: list[dict[str, Any]] = [{}, {"temperature": 0.7, "top_p": 0.9}]
    for sampling in samplings:
        expected = autoregressive(target, prompts, 24, [6], **sampling)
        drafter = OracleDrafter(expected.tokens, VOCABULARY, noise=NoiseLaw([[0.6, 0.3]]))
        actual = Engine(target, drafter, backend=None).generate(prompts, 24, [6], **sampling)
        assert_same_tokens(actual, expected)


@pytest.mark.parametrize("mode, shape", [("tree", (9, 3, 8)), ("chain", (4, 3, 1)), ("autoregressive", (1, 0, 1))])
def test_mode_says_how_much_is_drafted(mode, shape):
    generation = scripted(repeating_drafter, depth=3, budget=8).generate([TEXT[:5]], 6, mode=mode)
    for record in generation.rounds:
        tree = record.tree
        assert (tree.num_slots, tree.max_depth, tree.num_candidates) == shape
        assert (tree.parents[0].tolist() == list(range(-1, tree.num_slots - 1))) == (mode != "tree")


@pytest.mark.parametrize("budget", [7, 16, 64])
@pytest.mark.parametrize("max_new_tokens, rounds", [(25, [8, 8, 8]), (24, [8, 8, 7]), (9, [8]), (10, [8, 1]), (2, [1])])
def test_oracle_of_depth_seven_emits_eight_tokens_a_round(max_new_tokens, rounds, budget):
    generation = scripted(depth=7, budget=budget).generate([TEXT[:5]], max_new_tokens)
    assert_same(generation.tokens[0], TEXT[5 : 5 + max_new_tokens])
    assert generation.tokens_per_round[0].tolist() == rounds
    assert generation.tau == sum(rounds) / len(rounds)
    assert generation.finish_reasons == ["length"]


def test_oracle_tree_has_branches_beside_the_accepted_path():
    generation = scripted(depth=7, budget=16).generate([TEXT[:5]], 25)
    for record in generation.rounds:
        assert record.tree.node_counts.tolist() == [17]
        assert record.acceptance.node_indices[0].tolist() == list(range(8))  # before any decoy
        children = np.bincount(record.tree.parents[0, 1:], minlength=17)
        assert (children[:8] > 1).sum() > 1


def test_one_round_of_depth_one_accepts_the_one_draft():
    """Row i of the pass is node i and row 0 is the root: off by one, and nothing would be accepted."""
    assert scripted(depth=1, budget=1).generate([TEXT[:5]], 3).tokens_per_round[0].tolist() == [2]


def test_tau_counts_the_bonus_once():
    continuation = TEXT[5:]
    for accepted in range(4):
        law = NoiseLaw([[1.0]] * accepted + [[0.0]])
        engine = scripted(OracleDrafter([continuation], 50, noise=law), depth=7, budget=7)
        assert engine.generate([TEXT[:5]], 25).tau == 1 + accepted


def test_tau_is_the_mean_over_the_rounds_of_all_requests():
    texts = [TEXT, TEXT[::-1].copy()]
    drafter = OracleDrafter([texts[0][3:], texts[1][5:6]], 50)  # knows no token of the second after the prefill's
    engine = engine_on(ScriptedTarget(texts, 50), drafter, depth=3, budget=3)
    generation = engine.generate([texts[0][:3], texts[1][:5]], 9)
    assert [counts.tolist() for counts in generation.tokens_per_round] == [[4, 4], [1] * 8]
    assert generation.tau == 16 / 10
    assert [record.request_ids for record in generation.rounds] == [(0, 1)] * 2 + [(1,)] * 6


@pytest.mark.parametrize("mode", ["tree", "chain", "autoregressive"])
def test_stop_token_inside_the_accepted_path_is_the_last_token(mode):
    text = np.arange(40, dtype=np.int32)
    generation = scripted(text=text).generate([text[:5]], 30, [8], mode=mode)
    assert generation.tokens[0].tolist() == [5, 6, 7, 8]
    assert generation.finish_reasons == ["stop"]
    assert generation.tokens_per_round[0].tolist() == ([1, 1, 1] if mode == "autoregressive" else [3])
    last = generation.rounds[-1].acceptance
    assert last.finished.tolist() == [True]
    assert last.bonus_token_ids.tolist() == [8]
    assert last.lengths.tolist() == ([1] if mode == "autoregressive" else [3])  # rows of root, 6 and 7, not of 8


def test_stop_token_that_is_also_the_last_token_allowed_is_a_stop():
    text = np.arange(40, dtype=np.int32)
    assert scripted(text=text).generate([text[:5]], 4, [8]).finish_reasons == ["stop"]
    assert scripted(text=text).generate([text[:5]], 1, [5]).finish_reasons == ["stop"]
    assert scripted(text=text).generate([text[:5]], 3, [8]).finish_reasons == ["length"]


def test_stop_in_the_first_round_is_one_round():
    text = np.arange(40, dtype=np.int32)
    seen: list[Round] = []
    generation = scripted(text=text).generate([text[:5]], 30, [6], on_round=seen.append)
    assert generation.tokens_per_round[0].tolist() == [1]
    assert (generation.num_rounds, generation.tau) == (1, 1.0)
    assert seen == generation.rounds


@pytest.mark.parametrize("max_new_tokens, stops, reason", [(30, [5], "stop"), (1, [], "length")])
def test_request_that_ends_in_the_prefill_has_no_round_and_no_tau(max_new_tokens, stops, reason):
    text = np.arange(40, dtype=np.int32)
    generation = scripted(text=text).generate([text[:5]], max_new_tokens, stops)
    assert generation.tokens[0].tolist() == [5]
    assert (generation.finish_reasons, generation.num_rounds, generation.tau) == ([reason], 0, None)


def test_single_token_left_and_a_deep_tree_emit_one_token():
    generation = scripted(depth=8, budget=16).generate([TEXT[:5]], 2)
    assert generation.rounds[0].tree.node_counts.tolist() == [17]
    assert generation.tokens_per_round[0].tolist() == [1]


def test_oracle_that_runs_out_of_known_tokens_lets_the_run_go_on():
    engine = scripted(OracleDrafter([TEXT[5:15]], 50), depth=7, budget=7)  # knows 9 tokens after the prefill's
    generation = engine.generate([TEXT[:5]], 13)
    assert_same(generation.tokens[0], TEXT[5:18])
    assert generation.tokens_per_round[0].tolist() == [8, 2, 1, 1]
    assert max(int(record.tree.token_ids.max()) for record in generation.rounds) < 50


def test_temperature_is_honoured():
    target, prompts = AttentionTarget(), [[1, 2, 3]]
    greedy = autoregressive(target, prompts, 16)
    engine = engine_on(target, hostile_drafter(greedy.tokens))
    sampled = {seed: engine.generate(prompts, 16, temperature=1.0, seed=seed).tokens[0].tolist() for seed in range(4)}
    assert len({*map(tuple, sampled.values())}) == 4
    assert greedy.tokens[0].tolist() not in sampled.values()
    # 0 is the limit of small temperatures, and a nucleus of almost nothing is its likeliest token
    for options in ({"temperature": 1e-9}, {"temperature": 1.0, "top_p": 1e-9}):
        assert_same(engine.generate(prompts, 16, seed=3, **options).tokens[0], greedy.tokens[0])


def test_sampled_token_is_the_choice_after_its_position_for_its_request_id():
    options: dict[str, Any] = {"temperature": 1.0, "top_p": 0.9, "seed": 6}
    target, prompt = AttentionTarget(), [3, 1, 4]
    engine = engine_on(target, repeating_drafter, depth=2, budget=4)
    tokens = engine.generate([prompt], 12, request_ids=[9], **options).tokens[0]
    text = np.array([[*prompt, *tokens]], np.int32)
    cache = KVCache(target.new_cache(1, text.size), np.zeros((1, 1), np.int32), np.zeros(1, np.int32))
    logits = target.forward(chain_tree(text), cache).logits
    positions = np.arange(text.size, dtype=np.int32)[None]
    choices = reference.choose_tokens(logits, positions=positions, request_ids=np.array([9]), **options)
    assert_same(tokens, choices[0, len(prompt) - 1 : -1])


def test_sampling_is_keyed_by_request_id_and_not_by_place():
    engine = engine_on(AttentionTarget(), repeating_drafter, depth=2, budget=4)
    first = engine.generate([[3, 1]] * 3, 12, temperature=1.0, request_ids=[5, 9, 5])
    assert_same(first.tokens[0], first.tokens[2])
    assert first.tokens[0].tolist() != first.tokens[1].tolist()


class SpoiltTarget(AttentionTarget):
    """Its logits hold a NaN after the node of one token wherever it stands after ``position``."""

    def __init__(self, position, token):
        super().__init__()
        self.position, self.token = position, token

    def forward(self, tree, cache, **options):
        output = super().forward(tree, cache, **options)
        where = (cache.prefix_lens[:, None] + tree.depths == self.position) & (tree.token_ids == self.token)
        if options.get("last_only"):
            where = np.take_along_axis(where, tree.node_counts[:, None] - 1, 1)
        output.logits[where, 3] = np.nan
        return output


@pytest.mark.parametrize("mode", ["tree", "chain", "autoregressive"])
def test_unusable_logits_name_request_and_position(mode):
    prompts = [[4, 4, 4, 4, 4], [1, 2, 3], [0, 0]]
    tokens = autoregressive(AttentionTarget(), prompts, 20).tokens
    at_each = zip(*([*p, *t][6:20] for p, t in zip(prompts, tokens, strict=True)), strict=True)
    position, token = next((6 + i, t[1]) for i, t in enumerate(at_each) if t[1] not in (t[0], t[2]))
    engine = engine_on(SpoiltTarget(position, token), OracleDrafter(tokens, VOCABULARY))
    with pytest.raises(NonFiniteLogitsError, match=rf"request 1: .* after position {position} "):
        engine.generate(prompts, 20, mode=mode)


def test_unusable_logits_after_the_prompt_name_its_last_position():
    engine = engine_on(SpoiltTarget(position=2, token=3))
    with pytest.raises(NonFiniteLogitsError, match=r"request 1: .* after position 2 "):
        engine.generate([[3, 3, 3, 3], [1, 2, 3]], 4, mode="autoregressive")


def test_unusable_logits_of_a_node_that_is_not_kept_do_no_harm():
    prompts = [[1, 2, 3]]
    expected = autoregressive(AttentionTarget(), prompts, 10)
    wrong = int(expected.tokens[0][4] + 1) % VOCABULARY
    engine = engine_on(SpoiltTarget(position=3 + 4, token=wrong), OracleDrafter(expected.tokens, VOCABULARY))
    generation = engine.generate(prompts, 10)
    assert any((record.tree.token_ids == wrong).any() for record in generation.rounds)
    assert_same_tokens(generation, expected)


class Recorder:
    """Drafts as another drafter does, and keeps every context."""

    hidden_layers = (0, 2)

    def __init__(self, drafter):
        self.drafter, self.contexts = drafter, []

    def __call__(self, context, depth, topk):
        self.contexts.append(context)
        return self.drafter(context, depth, topk)


def recorded(prompts, max_new_tokens, stops=(), **options):
    target = AttentionTarget()
    tokens = autoregressive(target, prompts, max_new_tokens, stops).tokens
    recorder = Recorder(OracleDrafter(tokens, VOCABULARY, noise=NoiseLaw([[0.0, 0.8]])))
    generation = engine_on(target, recorder, depth=4, budget=16, **options).generate(prompts, max_new_tokens, stops)
    return target, generation, recorder.contexts


@pytest.mark.parametrize("prefill_chunk", [2048, 2, 1])
def test_drafter_is_given_the_hidden_states_of_the_accepted_rows(prefill_chunk):
    prompts = [[1, 2, 3], [5]]
    target, generation, contexts = recorded(prompts, 20, prefill_chunk=prefill_chunk)
    kept = [record.acceptance.node_indices for record in generation.rounds]
    assert any((k > np.arange(k.shape[1])).any() for k in kept)  # the first rows of a pass are other rows
    for request, prompt in enumerate(prompts):
        of = [(c, c.request_ids.index(request)) for c in contexts if request in c.request_ids]
        rows = {layer: np.concatenate([c.hidden_states[b][layer] for c, b in of]) for layer in Recorder.hidden_layers}
        # together they are the rows of one pass over all that is committed but for the root
        text = np.array([*prompt, *generation.tokens[request]], np.int32)[: len(of[-1][0].tokens[of[-1][1]]) - 1]
        cache = KVCache(target.new_cache(1, len(text)), np.zeros((1, 1), np.int32), np.zeros(1, np.int32))
        whole = target.forward(chain_tree(text[None]), cache, hidden_layers=Recorder.hidden_layers).hidden_states
        for layer in Recorder.hidden_layers:
            assert_close(rows[layer], whole[layer][0], row=("verify_attention", "float64"), what=f"layer {layer}")
        assert of[0][0].hidden_states[of[0][1]][0].shape[0] == len(prompt)


def test_a_long_prompt_takes_memory_in_proportion_to_its_length():
    """Not to its square: visibility of 40,000 tokens in one pass would be 200 MB."""
    text = np.arange(40_050) % 50
    engine = Engine(ScriptedTarget([text], 50), NgramDrafter(), depth=2, budget=2)
    tracemalloc.start()
    try:
        generation = engine.generate([text[:40_000]], 8)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert generation.tokens[0].tolist() == text[40_000:40_008].tolist()
    assert peak < 60e6


def test_context_has_the_committed_tokens_the_roots_and_who_began_and_ended():
    prompts = [[1, 2, 3], [5], [4, 4]]
    _, free, _ = recorded(prompts, 20)
    stop = int(free.tokens[1][4])  # ends the second request early
    _, generation, contexts = recorded(prompts, 20, [stop])
    assert generation.finish_reasons[1] == "stop"
    began: list[int] = []
    running: list[int] = []
    for context, record in zip(contexts, generation.rounds, strict=True):
        began += context.began
        assert [r for r in running if r not in context.request_ids] == context.ended
        running = context.request_ids
        assert record.request_ids == tuple(running)
        assert context.root_token_ids.tolist() == [int(tokens[-1]) for tokens in context.tokens]
        for request, tokens in zip(running, context.tokens, strict=True):
            text = [*prompts[request], *generation.tokens[request].tolist()]
            assert tokens.tolist() == text[: len(tokens)]
            with pytest.raises(ValueError, match="read-only"):
                tokens[0] = 0
    assert contexts[0].began == began  # each began once, in the first round
    assert any(context.ended for context in contexts)


class Keeping(RandomDrafter):
    """A drafter that keeps something of each request, and notes who is reported as ended."""

    def __init__(self, seed, fails_at=math.inf):
        super().__init__(seed)
        self.kept: set[int] = set()
        self.reported: list[int] = []
        self.drafts, self.fails_at = 0, fails_at

    def __call__(self, context, depth, topk):
        self.forget(context.ended)
        self.kept.update(context.request_ids)
        self.drafts += 1
        if self.drafts == self.fails_at:
            raise RuntimeError("no more")
        return super().__call__(context, depth, topk)

    def forget(self, request_ids):
        self.reported += request_ids
        self.kept.difference_update(request_ids)


@pytest.mark.parametrize("how", ["to its end", "with a stop", "left early", "failed", "in the prefill"])
def test_drafter_is_told_of_every_request_that_ended_also_in_the_last_round(how):
    prompts = [[1, 2, 3], [5], [4, 4]]
    drafter = Keeping(3, 2 if how == "failed" else math.inf)
    engine = Engine(AttentionTarget(), drafter, depth=2, budget=3)
    _, free, _ = recorded(prompts, 20)
    stops = [int(free.tokens[1][4])] if how == "with a stop" else []
    if how == "left early":
        stream: Any = engine.stream(prompts, 20)
        while not drafter.drafts:
            next(stream)
        stream.close()
    elif how == "failed":
        with pytest.raises(RuntimeError, match="no more"):
            engine.generate(prompts, 20)
    else:
        generation = engine.generate(prompts, 1 if how == "in the prefill" else 20, stops)
        assert drafter.drafts == len(generation.rounds)  # none only to say who ended
    assert drafter.kept == set()
    assert sorted(set(drafter.reported)) == ([] if how == "in the prefill" else [0, 1, 2])
    assert len(drafter.reported) == len(set(drafter.reported))


def test_request_that_ends_in_the_prefill_is_never_shown_to_the_drafter():
    prompts = [[1, 2, 3], [0]]
    first, second = (int(tokens[0]) for tokens in autoregressive(AttentionTarget(), prompts, 1).tokens)
    assert first != second
    _, _, contexts = recorded(prompts, 6, [first])
    assert (contexts[0].request_ids, contexts[0].began, contexts[0].ended) == ([1], [1], [])


class PageWatch(AttentionTarget):
    """Sees that no two requests share a page, and remembers who had which."""

    def __init__(self):
        super().__init__()
        self.passes = []

    def forward(self, tree, cache, **options):
        rows = cache.prefix_lens + tree.node_counts
        owned = [t[: -(-int(n) // cache.data.shape[2])].tolist() for t, n in zip(cache.page_table, rows, strict=True)]
        assert np.unique(np.concatenate(owned)).size == sum(map(len, owned))
        assert cache.page_table.dtype == cache.prefix_lens.dtype == np.int32
        self.passes.append((cache.prefix_lens.tolist(), owned))
        return super().forward(tree, cache, **options)


@pytest.mark.parametrize("page_size", [1, 4, 64])
@pytest.mark.parametrize("resident", [False, True])
def test_pages_of_a_finished_request_go_to_those_that_wait(page_size, resident):
    prompts = [[1, 2, 3], [5, 4, 3, 2, 1, 0, 5, 4, 3], [4, 4], [0] * 9]
    tokens = autoregressive(AttentionTarget(), prompts, 20).tokens
    target = PageWatch()
    room = {"max_batch": 3, "page_size": page_size, "cache_rows": 64}  # of which no two of the long ones go together
    engine = engine_on(target, repeating_drafter, budget=2, resident=resident, **room)
    generation = engine.generate(prompts, 20)
    for i, expected in enumerate(tokens):
        assert_same(generation.tokens[i], expected)
    pages = {page for _, owned in target.passes for request in owned for page in request}
    assert len(pages) <= 64 // page_size


@pytest.mark.parametrize("mode", ["tree", "chain", "autoregressive"])
def test_a_stream_yields_what_a_generation_has_as_soon_as_it_is_committed(mode):
    prompts, stop = [[1, 2, 3], [5], [4, 4]], [6]
    target = PageWatch()
    engine = engine_on(target, RandomDrafter(2), depth=3, budget=6)
    told: list[Emission] = []
    whole = engine.generate(prompts, 12, stop, mode=mode, temperature=0.9, seed=3, on_emission=told.append)
    target.passes.clear()
    stream = engine.stream(prompts, 12, stop, mode=mode, temperature=0.9, seed=3)
    assert target.passes == []
    emissions = []
    for emission in stream:
        emissions.append(emission)
        steps = 1 + max(sum(e.request_id == r for e in emissions) for r in range(3))
        assert len(target.passes) <= steps  # none is run ahead
    for request, tokens in enumerate(whole.tokens):
        own = [e for e in emissions if e.request_id == request]
        assert_same(np.concatenate([e.token_ids for e in own]), tokens)
        assert [e.finish_reason for e in own] == [None] * (len(own) - 1) + [whole.finish_reasons[request]]
        assert [len(e.token_ids) for e in own] == [1, *whole.tokens_per_round[request]]
    assert [(e.request_id, e.token_ids.tolist()) for e in told] == [
        (e.request_id, e.token_ids.tolist()) for e in emissions
    ]


def test_a_stream_checks_its_arguments_before_it_is_read():
    with pytest.raises(ValueError, match=r"max_new_tokens must be in 1 … \d+, got 0"):
        scripted().stream([TEXT[:5]], 0)
    assert list(scripted().stream([], 4)) == []


class UsedSlotsTarget(AttentionTarget):
    """Leaves out the logits of the last slots where no request uses them, or of one more than that."""

    def __init__(self, too_many=0):
        super().__init__()
        self.too_many = too_many

    def forward(self, tree, cache, *, last_only=False, **options):
        output = super().forward(tree, cache, last_only=last_only, **options)
        if not last_only:
            output.logits = np.ascontiguousarray(output.logits[:, : tree.node_counts.max() - self.too_many])
        return output


def test_a_target_may_leave_out_the_slots_that_no_request_uses():
    prompts = [[1, 2, 3], [5]]
    expected = autoregressive(AttentionTarget(), prompts, 20, temperature=0.7)
    generation = engine_on(UsedSlotsTarget(), RandomDrafter(1), budget=9).generate(prompts, 20, temperature=0.7)
    assert_same_tokens(generation, expected)
    assert_accounts(generation)
    assert any((record.tree.node_counts < 10).all() for record in generation.rounds)
    with pytest.raises(ValueError, match=r"target.forward must return logits of shape \(2, 10, 11\), got \(2, \d, 1"):
        engine_on(UsedSlotsTarget(1), RandomDrafter(1), budget=9).generate(prompts, 20)


class OwnCacheTarget:
    """Keeps its cache itself: one page a request, of another target's array."""

    vocab_size = VOCABULARY

    def __init__(self):
        self.inner, self.events = AttentionTarget(), []

    def open_cache(self, most_rows):
        self.events.append(("open", most_rows))
        return OwnCache(self)

    def forward(self, tree, cache, **options):
        return self.inner.forward(tree, cache.pages, **options)


class OwnCache:
    """One page a request, for the batch that is in view."""

    def __init__(self, target):
        self.target, self.like, self.data = target, np.zeros(0), target.inner.new_cache(4, 64)

    def view(self, requests, prefix_lens, window):
        self.prefix_lens = prefix_lens
        self.pages = KVCache(self.data, np.array(requests, np.int32)[:, None], prefix_lens)
        return self

    def compact(self, view, acceptance):
        reference.compact_cache(self.data, self.pages.page_table, self.prefix_lens, acceptance)

    def release(self, request):
        self.target.events.append(("release", request))


def test_a_target_may_keep_its_cache_itself():
    prompts, target = [[1, 2, 3], [5], [4, 4]], OwnCacheTarget()
    expected = autoregressive(AttentionTarget(), prompts, 20, [6])
    generation = engine_on(target, RandomDrafter(4), depth=3, budget=6).generate(prompts, 20, [6])
    assert_same_tokens(generation, expected)
    assert target.events[0] == ("open", [len(prompt) + 20 + 1 + 6 for prompt in prompts])
    assert sorted(target.events[1:]) == [("release", 0), ("release", 1), ("release", 2)]


def test_a_drafter_of_a_larger_vocabulary_is_refused():
    with pytest.raises(
        ValueError, match="drafter OracleDrafter has a vocabulary of 51 tokens and the target one of 50"
    ):
        scripted(OracleDrafter([TEXT], 51))


def test_no_prompts_give_an_empty_generation():
    generation = scripted().generate([], 5)
    assert (generation.tokens, generation.finish_reasons, generation.rounds, generation.tau) == ([], [], [], None)


def test_seconds_of_every_stage_are_summed():
    generation = scripted().generate([TEXT[:5]], 25)
    assert tuple(generation.seconds) == STAGES
    assert min(generation.seconds.values()) > 0


def test_autoregressive_run_never_calls_the_drafter():
    def drafter(context, depth, topk):
        raise AssertionError("called")

    for mode, options in {"autoregressive": {}, "tree": {"budget": 0}, "chain": {"depth": 0}}.items():
        generation = scripted(drafter, **options).generate([TEXT[:5]], 8, mode=mode)
        assert_same(generation.tokens[0], TEXT[5:13])
        assert generation.tau == 1.0


@pytest.mark.parametrize(
    "arguments, options, error, message",
    [
        (([1, 2], 4), {}, ValueError, r"prompts\[0\] must have shape \(n,\), got \(\); put a single"),
        (([[[1, 2]]], 4), {}, ValueError, r"prompts\[0\] must have shape \(n,\), got \(1, 2\)"),
        (([[1], []], 4), {}, ValueError, r"prompts\[1\] must have at least one token, got none"),
        (([[1], [0, 50]], 4), {}, ValueError, r"prompts\[1\]\[1\] must be in 0 … 49, got 50"),
        (([[-1]], 4), {}, ValueError, r"prompts\[0\]\[0\] must be in 0 … 49, got -1"),
        (([[1.0, 2.0]], 4), {}, TypeError, r"prompts\[0\] must hold integer token ids, got float64"),
        (([[True]], 4), {}, TypeError, r"prompts\[0\] must hold integer token ids, got bool"),
        ((7, 4), {}, TypeError, r"prompts must be a sequence, got int 7"),
        (([[1]], 0), {}, ValueError, r"max_new_tokens must be in 1 … \d+, got 0"),
        (([[1]], 4.0), {}, TypeError, r"max_new_tokens must be an integer, got float 4.0"),
        (([[1], [1, 2, 3]], 18), {}, ValueError, r"prompts\[1\] has 3 tokens .* is 18: .* max_context = 20, got 21"),
        (([[1]], 4, [3, 50]), {}, ValueError, r"stop_token_ids\[1\] must be in 0 … 49 .*, got 50"),
        (([[1]], 4, [-1]), {}, ValueError, r"stop_token_ids\[0\] must be in 0 … 49 .*, got -1"),
        (([[1]], 4, 3), {}, TypeError, r"stop_token_ids must be a sequence, got int 3"),
        (([[1]], 4), {"temperature": -0.5}, ValueError, r"temperature must be finite and at least 0, got -0.5"),
        (([[1]], 4), {"temperature": float("nan")}, ValueError, r"temperature must be finite and at least 0, got nan"),
        (([[1]], 4), {"top_p": 0.0}, ValueError, r"top_p must be over 0 and at most 1, got 0.0"),
        (([[1]], 4), {"top_p": 1.5}, ValueError, r"top_p must be over 0 and at most 1, got 1.5"),
        (([[1]], 4), {"seed": -1}, ValueError, r"seed must be in 0 … \d+, got -1"),
        (([[1]], 4), {"mode": "trees"}, ValueError, r"mode must be one of 'tree', 'chain', 'autoregressive', got 'tr"),
        (([[1]], 4), {"request_ids": [1, 2]}, ValueError, r"request_ids must have one entry a prompt, 1, got 2"),
        (([[1]], 4), {"request_ids": [-1]}, ValueError, r"request_ids\[0\] must be in 0 … \d+, got -1"),
    ],
)
def test_wrong_argument_is_named_before_any_work(arguments, options, error, message):
    class Untouched(ScriptedTarget):
        def new_cache(self, num_pages, page_size):
            raise AssertionError("work began")

    engine = engine_on(Untouched([TEXT], 50), NgramDrafter(), max_context=20)
    with pytest.raises(error, match=message):
        engine.generate(*arguments, **options)


@pytest.mark.parametrize("mode", ["tree", "chain"])
def test_drafting_needs_a_drafter(mode):
    with pytest.raises(ValueError, match=f"mode '{mode}' needs a drafter"):
        engine_on(ScriptedTarget([TEXT], 50)).generate([TEXT[:5]], 4, mode=mode)


@pytest.mark.parametrize(
    "options, error, message",
    [
        ({"drafter": 3}, TypeError, r"drafter must be callable .*, got int"),
        (
            {"drafter": NgramDrafter},
            TypeError,
            r"must be a drafter, got the class NgramDrafter: pass NgramDrafter",
        ),
        ({"depth": -1}, ValueError, r"depth must be in 0 … \d+, got -1"),
        ({"budget": -1}, ValueError, r"budget must be in 0 … \d+, got -1"),
        ({"topk": 0}, ValueError, r"topk must be in 1 … 50 \(the vocabulary size\), got 0"),
        ({"topk": 51}, ValueError, r"topk must be in 1 … 50 \(the vocabulary size\), got 51"),
        ({"page_size": 0}, ValueError, r"page_size must be in 1 … \d+, got 0"),
        ({"prefill_chunk": 0}, ValueError, r"prefill_chunk must be in 1 … \d+, got 0"),
        ({"max_context": 0}, ValueError, r"max_context must be in 1 … \d+, got 0"),
        ({"backend": "nothing"}, ValueError, r"backend must be one of .*, got 'nothing'"),
    ],
)
def test_wrong_engine_option_is_named(options, error, message):
    with pytest.raises(error, match=message):
        Engine(ScriptedTarget([TEXT], 50), **options)


def test_a_target_that_was_not_made_is_refused():
    made_later: Any = ScriptedTarget
    with pytest.raises(TypeError, match=r"target must be a target, got the class ScriptedTarget: pass ScriptedTarget"):
        Engine(made_later)


def draft(log_probs=((-1.0, -2.0),), token_ids=((1, 2),), dtype=np.float32, ids=np.int32):
    """A drafter that gives every request these depths."""

    def bad_drafter(context, depth, topk):
        B = len(context.request_ids)
        tiled = [np.tile(np.array(a, t), (B, 1, 1)) for a, t in ((log_probs, dtype), (token_ids, ids))]
        return tuple(tiled)

    return bad_drafter


def only_second(context, depth, topk):
    """Request 1 alone is at fault."""
    ids = np.array([[[1 if r == 0 else 50]] for r in context.request_ids], np.int32)
    return np.full(ids.shape, -1.0, np.float32), ids


@pytest.mark.parametrize(
    "drafter, error, message",
    [
        (draft(token_ids=((1, 50),)), ValueError, r"drafter bad_drafter, request 0: token_ids\[0, 0, 1\] .* got 50"),
        (draft(token_ids=((-1, 2),)), ValueError, r"drafter bad_drafter, request 0: token_ids\[0, 0, 0\] .* got -1"),
        (only_second, ValueError, r"drafter only_second, request 1: token_ids\[0, 0, 0\] must be in 0 … 49, got 50"),
        (draft(token_ids=((1, 1),)), ValueError, r"drafter bad_drafter, request 0: .* distinct"),
        (draft(((-2.0, -1.0),)), ValueError, r"drafter bad_drafter, request 0: log_probs\[0, 0, 1\] .* sort"),
        (draft(((0.5, -1.0),)), ValueError, r"drafter bad_drafter, request 0: log_probs\[0, 0, 0\] must be at most 0"),
        (draft(((np.inf, -1.0),)), ValueError, r"drafter bad_drafter, request 0: log_probs.* must be at most 0"),
        (draft(dtype=np.float64), TypeError, r"drafter bad_drafter must return float32 .* got float64 and int32"),
        (draft(ids=np.uint8), TypeError, r"drafter bad_drafter must return float32 .* got float32 and uint8"),
        (draft(((-1.0,) * 3,), ((1, 2, 3),)), ValueError, r"drafter bad_drafter .* k in 1 … 2, got \(2, 1, 3\)"),
        (draft(((),), ((),)), ValueError, r"drafter bad_drafter .* k in 1 … 2, got \(2, 1, 0\)"),
        (draft(((-1.0,),) * 2, ((1,),) * 2), ValueError, r"drafter bad_drafter .* \(2, 1, k\) .* got \(2, 2, 1\)"),
        (draft(token_ids=((1,),)), ValueError, r"token_ids of log_probs' shape \(2, 1, 2\), got \(2, 1, 1\)"),
        (lambda context, depth, topk: None, TypeError, r"must return \(log_probs, token_ids\), got NoneType"),
        (lambda context, depth, topk: ([[[0.0]]], [[[1]]]), TypeError, r"must return two arrays: .* got list"),
    ],
)
def test_wrong_draft_names_drafter_and_request(drafter, error, message):
    engine = engine_on(ScriptedTarget([TEXT, TEXT], 50), drafter, depth=1, budget=4, topk=2)
    with pytest.raises(error, match=message):
        engine.generate([TEXT[:5], TEXT[:5]], 5)


def test_cache_that_is_no_array_is_refused():
    class Other(ScriptedTarget):
        def new_cache(self, num_pages, page_size):
            return [0]

    with pytest.raises(TypeError, match=r"got list"):
        engine_on(Other([TEXT], 50)).generate([TEXT[:5]], 2, mode="autoregressive")


def test_scripted_target_follows_each_request_as_the_batch_shrinks():
    texts = [TEXT, TEXT[::-1].copy(), np.roll(TEXT, 7)]
    prompts = [texts[0][:9], texts[1][:1], texts[2][:4]]
    stop = int(texts[0][12])
    engine = engine_on(ScriptedTarget(texts, 50), NgramDrafter(), page_size=2)
    generation = engine.generate(prompts, 20, [stop], temperature=1.0)  # one-hot logits: nothing to sample
    for text, prompt, tokens in zip(texts, prompts, generation.tokens, strict=True):
        assert_same(tokens, text[len(prompt) : len(prompt) + len(tokens)])
    assert len(generation.tokens[0]) == 4


def test_scripted_target_has_no_choice_after_its_last_token():
    with pytest.raises(NonFiniteLogitsError, match=r"request 0: .* after position 59 "):
        scripted().generate([TEXT[:5]], 60)
    assert_same(scripted().generate([TEXT[:5]], 55).tokens[0], TEXT[5:])


@pytest.mark.parametrize(
    "make, error, message",
    [
        (lambda: ScriptedTarget([[1, 50]], 50), ValueError, r"texts\[0\]\[1\] must be in 0 … 49, got 50"),
        (lambda: ScriptedTarget([[1.5]], 50), TypeError, r"texts\[0\] must hold integer token ids"),
        (lambda: ScriptedTarget([], 0), ValueError, r"vocab_size must be in 1 … \d+, got 0"),
        (
            lambda: scripted().generate([[49, 3]], 2),
            ValueError,
            r"every prompt must be the beginning of a text, got \[49, 3\]",
        ),
        (lambda: scripted(Recorder(NgramDrafter())).generate([TEXT[:5]], 2), ValueError, r"hidden_layers must be \(\)"),
    ],
)
def test_scripted_target_refuses_what_it_has_no_text_for(make, error, message):
    with pytest.raises(error, match=message):
        make()


class Stub:
    """A target whose cache and logits are whatever the test wants."""

    vocab_size = 4

    def __init__(self, cache=None, width=4, result=None):
        self.cache, self.width, self.result = cache, width, result

    def new_cache(self, num_pages, page_size):
        return np.zeros((1, num_pages, page_size, 1), np.float32) if self.cache is None else self.cache

    def forward(self, tree, cache, *, hidden_layers=(), last_only=False):
        shape = (tree.batch_size, 1 if last_only else tree.num_slots, self.width)
        return TargetOutput(np.zeros(shape, np.float32)) if self.result is None else self.result


@pytest.mark.parametrize(
    ("target", "error", "match"),
    [
        (Stub(np.zeros((1, 1, 1, 1), np.float32)), ValueError, r"target.new_cache must return .*\(layers, 1, 16, C"),
        (Stub(np.zeros((1, 1, 16, 2), np.float32)[..., :1]), ValueError, "target.new_cache must .* C-contiguous"),
        (Stub(np.zeros((1, 1, 16, 1), complex)), TypeError, "target.new_cache must return a writable array"),
        (Stub([0]), TypeError, "target.new_cache's result must be a NumPy, CuPy or torch array"),
        (Stub(width=10), ValueError, r"target.forward must return logits of shape \(1, 1, 4\), got \(1, 1, 10\)"),
        (Stub(width=3), ValueError, r"target.forward must return logits of shape \(1, 1, 4\), got \(1, 1, 3\)"),
        (Stub(result=3), TypeError, "target.forward must return a TargetOutput, got int"),
    ],
)
def test_a_target_that_breaks_the_contract_is_named(target, error, match):
    with pytest.raises(error, match=match):
        Engine(target).generate([[1, 1, 1]], 4, mode="autoregressive")


def test_what_is_no_target_is_refused():
    with pytest.raises(TypeError, match=r"target must have the methods of ddtree.protocols.Target, got int"):
        Engine(42)


def test_a_drafter_cannot_change_what_is_committed():
    """Writing into the context, by force too, changes how fast tokens come and never which."""
    text = np.arange(40) % 10

    def hostile(context, depth, topk):
        shape = (len(context.tokens), depth, 1)
        for tokens in context.tokens:
            with contextlib.suppress(ValueError):
                tokens.flags.writeable = True
                tokens[:] = 3
        context.root_token_ids[:] = 7
        context.request_ids.clear()
        return np.full(shape, -1.0, np.float32), np.full(shape, 5, np.int32)

    target = ScriptedTarget([text, text], vocab_size=10)
    run = Engine(target, hostile, depth=3, budget=3).generate([text[:5], text[:8]], 20)
    assert [t.tolist() for t in run.tokens] == [text[5:25].tolist(), text[8:28].tolist()]
