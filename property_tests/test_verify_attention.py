"""Laws of ``verify_attention``: softmax attention over the prefix and the nodes that a node sees."""

from dataclasses import replace
from typing import NamedTuple

import hypothesis.strategies as st
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given

from ddtree import reference
from ddtree.property_tests import brute_force
from ddtree.property_tests.compare import assert_same, assert_same_form
from ddtree.property_tests.strategies import PAGE_SIZES, draft_trees, paged_caches
from ddtree.property_tests.test_visibility import SHAPES
from ddtree.property_tests.tolerances import TOLERANCE
from ddtree.protocols import KVCache
from ddtree.trees import DraftTree, tree_from_parents

LOW_TYPES = {"float16": np.float16, "bfloat16": ml_dtypes.bfloat16}
TYPES = {"float32": np.float32, "float64": np.float64, **LOW_TYPES}


class Case(NamedTuple):
    """What ``verify_attention`` takes, one layer."""

    q: np.ndarray
    cache: KVCache
    tree: DraftTree
    scale: float
    kv_lora_rank: int

    def __repr__(self):
        trees = [p[:n].tolist() for p, n in zip(self.tree.parents, self.tree.node_counts, strict=True)]
        sizes = f"q={self.q.shape}, pages={self.cache.data.shape[1:]}, scale={self.scale}, C={self.kv_lora_rank}"
        return f"Case(parents={trees}, prefix_lens={self.cache.prefix_lens.tolist()}, {self.q.dtype}, {sizes})"

    def call(self, verify_attention, **options):
        q, cache, tree, scale, rank = self
        paged = cache.data[0], cache.page_table, cache.prefix_lens
        return verify_attention(q, *paged, tree, scale=scale, kv_lora_rank=rank, **options)

    def dense(self, **types):
        """The dense formula, request by request: (B, N, H, C), zeros in unused slots."""
        q, cache, tree, scale, rank = self
        S = cache.data.shape[2]
        out = np.zeros((*q.shape[:3], rank), types.get("compute", np.float64))
        for b, n in enumerate(tree.node_counts.tolist()):
            prefix = int(cache.prefix_lens[b])
            places = [brute_force.row_place(cache.page_table[b], row, S) for row in range(prefix + n)]
            keys = np.stack([cache.data[0][place] for place in places])
            sees = brute_force.ancestor_sets(tree.parents[b].tolist(), n)[:n]
            mask = np.array([[*[True] * prefix, *(j in seen for j in range(n))] for seen in sees])
            out[b, :n] = brute_force.attention(q[b, :n], keys, mask, scale, rank, **types)
        return out

    def plain_error(self, exact):
        """The worst row's error of the dense formula as a kernel may compute it, in the worst of some orders of sums.

        One order alone is no measure: rounding moves its worst row by a factor of two.
        """
        name, C, errors = str(self.q.dtype), self.kv_lora_rank, []
        for seed in range(4):
            rng, rotated = np.random.default_rng(seed), np.arange(C, self.q.shape[-1])
            order = np.concatenate([rng.permutation(C), rng.permutation(rotated)])
            shuffled = replace(self.cache, data=self.cache.data[..., order])
            other = self._replace(q=self.q[..., order], cache=shuffled)
            out = other.dense(compute=np.float32, weight_type=LOW_TYPES.get(name)).astype(self.q.dtype)
            errors.append(worst_row_error(out, exact[..., order[:C]]))
        return max(errors)


def worst_row_error(out, exact):
    """Largest ‖out − exact‖ / ‖exact‖ of any output row that is not zero, over all nodes and heads."""
    sizes = np.linalg.norm(exact, axis=-1)
    errors = np.linalg.norm(out.astype(np.float64) - exact, axis=-1)
    return float((errors[sizes > 0] / sizes[sizes > 0]).max(initial=0.0))


def assert_near(out, case, *, small=False):
    """Within the table's bound of the exact result, and zero where no node is.

    Of a ``small`` case, whose plain formula may be exact by luck, some roundings are allowed in any event.
    """
    name, exact = str(case.q.dtype), case.dense()
    assert_same_form(out, np.empty(exact.shape, case.q.dtype))
    unused = np.arange(case.tree.num_slots) >= case.tree.node_counts[:, None]
    assert_same(out[unused], np.zeros_like(out[unused]), "unused slots")
    allowed = TOLERANCE["verify_attention", name].bound
    if name != "float64":
        allowed *= case.plain_error(exact)
        if small:
            allowed = max(allowed, TOLERANCE["verify_attention", "small cases"].bound)
    error = worst_row_error(out, exact)
    assert error <= allowed, f"the worst row is off by {error:.3g}, {allowed:.3g} is allowed"


def poisoned_queries(rng, tree, heads, width, dtype, size=1.0):
    q = (size * rng.standard_normal((tree.batch_size, tree.num_slots, heads, width))).astype(dtype)
    q[np.arange(tree.num_slots) >= tree.node_counts[:, None]] = np.nan
    return q


@st.composite
def cases(draw, dtype):
    """A small case of any tree and cache.

    Shrinks towards few requests and nodes, and empty prefixes.
    """
    tree = draw(draft_trees(max_nodes=10))
    cache = draw(paged_caches(tree, layers=1, width=6, dtype=dtype))
    rng = np.random.default_rng(draw(st.integers(0, 9)))
    q = poisoned_queries(rng, tree, draw(st.integers(1, 3)), 6, dtype)
    return Case(q, cache, tree, draw(st.sampled_from([1.0, 0.25])), draw(st.sampled_from([4, 6])))


