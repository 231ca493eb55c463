"""A block-diffusion drafter as in DFlash (arXiv 2602.06036): one pass over a block of masks drafts all depths at once.

Letters: B requests, T block size, D hidden size, H heads, E elements a head, F features (hidden layers · D of the
target), n committed rows of a request, M = B · T.
"""

from __future__ import annotations

import importlib
import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np

from ddtree import reference
from ddtree.arrays import array_namespace
from ddtree.backends import serving
from ddtree.checks import INT32_MAX, integer, real
from ddtree.kdtr import KdtrFile, write_kdtr
from ddtree.model import DeepseekV3, layers
from ddtree.model.layers import rms_norm, rope_cos_sin, rope_frequencies, rotate_halves, swiglu
from ddtree.ops import topk_log_probs
from ddtree.protocols import DraftContext, ResidentState
from ddtree.threads import SMALL, small_products_on_one_thread

__all__ = ["BlockConfig", "BlockDrafter", "load_block_drafter", "save_block_drafter"]

_LARGEST = {"num_hidden_layers": 1024, "block_size": 1024}
"""Settings beyond these are no drafter's, and the names of so many tensors would take long to make."""

_FIRST_ROWS = 512
"""Rows that a request's context has room for at first; when it is full, rows that nothing sees go, or it doubles."""


@dataclass(frozen=True)
class BlockConfig:
    """The shape of a :class:`BlockDrafter`.

    Attributes
    ----------
    hidden_size, num_hidden_layers, num_attention_heads, head_dim, intermediate_size : int
        Of the drafter's own layers; ``hidden_size`` must be the target's, whose embedding and output layer it uses.
    block_size : int
        T: the root token and T − 1 masks, so that drafts are at most T − 1 tokens deep.
    target_layers : tuple of int
        Hidden states that it reads, as the engine counts them: 0 is the target's embedding, i the output of layer i.
    context_window : int or None
        A block sees this many of the committed rows at most, the last ones; None is all of them. A drafter drafts badly
        over more context than it was trained on, while what it was trained on repeats at any distance from the start.
    rope_theta, rms_norm_eps : float
        Of the rotary embedding (halves, all of a head) and of the norms.
    """

    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    head_dim: int
    intermediate_size: int
    block_size: int
    target_layers: tuple[int, ...]
    context_window: int | None = None
    rope_theta: float = 10000.0
    rms_norm_eps: float = 1e-6

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if field.type == "int" or (field.type == "int | None" and value is not None):
                integer(field.name, value, 2 if field.name == "block_size" else 1, _LARGEST.get(field.name, 1 << 20))
        for name in ("rope_theta", "rms_norm_eps"):
            if real(name, getattr(self, name)) <= 0:
                raise ValueError(f"{name} must be over 0, got {getattr(self, name)}")
        if self.head_dim % 2:
            raise ValueError(f"head_dim must be even, got {self.head_dim}")
        layers = self.target_layers
        if not isinstance(layers, tuple) or not layers or len(layers) > 1024:
            raise ValueError(f"target_layers must be a tuple of one layer or more, got {layers!r}")
        for i, layer in enumerate(layers):
            integer(f"target_layers[{i}]", layer, 0, 1 << 20)

    @classmethod
    def from_dict(cls, config: Mapping[str, Any]) -> BlockConfig:
        """Read what :meth:`to_dict` gave.

        Raises
        ------
        ValueError, TypeError
            A setting is missing, unknown or out of range; it is named.
        """
        own = {f.name for f in fields(cls)}
        required = {f.name for f in fields(cls) if f.default is MISSING}
        for wrong, what in ((required - config.keys(), "lacks"), (config.keys() - own, "has the unknown settings")):
            if wrong:
                raise ValueError(f"the drafter's configuration {what} {', '.join(sorted(wrong))}")
        layers = config["target_layers"]
        return cls(**{**config, "target_layers": tuple(layers) if isinstance(layers, list) else layers})

    def to_dict(self) -> dict[str, Any]:
        """The configuration as JSON can hold it."""
        return asdict(self) | {"target_layers": list(self.target_layers)}

    def tensor_shapes(self) -> dict[str, tuple[int, ...]]:
        """Name and shape of every weight: those of a state dict of torch."""
        D, width = self.hidden_size, self.num_attention_heads * self.head_dim
        shapes: dict[str, tuple[int, ...]] = {
            "fc.weight": (D, len(self.target_layers) * D),
            "hidden_norm.weight": (D,),
            "mask_embedding": (D,),
            "norm.weight": (D,),
        }
        for i in range(self.num_hidden_layers):
            layer = f"layers.{i}"
            shapes |= {
                f"{layer}.input_layernorm.weight": (D,),
                f"{layer}.self_attn.q_proj.weight": (width, D),
                f"{layer}.self_attn.k_proj.weight": (width, D),
                f"{layer}.self_attn.v_proj.weight": (width, D),
                f"{layer}.self_attn.o_proj.weight": (D, width),
                f"{layer}.self_attn.q_norm.weight": (self.head_dim,),
                f"{layer}.self_attn.k_norm.weight": (self.head_dim,),
                f"{layer}.post_attention_layernorm.weight": (D,),
                f"{layer}.mlp.gate_proj.weight": (self.intermediate_size, D),
                f"{layer}.mlp.up_proj.weight": (self.intermediate_size, D),
                f"{layer}.mlp.down_proj.weight": (D, self.intermediate_size),
            }
        return shapes


