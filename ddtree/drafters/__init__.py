"""Drafters: callables ``(context, depth, topk) -> (log_probs, token_ids)``; a function of your own will do as well."""

from ddtree.drafters.block import BlockConfig, BlockDrafter
from ddtree.drafters.ngram import NgramDrafter
from ddtree.drafters.oracle import NoiseLaw, OracleDrafter

__all__ = ["BlockConfig", "BlockDrafter", "NgramDrafter", "NoiseLaw", "OracleDrafter"]
