"""The kernels of numba_cuda compile for the GPUs that they are written for, without a GPU, and within its limits."""

import importlib.metadata
import importlib.util
import json
import os
import re
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest

if importlib.util.find_spec("numba_cuda") is None:
    pytest.skip("optional library numba-cuda is not installed", allow_module_level=True)
if importlib.util.find_spec("greenlet") is None:
    pytest.skip("optional library greenlet is not installed", allow_module_level=True)

from ddtree.backends import get_backend
from ddtree.kernels import numba_cuda
from ddtree.property_tests.project.test_simulator import run_python
from ddtree.protocols import OPS


def installed(distribution):
    try:
        return bool(importlib.metadata.version(distribution))
    except importlib.metadata.PackageNotFoundError:
        return False


def test_importing_the_package_imports_no_numba():
    run_python(
        "-c",
        "import sys, ddtree.kernels.numba_cuda as c\n"
        "assert 'numba' not in sys.modules and set(c.__all__) <= set(dir(c)) and not hasattr(c, 'no_such_operation')\n"
        "from ddtree.kernels.numba_cuda.tree_positions import add_depths\n"
        "assert callable(c.tree_positions) and c.tree_positions.__name__ == 'tree_positions'\n",
        NUMBA_ENABLE_CUDASIM="1",
    )


def test_arrays_are_those_of_where_the_kernels_run():
    code = "from ddtree.backends import get_backend as g; b = g('numba_cuda'); print(b.array_kind, *b.ops)"
    for simulated, kind in (("1", "numpy"), ("0", "cupy")):
        found = run_python("-c", code, NUMBA_ENABLE_CUDASIM=simulated).split()
        assert found[0] == kind
        assert found[1:] == [op for op in OPS if op in get_backend("numba_cuda").ops]


OWN = """
import numpy as np
from numba import cuda

@cuda.jit
def add(depths, lens, out):
    b = cuda.blockIdx.x
    for i in range(cuda.threadIdx.x, out.shape[1], cuda.blockDim.x):
        RACE
        out[b, i] = lens[b] + max(depths[b, i], 0)

def tree_positions(depths, prefix_lens):
    out = np.empty(depths.shape, np.int32)
    if len(depths):
        add[len(depths), 32](depths, prefix_lens, out)
    return out
"""


@pytest.mark.parametrize(
    ("statement", "told"), [("pass", "agrees with the reference"), ("out[0, 0] = 5", "race: thread 1")]
)
def test_kernels_of_ones_own_run_in_the_simulator(tmp_path, statement, told):
    (tmp_path / "own_cuda.py").write_text(OWN.replace("RACE", statement))
    command = [sys.executable, "-m", "ddtree", "check", "--backend", "own_cuda", "--examples", "20"]
    environment = os.environ | {"NUMBA_ENABLE_CUDASIM": "1"}
    found = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert found.returncode == (statement != "pass")
    assert told in found.stdout


