"""The examples run, are as short as they say, and show what they should."""

from __future__ import annotations

import ast
import importlib.util
import re
import shutil
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest

from ddtree.property_tests.project import notebook, pages

EXAMPLES = Path(__file__).resolve().parents[2] / "analysis" / "examples"
SCRIPTS = sorted(path.stem for path in EXAMPLES.glob("*.py") if path.stem != "__init__")
NOTEBOOK = EXAMPLES / "draw_tree.ipynb"


def run(name: str, folder: Path, *arguments: str | Path) -> str:
    """What the example prints, as a copy in a folder of its own."""
    script = shutil.copy(EXAMPLES / f"{name}.py", folder)
    command = [sys.executable, Path(script).name, *map(str, arguments)]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def assert_shown_on(page: str, told: str) -> None:
    """What the page shows below the example, up to a … in its first line, is what the example prints."""
    shown = next(f.group(3) for f in pages.fences((pages.DOCS / page).read_text()) if f.group(2) == "text").splitlines()
    width = shown[0].index("…") if "…" in shown[0] else None
    printed = [line[:width].rstrip() for line in told.splitlines() if line.strip()]
    assert [line[:width].rstrip() for line in shown if line.strip()] == printed


def test_the_package_lists_each_and_no_other() -> None:
    listed = re.findall(r"^``(\S+)``$", ast.get_docstring(ast.parse((EXAMPLES / "__init__.py").read_text())), re.M)
    assert sorted(listed) == sorted([*(f"{name}.py" for name in SCRIPTS), NOTEBOOK.name])


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_has_40_lines_at_most(name: str) -> None:
    assert len((EXAMPLES / f"{name}.py").read_text(encoding="utf-8").splitlines()) <= 40


def test_the_notebook_has_40_lines_of_code_at_most() -> None:
    cells = notebook.code_cells(notebook.read(NOTEBOOK))
    assert sum(len(cell["source"]) for cell in cells) <= 40


def test_own_kernel_is_right(tmp_path: Path) -> None:
    told = run("own_kernel", tmp_path)
    assert_shown_on("kernel-author.md", told)
    assert re.search(r"visibility_words +200 +0 +ok", told)
    assert told.endswith("own_kernel agrees with the reference.\n")


def test_own_kernel_with_a_bug_is_not(tmp_path: Path) -> None:
    text = (EXAMPLES / "own_kernel.py").read_text(encoding="utf-8")
    assert text.count("node % 32") == 1
    (tmp_path / "own_kernel.py").write_text(text.replace("node % 32", "node % 31"), encoding="utf-8")
    done = subprocess.run([sys.executable, "own_kernel.py"], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert list((tmp_path / "ddtree_failures").glob("*.kdtr"))


def test_own_policy_lies_between_the_budgets_that_it_chooses_from(tmp_path: Path) -> None:
    told = run("own_policy", tmp_path)
    assert_shown_on("examples.md", told)
    taus = {}
    for label in ("chain(7)", "fixed_budget(16)", "16 where p > 0.9, else 64", "fixed_budget(64)"):
        (tau,) = re.findall(rf"^ *{re.escape(label)} +\d+ +([\d.]+) ", told, re.M)
        taus[label] = float(tau)
    assert list(taus.values()) == sorted(set(taus.values())), taus


def test_hidden_states_are_those_of_every_layer(tmp_path: Path) -> None:
    lines = run("hidden_states", tmp_path).splitlines()
    assert lines[0] == "DeepseekV3(3 layers, hidden 64, vocab 512, float64, numpy)"
    assert [line.split()[0] for line in lines[3:7]] == ["0", "1", "2", "3"]


def test_hidden_states_of_a_hugging_face_folder(tmp_path: Path) -> None:
    pytest.importorskip("safetensors", reason="optional library safetensors is not installed")
    from safetensors.numpy import save_file

    from ddtree.kdtr import read_kdtr
    from ddtree.model import golden_bundle

    arrays, metadata = read_kdtr(golden_bundle())
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    (folder / "config.json").write_text(metadata["config"], encoding="utf-8")
    save_file({name: array for name, array in arrays.items() if "/" not in name}, folder / "model.safetensors")
    assert run("hidden_states", tmp_path, folder) == run("hidden_states", tmp_path)


def test_several_gpus_give_what_one_engine_gives(tmp_path: Path) -> None:
    from ddtree import Engine, load_pair, load_prompts

    target, drafter, _ = load_pair()
    expected = Engine(target, drafter, budget=64, max_batch=4).generate(load_prompts().tokens[:12], 16)
    told = run("several_gpus", tmp_path).splitlines()
    assert told[0].startswith("Generation(12 prompts, 192 tokens, ")
    assert told[1] == str(expected.tokens[0].tolist())


def test_huggingface_ngrams_draws_its_figure(tmp_path: Path) -> None:
    for library in ("torch", "transformers"):
        if importlib.util.find_spec(library) is None:
            pytest.skip(f"optional library {library} is not installed")
    told = run("huggingface_ngrams", tmp_path)
    assert re.search(r"^ *tree +32 ", told, re.M)
    assert (tmp_path / "tau_by_budget.png").read_bytes().startswith(b"\x89PNG")


def test_the_notebook_runs_and_shows_what_is_kept_in_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Text and labels, that is: widths of lines are of a model's floats, which differ by machine."""
    monkeypatch.chdir(tmp_path)
    kept, made = notebook.read(NOTEBOOK), notebook.read(NOTEBOOK)
    notebook.run(made)
    assert [_shown(cell) for cell in notebook.code_cells(made)] == [_shown(cell) for cell in notebook.code_cells(kept)]
    assert sum("svg" in kind for cell in notebook.code_cells(made) for kind, _ in _shown(cell)) == 3
    assert (tmp_path / "tree.pdf").read_bytes().startswith(b"%PDF")


def _shown(cell: Any) -> list[tuple[str, list[str]]]:
    shown = []
    for output in cell["outputs"]:
        if "text" in output:
            shown.append(("text", output["text"]))
        else:
            svg = ET.fromstring("".join(output["data"]["image/svg+xml"]))
            texts = [element.text for element in svg.iter("{http://www.w3.org/2000/svg}text")]
            assert texts
            shown.append(("svg", texts))
    return shown
