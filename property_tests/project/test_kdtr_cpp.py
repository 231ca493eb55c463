"""KDTR in C++: the header compiles without a warning, and agrees with Python on every file."""

import os
import random
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from ddtree.kdtr import DTYPES, KdtrError, dtype_named, include_dir, read_kdtr, write_kdtr
from ddtree.property_tests.project.damaged_kdtr import DAMAGES, SOUND, resealed

SOURCE = Path(__file__).with_name("kdtr_exchange.cpp")
WARNINGS = ["-Wall", "-Wextra", "-Wpedantic", "-Wconversion", "-Wsign-conversion", "-Wshadow", "-Werror"]
# found at run time; a platform without them still has the comparison of offsets
SANITIZERS = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all"]


@pytest.fixture(scope="module")
def exchange(tmp_path_factory):
    compiler = next(filter(shutil.which, filter(None, [os.environ.get("CXX"), "c++", "g++", "clang++"])), None)
    if compiler is None:
        pytest.skip("no C++ compiler")
    program = tmp_path_factory.mktemp("cpp") / "kdtr_exchange"
    command = [compiler, "-std=c++17", *WARNINGS, "-I", include_dir(), str(SOURCE), "-o", str(program)]
    compiled = subprocess.run([*command, *SANITIZERS], capture_output=True, text=True)
    if compiled.returncode or subprocess.run([program, "check"], capture_output=True).returncode:
        compiled = subprocess.run(command, capture_output=True, text=True)
    assert compiled.returncode == 0, compiled.stderr

    def run(*arguments, cwd):
        return subprocess.run(
            [program, *arguments], cwd=cwd, capture_output=True, encoding="utf-8", errors="backslashreplace"
        )

    return run


def python_verdict(path: Path) -> str:
    try:
        read_kdtr(path)
    except KdtrError as error:
        return str(error.offset)
    return "ok"


def assert_same_verdicts(
    exchange: Callable[..., subprocess.CompletedProcess[str]], folder: Path, files: dict[str, bytes]
) -> list[str]:
    for name, data in files.items():
        (folder / name).write_bytes(data)
    result = exchange("check", *files, cwd=folder)
    assert result.returncode == 0, result.stderr
    verdicts = [line.split(" ")[0] for line in result.stdout.splitlines()]
    expected = [python_verdict(folder / name) for name in files]
    assert dict(zip(files, verdicts, strict=True)) == dict(zip(files, expected, strict=True))
    return result.stdout.splitlines()


