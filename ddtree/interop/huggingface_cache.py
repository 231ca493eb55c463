"""The cache of a Hugging Face model while trees are checked on it: a request's rows in the first columns, compacted.

A request has a batch row of every layer's keys and values, (B, heads, rows, width). The first ``prefix_len`` rows are
its committed tokens'; the tree of a pass is appended for all requests alike, behind the longest prefix. What lies
between a request's prefix and its tree is left from former passes, finite, and seen by none.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ddtree.arrays import array_namespace, export_array, import_array
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
        Empty. Its layers are dynamic or static ones. Dynamic ones are replaced by layers that stay where they are, see
        :class:`ddtree.interop.huggingface_layers.RowsLayer`; sliding-window layers, which would drop keys that are
        still needed when a draft is turned down, by layers that keep all. Of the dynamic ones, what no window reaches
        any more is dropped between passes.
    kinds : list of LayerKind
        How each layer attends.
    requests : int
        B, of the prefill.
    rows : int
        The most rows that are needed.
    like : torch.Tensor
        Any tensor of the model's type on its device.

    Attributes
    ----------
    kernels : module
        Who compacts the layers and makes masks on the model's device: :mod:`ddtree.reference` on the CPU, or
        :mod:`ddtree.kernels.cupy`.
    mask_kinds : list of LayerKind
        Those that have a mask of their own.
    moves : list of int
        One number, which is another whenever a layer's memory is.

    Raises
    ------
    TypeError, ValueError
        A cache that cannot be compacted, or is too small or in use.
    """

    def __init__(self, past: Any, kinds: list[LayerKind], requests: int, rows: int, like: Any) -> None:
        self.past, self.kinds, self.like = past, kinds, like
        self.requests = list(range(requests))
        self.rows = rows
        self.mask_kinds = list(dict.fromkeys(kinds))
        self.static, self._places = _adopt(past, kinds, rows)
        self.moves = self._places[0].moves
        self.dropped = 0  # rows that the windowed layers no longer hold
        windows = [kind.window for kind in kinds if kind.window is not None and self.static is None]
        self._window = max(windows, default=None)
        self._counts: Any = None  # of static layers, all of them
        self._table: tuple[Any, Any] = None, None  # what it was made of, and the table itself
        self._host_like = like.new_empty(0, device="cpu")
        self._xp = array_namespace(import_array(like))
        self.kernels = importlib.import_module("ddtree.reference" if self._xp is np else "ddtree.kernels.cupy")

    def view(self, requests: Sequence[int], prefix_lens: NDArray[np.int32], window: Any) -> CacheView:
        """The cache of ``requests`` alone, and of their prefixes alone."""
        self.select(list(requests))
        tree_row = self.arrange(prefix_lens.tolist(), 0)[0]
        counts = self.counts()
        if counts is not None:
            counts.fill_(tree_row)
        return CacheView(self, self._xp.asarray(prefix_lens), prefix_lens, tree_row)

    def select(self, requests: list[int]) -> None:
        """Keep ``requests`` alone."""
        if self.requests == requests:
            return
        import torch

        index = torch.tensor([self.requests.index(request) for request in requests], device=self.like.device)
        for layer, _ in self._layers():
            if self.static is None:
                layer.select(index)
            else:
                layer.keys, layer.values = layer.keys.index_select(0, index), layer.values.index_select(0, index)
        self.moves[0] += 1
        self.requests = list(requests)

    def arrange(self, prefix_lens: list[int], slots: int) -> list[int]:
        """Keep the requests' prefixes alone; return where trees of ``slots`` slots have their masks.

        Dynamic layers keep less: no rows that no position from the shortest prefix on has in its window. Static layers
        are told by what is written to their :meth:`counts`.

        Returns
        -------
        list of int
            Of each kind of mask three numbers, as ``tree_mask`` takes them: the row that every tree begins at comes
            first.
        """
        tree_row = max(prefix_lens)
        if self._window is not None and tree_row > 0:
            self.dropped = max(self.dropped, min(prefix_lens) - self._window + 1)
        full, windowed = self._places
        full.rows = windowed.rows = tree_row
        windowed.first = self.dropped
        columns = tree_row + slots if self.static is None else self.static
        places = []
        for kind in self.mask_kinds:
            first = 0 if kind.window is None else self.dropped
            places += [tree_row, first, columns - first]
        return places

    def counts(self) -> Any:
        """Return what says how many rows each static layer holds, to be written before a pass: one tensor of them all.

        None for dynamic layers, and before there are any.
        """
        if self._counts is None and self.static is not None and (layers := self._layers()):
            import torch

            self._counts = torch.zeros(len(layers), dtype=layers[0][0].cumulative_length.dtype, device=self.like.device)
            for i, (layer, _) in enumerate(layers):
                layer.cumulative_length = self._counts[i]
                torch._dynamo.mark_static_address(layer.cumulative_length)  # as the layer had it, for compiled models
        return self._counts

    def compact(self, view: CacheView, acceptance: Acceptance) -> None:
        """Move the accepted rows of the pass over ``view`` up behind each prefix, in every layer, in place."""
        tree_rows = self._xp.full(len(view.host_prefix_lens), view.tree_row, np.int32)
        self.kernels.compact_layers(self.table(), view.prefix_lens, tree_rows, acceptance)

    def table(self) -> Any:
        """Return what ``compact_layers`` takes; the same one as long as the layers are where they were."""
        if self._table[0] != self.moves[0]:
            parts = [(t, getattr(layer, "base", 0)) for layer, _ in self._layers() for t in _storage(layer)]
            make = importlib.import_module(f"{self.kernels.__name__}.compact_layers").layer_table
            table = make([import_array(tensor) for tensor, _ in parts], [base for _, base in parts])
            self._table = self.moves[0], table
        return self._table[1]

    def release(self, request: int) -> None:
        """Nothing: the next view leaves out the batch row of a finished request."""

    def masks(self, tree: DraftTree, view: CacheView) -> Any:
        """Return what the model takes as ``attention_mask``: a mask (B, 1, N, rows), or one for each kind of layer.

        An unused slot sees what the root sees: its keys are finite, and so is what they are multiplied by 0 with.
        """
        masks = {kind.name: self._mask(tree, view, kind) for kind in self.mask_kinds}
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

    @property
    def most_columns(self) -> int:
        """The most columns of a mask."""
        return self.rows if self.static is None else self.static

    def _layers(self) -> list[tuple[Any, LayerKind]]:
        """Each layer that holds keys, and its kind; they are made in the first pass, where not before."""
        layers = zip(self.past.layers, self.kinds, strict=False)
        return [(layer, kind) for layer, kind in layers if layer.keys is not None]


