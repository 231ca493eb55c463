"""Would a tree pay? The walk of a trace against the engine, the ranks by hand and by a loop."""

import json
import math
import re
from dataclasses import replace

import numpy as np
import pytest
from click.testing import CliRunner

from ddtree.analysis.acceptance import acceptance_table, tau_table
from ddtree.analysis.calibration import calibration_table
from ddtree.analysis.comparison import compare
from ddtree.analysis.pay import would_a_tree_pay
from ddtree.analysis.replay import replay
from ddtree.analysis.rounds import concatenate_rounds, round_table
from ddtree.analysis.trace import TraceWriter, open_trace
from ddtree.cli import main
from ddtree.cli.pay import _advice
from ddtree.engine import Engine, ScriptedTarget
from ddtree.policies import chain, fixed_budget
from ddtree.property_tests.project.made_traces import calibrated_chunk, chunk_of, random_chunk

V, BUDGETS = 6, (1, 2, 5, 9, 40)


class Recorded:
    """The drafter of one prompt of a chunk: what it drafted at each position."""

    def __init__(self, chunk, p):
        self.start, self.given = int(chunk.position_offsets[p]), int(chunk.prompt_lens[p])
        self.log_probs, self.token_ids = chunk.log_probs, chunk.draft_token_ids

    def __call__(self, context, depth, topk):
        at = [self.start + len(tokens) - self.given - 1 for tokens in context.tokens]
        log_probs = self.log_probs[at, :depth, :topk]
        ended = np.cumsum(np.isnan(log_probs), axis=-1) > 0  # a drafter says so by -inf
        return np.where(ended, np.float32(-np.inf), log_probs), self.token_ids[at, :depth, :topk]


def decoded(chunks, mode, budget):
    """The rounds of the engine on every prompt of the chunks."""
    tables, prompt = [], 0
    for chunk in chunks:
        _, L, K = chunk.log_probs.shape
        V = int(max(chunk.token_ids.max(), chunk.draft_token_ids.max())) + 1
        for p, given in enumerate(chunk.prompt_lens.tolist()):
            text = chunk.token_ids[chunk.token_offsets[p] : chunk.token_offsets[p + 1]]
            if len(text) > given:
                depth = budget if mode == "chain" else L
                engine = Engine(ScriptedTarget([text], V), Recorded(chunk, p), depth=depth, budget=budget, topk=K)
                rounds = round_table(engine.generate([text[:given]], len(text) - given, mode=mode))
                tables.append(replace(rounds, prompt=np.full(len(rounds), prompt)))
            prompt += 1
    return concatenate_rounds(tables)


@pytest.mark.parametrize("seed", range(3))
def test_the_walk_is_the_engines_round_for_round(seed):
    chunks = [random_chunk(2 * seed + i, vocab_size=V) for i in range(2)]
    table = would_a_tree_pay(chunks, BUDGETS, shown_budget=9)
    keys = [("chain", d) for d in (1, 2, 3, 4)] + [("tree", b) for b in BUDGETS]
    assert [*zip(table.policy, table.budget.tolist(), strict=True)] == keys
    runs = {key: decoded(chunks, *key) for key in keys}
    live = tau_table((policy, budget, rounds) for (policy, budget), rounds in runs.items())
    for name in ("n_rounds", "n_tokens", "tau", "low", "high"):
        np.testing.assert_array_equal(getattr(table, name), getattr(live, name))
    chain = runs["chain", 4]
    best = max(
        ("chain", d) for d in (1, 2, 3, 4) if runs["chain", d].tau == max(runs["chain", d].tau for d in (1, 2, 3, 4))
    )
    for key, ratio, low, high in zip(keys, table.pays_below, table.pays_low, table.pays_high, strict=True):
        found = compare(runs[key], runs["chain", min(best[1], 4)])
        assert [ratio, low, high] == pytest.approx([found.ratio, found.ratio_low, found.ratio_high])
    # along the chain, rank 1 is what the engine's chain of full depth accepts
    by_depth = acceptance_table(chain)
    choices = table.choices
    of_chain = slice(0, 4)
    assert choices.path[of_chain] == ("chain",) * 4
    # a round that had nothing to offer at a depth refused it all the same
    assert (choices.n[of_chain] >= by_depth.n_offered).all()
    assert choices.n_rank[of_chain, 0].tolist() == by_depth.n_accepted.tolist()


