"""A process that has imported everything, and forks a child for each mutant.

The child runs the changed source in the module, in place, and then the tests, until one fails. So a mutant costs its
tests and, in ``numba_cpu``, the compilation of what it changes: numba caches nothing of that, since the code says that
it is from no file. The parent never runs a test and has no thread; what a mutant does ends with its child, which has
limits of time and memory.

As a program it takes a folder for what is written, how many children may be at work, a seed and test files, and, on
standard input, one job a line. First it runs the tests of each file as it is, by the same way; then it answers with one
line a job on standard output, in the order in which they end. ``run.py`` is who asks.
"""

from __future__ import annotations

import ast
import importlib
import json
import math
import os
import resource
import select
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from ddtree.property_tests.project.mutants import PACKAGE, implementation_of, op_of, read

NOWHERE = "<mutant>"
"""The file that a mutant's code is from: numba has no place for a cache of such code."""

MOST_MEMORY = 4 << 30
"""What a child may take beyond what the parent has."""

IMPORTING = "when it was imported"

SPAWNING = ("importing", "nowhere", "forked")
"""In names of tests that start a process, which would not hold the mutant."""


LAWS_OF_ROUNDS = {
    **dict.fromkeys(("guard_draft", "commit_round", "emitted_tokens"), "test_resident"),
    **dict.fromkeys(("ngram_draft", "oracle_draft", "append_context", "block_attention"), "test_resident_drafters"),
    **dict.fromkeys(("tree_inputs", "tree_mask", "compact_layers"), "test_model_inputs"),
}
"""Functions that rounds and drafters alone call, and the file of the laws that they must keep."""


def statements_to_run(before: str, after: str) -> list[ast.stmt]:
    """Statements of a module that a change touches: those that differ, and those that name what these define."""
    old, new = ast.parse(before).body, ast.parse(after).body
    if len(old) != len(new) or before == after:
        return new
    touched: set[str] = set()
    found = []
    for one, other in zip(old, new, strict=True):
        named = {node.id for node in ast.walk(other) if isinstance(node, ast.Name)}
        if ast.dump(one) != ast.dump(other) or named & touched:
            found.append(other)
            touched |= names_of(other)
    return found


def names_of(statement: ast.stmt) -> set[str]:
    """Names that a statement of a module defines."""
    if isinstance(statement, ast.FunctionDef | ast.ClassDef):
        return {statement.name}
    return {node.id for node in ast.walk(statement) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}


def load(file: str, source: str, items: list[pytest.Item]) -> None:
    """Run a changed source in its module, and give what it defines to all who had imported it from there."""
    module = sys.modules[module_of(file)]
    statements = statements_to_run(read(file), source)
    names = set().union(*map(names_of, statements))
    old = {name: vars(module)[name] for name in names}
    exec(compile(ast.Module(statements, []), NOWHERE, "exec"), vars(module))
    for holder in [m for name, m in sys.modules.items() if name.startswith("ddtree") and m is not module]:
        for name in names:
            if vars(holder).get(name) is old[name]:
                setattr(holder, name, vars(module)[name])
    for item in items:
        params = getattr(getattr(item, "callspec", None), "params", {})
        for key, value in params.items():
            for name in names:
                if value is old[name]:
                    params[key] = vars(module)[name]


def tests_of(file: str, items: list[pytest.Item], *, by_hand: bool) -> list[pytest.Item]:
    """The tests that a change of ``file`` must break."""
    op, backend = op_of(file), implementation_of(file)
    return [item for item in items if is_about(item, op, backend, by_hand=by_hand)]


def is_about(item: pytest.Item, op: str, backend: str, *, by_hand: bool) -> bool:
    """Whether a test is one of an operation on a backend, or of a function."""
    from ddtree.property_tests._backends import Operation
    from ddtree.protocols import OPS

    if op in LAWS_OF_ROUNDS:
        return item.path.stem == LAWS_OF_ROUNDS[op]
    if item.path.parent.name == "project":
        own = not by_hand and (op not in OPS or backend != "reference")
        return own and op in functions_named_by(item) and not any(word in item.name for word in SPAWNING)
    params = getattr(getattr(item, "callspec", None), "params", {}).values()
    about = [value for value in params if isinstance(value, Operation)]
    if about:
        names = {a.name for a in about}
        return all(a.backend == backend for a in about) and (op in names or (op not in OPS and "model" in names))
    if op not in OPS:
        return item.path.stem in ("test_layers", "test_model")
    return item.path.stem == f"test_{op}"


