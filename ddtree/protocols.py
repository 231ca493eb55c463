"""The contract in types: what an array is, the signature of every operation, drafters and targets.

Letters: B requests, L draft depth limit, K candidates a depth, N = 1 + budget node slots, V vocabulary, H heads,
C kv_lora_rank, R qk_rope_head_dim, S page size. What each argument means stands once, in the docstring of the public
function of the same name in :mod:`ddtree.ops`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from ddtree.trees import Acceptance, DraftTree

__all__ = [
    "OPS",
    "AcceptTree",
    "Array",
    "BuildTree",
    "CachingTarget",
    "ChooseTokens",
    "CompactCache",
    "DraftContext",
    "Drafter",
    "KVCache",
    "Policy",
    "RequestCache",
    "ResidentDraft",
    "ResidentDrafter",
    "ResidentState",
    "Target",
    "TargetOutput",
    "TopkLogProbs",
    "TreePositions",
    "VerifyAttention",
    "VisibilityWords",
]


@runtime_checkable
class Array(Protocol):
    """What NumPy, CuPy, torch and JAX arrays have in common."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def dtype(self) -> Any: ...

    def __dlpack__(self, *, stream: Any = None) -> Any: ...

    def __dlpack_device__(self) -> tuple[Any, int]: ...


class TopkLogProbs(Protocol):
    """``topk_log_probs``: (B, L, V) logits → (B, L, K) log-probs and token ids."""

    def __call__(self, logits: Any, k: int, *, vocab_size: int | None = None) -> tuple[Any, Any]: ...


class BuildTree(Protocol):
    """``build_tree``: (B, L, K) log-probs and token ids → a draft tree of ``budget`` nodes and the root."""

    def __call__(self, log_probs: Any, token_ids: Any, root_token_ids: Any, *, budget: int) -> DraftTree: ...


class VisibilityWords(Protocol):
    """``visibility_words``: (B, N) parents → (B, N, ⌈N/32⌉) bits of who sees whom."""

    def __call__(self, parents: Any, node_counts: Any) -> Any: ...


class TreePositions(Protocol):
    """``tree_positions``: (B, N) depths → (B, N) sequence positions."""

    def __call__(self, depths: Any, prefix_lens: Any) -> Any: ...


class VerifyAttention(Protocol):
    """``verify_attention``: (B, N, H, C + R) queries over a paged latent cache → (B, N, H, C)."""

    def __call__(
        self,
        q: Any,
        kv_cache: Any,
        page_table: Any,
        prefix_lens: Any,
        tree: DraftTree,
        *,
        scale: float,
        kv_lora_rank: int,
        out: Any = None,
    ) -> Any: ...


class ChooseTokens(Protocol):
    """``choose_tokens``: (B, N, V) logits → (B, N) choices."""

    def __call__(
        self,
        logits: Any,
        *,
        temperature: float = 0.0,
        top_p: float = 1.0,
        seed: int = 0,
        request_ids: Any = None,
        positions: Any = None,
    ) -> Any: ...


class AcceptTree(Protocol):
    """``accept_tree``: a tree and (B, N) choices → the accepted path and the bonus token."""

    def __call__(
        self, tree: DraftTree, target_token_ids: Any, *, remaining: Any = None, stop_token_ids: Any = None
    ) -> Acceptance: ...


class CompactCache(Protocol):
    """``compact_cache``: move the accepted rows of a (layers, pages, S, C + R) cache up behind the prefix, in place."""

    def __call__(self, kv_cache: Any, page_table: Any, prefix_lens: Any, acceptance: Acceptance) -> None: ...


OPS: dict[str, type] = {
    "topk_log_probs": TopkLogProbs,
    "build_tree": BuildTree,
    "visibility_words": VisibilityWords,
    "tree_positions": TreePositions,
    "verify_attention": VerifyAttention,
    "choose_tokens": ChooseTokens,
    "accept_tree": AcceptTree,
    "compact_cache": CompactCache,
}
"""Every operation's name, which is also its function's and its file's in each backend, and its signature."""


@dataclass
class KVCache:
    """A paged latent cache and who owns which of its pages.

    Attributes
    ----------
    data : array, the model's dtype, shape (layers, pages, S, C + R)
        Latent first, rotated key last. Unused rows may hold anything, NaN included.
    page_table : array, int32, shape (B, max_pages)
        Row r of request b is row ``r % S`` of page ``page_table[b, r // S]``.
    prefix_lens : array, int32, shape (B,)
        Committed rows of each request. The root's row is not among them: the next target pass writes it.
    """

    data: Any
    page_table: Any
    prefix_lens: Any


@dataclass
class TargetOutput:
    """What a target pass over a tree gives.

    Attributes
    ----------
    logits : array, float, shape (B, N, V)
        Scores of the token after each node; anything in unused slots. The last slots may be left out where no request
        uses them.
    hidden_states : dict of int to array, float, shape (B, N, hidden_size)
        Of the layers asked for: 0 is the embedding, i the output of layer i (counting from 1).
    """

    logits: Any
    hidden_states: dict[int, Any] = field(default_factory=dict)


