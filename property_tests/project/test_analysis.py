"""Statistics of acceptance and figures that show them."""

import json
import math
import re
import subprocess
import sys

import numpy as np
import pytest
from matplotlib.figure import Figure

from ddtree import reference
from ddtree.analysis.acceptance import acceptance_table, tau_by_budget, tau_interval, wilson_interval
from ddtree.analysis.demo import byte_label
from ddtree.analysis.figures import (
    LONGEST_LABEL,
    draw_tree,
    plot_acceptance_by_depth,
    plot_tau_by_budget,
    save,
    tree_layout,
)
from ddtree.drafters import NgramDrafter, OracleDrafter
from ddtree.engine import Engine, Generation, Round, ScriptedTarget
from ddtree.trees import Acceptance, tree_from_parents


def a_round(parents, paths, finished, request_ids=None, counts=None):
    """A Round of trees with these parents whose kept paths are these."""
    tree = tree_from_parents(np.zeros_like(parents), np.asarray(parents), counts)
    nodes = np.full((len(paths), tree.max_depth + 1), -1, np.int32)
    for row, path in zip(nodes, paths, strict=True):
        row[: len(path)] = path
    lengths = np.array([len(path) for path in paths], np.int32)
    acceptance = Acceptance(nodes, lengths, np.zeros_like(lengths), np.array(finished))
    ids = tuple(range(len(paths))) if request_ids is None else request_ids
    return Round(ids, tree, np.zeros(tree.parents.shape, np.int32), acceptance)


CHAIN, FORK = [-1, 0, 1, 2], [-1, 0, 0, 1]


def hand_worked_rounds():
    """Six rows, each for one reason; what each offers (o) and accepts (a) at depths 1, 2, 3 stands beside it."""
    return [
        a_round(
            [CHAIN, FORK, CHAIN],
            [[0, 1], [0, 2], []],  # o o . / a . .   o . . / a . . (node 2 has no child)   inert: no round
            [False, False, True],
        ),
        a_round(
            [CHAIN, CHAIN],
            [[0, 1], [0]],  # cut at depth 1: o . . / a . .   cut at the root: . . .
            [True, True],
        ),
        a_round([CHAIN], [[0, 1, 2, 3]], [False]),  # to the end, where nothing is left to offer: o o o / a a a
        a_round([[-1, 0, 1, 2]], [[0]], [False], counts=np.array([1])),  # no tree but its root: . . .
    ]


def test_acceptance_table_worked_by_hand():
    table = acceptance_table(hand_worked_rounds())
    assert table.depth.tolist() == [1, 2, 3]
    assert table.n_offered.tolist() == [4, 2, 1]
    assert table.n_accepted.tolist() == [4, 1, 1]
    assert table.rate.tolist() == [1.0, 0.5, 1.0]
    assert table.n_rounds == 6
    assert table.tau == (2 + 2 + 2 + 1 + 4 + 1) / 6
    np.testing.assert_array_equal([table.low, table.high], wilson_interval([4, 1, 1], [4, 2, 1]))


def test_depth_that_no_round_offers_has_no_rate():
    table = acceptance_table([a_round([CHAIN], [[0]], [False])])
    assert (table.n_offered.tolist(), table.n_accepted.tolist()) == ([1, 0, 0], [0, 0, 0])
    rows = json.loads(json.dumps(table.records(), allow_nan=False))
    assert rows[1] == {"depth": 2, "n_offered": 0, "n_accepted": 0, "rate": None, "low": None, "high": None}


def test_no_rounds_give_an_empty_table():
    table = acceptance_table([])
    assert (len(table.depth), table.n_rounds) == (0, 0)
    assert math.isnan(table.tau)


def test_generation_and_its_rounds_count_alike_and_give_its_tau():
    texts = [np.arange(60) * 7 % 11, np.arange(60) * 5 % 13]
    engine = Engine(ScriptedTarget(texts, 16), OracleDrafter([t[20:] for t in texts], 16), depth=3, budget=8)
    generation = engine.generate([t[:20] for t in texts], 30)
    table = acceptance_table(generation)
    assert table.records() == acceptance_table(iter(generation.rounds)).records()
    assert (table.tau, table.n_rounds) == (generation.tau, generation.num_rounds)
    assert table.rate.tolist() == [1.0, 1.0, 1.0]  # the oracle is always right, so cuts count as no refusals


