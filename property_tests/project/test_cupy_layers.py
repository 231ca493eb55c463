"""On a GPU: the CUDA C++ kernels of a model's layers against the references in float64, over shapes and types."""

import importlib
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from ddtree import reference
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
ALLOCATING = ("cublas", "embed_tokens", "head_linear", "linear", "moe_experts", "rms_norm", "route_experts", "swiglu")


@pytest.fixture
def cp(monkeypatch):
    """CuPy, with every array that a launcher makes full of poison: NaN in every floating type."""
    poison_outputs(monkeypatch, ALLOCATING, 0xFF)
    return gpu_library("cupy")


@pytest.fixture(params=[False, True], ids=["as they are", "as if large"])
def sizes(request, monkeypatch):
    """Matrices are multiplied as their sizes say, or, however small, as very large ones are."""
    if request.param:
        linear = importlib.import_module("ddtree.kernels.cupy.linear")
        monkeypatch.setattr(linear, "LARGE", 0)
        monkeypatch.setattr(linear, "LEAST_STEPS", 1)
        monkeypatch.setattr(importlib.import_module("ddtree.kernels.cupy.moe_experts"), "LONG", 0)


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
    *((M, 200, 130) for M in (0, 1, 2, 3, 5, 8, 9, 16, 33, 65, 73, 128, 129, 300)),
    *((5, D, 70) for D in (1, 3, 8, 16, 63, 64, 65, 72, 128, 264, 576, 1000, 2048, 7168)),
    *((M, 2304, 200) for M in (3, 30, 65, 150)),
    *((9, 320, outputs) for outputs in (1, 2, 15, 31, 32, 33, 63, 64, 65, 576)),
]
LAYER_SHAPES = [
    (7, 2056, 8192),
    (5, 96, 60),
    (1, 256, 100),
    (70, 384, 33),
    (131, 264, 50),
    (9, 61, 7),
    (0, 64, 8),
    (2, 1024, 64),
]
EPS = 1e-5


def normed(x, gain):
    """RMS-normalised in float64; without a gain, x itself."""
    return x if gain is None else reference.rms_norm(x, gain, eps=EPS)


@DTYPES
def test_linear(cp, sizes, dtype):
    rng = np.random.default_rng(1)
    for M, D, outputs in SHAPES:
        (x, wide), (weight, wide_weight) = normal(rng, dtype, M, D), normal(rng, dtype, outputs, D)
        terms = np.abs(wide) @ np.abs(wide_weight).T
        for sent in (cp.asarray(x), beside(cp, x, dtype)):
            assert_layer(kernels.linear(sent, cp.asarray(weight)), wide @ wide_weight.T, dtype, terms)


@DTYPES
@pytest.mark.parametrize("gained", [False, True])
@pytest.mark.parametrize("added", [False, True])
def test_linear_with_norm_residual_and_type(cp, sizes, dtype, gained, added):
    rng = np.random.default_rng(10)
    for M, D, outputs in LAYER_SHAPES:
        result = "float32" if dtype != "float64" and outputs % 2 else dtype
        (x, wide), (weight, wide_weight) = normal(rng, dtype, M, D, size=3.0), normal(rng, dtype, outputs, D)
        gain, wide_gain = normal(rng, dtype, D) if gained else (None, None)
        residual, wide_residual = normal(rng, result, M, outputs, size=9.0) if added else (None, 0.0)
        inputs = normed(wide, wide_gain)
        terms = np.abs(inputs) @ np.abs(wide_weight).T + np.abs(wide_residual)
        got = kernels.linear(
            *(beside(cp, x, dtype), cp.asarray(weight)),
            gain=None if gain is None else cp.asarray(gain),
            eps=EPS,
            residual=None if residual is None else cp.asarray(residual),
            dtype=result,
        )
        assert str(got.dtype) == result
        expected = inputs @ wide_weight.T + wide_residual
        assert_close(got.get().astype(np.float64), expected, row=("layers", dtype), scale=terms)


