"""``python -m ddtree.analysis.soak --backend cupy``: many random rounds, none of which may be wrong or leave a trace.

Engines of several plans decode random requests in ragged batches, with random drafts, stops and lengths, greedily and
sampled. Every request's tokens are compared with autoregressive ones. Between runs something is made to fail in the
middle of one, after which the engine must go on as before; and memory, of the host and of the GPU, must not grow.

A round is one of a whole batch. Where an engine does not show its rounds, the fewest that they can be are counted.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import json
import math
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import click
import numpy as np
from numpy.typing import NDArray
from rich import box
from rich.console import Console
from rich.table import Table

from ddtree.analysis.environment import commit, devices, kernel_sources, versions
from ddtree.analysis.margins import BOUNDS, Difference, HeldWeights, Sampling, first_differences
from ddtree.analysis.outputs import make_folder
from ddtree.analysis.progress import progress_bar
from ddtree.analysis.verify_on_gpu import prepare_for_sanitizer, sanitizer_path, start_sanitizer
from ddtree.arrays import array_kind, array_namespace
from ddtree.backends import BACKENDS
from ddtree.checks import INT32_MAX, integer
from ddtree.drafters import NgramDrafter
from ddtree.engine import Engine, Generation, NonFiniteLogitsError
from ddtree.kdtr import atomic_write
from ddtree.model import DeepseekV3, ModelConfig, golden_bundle, load_model, random_weights
from ddtree.protocols import DraftContext, ResidentState

__all__ = ["Growth", "Record", "WildDrafter", "fit_growth", "soak"]

PLANS = ((3, 4), (7, 16), (7, 64))
"""Depth and budget of the engines."""

BATCH = 8
SAMPLINGS = (Sampling(), Sampling(0.8, 0.95, 11))
MOST_PROMPT, MOST_NEW = 80, 48
TEXTS = 48
"""Prompts whose autoregressive tokens are known at a time."""
RENEWED = 40
"""Runs after which all of them are others."""
MOST_WAITED = 24
MOST_FAULTS = 50
"""Faults after which a soak stops: a device that has failed once may do nothing right any more."""
WRITTEN_EVERY = 50
"""Runs after which the record is written."""
FAULT_EVERY = 5
"""Runs from one that something fails in to the next."""
WARM_UP = 8
"""Runs of each engine before memory is judged: by then it keeps as many loops as it ever will."""
FAULTS = ("drafter raises", "draft of NaN", "draft over 0", "logits of NaN")

RANDOM = {
    "vocab_size": 1024, "hidden_size": 128, "intermediate_size": 256, "moe_intermediate_size": 64,
    "num_hidden_layers": 3, "first_k_dense_replace": 1, "num_attention_heads": 4, "num_key_value_heads": 4,
    "n_routed_experts": 8, "num_experts_per_tok": 2, "n_shared_experts": 1, "n_group": 1, "topk_group": 1,
    "kv_lora_rank": 64, "q_lora_rank": 64, "qk_nope_head_dim": 32, "qk_rope_head_dim": 16, "v_head_dim": 32,
    "max_position_embeddings": 512,
}  # fmt: skip
"""Configuration of the random model."""


class InjectedError(RuntimeError):
    """What a drafter raises when it is told to."""


# Drafts


@dataclass(frozen=True)
class _DraftTable:
    """Random drafts as distances from the truth: 0 at the rank of the truth, if it is drafted."""

    log_probs: Any  # float32 (T, L, K)
    offsets: Any  # int32 (T, L, K)
    whole: NDArray[np.float32]  # what log_probs are where they have not been spoilt, on the host


class WildDrafter:
    """Drafts at random: the truth at some rank with some probability, ties, short rows, depths without a candidate.

    What is drafted follows from how many tokens are committed, and is the same on the host and on the device.

    Parameters
    ----------
    vocab_size : int
        V.
    seed : int
        Of the drafts.
    right : float
        Probability that the truth is among a depth's candidates.

    Attributes
    ----------
    texts : mapping of int to array, int32, shape (n,)
        Prompt and continuation of each request of the next run; to be set before it.
    failing : bool
        Raise at the next draft on the host, or at the next request that begins on the device.
    """

    rows = 256
    """Drafts that there are, a power of two."""

    def __init__(self, vocab_size: int, *, seed: int = 0, right: float = 0.75) -> None:
        self.vocab_size, self.seed, self.right = vocab_size, seed, right
        self.texts: Mapping[int, NDArray[np.int32]] = {}
        self.failing = False
        self._tables: dict[tuple[int, int, str], _DraftTable] = {}

    def __call__(self, context: DraftContext, depth: int, topk: int) -> tuple[Any, Any]:
        """Draft on the host."""
        self._fail_if_told()
        table = self.table(np, depth, topk)
        texts = [self.texts[request] for request in context.request_ids]
        lengths = np.array([len(tokens) for tokens in context.tokens], np.int32)
        truth = np.zeros((len(texts), depth), np.int32)
        for row, text, length in zip(truth, texts, lengths.tolist(), strict=True):
            known = text[length : length + depth]
            row[: len(known)] = known
        return drafts_around(table, truth, lengths, self.vocab_size)

    def open_resident(self, state: ResidentState, depth: int, topk: int) -> _ResidentWild:
        """Draft where the state is."""
        return _ResidentWild(self, state, depth, topk)

    def begin(self, request: int) -> NDArray[np.int32]:
        """The text of a request that begins on the device."""
        self._fail_if_told()
        return self.texts[request]

    def table(self, xp: Any, depth: int, topk: int) -> _DraftTable:
        """The drafts of a depth and width, made once for each kind of array."""
        key = depth, topk, str(xp.__name__)
        if key not in self._tables:
            rng = np.random.default_rng([self.seed, depth, topk])
            log_probs, offsets = _random_drafts(rng, (self.rows, depth, topk), self.vocab_size, self.right)
            self._tables[key] = _DraftTable(xp.array(log_probs), xp.asarray(offsets), log_probs)
        return self._tables[key]

    def spoil(self, value: float) -> None:
        """Give the first candidate of every draft at every depth this log-prob, on the host and on the device."""
        for table in self._tables.values():
            table.log_probs[:, :, 0] = value

    def mend(self) -> None:
        """Make all drafts what they were."""
        for table in self._tables.values():
            table.log_probs[...] = array_namespace(table.log_probs).asarray(table.whole)

    def _fail_if_told(self) -> None:
        if self.failing:
            self.failing = False
            raise InjectedError("the drafter was told to raise")


class _ResidentWild:
    """A :class:`WildDrafter` at work on slots."""

    def __init__(self, drafter: WildDrafter, state: ResidentState, depth: int, topk: int) -> None:
        self.drafter, self.state, self.xp = drafter, state, array_namespace(state.tokens)
        self.drafts = drafter.table(self.xp, depth, topk)
        slots, room = state.tokens.shape
        self.texts = self.xp.zeros((slots, room + depth), np.int32)
        # where each slot's first draft stands in the flat texts, less its length
        self.places = self.xp.arange(slots, dtype=np.int32)[:, None] * (room + depth) + self.xp.arange(
            depth, dtype=np.int32
        )

    def draft(self) -> tuple[Any, Any]:
        """Draft for every slot; a free one's are nonsense."""
        truth = self.texts.reshape(-1)[self.places + self.state.lengths[:, None]]
        return drafts_around(self.drafts, truth, self.state.lengths, self.drafter.vocab_size)

    def begin(self, slot: int, request: int, tokens: Any, prompt_len: int, hidden_states: dict[int, Any]) -> None:
        """Take in a request's text."""
        text = self.drafter.begin(request)[: self.texts.shape[1]]
        self.texts[slot, : len(text)] = self.xp.asarray(text)

    def end(self, slot: int) -> None:
        """Leave the text there: nobody reads it."""


