"""Acceptance figures out of the logs of serving engines, as tidy tables. NumPy alone.

What is recognised, and what each figure means, stands in :mod:`ddtree.analysis.server_logs.formats`. Windows are added
up as they are read, so that memory does not grow with a log.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any, BinaryIO, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ddtree.analysis.server_logs.formats import SOURCES, FileCounts, FileReader, Floats, Rows, blocks

__all__ = [
    "SOURCES",
    "Alert",
    "FileCounts",
    "PositionTable",
    "RunningTable",
    "ServerLog",
    "SourceTable",
    "WindowTable",
    "read_server_logs",
]

BLOCK = 1 << 22  # bytes read at a time
MOST_WINDOWS = 1 << 14  # rows kept; beyond twice that, neighbours are added up
HIGHEST_TAU = 100_001  # hundredths above 1 that are told apart
MOST_ALERTS = 100
SHORTEST_RUN = 3  # windows in a row that make an alert
FEWEST_ROUNDS = 30  # in them, where they are known
ALL_ACCEPTED = 0.99
NEARLY_ONE = 1.05
EXACT_RUNNING = 64  # numbers running up to here have a row each, beyond it powers of two


class _LogTable:
    """Equally long columns, one of them ``source``, that can be read by rows."""

    source: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.source)

    def records(self) -> list[dict[str, Any]]:
        """One dict of plain values a row, the source by name and rates by position as columns; None for NaN."""
        columns = self._columns()
        rows = zip(*(np.asarray(column).tolist() for column in columns.values()), strict=True)
        return [{name: None if v != v else v for name, v in zip(columns, row, strict=True)} for row in rows]

    def _columns(self) -> dict[str, Any]:
        return dict(vars(self)) | {"source": np.array(SOURCES, object)[self.source]}


@dataclass(frozen=True, eq=False)
class WindowTable(_LogTable):
    """What was read, a row a window: a printed line, or the difference of two sums.

    Where a log has more windows than are kept, neighbours are added up, and ``lines`` says how many.

    Attributes
    ----------
    file : array, int64, shape (R,)
        Index of the input.
    source : array, int64, shape (R,)
        Index into :data:`SOURCES`.
    line : array, int64, shape (R,)
        Where the window stands, counted from 1: its first line.
    lines : array, int64, shape (R,)
        Windows in the row.
    seconds : array, float64, shape (R,)
        Since the first time stamp of the source in the file; NaN without one.
    running : array, float64, shape (R,)
        Requests running; NaN where not said.
    rounds : array, float64, shape (R,)
        Rounds, each request's counted apart: the weight of the row; 0 where not known.
    estimated : array, float64, shape (R,)
        Share of these that is an estimate, 0 … 1.
    accepted : array, float64, shape (R,)
        Drafted tokens that were accepted, without the bonus.
    drafted : array, float64, shape (R,)
        Tokens drafted; NaN where not said.
    acceptance : array, float64, shape (R,)
        Accepted / drafted; as printed where only that is (SGLang); NaN where neither is.
    tau : array, float64, shape (R,)
        Tokens emitted a round, the bonus included; NaN where not known.
    position_rates : array, float64, shape (R, P)
        Accepted at position i / rounds that drafted so far; NaN where not said.
    """

    file: NDArray[np.int64]
    source: NDArray[np.int64]
    line: NDArray[np.int64]
    lines: NDArray[np.int64]
    seconds: Floats
    running: Floats
    rounds: Floats
    estimated: Floats
    accepted: Floats
    drafted: Floats
    acceptance: Floats
    tau: Floats
    position_rates: Floats

    def _columns(self) -> dict[str, Any]:
        columns = super()._columns()
        rates = columns.pop("position_rates")
        return columns | {f"position_{i}": column for i, column in enumerate(rates.T, start=1)}


@dataclass(frozen=True, eq=False)
class SourceTable(_LogTable):
    """One row for each file and each source that was found in it.

    Attributes
    ----------
    file, source : array, int64, shape (S,)
        See :class:`WindowTable`.
    windows : array, int64, shape (S,)
        Windows read.
    rounds, estimated, accepted, drafted, acceptance, tau : array, float64, shape (S,)
        As there, over all windows; τ weights each by its rounds.
    low, middle, high : array, float64, shape (S,)
        10th, 50th and 90th percentile of the windows' τ to a hundredth, each weighing as many as its rounds; NaN
        without τ. 1,001 stands for all from there on.
    seconds : array, float64, shape (S,)
        From the first stamped window to the last; NaN without stamps.
    """

    file: NDArray[np.int64]
    source: NDArray[np.int64]
    windows: NDArray[np.int64]
    rounds: Floats
    estimated: Floats
    accepted: Floats
    drafted: Floats
    acceptance: Floats
    tau: Floats
    low: Floats
    middle: Floats
    high: Floats
    seconds: Floats


@dataclass(frozen=True, eq=False)
class PositionTable(_LogTable):
    """Acceptance by position in the draft, of windows that say it.

    Attributes
    ----------
    file, source : array, int64, shape (Q,)
        See :class:`WindowTable`.
    position : array, int64, shape (Q,)
        1 …: the place in the draft.
    rounds : array, float64, shape (Q,)
        Rounds of the windows whose draft is that long.
    unconditional : array, float64, shape (Q,)
        Share of them that accepted the position, and so all before it.
    conditional : array, float64, shape (Q,)
        Share that accepted it of those that accepted the one before; NaN where none did.
    """

    file: NDArray[np.int64]
    source: NDArray[np.int64]
    position: NDArray[np.int64]
    rounds: Floats
    unconditional: Floats
    conditional: Floats


@dataclass(frozen=True, eq=False)
class RunningTable(_LogTable):
    """τ by the number of requests running, of windows that say both.

    Attributes
    ----------
    file, source : array, int64, shape (Q,)
        See :class:`WindowTable`.
    running, most_running : array, int64, shape (Q,)
        From … to: equal up to 64, above it from one power of two to the next.
    windows : array, int64, shape (Q,)
        Windows read.
    rounds, tau : array, float64, shape (Q,)
        Their rounds, and τ over them.
    """

    file: NDArray[np.int64]
    source: NDArray[np.int64]
    running: NDArray[np.int64]
    most_running: NDArray[np.int64]
    windows: NDArray[np.int64]
    rounds: Floats
    tau: Floats


class Alert(NamedTuple):
    """A run of windows, one after the other, that no one should average over.

    Attributes
    ----------
    kind : str
        "loop": all drafts were accepted, as in a text that repeats itself. "collapse": hardly any were.
    file, source : int
        See :class:`WindowTable`.
    first_line, last_line : int
        Where the run is in the file, lines counted from 1.
    windows : int
        How many windows it has, 3 or more.
    rounds : float
        Their rounds, 0 if not known.
    """

    kind: str
    file: int
    source: int
    first_line: int
    last_line: int
    windows: int
    rounds: float


@dataclass(frozen=True, eq=False)
class ServerLog:
    """All that was read of one or several logs.

    Attributes
    ----------
    files : tuple of FileCounts
        The inputs, in order.
    windows : WindowTable
        The tidy table.
    sources : SourceTable
        What it comes to, a row for each source in each file.
    positions : PositionTable
        By position in the draft.
    by_running : RunningTable
        By number running.
    alerts : tuple of Alert
        The longest ones, in the order of files and lines.
    num_alerts : dict of str to int
        How many there were of each kind.
    """

    files: tuple[FileCounts, ...]
    windows: WindowTable
    sources: SourceTable
    positions: PositionTable
    by_running: RunningTable
    alerts: tuple[Alert, ...]
    num_alerts: dict[str, int]


def read_server_logs(
    files: Iterable[tuple[str, BinaryIO]],
    *,
    draft_length: int | None = None,
    on_bytes: Callable[[int], object] | None = None,
    block_bytes: int = BLOCK,
) -> ServerLog:
    r"""Read logs of vLLM, SGLang and llama.cpp, of any size and in any state.

    Memory does not grow with the log, and no bytes make this fail.

    Parameters
    ----------
    files : iterable of (str, binary file)
        Name and content; a pipe will do. Each is read to its end, once.
    draft_length : int, optional
        Tokens drafted a round, for lines that do not say how many rounds they are about; otherwise it is looked for
        in the configuration that the engine prints.
    on_bytes : callable, optional
        Called with the number of bytes of each block once it is read.
    block_bytes : int
        How much is read at a time; the result does not depend on it.

    Returns
    -------
    ServerLog

    Examples
    --------
    >>> from io import BytesIO
    >>> line = b"draft acceptance = 0.64479 (  167 accepted /   259 generated), mean len =  2.92\n"
    >>> log = read_server_logs([("server.log", BytesIO(line * 3 + b"anything\n"))])
    >>> log.windows.rounds.tolist(), round(float(log.sources.tau[0]), 2), log.files[0].unknown
    ([87.0, 87.0, 87.0], 2.92, 1)
    """
    if draft_length is not None and not 1 <= draft_length <= 10**6:
        raise ValueError(f"draft_length must be in 1 … {10**6}, got {draft_length}")
    gathered = _Gathered()
    counts = []
    for index, (name, file) in enumerate(files):
        reader = FileReader(partial(gathered.add, index), draft_length)
        for block, start in blocks(file, block_bytes):
            reader.read(block, start)
            if on_bytes is not None:
                on_bytes(len(block) - start)
        counts.append(reader.finish(name))
        gathered.end_of_file()
    return gathered.log(tuple(counts))


# what a row adds up to; behind these, by position: accepted there, rounds that drafted it, and accepted before it
_SUMS = (
    "lines", "rounds", "estimated", "accepted", "drafted", "accepted_of_drafted", "acceptance", "acceptances",
    "emitted", "seconds", "stamps", "running", "runnings",
)  # fmt: skip
_AT = {name: i for i, name in enumerate(_SUMS)}


class _Gathered:
    """Windows of all files, added up so far that there is room."""

    def __init__(self) -> None:
        self.keys = np.zeros((0, 3), np.int64)  # file, source, line
        self.sums = np.zeros((0, len(_SUMS)))
        self.waiting: list[tuple[NDArray[np.int64], Floats]] = []
        self.size = 0
        self.factor = 1
        self.running: dict[tuple[int, int, int], Floats] = {}
        self.taus: dict[tuple[int, int], Floats] = {}  # rounds of windows by τ, in hundredths above 1
        self.open: dict[tuple[str, int, int], Alert] = {}
        self.alerts: list[Alert] = []
        self.num_alerts = {"loop": 0, "collapse": 0}

    def add(self, file: int, source: int, rows: Rows) -> None:
        """Take in the next windows of a source."""
        if not len(rows.line):
            return
        self._watch(file, source, rows)
        self._count_running(file, source, rows)
        self._count_taus(file, source, rows)
        keys = np.empty((len(rows.line), 3), np.int64)
        keys[:, 0], keys[:, 1], keys[:, 2] = file, source, rows.line
        self.waiting.append(_grouped(keys, _sums(rows), self.factor))
        self.size += len(self.waiting[-1][0])
        if self.size > 2 * MOST_WINDOWS:
            self._merge()

    def end_of_file(self) -> None:
        """End the runs that lead to alerts."""
        for key in list(self.open):
            self._end_run(key)

    def log(self, files: tuple[FileCounts, ...]) -> ServerLog:
        """Make the tables."""
        keys, sums = self._all()
        order = np.lexsort((keys[:, 2], keys[:, 1], keys[:, 0]))
        keys, sums = keys[order], sums[order]
        windows = _window_table(keys, sums)
        return ServerLog(
            files,
            windows,
            _source_table(windows, keys, sums, self.taus),
            _position_table(keys, sums),
            _running_table(self.running),
            tuple(sorted(self._longest_alerts(), key=lambda a: (a.file, a.first_line))),
            dict(self.num_alerts),
        )

    def _all(self) -> tuple[NDArray[np.int64], Floats]:
        width = max((sums.shape[1] for _, sums in self.waiting), default=len(_SUMS))
        width = max(width, self.sums.shape[1])
        keys = np.concatenate([self.keys, *(keys for keys, _ in self.waiting)])
        return keys, np.concatenate([_widened(sums, width) for sums in (self.sums, *(s for _, s in self.waiting))])

    def _merge(self) -> None:
        """Halve the resolution until there is room."""
        self.keys, self.sums = self._all()
        order = np.lexsort((self.keys[:, 2], self.keys[:, 1], self.keys[:, 0]))
        self.keys, self.sums, self.waiting = self.keys[order], self.sums[order], []
        while len(self.keys) > MOST_WINDOWS:
            before = len(self.keys)
            self.keys, self.sums = _grouped(self.keys, self.sums, 2)
            self.factor *= 2
            if len(self.keys) == before:  # a row a file and source: no more to be had
                break
        self.size = len(self.keys)

    def _count_running(self, file: int, source: int, rows: Rows) -> None:
        said = ~np.isnan(rows.running) & (rows.rounds > 0) & ~np.isnan(rows.tau)
        running = rows.running[said].astype(np.int64)
        above = 2 ** np.floor(np.log2(np.maximum(running - 1, 1))).astype(np.int64) + 1
        low = np.where(running <= EXACT_RUNNING, running, above)
        values, which = np.unique(low, return_inverse=True)
        sums = np.stack(
            [
                np.bincount(which, minlength=len(values)),
                np.bincount(which, rows.rounds[said], len(values)),
                np.bincount(which, (rows.tau * rows.rounds)[said], len(values)),
            ],
            axis=1,
        )
        for value, row in zip(values.tolist(), sums, strict=True):
            key = (file, source, value)
            self.running[key] = self.running.get(key, 0.0) + row

    def _count_taus(self, file: int, source: int, rows: Rows) -> None:
        known = ~np.isnan(rows.tau) & (rows.rounds > 0)
        hundredths = np.clip(np.rint(100 * (rows.tau[known] - 1)), 0, HIGHEST_TAU - 1).astype(np.int64)
        counts = np.bincount(hundredths, rows.rounds[known], HIGHEST_TAU)
        self.taus[file, source] = np.asarray(self.taus.get((file, source), 0.0) + counts, np.float64)

    def _watch(self, file: int, source: int, rows: Rows) -> None:
        """Find windows in a row that all accept everything, or next to nothing."""
        nothing = np.where(np.isnan(rows.tau), rows.acceptance <= 1 - ALL_ACCEPTED, rows.tau <= NEARLY_ONE)
        for kind, flags in (("loop", rows.acceptance >= ALL_ACCEPTED), ("collapse", nothing)):
            key = (kind, file, source)
            edges = np.flatnonzero(np.diff(np.concatenate([[False], flags, [False]]).astype(np.int8)))
            runs = edges.reshape(-1, 2)
            if not len(runs) or runs[0, 0] > 0:
                self._end_run(key)
            for begin, end in runs.tolist():
                run = Alert(
                    kind, file, source, int(rows.line[begin]), int(rows.line[end - 1]), end - begin,
                    float(rows.rounds[begin:end].sum()),
                )  # fmt: skip
                before = self.open.pop(key, None)
                if before is not None:
                    run = run._replace(
                        first_line=before.first_line,
                        windows=before.windows + run.windows,
                        rounds=before.rounds + run.rounds,
                    )
                self.open[key] = run
                if end < len(flags):
                    self._end_run(key)

    def _end_run(self, key: tuple[str, int, int]) -> None:
        run = self.open.pop(key, None)
        if run is None or run.windows < SHORTEST_RUN or 0 < run.rounds < FEWEST_ROUNDS:
            return
        self.num_alerts[run.kind] += 1
        self.alerts.append(run)
        if len(self.alerts) > 2 * MOST_ALERTS:
            self.alerts = self._longest_alerts()

    def _longest_alerts(self) -> list[Alert]:
        return sorted(self.alerts, key=lambda a: -a.windows)[:MOST_ALERTS]


def _sums(rows: Rows) -> Floats:
    """Columns that may be added up, row by row: those of ``_SUMS``, then three blocks by position."""
    P = rows.rates.shape[1]
    sums = np.zeros((len(rows.line), len(_SUMS) + 3 * P))

    def put(name: str, values: Any, where: Any = True) -> None:
        sums[:, _AT[name]] = np.where(where, values, 0.0)

    known, said = ~np.isnan(rows.tau) & (rows.rounds > 0), ~np.isnan(rows.drafted)
    put("lines", 1.0)
    put("rounds", rows.rounds, known)
    put("estimated", rows.rounds * rows.estimated, known)
    put("emitted", rows.tau * rows.rounds, known)
    put("accepted", rows.accepted)
    put("drafted", rows.drafted, said)
    put("accepted_of_drafted", rows.accepted, said)
    for name, count, values in (
        ("acceptance", "acceptances", rows.acceptance),
        ("seconds", "stamps", rows.seconds),
        ("running", "runnings", rows.running),
    ):
        put(name, values, ~np.isnan(values))
        put(count, ~np.isnan(values))
    at = ~np.isnan(rows.rates) & known[:, None]
    accepted = np.where(at, rows.rates, 0.0) * np.where(known, rows.rounds, 0.0)[:, None]
    rounds = np.where(at, np.where(known, rows.rounds, 0.0)[:, None], 0.0)
    before = np.concatenate([rounds[:, :1], accepted[:, :-1]], axis=1) * at
    sums[:, len(_SUMS) :] = np.concatenate([accepted, rounds, before], axis=1)
    return sums


def _widened(sums: Floats, width: int) -> Floats:
    """The same with room for more positions."""
    n, more = len(_SUMS), (width - sums.shape[1]) // 3
    if not more:
        return sums
    blocks = np.split(sums[:, n:], 3, axis=1)
    return np.concatenate([sums[:, :n], *(np.pad(block, ((0, 0), (0, more))) for block in blocks)], axis=1)


def _grouped(keys: NDArray[np.int64], sums: Floats, factor: int) -> tuple[NDArray[np.int64], Floats]:
    """Neighbours of one file and source added up, ``factor`` at a time."""
    if factor == 1 or not len(keys):
        return keys, sums
    new = np.concatenate([[True], (keys[1:, :2] != keys[:-1, :2]).any(1)])
    first = np.flatnonzero(new)
    place = np.arange(len(keys)) - np.repeat(first, np.diff(np.append(first, len(keys))))
    starts = np.flatnonzero(place % factor == 0)
    return keys[starts], np.add.reduceat(sums, starts, axis=0)


def _ratio(above: Floats, below: Floats) -> Floats:
    """Quotient; NaN where there is nothing to divide by."""
    quotient: Floats = np.where(below > 0, above / np.where(below > 0, below, 1.0), np.nan)
    return quotient


def _window_table(keys: NDArray[np.int64], sums: Floats) -> WindowTable:
    column = {name: sums[:, i] for name, i in _AT.items()}
    seconds = _ratio(column["seconds"], column["stamps"])
    for file, source in _by_source(keys)[0].tolist():
        rows = (keys[:, 0] == file) & (keys[:, 1] == source) & ~np.isnan(seconds)
        seconds[rows] -= seconds[rows].min(initial=np.inf)
    accepted_at, rounds_at, _ = np.split(sums[:, len(_SUMS) :], 3, axis=1)
    P = int(np.flatnonzero(rounds_at.any(axis=0)).max(initial=-1)) + 1  # what was left out had a width too
    return WindowTable(
        file=keys[:, 0],
        source=keys[:, 1],
        line=keys[:, 2],
        lines=column["lines"].astype(np.int64),
        seconds=seconds,
        running=_ratio(column["running"], column["runnings"]),
        rounds=column["rounds"],
        estimated=_ratio(column["estimated"], column["rounds"]),
        accepted=column["accepted"],
        drafted=np.where(column["drafted"] > 0, column["drafted"], np.nan),
        acceptance=_acceptance(sums),
        tau=_ratio(column["emitted"], column["rounds"]),
        position_rates=_ratio(accepted_at[:, :P], rounds_at[:, :P]),
    )


def _acceptance(sums: Floats) -> Floats:
    """Accepted / drafted where both are known, else the mean of what was printed."""
    counted = _ratio(sums[:, _AT["accepted_of_drafted"]], sums[:, _AT["drafted"]])
    printed = _ratio(sums[:, _AT["acceptance"]], sums[:, _AT["acceptances"]])
    return np.where(np.isnan(counted), printed, counted)


def _by_source(keys: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Each file and source once, and where its rows begin; keys are sorted."""
    if not len(keys):
        return keys[:, :2], np.zeros(0, np.int64)
    starts = np.flatnonzero(np.concatenate([[True], (keys[1:, :2] != keys[:-1, :2]).any(1)]))
    return keys[starts, :2], starts


