"""A call of an operation as a value: what it was given and what came out, to be compared, kept in a file and read back.

The file is KDTR. Arrays stand under ``input/``, ``expected/`` and ``got/`` by the names of the operation's arguments
and results (``input/tree.parents``, ``got/lengths``); numbers, and what is None, under the same names as JSON in the
metadata; strings about the case (``op``, ``backend``, ``test``, versions) are metadata too. A failed test that is about
no single call is a file of such strings alone, a :class:`Law`.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from ddtree.kdtr import DTYPES, KdtrFile, read_kdtr, write_kdtr
from ddtree.protocols import OPS
from ddtree.trees import Acceptance, DraftTree

__all__ = ["KEYWORDS", "PARAMETERS", "RESULTS", "Case", "Law", "add_to", "map_arrays", "named_leaves"]

KIND = "ddtree case 1"
LAW = "ddtree law 1"
RECORDS: dict[str, type] = {"tree": DraftTree, "acceptance": Acceptance}
_SIGNATURES = {op: list(inspect.signature(OPS[op].__call__).parameters.values())[1:] for op in OPS}
PARAMETERS = {op: tuple(p.name for p in _SIGNATURES[op]) for op in OPS}
"""Names of an operation's arguments, in order."""
KEYWORDS = {op: {p.name for p in _SIGNATURES[op] if p.kind is p.KEYWORD_ONLY} for op in OPS}
"""Those that are passed by name."""
RESULTS: dict[str, tuple[str, ...]] = dict.fromkeys(OPS, ("result",)) | {
    "topk_log_probs": ("log_probs", "token_ids"),
    "build_tree": ("tree",),
    "accept_tree": ("acceptance",),
    "compact_cache": ("kv_cache",),
}
"""Names of what comes out; of ``compact_cache``, what it wrote."""


@dataclass
class Case:
    """A call of an operation, in NumPy arrays.

    Attributes
    ----------
    op, backend : str
        What was called.
    arguments : dict of str
        Copies of what it was given, by name; what was left out is not there.
    got, expected : object
        What came out, and what the reference gives; None where it is not known.
    error : str
        What was wrong with the call itself, in place of a result: an exception, a write into an argument.
    about : dict of str
        Where the case is from.
    """

    op: str
    backend: str
    arguments: dict[str, Any]
    got: Any = None
    expected: Any = None
    error: str = ""
    about: dict[str, str] = field(default_factory=dict)

    def write(self, path: Path) -> None:
        """Write the case, which takes the place of the file that may be there."""
        leaves = dict(named_leaves("input", self.arguments))
        for what in ("expected", "got"):
            leaves |= dict(_result_leaves(what, self.op, getattr(self, what)))
        # a wrong kernel can return anything: what is no array of the format's types is told in words
        arrays = {k: v for k, v in leaves.items() if isinstance(v, np.ndarray) and v.dtype.name in DTYPES}
        values = {k: v if isinstance(v, _Plain) else repr(v) for k, v in leaves.items() if k not in arrays}
        about = {
            "kind": KIND,
            "op": self.op,
            "backend": self.backend,
            "error": self.error,
            "values": json.dumps(values),
        }
        path.parent.mkdir(parents=True, exist_ok=True)
        write_kdtr(path, arrays, self.about | about | {"values": json.dumps(values)})

    @classmethod
    def read(cls, path: Path) -> Case:
        """Read what :meth:`write` wrote.

        Raises
        ------
        KdtrError
            The file is damaged.
        ValueError
            It is a file of something else, or lacks something; the message is one line.
        """
        arrays, about = read_kdtr(path)
        if about.get("kind") != KIND:
            raise ValueError(f"{path} is a KDTR file, but not a case: its metadata lack kind = {KIND!r}")
        op = about.get("op", "")
        if op not in OPS:
            raise ValueError(f"{path}: op must be one of {', '.join(OPS)}, got {op!r}")
        try:
            leaves = json.loads(about.get("values", "")) | arrays
        except (ValueError, TypeError, RecursionError) as error:
            raise ValueError(f"{path}: values in the metadata must be a JSON object ({error})") from error
        arguments = {}
        for name in PARAMETERS[op]:
            if name in RECORDS:
                arguments[name] = _record(path, f"input/{name}", RECORDS[name], leaves)
            elif f"input/{name}" in leaves:
                arguments[name] = leaves[f"input/{name}"]
        required = [p.name for p in _SIGNATURES[op] if p.default is p.empty]
        missing = [name for name in required if name not in arguments]
        if missing:
            raise ValueError(f"{path} lacks input/{missing[0]}, which {op} needs")
        rest = {k: v for k, v in about.items() if k not in ("kind", "op", "backend", "error", "values")}
        return cls(op, about.get("backend", ""), arguments, error=about.get("error", ""), about=rest)


