"""The decoding benchmark: each section runs, each mode's tokens are compared, and what fails is told with the rest."""

import importlib.util
import json
from dataclasses import replace

import pytest
from click.testing import CliRunner

from ddtree.analysis import figures
from ddtree.analysis.benchmarks import decoding, decoding_report
from ddtree.analysis.benchmarks.decoding import QUICK, Report, Speed, main, measure, read_json, write_json
from ddtree.analysis.benchmarks.decoding_report import page, targets
from ddtree.analysis.margins import BOUNDS
from ddtree.costs import CostModel, measure_passes
from ddtree.engine import Engine
from ddtree.property_tests.project.on_gpu import gpu_library

TINY = "0.1 M"
WITHOUT_PEER = tuple(section for section in decoding.SECTIONS if section != "peer")


@pytest.fixture(scope="module")
def report():
    return measure([TINY], ["float32"], sizes=QUICK, sections=WITHOUT_PEER)


def test_every_section_measures_what_it_says(report):
    assert report.faults == []
    sections = {s.section: [t for t in report.speeds if t.section == s.section] for s in report.speeds}
    assert [(s.batch, s.new_tokens) for s in sections["autoregressive"]] == [(1, QUICK.new), (1, QUICK.long)]
    assert [s.who for s in sections["tree"]] == [f"DDTree, {budget} nodes" for budget in QUICK.budgets]
    assert [s.batch for s in sections["batch"]] == list(QUICK.batches)
    assert all(s.tau == 5.5 for s in sections["tree"])  # 12 tokens: the prefill's, 8 and 3
    assert all(s.tau == 1.0 for s in (*sections["autoregressive"], *sections["batch"]))
    assert all(len(s.seconds) == QUICK.repeats and min(s.seconds) > 0 for s in report.speeds)
    assert report.compared == 2 + len(QUICK.budgets) + sum(QUICK.batches)
    (passes,) = report.passes
    assert passes["how"] == "wall clock"
    assert {*zip(passes["nodes"], passes["contexts"], strict=True)} == {
        (n, c) for n in QUICK.nodes for c in QUICK.contexts
    }
    assert report.round_us["ddtree"] > 0
    if importlib.util.find_spec("torch") is None:
        assert report.left_out == ["the published loop: torch is not installed"]
    else:
        parts = [us for what, us in report.round_us.items() if what.startswith("of that, ") and "host" in what]
        assert len(parts) == 2
        assert report.round_us["published loop"] == pytest.approx(sum(parts))


def test_resident_rounds_give_the_same_tokens_and_rounds(monkeypatch):
    def resident(*arguments, **options):
        return Engine(*arguments, **options, resident=True)

    monkeypatch.setattr(decoding, "Engine", resident)
    report = measure([TINY], ["float32"], sizes=QUICK, sections=("autoregressive", "tree", "batch", "rounds"))
    assert report.faults == []
    assert all(s.tau == 5.5 for s in report.speeds if s.section == "tree")
    assert min(report.round_us["of that, its graph alone"], report.round_us["ddtree"]) > 0


def test_tokens_of_transformers_are_compared_with_ours():
    pytest.importorskip("torch", reason="optional library torch is not installed")
    pytest.importorskip("transformers", reason="optional library transformers is not installed")
    report = measure([TINY], ["float32", "float64"], sizes=QUICK, sections=("peer",))
    assert report.faults == []
    assert [(s.who, s.dtype, s.new_tokens) for s in report.speeds] == [("transformers", "float32", QUICK.new)]
    assert report.compared == 1
    assert "transformers in float64" in report.left_out[0]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_on_a_gpu_passes_are_graphs_and_every_mode_gives_the_same_tokens(dtype, tmp_path):
    gpu_library("cupy")
    report = measure([TINY], [dtype], backend="cupy", sizes=QUICK)
    assert report.faults == []
    (passes,) = report.passes
    assert passes["how"] == "graph"
    assert 0 < min(passes["seconds"]) <= max(passes["seconds"]) < 0.01
    assert all(s.tau == 5.5 for s in report.speeds if s.section == "tree")
    assert 0 < report.round_us["of that, its graph alone"] < 1000
    assert decoding_report.write_report(report, tmp_path)


