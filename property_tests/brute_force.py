"""What the rules say, by trying everything: slow, plain Python that shares no code with the references.

Each function takes one request and small arrays or lists, and follows the rule's words instead of an algorithm.
"""

import itertools
import math
from decimal import Context, Decimal

import numpy as np

EXACT = Context(prec=50)


# Trees


def drafted_widths(log_probs):
    """Candidates before the first NaN or −inf, for each depth."""
    return [
        next((k for k, x in enumerate(row) if math.isnan(x) or x == -math.inf), len(row)) for row in log_probs.tolist()
    ]


def rank_paths(log_probs):
    """Every draftable rank path with its score: the float64 sum in depth order."""
    values, widths = log_probs.tolist(), drafted_widths(log_probs)
    for depth in range(1, len(values) + 1):
        for path in itertools.product(*(range(w) for w in widths[:depth])):
            score = 0.0
            for d, rank in enumerate(path):
                score += values[d][rank]
            yield path, score


def first_paths(log_probs, budget):
    """The first ``budget`` paths: score descending, then lexicographic, a prefix before its extensions."""
    return sorted(rank_paths(log_probs), key=lambda item: (-item[1], item[0]))[:budget]


def tree_fields(log_probs, token_ids, root, budget):
    """Every array of the tree as lists, one request, padded to ``1 + budget``."""
    nodes = [((), 0.0), *first_paths(log_probs, budget)]
    place = {path: i for i, (path, _) in enumerate(nodes)}
    pad, N = [-1] * (1 + budget - len(nodes)), 1 + budget
    tokens = [int(token_ids[len(path) - 1, path[-1]]) if path else int(root) for path, _ in nodes]
    seen = [{place[path[:d]] for d in range(len(path) + 1)} for path, _ in nodes]
    return {
        "token_ids": tokens + pad,
        "parents": [place[path[:-1]] if path else -1 for path, _ in nodes] + pad,
        "depths": [len(path) for path, _ in nodes] + pad,
        "ranks": [path[-1] if path else -1 for path, _ in nodes] + pad,
        "scores": [score for _, score in nodes] + [-math.inf] * len(pad),
        "node_counts": len(nodes),
        "visibility_words": packed(seen + [set()] * len(pad), N),
    }


def paths_of(tree, b=0):
    """Rank paths of a request's nodes without the root, in order of index; every parent must come first."""
    paths = [()]
    for i in range(1, int(tree.node_counts[b])):
        parent = int(tree.parents[b, i])
        assert 0 <= parent < i, f"parents[{b}, {i}] = {parent} is no earlier node"
        paths.append((*paths[parent], int(tree.ranks[b, i])))
    return paths[1:]


def prefix_closed_sets(paths, size):
    """Every set of ``size`` paths that holds each member's prefixes; siblings may be left out."""
    for chosen in itertools.combinations(paths, size):
        if all(path[:-1] in chosen for path in chosen if len(path) > 1):
            yield chosen


def node_path(parents, node):
    """Nodes from the root down to ``node``, both included."""
    path = [node]
    while path[0] != 0:
        path.insert(0, parents[path[0]])
    return path


def ancestor_sets(parents, count):
    """For each slot, the nodes that it sees: its path; nothing in unused slots."""
    return [set(node_path(parents, i)) if i < count else set() for i in range(len(parents))]


def packed(sets, width):
    """Sets of bit numbers as words of 32, least significant bit first."""
    words = (width + 31) // 32
    numbers = (sum(1 << j for j in members) for members in sets)
    return [[number >> 32 * w & 0xFFFFFFFF for w in range(words)] for number in numbers]


# Acceptance


