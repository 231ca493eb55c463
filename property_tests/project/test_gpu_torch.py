"""On a GPU: operations on torch's tensors keep to its stream, its memory and its graphs, and decode its models."""

import functools
import importlib
import warnings
from contextlib import contextmanager
from dataclasses import fields
from typing import Any

import numpy as np
import pytest

import ddtree
from ddtree import Acceptance, DDTreeDecoder, DraftTree, NgramDrafter, OracleDrafter, reference
from ddtree.arrays import to_numpy
from ddtree.drafters import NoiseLaw
from ddtree.property_tests.compare import assert_same
from ddtree.property_tests.project.on_gpu import gpu_library
from ddtree.property_tests.targets import DRAFTERS, VOCABULARY, RandomDrafter
from ddtree.trees import tree_from_parents

B, L, K, V, BUDGET = 2, 7, 16, 500, 64
SLEEP = 400_000_000
"""Clocks of a kernel that is still running when whatever is launched behind it has been."""


@pytest.fixture
def torch():
    gpu_library("cupy")
    return gpu_library("torch")


@contextmanager
def no_waits(torch):
    """Have what torch knows to wait for the GPU raise."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it warns that it does not know of everything
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


# Operations


def draft(rng):
    log_probs = -np.sort(rng.integers(0, 60, (B, L, K)) / 8).astype(np.float32)
    token_ids = np.argsort(rng.random((B, L, V)))[..., :K].astype(np.int32)
    return {"log_probs": log_probs, "token_ids": token_ids, "root_token_ids": rng.integers(0, V, B, dtype=np.int32)}


def tree_arrays(rng):
    tree = reference.build_tree(**draft(rng), budget=BUDGET)
    return {f.name: getattr(tree, f.name) for f in fields(tree) if isinstance(getattr(tree, f.name), np.ndarray)}


def paged(rng, *shape):
    table = rng.permutation(32).astype(np.int32).reshape(B, 16)
    lens = rng.integers(1, 16 * 16 - BUDGET - 1, B, dtype=np.int32)
    return {"kv_cache": rng.normal(size=shape).astype(np.float32), "page_table": table, "prefix_lens": lens}


def acceptance_arrays(rng):
    tree = tree_of(tree_arrays(rng))
    choices = np.roll(tree.token_ids, -1, 1)
    for b, i in np.argwhere(tree.parents > 0):  # some paths are agreed with
        choices[b, tree.parents[b, i]] = tree.token_ids[b, i]
    kept = reference.accept_tree(tree, choices)
    return {f.name: getattr(kept, f.name) for f in fields(kept)}


def tree_of(arrays):
    return DraftTree(
        **{f.name: arrays[f.name] for f in fields(DraftTree) if f.name in arrays}, max_depth=L, num_candidates=K
    )


def acceptance_of(arrays):
    return Acceptance(**{f.name: arrays[f.name] for f in fields(Acceptance)})


def positions(rng):
    return rng.integers(0, 99, (B, BUDGET + 1), dtype=np.int32)


# of each: its arrays by a generator, and its call, of the public operation or of the reference (``of``)
OPERATIONS: dict[str, tuple[Any, Any]] = {
    "topk_log_probs": (
        lambda rng: {"logits": rng.normal(size=(B, L, V)).astype(np.float32)},
        lambda of, a: of.topk_log_probs(a["logits"], K),
    ),
    "build_tree": (draft, lambda of, a: of.build_tree(**a, budget=BUDGET)),
    "build_tree of many nodes": (draft, lambda of, a: of.build_tree(**a, budget=2000)),
    "visibility_words": (tree_arrays, lambda of, a: of.visibility_words(a["parents"], a["node_counts"])),
    "tree_positions": (
        lambda rng: tree_arrays(rng) | {"prefix_lens": rng.integers(0, 99, B, dtype=np.int64)},
        lambda of, a: of.tree_positions(a["depths"], a["prefix_lens"]),
    ),
    "verify_attention": (
        lambda rng: (
            tree_arrays(rng)
            | {"q": rng.normal(size=(B, BUDGET + 1, 4, 80)).astype(np.float32)}
            | paged(rng, 32, 16, 80)
        ),
        lambda of, a: of.verify_attention(
            *(a[name] for name in ("q", "kv_cache", "page_table", "prefix_lens")),
            tree_of(a),
            scale=0.1,
            kv_lora_rank=64,
        ),
    ),
    "choose_tokens": (
        lambda rng: {"logits": rng.integers(0, 9, (B, BUDGET + 1, V)).astype(np.float32)},
        lambda of, a: of.choose_tokens(a["logits"]),
    ),
    "choose_tokens of a nucleus": (
        lambda rng: {"logits": rng.normal(size=(B, BUDGET + 1, V)).astype(np.float32), "positions": positions(rng)},
        lambda of, a: of.choose_tokens(**a, temperature=0.8, top_p=0.9, seed=3),
    ),
    "accept_tree": (
        lambda rng: (
            tree_arrays(rng)
            | {"target_token_ids": rng.integers(0, 20, (B, BUDGET + 1), dtype=np.int32)}
            | {"remaining": rng.integers(0, 9, B, dtype=np.int32), "stop_token_ids": np.array([3, 7], np.int32)}
        ),
        lambda of, a: of.accept_tree(
            tree_of(a), a["target_token_ids"], remaining=a["remaining"], stop_token_ids=a["stop_token_ids"]
        ),
    ),
    "compact_cache": (
        lambda rng: acceptance_arrays(rng) | paged(rng, 3, 32, 16, 24),
        lambda of, a: (
            of.compact_cache(a["kv_cache"], a["page_table"], a["prefix_lens"], acceptance_of(a)) or a["kv_cache"]
        ),
    ),
}


def arrays_of(name, seed):
    return OPERATIONS[name][0](np.random.default_rng(seed))


def called(name, arrays, of=ddtree):
    """The results of an operation, as a list."""
    result = OPERATIONS[name][1](of, arrays)
    if isinstance(result, DraftTree | Acceptance):
        return [v for f in fields(result) if not isinstance(v := getattr(result, f.name), int)]
    return list(result) if isinstance(result, tuple) else [result]


def sent(torch, arrays):
    return {name: torch.from_numpy(array.copy()).cuda() for name, array in arrays.items()}


def assert_right(name, torch, results, seed):
    """What the reference makes of the arrays of ``seed``, bit for bit; floating results, what a call by itself does."""
    if name in ("topk_log_probs", "verify_attention"):
        wanted = [to_numpy(a) for a in called(name, sent(torch, arrays_of(name, seed)))]
    else:
        arrays = {key: a.astype(np.int32) if a.dtype == np.int64 else a for key, a in arrays_of(name, seed).items()}
        wanted = called(name, arrays, reference)
    for got, expected in zip(results, wanted, strict=True):
        assert_same(to_numpy(got), expected, name)


@pytest.mark.parametrize("name", OPERATIONS)
def test_an_operation_is_on_torchs_stream_and_waits_for_nothing(torch, name):
    side = torch.cuda.Stream()
    tensors, again = (sent(torch, arrays_of(name, 1)) for _ in range(2))
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        called(name, tensors)  # loads the kernels
        side.synchronize()
        with no_waits(torch):
            torch.cuda._sleep(SLEEP)
            slept = torch.cuda.Event()
            slept.record()
            results = called(name, again)
            assert not slept.query(), f"{name} waited for the GPU"
    side.synchronize()
    assert_right(name, torch, results, 1)


@pytest.mark.parametrize("name", OPERATIONS)
def test_an_operation_is_captured_in_torchs_graph_at_its_first_launch_and_replayed(torch, name):
    program = importlib.import_module("ddtree.kernels.cupy.program")
    tensors = sent(torch, arrays_of(name, 0))
    program._kernel.cache_clear()
    program._module.cache_clear()  # as in a new process: kernels are loaded while the stream captures
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = called(name, tensors)
    others = [torch.full((1 << 16,), 7, dtype=torch.uint8, device="cuda") for _ in range(64)]  # nobody else's memory
    for seed in (2, 3):
        for key, array in arrays_of(name, seed).items():
            tensors[key].copy_(torch.from_numpy(array))
        graph.replay()
        torch.cuda.synchronize()
        assert_right(name, torch, results, seed)
        assert all(bool((other == 7).all()) for other in others)


def test_results_and_work_are_memory_of_torchs(torch):
    cupy = gpu_library("cupy")
    tensors = sent(torch, draft(np.random.default_rng(0)))
    before, pool = torch.cuda.memory_allocated(), cupy.get_default_memory_pool().used_bytes()
    tree = ddtree.build_tree(**tensors, budget=4000)
    held = torch.cuda.memory_allocated() - before
    assert tree.visibility_words.nbytes <= held < 1.1 * tree.visibility_words.nbytes + 1_000_000
    assert cupy.get_default_memory_pool().used_bytes() == pool
    del tree
    assert torch.cuda.memory_allocated() == before


def test_a_tensor_on_another_stream_than_cupys_is_right_after_cupys_own_work(torch):
    """The two libraries take turns on one stream, and CuPy's own current stream is what it was."""
    cupy = gpu_library("cupy")
    own = cupy.cuda.Stream(non_blocking=True)
    with own:
        tensors = sent(torch, draft(np.random.default_rng(5)))
        called("build_tree", tensors)
        assert cupy.cuda.get_current_stream().ptr == own.ptr
        assert cupy.empty(4).data.mem.__class__.__name__ != "UnownedMemory"


