"""A backend's time beside its peers', in one run.

A backend is timed on nothing that it does wrong: its result on the timed inputs is compared first, after
``ddtree bench`` has compared it on drawn ones. Of the peers, those of attention are compared too.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numba
import numpy as np

from ddtree import reference
from ddtree.analysis.benchmarks.cases import Case
from ddtree.analysis.benchmarks.peers import Peer, peers_for, tensor
from ddtree.analysis.benchmarks.timing import Ceilings, DeviceTimer, Times, time_on_host
from ddtree.analysis.environment import devices, kernel_sources, versions
from ddtree.arrays import to_numpy
from ddtree.backends import BACKENDS, Backend
from ddtree.kernels import numba_cpu
from ddtree.property_tests import cases as suite
from ddtree.property_tests.cases import map_arrays
from ddtree.property_tests.harness import difference, first_line
from ddtree.property_tests.tolerances import TOLERANCE
from ddtree.protocols import OPS

__all__ = ["NotEqualError", "Report", "Row", "exact_attention", "measure", "some_rows", "worst_error"]

FAR = 2e-2
"""A peer's attention must lie this near to the exact one, of the row's size: bfloat16 rounds by 4e-3."""


class NotEqualError(RuntimeError):
    """A result is wrong: nothing is timed."""


@dataclass
class Row:
    """One case: who took how long.

    Attributes
    ----------
    name, sizes, flops, bytes
        Of the case.
    times : dict of str to Times
        By who it was: the backend first, then its peers.
    skipped : dict of str to str
        Peers that could not do it, and why.
    """

    name: str
    label: str
    sizes: dict[str, Any]
    flops: float
    bytes: float
    times: dict[str, Times] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)


@dataclass
class Report:
    """All of a run.

    Attributes
    ----------
    backend : str
        Whose times come first.
    machine : dict
        Devices, versions, and the hash of the backend's sources where it is one of ours.
    ceilings : Ceilings or None
        What the GPU itself did in this run; None on a CPU.
    rows : list of Row
        One a case.
    interrupted : bool
        Some cases were not reached.
    """

    backend: str
    machine: dict[str, Any]
    ceilings: Ceilings | None
    rows: list[Row]
    interrupted: bool = False


def measure(
    backend: Backend,
    cases: Sequence[Case],
    *,
    repeats: int = 30,
    slow_peers: bool = False,
    on_case: Callable[[Case], Any] = lambda case: None,
) -> Report:
    """Time a backend and its peers on each case; an interrupted run reports the cases that it got through.

    Raises
    ------
    NotEqualError
        The backend's result is not the reference's; or a peer's is far from it.
    """
    on_gpu = backend.array_kind == "cupy" or str(getattr(backend.namespace, "device", "cpu")).startswith("cuda")
    timer = DeviceTimer() if on_gpu else None
    report = Report(backend.name, _machine(backend.name), timer.ceilings() if timer else None, [])
    try:
        for case in cases:
            on_case(case)
            report.rows.append(_measure_case(backend, case, timer, repeats, slow_peers))
    except KeyboardInterrupt:
        report.interrupted = True
    return report


def _measure_case(backend: Backend, case: Case, timer: DeviceTimer | None, repeats: int, slow_peers: bool) -> Row:
    inputs = case.make()
    row = Row(case.name, case.label, case.sizes, case.flops, case.bytes)
    ops = {op: backend.op(op) if op in OPS else getattr(backend.namespace, op) for op in case.ops}
    native = _map(inputs, lambda array: _native(array, backend))
    try:
        result = _map(case.run(ops, native), to_numpy)
    except Exception as error:  # whatever a backend of one's own raises at this size
        raise NotEqualError(
            f"{case.name} of {backend.name} on {case.label} raised {type(error).__name__}: {first_line(error)}"
        ) from error
    exact = _check(case, inputs, native, result, backend.name)
    library = "torch" if backend.array_kind == "torch" else "cupy"

    def ours() -> Any:
        return case.run(ops, native)

    row.times[backend.name] = timer.time(ours, repeats, library=library) if timer else time_on_host(ours, repeats)
    if timer is None and backend.name != "numba_cpu":
        compiled, copies = {op: getattr(numba_cpu, op) for op in case.ops}, _map(inputs, np.array)
        row.times["numba_cpu"] = time_on_host(lambda: case.run(compiled, copies), repeats)
    for peer in peers_for(case.name, on_gpu=timer is not None, slow=slow_peers and case.slow_peers):
        if importlib.util.find_spec(peer.library) is None or importlib.util.find_spec("torch") is None:
            row.skipped[peer.name] = f"{peer.library} is not installed"
            continue
        try:
            row.times[peer.name] = _time_peer(peer, case, inputs, exact, timer, repeats)
        except NotEqualError:
            raise
        except Exception as error:  # out of memory, or a compiler's limits: the peer's own, and worth a line
            row.skipped[peer.name] = f"{type(error).__name__}: {first_line(error)}"
    return row


def _time_peer(
    peer: Peer, case: Case, inputs: dict[str, Any], exact: Any, timer: DeviceTimer | None, repeats: int
) -> Times:
    torch = importlib.import_module("torch")
    run = peer.prepare(torch, inputs, "cuda" if timer else "cpu")
    if exact is not None:
        rows, expected = exact
        error = worst_error(to_numpy(run().float().cpu())[rows], expected)
        if not error <= FAR:
            raise NotEqualError(f"{peer.name} on {case.label}: the worst row is off by {error:.2g}")
    if timer is None:
        return time_on_host(run, repeats)
    torch.cuda.synchronize()
    return timer.time(run, min(repeats, 10) if peer.waits else repeats, library="torch", waits=peer.waits)


def _check(case: Case, inputs: dict[str, Any], native: dict[str, Any], result: Any, who: str) -> Any:
    """Raise unless the result of the timed inputs is right; of attention, return some exact rows and where they are."""
    if case.name == "verify_attention":
        rows = some_rows(inputs)
        exact = exact_attention(inputs, rows)
        error = worst_error(result[rows].astype(np.float64), exact)
        allowed = FAR if inputs["q"].dtype.itemsize == 2 else FAR / 1000
        if not error <= allowed:
            raise NotEqualError(f"{case.name} of {who} on {case.label}: the worst of some rows is off by {error:.2g}")
        return rows, exact
    if case.fault is not None:
        told = case.fault(inputs, result)
        if told:
            raise NotEqualError(f"{case.name} of {who} on {case.label}: {told}")
        return None
    for call in _calls(case, inputs, native, result, who):
        told = _top_k_fault(call) if call.op == "topk_log_probs" else difference(call)
        if told:
            raise NotEqualError(f"{call.op} of {who} on {case.label}: {told}")
    return None


def _top_k_fault(call: suite.Case) -> str:
    """As the suite compares, but with the reference: brute force takes half a second a row of a whole vocabulary."""
    (values, ids), (exact, exact_ids) = call.got, reference.topk_log_probs(**call.arguments)
    if not np.array_equal(ids, exact_ids):
        return f"{np.count_nonzero(ids != exact_ids)} token ids differ"
    logits = np.take_along_axis(call.arguments["logits"].astype(np.float64), ids.astype(np.int64), -1)
    scale = np.maximum(1.0, np.maximum(np.abs(logits), np.abs(logits - exact)))
    over = np.abs(values - exact) - TOLERANCE["topk_log_probs", "float32"].bound * scale
    return "" if (over <= 0).all() else f"a log-prob is off by {over.max():.2g} more than allowed"


def _calls(case: Case, inputs: dict[str, Any], native: dict[str, Any], result: Any, who: str) -> Iterator[suite.Case]:
    """What a case's run did, as calls of single operations with their results."""
    if case.name == "logits to tree":
        log_probs, token_ids, tree, positions = result
        given = {"log_probs": log_probs, "token_ids": token_ids, "root_token_ids": inputs["roots"]}
        top = {"logits": inputs["logits"], "k": inputs["k"]}
        yield suite.Case("topk_log_probs", who, top, got=(log_probs, token_ids))
        yield suite.Case("build_tree", who, given | {"budget": inputs["budget"]}, got=tree)
        moved = {"depths": tree.depths, "prefix_lens": inputs["prefix_lens"]}
        yield suite.Case("tree_positions", who, moved, got=positions)
    elif case.name == "accept and compact":
        given = {"tree": inputs["tree"], "target_token_ids": inputs["choices"]}
        given |= {name: inputs[name] for name in ("remaining", "stop_token_ids")}
        yield suite.Case("accept_tree", who, given, got=result)
        moved = {name: inputs[name] for name in ("kv_cache", "page_table", "prefix_lens")} | {"acceptance": result}
        yield suite.Case("compact_cache", who, moved, got=to_numpy(native["kv_cache"]))
    else:
        yield suite.Case(case.name, who, inputs, got=result)


