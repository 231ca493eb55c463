"""``ddtree kdtr``: show and check KDTR files, and convert them from and to npz and safetensors."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, BinaryIO

import click

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ddtree.kdtr import KdtrFile

_PROGRESS_FROM = 1 << 28  # bytes; less is checked before a bar could be read
_NOTE = "__kdtr__"  # the npz member for what npz itself cannot hold
_SAFETENSORS = {
    "BOOL": "bool", "U8": "uint8", "I8": "int8", "U16": "uint16", "I32": "int32", "U32": "uint32", "I64": "int64",
    "F16": "float16", "BF16": "bfloat16", "F32": "float32", "F64": "float64",
}  # fmt: skip

_file = click.Path(path_type=Path)
_force = click.option("--force", is_flag=True, help="Replace OUT if it exists.")


@click.group()
def kdtr() -> None:
    """Look into KDTR files: named arrays with checksums."""


@kdtr.command()
@click.argument("file", type=_file)
def ls(file: Path) -> None:
    """List the arrays and the metadata of FILE.

    Only its header and index are read.
    """
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from ddtree.kdtr import KdtrFile

    with _errors_in_one_line(), KdtrFile(file) as opened:
        arrays = Table()
        arrays.add_column("name", overflow="fold")  # the end of a name is what tells it from others
        arrays.add_column("dtype", no_wrap=True)
        arrays.add_column("shape", no_wrap=True)
        arrays.add_column("bytes", justify="right", no_wrap=True)
        arrays.add_column("CRC-32", no_wrap=True)
        for entry in opened.entries.values():
            cells = _printable(entry.name), entry.dtype.name, str(entry.shape), f"{entry.nbytes:,}"
            arrays.add_row(*map(Text, cells), Text(f"{entry.crc32:08x}"))
        metadata = Table("key", "value")
        for key, value in opened.metadata.items():
            metadata.add_row(Text(_printable(key)), Text(_printable(value)))
    console = Console()
    if not console.is_terminal:
        console.width = 1 << 16  # a pipe has no width, and its reader wants a row a line
    console.print(arrays)
    if metadata.row_count:
        console.print(metadata)


@kdtr.command()
@click.argument("files", type=_file, nargs=-1, required=True, metavar="FILE...")
def verify(files: tuple[Path, ...]) -> None:
    """Check every byte of each FILE.

    The exit status is 1 if one is damaged.
    """
    from ddtree.kdtr import KdtrFile

    failed = False
    for path in files:
        try:
            # read, not mapped: a file that shrinks meanwhile is then an error, not a signal
            with _errors_in_one_line(), KdtrFile(path, mmap=False) as opened:
                n_bytes = _verify_with_progress(opened)
            # a reader of the output that has gone is not this file's fault
            click.echo(f"{path}: ok, {len(opened)} arrays of {n_bytes:,} bytes")
        except click.ClickException as error:
            error.show()
            failed = True
    raise SystemExit(int(failed))


@kdtr.command()
@click.argument("file", type=_file)
@click.argument("out", type=_file)
@_force
def export(file: Path, out: Path, force: bool) -> None:
    """Write FILE to OUT, a .npz or .safetensors file.

    An npz file can hold neither metadata nor bfloat16: such arrays are written as uint16 bit patterns, and a member
    named __kdtr__ has their names and the metadata as JSON. `import` restores both.
    """
    from ddtree.kdtr import KdtrFile, atomic_write

    write = _by_suffix(out, {".npz": _write_npz, ".safetensors": _write_safetensors})
    _check_free(out, force)
    with _errors_in_one_line(), KdtrFile(file) as opened, atomic_write(out) as target:
        write(target, opened)


@kdtr.command("import")
@click.argument("source", type=_file, metavar="IN")
@click.argument("out", type=_file)
@_force
def import_(source: Path, out: Path, force: bool) -> None:
    """Write IN, a .npz or .safetensors file, to OUT."""
    from ddtree.kdtr import check_regular, write_kdtr

    read = _by_suffix(source, {".npz": _read_npz, ".safetensors": _read_safetensors})
    _by_suffix(out, {".kdtr": None})
    _check_free(out, force)
    with _errors_in_one_line():
        try:
            check_regular(source)
            arrays, metadata = read(source)
            _check_bools(arrays)
        except OSError:
            raise
        except MemoryError as error:
            raise MemoryError(f"{source} does not fit in memory: {error}") from error
        except Exception as error:  # what zipfile, zlib, json and NumPy raise on damaged files is open-ended
            raise ValueError(f"{source} is damaged or not a {source.suffix} file: {error}") from error
        write_kdtr(out, arrays, metadata)


@contextmanager
def _errors_in_one_line() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise click.ClickException(f"{error.filename}: {error.strerror}" if error.filename else str(error)) from error
    except (TypeError, ValueError, MemoryError) as error:
        raise click.ClickException(str(error) or "out of memory") from error


class _WrongCall(click.ClickException):
    exit_code = 2


def _by_suffix(path: Path, choices: Mapping[str, Any]) -> Any:
    if path.suffix not in choices:
        raise _WrongCall(f"{path} must end in {' or '.join(choices)}")
    return choices[path.suffix]


def _check_free(out: Path, force: bool) -> None:
    from ddtree.kdtr import check_regular

    if not out.exists():
        return
    if not force:
        raise _WrongCall(f"{out} exists: give --force to replace it")
    try:
        check_regular(out)
    except OSError as error:
        raise _WrongCall(f"{out}: {error.strerror}") from error


def _printable(text: str) -> str:
    """Keep line ends and a terminal's control codes out of the table."""
    return text if text.isprintable() else repr(text)[1:-1]


