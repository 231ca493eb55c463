"""The page's charts: SVG text drawn from tables, coloured by the page's style, so that they do in light and dark."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ddtree.analysis.acceptance import AcceptanceTable

__all__ = ["chart_of_depths", "chart_of_lengths"]

WIDTH, HEIGHT = 360, 190
LEFT, RIGHT, TOP, BOTTOM = 40, 8, 18, 40
MOST_BARS = 24


def chart_of_lengths(lengths: NDArray[np.int64]) -> str:
    """Draw how often a round emitted 1, 2, … tokens."""
    if not len(lengths):
        return _nothing("Tokens a round")
    counts = np.bincount(lengths)[1:]
    step = -(-len(counts) // MOST_BARS)  # bars of several lengths, where there are many
    bars = np.add.reduceat(counts, np.arange(0, len(counts), step)) / len(lengths)
    names = [str(i + 1) if step == 1 else f"{i + 1}–{min(i + step, len(counts))}" for i in range(0, len(counts), step)]
    top = float(bars.max())
    described = ", ".join(f"{name}: {_percent(share)}" for name, share in zip(names, bars.tolist(), strict=True))
    slot = (WIDTH - LEFT - RIGHT) / len(bars)
    drawn = []
    for i, (name, share) in enumerate(zip(names, bars.tolist(), strict=True)):
        x, height = LEFT + (i + 0.12) * slot, (HEIGHT - TOP - BOTTOM) * share / top
        y = HEIGHT - BOTTOM - height
        drawn.append(f'<rect class="bar" x="{x:.1f}" y="{y:.1f}" width="{0.76 * slot:.1f}" height="{height:.1f}"/>')
        middle = x + 0.38 * slot
        if slot >= 26:
            drawn.append(f'<text class="value" x="{middle:.1f}" y="{y - 4:.1f}">{_percent(share)}</text>')
        if i % max(1, int(22 // slot)) == 0:
            drawn.append(f'<text class="tick" x="{middle:.1f}" y="{HEIGHT - BOTTOM + 14}">{name}</text>')
    return _chart("Tokens a round", described, "tokens emitted in a round", "share of rounds", top, "".join(drawn))


def chart_of_depths(table: AcceptanceTable) -> str:
    """Draw the acceptance rate by depth, with its intervals."""
    rows = np.flatnonzero(table.n_offered > 0)
    if not len(rows):
        return _nothing("Acceptance by depth")
    depth, rate, low, high = (column[rows] for column in (table.depth, table.rate, table.low, table.high))
    described = ", ".join(
        f"{d}: {r:.0%} of {n}" for d, r, n in zip(depth, rate, table.n_offered[rows].tolist(), strict=True)
    )
    span = max(int(depth.max() - depth.min()), 1)
    x = LEFT + 14 + (WIDTH - LEFT - RIGHT - 28) * (depth - depth.min()) / span
    y, y_low, y_high = ((HEIGHT - BOTTOM) - (HEIGHT - TOP - BOTTOM) * value for value in (rate, low, high))
    path = " ".join(f"{a:.1f},{b:.1f}" for a, b in zip(x, y, strict=True))
    drawn = [f'<polyline class="curve" points="{path}"/>']
    every = -(-len(depth) // 12)
    for i in range(len(depth)):
        drawn.append(f'<path class="whisker" d="M{x[i]:.1f} {y_low[i]:.1f}V{y_high[i]:.1f}"/>')
        drawn.append(f'<circle class="dot" cx="{x[i]:.1f}" cy="{y[i]:.1f}" r="3.5"/>')
        if i % every == 0:
            drawn.append(f'<text class="tick" x="{x[i]:.1f}" y="{HEIGHT - BOTTOM + 14}">{depth[i]}</text>')
    name = f"depth in the tree ({table.level:.0%} intervals)"
    return _chart("Acceptance by depth", described, name, "accepted share", 1.0, "".join(drawn))


def _chart(title: str, described: str, x_name: str, y_name: str, top: float, drawn: str) -> str:
    lines = []
    for share in (0.0, 0.5, 1.0):
        y = HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * share
        lines.append(f'<path class="grid" d="M{LEFT} {y:.1f}H{WIDTH - RIGHT}"/>')
        lines.append(f'<text class="level" x="{LEFT - 5}" y="{y + 4:.1f}">{share * top:.0%}</text>')
    return (
        f'<figure><figcaption>{title}</figcaption><svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
        f'aria-label="{title}, {y_name} by {x_name}: {described}">{"".join(lines)}{drawn}'
        f'<text class="name" x="{(LEFT + WIDTH - RIGHT) / 2}" y="{HEIGHT - 6}">{x_name}</text></svg></figure>'
    )


def _percent(share: float) -> str:
    return f"{share:.0%}" if share == 0 or share >= 0.0095 else f"{share:.1%}"


def _nothing(title: str) -> str:
    return f"<figure><figcaption>{title}</figcaption><p>There was no round to count.</p></figure>"
