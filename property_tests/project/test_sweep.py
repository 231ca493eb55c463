"""Sweeps: the table, what is kept and computed again, processes and clusters, the commands, and what is refused."""

import csv
import json
import multiprocessing
import os
import re
import subprocess
import sys
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from ddtree.analysis import sweep as sweep_module
from ddtree.analysis.acceptance import tau_interval
from ddtree.analysis.record import read_prompts, record, vocabulary_digest
from ddtree.analysis.replay import replay
from ddtree.analysis.sweep import fingerprint, policy_grid, sweep, write_sweep
from ddtree.analysis.trace import Trace, TraceWriter, open_trace
from ddtree.cli import main
from ddtree.costs import CostModel
from ddtree.drafters import NgramDrafter
from ddtree.kdtr import write_kdtr
from ddtree.pair import load_pair, load_prompts
from ddtree.policies import (
    all_children,
    chain,
    confidence,
    cost_aware,
    fixed_budget,
    limited,
    policy_name,
    spine_first,
    static_tree,
)
from ddtree.property_tests.compare import assert_same
from ddtree.property_tests.targets import AttentionTarget, RandomDrafter

PROMPTS = [[1, 2, 1, 2], [3], [4, 5, 6], [7, 7, 7]]
COSTS = CostModel(np.array([0, 4, 40]), np.array([0, 64]), np.array([[1.0, 1.1, 4.0], [2.0, 2.1, 9.0]]))
GRID: dict[str, Any] = {
    "tree": [fixed_budget(b) for b in (1, 4, 16)],
    "tree, L ≤ 2": [limited(fixed_budget(b), depth=2) for b in (1, 4, 16)],
    "priced": [cost_aware(20, COSTS)],
    "chain": [chain(1), chain(3)],
}


def recorded(folder, drafter=None, **options):
    options = {"depth": 3, "topk": 4, "max_new_tokens": 20, "prompts_a_chunk": 3} | options
    return record(AttentionTarget(1), drafter or NgramDrafter(), PROMPTS, folder, **options)


@pytest.fixture(scope="module")
def traces(tmp_path_factory):
    folder = tmp_path_factory.mktemp("traces")
    return [recorded(folder / "n-gram"), recorded(folder / "random", RandomDrafter(3))]


def test_every_cell_is_its_replay(traces):
    table = sweep(traces, GRID)
    rows = iter(table.records())
    for trace in traces:
        for series, policies in GRID.items():
            for policy in policies:
                row, rounds = next(rows), replay(trace, policy)
                tau, low, high = tau_interval(rounds)
                assert (row["trace"], row["policy"], row["label"]) == (trace.name, series, policy_name(policy))
                assert (row["budget"], row["tau"], row["low"], row["high"]) == (policy.budget, tau, low, high)
                assert (row["depth"], row["topk"]) == (2 if series.endswith("2") else 3, 4)
                assert (row["n_rounds"], row["n_tokens"]) == (len(rounds), rounds.tokens.sum())
                assert row["used_last_rank"] == rounds.used_last_rank.sum()
                assert (row["nodes"], row["n_prompts"]) == (rounds.num_nodes.mean(), len(PROMPTS))
    assert next(rows, None) is None
    assert max(table.tau) > 1


def test_sweep_of_less_is_a_replay_of_less(traces):
    table = sweep(traces[:1], {"tree": [fixed_budget(9)]}, max_new_tokens=7, stop_token_ids=[5])
    rounds = replay(traces[0], fixed_budget(9), max_new_tokens=7, stop_token_ids=[5])
    assert (table.n_tokens.tolist(), table.n_rounds.tolist()) == ([rounds.tokens.sum()], [len(rounds)])


class Counting:
    """Notes each policy that is replayed."""

    def __init__(self, monkeypatch):
        self.names: list[str] = []
        real = sweep_module._replayed

        def replayed(trace, policies, options):
            self.names += [policy_name(p) for p in policies]
            return real(trace, policies, options)

        monkeypatch.setattr(sweep_module, "_replayed", replayed)


def test_finished_cell_is_not_computed_again(traces, tmp_path, monkeypatch):
    counting = Counting(monkeypatch)
    whole = sweep(traces, GRID)
    assert len(counting.names) == 18
    counting.names.clear()
    part = {"tree": GRID["tree"][:2]}
    sweep(traces[:1], part, folder=tmp_path)
    assert counting.names == ["fixed_budget(1)", "fixed_budget(4)"]
    counting.names.clear()
    again = sweep(traces, GRID, folder=tmp_path)
    assert again.records() == whole.records()
    assert len(counting.names) == 16
    counting.names.clear()
    assert sweep(traces, GRID, folder=tmp_path).records() == whole.records()
    assert counting.names == []
    # the same trace elsewhere, and held in memory, are other names and other chunks, not the same numbers under one
    other = CostModel(COSTS.nodes, COSTS.contexts, COSTS.verify_seconds * 2.0)
    sweep(traces[:1], {"priced": [cost_aware(20, other)]}, folder=tmp_path)
    sweep(traces[:1], {"tree": [fixed_budget(1)]}, folder=tmp_path, max_new_tokens=5)
    assert counting.names == ["cost_aware(20)", "fixed_budget(1)"]


