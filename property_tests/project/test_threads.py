"""Products of small models run on one thread, and nothing else does."""

from typing import Any

import numpy as np
import pytest
import threadpoolctl

from ddtree.threads import small_products_on_one_thread


class Model:
    def __init__(self, small: bool) -> None:
        self.small_products = small

    @small_products_on_one_thread
    def threads(self, *, error: Exception | None = None) -> list[Any]:
        if error is not None:
            raise error
        return blas_threads()


def blas_threads() -> list[Any]:
    np.ones((2, 2)) @ np.ones((2, 2))
    return [pool["num_threads"] for pool in threadpoolctl.threadpool_info() if pool["user_api"] == "blas"]


def test_only_a_small_model_is_on_one_thread_and_only_during_the_call() -> None:
    with threadpoolctl.threadpool_limits(2, user_api="blas"):
        before = blas_threads()
        if 2 not in before:
            pytest.skip("optional library OpenBLAS of two threads is not installed")
        assert Model(small=False).threads() == before
        assert set(Model(small=True).threads()) == {1}
        with pytest.raises(KeyError):
            Model(small=True).threads(error=KeyError())
        assert blas_threads() == before
