"""A layer of a transformers cache whose memory is longer than what it holds. Importing this imports transformers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from transformers.cache_utils import DynamicLayer

__all__ = ["Place", "RowsLayer"]


@dataclass
class Place:
    """Where the next pass begins, for all layers of one window.

    Attributes
    ----------
    rows : int
        Rows of the sequence that are held.
    first : int
        The first row that a pass is shown.
    moves : list of int
        One number, how often a layer's memory has been another: of all places of a cache.
    """

    moves: list[int]
    rows: int = 0
    first: int = 0


class RowsLayer(DynamicLayer):  # type: ignore[misc]
    """Keys and values of the rows of a place, to which a pass adds its own and copies no others.

    transformers' own layer makes new tensors in each pass. Here they stay where they are until they are full, so that
    rows are taken back by a number, which all layers share, and whoever moves some finds them where they were.

    Parameters
    ----------
    place : Place
        Shared with others; who owns it sets it between two passes.
    most_rows : int
        The most rows that are needed.

    Attributes
    ----------
    base : int
        The row that the memory begins with, at most ``place.first``.
    storage : tuple of torch.Tensor or None
        Keys and values, each (B, heads, capacity, width); None before the first pass.
    """

    def __init__(self, place: Place, most_rows: int) -> None:
        super().__init__()
        self.place, self.most_rows = place, most_rows
        self.base = 0
        self.storage: tuple[Any, Any] | None = None

    def update(self, key_states: Any, value_states: Any, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        """Write the rows of a pass behind the others, and return all from the place's first on."""
        added, place = key_states.shape[-2], self.place
        end = place.rows + added
        storage = self.storage
        if storage is None or end - self.base > storage[0].shape[2]:
            storage = self._longer(key_states, value_states, end)
        for held, new in zip(storage, (key_states, value_states), strict=True):
            held.narrow(2, place.rows - self.base, added).copy_(new)
        self.keys, self.values = (held.narrow(2, place.first - self.base, end - place.first) for held in storage)
        return self.keys, self.values

    def get_seq_length(self) -> int:
        """Return the rows that a pass is shown before its own."""
        return self.place.rows - self.place.first

    def select(self, batch_rows: Any) -> None:
        """Keep some requests."""
        assert self.storage is not None
        keys, values = self.storage
        self.storage = keys.index_select(0, batch_rows), values.index_select(0, batch_rows)
        self.place.moves[0] += 1

    def _longer(self, key_states: Any, value_states: Any, end: int) -> tuple[Any, Any]:
        """Make the storage twice as long as it must be for rows up to ``end``, and keep what is shown."""
        first, rows = self.place.first, self.place.rows
        capacity = max(min(2 * (end - first), self.most_rows - first), end - first)
        keys, values = (s.new_empty((*s.shape[:2], capacity, s.shape[3])) for s in (key_states, value_states))
        if self.storage is None:
            self.device, self.is_initialized = key_states.device, True
        else:
            for new, before in zip((keys, values), self.storage, strict=True):
                new.narrow(2, 0, rows - first).copy_(before.narrow(2, first - self.base, rows - first))
        self.storage, self.base = (keys, values), first
        self.place.moves[0] += 1
        return keys, values
