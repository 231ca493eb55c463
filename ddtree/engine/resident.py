"""Rounds that stay where the target is: the host starts them, and reads what they emitted a few rounds late.

A batch has B slots. A slot holds one request after another; what is committed there, the cache's page table and how
many tokens remain are arrays on the device, and a round over all slots, from draft to commit, is a fixed list of
launches: one CUDA graph, captured once and replayed. A slot whose request has finished is inert: nothing of it
is drafted, run or written until the host, which learns of it late, has a waiting request begin there.

Every round has N = 1 + budget node slots a request, however few are in use. NumPy runs the same code, without a graph.
"""

from __future__ import annotations

import contextlib
import importlib
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ddtree.arrays import array_namespace, use_stream_of
from ddtree.checks import INT32_MAX
from ddtree.engine.cache import PagedCache, Pages
from ddtree.engine.graphs import Readback, captured
from ddtree.engine.records import RESIDENT_STAGES, Round
from ddtree.engine.run import Run, checked_draft, name_of
from ddtree.ops import accept_tree, build_tree, compact_cache, tree_positions
from ddtree.protocols import CachingTarget, KVCache, ResidentDraft, ResidentDrafter, ResidentState
from ddtree.trees import Acceptance, DraftTree

__all__ = ["ResidentRun", "RoundLoop", "RoundLoops", "RoundState"]

LATE = 4
"""Rounds that may be under way while the host has not read what they emitted."""

KEPT_LOOPS = 4
"""Captured loops that an engine keeps for runs to come."""

FAULTS = {
    1: "log_probs must be at most 0: pass log-probs, not logits",
    2: "log_probs must not exceed their left neighbour: sort each depth, likeliest first (topk_log_probs does)",
    3: "token_ids must be in 0 … {last}",
    4: "token_ids of a depth must be distinct",
    5: "log_probs must be numbers up to a row's first -inf, got NaN",
}
"""What the codes of ``guard_draft`` say."""


@dataclass(kw_only=True)
class RoundState(ResidentState):
    """All that a round changes in its slots.

    Attributes
    ----------
    prefix_lens : array, int32, shape (B,)
        Committed rows of the cache, ``lengths - 1``; 0 in a free slot.
    running : array, int32, shape (B,)
        1 where tokens remain, else 0.
    keys : array, int64, shape (B,)
        Key of each request's noise.
    page_table : array, int32, shape (B, max_pages)
        Of the cache.
    """

    prefix_lens: Any
    running: Any
    keys: Any
    page_table: Any


class LoopKey(NamedTuple):
    """What a captured round cannot change."""

    depth: int
    budget: int
    topk: int
    slots: int
    num_stops: int
    sampling: tuple[tuple[str, Any], ...]
    hidden_layers: tuple[int, ...]
    drafter: int


