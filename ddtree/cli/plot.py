"""``ddtree plot``: figures and tables of what others have run."""

from __future__ import annotations

import codecs
import csv
import io
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import click

from ddtree.cli.check import keep_inputs

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from ddtree.analysis.server_logs import ServerLog

_FILES = (".png", ".svg", ".csv", ".json")
_PANELS = {"tau_over_time": "plot_tau_over_time", "by_position": "plot_positions", "by_running": "plot_running"}


class _CannotPlot(click.ClickException):
    exit_code = 2


@click.command()
@click.argument("inputs", nargs=-1, required=True, metavar="INPUT...")
@click.option(
    "-o",
    "--output",
    "outputs",
    type=click.Path(path_type=Path),
    multiple=True,
    metavar="PATH",
    help="A file, if it ends in .png, .svg, .csv or .json; else a folder for everything. May be given again.",
)
@click.option(
    "--format",
    "kind",
    type=click.Choice(["png", "svg"]),
    default="png",
    show_default=True,
    help="Of the figures in a folder.",
)
@click.option(
    "--draft-length",
    type=click.IntRange(1, 10**6),
    help="Tokens drafted a round, for lines that do not say their rounds (vLLM's and llama.cpp's first forms) in a log "
    "that does not show the engine's configuration, or how many tokens a request gave.",
)
def plot(inputs: tuple[str, ...], outputs: tuple[Path, ...], kind: str, draft_length: int | None) -> None:
    """Read acceptance out of server logs, or of sweeps, and plot it.

    INPUT is a log of vLLM, SGLang or llama.cpp, of any size, or - for a pipe. It may hold the periodic lines, or
    Prometheus counters scraped again and again. Several logs are compared. Or it is the folder of a `ddtree sweep`.

    \b
      ddtree plot server.log -o figures/
      ddtree plot sweep/ -o figures/
      docker logs vllm 2>&1 | ddtree plot -
      while sleep 10; do curl -s localhost:8000/metrics; done | ddtree plot -

    τ is the mean of tokens emitted a round by one request, the bonus included, over the rounds that the server counts,
    and each window weighs as many as its rounds. Exits with 2 if nothing in a log is recognised, or an output cannot be
    written.
    """  # noqa: D301 - click takes the backspace for "do not wrap"
    kinds = {_kind_of(name) for name in inputs}
    if len(kinds) > 1:
        raise _CannotPlot(
            f"inputs must be of one kind, got {' and '.join(sorted(kinds))}: plot them one after the other"
        )
    (which,) = kinds
    if which not in _PLOTS:
        raise _CannotPlot(f"{inputs[0]} is a {which}, must be {' or '.join(_PLOTS)}")
    keep_inputs(inputs, outputs)
    with _writable(outputs):
        _PLOTS[which](inputs, outputs, kind, draft_length)


def _kind_of(name: str) -> str:
    """What an input is, by what it is and not by its name."""
    if name == "-":
        return "log"
    path = Path(name)
    if (path / "sweep.json").is_file():
        return "sweep"
    if path.is_dir():
        raise _CannotPlot(f"{name} is a folder without sweep.json: name the logs in it")
    if not path.exists():
        raise _CannotPlot(f"{name}: No such file")
    return "log"


def _is_file(output: Path) -> bool:
    """Whether an output is a file: by how it ends, unless there is such a folder."""
    return output.suffix.lower() in _FILES and not output.is_dir()


@contextmanager
def _writable(outputs: tuple[Path, ...]) -> Iterator[None]:
    """See that outputs can be written before any work is done, and say it in one line where they cannot."""
    from ddtree.analysis.outputs import make_folder

    for path in outputs:
        make_folder(path.parent if _is_file(path) else path)
    try:
        yield
    except OSError as error:
        raise _CannotPlot(f"{error.filename or 'an output'}: {error.strerror or error}") from error


def _plot_logs(inputs: tuple[str, ...], outputs: tuple[Path, ...], kind: str, draft_length: int | None) -> None:
    from rich.console import Console

    from ddtree.analysis.figures.server_logs import nothing_to_draw

    log = _read(inputs, draft_length)
    for name, counts in zip(inputs, log.files, strict=True):
        if not counts.bytes:
            raise _CannotPlot(f"{counts.name} is empty")
        if not counts.recognised:
            raise _CannotPlot(
                f"{counts.name}: no line of {counts.lines:,} is one of vLLM, SGLang or llama.cpp about speculative "
                f"decoding"
                + (f", and {counts.damaged:,} begin like one but are damaged" if counts.damaged else "")
                + _encoding_hint(name)
            )
    missing = nothing_to_draw(log)
    for path in outputs:
        if _is_file(path) and path.suffix.lower() in (".png", ".svg") and len(missing) == len(_PANELS):
            raise _CannotPlot(f"{path}: there is nothing to draw, {'; '.join(missing.values())}")
    written = [name for path in outputs for name in _write_log(log, path, kind)]

    console = Console(highlight=False)
    _show(console, log)
    if written:
        console.print(f"Written: {', '.join(written)}", markup=False, soft_wrap=True)
    if not all(map(_is_file, outputs)):
        for name, reason in missing.items():
            console.print(f"Not drawn: {name}.{kind}, as {reason}", markup=False)