COMPILE = """
import json, sys
from types import SimpleNamespace
from ddtree.kernels.numba_cuda.jit import cuda
from numba.cuda import dispatcher, types as t
from ddtree.kernels import numba_cuda

modules = {}
for name in ("tree_positions", "visibility_words", "accept_tree", "build_tree", "compact_cache", "topk_log_probs",
             "verify_attention", "choose_tokens"):
    getattr(numba_cuda, name)
    modules[name] = sys.modules["ddtree.kernels.numba_cuda." + name]

def a(dtype, ndim):
    return t.Array(dtype, ndim, "C")

i1, i2, i3, f8 = a(t.int32, 1), a(t.int32, 2), a(t.int32, 3), a(t.float64, 2)
kinds = {"float16": t.float16, "bfloat16": t.uint16, "float32": t.float32, "float64": t.float64}
real = {"float64": t.float64}
jobs = {
    "tree_positions": (modules["tree_positions"].add_depths, (i2, i1, i2)),
    "visibility_words": (modules["visibility_words"].fill_words, (i2, i1, a(t.uint32, 3))),
    "accept_tree": (
        modules["accept_tree"].accept_trees,
        (i2, i2, i1, i2, i1, a(t.int64, 1), t.int64, i2, i1, i1, a(t.boolean, 1)),
    ),
    "build_tree": (
        modules["build_tree"].build_trees,
        (a(t.float32, 3), i3, i1, i2, i2, i2, i2, f8, i1, f8, a(t.int64, 2), i2, i2, a(t.int64, 2), i2, i2),
    ),
}
for n in (8, 16, 32, 64):
    word = getattr(t, f"uint{n}")
    jobs[f"compact_cache {n}"] = modules["compact_cache"].move_rows, (a(word, 4), i2, i1, i2, i1, t.int64)
for kind, dtype in kinds.items():
    jobs[f"topk_log_probs {kind}"] = (
        modules["topk_log_probs"].kernel_for(kind),
        (a(dtype, 2), t.int64, a(t.int64, 2), i2, a(t.float32, 2), i2),
    )
    jobs[f"choose_tokens {kind}"] = (
        modules["choose_tokens"].kernel_for(kind),
        (a(dtype, 2), t.float64, t.float64, t.uint64, t.uint64, a(t.int64, 1), t.boolean, i2, i1),
    )
    r = real.get(kind, t.float32)
    attend, merge = modules["verify_attention"].kernels_for(kind, kind, 512, 576)
    q, cache, words = a(dtype, 4), a(dtype, 3), a(t.uint32, 3)
    parts = a(r, 4), a(r, 3), a(r, 3)
    jobs[f"verify_attention {kind}"] = attend, (q, cache, i2, i1, words, i1, r, *parts, t.int64)
    jobs[f"verify_attention {kind} merge"] = merge, (*parts, i1, q)
result = {}
for name, (kernel, signature) in jobs.items():
    for cc in ((9, 0), (12, 0)):
        # device functions are compiled for the current device, which need not be there
        dispatcher.get_current_device = lambda cc=cc: SimpleNamespace(compute_capability=cc)
        ptx, _ = cuda.compile_ptx(kernel.py_func, signature, cc=cc)
        result[f"{name} sm_{cc[0]}{cc[1]}"] = ptx
json.dump(result, sys.stdout)
"""


@pytest.mark.skipif(not installed("nvidia-nvvm"), reason="optional library nvidia-nvvm is not installed")
def test_every_kernel_compiles_for_both_architectures_without_a_gpu():
    compiled = json.loads(run_python("-c", COMPILE, NUMBA_ENABLE_CUDASIM="0"))
    assert {name.split()[0] for name in compiled} == set(get_backend("numba_cuda").ops)
    for name, ptx in compiled.items():
        assert ".entry" in ptx, name
        shared = re.findall(r"\.shared \.align \d+ \.b8 \w+\[(\d+)\]", ptx)
        assert sum(map(int, shared)) <= 49_152, name
        assert not (name.startswith("choose_tokens") and "fma.rn.f64" in ptx), f"{name} fuses, and so rounds otherwise"


def test_a_barrier_less_is_named_in_every_kernel():
    module = "ddtree.property_tests.project.missing_barriers"
    found = json.loads(run_python("-m", module, NUMBA_ENABLE_CUDASIM="1"))
    assert len(found) > 20
    for place, message in found.items():
        assert bool(message) != place.endswith(":0"), f"{place}: {message or 'nothing was found'}"


def test_every_barrier_has_a_comment_above():
    for path in Path(numba_cuda.__file__).parent.glob("*.py"):
        if path.name == "simulator.py":
            continue
        lines = path.read_text(encoding="utf-8").splitlines()
        for above, line in pairwise(lines):
            if re.match(r"\s+cuda\.sync\w+\(", line):
                assert above.lstrip().startswith("#"), f"{path.name}: {line.strip()}"
