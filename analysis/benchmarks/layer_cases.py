"""What is timed of a model's layers: the kernels for few tokens, at the sizes of DeepSeek-V3, in bfloat16.

They are not operations of the public layer, so that a backend may lack them, and results are compared here, on some
elements in float64.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from ddtree.analysis.benchmarks.cases import Case, some_trees
from ddtree.reference import rope as reference_rope

__all__ = ["LAYER_CASES"]

HIDDEN, ATTENDED, VOCAB, INNER = 7168, 8192, 163_840, 2048
HEADS, LATENT, ROTATED, UNROTATED, PAGE = 64, 512, 64, 128, 64
EXPERTS, ROUTED, CHOSEN = 16, 256, 8
"""Experts that fit in memory beside each other, the last of them every token's; those that a router chooses from, and
how many it chooses."""
NEAR = 2e-2
"""Of the largest element: bfloat16 inputs and results, with a sum in between."""

Result = NDArray[Any]


def _normal(seed: int, *shape: int) -> Result:
    """Numbers of variance 1 / the last dimension, a quarter of a million of them over and over: sums are of size 1."""
    some = np.random.default_rng(seed).standard_normal(1 << 18).astype(np.float32) * np.float32(shape[-1] ** -0.5)
    return np.resize(some.astype(ml_dtypes.bfloat16), shape)


def _far(actual: Result, exact: Result) -> str:
    error = float(np.abs(actual.astype(np.float64) - exact).max() / np.abs(exact).max())
    return "" if error <= NEAR else f"off by {error:.2g} of the largest element"


def _silu_product(x: Result, gate_up: Result) -> Result:
    gate, up = np.split(x @ gate_up.astype(np.float64).T, 2, -1)
    return np.asarray(gate / (1 + np.exp(-gate)) * up)


def _rms_norm_fault(inputs: Mapping[str, Any], result: Result) -> str:
    x = inputs["x"].astype(np.float64)
    exact = x / np.sqrt((x * x).mean(-1, keepdims=True) + inputs["eps"]) * inputs["weight"].astype(np.float64)
    return _far(result, exact)


def _linear_fault(inputs: Mapping[str, Any], result: Result) -> str:
    some = slice(None, None, 97)
    return _far(result[:, some], inputs["x"].astype(np.float64) @ inputs["weight"][some].astype(np.float64).T)


def _head_linear_fault(inputs: Mapping[str, Any], result: Result) -> str:
    some = slice(None, None, 17)
    return _far(
        result[:, some],
        np.einsum("mhd,hod->mho", *(inputs[k].astype(np.float64) for k in ("x", "weight")))[:, some],
    )


def _decoder_linear_fault(inputs: Mapping[str, Any], result: Result) -> str:
    x = inputs["x"].astype(np.float64)
    normed = x / np.sqrt((x * x).mean(-1, keepdims=True) + inputs["eps"]) * inputs["gain"].astype(np.float64)
    return _far(result, normed @ inputs["weight"].astype(np.float64).T + inputs["residual"].astype(np.float64))


def _swiglu_fault(inputs: Mapping[str, Any], result: Result) -> str:
    hidden = _silu_product(inputs["x"].astype(np.float64), inputs["gate_up"])
    some = slice(None, None, 97)
    return _far(result[:, some], hidden @ inputs["down"][some].astype(np.float64).T)


def _moe_fault(inputs: Mapping[str, Any], result: Result) -> str:
    some, row = slice(None, None, 97), len(result) - 1
    exact = np.zeros(len(range(*some.indices(HIDDEN))))
    pairs = [
        *zip(inputs["expert_ids"][row], inputs["weights"][row].astype(np.float64), strict=True),
        (EXPERTS - 1, 1.0),
    ]
    for expert, weight in pairs:
        hidden = _silu_product(inputs["x"][row].astype(np.float64), inputs["gate_up"][expert])
        exact += weight * (inputs["down"][expert][some].astype(np.float64) @ hidden)
    return _far(result[row, some], exact)


def _route_fault(inputs: Mapping[str, Any], result: tuple[Result, Result]) -> str:
    from ddtree import reference

    ids, weights = reference.route_experts(**inputs)
    if not np.array_equal(result[0], ids):
        return f"{np.count_nonzero(result[0] != ids)} experts differ"
    return _far(result[1], weights.astype(np.float64))


def _rope_fault(inputs: Mapping[str, Any], result: tuple[Result, Result]) -> str:
    tree, prefix_lens, C = inputs["tree"], inputs["prefix_lens"], LATENT
    q, cache = (part.astype(np.float64) for part in result)
    told = ""
    for b in range(tree.batch_size):
        i = int(tree.node_counts[b]) - 1  # the last node in use
        position, row = prefix_lens[b] + tree.depths[b, i], int(prefix_lens[b]) + i
        cos, sin = reference_rope.rope_cos_sin(position, inputs["frequencies"])

        def rotated(x: Result, cos: Any = cos, sin: Any = sin) -> Result:
            return reference_rope.rotate_halves(x.astype(np.float64), cos, sin)

        kept = cache[inputs["page_table"][b, row // PAGE], row % PAGE]
        told = told or _far(q[b, i, :, C:], rotated(inputs["queries"][b, i, :, UNROTATED:]))
        told = told or _far(kept[C:], rotated(inputs["keys"][b, i]))
        latent = inputs["latents"][b, i].astype(np.float64)
        told = told or _far(kept[:C], latent / np.sqrt((latent * latent).mean() + inputs["eps"]))
    return told


def _case(
    name: str, sizes: dict[str, Any], make: Callable[[], dict[str, Any]], fault: Any, flops: float, moved: float
) -> Case:
    def run(ops: Mapping[str, Callable[..., Any]], inputs: dict[str, Any]) -> Any:
        return ops[name](**inputs)

    return Case(name, (name,), sizes, make, run, flops, moved, gpu_only=True, fault=fault)


def _rms_norm(M: int) -> Case:
    def make() -> dict[str, Any]:
        return {"x": _normal(0, M, HIDDEN), "weight": _normal(1, HIDDEN), "eps": 1e-6}

    return _case("rms_norm", {"M": M, "D": HIDDEN}, make, _rms_norm_fault, 0, 4.0 * M * HIDDEN)


def _linear(M: int, D: int, outputs: int) -> Case:
    def make() -> dict[str, Any]:
        return {"x": _normal(0, M, D), "weight": _normal(1, outputs, D)}

    moved = 2.0 * (outputs * D + M * D + M * outputs)
    return _case("linear", {"M": M, "D": D, "out": outputs}, make, _linear_fault, 2.0 * M * D * outputs, moved)


def _decoder_linear(M: int) -> Case:
    """As a small decoder's layer has it: with a norm before it and a residual behind."""
    D, outputs = 1024, 960

    def make() -> dict[str, Any]:
        return {
            "x": _normal(0, M, D),
            "weight": _normal(1, outputs, D),
            "gain": np.ones(D, ml_dtypes.bfloat16),
            "eps": 1e-6,
            "residual": _normal(2, M, outputs),
        }

    moved = 2.0 * (outputs * D + M * D + 2 * M * outputs)
    sizes = {"M": M, "D": D, "out": outputs}
    case = _case("linear", sizes, make, _decoder_linear_fault, 2.0 * M * D * outputs, moved)
    return dataclasses.replace(case, name="norm, linear, residual")


