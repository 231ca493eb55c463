"""The `kdtr` commands: what they print, what they convert, and how they fail."""

import io
import json
import os
import subprocess
import sys
import zipfile
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from click.testing import CliRunner

from ddtree.cli.demo import demo
from ddtree.cli.kdtr import kdtr
from ddtree.kdtr import DTYPES, dtype_named, read_kdtr, write_kdtr
from ddtree.property_tests.project.damaged_kdtr import DAMAGES, SOUND

ARRAYS: dict[str, Any] = {name: np.ones((2, 3), dtype_named(name)) for name in DTYPES}
ARRAYS |= {"a/b.npy": np.zeros((0, 2)), "a/b": np.float32(0.5), "τ [bold]": np.arange(3)}
METADATA = {"drafter": "oracle", "τ": "7½\nrounds", "": '"{}"'}


@pytest.fixture
def run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "s.kdtr").write_bytes(SOUND)

    def invoke(*arguments: str, **options):
        return CliRunner().invoke(kdtr, arguments, catch_exceptions=False, **options)

    return invoke


def assert_refused(result, message: str, exit_code: int = 1) -> None:
    assert (result.exit_code, result.stdout) == (exit_code, "")
    assert result.stderr.startswith("Error: ")
    assert len(result.stderr.splitlines()) == 1
    assert message in result.stderr


def npz(**arrays) -> bytes:
    file = io.BytesIO()
    np.savez(file, **arrays)
    return file.getvalue()


def safetensors(header: object, data: bytes = b"") -> bytes:
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def tensors(*offsets: tuple[int, int], dtype: str = "U8") -> bytes:
    """Four bytes of data with a tensor at each of the places."""
    header = {
        str(i): {"dtype": dtype, "shape": [end - start], "data_offsets": [start, end]}
        for i, (start, end) in enumerate(offsets)
    }
    return safetensors(header, b"\0\1\7\1")


def npy(shape: tuple[int, ...], data: bytes, version: int = 1) -> bytes:
    """An npz file of one compressed member, whose header need not fit its data."""
    file, member = io.BytesIO(), io.BytesIO()
    header = {"descr": "<f4", "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(member, header)
    text = bytearray(member.getvalue())
    text[6] = version
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("x.npy", bytes(text) + data)
    return file.getvalue()


def test_ls_shows_arrays_and_metadata_a_line_each(run):
    write_kdtr("x.kdtr", ARRAYS, METADATA)
    result = run("ls", "x.kdtr")
    assert result.exit_code == 0
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in result.stdout.splitlines() if "│" in line]
    assert ["bfloat16", "bfloat16", "(2, 3)", "12"] in [row[:4] for row in rows]
    assert ["τ [bold]", "int64", "(3,)", "24"] in [row[:4] for row in rows]
    assert ["τ", r"7½\nrounds"] in rows
    assert len(rows) == len(ARRAYS) + len(METADATA)


def test_ls_reads_no_data(run):
    with open("d.kdtr", "wb") as file:
        file.write(DAMAGES["data"].data)
    assert "55bc801d" in run("ls", "d.kdtr").stdout


def test_verify_checks_each_file_and_fails_if_one_is_damaged(run):
    with open("d.kdtr", "wb") as file:
        file.write(DAMAGES["data"].data)
    result = run("verify", "d.kdtr", "s.kdtr", "nope.kdtr")
    assert result.exit_code == 1
    assert result.stdout == "s.kdtr: ok, 2 arrays of 11 bytes\n"
    damaged, missing = result.stderr.splitlines()
    assert damaged.startswith("Error: d.kdtr: the data of 'a' have CRC-32 ")
    assert damaged.endswith("(at byte 192)")
    assert missing == "Error: nope.kdtr: No such file or directory"
    assert run("verify", "s.kdtr").exit_code == 0


def test_verify_shows_progress_on_a_terminal(run, monkeypatch):
    monkeypatch.setattr(sys.modules["ddtree.cli.kdtr"], "_PROGRESS_FROM", 0)
    result = run("verify", "s.kdtr", env={"FORCE_COLOR": "1", "TERM": "xterm"})
    assert result.exit_code == 0
    assert "verify" in result.stderr
    assert result.stdout.startswith("s.kdtr: ok")


