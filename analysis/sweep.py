"""Sweeps: τ of many policies on recorded traces, in this process, in others, or on a cluster.

A cell is one policy on one trace. Its result is a few sums for each prompt, which is written as soon as it is there: a
sweep that was interrupted computes what is missing.
"""

from __future__ import annotations

import csv
import hashlib
import io
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, as_completed
from dataclasses import dataclass, fields, is_dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

import ddtree
from ddtree.analysis.acceptance import TauTable, sums_by_prompt, tau_table_from_sums
from ddtree.analysis.intervals import LEVEL, RESAMPLES
from ddtree.analysis.progress import progress_bar
from ddtree.analysis.replay import passes_of, rank_rates, replay_all
from ddtree.analysis.tables import Table
from ddtree.analysis.trace import Trace, open_trace
from ddtree.costs import CostModel
from ddtree.kdtr import KdtrError, atomic_write, read_kdtr, remove_temporaries, write_kdtr
from ddtree.policies import (
    Limited,
    all_children,
    chain,
    confidence,
    cost_aware,
    fixed_budget,
    likeliest_rank_paths,
    limited,
    policy_name,
    spine_first,
    static_tree,
)
from ddtree.protocols import Policy
from ddtree.tokens import stop_tokens

__all__ = ["SweepTable", "policy_grid", "sweep", "write_sweep"]

FILED = ("cost", "cost-clamped", "static")
"""Kinds of policies that are made of a file or folder."""

CELLS = "cells"
"""Folder of the finished cells, beside the tables."""

ABANDONED_SECONDS = 60.0
"""Nobody takes so long to write a cell; a sweep in another process may be writing one now."""


@dataclass(frozen=True, eq=False)
class SweepTable(Table):
    """One row a cell.

    Attributes
    ----------
    trace : tuple of str
        Name of the trace.
    policy : tuple of str
        The series that the policy is one of, such as "tree" or "chain".
    label : tuple of str
        The policy itself, such as "fixed_budget(64)".
    budget, depth, topk : array, int64, shape (rows,)
        Most nodes besides the root, and what of a draft the policy sees: L and K, or less.
    tau, low, high, expected, nodes, efficiency, efficiency_low, efficiency_high : array, float64, shape (rows,)
        As in :class:`ddtree.analysis.acceptance.TauTable`.
    n_prompts, n_rounds, n_tokens : array, int64, shape (rows,)
        Prompts with a round, rounds of all of them, and the tokens they emitted.
    used_last_rank : array, int64, shape (rows,)
        Rounds whose tree has a node of the last rank that the policy sees, so that a wider record might have changed
        it.
    level : float
        Coverage of the intervals.
    """

    trace: tuple[str, ...]
    policy: tuple[str, ...]
    label: tuple[str, ...]
    budget: NDArray[np.int64]
    depth: NDArray[np.int64]
    topk: NDArray[np.int64]
    tau: NDArray[np.float64]
    low: NDArray[np.float64]
    high: NDArray[np.float64]
    expected: NDArray[np.float64]
    nodes: NDArray[np.float64]
    efficiency: NDArray[np.float64]
    efficiency_low: NDArray[np.float64]
    efficiency_high: NDArray[np.float64]
    n_prompts: NDArray[np.int64]
    n_rounds: NDArray[np.int64]
    n_tokens: NDArray[np.int64]
    used_last_rank: NDArray[np.int64]
    level: float

    columns: ClassVar[tuple[str, ...]] = (
        "trace", "policy", "label", "budget", "depth", "topk", "tau", "low", "high", "expected", "nodes", "efficiency",
        "efficiency_low", "efficiency_high", "n_prompts", "n_rounds", "n_tokens", "used_last_rank",
    )  # fmt: skip


