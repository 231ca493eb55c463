"""A DeepSeek-V3 transformer as a target: it checks draft trees over a paged latent cache."""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ddtree.arrays import array_kind, array_namespace, dtype_name, to_numpy
from ddtree.backends import get_backend, serving
from ddtree.model.config import ModelConfig
from ddtree.model.layers import LatentAttention, moe_experts, rms_norm, rope_cos_sin, route_experts, swiglu
from ddtree.protocols import KVCache, TargetOutput
from ddtree.threads import SMALL, small_products_on_one_thread
from ddtree.trees import DraftTree

__all__ = ["DeepseekV3", "check_names"]

WEIGHT_DTYPES = ("float16", "bfloat16", "float32", "float64")


@dataclass(frozen=True)
class _Dense:
    gate_up: Any  # (2I, D)
    down: Any  # (D, I)


@dataclass(frozen=True)
class _Experts:
    router: Any  # (E, D)
    bias: Any  # (E,)
    gate_up: Any  # (E, 2I, D)
    down: Any  # (E, D, I)
    shared: _Dense


@dataclass(frozen=True)
class _Layer:
    attention_norm: Any  # (D,)
    attention: LatentAttention
    mlp_norm: Any  # (D,)
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
        "float32" or "float64": of weights, cache and all arithmetic, the router, norms and softmax included.
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
        if dtype not in ("float32", "float64"):
            raise ValueError(f"dtype must be 'float32' or 'float64', got {dtype!r}")
        kind = "numpy" if backend is None else get_backend(backend).array_kind
        if kind == "torch":
            raise ValueError(f"backend must take NumPy or CuPy arrays to serve a model, but {backend!r} takes torch's")
        self.config = config
        self.dtype = np.dtype(dtype)
        self.backend = backend
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
    def small_products(self) -> bool:
        """Whether its products on the host are too small to share between threads (see :mod:`ddtree.threads`)."""
        return self.config.hidden_size < SMALL and array_kind(self._embedding) == "numpy"

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
            B trees of N slots; a prompt is a :func:`ddtree.trees.chain_tree`. Arrays on the host are taken to a model
            on the GPU.
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
            ``logits`` (B, N, V) and ``hidden_states``, each (B, N, D), in the model's type; 0 in unused slots.

        Raises
        ------
        ValueError
            The cache does not fit the model or the tree, a layer does not exist, or, on the host, where looking costs
            nothing, a token id or a page is out of range. Nothing has been written then.
        """
        xp = array_namespace(self._embedding)
        tree = _in_namespace(xp, tree)
        nodes = self._place(tree, cache, hidden_layers)
        cos, sin = (
            t.astype(self.dtype) for t in rope_cos_sin(nodes.positions, self._frequencies, self.config.attention_factor)
        )
        eps = self.config.rms_norm_eps
        h = self._embedding[nodes.token_ids]
        hidden_states = {0: nodes.to_slots(h)} if 0 in hidden_layers else {}
        for i, layer in enumerate(self._layers):
            q, rows = layer.attention.project(rms_norm(h, layer.attention_norm, eps=eps), cos, sin)
            cache.data[i][nodes.pages, nodes.page_rows] = rows
            latents = self._attend(
                nodes.to_slots(q),
                cache.data[i],
                cache.page_table,
                cache.prefix_lens,
                tree,
                scale=self.config.attention_scale,
                kv_lora_rank=self.config.kv_lora_rank,
            )
            h = h + layer.attention.output(nodes.from_slots(latents))
            h = h + self._mlp(rms_norm(h, layer.mlp_norm, eps=eps), layer.mlp)
            if i + 1 in hidden_layers:
                hidden_states[i + 1] = nodes.to_slots(h)
        if last_only:
            h = h[xp.cumsum(tree.node_counts) - 1]
        logits = rms_norm(h, self._norm, eps=eps) @ self._head.T
        return TargetOutput(logits[:, None] if last_only else nodes.to_slots(logits), hidden_states)

    def _mlp(self, x: Any, w: _Dense | _Experts) -> Any:
        if isinstance(w, _Dense):
            return swiglu(x, w.gate_up, w.down)
        c = self.config
        expert_ids, weights = route_experts(
            x @ w.router.T,
            w.bias,
            num_experts_per_tok=c.num_experts_per_tok,
            n_group=c.n_group,
            topk_group=c.topk_group,
            norm_topk_prob=c.norm_topk_prob,
            routed_scaling_factor=c.routed_scaling_factor,
        )
        return moe_experts(x, expert_ids, weights, w.gate_up, w.down) + swiglu(x, w.shared.gate_up, w.shared.down)

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

        real = xp.arange(N) < tree.node_counts[:, None]
        slots = xp.flatnonzero(real)
        request, node = slots // N, slots % N
        token_ids = tree.token_ids.reshape(-1)[slots]
        S, room = data.shape[2], table.shape[1] * data.shape[2]
        start = prefix[request].astype(xp.int64)  # offsets into a cache can exceed 32 bits
        rows = start + node
        host = xp is np and len(slots) > 0
        if host and not 0 <= token_ids.min() <= token_ids.max() < c.vocab_size:
            at = int(np.argmax((token_ids < 0) | (token_ids >= c.vocab_size)))
            raise ValueError(
                f"tree.token_ids[{request[at]}, {node[at]}] must be in 0 … {c.vocab_size - 1}, got {token_ids[at]}"
            )
        if host and not 0 <= rows.min() <= rows.max() < room:
            at = int(np.argmax((rows < 0) | (rows >= room)))
            raise ValueError(
                f"cache.page_table has room for {room} rows a request, but node {node[at]} of request {request[at]} "
                f"goes to row {rows[at]}"
            )
        pages = table[request, rows // S]
        if host and not 0 <= pages.min() <= pages.max() < data.shape[1]:
            at = int(np.argmax((pages < 0) | (pages >= data.shape[1])))
            raise ValueError(
                f"cache.page_table[{request[at]}, {rows[at] // S}] must be in 0 … {data.shape[1] - 1}, got {pages[at]}"
            )
        depths = tree.depths.reshape(-1)[slots]
        return _Nodes((B, N), slots, token_ids, start + depths, pages, rows % S)


@dataclass(frozen=True)
class _Nodes:
    """The M nodes in use, in order of their slots, so that no arithmetic is spent on padding."""

    shape: tuple[int, int]  # (B, N)
    slots: Any  # (M,), of B · N
    token_ids: Any  # (M,)
    positions: Any  # (M,)
    pages: Any  # (M,)
    page_rows: Any  # (M,)

    def to_slots(self, values: Any) -> Any:
        """(M, …) values in their slots: (B, N, …), 0 in unused ones."""
        B, N = self.shape
        if len(self.slots) == B * N:
            return values.reshape(B, N, *values.shape[1:])
        result = array_namespace(values).zeros((B * N, *values.shape[1:]), values.dtype)
        result[self.slots] = values
        return result.reshape(B, N, *values.shape[1:])

    def from_slots(self, values: Any) -> Any:
        """(M, …) values of (B, N, …)."""
        flat = values.reshape(-1, *values.shape[2:])
        return flat if len(self.slots) == len(flat) else flat[self.slots]


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
    """Takes tensors from a mapping in the model's type, checked, and to where the model lives."""

    def __init__(self, config: ModelConfig, weights: Mapping[str, Any], dtype: np.dtype[Any], xp: Any) -> None:
        self.config = config
        self.xp = xp
        self._weights = weights
        self._dtype = dtype
        self._shapes = check_names(config, weights)

    def has(self, name: str) -> bool:
        return name in self._shapes

    def host(self, name: str) -> NDArray[Any]:
        """A copy of the tensor on the host."""
        tensor = to_numpy(self._weights[name])
        if tensor.shape != self._shapes[name]:
            raise ValueError(f"{name} must have shape {self._shapes[name]} by the configuration, got {tensor.shape}")
        if tensor.dtype.name not in WEIGHT_DTYPES:
            raise TypeError(f"{name} must be one of {', '.join(WEIGHT_DTYPES)}, got {tensor.dtype}")
        return np.array(tensor, self._dtype)

    def device(self, array: NDArray[Any]) -> Any:
        return self.xp.asarray(np.ascontiguousarray(array))

    def __call__(self, *names: str) -> Any:
        """The tensors, stacked by rows."""
        return self.device(np.concatenate([self.host(name) for name in names]))


