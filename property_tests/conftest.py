"""What every test of the suite shares: Hypothesis profiles, the backends under test, and the case that a failure keeps.

A test names the operations that it tests as arguments (``def test_…(build_tree, …)``) and runs once for each backend
that has them; ``engine_backend`` and ``model_backend`` are backends with all that an engine or a model needs. Without
options, all tests run, on all backends of ours; with ``--ddtree-backend`` or ``--ddtree-ops``, those alone that are
about a backend. One that cannot run here gives skipped tests with the reason.
"""

import functools
import hashlib
import json
import math
import os
import re
from importlib.metadata import version
from pathlib import Path

import hypothesis
import numpy as np
import pytest
from hypothesis import Phase, settings
from hypothesis.errors import DidNotReproduce, HypothesisException, InvalidArgument

from ddtree._pytest import CALLS, EXAMPLES, ON, chosen_ops
from ddtree.property_tests import _backends, harness
from ddtree.property_tests._backends import Operation, chosen_backends, kind_of, operations, ops_of, why_not
from ddtree.property_tests.cases import Law, add_to, named_leaves
from ddtree.property_tests.compare import BeyondToleranceError
from ddtree.protocols import OPS

COMMON = settings(
    deadline=None,  # first call compiles
    report_multiple_bugs=False,
    phases=set(Phase) - {Phase.explain},  # it would name the lines that write the case
    print_blob=True,  # in what a failure says, from where it goes into the case
)
settings.register_profile("dev", COMMON, max_examples=50)
settings.register_profile("ci", COMMON, max_examples=50, derandomize=True)
settings.register_profile("simulator", COMMON, max_examples=25)
settings.register_profile("long", COMMON, max_examples=5_000)
MORE_EXAMPLES = {
    # where examples are cheap, how many a law has in place of the profile's, by operation: in the simulator, those in
    # which threads do little and never wait long; else, those whose results are integers
    "simulator": {"accept_tree": 140, "compact_cache": 150, "tree_positions": 250, "visibility_words": 200},
    "dev": {
        "accept_tree": 1_200,
        "build_tree": 1_200,
        "choose_tokens": 1_200,
        "compact_cache": 1_200,
        "topk_log_probs": 1_200,
        "tree_positions": 2_500,
        "visibility_words": 2_500,
    },
}
MORE_EXAMPLES["ci"] = MORE_EXAMPLES["dev"]
EXAMPLES_OF_A_NAMED_BACKEND = 200
"""At most this many of them on what ``--ddtree-backend`` names: it may be slow, and its author waits."""
PROFILE = os.environ.get("DDTREE_PROFILE", "ci" if os.environ.get("CI") == "true" else "dev")
settings.load_profile(PROFILE)

HERE = Path(__file__).parent
ENGINE_OPS = {"build_tree", "tree_positions", "choose_tokens", "accept_tree", "compact_cache"}
CARRIERS = {
    # what runs on a backend as a whole, and which backends can carry it
    "engine": lambda backend: set(ops_of(backend)) >= ENGINE_OPS and kind_of(backend) in ("numpy", "torch"),
    "model": lambda backend: "verify_attention" in ops_of(backend) and kind_of(backend) in ("numpy", "cupy"),
}


def pytest_configure(config):
    config.addinivalue_line("markers", "beside_reference: compares with the reference, so is not run on it")
    config.addinivalue_line("markers", "large: has more threads at work than the simulator gets through in seconds")
    examples = config.getoption("--ddtree-examples")
    if examples is not None:
        settings.register_profile("examples", settings.get_profile(PROFILE), max_examples=examples)
        settings.load_profile("examples")


def pytest_report_header(config):
    return f"ddtree: profile {PROFILE}, " + ", ".join(f"{p} {version(p)}" for p in ("numpy", "numba", "hypothesis"))


def pytest_generate_tests(metafunc):
    chosen, ops = chosen_backends(metafunc.config), chosen_ops(metafunc.config)
    found = {name: list(operations(name, chosen)) for name in OPS if ops is None or name in ops}
    if ops is None:
        # where nothing is said, one backend carries these: the reference for the engine, any for the model
        engine = chosen if metafunc.config.getoption("--ddtree-backend") else ("reference",)
        for what, backends in (("engine", engine), ("model", chosen)):
            found[f"{what}_backend"] = [(Operation(what, b), why_not(b)) for b in backends if CARRIERS[what](b)]
    for name in (*OPS, *(f"{what}_backend" for what in CARRIERS)):
        if name in metafunc.fixturenames:
            those = found.get(name, [])
            if metafunc.definition.get_closest_marker("beside_reference"):
                those = [(op, why) for op, why in those if op.backend != "reference"]
            skip = pytest.mark.skip
            metafunc.parametrize(
                name, [pytest.param(op, id=op.backend, marks=[skip(reason=why)] if why else []) for op, why in those]
            )


def pytest_collection_modifyitems(config, items):
    """Say of each test what it is about; leave out what was not asked for."""
    only_backends = config.getoption("--ddtree-backend") or chosen_ops(config)
    seed, left_out = config.getoption("--ddtree-seed"), []
    for item in items:
        if HERE not in item.path.parents:
            continue  # someone's own test in the same run
        about = under_test(item)
        whole = all(isinstance(op, Operation) for op in about)  # pytest puts a mark in the place of an empty list
        if only_backends and not (about and whole):
            left_out.append(item)
        elif whole:
            item.user_properties.append((ON, [[op.name, op.backend] for op in about]))
        if seed is not None and hypothesis.is_hypothesis_test(item.obj):
            hypothesis.seed(seed)(item.obj)
    if config.getoption("--ddtree-examples") is None:
        most = EXAMPLES_OF_A_NAMED_BACKEND if config.getoption("--ddtree-backend") else math.inf
        _more_examples_where_they_are_cheap(items, most)
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in set(left_out)]


