"""What ``ddtree demo`` measures: each stage runs the real thing and returns what it expected, what it got, and tables.

Nothing is shown or written here.
"""

from __future__ import annotations

import functools
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ddtree.analysis.acceptance import AcceptanceTable, TauTable, acceptance_table, tau_by_budget, tau_table
from ddtree.analysis.environment import backend_states
from ddtree.analysis.replay import replay_all
from ddtree.analysis.rounds import Rounds, RoundTable, concatenate_rounds, round_table
from ddtree.analysis.trace import Trace, shipped_trace
from ddtree.drafters import NgramDrafter, NoiseLaw, OracleDrafter
from ddtree.engine import Engine, Generation, Round, ScriptedTarget
from ddtree.kdtr import read_kdtr
from ddtree.model import golden_bundle, load_model
from ddtree.pair import load_pair
from ddtree.policies import chain, fixed_budget
from ddtree.property_tests.harness import HypothesisMissingError, check_operation, first_line
from ddtree.property_tests.tolerances import TOLERANCE
from ddtree.protocols import Drafter, KVCache, Policy
from ddtree.trees import chain_tree
from ddtree.vocabulary import Vocabulary

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["FULL", "QUICK", "STAGES", "Check", "DrawnTree", "Findings", "Settings", "draw", "run_stage"]

GOLDEN_TOKENS = 24
DTYPES = ("float64", "float32")

LAW = ((0.7, 0.12, 0.05, 0.03),)
"""The synthetic drafter's: at any depth the truth is the first candidate in 70 of 100 cases, the second in 12, …"""


@dataclass(frozen=True)
class Settings:
    """How much the demo does.

    Attributes
    ----------
    live_prompts : int
        Prompts of the trained pair's trace that its models continue here and now.
    budgets : tuple of int
        Of all sweeps, rising.
    shown_budget : int
        The one of ``budgets`` whose acceptance by depth and whose tree are drawn.
    examples : int
        Drawn inputs an operation and backend.
    seed : int
        Of everything random.
    """

    live_prompts: int = 4
    budgets: tuple[int, ...] = (1, 2, 4, 7, 16, 32, 64, 128, 256)
    shown_budget: int = 16
    examples: int = 60
    seed: int = 0


FULL = Settings()
QUICK = Settings(live_prompts=2, budgets=(1, 2, 7, 16, 64), examples=20)


@dataclass(frozen=True)
class Check:
    """Something that must hold, in words: what was expected and what came out."""

    name: str
    expected: str
    got: str
    ok: bool
    detail: str = ""
    """What first went wrong."""


@dataclass(frozen=True)
class DrawnTree:
    """A tree worth a picture: a round's, a request's row in it, and the text before it."""

    round: Round
    row: int
    before: str


@dataclass
class Findings:
    """What a stage found.

    Attributes
    ----------
    checks : list of Check
        In order.
    notes : list of str
        What a reader should know beside them.
    drafter : str
        Whose the tables are, as a figure's title says it.
    synthetic : bool
        Whether they are nobody's, but a noise law's.
    sweep : TauTable, optional
        τ by budget.
    by_depth : AcceptanceTable, optional
        Acceptance by depth in one run of the sweep.
    tree : DrawnTree, optional
        A tree to draw.
    vocabulary : Vocabulary, optional
        The text of its tokens.
    seconds : float
        Wall time.
    error : str
        The traceback, if the stage broke off.
    """

    checks: list[Check] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    drafter: str = ""
    synthetic: bool = False
    sweep: TauTable | None = None
    by_depth: AcceptanceTable | None = None
    tree: DrawnTree | None = None
    vocabulary: Vocabulary | None = None
    seconds: float = 0.0
    error: str = ""


