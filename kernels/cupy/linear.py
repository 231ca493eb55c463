"""Launches of ``linear.cu``, and what the launchers that multiply by few rows share."""

import functools
from typing import Any

import numpy as np

from ddtree.kernels.cupy.cublas import MOST_FEW, matmul
from ddtree.kernels.cupy.program import SUFFIXES, blocks_for, contiguous, empty, launch, multiprocessors
from ddtree.kernels.cupy.rms_norm import rms_norm

__all__ = ["Form", "form_of", "linear", "multiply", "sum_type"]

FMA_PARTS, MMA_PARTS = 4, 8
"""The most warps of a block: parts of the columns."""
LOADS, LONG_LOADS = 2, 8
"""Of each row of W that a part has before there are more parts: so that all are under way at once; by tensor cores, of
matrices that have LONG elements or more and compete with others for the GPU, to have more blocks resident."""
LONG = 1 << 18
RING_THREADS, RING_ROWS, STEP_BYTES = 128, 64, 128
LARGE = 1 << 23
"""Elements of a matrix from which tensor cores take it through the ring."""
BLOCKS_TO_FILL, MOST_SPLIT, LEAST_STEPS = 512, 8, 8
"""Blocks that fill a GPU, for which those of a cluster share the columns where rows are few; the most of a cluster, and
the fewest steps of STEP_BYTES of a row that a block has on the average."""
THREADS_AT_ONCE = 512
"""A multiprocessor's, with what registers a thread needs."""


def linear(x: Any, weight: Any, *, gain: Any = None, eps: float = 0.0, residual: Any = None, dtype: Any = None) -> Any:
    """``x Wᵀ`` of rows x (M, D), by a weight (O, D). See :func:`ddtree.model.layers.linear`.

    Sums are float32 (of float64, float64), and so is the scale of the norm; of float16 and bfloat16, the product of x
    and ``gain`` is rounded to their type before it is multiplied. Beside bfloat16 x the weight may be float32. Up to
    128 rows a row's result has the same bits whatever else is in the batch; more are cuBLAS's, which must have been
    called once before a capture.
    """
    dtype = x.dtype if dtype is None else np.dtype(dtype)
    if len(x) > MOST_FEW:
        return _many(x, weight, gain, eps, residual, dtype)
    return multiply("linear", x[:, None], weight[None], gain=gain, eps=eps, residual=residual, dtype=dtype)[:, 0]


def _many(x: Any, weight: Any, gain: Any, eps: float, residual: Any, dtype: Any) -> Any:
    if weight.dtype != x.dtype:
        x = x.astype(weight.dtype)
    if gain is not None:
        x = rms_norm(x, gain, eps=eps)
    y = empty((len(x), len(weight)), dtype)
    if residual is not None:
        y[...] = residual
    matmul(x[:, None], weight[None], y[:, None], add=residual is not None)
    return y


class Form:
    """How a weight's type, width and address are multiplied with few rows: what decides which sums have which bits.

    Attributes
    ----------
    suffix : str
        What kernels of these types end in.
    sizes : tuple of (int, int)
        Tokens of the tiles that there are, and rows of W that a block has beside them.
    threads : int
        Of a block: a warp a part of the columns.
    by_mma : bool
        Whether tensor cores multiply; else fused multiplications and additions do.
    by_ring : bool
        Whether they do so through a ring in shared memory, which takes no gain.
    any : bool
        Whether elements are loaded one by one, since 16 bytes are not aligned.
    """

    def __init__(self, types: tuple[Any, Any], D: int, aligned: bool, gated: bool, by_ring: bool, long: bool) -> None:
        of_x, of_weight = types
        size, mixed = of_weight.itemsize, of_x != of_weight
        if mixed and (str(of_x), str(of_weight)) != ("bfloat16", "float32"):
            raise TypeError(f"weight must be {of_x} like x, or float32 beside bfloat16, got {of_weight}")
        self.suffix = f"{SUFFIXES[str(of_x)]}_f32" if mixed else SUFFIXES[str(of_x)]
        self.any = D == 0 or D * size % 16 != 0 or not aligned
        self.by_mma = size == 2 and not self.any
        self.columns = 1 if self.any else 16 // size
        if self.by_mma:
            self.sizes: tuple[tuple[int, int], ...] = ((8, 16), (32, 16))
            most, loads = MMA_PARTS, blocks_for(D, 32)
        else:
            few = ((1, 8 if gated else 4), (2, 4), (4, 4))
            self.sizes = ((8, 4),) if self.any else (*few, (8, 8 if self.suffix == "f32" else 4))
            most, loads = FMA_PARTS, blocks_for(D, 32 * self.columns)
        parts = blocks_for(loads, LONG_LOADS if self.by_mma and long else LOADS)
        self.threads = 32 * min(most, 1 << max(parts - 1, 0).bit_length())
        self.by_ring = self.by_mma and by_ring
        if self.by_ring:
            self.sizes = tuple((tokens, RING_ROWS) for tokens in (8, 32, 72))
            self.threads = RING_THREADS

    def tile(self, tokens: int) -> tuple[int, int]:
        """The tile for so many tokens, or the largest: its tokens, and the rows of W beside them."""
        return next((tile for tile in self.sizes if tile[0] >= tokens), self.sizes[-1])

    def shared(self, tile: tuple[int, int]) -> int:
        """Bytes of dynamic shared memory that a block takes."""
        if self.by_ring:
            return (3 if tile[0] > 32 else 4) * (tile[0] + tile[1]) * STEP_BYTES
        return self.threads // 32 * tile[0] * (tile[1] + 4) * 4 if self.by_mma else 0

    def name(self, kind: str, tile: tuple[int, int]) -> str:
        """Of a kernel."""
        size = "any" if self.any else f"ring_{tile[0]}" if self.by_ring else tile[0]
        return f"{kind}_{size}_{self.suffix}"

    def gain(self, gain: Any, dtype: Any) -> Any:
        """A gain as the kernels read it, or, without one, a null pointer."""
        return np.uintp(0) if gain is None else self.taken(contiguous(gain, dtype))

    def taken(self, array: Any) -> Any:
        """Return the array, or a copy of it that lies as loads need it: one may be contiguous and not be aligned."""
        return array if self.takes(array) else array.copy()

    def takes(self, array: Any) -> bool:
        """Whether the rows of x, or a gain, lie as its loads need them."""
        size = array.dtype.itemsize
        if array.size and array.strides[-1] != size:
            return False
        across = (s for s, n in zip(array.strides[:-1], array.shape[:-1], strict=True) if n > 1)
        return all(n % (self.columns * size) == 0 for n in (array.data.ptr, *across))


