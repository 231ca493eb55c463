"""Decoding beside transformers, in one run on one machine: ``python -m ddtree.analysis.benchmarks.decoding``.

For random DeepSeek-V3 models: tokens a second of transformers' ``generate``, of our autoregressive decoding at several
batches, and of draft trees under an oracle; what a round costs beside the model and the drafter; and the time of a
target pass by nodes and context, written as cost models. Every mode's tokens are compared with those of autoregressive
decoding. Results are written after each measurement, and what fails is a line of the report: the others go on.

Tokens a second are all new tokens over the wall time of the whole call, its prefill included. Our own modes are
compared by what a round gives: new tokens but the prefill's over the time of the rounds.
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import importlib
import importlib.util
import json
import os
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import click
import numpy as np
from numpy.typing import NDArray

from ddtree.analysis.benchmarks.peers import peers_for
from ddtree.analysis.benchmarks.timing import DeviceTimer, time_on_host
from ddtree.analysis.environment import commit, devices, kernel_sources, versions
from ddtree.analysis.margins import BOUNDS, HeldWeights, first_differences
from ddtree.analysis.outputs import make_folder
from ddtree.arrays import array_namespace
from ddtree.backends import BACKENDS, get_backend
from ddtree.costs import CostModel, fit_cost_model, measure_passes
from ddtree.drafters import OracleDrafter
from ddtree.engine import Engine, Generation
from ddtree.engine.graphs import captured
from ddtree.kdtr import atomic_write
from ddtree.kernels import numba_cpu
from ddtree.model import DeepseekV3, ModelConfig, random_weights
from ddtree.protocols import DraftContext, ResidentState, TargetOutput

__all__ = ["CONFIGS", "SECTIONS", "Report", "Sizes", "measure"]

DEPTH = 7
MOST_RUNS = 60
"""In which an oracle's continuation becomes that of the trees, or nearly."""
EXAMINED = 4
"""Differing requests of a mode that are recomputed in float64, which takes seconds each of a large model."""
CONFIGS: dict[str, dict[str, Any]] = {
    "8 M": {
        "vocab_size": 4096, "hidden_size": 256, "intermediate_size": 512, "moe_intermediate_size": 128,
        "num_hidden_layers": 4, "num_attention_heads": 8, "n_routed_experts": 16, "num_experts_per_tok": 2,
        "n_shared_experts": 1, "first_k_dense_replace": 1, "kv_lora_rank": 64, "q_lora_rank": 96,
        "qk_nope_head_dim": 32, "qk_rope_head_dim": 16, "v_head_dim": 32, "n_group": 1, "topk_group": 1,
        "max_position_embeddings": 4096,
    },
    "0.7 B": {
        "vocab_size": 32768, "hidden_size": 1024, "intermediate_size": 2816, "moe_intermediate_size": 512,
        "num_hidden_layers": 12, "num_attention_heads": 16, "n_routed_experts": 32, "num_experts_per_tok": 4,
        "n_shared_experts": 1, "first_k_dense_replace": 1, "kv_lora_rank": 512, "q_lora_rank": 384,
        "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "n_group": 1, "topk_group": 1,
        "max_position_embeddings": 4096,
    },
    "0.1 M": {
        "vocab_size": 256, "hidden_size": 32, "intermediate_size": 64, "moe_intermediate_size": 16,
        "num_hidden_layers": 2, "num_attention_heads": 2, "n_routed_experts": 4, "num_experts_per_tok": 2,
        "n_shared_experts": 1, "first_k_dense_replace": 1, "kv_lora_rank": 16, "q_lora_rank": 16,
        "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8, "n_group": 1, "topk_group": 1,
        "max_position_embeddings": 256,
    },
}  # fmt: skip
"""Models by their parameters; the smallest is for a look at this program, not at speeds."""

SECTIONS = ("peer", "autoregressive", "tree", "batch", "verify", "rounds")


