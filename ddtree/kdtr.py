"""KDTR: named arrays and string metadata in one checksummed file that Python and C++ share.

This page is the format; ``include/kdtr.hpp`` is the same reader and writer in C++17. Numbers are unsigned and
little-endian, arrays are little-endian in C order, text is UTF-8 without a terminator. A file is a header, an
index, the metadata, zeros up to a multiple of 64, and the arrays, each followed by zeros up to a multiple of
64::

    header, 64 bytes                               index, one record an array
      0  8  magic: 89 4B 44 54 52 0D 0A 1A           0  8  offset of the data in the file
      8  4  version: 1                               8  8  bytes of data, padding left out
     12  4  number of arrays                        16  4  CRC-32 of the data
     16  8  bytes in the file                       20  2  bytes of the name, n
     24  8  bytes in the index                      22  1  type
     32  8  bytes in the metadata                   23  1  rank r, at most 64
     40  4  number of metadata pairs                24  8r dimensions
     44  4  CRC-32 of index and metadata             …  n  name, not empty
     48 12  zero
     60  4  CRC-32 of bytes 0 to 59                metadata, one record a pair
                                                     0  4  bytes of the key, k
    types: 1 bool (bytes 0 and 1), 2 uint8,          4  4  bytes of the value, v
    3 int8, 4 uint16, 5 int32, 6 uint32, 7 int64,    8  k  key
    8 float16, 9 bfloat16, 10 float32, 11 float64    …  v  value

The CRC-32 is zlib's. Names are in ascending byte order without repetition, and so are keys. An array stands
at the first multiple of 64 after what is before it (an empty one too, so that it may share its offset with
the next), and the file ends with the last array's padding. The product of the item size and all dimensions
but zeros is below 2^63. So the same arrays and metadata always make the same bytes, no byte is unaccounted
for, and a file which breaks any of these rules is damaged.

A reader checks every length against the file's size before it uses it, whatever the checksums say. Header,
index and metadata are checked when a file is opened, an array's data and padding when it is read.
"""

from __future__ import annotations

import errno
import math
import mmap as _mmap
import os
import re
import stat
import struct
import sys
import time
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple, NoReturn

import numpy as np

if TYPE_CHECKING:
    from types import TracebackType

    from numpy.typing import ArrayLike, NDArray

__all__ = [
    "DTYPES",
    "KdtrEntry",
    "KdtrError",
    "KdtrFile",
    "atomic_write",
    "check_regular",
    "dtype_named",
    "include_dir",
    "read_kdtr",
    "remove_temporaries",
    "write_kdtr",
]

_INTEGERS = ("uint8", "int8", "uint16", "int32", "uint32", "int64")
DTYPES = ("bool", *_INTEGERS, "float16", "bfloat16", "float32", "float64")
"""NumPy's names of the types that a file can hold; a type's code is its place here, counted from 1."""

_MAGIC = b"\x89KDTR\r\n\x1a"  # like PNG's: a transfer that changes line ends or drops the top bit breaks it
_VERSION = 1
_ALIGNMENT = 64
_MAX_RANK = 64  # NumPy's own limit
_HEADER = struct.Struct("<8sIIQQQII12sI")
_ENTRY = struct.Struct("<QQIHBB")
_PAIR = struct.Struct("<II")
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0)
_TEMPORARY = re.compile(r"\.[0-9a-f]+\.tmp")
_CHUNK = 1 << 20  # bytes; small enough to be in cache still when the CRC follows the copy


class KdtrError(ValueError):
    """A damaged KDTR file.

    Attributes
    ----------
    message : str
        What is wrong with which file.
    offset : int
        Byte of the file where it is wrong.
    """

    def __init__(self, message: str, offset: int) -> None:
        super().__init__(message, offset)
        self.message = message
        self.offset = offset

    def __str__(self) -> str:
        return f"{self.message} (at byte {self.offset})"


class KdtrEntry(NamedTuple):
    """One array's record in the index."""

    name: str
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    offset: int
    nbytes: int
    crc32: int


