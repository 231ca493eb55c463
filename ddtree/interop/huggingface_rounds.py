"""Rounds of a Hugging Face model whose work outside of its forward stays on the GPU, and is read back once.

Before the forward: the tree, what the model reads of it, and its masks. After it: the choices, what is accepted, and
the cache's compaction. Each half is one CUDA graph of work at fixed addresses, captured in a batch's second round. The
host hands on the drafter's answer and takes the tokens.

A Python statement that runs once a round, between two passes of a model, takes several times what it takes in a loop:
hence what is the same in all rounds is made once, a round's record and a drafter's copies of tokens when they are
looked at, and what neither the GPU nor the next draft waits for is done while the GPU works.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import fields
from time import perf_counter
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ddtree.arrays import (
    array_kind,
    array_namespace,
    device_of,
    export_array,
    import_array,
    torchs_handle,
    torchs_stream,
    use_stream_of,
)
from ddtree.backends import serving
from ddtree.checks import INT32_MAX
from ddtree.engine import Round
from ddtree.engine.committed import Committed
from ddtree.engine.graphs import Repeated, free_pools
from ddtree.engine.rounds import HostRun
from ddtree.interop.huggingface_cache import ModelCache
from ddtree.interop.mirror import Mirror, Where, looked_at, mirror_size
from ddtree.kernels.cupy.copy_rows import word_of
from ddtree.protocols import DraftContext
from ddtree.trees import Acceptance, DraftTree

if TYPE_CHECKING:
    from ddtree.interop.huggingface import HuggingFaceTarget

__all__ = ["DeviceRun", "FetchedRound"]

MASK_VIEWS, MOST_VIEWS = 64, 512
"""Of a mask, that are made at once, and that are kept: each is of another number of columns."""


class DeviceRun(HostRun):
    """A generation whose rounds have a fixed envelope: N = 1 + budget slots of each request, unused ones inert."""

    cache: ModelCache
    _batch: _Batch | None = None

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.target: HuggingFaceTarget = self.engine.target  # type: ignore[assignment]

    def close(self) -> None:
        """Give back what the last batch holds."""
        if self._batch is not None:
            self._batch.close()
            self._batch = None

    def round(self) -> Round:
        """Draft, check, commit; finished requests leave."""
        start = perf_counter()
        batch = self._batch
        if batch is None or batch.requests != self.active:
            self.close()
            with self.on_its_stream():
                batch = self._batch = _Batch(self)
        requests = batch.requests
        # the root's own row is written by this round's pass
        prefix_lens = self.committed.write_standing(requests, batch.standing)
        width = 1 if self.drafter is None else self._take_draft(batch, prefix_lens)
        drafted = perf_counter()
        arguments = batch.build(prefix_lens)
        built = perf_counter()
        target, seconds = self.target, self.seconds
        graded = target.is_grad_enabled()
        target.set_grad_enabled(False)
        try:
            logits, hidden = target.run(arguments, self.hidden_layers)
            passed = perf_counter()
            record = batch.accept(logits, width)
        finally:
            target.set_grad_enabled(graded)
        # what needs no results, while the GPU works at them
        seconds["draft"] += drafted - start
        seconds["build_tree"] += built - drafted
        seconds["forward"] += passed - built
        self.emissions = []
        batch.context = _Context.of(batch, self)
        emitted = batch.emitted()
        if self.hidden_layers:
            batch.context.hidden_states = shown = batch.shown(hidden, self.hidden_layers)
            self.hidden_states.update(zip(requests, shown, strict=True))
        for request in self.commit(requests, emitted):
            del self.hidden_states[request]
        seconds["accept_tree"] += perf_counter() - passed
        return record

    def _take_draft(self, batch: _Batch, prefix_lens: list[int]) -> int:
        """Have the drafter's answer where the tree is built from; return its candidates a depth."""
        batch.context.prefix_lens = prefix_lens
        draft = self.ask(batch.context)
        form, signature = batch.form, _signature(draft)
        if form is None or signature is None or form.signature != signature:
            with self.on_its_stream():
                form = batch.learn_form(draft, signature, *self.checked(draft))
        batch.take(draft, form)
        return form.width

    def drafted(self, array: Any) -> Any:
        """A drafter's array where it is: on the host it is checked before it is sent."""
        native = import_array(array)
        return np.ascontiguousarray(native) if isinstance(native, np.ndarray) else self.native(native)

    def refuse(self, log_probs: Any, token_ids: Any) -> None:
        """Raise what is wrong with a draft, naming drafter and request."""
        with self.on_its_stream():
            roots = self.xp.array(self.committed.roots(np.array(self.active)))
            log_probs, token_ids = self.native(log_probs), self.native(token_ids)
            self.refuse_nan(log_probs)
            self.likeliest_tree(log_probs, token_ids, roots, 0)
        raise AssertionError("a draft was found at fault, and its check finds nothing")