def _verify_with_progress(opened: KdtrFile) -> int:
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    total = sum(entry.nbytes for entry in opened.entries.values())
    console = Console(stderr=True)
    columns = TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn()
    hidden = total < _PROGRESS_FROM or not console.is_terminal
    with Progress(*columns, console=console, transient=True, disable=hidden) as progress:
        task = progress.add_task("verify", total=total)
        for name in opened:
            for chunk in opened.iter_chunks(name):
                progress.advance(task, chunk.nbytes)
    return total


def _write_npz(target: BinaryIO, opened: KdtrFile) -> None:
    import zipfile

    import numpy as np

    bfloat16 = [name for name, entry in opened.entries.items() if entry.dtype.name == "bfloat16"]
    note = json.dumps({"bfloat16": bfloat16, "metadata": opened.metadata})
    with zipfile.ZipFile(target, "w") as archive:

        def add(name: str, array: NDArray[Any]) -> None:
            # a ZipInfo of its own has a fixed date: equal files stay equal
            with archive.open(zipfile.ZipInfo(f"{name}.npy"), "w", force_zip64=True) as member:
                np.lib.format.write_array(member, array, allow_pickle=False)

        for name in opened:
            if name == _NOTE or "\0" in name or len(name.encode()) > 65_000:
                raise ValueError(f"the array name {name[:80]!r} cannot be used in an npz file")
            add(name, opened[name].view(np.uint16) if name in bfloat16 else opened[name])
        if bfloat16 or opened.metadata:
            add(_NOTE, np.array(note))


def _read_npz(source: Path) -> tuple[dict[str, NDArray[Any]], dict[str, str]]:
    import zipfile

    import numpy as np

    from ddtree.kdtr import dtype_named

    arrays: dict[str, NDArray[Any]] = {}
    # not np.load: asked for "a.npy", that gives the array "a"
    with zipfile.ZipFile(source) as archive:
        for info in archive.infolist():
            name = info.filename.removesuffix(".npy")
            if name in arrays:
                raise ValueError(f"two members are named {name!r}")
            with archive.open(info) as member:
                _check_npy_size(member, info.file_size)
            with archive.open(info) as member:
                arrays[name] = np.lib.format.read_array(member, allow_pickle=False)
    if _NOTE not in arrays:
        return arrays, {}
    note = json.loads(arrays.pop(_NOTE).item())
    for name in note["bfloat16"]:
        if arrays[name].dtype != np.uint16:
            raise ValueError(f"{_NOTE} calls {name!r} bfloat16, but its type is {arrays[name].dtype}, not uint16")
        arrays[name] = arrays[name].view(dtype_named("bfloat16"))
    return arrays, note["metadata"]