@pytest.mark.parametrize("suffix", ["npz", "safetensors"])
@pytest.mark.parametrize("metadata", [METADATA, {}], ids=["metadata", "none"])
def test_export_and_import_give_the_same_file(run, suffix, metadata):
    write_kdtr("x.kdtr", ARRAYS, metadata)
    assert run("export", "x.kdtr", f"x.{suffix}").exit_code == 0
    assert run("import", f"x.{suffix}", "y.kdtr").exit_code == 0
    with open("x.kdtr", "rb") as before, open("y.kdtr", "rb") as after:
        assert before.read() == after.read()


def test_an_exported_npz_is_numpy_s(run):
    write_kdtr("x.kdtr", {"f": np.arange(3.0), "h": np.array([1, -2], ml_dtypes.bfloat16)}, {"k": "v"})
    run("export", "x.kdtr", "x.npz")
    with np.load("x.npz", allow_pickle=False) as loaded:
        np.testing.assert_array_equal(loaded["f"], np.arange(3.0))
        np.testing.assert_array_equal(loaded["h"], np.array([0x3F80, 0xC000], np.uint16), strict=True)
        assert json.loads(loaded["__kdtr__"].item()) == {"bfloat16": ["h"], "metadata": {"k": "v"}}


def test_safetensors_reads_what_is_exported_and_its_files_are_imported(run):
    official = pytest.importorskip("safetensors", reason="safetensors is not installed")
    from safetensors.numpy import save_file

    plain = {name: np.ascontiguousarray(array) for name, array in ARRAYS.items() if name != "bfloat16"}
    write_kdtr("x.kdtr", plain, METADATA)
    run("export", "x.kdtr", "x.safetensors")
    with official.safe_open("x.safetensors", "np") as opened:
        assert opened.metadata() == METADATA
        for name, array in plain.items():
            np.testing.assert_array_equal(opened.get_tensor(name), array, strict=True)
    save_file(plain, "y.safetensors", METADATA)
    assert run("import", "y.safetensors", "y.kdtr").exit_code == 0
    arrays, metadata = read_kdtr("y.kdtr")
    assert metadata == METADATA
    for name, array in plain.items():
        np.testing.assert_array_equal(arrays[name], array, strict=True)


def test_a_compressed_npz_is_imported(run):
    np.savez_compressed("x.npz", x=np.arange(4), y=np.asfortranarray(np.ones((2, 3), ">f4")))
    assert run("import", "x.npz", "x.kdtr").exit_code == 0
    arrays, metadata = read_kdtr("x.kdtr")
    np.testing.assert_array_equal(arrays["x"], np.arange(4))
    np.testing.assert_array_equal(arrays["y"], np.ones((2, 3), np.float32), strict=True)
    assert metadata == {}