def accepted(parents, tokens, count, choices, remaining=None, stops=()):
    """``(path, bonus, finished)`` of one request.

    A node is kept iff each step to it is the choice before it, which is no stop token, and the lowest index among its
    siblings of that token; and iff its path fits into ``remaining``. Kept nodes lie on one path.
    """
    if remaining == 0:
        return [], -1, True

    def kept(node):
        path = node_path(parents, node)
        return (remaining is None or len(path) <= remaining) and all(
            tokens[i] == choices[before]
            and choices[before] not in stops
            and not any(parents[j] == before and tokens[j] == tokens[i] for j in range(i))
            for before, i in itertools.pairwise(path)
        )

    path = max((node_path(parents, i) for i in range(count) if kept(i)), key=len)
    bonus = choices[path[-1]]
    return path, bonus, bonus in stops or len(path) == remaining


# Cache


def row_place(page_row, row, page_size):
    """Page and slot of a request's row."""
    return page_row[row // page_size], row % page_size


def compacted(cache, page_table, prefix_lens, node_indices, lengths):
    """A copy of the cache in which each accepted row is where it belongs; bytes, so that NaNs keep their payload."""
    old, S = cache.view(f"V{cache.itemsize}"), cache.shape[2]
    new = old.copy()
    for b, length in enumerate(lengths):
        for k in range(length):
            to = row_place(page_table[b], prefix_lens[b] + k, S)
            of = row_place(page_table[b], prefix_lens[b] + node_indices[b][k], S)
            for layer in range(len(cache)):
                new[layer][to] = old[layer][of]
    return new.view(cache.dtype)


# Attention


def attention(q, keys, mask, scale, kv_lora_rank, *, compute=np.float64, weight_type=None):
    """Softmax attention of q (N, H, C + R) over keys (rows, C + R) under a bool mask (N, rows), as one dense formula.

    ``compute`` is the type of every step; ``weight_type`` what the probabilities are rounded to. Keys that nobody sees
    are set to 0, so that they may hold anything.
    """
    q, keys = q.astype(compute), np.where(mask.any(0)[:, None], keys, 0).astype(compute)
    scores = np.where(mask[:, None], np.einsum("nhc,rc->nhr", q, keys) * compute(scale), -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights = weights / weights.sum(-1, keepdims=True)
    if weight_type is not None:
        weights = weights.astype(weight_type).astype(compute)
    return np.einsum("nhr,rc->nhc", weights, keys[:, :kv_lora_rank])


# Choice


def philox(counter, key):
    """Philox4x32-10 on Python integers."""
    (a, b, c, d), (k, m) = counter, key
    for r in range(10):
        high, low = divmod(0xD2511F53 * a, 1 << 32)
        top, bottom = divmod(0xCD9E8D57 * c, 1 << 32)
        round_key = (k + 0x9E3779B9 * r) % (1 << 32), (m + 0xBB67AE85 * r) % (1 << 32)
        a, b, c, d = top ^ b ^ round_key[0], bottom, high ^ d ^ round_key[1], low
    return a, b, c, d


def nucleus(z, top_p):
    """Tokens before which less than ``top_p`` of the mass lies; masses are whole parts of exp(z) · 2⁴⁰, z ≤ 0."""
    masses = [0 if x == -math.inf else int(Decimal(x).exp(EXACT) * 2**40) for x in z]
    limit, before, kept = Decimal(top_p) * sum(masses), 0, set()
    for token in sorted(range(len(z)), key=lambda v: (-z[v], v)):
        if before < limit:
            kept.add(token)
        before += masses[token]
    return kept


def noise(token, seed, request_id, position):
    """Gumbel noise of a token at a place."""
    low, high = request_id % 2**32, request_id >> 32
    word = philox((token // 4, position, low, high), (seed % 2**32, seed >> 32))[token % 4]
    return -math.log(-math.log((word + 0.5) / 2**32))


def choice(row, *, temperature=0.0, top_p=1.0, seed=0, request_id=0, position=0):
    """The token chosen from a row of logits (a list of float); −1 for an unusable row."""
    if not row or any(math.isnan(x) for x in row) or not math.isfinite(max(row)):
        return -1
    if temperature == 0:
        return row.index(max(row))
    z = [(x - max(row)) / temperature for x in row]
    kept = nucleus(z, top_p) if top_p < 1 else range(len(z))
    return max(kept, key=lambda v: (z[v] + noise(v, seed, request_id, position), -v))
