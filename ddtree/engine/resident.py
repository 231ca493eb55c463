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
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ddtree.arrays import array_namespace, free_bytes, use_stream_of
from ddtree.checks import INT32_MAX
from ddtree.engine.cache import PagedCache, Pages, new_array
from ddtree.engine.graphs import Readback, Readbacks, Repeated, free_pools
from ddtree.engine.prompts import MOST_ROWS, Part, PromptPass, parts_of
from ddtree.engine.records import RESIDENT_STAGES, Round
from ddtree.engine.run import Run, checked_draft, joined, name_of, one_token_each
from ddtree.ops import accept_tree, build_tree, compact_cache, tree_positions
from ddtree.protocols import CachingTarget, KVCache, ResidentDraft, ResidentDrafter, ResidentState, Target
from ddtree.trees import Acceptance, DraftTree

__all__ = ["ResidentRun", "RoundLoop", "RoundLoops", "RoundState"]

LATE = 4
"""Rounds that may be under way while the host has not read what they emitted."""

KEPT_LOOPS = 4
"""Captured loops that an engine keeps for runs to come."""

KEPT_PASSES = 8
"""Shapes of prompts that a loop keeps captured passes for."""

LEAST_STOPS = 4
"""Room for stop tokens, so that runs with few and with none share a loop."""

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
    stops: int
    sampling: tuple[Any, ...]
    hidden_layers: tuple[int, ...]
    drafter: int

    @classmethod
    def of(cls, run: ResidentRun) -> LoopKey:
        """The key of a run's loop."""
        stops = max(LEAST_STOPS, 1 << (len(run.stop_tokens) - 1).bit_length())
        greedy = run.sampling["temperature"] == 0
        sampling = () if greedy else tuple(run.sampling[name] for name in ("temperature", "top_p", "seed"))
        return cls(*run.plan[:3], run.max_batch, stops, sampling, run.hidden_layers, id(run.drafter))