def some_rows(inputs: dict[str, Any]) -> tuple[Any, Any, Any]:
    """Places (request, node, head) of 32 rows of attention, the first and the last among them."""
    B, N, H, _ = inputs["q"].shape
    rng = np.random.default_rng(1)
    b, n, h = rng.integers(0, B, 32), rng.integers(0, N, 32), rng.integers(0, H, 32)
    b[0] = n[0] = h[0] = 0
    b[1], n[1], h[1] = B - 1, N - 1, H - 1
    used = n < inputs["tree"].node_counts[b]
    return b[used], n[used], h[used]


def exact_attention(inputs: dict[str, Any], rows: tuple[Any, Any, Any]) -> np.ndarray[Any, Any]:
    """Those rows of attention in float64: (rows, C)."""
    tree, cache, page = inputs["tree"], inputs["kv_cache"], inputs["kv_cache"].shape[1]
    result = []
    for b, n, h in zip(*rows, strict=True):
        prefix = int(inputs["prefix_lens"][b])
        words = tree.visibility_words[b, n]
        seen = [j for j in range(int(tree.node_counts[b])) if words[j // 32] >> np.uint32(j % 32) & np.uint32(1)]
        places = np.array([*range(prefix), *(prefix + j for j in seen)])
        keys = cache[inputs["page_table"][b, places // page], places % page].astype(np.float64)
        scores = inputs["scale"] * (keys @ inputs["q"][b, n, h].astype(np.float64))
        weights = np.exp(scores - scores.max())
        result.append(weights / weights.sum() @ keys[:, : inputs["kv_lora_rank"]])
    return np.array(result)


def worst_error(rows: np.ndarray[Any, Any], exact: np.ndarray[Any, Any]) -> float:
    """The largest ‖row − exact‖ / ‖exact‖; NaN where a row holds one."""
    return float((np.linalg.norm(rows - exact, axis=-1) / np.linalg.norm(exact, axis=-1)).max())


def _native(array: Any, backend: Backend) -> Any:
    if backend.array_kind == "cupy":
        return importlib.import_module("cupy").asarray(array)
    if backend.array_kind == "torch":
        return tensor(importlib.import_module("torch"), array, getattr(backend.namespace, "device", "cpu"))
    return array.copy()  # which may be written into


def _map(value: Any, change: Callable[[Any], Any]) -> Any:
    if isinstance(value, dict):
        return {name: map_arrays(item, change) for name, item in value.items()}
    return map_arrays(value, change)


def _machine(backend: str) -> dict[str, Any]:
    found: dict[str, Any] = {"devices": devices(), "versions": {k: v for k, v in versions().items() if v}}
    found["threads"] = {"numba": int(numba.config.NUMBA_NUM_THREADS)}  # type: ignore[attr-defined]
    if importlib.util.find_spec("torch") is not None:
        found["threads"]["torch"] = int(importlib.import_module("torch").get_num_threads())
    if hasattr(os, "getloadavg"):
        found["load"] = round(os.getloadavg()[0], 1)
    if backend in BACKENDS:
        found |= kernel_sources(backend)
    return found
