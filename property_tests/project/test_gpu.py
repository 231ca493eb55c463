"""On a GPU: CuPy and torch arrays share memory and stream, and the model and the engine run on them.

The backend here is a plain one, so that no kernel's fault can show as one of the arrays, the model or the engine: it
takes CuPy arrays and lets the reference work on copies.
"""

from __future__ import annotations

import functools
import importlib
from dataclasses import fields, replace
from types import ModuleType
from typing import Any

import numpy as np
import pytest

import ddtree
from ddtree import arrays, reference
from ddtree.property_tests.compare import assert_same_tree
from ddtree.property_tests.project.on_gpu import gpu_library
from ddtree.protocols import OPS


@pytest.fixture
def cupy() -> ModuleType:
    return gpu_library("cupy")


@pytest.fixture
def torch() -> ModuleType:
    gpu_library("cupy")
    return gpu_library("torch")


def _mapped(value: Any, change: Any) -> Any:
    if isinstance(value, ddtree.DraftTree | ddtree.Acceptance):
        return replace(value, **{f.name: _mapped(getattr(value, f.name), change) for f in fields(value)})
    if isinstance(value, tuple):
        return tuple(_mapped(v, change) for v in value)
    return change(value) if hasattr(value, "__dlpack__") else value


class OnTheHost:
    """A backend that takes CuPy arrays and lets the reference work on copies of them."""

    array_kind = "cupy"

    def __init__(self) -> None:
        self.streams: list[int] = []
        for op in OPS:
            setattr(self, op, functools.partial(self._serve, op))

    def _serve(self, op: str, *args: Any, **kwargs: Any) -> Any:
        cp = importlib.import_module("cupy")
        self.streams.append(cp.cuda.get_current_stream().ptr)
        args, kwargs = _mapped(args, cp.asnumpy), {k: _mapped(v, cp.asnumpy) for k, v in kwargs.items()}
        if op == "compact_cache":
            raise AssertionError("in place: served below")
        return _mapped(getattr(reference, op)(*args, **kwargs), cp.asarray)


def compact_on_the_host(kv_cache: Any, *args: Any) -> None:
    """Compact a copy and put it back."""
    cp = importlib.import_module("cupy")
    copy = cp.asnumpy(kv_cache)
    reference.compact_cache(copy, *_mapped(args, cp.asnumpy))
    kv_cache[...] = cp.asarray(copy)


HOST = OnTheHost()
HOST.compact_cache = compact_on_the_host  # type: ignore[attr-defined]
SPEC = f"{__name__}:HOST"

LOG_PROBS = np.log(np.array([[[0.5, 0.25]] * 3], np.float32))
IDS = np.array([[[1, 2], [3, 4], [5, 6]]], np.int32)
ROOTS = np.array([9], np.int32)
EXPECTED = reference.build_tree(LOG_PROBS, IDS, ROOTS, budget=5)


def test_cupy_arrays_go_in_and_come_out(cupy: ModuleType) -> None:
    x = cupy.asarray(LOG_PROBS)
    assert arrays.array_kind(x) == "cupy"
    assert arrays.array_namespace(x) is cupy
    assert str(arrays.device_of(x)) == "cuda:0"
    tree = ddtree.build_tree(x, cupy.asarray(IDS), cupy.asarray(ROOTS), budget=5, backend=SPEC)
    assert isinstance(tree.parents, cupy.ndarray)
    assert tree.visibility.get().tolist() == EXPECTED.visibility.tolist()
    assert tree.used_last_rank.get().tolist() == EXPECTED.used_last_rank.tolist()
    assert_same_tree(_mapped(tree, cupy.asnumpy), EXPECTED)


def test_torch_tensors_go_in_and_come_out_on_torchs_stream(torch: ModuleType) -> None:
    side = torch.cuda.Stream()
    tensors = [torch.from_numpy(a).cuda() for a in (LOG_PROBS, IDS, ROOTS)]
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        assert arrays.current_stream(tensors[0]) == side.cuda_stream
        tree = ddtree.build_tree(*tensors, budget=5, backend=SPEC)
    assert HOST.streams[-1] == side.cuda_stream
    assert tree.parents.device == tensors[0].device
    assert tree.parents.tolist() == EXPECTED.parents.tolist()
    assert tree.visibility.tolist() == EXPECTED.visibility.tolist()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "int32"])
def test_torch_and_cupy_share_memory(torch: ModuleType, dtype: str) -> None:
    tensor = torch.ones(4, dtype=getattr(torch, dtype), device="cuda")
    native = arrays.import_array(tensor)
    assert arrays.dtype_name(native) == dtype
    assert native.data.ptr == tensor.data_ptr()
    assert arrays.export_array(native, tensor).data_ptr() == tensor.data_ptr()
    assert arrays.to_numpy(tensor).astype(np.float32).tolist() == [1.0] * 4


def test_values_on_a_gpu_are_checked_when_asked_for(cupy: ModuleType) -> None:
    ids = IDS.copy()
    ids[0, 2, 1] = 5
    on_gpu = [cupy.asarray(a) for a in (LOG_PROBS, ids, ROOTS)]
    ddtree.build_tree(*on_gpu, budget=5, backend=SPEC)
    with pytest.raises(ValueError, match=r"token_ids\[0, 2, 1\] = 5 already stands at rank 0"):
        ddtree.build_tree(*on_gpu, budget=5, backend=SPEC, validate=True)


def test_two_devices_are_refused(cupy: ModuleType) -> None:
    with pytest.raises(ValueError, match="token_ids lies on cpu but log_probs on cuda:0: move them to one device"):
        ddtree.build_tree(cupy.asarray(LOG_PROBS), IDS, cupy.asarray(ROOTS), budget=5, backend=SPEC)
    with pytest.raises(ValueError, match="backend 'reference' takes arrays on the CPU, got log_probs on cuda:0"):
        ddtree.build_tree(*(cupy.asarray(a) for a in (LOG_PROBS, IDS, ROOTS)), budget=5, backend="reference")


def test_decoding_on_a_gpu_gives_the_golden_tokens(cupy: ModuleType) -> None:
    from ddtree.drafters import NgramDrafter
    from ddtree.model import golden_bundle

    golden, _ = ddtree.read_kdtr(golden_bundle())
    model = ddtree.load_model(golden_bundle(), dtype="float64", backend=SPEC)
    assert isinstance(model.new_cache(1, 1), cupy.ndarray)
    engine = ddtree.Engine(model, NgramDrafter(), backend=SPEC)
    expected = golden["golden/tokens"].tolist()
    for mode in ("autoregressive", "tree"):
        run = engine.generate([golden["golden/prompt"]], len(expected), mode=mode)
        assert run.tokens[0].tolist() == expected