def test_the_result_is_rounded_once(cp):
    """A residual of 1 and a sum of 1/256 + 1/512 + 2^-16: rounded first, the sum would be lost to a tie."""
    x, weight = cp.zeros((1, 8), FLOATS["bfloat16"]), cp.ones((4, 8), FLOATS["bfloat16"])
    x[0, :3] = cp.asarray(np.array([2.0**-8, 2.0**-9, 2.0**-16]).astype(FLOATS["bfloat16"]))
    exact = kernels.linear(x, weight, dtype="float32").get()
    assert_same(exact, np.full((1, 4), 2.0**-8 + 2.0**-9 + 2.0**-16, np.float32))
    residual = cp.ones((1, 4), FLOATS["bfloat16"])
    assert_same(kernels.linear(x, weight, residual=residual).get(), np.full((1, 4), 1 + 2.0**-7, FLOATS["bfloat16"]))


def test_a_float32_weight_beside_bfloat16(cp):
    """The router's: logits of float32, as near as float32 sums are."""
    rng = np.random.default_rng(11)
    for M, D, outputs in LAYER_SHAPES:
        (x, wide), (gain, wide_gain) = normal(rng, "bfloat16", M, D), normal(rng, "bfloat16", D)
        weight, wide_weight = normal(rng, "float32", outputs, D)
        inputs = normed(wide, wide_gain)
        got = kernels.linear(cp.asarray(x), cp.asarray(weight), gain=cp.asarray(gain), eps=EPS, dtype="float32")
        assert_layer(got, inputs @ wide_weight.T, "float32", np.abs(inputs) @ np.abs(wide_weight).T)
    with pytest.raises(TypeError, match=r"weight must be float32 like x, or float32 beside bfloat16, got float64"):
        kernels.linear(cp.ones((1, 8), np.float32), cp.ones((2, 8), np.float64))


@DTYPES
def test_head_linear(cp, dtype):
    """Rows and heads lie apart, in x and in out, whose other elements are left alone."""
    rng = np.random.default_rng(12)
    for M, H, D, outputs in (
        (1, 8, 32, 64),
        (9, 3, 128, 40),
        (70, 2, 33, 5),
        (140, 3, 64, 24),
        (0, 2, 8, 8),
        (3, 16, 512, 128),
    ):
        (x, wide), (weight, wide_weight) = normal(rng, dtype, M, H, D), normal(rng, dtype, H, outputs, D)
        expected = np.einsum("mhd,hod->mho", wide, wide_weight)
        terms = np.einsum("mhd,hod->mho", np.abs(wide), np.abs(wide_weight))
        assert_layer(kernels.head_linear(cp.asarray(x), cp.asarray(weight)), expected, dtype, terms)
        queries = cp.full((M, H, D + 16), np.nan, FLOATS[dtype])
        queries[..., :D] = cp.asarray(x)
        q = cp.full((M, H, outputs + 8), 7, FLOATS[dtype])
        out = q[..., :outputs]
        assert kernels.head_linear(queries[..., :D], cp.asarray(weight), out=out) is out
        assert_layer(out, expected, dtype, terms)
        assert (q[..., outputs:] == 7).all()
    with pytest.raises(ValueError, match=r"out must have neighbouring elements in its last axis, got strides"):
        kernels.head_linear(cp.ones((1, 2, 8)), cp.ones((2, 4, 8)), out=cp.ones((1, 2, 8))[..., ::2])
    assert kernels.head_linear(cp.ones((3, 0, 8)), cp.ones((0, 4, 8))).shape == (3, 0, 4)


def swiglu_of(x, gate_up, down):
    gate, up = np.split(x @ gate_up.T, 2, axis=-1)
    return (gate / (1 + np.exp(-gate)) * up) @ down.T


def swiglu_terms(x, gate_up, down):
    gate, up = np.split(np.abs(x) @ np.abs(gate_up).T, 2, axis=-1)
    return (gate * up) @ np.abs(down).T