def _source_table(
    windows: WindowTable, keys: NDArray[np.int64], sums: Floats, taus: dict[tuple[int, int], Floats]
) -> SourceTable:
    which, starts = _by_source(keys)
    total = np.add.reduceat(sums, starts, axis=0) if len(starts) else sums[:0]
    column = {name: total[:, i] for name, i in _AT.items()}
    spread, spans = np.full((len(which), 3), np.nan), np.full(len(which), np.nan)
    for i, (begin, end) in enumerate(itertools.pairwise([*starts, len(keys)])):
        spread[i] = _quantiles(taus[int(which[i, 0]), int(which[i, 1])], (0.1, 0.5, 0.9))
        seconds = windows.seconds[begin:end]
        if (~np.isnan(seconds)).any():
            spans[i] = np.nanmax(seconds) - np.nanmin(seconds)
    return SourceTable(
        file=which[:, 0],
        source=which[:, 1],
        windows=column["lines"].astype(np.int64),
        rounds=column["rounds"],
        estimated=_ratio(column["estimated"], column["rounds"]),
        accepted=column["accepted"],
        drafted=np.where(column["drafted"] > 0, column["drafted"], np.nan),
        acceptance=_acceptance(total),
        tau=_ratio(column["emitted"], column["rounds"]),
        low=spread[:, 0],
        middle=spread[:, 1],
        high=spread[:, 2],
        seconds=spans,
    )


