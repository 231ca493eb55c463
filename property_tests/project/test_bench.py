"""``ddtree bench``: what is wrong is not timed, and what is timed is written down as it was."""

import importlib.util
import json
from dataclasses import replace

import numpy as np
import pytest
from click.testing import CliRunner

from ddtree import reference
from ddtree.analysis import figures
from ddtree.analysis.benchmarks import bench, cases, layer_cases, peers, report
from ddtree.analysis.benchmarks.grid import EVERY_CASE, cases_for
from ddtree.analysis.benchmarks.timing import Ceilings, Times, time_on_host
from ddtree.backends import Backend, get_backend
from ddtree.cli import main
from ddtree.reference import rms_norm, rope

SMALL = (
    cases._build_tree(2, 3, 8, 8),
    replace(cases._topk(1, 2, 4, np.float32), make=lambda: {"logits": np.eye(2, 40, dtype=np.float32)[None], "k": 4}),
    cases._attention(2, 2, 9, 70, np.float32, gpu_only=False),
    cases._accept_and_compact(2, 3, 8, 2, 61),
    cases._tree_form("visibility_words", 2, 8),
    cases._tree_form("tree_positions", 2, 8),
)


class Wrong:
    """An operation that is right on small inputs alone."""

    array_kind = "numpy"

    @staticmethod
    def build_tree(log_probs, token_ids, root_token_ids, *, budget):
        tree = reference.build_tree(log_probs, token_ids, root_token_ids, budget=budget)
        if budget == 8:
            tree.scores[0, 1] += 1
        return tree


def test_a_report_has_every_case_and_figure(tmp_path):
    measured = bench.measure(get_backend("numba_cpu"), SMALL, repeats=3)
    assert [row.name for row in measured.rows] == [
        "build_tree",
        "topk_log_probs",
        "verify_attention",
        "accept and compact",
        "visibility_words",
        "tree_positions",
    ]
    assert all(len(row.times["numba_cpu"].warm) == 3 and not row.times["numba_cpu"].cold for row in measured.rows)
    written = {path.name for path in report.write_report(measured, tmp_path)}
    assert written == {p.name for p in tmp_path.iterdir()}
    assert {"bench.json", "bench.md", "build_tree.svg", "accept_and_compact.svg"} <= written
    kept = json.loads((tmp_path / "bench.json").read_text())
    assert kept["rows"][0]["sizes"] == {"B": 2, "L": 3, "K": 8, "budget": 8, "drafts": "random"}
    assert kept["rows"][0]["times"]["numba_cpu"]["warm"] == measured.rows[0].times["numba_cpu"].warm
    assert len(kept["machine"]["sources_sha256"]) == 64
    assert "| B 2, L 3, K 8, budget 8, drafts random |" in (tmp_path / "bench.md").read_text()


def test_what_is_wrong_on_the_timed_inputs_is_not_timed():
    backend = Backend("wrong", Wrong, "numpy")
    with pytest.raises(
        bench.NotEqualError, match=r"build_tree of wrong on B 2, L 3, K 8, budget 8, drafts random: .*scores"
    ):
        bench.measure(backend, SMALL[:1], repeats=3)


def test_attention_far_from_the_exact_one_is_not_timed():
    class Off(Wrong):
        @staticmethod
        def verify_attention(*args, **kwargs):
            return reference.verify_attention(*args, **kwargs) * np.float32(1.001)

    with pytest.raises(bench.NotEqualError, match=r"off by 0\.001"):
        bench.measure(Backend("off", Off, "numpy"), SMALL[2:3], repeats=3)


def test_moved_rows_are_compared():
    class Lazy(Wrong):
        accept_tree = staticmethod(reference.accept_tree)

        @staticmethod
        def compact_cache(kv_cache, page_table, prefix_lens, acceptance):
            pass

    with pytest.raises(bench.NotEqualError, match="compact_cache of lazy"):
        bench.measure(Backend("lazy", Lazy, "numpy"), SMALL[3:4], repeats=3)


