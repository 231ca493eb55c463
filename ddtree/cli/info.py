"""``ddtree info``: what is installed, which devices there are, and which backend serves which operation."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from rich.table import Table

    from ddtree.analysis.environment import BackendState


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print it as JSON.")
def info(as_json: bool) -> None:
    """Show versions, devices, and which backend serves which operation."""
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
    console.print(", ".join(f"{name} {version}" for name, version in installed.items() if version))
    missing = [name for name, version in installed.items() if not version]
    console.print(f"not installed: {', '.join(missing) or 'nothing'}")
    console.print(*devices(), sep="\n", markup=False, soft_wrap=True)
    console.print(_operations(states))
    console.print("default  serves calls without backend=: the first that has the operation, of")
    able = {state.name for state in states if state.ops}
    for kind, order in DEFAULT_ORDER.items():
        console.print(f"         {', '.join(b for b in order if b in able) or 'nothing yet'} for arrays on {kind}")
    console.print("other    serves calls that name it: backend=…")
    console.print()
    verified = [seen for state in states if (seen := gpu_verification(state.name))]
    for line in [
        *verified,
        *gpu_timings(),
        *(s.reason for s in states if s.reason),
        *(f"to get {m}: {how_to_get(m)}" for m in missing),
    ]:
        console.print(line, markup=False, soft_wrap=True)  # a command must stay in one piece


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
