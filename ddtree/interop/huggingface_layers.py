"""A layer of a transformers cache whose memory is longer than what it holds. Importing this imports transformers."""

from __future__ import annotations

from typing import Any

from transformers.cache_utils import DynamicLayer

__all__ = ["RowsLayer"]


class RowsLayer(DynamicLayer):  # type: ignore[misc]
    """Keys and values of rows [first, rows) of a sequence, to which a pass adds its own and copies no others.

    transformers' own layer makes new tensors in each pass. Here they stay where they are until they are full, so that
    rows can be taken back by a number, and whoever moves some finds them where they were.

    Parameters
    ----------
    most_rows : int
        The most rows that are needed.

    Attributes
    ----------
    first, rows : int
        The first row that a pass is shown, and how many rows of the sequence there are.
    base : int
        The row that the memory begins with, at most ``first``.
    storage : tuple of torch.Tensor or None
        Keys and values, each (B, heads, capacity, width); None before the first pass.
    moves : int
        How often the storage has been another.
    """

    def __init__(self, most_rows: int) -> None:
        super().__init__()
        self.most_rows = most_rows
        self.first = self.rows = self.base = self.moves = 0
        self.storage: tuple[Any, Any] | None = None

    def update(self, key_states: Any, value_states: Any, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        """Write the rows of a pass behind the others, and return all from ``first`` on."""
        added = key_states.shape[-2]
        end = self.rows + added
        storage = self._with_room(key_states, value_states, end)
        for held, new in zip(storage, (key_states, value_states), strict=True):
            held.narrow(2, self.rows - self.base, added).copy_(new)
        self.rows = end
        self.keys, self.values = (held.narrow(2, self.first - self.base, end - self.first) for held in storage)
        return self.keys, self.values

    def get_seq_length(self) -> int:
        """Return the rows that a pass is shown before its own."""
        return self.rows - self.first

    def select(self, batch_rows: Any) -> None:
        """Keep some requests."""
        assert self.storage is not None
        keys, values = self.storage
        self.storage = keys.index_select(0, batch_rows), values.index_select(0, batch_rows)
        self.moves += 1

    def _with_room(self, key_states: Any, value_states: Any, end: int) -> tuple[Any, Any]:
        """The storage, in which row ``end`` − 1 has a place; where it had none, twice as long as it must be."""
        if self.storage is not None and end - self.base <= self.storage[0].shape[2]:
            return self.storage
        old, shown, held = self.storage, self.first - self.base, self.rows - self.first
        capacity = max(min(2 * (end - self.first), self.most_rows - self.first), end - self.first)
        keys, values = (s.new_empty((*s.shape[:2], capacity, s.shape[3])) for s in (key_states, value_states))
        if old is None:
            self.device, self.is_initialized = key_states.device, True
        else:
            for new, before in zip((keys, values), old, strict=True):
                new.narrow(2, 0, held).copy_(before.narrow(2, shown, held))
        self.storage, self.base = (keys, values), self.first
        self.moves += 1
        return keys, values
