"""``ddtree generate``: what it prints is what the engine gives, in every mode, and what it saves can be read."""

import importlib
import json
import re
import sys

import numpy as np
import pytest
from click.testing import CliRunner
from safetensors.numpy import save_file

from ddtree import load_model, read_kdtr
from ddtree.analysis.runs import load_run
from ddtree.cli import main
from ddtree.drafters import NgramDrafter
from ddtree.engine import Engine
from ddtree.model import golden_bundle
from ddtree.vocabulary import Vocabulary, read_tokenizer_json

BUNDLE = golden_bundle()
PROMPT = read_kdtr(BUNDLE)[0]["golden/prompt"]
GOLDEN = read_kdtr(BUNDLE)[0]["golden/tokens"].tolist()
IDS = ",".join(map(str, PROMPT))


@pytest.fixture
def run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def invoke(*arguments, **env):
        runner = CliRunner(env={"COLUMNS": "100", "NO_COLOR": "1", "FORCE_COLOR": None, **env})
        return runner.invoke(main, ["generate", *map(str, arguments)], catch_exceptions=False)

    return invoke


def ids_in(text):
    """Token ids that were printed, without bars."""
    return [int(i) for i in re.findall(r"\d+", text.partition("\n")[0])]


@pytest.mark.parametrize("mode", ["tree", "chain", "autoregressive"])
def test_every_mode_prints_the_golden_tokens(run, mode):
    result = run("--model", BUNDLE, "--ids", IDS, "--mode", mode, "--max-new-tokens", len(GOLDEN))
    assert result.exit_code == 0, result.output
    assert ids_in(result.stdout) == [*PROMPT.tolist(), *GOLDEN]
    rounds = int(re.findall(r"rounds +(\d+)", result.stdout)[0])
    assert result.stdout.count("▏") == rounds
    assert rounds == len(GOLDEN) - 1 if mode == "autoregressive" else rounds <= len(GOLDEN) - 1
    assert re.search(rf"τ, tokens emitted a round +{(len(GOLDEN) - 1) / rounds:.3f}", result.stdout)
    for stage in ("prefill", "forward", "compact_cache"):
        assert re.search(rf"{stage} +\d+\.\d\d +\d+%", result.stdout)
    assert "1 ended with the last token allowed." in result.stdout


def test_sampling_stops_and_several_requests_are_those_of_the_engine(run):
    options = {"temperature": 0.9, "top_p": 0.8, "seed": 5}
    engine = Engine(load_model(BUNDLE), NgramDrafter(), depth=3, budget=9)
    prompts = [PROMPT, PROMPT[::-1].copy()]
    stop = int(engine.generate(prompts, 12, **options).tokens[1][4])
    expected = engine.generate(prompts, 12, [stop], **options)
    listed = [argument for prompt in prompts for argument in ("--ids", " ".join(map(str, prompt)))]
    result = run(
        "--model", BUNDLE, *listed, "--max-new-tokens", 12, "--stop", stop, "--temperature", 0.9, "--top-p", 0.8,
        "--seed", 5, "--depth", 3, "--budget", 9, "--save", "run.kdtr",
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    saved = load_run("run.kdtr")
    assert [x.tolist() for x in saved.generation.tokens] == [x.tolist() for x in expected.tokens]
    assert saved.generation.finish_reasons == expected.finish_reasons
    assert [x.tolist() for x in saved.prompts] == [x.tolist() for x in prompts]
    assert saved.settings["budget"] == 9
    assert saved.settings["drafter"] == NgramDrafter.label
    assert "ended with a stop token" in result.stdout
    assert "Look at it with: ddtree report run.kdtr" in result.stdout
    assert {"request 0", "request 1"} <= set(re.findall(r"request \d", result.stdout))


def test_prompts_spread_over_processes_come_out_as_from_one(run):
    listed = [
        argument for prompt in (PROMPT, PROMPT[::-1], PROMPT[:3]) for argument in ("--ids", ",".join(map(str, prompt)))
    ]
    options = ["--model", BUNDLE, *listed, "--max-new-tokens", 6, "--dtype", "float64", "--temperature", 0.7]
    one, spread = run(*options), run(*options, "--devices", "cpu,cpu", "--save", "run.kdtr")
    assert one.exit_code == spread.exit_code == 0, spread.output
    assert spread.stdout.partition("seconds")[0].split() == one.stdout.partition("seconds")[0].split()
    assert load_run("run.kdtr").settings["dtype"] == "float64"
    two = run(*options, "--max-batch", 2)
    assert (
        two.stdout.partition("rounds")[0].split() == one.stdout.partition("rounds")[0].split()
    )  # columns follow times


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--devices", "gpu0"], "'gpu0' must be all, or GPUs' numbers or cpu, with commas between them"),
        (["--devices", "cpu", "--backend", "nowhere"], "make_engine raised .* on CPU process 0: .*nowhere"),
        (["--backend", "nowhere"], "nowhere"),
        (["--dtype", "int8"], "'int8' is not one of"),
        (["--max-batch", "0"], "0 is not in the range x>=1"),
    ],
)
def test_where_it_cannot_run_is_told(run, options, message):
    result = run("--model", BUNDLE, "--ids", IDS, *options)
    assert result.exit_code == 2
    assert re.search(message, " ".join(result.output.replace("│", " ").split()))