class RequestCache(Protocol):
    """The cache of one generation, as the engine uses it: pages of an array, or what a target keeps itself."""

    @property
    def like(self) -> Any:
        """An array of the cache, or any other on its device: what the rounds work on is of its kind and lies there."""
        ...

    def view(self, requests: Sequence[int], prefix_lens: Any, window: Any) -> Any:
        """Return what ``Target.forward`` is given as its cache: an object with ``prefix_lens`` as :class:`KVCache`.

        Parameters
        ----------
        requests : sequence of int
            The requests of the batch, in order. Each was in the last view, which had no other order.
        prefix_lens : array, int32, shape (B,)
            Committed rows of each request.
        window : int or array, int32, shape (B,)
            Rows that are about to be written behind them.
        """
        ...

    def compact(self, view: Any, acceptance: Acceptance) -> None:
        """Move the accepted rows of the last pass, over ``view``, up behind each prefix."""
        ...

    def release(self, request: int) -> None:
        """Take back what a finished request holds; it is in no later view."""
        ...


class Target(Protocol):
    """A model that checks draft trees. Prefill and one-token decoding are trees too: chains of n and of one node."""

    @property
    def vocab_size(self) -> int:
        """V; every token id lies in 0 … V − 1."""
        ...

    def new_cache(self, num_pages: int, page_size: int) -> Any:
        """Return cache storage of shape (layers, num_pages, page_size, C + R); any content will do."""
        ...

    def forward(
        self, tree: DraftTree, cache: KVCache, *, hidden_layers: tuple[int, ...] = (), last_only: bool = False
    ) -> TargetOutput:
        """Write row ``prefix_len + i`` of every node i, in every layer, and return the logits after each node.

        Parameters
        ----------
        tree : DraftTree
            The tokens, depths and visibility to run on.
        cache : KVCache
            Its page table has room for ``prefix_len + node_count`` rows of each request.
        hidden_layers : tuple of int
            Layers whose hidden states the caller wants.
        last_only : bool
            Logits of each request's last node alone, shape (B, 1, V), for a prefill.
        """
        ...


@runtime_checkable
class CachingTarget(Protocol):
    """A target that keeps its cache itself: :class:`Target` with ``open_cache`` in place of ``new_cache``."""

    @property
    def vocab_size(self) -> int:
        """V; every token id lies in 0 … V − 1."""
        ...

    def open_cache(self, most_rows: list[int]) -> RequestCache:
        """Return an empty cache for one generation.

        Parameters
        ----------
        most_rows : list of int
            The most rows that each request needs, one entry a request, those of its last tree included.
        """
        ...

    def forward(
        self, tree: DraftTree, cache: Any, *, hidden_layers: tuple[int, ...] = (), last_only: bool = False
    ) -> TargetOutput:
        """Return the logits after each node; ``cache`` is what ``view`` of the open cache returned."""
        ...


@dataclass
class DraftContext:
    """What a drafter may look at, one entry a request of the current batch.

    Attributes
    ----------
    request_ids : list of int
        Who is in the batch, in order: each request's index among the prompts.
    tokens : list of array, int32, shape (n,)
        Every committed token: the prompt and what was emitted since. The last is the root, whose row is not in
        the target's cache yet.
    root_token_ids : array, int32, shape (B,)
        The last committed token of each request.
    hidden_states : list of dict of int to array, float, shape (rows, hidden_size)
        The target's hidden states of the rows that the last pass added: the prompt's after the prefill, then those
        of the accepted nodes alone. Of the layers in the drafter's ``hidden_layers``.
    began : list of int
        Requests that draft for the first time now.
    ended : list of int
        Requests that finished in the last round and do not come back. Of those that finish in a run's last round no
        draft follows that could say so: see ``forget`` of :class:`Drafter`.
    """

    request_ids: list[int]
    tokens: list[Any]
    root_token_ids: Any
    hidden_states: list[dict[int, Any]]
    began: list[int]
    ended: list[int]


class Drafter(Protocol):
    """Any callable ``(context, depth, topk) -> (log_probs, token_ids)``.

    Both results have shape (B, depth, k) with 1 ≤ k ≤ ``topk``, as :func:`ddtree.build_tree` takes them: float32
    log-probs ≤ 0, non-increasing along k, and int32 ids distinct within a depth; from the first −inf on, nothing is
    drafted at that depth. A drafter that wants the target's hidden states has an attribute ``hidden_layers``, a tuple
    of int.

    A drafter that can work where the target does, without the host in a round, is a :class:`ResidentDrafter` too.

    A drafter that keeps something of each request may have a method ``forget(request_ids)``. When a run is over, or is
    left early, it is called with the requests that no context has reported as ended, known to the drafter or not.
    Requests are known by their index among a generation's prompts, so that such a drafter serves one generation at a
    time on the host: generations that run side by side need one each.
    """

    def __call__(self, context: DraftContext, depth: int, topk: int) -> tuple[Any, Any]: ...


