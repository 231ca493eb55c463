"""Laws of the layouts of other software: each is walked plainly and says what the tree says."""

import importlib.util

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given

from ddtree import accept_tree, interop, tree_from_parents
from ddtree.property_tests.compare import assert_same, assert_same_tree
from ddtree.property_tests.strategies import acceptance_inputs, built_trees, draft_trees
from ddtree.trees import DraftTree

SIZES = (1, 2, 7, 31, 33, 61, 67)
PREFIXES = (0, 3, 14, 129)


def random_trees(N, seed=0):
    """Four requests of one size: a chain, a star, a random tree, and a random one with unused slots."""
    rng = np.random.default_rng(seed)
    chain = np.arange(N) - 1
    star = np.where(np.arange(N) == 0, -1, 0)
    drawn = [np.array([rng.integers(0, i) if i else -1 for i in range(N)]) for _ in range(2)]
    counts = np.array([N, N, N, max(1, N - N // 3)])
    return tree_from_parents(rng.integers(0, 50, (4, N)), np.stack([chain, star, *drawn]), counts)


def seen(tree, b, i):
    """A node and its ancestors, by following parents."""
    nodes = [i]
    while nodes[-1] > 0:
        nodes.append(int(tree.parents[b, nodes[-1]]))
    return set(nodes)


def children_by_links(links, b, i):
    """The children of a node, by following links."""
    children, child = [], int(links.next_token[b, i])
    while child >= 0:
        children.append(child)
        child = int(links.next_sibling[b, child])
    return children


@given(tree=draft_trees())
def test_links_lead_to_the_children_in_order_of_index(tree):
    links = interop.retrieve_arrays(tree)
    B, N = tree.parents.shape
    for b in range(B):
        n = int(tree.node_counts[b])
        for i in range(n):
            assert children_by_links(links, b, i) == [j for j in range(1, n) if tree.parents[b, j] == i]
        assert links.index[b].tolist() == [b * N + i if i < n else -1 for i in range(N)]
        assert (links.next_token[b, n:] == -1).all()
        assert (links.next_sibling[b, n:] == -1).all()


@given(tree=draft_trees())
def test_a_tree_comes_back_from_its_links(tree):
    links = interop.retrieve_arrays(tree)
    back = interop.tree_from_retrieve_arrays(tree.token_ids, links.next_token, links.next_sibling)
    for name in ("token_ids", "parents", "depths", "node_counts", "visibility_words"):
        assert_same(getattr(back, name), getattr(tree, name), name)


@pytest.mark.parametrize(
    "change, told",
    [
        (("next_token", 1, 0), r"next_token\[0, 1\] must be -1 or in 2 … 3, got 0"),
        (("next_token", 2, 9), r"next_token\[0, 2\] must be -1 or in 3 … 3, got 9"),
        (("next_token", 2, 3), r"next_token\[0, 2\] leads to node 3, to which another link leads already"),
        (("next_token", 0, 2), "no link leads to slot 1 of request 0"),
    ],
)
def test_links_that_are_no_tree_are_refused(change, told):
    links = interop.retrieve_arrays(tree_from_parents(np.array([[5, 7, 8, 9]]), np.array([[-1, 0, 0, 1]])))
    arrays = {"next_token": links.next_token.copy(), "next_sibling": links.next_sibling.copy()}
    name, node, to = change
    arrays[name][0, node] = to
    with pytest.raises(ValueError, match=told):
        interop.tree_from_retrieve_arrays(np.array([[5, 7, 8, 9]]), **arrays)
    with pytest.raises(ValueError, match="must have one shape"):
        interop.tree_from_retrieve_arrays(np.array([[5, 7]]), **arrays)


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("N", SIZES)
def test_masks_hold_the_prefix_and_the_ancestors(N, padded):
    tree, prefixes = random_trees(N), np.array(PREFIXES, np.int32)
    flat, packed = (f(tree, prefixes, padded=padded) for f in (interop.flat_masks, interop.packed_masks))
    assert flat.data.dtype == np.bool_
    assert packed.data.dtype == np.uint8
    for b, prefix in enumerate(PREFIXES):
        n = int(tree.node_counts[b])
        rows = N if padded else n
        expected = [
            [i < n and (c < prefix or c - prefix in seen(tree, b, i)) for c in range(prefix + rows)]
            for i in range(rows)
        ]
        bits = [bit for row in expected for bit in row]
        assert flat.data[flat.offsets[b] : flat.offsets[b + 1]].tolist() == bits
        own = packed.data[packed.offsets[b] : packed.offsets[b + 1]]
        assert len(own) == -(-len(bits) // 8)
        assert [bool(own[k // 8] >> (k % 8) & 1) for k in range(8 * len(own))] == bits + [False] * (
            8 * len(own) - len(bits)
        )
    assert len(flat.data) == flat.offsets[-1]
    assert len(packed.data) == packed.offsets[-1]


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, "float32", np.dtype(np.float64)])
@pytest.mark.parametrize("N", SIZES)
def test_an_additive_mask_is_0_where_a_node_sees(N, dtype):
    tree, prefixes = random_trees(N), np.array(PREFIXES, np.int32)
    mask = interop.additive_mask(tree, prefixes, dtype=dtype, columns=max(PREFIXES) + N + 5)
    assert mask.shape == (4, 1, N, max(PREFIXES) + N + 5)
    assert mask.dtype == np.dtype(dtype)
    least = ml_dtypes.finfo(mask.dtype).min
    for b, prefix in enumerate(PREFIXES):
        for i in range(N):
            used = i < tree.node_counts[b]
            columns = [*range(prefix), *(prefix + j for j in sorted(seen(tree, b, i)))] if used else []
            assert np.flatnonzero(mask[b, 0, i] == 0).tolist() == columns
            assert (mask[b, 0, i][mask[b, 0, i] != 0] == least).all()
    assert interop.additive_mask(tree, prefixes, dtype="float32").shape[-1] == max(PREFIXES) + N


@pytest.mark.parametrize("window", [None, 1, 2, 5, 40])
@pytest.mark.parametrize("tree_column", [None, 129, 140])
def test_an_additive_mask_of_a_window_shows_the_last_positions_alone(tree_column, window):
    N = 33
    tree, prefixes = random_trees(N), np.array(PREFIXES, np.int32)
    mask = interop.additive_mask(tree, prefixes, dtype="float64", tree_column=tree_column, window=window)
    assert mask.shape == (4, 1, N, (max(PREFIXES) if tree_column is None else tree_column) + N)
    for b, prefix in enumerate(PREFIXES):
        for i in range(tree.node_counts[b]):
            position = prefix + int(tree.depths[b, i])
            first = -1 if window is None else position - window  # the last position that is out of sight
            nodes = [j for j in sorted(seen(tree, b, i)) if prefix + int(tree.depths[b, j]) > first]
            root = prefix if tree_column is None else tree_column
            columns = [c for c in range(prefix) if c > first] + [root + j for j in nodes]
            assert np.flatnonzero(mask[b, 0, i] == 0).tolist() == columns


def test_arguments_that_no_mask_can_be_made_of_are_refused():
    tree = random_trees(7)
    with pytest.raises(ValueError, match=r"columns must be at least 136, the greatest prefix_len \+ N, got 9"):
        interop.additive_mask(tree, np.array(PREFIXES), dtype="float32", columns=9)
    with pytest.raises(ValueError, match="dtype must be float16, bfloat16, float32 or float64, got int32"):
        interop.additive_mask(tree, np.array(PREFIXES), dtype="int32")
    with pytest.raises(ValueError, match="tree_column must be at least 129, the greatest prefix_len, got 128"):
        interop.additive_mask(tree, np.array(PREFIXES), dtype="float32", tree_column=128)
    with pytest.raises(ValueError, match=r"columns must be at least 137, tree_column \+ N, got 136"):
        interop.additive_mask(tree, np.array(PREFIXES), dtype="float32", tree_column=130, columns=136)
    with pytest.raises(ValueError, match="window must be at least 1, got 0"):
        interop.additive_mask(tree, np.array(PREFIXES), dtype="float32", window=0)
    for prefixes in (np.array([1, 2]), np.array([1, 2, -3, 4]), np.array([0.5] * 4)):
        with pytest.raises(ValueError, match=r"prefix_lens must be integers >= 0 of shape \(4,\)"):
            interop.flat_masks(tree, prefixes)
    with pytest.raises(ValueError, match="order must be 'breadth_first' or 'depth_first', got 'random'"):
        interop.relabel(tree, "random")


@pytest.mark.parametrize("order", ["breadth_first", "depth_first"])
@given(tree=draft_trees())
def test_a_relabelled_tree_is_the_same_tree(tree, order):
    relabelled, old = interop.relabel(tree, order)
    for b in range(tree.batch_size):
        n = int(tree.node_counts[b])
        assert sorted(old[b, :n].tolist()) == list(range(n))
        assert (old[b, n:] == -1).all()
        for i in range(n):
            for name in ("token_ids", "depths", "ranks", "scores"):
                assert getattr(relabelled, name)[b, i] == getattr(tree, name)[b, old[b, i]]
            assert i == 0 or relabelled.parents[b, i] < i
            assert {int(old[b, j]) for j in seen(relabelled, b, i)} == seen(tree, b, int(old[b, i]))
        places = np.arange(tree.num_slots)
        bits = relabelled.visibility_words[b][:, places // 32] >> (places % 32).astype(np.uint32) & np.uint32(1) != 0
        assert [set(np.flatnonzero(row).tolist()) for row in bits[:n]] == [seen(relabelled, b, i) for i in range(n)]
        depths = relabelled.depths[b, :n].tolist()
        if order == "breadth_first":
            assert depths == sorted(depths)
        else:  # the next node is a child, or a child of an ancestor
            assert all(relabelled.parents[b, i] in seen(relabelled, b, i - 1) for i in range(1, n))
    again, _ = interop.relabel(relabelled, order)
    assert_same_tree(again, relabelled)


@given(case=acceptance_inputs(built_trees()))
def test_a_relabelled_tree_accepts_the_same_tokens(case):
    """The choices move with their nodes; siblings of a built tree are distinct, so that the walk is the same."""
    tree, choices = case[0], case[1]
    plain = accept_tree(tree, choices, backend="reference")
    for order in ("breadth_first", "depth_first"):
        relabelled, old = interop.relabel(tree, order)
        moved = np.take_along_axis(choices, np.maximum(old, 0).astype(np.int64), -1)
        accepted = accept_tree(relabelled, moved, backend="reference")
        assert_same(accepted.lengths, plain.lengths)
        assert_same(accepted.bonus_token_ids, plain.bonus_token_ids)
        assert_same(
            np.where(accepted.node_indices < 0, -1, np.take_along_axis(old, np.maximum(accepted.node_indices, 0), -1)),
            plain.node_indices,
        )


def test_no_request_is_legal():
    empty = tree_from_parents(np.zeros((0, 3), int), np.zeros((0, 3), int))
    assert interop.retrieve_arrays(empty).index.shape == (0, 3)
    assert interop.flat_masks(empty, np.zeros(0, np.int32)).offsets.tolist() == [0]
    assert interop.additive_mask(empty, np.zeros(0, np.int32), dtype="float32").shape == (0, 1, 3, 3)
    assert interop.relabel(empty, "depth_first")[1].shape == (0, 3)


@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="optional library torch is not installed")
def test_torch_tensors_come_back_as_tensors():
    import torch

    host = random_trees(7)
    values = {name: torch.from_numpy(v) if isinstance(v, np.ndarray) else v for name, v in vars(host).items()}
    tree, prefixes = DraftTree(**values), torch.tensor(PREFIXES)
    for made, expected in (
        (interop.retrieve_arrays(tree).next_token, interop.retrieve_arrays(host).next_token),
        (interop.packed_masks(tree, prefixes).data, interop.packed_masks(host, np.array(PREFIXES)).data),
        (interop.relabel(tree, "depth_first")[0].parents, interop.relabel(host, "depth_first")[0].parents),
    ):
        assert isinstance(made, torch.Tensor)
        assert made.tolist() == expected.tolist()
    mask = interop.additive_mask(tree, prefixes, dtype=torch.bfloat16)
    assert mask.dtype == torch.bfloat16
