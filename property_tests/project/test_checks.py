"""Bad input is met once, in the public layer: the message names the argument, what it was and what it must be."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import ddtree

BACKENDS = ("reference", "numba_cpu")


def draft(**changes: Any) -> dict[str, Any]:
    """A good call of build_tree, with some of its arguments changed."""
    good = {
        "log_probs": np.log(np.array([[[0.5, 0.25]] * 3], np.float32)),
        "token_ids": np.array([[[1, 2], [3, 4], [5, 6]]], np.int32),
        "root_token_ids": np.array([9], np.int32),
        "budget": 4,
    }
    return good | changes


def altered(array: np.ndarray, place: tuple[int, ...], value: float) -> np.ndarray:
    copy = array.copy()
    copy[place] = value
    return copy


GOOD = draft()
TREE = ddtree.build_tree(**GOOD, backend="reference")  # 5 slots, L = 3
Q = np.zeros((1, 5, 2, 8), np.float32)
CACHE = np.zeros((4, 4, 8), np.float32)
TABLE = np.array([[2, 0, 1]], np.int32)
PREFIX = np.array([5], np.int32)
KEPT = ddtree.Acceptance(
    np.array([[0, 2, 4, -1]], np.int32), np.array([3], np.int32), np.array([7], np.int32), np.array([False])
)


def wrong(argument: Any) -> tuple[Any]:
    """Hide an argument's type from the type checker, which would refuse it too."""
    return (argument,)


def attend(**changes: Any) -> Any:
    good: dict[str, Any] = {"q": Q, "kv_cache": CACHE, "page_table": TABLE, "prefix_lens": PREFIX, "tree": TREE}
    return ddtree.verify_attention(**(good | {"scale": 1.0, "kv_lora_rank": 6} | changes))


def compact(**changes: Any) -> None:
    good: dict[str, Any] = {"kv_cache": np.zeros((2, 4, 4, 8), np.float32), "page_table": TABLE}
    ddtree.compact_cache(**(good | {"prefix_lens": PREFIX, "acceptance": KEPT} | changes))


def choose(logits: Any = None, **options: Any) -> Any:
    logits = np.zeros((1, 5, 7), np.float32) if logits is None else logits
    return ddtree.choose_tokens(logits, **options)


def words(parents: list[list[int]], counts: list[int]) -> Any:
    return ddtree.visibility_words(np.array(parents, np.int32), np.array(counts, np.int32))


