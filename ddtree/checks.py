"""What the public operations check, and how a call reaches its backend and its results come back.

Validation stands here and nowhere else: references and kernels trust their caller.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from dataclasses import fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ddtree.arrays import (
    Device,
    array_kind,
    array_namespace,
    device_of,
    dtype_name,
    export_array,
    import_array,
    to_numpy,
    use_stream_of,
    wait_for,
)
from ddtree.backends import Backend, select_backend
from ddtree.trees import Acceptance, DraftTree

FLOATS = ("float16", "bfloat16", "float32", "float64")
INTS = ("int32", "int64")
CACHE_INTS = ("int16", "uint16", "int32", "uint32", "int64", "uint64")
INT32_MAX = 2**31 - 1

_TREE_ARRAYS: dict[str, tuple[tuple[str, ...], str]] = {
    "token_ids": (("B", "N"), "int32"),
    "parents": (("B", "N"), "int32"),
    "depths": (("B", "N"), "int32"),
    "ranks": (("B", "N"), "int32"),
    "scores": (("B", "N"), "float64"),
    "node_counts": (("B",), "int32"),
    "visibility_words": (("B", "N", "W"), "uint32"),
}


_ARRAY_FIELDS: dict[type, tuple[str, ...]] = {
    record: tuple(f.name for f in fields(record) if f.name not in ("max_depth", "num_candidates"))
    for record in (DraftTree, Acceptance)
}


class Call:
    """One call of an operation: its arrays as the backend takes them, the checks, and the way back."""

    def __init__(
        self,
        op: str,
        backend: str | Backend | None,
        named: dict[str, Any],
        record: DraftTree | Acceptance | None = None,
    ) -> None:
        self.dims: dict[str, int] = {}
        self._converted: dict[str, str] = {}
        self.op = op
        expected = Acceptance if op == "compact_cache" else DraftTree
        self._record_name = "acceptance" if op == "compact_cache" else "tree"
        if record is None and op in ("verify_attention", "accept_tree", "compact_cache"):
            raise TypeError(f"{self._record_name} must be a ddtree.{expected.__name__}, got None")
        if record is not None and not isinstance(record, expected):
            raise TypeError(f"{self._record_name} must be a ddtree.{expected.__name__}, got {type(record).__name__}")
        everything = dict(named)
        fields_of = {} if record is None else {f"{self._record_name}.{f}": f for f in _ARRAY_FIELDS[expected]}
        for name, field in fields_of.items():
            everything[name] = getattr(record, field)
        self.like = next(iter(named.values()))
        devices: dict[str, Device] = _by_name(device_of, everything)
        first = next(iter(devices))
        self.device = devices[first]
        for name, device in devices.items():
            if device != self.device:
                raise ValueError(f"{name} lies on {device} but {first} on {self.device}: move them to one device")
        self.arrays = _by_name(import_array, everything)
        self.record = record and _with_arrays(record, {f: self.arrays[name] for name, f in fields_of.items()})
        self.backend = select_backend(op, backend, self.device)
        if (self.backend.array_kind == "numpy") != (self.device.type == "cpu") and self.backend.array_kind != "torch":
            wants = "on the CPU" if self.backend.array_kind == "numpy" else "on a CUDA device"
            raise ValueError(f"backend {self.backend.name!r} takes arrays {wants}, got {first} on {self.device}")

    def __getitem__(self, name: str) -> Any:
        return self.arrays[name]

    @property
    def tree(self) -> DraftTree:
        assert isinstance(self.record, DraftTree)
        return self.record

    @property
    def acceptance(self) -> Acceptance:
        assert isinstance(self.record, Acceptance)
        return self.record

    def check(self, name: str, shape: tuple[str, ...], dtypes: tuple[str, ...], *, written: bool = False) -> None:
        """Type, shape (a letter seen before keeps its size), layout, and whether it may be written."""
        array = self.arrays[name]
        if dtype_name(array) not in dtypes:
            raise TypeError(f"{name} must be of type {' or '.join(dtypes)}, got {dtype_name(array)}")
        got = array.shape
        if len(got) != len(shape) or any(self.dims.get(s, n) != n for s, n in zip(shape, got, strict=True)):
            known = [self.dims.get(letter) for letter in shape]
            wanted = ", ".join(s if d is None else f"{s} = {d}" for s, d in zip(shape, known, strict=True))
            raise ValueError(f"{name} must have shape ({wanted}{',' * (len(shape) == 1)}), got {tuple(got)}")
        self.dims.update(zip(shape, got, strict=True))
        if not array.flags.c_contiguous:
            raise ValueError(
                f"{name} must be C-contiguous, got strides {tuple(array.strides)} bytes "
                f"for shape {tuple(array.shape)}; pass a contiguous copy, as np.ascontiguousarray makes one"
                + ", or limit a policy by ddtree.policies.limited(policy, topk=…)"
                * (self.op == "build_tree")
            )
        if written and not getattr(array.flags, "writeable", True):
            raise ValueError(f"{name} must be writable, got a read-only array: pass a copy that may be written")

    def check_apart(self, name: str, *others: str) -> None:
        """What is written must not be what is read."""
        for other in others:
            if array_namespace(self[name], self[other]).may_share_memory(self[name], self[other]):
                raise ValueError(f"{name} must not overlap {other} in memory: pass an array of its own")

    def check_record(self, record: str, wanted: dict[str, tuple[tuple[str, ...], str]]) -> None:
        for field, (shape, dtype) in wanted.items():
            self.check(f"{record}.{field}", shape, (dtype,))

    def check_tree(self) -> None:
        integer("tree.max_depth", self.tree.max_depth, 0, INT32_MAX - 2)
        self.check_record("tree", _TREE_ARRAYS)
        words = (self.dims["N"] + 31) // 32
        if self.dims["W"] != words:
            raise ValueError(
                f"tree.visibility_words must have {words} words a row for N = {self.dims['N']}, got {self.dims['W']}"
            )

    def validates(self, validate: bool | None) -> bool:
        """Whether values are to be checked; if so they may be read."""
        if validate is not None and not isinstance(validate, bool | np.bool_):
            raise TypeError(f"validate must be True, False or None, got {type(validate).__name__}")
        checked = self.device.type == "cpu" if validate is None else bool(validate)
        if checked and array_kind(self.like) == "torch":  # what follows reads on a stream of CuPy's
            wait_for(self.like)
        return checked

    def check_range(self, name: str, low: int, high: int, where: Any = True) -> None:
        array = to_numpy(self.arrays[name])
        wrong = ((array < low) | (array > high)) & where
        if wrong.any():
            place = first(wrong)
            index = ", ".join(map(str, place))
            raise ValueError(f"{name}[{index}] must be in {low} … {high}, got {int(array[place])}")

    def narrow(self, *names: str) -> None:
        """Have int64 arrays made int32, which every backend takes, as part of the call's work."""
        self._converted |= dict.fromkeys(names, "int32")

    def widen(self, name: str) -> None:
        """Have an int32 array made int64, as part of the call's work."""
        self._converted[name] = "int64"

    def run(self, launch: Callable[[Callable[..., Any]], Any]) -> Any:
        """Let the backend work, on the caller's stream, and return what it gives as the caller's kind of array."""
        op = self.backend.op(self.op)
        with use_stream_of(self.like):
            for name, dtype in self._converted.items():
                if dtype_name(self.arrays[name]) != dtype:
                    self.arrays[name] = self.arrays[name].astype(dtype)
            if self.backend.array_kind == "torch":
                torch_like = _torch_like(self.device)
                self.arrays = {name: export_array(array, torch_like) for name, array in self.arrays.items()}
                self.record = self.record and _map_record(self.record, lambda a: export_array(a, torch_like))
            result = launch(op)
            return _map_result(result, lambda a: export_array(import_array(a), self.like))


