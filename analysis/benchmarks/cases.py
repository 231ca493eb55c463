"""What is timed: operations at the sizes of a decoding round, and two sequences of them that a round is made of.

A case makes its inputs, in NumPy, from a fixed seed: random drafts and logits, shuffled pages, trees that a builder
made of such drafts, and a target that agrees with the drafter half of the time.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from ddtree.analysis.benchmarks.build_tree import Case as DraftCase
from ddtree.analysis.benchmarks.build_tree import draft
from ddtree.kernels import numba_cpu
from ddtree.property_tests.cases import KEYWORDS, PARAMETERS
from ddtree.trees import Acceptance, DraftTree

__all__ = ["CASES", "Case", "attention_inputs", "some_trees"]

VOCAB = 163_840
LATENT, ROTATED, PAGE = 512, 64, 64
SCALE = 192**-0.5
LAYERS = 61

Ops = Mapping[str, Callable[..., Any]]


@dataclass(frozen=True)
class Case:
    """One call, or a sequence of calls, at one size.

    Attributes
    ----------
    name : str
        The operation, or what the sequence does: cases of a name are drawn as one figure.
    ops : tuple of str
        The functions that it needs: operations, or kernels of a model's layers.
    sizes : dict of str to number or str
        The contract's letters, ``budget``, ``context``, and the type of the floats.
    make : callable
        Makes the inputs: NumPy arrays, trees and numbers by name.
    run : callable
        ``run(ops, inputs)`` makes the calls; ``ops`` has a function a name.
    flops, bytes : float
        Floating-point operations that it must do, and bytes that must go through memory at least once.
    gpu_only : bool
        It would take seconds on a CPU.
    slow_peers : bool
        Peers that take long to prepare are worth it here, if they are asked for.
    fault : callable or None
        ``fault(inputs, result)`` says what is wrong with a result, and "" where nothing is; None where the suite knows.
    """

    name: str
    ops: tuple[str, ...]
    sizes: dict[str, Any]
    make: Callable[[], dict[str, Any]]
    run: Callable[[Ops, dict[str, Any]], Any]
    flops: float = 0.0
    bytes: float = 0.0
    gpu_only: bool = False
    slow_peers: bool = False
    fault: Callable[[dict[str, Any], Any], str] | None = None

    @property
    def label(self) -> str:
        """The sizes as in a table."""
        return ", ".join(
            f"{name} {size}" if isinstance(size, str) else f"{name} {size:,}" for name, size in self.sizes.items()
        )


def _call(op: str) -> Callable[[Ops, dict[str, Any]], Any]:
    """Positional arguments by place, as the suite passes them: their names are the backend's own business."""

    def call(ops: Ops, inputs: dict[str, Any]) -> Any:
        given = [name for name in PARAMETERS[op] if name in inputs]
        by_name = {name: inputs[name] for name in given if name in KEYWORDS[op]}
        return ops[op](*(inputs[name] for name in given if name not in by_name), **by_name)

    return call


def some_trees(B: int, L: int, budget: int, K: int | None = None) -> DraftTree:
    """Trees of ``budget`` nodes that a builder made of random drafts."""
    K = min(budget, 64) if K is None else K
    tree: DraftTree = numba_cpu.build_tree(*draft(DraftCase(budget, K, False, B, L)), budget=budget)
    return tree


def _peaked(B: int, L: int, K: int) -> dict[str, Any]:
    """Drafts whose first 8 candidates a depth have most of the mass: trees of them are deep."""
    rng = np.random.default_rng(0)
    logits = 3 * rng.standard_normal((B, L, 4096), np.float32)
    logits[..., :8] = 14 + rng.uniform(0, 12, (B, L, 8))
    log_probs, token_ids = numba_cpu.topk_log_probs(logits, K)
    return {"log_probs": log_probs, "token_ids": token_ids, "root_token_ids": rng.integers(0, 4096, B).astype(np.int32)}


