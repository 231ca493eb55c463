"""The soak: it passes where all is right, and tells wrong tokens, swallowed faults and growing memory."""

import json
import math
import os
from types import SimpleNamespace

import click
import numpy as np
import pytest
from click.testing import CliRunner

from ddtree import build_tree
from ddtree.analysis import precision
from ddtree.analysis import soak as soak_module
from ddtree.analysis.benchmarks import decoding
from ddtree.analysis.soak import FAULTS, WildDrafter, fit_growth, main, soak
from ddtree.engine import Engine, Generation, NonFiniteLogitsError
from ddtree.kernels import numba_cpu
from ddtree.model import golden_bundle, load_model
from ddtree.property_tests.compare import assert_same
from ddtree.property_tests.project.on_gpu import gpu_library
from ddtree.protocols import DraftContext, ResidentState


@pytest.mark.parametrize("resident", [True, False])
def test_a_short_soak_finds_nothing_and_has_injected_every_fault(resident, monkeypatch):
    monkeypatch.setattr(soak_module, "MOST_NEW", 24)
    record = soak(100, resident=resident, texts=6, seed=1)
    assert record.faults == []
    assert record.rounds >= 100
    assert record.requests > 0 < record.tokens
    assert all(record.injected[fault] > 0 for fault in FAULTS), record.injected
    assert len(record.memory["host"]) == record.runs == len(record.sampled_rounds) == len(record.graphs)
    assert not record.growth["host"]["judged"]


class Wrong:
    """Operations that are right but for the rows of accepted nodes, which stay where they were."""

    array_kind = "numpy"
    build_tree = staticmethod(numba_cpu.build_tree)
    tree_positions = staticmethod(numba_cpu.tree_positions)
    choose_tokens = staticmethod(numba_cpu.choose_tokens)
    accept_tree = staticmethod(numba_cpu.accept_tree)
    verify_attention = staticmethod(numba_cpu.verify_attention)

    @staticmethod
    def compact_cache(kv_cache, page_table, prefix_lens, acceptance):
        """Do nothing."""


def test_wrong_tokens_are_faults_with_their_distance_from_a_tie(monkeypatch):
    monkeypatch.setattr(soak_module, "MOST_NEW", 24)
    monkeypatch.setattr(soak_module, "MOST_PROMPT", 9)
    backend = "ddtree.property_tests.project.test_soak:Wrong"
    record = soak(90, backend=backend, models=("golden",), texts=4, most_waited=0)
    wrong = [fault for fault in record.faults if "differs at new token" in fault]
    assert wrong
    assert all("deviations from a tie" in fault for fault in wrong)


def test_an_error_in_an_undisturbed_run_is_a_fault(monkeypatch):
    def broken(self, *arguments, **options):
        raise RuntimeError("out of order")

    monkeypatch.setattr(soak_module._Soak, "generate", broken)
    monkeypatch.setattr(soak_module._Soak, "next_subject", lambda self: self.subjects[0])
    running = SimpleNamespace(left=3)

    def count_down(self, rounds, engines):
        running.left -= 1
        self.rounds.append(rounds)
        self.series["host"].append(1.0)
        if not running.left:
            raise KeyboardInterrupt

    monkeypatch.setattr(soak_module._Memory, "sample", count_down)
    record = soak_module.Record({"dtype": "float32", "backend": None, "seed": 0, "resident": None}, {})
    whole = soak_module._Soak(("golden",), record, 2, 48)
    with pytest.raises(KeyboardInterrupt):
        whole.run(100, 0, lambda done: None)
    assert sum("raised RuntimeError: out of order" in fault for fault in record.faults) >= 3


@pytest.mark.parametrize(
    ("fault", "error", "told"),
    [
        ("logits of NaN", ValueError("request 1"), "raised ValueError"),
        ("logits of NaN", NonFiniteLogitsError("request 1: NaN"), "the error has no generation"),
        ("draft over 0", ValueError("log_probs must be at most 0"), "the message names no request"),
        ("draft over 0", ValueError("drafter Wild, request 3: at most 0"), ""),
        ("drafter raises", soak_module.InjectedError("told to"), ""),
    ],
)
def test_errors_must_be_of_their_kind_name_a_request_and_carry_tokens(fault, error, told):
    if "no generation" not in told:
        error.generation = Generation([], [])
    assert told in soak_module._Soak.wrongly_told(None, None, fault, error)  # it looks at the error alone
    assert bool(told) == bool(soak_module._Soak.wrongly_told(None, None, fault, error))


