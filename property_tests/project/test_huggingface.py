"""DDTreeDecoder on small models of transformers' own classes: its tokens are theirs, and what cannot be is refused."""

import functools
from dataclasses import fields
from types import MethodType, SimpleNamespace

import hypothesis.strategies as st
import numpy as np
import pytest
from click.testing import CliRunner
from hypothesis import given, settings

from ddtree import Acceptance, DDTreeDecoder, NgramDrafter, OracleDrafter, reference
from ddtree.analysis.benchmarks.huggingface import main, measure, random_llama
from ddtree.analysis.record import record_trace
from ddtree.analysis.replay import replay
from ddtree.analysis.rounds import round_table
from ddtree.drafters import NoiseLaw
from ddtree.engine import Emission
from ddtree.policies import fixed_budget
from ddtree.property_tests.compare import assert_close, assert_same
from ddtree.property_tests.strategies import parent_arrays
from ddtree.property_tests.targets import DRAFTERS, VOCABULARY, RandomDrafter, repeating_drafter
from ddtree.trees import chain_tree, tree_from_parents

pytest.importorskip("torch", reason="optional library torch is not installed")
pytest.importorskip("transformers", reason="optional library transformers is not installed")

import torch
import transformers
from transformers import cache_utils

from ddtree.interop.huggingface import HuggingFaceTarget
from ddtree.property_tests.project.hf_models import MODELS, WINDOW, greedy, model_of, new_model

PROMPTS = [[3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5], [2, 7, 1], [8]]
NEW = 14
STATIC = ["llama", "gemma3", "mistral", "deepseek_v3"]


@functools.cache
def expected(name):
    """What transformers makes of PROMPTS, each alone."""
    return [greedy(model_of(name), prompt, NEW) for prompt in PROMPTS]


def assert_tokens(generation, wanted):
    assert [tokens.tolist() for tokens in generation.tokens] == [list(map(int, tokens)) for tokens in wanted]


def tokens_a_round(generation):
    assert generation.tau is not None
    return generation.tau


# The tokens


RUNS = [(name, "dynamic", kind) for name in MODELS for kind in DRAFTERS]
RUNS += [(name, "static", kind) for name in STATIC for kind in ("random", "oracle with noise")]


@pytest.mark.parametrize("name, cache, kind", RUNS)
def test_tokens_are_those_of_generate(name, cache, kind):
    decoder = DDTreeDecoder(model_of(name), DRAFTERS[kind](expected(name), 3), depth=4, budget=9, cache=cache)
    generation = decoder.generate(PROMPTS, NEW)
    assert_tokens(generation, expected(name))
    tau = tokens_a_round(generation)
    assert tau == 1.0 if kind == "hostile" else tau > 1.0
    assert kind != "oracle" or tau > 4


@pytest.mark.parametrize("mode", ["chain", "autoregressive"])
def test_other_modes_give_the_same_tokens(mode):
    decoder = DDTreeDecoder(model_of("gemma3"), OracleDrafter(expected("gemma3"), VOCABULARY), depth=4)
    assert_tokens(decoder.generate(PROMPTS, NEW, mode=mode), expected("gemma3"))


@pytest.mark.parametrize("name", ["llama", "gemma3", "mixtral"])
@settings(max_examples=12)
@given(
    prompts=st.lists(st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=9), min_size=1, max_size=3),
    seed=st.integers(0, 2**32),
    depth=st.integers(1, 5),
    budget=st.sampled_from([1, 4, 12, 33]),
    sampling=st.sampled_from([{}, {"temperature": 0.8}, {"temperature": 1.0, "top_p": 0.9}]),
)
def test_a_tree_run_gives_the_tokens_of_one_token_runs(name, prompts, seed, depth, budget, sampling):
    options = {"seed": seed, "stop_token_ids": [seed % VOCABULARY], **sampling}
    decoder = DDTreeDecoder(model_of(name), RandomDrafter(seed), depth=depth, budget=budget)
    one = decoder.generate(prompts, 10, mode="autoregressive", **options)
    tree = decoder.generate(prompts, 10, **options)
    assert_tokens(tree, one.tokens)
    assert tree.finish_reasons == one.finish_reasons