class RoundLoop(Repeated):
    """B slots, their cache, the round over them and the passes that fill them, each captured when it has run once."""

    def __init__(self, run: ResidentRun, width_in_pages: int, like: Any) -> None:
        super().__init__(array_namespace(like))
        plan, B, xp = run.plan, run.max_batch, self.xp
        self.drafter = run.drafter  # kept alive: its id is in the key
        (_, self.pages, page_size, _), self.width_in_pages, self.like = like.shape, width_in_pages, like
        self.ops = importlib.import_module("ddtree.reference" if xp is np else "ddtree.kernels.cupy")
        self.ints = xp.zeros((len(SLOT_INTS), B), np.int32)
        self.state = RoundState(
            tokens=xp.zeros((B, width_in_pages * page_size), np.int32),
            keys=xp.zeros(B, np.int64),
            page_table=xp.zeros((B, width_in_pages), np.int32),
            **dict(zip(SLOT_INTS, self.ints, strict=True)),
        )
        self.stops = xp.zeros(run.key.stops, np.int32)
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
        self.readbacks = Readbacks(xp)
        self.passes: OrderedDict[tuple[int, int], PromptPass] = OrderedDict()

    def close(self) -> None:
        """Let go of what is captured: the passes know their loop, and would wait with it for the garbage collector."""
        for work in (self, *self.passes.values()):
            work.replay = None
        self.passes.clear()

    def has_room(self, pages: Pages) -> bool:
        """Whether all of a run's pages are there, and places for those of its longest request."""
        return bool(self.pages >= pages.count and self.width_in_pages >= pages.table.shape[1])

    def reset(self, stops: NDArray[np.int32]) -> None:
        """Free all slots, for a new run."""
        self.ints[...] = 0
        room = np.full(len(self.stops), INT32_MAX, np.int32)  # which is no token
        room[: len(stops)] = stops
        self.stops[...] = self.xp.asarray(room)
        if self.resident_draft is not None:
            for slot in range(len(self.state.lengths)):
                self.resident_draft.end(slot)

    def pass_of(self, part: Part) -> PromptPass:
        """A pass of a part's shape: of a small one the same each time, while it is among those last used."""
        shape = part.places, part.width
        if part.places * part.width > MOST_ROWS:
            return PromptPass(self, *shape)
        if shape not in self.passes:
            self.passes[shape] = PromptPass(self, *shape)
        self.passes.move_to_end(shape)
        if len(self.passes) > KEPT_PASSES:
            self.passes.popitem(last=False)
        return self.passes[shape]

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

    def round(self, run: ResidentRun) -> None:
        """Launch a round of every slot, from draft to commit."""
        s, xp, backend = self.state, self.xp, run.engine.backend
        tree, faults = self.draft_tree(run)
        output = run.forward(tree, KVCache(self.like, s.page_table, s.prefix_lens))
        positions = None
        if run.sampling["temperature"] > 0:
            positions = tree_positions(tree.depths, s.prefix_lens, backend=backend, validate=False)
        choices = run.choose(output.logits, positions, s.keys)
        acceptance = accept_tree(
            tree, choices, remaining=s.remaining, stop_token_ids=self.stops, backend=backend, validate=False
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

    def take(self, key: LoopKey) -> RoundLoop | None:
        """The loop of ``key``, if there is one, for one run alone."""
        return self._loops.pop(key, None)

    def keep(self, key: LoopKey, loop: RoundLoop) -> None:
        """Keep a loop."""
        self._loops[key] = loop
        self.shrink(KEPT_LOOPS)

    def shrink(self, count: int) -> None:
        """Let go of those that were not used for longest, until there are at most ``count``."""
        while len(self._loops) > count:
            self._loops.popitem(last=False)[1].close()
        free_pools()

    def clear(self) -> None:
        """Let go of all loops, their caches and their graphs."""
        self.shrink(0)


class Flight(NamedTuple):
    """What the device is at or has done, and the host has not read yet: a prefill or a round."""

    requests: NDArray[np.int64]
    """Of a prefill those whose prompts end in it, of a round those in its slots."""
    places: NDArray[np.int64]
    """Rows of what comes back, one a request."""
    prompts: PromptPass | None
    """Of a prefill its pass, whose memory the device is at until then."""
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
        self.torn = False  # whether launches have been left half done
        self.stream: Any = contextlib.nullcontext()
        if len(self.committed) and self.xp is not np:
            with use_stream_of(self.cache.like):
                self.stream = self.xp.cuda.get_current_stream()

    def open_cache(self) -> PagedCache:
        """Pages of the array of a loop: of one that an earlier run has captured, if it has room, or of a new one."""
        target, pages = self.engine.target, self.pages()
        assert not isinstance(target, CachingTarget)  # the engine has seen to that
        self.key, self.table = LoopKey.of(self), pages.table
        loop = self.engine.loops.take(self.key)
        if loop is None:
            loop = self.new_loop(target, pages, pages.count, pages.table.shape[1])
        elif not loop.has_room(pages):
            count, width = _grown(loop.pages, pages.count), _grown(loop.width_in_pages, pages.table.shape[1])
            if self.engine.cache_rows is not None:
                count = max(pages.count, min(count, self.engine.cache_rows // self.engine.page_size))
            size, xp = loop.like.nbytes // loop.pages * count, loop.xp
            loop.close()
            loop = None  # its cache goes first
            free_pools()
            if xp is not np and size > free_bytes(xp) // 2:  # passes need room too
                count = pages.count
            loop = self.new_loop(target, pages, count, width)
        self.loop = loop
        return PagedCache(target, pages, self.engine.backend, loop.like)

    def new_loop(self, target: Target, pages: Pages, count: int, width_in_pages: int) -> RoundLoop:
        """A loop of ``count`` pages, or of no more than are needed where there is no room for so many."""
        loops = self.engine.loops
        loops.shrink(KEPT_LOOPS - 1)
        while True:
            try:
                return RoundLoop(self, width_in_pages, new_array(target, pages, count))
            except MemoryError:
                if count > pages.count:
                    count = pages.count
                elif len(loops):
                    loops.clear()  # what other batches have captured goes
                else:
                    raise

    def steps(self) -> Iterator[Round | None]:
        """Run to the end: None for emissions, or a round once it is read, where rounds are shown."""
        try:
            if len(self.committed):
                with self.on_its_stream(), self.launching():
                    self.loop.reset(self.stop_tokens)
            while self.waiting or self.active:
                with self.on_its_stream():  # once for as many steps as nobody wants to see
                    record = self.next_shown()
                yield record
        finally:
            if self.flight:
                self.flight[-1].readback.wait()
            if len(self.committed):
                if self.torn:
                    self.loop.close()
                else:
                    self.engine.loops.keep(self.key, self.loop)
            self.forget()

    @contextlib.contextmanager
    def launching(self) -> Iterator[None]:
        """Do what leaves the loop of no use to other runs if it is left in the middle."""
        self.torn = True
        yield
        self.torn = False

    def next_shown(self) -> Round | None:
        """Do steps until there are emissions or a round to be shown, or nothing is left to do."""
        self.emissions, record = [], None
        while record is None and not self.emissions and (self.waiting or self.active):
            record = self.step()
        return record

    def step(self) -> Round | None:
        """Begin requests that there is room for and start a round if it can be of use, or read what was started."""
        if len(self.flight) > LATE:
            with self.timed("rounds"):
                return self.read()
        admitted = self.admit()
        if admitted:
            with self.timed("prefill"), self.launching():
                self.begin(admitted)
        with self.timed("rounds"):
            started = self.is_of_use() and (self.drafts_here() or not self.flight)
            if not started:
                return self.read()
            self.start_round()
            return None

    def begin(self, requests: list[int]) -> None:
        """Run prompts, and put their requests and the token after each into free slots."""
        slots = np.flatnonzero(self.slots < 0)[: len(requests)].tolist()
        states: list[list[dict[int, Any]]] = [[] for _ in requests]
        for part in parts_of(self.committed.prompt_lens[requests].tolist(), self.engine.prefill_chunk):
            prompts = self.loop.pass_of(part)
            with self.naming("the prefill", [requests[i] for i in part.prompts]):
                ended = prompts.start(part, slots, requests, self)
            self.take_off(ended, [prompts.choices], prompts)
            for i, rows in zip(part.prompts, prompts.kept_states(), strict=True):
                states[i].append(rows)
        for slot, request, parts in zip(slots, requests, states, strict=True):
            self.slots[slot] = request
            prompt = self.committed.prompt(request)
            if self.loop.resident_draft is not None:
                self.loop.resident_draft.begin(slot, request, prompt, len(prompt), joined(parts))
            elif self.drafter is not None:
                self.prompt_states[request] = joined(parts)
            self.began.append(request)

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
        with self.naming("a round", self.active), self.launching():
            self.loop.repeat(lambda: self.loop.round(self))
        arrays = [self.loop.record]
        if self.shows_rounds:
            tree, choices, acceptance = self.loop.outputs
            arrays += [getattr(tree, name) for name in TREE_ARRAYS]
            arrays += [choices, *(getattr(acceptance, f.name) for f in fields(Acceptance))]
        self.take_off(self.slots, arrays)

    def take_off(self, requests: NDArray[np.int64], arrays: list[Any], prompts: PromptPass | None = None) -> None:
        """Have what a prefill or a round left behind come to the host: rows of ``requests``, −1 where there is none."""
        places = np.flatnonzero(requests >= 0)
        requests = requests[places]
        self.under_way[requests] += 1
        self.flight.append(Flight(requests, places, prompts, self.loop.readbacks.start(arrays)))

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
        requests, places, prompts, readback = self.flight.popleft()
        arrays = readback.wait()
        self.under_way[requests] -= 1
        if prompts is not None:
            if not len(requests):  # all of them go on
                return None
            for request in self.commit(requests.tolist(), one_token_each(arrays[0][places]), of_round=False):
                self.began.remove(request)  # it never drafted
                self.free(request)
            return None
        counts = arrays[0][places, 0].astype(np.int64)
        emitted = counts > 0
        if not emitted.all():
            silent = requests[~emitted].tolist()
            if set(silent).intersection(self.active):  # who has ended is active no more
                raise RuntimeError(f"requests {silent}: a round must emit a token, and accept_tree kept none")
            requests, places, counts = requests[emitted], places[emitted], counts[emitted]
            if not len(requests):
                return None
        record = arrays[0][places]
        if self.drafter is not None:
            self.kept.update(zip(requests.tolist(), counts.tolist(), strict=True))
        shown = record[:, 2:].copy()  # without what was wrong with drafts
        shown[:, 0] = counts
        roots = self.committed.roots(requests) if self.shows_rounds else None  # before what follows them is appended
        for request in self.commit(requests.tolist(), shown.reshape(-1).data):
            self.free(request)
        if record[:, 1].any():
            self.check_faults(requests, record)
        if not self.shows_rounds:
            return None
        kept = _shown_round(tuple(requests.tolist()), [array[places] for array in arrays[1:]], self.loop.outputs[0])
        if self.plan.budget == 0:  # a tree of the root alone is the state itself, which the round has changed since
            kept.tree.token_ids[:, 0], kept.tree.node_counts[:] = roots, 1
        return kept

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


def _grown(room: int, needed: int) -> int:
    """Room for what is needed, twice what there was if that is too little: runs that grow outgrow few loops."""
    return room if needed <= room else max(needed, 2 * room)


def _shown_round(requests: tuple[int, ...], arrays: list[Any], like: DraftTree) -> Round:
    """A round as the host's is: of the requests that were running."""
    rows = iter(arrays)
    tree = DraftTree(
        **{name: next(rows) for name in TREE_ARRAYS}, max_depth=like.max_depth, num_candidates=like.num_candidates
    )
    choices = np.where(tree.depths >= 0, next(rows), np.int32(-1))
    return Round(requests, tree, choices, Acceptance(*rows))
