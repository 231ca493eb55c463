"""Rounds of a Hugging Face model whose work outside of its forward stays on the GPU, and is read back once.

Before the forward: the tree, what the model reads of it, and its masks. After it: the choices, what is accepted, and
the cache's compaction. Each half is one CUDA graph of work at fixed addresses, captured in a batch's second round. The
host hands on the drafter's answer and takes the tokens.

A Python statement that runs once a round, between two passes of a model, takes several times what it takes in a loop:
hence what is the same in all rounds is made once, and a round's record when it is looked at.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import struct
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ddtree.arrays import array_kind, export_array, import_array, stream_of, use_stream_of
from ddtree.backends import serving
from ddtree.checks import INT32_MAX
from ddtree.engine import Round
from ddtree.engine.rounds import HostRun
from ddtree.interop.huggingface_cache import ModelCache
from ddtree.interop.mirror import Where, looked_at, mirror_size, new_mirror
from ddtree.kernels.cupy.copy_rows import word_of
from ddtree.protocols import DraftContext
from ddtree.trees import Acceptance, DraftTree

if TYPE_CHECKING:
    from ddtree.interop.huggingface import HuggingFaceTarget

__all__ = ["DeviceRun", "FetchedRound"]


SLOT = struct.Struct("=2q")
"""An address and a number of words, as ``copy_rows`` reads them."""


class DeviceRun(HostRun):
    """A generation whose rounds have a fixed envelope: N = 1 + budget slots of each request, unused ones inert."""

    cache: ModelCache
    _batch: _Batch | None = None

    @property
    def target(self) -> HuggingFaceTarget:
        """The model."""
        return self.engine.target  # type: ignore[return-value]

    def steps(self) -> Any:
        """Run to the end, and give back what the last batch holds."""
        try:
            yield from super().steps()
        finally:
            self._close()

    def _close(self) -> None:
        if self._batch is not None:
            self._batch.close()
            self._batch = None

    def on_its_stream(self) -> AbstractContextManager[None]:
        """Nothing: graphs are told their stream."""
        return contextlib.nullcontext()

    def begin(self, requests: list[int]) -> None:
        """Run the prompts of ``requests`` and commit the token after each."""
        with use_stream_of(self.cache.like):
            super().begin(requests)

    def round(self) -> Round:
        """Draft, check, commit; finished requests leave."""
        start = self._clock()
        batch = self._batch
        if batch is None or batch.requests != self.active:
            self._close()
            with use_stream_of(self.cache.like):
                batch = self._batch = _Batch(self)
        batch.stream = stream_of(self.cache.like)
        requests = batch.indices
        prefix_lens = (self.committed.lengths[requests] - 1).tolist()
        tree_row = self.cache.arrange(batch.requests, prefix_lens)
        width = 1 if self.drafter is None else self._take_draft(batch)
        drafted = self._clock("draft", start)
        inputs = batch.build(prefix_lens, tree_row)
        built = self._clock("build_tree", drafted)
        logits, hidden = self.target.run(inputs, self.cache.past, self.hidden_layers)
        passed = self._clock("forward", built)
        emitted = batch.accept(logits)
        record = batch.record(width)
        shown = batch.shown(hidden, self.hidden_layers, emitted) if self.hidden_layers else None
        self.emissions = []
        ended = self.commit(requests, emitted[:, 1:], emitted[:, 0])
        self.ended += ended
        for b, request in enumerate(batch.requests):
            if request in ended:
                del self.hidden_states[request]
            else:
                self.hidden_states[request] = {} if shown is None else shown[b]
        self._clock("accept_tree", passed)
        return record

    def _take_draft(self, batch: _Batch) -> int:
        """Have the drafter's answer where the tree is built from; return its candidates a depth."""
        draft = self.ask(self._context(batch))
        form = batch.known_form(draft)
        if form is None:
            with use_stream_of(self.cache.like):
                form = batch.learn_form(draft, *self.checked(draft))
        batch.take(draft, form)
        return form.width

    def _context(self, batch: _Batch) -> DraftContext:
        return _Context(
            request_ids=list(batch.requests),
            tokens=[self.committed.tokens(r) for r in batch.requests],
            root_token_ids=functools.partial(self._sent, self.committed.roots(batch.indices)),
            hidden_states=[self.hidden_states[r] for r in batch.requests],
            began=self.began,
            ended=self.ended,
        )

    def _sent(self, numbers: NDArray[np.int32]) -> Any:
        with use_stream_of(self.cache.like):
            return self.xp.array(numbers)

    def _clock(self, stage: str = "", since: float = 0.0) -> float:
        """The time; what has passed since another counts for ``stage``."""
        now = time.perf_counter()
        if stage:
            self.seconds[stage] += now - since
        return now

    def drafted(self, array: Any) -> Any:
        """A drafter's array where it is: on the host it is checked before it is sent."""
        native = import_array(array)
        return np.ascontiguousarray(native) if isinstance(native, np.ndarray) else self.native(native)

    def refuse(self, log_probs: Any, token_ids: Any) -> None:
        """Raise what is wrong with a draft, naming drafter and request."""
        roots = self._sent(self.committed.roots(np.array(self.active)))
        with use_stream_of(self.cache.like):
            log_probs, token_ids = self.native(log_probs), self.native(token_ids)
            self.refuse_nan(log_probs)
            self.likeliest_tree(log_probs, token_ids, roots, 0)
        raise AssertionError("a draft was found at fault, and its check finds nothing")