def _quantiles(counts: Floats, shares: tuple[float, ...]) -> Floats:
    """The least τ up to which so much of the weight lies; NaN without weight."""
    reached = np.cumsum(counts)
    if reached[-1] <= 0:
        return np.full(len(shares), np.nan)
    return np.asarray(1 + np.searchsorted(reached, np.array(shares) * reached[-1]) / 100, np.float64)


def _position_table(keys: NDArray[np.int64], sums: Floats) -> PositionTable:
    which, starts = _by_source(keys)
    total = np.add.reduceat(sums, starts, axis=0) if len(starts) else sums[:0]
    accepted, rounds, before = np.split(total[:, len(_SUMS) :], 3, axis=1)
    row, at = np.nonzero(rounds > 0)
    return PositionTable(
        file=which[row, 0],
        source=which[row, 1],
        position=at + 1,
        rounds=rounds[row, at],
        unconditional=_ratio(accepted, rounds)[row, at],
        # a rate is rounded, so that one may seem to rise
        conditional=np.minimum(_ratio(accepted, before)[row, at], 1.0),
    )


def _running_table(running: dict[tuple[int, int, int], Floats]) -> RunningTable:
    keys = np.array(sorted(running), np.int64).reshape(-1, 3)
    sums = np.array([running[key] for key in sorted(running)], np.float64).reshape(-1, 3)
    low = keys[:, 2]
    return RunningTable(
        file=keys[:, 0],
        source=keys[:, 1],
        running=low,
        most_running=np.where(low <= EXACT_RUNNING, low, 2 * (low - 1)),
        windows=sums[:, 0].astype(np.int64),
        rounds=sums[:, 1],
        tau=_ratio(sums[:, 2], sums[:, 1]),
    )
