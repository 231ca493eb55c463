"""The target and the drafter in torch, as they are trained.

The target's tensors have the names of transformers' ``DeepseekV3ForCausalLM`` (its fused experts), so that its weights
load there as they are; the drafter's have those of :meth:`ddtree.drafters.BlockConfig.tensor_shapes`. Both are what
``ddtree.model`` and ``ddtree.drafters.block`` compute in NumPy, written for training: keys and values in full, not
absorbed, and experts computed densely, which at this size is faster than gathering.

Letters: B sequences, S positions, D hidden size, H heads, E experts, R blocks (one a root) of a sequence, T block size.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - its common name
from torch import Tensor, nn

from ddtree.drafters import BlockConfig
from ddtree.model import ModelConfig

__all__ = ["DRAFTER", "TARGET", "Drafter", "Target"]

TARGET = ModelConfig(
    vocab_size=2048,
    hidden_size=256,
    intermediate_size=512,
    moe_intermediate_size=48,
    num_hidden_layers=5,
    num_attention_heads=4,
    q_lora_rank=128,
    kv_lora_rank=96,
    qk_nope_head_dim=32,
    qk_rope_head_dim=32,
    v_head_dim=64,
    n_routed_experts=16,
    num_experts_per_tok=4,
    n_shared_experts=1,
    first_k_dense_replace=1,
    n_group=4,
    topk_group=2,
    routed_scaling_factor=1.5,
    max_position_embeddings=1024,
    num_nextn_predict_layers=0,
    eos_token_ids=(0,),
)
DRAFTER = BlockConfig(
    hidden_size=256,
    num_hidden_layers=3,
    num_attention_heads=4,
    head_dim=64,
    intermediate_size=768,
    block_size=8,
    target_layers=(1, 3, 4),
    context_window=248,  # continuations of 256 tokens, of which a block needs 8
)

_INITIAL_STD = 0.035
_EMBEDDING_STD = 0.02


class RMSNorm(nn.Module):
    def __init__(self, width: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return (self.weight * wide).to(x.dtype)


class SwiGLU(nn.Module):
    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(width, inner, bias=False)
        self.up_proj = nn.Linear(width, inner, bias=False)
        self.down_proj = nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Router(nn.Module):
    """Weights of all experts, 0 for those not chosen, and who was chosen; the bias is not learned by gradients."""

    def __init__(self, c: ModelConfig) -> None:
        super().__init__()
        self.c = c
        self.weight = nn.Parameter(torch.empty(c.n_routed_experts, c.hidden_size))
        self.register_buffer("e_score_correction_bias", torch.zeros(c.n_routed_experts))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        c = self.c
        with torch.autocast(x.device.type, enabled=False):
            scores = F.linear(x.float(), self.weight.float()).sigmoid()
            with torch.no_grad():
                groups = (scores + self.e_score_correction_bias).unflatten(-1, (c.n_group, -1))
                group_scores = (groups * largest(groups, 2)).sum(-1)
                allowed = largest(group_scores, c.topk_group)
                chosen = largest(groups.masked_fill(~allowed[..., None], -math.inf).flatten(-2), c.num_experts_per_tok)
            weights = scores * chosen
            if c.norm_topk_prob:
                weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
            return weights * c.routed_scaling_factor, chosen


class Experts(nn.Module):
    """All experts on all tokens in two products, the weight (0 where not chosen) multiplied in between."""

    def __init__(self, c: ModelConfig) -> None:
        super().__init__()
        self.inner = c.moe_intermediate_size
        self.gate_up_proj = nn.Parameter(torch.empty(c.n_routed_experts, 2 * self.inner, c.hidden_size))
        self.down_proj = nn.Parameter(torch.empty(c.n_routed_experts, c.hidden_size, self.inner))

    def forward(self, x: Tensor, weights: Tensor) -> Tensor:
        both = F.linear(x, self.gate_up_proj.flatten(0, 1)).unflatten(-1, (-1, 2 * self.inner))
        gate, up = both.chunk(2, -1)
        inner = F.silu(gate) * up * weights[..., None].to(up.dtype)
        return F.linear(inner.flatten(-2), self.down_proj.permute(1, 0, 2).flatten(1, 2))


class MoE(nn.Module):
    def __init__(self, c: ModelConfig) -> None:
        super().__init__()
        self.gate = Router(c)
        self.experts = Experts(c)
        self.shared_experts = SwiGLU(c.hidden_size, c.moe_intermediate_size * c.n_shared_experts)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        weights, chosen = self.gate(x)
        return self.experts(x, weights) + self.shared_experts(x), chosen


class LatentAttention(nn.Module):
    def __init__(self, c: ModelConfig) -> None:
        super().__init__()
        if c.q_lora_rank is None or not c.rope_interleave or c.yarn is not None:
            raise ValueError("only targets with a compressed query, interleaved pairs and no YaRN are trained here")
        self.c, heads = c, c.num_attention_heads
        self.q_a_proj = nn.Linear(c.hidden_size, c.q_lora_rank, bias=False)
        self.q_a_layernorm = RMSNorm(c.q_lora_rank)
        self.q_b_proj = nn.Linear(c.q_lora_rank, heads * c.qk_head_dim, bias=False)
        self.kv_a_proj_with_mqa = nn.Linear(c.hidden_size, c.cache_width, bias=False)
        self.kv_a_layernorm = RMSNorm(c.kv_lora_rank)
        self.kv_b_proj = nn.Linear(c.kv_lora_rank, heads * (c.qk_nope_head_dim + c.v_head_dim), bias=False)
        self.o_proj = nn.Linear(heads * c.v_head_dim, c.hidden_size, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, cache: tuple[Tensor, Tensor] | None, start: int) -> Tensor:
        c, heads = self.c, (x.shape[0], x.shape[1], self.c.num_attention_heads, -1)
        q = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x))).view(heads).transpose(1, 2)
        q_plain, q_rotary = q.split([c.qk_nope_head_dim, c.qk_rope_head_dim], -1)
        latent, k_rotary = self.kv_a_proj_with_mqa(x).split([c.kv_lora_rank, c.qk_rope_head_dim], -1)
        kv = self.kv_b_proj(self.kv_a_layernorm(latent)).view(heads).transpose(1, 2)
        k_plain, v = kv.split([c.qk_nope_head_dim, c.v_head_dim], -1)
        k_rotary = rotate_pairs(k_rotary[:, None], cos, sin).expand(-1, c.num_attention_heads, -1, -1)
        q = torch.cat([q_plain, rotate_pairs(q_rotary, cos, sin)], -1)
        k = torch.cat([k_plain, k_rotary], -1)
        if cache is not None:
            keys, values = cache
            end = start + x.shape[1]
            keys[:, :, start:end], values[:, :, start:end] = k, v
            q, k, v = q.to(keys.dtype), keys[:, :, :end], values[:, :, :end]
        out = F.scaled_dot_product_attention(q, k, v, is_causal=start == 0)
        return self.o_proj(out.transpose(1, 2).flatten(2))


class TargetLayer(nn.Module):
    def __init__(self, c: ModelConfig, index: int) -> None:
        super().__init__()
        self.self_attn = LatentAttention(c)
        self.mlp = MoE(c) if c.is_moe(index) else SwiGLU(c.hidden_size, c.intermediate_size)
        self.input_layernorm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(c.hidden_size, c.rms_norm_eps)

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, cache: tuple[Tensor, Tensor] | None, start: int
    ) -> tuple[Tensor, Tensor | None]:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin, cache, start)
        out = self.mlp(self.post_attention_layernorm(x))
        inner, chosen = out if isinstance(out, tuple) else (out, None)
        return x + inner, chosen


class Target(nn.Module):
    """DeepSeek-V3 with multi-head latent attention and a mixture of experts (arXiv 2412.19437)."""

    def __init__(self, c: ModelConfig = TARGET) -> None:
        super().__init__()
        self.c = c
        self.model = nn.Module()
        self.model.embed_tokens = nn.Embedding(c.vocab_size, c.hidden_size)
        self.model.layers = nn.ModuleList([TargetLayer(c, i) for i in range(c.num_hidden_layers)])
        self.model.norm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.lm_head = nn.Linear(c.hidden_size, c.vocab_size, bias=False)
        initialise(self, c.num_hidden_layers)

    def run(
        self, ids: Tensor, caches: list[tuple[Tensor, Tensor]] | None = None, start: int = 0
    ) -> tuple[Tensor, list[Tensor], list[Tensor]]:
        """Normed last hidden states of (B, S) ids, the embedding and each layer's output, and each router's choice."""
        positions = torch.arange(start, start + ids.shape[1], device=ids.device)
        cos, sin = cos_sin(positions, self.c.qk_rope_head_dim, self.c.rope_theta)
        hidden, chosen = [self.model.embed_tokens(ids)], []
        for i, layer in enumerate(self.model.layers):
            x, who = layer(hidden[-1], cos, sin, None if caches is None else caches[i], start)
            hidden.append(x)
            if who is not None:
                chosen.append(who)
        return self.model.norm(hidden[-1]), hidden, chosen

    def forward(self, ids: Tensor) -> Tensor:
        """Logits (B, S, V) after each of (B, S) ids."""
        return self.lm_head(self.run(ids)[0])

    def loss(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Mean nats a token of (B, S + 1) ids, and how many tokens chose each expert of each router."""
        hidden, _, chosen = self.run(ids[:, :-1])
        loss = F.cross_entropy(self.lm_head(hidden).float().flatten(0, 1), ids[:, 1:].flatten())
        return loss, torch.stack([who.flatten(0, -2).sum(0) for who in chosen]).float()

    def features(self, ids: Tensor, layers: tuple[int, ...]) -> Tensor:
        """Hidden states of ``layers`` side by side: (B, S, len(layers) · D)."""
        hidden = self.run(ids)[1]
        return torch.cat([hidden[layer] for layer in layers], -1)

    @torch.no_grad()
    def generate(
        self, prompts: Tensor, length: int, *, temperature: float = 0.0, generator: torch.Generator | None = None
    ) -> Tensor:
        """Continue (B, P) prompts of one length to (B, length): greedily, or sampled at ``temperature``."""
        B, P = prompts.shape
        ids = torch.empty(B, length, dtype=torch.long, device=prompts.device)
        ids[:, :P] = prompts
        dtype = torch.get_autocast_dtype(ids.device.type) if torch.is_autocast_enabled(ids.device.type) else None
        caches = self.new_caches(B, length, dtype or torch.float32, ids.device)
        pieces = range(0, B, 1024)  # a prefill in pieces, which bounds its memory
        last = torch.cat(
            [
                self.run(prompts[i : i + 1024], [(k[i : i + 1024], v[i : i + 1024]) for k, v in caches])[0][:, -1]
                for i in pieces
            ]
        )
        for position in range(P, length):
            logits = self.lm_head(last).float()
            if temperature == 0:
                ids[:, position] = logits.argmax(-1)
            else:  # of exponential times at these rates, the first is that of a token drawn by the softmax
                times = torch.empty_like(logits).exponential_(generator=generator)
                ids[:, position] = (F.softmax(logits / temperature, -1) / times).argmax(-1)
            if position + 1 < length:
                last = self.run(ids[:, position : position + 1], caches, position)[0][:, 0]
        return ids

    def new_caches(self, B: int, length: int, dtype: torch.dtype, device: torch.device) -> list[tuple[Tensor, Tensor]]:
        """Room for the keys and values of every layer."""
        c = self.c
        return [
            (
                torch.empty(B, c.num_attention_heads, length, c.qk_head_dim, dtype=dtype, device=device),
                torch.empty(B, c.num_attention_heads, length, c.v_head_dim, dtype=dtype, device=device),
            )
            for _ in range(c.num_hidden_layers)
        ]


