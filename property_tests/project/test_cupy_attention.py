"""The CUDA C++ attention on a GPU, at the widths and types that its fast version is for, and beside the plain version.

Every cache row that is not in use is NaN, table entries that are not in use lie far outside of the cache, and outputs
and partial results are NaN before the kernels write them.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from ddtree import reference
from ddtree.property_tests.project.on_gpu import gpu_library, poison_outputs
from ddtree.property_tests.tolerances import TOLERANCE
from ddtree.trees import DraftTree, tree_from_parents

TYPES = {"float16": np.float16, "bfloat16": ml_dtypes.bfloat16, "float32": np.float32, "float64": np.float64}
FAR = 2**30
"""A page that no cache has."""


@pytest.fixture
def cp() -> Any:
    return gpu_library("cupy")


@pytest.fixture
def attention(cp: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The launcher, whose outputs and partial results are NaN before they are written."""
    poison_outputs(monkeypatch, ["verify_attention"], 0xFF)
    return importlib.import_module("ddtree.kernels.cupy").verify_attention


@dataclass(frozen=True)
class Case:
    """Arguments on the GPU, and what the host knows of them."""

    q: Any
    kv_cache: Any
    page_table: Any
    prefix_lens: Any
    tree: DraftTree
    scale: float
    kv_lora_rank: int
    prefixes: tuple[int, ...]
    counts: tuple[int, ...]
    table: Any
    sees: Any

    def run(self, attention: Any, **options: Any) -> Any:
        arrays = (self.q, self.kv_cache, self.page_table, self.prefix_lens, self.tree)
        return attention(*arrays, scale=self.scale, kv_lora_rank=self.kv_lora_rank, **options)