def large_case(dtype=np.float32, *, shape="random", N=33, prefixes=(70, 0, 5), page_size=16, heads=4, size=1.0, seed=0):
    """Requests of unequal prefixes, the last with unused slots; every row not in use is NaN."""
    rng, (C, R) = np.random.default_rng(seed), (32, 8)
    B = len(prefixes)
    counts = np.array([N] * (B - 1) + [max(N - 3, 1)], np.int32)
    tree = tree_from_parents(np.zeros((B, N), int), np.stack([SHAPES[shape](rng, N) for _ in range(B)]), counts)
    prefix_lens = np.array(prefixes, np.int32)
    needed = -(-(prefix_lens + counts) // page_size)
    pages = rng.permutation(int(needed.sum()) + 1)
    table = np.full((B, int(needed.max())), -1, np.int32)
    data = np.full((1, len(pages), page_size, C + R), np.nan, dtype)
    for b in range(B):
        table[b, : needed[b]], pages = pages[: needed[b]], pages[needed[b] :]
        rows = np.arange(prefix_lens[b] + counts[b])
        values = rng.standard_normal((len(rows), C + R)).astype(dtype)
        data[0, table[b, rows // page_size], rows % page_size] = values
    q = poisoned_queries(rng, tree, heads, C + R, dtype, size)
    return Case(q, KVCache(data, table, prefix_lens), tree, (C + R) ** -0.5, C)


def or_skip(call):
    """The result; a backend need not take every type, but must say so."""
    try:
        return call()
    except TypeError as error:
        pytest.skip(f"not taken: {error}")


@given(case=cases(np.float32))
def test_node_attends_to_the_prefix_and_its_path(verify_attention, case):
    assert_near(case.call(verify_attention), case, small=True)


@given(case=cases(np.float64))
def test_float64_is_computed_in_float64(verify_attention, case):
    assert_near(case.call(verify_attention), case)


@pytest.mark.large
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"size": 16.0},
        {"size": 100.0},  # scores past 88, whose exponential no float32 holds
        {"prefixes": (3000, 1), "N": 9},
        {"prefixes": (3000, 1), "N": 9, "size": 16.0},
        {"N": 65, "shape": "chain"},
        {"N": 65, "shape": "star"},
        {"N": 1, "prefixes": (0, 300, 0)},
    ],
    ids=lambda options: "-".join(f"{name}={value}" for name, value in options.items()) or "plain",
)
def test_error_is_at_most_that_of_the_plain_formula(verify_attention, options, dtype):
    case = large_case(TYPES[dtype], **options)
    assert_near(or_skip(lambda: case.call(verify_attention)), case)


@pytest.mark.large
@pytest.mark.parametrize("dtype", TYPES)
def test_a_zeroed_row_would_be_noticed(verify_attention, dtype):
    case = large_case(TYPES[dtype], prefixes=(3000, 1), N=9)
    out = or_skip(lambda: case.call(verify_attention)).copy()
    out[0, 8, 3] = 0
    with pytest.raises(AssertionError, match="worst row is off by 1,"):
        assert_near(out, case)


@pytest.mark.large
@pytest.mark.parametrize("page_size", [*PAGE_SIZES, 103])
def test_page_size_does_not_matter(verify_attention, page_size):
    case = large_case(page_size=page_size)
    assert_near(case.call(verify_attention), case)


@given(case=cases(np.float32))
def test_out_is_written_whole_and_returned(verify_attention, case):
    out = np.full((*case.q.shape[:3], case.kv_lora_rank), np.nan, np.float32)
    assert_same(case.call(verify_attention, out=out), case.call(verify_attention))


@given(case=cases(np.float32))
def test_a_row_that_a_node_does_not_see_does_not_matter(verify_attention, case):
    # Of each request, the row of the last node is seen by that node alone.
    before, S = case.call(verify_attention), case.cache.data.shape[2]
    last = case.tree.node_counts - 1
    for b, i in enumerate(last):
        place = brute_force.row_place(case.cache.page_table[b], case.cache.prefix_lens[b] + i, S)
        case.cache.data[0][place] += 7
    after = case.call(verify_attention)
    others = np.arange(case.tree.num_slots) != last[:, None]
    assert_same(after[others], before[others])


@pytest.mark.parametrize("B, N", [(0, 1), (0, 5)])
def test_no_request_has_no_output(verify_attention, B, N):
    tree = tree_from_parents(np.zeros((B, N)), np.zeros((B, N), np.int32))
    cache = KVCache(np.full((1, 2, 4, 6), np.nan, np.float32), np.zeros((B, 1), np.int32), np.zeros(B, np.int32))
    out = Case(np.zeros((B, N, 2, 6), np.float32), cache, tree, 1.0, 4).call(verify_attention)
    assert_same(out, np.zeros((B, N, 2, 4), np.float32))


@pytest.mark.beside_reference
@pytest.mark.parametrize("dtype", TYPES)
def test_types_are_those_that_the_reference_takes(verify_attention, dtype):
    case = large_case(TYPES[dtype], N=5, prefixes=(9, 0), heads=2)
    assert_same_form(or_skip(lambda: case.call(verify_attention)), case.call(reference.verify_attention))
