"""Rounds that the host makes one after another: it reads each round's end before it begins the next."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ddtree.arrays import export_array, to_numpy
from ddtree.engine.records import Round
from ddtree.engine.run import Run, converted, joined, name_of, one_token_each
from ddtree.ops import accept_tree, build_tree, tree_positions
from ddtree.policies import check_policy_tree
from ddtree.protocols import CachingTarget
from ddtree.reference import emitted_tokens
from ddtree.trees import Acceptance, DraftTree, chain_tree

__all__ = ["HostRun"]


class HostRun(Run):
    """A run whose batch shrinks and grows with its requests; any target, drafter and policy will do."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.hidden_states: dict[int, dict[int, Any]] = {}

    def steps(self) -> Iterator[Round | None]:
        """Run to the end; each time that requests begin, their prefill is a step, which is no round (None)."""
        try:
            while self.waiting or self.active:
                if self.waiting and (admitted := self.admit()):
                    self.begin(admitted)
                    yield None
                if self.active:
                    yield self.round()
        finally:
            self.close()
            self.forget()

    def close(self) -> None:
        """Give back what rounds have been holding from one to the next: here nothing."""

    def begin(self, requests: list[int]) -> None:
        """Run the prompts of ``requests`` and commit the token after each."""
        self.emissions = []
        with self.on_its_stream(), self.timed("prefill"):
            choices, hidden_states = self.prefill(requests)
            tokens = to_numpy(choices)
        ended = self.commit(requests, one_token_each(tokens), of_round=False)
        for request, states in zip(requests, hidden_states, strict=True):
            if request not in ended:  # who ends here never drafted
                self.hidden_states[request] = states
                self.began.append(request)

    def prefill(self, requests: list[int]) -> tuple[Any, list[dict[int, Any]]]:
        """Run the prompts of ``requests``, a piece of each at a time.

        Returns
        -------
        choices : array, int32, shape (n,)
            The token after each prompt, where the target is.
        hidden_states : list of dict of int to array
            Of each prompt's rows.
        """
        prompts = [self.committed.prompt(r) for r in requests]
        lens = np.array([len(prompt) for prompt in prompts], np.int32)
        # a target with a cache of its own takes prompts whole, as it likes them
        whole = isinstance(self.engine.target, CachingTarget)
        most = int(lens.max()) if whole else self.engine.prefill_chunk
        ended: list[tuple[NDArray[np.int64], Any]] = []  # which prompts each pass ends, and what follows them
        hidden: list[list[dict[int, Any]]] = [[] for _ in prompts]
        for start in range(0, int(lens.max()), most):
            rows = np.flatnonzero(lens > start)
            pieces = [prompts[b][start : start + most] for b in rows]
            tree = converted(_chains(pieces), self.native)
            taken = np.array([len(piece) for piece in pieces], np.int32)
            running = [requests[b] for b in rows]
            view = self.cache.view(running, np.full_like(taken, start), taken)
            with self.naming("the prefill", running):
                output = self.forward(tree, view, last_only=True)
            for b, (row, count) in enumerate(zip(rows, taken, strict=True)):
                hidden[row].append({layer: output.hidden_states[layer][b, :count] for layer in self.hidden_layers})
            last = np.flatnonzero(lens[rows] <= start + most)  # no one asks what follows other pieces
            if last.size:
                logits = output.logits if last.size == len(rows) else output.logits[self.xp.asarray(last)]
                positions = self.xp.asarray((start + taken[last] - 1)[:, None].astype(np.int32))
                ended.append((rows[last], self.choose(logits, positions, self.keys[[running[b] for b in last]])[:, 0]))
        if len(ended) == 1:
            return ended[0][1], [joined(parts) for parts in hidden]
        choices = self.xp.zeros(len(prompts), np.int32)
        for rows, chosen in ended:
            choices[self.xp.asarray(rows)] = chosen
        return choices, [joined(parts) for parts in hidden]

    def round(self) -> Round:
        """Draft, check, commit; finished requests leave."""
        with self.on_its_stream():
            return self._round()

    def _round(self) -> Round:
        requests, backend = np.array(self.active), self.engine.backend
        # The root's own row is written by this round's pass.
        prefix_lens = (self.committed.lengths[requests] - 1).astype(np.int32)
        roots = self.xp.asarray(self.committed.roots(requests))

        with self.timed("draft"):
            log_probs, token_ids = self.draft_or_none(roots)
        with self.timed("build_tree"):
            tree = self.build_tree(log_probs, token_ids, roots, prefix_lens)
        with self.timed("forward"):
            cache = self.cache.view(self.active, prefix_lens, tree.num_slots)
            with self.naming("a round", self.active):
                output = self.forward(tree, cache)
        with self.timed("choose_tokens"):
            positions = tree_positions(tree.depths, cache.prefix_lens, backend=backend, validate=False)
            choices = self.choose_given(output.logits, positions)
        with self.timed("accept_tree"):
            remaining = self.xp.asarray(self.committed.remaining[requests].astype(np.int32))
            acceptance = accept_tree(
                tree, choices, remaining=remaining, stop_token_ids=self.stops, backend=backend, validate=False
            )
            kept: Acceptance = converted(acceptance, to_numpy)  # waits for a GPU
        with self.timed("compact_cache"):
            self.cache.compact(cache, acceptance)

        def shown(b: int, path: NDArray[Any]) -> dict[int, Any]:
            return self.kept_rows(output.hidden_states, b, path)

        return self.end_round(converted(tree, to_numpy), to_numpy(choices), kept, shown)

    def end_round(
        self,
        tree: DraftTree,
        choices: NDArray[np.int32],
        kept: Acceptance,
        shown: Callable[[int, NDArray[Any]], dict[int, Any]],
    ) -> Round:
        """Commit what the active requests have kept, all on the host; ``shown(b, path)`` are a path's hidden states."""
        requests = list(self.active)
        self.emissions = []
        ended = self.commit(requests, emitted_tokens(tree, kept).reshape(-1).data)
        for b, request in enumerate(requests):
            if request in ended:
                del self.hidden_states[request]
            else:
                self.hidden_states[request] = shown(b, kept.node_indices[b, : kept.lengths[b]])
        # In an unused slot the choice follows from whatever logits the target left there.
        target_token_ids = np.where(tree.depths >= 0, choices, np.int32(-1))
        return Round(tuple(requests), tree, target_token_ids, kept)

    def leaves_out_unused(self, shape: tuple[int, ...], wanted: tuple[int, ...], tree: DraftTree) -> bool:
        """Whether logits of another shape are those of fewer slots, of which no request uses more."""
        same = len(shape) == 3 and (shape[0], shape[2]) == (wanted[0], wanted[2])
        return same and int(tree.node_counts.max()) <= shape[1] < wanted[1]

    def draft_or_none(self, roots: Any) -> tuple[Any, Any]:
        """The drafter's draft, or one of nothing where none is asked for."""
        if self.drafter is None:
            shape = (len(self.active), self.plan.depth, 1)
            return self.xp.full(shape, -np.inf, np.float32), self.xp.full(shape, -1, np.int32)
        return self.draft(roots, [self.hidden_states[r] for r in self.active])

    def build_tree(self, log_probs: Any, token_ids: Any, roots: Any, prefix_lens: NDArray[np.int32]) -> DraftTree:
        """Build the trees of a draft whose values are checked, on any device: no id may reach the model's embedding."""
        self.refuse_nan(log_probs)
        policy = self.plan.policy
        if policy is None:
            return self.likeliest_tree(log_probs, token_ids, roots, self.plan.budget)
        self.likeliest_tree(log_probs, token_ids, roots, 0)  # the root alone: it checks the draft
        token_ids = token_ids.astype(np.int32, copy=False)
        # copies: what a policy writes into them changes nothing that is committed, and is not what its tree is held to
        tree = policy(log_probs.copy(), token_ids.copy(), roots.copy(), self.xp.array(prefix_lens))
        tree = check_policy_tree(policy, tree, log_probs, token_ids, roots, budget=self.plan.budget)
        return converted(tree, self.native)

    def refuse_nan(self, log_probs: Any) -> None:
        """A NaN ends a draft for those who build trees of it; from a drafter, before the row's end, it is a fault."""
        if not self.xp.isnan(log_probs).any():
            return
        drafted = self.xp.cumsum(log_probs == -np.inf, axis=-1) == 0
        wrong = to_numpy((self.xp.isnan(log_probs) & drafted).any(axis=(1, 2)))
        if wrong.any():
            request = self.active[int(np.flatnonzero(wrong)[0])]
            raise ValueError(
                f"drafter {name_of(self.drafter)}, request {request}: log_probs must be numbers up to a row's first "
                "-inf, got NaN: a depth at which nothing more is drafted ends in -inf"
            )

    def likeliest_tree(self, log_probs: Any, token_ids: Any, roots: Any, budget: int) -> DraftTree:
        """The trees of the ``budget`` likeliest paths; a fault of the draft names the request."""

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
                    raise ValueError(f"drafter {name_of(self.drafter)}, request {request}: {error}") from error
            raise

    def choose_given(self, logits: Any, positions: Any) -> Any:
        """The choice after each slot; 0 in the last ones, if the target left out their logits since none is in use."""
        slots, given = positions.shape[1], logits.shape[1]
        choices = self.choose(logits, positions[:, :given], self.keys[self.active])
        return choices if given == slots else self.xp.pad(choices, ((0, 0), (0, slots - given)))

    def kept_rows(self, hidden_states: dict[int, Any], b: int, path: NDArray[Any]) -> dict[int, Any]:
        """The hidden states of a request's kept nodes, wherever in the tree they stood, for its next draft."""
        nodes = self.xp.asarray(path)
        shown = {layer: hidden_states[layer] for layer in self.hidden_layers}
        return {layer: states[b, export_array(nodes, states)] for layer, states in shown.items()}


def _chains(pieces: list[NDArray[np.int32]]) -> DraftTree:
    lens = np.array([len(piece) for piece in pieces], np.int32)
    padded = np.zeros((len(pieces), lens.max()), np.int32)
    for row, piece in zip(padded, pieces, strict=True):
        row[: len(piece)] = piece
    return chain_tree(padded, lens)
