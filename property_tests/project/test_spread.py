"""Many prompts over several processes: one engine's tokens, whoever dies, raises or is interrupted on the way."""

import functools
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

from ddtree.drafters import NgramDrafter
from ddtree.engine import Engine, FactoryFailedError, NonFiniteLogitsError, RequestsFailedError, generate_many
from ddtree.engine.spread import _listed, visible_devices
from ddtree.model import golden_bundle, load_model
from ddtree.property_tests.compare import assert_same
from ddtree.property_tests.project.on_gpu import gpu_library
from ddtree.property_tests.targets import VOCABULARY, AttentionTarget

PROMPTS = [np.random.default_rng(i).integers(0, VOCABULARY - 2, 2 + 3 * i % 7) for i in range(9)]
DEADLY, FAULTY = VOCABULARY - 1, VOCABULARY - 2
TWO = ["cpu", "cpu"]
SAMPLED = {"temperature": 0.9, "top_p": 0.9, "seed": 3}


def make_engine(folder=None):
    if folder is not None:
        (Path(folder) / str(os.getpid())).touch()
    return Engine(AttentionTarget(), NgramDrafter(), depth=3, budget=6, backend="reference")


class Touchy(AttentionTarget):
    """Ends its process, or gives NaN, where a prompt begins with a token."""

    def forward(self, tree, cache, **options):
        first = tree.token_ids[cache.prefix_lens == 0, 0]
        if DEADLY in first:
            os._exit(3)
        output = super().forward(tree, cache, **options)
        output.logits[(tree.token_ids[:, 0] == FAULTY) & (cache.prefix_lens == 0)] = np.nan
        return output


def make_touchy():
    return Engine(Touchy(), NgramDrafter(), depth=3, budget=6, backend="reference")


def broken_factory():
    raise LookupError("the weights are not on this machine")


def not_an_engine():
    return 7


def assert_equal_generations(got, expected):
    assert [row.tolist() for row in got.tokens] == [row.tolist() for row in expected.tokens]
    assert got.finish_reasons == expected.finish_reasons
    assert [r.tolist() for r in got.tokens_per_round] == [r.tolist() for r in expected.tokens_per_round]
    assert got.prompt_lens == expected.prompt_lens


def test_two_processes_give_what_one_engine_gives(tmp_path):
    expected = make_engine().generate(PROMPTS, 12, [4], **SAMPLED)
    emitted: list[Any] = []
    factory = functools.partial(make_engine, str(tmp_path))
    got = generate_many(factory, PROMPTS, 12, [4], devices=TWO, share=2, on_emission=emitted.append, **SAMPLED)
    assert_equal_generations(got, expected)
    assert sorted(e.request_id for e in emitted) == list(range(len(PROMPTS)))
    assert all(e.token_ids.tolist() == got.tokens[e.request_id].tolist() for e in emitted)
    assert {e.finish_reason for e in emitted} == set(expected.finish_reasons) == {"stop", "length"}
    assert {r for round_ in got.rounds for r in round_.request_ids} == set(range(len(PROMPTS)))
    assert sum(len(r.request_ids) for r in got.rounds) == got.num_rounds == expected.num_rounds
    assert got.seconds.keys() == expected.seconds.keys()
    assert got.seconds["forward"] > 0
    built = [int(path.name) for path in tmp_path.iterdir()]
    assert len(built) == 2  # once a process, however many shares
    assert os.getpid() not in built


def test_an_executor_of_ones_own_does_the_work_and_keeps_the_engine(tmp_path):
    factory = functools.partial(make_engine, str(tmp_path))
    expected = make_engine().generate(PROMPTS, 8, request_ids=range(50, 59), **SAMPLED)
    with ThreadPoolExecutor(1) as pool:
        for run in range(2):
            got = generate_many(factory, PROMPTS, 8, executor=pool, share=4, request_ids=range(50, 59), **SAMPLED)
            assert_equal_generations(got, expected)
            assert len(list(tmp_path.iterdir())) == (run == 0)
            (tmp_path / str(os.getpid())).unlink(missing_ok=True)