@pytest.mark.parametrize(
    ("source", "data", "message"),
    [
        ("i.npz", b"", "i.npz is damaged or not a .npz file"),
        ("i.npz", npz(x=np.arange(3))[:-9], "i.npz is damaged or not a .npz file"),
        ("i.npz", npz(x=np.array([None])), "Object arrays cannot be loaded when allow_pickle=False"),
        ("i.npz", npz(x=np.int16(1)), "arrays['x'] has type int16, it must be one of"),
        ("i.npz", npz(__kdtr__=np.array("{}")), "i.npz is damaged or not a .npz file"),
        ("i.npz", npz(__kdtr__=np.array('{"bfloat16": ["x"], "metadata": {}}'), x=[1]), "not uint16"),
        ("i.npz", npz(__kdtr__=np.array('{"bfloat16": [], "metadata": {"k": 1}}')), "metadata['k'] must be a string"),
        ("i.safetensors", b"1234567", "7 bytes are too few"),
        ("i.safetensors", b"\xff" * 8, "a header of 18446744073709551615 bytes does not fit"),
        ("i.safetensors", b"\2" + b"\0" * 7 + b"{]", "is damaged or not a .safetensors file"),
        ("i.safetensors", b"\x10" + b"\0" * 7 + b'{"a": 1, "a": 2}', "a key appears twice"),
        ("i.safetensors", safetensors({"x": {}}), "is damaged or not a .safetensors file"),
        (
            "i.safetensors",
            safetensors({"x": {"dtype": "I16", "shape": [1], "data_offsets": [0, 2]}}, b"12"),
            "'x' has type I16, which KDTR does not have",
        ),
        (
            "i.safetensors",
            safetensors({"x": {"dtype": "U8", "shape": [1 << 62], "data_offsets": [0, 1 << 62]}}, b"12"),
            "'x' has bytes 0 to 4611686018427387904 of 2 for shape [4611686018427387904]",
        ),
        ("i.safetensors", tensors((1, 3)), "'0' starts at byte 1 of the data, it must at 0: no gap, no overlap"),
        ("i.safetensors", tensors((0, 2), (3, 4)), "'1' starts at byte 3 of the data, it must at 2"),
        ("i.safetensors", tensors((0, 2), (1, 4)), "'1' starts at byte 1 of the data, it must at 2"),
        ("i.safetensors", tensors((0, 2), (2, 3)), "1 bytes belong to no tensor"),
        ("i.safetensors", tensors((0, 4), dtype="BOOL"), "'0' holds a byte 7, a bool is 0 or 1"),
        ("i.npz", npz(x=np.array([0, 7], np.uint8).view(bool)), "'x' holds a byte 7, a bool is 0 or 1"),
        ("i.npz", npy((1 << 50,), b"1234"), "x.npy has 4 bytes for shape (1125899906842624,) of float32"),
        ("i.npz", npy((1,), b"\0" * (1 << 20)), "has 1048576 bytes for shape (1,) of float32, it must have 4"),
        ("i.npz", npy((1,), b"1234", version=3), "x.npy has npy version (3, 0), it must be (1, 0) or (2, 0)"),
    ],
)
def test_import_names_what_it_cannot_read_and_leaves_no_file(run, tmp_path, source, data, message):
    (tmp_path / source).write_bytes(data)
    assert_refused(run("import", source, "o.kdtr"), message)
    assert sorted(path.name for path in tmp_path.iterdir()) == [source, "s.kdtr"]


def test_import_refuses_an_npz_with_one_name_twice(run, tmp_path):
    with zipfile.ZipFile("i.npz", "w") as archive, zipfile.ZipFile(io.BytesIO(npz(x=[1]))) as one:
        archive.writestr("x.npy", one.read("x.npy"))
        archive.writestr("x", one.read("x.npy"))
    assert_refused(run("import", "i.npz", "o.kdtr"), "two members are named 'x'")


@pytest.mark.parametrize(
    ("name", "out"),
    [("__metadata__", "o.safetensors"), ("__kdtr__", "o.npz"), ("a\0b", "o.npz"), ("a" * 65_001, "o.npz")],
)
def test_export_refuses_names_that_the_format_cannot_have(run, tmp_path, name, out):
    write_kdtr("x.kdtr", {name: 0.0})
    assert_refused(run("export", "x.kdtr", out), f"{name[:80]!r} cannot be used in a")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["s.kdtr", "x.kdtr"]


@pytest.mark.parametrize("out", ["o.npz", "o.safetensors"])
def test_export_of_a_damaged_file_leaves_no_file(run, tmp_path, out):
    (tmp_path / "d.kdtr").write_bytes(DAMAGES["data"].data)
    assert_refused(run("export", "d.kdtr", out), "d.kdtr: the data of 'a' have CRC-32")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["d.kdtr", "s.kdtr"]


def test_a_file_is_replaced_only_by_force(run, tmp_path):
    old = tmp_path / "o.npz"
    old.write_bytes(b"old")
    assert_refused(run("export", "s.kdtr", "o.npz"), "o.npz exists: give --force to replace it", 2)
    assert old.read_bytes() == b"old"
    assert run("export", "s.kdtr", "o.npz", "--force").exit_code == 0
    assert_refused(run("import", "o.npz", "s.kdtr"), "s.kdtr exists", 2)
    assert run("import", "o.npz", "s.kdtr", "--force").exit_code == 0
    assert (tmp_path / "s.kdtr").read_bytes() == SOUND


