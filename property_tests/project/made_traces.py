"""Traces and rounds whose statistics are known, for the tests of analysis."""

from dataclasses import dataclass

import numpy as np

from ddtree import accept_tree, build_tree
from ddtree.analysis.choices import choices_of
from ddtree.analysis.rounds import RoundTable, round_rows
from ddtree.engine import Round
from ddtree.trees import Acceptance, tree_from_parents


@dataclass(frozen=True)
class Chunk:
    """Whole prompts of a trace, as :class:`ddtree.analysis.choices.TraceChunk` names them."""

    token_ids: np.ndarray
    token_offsets: np.ndarray
    prompt_lens: np.ndarray
    log_probs: np.ndarray
    draft_token_ids: np.ndarray
    position_offsets: np.ndarray


def chunk_of(continuations, drafts, prompt=(0,)):
    """A chunk of these continuations, all of one prompt; ``drafts[p]`` are log-probs and ids (n − 1, L, K) of p."""
    sizes = [len(prompt) + len(c) for c in continuations]
    positions = [len(lp) for lp, _ in drafts]
    return Chunk(
        token_ids=np.concatenate([np.r_[prompt, c] for c in continuations]).astype(np.int32),
        token_offsets=np.cumsum([0, *sizes]),
        prompt_lens=np.full(len(continuations), len(prompt), np.int32),
        log_probs=np.concatenate([lp for lp, _ in drafts]).astype(np.float32),
        draft_token_ids=np.concatenate([ids for _, ids in drafts]).astype(np.int32),
        position_offsets=np.cumsum([0, *positions]),
    )


def calibrated_chunk(seed, *, prompts, new, L, K, vocab_size, temperature=1.0, sharpness=1.5, falling=0.0, wobble=0.0):
    """A chunk whose tokens are drawn from the drafter's own distributions to the power 1 / ``temperature``.

    Every token has one distribution over the vocabulary, the same from whichever position and at whichever depth it is
    drafted; with ``falling`` it is flatter the deeper, of logits times ``exp(−falling · (depth − 1))``, while tokens
    are drawn as at depth 1. What is taken to the power are the K likeliest and the remainder, of which any member comes
    as often. Of prompt p the temperature is ``temperature · exp(wobble · z_p)`` with z_p normal: prompts differ.
    """
    rng = np.random.default_rng(seed)
    continuations, drafts = [], []
    for _ in range(prompts):
        logits = sharpness * rng.normal(size=(new + L, vocab_size))
        ids = np.argsort(-logits, axis=1, kind="stable")
        steps = [_kept(logits * np.exp(-falling * d), ids, K) for d in range(L)]
        scores = steps[0] / (temperature * np.exp(wobble * rng.normal()))
        outcome = (scores + rng.gumbel(size=scores.shape)).argmax(1)
        outcome += np.where(outcome == K, rng.integers(0, max(vocab_size - K, 1), len(outcome)), 0)
        of = np.arange(1, L + 1) + np.arange(new - 1)[:, None]  # the token that slot d of position i drafts
        drafts.append((np.stack(steps)[np.arange(L), of][..., :K], ids[:, :K][of]))
        continuations.append(np.take_along_axis(ids, outcome[:, None], 1)[:new, 0])
    return chunk_of(continuations, drafts)


def tempered_chunk(seed, *, new, K, vocab_size, temperature, sharpness=2.5):
    """A chunk of depth 1 whose tokens are drawn from all of the drafter's vocabulary, its logits / ``temperature``."""
    rng = np.random.default_rng(seed)
    logits = sharpness * rng.normal(size=(new, vocab_size))
    tokens = (logits / temperature + rng.gumbel(size=logits.shape)).argmax(1)
    ids = np.argsort(-logits, axis=1, kind="stable")
    log_probs = _kept(logits, ids, K)[:, None, :K]
    return chunk_of([tokens], [(log_probs[1:], ids[1:, None, :K])])


def _kept(logits, ids, K):
    """Log-probs of the K likeliest and of the remainder, (n, K + 1)."""
    log_p = logits - np.log(np.exp(logits).sum(1, keepdims=True))
    kept = np.take_along_axis(log_p, ids, 1)[:, :K]
    rest = np.log(1 - np.exp(kept).sum(1)) if logits.shape[1] > K else np.full(len(ids), -np.inf)
    return np.concatenate([kept, rest[:, None]], axis=1)