# Decoding

PROMPTS = [[3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5], [2, 7, 1], [8]]
NEW = 14


@functools.cache
def model_of(name):
    return new_model(name).cuda()


def new_model(name, **changes):
    pytest.importorskip("transformers", reason="optional library transformers is not installed")
    return importlib.import_module("ddtree.property_tests.project.hf_models").new_model(name, **changes)


@functools.cache
def expected(name):
    """What transformers makes of PROMPTS on the GPU, each alone."""
    torch, rows = importlib.import_module("torch"), []
    for prompt in PROMPTS:
        ids = torch.tensor([prompt], device="cuda")
        options = {"attention_mask": torch.ones_like(ids), "max_new_tokens": NEW, "do_sample": False}
        rows.append(model_of(name).generate(ids, **options)[0, len(prompt) :].tolist())
    return rows


def assert_tokens(generation, wanted):
    assert [tokens.tolist() for tokens in generation.tokens] == wanted


MODELS = ["llama", "qwen3", "gemma3", "deepseek_v3", "gpt2", "mistral"]
RUNS = [(name, "dynamic", kind) for name in MODELS for kind in ("random", "oracle with noise", "repeating")]
RUNS += [(name, "static", "oracle with noise") for name in ("llama", "gemma3", "deepseek_v3")]