class _Context(DraftContext):
    """What a drafter may look at; the array of root tokens is made if it does."""

    _roots: Any = None

    @property
    def root_token_ids(self) -> Any:
        """The last committed token of each request."""
        if callable(self._roots):
            self._roots = self._roots()
        return self._roots

    @root_token_ids.setter
    def root_token_ids(self, roots: Any) -> None:
        self._roots = roots


class FetchedRound(Round):
    """A round of which the host has the bytes; its arrays are made of them when they are looked at."""

    def __init__(
        self, request_ids: tuple[int, ...], look: Callable[[], tuple[DraftTree, NDArray[np.int32], Acceptance]]
    ) -> None:
        object.__setattr__(self, "request_ids", request_ids)
        object.__setattr__(self, "_look", look)

    @functools.cached_property
    def _seen(self) -> tuple[DraftTree, NDArray[np.int32], Acceptance]:
        return self._look()  # type: ignore[attr-defined,no-any-return]

    @property
    def tree(self) -> DraftTree:
        """What was drafted."""
        return self._seen[0]

    @property
    def target_token_ids(self) -> NDArray[np.int32]:
        """The target's choice after each node."""
        return self._seen[1]

    @property
    def acceptance(self) -> Acceptance:
        """The kept path, the bonus, and who finished."""
        return self._seen[2]

    def __reduce__(self) -> tuple[Any, ...]:
        return Round, (self.request_ids, *self._seen)


class _Form(NamedTuple):
    """What a drafter's answer is like, which it mostly is again."""

    signature: tuple[Any, ...]
    width: int
    to: tuple[NDArray[Any], NDArray[Any]] | None
    """Where a draft on the host goes, in memory that the GPU reads; None for one that is there already."""
    at: tuple[int, int, int, int]
    """Address and width of its two arrays, as the GPU finds them there."""


class _Built(NamedTuple):
    """What is made of a draft, and where the results behind it begin."""

    tree: DraftTree
    inputs: dict[str, Any]
    positions: Any
    faults: NDArray[np.int32]
    """Of the draft, as the host sees them once they have been read back."""
    end: int


class _Accepted(NamedTuple):
    """What comes of a round: the tokens as the host sees them now, and where all of it is among the results."""

    kept: Acceptance
    emitted: NDArray[np.int32]
    layout: list[Where]
    end: int


