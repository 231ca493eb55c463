"""A DeepSeek-V3 transformer as a target: it checks draft trees over a paged latent cache."""

from __future__ import annotations

import functools
import importlib
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

import ml_dtypes
import numpy as np

from ddtree.arrays import array_kind, array_namespace, dtype_name, free_bytes, import_array, to_numpy
from ddtree.backends import get_backend, serving
from ddtree.model.config import ModelConfig
from ddtree.model.layers import RowsOfPass, rms_norm
from ddtree.protocols import KVCache, TargetOutput
from ddtree.threads import SMALL, small_products_on_one_thread
from ddtree.trees import DraftTree

__all__ = ["DeepseekV3", "check_names"]

WEIGHT_DTYPES = ("float16", "bfloat16", "float32", "float64")
MODEL_DTYPES = ("bfloat16", "float32", "float64")
PIECE = 1 << 26
"""Bytes of a tensor that are converted at a time."""

LORA_NORM_EPS = 1e-6
"""Of the norms inside attention, whatever the configuration's ``rms_norm_eps`` says."""


@dataclass(frozen=True)
class _Attention:
    """Multi-head latent attention (arXiv 2405.04434), with W_UK and W_UV absorbed: Q elements of a compressed query."""

    norm: Any  # (D,)
    down: Any  # (Q + C + R, D), or without compression of the query (H · (P + R) + C + R, D)
    q_norm: Any  # (Q,), or None
    q_up: Any  # (H · (P + R), Q), or None
    kv_norm: Any  # (C,)
    k_up: Any  # (H, C, P): W_UK takes a query into the latent space
    v_up: Any  # (H, V, C): W_UV takes a latent to a head's value
    out: Any  # (D, H · V)


@dataclass(frozen=True)
class _Dense:
    norm: Any  # (D,)
    gate_up: Any  # (2I, D)
    down: Any  # (D, I)


@dataclass(frozen=True)
class _Experts:
    norm: Any  # (D,)
    router: Any  # (E, D), float32 or float64
    bias: Any  # (E,), the router's type
    gate_up: Any  # (E + shared ones, 2I, D)
    down: Any  # (E + shared ones, D, I)


@dataclass(frozen=True)
class _Layer:
    attention: _Attention
    mlp: _Dense | _Experts


