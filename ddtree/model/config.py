"""The shape of a DeepSeek-V3 model, read from a Hugging Face configuration."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, asdict, dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ddtree.model.layers import rope_frequencies

__all__ = ["ModelConfig", "Yarn"]

_FIXED: dict[str, tuple[Any, ...]] = {
    "model_type": ("deepseek_v3", "kimi_k2"),
    "hidden_act": ("silu",),
    "attention_bias": (False,),
    "scoring_func": ("sigmoid",),
    "topk_method": ("noaux_tc",),
    "moe_layer_freq": (1,),
    "quantization_config": (),
}
"""Settings of which only these values are implemented. A key that is absent or null has the first."""

_LARGEST = 1 << 53
"""Largest number that a setting may be: larger ones are no setting, and overflow in what is computed from them."""

_MOST_TENSORS = 1 << 20
"""Tensors that a configuration may ask for, some 14 times those of the largest published model."""


@dataclass(frozen=True)
class Yarn:
    """YaRN's context extension (arXiv 2309.00071), by the names in ``rope_parameters`` or ``rope_scaling``.

    Attributes
    ----------
    factor : float
        How many times longer the context is than the one trained on; at least 1.
    original_max_position_embeddings : int
        The context trained on.
    beta_fast, beta_slow : float
        Pairs that turn more than ``beta_fast`` times within it are kept, fewer than ``beta_slow`` times slowed.
    mscale, mscale_all_dim : float
        Weights of the temperature on cosines and sines and on the softmax's scale; 0 where the configuration has none.
    attention_factor : float, optional
        Factor of cosines and sines, in place of the one that follows from the two.
    truncate : bool
        Round the bounds of the ramp to whole pairs.
    """

    factor: float
    original_max_position_embeddings: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float = 0.0
    mscale_all_dim: float = 0.0
    attention_factor: float | None = None
    truncate: bool = True

    def __post_init__(self) -> None:
        for name in ("factor", "original_max_position_embeddings"):
            _check_number(name, getattr(self, name), 1)
        for name in ("mscale", "mscale_all_dim"):
            _check_number(name, getattr(self, name), 0)
        for name in ("beta_fast", "beta_slow", "attention_factor"):
            value = getattr(self, name)
            if value is not None or name != "attention_factor":
                _check_number(name, value, 0, above=True)
        if not isinstance(self.truncate, bool):
            raise ValueError(f"truncate must be true or false for yarn, got {self.truncate!r}")

    def temperature(self, mscale: float) -> float:
        """YaRN's temperature at weight ``mscale``."""
        return 1.0 if self.factor <= 1 else 0.1 * mscale * math.log(self.factor) + 1.0


