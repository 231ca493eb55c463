"""Where two runs of a model may part: at a tie, as exact arithmetic sees it.

Two roundings of the same sums choose different tokens where two logits are nearly equal, or different experts where two
scores are. A first difference is *explained* where the model in float64 is as near to a tie as :data:`BOUNDS` says of
the type that the runs were in; what follows a difference is another text, and says nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from ddtree.arrays import to_numpy
from ddtree.model import DeepseekV3, layers
from ddtree.protocols import KVCache
from ddtree.reference.choose_tokens import gumbel_noise, nucleus
from ddtree.trees import chain_tree

__all__ = ["BOUNDS", "Difference", "HeldWeights", "Sampling", "first_differences"]


@dataclass(frozen=True)
class Bound:
    """How near to a tie explains a difference.

    Attributes
    ----------
    logits : float
        Of two logits, in units of the standard deviation of all logits at that place.
    router : float
        Of the last expert that is chosen and the first that is not, a score in 0 … 1.
    """

    logits: float
    router: float


BOUNDS = {"float64": Bound(1e-11, 1e-12), "float32": Bound(4e-4, 1e-5), "bfloat16": Bound(0.1, 0.01)}
"""By type: some ten times the error of a logit, or of an expert's score, in it."""


@dataclass(frozen=True)
class Sampling:
    """How tokens were chosen, as :func:`ddtree.choose_tokens` takes it; greedily if all is left out."""

    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0


@dataclass(frozen=True)
class Difference:
    """The first place where two runs of a request differ, and how near to a tie exact arithmetic is there.

    Attributes
    ----------
    request, place : int
        Which request, and which of its new tokens, from 0.
    logits : float
        How far the worse of the two tokens is from the best one, noise included, in standard deviations of the logits;
        infinite where one run ended and the other went on.
    router : float
        Least distance of a chosen expert's score from one that was not, over all tokens before and all layers;
        infinite in a model without experts.
    explained : bool
        Whether one of them is within the bound.
    """

    request: int
    place: int
    logits: float
    router: float
    explained: bool


class HeldWeights(Mapping[str, Any]):
    """A model's weights on the host, as a model of some type has them: what is exact there is computed from these.

    In bfloat16 all are rounded but the routers', which such a model keeps in float32.

    Parameters
    ----------
    weights : mapping of str to array
        By Hugging Face's names.
    dtype : str
        Of the model.
    """

    def __init__(self, weights: Mapping[str, Any], dtype: str) -> None:
        self._weights, self._rounds = weights, dtype == "bfloat16"

    def __getitem__(self, name: str) -> Any:
        weight = to_numpy(self._weights[name])
        rounds = self._rounds and ".mlp.gate." not in name
        return weight.astype(ml_dtypes.bfloat16) if rounds else weight

    def __iter__(self) -> Iterator[str]:
        return iter(self._weights)

    def __len__(self) -> int:
        return len(self._weights)

    def __contains__(self, name: object) -> bool:
        return name in self._weights  # Mapping's own would make the tensor


def first_differences(
    exact: DeepseekV3,
    prompts: Sequence[Any],
    one: Sequence[NDArray[np.int32]],
    other: Sequence[NDArray[np.int32]],
    *,
    dtype: str,
    sampling: Sampling | None = None,
    request_ids: Sequence[int] | None = None,
) -> list[Difference]:
    """Return where two runs differ first, one entry a request that differs.

    Parameters
    ----------
    exact : DeepseekV3
        The model with the very weights that the runs had, in float64 and on the host.
    prompts : sequence of array, int, shape (n,)
        What was continued.
    one, other : sequence of array, int32, shape (m,)
        New tokens of each prompt in the two runs.
    dtype : str
        Of the runs: a key of :data:`BOUNDS`.
    sampling : Sampling, optional
        How tokens were chosen.
    request_ids : sequence of int, optional
        Key of each request's noise; its index if left out.

    Raises
    ------
    ValueError
        A type without a bound, a model that is not exact, or not one run a prompt.
    """
    if dtype not in BOUNDS:
        raise ValueError(f"dtype must be one of {', '.join(map(repr, BOUNDS))}, got {dtype!r}")
    if exact.dtype != np.float64 or not isinstance(exact.embedding, np.ndarray):
        raise ValueError(f"exact must be a model in float64 on the host, got {exact!r}")
    if not len(prompts) == len(one) == len(other):
        raise ValueError(f"one and other must have a run a prompt, {len(prompts)}, got {len(one)} and {len(other)}")
    keys = range(len(prompts)) if request_ids is None else request_ids
    found = []
    for request, (prompt, a, b) in enumerate(zip(prompts, one, other, strict=True)):
        both = min(len(a), len(b))
        differ = np.flatnonzero(a[:both] != b[:both])
        if differ.size:
            place = int(differ[0])
            text = np.concatenate([np.asarray(prompt, np.int32), a[:place]])
            tokens = int(a[place]), int(b[place])
            found.append(_difference(exact, request, place, text, tokens, dtype, sampling or Sampling(), keys[request]))
        elif len(a) != len(b):
            found.append(Difference(request, both, np.inf, np.inf, False))
    return found


def _difference(
    exact: DeepseekV3,
    request: int,
    place: int,
    text: NDArray[np.int32],
    tokens: tuple[int, int],
    dtype: str,
    sampling: Sampling,
    key: int,
) -> Difference:
    bound = BOUNDS[dtype]
    logits, router = exact_logits(exact, text)
    scores = sure = logits
    unit = float(logits.std()) or 1.0
    if sampling.temperature > 0:
        unit /= sampling.temperature
        z = (logits - logits.max()) / sampling.temperature
        noisy = z + gumbel_noise(len(z), sampling.seed, key, len(text) - 1)
        scores = sure = noisy
        if sampling.top_p < 1:  # rounding decides about a token at the nucleus' edge: it may win, but need not
            slack = bound.logits * unit
            scores = np.where(nucleus(z, min(1.0, sampling.top_p * (1 + slack))), noisy, -np.inf)
            sure = np.where(nucleus(z, sampling.top_p * max(0.0, 1 - slack)), noisy, -np.inf)
    far = float(sure.max() - min(scores[token] for token in tokens)) / unit
    return _judged(request, place, far, router, bound)


def _judged(request: int, place: int, far: float, router: float, bound: Bound) -> Difference:
    far = max(far, 0.0)
    return Difference(request, place, far, router, far <= bound.logits or router <= bound.router)


def exact_logits(exact: DeepseekV3, text: NDArray[np.int32]) -> tuple[NDArray[np.float64], float]:
    """Logits after a text, and how near any router was to choosing another expert on the way."""
    cache = KVCache(exact.new_cache(1, len(text)), np.zeros((1, 1), np.int32), np.zeros(1, np.int32))
    with _watched_routers() as nearest:
        logits = exact.forward(chain_tree(text[None]), cache, last_only=True).logits[0, 0]
    return logits, min(nearest, default=np.inf)


@contextmanager
def _watched_routers() -> Iterator[list[float]]:
    """Note the distance between the chosen experts and the others, a number a layer."""
    nearest: list[float] = []
    route = layers.route_experts

    def watched(logits: Any, bias: Any, **options: Any) -> Any:
        scores = np.sort(1.0 / (1.0 + np.exp(-logits)) + bias, -1)[:, ::-1]
        k = options["num_experts_per_tok"]
        if k < scores.shape[1]:
            nearest.append(float((scores[:, k - 1] - scores[:, k]).min()))
        return route(logits, bias, **options)

    with patch.object(layers, "route_experts", watched):
        yield nearest