def test_a_sampled_token_is_the_choice_after_its_position():
    options = {"temperature": 1.0, "top_p": 0.9, "seed": 6}
    model, prompt = model_of("llama"), PROMPTS[0]
    decoder = DDTreeDecoder(model, repeating_drafter, depth=2, budget=6)
    tokens = decoder.generate([prompt], 20, request_ids=[9], **options).tokens[0]
    logits = plain(model, [[*prompt, *tokens]])[0][:, len(prompt) - 1 : -1]
    positions = np.arange(len(prompt) - 1, len(prompt) + 19, dtype=np.int32)[None]
    choices = reference.choose_tokens(logits, positions=positions, request_ids=np.array([9]), **options)
    assert_same(tokens, choices[0])


def plain(model, rows, **options):
    """Logits, and whatever else, of a pass over whole sequences of one length, without a cache or a mask."""
    with torch.no_grad():
        output = model(input_ids=torch.tensor(rows), use_cache=False, **options)
    return output.logits.numpy(), output


def path_logits(model, before, tree, b):
    """Logits after each node of request b: a pass over its path alone. Shorter ones are filled up behind."""
    paths = []
    for node in range(int(tree.node_counts[b])):
        path = []
        while node >= 0:
            path.append(int(tree.token_ids[b, node]))
            node = int(tree.parents[b, node])
        paths.append([*before, *reversed(path)])
    longest = max(map(len, paths))
    logits, _ = plain(model, [path + [0] * (longest - len(path)) for path in paths])
    return np.stack([logits[i, len(path) - 1] for i, path in enumerate(paths)])


@pytest.mark.parametrize("name, cache", [("llama", "dynamic"), ("gemma3", "dynamic"), ("mistral", "static")])
@settings(max_examples=15)
@given(data=st.data(), seed=st.integers(0, 2**16))
def test_logits_after_a_node_are_those_of_its_path_alone_round_after_round(name, cache, data, seed):
    """Trees of any shape behind prefixes of any length, with any path of them accepted."""
    model, rng = model_of(name), np.random.default_rng(seed)
    target = HuggingFaceTarget(model, cache=cache)
    committed = [
        rng.integers(0, VOCABULARY, n).tolist() for n in data.draw(st.lists(st.integers(1, 9), min_size=1, max_size=2))
    ]
    B = len(committed)
    rows = target.open_cache([80] * B)
    width = max(map(len, committed))
    lens = np.array([len(row) for row in committed], np.int32)
    prompt = chain_tree([row + [0] * (width - len(row)) for row in committed], lens)
    logits = target.forward(prompt, rows.view(range(B), lens * 0, lens), last_only=True).logits
    for b, row in enumerate(committed):
        near(logits[b, 0], plain(model, [row])[0][0, -1])
    for _ in range(3):
        shapes = [data.draw(parent_arrays(max_nodes=9), "parents") for _ in range(B)]
        slots = max(map(len, shapes))
        parents = np.stack([np.pad(shape, (0, slots - len(shape))) for shape in shapes])
        tokens = rng.integers(0, VOCABULARY, parents.shape)
        tree = tree_from_parents(tokens, parents, [len(shape) for shape in shapes])
        view = rows.view(range(B), lens, slots)
        logits = target.forward(tree, view).logits
        path = np.full((B, slots), -1, np.int32)
        lengths = np.zeros(B, np.int32)
        for b in range(B):
            near(logits[b, : tree.node_counts[b]], path_logits(model, committed[b], tree, b))
            kept = [int(rng.integers(0, tree.node_counts[b]))]
            while kept[0] > 0:
                kept.insert(0, int(tree.parents[b, kept[0]]))
            path[b, : len(kept)], lengths[b] = kept, len(kept)
            committed[b] += tree.token_ids[b, kept].tolist()
        rows.compact(view, Acceptance(path, lengths, np.zeros(B, np.int32), np.zeros(B, np.bool_)))
        lens = lens + lengths


def near(actual, wanted):
    assert_close(actual, wanted, row=("huggingface", "float64"), scale=np.abs(wanted).max(), what="logits")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_narrower_types_decode_and_accept_what_they_choose_themselves(name, dtype):
    model = new_model(name, dtype=getattr(torch, dtype))
    own = DDTreeDecoder(model).generate(PROMPTS, NEW, mode="autoregressive")
    drafter = OracleDrafter(own.tokens, VOCABULARY, noise=NoiseLaw([[0.6, 0.3]]))
    generation = DDTreeDecoder(model, drafter, depth=4, budget=12).generate(PROMPTS, NEW)
    assert [len(tokens) for tokens in generation.tokens] == [NEW] * 3
    assert tokens_a_round(generation) > 1.5  # but where two logits are as near as rounding, it is the same text