@dataclass
class ResidentState:
    """What a resident drafter may look at: arrays that stay where they are, whose contents each round changes.

    A slot holds one request after another. Just after a request's prefill its row has the prompt and the first new
    token; each round then appends what it emits. Letters: B slots, R the most tokens of a request, D hidden size.

    Attributes
    ----------
    tokens : array, int32, shape (B, R)
        Committed tokens of each slot's request: the prompt, then new ones. The last is the root, whose row is not in
        the target's cache yet. What stands behind them may be anything.
    lengths : array, int32, shape (B,)
        How many tokens those are; 0: a free slot.
    roots : array, int32, shape (B,)
        The last committed token.
    prompt_lens : array, int32, shape (B,)
        Tokens of the prompt.
    remaining : array, int32, shape (B,)
        Tokens that may still be emitted; 0: an inert slot, free or finished. Its other entries may be anything.
    kept : array, int32, shape (B,)
        Rows that the last round kept, 0 … depth + 1; 0 just after a prefill.
    hidden_states : dict of int to array, float, shape (B, depth + 1, D)
        The target's hidden states of those rows, the first ``kept`` of each slot, of the layers in the drafter's
        ``hidden_layers``. They are the rows of the tokens before the root, the last of which is the token at
        ``lengths - 2``.
    """

    tokens: Any
    lengths: Any
    roots: Any
    prompt_lens: Any
    remaining: Any
    kept: Any
    hidden_states: dict[int, Any] = field(default_factory=dict)


class ResidentDraft(Protocol):
    """A drafter at work on the slots of one :class:`ResidentState`, where that state's arrays are."""

    def draft(self) -> tuple[Any, Any]:
        """Draft for every slot from what the state's arrays hold now.

        On a GPU it works on the current stream, does not wait for it, and has no launch whose parameters or addresses
        follow from values, so that it may be captured in a CUDA graph and replayed.

        Returns
        -------
        log_probs : array, float32, shape (B, depth, k)
            As :class:`Drafter` gives them, with 1 ≤ k ≤ ``topk`` the same in every round; anything in inert slots.
        token_ids : array, int32, shape (B, depth, k)
            Their tokens.
        """
        ...

    def begin(self, slot: int, request: int, tokens: Any, prompt_len: int, hidden_states: dict[int, Any]) -> None:
        """Take in a request whose prefill is done, before its first draft: outside a graph, on the same stream.

        Parameters
        ----------
        slot : int
            Which slot it has, 0 … B − 1. The state's entries of the slot are the request's by now.
        request : int
            Its index among the prompts.
        tokens : array, int32, shape (prompt_len,)
            The prompt, on the host. The first new token is on the device alone, in the state.
        prompt_len : int
            How many tokens the prompt has.
        hidden_states : dict of int to array, float, shape (prompt_len, D)
            Of the prompt's rows, where the state is, of the layers in the drafter's ``hidden_layers``.

        Raises
        ------
        ValueError
            The drafter cannot draft for this request. The slots of others are as they were.
        """
        ...

    def end(self, slot: int) -> None:
        """Let go of a slot whose request has finished; one that is free already is no error."""
        ...


@runtime_checkable
class ResidentDrafter(Protocol):
    """A :class:`Drafter` that can also make its drafts on the target's device, without the host in a round."""

    def __call__(self, context: DraftContext, depth: int, topk: int) -> tuple[Any, Any]: ...

    def open_resident(self, state: ResidentState, depth: int, topk: int) -> ResidentDraft:
        """Return a drafter of ``state``'s slots, free at first; ``depth`` and ``topk`` are those of every draft.

        Raises
        ------
        ValueError
            What ``__call__`` refuses of depth and topk, or a state that it cannot draft from.
        """
        ...


class Policy(Protocol):
    """Which tree is made of a draft: ``policy(log_probs, token_ids, root_token_ids, prefix_lens) -> DraftTree``.

    The arguments are a draft as :func:`ddtree.build_tree` takes it, float32 and int32 (B, L, K), each request's last
    committed token, int32 (B,), and its committed cache rows, int32 (B,). The tree has N ≤ 1 + ``budget`` slots, its
    nodes are candidates of the draft with the ranks of :class:`ddtree.DraftTree`, and may be fewer in any request;
    scores are set to the draft's, whatever the policy says. A request's tree follows from its own row of the arguments,
    whoever else is in the batch. A policy decides how many tokens a round emits, never which. See
    :mod:`ddtree.policies`.
    """

    @property
    def budget(self) -> int:
        """The most nodes of a tree besides the root."""
        ...

    def __call__(self, log_probs: Any, token_ids: Any, root_token_ids: Any, prefix_lens: Any) -> DraftTree: ...
