"""On a GPU: the CUDA C++ kernels of a model's layers against the references in float64, over shapes and types."""

import importlib
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from ddtree import reference
from ddtree.model import layers
from ddtree.property_tests.compare import assert_close, assert_same
from ddtree.property_tests.project.on_gpu import gpu_library, poison_outputs
from ddtree.trees import chain_tree

kernels: Any = importlib.import_module("ddtree.kernels.cupy")
FLOATS = {
    "float16": np.float16,
    "bfloat16": ml_dtypes.bfloat16,
    "float32": np.float32,
    "float64": np.float64,
}
DTYPES = pytest.mark.parametrize("dtype", FLOATS)
ALLOCATING = ("linear", "moe_experts", "rms_norm", "route_experts")


@pytest.fixture
def cp(monkeypatch):
    """CuPy, with every array that a launcher makes full of poison: NaN in every floating type."""
    poison_outputs(monkeypatch, ALLOCATING, 0xFF)
    return gpu_library("cupy")


def normal(rng, dtype, *shape, size=1.0):
    """Numbers of a type, and the same numbers in float64."""
    narrow = (size * rng.standard_normal(shape)).astype(FLOATS[dtype])
    return narrow, narrow.astype(np.float64)


def assert_layer(got, expected, dtype, scale):
    """Of that type, and as near as the table says."""
    assert str(got.dtype) == dtype
    assert_close(got.get().astype(np.float64), expected, row=("layers", dtype), scale=scale)


def beside(cp, array, dtype):
    """The same matrix on the GPU, as some of the columns of a wider one."""
    wide = cp.full((len(array), array.shape[1] + 16), np.nan, FLOATS[dtype])
    wide[:, 8:-8] = cp.asarray(array)
    return wide[:, 8:-8]


SHAPES = [
    *((M, 200, 130) for M in (0, 1, 2, 7, 8, 9, 16, 17, 32, 33, 64, 65, 200, 256)),
    *((5, D, 70) for D in (1, 3, 8, 16, 63, 64, 65, 72, 128, 264, 576, 1000, 2048)),
    *((M, 2304, 200) for M in (3, 30, 65, 150)),
    *((9, 320, outputs) for outputs in (1, 2, 15, 31, 32, 33, 63, 64, 65, 576)),
]


@DTYPES
def test_linear(cp, dtype):
    rng = np.random.default_rng(1)
    for M, D, outputs in SHAPES:
        (x, wide), (weight, wide_weight) = normal(rng, dtype, M, D), normal(rng, dtype, outputs, D)
        terms = np.abs(wide) @ np.abs(wide_weight).T
        for sent in (cp.asarray(x), beside(cp, x, dtype)):
            assert_layer(kernels.linear(sent, cp.asarray(weight)), wide @ wide_weight.T, dtype, terms)


def swiglu_terms(x, gate_up, down):
    gate, up = np.split(np.abs(x) @ np.abs(gate_up).T, 2, axis=-1)
    return (gate * up) @ np.abs(down).T


@DTYPES
def test_swiglu(cp, dtype):
    rng = np.random.default_rng(2)
    for M, D, inner in SHAPES:
        sent, wide = zip(
            normal(rng, dtype, M, D, size=rng.choice([0.1, 1.0, 5.0])),
            normal(rng, dtype, 2 * inner, D, size=D**-0.5),
            normal(rng, dtype, D, inner, size=inner**-0.5),
            strict=True,
        )
        got = kernels.swiglu(*map(cp.asarray, sent))
        assert_layer(got, layers.swiglu(*wide), dtype, swiglu_terms(*wide))


@DTYPES
def test_swiglu_of_the_reference_itself(cp, dtype):
    rng = np.random.default_rng(3)
    sent, wide = zip(*(normal(rng, dtype, *shape) for shape in ((3, 24), (48, 24), (24, 24))), strict=True)
    assert_layer(kernels.swiglu(*map(cp.asarray, sent)), reference.swiglu(*wide), dtype, swiglu_terms(*wide))


@DTYPES
@pytest.mark.parametrize("D", [64, 60, 2304])
def test_a_row_has_the_same_bits_whatever_else_is_in_the_batch(cp, dtype, D):
    rng = np.random.default_rng(4)
    (x, _), (weight, _) = normal(rng, dtype, 70, D), normal(rng, dtype, 96, D)
    x, weight = cp.asarray(x), cp.asarray(weight)
    together = kernels.linear(x, weight).get()
    for rows in (slice(0, 1), slice(3, 9), slice(10, 30), slice(69, 70)):
        assert_same(kernels.linear(x[rows], weight).get(), together[rows])