def test_all_devices_where_there_is_none(run, monkeypatch):
    def none():
        raise ValueError("none is visible")

    monkeypatch.setattr("ddtree.engine.spread.visible_devices", none)
    result = run("--model", BUNDLE, "--ids", IDS, "--devices", "all")
    assert result.exit_code == 2
    assert "--devices all: none is visible; at the command line, --devices cpu,cpu" in " ".join(
        result.output.replace("│", " ").split()
    )


def test_trees_as_text(run):
    text = "1 2 3 1 2 3 1 2"
    shown = run("--model", BUNDLE, "--ids", text, "--show-trees", "--max-new-tokens", 12, "--save", "run.kdtr").stdout
    rounds = load_run("run.kdtr").generation.rounds
    blocks = re.split(r"^round \d+, ", shown, flags=re.M)[1:]
    assert len(blocks) == len(rounds)
    for block, r in zip(blocks, rounds, strict=True):
        length, root = int(r.acceptance.lengths[0]), int(r.tree.token_ids[0, 0])
        head, *lines = block.splitlines()
        emitted = [*r.tree.token_ids[0, r.acceptance.node_indices[0, 1:length]], r.acceptance.bonus_token_ids[0]]
        assert head.startswith(f"{length} token")
        assert [int(i) for i in re.findall(r"\d+", head.partition(":")[2])] == emitted
        assert lines[0] == str(root)
        assert block.count("✓") == length - 1
        assert f"→ {emitted[-1]} (" in block
        drawn = [line for line in lines if re.search(r"─ \d+ [\d<.]+%", line)]
        assert len(drawn) == r.tree.node_counts[0] - 1
    few = run("--model", BUNDLE, "--ids", text, "--show-trees", "--max-new-tokens", 12, "--tree-nodes", 1).stdout
    assert re.search(r"… and \d+ nodes less likely \(--tree-nodes\)", few)


def byte_level(token):
    """How byte-level BPE writes bytes."""
    inverse = {byte: character for character, byte in vocabulary_module()._BYTE_OF.items()}
    return "".join(inverse[byte] for byte in token)


def vocabulary_module():
    return sys.modules["ddtree.vocabulary"]


TOKENS = [bytes([i]) for i in range(256)] + [b"ab", "é".encode(), b"\x1b[31m", b"  "]


def write_tokenizer(path, tokens=TOKENS, size=512):
    vocab = {byte_level(token): i for i, token in enumerate(tokens)}
    vocab |= {f"w{i}": i for i in range(len(tokens), size - 1)}
    document = {
        "version": "1.0",
        "added_tokens": [
            {"id": size - 1, "content": "<end>", "special": True, "single_word": False, "lstrip": False,
             "rstrip": False, "normalized": False}
        ],
        "normalizer": None,
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False},
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": {"type": "BPE", "vocab": vocab, "merges": [["a", "b"]]},
    }  # fmt: skip
    path.write_text(json.dumps(document))


@pytest.fixture
def folder(tmp_path):
    """A model as the hub has one, with a tokenizer."""
    arrays, metadata = read_kdtr(BUNDLE)
    made = tmp_path / "mine"
    made.mkdir()
    save_file({name: array for name, array in arrays.items() if "/" not in name}, made / "model.safetensors")
    (made / "config.json").write_text(metadata["config"])
    write_tokenizer(made / "tokenizer.json")
    return made


