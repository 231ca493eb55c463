"""What the decoding benchmark measured, as tables, Markdown, figures, and cost models that policies read."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich import box
from rich.table import Table

from ddtree.analysis import figures
from ddtree.analysis.benchmarks.decoding import DEPTH, Report, Speed, cost_models, median_passes, write_json
from ddtree.analysis.speedup import CostTable, cost_table
from ddtree.kdtr import atomic_write

__all__ = ["Target", "tables_of", "targets", "write_report"]

BESIDE_TRANSFORMERS = {"8 M": 25.0, "0.7 B": 20.0}
TREE_SPEEDUP, BATCH_SPEEDUP, ROUND_US = 5.0, 20.0, 40.0
ROUND_PARTS = {"ddtree": "ddtree, a whole round of an engine", "published loop": "published loop, its work on the host"}
"""What times of a round without a model are of."""


@dataclass(frozen=True)
class Target:
    """Something that was aimed at, and what came out.

    Attributes
    ----------
    what : str
        In words.
    goal, got : float
        A ratio, or microseconds.
    met : bool
        Whether what came out is as good or better.
    """

    what: str
    goal: float
    got: float
    met: bool


def targets(report: Report) -> list[Target]:
    """Compare what was measured with what was aimed at; what was not measured is left out."""
    new, long = report.sizes["new"], report.sizes["long"]
    found: list[Target] = []
    if report.sizes["repeats"] < 2:
        return found  # a look at the program, not at speeds

    def ratio(what: str, goal: float, fast: float | None, slow: float | None) -> None:
        if fast is not None and slow is not None:
            found.append(Target(what, goal, fast / slow, fast / slow >= goal))

    for model, dtype in _subjects(report):
        ours = {n: report.speed(model, dtype, "autoregressive", new=n) for n in (new, long)}
        if model in BESIDE_TRANSFORMERS:
            peer = report.speed(model, dtype, "transformers", new=new)
            what = f"{model}, {dtype}: autoregressive, times transformers' generate"
            ratio(what, BESIDE_TRANSFORMERS[model], ours[new], peer)
        speeds = [s for s in _speeds(report, model, dtype) if s.new_tokens == long]
        alone = next((s.rate_of_rounds for s in speeds if s.section == "autoregressive"), None)
        trees = [s.rate_of_rounds or 0.0 for s in speeds if s.section == "tree"]
        what = f"{model}, {dtype}: rounds of the best DDTree, times autoregressive ones"
        ratio(what, TREE_SPEEDUP, max(trees, default=None), alone)
        batches = {s.batch: s.rate_of_rounds for s in speeds if s.section == "batch"}
        what = f"{model}, {dtype}: rounds of batch 32, times those of batch 1"
        ratio(what, BATCH_SPEEDUP, batches.get(32), batches.get(1))
    # what the host does meanwhile is hidden behind a model, whose pass takes longer
    us = report.round_us.get("of that, its graph alone", report.round_us.get("ddtree"))
    if us is not None:
        found.append(Target("µs of a round without model and drafter, 64 nodes", ROUND_US, us, us <= ROUND_US))
    return found


def tables_of(report: Report) -> list[Table]:
    """What was measured, for a terminal."""
    return [_table(title, header, rows) for title, header, rows in _parts(report)]


def write_report(report: Report, folder: Path) -> list[Path]:
    """Write ``decoding.json``, ``decoding.md``, the figures and the cost models, each whole; return their paths."""
    written = [write_json(report, folder), folder / "decoding.md"]
    with atomic_write(written[1]) as file:
        file.write(page(report).encode())
    for model in dict.fromkeys(s.model for s in report.speeds):
        bars = _bars(report, model)
        alike = {name for _, speeds in bars for name in speeds if not name.endswith("tokens")}
        title = f"{model} parameters, one request, {report.sizes['new']} new tokens or as said"
        ax = figures.plot_decoding(title, bars, peer="transformers", compared=alike)
        written.append(figures.save(ax, folder / f"decoding_{_plain(model)}.svg"))
    for (model, dtype), costs in cost_models(report).items():
        name = f"{_plain(model)}_{dtype}"
        costs.save(folder / f"cost_model_{name}.json")
        fitted = cost_table(costs, costs.nodes.tolist(), costs.contexts.tolist())
        ax = figures.plot_latency(fitted, measured=_measured(report, model, dtype))
        ax.set_title(f"{model}, {dtype}", loc="left")
        written += [folder / f"cost_model_{name}.json", figures.save(ax, folder / f"verify_{name}.svg")]
    return written


def page(report: Report) -> str:
    """The tables in Markdown."""
    machine = report.machine
    sizes = report.sizes
    lines = [
        "# Decoding beside transformers",
        "",
        f"{'; '.join(machine['devices'])}.{_when(machine)} "
        f"Random weights, greedy, prompts of {sizes['prompt']} tokens; medians of {sizes['repeats']} calls, prefill "
        "included but under “of rounds alone”. The oracle knows what comes: its speed-up is the mechanism's, not a "
        "drafter's.",
        "",
        f"Compared with autoregressive tokens: {report.compared:,} requests. {len(report.differences):,} differ, first "
        f"at a tie; {report.unexamined:,} others differ and were not recomputed; {len(report.faults):,} faults.",
        "",
    ]
    for title, header, rows in _parts(report):
        rule = ["---", *["--:"] * (len(header) - 1)]
        lines += [f"## {title}", "", *(f"| {' | '.join(line)} |" for line in [header, rule, *rows]), ""]
    if any(s.tau is not None and s.tau < DEPTH for s in report.speeds if s.section == "tree"):
        lines += [
            "* A tree's τ below 8 is an oracle's that was not told all: in bfloat16 trees part from one-token decoding "
            "at ties, and its continuation is what a few runs of the trees gave."
        ]
    lines += [f"* left out: {line}" for line in report.left_out]
    lines += [f"* fault: {line.splitlines()[0]}" for line in report.faults]
    return "\n".join(lines).rstrip() + "\n"


def _when(machine: dict[str, Any]) -> str:
    """When it was measured, and with which kernels, as far as that is on record."""
    date, sources = (machine.get(key, "") for key in ("date", "sources_sha256"))
    told = [date, sources and f"sources of the kernels {sources[:8]}…"]
    return f" Measured: {', '.join(filter(None, told))}." if any(told) else ""


Part = tuple[str, list[str], list[list[str]]]
"""Of a report: its title, the columns' names and the cells."""


