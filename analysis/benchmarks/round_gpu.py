"""Time on a GPU of what surrounds attention in a decoding round: choice, acceptance, compaction and a model's layers.

Each operation is captured in a CUDA graph, some times over, and a replay's time is divided by their number: launches
follow each other as they do in a captured round, and no Python is in the figures. "warm" finds in L2 what the last time
has left there; "cold" comes after a fill of 256 MB, whose own time, measured alike, is taken off.
"""

from __future__ import annotations

import functools
import importlib
import itertools
import json
import statistics
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import click
import numpy as np
from rich.console import Console
from rich.table import Table

from ddtree.trees import Acceptance, DraftTree, chain_tree

__all__ = ["Job", "graph_times", "layer_jobs", "main", "round_jobs"]

kernels: Any = importlib.import_module("ddtree.kernels.cupy")

VOCAB, BUDGET, BATCH, LAYERS, WIDTH, PAGE = 163_840, 64, 8, 61, 576, 64
HIDDEN, HEADS, LATENT, ROTATED, EXPERTS, CHOSEN, INNER, DENSE = 7168, 64, 512, 64, 64, 8, 2048, 18_432
"""Of DeepSeek-V3 and Kimi-K2, but for the number of experts, which is cut so that they fit in memory."""
TOKENS = (1, 8, 16, 65, 256)
FLUSHED = 256 << 20
"""Bytes that a cold start is preceded by: several times any L2."""


@dataclass(frozen=True)
class Job:
    """An operation on arrays that it holds; ``moved`` is the bytes that it reads and writes at the least."""

    name: str
    run: Callable[[], Any]
    moved: int


def round_jobs(cp: Any) -> Iterator[Job]:
    """Choice, acceptance and compaction at the sizes of a round."""
    rng = np.random.default_rng(0)
    N = BUDGET + 1
    for rows in (1, N):
        wide = 3 * cp.asarray(rng.standard_normal((1, rows, VOCAB), np.float32))
        positions = cp.arange(rows, dtype=np.int32)[None]
        for kind in ("float32", "bfloat16"):
            dtype = np.dtype(kind) if kind == "float32" else np.dtype(importlib.import_module("ml_dtypes").bfloat16)
            logits = cp.asarray(wide, dtype) if kind == "float32" else _rounded(cp, wide, dtype)
            sampled = {"temperature": 1.0, "positions": positions}
            for label, options in (
                ("greedy", {}),
                ("T = 1", sampled),
                ("T = 1, top-p 0.9", sampled | {"top_p": 0.9}),
            ):
                name = f"choose_tokens {rows} × {VOCAB:,} {kind}, {label}"
                yield Job(name, functools.partial(kernels.choose_tokens, logits, **options), logits.nbytes)

    for depth in (7, 15):
        tree, choices, acceptance = _accepted_chains(cp, BATCH, N, depth)
        table = cp.asarray(rng.permutation(BATCH * 40).astype(np.int32).reshape(BATCH, 40))
        prefixes = cp.asarray(rng.integers(0, 2000, BATCH).astype(np.int32))
        cache = cp.zeros((LAYERS, BATCH * 40, PAGE, WIDTH), np.uint16)
        # all but the root move: read once, written once
        moved = 2 * LAYERS * BATCH * depth * WIDTH * 2

        def accept(tree: Any = tree, choices: Any = choices) -> Any:
            return kernels.accept_tree(tree, choices)

        def compact(cache: Any = cache, table: Any = table, prefixes: Any = prefixes, kept: Any = acceptance) -> None:
            kernels.compact_cache(cache, table, prefixes, kept)

        def both(accept: Any = accept, compact: Any = compact) -> None:
            compact(kept=accept())

        yield Job(f"accept_tree, {BATCH} trees, depth {depth}", accept, 0)
        yield Job(f"compact_cache, {LAYERS} layers, depth {depth}", compact, moved)
        yield Job(f"accept_tree and compact_cache, depth {depth}", both, moved)