def make(
    cp: Any,
    *,
    prefixes: tuple[int, ...] = (300, 1, 0),
    counts: tuple[int, ...] | None = None,
    N: int = 13,
    H: int = 8,
    widths: tuple[int, int] = (512, 64),
    page_size: int | None = 16,
    dtype: str = "bfloat16",
    size: float = 1.0,
    scale: float | None = None,
    seed: int = 0,
) -> Case:
    """Random trees; the last request has unused slots if ``counts`` does not say otherwise."""
    rng, draw = np.random.default_rng(seed), cp.random.default_rng(seed)
    B, (C, R), kind = len(prefixes), widths, TYPES[dtype]
    counts = (N,) * (B - 1) + (max(N - 3, 1),) if counts is None else counts
    rows = np.array(prefixes) + np.array(counts)
    S = int(rows.max()) if page_size is None else page_size
    needed = -(-rows // S)
    pages = rng.permutation(int(needed.sum()) + 2).astype(np.int32)
    table = np.full((B, int(needed.max()) + 2), FAR, np.int32)
    cache = cp.full((len(pages), S, C + R), np.nan, kind)
    for b in range(B):
        table[b, : needed[b]], pages = pages[: needed[b]], pages[needed[b] :]
        at = np.arange(rows[b])
        places = cp.asarray(table[b, at // S].astype(np.int64) * S + at % S)
        cache.reshape(-1, C + R)[places] = draw.standard_normal((len(at), C + R), np.float32).astype(kind)
    q = (size * draw.standard_normal((B, N, H, C + R), np.float32)).astype(kind)
    q[cp.asarray(np.arange(N) >= np.array(counts)[:, None])] = np.nan
    parents = np.array([[-1] + [int(rng.integers(i)) for i in range(1, N)] for _ in range(B)], np.int32)
    tree = tree_from_parents(np.zeros((B, N), np.int32), parents, np.maximum(counts, 1).astype(np.int32))
    arrays = {f.name: getattr(tree, f.name) for f in dataclasses.fields(tree)}
    arrays["node_counts"] = np.array(counts, np.int32)  # of a request without a root: 0
    on_gpu = DraftTree(**{k: cp.asarray(v) if isinstance(v, np.ndarray) else v for k, v in arrays.items()})
    return Case(
        *(q, cache, cp.asarray(table), cp.asarray(np.array(prefixes, np.int32)), on_gpu),
        *((C + R) ** -0.5 if scale is None else scale, C, prefixes, counts, table, tree.visibility),
    )


def on_host(cp: Any, case: Case, attention: Any) -> Any:
    """The result of a function of NumPy arrays."""
    arrays = {f.name: getattr(case.tree, f.name) for f in dataclasses.fields(case.tree)}
    tree = DraftTree(**{k: v if isinstance(v, int) else cp.asnumpy(v) for k, v in arrays.items()})
    q, kv_cache, page_table, prefix_lens = map(cp.asnumpy, (case.q, case.kv_cache, case.page_table, case.prefix_lens))
    with np.errstate(invalid="ignore"):
        return attention(q, kv_cache, page_table, prefix_lens, tree, scale=case.scale, kv_lora_rank=case.kv_lora_rank)


def dense(cp: Any, case: Case, b: int, compute: Any, weight_type: Any = None, order: int | None = None) -> Any:
    """The formula for one request, (nodes · heads, C), over sums in some order."""
    rows, S, C = np.arange(case.prefixes[b] + case.counts[b]), case.kv_cache.shape[1], case.kv_lora_rank
    D = case.q.shape[-1]
    places = cp.asarray(case.table[b, rows // S].astype(np.int64) * S + rows % S)
    keys = case.kv_cache.reshape(-1, D)[places].astype(compute)
    q = case.q[b, : case.counts[b]].astype(compute)  # (n, H, D)
    mask = np.ones((case.counts[b], len(rows)), bool)
    mask[:, case.prefixes[b] :] = case.sees[b, : case.counts[b], : case.counts[b]]
    columns = slice(None) if order is None else cp.asarray(np.random.default_rng(order).permutation(D))
    scores = q[..., columns].reshape(-1, D) @ keys[:, columns].T * compute(case.scale)
    scores = cp.where(cp.repeat(cp.asarray(mask), q.shape[1], 0), scores, -np.inf)
    weights = cp.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    if weight_type is not None:
        weights = weights.astype(weight_type).astype(compute)
    return weights @ keys[:, :C]


def worst(cp: Any, out: Any, exact: Any) -> float:
    """The greatest relative error of a row."""
    errors = cp.linalg.norm(out.astype(np.float64) - exact, axis=-1) / cp.linalg.norm(exact, axis=-1)
    return float(errors.max())


def check(cp: Any, case: Case, out: Any) -> None:
    """Within the table's bound of the exact result, and zero where no node is."""
    __tracebackhide__ = True
    dtype, C = str(case.q.dtype), case.kv_lora_rank
    assert out.dtype == case.q.dtype
    assert out.shape == (*case.q.shape[:3], C)
    error = plain = 0.0
    low = TYPES[dtype] if dtype in ("float16", "bfloat16") else None
    for b, n in enumerate(case.counts):
        assert not out[b, n:].astype(np.float32).any(), "unused slots"
        if n == 0:
            continue
        exact = dense(cp, case, b, np.float64)
        error = max(error, worst(cp, out[b, :n].reshape(-1, C), exact))
        for order in range(0 if dtype == "float64" else 2):
            rounded = dense(cp, case, b, np.float32, low, order).astype(case.q.dtype)
            plain = max(plain, worst(cp, rounded, exact))
    allowed = TOLERANCE["verify_attention", dtype].bound * (1.0 if dtype == "float64" else plain)
    if dtype == "float32":
        allowed = max(allowed, TOLERANCE["verify_attention", "small cases"].bound)
    assert error <= allowed, f"the worst row is off by {error:.3g}, {allowed:.3g} is allowed"


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("page_size", [1, 3, 16, 64, None])
def test_page_size_does_not_matter(cp: Any, attention: Any, page_size: int | None, dtype: str) -> None:
    case = make(cp, page_size=page_size, dtype=dtype, prefixes=(700, 31, 0), seed=1)
    for version in (2, 3):
        check(cp, case, case.run(attention, version=version))


@pytest.mark.parametrize("N", [1, 13, 33, 64, 200])
@pytest.mark.parametrize("H", [1, 5, 8, 16, 64, 128])
def test_any_number_of_nodes_and_heads(cp: Any, attention: Any, N: int, H: int) -> None:
    case = make(cp, N=N, H=H, prefixes=(200, 17), seed=N + H)
    check(cp, case, case.run(attention))
    check(cp, case, case.run(attention, version=3))


@pytest.mark.parametrize(
    "prefixes, counts, N, H",
    [
        ((0,), (1,), 1, 1),
        ((30_000, 100), (64, 64), 64, 8),
        ((100, 30_000, 0, 1, 15, 16, 17), (13, 1, 13, 2, 13, 0, 5), 13, 8),
        ((2000,) * 40, (33,) * 39 + (1,), 33, 8),  # more row tiles than processors
        ((9, 12_000) + (50,) * 38, (64,) * 40, 64, 8),
        ((16, 15, 17, 5000), (4097, 4096, 1, 4097), 4097, 1),
        ((500,) * 70, (0,) * 69 + (3,), 3, 8),
    ],
)
def test_ragged_batches(cp: Any, attention: Any, prefixes: Any, counts: Any, N: int, H: int) -> None:
    case = make(cp, prefixes=prefixes, counts=counts, N=N, H=H, seed=2)
    check(cp, case, case.run(attention))
    check(cp, case, case.run(attention, version=3))


@pytest.mark.parametrize("version", [1, 2, 3])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize(
    "options",
    [{"size": 16.0}, {"size": 16.0, "prefixes": (9000, 3)}, {"prefixes": (20_000,)}, {"scale": -0.1}, {"scale": 0.0}],
    ids=str,
)
def test_large_queries_long_contexts_and_any_scale(
    cp: Any, attention: Any, options: dict[str, Any], dtype: str, version: int
) -> None:
    case = make(cp, N=16, dtype=dtype, seed=3, **options)
    check(cp, case, case.run(attention, version=version))


@pytest.mark.parametrize("widths", [(512, 64), (32, 16), (64, 32), (48, 16), (20, 6), (600, 1), (1, 1), (256, 64)])
@pytest.mark.parametrize("dtype", TYPES)
def test_any_width_and_type(cp: Any, attention: Any, widths: tuple[int, int], dtype: str) -> None:
    case = make(cp, widths=widths, dtype=dtype, page_size=5, prefixes=(400, 0, 40), seed=4)
    check(cp, case, case.run(attention))
    check(cp, case, case.run(attention, version=1))


@pytest.mark.parametrize("size", [1e-6, 1e6, 1e30])
def test_latents_beyond_float16_survive_the_merge(cp: Any, attention: Any, size: float) -> None:
    case = make(cp, prefixes=(3000,), seed=5)
    # The rotated part alone decides the scores, so that they stay small.
    case.q[..., :512], case.kv_cache[..., :512] = 0, case.kv_cache[..., :512] * size
    for version in (2, 3):
        check(cp, case, case.run(attention, version=version))


@pytest.mark.parametrize("value", [-3e38, -np.inf])
def test_scores_that_overflow_weigh_nothing_beside_a_finite_one(cp: Any, attention: Any, value: float) -> None:
    case = make(cp, prefixes=(3000,), N=1, H=1, seed=6, scale=1.0)
    case.q[...] = 0
    case.q[..., 512] = 2
    case.kv_cache[...] = 1
    case.kv_cache[..., 512] = value
    last = case.prefixes[0]
    case.kv_cache[case.table[0, last // 16], last % 16, 512] = 0
    for version in (1, 2, 3):
        out = case.run(attention, version=version).astype(np.float32)
        assert (out == 1).all()


@pytest.mark.parametrize("prefix", [0, 20, 3000])
def test_where_all_scores_are_minus_infinity_the_result_is_nan(cp: Any, attention: Any, prefix: int) -> None:
    case = make(cp, prefixes=(prefix, 5), counts=(1, 1), N=1, H=3, seed=6, scale=1.0)
    case.q[0], case.q[..., 512] = 0, 4
    case.kv_cache[...] = 1
    case.kv_cache[case.table[0, : prefix // 16 + 1], :, 512] = -3e38
    with np.errstate(over="ignore"):
        wanted = on_host(cp, case, reference.verify_attention)
    assert np.isnan(wanted[0].astype(np.float32)).all()
    for version in (1, 2, 3):
        out = cp.asnumpy(case.run(attention, version=version)).astype(np.float32)
        assert np.isnan(out[0]).all(), version
        assert np.isfinite(out[1]).all(), version


@pytest.mark.parametrize("version", [1, 2, 3])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("column", [0, 200, 511, 575, slice(None)], ids=str)
def test_a_key_that_is_not_finite_reaches_those_that_see_it(
    cp: Any, attention: Any, column: Any, value: float, dtype: str, version: int
) -> None:
    # Prefixes that put the nodes in one, two and three tiles of keys, and in the middle of a request's shares.
    prefixes = (700, 16, 0, 15, 300)
    case = make(cp, prefixes=prefixes, N=37, H=2, dtype=dtype, page_size=7, seed=10)
    before = cp.asnumpy(case.run(attention, version=version))
    sees = np.zeros(before.shape[:2], bool)
    for b, n in enumerate(case.counts):
        # Node 5 and the last: each has siblings, and the last is seen by itself alone.
        for node in (5, n - 1):
            row = prefixes[b] + node
            case.kv_cache[case.table[b, row // 7], row % 7, column] = value
            sees[b, :n] |= case.sees[b, :n, node]
    out = cp.asnumpy(case.run(attention, version=version))
    same = out.view(np.uint16) == before.view(np.uint16)
    assert same[~sees].all(), "nodes that do not see it"
    wanted = on_host(cp, case, reference.verify_attention)
    np.testing.assert_array_equal(np.isnan(out), np.isnan(wanted))
    assert np.isnan(wanted[sees]).any()
    finite = ~np.isnan(wanted)
    np.testing.assert_allclose(out[finite].astype(np.float32), wanted[finite].astype(np.float32), rtol=0, atol=0.02)


@pytest.mark.parametrize("version", [2, 3])
@pytest.mark.parametrize("prefixes", [(8192,), (3000, 10, 0, 700)])
def test_repeated_runs_are_equal_bit_for_bit(cp: Any, attention: Any, prefixes: tuple[int, ...], version: int) -> None:
    case = make(cp, prefixes=prefixes, N=40, seed=7)
    first = case.run(attention, version=version).view(np.uint16)
    for _ in range(100):
        out = cp.full(first.shape, np.nan, case.q.dtype)
        assert case.run(attention, out=out, version=version) is out
        assert (out.view(np.uint16) == first).all()


@pytest.mark.parametrize("version", [1, 2, 3])
def test_a_graph_replays_it_for_new_lengths(cp: Any, attention: Any, version: int) -> None:
    long, short = (
        make(cp, prefixes=(4000, 9), counts=(13, 13), seed=8),
        make(cp, prefixes=(4000, 9), counts=(2, 13), seed=8),
    )
    out = cp.full((*long.q.shape[:3], 512), np.nan, long.q.dtype)
    run = functools.partial(long.run, attention, out=out, version=version)
    run()  # compiles
    stream = cp.cuda.Stream(non_blocking=True)
    with stream:
        stream.begin_capture()
        run()
        graph = stream.end_capture()
        out.fill(np.nan)
        graph.launch(stream)
        stream.synchronize()
        check(cp, long, out)
        # The same arrays hold other lengths and another tree.
        long.prefix_lens[0], long.tree.node_counts[0] = 100, 2
        long.tree.visibility_words[...] = short.tree.visibility_words
        out.fill(np.nan)
        graph.launch(stream)
        stream.synchronize()
    now = dataclasses.replace(long, prefixes=(100, 9), counts=short.counts, sees=short.sees)
    check(cp, now, out)


def test_the_reference_agrees_on_a_small_case(cp: Any, attention: Any) -> None:
    case = make(cp, prefixes=(20, 3), N=5, H=2, dtype="float32", widths=(8, 4), page_size=7)
    wanted = on_host(cp, case, reference.verify_attention)
    np.testing.assert_allclose(cp.asnumpy(case.run(attention)), wanted, rtol=0, atol=1e-5)


@pytest.mark.large
def test_offsets_of_a_cache_of_more_than_four_billion_elements(cp: Any, attention: Any) -> None:
    pages = 2**32 // (64 * 576) + 70
    try:
        cache = cp.full((pages, 64, 576), np.nan, ml_dtypes.bfloat16)
    except cp.cuda.memory.OutOfMemoryError:
        pytest.skip("not enough memory")
    case = make(cp, prefixes=(4000,), page_size=64, seed=9)
    table = case.table.copy()
    used = np.flatnonzero(table[0] != FAR)
    table[0, used] = pages - 1 - np.arange(len(used))
    cache[cp.asarray(table[0, used])] = case.kv_cache[cp.asarray(case.table[0, used])]
    moved = dataclasses.replace(case, kv_cache=cache, page_table=cp.asarray(table), table=table)
    expected = case.run(attention).view(np.uint16)
    for version in (1, 2, 3):
        got = moved.run(attention, version=version).view(np.uint16)
        assert version != 2 or (got == expected).all()
        check(cp, moved, got.view(case.q.dtype))
