"""Damaged KDTR files with checksums that are right again, as an attacker would make them."""

import struct
import zlib
from typing import NamedTuple

# Two arrays and two pairs, as ddtree.kdtr.write_kdtr writes them: {"a": uint8 [1, 2, 3], "b": int32 [-1, 7]} and
# {"k": "vvvv", "l": "w"}. Every number below that is not a limit is a place in these bytes.
SOUND = bytes.fromhex(
    "894b4454520d0a1a 01000000 02000000 4001000000000000 4200000000000000"  # magic, version, arrays, file, index
    "1700000000000000 02000000 950d6de1 000000000000000000000000 7d6946bf"  # metadata, pairs, CRC-32, zeros, CRC-32
    "c000000000000000 0300000000000000 1d80bc55 0100 02 01 0300000000000000 61"  # a at 192: 3 bytes, type 2, rank 1
    "0001000000000000 0800000000000000 46c72862 0100 05 01 0200000000000000 62"  # b at 256: 8 bytes, type 5, rank 1
    "01000000 04000000 6b 76767676 01000000 01000000 6c 77" + "00" * 39  # metadata from 130 to 153, zeros up to 192
    + "010203" + "00" * 61  # a
    + "ffffffff07000000" + "00" * 56  # b
)  # fmt: skip
CONTENTS_END = 153


class Damage(NamedTuple):
    """One file and what a reader must say of it."""

    data: bytes
    offset: int
    message: str


def resealed(data: bytes | bytearray) -> bytes:
    """Make the checksums of header, index and metadata right again; those of the arrays stay."""
    sealed = bytearray(data)
    n_index, n_metadata = struct.unpack_from("<QQ", sealed, 24)
    contents = sealed[64 : min(64 + n_index + n_metadata, len(sealed))]
    struct.pack_into("<I", sealed, 44, zlib.crc32(contents))
    struct.pack_into("<I", sealed, 60, zlib.crc32(sealed[:60]))
    return bytes(sealed)


def patched(*patches: tuple[int, str, int], length: int = len(SOUND)) -> bytes:
    """`SOUND`, cut or filled up to `length`, with numbers (place, struct format, value) put into it."""
    data = bytearray(SOUND[:length].ljust(length, b"\0"))
    struct.pack_into("<Q", data, 16, length)
    for place, form, value in patches:
        struct.pack_into(f"<{form}", data, place, value)
    return resealed(data)


_U32, _U64 = (1 << 32) - 1, (1 << 64) - 1
_NO_ARRAYS = ((12, "I", 0), (24, "Q", 0), (32, "Q", 0), (40, "I", 0))