class BlockAttention(nn.Module):
    def __init__(self, c: BlockConfig) -> None:
        super().__init__()
        self.c, width = c, c.num_attention_heads * c.head_dim
        self.q_proj = nn.Linear(c.hidden_size, width, bias=False)
        self.k_proj = nn.Linear(c.hidden_size, width, bias=False)
        self.v_proj = nn.Linear(c.hidden_size, width, bias=False)
        self.o_proj = nn.Linear(width, c.hidden_size, bias=False)
        self.q_norm = RMSNorm(c.head_dim, c.rms_norm_eps)
        self.k_norm = RMSNorm(c.head_dim, c.rms_norm_eps)

    def forward(
        self,
        x: Tensor,  # (B, R, T, D), blocks
        context: Tensor,  # (B, S, D)
        visible: Tensor,  # (B, R, S), the context's positions before a block's root
        block_turns: tuple[Tensor, Tensor],
        context_turns: tuple[Tensor, Tensor],
    ) -> Tensor:
        B, R, T, _ = x.shape
        S, H, E = context.shape[1], self.c.num_attention_heads, self.c.head_dim

        def blocks(y: Tensor) -> Tensor:
            return y.view(B, R, T, H, E).permute(0, 3, 1, 2, 4)  # (B, H, R, T, E)

        block_cos, block_sin = (turn[:, None] for turn in block_turns)
        q = rotate_halves(blocks(self.q_norm(self.q_proj(x).view(B, R, T, H, E)).flatten(3)), block_cos, block_sin)
        k = rotate_halves(blocks(self.k_norm(self.k_proj(x).view(B, R, T, H, E)).flatten(3)), block_cos, block_sin)
        v = blocks(self.v_proj(x))
        context_k = self.k_norm(self.k_proj(context).view(B, S, H, E)).transpose(1, 2)
        context_k = rotate_halves(context_k, *context_turns)
        context_v = self.v_proj(context).view(B, S, H, E).transpose(1, 2)
        q, k, context_k = q.to(v.dtype), k.to(v.dtype), context_k.to(v.dtype)

        context_scores = (q.flatten(2, 3) @ context_k.transpose(-1, -2)).view(B, H, R, T, S).float()
        context_scores = context_scores.masked_fill(~visible[:, None, :, None], -math.inf)
        scores = torch.cat([context_scores, (q @ k.transpose(-1, -2)).float()], -1) * E**-0.5
        context_shares, shares = F.softmax(scores, -1).to(v.dtype).split([S, T], -1)
        out = (context_shares.flatten(2, 3) @ context_v).view(B, H, R, T, E) + shares @ v
        return self.o_proj(out.permute(0, 2, 3, 1, 4).flatten(3))


