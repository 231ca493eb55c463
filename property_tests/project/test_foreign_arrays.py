"""Arrays of other libraries: every public operation on them, and backends that work on them, as an author runs them."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import os
import re
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any, ClassVar

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

import ddtree
from ddtree import reference
from ddtree.arrays import array_kind, dtype_name, export_array, to_numpy
from ddtree.backends import Backend
from ddtree.property_tests import strategies
from ddtree.property_tests.cases import Case, map_arrays, named_leaves
from ddtree.property_tests.project.test_arrays import Foreign
from ddtree.protocols import OPS

HERE = "ddtree.property_tests.project"
KINDS = {"torch": f"{HERE}.torch_backend", "cupy": f"{HERE}.cupy_backend"}


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    """The arrays' library, which can work here."""
    name = str(request.param)
    if name == "torch" and importlib.util.find_spec("torch") is None:
        pytest.skip("optional library torch is not installed")
    if name == "cupy":
        try:
            count = importlib.import_module("cupy").cuda.runtime.getDeviceCount()
        except Exception:  # CuPy or a driver is missing
            count = 0
        if count == 0:
            pytest.skip("no GPU")
    return name


def command(folder: Path, *words: str) -> tuple[int, str]:
    """Status and output of a command of this environment."""
    environment = os.environ | {"COLUMNS": "120", "PYTEST_ADDOPTS": "", "DDTREE_PROFILE": "ci", "NO_COLOR": "1"}
    program = str(Path(sys.executable).with_name(words[0]))
    done = subprocess.run([program, *words[1:]], cwd=folder, env=environment, capture_output=True, text=True)
    return done.returncode, done.stdout + done.stderr


def test_suite_runs_every_law_on_them(kind: str, tmp_path: Path) -> None:
    backend = f"{KINDS[kind]}:Whole"
    options = ("-q", "-p", "no:cacheprovider", "-m", "not large", "--ddtree-examples", "5", "--ddtree-at-least", "150")
    status, output = command(
        tmp_path, "pytest", *options, "--pyargs", "ddtree.property_tests", "--ddtree-backend", backend
    )
    assert status == 0, output
    for op in OPS:
        assert re.search(rf"^{re.escape(backend)}  {op}: of \d+ laws \d+ hold[;,]", output, re.M), output
    carried = "engine" if kind == "torch" else "model"
    assert re.search(rf"^{re.escape(backend)}  {carried}: of (\d+) laws \1 hold", output, re.M), output


def test_suite_finds_a_fault_and_its_case_is_replayed_until_it_is_mended(kind: str, tmp_path: Path) -> None:
    options = ("-q", "-p", "no:cacheprovider", "--ddtree-ops", "tree_positions", "-x")
    suite = ("pytest", *options, "--pyargs", "ddtree.property_tests.test_tree_positions")
    status, output = command(tmp_path, *suite, "--ddtree-backend", f"{KINDS[kind]}:Wrong")
    assert status == 1, output
    assert f"tree_positions[{KINDS[kind]}:Wrong] wrote into depths" in output
    (again,) = re.findall(r"again: (ddtree replay .*)$", output, re.M)
    status, output = command(tmp_path, *again.split())
    assert status == 1, output
    assert output.startswith(f"tree_positions[{KINDS[kind]}:Wrong] differs from the reference\n")
    assert command(tmp_path, *again.split(), "--backend", f"{KINDS[kind]}:Whole")[0] == 0


def test_check_agrees_on_every_operation(kind: str, tmp_path: Path) -> None:
    status, output = command(tmp_path, "ddtree", "check", "--backend", f"{KINDS[kind]}:Whole", "--examples", "30")
    assert status == 0, output
    for op in OPS:
        assert re.search(rf"^  {op} +\d+ +0   ok *$", output, re.M), output