class DeepseekV3:
    """DeepSeek-V3, Kimi-K2 and their small kin, written once for NumPy and CuPy: a :class:`ddtree.protocols.Target`.

    Parameters
    ----------
    config : ModelConfig
        The shape.
    weights : mapping of str to array
        Tensors by Hugging Face's names (see :meth:`ModelConfig.tensor_shapes`), float16, bfloat16, float32 or float64;
        each is read once. A layer's experts may be in either form.
    dtype : str
        "float32", "float64" or, on a GPU alone, "bfloat16": of weights, cache and hidden states. All arithmetic is in
        float32 and float64 in the models of these types; in one of bfloat16, sums, norms, softmax, router and logits
        are float32.
    backend : str, optional
        Who serves ``verify_attention``. Its arrays decide where the model lives: on the GPU for a backend that takes
        CuPy arrays, else (and if left out) on the host.

    Attributes
    ----------
    config : ModelConfig
        As given.
    dtype : numpy.dtype
        Of weights, cache and outputs.
    backend : str or None
        As given.

    Raises
    ------
    ValueError
        A tensor is missing, left over or has another shape than the configuration says; it is named.
    TypeError
        A tensor is of another type than those above.
    MemoryError
        There is no room for a tensor where the model is to live: it is named, with the bytes that it needs.
    BackendUnavailable
        The backend cannot be used here or has no ``verify_attention``.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: Mapping[str, Any],
        *,
        dtype: str = "float32",
        backend: str | None = None,
    ) -> None:
        if dtype not in MODEL_DTYPES:
            raise ValueError(f"dtype must be one of {', '.join(map(repr, MODEL_DTYPES))}, got {dtype!r}")
        kind = "numpy" if backend is None else get_backend(backend).array_kind
        if kind == "torch":
            raise ValueError(f"backend must take NumPy or CuPy arrays to serve a model, but {backend!r} takes torch's")
        if dtype == "bfloat16" and kind == "numpy":
            raise ValueError(
                "dtype must be 'float32' or 'float64' for a model on the host, got 'bfloat16': "
                "pass backend='cupy' to have it on a GPU"
            )
        self.config = config
        self.dtype = np.dtype(getattr(ml_dtypes, dtype) if dtype == "bfloat16" else dtype)
        self.backend = backend
        self._precise = np.dtype("float64" if dtype == "float64" else "float32")
        self._on_host = kind == "numpy"
        self._ops = importlib.import_module("ddtree.model.layers" if self._on_host else "ddtree.kernels.cupy")
        read = _Reader(config, weights, self.dtype, importlib.import_module(kind))
        self._embedding = read("model.embed_tokens.weight")
        self._layers = [_pack_layer(read, i) for i in range(config.num_hidden_layers)]
        self._norm = read("model.norm.weight")
        self._head = self._embedding if config.tie_word_embeddings else read("lm_head.weight")
        self._frequencies = read.xp.asarray(config.rope_frequencies())
        self._attend = serving("verify_attention", self._embedding, backend)

    @property
    def vocab_size(self) -> int:
        """V; every token id lies in 0 … V − 1."""
        return self.config.vocab_size

    @property
    def capturable(self) -> bool:
        """Whether a CUDA graph can be made of a pass, once one of its shape has been run: with ``backend="cupy"``.

        Such a pass works on all slots, whatever the counts are, so that it waits for no value of its arrays.
        """
        return self.backend == "cupy"

    @property
    def small_products(self) -> bool:
        """Whether its products on the host are too small to share between threads (see :mod:`ddtree.threads`)."""
        return self.config.hidden_size < SMALL and self._on_host

    @property
    def embedding(self) -> Any:
        """Row of each token: (V, D), in the model's type, where the model lives; not to be written."""
        return self._embedding

    @property
    def output_layer(self) -> Any:
        """What takes the last, normed hidden state to logits: (V, D); the embedding itself where they are tied."""
        return self._head

    def __repr__(self) -> str:
        c = self.config
        shape = f"{c.num_hidden_layers} layers, hidden {c.hidden_size}, vocab {c.vocab_size}"
        return f"DeepseekV3({shape}, {self.dtype}, {array_kind(self._embedding)})"

    def new_cache(self, num_pages: int, page_size: int) -> Any:
        """Uninitialised cache storage of shape (layers, num_pages, page_size, C + R), where the model's weights are."""
        shape = (self.config.num_hidden_layers, num_pages, page_size, self.config.cache_width)
        return array_namespace(self._embedding).empty(shape, self.dtype)

    @small_products_on_one_thread
    def forward(
        self,
        tree: DraftTree,
        cache: KVCache,
        *,
        hidden_layers: tuple[int, ...] = (),
        last_only: bool = False,
    ) -> TargetOutput:
        """Run on every node of ``tree``: write its cache row in every layer and return the logits after it.

        Parameters
        ----------
        tree : DraftTree
            B trees of N slots; a prompt is a :func:`ddtree.trees.chain_tree`. A count of 0 is a free place in the
            batch. Arrays on the host are taken to a model on the GPU; there, what is no token id is read as 0.
        cache : KVCache
            Storage of :meth:`new_cache`'s shape and type. Node i of request b goes to row ``prefix_lens[b] + i``;
            unused slots write nothing, and rows that no node sees are not read.
        hidden_layers : tuple of int
            Which hidden states to return: 0 is the embedding, i the output of layer i (counting from 1).
        last_only : bool
            Give the logits of each request's last node alone: (B, 1, V).

        Returns
        -------
        TargetOutput
            ``logits`` (B, N, V) and ``hidden_states``, each (B, N, D), in the model's type, but float32 logits of a
            bfloat16 model. Unused slots, and the last one of a request that has none in use, hold anything finite.

        Raises
        ------
        ValueError
            The cache does not fit the model or the tree, a layer does not exist, or, on the host, where looking costs
            nothing, a token id or a page is out of range. Nothing has been written then.
        """
        xp, ops = array_namespace(self._embedding), self._ops
        tree = _in_namespace(xp, tree)
        nodes = self._place(tree, cache, hidden_layers)
        B, N = tree.token_ids.shape
        h = ops.embed_tokens(self._embedding, nodes.token_ids)
        hidden_states = {0: nodes.to_slots(h)} if 0 in hidden_layers else {}
        for i, layer in enumerate(self._layers):
            h = self._attention(h, layer.attention, nodes, tree, cache, i)
            h = self._mlp(h, layer.mlp, nodes)
            if i + 1 in hidden_layers:
                hidden_states[i + 1] = nodes.to_slots(h)
        if last_only:
            last = xp.arange(0, B * N, N) + xp.maximum(tree.node_counts - 1, 0)
            h = _rows_of(nodes.to_slots(h).reshape(B * N, h.shape[1]), last)
        logits = ops.linear(h, self._head, gain=self._norm, eps=self.config.rms_norm_eps, dtype=self._precise)
        return TargetOutput(logits[:, None] if last_only else nodes.to_slots(logits), hidden_states)

    def _attention(self, h: Any, w: _Attention, nodes: _Nodes, tree: DraftTree, cache: KVCache, layer: int) -> Any:
        """The (M, D) residual stream after a layer's attention."""
        c, xp, ops = self.config, array_namespace(h), self._ops
        (M, _), (H, C, P), R = h.shape, w.k_up.shape, c.qk_rope_head_dim
        compressed = ops.linear(h, w.down, gain=w.norm, eps=c.rms_norm_eps)
        queries, kv = compressed[:, : -C - R], nodes.to_slots(compressed[:, -C - R :])
        if w.q_up is not None:
            queries = ops.linear(queries, w.q_up, gain=w.q_norm, eps=LORA_NORM_EPS)
        queries = queries.reshape(M, H, P + R)
        q = xp.empty((M, H, C + R), h.dtype)
        ops.head_linear(queries[..., :P], w.k_up, out=q[..., :C])
        q, rows = nodes.to_slots(q), cache.data[layer]
        latent, key = kv[..., :C], kv[..., C:]
        nodes.rope(q, rows, nodes.to_slots(queries), latent, key, gain=w.kv_norm, eps=LORA_NORM_EPS)
        latents = self._attend(
            q, rows, cache.page_table, cache.prefix_lens, tree, scale=c.attention_scale, kv_lora_rank=C
        )
        values = ops.head_linear(nodes.from_slots(latents), w.v_up)
        return ops.linear(values.reshape(M, w.out.shape[1]), w.out, residual=h)

    def _mlp(self, h: Any, w: _Dense | _Experts, nodes: _Nodes) -> Any:
        """The (M, D) residual stream after a layer's feed-forward part."""
        c, ops = self.config, self._ops
        norm: dict[str, Any] = {"gain": w.norm, "eps": c.rms_norm_eps}
        if isinstance(w, _Dense):
            return ops.swiglu(h, w.gate_up, w.down, residual=h, **norm)
        x = h
        if self._on_host:  # where a norm is a step of its own: one for both that read it
            x, norm = rms_norm(h, w.norm, eps=c.rms_norm_eps), {}
        expert_ids, weights = ops.route_experts(
            ops.linear(x, w.router, dtype=self._precise, **norm),
            w.bias,
            num_experts_per_tok=c.num_experts_per_tok,
            n_group=c.n_group,
            topk_group=c.topk_group,
            norm_topk_prob=c.norm_topk_prob,
            routed_scaling_factor=c.routed_scaling_factor,
            node_counts=nodes.counts,
        )
        return ops.moe_experts(x, expert_ids, weights, w.gate_up, w.down, residual=h, shared=c.n_shared_experts, **norm)

    def _place(self, tree: DraftTree, cache: KVCache, hidden_layers: tuple[int, ...]) -> _Nodes:
        """Check a pass's arguments and find where each of its nodes belongs."""
        c = self.config
        xp = array_namespace(self._embedding)
        B, N = tree.token_ids.shape
        data, table, prefix = cache.data, cache.page_table, cache.prefix_lens
        for name, array in (("data", data), ("page_table", table), ("prefix_lens", prefix)):
            if array_kind(array) != xp.__name__:
                raise TypeError(f"cache.{name} must be a {xp.__name__} array like the model's, got {array_kind(array)}")
        wanted = (c.num_hidden_layers, c.cache_width)
        if data.ndim != 4 or (data.shape[0], data.shape[3]) != wanted or data.dtype != self.dtype:
            raise ValueError(
                f"cache.data must be {self.dtype} with shape ({wanted[0]}, pages, S, {wanted[1]}), "
                f"got {dtype_name(data)} {data.shape}"
            )
        if table.ndim != 2 or len(table) != B or prefix.shape != (B,):
            raise ValueError(
                f"cache.page_table and cache.prefix_lens must have shapes ({B}, max_pages) and ({B},) "
                f"for a tree of {B} requests, got {table.shape} and {prefix.shape}"
            )
        for layer in hidden_layers:
            if not 0 <= layer <= c.num_hidden_layers:
                raise ValueError(f"hidden_layers must lie in 0 … {c.num_hidden_layers}, got {layer}")

        if not self._on_host:
            rope = functools.partial(
                self._ops.rope,
                page_table=table,
                prefix_lens=prefix,
                tree=tree,
                frequencies=self._frequencies,
                attention_factor=c.attention_factor,
            )
            return _Nodes((B, N), None, tree.token_ids.reshape(-1), tree.node_counts, rope)
        where = RowsOfPass(prefix, tree, self._frequencies, c.attention_factor, self.dtype)
        token_ids = tree.token_ids.reshape(-1)[where.slots]
        if len(token_ids) > 0:
            self._check_values(token_ids, where, cache)
        where.find_pages(table, data.shape[2])
        return _Nodes((B, N), where.slots, token_ids, None, where.rope)

    def _check_values(self, token_ids: Any, where: RowsOfPass, cache: KVCache) -> None:
        """On the host, where looking costs nothing: tokens, rows and pages that exist."""
        V, request, rows = self.config.vocab_size, where.requests, where.rows

        def node(at: int) -> int:
            return int(where.slots[at] % where.shape[1])

        if not 0 <= token_ids.min() <= token_ids.max() < V:
            at = int(np.argmax((token_ids < 0) | (token_ids >= V)))
            raise ValueError(f"tree.token_ids[{request[at]}, {node(at)}] must be in 0 … {V - 1}, got {token_ids[at]}")
        table, (_, pages, S, _) = cache.page_table, cache.data.shape
        room = table.shape[1] * S
        if not 0 <= rows.min() <= rows.max() < room:
            at = int(np.argmax((rows < 0) | (rows >= room)))
            raise ValueError(
                f"cache.page_table has room for {room} rows a request, but node {node(at)} of request {request[at]} "
                f"goes to row {rows[at]}"
            )
        held = table[request, rows // S]
        if not 0 <= held.min() <= held.max() < pages:
            at = int(np.argmax((held < 0) | (held >= pages)))
            raise ValueError(
                f"cache.page_table[{request[at]}, {rows[at] // S}] must be in 0 … {pages - 1}, got {held[at]}"
            )


@dataclass(frozen=True)
class _Nodes:
    """Which M rows the layers work on: on the host the nodes in use; on a GPU, which counts none, all B · N slots."""

    shape: tuple[int, int]  # (B, N)
    slots: Any  # (M,), of B · N, in order; None for all
    token_ids: Any  # (M,)
    counts: Any  # (B,) slots of each request in use; None where all rows are
    rope: Callable[..., None]  # a layer's: :func:`ddtree.model.layers.rope` at the places of these nodes

    def to_slots(self, values: Any) -> Any:
        """(M, …) values in their slots: (B, N, …), 0 in unused ones on the host."""
        B, N = self.shape
        if len(values) == B * N:
            return values.reshape(B, N, *values.shape[1:])
        result = np.zeros((B * N, *values.shape[1:]), values.dtype)
        result[self.slots] = values
        return result.reshape(B, N, *values.shape[1:])

    def from_slots(self, values: Any) -> Any:
        """(M, …) values of (B, N, …)."""
        flat = values.reshape(-1, *values.shape[2:])
        return flat if self.slots is None or len(self.slots) == len(flat) else flat[self.slots]


def _rows_of(table: Any, indices: Any) -> Any:
    """Rows of a (n, D) table, by their bits, since not every library moves bfloat16: (M, D)."""
    bits = (np.uint16, np.uint32, np.uint64)[table.dtype.itemsize >> 2]
    return table.view(bits)[indices].view(table.dtype)


def _in_namespace(xp: Any, tree: DraftTree) -> DraftTree:
    """``tree`` with its arrays in ``xp``: itself if they are there."""
    if array_kind(tree.token_ids) == xp.__name__:
        return tree
    arrays = {f.name: getattr(tree, f.name) for f in fields(tree) if f.name not in ("max_depth", "num_candidates")}
    return replace(tree, **{name: xp.asarray(to_numpy(array)) for name, array in arrays.items()})


def check_names(config: ModelConfig, names: Iterable[str]) -> dict[str, tuple[int, ...]]:
    """Compare a checkpoint's tensor names with those that a configuration asks for.

    Parameters
    ----------
    config : ModelConfig
        Says what must be there.
    names : iterable of str
        What is there. Experts may be fused or not, a layer each. Multi-token prediction layers, the rotary buffers that
        older checkpoints carry, and the output layer of a model whose embedding is tied are passed over.

    Returns
    -------
    dict of str to tuple of int
        Shape of each tensor to be read.

    Raises
    ------
    ValueError
        Names are missing or left over.
    """
    have = set(names)
    layers = range(config.num_hidden_layers)
    _check_counts(config, have)
    fused = [i for i in layers if f"model.layers.{i}.mlp.experts.gate_up_proj" in have]
    shapes = config.tensor_shapes(fused_layers=fused)
    extra_layers = range(layers.stop, layers.stop + config.num_nextn_predict_layers)
    passed_over = tuple(f"model.layers.{i}." for i in extra_layers)
    left_over = {
        name
        for name in have - shapes.keys()
        if not name.startswith(passed_over)
        and not name.endswith(".rotary_emb.inv_freq")
        and not (config.tie_word_embeddings and name == "lm_head.weight")
    }
    for wrong, what in ((shapes.keys() - have, "lack"), (left_over, "have no place for")):
        if wrong:
            some = ", ".join(sorted(wrong)[:4]) + (f" and {len(wrong) - 4} more" if len(wrong) > 4 else "")
            subject = "the weights" if what == "lack" else "the configuration's tensors"
            raise ValueError(f"{subject} {what} {some}")
    return shapes


def _check_counts(config: ModelConfig, have: set[str]) -> None:
    """Refuse more layers or experts than there are tensors, before the names of all of them are made."""
    experts = [] if any(name.endswith(".mlp.experts.gate_up_proj") for name in have) else ["n_routed_experts"]
    for key in ["num_hidden_layers", *(experts if config.first_k_dense_replace < config.num_hidden_layers else [])]:
        count = getattr(config, key)
        if count > len(have):
            what = "layers" if key == "num_hidden_layers" else "experts"
            raise ValueError(f"the weights lack {what}: {key} = {count}, and there are {len(have)} tensors in all")


class _Reader:
    """Takes a mapping's tensors, checked, one by one to where the model lives, in the type that they have there."""

    def __init__(self, config: ModelConfig, weights: Mapping[str, Any], dtype: np.dtype[Any], xp: Any) -> None:
        self.config = config
        self.xp = xp
        self.dtype = dtype
        self._weights = weights
        self._ahead: dict[str, Any] = {}
        self._shapes = check_names(config, weights)

    def has(self, name: str) -> bool:
        return name in self._shapes

    def shape(self, name: str) -> tuple[int, ...]:
        return self._shapes[name]

    def ahead(self, *names: str) -> None:
        """Read these before room is made for them, so that their sizes are not only claimed."""
        self._ahead |= {name: self.tensor(name) for name in names}

    def tensor(self, name: str) -> Any:
        """The tensor as it is: on the host, or where the model lives if it is there already."""
        if name in self._ahead:
            return self._ahead.pop(name)
        tensor = import_array(self._weights[name])
        tensor = to_numpy(tensor) if self.xp is np else tensor
        if tensor.shape != self._shapes[name]:
            raise ValueError(f"{name} must have shape {self._shapes[name]} by the configuration, got {tensor.shape}")
        if dtype_name(tensor) not in WEIGHT_DTYPES:
            raise TypeError(f"{name} must be one of {', '.join(WEIGHT_DTYPES)}, got {tensor.dtype}")
        return tensor

    def room(self, name: str, shape: tuple[int, ...], dtype: Any = None) -> Any:
        """Memory for ``name``, or for what it is a part of."""
        dtype = self.dtype if dtype is None else np.dtype(dtype)
        try:
            return self.xp.empty(shape, dtype)
        except MemoryError as error:
            raise _out_of_memory(self.xp, name, math.prod(shape) * dtype.itemsize) from error

    def fill(self, name: str, room: Any, tensor: Any) -> None:
        """Write a tensor into its room, of the same shape, converted there, in pieces, so that little lies twice."""
        rows = max(1, PIECE * len(room) // max(1, tensor.nbytes)) if len(room) > 0 else 1
        try:
            for start in range(0, len(room), rows):
                piece = slice(start, start + rows)
                room[piece] = self.xp.asarray(_native(tensor[piece])).astype(room.dtype, copy=False)
        except MemoryError as error:
            raise _out_of_memory(self.xp, name, rows * max(1, tensor.nbytes // len(room))) from error

    def __call__(self, *names: str, dtype: Any = None) -> Any:
        """The tensors, stacked by rows."""
        shapes, start = [self._shapes[name] for name in names], 0
        self.ahead(names[0])
        room = self.room(names[0], (sum(shape[0] for shape in shapes), *shapes[0][1:]), dtype)
        for name, shape in zip(names, shapes, strict=True):
            self.fill(name, room[start : start + shape[0]], self.tensor(name))
            start += shape[0]
        return room


def _native(tensor: Any) -> Any:
    """A tensor in the machine's order of bytes."""
    return tensor if tensor.dtype.isnative else tensor.astype(tensor.dtype.newbyteorder("="))


def _out_of_memory(xp: Any, name: str, needed: int) -> MemoryError:
    where = "the host" if xp is np else f"GPU {xp.cuda.Device().id}"
    return MemoryError(
        f"{name} needs {needed:,} bytes on {where}, and {free_bytes(xp):,} are free: load the model in a narrower "
        "dtype, or free memory there"
    )


def _pack_layer(read: _Reader, i: int) -> _Layer:
    layer = f"model.layers.{i}"
    attention_norm = read(f"{layer}.input_layernorm.weight")
    attention = _pack_attention(read, attention_norm, f"{layer}.self_attn")
    norm = read(f"{layer}.post_attention_layernorm.weight")
    if read.config.is_moe(i):
        return _Layer(attention, _pack_experts(read, norm, f"{layer}.mlp"))
    gate_up = read(f"{layer}.mlp.gate_proj.weight", f"{layer}.mlp.up_proj.weight")
    return _Layer(attention, _Dense(norm, gate_up, read(f"{layer}.mlp.down_proj.weight")))


def _pack_experts(read: _Reader, norm: Any, mlp: str) -> _Experts:
    """The routed experts' matrices and, behind them, the shared expert's in parts of the routed ones' inner size."""
    c = read.config
    E, n, D, inner = c.n_routed_experts, c.n_shared_experts, c.hidden_size, c.moe_intermediate_size
    parts = [f"{part}_proj.weight" for part in ("gate", "up", "down")]
    fused = [f"{mlp}.experts.{part}_proj" for part in ("gate_up", "down")]
    read.ahead(fused[0] if read.has(fused[0]) else f"{mlp}.experts.0.{parts[0]}", f"{mlp}.shared_experts.{parts[0]}")
    gate_up, down = read.room(fused[0], (E + n, 2 * inner, D)), read.room(fused[1], (E + n, D, inner))
    if read.has(fused[0]):
        for name, room in zip(fused, (gate_up[:E], down[:E]), strict=True):
            read.fill(name, room, read.tensor(name))
    else:
        for e in range(E):
            for part, room in zip(parts, (gate_up[e, :inner], gate_up[e, inner:], down[e]), strict=True):
                name = f"{mlp}.experts.{e}.{part}"
                read.fill(name, room, read.tensor(name))
    # a SwiGLU's inner rows add up, so that an expert of n times the inner size is n experts
    for part, room in zip(parts, (gate_up[E:, :inner], gate_up[E:, inner:], down[E:].transpose(1, 0, 2)), strict=True):
        name = f"{mlp}.shared_experts.{part}"
        read.fill(name, room, read.tensor(name).reshape(room.shape))
    precise = np.float64 if read.dtype == np.float64 else np.float32
    router, bias = (read(f"{mlp}.gate.{name}", dtype=precise) for name in ("weight", "e_score_correction_bias"))
    return _Experts(norm, router, bias, gate_up, down)


def _pack_attention(read: _Reader, norm: Any, attention: str) -> _Attention:
    q_norm, q_up, down = None, None, _pack_compression(read, attention)
    if read.config.q_lora_rank is not None:
        name = f"{attention}.q_b_proj.weight"
        read.ahead(name)
        q_norm, q_up = read(f"{attention}.q_a_layernorm.weight"), read.room(name, read.shape(name))
        _fill_rotary(read, name, q_up, read.config.num_attention_heads)
    kv_norm = read(f"{attention}.kv_a_layernorm.weight")
    k_up, v_up = _pack_kv_up(read, f"{attention}.kv_b_proj.weight")
    return _Attention(norm, down, q_norm, q_up, kv_norm, k_up, v_up, read(f"{attention}.o_proj.weight"))


def _pack_compression(read: _Reader, attention: str) -> Any:
    """The query's compression (or, without one, the queries of all heads) and the key's, in one matrix."""
    c = read.config
    q_name = f"{attention}.q_proj.weight" if c.q_lora_rank is None else f"{attention}.q_a_proj.weight"
    kv_name = f"{attention}.kv_a_proj_with_mqa.weight"
    read.ahead(q_name, kv_name)
    rows = read.shape(q_name)[0]
    down = read.room(q_name, (rows + c.cache_width, c.hidden_size))
    if c.q_lora_rank is None:
        _fill_rotary(read, q_name, down[:rows], c.num_attention_heads)
    else:
        read.fill(q_name, down[:rows], read.tensor(q_name))
    _fill_rotary(read, kv_name, down[rows:], 1)
    return down


def _pack_kv_up(read: _Reader, name: str) -> tuple[Any, Any]:
    c = read.config
    H, P, V, C = c.num_attention_heads, c.qk_nope_head_dim, c.v_head_dim, c.kv_lora_rank
    tensor = read.tensor(name).reshape(H, P + V, C)
    k_up, v_up = read.room(name, (H, C, P)), read.room(name, (H, V, C))
    read.fill(name, k_up.transpose(0, 2, 1), tensor[:, :P])
    read.fill(name, v_up, tensor[:, P:])
    return k_up, v_up


def _fill_rotary(read: _Reader, name: str, room: Any, groups: int) -> None:
    """Fill a matrix whose rows are ``groups`` times some and then R rotary ones.

    Interleaved pairs become halves, once for all: attention's scores do not depend on the order of elements.
    """
    R, tensor = read.config.qk_rope_head_dim, read.tensor(name)
    room, tensor = (a.reshape(groups, -1, a.shape[-1]) for a in (room, tensor))
    plain = room.shape[1] - R
    if not read.config.rope_interleave:
        read.fill(name, room, tensor)
        return
    read.fill(name, room[:, :plain], tensor[:, :plain])
    read.fill(name, room[:, plain : plain + R // 2], tensor[:, plain::2])
    read.fill(name, room[:, plain + R // 2 :], tensor[:, plain + 1 :: 2])