def _storage(layer: Any) -> tuple[Any, Any]:
    """Keys and values, with what room there is behind them."""
    held = getattr(layer, "storage", None)
    return (layer.keys, layer.values) if held is None else held


def _adopt(cache: Any, kinds: list[LayerKind], rows: int) -> tuple[int | None, tuple[Any, Any]]:
    """See that a cache can be compacted, and make its layers keep their keys.

    Returns a static cache's rows, and the places of a dynamic one's layers: of the full ones and of the windowed ones.
    """
    from transformers import cache_utils

    from ddtree.interop.huggingface_layers import Place, RowsLayer

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
        if type(layer) is cache_utils.StaticSlidingWindowLayer:
            cache.layers[i] = cache_utils.StaticLayer(max_cache_len=columns)
    sliding = cache_utils.DynamicSlidingWindowLayer
    classes = {cache_utils.DynamicLayer if type(layer) is sliding else type(layer) for layer in cache.layers} - {dummy}
    classes |= {made} if made is not None else set()
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
    moves = [0]
    full, windowed = places = Place(moves), Place(moves)
    if classes == {cache_utils.DynamicLayer}:
        layers = [RowsLayer(full if kind.window is None else windowed, rows) for kind in kinds]
        if made is None:
            pairs = zip(cache.layers, layers, strict=False)
            cache.layers[:] = [layer if type(layer) is dummy else own for layer, own in pairs]
        else:  # it makes its layers in the first pass
            cache.layer_class_to_replicate = lambda: layers[len(cache.layers)]
        return None, places
    if min([columns, *static]) < columns:
        raise ValueError(
            f"cache must hold {columns} rows, the longest request and its tree, got a {name} of {min(static)}: make it "
            "of the number of rows that it is called with"
        )
    return columns, places