def sweep(
    traces: Trace | Sequence[Trace],
    grid: Mapping[str, Sequence[Policy]],
    executor: Executor | None = None,
    *,
    folder: str | os.PathLike[str] | None = None,
    max_new_tokens: int | None = None,
    stop_token_ids: Iterable[int] = (),
    level: float = LEVEL,
    seed: int = 0,
    resamples: int = RESAMPLES,
) -> SweepTable:
    """Replay every policy of a grid on every trace.

    Parameters
    ----------
    traces : Trace or sequence of Trace
        One or more, of one vocabulary, L and K, with names of their own.
    grid : mapping of str to sequence of Policy
        Policies by series, such as ``{"tree": [fixed_budget(8), fixed_budget(64)], "chain": [chain(7)]}``. Labels are
        distinct. With ``folder``, a callable of one's own needs a ``label``, or to be a dataclass of numbers, text,
        arrays and policies: it is known by that, so change the label when you change what it does.
    executor : concurrent.futures.Executor, optional
        Who does the work: processes, a Dask cluster by ``client.get_executor()``, MPI by ``mpi4py.futures``; this
        process if left out. Policies and traces are pickled, and the traces' files must be where the workers are.
    folder : path, optional
        Keeps each finished cell, and those that it has already are not computed again. A cell is known by the bytes of
        its trace, its policy, the options and ddtree's version. What killed sweeps left half written is removed there.
    max_new_tokens, stop_token_ids
        As in :func:`ddtree.analysis.replay.replay`.
    level, seed, resamples
        Of the intervals, as in :func:`ddtree.analysis.acceptance.tau_interval`.

    Returns
    -------
    SweepTable
        By trace, then in the grid's order.

    Raises
    ------
    ValueError, TypeError
        An argument, a trace or a policy that does not fit, by name, before any work; or what a replay raises.

    Notes
    -----
    Best-first policies of the same limits share one pass over a trace and are one task. When a worker dies, a Dask
    cluster runs its task elsewhere; a pool of processes ends with an error, after what was finished has been written.

    Examples
    --------
    >>> from concurrent.futures import ProcessPoolExecutor
    >>> from ddtree.policies import chain, fixed_budget
    >>> grid = {"tree": [fixed_budget(b) for b in (8, 16, 32, 64)], "chain": [chain(7)]}
    >>> with ProcessPoolExecutor() as pool:  # doctest: +SKIP
    ...     table = sweep([shipped_trace()], grid, pool, folder="sweep")
    """
    traces, series, policies = _checked(traces, grid)
    stops = tuple(stop_tokens(stop_token_ids, traces[0].manifest.vocab_size))
    options = {"max_new_tokens": max_new_tokens, "stop_token_ids": stops}
    cells = _Cells(folder, traces, policies, options)
    groups = _tasks(cells, traces, policies)
    missing = sum(len(members) for _, members in groups)
    with progress_bar("replaying", missing) as show:
        done = 0
        for t, members, results in _results(groups, traces, policies, options, executor):
            for j, result in zip(members, results, strict=True):
                cells.put((t, j), result)
            done += len(members)
            show(done)
    return _table(cells, traces, series, policies, level=level, seed=seed, resamples=resamples)


def policy_grid(
    specs: Sequence[str],
    budgets: Sequence[int],
    *,
    depths: Sequence[int] = (),
    topks: Sequence[int] = (),
    depth: int,
    as_measured: bool = False,
) -> dict[str, list[Policy]]:
    """Make the grid of some kinds of policies: each at every budget, and under every limit.

    Parameters
    ----------
    specs : sequence of str
        ``tree``, ``chain``, ``spine-first``, ``all-children:WIDTH``, ``confidence:CUTOFF``, ``cost:FILE`` with what
        :meth:`ddtree.costs.CostModel.save` wrote, ``cost-clamped:FILE``, which takes the nearest costs at contexts that
        were not measured, and ``static:FOLDER``, fitted to the trace there.
    budgets : sequence of int
        Nodes besides the root. A chain's is its depth.
    depths, topks : sequence of int, optional
        Limits of what a policy sees of a draft; without them it sees all.
    depth : int
        L of the traces.
    as_measured : bool
        Leave out budgets of more nodes than a policy's cost model was measured with, which are errors else.

    Returns
    -------
    dict of str to list of Policy
        By series, as :func:`sweep` takes it. A series' name is what was given, with a file's or folder's name for its
        path if no other has that name, and has the limits, where there are several. Where several policies are made of
        files, their labels have it too.

    Raises
    ------
    ValueError
        A kind that is not known, or a value that it cannot have.
    """
    grid: dict[str, list[Policy]] = {}
    limits = [(d, k) for d in depths or (None,) for k in topks or (None,)]
    short = {spec: _without_folder(spec) for spec in specs}
    of_files = [spec for spec in short if spec.partition(":")[0] in FILED]
    for spec in specs:
        kind, _, value = spec.partition(":")
        make = _maker(kind, value)
        name = short[spec] if list(short.values()).count(short[spec]) == 1 else spec
        for d, k in dict.fromkeys((d, None) for d, _ in limits) if kind == "chain" else limits:
            series = name
            series += f", L ≤ {d}" if d is not None and len(depths) > 1 else ""
            series += f", K ≤ {k}" if k is not None and len(topks) > 1 else ""
            own = [depth if d is None else d] if kind == "chain" else budgets
            if as_measured and (costs := getattr(make(min(own)), "cost_model", None)) is not None:
                own = [budget for budget in own if budget <= costs.nodes[-1]]
            for budget in own:
                limited_here = kind != "chain" and (d is not None or k is not None)
                policy = make(budget)
                if spec in of_files and len(of_files) > 1:
                    policy = replace(policy, label=f"{policy.label[:-1]}, {name})")
                grid.setdefault(series, []).append(limited(policy, depth=d, topk=k) if limited_here else policy)
    return grid


