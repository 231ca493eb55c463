"""A quick check of a backend against the references, on random inputs of which half are full of ties.

It is a sample of what the property tests do at length: small batches with unequal lengths, empty sizes, unused slots,
repeated tokens, −inf tails, and NaN in cache rows that nothing may read.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ddtree import ops
from ddtree.arrays import to_numpy
from ddtree.backends import get_backend
from ddtree.property_tests.tolerances import TOLERANCE
from ddtree.protocols import OPS
from ddtree.trees import DraftTree, tree_from_parents

__all__ = ["Agreement", "compare_with_reference", "first_line"]

Arguments = dict[str, Any]

ROUNDINGS = 16
"""Of an exponential, a division and a rescaled sum, beside those that grow with a sum's length."""


@dataclass(frozen=True)
class Agreement:
    """How one operation of a backend compared with the reference.

    Attributes
    ----------
    backend, op : str
        Who was asked, and for what.
    examples, mismatches : int
        Inputs tried, and those where the two differed.
    first : str
        What differed in the first of them; empty if nothing did.
    """

    backend: str
    op: str
    examples: int
    mismatches: int
    first: str


def compare_with_reference(backend: str, *, examples: int = 50, seed: int = 0) -> list[Agreement]:
    """Give every operation of ``backend`` the same random inputs as the reference, and compare what comes out.

    Integers and trees must be equal bit for bit, log-probs within the contract's tolerance, and attention within what
    float32 can do in any order of its sums (the property tests measure its accuracy more closely).

    Parameters
    ----------
    backend : str
        One that works here.
    examples : int
        Inputs an operation.
    seed : int
        Of the inputs.

    Returns
    -------
    list of Agreement
        One for each operation that the backend has.
    """
    found = []
    for op in get_backend(backend).ops:
        wrong = []
        for example in range(examples):
            rng = np.random.default_rng([seed, list(OPS).index(op), example])
            difference = _difference(op, backend, _EXAMPLES[op](rng, example % 2 == 0))
            if difference:
                wrong.append(f"example {example}: {difference}")
        found.append(Agreement(backend, op, examples, len(wrong), wrong[0] if wrong else ""))
    return found


def _difference(op: str, backend: str, arguments: Arguments) -> str:
    """What the backend did differently; empty if nothing."""
    expected = _run(op, "reference", arguments)
    try:
        actual = _run(op, backend, arguments)
    except Exception as error:  # whatever a kernel may raise where the reference does not
        return f"raised {type(error).__name__}: {first_line(error)}"
    if op == "topk_log_probs":
        return _log_probs_differ(arguments, expected, actual)
    if op == "verify_attention":
        return _attention_differs(arguments, expected, actual)
    return _arrays_differ(expected, actual)


def first_line(error: Exception) -> str:
    """The first line of an error's message, for a table."""
    return next(iter(str(error).splitlines()), "")


def _run(op: str, backend: str, arguments: Arguments) -> Any:
    """Call the public operation on copies of the arguments, and return NumPy arrays."""
    move: Callable[[Any], Any] = functools.partial(np.array, order="C")
    if get_backend(backend).array_kind == "cupy":
        import cupy

        move = functools.partial(cupy.array, order="C")
    moved = {name: _mapped(value, move) for name, value in arguments.items()}
    result = getattr(ops, op)(**moved, backend=backend)
    return _mapped(moved["kv_cache"] if op == "compact_cache" else result, to_numpy)


def _mapped(value: Any, change: Callable[[Any], Any]) -> Any:
    if is_dataclass(value) and not isinstance(value, type):
        return replace(value, **{f.name: _mapped(getattr(value, f.name), change) for f in fields(value)})
    if isinstance(value, tuple):
        return tuple(_mapped(v, change) for v in value)
    return change(value) if hasattr(value, "__dlpack__") else value


def _arrays_differ(expected: Any, actual: Any, name: str = "result") -> str:
    """Where two results first differ: types, shapes and every value, NaN equal to NaN."""
    if is_dataclass(expected):
        pairs = ((f.name, getattr(expected, f.name), getattr(actual, f.name)) for f in fields(expected))
        return next(filter(None, (_arrays_differ(e, a, n) for n, e, a in pairs)), "")
    expected, actual = np.asarray(expected), np.asarray(actual)
    if (expected.dtype, expected.shape) != (actual.dtype, actual.shape):
        return f"{name} is {actual.dtype} {actual.shape}, should be {expected.dtype} {expected.shape}"
    wrong = np.argwhere((expected != actual) & ~((expected != expected) & (actual != actual)))
    if not len(wrong):
        return ""
    place = tuple(wrong[0])
    return f"{name}[{', '.join(map(str, place))}] is {actual[place]}, should be {expected[place]}"


