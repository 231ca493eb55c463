"""The pytest plugin: the options of the suite, and the summary of what it ran. Light, as every pytest run loads it.

The rest of the suite's pytest side is in ``property_tests/conftest.py``, which is loaded with the suite alone. What a
test ran on comes from there as user properties of its reports, so that the summary is the same under pytest-xdist.
"""

from __future__ import annotations

import sys
import textwrap
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

import pytest

ON = "ddtree_on"
"""User property: the ``[what, backend]`` pairs that a test is about."""
CALLS = "ddtree_calls"
"""User property: calls made, by ``what[backend]``."""
EXAMPLES = "ddtree_examples"
"""User property: drawn examples on which a law of an operation held, by ``operation[backend]``, each of them once."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options of the suite."""
    group = parser.getgroup("ddtree", "ddtree's conformance suite: pytest --pyargs ddtree.property_tests")
    group.addoption(
        "--ddtree-backend",
        action="append",
        metavar="BACKEND",
        help="what to test: one of ddtree's backends, or MODULE or MODULE:OBJECT of your own, found from the current "
        "folder too; can be given several times",
    )
    group.addoption("--ddtree-ops", metavar="OP,...", help="operations to test; all that the backend has if left out")
    group.addoption("--ddtree-examples", type=int, metavar="N", help="examples of each property")
    group.addoption(
        "--ddtree-at-least",
        type=int,
        metavar="N",
        help="fail the run if laws of operations held on fewer drawn examples than this in all",
    )
    group.addoption("--ddtree-seed", type=int, metavar="S", help="seed of the examples, to draw the same ones again")
    group.addoption(
        "--ddtree-again",
        metavar="FILE",
        help="draw the one example again that a failed law's FILE holds: of the test that `ddtree replay FILE` names",
    )
    group.addoption(
        "--ddtree-failures",
        metavar="DIR",
        default="ddtree_failures",
        help="where the smallest failing case of a test is written; %(default)s if left out",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Meet a wrong option before anything is collected."""
    examples = config.getoption("--ddtree-examples")
    if examples is not None and examples < 1:
        raise pytest.UsageError(f"--ddtree-examples must be at least 1, got {examples}")
    specs, ops = config.getoption("--ddtree-backend"), chosen_ops(config)
    if specs is None and ops is None:
        return
    here = str(config.invocation_params.dir)
    if here not in sys.path:
        sys.path.insert(0, here)  # `pytest` itself does not look there, and a backend is often a file in it
    from ddtree.backends import BackendUnavailable, get_backend
    from ddtree.protocols import OPS

    unknown = [op for op in ops or () if op not in OPS]
    if unknown:
        raise pytest.UsageError(f"--ddtree-ops must be of {', '.join(OPS)}, got {', '.join(unknown)}")
    for spec in specs or ():
        try:
            has = get_backend(spec).ops
        except (BackendUnavailable, ValueError) as error:
            raise pytest.UsageError(f"--ddtree-backend: {error}") from None
        except Exception as error:  # whatever a module of one's own raises when it is imported
            what = f"importing {spec} raised {type(error).__name__}: {error}"
            raise pytest.UsageError(f"--ddtree-backend: {what}") from None
        if ops is not None and not set(ops) & set(has):
            raise pytest.UsageError(f"--ddtree-ops: {spec} has none of {', '.join(ops)}, only {', '.join(has)}")


def chosen_ops(config: pytest.Config) -> tuple[str, ...] | None:
    """What ``--ddtree-ops`` names; None if it was left out."""
    given = config.getoption("--ddtree-ops", default=None)
    return None if given is None else tuple(op.strip() for op in given.split(",") if op.strip())


@dataclass
class _Law:
    """What became of a test on one backend, over all its parameters."""

    calls: int = 0
    examples: int = 0
    outcomes: set[str] = field(default_factory=set)
    reason: str = ""

    @property
    def verdict(self) -> str:
        return next((o for o in ("FAILED", "skipped") if o in self.outcomes), "")


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Fail a run of too few examples, whatever the reason: laws not collected, skipped, cut short or not counted."""
    wanted = session.config.getoption("--ddtree-at-least")
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if wanted is None or hasattr(session.config, "workerinput"):
        return
    # without a reporter nothing is counted
    too_few = reporter is None or sum(_examples_by_backend(_laws(reporter)).values()) < wanted
    if too_few and session.exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """Say which laws ran on which operation, on how many calls, and what was not run and why."""
    found = _laws(terminalreporter)
    specs, wanted = config.getoption("--ddtree-backend"), config.getoption("--ddtree-at-least")
    if not found and wanted is None:
        return
    terminalreporter.section("ddtree: laws, by backend and operation")
    for backend, by_op in found.items():
        for what, laws in by_op.items():
            terminalreporter.write_line(f"{backend}  {what}: {_counted(laws)}", bold=True)
            failed_first = sorted(laws.items(), key=lambda item: (item[1].verdict != "FAILED", item[0]))
            for name, law in failed_first if specs else ():
                calls = f"{law.calls:,}" if law.calls else ""
                color = {"red": True} if law.verdict == "FAILED" else {}
                why = f": {law.reason}" if law.verdict == "skipped" else ""
                terminalreporter.write_line(f"{calls:>9}  {name}{'  ' * bool(law.verdict)}{law.verdict}{why}", **color)
    by_backend = _examples_by_backend(found)
    if by_backend or wanted is not None:
        total = sum(by_backend.values())
        each = ", ".join(f"{backend} {n:,}" for backend, n in by_backend.items())
        terminalreporter.write_line(f"drawn examples, each counted once: {total:,}{f' ({each})' if each else ''}")
        if wanted is not None and total < wanted:
            terminalreporter.write_line(f"FAILED: --ddtree-at-least asks for {wanted:,}", red=True, bold=True)
    if specs or chosen_ops(config):
        _say_what_was_left_out(terminalreporter, config, specs, found)


def _laws(terminalreporter: Any) -> dict[str, dict[str, dict[str, _Law]]]:
    """Backend → operation → law."""
    found: dict[str, dict[str, dict[str, _Law]]] = defaultdict(lambda: defaultdict(lambda: defaultdict(_Law)))
    for outcome, reports in terminalreporter.stats.items():
        for report in reports if outcome not in ("", "deselected") else ():  # nor setups and teardowns that went well
            properties = dict(getattr(report, "user_properties", ()))
            for what, backend in properties.get(ON, ()):
                name = report.nodeid.rpartition("::")[2].partition("[")[0].removeprefix("test_").replace("_", " ")
                law = found[backend][what][name]
                if report.when == "call":  # the properties are also on what setup and teardown report
                    law.calls += properties.get(CALLS, {}).get(f"{what}[{backend}]", 0)
                    if outcome == "passed":
                        law.examples += properties.get(EXAMPLES, {}).get(f"{what}[{backend}]", 0)
                law.outcomes.add("FAILED" if outcome in ("failed", "error") else outcome)
                if outcome == "skipped":
                    law.reason = report.longrepr[2].removeprefix("Skipped: ")
    return found


def _counted(laws: dict[str, _Law]) -> str:
    verdicts = [law.verdict for law in laws.values()]
    counts = {"hold": verdicts.count(""), "fail": verdicts.count("FAILED"), "skipped": verdicts.count("skipped")}
    said = [f"{n} {what}" for what, n in counts.items() if n or what == "hold"]
    done = {what: sum(getattr(law, what) for law in laws.values()) for what in ("examples", "calls")}
    ran = ", ".join(f"{n:,} {what}" for what, n in done.items() if n)
    return f"of {len(laws)} laws {', '.join(said)}" + (f"; {ran}" if ran else "")


def _examples_by_backend(found: dict[str, dict[str, dict[str, _Law]]]) -> dict[str, int]:
    """Examples on each backend that had any."""
    each = {b: sum(law.examples for laws in by_op.values() for law in laws.values()) for b, by_op in found.items()}
    return {backend: n for backend, n in each.items() if n}


def _say_what_was_left_out(
    terminalreporter: Any, config: pytest.Config, specs: list[str] | None, found: dict[str, Any]
) -> None:
    from ddtree.backends import get_backend
    from ddtree.protocols import OPS

    ops = chosen_ops(config)
    lines = []
    for spec in specs or ():
        lacks = [op for op in OPS if op not in get_backend(spec).ops and (ops is None or op in ops)]
        if lacks:
            lines.append(f"{', '.join(lacks)}, which {spec} does not have")
    if ops is not None and set(ops) < set(OPS):
        lines.append(f"{', '.join(op for op in OPS if op not in ops)}, which --ddtree-ops does not name")
    for what, needs in _NEEDS.items():
        without = [spec for spec in specs or ("any backend",) if what not in found.get(spec, ())]
        if without:
            lines.append(f"laws of the {what} on {', '.join(without)}, {needs}")
    lines.append("tests that are about no backend, such as those of strategies and drafters")
    for line in lines:
        wrapped = textwrap.wrap(f"not run: {line}", terminalreporter._tw.fullwidth - 1, subsequent_indent="  ")
        terminalreporter.write_line("\n".join(wrapped))


_NEEDS = {
    "engine": "which need every operation of a round (NumPy or torch arrays) and no --ddtree-ops",
    "model": "which need verify_attention (NumPy or CuPy arrays) and no --ddtree-ops",
}
