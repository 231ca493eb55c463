"""On a GPU: resident rounds in a CUDA graph have the tokens of the host's rounds, and wait for nothing."""

from __future__ import annotations

import functools
import gc
import importlib
import warnings
import weakref
from collections.abc import Callable
from dataclasses import fields, replace
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from ddtree import reference
from ddtree.drafters import NgramDrafter, NoiseLaw, OracleDrafter
from ddtree.engine import Engine, NonFiniteLogitsError
from ddtree.engine.graphs import Inputs, Readbacks, captured, free_pools
from ddtree.engine.prompts import PromptPass
from ddtree.engine.resident import ResidentRun, RoundState
from ddtree.model import golden_bundle, load_model
from ddtree.property_tests.compare import assert_same
from ddtree.property_tests.project.on_gpu import gpu_library, poison_outputs
from ddtree.property_tests.targets import RandomDrafter

VOCABULARY = 512


@pytest.fixture
def cupy() -> ModuleType:
    return gpu_library("cupy")


@functools.cache
def model(where: str | None, dtype: str = "float64", bundle: str = "tiny") -> Any:
    return load_model(golden_bundle(bundle), dtype=dtype, backend=where)


def prompts(count: int, seed: int = 0) -> list[Any]:
    rng = np.random.default_rng(seed)
    return [rng.integers(0, VOCABULARY, rng.integers(1, 40)) for _ in range(count)]


@functools.cache
def expected(count: int, new: int, stops: tuple[int, ...] = (), temperature: float = 0.0) -> Any:
    engine = Engine(model(None))
    return engine.generate(prompts(count), new, stops, mode="autoregressive", temperature=temperature)


DRAFTERS: dict[str, Any] = {
    "oracle": lambda tokens: OracleDrafter(tokens, VOCABULARY),
    "oracle with noise": lambda tokens: OracleDrafter(tokens, VOCABULARY, noise=NoiseLaw([[0.6, 0.3], [0.3, 0.3]])),
    "n-gram": lambda tokens: NgramDrafter(),
    "random": lambda tokens: RandomDrafter(5, VOCABULARY),
}


def assert_tokens(actual: Any, wanted: Any) -> None:
    assert actual.finish_reasons == wanted.finish_reasons
    for mine, its in zip(actual.tokens, wanted.tokens, strict=True):
        assert_same(mine, its)


@pytest.mark.parametrize("kind", ["autoregressive", *DRAFTERS])
@pytest.mark.parametrize("max_batch", [1, 3, None])
def test_tokens_are_those_of_the_host(cupy: ModuleType, kind: str, max_batch: int | None) -> None:
    wanted = expected(7, 30)
    stops = (int(wanted.tokens[3][9]), int(wanted.tokens[5][20]))
    drafter = None if kind == "autoregressive" else DRAFTERS[kind](wanted.tokens)
    engine = Engine(model("cupy"), drafter, depth=5, budget=20, max_batch=max_batch)
    mode: Any = "autoregressive" if drafter is None else "tree"
    for ends, temperature in (((), 0.0), (stops, 0.0), ((), 0.8), ((), 0.0)):
        actual = engine.generate(prompts(7), 30, ends, mode=mode, temperature=temperature)
        assert_tokens(actual, expected(7, 30, ends, temperature))
    if kind == "oracle":
        assert (actual.tau or 0) > 4


def test_rounds_are_those_of_the_host(cupy: ModuleType) -> None:
    wanted = expected(3, 24)
    rounds = []
    for where in (None, "cupy"):
        engine = Engine(model(where), OracleDrafter(wanted.tokens, VOCABULARY), depth=4, budget=9)
        rounds.append(engine.generate(prompts(3), 24, keep_rounds=True).rounds)
    assert len(rounds[0]) == len(rounds[1])
    for host, device in zip(*rounds, strict=True):
        assert host.request_ids == device.request_ids
        assert_same(device.target_token_ids, host.target_token_ids)
        for record in ("tree", "acceptance"):
            for f in fields(getattr(host, record)):
                assert_same(*(np.asarray(getattr(getattr(r, record), f.name)) for r in (device, host)))