DAMAGES = {
    "another format": Damage(b"\x89PNG\r\n\x1a\n" + SOUND[8:], 0, "not a KDTR file"),
    "line ends changed": Damage(SOUND.replace(b"\r\n", b"\n"), 0, "not a KDTR file"),
    "later version": Damage(patched((8, "I", 2)), 8, "version is 2, this reader knows 1"),
    "reserved byte": Damage(patched((53, "B", 1)), 53, "padding is not zero"),
    "claims a longer file": Damage(patched((16, "Q", _U64)), 320, f"truncated: 320 of {_U64} bytes"),
    "claims a shorter file": Damage(patched((16, "Q", 256)), 256, "64 bytes follow the end of the file"),
    "index of 2^64 bytes": Damage(patched((24, "Q", _U64)), 24, f"an index of {_U64} bytes does not fit"),
    "metadata of 2^64 bytes": Damage(patched((32, "Q", _U64)), 32, f"metadata of {_U64} bytes do not fit"),
    "index and metadata wrap": Damage(patched((32, "Q", _U64 - 129)), 32, "metadata of .* bytes do not fit"),
    "2^32 arrays": Damage(patched((12, "I", _U32)), 12, f"{_U32} arrays do not fit in an index of 66"),
    "2^32 pairs": Damage(patched((40, "I", _U32)), 40, f"{_U32} pairs do not fit in metadata of 23"),
    "one array uncounted": Damage(patched((12, "I", 1)), 97, "33 bytes follow the last array in the index"),
    "one pair uncounted": Damage(patched((40, "I", 1)), 143, "10 bytes follow the last pair"),
    "contents' padding cut": Damage(patched(*_NO_ARRAYS, (24, "Q", 24), length=100), 100, "truncated: .* at 128"),
    "contents' padding": Damage(patched((160, "B", 1)), 160, "padding is not zero"),
    "type 0": Damage(patched((86, "B", 0)), 86, "array 0 has type 0, types are 1 to 11"),
    "type 12": Damage(patched((119, "B", 12)), 119, "array 1 has type 12, types are 1 to 11"),
    "rank 65": Damage(patched((87, "B", 65)), 87, "array 0 has rank 65, at most 64"),
    "shape past the index": Damage(patched((87, "B", 64)), 88, "array 0's name ends past the index"),
    "name past the index": Damage(patched((84, "H", 65535)), 88, "array 0's name ends past the index"),
    "record past the index": Damage(patched((84, "H", 17)), 113, "array 1's record ends past the index"),
    "empty name": Damage(patched((84, "H", 0)), 84, "array 0's name is empty"),
    "name not UTF-8": Damage(patched((96, "B", 0xFF)), 96, "array 0's name is not UTF-8"),
    "name twice": Damage(patched((129, "B", ord("a"))), 129, "array name 'a' appears twice"),
    "names out of order": Damage(patched((96, "B", ord("c"))), 129, "array name 'b' is out of order"),
    "2^63 bytes": Damage(patched((88, "Q", 1 << 63)), 88, "'a' has .*shape.* beyond 2.63 bytes"),
    "4 x 2^62 bytes": Damage(patched((121, "Q", 1 << 62), (105, "Q", 0)), 121, "beyond 2.63 bytes"),
    "bytes are not the shape's": Damage(patched((88, "Q", 4)), 72, "'a' has 3 bytes, not those of"),
    "bytes, but a dimension 0": Damage(patched((88, "Q", 0)), 72, "'a' has 3 bytes, not those of"),
    "2^63 - 1 bytes": Damage(
        patched((88, "Q", (1 << 63) - 1), (72, "Q", (1 << 63) - 1)), 64, "'a' .*past the file's 320"
    ),
    "unaligned": Damage(patched((64, "Q", 193)), 64, "'a' .*at 193.* multiple of 64"),
    "past the end": Damage(patched((64, "Q", 320)), 64, "'a' .*past the file's 320"),
    "offset wraps": Damage(patched((64, "Q", _U64 - 63)), 64, "'a' .*past the file's 320"),
    "in the index": Damage(patched((64, "Q", 64)), 64, "'a' at 64 overlaps what ends at 192"),
    "on another array": Damage(patched((97, "Q", 192)), 97, "'b' at 192 overlaps what ends at 256"),
    "gap": Damage(patched((64, "Q", 256)), 64, "'a' at 256 leaves a gap after 192"),
    "unowned bytes": Damage(patched(length=384), 320, "64 bytes belong to no array"),
    "last padding cut": Damage(patched(length=270), 270, "truncated: .* ends at 320"),
    "key past the metadata": Damage(patched((130, "I", _U32)), 138, "pair 0's value ends past the metadata"),
    "value past the metadata": Damage(patched((134, "I", _U32)), 138, "pair 0's value ends past the metadata"),
    "pair past the metadata": Damage(patched((134, "I", 9)), 148, "pair 1's record ends past the metadata"),
    "key not UTF-8": Damage(patched((138, "B", 0xC3)), 138, "pair 0's key is not UTF-8"),
    "value not UTF-8": Damage(patched((139, "I", 0x80A0ED76)), 139, "the value of 'k' is not UTF-8"),
    "key twice": Damage(patched((151, "B", ord("k"))), 151, "metadata key 'k' appears twice"),
    "keys out of order": Damage(patched((138, "B", ord("m"))), 151, "metadata key 'l' is out of order"),
    # found when the data are read
    "data": Damage(patched((193, "B", 9)), 192, "the data of 'a' have CRC-32 .*, the index says 55bc801d"),
    "data's padding": Damage(patched((200, "B", 1)), 200, "padding is not zero"),
    "bool 3": Damage(patched((86, "B", 1)), 192, "the data of 'a' hold a byte 3, a bool is 0 or 1"),
}
