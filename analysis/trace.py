'''Traces: what a drafter drafted at every position of a target's continuations, kept to replay any policy on it.

A trace is a folder: ``manifest.json``, and ``chunk-00000.kdtr``, ``chunk-00001.kdtr``, … of whole prompts each. Every
file is written whole, so a recording that was killed can be read up to its last chunk, and can go on from there.

Of each prompt a trace holds the tokens, prompt and continuation, and for root index i = 0 … n_new − 2 (0: the first
new token is the root) the draft that was made after it: log-probs and token ids (L, K), where slot d, counted from 0,
drafts new token i + 1 + d. The arrays of a chunk are those of :class:`TraceChunk`, in KDTR; token ids are uint16 where
the vocabulary has at most 65,536 tokens, and drafted ids behind a depth's end are 0.

:func:`ddtree.analysis.record.record` makes one with the engine. What any other program drafted is recorded with
:class:`TraceWriter`. With torch and models of transformers, where the drafter is a smaller language model that drafts
greedily:

.. code-block:: python

    import torch
    from ddtree.analysis.trace import TraceWriter

    def record_torch(target, drafter, prompts, path, depth=4, topk=8, max_new_tokens=32, stop=()):
        """Causal language models of one vocabulary, and prompts as lists of token ids."""

        @torch.no_grad()
        def log_probs_after(model, tokens):
            return torch.log_softmax(model(torch.tensor(tokens)).logits[:, -1].float(), -1)

        with TraceWriter(path, target.config.vocab_size, depth, topk, max_new_tokens=max_new_tokens,
                         stop_token_ids=stop) as writer:
            for prompt in prompts[writer.num_prompts:]:  # those of an earlier recording are there already
                tokens = list(prompt)
                while len(tokens) < len(prompt) + max_new_tokens:
                    tokens.append(int(log_probs_after(target, [tokens]).argmax()))
                    if tokens[-1] in stop:
                        break
                roots = range(len(prompt) + 1, len(tokens))  # where a draft begins: behind each new token but the last
                log_probs = torch.empty(len(roots), depth, topk)
                ids = torch.empty(len(roots), depth, topk, dtype=torch.int32)
                for row, end in enumerate(roots):
                    drafted = tokens[:end]
                    for d in range(depth):
                        best = log_probs_after(drafter, [drafted]).topk(topk)
                        log_probs[row, d], ids[row, d] = best.values[0], best.indices[0].int()
                        drafted = [*drafted, int(ids[row, d, 0])]
                writer.append(tokens, len(prompt), log_probs.numpy(), ids.numpy())

With vLLM, the same from two of its models; requests are batched by vLLM itself:

.. code-block:: python

    import numpy as np
    from ddtree.analysis.trace import TraceWriter
    from vllm import LLM, SamplingParams, TokensPrompt

    def record_vllm(target, drafter, prompts, path, depth=4, topk=8, max_new_tokens=32):
        greedy = SamplingParams(temperature=0, max_tokens=max_new_tokens)
        draft = SamplingParams(temperature=0, max_tokens=depth, logprobs=topk, ignore_eos=True)
        vocab_size = target.llm_engine.model_config.get_vocab_size()
        with TraceWriter(path, vocab_size, depth, topk, max_new_tokens=max_new_tokens) as writer:
            for prompt in prompts[writer.num_prompts:]:
                [done] = target.generate([TokensPrompt(prompt_token_ids=prompt)], greedy)
                tokens = [*prompt, *done.outputs[0].token_ids]
                ends = range(len(prompt) + 1, len(tokens))
                drafts = drafter.generate([TokensPrompt(prompt_token_ids=tokens[:end]) for end in ends], draft)
                rows = [[sorted(((p.logprob, t) for t, p in at.items()), reverse=True)[:topk]
                         for at in d.outputs[0].logprobs] for d in drafts]
                pairs = np.array(rows, np.float64).reshape(len(ends), depth, topk, 2)
                writer.append(tokens, len(prompt), pairs[..., 0], pairs[..., 1].astype(np.int32))

With SGLang, ``drafter`` and ``target`` being ``sglang.Engine``:

.. code-block:: python

    import numpy as np
    from ddtree.analysis.trace import TraceWriter

    def record_sglang(target, drafter, vocab_size, prompts, path, depth=4, topk=8, max_new_tokens=32):
        greedy = {"temperature": 0, "max_new_tokens": max_new_tokens}
        draft = {"temperature": 0, "max_new_tokens": depth, "ignore_eos": True}
        with TraceWriter(path, vocab_size, depth, topk, max_new_tokens=max_new_tokens) as writer:
            for prompt in prompts[writer.num_prompts:]:
                tokens = [*prompt, *target.generate(input_ids=prompt, sampling_params=greedy)["output_ids"]]
                contexts = [tokens[:end] for end in range(len(prompt) + 1, len(tokens))]
                drafts = drafter.generate(input_ids=contexts, sampling_params=draft, return_logprob=True,
                                          top_logprobs_num=topk)
                rows = [[[pair[:2] for pair in at[:topk]] for at in d["meta_info"]["output_top_logprobs"]]
                        for d in drafts]
                pairs = np.array(rows, np.float64).reshape(len(contexts), depth, topk, 2)
                writer.append(tokens, len(prompt), pairs[..., 0], pairs[..., 1].astype(np.int32))

Letters: P prompts, T tokens, M positions (drafts), L draft depth limit, K candidates a depth, V vocabulary.
'''

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