def layer_jobs(cp: Any) -> Iterator[Job]:
    """A model's layers in bfloat16, by the number of tokens."""
    bfloat16 = importlib.import_module("ml_dtypes").bfloat16
    some = np.random.default_rng(0).standard_normal(1 << 18).astype(np.float32)

    def numbers(*shape: int) -> Any:
        """Normal numbers of variance 1 / the last dimension, the same ones over and over: sums are of size 1."""
        values = cp.empty(shape, bfloat16)
        flat, bits = values.view(np.uint16).reshape(-1), cp.asarray((some * shape[-1] ** -0.5).astype(bfloat16))
        for start in range(0, flat.size, bits.size):
            part = flat[start : start + bits.size]
            part[...] = bits.view(np.uint16)[: part.size]
        return values

    weights = {
        "q and kv down": numbers(1536 + LATENT + ROTATED, HIDDEN),
        "q up": numbers(HEADS * 192, 1536),
        "attention out": numbers(HIDDEN, HEADS * 128),
        "router": numbers(384, HIDDEN),
        "head": numbers(VOCAB, HIDDEN),
    }
    norm = numbers(HIDDEN)
    gated = {
        name: (numbers(2 * inner, HIDDEN), numbers(HIDDEN, inner))
        for name, inner in (("shared expert", INNER), ("dense", DENSE))
    }
    experts = numbers(EXPERTS, 2 * INNER, HIDDEN), numbers(EXPERTS, HIDDEN, INNER)
    expert_bytes = sum(w.nbytes for w in experts) // EXPERTS
    logits, bias = numbers(max(TOKENS), 384), numbers(384)
    table, prefixes = cp.arange(2000, dtype=np.int32)[None], cp.full(1, 5000, np.int32)
    cache = numbers(2000, PAGE, WIDTH)
    frequencies = cp.asarray(1e4 ** (np.arange(0, ROTATED, 2) / -ROTATED))
    route = functools.partial(
        kernels.route_experts,
        **{"num_experts_per_tok": CHOSEN, "n_group": 1, "topk_group": 1},
        **{"norm_topk_prob": True, "routed_scaling_factor": 2.5},
    )

    for M in TOKENS:
        x = numbers(M, HIDDEN)
        yield Job(f"rms_norm {M} × {HIDDEN}", functools.partial(kernels.rms_norm, x, norm, eps=1e-6), 2 * x.nbytes)
        for name, weight in weights.items():
            given = numbers(M, weight.shape[1])
            moved = weight.nbytes + given.nbytes + 2 * M * len(weight)
            shape = f"{M} × {weight.shape[1]} → {len(weight)}"
            yield Job(f"linear {shape}, {name}", functools.partial(kernels.linear, given, weight), moved)
        for name, pair in gated.items():
            moved = sum(w.nbytes for w in pair) + 2 * x.nbytes
            yield Job(f"swiglu {M}, {name}", functools.partial(kernels.swiglu, x, *pair), moved)
        yield Job(f"route_experts {M} of 384", functools.partial(route, logits[:M], bias), 0)
        ids = np.stack([np.random.default_rng(m).permutation(EXPERTS)[:CHOSEN] for m in range(M)]).astype(np.int32)
        at_work = len(np.unique(ids))
        yield Job(
            f"moe_experts {M}, {at_work} of {EXPERTS} at work",
            functools.partial(kernels.moe_experts, x, cp.asarray(ids), numbers(M, CHOSEN), *experts),
            at_work * expert_bytes + 2 * x.nbytes,
        )
        tree = _on_gpu(cp, chain_tree(np.zeros((1, M), int)))
        rows = numbers(1, M, WIDTH)
        latents, keys = cp.ascontiguousarray(rows[..., :LATENT]), rows[..., LATENT:]
        given = numbers(1, M, HEADS, WIDTH), cache, numbers(1, M, HEADS, 192), latents, keys, table, prefixes, tree
        yield Job(
            f"rope {M}, {HEADS} heads, and the cache's rows",
            functools.partial(kernels.rope, *given, frequencies=frequencies),
            2 * 2 * M * (HEADS * ROTATED + WIDTH),
        )


def _rounded(cp: Any, x: Any, dtype: Any) -> Any:
    return cp.asarray(x.get().astype(dtype))


def _on_gpu(cp: Any, tree: DraftTree) -> DraftTree:
    return DraftTree(*(cp.asarray(v) if isinstance(v, np.ndarray) else v for v in vars(tree).values()))