@dataclass(frozen=True)
class Sizes:
    """What is measured.

    Attributes
    ----------
    prompt, new, long : int
        Tokens of a prompt, new ones beside the peer, and new ones beside each other.
    repeats : int
        Timed calls, after two that are not.
    budgets, batches : tuple of int
        Of trees, and of autoregressive decoding.
    compared : int
        Requests of a batch whose tokens are compared with those of one-token decoding, one at a time.
    nodes, contexts : tuple of int
        Of target passes.
    rounds : int
        Rounds of a generation without a model.
    """

    prompt: int = 32
    new: int = 64
    long: int = 512
    repeats: int = 3
    budgets: tuple[int, ...] = (7, 16, 64)
    batches: tuple[int, ...] = (1, 8, 32)
    compared: int = 8
    nodes: tuple[int, ...] = (0, 1, 3, 7, 15, 31, 63, 127)
    contexts: tuple[int, ...] = (0, 128, 1024, 4096)
    rounds: int = 1000


QUICK = Sizes(
    prompt=8,
    new=6,
    long=12,
    repeats=1,
    budgets=(7, 16),
    batches=(1, 2),
    nodes=(0, 1, 3),
    contexts=(0, 16, 64),
    rounds=6,
)


@dataclass
class Speed:
    """Tokens a second of one way to decode.

    Attributes
    ----------
    section, model, dtype, who : str
        What was measured; ``who`` is as in tables.
    batch, new_tokens : int
        Requests at once, and new tokens of each.
    seconds : list of float
        Of each timed call.
    tau : float or None
        Tokens emitted a round, where there are rounds.
    rounds_seconds : list of float
        Of each timed call its rounds alone; empty where they are not known.
    """

    section: str
    model: str
    dtype: str
    who: str
    batch: int
    new_tokens: int
    seconds: list[float]
    tau: float | None = None
    rounds_seconds: list[float] = field(default_factory=list)

    @property
    def tokens_per_second(self) -> float:
        """Of all requests together, by the median."""
        return self.batch * self.new_tokens / statistics.median(self.seconds)

    @property
    def rate_of_rounds(self) -> float | None:
        """Tokens a second of rounds alone: all requests together, but for the prefill's tokens."""
        if not self.rounds_seconds or self.new_tokens < 2:
            return None
        return self.batch * (self.new_tokens - 1) / statistics.median(self.rounds_seconds)


@dataclass
class Report:
    """All of a run.

    Attributes
    ----------
    machine, sizes : dict
        Where it ran, and what was measured.
    speeds : list of Speed
        Tokens a second.
    passes : list of dict
        ``model``, ``dtype``, ``how`` ("graph" or "wall clock"), and the columns ``nodes``, ``contexts`` and
        ``seconds`` of all target passes.
    round_us : dict of str to float
        Microseconds of a round without model and drafter, by whose it is.
    compared : int
        Requests whose tokens were compared with autoregressive ones.
    differences : list of dict
        First differences that a tie explains.
    unexamined : int
        Requests that differ and were not recomputed: of each mode, all after the first few.
    left_out, faults : list of str
        What could not be measured here, and what went wrong.
    """

    machine: dict[str, Any]
    sizes: dict[str, Any]
    speeds: list[Speed] = field(default_factory=list)
    passes: list[dict[str, Any]] = field(default_factory=list)
    round_us: dict[str, float] = field(default_factory=dict)
    compared: int = 0
    differences: list[dict[str, Any]] = field(default_factory=list)
    unexamined: int = 0
    left_out: list[str] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)

    def speed(self, model: str, dtype: str, who: str, *, batch: int = 1, new: int | None = None) -> float | None:
        """Tokens a second of one measurement, the last if it was made several times; None if there is none."""
        found = [
            s.tokens_per_second
            for s in self.speeds
            if (s.model, s.dtype, s.who, s.batch) == (model, dtype, who, batch) and new in (None, s.new_tokens)
        ]
        return found[-1] if found else None