import ddtree
from ddtree.checks import INT32_MAX, check_text, integer, real
from ddtree.kdtr import KdtrFile, atomic_write, remove_temporaries, write_kdtr
from ddtree.reference.build_tree import drafted_widths
from ddtree.tokens import stop_tokens, token_row

__all__ = ["Manifest", "Trace", "TraceChunk", "TraceWriter", "open_trace", "shipped_trace"]

FORMAT = "ddtree trace 1"
MANIFEST = "manifest.json"
SHIPPED = "trace"
"""Folder of the shipped trace, in the pair's."""

SHORT_IDS = 1 << 16
"""Vocabularies up to this size have their ids in 16 bits."""


@dataclass(frozen=True, eq=False)
class TraceChunk:
    """Some whole prompts of a trace, in columns.

    Attributes
    ----------
    first_prompt : int
        Number of the first prompt among the trace's.
    names : tuple of str, P
        What the prompts are called, "" where nothing was said.
    token_ids : array, int32, shape (T,)
        Prompts and continuations, one after the other.
    token_offsets : array, int64, shape (P + 1,)
        Where each prompt's tokens begin, and the end.
    prompt_lens : array, int32, shape (P,)
        Of each prompt's tokens, those that were given; the others are new.
    log_probs : array, float32, shape (M, L, K)
        The drafts, as the drafter gave them; a depth ends before its first NaN or −inf.
    draft_token_ids : array, uint16 or int32, shape (M, L, K)
        Their tokens; anything behind a depth's end.
    position_offsets : array, int64, shape (P + 1,)
        Where each prompt's drafts begin, and the end: a prompt of n new tokens has max(n − 1, 0), in order.
    """

    first_prompt: int
    names: tuple[str, ...]
    token_ids: NDArray[np.int32]
    token_offsets: NDArray[np.int64]
    prompt_lens: NDArray[np.int32]
    log_probs: NDArray[np.float32]
    draft_token_ids: NDArray[Any]
    position_offsets: NDArray[np.int64]

    @property
    def num_prompts(self) -> int:
        """P."""
        return len(self.prompt_lens)

    @property
    def num_positions(self) -> int:
        """M."""
        return len(self.log_probs)

    def prompt_tokens(self, p: int) -> NDArray[np.int32]:
        """Tokens of the chunk's prompt ``p``, what was given and what is new."""
        return self.token_ids[self.token_offsets[p] : self.token_offsets[p + 1]]

    def new_tokens(self, p: int) -> NDArray[np.int32]:
        """New tokens of the chunk's prompt ``p``."""
        return self.prompt_tokens(p)[self.prompt_lens[p] :]


