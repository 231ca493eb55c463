"""What a launcher of CUDA C++ and its source both say, they say alike; needs neither a GPU nor CuPy."""

import ctypes
import importlib
import re
import sys
import types

import ml_dtypes
import numpy as np
import pytest

from ddtree.kernels.cupy import cublas, program
from ddtree.kernels.cupy.build_tree import most_kept, paths_size
from ddtree.kernels.cupy.linear import form_of, ring_split
from ddtree.kernels.cupy.program import PROGRAMS, program_source
from ddtree.kernels.cupy.topk_log_probs import power_of_2
from ddtree.kernels.cupy.verify_attention import few_parts, plain_parts


@pytest.mark.parametrize("program", ["build_tree", "linear", "topk_log_probs"])
def test_constants_of_one_name_are_equal(program):
    assert program in PROGRAMS
    module = importlib.import_module(f"ddtree.kernels.cupy.{program}")
    stated = dict(re.findall(r"(\w+) = (\d+)[,;]", program_source(program)))
    shared = [name for name, value in vars(module).items() if name.isupper() and type(value) is int and name in stated]
    assert len(shared) >= 3
    for name in shared:
        assert getattr(module, name) == int(stated[name]), name


def test_sizes():
    assert [power_of_2(k) for k in (1, 2, 3, 64, 65, 1024)] == [1, 2, 4, 64, 128, 1024]
    assert [most_kept(n) for n in (0, 1, 3, 4, 1024)] == [1, 2, 4, 5, 1280]
    assert paths_size(1024, 15, 1024, 2) <= 100_000, "trees of 1,024 nodes lie in shared memory"
    # every part of a request's memory is aligned, and there is room for a sort of all paths that are kept
    for budget in np.arange(0, 3000, 37).tolist():
        assert paths_size(budget, 3, 5, 4) % 8 == 0
        assert power_of_2(most_kept(budget)) < 2 * most_kept(budget) + 2


def test_a_context_is_split_until_the_gpu_is_full_and_no_finer_than_its_tiles():
    sizes = (0, 1, 63, 64, 100, 512, 2048, 100_000)
    assert [plain_parts(keys, 2, 132) for keys in sizes] == [1, 1, 2, 2, 4, 16, 64, 64]
    assert [plain_parts(2048, blocks, 132) for blocks in (1, 16, 64, 130, 2000)] == [64, 16, 4, 2, 1]


def test_clusters_of_few_rows_leave_room_for_one_another():
    assert [few_parts(tiles, 132) for tiles in (1, 8, 9, 16, 17, 66, 67, 132, 133)] == [8, 8, 4, 4, 2, 2, 1, 1, 0]


def test_the_columns_of_few_rows_are_shared_and_those_of_many_or_short_ones_are_not():
    assert [ring_split(rows, 8192) for rows in (1, 7168, 8192, 16_384, 32_705, 163_840)] == [8, 8, 4, 2, 1, 1]
    assert [ring_split(7168, D) for D in (8, 512, 1016, 1024, 2048, 4096, 8192)] == [1, 1, 2, 2, 4, 8, 8]


def on_device(dtype, *shape, address=512):
    """What a launcher asks of an array on a GPU."""
    array = np.empty(shape, dtype)
    facts = {name: getattr(array, name) for name in ("shape", "dtype", "strides", "size", "ndim")}
    return types.SimpleNamespace(**facts, data=types.SimpleNamespace(ptr=address))


@pytest.mark.parametrize(
    ("dtype", "D", "threads", "names"),
    [
        (np.float32, 96, 32, ["1_f32", "2_f32", "4_f32", "8_f32", "8_f32"]),
        (np.float32, 1024, 128, ["1_f32", "2_f32", "4_f32", "8_f32", "8_f32"]),
        (np.float32, 61, 32, ["any_f32"] * 5),
        (np.float64, 256, 64, ["1_f64", "2_f64", "4_f64", "8_f64", "8_f64"]),
        (ml_dtypes.bfloat16, 128, 64, ["8_bf16", "8_bf16", "8_bf16", "8_bf16", "32_bf16"]),
        (ml_dtypes.bfloat16, 2048, 256, ["8_bf16", "8_bf16", "8_bf16", "8_bf16", "32_bf16"]),
        (ml_dtypes.bfloat16, 132, 128, ["any_bf16"] * 5),
    ],
)
def test_forms(dtype, D, threads, names):
    """A weight alone decides how columns are shared; the rows, how many are taken at once. Each is a kernel."""
    form = form_of(on_device(dtype, 3, D), on_device(dtype, 1, 40, D))
    assert form.threads == threads
    assert [form.name("linear", form.tile(M)) for M in (1, 2, 3, 8, 65)] == [f"linear_{name}" for name in names]
    assert (form.by_mma, form.any) == (names[0] == "8_bf16", names[0].startswith("any"))


def test_forms_of_unaligned_and_unlike_arrays():
    weight = on_device(np.float32, 1, 4, 64)
    assert form_of(on_device(np.float32, 1, 64), on_device(np.float32, 1, 4, 64, address=520)).any
    form = form_of(on_device(np.float32, 1, 64), weight)
    assert form.takes(on_device(np.float32, 2, 64))
    assert not form.takes(on_device(np.float32, 2, 64, address=516))
    assert not form.takes(on_device(np.float32, 2, 66)), "its second row is not aligned"
    assert form.takes(on_device(np.float32, 1, 66)), "it has no second row"
    assert form_of(on_device(ml_dtypes.bfloat16, 1, 64), weight).suffix == "bf16_f32"
    with pytest.raises(TypeError, match=r"weight must be float16 like x, or float32 beside bfloat16, got float32"):
        form_of(on_device(np.float16, 1, 64), weight)


