"""What a round costs: seconds of drafting, and of checking n nodes behind a context, from measurements.

A :class:`CostModel` is convex and non-decreasing in the number of nodes, which makes the expected rate of a best-first
tree rise to one maximum and fall from there (CaDDTree, arXiv 2606.01813). For what was not measured it has no answer,
unless its caller asks for the nearest one.
"""

from __future__ import annotations

import functools
import json
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ddtree.arrays import array_namespace, to_numpy
from ddtree.checks import INT32_MAX, first, integer, numbers, real
from ddtree.kdtr import atomic_write
from ddtree.protocols import KVCache, Target
from ddtree.trees import tree_from_parents

__all__ = ["CostModel", "fit_cost_model", "measure_passes"]

FORMAT = "ddtree cost model 1"


@dataclass(frozen=True, eq=False)
class CostModel:
    """Seconds of a round, piecewise linear between what was measured.

    Attributes
    ----------
    nodes : array, int64, shape (n,)
        Node counts, the root not counted, rising from 0: a pass over the root alone is a plain decoding step.
    contexts : array, int64, shape (c,)
        Committed cache rows, rising.
    verify_seconds : array, float64, shape (c, n)
        Seconds of the target's pass; of each context, positive, non-decreasing and convex in the nodes.
    draft_seconds : float
        Seconds of the drafter's pass, 0 and up.

    Raises
    ------
    ValueError, TypeError
        A field that is not as above, by name and place.

    Examples
    --------
    >>> costs = CostModel(np.array([0, 8, 64]), np.array([0, 1000]), np.array([[1.0, 1.0, 2.0], [2, 2, 3]]), 0.5)
    >>> costs.seconds([0, 8, 36], 500).tolist()
    [2.0, 2.0, 2.5]
    >>> costs.seconds(8, 2000)
    Traceback (most recent call last):
    ValueError: context must be within what was measured, 0 … 1000, got 2000: measure there, or pass clamp=True
    """

    nodes: NDArray[np.int64]
    contexts: NDArray[np.int64]
    verify_seconds: NDArray[np.float64]
    draft_seconds: float = 0.0

    def __post_init__(self) -> None:
        for name in ("nodes", "contexts"):
            object.__setattr__(self, name, _rising(name, getattr(self, name)))
        seconds = numbers("verify_seconds", self.verify_seconds).astype(np.float64)
        object.__setattr__(self, "verify_seconds", seconds)
        object.__setattr__(self, "draft_seconds", real("draft_seconds", self.draft_seconds, least=0.0))
        if self.nodes[0] != 0:
            raise ValueError(f"nodes must begin at 0, a pass over the root alone, got {self.nodes[0]}")
        wanted = (len(self.contexts), len(self.nodes))
        if seconds.shape != wanted:
            raise ValueError(f"verify_seconds must have shape {wanted}, got {seconds.shape}")
        _check_seconds(seconds)
        slopes = np.diff(seconds, axis=1) / np.diff(self.nodes)
        # what a fit or a decimal notation rounds is no concavity
        slack = 1e-9 * seconds.max() / max(1, self.nodes[-1])
        if (slopes < -slack).any() or (np.diff(slopes, axis=1) < -slack).any():
            raise ValueError(
                "verify_seconds must be non-decreasing and convex in the nodes, as fit_cost_model makes it"
            )

    def seconds(self, nodes: ArrayLike, context: ArrayLike, *, clamp: bool = False) -> NDArray[np.float64]:
        """Seconds of a round, drafting included: linear between the measured nodes and between the contexts.

        Parameters
        ----------
        nodes, context : array, int, shapes that broadcast
            Nodes besides the root; committed rows.
        clamp : bool
            Take the nearest measured value outside the measured range, rather than raise.

        Returns
        -------
        array, float64

        Raises
        ------
        ValueError
            Nodes or a context outside what was measured.
        """
        n, c = (numbers(name, a).astype(np.float64) for name, a in (("nodes", nodes), ("context", context)))
        try:
            np.broadcast_shapes(n.shape, c.shape)
        except ValueError:
            raise ValueError(
                f"nodes and context must have shapes that broadcast, got {n.shape} and {c.shape}"
            ) from None
        for name, values, known in (("nodes", n, self.nodes), ("context", c, self.contexts)):
            outside = ~((values >= known[0]) & (values <= known[-1]))
            if np.isnan(values).any() or (outside.any() and not clamp):
                raise ValueError(
                    f"{name} must be within what was measured, {known[0]} … {known[-1]}, "
                    f"got {values[outside].flat[0]:g}: measure there, or pass clamp=True"
                )
        low, weight = self.place(c)
        at = np.interp(n, self.nodes, np.arange(len(self.nodes)))
        left = np.minimum(at.astype(np.int64), max(0, len(self.nodes) - 2))
        right, inner = np.minimum(left + 1, len(self.nodes) - 1), at - left
        rows = self.verify_seconds
        high = np.minimum(low + 1, len(self.contexts) - 1)
        lower = rows[low, left] * (1.0 - inner) + rows[low, right] * inner
        upper = rows[high, left] * (1.0 - inner) + rows[high, right] * inner
        result: NDArray[np.float64] = np.asarray(self.draft_seconds + (lower * (1.0 - weight) + upper * weight))
        return result

    def place(self, context: ArrayLike) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """Which measured context is at or below each context, and the weight of the next, 0 … 1; clamped."""
        at = np.interp(np.asarray(context, np.float64), self.contexts, np.arange(len(self.contexts)))
        low = np.minimum(at.astype(np.int64), max(0, len(self.contexts) - 2))
        return low, at - low

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the model as JSON, whole or not at all."""
        document = {
            "format": FORMAT,
            "nodes": self.nodes.tolist(),
            "contexts": self.contexts.tolist(),
            "verify_seconds": self.verify_seconds.tolist(),
            "draft_seconds": self.draft_seconds,
        }
        with atomic_write(path) as file:
            file.write(json.dumps(document, indent=1).encode() + b"\n")

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> CostModel:
        """Read what :meth:`save` wrote.

        Raises
        ------
        ValueError
            The file is no cost model, or a field is not as it must be: file and field are named.
        """
        try:
            with open(path, encoding="utf-8") as file:
                document = json.load(file)
        except (ValueError, RecursionError) as error:  # neither JSON nor UTF-8, or lists in lists too deep
            raise ValueError(f"{path}: must be JSON, got {error}") from error
        if not isinstance(document, dict) or document.get("format") != FORMAT:
            raise ValueError(f"{path}: format must be {FORMAT!r}, as CostModel.save writes it")
        missing = [n for n in ("nodes", "contexts", "verify_seconds", "draft_seconds") if n not in document]
        if missing:
            raise ValueError(f"{path}: {missing[0]} is missing")
        try:
            return cls(document["nodes"], document["contexts"], document["verify_seconds"], document["draft_seconds"])
        except (ValueError, TypeError) as error:
            raise ValueError(f"{path}: {error}") from error


def fit_cost_model(
    nodes: ArrayLike, contexts: ArrayLike, verify_seconds: ArrayLike, *, draft_seconds: float = 0.0
) -> CostModel:
    """Fit a cost model to measured passes: of each context, least squares among convex non-decreasing functions.

    A convex, non-decreasing, piecewise linear function with its knots at the measured node counts is a constant plus
    ramps max(n − knot, 0), all with weights ≥ 0; so this is non-negative least squares, solved exactly by Lawson and
    Hanson's active sets (Solving Least Squares Problems, 1974, chapter 23).

    Parameters
    ----------
    nodes, contexts, verify_seconds : array, shape (m,)
        One entry a measured pass: nodes besides the root, committed rows, and its seconds, over 0. Repeats count each.
        Every context has the same node counts, 0 among them.
    draft_seconds : float
        Seconds of a drafter's pass.

    Returns
    -------
    CostModel

    Raises
    ------
    ValueError, TypeError
        Measurements that are not as above.

    Examples
    --------
    >>> model = fit_cost_model([0, 1, 2, 3], [7, 7, 7, 7], [2.0, 3.0, 2.0, 5.0])
    >>> model.verify_seconds.round(3).tolist()
    [[2.333, 2.333, 2.333, 5.0]]
    """
    n, c = (_whole(name, a) for name, a in (("nodes", nodes), ("contexts", contexts)))
    s = numbers("verify_seconds", verify_seconds).astype(np.float64)
    if not n.shape == c.shape == s.shape or n.ndim != 1 or n.size == 0:
        raise ValueError(
            f"nodes, contexts and verify_seconds must have one shape (m,) with m >= 1, "
            f"got {n.shape}, {c.shape} and {s.shape}"
        )
    _check_seconds(s)
    knots, where = np.unique(n), np.unique(c)
    fitted = np.empty((len(where), len(knots)))
    for row, context in zip(fitted, where, strict=True):
        at = c == context
        absent = np.setdiff1d(knots, n[at])
        if absent.size:
            raise ValueError(
                f"nodes must have every count at every context, got none of {int(absent[0])} at context {int(context)}"
            )
        ramps = np.maximum(n[at][:, None] - knots[:-1], 0).astype(np.float64)
        scale = np.maximum(ramps.max(0, initial=1.0), 1.0)  # columns of one size
        weights = _nonnegative_least_squares(np.column_stack([np.ones(at.sum()), ramps / scale]), s[at])
        row[:] = weights[0] + (np.maximum(knots[:, None] - knots[:-1], 0) / scale) @ weights[1:]
    return CostModel(knots, where, fitted, draft_seconds)


def measure_passes(
    target: Target,
    nodes: Sequence[int],
    contexts: Sequence[int],
    *,
    repeats: int = 7,
    page_size: int = 16,
    time_pass: Callable[[Callable[[], Any], int], Sequence[float]] | None = None,
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.float64]]:
    """Time a target's passes over trees of one request, for :func:`fit_cost_model`.

    Parameters
    ----------
    target : Target
        The model.
    nodes : sequence of int
        Node counts besides the root, 0 among them.
    contexts : sequence of int
        Committed rows, whose content is zeros.
    repeats : int
        Timed passes of each; one more goes before them untimed.
    page_size : int
        Rows of a cache page.
    time_pass : callable, optional
        ``time_pass(run, repeats)`` times calls of ``run``, which starts a pass and returns its output, and returns the
        seconds of each: for passes that are captured and replayed, say. By default the wall clock, one pass untimed
        before, until the logits are there.

    Returns
    -------
    nodes, contexts, verify_seconds : array, int64, int64 and float64, shape (m,)
        One entry a timed pass.
    """
    counts = [integer(f"nodes[{i}]", n, 0, INT32_MAX - 1) for i, n in enumerate(nodes)]
    lens = [integer(f"contexts[{i}]", c, 0, INT32_MAX) for i, c in enumerate(contexts)]
    integer("repeats", repeats, 1, INT32_MAX)
    found: list[tuple[int, int, float]] = []
    for n, context in ((n, c) for c in lens for n in counts):
        pages = -(-(context + 1 + n) // page_size)
        data = target.new_cache(pages, page_size)
        data.view(np.uint8).fill(0)  # whatever its type
        xp = array_namespace(data)
        # the shape of a best-first tree: every second node goes on, the others are siblings
        tree = tree_from_parents(np.zeros((1, 1 + n), np.int32), [[-1, *(i // 2 for i in range(n))]])
        native = replace(tree, **{k: xp.asarray(v) for k, v in vars(tree).items() if isinstance(v, np.ndarray)})
        cache = KVCache(data, xp.arange(pages, dtype=np.int32)[None], xp.asarray(np.array([context], np.int32)))
        run = functools.partial(target.forward, native, cache)
        found += [(n, context, seconds) for seconds in (time_pass or _by_the_clock)(run, repeats)]
    at, rows, seconds = (np.array(column) for column in zip(*found, strict=True))
    return at.astype(np.int64), rows.astype(np.int64), seconds.astype(np.float64)


def _by_the_clock(run: Callable[[], Any], repeats: int) -> list[float]:
    seconds = []
    for _ in range(1 + repeats):
        start = time.perf_counter()
        to_numpy(run().logits[:, :1, :1])  # waits for a GPU
        seconds.append(time.perf_counter() - start)
    return seconds[1:]


def _nonnegative_least_squares(A: NDArray[np.float64], b: NDArray[np.float64]) -> NDArray[np.float64]:
    """The x >= 0 of least |Ax − b|: columns enter by their gradient and leave where they would turn negative."""
    x = np.zeros(A.shape[1])
    active = np.zeros(A.shape[1], np.bool_)
    tolerance = 1e-12 * float(np.abs(A.T @ b).max(initial=0.0))
    for _ in range(30 * A.shape[1]):
        gradient = np.where(active, -np.inf, A.T @ (b - A @ x))
        if gradient.max() <= tolerance:
            break
        active[gradient.argmax()] = True
        while True:
            trial = np.zeros_like(x)
            trial[active] = np.linalg.lstsq(A[:, active], b, rcond=None)[0]
            negative = active & (trial <= 0)
            if not negative.any():
                break
            step = (x[negative] / (x[negative] - trial[negative])).min()
            x += step * (trial - x)
            active &= x > tolerance
            x[~active] = 0.0
        x = trial
    return x


def _check_seconds(seconds: NDArray[np.float64]) -> None:
    wrong = ~(np.isfinite(seconds) & (seconds > 0))
    if wrong.any():
        place = first(wrong)
        raise ValueError(f"verify_seconds{list(place)} must be finite and over 0, got {seconds[place]}")


def _whole(name: str, values: Any) -> NDArray[np.int64]:
    array = numbers(name, values)
    if array.size and array.dtype.kind not in "iu":
        raise TypeError(f"{name} must hold integers, got {array.dtype}")
    return array.astype(np.int64)


def _rising(name: str, values: Any) -> NDArray[np.int64]:
    array = _whole(name, values)
    if array.ndim != 1 or array.size == 0 or (np.diff(array) <= 0).any():
        raise ValueError(f"{name} must have shape (n,) with n >= 1 and rise, got {array.tolist()}")
    integer(f"{name}[0]", int(array[0]), 0, 2**62)
    return array
