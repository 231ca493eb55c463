"""The ``ddtree`` command."""

from __future__ import annotations

import errno
import sys
from typing import Any

import click

from ddtree import BackendUnavailable, __version__
from ddtree.cli.bench import bench
from ddtree.cli.check import check
from ddtree.cli.demo import demo
from ddtree.cli.generate import generate
from ddtree.cli.info import info
from ddtree.cli.kdtr import kdtr
from ddtree.cli.pay import pay
from ddtree.cli.plot import plot
from ddtree.cli.record import record
from ddtree.cli.replay import replay
from ddtree.cli.report import report
from ddtree.cli.sweep import sweep
from ddtree.kdtr import KdtrError

__all__ = ["main"]


class _Group(click.Group):
    """Says what a user can mend in one line, without a traceback."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except (BackendUnavailable, KdtrError) as error:
            raise click.ClickException(str(error)) from error
        except MemoryError as error:
            raise click.ClickException(f"this does not fit in memory, ask for less: {error}") from error
        except OSError as error:
            if error.errno == errno.EPIPE:  # the reader has gone: click ends quietly
                raise
            where = f"{error.filename}: " if error.filename else ""
            raise click.ClickException(f"{where}{error.strerror or error}") from error


@click.group(cls=_Group, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="ddtree")
def main() -> None:
    """Tree-structured speculative decoding: references, kernels held equal to them, an engine, and its analysis."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")  # τ on a terminal that has none is no reason to stop


for command in (bench, check, demo, generate, info, kdtr, pay, plot, record, replay, report, sweep):
    main.add_command(command)