def run_stage(name: str, settings: Settings) -> Findings:
    """Run one of ``STAGES``. One that raises has failed a check, and its traceback is kept."""
    start = time.perf_counter()
    try:
        findings = STAGES[name](settings)
    except Exception as error:  # whatever a wrong operation leads to; nothing may keep the other stages from running
        failed = Check("runs to its end", "yes", "no", False, f"{type(error).__name__}: {first_line(error)}")
        findings = Findings([failed], error=traceback.format_exc())
    findings.seconds = time.perf_counter() - start
    return findings


def golden_model(settings: Settings) -> Findings:
    """The golden model's tokens and logits, one token at a time."""
    arrays, _ = read_kdtr(golden_bundle())
    prompt, tokens = arrays["golden/prompt"], arrays["golden/tokens"][:GOLDEN_TOKENS]
    whole = np.concatenate([prompt, arrays["golden/tokens"]])[None]
    found = Findings()
    for dtype in DTYPES:
        model = load_model(golden_bundle(), dtype=dtype)
        run = Engine(model).generate([prompt], len(tokens), mode="autoregressive")
        found.checks.append(_same_tokens(f"{dtype}: tokens, one at a time", [tokens], run.tokens))
        n = whole.shape[1]
        cache = KVCache(model.new_cache(1, n), np.zeros((1, 1), np.int32), np.zeros(1, np.int32))
        logits = model.forward(chain_tree(whole), cache).logits[0]
        golden = arrays["golden/logits"]
        off, limit = float(np.abs(logits - golden).max()), TOLERANCE["model", dtype].bound * float(np.abs(golden).max())
        name = f"{dtype}: logits, one pass over {n}"
        found.checks.append(Check(name, f"off ≤ {limit:.1e}", f"off {off:.1e}", off <= limit))
    return found


def oracle_rounds(settings: Settings) -> Findings:
    """DDTree with a drafter that knows the answer: 25 tokens, the prefill's and three rounds of eight."""
    arrays, _ = read_kdtr(golden_bundle())
    prompt, known, count = arrays["golden/prompt"], arrays["golden/tokens"], 25
    found = Findings(notes=["The oracle knows the answer: it proves the mechanism, not a drafter."])
    for dtype in DTYPES:
        model = load_model(golden_bundle(), dtype=dtype)
        engine = Engine(model, OracleDrafter([known], model.vocab_size), depth=7, budget=16)
        one_by_one = engine.generate([prompt], count, mode="autoregressive")
        tree = engine.generate([prompt], count)
        same = _same_tokens(f"{dtype}: same tokens as one by one", one_by_one.tokens, tree.tokens)
        rounds = f"{tree.num_rounds}, τ = {tree.tau or 0:.2f}"
        found.checks += [same, _equal(f"{dtype}: rounds", "3, τ = 8.00", rounds)]
    return found