@pytest.mark.parametrize("prefill_chunk", [3, 2048])
def test_prompts_in_pieces(cupy: ModuleType, prefill_chunk: int) -> None:
    actual = Engine(model("cupy"), prefill_chunk=prefill_chunk).generate(prompts(7), 30, mode="autoregressive")
    assert_tokens(actual, expected(7, 30))


def ragged(count: int) -> list[Any]:
    """Prompts of lengths that take all shapes of passes."""
    rng = np.random.default_rng(count)
    lens = [1, 8, 9, 31, 64, 100, 128, 2, 17, 40, 3, 90]
    return [rng.integers(0, VOCABULARY, lens[i % len(lens)]) for i in range(count)]


@functools.cache
def expected_of_ragged(temperature: float) -> Any:
    return Engine(model(None)).generate(ragged(30), 12, mode="autoregressive", temperature=temperature)


@pytest.mark.parametrize("prefill_chunk", [24, 2048])
@pytest.mark.parametrize("max_batch", [1, 5, None])
def test_prompts_in_graphs_give_the_tokens_of_the_host(
    cupy: ModuleType, max_batch: int | None, prefill_chunk: int
) -> None:
    for temperature in (0.0, 0.8):
        wanted = expected_of_ragged(temperature)
        drafter = OracleDrafter(wanted.tokens, VOCABULARY, noise=NoiseLaw([[0.6, 0.3], [0.3, 0.3]]))
        engines = [
            Engine(model("cupy"), drafter, depth=3, budget=6, max_batch=max_batch, prefill_chunk=prefill_chunk)
            for _ in range(2)
        ]
        for _ in range(3):
            for engine in engines:
                assert_tokens(engine.generate(ragged(30), 12, temperature=temperature), wanted)
        with cupy.cuda.Stream(non_blocking=True):
            assert_tokens(engines[0].generate(ragged(30), 12, temperature=temperature), wanted)
        if max_batch is not None:
            assert any(p.replay is not None for loop in engines[0].loops.all for p in loop.passes.values())


def test_runs_with_prompts_in_graphs_may_be_interleaved(cupy: ModuleType) -> None:
    wanted = expected_of_ragged(0.0)
    engine = Engine(model("cupy"), NgramDrafter(), depth=3, budget=6, max_batch=3)
    for _ in range(3):
        tokens: list[list[list[int]]] = [[[] for _ in wanted.tokens] for _ in range(3)]
        left = {i: engine.stream(ragged(30), 12) for i in range(3)}
        while left:
            for i, stream in list(left.items()):
                emission = next(stream, None)
                if emission is None:
                    del left[i]
                else:
                    tokens[i][emission.request_id] += emission.token_ids.tolist()
        assert tokens == [[row.tolist() for row in wanted.tokens]] * 3


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_graph_of_prompts_has_the_logits_of_its_launches(
    cupy: ModuleType, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Any] = []
    choose, start = ResidentRun.choose, PromptPass.start
    found: dict[int, list[Any]] = {}

    def choosing(self: Any, logits: Any, positions: Any, keys: Any) -> Any:
        seen.append(logits)
        return choose(self, logits, positions, keys)

    def watched(self: Any, *arguments: Any) -> Any:
        before = len(seen)
        ended = start(self, *arguments)
        of_this = found.setdefault(id(self), [])
        # a replay chooses nothing anew: its logits are where those of the capture were to be
        of_this.append(seen[-1] if len(seen) > before else of_this[-1])
        rows.append((self.tree.token_ids.shape, of_this[-1].get()))
        return ended

    monkeypatch.setattr(ResidentRun, "choose", choosing)
    monkeypatch.setattr(PromptPass, "start", watched)
    engine = Engine(model("cupy", dtype))
    of_runs = []
    for _ in range(4):
        rows: list[Any] = []
        engine.generate(ragged(7), 1, mode="autoregressive")
        of_runs.append(rows)
    (loop,) = engine.loops.all
    assert all(p.replay is not None for p in loop.passes.values())
    for others in of_runs[1:]:
        for (shape, logits), (its_shape, its) in zip(of_runs[0], others, strict=True):
            assert shape == its_shape
            assert_same(its, logits)


