"""How the pair was made and measured: the corpus, the measures, and the parts of the training that run anywhere."""

import json
import math
import random
from email.message import Message
from pathlib import Path

import numpy as np
import pytest

from ddtree.analysis.loops import ends_in_loop
from ddtree.analysis.rounds import round_table
from ddtree.analysis.training import corpus, curves, evaluate
from ddtree.analysis.training.corpus import Source
from ddtree.drafters import OracleDrafter
from ddtree.engine import Engine, ScriptedTarget
from ddtree.pair import load_prompts, pair_folder

# --- corpus ---


def metadata(**fields):
    message = Message()
    for name, values in fields.items():
        for value in [values] if isinstance(values, str) else values:
            message[name.replace("_", "-")] = value
    return message


@pytest.mark.parametrize(
    "fields, stated, permissive",
    [
        ({"License_Expression": "MIT", "License": "GPL"}, "MIT", True),
        ({"Classifier": ["License :: OSI Approved :: BSD License", "Topic :: X"]}, "BSD License", True),
        ({"Classifier": ["License :: OSI Approved"], "License": "Apache 2.0\nmore"}, "Apache 2.0", True),
        ({"License_Expression": "MPL-2.0 AND MIT"}, "MPL-2.0 AND MIT", False),
        ({"License": "LGPL"}, "LGPL", False),
        ({"License": "NVIDIA Proprietary Software"}, "NVIDIA Proprietary Software", False),
        ({}, "", False),
    ],
)
def test_licence_is_what_the_metadata_state(fields, stated, permissive):
    assert corpus.licence(metadata(**fields)) == stated
    fit = bool(corpus.PERMISSIVE.search(stated)) and not corpus.NOT_PERMISSIVE.search(stated)
    assert fit == permissive


def test_only_code_is_read(tmp_path):
    good = "x = 1  # a line of code\n" * 20
    for text, is_read in (
        (good, True),
        ("x = 1\n", False),  # too short
        (good + "y = '" + "a" * 700 + "'\n", False),
        (good + "0x1, " * 500, False),
        ("a = 1" + ";  b = 2" * 100, False),
    ):
        path = tmp_path / "file.py"
        path.write_text(text)
        assert corpus.read_source(str(path)) == (text if is_read else None)
    path.write_bytes(good.encode() + b"\xff")
    assert corpus.read_source(str(path)) is None
    assert corpus.read_source(str(tmp_path / "missing.py")) is None


def test_nothing_held_out_is_trained_on(monkeypatch):
    held = Source("networkx", "networkx/a.py", "held = 1\n")
    library = Source("stdlib", "json/decoder.py", "held = 2\n")
    assert held.is_held_out
    assert library.is_held_out
    assert not Source("stdlib", "jsonish.py", "").is_held_out
    kept = Source("pkg", "pkg/a.py", "kept = 1\n")
    others = [
        Source("pkg", "pkg/copy.py", held.text),
        Source("pkg", "pkg/again.py", kept.text),
        Source("pkg", "pkg/argparse.py", "a fork\n"),
    ]
    assert corpus.choose_training([held, library, kept, *others], [held, library]) == [kept]
    monkeypatch.setattr(corpus, "MOST_CHARACTERS", 12)
    more = [Source("pkg", f"pkg/{i}.py", f"n = {i}\n") for i in range(5)]
    assert [s.name for s in corpus.choose_training(more, [])] == ["pkg/0.py", "pkg/1.py"]


@pytest.fixture(scope="module")
def tokenizer():
    pytest.importorskip("tokenizers", reason="optional library tokenizers is not installed")
    text = (Path(__file__).resolve().parents[2] / "README.md").read_text(encoding="utf-8")
    return corpus.train_tokenizer([Source("p", f"{i}.py", text) for i in range(3)], 400)


def test_tokens_are_the_bytes_of_the_text(tokenizer):
    tokens = corpus.token_bytes(tokenizer)
    assert tokens[corpus.END_OF_TEXT] == b"<|endoftext|>"
    assert {bytes([i]) for i in range(256)} <= set(tokens)
    text = "def f():\n\treturn 'é漢🙂'\r\n\0"
    ids = corpus.encode(tokenizer, [text, "x"])
    ends = np.flatnonzero(ids == corpus.END_OF_TEXT)
    assert ends.tolist() == [0, len(ids) - 2]
    assert b"".join(tokens[i] for i in ids[1:-2]).decode() == text


def test_corpus_that_is_too_small_is_refused():
    pytest.importorskip("tokenizers", reason="optional library tokenizers is not installed")
    with pytest.raises(ValueError, match=r"the corpus must give 2048 tokens, got .*: it is too small"):
        corpus.train_tokenizer([Source("p", "a.py", "x = 1\n")], 2048)


def test_prompts_are_distinct_and_of_held_out_files(tokenizer, monkeypatch):
    monkeypatch.setattr(corpus, "NUM_PROMPTS", 12)
    text = "".join(f"line {i} of many, {i * i} and {i**3}\n" for i in range(400))
    held = [Source("networkx", "networkx/a.py", text), Source("stdlib", "csv.py", text.upper())]
    prompts = corpus.choose_prompts(tokenizer, held, random.Random(1))
    assert len({tuple(ids) for _, ids in prompts}) == 12
    assert sum(label == "stdlib:csv.py" for label, _ in prompts) == 3
    assert all(64 <= len(ids) <= 128 for _, ids in prompts)