# Stops, prompts and streams


def test_a_request_that_stops_leaves_the_batch_and_the_others_go_on():
    wanted = [tokens.tolist() for tokens in expected("gemma3")]
    stop = wanted[1][2]
    cut = [row[: row.index(stop) + 1] if stop in row else row for row in wanted]
    assert len({len(row) for row in cut}) > 1
    for cache in ("dynamic", "static"):
        decoder = DDTreeDecoder(model_of("gemma3"), RandomDrafter(1), depth=3, budget=6, cache=cache)
        generation = decoder.generate(PROMPTS, NEW, [stop])
        assert_tokens(generation, cut)
        assert generation.finish_reasons == ["stop" if stop in row else "length" for row in cut]


def test_stop_tokens_are_those_of_the_generation_config_unless_given():
    model = new_model("llama")
    wanted = [int(token) for token in expected("llama")[0]]
    for configured in (wanted[5], [wanted[5], VOCABULARY]):  # whatever is beyond the vocabulary is never met
        model.generation_config.eos_token_id = configured
        decoder = DDTreeDecoder(model, NgramDrafter())
        assert_tokens(decoder.generate(PROMPTS[:1], NEW), [wanted[: wanted.index(wanted[5]) + 1]])
        assert_tokens(decoder.generate(PROMPTS[:1], NEW, ()), [wanted])


def padded(side):
    width = max(map(len, PROMPTS))
    rows, mask = np.full((3, width), 10), np.zeros((3, width), int)
    for row, seen, prompt in zip(rows, mask, PROMPTS, strict=True):
        place = slice(width - len(prompt), width) if side == "left" else slice(0, len(prompt))
        row[place], seen[place] = prompt, 1
    return rows, mask


@pytest.mark.parametrize("side", ["left", "right"])
def test_padded_prompts_with_a_mask_are_the_prompts(side):
    decoder = DDTreeDecoder(model_of("qwen3"), NgramDrafter(), budget=4)
    rows, mask = padded(side)
    tensors = torch.tensor(rows), torch.tensor(mask)
    encoded = transformers.BatchEncoding({"input_ids": tensors[0], "attention_mask": tensors[1]})
    for prompts, attention_mask in ((rows, mask), tensors, (encoded, None), ([torch.tensor(p) for p in PROMPTS], None)):
        generation = decoder.generate(prompts, NEW, attention_mask=attention_mask)
        assert_tokens(generation, expected("qwen3"))
    assert_tokens(decoder.generate(**encoded, max_new_tokens=NEW), expected("qwen3"))
    emitted = list(decoder.stream(**encoded, max_new_tokens=NEW))
    for request, wanted in enumerate(expected("qwen3")):
        assert np.concatenate([e.token_ids for e in emitted if e.request_id == request]).tolist() == wanted.tolist()


def test_no_prompts_give_an_empty_generation_and_an_empty_stream():
    decoder = DDTreeDecoder(model_of("llama"), NgramDrafter())
    assert decoder.generate([], 5).tokens == []
    assert list(decoder.stream([], 5)) == []


def test_a_stream_yields_what_is_committed_as_soon_as_it_is():
    passes = []
    model = new_model("llama")
    model.register_forward_hook(lambda *args: passes.append(1))
    decoder = DDTreeDecoder(model, OracleDrafter(expected("llama"), VOCABULARY), depth=3, budget=6)
    passes.clear()
    stream = decoder.stream(PROMPTS, NEW)
    assert passes == []
    seen = [next(stream) for _ in range(3)]
    assert ([e.request_id for e in seen], [len(e.token_ids) for e in seen], len(passes)) == ([0, 1, 2], [1] * 3, 1)
    seen.append(next(stream))
    assert (len(seen[-1].token_ids), len(passes)) == (4, 2)
    seen += stream
    for request, wanted in enumerate(expected("llama")):
        own = [e for e in seen if e.request_id == request]
        assert np.concatenate([e.token_ids for e in own]).tolist() == wanted.tolist()
        assert [e.finish_reason for e in own] == [None] * (len(own) - 1) + ["length"]


class Tokens:
    """A streamer that keeps what it is given."""

    def __init__(self):
        self.given, self.ended = [], 0

    def put(self, value):
        self.given.append(value)

    def end(self):
        self.ended += 1