def _head_linear(M: int) -> Case:
    def make() -> dict[str, Any]:
        return {"x": _normal(0, M, HEADS, UNROTATED), "weight": _normal(1, HEADS, LATENT, UNROTATED)}

    size = HEADS * LATENT * UNROTATED
    moved = 2.0 * (size + M * HEADS * (UNROTATED + LATENT))
    sizes = {"M": M, "H": HEADS, "D": UNROTATED, "out": LATENT}
    return _case("head_linear", sizes, make, _head_linear_fault, 2.0 * M * size, moved)


def _swiglu(M: int) -> Case:
    def make() -> dict[str, Any]:
        return {"x": _normal(0, M, HIDDEN), "gate_up": _normal(1, 2 * INNER, HIDDEN), "down": _normal(2, HIDDEN, INNER)}

    size = 3 * INNER * HIDDEN
    sizes = {"M": M, "D": HIDDEN, "inner": INNER}
    return _case("swiglu", sizes, make, _swiglu_fault, 2.0 * M * size, 2.0 * (size + 2 * M * HIDDEN))


def _rope(B: int) -> Case:
    N, context, H = 65, 8192, HEADS

    def make() -> dict[str, Any]:
        pages = -(-(context + N) // PAGE)
        return {
            "q": _normal(0, B, N, H, LATENT + ROTATED),
            "kv_cache": _normal(1, B * pages, PAGE, LATENT + ROTATED),
            "queries": _normal(2, B, N, H, UNROTATED + ROTATED),
            "latents": _normal(3, B, N, LATENT),
            "keys": _normal(4, B, N, ROTATED),
            "page_table": np.random.default_rng(0).permutation(B * pages).astype(np.int32).reshape(B, pages),
            "prefix_lens": np.full(B, context, np.int32),
            "tree": some_trees(B, 7, N - 1),
            "gain": np.ones(LATENT, ml_dtypes.bfloat16),
            "eps": 1e-6,
            "frequencies": reference_rope.rope_frequencies(ROTATED, 10_000.0),
        }

    def run(ops: Mapping[str, Callable[..., Any]], inputs: dict[str, Any]) -> Any:
        ops["rope"](**inputs)
        return inputs["q"], inputs["kv_cache"]

    moved = 2.0 * B * N * (2 * H * ROTATED + 2 * (LATENT + ROTATED))
    sizes = {"B": B, "N": N, "H": H, "context": context}
    return Case("rope", ("rope",), sizes, make, run, 0, moved, gpu_only=True, fault=_rope_fault)


def _route(M: int) -> Case:
    def make() -> dict[str, Any]:
        rng = np.random.default_rng(0)
        return {
            "logits": rng.standard_normal((M, ROUTED), np.float32),
            "bias": 0.1 * rng.standard_normal(ROUTED, np.float32),
            "num_experts_per_tok": CHOSEN,
            "n_group": 8,
            "topk_group": 4,
            "norm_topk_prob": True,
            "routed_scaling_factor": 2.5,
        }

    return _case("route_experts", {"M": M, "experts": ROUTED}, make, _route_fault, 0, 4.0 * M * ROUTED)


def _moe(M: int) -> Case:
    def make() -> dict[str, Any]:
        ids = np.stack([np.random.default_rng(m).permutation(EXPERTS - 1)[:CHOSEN] for m in range(M)]).astype(np.int32)
        return {
            "x": _normal(0, M, HIDDEN),
            "expert_ids": ids,
            "weights": np.full((M, CHOSEN), 0.25, np.float32),
            "gate_up": _normal(1, EXPERTS, 2 * INNER, HIDDEN),
            "down": _normal(2, EXPERTS, HIDDEN, INNER),
            "shared": 1,
        }

    size, at_work = 3 * INNER * HIDDEN, min(EXPERTS, CHOSEN * M + 1)
    sizes = {"M": M, "experts": EXPERTS, "D": HIDDEN, "inner": INNER}
    flops, moved = 2.0 * M * (CHOSEN + 1) * size, 2.0 * (at_work * size + 2 * M * HIDDEN)
    return _case("moe_experts", sizes, make, _moe_fault, flops, moved)


LAYER_CASES: tuple[Case, ...] = (
    *map(_rms_norm, (1, 65, 256)),
    *map(_rope, (1, 8)),
    *(_linear(M, ATTENDED, HIDDEN) for M in (1, 16, 65, 256)),
    _linear(65, HIDDEN, VOCAB),
    *map(_decoder_linear, (1, 8, 65)),
    *map(_head_linear, (1, 65)),
    *map(_swiglu, (1, 16, 65, 256)),
    *map(_route, (1, 65, 256)),
    *map(_moe, (1, 65)),
)
"""Every case of a layer."""