class _OnHost:
    """A drafter that is asked on the host alone, whatever else it can do."""

    def __init__(self, drafter: WildDrafter) -> None:
        self.drafter, self.vocab_size = drafter, drafter.vocab_size

    def __call__(self, context: DraftContext, depth: int, topk: int) -> tuple[Any, Any]:
        return self.drafter(context, depth, topk)


def drafts_around(table: _DraftTable, truth: Any, lengths: Any, vocab_size: int) -> tuple[Any, Any]:
    """The draft of each request: the row of the table that its length chooses, around its true tokens (B, L)."""
    at = lengths * 37 % len(table.log_probs)
    return table.log_probs[at], (truth[:, :, None] + table.offsets[at]) % vocab_size


def _random_drafts(
    rng: np.random.Generator, shape: tuple[int, int, int], vocab_size: int, right: float
) -> tuple[NDArray[np.float32], NDArray[np.int32]]:
    log_probs, offsets = np.full(shape, -np.inf, np.float32), np.zeros(shape, np.int32)
    most = min(shape[2], vocab_size - 1)
    for t, d in np.ndindex(*shape[:2]):
        # distinct in any event, also behind a row's end
        others = 1 + rng.choice(min(vocab_size - 1, 4 * shape[2]), most, replace=False)
        row = offsets[t, d]
        row[:most], row[most:] = others[: shape[2]], 0
        if rng.random() < right:
            row[min(int(rng.geometric(0.7)) - 1, most - 1)] = 0
        count = 0 if rng.random() < 0.06 else int(rng.integers(1, most + 1))
        log_probs[t, d, :count] = -np.sort(rng.integers(0, 40, count)) / 8  # many ties
    return log_probs, offsets