def test_a_streamer_is_given_the_prompt_then_each_rounds_tokens():
    decoder = DDTreeDecoder(model_of("llama"), OracleDrafter(expected("llama"), VOCABULARY), depth=3, budget=6)
    streamer = Tokens()
    emissions: list[Emission] = []
    decoder.generate(PROMPTS[:1], NEW, streamer=streamer, on_emission=emissions.append)
    assert [value.tolist() for value in streamer.given[:2]] == [[PROMPTS[0]], expected("llama")[0][:1].tolist()]
    assert all(value.dtype == torch.int64 and value.device.type == "cpu" for value in streamer.given)
    assert torch.cat(streamer.given[1:]).tolist() == expected("llama")[0].tolist()
    assert [value.tolist() for value in streamer.given[1:]] == [e.token_ids.tolist() for e in emissions]
    assert streamer.ended == 1


def test_transformers_text_streamer_prints_the_text(capsys):
    tokenizer = SimpleNamespace(decode=lambda ids, **options: "".join("abcdefghijk"[i] for i in ids))
    streamer = transformers.TextStreamer(tokenizer, skip_prompt=True)
    DDTreeDecoder(model_of("llama"), NgramDrafter()).generate(PROMPTS[:1], NEW, streamer=streamer)
    assert capsys.readouterr().out == tokenizer.decode(expected("llama")[0]) + "\n"


def test_a_streamer_is_ended_after_an_error_too():
    def fails(context, depth, topk):
        raise RuntimeError("no draft")

    streamer = Tokens()
    with pytest.raises(RuntimeError, match="no draft"):
        DDTreeDecoder(model_of("llama"), fails).generate(PROMPTS[:1], NEW, streamer=streamer)
    assert (len(streamer.given), streamer.ended) == (2, 1)


# What the drafter and the model see


class Recorder:
    """Drafts as another, and keeps the hidden states that it is shown."""

    def __init__(self, drafter, layers):
        self.drafter, self.hidden_layers, self.seen = drafter, layers, {}

    def __call__(self, context, depth, topk):
        for request, states in zip(context.request_ids, context.hidden_states, strict=True):
            self.seen.setdefault(request, []).append(states)
        return self.drafter(context, depth, topk)


@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma3"])
def test_a_drafter_that_asks_is_shown_the_hidden_states_of_the_accepted_rows(name):
    model = model_of(name)
    last = model.config.num_hidden_layers
    oracle = OracleDrafter(expected(name), VOCABULARY, noise=NoiseLaw([[0.3, 0.6]]))
    recorder = Recorder(oracle, (0, 1, last))
    generation = DDTreeDecoder(model, recorder, depth=4, budget=9).generate(PROMPTS, NEW)
    assert_tokens(generation, expected(name))
    outputs = []
    layers = model.model.layers if name != "gpt2" else model.transformer.h
    hook = layers[-1].register_forward_hook(
        lambda module, args, out: outputs.append(out[0] if isinstance(out, tuple) else out)
    )
    for request, prompt in enumerate(PROMPTS):
        shown = {layer: torch.cat([states[layer] for states in recorder.seen[request]]) for layer in (0, 1, last)}
        n = len(shown[0])
        text = [*prompt, *expected(name)[request].tolist()][:n]
        outputs.clear()
        _, output = plain(model, [text], output_hidden_states=True)
        for layer in (0, 1):
            near(shown[layer].numpy(), output.hidden_states[layer][0].numpy())
        near(shown[last].numpy(), outputs[-1][0].numpy())  # not the normed one that transformers ends with
        assert not torch.allclose(shown[last], output.hidden_states[last][0])
        assert recorder.seen[request][0][0].shape[0] == len(prompt)
    hook.remove()


def test_hidden_states_are_made_for_a_drafter_that_asks_alone():
    asked = []
    model = new_model("llama")
    hook = model.register_forward_pre_hook(lambda m, args, options: asked.append(options), with_kwargs=True)
    DDTreeDecoder(model, NgramDrafter()).generate(PROMPTS, NEW)
    hook.remove()
    assert not any(options.get("output_hidden_states") for options in asked)


@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_slots_that_no_request_uses_are_run_where_shapes_must_stay_alone(cache):
    widths = []
    model = new_model("llama")
    decoder = DDTreeDecoder(
        model,
        OracleDrafter(expected("llama"), VOCABULARY, noise=NoiseLaw([[1.0]])),
        budget=9,
        depth=2,
        topk=1,
        cache=cache,
    )
    model.register_forward_pre_hook(
        lambda m, a, options: widths.append(options["input_ids"].shape[1]), with_kwargs=True
    )
    assert_tokens(decoder.generate(PROMPTS, NEW), expected("llama"))
    assert set(widths[1:-1]) == ({3} if cache == "dynamic" else {10})  # a chain of two drafts and the root, of 10 slots


