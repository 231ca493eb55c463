"""The model's layers against the references, and both against small cases worked by hand."""

import inspect
import math
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis.extra.numpy import arrays

from ddtree import reference
from ddtree.model import layers
from ddtree.model.config import Yarn
from ddtree.property_tests.compare import assert_close, assert_same
from ddtree.property_tests.strategies import draft_trees, paged_caches
from ddtree.reference.rope import rope as rope_of_reference

SEEDS = st.integers(0, 2**32 - 1)
DTYPES = pytest.mark.parametrize("dtype", ["float64", "float32"])
SIZES = st.integers(1, 9)


def normal(seed, *shape):
    return np.random.default_rng(seed).standard_normal(shape)


def in_dtype(dtype, *inputs):
    """The inputs in ``dtype`` and, rounded like them, in float64: a layer's and its reference's."""
    narrow = [x.astype(dtype) if x.dtype == np.float64 else x for x in inputs]
    return narrow, [x.astype(np.float64) if x.dtype == np.float32 else x for x in narrow]


def assert_layer(name, *inputs, dtype, terms, **settings):
    """The layer called ``name`` gives its inputs' type, and what the reference gives in float64.

    ``terms`` makes, from the inputs, the sum of the sizes of the terms of each result: what rounding is relative to.
    """
    narrow, wide = in_dtype(dtype, *inputs)
    expected = getattr(reference, name)(*wide, **settings)
    assert_close(getattr(layers, name)(*narrow, **settings), expected, row=("layers", dtype), scale=terms(*wide))


def swiglu_terms(x, gate_up, down):
    gate, up = np.split(np.abs(x) @ np.abs(gate_up).T, 2, axis=-1)
    return (gate * up) @ np.abs(down).T


@given(seed=SEEDS, tokens=st.lists(st.integers(-3, 12), max_size=9), V=st.integers(1, 10), width=SIZES)
def test_rows_of_an_embedding(seed, tokens, V, width):
    table, token_ids = normal(seed, V, width), np.array(tokens, np.int32)
    expected = reference.embed_tokens(table, token_ids)
    assert_same(layers.embed_tokens(table, token_ids), expected)
    assert expected[:, 0].tolist() == [table[t if 0 <= t < V else 0, 0] for t in tokens]


@DTYPES
@given(seed=SEEDS, rows=st.integers(0, 4), width=SIZES, size=st.sampled_from([1e-3, 1.0, 1e3]))
def test_rms_norm(dtype, seed, rows, width, size):
    x, weight = size * normal(seed, rows, 2, width), normal(seed + 1, width)
    # no element of a normalised row is above the root of its width
    assert_layer("rms_norm", x, weight, dtype=dtype, terms=lambda x, weight: width**0.5 * np.abs(weight), eps=1e-6)


def test_rms_norm_by_hand():
    # the root of (9 + 16 + 0 + 0) / 4 + 0 is 2.5; a row of zeros stays 0 by eps alone
    x, weight = np.array([[3.0, 4.0, 0.0, 0.0], [0.0] * 4]), np.array([1.0, 2.0, 1.0, 1.0])
    expected = np.array([[1.2, 3.2, 0.0, 0.0], [0.0] * 4])
    for rms_norm in (layers.rms_norm, reference.rms_norm):
        assert_close(rms_norm(x, weight, eps=1e-30), expected, row=("layers", "float64"))


@given(
    half=st.integers(1, 16),
    theta=st.sampled_from([100.0, 10_000.0, 50_000.0]),
    factor=st.sampled_from([1.0, 4.0, 32.0]),
    original=st.sampled_from([16, 64, 4096]),
    betas=st.sampled_from([(32.0, 1.0), (1.0, 1.0), (4.0, 0.5)]),
    truncate=st.booleans(),
)
def test_rope_frequencies(half, theta, factor, original, betas, truncate):
    settings = {
        "factor": factor,
        "original_max_position_embeddings": original,
        "beta_fast": betas[0],
        "beta_slow": betas[1],
        "truncate": truncate,
    }
    expected = reference.rope_frequencies(2 * half, theta, **settings)
    assert_close(layers.rope_frequencies(2 * half, theta, **settings), expected, row=("layers", "float64"))