CASES: list[tuple[Callable[[], Any], type[Exception], str]] = [
    # build_tree
    (lambda: ddtree.build_tree(**draft(log_probs=[[[0.0]]])), TypeError, "log_probs must be a NumPy.*got list"),
    (
        lambda: ddtree.build_tree(**draft(log_probs=GOOD["log_probs"].astype(np.float64))),
        TypeError,
        "log_probs must be of type float32, got float64",
    ),
    (
        lambda: ddtree.build_tree(**draft(log_probs=GOOD["log_probs"][0])),
        ValueError,
        r"shape \(B, L, K\), got \(3, 2\)",
    ),
    (
        lambda: ddtree.build_tree(**draft(token_ids=np.zeros((1, 3, 3), np.int32))),
        ValueError,
        r"token_ids must have shape \(B = 1, L = 3, K = 2\), got \(1, 3, 3\)",
    ),
    (
        lambda: ddtree.build_tree(**draft(root_token_ids=np.zeros(2, np.int32))),
        ValueError,
        r"root_token_ids must have shape \(B = 1,\), got \(2,\)",
    ),
    (
        lambda: ddtree.build_tree(**draft(log_probs=np.asfortranarray(GOOD["log_probs"]))),
        ValueError,
        "log_probs must be C-contiguous, got strides",
    ),
    (lambda: ddtree.build_tree(**draft(budget=-1)), ValueError, r"budget must be in 0 … \d+, got -1"),
    (lambda: ddtree.build_tree(**draft(budget=1.5)), TypeError, "budget must be an integer, got float 1.5"),
    (lambda: ddtree.build_tree(**draft(budget=True)), TypeError, "budget must be an integer, got True"),
    (
        lambda: ddtree.build_tree(**draft(log_probs=altered(GOOD["log_probs"], (0, 1, 0), 0.5))),
        ValueError,
        r"log_probs\[0, 1, 0\] must be at most 0, got 0.5",
    ),
    (
        lambda: ddtree.build_tree(**draft(log_probs=altered(GOOD["log_probs"], (0, 1, 0), np.inf))),
        ValueError,
        r"log_probs\[0, 1, 0\] must be at most 0, got inf",
    ),
    (
        lambda: ddtree.build_tree(**draft(log_probs=altered(GOOD["log_probs"], (0, 2, 1), -0.5))),
        ValueError,
        r"log_probs\[0, 2, 1\] = -0.5 must not exceed its left neighbour -0.69.*sort each depth",
    ),
    (
        lambda: ddtree.build_tree(**draft(token_ids=altered(GOOD["token_ids"], (0, 0, 1), -3))),
        ValueError,
        r"token_ids\[0, 0, 1\] must be in 0 … 2147483647, got -3",
    ),
    (
        lambda: ddtree.build_tree(**draft(token_ids=altered(GOOD["token_ids"].astype(np.int64), (0, 0, 1), 2**40))),
        ValueError,
        r"token_ids\[0, 0, 1\] must be in 0 … 2147483647, got 1099511627776",
    ),
    (
        lambda: ddtree.build_tree(**draft(vocab_size=10, token_ids=altered(GOOD["token_ids"], (0, 0, 1), 10))),
        ValueError,
        r"token_ids\[0, 0, 1\] must be in 0 … 9, got 10",
    ),
    (
        lambda: ddtree.build_tree(**draft(token_ids=altered(GOOD["token_ids"], (0, 2, 1), 5))),
        ValueError,
        r"token_ids\[0, 2, 1\] = 5 already stands at rank 0",
    ),
    (
        lambda: ddtree.build_tree(**draft(root_token_ids=np.array([-1], np.int32))),
        ValueError,
        r"root_token_ids\[0\] must be in 0 … 2147483647, got -1",
    ),
    # topk_log_probs
    (lambda: ddtree.topk_log_probs(Q[0], 9), ValueError, r"k must be in 1 … 8 \(the vocabulary size\), got 9"),
    (lambda: ddtree.topk_log_probs(Q[0], 0), ValueError, "k must be in 1 … 8"),
    (lambda: ddtree.topk_log_probs(Q[0], 5, vocab_size=4), ValueError, "k must be in 1 … 4"),
    (
        lambda: ddtree.topk_log_probs(Q[0], 1, vocab_size=9),
        ValueError,
        r"vocab_size must be in 1 … 8 \(the width of logits\), got 9",
    ),
    (lambda: ddtree.topk_log_probs(Q[0].astype(np.int32), 1), TypeError, "logits must be of type float16 or bfloat16"),
    # visibility_words and tree_positions
    (lambda: words([[-1, 1]], [2]), ValueError, r"parents\[0, 1\] must be in 0 … 0, an earlier node, got 1"),
    (lambda: words([[-1, -1]], [2]), ValueError, r"parents\[0, 1\] must be in 0 … 0, an earlier node, got -1"),
    (lambda: words([[-1, 0]], [3]), ValueError, r"node_counts\[0\] must be in 1 … 2, got 3"),
    (lambda: words([[-1, 0]], [0]), ValueError, r"node_counts\[0\] must be in 1 … 2, got 0"),
    (
        lambda: ddtree.tree_positions(TREE.depths, np.array([-1], np.int32)),
        ValueError,
        r"prefix_lens\[0\] must be in 0 … ",
    ),
    (
        lambda: ddtree.tree_positions(TREE.depths, np.array([2**31 - 2], np.int64)),
        ValueError,
        r"prefix_lens\[0\] must be in 0 … 214748364\d, got 2147483646",
    ),
    # choose_tokens
    (lambda: choose(temperature=-1), ValueError, "temperature must be finite and at least 0, got -1.0"),
    (lambda: choose(temperature=float("nan")), ValueError, "temperature must be finite and at least 0, got nan"),
    (lambda: choose(temperature="warm"), TypeError, "temperature must be a number, got str 'warm'"),
    (lambda: choose(top_p=0.0), ValueError, "top_p must be over 0 and at most 1, got 0.0"),
    (lambda: choose(top_p=1.5), ValueError, "top_p must be over 0 and at most 1, got 1.5"),
    (lambda: choose(seed=-1), ValueError, r"seed must be in 0 … \d+, got -1"),
    (lambda: choose(temperature=1.0), ValueError, "positions must be given above temperature 0"),
    (
        lambda: choose(temperature=1.0, positions=np.full((1, 5), -1, np.int32)),
        ValueError,
        r"positions\[0, 0\] must be in 0 … 2147483647, got -1",
    ),
    (
        lambda: choose(temperature=1.0, positions=np.zeros((1, 5), np.int32), request_ids=np.array([-2])),
        ValueError,
        r"request_ids\[0\] must be in 0 … 9223372036854775807, got -2",
    ),
    (lambda: choose(np.zeros((1, 2, 0), np.float32)), ValueError, "logits must have at least one column, got V = 0"),
    # accept_tree
    (lambda: ddtree.accept_tree(*wrong(None), TREE.token_ids), TypeError, r"tree must be a ddtree.DraftTree, got None"),
    (
        lambda: ddtree.accept_tree(*wrong(KEPT), TREE.token_ids),
        TypeError,
        "tree must be a ddtree.DraftTree, got Acceptance",
    ),
    (
        lambda: ddtree.accept_tree(TREE, np.zeros((1, 4), np.int32)),
        ValueError,
        r"target_token_ids must have shape \(B = 1, N = 5\), got \(1, 4\)",
    ),
    (
        lambda: ddtree.accept_tree(TREE, altered(TREE.token_ids, (0, 2), -7)),
        ValueError,
        r"target_token_ids\[0, 2\] must be in -1 … 2147483647, got -7",
    ),
    (
        lambda: ddtree.accept_tree(TREE, TREE.token_ids, remaining=np.array([-1], np.int32)),
        ValueError,
        r"remaining\[0\] must be in 0 … 2147483647, got -1",
    ),
    (
        lambda: ddtree.accept_tree(TREE, TREE.token_ids, stop_token_ids=np.array([-1], np.int32)),
        ValueError,
        r"stop_token_ids\[0\] must be in 0 … 2147483647, got -1",
    ),
    (
        lambda: ddtree.accept_tree(replace(TREE, parents=altered(TREE.parents, (0, 2), 2)), TREE.token_ids),
        ValueError,
        r"tree.parents\[0, 2\] must be in 0 … 1, an earlier node, got 2",
    ),
    (
        lambda: ddtree.accept_tree(replace(TREE, depths=altered(TREE.depths, (0, 1), 2)), TREE.token_ids),
        ValueError,
        r"tree.depths\[0, 1\] must be 1, one more than its parent's, and at most max_depth = 3, got 2",
    ),
    (
        lambda: ddtree.accept_tree(replace(TREE, max_depth=1), TREE.token_ids),
        ValueError,
        r"tree.depths\[0, 2\] must be 2, .*at most max_depth = 1, got 2",
    ),
    (
        lambda: ddtree.accept_tree(replace(TREE, token_ids=altered(TREE.token_ids, (0, 1), -1)), TREE.token_ids),
        ValueError,
        r"tree.token_ids\[0, 1\] must be in 0 … 2147483647, got -1",
    ),
    (
        lambda: ddtree.accept_tree(replace(TREE, node_counts=np.array([6], np.int32)), TREE.token_ids),
        ValueError,
        r"tree.node_counts\[0\] must be in 1 … 5, got 6",
    ),
    (
        lambda: ddtree.accept_tree(replace(TREE, visibility_words=np.zeros((1, 5, 2), np.uint32)), TREE.token_ids),
        ValueError,
        "tree.visibility_words must have 1 words a row for N = 5, got 2",
    ),
    (
        lambda: ddtree.accept_tree(replace(TREE, depths=altered(TREE.depths, (0, 0), 1)), TREE.token_ids),
        ValueError,
        r"tree.depths\[0, 0\] must be 0, the root's, and at most max_depth = 3, got 1",
    ),
    # tree_from_parents, chain_tree and rank_path
    (
        lambda: ddtree.tree_from_parents([[1, 2**31]], [[-1, 0]]),
        ValueError,
        r"token_ids\[0, 1\] must be in 0 … 2147483647",
    ),
    (lambda: ddtree.tree_from_parents([[1, -1]], [[-1, 0]]), ValueError, r"token_ids\[0, 1\] must be in 0 .*, got -1"),
    (lambda: ddtree.tree_from_parents([[1, 2]], [[-1, 0.5]]), TypeError, "parents must hold integers, got float64"),
    (lambda: ddtree.tree_from_parents([[1, 2]], [[-1, 1]]), ValueError, r"parents\[0, 1\] must be in 0 … 0"),
    (lambda: ddtree.tree_from_parents([[1, 2]], [[-1, 0]], [3]), ValueError, r"node_counts must .* lie in 1 … 2"),
    (lambda: ddtree.tree_from_parents([[1, 2]], [[-1]]), ValueError, r"one shape \(B, N\) with N >= 1, got \(1, 2\)"),
    (lambda: ddtree.chain_tree(5), ValueError, r"token_ids must have shape \(B, N\) with N >= 1, got \(\)"),
    (
        lambda: replace(TREE, parents=altered(TREE.parents, (0, 2), 3)).rank_path(0, 2),
        ValueError,
        r"parents\[0, 2\] must be an earlier node, got 3",
    ),
    # verify_attention
    (lambda: attend(kv_cache=CACHE.astype(np.float16)), TypeError, "kv_cache must be of type float32, got float16"),
    (lambda: attend(kv_cache=CACHE[:, :, :7].copy()), ValueError, r"kv_cache must have shape \(pages, S, C \+ R = 8\)"),
    (lambda: attend(kv_lora_rank=9), ValueError, r"kv_lora_rank must be in 1 … 8 \(the last dimension of q\), got 9"),
    (lambda: attend(scale=float("inf")), ValueError, "scale must be finite, got inf"),
    (lambda: attend(scale=1e300), ValueError, "scale must be finite in float32"),
    (lambda: attend(scale=10**400), ValueError, "scale must be finite, got an integer that no float64 holds"),
    (lambda: attend(scale="1"), TypeError, "scale must be a number, got str '1'"),
    (lambda: attend(scale=True), TypeError, "scale must be a number, got bool True"),
    (lambda: attend(validate=np.array([1, 2])), TypeError, "validate must be True, False or None, got ndarray"),
    (lambda: attend(out=Q[..., :6]), ValueError, "out must be C-contiguous"),
    (lambda: attend(kv_lora_rank=8, out=Q), ValueError, "out must not overlap q in memory"),
    (lambda: attend(tree=replace(TREE, max_depth=2**31 - 2)), ValueError, "tree.max_depth must be in 0 … 2147483645"),
    (lambda: attend(tree=replace(TREE, max_depth=2.5)), TypeError, "tree.max_depth must be an integer, got float"),
    (lambda: attend(q=np.ma.masked_array(Q)), TypeError, r"q must not be masked.*pass array.filled"),
    (
        lambda: attend(out=np.zeros((1, 5, 2, 8), np.float32)),
        ValueError,
        r"out must have shape \(B = 1, N = 5, H = 2, C = 6\), got",
    ),
    (
        lambda: attend(kv_cache=np.zeros((4, 0, 8), np.float32)),
        ValueError,
        r"kv_cache and page_table must have room for a row a request, got \[4, 0, 3\] pages, rows, entries",
    ),
    (
        lambda: attend(kv_cache=np.zeros((4, 2**29, 0), np.float32), prefix_lens=np.array([2**31 - 9], np.int32)),
        ValueError,
        "kv_cache must have shape",
    ),
    (
        lambda: attend(prefix_lens=np.array([9], np.int32)),
        ValueError,
        r"page_table has room for 12 rows a request \(3 pages of 4\), but request 0 needs 14: prefix 9 and 5 of",
    ),
    (
        lambda: attend(page_table=np.array([[2, 4, 1]], np.int32)),
        ValueError,
        r"page_table\[0, 1\] must be in 0 … 3, got 4",
    ),
    (
        lambda: attend(tree=replace(TREE, visibility_words=altered(TREE.visibility_words, (0, 1, 0), 1))),
        ValueError,
        r"tree.visibility_words\[0, 1\] must be what the parents say \(see visibility_words\)",
    ),
    # compact_cache
    (
        lambda: compact(page_table=np.array([[2, 2, 1]], np.int32)),
        ValueError,
        r"page_table\[0, 1\] = 2 is written and must belong to one request and one place, but 2 entries",
    ),
    (lambda: compact(acceptance=TREE), TypeError, "acceptance must be a ddtree.Acceptance, got DraftTree"),
    (
        lambda: compact(acceptance=replace(KEPT, lengths=np.array([5], np.int32))),
        ValueError,
        r"acceptance.lengths must lie in 0 … 4, got \[5\]",
    ),
    (
        lambda: compact(acceptance=replace(KEPT, node_indices=np.array([[0, 2, 2, -1]], np.int32))),
        ValueError,
        r"node_indices\[0\] must begin with the root, 0, and rise, got 2 at place 2",
    ),
    (
        lambda: compact(acceptance=replace(KEPT, node_indices=np.array([[1, 2, 4, -1]], np.int32))),
        ValueError,
        r"node_indices\[0\] must begin with the root, 0, and rise, got 1 at place 0",
    ),
    (
        lambda: compact(prefix_lens=np.array([8], np.int32)),
        ValueError,
        "request 0 needs 13: prefix 8 and 5 of the tree",
    ),
    (
        lambda: compact(
            page_table=np.array([[2, 0, 1], [3, 0, 1]], np.int32),
            prefix_lens=np.array([5, 5], np.int32),
            acceptance=ddtree.Acceptance(*(np.repeat(getattr(KEPT, f), 2, 0) for f in KEPT.__dataclass_fields__)),
        ),
        ValueError,
        r"page_table\[0, 1\] = 0 is written and must belong to one request and one place, but 2 entries",
    ),
]