def _encoding_hint(name: str) -> str:
    """What to do with a file that begins as UTF-16 does, such as one that PowerShell's > wrote."""
    if not Path(name).is_file():
        return ""
    with open(name, "rb") as file:
        wide = file.read(2) in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
    return "; it is UTF-16, and must be UTF-8: convert it, as by iconv -f UTF-16 -t UTF-8" if wide else ""


def _plot_sweeps(inputs: tuple[str, ...], outputs: tuple[Path, ...], kind: str, draft_length: int | None) -> None:
    from rich.console import Console

    from ddtree.analysis.figures import plot_sweep
    from ddtree.analysis.figures.sweep import sweep_tables

    for path in outputs:
        if _is_file(path):
            raise _CannotPlot(f"{path} must be a folder: the figures of a sweep are several files")
    console, written = Console(highlight=False), []
    for name in inputs:
        try:
            tables = sweep_tables(name)
            for path in outputs:
                written += plot_sweep(name, path / Path(name).resolve().name if len(inputs) > 1 else path, kind=kind)
        except ValueError as error:
            raise _CannotPlot(str(error)) from error
        for trace, table in tables.items():
            console.print(f"{name}{f', {trace}' if trace else ''}\n{table}", markup=False, soft_wrap=True)
    if written:
        console.print(f"Written: {', '.join(map(str, written))}", markup=False, soft_wrap=True)


_PLOTS: dict[str, Callable[[tuple[str, ...], tuple[Path, ...], str, int | None], None]] = {
    "log": _plot_logs,
    "sweep": _plot_sweeps,
}


def _read(inputs: tuple[str, ...], draft_length: int | None) -> ServerLog:
    """Read the inputs one after the other, with a bar where somebody looks."""
    from rich.console import Console
    from rich.markup import escape
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    from ddtree.analysis.server_logs import read_server_logs

    console = Console(stderr=True)
    columns = TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn()
    with Progress(
        *columns, TimeRemainingColumn(), console=console, transient=True, disable=not console.is_terminal
    ) as progress:
        task = progress.add_task("reading")

        def opened() -> Iterator[tuple[str, BinaryIO]]:
            for name in inputs:
                size = Path(name).stat().st_size if name != "-" and Path(name).is_file() else None
                progress.reset(task, total=size, description=escape(name))
                if name == "-":
                    yield "standard input", sys.stdin.buffer
                else:
                    with open(name, "rb") as file:
                        yield click.format_filename(name), file

        return read_server_logs(
            opened(), draft_length=draft_length, on_bytes=lambda count: progress.advance(task, count)
        )


def _write_log(log: ServerLog, path: Path, kind: str) -> list[str]:
    """Write a file, or everything into a folder, each whole or not at all; return the names."""
    from ddtree.analysis import figures
    from ddtree.analysis.figures.server_logs import nothing_to_draw
    from ddtree.kdtr import atomic_write

    suffix = path.suffix.lower() if _is_file(path) else ""
    if suffix in (".png", ".svg"):
        return [str(figures.save(figures.plot_server_log(log), path))]
    if suffix == ".csv":
        with atomic_write(path) as file:
            file.write(_csv(log.windows.records()))
        return [str(path)]
    if suffix == ".json":
        with atomic_write(path) as file:
            file.write(json.dumps(_document(log), indent=1, ensure_ascii=False, allow_nan=False).encode() + b"\n")
        return [str(path)]
    missing = nothing_to_draw(log)
    drawn: dict[str, Any] = {name: getattr(figures, plot)(log) for name, plot in _PANELS.items() if name not in missing}
    if drawn:
        drawn["overview"] = figures.plot_server_log(log)
    names = [str(figures.save(figure, path / f"{name}.{kind}")) for name, figure in drawn.items()]
    return [*names, *_write_log(log, path / "windows.csv", kind), *_write_log(log, path / "summary.json", kind)]


def _csv(records: list[dict[str, Any]]) -> bytes:
    text = io.StringIO()
    writer = csv.DictWriter(text, list(records[0]) if records else [], lineterminator="\n")
    writer.writeheader()
    writer.writerows(records)
    return text.getvalue().encode()


def _document(log: ServerLog) -> dict[str, Any]:
    """All tables, as JSON has them."""
    from ddtree.analysis.server_logs import SOURCES

    return {
        "files": [counts._asdict() | {"unknown": counts.unknown} for counts in log.files],
        "sources": log.sources.records(),
        "positions": log.positions.records(),
        "by_running": log.by_running.records(),
        "alerts": [alert._asdict() | {"source": SOURCES[alert.source]} for alert in log.alerts],
        "num_alerts": log.num_alerts,
        "windows": log.windows.records(),
    }


