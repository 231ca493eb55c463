"""The command: its help, what `info` and `demo` print and write, and how they fail."""

import json
import re
import subprocess
import sys
from dataclasses import replace

import click
import numpy as np
import pytest
from click.testing import CliRunner

import ddtree
from ddtree import reference
from ddtree.analysis import demo as measuring
from ddtree.analysis import environment
from ddtree.analysis.environment import backend_states
from ddtree.analysis.replay import replay_all
from ddtree.analysis.trace import shipped_trace
from ddtree.backends import BACKENDS, get_backend
from ddtree.cli import main
from ddtree.kernels import numba_cpu
from ddtree.policies import chain
from ddtree.protocols import OPS

FIGURES = ["acceptance_by_depth.png", "tau_by_budget.png", "tau_by_budget_synthetic.png", "tree.png"]


@pytest.fixture
def run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def invoke(*arguments, **env):
        runner = CliRunner(env={"COLUMNS": "80", "NO_COLOR": "1", "FORCE_COLOR": None, **env})
        return runner.invoke(main, arguments, catch_exceptions=False)

    return invoke


def commands(command, path=()):
    yield path
    for name, sub in getattr(command, "commands", {}).items():
        yield from commands(sub, (*path, name))


@pytest.mark.parametrize("path", list(commands(main)), ids=" ".join)
def test_every_command_has_help(run, path):
    result = run(*path, "--help")
    assert result.exit_code == 0
    assert result.stdout.startswith("Usage: ")
    command: click.Command = main
    for name in path:
        assert isinstance(command, click.Group)
        command = command.commands[name]
    assert command.help


def test_list_of_commands_is_not_cut(run):
    _, _, listed = run("--help").stdout.partition("Commands:\n")
    assert [line.split()[0] for line in listed.splitlines()] == sorted(main.commands)
    assert "..." not in listed


def test_version(run):
    assert run("--version").stdout == f"ddtree, version {ddtree.__version__}\n"


def test_module_runs_as_the_command_and_starts_light():
    code = """
import runpy, sys
sys.argv = ["ddtree", "--help"]
try:
    runpy.run_module("ddtree", run_name="__main__")
except SystemExit as stop:
    assert not stop.code, stop.code
heavy = {"matplotlib", "numba", "rich", "torch", "cupy", "scipy", "ddtree.model", "ddtree.engine"} & set(sys.modules)
assert not heavy, heavy
"""
    result = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith("Usage: python -m ddtree")


def test_info_shows_versions_devices_and_who_serves_what(run):
    text = run("info").stdout
    assert f"ddtree {ddtree.__version__}" in text
    assert f"numpy {np.__version__}" in text
    assert "CPU: " in text
    for op in OPS:
        assert re.search(rf"{op} +other +default", text), op
    for state in backend_states():
        assert state.name in text
        if state.reason:
            assert state.reason in text
            assert not state.ops or state.install in text


def test_info_says_whether_what_a_gpu_verified_still_holds(monkeypatch):
    for backend in ("cupy", "numba_cuda"):
        seen = environment.gpu_verification(backend)
        form = (
            rf"{backend}: [\d,]+ drawn inputs equal, laws \d+ passed, on NVIDIA .*; "
            r"sources (unchanged since|CHANGED since.*|of these 8 operations unchanged since, others CHANGED: .+)"
        )
        assert re.fullmatch(form, seen)
    assert environment.gpu_verification("reference") is None
    said = "timed beside its peers", "decoded beside transformers", "soaked"
    for what, timed in zip(said, environment.gpu_timings(), strict=True):
        assert re.fullmatch(rf"cupy: {what} on NVIDIA .*; sources (unchanged|CHANGED) since.*", timed)


def test_info_names_the_sources_that_have_changed(monkeypatch):
    held = environment.kernel_sources("cupy")
    assert environment._still_holds("cupy", held) == "sources unchanged since"
    for damaged in ({"sources_sha256": "0"}, {}, held | {"sources_sha256": "0"}, {"sources": ["a"]}, {"sources": "a"}):
        assert environment._still_holds("cupy", damaged) == "sources CHANGED since"
    files = environment._kernel_files("cupy")
    others = files | {"linear.cu": b"another", "a_new_one.py": b""}
    del others["turn.cuh"]
    monkeypatch.setattr(environment, "_kernel_files", lambda backend: dict(sorted(others.items())))
    said = "sources CHANGED since: a_new_one.py, linear.cu, turn.cuh"
    assert environment._still_holds("cupy", held) == said
    assert all("; sources CHANGED since" in line for line in environment.gpu_timings())
    monkeypatch.setattr(environment, "_kernel_files", lambda backend: {name: b"" for name in files})
    told = environment._still_holds("cupy", held)
    assert told.count(",") == environment.NAMED - 1
    assert told.endswith(f" and {len(files) - environment.NAMED} more")