@pytest.mark.parametrize("name, cache, kind", RUNS)
def test_tokens_are_those_of_generate(torch, name, cache, kind):
    drafter = DRAFTERS[kind]([np.array(row) for row in expected(name)], 3)
    decoder = DDTreeDecoder(model_of(name), drafter, depth=4, budget=9, cache=cache)
    generation = decoder.generate(PROMPTS, NEW)
    assert_tokens(generation, expected(name))
    assert generation.tau is not None
    assert generation.tau > 1.0
    assert_tokens(decoder.generate(PROMPTS[1:], NEW, mode="autoregressive"), expected(name)[1:])


def test_tokens_on_another_stream_and_with_budgets_of_many_words_are_the_same(torch):
    drafter = RandomDrafter(5)
    with torch.cuda.stream(torch.cuda.Stream()):
        for budget, depth in ((0, 3), (1, 0), (70, 5), (300, 6)):
            decoder = DDTreeDecoder(model_of("llama"), drafter, depth=depth, budget=budget)
            assert_tokens(decoder.generate(PROMPTS, NEW), expected("llama"))


@pytest.mark.parametrize("options", [{"temperature": 0.8}, {"temperature": 1.0, "top_p": 0.9}])
def test_a_sampled_tree_run_gives_the_tokens_of_a_one_token_run_and_of_the_host(torch, options):
    decoder = DDTreeDecoder(model_of("gemma3"), RandomDrafter(2), depth=4, budget=12)
    tree = decoder.generate(PROMPTS, NEW, seed=4, **options)
    assert_tokens(
        tree, [t.tolist() for t in decoder.generate(PROMPTS, NEW, mode="autoregressive", seed=4, **options).tokens]
    )
    assert_tokens(
        tree,
        [
            t.tolist()
            for t in DDTreeDecoder(new_model("gemma3"))
            .generate(PROMPTS, NEW, mode="autoregressive", seed=4, **options)
            .tokens
        ],
    )


def test_rounds_are_those_of_the_host(torch):
    """Trees, choices, paths and what finished, of every round."""
    drafter = RandomDrafter(7)
    there = DDTreeDecoder(model_of("llama"), drafter, depth=4, budget=9).generate(PROMPTS, NEW)
    here = DDTreeDecoder(new_model("llama"), drafter, depth=4, budget=9).generate(PROMPTS, NEW)
    assert len(there.rounds) == len(here.rounds)
    for got, wanted in zip(there.rounds, here.rounds, strict=True):
        assert got.request_ids == wanted.request_ids
        assert_same(got.target_token_ids, wanted.target_token_ids)
        for record in ("tree", "acceptance"):
            for f in fields(getattr(wanted, record)):
                a, b = (getattr(getattr(r, record), f.name) for r in (got, wanted))
                assert a == b if isinstance(b, int) else assert_same(a, b, f.name) is None