def test_check_finds_what_torch_makes_easy_to_get_wrong(tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="optional library torch is not installed")
    backend = f"{KINDS['torch']}:Wrong"
    status, output = command(tmp_path, "ddtree", "check", "--backend", backend, "--examples", "60")
    assert status == 1, output
    assert f"tree_positions: tree_positions[{backend}] wrote into depths" in output
    assert "visibility_words: result is of type int32, should be uint32" in output
    assert re.search(r"^accept_tree: acceptance.\w+\[0(, \d)?\]: \w+, should be \w+$", output, re.M), output
    for path in re.findall(r"^  again: ddtree replay (.*)$", output, re.M):
        case = Case.read(tmp_path / path)
        assert (case.backend, f"torch {importlib.import_module('torch').__version__}" in case.about["versions"]) == (
            backend,
            True,
        )
        assert command(tmp_path, "ddtree", "replay", path)[0] == 1
        assert command(tmp_path, "ddtree", "replay", path, "--backend", f"{KINDS['torch']}:Whole")[0] == 0


@pytest.mark.parametrize("given", ["numpy", "torch", "cupy"])
def test_public_operations_return_the_callers_kind_whatever_the_backend_works_on(kind: str, given: str) -> None:
    """Arrays of the library itself and NumPy's (on a GPU, that library's alone) through a backend of the library."""
    if given not in (kind, "numpy") or (kind, given) == ("cupy", "numpy"):
        return  # a backend of CuPy arrays takes none on the host
    library = importlib.import_module(given)
    log_probs = np.log(np.array([[[0.5, 0.25], [0.5, 0.5]]] * 2, np.float32))
    drafted = log_probs, np.array([[[1, 2], [3, 4]]] * 2, np.int32), np.array([9, 8], np.int32)
    backend = f"{KINDS[kind]}:Whole"
    tree = ddtree.build_tree(*map(library.asarray, drafted), budget=4, backend=backend)
    choices = library.asarray(np.array([[1, 3, 5, 0, 0], [7, 0, 0, 0, 0]], np.int32))
    kept = ddtree.accept_tree(tree, choices, backend=backend)
    expected = ddtree.build_tree(*drafted, budget=4, backend="reference")
    wanted = ddtree.accept_tree(expected, to_numpy(choices), backend="reference")
    for got, want in ((tree, expected), (kept, wanted)):
        for name in (f.name for f in fields(want)):
            array = getattr(got, name)
            if isinstance(array, int):
                assert array == getattr(want, name)
            else:
                assert array_kind(array) == given
                np.testing.assert_array_equal(to_numpy(array), getattr(want, name), strict=True)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_attention_and_compaction_write_into_the_callers_memory(kind: str, dtype: str) -> None:
    library: Any = importlib.import_module(kind)
    from ddtree.arrays import export_array
    from ddtree.kdtr import dtype_named

    def there(array: np.ndarray) -> Any:
        like = library.empty(0)
        return library.asarray(array) if kind == "cupy" else export_array(array, like)

    tree = ddtree.trees.tree_from_parents(np.array([[1, 2, 3]], np.int32), np.array([[-1, 0, 0]], np.int32))
    cache = np.arange(2 * 2 * 4 * 3).reshape(2, 2, 4, 3).astype(dtype_named(dtype))
    table, prefix = np.array([[1, 0]], np.int32), np.array([3], np.int32)
    accepted = ddtree.Acceptance(
        np.array([[0, 2]], np.int32), np.array([2], np.int32), np.array([5], np.int32), np.zeros(1, np.bool_)
    )
    theirs = there(cache.copy())
    ddtree.compact_cache(
        theirs, there(table), there(prefix), map_arrays(accepted, there), backend=f"{KINDS[kind]}:Whole"
    )
    ours = cache.copy()
    ddtree.compact_cache(ours, table, prefix, accepted, backend="reference")
    assert to_numpy(theirs).tobytes() == ours.tobytes()
    q = np.ones((1, 3, 2, 3)).astype(dtype_named(dtype)) / 8
    out = there(np.full((1, 3, 2, 2), np.nan).astype(dtype_named(dtype)))
    arguments = (there(q), there(cache[0].copy()), there(table), there(prefix), map_arrays(tree, there))
    options = {"scale": 0.5, "kv_lora_rank": 2}
    got = ddtree.verify_attention(*arguments, **options, out=out, backend=f"{KINDS[kind]}:Whole")
    assert got is out
    want = ddtree.verify_attention(q, cache[0], table, prefix, tree, **options, backend="reference")
    worst = np.abs(to_numpy(out).astype(np.float64) - want.astype(np.float64)).max()
    assert worst <= 2 * float(np.spacing(np.abs(want).max().astype(want.dtype)))
    assert all(not np.isnan(to_numpy(leaf)).any() for _, leaf in named_leaves("", {"out": out}))