@DTYPES
def test_rms_norm(cp, dtype):
    rng = np.random.default_rng(5)
    for shape in ((0, 8), (1, 1), (3, 7), (2, 3, 64), (5, 1000), (4, 7168)):
        for size in (1e-2, 1.0, 30.0):
            (x, wide), (weight, wide_weight) = normal(rng, dtype, *shape, size=size), normal(rng, dtype, shape[-1])
            expected = reference.rms_norm(wide, wide_weight, eps=1e-6)
            scale = shape[-1] ** 0.5 * np.abs(wide_weight)
            assert_layer(kernels.rms_norm(cp.asarray(x), cp.asarray(weight), eps=1e-6), expected, dtype, scale)
            if x.ndim == 2:
                got = kernels.rms_norm(beside(cp, x, dtype), cp.asarray(weight), eps=1e-6)
                assert_layer(got, expected, dtype, scale)


@DTYPES
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(
    "shape", [(2, 5, 3, 4, 6, 8), (1, 1, 1, 0, 1, 2), (3, 9, 16, 128, 512, 64), (2, 0, 1, 1, 1, 2)]
)
def test_rope_and_rows_of_the_cache(cp, dtype, interleaved, shape):
    rng = np.random.default_rng(6)
    B, N, H, P, C, R = shape
    S, attention_factor = 4, 1.3
    (queries, wide_queries), (latents, wide_latents) = normal(rng, dtype, B, N, H, P + R), normal(rng, dtype, B, N, C)
    keys, wide_keys = normal(rng, dtype, B, N, R)
    q, wide_q = normal(rng, dtype, B, N, H, C + R)
    prefix_lens = rng.integers(0, 100_000, B).astype(np.int32)
    first_page = prefix_lens // S
    page_table = np.full((B, 100_000 // S + N + 2), -1, np.int32)
    pages = rng.permutation(B * (N // S + 2)).astype(np.int32).reshape(B, -1)
    for b in range(B):
        page_table[b, first_page[b] : first_page[b] + pages.shape[1]] = pages[b]
    cache, wide_cache = normal(rng, dtype, max(pages.size, 1), S, C + R)
    tree = chain_tree(np.zeros((B, max(N, 1)), int), rng.integers(1, max(N, 1) + 1, B))
    frequencies = reference.rope_frequencies(R, 1e4)

    def rotate(x, position):
        cos, sin = reference.rope_cos_sin(np.array(position), frequencies, attention_factor)
        if interleaved:
            return reference.deinterleave(reference.rotate_pairs(x, cos, sin))
        return reference.rotate_halves(x, cos, sin)

    for b in range(B):
        for i in range(N):
            if i >= tree.node_counts[b]:
                wide_q[b, i, :, C:] = 0
                continue
            row, position = int(prefix_lens[b]) + i, int(prefix_lens[b] + tree.depths[b, i])
            wide_q[b, i, :, C:] = [rotate(query, position) for query in wide_queries[b, i, :, P:]]
            place = wide_cache[page_table[b, row // S], row % S]
            place[:C], place[C:] = wide_latents[b, i], rotate(wide_keys[b, i], position)

    sent_q, sent_cache = cp.asarray(q), cp.asarray(cache)
    compressed = cp.full((B, N, C + R), np.nan, FLOATS[dtype])
    compressed[..., C:] = cp.asarray(keys)
    kernels.rope(
        *(sent_q, sent_cache, cp.asarray(queries), cp.asarray(latents), compressed[..., C:]),
        *(cp.asarray(page_table), cp.asarray(prefix_lens)),
        type(tree)(*(cp.asarray(v) if isinstance(v, np.ndarray) else v for v in vars(tree).values())),
        frequencies=cp.asarray(frequencies),
        attention_factor=attention_factor,
        interleaved=interleaved,
    )
    scale = 10.0  # above every element
    assert_layer(sent_q, wide_q, dtype, scale)
    assert_layer(sent_cache, wide_cache, dtype, scale)


@DTYPES
@pytest.mark.parametrize("groups", [(1, 1), (8, 4), (4, 4), (16, 1)])
@pytest.mark.parametrize("norm_topk_prob", [False, True])
def test_routing(cp, dtype, groups, norm_topk_prob):
    rng = np.random.default_rng(7)
    for M, E, K, kinds in (
        (70, 256, 8, 0),
        (5, 384, 8, 0),
        (40, 64, 4, 3),
        (40, 32, 2, 2),
        (3, 48, 1, 1),
        (0, 16, 1, 1),
    ):
        logits, _ = normal(rng, dtype, M, E)
        if kinds:  # few values, so that ties abound
            logits = logits[:, :1][:, [0] * E] + rng.integers(0, kinds, (M, E)).astype(logits.dtype)
            logits = logits.astype(FLOATS[dtype])
        bias = (rng.integers(-2, 3, E) / 4).astype(FLOATS[dtype]) if kinds else normal(rng, dtype, E)[0]
        settings = {
            "num_experts_per_tok": K,
            "n_group": groups[0],
            "topk_group": groups[1],
            "norm_topk_prob": norm_topk_prob,
            "routed_scaling_factor": 2.5,
        }
        ids, weights = kernels.route_experts(cp.asarray(logits), cp.asarray(bias), **settings)
        expected_ids, expected = reference.route_experts(logits.astype(float), bias.astype(float), **settings)
        assert_same(ids.get(), expected_ids)
        assert_layer(weights, expected, dtype, 2.5)


def moe_terms(x, expert_ids, weights, gate_up, down):
    each = np.stack([swiglu_terms(x, *expert) for expert in zip(gate_up, down, strict=True)], 1)
    chosen = np.take_along_axis(each, expert_ids[:, :, None].astype(np.int64), 1)
    return (np.abs(weights)[:, :, None] * chosen).sum(1)


@DTYPES
def test_moe_experts(cp, dtype):
    """Idle experts, one that has all tokens, one that a token has twice; then each token alone gives the same bits."""
    rng = np.random.default_rng(8)
    cases = [
        (0, 1, 4, 8, 8),
        (1, 1, 1, 8, 8),
        (70, 3, 5, 72, 40),
        (9, 4, 30, 33, 10),
        (40, 2, 2, 128, 64),
        (33, 8, 64, 64, 96),
    ]
    for M, K, E, D, inner in cases:
        (x, wide), (weights, wide_weights) = normal(rng, dtype, M, D), normal(rng, dtype, M, K)
        (gate_up, wide_gate_up), (down, wide_down) = (
            normal(rng, dtype, E, 2 * inner, D, size=D**-0.5),
            normal(rng, dtype, E, D, inner, size=inner**-0.5),
        )
        expert_ids = rng.integers(0, E, (M, K)).astype(np.int32)
        expert_ids[: M // 3] = E - 1
        sent = [cp.asarray(a) for a in (x, expert_ids, weights, gate_up, down)]
        inputs = (wide, expert_ids, wide_weights, wide_gate_up, wide_down)
        got = kernels.moe_experts(*sent)
        assert_layer(got, layers.moe_experts(*inputs), dtype, moe_terms(*inputs))
        for m in range(0, M, 7):
            alone = kernels.moe_experts(*(a[m : m + 1] for a in sent[:3]), *sent[3:])
            assert_same(alone.get(), got[m : m + 1].get())


def test_layers_are_captured_and_replayed(cp):
    rng = np.random.default_rng(9)
    M, D, inner, E, K = 9, 64, 48, 8, 2
    shapes = ((M, D), (D,), (E, D), (E,), (E, 2 * inner, D), (E, D, inner))
    given = [cp.asarray(normal(rng, "bfloat16", *shape, size=0.3)[0]) for shape in shapes]
    settings = {"num_experts_per_tok": K, "n_group": 1, "topk_group": 1, "norm_topk_prob": True}

    def layer():
        x, norm, router, bias, gate_up, down = given
        x = kernels.rms_norm(x, norm, eps=1e-6)
        logits = kernels.linear(x, router)
        ids, weights = kernels.route_experts(logits, bias, routed_scaling_factor=2.5, **settings)
        return kernels.moe_experts(x, ids, weights, gate_up, down), kernels.swiglu(x, gate_up[0], down[0])

    stream = cp.cuda.Stream(non_blocking=True)
    with stream:
        layer()
        stream.synchronize()
        stream.begin_capture()
        results = layer()
        graph = stream.end_capture()
    for _ in range(2):
        given[0].set(normal(rng, "bfloat16", M, D)[0])
        cp.cuda.Device().synchronize()
        graph.launch(stream)
        stream.synchronize()
        for got, expected in zip(results, layer(), strict=True):
            assert_same(got.get(), expected.get())
