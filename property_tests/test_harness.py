"""The harness finds what is planted in a backend, shrinks it to the case known to be smallest, and keeps it."""

import itertools
import re
import sys
import types
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import find, settings

from ddtree import reference
from ddtree.kdtr import read_kdtr, write_kdtr
from ddtree.property_tests._backends import RECENT, Operation
from ddtree.property_tests.cases import Case, Law, named_leaves
from ddtree.property_tests.harness import check_operation, difference, input_fault, keep, rerun
from ddtree.property_tests.strategies import calls
from ddtree.protocols import OPS
from ddtree.trees import Acceptance, tree_from_parents


def of_the_array(name):
    """A planted backend's build_tree, its result's field ``name`` one too large everywhere."""

    def build_tree(log_probs, token_ids, root_token_ids, *, budget):
        tree = reference.build_tree(log_probs, token_ids, root_token_ids, budget=budget)
        return replace(tree, **{name: getattr(tree, name) + 1})

    return build_tree


def ties_the_other_way(log_probs, token_ids, root_token_ids, *, budget):
    """Of equal log-probs, takes the last first."""
    nudge = np.float32(1e-6) * np.arange(log_probs.shape[2], dtype=np.float32)[::-1]
    tree = reference.build_tree(log_probs - nudge, token_ids, root_token_ids, budget=budget)
    for b, n in enumerate(tree.node_counts):
        for i in range(1, n):
            step = np.float64(log_probs[b, tree.depths[b, i] - 1, tree.ranks[b, i]])
            tree.scores[b, i] = tree.scores[b, tree.parents[b, i]] + step
    return tree


def blind_past_a_word(parents, node_counts):
    """Off by one at 32 nodes: the second word of bits is never written."""
    words = reference.visibility_words(parents, node_counts)
    words[..., 1:] = 0
    return words


def first_child_alone(tree, target_token_ids, *, remaining=None, stop_token_ids=None):
    """Goes down by index: of siblings, only the first can be accepted."""
    first = np.array([[i not in row[:j] for j, i in enumerate(row)] for row in tree.parents.tolist()])
    tokens = np.where(first.reshape(tree.parents.shape), tree.token_ids, np.int32(99))
    return reference.accept_tree(
        replace(tree, token_ids=tokens), target_token_ids, remaining=remaining, stop_token_ids=stop_token_ids
    )


def first_layer_alone(kv_cache, page_table, prefix_lens, acceptance):
    """Moves the rows of one layer."""
    reference.compact_cache(kv_cache[:1], page_table, prefix_lens, acceptance)


def rounded_attention(q, kv_cache, page_table, prefix_lens, tree, *, scale, kv_lora_rank, out=None):
    """Loses the lower half of every query, as bfloat16 does."""
    q = (q.astype(np.float32).view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32).astype(q.dtype)
    return reference.verify_attention(
        q, kv_cache, page_table, prefix_lens, tree, scale=scale, kv_lora_rank=kv_lora_rank, out=out
    )


def unnormalised(logits, k, *, vocab_size=None):
    log_probs, token_ids = reference.topk_log_probs(logits, k, vocab_size=vocab_size)
    return log_probs - np.float32(1e-4), token_ids


def first_of_all_logits(logits, **options):
    return logits.argmax(-1).astype(np.int32)


def raises(depths, prefix_lens):
    raise RuntimeError("no kernel image\nfor this device")


def writes_into_its_input(depths, prefix_lens):
    positions = reference.tree_positions(depths, prefix_lens)
    depths.flags.writeable = True
    depths += prefix_lens[:, None]
    return positions


@pytest.fixture
def planted(monkeypatch):
    """Makes a backend of one function."""

    def plant(op, function):
        name = f"planted_{next(NUMBERS)}"  # a name of its own: backends are remembered by name
        monkeypatch.setitem(sys.modules, name, types.SimpleNamespace(**{op: function}))
        return name

    return plant