def _by_name(function: Callable[[Any], Any], named: dict[str, Any]) -> dict[str, Any]:
    """``function`` of each array; what it says of one begins with the array's name."""
    results = {}
    for name, array in named.items():
        try:
            results[name] = function(array)
        except (TypeError, ValueError) as error:
            raise type(error)(f"{name} {error}") from error
    return results


def _torch_like(device: Device) -> Any:
    import torch

    return torch.empty(0, device=str(device))


def _map_record(record: Any, change: Callable[[Any], Any]) -> Any:
    return _with_arrays(record, {name: change(getattr(record, name)) for name in _ARRAY_FIELDS[type(record)]})


def _with_arrays(record: Any, arrays: dict[str, Any]) -> Any:
    """The record with other arrays: what ``dataclasses.replace`` does, in a third of its time."""
    constants = {} if isinstance(record, Acceptance) else _constants(record)
    return type(record)(**arrays, **constants)


def _constants(tree: DraftTree) -> dict[str, int]:
    return {"max_depth": tree.max_depth, "num_candidates": tree.num_candidates}


def _map_result(result: Any, change: Callable[[Any], Any]) -> Any:
    if result is None:
        return None
    if isinstance(result, DraftTree | Acceptance):
        return _map_record(result, change)
    if isinstance(result, tuple):
        return tuple(change(a) for a in result)
    return change(result)