def test_a_file_from_python_copied_by_cpp_has_the_same_bytes(exchange, tmp_path):
    rng = np.random.default_rng(0)
    arrays: dict[str, Any] = {
        "μ/rank 0": np.float32(3),
        "\U0001f333 empty": np.zeros((2, 0, 3)),
        "large": np.arange(300_000),
    }
    for name in DTYPES:
        dtype = dtype_named(name)
        bits = rng.integers(0, 256, 12 * dtype.itemsize, np.uint8)
        arrays[name] = (bits & 1 if name == "bool" else bits).view(dtype).reshape(3, 4)
    write_kdtr(tmp_path / "py.kdtr", arrays, {"": "", "τ": "line\nend", "z\0": "\U0010ffff"})
    result = exchange("copy", "py.kdtr", "cpp.kdtr", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert (tmp_path / "cpp.kdtr").read_bytes() == (tmp_path / "py.kdtr").read_bytes()


def test_a_file_from_cpp_is_read_by_python(exchange, tmp_path):
    result = exchange("make", "cpp.kdtr", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    arrays, metadata = read_kdtr(tmp_path / "cpp.kdtr")
    expected = {
        "bool": np.array([[True, False], [True, True]]),
        "uint8": np.array([0, 255], np.uint8),
        "int8": np.array([-128, 127], np.int8),
        "uint16": np.array([[[0], [65535]]], np.uint16),
        "int32": np.array([[-(2**31), -1, 0], [1, 2, 3]], np.int32),
        "uint32": np.array(2**32 - 1, np.uint32),
        "int64": np.array([-(2**63)], np.int64),
        "float16": np.array([1, -np.inf], np.float16),
        "bfloat16": np.array([1, -3], ml_dtypes.bfloat16),
        "float32": np.array([0.5, -np.inf], np.float32),
        "float64": np.array(2.0**-1074),
        "leer/空": np.zeros((3, 0), np.float32),
    }
    assert set(arrays) == set(expected) >= set(DTYPES)
    for name, array in expected.items():
        np.testing.assert_array_equal(arrays[name], array, strict=True)
    assert metadata == {"writer": "C++", "τ": "7½"}
    assert os.listdir(tmp_path) == ["cpp.kdtr"]


def test_cpp_finds_every_truncation_and_every_flipped_byte_where_python_does(exchange, tmp_path):
    files = {f"cut{n}": SOUND[:n] for n in range(len(SOUND))}
    for place in range(len(SOUND)):
        data = bytearray(SOUND)
        data[place] ^= 0xFF
        files[f"flip{place}"] = bytes(data)
    files["longer"] = SOUND + b"\0"
    lines = assert_same_verdicts(exchange, tmp_path, files)
    assert "ok" not in lines


def test_cpp_names_damage_under_right_checksums_where_python_does(exchange, tmp_path):
    files = {f"{i}.kdtr": damage.data for i, damage in enumerate(DAMAGES.values())}
    lines = assert_same_verdicts(exchange, tmp_path, {"sound.kdtr": SOUND, **files})
    assert lines[0] == "ok"
    for line, damage in zip(lines[1:], DAMAGES.values(), strict=True):
        assert line.startswith(f"{damage.offset} ")
        assert line.endswith(f"(at byte {damage.offset})")


def test_cpp_and_python_agree_on_what_is_utf8(exchange, tmp_path):
    edges = [0x00, 0x7F, 0x80, 0x8F, 0x90, 0x9F, 0xA0, 0xBF, 0xC0, 0xC1, 0xC2, 0xDF, 0xE0, 0xE1, 0xEC, 0xED, 0xEE]
    edges += [0xEF, 0xF0, 0xF1, 0xF3, 0xF4, 0xF5, 0xFF]
    rng = random.Random(0)
    drawn = {bytes(rng.choices(edges, k=4)) for _ in range(500)}
    drawn |= {chr(point).encode().rjust(4, b"v") for point in (0x7FF, 0x800, 0xD7FF, 0xE000, 0xFFFF, 0x10000, 0x10FFFF)}
    drawn |= {b"v\xed\xa0\x80", b"v\xe0\x9f\xbf", b"\xf0\x8f\xbf\xbf", b"\xf4\x90\x80\x80", b"vv\xc1\xbf", b"vvv\xc2"}
    assert_same_verdicts(
        exchange, tmp_path, {value.hex(): resealed(SOUND[:139] + value + SOUND[143:]) for value in sorted(drawn)}
    )


def test_cpp_and_python_agree_on_random_damage_under_right_checksums(exchange, tmp_path):
    rng = random.Random(1)
    files = {}
    for i in range(400):
        data = bytearray(SOUND)
        for _ in range(rng.randint(1, 3)):
            data[rng.randrange(8, 153)] = rng.choice([0, 1, 2, 64, 127, 128, 255])
        files[str(i)] = resealed(data)
    assert_same_verdicts(exchange, tmp_path, files)


def test_cpp_refuses_what_it_cannot_store_and_leaves_no_file(exchange, tmp_path):
    result = exchange("refuse", "a.kdtr", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert [line.split("array ")[1] for line in result.stdout.splitlines()] == [
        "'' must have a name of 1 to 65535 bytes of UTF-8",
        r"'\xff' must have a name of 1 to 65535 bytes of UTF-8",
        "'a' has 8 bytes, not those of its type and shape",
        "'a' has a shape which is beyond 2^63 bytes",
        "'a' is bool and must hold only 0 and 1",
        "'a' has a rank above 64",
    ]
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("paths", [("nope.kdtr", "a.kdtr"), (".", "a.kdtr"), ("s.kdtr", "no/a.kdtr")])
def test_cpp_reports_what_the_system_refuses(exchange, tmp_path, paths):
    (tmp_path / "s.kdtr").write_bytes(SOUND)
    result = exchange("copy", *paths, cwd=tmp_path)
    assert result.returncode == 1
    assert len(result.stderr.splitlines()) == 1
    assert os.listdir(tmp_path) == ["s.kdtr"]
