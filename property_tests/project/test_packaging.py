"""What is installed, from a wheel, from the sdist's wheel and editable, and what importing it loads."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

import ddtree

ROOT = Path(__file__).resolve().parents[2]
SMOKE = """
import importlib.util, numpy as np, ddtree
from ddtree.reference import build_tree
assert importlib.util.find_spec("ddtree.property_tests.test_build_tree") is not None
log_probs = np.log(np.array([[[0.5, 0.25]] * 3], np.float32))
ids = np.array([[[1, 2], [3, 4], [5, 6]]], np.int32)
tree = ddtree.build_tree(log_probs, ids, np.array([9], np.int32), budget=2)
assert tree.token_ids.tolist() == [[9, 1, 3]], tree
print(ddtree.__file__)
"""


def run(*command: str | Path, cwd: Path, ok: bool = True) -> str:
    # A fresh interpreter: this one's path and cache settings must not leak into it.
    environment = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTEST_ADDOPTS")}
    done = subprocess.run([*map(str, command)], cwd=cwd, env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode == 0) == ok, f"{command} in {cwd}: {done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    return done.stdout


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the project, so that building leaves nothing in it."""
    copy = tmp_path_factory.mktemp("source") / "project"
    ignored = shutil.ignore_patterns(
        ".git", ".venv", "__pycache__", "*.egg-info", "build", "dist", ".*_cache", "demo_output", "ddtree_failures"
    )
    shutil.copytree(ROOT, copy, symlinks=True, ignore=ignored)
    return copy


