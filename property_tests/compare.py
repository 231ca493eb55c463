"""Comparison with what should have come out: kind, type, shape, then every value, and a message that says where."""

from dataclasses import fields

import numpy as np

from ddtree.arrays import array_kind
from ddtree.property_tests.tolerances import TOLERANCE
from ddtree.trees import Acceptance, DraftTree


class BeyondToleranceError(AssertionError):
    """A result too far from the exact one: the message says where, ``row`` which row of the table of tolerances."""

    def __init__(self, message, row):
        super().__init__(message)
        self.row = row

    @property
    def tolerance(self):
        """The row in words."""
        bound, reason = TOLERANCE[self.row]
        return f"{', '.join(self.row)}: {bound:g} {reason}"


def assert_same(actual, expected, what="result"):
    """Equal in kind, type, shape and bits (a NaN equals any NaN)."""
    __tracebackhide__ = True
    assert_same_form(actual, expected, what)
    actual, expected = np.asarray(actual), np.asarray(expected)
    wrong = actual != expected
    if np.issubdtype(expected.dtype, np.inexact):
        wrong |= np.signbit(actual) != np.signbit(expected)
        wrong &= ~(np.isnan(actual) & np.isnan(expected))
    _raise_if(wrong, actual, expected, what)


def assert_close(actual, expected, *, row, scale=1.0, what="result"):
    """Equal in kind, type, shape and infinities; else within ``TOLERANCE[row]`` times ``scale`` of ``expected``.

    ``expected`` may be of a wider type than ``actual``.
    """
    __tracebackhide__ = True
    with np.errstate(over="ignore"):  # what is beyond the type's range is infinite in it
        rounded = np.asarray(expected, actual.dtype)
    assert_same_form(actual, rounded, what)
    exact = (actual == expected) | (np.isinf(rounded) & (actual == rounded))
    error = np.abs(np.subtract(actual, expected, dtype=np.float64, where=~exact, out=np.zeros(actual.shape)))
    wrong = ~(error <= TOLERANCE[row].bound * np.broadcast_to(scale, error.shape))
    _raise_if(wrong, actual, expected, what, lambda message: BeyondToleranceError(message, row))


def assert_same_form(actual, expected, what="result"):
    """Equal in kind, type and shape."""
    __tracebackhide__ = True
    for aspect, of in (("kind", array_kind), ("type", lambda a: str(a.dtype)), ("shape", lambda a: tuple(a.shape))):
        if of(actual) != of(expected):
            raise AssertionError(f"{what} is of {aspect} {of(actual)}, should be {of(expected)}")


def assert_same_tree(actual, expected, what="tree"):
    """Two :class:`DraftTree` equal in every field, bit for bit."""
    __tracebackhide__ = True
    _assert_same_record(actual, expected, DraftTree, what)


def assert_same_acceptance(actual, expected, what="acceptance"):
    """Two :class:`Acceptance` equal in every field."""
    __tracebackhide__ = True
    _assert_same_record(actual, expected, Acceptance, what)


def _assert_same_record(actual, expected, cls, what):
    __tracebackhide__ = True
    assert isinstance(actual, cls), f"{what} is a {type(actual).__name__}, should be a {cls.__name__}"
    for name in (f.name for f in fields(cls)):
        got, wanted = getattr(actual, name), getattr(expected, name)
        if isinstance(wanted, int):
            assert got == wanted, f"{what}.{name}: {got!r}, should be {wanted!r}"
        else:
            assert_same(got, wanted, f"{what}.{name}")


def _raise_if(wrong, actual, expected, what, error=AssertionError):
    __tracebackhide__ = True
    if not wrong.any():
        return
    places = np.argwhere(wrong)
    lines = [
        f"{what}{list(map(int, place)) or ''}: {actual[tuple(place)]!s}, should be {expected[tuple(place)]!s}"
        for place in places[:4]
    ]
    nans = int(np.isnan(actual).sum()) if np.issubdtype(actual.dtype, np.inexact) else 0
    lines.insert(1, f"  {len(places)} of {wrong.size} differ; {actual.dtype} {actual.shape}; {nans} NaN")
    raise error("\n  ".join([lines[0], *(line.strip() for line in lines[1:])]))
