"""One call of ``generate`` under way: its requests, who of them waits, runs or is done, and what they have emitted."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from ddtree.arrays import array_namespace, dtype_name, import_array, to_numpy, use_stream_of
from ddtree.engine.cache import PagedCache, Pages
from ddtree.engine.committed import Committed
from ddtree.engine.records import STAGES, Emission, FinishReason, Generation, Round
from ddtree.ops import choose_tokens
from ddtree.protocols import CachingTarget, DraftContext, Drafter, Policy, RequestCache, TargetOutput
from ddtree.trees import Acceptance, DraftTree

if TYPE_CHECKING:
    from ddtree.engine.engine import Engine

__all__ = [
    "NonFiniteLogitsError",
    "Plan",
    "Run",
    "checked_draft",
    "converted",
    "joined",
    "name_of",
    "one_token_each",
]

Record = TypeVar("Record", DraftTree, Acceptance)


class NonFiniteLogitsError(RuntimeError):
    """The target's logits after a committed token hold NaN or +inf, or nothing finite, so that no token follows."""


class Plan(NamedTuple):
    """What a mode drafts a round."""

    depth: int
    budget: int
    topk: int
    policy: Policy | None


class Run(ABC):
    """What a run is, however its rounds are made: its steps are :class:`ddtree.engine.rounds.HostRun`'s and others'.

    Attributes
    ----------
    waiting : deque of int
        Requests that have not begun, in order.
    active : list of int
        Requests that have begun and not finished, in the order of the batch.
    committed : Committed
        What each request has.
    emissions : list of Emission
        What the last step emitted, where someone asked for emissions.
    """

    def __init__(
        self,
        engine: Engine,
        plan: Plan,
        prompts: list[NDArray[np.int32]],
        max_new_tokens: int,
        stops: list[int],
        keys: list[int],
        sampling: dict[str, Any],
    ) -> None:
        self.engine, self.plan, self.sampling = engine, plan, sampling
        self.committed = Committed(prompts, max_new_tokens)
        self.waiting, self.active = deque(range(len(prompts))), list[int]()
        self.max_batch = min(engine.max_batch or len(prompts), len(prompts))
        self.stop_tokens, self.stop_set = np.array(stops, np.int32), frozenset(stops)
        self.keys = np.array(keys, np.int64)
        # a policy is shown every draft, even one that drafts nothing of it
        drafts = plan.depth > 0 and (plan.budget > 0 or plan.policy is not None)
        self.drafter = engine.drafter if drafts else None
        self.hidden_layers = tuple(getattr(self.drafter, "hidden_layers", ()))
        self.began: list[int] = []
        self.ended: list[int] = []
        self.emissions: list[Emission] = []
        self.shows_emissions = self.shows_rounds = True
        self.seconds = dict.fromkeys(STAGES, 0.0)
        if prompts:
            # The last round may begin one token before the end, and its tree stands behind that.
            self.most_rows = [len(p) + max_new_tokens + 1 + plan.budget for p in prompts]
            self.cache = self.open_cache()
            self.xp = array_namespace(import_array(self.cache.like))
            self.stops = self.xp.asarray(self.stop_tokens)

    def open_cache(self) -> RequestCache:
        """The target's own cache, if it keeps one, or pages of its array."""
        engine, target = self.engine, self.engine.target
        if isinstance(target, CachingTarget):
            return target.open_cache(self.most_rows)
        return PagedCache(target, self.pages(), engine.backend)

    def pages(self) -> Pages:
        """Pages for as many requests as run at a time."""
        engine = self.engine
        return Pages(self.most_rows, engine.page_size, self.max_batch, engine.cache_rows)

    @abstractmethod
    def steps(self) -> Iterator[Round | None]:
        """Run to the end, a step at a time: a prefill, which is no round (None), or a round, if it is kept."""

    def generation(self, rounds: list[Round]) -> Generation:
        """What has been committed until now."""
        return Generation(
            tokens=[self.committed.new_tokens(request) for request in range(len(self.committed))],
            finish_reasons=list(self.committed.finish_reasons),
            rounds=rounds,
            tokens_per_round=self.committed.tokens_per_round(),
            seconds=self.seconds,
            prompt_lens=self.committed.prompt_lens.tolist(),
        )

    def admit(self) -> list[int]:
        """Take waiting requests, in order, into the batch, as far as there is room for them."""
        admitted: list[int] = []
        while self.waiting and len(self.active) < self.max_batch:
            if isinstance(self.cache, PagedCache) and not self.cache.admit(self.waiting[0]):
                break
            admitted.append(self.waiting.popleft())
            self.active.append(admitted[-1])
        return admitted

    def forward(self, tree: DraftTree, cache: Any, *, last_only: bool = False) -> TargetOutput:
        """Run the target, and see that there are logits of every token after every node that was asked about."""
        output = self.engine.target.forward(tree, cache, hidden_layers=self.hidden_layers, last_only=last_only)
        if not isinstance(output, TargetOutput):
            raise TypeError(f"target.forward must return a TargetOutput, got {type(output).__name__}")
        wanted = (tree.batch_size, 1 if last_only else tree.num_slots, self.engine.vocab_size)
        shape = tuple(np.shape(output.logits))
        if shape != wanted and (last_only or not self.leaves_out_unused(shape, wanted, tree)):
            raise ValueError(f"target.forward must return logits of shape {wanted}, got {shape}")
        missing = [layer for layer in self.hidden_layers if layer not in output.hidden_states]
        if missing:
            raise ValueError(f"target.forward must return the hidden states of layers {missing}, which were asked for")
        for layer in self.hidden_layers:
            got = tuple(getattr(output.hidden_states[layer], "shape", ()))
            if len(got) != 3 or got[0] != tree.batch_size or got[1] > tree.num_slots or got[1] < shape[1]:
                raise ValueError(
                    f"target.forward must return hidden states of layer {layer} as an array of shape "
                    f"({tree.batch_size}, {tree.num_slots}, D), got {got or type(output.hidden_states[layer]).__name__}"
                )
        return output

    @abstractmethod
    def leaves_out_unused(self, shape: tuple[int, ...], wanted: tuple[int, ...], tree: DraftTree) -> bool:
        """Whether logits of another shape are those of fewer slots, of which no request uses more."""

    def choose(self, logits: Any, positions: Any, keys: Any) -> Any:
        """The choice after each slot, (B, N) for logits (B, N, V); without noise, no positions are needed."""
        xp = self.xp
        noise = {} if positions is None else {"positions": xp.ascontiguousarray(positions)}
        noise |= {"request_ids": xp.asarray(keys)}
        return choose_tokens(xp.ascontiguousarray(logits), validate=False, **noise, **self.sampling)

    def draft(self, roots: Any, hidden_states: list[dict[int, Any]]) -> tuple[Any, Any]:
        """Ask the drafter for drafts of the active requests, and see that they are that and no larger than asked for.

        Parameters
        ----------
        roots : array, int32, shape (B,)
            Their last committed tokens, where the target is.
        hidden_states : list of dict of int to array
            Of the rows that the last pass added for each.
        """
        requests = list(self.active)
        draft = self.ask(
            DraftContext(
                request_ids=list(requests),
                tokens=[self.committed.tokens(r) for r in requests],
                root_token_ids=roots.copy(),
                hidden_states=hidden_states,
                began=self.began,
                ended=self.ended,
            )
        )
        return self.checked(draft)

    def ask(self, context: DraftContext) -> Any:
        """The drafter's answer, whatever it is."""
        assert self.drafter is not None
        try:
            draft = self.drafter(context, self.plan.depth, self.plan.topk)
        except Exception as error:
            requests = ", ".join(map(str, context.request_ids))
            error.add_note(f"drafter {name_of(self.drafter)} drafted for requests {requests}")
            raise
        self.began, self.ended = [], []
        return draft

    def checked(self, draft: Any) -> tuple[Any, Any]:
        """An answer of the form of a draft of the active requests, no larger than asked for."""
        assert self.drafter is not None
        return checked_draft(self.drafter, draft, (len(self.active), self.plan.depth, self.plan.topk), self.drafted)

    def commit(self, requests: Sequence[int], emitted: memoryview, *, of_round: bool = True) -> list[int]:
        """Append what requests emitted, whose last tokens may end them.

        Parameters
        ----------
        requests : sequence of int
            Who emitted something: one or more.
        emitted : memoryview of int32
            Of each as many numbers: how many tokens, one or more, and then these, as ``emitted_tokens`` returns them.
        of_round : bool
            Whether it was a round, or a prefill.

        Returns
        -------
        list of int
            Those that have ended, which are out of the batch then, and, if it was a round, among ``ended``.

        Raises
        ------
        RuntimeError
            A request has emitted nothing, or what is no token; what the others emitted is appended.
        """
        width, at = len(emitted) // len(requests), 0
        ended: list[int] = []
        fault: tuple[int, int] | None = None
        for request in requests:
            count = emitted[at]
            last = emitted[at + count]
            if count < 1 or last < 0:
                fault = fault or (request, count)
            else:
                tokens, stopped = emitted[at + 1 : at + 1 + count], last in self.stop_set
                over = self.committed.append(request, tokens, of_round=of_round) == 0 or stopped
                if over:
                    self._end(request, "stop" if stopped else "length")
                    ended.append(request)
                if self.shows_emissions:
                    reason = self.committed.finish_reasons[request] if over else None
                    self.emissions.append(Emission(request, np.array(tokens), reason))
            at += width
        if of_round:  # who ends in a prefill never drafted
            self.ended += ended
        if fault is not None:
            raise self._at_fault(*fault)
        return ended

    def _end(self, request: int, reason: FinishReason) -> None:
        self.committed.finish_reasons[request] = reason
        self.active.remove(request)
        self.cache.release(request)

    def _at_fault(self, request: int, count: int) -> RuntimeError:
        """What to say of a request that emitted ``count`` tokens of which the last is none."""
        if count < 1:
            return RuntimeError(f"request {request}: a round must emit a token, but accept_tree kept {count}")
        return NonFiniteLogitsError(
            f"request {request}: the target's logits after position {self.committed.lengths[request] + count - 2} hold "
            "NaN or +inf, or nothing finite, so that no token can follow it"
        )

    def forget(self) -> None:
        """Tell the drafter, once the run is over or left, of the requests whose end it has not been told of."""
        forget = getattr(self.drafter, "forget", None)
        if forget is not None:
            forget([*self.ended, *self.active])

    def drafted(self, array: Any) -> Any:
        """A drafter's array as rounds take it."""
        return self.native(array)

    @contextmanager
    def naming(self, what: str, requests: list[int]) -> Iterator[None]:
        """Name the requests for which there was no room."""
        try:
            yield
        except MemoryError as error:
            tokens = ", ".join(str(self.committed.prompt_lens[r]) for r in requests)
            raise MemoryError(
                f"no room for {what} of requests {', '.join(map(str, requests))}, prompts of {tokens} tokens: {error}; "
                "pass a smaller max_batch, budget or prefill_chunk"
            ) from error

    def native(self, array: Any) -> Any:
        """``array`` as the kind that the target's cache is, C-contiguous."""
        array = to_numpy(array) if self.xp is np else self.xp.asarray(import_array(array))
        return self.xp.ascontiguousarray(array)

    def on_its_stream(self) -> AbstractContextManager[None]:
        """Work where the target's cache is, on the stream that its library works on now."""
        return use_stream_of(self.cache.like)

    @contextmanager
    def timed(self, stage: str) -> Iterator[None]:
        """Add the wall time of a part of the run to ``seconds``."""
        start = time.perf_counter()
        yield
        self.seconds[stage] += time.perf_counter() - start


