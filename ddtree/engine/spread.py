"""Many prompts over several devices: one process a device, or any executor, and the tokens of one engine.

A worker builds its engine once and keeps it. Prompts go out in small shares as workers come free, the longest first, so
that no device is left alone with the longest at the end.
"""

from __future__ import annotations

import contextlib
import math
import multiprocessing
import os
import pickle
import signal
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, BrokenExecutor, Executor, Future, ProcessPoolExecutor, wait
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ddtree.checks import INT32_MAX, integer, listed, real
from ddtree.engine.engine import Engine, Mode
from ddtree.engine.records import Emission, FinishReason, Generation
from ddtree.tokens import token_row

__all__ = ["FactoryFailedError", "RequestsFailedError", "generate_many", "visible_devices"]


class FactoryFailedError(RuntimeError):
    """``make_engine`` raised in a worker."""


class RequestsFailedError(RuntimeError):
    """Some requests could not be continued; the tokens of all others are in ``generation``.

    Attributes
    ----------
    reasons : dict of int to str
        Why, by request: its index among the prompts.
    generation : Generation
        Everything that was committed. Of a request that failed, the tokens until then, as far as its worker could still
        tell them, and the finish reason "error".
    """

    def __init__(self, message: str, reasons: dict[int, str], generation: Generation) -> None:
        super().__init__(message)
        self.reasons, self.generation = reasons, generation


def generate_many(
    make_engine: Callable[[], Engine],
    prompts: Iterable[ArrayLike],
    max_new_tokens: int,
    stop_token_ids: Iterable[int] = (),
    *,
    devices: Iterable[int | str] | None = None,
    executor: Executor | None = None,
    share: int = 8,
    temperature: float = 0.0,
    top_p: float = 1.0,
    seed: int = 0,
    mode: Mode = "tree",
    request_ids: Iterable[int] | None = None,
    on_emission: Callable[[Emission], None] | None = None,
    keep_rounds: bool | None = None,
) -> Generation:
    """Continue each prompt on whichever device is free: the generation that one engine would give.

    Tokens are those of :meth:`Engine.generate` with all prompts, in the prompts' order: exactly in float64, and to the
    contract's margin rule below it, since who shares a batch may change how a sum is rounded.

    Parameters
    ----------
    make_engine : callable
        Makes the engine, in the worker: a function of a module, or ``functools.partial`` of one with what it loads.
        It is pickled, and a worker that has built the same one before uses that again.
    prompts, max_new_tokens, stop_token_ids, temperature, top_p, seed, mode, keep_rounds
        As in :meth:`Engine.generate`.
    devices : sequence of int or str, optional
        GPUs by their number among the visible ones, one process each; "cpu" is a process that sees no GPU, and may
        stand there several times. By default every visible GPU.
    executor : concurrent.futures.Executor, optional
        Who does the work instead: a Dask cluster by ``client.get_executor()``, of dask-cuda's workers say, a pool of
        your own, MPI by ``mpi4py.futures``. Its workers see the devices that they see; ``devices`` is left out.
    share : int
        The most prompts that a worker is given at once, 1 and up: what its engine has in one batch, or some times that.
        The last shares are smaller.
    request_ids : sequence of int, optional
        Key of each request's noise; its index among the prompts if left out. A drafter is shown indices within a share.
    on_emission : callable, optional
        Called with one :class:`Emission` a request, all of its tokens, when its share is done.

    Returns
    -------
    Generation
        ``seconds`` are summed over the workers; ``rounds`` stand share by share.

    Raises
    ------
    ValueError, TypeError
        An argument, by name; or devices that are not there.
    RequestsFailedError
        A worker died, or its engine raised: the requests are named, and ``generation`` has the others. A share whose
        engine raises is tried again request by request, so that only those at fault fail.
    FactoryFailedError
        ``make_engine`` raised, in a worker that is named.

    Notes
    -----
    Whatever is raised once work has begun, by a callback or Ctrl-C too, has an attribute ``generation``, a
    :class:`Generation` of all that was done before. Processes that were started here are ended.

    A process that is started anew reads the script that started it: there, the call stands below
    ``if __name__ == "__main__"``.

    Examples
    --------
    >>> from concurrent.futures import ThreadPoolExecutor
    >>> from functools import partial
    >>> from ddtree.engine import ScriptedTarget
    >>> make_engine = partial(Engine, ScriptedTarget([range(20)] * 2, vocab_size=20))
    >>> with ThreadPoolExecutor(2) as pool:
    ...     rows = generate_many(make_engine, [[0, 1], [0]], 3, mode="autoregressive", executor=pool).tokens
    >>> [row.tolist() for row in rows]
    [[2, 3, 4], [1, 2, 3]]
    """
    tokens = [token_row(f"prompts[{i}]", prompt) for i, prompt in enumerate(listed("prompts", prompts))]
    for i, row in enumerate(tokens):
        if not row.size:
            raise ValueError(f"prompts[{i}] must have at least one token, got none: begin with a BOS token")
    keys = list(range(len(tokens))) if request_ids is None else listed("request_ids", request_ids)
    if len(keys) != len(tokens):
        raise ValueError(f"request_ids must have one entry a prompt, {len(tokens)}, got {len(keys)}")
    keys = [integer(f"request_ids[{i}]", key, 0, 2**63 - 1) for i, key in enumerate(keys)]
    if on_emission is not None and not callable(on_emission):
        raise TypeError(f"on_emission must be callable, got {type(on_emission).__name__}")
    share = integer("share", share, 1, INT32_MAX)
    options = {
        "max_new_tokens": integer("max_new_tokens", max_new_tokens, 1, INT32_MAX),
        "stop_token_ids": listed("stop_token_ids", stop_token_ids),
        "temperature": real("temperature", temperature, least=0.0),
        "top_p": real("top_p", top_p),
        "seed": integer("seed", seed, 0, 2**64 - 1),
        "mode": mode,
        "keep_rounds": keep_rounds,
    }
    work = _Work(tokens, keys, options, _pickled(make_engine), share, on_emission)
    with _lanes(devices, executor, len(tokens)) as lanes:
        return work.run(lanes)