def _show(console: Console, log: ServerLog) -> None:
    """What was found, on the terminal."""
    console.print(_source_table(log))
    if len(log.positions):
        console.print(_position_table(log))
    if len(log.by_running):
        console.print(_running_table(log))
    for counts in log.files:
        console.print(
            f"{counts.name}: {counts.lines:,} lines, {counts.recognised:,} with figures, {counts.damaged:,} damaged, "
            f"{counts.unknown:,} about other things",
            markup=False,
        )
    for line in _notes(log):
        console.print(line, markup=False)
    for line in _warnings(log):
        console.print(line, style="bold yellow", markup=False)


def _table(title: str, *columns: str) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, title=title, title_justify="left")
    for i, column in enumerate(columns):
        table.add_column(column, justify="right" if i else "left", overflow="fold")
    return table


def _name(log: ServerLog, file: int, source: int) -> str:
    from ddtree.analysis.server_logs import SOURCES

    return SOURCES[source] if len(log.files) == 1 else f"{log.files[file].name}, {SOURCES[source]}"


def _source_table(log: ServerLog) -> Table:
    from rich.text import Text

    table = _table(
        "τ, tokens emitted a round", "source", "windows", "rounds", "accepted\nof drafted", "τ", "10 – 90 %\nof rounds"
    )
    for row, (file, source) in enumerate(zip(log.sources.file, log.sources.source, strict=True)):
        s = log.sources
        rounds = f"{'≈ ' if s.estimated[row] > 0 else ''}{s.rounds[row]:,.0f}" if s.rounds[row] > 0 else "-"
        table.add_row(
            Text(_name(log, file, source)),
            f"{s.windows[row]:,}",
            rounds,
            _or_dash(s.acceptance[row], ".1%"),
            _or_dash(s.tau[row], ".3f"),
            f"{s.low[row]:.2f} – {s.high[row]:.2f}" if s.low[row] == s.low[row] else "-",
        )
    return table


def _position_table(log: ServerLog) -> Table:
    from rich.text import Text

    table = _table("Accepted by position", "source", "position", "rounds", "of all", "of those that\ncame so far")
    p = log.positions
    for row in range(len(p)):
        first = row == 0 or (p.file[row], p.source[row]) != (p.file[row - 1], p.source[row - 1])
        table.add_row(
            Text(_name(log, p.file[row], p.source[row]) if first else ""),
            str(p.position[row]),
            f"{p.rounds[row]:,.0f}",
            f"{p.unconditional[row]:.1%}",
            _or_dash(p.conditional[row], ".1%"),
        )
    return table


def _running_table(log: ServerLog) -> Table:
    from rich.text import Text

    table = _table("τ by the number of requests running", "source", "running", "windows", "rounds", "τ")
    r = log.by_running
    for row in range(len(r)):
        first = row == 0 or (r.file[row], r.source[row]) != (r.file[row - 1], r.source[row - 1])
        low, high = int(r.running[row]), int(r.most_running[row])
        table.add_row(
            Text(_name(log, r.file[row], r.source[row]) if first else ""),
            str(low) if low == high else f"{low} – {high}",
            f"{r.windows[row]:,}",
            f"{r.rounds[row]:,.0f}",
            f"{r.tau[row]:.3f}",
        )
    return table


_ESTIMATED = {
    3: "steps × requests running",
    4: "what is printed: tokens less those accepted, among them rounds without a draft; or the draft length",
}


def _notes(log: ServerLog) -> Iterator[str]:
    """What a reader must know of these figures."""
    s = log.sources
    for row, (file, source) in enumerate(zip(s.file, s.source, strict=True)):
        name = _name(log, file, source)
        rows = (log.windows.file == file) & (log.windows.source == source) & (log.windows.rounds == 0)
        if rows.any():
            hint = " (see --draft-length)" if source in (0, 4) else ""
            yield f"{name}: windows that do not say their rounds and have no τ: {log.windows.lines[rows].sum():,}{hint}"
        if s.estimated[row] > 0:
            how = _ESTIMATED.get(int(source), "what is printed, which is rounded")
            yield f"{name}: {s.estimated[row]:.0%} of the rounds are estimated, from {how}"


def _warnings(log: ServerLog) -> Iterator[str]:
    """One line for each run of windows that is not what it seems; the longest of many."""
    for alert in sorted(log.alerts, key=lambda a: -a.windows)[:8]:
        where = f"{_name(log, alert.file, alert.source)}, lines {alert.first_line:,} to {alert.last_line:,}"
        rounds = f" ({alert.rounds:,.0f} rounds)" if alert.rounds else ""
        if alert.kind == "loop":
            yield f"Warning: {where}: all drafts accepted in {alert.windows:,} windows{rounds}: does the text repeat?"
        else:
            yield f"Warning: {where}: τ is 1 in {alert.windows:,} windows{rounds}: drafting costs and gives nothing"
    more = sum(log.num_alerts.values()) - 8
    if more > 0:
        yield f"Warning: and {more:,} more such stretches"


def _or_dash(value: float, form: str) -> str:
    return format(value, form) if value == value else "-"
