"""A slice of the fuzzing in every run of the tests, and its own tests: what is planted in a target is found."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from ddtree.property_tests.project.fuzz import __main__ as command
from ddtree.property_tests.project.fuzz import targets, worker
from ddtree.property_tests.project.fuzz.targets import TARGETS, CrashError, Target
from ddtree.property_tests.project.fuzz.worker import Fuzzer, Tally, at_random, try_one

SLICE = {"kdtr": 200, "checkpoint": 100, "bundle": 60, "import": 80, "case": 40, "arguments": 40}
"""Inputs of each target: a second or so."""


def run(target: Target, cases: int, crashes: Path, seed: int = 0) -> Tally:
    """That many inputs at random."""

    def stop(tally: Tally) -> None:
        if tally.cases >= cases:
            fuzzer.budget = 0

    fuzzer = Fuzzer(target, 1 << 40, crashes, stop)
    return at_random(fuzzer, seed)


@pytest.mark.parametrize("name", TARGETS)
def test_what_parses_bytes_has_documented_errors_alone(name: str, tmp_path: Path) -> None:
    tally = run(TARGETS[name], SLICE[name], tmp_path)
    assert tally.crashes == {}
    assert tally.cases == SLICE[name]
    # neither all refused (nothing behind the first check would be met) nor all read
    assert tally.outcomes["ok"] >= 3
    assert tally.errors >= 3


@pytest.mark.parametrize("name", TARGETS)
def test_every_seed_is_sound(name: str) -> None:
    outcomes = [try_one(TARGETS[name], data) for data in TARGETS[name].seeds()]
    if name == "arguments":
        assert {outcome for outcome, _ in outcomes} == {
            "ok",
            "Error",
            "usage",
        }  # one verifies a damaged file, one replays no case
    else:
        assert set(outcomes) == {("ok", "")}


def planted(fault: str) -> Target:
    """The target of KDTR files with a fault on one input of its own kind in some."""

    def fails(data: bytes, folder: Path) -> str:
        if len(data) % 3 == 0:
            match fault:
                case "exception":
                    raise KeyError("x")
                case "hang":
                    while True:
                        pass
                case "memory":
                    bytearray(1 << 26)
                case "temporary file":
                    (folder / ".0123.tmp").touch()
        return "ok"

    return replace(TARGETS["kdtr"], run=fails)


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("exception", "KeyError: 'x'"),
        ("hang", "Hang: took more than"),
        ("memory", "CrashError: took 67,"),
        ("temporary file", "CrashError: left .0123.tmp"),
    ],
)
def test_a_planted_fault_is_found_and_kept_once(
    fault: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker.try_one, "__defaults__", (0.05,))
    monkeypatch.setattr(targets, "TRACED", 1)
    target = planted(fault)
    tally = run(target, 25, tmp_path)
    assert 1 <= len(tally.crashes) <= tally.outcomes["crash"]
    assert len({told.partition(":")[0] for told in tally.crashes.values()}) == len(tally.crashes)
    path, told = next(iter(tally.crashes.items()))
    assert message in told
    outcome, traceback = try_one(target, Path(path).read_bytes())
    assert (outcome, message in traceback) == ("crash", True)


def test_the_command_counts_to_its_bytes_and_says_how_a_crash_is_run_again(tmp_path: Path) -> None:
    options = ["--bytes", "20000", "--target", "kdtr", "--engine", "random", "--seed", "3", "--results", "r.md"]
    program = [sys.executable, "-m", command.MODULE]
    environment = os.environ | {"COLUMNS": "120"}
    done = subprocess.run([*program, *options], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    counts = r"^  all +([\d,]+) +([\d,]+) +(\d+)"
    (counted,) = re.findall(counts, done.stdout, re.M)
    assert int(counted[1].replace(",", "")) >= 20_000
    assert re.search(r"^\| kdtr \| random \| ", (tmp_path / "r.md").read_text(encoding="utf-8"), re.M)
    # the same seed draws the same inputs
    again = subprocess.run([*program, *options], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert re.findall(counts, again.stdout, re.M) == [counted]
    sound, damaged = tmp_path / "sound", tmp_path / "damaged"
    sound.write_bytes(TARGETS["kdtr"].seeds()[0])
    damaged.write_bytes(b"x")
    for path, outcome in ((sound, "ok"), (damaged, "KdtrError")):
        one = subprocess.run([*program, "--one", "kdtr", str(path)], capture_output=True, text=True, check=True)
        assert one.stdout == f"kdtr: {outcome}\n"


def test_a_process_that_ends_before_its_bytes_is_a_crash(tmp_path: Path) -> None:
    tally = command._fuzzed("kdtr", 1000, 0, tmp_path, "nonsense of no engine", lambda tally: None)
    assert tally.bytes >= 1000  # any other engine is the random one
    tally = command._fuzzed("nothing", 1000, 0, tmp_path, "random", lambda tally: None)
    (message,) = tally.crashes.values()
    assert message == "the process ended with 1: KeyError: 'nothing'"


def test_a_wrong_answer_of_a_reader_is_a_crash(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the targets themselves check: here, that a file that is read is the one that would be written."""
    monkeypatch.setattr(targets, "write_kdtr", lambda path, *_: Path(path).write_bytes(b"other"))
    with pytest.raises(CrashError, match="not the one that would be written"):
        TARGETS["kdtr"].run(TARGETS["kdtr"].seeds()[0], tmp_path)