def test_cell_is_known_by_all_that_makes_it():
    same = [cost_aware(8, COSTS), cost_aware(8, CostModel(COSTS.nodes, COSTS.contexts, COSTS.verify_seconds))]
    assert len({fingerprint(p) for p in same}) == 1
    costs = CostModel(COSTS.nodes, COSTS.contexts, COSTS.verify_seconds, 0.5)
    others = [
        *same[:1], cost_aware(8, costs), cost_aware(8, COSTS, clamp=True), cost_aware(9, COSTS), fixed_budget(8),
        confidence(8, 0.5), limited(fixed_budget(8), depth=2), limited(fixed_budget(8), topk=2), chain(2),
        static_tree([(0,), (1,)]), static_tree([(0,), (0, 0)]), all_children(8, 2), all_children(8, 3), spine_first(8),
    ]  # fmt: skip
    assert len({fingerprint(p) for p in others}) == len(others)


class Wide:
    """A policy of one's own, whose name and budget do not say all that it does."""

    budget = 4

    def __init__(self, topk, label=None):
        self.inner = limited(fixed_budget(4), topk=topk)
        if label:
            self.label = label

    def __call__(self, *draft):
        return self.inner(*draft)


def of_my_own(*draft):
    return fixed_budget(4)(*draft)


of_my_own.budget = 4  # type: ignore[attr-defined]


@dataclass(frozen=True)
class Own:
    """A dataclass that is a policy."""

    held: Any
    budget: int = 4
    apart: int = field(default=0, compare=False)

    def __call__(self, *draft):
        return fixed_budget(4)(*draft)


@pytest.mark.parametrize("policy", [Wide(1), of_my_own, limited(Wide(1), topk=1), Own(Wide(1)), Own((of_my_own,))])
def test_policy_that_another_could_be_taken_for_is_not_kept(traces, tmp_path, policy):
    if not isinstance(policy, Own):
        assert len(sweep(traces[:1], {"own": [policy]}).tau) == 1
    name = re.escape(policy_name(policy))
    with pytest.raises(TypeError, match=rf"policy {name}.* must have a label to be kept in a folder"):
        sweep(traces[:1], {"own": [fixed_budget(1), policy]}, folder=tmp_path / "s")
    assert not list((tmp_path / "s").rglob("*.kdtr"))


@pytest.mark.parametrize("held", [{"a": 1}, {1}, len, np.array([{}]), Path(), (1, {"a": 1})])
def test_policy_of_what_cannot_be_told_apart_is_named_with_its_field(traces, tmp_path, held):
    with pytest.raises(
        TypeError, match=r"policy Own\.held(\[1\])? must be numbers, text, .*, got \w+: .* leave out folder"
    ):
        sweep(traces[:1], {"own": [Own(held)]}, folder=tmp_path)


def test_policies_of_ones_own_that_differ_are_computed_apart(traces, tmp_path):
    own: list[Any] = [Wide(1, "widest 1"), Wide(4, "widest 4")]
    apart = [sweep(traces[:1], {"own": [policy]}, folder=tmp_path).tau[0] for policy in own]
    assert apart == [replay(traces[0], policy).tau for policy in own]
    assert apart[0] != apart[1]
    assert len({fingerprint(p) for p in (*own, Own(1), Own(2), Own("1"), Own(b"1"), Own(1, apart=1), Own((1,)))}) == 8


def test_what_a_killed_sweep_left_half_written_is_removed(traces, tmp_path):
    cells = tmp_path / "cells"
    cells.mkdir()
    for name in (".0123abcd.tmp", ".4567abcd.tmp", ".mine.tmp"):
        (cells / name).touch()
    for name in (".0123abcd.tmp", ".mine.tmp"):
        os.utime(cells / name, (0, 0))
    sweep(traces[:1], {"tree": [fixed_budget(2)]}, folder=tmp_path)
    # the second may be another sweep's that is being written
    assert sorted(p.name for p in cells.glob(".*")) == [".4567abcd.tmp", ".mine.tmp"]


