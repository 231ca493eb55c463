"""Time of the other tree operations on the CPU: compiled code beside the NumPy reference, at sizes of a decoding round.

Results are compared before anything is timed, exactly where the contract is exact. Both sides get the same arrays; the
reference is timed on the first few requests alone where it would take minutes, and all times are per request.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import click
import numpy as np
from rich.console import Console
from rich.table import Table

from ddtree import reference
from ddtree.analysis.benchmarks.build_tree import Case, draft, machine, spread
from ddtree.kernels import numba_cpu
from ddtree.trees import DraftTree

__all__ = ["Job", "jobs", "main"]

BUDGET, DEPTH, VOCAB = 64, 15, 160_000
LATENT, ROTATED, HEADS, PAGE, PREFIX = 512, 64, 16, 64, 2_000


@dataclass(frozen=True)
class Job:
    """An operation on a batch: ``run(module, requests)`` calls it on the first ``requests`` of it."""

    name: str
    run: Callable[[Any, int], Any]
    requests: int
    reference_requests: int
    error: float = 0.0
    """Greatest absolute difference allowed; 0 asks for equality."""


def first_requests(tree: DraftTree, n: int) -> DraftTree:
    """The trees of the first ``n`` requests."""
    arrays = {f.name: getattr(tree, f.name) for f in fields(tree)}
    return DraftTree(**{k: v if isinstance(v, int) else v[:n] for k, v in arrays.items()})


def jobs(quick: bool) -> list[Job]:
    """Make the inputs and the operations on them."""
    rng = np.random.default_rng(0)
    B, few = (64, 2) if quick else (1024, 8)
    tree = numba_cpu.build_tree(*draft(Case(BUDGET, BUDGET, False, B, DEPTH)), budget=BUDGET)
    # a target that agrees with the drafter half of the time: the token of each node's first child, or none
    choices = np.full(tree.token_ids.shape, -1, np.int32)
    for i in range(tree.num_slots - 1, 0, -1):
        agrees = rng.random(B) < 0.5
        rows = np.flatnonzero(agrees & (i < tree.node_counts))
        choices[rows, tree.parents[rows, i]] = tree.token_ids[rows, i]
    acceptance = numba_cpu.accept_tree(tree, choices)

    pages = -(-(PREFIX + tree.num_slots) // PAGE)
    attended = 2
    table = rng.permutation(attended * pages).astype(np.int32).reshape(attended, pages)
    prefixes = np.full(attended, PREFIX, np.int32)
    cache = rng.standard_normal((1, attended * pages, PAGE, LATENT + ROTATED)).astype(np.float32)
    q = rng.standard_normal((attended, tree.num_slots, HEADS, LATENT + ROTATED)).astype(np.float32)
    draft_logits = (3 * rng.standard_normal((1, DEPTH, VOCAB))).astype(np.float32)
    logits = (3 * rng.standard_normal((1, 4, VOCAB))).astype(np.float32)
    positions = np.arange(4, dtype=np.int32)[None]

    def compact(module: Any, n: int) -> Any:
        module.compact_cache(cache, table[:n], prefixes[:n], first_requests_of(acceptance, n))
        return cache

    def first_requests_of(record: Any, n: int) -> Any:
        return type(record)(*(getattr(record, f.name)[:n] for f in fields(record)))

    def attend(module: Any, n: int) -> Any:
        some = first_requests(tree, n)
        options = {"scale": 0.04, "kv_lora_rank": LATENT}
        return module.verify_attention(q[:n], cache[0], table[:n], prefixes[:n], some, **options)

    def choose(temperature: float, top_p: float) -> Callable[[Any, int], Any]:
        options = {"temperature": temperature, "top_p": top_p, "seed": 1, "positions": positions}
        return lambda module, n: module.choose_tokens(logits[:n], **options)

    return [
        Job("accept_tree, 65 nodes", lambda m, n: m.accept_tree(first_requests(tree, n), choices[:n]), B, few),
        Job(
            "visibility_words, 65 nodes",
            lambda m, n: m.visibility_words(tree.parents[:n], tree.node_counts[:n]),
            B,
            few,
        ),
        Job("tree_positions, 65 nodes", lambda m, n: m.tree_positions(tree.depths[:n], tree.node_counts[:n]), B, B),
        Job("compact_cache, 1 layer of 576", compact, attended, attended),
        Job("topk_log_probs, 15 × 160,000, K = 64", lambda m, n: m.topk_log_probs(draft_logits[:n], 64), 1, 1, 1e-5),
        Job("choose_tokens, 4 × 160,000, greedy", choose(0.0, 1.0), 1, 1),
        Job("choose_tokens, 4 × 160,000, T = 1", choose(1.0, 1.0), 1, 1),
        Job("choose_tokens, 4 × 160,000, T = 1, top-p 0.9", choose(1.0, 0.9), 1, 1),
        Job(f"verify_attention, 65 nodes, {PREFIX:,} rows, 16 heads", attend, attended, 1, 1e-4),
    ]


def arrays_of(result: Any) -> list[np.ndarray[Any, Any]]:
    """The arrays in a result."""
    if is_dataclass(result):
        return [getattr(result, f.name) for f in fields(result)]
    return list(result) if isinstance(result, tuple) else [result]


def check_equal(job: Job) -> None:
    """Raise unless both sides agree on the requests that the reference is timed on."""
    n = job.reference_requests
    pairs = zip(arrays_of(job.run(numba_cpu, n)), arrays_of(job.run(reference, n)), strict=True)
    for actual, expected in pairs:
        exact = job.error == 0 or actual.dtype.kind != "f"
        if not (np.array_equal(actual, expected) if exact else np.abs(actual - expected).max() <= job.error):
            raise AssertionError(f"{job.name}: the two sides differ: nothing is timed")


@click.command()
@click.option("--repeats", default=7, show_default=True, type=click.IntRange(1), help="Timed rounds of each operation.")
@click.option("--quick", is_flag=True, help="Smaller batches and 3 rounds: a look, not a measurement.")
@click.option("--json", "json_path", type=click.Path(dir_okay=False, writable=True), help="Also write every time here.")
def main(repeats: int, quick: bool, json_path: str | None) -> None:
    """Time the compiled operations beside the reference."""
    repeats = min(repeats, 3) if quick else repeats
    here = machine()
    table = Table(
        title="Tree operations on the CPU; microseconds a request",
        caption=f"Median of {repeats} rounds (least to greatest), after a comparison of the results. "
        f"{here['cpu']}, {here['numba threads']} numba threads.",
    )
    table.add_column("operation", no_wrap=True)
    for name in ("reference", "numba_cpu", "times faster"):
        table.add_column(name, justify="right", no_wrap=True)
    rows = []
    for job in jobs(quick):
        check_equal(job)
        times: dict[str, list[float]] = {"reference": [], "numba_cpu": []}
        for _ in range(repeats):
            for name, module, n in (
                ("reference", reference, job.reference_requests),
                ("numba_cpu", numba_cpu, job.requests),
            ):
                start = time.perf_counter()
                job.run(module, n)
                times[name].append((time.perf_counter() - start) / n * 1e6)
        faster = [a / b for a, b in zip(times["reference"], times["numba_cpu"], strict=True)]
        table.add_row(job.name, spread(times["reference"]), spread(times["numba_cpu"]), spread(faster))
        rows.append({"operation": job.name, "µs": times, "times faster": statistics.median(faster)})
    Console(width=None if sys.stdout.isatty() else 160).print(table)
    if json_path is not None:
        with open(json_path, "w", encoding="utf-8") as file:
            json.dump({"machine": here, "operations": rows}, file, indent=1, ensure_ascii=False)


if __name__ == "__main__":
    main()
