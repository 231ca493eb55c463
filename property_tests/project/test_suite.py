"""The suite as a kernel author meets it: pytest on a backend of one's own, in a folder of one's own."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from ddtree.property_tests.cases import Case, Law, add_to
from ddtree.protocols import OPS

MINE = '''
from dataclasses import replace
import numpy as np
from ddtree import reference

def tree_positions(depths, prefix_lens):
    return reference.tree_positions(depths, prefix_lens)

def visibility_words(parents, node_counts):
    words = reference.visibility_words(parents, node_counts)
    words[..., 1:] = 0  # the second word of bits is never written
    return words

class Whole:
    """Every operation, right."""
for name in reference.__all__:
    if callable(getattr(reference, name, None)):
        setattr(Whole, name, staticmethod(getattr(reference, name)))

class OnGpu:
    array_kind = "cupy"
    tree_positions = staticmethod(tree_positions)
'''


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "mine.py").write_text(MINE, encoding="utf-8")
    (tmp_path / "broken.py").write_text("import nothing_of_that_name\n")
    (tmp_path / "wild.py").write_text("1 / 0\n")
    return tmp_path


def suite(folder: Path, *options: str, tests: str = "ddtree.property_tests", width: int = 80) -> tuple[int, str]:
    """Run it as the command does: the current folder is not on the path by itself."""
    command = [
        str(Path(sys.executable).with_name("pytest")),
        "-q",
        "-p",
        "no:cacheprovider",
        "--pyargs",
        tests,
        *options,
    ]
    environment = os.environ | {"COLUMNS": str(width), "DDTREE_PROFILE": "ci", "PYTEST_ADDOPTS": ""}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout + done.stderr


def summary(output: str) -> str:
    return output.partition(" ddtree: laws, by backend and operation ")[2]


def test_a_backend_with_some_operations_gets_their_laws_and_is_told_what_was_not_run(folder: Path) -> None:
    status, output = suite(
        folder, "--ddtree-backend", "mine", "--ddtree-examples", "7", "--ddtree-ops", "tree_positions,choose_tokens"
    )
    assert status == 0, output
    told = summary(output)
    assert re.search(r"^mine  tree_positions: of 3 laws 3 hold; 7 examples, 11 calls$", told, re.M), told
    # a property has the examples that were asked for, and a table its rows
    assert re.search(r"^ +7  position is the prefix and the steps from the root$", told, re.M)
    assert re.search(r"^ +3  roots stand at the prefix$", told, re.M)
    assert "not run: choose_tokens, which mine does not have" in told
    unnamed = (
        " ".join(told.split()).partition("not run: topk_log_probs, ")[2].partition(", which --ddtree-ops does not")
    )
    assert unnamed[0].split(", ") == [op for op in list(OPS)[1:] if op not in ("tree_positions", "choose_tokens")]
    assert told.count("build_tree") == 1  # for one reason
    assert "not run: laws of the engine on mine" in told
    assert max(map(len, told.splitlines()[1:])) <= 80


def test_a_failure_is_kept_and_its_message_says_where_and_how_to_see_it_again(folder: Path) -> None:
    options = ("--ddtree-backend", "mine", "--ddtree-ops", "visibility_words", "--ddtree-failures", "kept")
    tests = "ddtree.property_tests.test_visibility"
    status, output = suite(folder, *options, tests=tests)
    assert status == 1
    path = "kept/node_sees_itself_and_its_ancestors-mine.kdtr"
    lines = [line.removeprefix("E").strip() for line in output.splitlines()]
    at = lines.index(f"case:  {path}")
    assert lines[at - 1].startswith("visibility_words[mine] differs from the reference: result[0, 32, 1]: 0, should be")
    assert lines[at + 1] == f"again: ddtree replay {path}"
    case = Case.read(folder / path)
    assert case.arguments["node_counts"].tolist() == [33]
    assert case.about["test"] == "test_visibility.py::test_node_sees_itself_and_its_ancestors[mine]"
    assert re.search(r"^ +\d+  node sees itself and its ancestors  FAILED$", summary(output), re.M)
    assert re.search(
        r"^mine  visibility_words: of \d laws \d hold, \d fail; ([\d,]+ examples, )?[\d,]+ calls$",
        summary(output),
        re.M,
    )
    # the same case stands at the same place after another run
    before = (folder / path).read_bytes()
    suite(folder, *options, tests=tests)
    assert (folder / path).read_bytes() == before


def test_examples_are_drawn_again_from_the_same_seed(folder: Path) -> None:
    (folder / "log.py").write_text(
        "from ddtree import reference\n"
        "def tree_positions(depths, prefix_lens):\n"
        "    print('drawn', depths.tolist(), prefix_lens.tolist())\n"
        "    return reference.tree_positions(depths, prefix_lens)\n"
    )
    options = ("-s", "--ddtree-backend", "log", "--ddtree-examples", "9")
    drawn = []
    for seed in ("1", "1", "2"):
        _, output = suite(folder, *options, "--ddtree-seed", seed, tests="ddtree.property_tests.test_tree_positions")
        drawn.append(re.findall(r"drawn .*", output))
    assert len(drawn[0]) > 9
    assert drawn[0] == drawn[1] != drawn[2]


def test_a_backend_with_every_operation_also_carries_the_engine_and_the_model(folder: Path) -> None:
    status, output = suite(
        folder, "--ddtree-backend", "mine:Whole", "--collect-only", "--ddtree-backend", "mine", width=120
    )
    assert status == 0, output
    collected = set(re.findall(r"(\w+\.py)::(\w+)\[", output))
    for module, test in (
        ("test_engine.py", "test_drafting_gives_the_autoregressive_tokens"),
        ("test_model.py", "test_prefill_equals_transformers"),
        ("test_field_cases.py", "test_unused_slots_are_not_accepted_when_the_target_says_0"),
    ):
        assert (module, test) in collected
    assert not any(module in ("test_strategies.py", "test_drafters.py", "test_layers.py") for module, _ in collected)
    assert "[mine:Whole" in output
    assert "[mine]" in output
    assert not re.search(r"\[(reference|numba_cpu)", output)


def test_a_backend_that_cannot_run_here_is_skipped_with_the_reason(folder: Path) -> None:
    status, output = suite(folder, "--ddtree-backend", "mine:OnGpu", tests="ddtree.property_tests.test_tree_positions")
    if "4 passed" in output:
        pytest.skip("no GPU is missing here")
    assert status == 0, output
    assert re.search(r"^mine:OnGpu  tree_positions: of 2 laws 0 hold, 2 skipped$", summary(output), re.M), output
    assert re.search(r"position is the prefix .*  skipped: no GPU$", summary(output), re.M)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--ddtree-backend", "nothing"], "--ddtree-backend: backend must be one of reference, numba_cpu, numba_cuda"),
        (["--ddtree-backend", "mine:Nothing"], "--ddtree-backend: backend 'mine:Nothing': module 'mine' has no object"),
        (["--ddtree-backend", "os"], "--ddtree-backend: backend 'os' has no operation: define any of topk_log_probs"),
        (["--ddtree-backend", "broken"], "--ddtree-backend: backend 'broken' cannot be imported: No module named"),
        (["--ddtree-backend", "wild"], "--ddtree-backend: importing wild raised ZeroDivisionError: division by zero"),
        (["--ddtree-ops", "grow_tree"], "--ddtree-ops must be of topk_log_probs, build_tree, "),
        (["--ddtree-backend", "mine", "--ddtree-ops", "build_tree"], "--ddtree-ops: mine has none of build_tree, only"),
        (["--ddtree-examples", "0"], "--ddtree-examples must be at least 1, got 0"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_wrong_option_is_one_line(options: list[str], message: str, folder: Path) -> None:
    status, output = suite(folder, *options)
    assert status == 4
    lines = output.strip().splitlines()
    assert len(lines) == 1, output
    assert lines[0].startswith(f"ERROR: {message}")


def test_other_peoples_runs_are_left_alone(folder: Path) -> None:
    """The plugin is loaded wherever ddtree is installed."""
    (folder / "test_theirs.py").write_text("def test_theirs():\n    pass\n")
    command = [str(Path(sys.executable).with_name("pytest")), "-q", "-p", "no:cacheprovider"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True)
    assert "1 passed" in done.stdout
    assert "ddtree" not in done.stdout


def test_summary_is_the_same_under_xdist(folder: Path) -> None:
    options = ("--ddtree-backend", "mine", "--ddtree-ops", "tree_positions", "--ddtree-examples", "7")
    tests = "ddtree.property_tests.test_tree_positions"
    one, two = (summary(suite(folder, *options, *more, tests=tests)[1]) for more in ((), ("-n", "2")))
    assert "10 calls" in one
    assert re.split(r"\d+ passed", one)[0] == re.split(r"\d+ passed", two)[0]


# How examples are counted

COUNTED = """
import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import assume, given
from ddtree.property_tests._backends import Operation

