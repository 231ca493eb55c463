"""What a launcher of CUDA C++ and its source both say, they say alike; needs neither a GPU nor CuPy."""

import importlib
import re

import numpy as np
import pytest

from ddtree.kernels.cupy.build_tree import most_kept, paths_size
from ddtree.kernels.cupy.program import PROGRAMS, program_source
from ddtree.kernels.cupy.topk_log_probs import power_of_2


@pytest.mark.parametrize("program", ["build_tree", "topk_log_probs"])
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
