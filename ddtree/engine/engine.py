"""Decoding: each round drafts a tree, has the target check all of it in one pass, and commits what they agree on.

Letters: B requests running, L draft depth limit, K candidates a depth, N = 1 + budget node slots, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ddtree.backends import get_backend
from ddtree.checks import INT32_MAX, integer, listed, real
from ddtree.engine.records import Emission, Generation, Round
from ddtree.engine.resident import ResidentRun, RoundLoops
from ddtree.engine.rounds import HostRun
from ddtree.engine.run import NonFiniteLogitsError, Plan, Run, name_of
from ddtree.policies import check_policy, policy_name
from ddtree.protocols import CachingTarget, Drafter, Policy, Target
from ddtree.tokens import stop_tokens, token_row

__all__ = ["Engine", "NonFiniteLogitsError"]

Mode = Literal["tree", "chain", "autoregressive"]


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
    max_batch : int, optional
        The most requests that run at a time, 1 and up: others wait, in order, and take the place of finished ones. By
        default all prompts run at once. Not for a :class:`ddtree.protocols.CachingTarget`.
    cache_rows : int, optional
        The most rows that the cache has, in whole pages, of all requests that run together; by default as many as the
        ``max_batch`` longest need. With fewer, a request waits for the pages of others; one that needs more than all
        is refused.
    resident : bool, optional
        Whether rounds stay where the target is, in one CUDA graph that is captured once, while the host reads what was
        emitted a few rounds late (see ``ddtree/engine/resident.py``). By default they do for a target on a GPU that
        can be captured (it has an attribute ``capturable``, and it is true), unless a policy, which is the host's,
        makes the trees. The tokens are the same.

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
        max_batch: int | None = None,
        cache_rows: int | None = None,
        resident: bool | None = None,
    ) -> None:
        if isinstance(target, type):
            raise TypeError(f"target must be a target, got the class {target.__name__}: pass {target.__name__}(…)")
        if not callable(getattr(target, "forward", None)):
            raise TypeError(f"target must have the methods of ddtree.protocols.Target, got {type(target).__name__}")
        self.target = target
        self.vocab_size = integer("target.vocab_size", target.vocab_size, 1, INT32_MAX)
        if isinstance(drafter, type):
            raise TypeError(f"drafter must be a drafter, got the class {drafter.__name__}: pass {drafter.__name__}(…)")
        if drafter is not None and not callable(drafter):
            raise TypeError(f"drafter must be callable as (context, depth, topk), got {type(drafter).__name__}")
        # a smaller vocabulary may be the same one, which models pad to a rounder size
        drafted = getattr(drafter, "vocab_size", 0)
        if drafted > self.vocab_size:
            raise ValueError(
                f"drafter {name_of(drafter)} has a vocabulary of {drafted} tokens and the target one of "
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
        self.max_batch = None if max_batch is None else integer("max_batch", max_batch, 1, INT32_MAX)
        self.cache_rows = None if cache_rows is None else integer("cache_rows", cache_rows, 1, INT32_MAX)
        self.resident = self._checked_residence(resident)
        self.loops = RoundLoops()

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
        keep_rounds: bool | None = None,
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
        keep_rounds : bool, optional
            Whether the generation has its ``rounds``. By default it has, but for resident rounds, of which every tree
            would have to come to the host; those that ``on_round`` asks for do.

        Returns
        -------
        Generation

        Raises
        ------
        ValueError, TypeError
            An argument, by name, before any work; or a draft, naming drafter and request.
        NonFiniteLogitsError
            The target's logits after a committed token were unusable: request and position are named.
        MemoryError
            The cache, or a pass, found no room on the device: the requests are named.

        Notes
        -----
        Whatever is raised once work has begun, by the target, the drafter or a callback too, has an attribute
        ``generation``, a :class:`Generation` of all that was committed before. The engine can be used again.
        """
        kept = not self.resident if keep_rounds is None else keep_rounds
        run = self._begin(prompts, max_new_tokens, stop_token_ids, temperature, top_p, seed, mode, request_ids)
        run.shows_emissions, run.shows_rounds = on_emission is not None, kept or on_round is not None
        rounds: list[Round] = []
        try:
            for record in run.steps():
                if on_emission is not None:
                    for emission in run.emissions:
                        on_emission(emission)
                if record is not None:
                    if kept:
                        rounds.append(record)
                    if on_round is not None:
                        on_round(record)
        except BaseException as error:
            error.generation = run.generation(rounds)  # type: ignore[attr-defined]
            raise
        return run.generation(rounds)

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
        return _emissions(run)

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
    ) -> Run:
        """Check the arguments of a generation, and open it."""
        plan = self._plan(mode)
        tokens, max_new_tokens = self._checked_prompts(prompts, max_new_tokens, plan.budget)
        stops = stop_tokens(stop_token_ids, self.vocab_size)
        temperature, top_p = real("temperature", temperature, least=0.0), real("top_p", top_p)
        if not 0 < top_p <= 1:
            raise ValueError(f"top_p must be over 0 and at most 1, got {top_p}")
        seed = integer("seed", seed, 0, 2**64 - 1)
        keys = list(range(len(tokens))) if request_ids is None else listed("request_ids", request_ids)
        if len(keys) != len(tokens):
            raise ValueError(f"request_ids must have one entry a prompt, {len(tokens)}, got {len(keys)}")
        keys = [integer(f"request_ids[{i}]", key, 0, 2**63 - 1) for i, key in enumerate(keys)]
        sampling = {"temperature": temperature, "top_p": top_p, "seed": seed, "backend": self.backend}
        try:
            return self.new_run(plan, tokens, max_new_tokens, stops, keys, sampling)
        except MemoryError as error:
            if str(error).startswith("no room"):
                raise
            raise MemoryError(
                f"no room for {len(tokens)} requests of up to {max_new_tokens} new tokens ({error}): pass a smaller "
                "max_new_tokens, or fewer prompts"
            ) from error

    def new_run(self, plan: Plan, *arguments: Any) -> Run:
        """Open a generation whose arguments have been checked; its rounds are made as the target has them made."""
        kind = ResidentRun if self.resident and plan.policy is None else HostRun
        return kind(self, plan, *arguments)

    def _plan(self, mode: Mode) -> Plan:
        plans = {
            "tree": Plan(self.depth, self.budget, self.topk, self.policy),
            "chain": Plan(self.depth, self.depth, 1, None),
            "autoregressive": Plan(0, 0, 1, None),
        }
        if mode not in plans:
            raise ValueError(f"mode must be one of {', '.join(map(repr, plans))}, got {mode!r}")
        if self.drafter is None and mode != "autoregressive":
            raise ValueError(f"mode {mode!r} needs a drafter, and drafter is None: pass one, or mode='autoregressive'")
        return plans[mode]

    def _checked_prompts(
        self, prompts: Iterable[ArrayLike], max_new_tokens: int, budget: int
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
            rows = tokens.size + max_new_tokens + 1 + budget
            needed = -(-rows // self.page_size) * self.page_size
            if self.cache_rows is not None and needed > self.cache_rows:
                raise ValueError(
                    f"prompts[{i}] needs {rows} cache rows, for {tokens.size} tokens, max_new_tokens = "
                    f"{max_new_tokens} and a tree, which are {needed} in whole pages of {self.page_size}, and the "
                    f"cache has {self.cache_rows}: pass cache_rows={needed} or more, or fewer tokens"
                )
            checked.append(tokens)
        return checked, max_new_tokens

    def _checked_residence(self, resident: bool | None) -> bool:
        """Whether rounds stay on the device, and that they can where it was asked for."""
        keeps_cache = isinstance(self.target, CachingTarget)
        if keeps_cache and (self.max_batch is not None or self.cache_rows is not None):
            raise ValueError(
                "max_batch and cache_rows must be left out for a target that keeps its cache itself, "
                f"got max_batch={self.max_batch} and cache_rows={self.cache_rows}"
            )
        if resident is not None and not isinstance(resident, bool | np.bool_):
            raise TypeError(f"resident must be True, False or None, got {resident!r}")
        if resident is None:
            return bool(getattr(self.target, "capturable", False)) and self.policy is None and not keeps_cache
        if resident and (keeps_cache or self.policy is not None):
            what = (
                "a policy, which is the host's" if self.policy is not None else "a target that keeps its cache itself"
            )
            raise ValueError(f"resident must be left out or False with {what}, got {resident}")
        return bool(resident)


def _emissions(run: Run) -> Iterator[Emission]:
    try:
        for _ in run.steps():
            yield from run.emissions
    except GeneratorExit:
        raise
    except BaseException as error:
        error.generation = run.generation([])  # type: ignore[attr-defined]
        raise