class KdtrFile(Mapping[str, "NDArray[Any]"]):
    """A KDTR file open for reading: a mapping from names to arrays, in order of the names.

    Parameters
    ----------
    path : str or os.PathLike
        The file.
    mmap : bool, default True
        Give read-only arrays that are the file's own pages, without a copy; they outlive closing. If the
        file is truncated meanwhile, touching them ends in a bus error, as with any mapping. False reads a
        new array at each access, and then a file serves one thread at a time.
    verify : bool, default True
        Check an array's CRC-32 when it is read; if mapped, at its first access, which touches all its pages.

    Attributes
    ----------
    entries : dict of str to KdtrEntry
        The index.
    metadata : dict of str to str
        The metadata.

    Raises
    ------
    KdtrError
        If the header, the index or the metadata are damaged; at access, if the array's data are.
    OSError
        If the file cannot be opened, or is not a regular file.

    Examples
    --------
    >>> with KdtrFile("trace.kdtr") as trace:  # doctest: +SKIP
    ...     print(trace.names, trace.metadata["drafter"], trace["log_probs"].shape)
    """

    def __init__(self, path: str | os.PathLike[str], *, mmap: bool = True, verify: bool = True) -> None:
        self.path = os.fspath(path)
        self._verify = verify
        self._verified: set[str] = set()
        self._pages: _mmap.mmap | None = None
        check_regular(self.path)
        # unbuffered: reads go straight into the array
        self._file = open(self.path, "rb", buffering=0)  # noqa: SIM115 - close() closes it
        try:
            self._size = os.fstat(self._file.fileno()).st_size
            self.entries, self.metadata = self._read_contents()
            if mmap:
                self._pages = _mmap.mmap(self._file.fileno(), self._size, access=_mmap.ACCESS_READ)
        except BaseException:
            self._file.close()
            raise

    @property
    def names(self) -> tuple[str, ...]:
        """The arrays' names, ascending."""
        return tuple(self.entries)

    def __getitem__(self, name: str) -> NDArray[Any]:
        entry = self._entry(name)
        if self._pages is None:
            array = np.empty(entry.shape, entry.dtype)
            self._exhaust(entry, array.reshape(-1))
        else:
            array = np.ndarray(entry.shape, entry.dtype, self._pages, entry.offset)
            if self._verify and name not in self._verified:
                self._exhaust(entry, array.reshape(-1))
                self._verified.add(name)
        return array

    def __iter__(self) -> Iterator[str]:
        return iter(self.entries)

    def __len__(self) -> int:
        return len(self.entries)

    def __contains__(self, name: object) -> bool:
        return name in self.entries  # Mapping's own would read the array

    def __repr__(self) -> str:
        return f"KdtrFile({self.path!r}, {len(self)} arrays)"

    def __enter__(self) -> KdtrFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the file; mapped arrays stay valid."""
        # the mapping goes with the last array that shows it: closing it here would fail while one lives
        self._pages = None
        self._file.close()

    def verify(self) -> None:
        """Check the data and the padding of every array, a chunk at a time.

        Raises
        ------
        KdtrError
            At the first damage.
        """
        for entry in self.entries.values():
            for _ in self._stream(entry, _CHUNK, verify=True):
                pass

    def iter_chunks(self, name: str, *, chunk_bytes: int = 1 << 22) -> Iterator[NDArray[Any]]:
        """Read one array piece by piece, in memory that does not grow with it.

        Parameters
        ----------
        name : str
            Name of the array.
        chunk_bytes : int, default 4 MiB
            Largest size of a piece; at least one element is given at a time.

        Yields
        ------
        ndarray, shape (n,)
            The next elements in C order.

        Raises
        ------
        KdtrError
            After the last piece, if the data are damaged (unless the file was opened with ``verify=False``).
        """
        return self._stream(self._entry(name), chunk_bytes, verify=self._verify)

    def _entry(self, name: str) -> KdtrEntry:
        if self._file.closed:
            raise ValueError(f"{self.path} is closed")
        if name not in self.entries:
            raise KeyError(f"no array {name!r} among the {len(self)} of {self.path}")
        return self.entries[name]

    def _fail(self, message: str, offset: int) -> NoReturn:
        raise KdtrError(f"{self.path}: {message}", offset)

    def _fill(self, buffer: memoryview, offset: int) -> None:
        self._file.seek(offset)
        done = 0
        while done < len(buffer):
            count = self._file.readinto(buffer[done:])
            if not count:
                self._fail("the file ends here, although it was longer when it was opened", offset + done)
            done += count

    def _read(self, offset: int, size: int) -> bytearray:
        data = bytearray(size)
        self._fill(memoryview(data), offset)
        return data

    def _exhaust(self, entry: KdtrEntry, flat: NDArray[Any]) -> None:
        for _ in self._stream(entry, _CHUNK, verify=self._verify, flat=flat):
            pass

    def _stream(
        self, entry: KdtrEntry, chunk_bytes: int, *, verify: bool, flat: NDArray[Any] | None = None
    ) -> Iterator[NDArray[Any]]:
        """Read (or, if mapped, show) an entry's elements, then check what was seen; `flat` receives them."""
        size = math.prod(entry.shape)
        if self._pages is not None and flat is None:
            flat = np.ndarray(size, entry.dtype, self._pages, entry.offset)
        step = max(1, chunk_bytes // entry.dtype.itemsize)
        crc, position, top = 0, entry.offset, 0
        for start in range(0, size, step):
            count = min(step, size - start)
            chunk = np.empty(count, entry.dtype) if flat is None else flat[start : start + count]
            raw = chunk.view(np.uint8)
            if self._pages is None:
                self._fill(raw.data, position)
            if verify:
                crc = zlib.crc32(raw.data, crc)
                if entry.dtype == np.bool_:
                    top = max(top, int(raw.max()))
            position += raw.nbytes
            yield chunk
        if not verify:
            return
        if crc != entry.crc32:
            self._fail(
                f"the data of {entry.name!r} have CRC-32 {crc:08x}, the index says {entry.crc32:08x}",
                entry.offset,
            )
        if top > 1:
            self._fail(f"the data of {entry.name!r} hold a byte {top}, a bool is 0 or 1", entry.offset)
        self._check_zeros(self._read(position, _aligned(position) - position), position)

    def _check_zeros(self, padding: bytes | bytearray, offset: int) -> None:
        if any(padding):
            self._fail("padding is not zero", offset + len(padding) - len(padding.lstrip(b"\0")))

    def _read_contents(self) -> tuple[dict[str, KdtrEntry], dict[str, str]]:
        if self._size < _HEADER.size:
            self._fail(f"{self._size} bytes are too few for a header of {_HEADER.size}", self._size)
        header = self._read(0, _HEADER.size)
        magic, version, n_arrays, n_file, n_index, n_metadata, n_pairs, contents_crc, zeros, header_crc = (
            _HEADER.unpack(header)
        )
        if magic != _MAGIC:
            self._fail("not a KDTR file: its first bytes are not the magic", 0)
        if version != _VERSION:
            self._fail(f"version is {version}, this reader knows {_VERSION}", 8)
        if zlib.crc32(header[:60]) != header_crc:
            self._fail(f"the header has CRC-32 {zlib.crc32(header[:60]):08x}, it says {header_crc:08x}", 60)
        self._check_zeros(zeros, 48)
        if self._size < n_file:
            self._fail(f"truncated: {self._size} of {n_file} bytes are left", self._size)
        if self._size > n_file:
            self._fail(f"{self._size - n_file} bytes follow the end of the file", n_file)
        index_end = _HEADER.size + n_index
        contents_end = index_end + n_metadata
        if n_index > self._size - _HEADER.size:
            self._fail(f"an index of {n_index} bytes does not fit in a file of {self._size}", 24)
        if n_metadata > self._size - index_end:
            self._fail(f"metadata of {n_metadata} bytes do not fit in a file of {self._size}", 32)
        data_start = _aligned(contents_end)
        if data_start > self._size:
            self._fail(f"truncated: the padding after the metadata ends at {data_start}", self._size)
        if n_arrays > n_index // _ENTRY.size:
            self._fail(f"{n_arrays} arrays do not fit in an index of {n_index} bytes", 12)
        if n_pairs > n_metadata // _PAIR.size:
            self._fail(f"{n_pairs} pairs do not fit in metadata of {n_metadata} bytes", 40)
        # the header comes along so that positions in it are positions in the file
        contents = self._read(0, data_start)
        crc = zlib.crc32(memoryview(contents)[_HEADER.size : contents_end])
        if crc != contents_crc:
            self._fail(f"index and metadata have CRC-32 {crc:08x}, the header says {contents_crc:08x}", 44)
        self._check_zeros(contents[contents_end:], contents_end)
        return (
            self._parse_index(contents, n_arrays, index_end, data_start),
            self._parse_metadata(contents, n_pairs, index_end, contents_end),
        )

    def _parse_index(self, contents: bytearray, count: int, end: int, place: int) -> dict[str, KdtrEntry]:
        entries: dict[str, KdtrEntry] = {}
        position, last = _HEADER.size, b""
        for i in range(count):
            self._check_room(position, _ENTRY.size, end, f"array {i}'s record ends past the index")
            offset, nbytes, crc, n_name, code, rank = _ENTRY.unpack_from(contents, position)
            if not 1 <= code <= len(DTYPES):
                self._fail(f"array {i} has type {code}, types are 1 to {len(DTYPES)}", position + 22)
            if rank > _MAX_RANK:
                self._fail(f"array {i} has rank {rank}, at most {_MAX_RANK} is allowed", position + 23)
            shape_at = position + _ENTRY.size
            name_at = shape_at + 8 * rank
            self._check_room(shape_at, 8 * rank + n_name, end, f"array {i}'s name ends past the index")
            raw = bytes(contents[name_at : name_at + n_name])
            if not raw:
                self._fail(f"array {i}'s name is empty", position + 20)
            name = self._text(raw, name_at, f"array {i}'s name")
            self._check_order(last, raw, name_at, f"array name {name!r}")
            shape = struct.unpack_from(f"<{rank}Q", contents, shape_at)
            dtype = dtype_named(DTYPES[code - 1])
            extent = math.prod((d for d in shape if d), start=dtype.itemsize)
            if extent >= 1 << 63:
                self._fail(f"{name!r} has shape {shape}, which is beyond 2^63 bytes", shape_at)
            if nbytes != (0 if 0 in shape else extent):
                self._fail(f"{name!r} has {nbytes} bytes, not those of {dtype.name} {shape}", position + 8)
            if offset % _ALIGNMENT:
                self._fail(f"{name!r} has its data at {offset}, not a multiple of {_ALIGNMENT}", position)
            if offset > self._size or nbytes > self._size - offset:
                self._fail(f"{name!r} has {nbytes} bytes at {offset}, past the file's {self._size}", position)
            if offset < place:
                self._fail(f"{name!r} at {offset} overlaps what ends at {place}", position)
            if offset > place:
                self._fail(f"{name!r} at {offset} leaves a gap after {place}", position)
            entries[name] = KdtrEntry(name, dtype, shape, offset, nbytes, crc)
            position, last, place = name_at + n_name, raw, _aligned(offset + nbytes)
        if position != end:
            self._fail(f"{end - position} bytes follow the last array in the index", position)
        if place > self._size:
            self._fail(f"truncated: the padding after the last array ends at {place}", self._size)
        if place < self._size:
            self._fail(f"{self._size - place} bytes belong to no array", place)
        return entries

    def _parse_metadata(self, contents: bytearray, count: int, start: int, end: int) -> dict[str, str]:
        metadata: dict[str, str] = {}
        position, last = start, None
        for i in range(count):
            self._check_room(position, _PAIR.size, end, f"pair {i}'s record ends past the metadata")
            n_key, n_value = _PAIR.unpack_from(contents, position)
            key_at = position + _PAIR.size
            value_at = key_at + n_key
            self._check_room(key_at, n_key + n_value, end, f"pair {i}'s value ends past the metadata")
            raw = bytes(contents[key_at:value_at])
            key = self._text(raw, key_at, f"pair {i}'s key")
            self._check_order(last, raw, key_at, f"metadata key {key!r}")
            position, last = value_at + n_value, raw
            metadata[key] = self._text(bytes(contents[value_at:position]), value_at, f"the value of {key!r}")
        if position != end:
            self._fail(f"{end - position} bytes follow the last pair in the metadata", position)
        return metadata

    def _check_room(self, position: int, size: int, end: int, message: str) -> None:
        if size > end - position:
            self._fail(message, position)

    def _check_order(self, last: bytes | None, raw: bytes, offset: int, what: str) -> None:
        if last is not None and raw <= last:
            self._fail(f"{what} {'appears twice' if raw == last else 'is out of order'}", offset)

    def _text(self, raw: bytes, offset: int, what: str) -> str:
        try:
            return raw.decode()
        except UnicodeDecodeError as error:
            self._fail(f"{what} is not UTF-8: {error.reason}", offset)


def read_kdtr(path: str | os.PathLike[str]) -> tuple[dict[str, NDArray[Any]], dict[str, str]]:
    """Read all arrays of a KDTR file into memory, and check all of it.

    Parameters
    ----------
    path : str or os.PathLike
        The file.

    Returns
    -------
    arrays : dict of str to ndarray
        The arrays in order of their names; they own their memory.
    metadata : dict of str to str
        The metadata.

    Raises
    ------
    KdtrError
        If any byte of the file is damaged.

    Examples
    --------
    >>> import tempfile
    >>> path = tempfile.mkdtemp() + "/tree.kdtr"
    >>> write_kdtr(path, {"parents": np.array([-1, 0, 0], np.int32)}, {"drafter": "oracle"})
    >>> read_kdtr(path)
    ({'parents': array([-1,  0,  0], dtype=int32)}, {'drafter': 'oracle'})
    """
    with KdtrFile(path, mmap=False) as file:
        return dict(file.items()), file.metadata


def write_kdtr(
    path: str | os.PathLike[str], arrays: Mapping[str, ArrayLike], metadata: Mapping[str, str] | None = None
) -> None:
    """Write arrays to a KDTR file, which is there entirely or not at all.

    Parameters
    ----------
    path : str or os.PathLike
        The file, which is replaced if it exists.
    arrays : mapping of str to array_like
        Arrays of any layout and byte order, and of the types in `DTYPES`. What is not a NumPy array goes
        through ``np.asarray``.
    metadata : mapping of str to str, optional
        Text to keep with the arrays.

    Raises
    ------
    TypeError, ValueError
        If a name, an array or a text cannot be stored; it is named, and no file is written.
    OSError
        As :func:`atomic_write`.
    """
    named = _checked_arrays(arrays)
    texts = _checked_metadata({} if metadata is None else metadata)
    pairs = b"".join(_PAIR.pack(len(key), len(value)) + key + value for key, value in texts)
    n_index = sum(_ENTRY.size + 8 * array.ndim + len(name) for name, array in named)
    index, position = bytearray(), _aligned(_HEADER.size + n_index + len(pairs))
    with atomic_write(path) as file:
        for name, array in named:
            file.seek(position)  # what is skipped reads as zeros
            crc = _write_array(file, array)
            code = DTYPES.index(array.dtype.name) + 1
            index += _ENTRY.pack(position, array.nbytes, crc, len(name), code, array.ndim)
            index += struct.pack(f"<{array.ndim}Q", *array.shape) + name
            position = _aligned(position + array.nbytes)
        file.truncate(position)
        # the index holds the CRCs, so it is written when the data have been seen
        contents = bytes(index) + pairs
        sizes = len(named), position, n_index, len(pairs), len(texts)
        header = _HEADER.pack(_MAGIC, _VERSION, *sizes, zlib.crc32(contents), b"", 0)[:60]
        file.seek(0)
        file.write(header + struct.pack("<I", zlib.crc32(header)) + contents)


@contextmanager
def atomic_write(path: str | os.PathLike[str]) -> Iterator[BinaryIO]:
    """Open a file that takes the place of `path` if the block succeeds, and leaves nothing if it does not.

    Parameters
    ----------
    path : str or os.PathLike
        The file to make or to replace; one that exists passes its mode on. A symbolic link is followed.

    Yields
    ------
    BinaryIO
        A temporary file in the same folder, flushed to the disk before it is renamed. A process that a signal
        ends leaves it there: its name is a dot, hexadecimal digits and ``.tmp``.

    Raises
    ------
    OSError
        If `path` is there and is not a regular file, or if it cannot be written; `path` is named.
    """
    target = os.path.realpath(path)
    temporary = os.path.join(os.path.dirname(target), f".{os.urandom(8).hex()}.tmp")
    try:
        mode = check_regular(target) if os.path.lexists(target) else None
        # unlike mkstemp's it heeds the umask, and is never open to more users than the file that it replaces
        file = os.fdopen(os.open(temporary, _NEW, 0o666 if mode is None else mode), "wb")
    except OSError as error:
        raise OSError(error.errno, error.strerror, os.fspath(path)) from None
    try:
        with file:
            if mode is not None:
                os.chmod(temporary, mode)  # what the umask took
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, target)
    except BaseException as error:
        os.unlink(temporary)
        # a failed write names no file, a failed rename the temporary one
        if isinstance(error, OSError) and error.errno is not None and error.filename in (None, temporary):
            raise OSError(error.errno, error.strerror, os.fspath(path)) from error
        raise