def test_damaged_cell_is_named(traces, tmp_path):
    grid = {"tree": [fixed_budget(2)]}
    sweep(traces[:1], grid, folder=tmp_path)
    [cell] = (tmp_path / "cells").iterdir()
    cell.write_bytes(cell.read_bytes()[:-1])
    with pytest.raises(ValueError, match=rf"{cell.name}: truncated"):
        sweep(traces[:1], grid, folder=tmp_path)
    cell.write_bytes(b"garbage")
    with pytest.raises(ValueError, match=rf"{cell.name}: .*: remove the file, and its cell is computed again"):
        sweep(traces[:1], grid, folder=tmp_path)
    good: dict[str, Any] = {"sums": np.zeros((2, 4)), "used_last_rank": np.array(1)}
    for name, value in (("sums", (2, 3)), ("sums", 4), ("used_last_rank", 2), ("more", ())):
        write_kdtr(cell, good | {name: np.zeros(value)})
        with pytest.raises(ValueError, match=rf"{cell.name}: must hold sums .*, it is no cell: remove the file, and"):
            sweep(traces[:1], grid, folder=tmp_path)


def test_trace_in_memory_is_swept_as_its_files(traces):
    held = Trace(traces[0].manifest, list(traces[0].chunks()), "held")
    table = sweep([held], GRID)
    files = sweep(traces[:1], GRID)
    assert [{**r, "trace": ""} for r in table.records()] == [{**r, "trace": ""} for r in files.records()]
    assert held.digest() == traces[0].in_memory().digest() != traces[1].in_memory().digest()


class Backwards:
    """An executor that does the work at once, and gives the last result first."""

    def submit(self, function, *arguments):
        future: Future[Any] = Future()
        future.set_result(function(*arguments))
        return future


def test_order_of_results_does_not_matter(traces, monkeypatch):
    monkeypatch.setattr(sweep_module, "as_completed", lambda futures: list(futures)[::-1])
    assert sweep(traces, GRID, Backwards()).records() == sweep(traces, GRID).records()


class Deadly:
    """A policy that takes its process with it, until a file is there; then a chain."""

    budget = 2
    label = "deadly"

    def __init__(self, flag):
        self.flag = Path(flag)

    def __call__(self, *draft):
        if not self.flag.exists():
            self.flag.touch()
            os._exit(1)
        return chain(2)(*draft)


def test_killed_process_loses_no_finished_cell_and_the_sweep_goes_on(traces, tmp_path, monkeypatch):
    grid: dict[str, Any] = {"tree": GRID["tree"], "chain": [chain(3)], "deadly": [Deadly(tmp_path / "flag")]}
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context) as pool, pytest.raises(BrokenProcessPool):
        sweep(traces[:1], grid, pool, folder=tmp_path)  # one after the other: the deadly one is not the first
    counting = Counting(monkeypatch)
    table = sweep(traces[:1], grid, folder=tmp_path)
    assert counting.names  # what was under way is done again
    assert set(counting.names) < {"deadly", "chain(3)", *map(policy_name, GRID["tree"])}
    assert table.records()[:4] == sweep(traces[:1], {k: grid[k] for k in ("tree", "chain")}).records()
    assert table.tau[4] == replay(traces[0], chain(2)).tau


CLUSTER = """
import sys
from dask.distributed import Client, LocalCluster
from ddtree.analysis.sweep import sweep
from ddtree.analysis.trace import open_trace
from ddtree.property_tests.project.test_sweep import GRID, Deadly

if __name__ == "__main__":
    traces = [open_trace(path) for path in sys.argv[2:]]
    flag = sys.argv[1] + "/flag"
    grid = GRID | {"deadly": [Deadly(flag)]}
    options = dict(n_workers=2, threads_per_worker=1, dashboard_address=None, worker_dashboard_address=None)
    with LocalCluster(**options) as cluster, Client(cluster) as client:
        table = sweep(traces, grid, client.get_executor(), folder=sys.argv[1])
    assert table.records() == sweep(traces, grid).records()
    print("the same")
"""


def test_dask_cluster_gives_the_same_and_a_killed_worker_loses_nothing(traces, tmp_path):
    pytest.importorskip("distributed", reason="optional library distributed is not installed")
    (tmp_path / "run.py").write_text(CLUSTER)
    paths = [str(trace._chunks[0].parent) for trace in traces]
    command = [sys.executable, str(tmp_path / "run.py"), str(tmp_path), *paths]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert done.stdout.endswith("the same\n"), done.stderr[-3000:]
    assert (tmp_path / "flag").exists()  # a worker did die


def test_one_trace_needs_no_list(traces):
    grid = {"chain": [chain(2)]}
    assert sweep(traces[0], grid).records() == sweep(traces[:1], grid).records()


