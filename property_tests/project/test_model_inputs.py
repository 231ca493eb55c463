"""What a model of another library needs of a tree, on the host and a GPU: inputs, mask, and its caches compacted."""

import importlib
from dataclasses import fields
from typing import Any

import hypothesis.strategies as st
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings

from ddtree import reference
from ddtree.interop.layouts import additive_mask
from ddtree.property_tests.compare import assert_same
from ddtree.property_tests.project.on_gpu import gpu_library, poison_outputs
from ddtree.property_tests.strategies import parent_arrays
from ddtree.trees import Acceptance, tree_from_parents

FLOATS = (np.float16, ml_dtypes.bfloat16, np.float32, np.float64)
LAUNCHERS = ("compact_layers", "emitted_tokens", "tree_inputs")


@st.composite
def placed_trees(draw):
    """Trees of any shape, each request's prefix, and a row at which all of them begin."""
    shapes = [draw(parent_arrays(max_nodes=40)) for _ in range(draw(st.integers(1, 3)))]
    slots = max(map(len, shapes)) + draw(st.integers(0, 2))
    parents = np.stack([np.pad(shape, (0, slots - len(shape))) for shape in shapes])
    tokens = np.random.default_rng(draw(st.integers(0, 99))).integers(0, 50, parents.shape)
    prefix_lens = np.array([draw(st.integers(0, 30)) for _ in shapes], np.int32)
    tree = tree_from_parents(tokens, parents, [len(shape) for shape in shapes])
    return tree, prefix_lens, int(prefix_lens.max()) + draw(st.integers(0, 3))


WINDOWS = st.none() | st.integers(1, 8)


@given(
    case=placed_trees(), window=WINDOWS, dtype=st.sampled_from(FLOATS), more=st.integers(0, 3), first=st.integers(0, 4)
)
def test_a_mask_is_what_the_layouts_make_of_the_tree(case, window, dtype, more, first):
    tree, prefix_lens, tree_row = case
    columns = tree_row + tree.num_slots + more
    wanted = additive_mask(tree, prefix_lens, dtype=dtype, columns=columns, tree_column=tree_row, window=window)
    for b, n in enumerate(tree.node_counts):
        wanted[b, 0, n:] = wanted[b, 0, 0]
    first = min(first, columns - 1)
    wanted = np.ascontiguousarray(wanted[..., first:])
    out = np.full(wanted.size + 9, 7, dtype)
    reference.tree_mask(tree, prefix_lens, np.array([tree_row, first, columns - first]), out, window=window)
    assert_same(out[: wanted.size].reshape(wanted.shape), wanted)
    assert (out[wanted.size :] == 7).all()


def test_inputs_are_tokens_and_positions_and_an_unused_slot_is_the_root():
    tree = tree_from_parents([[5, 7, 99], [3, 0, 0]], [[-1, 0, 1], [-1, 0, 0]], [3, 1])
    input_ids, position_ids = reference.tree_inputs(tree, np.array([9, 2], np.int32), vocab_size=50, max_position=10)
    assert_same(input_ids, np.array([[5, 7, 49], [3, 3, 3]]))
    assert_same(position_ids, np.array([[9, 10, 10], [2, 2, 2]]))


def test_the_least_token_and_position_are_0():
    tree = tree_from_parents([[0, 4]], [[-1, 0]])
    tree.token_ids[0, 1] = -1
    input_ids, position_ids = reference.tree_inputs(tree, np.zeros(1, np.int32), vocab_size=5, max_position=9)
    assert (input_ids.tolist(), position_ids.tolist()) == ([[0, 0]], [[0, 1]])


def cached_layers(rng, requests, tree_row, slots, first, dtype):
    """Keys and values of two layers, of other widths, some with room behind the rows or between heads."""
    shapes = [(requests, 2, tree_row + slots - first, 3), (requests, 1, tree_row + slots + 4 - first, 8)]
    full = [rng.integers(-99, 99, (b, h + 1, rows, width)).astype(dtype) for b, h, rows, width in shapes]
    return [array[:, : shape[1]] for array, shape in zip(full, shapes, strict=True)]