@pytest.mark.parametrize(("call", "error", "match"), CASES, ids=[match[:60] for _, _, match in CASES])
def test_a_wrong_argument_is_named_with_what_it_was_and_must_be(
    call: Callable[[], Any], error: type[Exception], match: str
) -> None:
    with pytest.raises(error, match=match):
        call()


def test_a_read_only_cache_is_refused_before_anything_is_written() -> None:
    cache = np.zeros((2, 4, 4, 8), np.float32)
    cache.flags.writeable = False
    with pytest.raises(ValueError, match="kv_cache must be writable, got a read-only array"):
        compact(kv_cache=cache)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "fault",
    [
        {"log_probs": altered(GOOD["log_probs"], (0, 1, 0), 0.5)},
        {"log_probs": altered(GOOD["log_probs"], (0, 2, 1), -0.5)},
        {"token_ids": altered(GOOD["token_ids"], (0, 0, 1), -3)},
        {"token_ids": altered(GOOD["token_ids"], (0, 2, 1), 5)},
    ],
    ids=["positive", "unsorted", "id", "repeated"],
)
def test_both_host_backends_find_the_same_fault(backend: str, fault: dict[str, Any]) -> None:
    messages = set()
    for name in ("reference", backend):
        with pytest.raises(ValueError, match=r"\[0, ") as raised:
            ddtree.build_tree(**draft(**fault), backend=name)
        messages.add(str(raised.value))
    assert len(messages) == 1


