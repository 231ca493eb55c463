"""Saved runs: a generation, its prompts and the bytes of its tokens in one KDTR file, to be looked at later.

Letters: P prompts, R rounds of the engine, M rows (one request's part of a round), n nodes in use of all trees, each
row's root among them, V vocabulary. Lists of different lengths stand behind each other in one array, with offsets from
0 to its length beside it. The arrays of a file, with the metadata ``format`` = "ddtree run 1" and ``settings``, JSON:

``prompt_token_ids`` int32, ``prompt_offsets`` int64 (P + 1), ``new_token_ids`` int32, ``new_offsets`` int64 (P + 1)
    The texts; the first new token of each is the prefill's.
``stopped`` bool (P)
    Whether a stop token ended it, rather than the last token allowed.
``round_offsets`` int64 (R + 1), ``round_slots``, ``round_max_depths``, ``round_num_candidates`` int32 (R)
    Which rows a round has, and N, L and K of its trees.
``row_requests`` int32, ``row_finished`` bool, ``row_bonus_token_ids`` int32, all (M)
    The request, whether the row ended it, and the target's choice after the last kept node.
``node_offsets`` int64 (M + 1), ``node_token_ids``, ``node_parents``, ``node_ranks``, ``node_choices`` int32 (n)
    Trees as in :class:`ddtree.DraftTree`, parents as places in the row's own tree, and the target's choice after each
    node, −1 for none.
``node_scores`` float64 (n)
    The trees' scores.
``kept_offsets`` int64 (M + 1), ``kept_nodes`` int32
    The accepted path of each row, from the root down.
``seconds`` float64 (7 or 2)
    Of each stage in ``ddtree.engine.STAGES``, or in ``RESIDENT_STAGES``.
``token_bytes`` uint8, ``token_byte_offsets`` int64 (V + 1)
    The vocabulary; both are left out together.
"""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Iterable, Mapping, Sized
from dataclasses import dataclass, field
from typing import Any, NoReturn

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ddtree.engine.records import RESIDENT_STAGES, STAGES, FinishReason, Generation, Round
from ddtree.kdtr import read_kdtr, write_kdtr
from ddtree.ops import visibility_words
from ddtree.tokens import token_row
from ddtree.trees import Acceptance, DraftTree
from ddtree.vocabulary import Vocabulary

__all__ = ["Run", "load_run", "save_run"]

FORMAT = "ddtree run 1"
_REASONS: tuple[FinishReason, FinishReason] = ("length", "stop")
_INT32_MAX = 2**31 - 1
_MOST_PADDING = 1 << 16  # slots and depths that nothing uses: a damaged file must not ask for them by the million

# every array of a file, with its type and its length: a letter, one more than it ("P+1"), or its own ("")
_ARRAYS = {
    "prompt_token_ids": ("int32", ""),
    "prompt_offsets": ("int64", "P+1"),
    "new_token_ids": ("int32", ""),
    "new_offsets": ("int64", "P+1"),
    "stopped": ("bool", "P"),
    "round_offsets": ("int64", "R+1"),
    "round_slots": ("int32", "R"),
    "round_max_depths": ("int32", "R"),
    "round_num_candidates": ("int32", "R"),
    "row_requests": ("int32", "M"),
    "row_finished": ("bool", "M"),
    "row_bonus_token_ids": ("int32", "M"),
    "node_offsets": ("int64", "M+1"),
    "node_token_ids": ("int32", "n"),
    "node_parents": ("int32", "n"),
    "node_ranks": ("int32", "n"),
    "node_scores": ("float64", "n"),
    "node_choices": ("int32", "n"),
    "kept_offsets": ("int64", "M+1"),
    "kept_nodes": ("int32", ""),
    "seconds": ("float64", ""),
}
_OFFSETS = {
    "prompt_offsets": "prompt_token_ids",
    "new_offsets": "new_token_ids",
    "round_offsets": "row_requests",
    "node_offsets": "node_token_ids",
    "kept_offsets": "kept_nodes",
}
_SIZES = {"P": "stopped", "R": "round_slots", "M": "row_requests", "n": "node_token_ids"}


