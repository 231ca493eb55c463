"""One target, fuzzed until a number of bytes has gone through it: with atheris, guided by coverage, or at random."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

CASE_SECONDS = 20
"""Processor time after which an input is taken to hang."""
MOST_CRASHES = 20
"""Where a target is left: with more, the first few are enough to look at."""


class Hang(BaseException):
    """An input took too long; not an ``Exception``, which a target may turn into a documented error."""


@dataclass
class Tally:
    """What came of a target's inputs."""

    target: str
    engine: str = "random"
    cases: int = 0
    bytes: int = 0
    seconds: float = 0.0
    outcomes: Counter[str] = field(default_factory=Counter)
    crashes: dict[str, str] = field(default_factory=dict)

    @property
    def errors(self) -> int:
        """Inputs that ended in a documented error."""
        return self.cases - self.outcomes["ok"] - self.outcomes["crash"]

    def as_json(self) -> str:
        """As a line that the parent process reads."""
        return json.dumps(vars(self) | {"outcomes": dict(self.outcomes)})


@contextlib.contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise :class:`Hang` where the block takes that much processor time."""

    def stop(*_: Any) -> None:
        raise Hang(f"took more than {seconds:g} s of processor time")

    before = signal.signal(signal.SIGVTALRM, stop)
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


def try_one(target: Any, data: bytes, seconds: float = CASE_SECONDS) -> tuple[str, str]:
    """Outcome of a target on an input and, of a crash, its traceback."""
    from ddtree.property_tests.project.fuzz.targets import checked

    folder = Path(tempfile.mkdtemp(prefix="fuzz-"))
    try:
        with time_limit(seconds), warnings.catch_warnings():
            warnings.simplefilter("error")  # as in the tests: a warning is something that nobody documented
            return checked(target, data, folder), ""
    except (Exception, Hang):
        return "crash", traceback.format_exc()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


class Fuzzer:
    """Feeds a target, counts, and keeps what crashes it."""

    def __init__(self, target: Any, budget: int, crashes: Path, on_case: Callable[[Tally], None]) -> None:
        self.target, self.budget, self.crashes, self.on_case = target, budget, crashes, on_case
        self.tally, self.began, self.seen = Tally(target.name), time.monotonic(), set[str]()

    @property
    def done(self) -> bool:
        return self.tally.bytes >= self.budget or len(self.tally.crashes) >= MOST_CRASHES

    def feed(self, data: bytes) -> str:
        """One input."""
        outcome, told = try_one(self.target, data)
        tally = self.tally
        tally.cases += 1
        tally.bytes += len(data)
        tally.outcomes[outcome] += 1
        tally.seconds = round(time.monotonic() - self.began, 1)
        if outcome == "crash":
            self._keep(data, told)
        self.on_case(tally)
        return outcome

    def _keep(self, data: bytes, told: str) -> None:
        """The first input of each kind of crash: of one place in the code and one kind of exception."""
        lines = told.strip().splitlines()
        places = [line.strip() for line in lines if line.strip().startswith("File ") and "/ddtree/" in line]
        kind = f"{places[-1] if places else ''} {lines[-1].partition(':')[0]}"
        if kind in self.seen:
            return
        self.seen.add(kind)
        self.crashes.mkdir(parents=True, exist_ok=True)
        path = self.crashes / f"{self.target.name}-{hashlib.sha256(data).hexdigest()[:12]}"
        path.write_bytes(data)
        self.tally.crashes[str(path)] = lines[-1][:300]


def at_random(fuzzer: Fuzzer, seed: int) -> Tally:
    """Seeds, then mutations of mutations, of which those with a rarer outcome stay."""
    from ddtree.property_tests.project.fuzz.mutations import any_bytes

    rng, target = Random(f"{seed} {fuzzer.target.name}"), fuzzer.target
    mutate, pool = any_bytes(rng), list(target.seeds())
    first = len(pool)
    for data in pool:
        if not fuzzer.done:
            fuzzer.feed(data)
    while not fuzzer.done:
        data = target.mutate(rng.choice(pool), target.largest, rng, mutate)
        if fuzzer.feed(data) == "ok" and len(pool) < 4 * first + 64:
            pool.append(data)
    return fuzzer.tally


def with_atheris(fuzzer: Fuzzer, seed: int, work: Path, finish: Callable[[], None]) -> None:
    """LibFuzzer's loop, which does not return: ``finish`` ends the process."""
    import atheris

    target, corpus = fuzzer.target, work / "corpus"
    corpus.mkdir(parents=True)
    for i, data in enumerate(target.seeds()):
        (corpus / f"{i:04}").write_bytes(data)
    fuzzer.tally.engine = "atheris"

    def one(data: bytes) -> None:
        fuzzer.feed(data)
        if fuzzer.done:
            finish()

    def mutated(data: bytes, largest: int, number: int) -> bytes:
        rng = Random(number)
        return bytes(target.mutate(bytes(data), largest, rng, lambda d, n: bytes(atheris.Mutate(d, n)) if n else b""))

    options = [f"-seed={seed + 1}", f"-max_len={target.largest}", "-len_control=0", "-timeout=0", "-rss_limit_mb=0"]
    options += [f"-artifact_prefix={fuzzer.crashes}/{target.name}-", "-verbosity=0", "-reload=0"]
    atheris.Setup(["fuzz", *options, str(corpus)], one, custom_mutator=mutated, internal_libfuzzer=True)
    atheris.Fuzz()


def main(arguments: list[str]) -> None:
    """``worker TARGET BYTES SEED CRASHES ENGINE``: a line of JSON now and then, and at the end."""
    name, budget, seed, crashes, engine = arguments
    from ddtree.property_tests.project.fuzz.targets import TARGETS

    last = time.monotonic()

    def report(tally: Tally) -> None:
        nonlocal last
        if time.monotonic() - last > 2:
            last = time.monotonic()
            print(tally.as_json(), file=sys.__stdout__, flush=True)

    fuzzer = Fuzzer(TARGETS[name], int(budget), Path(crashes), report)

    def finish() -> None:
        print(fuzzer.tally.as_json(), file=sys.__stdout__, flush=True)
        shutil.rmtree(work, ignore_errors=True)
        os._exit(0)

    work = Path(tempfile.mkdtemp(prefix="fuzz-work-"))
    if engine == "atheris":
        # the first half from sound inputs: what new coverage keeps is mostly unsound, and so are its mutations
        fuzzer.budget //= 2
        at_random(fuzzer, int(seed))
        fuzzer.budget = int(budget)
        with_atheris(fuzzer, int(seed), work, finish)
    at_random(fuzzer, int(seed))
    finish()