def accepted(rng, tree):
    """Any path of each tree, or none."""
    B, slots = tree.parents.shape
    path, lengths = np.full((B, slots), -1, np.int32), np.zeros(B, np.int32)
    for b in range(B):
        kept = [int(rng.integers(0, tree.node_counts[b]))]
        while kept[0] > 0:
            kept.insert(0, int(tree.parents[b, kept[0]]))
        kept = kept[: int(rng.integers(0, len(kept) + 1))]
        path[b, : len(kept)], lengths[b] = kept, len(kept)
    return Acceptance(path, lengths, np.zeros(B, np.int32), np.zeros(B, np.bool_))


@given(case=placed_trees(), seed=st.integers(0, 2**16), dtype=st.sampled_from(FLOATS))
def test_layers_are_compacted_as_if_all_rows_were_read_before_any_is_written(case, seed, dtype):
    tree, prefix_lens, tree_row = case
    rng = np.random.default_rng(seed)
    first = int(rng.integers(0, prefix_lens.min() + 1))
    arrays = cached_layers(rng, tree.batch_size, tree_row, tree.num_slots, first, dtype)
    before, kept = [array.copy() for array in arrays], accepted(rng, tree)
    table = reference.layer_table(arrays, [first] * 2)
    reference.compact_layers(table, prefix_lens, np.full_like(prefix_lens, tree_row), kept)
    for old, new in zip(before, arrays, strict=True):
        for b, row in np.ndindex(len(old), old.shape[2]):
            k = row + first - int(prefix_lens[b])
            moved = 0 <= k < kept.lengths[b]
            source = tree_row + int(kept.node_indices[b, k]) - first if moved else row
            assert new[b, :, row].tobytes() == old[b, :, source].tobytes()


@given(case=placed_trees(), seed=st.integers(0, 2**16))
def test_emitted_tokens_are_those_of_the_kept_drafts_and_the_bonus(case, seed):
    tree, kept = case[0], accepted(np.random.default_rng(seed), case[0])
    for b, (length, *tokens) in enumerate(reference.emitted_tokens(tree, kept).tolist()):
        path = kept.node_indices[b, 1:length].tolist()
        bonus = [int(kept.bonus_token_ids[b])] * (length > 0)
        wanted = [int(tree.token_ids[b, node]) for node in path] + bonus
        assert length == kept.lengths[b] == len(wanted)
        assert tokens == wanted + [-1] * (kept.node_indices.shape[1] - length)


# On a GPU

kernels: Any = importlib.import_module("ddtree.kernels.cupy")


@pytest.fixture
def cp(monkeypatch):
    """CuPy, with every array that a launcher makes full of poison."""
    poison_outputs(monkeypatch, LAUNCHERS, 0x5A)
    return gpu_library("cupy")


def on_gpu(cp, record):
    """A tree or an acceptance with its arrays on the GPU."""
    values = {f.name: getattr(record, f.name) for f in fields(record)}
    return type(record)(**{k: cp.asarray(v) if isinstance(v, np.ndarray) else v for k, v in values.items()})


@settings(max_examples=60)
@given(
    case=placed_trees(),
    window=WINDOWS,
    dtype=st.sampled_from(FLOATS),
    first=st.integers(0, 4),
    limit=st.integers(0, 40),
)
def check_inputs_and_masks(cp, case, window, dtype, first, limit):
    tree, prefix_lens, tree_row = case
    sent = on_gpu(cp, tree), cp.asarray(prefix_lens)
    for columns in (tree_row + tree.num_slots, tree_row + tree.num_slots + 2000):
        wanted = np.full(tree.batch_size * tree.num_slots * (columns + 3), 7, dtype)
        geometry, out = np.array([tree_row, first, columns]), cp.asarray(wanted)
        reference.tree_mask(tree, prefix_lens, geometry, wanted, window=window)
        kernels.tree_mask(*sent, cp.asarray(geometry), out, window=window)
        assert_same(out.get(), wanted)
    sizes = {"vocab_size": 30, "max_position": limit}
    for got, expected in zip(
        kernels.tree_inputs(*sent, **sizes), reference.tree_inputs(tree, prefix_lens, **sizes), strict=True
    ):
        assert_same(got.get(), expected)


def test_inputs_and_masks_on_a_gpu_are_the_references(cp):
    check_inputs_and_masks(cp)