@pytest.fixture(scope="module")
def built(source: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The wheel, the sdist, and the wheel made from the sdist; without a network."""
    out = tmp_path_factory.mktemp("dist")
    build = (sys.executable, "-m", "build", "--no-isolation", "--outdir")
    run(*build, out / "wheel", "--wheel", source, cwd=out)
    run(*build, out / "sdist", "--sdist", source, cwd=out)
    (sdist,) = (out / "sdist").glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        archive.extractall(out / "unpacked", filter="data")
    (unpacked,) = (out / "unpacked").iterdir()
    run(*build, out / "again", "--wheel", unpacked, cwd=out)
    (wheel,) = (out / "wheel").glob("*.whl")
    (again,) = (out / "again").glob("*.whl")
    return {"wheel": wheel, "sdist": sdist, "sdist_wheel": again}


def make_venv(folder: Path) -> Path:
    """A new environment that sees this one's libraries but not its ddtree."""
    venv.create(folder, with_pip=False, symlinks=True)
    python = folder / "bin" / "python"
    packages = run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=folder).strip()
    # A folder named in a .pth file is searched, but the .pth files inside it, such as an editable install's, are not.
    Path(packages, "libraries.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return python


def install(python: Path, *what: str | Path, cwd: Path) -> None:
    pip = (sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--disable-pip-version-check")
    run(*pip, "--no-deps", "--no-index", "--no-build-isolation", *what, cwd=cwd)


def names(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return {n for n in archive.namelist() if ".dist-info/" not in n}


def test_wheel_holds_one_import_package_with_its_data_and_no_project_tests(built: dict[str, Path]) -> None:
    held = names(built["wheel"])
    assert {n.split("/")[0] for n in held} == {"ddtree"}
    assert {
        "ddtree/py.typed",
        "ddtree/include/kdtr.hpp",
        "ddtree/reference/build_tree.py",
        "ddtree/kernels/numba_cpu/build_tree.py",
        "ddtree/property_tests/test_build_tree.py",
        "ddtree/property_tests/golden/tiny.kdtr",
        "ddtree/property_tests/FIELD_CASES.md",
        "ddtree/pairs/python-5m/trace/manifest.json",
        "ddtree/pairs/python-5m/trace/chunk-00000.kdtr",
        "ddtree/analysis/figures/__init__.py",
        "ddtree/analysis/benchmarks/results/h200/bench.json",
        *(f"ddtree/analysis/examples/{path.name}" for path in (ROOT / "analysis" / "examples").glob("*.[pi]*")),
        *(f"ddtree/analysis/report/page.{kind}" for kind in ("html", "css", "js")),
        "ddtree/kernels/cupy/verified.json",
        *(f"ddtree/pairs/python-5m/{path.name}" for path in (ROOT / "ddtree" / "pairs" / "python-5m").glob("*.*")),
        *(f"ddtree/kernels/cupy/{path.name}" for path in (ROOT / "kernels" / "cupy").glob("*.cu*")),
    } <= held
    assert not [n for n in held if "property_tests/project" in n or "analysis/docs" in n]


def test_sdist_holds_real_files_and_makes_the_same_wheel(built: dict[str, Path]) -> None:
    with tarfile.open(built["sdist"]) as archive:
        assert not [m.name for m in archive.getmembers() if m.issym() or m.islnk()]
    assert names(built["sdist_wheel"]) == names(built["wheel"])


@pytest.mark.parametrize("how", ["wheel", "sdist_wheel", "editable"])
def test_install_works_from_the_root_and_elsewhere(
    how: str, built: dict[str, Path], source: Path, tmp_path: Path
) -> None:
    python = make_venv(tmp_path / "venv")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    install(python, *(["-e", source] if how == "editable" else [built[how]]), cwd=elsewhere)
    imported = Path(run(python, "-c", SMOKE, cwd=elsewhere).strip())
    assert imported.is_relative_to(source if how == "editable" else tmp_path / "venv")
    run(python, "-c", SMOKE, cwd=source)
    for stray in ("kernels", "reference", "property_tests", "analysis"):
        run(python, "-c", f"import {stray}", cwd=elsewhere, ok=False)
    assert "0.1.0" in run(tmp_path / "venv" / "bin" / "ddtree", "--version", cwd=elsewhere)


def test_conformance_tests_run_from_an_installed_wheel_in_an_empty_folder(
    built: dict[str, Path], tmp_path: Path
) -> None:
    python = make_venv(tmp_path / "venv")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    install(python, built["wheel"], cwd=elsewhere)
    quiet = ("-m", "pytest", "-q", "-p", "no:cacheprovider", "--pyargs")
    collected = run(python, *quiet, "--collect-only", "ddtree.property_tests", cwd=elsewhere)
    assert "test_build_tree" in collected
    assert "project" not in collected
    assert " passed" in run(python, *quiet, "ddtree.property_tests.test_tree_positions", cwd=elsewhere)
    (elsewhere / "mine.py").write_text("from ddtree.reference import build_tree\n")
    options = ("--ddtree-backend", "mine", "--ddtree-examples", "5")
    told = run(python, *quiet, "ddtree.property_tests", *options, cwd=elsewhere)
    assert re.search(r"^mine  build_tree: of (\d+) laws \1 hold; ", told, re.M), told
    assert "tree_positions" not in told.partition("not run:")[0]


def test_importing_ddtree_loads_numpy_and_nothing_heavier() -> None:
    heavy = ("numba", "cupy", "matplotlib", "torch", "transformers", "rich", "click", "safetensors", "hypothesis")
    code = f"import sys, ddtree; print([name for name in {heavy} if name in sys.modules])"
    assert run(sys.executable, "-c", code, cwd=ROOT).strip() == "[]"


def test_a_decoder_without_torch_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(ImportError, match=r"DDTreeDecoder needs torch and transformers .*: pip install 'ddtree.hugg"):
        ddtree.DDTreeDecoder(object())


def test_top_level_is_what_the_design_says() -> None:
    if not (ROOT / ".git").exists() or shutil.which("git") is None:
        listed = [p.name for p in ROOT.iterdir()]
    else:
        listed = run("git", "ls-files", cwd=ROOT).split("\n")
    top = {name.split("/")[0] for name in listed if name}
    folders = {"ddtree", "reference", "kernels", "property_tests", "analysis"}
    files = {"pyproject.toml", "README.md", "LICENSE", "Makefile"}
    assert {name for name in top if not name.startswith(".")} - {"PKG-INFO", "setup.cfg"} == folders | files
