"""Decoding: each round drafts a tree, has the target check all of it in one pass, and commits what they agree on.

Letters: B requests running, L draft depth limit, K candidates a depth, N = 1 + budget node slots, V vocabulary.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import fields, replace
from typing import Any, Literal, NamedTuple, TypeVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ddtree.arrays import array_namespace, dtype_name, export_array, import_array, to_numpy, use_stream_of
from ddtree.backends import get_backend
from ddtree.checks import INT32_MAX, integer, listed, real
from ddtree.engine.cache import PagedCache
from ddtree.engine.records import STAGES, Emission, FinishReason, Generation, Round
from ddtree.ops import accept_tree, build_tree, choose_tokens, tree_positions
from ddtree.policies import check_policy, check_policy_tree, policy_name
from ddtree.protocols import CachingTarget, DraftContext, Drafter, Policy, RequestCache, Target, TargetOutput
from ddtree.tokens import stop_tokens, token_row
from ddtree.trees import Acceptance, DraftTree, chain_tree

__all__ = ["Engine", "NonFiniteLogitsError"]

Mode = Literal["tree", "chain", "autoregressive"]
Record = TypeVar("Record", DraftTree, Acceptance)


class NonFiniteLogitsError(RuntimeError):
    """The target's logits after a committed token hold NaN or +inf, or nothing finite, so that no token follows."""


