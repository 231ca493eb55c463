"""The simulator names what is wrong with a kernel, in every order of threads, and runs a correct one in all of them."""

import functools
import importlib.metadata
import importlib.util
import json
import os
import re
import subprocess
import sys

import pytest

if importlib.util.find_spec("numba_cuda") is None:
    pytest.skip("optional library numba-cuda is not installed", allow_module_level=True)
if importlib.util.find_spec("greenlet") is None:
    pytest.skip("optional library greenlet is not installed", allow_module_level=True)

from ddtree.kernels.numba_cuda import simulator

LINE = r"planted_kernels\.py:\d+"
SHARED = rf"the shared array of {LINE}\[\d+\]"
FAULTS = {
    "reversed_without_a_barrier": rf"thread \d+ reads {SHARED} at {LINE}, which nobody has written",
    "rewritten_without_a_barrier": rf"race: thread \d+ (reads|writes) {SHARED} at {LINE}, which thread \d+ (wrote"
    rf"|read) at {LINE}, and no barrier stands between",
    "race_between_warps": rf"race: thread \d+ reads {SHARED} at {LINE}, which thread \d+ wrote at {LINE}, and no bar",
    "exchange_within_warps_without_sync": "race: .*, and neither a barrier nor a syncwarp of both stands between",
    "exchange_ordered_by_a_shuffle": "race: .*, and neither a barrier nor a syncwarp of both stands between",
    "race_between_blocks": rf"race: thread 0 writes argument out\[0\] at {LINE}, which thread 0 of another block wrote",
    "mask_without_the_caller": rf"calls ballot_sync with mask 0x0000ffff, which excludes its own lane 1\d, at {LINE}",
    "mask_with_lanes_that_return": rf"ballot_sync with mask 0xffffffff at {LINE}: lanes 20-31 of warp 0 are named and "
    r"never arrive, their threads returned; threads 0-19, 32-51 wait in ballot_sync",
    "shuffle_from_outside_the_mask": rf"reads lane 20 by shfl_sync at {LINE}, which mask 0x0000ffff does not name",
    "mask_wider_than_the_block": "lanes 16-31 are behind the block's last thread, 47",
    "much_shared_memory": r"106,496 bytes of shared memory .*: a block of sm_120 has 101,376",
    "much_static_memory": r"53,248 bytes of static shared memory .*: no more than 49,152 compile",
    "barrier_in_a_branch": rf"divergent barrier: threads 32-63 returned, and threads 0-31 wait in syncthreads at "
    rf"{LINE}; all",
    "barriers_in_two_branches": rf"divergent: .* wait in syncthreads at {LINE}; threads .* wait in syncthreads",
    "deadlock": rf"deadlock: syncwarp with mask 0xffffffff at {LINE} waits for lanes 3; threads 0-2, 4-31 wait in "
    rf"syncwarp with mask 0xffffffff at {LINE}; threads 3 wait in syncthreads at {LINE}; threads 32-63 wait in syncth",
    "negative_index": rf"uses index \[-1\] of argument out, whose shape is \(64,\), at {LINE}",
    "index_behind_the_end": r"uses index \[64\] of argument out, whose shape is \(64,\)",
    "dynamic with 106,496 bytes": r"106,496 bytes of dynamic shared memory: a block of sm_120 has 101,376",
    "dynamic with none": "asks for dynamic shared memory, and the launch gives none",
    "too many threads": "1,025 threads a block: sm_120 has 1,024",
    "too many blocks": r"a grid of \(1, 65536, 1\) blocks",
}
CORRECT = (
    "reversed_",
    "exchange_within_warps",
    "atomics",
    "sum_of_warp",
    "two_arrays_on_a_line",
    "dynamic",
    "dynamic with 106,496 bytes on sm_90",
)


def run_python(*arguments, **environment):
    result = subprocess.run(
        [sys.executable, "-W", "error", *arguments],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


@functools.cache
def planted():
    """What came of each kernel: in a process of its own, since this one may have the compiler."""
    module = "ddtree.property_tests.project.planted_kernels"
    return json.loads(run_python("-m", module, NUMBA_ENABLE_CUDASIM="1"))["results"]


@pytest.mark.parametrize("fault", FAULTS)
def test_fault_is_named_in_every_order(fault):
    for message in planted()[fault]:
        assert isinstance(message, str), "nothing was found"
        assert re.search(FAULTS[fault], message), message


@pytest.mark.parametrize("kernel", CORRECT)
def test_correct_kernel_gives_its_result_in_every_order(kernel):
    for result in planted()[kernel]:
        assert result == list(range(63, -1, -1))


def test_local_memory_begins_as_poison():
    assert planted()["unwritten_local_memory"] == [[0x5A5A5A5A] * 64] * 3


def test_every_planted_kernel_is_looked_at():
    assert set(planted()) == {*FAULTS, *CORRECT, "unwritten_local_memory"}


def test_installed_version_of_numba_cuda_fits():
    """Where this fails, numba-cuda's simulator has changed: see what ``simulator.misfit`` compares, and VERSIONS."""
    code = (
        "from importlib.metadata import version\n"
        "from numba.cuda.simulator import kernel, kernelapi\n"
        "from ddtree.kernels.numba_cuda.simulator import misfit\n"
        "print(misfit(version('numba-cuda'), kernel.FakeCUDAKernel, kernelapi.FakeCUDAModule))\n"
    )
    problem = run_python("-c", code, NUMBA_ENABLE_CUDASIM="1").strip()
    assert problem == "None", f"numba-cuda {importlib.metadata.version('numba-cuda')}: {problem}"


class Changed:
    """Stands for a class of another numba-cuda."""

    fn = _device = grid_dim = block_dim = dynshared_size = None

    def __init__(self, *args, **kwargs):
        pass

    def __getitem__(self, configuration):
        self.block_dim = (3, 1, 1)
        return self


def test_what_changed_in_numba_cuda_is_named():
    assert simulator.misfit("0.29.1", None, None) == "versions from 0.30 and below 0.31 are known to fit"
    assert "0.31" in str(simulator.misfit("0.31.0", None, None))
    problem = simulator.misfit("0.30.4", Changed, Changed)
    assert problem == "its classes have no gridDim, blockDim, fp16, grid, gridsize"
    assert "made in another way" in str(simulator.misfit("0.30.4", Changed, None))


def test_schedules_are_checked():
    with (
        pytest.raises(ValueError, match="order must be one of forward, reverse, shuffle, got 'random'"),
        simulator.schedule("random"),
    ):
        pass
    with (
        pytest.raises(ValueError, match="architecture must be one of sm_90, sm_120, got 'sm_80'"),
        simulator.schedule(architecture="sm_80"),
    ):
        pass
    assert {simulator.order_of(seed)["order"] for seed in range(3)} == set(simulator.ORDERS)
