"""Kernels in CUDA C++ for sm_90 and sm_120, compiled by NVRTC when they are first launched, through CuPy.

Beside the operations there are a model's layers for few tokens, and what a model of another library needs (its inputs,
its mask, its caches compacted), named as in :mod:`ddtree.reference` where they are there. All take and return CuPy
arrays and work on CuPy's current stream; nothing waits for the GPU. A ``.cu`` file stands beside its launcher of the
same name, ``program.py`` says how they are compiled, and ``RESOURCES.md`` what they need.

Importing this package imports neither CuPy nor a kernel: each name below loads the module of that name.
"""

from ddtree.kernels.lazy import load_on_demand

__all__ = [
    "accept_tree",
    "build_tree",
    "choose_tokens",
    "compact_cache",
    "compact_layers",
    "copy_rows",
    "emitted_tokens",
    "find_draft_fault",
    "linear",
    "moe_experts",
    "rms_norm",
    "rope",
    "route_experts",
    "swiglu",
    "topk_log_probs",
    "tree_inputs",
    "tree_mask",
    "tree_positions",
    "verify_attention",
    "visibility_words",
]

load_on_demand(__name__)