def form_of(x: Any, weight: Any, *, gated: bool = False, by_ring: bool = False, long: bool = False) -> Form:
    """The form of a product of rows x (…, D) with a weight (…, D)."""
    return _form((x.dtype, weight.dtype), weight.shape[-1], weight.data.ptr % 16 == 0, gated, by_ring, long)


_form = functools.cache(Form)


def multiply(
    kind: str,
    x: Any,
    weight: Any,
    *,
    gain: Any = None,
    eps: float = 0.0,
    residual: Any = None,
    dtype: Any = None,
    out: Any = None,
) -> Any:
    """Run a product of ``linear.cu`` on few rows: ``linear``, or ``gated`` of gate's and up's rows of W.

    x is (M, H, D), ``weight`` (H, O or 2 O, D), the result (M, H, O): ``out`` or a new array. A ``residual`` is (M, O),
    with H = 1.
    """
    (M, H, D), rows = x.shape, weight.shape[1]
    outputs = rows // 2 if kind == "gated" else rows
    weight = contiguous(weight)
    form = form_of(x, weight, gated=kind == "gated", by_ring=H == 1 and weight.size >= LARGE)
    if form.by_ring and gain is not None:
        x, gain = rms_norm(x, gain, eps=eps), None
    x = form.taken(x)
    y = empty((M, H, outputs), x.dtype if dtype is None else dtype) if out is None else out
    tile = form.tile(M)
    if tile == form.sizes[-1] and not form.by_ring:
        # many blocks of few tokens rather than few of many, if all can be resident: W is then read from L2 more often
        most = THREADS_AT_ONCE * multiprocessors() // (form.threads * max(1, H))
        tile = next((t for t in form.sizes if blocks_for(M, t[0]) * blocks_for(rows, t[1]) <= most), tile)
    split = ring_split(rows, D) if form.by_ring else 1
    behind = np.uintp(0) if residual is None else contiguous(residual, y.dtype)
    strides = (np.int64(n // a.dtype.itemsize) for a in (x, y) for n in a.strides[:2])
    grid = split * blocks_for(M, tile[0]) * blocks_for(rows, tile[1]), H
    launch(
        *("linear", form.name(kind, tile), grid, form.threads),
        *(x, weight, form.gain(gain, x.dtype), behind, y, *(np.int32(n) for n in (M, D, outputs)), *strides),
        *(np.float64(eps), np.int32(y.dtype != x.dtype)),
        shared=form.shared(tile),
        cluster=split,
    )
    return y


def ring_split(rows: int, D: int) -> int:
    """Return how many blocks share W's columns: by its shape alone, so that sums have the same bits in every batch."""
    split, blocks, steps = 1, blocks_for(rows, RING_ROWS), blocks_for(2 * D, STEP_BYTES)
    while split < MOST_SPLIT and split * blocks < BLOCKS_TO_FILL and 2 * split * LEAST_STEPS <= steps:
        split *= 2
    return split


def sum_type(dtype: Any) -> Any:
    """The type that products of arrays of ``dtype`` are added up in."""
    return np.dtype(np.float64 if dtype == np.float64 else np.float32)
