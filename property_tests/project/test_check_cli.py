"""`ddtree check` and `ddtree replay`: what they print, and their exit status."""

from __future__ import annotations

import re
import sys
import types
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result

from ddtree import backends, reference, write_kdtr
from ddtree.cli import main
from ddtree.property_tests.cases import Case

Run = Callable[..., Result]


def wrong_words(parents: Any, node_counts: Any) -> Any:
    words = reference.visibility_words(parents, node_counts)
    words[..., 0] &= 3  # what a node sees beyond the second is lost
    return words


def wrong_acceptance(tree: Any, target_token_ids: Any, *, remaining: Any = None, stop_token_ids: Any = None) -> Any:
    return reference.accept_tree(tree, target_token_ids, remaining=None, stop_token_ids=stop_token_ids)


def wrong_attention(*args: Any, scale: float, kv_lora_rank: int, out: Any = None) -> Any:
    result = reference.verify_attention(*args, scale=scale, kv_lora_rank=kv_lora_rank, out=out)
    result[..., -1] *= 1.25
    return result


def wrong_top_k(logits: Any, k: int, *, vocab_size: int | None = None) -> Any:
    log_probs, token_ids = reference.topk_log_probs(logits, k, vocab_size=vocab_size)
    return log_probs - np.float32(0.5), token_ids


WRONG = {
    "visibility_words": wrong_words,
    "accept_tree": wrong_acceptance,
    "verify_attention": wrong_attention,
    "topk_log_probs": wrong_top_k,
}


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Run]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setitem(sys.modules, "wrong", types.SimpleNamespace(**WRONG, tree_positions=reference.tree_positions))
    (tmp_path / "wild.py").write_text("1 / 0\n")

    def invoke(*arguments: str, width: int = 80) -> Result:
        runner = CliRunner(env={"COLUMNS": str(width), "NO_COLOR": "1", "FORCE_COLOR": None})
        return runner.invoke(main, arguments, catch_exceptions=False)

    yield invoke
    backends.get_backend.cache_clear()


def check_of(run: Run, op: str) -> Path:
    result = run("check", "--backend", "wrong", "--ops", op, "--examples", "60")
    assert result.exit_code == 1, result.output
    return Path(f"ddtree_failures/{op}-wrong.kdtr")


@pytest.mark.parametrize("width", [80, 120])
def test_check_shows_each_operation_and_the_smallest_case_of_what_differs(run: Run, width: int) -> None:
    ops = "tree_positions,visibility_words"
    result = run("check", "--backend", "wrong", "--ops", ops, "--examples", "40", "--seed", "5", width=width)
    assert result.exit_code == 1
    assert re.search(r"^  tree_positions +40 +0   ok *$", result.stdout, re.M)
    assert re.search(r"^  visibility_words +40 +[1-9]\d*   DIFFERS *$", result.stdout, re.M)
    assert "visibility_words: result[0, 2, 0]: 1, should be 5\n" in result.stdout
    assert "  case:  ddtree_failures/visibility_words-wrong.kdtr\n" in result.stdout
    assert "  again: ddtree replay ddtree_failures/visibility_words-wrong.kdtr\n" in result.stdout
    assert max(map(len, result.stdout.splitlines())) <= width
    case = Case.read(Path("ddtree_failures/visibility_words-wrong.kdtr"))
    assert case.arguments["parents"].tolist() == [[-1, 0, 0]]
    assert (case.about["seed"], case.about["test"]) == ("5", "ddtree check")


def test_check_of_a_right_backend_writes_nothing(run: Run, tmp_path: Path) -> None:
    result = run("check", "--backend", "numba_cpu", "--ops", "accept_tree, tree_positions", "--examples", "20")
    assert result.exit_code == 0
    assert result.stdout.endswith("numba_cpu agrees with the reference.\n")
    assert not (tmp_path / "ddtree_failures").exists()


@pytest.mark.parametrize(
    ("op", "shown"),
    [
        (
            "visibility_words",
            [r"^result: first wrong element \[0, 2, 0\]; 1 of 3 differ *$", r"^  >   \[0, 2, 0\] +5 +1 *$"],
        ),
        ("accept_tree", [r"^request 0 is the first that differs *$", r"^  >   lengths +0 +1 *$"]),
        ("verify_attention", [r"the worst row is off by .*, .* is allowed", r"^result: worst element \[.*\], off by "]),
        (
            "topk_log_probs",
            [r"^log_probs\[0, 0\]\[0\]: -0.5, should be 0.0$", r"^log_probs: worst element \[0, 0, 0\], off by 0.5; "],
        ),
    ],
)
@pytest.mark.parametrize("width", [80, 120])
def test_replay_shows_what_differs_side_by_side(run: Run, op: str, shown: list[str], width: int) -> None:
    path = check_of(run, op)
    result = run("replay", str(path), width=width)
    assert result.exit_code == 1
    assert result.stdout.startswith(f"{op}[wrong] differs from the reference\n")
    for pattern in shown:
        assert re.search(pattern, result.stdout, re.M), result.stdout
    assert re.search(r"^given: [\w.]+ ", result.stdout, re.M)
    assert "test: ddtree check\n" in result.stdout
    assert max(map(len, result.stdout.splitlines())) <= width
    mended = run("replay", str(path), "--backend", "reference")
    assert (mended.exit_code, mended.stdout) == (0, f"{op}[reference] is the same as the reference\n")