NUMBERS = itertools.count()
SMALLEST = {
    # what differs in the smallest case, and how that looks: a law on its arguments
    "ties": ("build_tree", ties_the_other_way, r"tree.token_ids\[0, 2\]: 1, should be 0",
             lambda given: (given["budget"], given["log_probs"].any()) == (2, False)),
    "words": ("visibility_words", blind_past_a_word, r"result\[0, 32, 1\]: 0, should be 1",
              lambda given: given["node_counts"].tolist() == [33]),
    "siblings": ("accept_tree", first_child_alone, r"acceptance.node_indices\[0, 1\]: -1, should be 2",
                 lambda given: given["tree"].parents.tolist() == [[-1, 0, 0]]),
    "layers": ("compact_cache", first_layer_alone, r"bits of kv_cache\[1, ",
                lambda given: given["acceptance"].lengths.max() <= 3),
    "rounding": ("verify_attention", rounded_attention, r"the worst row is off by .*, .* is allowed",
                 lambda given: given["tree"].node_counts.tolist() == [2]),
    "normalisation": ("topk_log_probs", unnormalised, r"log_probs\[0, 0\]\[0\]: .*, should be",
                      lambda given: given["logits"].shape == (1, 1, 1)),
    "unusable logits": ("choose_tokens", first_of_all_logits, r"result\[0, 0\]: 0, should be (-1|1)",
                        lambda given: given["logits"].shape in ((1, 1, 1), (1, 1, 2))),
    "exception": ("tree_positions", raises, r"raised RuntimeError: no kernel image$",
                  lambda given: given["depths"].size == 0),
    "write": ("tree_positions", writes_into_its_input, r"tree_positions\[planted_\d+\] wrote into depths$",
              lambda given: given["depths"].size <= 2 and given["prefix_lens"].sum() == 1),
    "type": ("visibility_words", lambda p, c: reference.visibility_words(p, c).astype(np.int64),
             r"result is of type int64, should be uint32", lambda given: given["parents"].size == 0),
    "no array": ("visibility_words", lambda p, c: None, r"the result cannot be compared: it is a NoneType",
                 lambda given: given["parents"].size == 0),
}  # fmt: skip


@pytest.mark.parametrize("name", SMALLEST)
def test_planted_fault_is_found_shrunk_kept_and_still_there_when_replayed(name, planted, tmp_path):
    op, function, message, smallest = SMALLEST[name]
    backend = planted(op, function)
    found = check_operation(backend, op, examples=80, folder=tmp_path)
    assert found.examples >= 40
    assert 0 < found.mismatches <= found.examples
    assert re.search(message, found.first), found.first
    case = Case.read(found.case)
    assert smallest(case.arguments), case.arguments
    assert difference(rerun(case, Operation(op, backend))).splitlines()[0] == found.first
    assert difference(rerun(case, Operation(op, "reference"))) == ""


@pytest.mark.parametrize("name", ["token_ids", "parents", "depths", "ranks", "scores", "node_counts"])
def test_every_array_of_a_result_counts(name, planted):
    found = check_operation(planted("build_tree", of_the_array(name)), "build_tree", examples=20)
    assert found.mismatches > 0
    assert found.first.startswith(f"tree.{name}[0")
    assert found.case is None


@pytest.mark.parametrize("op", OPS)
def test_reference_agrees_with_itself_on_as_many_examples_as_were_asked_for(op):
    seen = []
    found = check_operation("reference", op, examples=60, on_example=lambda: seen.append(1))
    assert (found.mismatches, found.first, found.examples) == (0, "", 60)
    assert len(seen) == 60


def test_the_same_seed_draws_the_same_examples_and_another_others(planted):
    drawn: list[list[Any]] = []

    def watched(parents, node_counts):
        drawn[-1].append(parents.tolist())
        return reference.visibility_words(parents, node_counts)

    backend = planted("visibility_words", watched)
    for seed in (1, 1, 2):
        drawn.append([])
        check_operation(backend, "visibility_words", examples=30, seed=seed)
    assert drawn[0] == drawn[1] != drawn[2]


