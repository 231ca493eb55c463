"""Kernels in CUDA C++ for sm_90 and sm_120, compiled by NVRTC when they are first launched, through CuPy.

Beside the operations there are the ends of a resident round (``guard_draft``, ``commit_round``), what drafters need
there (``oracle_draft``, ``ngram_draft``, ``append_context``, ``block_attention``), a model's layers for few tokens, and
what a model of another library needs (its inputs, its mask, its caches compacted), named as in :mod:`ddtree.reference`
where they are there. All take and return CuPy arrays and work on CuPy's current stream; nothing waits for the GPU. A
``.cu`` file stands beside its launcher of the same name, ``program.py`` says how they are compiled, and
``RESOURCES.md`` what they need.

Importing this package imports neither CuPy nor a kernel: each name below loads the module of that name.
"""

from ddtree.kernels.lazy import load_on_demand

__all__ = [
    "accept_tree",
    "append_context",
    "block_attention",
    "build_tree",
    "choose_tokens",
    "commit_round",
    "compact_cache",
    "compact_layers",
    "copy_rows",
    "embed_tokens",
    "emitted_tokens",
    "guard_draft",
    "head_linear",
    "linear",
    "moe_experts",
    "ngram_draft",
    "oracle_draft",
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