def integer(name: str, value: Any, low: int, high: int, high_is: str = "") -> int:
    if isinstance(value, bool | np.bool_):
        raise TypeError(f"{name} must be an integer, got {value!r}")
    try:
        number = operator.index(value)
    except TypeError:
        raise TypeError(f"{name} must be an integer, got {type(value).__name__} {value!r}") from None
    if not low <= number <= high:
        raise ValueError(f"{name} must be in {low} … {high}{f' ({high_is})' if high_is else ''}, got {number}")
    return number


def real(name: str, value: Any, least: float = -math.inf) -> float:
    try:
        if isinstance(value, str | bytes | bool | np.bool_):
            raise TypeError
        number = float(value)
    except OverflowError:
        raise ValueError(f"{name} must be finite, got an integer that no float64 holds") from None
    except (TypeError, ValueError):
        raise TypeError(f"{name} must be a number, got {type(value).__name__} {value!r}") from None
    if not math.isfinite(number) or number < least:
        wanted = "finite" if least == -math.inf else f"finite and at least {least:g}"
        raise ValueError(f"{name} must be {wanted}, got {number}")
    return number


def listed(name: str, values: Any) -> list[Any]:
    try:
        return list(values)
    except TypeError:
        raise TypeError(f"{name} must be a sequence, got {type(values).__name__} {values!r}") from None


def numbers(name: str, values: Any) -> NDArray[Any]:
    """``values`` as a NumPy array of integers or floats, whose lists have equal lengths and no truth values."""
    try:
        array = np.asarray(values)
    except ValueError:
        raise ValueError(f"{name} must have rows of one length, got lists of several") from None
    if array.dtype.kind not in "iuf" and array.size:
        raise TypeError(f"{name} must hold numbers, got {array.dtype}")
    if not hasattr(values, "dtype") and any(isinstance(v, bool | np.bool_) for v in np.asarray(values, object).flat):
        raise TypeError(f"{name} must hold numbers, got a truth value among them")
    return array


def check_text(name: str, value: Any) -> None:
    """Refuse what is no text, or has halves of surrogate pairs, which no file holds."""
    if not isinstance(value, str):
        raise TypeError(f"{name} must be a string, got {type(value).__name__}")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{name} must be text that UTF-8 can hold, got {value!r:.80}: {error.reason}") from None


def first(wrong: Any) -> tuple[int, ...]:
    return tuple(int(i) for i in np.argwhere(wrong)[0])


def _checkers(call: Call) -> Any:
    """Who looks at values: compiled code, unless the pure NumPy reference was asked for (which then needs no numba)."""
    if call.backend.name == "reference":
        from ddtree import reference

        return reference
    from ddtree.kernels import numba_cpu

    return numba_cpu


def check_draft(call: Call, vocab_size: int) -> None:
    log_probs, token_ids = to_numpy(call["log_probs"]), to_numpy(call["token_ids"])
    code, b, d, k = (int(x) for x in _checkers(call).find_draft_fault(log_probs, token_ids, vocab_size))
    if code == 0:
        return
    place = f"[{b}, {d}, {k}]"
    if code == 1:
        raise ValueError(f"log_probs{place} must be at most 0, got {log_probs[b, d, k]}: pass log-probs, not logits")
    if code == 2:
        raise ValueError(
            f"log_probs{place} = {log_probs[b, d, k]} must not exceed its left neighbour {log_probs[b, d, k - 1]}: "
            "sort each depth, likeliest first (topk_log_probs does)"
        )
    if code == 3:
        limit = INT32_MAX if vocab_size < 0 else vocab_size - 1
        raise ValueError(f"token_ids{place} must be in 0 … {limit}, got {int(token_ids[b, d, k])}")
    first = int(np.flatnonzero(token_ids[b, d] == token_ids[b, d, k])[0])
    raise ValueError(
        f"token_ids{place} = {int(token_ids[b, d, k])} already stands at rank {first}: ids of a depth must be distinct"
    )


