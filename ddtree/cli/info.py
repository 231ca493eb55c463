"""``ddtree info``: what is installed, which devices there are, and which backend serves which operation."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from ddtree.analysis.environment import BackendState


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print it as JSON.")
def info(as_json: bool) -> None:
    """Show versions, devices, and who serves which operation."""
    from ddtree.analysis.environment import backend_states, devices, gpu_timings, gpu_verification, how_to_get, versions
    from ddtree.backends import DEFAULT_ORDER

    states = backend_states()
    if as_json:
        document = {
            "versions": versions(),
            "devices": devices(),
            "backends": {state.name: asdict(state) for state in states},
            "default_order": DEFAULT_ORDER,
        }
        click.echo(json.dumps(document, indent=2, ensure_ascii=False))
        return

    from rich.console import Console

    console = Console(highlight=False)
    installed = versions()
    _section(console, "installed", [", ".join(f"{name} {version}" for name, version in installed.items() if version)])
    _section(console, "missing", [f"{m}: {how_to_get(m)}" for m, version in installed.items() if not version])
    _section(console, "devices", devices())
    console.print(_operations(states))
    able = {state.name for state in states if state.ops}
    orders = [
        f"{', '.join(b for b in order if b in able) or 'nothing yet'} for arrays on {kind}"
        for kind, order in DEFAULT_ORDER.items()
    ]
    _section(console, "default", ["serves calls without backend=: the first that has the operation, of", *orders])
    _section(console, "other", ["serves calls that name it: backend=…"])
    _section(console, "not here", [s.reason for s in states if s.reason])
    _section(console, "on a GPU", [*(seen for s in states if (seen := gpu_verification(s.name))), *gpu_timings()])


def _section(console: Console, name: str, lines: Iterable[str]) -> None:
    """A name, and lines beside it; nothing where there are none."""
    for i, line in enumerate(lines):
        # a command must stay in one piece
        console.print(f"{'' if i else name:9} {line}", markup=False, soft_wrap=True)


def _operations(states: tuple[BackendState, ...]) -> Table:
    """A row an operation, a column a backend."""
    from rich import box
    from rich.table import Table

    from ddtree.backends import DEFAULT_ORDER
    from ddtree.protocols import OPS

    has = {state.name: state.ops for state in states}
    first = {(next((b for b in order if op in has[b]), None), op) for order in DEFAULT_ORDER.values() for op in OPS}
    table = Table(box=box.SIMPLE_HEAD)
    table.add_column("operation", no_wrap=True)
    for state in states:
        table.add_column(state.name + ("\n(not here)" if state.reason else ""), no_wrap=True)
    for op in OPS:
        cells = ("-" if op not in s.ops else "default" if (s.name, op) in first else "other" for s in states)
        table.add_row(op, *cells)
    return table