@dataclass(frozen=True)
class Manifest:
    """What a trace is of; a recording goes on only where all of it but the last two fields is the same.

    Attributes
    ----------
    vocab_size : int
        V.
    vocabulary : str
        A digest of the vocabulary, or any name of it; "" where nothing was said.
    depth, topk : int
        L and K.
    max_new_tokens : int
        The most new tokens of a prompt.
    stop_token_ids : tuple of int
        Tokens that end a continuation.
    temperature, top_p : float
        How the target's tokens were chosen: 0 is greedy.
    seed : int
        Of the choices, above temperature 0.
    target, drafter : str
        Names.
    prompts : str
        SHA-256 of the prompts, where they were known beforehand.
    prompts_a_chunk : int
        Prompts of a chunk; the last one may have fewer.
    version : str
        Of ddtree, which recorded it.
    num_prompts : int
        Prompts in the trace once it is complete, −1 until then.
    """

    vocab_size: int
    vocabulary: str
    depth: int
    topk: int
    max_new_tokens: int
    stop_token_ids: tuple[int, ...]
    temperature: float
    top_p: float
    seed: int
    target: str
    drafter: str
    prompts: str
    prompts_a_chunk: int
    version: str = ddtree.__version__
    num_prompts: int = -1

    @property
    def complete(self) -> bool:
        """Whether the recording came to its end."""
        return self.num_prompts >= 0

    @property
    def identity(self) -> str:
        """A digest of what cannot change while recording; every chunk bears it."""
        return hashlib.sha256(json.dumps(asdict(replace(self, num_prompts=-1, version=""))).encode()).hexdigest()[:16]


_TYPES = {"int": int, "float": (int, float), "str": str, "tuple[int, ...]": list}


class Trace:
    """A trace that is open for reading: its manifest, and its chunks one at a time.

    Parameters
    ----------
    manifest : Manifest
        What it is of.
    chunks : sequence of path or TraceChunk
        Files, which are read and checked when they are asked for, or what is in memory.
    name : str
        What messages and tables call it.
    """

    def __init__(self, manifest: Manifest, chunks: Sequence[Path] | Sequence[TraceChunk], name: str = "trace") -> None:
        self.manifest, self.name, self._chunks = manifest, name, chunks

    def __repr__(self) -> str:
        m = self.manifest
        state = "" if m.complete else ", unfinished"
        return f"Trace({self.name!r}, {len(self._chunks)} chunks, V={m.vocab_size}, L={m.depth}, K={m.topk}{state})"

    def __len__(self) -> int:
        """The number of chunks."""
        return len(self._chunks)

    def __iter__(self) -> Iterator[TraceChunk]:
        """The chunks, as often as one likes: see :meth:`chunks`."""
        return self.chunks()

    def chunks(self) -> Iterator[TraceChunk]:
        """Read the chunks in order; no more than one is held.

        Raises
        ------
        ValueError
            A chunk is damaged, or not this trace's: file and field are named, by a :class:`ddtree.KdtrError` the byte.
        """
        first = 0
        for chunk in self._chunks:
            read = _read_chunk(chunk, self.manifest, first) if isinstance(chunk, Path) else chunk
            first += read.num_prompts
            yield read
        if self.manifest.complete and first != self.manifest.num_prompts:
            raise ValueError(
                f"{self.name}: num_prompts of the manifest must be what the chunks hold, {first}, "
                f"got {self.manifest.num_prompts}"
            )

    def in_memory(self) -> Trace:
        """The same trace, read once and held."""
        return Trace(self.manifest, list(self.chunks()), self.name)

    def digest(self) -> str:
        """A digest of all that the chunks hold; of files, by the checksums in their indices alone."""
        digest = hashlib.sha256(self.manifest.identity.encode())
        for chunk in self._chunks:
            if isinstance(chunk, Path):
                with KdtrFile(chunk) as file:
                    digest.update(repr([(e.name, e.crc32, e.shape) for e in file.entries.values()]).encode())
            else:
                for f in fields(chunk):
                    value = getattr(chunk, f.name)
                    digest.update(value.tobytes() if isinstance(value, np.ndarray) else repr(value).encode())
        return digest.hexdigest()

    def summary(self) -> dict[str, int]:
        """Count prompts, new tokens and positions: reads it all."""
        sums = np.zeros(3, np.int64)
        for c in self.chunks():
            sums += c.num_prompts, len(c.token_ids) - int(c.prompt_lens.sum()), c.num_positions
        return dict(zip(("prompts", "new_tokens", "positions"), sums.tolist(), strict=True))