class _Subject:
    """One model in one type, and the tokens that all its modes must give."""

    def __init__(self, name: str, dtype: str, backend: str | None, sizes: Sizes) -> None:
        self.name, self.dtype, self.backend, self.sizes = name, dtype, backend, sizes
        self.config = ModelConfig.from_dict(CONFIGS[name])
        self.weights = random_weights(self.config, seed=0, fused_experts=True, backend=backend)
        rng = np.random.default_rng(0)
        self.prompts = rng.integers(0, self.config.vocab_size, (max(sizes.batches), sizes.prompt)).astype(np.int32)

    @functools.cached_property
    def target(self) -> DeepseekV3:
        return DeepseekV3(self.config, self.weights, dtype=self.dtype, backend=self.backend)

    def engine(self, batch: int, drafter: Any = None, budget: int | None = None) -> Engine:
        return Engine(self.target, drafter, depth=DEPTH, budget=budget, backend=self.backend, max_batch=batch)

    @functools.cached_property
    def tokens(self) -> list[NDArray[np.int32]]:
        """Of the prompts that are compared, one token and one request at a time, and past the end for an oracle."""
        prompts = self.prompts[: self.sizes.compared]
        return self.engine(1).generate(prompts, self.sizes.long + DEPTH + 1, mode="autoregressive").tokens

    def continuation(self, budget: int) -> NDArray[np.int32]:
        """What trees of ``budget`` nodes decode to, past the end: what an oracle has to know to be right.

        In exact arithmetic these are the autoregressive tokens. In bfloat16 a pass over several nodes rounds otherwise
        than a pass over one, and takes another token where two are nearly as good; so the oracle is told what came of
        the last run, until nothing else comes.
        """
        tokens = self.tokens[0]
        for _ in range(MOST_RUNS):
            engine = self.engine(1, OracleDrafter([tokens], self.config.vocab_size), budget)
            (found,) = engine.generate(self.prompts[:1], len(tokens)).tokens
            if np.array_equal(found, tokens):
                return found
            tokens = found
        return tokens


class _Differing(NamedTuple):
    """A request whose tokens are not the autoregressive ones."""

    model: str
    dtype: str
    who: str
    request: int
    prompt: NDArray[np.int32]
    one: NDArray[np.int32]
    other: NDArray[np.int32]


def _exact_model(name: str, dtype: str) -> DeepseekV3:
    """A model in float64 on the host, with the weights that one of this type has."""
    config = ModelConfig.from_dict(CONFIGS[name])
    weights = random_weights(config, seed=0, fused_experts=True)
    return DeepseekV3(config, HeldWeights(weights, dtype), dtype="float64")


