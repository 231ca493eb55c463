"""Weights of a model that nobody trained, for benchmarks and tests: the same on every device."""

from __future__ import annotations

import functools
import hashlib
import importlib
from collections.abc import Iterator, Mapping
from statistics import NormalDist
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ddtree.backends import get_backend
from ddtree.checks import integer, real
from ddtree.model.config import ModelConfig

__all__ = ["random_weights"]

LEAST_STD, MOST_STD = 1e-30, 1e30
_QUANTILES = 1 << 16
_PIECE = 1 << 24
"""Elements that are made at a time."""


def random_weights(
    config: ModelConfig,
    seed: int = 0,
    *,
    std: float = 0.02,
    fused_experts: bool = False,
    backend: str | None = None,
) -> Mapping[str, Any]:
    """Give a configuration's tensors by Hugging Face's names, with what transformers initialises them by.

    Matrices are normal with mean 0, gains of norms are 1 and the routers' biases 0. A tensor is made when it is asked
    for, where it is to lie, and not kept.

    Parameters
    ----------
    config : ModelConfig
        The shape.
    seed : int
        0 … 2⁶³ − 1. A tensor's values depend on it and on the tensor's name alone, to the bit: not on the device, nor
        on what else is asked for.
    std : float
        Standard deviation of the matrices' elements, 1e-30 … 1e30: transformers' ``initializer_range``.
    fused_experts : bool
        Name a layer's experts as transformers 5 does, ``gate_up_proj`` and ``down_proj``, and not three matrices an
        expert as the hub does. They are the same experts.
    backend : str, optional
        Where the tensors are to lie: on the GPU for a backend that takes CuPy arrays, else (and if left out) on the
        host.

    Returns
    -------
    mapping of str to array, float32
        For :class:`ddtree.model.DeepseekV3` and :func:`ddtree.model.save_bundle`.

    Raises
    ------
    ValueError, TypeError
        The seed or the standard deviation is out of range, or the backend takes torch's arrays.
    BackendUnavailable
        The backend cannot be used here.

    Notes
    -----
    An element is one of the 65,536 quantiles of the normal distribution that have equal shares, chosen by 16 bits of
    SplitMix64 (Steele, Lea and Flood, Fast splittable pseudorandom number generators, 2014), so that no element is
    farther than 4.3 standard deviations from 0.

    Examples
    --------
    >>> from ddtree.model import DeepseekV3, golden_bundle, load_model
    >>> config = load_model(golden_bundle()).config
    >>> DeepseekV3(config, random_weights(config, seed=3))
    DeepseekV3(3 layers, hidden 64, vocab 512, float32, numpy)
    """
    seed, std = integer("seed", seed, 0, 2**63 - 1), real("std", std)
    if not LEAST_STD <= std <= MOST_STD:
        raise ValueError(f"std must be in {LEAST_STD:g} … {MOST_STD:g}, so that float32 holds the elements, got {std}")
    kind = "numpy" if backend is None else get_backend(backend).array_kind
    if kind == "torch":
        raise ValueError(
            f"backend must take NumPy or CuPy arrays to have a model's weights, but {backend!r} takes torch's"
        )
    return _RandomWeights(config, seed, std, fused_experts, importlib.import_module(kind))


class _RandomWeights(Mapping[str, Any]):
    def __init__(self, config: ModelConfig, seed: int, std: float, fused_experts: bool, xp: Any) -> None:
        layers = range(config.first_k_dense_replace, config.num_hidden_layers)
        self._shapes = config.tensor_shapes(fused_layers=layers if fused_experts else ())
        self._seed, self._xp = seed, xp
        self._quantiles = xp.asarray((std * _normal_quantiles()).astype(np.float32))

    def __getitem__(self, name: str) -> Any:
        shape = self._shapes[name]
        if name.endswith("norm.weight"):
            return self._xp.ones(shape, np.float32)
        if name.endswith(".e_score_correction_bias"):
            return self._xp.zeros(shape, np.float32)
        tensor = self._xp.empty(shape, np.float32)
        for part, single in self._matrices(name, tensor):
            self._fill(part, single)
        return tensor

    def _matrices(self, name: str, tensor: Any) -> Iterator[tuple[Any, str]]:
        """Each matrix of a tensor, with the name that it has where experts are not fused."""
        prefix, _, last = name.rpartition(".")
        if last not in ("gate_up_proj", "down_proj"):
            yield tensor, name
            return
        for e, expert in enumerate(tensor):
            parts = {"down_proj": expert}
            if last == "gate_up_proj":
                half = len(expert) // 2
                parts = {"gate_proj": expert[:half], "up_proj": expert[half:]}
            for part, matrix in parts.items():
                yield matrix, f"{prefix}.{e}.{part}.weight"

    def _fill(self, tensor: Any, name: str) -> None:
        """Fill a C-contiguous tensor from the stream of its name."""
        key = hashlib.blake2b(name.encode(), digest_size=8, key=self._seed.to_bytes(8, "little")).digest()
        flat = tensor.reshape(-1)
        for start in range(0, len(flat), _PIECE):
            piece = flat[start : start + _PIECE]
            words = _splitmix64(self._xp, int.from_bytes(key, "little"), start // 4, -(-len(piece) // 4))
            piece[...] = self._quantiles[words.view(np.uint16)[: len(piece)]]

    def __iter__(self) -> Iterator[str]:
        return iter(self._shapes)

    def __len__(self) -> int:
        return len(self._shapes)

    def __contains__(self, name: object) -> bool:
        return name in self._shapes  # Mapping's own would make the tensor


def _splitmix64(xp: Any, state: int, start: int, count: int) -> Any:
    """Words ``start`` … of the stream from ``state``: uint64, shape (count,)."""
    gamma = 0x9E3779B97F4A7C15
    first = np.uint64((state + (start + 1) * gamma) % 2**64)
    z = xp.arange(count, dtype=np.uint64) * np.uint64(gamma) + first
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


@functools.cache
def _normal_quantiles() -> NDArray[np.float64]:
    """The middles of as many equal shares of the standard normal distribution as 16 bits tell apart, ascending."""
    upper = [NormalDist().inv_cdf((i + 0.5) / _QUANTILES) for i in range(_QUANTILES // 2, _QUANTILES)]
    return np.array([*(-value for value in reversed(upper)), *upper])