def test_no_prompts_and_modes():
    with ThreadPoolExecutor(2) as pool:
        assert generate_many(make_engine, [], 5, executor=pool).tokens == []
        one = generate_many(make_engine, PROMPTS, 5, mode="autoregressive", executor=pool)
    assert_equal_generations(one, make_engine().generate(PROMPTS, 5, mode="autoregressive"))


def test_longest_prompts_go_first_and_the_last_shares_are_small():
    class Watching(ThreadPoolExecutor):
        shares: ClassVar[list[list[int]]] = []

        def submit(self, function, /, *arguments, **options):
            self.shares.append(list(arguments[2]))
            return super().submit(function, *arguments, **options)

    with Watching(1) as pool:
        generate_many(make_engine, PROMPTS, 2, executor=pool, share=4)
    order = [key for share in Watching.shares for key in share]
    assert [len(share) for share in Watching.shares] == [4, 4, 1]
    assert [len(PROMPTS[i]) for i in order] == sorted(map(len, PROMPTS), reverse=True)


def test_a_killed_worker_names_its_requests_and_loses_no_others():
    prompts = [*PROMPTS, np.array([DEADLY])]
    with pytest.raises(RequestsFailedError, match=r"(?s)request 9: .*its worker died.*others?.*generation") as caught:
        generate_many(make_touchy, prompts, 6, devices=TWO, share=1)
    assert list(caught.value.reasons) == [9]
    generation, expected = caught.value.generation, make_engine().generate(PROMPTS, 6)
    assert_same(generation.tokens[9], np.zeros(0, np.int32))
    assert generation.finish_reasons == [*expected.finish_reasons, "error"]
    assert [t.tolist() for t in generation.tokens[:9]] == [t.tolist() for t in expected.tokens]


def test_where_every_worker_dies_what_was_not_begun_is_named_too():
    with pytest.raises(RequestsFailedError, match=r"(?s)request 0: .*died.*requests 1, 2: no worker is left") as caught:
        generate_many(make_touchy, [[DEADLY, 1], [1], [2]], 3, devices=["cpu"], share=1)
    assert [len(t) for t in caught.value.generation.tokens] == [0, 0, 0]


def test_a_pool_of_ones_own_that_breaks_names_all_that_it_had():
    with ProcessPoolExecutor(1) as pool, pytest.raises(RequestsFailedError, match=r"requests? 0, 1: the executor"):
        generate_many(make_touchy, [[DEADLY, 1], [1]], 3, executor=pool)


def test_an_engine_that_raises_fails_the_requests_at_fault_alone():
    prompts = [*PROMPTS[:5], np.array([FAULTY, 1, 1]), *PROMPTS[5:]]
    with ThreadPoolExecutor(1) as pool, pytest.raises(RequestsFailedError) as caught:
        generate_many(make_touchy, prompts, 6, executor=pool, share=4)
    assert list(caught.value.reasons) == [5]
    assert NonFiniteLogitsError.__name__ in caught.value.reasons[5]
    assert "after position 2" in str(caught.value)
    generation = caught.value.generation
    assert generation.finish_reasons[5] == "error"
    del generation.tokens[5]
    assert [t.tolist() for t in generation.tokens] == [t.tolist() for t in make_engine().generate(PROMPTS, 6).tokens]


def test_what_a_callback_raises_carries_what_was_done():
    emitted = []

    def on_emission(emission):
        emitted.append(emission.request_id)
        if len(emitted) == 3:
            raise KeyError("the disk is full")

    with ThreadPoolExecutor(1) as pool, pytest.raises(KeyError) as caught:
        generate_many(make_engine, PROMPTS, 4, executor=pool, share=1, on_emission=on_emission)
    tokens = caught.value.generation.tokens  # type: ignore[attr-defined]
    expected = make_engine().generate(PROMPTS, 4).tokens
    assert {i for i, row in enumerate(tokens) if row.size} == {*emitted}
    assert all(tokens[i].tolist() == expected[i].tolist() for i in emitted)