def test_yarn_frequencies_by_hand():
    """The pair that turns often is kept, the one that turns seldom slowed by the factor, the one between by half."""
    # R = 6, theta = 1000: plain frequencies 1, 0.1, 0.01. A pair of index d turns 1000^(-d/3) · 2000π / 2π times
    # within 2000π positions: 1000 times at d = 0 and 10 times at d = 2.
    settings: dict[str, Any] = {
        "factor": 4.0,
        "original_max_position_embeddings": 2000 * math.pi,
        "beta_fast": 1000.0,
        "beta_slow": 10.0,
    }
    expected = np.array([1.0, 0.1 * (0.5 + 0.5 / 4), 0.01 / 4])
    for rope_frequencies in (layers.rope_frequencies, reference.rope_frequencies):
        actual = rope_frequencies(6, 1000.0, truncate=False, **settings)
        assert_close(actual, expected, row=("layers", "float64"))


def test_yarn_goes_on_to_the_last_dimension_and_no_further():
    """Where every pair turns seldom or often, the ramp goes from 0 to R − 1: pair 1 of 4 dimensions is at a third."""
    settings: dict[str, Any] = {"factor": 4.0, "beta_fast": 1e30, "beta_slow": 1e-30}
    expected = np.array([1.0, 0.1 * (2 / 3 + 1 / 3 / 4)])
    for rope_frequencies in (layers.rope_frequencies, reference.rope_frequencies):
        assert_close(rope_frequencies(4, 100.0, **settings), expected, row=("layers", "float64"))


@given(factor=st.sampled_from([0.5, 1.0, 1.5, 4.0, 40.0]), mscale=st.floats(0, 2))
def test_yarn_temperature(factor, mscale):
    expected = np.array([1.0 + 0.1 * mscale * math.log(max(factor, 1.0))])
    assert_close(np.array([reference.yarn_mscale(factor, mscale)]), expected, row=("layers", "float64"))
    if factor >= 1:
        yarn = Yarn(factor=factor, original_max_position_embeddings=32)
        assert_close(np.array([yarn.temperature(mscale)]), expected, row=("layers", "float64"))


def test_what_is_left_out_means_the_same_to_layers_and_references():
    for name in set(layers.__all__) & set(reference.__all__):
        both = [inspect.signature(getattr(module, name)).parameters for module in (layers, reference)]
        assert len({tuple((p.name, p.default) for p in parameters.values()) for parameters in both}) == 1, name


@given(position=st.integers(0, 200_000), theta=st.sampled_from([100.0, 10_000.0]), half=st.integers(1, 8))
def test_rope_turns_the_unit_vector_by_the_angle(position, theta, half):
    """In both layouts: (1, 0) of pair i becomes the cosine and sine of position · frequency."""
    frequencies = reference.rope_frequencies(2 * half, theta)
    cos, sin = layers.rope_cos_sin(np.array([position]), frequencies)
    expected = np.array([[math.cos(position * f) for f in frequencies] + [math.sin(position * f) for f in frequencies]])
    unit = np.concatenate([np.ones((1, half)), np.zeros((1, half))], -1)
    assert_close(layers.rotate_halves(unit, cos, sin), expected, row=("layers", "float64"))
    pairs = reference.rotate_pairs(np.tile([1.0, 0.0], half)[None], cos, sin)
    assert_close(reference.deinterleave(pairs), expected, row=("layers", "float64"))


@DTYPES
@given(seed=SEEDS, rows=st.integers(0, 4), half=SIZES, attention_factor=st.sampled_from([1.0, 1.3]))
def test_rotate_halves(dtype, seed, rows, half, attention_factor):
    x, positions = normal(seed, rows, 3, 2 * half), np.random.default_rng(seed).integers(0, 9999, rows)
    frequencies = reference.rope_frequencies(2 * half, 1e4)
    cos, sin = reference.rope_cos_sin(positions, frequencies, attention_factor)
    actual = layers.rope_cos_sin(positions, frequencies, attention_factor)
    assert_close(np.stack(actual), np.stack([cos, sin]), row=("layers", "float64"))
    terms = 2 * attention_factor * np.abs(x).max(initial=0.0)
    assert_layer("rotate_halves", x, cos[:, None], sin[:, None], dtype=dtype, terms=lambda *_: terms)


