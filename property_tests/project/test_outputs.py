"""Where programs write is looked at before they work."""

import importlib

import pytest
from click.testing import CliRunner

from ddtree.cli import main as cli

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


@pytest.mark.parametrize(
    "program, name", [("ddtree.analysis.soak", "soak.json"), ("ddtree.analysis.benchmarks.decoding", "decoding.md")]
)
def test_a_folder_in_the_place_of_a_result_is_said_before_any_work(tmp_path, monkeypatch, program, name):
    module = importlib.import_module(program)
    monkeypatch.setattr(module, "soak" if "soak" in program else "measure", None)
    (tmp_path / name).mkdir()
    result = CliRunner().invoke(module.main, [*PROGRAMS[program], "--output", str(tmp_path)])
    assert result.exit_code == 2
    assert f"{tmp_path / name} cannot be written" in result.output.replace("\n", "")


def test_a_sweep_looks_at_its_output_and_at_what_policies_are_of_before_it_works(tmp_path):
    (tmp_path / "file").write_text("here")
    result = CliRunner().invoke(cli, ["sweep", "--budgets", "2", "--out", str(tmp_path / "file" / "x")])
    assert (result.exit_code, result.stderr) == (
        2,
        f"Error: {tmp_path / 'file' / 'x'} cannot be written (Not a directory): choose another with --out\n",
    )
    missing = tmp_path / "missing.json"
    result = CliRunner().invoke(cli, ["sweep", "--policy", f"cost-clamped:{missing}", "--out", str(tmp_path / "out")])
    assert (result.exit_code, result.stderr) == (2, f"Error: --policy: {missing}: No such file or directory\n")
    assert not (tmp_path / "out").exists()
