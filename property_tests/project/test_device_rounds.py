"""The rounds of CUDA models, on the host: mirrors, graphs and addresses are real, CuPy is :mod:`.fake_cupy`.

What only a GPU can show, kernels and streams, is in :mod:`.test_gpu_torch`.
"""

import copy
import functools
import gc
import pickle
import weakref
from dataclasses import fields, replace

import numpy as np
import pytest

from ddtree import Acceptance, DDTreeDecoder, DraftTree, OracleDrafter
from ddtree.drafters import NoiseLaw
from ddtree.property_tests.compare import assert_same
from ddtree.property_tests.targets import DRAFTERS, VOCABULARY, RandomDrafter
from ddtree.protocols import DraftContext

pytest.importorskip("torch", reason="optional library torch is not installed")
pytest.importorskip("transformers", reason="optional library transformers is not installed")

import torch

from ddtree.interop import huggingface_rounds as rounds
from ddtree.interop.mirror import Mirror
from ddtree.property_tests.project import fake_cupy
from ddtree.property_tests.project.hf_models import greedy, model_of

PROMPTS = [[3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5], [2, 7, 1], [8]]
NEW = 14


@functools.cache
def expected(name):
    """What transformers makes of PROMPTS, each alone."""
    return [greedy(model_of(name), prompt, NEW).tolist() for prompt in PROMPTS]


def tokens_of(generation):
    return [tokens.tolist() for tokens in generation.tokens]


@pytest.fixture
def gpu(monkeypatch):
    """Torch's tensors are on a GPU, as far as anyone here can tell."""
    for name in ("llama", "gemma3", "gpt2", "deepseek_v3"):
        expected(name)  # before
    fake_cupy.install(monkeypatch)


class OnTheDevice:
    """Drafts as another does, in torch's tensors; ``spoil`` may change them."""

    def __init__(self, drafter, spoil=lambda *draft: None, ids=torch.int32):
        self.drafter, self.spoil, self.ids = drafter, spoil, ids

    def __call__(self, context, depth, topk):
        assert context.root_token_ids.get().tolist() == [int(tokens[-1]) for tokens in context.tokens]
        log_probs, token_ids = map(torch.from_numpy, self.drafter(context, depth, topk))
        token_ids = token_ids.to(self.ids)
        self.spoil(log_probs, token_ids)
        return log_probs, token_ids


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt2", "deepseek_v3"])
def test_tokens_are_those_of_generate_and_most_rounds_are_two_graphs(gpu, name, cache):
    drafter = DRAFTERS["random"](expected(name), 3)
    decoder = DDTreeDecoder(model_of(name), drafter, depth=4, budget=9, cache=cache)
    generation = decoder.generate(PROMPTS, NEW)
    assert tokens_of(generation) == expected(name)
    assert generation.tau is not None
    assert generation.tau > 1
    assert fake_cupy.Graph.launches > len(generation.rounds)
    assert not fake_cupy.CUDA.MemoryPool.kept  # their graphs are gone


@pytest.mark.parametrize("ids", [torch.int32, torch.int64])
def test_drafts_on_the_device_are_read_there(gpu, ids):
    oracle = OracleDrafter(expected("llama"), VOCABULARY, noise=NoiseLaw([[0.4, 0.4]]))
    decoder = DDTreeDecoder(model_of("llama"), OnTheDevice(oracle, ids=ids), depth=4, budget=9)
    assert tokens_of(decoder.generate(PROMPTS, NEW)) == expected("llama")


def test_drafts_may_change_their_width_and_their_place_from_round_to_round(gpu):
    count = [0]

    def drafter(context, depth, topk):
        count[0] += 1
        log_probs, token_ids = RandomDrafter(5 + count[0] % 4)(context, depth, topk)
        if count[0] % 3 == 0:
            return torch.from_numpy(log_probs), torch.from_numpy(token_ids)
        return [log_probs, token_ids] if count[0] % 3 == 1 else (log_probs, token_ids)

    for budget, depth in ((9, 4), (70, 3), (0, 3), (3, 0)):
        decoder = DDTreeDecoder(model_of("llama"), drafter, depth=depth, budget=budget)
        assert tokens_of(decoder.generate(PROMPTS, NEW)) == expected("llama")


