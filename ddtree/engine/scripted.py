"""A target without weights, whose choices follow texts that are known beforehand."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ddtree.checks import INT32_MAX, integer
from ddtree.protocols import KVCache, TargetOutput
from ddtree.reference import tree_positions
from ddtree.tokens import token_row
from ddtree.trees import DraftTree

__all__ = ["ScriptedTarget"]


class ScriptedTarget:
    """A target that would write given texts: the choice after position p of a text is its token p + 1.

    Real text so stands for a model's choices, and a drafter's acceptance on it is measured in seconds. The logits are
    one-hot, 0 for the token and −inf elsewhere: sampling chooses it too. After a text's last token there is no choice,
    and a run that gets there ends in :class:`NonFiniteLogitsError`.

    Parameters
    ----------
    texts : sequence of array, int, shape (n,)
        Whole texts, one a request, in the order of the prompts. A prompt is the beginning of its text, however long.
    vocab_size : int
        V; all tokens lie in 0 … V − 1.

    Notes
    -----
    The engine moves requests in the batch as others come and go, so a pass must find out whose text a row follows. As
    in a model, that is in the cache: a pass over a request with nothing committed is its prefill, whose tokens say
    which text it is; of texts that begin alike, the first that has not begun. Every cache row that is written holds
    the number of its text. Later passes read it there, so that another request's page shows as another text's tokens.
    """

    def __init__(self, texts: Sequence[ArrayLike], vocab_size: int) -> None:
        self.vocab_size = integer("vocab_size", vocab_size, 1, INT32_MAX)
        self._texts = [token_row(f"texts[{i}]", text, self.vocab_size) for i, text in enumerate(texts)]
        self._begun: set[int] = set()

    def new_cache(self, num_pages: int, page_size: int) -> NDArray[np.int32]:
        """One layer of rows of one number, at first the number of no text. With it the texts begin anew."""
        self._begun.clear()
        return np.full((1, num_pages, page_size, 1), len(self._texts), np.int32)

    def forward(
        self, tree: DraftTree, cache: KVCache, *, hidden_layers: tuple[int, ...] = (), last_only: bool = False
    ) -> TargetOutput:
        """Return one-hot logits after each node, by its position alone. There are no hidden states to ask for."""
        if hidden_layers:
            raise ValueError(f"hidden_layers must be (), a scripted target has none, got {hidden_layers}")
        B, N = tree.token_ids.shape
        positions = tree_positions(tree.depths, cache.prefix_lens)
        logits = np.full((B, 1 if last_only else N, self.vocab_size), -np.inf, np.float32)
        for b in range(B):
            count = int(tree.node_counts[b])
            if count == 0:
                continue  # a slot without a request
            text = self._owner(b, tree, cache)
            rows = int(cache.prefix_lens[b]) + np.arange(count)
            page_size = cache.data.shape[2]
            cache.data[0, cache.page_table[b, rows // page_size], rows % page_size, 0] = text
            nodes = [count - 1] if last_only else range(count)
            for slot, node in enumerate(nodes):
                after = int(positions[b, node]) + 1
                if after < len(self._texts[text]):
                    logits[b, slot, self._texts[text][after]] = 0.0
        return TargetOutput(logits)

    def _owner(self, b: int, tree: DraftTree, cache: KVCache) -> int:
        """Number of the text that row ``b`` of the batch follows."""
        if cache.prefix_lens[b] > 0:
            return int(cache.data[0, cache.page_table[b, 0], 0, 0])
        prompt = tree.token_ids[b, : int(tree.node_counts[b])]
        own = [i for i, text in enumerate(self._texts) if np.array_equal(prompt, text[: len(prompt)])]
        if not own:
            raise ValueError(f"every prompt must be the beginning of a text, got {prompt.tolist()} in row {b}")
        if self._begun.issuperset(own):  # of a run before
            self._begun.difference_update(own)
        text = next(i for i in own if i not in self._begun)
        self._begun.add(text)
        return text
