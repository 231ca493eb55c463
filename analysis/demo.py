"""What ``ddtree demo`` measures: each stage runs the real thing and returns what it expected, what it got, and tables.

Nothing is shown or written here.
"""

from __future__ import annotations

import sysconfig
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ddtree.analysis.acceptance import AcceptanceTable, TauTable, acceptance_table, tau_by_budget
from ddtree.analysis.environment import backend_states
from ddtree.drafters import NgramDrafter, NoiseLaw, OracleDrafter
from ddtree.engine import Engine, Generation, Round, ScriptedTarget
from ddtree.kdtr import read_kdtr
from ddtree.model import golden_bundle, load_model
from ddtree.property_tests.harness import HypothesisMissingError, check_operation, first_line
from ddtree.property_tests.tolerances import TOLERANCE
from ddtree.protocols import DraftContext, Drafter, KVCache
from ddtree.trees import chain_tree

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["FULL", "QUICK", "STAGES", "Check", "DrawnTree", "Findings", "Settings", "draw", "run_stage"]

BYTES = 256
GOLDEN_TOKENS = 24
DTYPES = ("float64", "float32")

LAW = ((0.7, 0.12, 0.05, 0.03),)
"""The synthetic drafter's: at any depth the truth is the first candidate in 70 of 100 cases, the second in 12, …"""


@dataclass(frozen=True)
class Settings:
    """How much the demo does.

    Attributes
    ----------
    files, prompt_bytes, new_bytes : int
        Texts in the batch; of each, what is given and what is generated.
    budgets : tuple of int
        Of both sweeps, rising.
    depth_limit : int
        L at budgets that are no smaller; a chain stops there.
    shown_budget : int
        The one of ``budgets`` whose acceptance by depth and whose tree are drawn.
    examples : int
        Drawn inputs an operation and backend.
    seed : int
        Of everything random.
    """

    files: int = 16
    prompt_bytes: int = 1024
    new_bytes: int = 128
    budgets: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64)
    depth_limit: int = 8
    shown_budget: int = 16
    examples: int = 60
    seed: int = 0


FULL = Settings()
QUICK = Settings(files=4, prompt_bytes=512, new_bytes=64, budgets=(1, 2, 4, 8, 16), examples=20)


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


def real_text(settings: Settings) -> Findings:
    """Prompt lookup on Python's own source code: τ by node budget, tree against chain."""
    texts = _library_texts(settings)
    runs: dict[tuple[str, int], Generation] = {}
    drafter = _Recalled(NgramDrafter(), settings.depth_limit, max(settings.budgets))
    found = Findings(drafter="n-gram drafter, Python's standard library", sweep=_sweep(texts, settings, drafter, runs))
    found.checks.append(_all_follow("runs that emit the text", texts, settings, runs))
    shown = runs["tree", settings.shown_budget]
    found.by_depth = acceptance_table(shown, seed=settings.seed)
    found.tree = _tree_to_show(shown, texts, settings.prompt_bytes)
    found.notes.append(
        f"{len(texts)} files of Python's standard library as bytes, {settings.prompt_bytes:,} given and "
        f"{settings.new_bytes:,} generated of each; the text itself stands for the target's choices."
    )
    return found


def synthetic(settings: Settings) -> Findings:
    """An oracle with a noise law on the same texts: its acceptance must be the law's."""
    texts = _library_texts(settings)
    continuations = [text[settings.prompt_bytes :] for text in texts]
    runs: dict[tuple[str, int], Generation] = {}
    drafter = OracleDrafter(continuations, BYTES, noise=NoiseLaw(LAW), seed=settings.seed)
    title = "synthetic: an oracle with a noise law, no drafter"
    found = Findings(drafter=title, synthetic=True, sweep=_sweep(texts, settings, drafter, runs))
    found.checks.append(_all_follow("runs that emit the text", texts, settings, runs))
    # Several depths are looked at together, so each interval is wide enough for all to hold in 999 of 1,000 drafters.
    chain = max(budget for mode, budget in runs if mode == "chain")
    table = acceptance_table(runs["chain", chain], level=1 - 0.001 / chain)
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
    "real text": real_text,
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
            ax.set_title(f"{found.drafter}, L ≤ {settings.depth_limit}", fontsize=7)
        if found.by_depth is not None:
            ax = axes[f"acceptance_by_depth{suffix}"] = plot_acceptance_by_depth(found.by_depth)
            ax.set_title(f"{found.drafter}, node budget {settings.shown_budget}", fontsize=7)
        if found.tree is not None:
            shown, row = found.tree.round, found.tree.row
            path = shown.acceptance.node_indices[row]
            ax = axes["tree.png"] = draw_tree(shown.tree, row, path=path, labels=byte_label)
            bonus = byte_label(int(shown.acceptance.bonus_token_ids[row]))
            title = f"after “{found.tree.before}”: {shown.acceptance.lengths[row] - 1} drafts accepted, then {bonus}"
            ax.set_title(title, fontsize=7, parse_math=False)
    return axes


