"""Time on a GPU from logits to a finished draft tree, and of its parts: ``cupy``'s kernels in replayed CUDA graphs.

``time_graph`` takes any function that works on CuPy's current stream, so that other builders can be timed beside these.
Before anything is timed, the trees must be those of ``numba_cpu``, bit for bit.
"""

from __future__ import annotations

import importlib
import json
import statistics
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import click
import numpy as np
from numpy.typing import NDArray
from rich import box
from rich.console import Console
from rich.table import Table

from ddtree.analysis.environment import devices, versions
from ddtree.kernels import numba_cpu
from ddtree.trees import DraftTree

__all__ = ["CASES", "Case", "draft_logits", "measure", "time_graph"]

TREE_FIELDS = ("token_ids", "parents", "depths", "ranks", "scores", "node_counts", "visibility_words")
FLUSHED_BYTES = 256 << 20
"""Written before each cold replay: more than a second-level cache holds."""


@dataclass(frozen=True)
class Case:
    """B requests of V logits at each of L depths, cut to K candidates, and trees of ``budget`` nodes from them."""

    budget: int
    num_candidates: int
    max_depth: int
    batch_size: int = 1
    dtype: str = "float32"
    kind: str = "wide"
    """Of the logits: "wide", "peaked" where some tokens have most of the mass, or "tied" on a grid of 1/8."""

    vocab_size: int = 163_840

    @property
    def name(self) -> str:
        """As in the table."""
        return f"{self.batch_size} × {self.max_depth}, {self.dtype}, {self.kind}"


CASES = (
    *(Case(64, 64, L, dtype=dtype) for L in (7, 15) for dtype in ("bfloat16", "float32")),
    *(Case(64, 64, L, dtype="bfloat16", kind="peaked") for L in (7, 15)),
    Case(64, 64, 15, kind="tied"),
    *(Case(64, 64, L, batch_size=64, dtype="bfloat16", vocab_size=20_480) for L in (7, 15)),
    Case(64, 64, 15, batch_size=64, dtype="bfloat16", kind="peaked", vocab_size=20_480),
    *(Case(budget, 64, 15, dtype="bfloat16") for budget in (32, 128, 256)),
    *(Case(1024, K, L, dtype="bfloat16") for L, K in ((7, 64), (15, 64), (15, 256), (15, 1024))),
    Case(1024, 64, 15, dtype="bfloat16", kind="peaked"),
    Case(1024, 64, 15, kind="tied"),
)


def draft_logits(case: Case, seed: int = 0) -> NDArray[np.float32]:
    """Draw float32 logits, some tokens of which the drafter expects more than the others."""
    rng = np.random.default_rng(seed)
    shape = case.batch_size, case.max_depth, case.vocab_size
    logits = np.float32(3) * rng.standard_normal(shape, np.float32)
    expected = rng.uniform(0, 12, (*shape[:2], 8)).astype(np.float32)
    if case.kind == "peaked":
        logits[..., :8] = 14 + expected
    else:
        logits[..., :8] += expected
    return np.asarray(np.round(logits * 8) / 8 if case.kind == "tied" else logits, np.float32)


def time_graph(function: Callable[[], Any], *, repeats: int, cold: bool = False) -> list[float]:
    """Capture ``function`` into a CUDA graph and return the microseconds of each of ``repeats`` replays.

    It must have run before. Warm, the graph holds it 20 times over, and a value is a 20th of a replay. Cold, it is
    replayed alone, with the caches flushed before, and the launch of a graph of nothing is part of the value.
    """
    cp: Any = importlib.import_module("cupy")
    times = 1 if cold else 20
    stream = cp.cuda.Stream(non_blocking=True)
    flushed = cp.empty(FLUSHED_BYTES, np.uint8)
    with stream:
        stream.begin_capture()
        for _ in range(times):
            function()
        graph = stream.end_capture()
        values = []
        for _ in range(repeats + 3):
            if cold:
                flushed.fill(0)
            start, end = cp.cuda.Event(), cp.cuda.Event()
            start.record(stream)
            graph.launch(stream)
            end.record(stream)
            end.synchronize()
            values.append(1e3 * cp.cuda.get_elapsed_time(start, end) / times)
    return values[3:]


