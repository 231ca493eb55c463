"""Every argument of every public operation, wrong in each way in turn: the error names it, and no array has changed."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import fields, is_dataclass, replace
from typing import Any

import numpy as np
import pytest

import ddtree
from ddtree import ops
from ddtree.property_tests.cases import named_leaves
from ddtree.protocols import OPS

BACKENDS = ("reference", "numba_cpu")
TREE = ddtree.build_tree(
    np.log(np.array([[[0.5, 0.25]] * 3] * 2, np.float32)),
    np.tile(np.array([[1, 2], [3, 4], [5, 6]], np.int32), (2, 1, 1)),
    np.array([9, 8], np.int32),
    budget=4,
    backend="reference",
)  # two requests of 5 nodes, L = 3
PAGES = {"page_table": np.array([[2, 0], [1, 3]], np.int32), "prefix_lens": np.array([3, 0], np.int32)}
KEPT = ddtree.Acceptance(
    np.array([[0, 2, 4, -1], [0, 1, -1, -1]], np.int32),
    np.array([3, 2], np.int32),
    np.array([7, 7], np.int32),
    np.array([False, False]),
)
GOOD: dict[str, dict[str, Any]] = {
    "topk_log_probs": {"logits": np.zeros((2, 3, 5), np.float32), "k": 2, "vocab_size": 4},
    "build_tree": {
        "log_probs": np.log(np.array([[[0.5, 0.25]] * 3] * 2, np.float32)),
        "token_ids": np.tile(np.array([[1, 2], [3, 4], [5, 6]], np.int32), (2, 1, 1)),
        "root_token_ids": np.array([7, 8], np.int32),
        "budget": 4,
        "vocab_size": 9,
    },
    "visibility_words": {"parents": TREE.parents, "node_counts": TREE.node_counts},
    "tree_positions": {"depths": TREE.depths, "prefix_lens": PAGES["prefix_lens"]},
    "verify_attention": {
        "q": np.zeros((2, 5, 2, 6), np.float32),
        "kv_cache": np.zeros((4, 4, 6), np.float32),
        **PAGES,
        "tree": TREE,
        "scale": 0.5,
        "kv_lora_rank": 4,
        "out": np.zeros((2, 5, 2, 4), np.float32),
    },
    "choose_tokens": {
        "logits": np.zeros((2, 5, 7), np.float32),
        "temperature": 1.0,
        "top_p": 0.9,
        "seed": 3,
        "request_ids": np.array([0, 1]),
        "positions": np.zeros((2, 5), np.int32),
    },
    "accept_tree": {
        "tree": TREE,
        "target_token_ids": np.zeros((2, 5), np.int32),
        "remaining": np.array([3, 3], np.int32),
        "stop_token_ids": np.array([2], np.int32),
    },
    "compact_cache": {"kv_cache": np.zeros((2, 4, 4, 6), np.float32), **PAGES, "acceptance": KEPT},
}
BIG = 2**31
VALUES: dict[tuple[str, str], dict[tuple[int, ...], tuple[float, ...]]] = {
    # by operation and argument: places, and what may not stand there
    ("build_tree", "log_probs"): {(1, 0, 0): (0.5, np.inf), (0, 2, 1): (-0.1,)},
    ("build_tree", "token_ids"): {(1, 0, 1): (-1, 9, BIG, 1)},  # 9: the vocabulary's size; 1: there already
    ("build_tree", "root_token_ids"): {(1,): (-1, 9, BIG)},
    ("visibility_words", "parents"): {(1, 2): (-1, 2, 7, BIG)},
    ("visibility_words", "node_counts"): {(1,): (-1, 0, 6, BIG)},
    ("tree_positions", "depths"): {(1, 2): (-2, BIG)},
    ("tree_positions", "prefix_lens"): {(1,): (-1, BIG - 2, BIG)},
    ("verify_attention", "page_table"): {(1, 0): (-1, 4, BIG)},
    ("verify_attention", "prefix_lens"): {(1,): (-1, BIG)},
    ("verify_attention", "tree.token_ids"): {(1, 2): (-1,)},
    ("verify_attention", "tree.parents"): {(1, 2): (-1, 2)},
    ("verify_attention", "tree.depths"): {(1, 2): (-1, 0, 9)},
    ("verify_attention", "tree.node_counts"): {(1,): (-1, 0, 6)},
    ("verify_attention", "tree.visibility_words"): {(1, 2, 0): (0, 31)},
    ("choose_tokens", "request_ids"): {(1,): (-1,)},
    ("choose_tokens", "positions"): {(1, 4): (-1, BIG)},
    ("accept_tree", "target_token_ids"): {(1, 2): (-2, BIG)},
    ("accept_tree", "remaining"): {(1,): (-1, BIG)},
    ("accept_tree", "stop_token_ids"): {(0,): (-1, BIG)},
    ("accept_tree", "tree.token_ids"): {(1, 2): (-1,)},
    ("accept_tree", "tree.parents"): {(1, 2): (-1, 2)},
    ("accept_tree", "tree.depths"): {(1, 2): (-1, 0, 9)},
    ("accept_tree", "tree.node_counts"): {(1,): (-1, 0, 6)},
    ("compact_cache", "page_table"): {(1, 0): (-1, 4, 2, BIG)},  # 2: the other request's
    ("compact_cache", "prefix_lens"): {(0,): (-1, BIG)},
    ("compact_cache", "acceptance.node_indices"): {(0, 0): (-1, 1), (0, 2): (-1, 2)},
    ("compact_cache", "acceptance.lengths"): {(1,): (-1, 5)},
}
NOT_READ = {
    # what an operation takes with a record but does not look at, and floats that may be anything
    *((op, f"tree.{name}") for op in ("verify_attention", "accept_tree") for name in ("ranks", "scores")),
    ("accept_tree", "tree.visibility_words"),
    *(("compact_cache", f"acceptance.{name}") for name in ("bonus_token_ids", "finished")),
    *((op, name) for op in OPS for name in ("logits", "q", "kv_cache", "out")),
}
OF_ANY_LENGTH = {
    # by nature, or since the first array to be looked at says what B is: then another is named that does not fit
    ("accept_tree", "stop_token_ids"),
    *((op, name) for op in OPS for name in ("logits", "q", "kv_cache")),
    ("build_tree", "log_probs"),
    ("visibility_words", "parents"),
    ("tree_positions", "depths"),
    ("accept_tree", "tree.token_ids"),
    ("compact_cache", "page_table"),
}
NUMBERS: dict[tuple[str, str], tuple[Any, ...]] = {
    # what is of the right type and out of range
    ("topk_log_probs", "k"): (-1, 0, 5, 2**70),  # 5: more than the vocabulary
    ("topk_log_probs", "vocab_size"): (-1, 0, 6, 2**70),
    ("build_tree", "budget"): (-1, BIG, 2**70),
    ("build_tree", "vocab_size"): (-1, 0, BIG),
    ("verify_attention", "kv_lora_rank"): (-1, 0, 7, 2**70),
    ("verify_attention", "scale"): (np.nan, np.inf),
    ("choose_tokens", "temperature"): (np.nan, np.inf, -1.0),
    ("choose_tokens", "top_p"): (np.nan, np.inf, -1.0, 0.0, 1.5),
    ("choose_tokens", "seed"): (-1, 2**64),
}
Wrong = tuple[str, str, str, type[Exception], Any]


def arguments_of(op: str) -> Iterator[tuple[str, Any]]:
    """Each argument, and each array of a record, by name."""
    for name, value in GOOD[op].items():
        if is_dataclass(value):
            yield name, value
        yield from ((n, v) for n, v in named_leaves(name, value) if isinstance(v, np.ndarray) or n == name)


def wrong_arrays(op: str, name: str, good: np.ndarray) -> Iterator[tuple[str, type[Exception], Any]]:
    yield "a list", TypeError, good.tolist()
    yield "a number", TypeError, 3
    yield "text", TypeError, "zeros"
    yield "complex", TypeError, good.astype(np.complex64)
    yield "an axis more", ValueError, good[None]
    yield "an axis less", ValueError, np.array(good[0])
    if (op, name) not in OF_ANY_LENGTH:
        yield "longer", ValueError, np.concatenate([good, good])
    if good.ndim > 1:
        yield "not contiguous", ValueError, np.asfortranarray(good) if good.shape[-1] > 1 else None
    for place, values in VALUES.get((op, name), {}).items():
        for value in values:
            changed = good.astype(np.int64) if value == BIG or value == BIG - 2 else good.copy()
            changed[place] = value
            yield f"{value:g} at {list(place)}", ValueError, changed


def wrong_numbers(op: str, name: str, good: float) -> Iterator[tuple[str, type[Exception], Any]]:
    for value in (None, "three", [good], 1j, np.zeros(2)):
        if value is not None or inspect.signature(getattr(ops, op)).parameters[name].default is not None:
            yield f"{type(value).__name__}", TypeError, value
    if isinstance(good, int):
        yield "a half", TypeError, 1.5
        yield "a truth", TypeError, True
    for value in NUMBERS[op, name]:
        yield f"{value:g}", ValueError, value


def wrong_inputs() -> Iterator[Wrong]:
    for op in OPS:
        for name, good in arguments_of(op):
            if isinstance(good, np.ndarray):
                found = wrong_arrays(op, name, good)
            elif is_dataclass(good):
                found = iter([(str(type(v).__name__), TypeError, v) for v in (None, [], GOOD[op], object())])
            else:
                found = wrong_numbers(op, name, good)
            yield from (
                (op, name, how, error, value)
                for how, error, value in found
                if how != "not contiguous" or value is not None
            )
            default = inspect.signature(getattr(ops, op)).parameters[name.partition(".")[0]].default
            if isinstance(good, np.ndarray) and (default is inspect.Parameter.empty or "." in name):
                yield op, name, "None", TypeError, None
        yield op, "backend", "a number", TypeError, 3
        yield op, "backend", "unknown", ValueError, "no_such_backend"


ALL = list(wrong_inputs())


def called_with(op: str, name: str, value: Any, backend: str) -> dict[str, Any]:
    """The good call in copies, one argument or field changed."""

    def copied(v: Any) -> Any:
        if is_dataclass(v) and not isinstance(v, type):
            return replace(v, **{f.name: copied(getattr(v, f.name)) for f in fields(v)})
        return v.copy() if isinstance(v, np.ndarray) else v

    given = {n: copied(v) for n, v in GOOD[op].items()} | {"backend": backend}
    record, _, field = name.partition(".")
    given[record] = replace(given[record], **{field: value}) if field else value
    return given


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("op", OPS)
def test_the_good_call_is_good(op: str, backend: str) -> None:
    getattr(ops, op)(**called_with(op, "backend", backend, backend))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("op", "name", "how", "error", "value"), ALL, ids=[f"{o}-{n}-{h}" for o, n, h, _, _ in ALL])
def test_a_wrong_argument_is_named_and_nothing_is_written(
    op: str, name: str, how: str, error: type[Exception], value: Any, backend: str
) -> None:
    given = called_with(op, name, value, backend)
    before = {n: v.tobytes() for n, v in named_leaves("", given) if isinstance(v, np.ndarray)}
    with pytest.raises(error) as caught:
        getattr(ops, op)(**given)
    assert type(caught.value) is error
    assert name in str(caught.value), str(caught.value)
    assert "\n" not in str(caught.value)
    assert {n: v.tobytes() for n, v in named_leaves("", given) if isinstance(v, np.ndarray)} == before


def test_every_argument_is_wrong_in_some_way() -> None:
    for op in OPS:
        parameters = set(inspect.signature(getattr(ops, op)).parameters) - {"validate"}  # any truth value will do
        assert {name.partition(".")[0] for o, name, *_ in ALL if o == op} == parameters
        for name, good in arguments_of(op):
            if isinstance(good, np.ndarray):
                assert ((op, name) in VALUES) != ((op, name) in NOT_READ), f"{op}: {name}"


def test_a_read_only_array_that_would_be_written_is_named() -> None:
    for op, name in (("compact_cache", "kv_cache"), ("verify_attention", "out")):
        given = called_with(op, "backend", None, "reference")
        given[name].flags.writeable = False
        with pytest.raises(ValueError, match=f"{name} must be writable"):
            getattr(ops, op)(**given)