class _Context(DraftContext):
    """What a drafter may look at, as it is now; the tokens are copied if it does."""

    _of: tuple[Committed, Any, list[int]]
    """What is committed, a tensor of the model's and the requests: not the run, which a drafter that keeps its contexts
    would keep, cache and all."""
    prefix_lens: list[int]
    """How many tokens each has before its last one."""

    @classmethod
    def of(cls, batch: _Batch, run: DeviceRun) -> _Context:
        """Of a batch's requests; ``prefix_lens`` and new ``hidden_states`` are set once they are known."""
        requests = batch.requests
        context = cls.__new__(cls)
        context.__dict__ = {
            "_of": batch.of_contexts,
            "request_ids": requests.copy(),
            "hidden_states": [run.hidden_states[r] for r in requests],
            "began": run.began,
            "ended": run.ended,
        }
        return context

    def __reduce__(self) -> tuple[Any, ...]:
        return DraftContext, tuple(getattr(self, field.name) for field in fields(DraftContext))

    @functools.cached_property
    def tokens(self) -> list[Any]:  # type: ignore[override]
        """Every committed token, of each request."""
        committed, _, requests = self._of
        return [committed.tokens(r, n + 1) for r, n in zip(requests, self.prefix_lens, strict=True)]

    @functools.cached_property
    def root_token_ids(self) -> Any:
        """The last of them, where the target is."""
        committed, like, requests = self._of
        roots = committed.roots(np.array(requests), np.array(self.prefix_lens) + 1)
        with use_stream_of(like):
            return array_namespace(import_array(like)).array(roots)


class FetchedRound(Round):
    """A round of which the host has the bytes; its arrays are made of them when they are looked at."""

    _data: memoryview | bytearray
    _layout: list[Where]
    """What is where in them."""
    _max_depth: int
    _width: int

    @classmethod
    def of(cls, attributes: dict[str, Any], width: int) -> FetchedRound:
        """Of these attributes, and of a draft of ``width`` candidates."""
        record = cls.__new__(cls)
        record.__dict__.update(attributes, _width=width)  # of a frozen dataclass
        return record

    def keep(self) -> None:
        """Copy its bytes from where others will be."""
        if type(self._data) is memoryview:
            self.__dict__["_data"] = bytearray(self._data)

    @functools.cached_property
    def _seen(self) -> tuple[DraftTree, NDArray[np.int32], Acceptance]:
        self.keep()
        return _looked_at(self._data, self._layout, self._max_depth, self._width)

    @functools.cached_property
    def tree(self) -> DraftTree:
        """What was drafted."""
        return self._seen[0]

    @functools.cached_property
    def target_token_ids(self) -> NDArray[np.int32]:
        """The target's choice after each node."""
        return self._seen[1]

    @functools.cached_property
    def acceptance(self) -> Acceptance:
        """The kept path, the bonus, and who finished."""
        return self._seen[2]

    def __reduce__(self) -> tuple[Any, ...]:
        return Round, (self.request_ids, self.tree, self.target_token_ids, self.acceptance)


class _Form(NamedTuple):
    """What a drafter's answer is like, which it mostly is again."""

    signature: tuple[Any, ...] | None
    width: int
    to: tuple[NDArray[Any], NDArray[Any]] | None
    """Where a draft on the host goes, in memory that the GPU reads; None for one that is there already."""
    exact: bool
    """Whether it is tensors on the model's device, of the types that are read."""


class _Built(NamedTuple):
    """What is made of a draft, and where the results behind it begin."""

    tree: DraftTree
    positions: Any
    faults: memoryview
    """Of the draft, as the host sees them once they have been read back."""
    end: int