@pytest.mark.parametrize("seed, cut, K", [(0, 10**6, 5), (1, 3, 5), (2, 500, 10)])
def test_ranks_and_expectations_are_those_of_a_loop_in_any_batch(seed, cut, K, monkeypatch):
    monkeypatch.setattr("ddtree.analysis.pay._TREES", cut)
    chunk = random_chunk(seed, vocab_size=K + 1, K=K, prompts=8)
    table = would_a_tree_pay(chunk, (4, 12), shown_budget=12)
    tree, chain = decoded([chunk], "tree", 12), decoded([chunk], "chain", 4)
    counts = {(path, d): [0] * 10 for path in ("chain", "tree") for d in (1, 2, 3, 4)}
    for path, rounds in (("chain", chain), ("tree", tree)):
        for prompt, position, tokens in zip(rounds.prompt, rounds.position, rounds.tokens, strict=True):
            new = chunk.token_ids[chunk.token_offsets[prompt] : chunk.token_offsets[prompt + 1]][
                chunk.prompt_lens[prompt] :
            ]
            at = chunk.position_offsets[prompt] + position
            for d in range(1, 5):
                if d > tokens or position + d >= len(new) - 1:  # the path is over, or the walk was cut
                    break
                scores = chunk.log_probs[at, d - 1]
                k = int(np.argmin(np.append(scores > -np.inf, False)))
                row = chunk.draft_token_ids[at, d - 1, :k].tolist()
                choice = int(new[position + d])
                counts[path, d][0] += 1
                counts[path, d][min(1 + row.index(choice), 9) if choice in row else 9] += 1
    choices = table.choices
    for i, key in enumerate(counts):
        n, *of_rank, later = counts[key]
        assert (choices.path[i], choices.depth[i]) == key
        assert choices.n[i] == n
        assert choices.n_rank[i].tolist() == of_rank
        row = choices.records()[i]
        assert row["later"] == (pytest.approx(later / n) if n else None)
        wrong = n - of_rank[0]
        assert row["rescued"] == (pytest.approx(sum(of_rank[1:]) / wrong) if wrong else None)
    # the expectation is the rounds' own, but for what the continuation's end cuts off
    rows = {(r["policy"], r["budget"]): r for r in table.records()}
    assert rows["tree", 12]["expected"] <= tree.expected.mean() + 1e-9
    assert rows["chain", 4]["expected"] <= chain.expected.mean() + 1e-9


@pytest.mark.parametrize("seed, K", [(0, 5), (1, 3), (2, 1)])
def test_rounds_that_used_the_last_rank_are_those_of_a_replay(tmp_path, seed, K):
    chunk = calibrated_chunk(seed, prompts=6, new=30, L=3, K=K, vocab_size=8)
    write_trace(tmp_path, chunk)
    policies = [*(chain(d) for d in (1, 2, 3)), *(fixed_budget(b) for b in (1, 3, 6, 40))]
    table = would_a_tree_pay(chunk, (1, 3, 6, 40))
    used = [int(replay(open_trace(tmp_path), policy).used_last_rank.sum()) for policy in policies]
    assert table.used_last_rank.tolist() == used
    assert used[-1] == table.n_rounds[-1] > 0


def test_worked_by_hand():
    # V = 4. Every position drafts two depths, 0.6 and 0.3: candidates (1, 2) at depth 1, (3, 1) at depth 2.
    draft = np.log([[[0.6, 0.3]] * 2] * 4), np.array([[[1, 2], [3, 1]]] * 4)
    # new tokens 0 | 2 3 0 1: rank 2 and rank 1, then neither, then rank 1 (the last token allowed)
    table = would_a_tree_pay(chunk_of([[0, 2, 3, 0, 1]], [draft]), (1, 3), shown_budget=3)
    rows = {(r["policy"], r["budget"]): r for r in table.records()}
    # chain of 2: rounds begin at roots 0, 2, 3, 0 (each refuses or is at its end): 4 rounds of 1
    assert (rows["chain", 2]["tau"], rows["chain", 2]["n_rounds"]) == (1.0, 4)
    # tree of 3, in order: (1) .6, (1, 1) .36, (2) .3 — which keeps token 2 and has no child: 2 tokens, then 1, then 1
    assert (rows["tree", 3]["n_rounds"], rows["tree", 3]["n_tokens"]) == (3, 4)
    # remaining 4 and 2: depths below 2 and more count for the second; at 1 left nothing can be kept
    assert rows["tree", 3]["expected"] == pytest.approx(((1 + 0.6 + 0.36 + 0.3) + (1 + 0.6 + 0.3) + 1) / 3)
    assert rows["chain", 2]["expected"] == pytest.approx(((1.96) + (1.96) + 1.6 + 1) / 4)
    assert rows["tree", 3]["pays_below"] == pytest.approx(4 / 3)
    assert rows["tree", 3]["pays_low"] is None  # of one prompt there is no interval
    chain_1, chain_2, tree_1, tree_2 = table.choices.records()
    # the chain's rounds: choices 2 (rank 2), 3 (later), 0 (later); the fourth is the last token
    assert (chain_1["n"], chain_1["rank_1"], chain_1["rank_2"]) == (3, 0.0, pytest.approx(1 / 3))
    assert chain_1["rescued"] == pytest.approx(1 / 3)
    assert (chain_2["n"], chain_2["rank_1"], chain_2["rescued"]) == (0, None, None)
    # the tree's: choice 2 (rank 2), then behind it 3 (rank 1); and 0 (later)
    assert (tree_1["n"], tree_1["rank_2"], tree_1["later"]) == (2, 0.5, 0.5)
    assert (tree_2["n"], tree_2["rank_1"]) == (1, 1.0)
    json.dumps([table.records(), table.choices.records()], allow_nan=False)


