"""What is captured, without a GPU: on the CuPy of :mod:`.fake_cupy`. With one, in :mod:`.test_gpu_resident`."""

import gc
import weakref
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import numpy as np
import pytest

from ddtree.engine import Engine, ScriptedTarget
from ddtree.engine.graphs import captured, free_pools
from ddtree.property_tests.project.fake_cupy import CUDA, Cuda, Graph, Stream


@pytest.fixture
def xp(monkeypatch):
    monkeypatch.setattr(Cuda, "runtime", SimpleNamespace(CUDARuntimeError=OSError), raising=False)
    free_pools()
    Cuda.MemoryPool.kept.clear()
    return SimpleNamespace(cuda=CUDA)


def nothing():
    CUDA.do(lambda: None)


def test_what_a_graph_has_is_given_back_when_it_is_gone_and_not_before(xp):
    done = []
    replay = captured(xp, lambda: CUDA.do(lambda: done.append(1)))
    assert done == []
    (pool,) = Cuda.MemoryPool.kept
    free_pools()
    other = captured(xp, nothing)  # which looks for graphs that are gone
    assert pool in Cuda.MemoryPool.kept
    replay(Stream())
    replay(Stream())
    assert done == [1, 1]
    del replay
    gc.collect()
    assert pool in Cuda.MemoryPool.kept  # to give memory back may wait for the GPU: it has its places
    captured(xp, nothing)
    assert pool not in Cuda.MemoryPool.kept
    del other
    gc.collect()
    free_pools()
    assert not Cuda.MemoryPool.kept


def test_memory_of_arrays_that_are_left_is_given_back_after_them(xp, monkeypatch):
    left = [4096, 4096, 0]
    monkeypatch.setattr(Cuda.MemoryPool, "total_bytes", lambda self: left[0])
    tries = []
    monkeypatch.setattr(Cuda.MemoryPool, "free_all_blocks", lambda self: tries.append(left.pop(0)))
    replay = captured(xp, nothing)
    del replay
    gc.collect()
    left.append(0)
    for _ in range(5):
        free_pools()
    assert tries == [4096, 4096]  # the second time nothing was left, and it was not looked at again


def test_a_capture_that_fails_keeps_nothing(xp):
    def fails():
        nothing()
        raise KeyError("in the middle")

    with pytest.raises(KeyError, match="in the middle"):
        captured(xp, fails)
    free_pools()
    assert not Cuda.MemoryPool.kept
    assert CUDA.captured is None


def test_on_the_host_it_is_the_work_itself():
    done = []
    replay = captured(np, lambda: done.append(1))
    replay()
    replay(None)
    assert done == [1, 1]


def test_pools_are_given_back_by_several_at_once_and_while_nothing_is_captured(xp, monkeypatch):
    for _ in range(40):
        captured(xp, nothing)
    gc.collect()

    def frees_others(self):
        free_pools()  # as a collection of garbage in the middle may
        Cuda.MemoryPool.kept.discard(self)

    monkeypatch.setattr(Cuda.MemoryPool, "free_all_blocks", frees_others)
    with ThreadPoolExecutor(4) as threads:
        list(threads.map(lambda _: free_pools(), range(8)))
    assert not Cuda.MemoryPool.kept

    monkeypatch.undo()
    replay = captured(xp, nothing)
    (pool,) = Cuda.MemoryPool.kept

    def work():
        nothing()
        nonlocal replay
        del replay
        gc.collect()
        free_pools()
        assert pool in Cuda.MemoryPool.kept

    other = captured(xp, work)
    free_pools()
    assert pool not in Cuda.MemoryPool.kept
    del other


def test_a_pool_that_cannot_be_given_back_stays_among_those_to_be(xp, monkeypatch):
    def fails(self):
        raise OSError("no device")

    captured(xp, nothing)
    gc.collect()
    with monkeypatch.context() as patch:
        patch.setattr(Cuda.MemoryPool, "free_all_blocks", fails)
        with pytest.raises(OSError, match="no device"):
            free_pools()
    free_pools()
    assert not Cuda.MemoryPool.kept


def test_a_graph_that_cannot_be_sent_keeps_nothing(xp, monkeypatch):
    def fails(self, stream):
        raise OSError("no room")

    monkeypatch.setattr(Graph, "upload", fails)
    with pytest.raises(OSError, match="no room"):
        captured(xp, nothing)
    free_pools()
    assert not Cuda.MemoryPool.kept


def test_loops_that_an_engine_lets_go_of_do_not_wait_for_the_garbage_collector():
    engine = Engine(ScriptedTarget([np.arange(60) % 10], vocab_size=10), resident=True)
    for _ in range(2):
        engine.generate([[0, 1, 2]], 20, mode="autoregressive")
    (loop,) = engine.loops.all
    assert loop.passes
    alive = weakref.ref(loop)
    del loop
    gc.collect()  # of what else the test was
    gc.disable()
    try:
        engine.loops.clear()
        assert alive() is None
    finally:
        gc.enable()