class _Accepted(NamedTuple):
    """What comes of a round: the tokens as the host sees them now, and of its record what all rounds share."""

    kept: Acceptance
    counts: NDArray[np.int32]
    emitted: memoryview
    record: dict[str, Any]


class _MaskViews(dict[int, Any]):
    """Views of a mask's memory, by their columns, made where there are none yet."""

    def __init__(self, mask: Any, B: int, N: int, most_columns: int) -> None:
        super().__init__()
        self.mask, self.shape, self.most_columns = mask, (B, N), most_columns

    def __missing__(self, columns: int) -> Any:
        self._make([columns])
        return self[columns]

    def prepare(self, columns: int, more: int) -> None:
        """Make those of up to ``more`` columns more than a round's, many at once: one by one they take far longer."""
        last = min(columns + more, self.most_columns)
        if last not in self:
            self._make(range(columns + 1, last + 1))

    def _make(self, widths: Sequence[int]) -> None:
        if len(self) > MOST_VIEWS:
            self.clear()
        B, N = self.shape
        for columns in widths:
            self[columns] = self.mask.as_strided((B, 1, N, columns), (N * columns, N * columns, columns, 1))


class _Batch:
    """What the rounds of some requests work on, at fixed addresses."""

    def __init__(self, run: DeviceRun) -> None:
        self.run, self.cache, self.requests = run, run.cache, list(run.active)
        self.request_ids = tuple(run.active)
        xp, cache = run.xp, run.cache
        like = import_array(cache.like)
        depth, budget, topk = run.plan[:3]
        B, N, kinds, self._most_emitted = len(self.requests), 1 + budget, len(cache.mask_kinds), 1 + depth
        cache.select(self.requests)
        self.shape = (B, N)
        self.device = device_of(cache.like).number
        self._handle, self.stream = -1, None  # of this round
        self.ops = {op: serving(op, like) for op in ("build_tree", "tree_positions", "accept_tree")}
        self.keys = xp.asarray(run.keys[self.requests])

        # where each request stands; the masks' places, and where the draft is
        self._state = Mirror(mirror_size(((4, B), np.int32), ((3 * kinds + 4,), np.int64), ((2,), np.int64)))
        with self._state.arrays():
            state, numbers = xp.empty((4, B), np.int32), xp.empty(3 * kinds + 4, np.int64)
            logits_slot = xp.empty(2, np.int64)  # where the logits are, which is known when the rest has been sent
        self.roots, self.prefix_lens, self.remaining, self.tree_rows = state
        self.geometry, self._slots = numbers[: 3 * kinds].reshape(kinds, 3), numbers[3 * kinds :].reshape(2, 2)
        # their numbers on the host, one by one, which are written in less time than packed
        self.standing, self._numbers = (self._state.on_host(a).reshape(-1).data for a in (state, numbers))
        self._numbers[-4:] = np.zeros(4, np.int64).data  # where no draft is asked for
        self._draft_at = self._numbers[-4:]  # address and width of the draft's two arrays
        self._logits_slot = self._state.unsent(logits_slot)
        self._logits_at = self._state.on_host(logits_slot).data  # their address and number of words, one by one

        self._counts = self._static_counts()

        self._staged = Mirror(mirror_size(((2, B, depth, topk), np.int32)))
        with self._staged.arrays():  # on the GPU, what a draft's rows are copied to; on the host, where it is taken to
            self._drafted = xp.empty((2, B, depth, topk), np.int32)
        self.log_probs, self.token_ids = self._drafted[0].view(np.float32), self._drafted[1]
        self.log_probs.fill(-np.inf)
        self.token_ids.fill(-1)
        self.form: _Form | None = None  # of the last draft
        self._draft: Any = None
        self._held: Any = None

        self._results = Mirror(_results_size(B, N, depth, topk))
        self._masks = [cache.like.new_empty(B * N * cache.most_columns) for _ in cache.mask_kinds]
        self._arguments: dict[str, Any] = {}
        self._columns: list[int] = []  # of this round's masks
        self._tree_row = 0  # of this round
        self._ready = 0 if cache.static is None else INT32_MAX  # up to which row of trees there are views of masks
        self._views = [_MaskViews(mask, B, N, cache.most_columns) for mask in self._masks]
        self._logits: Any = None
        self._given: Any = None  # the logits of this round
        self._record: FetchedRound | None = None  # of the last round
        self._table: Any = None
        self._moves = -1
        self.built: _Built
        self.accepted: _Accepted
        self._build, self._accept = Repeated(xp), Repeated(xp)
        self.of_contexts = run.committed, cache.like, self.requests
        self.context = _Context.of(self, run)  # of the next draft

    def close(self) -> None:
        """Let go of graphs and of the run, so that memory does not wait for the garbage collector."""
        self._wait()
        self._end_round()
        self._build = self._accept = self._draft = None  # type: ignore[assignment]
        del self.run
        free_pools()

    def _end_round(self) -> None:
        """Do what a round has left to be done while the GPU works for the next."""
        self._given = None
        if self._record is not None:
            self._record.keep()
            self._record = None

    def _learn(self, half: Repeated, work: Callable[[], None]) -> None:
        """Have half of a round, which there is no graph of yet, done on its stream."""
        with self.run.on_its_stream():
            half.repeat(work, self.stream)

    # Drafts

    def learn_form(self, draft: Any, signature: tuple[Any, ...] | None, log_probs: Any, token_ids: Any) -> _Form:
        """Remember the form of an answer that has been checked."""
        width, to = int(log_probs.shape[2]), None
        device = self.cache.like.device
        exact = all(array_kind(a) == "torch" and a.device == device and a.element_size() == 4 for a in draft)
        if isinstance(log_probs, np.ndarray) and isinstance(token_ids, np.ndarray):
            size = log_probs.size  # rows side by side, as they are read
            staged = (self._staged.on_host(array) for array in (self.log_probs, self.token_ids))
            first, second = (array.reshape(-1)[:size].reshape(log_probs.shape) for array in staged)
            to = first, second
            self._draft_at[0], self._draft_at[2] = first.ctypes.data, second.ctypes.data
        self._draft_at[1] = self._draft_at[3] = width
        self.form = _Form(signature, width, to, exact)
        return self.form

    def take(self, draft: Any, form: _Form) -> None:
        """Have a draft where its rows are read from; it is checked there, and what was found is read with the rest."""
        self._draft = log_probs, token_ids = draft
        if form.to is None:
            if not form.exact:
                log_probs, token_ids = self._tensor(log_probs), self._tensor(token_ids)
            self._held = log_probs, token_ids = log_probs.contiguous(), token_ids.contiguous()
            self._draft_at[0], self._draft_at[2] = log_probs.data_ptr(), token_ids.data_ptr()
            return
        log_probs, token_ids = import_array(log_probs), import_array(token_ids)
        if token_ids.dtype == np.int64:  # no id that 32 bits would change may pass for another one
            token_ids = token_ids.clip(-1, INT32_MAX)
        form.to[0][...], form.to[1][...] = log_probs, token_ids

    def _tensor(self, array: Any) -> Any:
        """A draft's array as a tensor of float32 or int32 on the model's device."""
        like = self.cache.like
        if array_kind(array) != "torch" or array.device != like.device:
            with use_stream_of(like):
                array = export_array(self.run.native(array), like)
        if array.element_size() == 8:  # int64: no id that 32 bits would change may pass for another one
            array = array.clamp(-1, INT32_MAX).int()
        return array

    # Before the forward

    def _static_counts(self) -> tuple[Any, Any] | None:
        """Where static layers' counts are copied from, and the counts; None for dynamic layers.

        Each is copied from the first mask's place, which begins with the row that every tree begins at: by the graph,
        where an operation of torch's would take the host's time in each round.
        """
        counts = self.cache.counts()
        if counts is None:
            return None
        words = counts.element_size() // 4  # of the row's eight bytes, the lower ones first
        slots = self.run.xp.asarray(np.array([[self.geometry.data.ptr, words]] * len(counts), np.int64))
        return slots, import_array(counts).view(np.int32).reshape(len(counts), words)

    def build(self, prefix_lens: list[int]) -> dict[str, Any]:
        """Build the trees of requests whose standing has been written, and return what the model is given."""
        handle = torchs_handle(self.device)
        if handle != self._handle:
            self._handle, self.stream = handle, torchs_stream(self.device)
        B, N = self.shape
        places = self.cache.arrange(prefix_lens, N)
        self._tree_row = tree_row = places[0]
        for at in range(3 * B, 4 * B):
            self.standing[at] = tree_row
        for at, number in enumerate(places):
            self._numbers[at] = number
        replay = self._build.replay
        if replay is None:
            self._learn(self._build, self._build_trees)
        else:
            replay(self.stream)
        self._end_round()
        columns = places[2::3]
        if self._columns != columns:
            self._columns = columns
            one = len(columns) == 1
            self._arguments["attention_mask"] = self._views[0][columns[0]] if one else self._masks_by_name()
        return self._arguments

    def _masks_by_name(self) -> dict[str, Any]:
        kinds = zip(self.cache.mask_kinds, self._views, self._columns, strict=True)
        return {kind.name: views[columns] for kind, views, columns in kinds}

    def _build_trees(self) -> None:
        run, kernels, target = self.run, self.cache.kernels, self.run.target
        self._state.send()
        if self._counts is not None:
            kernels.copy_rows(*self._counts)
        kernels.copy_rows(self._slots, self._drafted, fill=0xFF800000)  # minus infinity, where no token id is looked at
        with self._results.arrays():
            draft = self.log_probs, self.token_ids
            log_probs, faults = kernels.guard_draft(*draft, self.remaining, vocab_size=target.vocab_size)
            tree = self.ops["build_tree"](log_probs, self.token_ids, self.roots, budget=self.shape[1] - 1)
            most = INT32_MAX if target.max_context is None else target.max_context - 1
            sizes = {"vocab_size": target.vocab_size, "max_position": most}
            inputs = kernels.tree_inputs(tree, self.prefix_lens, **sizes)
            positions = None
            if run.sampling["temperature"] > 0:
                positions = self.ops["tree_positions"](tree.depths, self.prefix_lens)
            for kind, geometry, mask in zip(self.cache.mask_kinds, self.geometry, self._masks, strict=True):
                kernels.tree_mask(tree, self.prefix_lens, geometry, import_array(mask), window=kind.window)
        input_ids, position_ids = (export_array(array, self.cache.like) for array in inputs)
        self._arguments |= target.arguments(self.cache.past, input_ids=input_ids, position_ids=position_ids)
        self.built = _Built(tree, positions, self._results.on_host(faults).reshape(-1).data, self._results.used)

    # After it

    def accept(self, logits: Any, width: int) -> Round:
        """Choose, accept, compact and have the host read it; return the round, of a draft of ``width`` candidates."""
        if self._moves != self.cache.moves[0]:  # the layers are elsewhere: a graph of them is no longer one
            self._prepare(logits)
        logits = logits.contiguous()
        address = logits.data_ptr()
        if address % 16:
            logits = logits.clone()
            address = logits.data_ptr()
        self._logits_at[0] = address
        replay = self._accept.replay
        if replay is None:
            self._learn(self._accept, self._accept_paths)
        else:
            replay(self.stream)
        self._given, accepted = logits, self.accepted
        self._record = FetchedRound.of(accepted.record, width)
        if self._tree_row + self._most_emitted > self._ready:
            self._make_views()
        return self._record

    def _make_views(self) -> None:
        """Make the views of masks that rounds to come will want.

        A round's masks are wider than the last one's by as many columns as the longest request emitted tokens, less the
        rows that have left all windows; those of static caches stay as they are.
        """
        more = max(MASK_VIEWS, self._most_emitted)
        self._ready = self._tree_row + more
        for views, columns in zip(self._views, self._columns, strict=True):
            views.prepare(columns, more)

    def _prepare(self, logits: Any) -> None:
        """Begin a graph anew, of where the layers are now; the first time, see that the logits are as wanted."""
        if self._logits is None:
            wanted = (*self.shape, self.run.engine.vocab_size)
            if tuple(logits.shape) != wanted:
                raise ValueError(f"model must return logits of shape {wanted}, got {tuple(logits.shape)}")
            size = logits.numel() * logits.element_size()
            self._logits, self._word = logits.new_empty(logits.shape), word_of(size)
            self._logits_at[1] = size // self._word
        with self.run.on_its_stream():
            self._moves, self._table = self.cache.moves[0], self.cache.table()
        self._accept = Repeated(self.run.xp)

    def emitted(self) -> memoryview:
        """Return how many tokens each request emits, and which, once they are here."""
        self._wait()
        if self._draft is not None and any(self.built.faults):
            self.run.refuse(*self._draft)
        return self.accepted.emitted

    def _wait(self) -> None:
        """Wait for the GPU: for what the host commits, once a round."""
        if self.stream is not None:
            self.stream.synchronize()

    def _accept_paths(self) -> None:
        run, built, results = self.run, self.built, self._results
        sampling = {name: run.sampling[name] for name in ("temperature", "top_p", "seed")}
        logits = import_array(self._logits)
        greedy, kernels = sampling["temperature"] == 0, self.cache.kernels
        if not greedy:
            kernels.copy_rows(self._logits_slot, logits.reshape(1, -1), word=self._word)
        with results.arrays(built.end):
            if greedy:  # which reads the logits once, where they are
                choices = kernels.choose_tokens(logits, place=self._logits_slot[:1])
            else:
                choices = kernels.choose_tokens(logits, request_ids=self.keys, positions=built.positions, **sampling)
            kept = self.ops["accept_tree"](built.tree, choices, remaining=self.remaining, stop_token_ids=run.stops)
            kernels.compact_layers(self._table, self.prefix_lens, self.tree_rows, kept)
            emitted = kernels.emitted_tokens(built.tree, kept)
            results.fetch()
        tree, path = built.tree, (kept.node_indices, kept.lengths, kept.bonus_token_ids, kept.finished)
        fields = (tree.token_ids, tree.parents, tree.depths, tree.ranks, tree.scores, tree.node_counts)
        layout = [results.where(array) for array in (*fields, tree.visibility_words, choices, *path)]
        here = results.on_host(emitted)
        record = {"request_ids": self.request_ids, "_layout": layout, "_max_depth": tree.max_depth}
        record["_data"] = results.host[: results.used]
        self.accepted = _Accepted(kept, here[:, 0], here.reshape(-1).data, record)

    def shown(self, hidden: dict[int, Any], layers: tuple[int, ...]) -> list[dict[int, Any]]:
        """Return the hidden states of each request's kept nodes, of which there are as many as tokens emitted."""
        nodes = export_array(self.accepted.kept.node_indices, self.cache.like)
        return [
            {layer: hidden[layer][b].index_select(0, nodes[b, :n]) for layer in layers}
            for b, n in enumerate(self.accepted.counts.tolist())
        ]


