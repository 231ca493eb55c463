"""One figure of each kind, of data that is the same everywhere: what the references in ``figures/`` are of.

``python -m ddtree.property_tests.project.gallery FOLDER`` draws them all there, to be looked at; with ``--reference``
in place of a folder, it replaces the references. A reference is an image of all but the text, which no two font
renderers draw alike, and the text itself, in ``texts.json``.
"""

import json
from functools import cache
from pathlib import Path

import click
import numpy as np
from matplotlib.legend import Legend
from matplotlib.text import Text

from ddtree import accept_tree, build_tree
from ddtree.analysis import figures
from ddtree.analysis.acceptance import acceptance_table, length_table, rank_table, tau_table
from ddtree.analysis.calibration import calibration_table, reliability_table
from ddtree.analysis.choices import choices_of
from ddtree.analysis.pay import would_a_tree_pay
from ddtree.analysis.precision import DifferenceTable, PrecisionTable
from ddtree.analysis.speedup import cost_table, speedup_table
from ddtree.property_tests.project.made_traces import calibrated_chunk, replayed

REFERENCES = Path(__file__).parent / "figures"
CHUNK = calibrated_chunk(
    1, prompts=40, new=60, L=7, K=16, vocab_size=40, temperature=1.25, sharpness=3.5, falling=0.16, wobble=0.2
)
CHAINS, TREES = (1, 2, 4, 7), (1, 2, 4, 8, 16, 32, 64, 128, 256)


def seconds(nodes, context):
    """A cost model that is flat at first, as a GPU's: reading the weights, then what a node costs."""
    return 0.011 + 2e-6 * context + 3e-5 * max(nodes - 24, 0) + 4e-9 * nodes * context


@cache
def runs():
    """Chains and trees of several budgets on the trace."""
    trees = [("tree", b, replayed(CHUNK, budget=b)) for b in TREES]
    return [("chain", d, replayed(CHUNK, chain=d)) for d in CHAINS] + trees


def tau(ax=None):
    return figures.plot_tau_by_budget(tau_table(runs()), ax=ax)


def tau_and_speedup(ax=None):
    trees = runs()[len(CHAINS) :]
    return figures.plot_tau_by_budget(
        tau_table(trees), speedups=speedup_table(trees, seconds, draft_seconds=0.002), ax=ax
    )


def tau_and_speedup_of_two(ax=None):
    every = runs()
    return figures.plot_tau_by_budget(
        tau_table(every), speedups=speedup_table(every, seconds, draft_seconds=0.002), ax=ax
    )


def efficiency(ax=None):
    return figures.plot_efficiency(tau_table(runs()), ax=ax)


def expected(ax=None):
    return figures.plot_expected_tau(tau_table(runs()), ax=ax)


def lengths(ax=None):
    return figures.plot_lengths(
        length_table({"chain": replayed(CHUNK, chain=7), "tree": replayed(CHUNK, budget=64)}), ax=ax
    )


def by_depth(ax=None):
    return figures.plot_acceptance_by_depth(acceptance_table(replayed(CHUNK, budget=64)), ax=ax)


def by_depth_of_two(ax=None):
    two = {"chain": replayed(CHUNK, chain=7), "tree": replayed(CHUNK, budget=64)}
    return figures.plot_acceptance_by_depth({name: acceptance_table(rounds) for name, rounds in two.items()}, ax=ax)


def ranks(ax=None):
    return figures.plot_accepted_ranks(rank_table(replayed(CHUNK, budget=256)), ax=ax)


def reliability(ax=None):
    return figures.plot_reliability(reliability_table(CHUNK, rank=1), ax=ax)


def reliability_of_two(ax=None):
    two = {"depth 1": reliability_table(CHUNK, depth=1), "depth 5": reliability_table(CHUNK, depth=5)}
    return figures.plot_reliability(two, ax=ax)


@cache
def calibrated():
    return calibration_table(CHUNK, vocab_size=40)


def calibration(ax=None):
    return figures.plot_calibration_by_depth(calibrated(), ax=ax)


def latency(ax=None):
    nodes, contexts = (0, 1, 2, 4, 8, 16, 32, 64, 128, 256), (256, 2048, 16384)
    model = cost_table(seconds, nodes, contexts)
    noise = 1 + 0.03 * np.sin(np.arange(len(model.seconds)) * 2.4)
    measured = type(model)(model.context, model.nodes, model.seconds * noise)
    return figures.plot_latency(model, measured=measured, ax=ax)