class RoundLoop:
    """B slots, their cache and the round over them, which is captured when it has run once."""

    def __init__(self, run: ResidentRun, pages: Pages, like: Any) -> None:
        plan, B = run.plan, run.max_batch
        self.drafter = run.drafter  # kept alive: its id is in the key
        self.pages, self.width_in_pages, self.like = pages.count, pages.table.shape[1], like
        self.xp = xp = array_namespace(like)
        self.ops = importlib.import_module("ddtree.reference" if xp is np else "ddtree.kernels.cupy")
        ints = {name: xp.zeros(B, np.int32) for name in SLOT_INTS}
        self.state = RoundState(
            tokens=xp.zeros((B, self.width_in_pages * pages.page_size), np.int32),
            keys=xp.zeros(B, np.int64),
            page_table=xp.zeros((B, self.width_in_pages), np.int32),
            **ints,
        )
        self.stops = xp.zeros(len(run.stop_tokens), np.int32)
        self.record = xp.zeros((B, plan.depth + 4), np.int32)
        self.no_faults = xp.zeros((B, 2), np.int32)
        self.root_tree = _root_trees(xp, self.state, plan.depth)
        self.first_nodes = xp.arange(B)[:, None] * (1 + plan.budget)
        # of a drafter on the host: where its drafts are put
        self.log_probs = xp.full((B, plan.depth, plan.topk), -np.inf, np.float32)
        self.token_ids = xp.full((B, plan.depth, plan.topk), -1, np.int32)
        self.resident_draft: ResidentDraft | None = None
        self.width = plan.topk  # K of the drafts
        self.outputs: tuple[DraftTree, Any, Acceptance]
        self.rounds = 0
        self.replay: Callable[[], None] | None = None

    def reset(self, stops: NDArray[np.int32]) -> None:
        """Free all slots, for a new run."""
        for name in ("lengths", "remaining", "running", "prefix_lens", "kept"):
            getattr(self.state, name)[...] = 0
        self.stops[...] = self.xp.asarray(stops)
        if self.resident_draft is not None:
            for slot in range(len(self.state.lengths)):
                self.resident_draft.end(slot)

    def open_drafter(self, run: ResidentRun, hidden_states: dict[int, Any]) -> None:
        """Make room for hidden states as wide as those of a prefill, and have the drafter open its slots."""
        if run.drafter is None or self.resident_draft is not None or self.state.hidden_states:
            return
        shape = (run.max_batch, run.plan.depth + 1)
        self.state.hidden_states.update(
            {layer: self.xp.zeros((*shape, rows.shape[-1]), rows.dtype) for layer, rows in hidden_states.items()}
        )
        if isinstance(run.drafter, ResidentDrafter):
            self.resident_draft = run.drafter.open_resident(self.state, run.plan.depth, run.plan.topk)

    def step(self, run: ResidentRun) -> None:
        """Do one round: the first as it is, later ones by the graph that the second captures."""
        if self.rounds == 0:
            self.round(run)
        else:
            if self.replay is None:
                self.replay = captured(self.xp, lambda: self.round(run))
            self.replay()
        self.rounds += 1

    def round(self, run: ResidentRun) -> None:
        """Launch a round of every slot, from draft to commit."""
        s, xp, backend = self.state, self.xp, run.engine.backend
        tree, faults = self.draft_tree(run)
        output = run.forward(tree, KVCache(self.like, s.page_table, s.prefix_lens))
        positions = None
        if run.sampling["temperature"] > 0:
            positions = tree_positions(tree.depths, s.prefix_lens, backend=backend, validate=False)
        choices = run.choose(output.logits, positions, s.keys)
        stops = self.stops if len(self.stops) else None
        acceptance = accept_tree(
            tree, choices, remaining=s.remaining, stop_token_ids=stops, backend=backend, validate=False
        )
        if tree.num_slots > 1:
            compact_cache(self.like, s.page_table, s.prefix_lens, acceptance, backend=backend, validate=False)
        for layer, kept in s.hidden_states.items():
            states = output.hidden_states[layer]
            nodes = self.first_nodes + xp.maximum(acceptance.node_indices, 0)
            kept[...] = states.reshape(-1, states.shape[-1])[nodes]
        self.ops.commit_round(s, tree, acceptance, faults, self.record)
        self.outputs = tree, choices, acceptance

    def draft_tree(self, run: ResidentRun) -> tuple[DraftTree, Any]:
        """The draft trees of all slots, without a node in inert ones, and what was wrong with their drafts."""
        s, plan = self.state, run.plan
        if plan.budget == 0:
            return self.root_tree, self.no_faults
        log_probs, token_ids = self.log_probs, self.token_ids
        if self.resident_draft is not None and run.drafter is not None:
            most = (run.max_batch, plan.depth, plan.topk)
            log_probs, token_ids = checked_draft(run.drafter, self.resident_draft.draft(), most, run.native)
        self.width = log_probs.shape[2]
        log_probs, faults = self.ops.guard_draft(log_probs, token_ids, s.remaining, vocab_size=run.engine.vocab_size)
        tree = build_tree(log_probs, token_ids, s.roots, budget=plan.budget, backend=run.engine.backend, validate=False)
        return replace(tree, node_counts=tree.node_counts * s.running), faults


TREE_ARRAYS = ("token_ids", "parents", "depths", "ranks", "scores", "node_counts", "visibility_words")
SLOT_INTS = ("lengths", "roots", "prompt_lens", "remaining", "kept", "prefix_lens", "running")
"""Fields of a state with one int32 a slot."""