@dataclass(frozen=True)
class ModelConfig:
    """A DeepSeek-V3 configuration: the fields have Hugging Face's names and meaning.

    Make one with :meth:`from_dict`. The forms that this model does not compute are refused there: attention bias,
    other activations, other RoPE types than "default" and "yarn", softmax routing, quantised weights.

    Attributes
    ----------
    first_k_dense_replace : int
        Layers before this one have a dense feed-forward part, from it on a mixture of experts.
    q_lora_rank : int or None
        Width of the compressed query; None where queries come straight from the hidden state.
    n_group, topk_group : int
        Experts form ``n_group`` groups of neighbours, of which a token may use ``topk_group``.
    rope_interleave : bool
        Rotary pairs are neighbours in the checkpoint's weights, not halves.
    yarn : Yarn or None
        Context extension.
    num_nextn_predict_layers : int
        Multi-token prediction layers that may follow the others in a checkpoint. They are not loaded.
    eos_token_ids : tuple of int
        Stop tokens that the configuration names.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    moe_intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    q_lora_rank: int | None
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    n_routed_experts: int
    num_experts_per_tok: int
    n_shared_experts: int = 1
    first_k_dense_replace: int = 3
    n_group: int = 8
    topk_group: int = 4
    norm_topk_prob: bool = True
    routed_scaling_factor: float = 2.5
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    rope_interleave: bool = True
    yarn: Yarn | None = None
    max_position_embeddings: int = 4096
    tie_word_embeddings: bool = False
    num_nextn_predict_layers: int = 1
    eos_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        zero_allowed = ("first_k_dense_replace", "num_nextn_predict_layers")
        for field in fields(self):
            value = getattr(self, field.name)
            if field.type in ("int", "int | None") and not (field.type == "int | None" and value is None):
                least = 0 if field.name in zero_allowed else 1
                _check_number(field.name, value, least, integer=True)
            if field.type == "float":
                _check_number(field.name, value, 1 if field.name == "rope_theta" else 0, above=True)
            if field.type == "bool" and not isinstance(value, bool):
                raise ValueError(f"{field.name} must be true or false, got {value!r}")
        if self.qk_rope_head_dim % 2:
            raise ValueError(f"qk_rope_head_dim must be even, got {self.qk_rope_head_dim}")
        for token in self.eos_token_ids:
            if not isinstance(token, int) or isinstance(token, bool) or not 0 <= token < 1 << 31:
                raise ValueError(f"eos_token_id must be a token id from 0 to 2^31 - 1 or a list of them, got {token!r}")
        # before anything is made for each of them
        n_experts = self.n_routed_experts if self.first_k_dense_replace < self.num_hidden_layers else 0
        n_tensors = (self.num_hidden_layers + self.num_nextn_predict_layers) * (3 * n_experts + 14)
        if n_tensors > _MOST_TENSORS:
            raise ValueError(
                f"num_hidden_layers = {self.num_hidden_layers}, num_nextn_predict_layers = "
                f"{self.num_nextn_predict_layers} and n_routed_experts = {n_experts} must ask for at most "
                f"{_MOST_TENSORS:,} tensors together, got {n_tensors:,}"
            )
        if self.first_k_dense_replace >= self.num_hidden_layers:
            return  # every layer is dense
        if self.n_routed_experts % self.n_group or self.n_routed_experts // self.n_group < 2:
            raise ValueError(
                f"n_group must part n_routed_experts = {self.n_routed_experts} into equal groups of 2 experts or more, "
                f"got {self.n_group}"
            )
        if self.topk_group > self.n_group:
            raise ValueError(f"topk_group must be at most n_group = {self.n_group}, got {self.topk_group}")
        usable = self.n_routed_experts // self.n_group * self.topk_group
        if self.num_experts_per_tok > usable:
            raise ValueError(
                f"num_experts_per_tok must be at most {usable}, the experts in topk_group = {self.topk_group} groups, "
                f"got {self.num_experts_per_tok}"
            )

    @classmethod
    def from_dict(cls, config: Mapping[str, Any]) -> ModelConfig:
        """Read what a ``config.json`` holds.

        Parameters
        ----------
        config : mapping
            Both generations of names are understood: ``rope_parameters``, and ``rope_theta`` with ``rope_scaling``.
            Keys that do not change the forward pass (dropout, initialisation, …) are ignored.

        Raises
        ------
        ValueError
            A key is missing, has a value out of range, or asks for what is not implemented; it is named.
        """
        for key, allowed in _FIXED.items():
            value = config.get(key)
            if value is not None and value not in allowed:
                raise ValueError(_refusal(key, value, allowed))
        heads = config.get("num_key_value_heads")
        if heads is not None and heads != config.get("num_attention_heads"):
            raise ValueError(
                f"num_key_value_heads must equal num_attention_heads = {config.get('num_attention_heads')}: "
                f"latent attention has no grouped heads; got {heads}"
            )
        own = {f.name for f in fields(cls)} - {"rope_theta", "yarn", "eos_token_ids"}
        # null stands for "no compressed query", and for the default anywhere else
        values = {k: v for k, v in config.items() if k in own and (v is not None or k == "q_lora_rank")}
        required = {f.name for f in fields(cls) if f.default is MISSING}
        missing = sorted(required - values.keys())
        if missing:
            raise ValueError(f"the configuration lacks {', '.join(missing)}")
        eos = config.get("eos_token_id")
        return cls(
            **values,
            **_read_rope(config),
            eos_token_ids=() if eos is None else tuple(eos) if isinstance(eos, list | tuple) else (eos,),
        )

    def to_dict(self) -> dict[str, Any]:
        """The configuration as ``config.json`` has it; :meth:`from_dict` reads it back."""
        config = {k: v for k, v in asdict(self).items() if k not in ("rope_theta", "yarn", "eos_token_ids")}
        rope: dict[str, Any] = {"rope_type": "default", "rope_theta": self.rope_theta}
        if self.yarn is not None:
            rope |= {"rope_type": "yarn"} | {k: v for k, v in asdict(self.yarn).items() if v is not None}
        return config | {
            "architectures": ["DeepseekV3ForCausalLM"],
            "model_type": "deepseek_v3",
            "hidden_act": "silu",
            "attention_bias": False,
            "num_key_value_heads": self.num_attention_heads,
            "rope_parameters": rope,
            "eos_token_id": list(self.eos_token_ids) or None,
        }

    def is_moe(self, layer: int) -> bool:
        """Whether ``layer``, counting from 0, has experts."""
        return layer >= self.first_k_dense_replace

    @property
    def qk_head_dim(self) -> int:
        """Width of a head's query before absorption."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def cache_width(self) -> int:
        """C + R: elements of a cache row."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    @property
    def attention_scale(self) -> float:
        """Factor of q · k in the softmax."""
        scale = float(self.qk_head_dim**-0.5)
        if self.yarn is not None and self.yarn.mscale_all_dim:
            scale *= self.yarn.temperature(self.yarn.mscale_all_dim) ** 2
        return scale

    @property
    def attention_factor(self) -> float:
        """Factor of RoPE's cosines and sines."""
        if self.yarn is None:
            return 1.0
        if self.yarn.attention_factor is not None:
            return self.yarn.attention_factor
        if self.yarn.mscale and self.yarn.mscale_all_dim:
            return self.yarn.temperature(self.yarn.mscale) / self.yarn.temperature(self.yarn.mscale_all_dim)
        return self.yarn.temperature(1.0)

    def rope_frequencies(self) -> NDArray[np.float64]:
        """Radians a position of each rotated pair: (R / 2,)."""
        if self.yarn is None:
            return rope_frequencies(self.qk_rope_head_dim, self.rope_theta)
        y = self.yarn
        return rope_frequencies(
            self.qk_rope_head_dim,
            self.rope_theta,
            factor=y.factor,
            original_max_position_embeddings=y.original_max_position_embeddings,
            beta_fast=y.beta_fast,
            beta_slow=y.beta_slow,
            truncate=y.truncate,
        )

    def tensor_shapes(self, *, fused_layers: Iterable[int] = ()) -> dict[str, tuple[int, ...]]:
        """Name and shape of every tensor of a checkpoint.

        Parameters
        ----------
        fused_layers : iterable of int
            Layers whose experts are two 3-D tensors, ``gate_up_proj`` and ``down_proj``, as transformers 5 holds them;
            in the others they are three tensors an expert, as on the hub.

        Returns
        -------
        dict of str to tuple of int
        """
        D, H, C = self.hidden_size, self.num_attention_heads, self.kv_lora_rank
        E, expert_dim = self.n_routed_experts, self.moe_intermediate_size
        fused = set(fused_layers)

        def mlp(prefix: str, inner: int) -> dict[str, tuple[int, ...]]:
            return {
                f"{prefix}.gate_proj.weight": (inner, D),
                f"{prefix}.up_proj.weight": (inner, D),
                f"{prefix}.down_proj.weight": (D, inner),
            }

        shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (self.vocab_size, D)}
        for i in range(self.num_hidden_layers):
            layer, attention = f"model.layers.{i}", f"model.layers.{i}.self_attn"
            shapes[f"{layer}.input_layernorm.weight"] = (D,)
            if self.q_lora_rank is None:
                shapes[f"{attention}.q_proj.weight"] = (H * self.qk_head_dim, D)
            else:
                shapes[f"{attention}.q_a_proj.weight"] = (self.q_lora_rank, D)
                shapes[f"{attention}.q_a_layernorm.weight"] = (self.q_lora_rank,)
                shapes[f"{attention}.q_b_proj.weight"] = (H * self.qk_head_dim, self.q_lora_rank)
            shapes[f"{attention}.kv_a_proj_with_mqa.weight"] = (self.cache_width, D)
            shapes[f"{attention}.kv_a_layernorm.weight"] = (C,)
            shapes[f"{attention}.kv_b_proj.weight"] = (H * (self.qk_nope_head_dim + self.v_head_dim), C)
            shapes[f"{attention}.o_proj.weight"] = (D, H * self.v_head_dim)
            shapes[f"{layer}.post_attention_layernorm.weight"] = (D,)
            if not self.is_moe(i):
                shapes |= mlp(f"{layer}.mlp", self.intermediate_size)
                continue
            shapes[f"{layer}.mlp.gate.weight"] = (E, D)
            shapes[f"{layer}.mlp.gate.e_score_correction_bias"] = (E,)
            shapes |= mlp(f"{layer}.mlp.shared_experts", self.n_shared_experts * expert_dim)
            if i in fused:
                shapes[f"{layer}.mlp.experts.gate_up_proj"] = (E, 2 * expert_dim, D)
                shapes[f"{layer}.mlp.experts.down_proj"] = (E, D, expert_dim)
            else:
                for e in range(E):
                    shapes |= mlp(f"{layer}.mlp.experts.{e}", expert_dim)
        shapes["model.norm.weight"] = (D,)
        if not self.tie_word_embeddings:
            shapes["lm_head.weight"] = (self.vocab_size, D)
        return shapes