def _without_folder(spec: str) -> str:
    """A policy with the name of its file or folder alone, where it has one."""
    kind, _, value = spec.partition(":")
    return f"{kind}:{Path(value).name}" if kind in FILED and Path(value).name else spec


def _maker(kind: str, value: str) -> Callable[[int], Any]:
    """What makes a policy of a kind from a budget."""
    plain: dict[str, Callable[[int], Policy]] = {"tree": fixed_budget, "chain": chain, "spine-first": spine_first}
    if kind in plain and not value:
        return plain[kind]
    try:
        if kind == "confidence":
            cutoff = float(value)
            return lambda budget: confidence(budget, cutoff)
        if kind == "all-children":
            width = int(value)
            return lambda budget: all_children(budget, width)
    except ValueError:
        raise ValueError(f"policy {kind} must have a number behind the colon, got {value!r}") from None
    if kind in ("cost", "cost-clamped") and value:
        costs = CostModel.load(value)
        return lambda budget: cost_aware(budget, costs, clamp=kind == "cost-clamped")
    if kind == "static" and value:
        rates = rank_rates(open_trace(value))
        return lambda budget: static_tree(likeliest_rank_paths(rates, budget))
    raise ValueError(
        "policy must be tree, chain, spine-first, all-children:WIDTH, confidence:CUTOFF, cost:FILE, cost-clamped:FILE "
        f"or static:FOLDER, got {f'{kind}:{value}' if value else kind!r}"
    )