def functions_named_by(item: pytest.Item) -> set[str]:
    """What the code of a test and of its helpers names."""
    function = item.function  # type: ignore[attr-defined]
    function = getattr(getattr(function, "hypothesis", None), "inner_test", function)
    names = set(function.__code__.co_names)
    helpers = [function.__globals__.get(name) for name in names]
    names |= {name for helper in helpers if hasattr(helper, "__code__") for name in helper.__code__.co_names}
    names |= {text.rpartition(".")[2] for text in function.__code__.co_consts if isinstance(text, str)}  # modules
    if item.path.stem == "test_checks":  # of the public layer: who looks at values
        names |= {"find_draft_fault"} if "build_tree" in names else set()
        names |= {"find_tree_fault"} if {"accept_tree", "attend"} & names else set()
    return names


@dataclass
class Child:
    """A process at work on a mutant."""

    job: dict[str, Any]
    pid: int
    pipe: int
    ends: float
    told: bytes = b""


@dataclass
class Forks:
    """The pytest plugin: in place of running the tests once, it runs some of them for each job."""

    jobs: list[dict[str, Any]]
    workers: int
    answers: Any
    seconds: dict[str, float] = field(default_factory=dict)
    failed: str = ""

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection(self) -> None:
        """No example is kept or shrunk: it is enough that one fails."""
        from hypothesis import Phase, settings

        settings.register_profile("mutants", settings(), database=None, phases=[Phase.explicit, Phase.generate])
        settings.load_profile("mutants")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Note how long a test took, and the first that failed."""
        name = name_of(report)
        self.seconds[name] = self.seconds.get(name, 0.0) + report.duration
        if report.failed and not self.failed:
            self.failed = name

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        """Answer every job; none if the tests do not hold for the files as they are."""
        from ddtree.property_tests import harness

        harness._origin()  # once, and not in every child
        unchanged = {suite_of(job): job | {"id": "", "source": read(job["file"])} for job in self.jobs}
        known = {}
        for job, answer in self._answers(session, list(unchanged.values())):
            if answer["verdict"] != "survived" or set(answer["seconds"]) == {IMPORTING}:
                self._tell(refused=f"{job['file']} as it is fails: {answer['by'] or 'it has no test'}")
                return True
            known[suite_of(job)] = {"seconds": answer["seconds"], "wall": 60 + 20 * sum(answer["seconds"].values())}
        for job, answer in self._answers(session, [job | known[suite_of(job)] for job in self.jobs]):
            self._tell(id=job["id"], verdict=answer["verdict"], by=answer["by"])
        return True

    def _answers(
        self, session: pytest.Session, jobs: list[dict[str, Any]]
    ) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
        """Jobs and what came of them, in the order in which they end."""
        waiting, children = jobs[::-1], list[Child]()
        while waiting or children:
            while waiting and len(children) < self.workers:
                children.append(self._start(waiting.pop(), session))
            ready, _, _ = select.select([child.pipe for child in children], [], [], 1.0)
            for child in children.copy():
                late = time.monotonic() > child.ends
                said = os.read(child.pipe, 1 << 16) if child.pipe in ready and not late else b""
                child.told += said
                if late or (child.pipe in ready and not said):
                    children.remove(child)
                    yield child.job, end_of(child, late=late)

    def _start(self, job: dict[str, Any], session: pytest.Session) -> Child:
        reading, writing = os.pipe()
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                os.close(reading)
                answer = json.dumps(self._run(job, session, writing)) + "\n"
                with os.fdopen(writing, "w", encoding="utf-8") as pipe:
                    pipe.write(answer)
                status = 0
            finally:
                os._exit(status)
        os.close(writing)
        return Child(job, pid, reading, time.monotonic() + job.get("wall", 3600))

    def _run(self, job: dict[str, Any], session: pytest.Session, pipe: int) -> dict[str, Any]:
        """In the child: the verdict, and which test gave it."""
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        taken = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (taken + MOST_MEMORY, taken + MOST_MEMORY))
        items = tests_of(job["file"], session.items, by_hand=job["by_hand"])
        usual = job.get("seconds", {})
        # the suite's first, those of the public layer last, and of each the quickest first
        files = ("test_numba_cpu", "test_checks")
        items.sort(key=lambda item: (item.path.stem in files, item.path.stem == files[1], usual.get(name_of(item), 0)))
        os.write(pipe, f"{IMPORTING}\n".encode())
        start = time.monotonic()
        allow(usual.get(IMPORTING))
        try:
            load(job["file"], job["source"], items)
        except Exception as error:
            return {"verdict": "caught", "by": f"{IMPORTING} ({type(error).__name__})"}
        self.seconds[IMPORTING] = time.monotonic() - start
        for item, following in zip(items, [*items[1:], None], strict=True):
            os.write(pipe, f"{name_of(item)}\n".encode())
            allow(usual.get(name_of(item)))
            session.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
            if self.failed:
                return {"verdict": "caught", "by": self.failed}
        return {"verdict": "survived", "by": "", "seconds": self.seconds}

    def _tell(self, **answer: Any) -> None:
        self.answers.write(json.dumps(answer) + "\n")
        self.answers.flush()


def allow(usual: float | None) -> None:
    """Let this process work for some times what is usual, in seconds, from now on; None is no limit."""
    if usual is not None:
        limit = math.ceil(time.process_time() + 4 + 8 * usual)
        resource.setrlimit(resource.RLIMIT_CPU, (limit, resource.RLIM_INFINITY))


def end_of(child: Child, *, late: bool) -> dict[str, Any]:
    """What came of a job: what its child said last, or how that ended."""
    if late:
        os.kill(child.pid, signal.SIGKILL)
    os.close(child.pipe)
    _, status = os.waitpid(child.pid, 0)
    last = child.told.decode().splitlines()[-1]
    code = os.waitstatus_to_exitcode(status)
    if code == 0:
        answer: dict[str, Any] = json.loads(last)
        return answer
    if late or code == -signal.SIGXCPU:
        return {"verdict": "timed out", "by": last}
    how = signal.Signals(-code).name if code < 0 else "an error outside of tests"
    return {"verdict": "caught", "by": f"{last} ({how})"}


def suite_of(job: dict[str, Any]) -> tuple[str, bool]:
    """What decides which tests a job has."""
    return job["file"], job["by_hand"]


def name_of(test: Any) -> str:
    """The last part of a test's path, and its name, of an item or of a report."""
    name: str = test.nodeid.rpartition("/")[2]
    return name