def model_runs(settings: Settings) -> Findings:
    """Prompt lookup on the golden model, and sampling: a tree's tokens are those of one at a time."""
    arrays, _ = read_kdtr(golden_bundle())
    prompt, count = arrays["golden/prompt"], 32
    prompts = [prompt, prompt[: len(prompt) // 2], prompt[-3:]]
    model = load_model(golden_bundle(), dtype="float64")
    engine = Engine(model, NgramDrafter(), depth=7, budget=16)
    one_by_one = engine.generate(prompts, count, mode="autoregressive")
    tree = engine.generate(prompts, count)
    found = Findings([_same_tokens("n-gram, greedy: same tokens", one_by_one.tokens, tree.tokens)])
    found.notes.append(f"n-gram drafter on the golden model, a random one: τ = {tree.tau:.2f}.")
    sampling: dict[str, Any] = {"temperature": 0.8, "top_p": 0.95, "seed": settings.seed}
    one_by_one = engine.generate(prompts, count, mode="autoregressive", **sampling)
    noisy = OracleDrafter(one_by_one.tokens, model.vocab_size, noise=NoiseLaw(LAW), seed=settings.seed)
    drafters: dict[str, Drafter] = {"n-gram": NgramDrafter(), "noisy oracle": noisy}
    for name, drafter in drafters.items():
        tree = Engine(model, drafter, depth=7, budget=16).generate(prompts, count, **sampling)
        name = f"{name}, T = 0.8: same tokens"
        found.checks.append(_same_tokens(name, one_by_one.tokens, tree.tokens))
    return found


def trained_pair(settings: Settings) -> Findings:
    """The pair that comes with ddtree: live rounds against replayed ones, and τ by budget on its recorded trace."""
    target, drafter, vocabulary = load_pair()
    trace = shipped_trace().in_memory()
    about = trace.manifest
    prompts, continuations = _recorded(trace)
    found = Findings(drafter=f"{about.drafter} of {about.target}", vocabulary=vocabulary)

    live, shown = list(range(settings.live_prompts)), settings.shown_budget
    engine = Engine(target, drafter, depth=about.depth, topk=about.topk, policy=fixed_budget(shown))
    given = [prompts[i] for i in live], about.max_new_tokens, about.stop_token_ids
    tree = engine.generate(*given)
    one_by_one = engine.generate(*given, mode="autoregressive")
    found.checks.append(_same_tokens("greedy: same tokens as one by one", one_by_one.tokens, tree.tokens))
    found.checks.append(_same_tokens("greedy: the trace's tokens", [continuations[i] for i in live], tree.tokens))

    chains = [("chain", b) for b in settings.budgets if b <= about.depth]
    trees = [("tree", b) for b in settings.budgets]
    policies: list[Policy] = [*(chain(b) for _, b in chains), *(fixed_budget(b) for _, b in trees)]
    tables = [concatenate_rounds(parts) for parts in zip(*replay_all(trace, policies), strict=True)]
    runs: dict[tuple[str, int], RoundTable] = dict(zip([*chains, *trees], tables, strict=True))
    replayed = runs["tree", shown]
    replayed = replayed.take(replayed.prompt < settings.live_prompts)
    ran = round_table(tree)
    ran = ran.take(np.lexsort((ran.position, ran.prompt)))  # by prompt, as a replay has them
    same = [np.array_equal(getattr(ran, c), getattr(replayed, c)) for c in ("tokens", "node_indices", "num_nodes")]
    expected, got = f"{len(replayed)} rounds, equal", f"{len(ran)} rounds, {'equal' if all(same) else 'not equal'}"
    found.checks.append(_equal(f"live rounds are the replayed ones, budget {shown}", expected, got))

    lookup = _lookup(trace, settings.budgets)
    every: list[tuple[str, int, Rounds]] = [*((*key, table) for key, table in runs.items()), *lookup]
    found.sweep = tau_table(every, seed=settings.seed)
    found.by_depth = acceptance_table(runs["tree", shown], seed=settings.seed)
    found.tree = _tree_to_show(tree, prompts, vocabulary)
    found.notes.append(
        f"The trained pair {about.target}, a small one that comes with ddtree: {len(prompts)} held-out prompts of "
        f"Python source, up to {about.max_new_tokens} new tokens each, greedy; {settings.live_prompts} of them run "
        "live, all are replayed from its trace. Prompt lookup on the same text beside it."
    )
    return found


def synthetic(settings: Settings) -> Findings:
    """An oracle with a noise law on the same texts: its acceptance must be the law's."""
    trace = shipped_trace().in_memory()
    about = trace.manifest
    target, prompts, continuations = _scripted(trace)
    drafter = OracleDrafter(continuations, target.vocab_size, noise=NoiseLaw(LAW), seed=settings.seed)
    runs: dict[tuple[str, int], Generation] = {}

    def run(mode: Any, budget: int) -> Generation:
        depth = min(budget, about.depth)  # of a chain, this is the number of nodes
        engine = Engine(target, drafter, depth=depth, budget=budget)
        runs[mode, budget] = engine.generate(
            prompts, trace.manifest.max_new_tokens, trace.manifest.stop_token_ids, mode=mode
        )
        return runs[mode, budget]

    chains = [b for b in settings.budgets if b <= about.depth]
    title = "synthetic: an oracle with a noise law, no drafter"
    sweep = tau_by_budget(run, {"chain": chains, "tree": settings.budgets}, seed=settings.seed)
    found = Findings(drafter=title, synthetic=True, sweep=sweep)
    right = sum(_count_equal(continuations, run.tokens) == (sum(map(len, continuations)), "") for run in runs.values())
    found.checks.append(_equal("runs that emit the text", f"{len(runs)}/{len(runs)}", f"{right}/{len(runs)}"))
    # Several depths are looked at together, so each interval is wide enough for all to hold in 999 of 1,000 drafters.
    table = acceptance_table(runs["chain", chains[-1]], level=1 - 0.001 / chains[-1])
    tested = table.n_offered > 0
    inside = (table.low <= LAW[0][0]) & (LAW[0][0] <= table.high)
    name = f"depths that accept the law's {LAW[0][0]}"
    found.checks.append(_equal(name, f"{tested.sum()}/{tested.sum()}", f"{(inside & tested).sum()}/{tested.sum()}"))
    found.notes.append("Synthetic: the noise law sets these figures; they are those of no drafter.")
    return found


def backends(settings: Settings) -> Findings:
    """Every backend that works here against the references."""
    found = Findings()
    for state in backend_states():
        if state.name == "reference":
            continue
        if state.reason is not None:
            found.notes.append(f"Not checked: {state.reason}.")
            continue
        for op in state.ops:
            try:
                a = check_operation(state.name, op, examples=settings.examples, seed=settings.seed)
            except HypothesisMissingError as error:
                found.notes.append(f"Not checked: backend {state.name!r}; {error}.")
                break
            expected, got = (f"{n}/{a.examples} differ" for n in (0, a.mismatches))
            found.checks.append(Check(f"{a.backend}: {a.op}", expected, got, a.mismatches == 0, a.first))
    return found


STAGES: dict[str, Callable[[Settings], Findings]] = {
    "golden model": golden_model,
    "oracle tree": oracle_rounds,
    "drafting and sampling": model_runs,
    "trained pair": trained_pair,
    "synthetic drafter": synthetic,
    "backends": backends,
}
"""By name, in order."""


def draw(settings: Settings, findings: dict[str, Findings]) -> dict[str, Axes]:
    """The figures of what was found, by file name."""
    from ddtree.analysis.figures import draw_tree, plot_acceptance_by_depth, plot_tau_by_budget

    axes = {}
    for found in findings.values():
        suffix = "_synthetic.png" if found.synthetic else ".png"
        if found.sweep is not None:
            ax = axes[f"tau_by_budget{suffix}"] = plot_tau_by_budget(found.sweep)
            ax.set_title(found.drafter, fontsize=7)
        if found.by_depth is not None:
            ax = axes[f"acceptance_by_depth{suffix}"] = plot_acceptance_by_depth(found.by_depth)
            ax.set_title(f"{found.drafter}, node budget {settings.shown_budget}", fontsize=7)
        if found.tree is not None and found.vocabulary is not None:
            label = functools.partial(token_label, found.vocabulary)
            shown, row = found.tree.round, found.tree.row
            path = shown.acceptance.node_indices[row]
            ax = axes["tree.png"] = draw_tree(shown.tree, row, path=path, labels=label)
            bonus = label(int(shown.acceptance.bonus_token_ids[row]))
            title = f"after “{found.tree.before}”: {shown.acceptance.lengths[row] - 1} drafts accepted, then {bonus}"
            ax.set_title(title, fontsize=7, parse_math=False)
    return axes


def token_label(vocabulary: Vocabulary, token: int) -> str:
    """A token as a reader knows it: its text, with signs for white space."""
    text = vocabulary.decode([token])
    for space, sign in ((" ", "␣"), ("\n", "↵"), ("\t", "⇥")):
        text = text.replace(space, sign)
    return text or "(end)"


def _recorded(trace: Trace) -> tuple[list[NDArray[np.int32]], list[NDArray[np.int32]]]:
    """Each prompt of a trace and its continuation."""
    prompts, continuations = [], []
    for chunk in trace.chunks():
        for p in range(chunk.num_prompts):
            tokens, n = chunk.prompt_tokens(p), int(chunk.prompt_lens[p])
            prompts.append(tokens[:n])
            continuations.append(tokens[n:])
    return prompts, continuations


def _scripted(trace: Trace) -> tuple[ScriptedTarget, list[NDArray[np.int32]], list[NDArray[np.int32]]]:
    """A target that says what a trace's target said; the prompts, and their continuations."""
    prompts, continuations = _recorded(trace)
    texts = [np.concatenate(pair) for pair in zip(prompts, continuations, strict=True)]
    return ScriptedTarget(texts, trace.manifest.vocab_size), prompts, continuations


def _lookup(trace: Trace, budgets: Sequence[int]) -> Iterator[tuple[str, int, Generation]]:
    """Prompt lookup on the same continuations, by budget."""
    target, prompts, _ = _scripted(trace)
    about = trace.manifest
    for budget in budgets:
        engine = Engine(target, NgramDrafter(), depth=min(budget, about.depth), budget=budget)
        yield "prompt lookup", budget, engine.generate(prompts, about.max_new_tokens, about.stop_token_ids)


def _tree_to_show(run: Generation, prompts: list[NDArray[np.int32]], vocabulary: Vocabulary) -> DrawnTree | None:
    """A round that keeps 3 to 6 drafts, none of them white space alone if there is one: of the most leaves."""
    best, shown = (False, 0), None
    before = [np.concatenate(pair) for pair in zip(prompts, run.tokens, strict=False)]
    done = [len(prompt) + 1 for prompt in prompts]  # committed, with the prefill's
    for round_ in run.rounds:
        for row, request in enumerate(round_.request_ids):
            tree, length = round_.tree, int(round_.acceptance.lengths[row])
            n = int(tree.node_counts[row])
            kept = tree.token_ids[row, round_.acceptance.node_indices[row, 1:length]].tolist()
            words = all(vocabulary.decode([token]).strip() for token in kept)
            merit = words, n - len(np.unique(tree.parents[row, 1:n]))
            if 4 <= length <= 7 and merit > best and not round_.acceptance.finished[row]:
                text = vocabulary.decode(before[request][: done[request]])
                best, shown = merit, DrawnTree(round_, row, text.rpartition("\n")[2].strip())
            done[request] += length
    return shown


def _same_tokens(name: str, expected: Sequence[NDArray[Any]], got: Sequence[NDArray[Any]]) -> Check:
    right, where = _count_equal(expected, got)
    total = sum(map(len, expected))
    return Check(name, f"{total}/{total}", f"{right}/{total}", not where, where)


def _count_equal(expected: Sequence[NDArray[Any]], got: Sequence[NDArray[Any]]) -> tuple[int, str]:
    """Tokens that agree, and where the first does not; empty if all do."""
    right, where = 0, ""
    for request, (e, g) in enumerate(zip(expected, got, strict=True)):
        n = min(len(e), len(g))
        wrong = np.flatnonzero(e[:n] != g[:n])
        right += n - len(wrong)
        if not where and len(wrong):
            where = f"request {request}, token {wrong[0]}: {g[wrong[0]]}, should be {e[wrong[0]]}"
        elif not where and len(e) != len(g):
            where = f"request {request} has {len(g)} tokens, should have {len(e)}"
    return right, where


def _equal(name: str, expected: str, got: str) -> Check:
    return Check(name, expected, got, expected == got)