# Caches


def with_cache(name, make):
    """A decoder whose caches are made by ``make``, and a list of them."""
    made = []

    def cache(rows):
        made.append(make(rows))
        return made[-1]

    oracle = OracleDrafter(expected(name), VOCABULARY, noise=NoiseLaw([[0.5, 0.4]]))
    return DDTreeDecoder(model_of(name), oracle, depth=3, budget=6, cache=cache), made


@pytest.mark.parametrize("name", ["llama", "gemma3", "mistral"])
@pytest.mark.parametrize(
    "make",
    [
        lambda config, rows: cache_utils.DynamicCache(),
        lambda config, rows: cache_utils.DynamicCache(config=config),
        lambda config, rows: cache_utils.StaticCache(config=config, max_cache_len=rows),
        lambda config, rows: cache_utils.StaticCache(config=config, max_cache_len=rows + 7),
    ],
)
def test_any_cache_of_dynamic_static_and_window_layers_will_do(name, make):
    decoder, _ = with_cache(name, lambda rows: make(model_of(name).config, rows))
    assert_tokens(decoder.generate(PROMPTS, NEW), expected(name))


def test_window_layers_hold_what_a_window_can_reach_and_the_others_all():
    decoder, made = with_cache("gemma3", lambda rows: cache_utils.DynamicCache(config=model_of("gemma3").config))
    assert_tokens(decoder.generate(PROMPTS[:1], NEW), expected("gemma3")[:1])
    rows = [layer.keys.shape[2] for layer in made[-1].layers]
    assert max(rows[::2]) <= WINDOW - 1 + 7  # the window less its own token, and the last tree
    assert min(rows[1::2]) >= len(PROMPTS[0]) + NEW - 4


def test_rows_left_in_place_change_the_tokens(monkeypatch):
    """The laws above can fail: without compaction the tokens are others."""
    from ddtree.interop.huggingface_cache import ModelCache

    monkeypatch.setattr(ModelCache, "compact", lambda *args: None)
    decoder = DDTreeDecoder(
        model_of("llama"), OracleDrafter(expected("llama"), VOCABULARY, noise=NoiseLaw([[0.0, 1.0]]))
    )
    tokens = decoder.generate(PROMPTS, NEW).tokens
    assert [t.tolist() for t in tokens] != [t.tolist() for t in expected("llama")]


def quantised_cache(rows):
    coding = {"_quantize": None, "_dequantize": None}  # which every library that quantises brings
    return cache_utils.Cache(layers=[type("FourBitLayer", (cache_utils.QuantizedLayer,), coding)()])


def used_cache(rows):
    cache = cache_utils.DynamicCache()
    cache.update(torch.zeros(1, 2, 3, 4), torch.zeros(1, 2, 3, 4), 0)
    return cache


@pytest.mark.parametrize(
    "make, error, message",
    [
        (lambda rows: cache_utils.DynamicCache(offloading=True), TypeError, "DynamicCache that is offloaded: pass off"),
        (
            quantised_cache,
            TypeError,
            "cache must have layers whose rows can be moved, .* got a Cache of FourBitLayer: pass 'dynamic' or",
        ),
        (
            lambda rows: cache_utils.Cache(layers=[cache_utils.DynamicLayer(), cache_utils.LinearAttentionLayer()]),
            TypeError,
            "got a Cache of LinearAttentionLayer: pass 'dynamic' or 'static'",
        ),
        (
            lambda rows: cache_utils.Cache(layers=[cache_utils.DynamicLayer(), cache_utils.StaticLayer(rows)]),
            TypeError,
            "got a Cache of both: pass",
        ),
        (
            lambda rows: cache_utils.EncoderDecoderCache(cache_utils.DynamicCache(), cache_utils.DynamicCache()),
            TypeError,
            "cache must be a decoder's own, got EncoderDecoderCache",
        ),
        (lambda rows: [], TypeError, "cache must be a transformers Cache, got list: pass 'dynamic' or 'static'"),
        (used_cache, ValueError, "cache must be empty, got a DynamicCache in use: make a new one in each call"),
        (
            lambda rows: cache_utils.StaticCache(config=model_of("llama").config, max_cache_len=rows - 1),
            ValueError,
            r"cache must hold \d+ rows, .* got a StaticCache of \d+: make it of the number of rows that it is called",
        ),
        (
            "offloaded",
            ValueError,
            r"cache must be 'dynamic', 'static' or a callable \(rows\) -> cache, got 'offloaded'",
        ),
        (3, ValueError, r"cache must be 'dynamic', 'static' or a callable .*, got a int"),
    ],
)
def test_a_cache_that_cannot_be_compacted_is_refused(make, error, message):
    with pytest.raises(error, match=message):
        DDTreeDecoder(model_of("llama"), cache=make)


