"""Asking for a backend means getting that one, or an error that says what to do."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import ddtree
from ddtree import backends
from ddtree.arrays import Device
from ddtree.protocols import OPS

LOG_PROBS = np.log(np.array([[[0.5, 0.25]] * 3], np.float32))
IDS = np.array([[[1, 2], [3, 4], [5, 6]]], np.int32)
ROOTS = np.array([9], np.int32)


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A module of a user's own, with one operation and an object with another."""
    (tmp_path / "my_kernels.py").write_text(
        "import ddtree.reference as r\n"
        "from ddtree import visibility_words\n"  # to be called, not to be offered
        "CALLS = []\n"
        "def build_tree(log_probs, token_ids, root_token_ids, *, budget):\n"
        "    CALLS.append(budget)\n"
        "    return r.build_tree(log_probs, token_ids, root_token_ids, budget=budget)\n"
        "class Box:\n"
        "    @staticmethod\n"
        "    def tree_positions(depths, prefix_lens):\n"
        "        return r.tree_positions(depths, prefix_lens)\n"
        "class Wrong:\n"
        "    array_kind = 'tensorflow'\n"
        "    build_tree = staticmethod(build_tree)\n"
        "empty = object()\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    yield "my_kernels"
    backends.get_backend.cache_clear()
    sys.modules.pop("my_kernels", None)


def test_a_module_of_ones_own_serves_the_operations_it_has(mine: str) -> None:
    tree = ddtree.build_tree(LOG_PROBS, IDS, ROOTS, budget=2, backend=mine)
    assert tree.token_ids.tolist() == [[9, 1, 3]]
    assert importlib.import_module(mine).CALLS == [2]
    assert backends.get_backend(mine).ops == ("build_tree",)
    assert backends.get_backend(f"{mine}:Box").ops == ("tree_positions",)


def test_a_missing_operation_is_never_served_by_another(mine: str) -> None:
    with pytest.raises(ddtree.BackendUnavailable, match=r"'my_kernels' has no operation 'tree_positions' \(it"):
        ddtree.tree_positions(IDS[0].T.copy(), np.zeros(2, np.int32), backend=mine)


@pytest.mark.parametrize(
    ("spec", "error", "match"),
    [
        ("no_such_module", ValueError, "one of reference, numba_cpu, numba_cuda, cupy, or 'module'"),
        ("my_kernels:Nothing", ValueError, "'my_kernels' has no object 'Nothing'"),
        ("my_kernels:empty", ValueError, "has no operation: define any of topk_log_probs"),
        ("my_kernels:Wrong", ValueError, "array_kind must be 'numpy', 'cupy' or 'torch', got 'tensorflow'"),
        ("./my_kernels.py", ValueError, "a module's name, not a path, .* pass 'my_kernels'"),
        ("numba", ValueError, "or name one of reference, numba_cpu"),
        (":", ValueError, "must be one of reference"),
        ("", ValueError, "must be one of reference"),
        ("..rel", ValueError, "must be one of reference"),
    ],
)
def test_a_wrong_spec_says_what_it_must_be(mine: str, spec: str, error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        ddtree.build_tree(LOG_PROBS, IDS, ROOTS, budget=2, backend=spec)


def test_a_module_that_fails_to_import_keeps_its_cause(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "broken_kernels.py").write_text("import a_library_that_is_missing\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ddtree.BackendUnavailable, match="a_library_that_is_missing") as raised:
        backends.get_backend("broken_kernels")
    assert isinstance(raised.value.__cause__, ModuleNotFoundError)


@pytest.mark.parametrize(("name", "library"), [("cupy", "cupy"), ("numba_cpu", "numba"), ("numba_cuda", "numba_cuda")])
def test_a_missing_library_gives_the_install_command(name: str, library: str, monkeypatch: pytest.MonkeyPatch) -> None:
    backends.get_backend.cache_clear()
    monkeypatch.setitem(sys.modules, library, None)  # what an import of a missing module meets
    with pytest.raises(ddtree.BackendUnavailable, match=f"backend '{name}' needs {library}.*pip install"):
        ddtree.build_tree(LOG_PROBS, IDS, ROOTS, budget=2, backend=name)
    backends.get_backend.cache_clear()


def test_a_broken_default_is_an_error_not_a_fallback(monkeypatch: pytest.MonkeyPatch) -> None:
    backends.get_backend.cache_clear()
    monkeypatch.setitem(sys.modules, "numba", None)
    with pytest.raises(ddtree.BackendUnavailable, match="pip install numba"):
        ddtree.build_tree(LOG_PROBS, IDS, ROOTS, budget=2)
    backends.get_backend.cache_clear()
    assert ddtree.build_tree(LOG_PROBS, IDS, ROOTS, budget=2, backend="reference").node_counts.tolist() == [3]


def test_the_default_is_the_first_of_the_order_that_has_the_operation() -> None:
    for op in OPS:
        chosen = backends.select_backend(op, None, Device("cpu", 0))
        having = [name for name in backends.DEFAULT_ORDER["cpu"] if op in backends.get_backend(name).ops]
        assert chosen.name == having[0]


def test_no_backend_on_a_device_is_said_so() -> None:
    with pytest.raises(ddtree.BackendUnavailable, match=r"no backend serves 'build_tree' on xpu:0 yet"):
        backends.select_backend("build_tree", None, Device("xpu", 0))


def test_a_backend_is_a_name_or_a_backend() -> None:
    with pytest.raises(TypeError, match="backend must be a name"):
        ddtree.build_tree(LOG_PROBS, IDS, ROOTS, budget=2, backend=3)
    with pytest.raises(TypeError, match=r"got module: pass its name, 'ddtree\.reference'"):
        ddtree.build_tree(LOG_PROBS, IDS, ROOTS, budget=2, backend=ddtree.reference)
    reference = backends.get_backend("reference")
    assert ddtree.build_tree(LOG_PROBS, IDS, ROOTS, budget=2, backend=reference).node_counts.tolist() == [3]


def test_the_reference_has_every_operation() -> None:
    assert backends.get_backend("reference").ops == tuple(OPS)
