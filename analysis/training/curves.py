"""The loss curves of a pair, from the records that its training left.

python -m ddtree.analysis.training.curves --pair ddtree/pairs/python-5m
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ddtree.analysis.figures.style import BLUE, GREY, INK, save

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def main() -> None:
    """Run the command."""
    from matplotlib.figure import Figure

    parser = argparse.ArgumentParser(description="Draw the loss curves of a pair.")
    parser.add_argument("--pair", type=Path, required=True, help="folder with target.json and drafter.json")
    parser.add_argument("--out", type=Path, help="PNG or SVG; curves.svg in that folder if left out")
    arguments = parser.parse_args()
    figure = Figure(figsize=(9.0, 3.6), layout="constrained")
    left, right = figure.subplots(1, 2)
    plot_target(json.loads((arguments.pair / "target.json").read_text()), left)
    plot_drafter(json.loads((arguments.pair / "drafter.json").read_text()), right)
    save(figure, arguments.out or arguments.pair / "curves.svg")


def plot_target(record: dict[str, Any], ax: Axes) -> None:
    """Draw the target's training loss, and where it ended on the held-out files."""
    steps, losses = (np.array([row[key] for row in record["curve"]]) for key in ("step", "loss"))
    held_out = record["held_out"]["nats_per_token"]
    ax.plot(steps / 1000, losses, color=BLUE, marker="o", markersize=3.5)
    ax.axhline(held_out, color=INK, linestyle="--", linewidth=1)
    ax.annotate(
        f"held-out files, at the end: {held_out:.2f}", (steps[-1] / 1000, held_out), (0, 4), ha="right", **_WORDS
    )
    ax.annotate(f"{losses[-1]:.2f}", (steps[-1] / 1000, losses[-1]), (0, -12), ha="right", **_WORDS)
    ax.set_ylim(1.2, 2.4)
    above = [f"{loss:.2f}" for loss in losses if loss > 2.4]
    if above:
        ax.annotate(
            f"first {steps[0]:,} steps: {above[0]}", (0.1, 0.95), xycoords="axes fraction", fontsize=8, color=INK
        )
    ax.set_ylabel("loss (nats a token)")
    ax.set_title("target: training loss, means of 500 steps", loc="left", fontsize=10)
    _finish(ax)


def plot_drafter(record: dict[str, Any], ax: Axes) -> None:
    """Draw the share of right first guesses at each depth, whatever was guessed at the depths before."""
    from matplotlib import colormaps

    steps = np.array([row["step"] for row in record["curve"]])
    top1 = np.array([row["top1"] for row in record["curve"]])
    shades = colormaps["viridis"](np.linspace(0.0, 0.8, top1.shape[1]))
    for depth, (shares, shade) in enumerate(zip(top1.T, shades, strict=True), start=1):
        ax.plot(steps / 1000, shares, color=shade, linewidth=1.4)
        label = f"depth {depth}: {shares[-1]:.2f}"
        ax.annotate(label, (steps[-1] / 1000, shares[-1]), (5, 0), va="center", **_WORDS)
    ax.set_ylim(0, 1)
    ax.set_xlim(0, steps[-1] / 1000 * 1.28)
    ax.set_xticks([tick for tick in ax.get_xticks() if tick <= steps[-1] / 1000])
    ax.set_ylabel("share of right first guesses")
    ax.set_title("drafter: by depth, means of 500 steps", loc="left", fontsize=10)
    _finish(ax)


_WORDS: dict[str, Any] = {"textcoords": "offset points", "fontsize": 8, "color": INK}


def _finish(ax: Axes) -> None:
    ax.set_xlabel("thousand steps")
    ax.spines[["top", "right"]].set_visible(False)
    ax.grid(axis="y", color=GREY, alpha=0.25, linewidth=0.8)
    ax.set_axisbelow(True)


if __name__ == "__main__":
    main()