@pytest.mark.parametrize(
    "k, n, low, high",
    [
        (8, 10, 0.4902, 0.9433),
        (0, 10, 0.0, 0.2775),
        (10, 10, 0.7225, 1.0),
        (1, 1, 0.2065, 1.0),
        (5, 10, 0.2366, 0.7634),
    ],
)
def test_wilson_interval_is_the_published_one(k, n, low, high):
    assert [round(float(x), 4) for x in wilson_interval(k, n)] == [low, high]


def test_wilson_interval_holds_the_rate_and_widens_with_the_level():
    k, n = np.arange(31), np.full(31, 30)
    low, high = wilson_interval(k, n)
    assert ((low >= 0) & (low <= k / n) & (k / n <= high) & (high <= 1)).all()
    wider = wilson_interval(k, n, level=0.99)
    assert ((wider[0] <= low) & (wider[1] >= high)).all()
    assert np.isnan(wilson_interval(0, 0)).all()


@pytest.mark.parametrize("level", [0, 1, 95])
def test_level_is_a_share(level):
    with pytest.raises(ValueError, match=rf"level must be over 0 and below 1, got {level}"):
        wilson_interval(1, 2, level=level)
    with pytest.raises(ValueError, match="level must be over 0 and below 1"):
        acceptance_table([], level=level)


def test_tau_interval_draws_whole_requests():
    # request 0 emits 4 tokens a round, request 1 one; each has two rounds
    rounds = [a_round([CHAIN, CHAIN], [[0, 1, 2, 3], [0]], [False, False]) for _ in range(2)]
    tau, low, high = tau_interval(rounds, level=0.9)
    assert (tau, low, high) == (2.5, 1.0, 4.0)  # both ends are drawn in a quarter of the cases
    assert tau_interval(rounds, seed=1) == tau_interval(rounds, seed=1)
    alike = [a_round([CHAIN, CHAIN], [[0, 1], [0, 1]], [False, False])]
    assert tau_interval(alike) == (2.0, 2.0, 2.0)


def test_one_request_has_no_interval():
    tau, low, high = tau_interval([a_round([CHAIN], [[0, 1]], [False])])
    assert tau == 2.0
    assert math.isnan(low)
    assert math.isnan(high)


@pytest.fixture(scope="module")
def sweep():
    texts = [np.arange(40 + 9 * i) % 10 for i in range(3)]
    target, oracle = ScriptedTarget(texts, 10), OracleDrafter([t[9:] for t in texts], 10)

    def run(mode, budget):
        return Engine(target, oracle, depth=min(budget, 4), budget=budget).generate(
            [t[:9] for t in texts], 26, mode=mode
        )

    return tau_by_budget(run, {"chain": [1, 4], "tree": [1, 4, 9]})


def test_sweep_has_a_row_a_run(sweep):
    assert sweep.mode == ("chain", "chain", "tree", "tree", "tree")
    assert sweep.budget.tolist() == [1, 4, 1, 4, 9]
    # 25 tokens after the prefill's, in rounds of 1 + depth: 13 rounds of two (the last cut), 5 of five
    assert sweep.n_tokens.tolist() == [75] * 5
    assert sweep.n_rounds.tolist() == [39, 15, 39, 15, 15]
    assert sweep.tau.tolist() == [75 / 39, 5.0, 75 / 39, 5.0, 5.0]
    assert sweep.records()[1] == dict(mode="chain", budget=4, tau=5.0, low=5.0, high=5.0, n_rounds=15, n_tokens=75)


