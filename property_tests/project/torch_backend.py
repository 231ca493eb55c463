"""A backend of torch tensors, as an author might write one who works in torch: for :mod:`.test_foreign_arrays`.

``Whole`` has every operation, those that torch has no words for by way of NumPy; ``Wrong`` has faults to be found.
"""

import heapq

import torch

from ddtree import reference
from ddtree.arrays import export_array, to_numpy
from ddtree.property_tests.cases import map_arrays
from ddtree.trees import Acceptance, DraftTree


def tree_positions(depths, prefix_lens):
    """Depth behind the prefix; of an unused slot, the prefix."""
    return prefix_lens[:, None] + depths.clamp(min=0)


def visibility_words(parents, node_counts):
    """Row by row, a node's row being its parent's and itself."""
    B, N = parents.shape
    sees = torch.zeros((B, N, -(-N // 32) * 32), dtype=torch.int64)
    for i in range(N):
        used = i < node_counts
        if i > 0:
            above = torch.where(used, parents[:, i], 0).long()
            sees[:, i] = torch.where(used[:, None], sees[torch.arange(B), above], 0)
        sees[:, i, i] = used.long()
    bits = torch.arange(32)
    return (sees.view(B, N, -(-N // 32), 32) << bits).sum(-1).to(torch.uint32)


def build_tree(log_probs, token_ids, root_token_ids, *, budget):
    """Best first, with rank paths in the heap."""
    (B, L, K), N = log_probs.shape, 1 + budget
    tokens, parents, depths, ranks = (torch.full((B, N), -1, dtype=torch.int32) for _ in range(4))
    scores = torch.full((B, N), -torch.inf, dtype=torch.float64)
    counts = torch.ones(B, dtype=torch.int32)
    tokens[:, 0], depths[:, 0], scores[:, 0] = root_token_ids, 0, 0.0
    ended = torch.cumsum(~(log_probs > -torch.inf), -1) > 0
    values, widths = log_probs.double().tolist(), (~ended).sum(-1).tolist()
    for b in range(B):
        nodes = [((), 0, 0.0)]  # path, depth, score

        def offer(heap, b, path, parent, depth, above, rank):
            if depth < L and rank < widths[b][depth]:
                score = above + values[b][depth][rank]
                heapq.heappush(heap, (-score, (*path, rank), parent, depth, rank, above))

        heap: list[tuple[float, tuple[int, ...], int, int, int, float]] = []
        offer(heap, b, (), 0, 0, 0.0, 0)
        while heap and len(nodes) <= budget:
            negated, path, parent, depth, rank, above = heapq.heappop(heap)
            i = len(nodes)
            nodes.append((path, depth + 1, -negated))
            tokens[b, i], parents[b, i], depths[b, i] = token_ids[b, depth, rank], parent, depth + 1
            ranks[b, i], scores[b, i] = rank, -negated
            offer(heap, b, path[:-1], parent, depth, above, rank + 1)
            offer(heap, b, path, i, depth + 1, -negated, 0)
        counts[b] = len(nodes)
    return DraftTree(tokens, parents, depths, ranks, scores, counts, visibility_words(parents, counts), L, K)


def accept_tree(tree, target_token_ids, *, remaining=None, stop_token_ids=None):
    """All requests a step at a time, until none goes on."""
    B, L = tree.batch_size, tree.max_depth
    slots, rows = torch.arange(tree.num_slots), torch.arange(B)
    path = torch.full((B, L + 1), -1, dtype=torch.int32)
    lengths = torch.zeros(B, dtype=torch.int32)
    bonus = torch.full((B,), -1, dtype=torch.int32)
    limit = torch.full((B,), L + 2) if remaining is None else remaining
    stops = torch.empty(0, dtype=torch.int32) if stop_token_ids is None else stop_token_ids
    finished = limit == 0
    node, going = torch.zeros(B, dtype=torch.int64), limit > 0
    for step in range(L + 1):
        path[going, step] = node[going].int()
        lengths += going.int()
        choice = target_token_ids[rows, node]
        bonus = torch.where(going, choice, bonus)
        finished = finished | going & (torch.isin(choice, stops) | (lengths == limit))
        fits = (tree.parents == node[:, None]) & (tree.token_ids == choice[:, None]) & (slots > 0)
        fits &= slots < tree.node_counts[:, None]
        going = going & ~finished & fits.any(-1)
        node = torch.where(going, fits.int().argmax(-1), node)
    return Acceptance(path, lengths, bonus, finished)


def verify_attention(q, kv_cache, page_table, prefix_lens, tree, *, scale, kv_lora_rank, out=None):
    """Softmax over the prefix and the visible nodes, in float32 or in float64."""
    B, N, H, _ = q.shape
    S, compute = kv_cache.shape[1], torch.promote_types(q.dtype, torch.float32)
    out = q.new_empty((B, N, H, kv_lora_rank)) if out is None else out
    out.zero_()
    for b in range(B):
        n, prefix = int(tree.node_counts[b]), int(prefix_lens[b])
        at = torch.arange(prefix + n)
        keys = kv_cache[page_table[b, at // S].long(), at % S].to(compute)
        scores = scale * torch.einsum("nhd,sd->nhs", q[b, :n].to(compute), keys)
        mask = torch.ones((n, prefix + n), dtype=torch.bool)
        mask[:, prefix:] = tree.visibility[b, :n, :n]
        weights = scores.masked_fill(~mask[:, None], -torch.inf).softmax(-1)
        # a weight of 0 times NaN is NaN: what a node does not see is 0 for it
        values = keys[:, :kv_lora_rank].masked_fill(~mask[..., None], 0)  # (n, rows, C)
        out[b, :n] = torch.einsum("nhs,nsc->nhc", weights, values).to(q.dtype)
    return out


def compact_cache(kv_cache, page_table, prefix_lens, acceptance):
    """Indexing with tensors copies, so that all is read before any is written."""
    S = kv_cache.shape[2]
    for b, length in enumerate(acceptance.lengths.tolist()):
        to = int(prefix_lens[b]) + torch.arange(length)
        of = int(prefix_lens[b]) + acceptance.node_indices[b, :length].long()
        rows = kv_cache[:, page_table[b, of // S].long(), of % S]
        kv_cache[:, page_table[b, to // S].long(), to % S] = rows


def topk_log_probs(logits, k, *, vocab_size=None):
    """By a stable sort, in float64."""
    values = logits[..., :vocab_size].double().nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)
    ordered, token_ids = torch.sort(values, dim=-1, descending=True, stable=True)
    top = ordered[..., :1]
    usable = top.isfinite()
    shifted = ordered - torch.where(usable, top, 0.0)
    log_probs = shifted - shifted.logsumexp(-1, keepdim=True)
    log_probs = torch.where(usable, log_probs.clamp(max=0.0), -torch.inf)
    return log_probs[..., :k].float().contiguous(), token_ids[..., :k].int().contiguous()


def choose_tokens(logits, **options):
    """By way of NumPy: the noise is a sequence of 32-bit products, for which torch has no type."""
    given = {name: map_arrays(value, to_numpy) for name, value in options.items()}
    return export_array(reference.choose_tokens(to_numpy(logits), **given), logits)


class Whole:
    """Every operation, right."""

    array_kind = "torch"
    tree_positions = staticmethod(tree_positions)
    visibility_words = staticmethod(visibility_words)
    build_tree = staticmethod(build_tree)
    accept_tree = staticmethod(accept_tree)
    verify_attention = staticmethod(verify_attention)
    compact_cache = staticmethod(compact_cache)
    topk_log_probs = staticmethod(topk_log_probs)
    choose_tokens = staticmethod(choose_tokens)


class Wrong:
    """One fault of each kind that arrays of torch make easy."""

    array_kind = "torch"

    @staticmethod
    def tree_positions(depths, prefix_lens):
        """Works in place on what it was given."""
        return depths.clamp_(min=0).add_(prefix_lens[:, None])

    @staticmethod
    def visibility_words(parents, node_counts):
        """Words of a signed type, the usual one in torch."""
        return visibility_words(parents, node_counts).view(torch.int32)

    @staticmethod
    def accept_tree(tree, target_token_ids, *, remaining=None, stop_token_ids=None):
        """Knows no stop token."""
        return accept_tree(tree, target_token_ids, remaining=remaining)
