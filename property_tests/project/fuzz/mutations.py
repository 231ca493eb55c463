"""Mutations that know the formats: one thing is changed, and checksums, lengths and archives are right again."""

from __future__ import annotations

import copy
import io
import json
import struct
import warnings
import zipfile
import zlib
from collections.abc import Callable
from random import Random
from typing import Any

from ddtree.property_tests.project.damaged_kdtr import resealed

Mutate = Callable[[bytes, int], bytes]
"""Mutates bytes without knowing what they are, to a largest size."""

NUMBERS = (0, 1, 2, 3, 7, 8, 63, 64, 65, 127, 128, 255, 256, 320, 2**15, 2**16 - 1, 2**31 - 1, 2**31, 2**32 - 1, 2**32)
LARGE = (2**53, 2**62, 2**63 - 1, 2**63, 2**64 - 64, 2**64 - 1)


def any_bytes(rng: Random) -> Mutate:
    """Mutations of the usual kinds: bits, bytes, numbers, pieces left out, doubled or moved."""

    def mutate(data: bytes, largest: int) -> bytes:
        changed = bytearray(data)
        for _ in range(1 << rng.randrange(4)):
            at, size = rng.randrange(len(changed) + 1), 1 << rng.randrange(7)
            kind = rng.randrange(6)
            if kind == 0 and at < len(changed):
                changed[at] ^= 1 << rng.randrange(8)
            elif kind == 1 and at < len(changed):
                changed[at] = rng.choice((0, 1, 0x7F, 0x80, 0xFF, rng.randrange(256)))
            elif kind == 2:
                changed[at:at] = rng.randbytes(size)
            elif kind == 3:
                del changed[at : at + size]
            elif kind == 4:
                changed[at:at] = changed[rng.randrange(len(changed) + 1) :][:size]
            else:
                width = rng.choice((1, 2, 4, 8))
                changed[at : at + width] = (rng.choice(NUMBERS + LARGE) % (1 << 8 * width)).to_bytes(width, "little")
        return bytes(changed[:largest])

    return mutate


def kdtr(data: bytes, largest: int, rng: Random, mutate: Mutate) -> bytes:
    """A KDTR file with a field, a text or some bytes changed, mostly under checksums that are right again."""
    changed = bytearray(data)
    kind = rng.randrange(5)
    if kind == 0 or len(changed) < 64:
        return mutate(data, largest)
    if kind in (1, 2):  # a number in the header, the index or the metadata
        n_index, n_metadata = struct.unpack_from("<QQ", changed, 24)
        end = min(64 + n_index + n_metadata, len(changed))
        width = rng.choice((1, 2, 4, 8))
        at = rng.randrange(8, end) if kind == 1 else rng.choice((8, 12, 16, 24, 32, 40, 48))
        near = int.from_bytes(changed[at : at + width], "little") + rng.choice((-64, -1, 1, 64))
        number = rng.choice((*NUMBERS, *LARGE, near, len(changed)))
        changed[at : at + width] = (number % (1 << 8 * width)).to_bytes(width, "little")
    elif kind == 3:  # bytes of the arrays
        changed = changed[:64] + mutate(bytes(changed[64:]), max(largest - 64, 0))
        struct.pack_into("<Q", changed, 16, len(changed))
    else:  # cut or filled up
        length = max(64, len(changed) + rng.choice((-65, -64, -1, 1, 63, 64)))
        changed = bytearray(bytes(changed[:length]).ljust(length, b"\0"))
        struct.pack_into("<Q", changed, 16, length)
    if rng.randrange(8) and len(changed) >= 64:
        changed = bytearray(resealed(_arrays_resealed(changed)))
    return bytes(changed[:largest])


def _arrays_resealed(data: bytearray) -> bytearray:
    """The arrays' checksums right, as far as the index can be followed."""
    (count,) = struct.unpack_from("<I", data, 12)
    at = 64
    for _ in range(min(count, 64)):
        if at + 24 > len(data):
            break
        offset, size, _, n_name, _, rank = struct.unpack_from("<QQIHBB", data, at)
        if offset + size <= len(data):
            struct.pack_into("<I", data, at + 16, zlib.crc32(data[offset : offset + size]))
        at += 24 + 8 * rank + n_name
    return data


STRANGE: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 2, 0.0, -0.0, 0.5, 1e308, -1e-300, float("nan"), float("inf"), 2**31, 2**63, -(2**63),
    10**9, 10**12, 10**30, "", "x", "0", "\0", "../x.safetensors", "a/b.safetensors", "\ud800", "τ" * 300, [], {}, [[]],
    [0, 1], [1] * 300, {"a": {"b": []}}, ["\ud800"], "model.safetensors", "F32", "BF16", "I64", "yarn", "deepseek_v3",
)  # fmt: skip