# Requests


class _Texts:
    """Random prompts of one model, and their autoregressive tokens under every sampling, one request at a time."""

    def __init__(
        self, target: DeepseekV3, backend: str | None, rng: np.random.Generator, count: int, most_new: int
    ) -> None:
        self.engine = Engine(target, backend=backend, max_batch=1)
        self.vocab_size, self.rng, self.count, self.most_new = target.vocab_size, rng, count, most_new

    def renew(self) -> None:
        """Draw other prompts."""
        lens = self.rng.integers(1, MOST_PROMPT + 1, self.count)
        self.prompts = [self.rng.integers(0, self.vocab_size, n).astype(np.int32) for n in lens]
        self.keys = self.rng.integers(0, 2**63 - 1, self.count).tolist()
        self.tokens = {
            sampling: self.engine.generate(
                self.prompts, self.most_new, mode="autoregressive", request_ids=self.keys, **asdict(sampling)
            ).tokens
            for sampling in SAMPLINGS
        }


@dataclass
class _Run:
    """The arguments of a run, and what must come out of it."""

    chosen: list[int]
    prompts: list[NDArray[np.int32]]
    keys: list[int]
    stops: list[int]
    most: int
    sampling: Sampling
    expected: list[NDArray[np.int32]]


def _draw(texts: _Texts, rng: np.random.Generator) -> _Run:
    """Some of the prompts, more than a batch, with or without stops that some of them meet."""
    sampling = SAMPLINGS[int(rng.integers(len(SAMPLINGS)))]
    chosen = rng.integers(0, texts.count, int(rng.integers(1, 3 * BATCH + 1))).tolist()
    most = int(rng.integers(1, texts.most_new + 1))
    known = [texts.tokens[sampling][i][:most] for i in chosen]
    every = np.concatenate(known)
    stops = sorted({int(token) for token in rng.choice(every, 2)}) if rng.random() < 0.5 else []
    return _Run(
        chosen,
        [texts.prompts[i] for i in chosen],
        [texts.keys[i] for i in chosen],
        stops,
        most,
        sampling,
        [_cut(row, stops) for row in known],
    )


def _cut(tokens: NDArray[np.int32], stops: list[int]) -> NDArray[np.int32]:
    met = np.flatnonzero(np.isin(tokens, stops))
    return tokens[: met[0] + 1] if met.size else tokens


# Memory


@dataclass(frozen=True)
class Growth:
    """A line through samples of memory after warm-up.

    Attributes
    ----------
    level, grown, allowed : float
        MiB: the mean, what the line rises from the first sample to the last, and the most that it may.
    judged : bool
        Whether there were enough samples for a line to mean something.
    """

    level: float
    grown: float
    allowed: float
    judged: bool

    @property
    def held(self) -> bool:
        """Whether memory did not grow, as far as that can be said."""
        return not self.judged or self.grown <= self.allowed


ALLOWED_MIB, ALLOWED_SHARE, JUDGED_SAMPLES, MOST_ALIKE = 8.0, 0.01, 40, 0.9