def check_parents(call: Call) -> None:
    """Counts in 1 … N, and every parent an earlier node."""
    N = call.dims["N"]
    counts, parents = to_numpy(call["node_counts"]), to_numpy(call["parents"])
    call.check_range("node_counts", 1, N)
    slots = np.arange(N)
    used = (slots > 0) & (slots < counts[:, None])
    wrong = used & ((parents < 0) | (parents >= slots))
    if wrong.any():
        b, i = first(wrong)
        raise ValueError(f"parents[{b}, {i}] must be in 0 … {i - 1}, an earlier node, got {int(parents[b, i])}")


def check_tree_values(call: Call) -> None:
    """Counts, parents, depths and tokens of a tree that the caller may have made."""
    tree, N = call.tree, call.dims["N"]
    names = ("token_ids", "parents", "depths", "node_counts")
    token_ids, parents, depths, counts = (to_numpy(call[f"tree.{name}"]) for name in names)
    fault = _checkers(call).find_tree_fault(token_ids, parents, depths, counts, tree.max_depth)
    code, b, i = (int(x) for x in fault)
    if code == 0:
        return
    if code == 1:
        raise ValueError(f"tree.node_counts[{b}] must be in 1 … {N}, got {int(counts[b])}")
    if code == 2:
        raise ValueError(f"tree.parents[{b}, {i}] must be in 0 … {i - 1}, an earlier node, got {int(parents[b, i])}")
    if code == 5:
        raise ValueError(f"tree.token_ids[{b}, {i}] must be in 0 … {INT32_MAX}, got {int(token_ids[b, i])}")
    wanted = int(depths[b, parents[b, i]]) + 1 if i > 0 else 0
    of = "one more than its parent's" if i > 0 else "the root's"
    raise ValueError(
        f"tree.depths[{b}, {i}] must be {wanted}, {of}, and at most max_depth = {tree.max_depth}, "
        f"got {int(depths[b, i])}"
    )


def check_visibility(call: Call) -> None:
    """Visibility of a tree whose parents have been checked: what the parents say, and nothing else."""
    counts, parents, words = (to_numpy(call[f"tree.{f}"]) for f in ("node_counts", "parents", "visibility_words"))
    wrong = (_checkers(call).visibility_words(parents, counts) != words).any(-1)
    if wrong.any():
        b, i = first(wrong)
        raise ValueError(f"tree.visibility_words[{b}, {i}] must be what the parents say (see visibility_words)")


MOST_ROWS = INT32_MAX - 64
"""Of a request: kernels count rows in int32, and look a tile ahead."""


def check_pages(call: Call, window: Any, *, written: bool = False) -> None:
    """Every row below ``prefix_len + window`` has a page; pages that are written belong to one request."""
    S, max_pages, pages = call.dims["S"], call.dims["max_pages"], call.dims["pages"]
    table, prefix = to_numpy(call["page_table"]), to_numpy(call["prefix_lens"]).astype(np.int64)
    call.check_range("prefix_lens", 0, INT32_MAX)
    rows = prefix + window
    if (rows > MOST_ROWS).any():
        (b,) = first(rows > MOST_ROWS)
        raise ValueError(f"prefix_lens[{b}] = {int(prefix[b])} and the tree must end below row {MOST_ROWS:,}")
    if (rows > S * max_pages).any():
        (b,) = first(rows > S * max_pages)
        raise ValueError(
            f"page_table has room for {S * max_pages} rows a request ({max_pages} pages of {S}), "
            f"but request {b} needs {int(rows[b])}: prefix {int(prefix[b])} and {int(rows[b] - prefix[b])} of the tree"
        )
    places = np.arange(max_pages)
    call.check_range("page_table", 0, pages - 1, where=places < -(-rows[:, None] // max(S, 1)))
    if written and S > 0:
        held = places < -(-rows[:, None] // S)
        inside = held & (places >= prefix[:, None] // S) & (window[:, None] > 0)
        uses = np.bincount(table[held], minlength=pages)
        shared = inside & (uses[np.where(held, table, 0)] > 1)
        if shared.any():
            b, p = first(shared)
            raise ValueError(
                f"page_table[{b}, {p}] = {int(table[b, p])} is written and must belong to one request and one place, "
                f"but {int(uses[table[b, p]])} entries in use name that page"
            )