def json_text(data: bytes, largest: int, rng: Random, mutate: Mutate) -> bytes:
    """A JSON text with one value replaced, left out, doubled or moved; or, sometimes, not JSON any more."""
    kind = rng.randrange(8)
    try:
        value = json.loads(data)
    except (ValueError, RecursionError):
        kind = 0
    if kind == 0:
        return mutate(data, largest)
    if kind == 1 and rng.randrange(4) == 0:  # values within values, as deep as there is room
        return (rng.choice((b"[", b'{"a":')) * largest)[:largest]
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        _change(value, rng)
    text = json.dumps(value, ensure_ascii=rng.randrange(2) == 0).encode("utf-8", "surrogatepass")
    if kind == 2:  # a key twice
        text = text.replace(b"{", b'{"dtype": 1, "vocab_size": 7, ', 1)
    return text[:largest]


def _change(value: Any, rng: Random) -> None:
    places: list[tuple[Any, Any]] = []

    def walk(inner: Any) -> None:
        keys = inner.keys() if isinstance(inner, dict) else range(len(inner)) if isinstance(inner, list) else ()
        for key in keys:
            places.append((inner, key))
            walk(inner[key])

    walk(value)
    if not places:
        return
    inner, key = rng.choice(places)
    kind = rng.randrange(6)
    if kind == 0:
        del inner[key]
    elif kind == 1 and isinstance(inner[key], int | float):
        inner[key] = rng.choice((inner[key] + 1, inner[key] - 1, -inner[key], 2 * inner[key]))
    elif kind == 2:
        other, place = rng.choice(places)
        if place in other if isinstance(other, dict) else place < len(other):
            inner[key] = copy.deepcopy(other[place])
    elif kind == 3 and isinstance(inner, dict):
        other = rng.choice((str(key) + "x", "__metadata__", "", "\ud800", "model.norm.weight"))
        inner[other] = copy.deepcopy(inner[key])
    else:
        inner[key] = copy.deepcopy(rng.choice(STRANGE))


def safetensors(data: bytes, largest: int, rng: Random, mutate: Mutate) -> bytes:
    """A safetensors file with its header or its data changed; mostly, the length of the header is right again."""
    size = int.from_bytes(data[:8], "little")
    kind = rng.randrange(5)
    if kind == 0 or not 0 < size <= len(data) - 8:
        return mutate(data, largest)
    header, rest = data[8 : 8 + size], data[8 + size :]
    if kind == 1:
        rest = mutate(rest, max(largest - 8 - size, 0))
    else:
        header = json_text(header, max(largest - 8, 0), rng, mutate)
        header += b" " * (-len(header) % 8)
    told = rng.choice((*NUMBERS, *LARGE)) if rng.randrange(12) == 0 else len(header)
    return ((told % 2**64).to_bytes(8, "little") + header + rest)[:largest]


def npz(data: bytes, largest: int, rng: Random, mutate: Mutate) -> bytes:
    """An npz archive with a member's header, data or name changed, and archived anew; or the archive's own bytes."""
    if rng.randrange(4) == 0:
        return mutate(data, largest)
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            members = [(info.filename, archive.read(info)) for info in archive.infolist() if info.file_size <= largest]
    except Exception:  # what zipfile raises on damaged archives is open-ended
        return mutate(data, largest)
    if members:
        i = rng.randrange(len(members))
        name, content = members[i]
        kind = rng.randrange(4)
        if kind == 0:
            name = rng.choice((name + ".npy", "x", "../x.npy", "", "__kdtr__.npy", "a" * 300, "\0"))
        elif kind == 1 and len(content) > 10:
            start = 10 + int.from_bytes(content[8:10], "little")
            content = content[:10] + mutate(content[10:start], start) + content[start:]
        elif kind == 2:
            at = rng.randrange(12)
            content = content[:at] + bytes([rng.randrange(256)]) + content[at + 1 :]
        else:
            content = mutate(content, largest)
        members[i] = name, content
    out = io.BytesIO()
    kind = rng.choice((zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED))
    with warnings.catch_warnings(), zipfile.ZipFile(out, "w", kind) as archive:
        warnings.simplefilter("ignore")  # of a name twice, which is meant
        for name, content in members:
            archive.writestr(zipfile.ZipInfo(name or "x"), content)
    return out.getvalue()[:largest]


def parts(data: bytes) -> list[bytes]:
    """What :func:`joined` joined; of other bytes, something."""
    found, at = [], 1
    for _ in range(data[0] % 5 if data else 0):
        size = int.from_bytes(data[at : at + 4], "little")
        found.append(data[at + 4 : at + 4 + size])
        at += 4 + size
    return found


def joined(pieces: list[bytes]) -> bytes:
    """Several files as one string of bytes."""
    return bytes([len(pieces)]) + b"".join(len(p).to_bytes(4, "little") + p for p in pieces)
