"""Rounds of a Hugging Face model whose work outside of its forward stays on the GPU, and is read back once.

Before the forward: the tree, what the model reads of it, and its masks. After it: the choices, what is accepted, and
the cache's compaction. Each half is one CUDA graph of work at fixed addresses, captured in a batch's second round. The
host hands on the drafter's answer and takes the tokens.

A Python statement that runs once a round, between two passes of a model, takes several times what it takes in a loop:
hence what is the same in all rounds is made once, and a round's record when it is looked at.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ddtree.arrays import array_kind, export_array, import_array
from ddtree.backends import serving
from ddtree.checks import INT32_MAX
from ddtree.engine import Round
from ddtree.engine.engine import _Run
from ddtree.interop.huggingface_cache import ModelCache
from ddtree.interop.mirror import Where, looked_at, mirror_size, new_mirror
from ddtree.kernels import numba_cpu
from ddtree.protocols import DraftContext
from ddtree.trees import Acceptance, DraftTree

if TYPE_CHECKING:
    from ddtree.interop.huggingface import HuggingFaceTarget

__all__ = ["DeviceRun", "FetchedRound"]


class DeviceRun(_Run):
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

    def round(self) -> Round:
        """Draft, check, commit; finished requests leave."""
        start = self._clock()
        if self._batch is None or self._batch.requests != self.active:
            self._close()
            self._batch = _Batch(self)
        batch = self._batch
        rows = batch.rows
        prefix_lens = np.array([sequence.length - 1 for sequence in rows], np.int32)
        tree_row = self.cache.arrange(batch.requests, prefix_lens)
        batch.place(rows, prefix_lens, tree_row)
        width = 1 if self.drafter is None else self._drafted_into(batch)
        drafted = self._clock("draft", start)
        inputs = batch.build()
        built = self._clock("build_tree", drafted)
        logits, hidden = self.target.run(inputs, self.cache.past, self.hidden_layers)
        passed = self._clock("forward", built)
        batch.accept(logits)
        emitted, lengths = batch.emitted()
        record = batch.record(width)
        shown: list[dict[int, Any]] = [{} for _ in rows]
        if self.hidden_layers:
            shown = batch.shown(hidden, self.hidden_layers)
        self._commit(emitted, prefix_lens + lengths - 1, shown)
        for sequence, tokens in zip(rows, emitted, strict=True):
            sequence.tokens_per_round.append(len(tokens))
        self._clock("accept_tree", passed)
        return record

    def _drafted_into(self, batch: _Batch) -> int:
        """Have the drafter's answer where the tree is built from; return its candidates a depth."""
        draft = self._answer(self._context(batch))
        form = batch.known_form(draft)
        if form is None:
            log_probs, token_ids = self._checked(draft)
            form = batch.learn_form(draft, log_probs, token_ids)
        batch.take(draft, form)
        return form.width

    def _context(self, batch: _Batch) -> DraftContext:
        return _Context(
            request_ids=list(batch.requests),
            tokens=[sequence.tokens for sequence in batch.rows],
            root_token_ids=functools.partial(self.xp.array, [sequence.root for sequence in batch.rows], np.int32),
            hidden_states=[self.hidden_states[r] for r in batch.requests],
            began=self.began,
            ended=self.ended,
        )

    def _drafted(self, array: Any) -> Any:
        """A drafter's array where it is: on the host it is checked before it is sent."""
        native = import_array(array)
        return np.ascontiguousarray(native) if isinstance(native, np.ndarray) else self._native(native)

    def refuse(self, log_probs: Any, token_ids: Any) -> None:
        """Raise what is wrong with a draft, naming drafter and request."""
        roots = self.xp.array([self.sequences[r].root for r in self.active], np.int32)
        self._likeliest_tree(self._native(log_probs), self._native(token_ids), roots, 0)
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
    on_host: bool
    to: tuple[Any, Any]
    """Where it goes: the first columns of what the tree is built from."""


class _Built(NamedTuple):
    """What is made of a draft, and where the results behind it begin."""

    tree: DraftTree
    inputs: dict[str, Any]
    positions: Any
    fault: Any
    end: int


