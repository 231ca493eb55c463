"""Small random models of transformers' own classes, in float64: for :mod:`.test_huggingface`."""

import functools
from typing import Any

import torch
import transformers

from ddtree.property_tests.targets import VOCABULARY

torch.set_num_threads(1)  # such small products take longer on several threads, which wait for each other

WINDOW = 5
"""Positions that a sliding-window layer sees: less than any sequence here has."""

_COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "num_hidden_layers": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.4,  # so that tokens depend on what came before
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
    "tie_word_embeddings": False,
}
_ALTERNATING = {"layer_types": ["sliding_attention", "full_attention"] * 2, "num_hidden_layers": 4}
_DEEPSEEK = {
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 8,
    "n_routed_experts": 4,
    "n_group": 2,
    "topk_group": 1,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "q_lora_rank": 8,
    "kv_lora_rank": 6,
    "qk_nope_head_dim": 4,
    "qk_rope_head_dim": 2,
    "head_dim": 2,
    "v_head_dim": 4,
    "num_key_value_heads": 4,
}
_GPT2 = {"n_embd": 16, "n_layer": 2, "n_head": 4, "max_position_embeddings": 64}

MODELS: dict[str, tuple[str, str, dict[str, Any], str]] = {
    # class of the model, of its configuration, what it adds, and how it attends
    "llama": ("LlamaForCausalLM", "LlamaConfig", {}, "sdpa"),
    "qwen3": ("Qwen3ForCausalLM", "Qwen3Config", {}, "eager"),
    "gemma2": ("Gemma2ForCausalLM", "Gemma2Config", {"sliding_window": WINDOW, **_ALTERNATING}, "eager"),
    "gemma3": ("Gemma3ForCausalLM", "Gemma3TextConfig", {"sliding_window": WINDOW, **_ALTERNATING}, "sdpa"),
    "mistral": ("MistralForCausalLM", "MistralConfig", {"sliding_window": WINDOW}, "sdpa"),
    "mixtral": ("MixtralForCausalLM", "MixtralConfig", {"num_local_experts": 4, "num_experts_per_tok": 2}, "sdpa"),
    "deepseek_v3": ("DeepseekV3ForCausalLM", "DeepseekV3Config", _DEEPSEEK, "sdpa"),
    "gpt2": ("GPT2LMHeadModel", "GPT2Config", _GPT2, "sdpa"),
}


def new_model(name, *, dtype=torch.float64, seed=0, **changes):
    """A model of its own, in evaluation mode."""
    model_class, config_class, options, attention = MODELS[name]
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        config = getattr(transformers, config_class)(**_COMMON | options | changes)
        model = getattr(transformers, model_class)(config).eval().to(dtype)
    model.set_attn_implementation(attention)
    if name in ("mixtral", "deepseek_v3"):
        model.set_experts_implementation("eager")  # the others have no float64
    return model


@functools.cache
def model_of(name):
    """The model of that name; shared, and not to be changed."""
    return new_model(name)


def greedy(model, prompt, count):
    """The tokens that transformers itself continues a prompt with."""
    ids = torch.tensor([prompt])
    whole = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=False)
    return whole[0, len(prompt) :].numpy()
