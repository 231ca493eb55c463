"""``ddtree report``: a saved run as one HTML page."""

from __future__ import annotations

from pathlib import Path

import click

from ddtree.cli.check import keep_inputs

__all__ = ["report"]


class _CannotReport(click.ClickException):
    exit_code = 2


@click.command()
@click.argument("run", type=click.Path(path_type=Path))
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path),
    default=Path("report.html"),
    show_default=True,
    metavar="FILE",
    help="The page; it is replaced if it exists.",
)
@click.option("--title", default="", help="Its heading; by default the name of the run.")
def report(run: Path, output: Path, title: str) -> None:
    """Write a page that shows the rounds of RUN, one by one.

    RUN is a file that ddtree generate --save wrote. The page is one file, and needs neither a network nor a library:
    the tree of every round with the path that was accepted, the text as it grows, and how much was accepted.
    """
    from ddtree.analysis.report import write_report
    from ddtree.analysis.runs import load_run

    try:
        keep_inputs([run], [output])
        loaded = load_run(run)
        write_report(output, loaded, title=title or click.format_filename(run.stem))
    except ValueError as error:
        raise _CannotReport(str(error)) from error
    except OSError as error:
        raise _CannotReport(f"{error.filename or output}: {error.strerror or error}") from error
    size = output.stat().st_size
    shown = f"{size / 1e6:.1f} MB" if size >= 1e6 else f"{size / 1e3:.0f} kB"
    click.echo(f"{output}: {loaded.generation.num_rounds:,} rounds, {shown}")