def byte_label(token: int) -> str:
    """A byte as a reader knows it: the character, a sign for white space, else its hexadecimal value."""
    signs = {ord(" "): "␣", ord("\n"): "↵", ord("\t"): "⇥"}
    return signs.get(token) or (chr(token) if 32 < token < 127 else f"{token:02x}")


def _library_texts(settings: Settings) -> list[NDArray[np.int32]]:
    """Bytes of modules of the standard library, evenly spaced in the alphabet among those that are long enough."""
    size = settings.prompt_bytes + settings.new_bytes
    folder = Path(sysconfig.get_path("stdlib"))
    paths = sorted(path for path in folder.glob("*.py") if path.stat().st_size >= size)
    if len(paths) < settings.files:
        raise FileNotFoundError(
            f"{folder} must hold {settings.files} modules of {size:,} bytes or more as text, got {len(paths)}: "
            "this Python has its standard library elsewhere"
        )
    chosen = [paths[i * len(paths) // settings.files] for i in range(settings.files)]
    return [np.frombuffer(path.read_bytes()[:size], np.uint8).astype(np.int32) for path in chosen]


def _sweep(
    texts: Sequence[NDArray[np.int32]],
    settings: Settings,
    drafter: Drafter,
    runs: dict[tuple[str, int], Generation],
) -> TauTable:
    """Generate the texts with every budget, as a tree of that many nodes and as a chain; ``runs`` keeps the runs."""
    prompts = [text[: settings.prompt_bytes] for text in texts]
    target = ScriptedTarget(texts, BYTES)

    def run(mode: Any, budget: int) -> Generation:
        depth = min(budget, settings.depth_limit)  # of a chain, this is the number of nodes
        engine = Engine(target, drafter, depth=depth, budget=budget)
        runs[mode, budget] = engine.generate(prompts, settings.new_bytes, mode=mode)
        return runs[mode, budget]

    chains = [budget for budget in settings.budgets if budget <= settings.depth_limit]
    return tau_by_budget(run, {"chain": chains, "tree": settings.budgets}, seed=settings.seed)


class _Recalled:
    """A drafter that is asked once a context, for the largest draft of a sweep, and remembers the answer.

    All runs on one text meet the same contexts. The drafter must be one whose small drafts are the beginnings of its
    large ones, as :class:`NgramDrafter`'s are.
    """

    def __init__(self, drafter: Drafter, depth: int, topk: int) -> None:
        self.drafter, self.depth, self.topk = drafter, depth, topk
        self.drafts: dict[tuple[int, int], tuple[Any, Any]] = {}

    def __call__(self, context: DraftContext, depth: int, topk: int) -> tuple[Any, Any]:
        keys = [(request, len(tokens)) for request, tokens in zip(context.request_ids, context.tokens, strict=True)]
        new = [b for b, key in enumerate(keys) if key not in self.drafts]
        unknown = replace(
            context,
            request_ids=[context.request_ids[b] for b in new],
            tokens=[context.tokens[b] for b in new],
            root_token_ids=context.root_token_ids[new],
            hidden_states=[context.hidden_states[b] for b in new],
        )
        answers = zip(*self.drafter(unknown, self.depth, self.topk), strict=True)
        self.drafts |= dict(zip((keys[b] for b in new), answers, strict=True))
        log_probs, token_ids = (np.stack(arrays) for arrays in zip(*(self.drafts[key] for key in keys), strict=True))
        return log_probs[:, :depth, :topk], token_ids[:, :depth, :topk]


def _all_follow(
    name: str,
    texts: Sequence[NDArray[np.int32]],
    settings: Settings,
    runs: dict[tuple[str, int], Generation],
) -> Check:
    expected = [text[settings.prompt_bytes :] for text in texts]
    right = sum(_count_equal(expected, run.tokens)[0] == sum(map(len, expected)) for run in runs.values())
    return _equal(name, f"{len(runs)}/{len(runs)}", f"{right}/{len(runs)}")


def _tree_to_show(run: Generation, texts: Sequence[NDArray[np.int32]], prompt_bytes: int) -> DrawnTree | None:
    """A round that keeps 3 to 7 drafts: if there is one, without white space among them; then, of the most leaves."""
    best, shown = (False, 0), None
    done = np.full(len(texts), prompt_bytes + 1)  # committed, with the prefill's
    for round_ in run.rounds:
        for row, request in enumerate(round_.request_ids):
            tree, length = round_.tree, int(round_.acceptance.lengths[row])
            n = int(tree.node_counts[row])
            kept = tree.token_ids[row, round_.acceptance.node_indices[row, 1:length]]
            merit = bool((kept > ord(" ")).all()), n - len(np.unique(tree.parents[row, 1:n]))
            if 4 <= length <= 8 and merit > best and not round_.acceptance.finished[row]:
                before = texts[request][max(done[request] - 24, 0) : done[request]]
                best, shown = merit, DrawnTree(round_, row, "".join(map(byte_label, before.tolist())).lstrip("␣"))
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