def test_wrong_tokens_are_a_fault_and_those_not_recomputed_are_counted(monkeypatch):
    generate = Engine.generate

    def wrong(self, prompts, new, **options):
        generation = generate(self, prompts, new, **options)
        if len(prompts) > 1 and new == QUICK.long:
            for tokens in generation.tokens:
                tokens[5] = (tokens[5] + 1) % self.vocab_size
        return generation

    monkeypatch.setattr(Engine, "generate", wrong)
    report = measure([TINY], ["float32"], sizes=QUICK, sections=("batch",), examined=1)
    (fault,) = report.faults
    assert f"{TINY}, float32, batch of 2: request 0 differs at new token 5" in fault
    assert report.unexamined == 1
    assert len(report.speeds) == len(QUICK.batches)
    quicker = measure([TINY], ["float32"], sizes=QUICK, sections=("batch",), examined=0)
    assert (quicker.faults, quicker.unexamined) == ([], 2)


def test_a_difference_at_a_tie_is_noted_and_no_fault(monkeypatch):
    generate = Engine.generate

    def other(self, prompts, new, **options):
        generation = generate(self, prompts, new, **options)
        if len(prompts) > 1 and new == QUICK.long:
            generation.tokens[1][3] = (generation.tokens[1][3] + 1) % self.vocab_size
        return generation

    monkeypatch.setattr(Engine, "generate", other)
    monkeypatch.setitem(BOUNDS, "float32", replace(BOUNDS["float32"], logits=1e9))
    report = measure([TINY], ["float32"], sizes=QUICK, sections=("batch",))
    (found,) = report.differences
    assert (report.faults, report.unexamined) == ([], 0)
    assert (found["where"], found["request"], found["place"]) == (f"{TINY}, float32, batch of 2", 1, 3)
    assert "1 differ, first at a tie; 0 others differ" in page(report)


def test_a_step_that_fails_is_a_fault_and_the_others_go_on(monkeypatch):
    def broken(self, subject):
        raise MemoryError("no room for the cache")

    monkeypatch.setattr(decoding._Bench, "autoregressive", broken)
    kept = []
    report = measure(
        [TINY],
        ["float32"],
        sizes=QUICK,
        sections=("autoregressive", "tree"),
        written=lambda r: kept.append(len(r.speeds)),
    )
    (fault,) = report.faults
    assert fault.startswith(f"{TINY}, float32, autoregressive: MemoryError: no room for the cache")
    assert "in broken" in fault
    assert [s.section for s in report.speeds] == ["tree"] * len(QUICK.budgets)
    assert kept[0] == 0
    assert kept[-1] == len(report.speeds)  # written as it comes


def test_an_interrupted_run_returns_what_it_has(monkeypatch):
    def interrupted(self, subject):
        raise KeyboardInterrupt

    monkeypatch.setattr(decoding._Bench, "batch", interrupted)
    report = measure([TINY], ["float32", "float64"], sizes=QUICK, sections=("autoregressive", "batch"))
    assert {s.dtype for s in report.speeds} == {"float32"}
    assert report.faults == ["interrupted: some sections are missing"]


def made_report():
    sizes = {"prompt": 32, "new": 64, "long": 256, "repeats": 3}
    report = Report({"devices": ["CPU: a machine"]}, sizes, round_us={"ddtree": 41.0, "published loop": 1020.0})

    def add(section, who, new, rate, batch=1, tau=None):
        # rounds take the time of all tokens but the prefill's
        of_rounds = [] if section == "peer" else [batch * (new - 1) / (2 * rate)]
        report.speeds.append(Speed(section, "0.7 B", "float32", who, batch, new, [batch * new / rate], tau, of_rounds))

    add("peer", "transformers", 64, 50)
    add("autoregressive", "autoregressive", 64, 1001)
    add("autoregressive", "autoregressive", 256, 1100)
    add("tree", "DDTree, 7 nodes", 256, 5600, tau=8.0)
    add("tree", "DDTree, 64 nodes", 256, 5000, tau=8.0)
    add("batch", "batch", 256, 1100)
    add("batch", "batch", 256, 21_000, batch=32)
    return report


def test_targets_are_ratios_of_what_belongs_together():
    got = {t.what.rpartition(": ")[2]: (t.goal, round(t.got, 2), t.met) for t in targets(made_report())}
    assert got == {
        "autoregressive, times transformers' generate": (20.0, 20.02, True),
        "rounds of the best DDTree, times autoregressive ones": (5.0, 5.09, True),
        "rounds of batch 32, times those of batch 1": (20.0, 19.09, False),
        "µs of a round without model and drafter, 64 nodes": (40.0, 41.0, False),
    }