def test_hidden_states_of_prompts_are_those_of_launches(cupy: ModuleType) -> None:
    states: list[dict[int, Any]] = []

    class Keeping:
        hidden_layers = (0, 2)

        def __call__(self, context: Any, depth: int, topk: int) -> Any:
            for request in context.began:
                states[-1][request] = context.hidden_states[context.request_ids.index(request)]
            shape = (len(context.request_ids), depth, 1)
            return np.full(shape, -np.inf, np.float32), np.full(shape, -1, np.int32)

    engine = Engine(model("cupy"), Keeping(), depth=2, budget=2, max_batch=4)
    for _ in range(3):
        states.append({})
        engine.generate(ragged(12), 4)
    for request, wanted in states[0].items():
        for layer, rows in wanted.items():
            assert len(rows) == len(ragged(12)[request])
            for others in states[1:]:
                assert_same(others[request][layer].get(), rows.get())


def test_as_many_passes_are_kept_as_there_is_room_for(cupy: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[weakref.ref[PromptPass]] = []
    init = PromptPass.__init__

    def counted(self: Any, *arguments: Any) -> None:
        made.append(weakref.ref(self))
        init(self, *arguments)

    monkeypatch.setattr(PromptPass, "__init__", counted)
    monkeypatch.setattr("ddtree.engine.resident.KEPT_PASSES", 2)
    engine, used = Engine(model("cupy"), max_batch=1), []
    for _ in range(4):
        for width in (128, 8, 16, 32, 64):
            engine.generate([[1] * width] * 3, 2, mode="autoregressive")
        gc.collect()
        used.append(cupy.get_default_memory_pool().used_bytes())
    (loop,) = engine.loops.all
    assert len(loop.passes) == sum(ref() is not None for ref in made) == 2
    assert len(made) == 20
    assert used[-1] == used[1]


def test_inputs_are_not_written_while_they_are_being_copied(cupy: ModuleType) -> None:
    inputs = Inputs(cupy, {"a": ((1 << 20,), np.int32), "b": ((3, 5), np.int64)})
    slow, found = cupy.random.default_rng(0).random((2048, 2048)), []
    for i in range(6):
        for _ in range(4):  # the copies wait behind this
            slow = slow @ slow / 2048
        host = inputs.write()
        host["a"][...], host["b"][...] = i, -i
        inputs.send()
        found.append((inputs.arrays["a"].copy(), inputs.arrays["b"].copy()))
    for i, (a, b) in enumerate(found):
        assert (a == i).all()
        assert (b == -i).all()


def test_a_round_waits_for_nothing_and_keeps_to_the_callers_stream(cupy: ModuleType) -> None:
    allow_synchronize = importlib.import_module("cupyx").allow_synchronize
    wanted = expected(2, 40)
    engine = Engine(model("cupy"), OracleDrafter(wanted.tokens, VOCABULARY), depth=3, budget=6)
    engine.generate(prompts(2), 40)
    (loop,) = engine.loops.all
    streams = []
    replay = loop.replay
    assert replay is not None

    def watched(stream: Any = None) -> None:
        streams.append(cupy.cuda.get_current_stream().ptr)
        with warnings.catch_warnings():  # that it does not find every wait
            warnings.simplefilter("ignore")
            with allow_synchronize(False):
                replay(stream)

    loop.replay = watched
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        assert_tokens(engine.generate(prompts(2), 40), wanted)
    assert set(streams) == {stream.ptr}


def test_device_memory_does_not_grow(cupy: ModuleType) -> None:
    wanted = expected(7, 30)
    engine = Engine(model("cupy"), OracleDrafter(wanted.tokens, VOCABULARY), depth=5, budget=20, max_batch=2)
    used = []
    for _ in range(12):
        assert_tokens(engine.generate(prompts(7), 30), wanted)
        used.append(cupy.get_default_memory_pool().used_bytes())
    assert used[-1] == used[2]


@pytest.fixture
def held_by_pools(cupy: ModuleType, monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """Bytes that the pools of this process hold of the device, which others may use at the same time."""
    default, pool, sizes = cupy.get_default_memory_pool(), cupy.cuda.MemoryPool, [0]

    class Counted(cupy.cuda.Memory):  # type: ignore[misc, name-defined]
        def __init__(self, size: int) -> None:
            super().__init__(size)
            sizes[0] += size

        def __del__(self) -> None:
            sizes[0] -= self.size

    monkeypatch.setattr(cupy.cuda, "MemoryPool", lambda: pool(lambda size: cupy.cuda.MemoryPointer(Counted(size), 0)))

    def held() -> int:
        gc.collect()
        free_pools()
        default.free_all_blocks()
        return int(sizes[0] + default.total_bytes())

    return held


def test_a_graph_that_is_gone_gives_its_memory_back(cupy: ModuleType, held_by_pools: Callable[[], int]) -> None:
    out = cupy.zeros(1 << 20, np.float32)
    left = []

    def work() -> None:
        first = out + 1
        second = first * 2
        del first
        left.append((second - 1)[:10])  # which stays, in the middle of the pool's memory
        out[...] = second

    work()
    used = []
    for _ in range(8):
        replays = [captured(cupy, work) for _ in range(4)]
        for replay in replays:
            replay()
        assert held_by_pools() >= out.nbytes * 4
        del replay, replays
        left.clear()
        used.append(held_by_pools())
    assert max(used[1:]) <= used[0], used


def test_engines_that_come_and_go_keep_no_memory_of_the_device(
    cupy: ModuleType, held_by_pools: Callable[[], int]
) -> None:
    wanted = expected(3, 30)
    used = []
    for _ in range(6):
        engine = Engine(model("cupy"), OracleDrafter(wanted.tokens, VOCABULARY), depth=5, budget=20)
        for _ in range(3):
            assert_tokens(engine.generate(prompts(3), 30), wanted)
        for seed in range(6):  # more kinds of batches than an engine keeps
            for _ in range(2):
                engine.generate(prompts(3), 12, temperature=0.8, seed=seed)
        engine.loops.clear()
        used.append(held_by_pools())
    assert max(used[2:]) <= used[1] + (1 << 20), used


def test_unusable_logits_name_their_request_and_the_engine_goes_on(cupy: ModuleType) -> None:
    wanted = expected(2, 20)
    target = load_model(golden_bundle(), dtype="float64", backend="cupy")
    engine = Engine(target)
    norm = target._norm.copy()
    engine.generate(prompts(2), 20, mode="autoregressive")
    target._norm[...] = cupy.nan
    with pytest.raises(NonFiniteLogitsError, match="request 0"):
        engine.generate(prompts(2), 20, mode="autoregressive")
    target._norm[...] = norm
    assert_tokens(engine.generate(prompts(2), 20, mode="autoregressive"), wanted)


class Failing:
    def __init__(self, fault: str) -> None:
        self.fault, self.calls = fault, 0

    def __call__(self, context: Any, depth: int, topk: int) -> Any:
        self.calls += 1
        shape = (len(context.request_ids), depth, 1)
        log_probs, ids = np.full(shape, -1, np.float32), np.zeros(shape, np.int32)
        if self.calls == 4:
            if self.fault == "raises":
                raise RuntimeError("no draft")
            log_probs[1, 0] = np.nan
        return log_probs, ids


@pytest.mark.parametrize(
    ("fault", "error", "said"), [("raises", RuntimeError, "no draft"), ("nan", ValueError, "request 1.*NaN")]
)
def test_a_drafter_that_fails_loses_no_tokens(cupy: ModuleType, fault: str, error: Any, said: str) -> None:
    wanted = expected(3, 20)
    engine = Engine(model("cupy"), Failing(fault), depth=3, budget=3)
    with pytest.raises(error, match=said) as raised:
        engine.generate(prompts(3), 20)
    kept: Any = getattr(raised.value, "generation")  # noqa: B009 - unknown to its type
    for mine, its in zip(kept.tokens, wanted.tokens, strict=True):
        assert len(mine) >= 4
        assert_same(mine, its[: len(mine)])
    assert_tokens(engine.generate(prompts(3), 20), wanted)


def test_no_room_on_the_device_is_said_and_the_engine_goes_on(cupy: ModuleType) -> None:
    engine = Engine(model("cupy"))
    with pytest.raises(MemoryError, match=r"no room for a cache of .* prompts\[0\], the longest"):
        engine.generate(prompts(2), 2**30, mode="autoregressive")
    assert_tokens(engine.generate(prompts(2), 20, mode="autoregressive"), expected(2, 20))


@pytest.mark.parametrize("byte", [0xFF, 0x5A])
def test_guard_draft_is_the_references(cupy: ModuleType, monkeypatch: pytest.MonkeyPatch, byte: int) -> None:
    guard_draft = importlib.import_module("ddtree.kernels.cupy.guard_draft").guard_draft

    poison_outputs(monkeypatch, ["guard_draft"], byte)
    rng = np.random.default_rng(byte)
    for _ in range(300):
        B, L, K, V = rng.integers(1, 5), rng.integers(0, 12), rng.integers(1, 70), 80
        log_probs = -np.sort(rng.integers(0, 40, (B, L, K)) / 4, axis=-1).astype(np.float32)
        ids = rng.permuted(np.tile(np.arange(V), (B, L, 1)), axis=-1)[..., :K].astype(np.int32)
        remaining = rng.integers(-1, 3, B).astype(np.int32)
        for value, share in ((-np.inf, 0.02), (np.nan, 0.002), (1e-40, 0.001), (np.inf, 0.001)):
            log_probs[rng.random(log_probs.shape) < share] = value
        wrong = rng.random(ids.shape) < 0.002
        ids[wrong] = rng.choice([-1, V, 3], wrong.sum())
        wanted = reference.guard_draft(log_probs, ids, remaining, vocab_size=V)
        actual = guard_draft(*map(cupy.asarray, (log_probs, ids, remaining)), vocab_size=V)
        for mine, its in zip(actual, wanted, strict=True):
            assert_same(mine.get(), its)


def test_commit_round_is_the_references(cupy: ModuleType) -> None:
    commit_round = importlib.import_module("ddtree.kernels.cupy.commit_round").commit_round

    rng = np.random.default_rng(0)
    for _ in range(200):
        B, L, K = int(rng.integers(1, 9)), int(rng.integers(0, 9)), int(rng.integers(1, 5))
        log_probs = -np.sort(rng.random((B, L, K)).astype(np.float32), axis=-1)
        ids = rng.permuted(np.tile(np.arange(9), (B, L, 1)), axis=-1)[..., :K].astype(np.int32)
        roots = rng.integers(0, 9, B).astype(np.int32)
        tree = reference.build_tree(log_probs, ids, roots, budget=int(rng.integers(0, 20)))
        remaining = rng.integers(0, 12, B).astype(np.int32)
        choices = rng.integers(-1, 9, tree.token_ids.shape).astype(np.int32)
        choices[rng.random(choices.shape) < 0.5] = int(ids[0, 0, 0]) if ids.size else 0
        stops = np.array([4], np.int32)
        acceptance = reference.accept_tree(tree, choices, remaining=remaining, stop_token_ids=stops)
        lengths = rng.integers(1, 20, B).astype(np.int32)
        ints = {name: rng.integers(0, 9, B).astype(np.int32) for name in ("prompt_lens", "kept", "running")}
        state = RoundState(
            tokens=rng.integers(0, 9, (B, 40)).astype(np.int32), lengths=lengths, roots=roots, remaining=remaining,
            prefix_lens=lengths - 1, keys=np.zeros(B, np.int64), page_table=np.zeros((B, 1), np.int32), **ints,
        )  # fmt: skip
        faults = rng.integers(0, 5, (B, 2)).astype(np.int32)
        record = np.full((B, L + 4), 77, np.int32)
        arrays = {f.name: cupy.asarray(getattr(state, f.name)) for f in fields(state) if f.name != "hidden_states"}
        on_gpu = RoundState(**arrays)
        given = [
            replace(r, **{k: cupy.asarray(v) for k, v in vars(r).items() if isinstance(v, np.ndarray)})
            for r in (tree, acceptance)
        ]
        its_record = cupy.asarray(record)
        commit_round(on_gpu, *given, cupy.asarray(faults), its_record)
        reference.commit_round(state, tree, acceptance, faults, record)
        assert_same(its_record.get(), record)
        for name in arrays:
            assert_same(getattr(on_gpu, name).get(), getattr(state, name))


def test_a_capture_that_fails_leaves_the_stream_usable(cupy: ModuleType) -> None:
    x = cupy.zeros(4)

    def waits() -> None:
        x[...] = x + 1
        x.sum().get()

    with pytest.raises(Exception, match=r"."):
        captured(cupy, waits)
    assert x.get().tolist() == [0.0] * 4
    replay = captured(cupy, lambda: x.__iadd__(1))
    replay()
    replay()
    assert Readbacks(cupy).start([x]).wait()[0].tolist() == [2.0] * 4