@pytest.mark.parametrize(
    "ids, place, value, told",
    [
        (torch.int32, 1, VOCABULARY, r"token_ids\[0, 1, 0\] must be in 0 … 10, got 11"),
        (torch.int64, 1, 2**32, r"token_ids\[0, 1, 0\] must be in 0 … 10, got 4294967296"),
        (torch.int32, 0, 0.5, r"log_probs\[0, 1, 0\] must be at most 0, got 0.5"),
    ],
)
def test_a_draft_on_the_device_that_is_none_is_refused_and_the_decoder_goes_on(gpu, ids, place, value, told):
    calls = []

    def spoil(*draft):
        calls.append(1)
        if len(calls) == 3:
            draft[place][1, 1, 0] = value

    oracle = OracleDrafter(expected("llama"), VOCABULARY, noise=NoiseLaw([[0.0, 0.5]]))
    decoder = DDTreeDecoder(model_of("llama"), OnTheDevice(oracle, spoil, ids), depth=3, budget=6)
    with pytest.raises(ValueError, match=f"drafter OnTheDevice, request 1: {told}"):
        decoder.generate(PROMPTS, NEW)
    assert tokens_of(decoder.generate(PROMPTS, NEW)) == expected("llama")


def test_a_draft_on_the_host_that_is_none_is_refused_too(gpu):
    def drafter(context, depth, topk):
        return np.full((3, depth, 1), 0.5, np.float32), np.zeros((3, depth, 1), np.int32)

    with pytest.raises(ValueError, match=r"request 0: log_probs\[0, 0, 0\] must be at most 0"):
        DDTreeDecoder(model_of("llama"), drafter).generate(PROMPTS, NEW)


def same(got, wanted):
    if isinstance(wanted, DraftTree | Acceptance):
        return all(same(getattr(got, f.name), getattr(wanted, f.name)) for f in fields(wanted))
    return got == wanted if isinstance(wanted, int | tuple) else assert_same(got, wanted) is None


@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.9, "top_p": 0.9, "seed": 3}])
def test_rounds_are_those_of_the_host_and_travel(monkeypatch, sampling):
    decoder = DDTreeDecoder(model_of("gemma3"), RandomDrafter(7), depth=4, budget=9)
    here = decoder.generate(PROMPTS, NEW, **sampling)
    with monkeypatch.context() as patch:
        fake_cupy.install(patch)
        there = DDTreeDecoder(model_of("gemma3"), RandomDrafter(7), depth=4, budget=9).generate(
            PROMPTS, NEW, **sampling
        )
    assert len(there.rounds) == len(here.rounds) > 3
    for record in (there.rounds, pickle.loads(pickle.dumps(there.rounds))):
        for got, wanted in zip(record, here.rounds, strict=True):
            assert all(same(getattr(got, f.name), getattr(wanted, f.name)) for f in fields(wanted))


def test_a_drafter_that_asks_is_shown_the_hidden_states_of_the_accepted_rows(gpu):
    oracle = OracleDrafter(expected("llama"), VOCABULARY, noise=NoiseLaw([[0.3, 0.6]]))
    seen: dict[int, list[torch.Tensor]] = {}

    class Recorder:
        hidden_layers = (1,)

        def __call__(self, context, depth, topk):
            for request, states in zip(context.request_ids, context.hidden_states, strict=True):
                seen.setdefault(request, []).append(states[1])
            return oracle(context, depth, topk)

    model = model_of("llama")
    assert tokens_of(DDTreeDecoder(model, Recorder(), depth=4, budget=9).generate(PROMPTS, NEW)) == expected("llama")
    for request, prompt in enumerate(PROMPTS):
        shown = torch.cat(seen[request])
        text = torch.tensor([[*prompt, *expected("llama")[request]][: len(shown)]])
        with torch.no_grad():
            wanted = model(input_ids=text, use_cache=False, output_hidden_states=True).hidden_states[1][0]
        assert torch.allclose(shown, wanted, atol=1e-6)


def test_rounds_say_the_same_whenever_they_are_looked_at(gpu):
    decoder = DDTreeDecoder(model_of("llama"), RandomDrafter(7), depth=4, budget=9)
    later = decoder.generate(PROMPTS, NEW).rounds
    at_once: list[str] = []
    decoder.generate(PROMPTS, NEW, on_round=lambda record: at_once.append(repr(record)))
    assert len(at_once) > 3
    assert [repr(record) for record in later] == at_once


def test_a_round_can_be_copied_with_something_else_in_it(gpu):
    (record, *_) = DDTreeDecoder(model_of("llama"), RandomDrafter(7), depth=4, budget=9).generate(PROMPTS, NEW).rounds
    renamed = replace(record, request_ids=(7, 8, 9))
    for other in (renamed, pickle.loads(pickle.dumps(renamed))):
        assert other.request_ids == (7, 8, 9)
        assert all(same(getattr(other, f.name), getattr(record, f.name)) for f in fields(record)[1:])