@pytest.mark.parametrize(
    ("arguments", "message", "exit_code"),
    [
        (("export", "s.kdtr", "o.pt"), "o.pt must end in .npz or .safetensors", 2),
        (("import", "s.kdtr", "o.kdtr"), "s.kdtr must end in .npz or .safetensors", 2),
        (("import", "i.npz", "o.bin"), "o.bin must end in .kdtr", 2),
        (("import", "nope.npz", "o.kdtr"), "nope.npz: No such file or directory", 1),
        (("ls", "nope.kdtr"), "nope.kdtr: No such file or directory", 1),
        (("ls", "."), ".: Is a directory", 1),
        (("export", "s.kdtr", "no/o.npz"), "no/o.npz: No such file or directory", 1),
    ],
)
def test_a_wrong_call_is_answered_in_one_line(run, arguments, message, exit_code):
    assert_refused(run(*arguments), message, exit_code)


@pytest.mark.skipif(os.name != "posix", reason="no pipes")
def test_a_pipe_or_folder_is_neither_waited_for_nor_replaced(run, tmp_path):
    for suffix in ("kdtr", "npz", "safetensors"):
        os.mkfifo(f"p.{suffix}")
        (tmp_path / f"d.{suffix}").mkdir()
    write_kdtr("x.kdtr", {"x": 1.0})
    run("export", "x.kdtr", "x.npz")
    before = sorted(os.listdir())
    for name, message in (("p", "Is a pipe, must be a regular file"), ("d", "Is a directory")):
        assert_refused(run("ls", f"{name}.kdtr"), f"{name}.kdtr: {message}")
        assert_refused(run("verify", f"{name}.kdtr"), f"{name}.kdtr: {message}")
        for suffix in ("npz", "safetensors"):
            assert_refused(run("import", f"{name}.{suffix}", "o.kdtr"), f"{name}.{suffix}: {message}")
            assert_refused(run("export", "x.kdtr", f"{name}.{suffix}", "--force"), f"{name}.{suffix}: {message}", 2)
        assert_refused(run("import", "x.npz", f"{name}.kdtr", "--force"), f"{name}.kdtr: {message}", 2)
    assert sorted(os.listdir()) == before


def test_the_demo_finds_before_any_work_what_it_cannot_replace(tmp_path, monkeypatch):
    monkeypatch.setattr(sys.modules["ddtree.cli.demo"], "_run", lambda *_: pytest.fail("the work began"))
    for name in ("results.json", "tree.png"):
        (tmp_path / name / name).mkdir(parents=True)
        result = CliRunner().invoke(demo, ["--output", str(tmp_path / name)], catch_exceptions=False)
        path = tmp_path / name / name
        assert_refused(result, f"{path} cannot be written (Is a directory): choose another with --output", 2)


def test_import_that_does_not_fit_in_memory_says_so(run, monkeypatch):
    def fail(*_, **__):
        raise MemoryError("Unable to allocate 2.00 TiB")

    np.savez("x.npz", x=1)
    monkeypatch.setattr(np.lib.format, "read_array", fail)
    assert_refused(run("import", "x.npz", "o.kdtr"), "x.npz does not fit in memory: Unable to allocate 2.00 TiB")


@pytest.mark.skipif(os.name != "posix", reason="no limit on a file's size")
@pytest.mark.parametrize("arguments", [("export", "x.kdtr", "o.npz"), ("export", "x.kdtr", "o.safetensors"),
                                       ("import", "x.npz", "o.kdtr")])  # fmt: skip
def test_a_full_disk_is_told_with_the_output_s_name(run, tmp_path, arguments):
    import resource

    write_kdtr("x.kdtr", {"x": np.zeros(1 << 20)})
    run("export", "x.kdtr", "x.npz")
    before = sorted(os.listdir())
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, limits[1]))
    try:
        result = run(*arguments)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert_refused(result, f"{arguments[2]}: File too large")
    assert sorted(os.listdir()) == before


def test_verify_ends_quietly_when_its_reader_has_gone(run):
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "ddtree", "kdtr", "verify", "s.kdtr", "s.kdtr"]
    result = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True)
    os.close(writer)
    assert (result.returncode, result.stderr) == (1, "")


def test_loading_the_commands_loads_no_table_or_figure_library():
    code = "import sys, ddtree.cli.kdtr; print(sorted({'rich', 'matplotlib'} & set(sys.modules)))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout == "[]\n"