@settings(max_examples=60)
@given(case=placed_trees(), seed=st.integers(0, 2**16), dtype=st.sampled_from(FLOATS))
def check_compaction(cp, case, seed, dtype):
    make = importlib.import_module("ddtree.kernels.cupy.compact_layers").layer_table
    tree, prefix_lens, tree_row = case
    rng = np.random.default_rng(seed)
    first = int(rng.integers(0, prefix_lens.min() + 1))
    arrays = cached_layers(rng, tree.batch_size, tree_row, tree.num_slots, first, dtype)
    bases = [cp.asarray(array.base) for array in arrays]
    sent = [base[:, : array.shape[1]] for base, array in zip(bases, arrays, strict=True)]
    kept, rows = accepted(rng, tree), np.full_like(prefix_lens, tree_row)
    kernels.compact_layers(make(sent, [first] * 2), cp.asarray(prefix_lens), cp.asarray(rows), on_gpu(cp, kept))
    reference.compact_layers(reference.layer_table(arrays, [first] * 2), prefix_lens, rows, kept)
    for got, array in zip(bases, arrays, strict=True):
        assert_same(got.get(), array.base)
    emitted = kernels.emitted_tokens(on_gpu(cp, tree), on_gpu(cp, kept))
    assert_same(emitted.get(), reference.emitted_tokens(tree, kept))


def test_layers_on_a_gpu_are_compacted_as_the_reference_does(cp):
    check_compaction(cp)


@pytest.mark.parametrize("rows, pitch, width", [(1, 4096, 4096), (14, 64, 64), (14, 64, 5), (3, 1, 0), (700, 9, 3)])
@pytest.mark.parametrize("dtype", [np.float32, np.int32])
def test_rows_are_copied_from_where_a_number_says(cp, rows, pitch, width, dtype):
    stream, slot = cp.cuda.Stream(non_blocking=True), cp.zeros(2, np.int64)
    out = cp.full((rows, pitch), 7, dtype)
    with stream:
        kernels.copy_rows(slot, cp.full_like(out, 7), fill=0)  # loads it
        stream.synchronize()
        stream.begin_capture()
        kernels.copy_rows(slot, out, fill=0xFFFFFFFF)
        graph = stream.end_capture()
    pinned = np.frombuffer(cp.cuda.alloc_pinned_memory(max(4, 4 * rows * width)), dtype, rows * width)
    for seed in range(2):
        pinned[...] = np.random.default_rng(seed).integers(0, 99, rows * width)
        on_device = cp.asarray(pinned)
        for address in (pinned.ctypes.data, on_device.data.ptr):
            out.fill(7)
            slot[...] = cp.array([address, width])
            cp.cuda.Device().synchronize()
            graph.launch(stream)
            stream.synchronize()
            wanted = np.full((rows, pitch), 0xFFFFFFFF, np.uint32)
            wanted[:, :width] = pinned.reshape(rows, width).view(np.uint32)
            assert_same(out.get().view(np.uint32), wanted)


def test_rows_of_several_arrays_are_copied_each_from_its_own_place(cp):
    rng, (arrays, rows, pitch) = np.random.default_rng(0), (3, 5, 7)
    data = [cp.asarray(rng.integers(0, 99, (rows, width)).astype(np.int32)) for width in (7, 0, 4)]
    slots = cp.array([[array.data.ptr, array.shape[1]] for array in data])
    out = cp.full((arrays, rows, pitch), 7, np.int32)
    kernels.copy_rows(slots, out, fill=0xFFFFFFFF)
    wanted = np.full((arrays, rows, pitch), -1, np.int32)
    for place, array in zip(wanted, data, strict=True):
        place[:, : array.shape[1]] = array.get()
    assert_same(out.get(), wanted)


@pytest.mark.parametrize("nbytes, word", [(32, 16), (20, 4), (6, 2)])
def test_whole_arrays_are_copied_by_their_widest_word(cp, nbytes, word):
    copy_rows = importlib.import_module("ddtree.kernels.cupy.copy_rows")
    assert copy_rows.word_of(nbytes) == word
    data = cp.arange(nbytes // 2, dtype=np.int16)
    out = cp.zeros_like(data)
    slot = cp.array([data.data.ptr, nbytes // word])
    copy_rows.copy_rows(slot, out.reshape(1, -1), word=word)
    assert_same(out.get(), data.get())