def test_tables_are_written_whole_and_tidy(traces, tmp_path):
    table = sweep(traces, GRID)
    single = sweep(traces[:1], {"tree": [fixed_budget(3)]}, max_new_tokens=1)  # no round, no tau
    for t in (table, single):
        paths = write_sweep(t, tmp_path)
        assert [p.name for p in paths] == ["sweep.csv", "sweep.json"] == sorted(p.name for p in tmp_path.iterdir())
        document = json.loads(paths[1].read_text())
        assert document["cells"] == t.records()
        with open(paths[0], newline="") as file:
            rows = list(csv.DictReader(file))
        assert [{k: "" if v is None else str(v) for k, v in r.items()} for r in t.records()] == rows
    assert single.records()[0]["tau"] is None


def test_grid_has_every_budget_under_every_limit(traces, tmp_path):
    COSTS.save(tmp_path / "costs.json")
    folder = str(traces[0]._chunks[0].parent)
    specs = ["tree", "chain", "spine-first", "all-children:2", "confidence:0.5", f"cost:{tmp_path}/costs.json"]
    grid = policy_grid([*specs, f"static:{folder}"], [1, 4], depth=3)
    assert list(grid) == [*specs[:-1], "cost:costs.json", f"static:{Path(folder).name}"]
    assert [[policy_name(p) for p in ps] for ps in grid.values()] == [
        ["fixed_budget(1)", "fixed_budget(4)"],
        ["chain(3)"],
        ["spine_first(1)", "spine_first(4)"],
        ["all_children(1, 2)", "all_children(4, 2)"],
        ["confidence(1, 0.5)", "confidence(4, 0.5)"],
        ["cost_aware(1, cost:costs.json)", "cost_aware(4, cost:costs.json)"],
        [f"static_tree({n}, static:{Path(folder).name})" for n in (1, 4)],
    ]
    assert len(sweep(traces[:1], grid).tau) == 13
    grid = policy_grid(["tree", "chain"], [4], depths=[1, 2], topks=[2, 4], depth=3)
    assert {series: [policy_name(p) for p in ps] for series, ps in grid.items()} == {
        "tree, L ≤ 1, K ≤ 2": ["limited(fixed_budget(4), depth=1, topk=2)"],
        "tree, L ≤ 1, K ≤ 4": ["limited(fixed_budget(4), depth=1, topk=4)"],
        "tree, L ≤ 2, K ≤ 2": ["limited(fixed_budget(4), depth=2, topk=2)"],
        "tree, L ≤ 2, K ≤ 4": ["limited(fixed_budget(4), depth=2, topk=4)"],
        "chain, L ≤ 1": ["chain(1)"],
        "chain, L ≤ 2": ["chain(2)"],
    }
    assert list(policy_grid(["tree"], [4], depths=[2], depth=3)) == ["tree"]


@pytest.mark.parametrize(
    "spec, message",
    [
        ("oak", r"policy must be tree, chain, .*, got 'oak'"),
        ("tree:4", r"policy must be tree, chain, .*, got 'tree:4'"),
        ("confidence", r"policy confidence must have a number behind the colon, got ''"),
        ("all-children:x", r"policy all-children must have a number behind the colon, got 'x'"),
        ("confidence:2", r"cutoff must be over 0 and at most 1, got 2.0"),
        ("cost", r"policy must be .*, got 'cost'"),
    ],
)
def test_unknown_kind_of_policy_is_named(spec, message):
    with pytest.raises(ValueError, match=message):
        policy_grid([spec], [4], depth=3)


def another(folder, name, **options):
    with TraceWriter(folder / name, **{"vocab_size": 11, "depth": 3, "topk": 4, "max_new_tokens": 20} | options) as w:
        m = w.manifest
        w.append([1, 2], 1, np.zeros((0, m.depth, m.topk)), np.zeros((0, m.depth, m.topk), np.int32))
    return open_trace(folder / name)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"vocab_size": 12}, r"other: vocab_size of the manifest must be 11, as of n-gram, got 12"),
        ({"vocabulary": "y"}, r"other: vocabulary of the manifest must be '', as of n-gram, got 'y'"),
        ({"depth": 2}, r"other: depth of the manifest must be 3, as of n-gram, got 2: sweep them apart"),
        ({"topk": 5}, r"other: topk of the manifest must be 4, as of n-gram, got 5"),
    ],
)
def test_traces_that_do_not_fit_together_are_named(traces, tmp_path, options, message):
    with pytest.raises(ValueError, match=message):
        sweep([traces[0], another(tmp_path, "other", **options)], GRID)