DEPTHS = np.zeros((1, 1), np.int32)
NUMBERS = st.integers(0, 10**9)

def call(op, n=0):
    return op(DEPTHS, np.array([n], np.int32))

@given(n=NUMBERS)
def test_one_call_an_example(tree_positions, n):
    call(tree_positions, n)

@given(n=NUMBERS)
def test_three_calls_an_example(tree_positions, n):
    for more in range(3):
        call(tree_positions, n + more)

@given(n=NUMBERS)
def test_the_same_call_every_time(tree_positions, n):
    call(tree_positions)

@given(n=NUMBERS)
def test_no_call(tree_positions, n):
    pass

@given(n=NUMBERS)
def test_calls_of_the_bare_function(tree_positions, n):
    tree_positions.function(DEPTHS, np.array([n], np.int32))

@given(n=NUMBERS)
def test_calls_of_another_operation(tree_positions, n):
    Operation("visibility_words", "reference")(np.full((1, 1), -1, np.int32), np.ones(1, np.int32))

@given(n=NUMBERS)
def test_examples_that_are_set_aside(tree_positions, n):
    call(tree_positions, n)
    assume(n % 2)

@given(n=NUMBERS)
def test_a_law_that_fails(tree_positions, n):
    call(tree_positions, n)
    assert n < 10**6