@pytest.mark.parametrize("backend", BACKENDS)
def test_what_stands_behind_a_drafts_end_is_not_looked_at(backend: str) -> None:
    log_probs = np.array([[[-1.0, np.nan, 7.0], [-np.inf, 3.0, np.inf]]], np.float32)
    ids = np.array([[[4, -9, 4], [-1, -1, -1]]], np.int32)
    tree = ddtree.build_tree(log_probs, ids, np.array([0], np.int32), budget=5, backend=backend)
    assert tree.node_counts.tolist() == [2]


def test_validation_can_be_turned_off_by_who_has_checked() -> None:
    unsorted = draft(log_probs=altered(GOOD["log_probs"], (0, 2, 1), -0.5))
    assert ddtree.build_tree(**unsorted, validate=False).node_counts.tolist() == [5]


def test_int64_ids_give_the_same_tree() -> None:
    wide = draft(token_ids=GOOD["token_ids"].astype(np.int64), root_token_ids=GOOD["root_token_ids"].astype(np.int64))
    tree = ddtree.build_tree(**wide)
    assert tree.token_ids.dtype == np.int32
    assert tree.token_ids.tolist() == TREE.token_ids.tolist()


def test_out_is_written_and_returned() -> None:
    out = np.full((1, 5, 2, 6), np.nan, np.float32)
    assert attend(out=out) is out
    assert not np.isnan(out).any()