def test_a_soak_that_stops_says_where_and_what_it_had(monkeypatch):
    runs = iter([None, None])
    undisturbed, kept = soak_module._Soak.undisturbed, []

    def failing(self, subject, run):
        next(runs)  # the third is no run any more
        undisturbed(self, subject, run)

    monkeypatch.setattr(soak_module._Soak, "undisturbed", failing)
    monkeypatch.setattr(soak_module, "WRITTEN_EVERY", 1)
    record = soak(500, models=("golden",), texts=3, written=lambda record: kept.append(record.rounds))
    (fault,) = record.faults
    assert fault.startswith("the soak stopped in run 2: StopIteration")
    assert "in failing" in fault
    assert record.runs == len(kept) == 2
    assert kept[-1] == record.rounds > 0
    assert record.seconds > 0


def test_a_soak_where_nothing_goes_any_more_ends(monkeypatch):
    def dead(self, *arguments, **options):
        raise RuntimeError("an illegal memory access was encountered")

    monkeypatch.setattr(soak_module._Soak, "generate", dead)
    monkeypatch.setattr(soak_module, "MOST_FAULTS", 6)
    record = soak(500, models=("golden",), texts=2)
    assert record.rounds == 0
    assert "illegal memory access" in record.faults[0]
    assert "faults are enough" in record.faults[-1]


def test_growth_is_a_line_after_warm_up():
    rounds, none = list(range(0, 20_000, 100)), [0] * 200
    rising = [100.0 + 20 * r / 20_000 for r in rounds]
    assert fit_growth(rounds, rising, none).grown == pytest.approx(15, rel=0.02)
    assert not fit_growth(rounds, rising, none).held
    warm = [100.0 + min(r, 4_000) / 40 for r in rounds]  # grows, and stops growing
    assert fit_growth(rounds, warm, none).grown == pytest.approx(0, abs=1e-9)
    assert fit_growth(rounds, warm, none).held
    assert fit_growth(rounds, [1e4 + 90 * r / 20_000 for r in rounds], none).held  # under one in a hundred
    assert not fit_growth(rounds, rising, none, warm_up=190).judged
    assert fit_growth(rounds[:20], rising[:20], none[:20]).held
    assert fit_growth([], [], []).held


def test_what_captured_graphs_take_is_no_growth():
    rounds = list(range(0, 20_000, 100))
    graphs = [round(300 * (1 - math.exp(-r / 3_000))) for r in rounds]  # slowly as many as ever
    kept = [400 + 0.7 * n for n in graphs]
    assert fit_growth(rounds, kept, graphs).grown == pytest.approx(0, abs=1e-6)
    leaking = [mib + 20 * r / 20_000 for mib, r in zip(kept, rounds, strict=True)]
    assert fit_growth(rounds, leaking, graphs).grown == pytest.approx(15, rel=0.02)
    assert not fit_growth(rounds, leaking, graphs).held
    noise = np.random.default_rng(0).normal(0, 2, (200, len(rounds)))
    judged = [fit_growth(rounds, (np.array(kept) + one).tolist(), graphs) for one in noise]
    assert sum(line.held for line in judged) > 190
    judged = [fit_growth(rounds, (np.array(leaking) + one).tolist(), graphs) for one in noise]
    assert sum(not line.held for line in judged) > 190


def test_memory_that_graphs_which_are_gone_leave_to_an_allocator_is_no_growth():
    rounds = list(range(0, 20_000, 100))
    graphs = [round(300 * min(1, r / 9_000) - 60 * max(0, r - 12_000) / 8_000) for r in rounds]  # rise, stay, fall
    kept = (400 + 0.7 * np.maximum.accumulate(graphs)).tolist()
    assert fit_growth(rounds, kept, graphs).grown == pytest.approx(0, abs=1e-6)
    assert not fit_growth(rounds, [mib + 20 * r / 20_000 for mib, r in zip(kept, rounds, strict=True)], graphs).held