def _looked_at(
    data: memoryview | bytearray, layout: list[Where], max_depth: int, width: int
) -> tuple[DraftTree, NDArray[np.int32], Acceptance]:
    """A round's tree of a draft of ``width`` candidates, the choices and what was kept, on the host."""
    read: list[Any] = [looked_at(where, data) for where in layout]
    tokens, parents, depths, ranks, scores, counts, words = read[:7]
    tree = DraftTree(tokens, parents, depths, ranks, scores, counts, words, max_depth, width)
    # in an unused slot the choice follows from whatever logits the target left there
    return tree, np.where(tree.depths >= 0, read[7], np.int32(-1)), Acceptance(*read[8:])


def _signature(draft: Any) -> tuple[Any, ...] | None:
    """What must be the same for two drafts to be of one form; None for what is no pair of arrays."""
    if type(draft) is not tuple or len(draft) != 2:
        return None
    a, b = draft
    try:
        return type(a), a.shape, a.dtype, a.device, type(b), b.shape, b.dtype, b.device
    except AttributeError:
        return None


def _results_size(B: int, N: int, depth: int, topk: int) -> int:
    """Bytes that a round's results take, and what building a tree works in."""
    from ddtree.kernels.cupy.build_tree import paths_size

    slots: list[tuple[tuple[int, ...], Any]] = [((B, N), np.int32)] * 8 + [((B, N), np.int64)] * 3
    requests: list[tuple[tuple[int, ...], Any]] = [((B,), np.int64)] * 5 + [((B, depth + 2), np.int32)] * 2
    draft: tuple[tuple[int, ...], Any] = (B, depth, topk), np.float32
    work = paths_size(N - 1, depth, min(topk, N - 1), 4)
    return mirror_size(*slots, *requests, draft, ((B, N, -(-N // 32)), np.uint32), ((B, work), np.uint8))