def visible_devices() -> list[str]:
    """CUDA devices that this process may use, as ``CUDA_VISIBLE_DEVICES`` names them to a process of its own.

    Raises
    ------
    ValueError
        There is none, or CuPy, which counts them, is not installed.
    """
    try:
        import cupy

        count = int(cupy.cuda.runtime.getDeviceCount())
    except Exception as error:  # CuPy missing, or whatever the CUDA runtime raises without a driver
        raise ValueError(f"devices must name CUDA devices, and none can be used here ({error}): {_NO_GPU}") from error
    if not count:
        raise ValueError(f"devices must name CUDA devices, and none is visible: {_NO_GPU}")
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    return [str(i) for i in range(count)] if named is None else named.split(",")[:count]


_AT_ONCE = ", before it had done anything: in a script, the call must stand below if __name__ == '__main__'"
_NO_GPU = "pass devices=['cpu', 'cpu'] for processes without a GPU, or an executor"


# What goes on in the process that asked


@dataclass
class _Lane:
    """One way for shares to get done: an executor, and how many of them it is given at once."""

    name: str
    executor: Executor
    room: float
    workers: int
    used: bool = False
    """Whether a share has come back."""


@contextlib.contextmanager
def _lanes(devices: Iterable[int | str] | None, executor: Executor | None, count: int) -> Iterator[list[_Lane]]:
    """The caller's executor as one lane that takes everything, or a process of ours for each device."""
    if executor is not None:
        if devices is not None:
            raise ValueError(f"devices must be left out with an executor, whose workers have theirs, got {devices!r}")
        if not callable(getattr(executor, "submit", None)):
            raise TypeError(f"executor must be a concurrent.futures.Executor, got {type(executor).__name__}")
        yield [_Lane("the executor", executor, math.inf, 1)]
        return
    named = _device_names(devices)[: max(1, count)]
    context = multiprocessing.get_context("spawn")  # a process that uses CUDA must not be forked
    pools = [ProcessPoolExecutor(1, context, _enter, (visible,)) for _, visible in named]
    try:
        yield [_Lane(name, pool, 1, len(named)) for (name, _), pool in zip(named, pools, strict=True)]
    except BaseException:
        for pool in pools:
            _end(pool)
        raise
    finally:
        for pool in pools:
            pool.shutdown()


def _device_names(devices: Iterable[int | str] | None) -> list[tuple[str, str]]:
    """Of each device its name in messages and the ``CUDA_VISIBLE_DEVICES`` of its process."""
    if devices is None:
        return [(f"GPU {i}", visible) for i, visible in enumerate(visible_devices())]
    wanted = [devices] if isinstance(devices, str) else listed("devices", devices)
    for i, device in enumerate(wanted):
        if isinstance(device, str) and device != "cpu" and not (device.isascii() and device.isdigit()):
            raise ValueError(f"devices[{i}] must be a GPU's number or 'cpu', got {device!r}")
    if not wanted:
        raise ValueError("devices must have one entry or more, got none: leave it out for every visible GPU")
    visible = visible_devices() if any(device != "cpu" for device in wanted) else []
    named = []
    for i, device in enumerate(wanted):
        if device == "cpu":
            named.append((f"CPU process {i}", ""))
            continue
        if isinstance(device, str) and device.isascii() and device.isdigit():
            device = int(device)
        number = integer(f"devices[{i}]", device, 0, len(visible) - 1, "the visible GPUs")
        if any(name == f"GPU {number}" for name, _ in named):
            raise ValueError(f"devices[{i}] must be a GPU that is not named before, got {number} again")
        named.append((f"GPU {number}", visible[number]))
    return named