def _refusal(key: str, value: Any, allowed: tuple[Any, ...]) -> str:
    if key == "quantization_config":
        method = value.get("quant_method", "unknown") if isinstance(value, Mapping) else value
        return (
            f"quantization_config: weights quantised by {method!r} are not supported; "
            "convert the checkpoint to bfloat16 and remove the key"
        )
    return f"{key} must be {' or '.join(map(repr, allowed))}, got {value!r}: nothing else is implemented"


def _check_number(name: str, value: Any, least: int, *, above: bool = False, integer: bool = False) -> None:
    """Refuse what is not a number from ``least`` (``above``: beyond it) to `_LARGEST`, NaN included."""
    number = isinstance(value, int if integer else int | float) and not isinstance(value, bool)
    if not (number and least <= value <= _LARGEST) or (above and value == least):
        kind = f"{'an integer' if integer else 'a number'} {'above' if above else 'of at least'} {least}"
        raise ValueError(f"{name} must be {kind} and at most 2^53, got {value!r}")


def _first(*values: Any) -> Any:
    """The first that is not None."""
    return next(value for value in values if value is not None)


def _read_rope(config: Mapping[str, Any]) -> dict[str, Any]:
    """``rope_theta`` and ``yarn`` from either generation of names."""
    name, rope = "rope_parameters", {}
    for key in ("rope_parameters", "rope_scaling"):  # the second wins
        value = config.get(key)
        if value is not None and not isinstance(value, Mapping):
            raise ValueError(f"{key} must be null or an object of settings, got {value!r}")
        if value:
            name, rope = key, dict(value)
    theta = _first(rope.get("rope_theta"), config.get("rope_theta"), 10000.0)
    kind = _first(rope.get("rope_type"), rope.get("type"), "default")
    if kind not in ("default", "yarn"):
        raise ValueError(f"rope_type in {name} must be 'default' or 'yarn', got {kind!r}")
    partial = _first(rope.get("partial_rotary_factor"), config.get("partial_rotary_factor"), 1.0)
    if partial != 1.0:
        raise ValueError(f"partial_rotary_factor must be 1, got {partial!r}: qk_rope_head_dim says what is rotated")
    if kind == "default":
        return {"rope_theta": theta, "yarn": None}
    context = _first(config.get("max_position_embeddings"), ModelConfig.max_position_embeddings)
    values = {f.name: rope[f.name] for f in fields(Yarn) if rope.get(f.name) is not None}
    original = values.setdefault("original_max_position_embeddings", context)
    if "factor" not in values:
        _check_number("max_position_embeddings", context, 1, integer=True)
        _check_number("original_max_position_embeddings", original, 1)
        values["factor"] = context / original
    return {"rope_theta": theta, "yarn": Yarn(**values)}