def write_sweep(table: SweepTable, folder: str | os.PathLike[str]) -> list[Path]:
    """Write ``sweep.csv`` and ``sweep.json``, each whole or not at all; return their paths.

    The CSV has an empty cell, the JSON null, where there is no value, such as an interval of a single prompt.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    records = table.records()
    text = io.StringIO()
    writer = csv.DictWriter(text, table.columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows(records)
    document = {"version": ddtree.__version__, "level": table.level, "cells": records}
    written = {
        "sweep.csv": text.getvalue(),
        "sweep.json": json.dumps(document, indent=1, ensure_ascii=False, allow_nan=False) + "\n",
    }
    for name, content in written.items():
        with atomic_write(folder / name) as file:
            file.write(content.encode())
    return [folder / name for name in written]


Result = tuple[NDArray[np.float64], int]
"""Of a cell: sums by prompt, (P, 4), and the rounds that used the last rank."""


class _Cells:
    """Results by (trace, policy), in memory and, with a folder, in files that are looked for first."""

    def __init__(
        self, folder: str | os.PathLike[str] | None, traces: list[Trace], policies: list[Policy], options: Any
    ) -> None:
        self._results: dict[tuple[int, int], Result] = {}
        self._paths: dict[tuple[int, int], Path] = {}
        self._about: dict[tuple[int, int], dict[str, str]] = {}
        if folder is None:
            return
        home = Path(folder) / CELLS
        keys = [fingerprint(policy, f"policy {policy_name(policy)}") for policy in policies]
        home.mkdir(parents=True, exist_ok=True)
        remove_temporaries(home, idle_seconds=ABANDONED_SECONDS)
        for t, trace in enumerate(traces):
            digest = trace.digest()
            for j, policy in enumerate(policies):
                key = fingerprint((ddtree.__version__, digest, keys[j], sorted(options.items())))
                self._paths[t, j] = path = home / f"{key}.kdtr"
                self._about[t, j] = {"trace": trace.name, "label": policy_name(policy), "version": ddtree.__version__}
                if path.exists():
                    self._results[t, j] = _read_cell(path)

    def __contains__(self, cell: tuple[int, int]) -> bool:
        return cell in self._results

    def __getitem__(self, cell: tuple[int, int]) -> Result:
        return self._results[cell]

    def put(self, cell: tuple[int, int], result: Result) -> None:
        if cell in self._paths:
            arrays = {"sums": result[0], "used_last_rank": np.array(result[1], np.int64)}
            write_kdtr(self._paths[cell], arrays, self._about[cell])
        self._results[cell] = result


def _read_cell(path: Path) -> Result:
    try:
        arrays, _ = read_kdtr(path)
    except KdtrError as error:
        raise ValueError(f"{error}: remove the file, and its cell is computed again") from error
    kinds = {name: (a.dtype.name, a.ndim, a.shape[1:]) for name, a in arrays.items()}
    if kinds != {"sums": ("float64", 2, (4,)), "used_last_rank": ("int64", 0, ())}:
        raise ValueError(
            f"{path}: must hold sums float64 (P, 4) and used_last_rank int64 (), it is no cell: remove the file, and "
            "it is computed again"
        )
    return arrays["sums"], int(arrays["used_last_rank"])


def _tasks(cells: _Cells, traces: list[Trace], policies: list[Policy]) -> list[tuple[int, list[int]]]:
    """What is missing, as (trace, policies of one pass)."""
    tasks = []
    for t, trace in enumerate(traces):
        missing = [j for j in range(len(policies)) if (t, j) not in cells]
        wanted = [policies[j] for j in missing]
        for one in passes_of(wanted, trace.manifest.depth, trace.manifest.topk):
            tasks.append((t, [missing[m] for m in one.members]))  # noqa: PERF401 - a comprehension says less
    return tasks


def _results(
    tasks: list[tuple[int, list[int]]], traces: list[Trace], policies: list[Policy], options: Any, executor: Any
) -> Iterator[tuple[int, list[int], list[Result]]]:
    """The tasks' results, as they come."""
    arguments = [(traces[t], [policies[j] for j in members], options) for t, members in tasks]
    if executor is None:
        for (t, members), each in zip(tasks, arguments, strict=True):
            yield t, members, _replayed(*each)
        return
    futures = {executor.submit(_replayed, *each): task for task, each in zip(tasks, arguments, strict=True)}
    try:
        for future in as_completed(futures):
            yield *futures[future], future.result()
    finally:
        for future in futures:
            future.cancel()


def _replayed(trace: Trace, policies: list[Policy], options: dict[str, Any]) -> list[Result]:
    """A task: some policies on one trace, a slice at a time."""
    sums: list[list[NDArray[np.float64]]] = [[] for _ in policies]
    last = [0] * len(policies)
    for tables in replay_all(trace, policies, **options):
        for j, table in enumerate(tables):
            sums[j].append(sums_by_prompt(table))
            last[j] += int(table.used_last_rank.sum())
    return [(np.concatenate([np.zeros((0, 4)), *parts]), n) for parts, n in zip(sums, last, strict=True)]


def _table(cells: _Cells, traces: list[Trace], series: list[str], policies: list[Policy], **options: Any) -> SweepTable:
    places = [(t, j) for t in range(len(traces)) for j in range(len(policies))]
    tau = tau_table_from_sums(
        [(series[j], policies[j].budget) for _, j in places], [cells[p][0] for p in places], **options
    )
    seen = [limits_of(policies[j], traces[t]) for t, j in places]
    return SweepTable(
        trace=tuple(traces[t].name for t, _ in places),
        label=tuple(policy_name(policies[j]) for _, j in places),
        depth=np.array([depth for depth, _ in seen], np.int64),
        topk=np.array([topk for _, topk in seen], np.int64),
        used_last_rank=np.array([cells[p][1] for p in places], np.int64),
        **{name: getattr(tau, name) for name in (*TauTable.columns, "level")},
    )


def limits_of(policy: Policy, trace: Trace) -> tuple[int, int]:
    """L and K as a policy sees them."""
    depth, topk = trace.manifest.depth, trace.manifest.topk
    while isinstance(policy, Limited):
        depth = depth if policy.depth is None else min(depth, policy.depth)
        topk = topk if policy.topk is None else min(topk, policy.topk)
        policy = policy.policy
    return depth, topk