# What is refused


def changed(name="llama", **attributes):
    model = new_model(name)
    for attribute, value in attributes.items():
        setattr(model.config, attribute, value)
    return model


def small(name, config, **options):
    common = {"hidden_size": 16, "num_hidden_layers": 2, "vocab_size": VOCABULARY}
    return getattr(transformers, name)(getattr(transformers, config)(**common | options)).eval()


def with_forward(forward):
    """A model whose forward is another function."""
    model = new_model("llama")
    model.forward = MethodType(forward, model)
    return model


def heedless(self, input_ids=None, attention_mask=None, position_ids=None, cache=None, **options):
    """Take a mask and positions, and heed neither."""
    return type(self).forward(self, input_ids=input_ids, cache=cache, **options)


def refusing(self, input_ids=None, attention_mask=None, position_ids=None, cache=None, **options):
    """Take no mask of four dimensions."""
    if attention_mask is not None and attention_mask.ndim != 2:
        raise ValueError(f"no mask of {attention_mask.ndim} dimensions here")
    return type(self).forward(self, input_ids=input_ids, position_ids=position_ids, cache=cache, **options)


def half_on_meta():
    model = new_model("llama")
    model.lm_head.to("meta")
    return model


@pytest.mark.parametrize(
    "make, error, message",
    [
        (lambda: 3, TypeError, r"model must be a causal language model of transformers, got int: load it with Auto"),
        (lambda: torch.nn.Linear(2, 2), TypeError, "model must be a causal language model of transformers, got Linear"),
        (
            lambda: new_model("llama").model,
            TypeError,
            "model must give logits of the next token, got LlamaModel, which",
        ),
        (lambda: new_model("llama").train(), ValueError, r"model is in training mode, .*: call model.eval\(\)"),
        (
            lambda: changed(_attn_implementation="flash_attention_2"),
            ValueError,
            r"model's attention is 'flash_attention_2', which takes no 4-D .* model.set_attn_implementation\('sdpa'\)",
        ),
        (
            lambda: changed(_attn_implementation="flex_attention"),
            ValueError,
            "model's attention is 'flex_attention', wh",
        ),
        (half_on_meta, ValueError, r"model has parameters without data \(on the device 'meta'\): load its weights"),
        (
            lambda: new_model("llama", dtype=torch.float8_e4m3fn),
            TypeError,
            r"model must be of type .*, got float8_e4m3fn: c",
        ),
        (
            lambda: with_forward(heedless),
            ValueError,
            "model LlamaForCausalLM does not attend as a 4-D attention_mask and position_ids say: after a path",
        ),
        (
            lambda: with_forward(refusing),
            ValueError,
            "model LlamaForCausalLM cannot check a draft tree: no mask of 4 dimensions here",
        ),
        (
            lambda: small("T5ForConditionalGeneration", "T5Config", d_kv=4, d_ff=16, num_heads=2),
            TypeError,
            "model must be a decoder alone, got the encoder and decoder T5ForConditionalGeneration",
        ),
        (
            lambda: small("MambaForCausalLM", "MambaConfig"),
            TypeError,
            "model MambaForCausalLM cannot check a draft tree: its forward takes no position_ids.*; use a model",
        ),
        (
            lambda: changed("qwen3", layer_types=["full_attention", "linear_attention"]),
            ValueError,
            r"model has a layer of 'linear_attention' \(config.layer_types\[1\]\), which keeps a state .*: use a model",
        ),
        (
            lambda: changed(layer_types=None, attention_chunk_size=4),
            ValueError,
            r"model has a layer of 'chunked_attention' \(config.layer_types\[0\]\), which sees tokens by their place",
        ),
    ],
)
def test_a_model_that_cannot_check_trees_is_refused(make, error, message):
    with pytest.raises(error, match=message):
        DDTreeDecoder(make())