@given(seed=SEEDS, half=SIZES, position=st.integers(0, 9999))
def test_the_two_rope_layouts_are_one_permutation_apart(seed, half, position):
    """Rotating pairs, then putting them apart, is rotating halves of what was put apart: so weights are permuted."""
    x = normal(seed, 2 * half)
    cos, sin = reference.rope_cos_sin(np.array(position), reference.rope_frequencies(2 * half, 1e4))
    pairs = reference.deinterleave(reference.rotate_pairs(x, cos, sin))
    assert_same(pairs, reference.rotate_halves(reference.deinterleave(x), cos, sin))


@given(seed=SEEDS, half=SIZES, at=st.tuples(*[st.integers(0, 999)] * 3))
def test_rotated_products_depend_on_the_distance_alone(seed, half, at):
    q, k = normal(seed, 2, 2 * half)
    frequencies = layers.rope_frequencies(2 * half, 1e4)

    def product(q_position, k_position):
        cos, sin = layers.rope_cos_sin(np.array([q_position, k_position]), frequencies)
        rotated = layers.rotate_halves(np.stack([q, k]), cos, sin)
        return rotated[:1] @ rotated[1]

    i, j, shift = at
    scale = 1000 * np.linalg.norm(q) * np.linalg.norm(k)  # angles up to 2000 radians, each 1e-16 of its size
    assert_close(product(i + shift, j + shift), product(i, j), row=("layers", "float64"), scale=scale)


@given(x=arrays(np.float64, st.integers(0, 5), elements=st.floats(-800, 800)))
def test_sigmoid_is_precise_and_quiet_at_both_ends(x):
    """Relative to its own size, where 1 / (1 + e^−x) has overflowed and (1 + tanh(x / 2)) / 2 has cancelled."""
    expected = np.array([math.exp(v) / (1 + math.exp(v)) if v < 0 else 1 / (1 + math.exp(-v)) for v in x])
    assert_close(layers.sigmoid(x), expected, row=("layers", "float64"), scale=expected)
    narrow = layers.sigmoid(x.astype(np.float32))
    assert narrow.dtype == np.float32
    assert ((narrow >= 0) & (narrow <= 1)).all()


@DTYPES
@given(seed=SEEDS, rows=st.integers(0, 4), width=SIZES, inner=SIZES, size=st.sampled_from([1.0, 30.0]))
def test_swiglu(dtype, seed, rows, width, inner, size):
    x, gate_up, down = (
        size * normal(seed, rows, width),
        normal(seed + 1, 2 * inner, width),
        normal(seed + 2, width, inner),
    )
    assert_layer("swiglu", x, gate_up, down, dtype=dtype, terms=swiglu_terms)


def test_swiglu_by_hand():
    # gate 0 halves nothing into 0; gate ln 3 gives 3/4 of itself; up 2 doubles
    x = np.array([[math.log(3), 2.0]])
    gate_up = np.array([[1.0, 0.0], [0.0, 0.0], [0.0, 1.0], [0.0, 1.0]])
    expected = np.array([[1.5 * math.log(3), -1.5 * math.log(3)]])
    for swiglu in (layers.swiglu, reference.swiglu):
        actual = swiglu(x, gate_up, np.array([[1.0, 5.0], [-1.0, 7.0]]))
        assert_close(actual, expected, row=("layers", "float64"))


def test_gates_far_from_0_pass_all_or_nothing():
    x, gate_up, down = np.array([[800.0], [-800.0]]), np.array([[1.0], [2.0]]), np.array([[1.0]])
    for swiglu in (layers.swiglu, reference.swiglu):
        assert swiglu(x, gate_up, down).tolist() == [[800.0 * 1600.0], [0.0]]


def logit(p):
    return math.log(p / (1 - p))