class _Batch:
    """What the rounds of some requests work on, at fixed addresses."""

    def __init__(self, run: DeviceRun) -> None:
        self.run, self.requests, self.indices = run, list(run.active), np.array(run.active)
        xp, cache = run.xp, run.cache
        like = import_array(cache.like)
        depth, budget, topk = run.plan[:3]
        B, N, kinds = len(self.requests), 1 + budget, len(cache.mask_kinds)
        self.shape, self.on_gpu = (B, N), xp is not np
        self.stream: Any = None  # of this round
        self.ops = {op: serving(op, like) for op in ("build_tree", "tree_positions", "choose_tokens", "accept_tree")}
        self.keys = xp.asarray(run.keys[self.requests])

        # where each request stands; the masks' places, and where the draft is
        self._state = new_mirror(like, mirror_size(((4, B), np.int32), ((3 * kinds + 4,), np.int64)))
        with self._state.arrays():
            state, numbers = xp.empty((4, B), np.int32), xp.empty(3 * kinds + 4, np.int64)
        self.roots, self.prefix_lens, self.remaining, self.tree_rows = state
        self.geometry, self._slots = numbers[: 3 * kinds].reshape(kinds, 3), numbers[3 * kinds :].reshape(2, 2)
        self._host: tuple[Any, Any] = self._state.on_host(state), self._state.on_host(numbers)
        self._packed = struct.Struct(f"={4 * B}i"), struct.Struct(f"={3 * kinds + 4}q")
        self._told = new_mirror(like, mirror_size(((2,), np.int64)))  # where the logits are
        with self._told.arrays():
            self._logits_slot = xp.empty(2, np.int64)
        self._host_logits_slot: Any = self._told.on_host(self._logits_slot)

        self._staged = new_mirror(like, mirror_size(*(((B, depth, topk), np.int32),) * 2))
        with self._staged.arrays():  # on the GPU, what a draft's rows are copied to; on the host, where it is taken to
            self.log_probs, self.token_ids = (xp.empty((B, depth, topk), t) for t in (np.float32, np.int32))
        self.log_probs.fill(-np.inf)
        self.token_ids.fill(-1)
        self._at: tuple[int, int, int, int] = 0, 0, 0, 0  # address and width of the draft's two arrays
        self._form: _Form | None = None
        self._held: Any = None
        self._refuse: Callable[[], None] | None = None

        self._results = new_mirror(like, _results_size(B, N, depth, topk))
        self._masks = [cache.like.new_empty(B * N * cache.most_columns) for _ in cache.mask_kinds]
        self._shown_masks: tuple[Any, Any] = None, None
        self._logits: Any = None
        self._table: Any = None
        self._moved: Any = None
        self._build = _Replay(self._built, cache.like)
        self._accept = _Replay(self._accepted, cache.like)

    def close(self) -> None:
        """Let go of graphs and of the run, so that memory does not wait for the garbage collector."""
        self._wait()
        self._build = self._accept = self._refuse = None  # type: ignore[assignment]
        del self.run

    # Drafts

    def known_form(self, draft: Any) -> _Form | None:
        """Return the form of a drafter's answer if it is that of the last one."""
        form = self._form
        return form if form is not None and form.signature == _signature(draft) != () else None

    def learn_form(self, draft: Any, log_probs: Any, token_ids: Any) -> _Form:
        """Remember the form of an answer that has been checked."""
        width, to = int(log_probs.shape[2]), None
        if isinstance(log_probs, np.ndarray) and isinstance(token_ids, np.ndarray):
            staged = [self._staged.on_host(array) for array in (self.log_probs, self.token_ids)]
            if self.on_gpu:  # rows side by side, as they are read
                size = log_probs.size
                first, second = (array.reshape(-1)[:size].reshape(log_probs.shape) for array in staged)
            else:
                staged[0][:, :, width:] = -np.inf
                first, second = (array[:, :, :width] for array in staged)
            to = first, second
        at = (0, 0, 0, 0) if to is None else (to[0].ctypes.data, width, to[1].ctypes.data, width)
        self._form = _Form(_signature(draft), width, to, at)
        return self._form

    def take(self, draft: Any, form: _Form) -> None:
        """Have a draft where its rows are read from; it is checked there, and what was found is read with the rest."""
        log_probs, token_ids = draft
        self._refuse = functools.partial(self.run.refuse, log_probs, token_ids)
        if form.to is None:
            self._held = log_probs, token_ids = self._tensor(log_probs), self._tensor(token_ids)
            self._at = log_probs.data_ptr(), form.width, token_ids.data_ptr(), form.width
            return
        log_probs, token_ids = import_array(log_probs), import_array(token_ids)
        if token_ids.dtype == np.int64:  # no id that 32 bits would change may pass for another one
            token_ids = token_ids.clip(-1, INT32_MAX)
        form.to[0][...], form.to[1][...] = log_probs, token_ids
        self._at = form.at

    def _tensor(self, array: Any) -> Any:
        """A draft's array as a contiguous tensor of float32 or int32 on the model's device."""
        like = self.run.cache.like
        if array_kind(array) != "torch" or array.device != like.device:
            with use_stream_of(like):
                array = export_array(self.run.native(array), like)
        if array.element_size() == 8:  # int64: no id that 32 bits would change may pass for another one
            array = array.clamp(-1, INT32_MAX).int()
        return array.contiguous()

    # Before the forward

    def build(self, prefix_lens: list[int], tree_row: int) -> dict[str, Any]:
        """Build the trees, and return what the model is given."""
        committed, places = self.run.committed, self.run.cache.geometry(self.shape[1], tree_row)
        roots, remaining = committed.roots(self.indices).tolist(), committed.remaining[self.indices].tolist()
        self._packed[0].pack_into(self._host[0], 0, *roots, *prefix_lens, *remaining, *[tree_row] * len(roots))
        self._packed[1].pack_into(self._host[1], 0, *itertools.chain(*places), *self._at)
        self.built: _Built = self._build(self.stream)
        columns = [place[2] for place in places]
        if self._shown_masks[0] != columns:
            self._shown_masks = columns, self._mask_views(columns)
        return {**self.built.inputs, "attention_mask": self._shown_masks[1]}

    def _mask_views(self, widths: list[int]) -> Any:
        (B, N), kinds = self.shape, self.run.cache.mask_kinds
        views = [
            buffer.as_strided((B, 1, N, columns), (N * columns, N * columns, columns, 1))
            for buffer, columns in zip(self._masks, widths, strict=True)
        ]
        return views[0] if len(views) == 1 else {kind.name: view for kind, view in zip(kinds, views, strict=True)}

    def _built(self) -> _Built:
        run, kernels, target = self.run, self.run.cache.kernels, self.run.target
        self._state.send()
        if self.on_gpu:
            kernels.copy_rows(self._slots[0], self.log_probs, fill=0xFF800000)  # minus infinity
            kernels.copy_rows(self._slots[1], self.token_ids, fill=0xFFFFFFFF)
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
            for kind, geometry, mask in zip(run.cache.mask_kinds, self.geometry, self._masks, strict=True):
                kernels.tree_mask(tree, self.prefix_lens, geometry, import_array(mask), window=kind.window)
        exported = (export_array(array, run.cache.like) for array in inputs)
        named = dict(zip(("input_ids", "position_ids"), exported, strict=True))
        return _Built(tree, named, positions, self._results.on_host(faults), self._results.used)

    # After it

    def accept(self, logits: Any) -> NDArray[np.int32]:
        """Choose, accept, compact and read back; return how many tokens each request emits, and which."""
        if self._moved != self.run.cache.moved:  # the layers are elsewhere: a graph of them is no longer one
            with use_stream_of(self.run.cache.like):
                self._moved, self._table = self.run.cache.moved, self.run.cache.table()
            self._accept = _Replay(self._accepted, self.run.cache.like)
        if self._logits is None:
            size = logits.numel() * logits.element_size()
            self._logits, self._word = logits.new_empty(logits.shape), word_of(size)
            self._logits_words = size // self._word
        if not self.on_gpu:
            self._logits.copy_(logits)
        elif not logits.is_contiguous() or logits.data_ptr() % self._word:
            logits = logits.flatten().clone()
        SLOT.pack_into(self._host_logits_slot, 0, logits.data_ptr(), self._logits_words)
        self._round: _Accepted = self._accept(self.stream)
        self._results.used = self._round.end
        self._wait()
        if self._refuse is not None and self.built.faults.any():
            self._refuse()
        emitted: NDArray[np.int32] = self._round.emitted
        return emitted

    def _wait(self) -> None:
        """Wait for the GPU: for what the host commits, once a round."""
        if self.stream is not None:
            self.stream.synchronize()

    def _accepted(self) -> _Accepted:
        run, built, results = self.run, self.built, self._results
        sampling = {name: run.sampling[name] for name in ("temperature", "top_p", "seed")}
        logits = import_array(self._logits)
        if self.on_gpu:
            self._told.send()
            run.cache.kernels.copy_rows(self._logits_slot, logits.reshape(1, -1), word=self._word)
        with results.arrays(built.end):
            choices = self.ops["choose_tokens"](logits, request_ids=self.keys, positions=built.positions, **sampling)
            kept = self.ops["accept_tree"](built.tree, choices, remaining=self.remaining, stop_token_ids=run.stops)
            run.cache.kernels.compact_layers(self._table, self.prefix_lens, self.tree_rows, kept)
            emitted = run.cache.kernels.emitted_tokens(built.tree, kept)
            results.fetch()
        tree, path = built.tree, (kept.node_indices, kept.lengths, kept.bonus_token_ids, kept.finished)
        fields = (tree.token_ids, tree.parents, tree.depths, tree.ranks, tree.scores, tree.node_counts)
        layout = [results.where(array) for array in (*fields, tree.visibility_words, choices, *path)]
        return _Accepted(kept, results.on_host(emitted), layout, results.used)

    def record(self, width: int) -> Round:
        """Return the round as it was, from a copy of its bytes."""
        what = (self._results.taken(), self._round.layout, self.built.tree.max_depth, width)
        return FetchedRound(tuple(self.requests), functools.partial(_looked_at, *what))

    def shown(
        self, hidden: dict[int, Any], layers: tuple[int, ...], emitted: NDArray[np.int32]
    ) -> list[dict[int, Any]]:
        """Return the hidden states of each request's kept nodes, of which there are as many as tokens emitted."""
        nodes = export_array(self._round.kept.node_indices, self.run.cache.like)
        return [
            {layer: hidden[layer][b].index_select(0, nodes[b, :n]) for layer in layers}
            for b, n in enumerate(emitted[:, 0].tolist())
        ]