def _pack_layer(read: _Reader, i: int) -> _Layer:
    c = read.config
    layer = f"model.layers.{i}"
    return _Layer(
        read(f"{layer}.input_layernorm.weight"),
        _pack_attention(read, f"{layer}.self_attn"),
        read(f"{layer}.post_attention_layernorm.weight"),
        _pack_experts(read, f"{layer}.mlp") if c.is_moe(i) else _pack_dense(read, f"{layer}.mlp"),
    )


def _pack_dense(read: _Reader, mlp: str) -> _Dense:
    return _Dense(
        read(f"{mlp}.gate_proj.weight", f"{mlp}.up_proj.weight"),
        read(f"{mlp}.down_proj.weight"),
    )


def _pack_experts(read: _Reader, mlp: str) -> _Experts:
    if read.has(f"{mlp}.experts.gate_up_proj"):
        gate_up, down = read(f"{mlp}.experts.gate_up_proj"), read(f"{mlp}.experts.down_proj")
    else:
        experts = [_pack_dense(read, f"{mlp}.experts.{e}") for e in range(read.config.n_routed_experts)]
        gate_up, down = (read.xp.stack(part) for part in zip(*((e.gate_up, e.down) for e in experts), strict=True))
    return _Experts(
        read(f"{mlp}.gate.weight"),
        read(f"{mlp}.gate.e_score_correction_bias"),
        gate_up,
        down,
        _pack_dense(read, f"{mlp}.shared_experts"),
    )