@given(n=NUMBERS)
def test_a_law_of_two_operations(tree_positions, visibility_words, n):
    call(tree_positions, n)
    visibility_words(np.full((1, 1), -1, np.int32), np.ones(1, np.int32))

@pytest.mark.parametrize("n", range(30))
def test_a_table(tree_positions, n):
    call(tree_positions, n)
"""
COUNTS = {
    # of 20 drawn examples each, how many count
    "one call an example": 20,
    "three calls an example": 20,
    "the same call every time": 1,
    "no call": 0,
    "calls of the bare function": 0,
    "calls of another operation": 0,
    "examples that are set aside": 20,  # those that are kept; as many again are drawn
    "a law that fails": 0,
    "a law of two operations": 20,
    "a table": 0,
}


@pytest.fixture
def counted(folder: Path) -> Callable[..., tuple[int, str]]:
    """Runs laws that are counted in every way there is, as laws of the suite."""
    laws = folder / "laws"
    laws.mkdir()
    (laws / "__init__.py").touch()
    (laws / "test_counted.py").write_text(COUNTED, encoding="utf-8")
    (laws / "conftest.py").write_text(
        "from pathlib import Path\n"
        "from ddtree.property_tests import conftest as suites\n"
        "suites.HERE = Path(__file__).parent\n"
        "from ddtree.property_tests.conftest import *\n",
        encoding="utf-8",
    )

    def run(*options: str) -> tuple[int, str]:
        quiet = [] if "no:terminal" in options else ["-q"]  # which is an option of that plugin
        command = [str(Path(sys.executable).with_name("pytest")), *quiet, "-p", "no:cacheprovider", "laws"]
        command += ["--ddtree-backend", "reference", "--ddtree-examples", "20", *options]
        environment = os.environ | {"COLUMNS": "120", "DDTREE_PROFILE": "ci", "PYTEST_ADDOPTS": ""}
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
        return done.returncode, done.stdout + done.stderr

    return run


def total(output: str) -> int:
    (found,) = re.findall(r"^drawn examples, each counted once: ([\d,]+)", output, re.M)
    return int(found.replace(",", ""))


@pytest.mark.parametrize("law", COUNTS)
def test_an_example_counts_once_if_an_operation_of_its_law_was_called_and_the_law_held(
    law: str, counted: Callable[..., tuple[int, str]]
) -> None:
    named = f"test_{law.replace(' ', '_')}"
    status, output = counted("-k", named, "--ddtree-at-least", str(COUNTS[law]))
    assert status == int(law == "a law that fails"), output
    assert total(output) == COUNTS[law]


@pytest.mark.parametrize("law", ["one call an example", "no call"])
def test_one_example_more_than_there_are_is_too_many(law: str, counted: Callable[..., tuple[int, str]]) -> None:
    status, output = counted("-k", f"test_{law.replace(' ', '_')}", "--ddtree-at-least", str(COUNTS[law] + 1))
    assert status == 1
    assert re.search(rf"^FAILED: --ddtree-at-least asks for {COUNTS[law] + 1}$", output, re.M), output


@pytest.mark.parametrize("options", [(), ("-n", "2")], ids=["one process", "xdist"])
def test_examples_of_all_laws_add_up(options: tuple[str, ...], counted: Callable[..., tuple[int, str]]) -> None:
    status, output = counted(*options)
    assert status == 1  # one law fails
    assert total(output) == sum(COUNTS.values())  # the law of two operations is under the first of them alone
    assert re.search(r"^reference  tree_positions: of 10 laws 9 hold, 1 fail; 61 examples, ", output, re.M), output


def test_a_backend_named_twice_counts_once(counted: Callable[..., tuple[int, str]]) -> None:
    _, output = counted("--ddtree-backend", "reference")
    assert total(output) == sum(COUNTS.values())


def test_a_run_without_a_report_has_too_few_examples(counted: Callable[..., tuple[int, str]]) -> None:
    status, _ = counted("-k", "one_call", "--ddtree-at-least", "1", "-p", "no:terminal")
    assert status == 1


def test_a_run_of_nothing_has_too_few_examples(counted: Callable[..., tuple[int, str]]) -> None:
    status, output = counted("-k", "nothing_of_that_name", "--ddtree-at-least", "1")
    assert (status, total(output)) == (1, 0)


# What a failure leaves

WITHOUT_COMPACTION = """
from ddtree import reference

