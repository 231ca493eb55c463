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

__all__ = ["PagedCache", "Pages", "new_array"]


class PagedCache:
    """A paged array of a target's rows, as :class:`ddtree.protocols.RequestCache` has it.

    Parameters
    ----------
    target : Target
        Gives the array.
    pages : Pages
        Who owns which of its pages.
    backend : str, optional
        Who compacts.
    like : array, optional
        An array that the target made before, of at least as many pages, to be used again.

    Raises
    ------
    MemoryError
        The device has no room for the array.
    """

    def __init__(self, target: Target, pages: Pages, backend: str | None, like: Any = None) -> None:
        self.pages, self.backend = pages, backend
        self.like = new_array(target, pages) if like is None else like
        self._xp = array_namespace(self.like)

    def admit(self, request: int) -> bool:
        """Give a request the pages of its whole life; False, and none, where too few are free."""
        return self.pages.reserve(request)

    def view(self, requests: Sequence[int], prefix_lens: NDArray[np.int32], window: Any) -> KVCache:
        """The cache as ``requests`` see it, with pages for ``window`` rows behind each prefix."""
        table = self._xp.asarray(self.pages.table[list(requests)])
        return KVCache(self.like, table, self._xp.asarray(prefix_lens))

    def compact(self, view: KVCache, acceptance: Acceptance) -> None:
        """Move the accepted rows up behind the prefix."""
        compact_cache(view.data, view.page_table, view.prefix_lens, acceptance, backend=self.backend, validate=False)

    def release(self, request: int) -> None:
        """Take back the pages of a request that is finished."""
        self.pages.release(request)


class Pages:
    """Who owns which cache pages: handed out when a request begins, and back on the free list when it is finished.

    Parameters
    ----------
    most_rows : sequence of int
        The most rows that each request needs, those of its last tree included.
    page_size : int
        S, rows of a page.
    max_batch : int
        The most requests that hold pages at a time.
    rows : int, optional
        The most rows that there are; by default as many as the ``max_batch`` longest requests need.
    """

    def __init__(self, most_rows: Sequence[int], page_size: int, max_batch: int, rows: int | None = None) -> None:
        self.most_rows, self.page_size = most_rows, page_size
        self.need = [-(-most // page_size) for most in most_rows]
        self.count = sum(sorted(self.need, reverse=True)[:max_batch])
        if rows is not None:
            self.count = min(self.count, rows // page_size)
        self.free = list(reversed(range(self.count)))
        self.table = np.zeros((len(self.need), max(self.need, default=0)), np.int32)
        self.owned = [0] * len(self.need)

    def reserve(self, request: int) -> bool:
        """Give a request all that it needs, or nothing."""
        need = self.need[request]
        if need > len(self.free):
            return False
        self.table[request, :need] = [self.free.pop() for _ in range(need)]
        self.owned[request] = need
        return True

    def release(self, request: int) -> None:
        """Take back what a request has."""
        self.free.extend(self.table[request, : self.owned[request]].tolist())
        self.owned[request] = 0


def new_array(target: Target, pages: Pages, count: int | None = None) -> Any:
    """Return a new array of ``count`` pages for a :class:`PagedCache`, by default as many as there are."""
    count = pages.count if count is None else count
    return _checked(_new(target, pages, count), count, pages.page_size)


def _new(target: Target, pages: Pages, count: int) -> Any:
    try:
        return target.new_cache(count, pages.page_size)
    except MemoryError as error:
        longest = int(np.argmax(pages.need))
        raise MemoryError(
            f"no room for a cache of {count:,} pages of {pages.page_size} rows, of which prompts[{longest}], the "
            f"longest, needs {pages.need[longest]:,}: {error}; pass a smaller max_batch, cache_rows or max_new_tokens, "
            "or fewer prompts"
        ) from error


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