class Spy:
    """A backend of one operation, which keeps what it was given and what it gave."""

    seen: ClassVar[dict[str, np.ndarray]] = {}

    @staticmethod
    def tree_positions(depths: np.ndarray, prefix_lens: np.ndarray) -> np.ndarray:
        result = reference.tree_positions(depths, prefix_lens)
        Spy.seen |= {"depths": depths, "prefix_lens": prefix_lens, "result": result}
        return result


def test_a_tensor_is_worked_on_where_it_lies_and_the_result_is_not_copied() -> None:
    torch = pytest.importorskip("torch", reason="optional library torch is not installed")
    depths, prefix_lens = torch.tensor([[0, 1, 1]], dtype=torch.int32), torch.tensor([7], dtype=torch.int32)
    positions = ddtree.tree_positions(depths, prefix_lens, backend=Backend("spy", Spy, "numpy"))
    assert (positions.device, positions.tolist()) == (depths.device, [[7, 8, 8]])
    for name, tensor in {"depths": depths, "prefix_lens": prefix_lens, "result": positions}.items():
        assert Spy.seen[name].ctypes.data == tensor.data_ptr()


class Shape(Foreign):
    """A foreign array that says its shape, as :func:`map_arrays` wants to know it."""

    @property
    def shape(self) -> tuple[int, ...]:
        return self.array.shape


@pytest.fixture(params=["torch", "jax", "any with __dlpack__"], scope="module")
def library(request: pytest.FixtureRequest) -> str:
    name = str(request.param)
    if not name.startswith("any") and importlib.util.find_spec(name) is None:
        pytest.skip(f"optional library {name} is not installed")
    return name


def made(library: str, array: np.ndarray) -> Any:
    """The array as the library's own."""
    if library == "torch":
        return export_array(array, importlib.import_module("torch").empty(0))
    if library == "jax":
        jax = importlib.import_module("jax")
        return jax.device_put(jax.numpy.asarray(array), jax.devices("cpu")[0])  # where the reference works
    return array if dtype_name(array) == "bfloat16" else Shape(array)  # which DLPack has no common word for


def kind_of_result(library: str) -> type:
    """What an operation returns where it was given that: DLPack alone has no way back."""
    modules = {"torch": ("torch", "Tensor"), "jax": ("jax", "Array")}
    module, name = modules.get(library, ("numpy", "ndarray"))
    return getattr(importlib.import_module(module), name)  # type: ignore[no-any-return]


def leaves(result: Any) -> list[tuple[str, Any]]:
    """The arrays and sizes of whatever an operation returns, by name."""
    parts = result if isinstance(result, tuple) else (result,)
    return [leaf for i, part in enumerate(parts) for leaf in named_leaves(f"result {i}", part)]


@pytest.mark.parametrize("op", OPS)
@settings(max_examples=12)
@given(data=st.data())
def test_every_operation_takes_and_returns_a_librarys_arrays(library: str, op: str, data: st.DataObject) -> None:
    if (library, op) == ("jax", "compact_cache"):
        return  # its arrays are never written to: refused, see test_arrays
    arguments = data.draw(strategies.calls(op))
    with importlib.import_module("jax").enable_x64(True) if library == "jax" else contextlib.nullcontext():
        theirs = {name: map_arrays(value, lambda a: made(library, a.copy())) for name, value in arguments.items()}
        ours = {name: map_arrays(value, np.copy) for name, value in arguments.items()}
        got = getattr(ddtree, op)(**theirs, backend="reference")
        wanted = getattr(reference, op)(**ours)
        if op == "compact_cache":  # in place
            got, wanted = theirs["kv_cache"], ours["kv_cache"]
        for (name, actual), (_, expected) in zip(leaves(got), leaves(wanted), strict=True):
            if isinstance(expected, int):
                assert actual == expected, name
                continue
            assert op == "compact_cache" or isinstance(actual, kind_of_result(library))
            assert dtype_name(actual) == dtype_name(expected), name
            assert to_numpy(actual).tobytes() == expected.tobytes(), name
