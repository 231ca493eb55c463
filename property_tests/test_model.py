"""The target model: equal to transformers on the golden bundles, to the references on any shape, and to itself.

Itself, because a prefill, a one-token decode and a tree pass are one computation: whatever the tree, pages and batch,
a node's logits depend on its own path alone.
"""

import functools
from dataclasses import replace

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from ddtree import reference
from ddtree.arrays import array_namespace, to_numpy
from ddtree.backends import BackendUnavailable
from ddtree.kdtr import read_kdtr
from ddtree.model import DeepseekV3, golden_bundle, layers, load_model
from ddtree.property_tests.compare import assert_close, assert_same
from ddtree.property_tests.strategies import draft_trees, model_configs, paged_caches
from ddtree.protocols import KVCache
from ddtree.trees import chain_tree, tree_from_parents

NAMES = ["tiny", "router_groups", "router_bias", "no_q_lora", "no_interleave", "yarn"]
DTYPES = ["float64", "float32"]
GOLDEN = pytest.mark.parametrize("name, dtype", [(name, dtype) for name in NAMES for dtype in DTYPES])
TREES = draft_trees(max_nodes=12, max_token=127)
PAGE_SIZES = (1, 3, 16, None)  # None: one page a request


@functools.cache
def golden(name):
    """The expected values of a bundle, by their names without ``golden/``."""
    arrays, _ = read_kdtr(golden_bundle(name))
    return {key.removeprefix("golden/"): value for key, value in arrays.items() if "/" in key}


@functools.cache
def model_of(name, dtype="float64", backend="reference"):
    return load_model(golden_bundle(name), dtype=dtype, backend=backend)


def forward(model, tree, cache, **options):
    """A pass with a host cache, wherever the model lives: the output on the host, the cache written in place."""
    xp = array_namespace(model.new_cache(0, 1))
    sent = KVCache(*(xp.asarray(a) for a in (cache.data, cache.page_table, cache.prefix_lens)))
    output = model.forward(tree, sent, **options)
    cache.data[...] = to_numpy(sent.data)
    output.logits = to_numpy(output.logits)
    output.hidden_states = {layer: to_numpy(h) for layer, h in output.hidden_states.items()}
    return output