def test_a_token_outside_the_vocabulary_fails_its_own_request():
    with ThreadPoolExecutor(1) as pool, pytest.raises(RequestsFailedError, match=r"request 1: .*must be in 0 … 10"):
        generate_many(make_engine, [[1], [VOCABULARY]], 2, executor=pool)


def test_a_factory_that_raises_says_so_with_its_trace():
    with pytest.raises(FactoryFailedError, match=r"(?s)make_engine raised LookupError on CPU process 0: .*broken_f"):
        generate_many(broken_factory, [[1]], 2, devices=["cpu"])
    with ThreadPoolExecutor(1) as pool, pytest.raises(FactoryFailedError, match="must return an Engine, got int"):
        generate_many(not_an_engine, [[1]], 2, executor=pool)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"make_engine": lambda: 1}, TypeError, "make_engine must be picklable.*a function of a module"),
        ({"make_engine": 5}, TypeError, "make_engine must be callable.*got int"),
        ({"prompts": [[]]}, ValueError, r"prompts\[0\] must have at least one token"),
        ({"prompts": [[1], [-1]]}, ValueError, r"prompts\[1\]\[0\] must be in 0"),
        ({"max_new_tokens": 0}, ValueError, "max_new_tokens must be in 1 "),
        ({"share": 0}, ValueError, "share must be in 1 "),
        ({"request_ids": [1, 2]}, ValueError, "request_ids must have one entry a prompt, 1, got 2"),
        ({"mode": "trees"}, ValueError, "mode must be one of .*got 'trees'"),
        ({"temperature": -1.0}, ValueError, "temperature must be"),
        ({"stop_token_ids": [99]}, ValueError, r"stop_token_ids\[0\] must be in"),
        ({"executor": 3}, TypeError, "executor must be a concurrent.futures.Executor, got int"),
        ({"devices": ["cpu"]}, ValueError, "devices must be left out with an executor"),
        ({"devices": [], "executor": None}, ValueError, "devices must have one entry or more"),
    ],
)
def test_wrong_arguments_are_named(arguments, error, message):
    given = {"make_engine": make_engine, "prompts": [[1]], "max_new_tokens": 2}
    with ThreadPoolExecutor(1) as pool, pytest.raises(error, match=message):
        generate_many(**{**given, "executor": pool, **arguments})


def test_devices_are_numbers_of_visible_gpus(monkeypatch):
    monkeypatch.setattr("ddtree.engine.spread.visible_devices", lambda: ["3", "GPU-5ab"])
    from ddtree.engine.spread import _device_names

    assert _device_names(None) == [("GPU 0", "3"), ("GPU 1", "GPU-5ab")]
    assert _device_names(["1", 0, "cpu"]) == [("GPU 1", "GPU-5ab"), ("GPU 0", "3"), ("CPU process 2", "")]
    for wrong, message in (([2], r"devices\[0\] must be in 0 … 1"), ([0, "0"], "not named before"), (["x"], "devices")):
        with pytest.raises((ValueError, TypeError), match=message):
            _device_names(wrong)