@pytest.mark.parametrize(
    "call, error, message",
    [
        (lambda t: sweep([], GRID), ValueError, r"traces must hold one trace or more, got none"),
        (lambda t: sweep(list("x"), GRID), TypeError, r"traces\[0\] must be a Trace, .*, got str"),
        (lambda t: sweep([t, t], GRID), ValueError, r"traces\[1\] must have a name of its own, 'n-gram' is"),
        (lambda t: sweep([t], [chain(1)]), TypeError, r"grid must be a mapping of series to policies, .*, got list"),
        (
            lambda t: sweep([t], {"x": fixed_budget(3)}),  # type: ignore[dict-item]
            TypeError,
            r"grid\['x'\] must be a sequence of policies, got BestFirst: \[policy\]",
        ),
        (lambda t: sweep([t], GRID, stop_token_ids=5), TypeError, r"stop_token_ids must be a sequence, got int 5"),
        (
            lambda t: sweep([t], GRID, stop_token_ids=[11]),
            ValueError,
            r"stop_token_ids\[0\] must be in 0 … 10 .*, got 11",
        ),
        (lambda t: sweep([t], {"tree": []}), ValueError, r"grid must hold one policy or more, got none"),
        (
            lambda t: sweep([t], {"a": [chain(1)] * 2}),
            ValueError,
            r"grid\['a'\] must hold policies .* 'chain\(1\)' twice",
        ),
        (lambda t: sweep([t], {"a": [*range(1)]}), TypeError, r"policies\[0\] must be callable .*, got int"),
        (
            lambda t: sweep([t], {"a": [limited(chain(1), topk=5)]}),
            ValueError,
            r"topk of policy limited\(chain\(1\), topk=5\) must be at most 4, what n-gram has, got 5: record more",
        ),
        (
            lambda t: sweep([t], {"a": [limited(limited(chain(1), depth=4), topk=1)]}),
            ValueError,
            r"depth of policy .* must be at most 3, what n-gram has, got 4",
        ),
    ],
)
def test_what_cannot_be_swept_is_named(traces, call, error, message):
    with pytest.raises(error, match=message):
        call(traces[0])


def encode(text):
    return [ord(c) % 11 for c in text]


def test_prompts_are_read_as_text_and_as_lines(tmp_path):
    (tmp_path / "a.py").write_text("if")
    (tmp_path / "b.jsonl").write_text(
        '"if"\n\n[1, 2]\n{"prompt": "é", "name": "accent"}\n{"token_ids": [3]}\n', encoding="utf-8"
    )
    tokens, names = read_prompts([tmp_path / "a.py", tmp_path / "b.jsonl"], encode)
    assert [t.tolist() for t in tokens] == [encode("if"), encode("if"), [1, 2], encode("é"), [3]]
    assert names == ["a.py", "b.jsonl:1", "b.jsonl:3", "accent", "b.jsonl:5"]


@pytest.mark.parametrize(
    "line, message",
    [
        ("{", r"p.jsonl:1: must be JSON, got"),
        ("[" * 10**5, r"p.jsonl:1: must be JSON, got maximum recursion"),
        ('{"token_ids": "abc"}', r"p.jsonl:1: token_ids must be a list of token ids, got str"),
        ('{"prompt": [1, 2]}', r"p.jsonl:1: prompt must be a string, got list"),
        ('{"prompt": null}', r"p.jsonl:1: prompt must be a string, got NoneType"),
        ("[1, true]", r"p.jsonl:1: token_ids must hold integer token ids, got a truth value among them"),
        ("[1, [2, 3]]", r"p.jsonl:1: token_ids must have shape \(n,\), got sequences of several lengths"),
        ("3", r"p.jsonl:1: prompt must be a string or a list of token ids, got int"),
        ('{"text": "x"}', r"p.jsonl:1: must have prompt or token_ids, one of them, got \['text'\]"),
        (
            '{"prompt": "x", "name": "\\ud800"}',
            r"p.jsonl:1: name must be text that UTF-8 can hold, got '\\ud800': surr",
        ),
        ('"\\udfff"', r"p.jsonl:1: prompt must be text that UTF-8 can hold, got '\\udfff': surrogates"),
        ('{"prompt": "x", "name": 3}', r"p.jsonl:1: name must be a string, got 3"),
        ("[-1]", r"p.jsonl:1: token_ids\[0\] must be in 0"),
        ("[0.5]", r"p.jsonl:1: token_ids must hold integer token ids, got float64"),
        ('""', r"p.jsonl:1: prompt must have one token or more, got none"),
    ],
)
def test_line_that_is_no_prompt_is_named(tmp_path, line, message):
    (tmp_path / "p.jsonl").write_text(line + "\n")
    with pytest.raises(ValueError, match=message):
        read_prompts([tmp_path / "p.jsonl"], encode)
    (tmp_path / "p.txt").write_bytes(b"\xff")
    with pytest.raises(ValueError, match=r"p.txt: must be UTF-8 text, got"):
        read_prompts([tmp_path / "p.txt"], encode)