class DrafterLayer(nn.Module):
    def __init__(self, c: BlockConfig) -> None:
        super().__init__()
        self.self_attn = BlockAttention(c)
        self.mlp = SwiGLU(c.hidden_size, c.intermediate_size)
        self.input_layernorm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(c.hidden_size, c.rms_norm_eps)

    def forward(self, x: Tensor, *where: Any) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), *where)
        return x + self.mlp(self.post_attention_layernorm(x))


class Drafter(nn.Module):
    """A block-diffusion drafter as in DFlash (arXiv 2602.06036), on many blocks of a sequence at once."""

    def __init__(self, c: BlockConfig = DRAFTER) -> None:
        super().__init__()
        self.c = c
        self.fc = nn.Linear(len(c.target_layers) * c.hidden_size, c.hidden_size, bias=False)
        self.hidden_norm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.layers = nn.ModuleList([DrafterLayer(c) for _ in range(c.num_hidden_layers)])
        self.norm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.mask_embedding = nn.Parameter(torch.empty(c.hidden_size))
        initialise(self, c.num_hidden_layers)

    def forward(self, features: Tensor, root_embeddings: Tensor, roots: Tensor) -> Tensor:
        """Normed hidden states (B, R, T − 1, D) of the masks of each block.

        ``features`` (B, S, F) are the target's, ``roots`` (B, R) the positions of the blocks' root tokens, whose
        embeddings are ``root_embeddings`` (B, R, D). A block sees the context before its root.
        """
        c = self.c
        B, R = roots.shape
        context = self.hidden_norm(self.fc(features))
        masks = self.mask_embedding.expand(B, R, c.block_size - 1, -1)
        x = torch.cat([root_embeddings[:, :, None].float(), masks], 2)
        positions = torch.arange(features.shape[1], device=roots.device)
        offsets = torch.arange(c.block_size, device=roots.device)
        block_turns = cos_sin(roots[..., None] + offsets, c.head_dim, c.rope_theta)
        context_turns = cos_sin(positions, c.head_dim, c.rope_theta)
        visible = positions < roots[..., None]
        if c.context_window is not None:
            visible &= positions >= roots[..., None] - c.context_window
        for layer in self.layers:
            x = layer(x, context, visible, block_turns, context_turns)
        return self.norm(x[:, :, 1:])


