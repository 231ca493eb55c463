"""What the README says is true: its code runs, its links lead somewhere, its first two commands are targets."""

from __future__ import annotations

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


@pytest.mark.parametrize("block", BLOCKS, ids=[f"block{i}" for i in range(len(BLOCKS))])
def test_each_script_runs_in_an_empty_folder_and_is_short(block: str, tmp_path: Path) -> None:
    assert len([line for line in block.splitlines() if line.strip()]) <= 12
    for name, text in files(block).items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    if "script.py" in files(block):
        assert run("script.py", cwd=tmp_path).strip()
    else:
        assert "1 passed" in run("-m", "pytest", "-q", cwd=tmp_path)


def test_a_planted_tie_bug_is_found_by_the_kernel_authors_script(tmp_path: Path) -> None:
    """The script is worth its place only if it fails when the builder is wrong."""
    for name, text in files(BLOCKS[0]).items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    (tmp_path / "my_kernels.py").write_text(
        "import numpy as np, ddtree.reference as r\n"
        "def build_tree(log_probs, token_ids, root_token_ids, *, budget):\n"
        "    nudged = log_probs - np.float32(1e-6) * np.arange(log_probs.shape[2], dtype=np.float32)[::-1]\n"
        "    return r.build_tree(nudged, token_ids, root_token_ids, budget=budget)\n"
    )
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q"], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert "differ" in done.stdout


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
