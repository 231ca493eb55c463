"""CuPy as far as the rounds of a Hugging Face model use it, on the host: memory, mirrors and graphs without a GPU.

Arrays lie where the current allocator says. While a stream captures, work is kept and not done; a graph's launch does
it again, on what memory holds by then. So a wrong address, a copy that is missing from a graph, or a value that was
read when it was captured changes the tokens here as on a GPU. Kernels are the references, on the same arrays.
"""

import contextlib
import ctypes
import importlib
from dataclasses import fields
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np

from ddtree import reference
from ddtree.trees import Acceptance, DraftTree


class Pointer:
    """Memory from an address on; what it belongs to stays alive with it."""

    device_id = 0

    def __init__(self, ptr, owner):
        self.ptr, self.owner = ptr, owner

    def __add__(self, offset):
        return Pointer(self.ptr + offset, self.owner)


class Array:
    """An array that NumPy does not take for its own."""

    def __init__(self, shape, dtype=np.float32, memptr=None, strides=None):
        shape = (shape,) if isinstance(shape, int) else tuple(shape)
        size = max(1, int(np.prod(shape)) * np.dtype(dtype).itemsize)
        self.memory = CUDA.alloc(size) if memptr is None else memptr
        if strides is not None:
            size = max(size, sum((n - 1) * s for n, s in zip(shape, strides, strict=True)) + np.dtype(dtype).itemsize)
        held: Any = (ctypes.c_char * size).from_address(self.memory.ptr)
        held.memory = self.memory  # which whoever looks at it keeps
        self.host = np.ndarray(shape, dtype, held, 0, strides)

    @classmethod
    def over(cls, host, memory):
        """Another look at an array's memory."""
        array = cls.__new__(cls)
        array.host, array.memory = host, memory
        return array

    @property
    def data(self):
        """Where it begins."""
        return Pointer(self.host.ctypes.data, self.memory)

    @property
    def device(self):
        """The one that there is."""
        return SimpleNamespace(id=0)

    def __getattr__(self, name):
        if name in ("host", "memory"):
            raise AttributeError(name)
        value = getattr(self.host, name)
        return value if not callable(value) else lambda *args, **options: self._same(value(*args, **options))

    def _same(self, value):
        return Array.over(value, self.memory) if isinstance(value, np.ndarray) else value

    def __getitem__(self, place):
        return self._same(self.host[host_of(place)])

    def __setitem__(self, place, value):
        self.host[host_of(place)] = host_of(value)

    def __eq__(self, other):
        return self._same(self.host == host_of(other))

    def __and__(self, other):
        return self._same(self.host & host_of(other))

    def __iter__(self):
        return (self[i] for i in range(len(self.host)))

    def __len__(self):
        return len(self.host)

    def fill(self, value):
        """Fill it, or have a graph do so."""
        CUDA.do(lambda: self.host.fill(value))

    def get(self):
        """A copy on the host."""
        return self.host.copy()

    def __dlpack__(self, **options):
        return Exported(self)

    def __dlpack_device__(self):
        return (2, 0)


class Exported:
    """What stands for a capsule."""

    def __init__(self, array):
        self.array = array


class Stream:
    """The one stream, on which work is done at once but while it captures."""

    ptr = 7

    def __init__(self, non_blocking=False):
        pass

    def __enter__(self):
        return self

    def __exit__(self, *error):
        pass

    def synchronize(self):
        """Nothing is under way."""
        assert CUDA.captured is None, "waited for a stream that captures"

    def begin_capture(self):
        CUDA.captured = []

    def end_capture(self):
        work, CUDA.captured = CUDA.captured, None
        assert work
        return Graph(work)


class Graph:
    """Work to be done again and again."""

    launches = 0

    def __init__(self, work):
        self.work = work

    def upload(self, stream):
        """It is here already."""

    def launch(self, stream):
        assert isinstance(stream, Stream)
        Graph.launches += 1
        for each in self.work:
            each()


