r"""Acceptance figures out of the logs of serving engines, as one tidy table. NumPy alone.

What is recognised, wherever it stands in a line, with terminal colours and any prefix around it:

vLLM, one line a window of about ten seconds, never cumulative; in the order in which the forms came (read in
``vllm/v1/spec_decode/metrics.py`` and its history; the number running is in the line before, from
``vllm/v1/metrics/loggers.py``)::

    SpecDecoding metrics: Draft acceptance rate: 67.7%, Accepted: 337 tokens, Drafted: 498 tokens
    SpecDecoding metrics: Draft acceptance rate: 67.7%, Mean acceptance length: 3.03, Accepted: 337 tokens,
        Drafted: 498 tokens, Per-position acceptance rate: 0.837, 0.669, 0.524
    SpecDecoding metrics: Mean acceptance length: 3.03, Accepted throughput: 33.70 tokens/s, Drafted throughput: 49.80
        tokens/s, Accepted: 337 tokens, Drafted: 498 tokens, Per-position acceptance rate: 0.837, 0.669, 0.524, Avg
        Draft acceptance rate: 67.7%

The last may have ``Current speculative depth: 3,`` in it. Mean acceptance length is 1 + accepted / drafts: it is τ. The
first form says neither that nor the drafts: these are drafted / ``num_speculative_tokens``, if the log has printed the
configuration, and are marked as estimated.

vLLM's first engine, sums since the server began (``vllm/spec_decode/metrics.py``, ``vllm/engine/metrics.py``)::

    Speculative metrics: Draft acceptance rate: 0.642, System efficiency: 0.598, Number of speculative tokens: 3, Number
        of accepted tokens: 8547, Number of draft tokens: 13311, Number of emitted tokens: 10616.

Accepted tokens there are counted wherever in the draft they stand, behind a rejected one too, so they say nothing of τ:
it is emitted / drafts, and drafts are draft tokens / speculative tokens.

Prometheus counters, sums since the server began, in any number of scrapes behind each other, of vLLM (the same file)
and of llama.cpp (``tools/server``), with ``num_requests_running`` or ``requests_processing`` for the number running::

    vllm:spec_decode_num_drafts_total{engine="0",model_name="m"} 279.0
    vllm:spec_decode_num_draft_tokens_total{engine="0",model_name="m"} 837.0
    vllm:spec_decode_num_accepted_tokens_total{engine="0",model_name="m"} 676.0
    vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="0"} 257.0

A window is the difference of two scrapes, label set by label set; one that has fallen was reset and counts from 0. A
first scrape is what the second is compared with; where there is only one, it is the window.

SGLang, one line every ``decode_log_interval`` steps (40 if the log does not say) of all that run
(``python/sglang/srt/managers/scheduler_metrics_mixin.py``; older versions write a full stop after "batch", and no
accept rate)::

    [2026-09-11 23:47:28 TP0] Decode batch, #running-req: 1, #full token: 0, full token usage: 0.00, accept len: 3.05,
        accept rate: 0.68, cuda graph: True, gen throughput (token/s): 3.12, #queue-req: 0

accept len has the bonus in it: it is τ. Its rounds are not printed: steps × running requests is an estimate. The accept
rate was accepted / drafted with the bonus among both in older versions, and without it in newer ones, so it is kept
as printed and nothing follows from it but that all was accepted where it is 1.

llama.cpp, a line a request (``tools/server/server-context.cpp``, ``server.cpp`` before)::

    draft acceptance rate = 0.57576 (  171 accepted /   297 generated)
    draft acceptance = 0.64479 (  167 accepted /   259 generated), mean acceptance length =  2.92, acceptance rate per
        position = (0.805, 0.632, 0.483)
    draft acceptance = 0.64479 (  167 accepted /   259 generated), mean len =  2.92
         acc per pos = (0.805, 0.632, 0.483)

The mean is 1 + accepted / verification steps: it is τ. The first form has no τ.

Everywhere τ is the mean of tokens emitted a round by one request, the bonus included. Rates by position are
unconditional where printed: accepted at position i / all rounds.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime
from typing import Any, BinaryIO, NamedTuple

import numpy as np
from numpy.typing import NDArray

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

SOURCES = ("vLLM", "vLLM V0", "counters", "SGLang", "llama.cpp")
"""Who wrote a window; "counters" are Prometheus counters of vLLM or llama.cpp."""

Floats = NDArray[np.float64]

BLOCK = 1 << 22  # bytes read at a time
LONGEST_LINE = 1 << 20  # what is longer, such as a file that is no text, is passed over in pieces
LOOK_BACK = 1 << 12  # bytes kept of the block before, where a line's neighbour may stand
HEAD = 1 << 23  # bytes at the start in which an engine prints its configuration
MOST_WINDOWS = 1 << 14  # rows kept; beyond twice that, neighbours are added up
MOST_POSITIONS = 64
HIGHEST_TAU = 100_001  # hundredths above 1 that are told apart
MOST_ALERTS = 100
HIGHEST_COUNT = 1e15
MOST_SERIES = 10_000  # of one scrape
LONGEST_PREFIX = 1 << 11  # bytes in front of a message in which a time stamp is looked for
SHORTEST_RUN = 3  # windows in a row that make an alert
FEWEST_ROUNDS = 30  # in them, where they are known
ALL_ACCEPTED = 0.99
NEARLY_ONE = 1.05
EXACT_RUNNING = 64  # numbers running up to here have a row each, beyond it powers of two


@dataclass(frozen=True, eq=False)
class WindowTable:
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

    def __len__(self) -> int:
        return len(self.tau)

    def records(self) -> list[dict[str, Any]]:
        """One dict of plain values a row, the source by name and the rates as columns; None for NaN."""
        names = ("file", "source", "line", "lines", "seconds", "running", "rounds", "estimated", "accepted", "drafted")
        columns: dict[str, Any] = {name: getattr(self, name) for name in (*names, "acceptance", "tau")}
        columns["source"] = np.array(SOURCES, object)[self.source]
        for i, rates in enumerate(self.position_rates.T, start=1):
            columns[f"position_{i}"] = rates
        return _records(columns)


@dataclass(frozen=True, eq=False)
class SourceTable:
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

    def __len__(self) -> int:
        return len(self.tau)

    def records(self) -> list[dict[str, Any]]:
        """One dict of plain values a row, the source by name; None for NaN."""
        columns = dict(vars(self)) | {"source": np.array(SOURCES, object)[self.source]}
        return _records(columns)


@dataclass(frozen=True, eq=False)
class PositionTable:
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

    def __len__(self) -> int:
        return len(self.position)

    def records(self) -> list[dict[str, Any]]:
        """One dict of plain values a row, the source by name; None for NaN."""
        columns = dict(vars(self)) | {"source": np.array(SOURCES, object)[self.source]}
        return _records(columns)


@dataclass(frozen=True, eq=False)
class RunningTable:
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

    def __len__(self) -> int:
        return len(self.tau)

    def records(self) -> list[dict[str, Any]]:
        """One dict of plain values a row, the source by name; None for NaN."""
        columns = dict(vars(self)) | {"source": np.array(SOURCES, object)[self.source]}
        return _records(columns)


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


class FileCounts(NamedTuple):
    """What became of a file's lines.

    Attributes
    ----------
    name : str
        The file.
    bytes, lines : int
        Its size.
    recognised : int
        Lines that gave figures.
    damaged : int
        Lines that begin like such a line and do not go on like one, or whose figures contradict each other.
    """

    name: str
    bytes: int
    lines: int
    recognised: int
    damaged: int

    @property
    def unknown(self) -> int:
        """Lines about anything else."""
        return self.lines - self.recognised - self.damaged


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
        reader = _FileReader(index, gathered, draft_length)
        for block, start in _blocks(file, block_bytes):
            reader.read(block, start)
            if on_bytes is not None:
                on_bytes(len(block) - start)
        counts.append(reader.finish(name))
    return gathered.log(tuple(counts))


# ---------------------------------------------------------------------------------------------------------------------
# bytes to blocks of whole lines


def _blocks(file: BinaryIO, block_bytes: int) -> Iterator[tuple[bytes, int]]:
    """Whole lines, and where they begin: before that is the end of what came before."""
    before, rest = b"", b""
    while True:
        data = file.read(block_bytes)
        rest += data
        cut = rest.rfind(b"\n") + 1 if data else len(rest)
        if not cut and len(rest) > LONGEST_LINE:
            cut = len(rest)
        if cut:
            block = before + rest[:cut]
            yield block, len(before)
            before, rest = block[-LOOK_BACK:], rest[cut:]
        if not data:
            return


_COLOUR = re.compile(rb"\x1b\[[0-9;:?]*[ -/]*[@-~]")
_SETTING = re.compile(rb"(num_speculative_tokens|num_spec_tokens|decode_log_interval)[\"']?\s?[=:]\s?(\d{1,6})\b")
_RUNNING = re.compile(rb"Running: (\d{1,9}) reqs")
_RATES = rb"(?:\d\.\d{3}|nan)(?:, (?:\d\.\d{3}|nan)){0,999}"
_VLLM = re.compile(
    rb"SpecDecoding metrics: (?:Draft acceptance rate: (?:\d{1,3}\.\d|nan)%, )?"
    rb"(?:Mean acceptance length: (\d{1,9}\.\d\d|nan), )?(?:Current speculative depth: (\d{1,9}), )?"
    rb"(?:[^\n]{0,200}?, )?Accepted: (\d{1,15}) tokens, Drafted: (\d{1,15}) tokens"
    rb"(?:, Per-position acceptance rate: (" + _RATES + rb")(?=, [A-Z]|[^\d.,]|$))?"
)
_V0 = re.compile(
    rb"Speculative metrics: [^\n]{0,200}?Number of speculative tokens: (\d{1,9}), Number of accepted tokens: "
    rb"(\d{1,15}), Number of draft tokens: (\d{1,15}), Number of emitted tokens: (\d{1,15})\."
)
_SGLANG = re.compile(rb"accept len: (\d{1,9}\.\d\d)(?=[,\s]|$)(?:, accept rate: (\d{1,9}\.\d\d)(?=[,\s]|$))?")
_SGLANG_RUNNING = re.compile(rb"Decode batch[^#\n]{1,40}#running-req: (\d{1,9})\b")
_LLAMA = re.compile(
    rb"draft acceptance(?: rate)? = (?:\d\.\d{5}|-?nan) \(\s*(\d{1,15}) accepted /\s*(\d{1,15}) generated\)"
    rb"(?:, mean (?:acceptance length|len) =\s*(\d{1,9}\.\d\d)"
    rb"(?:, acceptance rate per position = \((" + _RATES + rb")?\))?)?"
)
_LLAMA_RATES = re.compile(rb"acc per pos = \((" + _RATES + rb")\)")
_COUNTERS = (
    b"vllm:spec_decode_num_",
    b"vllm:num_requests_running",
    b"llamacpp:spec_decode_num_",
    b"llamacpp:requests_processing",
)
_SAMPLE = re.compile(
    rb"(vllm|llamacpp):(spec_decode_num_(?:drafts|draft_tokens|accepted_tokens|accepted_tokens_per_pos)"
    rb"|num_requests_running|requests_processing)(?:_total)?(?:\{([^\n}]*)\})? (\d[\d.]*(?:[eE][+-]?\d{1,3})?)"
    rb"(?: (\d{1,15}))?[ \r]*\n"
)
_POSITION = re.compile(rb",?\bposition=\"(\d{1,3})\"")
_STAMP = re.compile(
    rb"(?:(?P<year>\d{4})-)?(?<!\d)(?P<month>\d\d)-(?P<day>\d\d)[T ](?P<h>\d\d):(?P<m>\d\d):(?P<s>\d\d(?:[.,]\d{1,9})?)"
    rb"|(?<![\d:])(?P<h2>\d\d):(?P<m2>\d\d):(?P<s2>\d\d(?:[.,]\d{1,9})?)(?![\d:])"
    rb"|^(?P<minutes>\d{1,7})\.(?P<s3>\d\d)\.(?P<ms>\d{3})\.(?P<us>\d{3})(?!\d)"  # llama.cpp's, since it began
)
_EPOCH = datetime(1970, 1, 1)
_ALWAYS, _YEARLY, _DAILY = np.inf, 366 * 86400.0, 86400.0  # after how many seconds a stamp comes again


class _Clock:
    """Time stamps as seconds that do not run back where a stamp has no year, or no day."""

    def __init__(self) -> None:
        self.prefix: bytes | None = None
        self.seconds = np.nan
        self.last = dict.fromkeys((_ALWAYS, _YEARLY, _DAILY), -np.inf)
        self.turns = dict.fromkeys((_ALWAYS, _YEARLY, _DAILY), 0)

    def read(self, prefix: bytes) -> float:
        """Seconds, from any origin, of the stamp in front of a message; NaN without one."""
        if prefix != self.prefix:
            self.prefix, self.seconds = prefix, self._read(prefix)
        return self.seconds

    def _read(self, prefix: bytes) -> float:
        match = _STAMP.search(prefix)
        if match is None:
            return np.nan
        if match["minutes"]:
            return 60.0 * int(match["minutes"]) + int(match["s3"]) + int(match["ms"]) / 1e3 + int(match["us"]) / 1e6
        if match["h2"]:
            at, period = _of_day(match["h2"], match["m2"], match["s2"]), _DAILY
        else:
            # without a year any will do that has a 29 February
            year, period = (int(match["year"]), _ALWAYS) if match["year"] else (2000, _YEARLY)
            try:
                day = datetime(year, int(match["month"]), int(match["day"]))
            except ValueError:
                return np.nan
            at = 86400.0 * (day - _EPOCH).days + _of_day(match["h"], match["m"], match["s"])
        if period == _ALWAYS:
            return at
        if at + period / 2 < self.last[period]:  # far back: the stamp has begun again
            self.turns[period] += 1
        self.last[period] = at
        return at + period * self.turns[period]


def _of_day(hours: bytes, minutes: bytes, seconds: bytes) -> float:
    return 3600 * int(hours) + 60 * int(minutes) + float(seconds.replace(b",", b"."))


# ---------------------------------------------------------------------------------------------------------------------
# lines to windows


class _Rows(NamedTuple):
    """Windows of one source, in order, by what they add up to: a row each."""

    line: NDArray[np.int64]
    seconds: Floats
    running: Floats  # NaN: not said
    rounds: Floats  # 0: not known
    estimated: NDArray[np.bool_]
    accepted: Floats
    drafted: Floats  # NaN: not said
    acceptance: Floats
    tau: Floats  # NaN: not known
    rates: Floats  # (n, P), NaN where the draft is not that long

    def where(self, kept: NDArray[np.bool_]) -> _Rows:
        return _Rows(**{name: column[kept] for name, column in self._asdict().items()})


class _FileReader:
    """One file on its way through: what is carried from block to block."""

    def __init__(self, index: int, gathered: _Gathered, draft_length: int | None) -> None:
        self.index, self.gathered = index, gathered
        self.draft_length = draft_length
        self.settings: dict[str, list[tuple[int, int]]] = {"draft length": [(0, 0)], "interval": [(0, 40)]}
        self.bytes = self.lines = self.recognised = self.damaged = 0
        self.offset = 0  # as bytes, without colour codes
        self.clocks = [_Clock() for _ in SOURCES]
        self.after_vllm = 0  # offset behind vLLM's last line: what stands before it says nothing of the next
        self.v0_first: tuple[int, float, NDArray[np.int64]] | None = None
        self.v0_last: NDArray[np.int64] | None = None
        self.scrapes = _Scrapes()
        self.request: list[Any] | None = None  # llama.cpp's last, whose rates may follow

    def read(self, block: bytes, start: int) -> None:
        """Take in whole lines; before ``start`` are some of those that were read before."""
        if self.bytes < HEAD:
            self._read_settings(block[start : start + HEAD - self.bytes])
        self.bytes += len(block) - start
        if b"\x1b[" in block:
            before = _COLOUR.sub(b"", block[:start])
            block, start = before + _COLOUR.sub(b"", block[start:]), len(before)
        self._read_vllm(block, start)
        self._read_v0(block, start)
        self._read_counters(block, start)
        self._read_sglang(block, start)
        self._read_llama(block, start)
        self.offset += len(block) - start
        self.lines += block.count(b"\n", start) + (not block.endswith(b"\n"))

    def finish(self, name: str) -> FileCounts:
        """Take in what was waiting for more."""
        if self.v0_first is not None:
            line, seconds, sums = self.v0_first
            self._add_v0([line], [seconds], [sums])
        scrape = self.scrapes.close(last=True)
        self._add_counters([] if scrape is None else [scrape])
        self._add_llama([] if self.request is None else [self.request])
        self.gathered.end_of_file()
        return FileCounts(name, self.bytes, self.lines, self.recognised, self.damaged)

    def _hits(
        self, block: bytes, start: int, marker: bytes, pattern: re.Pattern[bytes]
    ) -> Iterator[tuple[int, int, int, re.Match[bytes] | None]]:
        """Each line that has the marker: its number, where it begins, where the marker is, and the match there."""
        line, counted = self.lines + 1, start
        at = block.find(marker, start)
        while at >= 0:
            begin = block.rfind(b"\n", max(start, at - LONGEST_PREFIX), at) + 1 or max(start, at - LONGEST_PREFIX)
            line += block.count(b"\n", counted, at)
            counted = at
            yield line, begin, at, pattern.match(block, at)
            end = block.find(b"\n", at)
            at = block.find(marker, end) if end >= 0 else -1

    def _read_settings(self, head: bytes) -> None:
        for match in _SETTING.finditer(head):
            name = "interval" if match[1] == b"decode_log_interval" else "draft length"
            if int(match[2]) > 0:
                self.settings[name].append((self.lines + 1 + head.count(b"\n", 0, match.start()), int(match[2])))

    def _in_force(self, name: str, lines: Any) -> NDArray[np.int64]:
        """A setting as it was last printed before each line."""
        at, values = np.array(self.settings[name], np.int64).T
        return np.asarray(values[np.searchsorted(at, lines, "right") - 1], np.int64)

    def _read_vllm(self, block: bytes, start: int) -> None:
        found = []
        for line, begin, at, match in self._hits(block, start, b"SpecDecoding metrics: ", _VLLM):
            nearest = max(self.after_vllm - self.offset + start, begin - LOOK_BACK, 0)
            before = block.rfind(b"Running: ", nearest, begin)
            running = _RUNNING.match(block, before) if before >= 0 else None
            self.after_vllm = self.offset - start + begin + 1
            if match is None:
                self.damaged += 1
                continue
            seconds = self.clocks[0].read(block[begin:at])
            found.append((line, seconds, float(running[1]) if running else np.nan, *match.groups()))
        if not found:
            return
        lines, stamps, at_once, mean, depth, accepted, drafted, printed = zip(*found, strict=True)
        rates, lengths = _rates(printed)
        figures = _Figures(
            accepted=_floats(accepted),
            drafted=_floats(drafted),
            mean=_floats(mean),
            lengths=lengths,
            depth=_floats(depth),
            sums=np.where(lengths > 0, np.nansum(rates, axis=1), np.nan),
        )
        rounds, estimated, good = _rounds_of(figures, self.draft_length or self._in_force("draft length", lines))
        good &= figures.accepted <= figures.drafted
        idle = good & (figures.drafted == 0)
        self.recognised += int(good.sum())
        self.damaged += int((~good).sum())
        self._add_printed(0, good & ~idle, lines, stamps, _array(at_once), figures, rates, rounds, estimated)

    def _add_printed(
        self,
        source: int,
        kept: NDArray[np.bool_],
        line: Any,
        seconds: Any,
        running: Floats,
        figures: _Figures,
        rates: Floats,
        rounds: Floats,
        estimated: NDArray[np.bool_],
    ) -> None:
        with np.errstate(divide="ignore", invalid="ignore"):
            tau = np.where(rounds > 0, 1 + figures.accepted / rounds, np.nan)
            acceptance = figures.accepted / figures.drafted
        rows = _Rows(
            line=np.array(line, np.int64),
            seconds=_array(seconds),
            running=running,
            rounds=rounds,
            estimated=estimated,
            accepted=figures.accepted,
            drafted=figures.drafted,
            acceptance=acceptance,
            tau=tau,
            rates=rates[:, :MOST_POSITIONS],
        )
        self.gathered.add(self.index, source, rows.where(kept))

    def _read_v0(self, block: bytes, start: int) -> None:
        lines, seconds, differences = [], [], []
        for line, begin, at, match in self._hits(block, start, b"Speculative metrics: ", _V0):
            if match is None or int(match[1]) == 0:
                self.damaged += 1
                continue
            self.recognised += 1
            sums = np.array([int(group) for group in match.groups()], np.int64)  # k, accepted, drafted, emitted
            stamp = self.clocks[1].read(block[begin:at])
            if self.v0_last is None:
                self.v0_first = line, stamp, sums
            else:
                self.v0_first = None
                lines.append(line)
                seconds.append(stamp)
                fallen = (sums < self.v0_last)[1:].any()  # another server
                differences.append(sums if fallen else np.append(sums[:1], (sums - self.v0_last)[1:]))
            self.v0_last = sums
        self._add_v0(lines, seconds, differences)

    def _add_v0(self, lines: list[int], seconds: list[float], sums: list[NDArray[np.int64]]) -> None:
        if not lines:
            return
        length, _, drafted, emitted = np.array(sums, np.float64).T
        rounds = drafted / length
        kept = (drafted > 0) & (emitted >= rounds)
        with np.errstate(divide="ignore", invalid="ignore"):
            rows = _Rows(
                line=np.array(lines, np.int64),
                seconds=_array(seconds),
                running=np.full(len(lines), np.nan),
                rounds=rounds,
                estimated=rounds != np.floor(rounds),
                accepted=emitted - rounds,
                drafted=drafted,
                acceptance=(emitted - rounds) / drafted,
                tau=emitted / rounds,
                rates=np.zeros((len(lines), 0)),
            )
        self.gathered.add(self.index, 1, rows.where(kept))

    def _read_counters(self, block: bytes, start: int) -> None:
        hits = [hit for marker in _COUNTERS for hit in self._hits(block, start, marker, _SAMPLE)]
        ended, read_clock = [], self.clocks[2].read
        for line, begin, at, match in sorted(hits, key=lambda hit: hit[0]):
            if match is None:
                continue  # a comment, or the time at which a counter was made
            engine, name, labels, value, stamp = match.groups()
            number = float(value) if value.count(b".") <= 1 else np.inf
            by_position = _POSITION.search(labels or b"") is not None
            if number > HIGHEST_COUNT or by_position != name.endswith(b"_per_pos"):
                self.damaged += 1
                continue
            seconds = int(stamp) / 1e3 if stamp else read_clock(block[begin:at])
            scrape = self.scrapes.add(line, seconds, engine + name, labels or b"", number)
            self.recognised += 1
            if scrape is not None:
                ended.append(scrape)
        self._add_counters(ended)

    def _add_counters(self, scrapes: list[_Difference]) -> None:
        for d in scrapes:
            if d.drafted <= 0 or d.accepted > d.drafted:
                continue
            rates = d.accepted_at[None] / d.rounds if d.rounds > 0 else np.zeros((1, 0))
            rows = _Rows(
                line=np.array([d.line]),
                seconds=_array([d.seconds]),
                running=_array([d.running]),
                rounds=_array([d.rounds]),
                estimated=np.zeros(1, np.bool_),
                accepted=_array([d.accepted]),
                drafted=_array([d.drafted]),
                acceptance=_array([d.accepted / d.drafted]),
                tau=_array([1 + d.accepted / d.rounds if d.rounds > 0 else np.nan]),
                rates=rates,
            )
            self.gathered.add(self.index, 2, rows)

    def _read_sglang(self, block: bytes, start: int) -> None:
        found, read_clock = [], self.clocks[3].read
        for line, begin, at, match in self._hits(block, start, b"accept len: ", _SGLANG):
            message = block.find(b"Decode batch", begin, at)
            if message < 0:
                continue  # about something else
            running = _SGLANG_RUNNING.match(block, message)
            if match is None or running is None or match[1].startswith(b"0."):
                self.damaged += 1
                continue
            found.append((line, read_clock(block[begin:message]), running[1], match[1], match[2]))
        if not found:
            return
        self.recognised += len(found)
        lines, stamps, at_once, mean, rate = zip(*found, strict=True)
        tau, requests = _floats(mean), _floats(at_once)
        rounds = self._in_force("interval", lines) * requests
        rows = _Rows(
            line=np.array(lines, np.int64),
            seconds=_array(stamps),
            running=requests,
            rounds=rounds,
            estimated=np.ones(len(lines), np.bool_),
            accepted=(tau - 1) * rounds,
            drafted=np.full(len(lines), np.nan),
            acceptance=_floats(rate),
            tau=tau,
            rates=np.zeros((len(lines), 0)),
        )
        self.gathered.add(self.index, 3, rows.where(requests > 0))

    def _read_llama(self, block: bytes, start: int) -> None:
        hits = [*self._hits(block, start, b"draft acceptance", _LLAMA)]
        if not hits and self.request is None:
            return
        rates = [hit for hit in self._hits(block, start, b"acc per pos = (", _LLAMA_RATES) if hit[3]]
        done = []
        for line, begin, at, match in sorted([*hits, *rates], key=lambda hit: hit[0]):
            if match is not None and match.re is _LLAMA_RATES:
                if self.request is not None and self.request[-1] is None and self.request[0] == line - 1:
                    self.request[-1] = match[1]
                    self.recognised += 1
                continue
            if match is None or int(match[1]) > int(match[2]):
                self.damaged += 1
                continue
            if self.request is not None:
                done.append(self.request)
            self.request = [line, self.clocks[4].read(block[begin:at]), *match.groups()]
        self._add_llama(done)

    def _add_llama(self, requests: list[list[Any]]) -> None:
        if not requests:
            return
        line, seconds, accepted, drafted, mean, printed = zip(*requests, strict=True)
        rates, lengths = _rates(printed)
        figures = _Figures(
            accepted=_floats(accepted),
            drafted=_floats(drafted),
            mean=_floats(mean),
            lengths=lengths,
            depth=np.full(len(line), np.nan),
            sums=np.where(lengths > 0, np.nansum(rates, axis=1), np.nan),
        )
        # without a mean the draft length would not do: llama.cpp ends drafts early where it has little confidence
        rounds, estimated, good = _rounds_of(figures, 0)
        self.recognised += int(good.sum())
        self.damaged += int((~good).sum())
        running = np.full(len(line), np.nan)
        self._add_printed(4, good & (figures.drafted > 0), line, seconds, running, figures, rates, rounds, estimated)


class _Figures(NamedTuple):
    """What a line prints; NaN for what it does not."""

    accepted: Floats
    drafted: Floats
    mean: Floats  # 1 + accepted / rounds, to two places
    lengths: NDArray[np.int64]  # positions with a rate; 0 without rates
    depth: Floats  # positions drafted, where said apart
    sums: Floats  # of the rates, each to three places: accepted / rounds


def _rounds_of(figures: _Figures, draft_length: Any) -> tuple[Floats, NDArray[np.bool_], NDArray[np.bool_]]:
    """Rounds behind a printed line: their number, whether it is an estimate, and whether the figures agree.

    Drafted / draft length is right where every draft was full. Mean and rates say accepted / rounds, rounded, and so
    bound the rounds from both sides. If the former is a whole number within the bounds it is taken; if one whole
    number alone is, that; else the best estimate.
    """
    accepted, drafted, mean, lengths, depth, sums = figures
    with np.errstate(divide="ignore", invalid="ignore"):
        low, high = np.zeros(len(accepted)), np.full(len(accepted), np.inf)
        for ratio, slack in ((mean - 1, np.full(len(accepted), 0.00501)), (sums, 0.000501 * lengths)):
            said = ~np.isnan(ratio)
            low = np.where(said, np.maximum(low, accepted / (ratio + slack)), low)
            high = np.where(said & (ratio > slack), np.minimum(high, accepted / (ratio - slack)), high)
        length = np.where(depth > 0, depth, np.where(lengths > 0, lengths, draft_length)).astype(np.float64)
        full = np.where(length > 0, drafted / length, np.nan)
        low = np.where(lengths > 0, np.maximum(low, drafted / np.maximum(lengths, 1)), low)
        agree = low <= high * (1 + 1e-9)
        agree &= ~((accepted == 0) & ((mean > 1) | (sums > 0)))
        known = ~np.isnan(mean) | ~np.isnan(sums)
        whole = known & (full == np.floor(full)) & (full >= low * (1 - 1e-9)) & (full <= high * (1 + 1e-9)) & (full > 0)
        least, most = np.ceil(low - 1e-9), np.floor(high + 1e-9)
        one = known & (least == most) & (least > 0)
        guess = np.where(accepted > 0, accepted / np.where(np.isnan(sums) | (sums == 0), mean - 1, sums), full)
        guess = np.clip(np.where(known, guess, full), low, high)
        rounds = np.where(whole, full, np.where(one, least, guess))
    rounds = np.where(np.isfinite(rounds) & agree, rounds, 0.0)
    return rounds, ~(whole | one), agree


class _Difference(NamedTuple):
    """What was counted between two scrapes."""

    line: int
    seconds: float
    running: float
    rounds: float
    drafted: float
    accepted: float
    accepted_at: Floats


class _Scrapes:
    """Prometheus counters, scrape after scrape."""

    def __init__(self) -> None:
        self.last: dict[bytes, dict[bytes, float]] | None = None  # by label set, by name and position
        self.now: dict[bytes, dict[bytes, float]] = {}
        self.running: float = np.nan
        self.line, self.seconds = 0, np.nan
        self.size = 0

    def add(self, line: int, seconds: float, name: bytes, labels: bytes, value: float) -> _Difference | None:
        """Take in a sample; where it is the first of another scrape, return what the one before comes to."""
        position = _POSITION.search(labels)
        series = _POSITION.sub(b"", labels).strip(b",") + name.partition(b":")[0]
        key = name if position is None else name + b" " + position[1]
        ended = None
        if key in self.now.get(series, ()):
            ended = self.close()
        if not self.size:
            self.line, self.seconds = line, seconds
        if self.size < MOST_SERIES:
            self.now.setdefault(series, {})[key] = value
            self.size += 1
        return ended

    def close(self, *, last: bool = False) -> _Difference | None:
        """End a scrape."""
        if not any(b"spec_decode" in key for values in self.now.values() for key in values):
            self.now, self.size = {}, 0
            return None
        now, before = self.now, self.last
        first_and_only = before is None and last
        self.last, self.now, self.size = now, {}, 0
        if before is None and not first_and_only:
            return None
        total: dict[bytes, float] = {}
        running = np.nan
        for series, values in now.items():
            old = (before or {}).get(series, {})
            gauges = {key for key in values if b"running" in key or b"processing" in key}
            running = sum((values[key] for key in gauges), 0.0 if np.isnan(running) else running) if gauges else running
            counters = values.keys() - gauges
            reset = any(values[key] < old.get(key, 0.0) for key in counters)
            for key in counters:
                name = key.partition(b"spec_decode_num_")[2]
                total[name] = total.get(name, 0.0) + values[key] - (0.0 if reset else old.get(key, 0.0))
        positions = [int(name.rpartition(b" ")[2]) for name in total if b"per_pos" in name]
        accepted_at = np.zeros(min(max(positions, default=-1) + 1, MOST_POSITIONS))
        for at in positions:
            if at < len(accepted_at):
                accepted_at[at] = total[b"accepted_tokens_per_pos %d" % at]
        rounds, drafted, accepted = (total.get(name, 0.0) for name in (b"drafts", b"draft_tokens", b"accepted_tokens"))
        return _Difference(self.line, self.seconds, running, rounds, drafted, accepted, accepted_at)


def _array(values: Any) -> Floats:
    return np.array(values, np.float64)


def _floats(values: Iterable[bytes | None]) -> Floats:
    """Numbers as printed; NaN for what is not there."""
    return np.array([np.nan if value is None else float(value) for value in values], np.float64)


def _rates(printed: Iterable[bytes | None]) -> tuple[Floats, NDArray[np.int64]]:
    """Lists of rates as rows, NaN behind their ends, and their lengths."""
    split = [[] if text is None else text.split(b", ") for text in printed]
    lengths = np.array([len(row) for row in split], np.int64)
    rates = np.full((len(split), int(lengths.max(initial=0))), np.nan)
    rates[np.arange(rates.shape[1]) < lengths[:, None]] = [float(rate) for row in split for rate in row]
    return rates, lengths


# ---------------------------------------------------------------------------------------------------------------------
# windows to tables

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

    def add(self, file: int, source: int, rows: _Rows) -> None:
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

    def _count_running(self, file: int, source: int, rows: _Rows) -> None:
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

    def _count_taus(self, file: int, source: int, rows: _Rows) -> None:
        known = ~np.isnan(rows.tau) & (rows.rounds > 0)
        hundredths = np.clip(np.rint(100 * (rows.tau[known] - 1)), 0, HIGHEST_TAU - 1).astype(np.int64)
        counts = np.bincount(hundredths, rows.rounds[known], HIGHEST_TAU)
        self.taus[file, source] = _array(self.taus.get((file, source), 0.0) + counts)

    def _watch(self, file: int, source: int, rows: _Rows) -> None:
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


def _sums(rows: _Rows) -> Floats:
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
        position_rates=_ratio(accepted_at, rounds_at),
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
    return _array(1 + np.searchsorted(reached, np.array(shares) * reached[-1]) / 100)


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


def _records(columns: dict[str, Any]) -> list[dict[str, Any]]:
    rows = zip(*(np.asarray(column).tolist() for column in columns.values()), strict=True)
    return [{name: None if v != v else v for name, v in zip(columns, row, strict=True)} for row in rows]
