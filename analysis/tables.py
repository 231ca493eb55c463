"""Tidy tables: frozen dataclasses of equally long columns, read by rows or printed."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np

__all__ = ["Table"]


class Table:
    """A table of equally long columns that can be read by rows.

    A table is a dataclass derived from this; ``columns`` names the fields that are columns, in order. The others are
    about the whole table, such as the level of its intervals.
    """

    columns: ClassVar[tuple[str, ...]] = ()

    def records(self) -> list[dict[str, Any]]:
        """One dict of plain Python values a row; NaN, a value that does not exist, as None."""
        rows = zip(*(np.asarray(getattr(self, name)).tolist() for name in self.columns), strict=True)
        return [dict(zip(self.columns, map(_none_if_nan, row), strict=True)) for row in rows]

    def __str__(self) -> str:
        cells = [list(self.columns)]
        cells += [[_cell(value) for value in record.values()] for record in self.records()]
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        return "\n".join("  ".join(c.rjust(w) for c, w in zip(row, widths, strict=True)) for row in cells)


def _cell(value: Any) -> str:
    if not isinstance(value, float):
        return "-" if value is None else str(value)
    if 1e-6 <= abs(value) < 0.1:  # such as seconds of a round
        return f"{value:.3g}"
    return f"{value:.3f}" if value == 0 or 0.1 <= abs(value) < 1e7 else f"{value:.2e}"


def _none_if_nan(value: Any) -> Any:
    return None if value != value else value
