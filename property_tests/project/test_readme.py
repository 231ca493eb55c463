"""What the README says is true: its code runs, its links lead somewhere, its first two commands are targets."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from ddtree.protocols import OPS

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```python\n(.*?)^```", README, re.M | re.S)


def run(*command: str, cwd: Path) -> str:
    done = subprocess.run([sys.executable, *command], cwd=cwd, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def files(block: str) -> dict[str, str]:
    """The files that a block is made of: each begins with a comment that names it; a block without one is a script."""
    parts = re.split(r"^# (\w+\.py)\n", block, flags=re.M)
    return dict(zip(parts[1::2], parts[2::2], strict=True)) if len(parts) > 1 else {"script.py": block}


def made_in(folder: Path, block: str) -> None:
    for name, text in files(block).items():
        (folder / name).write_text(text, encoding="utf-8")


@pytest.mark.parametrize("block", BLOCKS[1:], ids=[f"block{i}" for i in range(1, len(BLOCKS))])
def test_each_script_runs_in_an_empty_folder_and_is_short(block: str, tmp_path: Path) -> None:
    assert len([line for line in block.splitlines() if line.strip()]) <= 12
    for library in ("torch", "transformers"):
        if library in block and importlib.util.find_spec(library) is None:
            pytest.skip(f"optional library {library} is not installed")
    made_in(tmp_path, block)
    assert run("script.py", cwd=tmp_path).strip()


def command(folder: Path, *words: str) -> tuple[int, list[str]]:
    """Status and lines of a command of this environment, on a terminal of 120 columns."""
    environment = os.environ | {"COLUMNS": "120", "PYTEST_ADDOPTS": "", "DDTREE_PROFILE": "ci", "NO_COLOR": "1"}
    program = str(Path(sys.executable).with_name(words[0]))
    done = subprocess.run(
        [program, *words[1:]], cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    return done.returncode, [line.rstrip() for line in (done.stdout + done.stderr).splitlines()]


def test_the_kernel_authors_bug_is_found_and_shown_as_it_says(tmp_path: Path) -> None:
    made_in(tmp_path, BLOCKS[0])
    (suite,) = re.findall(r"^    (pytest .*)$", README, re.M)
    found, replayed = (text.splitlines() for text in re.findall(r"^```text\n(.*?)^```", README, re.M | re.S))
    status, lines = command(tmp_path, *suite.split())
    assert status == 1
    at = lines.index(found[0])
    assert lines[at : at + len(found)] == found
    again = found[-1].partition("again: ")[2].split()
    status, lines = command(tmp_path, *again)
    assert status == 1
    at = lines.index(replayed[0])
    assert lines[at : at + len(replayed)] == replayed
    assert command(tmp_path, *again, "--backend", "numba_cpu")[0] == 0


def test_the_kernel_authors_builder_mended_as_it_says_is_right(tmp_path: Path) -> None:
    """The bug is the only one in it: with paths in the heap, every law of the builder holds."""
    made_in(tmp_path, BLOCKS[0])
    text = (tmp_path / "my_builder.py").read_text(encoding="utf-8")
    mended = text.replace("(-score, parent, depth, rank))", "(-score, (*paths[parent], rank), parent, depth, rank))")
    mended = mended.replace("score, parent, depth, rank = heapq", "score, path, parent, depth, rank = heapq")
    mended = mended.replace("heap = []", "heap, paths = [], [()]").replace(
        "counts[b] += 1", "counts[b] += 1; paths.append(path)"
    )
    (tmp_path / "my_builder.py").write_text(mended, encoding="utf-8")
    status, lines = command(tmp_path, "ddtree", "check", "--backend", "my_builder", "--examples", "100")
    assert status == 0, lines
    assert lines[-1] == "my_builder agrees with the reference."


def test_its_first_two_commands_are_demo_and_test() -> None:
    commands = re.findall(r"^    (make \w+)", README, re.M)
    assert commands[:2] == ["make demo", "make test"]
    makefile = (ROOT / "Makefile").read_text()
    for command in commands:
        assert re.search(rf"^{command.split()[1]}:", makefile, re.M)


def test_its_links_and_pictures_are_there() -> None:
    targets = [t for t in re.findall(r"\]\(([^)]+)\)", README) if not t.startswith("http")]
    assert targets
    for target in targets:
        assert (ROOT / target).exists(), target


def test_it_names_every_operation() -> None:
    for op in OPS:
        assert f"`{op}(" in README