def _pack_attention(read: _Reader, attention: str) -> LatentAttention:
    c = read.config
    H, P, C, R = c.num_attention_heads, c.qk_nope_head_dim, c.kv_lora_rank, c.qk_rope_head_dim
    kv_down = read.host(f"{attention}.kv_a_proj_with_mqa.weight")  # first: that R is not only claimed
    # Interleaved pairs become halves here, once: attention's scores do not depend on the order of elements.
    halves = np.arange(R).reshape(-1, 2).T.reshape(-1) if c.rope_interleave else np.arange(R)

    def queries(name: str) -> NDArray[Any]:
        heads = read.host(name).reshape(H, P + R, -1)
        heads[:, P:] = heads[:, P + halves]
        return heads.reshape(H * (P + R), -1)

    kv_down[C:] = kv_down[C + halves]
    compressed = c.q_lora_rank is not None
    q_down = read.host(f"{attention}.q_a_proj.weight") if compressed else queries(f"{attention}.q_proj.weight")
    kv_up = read.host(f"{attention}.kv_b_proj.weight").reshape(H, P + c.v_head_dim, C)
    return LatentAttention(
        down=read.device(np.concatenate([q_down, kv_down])),
        q_norm=read(f"{attention}.q_a_layernorm.weight") if compressed else None,
        q_up=read.device(queries(f"{attention}.q_b_proj.weight")) if compressed else None,
        kv_norm=read(f"{attention}.kv_a_layernorm.weight"),
        k_up=read.device(kv_up[:, :P]),
        v_up=read.device(kv_up[:, P:].transpose(0, 2, 1)),
        out=read(f"{attention}.o_proj.weight"),
    )
