"""Targets and drafters to run an engine on: small, deterministic, and quick to show a fault of what is around them."""

import math

import numpy as np

from ddtree import reference
from ddtree.drafters import NgramDrafter, NoiseLaw, OracleDrafter
from ddtree.protocols import TargetOutput

VOCABULARY = 11
LAYERS, HIDDEN, HEADS, LATENT, ROPE = 2, 12, 2, 6, 4


class AttentionTarget:
    """Two layers of random attention over the paged cache, in float64.

    A node's logits depend on every token before it and on its position, so a wrong mask, position, page or cache row
    changes them. The cache begins as NaN; the logits of unused slots choose token 0.
    """

    vocab_size = VOCABULARY

    def __init__(self, seed=0):
        rng = np.random.default_rng(seed)
        self.embedding = rng.normal(size=(VOCABULARY, HIDDEN))
        self.query = rng.normal(size=(LAYERS, HIDDEN, HEADS, LATENT + ROPE))
        self.row = rng.normal(size=(LAYERS, HIDDEN, LATENT + ROPE))
        self.value = rng.normal(size=(LAYERS, HEADS, LATENT, HIDDEN))
        self.frequencies = rng.normal(size=HIDDEN)

    def new_cache(self, num_pages, page_size):
        return np.full((LAYERS, num_pages, page_size, LATENT + ROPE), np.nan)

    def embed(self, token_ids, positions):
        return self.embedding[token_ids] + np.sin(np.multiply.outer(positions, self.frequencies))

    def forward(self, tree, cache, *, hidden_layers=(), last_only=False):
        B, N = tree.token_ids.shape
        page_size = cache.data.shape[2]
        used = np.arange(N) < tree.node_counts[:, None]
        positions = reference.tree_positions(tree.depths, cache.prefix_lens)
        states = [self.embed(np.maximum(tree.token_ids, 0), positions)]
        for layer in range(LAYERS):
            rows = states[-1] @ self.row[layer]
            for b, i in np.argwhere(used):
                at = int(cache.prefix_lens[b]) + i
                cache.data[layer, cache.page_table[b, at // page_size], at % page_size] = rows[b, i]
            q = np.einsum("bnd,dhc->bnhc", states[-1], self.query[layer])
            mixed = reference.verify_attention(
                q, cache.data[layer], cache.page_table, cache.prefix_lens, tree, scale=0.5, kv_lora_rank=LATENT
            )
            states.append(np.tanh(states[-1] + np.einsum("bnhc,hcd->bnd", mixed, self.value[layer])))
        logits = np.where(used[:, :, None], states[-1] @ self.embedding.T, 0.0)
        if last_only:
            logits = logits[np.arange(B), tree.node_counts - 1][:, None]
        return TargetOutput(logits, {layer: states[layer] for layer in hidden_layers})


class WithoutCompaction:
    """A backend at fault: the accepted rows stay where the tree had them."""

    build_tree = staticmethod(reference.build_tree)
    tree_positions = staticmethod(reference.tree_positions)
    choose_tokens = staticmethod(reference.choose_tokens)
    accept_tree = staticmethod(reference.accept_tree)

    @staticmethod
    def compact_cache(kv_cache, page_table, prefix_lens, acceptance):
        """Do nothing."""


class RandomDrafter:
    """Any draft that the contract allows: ties, few candidates, depths ended by −inf with nonsense, NaN too, behind it.

    Random, but of (seed, request, tokens committed) alone.
    """

    def __init__(self, seed=0, vocab_size=VOCABULARY):
        self.seed, self.vocab_size = seed, vocab_size

    def __call__(self, context, depth, topk):
        k = 1 + self.seed % topk
        log_probs = np.empty((len(context.request_ids), depth, k), np.float32)
        token_ids = np.empty(log_probs.shape, np.int64)
        for b, (request, tokens) in enumerate(zip(context.request_ids, context.tokens, strict=True)):
            rng = np.random.default_rng([self.seed, request, len(tokens)])
            falls = rng.integers(1, 12, (depth, k)) / 8
            log_probs[b] = np.sort(-falls)[:, ::-1]
            token_ids[b] = np.array([rng.permutation(self.vocab_size)[:k] for _ in range(depth)])
            for d in range(depth):
                end = rng.integers(0, 2 * k)
                log_probs[b, d, end : end + 1] = -np.inf
                log_probs[b, d, end + 1 : end + 2] = rng.choice([-np.inf, np.nan, 0.0])
                token_ids[b, d, end:] = rng.choice([-1, self.vocab_size + 5])
        return log_probs, token_ids


def hostile_drafter(continuations):
    """Drafts any token but the target's choice: nothing of it is ever accepted."""
    return OracleDrafter(continuations, VOCABULARY, noise=NoiseLaw([[0.0]]))


def repeating_drafter(context, depth, topk):
    """The same tokens at each depth with the same probability: many nodes of one score and one token."""
    shape = (len(context.request_ids), depth, topk)
    tokens = np.broadcast_to(np.arange(topk, dtype=np.int32), shape)
    return np.full(shape, -math.log(VOCABULARY), np.float32), np.ascontiguousarray(tokens)


DRAFTERS = {
    # each makes a drafter from the tokens that the target will choose, and a seed
    "random": lambda continuations, seed: RandomDrafter(seed),
    "hostile": lambda continuations, seed: hostile_drafter(continuations),
    "repeating": lambda continuations, seed: repeating_drafter,
    "oracle": lambda continuations, seed: OracleDrafter(continuations, VOCABULARY),
    "oracle with noise": lambda continuations, seed: OracleDrafter(
        continuations, VOCABULARY, noise=NoiseLaw([[0.6, 0.3], [0.3, 0.3, 0.2]]), seed=seed
    ),
    "oracle cut short": lambda continuations, seed: OracleDrafter(
        [c[: 1 + seed % max(len(c), 1)] for c in continuations], VOCABULARY, past_end=seed % VOCABULARY
    ),
    "n-gram": lambda continuations, seed: NgramDrafter(max_ngram=1 + seed % 3),
}