def _build_tree(B: int, L: int, K: int, budget: int, drafts: str = "random") -> Case:
    def make() -> dict[str, Any]:
        if drafts == "peaked":
            return _peaked(B, L, K) | {"budget": budget}
        log_probs, token_ids, roots = draft(DraftCase(budget, K, drafts == "tied", B, L))
        return {"log_probs": log_probs, "token_ids": token_ids, "root_token_ids": roots, "budget": budget}

    N = 1 + budget
    moved = B * (L * K * 8 + N * (4 * 4 + 8 + 4 * -(-N // 32)))
    sizes = {"B": B, "L": L, "K": K, "budget": budget, "drafts": drafts}
    return Case("build_tree", ("build_tree",), sizes, make, _call("build_tree"), 0, moved)


def _topk(B: int, L: int, K: int, dtype: Any) -> Case:
    def make() -> dict[str, Any]:
        return {
            "logits": (3 * np.random.default_rng(0).standard_normal((B, L, VOCAB), np.float32)).astype(dtype),
            "k": K,
        }

    size = np.dtype(dtype).itemsize
    sizes = {"B": B, "L": L, "V": VOCAB, "K": K, "type": np.dtype(dtype).name}
    return Case("topk_log_probs", ("topk_log_probs",), sizes, make, _call("topk_log_probs"), 0, B * L * VOCAB * size)


def _logits_to_tree(B: int, L: int, K: int, budget: int) -> Case:
    def make() -> dict[str, Any]:
        rng = np.random.default_rng(0)
        return {
            "logits": (3 * rng.standard_normal((B, L, VOCAB), np.float32)).astype(ml_dtypes.bfloat16),
            "roots": rng.integers(0, VOCAB, B).astype(np.int32),
            "prefix_lens": rng.integers(0, 8192, B).astype(np.int32),
            "k": K,
            "budget": budget,
        }

    def run(ops: Ops, inputs: dict[str, Any]) -> Any:
        log_probs, token_ids = ops["topk_log_probs"](inputs["logits"], inputs["k"])
        tree = ops["build_tree"](log_probs, token_ids, inputs["roots"], budget=inputs["budget"])
        return log_probs, token_ids, tree, ops["tree_positions"](tree.depths, inputs["prefix_lens"])

    sizes = {"B": B, "L": L, "V": VOCAB, "K": K, "budget": budget, "type": "bfloat16"}
    needs = ("topk_log_probs", "build_tree", "tree_positions")
    return Case("logits to tree", needs, sizes, make, run, 0, 2 * B * L * VOCAB)


def _tree_form(op: str, B: int, budget: int) -> Case:
    """``visibility_words`` or ``tree_positions`` of a tree that a builder made."""

    def make() -> dict[str, Any]:
        tree = some_trees(B, 15, budget)
        if op == "visibility_words":
            return {"parents": tree.parents, "node_counts": tree.node_counts}
        return {"depths": tree.depths, "prefix_lens": np.random.default_rng(0).integers(0, 8192, B).astype(np.int32)}

    N = 1 + budget
    moved = 4.0 * B * N * (1 + (-(-N // 32) if op == "visibility_words" else 1))
    return Case(op, (op,), {"B": B, "L": 15, "budget": budget}, make, _call(op), 0, moved)


def attention_inputs(B: int, H: int, N: int, context: int, dtype: Any, page: int = PAGE) -> dict[str, Any]:
    """Queries, a cache of shuffled pages and a tree of N nodes a request."""
    rng = np.random.default_rng(0)
    pages = -(-(context + N) // page)
    table = rng.permutation(B * pages).astype(np.int32).reshape(B, pages)
    return {
        "q": rng.standard_normal((B, N, H, LATENT + ROTATED), np.float32).astype(dtype),
        "kv_cache": rng.standard_normal((B * pages, page, LATENT + ROTATED), np.float32).astype(dtype),
        "page_table": table,
        "prefix_lens": np.full(B, context, np.int32),
        "tree": some_trees(B, 7, N - 1, 16),
        "scale": SCALE,
        "kv_lora_rank": LATENT,
    }


def _attention(B: int, H: int, N: int, context: int, dtype: Any = ml_dtypes.bfloat16, *, gpu_only: bool = True) -> Case:
    size = np.dtype(dtype).itemsize
    return Case(
        "verify_attention",
        ("verify_attention",),
        {"B": B, "H": H, "N": N, "context": context, "type": np.dtype(dtype).name},
        functools.partial(attention_inputs, B, H, N, context, dtype),
        _call("verify_attention"),
        2.0 * B * H * N * (context + N) * (2 * LATENT + ROTATED),
        size * B * ((context + N) * (LATENT + ROTATED) + N * H * (2 * LATENT + ROTATED)),
        gpu_only,
        slow_peers=(B, H, N, context) in ((1, 8, 64, 8192), (1, 64, 64, 32768), (32, 8, 32, 4096), (1, 8, 16, 8192)),
    )


def _choose(B: int, N: int, temperature: float, top_p: float) -> Case:
    def make() -> dict[str, Any]:
        rng = np.random.default_rng(0)
        return {
            "logits": 3 * rng.standard_normal((B, N, VOCAB), np.float32),
            "temperature": temperature,
            "top_p": top_p,
            "seed": 1,
            "positions": np.arange(B * N, dtype=np.int32).reshape(B, N),
        }

    sizes = {"B": B, "N": N, "V": VOCAB, "T": temperature, "top-p": top_p}
    return Case("choose_tokens", ("choose_tokens",), sizes, make, _call("choose_tokens"), 0, 4.0 * B * N * VOCAB)


def choices_for(tree: DraftTree, seed: int = 0) -> NDArray[np.int32]:
    """A target's choices (B, N) that agree with the drafter half of the time: the token of a child, or none."""
    rng = np.random.default_rng(seed)
    choices = np.full(tree.token_ids.shape, VOCAB - 1, np.int32)
    for i in range(tree.num_slots - 1, 0, -1):
        agrees = rng.random(tree.batch_size) < 0.5
        rows = np.flatnonzero(agrees & (i < tree.node_counts))
        choices[rows, tree.parents[rows, i]] = tree.token_ids[rows, i]
    return choices


def _accept_and_compact(B: int, L: int, budget: int, layers: int, context: int) -> Case:
    def make() -> dict[str, Any]:
        rng, tree = np.random.default_rng(0), some_trees(B, L, budget)
        pages = -(-(context + budget + 1) // PAGE)
        data = rng.integers(0, 2**16, (layers, B * pages, PAGE, LATENT + ROTATED), np.uint16)
        return {
            "kv_cache": data.view(ml_dtypes.bfloat16),
            "page_table": rng.permutation(B * pages).astype(np.int32).reshape(B, pages),
            "prefix_lens": np.full(B, context, np.int32),
            "tree": tree,
            "choices": choices_for(tree),
            "remaining": np.full(B, 1000, np.int32),
            "stop_token_ids": np.array([0, 1], np.int32),
        }

    def run(ops: Ops, inputs: dict[str, Any]) -> Acceptance:
        options = {name: inputs[name] for name in ("remaining", "stop_token_ids")}
        acceptance: Acceptance = ops["accept_tree"](inputs["tree"], inputs["choices"], **options)
        ops["compact_cache"](inputs["kv_cache"], inputs["page_table"], inputs["prefix_lens"], acceptance)
        return acceptance

    sizes = {"B": B, "L": L, "budget": budget, "layers": layers, "context": context}
    return Case("accept and compact", ("accept_tree", "compact_cache"), sizes, make, run)


BF16, F32 = ml_dtypes.bfloat16, np.float32

CASES: tuple[Case, ...] = (
    *(_build_tree(B, L, 64, 64) for B, L in ((1, 7), (1, 15), (8, 15), (64, 15), (256, 15))),
    *(_build_tree(1, 15, K, K) for K in (16, 256, 1024)),
    *(_build_tree(1, 15, 64, budget, drafts) for budget in (64, 1024) for drafts in ("tied", "peaked")),
    *(_topk(1, L, 64, dtype) for L in (7, 15) for dtype in (BF16, F32)),
    *(_logits_to_tree(1, L, 64, 64) for L in (7, 15)),
    *(
        _tree_form(op, B, budget)
        for op in ("visibility_words", "tree_positions")
        for B, budget in ((1, 64), (64, 64), (1, 1024))
    ),
    *(
        _attention(B, H, N, context)
        for B, H, N, context in (
            (1, 8, 16, 8192),
            (1, 8, 64, 2048),
            (1, 8, 64, 8192),
            (1, 8, 64, 32768),
            (1, 64, 64, 8192),
            (1, 64, 64, 32768),
            (8, 8, 64, 8192),
            (32, 8, 32, 4096),
        )
    ),
    _attention(1, 8, 64, 2048, F32, gpu_only=False),
    *(_choose(1, 65, T, top_p) for T, top_p in ((0.0, 1.0), (0.7, 1.0), (0.7, 0.9))),
    *(_accept_and_compact(B, 15, 64, LAYERS, 250) for B in (1, 8)),
)
"""Every case, those of a name together."""