def _end(pool: ProcessPoolExecutor) -> None:
    """Have a pool's process end now, whatever it is doing."""
    processes = list((getattr(pool, "_processes", None) or {}).values())
    pool.shutdown(wait=False, cancel_futures=True)
    for process in processes:
        process.terminate()


def _pickled(make_engine: Callable[[], Engine]) -> bytes:
    if not callable(make_engine):
        raise TypeError(f"make_engine must be callable, as make_engine() -> Engine, got {type(make_engine).__name__}")
    try:
        return pickle.dumps(make_engine)
    except Exception as error:  # whatever an object's own __reduce__ raises
        raise TypeError(
            f"make_engine must be picklable, to be called in another process: a function of a module, or "
            f"functools.partial of one, got {make_engine!r} ({error})"
        ) from error


@dataclass
class _Work:
    """What is still to be handed out, what came back, and what failed."""

    tokens: list[NDArray[np.int32]]
    keys: list[int]
    options: dict[str, Any]
    factory: bytes
    share: int
    on_emission: Callable[[Emission], None] | None
    waiting: list[int] = field(default_factory=list)  # not handed out yet, in order
    alone: list[int] = field(default_factory=list)  # to be tried again, one by one
    done: dict[int, tuple[list[int], Generation]] = field(default_factory=dict)  # by the first of a share
    reasons: dict[int, str] = field(default_factory=dict)

    def run(self, lanes: list[_Lane]) -> Generation:
        """Hand out shares as lanes come free, until each request is done or has failed."""
        self.waiting = sorted(range(len(self.tokens)), key=lambda i: -len(self.tokens[i]))
        under_way: dict[Future[_Outcome], tuple[_Lane, list[int]]] = {}
        open_lanes = list(lanes)
        try:
            while (self._left and open_lanes) or under_way:
                for lane in list(open_lanes):
                    self._fill(lane, under_way, open_lanes)
                finished = wait(under_way, return_when=FIRST_COMPLETED).done if under_way else ()
                for future in finished:
                    lane, share = under_way.pop(future)
                    if not self._take(future, lane, share) and lane in open_lanes:
                        open_lanes.remove(lane)
        except BaseException as error:  # Ctrl-C, or what a callback raises: what is done is not lost
            for future in under_way:
                future.cancel()
            error.generation = self.generation()  # type: ignore[attr-defined]
            raise
        for request in (*self.waiting, *self.alone):
            self.reasons[request] = "no worker is left"
        generation = self.generation()
        if self.reasons:
            raise RequestsFailedError(_told(self.reasons), dict(sorted(self.reasons.items())), generation)
        return generation

    @property
    def _left(self) -> bool:
        return bool(self.waiting or self.alone)

    def _fill(self, lane: _Lane, under_way: dict[Future[_Outcome], Any], open_lanes: list[_Lane]) -> None:
        """Give a lane shares until it has no room."""
        while self._left and sum(of is lane for of, _ in under_way.values()) < lane.room:
            share = self._next(lane.workers)
            rows = [self.tokens[i] for i in share]
            keys = [self.keys[i] for i in share]
            try:
                future = lane.executor.submit(_continue, self.factory, rows, keys, self.options)
            except BrokenExecutor:  # its process died between two shares
                self.waiting = share + self.waiting
                open_lanes.remove(lane)
                return
            under_way[future] = lane, share

    def _next(self, workers: int) -> list[int]:
        """The next share: smaller towards the end, so that all workers finish together."""
        if not self.waiting:
            return [self.alone.pop(0)]
        size = min(self.share, math.ceil(len(self.waiting) / workers))
        share, self.waiting = self.waiting[:size], self.waiting[size:]
        return share

    def _take(self, future: Future[_Outcome], lane: _Lane, share: list[int]) -> bool:
        """Take in what became of a share; return whether the lane can go on."""
        try:
            outcome = future.result()
        except Exception as error:  # the worker, or what stands between: a process that died, a cluster's own errors
            told = f"{lane.name}: its worker died ({type(error).__name__}: {error})"
            self.reasons |= dict.fromkeys(share, told if lane.used else f"{told}{_AT_ONCE}")
            return not isinstance(error, BrokenExecutor)
        lane.used = True
        if outcome.kind == "arguments":
            raise {"TypeError": TypeError}.get(outcome.type, ValueError)(outcome.message)
        if outcome.kind == "factory":
            told = f"make_engine raised {outcome.type} on {lane.name}: {outcome.message}\n{outcome.trace}"
            raise FactoryFailedError(told)
        if outcome.kind == "engine" and len(share) > 1:
            self.alone += share  # which of them it was shows when each is alone
            return True
        if outcome.kind == "engine":
            where = f"{lane.name}, where it is request 0: "
            self.reasons[share[0]] = f"{where}{outcome.type}: {outcome.message}"
        if outcome.generation is not None:
            self._keep(share, outcome.generation, failed=outcome.kind == "engine")
        return True

    def _keep(self, share: list[int], generation: Generation, *, failed: bool) -> None:
        if failed:
            generation = replace(generation, finish_reasons=["error"])
        self.done[share[0]] = share, generation
        if self.on_emission is not None and not failed:
            for i, row, reason in zip(share, generation.tokens, generation.finish_reasons, strict=True):
                self.on_emission(Emission(i, row, reason))

    def generation(self) -> Generation:
        """All that came back, in the prompts' order; of what did not, no tokens."""
        count = len(self.tokens)
        none: list[NDArray[np.int32]] = [np.zeros(0, np.int32) for _ in range(count)]
        reasons: list[FinishReason] = ["error"] * count
        whole = Generation(list(none), reasons, [], list(none), {}, [*map(len, self.tokens)])
        for _, (share, part) in sorted(self.done.items()):
            for place, i in enumerate(share):
                whole.tokens[i] = part.tokens[place]
                whole.finish_reasons[i] = part.finish_reasons[place]
                whole.tokens_per_round[i] = part.tokens_per_round[place]
            whole.rounds += [replace(r, request_ids=tuple(share[i] for i in r.request_ids)) for r in part.rounds]
            for stage, seconds in part.seconds.items():
                whole.seconds[stage] = whole.seconds.get(stage, 0.0) + seconds
        return whole


