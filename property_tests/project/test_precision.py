"""What a model's type costs: errors and differing tokens against small cases worked by hand, and the command."""

import json

import numpy as np
import pytest
from click.testing import CliRunner

from ddtree.analysis import figures
from ddtree.analysis.precision import main, precision_table
from ddtree.kdtr import read_kdtr
from ddtree.model import DeepseekV3, ModelConfig, golden_bundle, load_model, random_weights
from ddtree.protocols import KVCache
from ddtree.trees import chain_tree

CONFIG = load_model(golden_bundle()).config


@pytest.fixture(scope="module")
def models():
    """The golden model in both types of the host."""
    return tuple(load_model(golden_bundle(), dtype=dtype, backend="reference") for dtype in ("float32", "float64"))


def outputs(model, text):
    """Hidden states of every layer, then logits: (n, D) each, in one pass."""
    cache = KVCache(model.new_cache(1, len(text)), np.zeros((1, 1), np.int32), np.zeros(1, np.int32))
    output = model.forward(chain_tree(text[None]), cache, hidden_layers=tuple(range(4)))
    return [output.hidden_states[i][0] for i in range(4)] + [output.logits[0]]


def changed(scale, token=None):
    """The golden model in float64, with one matrix a little larger and, if asked for, one token's logit higher."""
    arrays, _ = read_kdtr(golden_bundle())
    weights = {name: a.astype(np.float64) for name, a in arrays.items() if "/" not in name}
    weights["model.layers.1.self_attn.o_proj.weight"] *= scale
    if token is not None:
        weights["lm_head.weight"][token] *= 3
    return DeepseekV3(CONFIG, weights, dtype="float64", backend="reference")


def test_errors_are_those_of_each_row(models):
    narrow, wide = models
    texts = [np.arange(3, 20), np.arange(40, 47)]
    table = precision_table(narrow, wide, texts, chunk=5)
    assert table.layer == ("embedding", "1", "2", "3", "logits")
    assert (table.n_positions, table.dtype, table.wider_dtype) == (24, "float32", "float64")
    rows = [list(zip(outputs(narrow, text), outputs(wide, text), strict=True)) for text in texts]
    for i in range(5):
        one, other = (np.concatenate([text[i][k] for text in rows]) for k in (0, 1))
        errors = np.sqrt(((one - other) ** 2).sum(-1) / (other**2).sum(-1))
        # in passes of five tokens the roundings are others, of the same size
        assert table.worst[i] == pytest.approx(errors.max(), rel=0.7, abs=1e-12)
        assert table.mean[i] == pytest.approx(errors.mean(), rel=0.4, abs=1e-12)
    assert table.worst[0] == 0  # the weights are bfloat16 numbers
    assert 1e-8 < table.mean[1] < table.worst[4] < 1e-4
    assert len(table.differences.margin) == 0


def test_an_error_begins_at_the_layer_that_makes_it(models):
    exact = models[1]
    table = precision_table(changed(1.01), exact, [np.arange(3, 20)])
    assert table.worst[:2].tolist() == [0, 0]
    assert (table.mean[2:] > 1e-4).all()
    assert (table.worst >= table.mean).all()
    assert precision_table(exact, exact, [np.arange(9)]).worst.tolist() == [0] * 5


def test_tokens_that_differ_are_listed_with_their_margin(models):
    exact, text = models[1], np.arange(3, 40)
    other, token = changed(1.0, 17), 17
    wanted, got = outputs(exact, text)[-1], outputs(other, text)[-1]
    at = np.flatnonzero(wanted.argmax(-1) != got.argmax(-1))
    assert at.size > 3
    for chunk in (4, 512):
        differences = precision_table(other, exact, [np.arange(5), text], chunk=chunk).differences
        of_second = differences.text == 1
        assert differences.position[of_second].tolist() == at.tolist()
        assert set(differences.token.tolist()) == {token}
        assert differences.wider_token[of_second].tolist() == wanted[at].argmax(-1).tolist()
        best = np.sort(wanted[at])[:, -2:]
        assert differences.margin[of_second] == pytest.approx(best[:, 1] - best[:, 0])
        assert differences.error[of_second] == pytest.approx(np.abs(got - wanted)[at].max(-1))
        assert (differences.margin <= 2 * differences.error).all()