def test_the_command_refuses_to_time_a_backend_that_differs(tmp_path, monkeypatch):
    (tmp_path / "tied.py").write_text(
        "from ddtree import reference\n"
        "def build_tree(log_probs, token_ids, root_token_ids, *, budget):\n"
        "    tree = reference.build_tree(log_probs, token_ids, root_token_ids, budget=budget)\n"
        "    tree.depths[:] += 1\n"
        "    return tree\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    result = CliRunner().invoke(main, ["bench", "--backend", "tied", "--output", "out"])
    assert result.exit_code == 1
    assert "build_tree of tied differs from the reference, so that nothing is timed: tree.depths" in result.output
    assert "ddtree check --backend tied --ops build_tree" in result.output
    assert not (tmp_path / "out").exists()


def test_what_fails_at_the_timed_size_is_said_in_a_line():
    class Small(Wrong):
        @staticmethod
        def build_tree(lp, ids, roots, *, budget):  # arguments by place, whatever their names
            if lp.size > 40:
                raise RuntimeError("cannot do that big")
            return reference.build_tree(lp, ids, roots, budget=budget)

    told = "build_tree of small on B 2, L 3, K 8, budget 8, drafts random raised RuntimeError: cannot do that big"
    with pytest.raises(bench.NotEqualError, match=told):
        bench.measure(Backend("small", Small, "numpy"), SMALL[:1], repeats=3)


def test_an_interrupted_run_says_so_and_writes_nothing(tmp_path, monkeypatch):
    def interrupt(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr(bench, "_measure_case", interrupt)
    result = CliRunner().invoke(
        main, ["bench", "--backend", "numba_cpu", "--ops", "accept_tree", "--output", str(tmp_path)]
    )
    assert result.exit_code == 130
    assert "Interrupted" in result.output
    assert list(tmp_path.iterdir()) == []


def test_what_cannot_be_timed_is_said_in_a_line():
    for arguments, told in (
        (["--backend", "numba_cpu", "--ops", "sort"], "numba_cpu has no sort; it has: topk_log_probs"),
        (["--backend", "numba_cpu", "--ops", "find_draft_fault"], "no case can be timed of find_draft_fault"),
        (["--backend", "no_such_module"], "backend must be one of"),
        (["--backend", ""], "backend must be one of"),
        (["--backend", "numba_cpu", "--ops", ""], "numba_cpu has no ;"),
    ):
        result = CliRunner().invoke(main, ["bench", *arguments])
        assert result.exit_code == 2
        assert told in result.output.replace("\n", " ")


def test_cases_need_only_what_a_backend_has():
    assert {c.name for c in cases_for(("build_tree",), on_gpu=True)} == {"build_tree"}
    everything = tuple({op for c in EVERY_CASE for op in c.ops})
    assert cases_for(everything, on_gpu=True) == EVERY_CASE
    on_cpu = cases_for(everything, on_gpu=False)
    assert 0 < len(on_cpu) < len(EVERY_CASE)
    assert not any(c.gpu_only for c in on_cpu)
    only = cases_for(everything, on_gpu=True, only=("compact_cache",))
    assert {c.name for c in only} == {"accept and compact"}


def test_every_peer_is_of_a_case_that_exists():
    assert {p.case for p in peers.PEERS} <= {c.name for c in EVERY_CASE}
    assert "Triton, a program a head" not in {
        p.name for p in peers.peers_for("verify_attention", on_gpu=False, slow=True)
    }
    assert any(p.slow for p in peers.peers_for("verify_attention", on_gpu=True, slow=True))


@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="optional library torch is not installed")
def test_peers_of_torch_do_the_same_on_the_cpu():
    report = bench.measure(get_backend("numba_cpu"), SMALL, repeats=3, slow_peers=False)
    timed = {(row.name, who) for row in report.rows for who in row.times}
    wanted = {(p.case, p.name) for p in peers.PEERS if p.library == "torch" and not p.slow}
    assert {w for w in wanted if w[0] in {row.name for row in report.rows}} <= timed
    assert not any(row.skipped for row in report.rows)


def rotated_by_the_reference(**given):
    """What ``rope`` of the GPU's kernels does, by the reference, in place."""
    tree, C = given["tree"], given["latents"].shape[-1]
    for b in range(tree.batch_size):
        for i in range(int(tree.node_counts[b])):
            row = int(given["prefix_lens"][b]) + i
            cos, sin = rope.rope_cos_sin(given["prefix_lens"][b] + tree.depths[b, i], given["frequencies"])
            page, place = given["page_table"][b, row // 64], row % 64
            for to, x in (
                (given["q"][b, i, :, C:], given["queries"][b, i, :, -64:]),
                (given["kv_cache"][page, place, C:], given["keys"][b, i]),
            ):
                to[:] = rope.rotate_halves(x.astype(np.float64), cos, sin)
            latent, gain = (given[name].astype(np.float64) for name in ("latents", "gain"))
            given["kv_cache"][page, place, :C] = rms_norm(latent[b, i], gain, eps=given["eps"])


def test_a_wrong_rotation_or_row_is_not_timed():
    case = layer_cases._rope(1)
    assert case.fault is not None
    inputs = case.make()
    assert "of the largest" in case.fault(inputs, (inputs["q"], inputs["kv_cache"]))
    result = case.run({"rope": rotated_by_the_reference}, inputs)
    assert case.fault(inputs, result) == ""
    last = 8192 + 64
    result[1][inputs["page_table"][0, last // 64], last % 64, 0] += 1
    assert "of the largest" in case.fault(inputs, result)


SMALL_LAYERS = {"HIDDEN": 96, "INNER": 40, "HEADS": 3, "LATENT": 24, "UNROTATED": 16, "ROUTED": 32}


@pytest.mark.parametrize(
    "name", ["_rms_norm", "_decoder_linear", "_head_linear", "_swiglu", "_route", "_moe", "_linear"]
)
def test_layers_as_the_reference_has_them_are_timed_and_no_others(monkeypatch, name):
    for size, value in SMALL_LAYERS.items():
        monkeypatch.setattr(layer_cases, size, value)
    case = getattr(layer_cases, name)(*((3, 96, 200) if name == "_linear" else (3,)))
    (op,) = case.ops

    def exactly(**given):
        wide = {k: a.astype(np.float64) if str(getattr(a, "dtype", "")) == "bfloat16" else a for k, a in given.items()}
        return getattr(reference, op)(**wide)

    inputs = case.make()
    result = case.run({op: exactly}, inputs)
    assert case.fault(inputs, result) == ""
    wrong = (result[0][:, ::-1], result[1]) if name == "_route" else -result
    assert case.fault(inputs, wrong) != ""


@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="optional library torch is not installed")
@pytest.mark.parametrize("name", ["_rms_norm", "_linear", "_swiglu", "_route", "_moe"])
def test_peers_of_layers_do_the_same(monkeypatch, name):
    import torch

    for size, value in SMALL_LAYERS.items():
        monkeypatch.setattr(layer_cases, size, value)
    case = getattr(layer_cases, name)(*((3, 96, 200) if name == "_linear" else (3,)))
    inputs = case.make()
    for peer in peers.peers_for(case.name, on_gpu=True, slow=False):
        result = peer.prepare(torch, inputs, "cpu")()
        if name == "_route":
            result = result[0].numpy().astype(np.int32), result[1].float().numpy()
        else:
            result = result.float().numpy()
        assert case.fault(inputs, result) == "", peer.name


@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="optional library torch is not installed")
def test_torch_rotates_as_the_kernels_do():
    import torch

    case = layer_cases._rope(1)
    inputs = case.make()
    (peer,) = peers.peers_for("rope", on_gpu=True, slow=False)
    q = peer.prepare(torch, inputs, "cpu")().float().numpy()
    case.run({"rope": rotated_by_the_reference}, inputs)
    exact = inputs["q"].astype(np.float32)[..., 512:]
    assert np.abs(q[..., 512:] - exact).max() < 0.02 * np.abs(exact).max()


def test_times_are_of_the_calls():
    calls = []
    times = time_on_host(lambda: calls.append(1), 5)
    assert len(calls) == 7
    assert len(times.warm) == 5
    assert all(t > 0 for t in times.warm)


@pytest.mark.parametrize("most", [3.31, 4.0, 8.3, 33.0, 400.0, 2e6])
def test_ticks_of_times_say_different_numbers(most):
    ax = figures.plot_times("op", [("a", {"ours": 3.3, "theirs": most})])
    ax.figure.canvas.draw()
    low, high = ax.get_xlim()
    shown = [label.get_text() for label in ax.get_xticklabels() if low <= label.get_position()[0] <= high]
    shown = [text for text in shown if text]
    assert len(shown) >= 1
    assert len(set(shown)) == len(shown)
    ticks = [x for x in ax.get_xticks() if low <= x <= high]
    assert [float(text.replace(",", "")) for text in shown] == pytest.approx(ticks, rel=5e-3)


def test_figures_show_what_they_are_given():
    ax = figures.plot_times("op", [("a", {"ours": 1.0, "theirs": 20.0}), ("b", {"ours": 2.0})])
    assert figures.find(ax, "ours").get_xdata().tolist() == [1.0, 2.0]
    assert figures.find(ax, "theirs").get_ydata().tolist() == [0]
    assert [t.get_text() for t in ax.get_yticklabels()] == ["a", "b"]
    roof = figures.plot_roofline(
        "op", [("a", 1e9, 1e6, {"ours": 10.0}), ("b", 2e9, 1e8, {"ours": 40.0})], 4000.0, 700.0
    )
    assert figures.find(roof, "ours").get_xdata().tolist() == [1000.0, 20.0]
    assert figures.find(roof, "ours").get_ydata().tolist() == [100.0, 50.0]
    assert max(figures.find(roof, "arithmetic").get_ydata()) == 700.0
    unknown = figures.plot_roofline("op", [("a", 1e9, 1e6, {"ours": 10.0})], 4000.0, float("nan"))
    assert np.isfinite(figures.find(unknown, "arithmetic").get_ydata()).all()


def test_the_caption_names_machine_and_ceilings():
    made = bench.Report("x", {"devices": ["CPU: some"], "threads": {"numba": 2}}, Ceilings(4000.0, 700.0, 2.5), [])
    told = report.caption(made)
    assert "CPU: some; 2 numba threads" in told
    assert "copy 4,000 GB/s, bfloat16 matmul 700 TFLOP/s, empty graph 2.5 µs" in told
    busy = bench.Report("x", {"devices": ["CPU: some"], "load": 1000.0}, None, [])
    assert "at work already (load 1000.0)" in report.caption(busy)


def test_there_is_no_column_of_cold_times_where_nobody_has_any():
    warm = Times([1.0, 3.0, 2.0])
    told = bench.Report("ours", {"devices": ["CPU: some"]}, None, [bench.Row("op", "B 1", {}, 0, 0, {"ours": warm})])
    (table,) = report.tables_of(told)
    assert [column.header for column in table.columns] == ["sizes", "ours,\nµs warm"]
    assert "cold" not in report.caption(told) + report.page(told)
    assert "| B 1 | 2 |" in report.page(told)


def test_times_are_compared_cold_only_where_everyone_has_them():
    warm, both = Times([1.0, 3.0, 2.0]), Times([1.0, 3.0, 2.0], [9.0, 8.0, 7.0])
    rows = [bench.Row("op", "B 1", {}, 0, 0, {"ours": both, "theirs": warm})]
    assert report.compared(rows) == "warm"
    assert report.compared([bench.Row("op", "B 1", {}, 0, 0, {"ours": both, "theirs": both})]) == "cold"
    assert (report.median(both, "warm"), report.median(both, "cold")) == (2.0, 8.0)
    (table,) = report.tables_of(bench.Report("ours", {}, None, rows))
    assert list(table.columns[3].cells) == ["2 (1×)"]
    assert table.columns[2].header == "µs cold"
    assert report.short(25370.4) == "25,370"