# --- measures ---


def test_loops_are_told_from_lines_that_are_alike():
    random_row = np.random.default_rng(0).integers(0, 2000, 64).astype(np.int32)
    assert not ends_in_loop(random_row)
    for period in (1, 7, 24):
        assert ends_in_loop(np.concatenate([random_row[: 24 - period], np.resize(np.arange(period), 40 + period)]))
    assert not ends_in_loop(np.concatenate([random_row[:20], np.resize(np.arange(25), 44)]))
    almost = np.zeros(64, np.int32)
    almost[50] = 1
    assert not ends_in_loop(almost)


def test_limit_cuts_the_last_round_of_each_prompt():
    text = np.arange(200, dtype=np.int32) % 97
    engine = Engine(ScriptedTarget([text], vocab_size=97), OracleDrafter([text[10:]], 97), depth=7, budget=7)
    table = round_table(engine.generate([text[:10]], evaluate.TOKENS + 8, mode="chain"))
    limited_tokens, limited_rounds, tokens, rounds = evaluate.per_prompt(table, 1)[:, 0]
    assert (limited_tokens, limited_rounds) == (63, 8)  # after the prefill's token: 7 rounds of 8, one of 7
    assert (tokens, rounds) == (64, 8)
    at_limit = round_table(engine.generate([text[:10]], evaluate.TOKENS, mode="chain"))
    assert (at_limit.tokens.sum(), len(at_limit)) == (limited_tokens, limited_rounds)


def test_interval_is_over_prompts():
    tau, low, high = evaluate.interval(np.array([40.0, 40.0, 40.0]), np.array([10.0, 10.0, 10.0]))
    assert tau == low == high == 4.0
    rng = np.random.default_rng(0)
    rounds = rng.integers(10, 30, 400).astype(float)
    tokens = rounds * rng.normal(4.0, 0.5, 400)
    tau, low, high = evaluate.interval(tokens, rounds)
    error = 0.5 * math.sqrt(float((rounds**2).sum())) / rounds.sum()
    assert high - low == pytest.approx(2 * 1.96 * error, rel=0.15)


def test_interrupted_evaluation_goes_on(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(evaluate, "TOKENS", 44)
    monkeypatch.setattr(evaluate, "BUDGETS", (8,))
    monkeypatch.setattr(evaluate, "TEMPERATURES", (0.0,))
    out = tmp_path / "out.json"
    monkeypatch.setattr("sys.argv", ["evaluate", "--prompts", "2", "--out", str(out)])
    evaluate.main()
    results = json.loads(out.read_text())
    assert list(results) == ["prompt lookup, T = 0", "chain, T = 0", "DDTree 8, T = 0"]
    assert len({tuple(row["continuations"]) for row in results.values()}) == 1  # no way changes the tokens
    out.write_text(json.dumps({name: row | {"seconds": -1.0} for name, row in results.items() if "chain" not in name}))
    evaluate.main()
    again = json.loads(out.read_text())
    assert {name: row["seconds"] == -1.0 for name, row in again.items()} == {
        name: "chain" not in name for name in results
    }
    assert again["chain, T = 0"]["tau"] == results["chain, T = 0"]["tau"]
    assert "DDTree 8" in capsys.readouterr().out


def test_curves_are_drawn_from_the_records(tmp_path, monkeypatch):
    monkeypatch.setattr("sys.argv", ["curves", "--pair", str(pair_folder()), "--out", str(tmp_path / "curves.svg")])
    curves.main()
    assert (tmp_path / "curves.svg").read_bytes().startswith(b"<?xml")


# --- training, where torch is installed ---


def test_continuations_are_those_of_a_full_pass():
    torch = pytest.importorskip("torch", reason="optional library torch is not installed")
    from ddtree.analysis.training.make_golden import load_models

    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # test processes keep the cores busy already
    target, _ = load_models(pair_folder())
    prompts = torch.stack([torch.from_numpy(row[:40]).long() for row in load_prompts().tokens[:3]])
    with torch.no_grad():
        ids = target.generate(prompts, 60)
        assert torch.equal(ids[:, 40:], target(ids)[:, 39:-1].argmax(-1))
    torch.set_num_threads(threads)


def test_rate_warms_up_and_falls(monkeypatch):
    torch = pytest.importorskip("torch", reason="optional library torch is not installed")
    from ddtree.analysis.training import loop

    clock = loop.Clock(1e9, torch.device("cpu"), max_steps=1000)
    rates = []
    while clock.tick():
        rates.append(loop.cosine(clock))
    assert len(rates) == 1000
    assert rates[0] == pytest.approx(1 / loop.WARM_UP_STEPS)
    assert max(rates) == max(rates[150:250])
    assert rates[-1] == pytest.approx(0.02, abs=1e-3)


def gradient_of_rank(device, rank, folder):
    import torch

    from ddtree.analysis.training.loop import average_gradients

    model = torch.nn.Linear(2, 1)
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, float(rank))
    average_gradients(model)
    (folder / str(rank)).write_text(str([parameter.grad.mean().item() for parameter in model.parameters()]))


def test_gradients_are_averaged_over_processes(tmp_path):
    pytest.importorskip("torch", reason="optional library torch is not installed")
    from ddtree.analysis.training.loop import on_every_device

    on_every_device(gradient_of_rank, tmp_path, processes=2)
    assert {path.read_text() for path in tmp_path.iterdir()} == {"[0.5, 0.5]"}