def _root_trees(xp: Any, state: RoundState, depth: int) -> DraftTree:
    """Trees of the root alone, which follow the state."""
    B = len(state.roots)
    column = (B, 1)
    return DraftTree(
        token_ids=state.roots.reshape(column),
        parents=xp.full(column, -1, np.int32),
        depths=xp.zeros(column, np.int32),
        ranks=xp.full(column, -1, np.int32),
        scores=xp.zeros(column, np.float64),
        node_counts=state.running,
        visibility_words=xp.ones((B, 1, 1), np.uint32),
        max_depth=depth,
        num_candidates=1,
    )


class RoundLoops:
    """The loops that an engine has captured and no run is using, the last used last."""

    def __init__(self) -> None:
        self._loops: OrderedDict[LoopKey, RoundLoop] = OrderedDict()

    def __len__(self) -> int:
        return len(self._loops)

    @property
    def all(self) -> list[RoundLoop]:
        """Every loop."""
        return list(self._loops.values())

    def take(self, key: LoopKey, pages: Pages) -> RoundLoop | None:
        """The loop of ``key``, for one run alone; one that has no room for all of ``pages`` is let go of."""
        found = self._loops.pop(key, None)
        fits = found is not None and found.pages >= pages.count and found.width_in_pages >= pages.table.shape[1]
        return found if fits else None

    def keep(self, key: LoopKey, loop: RoundLoop) -> None:
        """Keep a loop."""
        self._loops[key] = loop
        self.shrink(KEPT_LOOPS)

    def shrink(self, count: int) -> None:
        """Let go of those that were not used for longest, until there are at most ``count``."""
        while len(self._loops) > count:
            self._loops.popitem(last=False)

    def clear(self) -> None:
        """Let go of all loops, their caches and their graphs."""
        self._loops.clear()


class Flight(NamedTuple):
    """What the device is at or has done, and the host has not read yet: a prefill or a round."""

    requests: NDArray[np.int64]
    """Of a prefill its requests, of a round each slot's, −1 where there was none."""
    of_round: bool
    readback: Readback