def _accepted_chains(cp: Any, B: int, N: int, depth: int) -> tuple[DraftTree, Any, Acceptance]:
    """Trees whose every other node is the next of a chain of ``depth`` below the root, which the target accepts."""
    parents = np.zeros((B, N), np.int32)
    chain = 2 * np.arange(depth + 1)
    parents[:, 0] = -1
    parents[:, chain[1:]] = chain[:-1]
    tokens = np.arange(N, dtype=np.int32) + np.zeros((B, 1), np.int32)
    depths = np.minimum(parents, 0) + 1
    depths[:, chain] = np.arange(depth + 1)
    choices = np.full((B, N), N, np.int32)
    choices[:, chain[:-1]] = chain[1:]
    counts = np.full(B, N, np.int32)
    words = np.zeros((B, N, (N + 31) // 32), np.uint32)
    scores = depths.astype(np.float64)
    tree = _on_gpu(cp, DraftTree(tokens, parents, depths, depths, scores, counts, words, depth, N))
    acceptance = kernels.accept_tree(tree, cp.asarray(choices))
    if acceptance.lengths.get().tolist() != [depth + 1] * B:
        raise AssertionError("the target accepts the whole chain: nothing is timed")
    return tree, cp.asarray(choices), acceptance


def graph_times(cp: Any, run: Callable[[], Any], *, copies: int, replays: int) -> list[float]:
    """Microseconds of each of ``replays`` replays of a graph of ``copies`` calls, by call."""
    stream = cp.cuda.Stream(non_blocking=True)
    with stream:
        run()
        stream.synchronize()
        stream.begin_capture()
        kept = [run() for _ in range(copies)]
        graph = stream.end_capture()
        begin, end = cp.cuda.Event(), cp.cuda.Event()
        times = []
        for _ in range(replays + 3):
            begin.record(stream)
            graph.launch(stream)
            end.record(stream)
            end.synchronize()
            times.append(cp.cuda.get_elapsed_time(begin, end) * 1e3 / copies)
        del kept
    return times[3:]


def measure(cp: Any, job: Job, room: Any, replays: int) -> dict[str, list[float]]:
    """Times of a job, warm, and cold after a fill of ``room``."""

    def cold() -> Any:
        room.fill(0)
        return job.run()

    flush = statistics.median(graph_times(cp, lambda: room.fill(0), copies=5, replays=replays))
    return {
        "warm": graph_times(cp, job.run, copies=20, replays=replays),
        "cold": [t - flush for t in graph_times(cp, cold, copies=5, replays=replays)],
    }


@click.command()
@click.option("--replays", default=30, show_default=True, type=click.IntRange(1), help="Timed replays of each graph.")
@click.option("--only", default="", help="Only operations with this in their names.")
@click.option("--what", type=click.Choice(["round", "layers", "both"]), default="both", help="Which operations.")
@click.option("--json", "json_path", type=click.Path(dir_okay=False, writable=True), help="Also write every time here.")
def main(replays: int, only: str, what: str, json_path: str | None) -> None:
    """Time the CUDA C++ kernels by graph replay."""
    cp = importlib.import_module("cupy")
    properties = cp.cuda.runtime.getDeviceProperties(cp.cuda.Device().id)
    gpu = properties["name"].decode()
    table = Table(
        title="Operations of a round; microseconds",
        caption=f"Median of {replays} graph replays. {gpu}, CuPy {cp.__version__}. GB/s of what must be moved, cold.",
    )
    table.add_column("operation", no_wrap=True)
    for name in ("warm", "cold", "GB/s"):
        table.add_column(name, justify="right", no_wrap=True)
    rows, room = [], cp.empty(FLUSHED, np.uint8)
    makers = [make for name, make in (("round", round_jobs), ("layers", layer_jobs)) if what in (name, "both")]
    for job in itertools.chain.from_iterable(make(cp) for make in makers):
        if only not in job.name:
            continue
        times = measure(cp, job, room, replays)
        warm, cold = (statistics.median(times[name]) for name in ("warm", "cold"))
        rate = f"{job.moved / cold / 1e3:,.0f}" if job.moved and cold > 0 else ""
        table.add_row(job.name, f"{warm:.2f}", f"{cold:.2f}", rate)
        rows.append({"operation": job.name, "bytes": job.moved, "µs": times})
    Console(width=None if sys.stdout.isatty() else 160).print(table)
    if json_path is not None:
        with open(json_path, "w", encoding="utf-8") as file:
            json.dump({"gpu": gpu, "operations": rows}, file, indent=1, ensure_ascii=False)


if __name__ == "__main__":
    main()
