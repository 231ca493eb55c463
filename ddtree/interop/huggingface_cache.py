"""The cache of a Hugging Face model while trees are checked on it: a request's rows in the first columns, compacted.

A request has a batch row of every layer's keys and values, (B, heads, rows, width). The first ``prefix_len`` rows are
its committed tokens'; the tree of a pass is appended for all requests alike, behind the longest prefix. What lies
between a request's prefix and its tree is left from former passes, finite, and seen by none.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ddtree.arrays import array_namespace, export_array, import_array, to_numpy
from ddtree.interop.layouts import additive_mask
from ddtree.trees import Acceptance, DraftTree

__all__ = ["CacheView", "LayerKind", "ModelCache", "layer_kinds"]


@dataclass(frozen=True)
class LayerKind:
    """How a layer attends.

    Attributes
    ----------
    name : str
        As ``config.layer_types`` has it, and a model that has several takes its masks by.
    window : int or None
        Positions that a token sees, itself included; None where it sees all before it.
    """

    name: str
    window: int | None


def layer_kinds(config: Any) -> list[LayerKind]:
    """Return how each layer of a text model attends, by its configuration.

    Raises
    ------
    ValueError
        A layer of another kind than full or sliding-window attention.
    """
    window = getattr(config, "sliding_window", None)
    chunk = getattr(config, "attention_chunk_size", None)
    names = getattr(config, "layer_types", None)
    if names is None:
        name = "sliding_attention" if window is not None else "chunked_attention" if chunk else "full_attention"
        names = [name] * config.num_hidden_layers
    for i, name in enumerate(names):
        if name not in ("full_attention", "sliding_attention"):
            why = (
                "sees tokens by their place in the cache"
                if "chunk" in name
                else "keeps a state beside each token's key and value, or in place of them,"
            )
            raise ValueError(
                f"model has a layer of {name!r} (config.layer_types[{i}]), which {why} and cannot be cut back to the "
                "accepted path of a tree: use a model whose layers are all full_attention or sliding_attention"
            )
    return [LayerKind(name, window if name == "sliding_attention" else None) for name in names]


@dataclass(frozen=True)
class CacheView:
    """A cache as one pass sees it.

    Attributes
    ----------
    owner : ModelCache
        Whose view it is.
    prefix_lens : array, int32, shape (B,)
        Committed rows of each request, where the rounds work.
    host_prefix_lens : array, int32, shape (B,)
        The same on the host.
    tree_row : int
        Row of every root: the greatest prefix length.
    """

    owner: ModelCache
    prefix_lens: Any
    host_prefix_lens: NDArray[np.int32]
    tree_row: int


class ModelCache:
    """A transformers cache as :class:`ddtree.protocols.RequestCache` has it.

    Parameters
    ----------
    past : transformers.Cache
        Empty. Its layers are dynamic or static ones. Sliding-window layers, which would drop keys that are still needed
        when a draft is turned down, are replaced by layers that keep all; of the dynamic ones, what no window reaches
        any more is dropped between passes.
    kinds : list of LayerKind
        How each layer attends.
    requests : int
        B, of the prefill.
    rows : int
        The most rows that are needed.
    like : torch.Tensor
        Any tensor of the model's type on its device.

    Raises
    ------
    TypeError, ValueError
        A cache that cannot be compacted, or is too small or in use.
    """

    def __init__(self, past: Any, kinds: list[LayerKind], requests: int, rows: int, like: Any) -> None:
        self.past, self.kinds, self.like = past, kinds, like
        self.requests = list(range(requests))
        self.static = _adopt(past, rows)
        self.dropped = 0  # rows that the windowed layers no longer hold
        self._host_like = like.new_empty(0, device="cpu")
        self._xp = array_namespace(import_array(like))

    def view(self, requests: Sequence[int], prefix_lens: NDArray[np.int32], window: Any) -> CacheView:
        """The cache of ``requests`` alone, and of their prefixes alone."""
        if self.requests != list(requests):
            self._select([self.requests.index(request) for request in requests])
            self.requests = list(requests)
        tree_row = int(prefix_lens.max())
        self._crop(tree_row, int(prefix_lens.min()))
        return CacheView(self, self._xp.asarray(prefix_lens), prefix_lens, tree_row)

    def compact(self, view: CacheView, acceptance: Acceptance) -> None:
        """Move the accepted rows of the pass over ``view`` up behind each prefix, in every layer, in place."""
        import torch

        nodes, lengths = to_numpy(acceptance.node_indices), to_numpy(acceptance.lengths)
        b, k = np.nonzero(np.arange(nodes.shape[1]) < lengths[:, None])
        source, target = view.tree_row + nodes[b, k].astype(np.int64), view.host_prefix_lens[b].astype(np.int64) + k
        moved = source != target
        if not moved.any():
            return
        b, source, target = (torch.from_numpy(a[moved]).to(self.like.device) for a in (b, source, target))
        for layer, _, dropped in self._layers():
            for tensor in (layer.keys, layer.values):
                # what is read is a copy, taken before anything is written
                tensor[b, :, target - dropped] = tensor[b, :, source - dropped]

    def release(self, request: int) -> None:
        """Nothing: the next view leaves out the batch row of a finished request."""

    def masks(self, tree: DraftTree, view: CacheView) -> Any:
        """Return what the model takes as ``attention_mask``: a mask (B, 1, N, rows), or one for each kind of layer.

        An unused slot sees what the root sees: its keys are finite, and so is what they are multiplied by 0 with.
        """
        masks = {kind.name: self._mask(tree, view, kind) for kind in dict.fromkeys(self.kinds)}
        return masks if len(masks) > 1 else next(iter(masks.values()))

    def _mask(self, tree: DraftTree, view: CacheView, kind: LayerKind) -> Any:
        mask = additive_mask(
            tree,
            view.host_prefix_lens,
            dtype=self.like.dtype,
            columns=self.static,
            tree_column=view.tree_row,
            window=kind.window,
        )
        for b in np.flatnonzero(tree.node_counts < tree.num_slots):
            mask[b, 0, tree.node_counts[b] :] = mask[b, 0, 0]
        seen = np.ascontiguousarray(mask[..., self.dropped if kind.window is not None else 0 :])
        return export_array(seen, self._host_like).to(self.like.device)

    def _layers(self) -> list[tuple[Any, LayerKind, int]]:
        """Each layer that holds keys, its kind, and how many of its first rows are dropped."""
        layers = zip(self.past.layers, self.kinds, strict=False)  # made in the first pass, where not before
        return [
            (layer, kind, self.dropped if kind.window is not None else 0)
            for layer, kind in layers
            if layer.keys is not None
        ]

    def _select(self, batch_rows: list[int]) -> None:
        import torch

        index = torch.tensor(batch_rows, device=self.like.device)
        for layer, _, _ in self._layers():
            layer.keys, layer.values = layer.keys.index_select(0, index), layer.values.index_select(0, index)

    def _crop(self, rows: int, shortest: int) -> None:
        """Keep the first ``rows`` rows, less those that no position from ``shortest`` on has in its window."""
        if self.static is not None:
            for layer, _, _ in self._layers():
                layer.cumulative_length.fill_(rows)
            return
        windows = [kind.window for kind in self.kinds if kind.window is not None]
        drop = max(self.dropped, shortest - max(windows) + 1) if windows else 0
        for layer, kind, dropped in self._layers():
            first = drop - dropped if kind.window is not None else 0
            layer.keys = layer.keys[:, :, first : rows - dropped]
            layer.values = layer.values[:, :, first : rows - dropped]
        self.dropped = drop if self._layers() else 0


def _adopt(cache: Any, rows: int) -> int | None:
    """See that a cache can be compacted, and make its layers keep their keys; return a static cache's rows."""
    from transformers import cache_utils

    name = type(cache).__name__
    if not isinstance(cache, cache_utils.Cache):
        raise TypeError(f"cache must be a transformers Cache, got {name}: pass 'dynamic' or 'static'")
    if isinstance(cache, cache_utils.EncoderDecoderCache):
        raise TypeError(f"cache must be a decoder's own, got {name}: pass 'dynamic' or 'static'")
    if getattr(cache, "offloading", False):
        raise TypeError(f"cache must stay on the model's device, got a {name} that is offloaded: pass offloading=False")
    dummy = getattr(cache_utils, "DummyLayer", None)  # of a layer without keys of its own
    made = getattr(cache, "layer_class_to_replicate", None)
    static = [layer.max_cache_len for layer in cache.layers if type(layer) is cache_utils.StaticLayer]
    columns = int(max([rows, *static]))
    for i, layer in enumerate(cache.layers):
        if type(layer) is cache_utils.DynamicSlidingWindowLayer:
            cache.layers[i] = cache_utils.DynamicLayer()
        elif type(layer) is cache_utils.StaticSlidingWindowLayer:
            cache.layers[i] = cache_utils.StaticLayer(max_cache_len=columns)
    classes = {type(layer) for layer in cache.layers} - {dummy} | ({made} if made is not None else set())
    if classes not in ({cache_utils.DynamicLayer}, {cache_utils.StaticLayer}):
        wrong = sorted(c.__name__ for c in classes - {cache_utils.DynamicLayer, cache_utils.StaticLayer})
        raise TypeError(
            f"cache must have layers whose rows can be moved, DynamicLayer or StaticLayer alone, got a {name} of "
            f"{', '.join(wrong) or 'both'}: pass 'dynamic' or 'static'"
        )
    if any(
        layer.keys is not None and int(layer.get_seq_length()) for layer in cache.layers if type(layer) is not dummy
    ):
        raise ValueError(f"cache must be empty, got a {name} in use: make a new one in each call")
    if classes == {cache_utils.DynamicLayer}:
        return None
    if min([columns, *static]) < columns:
        raise ValueError(
            f"cache must hold {columns} rows, the longest request and its tree, got a {name} of {min(static)}: make it "
            "of the number of rows that it is called with"
        )
    return columns
