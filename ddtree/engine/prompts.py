"""Prompts of resident runs: passes of few shapes, each of which also puts its requests into their slots.

Prompts are run in parts. Small parts are padded to one of few shapes, so that a CUDA graph serves them: one copy of
what they are, one launch, and the choice after each prompt on its way back. Letters: B slots, n places of a pass, N
tokens of each, R the most tokens of a request.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ddtree.engine.graphs import Inputs, Repeated
from ddtree.protocols import KVCache
from ddtree.trees import DraftTree, chain_tree

if TYPE_CHECKING:
    from ddtree.engine.resident import ResidentRun, RoundLoop

__all__ = ["MOST_ROWS", "Part", "PromptPass", "parts_of"]

MOST_ROWS = 128
"""Rows, n · N, of a pass that is captured: up to so many, a row's products do not depend on what else is in a pass."""
LEAST_WIDTH = 8
MOST_PASSES = 4
"""So many captured passes take the place of one of all rows whose kernels are launched one by one: on an H200 they take
0.5 to 1.1 of its time, by model, and eight 0.6 to 1.5."""


MOST_PADDING = 4
"""So many times the rows of small passes, and no more, may those of passes over all prompts be."""


class Part(NamedTuple):
    """What one pass takes of some prompts: tokens ``start`` to ``start + most`` of each, as far as it has them.

    Attributes
    ----------
    prompts : list of int
        Which ones, in order: they have more than ``start`` tokens.
    start, most : int
        Of all of them.
    places, width : int
        n and N, the shape that the pass is padded to.
    """

    prompts: list[int]
    start: int
    most: int
    places: int
    width: int


def parts_of(lens: list[int], chunk: int) -> list[Part]:
    """Divide prompts into passes: small ones of few shapes, unless those would be too many, and few of them padding.

    Parameters
    ----------
    lens : list of int
        Tokens of each prompt, 1 and up.
    chunk : int
        The most tokens of a prompt that one pass takes.

    Returns
    -------
    list of Part
        In an order in which no token comes before an earlier one of its prompt.

    Examples
    --------
    >>> [part[:3] + part[3:] for part in parts_of([5, 20, 130], 2048)]
    [([0, 1], 0, 128, 2, 32), ([2], 0, 128, 1, 128), ([2], 128, 128, 1, 8)]
    """
    most = min(chunk, MOST_ROWS)
    small = [part for start, going in _going(lens, most) for part in _packed(lens, going, start, most)]
    whole = [
        Part(going, start, chunk, len(going), min(chunk, max(lens[i] for i in going) - start))
        for start, going in _going(lens, chunk)
    ]
    padding = _rows(whole) > MOST_PADDING * _rows(small)  # one long prompt among short ones
    return small if padding or len(small) <= MOST_PASSES * len(whole) else whole


def _rows(parts: list[Part]) -> int:
    return sum(part.places * part.width for part in parts)


def _going(lens: list[int], most: int) -> list[tuple[int, list[int]]]:
    """Where passes over ``most`` tokens begin, and which prompts have more than that."""
    return [(start, [i for i, n in enumerate(lens) if n > start]) for start in range(0, max(lens), most)]


def _packed(lens: list[int], going: list[int], start: int, most: int) -> list[Part]:
    """Neighbours in one pass, as far as there is room for them."""
    parts: list[Part] = []
    for i in going:
        width = _padded(min(most, lens[i] - start), LEAST_WIDTH)
        if parts:
            last = parts[-1]
            places, wider = _padded(len(last.prompts) + 1), max(width, last.width)
            if places * wider <= MOST_ROWS:
                parts[-1] = Part([*last.prompts, i], start, most, places, wider)
                continue
        parts.append(Part([i], start, most, 1, width))
    return parts


def _padded(count: int, least: int = 1) -> int:
    """The next power of two."""
    return max(least, 1 << (count - 1).bit_length())


UNUSED = {
    "token_ids": -1, "parents": -1, "depths": -1, "ranks": -1, "scores": -np.inf, "node_counts": 0,
    "visibility_words": 0,
}  # fmt: skip
"""What the arrays of a tree hold in a free place."""