def test_a_model_of_ones_own_decodes_text_without_a_library(run, folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "tokenizers", None)  # as if it were not installed
    result = run("--model", "mine", "--ids", "97 98 258 195 169", "--max-new-tokens", 4)
    assert result.exit_code == 0, result.output
    assert result.stdout.startswith(r"ab\x1b[31mé")  # the terminal is left alone
    result = run("--model", "mine", "--prompt", "ab")
    assert (result.exit_code, result.stdout) == (2, "")
    assert re.fullmatch(
        r"Error: encoding text needs the tokenizers library .*: pip install 'ddtree\[text\]'\n", result.stderr
    )


def test_a_model_of_ones_own_reads_text(run, folder, tmp_path):
    pytest.importorskip("tokenizers", reason="optional library tokenizers is not installed")
    (tmp_path / "prompt.txt").write_text("é ab\n", encoding="utf-8")
    result = run(
        "--model", "mine", "--prompt", "xaby", "--prompt-file", "prompt.txt", "--max-new-tokens", 2, "--save", "r"
    )
    assert result.exit_code == 0, result.output
    saved = load_run("r")
    assert [x.tolist() for x in saved.prompts] == [[120, 256, 121], [195, 169, 32, 256, 10]]
    assert saved.vocabulary is not None
    assert saved.vocabulary.decode(saved.prompts[1]) == "é ab\n"
    assert saved.settings["model"] == "mine"


def test_tokenizers_of_both_kinds(tmp_path):
    write_tokenizer(tmp_path / "bytes.json")
    vocabulary = read_tokenizer_json(tmp_path / "bytes.json", 600)
    assert vocabulary.token_bytes[: len(TOKENS)] == TOKENS
    assert vocabulary.token_bytes[511] == b"<end>"
    assert vocabulary.token_bytes[512:] == [b""] * 88
    pieces = {"▁de": 0, "f": 1, "<0x0A>": 2, "é": 3}
    (tmp_path / "pieces.json").write_text(json.dumps({"model": {"vocab": pieces}}))
    assert read_tokenizer_json(tmp_path / "pieces.json", 4).token_bytes == [b" de", b"f", b"\n", "é".encode()]


@pytest.mark.parametrize(
    "document, message",
    [
        ("{", "is not JSON"),
        ("[]", "must have its tokens in model.vocab, from token to id, and in added_tokens"),
        ('{"model": {"vocab": []}}', "must have its tokens in model.vocab"),
        ('{"model": {"vocab": {}}, "added_tokens": [1]}', "must have its tokens in model.vocab"),
        ('{"model": {"vocab": {"a": 4}}}', r"the id of 'a' must be in 0 … 3, got 4"),
        ('{"model": {"vocab": {"a": "x"}}}', r"the id of 'a' must be in 0 … 3, got 'x'"),
        ('{"model": 3}', "must have its tokens in model.vocab"),
        ('{"model": {"vocab": {}}, "added_tokens": [{"content": "a"}]}', r"the id of 'a' must be in 0 … 3, got None"),
    ],
)
def test_tokenizers_that_are_none(tmp_path, document, message):
    (tmp_path / "wrong.json").write_text(document)
    with pytest.raises(ValueError, match=rf"wrong\.json:? {message}"):
        read_tokenizer_json(tmp_path / "wrong.json", 4)


def test_half_characters_go_to_the_next_round():
    reader = importlib.import_module("ddtree.cli.generate")._reader
    read = reader(Vocabulary([b"\xc3", b"\xa9", b"\n"]), False)
    assert [read(np.array(ids)) for ids in ([0], [1], [], [2, 0], [2])] == ["", "é", "", "\n", "�\n"]


def test_colours_where_there_are_colours(run):
    shown = run(
        "--model", BUNDLE, "--ids", IDS, NO_COLOR=None, FORCE_COLOR="1", TERM="xterm-256color", COLORTERM="truecolor"
    )
    assert ";38;2;0;0;0;48;2;156;204;255m" in shown.stdout
    assert "▏" not in shown.stdout


