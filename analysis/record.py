"""Recording a trace with the engine: one token a round is committed, and every draft is kept."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ddtree.analysis.progress import progress_bar
from ddtree.analysis.trace import Trace, TraceWriter, check_same_prompts, open_trace
from ddtree.arrays import to_numpy
from ddtree.checks import check_text
from ddtree.engine import Engine, Round
from ddtree.protocols import CachingTarget, DraftContext, Drafter, Target
from ddtree.tokens import stop_tokens, token_row
from ddtree.trees import DraftTree, chain_tree

__all__ = ["read_prompts", "record", "record_trace", "vocabulary_digest"]


def record(
    target: Target | CachingTarget,
    drafter: Drafter,
    prompts: Sequence[ArrayLike],
    path: str | os.PathLike[str],
    *,
    depth: int = 7,
    topk: int = 16,
    max_new_tokens: int = 64,
    stop_token_ids: Iterable[int] = (),
    temperature: float = 0.0,
    top_p: float = 1.0,
    seed: int = 0,
    names: Sequence[str] | None = None,
    target_name: str = "",
    drafter_name: str = "",
    vocabulary: str = "",
    prompts_a_chunk: int = 16,
    backend: str | None = None,
    on_prompts: Callable[[int], None] | None = None,
) -> Trace:
    """Record what the drafter drafts at every position of the target's continuations, with our engine.

    The engine runs, ``prompts_a_chunk`` prompts at a time, with a policy that keeps the draft and no node: it commits
    one token a round, and the drafter sees what it would see in a live run that got to that position, but for how many
    rows came in one pass. A drafter whose log-probs follow from the committed tokens alone drafts the same bits in
    both. One that computes in floating point on the target's hidden states may round otherwise where a pass had
    another shape; then a replay and a live run agree but where two scores, or two logits, are as near as that.

    A drafter sees the numbers that the requests have among all prompts, whatever the chunk. A trace that is there, of
    the same arguments, is continued behind its last whole chunk; a finished one is what is returned, as it is.

    Parameters
    ----------
    target, drafter : Target or CachingTarget, Drafter
        The pair, as :class:`ddtree.Engine` takes them.
    prompts : sequence of array, int, shape (n,)
        Token ids of each prompt.
    path : str or os.PathLike
        Folder of the trace.
    depth, topk : int
        L and K: what a replay can use at most.
    max_new_tokens, stop_token_ids, temperature, top_p, seed
        As in :meth:`ddtree.Engine.generate`.
    names : sequence of str, optional
        What the prompts are called, one each.
    target_name, drafter_name, vocabulary : str
        Kept in the manifest; by default the drafter's ``label`` and the types' names.
    prompts_a_chunk : int
        Prompts that run together and that a chunk holds.
    backend : str, optional
        Who does the operations.
    on_prompts : callable, optional
        Called with the number of prompts that are recorded, at first and after each chunk; of a finished trace once.

    Returns
    -------
    Trace
        The whole of it, open.

    Raises
    ------
    ValueError, TypeError
        An argument by name, before any work; or the folder holds something else: the field that differs is named.
    """
    if drafter is None:
        raise TypeError("drafter must be a drafter, got None")
    engine = Engine(target, drafter, depth=depth, topk=topk, policy=_Keep(), backend=backend)
    rows = [token_row(f"prompts[{i}]", prompt, engine.vocab_size) for i, prompt in enumerate(prompts)]
    if not rows:
        raise ValueError("prompts must hold one prompt or more, got none")
    names = [""] * len(rows) if names is None else list(names)
    if len(names) != len(rows):
        raise ValueError(f"names must have one entry a prompt, {len(rows)}, got {len(names)}")
    for i, name in enumerate(names):
        check_text(f"names[{i}]", name)
    digest = hashlib.sha256()
    for row in rows:
        digest.update(np.array([len(row), *row], "<i4").tobytes())
    check_same_prompts(Path(path), digest.hexdigest(), rows)
    sampling: dict[str, Any] = {"temperature": temperature, "top_p": top_p, "seed": seed}
    stops = stop_tokens(stop_token_ids, engine.vocab_size)
    writer = TraceWriter(
        path,
        *(engine.vocab_size, depth, topk),
        max_new_tokens=max_new_tokens,
        stop_token_ids=stops,
        **sampling,
        target=target_name or type(target).__name__,
        drafter=drafter_name or str(getattr(drafter, "label", type(drafter).__name__)),
        prompts=digest.hexdigest(),
        vocabulary=vocabulary,
        prompts_a_chunk=prompts_a_chunk,
    )
    with writer:
        while writer.num_prompts < len(rows):
            if on_prompts is not None:
                on_prompts(writer.num_prompts)
            start = writer.num_prompts
            batch = rows[start : start + prompts_a_chunk]
            engine.policy = keep = _Keep()
            engine.drafter = _Renumbered(drafter, start)
            generation = engine.generate(
                batch,
                max_new_tokens,
                stops,
                **sampling,
                request_ids=range(start, start + len(batch)),
                on_round=keep.assign,
            )
            for b, (prompt, new) in enumerate(zip(batch, generation.tokens, strict=True)):
                values, ids = keep.drafts(b, depth, topk)
                writer.append(np.concatenate([prompt, new]), len(prompt), values, ids, names[start + b])
        if on_prompts is not None:
            on_prompts(len(rows))
    return open_trace(path)


def read_prompts(
    paths: Iterable[str | os.PathLike[str]], encode: Callable[[str], ArrayLike]
) -> tuple[list[NDArray[np.int32]], list[str]]:
    """Read prompts from files: of ``.jsonl`` files each line is a prompt, any other file is one, as UTF-8 text.

    A line is a string, a list of token ids, or an object with ``prompt`` (a string) or ``token_ids`` (a list), and
    ``name`` if it has one. Empty lines are passed over.

    Parameters
    ----------
    paths : iterable of path
        The files.
    encode : callable
        Makes token ids of a text, such as ``vocabulary.encode``.

    Returns
    -------
    tokens : list of array, int32, shape (n,)
        Token ids of each prompt.
    names : list of str
        What each was called; without a name, its file, and the line of a ``.jsonl`` file.

    Raises
    ------
    ValueError
        A file or line that is no prompt, by file, line and field.
    """
    tokens, names = [], []
    for path in map(Path, paths):
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise ValueError(f"{path}: must be UTF-8 text, got {error}") from error
        called = os.fsencode(path.name).decode(errors="replace")  # a file's name may be any bytes
        lines = [(called, text)]
        if path.suffix == ".jsonl":
            numbered = enumerate(text.split("\n"), 1)  # a string may hold other line ends, such as U+2028
            lines = [(f"{called}:{n}", line) for n, line in numbered if line.strip()]
        for place, line in lines:
            prompt, name = _parsed(path.parent / place, line) if path.suffix == ".jsonl" else (line, "")
            tokens.append(_tokens_of(path.parent / place, prompt, encode))
            names.append(name or place)
    return tokens, names


def vocabulary_digest(token_bytes: Sequence[bytes]) -> str:
    """SHA-256 of a vocabulary, the bytes of each token by id: what a manifest knows it by."""
    digest = hashlib.sha256()
    for token in token_bytes:
        digest.update(len(token).to_bytes(4, "little") + token)
    return digest.hexdigest()


def _parsed(place: Path, line: str) -> tuple[Any, str]:
    try:
        found = json.loads(line)
    except (ValueError, RecursionError) as error:  # no JSON, or lists in lists too deep
        raise ValueError(f"{place}: must be JSON, got {error}") from error
    if not isinstance(found, dict):
        return found, ""
    given = [key for key in ("prompt", "token_ids") if key in found]
    if len(given) != 1:
        raise ValueError(f"{place}: must have prompt or token_ids, one of them, got {sorted(found)}")
    for key, kind, must in (("prompt", str, "a string"), ("token_ids", list, "a list of token ids")):
        if not isinstance(found.get(key, kind()), kind):
            raise ValueError(f"{place}: {key} must be {must}, got {type(found[key]).__name__}")
    if not isinstance(found.get("name", ""), str):
        raise ValueError(f"{place}: name must be a string, got {found['name']!r}")
    check_text(f"{place}: name", found.get("name", ""))
    return found[given[0]], found.get("name", "")


def _tokens_of(place: Path, prompt: Any, encode: Callable[[str], ArrayLike]) -> NDArray[np.int32]:
    if not isinstance(prompt, str | list):
        raise ValueError(f"{place}: prompt must be a string or a list of token ids, got {type(prompt).__name__}")
    if isinstance(prompt, str):
        check_text(f"{place}: prompt", prompt)
    try:
        tokens = token_row("token_ids", encode(prompt) if isinstance(prompt, str) else prompt)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{place}: {error}") from error
    if not tokens.size:
        raise ValueError(f"{place}: prompt must have one token or more, got none")
    return tokens


def record_trace(
    model: Any,
    drafter: Drafter,
    prompts: Any,
    path: str | os.PathLike[str],
    *,
    attention_mask: Any = None,
    stop_token_ids: Iterable[int] | None = None,
    cache: str | Callable[[int], Any] = "dynamic",
    **options: Any,
) -> Trace:
    """Record a Hugging Face model's continuations and what the drafter drafts at every position of them.

    As :func:`record`, resumable, with a progress bar on stderr where that is a terminal.

    Parameters
    ----------
    model, drafter, cache
        As of :class:`ddtree.DDTreeDecoder`.
    prompts, attention_mask, stop_token_ids
        As of :meth:`ddtree.DDTreeDecoder.generate`.
    path : str or os.PathLike
        Folder of the trace.
    **options
        What else :func:`record` takes.

    Returns
    -------
    Trace
        The whole of it, open.
    """
    from ddtree.interop.huggingface import DDTreeDecoder

    decoder = DDTreeDecoder(model, drafter, cache=cache)
    rows = decoder.prompt_rows(prompts, attention_mask)
    with progress_bar("recording", len(rows)) as show:
        defaults: dict[str, Any] = {
            "target_name": model.config.name_or_path or type(model).__name__,
            "on_prompts": show,
        }
        stops = decoder.stop_token_ids if stop_token_ids is None else stop_token_ids
        return record(decoder.target, drafter, rows, path, stop_token_ids=stops, **defaults | options)


class _Keep:
    """A policy that keeps every draft and drafts nothing: one token a round is committed."""

    budget = 0
    label = "recording"

    def __init__(self) -> None:
        self._last: tuple[NDArray[Any], ...] = ()
        self._drafts: dict[int, list[tuple[NDArray[Any], ...]]] = {}

    def __call__(self, log_probs: Any, token_ids: Any, root_token_ids: Any, prefix_lens: Any) -> DraftTree:
        self._last = tuple(to_numpy(a).copy() for a in (log_probs, token_ids))
        return chain_tree(to_numpy(root_token_ids)[:, None])

    def assign(self, round_: Round) -> None:
        """Give the draft of the round that is over to its requests."""
        for b, request in enumerate(round_.request_ids):
            self._drafts.setdefault(request, []).append(tuple(a[b] for a in self._last))

    def drafts(self, request: int, depth: int, topk: int) -> tuple[NDArray[np.float32], NDArray[np.int32]]:
        """Every draft of a request, in order, with −inf behind what a narrow draft holds."""
        kept = self._drafts.get(request, [])
        values = np.full((len(kept), depth, topk), -np.inf, np.float32)
        ids = np.zeros(values.shape, np.int32)
        for i, (row, those) in enumerate(kept):
            values[i, :, : row.shape[1]], ids[i, :, : row.shape[1]] = row, those
        return values, ids


class _Renumbered:
    """A drafter that is told the numbers that a chunk's requests have among all prompts."""

    def __init__(self, drafter: Drafter, start: int) -> None:
        self._drafter, self._start = drafter, start
        self.__name__ = str(getattr(drafter, "__name__", type(drafter).__name__))  # for messages

    def __getattr__(self, name: str) -> Any:
        return getattr(self._drafter, name)

    def __call__(self, context: DraftContext, depth: int, topk: int) -> tuple[Any, Any]:
        numbers = {
            name: [self._start + r for r in getattr(context, name)] for name in ("request_ids", "began", "ended")
        }
        return self._drafter(replace(context, **numbers), depth, topk)

    def forget(self, request_ids: Iterable[int]) -> None:
        """Pass on who has ended, if the drafter keeps something of them."""
        forget = getattr(self._drafter, "forget", None)
        if forget is not None:
            forget([self._start + r for r in request_ids])