def test_the_float64_model_is_made_only_where_a_token_differs(models):
    narrow, exact = models
    made = []

    def make():
        made.append(exact)
        return exact

    precision_table(narrow, narrow, [np.arange(9)], exact=make)
    assert not made
    table = precision_table(changed(1.0, 17), narrow, [np.arange(3, 40)] * 2, exact=make)
    assert len(made) == 1
    assert len(table.differences.margin) > 3
    done: list[int] = []
    precision_table(narrow, exact, [np.arange(9)] * 3, on_text=done.append)
    assert done == [1, 2, 3]


@pytest.mark.parametrize(
    "texts, options, message",
    [
        ([], {}, "texts must hold one text or more"),
        ([[]], {}, r"texts must hold .* one token or more, got \[0\]"),
        ([[1, 512]], {}, r"texts\[0\].* 512"),
        ([[1]], {"chunk": 0}, "chunk must be .* got 0"),
        ([[1]], {"exact": None, "wider": 0}, "exact must be the float64 model where wider is of float32, got None"),
        ([np.arange(3, 40)], {"exact": 0, "wider": 0}, "exact must be a float64 model, got float32"),
    ],
)
def test_precision_refuses(models, texts, options, message):
    def which(name, default):
        return default if name not in options else None if options[name] is None else models[options[name]]

    with pytest.raises(ValueError, match=message):
        precision_table(
            changed(1.0, 17), which("wider", models[1]), texts,
            exact=which("exact", models[1]), chunk=options.get("chunk", 512),
        )  # fmt: skip


def test_precision_refuses_two_models(models):
    config = ModelConfig.from_dict(CONFIG.to_dict() | {"num_hidden_layers": 1})
    other = DeepseekV3(config, random_weights(config), dtype="float64", backend="reference")
    with pytest.raises(ValueError, match="model and wider must have one configuration"):
        precision_table(models[0], other, [[1]])


def test_the_figure_shows_the_table(models):
    table = precision_table(*models, [np.arange(3, 40)])
    ax = figures.plot_precision(table)
    for name, values in (("worst row", table.worst), ("mean row", table.mean)):
        drawn = np.asarray(figures.find(ax, name).get_ydata())
        assert np.isnan(drawn[0])
        assert drawn[1:] == pytest.approx(values[1:])
    assert [label.get_text() for label in ax.get_xticklabels()] == ["emb.", "1", "2", "3", "logits"]
    assert ax.get_title(loc="left") == "float32 against float64:\n0 of 37 greedy tokens differ"


def test_the_command_prints_the_table_and_writes_both_files(tmp_path):
    options = [
        "--dtype",
        "float32",
        "--against",
        "float64",
        "--texts",
        "2",
        "--new-tokens",
        "4",
        "--prompt-tokens",
        "3",
    ]
    result = CliRunner().invoke(main, [str(golden_bundle()), *options, "--out", str(tmp_path / "there")])
    assert result.exit_code == 0, result.output
    assert "float32 against float64, 14 positions" in result.output
    assert "0 of 14 greedy tokens differ" in result.output
    record = json.loads((tmp_path / "there" / "precision.json").read_text("utf-8"))
    assert [row["layer"] for row in record["layers"]] == ["embedding", "1", "2", "3", "logits"]
    assert (record["n_positions"], record["differences"]) == (14, [])
    assert (tmp_path / "there" / "precision.svg").read_text("utf-8").startswith("<?xml")


def test_the_command_on_random_weights_and_on_what_it_cannot_run(tmp_path):
    file = tmp_path / "config.json"
    file.write_text(json.dumps(CONFIG.to_dict()))
    options = ["--texts", "1", "--new-tokens", "2", "--prompt-tokens", "2", "--random", "3"]
    result = CliRunner().invoke(main, [str(file), "--dtype", "float32", *options])
    assert result.exit_code == 0, result.output
    assert "float32 against float32, 4 positions" in result.output
    for wrong, told in (([], "pass --backend cupy, or --dtype"), (["--dtype", "float64"], "be no narrower than")):
        result = CliRunner().invoke(main, [str(file), *wrong, *options])
        assert result.exit_code == 2
        assert told in result.output
    for text in ("{", "[]", "{}"):
        file.write_text(text)
        result = CliRunner().invoke(main, [str(file), "--dtype", "float32", *options])
        assert result.exit_code == 1
        assert "MODEL must be a config.json where --random is given, got" in result.output