def _parts(report: Report) -> Iterator[Part]:
    aims = [[t.what, _number(t.goal), _number(t.got), "met" if t.met else "missed"] for t in targets(report)]
    if aims:
        yield "What was aimed at", ["", "goal", "measured", ""], aims
    for model, dtype in _subjects(report):
        speeds = _speeds(report, model, dtype)
        if speeds:
            rows = [list(_speed_cells(report, speed)) for speed in speeds]
            header = [
                "",
                "batch",
                "new tokens",
                "tokens/s",
                "× transformers",
                "× autoregressive",
                "of rounds alone",
                "τ",
            ]
            yield f"{model}, {dtype}", header, rows
    if report.round_us:
        cells = [[ROUND_PARTS.get(who, who), f"{us:,.1f}"] for who, us in report.round_us.items()]
        yield "A round without model and drafter, 64 nodes, one request", ["", "µs"], cells
    for p in filter(lambda p: p["nodes"], report.passes):
        nodes, contexts, seconds = median_passes(p)
        counts = np.unique(nodes).tolist()
        by_place = dict(zip(zip(contexts.tolist(), nodes.tolist(), strict=True), seconds.tolist(), strict=True))
        rows = [[f"{c:,}", *(f"{1e6 * by_place[c, n]:,.0f}" for n in counts)] for c in np.unique(contexts).tolist()]
        title = f"Target pass of {p['model']}, {p['dtype']}, by nodes besides the root: µs, {p['how']}"
        yield title, ["context", *map(str, counts)], rows


def _speed_cells(report: Report, speed: Speed) -> Iterator[str]:
    now = speed.tokens_per_second
    yield from (speed.who, str(speed.batch), str(speed.new_tokens), _number(now))
    for who in ("transformers", "autoregressive"):
        other = report.speed(speed.model, speed.dtype, who, new=speed.new_tokens)
        yield "" if other is None or speed.who == who else f"{now / other:,.3g}"
    yield "" if speed.rate_of_rounds is None else _number(speed.rate_of_rounds)
    yield "" if speed.tau is None else f"{speed.tau:.2f}"


def _bars(report: Report, model: str) -> list[tuple[str, dict[str, float]]]:
    """Tokens a second of one request by type; names say how many tokens where they are not as many as the peer's."""

    def name(speed: Speed) -> str:
        return speed.who if speed.new_tokens == report.sizes["new"] else f"{speed.who}, {speed.new_tokens} tokens"

    rows = []
    for dtype in dict.fromkeys(s.dtype for s in report.speeds if s.model == model):
        alone = [s for s in _speeds(report, model, dtype) if s.section != "batch"]
        rows.append((dtype, {name(s): s.tokens_per_second for s in alone}))
    return rows


def _measured(report: Report, model: str, dtype: str) -> CostTable:
    nodes, contexts, seconds = median_passes(
        next(p for p in report.passes if (p["model"], p["dtype"]) == (model, dtype))
    )
    return CostTable(contexts, nodes, seconds)


def _subjects(report: Report) -> list[tuple[str, str]]:
    return list(dict.fromkeys((s.model, s.dtype) for s in report.speeds))


def _speeds(report: Report, model: str, dtype: str) -> list[Speed]:
    return [s for s in report.speeds if (s.model, s.dtype) == (model, dtype)]


def _table(title: str, header: list[str], rows: list[list[str]]) -> Table:
    table = Table(title=f"[bold]{title}", title_justify="left", box=box.SIMPLE_HEAD)
    for i, name in enumerate(header):
        table.add_column(name, justify="right" if i else "left")
    for row in rows:
        table.add_row(*row)
    return table


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _plain(name: str) -> str:
    return name.lower().replace(" ", "").replace(".", "_")