class Cuda:
    """What is CuPy's ``cuda``."""

    Stream = Stream

    def __init__(self):
        self.captured: Any = None
        self.allocator = self.host_memory

    def host_memory(self, size):
        held = np.full(max(size, 1), 0x5A, np.uint8)  # no number that is expected
        return Pointer(held.ctypes.data, held)

    def alloc(self, size):
        return self.allocator(size)

    class MemoryPool:
        """Of a graph, which needs no memory but a mirror's."""

        kept: ClassVar[set[Any]] = set()
        """All of them that were made, but those that were given back."""

        def __init__(self):
            self.kept.add(self)

        def malloc(self, size):
            raise AssertionError("memory was taken while a stream captures")

        def free_all_blocks(self):
            assert CUDA.captured is None, "memory was given back while a stream captures"
            self.kept.discard(self)

        def total_bytes(self):
            return 0

    def UnownedMemory(self, address, size, owner, device):  # noqa: N802 - CuPy's name
        return Pointer(address, owner)

    def MemoryPointer(self, memory, offset):  # noqa: N802 - CuPy's name
        return memory + offset

    def alloc_pinned_memory(self, size):
        pinned = type("PinnedMemory", (ctypes.c_ubyte * size,), {})()
        pinned.ptr = ctypes.addressof(pinned)
        return pinned

    @contextlib.contextmanager
    def using_allocator(self, allocator):
        before, self.allocator = self.allocator, allocator
        try:
            yield
        finally:
            self.allocator = before

    def get_current_stream(self, *device):
        return Stream()

    def Device(self, number=0):  # noqa: N802 - CuPy's name
        return contextlib.nullcontext()

    def do(self, work):
        if self.captured is None:
            work()
        else:
            self.captured.append(work)


CUDA = Cuda()


def host_of(value):
    """A value's arrays as NumPy has them."""
    if isinstance(value, DraftTree | Acceptance):
        return type(value)(**{f.name: host_of(getattr(value, f.name)) for f in fields(value)})
    if isinstance(value, list | tuple):
        return type(value)(host_of(v) for v in value)
    return value.host if isinstance(value, Array) else value


def like_of(result):
    """Arrays for a result, where the allocator says."""
    if isinstance(result, DraftTree | Acceptance):
        return type(result)(**{f.name: like_of(getattr(result, f.name)) for f in fields(result)})
    if isinstance(result, tuple):
        return tuple(map(like_of, result))
    return Array(result.shape, result.dtype) if isinstance(result, np.ndarray) else result


def filled(arrays, result):
    """Put a result where it belongs."""
    if isinstance(result, DraftTree | Acceptance):
        for f in fields(result):
            filled(getattr(arrays, f.name), getattr(result, f.name))
    elif isinstance(result, tuple):
        for array, value in zip(arrays, result, strict=True):
            filled(array, value)
    elif isinstance(result, np.ndarray):
        arrays.host[...] = result


def kernel(function):
    """A reference as a kernel: its result lies where the allocator says, and a graph makes it anew."""

    def launched(*args, **options):
        def result():
            with np.errstate(all="ignore"):
                return function(*map(host_of, args), **{name: host_of(value) for name, value in options.items()})

        arrays = like_of(result()) if function not in IN_PLACE else None
        CUDA.do(lambda: filled(arrays, result()))
        return arrays

    launched.__name__, launched.__module__ = function.__name__, __name__
    return launched