def remove_temporaries(folder: str | os.PathLike[str], *, idle_seconds: float = 0.0) -> None:
    """Remove what killed processes left half written: the temporary files of :func:`atomic_write` in a folder.

    Parameters
    ----------
    folder : str or os.PathLike
        The folder; none below it. One that is not there has nothing to remove.
    idle_seconds : float
        Only files that were last written to so long ago, where another process may be writing now.
    """
    before = time.time() - idle_seconds
    for path in Path(folder).glob(".*.tmp"):
        with suppress(FileNotFoundError):  # its writer has just renamed it
            if _TEMPORARY.fullmatch(path.name) and path.is_file() and path.stat().st_mtime <= before:
                path.unlink()


def check_regular(path: str | os.PathLike[str]) -> int:
    """Refuse what is not a regular file before it is opened: a pipe would block, a device would be replaced.

    Parameters
    ----------
    path : str or os.PathLike
        The file. A symbolic link is followed.

    Returns
    -------
    int
        The file's permissions.

    Raises
    ------
    OSError
        If there is no such file, or it is a directory, a pipe, a socket or a device.
    """
    mode = os.stat(path).st_mode
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), os.fspath(path))
    if not stat.S_ISREG(mode):
        kind = "pipe" if stat.S_ISFIFO(mode) else "socket" if stat.S_ISSOCK(mode) else "device"
        raise OSError(errno.EINVAL, f"Is a {kind}, must be a regular file", os.fspath(path))
    return stat.S_IMODE(mode)