def test_tau_figure_shows_the_table(sweep):
    drawing = plot_tau_by_budget(sweep)
    for mode in ("chain", "tree"):
        rows = [row for row in sweep.records() if row["mode"] == mode]
        line, _, (bars,) = drawing.artists[mode]
        assert line.get_xdata().tolist() == [row["budget"] for row in rows]
        assert line.get_ydata().tolist() == [row["tau"] for row in rows]
        ends = [segment[:, 1].tolist() for segment in bars.get_segments()]
        np.testing.assert_allclose(ends, [[row["low"], row["high"]] for row in rows])
    legend = drawing.axes.get_legend()
    assert legend is not None
    assert [text.get_text() for text in legend.get_texts()] == ["chain", "tree", "autoregressive"]


def test_acceptance_figure_shows_the_table():
    table = acceptance_table(hand_worked_rounds())
    ax = Figure().add_subplot()
    drawing = plot_acceptance_by_depth(table, ax=ax)
    assert drawing.axes is ax
    line, _, (bars,) = drawing.artists["rate"]
    assert line.get_xydata().tolist() == [[1.0, 1.0], [2.0, 0.5], [3.0, 1.0]]
    ends = [segment[:, 1] for segment in bars.get_segments()]
    np.testing.assert_allclose(ends, np.stack([table.low, table.high], axis=1))
    assert [tick.get_text() for tick in ax.get_xticklabels()] == ["1\nn = 4", "2\nn = 2", "3\nn = 1"]


def test_figures_of_tables_without_intervals_or_rows(tmp_path):
    one = [a_round([CHAIN], [[0]], [False])]
    save(plot_acceptance_by_depth(acceptance_table(one)), tmp_path / "one.png")
    save(plot_acceptance_by_depth(acceptance_table([])).figure, tmp_path / "none.png")
    single = tau_by_budget(lambda mode, budget: Generation([], [], one), {"tree": [4]})
    assert single.records() == [dict(mode="tree", budget=4, tau=1.0, low=None, high=None, n_rounds=1, n_tokens=1)]
    save(plot_tau_by_budget(single).figure, tmp_path / "single.png")
    nothing = tau_by_budget(lambda mode, budget: Generation([], []), {"tree": [], "chain": [0]})
    assert [row["tau"] for row in nothing.records()] == [None]
    save(plot_tau_by_budget(nothing).figure, tmp_path / "nothing.png")


def random_tree(seed, n):
    rng = np.random.default_rng(seed)
    reach = rng.choice([1, 3, n])  # a chain, a bush, anything
    parents = np.array([-1, *(int(rng.integers(max(0, i - reach), i)) for i in range(1, n))])
    return tree_from_parents(rng.integers(0, 10 ** rng.integers(1, 7), (1, n)), parents[None])


@pytest.mark.parametrize("n", [1, 2, 17, 64])
def test_layout_keeps_nodes_apart(n):
    for seed in range(25):
        tree = random_tree(seed, n)
        places = tree_layout(tree.parents[0])
        assert places[:, 0].tolist() == tree.depths[0].tolist()
        for column in range(int(places[:, 0].max()) + 1):
            rows = np.sort(places[places[:, 0] == column, 1])
            assert (np.diff(rows) >= 1).all()


@pytest.mark.parametrize("seed, n", [(0, 64), (1, 64), (2, 17), (3, 2), (4, 1)])
def test_drawn_boxes_are_apart_and_hold_their_labels(seed, n):
    tree = random_tree(seed, n)
    names = [f"token {i:>7}" if i % 3 else "x" for i in range(n)]
    for labels in (None, names):
        drawing = draw_tree(tree, labels=labels)
        drawing.figure.draw_without_rendering()
        boxes = [box.get_window_extent() for box in drawing.artists["boxes"]]
        texts = [text.get_window_extent() for text in drawing.artists["texts"]]
        for i, (box, text) in enumerate(zip(boxes, texts, strict=True)):
            assert box.x0 <= text.x0, names[i]
            assert text.x1 <= box.x1, names[i]
            assert not any(box.overlaps(other) for other in boxes[i + 1 :])
        page = drawing.figure.bbox
        assert all(page.x0 <= box.x0 and box.x1 <= page.x1 and page.y0 <= box.y0 and box.y1 <= page.y1 for box in boxes)