def open_trace(path: str | os.PathLike[str]) -> Trace:
    """Open a trace, finished or not.

    Parameters
    ----------
    path : str or os.PathLike
        Its folder.

    Returns
    -------
    Trace
        Chunks are read when they are asked for.

    Raises
    ------
    ValueError
        The manifest is damaged, a chunk is missing, or there is none: the file and the field are named.
    OSError
        There is no such folder, or it has no manifest.
    """
    folder = Path(path)
    manifest = _read_manifest(folder / MANIFEST)
    found = _found_chunks(folder)
    missing = next((i for i, chunk in enumerate(found) if chunk != _chunk_path(folder, i)), None)
    if manifest.complete:
        count = -(-manifest.num_prompts // manifest.prompts_a_chunk)
        if len(found) > count:
            raise ValueError(
                f"{_chunk_path(folder, count)}: must not be there, {MANIFEST} says num_prompts {manifest.num_prompts}"
            )
        if missing is None and len(found) < count:
            missing = len(found)
    if missing is not None:
        raise ValueError(
            f"{_chunk_path(folder, missing)}: is missing, record it again from there: remove the chunks behind it"
        )
    if not found:
        raise ValueError(f"{folder}: must have a chunk or more, got an empty trace")
    return Trace(manifest, found, folder.name or str(folder))


def shipped_trace() -> Trace:
    """Open the trace that comes with ddtree: the installed pair's drafts on prompts that neither model was trained on.

    Greedy, 64 new tokens, L = 7, K = 16; recorded by ``ddtree record --held-out``.
    """
    from ddtree.pair import pair_folder

    folder = pair_folder()
    opened = open_trace(folder / SHIPPED)
    return Trace(opened.manifest, opened._chunks, folder.name)


class TraceWriter:
    """Writes a trace, or goes on with one, a prompt at a time.

    Prompts are kept until a chunk is whole, then written. Used as a context manager, leaving it without an error writes
    what is left and marks the trace complete; a killed or failed recording keeps its whole chunks. A folder has one
    writer at a time: before each write a writer sees that its trace is as it left it.

    Parameters
    ----------
    path : str or os.PathLike
        The folder, made if it is not there. One that holds an unfinished trace of the same manifest is continued; a
        finished one is left as it is, if ``prompts`` tells that it is of the same.
    vocab_size, depth, topk : int
        V, L and K.
    max_new_tokens : int
        The most new tokens of a prompt.
    stop_token_ids, temperature, top_p, seed, target, drafter, prompts, vocabulary
        See :class:`Manifest`; what is not known can be left out.
    prompts_a_chunk : int
        Prompts kept before they are written.

    Attributes
    ----------
    num_prompts : int
        Prompts in the trace so far: the number of the next one.

    Raises
    ------
    ValueError, TypeError
        An argument by name; or the folder holds a trace of another manifest, whose field is named, or a finished one of
        which nobody knows the prompts; or, from a method, another writer has written to the folder meanwhile, or
        nothing can be added any more. Nothing is written.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        vocab_size: int,
        depth: int,
        topk: int,
        *,
        max_new_tokens: int,
        stop_token_ids: Iterable[int] = (),
        temperature: float = 0.0,
        top_p: float = 1.0,
        seed: int = 0,
        target: str = "",
        drafter: str = "",
        prompts: str = "",
        vocabulary: str = "",
        prompts_a_chunk: int = 16,
    ) -> None:
        vocab_size = integer("vocab_size", vocab_size, 1, INT32_MAX)
        self.manifest = Manifest(
            vocab_size=vocab_size,
            vocabulary=vocabulary,
            depth=integer("depth", depth, 1, INT32_MAX - 1),
            topk=integer("topk", topk, 1, vocab_size, "the vocabulary size"),
            max_new_tokens=integer("max_new_tokens", max_new_tokens, 1, INT32_MAX),
            stop_token_ids=tuple(stop_tokens(stop_token_ids, vocab_size)),
            temperature=real("temperature", temperature, least=0.0),
            top_p=_share("top_p", top_p),
            seed=integer("seed", seed, 0, 2**64 - 1),
            target=target,
            drafter=drafter,
            prompts=prompts,
            prompts_a_chunk=integer("prompts_a_chunk", prompts_a_chunk, 1, INT32_MAX),
        )
        self.folder = Path(path)
        self.num_chunks = self._begin()
        self._left, self._closed = self._files(), False
        self.num_prompts = self.num_chunks * self.manifest.prompts_a_chunk
        if self.manifest.complete:
            self.num_prompts = self.manifest.num_prompts
        self._held: list[tuple[str, NDArray[np.int32], int, NDArray[np.float32], NDArray[Any]]] = []

    def _begin(self) -> int:
        """See that what is there can be gone on with; return its chunks. Nothing is written before a chunk is."""
        path = self.folder / MANIFEST
        chunks = _found_chunks(self.folder)
        if not path.exists():
            if chunks:
                raise ValueError(f"{self.folder}: must be empty or a trace, got chunks without {MANIFEST}")
            return 0
        there = _read_manifest(path)
        for f in fields(Manifest):
            old, new = getattr(there, f.name), getattr(self.manifest, f.name)
            if f.name not in ("num_prompts", "version") and old != new:
                wanted, got = ("those", "others") if f.name == "prompts" else (f"{old!r}, as", repr(new))
                raise ValueError(
                    f"{path}: {f.name} must be {wanted} of the recording that is there, to go on with it, got {got}: "
                    "choose another folder"
                )
        if there.complete:
            if not there.prompts:
                raise ValueError(f"{path}: must be of an unfinished trace, this one is complete: choose another folder")
            self.manifest = there
            return len(chunks)
        if chunks != [_chunk_path(self.folder, i) for i in range(len(chunks))]:
            raise ValueError(f"{self.folder}: chunks must be numbered without a gap, got {chunks[-1].name} as the last")
        for chunk in chunks:
            read = _read_chunk(chunk, self.manifest, None)
            if read.num_prompts != self.manifest.prompts_a_chunk:
                raise ValueError(
                    f"{chunk}: prompt_lens must have {self.manifest.prompts_a_chunk} entries in an unfinished trace, "
                    f"got {read.num_prompts}: remove the file"
                )
        return len(chunks)

    def append(
        self,
        tokens: ArrayLike,
        prompt_len: int,
        log_probs: ArrayLike,
        token_ids: ArrayLike,
        name: str = "",
    ) -> None:
        """Add a prompt.

        Parameters
        ----------
        tokens : array, int, shape (n,)
            Prompt and continuation.
        prompt_len : int
            How many of them were given, 1 and up; at least one is new, at most ``max_new_tokens`` are, and a stop
            token is the last or none is among them.
        log_probs : array, float, shape (n − prompt_len − 1, L, K)
            The draft after each new token but the last, float32 or converted: as :func:`ddtree.build_tree` takes them.
        token_ids : array, int, shape of log_probs
            Their tokens.
        name : str
            What the prompt is called.

        Raises
        ------
        ValueError, TypeError
            By name and place, or the trace is complete; nothing is added then.
        """
        self._check_open()
        m, what = self.manifest, f"prompt {self.num_prompts}"
        check_text(f"name of {what}", name)
        row = token_row(f"tokens of {what}", tokens, m.vocab_size)
        prompt_len = integer(f"prompt_len of {what}", prompt_len, 1, len(row) - 1, "one token must be new")
        new = row[prompt_len:]
        if len(new) > m.max_new_tokens:
            raise ValueError(f"tokens of {what} must have at most {m.max_new_tokens} new ones, got {len(new)}")
        stops = np.flatnonzero(np.isin(new[:-1], m.stop_token_ids))
        if stops.size:
            raise ValueError(
                f"tokens of {what} must end at a stop token, got {len(new) - 1 - int(stops[0])} behind one"
            )
        values = np.ascontiguousarray(log_probs, np.float32)
        ids = np.asarray(token_ids)
        wanted = (len(new) - 1, m.depth, m.topk)
        if values.shape != wanted or ids.shape != wanted:
            raise ValueError(
                f"log_probs and token_ids of {what} must have shape {wanted}, got {values.shape} and {ids.shape}"
            )
        if ids.size and ids.dtype.kind not in "iu":
            raise TypeError(f"token_ids of {what} must hold integers, got {ids.dtype}")
        drafted = np.arange(m.topk) < drafted_widths(values)[:, :, None]
        try:
            _check_drafts(values, ids.astype(np.int64, copy=False), m.vocab_size)
        except ValueError as error:
            raise ValueError(f"{what}: {error}") from error
        short = np.uint16 if m.vocab_size <= SHORT_IDS else np.int32
        self._held.append((name, row, prompt_len, values, np.where(drafted, ids, 0).astype(short)))
        self.num_prompts += 1
        if len(self._held) == m.prompts_a_chunk:
            try:
                self._flush()
            except BaseException:
                self._held.pop()
                self.num_prompts -= 1
                raise

    def close(self) -> None:
        """Write what is left and mark the trace complete; nothing can be added then. Once closed, it stays so."""
        if self._closed or self.manifest.complete:
            return
        if self._held:
            self._flush()
        self._check_alone()
        complete = replace(self.manifest, num_prompts=self.num_prompts)
        self._write_manifest(complete)
        self.manifest = complete

    def __enter__(self) -> TraceWriter:
        return self

    def __exit__(self, kind: object, error: object, traceback: object) -> None:
        if kind is None:
            self.close()
        self._closed = True

    def _check_open(self) -> None:
        if self.manifest.complete:
            raise ValueError(
                f"{self.folder}: the trace is complete, with {self.manifest.num_prompts} prompts: nothing can be added"
            )
        if self._closed:
            raise ValueError(f"{self.folder}: must be open to be added to, its writer is closed: make another one")

    def _files(self) -> dict[str, tuple[int, int]]:
        """When each file of the trace was written, and its size."""
        paths = [path for path in (self.folder / MANIFEST, *_found_chunks(self.folder)) if path.exists()]
        return {path.name: (path.stat().st_mtime_ns, path.stat().st_size) for path in paths}

    def _check_alone(self) -> None:
        """See that the trace is as this writer left it, and remove what a killed one left half written."""
        now = self._files()
        names = sorted(n for n in {*now, *self._left} if now.get(n) != self._left.get(n))
        if MANIFEST in now and _read_manifest(self.folder / MANIFEST).identity != self.manifest.identity:
            names = [MANIFEST]  # two began at the same moment
        if names:
            raise ValueError(
                f"{self.folder}: must have one writer at a time, another has changed {names[0]}: "
                "stop the others, or choose another folder"
            )
        remove_temporaries(self.folder)

    def _flush(self) -> None:
        self._check_alone()
        names, rows, lens, values, ids = zip(*self._held, strict=True)
        arrays = {
            "token_ids": np.concatenate(rows),
            "token_offsets": np.cumsum([0, *map(len, rows)], dtype=np.int64),
            "prompt_lens": np.array(lens, np.int32),
            "log_probs": np.concatenate(values),
            "draft_token_ids": np.concatenate(ids),
            "position_offsets": np.cumsum([0, *map(len, values)], dtype=np.int64),
        }
        if self.manifest.vocab_size <= SHORT_IDS:
            arrays["token_ids"] = arrays["token_ids"].astype(np.uint16)
        about = {
            "format": FORMAT,
            "trace": self.manifest.identity,
            "first_prompt": str(self.num_prompts - len(names)),
            "names": json.dumps(names, ensure_ascii=False),
        }
        if MANIFEST not in self._left:
            self._write_manifest(self.manifest)
        write_kdtr(_chunk_path(self.folder, self.num_chunks), arrays, about)
        self.num_chunks += 1
        self._left, self._held = self._files(), []

    def _write_manifest(self, manifest: Manifest) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        with atomic_write(self.folder / MANIFEST) as file:
            file.write(json.dumps({"format": FORMAT} | asdict(manifest), indent=1, ensure_ascii=False).encode())
            file.write(b"\n")
        self._left = self._files()


def check_same_prompts(folder: Path, digest: str, prompts: Sequence[NDArray[np.int32]]) -> None:
    """Say in words how prompts differ from those of the trace in ``folder``, if there is one and they do.

    A manifest has no more than the digest of its prompts, but the chunks have those that were recorded.
    """
    path = folder / MANIFEST
    there = _read_manifest(path) if path.exists() else None
    if there is None or there.prompts == digest:
        return
    recorded = [
        chunk.prompt_tokens(p)[: chunk.prompt_lens[p]]
        for chunk in Trace(there, _found_chunks(folder), folder.name)
        for p in range(chunk.num_prompts)
    ]
    other = [p for p, (old, new) in enumerate(zip(recorded, prompts, strict=False)) if not np.array_equal(old, new)]
    if other:
        how = f"prompts[{other[0]}] has other tokens"
    elif there.complete or len(recorded) > len(prompts):
        number = f"{len(recorded)}{'' if there.complete else ' or more'}"
        how = f"{len(prompts)} instead of {number}, as far as they go the same"
    else:
        how = f"the first {len(recorded)} are the same, and behind them their number or their tokens are not"
    raise ValueError(
        f"{path}: prompts must be those of the recording that is there, to go on with it, got others ({how}): "
        "choose another folder"
    )


def _share(name: str, value: Any) -> float:
    if not 0 < real(name, value) <= 1:
        raise ValueError(f"{name} must be over 0 and at most 1, got {value}")
    return float(value)


def _chunk_path(folder: Path, index: int) -> Path:
    return folder / f"chunk-{index:05d}.kdtr"


def _found_chunks(folder: Path) -> list[Path]:
    """The chunks that are there, by number, also of more digits than most have."""
    return sorted(folder.glob("chunk-*.kdtr"), key=lambda path: (len(path.name), path.name))


def _read_manifest(path: Path) -> Manifest:
    try:
        document = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:  # neither JSON nor UTF-8, or lists in lists too deep
        raise ValueError(f"{path}: must be JSON, got {error}") from error
    if not isinstance(document, dict) or document.pop("format", None) != FORMAT:
        raise ValueError(f"{path}: format must be {FORMAT!r}")
    known = {f.name: str(f.type) for f in fields(Manifest)}
    for name, kind in known.items():
        if name not in document:
            raise ValueError(f"{path}: {name} is missing")
        value = document[name]
        if not isinstance(value, _TYPES[kind]) or isinstance(value, bool):  # type: ignore[arg-type]
            raise ValueError(f"{path}: {name} must be of type {kind}, got {value!r}")
    unknown = sorted(set(document) - set(known))
    if unknown:
        raise ValueError(f"{path}: {unknown[0]} is no field of a manifest")
    limits = (("vocab_size", 1), ("depth", 1), ("topk", 1), ("max_new_tokens", 1), ("prompts_a_chunk", 1))
    for name, least in (*limits, ("num_prompts", -1)):
        if not least <= document[name] <= INT32_MAX:
            raise ValueError(f"{path}: {name} must be in {least} … {INT32_MAX}, got {document[name]}")
    if document["topk"] > document["vocab_size"]:
        raise ValueError(f"{path}: topk must be at most vocab_size {document['vocab_size']}, got {document['topk']}")
    try:
        document["stop_token_ids"] = tuple(stop_tokens(document["stop_token_ids"], document["vocab_size"]))
        real("temperature", document["temperature"], least=0.0)
        _share("top_p", document["top_p"])
        integer("seed", document["seed"], 0, 2**64 - 1)
    except (ValueError, TypeError) as error:
        raise ValueError(f"{path}: {error}") from error
    return Manifest(**document)


def _read_chunk(path: Path, manifest: Manifest, first_prompt: int | None) -> TraceChunk:
    """Read a chunk and see that it is of this trace, and that every index in it stays inside it."""
    L, K, V = manifest.depth, manifest.topk, manifest.vocab_size
    ids = "uint16" if V <= SHORT_IDS else "int32"
    with KdtrFile(path, mmap=False) as file:
        about = file.metadata
        for name, wanted in (("format", FORMAT), ("trace", manifest.identity)):
            if about.get(name) != wanted:
                raise _damaged(path, name, f"be {wanted!r}, as in {MANIFEST}", repr(about.get(name)))
        token_ids = _array(path, file, "token_ids", ids, (None,))
        token_offsets = _array(path, file, "token_offsets", "int64", (None,))
        prompt_lens = _array(path, file, "prompt_lens", "int32", (None,))
        log_probs = _array(path, file, "log_probs", "float32", (None, L, K))
        draft_token_ids = _array(path, file, "draft_token_ids", ids, (len(log_probs), L, K))
        position_offsets = _array(path, file, "position_offsets", "int64", (None,))
    if not len(prompt_lens):
        raise _damaged(path, "prompt_lens", "have one entry or more", "none")
    if (prompt_lens < 1).any():
        raise _damaged(path, "prompt_lens", "be 1 and up", int(prompt_lens.min()))
    _check_offsets(path, "token_offsets", token_offsets, len(token_ids), prompt_lens + 1)  # a token of each is new
    new = np.diff(token_offsets) - prompt_lens
    most = manifest.max_new_tokens
    if (new > most).any():
        raise _damaged(path, "token_offsets", f"leave at most max_new_tokens = {most} to a prompt", int(new.max()))
    _check_offsets(path, "position_offsets", position_offsets, len(log_probs), new - 1, exact=True)
    if int(token_ids.max()) >= V or int(token_ids.min()) < 0:
        raise _damaged(path, "token_ids", f"lie in 0 … {V - 1}", int(token_ids.max()))
    try:
        _check_drafts(log_probs, draft_token_ids, V)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    first, names = _about_chunk(path, about, len(prompt_lens))
    if first_prompt is not None and first != first_prompt:
        raise _damaged(path, "first_prompt", f"be {first_prompt}", first)
    tokens = token_ids.astype(np.int32)
    return TraceChunk(first, names, tokens, token_offsets, prompt_lens, log_probs, draft_token_ids, position_offsets)


def _damaged(path: Path, field: str, must: str, got: Any) -> ValueError:
    return ValueError(f"{path}: {field} must {must}, got {got}")


def _array(path: Path, file: KdtrFile, name: str, dtype: str, shape: tuple[int | None, ...]) -> NDArray[Any]:
    """An array of a chunk, of that type and shape, None being any size."""
    if name not in file:
        raise ValueError(f"{path}: {name} is missing")
    entry = file.entries[name]
    if entry.dtype.name != dtype:
        raise _damaged(path, name, f"be of type {dtype}", entry.dtype.name)
    if len(entry.shape) != len(shape) or any(n not in (None, m) for n, m in zip(shape, entry.shape, strict=True)):
        raise _damaged(
            path, name, f"have shape ({', '.join('n' if n is None else str(n) for n in shape)})", entry.shape
        )
    return file[name]


def _check_offsets(
    path: Path, name: str, offsets: NDArray[np.int64], end: int, sizes: NDArray[Any], *, exact: bool = False
) -> None:
    """Offsets from 0 to ``end``, each as many behind the one before as ``sizes`` says, or at least as many."""
    if offsets.shape != (len(sizes) + 1,) or offsets[0] != 0 or offsets[-1] != end:
        raise _damaged(path, name, f"go from 0 to {end} in {len(sizes) + 1} entries", offsets.tolist()[:8])
    steps = np.diff(offsets)
    wrong = np.flatnonzero((steps != sizes) if exact else (steps < sizes))
    if wrong.size:
        p = int(wrong[0])
        least = "" if exact else "at least "
        raise _damaged(path, f"{name}[{p + 1}]", f"be {least}{offsets[p] + sizes[p]}", offsets[p + 1])


def _check_drafts(log_probs: NDArray[np.float32], token_ids: NDArray[Any], vocab_size: int) -> None:
    """Sorted log-probs of 0 and below, distinct ids inside the vocabulary, up to each depth's end."""
    from ddtree.kernels import numba_cpu

    code, b, d, k = numba_cpu.find_draft_fault(log_probs, token_ids, vocab_size)
    place = f"[{b}, {d}, {k}]"
    if code in (1, 2):
        must = "be at most 0" if code == 1 else f"not exceed its left neighbour {log_probs[b, d, k - 1]}"
        raise ValueError(f"log_probs{place} must {must}, got {log_probs[b, d, k]}")
    if code in (3, 4):
        must = f"be in 0 … {vocab_size - 1}" if code == 3 else "be distinct within its depth"
        raise ValueError(f"draft_token_ids{place} must {must}, got {int(token_ids[b, d, k])}")


def _about_chunk(path: Path, about: dict[str, str], count: int) -> tuple[int, tuple[str, ...]]:
    try:
        first, names = int(about["first_prompt"]), json.loads(about["names"])
    except (KeyError, ValueError, RecursionError) as error:
        raise ValueError(f"{path}: first_prompt and names must be a number and a list in JSON: {error}") from error
    if not isinstance(names, list) or len(names) != count or not all(isinstance(n, str) for n in names):
        raise ValueError(f"{path}: names must be {count} strings, one a prompt, got {about['names'][:80]}")
    return first, tuple(names)