def _looked_at(
    data: NDArray[np.uint8] | None, layout: list[Where], max_depth: int, width: int
) -> tuple[DraftTree, NDArray[np.int32], Acceptance]:
    """A round's tree of a draft of ``width`` candidates, the choices and what was kept, on the host."""
    read: list[Any] = [looked_at(where, data) for where in layout]
    tokens, parents, depths, ranks, scores, counts, words = read[:7]
    tree = DraftTree(tokens, parents, depths, ranks, scores, counts, words, max_depth, width)
    # in an unused slot the choice follows from whatever logits the target left there
    return tree, np.where(tree.depths >= 0, read[7], np.int32(-1)), Acceptance(*read[8:])


def _signature(draft: Any) -> tuple[Any, ...]:
    """What must be the same for two drafts to be of one form."""
    if type(draft) is not tuple or len(draft) != 2:
        return ()
    parts: list[Any] = []
    for array in draft:
        parts += (type(array), getattr(array, "shape", None), getattr(array, "dtype", None))
        parts.append(getattr(array, "device", None))
    return tuple(parts)


def _results_size(B: int, N: int, depth: int, topk: int) -> int:
    """Bytes that a round's results take, and what building a tree works in."""
    from ddtree.kernels.cupy.build_tree import paths_size

    slots: list[tuple[tuple[int, ...], Any]] = [((B, N), np.int32)] * 8 + [((B, N), np.int64)] * 3
    requests: list[tuple[tuple[int, ...], Any]] = [((B,), np.int64)] * 5 + [((B, depth + 2), np.int32)] * 2
    draft: tuple[tuple[int, ...], Any] = (B, depth, topk), np.float32
    work = paths_size(N - 1, depth, min(topk, N - 1), 4)
    return mirror_size(*slots, *requests, draft, ((B, N, -(-N // 32)), np.uint32), ((B, work), np.uint8))


class _Replay:
    """Work at fixed addresses: run on the stream that ``like``'s library works on, then captured, then replayed."""

    def __init__(self, work: Callable[[], Any], like: Any) -> None:
        self.work, self.like = work, like
        self.ran = False
        self.graph: Any = None
        self.result: Any = None

    def __call__(self, stream: Any) -> Any:
        """Have the work done on that stream, CuPy's view of it; return what it returned when it was captured."""
        if self.graph is None:
            with use_stream_of(self.like):
                if not self.on_gpu() or not self.ran:  # a first run loads the kernels
                    self.ran = True
                    return self.work()
                self._capture()
        self.graph.launch(stream)
        return self.result

    def on_gpu(self) -> bool:
        """Whether there are graphs."""
        return bool(self.like.device.type == "cuda")

    def _capture(self) -> None:
        import cupy

        with cupy.cuda.Stream(non_blocking=True) as stream:
            stream.begin_capture()
            self.result = self.work()
            self.graph = stream.end_capture()
