"""What a generation leaves behind: tokens, every round, and the time of each stage."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ddtree.svg import tree_svg
from ddtree.trees import Acceptance, DraftTree

__all__ = ["RESIDENT_STAGES", "STAGES", "Emission", "Generation", "Round"]

FinishReason = Literal["stop", "length", "error"]

STAGES = ("prefill", "draft", "build_tree", "forward", "choose_tokens", "accept_tree", "compact_cache")
"""The parts of a generation, in order; the first once a request, the others once a round."""

RESIDENT_STAGES = ("prefill", "rounds")
"""Those of resident rounds, whose parts the host does not see."""


@dataclass(frozen=True, eq=False)
class Round:
    """One round of the requests that were still running, on the host. Like its arrays, it is equal to itself alone.

    Attributes
    ----------
    request_ids : tuple of int
        Each row's request, as an index among the prompts.
    tree : DraftTree
        What was drafted.
    target_token_ids : array, int32, shape (B, N)
        The target's choice after each node.
    acceptance : Acceptance
        The kept path, the bonus, and who finished.
    """

    request_ids: tuple[int, ...]
    tree: DraftTree
    target_token_ids: NDArray[np.int32]
    acceptance: Acceptance

    def _repr_svg_(self) -> str:
        """Show the trees and their accepted paths in a notebook."""
        return tree_svg(self.tree, path=self.acceptance.node_indices)


class Emission(NamedTuple):
    """What one request emitted in one step, as soon as it is committed.

    Attributes
    ----------
    request_id : int
        The request, as an index among the prompts.
    token_ids : array, int32, shape (n,)
        Its new tokens, one or more: the prefill's one, or a round's accepted drafts and the bonus.
    finish_reason : str or None
        "stop" or "length" with its last tokens; None before.
    """

    request_id: int
    token_ids: NDArray[np.int32]
    finish_reason: FinishReason | None


@dataclass(repr=False)
class Generation:
    """The result of :meth:`ddtree.engine.Engine.generate`.

    Attributes
    ----------
    tokens : list of array, int32
        New tokens of each prompt, the prefill's first; a stop token, if met, is the last.
    finish_reasons : list of str
        "stop" or "length", one a prompt; "error" where an error that carries this says that one failed.
    rounds : list of Round
        Every round, first to last.
    tokens_per_round : list of array, int32
        Tokens that each round emitted, one array a prompt: the bonus included, after stops.
    seconds : dict of str to float
        Wall time of each stage in ``STAGES``, summed; or, of resident rounds, in ``RESIDENT_STAGES``.
    prompt_lens : list of int
        Tokens of each prompt; empty where that is not known.
    """

    tokens: list[NDArray[np.int32]]
    finish_reasons: list[FinishReason]
    rounds: list[Round] = field(default_factory=list)
    tokens_per_round: list[NDArray[np.int32]] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)
    prompt_lens: list[int] = field(default_factory=list)

    def __repr__(self) -> str:
        tau = "none" if self.tau is None else f"{self.tau:.2f}"
        tokens = sum(map(len, self.tokens))
        return f"Generation({len(self.tokens)} prompts, {tokens} tokens, {self.num_rounds} rounds, tau={tau})"

    @property
    def num_rounds(self) -> int:
        """Rounds, each request's counted apart."""
        return sum(len(row) for row in self.tokens_per_round)

    @property
    def tau(self) -> float | None:
        """Mean tokens emitted a round, τ: over all rounds of all requests; None where there was no round."""
        counts: NDArray[Any] = np.concatenate([np.zeros(0, np.int32), *self.tokens_per_round])
        return float(counts.mean()) if counts.size else None