def a_tree_case(path: str) -> None:
    log_probs = np.array([[[-0.125, -0.25]] * 2], np.float32)
    drafted = {"log_probs": log_probs, "token_ids": np.array([[[5, 6], [7, 8]]], np.int32)}
    Case("build_tree", "changed", drafted | {"root_token_ids": np.array([1], np.int32), "budget": 3}).write(Path(path))


@pytest.mark.parametrize(
    ("change", "shown"),
    [
        (
            lambda tree: {"parents": np.where(tree.ranks == 1, np.int32(3), tree.parents)},
            [
                r"^request 0, node 3 is the first that differs; 1 of 4 do$",
                r"^  >   3 +\(1\) +6 +-0.25 +no path: parent 3",
            ],
        ),
        (
            lambda tree: {"node_counts": tree.node_counts - 1},
            [r"^request 0, node 3 is the first that differs; 1 of 4 do$", r"^  >   3 +\(1\) +6 +-0.25 +- +- +- *$"],
        ),
        (
            lambda tree: {"visibility_words": tree.visibility_words ^ np.uint32(4)},
            [r"^rank paths, tokens and scores are equal: only what follows from them differs$"],
        ),
    ],
    ids=["a node that is its own parent", "a node less", "visibility"],
)
def test_replay_shows_a_tree_node_by_node(
    run: Run, change: Callable[..., Any], shown: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def build_tree(*args: Any, budget: int) -> Any:
        tree = reference.build_tree(*args, budget=budget)
        return replace(tree, **change(tree))

    monkeypatch.setitem(sys.modules, "changed", types.SimpleNamespace(build_tree=build_tree))
    a_tree_case("tree.kdtr")
    result = run("replay", "tree.kdtr", width=120)
    assert result.exit_code == 1
    for pattern in shown:
        assert re.search(pattern, result.stdout, re.M), result.stdout


def test_replay_of_an_operation_that_raises_shows_what_it_raised(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    path = check_of(run, "visibility_words")

    def raises(*args: Any) -> None:
        raise RuntimeError("no kernel image")

    monkeypatch.setitem(sys.modules, "raising", types.SimpleNamespace(visibility_words=raises))
    result = run("replay", str(path), "--backend", "raising")
    assert result.exit_code == 1
    assert "\nraised RuntimeError: no kernel image\n" in result.stdout
    assert re.search(r"\n  at .*test_check_cli\.py:\d+, in raises: raise RuntimeError\(", result.stdout)


def test_a_backend_that_wants_to_end_the_run_has_failed(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def leaves(*args: Any) -> None:
        raise SystemExit(0)

    monkeypatch.setitem(sys.modules, "leaving", types.SimpleNamespace(tree_positions=leaves))
    result = run("check", "--backend", "leaving", "--examples", "5")
    assert result.exit_code == 1
    assert "raised SystemExit: 0" in result.stdout
    again = run("replay", "ddtree_failures/tree_positions-leaving.kdtr")
    assert (again.exit_code, "raised SystemExit: 0" in again.stdout) == (1, True)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("replay", "wide.kdtr"), "wide.kdtr: tree_positions cannot take its inputs: depths must be int32, as back"),
        (("replay", "nothing.kdtr"), "nothing.kdtr: No such file or directory"),
        (("replay", "text.kdtr"), "text.kdtr: 5 bytes are too few for a header of 64 (at byte 5)"),
        (("replay", "cut.kdtr"), "cut.kdtr: truncated: "),
        (
            ("replay", "other.kdtr"),
            "other.kdtr is a KDTR file, but not a case: its metadata lack kind = 'ddtree case 1'",
        ),
        (("replay", "odd.kdtr"), "odd.kdtr: tree_positions cannot take its inputs: depths must be of type int32"),
        (("replay", "good.kdtr", "--backend", "nothing"), "backend must be one of reference, numba_cpu"),
        (("replay", "good.kdtr", "--backend", "wild"), "importing wild raised ZeroDivisionError: division by zero"),
        (("replay", "good.kdtr", "--backend", "half"), "half has no tree_positions; it has: accept_tree"),
        (("check", "--backend", "nothing"), "backend must be one of reference, numba_cpu"),
        (("check", "--backend", "half", "--ops", "build_tree"), "half has no build_tree; it has: accept_tree"),
        (("check", "--backend", "numba_cuda"), "backend 'numba_cuda' "),
    ],
)
def test_what_cannot_run_here_is_one_line_and_status_2(
    run: Run, arguments: tuple[str, ...], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "half", types.SimpleNamespace(accept_tree=reference.accept_tree))
    good = {"depths": np.zeros((1, 2), np.int32), "prefix_lens": np.zeros(1, np.int32)}
    Case("tree_positions", "reference", good).write(Path("good.kdtr"))
    Case("tree_positions", "reference", good | {"depths": np.zeros((1, 2))}).write(Path("odd.kdtr"))
    Case("tree_positions", "reference", good | {"depths": np.zeros((1, 2), np.int64)}).write(Path("wide.kdtr"))
    Path("text.kdtr").write_text("hello")
    Path("cut.kdtr").write_bytes(Path("good.kdtr").read_bytes()[:-1])
    write_kdtr("other.kdtr", {"x": np.zeros(3)})
    result = run(*arguments)
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith(f"Error: {message}"), result.stderr
    assert len(result.stderr.splitlines()) == 1


def test_check_without_hypothesis_says_how_to_get_it(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "hypothesis", None)
    result = run("check", "--backend", "reference")
    assert result.exit_code == 2
    assert result.stderr == (
        "Error: drawing inputs needs Hypothesis, which is not installed: pip install 'ddtree[test]'\n"
    )