def test_a_context_that_is_kept_says_what_was_then_and_does_not_keep_the_run(gpu, monkeypatch):
    kept, runs = [], []
    new_run = DDTreeDecoder.new_run

    def opened(self, *arguments):
        run = new_run(self, *arguments)
        runs.append(weakref.ref(run))
        return run

    monkeypatch.setattr(DDTreeDecoder, "new_run", opened)

    draft = np.full((3, 2, 1), -np.inf, np.float32), np.full((3, 2, 1), -1, np.int32)

    def drafter(context, depth, topk):
        kept.append(context)
        return draft

    DDTreeDecoder(model_of("llama"), drafter, depth=2, budget=2).generate(PROMPTS, 1 + NEW // 2)
    gc.collect()
    assert runs[0]() is None
    for round_, context in enumerate(kept):
        for prompt, row, tokens in zip(PROMPTS, expected("llama"), context.tokens, strict=True):
            assert tokens.tolist() == [*prompt, *row[: 1 + round_]]
        assert context.root_token_ids.get().tolist() == [row[round_] for row in expected("llama")]
    assert len(kept) == NEW // 2


@pytest.mark.parametrize(
    "fault",
    [
        lambda monkeypatch: monkeypatch.setattr(Mirror, "send", lambda self: None),
        lambda monkeypatch: monkeypatch.setattr(rounds._Batch, "take", lambda batch, draft, form: None),
    ],
)
def test_these_tests_can_fail(gpu, monkeypatch, fault):
    """Without a copy, or with a draft that is not found, tokens or τ are others."""
    fault(monkeypatch)
    oracle = OracleDrafter(expected("llama"), VOCABULARY)
    decoder = DDTreeDecoder(model_of("llama"), oracle, depth=4, budget=9)
    try:
        generation = decoder.generate(PROMPTS, NEW)
    except Exception:  # poison is no draft and no token, which shows in many ways
        return
    assert tokens_of(generation) != expected("llama") or (generation.tau or 0) < 2


@pytest.mark.parametrize("enabled", [True, False])
def test_gradients_are_off_in_the_model_alone(gpu, monkeypatch, enabled):
    model, oracle = model_of("llama"), OracleDrafter(expected("llama"), VOCABULARY)
    inside, outside, passes = [], [], iter(range(10**6))
    forward = type(model).forward

    def seen(self, *arguments, **options):
        inside.append(torch.is_grad_enabled())
        if next(passes) == 5:
            raise RuntimeError("out of order")
        return forward(self, *arguments, **options)

    def drafter(context, depth, topk):
        outside.append(torch.is_grad_enabled())
        return oracle(context, depth, topk)

    decoder = DDTreeDecoder(model, drafter, depth=2, budget=3)
    monkeypatch.setattr(type(model), "forward", seen)
    with torch.set_grad_enabled(enabled):
        with pytest.raises(RuntimeError, match="out of order"):
            decoder.generate(PROMPTS, NEW)
        assert torch.is_grad_enabled() == enabled
    assert (set(inside), set(outside)) == ({False}, {enabled})


def test_a_context_can_be_copied_and_pickled(gpu):
    seen = []

    def drafter(context, depth, topk):
        seen.append((context, copy.deepcopy(context), pickle.loads(pickle.dumps(context))))
        shape = (len(context.request_ids), depth, 1)
        return np.full(shape, -np.inf, np.float32), np.full(shape, -1, np.int32)

    DDTreeDecoder(model_of("llama"), drafter, depth=2, budget=2).generate(PROMPTS, 3)
    for context, *copies in seen:
        for other in copies:
            assert type(other) is DraftContext
            assert other.request_ids == context.request_ids
            assert [t.tolist() for t in other.tokens] == [t.tolist() for t in context.tokens]


def test_logits_of_another_shape_are_refused(gpu, monkeypatch):
    decoder = DDTreeDecoder(model_of("llama"), RandomDrafter(7), depth=2, budget=2)
    run = type(decoder.target).run

    def short(self, *arguments):
        logits, hidden = run(self, *arguments)
        return logits[..., :-1], hidden

    monkeypatch.setattr(type(decoder.target), "run", short)
    with pytest.raises(ValueError, match=r"must return logits of shape \(3, \d+, \d+\), got"):
        decoder.generate(PROMPTS, 3)