def random_chunk(seed, *, prompts=5, longest=30, L=4, K=5, vocab_size=6, prompt=(0, 0)):
    """A chunk of unequal continuations, rows that end early (−inf, NaN), rows without a draft, and ties."""
    rng = np.random.default_rng(seed)
    continuations, drafts = [], []
    for _ in range(prompts):
        new = int(rng.integers(0, longest))
        M = max(new - 1, 0)
        p = rng.dirichlet(np.full(K + 1, 0.6), size=(M, L))[..., :K]
        p = 0.9 * np.round(-np.sort(-p) * 16) / 16 + np.where(rng.random((M, L, K)) < 0.8, 1e-3, 0) + 1e-9
        log_probs = -np.sort(-np.log(p))
        log_probs[rng.random((M, L, K)) < 0.03] = -np.inf
        log_probs[rng.random((M, L, K)) < 0.02] = np.nan
        ids = rng.permuted(np.broadcast_to(np.arange(vocab_size), (M, L, vocab_size)), axis=2)
        tokens = rng.integers(0, vocab_size, new)
        for i, d in zip(*np.nonzero(rng.random((M, L)) < 0.6), strict=True):
            if i + 1 + d < new:  # the choice goes to the front
                row = ids[i, d].tolist()
                row.remove(tokens[i + 1 + d])
                ids[i, d] = [tokens[i + 1 + d], *row]
        continuations.append(tokens)
        drafts.append((log_probs, ids[..., :K]))
    return chunk_of(continuations, drafts, prompt)


def replayed(chunk, *, budget=None, chain=None, least=0.0):
    """The rounds of a chunk under trees of a budget, or chains of a depth, without nodes below a probability."""
    chosen = choices_of(chunk)
    M, L, _ = chosen.log_probs.shape
    log_probs = chosen.log_probs if budget else chosen.log_probs[:, :chain, :1]
    ids = chosen.token_ids if budget else chosen.token_ids[:, :chain, :1]
    log_probs = np.ascontiguousarray(np.where(log_probs >= np.log(max(least, 1e-300)), log_probs, -np.inf))
    tree = build_tree(log_probs, np.ascontiguousarray(ids), chosen.root_token_ids, budget=budget or chain)
    padded = np.concatenate([chosen.choices, np.full((M, 1), -1)], axis=1)
    said = np.take_along_axis(padded, np.clip(tree.depths, 0, L), axis=1).astype(np.int32)
    kept = accept_tree(tree, said, remaining=chosen.remaining.astype(np.int32))
    index = np.arange(M) - chunk.position_offsets[chosen.prompt]
    rows = round_rows(
        tree, kept, prompt=chosen.prompt, position=index, prefix_len=index + chunk.prompt_lens[chosen.prompt]
    )
    begins = np.zeros(M, np.bool_)
    for p in range(len(chunk.prompt_lens)):
        at = chunk.position_offsets[p]
        while at < chunk.position_offsets[p + 1]:
            begins[at] = True
            at += rows.tokens[at]
    return rows.take(begins)


def a_round(parents, paths, finished, request_ids=None, counts=None):
    """A Round of trees with these parents whose kept paths are these."""
    tree = tree_from_parents(np.zeros_like(parents), np.asarray(parents), counts)
    nodes = np.full((len(paths), tree.max_depth + 1), -1, np.int32)
    for row, path in zip(nodes, paths, strict=True):
        row[: len(path)] = path
    lengths = np.array([len(path) for path in paths], np.int32)
    acceptance = Acceptance(nodes, lengths, np.zeros_like(lengths), np.array(finished))
    ids = tuple(range(len(paths))) if request_ids is None else request_ids
    return Round(ids, tree, np.zeros(tree.parents.shape, np.int32), acceptance)


def rounds_of(prompt, tokens, *, nodes=7, L=7, prefix_len=None):
    """A RoundTable of these emitted tokens by prompt; nothing is known of nodes and ranks but their number."""
    prompt, tokens = np.asarray(prompt, np.int64), np.asarray(tokens, np.int64)
    R = len(tokens)
    kept = np.arange(L) < tokens[:, None] - 1
    return RoundTable(
        prompt=prompt,
        position=np.zeros(R, np.int64),
        prefix_len=np.full(R, -1) if prefix_len is None else np.asarray(prefix_len, np.int64),
        tokens=tokens,
        finished=np.zeros(R, np.bool_),
        num_nodes=np.broadcast_to(np.asarray(nodes, np.int64), R).copy(),
        tested=np.minimum(tokens, L),
        expected=tokens + 0.5,
        used_last_rank=np.zeros(R, np.bool_),
        node_indices=np.where(kept, np.arange(1, L + 1), -1).astype(np.int32),
        ranks=np.where(kept, 0, -1).astype(np.int32),
        log_probs=np.where(kept, -0.5, np.nan),
    )