def test_a_failing_test_keeps_the_first_of_its_calls_that_differs(planted, tmp_path):
    backend = planted("tree_positions", lambda depths, prefix_lens: depths + 2 * prefix_lens[:, None])
    RECENT.clear()
    for prefix in (0, 5, 6):
        Operation("tree_positions", backend)(np.zeros((1, 2), np.int32), np.array([prefix], np.int32))
    told = keep(tmp_path / "a" / "case.kdtr", {"test": "mine"})
    assert told == [
        f"tree_positions[{backend}] differs from the reference: result[0, 0]: 10, should be 5",
        f"case:  {tmp_path / 'a' / 'case.kdtr'}",
        f"again: ddtree replay {tmp_path / 'a' / 'case.kdtr'}",
    ]
    arrays, about = read_kdtr(tmp_path / "a" / "case.kdtr")
    assert {name: a.tolist() for name, a in arrays.items()} == {
        "input/depths": [[0, 0]],
        "input/prefix_lens": [5],
        "expected/result": [[5, 5]],
        "got/result": [[10, 10]],
    }
    assert (about["op"], about["backend"], about["test"]) == ("tree_positions", backend, "mine")
    assert f"numpy {np.__version__}" in about["versions"]


def test_a_test_that_called_nothing_keeps_what_is_known_of_it(tmp_path):
    RECENT.clear()
    path = tmp_path / "law.kdtr"
    about = {"module": "a.b", "test": "b.py::test_x[y]", "backends": '["m:o"]', "blob": "6.1 AXic"}
    assert keep(path, about) == [f"law:   {path}", f"again: ddtree replay {path}"]
    law = Law.read(path)
    assert (law.node, law.backends, law.blob) == ("a.b::test_x[y]", ["m:o"], ("6.1", b"AXic"))
    assert f"numpy {np.__version__}" in law.about["versions"]


LAW_ABOUT = {"kind": "ddtree law 1", "module": "m", "test": "t.py::t", "backends": "[]"}