def test_a_model_that_was_changed_since_is_refused():
    model = new_model("llama")
    decoder = DDTreeDecoder(model, NgramDrafter())
    model.train()
    with pytest.raises(ValueError, match="training mode"):
        decoder.generate(PROMPTS, NEW)


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_lengths_at_which_rotary_positions_depend_on_the_pass_are_refused(kind):
    model = new_model("llama")
    decoder = DDTreeDecoder(model, NgramDrafter(), budget=4)
    model.config.rope_parameters = {"rope_type": kind, "original_max_position_embeddings": 24}
    decoder.generate([[1, 2]], 8)
    with pytest.raises(
        ValueError, match=rf"rotary positions \({kind}\) change .* beyond 24.* must stay within 24, got 27"
    ):
        decoder.generate([[1, 2]], 20)


def test_a_model_with_a_table_of_positions_drafts_beyond_its_end_and_decodes_up_to_it():
    model = model_of("gpt2")
    prompt, count = PROMPTS[0], 64 - len(PROMPTS[0])
    wanted = greedy(model, prompt, count)
    decoder = DDTreeDecoder(model, OracleDrafter([wanted], VOCABULARY, past_end=1), depth=7, budget=7)
    assert_tokens(decoder.generate([prompt], count), [wanted])
    with pytest.raises(ValueError, match=r"prompts\[0\] has 11 tokens .* must be at most max_context = 64, got 65"):
        decoder.generate([prompt], count + 1)


@pytest.mark.parametrize(
    "arguments, options, error, message",
    [
        (("text", 4), {}, TypeError, r"prompts must be token ids, got a str: pass what the tokenizer makes of it"),
        ((["text"], 4), {}, TypeError, r"prompts\[0\] must hold token ids, got a str: pass what the tokenizer makes"),
        ((7, 4), {}, TypeError, r"prompts must be a sequence, got int 7"),
        (([[1, 2, VOCABULARY]], 4), {}, ValueError, r"prompts\[0\]\[2\] must be in 0 … 10, got 11"),
        (({"ids": 1}, 4), {}, ValueError, r"prompts must have input_ids, got a mapping with 'ids'"),
        (
            (torch.zeros(1, 2, dtype=int, device="meta"), 4),
            {},
            ValueError,
            r"prompts\[0\] lies on meta and the model on cpu: mo",
        ),
        ((torch.tensor([1, 2]), 4), {}, ValueError, r"prompts\[0\] must have shape \(n,\), got \(\); put a single"),
        ((torch.zeros(1, 2), 4), {}, TypeError, r"prompts\[0\] must hold integer token ids, got float32"),
        (
            ([[1, 2]], 4),
            {"attention_mask": [[1]]},
            ValueError,
            r"attention_mask must have the shape of prompts, .* got \[\(1,\)\]",
        ),
        (
            ([[1, 2]], 4),
            {"attention_mask": [[1, 2]]},
            ValueError,
            r"attention_mask\[0\] must be 1 at tokens .* got \[1, 2\]",
        ),
        (
            ([[1, 2]], 4),
            {"attention_mask": [[0, 0]]},
            ValueError,
            r"prompts\[0\] must have at least one token, got none",
        ),
        (([[1, 2]], 4), {"streamer": 3}, TypeError, r"streamer must have put and end, as transformers' have, got int"),
        (([[1, 2]] * 2, 4), {"streamer": Tokens()}, ValueError, r"streamer takes one prompt, got 2: use stream"),
        (([[1, 2]], 4, [11]), {}, ValueError, r"stop_token_ids\[0\] must be in 0 … 10 .*, got 11"),
        (([[1, 2]],), {}, TypeError, r"max_new_tokens must be given: the most tokens that a request emits"),
        ((), {"max_new_tokens": 4}, TypeError, r"prompts or input_ids must be given, got neither"),
        (([[1, 2]], 4), {"input_ids": [[1, 2]]}, TypeError, r"prompts or input_ids must be given, got both"),
        (
            ([[1, 2]], 4),
            {"cache": "static"},
            TypeError,
            r"takes no argument 'cache': give it to DDTreeDecoder\(model, drafter, cache=…\)",
        ),
        (([[1, 2]], 4), {"budget": 8}, TypeError, r"no argument 'budget': give it to DDTreeDecoder"),
        (([[1, 2]], 4), {"do_sample": True}, TypeError, r"^DDTreeDecoder.generate\(\) takes no argument 'do_sample'$"),
        (([[1, 2]], 4), {"temperature": -1}, ValueError, "temperature must be finite and at least 0"),
    ],
)
def test_a_wrong_argument_is_named_before_any_work(arguments, options, error, message):
    decoder = DDTreeDecoder(model_of("llama"), NgramDrafter())
    with pytest.raises(error, match=message):
        decoder.generate(*arguments, **options)