def test_a_verification_holds_until_what_it_verified_changes(monkeypatch):
    verified = environment.sources_of("cupy", OPS)
    assert {"build_tree.py", "build_tree.cu", "block.cuh", "common.cuh", "cluster.cuh", "program.py"} <= verified
    assert verified.isdisjoint({"linear.py", "linear.cu", "skinny.cuh", "moe_experts.cu"})
    assert {"skinny.cuh", "linear.py", "linear.cu", "cublas.py"} <= environment.sources_of("cupy", ["moe_experts"])
    assert {"jit.py", "visibility_words.py"} <= environment.sources_of("numba_cuda", ["build_tree"])
    held, files = environment.kernel_sources("cupy"), environment._kernel_files("cupy")
    for name in ("linear.cu", "moe_experts.py", "skinny.cuh"):
        monkeypatch.setattr(environment, "_kernel_files", lambda backend, name=name: files | {name: b"another"})
        assert environment._still_holds("cupy", held, verified) == "sources unchanged since"
        assert environment._still_holds("cupy", held) == f"sources CHANGED since: {name}"
    for name in sorted(verified):
        changed = files | {name: files[name] + b"\n"}
        monkeypatch.setattr(environment, "_kernel_files", lambda backend, changed=changed: changed)
        assert environment._still_holds("cupy", held, verified) == f"sources CHANGED since: {name}"


def test_launchers_launch_what_they_are_named_after_or_import():
    files = environment._kernel_files("cupy")
    programs = {name.removesuffix(".cu") for name in files if name.endswith(".cu")}
    for name, content in files.items():
        if name.endswith(".py") and name not in ("__init__.py", "program.py"):
            launched = set(re.findall(r'"(\w+)"', content.decode())) & programs
            assert {f"{program}.cu" for program in launched} <= environment.sources_of("cupy", [name[:-3]]), name


def test_info_as_json(run):
    document = json.loads(run("info", "--json").stdout)
    assert document["versions"]["numpy"] == np.__version__
    assert list(document["backends"]) == list(BACKENDS)
    assert document["backends"]["reference"] == {
        "name": "reference",
        "array_kind": "numpy",
        "ops": list(OPS),
        "reason": None,
        "install": "",
    }
    assert document["default_order"]["cpu"] == ["numba_cpu", "reference"]


def test_backend_that_breaks_says_why(monkeypatch):
    backend_states.cache_clear()
    get_backend.cache_clear()
    monkeypatch.setitem(sys.modules, "numba", None)  # as if it were not installed
    try:
        states = {state.name: state for state in backend_states()}
    finally:
        backend_states.cache_clear()
        get_backend.cache_clear()
    assert states["reference"].reason is None
    assert re.search(r"needs numba, .*: pip install numba", str(states["numba_cpu"].reason))


def assert_fits(text):
    """No line is wider than the terminal, or cut, or coloured."""
    assert "\x1b" not in text
    assert "…" not in text
    for line in text.splitlines():
        assert len(line) <= 80 or line.startswith("Written to "), line


def test_demo_checks_everything_and_writes_its_figures(run, tmp_path):
    result = run("demo", "--quick", "--output", "out/deep")
    assert result.exit_code == 0, result.output
    assert_fits(result.stdout)
    for line in ("float32: tokens, one at a time", "float64: tokens, one at a time"):
        assert re.search(rf"{line} +24/24 +24/24 +ok", result.stdout)
    assert len(re.findall(r"rounds +3, τ = 8.00 +3, τ = 8.00 +ok", result.stdout)) == 2
    for op in OPS:
        assert re.search(rf"numba_cpu: {op} +0/20 differ +0/20 differ +ok", result.stdout), op
    assert "synthetic" in result.stdout
    assert str(tmp_path / "out/deep") in result.stdout

    folder = tmp_path / "out/deep"
    assert sorted(path.name for path in folder.iterdir()) == sorted([*FIGURES, "results.json"])
    for name in FIGURES:
        assert (folder / name).read_bytes().startswith(b"\x89PNG")
    results = json.loads((folder / "results.json").read_text(encoding="utf-8"))
    assert results["ok"] is True
    assert list(results["stages"]) == list(measuring.STAGES)
    assert all(check["ok"] for stage in results["stages"].values() for check in stage["checks"])
    pair, synthetic = results["stages"]["trained pair"], results["stages"]["synthetic drafter"]
    assert (pair["synthetic"], synthetic["synthetic"]) == (False, True)
    budgets = measuring.QUICK.budgets
    wanted = [*(("chain", b) for b in budgets if b <= 7), *(("tree", b) for b in budgets)]
    emitted = shipped_trace().summary()["positions"]
    for stage, also in ((pair, [("prompt lookup", b) for b in budgets]), (synthetic, [])):
        rows = stage["tau_by_budget"]
        assert [(row["policy"], row["budget"]) for row in rows] == [*wanted, *also]
        for row in rows:
            assert row["n_tokens"] == emitted
            assert f"{row['tau']:.2f}" in result.stdout
    assert "The trained pair python-5m" in result.stdout
    for state in backend_states():
        if state.reason:
            assert f"backend {state.name!r}" in result.stdout


