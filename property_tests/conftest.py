"""What every test of the suite shares: Hypothesis profiles, the backends under test, and the report header.

A test names the operations that it tests as arguments (``def test_…(build_tree, …)``) and runs once for each backend
that has them. A backend that lacks an operation gives no test of it, and the header says so; one that has it and cannot
run here gives a skipped test with the reason.
"""

import os
from importlib.metadata import version

import pytest
from hypothesis import settings

from ddtree.property_tests._backends import chosen_backends, operations, ops_of
from ddtree.protocols import OPS

COMMON = settings(
    deadline=None,  # first call compiles
    report_multiple_bugs=False,
)
settings.register_profile("dev", COMMON, max_examples=50)
settings.register_profile("ci", COMMON, max_examples=50, derandomize=True, print_blob=True)
settings.register_profile("simulator", COMMON, max_examples=25)  # or SIMULATED_EXAMPLES, where they are cheap
settings.register_profile("long", COMMON, max_examples=5_000, print_blob=True)
SIMULATED_EXAMPLES = {"accept_tree": 110, "compact_cache": 110, "tree_positions": 110, "visibility_words": 110}
"""Examples a law in the profile ``simulator``, of the operations in which threads do little and never wait long."""
PROFILE = os.environ.get("DDTREE_PROFILE", "ci" if os.environ.get("CI") == "true" else "dev")
settings.load_profile(PROFILE)


def pytest_configure(config):
    config.addinivalue_line("markers", "beside_reference: compares with the reference, so is not run on it")
    config.addinivalue_line("markers", "large: has more threads at work than the simulator gets through in seconds")


def pytest_collection_modifyitems(items):
    if PROFILE != "simulator":
        return
    laws = {item.obj: item.fixturenames for item in items if hasattr(getattr(item, "obj", None), "hypothesis")}
    for law, names in laws.items():
        ops = [name for name in names if name in OPS]
        if ops and all(op in SIMULATED_EXAMPLES for op in ops):
            settings(max_examples=min(SIMULATED_EXAMPLES[op] for op in ops))(law)


def pytest_report_header(config):
    lines = [f"ddtree: profile {PROFILE}, " + ", ".join(f"{p} {version(p)}" for p in ("numpy", "numba", "hypothesis"))]
    for backend in chosen_backends(config):
        lacks = [op for op in OPS if op not in ops_of(backend)]
        if lacks:
            what = ", ".join(lacks) if len(lacks) < len(OPS) else "operation"
            lines.append(f"ddtree: {backend} has no {what}: not tested")
    return lines


def pytest_generate_tests(metafunc):
    for name in OPS:
        if name in metafunc.fixturenames:
            found = operations(name, chosen_backends(metafunc.config))
            if metafunc.definition.get_closest_marker("beside_reference"):
                found = ((op, why) for op, why in found if op.backend != "reference")
            skip = pytest.mark.skip
            metafunc.parametrize(
                name, [pytest.param(op, id=op.backend, marks=[skip(reason=why)] if why else []) for op, why in found]
            )