@DTYPES
@pytest.mark.parametrize("whole", [False, True])
def test_swiglu(cp, sizes, dtype, whole):
    """``whole``: with a norm before it and a residual behind."""
    rng = np.random.default_rng(2)
    for M, D, inner in LAYER_SHAPES if whole else SHAPES:
        sent, wide = zip(
            normal(rng, dtype, M, D, size=rng.choice([0.1, 1.0, 5.0])),
            normal(rng, dtype, 2 * inner, D, size=D**-0.5),
            normal(rng, dtype, D, inner, size=inner**-0.5),
            strict=True,
        )
        (gain, wide_gain), (residual, wide_residual) = normal(rng, dtype, D), normal(rng, dtype, M, D)
        more = {"gain": cp.asarray(gain), "eps": EPS, "residual": cp.asarray(residual)} if whole else {}
        inputs = (normed(wide[0], wide_gain if whole else None), *wide[1:])
        expected, terms = swiglu_of(*inputs), swiglu_terms(*inputs)
        if whole:
            expected, terms = expected + wide_residual, terms + np.abs(wide_residual)
        assert_layer(kernels.swiglu(*map(cp.asarray, sent), **more), expected, dtype, terms)


@DTYPES
def test_swiglu_of_the_reference_itself(cp, dtype):
    rng = np.random.default_rng(3)
    sent, wide = zip(*(normal(rng, dtype, *shape) for shape in ((3, 24), (48, 24), (24, 24))), strict=True)
    assert_layer(kernels.swiglu(*map(cp.asarray, sent)), reference.swiglu(*wide), dtype, swiglu_terms(*wide))


@DTYPES
@pytest.mark.parametrize("resident", [1, 1 << 20])
def test_the_size_of_a_tile_does_not_change_a_bit(cp, monkeypatch, dtype, resident):
    """As if a GPU could hold so many threads: tiles of few tokens or of many."""
    rng = np.random.default_rng(14)
    (x, _), (weight, _), (gain, _) = normal(rng, dtype, 128, 264), normal(rng, dtype, 40, 264), normal(rng, dtype, 264)
    x, weight, gain = map(cp.asarray, (x, weight, gain))
    expected = kernels.linear(x, weight, gain=gain, eps=EPS).get()
    monkeypatch.setattr(importlib.import_module("ddtree.kernels.cupy.linear"), "THREADS_AT_ONCE", resident)
    for M in (1, 8, 9, 33, 70, 128):
        assert_same(kernels.linear(x[:M], weight, gain=gain, eps=EPS).get(), expected[:M])