@pytest.mark.parametrize(
    "about, message",
    [
        ({}, "neither a case nor a law"),
        (LAW_ABOUT | {"kind": "ddtree law 2"}, "neither a case nor a law"),
        ({"kind": "ddtree law 1", "test": "t"}, "its metadata lack module, backends$"),
        (LAW_ABOUT | {"module": "--junitxml=here"}, "module in the metadata must be a module's name, got '--junit"),
        (LAW_ABOUT | {"backends": '"ab"'}, "backends in the metadata must be a JSON list of names"),
        (LAW_ABOUT | {"backends": '{"a": 1}'}, "backends in the metadata must be a JSON list of names"),
        (LAW_ABOUT | {"backends": "[1]"}, "backends in the metadata must be a JSON list of names$"),
        (LAW_ABOUT | {"backends": "[" * 10_000}, "backends in the metadata must be a JSON list of names$"),
        (LAW_ABOUT | {"backends": "3"}, "backends in the metadata must be a JSON list of names$"),
    ],
)
def test_a_file_of_no_law_is_refused_in_one_line(about, message, tmp_path):
    path = tmp_path / "law.kdtr"
    write_kdtr(path, {}, about)
    with pytest.raises(ValueError, match=message) as caught:
        Law.read(path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize("op", OPS)
def test_a_case_comes_back_from_its_file_as_it_was(op, tmp_path):
    options = settings(max_examples=2000, derandomize=True, database=None)
    arguments = find(
        calls(op), lambda given: sum(np.size(v) for _, v in named_leaves("", given)) > 12, settings=options
    )
    case = rerun(Case(op, "reference", arguments), Operation(op, "reference"))
    case.write(tmp_path / "case.kdtr")
    again = Case.read(tmp_path / "case.kdtr")
    assert input_fault(again) == ""
    before, after = (dict(named_leaves("", c.arguments)) for c in (case, again))
    assert before.keys() == after.keys()
    for name, value in before.items():
        if isinstance(value, np.ndarray):
            assert (value.dtype, value.shape) == (after[name].dtype, after[name].shape)
            assert value.tobytes() == after[name].tobytes()
        else:
            assert value == after[name]
            assert type(value) is type(after[name])


CASE = {"kind": "ddtree case 1", "op": "tree_positions", "values": "{}"}


@pytest.mark.parametrize(
    "about, message",
    [
        ({}, "is a KDTR file, but not a case: its metadata lack kind"),
        (CASE | {"op": "rm"}, "op must be one of topk_log_probs, .*, got 'rm'"),
        (CASE | {"values": "[}"}, r"values in the metadata must be a JSON object \("),
        (CASE | {"values": "[]"}, r"values in the metadata must be a JSON object \("),
        (CASE | {"values": "[" * 100_000}, r"values in the metadata must be a JSON object \("),
        (CASE, "lacks input/depths, which tree_positions needs"),
        (CASE | {"op": "accept_tree"}, "lacks input/tree.token_ids$"),
    ],
)
def test_a_file_of_something_else_is_refused_in_one_line(about, message, tmp_path):
    path = tmp_path / "file.kdtr"
    write_kdtr(path, {"x": np.zeros(3)}, about)
    with pytest.raises(ValueError, match=message) as caught:
        Case.read(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "name, value, message",
    [
        ("depths", np.zeros(3, np.int32), r"depths must have shape \(B, N\), got \(3,\)"),
        ("prefix_lens", np.zeros(1), "prefix_lens must be of type int32 or int64, got float64"),
        ("prefix_lens", "many", "prefix_lens must be a NumPy"),
    ],
)
def test_inputs_that_the_operation_cannot_take_are_named(name, value, message):
    arguments = {"depths": np.zeros((1, 3), np.int32), "prefix_lens": np.zeros(1, np.int32)} | {name: value}
    fault = input_fault(Case("tree_positions", "reference", arguments))
    assert fault.startswith("tree_positions cannot take its inputs: ")
    assert re.search(message, fault), fault


def a_call_of(op):
    """The smallest arguments that a budget, a depth, a prefix or an accepted length can be wrong in."""
    tree = tree_from_parents(np.array([[1, 2]], np.int32), np.array([[-1, 0]], np.int32))
    one = np.zeros(1, np.int32)
    paged = {"page_table": np.zeros((1, 1), np.int32), "prefix_lens": one}
    return {
        "build_tree": {
            "log_probs": np.zeros((1, 1, 1), np.float32),
            "token_ids": np.zeros((1, 1, 1), np.int32),
            "root_token_ids": one,
            "budget": 3,
        },
        "accept_tree": {"tree": tree, "target_token_ids": np.zeros((1, 2), np.int32)},
        "visibility_words": {"parents": tree.parents, "node_counts": tree.node_counts},
        "verify_attention": {"q": np.ones((1, 2, 1, 3), np.float32), "kv_cache": np.ones((1, 4, 3), np.float32)}
        | paged
        | {"tree": tree, "scale": 1.0, "kv_lora_rank": 2},
        "compact_cache": {"kv_cache": np.ones((1, 1, 4, 3), np.float32)}
        | paged
        | {"acceptance": Acceptance(np.zeros((1, 2), np.int32), one + 1, one, one > 0)},
    }[op]


@pytest.mark.parametrize(
    "op, change, message",
    [
        ("build_tree", lambda given: {"budget": 2**31 - 2}, "budget = 2147483646 makes a tree of more than"),
        (
            "accept_tree",
            lambda given: {"tree": replace(given["tree"], max_depth=2**31 - 3)},
            "max_depth = .* makes paths",
        ),
        (
            "verify_attention",
            lambda given: {"prefix_lens": np.array([2**31 - 9], np.int32)},
            "in a table of 1 pages",
        ),
        ("compact_cache", lambda given: {"prefix_lens": np.array([2**31 - 9], np.int32)}, "in a table of 1 pages"),
        (
            "verify_attention",
            lambda given: {"tree": replace(given["tree"], node_counts=np.array([50_529_027], np.int32))},
            "node_counts must be in 1 … 2$",
        ),
        ("visibility_words", lambda given: {"node_counts": np.array([50_529_027], np.int32)}, "must be in 1 … 2$"),
        (
            "compact_cache",
            lambda given: {"acceptance": replace(given["acceptance"], lengths=np.array([2**31 - 1], np.int32))},
            "lengths must be at most the width of",
        ),
        (
            "verify_attention",
            lambda given: {"tree": replace(given["tree"], parents=np.array([[-1, 77]], np.int32))},
            "list index out of range",
        ),
    ],
)
def test_numbers_in_a_file_take_neither_memory_nor_the_command_down(op, change, message):
    given = a_call_of(op)
    assert input_fault(Case(op, "reference", given)) == ""
    fault = input_fault(Case(op, "reference", given | change(given)))
    assert fault.startswith(f"{op} cannot take its inputs: ")
    assert re.search(message, fault), fault
