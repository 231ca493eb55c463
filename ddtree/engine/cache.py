"""The cache of a target that leaves it to the engine: pages of one array, handed out as requests grow."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ddtree.arrays import array_kind, array_namespace, dtype_name
from ddtree.checks import CACHE_INTS, FLOATS
from ddtree.ops import compact_cache
from ddtree.protocols import KVCache, Target
from ddtree.trees import Acceptance

__all__ = ["PagedCache"]


class PagedCache:
    """A paged array of a target's rows, as :class:`ddtree.protocols.RequestCache` has it.

    Parameters
    ----------
    target : Target
        Gives the array.
    most_rows : sequence of int
        The most rows that each request needs, those of its last tree included.
    page_size : int
        S, rows of a page.
    backend : str, optional
        Who compacts.
    """

    def __init__(self, target: Target, most_rows: Sequence[int], page_size: int, backend: str | None) -> None:
        self.pages = _Pages(most_rows, page_size)
        self.like = _checked(target.new_cache(self.pages.count, page_size), self.pages.count, page_size)
        self.backend = backend
        self._xp = array_namespace(self.like)

    def view(self, requests: Sequence[int], prefix_lens: NDArray[np.int32], window: Any) -> KVCache:
        """The cache as ``requests`` see it, with pages for ``window`` rows behind each prefix."""
        for request, rows in zip(requests, (prefix_lens + window).tolist(), strict=True):
            self.pages.reserve(request, rows)
        table = self._xp.asarray(self.pages.table[list(requests)])
        return KVCache(self.like, table, self._xp.asarray(prefix_lens))

    def compact(self, view: KVCache, acceptance: Acceptance) -> None:
        """Move the accepted rows up behind the prefix."""
        compact_cache(view.data, view.page_table, view.prefix_lens, acceptance, backend=self.backend, validate=False)

    def release(self, request: int) -> None:
        """Take back the pages of a request that is finished."""
        self.pages.release(request)


class _Pages:
    """Who owns which cache pages: handed out as a request grows, and back on the free list when it is finished."""

    def __init__(self, most_rows: Sequence[int], page_size: int) -> None:
        most = [-(-rows // page_size) for rows in most_rows]
        self.page_size = page_size
        self.count = sum(most)
        self.free = list(reversed(range(self.count)))
        self.table = np.zeros((len(most), max(most, default=0)), np.int32)
        self.owned = [0] * len(most)

    def reserve(self, request: int, rows: int) -> None:
        while self.owned[request] * self.page_size < rows:
            self.table[request, self.owned[request]] = self.free.pop()
            self.owned[request] += 1

    def release(self, request: int) -> None:
        self.free.extend(self.table[request, : self.owned[request]].tolist())
        self.owned[request] = 0


def _checked(data: Any, pages: int, page_size: int) -> Any:
    """A target's new cache, of which the rounds take for granted that every page handed out is in it."""
    try:
        kind = array_kind(data)
    except TypeError as error:
        raise TypeError(f"target.new_cache's result {error}") from error
    if kind not in ("numpy", "cupy"):
        raise TypeError(f"target.new_cache must return a NumPy or CuPy array, got {type(data).__name__}")
    if data.ndim != 4 or data.shape[1:3] != (pages, page_size) or not data.flags.c_contiguous:
        raise ValueError(
            f"target.new_cache must return a C-contiguous array of shape (layers, {pages}, {page_size}, C + R), "
            f"got shape {data.shape} and strides {data.strides}"
        )
    if dtype_name(data) not in (*FLOATS, *CACHE_INTS) or not getattr(data.flags, "writeable", True):
        raise TypeError(
            f"target.new_cache must return a writable array of {', '.join(FLOATS)} or integers, got {data.dtype}"
        )
    return data