def initialise(model: nn.Module, num_layers: int) -> None:
    """Normal weights, smaller where they add to the residual stream; norms stay ones."""
    for name, parameter in model.named_parameters():
        if "norm" in name:
            continue
        std = _EMBEDDING_STD if "embed" in name else _INITIAL_STD
        if name.endswith("o_proj.weight") or "down_proj" in name:
            std /= math.sqrt(2 * num_layers)
        nn.init.normal_(parameter, 0, std)


def largest(scores: Tensor, k: int) -> Tensor:
    """Where the k largest of the last axis are, of equals the first: by counting, which a compiler fuses; no sort."""
    order = torch.arange(scores.shape[-1], device=scores.device)
    mine, other = scores[..., :, None], scores[..., None, :]
    before = (other > mine) | ((other == mine) & (order[None, :] < order[:, None]))
    return before.sum(-1) < k


def cos_sin(positions: Tensor, width: int, theta: float) -> tuple[Tensor, Tensor]:
    """Cosines and sines (..., width / 2) of RoPE at (...) positions."""
    steps = torch.arange(0, width, 2, device=positions.device, dtype=torch.float32)
    angles = positions.float()[..., None] / theta ** (steps / width)
    return angles.cos(), angles.sin()


def rotate_pairs(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate neighbouring pairs; the first elements of all pairs come out before all second ones."""
    a, b = x[..., 0::2], x[..., 1::2]
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1).to(x.dtype)


def rotate_halves(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate pairs of which the first half of x holds the first elements."""
    a, b = x.chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1).to(x.dtype)