def test_page_and_bars_show_the_report():
    report = made_report()
    text = page(report)
    assert "| 0.7 B, float32: autoregressive, times transformers' generate | 20 | 20 | met |" in text
    assert "| DDTree, 7 nodes | 1 | 256 | 5,600 |  | 5.09 | 11,200 | 8.00 |" in text
    assert "| autoregressive | 1 | 64 | 1,001 | 20 |  | 2,002 |  |" in text
    ((label, bars),) = decoding_report._bars(report, "0.7 B")
    assert label == "float32"
    assert bars["autoregressive"] == pytest.approx(1001)
    assert bars["autoregressive, 256 tokens"] == pytest.approx(1100)
    ax = figures.plot_decoding("title", [(label, bars)], peer="transformers", compared={"autoregressive"})
    assert figures.find(ax, "float32: DDTree, 7 nodes, 256 tokens").get_width() == pytest.approx(5600)
    told = [text.get_text() for text in ax.texts]
    assert "DDTree, 7 nodes, 256 tokens: 5,600" in told
    assert "autoregressive: 1,001, 20×" in told
    assert "transformers: 50" in told


def test_reports_are_read_back_and_cost_models_are_what_policies_read(report, tmp_path):
    assert read_json(write_json(report, tmp_path)) == replace(report, sizes=json.loads(json.dumps(report.sizes)))
    written = {path.name for path in decoding_report.write_report(report, tmp_path)}
    assert written == {p.name for p in tmp_path.iterdir()} >= {
        "decoding.json", "decoding.md", "decoding_0_1m.svg", "cost_model_0_1m_float32.json", "verify_0_1m_float32.svg",
    }  # fmt: skip
    costs = CostModel.load(tmp_path / "cost_model_0_1m_float32.json")
    assert costs.nodes.tolist() == list(QUICK.nodes)
    assert costs.contexts.tolist() == list(QUICK.contexts)


def test_passes_that_fail_leave_the_others(monkeypatch, tmp_path):
    def failing(target, nodes, contexts, **options):
        if nodes[0] in wrong:
            raise MemoryError("no room")
        return measure_passes(target, nodes, contexts, **options)

    monkeypatch.setattr(decoding, "measure_passes", failing)
    for wrong, models in (({3}, 1), ({0}, 0), ({*QUICK.nodes}, 0)):
        report = measure([TINY], ["float32"], sizes=QUICK, sections=("verify",))
        assert len(report.faults) == len(wrong)
        assert {*report.passes[0]["nodes"]} == {*QUICK.nodes} - wrong
        written = decoding_report.write_report(report, tmp_path / str(len(wrong) + models))
        assert sum("cost_model" in path.name for path in written) == models


def test_a_cost_model_is_fitted_to_medians():
    passes = {"nodes": [0, 0, 0, 1, 1, 1], "contexts": [5] * 6, "seconds": [1.0, 1.0, 90.0, 2.0, 2.0, 50.0]}
    nodes, contexts, seconds = decoding.median_passes(passes)
    assert (nodes.tolist(), contexts.tolist(), seconds.tolist()) == ([0, 1], [5, 5], [1.0, 2.0])


def test_passes_are_timed_by_whom_one_asks():
    asked = []

    def time_pass(run, repeats):
        asked.append(run().logits.shape[1])
        return [0.5] * repeats

    target = decoding._Subject(TINY, "float32", None, QUICK).target
    nodes, contexts, seconds = measure_passes(target, [0, 2], [4, 9], repeats=2, time_pass=time_pass)
    assert asked == [1, 3, 1, 3]
    assert (nodes.tolist(), contexts.tolist()) == ([0, 0, 2, 2, 0, 0, 2, 2], [4, 4, 4, 4, 9, 9, 9, 9])
    assert seconds.tolist() == [0.5] * 8


def test_the_command_writes_and_says_by_its_exit_status_whether_all_was_right(tmp_path, monkeypatch):
    run = CliRunner(env={"COLUMNS": "140"}).invoke
    few = ["--model", TINY, "--dtype", "float32", "--quick", "--section", "autoregressive"]
    result = run(main, [*few, "--output", str(tmp_path)], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    assert "autoregressive" in result.stdout
    assert (tmp_path / "decoding.md").read_text().startswith("# Decoding beside transformers\n")
    monkeypatch.setattr(decoding._Bench, "autoregressive", lambda self, subject: 1 / 0)
    assert run(main, few).exit_code == 1
    assert run(main, [*few, "--backend", "nowhere"]).exit_code == 2