def test_prompt_of_a_file_whose_name_is_no_text_has_one(tmp_path):
    path = Path(os.fsdecode(os.fsencode(tmp_path) + b"/bad\xff.txt"))
    try:
        path.write_text("text")
    except OSError:
        return  # a file system of UTF-8 alone
    assert read_prompts([path], encode)[1] == ["bad\ufffd.txt"]


@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_line_of_a_file_of_prompts_ends_at_a_line_feed_alone(tmp_path, end):
    texts = ["a\u2028b", "a\u0085b", "a\u2029b", "a\x1cb", "a\x0bb"]
    lines = [json.dumps({"prompt": text}, ensure_ascii=False) for text in texts[:3]] + list(map(json.dumps, texts[3:]))
    (tmp_path / "p.jsonl").write_bytes(end.join(lines).encode())
    tokens, names = read_prompts([tmp_path / "p.jsonl"], encode)
    assert [t.tolist() for t in tokens] == list(map(encode, texts))
    assert names == [f"p.jsonl:{n}" for n in range(1, 6)]


def test_vocabularies_differ_by_digest():
    assert len({vocabulary_digest(v) for v in ([b"ab", b"c"], [b"a", b"bc"], [b"ab"], [b"c", b"ab"])}) == 4


@pytest.fixture
def run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    runner = CliRunner(env={"COLUMNS": "100", "NO_COLOR": "1", "FORCE_COLOR": None})
    return lambda *words: runner.invoke(main, list(map(str, words)), catch_exceptions=False)


def test_sweep_command_writes_tables_figures_and_cells(run, traces, tmp_path, monkeypatch):
    folder = traces[0]._chunks[0].parent
    words = ("sweep", folder, "--budgets", "1,4,16", "--out", "out")
    result = run(*words)
    assert result.exit_code == 0, result.output
    written = {p.name for p in (tmp_path / "out").iterdir()}
    assert {"sweep.csv", "sweep.json", "tau_by_budget.svg", "frontier.svg", "cells"} <= written
    assert all(name in result.stdout for name in written - {"cells"})
    grid = {"tree": [fixed_budget(b) for b in (1, 4, 16)], "chain": [chain(3)]}
    expected = sweep([open_trace(folder)], grid).records()
    assert json.loads((tmp_path / "out" / "sweep.json").read_text())["cells"] == expected
    for row in expected:
        assert f"{row['tau']:.2f}" in result.stdout
    again = run("plot", "out", "-o", "figures", "--format", "png")
    assert again.exit_code == 0, again.output
    assert {"tau_by_budget.png", "frontier.png"} <= {p.name for p in (tmp_path / "figures").iterdir()}
    assert f"{expected[0]['tau']:.3f}" in again.stdout
    counting = Counting(monkeypatch)
    assert run(*words[:3], "1,4,8,16", *words[4:], "--policy", "tree", "--policy", "spine-first").exit_code == 0
    assert sorted(counting.names) == ["fixed_budget(8)", *(f"spine_first({b})" for b in (1, 16, 4, 8))]


def test_sweep_command_says_what_is_in_sample_and_where_the_record_was_too_narrow(run, traces):
    folders = [trace._chunks[0].parent for trace in traces]
    words = ["--out", "out", "--budgets", "0,3,40", "--policy", "tree", "--policy", f"static:{folders[1]}"]
    told = run("sweep", *folders, *words).stdout  # figures from budget 0 on draw without a warning
    assert "used K − 1: rounds whose tree has a candidate of the last rank that the policy sees." in told
    assert f"static:{folders[1]} was fitted to random itself: its τ there is in-sample, and flattered." in told
    assert "n-gram itself" not in told
    [listed] = re.findall(r"More than 5% of the rounds used the last rank, .* their trees: (.*)\.\n", told)
    cells = json.loads(Path("out/sweep.json").read_text())["cells"]
    wide = [r for r in cells if r["used_last_rank"] > 0.05 * r["n_rounds"]]
    assert 0 < len(wide) < len(cells)
    named = {f"{series} of {budget}" for series, _, those in (part.rpartition(" of ") for part in listed.split("; "))
             for budget in those.split(", ")}  # fmt: skip
    assert named == {f"{r['policy']} on {r['trace']} of {r['budget']}" for r in wide}
    alone = run("sweep", folders[1], "--out", "one", "--budgets", "1", "--policy", "tree").stdout
    assert "More than" not in alone
    assert "itself" not in alone
    told = " ".join(run("sweep", "--help").stdout.split())
    assert "FILE is the JSON that ddtree.costs.CostModel.save writes" in told
    assert "ddtree.costs.measure_passes" in told
    assert 'The column "used K − 1" is the share of the rounds' in told


