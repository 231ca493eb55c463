"""A verification on a GPU that is cut off: what it has found is kept, as that of the sources it was found of."""

import json
from types import SimpleNamespace

import click
import pytest
from click.testing import CliRunner
from rich.console import Console

from ddtree.analysis import verify_on_gpu
from ddtree.analysis.verify_on_gpu import Found, differential, part_of

OF = {"backend": "numba_cpu", "sources_sha256": "0123", "gpu": "some"}


def test_finished_parts_are_not_done_again(tmp_path, monkeypatch):
    path, console = tmp_path / "parts", Console(quiet=True)
    wanted = {"tree_positions": 20, "visibility_words": 20}
    first = differential("numba_cpu", {"tree_positions": 20}, 1, console, Found(OF, path))
    assert first == {"tree_positions": (20, 0, "")}
    Found(OF, path).add(part_of("visibility_words", 20, 0), [20, 0, ""])

    def again(*task):
        raise AssertionError("a finished part was done again")

    monkeypatch.setattr(verify_on_gpu, "compare", again)
    assert differential("numba_cpu", wanted, 1, console, Found(OF, path)) == {
        "tree_positions": (20, 0, ""),
        "visibility_words": (20, 0, ""),
    }


def test_a_line_that_is_cut_off_is_no_part(tmp_path):
    path = tmp_path / "parts"
    found = Found(OF, path)
    found.add("laws", "446 passed")
    found.add("memcheck", "")
    path.write_text(path.read_text()[:-3])
    after = Found(OF, path)
    assert "laws" in after
    assert "memcheck" not in after
    after.add("memcheck", "")
    assert Found(OF, path)["memcheck"] == ""


HEADER = json.dumps(OF) + "\n"


@pytest.mark.parametrize(
    "text",
    [
        *("[" * 100_000 + "\n", "[1, 2]\n", "nothing\n", "nothing", "{}\n", '{"important": 1}', '"x"\n', "\xff\n"),
        *(
            HEADER + part + "\n"
            for part in (
                *('"ab"', '{"a": 1, "b": 2}', '["a", 1]', '["a", [1, 2]]', '["a", [1, 2, 3]]', '["a", "b"]'),
                *('["laws", [1, 2, "a"]]', '["memcheck", [1, 2, "a"]]', '["memcheck", 1]'),
            )
        ),
    ],
)
def test_what_is_no_verification_is_refused_and_stays_what_it_was(tmp_path, text):
    path = tmp_path / "parts"
    path.write_text(text, encoding="latin-1")
    with pytest.raises(click.ClickException, match=r"--resume must be a file of this verification.*parts: .*; name"):
        Found(OF, path)
    assert path.read_text(encoding="latin-1") == text


def test_what_was_not_good_is_tried_again(tmp_path):
    path = tmp_path / "parts"
    found = Found(OF, path)
    found.add("memcheck", "out of memory", good=False)
    found.add("laws", "446 passed")
    assert found["memcheck"] == "out of memory"
    assert "memcheck" not in Found(OF, path)
    assert "laws" in Found(OF, path)


def test_what_another_run_adds_meanwhile_stays(tmp_path):
    one = Found(OF, tmp_path / "parts")
    one.add("laws", "446 passed")
    other = Found(OF, tmp_path / "parts")
    one.add("memcheck", "")
    other.add("racecheck", "")
    assert all(part in Found(OF, tmp_path / "parts") for part in ("laws", "memcheck", "racecheck"))


def test_where_no_file_can_be_made_it_is_told(tmp_path):
    with pytest.raises(click.ClickException, match=r"or one that can be made, got .*nowhere"):
        Found(OF, tmp_path / "nowhere" / "parts")


def test_parts_of_other_sources_are_refused(tmp_path):
    Found(OF | {"sources_sha256": "4567"}, tmp_path / "parts")
    with pytest.raises(click.ClickException, match="sources_sha256 was '4567' there, and is '0123' now"):
        Found(OF, tmp_path / "parts")


def test_without_a_file_nothing_is_kept(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    found = Found(OF)
    found.add("laws", "446 passed")
    assert found["laws"] == "446 passed"
    assert list(tmp_path.iterdir()) == []


def test_a_tool_that_is_killed_has_not_found_nothing(tmp_path, monkeypatch):
    tool = tmp_path / "compute-sanitizer"
    tool.write_text("#!/bin/sh\nkill -9 $$\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(verify_on_gpu, "devices", lambda: ["GPU 0: some, of a kind"])
    monkeypatch.setattr(verify_on_gpu, "backend_states", lambda: [SimpleNamespace(name="cupy", reason=None)])
    monkeypatch.setattr(verify_on_gpu, "get_backend", lambda name: SimpleNamespace(ops=("build_tree",)))
    monkeypatch.setattr(verify_on_gpu, "differential", lambda *arguments: {"build_tree": (20, 0, "")})
    monkeypatch.setattr(verify_on_gpu, "laws", lambda *arguments: "446 passed")
    result = CliRunner().invoke(verify_on_gpu.main, ["--sanitize", "--output", str(tmp_path / "found.json")])
    assert result.exit_code == 1
    assert "it ended with status -9" in result.output
    assert set(json.loads((tmp_path / "found.json").read_text())["sanitizer"].values()) == {"found something"}
