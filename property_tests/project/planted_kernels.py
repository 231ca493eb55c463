"""Kernels with one planted fault each, and their correct twins, run in the simulator by ``test_simulator.py``.

As a program, with ``NUMBA_ENABLE_CUDASIM=1``, it runs each in every order and prints what came of it as JSON:
``{name: [result or message, one an order]}``, and the microseconds that a barrier of 64 threads takes.
"""

import json
import sys
import time

import numpy as np
from numba import cuda, float64, int32

from ddtree.kernels.numba_cuda import simulator

ALL = 0xFFFFFFFF


@cuda.jit
def reversed_(out):
    tile = cuda.shared.array(64, int32)
    t = cuda.threadIdx.x
    tile[t] = t
    # all elements of the tile, to the threads that read them
    cuda.syncthreads()
    out[t] = tile[63 - t]


@cuda.jit
def reversed_without_a_barrier(out):
    tile = cuda.shared.array(64, int32)
    t = cuda.threadIdx.x
    tile[t] = t
    out[t] = tile[63 - t]


@cuda.jit
def rewritten_without_a_barrier(out):
    tile = cuda.shared.array(64, int32)
    t = cuda.threadIdx.x
    tile[t] = t
    cuda.syncthreads()
    out[t] = tile[63 - t]
    tile[t] = 0


@cuda.jit
def race_between_warps(out):
    tile = cuda.shared.array(64, int32)
    t = cuda.threadIdx.x
    tile[t] = t
    cuda.syncthreads()
    tile[t] = 2 * t
    cuda.syncwarp()
    out[t] = tile[(t + 32) % 64] - 2 * ((t + 32) % 64) + 63 - t


@cuda.jit
def exchange_within_warps(out):
    tile = cuda.shared.array(64, int32)
    t = cuda.threadIdx.x
    tile[t] = t
    # the warp's elements, to its lanes
    cuda.syncwarp()
    out[t] = 63 - tile[t ^ 1] + (t ^ 1) - t


@cuda.jit
def exchange_within_warps_without_sync(out):
    tile = cuda.shared.array(64, int32)
    t = cuda.threadIdx.x
    tile[t ^ 1] = t
    cuda.syncthreads()
    tile[t] = t
    out[t] = tile[t ^ 1]


@cuda.jit
def exchange_ordered_by_a_shuffle(out):
    tile = cuda.shared.array(64, int32)
    t = cuda.threadIdx.x
    tile[t] = t
    other = cuda.shfl_xor_sync(ALL, t, 1)
    out[t] = tile[other]


@cuda.jit
def race_between_blocks(out):
    if cuda.threadIdx.x == 0:
        out[0] = cuda.blockIdx.x


@cuda.jit
def atomics(out):
    total = cuda.shared.array(1, int32)
    t = cuda.threadIdx.x
    if t == 0:
        total[0] = 0
    cuda.syncthreads()
    cuda.atomic.add(total, 0, 1)
    cuda.syncthreads()
    out[t] = total[0] - 1 - t