@dataclass(frozen=True, eq=False)
class Run:
    """What :func:`load_run` reads.

    Attributes
    ----------
    prompts : list of array, int32, shape (n,)
        Token ids of each prompt.
    generation : Generation
        The tokens, and every round, as the engine returned them.
    vocabulary : Vocabulary or None
        The bytes of the tokens; it does not encode.
    settings : dict of str to plain values
        How the run was made, for people to read.
    """

    prompts: list[NDArray[np.int32]]
    generation: Generation
    vocabulary: Vocabulary | None = None
    settings: dict[str, Any] = field(default_factory=dict)


def save_run(
    path: str | os.PathLike[str],
    generation: Generation,
    prompts: Iterable[ArrayLike],
    *,
    vocabulary: Vocabulary | None = None,
    settings: Mapping[str, Any] | None = None,
) -> None:
    """Write a run to one KDTR file, which is there entirely or not at all.

    Parameters
    ----------
    path : str or os.PathLike
        The file; it is replaced if it exists.
    generation : Generation
        With all its rounds, on the host.
    prompts : sequence of array, int, shape (n,)
        What was passed to ``Engine.generate``.
    vocabulary : Vocabulary, optional
        To show text in place of token ids.
    settings : mapping of str to plain values, optional
        What JSON can hold, such as ``{"target": "python-5m", "budget": 64}``.

    Raises
    ------
    ValueError, TypeError
        Not one prompt a request, of the length that it had; rounds that do not give the tokens; or a setting that is
        not JSON. No file is written.

    Notes
    -----
    Of every tree the nodes in use are kept, row by row, and of every row the kept path, the bonus and the target's
    choice after each node. What follows from these is made again when the file is read.
    """
    rows = [token_row(f"prompts[{i}]", prompt) for i, prompt in enumerate(prompts)]
    if len(rows) != len(generation.tokens):
        raise ValueError(f"prompts must have one entry a request, {len(generation.tokens)}, got {len(rows)}")
    for i, (row, length) in enumerate(zip(rows, generation.prompt_lens, strict=False)):
        if len(row) != length:
            raise ValueError(f"prompts[{i}] must have the {length} tokens that were continued, got {len(row)}")
    for i, reason in enumerate(generation.finish_reasons):
        if reason not in _REASONS:
            raise ValueError(f"generation.finish_reasons[{i}] must be 'length' or 'stop', to be kept, got {reason!r}")
    rounds = generation.rounds
    trees = [(r.tree, b) for r in rounds for b in range(r.tree.batch_size)]
    counts = [int(tree.node_counts[b]) for tree, b in trees]
    paths = [r.acceptance.node_indices[b, :n] for r in rounds for b, n in enumerate(r.acceptance.lengths.tolist())]

    def nodes(name: str) -> Any:
        return _joined([getattr(tree, name)[b, :n] for (tree, b), n in zip(trees, counts, strict=True)])

    choices = [r.target_token_ids[b] for r in rounds for b in range(r.tree.batch_size)]
    columns: dict[str, Any] = {
        "prompt_token_ids": _joined(rows),
        "prompt_offsets": _offsets(rows),
        "new_token_ids": _joined(generation.tokens),
        "new_offsets": _offsets(generation.tokens),
        "stopped": [reason == "stop" for reason in generation.finish_reasons],
        "round_offsets": _offsets([r.request_ids for r in rounds]),
        "round_slots": [r.tree.num_slots for r in rounds],
        "round_max_depths": [r.tree.max_depth for r in rounds],
        "round_num_candidates": [r.tree.num_candidates for r in rounds],
        "row_requests": [request for r in rounds for request in r.request_ids],
        "row_finished": _joined([r.acceptance.finished for r in rounds]),
        "row_bonus_token_ids": _joined([r.acceptance.bonus_token_ids for r in rounds]),
        "node_offsets": np.cumsum([0, *counts]),
        "node_token_ids": nodes("token_ids"),
        "node_parents": nodes("parents"),
        "node_ranks": nodes("ranks"),
        "node_scores": nodes("scores"),
        "node_choices": _joined([row[:n] for row, n in zip(choices, counts, strict=True)]),
        "kept_offsets": _offsets(paths),
        "kept_nodes": _joined(paths),
        "seconds": [generation.seconds.get(stage, 0.0) for stage in _stages(generation.seconds)],
    }
    arrays = {name: np.array(columns[name], dtype) for name, (dtype, _) in _ARRAYS.items()}
    if vocabulary is not None:
        arrays["token_bytes"] = np.frombuffer(b"".join(vocabulary.token_bytes), np.uint8)
        arrays["token_byte_offsets"] = _offsets(vocabulary.token_bytes)
    try:
        text = json.dumps(dict(settings or {}), ensure_ascii=False, allow_nan=False)
        json.loads(text)  # what is nested too deeply is written, in some versions of Python, but not read
        text.encode()
    except (TypeError, ValueError, RecursionError) as error:
        kind = TypeError if isinstance(error, TypeError) else ValueError
        raise kind(f"settings must be what JSON can hold: {error}") from error
    _rebuilt("generation", arrays, vocabulary)  # what cannot be read back is not written
    write_kdtr(path, arrays, {"format": FORMAT, "settings": text})