class _Bench:
    """A run of the sections: it keeps the report, and has it written after each step."""

    def __init__(self, report: Report, sizes: Sizes, backend: str | None, written: Callable[[Report], Any]) -> None:
        self.report, self.sizes, self.backend, self.written = report, sizes, backend, written
        self.differing: list[_Differing] = []
        self.on_gpu = backend is not None and get_backend(backend).array_kind == "cupy"

    @contextlib.contextmanager
    def step(self, what: str) -> Iterator[None]:
        """Do a step: what it raises is a fault of the report, and the next one goes on."""
        try:
            yield
        except Exception as error:
            where = "".join(traceback.format_exception(error)[-4:])
            self.report.faults.append(f"{what}: {type(error).__name__}: {error}\n{where}")
        self.written(self.report)

    def timed(self, run: Callable[[], Any]) -> tuple[list[float], list[Any]]:
        """Seconds of each call, after two that are not timed, the first of which compiles, and the results."""
        for _ in range(2):  # what is captured, is at its second use
            run()
        seconds, results = [], []
        for _ in range(self.sizes.repeats):
            start = time.perf_counter()
            results.append(run())
            seconds.append(time.perf_counter() - start)
        return seconds, results

    def compare(self, subject: _Subject, who: str, tokens: Sequence[NDArray[np.int32]]) -> None:
        """Hold the first prompts' tokens to the autoregressive ones."""
        tokens = tokens[: self.sizes.compared]
        expected = [row[: len(got)] for row, got in zip(subject.tokens, tokens, strict=False)]
        self.report.compared += len(tokens)
        for i, (one, other) in enumerate(zip(expected, tokens, strict=True)):
            if not np.array_equal(one, other):
                self.report.unexamined += 1
                self.differing.append(_Differing(subject.name, subject.dtype, who, i, subject.prompts[i], one, other))

    def examine(self, most: int, on_step: Callable[[str], Any]) -> None:
        """See whether ties explain the first ``most`` requests of each mode that differ: last, since it is slow."""
        by_model: dict[tuple[str, str], list[_Differing]] = {}
        for found in self.differing:
            alike = by_model.setdefault((found.model, found.dtype), [])
            if sum(other.who == found.who for other in alike) < most:
                alike.append(found)
        for (model, dtype), differing in by_model.items():
            on_step(f"{model}, {dtype}: {len(differing)} differences in float64")
            with self.step(f"{model}, {dtype}, differences in float64"):
                exact = _exact_model(model, dtype)
                for found in differing:
                    self.examine_one(exact, found)
                    self.written(self.report)

    def examine_one(self, exact: DeepseekV3, found: _Differing) -> None:
        """Note a difference that a tie explains, or a fault."""
        (told,) = first_differences(exact, [found.prompt], [found.one], [found.other], dtype=found.dtype)
        where = f"{found.model}, {found.dtype}, {found.who}"
        self.report.unexamined -= 1
        if told.explained:
            self.report.differences.append({"where": where, **asdict(told), "request": found.request})
        else:
            self.report.faults.append(
                f"{where}: request {found.request} differs at new token {told.place}, {told.logits:.2g} deviations "
                f"from a tie (router: {told.router:.2g})"
            )

    def add(
        self, section: str, subject: _Subject, who: str, batch: int, new: int, run: Callable[[], Generation]
    ) -> None:
        """Time one of our ways to decode, and hold its tokens to the autoregressive ones."""
        seconds, runs = self.timed(run)
        of_rounds = [sum(run.seconds.values()) - run.seconds["prefill"] for run in runs]
        speed = Speed(section, subject.name, subject.dtype, who, batch, new, seconds, runs[-1].tau, of_rounds)
        self.report.speeds.append(speed)
        self.compare(subject, f"batch of {batch}" if section == "batch" else who, runs[-1].tokens)

    def peer(self, subject: _Subject) -> None:
        """Transformers' generate: greedy, one request."""
        if importlib.util.find_spec("torch") is None or importlib.util.find_spec("transformers") is None:
            self.leave_out("transformers: torch and transformers are not installed")
            return
        if subject.dtype == "float64":
            self.leave_out("transformers in float64: its products of experts have none")
            return
        run = _transformers_run(subject, self.on_gpu)
        seconds, results = self.timed(run)
        self.report.speeds.append(
            Speed("peer", subject.name, subject.dtype, "transformers", 1, self.sizes.new, seconds)
        )
        if subject.dtype != "bfloat16":  # which rounds the router's weights there, and not here
            self.compare(subject, "transformers", results[-1:])

    def autoregressive(self, subject: _Subject) -> None:
        """Our own decoding, a token a round."""
        engine = subject.engine(1)
        for new in dict.fromkeys((self.sizes.new, self.sizes.long)):
            run = functools.partial(engine.generate, subject.prompts[:1], new, mode="autoregressive")
            self.add("autoregressive", subject, "autoregressive", 1, new, run)

    def tree(self, subject: _Subject) -> None:
        """Trees under a drafter that knows what comes."""
        for budget in self.sizes.budgets:
            with self.step(f"{subject.name}, {subject.dtype}, tree of {budget}"):
                drafter = OracleDrafter([subject.continuation(budget)], subject.config.vocab_size)
                engine = subject.engine(1, drafter, budget)
                run = functools.partial(engine.generate, subject.prompts[:1], self.sizes.long)
                self.add("tree", subject, f"DDTree, {budget} nodes", 1, self.sizes.long, run)

    def batch(self, subject: _Subject) -> None:
        """Our own decoding of several requests, a token each a round."""
        for batch in self.sizes.batches:
            with self.step(f"{subject.name}, {subject.dtype}, batch of {batch}"):
                engine, prompts = subject.engine(batch), subject.prompts[:batch]
                run = functools.partial(engine.generate, prompts, self.sizes.long, mode="autoregressive")
                self.add("batch", subject, "batch", batch, self.sizes.long, run)

    def verify(self, subject: _Subject) -> None:
        """Target passes by nodes and context."""
        graph = getattr(subject.target, "capturable", False)
        timer = _graph_timer() if graph else None
        columns: dict[str, list[Any]] = {"nodes": [], "contexts": [], "seconds": []}
        how = "graph" if graph else "wall clock"
        self.report.passes.append({"model": subject.name, "dtype": subject.dtype, "how": how, **columns})
        for count in self.sizes.nodes:
            with self.step(f"{subject.name}, {subject.dtype}, passes of {count} nodes"):
                measured = measure_passes(
                    subject.target, [count], self.sizes.contexts, repeats=3 * self.sizes.repeats, time_pass=timer
                )
                for column, values in zip(columns.values(), measured, strict=True):
                    column += values.tolist()

    def rounds(self) -> None:
        """Rounds whose target and drafter launch nothing, and the published loop's work on the host."""
        backend, budget = self.backend, 64
        target = StillTarget(backend)
        engine = Engine(target, StillDrafter(budget), depth=DEPTH, budget=budget, backend=backend, max_batch=1)
        prompt, new = [[1] * self.sizes.prompt], 1 + (1 + DEPTH) * self.sizes.rounds
        engine.generate(prompt, new)
        times = []
        for _ in range(self.sizes.repeats):
            start = time.perf_counter()
            generation = engine.generate(prompt, new)
            times.append((time.perf_counter() - start - generation.seconds["prefill"]) / generation.num_rounds)
            if generation.num_rounds != self.sizes.rounds:
                raise RuntimeError(f"{new} tokens took {generation.num_rounds} rounds, should be {self.sizes.rounds}")
        self.report.round_us["ddtree"] = 1e6 * statistics.median(times)
        if engine.resident:
            self.report.round_us["of that, its graph alone"] = _graph_us(engine, self.sizes)
        if importlib.util.find_spec("torch") is None:
            self.leave_out("the published loop: torch is not installed")
            return
        parts = _published_us(target, budget, self.on_gpu, 10 * self.sizes.repeats)
        self.report.round_us["published loop"] = sum(parts.values())
        self.report.round_us |= {f"of that, {what}": us for what, us in parts.items()}

    def leave_out(self, what: str) -> None:
        if what not in self.report.left_out:
            self.report.left_out.append(what)


