"""On a GPU: the model on the CUDA C++ layers, beside the same model on the host in float64, and beside itself.

Itself, because a pass over a tree, one-token passes, pieces of a prompt and a replayed graph are one computation.
"""

import functools
import resource
from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest

from ddtree.analysis.precision import precision_table
from ddtree.arrays import to_numpy
from ddtree.engine import Engine
from ddtree.model import DeepseekV3, ModelConfig, golden_bundle, load_model, random_weights, save_bundle
from ddtree.property_tests.compare import assert_close, assert_same
from ddtree.property_tests.project.on_gpu import gpu_library
from ddtree.property_tests.test_model import NAMES, empty_cache, freed, golden
from ddtree.protocols import KVCache
from ddtree.trees import DraftTree, chain_tree, tree_from_parents

DTYPES = pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float64"])
WIDE = {
    "vocab_size": 1000, "hidden_size": 256, "intermediate_size": 512, "moe_intermediate_size": 128,
    "num_hidden_layers": 3, "num_attention_heads": 4, "n_routed_experts": 8, "num_experts_per_tok": 2,
    "n_shared_experts": 2, "first_k_dense_replace": 1, "kv_lora_rank": 512, "q_lora_rank": 96, "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 64, "v_head_dim": 32, "n_group": 1, "topk_group": 1,
}  # fmt: skip
"""Small, but of the widths for which attention on tensor cores is made."""


@pytest.fixture
def cp():
    return gpu_library("cupy")


@functools.cache
def model_of(name, dtype, backend="cupy"):
    """A golden model, or ``wide``: random weights, with a spread that makes tokens differ."""
    if name != "wide":
        return load_model(golden_bundle(name), dtype=dtype, backend=backend)
    config = ModelConfig.from_dict(WIDE)
    return DeepseekV3(config, random_weights(config, 1, std=0.06, backend=backend), dtype=dtype, backend=backend)


def sent(cp, cache):
    return KVCache(*(cp.asarray(a) for a in (cache.data, cache.page_table, cache.prefix_lens)))


def on_device(cp, tree):
    names = ("token_ids", "parents", "depths", "ranks", "scores", "node_counts", "visibility_words")
    return replace(tree, **{name: cp.asarray(getattr(tree, name)) for name in names})


def trees(seed, counts, vocab_size):
    """Random trees of these sizes in one batch, side by side with padding."""
    rng, N = np.random.default_rng(seed), max(counts)
    parents = np.array([[-1, *(int(rng.integers(max(0, i - 5), i)) for i in range(1, N))] for _ in counts])
    parents[np.arange(N) >= np.array(counts)[:, None]] = -1
    return tree_from_parents(rng.integers(0, vocab_size, (len(counts), N)), parents, np.array(counts, np.int32))


def prefilled(model, lengths, room, seed=0):
    """A host cache of ``model``'s, a host one, whose requests have these many committed rows, in pages of five."""
    cache = empty_cache(model, np.array(lengths) + room, page_size=5, seed=seed)
    ids = np.random.default_rng(seed).integers(0, model.vocab_size, (len(lengths), max(lengths)))
    if max(lengths):
        model.forward(chain_tree(ids, np.array(lengths)), cache)
    cache.prefix_lens[...] = lengths
    return cache


def used_slots(tree: DraftTree):
    return np.arange(tree.num_slots) < tree.node_counts[:, None]