def check_equal(tree: DraftTree, expected: DraftTree, name: str) -> None:
    """Raise unless a tree on the GPU is that on the host."""
    for field in TREE_FIELDS:
        if getattr(tree, field).get().tobytes() != getattr(expected, field).tobytes():
            raise AssertionError(f"{name}: {field} differs: nothing is timed")


def measure(case: Case, *, repeats: int) -> dict[str, list[float]]:
    """Check the trees, then time the steps and the whole: microseconds, a value a replay."""
    cp: Any = importlib.import_module("cupy")
    kernels: Any = importlib.import_module("ddtree.kernels.cupy")
    stream = cp.cuda.Stream(non_blocking=True)
    with stream:
        logits = cp.asarray(draft_logits(case).astype(_dtype(case.dtype)))
        roots = cp.zeros(case.batch_size, np.int32)
        prefix_lens = cp.full(case.batch_size, 1000, np.int32)
        log_probs, token_ids = kernels.topk_log_probs(logits, case.num_candidates)

        def build() -> DraftTree:
            tree: DraftTree = kernels.build_tree(log_probs, token_ids, roots, budget=case.budget)
            return tree

        def whole() -> Any:
            drafted = kernels.topk_log_probs(logits, case.num_candidates)
            tree = kernels.build_tree(*drafted, roots, budget=case.budget)
            return tree, kernels.tree_positions(tree.depths, prefix_lens)

        draft = log_probs.get(), token_ids.get(), roots.get()
        expected = numba_cpu.build_tree(*draft, budget=case.budget)
        check_equal(build(), expected, case.name)
        check_equal(whole()[0], expected, case.name)
        stream.synchronize()
    ways: dict[str, Callable[[], Any]] = {
        "topk_log_probs": lambda: kernels.topk_log_probs(logits, case.num_candidates),
        "build_tree": build,
        "whole": whole,
    }
    times = {name: time_graph(way, repeats=repeats) for name, way in ways.items()}
    return times | {f"{name}, cold": time_graph(way, repeats=repeats, cold=True) for name, way in ways.items()}


def _dtype(name: str) -> Any:
    return np.dtype(getattr(importlib.import_module("ml_dtypes"), name) if name == "bfloat16" else name)


def table_of(results: list[tuple[Case, dict[str, list[float]]]], repeats: int) -> Table:
    """Medians."""
    table = Table(
        title="From logits to draft trees: microseconds",
        caption=f"Medians of {repeats} graph replays; the whole is both steps and the positions. {devices()[-1]}.",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
    )
    for name in ("B × L, logits", "budget", "K", *(results[0][1] if results else ())):
        table.add_column(name, justify="left" if name == "B × L, logits" else "right")
    for case, times in results:
        medians = (f"{statistics.median(values):.1f}" for values in times.values())
        table.add_row(case.name, str(case.budget), str(case.num_candidates), *medians)
    return table


@click.command()
@click.option("--repeats", default=50, show_default=True, type=click.IntRange(1), help="Timed replays of each case.")
@click.option("--json", "json_path", type=click.Path(dir_okay=False, writable=True), help="Also write every time here.")
def main(repeats: int, json_path: str | None) -> None:
    """Time the CUDA C++ kernels that make draft trees from logits."""
    results = [(case, measure(case, repeats=repeats)) for case in CASES]
    Console(width=None if sys.stdout.isatty() else 160).print(table_of(results, repeats))
    if json_path is not None:
        rows = [asdict(case) | {"µs": times} for case, times in results]
        with open(json_path, "w", encoding="utf-8") as file:
            json.dump({"devices": devices(), "versions": versions(), "cases": rows}, file, indent=1, ensure_ascii=False)


if __name__ == "__main__":
    main()
