"""Rounds of a Hugging Face model whose work outside of its forward stays on the GPU, and is read back once.

Before the forward: the tree, what the model reads of it, and its mask. After it: the choices, what is accepted, the
cache's compaction. Both are few launches on arrays at fixed addresses, captured in CUDA graphs when a batch has its
second round. The host gives the drafter's answer and takes the tokens.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ddtree.arrays import dtype_name, export_array, import_array
from ddtree.backends import serving
from ddtree.checks import INT32_MAX
from ddtree.engine import Round
from ddtree.engine.engine import _Run
from ddtree.interop.huggingface_cache import CacheView, ModelCache
from ddtree.interop.mirror import mirror_size, new_mirror
from ddtree.kernels.numba_cpu import find_draft_fault
from ddtree.trees import Acceptance, DraftTree

__all__ = ["DeviceRun"]


class DeviceRun(_Run):
    """A generation whose rounds have a fixed envelope: N = 1 + budget slots of each request, unused ones inert."""

    cache: ModelCache
    _batch: _Batch | None = None

    def round(self) -> Round:
        """Draft, check, commit; finished requests leave."""
        requests = tuple(self.active)
        rows = [self.sequences[r] for r in requests]
        prefix_lens = np.array([sequence.length - 1 for sequence in rows], np.int32)
        if self._batch is None or self._batch.requests != requests:
            self._batch = _Batch(self, requests)
        batch = self._batch

        with self._timed("draft"):
            tree_row = self.cache.arrange(requests, prefix_lens)
            batch.begin([s.root for s in rows], prefix_lens, [s.remaining for s in rows], tree_row)
            width = 1 if self.drafter is None else self._take(batch, *self._draft(batch.roots))
        with self._timed("build_tree"):
            tree, inputs = batch.build()
        with self._timed("forward"):
            view = CacheView(self.cache, batch.prefix_lens, prefix_lens, tree_row)
            inputs = {**inputs, "attention_mask": self.cache.device_masks(tree, view)}
            logits, hidden = self.engine.target.run(inputs, self.cache.past, self.hidden_layers)  # type: ignore[attr-defined]
        with self._timed("choose_tokens"):
            batch.choose(import_array(logits.contiguous()))
        with self._timed("accept_tree"):
            host_tree, choices, kept = batch.accept(width)  # waits for the GPU
        return self._committed(rows, prefix_lens, host_tree, choices, kept, self._shown(hidden, batch, kept))

    def _drafted(self, array: Any) -> Any:
        """A drafter's array where it is: on the host it is checked before it is sent."""
        native = import_array(array)
        return np.ascontiguousarray(native) if isinstance(native, np.ndarray) else self._native(native)

    def _take(self, batch: _Batch, log_probs: Any, token_ids: Any) -> int:
        """Put a draft where the tree is built from; return its candidates a depth."""
        if isinstance(log_probs, np.ndarray) and isinstance(token_ids, np.ndarray):
            if find_draft_fault(log_probs, token_ids, self.engine.vocab_size)[0]:
                self._refuse(batch, log_probs, token_ids)
        else:  # it is checked where it lies, and what was found is read with the rest
            log_probs, token_ids = self._native(log_probs), self._native(token_ids)
            batch.refuse = functools.partial(self._refuse, batch, log_probs, token_ids)
        batch.take(log_probs, token_ids)
        return int(log_probs.shape[2])

    def _refuse(self, batch: _Batch, log_probs: Any, token_ids: Any) -> None:
        """Raise what is wrong with a draft, naming drafter and request."""
        self._likeliest_tree(self._native(log_probs), self._native(token_ids), batch.roots, 0)
        raise AssertionError("a draft was found at fault, and its check finds nothing")

    def _shown(self, hidden: dict[int, Any], batch: _Batch, kept: Acceptance) -> list[dict[int, Any]]:
        """The hidden states of each request's kept nodes."""
        if not self.hidden_layers:
            return [{} for _ in batch.requests]
        nodes = batch.kept_nodes(self.cache.like)
        return [
            {layer: hidden[layer][b].index_select(0, nodes[b, : int(n)]) for layer in self.hidden_layers}
            for b, n in enumerate(kept.lengths)
        ]


class _Built(NamedTuple):
    """What is made of a draft, and where the results behind it begin."""

    tree: DraftTree
    inputs: dict[str, Any]
    positions: Any
    fault: Any
    end: int