def test_without_a_gpu_the_default_devices_say_what_to_pass(monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(ValueError, match=r"devices must name CUDA devices.*pass devices=\['cpu', 'cpu'\]"):
        visible_devices()


def test_runs_of_requests_are_drawn_together():
    assert _listed([0, 1, 2, 3, 7, 9, 10]) == "0 … 3, 7, 9, 10"


UNGUARDED = """
from functools import partial
from ddtree.engine import Engine, ScriptedTarget, generate_many

make_engine = partial(Engine, ScriptedTarget([range(9)], 9))
generate_many(make_engine, [[0]], 3, mode="autoregressive", devices=["cpu"])
"""


def test_a_script_that_would_start_itself_again_is_told_how_it_must_call(tmp_path):
    (tmp_path / "run.py").write_text(UNGUARDED)
    done = subprocess.run(
        [sys.executable, str(tmp_path / "run.py")], capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 1
    assert "request 0: CPU process 0: its worker died" in done.stderr
    assert "in a script, the call must stand below if __name__ == '__main__'" in done.stderr


ENDLESS = """
import sys, time
from ddtree.engine import Engine, ScriptedTarget, generate_many

class Slow(ScriptedTarget):
    def forward(self, *arguments, **options):
        time.sleep(60)

def make_engine(folder=sys.argv[1]):
    import os, pathlib
    (pathlib.Path(folder) / str(os.getpid())).touch()
    return Engine(Slow([[0, 1]], 3))

if __name__ == "__main__":
    generate_many(make_engine, [[0], [0]], 1, mode="autoregressive", devices=["cpu", "cpu"], share=1)
"""


def gone(pid):
    status = Path(f"/proc/{pid}/status")
    return not status.exists() or "State:\tZ" in status.read_text()


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_children_end_with_the_process_that_asked(tmp_path, how):
    (tmp_path / "run.py").write_text(ENDLESS)
    (tmp_path / "pids").mkdir()
    command = [sys.executable, str(tmp_path / "run.py"), str(tmp_path / "pids")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as parent:
        until = time.monotonic() + 60
        while len(children := list((tmp_path / "pids").iterdir())) < 2 and time.monotonic() < until:
            time.sleep(0.05)
        assert len(children) == 2
        parent.send_signal(how)
        parent.communicate(timeout=30)  # it does not wait for a minute's pass
    until = time.monotonic() + 30
    while not all(gone(path.name) for path in children) and time.monotonic() < until:
        time.sleep(0.05)
    assert all(gone(path.name) for path in children)


CLUSTER = """
from dask.distributed import Client, LocalCluster
from ddtree.engine import RequestsFailedError, generate_many
from ddtree.property_tests.project.test_spread import DEADLY, PROMPTS, make_engine, make_touchy

if __name__ == "__main__":
    options = dict(n_workers=2, threads_per_worker=1, dashboard_address=None, worker_dashboard_address=None)
    expected = [row.tolist() for row in make_engine().generate(PROMPTS, 6).tokens]
    with LocalCluster(**options) as cluster, Client(cluster) as client:
        got = generate_many(make_engine, PROMPTS, 6, executor=client.get_executor(), share=2)
        assert [row.tolist() for row in got.tokens] == expected
        try:
            generate_many(make_touchy, [*PROMPTS, [DEADLY]], 6, executor=client.get_executor(retries=0), share=1)
        except RequestsFailedError as error:
            assert list(error.reasons) == [9], error
            assert [row.tolist() for row in error.generation.tokens] == [*expected, []]
            print("the same")
"""


def test_a_dask_cluster_gives_the_same_and_a_killed_worker_loses_no_others(tmp_path):
    pytest.importorskip("distributed", reason="optional library distributed is not installed")
    (tmp_path / "run.py").write_text(CLUSTER)
    done = subprocess.run(
        [sys.executable, str(tmp_path / "run.py")], capture_output=True, text=True, check=False, timeout=300
    )
    assert done.stdout.endswith("the same\n"), done.stderr[-3000:]


def make_golden(backend):
    return Engine(load_model(golden_bundle(), dtype="float64", backend=backend), NgramDrafter(), depth=4, budget=8)


def test_every_visible_gpu_gives_what_one_gives():
    gpu_library("cupy")
    prompts = [row.tolist() for row in np.random.default_rng(0).integers(0, 512, (24, 9))]
    factory = functools.partial(make_golden, "cupy")
    got = generate_many(factory, prompts, 24, share=4)
    expected = factory().generate(prompts, 24)
    assert_equal_generations(got, expected)
