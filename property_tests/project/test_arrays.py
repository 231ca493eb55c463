"""One memory under several libraries' arrays: kinds, devices, and zero-copy ways in and out."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import ddtree
from ddtree import arrays


class Foreign:
    """An array of a library that nobody here knows: it only speaks DLPack."""

    def __init__(self, array: np.ndarray, device: tuple[int, int] | None = None) -> None:
        self.array, self._device = array, device

    @property
    def dtype(self) -> Any:
        return self.array.dtype

    def __dlpack__(self, **options: Any) -> Any:
        return self.array.__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self._device or self.array.__dlpack_device__()


@pytest.fixture
def torch() -> ModuleType:
    if importlib.util.find_spec("torch") is None:
        pytest.skip("optional library torch is not installed")
    return importlib.import_module("torch")


LOG_PROBS = np.log(np.array([[[0.5, 0.25]] * 3], np.float32))
IDS = np.array([[[1, 2], [3, 4], [5, 6]]], np.int32)
ROOTS = np.array([9], np.int32)


def test_kind_and_namespace_of_numpy_arrays() -> None:
    x = np.zeros(3, np.float32)
    assert arrays.array_kind(x) == "numpy"
    assert arrays.array_namespace(x, x) is np
    assert arrays.device_of(x) == ("cpu", 0)
    assert str(arrays.device_of(x)) == "cpu"
    assert arrays.current_stream(x) is None
    assert arrays.import_array(x) is x
    assert arrays.export_array(x, x) is x
    assert arrays.to_numpy(x) is x


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float32, np.int64, np.uint32, np.bool_])
def test_dtype_name_has_no_library_in_it(dtype: Any) -> None:
    assert arrays.dtype_name(np.zeros(1, dtype)) == np.dtype(dtype).name


@pytest.mark.parametrize("thing", [[1.0], 1.0, np.float32(1), None, "array"])
def test_what_is_no_array_is_refused_with_its_type(thing: object) -> None:
    with pytest.raises(TypeError, match=f"__dlpack__, got {type(thing).__name__}"):
        arrays.array_kind(thing)


def test_a_foreign_array_is_shared_not_copied() -> None:
    x = np.arange(6.0)
    native = arrays.import_array(Foreign(x))
    assert np.shares_memory(native, x)
    with pytest.raises(TypeError, match="import_array"):
        arrays.array_namespace(Foreign(x))


def test_a_device_that_nobody_reaches_is_refused() -> None:
    with pytest.raises(ValueError, match="dlpack-8:1"):
        arrays.import_array(Foreign(np.zeros(2), device=(8, 1)))


def test_operations_take_foreign_arrays() -> None:
    tree = ddtree.build_tree(Foreign(LOG_PROBS), Foreign(IDS), Foreign(ROOTS), budget=2)
    assert tree.token_ids.tolist() == [[9, 1, 3]]


def test_mixed_kinds_have_no_common_namespace() -> None:
    with pytest.raises(TypeError, match="one kind"):
        arrays.array_namespace(np.zeros(2), Foreign(np.zeros(2)))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "int32", "bool"])
def test_torch_shares_memory_both_ways(torch: ModuleType, dtype: str) -> None:
    tensor = torch.ones(4, dtype=getattr(torch, dtype))
    native = arrays.import_array(tensor)
    assert arrays.dtype_name(native) == arrays.dtype_name(tensor) == dtype
    assert native.ctypes.data == tensor.data_ptr()
    back = arrays.export_array(native, tensor)
    assert isinstance(back, torch.Tensor)
    assert back.dtype == tensor.dtype
    assert back.data_ptr() == tensor.data_ptr()


def test_operations_on_torch_tensors_return_torch_tensors(torch: ModuleType) -> None:
    tensors = [torch.from_numpy(x) for x in (LOG_PROBS, IDS, ROOTS)]
    tree = ddtree.build_tree(*tensors, budget=5)
    expected = ddtree.build_tree(LOG_PROBS, IDS, ROOTS, budget=5)
    assert isinstance(tree.token_ids, torch.Tensor)
    assert tree.parents.tolist() == expected.parents.tolist()
    assert tree.visibility.tolist() == expected.visibility.tolist()
    assert tree.used_last_rank.tolist() == expected.used_last_rank.tolist()
    kept = ddtree.accept_tree(tree, torch.zeros_like(tree.token_ids))
    assert isinstance(kept.lengths, torch.Tensor)


def test_a_tensor_that_requires_gradients_is_refused(torch: ModuleType) -> None:
    with pytest.raises(TypeError, match=r"logits must not require gradients.*detach"):
        ddtree.topk_log_probs(torch.zeros(1, 1, 4, requires_grad=True), 2)


def test_a_lazily_negated_tensor_is_refused(torch: ModuleType) -> None:
    with pytest.raises(TypeError, match=r"logits must not be a lazily negated.*resolve_neg"):
        ddtree.topk_log_probs(torch._neg_view(torch.tensor([[[1.0, 3.0, 2.0]]])), 1)


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda t: t.nn.Parameter(t.zeros(1, 3, 2)), TypeError, r"log_probs must not require gradients.*detach\(\)"),
        (lambda t: t.zeros(1, 3, 2, device="meta"), ValueError, "token_ids lies on cpu but log_probs on meta:0: move"),
        (lambda t: t.zeros(1, 3, 2).to_sparse(), TypeError, r"log_probs cannot be shared .* other than torch.strided"),
        (lambda t: t.zeros(1, 3, 2, dtype=t.complex64), TypeError, "log_probs must be of type float32, got complex64"),
        (lambda t: t.zeros(3, 2, 2).transpose(0, 1)[:1], ValueError, r"log_probs must be C-contiguous, got strides"),
    ],
)
def test_a_tensor_that_cannot_serve_is_refused(torch: ModuleType, make: Any, error: Any, message: str) -> None:
    with pytest.raises(error, match=message):
        ddtree.build_tree(make(torch), torch.from_numpy(IDS), torch.from_numpy(ROOTS), budget=2)


def test_a_tensor_on_no_device_that_arrays_reach_is_refused(torch: ModuleType) -> None:
    with pytest.raises(ValueError, match="logits must lie on the CPU or on a CUDA device, got meta:0"):
        ddtree.topk_log_probs(torch.zeros(1, 1, 4, device="meta"), 2)


def test_tensors_on_two_devices_are_refused(torch: ModuleType) -> None:
    somewhere = Foreign(IDS, device=(2, 0))  # on a GPU, as far as it says
    with pytest.raises(ValueError, match="token_ids lies on cuda:0 but log_probs on cpu: move them to one device"):
        ddtree.build_tree(torch.from_numpy(LOG_PROBS), somewhere, torch.from_numpy(ROOTS), budget=2)


@pytest.fixture
def jax() -> Iterator[ModuleType]:
    """JAX on the CPU, where the reference works, also on a machine with a GPU."""
    if importlib.util.find_spec("jax") is None:
        pytest.skip("optional library jax is not installed")
    module = importlib.import_module("jax")
    with module.default_device(module.devices("cpu")[0]):
        yield module


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "int32", "bool"])
def test_jax_arrays_are_read_where_they_lie_and_come_back_as_jax_arrays(jax: ModuleType, dtype: str) -> None:
    array = jax.numpy.ones(4, dtype)
    native = arrays.import_array(array)
    assert arrays.dtype_name(native) == arrays.dtype_name(array) == dtype
    assert native.ctypes.data == array.unsafe_buffer_pointer()
    back = arrays.export_array(native.copy(), array)
    assert isinstance(back, jax.Array)
    assert (back.dtype, back.tolist()) == (array.dtype, array.tolist())


def test_what_jax_would_turn_into_another_type_stays_a_numpy_array(jax: ModuleType) -> None:
    given = [jax.numpy.asarray(x) for x in (LOG_PROBS, IDS, ROOTS)]
    with jax.enable_x64(False):
        tree = ddtree.build_tree(*given, budget=2, backend="reference")
        assert isinstance(tree.scores, np.ndarray)
        assert tree.scores.dtype == np.float64
        assert isinstance(tree.parents, jax.Array)
        assert tree.visibility.tolist() == ddtree.build_tree(LOG_PROBS, IDS, ROOTS, budget=2).visibility.tolist()
        assert isinstance(tree.visibility, jax.Array)
        kept = ddtree.accept_tree(tree, jax.numpy.zeros_like(tree.token_ids), backend="reference")
        assert isinstance(kept.lengths, jax.Array)


def test_jax_arrays_without_values_and_in_place_operations_on_any_are_refused(jax: ModuleType) -> None:
    with pytest.raises(
        TypeError, match=r"logits must be .*, got DynamicJaxprTracer; call this outside of jit and grad"
    ):
        jax.jit(lambda logits: ddtree.topk_log_probs(logits, 2))(jax.numpy.zeros((1, 1, 4)))
    cache = jax.numpy.zeros((1, 1, 4, 2))
    path, lengths, bonus = (np.array(a, np.int32) for a in ([[0]], [1], [5]))
    accepted = ddtree.Acceptance(path, lengths, bonus, np.zeros(1, np.bool_))
    with pytest.raises(ValueError, match="kv_cache must be writable, got a read-only array: pass a copy that may be"):
        ddtree.compact_cache(cache, np.zeros((1, 1), np.int32), np.zeros(1, np.int32), accepted)


def test_a_gpu_array_without_cupy_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(ImportError, match="pip install cupy-cuda13x"):
        ddtree.topk_log_probs(Foreign(np.zeros((1, 1, 4), np.float32), device=(2, 0)), 2)


def test_only_loaded_libraries_are_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    assert arrays.array_kind(Foreign(np.zeros(1))) == "dlpack"
    assert "torch" not in sys.modules
