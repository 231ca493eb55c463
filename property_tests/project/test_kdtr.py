"""KDTR in Python: what is written is read back, and nothing else is."""

import errno
import os
import re
import socket
import stat
import struct
import tempfile
import tracemalloc
from collections.abc import Iterator, Mapping
from typing import Any

import hypothesis.extra.numpy as hnp
import ml_dtypes
import numpy as np
import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from ddtree import kdtr
from ddtree.analysis.benchmarks import read_kdtr as benchmark
from ddtree.kdtr import DTYPES, KdtrEntry, KdtrError, KdtrFile, atomic_write, dtype_named, read_kdtr, write_kdtr
from ddtree.property_tests.project.damaged_kdtr import CONTENTS_END, DAMAGES, SOUND, Damage, resealed

SOUND_ARRAYS: dict[str, Any] = {"b": np.array([-1, 7], np.int32), "a": np.array([1, 2, 3], np.uint8)}
SOUND_METADATA = {"l": "w", "k": "vvvv"}

texts = st.text(st.characters(exclude_categories=["Cs"]))
shapes = hnp.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=5)


@st.composite
def kdtr_arrays(draw):
    """An array of any type that a file can hold; NaNs of any bits.

    Shrinks towards an empty array of bool.
    """
    dtype = dtype_named(draw(st.sampled_from(DTYPES)))
    if dtype.kind == "b":
        return draw(hnp.arrays(dtype, shapes))
    bits = draw(hnp.arrays(np.dtype(f"<u{dtype.itemsize}"), shapes))
    return bits.view(dtype)


contents = st.tuples(
    st.dictionaries(texts.filter(bool), kdtr_arrays(), max_size=5), st.dictionaries(texts, texts, max_size=4)
)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "a.kdtr"


@pytest.fixture
def sound(path):
    path.write_bytes(SOUND)
    return path


