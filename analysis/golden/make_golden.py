"""Make the golden models: small random DeepSeek-V3 models, with what transformers itself computes from them.

Needs the ``golden`` extra; the tests need its results alone, in ``property_tests/golden``::

    python -P -m ddtree.analysis.golden.make_golden --out property_tests/golden

(``-P`` keeps the folder ``kernels`` beside the package from being importable: transformers would take it for a library
of that name.) The same seeds and versions make the same bytes.

Weights are rounded to bfloat16 before anything is computed, so that a file holds them exactly in two bytes each. All
expected values are those of ``DeepseekV3ForCausalLM`` in float64, including what it computes in float32 in any model:
norms, softmax, router and RoPE. :func:`ddtree.model.golden_bundle` says what a file holds; in terms of transformers

* ``golden/hidden_states[i]`` is the input of decoder layer i, and the last one the last layer's output (not the
  normed one that ``output_hidden_states`` ends with);
* ``golden/cache[i]`` is layer i's ``keys`` (the latent after ``kv_a_layernorm``), then its ``values`` (the rotated
  key). transformers writes a rotated key with all first elements of its pairs before all second ones, whether the
  weights have them interleaved or not, which is this project's order too;
* ``golden/router_weights`` spreads a router's ``topk_weights`` over all experts.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import ml_dtypes
import numpy as np
import torch
import transformers
from rich.console import Console
from rich.table import Table
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM, modeling_rope_utils
from transformers.models.deepseek_v3 import modeling_deepseek_v3

from ddtree.model import ModelConfig, save_bundle

TINY: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 3,
    "first_k_dense_replace": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "q_lora_rank": 48,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 2.5,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 256,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "num_nextn_predict_layers": 0,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "initializer_range": 0.3,
}
# eps unlike 1e-6, which the norms inside attention keep; value heads unlike key heads; two shared experts
VARIANT = TINY | {
    "vocab_size": 128,
    "hidden_size": 48,
    "intermediate_size": 96,
    "moe_intermediate_size": 16,
    "q_lora_rank": 40,
    "v_head_dim": 12,
    "n_shared_experts": 2,
    "rms_norm_eps": 1e-3,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 1.0,
    "mscale_all_dim": 0.8,
    "original_max_position_embeddings": 64,
}
GROUPS = {"n_routed_experts": 12, "n_group": 4, "topk_group": 2, "num_experts_per_tok": 3}

GOLDEN: dict[str, tuple[int, float, dict[str, Any]]] = {
    "tiny": (37, 0.0, TINY),
    "router_groups": (10, 0.0, VARIANT | GROUPS),
    "router_bias": (0, 0.3, VARIANT | GROUPS | {"norm_topk_prob": False, "routed_scaling_factor": 1.5}),
    "no_q_lora": (7, 0.0, VARIANT | {"q_lora_rank": None}),
    "no_interleave": (5, 0.0, VARIANT | {"rope_interleave": False}),
    "yarn": (9, 0.0, VARIANT | {"rope_parameters": YARN}),
}
"""Seed, standard deviation of the router's bias, and configuration of each.

The seeds are those, of a few tried, whose closest top-2 logits and closest router scores are furthest apart: a float32
model must not come near a flip.
"""

PROMPT_TOKENS = 12
NEW_TOKENS = 32


class _Torch64:
    """Stands for ``torch`` in the model's own code: what it computes in float32 is computed in float64."""

    float32 = torch.float64
    float = torch.float64

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


def make_model(config: DeepseekV3Config, seed: int, bias_std: float) -> Any:
    """A random model in float64 whose weights bfloat16 holds exactly."""
    torch.manual_seed(seed)
    model = DeepseekV3ForCausalLM(config).eval()
    model.generation_config.eos_token_id = None  # the continuation does not end
    model.set_attn_implementation("eager")
    model.set_experts_implementation("eager")
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "norm" in name:  # they start as ones, which would hide a missing gain
                weight.copy_(1.0 + 0.1 * torch.randn_like(weight))
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.copy_(bias_std * torch.randn_like(buffer))
        for tensor in model.state_dict().values():
            tensor.copy_(tensor.bfloat16())
    return model.double()


