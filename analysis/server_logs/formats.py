r"""What serving engines write about speculative decoding, and how its figures are read. NumPy alone.

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
configuration, and are marked as estimated. A round that drafted nothing is not counted, and tokens that a stop then
cuts off are (``vllm/v1/core/sched/scheduler.py``): this τ is that of rounds with a draft, before the cut.

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

A scrape ends where a sample comes again. A window is what a scrape adds, label set by label set, to the scrape that had
the label set before, however far back that is; a label set of which any counter has fallen was reset and counts from 0,
all of it. The first scrape of a label set is what its second is compared with; where a log has only one scrape, that is
the window.

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

The mean is 1 + accepted / verification steps: it is τ. The first form has no τ. But a few lines above it stands how
many tokens the request gave, the first of which is the prompt's; each later step gave one beside those accepted::

    prompt eval time =     648.99 ms /   133 tokens (    4.88 ms per token,   204.94 tokens per second)
           eval time =   30387.12 ms /  2048 tokens (   14.84 ms per token,    67.40 tokens per second)
          total time =   31036.11 ms /  2181 tokens
    draft acceptance rate = 0.98260 ( 1186 accepted /  1207 generated)

So its rounds are 2048 − 1186 − 1, marked as estimated: steps in which nothing was drafted are among them. Where that
line is not in the log, they are drafted / the draft length that is given, which is too few where drafts ended early.

llama.cpp's ``llama-speculative-simple`` and ``llama-speculative`` (``examples``), once, at their end; every round gave
one token beside those accepted, so that rounds are n_predict − n_accept::

    n_draft   = 16
    n_predict = 257
    n_drafted = 304
    n_accept  = 190
    accept    = 62.500%

Everywhere τ is the mean of tokens emitted a round by one request, the bonus included. Rates by position are
unconditional where printed: accepted at position i / all rounds.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from datetime import datetime
from typing import Any, BinaryIO, NamedTuple

import numpy as np
from numpy.typing import NDArray

__all__ = ["MOST_POSITIONS", "SOURCES", "FileCounts", "FileReader", "Floats", "Rows", "blocks"]

SOURCES = ("vLLM", "vLLM V0", "counters", "SGLang", "llama.cpp")
"""Who wrote a window; "counters" are Prometheus counters of vLLM or llama.cpp."""

Floats = NDArray[np.float64]

LONGEST_LINE = 1 << 20  # what is longer, such as a file that is no text, is passed over in pieces
LOOK_BACK = 1 << 12  # bytes kept of the block before, where a line's neighbour may stand
HEAD = 1 << 23  # bytes at the start in which an engine prints its configuration
MOST_POSITIONS = 64
HIGHEST_COUNT = 1e15
MOST_SERIES = 10_000  # samples of one scrape, and label sets remembered
LONGEST_LABELS = 1 << 12
OUT_OF_ORDER = 1 / 12  # of a day or a year: how far back a stamp goes before it is one of the next
LONGEST_PREFIX = 1 << 11  # bytes in front of a message in which a time stamp is looked for


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


def blocks(file: BinaryIO, block_bytes: int) -> Iterator[tuple[bytes, int]]:
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
    rb"draft acceptance(?: rate)? = (?:\d\.\d{5}|-?nan) \( *(\d{1,15}) accepted / *(\d{1,15}) generated\)"
    rb"(?:, mean (?:acceptance length|len) = *(\d{1,9}\.\d\d)"
    rb"(?:, acceptance rate per position = \((" + _RATES + rb")?\))?)?"
)
_LLAMA_TOKENS = re.compile(rb"(?<!prompt )eval time = *\d[\d.]* ms / *(\d{1,15}) tokens")
_LLAMA_ABOVE = 1 << 10  # bytes above a request's line in which its tokens are looked for: some four lines
_LLAMA_SUMMARY = re.compile(rb"n_accept += (\d{1,15})\b")
_LLAMA_PREDICTED = re.compile(rb"n_predict += (\d{1,15})\b[^\0]*n_drafted += (\d{1,15})\b")
_LLAMA_RATES = re.compile(rb"acc per pos = \((" + _RATES + rb")\)")
_COUNTERS = (
    b"vllm:spec_decode_num_",
    b"vllm:num_requests_running",
    b"llamacpp:spec_decode_num_",
    b"llamacpp:requests_processing",
)
_SAMPLE = re.compile(  # its figures may be damaged
    rb"(vllm|llamacpp):(spec_decode_num_(?:drafts|draft_tokens|accepted_tokens|accepted_tokens_per_pos)"
    rb"|num_requests_running|requests_processing)(?:_total)?(?=[{ ])"
    rb"(?:\{((?:[^\n\"}]++|\"(?:[^\n\"\\]++|\\.)*+\")*+)\})?"
    rb"(?: (\d[\d.]*(?:[eE][+-]?\d{1,3})?)(?: (\d{1,15}))?[ \r]*\n)?"
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
        self.latest: dict[float, float] = {}  # by period

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
        # the first such time that is not far before the latest: lines of several processes are a little out of order
        latest = self.latest.get(period, at)
        at += period * np.ceil((latest - period * OUT_OF_ORDER - at) / period)
        self.latest[period] = max(latest, at)
        return float(at)


def _of_day(hours: bytes, minutes: bytes, seconds: bytes) -> float:
    return 3600 * int(hours) + 60 * int(minutes) + float(seconds.replace(b",", b"."))


class Rows(NamedTuple):
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

    def where(self, kept: NDArray[np.bool_]) -> Rows:
        """Return the rows that a mask picks."""
        return Rows(**{name: column[kept] for name, column in self._asdict().items()})


class FileReader:
    """One file on its way through: what is carried from block to block."""

    def __init__(self, add: Callable[[int, Rows], None], draft_length: int | None) -> None:
        self.add = add
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
        self.after_llama = 0  # offset behind its line: what stands before that says nothing of the next request

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
        return FileCounts(name, self.bytes, self.lines, self.recognised, self.damaged)

    def _hits(
        self, block: bytes, start: int, marker: bytes, pattern: re.Pattern[bytes]
    ) -> list[tuple[int, int, int, re.Match[bytes] | None]]:
        """Each line that has the marker: its number, where it begins, where the marker is, and the match there."""
        found, at = [], block.find(marker, start)
        while at >= 0:
            found.append(at)
            at = block.find(marker, at + len(marker))
        if not found:
            return []
        places = np.array(found)
        ends = start + np.flatnonzero(np.frombuffer(block, np.uint8)[start:] == ord("\n"))
        line = np.searchsorted(ends, places)
        begins = np.maximum(np.append(start, ends + 1)[line], places - LONGEST_PREFIX)
        first = np.diff(line, prepend=-1) > 0  # of several in a line
        at_once = ((self.lines + 1 + line)[first].tolist(), begins[first].tolist(), places[first].tolist())
        return [(number, begin, at, pattern.match(block, at)) for number, begin, at in zip(*at_once, strict=True)]

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
        rows = Rows(
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
        self.add(source, rows.where(kept))

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
            rows = Rows(
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
        self.add(1, rows.where(kept))

    def _read_counters(self, block: bytes, start: int) -> None:
        hits = [hit for marker in _COUNTERS for hit in self._hits(block, start, marker, _SAMPLE)]
        ended, read_clock = [], self.clocks[2].read
        for line, begin, at, match in sorted(hits, key=lambda hit: hit[0]):
            if match is None or b"#" in block[begin:at]:
                continue  # a comment, or the time at which a counter was made
            engine, name, labels, value, stamp = match.groups()
            by_position = _POSITION.search(labels or b"") is not None
            number = float(value) if value and value.count(b".") <= 1 else np.inf
            if by_position != name.endswith(b"_per_pos") or len(labels or b"") > LONGEST_LABELS:
                self.damaged += 1
                continue
            seconds = int(stamp) / 1e3 if stamp else read_clock(block[begin:at])
            known = number <= HIGHEST_COUNT
            scrape = self.scrapes.add(line, seconds, engine, name, labels or b"", number if known else np.nan)
            self.recognised += known
            self.damaged += not known
            if scrape is not None:
                ended.append(scrape)
        self._add_counters(ended)

    def _add_counters(self, scrapes: list[_Difference]) -> None:
        for d in scrapes:
            if d.accepted > d.drafted:
                self.recognised, self.damaged = self.recognised - 1, self.damaged + 1
                continue
            if not (d.drafted > 0 and d.accepted >= 0):
                continue
            rates = d.accepted_at[None] / d.rounds if d.rounds > 0 else np.zeros((1, 0))
            rows = Rows(
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
            self.add(2, rows)

    def _read_sglang(self, block: bytes, start: int) -> None:
        found, read_clock = [], self.clocks[3].read
        for line, begin, at, match in self._hits(block, start, b"accept len: ", _SGLANG):
            message = block.find(b"Decode batch", begin, at)
            if message < 0:
                continue  # about something else
            running = _SGLANG_RUNNING.match(block, message)
            if match is None or running is None or float(match[1]) < 1:
                self.damaged += 1
                continue
            found.append((line, read_clock(block[begin:message]), running[1], match[1], match[2]))
        if not found:
            return
        self.recognised += len(found)
        lines, stamps, at_once, mean, rate = zip(*found, strict=True)
        tau, requests = _floats(mean), _floats(at_once)
        rounds = self._in_force("interval", lines) * requests
        rows = Rows(
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
        self.add(3, rows.where(requests > 0))

    def _read_llama(self, block: bytes, start: int) -> None:
        hits = [*self._hits(block, start, b"draft acceptance", _LLAMA)]
        hits += [hit for hit in self._hits(block, start, b"n_accept ", _LLAMA_SUMMARY) if hit[3]]
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
            nearest = max(self.after_llama - self.offset + start, begin - _LLAMA_ABOVE, 0)
            self.after_llama = self.offset - start + at
            figures = None if match is None else _llama_figures(match, block[nearest:begin])
            if figures is None and match is not None:
                continue  # of llama-lookahead, which drafts nothing
            if figures is None or int(figures[2]) > int(figures[3]):
                self.damaged += 1
                continue
            if self.request is not None:
                done.append(self.request)
            self.request = [line, self.clocks[4].read(block[begin:at]), *figures]
        self._add_llama(done)

    def _add_llama(self, requests: list[list[Any]]) -> None:
        if not requests:
            return
        line, seconds, tokens, exact, accepted, drafted, mean, printed = zip(*requests, strict=True)
        rates, lengths = _rates(printed)
        figures = _Figures(
            accepted=_floats(accepted),
            drafted=_floats(drafted),
            mean=_floats(mean),
            lengths=lengths,
            depth=np.full(len(line), np.nan),
            sums=np.where(lengths > 0, np.nansum(rates, axis=1), np.nan),
        )
        rounds, estimated, good = _rounds_of(figures, self.draft_length or 0)
        steps = _array(tokens) - figures.accepted  # None is NaN
        counted = np.isnan(figures.mean) & (steps > 0)
        rounds, estimated = np.where(counted, steps, rounds), np.where(counted, ~np.array(exact), estimated)
        self.recognised += int(good.sum())
        self.damaged += int((~good).sum())
        running = np.full(len(line), np.nan)
        self._add_printed(4, good & (figures.drafted > 0), line, seconds, running, figures, rates, rounds, estimated)


def _llama_figures(match: re.Match[bytes], above: bytes) -> tuple[Any, ...] | None:
    """Tokens of the rounds, whether these are exact, accepted, drafted, mean, rates; None without n_drafted."""
    if match.re is _LLAMA:
        found = _LLAMA_TOKENS.findall(above)
        return (int(found[-1]) - 1 if found else None, False, *match.groups())  # the first token is the prompt's
    predicted = _LLAMA_PREDICTED.search(above)
    return None if predicted is None else (int(predicted[1]), True, match[1], predicted[2], None, None)


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


_TOTALS = {b"drafts", b"draft_tokens", b"accepted_tokens"}
_GAUGES = {b"num_requests_running", b"requests_processing"}


class _Difference(NamedTuple):
    """What was counted between two scrapes."""

    line: int
    seconds: float
    running: float
    rounds: float  # 0: not known
    drafted: float  # NaN: not known
    accepted: float  # NaN: not known
    accepted_at: Floats


class _Scrapes:
    """Prometheus counters, scrape after scrape."""

    def __init__(self) -> None:
        self.last: dict[bytes, dict[bytes, float]] = {}  # counters of each label set so far, by name and position
        self.now: dict[bytes, dict[bytes, float]] = {}
        self.line, self.seconds = 0, np.nan
        self.size = 0

    def add(
        self, line: int, seconds: float, engine: bytes, name: bytes, labels: bytes, value: float
    ) -> _Difference | None:
        """Take in a sample, NaN if it is damaged; if another scrape begins, return what the one before comes to."""
        position = _POSITION.search(labels)
        series = engine + _POSITION.sub(b"", labels).strip(b",")
        key = name.removeprefix(b"spec_decode_num_") + (b"" if position is None else b" %d" % int(position[1]))
        ended = None
        if key in self.now.get(series, ()):
            ended = self.close()
        if not self.size:
            self.line, self.seconds = line, seconds
        if self.size < MOST_SERIES and (position is None or int(position[1]) < MOST_POSITIONS):
            self.now.setdefault(series, {})[key] = value
            self.size += 1
        return ended

    def close(self, *, last: bool = False) -> _Difference | None:
        """End a scrape."""
        now, self.now, self.size = self.now, {}, 0
        if all(values.keys() <= _GAUGES for values in now.values()):
            return None
        alone = last and not self.last
        total: dict[bytes, float] = {}
        for series, values in now.items():
            counters = {key: value for key, value in values.items() if key not in _GAUGES and not np.isnan(value)}
            for key, value in (counters if alone else self._since(series, counters)).items():
                total[key] = total.get(key, 0.0) + value
        while len(self.last) > MOST_SERIES:
            del self.last[next(iter(self.last))]  # not seen for the longest time
        running = [values[key] for values in now.values() for key in values.keys() & _GAUGES]
        accepted_at = {int(key.rpartition(b" ")[2]): value for key, value in total.items() if b"per_pos" in key}
        return _Difference(
            line=self.line,
            seconds=self.seconds,
            running=sum(running) if running else np.nan,
            rounds=total.get(b"drafts", 0.0),
            drafted=total.get(b"draft_tokens", np.nan),
            accepted=total.get(b"accepted_tokens", np.nan),
            accepted_at=_array([accepted_at.get(i, 0.0) for i in range(max(accepted_at, default=-1) + 1)]),
        )

    def _since(self, series: bytes, counters: dict[bytes, float]) -> dict[bytes, float]:
        """What a label set has counted since it was seen before; nothing where that cannot be told."""
        old = self.last.get(series, {})
        if _TOTALS & old.keys() - counters.keys():
            return {}  # a damaged line: the next scrape that has them all is compared with the last that had
        reset = any(value < old.get(key, 0.0) for key, value in counters.items())
        self.last.pop(series, None)  # the last that was seen goes to the end
        self.last[series] = counters if reset else old | counters
        if reset:
            return counters
        if _TOTALS & counters.keys() - old.keys():  # some have nothing to be compared with
            return {}
        return {key: value - old[key] for key, value in counters.items() if key in old}


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