def _more_examples_where_they_are_cheap(items, most):
    more = MORE_EXAMPLES.get(PROFILE, {})
    laws = {item.obj: item for item in items if hasattr(getattr(item, "obj", None), "hypothesis")}
    for law, item in laws.items():
        ops = [name for name in item.fixturenames if name in OPS]
        if ops and all(op in more for op in ops):
            settings(max_examples=min(most, *(more[op] for op in ops)))(law)


def under_test(item):
    """The operations, engines and models that a test is about."""
    params = getattr(getattr(item, "callspec", None), "params", {})
    return [value for name, value in params.items() if name in OPS or name.removesuffix("_backend") in CARRIERS]


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem):
    """Count the calls of a test, and let it keep the case if it fails: of a property, every failing example."""
    if not _in_the_suite(pyfuncitem):
        return (yield)
    if pyfuncitem.config.getoption("--ddtree-again"):
        return (yield from again(pyfuncitem))
    folder, seed, specs = (pyfuncitem.config.getoption(f"--ddtree-{what}") for what in ("failures", "seed", "backend"))
    about = {
        "test": f"{pyfuncitem.path.name}::{pyfuncitem.name}",
        "module": pyfuncitem.module.__name__,
        "backends": json.dumps(specs or []),
        **({} if seed is None else {"seed": str(seed)}),
    }
    path = harness.case_path(Path(folder), pyfuncitem.name.removeprefix("test_"))
    is_property = hypothesis.is_hypothesis_test(pyfuncitem.obj)
    holder, name = (pyfuncitem.obj.hypothesis, "inner_test") if is_property else (pyfuncitem, "obj")
    test = getattr(holder, name)
    examples = Examples(under_test(pyfuncitem)) if is_property else None
    setattr(holder, name, keeping_its_case(test, lambda more: harness.keep(path, about | more), examples))
    before = _backends.CALLS.copy()
    try:
        return (yield)
    except Exception as error:
        blob = blob_in(error)
        if blob and path.is_file():
            add_to(path, {"blob": blob})
        raise
    finally:
        setattr(holder, name, test)
        pyfuncitem.user_properties.append((CALLS, dict(_backends.CALLS - before)))
        if examples:
            pyfuncitem.user_properties.append((EXAMPLES, examples.counts()))


def _in_the_suite(item):
    return HERE in item.path.parents and HERE / "project" not in item.path.parents


def blob_in(error):
    """Hypothesis's version and its blob of the failing example, from what it adds to the error; None if it has none."""
    for note in getattr(error, "__notes__", ()):
        found = re.search(r"@reproduce_failure\('([^']+)', b'([^']+)'\)", note)
        if found:
            return " ".join(found.groups())
    return None


def again(item):
    """Run a test on the one example that the file of ``--ddtree-again`` holds: it fails as it did, or it now passes."""

    def stop(why):
        pytest.exit(f"--ddtree-again: {why}", returncode=pytest.ExitCode.USAGE_ERROR)

    try:
        law = Law.read(Path(item.config.getoption("--ddtree-again")))
    except (OSError, ValueError) as error:
        stop(error)
    if law.blob and hypothesis.is_hypothesis_test(item.obj):
        if law.blob[0] != hypothesis.__version__:
            stop(f"the example is one of Hypothesis {law.blob[0]}, and {hypothesis.__version__} is installed")
        hypothesis.reproduce_failure(*law.blob)(item.obj)
    try:
        return (yield)
    except DidNotReproduce as error:
        if "completed successfully" not in str(error):
            stop(error)
        return True
    except InvalidArgument as error:  # the blob is none
        stop(error)


class Examples:
    """The drawn examples on which a law held: told apart by what the operations were given, so that each counts once.

    An example counts for the first of the law's operations that it called; where it called none, it does not count.
    """

    def __init__(self, about):
        self.seen: dict[str, set[bytes]] = {repr(op): set() for op in about if op.name in OPS}

    def add(self, calls):
        called = {f"{case.op}[{case.backend}]" for case in calls}
        for op in self.seen:
            if op in called:
                self.seen[op].add(_digest(calls))
                return

    def counts(self):
        return {op: len(seen) for op, seen in self.seen.items()}


def _digest(calls):
    """A number for what the calls were given, down to types and shapes."""
    told = hashlib.blake2b(digest_size=16)
    for case in calls:
        told.update(f"{case.op}[{case.backend}]".encode())
        for name, value in named_leaves("", case.arguments):
            if isinstance(value, np.ndarray):
                told.update(f"{name} {value.dtype} {value.shape}".encode() + value.tobytes())
            else:
                told.update(f"{name} {value!r}".encode())
    return told.digest()


def keeping_its_case(test, keep, examples=None):
    """The same test; what it raises says where the case is, and what it holds on is counted."""

    @functools.wraps(test)
    def kept(*args, **kwargs):
        __tracebackhide__ = True
        _backends.RECENT.clear()
        try:
            result = test(*args, **kwargs)
            if examples:
                examples.add(_backends.RECENT)
            return result
        except HypothesisException:  # an example that is set aside
            raise
        except Exception as error:
            more = {"failed": harness.first_line(f"{type(error).__name__}: {error}")}
            if isinstance(error, BeyondToleranceError):
                more["tolerance"] = error.tolerance
            for line in keep(more):
                error.add_note(line)
            raise

    return kept