def load_run(path: str | os.PathLike[str]) -> Run:
    """Read a run that :func:`save_run` wrote, and check all of it.

    Raises
    ------
    ValueError
        The file is no run, or what it holds contradicts itself: file and array are named. A damaged file is a
        :class:`ddtree.kdtr.KdtrError`.

    Examples
    --------
    >>> import tempfile
    >>> from ddtree.drafters import NgramDrafter
    >>> from ddtree.engine import Engine, ScriptedTarget
    >>> text = np.arange(40, dtype=np.int32) % 10
    >>> engine = Engine(ScriptedTarget([text], vocab_size=10), NgramDrafter(), depth=4, budget=4)
    >>> path = tempfile.mkdtemp() + "/run.kdtr"
    >>> save_run(path, engine.generate([text[:20]], max_new_tokens=16), [text[:20]], settings={"drafter": "n-gram"})
    >>> run = load_run(path)
    >>> run.generation, run.settings
    (Generation(1 prompts, 16 tokens, 3 rounds, tau=5.00), {'drafter': 'n-gram'})
    """
    arrays, metadata = read_kdtr(path)
    if metadata.get("format") != FORMAT:
        raise ValueError(
            f"{path} is no saved run: its metadata 'format' must be {FORMAT!r}, got {metadata.get('format')!r}"
        )
    try:
        settings = json.loads(metadata.get("settings", "null"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: metadata 'settings' is not JSON: {error}") from error
    if not isinstance(settings, dict):
        raise ValueError(f"{path}: metadata 'settings' must be an object, got {type(settings).__name__}")
    vocabulary = _read_vocabulary(path, arrays)
    prompts, generation = _rebuilt(path, arrays, vocabulary)
    return Run(prompts, generation, vocabulary, settings)


def _joined(rows: Iterable[Any]) -> NDArray[Any]:
    return np.concatenate([np.zeros(0, np.int32), *rows])


def _offsets(rows: Iterable[Any]) -> NDArray[np.int64]:
    return np.cumsum([0, *map(len, rows)], dtype=np.int64)


def _read_vocabulary(path: Any, arrays: Mapping[str, NDArray[Any]]) -> Vocabulary | None:
    if "token_bytes" not in arrays and "token_byte_offsets" not in arrays:
        return None
    checked = _Columns(path, arrays)
    data = checked.column("token_bytes", "uint8").tobytes()
    ends = checked.offsets("token_byte_offsets", len(data), "token_bytes").tolist()
    return Vocabulary([data[a:b] for a, b in itertools.pairwise(ends)])


class _Columns:
    """The arrays of a file, and what is said of one that is wrong."""

    def __init__(self, path: Any, arrays: Mapping[str, NDArray[Any]]) -> None:
        self.path, self.arrays = path, arrays

    def fail(self, name: str, must: str, got: Any) -> NoReturn:
        raise ValueError(f"{os.fspath(self.path)}: {name} must {must}, got {got}")

    def column(self, name: str, dtype: str, length: int | None = None) -> NDArray[Any]:
        """One array, of that type and length."""
        wanted = f"be {dtype} of shape ({'n' if length is None else length},)"
        if name not in self.arrays:
            self.fail(name, wanted, "none")
        array = self.arrays[name]
        if array.dtype != dtype or array.ndim != 1 or (length is not None and len(array) != length):
            self.fail(name, wanted, f"{array.dtype} {array.shape}")
        return array

    def offsets(self, name: str, end: int, of: str) -> NDArray[np.int64]:
        """Offsets into another array, all of it."""
        array = self.column(name, "int64")
        if not array.size or array[0] != 0 or array[-1] != end or (np.diff(array) < 0).any():
            self.fail(name, f"rise from 0 to the {end} of {of}", _shown(array))
        return array

    def check(self, name: str, good: NDArray[np.bool_], must: str) -> None:
        """See that a condition holds in every place of an array."""
        if not good.all():
            at = int(np.argmin(good))
            self.fail(f"{name}[{at}]", must, self.arrays[name][at])


def _shown(array: NDArray[Any]) -> str:
    return f"{array[:4].tolist()}{'…' if len(array) > 4 else ''}"


def _rebuilt(
    path: Any, arrays: Mapping[str, NDArray[Any]], vocabulary: Vocabulary | None
) -> tuple[list[NDArray[np.int32]], Generation]:
    """Check every array and make the generation from them."""
    columns = _Columns(path, arrays)
    sizes = {letter: len(columns.column(name, _ARRAYS[name][0])) for letter, name in _SIZES.items()}
    for name, (dtype, length) in _ARRAYS.items():
        letter, _, more = length.partition("+")
        columns.column(name, dtype, sizes[letter] + bool(more) if letter else None)
    for name, of in _OFFSETS.items():
        columns.offsets(name, len(arrays[of]), of)
    if len(arrays["seconds"]) not in (len(STAGES), len(RESIDENT_STAGES)):
        wanted = f"have one value a stage, {len(STAGES)} or {len(RESIDENT_STAGES)}"
        columns.fail("seconds", wanted, len(arrays["seconds"]))
    columns.check("seconds", (arrays["seconds"] >= 0) & np.isfinite(arrays["seconds"]), "be finite and at least 0")
    most = _INT32_MAX if vocabulary is None else len(vocabulary) - 1
    for name in ("prompt_token_ids", "new_token_ids", "node_token_ids"):
        columns.check(name, (arrays[name] >= 0) & (arrays[name] <= most), f"be in 0 … {most}")
    choices = arrays["node_choices"]  # −1 where the target's logits gave none, which no kept node may have
    columns.check("node_choices", (choices >= -1) & (choices <= most), f"be in -1 … {most}")
    _check_rounds(columns, sizes)
    _check_trees(columns)
    _check_paths(columns)
    _check_emitted(columns)
    prompts = np.split(arrays["prompt_token_ids"], arrays["prompt_offsets"][1:-1])
    tokens = np.split(arrays["new_token_ids"], arrays["new_offsets"][1:-1])
    lengths, depths = np.diff(arrays["kept_offsets"]).astype(np.int32), _depths(arrays)
    generation = Generation(
        tokens=tokens if sizes["P"] else [],
        finish_reasons=[_REASONS[int(stopped)] for stopped in arrays["stopped"]],
        rounds=[_round(arrays, depths, i) for i in range(sizes["R"])],
        tokens_per_round=[lengths[(arrays["row_requests"] == p) & (lengths > 0)] for p in range(sizes["P"])],
        seconds=dict(zip(_stages(arrays["seconds"]), arrays["seconds"].tolist(), strict=True)),
        prompt_lens=np.diff(arrays["prompt_offsets"]).tolist(),
    )
    return prompts if sizes["P"] else [], generation


def _check_rounds(columns: _Columns, sizes: Mapping[str, int]) -> None:
    arrays = columns.arrays
    depths = arrays["round_max_depths"]
    columns.check("round_max_depths", (depths >= 0) & (depths <= _MOST_PADDING), f"be in 0 … {_MOST_PADDING}")
    columns.check("round_num_candidates", arrays["round_num_candidates"] >= 0, "be at least 0")
    requests = arrays["row_requests"]
    columns.check("row_requests", (requests >= 0) & (requests < sizes["P"]), f"be in 0 … {sizes['P'] - 1}")
    for begin, end in itertools.pairwise(arrays["round_offsets"].tolist()):
        if len(np.unique(requests[begin:end])) < end - begin:
            columns.fail("row_requests", "name each request once a round", _shown(requests[begin:end]))
    counts, which = np.diff(arrays["node_offsets"]), _round_of_rows(arrays)
    columns.check("node_offsets", np.append((counts >= 1), True), "rise by one node or more a row")
    widest = np.zeros(sizes["R"], np.int64)
    np.maximum.at(widest, which, counts)
    least, slots = np.maximum(widest, 1), arrays["round_slots"]
    fits = (slots >= least) & (slots <= least + _MOST_PADDING)
    columns.check("round_slots", fits, f"hold the nodes of each row, and at most {_MOST_PADDING} slots besides")


def _check_trees(columns: _Columns) -> None:
    arrays = columns.arrays
    parents, ranks, scores = arrays["node_parents"], arrays["node_ranks"], arrays["node_scores"]
    first = np.repeat(arrays["node_offsets"][:-1], np.diff(arrays["node_offsets"]))
    place = np.arange(len(parents)) - first
    root = place == 0
    good = np.where(root, parents == -1, (parents >= 0) & (parents < place))
    columns.check("node_parents", good, "be −1 for a root and an earlier node of the same tree for others")
    which = _round_of_rows(arrays)[_row_of_nodes(arrays)]
    candidates = arrays["round_num_candidates"][which]
    good = np.where(root, ranks == -1, (ranks >= 0) & (ranks < candidates))
    columns.check("node_ranks", good, "be −1 for a root and below round_num_candidates for others")
    above = np.where(root, scores, scores[first + np.maximum(parents, 0)])
    good = np.where(root, scores == 0, np.isfinite(scores) & (scores <= above))
    columns.check("node_scores", good, "be 0 for a root, and finite and at most the parent's for others")
    good = _depths(arrays) <= arrays["round_max_depths"][which]
    columns.check("node_parents", good, "lead to a root within round_max_depths")


def _check_paths(columns: _Columns) -> None:
    arrays = columns.arrays
    kept, offsets = arrays["kept_nodes"], arrays["kept_offsets"]
    lengths, bonus = np.diff(offsets), arrays["row_bonus_token_ids"]
    row = np.repeat(np.arange(len(lengths)), lengths)
    begin = np.arange(len(kept)) == offsets[row]
    counts = np.diff(arrays["node_offsets"])
    columns.check("kept_nodes", (kept >= 0) & (kept < counts[row]), "be a node of its tree")
    parent = arrays["node_parents"][arrays["node_offsets"][row] + kept]
    before = np.concatenate([[-1], kept[:-1]])
    good = np.where(begin, kept == 0, parent == before) if len(kept) else np.ones(0, np.bool_)
    columns.check("kept_nodes", good, "be a path from the root down")
    deepest = arrays["node_offsets"][:-1] + kept[np.maximum(offsets[1:] - 1, 0)] if len(kept) else 0
    wanted = np.where(lengths > 0, arrays["node_choices"][deepest] if len(kept) else -1, -1)
    columns.check("row_bonus_token_ids", bonus == wanted, "be the target's choice after the last kept node")


def _check_emitted(columns: _Columns) -> None:
    """The rounds must give the tokens, one round's last being the next one's root."""
    arrays = columns.arrays
    offsets = arrays["new_offsets"].tolist()
    last: dict[int, int] = {}
    kept, kept_at, node_at = arrays["kept_nodes"], arrays["kept_offsets"].tolist(), arrays["node_offsets"].tolist()
    for row, request in enumerate(arrays["row_requests"].tolist()):
        at = last.get(request, offsets[request])
        if at >= offsets[request + 1]:
            columns.fail("new_offsets", f"have a token for row {row} of request {request} to begin from", "none")
        tokens = arrays["node_token_ids"][node_at[row] + kept[kept_at[row] : kept_at[row + 1]]]
        root = arrays["node_token_ids"][node_at[row]]
        if root != arrays["new_token_ids"][at]:
            columns.fail(f"node_token_ids[{node_at[row]}]", f"be {arrays['new_token_ids'][at]}, the last token", root)
        if not len(tokens):
            continue
        emitted = np.append(tokens[1:], arrays["row_bonus_token_ids"][row])
        if not np.array_equal(
            arrays["new_token_ids"][at + 1 : min(at + 1 + len(emitted), offsets[request + 1])], emitted
        ):
            columns.fail("new_token_ids", f"go on with what row {row} emitted, {_shown(emitted)}", "another")
        last[request] = at + len(emitted)
    for request, (begin, end) in enumerate(itertools.pairwise(offsets)):
        if end == begin or last.get(request, begin) != end - 1:
            columns.fail("new_offsets", f"end where the rounds of request {request} do", end)


def _round_of_rows(arrays: Mapping[str, NDArray[Any]]) -> NDArray[np.int64]:
    counts = np.diff(arrays["round_offsets"])
    return np.repeat(np.arange(len(counts)), counts)


def _row_of_nodes(arrays: Mapping[str, NDArray[Any]]) -> NDArray[np.int64]:
    counts = np.diff(arrays["node_offsets"])
    return np.repeat(np.arange(len(counts)), counts)


def _depths(arrays: Mapping[str, NDArray[Any]]) -> NDArray[np.int32]:
    """Depth of every node, a step down at a time; parents are known to precede their children."""
    parents = arrays["node_parents"]
    first = np.repeat(arrays["node_offsets"][:-1], np.diff(arrays["node_offsets"]))
    depths = np.zeros(len(parents), np.int32)
    at = above = np.where(parents >= 0, first + parents, -1)
    while (below := at >= 0).any():
        depths += below
        at = np.where(below, above[at], -1)
    return depths


def _round(arrays: Mapping[str, NDArray[Any]], depths: NDArray[np.int32], i: int) -> Round:
    begin, end = arrays["round_offsets"][i : i + 2].tolist()
    N, L = int(arrays["round_slots"][i]), int(arrays["round_max_depths"][i])
    offsets = arrays["node_offsets"][begin : end + 1]
    counts = np.diff(offsets).astype(np.int32)
    used = np.arange(N) < counts[:, None]

    def padded(values: NDArray[Any], fill: Any, dtype: Any) -> NDArray[Any]:
        rows = np.full(used.shape, fill, dtype)
        rows[used] = values[offsets[0] : offsets[-1]]
        return rows

    parents = padded(arrays["node_parents"], -1, np.int32)
    tree = DraftTree(
        token_ids=padded(arrays["node_token_ids"], -1, np.int32),
        parents=parents,
        depths=padded(depths, -1, np.int32),
        ranks=padded(arrays["node_ranks"], -1, np.int32),
        scores=padded(arrays["node_scores"], -np.inf, np.float64),
        node_counts=counts,
        visibility_words=visibility_words(parents, counts, validate=False),
        max_depth=L,
        num_candidates=int(arrays["round_num_candidates"][i]),
    )
    kept_offsets = arrays["kept_offsets"][begin : end + 1]
    lengths = np.diff(kept_offsets).astype(np.int32)
    node_indices = np.full((end - begin, L + 1), -1, np.int32)
    node_indices[np.arange(L + 1) < lengths[:, None]] = arrays["kept_nodes"][kept_offsets[0] : kept_offsets[-1]]
    acceptance = Acceptance(
        node_indices=node_indices,
        lengths=lengths,
        bonus_token_ids=arrays["row_bonus_token_ids"][begin:end],
        finished=arrays["row_finished"][begin:end],
    )
    requests = tuple(arrays["row_requests"][begin:end].tolist())
    return Round(requests, tree, padded(arrays["node_choices"], -1, np.int32), acceptance)


def _stages(seconds: Sized) -> tuple[str, ...]:
    """The parts that so many times are of."""
    return RESIDENT_STAGES if len(seconds) == len(RESIDENT_STAGES) else STAGES