@pytest.mark.parametrize(
    "option, number, most", [("budget", 10**9, 65536), ("depth", 10**9, 1024), ("max-new-tokens", 10**8, 65536)]
)
def test_generate_refuses_what_is_a_digit_too_many(run, option, number, most):
    result = run("--ids", "1", f"--{option}", str(number))
    assert (result.exit_code, result.stdout) == (2, "")
    assert f"{number} is not in the range" in result.stderr
    assert f"<={most}" in result.stderr


@pytest.mark.parametrize(
    "arguments, message",
    [
        ([], "there is no prompt: give one with --prompt, --prompt-file or --ids"),
        (["--model", "missing", "--ids", "1"], "missing"),
        (
            ["--model", BUNDLE, "--prompt", "text"],
            "tiny.kdtr has no tokenizer.json beside it to read text with: give token",
        ),
        (["--prompt", "a\udcff"], "--prompt must be UTF-8 text, got bytes that are not"),
        (["--ids", "1", "--depth", "8"], "--depth must be at most 7, all that the block drafter drafts, got 8"),
        (["--prompt", ""], "--prompt must have some text, got none"),
        (["--model", BUNDLE, "--ids", "1,x"], "--ids must be token ids, such as 5,17,3, got '1,x'"),
        (["--model", BUNDLE, "--ids", "1,99999"], r"prompts[0][1] must be in 0 … 511, got 99999"),
        (
            ["--model", BUNDLE, "--ids", "1", "--stop", "512"],
            "--stop must be in 0 … 511 (the vocabulary), got 512",
        ),
        (["--model", BUNDLE, "--prompt-file", "missing.txt"], "missing.txt: No such file or directory"),
        (
            ["--model", BUNDLE, "--prompt-file", "latin.txt"],
            "latin.txt must be UTF-8 text: invalid continuation byte at byte 0",
        ),
        (["--model", "latin.txt", "--ids", "1"], "latin.txt"),
        (["--model", BUNDLE, "--ids", "1", "--save", "no/run.kdtr"], "no/run.kdtr: No such file or directory"),
        (["--model", BUNDLE, "--ids", "1", "--save", "folder"], "folder: Is a directory"),
        (
            ["--model", BUNDLE, "--prompt-file", "latin.txt", "--save", "latin.txt"],
            "latin.txt is an input, and would be overwritten: name another output",
        ),
    ],
)
def test_generate_says_in_one_line_what_is_wrong(run, tmp_path, arguments, message):
    (tmp_path / "latin.txt").write_bytes(b"\xe9t\xe9")
    (tmp_path / "folder").mkdir()
    before = sorted(tmp_path.rglob("*"))
    result = run(*arguments)
    assert (result.exit_code, result.stdout) == (2, ""), result.output
    assert result.stderr.startswith("Error: ")
    assert message in result.stderr
    assert result.stderr.count("\n") == 1
    assert sorted(tmp_path.rglob("*")) == before


def test_the_installed_pair_is_what_continues_without_a_model(run):
    """Ids alone: no tokenizer is needed. Drafts change no token, and most rounds give more than one."""
    from ddtree import load_pair, load_prompts

    prompt = load_prompts().tokens[0]
    target, _, vocabulary = load_pair()
    alone = Engine(target).generate([prompt], 12, target.config.eos_token_ids, mode="autoregressive").tokens[0]
    result = run("--ids", ",".join(map(str, prompt)), "--max-new-tokens", 12, "--budget", 16, "--save", "run.kdtr")
    assert result.exit_code == 0, result.output
    saved = load_run("run.kdtr")
    assert saved.generation.tokens[0].tolist() == alone.tolist()
    text = vocabulary.decode([*prompt, *alone])
    assert result.stdout.replace("▏", "").startswith(text.rstrip()[:200].rstrip())
    assert saved.generation.tau is not None
    assert saved.generation.tau > 1.5


def test_a_text_that_repeats_itself_is_told_of_and_that_of_the_readme_does_not(run):
    pytest.importorskip("tokenizers", reason="optional library tokenizers is not installed")
    said = "The text repeats itself at the end, which is easy to draft and inflates τ."
    for prompt, loops in (("def fib(n):", True), ("def get(self, key, default=None):", False)):
        result = run("--prompt", prompt)
        assert result.exit_code == 0, result.output
        assert (said in result.stdout) == loops