def test_a_drafter_of_a_larger_vocabulary_is_refused():
    with pytest.raises(
        ValueError, match=r"drafter OracleDrafter has a vocabulary of 12 tokens and the target one of 11: "
    ):
        DDTreeDecoder(model_of("llama"), OracleDrafter([[1]], VOCABULARY + 1))

    def silent(context, depth, topk):
        shape = (len(context.tokens), depth, 1)
        return np.full(shape, -1.0, np.float32), np.full(shape, VOCABULARY, np.int32)

    with pytest.raises(ValueError, match=r"drafter silent, request 0: token_ids\[0, 0, 0\] must be in 0 … 10, got 11"):
        DDTreeDecoder(model_of("llama"), silent).generate([[1]], 4)


def test_torch_tensors_will_do_as_a_draft():
    def drafter(context, depth, topk):
        shape = (len(context.tokens), depth, topk)
        tokens = torch.arange(topk, dtype=torch.int64).expand(shape)
        return torch.full(shape, -2.5), tokens

    decoder = DDTreeDecoder(model_of("llama"), drafter, depth=2, budget=6)
    assert_tokens(decoder.generate(PROMPTS, NEW), expected("llama"))


def test_logits_that_are_not_finite_name_request_and_position():
    model = new_model("llama")
    decoder = DDTreeDecoder(model, NgramDrafter())
    model.lm_head.weight.data[0] = torch.nan
    with pytest.raises(RuntimeError, match=r"request 0: the target's logits after position 10 hold NaN"):
        decoder.generate(PROMPTS, NEW)


def test_a_recorded_trace_is_resumed_and_replayed_it_gives_a_live_runs_rounds(tmp_path):
    model, drafter = model_of("gemma3"), NgramDrafter()
    tensors = [torch.tensor(prompt) for prompt in PROMPTS]
    options = {"depth": 3, "topk": 4, "max_new_tokens": NEW, "prompts_a_chunk": 1}

    def stop(done):
        if done == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        record_trace(model, drafter, tensors, tmp_path / "trace", on_prompts=stop, **options)
    done: list[int] = []
    trace = record_trace(model, drafter, tensors, tmp_path / "trace", on_prompts=done.append, **options)
    assert done == [2, 3]
    assert trace.manifest.target == "Gemma3ForCausalLM"
    texts = [chunk.prompt_tokens(0).tolist() for chunk in trace.chunks()]
    assert texts == [[*p, *t.tolist()] for p, t in zip(PROMPTS, expected("gemma3"), strict=True)]
    live = DDTreeDecoder(model, drafter, depth=3, topk=4, policy=fixed_budget(9)).generate(PROMPTS, NEW)
    rounds, replayed = round_table(live, list(map(len, PROMPTS))), replay(trace, fixed_budget(9))
    order = np.lexsort((rounds.position, rounds.prompt))
    for field in fields(rounds):
        assert_same(getattr(replayed, field.name), getattr(rounds, field.name)[order], field.name)


def test_the_benchmark_tells_the_time_in_the_model_from_the_rest():
    model = random_llama(hidden_size=64, intermediate_size=64, num_hidden_layers=1, vocab_size=64)
    share = measure(model, budget=16, prompt_len=8, new_tokens=12, repeats=2)
    assert 1 < share.passes < 12
    assert min(share.inside, share.outside) > 0
    assert share.percent == 100 * share.outside / share.inside
    assert model.forward.__func__ is type(model).forward  # as it was


def test_the_benchmark_on_a_gpu_says_if_there_is_none(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    result = CliRunner().invoke(main, ["--device", "cuda"])
    assert result.exit_code == 1
    assert result.output == "Error: torch finds no GPU: leave out --device cuda\n"


def test_an_unknown_option_of_the_decoder_is_named():
    with pytest.raises(TypeError, match=r"^DDTreeDecoder\(\) takes no argument 'dept'$"):
        DDTreeDecoder(model_of("llama"), NgramDrafter(), dept=4)