class Engine:
    pass

for name in ("build_tree", "tree_positions", "choose_tokens", "accept_tree", "compact_cache"):
    setattr(Engine, name, staticmethod(getattr(reference, name)))
Engine.compact_cache = staticmethod(lambda *args: None)
"""


def replayed(folder: Path, path: str, *options: str) -> tuple[int, str]:
    command = [str(Path(sys.executable).with_name("ddtree")), "replay", path, *options]
    environment = os.environ | {"COLUMNS": "120", "DDTREE_PROFILE": "ci", "NO_COLOR": "1"}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout + done.stderr


def test_a_broken_law_of_the_engine_is_kept_and_run_again_on_its_example(folder: Path) -> None:
    (folder / "eager.py").write_text(WITHOUT_COMPACTION, encoding="utf-8")
    options = ("--ddtree-backend", "eager:Engine", "-k", "alone_as_in_a_batch")
    status, output = suite(folder, *options, tests="ddtree.property_tests.test_engine", width=200)
    assert status == 1, output
    path = "ddtree_failures/request_gets_the_same_tokens_alone_as_in_a_batch-eager-Engine.kdtr"
    lines = [line.removeprefix("E").strip() for line in output.splitlines()]
    at = lines.index(f"law:   {path}")
    assert lines[at + 1] == f"again: ddtree replay {path}"
    law = Law.read(folder / path)
    assert law.node.endswith("test_engine::test_request_gets_the_same_tokens_alone_as_in_a_batch[eager:Engine]")
    assert law.backends == ["eager:Engine"]
    (drawn,) = set(re.findall(r"prompts=(\[.*\]),$", output, re.M))
    status, output = replayed(folder, path)
    assert status == 1, output
    assert output.endswith("the law is still broken\n")
    assert set(re.findall(r"prompts=(\[.*\]),$", output, re.M)) == {drawn}
    assert re.search(r"^failed: \w+", output, re.M)
    assert re.search(r"^blob: \d+\.\d+\S* \S+$", output, re.M)
    assert re.search(
        r"^pytest --pyargs 'ddtree.property_tests.test_engine::\S+' --ddtree-backend eager:Engine", output, re.M
    )
    # another backend would be another test
    assert replayed(folder, path, "--backend", "reference")[0] == 2
    (folder / "eager.py").write_text(WITHOUT_COMPACTION.replace("Engine.compact_cache =", "unused ="), encoding="utf-8")
    status, output = replayed(folder, path)
    assert status == 0, output
    assert output.endswith("the law holds on the example\n")


def test_a_law_that_is_broken_between_right_calls_is_run_again(
    folder: Path, counted: Callable[..., tuple[int, str]]
) -> None:
    assert counted("-k", "a_law_that_fails")[0] == 1
    path = "ddtree_failures/a_law_that_fails-reference.kdtr"
    assert Case.read(folder / path).arguments["prefix_lens"].tolist() == [10**6]
    status, output = replayed(folder, path)
    assert status == 1, output
    assert output.startswith("tree_positions[reference] is the same as the reference\nIt failed by a law between calls")
    assert re.search(r"^ +n=1000000,$", output, re.M)
    file = folder / "laws/test_counted.py"
    file.write_text(COUNTED.replace("assert n < 10**6", "assert n <= 10**6"), encoding="utf-8")
    assert replayed(folder, path)[0] == 0
    # an example that the law does not draw any more cannot be run, nor one of another Hypothesis
    two = "NUMBERS = st.tuples(st.integers(0, 9), st.integers(0, 9)).map(sum)"
    file.write_text(COUNTED.replace("NUMBERS = st.integers(0, 10**9)", two), encoding="utf-8")
    assert replayed(folder, path)[0] == 2
    add_to(folder / path, {"blob": "1.2.3 AXic"})
    status, output = replayed(folder, path)
    assert (status, "the example is one of Hypothesis 1.2.3, and" in output) == (2, True), output


def test_a_case_says_its_blob_its_tolerance_and_the_commit(folder: Path) -> None:
    (folder / "far.py").write_text(
        "import numpy as np\n"
        "from ddtree import reference\n"
        "def topk_log_probs(logits, k, *, vocab_size=None):\n"
        "    log_probs, token_ids = reference.topk_log_probs(logits, k, vocab_size=vocab_size)\n"
        "    return log_probs - np.float32(1e-3), token_ids\n",
        encoding="utf-8",
    )
    options = ("--ddtree-backend", "far", "-k", "order_is_exact", "--ddtree-seed", "7")
    status, _ = suite(folder, *options, tests="ddtree.property_tests.test_topk_log_probs")
    assert status == 1
    path = "ddtree_failures/order_is_exact_and_values_are_near-far.kdtr"
    about = Case.read(folder / path).about
    row = "topk_log_probs, float32: 1e-06 times max(1, |log Z|, |logit|)"
    assert about["tolerance"].startswith(row)
    assert about["seed"] == "7"
    assert re.fullmatch(r"[0-9a-f]{12}( with changes)?|", about.get("commit", ""))
    assert Law.read(folder / path).blob is not None
    status, output = replayed(folder, path)
    assert status == 1
    assert f"tolerance: {row}" in output
    assert re.search(r"^blob: \d", output, re.M)
    if "commit" in about:
        assert f"commit: {about['commit']}\n" in output