@dataclass
class Law:
    """A test that failed, and the one example on which it did: what is kept where no single call is at fault.

    Attributes
    ----------
    about : dict of str
        Where it is from: ``module``, ``test`` (of pytest, within the module), ``backends`` as a JSON list (what
        ``--ddtree-backend`` named), ``blob`` (Hypothesis's version and blob; absent for a test without drawn examples),
        ``failed`` (how), versions and devices.
    """

    about: dict[str, str]

    def write(self, path: Path) -> None:
        """Write it, in place of the file that may be there."""
        path.parent.mkdir(parents=True, exist_ok=True)
        write_kdtr(path, {}, self.about | {"kind": LAW})

    @classmethod
    def read(cls, path: Path) -> Law:
        """Read what :meth:`write` wrote, or what :meth:`Case.write` wrote of a test.

        Raises
        ------
        KdtrError
            The file is damaged.
        ValueError
            It is a file of something else, or says of no test; the message is one line.
        """
        with KdtrFile(path) as file:
            about = dict(file.metadata)
        if about.pop("kind", "") not in (KIND, LAW):
            raise ValueError(f"{path} is a KDTR file, but neither a case nor a law")
        missing = [name for name in ("module", "test", "backends") if name not in about]
        if missing:
            raise ValueError(f"{path} is of no test that could be run again: its metadata lack {', '.join(missing)}")
        law = cls(about)
        if not all(part.isidentifier() for part in about["module"].split(".")):
            raise ValueError(f"{path}: module in the metadata must be a module's name, got {about['module']!r}")
        try:
            backends = json.loads(about["backends"])
            if not isinstance(backends, list) or not all(isinstance(name, str) for name in backends):
                raise ValueError
        except (ValueError, TypeError, RecursionError):
            raise ValueError(f"{path}: backends in the metadata must be a JSON list of names") from None
        return law

    @property
    def backends(self) -> list[str]:
        """What ``--ddtree-backend`` named."""
        return list(json.loads(self.about["backends"]))

    @property
    def node(self) -> str:
        """The test, as ``pytest --pyargs`` takes it."""
        return f"{self.about['module']}::{self.about['test'].partition('::')[2]}"

    @property
    def blob(self) -> tuple[str, bytes] | None:
        """Hypothesis's version and its blob of the example."""
        version, _, blob = self.about.get("blob", "").partition(" ")
        return (version, blob.encode()) if blob else None


def add_to(path: Path, about: Mapping[str, str]) -> None:
    """Add to the metadata of a case or a law that has been written."""
    arrays, before = read_kdtr(path)
    write_kdtr(path, arrays, before | dict(about))


_Plain = str | int | float | bool | None


def named_leaves(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """What a nested value is made of: ``a/b`` is item b of mapping a, ``a.b`` is field b of record a."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from named_leaves(f"{name}/{key}", item)
    elif is_dataclass(value) and not isinstance(value, type):
        for f in fields(value):
            yield from named_leaves(f"{name}.{f.name}", getattr(value, f.name))
    else:
        yield name, value


def map_arrays(value: Any, change: Callable[[Any], Any]) -> Any:
    """The same value with ``change`` of every array in it."""
    if is_dataclass(value) and not isinstance(value, type):
        return replace(value, **{f.name: map_arrays(getattr(value, f.name), change) for f in fields(value)})
    if isinstance(value, tuple):
        return tuple(map_arrays(v, change) for v in value)
    return change(value) if hasattr(value, "dtype") and hasattr(value, "shape") and value.shape != () else value


def _result_leaves(what: str, op: str, value: Any) -> Iterator[tuple[str, Any]]:
    names = RESULTS[op]
    parts = value if isinstance(value, tuple) and len(value) == len(names) > 1 else (value,)
    for name, part in zip(names, parts, strict=False):
        yield from named_leaves(what if is_dataclass(part) else f"{what}/{name}", part)


def _record(path: Path, name: str, cls: type, leaves: dict[str, Any]) -> Any:
    names = [f.name for f in fields(cls)]
    missing = [n for n in names if f"{name}.{n}" not in leaves]
    if missing:
        raise ValueError(f"{path} lacks {name}.{missing[0]}")
    return cls(**{n: leaves[f"{name}.{n}"] for n in names})
