"""On a GPU: the CUDA C++ kernels of choice, acceptance and compaction against compiled code on the host, in sweeps.

The laws that any backend is held to run on these kernels too (``--ddtree-backend cupy``); here are more cases than
those have time for, and what only a GPU has: graphs, memory that is not aligned, outputs that were poison before.
"""

import importlib
from dataclasses import fields
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from ddtree import reference
from ddtree.kernels import numba_cpu
from ddtree.property_tests.compare import assert_same
from ddtree.property_tests.project.on_gpu import gpu_library, poison_outputs
from ddtree.trees import Acceptance, DraftTree, tree_from_parents

kernels: Any = importlib.import_module("ddtree.kernels.cupy")
FLOATS = (np.float16, ml_dtypes.bfloat16, np.float32, np.float64)
ALLOCATING = ("accept_tree", "choose_tokens")


@pytest.fixture
def cp(monkeypatch):
    """CuPy, with every array that a launcher makes full of poison."""
    poison_outputs(monkeypatch, ALLOCATING, 0x5A)
    return gpu_library("cupy")


def on_gpu(cp, record):
    """A tree or an acceptance with its arrays on the GPU."""
    values = {f.name: getattr(record, f.name) for f in fields(record)}
    return type(record)(**{k: cp.asarray(v) if isinstance(v, np.ndarray) else v for k, v in values.items()})


def captured(cp, call):
    """The graph of what ``call`` launches, and what it returns; it has run once before, to compile."""
    call()
    stream = cp.cuda.Stream(non_blocking=True)
    cp.cuda.Device().synchronize()
    with stream:
        stream.begin_capture()
        result = call()
        graph = stream.end_capture()
    return graph, result, stream


# Choice