class _Results(NamedTuple):
    """What comes of a round: some of it as the host sees it now, and where all of it is among the results."""

    kept: Acceptance
    token_ids: NDArray[np.int32]
    node_indices: NDArray[np.int32]
    lengths: NDArray[np.int32]
    bonus_token_ids: NDArray[np.int32]
    layout: list[Where]
    end: int


class _Batch:
    """What the rounds of some requests work on, at fixed addresses."""

    def __init__(self, run: DeviceRun) -> None:
        self.run, self.requests = run, list(run.active)
        self.rows = [run.sequences[r] for r in self.requests]
        xp, cache = run.xp, run.cache
        like = import_array(cache.like)
        depth, budget, topk = run.plan[:3]
        B, N, kinds = len(self.requests), 1 + budget, len(cache.mask_kinds)
        self.shape, self.on_gpu = (B, N), xp is not np
        self.ops = {op: serving(op, like) for op in ("build_tree", "tree_positions", "choose_tokens", "accept_tree")}
        self.keys = xp.asarray(run.keys[self.requests])

        self._state = new_mirror(like, mirror_size(((4, B), np.int32), ((kinds, 3), np.int64)))
        with self._state.arrays():
            self.state, self.geometry = xp.empty((4, B), np.int32), xp.empty((kinds, 3), np.int64)
        self.roots, self.prefix_lens, self.remaining, self.tree_rows = self.state
        self._host_state, self._host_geometry = map(self._state.on_host, (self.state, self.geometry))

        self._draft = new_mirror(like, mirror_size(*(((B, depth, topk), np.int32),) * 2))
        with self._draft.arrays():
            self.log_probs, self.token_ids = (xp.empty((B, depth, topk), t) for t in (np.float32, np.int32))
        self._draft.on_host(self.log_probs).fill(-np.inf)
        self._draft.on_host(self.token_ids).fill(-1)
        self._draft.send()
        self._form: _Form | None = None
        self._refuse: Callable[[], None] | None = None

        self._results = new_mirror(like, _results_size(B, N, depth, topk))
        self._masks = [cache.like.new_empty(B * N * cache.most_columns) for _ in cache.mask_kinds]
        self._shown_masks: tuple[Any, Any] = None, None
        self._logits: Any = None
        self._table: Any = None
        # a draft that is on the device already is not sent; one graph each
        self._builds = {sent: _Replay(functools.partial(self._build, sent), self.on_gpu) for sent in (False, True)}
        self._accept = _Replay(self._accepted, self.on_gpu)
        self._sends = False

    def close(self) -> None:
        """Let go of graphs and of the run, so that memory does not wait for the garbage collector."""
        self._builds, self._accept, self._refuse = {}, None, None  # type: ignore[assignment]
        del self.run

    def place(self, rows: list[Any], prefix_lens: NDArray[np.int32], tree_row: int) -> None:
        """Say where each request stands; it is sent with what the tree is built from."""
        state = self._host_state
        state[0], state[2] = [row.root for row in rows], [row.remaining for row in rows]
        state[1], state[3] = prefix_lens, tree_row
        self._host_geometry[:] = self._places = self.run.cache.geometry(self.shape[1], tree_row)

    # Drafts

    def known_form(self, draft: Any) -> _Form | None:
        """Return the form of a drafter's answer if it is that of the last one."""
        form = self._form
        return form if form is not None and form.signature == _signature(draft) != () else None

    def learn_form(self, draft: Any, log_probs: Any, token_ids: Any) -> _Form:
        """Remember the form of an answer that has been checked."""
        width = int(log_probs.shape[2])
        on_host = isinstance(log_probs, np.ndarray) and isinstance(token_ids, np.ndarray)
        to: list[Any] = [self.log_probs, self.token_ids]
        to = [self._draft.on_host(a) if on_host else export_array(a, self.run.cache.like) for a in to]
        to[0][:, :, width:] = -np.inf
        self._form = _Form(_signature(draft), width, on_host, (to[0][:, :, :width], to[1][:, :, :width]))
        return self._form

    def take(self, draft: Any, form: _Form) -> None:
        """Put a draft before candidates of none; on the host it is checked here, on the device with the tree."""
        log_probs, token_ids = draft
        self._sends = form.on_host
        if form.on_host:
            log_probs, token_ids = import_array(log_probs), import_array(token_ids)
            if numba_cpu.find_draft_fault(log_probs, token_ids, self.run.engine.vocab_size)[0]:
                self.run.refuse(log_probs, token_ids)
            form.to[0][...], form.to[1][...] = log_probs, token_ids
            return
        self._refuse = functools.partial(self.run.refuse, log_probs, token_ids)
        log_probs, token_ids = (self._tensor(array) for array in (log_probs, token_ids))
        form.to[0].copy_(log_probs)
        # no id that 32 bits would change may pass for another one
        form.to[1].copy_(token_ids.clamp(-1, INT32_MAX) if str(token_ids.dtype) == "torch.int64" else token_ids)

    def _tensor(self, array: Any) -> Any:
        return array if array_kind(array) == "torch" else export_array(self.run._native(array), self.run.cache.like)

    # Before the forward

    def build(self) -> dict[str, Any]:
        """Build the trees, and return what the model is given."""
        self.built = self._builds[self._sends]()
        columns = [place[2] for place in self._places]
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

    def _build(self, sent: bool) -> _Built:
        run, kernels, target = self.run, self.run.cache.kernels, self.run.target
        self._state.send()
        if sent:
            self._draft.send()
        with self._results.arrays():
            tree = self.ops["build_tree"](self.log_probs, self.token_ids, self.roots, budget=self.shape[1] - 1)
            most = INT32_MAX if target.max_context is None else target.max_context - 1
            sizes = {"vocab_size": target.vocab_size, "max_position": most}
            inputs = kernels.tree_inputs(tree, self.prefix_lens, **sizes)
            fault = kernels.find_draft_fault(self.log_probs, self.token_ids, target.vocab_size)
            positions = None
            if run.sampling["temperature"] > 0:
                positions = self.ops["tree_positions"](tree.depths, self.prefix_lens)
            for kind, geometry, mask in zip(run.cache.mask_kinds, self.geometry, self._masks, strict=True):
                kernels.tree_mask(tree, self.prefix_lens, geometry, import_array(mask), window=kind.window)
        exported = (export_array(array, run.cache.like) for array in inputs)
        named = dict(zip(("input_ids", "position_ids"), exported, strict=True))
        return _Built(tree, named, positions, fault, self._results.used)

    # After it

    def accept(self, logits: Any) -> None:
        """Choose, accept, compact and read back."""
        if self._logits is None:
            self._logits = logits.new_empty(logits.shape)
        self._logits.copy_(logits)
        table = self.run.cache.table()
        if table is not self._table:  # the layers have moved: a graph of them is no longer one
            self._table, self._accept = table, _Replay(self._accepted, self.on_gpu)
        self._round: _Results = self._accept()
        self._results.used = self._round.end
        if self.on_gpu:
            import cupy

            cupy.cuda.get_current_stream().synchronize()
            if self._refuse is not None and int(self._results.on_host(self.built.fault)[0]) != -1:
                self._refuse()

    def _accepted(self) -> _Results:
        run, built, results = self.run, self.built, self._results
        sampling = {name: run.sampling[name] for name in ("temperature", "top_p", "seed")}
        with results.arrays(built.end):
            choices = self.ops["choose_tokens"](
                import_array(self._logits), request_ids=self.keys, positions=built.positions, **sampling
            )
            kept = self.ops["accept_tree"](built.tree, choices, remaining=self.remaining, stop_token_ids=run.stops)
            run.cache.kernels.compact_layers(self._table, self.prefix_lens, self.tree_rows, kept)
            results.fetch()
        tree, path = built.tree, (kept.node_indices, kept.lengths, kept.bonus_token_ids)
        fields = (tree.token_ids, tree.parents, tree.depths, tree.ranks, tree.scores, tree.node_counts)
        layout = [results.where(a) for a in (*fields, tree.visibility_words, choices, *path, kept.finished)]
        seen = map(results.on_host, (tree.token_ids, *path))
        return _Results(kept, next(seen), next(seen), next(seen), next(seen), layout, results.used)

    def emitted(self) -> tuple[list[NDArray[np.int32]], NDArray[np.int32]]:
        """Return the tokens that each request emitted, and how many."""
        _, token_ids, nodes, lengths, bonus, _, _ = self._round
        emitted = []
        for b, length in enumerate(lengths.tolist()):
            tokens = np.empty(length, np.int32)
            tokens[:-1], tokens[-1] = token_ids[b][nodes[b, 1:length]], bonus[b]
            emitted.append(tokens)
        return emitted, lengths

    def record(self, width: int) -> Round:
        """Return the round as it was, from a copy of its bytes."""
        what = (self._results.taken(), self._round.layout, self.built.tree.max_depth, width)
        return FetchedRound(tuple(self.requests), functools.partial(_looked_at, *what))

    def shown(self, hidden: dict[int, Any], layers: tuple[int, ...]) -> list[dict[int, Any]]:
        """Return the hidden states of each request's kept nodes."""
        nodes = export_array(self._round.kept.node_indices, self.run.cache.like)
        return [
            {layer: hidden[layer][b].index_select(0, nodes[b, :n]) for layer in layers}
            for b, n in enumerate(self._round.lengths.tolist())
        ]