def measure(
    models: Sequence[str],
    dtypes: Sequence[str],
    *,
    backend: str | None = None,
    sections: Sequence[str] = SECTIONS,
    sizes: Sizes | None = None,
    examined: int = EXAMINED,
    written: Callable[[Report], Any] = lambda report: None,
    on_step: Callable[[str], Any] = lambda what: None,
) -> Report:
    """Run the sections; an interrupted run returns what it has.

    Parameters
    ----------
    models, dtypes : sequence of str
        Keys of ``CONFIGS``; "float32", "bfloat16" or "float64".
    backend : str, optional
        Who does the operations.
    sections : sequence of str
        Some of ``SECTIONS``.
    sizes : Sizes, optional
        What is measured.
    examined : int
        Differing requests of each mode that are recomputed in float64, once all else is measured.
    written : callable
        Called with the report after each step.
    on_step : callable
        Called with what is being measured.
    """
    sizes = sizes or Sizes()
    machine: dict[str, Any] = {"devices": devices(), "versions": {k: v for k, v in versions().items() if v}}
    machine |= {"commit": commit(), "backend": backend, "cores": os.cpu_count()}
    machine["date"] = datetime.date.today().isoformat()
    if importlib.util.find_spec("transformers") is not None:
        machine["versions"]["transformers"] = importlib.import_module("importlib.metadata").version("transformers")
    if backend in BACKENDS:
        machine |= kernel_sources(backend)
    report = Report(machine, asdict(sizes))
    bench = _Bench(report, sizes, backend, written)
    try:
        if "rounds" in sections:
            on_step("rounds without a model")
            with bench.step("rounds"):
                bench.rounds()
        for model in models:
            for dtype in dtypes:
                if dtype == "bfloat16" and not bench.on_gpu:
                    bench.leave_out("bfloat16: models of it are on a GPU alone")
                    continue
                subject = _Subject(model, dtype, backend, sizes)
                for section in SECTIONS[:-1]:
                    if section in sections:
                        on_step(f"{model}, {dtype}: {section}")
                        with bench.step(f"{model}, {dtype}, {section}"):
                            getattr(bench, section)(subject)
                del subject
                _give_back(bench.on_gpu)
        bench.examine(examined, on_step)
    except KeyboardInterrupt:
        report.faults.append("interrupted: some sections are missing")
    return report


def _give_back(on_gpu: bool) -> None:
    """Let go of the last model's memory before the next one is loaded."""
    import gc

    gc.collect()
    if on_gpu:
        importlib.import_module("cupy").get_default_memory_pool().free_all_blocks()
        if "torch" in sys.modules:
            sys.modules["torch"].cuda.empty_cache()


