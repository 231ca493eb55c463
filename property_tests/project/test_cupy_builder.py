"""On a GPU: ``topk_log_probs`` and ``build_tree`` in CUDA C++ on many random inputs, at their edges and in graphs.

Trees are held equal to ``numba_cpu``'s bit for bit, which the suite holds equal to the reference's.
"""

from __future__ import annotations

from dataclasses import fields
from types import ModuleType
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from ddtree import reference
from ddtree.kernels import numba_cpu
from ddtree.kernels.cupy.build_tree import build_tree
from ddtree.kernels.cupy.topk_log_probs import topk_log_probs
from ddtree.kernels.cupy.tree_positions import tree_positions
from ddtree.property_tests.compare import assert_close
from ddtree.property_tests.nearness import ROW, assert_right_top_k
from ddtree.property_tests.project.on_gpu import gpu_library, poison_outputs

POISON = 0x5A
TYPES = (np.float16, ml_dtypes.bfloat16, np.float32, np.float64)
LEVELS = {
    "zeros": lambda falls: 0.0 * falls,
    "equal": lambda falls: 0.25 + 0.0 * falls,
    "eighths": lambda falls: falls / 8,
    "eighths, none at first": lambda falls: (falls - falls[..., :1]) / 8,
    "sharp": lambda falls: np.minimum(1e-9 * 2.0 ** np.minimum(falls, 64), 30.0),  # sums round even in float64
    "random": lambda falls: falls * 0.0371 + 0.0123,
    "subnormal": lambda falls: falls * 3e-43,  # of float32, which CuPy's options take for 0
}


@pytest.fixture
def cupy() -> ModuleType:
    return gpu_library("cupy")


