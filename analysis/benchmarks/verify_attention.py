"""Time of the CUDA C++ verify attention on a GPU, at sizes of DeepSeek-V3: bfloat16, 512 + 64 numbers a key.

A time is that of the bare launches, from a CUDA graph of several of them: warm, one call after the other; and cold, the
L2 cache filled with something else before each, less the time of filling it. Results are compared with those of the
plain kernel before anything is timed.
"""

from __future__ import annotations

import importlib
import json
import statistics
import sys
from collections.abc import Callable
from dataclasses import fields
from typing import Any, NamedTuple

import click
import ml_dtypes
import numpy as np
from rich.console import Console
from rich.table import Table

from ddtree.trees import DraftTree, tree_from_parents

__all__ = ["Case", "Inputs", "cases", "make_inputs", "time_calls", "time_ours"]

LATENT, ROTATED = 512, 64
FLUSHED_BYTES = 1 << 28
"""Written between cold calls: several times the L2 cache."""


class Case(NamedTuple):
    """Requests, heads, nodes of a tree and rows of the context."""

    B: int
    H: int
    N: int
    context: int

    @property
    def operations(self) -> int:
        """Multiplications and additions of scores and values, over all keys."""
        return 2 * self.B * self.H * self.N * (self.context + self.N) * (2 * LATENT + ROTATED)


class Inputs(NamedTuple):
    """Arguments of ``verify_attention``."""

    q: Any
    kv_cache: Any
    page_table: Any
    prefix_lens: Any
    tree: DraftTree
    out: Any


def cases() -> list[Case]:
    """One request and several, few heads and many, short trees and long contexts."""
    sizes = [(1, 8, 64, 8192), (1, 8, 64, 2048), (1, 8, 64, 32768), (1, 64, 64, 8192), (1, 64, 64, 32768)]
    return [Case(*size) for size in [*sizes, (8, 8, 64, 8192), (32, 8, 32, 4096), (1, 8, 16, 8192)]]


def make_inputs(case: Case, page_size: int, seed: int = 0) -> Inputs:
    """Random arrays on the GPU, pages in random order."""
    cp = importlib.import_module("cupy")
    rng, draw = np.random.default_rng(seed), cp.random.default_rng(seed)
    B, H, N, context = case
    pages = -(-(context + N) // page_size)
    table = rng.permutation(B * pages).astype(np.int32).reshape(B, pages)
    parents = np.array([[-1] + [int(rng.integers(i)) for i in range(1, N)] for _ in range(B)], np.int32)
    tree = tree_from_parents(np.zeros((B, N), np.int32), parents)
    arrays = {field.name: getattr(tree, field.name) for field in fields(tree)}
    cache = cp.empty((B * pages, page_size, LATENT + ROTATED), ml_dtypes.bfloat16)
    for first in range(0, len(cache), 1024):
        some = cache[first : first + 1024]
        some[...] = draw.standard_normal(some.shape, np.float32).astype(ml_dtypes.bfloat16)
    return Inputs(
        draw.standard_normal((B, N, H, LATENT + ROTATED), np.float32).astype(ml_dtypes.bfloat16),
        *(cache, cp.asarray(table), cp.full(B, context, np.int32)),
        DraftTree(**{k: cp.asarray(v) if isinstance(v, np.ndarray) else v for k, v in arrays.items()}),
        cp.empty((B, N, H, LATENT), ml_dtypes.bfloat16),
    )


def time_calls(call: Callable[[], Any], *, cold: bool, repeats: int = 30, calls: int = 5) -> list[float]:
    """Microseconds a call, of so many replays of a graph of calls, after one that compiles and one replay."""
    cp = importlib.import_module("cupy")
    flushed = cp.empty(FLUSHED_BYTES, np.uint8)
    stream = cp.cuda.Stream(non_blocking=True)

    def graph_of(step: Callable[[], Any]) -> Any:
        stream.begin_capture()
        for _ in range(calls):
            step()
        return stream.end_capture()

    def times_of(graph: Any) -> list[float]:
        graph.launch(stream)
        events = [(cp.cuda.Event(), cp.cuda.Event()) for _ in range(repeats)]
        for begin, end in events:
            begin.record(stream)
            graph.launch(stream)
            end.record(stream)
        stream.synchronize()
        return [cp.cuda.get_elapsed_time(*pair) / calls * 1e3 for pair in events]

    with stream:
        flushed.fill(1)
        call()
        stream.synchronize()
        if not cold:
            return times_of(graph_of(call))
        filling = statistics.median(times_of(graph_of(lambda: flushed.fill(1))))
        return [t - filling for t in times_of(graph_of(lambda: (flushed.fill(1), call())))]


def time_ours(inputs: Inputs, *, cold: bool, **options: Any) -> list[float]:
    """Microseconds of the launches of ``ddtree.kernels.cupy.verify_attention``."""
    return time_calls(lambda: _ours(inputs, **options), cold=cold)


def _ours(inputs: Inputs, **options: Any) -> Any:
    from ddtree.kernels.cupy.verify_attention import verify_attention

    scale = (LATENT / 4 + ROTATED) ** -0.5
    return verify_attention(*inputs[:5], scale=scale, kv_lora_rank=LATENT, out=inputs.out, **options)


def check_equal(inputs: Inputs) -> None:
    """Raise unless the version that is timed agrees with the plain one."""
    plain = _ours(inputs, version=1).astype(np.float32)
    difference = float(abs(_ours(inputs).astype(np.float32) - plain).max())
    if not difference <= 0.02 * float(abs(plain).max()):
        raise AssertionError(f"the two versions differ by {difference}: nothing is timed")


@click.command()
@click.option("--page-size", default=64, show_default=True, type=click.IntRange(1))
@click.option("--json", "json_path", type=click.Path(dir_okay=False, writable=True), help="Also write every time here.")
def main(page_size: int, json_path: str | None) -> None:
    """Time the attention, cold and warm."""
    cp = importlib.import_module("cupy")
    gpu = cp.cuda.runtime.getDeviceProperties(0)["name"].decode()
    table = Table(
        title="Verify attention, bfloat16, microseconds a call", caption=f"Medians on {gpu}, pages of {page_size}."
    )
    for name in ("B", "H", "N", "context", "cold", "warm", "TFLOP/s, cold"):
        table.add_column(name, justify="right")
    rows = []
    for case in cases():
        inputs = make_inputs(case, page_size)
        check_equal(inputs)
        times = {name: time_ours(inputs, cold=name == "cold") for name in ("cold", "warm")}
        cold, warm = (statistics.median(times[name]) for name in ("cold", "warm"))
        table.add_row(*map(str, case), f"{cold:.1f}", f"{warm:.1f}", f"{case.operations / cold / 1e6:.0f}")
        rows.append({"case": case._asdict(), "µs": times})
    Console(width=None if sys.stdout.isatty() else 120).print(table)
    if json_path is not None:
        with open(json_path, "w", encoding="utf-8") as file:
            json.dump({"gpu": gpu, "page size": page_size, "cases": rows}, file, indent=1, ensure_ascii=False)


if __name__ == "__main__":
    main()