def keeps_only_the_root(tree, target_token_ids, *, remaining=None, stop_token_ids=None):
    """Right tokens, wrong speed: it never accepts a draft."""
    kept = reference.accept_tree(tree, target_token_ids, remaining=remaining, stop_token_ids=stop_token_ids)
    lengths = np.minimum(kept.lengths, 1)
    nodes = np.full_like(kept.node_indices, -1)
    nodes[:, 0] = kept.node_indices[:, 0]
    bonus = np.where(lengths > 0, target_token_ids[:, 0], -1).astype(np.int32)
    stops = np.isin(bonus, [] if stop_token_ids is None else stop_token_ids)
    finished = stops | (False if remaining is None else remaining <= 1)
    return replace(kept, node_indices=nodes, lengths=lengths, bonus_token_ids=bonus, finished=finished)


def raises(*args, **options):
    raise RuntimeError("planted")


@pytest.fixture
def two_stages(monkeypatch):
    for name in ("golden model", "drafting and sampling", "trained pair", "synthetic drafter"):
        monkeypatch.delitem(measuring.STAGES, name)


@pytest.mark.usefixtures("two_stages")
def test_demo_with_a_wrong_operation_says_which_and_exits_with_1(run, tmp_path, monkeypatch):
    monkeypatch.setattr(numba_cpu, "accept_tree", keeps_only_the_root)
    result = run("demo", "--quick")
    assert result.exit_code == 1
    assert_fits(result.stdout)
    assert re.search(r"float32: rounds +3, τ = 8.00 +24, τ = 1.00 +WRONG", result.stdout)
    assert re.search(r"numba_cpu: accept_tree +0/20 differ +[1-9]\d?/20 differ +WRONG", result.stdout)
    assert result.stderr.startswith("Error: 3 of 12 checks failed\n")
    assert "oracle tree, float64: rounds: 24, τ = 1.00, should be 3, τ = 8.00\n" in result.stderr
    assert "(acceptance.node_indices[0, 1]: -1, should be 1)" in result.stderr  # shrunk
    assert json.loads((tmp_path / "demo_output/results.json").read_text(encoding="utf-8"))["ok"] is False


@pytest.mark.usefixtures("two_stages")
def test_demo_with_an_operation_that_raises_goes_on_and_exits_with_1(run, tmp_path, monkeypatch):
    monkeypatch.setattr(numba_cpu, "accept_tree", raises)
    result = run("demo", "--quick")
    assert result.exit_code == 1
    assert "Traceback" not in result.output
    assert "oracle tree, runs to its end: no, should be yes (RuntimeError: planted)" in result.stderr
    assert "backends, numba_cpu: accept_tree: 20/20 differ" in result.stderr
    stages = json.loads((tmp_path / "demo_output/results.json").read_text(encoding="utf-8"))["stages"]
    assert "Traceback" in stages["oracle tree"]["error"]


def test_demo_refuses_an_unwritable_folder_before_any_work(run, tmp_path, monkeypatch):
    for name in list(measuring.STAGES):
        monkeypatch.setitem(measuring.STAGES, name, raises)
    (tmp_path / "file").write_text("")
    for folder, reason in (("file", "File exists"), ("file/below", "Not a directory")):
        result = run("demo", "--output", folder)
        assert (result.exit_code, result.stdout) == (2, "")
        assert result.stderr == f"Error: {folder} cannot be written ({reason}): choose another with --output\n"
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_closed_pipe_ends_quietly():
    command = [sys.executable, "-W", "error", "-m", "ddtree", "info"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()  # as head does, having read enough
        assert process.stderr.read() == b""


def test_live_rounds_that_are_not_the_replayed_ones_are_a_failed_check(monkeypatch):
    monkeypatch.setattr(measuring, "replay_all", lambda trace, policies: replay_all(trace, [chain(1)] * len(policies)))
    wrong = [check.name for check in measuring.run_stage("trained pair", measuring.QUICK).checks if not check.ok]
    assert wrong == ["live rounds are the replayed ones, budget 16"]
