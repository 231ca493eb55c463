"""Acceptance of a pair on its held-out prompts, by the engine itself: chain, draft trees by budget, and prompt lookup.

    python -m ddtree.analysis.training.evaluate --out evaluation.json

Every prompt is continued by 72 tokens, greedily and sampled at temperature 0.7, under every way of drafting. τ is given
twice: of the first 64 tokens under the engine's own limit, which cuts the last round, and of all rounds whose root is
one of the first 64 tokens, none of which is cut (a round emits at most 8). Results are written after each way, and a
second run goes on where the first was stopped.
"""

from __future__ import annotations

import argparse
import json
import os
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import track
from rich.table import Table

from ddtree.analysis.loops import ends_in_loop
from ddtree.analysis.rounds import RoundTable, round_table
from ddtree.drafters import NgramDrafter
from ddtree.engine import Engine
from ddtree.kdtr import atomic_write
from ddtree.pair import PROMPTS, Pair, load_pair, load_prompts, pair_folder

TOKENS, TEMPERATURES, BUDGETS = 64, (0.0, 0.7), (8, 16, 32, 64, 128, 256)
PROMPTS_TOGETHER = 32
RESAMPLES, LEVEL = 10_000, 0.95


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description="Measure a pair's acceptance on its held-out prompts.")
    parser.add_argument("--pair", type=Path, help="folder of the pair; the installed one if left out")
    parser.add_argument("--prompts", type=int, help="so many of the prompts, to try it out")
    parser.add_argument("--out", type=Path, required=True, help="JSON file of the results")
    arguments = parser.parse_args()
    pair = load_pair(arguments.pair)
    prompts = load_prompts((arguments.pair or pair_folder()) / PROMPTS).tokens[: arguments.prompts]
    results = json.loads(arguments.out.read_text()) if arguments.out.exists() else {}
    for temperature in TEMPERATURES:
        for way, make in ways(pair).items():
            name = f"{way}, T = {temperature:g}"
            if name not in results:
                results[name] = measure(make(), way, prompts, temperature, name)
                with atomic_write(arguments.out) as file:
                    file.write((json.dumps(results, indent=1) + "\n").encode())
    Console().print(table_of(results))


def ways(pair: Pair) -> dict[str, Callable[[], Engine]]:
    """The ways of drafting, by name."""
    depth = pair.drafter.config.block_size - 1
    trees = {
        f"DDTree {budget}": lambda budget=budget: Engine(pair.target, pair.drafter, depth=depth, budget=budget)
        for budget in BUDGETS
    }
    return {
        "prompt lookup": lambda: Engine(pair.target, NgramDrafter(max_ngram=16), depth=depth, budget=depth),
        "chain": lambda: Engine(pair.target, pair.drafter, depth=depth, budget=depth),
        **trees,
    }


def measure(
    engine: Engine, way: str, prompts: list[NDArray[np.int32]], temperature: float, name: str
) -> dict[str, Any]:
    """Continue all prompts in one way."""
    mode = "tree" if way.startswith("DDTree") else "chain"
    tokens: list[NDArray[np.int32]] = []
    sums = []  # a prompt's tokens and rounds, under the limit and uncut
    begun = time.perf_counter()
    starts = range(0, len(prompts), PROMPTS_TOGETHER)
    for start in track(starts, name, console=Console(stderr=True), disable=not os.isatty(2)):
        some = prompts[start : start + PROMPTS_TOGETHER]
        generation = engine.generate(
            some,
            TOKENS + engine.depth + 1,
            temperature=temperature,
            mode=mode,  # type: ignore[arg-type]
            request_ids=range(start, start + len(some)),
        )
        tokens += generation.tokens
        sums.append(per_prompt(round_table(generation), len(some)))
    limited_tokens, limited_rounds, uncut_tokens, uncut_rounds = np.concatenate(sums, axis=1)
    return {
        "prompts": len(prompts),
        "rounds": int(limited_rounds.sum()),
        "tau": interval(limited_tokens, limited_rounds),
        "tau_uncut": interval(uncut_tokens, uncut_rounds),
        "looping": float(np.mean([ends_in_loop(row[:TOKENS]) for row in tokens])),
        "tau_not_looping": not_looping(limited_tokens, limited_rounds, tokens),
        "continuations": [zlib.crc32(row.tobytes()) for row in tokens],
        "seconds": time.perf_counter() - begun,
    }


