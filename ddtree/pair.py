"""A trained pair: a target, the drafter that was trained for it, their vocabulary, and prompts that neither saw."""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ddtree.drafters.block import BlockDrafter, load_block_drafter
from ddtree.kdtr import read_kdtr, write_kdtr
from ddtree.model import DeepseekV3, load_model
from ddtree.tokens import token_row
from ddtree.vocabulary import Vocabulary

__all__ = ["Pair", "Prompts", "load_pair", "load_prompts", "pair_folder", "save_prompts"]

TARGET, DRAFTER, VOCABULARY, PROMPTS = "target.kdtr", "drafter.kdtr", "vocabulary.kdtr", "prompts.kdtr"
"""The files of a pair's folder."""


class Pair(NamedTuple):
    """What :func:`load_pair` loads."""

    target: DeepseekV3
    drafter: BlockDrafter
    vocabulary: Vocabulary


class Prompts(NamedTuple):
    """Prompts as token ids, and where each is from.

    Attributes
    ----------
    tokens : list of array, int32, shape (n,)
        Token ids of each.
    sources : list of str
        Package and file of each, such as "networkx:networkx/classes/graph.py".
    """

    tokens: list[NDArray[np.int32]]
    sources: list[str]

    def __repr__(self) -> str:
        count = len(self.tokens)
        return f"Prompts({count:,} prompt{'s' * (count != 1)}, {sum(map(len, self.tokens)):,} tokens)"


def pair_folder(name: str = "python-5m") -> Path:
    """Path of a pair that is installed with ddtree; its ``MODEL_CARD.md`` says how it was made and what it is good for.

    Raises
    ------
    ValueError
        There is no such pair.
    """
    pairs = Path(__file__).parent / "pairs"
    folder = pairs / name
    if not (folder / TARGET).is_file():
        have = ", ".join(sorted(path.parent.name for path in pairs.glob(f"*/{TARGET}"))) or "none"
        raise ValueError(f"name must be that of an installed pair ({have}), got {name!r}")
    return folder


def load_pair(
    path: str | os.PathLike[str] | None = None, *, dtype: str = "float32", backend: str | None = None
) -> Pair:
    """Load a target and the drafter that was trained for it.

    Parameters
    ----------
    path : str or os.PathLike, optional
        A folder with ``target.kdtr``, ``drafter.kdtr`` and ``vocabulary.kdtr``; the pair that is installed with ddtree
        if left out: a DeepSeek-V3 model of 5 M parameters that continues Python source, and a block drafter of 7
        tokens.
    dtype : str
        "float32", "float64" or, on a GPU alone, "bfloat16": of both, as :class:`ddtree.model.DeepseekV3` has it.
    backend : str, optional
        Who serves attention, and so where the pair lives: see :class:`ddtree.model.DeepseekV3`.

    Returns
    -------
    Pair
        ``target``, ``drafter`` and ``vocabulary``.

    Raises
    ------
    FileNotFoundError
        A file is missing.
    ValueError
        A file is damaged, or the three do not fit together.

    Examples
    --------
    >>> from ddtree import Engine
    >>> target, drafter, vocabulary = load_pair()
    >>> engine = Engine(target, drafter, depth=7, budget=16)
    >>> generation = engine.generate(load_prompts().tokens[:2], max_new_tokens=8)
    >>> text = vocabulary.decode(generation.tokens[0])
    """
    if not isinstance(path, str | os.PathLike | None):
        raise TypeError(f"path must be the folder of a pair, a str or os.PathLike, got {type(path).__name__}")
    folder = pair_folder() if path is None else Path(path)
    for name in (TARGET, DRAFTER, VOCABULARY):
        if not (folder / name).is_file():
            raise FileNotFoundError(
                f"{(folder / name).resolve()} is missing: a pair's folder has {TARGET}, {DRAFTER} and {VOCABULARY}"
            )
    target = load_model(folder / TARGET, dtype=dtype, backend=backend)
    drafter = load_block_drafter(folder / DRAFTER, target, backend=backend)
    vocabulary = Vocabulary.load(folder / VOCABULARY)
    if len(vocabulary) != target.vocab_size:
        raise ValueError(
            f"{folder / VOCABULARY} must have the target's {target.vocab_size} tokens, got {len(vocabulary)}"
        )
    return Pair(target, drafter, vocabulary)


def load_prompts(path: str | os.PathLike[str] | None = None) -> Prompts:
    """Load prompts that :func:`save_prompts` wrote.

    Parameters
    ----------
    path : str or os.PathLike, optional
        The file; that of the installed pair if left out: 128 prompts of 64 … 128 tokens, from packages that neither
        model was trained on.

    Raises
    ------
    ValueError
        The file holds no prompts, or is damaged (:class:`ddtree.kdtr.KdtrError`).
    """
    path = pair_folder() / PROMPTS if path is None else Path(path)
    arrays, metadata = read_kdtr(path)
    for name, dtype in (("token_ids", "int32"), ("token_offsets", "int64")):
        if name not in arrays or arrays[name].ndim != 1 or arrays[name].dtype != dtype:
            got = f"{arrays[name].dtype} {arrays[name].shape}" if name in arrays else "none"
            raise ValueError(f"{path} holds no prompts: {name} must be {dtype} of shape (n,), got {got}")
    tokens, offsets = arrays["token_ids"], arrays["token_offsets"]
    if not offsets.size or offsets[0] != 0 or offsets[-1] != len(tokens) or (np.diff(offsets) < 1).any():
        raise ValueError(
            f"{path}: token_offsets must rise from 0 to the {len(tokens)} token_ids, got {offsets[:4].tolist()}…"
        )
    try:
        sources = json.loads(metadata.get("sources", "null"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: metadata 'sources' is not JSON: {error}") from error
    if (
        not isinstance(sources, list)
        or len(sources) != len(offsets) - 1
        or not all(isinstance(s, str) for s in sources)
    ):
        raise ValueError(f"{path}: metadata 'sources' must be a JSON list of one text a prompt, {len(offsets) - 1}")
    return Prompts([tokens[a:b] for a, b in itertools.pairwise(offsets)], sources)


def save_prompts(
    path: str | os.PathLike[str],
    tokens: Sequence[NDArray[np.int32]],
    sources: Sequence[str],
    *,
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Write prompts to one KDTR file.

    Parameters
    ----------
    path : str or os.PathLike
        The file; it is replaced if it exists.
    tokens : sequence of array, int, shape (n,)
        Token ids of each prompt, one or more.
    sources : sequence of str
        Where each is from.
    metadata : mapping of str to str, optional
        Further text to keep; ``sources`` is taken.

    Raises
    ------
    ValueError
        A prompt without tokens, or another number of sources. No file is written.
    """
    rows = [token_row(f"tokens[{i}]", row) for i, row in enumerate(tokens)]
    for i, row in enumerate(rows):
        if not row.size:
            raise ValueError(f"tokens[{i}] must have at least one token, got none")
    if len(sources) != len(rows):
        raise ValueError(f"sources must have one entry a prompt, {len(rows)}, got {len(sources)}")
    arrays = {
        "token_ids": np.concatenate([np.zeros(0, np.int32), *rows]),
        "token_offsets": np.cumsum([0, *map(len, rows)], dtype=np.int64),
    }
    write_kdtr(path, arrays, {"sources": json.dumps(list(sources)), **(metadata or {})})