def _log_probs_differ(arguments: Arguments, expected: Any, actual: Any) -> str:
    difference = _arrays_differ(expected[1], actual[1], "token_ids")
    if difference:
        return difference
    logits = arguments["logits"]
    largest = np.abs(logits[np.isfinite(logits)]).max(initial=1.0) + np.log(logits.shape[-1])  # bounds |log Z| too
    bound = TOLERANCE["topk_log_probs", "float32"].bound * largest
    with np.errstate(invalid="ignore"):  # −inf on both sides
        far = ~((expected[0] == actual[0]) | (np.abs(expected[0] - actual[0]) <= bound))
    return _arrays_differ(np.where(far, expected[0], 0), np.where(far, actual[0], 0), "log_probs")


def _attention_differs(arguments: Arguments, expected: NDArray[Any], actual: NDArray[Any]) -> str:
    """Against the float64 result, within what float32 can do in any order of its sums.

    A dot product of n terms is off by at most n·u·Σ|terms|, u half a unit in the last place; so a score by n·u·S, where
    S bounds the scores' terms, a weight by twice that share, and a mean of m values by m·u of their size besides.
    """
    q, kv_cache = (arguments[name].astype(np.float64) for name in ("q", "kv_cache"))
    exact = _run("verify_attention", "reference", arguments | {"q": q, "kv_cache": kv_cache})
    keys = kv_cache[np.isfinite(kv_cache).all(-1)]
    score = (
        arguments["scale"] * np.linalg.norm(q, axis=-1).max(initial=0) * np.linalg.norm(keys, axis=-1).max(initial=0)
    )
    n, m, u = q.shape[-1], len(keys), float(np.finfo(np.float32).eps) / 2
    bound = (2 * n * score + m + ROUNDINGS) * u * np.abs(keys).max(initial=0)
    with np.errstate(invalid="ignore"):
        near = (np.abs(actual - exact) <= bound * (exact != 0)) if actual.shape == exact.shape else False
    return _arrays_differ(expected, np.where(near, expected, actual).astype(actual.dtype))


def _topk_example(rng: np.random.Generator, tied: bool) -> Arguments:
    B, L, V = rng.integers(0, 3), rng.integers(0, 4), int(rng.integers(1, 50))
    logits = (rng.integers(-8, 9, (B, L, V)) / 8 if tied else rng.normal(0, 4, (B, L, V))).astype(np.float32)
    logits[rng.random(logits.shape) < 0.1] = rng.choice([-np.inf, np.nan])
    vocab_size = int(rng.integers(1, V + 1))
    return {"logits": logits, "k": int(rng.integers(1, vocab_size + 1)), "vocab_size": vocab_size}


def _build_example(rng: np.random.Generator, tied: bool) -> Arguments:
    B, L, K = rng.integers(0, 4), rng.integers(0, 6), rng.integers(1, 9)
    steps = rng.integers(0, 3, (B, L, K)) / 8 if tied else rng.exponential(1.0, (B, L, K))
    log_probs = -np.cumsum(steps, -1).astype(np.float32)
    log_probs[np.arange(K) >= rng.integers(0, K + 4, (B, L, 1))] = -np.inf
    return {
        "log_probs": log_probs,
        "token_ids": np.argsort(rng.random((B, L, 12)), -1)[..., :K].astype(np.int32),
        "root_token_ids": rng.integers(0, 12, B).astype(np.int32),
        "budget": int(rng.integers(0, 70)),
    }


def _random_tree(rng: np.random.Generator, tied: bool) -> DraftTree:
    """Any parents; few tokens, so that siblings repeat them, or many."""
    B, N = int(rng.integers(0, 4)), int(rng.integers(1, 40))
    slots = np.arange(N)
    parents = np.where(rng.random((B, N)) < 0.5, slots - 1, rng.integers(0, np.maximum(slots, 1), (B, N)))
    return tree_from_parents(rng.integers(0, 3 if tied else 100, (B, N)), parents, rng.integers(1, N + 1, B))