class Engine:
    """A target model, a drafter, and how much is drafted a round.

    Parameters
    ----------
    target : Target or CachingTarget
        The model whose tokens come out. Its cache's kind of array (NumPy, CuPy) is the one that the rounds work on.
    drafter : Drafter, optional
        Proposes tokens; it changes how fast tokens come, never which. Not needed for ``mode="autoregressive"``.
    depth : int
        L, the most tokens a path of the tree holds besides the root: 0 and up.
    budget : int, optional
        Nodes of a tree besides the root: 0 and up; 16 if left out. With a policy it is the policy's, and left out.
    topk : int, optional
        K, the most candidates that a drafter may give a depth: 1 … V. By default min(budget, V), at least 1: with
        that many, the tree is optimal over the whole vocabulary.
    policy : Policy, optional
        Which tree is made of a draft, see :mod:`ddtree.policies`; by default the ``budget`` likeliest paths. It counts
        in ``mode="tree"``.
    backend : str, optional
        Who does the operations; see :mod:`ddtree.ops`. By default the arrays decide. A policy's own are the policy's.
    page_size : int
        S, rows of a cache page.
    prefill_chunk : int
        The most tokens of a prompt that one pass takes, 1 and up. A pass over n tokens holds n² / 8 bytes of
        visibility, so that a long prompt is taken in pieces; a :class:`ddtree.protocols.CachingTarget` takes it whole.
    max_context : int, optional
        The most tokens, prompt and new ones, that a request may have; if left out the target's ``max_context``, if it
        has one. Nodes that are drafted beyond it have positions up to L higher, and are never committed.

    Examples
    --------
    >>> from ddtree.drafters import NgramDrafter
    >>> from ddtree.engine import ScriptedTarget
    >>> text = np.arange(40) % 10
    >>> engine = Engine(ScriptedTarget([text], vocab_size=10), NgramDrafter(), depth=4, budget=4)
    >>> generation = engine.generate([text[:20]], max_new_tokens=16)
    >>> generation.tokens[0].tolist(), generation.tau
    ([0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 0, 1, 2, 3, 4, 5], 5.0)
    """

    def __init__(
        self,
        target: Target | CachingTarget,
        drafter: Drafter | None = None,
        *,
        depth: int = 7,
        budget: int | None = None,
        topk: int | None = None,
        policy: Policy | None = None,
        backend: str | None = None,
        page_size: int = 16,
        prefill_chunk: int = 2048,
        max_context: int | None = None,
    ) -> None:
        if not callable(getattr(target, "forward", None)):
            raise TypeError(f"target must have the methods of ddtree.protocols.Target, got {type(target).__name__}")
        self.target = target
        self.vocab_size = integer("target.vocab_size", target.vocab_size, 1, INT32_MAX)
        if drafter is not None and not callable(drafter):
            raise TypeError(f"drafter must be callable as (context, depth, topk), got {type(drafter).__name__}")
        # a smaller vocabulary may be the same one, which models pad to a rounder size
        drafted = getattr(drafter, "vocab_size", 0)
        if drafted > self.vocab_size:
            raise ValueError(
                f"drafter {_name(drafter)} has a vocabulary of {drafted} tokens and the target one of "
                f"{self.vocab_size}: pass a drafter of the target's vocabulary"
            )
        self.drafter = drafter
        self.depth = integer("depth", depth, 0, INT32_MAX - 1)
        if policy is not None:
            check_policy("policy", policy)
            if budget is not None:
                raise ValueError(f"budget must be left out with a policy, whose own counts, got {budget!r}")
            budget = integer(f"budget of policy {policy_name(policy)}", policy.budget, 0, INT32_MAX - 1)
        self.policy = policy
        self.budget = integer("budget", 16 if budget is None else budget, 0, INT32_MAX - 1)
        topk = max(1, min(self.budget, self.vocab_size)) if topk is None else topk
        self.topk = integer("topk", topk, 1, self.vocab_size, "the vocabulary size")
        if backend is not None:
            get_backend(backend)  # a wrong name is met here, not in the middle of a round
        self.backend = backend
        self.page_size = integer("page_size", page_size, 1, INT32_MAX)
        self.prefill_chunk = integer("prefill_chunk", prefill_chunk, 1, INT32_MAX)
        max_context = getattr(target, "max_context", None) if max_context is None else max_context
        self.max_context = None if max_context is None else integer("max_context", max_context, 1, INT32_MAX)

    def generate(
        self,
        prompts: Iterable[ArrayLike],
        max_new_tokens: int,
        stop_token_ids: Iterable[int] = (),
        *,
        temperature: float = 0.0,
        top_p: float = 1.0,
        seed: int = 0,
        mode: Mode = "tree",
        request_ids: Iterable[int] | None = None,
        on_round: Callable[[Round], None] | None = None,
        on_emission: Callable[[Emission], None] | None = None,
    ) -> Generation:
        """Continue each prompt: the same tokens in every mode, with any drafter and in any batch.

        Parameters
        ----------
        prompts : sequence of array, int, shape (n,)
            Token ids of each prompt, 0 … V − 1, one or more. No prompts give an empty generation.
        max_new_tokens : int
            The most tokens that a request emits, 1 and up, the prefill's included.
        stop_token_ids : sequence of int
            Tokens, 0 … V − 1, that end a request. The one that is met is its last token.
        temperature : float
            0 is greedy; above it tokens are sampled. See :func:`ddtree.choose_tokens`.
        top_p : float
            Over 0 and at most 1.
        seed : int
            0 … 2⁶⁴ − 1. A token's noise depends on seed, request id and position alone.
        mode : {"tree", "chain", "autoregressive"}
            "chain" drafts one candidate a depth (budget = depth, topk 1); "autoregressive" drafts nothing.
        request_ids : sequence of int, optional
            Key of each request's noise, 0 … 2⁶³ − 1; its index among the prompts if left out. Rounds, drafters and
            messages name a request by that index always.
        on_round : callable, optional
            Called with each :class:`Round` once it is committed.
        on_emission : callable, optional
            Called with each :class:`Emission`: the tokens of one request, as soon as they are committed.

        Returns
        -------
        Generation

        Raises
        ------
        ValueError, TypeError
            An argument, by name, before any work; or a draft, naming drafter and request.
        NonFiniteLogitsError
            The target's logits after a committed token were unusable: request and position are named.
        """
        run = self._begin(prompts, max_new_tokens, stop_token_ids, temperature, top_p, seed, mode, request_ids)
        rounds = []
        for record in run.steps():
            if on_emission is not None:
                for emission in run.emissions:
                    on_emission(emission)
            if record is not None:
                rounds.append(record)
                if on_round is not None:
                    on_round(record)
        return Generation(
            tokens=[sequence.new_tokens for sequence in run.sequences],
            finish_reasons=[sequence.finish_reason for sequence in run.sequences],
            rounds=rounds,
            tokens_per_round=[np.array(sequence.tokens_per_round, np.int32) for sequence in run.sequences],
            seconds=run.seconds,
            prompt_lens=[sequence.prompt_len for sequence in run.sequences],
        )

    def stream(
        self,
        prompts: Iterable[ArrayLike],
        max_new_tokens: int,
        stop_token_ids: Iterable[int] = (),
        *,
        temperature: float = 0.0,
        top_p: float = 1.0,
        seed: int = 0,
        mode: Mode = "tree",
        request_ids: Iterable[int] | None = None,
    ) -> Iterator[Emission]:
        """Continue each prompt, and yield tokens as they are committed: a round's at once, request by request.

        The arguments are those of :meth:`generate`, and are checked before this returns. A caller who needs no more
        may stop iterating: no round is run ahead.

        Yields
        ------
        Emission
            The tokens that one request has emitted since its last one; the last has its finish reason.

        Examples
        --------
        >>> from ddtree.drafters import NgramDrafter
        >>> from ddtree.engine import ScriptedTarget
        >>> text = np.arange(40) % 10
        >>> engine = Engine(ScriptedTarget([text], vocab_size=10), NgramDrafter(), depth=2, budget=2)
        >>> [emission.token_ids.tolist() for emission in engine.stream([text[:20]], 6)]
        [[0], [1, 2, 3], [4, 5]]
        """
        run = self._begin(prompts, max_new_tokens, stop_token_ids, temperature, top_p, seed, mode, request_ids)
        return (emission for _ in run.steps() for emission in run.emissions)

    def _begin(
        self,
        prompts: Iterable[ArrayLike],
        max_new_tokens: int,
        stop_token_ids: Iterable[int],
        temperature: float,
        top_p: float,
        seed: int,
        mode: Mode,
        request_ids: Iterable[int] | None,
    ) -> _Run:
        """Check the arguments of a generation, and open it."""
        tokens, max_new_tokens = self._checked_prompts(prompts, max_new_tokens)
        stops = stop_tokens(stop_token_ids, self.vocab_size)
        temperature, top_p = real("temperature", temperature, least=0.0), real("top_p", top_p)
        if not 0 < top_p <= 1:
            raise ValueError(f"top_p must be over 0 and at most 1, got {top_p}")
        seed = integer("seed", seed, 0, 2**64 - 1)
        plan = self._plan(mode)
        keys = list(range(len(tokens))) if request_ids is None else listed("request_ids", request_ids)
        if len(keys) != len(tokens):
            raise ValueError(f"request_ids must have one entry a prompt, {len(tokens)}, got {len(keys)}")
        keys = [integer(f"request_ids[{i}]", key, 0, 2**63 - 1) for i, key in enumerate(keys)]
        sampling = {"temperature": temperature, "top_p": top_p, "seed": seed, "backend": self.backend}
        return self._new_run(plan, tokens, max_new_tokens, stops, keys, sampling)

    def _new_run(self, plan: _Plan, *arguments: Any) -> _Run:
        return _Run(self, plan, *arguments)

    def _plan(self, mode: Mode) -> _Plan:
        plans = {
            "tree": _Plan(self.depth, self.budget, self.topk, self.policy),
            "chain": _Plan(self.depth, self.depth, 1, None),
            "autoregressive": _Plan(0, 0, 1, None),
        }
        if mode not in plans:
            raise ValueError(f"mode must be one of {', '.join(map(repr, plans))}, got {mode!r}")
        if self.drafter is None and mode != "autoregressive":
            raise ValueError(f"mode {mode!r} needs a drafter, and drafter is None: pass one, or mode='autoregressive'")
        return plans[mode]

    def _checked_prompts(
        self, prompts: Iterable[ArrayLike], max_new_tokens: int
    ) -> tuple[list[NDArray[np.int32]], int]:
        max_new_tokens = integer("max_new_tokens", max_new_tokens, 1, INT32_MAX)
        checked = []
        for i, prompt in enumerate(listed("prompts", prompts)):
            tokens = token_row(f"prompts[{i}]", prompt, self.vocab_size)
            if tokens.size == 0:
                raise ValueError(f"prompts[{i}] must have at least one token, got none: begin with a BOS token")
            if self.max_context is not None and tokens.size + max_new_tokens > self.max_context:
                raise ValueError(
                    f"prompts[{i}] has {tokens.size} tokens and max_new_tokens is {max_new_tokens}: together they must "
                    f"be at most max_context = {self.max_context}, got {tokens.size + max_new_tokens}"
                )
            checked.append(tokens)
        return checked, max_new_tokens


