"""Sequences of token ids, as people pass them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ddtree.checks import integer, listed

__all__ = ["stop_tokens", "token_row"]


def token_row(name: str, tokens: Any, vocab_size: int | None = None) -> NDArray[np.int32]:
    """Return ``tokens`` as a new int32 array of shape (n,).

    Parameters
    ----------
    name : str
        What a message calls it.
    tokens : array or sequence, int, shape (n,)
        Token ids; bytes are a token each. An empty sequence is one of no tokens.
    vocab_size : int, optional
        V, which every id must be less than; without it ids need only be ≥ 0.

    Raises
    ------
    ValueError, TypeError
        Another shape, another type, or an id outside the vocabulary, named with its place.
    """
    try:
        row = np.frombuffer(tokens, np.uint8) if isinstance(tokens, bytes | bytearray) else np.asarray(tokens)
    except ValueError:
        raise ValueError(f"{name} must have shape (n,), got sequences of several lengths") from None
    if row.ndim != 1:
        hint = "; put a single sequence in a list" if row.ndim == 0 else ""
        raise ValueError(f"{name} must have shape (n,), got {row.shape}{hint}")
    if row.size and row.dtype.kind not in "iu":
        raise TypeError(f"{name} must hold integer token ids, got {row.dtype}")
    if isinstance(tokens, list | tuple) and any(isinstance(token, bool) for token in tokens):
        raise TypeError(f"{name} must hold integer token ids, got a truth value among them")
    highest = np.iinfo(np.int32).max if vocab_size is None else vocab_size - 1
    outside = np.flatnonzero((row < 0) | (row > highest))
    if outside.size:
        at = int(outside[0])
        raise ValueError(f"{name}[{at}] must be in 0 … {highest}, got {int(row[at])}")
    return row.astype(np.int32)


def stop_tokens(stop_token_ids: Iterable[int], vocab_size: int) -> list[int]:
    """Return stop tokens as a list, each checked to be in the vocabulary, 0 … ``vocab_size`` − 1."""
    return [
        integer(f"stop_token_ids[{i}]", token, 0, vocab_size - 1, "the vocabulary")
        for i, token in enumerate(listed("stop_token_ids", stop_token_ids))
    ]