ROUTED = [
    # Group scores 1.0, 1.25, 1.15: expert 0, the best of all, is in the group that is dropped.
    ({"n_group": 3, "topk_group": 2}, [0, 0, 0, 0, 0, 0], [2, 4, 5], [0.75, 0.6, 0.55]),
    # A bias chooses (0.5 + 0.2 is above 0.6) and does not weigh.
    ({"n_group": 3, "topk_group": 2}, [0, 0, 0, 0.2, 0, 0], [2, 3, 4], [0.75, 0.5, 0.6]),
    # It can drop a group too: 1.0, 0.75, 1.15.
    ({"n_group": 3, "topk_group": 2}, [0, 0, -0.5, 0, 0, 0], [0, 4, 5], [0.9, 0.6, 0.55]),
    # A group goes by its best two, not by its best: 0.75 + 0.5 + 0.1 against 0.6 + 0.55 + 0.9.
    ({"n_group": 2, "topk_group": 1}, [0, 0, 0, 0, 0, 0], [0, 2, 1], [0.9, 0.75, 0.1]),
    ({"n_group": 1, "topk_group": 1}, [0, 0, 0, 0, 0, 0], [0, 2, 4], [0.9, 0.75, 0.6]),
]
SCORES = [0.9, 0.1, 0.75, 0.5, 0.6, 0.55]


@pytest.mark.parametrize("route_experts", [layers.route_experts, reference.route_experts], ids=["layers", "reference"])
@pytest.mark.parametrize("norm_topk_prob", [True, False])
@pytest.mark.parametrize("groups, bias, experts, scores", ROUTED)
def test_routing_by_hand(route_experts, norm_topk_prob, groups, bias, experts, scores):
    logits = np.array([[logit(p) for p in SCORES]])
    expert_ids, weights = route_experts(
        logits,
        np.array(bias, float),
        num_experts_per_tok=3,
        norm_topk_prob=norm_topk_prob,
        routed_scaling_factor=2.0,
        **groups,
    )
    assert expert_ids.tolist() == [experts]
    expected = 2.0 * np.array([scores]) / (sum(scores) if norm_topk_prob else 1.0)
    assert_close(weights, expected, row=("layers", "float64"))


@pytest.mark.parametrize("route_experts", [layers.route_experts, reference.route_experts], ids=["layers", "reference"])
def test_equal_scores_go_to_the_lowest_index(route_experts):
    settings = {"num_experts_per_tok": 3, "norm_topk_prob": True, "routed_scaling_factor": 1.0}
    logits, bias = np.array([[1.0, 2.0, 2.0, 1.0, 2.0, 1.0, 1.0, 2.0]]), np.zeros(8)
    assert route_experts(logits, bias, n_group=1, topk_group=1, **settings)[0].tolist() == [[1, 2, 4]]
    # each pair has one 1 and one 2, so that all groups are equal: the first two are taken
    assert route_experts(logits, bias, n_group=4, topk_group=2, **settings)[0].tolist() == [[1, 2, 0]]


@pytest.mark.parametrize("route_experts", [layers.route_experts, reference.route_experts], ids=["layers", "reference"])
def test_logits_far_from_0_are_routed_by_scores_of_1_and_nearly_0(route_experts):
    settings = {"num_experts_per_tok": 1, "n_group": 1, "topk_group": 1, "routed_scaling_factor": 1.0}
    logits = np.array([[800.0, -800.0], [-50.0, -800.0], [-800.0, -800.0]])
    expert_ids, weights = route_experts(logits, np.zeros(2), norm_topk_prob=True, **settings)
    assert expert_ids.tolist() == [[0], [0], [0]]
    tiny = math.exp(-50)  # 2e-22, beside the 1e-20 that keeps the sum of scores from being 0
    assert_close(weights, np.array([[1.0], [tiny / (tiny + 1e-20)], [0.0]]), row=("layers", "float64"))


def routing_settings(groups, experts, norm_topk_prob):
    return {
        "num_experts_per_tok": experts,
        "n_group": groups[0],
        "topk_group": groups[1],
        "norm_topk_prob": norm_topk_prob,
        "routed_scaling_factor": 2.5,
    }


SETTINGS = st.builds(
    routing_settings,
    st.sampled_from([(1, 1), (2, 1), (4, 2), (4, 4), (6, 3)]),  # of twelve experts
    st.integers(1, 4),
    st.booleans(),
)