@pytest.fixture(autouse=True)
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fill every new array, so that what a kernel leaves out is seen."""
    poison_outputs(monkeypatch, ["build_tree", "topk_log_probs", "tree_positions"], POISON)


def drafts(rng: np.random.Generator, B: int, L: int, K: int, levels: str) -> tuple[np.ndarray, ...]:
    """Draw drafts, half of their depths with an end, behind which there is anything."""
    falls = np.cumsum(rng.integers(0, rng.choice([2, 6]), (B, L, K)), -1)
    log_probs = -np.asarray(LEVELS[levels](falls)).astype(np.float32)
    log_probs[rng.random((B, L, K)) < 0.5] += np.float32(0)  # −0.0 becomes 0.0
    ends = np.where(rng.random((B, L)) < 0.5, rng.integers(0, K + 1, (B, L)), K)[..., None]
    ranks = np.arange(K)
    log_probs = np.where(ranks > ends, rng.standard_normal((B, L, K)).astype(np.float32), log_probs)
    log_probs = np.where(ranks == ends, rng.choice(np.array([np.nan, -np.inf], np.float32), (B, L, 1)), log_probs)
    token_ids = (ranks * 7 + rng.integers(0, 1000, (B, L, 1))).astype(np.int32)
    return np.ascontiguousarray(log_probs), token_ids, rng.integers(0, 99, B).astype(np.int32)


def assert_same_bits(tree: Any, expected: Any) -> None:
    for field in fields(expected):
        got, wanted = getattr(tree, field.name), getattr(expected, field.name)
        if not isinstance(wanted, np.ndarray):
            assert got == wanted, field.name
            continue
        got = got.get()
        assert (got.dtype, got.shape) == (wanted.dtype, wanted.shape), field.name
        if got.tobytes() != wanted.tobytes():
            places = np.argwhere(got != wanted)
            raise AssertionError(f"{field.name} differs at {places[:3].tolist()}, {len(places)} in all")


def check_trees(cupy: ModuleType, draft: tuple[np.ndarray, ...], budget: int) -> None:
    assert_same_bits(build_tree(*map(cupy.asarray, draft), budget=budget), numba_cpu.build_tree(*draft, budget=budget))


@pytest.mark.parametrize("levels", LEVELS)
def test_a_hundred_thousand_drafts(cupy: ModuleType, levels: str) -> None:
    rng = np.random.default_rng(list(LEVELS).index(levels))
    for budget, L, K in [
        *((int(rng.integers(1, 130)), int(rng.integers(1, 17)), int(rng.integers(1, 80))) for _ in range(24)),
        *((int(rng.integers(130, 700)), int(rng.integers(1, 17)), int(rng.integers(1, 80))) for _ in range(8)),
        *((b, L, K) for b in (31, 32, 33, 64, 128, 129) for L, K in ((7, 64), (15, 16))),
    ]:
        B = 512 if budget < 130 else 128
        check_trees(cupy, drafts(rng, B, L, K, levels), budget)
    for _ in range(8):  # batches of many small ones
        shape = (int(rng.integers(1, 5)), int(rng.integers(1, 6)))
        check_trees(cupy, drafts(rng, 256, *shape, levels), int(rng.integers(1, 70)))


@pytest.mark.parametrize("levels", LEVELS)
@pytest.mark.parametrize(
    "budget, L, K",
    [
        *((1024, 15, 64), (1024, 15, 1024), (1030, 7, 2000), (4096, 15, 64), (4096, 64, 300), (10_000, 5, 50)),
        *((64, 64, 64), (64, 300, 3), (1024, 200, 5), (3000, 1, 4000), (500, 1000, 1), (5, 51, 2), (200, 50, 200)),
    ],
)
def test_large_trees(cupy: ModuleType, levels: str, budget: int, L: int, K: int) -> None:
    check_trees(cupy, drafts(np.random.default_rng(budget + L), 3, L, K, levels), budget)


@pytest.mark.parametrize("B, L, K", [(0, 3, 4), (2, 0, 4), (1, 0, 128), (2, 3, 0), (0, 0, 0), (2, 3, 4), (2, 60, 4)])
@pytest.mark.parametrize("budget", [0, 1, 64, 129, 2000])
def test_empty_shapes(cupy: ModuleType, B: int, L: int, K: int, budget: int) -> None:
    check_trees(cupy, drafts(np.random.default_rng(0), B, L, K, "eighths"), budget)


def test_a_replayed_graph_builds_from_what_its_inputs_hold_then(cupy: ModuleType) -> None:
    rng = np.random.default_rng(0)
    B, L, V, K, budget = 2, 7, 20_000, 64, 64
    batches = [(rng.standard_normal((B, L, V)) * 3).astype(np.float32) for _ in range(3)]
    logits, roots = cupy.asarray(batches[0]), cupy.asarray(np.array([3, 4], np.int32))
    prefix_lens = cupy.asarray(np.array([10, 20], np.int32))

    def run() -> tuple[Any, ...]:
        log_probs, token_ids = topk_log_probs(logits, K)
        tree = build_tree(log_probs, token_ids, roots, budget=budget)
        large = build_tree(log_probs, token_ids, roots, budget=300)
        return log_probs, token_ids, tree, large, tree_positions(tree.depths, prefix_lens)

    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        run()  # compiles
        stream.synchronize()
        stream.begin_capture()
        log_probs, token_ids, tree, large, positions = run()
        graph = stream.end_capture()
        for batch in batches:
            logits.set(batch)
            graph.launch(stream)
            stream.synchronize()
            assert_right_top_k((log_probs.get(), token_ids.get()), batch, K)
            draft = log_probs.get(), token_ids.get(), roots.get()
            assert_same_bits(tree, numba_cpu.build_tree(*draft, budget=budget))
            assert_same_bits(large, numba_cpu.build_tree(*draft, budget=300))
            np.testing.assert_array_equal(
                positions.get(), reference.tree_positions(tree.depths.get(), np.array([10, 20], np.int32))
            )


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("V, width", [(1, 1), (33, 40), (1000, 1000), (8192, 8192), (8193, 8193), (40_000, 40_008)])
def test_topk_of_grids_and_special_rows(cupy: ModuleType, dtype: Any, V: int, width: int) -> None:
    rng = np.random.default_rng(V)
    logits = (rng.integers(-200, 200, (3, 3, width)) / 8).astype(dtype)
    logits[0, 1] = rng.standard_normal(width).astype(dtype)
    logits[0, 2] = dtype(0.5)
    logits[1, 0, rng.random(width) < 0.5] = np.nan
    logits[1, 1, rng.random(width) < 0.9] = -np.inf
    logits[1, 2, V // 2] = np.inf
    logits[2, 0] = np.nan
    logits[2, 1] = -np.inf
    logits[2, 2] = -np.sort(-rng.standard_normal(width).astype(dtype))
    logits[..., V:] = np.inf
    for K in sorted({1, min(V, 64), min(V, 300), min(V, 1024), min(V, 1025), V}):
        got = tuple(a.get() for a in topk_log_probs(cupy.asarray(logits), K, vocab_size=V))
        assert_right_top_k(got, np.ascontiguousarray(logits[..., :V]), K)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("how", ["spread", "grid", "subnormal", "best in one tile", "best behind one another"])
def test_topk_of_a_whole_vocabulary(cupy: ModuleType, dtype: Any, how: str) -> None:
    rng = np.random.default_rng(5)
    logits = rng.standard_normal((1, 2, 163_840)) * 3
    if how == "grid":
        logits = np.round(logits * 2) / 2
    elif how == "subnormal":
        logits = np.round(logits * 50) * 1e-40
    elif how == "best in one tile":
        logits[..., 50_000:52_000] += 20.0
    elif how == "best behind one another":
        logits[..., 100:2000] = np.linspace(20.0, 40.0, 1900)
    logits = logits.astype(dtype)
    for K in (1, 64, 256, 600, 1024, 2000):
        log_probs, token_ids = (a.get() for a in topk_log_probs(cupy.asarray(logits), K))
        expected, expected_ids = reference.topk_log_probs(logits, K)
        np.testing.assert_array_equal(token_ids, expected_ids)
        values = np.take_along_axis(logits.astype(np.float64), token_ids.astype(np.int64), -1)
        assert_close(log_probs, expected, row=ROW, scale=np.maximum(1.0, np.abs(values)), what=f"K = {K}")


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float32])
def test_topk_of_a_row_is_the_same_whatever_stands_beside_it(cupy: ModuleType, dtype: Any) -> None:
    logits = cupy.asarray((np.random.default_rng(1).standard_normal((40, 1, 50_001)) * 3).astype(dtype))
    together = [a.get() for a in topk_log_probs(logits, 64)]
    for row in (0, 1, 39):
        alone = [a.get() for a in topk_log_probs(logits[row : row + 1], 64)]
        for one, many in zip(alone, together, strict=True):
            assert one.tobytes() == many[row : row + 1].tobytes()
