"""Time of building draft trees: compiled code, the NumPy reference, and a heap of Python tuples as published.

The published builder (DDTree, arXiv 2604.12989, Algorithm 1 and the code released with it) serves one request at a
time: a ``heapq`` of tuples, then the ancestors' matrix, a row a node, in NumPy. It is written again here with the same
structure. Its sibling scores are made by subtracting and adding, which agrees with the contract's sums where float64
is exact, as on these drafts: so before anything is timed, all builders must have given the same trees.
"""

from __future__ import annotations

import heapq
import json
import math
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import click
import numpy as np
from numpy.typing import NDArray
from rich import box
from rich.console import Console
from rich.progress import track
from rich.table import Table

from ddtree import reference
from ddtree.analysis.environment import devices, versions
from ddtree.kernels import numba_cpu
from ddtree.trees import DraftTree

__all__ = ["CASES", "Case", "draft", "main", "measure", "published_build_tree"]

VOCAB = 151_936
LIKELY = 1_024
"""Tokens that a depth's candidates are drawn from."""

TREE_FIELDS = ("token_ids", "parents", "depths", "ranks", "scores", "node_counts", "visibility_words")


@dataclass(frozen=True)
class Case:
    """What is built: a batch of trees of ``budget`` nodes from K candidates at each of L depths."""

    budget: int
    num_candidates: int
    tied: bool
    """Log-probs on a grid of 1/16, as low-precision logits give them, where many paths have equal scores."""

    batch_size: int = 1024
    max_depth: int = 15

    @property
    def name(self) -> str:
        """As in the table."""
        return f"{'tied' if self.tied else 'random'}, {self.budget:,}"


CASES = tuple(
    Case(budget, K, tied) for budget, K in ((64, 16), (64, 64), (1024, 64), (1024, 128)) for tied in (False, True)
)


def draft(case: Case, seed: int = 0) -> tuple[NDArray[np.float32], NDArray[np.int32], NDArray[np.int32]]:
    """Draw log-probs, token ids and root tokens; every sum of the log-probs is exact in float64."""
    rng = np.random.default_rng(seed)
    B, L, K = case.batch_size, case.max_depth, case.num_candidates
    tokens = rng.choice(VOCAB, LIKELY, replace=False).astype(np.int32)
    log_probs, token_ids = np.empty((B, L, K), np.float32), np.empty((B, L, K), np.int32)
    grid = 2.0**4 if case.tied else 2.0**24
    for b in range(B):
        logits = 3.0 * rng.standard_normal((L, LIKELY))
        order = np.argsort(-logits, axis=-1)[:, :K]
        exact = np.take_along_axis(logits, order, -1) - np.log(np.exp(logits).sum(-1, keepdims=True))
        log_probs[b] = np.round(exact.astype(np.float32) * grid) / grid
        token_ids[b] = tokens[order]
    return log_probs, token_ids, rng.choice(tokens, B)


def published_build_tree(
    log_probs: NDArray[np.float32], token_ids: NDArray[np.int32], budget: int
) -> tuple[NDArray[np.int64], NDArray[np.int64], list[int], list[dict[int, int]], NDArray[np.bool_]]:
    """Build one request's tree: token ids and depths of the nodes, then parents, children and visibility with the root.

    Children are a map a node, from token to index, which the published acceptance walks.
    """
    L, K = log_probs.shape
    width = min(budget, K)
    nodes = np.empty(budget, np.int64)
    depths = np.empty(budget, np.int64)
    parents = np.full(budget + 1, -1, np.int32)
    children: list[dict[int, int]] = [{}]
    score = float(log_probs[0, 0])
    heap: list[tuple[float, tuple[int, ...], int, int, int, float]] = [(-score, (0,), 0, 1, 0, score)]
    count = 0
    while heap and count < budget:
        _, ranks, parent, depth, rank, score = heapq.heappop(heap)
        token = int(token_ids[depth - 1, rank])
        nodes[count], depths[count] = token, depth
        count += 1
        parents[count] = parent
        children.append({})
        children[parent][token] = count
        if rank + 1 < width:
            other = score - float(log_probs[depth - 1, rank]) + float(log_probs[depth - 1, rank + 1])
            heapq.heappush(heap, (-other, (*ranks[:-1], rank + 1), parent, depth, rank + 1, other))
        if depth < L:
            other = score + float(log_probs[depth, 0])
            heapq.heappush(heap, (-other, (*ranks, 0), count, depth + 1, 0, other))

    visible = np.zeros((count + 1, count + 1), np.bool_)
    visible[0, 0] = True
    for i in range(1, count + 1):
        visible[i, :i] = visible[int(parents[i]), :i]
        visible[i, i] = True
    return nodes[:count], depths[:count], parents[: count + 1].tolist(), children, visible