class _Batch:
    """What the rounds of some requests work on, at fixed addresses."""

    def __init__(self, run: DeviceRun, requests: tuple[int, ...]) -> None:
        self.run, self.requests = run, requests
        xp, like = run.xp, import_array(run.cache.like)
        depth, budget, topk = run.plan[:3]
        B, N = len(requests), 1 + budget
        self.ops = {op: serving(op, like) for op in ("build_tree", "tree_positions", "choose_tokens", "accept_tree")}
        self.on_gpu = xp is not np

        self._state = new_mirror(like, mirror_size(((4, B), np.int32)))
        with self._state.arrays():
            self.state = xp.empty((4, B), np.int32)
        self.roots, self.prefix_lens, self.remaining, self.tree_rows = self.state
        self._draft = new_mirror(like, mirror_size(*(((B, depth, topk), np.int32),) * 2))
        with self._draft.arrays():
            self.log_probs, self.token_ids = (xp.empty((B, depth, topk), t) for t in (np.float32, np.int32))
        self._draft.on_host(self.log_probs).fill(-np.inf)
        self._draft.on_host(self.token_ids).fill(-1)
        self._draft.send()
        self.keys = xp.asarray(run.keys[list(requests)])
        self._results = new_mirror(like, _results_size(B, N, depth, topk))
        self._build = _Replay(self._built, self.on_gpu)
        self._accept = _Replay(self._accepted, self.on_gpu)
        self._table: Any = None
        self.refuse: Callable[[], None] | None = None
        self._kept: Acceptance
        self._width = 0

    def begin(self, roots: list[int], prefix_lens: NDArray[np.int32], remaining: list[int], tree_row: int) -> None:
        """Send where each request stands."""
        state = self._state.on_host(self.state)
        state[0], state[1], state[2], state[3] = roots, prefix_lens, remaining, tree_row
        self._state.send()

    def take(self, log_probs: Any, token_ids: Any) -> None:
        """Put a draft of k candidates a depth before others of none."""
        k = log_probs.shape[2]
        host = isinstance(log_probs, np.ndarray) and isinstance(token_ids, np.ndarray)
        to = [self._draft.on_host(a) if host else a for a in (self.log_probs, self.token_ids)]
        if k < self._width:
            to[0][:, :, k:] = -np.inf
        if not host and dtype_name(token_ids) == "int64":  # no id that 32 bits would change may pass for another one
            token_ids = token_ids.clip(-1, INT32_MAX)
        to[0][:, :, :k] = log_probs
        to[1][:, :, :k] = token_ids
        self._width = k
        if host:
            self._draft.send()

    def build(self) -> tuple[DraftTree, dict[str, Any]]:
        """Build the trees; return them, and the tokens and positions that the model reads."""
        self._made: _Built = self._build()
        return self._made.tree, self._made.inputs

    def _built(self) -> _Built:
        target, budget = self.run.engine.target, self.run.plan.budget
        with self._results.arrays():
            tree = self.ops["build_tree"](self.log_probs, self.token_ids, self.roots, budget=budget)
            most = INT32_MAX if target.max_context is None else target.max_context - 1  # type: ignore[union-attr]
            sizes = {"vocab_size": target.vocab_size, "max_position": most}
            input_ids, position_ids = self.run.cache.kernels.tree_inputs(tree, self.prefix_lens, **sizes)
            fault = self.run.cache.kernels.find_draft_fault(self.log_probs, self.token_ids, target.vocab_size)
            positions = None
            if self.run.sampling["temperature"] > 0:
                positions = self.ops["tree_positions"](tree.depths, self.prefix_lens)
        exported = [export_array(a, self.run.cache.like) for a in (input_ids, position_ids)]
        inputs = dict(zip(("input_ids", "position_ids"), exported, strict=True))
        return _Built(tree, inputs, positions, fault, self._results.used)

    def choose(self, logits: Any) -> None:
        """Choose the token after each slot."""
        sampling = {name: self.run.sampling[name] for name in ("temperature", "top_p", "seed")}
        with self._results.arrays(self._made.end):
            self._choices = self.ops["choose_tokens"](
                logits, request_ids=self.keys, positions=self._made.positions, **sampling
            )

    def accept(self, width: int) -> tuple[DraftTree, NDArray[np.int32], Acceptance]:
        """Accept, compact and read back: the trees, the choices and what was kept, on the host."""
        table = self.run.cache.table()
        if table is not self._table:  # the layers have moved: a graph of them is no longer one
            self._table, self._accept = table, _Replay(self._accepted, self.on_gpu)
        self._kept, self._results.used = self._accept()
        if self.on_gpu:
            import cupy

            cupy.cuda.get_current_stream().synchronize()
            if self.refuse is not None and int(self._results.on_host(self._made.fault)[0]) != -1:
                self.refuse()
        tree, kept = self._made.tree, self._kept
        fields = (tree.token_ids, tree.parents, tree.depths, tree.ranks, tree.scores, tree.node_counts)
        path = (kept.node_indices, kept.lengths, kept.bonus_token_ids, kept.finished)
        read = self._results.read(*fields, tree.visibility_words, self._choices, *path)
        return DraftTree(*read[:7], tree.max_depth, width), read[7], Acceptance(*read[8:])

    def _accepted(self) -> tuple[Acceptance, int]:
        with self._results.arrays(self._results.used):
            kept = self.ops["accept_tree"](
                self._made.tree, self._choices, remaining=self.remaining, stop_token_ids=self.run.stops
            )
            self.run.cache.kernels.compact_layers(self._table, self.prefix_lens, self.tree_rows, kept)
            self._results.fetch()
        return kept, self._results.used

    def kept_nodes(self, like: Any) -> Any:
        """The kept nodes on the device, as the kind of array that ``like`` is."""
        return export_array(self._kept.node_indices, like)


def _results_size(B: int, N: int, depth: int, topk: int) -> int:
    """Bytes that a round's results take, and what building a tree works in."""
    from ddtree.kernels.cupy.build_tree import paths_size

    words = -(-N // 32)
    slots: list[tuple[tuple[int, ...], Any]] = [((B, N), np.int32)] * 7 + [((B, N), np.int64)] * 3
    others: list[tuple[tuple[int, ...], Any]] = [((B,), np.int32)] * 4
    work = paths_size(N - 1, depth, min(topk, N - 1), 4)
    return mirror_size(*slots, *others, ((B, N, words), np.uint32), ((B, depth + 1), np.int32), ((B, work), np.uint8))


class _Replay:
    """Work on the current stream at fixed addresses: run, then captured in a graph, then replayed."""

    def __init__(self, work: Callable[[], Any], on_gpu: bool) -> None:
        self.work, self.on_gpu = work, on_gpu
        self.ran, self.graph, self.result = False, None, None

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
