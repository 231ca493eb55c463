"""A verification on a GPU that is cut off: what it has found is kept, as that of the sources it was found of."""

import click
import pytest
from rich.console import Console

from ddtree.analysis import verify_on_gpu
from ddtree.analysis.verify_on_gpu import Found, differential, part_of

OF = {"backend": "numba_cpu", "sources_sha256": "0123", "gpu": "some"}


def test_finished_parts_are_not_done_again(tmp_path, monkeypatch):
    path, console = tmp_path / "parts", Console(quiet=True)
    wanted = {"tree_positions": 20, "visibility_words": 20}
    first = differential("numba_cpu", {"tree_positions": 20}, 1, console, Found(OF, path))
    assert first == {"tree_positions": (20, 0, "")}
    Found(OF, path).add(part_of("visibility_words", 20, 0), [20, 2, "the first"])

    def again(*task):
        raise AssertionError("a finished part was done again")

    monkeypatch.setattr(verify_on_gpu, "compare", again)
    assert differential("numba_cpu", wanted, 1, console, Found(OF, path)) == {
        "tree_positions": (20, 0, ""),
        "visibility_words": (20, 2, "the first"),
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


@pytest.mark.parametrize("text", ["[1, 2]\n", "nothing\n", "{}\n", '"x"\n', "\xff\n"])
def test_parts_of_something_else_are_refused_and_stay_what_they_were(tmp_path, text):
    path = tmp_path / "parts"
    path.write_text(text, encoding="latin-1")
    with pytest.raises(click.ClickException, match=r"--resume must be a file of this verification, of .*0123"):
        Found(OF, path)
    assert path.read_text(encoding="latin-1") == text


def test_parts_of_other_sources_are_refused(tmp_path):
    Found(OF | {"sources_sha256": "4567"}, tmp_path / "parts")
    with pytest.raises(click.ClickException, match="4567"):
        Found(OF, tmp_path / "parts")


def test_without_a_file_nothing_is_kept(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    found = Found(OF)
    found.add("laws", "446 passed")
    assert found["laws"] == "446 passed"
    assert list(tmp_path.iterdir()) == []