def checked_draft(drafter: Drafter, draft: Any, most: tuple[int, int, int], native: Any) -> tuple[Any, Any]:
    """A drafter's answer as two arrays of one shape, (requests, depth, k) with k up to ``most[2]``."""
    name = f"drafter {name_of(drafter)}"
    if not isinstance(draft, tuple | list) or len(draft) != 2:
        raise TypeError(f"{name} must return (log_probs, token_ids), got {type(draft).__name__}")
    try:
        log_probs, token_ids = (native(array) for array in draft)
    except TypeError as error:
        raise TypeError(f"{name} must return two arrays: {error}") from error
    requests, depth, topk = most
    wanted = f"({requests}, {depth}, k) with k in 1 … {topk}"
    shape = tuple(log_probs.shape)
    if len(shape) != 3 or shape[:2] != (requests, depth) or not 1 <= shape[2] <= topk:
        raise ValueError(f"{name} must return log_probs of shape {wanted}, got {shape}")
    if tuple(token_ids.shape) != shape:
        raise ValueError(f"{name} must return token_ids of log_probs' shape {shape}, got {tuple(token_ids.shape)}")
    if dtype_name(log_probs) != "float32" or dtype_name(token_ids) not in ("int32", "int64"):
        raise TypeError(
            f"{name} must return float32 log_probs and int32 token_ids, "
            f"got {dtype_name(log_probs)} and {dtype_name(token_ids)}"
        )
    return log_probs, token_ids


def joined(parts: list[dict[int, Any]]) -> dict[int, Any]:
    """Hidden states of a prompt's pieces, one behind the other."""
    if len(parts) == 1:
        return parts[0]
    return {layer: array_namespace(parts[0][layer]).concatenate([p[layer] for p in parts]) for layer in parts[0]}


def converted(record: Record, convert: Any) -> Record:
    """The same record with every array converted."""
    arrays = {f.name: getattr(record, f.name) for f in fields(record)}
    return replace(record, **{name: convert(a) for name, a in arrays.items() if not isinstance(a, int)})


def one_token_each(tokens: NDArray[np.int32]) -> memoryview:
    """What a prefill emits, as ``commit`` takes it."""
    return np.stack([np.ones_like(tokens), tokens], axis=1).astype(np.int32, copy=False).reshape(-1).data


def name_of(drafter: Drafter | None) -> str:
    """What messages call a drafter."""
    return str(getattr(drafter, "__name__", type(drafter).__name__))