# Beside the host


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("name", [*NAMES, "wide"])
def test_ragged_trees_over_paged_caches_equal_the_host(cp, name, dtype):
    """Trees of unequal sizes, a free place in the batch, garbage in padding: logits, hidden states and cache rows."""
    exact, model = model_of(name, "float64", None), model_of(name, dtype)
    cache = prefilled(exact, [7, 23, 1, 12], 40)
    tree = freed(trees(3, [17, 40, 9, 1], exact.vocab_size), [2])
    gpu_cache = sent(cp, replace(cache, data=cache.data.astype(dtype)))
    before = gpu_cache.data.get()
    used = used_slots(tree)
    noisy = on_device(cp, replace(tree, token_ids=np.where(used, tree.token_ids, -1)))
    got = model.forward(noisy, gpu_cache, hidden_layers=(0, 1, 3))
    expected = exact.forward(tree, cache, hidden_layers=(0, 1, 3))
    assert got.logits.shape == (4, 40, exact.vocab_size)
    pairs = [(got.logits, expected.logits), *((got.hidden_states[i], expected.hidden_states[i]) for i in (0, 1, 3))]
    for one, other in pairs:
        assert str(one.dtype) == dtype
        scale = np.abs(other[used]).max()
        assert_close(one.get()[used], other[used], row=("model", dtype), scale=scale)
    after = gpu_cache.data.get()
    written = np.zeros(after.shape[1:3], bool)
    for b, count in enumerate(tree.node_counts):
        at = cache.prefix_lens[b] + np.arange(count)
        written[cache.page_table[b, at // 5], at % 5] = True
    assert after[:, ~written].tobytes() == before[:, ~written].tobytes(), "rows of nobody"
    rows = cache.data[:, written]
    assert_close(after[:, written], rows, row=("model", dtype), scale=np.abs(rows).max())


@DTYPES
def test_padding_is_inert(cp, dtype):
    """Whatever stands in unused slots, the others' results have the same bits, and no row is written."""
    model = model_of("wide", dtype)
    host = model_of("wide", "float64", None)
    cache = prefilled(host, [6, 11], 30)
    tree = trees(5, [9, 30], host.vocab_size)
    used, results = used_slots(tree), []
    for token, depth in ((-1, -1), (5, 10**6), (999, -(10**6))):
        changed = replace(
            tree, token_ids=np.where(used, tree.token_ids, token), depths=np.where(used, tree.depths, depth)
        )
        gpu_cache = sent(cp, replace(cache, data=cache.data.astype(model.dtype)))
        output = model.forward(on_device(cp, changed), gpu_cache, hidden_layers=(2,))
        results.append((output.logits.get()[used], output.hidden_states[2].get()[used], gpu_cache.data.get()))
    for other in results[1:]:
        for one, two in zip(results[0], other, strict=True):
            assert one.tobytes() == two.tobytes()


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_a_prompt_in_pieces_equals_the_whole(cp, dtype):
    """Pieces of few rows are our kernels' and of many cuBLAS's: 300 tokens whole, in pieces of 150, 37 and 1."""
    exact, model = model_of("wide", "float64", None), model_of("wide", dtype)
    ids = np.random.default_rng(2).integers(0, model.vocab_size, (1, 300))
    cache = empty_cache(exact, [300], page_size=16)
    expected = exact.forward(chain_tree(ids), cache, last_only=True).logits[0, 0]
    for piece in (300, 150, 37):
        gpu_cache = sent(cp, empty_cache(model, [300], page_size=16))
        for start in range(0, 300, piece):
            gpu_cache.prefix_lens.fill(start)
            output = model.forward(chain_tree(ids[:, start : start + piece]), gpu_cache, last_only=True)
        assert output.logits.shape == (1, 1, 1000)
        assert_close(output.logits.get()[0, 0], expected, row=("model", dtype), scale=np.abs(expected).max())
        rows = gpu_cache.data.get().reshape(3, -1, 576)
        assert np.isfinite(rows).sum() == 3 * 300 * 576


# Beside itself


@DTYPES
@pytest.mark.parametrize("name", ["tiny", "no_q_lora", "router_groups", "wide"])
def test_a_captured_pass_replayed_equals_an_eager_one(cp, name, dtype):
    """Bit for bit, on tokens, trees and lengths that the capture has not seen, a free place among them."""
    model, stream = model_of(name, dtype), cp.cuda.Stream(non_blocking=True)
    assert model.capturable
    V, rng = model.vocab_size, np.random.default_rng(0)
    cache = sent(cp, empty_cache(model, [64] * 3, page_size=8))
    cache.data[...] = cp.asarray(rng.standard_normal(cache.data.shape).astype(model.dtype))
    tree = on_device(cp, trees(0, [9, 9, 9], V))
    cp.cuda.Device().synchronize()  # what was sent is there for another stream
    with stream:
        model.forward(tree, cache, hidden_layers=(1,))
        stream.synchronize()
        stream.begin_capture()
        output = model.forward(tree, cache, hidden_layers=(1,))
        graph = stream.end_capture()
    start = cache.data.copy()
    for seed, counts in ((1, [9, 3, 5]), (2, [1, 9, 2])):
        new = trees(seed, counts, V)
        new = freed(new, [2]) if seed == 2 else new
        cp.cuda.Device().synchronize()
        for field in ("token_ids", "parents", "depths", "node_counts", "visibility_words"):
            getattr(tree, field).set(getattr(new, field))
        cache.prefix_lens.set(rng.integers(0, 50, 3).astype(np.int32))
        cache.data[...] = start
        cp.cuda.Device().synchronize()
        graph.launch(stream)
        stream.synchronize()
        replayed = output.logits.get(), output.hidden_states[1].get(), cache.data.get()
        cache.data[...] = start
        eager = model.forward(tree, cache, hidden_layers=(1,))
        used = used_slots(new)
        assert_same(replayed[0][used], eager.logits.get()[used], "logits")
        assert_same(replayed[1][used], eager.hidden_states[1].get()[used], "hidden states")
        assert replayed[2].tobytes() == cache.data.get().tobytes()
        assert np.isfinite(replayed[0][used].astype(np.float32)).all()


@DTYPES
@pytest.mark.parametrize("name", ["tiny", "router_groups", "yarn"])
def test_one_token_passes_equal_a_tree_pass_bit_for_bit(cp, name, dtype):
    """A chain of eight in one pass, alone and among others, and one token at a time: the same logits and cache."""
    model = model_of(name, dtype)
    ids = np.random.default_rng(4).integers(0, model.vocab_size, (3, 8))
    caches = [sent(cp, empty_cache(model, [20] * 3, page_size=4)) for _ in range(3)]
    together = model.forward(on_device(cp, chain_tree(ids)), caches[0]).logits.get()
    alone = model.forward(
        on_device(cp, chain_tree(ids[1:2])),
        replace(caches[1], page_table=caches[1].page_table[1:2].copy(), prefix_lens=caches[1].prefix_lens[1:2].copy()),
    ).logits.get()
    assert_same(alone[0], together[1], "logits of a request alone")
    for i in range(8):
        caches[2].prefix_lens.fill(i)
        step = model.forward(on_device(cp, chain_tree(ids[:, i : i + 1])), caches[2]).logits.get()
        assert_same(step[:, 0], together[:, i], f"logits after token {i}")
    assert caches[2].data.get().tobytes() == caches[0].data.get().tobytes()


@pytest.mark.parametrize("name", ["tiny", "router_bias"])
def test_greedy_tokens_of_the_engine_are_the_goldens(cp, name):
    expected = golden(name)
    prompt, tokens = expected["prompt"], expected["tokens"]
    engine = Engine(model_of(name, "float32"), backend="cupy", prefill_chunk=5)
    run = engine.generate([prompt, prompt[:4]], len(tokens), mode="autoregressive")
    assert run.tokens[0].tolist() == tokens.tolist()


@pytest.mark.parametrize("name, first, last", [("tiny", 0.012, 0.065), ("wide", 0.008, 0.023)])
def test_bfloat16_is_within_its_rounding(cp, name, first, last):
    """The mean row after the first and the last layer, at most twice what a host gives that rounds every result.

    A token differs only where twice the error of a logit covers the margin; the worst rows are those of which a router
    near a tie has chosen another expert.
    """
    model, wider, exact = (model_of(name, dtype) for dtype in ("bfloat16", "float32", "float64"))
    texts = np.random.default_rng(1).integers(0, model.vocab_size, (4, 200))
    table = precision_table(model, wider, texts, exact=exact)
    assert (table.dtype, table.n_positions) == ("bfloat16", 800)
    assert first / 2 < table.mean[1] < 2 * first
    assert last / 2 < table.mean[-2] < 2 * last
    differences = table.differences
    assert (differences.margin <= 2 * differences.error).all()
    assert len(differences.margin) < 0.2 * table.n_positions


def test_float32_is_within_its_rounding(cp):
    text = [np.random.default_rng(1).integers(0, 512, 150)]
    between = precision_table(model_of("tiny", "float32"), model_of("tiny", "float64"), text)
    assert between.worst.max() < 1e-4


def test_bfloat16_logits_are_float32_and_all_else_bfloat16(cp):
    model = model_of("wide", "bfloat16")
    cache = sent(cp, empty_cache(model, [3]))
    output = model.forward(chain_tree(np.array([[1, 2, 3]])), cache, hidden_layers=(0, 2))
    assert output.logits.dtype == np.float32
    assert {
        model.dtype,
        cache.data.dtype,
        model.embedding.dtype,
        *(h.dtype for h in output.hidden_states.values()),
    } == {np.dtype(ml_dtypes.bfloat16)}


# Loading


@pytest.mark.parametrize("fused", [True, False])
def test_random_weights_have_the_same_bits_on_the_gpu(cp, fused):
    config = ModelConfig.from_dict(WIDE)
    here, there = (random_weights(config, 9, fused_experts=fused, backend=backend) for backend in (None, "cupy"))
    for name, tensor in there.items():
        assert isinstance(tensor, cp.ndarray)
        assert_same(tensor.get(), here[name], name)


@DTYPES
def test_weights_from_the_host_and_from_the_device_are_one_model(cp, dtype, tmp_path):
    """Whatever brings them there: arrays on either side, or a file of bfloat16, which is not widened on its way."""
    config, ids = ModelConfig.from_dict(WIDE), np.arange(20)[None]
    narrow = {name: w.astype(ml_dtypes.bfloat16) for name, w in random_weights(config, 9).items()}
    save_bundle(tmp_path / "model.kdtr", config, narrow)
    models = [
        DeepseekV3(config, narrow, dtype=dtype, backend="cupy"),
        DeepseekV3(config, {name: cp.asarray(w) for name, w in narrow.items()}, dtype=dtype, backend="cupy"),
        load_model(tmp_path / "model.kdtr", dtype=dtype, backend="cupy"),
    ]
    outputs = [to_numpy(m.forward(chain_tree(ids), sent(cp, empty_cache(m, [20]))).logits) for m in models]
    for output in outputs[1:]:
        assert_same(output, outputs[0])
    embedding = narrow["model.embed_tokens.weight"].astype(models[0].dtype)
    assert_same(models[0].embedding.get(), embedding)


def test_a_model_of_several_tensors_never_lies_on_the_host(cp):
    """One that is far larger than what the process grows by."""
    config = ModelConfig.from_dict(WIDE | {"vocab_size": 400_000, "num_hidden_layers": 2})
    weights = random_weights(config, backend="cupy")
    DeepseekV3(config, weights, dtype="bfloat16", backend="cupy")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    model = DeepseekV3(config, weights, dtype="float32", backend="cupy")
    grown = 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
    assert model.embedding.nbytes + model.output_layer.nbytes > 800e6
    assert grown < 100e6


def test_a_model_without_room_on_the_gpu_names_the_tensor_and_both_sizes(cp):
    config = ModelConfig.from_dict(WIDE)
    weights = dict(random_weights(config))
    pool = cp.cuda.MemoryPool()  # a new one: in the others, what earlier tests have freed is room too
    pool.set_limit(size=3_000_000)
    with cp.cuda.using_allocator(pool.malloc):
        with pytest.raises(MemoryError, match=r"^model\.\S+ needs [\d,]+ bytes on GPU 0, and [\d,]+ are free: load"):
            DeepseekV3(config, weights, dtype="float32", backend="cupy")
        pool.set_limit(size=0)
        DeepseekV3(config, weights, dtype="float32", backend="cupy")


def test_a_prompt_of_100_000_tokens_does_not_blow_the_memory(cp):
    config = ModelConfig.from_dict(WIDE | {"num_hidden_layers": 1, "num_attention_heads": 2})
    model = DeepseekV3(config, random_weights(config, backend="cupy"), dtype="bfloat16", backend="cupy")
    pool = cp.get_default_memory_pool()
    pool.free_all_blocks()
    before = pool.total_bytes()
    prompt = np.random.default_rng(0).integers(0, 1000, 100_000)
    run = Engine(model, backend="cupy").generate([prompt], 2, mode="autoregressive")
    assert len(run.tokens[0]) == 2
    cache = 100_000 * 576 * 2
    assert pool.total_bytes() - before < cache + 500e6


def test_transformers_on_the_same_random_weights_has_the_same_logits(cp):
    torch, transformers = gpu_library("torch"), pytest.importorskip("transformers")
    config = ModelConfig.from_dict(WIDE)
    weights = random_weights(config, 1, std=0.06, fused_experts=True)
    settings = {k: v for k, v in config.to_dict().items() if k not in ("architectures", "model_type")}
    theirs = transformers.DeepseekV3ForCausalLM(transformers.DeepseekV3Config(**settings)).eval().to(torch.float32)
    theirs.load_state_dict({name: torch.from_numpy(tensor) for name, tensor in weights.items()})
    ids = np.random.default_rng(3).integers(0, 1000, (1, 40))
    with torch.no_grad():
        expected = theirs.cuda()(torch.from_numpy(ids).cuda()).logits[0].cpu().numpy()
    model = DeepseekV3(config, weights, dtype="float32", backend="cupy")
    logits = to_numpy(model.forward(chain_tree(ids), sent(cp, empty_cache(model, [40]))).logits)[0]
    assert_close(logits, expected.astype(np.float64), row=("huggingface", "float64"), scale=np.abs(expected).max())