def include_dir() -> str:
    """Folder of ``kdtr.hpp``, for a C++ compiler's ``-I``.

    Returns
    -------
    str
        The folder's path.
    """
    return os.path.join(os.path.dirname(os.path.abspath(__file__)), "include")


def dtype_named(name: str) -> np.dtype[Any]:
    """Type of an array in a file: one of `DTYPES`, little-endian.

    Parameters
    ----------
    name : str
        Its name.

    Returns
    -------
    numpy.dtype
        The type; bfloat16 is that of ml_dtypes.
    """
    if name != "bfloat16":
        return np.dtype(name).newbyteorder("<")
    if sys.byteorder == "big":
        raise NotImplementedError("bfloat16 needs a little-endian machine: ml_dtypes has no swapped form")
    import ml_dtypes  # only files with bfloat16 pay for it

    dtype: np.dtype[Any] = np.dtype(ml_dtypes.bfloat16)
    return dtype


def _aligned(position: int) -> int:
    return -(-position // _ALIGNMENT) * _ALIGNMENT


def _checked_arrays(arrays: Mapping[str, ArrayLike]) -> list[tuple[bytes, NDArray[Any]]]:
    if not isinstance(arrays, Mapping):
        raise TypeError(f"arrays must be a mapping of names to arrays, got {type(arrays).__name__}")
    named: dict[bytes, NDArray[Any]] = {}
    for name, value in arrays.items():
        raw = _utf8(name, f"the name {name!r} in arrays", 1 << 16)
        if not raw:
            raise ValueError("a name in arrays is empty, it must have at least one character")
        if raw in named:
            raise ValueError(f"the name {name!r} appears twice in arrays")
        try:
            array = np.asarray(value)
        except (TypeError, ValueError, BufferError) as error:
            raise TypeError(f"arrays[{name!r}] cannot be made a NumPy array: {error}") from error
        if array.dtype.name not in DTYPES:
            raise TypeError(f"arrays[{name!r}] has type {array.dtype}, it must be one of {', '.join(DTYPES)}")
        named[raw] = array
    if len(named) >= 1 << 32:
        raise ValueError(f"arrays has {len(named)} entries, a file holds fewer than 2^32")
    return sorted(named.items(), key=lambda item: item[0])


def _checked_metadata(metadata: Mapping[str, str]) -> list[tuple[bytes, bytes]]:
    if not isinstance(metadata, Mapping):
        raise TypeError(f"metadata must be a mapping of strings to strings, got {type(metadata).__name__}")
    return sorted(
        (_utf8(key, f"the key {key!r} in metadata", 1 << 32), _utf8(value, f"metadata[{key!r}]", 1 << 32))
        for key, value in metadata.items()
    )


def _utf8(text: object, what: str, limit: int) -> bytes:
    if not isinstance(text, str):
        raise TypeError(f"{what} must be a string, got {type(text).__name__}")
    try:
        raw = text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{what} cannot be written as UTF-8: {error.reason}") from error
    if len(raw) >= limit:
        raise ValueError(f"{what} has {len(raw)} bytes, it must have fewer than {limit}")
    return raw


def _write_array(file: BinaryIO, array: NDArray[Any]) -> int:
    """Write the elements in C order, little-endian; return their CRC-32."""
    raw = array.astype(dtype_named(array.dtype.name), order="C", copy=False).reshape(-1).view(np.uint8)
    if array.dtype == np.bool_:
        raw = (raw != 0).view(np.uint8)  # views of other types can hold more than 0 and 1
    crc = 0
    for start in range(0, raw.nbytes, _CHUNK):
        block = raw[start : start + _CHUNK].data
        crc = zlib.crc32(block, crc)
        file.write(block)
    return crc
