"""Hypothesis strategies for drafts, trees, choices, caches and logits: NumPy arrays, valid by construction.

Layers, each usable alone: :func:`parent_arrays` → :func:`draft_trees` → :func:`acceptance_inputs`; :func:`drafts` →
:func:`built_trees`; any tree → :func:`paged_caches`; parents → :func:`visibility_masks` → :func:`corrupted_masks`.
Sizes are small, because these operations fail on few nodes if at all; only 32 nodes and more, where a word of bits
ends, are drawn on purpose.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import hypothesis.strategies as st
import ml_dtypes
import numpy as np
from hypothesis.errors import InvalidArgument
from hypothesis.extra.numpy import arrays

from ddtree import reference
from ddtree.model.config import ModelConfig, Yarn
from ddtree.property_tests.nearness import Attention
from ddtree.protocols import KVCache
from ddtree.trees import Acceptance, DraftTree, tree_from_parents

MAX_BATCH = 3
MAX_NODES = 40
MAX_DEPTH = 4
MAX_CANDIDATES = 5
MAX_TOKEN = 3
"""Small, so that equal tokens among siblings, and token 0, are common."""
VOCABULARY = 13
"""Prime: every multiple of an id below it is another id."""
PAGE_SIZES = (1, 3, 16, 64)
CACHE_TYPES = (np.float16, ml_dtypes.bfloat16, np.float32, np.float64)

DRAFT_KINDS = {
    # each maps falls, whole numbers that add up along K, to log-probs; equal falls are ties
    "eighths": lambda falls: falls / 8,
    "sixteenths": lambda falls: falls / 16,
    "bfloat16": lambda falls: (falls / 10 + 0.05).astype(ml_dtypes.bfloat16),
    "flat": lambda falls: np.full(falls.shape, np.log(max(falls.shape[-1], 1))),
    "sharp": lambda falls: np.minimum(1e-9 * 2.0 ** np.minimum(falls, 64), 30.0),  # sums round even in float64
    "random": lambda falls: falls * 0.0371 + 0.0123,
}
LOGIT_KINDS = {
    "eighths": (np.float32, 1 / 8),
    "sixteenths": (np.float32, 1 / 16),
    "wide": (np.float32, 4.0),
    "tenths": (np.float32, 0.1),
    "float16": (np.float16, 0.1),
    "bfloat16": (ml_dtypes.bfloat16, 0.1),
    "float64": (np.float64, 0.1),
}


class Draft(NamedTuple):
    """What :func:`ddtree.build_tree` takes, but for the budget."""

    log_probs: np.ndarray
    token_ids: np.ndarray
    root_token_ids: np.ndarray


class Compaction(NamedTuple):
    """What :func:`ddtree.compact_cache` takes: a cache, and what was accepted of the trees whose rows it holds."""

    cache: KVCache
    acceptance: Acceptance


class AcceptanceInputs(NamedTuple):
    """What :func:`ddtree.accept_tree` takes."""

    tree: DraftTree
    target_token_ids: np.ndarray
    remaining: np.ndarray | None
    stop_token_ids: np.ndarray | None

    def __repr__(self) -> str:
        t, n = self.tree, self.tree.node_counts
        each = [(t.parents[b, : n[b]].tolist(), t.token_ids[b, : n[b]].tolist()) for b in range(t.batch_size)]
        named = {k: None if v is None else v.tolist() for k, v in self._asdict().items() if k != "tree"}
        return f"AcceptanceInputs((parents, token_ids)={each}, {', '.join(f'{k}={v}' for k, v in named.items())})"


@st.composite
def drafts(
    draw,
    *,
    min_batch: int = 0,
    max_batch: int = MAX_BATCH,
    max_depth: int = MAX_DEPTH,
    min_candidates: int = 0,
    max_candidates: int = MAX_CANDIDATES,
    kinds: tuple[str, ...] = tuple(DRAFT_KINDS),
    tails: bool = True,
):
    """A :class:`Draft` with B, L and K within the bounds, of one of ``kinds``.

    * ``tails`` allows depths to end early, in −inf or NaN and anything after it, with id −1 there.

    Shrinks towards few requests, depths and candidates, ties, no tails, and ids 0, 1, 2, ….
    """
    _check_order("batch", 0, min_batch, max_batch)
    _check_order("candidates", 0, min_candidates, max_candidates)
    if max_candidates > VOCABULARY:
        raise InvalidArgument(f"max_candidates={max_candidates} is larger than the vocabulary, {VOCABULARY}")
    bounds = (min_batch, max_batch), (0, max_depth), (min_candidates, max_candidates)
    B, L, K = draw(st.tuples(*(_sizes(*pair) for pair in bounds)))
    falls = draw(_integers_of((B, L, K), 12, zeros=8))
    kind = draw(st.sampled_from(kinds))
    log_probs = -np.asarray(DRAFT_KINDS[kind](np.cumsum(falls, -1))).astype(np.float32)
    # Multiples of a step below a prime are distinct: no id occurs twice at a depth.
    first = draw(_integers_of((B, L, 1), VOCABULARY - 1))
    step = 1 + draw(_integers_of((B, L, 1), VOCABULARY - 2))
    token_ids = (first + step * np.arange(K, dtype=np.int32)) % VOCABULARY
    if tails and K:
        lost = draw(_integers_of((B, L), K, zeros=3 * K))
        tail = np.array([-np.inf, np.nan, 0.0, -0.5], np.float32)[draw(_integers_of((B, L, K), 3))]
        end = K - lost[..., None]
        tail = np.where((np.arange(K) == end) & (tail > -np.inf), np.float32(-np.inf), tail)
        beyond = np.arange(K) >= end
        log_probs, token_ids = np.where(beyond, tail, log_probs), np.where(beyond, np.int32(-1), token_ids)
    roots = draw(_integers_of((B,), VOCABULARY - 1))
    return Draft(log_probs, token_ids, roots)


def budgets(*, max_budget: int = MAX_NODES):
    """A node budget: 0, the sizes about a word of bits, or any other; often above the number of paths.

    Shrinks towards 0.
    """
    edges = [b for b in (30, 31, 32, 33, 63, 64, 65) if b <= max_budget]
    return st.integers(0, max_budget) | st.sampled_from([*edges, max_budget]) if edges else st.integers(0, max_budget)


def built_trees(**bounds: Any):
    """The trees that are built from :func:`drafts`, which takes the same arguments.

    Shrinks towards trees of a root alone, as the draft does.
    """
    return st.builds(lambda draft, budget: reference.build_tree(*draft, budget=budget), drafts(**bounds), budgets())


@st.composite
def parent_arrays(
    draw,
    *,
    min_nodes: int = 1,
    max_nodes: int = MAX_NODES,
    max_depth: int | None = None,
    max_children: int | None = None,
):
    """Parent of every node of any tree: int32 (n,), the root first with −1, every parent before its children.

    * ``min_nodes``, ``max_nodes`` bound the number of nodes, the root included.
    * ``max_depth``, ``max_children`` bound the shape; None means no bound.

    Shrinks towards fewer nodes, and every node towards the root.
    """
    _check_order("nodes", 1, min_nodes, max_nodes)
    if min_nodes > _capacity(max_depth, max_children):
        raise InvalidArgument(f"no tree of min_nodes={min_nodes} has {max_depth=} and {max_children=}")
    # One sequence and no separate size: deleting an entry leaves a valid tree, lowering one moves a node rootwards.
    attach = draw(_codes(max_nodes, zeros=max_nodes // 4, min_size=min_nodes - 1, max_size=max_nodes - 1))
    return _decode(attach, max_depth, max_children)


@st.composite
def draft_trees(
    draw, *, min_batch: int = 0, max_batch: int = MAX_BATCH, max_nodes: int = MAX_NODES, max_token: int = MAX_TOKEN
):
    """A batch of arbitrary trees as a :class:`DraftTree`: any shape, unequal sizes, equal tokens among siblings.

    Nodes come in any order that has parents first, not only in the order of a builder, and there may be slots that no
    request uses.

    Shrinks towards an empty batch, then roots alone, token 0, and no unused slots.
    """
    _check_order("batch", 0, min_batch, max_batch)
    # a node's number is the place that it attaches to, then its token; the first is the root, whose place means nothing
    places, ids = max_nodes + 1, max_token + 1
    tree = _codes(places * ids - 1, min_size=1, max_size=max_nodes)
    some = st.lists(tree, min_size=min(max(min_batch, 1), max_batch), max_size=max_batch)
    trees = draw(st.lists(tree, min_size=min_batch, max_size=max_batch) | some)  # none is one value, so a rare one
    N = max(map(len, trees), default=1) + draw(st.integers(0, 2))
    parents, tokens = np.full((2, len(trees), N), -1, np.int32)
    for b, one in enumerate(trees):
        parents[b, : len(one)] = _decode([node // ids for node in one[1:]])
        tokens[b, : len(one)] = [node % ids for node in one]
    return tree_from_parents(tokens, parents, np.array([len(one) for one in trees], np.int32))


@st.composite
def target_choices(draw, trees):
    """``(tree, choices)``: after each node mostly the token of one of its children, else any token or −1.

    Unused slots hold 0 or −1, either of which is there to be met by mistake.

    Shrinks towards the first child's token everywhere: a long accepted path.
    """
    tree = draw(trees)
    B, N = tree.token_ids.shape
    draws = draw(_integers_of((B, N), 2 * MAX_TOKEN, zeros=4 * MAX_TOKEN))
    choices = np.where(draws % 2, np.int32(0), np.int32(-1))
    usual = draw(st.integers(0, 1))  # the child that is chosen where nothing else is drawn
    for b in range(B):
        children: list[list[int]] = [[] for _ in range(N)]
        for i in range(1, int(tree.node_counts[b])):
            children[tree.parents[b, i]].append(int(tree.token_ids[b, i]))
        for i in range(int(tree.node_counts[b])):
            # first the children's tokens, then any token from 0, last none
            candidates = [*children[i], *range(MAX_TOKEN + 1), -1]
            place = int(draws[b, i]) or min(usual, max(len(children[i]) - 1, 0))
            choices[b, i] = candidates[min(place, len(candidates) - 1)]
    return tree, choices.astype(np.int32)


@st.composite
def acceptance_inputs(draw, trees=None, *, stops: bool = True):
    """:class:`AcceptanceInputs` over ``trees`` (:func:`draft_trees` or :func:`built_trees` if left out).

    * ``stops`` allows ``remaining`` (0 to 5, or a count beyond any path) and stop tokens; without, both are None.

    Shrinks towards small trees that are accepted whole, with no limit and no stop token.
    """
    tree, choices = draw(target_choices(draft_trees() | built_trees() if trees is None else trees))
    if not stops:
        return AcceptanceInputs(tree, choices, None, None)
    limits = arrays(np.int32, tree.batch_size, elements=st.sampled_from([0, 1, 2, 3, 5, 2**31 - 1]))
    tokens = st.lists(st.integers(0, MAX_TOKEN), max_size=2).map(lambda found: np.array(found, np.int32))
    return AcceptanceInputs(tree, choices, draw(st.none() | limits), draw(st.none() | tokens))


@st.composite
def paged_caches(
    draw,
    tree: DraftTree,
    *,
    max_prefix: int = 20,
    page_sizes: tuple[int | None, ...] = (*PAGE_SIZES, None),
    layers: int = 2,
    width: int = 3,
    dtype: Any = np.float32,
):
    """A :class:`KVCache` for ``tree``: unequal prefixes from 0 up, pages in any order, NaN in every row not in use.

    * ``page_sizes`` are those to choose from; None is one page a request.
    * ``dtype`` may be any of ddtree's floating types; every NaN has a payload of its own, where the type has room.

    Rows in use hold normal random numbers. Table entries of pages that no row needs are −1.

    Shrinks towards empty prefixes, the first page size, and pages in order.
    """
    B = tree.batch_size
    lengths = draw(st.lists(st.integers(0, max_prefix), min_size=B, max_size=B))
    prefix_lens = np.array(lengths, np.int32)
    rows = prefix_lens + tree.node_counts
    S = draw(st.sampled_from(page_sizes)) or int(rows.max(initial=1))
    needed = -(-rows // S)
    pages = int(needed.sum()) + draw(st.integers(0, 2))
    order = iter(draw(st.permutations(range(pages))))
    rng = np.random.default_rng(draw(st.integers(0, 9)))
    data = _poison((layers, pages, S, width), dtype)
    page_table = np.full((B, int(needed.max(initial=0))), -1, np.int32)
    for b in range(B):
        page_table[b, : needed[b]] = [next(order) for _ in range(needed[b])]
        at = np.arange(rows[b])
        values = rng.standard_normal((layers, rows[b], width)).astype(dtype)
        data[:, page_table[b, at // S], at % S] = values
    return KVCache(data, page_table, prefix_lens)


@st.composite
def attention_inputs(draw, dtype: Any = np.float32):
    """A :class:`ddtree.property_tests.nearness.Attention` of any small tree and cache; unused slots' queries are NaN.

    Shrinks towards few requests and nodes, and empty prefixes.
    """
    tree = draw(draft_trees(max_nodes=10))
    cache = draw(paged_caches(tree, layers=1, width=6, dtype=dtype))
    q = poisoned_queries(np.random.default_rng(draw(st.integers(0, 9))), tree, draw(st.integers(1, 3)), 6, dtype)
    scale, rank = draw(st.sampled_from([1.0, 0.25])), draw(st.sampled_from([4, 6]))
    return Attention(q, cache.data[0], cache.page_table, cache.prefix_lens, tree, scale, rank)


@st.composite
def compaction_inputs(draw, *, max_prefix: int = 20):
    """A :class:`Compaction` of two layers, of any type of ``CACHE_TYPES``.

    Shrinks as the tree, the choices and the cache do.
    """
    tree, choices, remaining, stops = draw(acceptance_inputs(draft_trees(max_nodes=12)))
    cache = draw(paged_caches(tree, dtype=draw(st.sampled_from(CACHE_TYPES)), max_prefix=max_prefix))
    return Compaction(cache, reference.accept_tree(tree, choices, remaining=remaining, stop_token_ids=stops))


@st.composite
def logit_batches(
    draw,
    *,
    min_vocab: int = 1,
    max_vocab: int = 9,
    max_rows: int = 3,
    kinds: tuple[str, ...] = tuple(LOGIT_KINDS),
    specials: tuple[float, ...] = (-np.inf, np.nan),
):
    """Logits (B, L, V) on a grid, so that ties are common, in the type of one of ``kinds``.

    * ``specials`` stand in some places.

    Shrinks towards no rows, a small vocabulary, and zeros.
    """
    _check_order("vocab", 0, min_vocab, max_vocab)
    shape = draw(st.tuples(_sizes(0, 2), _sizes(0, max_rows), _sizes(min_vocab, max_vocab)))
    # Beyond the grid's 25 values, each further one is a special: drawn rarely enough to leave most rows usable.
    codes = draw(_integers_of(shape, 24 + len(specials), zeros=8))
    dtype, unit = LOGIT_KINDS[draw(st.sampled_from(kinds))]
    values = np.where(codes % 2, codes // 2 + 1, -(codes // 2)) * unit  # 0, 1, −1, 2, −2, … units
    for i, special in enumerate(specials):
        values[codes == 25 + i] = special
    return values.astype(dtype)


def visibility_masks(**bounds: Any):
    """Who sees whom in one tree: bool (n, n), row i true at node i and its ancestors; :func:`parent_arrays`' bounds.

    Shrinks as the parents do: towards one root that sees itself.
    """
    return parent_arrays(**bounds).map(_mask_of)


@st.composite
def corrupted_masks(draw, masks=None):
    """``(mask, corrupted, (row, column))``: a mask, and the same with one bit the other way, and where.

    Shrinks towards the first bit of a small mask.
    """
    mask = draw(visibility_masks() if masks is None else masks)
    place = tuple(draw(st.tuples(*(st.integers(0, n - 1) for n in mask.shape))))
    corrupted = mask.copy()
    corrupted[place] ^= True
    return mask, corrupted, place


@st.composite
def model_configs(draw):
    """A small :class:`ModelConfig` of any form: with and without experts, compressed queries, YaRN and tied embeddings.

    Shrinks towards one dense layer of one head.
    """
    n_group = draw(st.sampled_from([1, 2, 4]))
    n_routed_experts = n_group * draw(st.integers(2, 3))
    topk_group = draw(st.integers(1, n_group))
    yarn = st.builds(
        Yarn,
        factor=st.just(8.0),
        original_max_position_embeddings=st.just(32),
        mscale=st.sampled_from([0.0, 1.0]),
        mscale_all_dim=st.sampled_from([0.0, 0.7]),
        attention_factor=st.none() | st.just(1.2),
    )
    layers = draw(st.integers(1, 2))
    return ModelConfig(
        vocab_size=17,
        hidden_size=draw(st.sampled_from([5, 8])),
        intermediate_size=6,
        moe_intermediate_size=3,
        num_hidden_layers=layers,
        first_k_dense_replace=layers - draw(st.integers(0, layers)),
        num_attention_heads=draw(st.integers(1, 3)),
        q_lora_rank=draw(st.none() | st.integers(1, 4)),
        kv_lora_rank=draw(st.integers(1, 5)),
        qk_nope_head_dim=draw(st.integers(1, 3)),
        qk_rope_head_dim=draw(st.sampled_from([2, 4])),
        v_head_dim=draw(st.integers(1, 3)),
        n_routed_experts=n_routed_experts,
        num_experts_per_tok=draw(st.integers(1, n_routed_experts // n_group * topk_group)),
        n_shared_experts=draw(st.integers(1, 2)),
        n_group=n_group,
        topk_group=topk_group,
        norm_topk_prob=draw(st.booleans()),
        routed_scaling_factor=1.5,
        rms_norm_eps=draw(st.sampled_from([1e-6, 0.1])),
        rope_theta=1e4,
        rope_interleave=draw(st.booleans()),
        yarn=draw(st.none() | yarn),
        tie_word_embeddings=draw(st.booleans()),
    )


def calls(op: str):
    """Arguments of an operation, by name: what ``ddtree check`` compares backends on.

    Shrinks as what it is made of does.
    """
    return _CALLS[op]()


@st.composite
def _topk_calls(draw):
    logits = draw(logit_batches(specials=(-np.inf, np.nan, np.inf)))
    vocab_size = draw(st.none() | st.integers(1, logits.shape[-1]))
    return {"logits": logits, "k": draw(st.integers(1, vocab_size or logits.shape[-1])), "vocab_size": vocab_size}


@st.composite
def _choice_calls(draw):
    logits = draw(logit_batches(specials=(-np.inf, np.nan, np.inf)))
    B, N, _ = logits.shape
    return {
        "logits": logits,
        "temperature": draw(st.sampled_from([0.0, 1.0, 0.5, 2.0])),
        "top_p": draw(st.sampled_from([1.0, 0.5, 0.75, 2.0**-20])),
        "seed": draw(st.integers(0, 2**64 - 1)),
        "request_ids": draw(st.none() | arrays(np.int64, B, elements=st.integers(0, 2**63 - 1))),
        "positions": draw(arrays(np.int32, (B, N), elements=st.integers(0, 2**31 - 1))),
    }


def _position_calls():
    lengths = st.lists(st.integers(0, 1000), min_size=MAX_BATCH, max_size=MAX_BATCH)
    return st.builds(
        lambda tree, found: {"depths": tree.depths, "prefix_lens": np.array(found, np.int32)[: tree.batch_size]},
        draft_trees() | built_trees(),
        lengths,
    )


_CALLS: dict[str, Callable[[], st.SearchStrategy[dict[str, Any]]]] = {
    "topk_log_probs": _topk_calls,
    "build_tree": lambda: st.builds(lambda draft, n: draft._asdict() | {"budget": n}, drafts(), budgets()),
    "visibility_words": lambda: (draft_trees() | built_trees()).map(
        lambda tree: {"parents": tree.parents, "node_counts": tree.node_counts}
    ),
    "tree_positions": _position_calls,
    "verify_attention": lambda: (attention_inputs() | attention_inputs(np.float64)).map(lambda a: a._asdict()),
    "choose_tokens": _choice_calls,
    "accept_tree": lambda: acceptance_inputs().map(lambda inputs: inputs._asdict()),
    "compact_cache": lambda: compaction_inputs().map(
        lambda c: {
            "kv_cache": c.cache.data,
            "page_table": c.cache.page_table,
            "prefix_lens": c.cache.prefix_lens,
            "acceptance": c.acceptance,
        }
    ),
}


def _mask_of(parents):
    mask = np.eye(len(parents), dtype=np.bool_)
    for i, parent in enumerate(parents.tolist()[1:], start=1):
        mask[i] |= mask[parent]
    return mask


def poisoned_queries(rng, tree, heads, width, dtype, size=1.0):
    """Normal random queries (B, N, heads, width) of ``size``, NaN in unused slots."""
    q = (size * rng.standard_normal((tree.batch_size, tree.num_slots, heads, width))).astype(dtype)
    q[np.arange(tree.num_slots) >= tree.node_counts[:, None]] = np.nan
    return q


def _sizes(low, high):
    """Integers from ``low`` to ``high``; ``low`` a fourth as often (of 0 there is nothing to see), ``high`` twice.

    Shrinks towards ``low``.
    """
    return st.integers(0, 4 * (high - low) + 4).map(lambda quarters: min(low - -quarters // 4, high))


def _integers_of(shape, highest, *, zeros=0):
    """Arrays int32 of ``shape``, of 0 to ``highest``: drawn as bytes, a byte an element, in the time of two integers.

    * ``zeros`` makes 0 that many times likelier, beside the one time that it shares with every other integer.

    Shrinks every element towards 0. What is drawn keeps its meaning while another draw makes the array smaller, since
    elements without a byte are 0.
    """
    size = int(np.prod(shape))
    first_elements, all_elements = st.binary(max_size=size), st.binary(min_size=size, max_size=size)
    return (first_elements | all_elements).map(
        lambda data: _scaled(np.frombuffer(data.ljust(size, b"\0"), np.uint8), highest, zeros).reshape(shape)
    )


def _scaled(byte, highest, zeros=0):
    """Bytes as integers up to ``highest``: each of them is met, and a smaller byte is never a larger integer."""
    return np.maximum(byte * np.int32(highest + 1 + zeros) // 256 - zeros, 0).astype(np.int32)


def _codes(highest, *, min_size, max_size, zeros=0):
    """Lists of integers from 0 to ``highest``; more than by chance alone have 32 or more, where a word of bits ends.

    Drawn as bytes where a byte can tell the integers apart: one draw in place of one an entry, an eighth of the time.
    Shrinks as a list does: towards fewer entries, and each towards 0.
    """

    def lists(least):
        if highest >= 256:
            return st.lists(st.integers(0, highest), min_size=least, max_size=max_size)
        drawn = st.binary(min_size=least, max_size=max_size)
        return drawn.map(lambda data: _scaled(np.frombuffer(data, np.uint8), highest, zeros).tolist())

    return lists(min_size) | lists(32) if min_size < 32 <= max_size else lists(min_size)


def _decode(attach, max_depth=None, max_children=None):
    """Entry i attaches node i + 1 to node ``min(entry, i)``, or to the nearest one with room, earlier ones first."""
    parents, depths, children = [-1], [0], [0]
    for at in attach:
        at = min(at, len(parents) - 1)
        for parent in (*range(at, -1, -1), *range(at + 1, len(parents))):
            if (max_depth is None or depths[parent] < max_depth) and (
                max_children is None or children[parent] < max_children
            ):
                children[parent] += 1
                parents.append(parent)
                depths.append(depths[parent] + 1)
                children.append(0)
                break  # where no node has room the tree is full, and the entry means nothing
    return np.array(parents, np.int32)


def _poison(shape, dtype):
    """NaNs with payloads that differ from row to row, as far as the type has bits for it."""
    dtype = np.dtype(dtype)
    if dtype.itemsize == 2:
        quiet = np.array(np.nan, dtype).view(np.uint16)
        return (quiet | (np.arange(np.prod(shape)) % 32).astype(np.uint16)).reshape(shape).view(dtype)
    bits = np.array(np.nan, dtype).view(f"u{dtype.itemsize}")
    return (bits | np.arange(np.prod(shape)).astype(bits.dtype)).reshape(shape).view(dtype)


def _check_order(name, least, low, high):
    if not least <= low <= high:
        raise InvalidArgument(f"min_{name}={low} must be in {least} … max_{name}={high}")


def _capacity(max_depth, max_children):
    """Nodes of the largest tree within the bounds; infinity where nothing bounds it."""
    if max_depth == 0 or max_children == 0:
        return 1
    if max_depth is None or max_children is None:
        return np.inf
    return sum(max_children**d for d in range(max_depth + 1))
