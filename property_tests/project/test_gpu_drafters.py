"""On a GPU: drafts made there, also by a CUDA graph, are those of the host."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from types import ModuleType
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from ddtree import load_pair, load_prompts, reference
from ddtree.drafters import BlockConfig, BlockDrafter, NgramDrafter, NoiseLaw, OracleDrafter
from ddtree.engine import Engine
from ddtree.engine.graphs import captured
from ddtree.property_tests.compare import assert_close, assert_same
from ddtree.property_tests.project.on_gpu import gpu_library, poison_outputs
from ddtree.property_tests.slots import Slots, drafts_in_pairs
from ddtree.property_tests.test_resident_drafters import assert_near_draft, hidden_states_of
from ddtree.protocols import ResidentState

kernels: Any = importlib.import_module("ddtree.kernels.cupy")
TYPES = {"float32": np.float32, "float64": np.float64, "bfloat16": ml_dtypes.bfloat16}
ALLOCATING = ("block_attention", "linear", "ngram_draft", "oracle_draft", "swiglu", "topk_log_probs")


@pytest.fixture(params=[0xFF, 0x5A])
def cupy(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """CuPy, with every array that a launcher makes full of poison."""
    poison_outputs(monkeypatch, ALLOCATING, request.param)
    return gpu_library("cupy")


def by_graph(cupy: ModuleType) -> Callable[[Callable[[], Any]], Callable[[], Any]]:
    """Turn a draft function into one that a CUDA graph replays."""

    def turn(draft: Callable[[], Any]) -> Callable[[], Any]:
        arrays: list[Any] = []

        def work() -> None:
            arrays[:] = draft()

        replay = captured(cupy, work)

        def again() -> list[Any]:
            replay()
            return arrays

        return again

    return turn


# --- n-grams ---


def ngram_case(rng: np.random.Generator, most: int) -> tuple[Any, Any, dict[str, Any]]:
    """Tokens of some requests, repetitive or not, and settings."""
    B, R = int(rng.integers(1, 4)), int(rng.choice([1, 2, 31, 33, 64, 600, 2048, most]))
    tokens = rng.integers(0, rng.choice([1, 2, 20, 3000]), (B, R)).astype(np.int32)
    kind = rng.integers(4)
    if kind == 0:
        period = int(rng.integers(1, 8))
        tokens = np.tile(tokens[:, :period], (1, R))[:, :R].copy()
    elif kind == 1:
        tokens[:, 1::2] = tokens[:, :1]  # one token in two, and many different ones after it
    lengths = rng.integers(0, R + 1, B).astype(np.int32)
    lengths[0] = R
    shortest = int(rng.integers(1, 4))
    options = {
        "depth": int(rng.integers(1, 6)),
        "topk": int(rng.choice([1, 3, 16, 64, 300])),
        "max_ngram": shortest + int(rng.integers(0, 4)),
        "min_ngram": shortest,
        "escape": float(rng.choice([0.01, 0.5, 3.0])),
    }
    return tokens, lengths, options


@pytest.mark.parametrize("recency", [1e-30, 0.25, 0.9, 0.99, 1.0])
def test_ngram_drafts_are_the_references_to_the_bit(cupy: ModuleType, recency: float) -> None:
    rng = np.random.default_rng(int(1000 * recency))
    votes = NgramDrafter(recency=recency)._vote_sums
    for _ in range(25):
        tokens, lengths, options = ngram_case(rng, 4500)
        arrays = map(cupy.asarray, (tokens, lengths, votes))
        got = kernels.ngram_draft(*arrays, **options)
        for mine, its in zip(got, reference.ngram_draft(tokens, lengths, votes, **options), strict=True):
            assert_same(cupy.asnumpy(mine), its)


def test_ngram_drafts_of_a_long_context(cupy: ModuleType) -> None:
    rng = np.random.default_rng(3)
    tokens = rng.integers(0, 300, (2, 32_768)).astype(np.int32)
    lengths, votes = np.array([32_768, 30_001], np.int32), NgramDrafter()._vote_sums
    options = {"depth": 3, "topk": 64, "max_ngram": 4, "min_ngram": 1, "escape": 0.5}
    got = kernels.ngram_draft(*map(cupy.asarray, (tokens, lengths, votes)), **options)
    for mine, its in zip(got, reference.ngram_draft(tokens, lengths, votes, **options), strict=True):
        assert_same(cupy.asnumpy(mine), its)


def state_of(cupy: ModuleType, slots: int, room: int) -> ResidentState:
    ints = {name: cupy.zeros(slots, np.int32) for name in ("lengths", "roots", "prompt_lens", "remaining", "kept")}
    return ResidentState(tokens=cupy.zeros((slots, room), np.int32), **ints)


def test_more_than_a_block_holds_is_refused(cupy: ModuleType) -> None:
    state = state_of(cupy, 1, 10_000)
    with pytest.raises(ValueError, match=r"max_ngram must be below min_ngram \+ 32 on a GPU, got 2 … 34: lower it"):
        NgramDrafter(min_ngram=2, max_ngram=34, recency=0.5).open_resident(state, 2, 2)
    with pytest.raises(ValueError, match=r"at most 4096 places may vote on a GPU, got 5 orders of up to 1024 in 10000"):
        NgramDrafter(max_ngram=5, recency=1.0).open_resident(state, 2, 2)
    contexts = cupy.zeros((1, 1, 258, 4), np.float32), cupy.zeros((1, 1, 4, 258), np.float32)
    with pytest.raises(
        ValueError, match=r"head_dim must be at most 256 and block_size .* 4096 .*, got 258 and 2 · 258"
    ):
        kernels.block_attention(cupy.zeros((2, 774), np.float32), *contexts, None, None, None, None, eps=1e-6)


# --- drafters in slots, by a graph ---


@pytest.mark.parametrize("kind", ["oracle", "oracle with noise", "n-gram"])
def test_drafts_by_a_graph_are_those_of_the_host(cupy: ModuleType, kind: str) -> None:
    rng = np.random.default_rng(4)
    texts = [rng.integers(0, 50, n).astype(np.int32) for n in (30, 2, 700, 45, 9, 33)]
    lens = [int(rng.integers(1, len(text))) for text in texts]
    known = [text[n:] for text, n in zip(texts, lens, strict=True)]
    drafter: Any = {
        "oracle": OracleDrafter(known, 50),
        "oracle with noise": OracleDrafter(known, 50, noise=NoiseLaw([[0.5, 0.25], [0.2]]), past_end=1, seed=2**40),
        "n-gram": NgramDrafter(max_ngram=3),
    }[kind]
    slots = Slots(texts, lens, slots=3, room=701, depth=4, xp=cupy)
    for got, expected in drafts_in_pairs(drafter, slots, 4, 12, rng, draft=by_graph(cupy)):
        assert_same(got[1], expected[1])
        assert_same(got[0], expected[0])


class Elsewhere:
    """A target's parts as a block drafter uses them, where ``xp`` is."""

    def __init__(self, target: Any, xp: ModuleType, dtype: str) -> None:
        self.config, self.dtype = target.config, np.dtype(TYPES[dtype])
        self.embedding = xp.asarray(target.embedding.astype(self.dtype))
        self.output_layer = xp.asarray(target.output_layer.astype(self.dtype))


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(("window", "heads"), [(None, (3, 34)), (9, (2, 64)), (300, (1, 130)), (1, (4, 6))])
def test_blocks_by_a_graph_are_those_of_the_host(
    cupy: ModuleType, dtype: str, window: int | None, heads: tuple[int, int]
) -> None:
    target = load_pair(dtype="float64").target
    D = target.config.hidden_size
    config = BlockConfig(D, 2, *heads, 64, 11, (0, 2), context_window=window)
    rng = np.random.default_rng(5)
    weights = {name: rng.normal(size=shape) / np.sqrt(shape[-1]) for name, shape in config.tensor_shapes().items()}
    weights = {name: weight.astype(TYPES[dtype]) for name, weight in weights.items()}  # the same on both sides
    there = BlockDrafter(config, weights, Elsewhere(target, cupy, dtype))
    host = BlockDrafter(config, weights, Elsewhere(target, np, "float64"))
    hidden = hidden_states_of(D, TYPES[dtype])
    texts = [rng.integers(0, target.vocab_size, n).astype(np.int32) for n in (60, 8, 400, 25)]
    options: dict[str, Any] = {"layers": (0, 2), "width": D, "dtype": TYPES[dtype], "hidden_states": hidden}
    slots = Slots(texts, [40, 2, 360, 1], slots=2, room=401, depth=10, xp=cupy, **options)
    for got, expected in drafts_in_pairs(there, slots, 10, 8, rng, on_host=host, draft=by_graph(cupy)):
        if dtype == "bfloat16":  # whose candidates of about the same probability stand in any order
            assert_close(got[0], expected[0], row=("draft", dtype), scale=1.0)
        else:
            assert_near_draft(got, expected, dtype)


# --- the pair ---


@pytest.mark.parametrize("max_batch", [1, 3])
def test_the_pair_decodes_as_on_the_host(max_batch: int) -> None:
    gpu_library("cupy")
    prompts = load_prompts().tokens[:5]
    runs = []
    for backend in (None, "cupy"):
        target, drafter, _ = load_pair(dtype="float64", backend=backend)
        runs.append(Engine(target, drafter, depth=7, budget=24, max_batch=max_batch).generate(prompts, 48))
    host, device = runs
    for mine, its in zip(device.tokens, host.tokens, strict=True):
        assert_same(mine, its)
    assert device.tau == pytest.approx(host.tau, rel=0.01)  # rounding may order two candidates of a draft otherwise


def test_the_pair_drafts_as_well_in_half_the_bits() -> None:
    gpu_library("cupy")
    prompts = load_prompts().tokens[:8]
    taus = []
    for dtype in ("float32", "bfloat16"):
        target, drafter, _ = load_pair(dtype=dtype, backend="cupy")
        taus.append(Engine(target, drafter, depth=7, budget=24).generate(prompts, 64).tau or 0.0)
    assert taus[1] > 0.85 * taus[0] > 2.0