def test_a_product_that_cublas_refuses_is_an_error():
    cublas._check(0)
    with pytest.raises(RuntimeError, match=r"cublasCreate failed with status 1$"):
        cublas._check(1, "cublasCreate")


class Lying:
    """An array in host memory that says where it lies as CuPy's do."""

    def __init__(self, host):
        self.host = host

    def __getattr__(self, name):
        return getattr(self.host, name)

    def __getitem__(self, place):
        return Lying(self.host[place])

    def __len__(self):
        return len(self.host)

    @property
    def data(self):
        return types.SimpleNamespace(ptr=self.host.ctypes.data)

    def copy(self):
        return lying(self.host)


def lying(values, *, off=0):
    """A copy of the values, ``off`` bytes from where 16 are aligned."""
    room = np.zeros(values.nbytes + 64, np.uint8)
    begin = -room.ctypes.data % 16 + off
    host = room[begin : begin + values.nbytes].view(values.dtype).reshape(values.shape)
    host[...] = values
    return Lying(host)


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float32, np.float64])
@pytest.mark.parametrize("tokens", [1, 3])
def test_rows_that_are_contiguous_and_not_aligned_are_not_loaded_where_they_lie(monkeypatch, dtype, tokens):
    """Kernels load 16 bytes at once, and what a slice begins with may lie anywhere."""
    modules = [importlib.import_module(f"ddtree.kernels.cupy.{name}") for name in ("linear", "moe_experts")]
    launched = []
    for module in modules:
        monkeypatch.setattr(module, "launch", lambda program, name, *rest, **_: launched.append((name, rest)))
        monkeypatch.setattr(module, "empty", lambda shape, dtype: lying(np.zeros(shape, dtype)))
    monkeypatch.setattr(modules[0], "multiprocessors", lambda: 132)

    def rows_read():
        return [a.host for _, rest in launched for a in rest if isinstance(a, Lying) and a.shape[-1] == 64]

    x, size = np.ones((tokens, 64), dtype), np.dtype(dtype).itemsize
    weight = lying(np.ones((40, 64), dtype))
    for large in (1 << 40, 0):
        monkeypatch.setattr(modules[0], "LARGE", large)
        launched.clear()
        for off in (0, size):
            modules[0].linear(lying(x, off=off), weight)
        assert len(launched) == 2
        assert launched[0][0] == launched[1][0]
        assert all(array.ctypes.data % 16 == 0 for array in rows_read())
    launched.clear()
    ids, weights = lying(np.zeros((tokens, 2), np.int32)), lying(np.ones((tokens, 2), np.float32))
    matrices = lying(np.ones((3, 80, 64), dtype)), lying(np.ones((3, 64, 40), dtype))
    if dtype == np.float64:
        weights = lying(np.ones((tokens, 2)))
    modules[1].moe_experts(lying(x, off=size), ids, weights, *matrices)
    assert [name.partition("_")[0] for name, _ in launched] == ["gated", "down", "combine"]
    assert all(array.ctypes.data % 16 == 0 for array in rows_read() if array.dtype == dtype)


def test_without_cublas_it_is_said(monkeypatch):
    runtime = types.SimpleNamespace(runtimeGetVersion=lambda: 99_010)
    monkeypatch.setitem(sys.modules, "cupy", types.SimpleNamespace(cuda=types.SimpleNamespace(runtime=runtime)))
    monkeypatch.setitem(sys.modules, "cuda.pathfinder", None)
    cublas._library.cache_clear()
    with pytest.raises(
        RuntimeError, match=r"libcublas\.so\.99 cannot be loaded, which products of more than 128 rows need"
    ):
        cublas._library()


def test_a_launch_that_the_driver_refuses_is_an_error(monkeypatch):
    stream = types.SimpleNamespace(ptr=0)
    cuda = types.SimpleNamespace(get_current_stream=lambda: stream)
    monkeypatch.setattr(program, "_cupy", lambda: types.SimpleNamespace(cuda=cuda))
    seen = []

    def refuse(launch, function, pointers, extra):
        config = launch._obj
        seen.append((list(config.grid), list(config.block), config.shared, config.count, config.attributes[0].value[0]))
        seen.append(ctypes.cast(pointers[1], ctypes.POINTER(ctypes.c_int32))[0])
        return 1

    monkeypatch.setattr(program, "_driver", lambda: types.SimpleNamespace(cuLaunchKernelEx=refuse))
    function = types.SimpleNamespace(kernel=types.SimpleNamespace(ptr=0))
    arguments = (on_device(np.float32, 1), np.int32(7))
    with pytest.raises(
        RuntimeError, match=r"cuLaunchKernelEx failed with status 1: grid \(2, 3\), block \(64,\), shared 16"
    ):
        program._launch(function, (2, 3), (64,), arguments, 16, early=True)
    assert seen == [([2, 3, 1], [64, 1, 1], 16, 1, 1), 7]