def modules_for(jobs: list[dict[str, Any]]) -> list[str]:
    """Modules to import before the first fork: what is mutated, and what machine-made mutants' tests call besides."""
    files = {job["file"] for job in jobs}
    if not all(job["by_hand"] for job in jobs):
        files |= {str(path.relative_to(PACKAGE)) for path in (PACKAGE / "kernels/numba_cpu").glob("[!_]*.py")}
    return sorted(map(module_of, files))


def module_of(file: str) -> str:
    """The name of the module that is a file of the package."""
    return f"ddtree.{file.removesuffix('.py').replace('/', '.')}"


def main() -> None:
    """Import, collect the tests, and answer."""
    folder, workers, seed, *files = sys.argv[1:]
    # what pytest and the tests print is nobody's answer
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    with open(os.devnull, "w") as silence:
        os.dup2(silence.fileno(), 1)
    jobs = [json.loads(line) for line in sys.stdin]
    for module in modules_for(jobs):
        importlib.import_module(module)
    # messages are read by nobody either, so that asserts need not explain themselves
    options = ["-p", "no:cacheprovider", "-p", "no:faulthandler", "--assert=plain", "-s", "-q"]
    options += [f"--ddtree-seed={seed}", f"--ddtree-failures={folder}/failures"]
    tests = [str(PACKAGE / "property_tests" / file) for file in files]
    status = pytest.main([*options, *tests], plugins=[Forks(jobs, int(workers), answers)])
    answers.close()
    sys.exit(status)


if __name__ == "__main__":
    main()