class _Plan(NamedTuple):
    """What a mode drafts a round."""

    depth: int
    budget: int
    topk: int
    policy: Policy | None


class _Sequence:
    """The committed tokens of one request, in a buffer that is long enough for all of them."""

    def __init__(self, prompt: NDArray[np.int32], max_new_tokens: int) -> None:
        self.prompt_len = self.length = len(prompt)
        self.buffer = np.concatenate([prompt, np.empty(max_new_tokens, np.int32)])
        self.tokens_per_round: list[int] = []
        self.finish_reason: FinishReason = "length"

    @property
    def tokens(self) -> NDArray[np.int32]:
        """Prompt and new tokens: a copy, which a drafter may keep, and cannot change what is committed through."""
        copy = self.buffer[: self.length].copy()
        copy.flags.writeable = False
        return copy

    @property
    def root(self) -> int:
        """The last committed token."""
        return int(self.buffer[self.length - 1])

    @property
    def new_tokens(self) -> NDArray[np.int32]:
        return self.buffer[self.prompt_len : self.length].copy()

    @property
    def remaining(self) -> int:
        return len(self.buffer) - self.length

    def append(self, tokens: NDArray[np.int32]) -> None:
        self.buffer[self.length : self.length + len(tokens)] = tokens
        self.length += len(tokens)