def _transformers_run(subject: _Subject, on_gpu: bool) -> Callable[[], NDArray[np.int32]]:
    """A call of transformers' generate on the subject's weights, that returns the new tokens."""
    torch, transformers = importlib.import_module("torch"), importlib.import_module("transformers")
    device, new = ("cuda" if on_gpu else "cpu"), subject.sizes.new
    config = transformers.DeepseekV3Config.from_dict(subject.config.to_dict() | {"eos_token_id": None})
    with torch.device(device):
        model = transformers.DeepseekV3ForCausalLM(config).eval().to(getattr(torch, subject.dtype))
    state = model.state_dict()
    fused = any(name.endswith(".experts.gate_up_proj") for name in state)  # by transformers' version
    weights = random_weights(subject.config, seed=0, fused_experts=fused, backend=subject.backend)
    if set(state) != set(weights):
        raise ValueError(f"transformers names other tensors: {sorted(set(state) ^ set(weights))[:4]}")
    for name, tensor in state.items():
        tensor.copy_(_torch_tensor(torch, weights[name]))
    prompt = torch.from_numpy(subject.prompts[:1].astype(np.int64)).to(device)
    mask = torch.ones_like(prompt)
    options = {"do_sample": False, "max_new_tokens": new, "min_new_tokens": new, "use_cache": True, "pad_token_id": 0}

    def run() -> NDArray[np.int32]:
        with torch.inference_mode():
            out = model.generate(prompt, attention_mask=mask, **options)
        tokens: NDArray[np.int32] = out[0, prompt.shape[1] :].cpu().numpy().astype(np.int32)
        if len(tokens) != new:
            raise RuntimeError(f"transformers gave {len(tokens)} tokens, should be {new}")
        return tokens

    return run


def _torch_tensor(torch: Any, weight: Any) -> Any:
    if isinstance(weight, np.ndarray):
        return torch.from_numpy(weight)
    weight.device.synchronize()  # torch works on another stream
    return torch.from_dlpack(weight)


def _graph_timer() -> Callable[[Callable[[], Any], int], list[float]]:
    """What times a pass on the GPU: its graph, replayed so often in a row that an event's own time does not show."""
    cupy = importlib.import_module("cupy")
    stream = cupy.cuda.Stream(non_blocking=True)
    begin, end = cupy.cuda.Event(), cupy.cuda.Event()

    def elapsed(replay: Callable[[], None], times: int) -> float:
        begin.record(stream)
        for _ in range(times):
            replay()
        end.record(stream)
        end.synchronize()
        return float(cupy.cuda.get_elapsed_time(begin, end)) / 1e3 / times

    def time_pass(run: Callable[[], Any], repeats: int) -> list[float]:
        cupy.cuda.get_current_stream().synchronize()  # what the pass reads was made there
        with stream:
            run()  # compiles
            stream.synchronize()
            replay = captured(cupy, run)
            times = max(1, int(2e-3 / max(elapsed(replay, 3), 1e-6)))
            return [elapsed(replay, times) for _ in range(repeats)]

    return time_pass


# A round without a model


class StillTarget:
    """A target that launches nothing: its logits are always the same, and choose token 7 after every node.

    Its cache is as large as that of the 0.7 B model, whose rows are compacted each round.
    """

    vocab_size = 32_768
    layers, width = 12, 576

    def __init__(self, backend: str | None) -> None:
        kind = "numpy" if backend is None else get_backend(backend).array_kind
        self.xp = importlib.import_module(kind)
        self.capturable = kind == "cupy"
        logits = np.zeros((1, 1 + 64, self.vocab_size), np.float32)
        logits[..., 7] = 1.0
        self.logits = self.xp.asarray(logits)

    def new_cache(self, num_pages: int, page_size: int) -> Any:
        """Zeros, in float32."""
        return self.xp.zeros((self.layers, num_pages, page_size, self.width), np.float32)

    def forward(self, tree: Any, cache: Any, *, hidden_layers: tuple[int, ...] = (), last_only: bool = False) -> Any:
        """Return the same logits again, of one request."""
        return TargetOutput(self.logits[:, : 1 if last_only else tree.num_slots])