def grid_logits(rng, rows, vocab, dtype):
    """Logits of few values, so that most rows have ties, with a special one here and there."""
    unit = rng.choice([0.125, 0.5, 2.0])
    logits = rng.integers(-12, 1 + rng.integers(0, 12), (4, rows // 4, vocab)) * unit
    special = rng.random(logits.shape) < rng.choice([0.0, 0.0, 0.3 / vocab])
    logits[special] = rng.choice([-np.inf, np.inf, np.nan], special.sum())
    logits[rng.random(logits.shape) < 0.05] = -np.inf
    return logits.astype(dtype)


def assert_same_choices(cp, logits, **options):
    """On the GPU and compiled on the host."""
    sent = {k: cp.asarray(v) if isinstance(v, np.ndarray) else v for k, v in options.items()}
    chosen = kernels.choose_tokens(cp.asarray(logits), **sent)
    with np.errstate(over="ignore"):
        assert_same(chosen.get(), numba_cpu.choose_tokens(logits, **options))


def sampling(rng, shape, *, temperature, top_p):
    return {
        "temperature": temperature,
        "top_p": top_p,
        "seed": int(rng.integers(0, 2**64, dtype=np.uint64)),
        "request_ids": rng.integers(0, 2**63, shape[0], dtype=np.int64),
        "positions": rng.integers(0, 2**31, shape[:2], dtype=np.int32),
    }


@pytest.mark.parametrize("dtype", FLOATS)
def test_choices_in_small_vocabularies(cp, dtype):
    rng = np.random.default_rng(1)
    for _ in range(40):
        logits = grid_logits(rng, 256, int(rng.choice([1, 2, 3, 8, 17, 64, 100, 1000, 2051])), dtype)
        assert_same_choices(cp, logits)
        for top_p in (1.0, rng.choice([0.5, 0.75, 0.25, 15 / 16, 2.0**-20, 0.9, 1 - 2**-40])):
            temperature = rng.choice([1.0, 0.5, 0.7, 2.0, 30.0])
            assert_same_choices(cp, logits, **sampling(rng, logits.shape, temperature=temperature, top_p=top_p))


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("kind", ["normal", "equal", "peaked", "two values"])
def test_choices_in_a_large_vocabulary(cp, dtype, kind):
    rng = np.random.default_rng(2)
    shape = (2, 1, 163_840)
    logits = {
        "normal": 3 * rng.standard_normal(shape),
        "equal": np.full(shape, 1.5),
        "peaked": np.where(rng.random(shape) < 1e-4, 20.0, rng.standard_normal(shape)),
        "two values": rng.integers(0, 2, shape) / 8.0,
    }[kind].astype(dtype)
    assert_same_choices(cp, logits)
    for temperature, top_p in ((1.0, 1.0), (0.6, 0.95), (1.0, 0.5), (3.0, 0.9), (1.0, 1e-9)):
        assert_same_choices(cp, logits, **sampling(rng, shape, temperature=temperature, top_p=top_p))


@pytest.mark.parametrize("dtype", FLOATS)
def test_rows_without_a_choice_in_vocabularies_of_any_size(cp, dtype):
    for vocab in (1, 4, 8, 12, 64, 1000, 4096, 70_000):
        logits = np.full((1, 6, vocab), -np.inf)
        logits[0, 1, -1], logits[0, 2, -1], logits[0, 3, 0], logits[0, 4, -1] = np.nan, np.inf, np.nan, -60_000.0
        positions = np.arange(6, dtype=np.int32)[None]
        expected = [[-1, -1, -1, -1, vocab - 1, -1]]
        sent = cp.asarray(logits.astype(dtype))
        for options in ({}, {"temperature": 1.0}, {"temperature": 1.0, "top_p": 0.5}):
            assert kernels.choose_tokens(sent, positions=cp.asarray(positions), **options).tolist() == expected


@pytest.mark.parametrize("temperature", [1e-300, 1e-41, 1e-30, 1e-3, 1e30, 1e300])
@pytest.mark.parametrize("scale", [1e-44, 1e-30, 1.0, 3e38])
def test_choices_at_the_ends_of_the_range(cp, temperature, scale):
    rng = np.random.default_rng(3)
    for dtype in (np.float32, np.float64):
        logits = (rng.integers(-9, 10, (4, 8, 97)) / 9.0 * scale).astype(dtype)
        for top_p in (1.0, 0.7):
            assert_same_choices(cp, logits, **sampling(rng, logits.shape, temperature=temperature, top_p=top_p))


def test_values_far_apart_whose_differences_round_alike(cp):
    rng = np.random.default_rng(4)
    logits = np.where(rng.random((4, 16, 300)) < 0.1, 1e17, rng.integers(-9, 10, (4, 16, 300)).astype(float))
    for temperature in (1e16, 1e17, 3e17):
        for top_p in (1.0, 0.9, 0.3):
            assert_same_choices(cp, logits, **sampling(rng, logits.shape, temperature=temperature, top_p=top_p))


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("vocab", [4096, 4099])
def test_choices_from_memory_that_is_not_aligned(cp, dtype, vocab):
    rng = np.random.default_rng(5)
    logits = grid_logits(rng, 8, vocab, dtype)
    room = cp.empty(logits.size + 1, dtype)
    shifted = room[1:].reshape(logits.shape)
    shifted[...] = cp.asarray(logits)
    options = sampling(rng, logits.shape, temperature=1.0, top_p=0.9)
    sent = {k: cp.asarray(v) if isinstance(v, np.ndarray) else v for k, v in options.items()}
    assert_same(kernels.choose_tokens(shifted).get(), numba_cpu.choose_tokens(logits))
    assert_same(kernels.choose_tokens(shifted, **sent).get(), numba_cpu.choose_tokens(logits, **options))


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("vocab", [1, 50, 4096, 32_768])
def test_choices_from_where_a_place_says(cp, dtype, vocab):
    rng, like = np.random.default_rng(5), cp.zeros((4, 2, vocab), dtype)
    place = cp.full(1, like.data.ptr, np.int64)
    graph, chosen, stream = captured(cp, lambda: kernels.choose_tokens(like, place=place))
    pinned = np.frombuffer(cp.cuda.alloc_pinned_memory(like.nbytes), dtype, like.size).reshape(like.shape)
    for _ in range(3):
        logits = grid_logits(rng, 8, vocab, dtype)
        pinned[...] = logits
        on_device = cp.asarray(logits)
        for address in (on_device.data.ptr, pinned.ctypes.data):
            place[...] = address
            cp.cuda.Device().synchronize()
            graph.launch(stream)
            stream.synchronize()
            with np.errstate(over="ignore"):
                assert_same(chosen.get(), numba_cpu.choose_tokens(logits))


def test_choices_of_the_reference_itself(cp):
    rng = np.random.default_rng(6)
    logits = (3 * rng.standard_normal((1, 3, 163_840))).astype(ml_dtypes.bfloat16)
    for top_p in (1.0, 0.9):
        options = sampling(rng, logits.shape, temperature=0.8, top_p=top_p)
        sent = {k: cp.asarray(v) if isinstance(v, np.ndarray) else v for k, v in options.items()}
        chosen = kernels.choose_tokens(cp.asarray(logits), **sent)
        assert_same(chosen.get(), reference.choose_tokens(logits, **options))


# Acceptance


def random_trees(rng, B, N, *, deep):
    """Trees of few tokens, so that siblings are alike and walks are long."""
    i = np.arange(N)
    reach = rng.integers(1, 4, (B, N)) if deep else np.maximum(i, 1)
    parents = np.maximum(i - 1 - (rng.random((B, N)) * reach).astype(np.int64), np.where(i > 0, 0, -1))
    tokens = rng.integers(0, 3, (B, N))
    return tree_from_parents(tokens, parents, rng.integers(1, N + 1, B))


@pytest.mark.parametrize("N", [1, 2, 12, 33, 65, 300])
@pytest.mark.parametrize("deep", [False, True])
def test_acceptance_of_many_trees(cp, N, deep):
    rng = np.random.default_rng(N)
    tree = random_trees(rng, 10_000 if N < 300 else 1000, N, deep=deep)
    sent = on_gpu(cp, tree)
    for limited in (False, True):
        for stops in (None, [], [2], [7, 1, 9]):
            choices = rng.integers(-1, 3, tree.token_ids.shape).astype(np.int32)
            choices[rng.random(choices.shape) < 0.5] = 0
            options = {
                "remaining": rng.integers(0, 9, tree.batch_size).astype(np.int32) if limited else None,
                "stop_token_ids": None if stops is None else np.array(stops, np.int32),
            }
            got = kernels.accept_tree(
                sent, cp.asarray(choices), **{k: None if v is None else cp.asarray(v) for k, v in options.items()}
            )
            assert_acceptance(got, numba_cpu.accept_tree(tree, choices, **options))


def assert_acceptance(got, expected):
    for f in fields(Acceptance):
        assert_same(getattr(got, f.name).get(), getattr(expected, f.name), f.name)


def test_acceptance_of_trees_that_exceed_shared_memory(cp):
    for N in (4096, 4097, 9000):
        # two chains from the root, of which the target follows one to the end
        i = np.tile(np.arange(N), (3, 1))
        tree = tree_from_parents(i, np.maximum(i - 2, np.where(i > 0, 0, -1)), [N, N - 1, N // 2])
        choices = (i + 2).astype(np.int32)
        expected = numba_cpu.accept_tree(tree, choices)
        assert expected.lengths.max() > N // 3
        assert_acceptance(kernels.accept_tree(on_gpu(cp, tree), cp.asarray(choices)), expected)


def test_no_requests_are_accepted(cp):
    no = np.zeros((0, 3), np.int32)
    tree = DraftTree(no, no, no, no, no.astype(float), no[:, 0], np.zeros((0, 3, 1), np.uint32), 2, 1)
    assert kernels.accept_tree(on_gpu(cp, tree), cp.asarray(no)).node_indices.shape == (0, 3)


# Compaction


def random_paths(rng, B, width):
    """An acceptance of paths with gaps."""
    lengths = rng.integers(0, width + 1, B).astype(np.int32)
    steps = rng.integers(1, 4, (B, width))
    indices = (np.cumsum(steps, 1) - steps[:, :1]).astype(np.int32)
    indices[np.arange(width) >= lengths[:, None]] = -1
    return Acceptance(indices, lengths, np.zeros(B, np.int32), lengths == 0)


@pytest.mark.parametrize("dtype", ["u1", "u2", "u4", "u8"])
@pytest.mark.parametrize("shift", [0, 1])
def test_compaction_of_caches_of_any_shape(cp, dtype, shift):
    rng = np.random.default_rng(8)
    for _ in range(60):
        B, width = int(rng.integers(0, 6)), int(rng.choice([1, 2, 8, 16, 150]))
        S, columns, layers = (int(rng.choice(c)) for c in ([1, 3, 16, 64, 100], [1, 3, 8, 20, 576], [1, 2, 5]))
        acceptance = random_paths(rng, B, width)
        prefix_lens = rng.integers(0, 90, B).astype(np.int32)
        per_request = -(-(90 + 3 * width) // S)
        pages = B * per_request + 1
        page_table = rng.permutation(pages)[: B * per_request].astype(np.int32).reshape(B, per_request)
        data = rng.integers(0, 256, (layers, pages, S, columns * np.dtype(dtype).itemsize), np.uint8).view(dtype)
        room = cp.asarray(rng.integers(0, 256, data.nbytes + 128, np.uint8))
        guards = room.get()
        start = 32 + shift * data.itemsize
        cache = room[start : start + data.nbytes].view(dtype).reshape(data.shape)
        cache[...] = cp.asarray(data)
        kernels.compact_cache(cache, *map(cp.asarray, (page_table, prefix_lens)), on_gpu(cp, acceptance))
        reference.compact_cache(data, page_table, prefix_lens, acceptance)
        assert_same(cache.get(), data)
        after = room.get()
        assert (after[:start] == guards[:start]).all()
        assert (after[start + data.nbytes :] == guards[start + data.nbytes :]).all()


# A round, in a graph


def test_a_round_is_captured_and_replayed(cp):
    rng = np.random.default_rng(9)
    B, N, V, S, layers = 4, 33, 1000, 16, 3
    tree = random_trees(rng, B, N, deep=True)
    logits = np.full((B, N, V), -5.0, np.float32)
    logits[..., :3] = rng.integers(-8, 9, (B, N, 3)) / 8
    prefix_lens = rng.integers(0, 50, B).astype(np.int32)
    page_table = rng.permutation(B * 8).astype(np.int32).reshape(B, 8)
    cache = rng.standard_normal((layers, B * 8, S, 20)).astype(np.float32)
    given = [cp.asarray(a) for a in (logits, page_table, prefix_lens, cache)]
    sent = on_gpu(cp, tree)

    def a_round():
        chosen = kernels.choose_tokens(given[0])
        acceptance = kernels.accept_tree(sent, chosen)
        kernels.compact_cache(given[3], given[1], given[2], acceptance)
        return acceptance

    graph, acceptance, stream = captured(cp, a_round)
    for _ in range(3):
        logits[..., :3] = rng.integers(-8, 9, (B, N, 3)) / 8
        given[0].set(logits)
        given[3].set(cache)
        cp.cuda.Device().synchronize()
        graph.launch(stream)
        stream.synchronize()
        expected = numba_cpu.accept_tree(tree, numba_cpu.choose_tokens(logits))
        after = cache.copy()
        reference.compact_cache(after, page_table, prefix_lens, expected)
        assert_acceptance(acceptance, expected)
        assert_same(given[3].get(), after)