def _words_example(rng: np.random.Generator, tied: bool) -> Arguments:
    tree = _random_tree(rng, tied)
    return {"parents": tree.parents, "node_counts": tree.node_counts}


def _positions_example(rng: np.random.Generator, tied: bool) -> Arguments:
    tree = _random_tree(rng, tied)
    return {"depths": tree.depths, "prefix_lens": rng.integers(0, 1000, tree.batch_size).astype(np.int32)}


def _pages(rng: np.random.Generator, tree: DraftTree) -> tuple[NDArray[np.int32], NDArray[np.int32], int]:
    """Prefix lengths, a page table in random order with room for every tree, and the page size."""
    B, size = tree.batch_size, int(rng.choice([1, 3, 16]))
    prefix_lens = rng.integers(0, 30, B).astype(np.int32)
    per_request = -(-(30 + tree.num_slots) // size)
    return prefix_lens, rng.permutation(B * per_request).reshape(B, per_request).astype(np.int32), size


def _attention_example(rng: np.random.Generator, tied: bool) -> Arguments:
    tree = _random_tree(rng, tied)
    prefix_lens, page_table, size = _pages(rng, tree)
    H, C, R = (int(rng.integers(1, n)) for n in (4, 17, 9))
    kv_cache = np.full((page_table.size, size, C + R), np.nan, np.float32)
    for b, rows in enumerate(prefix_lens + tree.node_counts):
        row = np.arange(rows)
        kv_cache[page_table[b, row // size], row % size] = rng.normal(size=(rows, C + R))
    q = rng.normal(size=(tree.batch_size, tree.num_slots, H, C + R)) * (16 if tied else 1)
    return {
        "q": q.astype(np.float32),
        "kv_cache": kv_cache,
        "page_table": page_table,
        "prefix_lens": prefix_lens,
        "tree": tree,
        "scale": float((C + R) ** -0.5),
        "kv_lora_rank": C,
    }


def _choose_example(rng: np.random.Generator, tied: bool) -> Arguments:
    B, N, V = rng.integers(0, 3), rng.integers(1, 6), rng.integers(1, 60)
    logits = (rng.integers(-8, 9, (B, N, V)) / 8 if tied else rng.normal(0, 4, (B, N, V))).astype(np.float32)
    logits[rng.random(logits.shape) < 0.1] = -np.inf
    logits[rng.random((B, N)) < 0.1, rng.integers(0, V)] = np.nan
    return {
        "logits": logits,
        "temperature": float(rng.choice([0.0, 0.3, 1.0, 2.0])),
        "top_p": float(rng.choice([0.2, 0.9, 1.0])),
        "seed": int(rng.integers(0, 2**63)),
        "request_ids": rng.integers(0, 2**40, B),
        "positions": rng.integers(0, 1000, (B, N)).astype(np.int32),
    }


def _accept_example(rng: np.random.Generator, tied: bool) -> Arguments:
    tree = _random_tree(rng, tied)
    choices = rng.integers(-1, 3 if tied else 100, tree.parents.shape).astype(np.int32)
    for b, i in np.argwhere(rng.random(tree.parents.shape) < 0.7):  # or no path would be long
        children = np.flatnonzero(tree.parents[b] == i)
        if len(children):
            choices[b, i] = tree.token_ids[b, rng.choice(children)]
    return {
        "tree": tree,
        "target_token_ids": choices,
        "remaining": rng.integers(0, 12, tree.batch_size).astype(np.int32),
        "stop_token_ids": rng.integers(0, 100, rng.integers(0, 4)).astype(np.int32),
    }


def _compact_example(rng: np.random.Generator, tied: bool) -> Arguments:
    arguments = _accept_example(rng, tied)
    prefix_lens, page_table, size = _pages(rng, arguments["tree"])
    return {
        "kv_cache": rng.normal(size=(rng.integers(1, 4), page_table.size, size, 5)).astype(np.float32),
        "page_table": page_table,
        "prefix_lens": prefix_lens,
        "acceptance": ops.accept_tree(**arguments, backend="reference"),
    }


_EXAMPLES: dict[str, Callable[[np.random.Generator, bool], Arguments]] = {
    "topk_log_probs": _topk_example,
    "build_tree": _build_example,
    "visibility_words": _words_example,
    "tree_positions": _positions_example,
    "verify_attention": _attention_example,
    "choose_tokens": _choose_example,
    "accept_tree": _accept_example,
    "compact_cache": _compact_example,
}