def check_equal(case: Case, arrays: tuple[Any, ...], tree: DraftTree, published: int, references: int) -> None:
    """Raise unless the published builder's and the reference's first trees are those in ``tree``."""
    log_probs, token_ids, roots = arrays
    expected = reference.build_tree(
        log_probs[:references], token_ids[:references], roots[:references], budget=case.budget
    )
    for field in TREE_FIELDS:
        if not np.array_equal(getattr(tree, field)[:references], getattr(expected, field)):
            raise AssertionError(f"{case.name}: {field} differs from the reference: nothing is timed")
    for b in range(published):
        tokens, depths, parents, _, visible = published_build_tree(log_probs[b], token_ids[b], case.budget)
        n = len(parents)
        words = tree.visibility_words[b, :n]
        places = np.arange(n)
        seen = words[:, places // 32] >> (places % 32).astype(np.uint32) & np.uint32(1) != 0
        same = (
            int(tree.node_counts[b]) == n
            and np.array_equal(tree.token_ids[b, 1:n], tokens)
            and np.array_equal(tree.depths[b, 1:n], depths)
            and np.array_equal(tree.parents[b, :n], parents)
            and np.array_equal(seen, visible)
        )
        if not same:
            raise AssertionError(f"{case.name}: the published builder's tree {b} is another: nothing is timed")


def measure(case: Case, *, repeats: int, published: int, references: int) -> dict[str, list[float]]:
    """Check that all builders agree, then time them in turns: microseconds a request, a value a repeat.

    ``published`` and ``references`` are the requests of the batch that the two slow builders are timed on; the others
    build or check the whole batch in one call.
    """
    arrays = log_probs, token_ids, roots = draft(case)
    budget = case.budget
    check_equal(case, arrays, numba_cpu.build_tree(*arrays, budget=budget), published, references)
    if numba_cpu.find_draft_fault(log_probs, token_ids, VOCAB) != (0, 0, 0, 0):
        raise AssertionError(f"{case.name}: the draft itself is faulty")

    def published_builder() -> None:
        for b in range(published):
            published_build_tree(log_probs[b], token_ids[b], budget)

    few = slice(references)
    ways: dict[str, tuple[int, Callable[[], Any]]] = {
        "published": (published, published_builder),
        "reference": (
            references,
            lambda: reference.build_tree(log_probs[few], token_ids[few], roots[few], budget=budget),
        ),
        "numba_cpu": (case.batch_size, lambda: numba_cpu.build_tree(*arrays, budget=budget)),
        "validation": (case.batch_size, lambda: numba_cpu.find_draft_fault(log_probs, token_ids, VOCAB)),
    }
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(repeats):
        for name, (requests, way) in ways.items():
            start = time.perf_counter()
            result = way()
            times[name].append((time.perf_counter() - start) / requests * 1e6)
            del result  # giving the memory back is not part of building
    return times


def machine() -> dict[str, Any]:
    """What the figures were taken on."""
    from numba import config

    found = versions()
    return {
        "cpu": devices()[0].removeprefix("CPU: "),
        "numba threads": int(config.NUMBA_NUM_THREADS),  # type: ignore[attr-defined]
        "platform": sys.platform,
        "versions": {name: found[name] for name in ("ddtree", "python", "numpy", "numba")},
    }


def table_of(results: list[tuple[Case, dict[str, list[float]]]], title: str, caption: str, *, wide: bool) -> Table:
    """Medians (with their spread where there is room) and the ratios that were measured in the same repeat."""

    def shown(values: list[float]) -> str:
        return spread(values) if wide else spread(values).partition(" ")[0]

    table = Table(title=title, caption=caption, box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for name in ("drafts, budget", "K"):
        table.add_column(name, no_wrap=True)
    for name in ("published", "reference", "numba_cpu", "times\nfaster", "vali-\ndation", "% of\nbuild"):
        table.add_column(name, justify="right", no_wrap=True)
    for case, times in results:
        faster = [a / b for a, b in zip(times["published"], times["numba_cpu"], strict=True)]
        share = [100 * a / b for a, b in zip(times["validation"], times["numba_cpu"], strict=True)]
        table.add_row(
            case.name,
            str(case.num_candidates),
            *map(shown, (times["published"], times["reference"], times["numba_cpu"], faster)),
            *map(shown, (times["validation"], share)),
        )
    return table


def spread(values: list[float]) -> str:
    """Median (least to greatest), to three digits."""
    median, least, greatest = statistics.median(values), min(values), max(values)
    digits = max(0, 2 - math.floor(math.log10(median)))
    return f"{median:,.{digits}f} ({least:,.{digits}f} to {greatest:,.{digits}f})"


@click.command()
@click.option("--repeats", default=9, show_default=True, type=click.IntRange(1), help="Timed rounds of each case.")
@click.option("--quick", is_flag=True, help="Batches of 128 and 3 rounds: a look, not a measurement.")
@click.option("--json", "json_path", type=click.Path(dir_okay=False, writable=True), help="Also write every time here.")
def main(repeats: int, quick: bool, json_path: str | None) -> None:
    """Time the tree builders on random and on tied drafts."""
    cases = [Case(c.budget, c.num_candidates, c.tied, 128 if quick else c.batch_size) for c in CASES]
    repeats = min(repeats, 3) if quick else repeats
    results, rows = [], []
    console = Console(width=None if sys.stdout.isatty() else 200)
    for case in track(cases, description="timing", console=Console(stderr=True), transient=True):
        published, references = max(2, 8192 // case.budget // (4 if quick else 1)), 2
        times = measure(case, repeats=repeats, published=published, references=references)
        results.append((case, times))
        rows.append(asdict(case) | {"published requests": published, "reference requests": references} | {"µs": times})
    here = machine()
    title = f"Building trees: {cases[0].batch_size:,} requests, depth {cases[0].max_depth}; microseconds a request"
    caption = (
        f"Median of {repeats} rounds{' (least to greatest)' if console.width >= 180 else ''}. "
        + f"{here['cpu']}, {here['numba threads']} numba threads; "
        + ", ".join(f"{name} {version}" for name, version in here["versions"].items())
        + ". The published builder and the reference work on one core, and were timed on "
        + ", ".join(f"{row['published requests']} and {row['reference requests']}" for row in rows[::2])
        + " requests of the batches. Equal trees were checked first."
    )
    console.print(table_of(results, title, caption, wide=console.width >= 180))
    if json_path is not None:
        with open(json_path, "w", encoding="utf-8") as file:
            json.dump({"machine": here, "cases": rows}, file, indent=1, ensure_ascii=False)


if __name__ == "__main__":
    main()
