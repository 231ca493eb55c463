"""What people use today, at the same inputs: the published host loop, torch, and a Triton kernel as servers have it.

Each peer is told in a sentence, with what it is spared. A peer that is spared work keeps the comparison honest in its
own favour: torch's attention gets its keys gathered and its mask built beforehand.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from ddtree.analysis.benchmarks.build_tree import published_build_tree
from ddtree.trees import DraftTree

__all__ = ["PEERS", "Peer", "peers_for"]


@dataclass(frozen=True)
class Peer:
    """Another way to do what a case does.

    Attributes
    ----------
    name : str
        As in a table.
    case : str
        The name of the cases that it can do.
    about : str
        What it is, and what it is spared.
    library : str
        "numpy", "torch" or "triton".
    prepare : callable
        ``prepare(torch, inputs, device)`` takes the case's inputs in NumPy and returns the call to time. ``torch`` is
        None for a peer of NumPy.
    waits : bool
        It works on the host between kernels.
    slow : bool
        It takes seconds to prepare, since it is compiled for each size.
    """

    name: str
    case: str
    about: str
    library: str
    prepare: Callable[[Any, dict[str, Any], str], Callable[[], Any]]
    waits: bool = False
    slow: bool = False


def tensor(torch: Any, array: np.ndarray[Any, Any], device: str) -> Any:
    """The array as a torch tensor on ``device``; NumPy's bfloat16 travels as its bits."""
    if array.dtype.name == "bfloat16":
        return torch.from_numpy(array.view(np.int16)).to(device).view(torch.bfloat16)
    return torch.from_numpy(np.ascontiguousarray(array)).to(device)


# Trees: the published loop builds on the host, a request at a time, and copies there and back.


def _published_tree(torch: Any, log_probs: Any, token_ids: Any, budget: int, device: str) -> list[Any]:
    """Build each request's tree on the host from tensors on ``device`` and copy its parts back."""
    host_log_probs, host_ids = log_probs.cpu().numpy(), token_ids.cpu().numpy()
    made = []
    for b in range(len(host_log_probs)):
        tokens, depths, parents, _, visible = published_build_tree(host_log_probs[b], host_ids[b], budget)
        parts = tokens, depths, np.asarray(parents, np.int32), visible
        made.append([torch.from_numpy(part).to(device, non_blocking=True) for part in parts])
    return made


def _build_tree_on_host(torch: Any, inputs: dict[str, Any], device: str) -> Callable[[], Any]:
    log_probs, token_ids = (tensor(torch, inputs[name], device) for name in ("log_probs", "token_ids"))
    return lambda: _published_tree(torch, log_probs, token_ids, inputs["budget"], device)


def _logits_to_tree_on_host(torch: Any, inputs: dict[str, Any], device: str) -> Callable[[], Any]:
    logits, k, budget = tensor(torch, inputs["logits"], device), inputs["k"], inputs["budget"]

    def run() -> Any:
        top, ids = torch.topk(logits.float(), k, dim=-1)
        log_probs = top - torch.logsumexp(logits.float(), dim=-1, keepdim=True)
        return _published_tree(torch, log_probs, ids, budget, device)

    return run


def _torch_topk(torch: Any, inputs: dict[str, Any], device: str) -> Callable[[], Any]:
    logits, k = tensor(torch, inputs["logits"], device), inputs["k"]

    def run() -> Any:
        top, ids = torch.topk(logits.float(), k, dim=-1)
        return top - torch.logsumexp(logits.float(), dim=-1, keepdim=True), ids

    return run


def _positions(torch: Any, inputs: dict[str, Any], device: str) -> Callable[[], Any]:
    depths, prefix_lens = (tensor(torch, inputs[name], device) for name in ("depths", "prefix_lens"))
    return lambda: depths.clamp(min=0) + prefix_lens[:, None]


def _visibility_on_host(torch: Any, inputs: dict[str, Any], device: str) -> Callable[[], Any]:
    """A row a node, copied from its parent's; then to the GPU, as bool."""
    parents, counts = inputs["parents"], inputs["node_counts"]
    B, N = parents.shape

    def run() -> Any:
        visible = np.zeros((B, N, N), np.bool_)
        for b in range(B):
            visible[b, 0, 0] = True
            for i in range(1, int(counts[b])):
                visible[b, i] = visible[b, parents[b, i]]
                visible[b, i, i] = True
        return torch.from_numpy(visible).to(device)

    return run


# Attention: keys gathered into one tensor a request and the mask as bool, both before the time starts.