class _Run:
    """One call of ``generate`` under way: what is committed, the cache, and who is still running."""

    def __init__(
        self,
        engine: Engine,
        plan: _Plan,
        prompts: list[NDArray[np.int32]],
        max_new_tokens: int,
        stops: list[int],
        keys: list[int],
        sampling: dict[str, Any],
    ) -> None:
        self.engine, self.plan, self.sampling = engine, plan, sampling
        self.sequences = [_Sequence(prompt, max_new_tokens) for prompt in prompts]
        self.active = list(range(len(prompts)))
        self.stop_set = frozenset(stops)
        self.keys = np.array(keys, np.int64)
        # a policy is shown every draft, even one that drafts nothing of it
        drafts = plan.depth > 0 and (plan.budget > 0 or plan.policy is not None)
        self.drafter = engine.drafter if drafts else None
        self.hidden_layers = tuple(getattr(self.drafter, "hidden_layers", ()))
        self.hidden_states: dict[int, dict[int, Any]] = {}
        self.began: list[int] = []
        self.ended: list[int] = []
        self.emissions: list[Emission] = []  # of the last step
        self.seconds = dict.fromkeys(STAGES, 0.0)
        if prompts:
            # The last round may begin one token before the end, and its tree stands behind that.
            self.cache = self._open_cache([len(p) + max_new_tokens + 1 + plan.budget for p in prompts])
            self.xp = array_namespace(import_array(self.cache.like))
            self.stops = self.xp.asarray(np.array(stops, np.int32))

    def _open_cache(self, most_rows: list[int]) -> RequestCache:
        """The target's own cache, if it keeps one, or pages of its array."""
        engine, target = self.engine, self.engine.target
        if isinstance(target, CachingTarget):
            return target.open_cache(most_rows)
        return PagedCache(target, most_rows, engine.page_size, engine.backend)

    def steps(self) -> Iterator[Round | None]:
        """Run to the end: the prefill, which is no round (None), then each round. ``emissions`` are a step's tokens."""
        try:
            if self.active:
                with use_stream_of(self.cache.like):
                    self.prefill()
                yield None
            while self.active:
                with self._round_stream():
                    record = self.round()
                yield record
        finally:
            forget = getattr(self.drafter, "forget", None)
            if forget is not None:
                forget([*self.ended, *self.active])

    def _round_stream(self) -> AbstractContextManager[None]:
        return use_stream_of(self.cache.like)

    def prefill(self) -> None:
        """Run the prompts, a piece of each at a time, and commit the token after each: no round of its own."""
        prompts = [sequence.tokens for sequence in self.sequences]
        lens = np.array([len(prompt) for prompt in prompts], np.int32)
        # a target with a cache of its own takes prompts whole, as it likes them
        whole = isinstance(self.engine.target, CachingTarget)
        most = int(lens.max()) if whole else self.engine.prefill_chunk
        choices = np.zeros((len(prompts), 1), np.int32)
        hidden: list[list[dict[int, Any]]] = [[] for _ in prompts]
        with self._timed("prefill"):
            for start in range(0, int(lens.max()), most):
                requests = np.flatnonzero(lens > start)
                pieces = [prompts[r][start : start + most] for r in requests]
                choices[requests] = self._prefill(requests.tolist(), start, pieces, hidden)
        self._commit(choices, lens - 1, [_joined(parts) for parts in hidden])
        self.began, self.ended = list(self.active), []  # who ended here never drafted

    def _prefill(
        self, requests: list[int], start: int, pieces: list[NDArray[np.int32]], hidden: list[list[dict[int, Any]]]
    ) -> NDArray[np.int32]:
        """Run pieces of prompts that begin at ``start``; return the choice after each and add its hidden states."""
        lens = np.array([len(piece) for piece in pieces], np.int32)
        padded = np.zeros((len(pieces), lens.max()), np.int32)
        for row, piece in zip(padded, pieces, strict=True):
            row[: len(piece)] = piece
        tree = _converted(chain_tree(padded, lens), self._native)
        cache = self.cache.view(requests, np.full_like(lens, start), lens)
        output = self._forward(tree, cache, last_only=True)
        for b, request in enumerate(requests):
            hidden[request].append(self._rows(output.hidden_states, b, np.arange(lens[b])))
        return to_numpy(self._choose(output.logits, self.xp.asarray(start + lens[:, None] - 1), requests))

    def round(self) -> Round:
        """Draft, check, commit; finished requests leave."""
        backend = self.engine.backend
        rows = [self.sequences[r] for r in self.active]
        # The root's own row is written by this round's pass.
        prefix_lens = np.array([sequence.length - 1 for sequence in rows], np.int32)
        roots = self.xp.asarray(np.array([sequence.root for sequence in rows], np.int32))

        with self._timed("draft"):
            log_probs, token_ids = self._draft(roots)
        with self._timed("build_tree"):
            tree = self._build_tree(log_probs, token_ids, roots, prefix_lens)
        with self._timed("forward"):
            cache = self.cache.view(self.active, prefix_lens, tree.num_slots)
            output = self._forward(tree, cache)
        with self._timed("choose_tokens"):
            positions = tree_positions(tree.depths, cache.prefix_lens, backend=backend, validate=False)
            choices = self._choose(output.logits, positions, self.active)
        with self._timed("accept_tree"):
            remaining = self.xp.asarray(np.array([sequence.remaining for sequence in rows], np.int32))
            acceptance = accept_tree(
                tree, choices, remaining=remaining, stop_token_ids=self.stops, backend=backend, validate=False
            )
            kept: Acceptance = _converted(acceptance, to_numpy)  # waits for a GPU
        with self._timed("compact_cache"):
            self.cache.compact(cache, acceptance)

        host_tree = _converted(tree, to_numpy)
        hidden_states = [
            self._rows(output.hidden_states, b, nodes[:length])
            for b, (nodes, length) in enumerate(zip(kept.node_indices, kept.lengths, strict=True))
        ]
        return self._committed(rows, prefix_lens, host_tree, to_numpy(choices), kept, hidden_states)

    def _committed(
        self,
        rows: list[_Sequence],
        prefix_lens: NDArray[np.int32],
        tree: DraftTree,
        choices: NDArray[np.int32],
        kept: Acceptance,
        hidden_states: list[dict[int, Any]],
    ) -> Round:
        """Commit what was kept, and return the round's record; all on the host."""
        requests = tuple(self.active)
        paths = [nodes[:length] for nodes, length in zip(kept.node_indices, kept.lengths, strict=True)]
        emitted = [np.append(tree.token_ids[b, path[1:]], kept.bonus_token_ids[b]) for b, path in enumerate(paths)]
        self._commit(emitted, prefix_lens + kept.lengths - 1, hidden_states)
        for sequence, tokens in zip(rows, emitted, strict=True):
            sequence.tokens_per_round.append(len(tokens))
        # In an unused slot the choice follows from whatever logits the target left there.
        target_token_ids = np.where(tree.depths >= 0, choices, np.int32(-1))
        return Round(requests, tree, target_token_ids, kept)

    def _forward(self, tree: DraftTree, cache: Any, *, last_only: bool = False) -> TargetOutput:
        """Run the target, and see that there are logits of every token after every node that was asked about."""
        output = self.engine.target.forward(tree, cache, hidden_layers=self.hidden_layers, last_only=last_only)
        if not isinstance(output, TargetOutput):
            raise TypeError(f"target.forward must return a TargetOutput, got {type(output).__name__}")
        wanted = (tree.batch_size, 1 if last_only else tree.num_slots, self.engine.vocab_size)
        shape = tuple(np.shape(output.logits))
        if shape != wanted and (last_only or not self._leaves_out_unused(shape, wanted, tree)):
            raise ValueError(f"target.forward must return logits of shape {wanted}, got {shape}")
        missing = [layer for layer in self.hidden_layers if layer not in output.hidden_states]
        if missing:
            raise ValueError(f"target.forward must return the hidden states of layers {missing}, which were asked for")
        return output

    def _leaves_out_unused(self, shape: tuple[int, ...], wanted: tuple[int, ...], tree: DraftTree) -> bool:
        same = len(shape) == 3 and (shape[0], shape[2]) == (wanted[0], wanted[2])
        return same and int(tree.node_counts.max()) <= shape[1] < wanted[1]

    def _draft(self, roots: Any) -> tuple[Any, Any]:
        """Ask the drafter, and see that its answer is a draft of these requests and no larger than asked for."""
        requests = list(self.active)
        if self.drafter is None:
            shape = (len(requests), self.plan.depth, 1)
            return self.xp.full(shape, -np.inf, np.float32), self.xp.full(shape, -1, np.int32)
        context = DraftContext(
            request_ids=list(requests),
            tokens=[self.sequences[r].tokens for r in requests],
            root_token_ids=roots.copy(),
            hidden_states=[self.hidden_states[r] for r in requests],
            began=self.began,
            ended=self.ended,
        )
        return self._checked(self._answer(context))

    def _answer(self, context: DraftContext) -> Any:
        """Ask the drafter."""
        assert self.drafter is not None
        draft = self.drafter(context, self.plan.depth, self.plan.topk)
        self.began, self.ended = [], []
        return draft

    def _checked(self, draft: Any) -> tuple[Any, Any]:
        """See that a drafter's answer is of the form of a draft, and no larger than asked for."""
        requests, (depth, _, topk) = self.active, self.plan[:3]
        name = f"drafter {_name(self.drafter)}"
        if not isinstance(draft, tuple | list) or len(draft) != 2:
            raise TypeError(f"{name} must return (log_probs, token_ids), got {type(draft).__name__}")
        try:
            log_probs, token_ids = (self._drafted(array) for array in draft)
        except TypeError as error:
            raise TypeError(f"{name} must return two arrays: {error}") from error
        wanted = f"({len(requests)}, {depth}, k) with k in 1 … {topk}"
        shape = tuple(log_probs.shape)
        if len(shape) != 3 or shape[:2] != (len(requests), depth) or not 1 <= shape[2] <= topk:
            raise ValueError(f"{name} must return log_probs of shape {wanted}, got {shape}")
        if tuple(token_ids.shape) != shape:
            raise ValueError(f"{name} must return token_ids of log_probs' shape {shape}, got {tuple(token_ids.shape)}")
        if dtype_name(log_probs) != "float32" or dtype_name(token_ids) not in ("int32", "int64"):
            raise TypeError(
                f"{name} must return float32 log_probs and int32 token_ids, "
                f"got {dtype_name(log_probs)} and {dtype_name(token_ids)}"
            )
        return log_probs, token_ids

    def _build_tree(self, log_probs: Any, token_ids: Any, roots: Any, prefix_lens: NDArray[np.int32]) -> DraftTree:
        """Build the trees of a draft whose values are checked, on any device: no id may reach the model's embedding."""
        policy = self.plan.policy
        if policy is None:
            return self._likeliest_tree(log_probs, token_ids, roots, self.plan.budget)
        self._likeliest_tree(log_probs, token_ids, roots, 0)  # the root alone: it checks the draft
        token_ids = token_ids.astype(np.int32, copy=False)
        # copies: what a policy writes into them changes nothing that is committed, and is not what its tree is held to
        tree = policy(log_probs.copy(), token_ids.copy(), roots.copy(), self.xp.array(prefix_lens))
        tree = check_policy_tree(policy, tree, log_probs, token_ids, roots, budget=self.plan.budget)
        return _converted(tree, self._native)

    def _likeliest_tree(self, log_probs: Any, token_ids: Any, roots: Any, budget: int) -> DraftTree:
        def build(rows: slice) -> DraftTree:
            return build_tree(
                log_probs[rows],
                token_ids[rows],
                roots[rows],
                budget=budget,
                vocab_size=self.engine.vocab_size,
                backend=self.engine.backend,
                validate=True,
            )

        try:
            return build(slice(None))
        except ValueError:
            for b, request in enumerate(self.active):  # alone, the request at fault says so
                try:
                    build(slice(b, b + 1))
                except ValueError as error:
                    raise ValueError(f"drafter {_name(self.drafter)}, request {request}: {error}") from error
            raise

    def _choose(self, logits: Any, positions: Any, requests: list[int]) -> Any:
        """The choice after each slot; 0 in the last ones, if the target left out their logits since none is in use."""
        keys = self.xp.asarray(self.keys[requests])
        slots, given = positions.shape[1], logits.shape[1]
        positions = self.xp.ascontiguousarray(positions[:, :given])
        choices = choose_tokens(logits, request_ids=keys, positions=positions, validate=False, **self.sampling)
        return choices if given == slots else self.xp.pad(choices, ((0, 0), (0, slots - given)))

    def _rows(self, hidden_states: dict[int, Any], b: int, path: NDArray[Any]) -> dict[int, Any]:
        """The hidden states of a request's kept nodes, wherever in the tree they stood, for its next draft."""
        nodes = self.xp.asarray(path)
        shown = {layer: hidden_states[layer] for layer in self.hidden_layers}
        return {layer: states[b, export_array(nodes, states)] for layer, states in shown.items()}

    def _commit(
        self, emitted: Iterable[NDArray[np.int32]], last_positions: Any, hidden_states: list[dict[int, Any]]
    ) -> None:
        """Append what each running request emitted, and keep its new rows' hidden states; the finished leave."""
        self.hidden_states, self.emissions = {}, []
        for b, (request, tokens) in enumerate(zip(list(self.active), emitted, strict=True)):
            if tokens[-1] < 0:
                raise NonFiniteLogitsError(
                    f"request {request}: the target's logits after position {int(last_positions[b])} hold "
                    "NaN or +inf, or nothing finite, so that no token can follow it"
                )
            sequence = self.sequences[request]
            sequence.append(tokens)
            stopped = int(tokens[-1]) in self.stop_set
            finished = stopped or sequence.remaining == 0
            if finished:
                sequence.finish_reason = "stop" if stopped else "length"
                self.active.remove(request)
                self.ended.append(request)
                self.cache.release(request)
            self.emissions.append(Emission(request, tokens, sequence.finish_reason if finished else None))
            if not finished:
                self.hidden_states[request] = hidden_states[b]

    def _drafted(self, array: Any) -> Any:
        return self._native(array)

    def _native(self, array: Any) -> Any:
        """``array`` as the kind that the target's cache is, C-contiguous."""
        array = to_numpy(array) if self.xp is np else self.xp.asarray(import_array(array))
        return self.xp.ascontiguousarray(array)

    def _clock(self, stage: str = "", since: float = 0.0) -> float:
        """The time; what has passed since another counts for ``stage``."""
        now = time.perf_counter()
        if stage:
            self.seconds[stage] += now - since
        return now

    @contextmanager
    def _timed(self, stage: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.seconds[stage] += time.perf_counter() - start


def _joined(parts: list[dict[int, Any]]) -> dict[int, Any]:
    """Hidden states of a prompt's pieces, one behind the other."""
    if len(parts) == 1:
        return parts[0]
    return {layer: array_namespace(parts[0][layer]).concatenate([p[layer] for p in parts]) for layer in parts[0]}


def _converted(record: Record, convert: Callable[[Any], Any]) -> Record:
    """The same record with every array converted."""
    arrays = {f.name: getattr(record, f.name) for f in fields(record)}
    return replace(record, **{name: convert(a) for name, a in arrays.items() if not isinstance(a, int)})


def _name(drafter: Drafter | None) -> str:
    return str(getattr(drafter, "__name__", type(drafter).__name__))