@given(
    kinds=arrays(np.int8, st.tuples(st.integers(0, 4), st.just(12)), elements=st.integers(0, 3), fill=st.just(0)),
    values=arrays(np.float64, 4, elements=st.floats(-6, 6, width=16)),
    steps=arrays(np.int8, 12, elements=st.integers(-3, 3), fill=st.just(0)),
    settings=SETTINGS,
)
def test_routing_with_ties(kinds, values, steps, settings):
    """Four kinds of logit for twelve experts, so that equal scores abound."""
    # Where the two libraries' exponentials agree to the last bit, everything after them is exact, ties included.
    exact = [1 / (1 + math.exp(-v)) if v >= 0 else math.exp(v) / (1 + math.exp(v)) for v in values]
    assume(layers.sigmoid(values).tolist() == exact)
    expert_ids, weights = layers.route_experts(values[kinds], steps / 4, **settings)
    expected_ids, expected = reference.route_experts(values[kinds], steps / 4, **settings)
    assert_same(expert_ids.astype(np.int32), expected_ids, "expert_ids")
    assert_close(weights, expected, row=("layers", "float64"), scale=2.5)


@given(seed=SEEDS, rows=st.integers(0, 4), settings=SETTINGS)
def test_routing_in_float32(seed, rows, settings):
    (logits, bias), wide = in_dtype("float32", normal(seed, rows, 12), 0.3 * normal(seed + 1, 12))
    corrected = layers.sigmoid(wide[0]) + wide[1]
    groups = np.sort(corrected.reshape(rows, settings["n_group"], 12 // settings["n_group"]))[..., -2:].sum(-1)
    # scores within a rounding of each other may change places
    assume(all((np.diff(np.sort(scores)) > 1e-5).all() for scores in (corrected, groups)))
    expert_ids, weights = layers.route_experts(logits, bias, **settings)
    expected_ids, expected = reference.route_experts(*wide, **settings)
    assert_same(expert_ids.astype(np.int32), expected_ids, "expert_ids")
    assert_close(weights, expected, row=("layers", "float32"), scale=2.5)


@DTYPES
@given(
    seed=SEEDS,
    expert_ids=arrays(np.int32, st.tuples(st.integers(0, 5), st.integers(1, 3)), elements=st.integers(0, 3)),
    width=SIZES,
    inner=SIZES,
)
def test_moe_experts(dtype, seed, expert_ids, width, inner):
    """Any assignment: idle experts, one that has all tokens, one that a token has twice."""
    x, weights = normal(seed, len(expert_ids), width), normal(seed + 1, *expert_ids.shape)
    gate_up, down = normal(seed + 2, 4, 2 * inner, width), normal(seed + 3, 4, width, inner)

    def terms(x, expert_ids, weights, gate_up, down):
        each = np.stack([swiglu_terms(x, *expert) for expert in zip(gate_up, down, strict=True)], 1)
        chosen = np.take_along_axis(each, expert_ids[:, :, None].astype(np.int64), 1)
        return (np.abs(weights)[:, :, None] * chosen).sum(1)

    assert_layer("moe_experts", x, expert_ids, weights, gate_up, down, dtype=dtype, terms=terms)


def terms_of(x, weight, gain, residual):
    """Of a product: sizes that its rounding is relative to. A normalised element is at most the root of the width."""
    size = np.abs(x) if gain is None else x.shape[-1] ** 0.5 * np.abs(gain) * np.ones_like(x)
    return size @ np.abs(weight).T + (0 if residual is None else np.abs(residual))


@DTYPES
@given(
    seed=SEEDS, rows=st.integers(0, 4), width=SIZES, outputs=SIZES, with_gain=st.booleans(), with_residual=st.booleans()
)
def test_linear(dtype, seed, rows, width, outputs, with_gain, with_residual):
    inputs = normal(seed, rows, width), normal(seed + 1, outputs, width)
    narrow, wide = in_dtype(dtype, *inputs, normal(seed + 2, width), normal(seed + 3, rows, outputs))
    (gain, residual), (wide_gain, wide_residual) = (
        (each[2] if with_gain else None, each[3] if with_residual else None) for each in (narrow, wide)
    )
    around = np.full((rows, width + 3), np.nan, dtype)
    around[:, 1:-2] = narrow[0]
    before = [a.copy() for a in narrow]
    expected = reference.linear(*wide[:2], gain=wide_gain, eps=1e-6, residual=wide_residual)
    scale = terms_of(*wide[:2], wide_gain, wide_residual)
    for x in (narrow[0], around[:, 1:-2]):
        got = layers.linear(x, narrow[1], gain=gain, eps=1e-6, residual=residual)
        assert got.dtype == dtype
        assert_close(got, expected, row=("layers", dtype), scale=scale)
    assert all((a == b).all() for a, b in zip(narrow, before, strict=True))
    assert layers.linear(narrow[0], narrow[1], dtype=np.float64).dtype == np.float64


@DTYPES
@given(seed=SEEDS, rows=st.integers(0, 4), heads=st.integers(1, 3), width=SIZES, outputs=SIZES, apart=st.booleans())
def test_head_linear(dtype, seed, rows, heads, width, outputs, apart):
    (x, weight), wide = in_dtype(dtype, normal(seed, rows, heads, width), normal(seed + 1, heads, outputs, width))
    expected = reference.head_linear(*wide)
    scale = np.einsum("mhd,hod->mho", np.abs(wide[0]), np.abs(wide[1]))
    if not apart:
        assert_close(layers.head_linear(x, weight), expected, row=("layers", dtype), scale=scale)
        return
    around, room = np.full((rows, heads, width + 2), np.nan, dtype), np.full((rows, heads, outputs + 3), 7, dtype)
    around[..., 1:-1] = x
    assert layers.head_linear(around[..., 1:-1], weight, out=room[..., :outputs]).base is room
    assert_close(room[..., :outputs], expected, row=("layers", dtype), scale=scale)
    assert (room[..., outputs:] == 7).all()


@DTYPES
@given(
    data=st.data(), tree=draft_trees(max_nodes=6), seed=SEEDS, C=SIZES, half=st.integers(1, 3), heads=st.integers(1, 2)
)
def test_rope(dtype, data, tree, seed, C, half, heads):
    """Unused slots have zeros in their queries and write no row; all else keeps its bits."""
    (B, N), R, P = tree.token_ids.shape, 2 * half, 2
    cache = data.draw(paged_caches(tree, layers=1, width=C + R, dtype=np.dtype(dtype)), "cache")
    q, queries = normal(seed, B, N, heads, C + R), normal(seed + 1, B, N, heads, P + R)
    latents, keys, gain = normal(seed + 2, B, N, C), normal(seed + 3, B, N, R), normal(seed + 4, C)
    narrow, wide = in_dtype(dtype, q, queries, latents, keys, gain)
    table, prefix = cache.page_table, cache.prefix_lens
    options: dict[str, Any] = {"frequencies": reference.rope_frequencies(R, 1e4), "attention_factor": 1.2, "eps": 1e-6}
    rows, expected_rows = cache.data[0].copy(), cache.data[0].astype(np.float64)
    layers.rope(narrow[0], rows, narrow[1], narrow[2], narrow[3], table, prefix, tree, gain=narrow[4], **options)
    rope_of_reference(wide[0], expected_rows, wide[1], wide[2], wide[3], table, prefix, tree, gain=wide[4], **options)
    assert_close(narrow[0], wide[0], row=("layers", dtype), scale=3 * max(1.0, np.abs(queries).max(initial=0.0)))
    written = ~np.isnan(expected_rows)
    assert_same(~np.isnan(rows), written, "which cache elements are numbers")
    size = 3 * (1 + np.abs(keys).max(initial=0.0) + C**0.5 * np.abs(gain).max(initial=0.0))
    assert_close(rows[written], expected_rows[written], row=("layers", dtype), scale=size)


@DTYPES
@given(seed=SEEDS, rows=st.integers(0, 4), width=SIZES, inner=SIZES)
def test_swiglu_between_its_norm_and_the_residual_stream(dtype, seed, rows, width, inner):
    inputs = normal(seed, rows, width), normal(seed + 1, 2 * inner, width), normal(seed + 2, width, inner)
    narrow, wide = in_dtype(dtype, *inputs, normal(seed + 3, width), normal(seed + 4, rows, width))
    expected = reference.swiglu(*wide[:3], gain=wide[3], eps=1e-6, residual=wide[4])
    before = [a.copy() for a in narrow]
    actual = layers.swiglu(*narrow[:3], gain=narrow[3], eps=1e-6, residual=narrow[4])
    scale = swiglu_terms(width**0.5 * np.abs(wide[3]) * np.ones((rows, 1)), *wide[1:3]) + np.abs(wide[4])
    assert_close(actual, expected, row=("layers", dtype), scale=scale)
    assert all((a == b).all() for a, b in zip(narrow, before, strict=True))


@pytest.mark.parametrize("route_experts", [layers.route_experts, reference.route_experts], ids=["layers", "reference"])
def test_unused_slots_have_no_expert(route_experts):
    settings = routing_settings((1, 1), 2, True)
    logits = normal(1, 6, 12)
    logits[4:] = np.nan  # of no consequence
    ids, weights = route_experts(logits, np.zeros(12), node_counts=np.array([1, 3, 0], np.int32), **settings)
    assert ids.shape == weights.shape == (6, 2)
    ids, weights = route_experts(logits, np.zeros(12), node_counts=np.array([1, 1], np.int32), **settings)
    all_ids, all_weights = layers.route_experts(logits, np.zeros(12), **settings)
    for m in range(6):
        used = m in (0, 3)
        assert ids[m].tolist() == (all_ids[m].tolist() if used else [-1, -1])
        assert_close(weights[m], all_weights[m] if used else np.zeros(2), row=("layers", "float64"))


@DTYPES
@given(
    seed=SEEDS,
    expert_ids=arrays(np.int32, st.tuples(st.integers(0, 5), st.integers(1, 3)), elements=st.integers(0, 3)),
    unused=st.sets(st.integers(0, 4)),
    shared=st.integers(0, 2),
    width=SIZES,
    inner=SIZES,
)
def test_moe_experts_between_the_norm_and_the_residual_stream(dtype, seed, expert_ids, unused, shared, width, inner):
    """With experts that all tokens share; what stands in a row without experts reaches none, and it keeps its own."""
    M = len(expert_ids)
    idle = np.isin(np.arange(M), [*unused])
    expert_ids[idle] = -1
    gate_up, down = normal(seed + 2, 4 + shared, 2 * inner, width), normal(seed + 3, 4 + shared, width, inner)
    x, weights, gain = normal(seed, M, width), normal(seed + 1, *expert_ids.shape), normal(seed + 4, width)
    weights[idle] = 0
    narrow, wide = in_dtype(dtype, x, weights, gate_up, down, gain, normal(seed + 5, M, width))
    narrow[0][idle] = np.nan
    got = layers.moe_experts(
        narrow[0], expert_ids, *narrow[1:4], gain=narrow[4], eps=1e-6, residual=narrow[5], shared=shared
    )
    expected = reference.moe_experts(
        wide[0], expert_ids, *wide[1:4], gain=wide[4], eps=1e-6, residual=wide[5], shared=shared
    )
    assert_same(got[idle], narrow[5][idle], "rows without experts")
    each = swiglu_terms(width**0.5 * np.abs(wide[4])[None], gate_up.reshape(-1, width), np.concatenate(down, 1))
    scale = (1 + np.abs(weights).max(initial=0)) * 5 * (each.max(initial=0) + np.abs(wide[5]).max(initial=0))
    assert_close(got, expected, row=("layers", dtype), scale=scale)


@given(seed=SEEDS, rows=st.integers(0, 4), width=SIZES, inner=SIZES, parts=st.integers(1, 3))
def test_a_shared_expert_in_parts_is_the_whole(seed, rows, width, inner, parts):
    """Rows of gate and up, and columns of down, add up: so a wider expert is several of the routed ones' size."""
    x, gate_up, down = (
        normal(seed, rows, width),
        normal(seed + 1, 2, parts * inner, width),
        normal(seed + 2, width, parts * inner),
    )
    ids, weights = np.zeros((rows, 1), np.int64), np.zeros((rows, 1))
    pieces = [slice(i * inner, (i + 1) * inner) for i in range(parts)]
    both = np.stack([np.concatenate([*gate_up[:, piece]]) for piece in pieces[:1] + pieces])
    downs = np.stack([down[:, piece] for piece in pieces[:1] + pieces])
    whole = np.concatenate([*gate_up])
    scale = swiglu_terms(x, whole, down)
    got = layers.moe_experts(x, ids, weights, both, downs, shared=parts)
    assert_close(got, reference.swiglu(x, whole, down), row=("layers", "float64"), scale=scale)
