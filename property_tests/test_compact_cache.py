"""Laws of ``compact_cache``: accepted rows move up behind the prefix, and every other byte stays."""

import importlib

import numpy as np
import pytest
from hypothesis import given

from ddtree.backends import get_backend
from ddtree.property_tests import brute_force
from ddtree.property_tests._backends import kind_of
from ddtree.property_tests.cases import map_arrays
from ddtree.property_tests.strategies import CACHE_TYPES, compaction_inputs
from ddtree.protocols import KVCache
from ddtree.trees import Acceptance


def expected_bytes(cache, acceptance):
    return brute_force.compacted(
        cache.data,
        cache.page_table.tolist(),
        cache.prefix_lens.tolist(),
        acceptance.node_indices.tolist(),
        acceptance.lengths.tolist(),
    ).tobytes()


def accepted(*paths):
    """An acceptance of these node paths; what compaction reads of it."""
    width = max(map(len, paths))
    indices = np.array([[*path, *[-1] * (width - len(path))] for path in paths], np.int32)
    lengths = np.array([len(path) for path in paths], np.int32)
    return Acceptance(indices, lengths, np.zeros_like(lengths), lengths == 0)


def numbered_cache(pages, page_size, *, layers=2, width=2):
    """A float32 cache in which each value is its own place in memory."""
    return np.arange(layers * pages * page_size * width, dtype=np.float32).reshape(layers, pages, page_size, width)


@given(case=compaction_inputs())
def test_accepted_rows_move_as_if_all_were_read_before_any_is_written(compact_cache, case):
    cache, acceptance = case
    after = compact_cache(cache.data, cache.page_table, cache.prefix_lens, acceptance)
    assert after.dtype == cache.data.dtype
    assert after.tobytes() == expected_bytes(cache, acceptance)


@pytest.mark.parametrize("page_size", [1, 3, 16, 64, 26])  # 26: one page holds a request's rows
@pytest.mark.parametrize("path", [[0, 2, 3], [0, 1, 2], [0, 5], [0, 1, 4, 5], [0], []])
def test_overlapping_moves_across_pages_of_any_size(compact_cache, path, page_size):
    prefix_lens = np.array([14, 0, 20], np.int32)
    needed = -(-26 // page_size)
    page_table = np.random.default_rng(1).permutation(3 * needed).astype(np.int32).reshape(3, needed)
    cache = KVCache(numbered_cache(3 * needed, page_size), page_table, prefix_lens)
    acceptance = accepted(path, [0, 3, 4], path)
    after = compact_cache(cache.data, page_table, prefix_lens, acceptance)
    assert after.tobytes() == expected_bytes(cache, acceptance)


@pytest.mark.parametrize("dtype", CACHE_TYPES)
def test_rows_wider_than_a_block_of_threads_move_whole(compact_cache, dtype):
    cache = KVCache(
        numbered_cache(2, 4, width=301).astype(dtype), np.array([[1, 0]], np.int32), np.array([1], np.int32)
    )
    acceptance = accepted([0, 2, 5])
    after = compact_cache(cache.data, cache.page_table, cache.prefix_lens, acceptance)
    assert after.tobytes() == expected_bytes(cache, acceptance)


@given(case=compaction_inputs())
def test_bytes_outside_the_accepted_rows_stay(compact_cache, case):
    cache, acceptance = case
    after = compact_cache(cache.data, cache.page_table, cache.prefix_lens, acceptance)
    bits = np.dtype(f"u{cache.data.itemsize}")
    changed = (after.view(bits) != cache.data.view(bits)).any((0, 3))
    S = cache.data.shape[2]
    for b, length in enumerate(acceptance.lengths.tolist()):
        for row in range(int(cache.prefix_lens[b]), int(cache.prefix_lens[b]) + length):
            changed[brute_force.row_place(cache.page_table[b], row, S)] = False
    assert not changed.any()


@pytest.mark.parametrize("dtype", CACHE_TYPES)
def test_a_nan_keeps_its_payload_when_it_moves(compact_cache, dtype):
    data = numbered_cache(1, 4, width=8).astype(dtype)
    bits = data.view(f"u{data.itemsize}")
    payloads = np.array(-np.nan, dtype).view(bits.dtype) | np.arange(1, 9, dtype=bits.dtype)
    signalling = np.array(np.inf, dtype).view(bits.dtype) | np.arange(1, 9, dtype=bits.dtype)
    bits[0, 0, 2], bits[1, 0, 2] = payloads, signalling
    one = np.zeros((1, 1), np.int32), np.zeros(1, np.int32)
    after = compact_cache(data, *one, accepted([0, 2])).view(bits.dtype)
    assert after[0, 0, 1].tolist() == payloads.tolist()
    assert after[1, 0, 1].tolist() == signalling.tolist()


@pytest.mark.parametrize("B", [0, 2])
def test_nothing_accepted_moves_nothing(compact_cache, B):
    data = numbered_cache(4, 4)
    empty = Acceptance(
        np.full((B, 3), -1, np.int32), np.zeros(B, np.int32), np.full(B, -1, np.int32), np.ones(B, np.bool_)
    )
    after = compact_cache(data, np.zeros((B, 1), np.int32), np.zeros(B, np.int32), empty)
    assert after.tobytes() == data.tobytes()


@pytest.mark.parametrize("shape", [(0, 2, 4, 3), (2, 2, 4, 0), (1, 1, 1, 1)])
def test_a_cache_of_no_layers_or_no_width_or_of_one_number_stays(compact_cache, shape):
    data = np.ones(shape, np.float32)
    after = compact_cache(data, np.array([[1, 0]], np.int32) % shape[1], np.array([0], np.int32), accepted([0]))
    assert after.shape == shape
    assert (after == 1).all()


@given(case=compaction_inputs(max_prefix=40))
def test_pages_before_the_window_are_not_looked_up(compact_cache, case):
    cache, acceptance = case
    table, S = cache.page_table.copy(), cache.data.shape[2]
    for b, prefix in enumerate(cache.prefix_lens.tolist()):
        table[b, : prefix // S] = -(2**31)  # no page at all
    after = compact_cache(cache.data, table, cache.prefix_lens, acceptance)
    assert after.tobytes() == expected_bytes(cache, acceptance)


def on_the_host(backend):
    """How a backend that works on the host takes a NumPy array's memory; None if it works elsewhere."""
    if kind_of(backend) == "torch" and getattr(get_backend(backend).namespace, "device", "cpu") == "cpu":
        return importlib.import_module("torch").from_numpy
    return (lambda array: array) if kind_of(backend) == "numpy" else None


def test_cost_does_not_grow_with_the_context(compact_cache):
    export = on_the_host(compact_cache.backend)
    if export is None:
        pytest.skip("page faults are counted on the host, no GPU has them")
    resource = pytest.importorskip("resource", reason="page faults are counted on Unix")
    S, pages = 64, 2**15
    moved = accepted([0, 2, 3])
    tables = np.arange(pages, dtype=np.int32)[None]

    def page_faults(data, prefix):
        """Memory pages that the call meets for the first time, by reading or by writing."""
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        compact_cache.function(*map(export, (data, tables, np.array([prefix], np.int32))), map_arrays(moved, export))
        return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

    page_faults(np.zeros((1, 8, S, 64), np.float32), 100)  # compiles, imports
    untouched = np.zeros((1, pages, S, 64), np.float32)  # 512 MB that the system has not given yet
    assert page_faults(untouched, pages * S - 100) < 100  # all of it: 256 at the least, of 2 MB each
    assert untouched.nbytes == 2**29