def empty_cache(model, lengths, page_size=None, seed=0):
    """Room for ``lengths`` rows of each request, in shuffled pages, all NaN; one page a request without a size."""
    lengths = np.asarray(lengths)
    S = page_size or int(lengths.max(initial=1))
    needed = int(-(-lengths.max(initial=1) // S))
    pages = np.random.default_rng(seed).permutation(len(lengths) * needed).astype(np.int32)
    data = np.full((model.config.num_hidden_layers, len(pages), S, model.config.cache_width), np.nan, model.dtype)
    return KVCache(data, pages.reshape(len(lengths), needed), np.zeros(len(lengths), np.int32))


def cache_rows(cache, request, start, stop):
    """Rows [start, stop) of a request in every layer: (layers, rows, C + R)."""
    at, S = np.arange(start, stop), cache.data.shape[2]
    return cache.data[:, cache.page_table[request, at // S], at % S]


def close(actual, expected, dtype, what):
    assert_close(actual, expected, row=("model", dtype), scale=np.abs(expected).max(initial=0.0), what=what)


# Against transformers


@GOLDEN
def test_prefill_equals_transformers(model_backend, name, dtype):
    """Layer by layer, so that the first to differ is the one that the failure names."""
    model, expected = model_of(name, dtype, model_backend.backend), golden(name)
    ids = np.concatenate([expected["prompt"], expected["tokens"]])[None]
    count = model.config.num_hidden_layers
    cache = empty_cache(model, [ids.size], page_size=16)
    output = forward(model, chain_tree(ids), cache, hidden_layers=tuple(range(count + 1)))
    rows = cache_rows(cache, 0, 0, ids.size)
    close(output.hidden_states[0][0], expected["hidden_states"][0], dtype, "embedding")
    for i in range(count):
        close(rows[i], expected["cache"][i], dtype, f"cache of layer {i}")
        close(output.hidden_states[i + 1][0], expected["hidden_states"][i + 1], dtype, f"output of layer {i}")
    close(output.logits[0], expected["logits"], dtype, "logits")


@GOLDEN
def test_greedy_tokens_equal_transformers(model_backend, name, dtype):
    """A prefill, then one token at a time: all 32 tokens, and the logits that each was chosen by."""
    model, expected = model_of(name, dtype, model_backend.backend), golden(name)
    prompt = expected["prompt"][None]
    cache = empty_cache(model, [prompt.size + len(expected["tokens"])], page_size=5)
    steps = [forward(model, chain_tree(prompt), cache, last_only=True).logits[0, 0]]
    cache.prefix_lens += prompt.size
    while len(steps) < len(expected["tokens"]):
        steps.append(forward(model, chain_tree(steps[-1].argmax()[None, None]), cache).logits[0, 0])
        cache.prefix_lens += 1
    assert [int(step.argmax()) for step in steps] == expected["tokens"].tolist()
    close(np.stack(steps), expected["logits"][prompt.size - 1 : -1], dtype, "logits")


@GOLDEN
def test_router_choices_equal_transformers(monkeypatch, name, dtype):
    model, expected, route_experts = model_of(name, dtype), golden(name), layers.route_experts
    routed: list[np.ndarray] = []

    def recording(logits, *args, **kwargs):
        expert_ids, weights = route_experts(logits, *args, **kwargs)
        routed.append(np.zeros_like(logits))
        np.put_along_axis(routed[-1], expert_ids, weights, -1)
        return expert_ids, weights

    monkeypatch.setattr(layers, "route_experts", recording)
    ids = np.concatenate([expected["prompt"], expected["tokens"]])[None]
    model.forward(chain_tree(ids), empty_cache(model, [ids.size]))
    assert len(routed) == len(expected["router_weights"])
    for layer, (got, wanted) in enumerate(zip(routed, expected["router_weights"], strict=True)):
        assert_same(got > 0, wanted > 0, f"experts of MoE layer {layer}")
        close(got, wanted, dtype, f"weights of MoE layer {layer}")


def test_golden_tokens_are_told_apart_by_float32():
    """The goldens' own margins are far above float32's error, or equal tokens would be luck."""
    for name in NAMES:
        _, metadata = read_kdtr(golden_bundle(name))
        top = np.sort(golden(name)["logits"][11:-1], -1)
        margin = (top[:, -1] - top[:, -2]).min()
        assert margin == pytest.approx(float(metadata["top2_margin"]), rel=0.01)
        assert margin > 0.04 > 1000 * 4e-6 * np.abs(golden(name)["logits"]).max()
        assert float(metadata["router_margin"]) > 0.001
        assert len(set(golden(name)["tokens"].tolist())) > 20


# Against the references


def random_weights(config, seed):
    rng = np.random.default_rng(seed)
    return {name: rng.standard_normal(shape) for name, shape in config.tensor_shapes().items()}


def reference_forward(config, weights, tree, cache):
    """The whole model in references alone: hidden states of every layer, and logits. Writes the cache."""
    states = [weights["model.embed_tokens.weight"][tree.token_ids]]
    flat = (-1, config.hidden_size)
    for i in range(config.num_hidden_layers):
        layer = {k.removeprefix(f"model.layers.{i}."): v for k, v in weights.items() if f"layers.{i}." in k}

        def mlp(x, prefix, layer=layer):
            gate_up = np.concatenate([layer[f"{prefix}.{part}_proj.weight"] for part in ("gate", "up")])
            return reference.swiglu(x, gate_up, layer[f"{prefix}.down_proj.weight"])

        h = states[-1]
        h = h + reference.mla(
            reference.rms_norm(h, layer["input_layernorm.weight"], eps=config.rms_norm_eps),
            cache.data[i],
            cache.page_table,
            cache.prefix_lens,
            tree,
            {k.split(".")[1]: v for k, v in layer.items() if k.startswith("self_attn")},
            num_heads=config.num_attention_heads,
            frequencies=config.rope_frequencies(),
            attention_factor=config.attention_factor,
            scale=config.attention_scale,
            rope_interleave=config.rope_interleave,
        )
        x = reference.rms_norm(h, layer["post_attention_layernorm.weight"], eps=config.rms_norm_eps).reshape(flat)
        if i < config.first_k_dense_replace:
            y = mlp(x, "mlp")
        else:
            expert_ids, expert_weights = reference.route_experts(
                x @ layer["mlp.gate.weight"].T,
                layer["mlp.gate.e_score_correction_bias"],
                num_experts_per_tok=config.num_experts_per_tok,
                n_group=config.n_group,
                topk_group=config.topk_group,
                norm_topk_prob=config.norm_topk_prob,
                routed_scaling_factor=config.routed_scaling_factor,
            )
            y = mlp(x, "mlp.shared_experts")
            for m, (ids, ws) in enumerate(zip(expert_ids, expert_weights, strict=True)):
                for e, w in zip(ids, ws, strict=True):
                    y[m] += w * mlp(x[m : m + 1], f"mlp.experts.{e}")[0]
        states.append(h + y.reshape(h.shape))
    head = weights["model.embed_tokens.weight" if config.tie_word_embeddings else "lm_head.weight"]
    return states, reference.rms_norm(states[-1], weights["model.norm.weight"], eps=config.rms_norm_eps) @ head.T


@given(data=st.data(), config=model_configs(), tree=draft_trees(max_nodes=6, max_token=16), seed=st.integers(0, 999))
def test_model_equals_the_references(data, config, tree, seed):
    weights = random_weights(config, seed)
    model = DeepseekV3(config, weights, dtype="float64", backend="reference")
    width, count = config.cache_width, config.num_hidden_layers
    cache = data.draw(paged_caches(tree, layers=count, width=width, dtype=np.float64, max_prefix=5), "cache")
    expected_cache = replace(cache, data=cache.data.copy())
    states, logits = reference_forward(config, weights, tree, expected_cache)
    output = model.forward(tree, cache, hidden_layers=tuple(range(count + 1)))
    used = np.arange(tree.num_slots) < tree.node_counts[:, None]
    for i in range(count + 1):
        close(output.hidden_states[i][used], states[i][used], "float64", f"hidden state {i}")
    close(output.logits[used], logits[used], "float64", "logits")
    written = ~np.isnan(expected_cache.data)
    assert_same(~np.isnan(cache.data), written, "which cache elements are numbers")
    close(cache.data[written], expected_cache.data[written], "float64", "cache")


# Against itself


def path_of(tree, request, node):
    path = []
    while node >= 0:
        path.append(node)
        node = int(tree.parents[request, node])
    return path[::-1]


@given(data=st.data(), tree=TREES, name=st.sampled_from(NAMES))
@settings(max_examples=30)
def test_tree_pass_equals_its_paths_as_chains(data, tree, name):
    """Any trees, prefixes and pages: at each node, the logits, hidden states and cache row of the node's own path."""
    model = model_of(name)
    cache = data.draw(
        paged_caches(tree, layers=3, width=model.config.cache_width, dtype=np.float64, page_sizes=PAGE_SIZES), "cache"
    )
    nodes = [(b, i) for b in range(tree.batch_size) for i in range(tree.node_counts[b])]
    paths = [path_of(tree, b, i) for b, i in nodes]
    chains = np.full((len(nodes), max(map(len, paths), default=1)), -1)
    for row, (b, _), path in zip(chains, nodes, paths, strict=True):
        row[: len(path)] = tree.token_ids[b, path]
    lengths = np.array([len(path) for path in paths], np.int32)
    prefixes = np.array([cache.prefix_lens[b] for b, _ in nodes], np.int32)
    alone = empty_cache(model, prefixes + lengths)
    alone.prefix_lens = prefixes
    for n, (b, _) in enumerate(nodes):
        alone.data[:, alone.page_table[n, 0], : prefixes[n]] = cache_rows(cache, b, 0, prefixes[n])
    expected = model.forward(chain_tree(chains, lengths), alone, hidden_layers=(1, 3), last_only=True)

    output = model.forward(tree, cache, hidden_layers=(1, 3))
    for n, (b, i) in enumerate(nodes):
        at, what = int(prefixes[n]), f"of node {i} of request {b}"
        end = at + int(lengths[n])
        close(output.logits[b, i], expected.logits[n, 0], "float64", f"logits {what}")
        close(cache_rows(cache, b, at + i, at + i + 1), cache_rows(alone, n, end - 1, end), "float64", f"row {what}")
        for layer in (1, 3):
            hidden = expected.hidden_states[layer][n, lengths[n] - 1]
            close(output.hidden_states[layer][b, i], hidden, "float64", f"hidden state {layer} {what}")


@given(
    lengths=st.lists(st.integers(1, 9), min_size=1, max_size=3),
    cuts=st.lists(st.integers(1, 4), min_size=9, max_size=9),
    page_size=st.sampled_from(PAGE_SIZES),
    name=st.sampled_from(NAMES),
    seed=st.integers(0, 99),
)
@settings(max_examples=30)
def test_cutting_a_sequence_into_passes_changes_nothing(lengths, cuts, page_size, name, seed):
    """One prefill, one-token decoding and anything between, each request cut in its own places."""
    model = model_of(name)
    B, total = len(lengths), max(lengths)
    ids = np.random.default_rng(seed).integers(0, model.vocab_size, (B, total))
    whole = empty_cache(model, lengths, page_size, seed)
    expected = model.forward(chain_tree(ids, np.array(lengths)), whole).logits

    cache = empty_cache(model, lengths, page_size, seed + 1)
    for cut in cuts:
        at = cache.prefix_lens
        live = np.flatnonzero(at < lengths)
        if not len(live):
            break
        # requests advance by different amounts, and leave the batch when they are done
        counts = np.minimum(np.array(lengths)[live] - at[live], 1 + (cut + live) % 4).astype(np.int32)
        tokens = np.full((len(live), counts.max()), -1)
        for row, b, count in zip(tokens, live, counts, strict=True):
            row[:count] = ids[b, at[b] : at[b] + count]
        part = KVCache(cache.data, cache.page_table[live], at[live])
        logits = model.forward(chain_tree(tokens, counts), part).logits
        for n, b in enumerate(live):
            close(logits[n, : counts[n]], expected[b, at[b] : at[b] + counts[n]], "float64", f"request {b}")
        at[live] += counts
    assert cache.prefix_lens.tolist() == lengths
    for request, length in enumerate(lengths):
        rows, expected_rows = (cache_rows(c, request, 0, length) for c in (cache, whole))
        close(rows, expected_rows, "float64", f"cache of request {request}")


@given(data=st.data(), tree=TREES)
@settings(max_examples=30)
def test_only_the_nodes_rows_are_written_and_only_they_are_read(data, tree):
    """All else keeps its bits, and nothing in unused slots or rows reaches a result: bit for bit the same."""
    model = model_of("tiny")
    draw = paged_caches(tree, layers=3, width=model.config.cache_width, dtype=np.float64, page_sizes=PAGE_SIZES)
    cache = data.draw(draw, "cache")
    before = cache.data.copy()
    clean = np.nan_to_num(before)
    output = model.forward(tree, cache)
    S = cache.data.shape[2]
    window = np.zeros(cache.data.shape[1:3], bool)
    for b in range(tree.batch_size):
        at = cache.prefix_lens[b] + np.arange(tree.node_counts[b])
        window[cache.page_table[b, at // S], at % S] = True
    assert cache.data[:, ~window].tobytes() == before[:, ~window].tobytes()
    assert not np.isnan(cache.data[:, window]).any()

    padding = np.arange(tree.num_slots) >= tree.node_counts[:, None]
    garbage = replace(
        tree,
        token_ids=np.where(padding, 10**6, tree.token_ids),
        depths=np.where(padding, -(10**6), tree.depths),
        parents=np.where(padding, 0, tree.parents),
    )
    again = model.forward(garbage, replace(cache, data=clean))
    assert_same(again.logits[~padding], output.logits[~padding], "logits with other padding")


@given(tree=TREES)
@settings(max_examples=20)
def test_last_only_gives_each_requests_last_node(tree):
    model = model_of("tiny")
    last = tree.node_counts - 1
    every = model.forward(tree, empty_cache(model, tree.node_counts))
    output = model.forward(tree, empty_cache(model, tree.node_counts), hidden_layers=(2,), last_only=True)
    assert output.logits.shape == (tree.batch_size, 1, model.vocab_size)
    assert output.hidden_states[2].shape == (*tree.token_ids.shape, model.config.hidden_size)
    close(output.logits[:, 0], every.logits[np.arange(tree.batch_size), last], "float64", "logits")


@pytest.mark.parametrize("dtype", DTYPES)
def test_everything_is_in_the_models_type(dtype):
    model = model_of("router_bias", dtype)
    cache = model.new_cache(2, 3)
    assert (cache.dtype, cache.shape) == (model.dtype, (3, 2, 3, 40))
    output = model.forward(chain_tree(np.array([[5]])), empty_cache(model, [1]), hidden_layers=(0, 1, 3))
    assert {output.logits.dtype, *(h.dtype for h in output.hidden_states.values())} == {model.dtype}


# What it refuses


def tree_and_cache(model, ids=((5, 6),)):
    tree = chain_tree(np.array(ids))
    return tree, empty_cache(model, tree.node_counts, page_size=2)


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda t, c: (replace(t, token_ids=t.token_ids + 506), c), r"token_ids\[0, 1\] must be in 0 … 511, got 512"),
        (lambda t, c: (replace(t, token_ids=t.token_ids - 6), c), r"tree\.token_ids\[0, 0\] must be in .*, got -1"),
        (lambda t, c: (t, replace(c, data=c.data[:2])), r"cache\.data must be float64 with shape \(3, pages, S, 40\)"),
        (lambda t, c: (t, replace(c, data=c.data.astype(np.float32))), r"cache\.data must be float64 .* got float32"),
        (lambda t, c: (t, replace(c, prefix_lens=c.prefix_lens + 1)), r"room for 2 rows .* node 1 of request 0"),
        (lambda t, c: (t, replace(c, page_table=c.page_table - 1)), r"page_table\[0, 0\] must be in 0 … 0, got -1"),
        (lambda t, c: (t, replace(c, page_table=c.page_table[:0])), r"shapes \(1, max_pages\) and \(1,\)"),
    ],
)  # fmt: skip
def test_forward_refuses_what_does_not_fit_and_writes_nothing(change, message):
    model = model_of("tiny")
    tree, cache = change(*tree_and_cache(model))
    with pytest.raises(ValueError, match=message):
        model.forward(tree, cache)
    assert np.isnan(cache.data).all()


def test_forward_refuses_a_layer_or_a_kind_of_array_that_it_does_not_have():
    model = model_of("tiny")
    tree, cache = tree_and_cache(model)
    with pytest.raises(ValueError, match=r"hidden_layers must lie in 0 … 3, got 4"):
        model.forward(tree, cache, hidden_layers=(4,))
    with pytest.raises(TypeError, match="must be a NumPy, CuPy or torch array"):
        model.forward(tree, replace(cache, page_table=cache.page_table.tolist()))


def freed(tree, requests):
    """The tree with these requests' slots all unused, as in a batch of a fixed size with free places."""
    changed = {"node_counts": 0, "visibility_words": 0, "token_ids": -1, "depths": -1, "parents": -1}
    arrays = {name: getattr(tree, name).copy() for name in changed}
    for name, value in changed.items():
        arrays[name][requests] = value
    return replace(tree, **arrays)


def test_requests_without_nodes_are_inert():
    """Free slots of a batch: they write nothing, and change nothing of the others."""
    model, ids = model_of("tiny"), np.array([[5, 6], [7, 8], [9, 10]])
    cache, alone = empty_cache(model, [2, 2, 2]), empty_cache(model, [2])
    expected = model.forward(chain_tree(ids[1:2]), alone, last_only=True).logits
    output = model.forward(freed(chain_tree(ids), [0, 2]), cache, hidden_layers=(1,), last_only=True)
    close(output.logits[1], expected[0], "float64", "logits of the request with nodes")
    assert np.isfinite(output.logits).all()
    assert np.isnan(cache_rows(cache, 0, 0, 2)).all()
    assert np.isnan(cache_rows(cache, 2, 0, 2)).all()
    none = model.forward(freed(chain_tree(ids), [0, 1, 2]), empty_cache(model, [2, 2, 2]), hidden_layers=(1,))
    assert (none.logits.shape, none.hidden_states[1].shape) == ((3, 2, 512), (3, 2, 64))


def test_a_model_on_the_host_is_no_part_of_a_cuda_graph():
    assert model_of("tiny").capturable is False


def test_a_token_beyond_the_vocabulary_in_an_unused_slot_is_no_error():
    model = model_of("tiny")
    tree = tree_from_parents(np.array([[5, 6, 7]]), np.array([[-1, 0, 0]]), np.array([2]))
    cache = empty_cache(model, [2])
    logits = model.forward(replace(tree, token_ids=np.array([[5, 6, 512]])), cache).logits
    assert_same(logits, model.forward(tree, cache).logits)


class WithoutAttention:
    """A backend that could not serve a model."""

    accept_tree = staticmethod(reference.accept_tree)


class OfTorch:
    """A backend whose arrays the model does not have."""

    array_kind = "torch"
    verify_attention = staticmethod(reference.verify_attention)


def test_the_model_refuses_types_and_backends_that_cannot_serve_it():
    path = golden_bundle()
    with pytest.raises(ValueError, match=r"dtype must be one of 'bfloat16', 'float32', 'float64', got 'float16'"):
        load_model(path, dtype="float16")
    for backend in (None, "reference"):
        with pytest.raises(ValueError, match=r"on the host, got 'bfloat16': pass backend='cupy' to have it on a GPU"):
            load_model(path, dtype="bfloat16", backend=backend)
    with pytest.raises(BackendUnavailable, match="has no operation 'verify_attention'"):
        load_model(path, backend=f"{__name__}:WithoutAttention")
    with pytest.raises(ValueError, match=r"backend must take NumPy or CuPy arrays .* takes torch's"):
        load_model(path, backend=f"{__name__}:OfTorch")