def _checked(
    traces: Trace | Sequence[Trace], grid: Mapping[str, Sequence[Policy]]
) -> tuple[list[Trace], list[str], list[Policy]]:
    traces = [traces] if isinstance(traces, Trace) else list(traces)
    if not traces:
        raise ValueError("traces must hold one trace or more, got none")
    for i, trace in enumerate(traces):
        if not isinstance(trace, Trace):
            raise TypeError(f"traces[{i}] must be a Trace, as open_trace gives it, got {type(trace).__name__}")
        if trace.name in [other.name for other in traces[:i]]:
            raise ValueError(f"traces[{i}] must have a name of its own, {trace.name!r} is another's too")
        for field in ("vocab_size", "vocabulary", "depth", "topk"):
            ours, first = (getattr(x.manifest, field) for x in (trace, traces[0]))
            if ours != first:
                raise ValueError(
                    f"{trace.name}: {field} of the manifest must be {first!r}, as of {traces[0].name}, got {ours!r}: "
                    "sweep them apart"
                )
    if not isinstance(grid, Mapping):
        raise TypeError(
            f"grid must be a mapping of series to policies, as policy_grid makes it, got {type(grid).__name__}"
        )
    for series, policies in grid.items():
        if not isinstance(policies, Iterable):
            raise TypeError(f"grid[{series!r}] must be a sequence of policies, got {type(policies).__name__}: [policy]")
    pairs = [(series, policy) for series, policies in grid.items() for policy in policies]
    if not pairs:
        raise ValueError("grid must hold one policy or more, got none")
    labels: set[str] = set()
    for series, policy in pairs:
        label = policy_name(policy)
        if label in labels:
            raise ValueError(f"grid[{series!r}] must hold policies with labels of their own, got {label!r} twice")
        labels.add(label)
        inner: Any = policy
        while isinstance(inner, Limited):
            for name in ("depth", "topk"):
                limit, recorded = getattr(inner, name), getattr(traces[0].manifest, name)
                if limit is not None and limit > recorded:
                    raise ValueError(
                        f"{name} of policy {label} must be at most {recorded}, what {traces[0].name} has, got {limit}: "
                        "record more of the drafts"
                    )
            inner = inner.policy
    return traces, [series for series, _ in pairs], [policy for _, policy in pairs]


def fingerprint(value: Any, name: str = "value") -> str:
    """A digest of plain values, arrays, dataclasses of them, and labelled policies; ``name`` is for messages.

    Raises
    ------
    TypeError
        Something else, or a policy without a label, which could be another one under the same name: its place is named.
    """
    digest = hashlib.sha256()

    def add(part: Any, place: str) -> None:
        if isinstance(part, np.ndarray) and not part.dtype.hasobject:
            digest.update(f"array {part.dtype} {part.shape} ".encode() + np.ascontiguousarray(part).tobytes())
        elif isinstance(part, tuple | list):
            digest.update(f"{len(part)} of ".encode())
            for i, each in enumerate(part):
                add(each, f"{place}[{i}]")
        elif is_dataclass(part) and not isinstance(part, type):
            digest.update(f"{type(part).__qualname__} ".encode())
            for f in fields(part):
                if f.compare or f.init:  # the others follow from these
                    add(f.name, f.name)
                    add(getattr(part, f.name), f"{place}.{f.name}")
        elif part is None or isinstance(part, str | bytes | int | float | np.generic):
            digest.update(f"{type(part).__name__} {part!r} ".encode())
        elif callable(part) and hasattr(part, "budget"):
            if not getattr(part, "label", None):
                raise TypeError(
                    f"{place} must have a label to be kept in a folder, where another policy of the same name could be "
                    "taken for it: set one that says all that it does, as in policy.label = 'tempered, 0.8', or leave "
                    "out folder"
                )
            digest.update(f"{type(part).__qualname__} {part.label!r} {part.budget} ".encode())
        else:
            raise TypeError(
                f"{place} must be numbers, text, arrays, or tuples or dataclasses of them, to be kept in a folder, "
                f"got {type(part).__name__}: hold it as such, or leave out folder"
            )

    add(value, name)
    return digest.hexdigest()[:32]