class StillDrafter:
    """A drafter that launches nothing: always the same draft, token 7 first at every depth, among decoys."""

    def __init__(self, topk: int) -> None:
        first = -np.log(2.0) / DEPTH  # a whole path of first candidates has half of the probability
        decoys = np.log(-np.expm1(first)) - np.log(2.0) * np.arange(1, topk)
        self.log_probs = np.tile(np.concatenate([[first], decoys]).astype(np.float32), (1, DEPTH, 1))
        self.token_ids = np.tile(np.arange(7, 7 + topk, dtype=np.int32), (1, DEPTH, 1))

    def __call__(self, context: DraftContext, depth: int, topk: int) -> tuple[Any, Any]:
        return self.log_probs[:, :depth, :topk].copy(), self.token_ids[:, :depth, :topk].copy()

    def open_resident(self, state: ResidentState, depth: int, topk: int) -> _StillDraft:
        """The same on the device."""
        xp = array_namespace(state.tokens)
        return _StillDraft(xp.asarray(self.log_probs[:, :depth, :topk]), xp.asarray(self.token_ids[:, :depth, :topk]))


@dataclass
class _StillDraft:
    log_probs: Any
    token_ids: Any

    def draft(self) -> tuple[Any, Any]:
        return self.log_probs, self.token_ids

    def begin(self, slot: int, request: int, tokens: Any, prompt_len: int, hidden_states: dict[int, Any]) -> None:
        """Nothing is kept of a request."""

    def end(self, slot: int) -> None:
        """Nothing is kept of a request."""


def _graph_us(engine: Engine, sizes: Sizes) -> float:
    """Microseconds of the captured round itself, replayed back to back on a request that goes on all the time."""
    loop = engine.loops.all[-1]
    state, replay, xp = loop.state, loop.replay, loop.xp
    if replay is None:
        raise RuntimeError("no round was captured: the generations were too short")
    for name, value in (("lengths", sizes.prompt + 1), ("prefix_lens", sizes.prompt), ("roots", 7), ("running", 1)):
        getattr(state, name)[...] = value
    state.remaining[...] = (1 + DEPTH) * sizes.rounds + 1  # one is left: the last round is whole too
    if xp is np:
        start = time.perf_counter()
        for _ in range(sizes.rounds):
            replay()
        seconds = time.perf_counter() - start
    else:
        begin, end = xp.cuda.Event(), xp.cuda.Event()
        begin.record()
        for _ in range(sizes.rounds):
            replay()
        end.record()
        end.synchronize()
        seconds = float(xp.cuda.get_elapsed_time(begin, end)) / 1e3
    emitted = int(state.lengths[0]) - sizes.prompt - 1
    if emitted != (1 + DEPTH) * sizes.rounds:
        raise RuntimeError(f"{sizes.rounds} replays emitted {emitted} tokens, should be {(1 + DEPTH) * sizes.rounds}")
    for name in ("lengths", "prefix_lens", "remaining", "running"):
        getattr(state, name)[...] = 0
    return 1e6 * seconds / sizes.rounds


def _published_us(target: StillTarget, budget: int, on_gpu: bool, repeats: int) -> dict[str, float]:
    """Microseconds of the published loop's parts, on the same draft and a cache of the same size."""
    torch = importlib.import_module("torch")
    drafter = StillDrafter(budget)
    draft = {"log_probs": drafter.log_probs, "token_ids": drafter.token_ids}
    roots = np.array([7], np.int32)
    tree = numba_cpu.build_tree(*draft.values(), roots, budget=budget)
    page, context = 16, 256
    pages = -(-(context + budget + 1) // page)
    accepted = {
        "kv_cache": np.zeros((target.layers, pages, page, target.width), np.float32),
        "page_table": np.arange(pages, dtype=np.int32)[None],
        "prefix_lens": np.array([context], np.int32),
        "tree": tree,
        "choices": np.full(tree.token_ids.shape, 7, np.int32),
    }
    inputs = {"build_tree": {**draft, "root_token_ids": roots, "budget": budget}, "accept and compact": accepted}
    timer = DeviceTimer() if on_gpu else None
    found = {}
    for case, given in inputs.items():
        for peer in peers_for(case, on_gpu=on_gpu, slow=False):
            run = peer.prepare(torch, given, "cuda" if on_gpu else "cpu")
            times = timer.time(run, repeats, library="torch", waits=True) if timer else time_on_host(run, repeats)
            found[f"{case} ({peer.name})"] = statistics.median(times.warm)
    return found


# The command


def median_passes(passes: Mapping[str, Any]) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.float64]]:
    """Nodes, contexts and the median seconds of each, of an entry of ``Report.passes``."""
    nodes, contexts, seconds = (np.array(passes[name]) for name in ("nodes", "contexts", "seconds"))
    places = np.unique(np.stack([contexts, nodes], 1), axis=0)
    medians = [float(np.median(seconds[(contexts == c) & (nodes == n)])) for c, n in places.tolist()]
    return places[:, 1], places[:, 0], np.array(medians)


