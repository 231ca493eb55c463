"""The same operation has the same file, name and signature in every role, and its docstring says it all."""

from __future__ import annotations

import ast
import doctest
import importlib
import inspect
import re
from pathlib import Path

import pytest

import ddtree
from ddtree import backends, ops
from ddtree.protocols import OPS

ROOT = Path(ddtree.__file__).resolve().parents[1]
ADDED_BY_THE_PUBLIC_LAYER = {"backend", "validate", "vocab_size"}


def parameters(function: object) -> list[tuple[str, str, object]]:
    found = inspect.signature(function).parameters.values()
    return [(p.name, p.kind.name, p.default) for p in found if p.name != "self"]


@pytest.mark.parametrize("op", list(OPS))
@pytest.mark.parametrize("backend", ["reference", "numba_cpu"])
def test_an_operation_has_one_file_name_and_signature_everywhere(op: str, backend: str) -> None:
    if op not in backends.get_backend(backend).ops:
        return  # a subset is a backend's right
    module = importlib.import_module(f"{backends.BACKENDS[backend].module}.{op}")
    expected = parameters(OPS[op].__call__)
    assert parameters(getattr(module, op)) == expected
    public = [p for p in parameters(getattr(ops, op)) if p[0] not in ADDED_BY_THE_PUBLIC_LAYER or p in expected]
    assert public == expected


@pytest.mark.parametrize("op", list(OPS))
def test_a_public_docstring_gives_shape_and_type_of_every_array(op: str) -> None:
    text = inspect.getdoc(getattr(ops, op)) or ""
    for heading in ("Parameters", "Raises"):
        assert re.search(rf"^{heading}\n-+$", text, re.M), f"{op} has no section {heading}"
    for name, _, _ in parameters(getattr(ops, op)):
        line = re.search(rf"^{name} : (.+)$", text, re.M)
        assert line, f"{op} does not describe {name}"
        if line[1].startswith("array"):
            assert "shape (" in line[1], f"{op}: {name} has no shape"
            assert re.search(r"float|int|the type of|any type", line[1]), f"{op}: {name} has no type"


PACKAGE = Path(ddtree.__file__).parent
WITH_EXAMPLES = sorted(
    path.relative_to(PACKAGE.parent).with_suffix("").as_posix().replace("/", ".").removesuffix(".__init__")
    for folder in ("*.py", "drafters/*.py", "engine/*.py", "interop/*.py", "model/*.py", "analysis/**/*.py")
    for path in PACKAGE.glob(folder)
    if re.search(r"^ *>>> ", path.read_text(encoding="utf-8"), re.M)
)


@pytest.mark.parametrize("module", WITH_EXAMPLES)
def test_examples_in_docstrings_are_true(module: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    loaded = importlib.import_module(module)
    result = doctest.testmod(loaded, extraglobs={"np": importlib.import_module("numpy")})
    assert result.attempted > 0
    assert result.failed == 0


def test_every_public_name_can_be_had() -> None:
    for name in ddtree.__all__:
        assert getattr(ddtree, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = ddtree.nothing
    assert set(ddtree.__all__) <= set(dir(ddtree))


def imports(path: Path) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path.name}: imports are absolute"
            found.add(node.module or "")
    return found


@pytest.mark.parametrize("path", sorted((ROOT / "reference").glob("*.py")), ids=lambda p: p.name)
def test_a_reference_needs_numpy_and_the_records_alone(path: Path) -> None:
    allowed = ("numpy", "ddtree.reference", "ddtree.trees", "typing", "math", "heapq", "collections", "dataclasses")
    assert all(name == a or name.startswith(a + ".") for name in imports(path) for a in [_root(name, allowed)])


def _root(name: str, allowed: tuple[str, ...]) -> str:
    return next((a for a in allowed if name == a or name.startswith(a + ".")), f"(not allowed: {name})")


def test_data_flows_one_way() -> None:
    """Arrays → ops → engine → analysis: nobody imports from a later layer."""
    later = {
        "arrays": ("ddtree.backends", "ddtree.ops", "ddtree.engine", "ddtree.model", "ddtree.analysis", "ddtree.cli"),
        "trees": ("ddtree.backends", "ddtree.ops", "ddtree.engine", "ddtree.model", "ddtree.analysis", "ddtree.cli"),
        "ops": ("ddtree.engine", "ddtree.model", "ddtree.drafters", "ddtree.analysis", "ddtree.cli"),
        "model": ("ddtree.engine", "ddtree.drafters", "ddtree.analysis", "ddtree.cli"),
        "drafters": ("ddtree.analysis", "ddtree.cli"),
        "engine": ("ddtree.analysis", "ddtree.cli"),
    }
    for layer, banned in later.items():
        where = ROOT / "ddtree" / layer
        for path in [where.with_suffix(".py")] if where.with_suffix(".py").exists() else where.rglob("*.py"):
            wrong = [n for n in imports(path) for b in banned if n == b or n.startswith(b + ".")]
            assert not wrong, f"{path.relative_to(ROOT)} imports {wrong}"


def test_every_module_says_what_it_is_for() -> None:
    for folder in ("ddtree", "reference", "kernels", "property_tests", "analysis"):
        for path in (ROOT / folder).rglob("*.py"):
            assert (ast.get_docstring(ast.parse(path.read_text())) or "").strip(), f"{path.relative_to(ROOT)} has none"