class ResidentRun(Run):
    """A run whose rounds are those of a :class:`RoundLoop`."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.shows_rounds = False
        self.seconds = dict.fromkeys(RESIDENT_STAGES, 0.0)
        self.flight: deque[Flight] = deque()
        self.slots = np.full(self.max_batch, -1)  # each slot's request
        self.under_way = np.zeros(len(self.committed), np.int64)  # in how many flights each request is
        self.kept: dict[int, int] = {}  # rows that each request's last round kept
        self.prompt_states: dict[int, dict[int, Any]] = {}  # for a drafter on the host, until its first draft
        self.stream: Any = contextlib.nullcontext()
        if len(self.committed) and self.xp is not np:
            with use_stream_of(self.cache.like):
                self.stream = self.xp.cuda.get_current_stream()

    def open_cache(self) -> PagedCache:
        """Pages of the array of a loop: of one that an earlier run has captured, if it has room, or of a new one."""
        loops, pages, target = self.engine.loops, self.pages(), self.engine.target
        assert not isinstance(target, CachingTarget)  # the engine has seen to that
        sampling = tuple(sorted(self.sampling.items(), key=lambda item: item[0]))
        self.key = LoopKey(
            *self.plan[:3], self.max_batch, len(self.stop_tokens), sampling, self.hidden_layers, id(self.drafter)
        )
        loop, self.table = loops.take(self.key, pages), pages.table
        if loop is not None:
            self.loop = loop
            return PagedCache(target, pages, self.engine.backend, loop.like)
        loops.shrink(KEPT_LOOPS - 1)
        try:
            cache = PagedCache(target, pages, self.engine.backend)
        except MemoryError:
            if not len(loops):
                raise
            loops.clear()  # what other batches have captured goes first
            cache = PagedCache(target, pages, self.engine.backend)
        self.loop = RoundLoop(self, pages, cache.like)
        return cache

    def steps(self) -> Iterator[Round | None]:
        """Run to the end: None for emissions, or a round once it is read, where rounds are shown."""
        whole = not len(self.committed)
        try:
            if len(self.committed):
                with self.on_its_stream():
                    self.loop.reset(self.stop_tokens)
            while self.waiting or self.active:
                with self.on_its_stream():  # once for as many steps as nobody wants to see
                    record = self.next_shown()
                yield record
            whole = True
        finally:
            if self.flight:
                self.flight[-1].readback.wait()
            if whole and len(self.committed):  # else what is captured may be half done
                self.engine.loops.keep(self.key, self.loop)
            self.forget()

    def next_shown(self) -> Round | None:
        """Do steps until there are emissions or a round to be shown, or nothing is left to do."""
        self.emissions, record = [], None
        while record is None and not self.emissions and (self.waiting or self.active):
            record = self.step()
        return record

    def step(self) -> Round | None:
        """Begin requests that there is room for, start a round if it can be of use, and read what has to be read."""
        admitted = self.admit()
        if admitted:
            with self.timed("prefill"):
                self.begin(admitted)
        with self.timed("rounds"):
            started = self.is_of_use() and (self.drafts_here() or not self.flight)
            if started:
                self.start_round()
            return self.read() if not started or len(self.flight) > LATE else None

    def begin(self, requests: list[int]) -> None:
        """Run prompts, and put their requests and the token after each into free slots."""
        choices, hidden_states = self.prefill(requests)
        self.take_off(np.array(requests), False, [choices])
        self.loop.open_drafter(self, hidden_states[0])
        slots = np.flatnonzero(self.slots < 0)[: len(requests)].tolist()
        self.fill(slots, requests, choices)
        for slot, request, states in zip(slots, requests, hidden_states, strict=True):
            self.slots[slot] = request
            prompt = self.committed.prompt(request)
            if self.loop.resident_draft is not None:
                self.loop.resident_draft.begin(slot, request, prompt, len(prompt), states)
            else:
                self.prompt_states[request] = states
            self.began.append(request)

    def fill(self, slots: list[int], requests: list[int], choices: Any) -> None:
        """Set the state of slots to that of requests whose prompts have been run."""
        s, xp = self.loop.state, self.xp
        in_row = slots == list(range(slots[0], slots[0] + len(slots)))  # slices cost less than lists of places
        rows = xp.asarray(np.array(slots))
        at = slice(slots[0], slots[0] + len(slots)) if in_row else rows
        prompts = np.zeros((len(slots), int(self.committed.prompt_lens[requests].max())), np.int32)
        for row, request in zip(prompts, requests, strict=True):
            row[: self.committed.prompt_lens[request]] = self.committed.prompt(request)
        lens = xp.asarray(self.committed.prompt_lens[requests].astype(np.int32))
        left = xp.asarray(self.committed.remaining[requests].astype(np.int32) - 1)
        ended = (choices < 0) | (choices[:, None] == self.loop.stops).any(axis=1)
        s.tokens[at, : prompts.shape[1]] = xp.asarray(prompts)
        s.tokens[rows, lens] = choices
        s.page_table[at, : self.table.shape[1]] = xp.asarray(self.table[requests])
        s.lengths[at], s.prefix_lens[at], s.prompt_lens[at] = lens + 1, lens, lens
        s.roots[at], s.remaining[at], s.kept[at] = xp.maximum(choices, 0), xp.where(ended, 0, left), 0
        s.running[at] = s.remaining[at] > 0
        s.keys[at] = xp.asarray(self.keys[requests])

    def is_of_use(self) -> bool:
        """Whether a round more may emit something: each of those under way emits a token, or its request has ended."""
        return bool((self.committed.remaining[self.active] > self.under_way[self.active]).any())

    def drafts_here(self) -> bool:
        """Whether rounds need nothing of the host: there is no drafter, or it drafts on the device."""
        return self.drafter is None or self.loop.resident_draft is not None

    def start_round(self) -> None:
        """Start a round of all slots, with the drafts of a drafter on the host, and the way of its record home."""
        if not self.drafts_here():
            self.send_drafts()
        with self.naming("a round", self.active):
            self.loop.step(self)
        arrays = [self.loop.record]
        if self.shows_rounds:
            tree, choices, acceptance = self.loop.outputs
            arrays += [getattr(tree, name) for name in TREE_ARRAYS]
            arrays += [choices, *(getattr(acceptance, f.name) for f in fields(Acceptance))]
        self.take_off(self.slots.copy(), True, arrays)

    def take_off(self, requests: NDArray[np.int64], of_round: bool, arrays: list[Any]) -> None:
        """Have what a prefill or a round left behind come to the host."""
        self.flight.append(Flight(requests, of_round, Readback(self.xp, arrays)))
        self.under_way[requests[requests >= 0]] += 1

    def send_drafts(self) -> None:
        """Have the drafter draft for the active requests, and put its drafts where the round reads them."""
        loop, xp = self.loop, self.xp
        slots = [self.slot_of(request) for request in self.active]
        roots = loop.state.roots[xp.asarray(np.array(slots))]
        log_probs, token_ids = self.draft(
            roots, [self.last_states(r, slot) for r, slot in zip(self.active, slots, strict=True)]
        )
        loop.log_probs[...] = -np.inf
        at, width = xp.asarray(np.array(slots)), log_probs.shape[2]
        loop.log_probs[at, :, :width] = log_probs
        loop.token_ids[at, :, :width] = xp.where((token_ids >= 0) & (token_ids <= INT32_MAX), token_ids, -1)

    def last_states(self, request: int, slot: int) -> dict[int, Any]:
        """Hidden states of the rows that the last pass added for a request: its prompt's or those of its last round."""
        if request in self.prompt_states:
            return self.prompt_states.pop(request)
        return {
            layer: states[slot, : self.kept[request]].copy() for layer, states in self.loop.state.hidden_states.items()
        }

    def read(self) -> Round | None:
        """Wait for the oldest of what is under way, and commit what it emitted."""
        requests, of_round, readback = self.flight.popleft()
        arrays = readback.wait()
        self.under_way[requests[requests >= 0]] -= 1
        if not of_round:
            for request in self.commit(requests, arrays[0][:, None], np.ones(len(requests), np.int64), of_round=False):
                self.began.remove(request)  # it never drafted
                self.free(request)
            return None
        record = arrays[0]
        silent = requests[(requests >= 0) & (record[:, 0] == 0)]
        if set(silent.tolist()).intersection(self.active):  # who has ended is active no more
            raise RuntimeError(f"requests {silent.tolist()}: a round must emit a token, and accept_tree kept none")
        shown = np.flatnonzero((requests >= 0) & (record[:, 0] > 0))
        if not shown.size:
            return None
        requests, counts = requests[shown], record[shown, 0].astype(np.int64)
        if self.drafter is not None:
            self.kept.update(zip(requests.tolist(), counts.tolist(), strict=True))
        for request in self.commit(requests, record[shown, 3:], counts):
            self.ended.append(request)
            self.free(request)
        self.check_faults(requests, record[shown])
        if not self.shows_rounds:
            return None
        return _shown_round(tuple(requests.tolist()), [array[shown] for array in arrays[1:]], self.loop.outputs[0])

    def check_faults(self, requests: NDArray[np.int64], record: NDArray[np.int32]) -> None:
        """Raise what was wrong with a request's draft, of which nothing was drafted: its tokens are right."""
        for b in np.flatnonzero(record[:, 1]):
            d, k = divmod(int(record[b, 2]), self.loop.width)
            what = FAULTS[int(record[b, 1])].format(last=self.engine.vocab_size - 1)
            raise ValueError(f"drafter {name_of(self.drafter)}, request {requests[b]}: {what}; depth {d + 1}, rank {k}")

    def slot_of(self, request: int) -> int:
        """Where a request is that has begun and not been seen to end."""
        return int(np.flatnonzero(self.slots == request)[0])

    def free(self, request: int) -> None:
        """Give a finished request's slot to those who wait."""
        slot = self.slot_of(request)
        self.slots[slot] = -1
        self.kept.pop(request, None)
        self.prompt_states.pop(request, None)
        if self.loop.resident_draft is not None:
            self.loop.resident_draft.end(slot)

    def leaves_out_unused(self, shape: tuple[int, ...], wanted: tuple[int, ...], tree: DraftTree) -> bool:
        """No: every round has the same shapes."""
        return False

    @contextlib.contextmanager
    def on_its_stream(self) -> Iterator[None]:
        """Work on the stream on which the run began."""
        with use_stream_of(self.cache.like), self.stream:
            yield


def _shown_round(requests: tuple[int, ...], arrays: list[Any], like: DraftTree) -> Round:
    """A round as the host's is: of the requests that were running."""
    rows = iter(arrays)
    tree = DraftTree(
        **{name: next(rows) for name in TREE_ARRAYS}, max_depth=like.max_depth, num_candidates=like.num_candidates
    )
    choices = np.where(tree.depths >= 0, next(rows), np.int32(-1))
    return Round(requests, tree, choices, Acceptance(*rows))