def test_stops_streams_and_streamers(torch):
    wanted = expected("gemma3")
    stop = wanted[1][2]
    cut = [row[: row.index(stop) + 1] if stop in row else row for row in wanted]
    assert len({len(row) for row in cut}) > 1
    decoder = DDTreeDecoder(model_of("gemma3"), RandomDrafter(1), depth=3, budget=6)
    generation = decoder.generate(PROMPTS, NEW, [stop])
    assert_tokens(generation, cut)
    assert generation.finish_reasons == ["stop" if stop in row else "length" for row in cut]
    emitted = list(decoder.stream(PROMPTS, NEW, [stop]))
    for request, row in enumerate(cut):
        assert np.concatenate([e.token_ids for e in emitted if e.request_id == request]).tolist() == row
    given: list[Any] = []
    streamer = type(
        "Tokens", (), {"put": lambda self, value: given.append(value), "end": lambda self: given.append(None)}
    )()
    decoder.generate(torch.tensor(PROMPTS[:1], device="cuda"), NEW, streamer=streamer)
    assert torch.cat(given[1:-1]).tolist() == wanted[0]
    assert given[-1] is None


class OnTheDevice:
    """Drafts as another does, in tensors on the GPU; ``spoil`` may change them."""

    def __init__(self, torch, drafter, spoil=lambda log_probs, token_ids: None, ids="int32"):
        self.torch, self.drafter, self.spoil, self.ids = torch, drafter, spoil, ids
        self.hidden_layers = (0, 2)
        self.seen: dict[int, list[Any]] = {}

    def __call__(self, context, depth, topk):
        for request, states in zip(context.request_ids, context.hidden_states, strict=True):
            self.seen.setdefault(request, []).append(states)
        log_probs, token_ids = (
            self.torch.from_numpy(np.ascontiguousarray(a)).cuda() for a in self.drafter(context, depth, topk)
        )
        token_ids = token_ids.to(getattr(self.torch, self.ids))
        self.spoil(log_probs, token_ids)
        return log_probs, token_ids


@pytest.mark.parametrize("ids", ["int32", "int64"])
def test_drafts_and_hidden_states_may_be_on_the_gpu(torch, ids):
    wanted = expected("llama")
    oracle = OracleDrafter(wanted, VOCABULARY, noise=NoiseLaw([[0.4, 0.4]]))
    drafter = OnTheDevice(torch, oracle, ids=ids)
    assert_tokens(DDTreeDecoder(model_of("llama"), drafter, depth=4, budget=9).generate(PROMPTS, NEW), wanted)
    for request, prompt in enumerate(PROMPTS):
        shown = {layer: torch.cat([states[layer] for states in drafter.seen[request]]) for layer in (0, 2)}
        last_layers, output = states_of(torch, [*prompt, *wanted[request]][: len(shown[0])])
        for layer, states in ((0, output.hidden_states[0][0]), (2, last_layers[0].reshape(-1, 16))):
            assert torch.allclose(shown[layer], states, atol=1e-6)


def states_of(torch, tokens):
    """What the last layer gives after a text, before the norm, and the model's output."""
    model, found = model_of("llama"), []
    hook = model.model.layers[-1].register_forward_hook(
        lambda module, args, out: found.append(out[0] if isinstance(out, tuple) else out)
    )
    with torch.no_grad():
        output = model(input_ids=torch.tensor([tokens], device="cuda"), use_cache=False, output_hidden_states=True)
    hook.remove()
    return found, output


