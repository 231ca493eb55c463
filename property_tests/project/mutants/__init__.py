"""The suite tested by mutation: what breaks an operation must break a test.

``make mutants`` changes one place of a kernel or a reference at a time and runs the tests of what stands there, at
their default number of examples: those of ``property_tests/test_*.py``, and for mutants made by machine also this
project's own, where something is no operation or is compiled. A mutant that no test catches, and that
``EQUIVALENT.md`` does not explain, is a gap in the suite. ``RESULTS.md`` has what came of them all.

- ``hand_made.py``: the mistakes that one makes, as small patches;
- ``machine_made.py``: every number, comparison and operator, changed by cosmic-ray's operators;
- ``EQUIVALENT.md``: those that change nothing that the contract speaks of, each with the reason;
- ``forked.py``: a process that has imported everything and forks a child for each mutant;
- ``run.py``: the command.
"""

from dataclasses import dataclass
from difflib import SequenceMatcher
from pathlib import Path

import ddtree

PACKAGE = Path(ddtree.__file__).parent

OP_OF = {"philox": "choose_tokens", "portable_math": "choose_tokens"}
"""Files that are named otherwise than what they serve."""


@dataclass(frozen=True)
class Mutant:
    """One change of one file.

    Attributes
    ----------
    op : str
        The operation, or else the function, whose tests must catch it.
    file : str
        Below the package, such as ``"reference/accept_tree.py"``.
    what : str
        The mistake, in a line.
    source : str
        The whole file, with the change.
    by_hand : bool
        Who made it.
    """

    op: str
    file: str
    what: str
    source: str
    by_hand: bool

    @property
    def implementation(self) -> str:
        """The backend whose tests must catch it."""
        return implementation_of(self.file)

    @property
    def change(self) -> tuple[str, str]:
        """The lines that it changes, before and after, without what surrounds them."""
        before, after = read(self.file).splitlines(), self.source.splitlines()
        changes = [c for c in SequenceMatcher(None, before, after, autojunk=False).get_opcodes() if c[0] != "equal"]
        (_, i, _, k, _), (_, _, j, _, m) = changes[0], changes[-1]
        return text_of(before[i:j]), text_of(after[k:m])


def text_of(lines: list[str]) -> str:
    """Lines as one, with single blanks."""
    return " ".join(" ".join(lines).split())


def read(file: str) -> str:
    """The source of a file of the package."""
    return (PACKAGE / file).read_text(encoding="utf-8")


def implementation_of(file: str) -> str:
    """The backend that a file belongs to."""
    return file.split("/")[-2]


def op_of(file: str) -> str:
    """The operation or function that a file is of."""
    stem = Path(file).stem
    return OP_OF.get(stem, stem)
