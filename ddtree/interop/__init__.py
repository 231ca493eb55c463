"""Draft trees in the layouts that serving engines and models take, and back."""

from ddtree.interop.layouts import (
    RaggedMasks,
    RetrieveArrays,
    additive_mask,
    flat_masks,
    packed_masks,
    relabel,
    retrieve_arrays,
    tree_from_retrieve_arrays,
)

__all__ = [
    "RaggedMasks",
    "RetrieveArrays",
    "additive_mask",
    "flat_masks",
    "packed_masks",
    "relabel",
    "retrieve_arrays",
    "tree_from_retrieve_arrays",
]