def test_a_calibrated_drafter_gets_what_it_expects():
    chunk = calibrated_chunk(5, prompts=150, new=60, L=4, K=8, vocab_size=8)
    table = would_a_tree_pay(chunk, (4, 16, 64), level=0.9999)
    assert ((table.low <= table.expected) & (table.expected <= table.high)).all()
    trees = table.tau[table.budget >= 4][-3:]
    assert (np.diff(trees) > 0).all()


def test_it_prints_both_tables():
    text = str(would_a_tree_pay(calibrated_chunk(5, prompts=3, new=9, L=2, K=3, vocab_size=8), (1, 4)))
    assert "pays_below" in text.splitlines()[0]
    assert "rank_1" in text
    assert "rescued" in text


def test_nothing_to_walk_gives_nan():
    table = would_a_tree_pay(chunk_of([[0]], [(np.zeros((0, 2, 3)), np.zeros((0, 2, 3)))]), (1, 4))
    assert {math.isnan(t) for t in table.tau} == {True}
    assert table.n_rounds.tolist() == [0] * 4
    assert {row["later"] for row in table.choices.records()} == {None}


@pytest.mark.parametrize(
    "call, error, message",
    [
        (lambda c: would_a_tree_pay(c, ()), ValueError, r"budgets must hold at least one, got none"),
        (lambda c: would_a_tree_pay(c, (4, 0)), ValueError, r"budgets\[1\] must be in 1 … \d+, got 0"),
        (lambda c: would_a_tree_pay(c, (4, 2.5)), TypeError, r"budgets\[1\] must be an integer, got float"),
        (
            lambda c: would_a_tree_pay(c, (4,), shown_budget=8),
            ValueError,
            r"shown_budget must be one of .*\[4\], got 8",
        ),
        (lambda c: would_a_tree_pay(c, (4,), shown_budget=0), ValueError, r"shown_budget must be one .*\[4\], got 0"),
        (lambda c: would_a_tree_pay(c, level=1.5), ValueError, r"level must be over 0"),
        (lambda c: would_a_tree_pay([]), ValueError, r"trace must have at least one chunk"),
    ],
)
def test_bad_arguments_are_refused(call, error, message):
    with pytest.raises(error, match=message):
        call(random_chunk(0, prompts=2))


@pytest.fixture
def run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    runner = CliRunner(env={"COLUMNS": "80", "NO_COLOR": "1", "FORCE_COLOR": None})
    return lambda *words: runner.invoke(main, ["pay", *map(str, words)], catch_exceptions=False)


def write_trace(folder, chunk):
    """Record a chunk as a trace."""
    _, L, K = chunk.log_probs.shape
    with TraceWriter(folder, 8, L, K, max_new_tokens=40) as writer:
        for p, given in enumerate(chunk.prompt_lens.tolist()):
            rows = slice(chunk.position_offsets[p], chunk.position_offsets[p + 1])
            tokens = chunk.token_ids[chunk.token_offsets[p] : chunk.token_offsets[p + 1]]
            writer.append(tokens, given, chunk.log_probs[rows], chunk.draft_token_ids[rows])