class PromptPass(Repeated):
    """A pass of one shape over parts of prompts, which takes each request to its slot.

    Parameters
    ----------
    loop : RoundLoop
        Whose state and cache it writes.
    places, width : int
        n and N.

    Attributes
    ----------
    choices : array, int32, shape (n,)
        The token after each part, once it has run.
    hidden_states : dict of int to array
        Of its rows, each (n, N, D). A later replay writes over both.
    counts : list of int
        Rows of each place in use.
    """

    def __init__(self, loop: RoundLoop, places: int, width: int) -> None:
        super().__init__(loop.xp)
        slots, pages = loop.state.page_table.shape
        nodes, column = (places, width), (places,)
        self.loop, self.shape = loop, nodes
        self.inputs = Inputs(
            loop.xp,
            {
                **{name: (nodes, np.int32) for name in ("token_ids", "parents", "depths", "ranks")},
                "scores": (nodes, np.float64),
                "visibility_words": ((*nodes, -(-width // 32)), np.uint32),
                # rows before the part, the last row's position, and tokens that remain after the choice, 0 if the
                # prompt goes on: its slot is inert until then
                **{name: (column, np.int32) for name in ("node_counts", "starts", "left")},
                "positions": ((places, 1), np.int32),
                "keys": (column, np.int64),
                "page_table": ((places, pages), np.int32),
                # of each slot the place that is for it, −1 for none
                "place_of": ((slots,), np.int32),
            },
        )
        arrays = self.inputs.arrays
        self.tree = DraftTree(
            **{name: arrays[name] for name in UNUSED}, max_depth=width - 1, num_candidates=min(width - 1, 1)
        )
        self.cache = KVCache(loop.like, arrays["page_table"], arrays["starts"])
        self.choices: Any = None
        self.hidden_states: dict[int, Any] = {}
        self.counts: list[int] = []

    def start(self, part: Part, slots: list[int], requests: list[int], run: ResidentRun) -> NDArray[np.int64]:
        """Start the pass over a part; ``slots`` and ``requests`` are those of all prompts.

        Returns
        -------
        array, int64, shape (n,)
            The request whose prompt ends here, of each place; −1 for none.
        """
        ended = self.send(part, slots, requests, run)
        self.repeat(lambda: self.work(run))
        return ended

    def send(self, part: Part, slots: list[int], requests: list[int], run: ResidentRun) -> NDArray[np.int64]:
        """Write down what the pass is about, and have it go where the pass reads it; return what :meth:`start` does."""
        of_part = np.array([requests[i] for i in part.prompts], np.int64)
        used, host = len(of_part), self.inputs.write()
        lens = run.committed.prompt_lens[of_part]
        counts = np.minimum(lens - part.start, part.most)
        tokens = np.zeros((used, self.shape[1]), np.int32)
        for row, request, count in zip(tokens, of_part.tolist(), counts.tolist(), strict=True):
            row[:count] = run.committed.prompt(request)[part.start :][:count]
        tree, ends = chain_tree(tokens, counts), part.start + counts
        values = {
            "starts": part.start,
            "left": np.where(ends == lens, run.committed.remaining[of_part] - 1, 0),
            "positions": ends[:, None] - 1,
            "keys": run.keys[of_part],
        }
        for name, free in UNUSED.items():
            host[name][:used], host[name][used:] = getattr(tree, name), free
        for name, value in values.items():
            host[name][:used], host[name][used:] = value, 0
        host["page_table"][...] = 0
        host["page_table"][:used, : run.table.shape[1]] = run.table[of_part]
        host["place_of"][...] = -1
        host["place_of"][[slots[i] for i in part.prompts]] = np.arange(used)
        self.inputs.send()
        self.counts = counts.tolist()
        ended = np.full(self.shape[0], -1, np.int64)
        ended[:used] = np.where(ends == lens, of_part, -1)
        return ended

    def work(self, run: ResidentRun) -> None:
        """Launch the pass."""
        arrays = self.inputs.arrays
        output = run.forward(self.tree, self.cache, last_only=True)
        self.loop.open_drafter(run, output.hidden_states)  # whose slots are free until then
        self.choices = run.choose(output.logits, arrays["positions"], arrays["keys"])[:, 0]
        self.occupy(self.choices)
        self.hidden_states = {layer: output.hidden_states[layer] for layer in run.hidden_layers}

    def occupy(self, choices: Any) -> None:
        """Set the state of the places' slots: to that of a request whose prompt ends here, or of an inert one."""
        s, xp, arrays = self.loop.state, self.xp, self.inputs.arrays
        place_of, starts, counts = arrays["place_of"], arrays["starts"], arrays["node_counts"]
        taken = place_of >= 0
        rows = starts + counts
        ended = (choices < 0) | (choices[:, None] == self.loop.stops).any(axis=1)
        left = xp.where(ended, 0, arrays["left"])
        values = {
            "lengths": rows + 1, "prefix_lens": rows, "prompt_lens": rows, "roots": xp.maximum(choices, 0),
            "remaining": left, "running": left > 0, "kept": xp.zeros_like(rows), "keys": arrays["keys"],
        }  # fmt: skip
        for name, of_places in values.items():
            xp.copyto(getattr(s, name), of_places[place_of], where=taken)
        xp.copyto(s.page_table, arrays["page_table"][place_of], where=taken[:, None])
        # where each of a slot's tokens is in its part, and the choice behind it
        width = self.shape[1]
        at = xp.arange(s.tokens.shape[1], dtype=np.int32) - starts[place_of][:, None]
        of_part = arrays["token_ids"].reshape(-1)[place_of[:, None] * width + xp.clip(at, 0, width - 1)]
        ends = counts[place_of][:, None]
        xp.copyto(s.tokens, of_part, where=taken[:, None] & (at >= 0) & (at < ends))
        xp.copyto(s.tokens, choices[place_of][:, None], where=taken[:, None] & (at == ends))

    def kept_states(self) -> list[dict[int, Any]]:
        """Hidden states of each place in use, (count, D), which no replay writes over."""
        states = {layer: rows if self.replay is None else rows.copy() for layer, rows in self.hidden_states.items()}
        return [{layer: rows[b, :count] for layer, rows in states.items()} for b, count in enumerate(self.counts)]