def test_garbage_in_unused_slots_is_not_looked_at() -> None:
    """Padding may hold anything, an index far outside the tree included."""
    few = replace(TREE, node_counts=np.array([2], np.int32), parents=altered(TREE.parents, (0, 4), 2**30))
    few = replace(few, token_ids=altered(few.token_ids, (0, 3), -5), depths=altered(few.depths, (0, 3), -77))
    assert ddtree.accept_tree(few, TREE.token_ids).lengths.tolist() == [1]


def test_extreme_logits_raise_no_warning() -> None:
    logits = np.array([[[3e38, -3e38]]], np.float32)
    for backend in BACKENDS:
        log_probs, _ = ddtree.topk_log_probs(logits, 2, backend=backend)
        assert log_probs.tolist() == [[[0.0, -np.inf]]]
        huge = np.array([[[-1.7e308, 1.7e308]]])
        assert ddtree.topk_log_probs(huge, 2, backend=backend)[1].tolist() == [[[1, 0]]]
        at = np.zeros((1, 1), np.int32)
        assert ddtree.choose_tokens(huge, temperature=1e-310, positions=at, backend=backend).tolist() == [[1]]


def test_with_no_candidates_any_wider_draft_might_change_a_tree_with_room() -> None:
    nothing = draft(log_probs=np.zeros((1, 3, 0), np.float32), token_ids=np.zeros((1, 3, 0), np.int32))
    assert ddtree.build_tree(**nothing).used_last_rank.tolist() == [True]
    assert ddtree.build_tree(**(nothing | {"budget": 0})).used_last_rank.tolist() == [False]


