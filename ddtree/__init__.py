"""ddtree: the laboratory for tree-structured speculative decoding.

The operations (:mod:`ddtree.ops`) take NumPy, CuPy, torch or JAX arrays and return arrays of the same kind. Importing
this package loads NumPy and nothing heavier: numba, CuPy, torch and matplotlib come with their first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from ddtree.backends import BackendUnavailable, get_backend
from ddtree.ops import (
    accept_tree,
    build_tree,
    choose_tokens,
    compact_cache,
    topk_log_probs,
    tree_positions,
    verify_attention,
    visibility_words,
)
from ddtree.trees import Acceptance, DraftTree, chain_tree, tree_from_parents

if TYPE_CHECKING:
    from ddtree.drafters import BlockDrafter, NgramDrafter, OracleDrafter
    from ddtree.engine import Engine, Generation, Round
    from ddtree.interop.huggingface import DDTreeDecoder
    from ddtree.kdtr import KdtrError, KdtrFile, read_kdtr, write_kdtr
    from ddtree.model import DeepseekV3, load_model
    from ddtree.pair import load_pair, load_prompts
    from ddtree.vocabulary import Vocabulary

__version__ = "0.1.0"

_LAZY = {
    "BlockDrafter": "ddtree.drafters",
    "DDTreeDecoder": "ddtree.interop.huggingface",
    "DeepseekV3": "ddtree.model",
    "Engine": "ddtree.engine",
    "Generation": "ddtree.engine",
    "KdtrError": "ddtree.kdtr",
    "KdtrFile": "ddtree.kdtr",
    "NgramDrafter": "ddtree.drafters",
    "OracleDrafter": "ddtree.drafters",
    "Round": "ddtree.engine",
    "Vocabulary": "ddtree.vocabulary",
    "load_model": "ddtree.model",
    "load_pair": "ddtree.pair",
    "load_prompts": "ddtree.pair",
    "read_kdtr": "ddtree.kdtr",
    "write_kdtr": "ddtree.kdtr",
}

_PACKAGES = ("analysis", "drafters", "engine", "interop", "model", "policies", "reference")
"""What is loaded when it is first asked for, as ``ddtree.model``."""

__all__ = [
    "Acceptance",
    "BackendUnavailable",
    "BlockDrafter",
    "DDTreeDecoder",
    "DeepseekV3",
    "DraftTree",
    "Engine",
    "Generation",
    "KdtrError",
    "KdtrFile",
    "NgramDrafter",
    "OracleDrafter",
    "Round",
    "Vocabulary",
    "accept_tree",
    "build_tree",
    "chain_tree",
    "choose_tokens",
    "compact_cache",
    "get_backend",
    "load_model",
    "load_pair",
    "load_prompts",
    "read_kdtr",
    "topk_log_probs",
    "tree_from_parents",
    "tree_positions",
    "verify_attention",
    "visibility_words",
    "write_kdtr",
]


def __getattr__(name: str) -> Any:
    module = _LAZY.get(name)
    if name in _PACKAGES:
        return importlib.import_module(f"ddtree.{name}")
    if module is None:
        raise AttributeError(f"module 'ddtree' has no attribute {name!r}")
    return getattr(importlib.import_module(module), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