@pytest.mark.parametrize(
    "ids, place, value, told",
    [
        (
            "int32",
            1,
            VOCABULARY,
            rf"drafter OnTheDevice, request 1: token_ids\[0, 1, 0\] must be in 0 … {VOCABULARY - 1}, got {VOCABULARY}",
        ),
        (
            "int64",
            1,
            2**32,
            rf"drafter OnTheDevice, request 1: token_ids\[0, 1, 0\] must be in 0 … {VOCABULARY - 1}, got {2**32}",
        ),
        ("int32", 0, 0.5, r"drafter OnTheDevice, request 1: log_probs\[0, 1, 0\] must be at most 0, got 0.5"),
    ],
)
def test_a_draft_on_the_gpu_that_is_none_is_refused_and_the_decoder_goes_on(torch, ids, place, value, told):
    calls = []

    def spoil(*draft):
        calls.append(1)
        if len(calls) == 3:
            draft[place][1, 1, 0] = value

    oracle = OracleDrafter(expected("llama"), VOCABULARY, noise=NoiseLaw([[0.0, 0.5]]))
    decoder = DDTreeDecoder(model_of("llama"), OnTheDevice(torch, oracle, spoil, ids), depth=3, budget=6)
    with pytest.raises(ValueError, match=told):
        decoder.generate(PROMPTS, NEW)
    assert_tokens(decoder.generate(PROMPTS, NEW), expected("llama"))


def test_logits_that_are_none_name_request_and_position(torch):
    model = new_model("llama").cuda()
    oracle = OracleDrafter(expected("llama"), VOCABULARY)
    decoder = DDTreeDecoder(model, oracle, depth=2, budget=4)
    rounds: list[Any] = []

    def spoil(record):
        rounds.append(record)
        if len(rounds) == 2:
            model.lm_head.weight.data.fill_(float("nan"))

    with pytest.raises(ddtree.engine.NonFiniteLogitsError, match="request 0: the target's logits after position"):
        decoder.generate(PROMPTS, NEW, on_round=spoil)
    assert len(rounds) == 2


def test_a_round_waits_for_the_gpu_once(torch, monkeypatch):
    """In torch's own eyes never; the one wait is that for what the host commits."""
    rounds = importlib.import_module("ddtree.interop.huggingface_rounds")
    wait, waits = rounds._Batch._wait, []

    def counted(batch):
        waits.append(1)
        wait(batch)

    monkeypatch.setattr(rounds._Batch, "_wait", counted)
    decoder = DDTreeDecoder(model_of("llama"), NgramDrafter(), depth=4, budget=9)
    seen: list[int] = []
    stream = decoder.stream(PROMPTS[:1], NEW)
    tokens = list(next(stream).token_ids)  # the prefill
    tokens += list(next(stream).token_ids)  # the first round, which makes what the others use
    waits.clear()
    with no_waits(torch):
        for emission in stream:
            tokens += list(emission.token_ids)
            seen.append(len(waits))
    assert tokens == expected("llama")[0]
    assert len(seen) > 2
    assert seen == list(range(1, len(seen) + 1))


def test_policies_and_backends_of_the_callers_serve(torch):
    from ddtree.policies import fixed_budget

    wanted = expected("llama")
    oracle = OracleDrafter(wanted, VOCABULARY, noise=NoiseLaw([[0.5, 0.4]]))
    for options in ({"policy": fixed_budget(9)}, {"backend": "cupy", "budget": 9}):
        assert_tokens(DDTreeDecoder(model_of("llama"), oracle, depth=4, **options).generate(PROMPTS, NEW), wanted)


def test_memory_does_not_grow_from_run_to_run(torch):
    decoder = DDTreeDecoder(model_of("llama"), NgramDrafter(), depth=4, budget=9)
    held = []
    for _ in range(4):
        decoder.generate(PROMPTS, NEW)
        torch.cuda.synchronize()
        held.append(torch.cuda.memory_allocated())
    assert held[1:] == [held[1]] * 3


def test_a_tree_made_on_the_host_is_refused_beside_tensors_on_the_gpu(torch):
    tree = tree_from_parents([[5, 7]], [[-1, 0]])
    with pytest.raises(ValueError, match=r"tree\.token_ids lies on cpu but target_token_ids on cuda:0: move them"):
        ddtree.accept_tree(tree, torch.zeros((1, 2), dtype=torch.int32, device="cuda"))


def test_the_benchmark_measures_a_model_on_a_gpu(torch):
    benchmark = importlib.import_module("ddtree.analysis.benchmarks.huggingface")
    sizes = benchmark.DEEPSEEK_SIZES["8 M"] | {"num_hidden_layers": 2, "vocab_size": 512}
    for drafter in ("oracle", "repeating"):
        shares = benchmark.measure_on_gpu(benchmark.random_deepseek(sizes), budget=16, new_tokens=48, drafter=drafter)
        assert min(shares) > 0
        assert shares.outside > shares.drafting
