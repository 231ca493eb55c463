"""Kernels in Python for NVIDIA GPUs, compiled by numba-cuda when they are first launched.

They take and return CuPy arrays and work on CuPy's current stream. With ``NUMBA_ENABLE_CUDASIM=1`` they run on the CPU
instead, on NumPy arrays, in the :mod:`~ddtree.kernels.numba_cuda.simulator`.

Importing this package imports neither numba nor a kernel: each name below loads the module of that name.
"""

from ddtree.kernels.lazy import load_on_demand

__all__ = [
    "accept_tree",
    "build_tree",
    "choose_tokens",
    "compact_cache",
    "topk_log_probs",
    "tree_positions",
    "verify_attention",
    "visibility_words",
]

load_on_demand(__name__)