def small_tree():
    log_probs = np.log(np.array([[[0.8, 0.1], [0.5, 0.4]]], np.float32))
    return reference.build_tree(log_probs, np.array([[[1, 2], [3, 4]]], np.int32), np.array([9], np.int32), budget=4)


def test_tree_figure_shows_tokens_probabilities_and_the_path():
    tree = small_tree()
    assert tree.parents[0].tolist() == [-1, 0, 1, 1, 0]
    drawing = draw_tree(tree, path=np.array([0, 1, 3, -1]))
    texts, boxes, edges = (drawing.artists[name] for name in ("texts", "boxes", "edges"))
    assert [text.get_text() for text in texts] == ["9", "1", "3", "4", "2"]
    assert [text.get_weight() for text in texts] == ["bold", "bold", "normal", "bold", "normal"]
    assert len({box.get_facecolor() for box in boxes}) == 3  # the root, the accepted, the others
    assert boxes[1].get_facecolor() == boxes[3].get_facecolor() != boxes[2].get_facecolor() == boxes[4].get_facecolor()
    widths = edges.get_linewidths()  # of the probabilities 0.8, 0.5, 0.4, 0.1
    assert widths[0] > widths[1] > widths[2] > widths[3]
    colours = [tuple(colour) for colour in edges.get_colors()]
    assert colours[0] == colours[2] != colours[1] == colours[3]


def test_tree_labels():
    tree = small_tree()

    def written(labels):
        return [text.get_text() for text in draw_tree(tree, labels=labels).artists["texts"]]

    assert written(lambda token: f"${token}$") == ["$9$", "$1$", "$3$", "$4$", "$2$"]
    assert written(["a" * 40, *"bcde"])[0] == "a" * (LONGEST_LABEL - 1) + "…"
    assert [byte_label(b) for b in b" \n\tA\x00\xff"] == ["␣", "↵", "⇥", "A", "00", "ff"]


@pytest.mark.parametrize(
    "options, message",
    [
        ({"request": 1}, r"request must be in 0 … 0, got 1"),
        ({"path": [0, 5]}, r"path must hold nodes 0 … 4, got 5"),
        ({"labels": ["a"]}, r"labels must have one entry a node, 5, got 1"),
    ],
)
def test_tree_figure_refuses(options, message):
    with pytest.raises(ValueError, match=message):
        draw_tree(small_tree(), **options)


def test_saved_figures_are_whole_or_not_there(tmp_path, monkeypatch):
    figure = draw_tree(small_tree()).figure
    assert save(figure, tmp_path / "tree.png").read_bytes().startswith(b"\x89PNG")
    assert b"</svg>" in save(figure, tmp_path / "tree.svg").read_bytes()
    with pytest.raises(ValueError, match=r"path must end in \.png or \.svg, got 'tree\.jpg'"):
        save(figure, tmp_path / "tree.jpg")

    def fails(file, **options):
        file.write(b"half")
        raise RuntimeError("disk")

    monkeypatch.setattr(figure, "savefig", fails)
    with pytest.raises(RuntimeError, match="disk"):
        save(figure, tmp_path / "half.png")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["tree.png", "tree.svg"]


def test_statistics_need_no_matplotlib_and_figures_no_pyplot():
    code = """
import sys
import numpy as np
import ddtree.analysis.acceptance, ddtree.analysis.figures
assert "matplotlib" not in sys.modules
from ddtree import chain_tree
ddtree.analysis.figures.draw_tree(chain_tree(np.array([[1, 2]]))).figure.draw_without_rendering()
assert "matplotlib.pyplot" not in sys.modules
"""
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True)


def test_tables_and_generations_print_for_people():
    generation = Engine(ScriptedTarget([b"abcabcabcabc"], 256), NgramDrafter(), depth=2, budget=2).generate(
        [b"abcabc"], 6
    )
    assert re.fullmatch(r"Generation\(1 prompts, 6 tokens, \d rounds, tau=\d\.\d\d\)", repr(generation))
    first, *rows = str(acceptance_table(generation)).splitlines()
    assert first.split() == ["depth", "n_offered", "n_accepted", "rate", "low", "high"]
    assert [row.split()[0] for row in rows] == ["1", "2"]