@dataclass(frozen=True)
class _Layer:
    attention_norm: Any  # (D,)
    projections: Any  # (3 · H · E, D): of queries, keys and values
    query_norm: Any  # (E,)
    key_norm: Any  # (E,)
    out: Any  # (D, H · E)
    mlp_norm: Any  # (D,)
    gate_up: Any  # (2I, D)
    down: Any  # (D, I)

    @property
    def queries(self) -> Any:
        """Of queries alone: (H · E, D)."""
        return self.projections[: len(self.projections) // 3]

    @property
    def keys_values(self) -> Any:
        """Of keys and values: (2 · H · E, D)."""
        return self.projections[len(self.projections) // 3 :]


class BlockDrafter:
    """Drafts from the target's hidden states: a bidirectional pass over the root token and T − 1 masks.

    The context of a request is its committed rows: the target's hidden states there, brought to the drafter's width
    once, give every layer keys and values. The block's T rows attend to all of them and to one another, and each mask's
    row, through the target's output layer, is the draft of its depth (depths are independent of one another given the
    context, which is why their product is what a draft tree is built from).

    It keeps the context of each request, and so serves one generation at a time in rounds of the host's; resident runs
    keep it by themselves.

    Parameters
    ----------
    config : BlockConfig
        The shape.
    weights : mapping of str to array, float
        By the names of :meth:`BlockConfig.tensor_shapes`; each is read once.
    target : DeepseekV3
        The model that it drafts for, whose embedding, output layer, type of numbers and device it shares.
    backend : str, optional
        Who serves ``topk_log_probs``; by default the arrays decide.

    Attributes
    ----------
    hidden_layers : tuple of int
        What the engine has to bring: ``config.target_layers``.
    synthetic : bool
        False: it is a real drafter.
    label : str
        For legends and tables.

    Raises
    ------
    ValueError
        A weight is missing, left over or mis-shaped, or the target has other sizes than the drafter was made for.
    """

    synthetic = False
    label = "block drafter"

    def __init__(
        self, config: BlockConfig, weights: Mapping[str, Any], target: DeepseekV3, *, backend: str | None = None
    ) -> None:
        self.config, self.backend = config, backend
        self.hidden_layers = config.target_layers
        if target.config.hidden_size != config.hidden_size:
            raise ValueError(
                f"the drafter was made for a target of hidden size {config.hidden_size}, "
                f"got one of {target.config.hidden_size}"
            )
        deepest = max(config.target_layers)
        if deepest > target.config.num_hidden_layers:
            raise ValueError(
                f"the drafter reads the target's layer {deepest}, and the target has {target.config.num_hidden_layers}"
            )
        self._embedding, self._head = target.embedding, target.output_layer
        self._dtype = target.dtype
        self._xp = xp = array_namespace(self._embedding)
        shapes = config.tensor_shapes()
        for wrong, what in (
            (shapes.keys() - weights.keys(), "lack"),
            (weights.keys() - shapes.keys(), "have too many:"),
        ):
            if wrong:
                raise ValueError(f"the drafter's weights {what} {', '.join(sorted(wrong)[:4])}")

        def read(*names: str) -> Any:
            parts = []
            for name in names:
                part = np.asarray(weights[name], self._dtype)
                if part.shape != shapes[name]:
                    raise ValueError(f"{name} must have shape {shapes[name]} by the configuration, got {part.shape}")
                if not np.isfinite(part).all():
                    raise ValueError(f"{name} holds NaN or infinity, weights must be finite: the file is damaged")
                parts.append(part)
            return xp.asarray(np.concatenate(parts))

        self._fc, self._hidden_norm = read("fc.weight"), read("hidden_norm.weight")
        self._mask, self._norm = read("mask_embedding"), read("norm.weight")
        self._layers = [
            _Layer(
                attention_norm=read(f"layers.{i}.input_layernorm.weight"),
                projections=read(*(f"layers.{i}.self_attn.{part}_proj.weight" for part in "qkv")),
                query_norm=read(f"layers.{i}.self_attn.q_norm.weight"),
                key_norm=read(f"layers.{i}.self_attn.k_norm.weight"),
                out=read(f"layers.{i}.self_attn.o_proj.weight"),
                mlp_norm=read(f"layers.{i}.post_attention_layernorm.weight"),
                gate_up=read(f"layers.{i}.mlp.gate_proj.weight", f"layers.{i}.mlp.up_proj.weight"),
                down=read(f"layers.{i}.mlp.down_proj.weight"),
            )
            for i in range(config.num_hidden_layers)
        ]
        self._frequencies = xp.asarray(rope_frequencies(config.head_dim, config.rope_theta))
        self._contexts: dict[int, _Context] = {}

    def __repr__(self) -> str:
        c = self.config
        return (
            f"BlockDrafter({c.num_hidden_layers} layers, hidden {c.hidden_size}, block {c.block_size}, {self._dtype})"
        )

    @property
    def max_depth(self) -> int:
        """The most tokens that it drafts: a block's, but for the root."""
        return self.config.block_size - 1

    @property
    def small_products(self) -> bool:
        """Whether its products on the host are too small to share between threads (see :mod:`ddtree.threads`)."""
        return self.config.hidden_size < SMALL and self._xp is np

    @small_products_on_one_thread
    def __call__(self, context: DraftContext, depth: int, topk: int) -> tuple[Any, Any]:
        """Return log-probs and token ids of shape (B, depth, topk); see :class:`ddtree.protocols.Drafter`.

        Raises
        ------
        ValueError
            ``depth`` is more than the block holds, or the hidden states are not those of the rows that were committed
            since the last draft.
        """
        self._check_depth(depth)
        self.forget((*context.began, *context.ended))
        contexts = [self._extended(context, b) for b in range(len(context.request_ids))]
        roots = self._xp.asarray(context.root_token_ids)
        hidden = self._block(self._embedding[roots], contexts)[:, 1 : 1 + depth]
        return topk_log_probs(hidden @ self._head.T, min(topk, len(self._head)), backend=self.backend)

    def forget(self, request_ids: Iterable[int]) -> None:
        """Drop the contexts of these requests, which have ended."""
        for request in request_ids:
            self._contexts.pop(request, None)

    def open_resident(self, state: ResidentState, depth: int, topk: int) -> _ResidentBlocks:
        """Return a drafter of ``state``'s slots, which drafts what ``__call__`` does, where the target's model is.

        Every slot's keys and values have room for ``context_window`` rows, or for as many as a slot has tokens; the
        weights that make them are held once more, side by side. Sums are taken in another order than in ``__call__``,
        and on a GPU the numbers between two sums are rounded less often: drafts are equal but for rounding.

        Raises
        ------
        ValueError
            ``depth`` is more than the block holds, or, on a GPU, ``head_dim`` is over 256 or a block's rows of a head
            have over 4,096 elements.
        MemoryError
            There is no room for the contexts.
        """
        self._check_depth(depth)
        return _ResidentBlocks(self, state, depth, topk)

    def _check_depth(self, depth: int) -> None:
        if depth > self.max_depth:
            raise ValueError(
                f"depth must be at most {self.max_depth} for this drafter, whose block of {self.config.block_size} "
                f"holds the root and {self.max_depth} masks, got {depth}: make the engine with depth={self.max_depth}"
            )

    def _features(self, request: int, states: Mapping[int, Any]) -> Any:
        """What the drafter reads of a request's rows (M, F), in its type."""
        missing = [layer for layer in self.hidden_layers if layer not in states]
        if missing:
            raise ValueError(f"hidden_states of request {request} must have layers {missing}, got {sorted(states)}")
        return _side_by_side([states[layer] for layer in self.hidden_layers]).astype(self._dtype, copy=False)

    def _extended(self, context: DraftContext, b: int) -> _Context:
        """The b-th request's context with the rows that the target's last pass added."""
        request, states = context.request_ids[b], context.hidden_states[b]
        known = self._contexts.get(request)
        if known is None:
            known = self._contexts[request] = _Context(self.config, self._xp, self._dtype)
        features = self._features(request, states)
        committed = len(context.tokens[b]) - 1  # the root's row is not there yet
        if known.length + len(features) != committed:
            raise ValueError(
                f"hidden_states of request {request} must be those of what was committed since its last draft, rows "
                f"{known.length} to {committed}, got {len(features)} rows: a drafter serves one generation at a time, "
                "so two that run side by side need one each"
            )
        features = features[max(0, len(features) - known.window) :]
        rows = rms_norm(features @ self._fc.T, self._hidden_norm, eps=self.config.rms_norm_eps)
        cos_sin = self._cos_sin(self._xp.arange(committed - len(features), committed))
        known.append([self._keys_values(layer, rows, *cos_sin) for layer in self._layers], committed)
        return known

    def _block(self, roots: Any, contexts: list[_Context]) -> Any:
        """Normed hidden states (B, T, D) of each request's block, whose first row is the root's embedding."""
        c, xp = self.config, self._xp
        B, T = len(contexts), c.block_size
        h = xp.empty((B, T, c.hidden_size), self._dtype)
        h[:, 0], h[:, 1:] = roots, self._mask
        h = h.reshape(B * T, c.hidden_size)
        starts = xp.asarray(np.array([known.length for known in contexts], np.int64))
        cos, sin = self._cos_sin((starts[:, None] + xp.arange(T)).reshape(-1))
        for i, layer in enumerate(self._layers):
            x = rms_norm(h, layer.attention_norm, eps=c.rms_norm_eps)
            queries = self._heads(x @ layer.queries.T, layer.query_norm, cos, sin)
            keys, values = self._keys_values(layer, x, cos, sin)
            mixed = xp.empty((B, T, c.num_attention_heads, c.head_dim), self._dtype)
            for b, known in enumerate(contexts):  # each has a context of its own length
                rows = slice(b * T, (b + 1) * T)
                mixed[b] = known.attend(i, queries[rows], keys[rows], values[rows])
            h = h + mixed.reshape(B * T, layer.out.shape[1]) @ layer.out.T
            h = h + swiglu(rms_norm(h, layer.mlp_norm, eps=c.rms_norm_eps), layer.gate_up, layer.down)
        return rms_norm(h, self._norm, eps=c.rms_norm_eps).reshape(B, T, c.hidden_size)

    def _cos_sin(self, positions: Any) -> tuple[Any, Any]:
        """Cosines and sines (M, 1, E / 2) for every head, in the model's type."""
        cos, sin = rope_cos_sin(positions, self._frequencies)
        return cos[:, None].astype(self._dtype), sin[:, None].astype(self._dtype)

    def _heads(self, x: Any, norm: Any, cos: Any, sin: Any) -> Any:
        """(M, H · E) queries or keys by head, normed and rotated: (M, H, E)."""
        c = self.config
        x = x.reshape(len(x), c.num_attention_heads, c.head_dim)
        return rotate_halves(rms_norm(x, norm, eps=c.rms_norm_eps), cos, sin)

    def _keys_values(self, layer: _Layer, x: Any, cos: Any, sin: Any) -> tuple[Any, Any]:
        """A layer's keys and values (M, H, E) of (M, D) rows."""
        c = self.config
        both = x @ layer.keys_values.T
        width = c.num_attention_heads * c.head_dim
        values = both[:, width:].reshape(len(x), c.num_attention_heads, c.head_dim)
        return self._heads(both[:, :width], layer.key_norm, cos, sin), values


class _Context:
    """Keys and values of one request's last committed rows, in every layer; behind them is room for a block."""

    def __init__(self, config: BlockConfig, xp: Any, dtype: Any) -> None:
        self.length = 0  # committed rows
        self.kept = 0  # of which the last so many are here
        self.window = INT32_MAX if config.context_window is None else config.context_window
        self.block, self.xp = config.block_size, xp
        heads, width = config.num_attention_heads, config.head_dim
        shape = (config.num_hidden_layers, heads, _FIRST_ROWS, width)
        self.keys, self.values = xp.empty(shape, dtype), xp.empty(shape, dtype)
        self.scale = width**-0.5

    def append(self, keys_values: list[tuple[Any, Any]], committed: int) -> None:
        """Take in the keys and values (rows, H, E) of each layer, with which ``committed`` rows are."""
        added = len(keys_values[0][0])
        self._make_room(added + self.block)
        rows = slice(self.kept, self.kept + added)
        for layer, (keys, values) in enumerate(keys_values):
            self.keys[layer, :, rows] = keys.transpose(1, 0, 2)
            self.values[layer, :, rows] = values.transpose(1, 0, 2)
        self.kept += added
        self.length = committed

    def attend(self, layer: int, queries: Any, keys: Any, values: Any) -> Any:
        """Attention (T, H, E) of a block, whose rows see the context's window and one another."""
        end = self.kept + self.block  # the block's rows stand behind the context and are written over next time
        self.keys[layer, :, self.kept : end] = keys.transpose(1, 0, 2)
        self.values[layer, :, self.kept : end] = values.transpose(1, 0, 2)
        seen = slice(max(0, self.kept - self.window), end)
        scores = queries.transpose(1, 0, 2) @ self.keys[layer, :, seen].transpose(0, 2, 1) * self.scale
        shares = self.xp.exp(scores - scores.max(-1, keepdims=True))
        shares /= shares.sum(-1, keepdims=True)
        return (shares @ self.values[layer, :, seen]).transpose(1, 0, 2)

    def _make_room(self, more: int) -> None:
        layers, heads, room, width = self.keys.shape
        if self.kept + more <= room:
            return
        start = max(0, self.kept - self.window)  # what is before it is seen no more
        self.kept -= start
        while self.kept + more > room:
            room *= 2
        for name in ("keys", "values"):
            old = getattr(self, name)
            new = self.xp.empty((layers, heads, room, width), old.dtype)
            new[:, :, : self.kept] = old[:, :, start : start + self.kept]
            setattr(self, name, new)


def _side_by_side(rows: list[Any]) -> Any:
    """Arrays (..., D) of one type as one (..., F), by their bits, since not every library moves bfloat16."""
    return array_namespace(rows[0]).concatenate([_bits(part) for part in rows], axis=-1).view(rows[0].dtype)


class _ResidentBlocks:
    """Blocks of the slots of a state: see :class:`ddtree.protocols.ResidentDraft`.

    A pass has the shape of all slots, whoever is in them: each takes in the rows that the last round kept, and its
    block attends to as much of the slot's context as its length says.
    """

    def __init__(self, drafter: BlockDrafter, state: ResidentState, depth: int, topk: int) -> None:
        c = drafter.config
        self._drafter, self._state, self._depth = drafter, state, depth
        self._xp = xp = array_namespace(drafter._embedding)
        kernels: Any = None if xp is np else importlib.import_module("ddtree.kernels.cupy")
        self._layers = layers if kernels is None else kernels
        self._ops = reference if kernels is None else kernels
        self._topk_log_probs = serving("topk_log_probs", drafter._embedding, drafter.backend)
        self._k = min(topk, len(drafter._head))
        self._precise = drafter._dtype if drafter._dtype == np.float64 else np.dtype(np.float32)
        B, room = state.tokens.shape
        heads = (c.num_hidden_layers, B, c.num_attention_heads)
        rows = room if c.context_window is None else min(room, c.context_window)
        try:
            self._keys = xp.empty((*heads, c.head_dim, rows), drafter._dtype)
            self._values = xp.empty((*heads, rows, c.head_dim), drafter._dtype)
            # of all layers, so that rows go into every context at once
            self._keys_values = _stacked([layer.keys_values for layer in drafter._layers])
            self._key_norms = _stacked([layer.key_norm[None] for layer in drafter._layers])
            self._features = xp.empty((B, depth + 1, len(c.target_layers), c.hidden_size), drafter._dtype)
            self._blocks = xp.empty((B, c.block_size, c.hidden_size), drafter._dtype)
        except MemoryError as error:
            raise MemoryError(
                f"no room for the block drafter's contexts of {B} slots of {rows} rows: {error}; run fewer requests "
                "side by side"
            ) from error
        _bits(self._blocks)[:, 1:] = _bits(drafter._mask)
        self.draft()  # compiles what a graph may capture, and refuses here what no draft can be made with

    def draft(self) -> tuple[Any, Any]:
        drafter, state, eps = self._drafter, self._state, self._drafter.config.rms_norm_eps
        if state.hidden_states:
            B, J, layers_read, D = self._features.shape
            for i, read in enumerate(drafter.hidden_layers):  # not joined: CuPy would bring their addresses from here
                rows = state.hidden_states[read].astype(drafter._dtype, copy=False)
                _bits(self._features)[:, :, i] = _bits(rows)
            features = self._features.reshape(B * J, layers_read * D)
            self._append(features, state.lengths, state.kept, slice(None))
        h = self._embedded()
        for i, layer in enumerate(drafter._layers):
            projected = self._layers.linear(h, layer.projections, gain=layer.attention_norm, eps=eps)
            mixed = self._ops.block_attention(
                *(projected, self._keys[i], self._values[i], state.lengths),
                *(layer.query_norm, layer.key_norm, drafter._frequencies),
                eps=eps,
            )
            h = self._layers.linear(mixed, layer.out, residual=h)
            h = self._layers.swiglu(h, layer.gate_up, layer.down, gain=layer.mlp_norm, eps=eps, residual=h)
        B, T, D = self._blocks.shape
        bits = _bits(h).reshape(B, T, D)[:, 1 : 1 + self._depth]
        drafted = self._xp.ascontiguousarray(bits).view(h.dtype).reshape(-1, D)
        logits = self._layers.linear(drafted, drafter._head, gain=drafter._norm, eps=eps, dtype=self._precise)
        draft: tuple[Any, Any] = self._topk_log_probs(logits.reshape(B, self._depth, -1), self._k)
        return draft

    def begin(self, slot: int, request: int, tokens: Any, prompt_len: int, hidden_states: dict[int, Any]) -> None:
        """Take the prompt's rows into the slot's context."""
        features = self._drafter._features(request, hidden_states)
        if len(features) != prompt_len:
            raise ValueError(
                f"hidden_states of request {request} must have {prompt_len} rows, those of its prompt, "
                f"got {len(features)}"
            )
        features = features[max(0, len(features) - self._values.shape[3]) :]
        added = self._xp.full(1, len(features), np.int32)
        slots = slice(slot, slot + 1)
        self._append(features, self._state.lengths[slots], added, slots)

    def end(self, slot: int) -> None:
        """Let go of nothing: the next request's rows take the place of these."""

    def _append(self, features: Any, lengths: Any, kept: Any, slots: slice) -> None:
        """Take rows (M, F) into the contexts of ``slots``, as many of each as it kept."""
        drafter, eps = self._drafter, self._drafter.config.rms_norm_eps
        rows = self._layers.linear(features, drafter._fc)
        projected = self._layers.linear(rows, self._keys_values, gain=drafter._hidden_norm, eps=eps)
        self._ops.append_context(
            *(self._keys[:, slots], self._values[:, slots], projected, lengths, kept),
            *(self._key_norms, drafter._frequencies),
            eps=eps,
        )

    def _embedded(self) -> Any:
        """The blocks' first hidden states (B · T, D): each root's embedding, and masks, which are there already."""
        embedding = self._drafter._embedding
        roots = self._xp.clip(self._state.roots, 0, len(embedding) - 1)  # of an inert slot, anything
        _bits(self._blocks)[:, 0] = _bits(embedding)[roots]
        return self._blocks.reshape(-1, self._blocks.shape[-1])


def _bits(array: Any) -> Any:
    """The same memory as whole numbers."""
    return array.view(np.dtype(f"u{array.dtype.itemsize}"))


def _stacked(matrices: list[Any]) -> Any:
    """Matrices of one width and type, one below the other."""
    return array_namespace(matrices[0]).concatenate([_bits(matrix) for matrix in matrices]).view(matrices[0].dtype)


def save_block_drafter(
    path: str | os.PathLike[str],
    config: BlockConfig,
    weights: Mapping[str, Any],
    *,
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Write a block drafter to one KDTR file: weights by their names, the configuration as JSON in the metadata.

    Parameters
    ----------
    path : str or os.PathLike
        The file; it is replaced if it exists.
    config : BlockConfig
        The shape.
    weights : mapping of str to array, float
        By the names of :meth:`BlockConfig.tensor_shapes`. They keep their type.
    metadata : mapping of str to str, optional
        Further text to keep; ``block_drafter`` is taken.

    Raises
    ------
    ValueError
        Weights are missing, left over or mis-shaped. No file is written.
    """
    shapes = config.tensor_shapes()
    got = {name: tuple(np.shape(weight)) for name, weight in weights.items()}
    if got != shapes:
        wrong = sorted(name for name in got.keys() | shapes.keys() if got.get(name) != shapes.get(name))
        what = f"{wrong[0]} must have shape {shapes.get(wrong[0], 'none: it is not one of them')}"
        raise ValueError(f"the drafter's weights must be those of its configuration: {what}, got {got.get(wrong[0])}")
    write_kdtr(path, weights, {"block_drafter": json.dumps(config.to_dict(), sort_keys=True), **(metadata or {})})


def load_block_drafter(path: str | os.PathLike[str], target: DeepseekV3, *, backend: str | None = None) -> BlockDrafter:
    """Load a block drafter that :func:`save_block_drafter` wrote, for ``target``.

    Parameters
    ----------
    path : str or os.PathLike
        The file.
    target : DeepseekV3
        The model that it was trained for: its type of numbers and its device are the drafter's.
    backend : str, optional
        See :class:`BlockDrafter`.

    Raises
    ------
    ValueError
        The file holds no drafter, or not one of this target's sizes, or is damaged (:class:`ddtree.kdtr.KdtrError`).
    """
    path = Path(path)
    with KdtrFile(path) as file:
        if "block_drafter" not in file.metadata:
            have = ", ".join(file.metadata) or "nothing"
            raise ValueError(f"{path} is no block drafter: its metadata has no 'block_drafter', only {have}")
        try:
            settings = json.loads(file.metadata["block_drafter"])
            if not isinstance(settings, dict):
                raise ValueError(f"must hold a JSON object, got {type(settings).__name__}")
            config = BlockConfig.from_dict(settings)
        except (ValueError, TypeError, RecursionError) as error:
            raise ValueError(f"{path}: metadata 'block_drafter': {error}") from error
        return BlockDrafter(config, {name: file[name] for name in file}, target, backend=backend)