def per_prompt(table: RoundTable, count: int) -> NDArray[np.float64]:
    """Tokens and rounds of each prompt, (4, count): within ``TOKENS`` tokens, and of uncut rounds."""
    left = TOKENS - 1 - table.position
    limited = np.minimum(table.tokens, left)
    uncut = np.where(table.position < TOKENS, table.tokens, 0)
    columns = (np.maximum(limited, 0), limited > 0, uncut, uncut > 0)
    return np.stack([np.bincount(table.prompt, column, minlength=count) for column in columns])


def interval(tokens: NDArray[Any], rounds: NDArray[Any]) -> list[float]:
    """τ over all rounds, and the ends of its bootstrap interval, in which prompts, not rounds, are drawn again."""
    drawn = np.random.default_rng(0).integers(0, len(tokens), (RESAMPLES, len(tokens)))
    taus = tokens[drawn].sum(1) / rounds[drawn].sum(1)
    low, high = np.quantile(taus, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return [float(tokens.sum() / rounds.sum()), float(low), float(high)]


def not_looping(tokens: NDArray[Any], rounds: NDArray[Any], continuations: list[NDArray[np.int32]]) -> float | None:
    """τ of the prompts whose continuation does not loop."""
    which = np.array([not ends_in_loop(row[:TOKENS]) for row in continuations])
    return float(tokens[which].sum() / rounds[which].sum()) if which.any() else None


def table_of(results: dict[str, Any]) -> Table:
    """All ways, greedy and sampled side by side."""
    header, *rows = cells_of(results)
    table = Table(title=f"tokens a round in the first {TOKENS} new tokens", caption=note_of(results))
    for i, column in enumerate(header):
        table.add_column(column, justify="right" if i else "left")
    for row in rows:
        table.add_row(*row)
    return table


def markdown_of(results: dict[str, Any]) -> str:
    """The same as Markdown, for a model card."""
    header, *rows = cells_of(results)
    rule = ["---", *["--:"] * (len(header) - 1)]
    return "\n".join(f"| {' | '.join(row)} |" for row in (header, rule, *rows)) + f"\n\n{note_of(results)}"


def cells_of(results: dict[str, Any]) -> list[list[str]]:
    """The table's cells, header first: for each temperature τ with its interval, of what does not loop, and uncut."""
    header = [""]
    for temperature in TEMPERATURES:
        header += ["greedy" if temperature == 0 else f"T = {temperature:g}", "not looping", "uncut"]
    rows = [header]
    for way in dict.fromkeys(name.partition(",")[0] for name in results):
        cells = [way]
        for temperature in TEMPERATURES:
            row = results[f"{way}, T = {temperature:g}"]
            cells.append(f"{row['tau'][0]:.2f} ({row['tau'][1]:.2f} to {row['tau'][2]:.2f})")
            cells.append("" if row["tau_not_looping"] is None else f"{row['tau_not_looping']:.2f}")
            cells.append(f"{row['tau_uncut'][0]:.2f}")
        rows.append(cells)
    return rows


def note_of(results: dict[str, Any]) -> str:
    """How many prompts, how many continuations loop, and whether the ways agree on the tokens."""
    notes = []
    for temperature in TEMPERATURES:
        rows = [row for name, row in results.items() if name.endswith(f"T = {temperature:g}")]
        first = rows[0]["continuations"]
        differ = sum(a != b for row in rows for a, b in zip(row["continuations"], first, strict=True))
        what = "greedily" if temperature == 0 else f"at T = {temperature:g}"
        same = "the same" if differ == 0 else f"the same but for {differ} of {len(rows) * len(first)} continuations"
        notes.append(
            f"{rows[0]['prompts']} prompts {what}: {100 * rows[0]['looping']:.0f} % of continuations end in a loop; "
            f"tokens in all {len(rows)} ways are {same}."
        )
    return " ".join(notes)


if __name__ == "__main__":
    main()