def frontier(ax=None):
    every = [*runs(), *(("confidence", 64, replayed(CHUNK, budget=64, least=p)) for p in (0.05, 0.1, 0.2, 0.4))]
    return figures.plot_frontier(tau_table(every), ax=ax)


def speedup_frontier(ax=None):
    return figures.plot_frontier(speedup_table(runs(), seconds, draft_seconds=0.002), ax=ax)


@cache
def pays():
    return would_a_tree_pay(CHUNK, TREES)


def pay(ax=None):
    return figures.plot_pay(pays(), ax=ax)


def tree(ax=None):
    one, names = 288, ["def", "(", "self", ":", "\n", "return", " x", "_private_name", "$", "…"]
    rows = slice(one, one + 1)
    drafted = build_tree(CHUNK.log_probs[rows], CHUNK.draft_token_ids[rows], np.array([3], np.int32), budget=24)
    said = np.append(choices_of(CHUNK).choices[one], -1)[np.maximum(drafted.depths, 0)].astype(np.int32)
    path = accept_tree(drafted, said).node_indices[0]
    return figures.draw_tree(drafted, path=path, labels=lambda t: names[t % 10].replace("\n", "↵"), ax=ax)


def precision(ax=None):
    """As bfloat16 goes: each layer adds what the one below has, and a router's flip shows in the worst row."""
    layers = np.arange(1, 13)
    worst = np.r_[0, 0.004 * layers**0.7 * (1 + 2 * (layers > 7)), 0.06]
    mean = np.r_[0, 0.0025 * layers**0.5, 0.011]
    none = np.zeros(3, np.int64)
    differences = DifferenceTable(none, none, none, none + 1, np.full(3, 0.01), np.full(3, 0.05))
    names = ("embedding", *map(str, layers), "logits")
    return figures.plot_precision(PrecisionTable(names, worst, mean, 1024, "bfloat16", "float32", differences), ax=ax)


def memory(ax=None):
    rounds = np.arange(0, 20_000, 100)
    host = 180 + 50 * (1 - np.exp(-rounds / 1500))
    return figures.plot_memory(rounds.tolist(), {"host": host.tolist(), "GPU": [640.0] * len(rounds)}, ax=ax)


def decoding(ax=None):
    wide = {"transformers": 57.0, "autoregressive": 1212.0, "DDTree, 16 nodes": 6931.0}
    rows = [("float32", wide), ("bfloat16", {name: 1.5 * speed for name, speed in wide.items()})]
    return figures.plot_decoding("0.7 B parameters, one request", rows, peer="transformers", ax=ax)


FIGURES = {
    f.__name__: f
    for f in (
        tau, efficiency, expected, tau_and_speedup, tau_and_speedup_of_two, lengths, by_depth, by_depth_of_two, ranks,
        reliability,
        reliability_of_two, calibration, latency, frontier, speedup_frontier, pay, precision,
        memory, decoding, tree,
    )
}  # fmt: skip


def figure_of(axes):
    """The figure of what a function returned, laid out."""
    figure = (axes[0] if isinstance(axes, tuple) else axes).get_figure(root=True)
    figure.draw_without_rendering()
    return figure


def texts_of(figure):
    """Every text that the figure shows: titles, labels, numbers along the axes, legends."""
    off = {text for ax in figure.axes if not ax.axison for axis in (ax.xaxis, ax.yaxis) for text in axis.findobj(Text)}
    return sorted({t.get_text() for t in figure.findobj(Text) if t.get_visible() and t not in off} - {""})


def draw_without_text(figure, path):
    """Draw all but text and legends, whose shape and size depend on the machine's font renderer, and small."""
    for legend in figure.findobj(Legend):
        legend.remove()
    for text in figure.findobj(Text):
        text.set_visible(False)
    figure.savefig(path, format="png", dpi=80, metadata={"Software": None})


@click.command()
@click.argument("folder", type=click.Path(path_type=Path), required=False)
@click.option("--reference", is_flag=True, help="Replace the references.")
def main(folder, reference):
    """Draw every figure, as PNG of 300 dots an inch in FOLDER, or as the references."""
    if reference == (folder is not None):
        raise click.UsageError("say either FOLDER or --reference")
    texts = {}
    for name, draw in FIGURES.items():
        figure = figure_of(draw())
        texts[name] = texts_of(figure)
        if reference:
            draw_without_text(figure, REFERENCES / f"{name}.png")
        else:
            folder.mkdir(parents=True, exist_ok=True)
            figure.savefig(folder / f"{name}.png", dpi=300)
    if reference:
        (REFERENCES / "texts.json").write_text(json.dumps(texts, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