@pytest.mark.filterwarnings("ignore:the matrix subclass:PendingDeprecationWarning")
def test_subclasses_of_arrays_are_what_they_hold() -> None:
    """A matrix indexes and reduces by rules of its own: none of them may be met."""
    table = np.asmatrix(TABLE)
    for backend in BACKENDS:
        assert attend(page_table=table, backend=backend).tolist() == attend(backend=backend).tolist()
        positions = np.asmatrix(np.zeros((1, 5), np.int32))
        assert choose(temperature=1.0, positions=positions, backend=backend).shape == (1, 5)
        assert ddtree.tree_positions(np.asmatrix(TREE.depths), PREFIX, backend=backend).shape == (1, 5)


def test_a_window_may_not_be_written_over_another_requests_prefix() -> None:
    table, two = np.array([[0, 1], [1, 2]], np.int32), np.array([5, 5], np.int32)
    kept = ddtree.Acceptance(*(np.repeat(getattr(KEPT, f), 2, 0) for f in KEPT.__dataclass_fields__))
    kept.node_indices[:, 2], kept.lengths[:] = -1, 2
    with pytest.raises(ValueError, match=r"page_table\[0, 1\] = 1 is written and must belong to one request"):
        compact(page_table=table, prefix_lens=two, acceptance=kept)


def test_trees_too_large_for_the_memory_name_the_budget() -> None:
    one = draft(log_probs=np.zeros((1, 1, 1), np.float32), token_ids=np.zeros((1, 1, 1), np.int32), budget=2**31 - 2)
    with pytest.raises(MemoryError, match=r"budget = 2147483646 for 1 requests makes trees of [\d,.]+ GiB"):
        ddtree.build_tree(**one)
