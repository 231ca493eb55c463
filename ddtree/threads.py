"""Threads of NumPy's matrix products."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar, cast

__all__ = ["SMALL", "small_products_on_one_thread"]

SMALL = 1024
"""Products of a model narrower than this take less time than it takes threads to meet."""

F = TypeVar("F", bound=Callable[..., Any])


def small_products_on_one_thread(method: F) -> F:
    """Have a method's products run on one thread where its object says that they are small (``small_products``).

    NumPy's library shares a product between all cores however small it is, and its threads wait for each other by
    spinning: where another program has one of the cores, that takes ten to twenty times as long as the product. The
    setting is the process's, and is put back at the end of the call.
    """

    @functools.wraps(method)
    def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not self.small_products:
            return method(self, *args, **kwargs)
        with _libraries().limit(limits=1, user_api="blas"):
            return method(self, *args, **kwargs)

    return cast(F, wrapper)


@functools.cache
def _libraries() -> Any:
    """The libraries that are loaded, which takes a millisecond to find out."""
    from threadpoolctl import ThreadpoolController

    return ThreadpoolController()