def test_sweep_command_without_a_trace_takes_the_shipped_one(run, tmp_path):
    result = run("sweep", "--budgets", "64", "--out", "out")
    assert result.exit_code == 0, result.output
    cells = json.loads((tmp_path / "out" / "sweep.json").read_text())["cells"]
    assert [(c["trace"], c["label"]) for c in cells] == [("python-5m", "fixed_budget(64)"), ("python-5m", "chain(7)")]
    assert cells[0]["tau"] > cells[1]["tau"] > 3


def test_record_command_records_what_the_function_does(run, tmp_path):
    (tmp_path / "p.jsonl").write_text('{"token_ids": [5, 6, 7], "name": "a"}\n[9, 9]\n[4]\n')
    words = ["record", "p.jsonl", "--out", "t", "--max-new-tokens", 5, "--topk", 6, "--chunk", 2]
    result = run(*words, "--limit", 2)
    assert result.exit_code == 0, result.output
    assert "2 prompts, 10 new tokens, 8 drafts of 7 × 6" in result.stdout
    assert result.stderr == ""  # no bar where there is no terminal
    pair = load_pair()
    [chunk] = open_trace("t")
    [expected] = record(
        *(pair.target, pair.drafter, [[5, 6, 7], [9, 9]], tmp_path / "e"),
        **{"topk": 6, "max_new_tokens": 5, "stop_token_ids": [0], "names": ["a", "p.jsonl:2"]},
    )
    for f in fields(chunk):
        assert np.array_equal(getattr(chunk, f.name), getattr(expected, f.name)), f.name
    manifest = open_trace("t").manifest
    assert (manifest.target, manifest.drafter, manifest.stop_token_ids) == ("python-5m", "block drafter", (0,))
    again = run(*words, "--limit", 2)
    assert again.exit_code == 0, again.output
    assert again.stdout == "t is already complete: nothing was left to record\n" + result.stdout
    more = run(*words)
    assert more.exit_code == 2
    assert "got others (3 instead of 2, as far as they go the same): choose another folder" in " ".join(
        more.output.split()
    )
    held = run("record", "--held-out", "--limit", 1, "--drafter", "ngram", "--max-new-tokens", 2, "--out", "h")
    assert held.exit_code == 0, held.output
    [chunk] = open_trace("h")
    assert_same(chunk.prompt_tokens(0)[:-2], load_prompts().tokens[0])
    assert (chunk.names, open_trace("h").manifest.drafter) == ((load_prompts().sources[0],), "n-gram lookup")


@pytest.mark.parametrize(
    "words, message",
    [
        ([], r"give PROMPTS, or --held-out for the pair's own"),
        (["p.jsonl", "--held-out"], r"give PROMPTS or --held-out, got both: leave one of them out"),
        (["p.jsonl", "--topk", "2049"], r"topk must be in 1 … 2048 \(the vocabulary size\), got 2049"),
        (["p.jsonl", "--depth", "8"], r"Error: --depth must be at most 7, all that the block drafter drafts, got 8"),
        (["deep.jsonl"], r"deep.jsonl:1: must be JSON, got maximum recursion"),
        (["p.jsonl", "--depth", "2000000000"], r"2000000000 is not in the range 1<=x<=1024"),
        (["p.jsonl", "--max-new-tokens", "2000000000"], r"2000000000 is not in the range 1<=x<=65536"),
        (["p.jsonl", "--top-p", "2"], r"top_p must be over 0 and at most 1, got 2.0"),
        (["q.jsonl"], r"q.jsonl:1: must be JSON"),
        (["none.jsonl"], r"none.jsonl: No such file"),
        (["p.jsonl", "--pair", "nowhere"], r"nowhere/target.kdtr is missing"),
    ],
)
def test_record_command_says_in_a_line_what_is_wrong_and_writes_nothing(run, tmp_path, words, message):
    (tmp_path / "p.jsonl").write_text("[1, 2]")
    (tmp_path / "q.jsonl").write_text("{")
    (tmp_path / "deep.jsonl").write_text("[" * 10**5)
    result = run("record", "--out", "t", *words)
    assert result.exit_code in (1, 2)
    assert re.search(message, " ".join(result.output.split())), result.output
    assert not (tmp_path / "t").exists()