@cuda.jit
def sum_of_warp(out):
    t = cuda.threadIdx.x
    total = 1
    for step in (16, 8, 4, 2, 1):
        total += cuda.shfl_xor_sync(ALL, total, step)
    lane = cuda.laneid
    total += cuda.popc(cuda.ballot_sync(ALL, lane < 8)) - 8
    total += cuda.popc(cuda.lanemask_lt()) - lane
    if lane < 16:
        total += cuda.shfl_sync(0xFFFF, lane, 5) - 5
        total += (
            cuda.shfl_down_sync(0xFFFF, lane, 1) - lane - 1 if lane < 15 else cuda.shfl_down_sync(0xFFFF, lane, 0) - 15
        )
    up = cuda.shfl_up_sync(ALL, lane, 1)
    total += up - max(lane - 1, 0)
    total += cuda.ffs(cuda.match_any_sync(ALL, lane // 4)) - 1 - lane // 4 * 4
    if not cuda.any_sync(ALL, lane == 31) or cuda.all_sync(ALL, lane < 31) or cuda.activemask() != -1:
        total = 0
    out[t] = total + 31 - t


@cuda.jit
def mask_without_the_caller(out):
    if cuda.laneid < 20:
        out[cuda.threadIdx.x] = cuda.ballot_sync(0xFFFF, 1)


@cuda.jit
def mask_with_lanes_that_return(out):
    if cuda.laneid < 20:
        out[cuda.threadIdx.x] = cuda.ballot_sync(ALL, 1)


@cuda.jit
def shuffle_from_outside_the_mask(out):
    if cuda.laneid < 16:
        out[cuda.threadIdx.x] = cuda.shfl_sync(0xFFFF, cuda.laneid, 20)


@cuda.jit
def mask_wider_than_the_block(out):
    out[cuda.threadIdx.x] = cuda.ballot_sync(ALL, 1)


@cuda.jit
def much_shared_memory(out):
    tile = cuda.shared.array((26, 512), float64)
    tile[0, cuda.threadIdx.x] = 0
    out[cuda.threadIdx.x] = 0


@cuda.jit
def much_static_memory(out):
    tile = cuda.shared.array((13, 512), float64)
    tile[0, cuda.threadIdx.x] = 0
    out[cuda.threadIdx.x] = 0


@cuda.jit
def dynamic(out):
    tile = cuda.shared.array(0, float64)
    t = cuda.threadIdx.x
    tile[t] = t
    cuda.syncthreads()
    out[t] = tile[63 - t]


@cuda.jit
def barrier_in_a_branch(out):
    if cuda.threadIdx.x < 32:
        cuda.syncthreads()
    out[cuda.threadIdx.x] = 0


@cuda.jit
def barriers_in_two_branches(out):
    if cuda.threadIdx.x % 2:
        cuda.syncthreads()
    else:
        cuda.syncthreads()
    out[cuda.threadIdx.x] = 0


@cuda.jit
def deadlock(out):
    if cuda.threadIdx.x == 3:
        cuda.syncthreads()
    cuda.syncwarp()
    if cuda.threadIdx.x != 3:
        cuda.syncthreads()
    out[cuda.threadIdx.x] = 0


@cuda.jit
def two_arrays_on_a_line(out):
    a, b = cuda.shared.array(64, int32), cuda.shared.array(64, int32)
    t = cuda.threadIdx.x
    a[t], b[t] = t, 100
    cuda.syncthreads()
    out[t] = a[63 - t] + b[t] - 100


@cuda.jit
def negative_index(out):
    out[cuda.threadIdx.x - 1] = 0


@cuda.jit
def index_behind_the_end(out):
    out[cuda.threadIdx.x + 1] = 0


@cuda.jit
def unwritten_local_memory(out):
    own = cuda.local.array(2, int32)
    own[0] = 0
    out[cuda.threadIdx.x] = own[1]


@cuda.jit
def barriers(n):
    for _ in range(n):
        cuda.syncthreads()


LAUNCHES = {
    # grid, block, stream, bytes of dynamic shared memory; one block of two warps where nothing is said
    "race_between_blocks": (2, 64),
    "mask_wider_than_the_block": (1, 48),
    "dynamic": (1, 64, 0, 64 * 8),
}
KERNELS = [
    value
    for value in list(globals().values())
    if hasattr(value, "py_func") and value.py_func.__module__ == __name__ and value is not barriers
]


def result_of(kernel, launch, options):
    """The kernel's output of 64 numbers, or the message of its error."""
    out = np.full(64, -7, np.int32)
    try:
        with simulator.schedule(**options):
            kernel[launch](out)
    except simulator.SimulatorError as error:
        return str(error)
    return out.tolist()


def main():
    orders = [{"order": order, "seed": seed} for order, seed in (("forward", 0), ("reverse", 0), ("shuffle", 1))]
    results = {
        kernel.__name__: [result_of(kernel, LAUNCHES.get(kernel.__name__, (1, 64)), options) for options in orders]
        for kernel in KERNELS
    }
    results["dynamic with 106,496 bytes"] = [result_of(dynamic, (1, 64, 0, 106_496), o) for o in orders]
    results["dynamic with 106,496 bytes on sm_90"] = [
        result_of(dynamic, (1, 64, 0, 106_496), o | {"architecture": "sm_90"}) for o in orders
    ]
    results["dynamic with none"] = [result_of(dynamic, (1, 64), o) for o in orders]
    results["too many threads"] = [result_of(reversed_, (1, 1025), o) for o in orders]
    results["too many blocks"] = [result_of(reversed_, ((1, 65_536), 64), o) for o in orders]
    barriers[1, 64](10)
    start = time.perf_counter()
    barriers[1, 64](1000)
    microseconds = (time.perf_counter() - start) * 1e6 / 1000
    json.dump({"results": results, "microseconds a barrier of 64 threads": microseconds}, sys.stdout)


if __name__ == "__main__":
    simulator.install()
    main()
