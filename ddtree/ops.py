"""The operations: one public function each, that checks its arguments and lets a backend do the work.

Letters: B requests, L draft depth limit, K candidates a depth, N = 1 + budget node slots, W = ⌈N/32⌉, V vocabulary,
H heads, C kv_lora_rank, R qk_rope_head_dim, S page size.

**Arrays** may be NumPy, CuPy, torch or JAX, or anything with ``__dlpack__``; all of a call lie on one device and must
be C-contiguous; results are of the kind that was given (what JAX has no type for stays as it is, see
:func:`ddtree.arrays.export_array`). Ids and indices are int32; int64 is accepted, range-checked and converted.

**backend** names who does the work: ``reference``, ``numba_cpu``, ``numba_cuda``, ``cupy``, or ``"module:object"`` of
your own. Without it the arrays decide, in the order that ``ddtree info`` prints.

**validate** says whether values are checked (sorted rows, id ranges, parents): by default for arrays on the host and
not for arrays on a GPU, where reading them would wait for it. Shapes, types and devices are always checked. A wrong
argument raises ``ValueError`` or ``TypeError`` naming the argument, what it was and what it must be, before anything
is launched or written.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ddtree.arrays import dtype_name, to_numpy
from ddtree.backends import Backend
from ddtree.checks import (
    CACHE_INTS,
    FLOATS,
    INT32_MAX,
    INTS,
    Call,
    check_draft,
    check_pages,
    check_parents,
    check_tree_values,
    check_visibility,
    first,
    integer,
    real,
)
from ddtree.trees import Acceptance, DraftTree

__all__ = [
    "accept_tree",
    "build_tree",
    "choose_tokens",
    "compact_cache",
    "topk_log_probs",
    "tree_positions",
    "verify_attention",
    "visibility_words",
]


def topk_log_probs(
    logits: Any, k: int, *, vocab_size: int | None = None, backend: str | Backend | None = None
) -> tuple[Any, Any]:
    """Return the ``k`` likeliest tokens of each row of logits and their log-probs.

    Parameters
    ----------
    logits : array, float16, bfloat16, float32 or float64, shape (B, L, V)
        Unnormalised scores. A NaN counts as −inf.
    k : int
        K, candidates a row: 1 … ``vocab_size``.
    vocab_size : int, optional
        The real vocabulary where V is padded: columns from it on are neither chosen nor part of the normalisation.
    backend : str, optional
        Who does the work.

    Returns
    -------
    log_probs : array, float32, shape (B, L, K)
        Log-softmax over the whole vocabulary, ≤ 0, non-increasing along K; equal logits have equal values. Within
        ``1e-6 · max(1, |log Z|, |logit|)`` of the exact value. A row with +inf, or with nothing finite, is all −inf.
    token_ids : array, int32, shape (B, L, K)
        By logit descending, then id ascending, exactly, whatever the log-probs round to.

    Raises
    ------
    ValueError, TypeError
        A shape, type or range, by name.

    Examples
    --------
    >>> log_probs, token_ids = topk_log_probs(np.array([[[0.0, 1.0, 1.0, 0.0]]], np.float32), 3)
    >>> token_ids.tolist()
    [[[1, 2, 0]]]
    """
    call = Call("topk_log_probs", backend, {"logits": logits})
    call.check("logits", ("B", "L", "V"), FLOATS)
    V = call.dims["V"]
    vocab_size = V if vocab_size is None else integer("vocab_size", vocab_size, 1, V, "the width of logits")
    k = integer("k", k, 1, vocab_size, "the vocabulary size")
    return call.run(lambda op: op(call["logits"], k, vocab_size=vocab_size))  # type: ignore[no-any-return]


def build_tree(
    log_probs: Any,
    token_ids: Any,
    root_token_ids: Any,
    *,
    budget: int,
    vocab_size: int | None = None,
    backend: str | Backend | None = None,
    validate: bool | None = None,
) -> DraftTree:
    """Build the draft tree of the ``budget`` likeliest continuations, for each request (DDTree, arXiv 2604.12989).

    A node is a rank path (r1, …, rd); its score is the float64 sum, in depth order from +0.0 (so never −0.0), of its
    path's float32 log-probs.
    The tree is the first ``budget`` paths in the order: score descending, then path lexicographic, a prefix before its
    extensions. The order is total, so every backend builds the same tree, ties included, and the tree of a smaller
    budget is a prefix of that of a larger one.

    Parameters
    ----------
    log_probs : array, float32, shape (B, L, K)
        Drafted log-probs ≤ 0, non-increasing along K. At each depth the draft ends before the first NaN or −inf:
        nothing from there on is drafted or checked.
    token_ids : array, int32, shape (B, L, K)
        Their tokens, distinct within a depth; anything past a depth's end.
    root_token_ids : array, int32, shape (B,)
        The last committed token of each request.
    budget : int
        Nodes besides the root, 0 … 2³¹ − 2. Fewer are used where fewer are draftable.
    vocab_size : int, optional
        V, for the check of ids; without it they need only be ≥ 0.
    backend : str, optional
        Who does the work.
    validate : bool, optional
        Whether to check values; by default on the host only.

    Returns
    -------
    DraftTree
        With N = 1 + ``budget`` slots. Optimal over the whole vocabulary if K ≥ min(budget, V); where it may not be,
        ``tree.used_last_rank`` says so.

    Raises
    ------
    ValueError, TypeError
        A shape, type, range, or unsorted or repeated candidate, by name and place.

    Examples
    --------
    >>> log_probs = np.log(np.array([[[0.5, 0.25]] * 3], np.float32))
    >>> tree = build_tree(log_probs, np.array([[[1, 2], [3, 4], [5, 6]]], np.int32), np.array([9], np.int32), budget=2)
    >>> tree.token_ids.tolist(), tree.parents.tolist()
    ([[9, 1, 3]], [[-1, 0, 1]])
    """
    call = Call(
        "build_tree",
        backend,
        {"log_probs": log_probs, "token_ids": token_ids, "root_token_ids": root_token_ids},
    )
    call.check("log_probs", ("B", "L", "K"), ("float32",))
    call.check("token_ids", ("B", "L", "K"), INTS)
    call.check("root_token_ids", ("B",), INTS)
    budget = integer("budget", budget, 0, INT32_MAX - 1)
    if vocab_size is not None:
        vocab_size = integer("vocab_size", vocab_size, 1, INT32_MAX)
    limit = INT32_MAX if vocab_size is None else vocab_size - 1
    if call.validates(validate):
        call.check_range("root_token_ids", 0, limit)
        check_draft(call, -1 if vocab_size is None else vocab_size)
    # Past a depth's end an id may be anything, so int64 ids are narrowed without a check of those.
    call.narrow("token_ids", "root_token_ids")
    try:
        tree: DraftTree = call.run(
            lambda op: op(call["log_probs"], call["token_ids"], call["root_token_ids"], budget=budget)
        )
    except MemoryError as error:
        B, N = call.dims["B"], 1 + budget
        size = B * N * (4 * 4 + 8 + 4 * -(-N // 32)) / 2**30
        raise MemoryError(f"budget = {budget} for {B} requests makes trees of {size:,.1f} GiB: {error}") from error
    return tree


def visibility_words(
    parents: Any, node_counts: Any, *, backend: str | Backend | None = None, validate: bool | None = None
) -> Any:
    """Pack which nodes each node attends to, itself and its ancestors, into bits.

    Parameters
    ----------
    parents : array, int32, shape (B, N)
        Index of each node's parent, smaller than the node's own; −1 for the root. Unused slots are not read.
    node_counts : array, int32, shape (B,)
        Nodes in use, 1 … N, the root included.
    backend : str, optional
        Who does the work.
    validate : bool, optional
        Whether to check values; by default on the host only.

    Returns
    -------
    array, uint32, shape (B, N, W)
        Bit ``j % 32``, least significant first, of word ``j // 32`` of row i says whether node i sees node j. 0 in
        unused rows and bits.

    Raises
    ------
    ValueError, TypeError
        A shape, type or parent out of range, by name and place.

    Examples
    --------
    >>> visibility_words(np.array([[-1, 0, 0, 2]], np.int32), np.array([4], np.int32)).tolist()
    [[[1], [3], [5], [13]]]
    """
    call = Call("visibility_words", backend, {"parents": parents, "node_counts": node_counts})
    call.check("parents", ("B", "N"), INTS)
    call.check("node_counts", ("B",), INTS)
    if call.validates(validate):
        check_parents(call)
    call.narrow("parents", "node_counts")
    return call.run(lambda op: op(call["parents"], call["node_counts"]))


def tree_positions(
    depths: Any, prefix_lens: Any, *, backend: str | Backend | None = None, validate: bool | None = None
) -> Any:
    """Return each node's position in its sequence: ``prefix_len + depth``, siblings alike.

    Parameters
    ----------
    depths : array, int32, shape (B, N)
        Depth of each node, 0 for the root; −1 in unused slots.
    prefix_lens : array, int32, shape (B,)
        Committed rows of each request, which is the root's position.
    backend : str, optional
        Who does the work.
    validate : bool, optional
        Whether to check values; by default on the host only.

    Returns
    -------
    array, int32, shape (B, N)
        ``prefix_len`` in unused slots.

    Raises
    ------
    ValueError, TypeError
        A shape, type or range, by name.

    Examples
    --------
    >>> tree_positions(np.array([[0, 1, 1, 2, -1]], np.int32), np.array([10], np.int32)).tolist()
    [[10, 11, 11, 12, 10]]
    """
    call = Call("tree_positions", backend, {"depths": depths, "prefix_lens": prefix_lens})
    call.check("depths", ("B", "N"), INTS)
    call.check("prefix_lens", ("B",), INTS)
    if call.validates(validate):
        call.check_range("depths", -1, INT32_MAX)
        deepest = int(to_numpy(call["depths"]).max(initial=0))
        call.check_range("prefix_lens", 0, INT32_MAX - deepest)
    call.narrow("depths", "prefix_lens")
    return call.run(lambda op: op(call["depths"], call["prefix_lens"]))


def verify_attention(
    q: Any,
    kv_cache: Any,
    page_table: Any,
    prefix_lens: Any,
    tree: DraftTree,
    *,
    scale: float,
    kv_lora_rank: int,
    out: Any = None,
    backend: str | Backend | None = None,
    validate: bool | None = None,
) -> Any:
    """Attend from every tree node to the prefix and to its own path: absorbed MLA over a paged latent cache.

    Node i of request b attends to rows [0, prefix_len) and to row ``prefix_len + j`` of every node j that it sees:
    softmax(scale · q·k) in float32 (in float64 for float64 queries), and the value is the key's latent part.

    Parameters
    ----------
    q : array, float16, bfloat16, float32 or float64, shape (B, N, H, C + R)
        Absorbed queries: latent part first, rotated part last.
    kv_cache : array, the type of q, shape (pages, S, C + R)
        One layer of the cache. Rows that a node does not see may hold anything for it, NaN and infinities included.
    page_table : array, int32, shape (B, max_pages)
        Row r of request b is row ``r % S`` of page ``page_table[b, r // S]``. Only pages of rows in use are read.
    prefix_lens : array, int32, shape (B,)
        Committed rows of each request, 0 and up.
    tree : DraftTree
        Its ``visibility_words`` and ``node_counts`` say who sees whom.
    scale : float
        Factor of the scores, finite.
    kv_lora_rank : int
        C, 1 … the last dimension of q: what of a row is its latent.
    out : array, the type of q, shape (B, N, H, C), optional
        Written and returned.
    backend : str, optional
        Who does the work.
    validate : bool, optional
        Whether to check values; by default on the host only.

    Returns
    -------
    array, the type of q, shape (B, N, H, C)
        Zeros in unused slots; NaN where all scores that a node sees are −inf. A kernel may take a score beyond ±2.3e38
        for infinite.

    Raises
    ------
    ValueError, TypeError
        A shape, type, page or tree that does not fit, by name.
    """
    named = {"q": q, "kv_cache": kv_cache, "page_table": page_table, "prefix_lens": prefix_lens}
    call = Call("verify_attention", backend, named | ({} if out is None else {"out": out}), tree)
    call.check("q", ("B", "N", "H", "C + R"), FLOATS)
    dtype = (dtype_name(call["q"]),)
    call.check("kv_cache", ("pages", "S", "C + R"), dtype)
    call.check("page_table", ("B", "max_pages"), INTS)
    call.check("prefix_lens", ("B",), INTS)
    call.check_tree()
    sizes = [call.dims[name] for name in ("pages", "S", "max_pages")]
    if call.dims["B"] and 0 in sizes:  # each request has a node at least, and that a row
        raise ValueError(
            f"kv_cache and page_table must have room for a row a request, got {sizes} pages, rows, entries"
        )
    scale = real("scale", scale)
    if dtype != ("float64",) and abs(scale) > float(np.finfo(np.float32).max):
        raise ValueError(f"scale must be finite in float32, which scores are computed in, got {scale}")
    kv_lora_rank = integer("kv_lora_rank", kv_lora_rank, 1, call.dims["C + R"], "the last dimension of q")
    call.dims["C"] = kv_lora_rank
    if out is not None:
        call.check("out", ("B", "N", "H", "C"), dtype, written=True)
        call.check_apart("out", "q", "kv_cache")
    if call.validates(validate):
        check_tree_values(call)
        check_visibility(call)
        check_pages(call, to_numpy(call.tree.node_counts))
    call.narrow("page_table", "prefix_lens")
    result = call.run(
        lambda op: op(
            *(call[name] for name in ("q", "kv_cache", "page_table", "prefix_lens")),
            call.tree,
            scale=scale,
            kv_lora_rank=kv_lora_rank,
            out=None if out is None else call["out"],
        )
    )
    return result if out is None else out


def choose_tokens(
    logits: Any,
    *,
    temperature: float = 0.0,
    top_p: float = 1.0,
    seed: int = 0,
    request_ids: Any = None,
    positions: Any = None,
    backend: str | Backend | None = None,
    validate: bool | None = None,
) -> Any:
    """Return the target's token after each node, greedy or sampled; the same wherever it stands in a batch.

    At temperature 0: the argmax, of equal logits the lowest id. Above 0: the argmax of logits / temperature plus
    Gumbel noise (which draws from the softmax), the noise of token v being made of word ``v % 4`` of Philox4x32-10 at
    counter (v // 4, position, request id) under the seed as key. So a run that verifies trees samples exactly the
    tokens that a run of one token at a time samples. Logarithm and exponential are a fixed sequence of float64
    operations, and nucleus masses are integers, so that every backend chooses alike.

    Parameters
    ----------
    logits : array, float16, bfloat16, float32 or float64, shape (B, N, V)
        Scores of the token after each node.
    temperature : float
        0 or more, finite.
    top_p : float
        Over 0 and at most 1: a token is kept if less than this share of the probability lies on tokens before it, by
        (logit descending, id ascending). Not used at temperature 0.
    seed : int
        0 … 2⁶⁴ − 1.
    request_ids : array, int64 or int32, shape (B,), optional
        Key of each request's noise, 0 and up; 0 … B − 1 if left out.
    positions : array, int32, shape (B, N)
        Position of each node, from :func:`tree_positions`. Needed above temperature 0.
    backend : str, optional
        Who does the work.
    validate : bool, optional
        Whether to check values; by default on the host only.

    Returns
    -------
    array, int32, shape (B, N)
        −1 for a row with NaN or +inf in it, or nothing finite.

    Raises
    ------
    ValueError, TypeError
        A shape, type or range, by name.

    Examples
    --------
    >>> choose_tokens(np.array([[[1.0, 3.0, 3.0], [0.0, np.nan, 0.0]]], np.float32)).tolist()
    [[1, -1]]
    """
    optional = {"request_ids": request_ids, "positions": positions}
    call = Call("choose_tokens", backend, {"logits": logits} | {k: v for k, v in optional.items() if v is not None})
    call.check("logits", ("B", "N", "V"), FLOATS)
    if call.dims["V"] == 0:
        raise ValueError("logits must have at least one column, got V = 0")
    temperature = real("temperature", temperature, least=0.0)
    top_p = real("top_p", top_p)
    if not 0 < top_p <= 1:
        raise ValueError(f"top_p must be over 0 and at most 1, got {top_p}")
    seed = integer("seed", seed, 0, 2**64 - 1)
    if temperature > 0 and positions is None:
        raise ValueError("positions must be given above temperature 0: they key the noise (see tree_positions)")
    if request_ids is not None:
        call.check("request_ids", ("B",), INTS)
    if positions is not None:
        call.check("positions", ("B", "N"), INTS)
    if call.validates(validate):
        if request_ids is not None:
            call.check_range("request_ids", 0, 2**63 - 1)
        if positions is not None:
            call.check_range("positions", 0, INT32_MAX)
    if positions is not None:
        call.narrow("positions")
    if request_ids is not None:
        call.widen("request_ids")
    return call.run(
        lambda op: op(
            call["logits"],
            temperature=temperature,
            top_p=top_p,
            seed=seed,
            request_ids=call.arrays.get("request_ids"),
            positions=call.arrays.get("positions"),
        )
    )


def accept_tree(
    tree: DraftTree,
    target_token_ids: Any,
    *,
    remaining: Any = None,
    stop_token_ids: Any = None,
    backend: str | Backend | None = None,
    validate: bool | None = None,
) -> Acceptance:
    """Keep the longest path of the tree that the target agrees with.

    Walk from the root: go to the child whose token is the target's choice (of equal tokens, the lowest index); stop
    where there is none, where the choice is a stop token, or where ``lengths`` has reached the request's ``remaining``.

    Parameters
    ----------
    tree : DraftTree
        The drafted trees.
    target_token_ids : array, int32, shape (B, N)
        The target's choice after each node, −1 where it has none; unused slots are not read.
    remaining : array, int32, shape (B,), optional
        Tokens that each request may still emit; 0 is an inert request, which keeps nothing and is finished.
    stop_token_ids : array, int32, shape (any,), optional
        Tokens that end a request; one that is met is emitted, as the bonus.
    backend : str, optional
        Who does the work.
    validate : bool, optional
        Whether to check values; by default on the host only.

    Returns
    -------
    Acceptance
        The kept path, its length (also the tokens emitted: kept drafts and the bonus), the bonus token, and whether
        the request is finished.

    Raises
    ------
    ValueError, TypeError
        A shape, type, parent or range, by name.

    Examples
    --------
    >>> from ddtree import tree_from_parents
    >>> tree = tree_from_parents(np.array([[5, 7, 8, 9]]), np.array([[-1, 0, 0, 2]]))
    >>> kept = accept_tree(tree, np.array([[8, 0, 9, 4]], np.int32))
    >>> kept.node_indices.tolist(), kept.lengths.tolist(), kept.bonus_token_ids.tolist()
    ([[0, 2, 3]], [3], [4])
    """
    optional = {"remaining": remaining, "stop_token_ids": stop_token_ids}
    named = {"target_token_ids": target_token_ids} | {k: v for k, v in optional.items() if v is not None}
    call = Call("accept_tree", backend, named, tree)
    call.check_tree()
    call.check("target_token_ids", ("B", "N"), INTS)
    if remaining is not None:
        call.check("remaining", ("B",), INTS)
    if stop_token_ids is not None:
        call.check("stop_token_ids", ("stops",), INTS)
    if call.validates(validate):
        check_tree_values(call)
        used = np.arange(call.dims["N"]) < to_numpy(call.tree.node_counts)[:, None]
        call.check_range("target_token_ids", -1, INT32_MAX, where=used)
        if remaining is not None:
            call.check_range("remaining", 0, INT32_MAX)
        if stop_token_ids is not None:
            call.check_range("stop_token_ids", 0, INT32_MAX)
    call.narrow("target_token_ids", *(name for name, value in optional.items() if value is not None))
    return call.run(  # type: ignore[no-any-return]
        lambda op: op(
            call.tree,
            call["target_token_ids"],
            remaining=call.arrays.get("remaining"),
            stop_token_ids=call.arrays.get("stop_token_ids"),
        )
    )


def compact_cache(
    kv_cache: Any,
    page_table: Any,
    prefix_lens: Any,
    acceptance: Acceptance,
    *,
    backend: str | Backend | None = None,
    validate: bool | None = None,
) -> None:
    """Move the cache rows of the accepted nodes up behind the prefix, in place, in all layers.

    Row ``prefix_len + node_indices[k]`` becomes row ``prefix_len + k`` for every k below ``lengths``, as if all were
    read before any is written. Rows from ``prefix_len + lengths`` on, and everything outside the verify window, keep
    their bytes. The caller adds ``lengths`` to ``prefix_lens`` afterwards.

    Parameters
    ----------
    kv_cache : array, any float, or integer of 16, 32 or 64 bits, shape (layers, pages, S, C + R)
        Written in place.
    page_table : array, int32, shape (B, max_pages)
        Row r of request b is row ``r % S`` of page ``page_table[b, r // S]``.
    prefix_lens : array, int32, shape (B,)
        Committed rows before this round.
    acceptance : Acceptance
        From :func:`accept_tree`.
    backend : str, optional
        Who does the work.
    validate : bool, optional
        Whether to check values; by default on the host only.

    Raises
    ------
    ValueError, TypeError
        A shape, type, page or path that does not fit, by name; nothing is written then.
    """
    named = {"kv_cache": kv_cache, "page_table": page_table, "prefix_lens": prefix_lens}
    call = Call("compact_cache", backend, named, acceptance)
    call.check("kv_cache", ("layers", "pages", "S", "C + R"), (*FLOATS, *CACHE_INTS), written=True)
    call.check("page_table", ("B", "max_pages"), INTS)
    call.check("prefix_lens", ("B",), INTS)
    call.check_record(
        "acceptance",
        {
            "node_indices": (("B", "L + 1"), "int32"),
            "lengths": (("B",), "int32"),
            "bonus_token_ids": (("B",), "int32"),
            "finished": (("B",), "bool"),
        },
    )
    if call.validates(validate):
        lengths, nodes = to_numpy(call.acceptance.lengths), to_numpy(call.acceptance.node_indices)
        most = call.dims["L + 1"]
        if ((lengths < 0) | (lengths > most)).any():
            raise ValueError(f"acceptance.lengths must lie in 0 … {most}, got {lengths.tolist()}")
        kept = np.arange(most) < lengths[:, None]
        root = np.arange(most) == 0
        wrong = kept & np.where(root, nodes != 0, nodes <= np.roll(nodes, 1, axis=1))
        if wrong.any():
            b, k = first(wrong)
            raise ValueError(
                f"acceptance.node_indices[{b}] must begin with the root, 0, and rise, "
                f"got {int(nodes[b, k])} at place {k}"
            )
        check_pages(call, np.where(kept, nodes.astype(np.int64) + 1, 0).max(1, initial=0), written=True)
    call.narrow("page_table", "prefix_lens")
    call.run(lambda op: op(call["kv_cache"], call["page_table"], call["prefix_lens"], call.acceptance))