def _check_npy_size(member: IO[bytes], size: int) -> None:
    """Hold what the header claims against the member's size, before anything of it is allocated."""
    import math

    import numpy as np

    version = np.lib.format.read_magic(member)
    if version not in ((1, 0), (2, 0)):
        raise ValueError(f"{member.name} has npy version {version}, it must be (1, 0) or (2, 0)")
    read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    shape, _, dtype = read(member)
    claimed, held = math.prod(shape, start=dtype.itemsize), size - member.tell()
    if claimed != held and not dtype.hasobject:
        raise ValueError(f"{member.name} has {held} bytes for shape {shape} of {dtype}, it must have {claimed}")


def _check_bools(arrays: Mapping[str, NDArray[Any]]) -> None:
    import numpy as np

    for name, array in arrays.items():
        if array.dtype == np.bool_ and (top := array.view(np.uint8).max(initial=0)) > 1:
            raise ValueError(f"{name!r} holds a byte {top}, a bool is 0 or 1")


def _write_safetensors(target: BinaryIO, opened: KdtrFile) -> None:
    if "__metadata__" in opened:
        raise ValueError("the array name '__metadata__' cannot be used in a safetensors file")
    names = {dtype: name for name, dtype in _SAFETENSORS.items()}
    # large items first: then all are aligned without gaps, which the format forbids
    entries = sorted(opened.entries.values(), key=lambda entry: (-entry.dtype.itemsize, entry.name))
    header: dict[str, Any] = {"__metadata__": opened.metadata} if opened.metadata else {}
    end = 0
    for entry in entries:
        start, end = end, end + entry.nbytes
        header[entry.name] = {
            "dtype": names[entry.dtype.name], "shape": entry.shape, "data_offsets": (start, end)
        }  # fmt: skip
    text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    target.write(len(text).to_bytes(8, "little") + text)
    for entry in entries:
        for chunk in opened.iter_chunks(entry.name):
            target.write(chunk.view("u1").data)


def _read_safetensors(source: Path) -> tuple[dict[str, NDArray[Any]], dict[str, str]]:
    import math

    import numpy as np

    from ddtree.kdtr import dtype_named

    size = source.stat().st_size
    if size < 8:
        raise ValueError(f"{size} bytes are too few")
    pages = np.memmap(source, np.uint8, "r")
    n_header = int.from_bytes(pages[:8].tobytes(), "little")
    if n_header > size - 8:
        raise ValueError(f"a header of {n_header} bytes does not fit in a file of {size}")
    header = json.loads(pages[8 : 8 + n_header].tobytes(), object_pairs_hook=_without_repetition)
    data = pages[8 + n_header :]
    metadata = header.pop("__metadata__", {})
    arrays: dict[str, NDArray[Any]] = {}
    place = 0
    for name, tensor in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
        (start, end), shape = tensor["data_offsets"], tensor["shape"]
        if tensor["dtype"] not in _SAFETENSORS:
            raise ValueError(f"{name!r} has type {tensor['dtype']}, which KDTR does not have")
        dtype = dtype_named(_SAFETENSORS[tensor["dtype"]])
        if not 0 <= start <= end <= len(data) or end - start != math.prod(shape, start=dtype.itemsize):
            raise ValueError(f"{name!r} has bytes {start} to {end} of {len(data)} for shape {shape}")
        if start != place:
            raise ValueError(f"{name!r} starts at byte {start} of the data, it must at {place}: no gap, no overlap")
        place = end
        arrays[name] = data[start:end].view(dtype).reshape(shape)
    if place != len(data):
        raise ValueError(f"{len(data) - place} bytes belong to no tensor")
    return arrays, metadata


def _without_repetition(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a key appears twice in the header")
    return found
