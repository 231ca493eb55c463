"""Where programs write is looked at before they work."""

import importlib

import pytest
from click.testing import CliRunner

PROGRAMS = {
    "ddtree.analysis.soak": ["--rounds", "1"],
    "ddtree.analysis.benchmarks.decoding": ["--quick", "--section", "rounds"],
}


@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize("what", ["file", "within a file"])
def test_an_output_that_cannot_be_written_is_said_before_any_work(tmp_path, monkeypatch, program, what):
    module = importlib.import_module(program)

    def works(*args, **kwargs):
        raise AssertionError("it has begun")

    for name in ("soak", "measure"):
        monkeypatch.setattr(module, name, works, raising=False)
    (tmp_path / "file").write_text("here")
    output = tmp_path / "file" if what == "file" else tmp_path / "file" / "sub"
    result = CliRunner().invoke(module.main, [*PROGRAMS[program], "--output", str(output)])
    assert result.exit_code == 2
    assert str(output) in result.output.replace("\n", "")
    assert "--output" in result.output
    assert (tmp_path / "file").read_text() == "here"