def assert_same_arrays(actual: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    assert list(actual) == sorted(expected)
    for name, array in expected.items():
        assert actual[name].dtype == array.dtype
        assert actual[name].shape == array.shape
        assert actual[name].tobytes() == array.tobytes()


def n_temporaries(folder) -> int:
    return sum(name.endswith(".tmp") for name in os.listdir(folder))


@given(contents)
def test_what_is_written_is_read_back_in_every_way(drawn):
    arrays, metadata = drawn
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/a.kdtr"
        write_kdtr(path, arrays, metadata)
        read, read_metadata = read_kdtr(path)
        assert_same_arrays(read, arrays)
        assert read_metadata == metadata
        assert all(array.flags.writeable for array in read.values())
        for mmap in (True, False):
            with KdtrFile(path, mmap=mmap) as file:
                file.verify()
                assert_same_arrays(file, arrays)
                assert file.metadata == metadata
                for name, array in arrays.items():
                    chunks = list(file.iter_chunks(name, chunk_bytes=24))
                    assert b"".join(chunk.tobytes() for chunk in chunks) == array.tobytes()
                    assert all(0 < chunk.nbytes <= 24 for chunk in chunks)
                    assert file.entries[name].offset % 64 == 0


@given(st.lists(st.tuples(st.integers(64, len(SOUND) - 1), st.integers(0, 255)), max_size=4))
def test_a_file_that_is_read_is_the_one_that_would_be_written(patches):
    data = bytearray(SOUND)
    for place, byte in patches:
        data[place] = byte
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/a.kdtr"
        with open(path, "wb") as file:
            file.write(resealed(data))
        try:
            arrays, metadata = read_kdtr(path)
        except KdtrError:
            return
        write_kdtr(path, arrays, metadata)
        with open(path, "rb") as file:
            assert file.read() == resealed(data)


def test_the_bytes_are_those_of_the_format(path):
    write_kdtr(path, SOUND_ARRAYS, SOUND_METADATA)
    assert path.read_bytes() == SOUND


def test_the_bytes_do_not_depend_on_the_order(path):
    write_kdtr(path, dict(reversed(SOUND_ARRAYS.items())), dict(reversed(SOUND_METADATA.items())))
    assert path.read_bytes() == SOUND


def test_a_file_of_nothing_is_a_header_alone(path):
    write_kdtr(path, {})
    assert path.stat().st_size == 64
    assert read_kdtr(path) == ({}, {})


@pytest.mark.parametrize(
    "array",
    [
        np.arange(24, dtype=">f8").reshape(2, 3, 4),
        np.asfortranarray(np.arange(6, dtype=np.int32).reshape(2, 3)),
        np.arange(20, dtype=np.uint16)[::-3],
        np.broadcast_to(np.float32(2.5), (3, 2)),
        [[1.5, 2.5]],
        7,
        np.zeros((0, 1 << 40), np.int64),
        np.zeros((1,) * 64, np.int8),
        np.frombuffer(b"\0\1\2\xff", np.bool_),
    ],
    ids=["big-endian", "Fortran", "strided", "broadcast", "list", "int", "empty", "rank 64", "bytes as bool"],
)
def test_any_layout_is_stored_in_c_order_with_its_values(path, array):
    write_kdtr(path, {"x": array})
    (read,) = read_kdtr(path)[0].values()
    np.testing.assert_array_equal(read, array, strict=isinstance(array, np.ndarray) and array.dtype.isnative)
    assert read.shape == np.shape(array)
    assert read.flags.c_contiguous


@pytest.mark.parametrize("n", [(1 << 18) - 1, 1 << 18, (1 << 18) + 1])
def test_checksums_span_chunks(path, n):
    array = np.arange(n, dtype=np.int32)  # a chunk is 2^18 of them
    write_kdtr(path, {"x": array})
    np.testing.assert_array_equal(read_kdtr(path)[0]["x"], array)


# damage


def test_every_truncation_is_found(path):
    for length in range(len(SOUND)):
        path.write_bytes(SOUND[:length])
        with pytest.raises(KdtrError, match=r"truncated|too few") as caught:
            KdtrFile(path)
        assert caught.value.offset == length


@pytest.mark.parametrize("mask", [0x01, 0x80, 0xFF])
def test_every_flipped_byte_is_found(path, mask):
    for place in range(len(SOUND)):
        data = bytearray(SOUND)
        data[place] ^= mask
        path.write_bytes(data)
        with pytest.raises(KdtrError):
            read_kdtr(path)
        if place < CONTENTS_END:
            with pytest.raises(KdtrError):
                KdtrFile(path)


def test_trailing_bytes_are_found(path):
    path.write_bytes(SOUND + b"\0")
    with pytest.raises(KdtrError, match="1 bytes follow the end of the file"):
        KdtrFile(path)


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_damage_under_right_checksums_is_named_without_large_allocations(path, damage: Damage):
    path.write_bytes(damage.data)
    tracemalloc.start()
    try:
        with pytest.raises(KdtrError, match=damage.message) as caught:
            read_kdtr(path)
        assert tracemalloc.get_traced_memory()[1] < 1 << 18
    finally:
        tracemalloc.stop()
    assert caught.value.offset == damage.offset
    assert str(caught.value).endswith(f"(at byte {damage.offset})")
    assert str(path) in str(caught.value)


@pytest.mark.parametrize("mmap", [True, False])
def test_data_are_checked_at_access_unless_told_otherwise(path, mmap):
    path.write_bytes(DAMAGES["data"].data)
    with KdtrFile(path, mmap=mmap) as file:
        assert file["b"].tolist() == [-1, 7]
        for _ in range(2):
            with pytest.raises(KdtrError, match="CRC-32"):
                file["a"]
        with pytest.raises(KdtrError, match="CRC-32"):
            list(file.iter_chunks("a"))
    with KdtrFile(path, mmap=mmap, verify=False) as file:
        assert file["a"].tolist() == [1, 9, 3]
        assert [chunk.tolist() for chunk in file.iter_chunks("a", chunk_bytes=2)] == [[1, 9], [3]]
        with pytest.raises(KdtrError, match="CRC-32"):
            file.verify()


def test_a_file_that_shrinks_while_it_is_read_is_damaged(sound):
    with KdtrFile(sound, mmap=False) as file:
        os.truncate(sound, 258)
        with pytest.raises(KdtrError, match="the file ends here, although it was longer") as caught:
            file["b"]
    assert caught.value.offset == 258


# reading


def test_a_mapped_array_is_read_only_and_outlives_its_file(sound):
    with KdtrFile(sound) as file:
        array = file["b"]
    assert array.tolist() == [-1, 7]
    with pytest.raises(ValueError, match="read-only"):
        array[0] = 1


def test_a_file_is_a_mapping_in_order_of_the_names(sound):
    with KdtrFile(sound) as file:
        assert file.names == tuple(file) == ("a", "b")
        assert len(file) == 2
        assert "a" in file
        assert "c" not in file
        assert file.entries["a"] == KdtrEntry("a", np.dtype(np.uint8), (3,), 192, 3, 0x55BC801D)
        assert repr(file) == f"KdtrFile({str(sound)!r}, 2 arrays)"
        with pytest.raises(KeyError, match="no array 'c' among the 2 of"):
            file["c"]


def test_a_closed_file_says_so(sound):
    file = KdtrFile(sound)
    file.close()
    with pytest.raises(ValueError, match=r"a\.kdtr is closed"):
        file["a"]


def test_chunks_need_no_memory_of_the_array_s_size(path):
    write_kdtr(path, {"x": np.zeros(1 << 23, np.uint8)})
    tracemalloc.start()
    try:
        with KdtrFile(path, mmap=False) as file:
            assert sum(chunk.nbytes for chunk in file.iter_chunks("x", chunk_bytes=1 << 16)) == 1 << 23
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


# writing


class _Twice(Mapping[str, int]):
    """A mapping that gives a name twice."""

    def __getitem__(self, name: str) -> int:
        return 0

    def __iter__(self) -> Iterator[str]:
        return iter(["x", "x"])

    def __len__(self) -> int:
        return 2


@pytest.mark.parametrize(
    ("arrays", "metadata", "kind", "message"),
    [
        ([1], {}, TypeError, "arrays must be a mapping of names to arrays, got list"),
        ({1: 0}, {}, TypeError, "the name 1 in arrays must be a string, got int"),
        ({"": 0}, {}, ValueError, "a name in arrays is empty, it must have at least one character"),
        ({"\ud800": 0}, {}, ValueError, r"the name '\\ud800' in arrays cannot be written as UTF-8"),
        ({"x" * 65536: 0}, {}, ValueError, "has 65536 bytes, it must have fewer than 65536"),
        (_Twice(), {}, ValueError, "the name 'x' appears twice in arrays"),
        ({"x": np.int16(1)}, {}, TypeError, r"arrays\['x'\] has type int16, it must be one of bool, uint8, "),
        ({"x": np.uint64(1)}, {}, TypeError, r"arrays\['x'\] has type uint64"),
        ({"x": 1j}, {}, TypeError, r"arrays\['x'\] has type complex128"),
        ({"x": None}, {}, TypeError, r"arrays\['x'\] has type object"),
        ({"x": "text"}, {}, TypeError, r"arrays\['x'\] has type <U4"),
        ({"x": np.zeros(1, "f4,f4")}, {}, TypeError, r"arrays\['x'\] has type \[\('f0'"),
        ({"x": np.zeros(1, ml_dtypes.float8_e4m3fn)}, {}, TypeError, "has type float8_e4m3fn"),
        ({"x": [[1], [1, 2]]}, {}, TypeError, r"arrays\['x'\] cannot be made a NumPy array"),
        ({}, [("k", "v")], TypeError, "metadata must be a mapping of strings to strings, got list"),
        ({}, {1: "v"}, TypeError, "the key 1 in metadata must be a string, got int"),
        ({}, {"k": 1}, TypeError, r"metadata\['k'\] must be a string, got int"),
        ({}, {"k": "\udfff"}, ValueError, r"metadata\['k'\] cannot be written as UTF-8"),
    ],
)
def test_what_cannot_be_stored_is_named_and_leaves_the_old_file(sound, arrays, metadata, kind, message):
    with pytest.raises(kind, match=message):
        write_kdtr(sound, arrays, metadata)
    assert sound.read_bytes() == SOUND
    assert n_temporaries(sound.parent) == 0


@pytest.mark.parametrize("failing", ["fsync", "replace"])
def test_a_failed_write_leaves_the_old_file_and_no_other(sound, monkeypatch, failing):
    def fail(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, failing, fail)
    with pytest.raises(OSError, match="No space left") as caught:
        write_kdtr(sound, {"x": np.ones(1000)})
    assert caught.value.filename == str(sound)
    assert sound.read_bytes() == SOUND
    assert n_temporaries(sound.parent) == 0


def test_an_interrupted_write_leaves_the_old_file_and_no_other(sound):
    def write_half() -> None:
        with atomic_write(sound) as file:
            file.write(b"half")
            assert n_temporaries(sound.parent) == 1
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_half()
    assert sound.read_bytes() == SOUND
    assert n_temporaries(sound.parent) == 0


def test_a_missing_folder_is_named_by_the_path_that_was_given(tmp_path):
    with pytest.raises(FileNotFoundError, match=re.escape(str(tmp_path / "no" / "a.kdtr"))):
        write_kdtr(tmp_path / "no" / "a.kdtr", {})


@pytest.mark.skipif(os.name != "posix", reason="no POSIX permissions and links")
def test_a_written_file_heeds_the_umask_and_follows_a_link(tmp_path, path):
    link = tmp_path / "link.kdtr"
    link.symlink_to(path)
    before = os.umask(0o027)
    try:
        write_kdtr(link, SOUND_ARRAYS, SOUND_METADATA)
    finally:
        os.umask(before)
    assert link.is_symlink()
    assert path.read_bytes() == SOUND
    assert stat.S_IMODE(path.stat().st_mode) == 0o640


@pytest.mark.skipif(os.name != "posix", reason="no POSIX permissions and links")
@pytest.mark.parametrize("mode", [0o600, 0o666, 0o400])
def test_a_replaced_file_passes_its_mode_on_and_is_never_open_to_more(sound, mode):
    sound.chmod(mode)
    before = os.umask(0o022)
    try:
        with atomic_write(sound) as file:
            assert stat.S_IMODE(os.fstat(file.fileno()).st_mode) == mode
            file.write(b"new")
    finally:
        os.umask(before)
    assert stat.S_IMODE(sound.stat().st_mode) == mode
    assert sound.read_bytes() == b"new"


@pytest.fixture(params=["pipe", "device", "socket", "directory", "link"])
def special(request, tmp_path):
    """A path to what is there but is no file, and how that is called."""
    path = tmp_path / "special.kdtr"
    if request.param == "directory":
        path.mkdir()
    elif request.param == "pipe":
        os.mkfifo(path)
    elif request.param == "device":
        path.symlink_to(os.devnull)
    elif request.param == "socket":
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(str(path))
    else:
        path.symlink_to(path)
    kind = {"directory": "Is a directory", "link": os.strerror(errno.ELOOP)}
    return path, kind.get(request.param, f"Is a {request.param}, must be a regular file")


def without_access(status):
    """All but the time at which it was last looked at, which a look changes."""
    return [
        getattr(status, name) for name in ("st_mode", "st_ino", "st_nlink", "st_size", "st_mtime_ns", "st_ctime_ns")
    ]


@pytest.mark.skipif(os.name != "posix", reason="no pipes and devices")
@pytest.mark.parametrize("use", [KdtrFile, read_kdtr, lambda path: write_kdtr(path, {})], ids=["open", "read", "write"])
def test_what_is_no_file_is_neither_opened_nor_replaced(special, use):
    path, message = special
    before = without_access(path.lstat())
    with pytest.raises(OSError, match=message) as caught:
        use(path)
    assert caught.value.filename == str(path)
    assert without_access(path.lstat()) == before
    assert n_temporaries(path.parent) == 0


def test_the_format_s_page_gives_the_sizes_of_the_records():
    assert struct.calcsize("<8sIIQQQII12sI") == 64 == kdtr._HEADER.size
    assert "header, 64 bytes" in (kdtr.__doc__ or "")
    listed = re.findall(r"\b(\d+) (bool|u?int\d+|b?float\d+)", kdtr.__doc__ or "")
    assert [name for _, name in listed] == list(DTYPES)
    assert [int(code) for code, _ in listed] == list(range(1, len(DTYPES) + 1))


def test_the_benchmark_compares_with_a_plain_checked_read():
    result = CliRunner().invoke(benchmark.main, ["--gib", "0.001", "--repeats", "2"], catch_exceptions=False)
    assert result.exit_code == 0
    assert "readinto + zlib.crc32" in result.output
    assert "read_kdtr" in result.output