def _looked_at(
    data: NDArray[np.uint8] | None, layout: list[Where], max_depth: int, width: int
) -> tuple[DraftTree, NDArray[np.int32], Acceptance]:
    """A round's tree of a draft of ``width`` candidates, the choices and what was kept, on the host."""
    read: list[Any] = [looked_at(where, data) for where in layout]
    tree = DraftTree(*read[:7], max_depth, width)
    # in an unused slot the choice follows from whatever logits the target left there
    return tree, np.where(tree.depths >= 0, read[7], np.int32(-1)), Acceptance(*read[8:])


def _signature(draft: Any) -> tuple[Any, ...]:
    """What must be the same for two drafts to be of one form."""
    if type(draft) is not tuple or len(draft) != 2:
        return ()
    parts: list[Any] = []
    for array in draft:
        parts += (type(array), getattr(array, "shape", None), getattr(array, "dtype", None))
        parts += (getattr(array, "device", None), getattr(array, "requires_grad", False))
    return tuple(parts)


def _results_size(B: int, N: int, depth: int, topk: int) -> int:
    """Bytes that a round's results take, and what building a tree works in."""
    from ddtree.kernels.cupy.build_tree import paths_size

    words = -(-N // 32)
    slots: list[tuple[tuple[int, ...], Any]] = [((B, N), np.int32)] * 7 + [((B, N), np.int64)] * 3
    others: list[tuple[tuple[int, ...], Any]] = [((B,), np.int64)] * 5
    work = paths_size(N - 1, depth, min(topk, N - 1), 4)
    return mirror_size(*slots, *others, ((B, N, words), np.uint32), ((B, depth + 1), np.int32), ((B, work), np.uint8))


class _Replay:
    """Work on the current stream at fixed addresses: run, then captured in a graph, then replayed."""

    def __init__(self, work: Callable[[], Any], on_gpu: bool) -> None:
        self.work, self.on_gpu = work, on_gpu
        self.ran = False
        self.graph: Any = None
        self.result: Any = None

    def __call__(self) -> Any:
        """Have the work done; return what it returned when it was captured."""
        if self.graph is not None:
            self.graph.launch()
            return self.result
        if not self.on_gpu or not self.ran:  # a first run loads the kernels
            self.ran = True
            return self.work()
        import cupy

        with cupy.cuda.Stream(non_blocking=True) as stream:
            stream.begin_capture()
            self.result = self.work()
            self.graph = stream.end_capture()
        self.graph.launch()
        return self.result
