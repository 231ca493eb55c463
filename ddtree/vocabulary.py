"""Text and token ids: a vocabulary is the bytes of every token, so that decoding needs no library."""

from __future__ import annotations

import itertools
import json
import os
import re
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ddtree.kdtr import read_kdtr, write_kdtr
from ddtree.tokens import token_row

__all__ = ["Vocabulary", "read_tokenizer_json"]

_BYTES, _OFFSETS, _TOKENIZER = "token_bytes", "token_offsets", "tokenizer_json"


class Vocabulary:
    r"""The bytes of each token, and how text is cut into tokens.

    Parameters
    ----------
    token_bytes : sequence of bytes
        Of each token, by id.
    tokenizer_json : bytes, optional
        The file of a tokenizer of the ``tokenizers`` library with the same ids, which :meth:`encode` runs.

    Examples
    --------
    >>> vocabulary = Vocabulary([b"<|endoftext|>", b"de", b"f ", b"\xc3", b"\xa9"])
    >>> vocabulary.decode([1, 2, 3, 4]), vocabulary.decode([1, 3])
    ('def é', 'de�')
    >>> vocabulary.decode_bytes([3, 4])
    b'\xc3\xa9'
    """

    def __init__(self, token_bytes: Sequence[bytes], tokenizer_json: bytes | None = None) -> None:
        self.token_bytes = list(token_bytes)
        self.tokenizer_json = tokenizer_json
        for i, token in enumerate(self.token_bytes):
            if not isinstance(token, bytes):
                raise TypeError(f"token_bytes[{i}] must be bytes, got {type(token).__name__}")

    def __len__(self) -> int:
        return len(self.token_bytes)

    def __repr__(self) -> str:
        return f"Vocabulary({len(self)} tokens)"

    def decode_bytes(self, ids: ArrayLike) -> bytes:
        """Return the bytes of a sequence of tokens, one after another.

        Parameters
        ----------
        ids : array or sequence, int, shape (n,)
            Token ids, 0 … V − 1.

        Raises
        ------
        ValueError, TypeError
            An id outside the vocabulary, or no ids.
        """
        return b"".join(self.token_bytes[i] for i in token_row("ids", ids, len(self)).tolist())

    def decode(self, ids: ArrayLike) -> str:
        """Return the text of a sequence of tokens; what is not UTF-8, as half a character is not, becomes U+FFFD."""
        return self.decode_bytes(ids).decode(errors="replace")

    def encode(self, text: str) -> NDArray[np.int32]:
        """Return the token ids of ``text``: int32, shape (n,).

        Raises
        ------
        ImportError
            The ``tokenizers`` library is not installed.
        TypeError, ValueError
            No text, or one with half a surrogate pair in it, which UTF-8 cannot hold; or the vocabulary came without a
            tokenizer.
        """
        if not isinstance(text, str):
            raise TypeError(f"text must be a str, got {type(text).__name__}")
        try:
            text.encode()
        except UnicodeEncodeError as error:
            at = error.start
            raise ValueError(f"text[{at}] must be a character, got {text[at]!r}, half of a surrogate pair") from None
        return np.array(self._tokenizer.encode(text, add_special_tokens=False).ids, np.int32)

    @cached_property
    def _tokenizer(self) -> Any:
        if self.tokenizer_json is None:
            raise ValueError("this vocabulary has no tokenizer, and can only decode: pass token ids in place of text")
        try:
            from tokenizers import Tokenizer
        except ImportError as error:
            raise ImportError(
                f"encoding text needs the tokenizers library ({error}): pip install 'ddtree[text]'"
            ) from error
        try:
            return Tokenizer.from_buffer(self.tokenizer_json)
        except Exception as error:  # the library raises no narrower class
            raise ValueError(f"tokenizer_json is no tokenizer that can be read: {error}") from error

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the vocabulary to a KDTR file, which is replaced if it exists."""
        offsets = np.cumsum([0, *map(len, self.token_bytes)], dtype=np.int64)
        arrays: dict[str, NDArray[Any]] = {
            _BYTES: np.frombuffer(b"".join(self.token_bytes), np.uint8),
            _OFFSETS: offsets,
        }
        if self.tokenizer_json is not None:
            arrays[_TOKENIZER] = np.frombuffer(self.tokenizer_json, np.uint8)
        write_kdtr(path, arrays)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Vocabulary:
        """Read a vocabulary that :meth:`save` wrote.

        Raises
        ------
        ValueError
            The file holds no vocabulary, or is damaged (:class:`ddtree.kdtr.KdtrError`).
        """
        path = Path(path)
        arrays, _ = read_kdtr(path)
        for name, dtype in ((_BYTES, "uint8"), (_OFFSETS, "int64"), (_TOKENIZER, "uint8")):
            if name == _TOKENIZER and name not in arrays:
                continue  # then it only decodes
            if name not in arrays or arrays[name].ndim != 1 or arrays[name].dtype != dtype:
                got = f"{arrays[name].dtype} {arrays[name].shape}" if name in arrays else "none"
                raise ValueError(f"{path} is no vocabulary: {name} must be {dtype} of shape (n,), got {got}")
        data, offsets = arrays[_BYTES].tobytes(), arrays[_OFFSETS]
        if not offsets.size or offsets[0] != 0 or offsets[-1] != len(data) or (np.diff(offsets) < 0).any():
            raise ValueError(
                f"{path}: {_OFFSETS} must rise from 0 to the {len(data)} bytes of {_BYTES}, got {offsets[:4].tolist()}…"
            )
        ends = offsets.tolist()
        tokenizer = arrays.get(_TOKENIZER)
        return cls(
            [data[start:end] for start, end in itertools.pairwise(ends)],
            None if tokenizer is None else tokenizer.tobytes(),
        )


def read_tokenizer_json(path: str | os.PathLike[str], vocab_size: int) -> Vocabulary:
    """Read the vocabulary of a ``tokenizer.json``, as models on the hub have one; decoding needs no library.

    Parameters
    ----------
    path : str or os.PathLike
        The file, of the ``tokenizers`` library: tokens as byte-level BPE writes bytes, or as SentencePiece does, with
        ``▁`` for a space and ``<0x0A>`` for a byte.
    vocab_size : int
        V of the model: ids that the file does not name have no bytes.

    Raises
    ------
    ValueError
        The file is not such JSON, or names an id outside 0 … V − 1.
    """
    path = Path(path)
    raw = path.read_bytes()
    try:
        document = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not JSON: {error}") from error
    added = _added_tokens(document)
    model = document.get("model") if isinstance(document, dict) else None
    tokens = model.get("vocab") if isinstance(model, dict) else None
    if added is None or not isinstance(tokens, dict):
        raise ValueError(f"{path} must have its tokens in model.vocab, from token to id, and in added_tokens")
    byte_level = '"ByteLevel"' in raw.decode(errors="replace")
    table = [b""] * vocab_size
    for token, i in [*tokens.items(), *added.items()]:
        if not isinstance(i, int) or not 0 <= i < vocab_size:
            raise ValueError(f"{path}: the id of {token!r} must be in 0 … {vocab_size - 1}, got {i!r}")
        table[i] = token.encode(errors="replace") if token in added else _bytes_of(token, byte_level)
    return Vocabulary(table, raw)


def _added_tokens(document: Any) -> dict[str, Any] | None:
    listed = document.get("added_tokens", []) if isinstance(document, dict) else None
    if not isinstance(listed, list) or not all(
        isinstance(t, dict) and isinstance(t.get("content"), str) for t in listed
    ):
        return None
    return {token["content"]: token.get("id") for token in listed}


def _byte_of_character() -> dict[str, int]:
    """Byte-level BPE writes a printable byte as its own character, and the others from U+0100 on."""
    shown = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in shown]
    return {chr(byte): byte for byte in shown} | {chr(256 + i): byte for i, byte in enumerate(others)}


_BYTE_OF = _byte_of_character()
_BYTE_NAME = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def _bytes_of(token: str, byte_level: bool) -> bytes:
    if byte_level and all(character in _BYTE_OF for character in token):
        return bytes(_BYTE_OF[character] for character in token)
    name = None if byte_level else _BYTE_NAME.fullmatch(token)
    return bytes([int(name[1], 16)]) if name else token.replace("▁", " ").encode(errors="replace")
