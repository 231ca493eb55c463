"""The rules, in NumPy: one short file an operation, written to be read beside a paper.

Every function has the name, the arguments and the meaning of the public one in :mod:`ddtree`, which checks arguments
and carries the full docstring; these trust their caller.
"""

from ddtree.reference.accept_tree import accept_tree
from ddtree.reference.append_context import append_context
from ddtree.reference.block_attention import block_attention
from ddtree.reference.build_tree import build_tree
from ddtree.reference.choose_tokens import choose_tokens
from ddtree.reference.commit_round import commit_round
from ddtree.reference.compact_cache import compact_cache
from ddtree.reference.compact_layers import compact_layers, layer_table
from ddtree.reference.embed_tokens import embed_tokens
from ddtree.reference.emitted_tokens import emitted_tokens
from ddtree.reference.find_draft_fault import find_draft_fault
from ddtree.reference.find_tree_fault import find_tree_fault
from ddtree.reference.guard_draft import guard_draft
from ddtree.reference.linear import head_linear, linear
from ddtree.reference.mla import mla
from ddtree.reference.moe_experts import moe_experts
from ddtree.reference.ngram_draft import ngram_draft
from ddtree.reference.oracle_draft import oracle_draft
from ddtree.reference.rms_norm import rms_norm
from ddtree.reference.rope import (
    deinterleave,
    rope_cos_sin,
    rope_frequencies,
    rotate_halves,
    rotate_pairs,
    yarn_mscale,
)
from ddtree.reference.route_experts import route_experts
from ddtree.reference.swiglu import swiglu
from ddtree.reference.topk_log_probs import topk_log_probs
from ddtree.reference.tree_inputs import tree_inputs
from ddtree.reference.tree_mask import tree_mask
from ddtree.reference.tree_positions import tree_positions
from ddtree.reference.verify_attention import verify_attention
from ddtree.reference.visibility_words import visibility_words

__all__ = [
    "accept_tree",
    "append_context",
    "block_attention",
    "build_tree",
    "choose_tokens",
    "commit_round",
    "compact_cache",
    "compact_layers",
    "deinterleave",
    "embed_tokens",
    "emitted_tokens",
    "find_draft_fault",
    "find_tree_fault",
    "guard_draft",
    "head_linear",
    "layer_table",
    "linear",
    "mla",
    "moe_experts",
    "ngram_draft",
    "oracle_draft",
    "rms_norm",
    "rope_cos_sin",
    "rope_frequencies",
    "rotate_halves",
    "rotate_pairs",
    "route_experts",
    "swiglu",
    "topk_log_probs",
    "tree_inputs",
    "tree_mask",
    "tree_positions",
    "verify_attention",
    "visibility_words",
    "yarn_mscale",
]
