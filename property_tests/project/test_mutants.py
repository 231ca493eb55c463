"""The mutants that the suite is tested by, and the runner of them; ``make mutants`` runs them all."""

import ast
import importlib.util
from collections import Counter

import pytest

from ddtree.property_tests.project import mutants
from ddtree.property_tests.project.mutants import Mutant, hand_made, run
from ddtree.protocols import OPS

IMPLEMENTATIONS = ("reference", "numba_cpu", "numba_cuda")


def planted(what, old, new, *, op="visibility_words", implementation="numba_cpu"):
    return hand_made.mutant_of(op, implementation, what, old, new)


def test_every_patch_fits_its_file_and_gives_python():
    made = hand_made.mutants()
    assert len(made) >= 60
    assert len({mutant.source for mutant in made}) == len(made)
    for mutant in made:
        ast.parse(mutant.source)
        assert mutant.change[0] != mutant.change[1]


def test_a_patch_that_does_not_fit_exactly_once_is_named():
    with pytest.raises(hand_made.PatchError, match=r"visibility_words\[numba_cpu\], gone: 0 places, should be 1"):
        planted("gone", "no such text", "")
    with pytest.raises(hand_made.PatchError, match="twice: 2 places"):
        planted("twice", "as_array(", "as_arrays(")


def test_every_operation_has_mutants_in_every_implementation():
    made = hand_made.mutants()
    assert set(Counter(mutant.op for mutant in made)) == set(OPS)
    assert min(Counter(mutant.op for mutant in made).values()) >= 6
    assert min(Counter((mutant.op, mutant.implementation) for mutant in made).values()) >= 3
    assert {mutant.implementation for mutant in made} == set(IMPLEMENTATIONS)


def test_explained_changes_are_of_lines_that_are_there():
    explained = run.equivalents(run.EQUIVALENT.read_text(encoding="utf-8"))
    for (file, before, after), (reason, _) in explained.items():
        lines = mutants.read(file).splitlines()
        texts = {mutants.text_of(lines[i : i + n]) for n in (1, 2, 3) for i in range(len(lines))}
        assert before in texts, f"{file} has no line {before!r}"
        assert before != after
        assert reason, f"{file}: no reason for {after!r}"


def test_explanations_are_read_and_one_that_explains_nothing_is_stale():
    text = "# title\n\n## a.py\n\nNobody looks.\n\n```diff\n-x = 1\n+x = 2\n+x = 0\n-break\n+continue\n+continue\n```\n"
    assert run.equivalents(text) == {
        ("a.py", "x = 1", "x = 2"): ("Nobody looks.", 1),
        ("a.py", "x = 1", "x = 0"): ("Nobody looks.", 1),
        ("a.py", "break", "continue"): ("Nobody looks.", 2),
    }


def test_survivors_are_explained_by_their_lines_or_survive(tmp_path, monkeypatch):
    file = "reference/tree_positions.py"
    source, line = mutants.read(file), "return prefix_lens[:, None] + np.maximum(depths, 0)"
    zero, one, two = (
        Mutant("tree_positions", file, "", source.replace("(depths, 0)", f"(depths, {n})"), by_hand=False)
        for n in (-1, 1, 2)
    )
    text = f"## {file}\n\nNo reason.\n\n```diff\n-{line}\n+{line[:-2]}-1)\n+{line[:-2]}2)\n```\n"
    (tmp_path / "EQUIVALENT.md").write_text(text)
    monkeypatch.setattr(run, "EQUIVALENT", tmp_path / "EQUIVALENT.md")
    survived, caught = run.Outcome("survived"), run.Outcome("caught", "a test")
    found, stale = run.judged({zero: survived, one: survived, two: caught})
    assert found == {zero: run.Outcome("equivalent", "No reason."), one: survived, two: caught}
    assert stale == [f"{file}: {line}  →  {line[:-2]}2)"]
    assert run.judged({hand_made.mutants()[0]: caught})[1] == [], "of files that were not asked for nothing is stale"


def test_the_runner_catches_what_is_wrong_and_nothing_else(tmp_path):
    wrong = planted("every bit is the first", "np.uint32(1 << (i & 31))", "np.uint32(1 << (i & 30))")
    same = planted("the same in other words", "i >> 5", "i // 32")
    crash = planted("far outside of all memory", "words[b, i, w] = ", "words[b, i + (1 << 40), w] = ")
    importless = planted("no such name", "np.uint32(1 << (i & 31))", "np.uint33(1 << (i & 31))")
    by_law = planted("unused slots see themselves", "range(node_counts[b])", "range(N)", implementation="reference")
    found = dict(run.outcomes([wrong, same, crash, importless, by_law], workers=2, seed=0, folder=tmp_path))
    assert found[same] == run.Outcome("survived")
    for mutant in (wrong, by_law):
        assert found[mutant].verdict == "caught"
        assert f"[{mutant.implementation}" in found[mutant].by
    assert (found[crash].verdict, found[crash].by[-9:]) == ("caught", "(SIGSEGV)")
    assert found[importless] == run.Outcome("caught", "when it was imported (AttributeError)")


def test_mutants_are_not_run_where_the_code_as_it_is_fails(tmp_path, monkeypatch):
    mutant = planted("harmless", "np.zeros((B", "np.zeros( (B", implementation="reference")
    monkeypatch.setattr(run, "SUITE", ["test_visibility.py", "no_such_test.py"])
    with pytest.raises(run.TestsFailError, match="of 1 mutants 1 have no answer"):
        list(run.outcomes([mutant], workers=1, seed=0, folder=tmp_path))


@pytest.mark.skipif(
    importlib.util.find_spec("cosmic_ray") is None, reason="optional library cosmic-ray is not installed"
)
def test_mutants_made_by_machine_are_of_every_kind_and_none_of_annotations():
    from ddtree.property_tests.project.mutants import machine_made

    changes = Counter(m.change for m in machine_made.mutants_of("reference/tree_positions.py"))
    line = "return prefix_lens[:, None] + np.maximum(depths, 0)"
    assert changes == {
        (line, line.replace("depths, 0", "depths, 1")): 1,
        (line, line.replace("depths, 0", "depths, -1")): 1,
        (line, line.replace("+", "-")): 1,
        (line, line.replace("maximum", "minimum")): 1,
    }