def copy_rows(slots, out, *, word=4, fill=0):
    """Rows from where the slots say."""
    if out.size == 0:
        return
    words = out.view(f"V{word}") if word == 16 else out.view({2: np.uint16, 4: np.uint32}[word])
    arrays = words.reshape(slots.size // 2, -1, words.shape[-1])
    if word != 16:
        arrays[:] = fill
    for rows, (address, width) in zip(arrays, slots.reshape(-1, 2).tolist(), strict=True):
        if width:
            held = (ctypes.c_char * (len(rows) * width * word)).from_address(address)
            rows[:, :width] = np.ndarray((len(rows), width), rows.dtype, held)


def choose_tokens(logits, *, place=None, **options):
    """Of logits that are here, or where the place says."""
    if place is not None:
        held = (ctypes.c_char * logits.nbytes).from_address(int(place[0]))
        logits = np.ndarray(logits.shape, logits.dtype, held)
    return reference.choose_tokens(logits, **options)


IN_PLACE = (copy_rows, reference.tree_mask, reference.compact_layers)
OPS = (
    *("build_tree", "tree_positions", "accept_tree"),
    *("guard_draft", "tree_inputs", "emitted_tokens"),
)


def module_of_kernels():
    """What is ``ddtree.kernels.cupy``."""
    functions = [getattr(reference, op) for op in OPS]
    named = {f.__name__: kernel(f) for f in (*functions, choose_tokens, *IN_PLACE)}
    return SimpleNamespace(
        **named, __name__="ddtree.kernels.cupy", array_kind="cupy", layer_table=reference.layer_table
    )


def asarray(values, dtype=None):
    """A copy of host values, or the array itself."""
    if isinstance(values, Array):
        return values if dtype is None or values.dtype == dtype else array(values.host, dtype)
    return array(values, dtype)


def ascontiguousarray(values, dtype=None):
    """The array itself where it is so already."""
    copied = isinstance(values, Array) and not values.flags.c_contiguous
    return asarray(values.get() if copied else values, dtype)


def array(values, dtype=None):
    """A copy."""
    host = np.asarray(host_of(values), dtype)
    made = Array(host.shape, host.dtype)
    made.host[...] = host
    return made


def install(monkeypatch):
    """Have all torch tensors taken for tensors on a GPU, and this module for CuPy."""
    torch: Any = importlib.import_module("torch")
    arrays: Any = importlib.import_module("ddtree.arrays")
    cache: Any = importlib.import_module("ddtree.interop.huggingface_cache")
    rounds: Any = importlib.import_module("ddtree.interop.huggingface_rounds")
    huggingface: Any = importlib.import_module("ddtree.interop.huggingface")
    named: dict[str, Any] = {"empty": Array, "array": array, "asarray": asarray, "ascontiguousarray": ascontiguousarray}
    named |= {"zeros": lambda shape, dtype: array(np.zeros(shape, dtype)), "isnan": lambda a: array(np.isnan(a.host))}
    named |= {"cumsum": lambda a, axis: array(np.cumsum(host_of(a), axis))}
    named |= {"full": lambda shape, value, dtype: array(np.full(shape, value, dtype))}
    fake = SimpleNamespace(__name__="cupy", ndarray=Array, cuda=CUDA, **named)
    kernels = module_of_kernels()
    monkeypatch.setitem(importlib.import_module("sys").modules, "cupy", fake)
    monkeypatch.setattr(arrays, "_KINDS", {})
    monkeypatch.setattr(arrays, "_torch_device", lambda device: arrays.Device("cuda", 0))
    monkeypatch.setattr(arrays, "_cupy", lambda: fake)
    monkeypatch.setattr(arrays, "torchs_handle", lambda number: 7)
    monkeypatch.setattr(rounds, "torchs_handle", lambda number: 7)
    monkeypatch.setattr(arrays, "_stream", lambda handle, number: Stream())
    monkeypatch.setattr(arrays, "_OnTorchsStream", lambda number, handle: contextlib.nullcontext())
    monkeypatch.setattr(arrays, "_as_cupy", lambda tensor, number: as_cupy(torch, arrays, tensor))
    from_dlpack = torch.from_dlpack
    monkeypatch.setattr(
        torch, "from_dlpack", lambda a: torch.from_numpy(a.array.host) if isinstance(a, Exported) else from_dlpack(a)
    )
    monkeypatch.setattr(huggingface.HuggingFaceTarget, "on_gpu", True)
    real = importlib.import_module

    def imported(name, package=None):
        known = {"ddtree.kernels.cupy": kernels, "ddtree.kernels.cupy.compact_layers": kernels, "cupy": fake}
        return known.get(name) or real(name, package)

    monkeypatch.setattr(cache.importlib, "import_module", imported)
    serve = importlib.import_module("ddtree.backends").Backend("fake", kernels, "cupy")
    monkeypatch.setattr(real("ddtree.interop.mirror"), "copy_rows", kernels.copy_rows)
    monkeypatch.setattr(rounds, "serving", lambda op, like: serve.op(op))
    checks: Any = real("ddtree.checks")
    select = checks.select_backend
    monkeypatch.setattr(
        checks, "select_backend", lambda op, b, device: serve if device.type == "cuda" else select(op, b, device)
    )
    Graph.launches = 0
    Cuda.MemoryPool.kept.clear()


def as_cupy(torch, arrays, tensor):
    """A tensor's memory."""
    strides = tuple(step * tensor.element_size() for step in tensor.stride())
    return Array(tuple(tensor.shape), arrays._numpy_type(tensor.dtype), Pointer(tensor.data_ptr(), tensor), strides)