def test_command_shows_and_writes_what_the_functions_say(run, tmp_path):
    chunk = calibrated_chunk(5, prompts=12, new=30, L=3, K=4, vocab_size=8)
    write_trace("recorded", chunk)
    result = run("recorded", "--budgets", "1,4,16", "--out", "out", "--format", "png")
    assert result.exit_code == 0, result.output
    assert all(len(line) <= 80 for line in result.stdout.splitlines())
    assert "…" not in result.stdout
    table, calibration = would_a_tree_pay(chunk, (1, 4, 16)), calibration_table(chunk, vocab_size=8)
    for row in table.records():
        line = rf"{row['policy']} +{row['budget']} +{row['expected']:.2f} +{row['tau']:.2f} "
        assert re.search(line, result.stdout), line
    for row in table.choices.records():
        line = rf"{row['path']} +{row['depth']} +{row['n']} +{row['rank_1']:.1%} +{row['rank_2']:.1%} "
        assert re.search(line, result.stdout), line
    for row in calibration.records()[:3]:
        assert re.search(rf"{row['depth']} +{row['n']} .* {row['brier']:.3f} +{row['temperature']:.2f} ", result.stdout)
    verdict = " ".join(result.stdout.split())
    emits = f"emits {table.records()[-1]['pays_below']:.2f} ("
    assert f"A tree of 16 nodes, the largest budget up to 64 of those asked for, {emits}" in verdict
    assert "faster while its round costs less than that many of the chain's." in verdict
    assert "pays below: τ over that of the best chain." in verdict
    assert "tested: rounds that came to this depth with more than one token left to emit." in verdict
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        "pay.json",
        "pay.png",
        "calibration.png",
        "reliability.png",
    }
    document = json.loads((tmp_path / "out/pay.json").read_text(encoding="utf-8"))
    assert document["budgets"] == table.records()
    assert document["choices"] == table.choices.records()
    assert document["calibration"] == calibration.records()
    assert (document["trace"], document["level"]) == ("recorded", 0.95)


def test_command_says_where_a_wider_record_might_have_changed_the_trees(run):
    write_trace("recorded", calibrated_chunk(5, prompts=12, new=30, L=3, K=3, vocab_size=8))
    told = " ".join(run("recorded", "--budgets", "1,16,64").stdout.split())
    assert (
        "More than 5% of the rounds used the last rank, so that a wider record might have changed their trees" in told
    )
    assert told.endswith("trees: tree of 16, 64.")
    assert "last rank" not in run("recorded", "--budgets", "1").stdout
    assert "last recorded rank, K − 1" in " ".join(run("--help").stdout.split())


@pytest.mark.parametrize(
    "budgets, said",
    [
        ("1", "A tree of 1 node, the largest budget up to 64 of those asked for, emits 0."),
        ("1", "do not use a tree here, the chain gives as much or more."),
        ("1,70", "do not use a tree of this size here, the chain gives as much or more. Other budgets of the table do"),
        ("70,90", "A tree of 70 nodes, the smallest budget of those asked for, emits 1."),
    ],
)
def test_conclusion_says_of_which_tree_it_is_and_advises_against_one_that_does_worse(run, budgets, said):
    write_trace("recorded", calibrated_chunk(5, prompts=12, new=30, L=3, K=4, vocab_size=8))
    result = run("recorded", "--budgets", budgets)
    assert said in " ".join(result.stdout.split())


def test_advice_where_the_interval_holds_1():
    row = {"pays_below": 1.02, "pays_low": 0.97, "pays_high": 1.07}
    assert "The interval holds 1, so that it may be no better: record more prompts." in _advice(row, True)
    assert "holds" not in _advice(row | {"pays_low": 1.01}, True)


def test_command_of_a_trace_without_rounds_and_of_none(run, tmp_path):
    write_trace("short", chunk_of([[1], [2]], [(np.zeros((0, 2, 2)), np.zeros((0, 2, 2)))] * 2))
    result = run("short")
    assert result.exit_code == 0, result.output
    assert "No rounds: the trace has no prompt of two new tokens" in result.stdout
    missing = run("nowhere")
    assert missing.exit_code == 1
    assert "nowhere" in missing.stderr
    (tmp_path / "short/manifest.json").write_text("{")
    damaged = run("short")
    assert damaged.exit_code == 2
    assert "manifest.json" in damaged.stderr
    for budgets, number in (("0", "0"), ("8,999999999", "999999999")):
        refused = run("short", "--budgets", budgets)
        assert refused.exit_code == 2
        assert f"{number} must be in 1 … 65,536" in refused.stderr