@DTYPES
@pytest.mark.parametrize("D", [64, 60, 61, 96, 384, 1024, 2304])
def test_a_row_has_the_same_bits_whatever_else_is_in_the_batch(cp, sizes, dtype, D):
    rng = np.random.default_rng(4)
    (x, _), (weight, _), (gain, _) = normal(rng, dtype, 128, D), normal(rng, dtype, 96, D), normal(rng, dtype, D)
    down, _ = normal(rng, dtype, D, 48)
    x, weight, gain, down = map(cp.asarray, (x, weight, gain, down))
    heads = weight.reshape(2, 48, D)

    def products(rows):
        yield kernels.linear(rows, weight)
        yield kernels.linear(rows, weight, gain=gain, eps=EPS)
        yield kernels.swiglu(rows, weight, down, gain=gain, eps=EPS, residual=rows)
        yield kernels.head_linear(cp.stack([rows, rows], 1), heads)
        if dtype == "bfloat16":
            yield kernels.linear(rows, weight.astype(np.float32), gain=gain, eps=EPS, dtype="float32")

    rows = range(0, 128, 9)
    alone = [[got.get() for got in products(x[m : m + 1])] for m in rows]
    for M in (2, 3, 5, 8, 9, 17, 32, 33, 65, 72, 73, 128):
        for kind, together in enumerate(products(x[:M])):
            for m in range(0, M, 9):
                assert_same(alone[m // 9][kind], together[m : m + 1].get())


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


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("V, D, M", [(5, 7, 9), (300, 1024, 40), (1, 2, 1), (9, 6, 0), (40, 5000, 3)])
def test_rows_of_an_embedding(cp, dtype, V, D, M):
    rng = np.random.default_rng(8)
    table, _ = normal(rng, dtype, V, D)
    token_ids = rng.integers(-2, V + 2, M).astype(np.int32)
    got = kernels.embed_tokens(cp.asarray(table), cp.asarray(token_ids))
    assert_same(got.get(), reference.embed_tokens(table, token_ids))


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
    (keys, wide_keys), (gain, wide_gain) = normal(rng, dtype, B, N, R), normal(rng, dtype, C, size=0.5)
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
            place[:C] = reference.rms_norm(wide_latents[b, i], wide_gain, eps=EPS)
            place[C:] = rotate(wide_keys[b, i], position)

    sent_q, sent_cache = cp.asarray(q), cp.asarray(cache)
    compressed = cp.full((B, N, 3 + C + R), np.nan, FLOATS[dtype])
    compressed[..., 3 : 3 + C], compressed[..., 3 + C :] = cp.asarray(latents), cp.asarray(keys)
    kernels.rope(
        *(sent_q, sent_cache, cp.asarray(queries), compressed[..., 3 : 3 + C], compressed[..., 3 + C :]),
        *(cp.asarray(page_table), cp.asarray(prefix_lens)),
        type(tree)(*(cp.asarray(v) if isinstance(v, np.ndarray) else v for v in vars(tree).values())),
        gain=cp.asarray(gain),
        eps=EPS,
        frequencies=cp.asarray(frequencies),
        attention_factor=attention_factor,
        interleaved=interleaved,
    )
    scale = 15.0  # above every element
    assert_layer(sent_q, wide_q, dtype, scale)
    assert_layer(sent_cache, wide_cache, dtype, scale)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
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
        if M and M % 5 == 0:  # five trees, of which rows are padding
            counts = np.array([M // 5, 0, 1, M // 5, M // 5 // 2], np.int32)
            real = (np.arange(M // 5) < counts[:, None]).reshape(M, 1)
            logits[~real[:, 0]] = np.nan
            sent = cp.asarray(logits), cp.asarray(bias)
            ids, weights = kernels.route_experts(*sent, node_counts=cp.asarray(counts), **settings)
            assert_same(ids.get(), np.where(real, expected_ids, -1).astype(np.int32))
            assert_layer(weights, np.where(real, expected, 0), dtype, 2.5)
    with pytest.raises(TypeError, match=r"logits must be float32 or float64, got float16: take them by linear"):
        kernels.route_experts(cp.ones((1, 16), np.float16), cp.ones(16, np.float16), **settings)


def moe_of(swiglu, x, expert_ids, weights, gate_up, down, shared):
    """The routed experts' outputs by their weights and the shared ones', each by ``swiglu``: for padding, zeros."""
    y = np.zeros_like(x)
    for m, (ids, own_weights) in enumerate(zip(expert_ids, weights, strict=True)):
        pairs = [(e, w) for e, w in zip(ids, own_weights, strict=True) if e >= 0]
        if ids[0] >= 0:
            pairs += [(e, 1.0) for e in range(len(down) - shared, len(down))]
        for e, w in pairs:
            y[m] += w * swiglu(x[m : m + 1], gate_up[e], down[e])[0]
    return y


MOE_CASES = [
    (0, 1, 4, 8, 8, 0),
    (1, 1, 1, 8, 8, 0),
    (70, 3, 5, 72, 40, 1),
    (9, 4, 30, 33, 10, 2),
    (40, 2, 2, 128, 64, 0),
    (33, 8, 64, 64, 96, 1),
    (8, 4, 33, 256, 128, 1),
    (2, 2, 17, 256, 128, 1),
    (40, 4, 9, 320, 288, 1),
    (150, 2, 4, 64, 32, 2),
    (300, 1, 2, 1024, 8, 1),
]


@DTYPES
@pytest.mark.parametrize("case", MOE_CASES, ids=str)
def test_moe_experts(cp, sizes, dtype, case):
    """Idle experts, one that has most tokens, padding full of NaN; each token alone gives the same bits."""
    rng = np.random.default_rng(8)
    M, K, E, D, inner, shared = case
    (x, wide), (gain, wide_gain), (residual, wide_residual) = (normal(rng, dtype, *s) for s in ((M, D), (D,), (M, D)))
    weights = rng.standard_normal((M, K))
    if dtype != "float64":
        weights = weights.astype(np.float32)
    (gate_up, wide_gate_up), (down, wide_down) = (
        normal(rng, dtype, E, 2 * inner, D, size=D**-0.5),
        normal(rng, dtype, E, D, inner, size=inner**-0.5),
    )
    expert_ids = rng.integers(0, E - shared, (M, K)).astype(np.int32)
    expert_ids[: M // 3] = E - shared - 1
    padding = np.arange(M) % 7 == 3
    expert_ids[padding], weights[padding], x[padding] = -1, 0, np.nan
    wide[padding] = 0
    if K > 1:
        expert_ids[::5, -1] = -1
    sent = [cp.asarray(a) for a in (x, expert_ids, weights, gate_up, down)]
    for whole in (False, True):
        more = {"gain": cp.asarray(gain), "eps": EPS} if whole else {}
        behind = cp.asarray(residual) if whole else None
        inputs = (normed(wide, wide_gain if whole else None), expert_ids)
        matrices = (wide_gate_up, wide_down, shared)
        got = kernels.moe_experts(*sent, shared=shared, residual=behind, **more)
        expected, terms = (
            moe_of(swiglu_of, *inputs, weights, *matrices),
            moe_of(swiglu_terms, np.abs(inputs[0]), expert_ids, np.abs(weights), *matrices),
        )
        if whole:
            expected, terms = expected + wide_residual, terms + np.abs(wide_residual)
        assert_layer(got, expected, dtype, terms)
        for m in range(0, M, 7):
            alone = kernels.moe_experts(
                *(a[m : m + 1] for a in sent[:3]),
                *sent[3:],
                shared=shared,
                residual=None if behind is None else behind[m : m + 1],
                **more,
            )
            assert_same(alone.get(), got[m : m + 1].get())


@DTYPES
@pytest.mark.parametrize("M", [1, 5, 40])
def test_rows_that_begin_anywhere_are_multiplied_as_those_that_are_aligned(cp, sizes, dtype, M):
    rng = np.random.default_rng(12)
    x, _ = normal(rng, dtype, M, 64)
    room = cp.zeros(M * 64 + 1, FLOATS[dtype])
    apart = room[1:].reshape(M, 64)
    apart[...] = cp.asarray(x)
    assert apart.flags.c_contiguous
    assert apart.data.ptr % 16
    (weight, _), (gate_up, _) = normal(rng, dtype, 40, 64), normal(rng, dtype, 3, 80, 64)
    down, _ = normal(rng, dtype, 3, 64, 40)
    expert_ids = cp.asarray(rng.integers(0, 3, (M, 2)).astype(np.int32))
    weights = cp.ones((M, 2), np.float64 if dtype == "float64" else np.float32)
    weight, gate_up, down = (cp.asarray(a) for a in (weight, gate_up, down))
    for run in (
        lambda x: kernels.linear(x, weight),
        lambda x: kernels.swiglu(x, gate_up[0], down[0]),
        lambda x: kernels.moe_experts(x, expert_ids, weights, gate_up, down),
    ):
        assert_same(run(apart).get(), run(cp.asarray(x)).get())


def test_nan_logits_choose_experts_that_there_are(cp):
    for dtype in (np.float32, np.float64):
        logits = cp.full((2, 32), np.nan, dtype)
        logits.view(np.uint8)[1] = 0xFF
        settings = {"n_group": 1, "topk_group": 1, "norm_topk_prob": True, "routed_scaling_factor": 1.0}
        ids, _ = kernels.route_experts(logits, cp.zeros(32, dtype), num_experts_per_tok=3, **settings)
        assert ids.get().tolist() == [[0, 1, 2], [0, 1, 2]]


def capturable_layer(cp, dtype, M):
    """A layer of every function here on M rows, as a function of x, and x."""
    rng = np.random.default_rng(9)
    D, inner, E, K, H, P, C, R = 64, 48, 8, 2, 2, 16, 24, 8
    shapes = (
        (D,),
        (E + 1, 2 * inner, D),
        (E + 1, D, inner),
        (H * (P + R) + C + R, D),
        (H, C, P),
        (D, H * (C + R)),
        (C,),
    )
    norm, gate_up, down, project, key_up, back, latent_norm = (
        cp.asarray(normal(rng, dtype, *shape, size=0.3)[0]) for shape in shapes
    )
    kept = "float64" if dtype == "float64" else "float32"
    router, bias = (cp.asarray(normal(rng, kept, *shape)[0]) for shape in ((E, D), (E,)))
    settings = {"num_experts_per_tok": K, "n_group": 1, "topk_group": 1, "norm_topk_prob": True}
    tree = chain_tree(np.zeros((1, M), int), np.array([M]))
    tree = type(tree)(*(cp.asarray(v) if isinstance(v, np.ndarray) else v for v in vars(tree).values()))
    table, prefix_lens = cp.zeros((1, 1), np.int32), cp.zeros(1, np.int32)
    frequencies = cp.asarray(reference.rope_frequencies(R, 1e4))

    def layer(x):
        projected = kernels.linear(x, project, gain=norm, eps=EPS)
        queries = projected[:, : H * (P + R)].reshape(M, H, P + R)
        latents, keys = projected[None, :, H * (P + R) : -R], projected[None, :, -R:]
        q, cache = cp.empty((1, M, H, C + R), x.dtype), cp.empty((1, M, C + R), x.dtype)
        kernels.head_linear(queries[..., :P], key_up, out=q[0, ..., :C])
        kernels.rope(
            *(q, cache, queries[None], latents, keys, table, prefix_lens, tree),
            gain=latent_norm,
            eps=EPS,
            frequencies=frequencies,
        )
        h = kernels.linear(q.reshape(M, -1), back, residual=x)
        logits = kernels.linear(h, router, gain=norm, eps=EPS, dtype=kept)
        ids, weights = kernels.route_experts(logits, bias, routed_scaling_factor=2.5, **settings)
        more = {"gain": norm, "eps": EPS, "residual": h}
        y = kernels.moe_experts(h, ids, weights, gate_up, down, shared=1, **more)
        return cache, y, kernels.swiglu(y, gate_up[0], down[0], **more), kernels.rms_norm(y, norm, eps=EPS)

    return layer, cp.asarray(normal(rng, dtype, M, D)[0])


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float64"])
@pytest.mark.parametrize("M", [1, 9, 65, 130])
def test_layers_are_captured_and_replayed(cp, dtype, M):
    layer, x = capturable_layer(cp, dtype, M)
    stream = cp.cuda.Stream(non_blocking=True)
    cp.cuda.Device().synchronize()  # the inputs were made on another stream
    with stream:
        layer(x)
        stream.synchronize()
        stream.begin_capture()
        results = layer(x)
        graph = stream.end_capture()
    for seed in range(2):
        x.set(normal(np.random.default_rng(seed), dtype, *x.shape)[0])
        cp.cuda.Device().synchronize()
        graph.launch(stream)
        stream.synchronize()
        for got, expected in zip(results, layer(x), strict=True):
            assert not np.isnan(expected.get().astype(np.float64)).any()
            assert_same(got.get(), expected.get())