def test_what_does_not_fit_in_memory_is_said_in_a_line(run, traces, monkeypatch):
    def out_of_memory(*arguments):
        raise MemoryError("Unable to allocate 2.00 TiB")

    monkeypatch.setattr(sweep_module, "_replayed", out_of_memory)
    result = run("sweep", traces[0]._chunks[0].parent, "--out", "out")
    assert (result.exit_code, result.output.splitlines()[-1]) == (
        1,
        "Error: this does not fit in memory, ask for less: Unable to allocate 2.00 TiB",
    )


def test_sweep_command_gives_the_same_with_processes(run, traces, tmp_path):
    folders = [trace._chunks[0].parent for trace in traces]
    words = ["sweep", *folders, "--budgets", "1,4"]
    assert run(*words, "--out", "a").exit_code == run(*words, "--out", "b", "--jobs", 2).exit_code == 0
    for name in ("sweep.csv", "sweep.json"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()


@pytest.mark.parametrize(
    "words, message",
    [
        (["--budgets", "1,x"], r"must be whole numbers with commas between them"),
        (["--budgets", "-1"], r"-1 must be in 0 … 65,536"),
        (["--budgets", "8,2000000000"], r"2000000000 must be in 0 … 65,536"),
        (["--depth", "0"], r"0 must be in 1 … 1,024"),
        (["--depth", "1000000"], r"1000000 must be in 1 … 1,024"),
        (["--policy", "cost:deep.json"], r"deep.json: must be JSON, got maximum recursion"),
        (["--policy", "oak"], r"policy must be tree, chain"),
        (["--topk", "9"], r"topk of policy .* must be at most 4, what n-gram has, got 9"),
        (["--max-new-tokens", "99"], r"max_new_tokens must be in 1 … 20 \(what was recorded\), got 99"),
        (["nowhere"], r"nowhere/manifest.json: No such file"),
    ],
)
def test_sweep_command_says_in_a_line_what_is_wrong(run, traces, words, message):
    Path("deep.json").write_text("[" * 10**5)
    result = run("sweep", traces[0]._chunks[0].parent, "--out", "out", *words)
    assert result.exit_code in (1, 2)
    assert re.search(message, " ".join(result.output.split()))
    assert not (Path("out") / "sweep.csv").exists()


def test_files_of_one_name_keep_their_folders(traces, tmp_path):
    specs = ["tree"]
    for folder in ("one", "two"):
        (tmp_path / folder).mkdir()
        COSTS.save(tmp_path / folder / "costs.json")
        specs.append(f"cost:{tmp_path}/{folder}/costs.json")
    grid = policy_grid(specs, [8], depth=4)
    assert list(grid) == specs
    assert [policy_name(p) for ps in grid.values() for p in ps] == [
        "fixed_budget(8)", *(f"cost_aware(8, {spec})" for spec in specs[1:])
    ]  # fmt: skip
    assert len(sweep(traces[:1], policy_grid(specs, [8], depth=3)).tau) == 3
    alone = policy_grid([specs[1], specs[1]], [8], depth=4)
    assert {series: policy_name(ps[0]) for series, ps in alone.items()} == {"cost:costs.json": "cost_aware(8)"}


def test_one_file_serves_two_kinds(traces, tmp_path):
    COSTS.save(tmp_path / "costs.json")
    grid = policy_grid([f"{kind}:{tmp_path}/costs.json" for kind in ("cost", "cost-clamped")], [4], depth=3)
    assert len(sweep(traces[:1], grid).tau) == 2


def test_default_budgets_end_where_costs_were_measured(tmp_path):
    COSTS.save(tmp_path / "costs.json")
    most = int(COSTS.nodes[-1])
    spec, budgets = f"cost:{tmp_path}/costs.json", [most - 1, most, most + 1]
    (measured,) = policy_grid([spec], budgets, depth=4, as_measured=True).values()
    assert [p.budget for p in measured] == budgets[:2]
    for given in ({"budgets": budgets}, {"budgets": [most + 1], "as_measured": True}):
        with pytest.raises(ValueError, match=f"budget must be at most {most}"):
            policy_grid([spec], depth=4, **given)


def test_costs_may_be_clamped(tmp_path):
    COSTS.save(tmp_path / "costs.json")
    (plain,) = policy_grid([f"cost:{tmp_path / 'costs.json'}"], [8], depth=4).values()
    (clamped,) = policy_grid([f"cost-clamped:{tmp_path / 'costs.json'}"], [8], depth=4).values()
    assert [getattr(policy, "clamp", None) for policy in (*plain, *clamped)] == [False, True]