def fit_growth(rounds: list[int], mib: list[float], graphs: list[int], warm_up: int = 0) -> Growth:
    """Fit a line to the samples after warm-up; it may rise by 8 MiB, or by 1 % where that is more.

    Engines keep a bounded number of captured rounds and passes, which takes long to be reached: what each of them takes
    is fitted beside the line, so that only what rises without them is growth. An allocator may keep what one that is
    gone has left: so it is their number or the most there have been, whichever explains the samples best. While they
    still rise as evenly as the rounds, the two cannot be told apart, and nothing is judged. Warm-up is ``warm_up``
    samples, and a quarter of all in any event.
    """
    start = max(warm_up, len(rounds) // 4)
    most = np.maximum.accumulate(np.asarray(graphs, np.float64)) if graphs else graphs
    x, y, now, ever = (np.asarray(column, np.float64)[start:] for column in (rounds, mib, graphs, most))
    level = float(y.mean()) if len(y) else 0.0
    allowed = max(ALLOWED_MIB, ALLOWED_SHARE * level)
    if len(y) < JUDGED_SAMPLES or x[0] == x[-1]:
        return Growth(level, 0.0, allowed, False)
    line = (x - x[0]) / (x[-1] - x[0])
    fits = [_fit(line, y, None)]
    for kept in (now, ever):
        if kept.std() == 0:
            continue
        alike = float(np.corrcoef(line, kept)[0, 1])
        if alike > MOST_ALIKE:
            return Growth(level, 0.0, allowed, False)
        if alike > -MOST_ALIKE:  # a graph that is gone takes nothing
            fits.append(_fit(line, y, kept))
    _, grown = min(fit for fit in fits if fit is not None)
    return Growth(level, grown, allowed, True)


def _fit(line: NDArray[Any], y: NDArray[Any], kept: NDArray[Any] | None) -> tuple[float, float] | None:
    """How far a line, with what graphs take, is from the samples, and what it rises; None if graphs give memory."""
    columns = [line, np.ones_like(line)]
    if kept is not None:
        columns.append((kept - kept.mean()) / kept.std())
    of_columns = np.stack(columns, axis=1)
    found = np.linalg.lstsq(of_columns, y, rcond=None)[0]
    if kept is not None and found[2] < 0:
        return None
    return float(np.square(y - of_columns @ found).sum()), float(found[0])


class _Memory:
    """Samples of what the host and the GPU have given out, in MiB."""

    def __init__(self, on_gpu: bool) -> None:
        self.cupy = importlib.import_module("cupy") if on_gpu else None
        self.rounds: list[int] = []
        self.graphs: list[int] = []
        self.series: dict[str, list[float]] = {"host": []}
        if on_gpu:
            self.series |= {"GPU": [], "GPU arrays": []}

    def sample(self, rounds: int, engines: Iterable[Engine]) -> None:
        gc.collect()
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if os.name == "posix" else None
        if trim is not None:
            trim(0)  # pages that glibc's heap keeps though nobody has them are no growth
        self.rounds.append(rounds)
        loops = [loop for engine in engines for loop in engine.loops.all]
        self.graphs.append(sum(work.replay is not None for loop in loops for work in (loop, *loop.passes.values())))
        self.series["host"].append(_resident_bytes() / 2**20)
        if self.cupy is not None:
            free, total = self.cupy.cuda.runtime.memGetInfo()
            self.series["GPU"].append((total - free) / 2**20)
            self.series["GPU arrays"].append(self.cupy.get_default_memory_pool().used_bytes() / 2**20)


def _resident_bytes() -> int:
    statm = Path("/proc/self/statm")
    if statm.exists():
        return int(statm.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    import resource  # the most there ever was: it cannot shrink, but a leak shows

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


# The soak itself


@dataclass
class Record:
    """What a soak found.

    Attributes
    ----------
    settings, machine : dict
        How it was run, and where: devices, versions, commit and the hash of the backend's sources.
    rounds, runs, requests, tokens : int
        Of batches, calls of generate, requests, and new tokens that were compared.
    seconds : float
        Wall time.
    injected : dict of str to int
        Faults that were raised as they should be, by kind.
    differences : list of dict
        First differences that a tie explains.
    faults : list of str
        Everything that was wrong; none in a good soak.
    sampled_rounds : list of int
        When memory was looked at.
    memory : dict of str to list of float
        MiB then, by whose it is.
    graphs : list of int
        Captured rounds and passes that all engines kept then.
    growth : dict of str to dict
        The lines through these.
    sanitizer : dict of str to str
        What each of compute-sanitizer's tools said of a short soak; empty where it was not asked.
    """

    settings: dict[str, Any]
    machine: dict[str, Any]
    rounds: int = 0
    runs: int = 0
    requests: int = 0
    tokens: int = 0
    seconds: float = 0.0
    injected: dict[str, int] = field(default_factory=lambda: dict.fromkeys(FAULTS, 0))
    differences: list[dict[str, Any]] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)
    sampled_rounds: list[int] = field(default_factory=list)
    memory: dict[str, list[float]] = field(default_factory=dict)
    graphs: list[int] = field(default_factory=list)
    growth: dict[str, Any] = field(default_factory=dict)
    sanitizer: dict[str, str] = field(default_factory=dict)


@dataclass
class _Subject:
    """An engine, and who drafts for it."""

    name: str
    model: str
    engine: Engine
    drafter: WildDrafter | None


class _Soak:
    """Models, engines, and what was found so far."""

    def __init__(self, models: tuple[str, ...], record: Record, texts: int, most_new: int) -> None:
        given = record.settings
        self.record, self.dtype, self.backend = record, given["dtype"], given["backend"]
        self.rng = np.random.default_rng(given["seed"])
        self.exact: dict[str, DeepseekV3] = {}
        self.targets = {name: MODELS[name](self.dtype, self.backend) for name in models}
        on_gpu = any(array_kind(target.embedding) == "cupy" for target in self.targets.values())
        self.texts = {name: _Texts(t, self.backend, self.rng, texts, most_new) for name, t in self.targets.items()}
        self.memory = _Memory(on_gpu)
        self.subjects = [
            self._subject(name, depth, budget, kind)
            for name in self.targets
            for depth, budget in PLANS
            for kind in ("wild", "wild on the host", "n-gram")
        ]

    def _subject(self, model: str, depth: int, budget: int, kind: str) -> _Subject:
        target = self.targets[model]
        wild = None if kind == "n-gram" else WildDrafter(target.vocab_size, seed=budget)
        drafter: Any = NgramDrafter() if wild is None else _OnHost(wild) if kind == "wild on the host" else wild
        # small pieces of a prompt, and pages whose size no plan divides
        engine = Engine(
            target, drafter, depth=depth, budget=budget, backend=self.backend, max_batch=BATCH, page_size=7,
            prefill_chunk=32, resident=self.record.settings["resident"],
        )  # fmt: skip
        name = f"{model}, L {depth}, {budget} nodes, {kind}"
        return _Subject(name, model, engine, wild)

    def run(self, rounds: int, most_waited: int, show: Callable[[int], None]) -> None:
        """Run until so many rounds are done and each fault has been seen, as far as a short soak can wait for it."""
        while self.record.rounds < rounds or (0 in self.record.injected.values() and self.record.runs < most_waited):
            if self.record.runs % RENEWED == 0:
                for texts in self.texts.values():
                    texts.renew()
            subject = self.next_subject()
            run = _draw(self.texts[subject.model], self.rng)
            # until each fault has been seen before every run, then now and then
            if min(self.record.injected.values()) == 0 or self.record.runs % FAULT_EVERY == 0:
                possible = FAULTS if subject.drafter is not None else FAULTS[-1:]
                self.disturbed(subject, run, min(possible, key=lambda fault: self.record.injected[fault]))
            self.undisturbed(subject, run)
            self.record.runs += 1
            self.memory.sample(self.record.rounds, [subject.engine for subject in self.subjects])
            if len(self.record.faults) >= MOST_FAULTS:
                raise RuntimeError(f"{len(self.record.faults)} faults are enough")
            show(min(self.record.rounds, rounds))

    def growth(self) -> dict[str, Growth]:
        """The line through each series of memory."""
        memory, warm_up = self.memory, WARM_UP * len(self.subjects)
        return {
            name: fit_growth(memory.rounds, series, memory.graphs, warm_up) for name, series in memory.series.items()
        }

    def next_subject(self) -> _Subject:
        """Every engine once, then every engine once in another order: warm-up is over when each has been used."""
        at = self.record.runs % len(self.subjects)
        if at == 0:
            self.rng.shuffle(self.subjects)
        return self.subjects[at]

    def undisturbed(self, subject: _Subject, run: _Run) -> None:
        """A run whose tokens must be the expected ones."""
        shown: list[Any] = []
        # every second run shows its rounds, which costs a resident one its pace
        on_round = shown.append if self.record.runs % 2 else None
        try:
            generation = self.generate(subject, run, on_round=on_round)
        except Exception as error:
            self.record.faults.append(f"{subject.name}: raised {type(error).__name__}: {error}")
            return
        self.count(generation, len(shown))
        self.compare(subject, run, generation.tokens)
        for i, (tokens, reason) in enumerate(zip(generation.tokens, generation.finish_reasons, strict=True)):
            wanted = "stop" if len(tokens) and int(tokens[-1]) in run.stops else "length"
            if reason != wanted:
                self.record.faults.append(f"{subject.name}: request {i} finished by {reason!r}, should be {wanted!r}")

    def count(self, generation: Generation, shown: int) -> None:
        """Add a run's rounds, as shown or as few as they can have been, and its tokens."""
        rounds = [len(row) for row in generation.tokens_per_round]
        self.record.rounds += max(shown, max(rounds, default=0), math.ceil(sum(rounds) / BATCH))
        self.record.requests += len(generation.tokens)
        self.record.tokens += sum(map(len, generation.tokens))

    def generate(self, subject: _Subject, run: _Run, **watched: Any) -> Generation:
        """Decode a run's requests."""
        if subject.drafter is not None:
            known = self.texts[subject.model].tokens[run.sampling]
            whole = [np.concatenate([p, known[i]]) for p, i in zip(run.prompts, run.chosen, strict=True)]
            subject.drafter.texts = dict(enumerate(whole))
        return subject.engine.generate(
            run.prompts, run.most, run.stops, request_ids=run.keys, **asdict(run.sampling), **watched
        )

    def compare(self, subject: _Subject, run: _Run, tokens: list[NDArray[np.int32]]) -> None:
        """Note each request whose tokens are others, and whether a tie explains it."""
        differ = [i for i, (a, b) in enumerate(zip(tokens, run.expected, strict=True)) if a.tolist() != b.tolist()]
        for i in differ:
            found = self.explain(subject, run, i, tokens[i])
            if found.explained:
                self.record.differences.append(
                    {"engine": subject.name, "sampling": asdict(run.sampling), **asdict(found)}
                )
            else:
                self.record.faults.append(
                    f"{subject.name}: request {i} differs at new token {found.place}, {found.logits:.2g} deviations "
                    f"from a tie (router: {found.router:.2g})"
                )

    def explain(self, subject: _Subject, run: _Run, i: int, tokens: NDArray[np.int32]) -> Difference:
        """Where a request's tokens differ from the expected ones, as the exact model sees it."""
        if subject.model not in self.exact:
            self.exact[subject.model] = EXACT_MODELS[subject.model](self.dtype)
        (found,) = first_differences(
            self.exact[subject.model], [run.prompts[i]], [run.expected[i]], [tokens],
            dtype=self.dtype, sampling=run.sampling, request_ids=[run.keys[i]],
        )  # fmt: skip
        return found

    def disturbed(self, subject: _Subject, run: _Run, fault: str) -> None:
        """A run in whose middle something fails: the error must say so, and what was committed must be right."""
        try:
            with self.injected(subject, fault) as on_emission:
                generation = self.generate(subject, run, on_emission=on_emission)
        except (InjectedError, ValueError, NonFiniteLogitsError) as error:
            told = self.wrongly_told(subject, fault, error)
            if told:
                self.record.faults.append(f"{subject.name}: {fault}: {told}")
            else:
                self.record.injected[fault] += 1
            generation = getattr(error, "generation", Generation([], []))
            begun = [row[: len(c)] for row, c in zip(run.expected, generation.tokens, strict=False)]
            self.compare(subject, replace(run, expected=begun), generation.tokens)
        except Exception as error:
            self.record.faults.append(f"{subject.name}: {fault} raised {type(error).__name__}: {error}")
        else:  # all was decoded before it could show
            self.compare(subject, run, generation.tokens)

    @contextlib.contextmanager
    def injected(self, subject: _Subject, fault: str) -> Iterator[Callable[[Any], None]]:
        """Yield a function to be called with each emission, which after some of them lets the fault happen."""
        wait = int(self.rng.integers(0, 2 * BATCH))
        head, drafter = subject.engine.target.output_layer, subject.drafter  # type: ignore[union-attr]
        kept = head[0].copy()

        def happen() -> None:
            if fault == "logits of NaN":
                head[0].view(np.uint8).fill(0xFF)  # NaN in every type
            elif fault == "drafter raises" and drafter is not None:
                drafter.failing = True
            elif drafter is not None:
                drafter.spoil(math.nan if fault == "draft of NaN" else 1.0)

        left = iter(range(wait, -1, -1))

        def on_emission(emission: Any) -> None:
            if next(left, None) == 0:
                happen()

        try:
            yield on_emission
        finally:
            head[0].view(np.uint8)[...] = kept.view(np.uint8)
            if drafter is not None:
                drafter.failing = False
                drafter.mend()

    def wrongly_told(self, subject: _Subject, fault: str, error: Exception) -> str:
        """What is wrong with the error of an injected fault; empty if nothing is."""
        kinds = {"drafter raises": InjectedError, "logits of NaN": NonFiniteLogitsError}
        wanted = kinds.get(fault, ValueError)
        if not isinstance(error, wanted):
            return f"raised {type(error).__name__}: {error}"
        if not isinstance(getattr(error, "generation", None), Generation):
            return "the error has no generation"
        if wanted is not InjectedError and "request " not in str(error):
            return f"the message names no request: {error}"
        return ""


def soak(
    rounds: int = 20_000,
    *,
    backend: str | None = None,
    dtype: str = "float32",
    seed: int = 0,
    resident: bool | None = None,
    models: tuple[str, ...] = ("random", "golden"),
    texts: int = TEXTS,
    most_new: int | None = None,
    most_waited: int | None = None,
    written: Callable[[Record], Any] = lambda record: None,
) -> Record:
    """Run a soak, with a progress bar where somebody looks.

    Parameters
    ----------
    rounds : int
        Rounds of batches, 1 and up.
    backend : str, optional
        Who does the operations; its arrays decide where all of it happens.
    dtype : str
        Of the models.
    seed : int
        Of everything that is random.
    resident : bool, optional
        Of the engines, see :class:`ddtree.engine.Engine`.
    models : tuple of str
        "random", "golden", or both.
    texts : int
        Prompts whose autoregressive tokens are known at a time, 1 and up.
    most_new : int
        Tokens of each that are known, 2 and up, since the first comes of the prompt and takes no round: the most that a
        request is asked for; if left out 48.
    most_waited : int, optional
        Runs by which a soak ends that has done its rounds, though some fault could not be injected; if left out 24.
    written : callable
        Called with the record now and then, so that a soak that is killed leaves one.

    Returns
    -------
    Record
        ``faults`` is empty where nothing was wrong.
    """
    most_new = integer("most_new", MOST_NEW if most_new is None else most_new, 2, INT32_MAX)
    machine: dict[str, Any] = {"devices": devices(), "versions": {k: v for k, v in versions().items() if v}}
    machine["commit"] = commit()
    if backend in BACKENDS:
        machine |= kernel_sources(backend)
    settings = {"rounds": rounds, "backend": backend, "dtype": dtype, "seed": seed, "resident": resident}
    bound = BOUNDS[dtype]
    record = Record(settings | {"models": list(models), "bound": asdict(bound)}, machine)
    start = time.perf_counter()

    def settle() -> None:
        record.seconds = time.perf_counter() - start
        record.growth = {name: asdict(line) for name, line in running.growth().items()}

    def show_and_write(done: int) -> None:
        show(done)
        if record.runs % WRITTEN_EVERY == 0:
            settle()
            written(record)

    running = _Soak(models, record, texts, most_new)
    gc.freeze()  # what is there before is no growth, and need not be looked through at each sample
    record.sampled_rounds, record.memory, record.graphs = (
        running.memory.rounds,
        running.memory.series,
        running.memory.graphs,
    )
    with progress_bar("rounds", rounds) as show:
        try:
            running.run(rounds, MOST_WAITED if most_waited is None else most_waited, show_and_write)
        except Exception as error:  # what was found until then is not lost
            where = "".join(traceback.format_exception(error)[-4:])
            record.faults.append(f"the soak stopped in run {record.runs}: {type(error).__name__}: {error}\n{where}")
        finally:
            gc.unfreeze()
            settle()
    record.faults += [
        f"memory of the {name} grew by {line.grown:.1f} MiB, {line.allowed:.1f} MiB are allowed"
        for name, line in running.growth().items()
        if not line.held
    ]
    return record


def _random_model(dtype: str, backend: str | None) -> DeepseekV3:
    config = ModelConfig.from_dict(RANDOM)
    return DeepseekV3(config, random_weights(config, seed=1), dtype=dtype, backend=backend)


def _golden_model(dtype: str, backend: str | None) -> DeepseekV3:
    return load_model(golden_bundle(), dtype=dtype, backend=backend)


def _exact_random_model(dtype: str) -> DeepseekV3:
    """The random model in float64, with the weights that one of this type has."""
    config = ModelConfig.from_dict(RANDOM)
    return DeepseekV3(config, HeldWeights(random_weights(config, seed=1), dtype), dtype="float64")


MODELS: dict[str, Callable[[str, str | None], DeepseekV3]] = {"random": _random_model, "golden": _golden_model}
EXACT_MODELS: dict[str, Callable[[str], DeepseekV3]] = {
    "random": _exact_random_model,
    "golden": lambda dtype: _golden_model("float64", None),  # whose weights bfloat16 holds exactly
}


def exercise(tool: str, rounds: int, dtype: str) -> None:
    """What runs under a tool of compute-sanitizer: a short soak of the golden model on the GPU.

    Every launch takes many times as long there, so that few tokens are known, and no fault is waited for.
    """
    prepare_for_sanitizer(tool)
    record = soak(rounds, backend="cupy", dtype=dtype, models=("golden",), texts=2, most_new=8, most_waited=0)
    if record.faults:
        raise SystemExit("\n".join(record.faults))


def sanitized(record: Record, rounds: int, written: Callable[[Record], Any] = lambda record: None) -> None:
    """Have each tool of compute-sanitizer watch a short soak, and record what it says, each as soon as it is known."""
    code = f"from ddtree.analysis.soak import exercise; exercise('TOOL', {rounds}, {record.settings['dtype']!r})"
    runs = start_sanitizer(code)
    try:
        for tool, run in runs.items():
            told = run.communicate()[0]
            record.sanitizer[tool] = "found something" if run.returncode else "nothing found"
            if run.returncode:
                record.faults.append(f"compute-sanitizer {tool}:\n{told[-5000:]}")
            written(record)
    finally:
        for run in runs.values():
            run.kill()


def table_of(record: Record) -> Table:
    """What was done and found, for a terminal."""
    table = Table("", "", "", box=box.SIMPLE_HEAD, show_header=False)
    table.columns[1].justify = "right"
    pace = record.rounds / record.seconds if record.seconds else 0.0
    table.add_row("rounds", f"{record.rounds:,}", f"{pace:,.0f} a second, comparison included")
    table.add_row("requests", f"{record.requests:,}", f"in {record.runs:,} runs, up to {BATCH} at once")
    table.add_row("tokens compared", f"{record.tokens:,}", "with autoregressive ones, one request at a time")
    bound = record.settings["bound"]
    ties = (
        f"of two tokens within {bound['logits']:g} deviations of the logits, or two experts within {bound['router']:g}"
    )
    table.add_row("ties", f"{len(record.differences):,}", ties)
    for fault in FAULTS:
        table.add_row(f"injected: {fault}", f"{record.injected[fault]:,}", "raised, and the engine went on")
    for name, line in record.growth.items():
        grown = f"{line['grown']:+.1f} MiB" if line["judged"] else "-"
        why = (
            f"of {line['level']:,.0f} MiB; {line['allowed']:.0f} MiB are allowed"
            if line["judged"]
            else f"{record.memory[name][-1]:,.0f} MiB at the end; "
            + ("too few runs to judge by" if len(record.memory[name]) < JUDGED_SAMPLES else "not to be judged yet")
            + ": pass more --rounds"
        )
        table.add_row(f"memory, {name}", grown, why)
    for tool, told in record.sanitizer.items():
        table.add_row(f"compute-sanitizer, {tool}", "", told)
    table.add_row("faults", f"[bold {'red' if record.faults else 'green'}]{len(record.faults):,}", "")
    return table


def write_json(record: Record, folder: Path) -> Path:
    """Write ``soak.json`` into a folder, whole."""
    folder.mkdir(parents=True, exist_ok=True)
    with atomic_write(folder / "soak.json") as file:
        file.write((json.dumps(asdict(record), indent=1, ensure_ascii=False) + "\n").encode())
    return folder / "soak.json"


def write_record(record: Record, folder: Path) -> list[Path]:
    """Write ``soak.json`` and ``soak.svg`` into a folder, each whole; return their paths."""
    from ddtree.analysis import figures

    ax = figures.plot_memory(record.sampled_rounds, record.memory)
    return [write_json(record, folder), figures.save(ax, folder / "soak.svg")]


@click.command()
@click.option("--rounds", type=click.IntRange(1), default=20_000, show_default=True, help="Of batches.")
@click.option("--backend", metavar="NAME", help="Who does the operations; cupy is on the GPU.")
@click.option("--dtype", type=click.Choice(sorted(BOUNDS)), default="float32", show_default=True)
@click.option("--seed", type=click.IntRange(0), default=0, show_default=True)
@click.option("--resident/--not-resident", default=None, help="Of the engines; by default where the target allows it.")
@click.option(
    "--model", "models", type=click.Choice(sorted(MODELS)), multiple=True, default=tuple(MODELS), show_default=True
)
@click.option("--texts", type=click.IntRange(1), default=TEXTS, show_default=True, help="Prompts known at a time.")
@click.option(
    "--sanitize", type=click.IntRange(1), metavar="N", help="Also N rounds on the GPU under compute-sanitizer's tools."
)
@click.option(
    "--output", type=click.Path(path_type=Path, file_okay=False), metavar="DIR", help="Write JSON and figure."
)
def main(
    rounds: int,
    backend: str | None,
    dtype: str,
    seed: int,
    resident: bool | None,
    models: tuple[str, ...],
    texts: int,
    sanitize: int | None,
    output: Path | None,
) -> None:
    """Decode at random, for long, and exit with 1 if anything was wrong or memory grew."""
    from ddtree.backends import BackendUnavailable, get_backend

    console = Console(highlight=False, width=None if sys.stdout is not None and sys.stdout.isatty() else 120)
    if sanitize is not None:
        sanitizer_path()

    def keep(record: Record) -> None:
        if output is not None:
            write_json(record, output)

    try:
        if backend is not None:
            get_backend(backend)  # before there is a folder
        make_folder(output, names=("soak.json", "soak.svg"))
        record = soak(
            rounds, backend=backend, dtype=dtype, seed=seed, resident=resident, models=models, texts=texts,
            written=keep,
        )  # fmt: skip
    except (BackendUnavailable, ValueError) as error:
        raise click.UsageError(str(error)) from error
    if sanitize is not None:
        with console.status("compute-sanitizer"):
            sanitized(record, sanitize, keep)
    console.print(table_of(record))
    for fault in record.faults[:20]:
        console.print(fault, markup=False, soft_wrap=True)
    if output is not None:
        for path in write_record(record, output):
            console.print(f"wrote {path}", soft_wrap=True, markup=False)
    if record.faults:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