def expected(model: Any, prompt: Any) -> dict[str, np.ndarray[Any, Any]]:
    """Greedy tokens, and the values inside a pass over prompt and tokens."""
    layers = model.model.layers
    hidden: list[Any] = []
    routed: list[Any] = []
    with torch.no_grad():
        ids = model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            do_sample=False,
            max_new_tokens=NEW_TOKENS,
            pad_token_id=0,
        )
        hooks = [layers[0].register_forward_pre_hook(lambda _, args: hidden.append(args[0]))]
        hooks += [layer.register_forward_hook(lambda _, args, out: hidden.append(out)) for layer in layers]
        routers = [layer.mlp.gate for layer in layers if hasattr(layer.mlp, "gate")]
        hooks += [router.register_forward_hook(lambda _, args, out: routed.append(out)) for router in routers]
        output = model(ids, use_cache=True)
        for hook in hooks:
            hook.remove()

    tokens = ids[0, PROMPT_TOKENS:]
    if not torch.equal(output.logits[0, PROMPT_TOKENS - 1 : -1].argmax(-1), tokens):
        raise RuntimeError("one pass over all tokens and generation token by token disagree: choose another seed")
    weights = [torch.zeros_like(logits).scatter(1, chosen, values) for logits, values, chosen in routed]
    cache = [torch.cat([layer.keys[0, 0], layer.values[0, 0]], -1) for layer in output.cache.layers]
    return {
        "golden/prompt": prompt[0].int().numpy(),
        "golden/tokens": tokens.int().numpy(),
        "golden/logits": output.logits[0].numpy(),
        "golden/hidden_states": torch.stack([h[0] for h in hidden]).numpy(),
        "golden/cache": torch.stack(cache).numpy(),
        "golden/router_weights": torch.stack(weights).numpy(),
    }


def router_margin(model: Any, golden: dict[str, np.ndarray[Any, Any]]) -> float:
    """The least lead of a chosen expert over one of the same groups that was not: how near a flip is."""
    # stated with the router's own scores, so that it does not depend on the comparison
    least = np.inf
    layers = [layer for layer in model.model.layers if hasattr(layer.mlp, "gate")]
    first = len(model.model.layers) - len(layers)
    with torch.no_grad():
        for i, layer in enumerate(layers):
            h = torch.from_numpy(golden["golden/hidden_states"][first + i])[None]
            caught: list[Any] = []
            hook = layer.mlp.gate.register_forward_hook(lambda _, args, out, caught=caught: caught.append(out[0]))
            positions = torch.arange(h.shape[1])[None]
            mask = torch.full((h.shape[1],) * 2, -torch.inf, dtype=h.dtype).triu(1)[None, None]
            layer(h, attention_mask=mask, position_embeddings=model.model.rotary_emb(h, positions))
            hook.remove()
            scores = caught[0].sigmoid() + layer.mlp.gate.e_score_correction_bias
            chosen = torch.from_numpy(golden["golden/router_weights"][i]) > 0
            groups = chosen.reshape(len(chosen), model.config.n_group, -1)
            rivals = groups.any(-1, keepdim=True).expand_as(groups).reshape_as(chosen) & ~chosen
            worst = scores.masked_fill(~chosen, torch.inf).amin(-1)
            best = scores.masked_fill(~rivals, -torch.inf).amax(-1)
            least = min(least, float((worst - best).min()))
    return least


def main() -> None:
    """Write every bundle and a table of what is in them."""
    parser = argparse.ArgumentParser(description="Make the golden models.")
    parser.add_argument("--out", type=Path, required=True, help="folder of the bundles")
    parser.add_argument("--only", choices=list(GOLDEN), action="append", help="make this one alone (repeatable)")
    parser.add_argument("--seed", type=int, help="in place of each bundle's own, to look for a better one")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    modeling_deepseek_v3.torch = _Torch64()
    modeling_rope_utils.torch = _Torch64()

    versions = {"torch": torch.__version__, "transformers": transformers.__version__, "numpy": np.__version__}
    table = Table(title=", ".join(f"{name} {version}" for name, version in versions.items()))
    for column in ("bundle", "kB", "parameters", "distinct tokens", "top-2 margin", "router margin", "tokens"):
        table.add_column(column, justify="left" if column in ("bundle", "tokens") else "right")
    for name in arguments.only or GOLDEN:
        seed, bias_std, settings = GOLDEN[name]
        seed = seed if arguments.seed is None else arguments.seed
        config = DeepseekV3Config(**settings)
        model = make_model(config, seed, bias_std)
        generator = torch.Generator().manual_seed(seed + 1)
        prompt = torch.randint(2, config.vocab_size, (1, PROMPT_TOKENS), generator=generator)
        golden = expected(model, prompt)
        weights = {k: v.float().numpy().astype(ml_dtypes.bfloat16) for k, v in model.state_dict().items()}
        top = np.sort(golden["golden/logits"][PROMPT_TOKENS - 1 : -1], -1)
        margin = float((top[:, -1] - top[:, -2]).min())
        lead = router_margin(model, golden)
        path = arguments.out / f"{name}.kdtr"
        save_bundle(
            path,
            ModelConfig.from_dict(config.to_dict()),
            weights,
            extra=golden,
            metadata=versions | {"seed": str(seed), "top2_margin": f"{margin:.3g}", "router_margin": f"{lead:.3g}"},
        )
        tokens = golden["golden/tokens"]
        table.add_row(
            name,
            f"{path.stat().st_size / 1000:.0f}",
            f"{sum(w.size for w in weights.values()):,}",
            f"{len(set(tokens.tolist()))} of {len(tokens)}",
            f"{margin:.3g}",
            f"{lead:.2g}",
            " ".join(map(str, tokens[:8])) + " …",
        )
    Console(width=140).print(table)


if __name__ == "__main__":
    main()