@pytest.mark.parametrize("leak", [0, 30, 90])
def test_memory_that_goes_with_graphs_hides_no_growth(leak):
    rounds = list(range(0, 20_000, 100))
    graphs = [round(200 * min(1, r / 8_000) - 100 * max(0, r - 10_000) / 10_000) for r in rounds]  # rise, then fall
    memory = [400 + 0.7 * n + leak * r / 20_000 for n, r in zip(graphs, rounds, strict=True)]
    for noise in (0.0, 1.0):
        noisy = (np.array(memory) + np.random.default_rng(0).normal(0, noise, len(memory))).tolist()
        assert fit_growth(rounds, noisy, graphs).held is (leak == 0)


def test_graphs_that_rise_with_the_rounds_leave_nothing_to_judge():
    rounds = list(range(0, 20_000, 100))
    for memory in ([1000.0] * 200, [400.0 + r / 100 for r in rounds]):
        assert not fit_growth(rounds, memory, [r // 100 for r in rounds]).judged
    slower = [300 - round(60 * math.exp(-r / 3_000)) for r in rounds]
    assert fit_growth(rounds, [500.0 - n for n in slower], slower).grown < 0  # which no graph can be thanked for


def test_growing_memory_is_a_fault(monkeypatch):
    leaked = iter(range(10**6))
    monkeypatch.setattr(soak_module, "_resident_bytes", lambda: (100 + 5 * next(leaked)) << 20)
    monkeypatch.setattr(soak_module, "WARM_UP", 0)
    monkeypatch.setattr(soak_module, "JUDGED_SAMPLES", 3)
    monkeypatch.setattr(soak_module, "MOST_NEW", 6)
    monkeypatch.setattr(soak_module, "MOST_PROMPT", 6)
    monkeypatch.setattr(soak_module, "MOST_WAITED", 6)
    record = soak(30, models=("golden",), texts=4)
    assert any("memory of the host grew by" in fault for fault in record.faults)


def test_memory_of_the_host_is_what_this_process_has():
    before = soak_module._resident_bytes()
    held = np.ones(64 << 20, np.uint8)
    assert soak_module._resident_bytes() - before > 32 << 20
    assert held.all()


def test_wild_drafts_are_the_same_on_the_host_and_in_slots_and_are_drafts():
    rng, (L, K, V) = np.random.default_rng(0), (5, 9, 50)
    drafter = WildDrafter(V, seed=2)
    texts = [rng.integers(0, V, n).astype(np.int32) for n in (40, 12, 25)]
    drafter.texts = dict(enumerate(texts))
    lengths, *others = (np.zeros(3, np.int32) for _ in range(5))
    state = ResidentState(np.zeros((3, 48), np.int32), lengths, *others)
    slots = drafter.open_resident(state, L, K)
    for slot, request in enumerate((2, 0, 1)):
        slots.begin(slot, request, texts[request][:5], 5, {})
    for committed in range(6, 14):
        state.lengths[:] = [min(committed, len(texts[r])) for r in (2, 0, 1)]
        tokens = [texts[r][:n] for r, n in zip((2, 0, 1), state.lengths, strict=True)]
        roots = np.array([row[-1] for row in tokens], np.int32)
        context = DraftContext([2, 0, 1], tokens, roots, [{}] * 3, [], [])
        host, here = drafter(context, L, K), slots.draft()
        known = [len(texts[r]) - n for r, n in zip((2, 0, 1), state.lengths, strict=True)]
        assert_same(here[0], host[0], "log_probs")
        for b, left in enumerate(known):  # past a text's end anything may be drafted
            assert_same(here[1][b, :left], host[1][b, :left], "token_ids")
        for log_probs, token_ids in (host, here):
            build_tree(log_probs, token_ids, roots, budget=20, vocab_size=V, validate=True)
    drafts = drafter.table(np, L, K)
    assert (drafts.log_probs[:, :, 0] == -np.inf).mean() == pytest.approx(0.06, abs=0.03)
    assert (drafts.offsets == 0).any(-1).mean() == pytest.approx(drafter.right, abs=0.05)
    drafter.spoil(1.0)
    assert (drafts.log_probs[:, :, 0] == 1.0).all()
    drafter.mend()
    assert_same(drafter.table(np, L, K).log_probs, WildDrafter(V, seed=2).table(np, L, K).log_probs)


def test_wild_drafts_are_accepted_here_and_there():
    model = load_model(golden_bundle())
    prompt = [np.arange(9, dtype=np.int32)]
    expected = Engine(model).generate(prompt, 40, mode="autoregressive").tokens
    drafter = WildDrafter(model.vocab_size)
    drafter.texts = {0: np.concatenate([prompt[0], expected[0]])}
    generation = Engine(model, drafter, depth=5, budget=12).generate(prompt, 40)
    assert_same(generation.tokens[0], expected[0])
    assert 1.3 < (generation.tau or 0) < 4


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_short_soak_on_a_gpu(dtype):
    gpu_library("cupy")
    record = soak(300, backend="cupy", dtype=dtype, texts=8)
    assert record.faults == []
    assert all(record.injected[fault] > 0 for fault in FAULTS), record.injected
    assert {"host", "GPU", "GPU arrays"} == record.memory.keys()
    assert all(len(series) == record.runs and min(series) > 0 for series in record.memory.values())


def test_a_backend_that_is_not_here_leaves_no_folder(tmp_path):
    here, model = str(tmp_path / "here"), str(golden_bundle())
    for command, words, status in (
        (soak_module.main, ["--output", here], 2),
        (decoding.main, ["--output", here], 2),
        (precision.main, [model, "--dtype", "float32", "--against", "float64", "--out", here], 1),
    ):
        told = CliRunner().invoke(command, ["--backend", "no.such.module", *words])
        assert told.exit_code == status
        assert "no.such.module" in told.output
        assert not (tmp_path / "here").exists()


@pytest.mark.parametrize("most_new", [1, 0, -3])
def test_requests_of_no_round_are_no_soak(most_new):
    with pytest.raises(ValueError, match="most_new must be in 2"):
        soak(20, models=("golden",), texts=2, most_new=most_new)


def test_what_a_sanitizer_finds_is_a_fault(tmp_path, monkeypatch):
    """A tool in its place that finds something in one of the four."""
    tool = tmp_path / "compute-sanitizer"
    tool.write_text('#!/bin/sh\necho "$@"\ntest "$2" != synccheck || exit 9\n')
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    record, kept = soak_module.Record({"dtype": "bfloat16"}, {}), []
    soak_module.sanitized(record, 12, lambda record: kept.append(len(record.sanitizer)))
    assert kept == [1, 2, 3, 4]
    assert record.sanitizer == {
        "memcheck": "nothing found", "racecheck": "nothing found", "initcheck": "nothing found",
        "synccheck": "found something",
    }  # fmt: skip
    (fault,) = record.faults
    assert fault.startswith("compute-sanitizer synccheck:\n--tool synccheck --error-exitcode 9")
    assert "exercise('synccheck', 12, 'bfloat16')" in fault


def test_without_a_sanitizer_it_is_told(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(click.ClickException, match="compute-sanitizer is not on the PATH"):
        soak_module.sanitized(soak_module.Record({"dtype": "float32"}, {}), 5)


def test_the_command_writes_what_it_found_and_its_exit_status_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr(soak_module, "MOST_NEW", 8)
    monkeypatch.setattr(soak_module, "MOST_WAITED", 0)
    monkeypatch.setattr(soak_module, "MOST_PROMPT", 9)
    run = CliRunner(env={"COLUMNS": "120"}).invoke
    short = ["--rounds", "8", "--texts", "3", "--model", "golden"]
    result = run(main, [*short, "--output", str(tmp_path / "here")], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    assert "tokens compared" in result.stdout
    written = json.loads((tmp_path / "here" / "soak.json").read_text())
    assert written["faults"] == []
    assert written["rounds"] >= 8
    assert written["settings"]["models"] == ["golden"]
    assert (tmp_path / "here" / "soak.svg").stat().st_size > 1000
    wrong = run(main, [*short, "--rounds", "16", "--backend", "ddtree.property_tests.project.test_soak:Wrong"])
    assert wrong.exit_code == 1
    assert "differs at new token" in wrong.stdout
    nowhere = run(main, [*short, "--backend", "nowhere"])
    assert nowhere.exit_code == 2
    assert "nowhere" in nowhere.output
    low = run(main, [*short, "--dtype", "bfloat16"])
    assert low.exit_code == 2
    assert "bfloat16" in low.output
    assert os.listdir(tmp_path) == ["here"]