def cost_models(report: Report) -> dict[tuple[str, str], CostModel]:
    """Fit what the policies read to the medians of each model's passes, by model and type."""
    # a pass of the root alone is what the others are compared with
    whole = [p for p in report.passes if 0 in p["nodes"]]
    return {(p["model"], p["dtype"]): fit_cost_model(*median_passes(p)) for p in whole}


def write_json(report: Report, folder: Path) -> Path:
    """Write ``decoding.json``, whole."""
    folder.mkdir(parents=True, exist_ok=True)
    with atomic_write(folder / "decoding.json") as file:
        file.write((json.dumps(asdict(report), indent=1, ensure_ascii=False) + "\n").encode())
    return folder / "decoding.json"


def read_json(path: Path) -> Report:
    """Read what :func:`write_json` wrote."""
    document = json.loads(path.read_text(encoding="utf-8"))
    document["speeds"] = [Speed(**speed) for speed in document["speeds"]]
    return Report(**document)


@click.command()
@click.option(
    "--model", "models", type=click.Choice(list(CONFIGS)), multiple=True, show_default="8 M and 0.7 B; 0.1 M if quick",
    help="By parameters; several times.",
)  # fmt: skip
@click.option(
    "--dtype", "dtypes", type=click.Choice(sorted(BOUNDS)), multiple=True, default=("float32", "bfloat16"),
    show_default=True, help="Of the models; several times.",
)  # fmt: skip
@click.option("--backend", metavar="NAME", help="Who does the operations; cupy is on the GPU.")
@click.option(
    "--section",
    "sections",
    type=click.Choice(SECTIONS),
    multiple=True,
    default=SECTIONS,
    show_default="all",
    help="Several times.",
)
@click.option(
    "--examined", type=click.IntRange(0), default=EXAMINED, show_default=True, metavar="N",
    help="Differing requests of each mode that are recomputed in float64.",
)  # fmt: skip
@click.option("--quick", is_flag=True, help="Few tokens and sizes: a look at the program, not at speeds.")
@click.option("--output", type=click.Path(path_type=Path, file_okay=False), metavar="DIR", help="Write all of it.")
def main(
    models: tuple[str, ...],
    dtypes: tuple[str, ...],
    backend: str | None,
    sections: tuple[str, ...],
    examined: int,
    quick: bool,
    output: Path | None,
) -> None:
    """Time decoding beside transformers; exit with 1 if a token was wrong or a step failed."""
    from rich.console import Console

    from ddtree.analysis.benchmarks.decoding_report import tables_of, write_report
    from ddtree.backends import BackendUnavailable, get_backend

    console = Console(highlight=False, width=None if sys.stdout is not None and sys.stdout.isatty() else 140)
    status = Console(stderr=True).status("")
    try:
        if backend is not None:
            get_backend(backend)  # before there is a folder
        make_folder(output, names=("decoding.json", "decoding.md"))
        with status:
            report = measure(
                models or (("0.1 M",) if quick else ("8 M", "0.7 B")),
                dtypes,
                backend=backend,
                sections=sections,
                sizes=QUICK if quick else None,
                examined=examined,
                written=(lambda report: write_json(report, output)) if output is not None else lambda report: None,
                on_step=status.update,
            )
    except (BackendUnavailable, ValueError) as error:
        raise click.UsageError(str(error)) from error
    for table in tables_of(report):
        console.print(table)
    for line in (*(f"left out: {line}" for line in report.left_out), *report.faults):
        console.print(line, markup=False, soft_wrap=True)
    if output is not None:
        for path in write_report(report, output):
            console.print(f"wrote {path}", soft_wrap=True, markup=False)
    if report.faults:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
