"""All figures of a sweep: from its table, or from the folder that it was written to."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ddtree.analysis.acceptance import TauTable
from ddtree.analysis.figures.acceptance import plot_efficiency, plot_tau_by_budget
from ddtree.analysis.figures.pay import plot_expected_tau
from ddtree.analysis.figures.speed import plot_frontier
from ddtree.analysis.figures.style import save
from ddtree.analysis.tables import Table

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["draw_sweep", "plot_sweep", "sweep_tables"]

SWEEP = "sweep.json"
WHOLE = ("budget", "n_prompts", "n_rounds", "n_tokens")
KINDS: dict[str, Callable[[TauTable], Axes]] = {
    "tau_by_budget": plot_tau_by_budget,
    "frontier": plot_frontier,
    "expected": plot_expected_tau,
    "efficiency": plot_efficiency,
}


def plot_sweep(
    source: Table | str | os.PathLike[str], output: str | os.PathLike[str], *, kind: str = "svg"
) -> list[Path]:
    """Draw every figure of a sweep and write each, whole or not at all.

    Parameters
    ----------
    source : Table or path
        The table of a sweep, its folder, or the ``sweep.json`` in it.
    output : path
        A folder, which is made if it is not there.
    kind : {"svg", "pdf", "png"}
        Of the files.

    Returns
    -------
    list of Path
        What was written: ``tau_by_budget``, ``frontier``, ``expected`` and ``efficiency``, and with several traces
        each of them for every trace, whose name follows.

    Raises
    ------
    ValueError
        A file that is no sweep's, or a table that lacks a column: file and field are named.
    OSError
        A file that cannot be read or written.
    """
    if kind not in ("svg", "pdf", "png"):
        raise ValueError(f"kind must be svg, pdf or png, got {kind!r}")
    drawn = draw_sweep(source)
    folder = Path(output)
    folder.mkdir(parents=True, exist_ok=True)
    return [save(ax, folder / f"{name}.{kind}") for name, ax in drawn.items()]


def draw_sweep(source: Table | str | os.PathLike[str]) -> dict[str, Axes]:
    """Draw every figure of a sweep, by the name that its file has; see :func:`plot_sweep`."""
    tables = sweep_tables(source)
    drawn: dict[str, Axes] = {}
    for trace, table in tables.items():
        for name, plot in KINDS.items():
            ax = plot(table)
            if len(tables) > 1:
                ax.set_title(trace, loc="left", fontsize=8, parse_math=False)
                name = _distinct(f"{name}_{re.sub(r'[^A-Za-z0-9._-]+', '-', trace)}", drawn)
            drawn[name] = ax
    return drawn


def sweep_tables(source: Table | str | os.PathLike[str]) -> dict[str, TauTable]:
    """Return the rows of a sweep, or of what one was written to, as a table a trace, in order.

    Raises
    ------
    ValueError
        As in :func:`plot_sweep`.
    """
    if isinstance(source, Table):
        where, level, rows = "source", float(getattr(source, "level", np.nan)), source.records()
    else:
        path = Path(source)
        path = path / SWEEP if path.is_dir() else path
        where, (level, rows) = str(path), _read(path)
    if not rows:
        raise ValueError(f"{where}: must have a row or more, got none")
    columns = [name for name in TauTable.columns if name != "policy"]
    by_trace: dict[str, list[Mapping[str, Any]]] = {}
    for i, row in enumerate(rows):
        _check_row(where, i, row, columns)
        by_trace.setdefault(str(row.get("trace", "")), []).append(row)
    return {trace: _table(these, columns, level) for trace, these in by_trace.items()}


def _read(path: Path) -> tuple[float, list[Any]]:
    """Level and rows of a sweep's file."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"{path}: must be JSON, got {error}") from error
    if not isinstance(document, dict) or not isinstance(document.get("cells"), list):
        raise ValueError(f"{path}: cells must be a list of rows, as a sweep writes them")
    level = document.get("level")
    if not isinstance(level, float) or not 0 < level < 1:
        raise ValueError(f"{path}: level must be over 0 and below 1, got {level!r}")
    return level, document["cells"]


def _check_row(where: str, i: int, row: Any, columns: list[str]) -> None:
    if not isinstance(row, Mapping):
        raise ValueError(f"{where}: cells[{i}] must be a row, got {row!r}")
    if not isinstance(row.get("policy"), str):
        raise ValueError(f"{where}: policy of cells[{i}] must be a name, got {row.get('policy')!r}")
    for name in columns:
        value, whole = row.get(name), name in WHOLE
        good = isinstance(value, int) if whole else isinstance(value, (int, float)) or (value is None and name in row)
        if not good or isinstance(value, bool) or (whole and (value or 0) < 0):
            wanted = "a whole number from 0" if whole else "a number or null"
            raise ValueError(f"{where}: {name} of cells[{i}] must be {wanted}, got {row.get(name, 'nothing')!r}")


def _table(rows: list[Mapping[str, Any]], columns: list[str], level: float) -> TauTable:
    values: dict[str, Any] = {
        name: np.array([row[name] for row in rows], np.int64 if name in WHOLE else np.float64)  # None is NaN
        for name in columns
    }
    return TauTable(policy=tuple(row["policy"] for row in rows), **values, level=level)


def _distinct(name: str, taken: Mapping[str, Any]) -> str:
    """The name, with a number where another trace's came out the same."""
    number = 2
    distinct = name
    while distinct in taken:
        distinct, number = f"{name}-{number}", number + 1
    return distinct