def dense_inputs(torch: Any, inputs: dict[str, Any], device: str) -> tuple[Any, Any, Any]:
    """Queries (B, N, H, C + R), gathered keys (B, rows, C + R) and mask (B, N, rows) on ``device``."""
    table, cache, tree = inputs["page_table"], inputs["kv_cache"], inputs["tree"]
    rows = int(inputs["prefix_lens"][0]) + tree.num_slots
    page = cache.shape[1]
    places = np.arange(rows)
    keys = cache[table[:, places // page], places % page]
    mask = np.concatenate([np.ones((*tree.parents.shape, rows - tree.num_slots), np.bool_), tree.visibility], -1)
    return tensor(torch, inputs["q"], device), tensor(torch, keys, device), tensor(torch, mask, device)


def _sdpa(torch: Any, inputs: dict[str, Any], device: str) -> Callable[[], Any]:
    q, keys, mask = dense_inputs(torch, inputs, device)
    C, scale = inputs["kv_lora_rank"], inputs["scale"]
    heads = q.shape[2]
    queries = q.transpose(1, 2)
    shared = keys[:, None].expand(-1, heads, -1, -1)  # one latent for all heads: no copy
    attend = torch.nn.functional.scaled_dot_product_attention
    return lambda: attend(queries, shared, shared[..., :C], attn_mask=mask[:, None], scale=scale).transpose(1, 2)


def _formula(torch: Any, q: Any, keys: Any, hidden: Any, scale: float, C: int) -> Any:
    B, N, H, width = q.shape
    scores = (q.reshape(B, N * H, width) @ keys.transpose(1, 2)).view(B, N, H, -1)
    scores = (scores.float() * scale).masked_fill(hidden[:, :, None], float("-inf"))
    weights = torch.softmax(scores, -1).to(q.dtype)
    return (weights.view(B, N * H, -1) @ keys[..., :C]).view(B, N, H, C)


def _matmuls(torch: Any, inputs: dict[str, Any], device: str) -> Callable[[], Any]:
    q, keys, mask = dense_inputs(torch, inputs, device)
    hidden, scale, C = ~mask, inputs["scale"], inputs["kv_lora_rank"]
    return lambda: _formula(torch, q, keys, hidden, scale, C)


def _compiled_matmuls(torch: Any, inputs: dict[str, Any], device: str) -> Callable[[], Any]:
    q, keys, mask = dense_inputs(torch, inputs, device)
    hidden, scale, C = ~mask, inputs["scale"], inputs["kv_lora_rank"]
    compiled = torch.compile(lambda a, b, c: _formula(torch, a, b, c, scale, C), dynamic=False)
    return lambda: compiled(q, keys, hidden)


def _one_program_a_head(torch: Any, inputs: dict[str, Any], device: str) -> Callable[[], Any]:
    triton_attention = importlib.import_module("ddtree.analysis.benchmarks.triton_attention")
    given = {name: tensor(torch, inputs[name], device) for name in ("q", "kv_cache", "page_table", "prefix_lens")}
    tree = inputs["tree"]
    words, counts = tensor(torch, tree.visibility_words.view(np.int32), device), tensor(torch, tree.node_counts, device)
    scale, C = inputs["scale"], inputs["kv_lora_rank"]
    return lambda: triton_attention.attend(**given, words=words, node_counts=counts, scale=scale, kv_lora_rank=C)


# Choice and acceptance.


def _torch_choice(torch: Any, inputs: dict[str, Any], device: str) -> Callable[[], Any]:
    logits, T, top_p = tensor(torch, inputs["logits"], device), inputs["temperature"], inputs["top_p"]
    if T == 0:
        return lambda: logits.argmax(-1)

    def run() -> Any:
        probs = torch.softmax(logits / T, -1)
        if top_p < 1:
            ordered, ids = probs.sort(-1, descending=True)
            probs = torch.zeros_like(probs).scatter(-1, ids, ordered * (ordered.cumsum(-1) - ordered < top_p))
        return (probs / torch.empty_like(probs).exponential_()).argmax(-1)

    return run


def _accept_on_host(torch: Any, inputs: dict[str, Any], device: str) -> Callable[[], Any]:
    """Read the choices, walk each request's maps of children, and move each layer's rows by ``index_select``."""
    tree: DraftTree = inputs["tree"]
    maps = [children_of(tree, b) for b in range(tree.batch_size)]
    choices, cache = tensor(torch, inputs["choices"], device), tensor(torch, inputs["kv_cache"], device)
    page, prefix = cache.shape[2], inputs["prefix_lens"]
    table = inputs["page_table"].astype(np.int64)
    layers = [layer.view(-1, layer.shape[-1]) for layer in cache]

    def rows(b: int, first: Any) -> Any:
        return table[b, first // page] * page + first % page

    def run() -> Any:
        chosen = choices.tolist()  # waits for the GPU
        of, to = [], []
        for b, children in enumerate(maps):
            node, path = 0, [0]
            while (node := children[node].get(chosen[b][node], -1)) >= 0:
                path.append(node)
            of.append(rows(b, prefix[b] + np.array(path)))
            to.append(rows(b, prefix[b] + np.arange(len(path))))
        source, target = (torch.from_numpy(np.concatenate(side)).to(device, non_blocking=True) for side in (of, to))
        for layer in layers:
            layer.index_copy_(0, target, layer.index_select(0, source))

    return run


def children_of(tree: DraftTree, b: int) -> list[dict[int, int]]:
    """Of each node of one request, its children by token: the first of equal ones."""
    children: list[dict[int, int]] = [{} for _ in range(tree.num_slots)]
    for i in range(1, int(tree.node_counts[b])):
        children[int(tree.parents[b, i])].setdefault(int(tree.token_ids[b, i]), i)
    return children


# Layers, by the vendor's library and torch's kernels.


def _torch_rms_norm(torch: Any, inputs: dict[str, Any], device: str) -> Callable[[], Any]:
    x, weight = (tensor(torch, inputs[name], device) for name in ("x", "weight"))
    return lambda: torch.nn.functional.rms_norm(x, weight.shape, weight, inputs["eps"])


def _torch_rope(torch: Any, inputs: dict[str, Any], device: str) -> Callable[[], Any]:
    """Rotate queries and keys by tables of all positions, and put the nodes' rows into the cache."""
    q, cache, queries, latents, keys, gain = (
        tensor(torch, inputs[name], device) for name in ("q", "kv_cache", "queries", "latents", "keys", "gain")
    )
    tree, table, page = inputs["tree"], inputs["page_table"].astype(np.int64), inputs["kv_cache"].shape[1]
    rows = inputs["prefix_lens"][:, None] + np.arange(tree.num_slots)
    places = np.take_along_axis(table, rows // page, 1) * page + rows % page
    positions = tensor(torch, inputs["prefix_lens"][:, None] + tree.depths.clip(0), device)
    angles = np.arange(int(rows.max()) + 1)[:, None] * inputs["frequencies"]
    cosines, sines = (tensor(torch, of(angles).astype(np.float32), device).to(q.dtype) for of in (np.cos, np.sin))
    where, flat = tensor(torch, places.ravel(), device), cache.view(-1, cache.shape[-1])
    R, C = keys.shape[-1], latents.shape[-1]

    def rotated(x: Any, cos: Any, sin: Any) -> Any:
        a, b = x.chunk(2, -1)
        return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)

    def run() -> Any:
        cos, sin = cosines[positions], sines[positions]
        q[..., C:] = rotated(queries[..., -R:], cos[:, :, None], sin[:, :, None])
        normed = torch.nn.functional.rms_norm(latents, gain.shape, gain, inputs["eps"])
        flat.index_copy_(0, where, torch.cat([normed, rotated(keys, cos, sin)], -1).flatten(0, 1))
        return q

    return run


def _torch_linear(torch: Any, inputs: dict[str, Any], device: str) -> Callable[[], Any]:
    x, weight = (tensor(torch, inputs[name], device) for name in ("x", "weight"))
    return lambda: torch.nn.functional.linear(x, weight)


def _gated(torch: Any, x: Any, gate_up: Any, down: Any) -> Any:
    gate, up = torch.nn.functional.linear(x, gate_up).chunk(2, -1)
    return torch.nn.functional.linear(torch.nn.functional.silu(gate) * up, down)


def _torch_swiglu(torch: Any, inputs: dict[str, Any], device: str) -> Callable[[], Any]:
    given = [tensor(torch, inputs[name], device) for name in ("x", "gate_up", "down")]
    return lambda: _gated(torch, *given)


def _torch_route(torch: Any, inputs: dict[str, Any], device: str) -> Callable[[], Any]:
    logits, bias = (tensor(torch, inputs[name], device) for name in ("logits", "bias"))
    K, groups, kept = (inputs[name] for name in ("num_experts_per_tok", "n_group", "topk_group"))

    def run() -> Any:
        scores = logits.sigmoid()
        grouped = (scores + bias).view(len(logits), groups, -1)
        best = grouped.topk(2, -1)[0].sum(-1).topk(kept, -1, sorted=False)[1]
        mask = torch.zeros_like(grouped[..., 0]).scatter_(1, best, 1).bool()
        ids = grouped.masked_fill(~mask[..., None], float("-inf")).flatten(1).topk(K, -1)[1]
        weights = scores.gather(1, ids)
        return ids, weights / (weights.sum(-1, keepdim=True) + 1e-20) * inputs["routed_scaling_factor"]

    return run


def _experts_one_by_one(torch: Any, inputs: dict[str, Any], device: str) -> Callable[[], Any]:
    x, ids, weights, gate_up, down = (
        tensor(torch, inputs[name], device) for name in ("x", "expert_ids", "weights", "gate_up", "down")
    )
    routed = len(gate_up) - inputs["shared"]

    def run() -> Any:
        result = torch.zeros_like(x)
        for expert in range(routed, len(gate_up)):
            result += _gated(torch, x, gate_up[expert], down[expert])
        for expert in range(routed):
            tokens, places = torch.where(ids == expert)  # waits for the GPU
            if len(tokens):
                out = _gated(torch, x[tokens], gate_up[expert], down[expert])
                result.index_add_(0, tokens, (out * weights[tokens, places, None]).to(result.dtype))
        return result

    return run


PEERS = (
    Peer("torch", "tree_positions", "depths + prefix_lens, eagerly", "torch", _positions),
    Peer(
        "host loop",
        "visibility_words",
        "as published: a row a node on the host, copied from its parent's, then to the GPU",
        "torch",
        _visibility_on_host,
        waits=True,
    ),
    Peer(
        "torch",
        "rope",
        "tables of cosines and sines, products, cat, index_copy, eagerly; rows' places worked out beforehand",
        "torch",
        _torch_rope,
    ),
    Peer("torch", "rms_norm", "torch.nn.functional.rms_norm", "torch", _torch_rms_norm),
    Peer("torch", "linear", "torch.nn.functional.linear, which is the vendor's library", "torch", _torch_linear),
    Peer("torch", "swiglu", "two such products, and silu between them", "torch", _torch_swiglu),
    Peer("torch", "route_experts", "sigmoid, topk, scatter and gather, eagerly", "torch", _torch_route),
    Peer(
        "expert by expert",
        "moe_experts",
        "as transformers does: the tokens of each expert in turn, found by torch.where",
        "torch",
        _experts_one_by_one,
        waits=True,
    ),
    Peer(
        "host heap",
        "build_tree",
        "the published builder, a request at a time on the host: copies there and back, heap, visibility loop",
        "torch",
        _build_tree_on_host,
        waits=True,
    ),
    Peer(
        "host heap",
        "logits to tree",
        "as published: torch.topk and logsumexp, then the host's heap and visibility loop, with copies there and back",
        "torch",
        _logits_to_tree_on_host,
        waits=True,
    ),
    Peer("torch", "topk_log_probs", "torch.topk and torch.logsumexp of float32 logits", "torch", _torch_topk),
    Peer(
        "torch SDPA",
        "verify_attention",
        "scaled_dot_product_attention with a bool mask; keys gathered and mask built beforehand",
        "torch",
        _sdpa,
    ),
    Peer(
        "torch matmuls",
        "verify_attention",
        "matmul, masked softmax in float32, matmul, eagerly; keys gathered and mask built beforehand",
        "torch",
        _matmuls,
    ),
    Peer(
        "compiled matmuls",
        "verify_attention",
        "the same through torch.compile, for each size anew",
        "torch",
        _compiled_matmuls,
        slow=True,
    ),
    Peer(
        "Triton, a program a head",
        "verify_attention",
        "one program a request, head and 32 nodes, over the whole paged context: how servers' extend kernels work",
        "triton",
        _one_program_a_head,
    ),
    Peer("torch", "choose_tokens", "argmax; sampled: softmax, top-p by sorting, unkeyed noise", "torch", _torch_choice),
    Peer(
        "host walk",
        "accept and compact",
        "choices read by the host, a walk through maps of children, index_select and index_copy a layer",
        "torch",
        _accept_on_host,
        waits=True,
    ),
)
"""Every peer."""


def peers_for(case: str, *, on_gpu: bool, slow: bool) -> tuple[Peer, ...]:
    """The peers of a case's name that could run where the arrays lie; Triton's kernels need a GPU."""
    return tuple(p for p in PEERS if p.case == case and (on_gpu or p.library != "triton") and (slow or not p.slow))