def _told(reasons: dict[int, str]) -> str:
    """A message of who failed and why: every request, and each reason once."""
    by_reason: dict[str, list[int]] = {}
    for request, reason in sorted(reasons.items()):
        by_reason.setdefault(reason, []).append(request)
    lines = [f"request{'s' * (len(who) > 1)} {_listed(who)}: {reason}" for reason, who in by_reason.items()]
    return "\n".join([*lines, "The tokens of all other requests are in this error's generation."])


def _listed(requests: Sequence[int]) -> str:
    """Numbers with runs drawn together: 0 … 3, 7."""
    runs: list[list[int]] = []
    for request in requests:
        if runs and request == runs[-1][-1] + 1:
            runs[-1].append(request)
        else:
            runs.append([request])
    return ", ".join(f"{run[0]} … {run[-1]}" if len(run) > 2 else ", ".join(map(str, run)) for run in runs)


# What goes on in a worker


@dataclass
class _Outcome:
    """What became of a share. Errors travel as text: an exception of anyone's own may not survive the way.

    ``kind`` is "done", or whose error it is: "arguments" of the call, "factory", or "engine".
    """

    kind: str
    generation: Generation | None = None
    type: str = ""
    message: str = ""
    trace: str = ""


_kept = threading.local()  # .factory, .engine: an engine is no two threads' at once


def _enter(visible: str) -> None:
    """Make this process one of a single device, and one that ends with its parent."""
    os.environ["CUDA_VISIBLE_DEVICES"] = visible
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches every process; the parent ends this one
    threading.Thread(target=_leave_with_parent, daemon=True).start()


def _leave_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _continue(factory: bytes, prompts: list[NDArray[np.int32]], keys: list[int], options: dict[str, Any]) -> _Outcome:
    """Continue a share's prompts with the engine that is kept here, built if it is not there yet."""
    try:
        engine = _engine(factory)
    except (Exception, SystemExit) as error:  # the factory is the caller's
        return _failure("factory", error)
    try:
        engine.generate([], **options)  # no prompts, no work: what is wrong now is wrong for every request
    except (ValueError, TypeError) as error:
        return _failure("arguments", error)
    try:
        return _Outcome("done", engine.generate(prompts, request_ids=keys, **options))
    except (Exception, SystemExit) as error:  # of a drafter, a target, or the device
        return _failure("engine", error)


def _engine(factory: bytes) -> Engine:
    if getattr(_kept, "factory", None) != factory:
        _kept.factory = _kept.engine = None  # the old one first: both may not fit
        engine = pickle.loads(factory)()
        if not callable(getattr(engine, "generate", None)):
            raise TypeError(f"make_engine must return an Engine, got {type(engine).__name__}")
        _kept.factory, _kept.engine = factory, engine
    return _kept.engine  # type: ignore[no-any-return]


def _failure(kind: str, error: BaseException) -> _Outcome:
    import traceback

    trace = "".join(traceback.format_exception(error)[-6:])
    return _Outcome(kind, getattr(error, "generation", None), type(error).__name__, str(error), trace)
