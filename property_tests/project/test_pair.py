"""The installed pair: it loads, it is what torch says it is, and it is fit to be shipped."""

import json
import re
import shutil
import sys
from typing import Any

import numpy as np
import pytest

from ddtree import Engine, load_pair, load_prompts
from ddtree.analysis.record import record
from ddtree.analysis.rounds import round_table
from ddtree.analysis.training.corpus import packages_table
from ddtree.analysis.training.evaluate import markdown_of
from ddtree.drafters import BlockConfig, BlockDrafter, NgramDrafter
from ddtree.drafters.block import load_block_drafter, save_block_drafter
from ddtree.kdtr import KdtrError, KdtrFile, read_kdtr, write_kdtr
from ddtree.model import golden_bundle, load_model
from ddtree.pair import pair_folder, save_prompts
from ddtree.property_tests.compare import assert_same
from ddtree.protocols import DraftContext, KVCache
from ddtree.trees import chain_tree
from ddtree.vocabulary import Vocabulary

GOLDEN, _ = read_kdtr(pair_folder() / "golden.kdtr")
LOGITS_NEAR = 1e-4  # of the largest logit, or log-prob: some ten times what two orders of float32 sums differ by
CLOSE_CALL = 0.01  # a lead of the best logit that float32 may turn round; 0.9 % of positions have a smaller one


@pytest.fixture(scope="module")
def pair():
    return load_pair()


@pytest.fixture(scope="module")
def prompts():
    return load_prompts()


def run(target, tokens, hidden_layers=()):
    """Logits and hidden states of all positions, in one pass."""
    n = len(tokens)
    cache = KVCache(target.new_cache(1, n), np.zeros((1, 1), np.int32), np.zeros(1, np.int32))
    return target.forward(chain_tree(np.asarray(tokens, np.int32)[None]), cache, hidden_layers=hidden_layers)


def context_of(drafter, target, rows, *, began=None, ended=(), known=None):
    """The context of requests (by number) with these committed tokens, of which the first ``known`` are not new."""
    states = []
    for request, tokens in rows.items():
        hidden = run(target, tokens[:-1], drafter.hidden_layers).hidden_states
        start = 0 if known is None else known[request]
        states.append({layer: hidden[layer][0, start:] for layer in drafter.hidden_layers})
    return DraftContext(
        request_ids=list(rows),
        tokens=[np.asarray(tokens, np.int32) for tokens in rows.values()],
        root_token_ids=np.array([tokens[-1] for tokens in rows.values()], np.int32),
        hidden_states=states,
        began=list(rows) if began is None else list(began),
        ended=list(ended),
    )


def golden_text(prompts, i, new_tokens):
    return np.concatenate([prompts.tokens[i], GOLDEN["tokens"][i, :new_tokens]])


# --- against torch ---


def test_target_has_torch_s_logits(pair, prompts):
    for i, expected in enumerate(GOLDEN["logits"]):
        after = run(pair.target, golden_text(prompts, i, None)).logits[0, len(prompts.tokens[i]) - 1 :]
        actual = after[GOLDEN["logit_positions"]]
        assert np.abs(actual - expected).max() <= LOGITS_NEAR * np.abs(expected).max()


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_drafter_has_torch_s_log_probs(dtype, prompts):
    target, drafter, _ = load_pair(dtype=dtype)
    position = int(GOLDEN["draft_position"])
    rows = {i: golden_text(prompts, i, position + 1) for i in range(len(GOLDEN["draft_log_probs"]))}
    log_probs, token_ids = drafter(context_of(drafter, target, rows), 7, target.vocab_size)
    for i, expected in enumerate(GOLDEN["draft_log_probs"]):
        actual = np.empty_like(expected)
        np.put_along_axis(actual, token_ids[i], log_probs[i], -1)
        assert np.abs(actual - expected).max() <= LOGITS_NEAR * np.abs(expected).max()


@pytest.mark.parametrize("mode", ["autoregressive", "chain", "tree"])
def test_greedy_tokens_are_torch_s_but_for_close_calls(mode, pair, prompts):
    count, length = GOLDEN["tokens"].shape
    count = count if mode == "tree" else 4
    engine = Engine(pair.target, pair.drafter, budget=24)
    generation = engine.generate(prompts.tokens[:count], length, mode=mode)
    for i, actual in enumerate(generation.tokens):
        differ = np.flatnonzero(actual != GOLDEN["tokens"][i])
        assert differ.size == 0 or GOLDEN["margins"][i, differ[0]] < CLOSE_CALL, f"prompt {i}, token {differ[0]}"


def test_transformers_own_class_agrees_with_the_target(pair, prompts, monkeypatch):
    # transformers takes any importable module named kernels for a library of that name
    monkeypatch.setattr(sys, "path", [p for p in sys.path if p not in ("", str(pair_folder().parents[2]))])
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    torch = pytest.importorskip("torch", reason="optional library torch is not installed")
    transformers = pytest.importorskip("transformers", reason="optional library transformers is not installed")
    config = transformers.DeepseekV3Config(**pair.target.config.to_dict())
    model = transformers.DeepseekV3ForCausalLM(config).eval()
    with KdtrFile(pair_folder() / "target.kdtr") as file:
        weights = {name: torch.from_numpy(file[name].astype(np.float32)) for name in file}
    model.load_state_dict(weights, strict=True)
    text = golden_text(prompts, 0, None)
    with torch.no_grad():
        expected = model(torch.from_numpy(text)[None].long()).logits[0].numpy()
    assert np.abs(run(pair.target, text).logits[0] - expected).max() <= LOGITS_NEAR * np.abs(expected).max()
    start = len(prompts.tokens[0]) - 1
    differ = np.flatnonzero(expected[start:-1].argmax(-1) != GOLDEN["tokens"][0])
    assert (GOLDEN["margins"][0, differ] < CLOSE_CALL).all()


def test_drafter_is_worth_its_rounds(pair, prompts):
    some = prompts.tokens[:8]
    taus: dict[str, Any] = {}
    for name, drafter, mode in (
        ("lookup", NgramDrafter(), "chain"),
        ("chain", pair.drafter, "chain"),
        ("tree", pair.drafter, "tree"),
    ):
        taus[name] = Engine(pair.target, drafter, budget=16).generate(some, 40, mode=mode).tau
    assert taus["lookup"] + 0.5 < taus["chain"]
    assert taus["chain"] + 0.5 < taus["tree"]


# --- the drafter's own context ---


def test_draft_depends_on_the_committed_tokens_alone():
    """Each round's draft is that of a fresh drafter: whatever was refused, however rows came, whoever is beside it."""
    target, drafter, _ = load_pair(dtype="float64")
    some = [tokens[:n] for tokens, n in zip(load_prompts().tokens, (70, 1, 33), strict=False)]
    asked = []

    class Spy:
        hidden_layers = drafter.hidden_layers

        def __call__(self, context, depth, topk):
            draft = drafter(context, depth, topk)
            asked.append((dict(zip(context.request_ids, context.tokens, strict=True)), depth, topk, draft))
            return draft

    generation = Engine(target, Spy(), depth=5, budget=12).generate(some, 20)
    assert generation.tau is not None
    assert 1 < generation.tau < 6  # rows were accepted, and rows were refused
    for rows, depth, topk, (log_probs, token_ids) in asked[:: max(1, len(asked) // 5)]:
        for b, (request, tokens) in enumerate(rows.items()):
            _, fresh, _ = load_pair(dtype="float64")
            expected = fresh(context_of(fresh, target, {request: tokens}), depth, topk)
            assert_same(token_ids[b], expected[1][0])
            np.testing.assert_allclose(log_probs[b], expected[0][0], rtol=0, atol=1e-6)  # float32's last places


@pytest.mark.parametrize("window", [None, 40, 248, 2000])
def test_context_grows_past_its_first_room_and_its_window(window):
    target = load_pair(dtype="float64").target
    weights, metadata = read_kdtr(pair_folder() / "drafter.kdtr")
    settings = json.loads(metadata["block_drafter"])
    config = BlockConfig.from_dict(settings | {"context_window": window})
    text = np.concatenate([*load_prompts().tokens[:8]])[:700]
    grown = BlockDrafter(config, weights, target)
    known = 0
    for end in (300, 301, 470, 505, 512, 700):
        context = context_of(grown, target, {0: text[:end]}, began=[0] if known == 0 else [], known={0: known})
        log_probs, token_ids = grown(context, 7, 4)
        known = end - 1
        fresh = BlockDrafter(config, weights, target)
        expected = fresh(context_of(fresh, target, {0: text[:end]}), 7, 4)
        assert_same(token_ids, expected[1])
        np.testing.assert_allclose(log_probs, expected[0], rtol=0, atol=1e-6)
    room = grown._contexts[0].keys.shape[2]
    assert room == (1024 if window in (None, 2000) else 512)


def test_drafts_of_long_contexts_are_as_good(pair, prompts):
    """What is further back than the drafter was trained on would spoil them: without the window τ falls to 1.4."""
    generation = Engine(pair.target, pair.drafter, budget=8).generate(prompts.tokens[4:8], 280, temperature=0.7)
    table = round_table(generation, [len(row) for row in prompts.tokens[4:8]])
    long = table.prefix_len >= 300
    assert long.sum() > 20
    assert table.tokens[long].mean() > 0.8 * table.tokens[~long].mean()


def test_context_begins_anew_and_is_dropped_at_the_end(pair, prompts):
    first, second = prompts.tokens[:2]
    expected = pair.drafter(context_of(pair.drafter, pair.target, {7: second}), 3, 2)
    pair.drafter(context_of(pair.drafter, pair.target, {7: first}), 3, 2)
    again = pair.drafter(context_of(pair.drafter, pair.target, {7: second}), 3, 2)  # another generation's request 7
    assert_same(again[1], expected[1])
    assert_same(again[0], expected[0])
    nobody = DraftContext([], [], np.zeros(0, np.int32), [], [], [7])
    log_probs, token_ids = pair.drafter(nobody, 3, 2)
    assert log_probs.shape == token_ids.shape == (0, 3, 2)
    with pytest.raises(
        ValueError, match=r"request 7 must be .* its last draft, rows 0 to 9, got 4 rows: a drafter serves"
    ):
        pair.drafter(context_of(pair.drafter, pair.target, {7: first[:10]}, began=[], known={7: 5}), 3, 2)


def test_what_is_no_folder_is_named():
    with pytest.raises(TypeError, match=r"path must be the folder of a pair, a str or os.PathLike, got int"):
        load_pair(5)


def test_recording_keeps_no_context(pair, prompts, tmp_path):
    pair.drafter.forget(list(pair.drafter._contexts))
    record(pair.target, pair.drafter, prompts.tokens[:5], tmp_path / "t", max_new_tokens=4, prompts_a_chunk=2)
    assert pair.drafter._contexts == {}


def test_wrong_contexts_and_depths_are_named(pair, prompts):
    context = context_of(pair.drafter, pair.target, {0: prompts.tokens[0][:9]})
    with pytest.raises(ValueError, match=r"depth must be at most 7 .* got 8: make the engine with depth=7"):
        pair.drafter(context, 8, 2)
    context.hidden_states[0].pop(3)
    with pytest.raises(ValueError, match=r"hidden_states of request 0 must have layers \[3\], got \[1, 4\]"):
        pair.drafter(context, 7, 2)
    with pytest.raises(ValueError, match=r"depth must be at most 7"):
        Engine(pair.target, pair.drafter, depth=9).generate([prompts.tokens[0]], 4)


def test_no_more_candidates_than_the_vocabulary(pair, prompts):
    log_probs, _ = pair.drafter(context_of(pair.drafter, pair.target, {0: prompts.tokens[0]}), 2, 5000)
    assert log_probs.shape == (1, 2, 2048)
    assert repr(pair.drafter) == "BlockDrafter(3 layers, hidden 256, block 8, float32)"


# --- what is shipped ---


def test_files_are_small_and_in_half_precision():
    files = {path.name: path.stat().st_size for path in pair_folder().iterdir() if path.is_file()}
    assert set(files) >= {
        "MODEL_CARD.md",
        "NOTICES.md",
        "corpus.json",
        "curves.svg",
        "drafter.json",
        "drafter.kdtr",
        "evaluation.json",
        "golden.kdtr",
        "prompts.kdtr",
        "target.json",
        "target.kdtr",
        "vocabulary.kdtr",
    }
    assert sum(files[f"{name}.kdtr"] for name in ("target", "drafter", "vocabulary")) <= 16_000_000
    for name in ("target", "drafter"):
        with KdtrFile(pair_folder() / f"{name}.kdtr") as file:
            assert {file[tensor].dtype.name for tensor in file} == {"float16"}


def test_model_card_says_what_the_records_say():
    card = (pair_folder() / "MODEL_CARD.md").read_text(encoding="utf-8")
    results = json.loads((pair_folder() / "evaluation.json").read_text())
    assert markdown_of(results) in card
    assert packages_table(json.loads((pair_folder() / "corpus.json").read_text())) in card
    assert all(row["prompts"] == 128 for row in results.values())


def test_prompts_print_as_a_line(prompts):
    tokens = sum(map(len, prompts.tokens))
    assert repr(prompts) == str(prompts) == f"Prompts(128 prompts, {tokens:,} tokens)"
    assert repr(type(prompts)([np.array([1, 2])], ["a"])) == "Prompts(1 prompt, 2 tokens)"


def test_prompts_are_held_out_and_long_enough(prompts):
    assert len(prompts.tokens) == len(prompts.sources) == 128
    assert all(64 <= len(tokens) <= 128 and tokens.max() < 2048 for tokens in prompts.tokens)
    assert len({tokens.tobytes() for tokens in prompts.tokens}) == 128
    record = json.loads((pair_folder() / "corpus.json").read_text())
    for source in prompts.sources:
        package, _, file = source.partition(":")
        assert (
            package in record["held_out"] or f"{package}:{file.split('/')[0].removesuffix('.py')}" in record["held_out"]
        )


def test_text_goes_to_tokens_and_back(pair, prompts):
    pytest.importorskip("tokenizers", reason="optional library tokenizers is not installed")
    vocabulary = pair.vocabulary
    assert len(set(vocabulary.token_bytes)) == len(vocabulary) == 2048
    for text in ("def fib(n):\n    return n\n", "", "\tπ ≠ 3  # 漢字 🙂\r\n\0", "<|endoftext|>"):
        assert vocabulary.decode(vocabulary.encode(text)) == text
    assert vocabulary.encode("<|endoftext|>").tolist() == [0]
    text = vocabulary.decode(prompts.tokens[0])
    assert vocabulary.decode_bytes(vocabulary.encode(text)).decode() == text


def test_decoding_needs_no_library_and_encoding_says_what_it_needs(pair, monkeypatch):
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    vocabulary = Vocabulary.load(pair_folder() / "vocabulary.kdtr")
    assert vocabulary.decode([0]) == "<|endoftext|>"
    with pytest.raises(ImportError, match=r"encoding text needs the tokenizers library .*pip install 'ddtree\[text\]'"):
        vocabulary.encode("x")


# --- bad input ---


def test_bad_vocabularies_and_ids_are_named(tmp_path):
    vocabulary = Vocabulary([b"a", b"bc"])
    assert repr(vocabulary) == "Vocabulary(2 tokens)"
    with pytest.raises(ValueError, match=r"ids\[1\] must be in 0 … 1, got 2"):
        vocabulary.decode([0, 2])
    with pytest.raises(ValueError, match="has no tokenizer, and can only decode"):
        vocabulary.encode("a")
    with pytest.raises(TypeError, match="text must be a str, got bytes"):
        vocabulary.encode(b"a")
    for text in ("ab\ud800", "ab\udcff🙂"):
        with pytest.raises(ValueError, match=r"text\[2\] must be a character, got '\\ud...', half of a surrogate pair"):
            vocabulary.encode(text)
    with pytest.raises(TypeError, match=r"token_bytes\[1\] must be bytes, got str"):
        Vocabulary([b"a", "b"])  # type: ignore[list-item]
    path = tmp_path / "vocabulary.kdtr"
    vocabulary.save(path)
    assert Vocabulary.load(path).token_bytes == [b"a", b"bc"]
    write_kdtr(path, {"token_bytes": np.zeros(3, np.uint8)})
    with pytest.raises(ValueError, match=r"is no vocabulary: token_offsets must be int64 of shape \(n,\), got none"):
        Vocabulary.load(path)
    write_kdtr(path, {"token_bytes": np.zeros(3, np.uint8), "token_offsets": np.array([0, 2, 1, 3])})
    with pytest.raises(ValueError, match=r"token_offsets must rise from 0 to the 3 bytes of token_bytes, got \[0, 2"):
        Vocabulary.load(path)
    write_kdtr(path, {"token_bytes": np.zeros(3, np.uint8), "token_offsets": np.array([0, 3]), "tokenizer_json": [1.0]})
    with pytest.raises(ValueError, match=r"tokenizer_json must be uint8 of shape \(n,\), got float64 \(1,\)"):
        Vocabulary.load(path)
    write_kdtr(
        path,
        {
            "token_bytes": np.zeros(3, np.uint8),
            "token_offsets": np.array([0, 3]),
            "tokenizer_json": np.frombuffer(b"{}", np.uint8),
        },
    )
    pytest.importorskip("tokenizers", reason="optional library tokenizers is not installed")
    with pytest.raises(ValueError, match=r"tokenizer_json is no tokenizer"):
        Vocabulary.load(path).encode("x")


def test_pairs_that_are_not_whole_are_named(tmp_path):
    with pytest.raises(ValueError, match=r"name must be that of an installed pair \(python-5m\), got 'rust-5m'"):
        pair_folder("rust-5m")
    for name in ("target", "drafter"):
        shutil.copy(pair_folder() / f"{name}.kdtr", tmp_path)
    with pytest.raises(FileNotFoundError, match=r"vocabulary.kdtr is missing: a pair's folder has target.kdtr"):
        load_pair(tmp_path)
    Vocabulary([b"a"]).save(tmp_path / "vocabulary.kdtr")
    with pytest.raises(ValueError, match=r"vocabulary.kdtr must have the target's 2048 tokens, got 1"):
        load_pair(tmp_path)
    raw = bytearray((tmp_path / "drafter.kdtr").read_bytes())
    raw[-100_000] ^= 1
    (tmp_path / "drafter.kdtr").write_bytes(raw)
    with pytest.raises(KdtrError):
        load_pair(tmp_path)


def test_bad_prompts_are_named(tmp_path):
    path = tmp_path / "prompts.kdtr"
    rows = [np.array([1, 2], np.int32), np.array([3], np.int32)]
    save_prompts(path, rows, ["a", "b"])
    loaded = load_prompts(path)
    assert [row.tolist() for row in loaded.tokens] == [[1, 2], [3]]
    assert loaded.sources == ["a", "b"]
    with pytest.raises(ValueError, match=r"sources must have one entry a prompt, 2, got 1"):
        save_prompts(path, rows, ["a"])
    with pytest.raises(ValueError, match=r"tokens\[1\] must have at least one token, got none"):
        save_prompts(path, [rows[0], rows[1][:0]], ["a", "b"])
    good = {"token_ids": np.array([1, 2, 3], np.int32), "token_offsets": np.array([0, 2, 3])}
    for arrays, metadata, message in (
        ({"token_ids": good["token_ids"]}, {}, r"token_offsets must be int64 of shape \(n,\), got none"),
        (good | {"token_ids": np.zeros(3)}, {}, r"token_ids must be int32 of shape \(n,\), got float64 \(3,\)"),
        (good | {"token_offsets": np.array([0, 3, 3])}, {}, r"token_offsets must rise from 0 to the 3 token_ids"),
        (good, {}, r"metadata 'sources' must be a JSON list of one text a prompt, 2"),
        (good, {"sources": "{"}, r"metadata 'sources' is not JSON"),
        (good, {"sources": '["a", 1]'}, r"metadata 'sources' must be a JSON list of one text a prompt, 2"),
    ):
        write_kdtr(path, arrays, metadata)
        with pytest.raises(ValueError, match=message):
            load_prompts(path)


CONFIG = BlockConfig(8, 1, 2, 4, 16, 4, (1, 2))


def weights_of(config):
    return {name: np.zeros(shape, np.float16) for name, shape in config.tensor_shapes().items()}


def test_drafter_s_file_says_its_shape(tmp_path):
    path = tmp_path / "drafter.kdtr"
    config = BlockConfig(64, 1, 2, 8, 16, 4, (0, 3))
    save_block_drafter(path, config, weights_of(config), metadata={"by": "test"})
    target = load_model(golden_bundle())
    drafter = load_block_drafter(path, target)
    assert drafter.config == config
    assert drafter.hidden_layers == (0, 3)
    generation = Engine(target, drafter, depth=3, budget=5).generate([[3, 4, 5]], 6)
    assert (
        generation.tokens[0].tolist()
        == Engine(target).generate([[3, 4, 5]], 6, mode="autoregressive").tokens[0].tolist()
    )
    with pytest.raises(ValueError, match=r"made for a target of hidden size 64, got one of 256"):
        load_block_drafter(path, load_pair().target)
    save_block_drafter(path, BlockConfig(64, 1, 2, 8, 16, 4, (4,)), weights_of(BlockConfig(64, 1, 2, 8, 16, 4, (4,))))
    with pytest.raises(ValueError, match=r"reads the target's layer 4, and the target has 3"):
        load_block_drafter(path, target)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"head_dim": 3}, "head_dim must be even, got 3"),
        ({"block_size": 1}, "block_size must be in 2 … "),
        ({"num_hidden_layers": 1 << 19}, "num_hidden_layers must be in 1 … 1024"),
        ({"target_layers": []}, "target_layers must be a tuple of one layer or more"),
        ({"target_layers": [-1]}, r"target_layers\[0\] must be in 0 … "),
        ({"rope_theta": 0.0}, "rope_theta must be over 0, got 0.0"),
        ({"context_window": 0}, "context_window must be in 1 … "),
        ({"hidden_size": None}, "hidden_size must be an integer"),
        ({"surprise": 1}, "has the unknown settings surprise"),
    ],
)
def test_bad_settings_of_a_drafter_are_named(change, message, tmp_path):
    path = tmp_path / "drafter.kdtr"
    settings = CONFIG.to_dict() | change
    write_kdtr(path, weights_of(CONFIG), {"block_drafter": json.dumps(settings)})
    with pytest.raises(ValueError, match=f"drafter.kdtr: metadata 'block_drafter': .*{message}"):
        load_block_drafter(path, load_pair().target)


def test_bad_weights_of_a_drafter_are_named(tmp_path):
    path = tmp_path / "drafter.kdtr"
    config = BlockConfig(64, 1, 2, 8, 16, 4, (0, 3))
    good, target = weights_of(config), load_model(golden_bundle())
    metadata = {"block_drafter": json.dumps(config.to_dict())}
    without = {name: weight for name, weight in good.items() if name != "norm.weight"}
    for weights, message in (
        (without, "the drafter's weights lack norm.weight"),
        (good | {"extra": np.zeros(1)}, "have too many: extra"),
        (
            good | {"norm.weight": np.zeros(3)},
            re.escape("norm.weight must have shape (64,) by the configuration, got (3,)"),
        ),
        (good | {"norm.weight": np.full(64, np.nan)}, "norm.weight holds NaN or infinity, weights must be finite"),
    ):
        write_kdtr(path, weights, metadata)
        with pytest.raises(ValueError, match=message):
            load_block_drafter(path, target)
    with pytest.raises(ValueError, match=r"norm.weight must have shape \(64,\), got \(3,\)"):
        save_block_drafter(path, config, good | {"norm.weight": np.zeros(3)})
    write_kdtr(path, good, {"other": "x"})
    with pytest.raises(ValueError, match=r"is no block drafter: its metadata has no 'block_drafter', only other"):
        load_block_drafter(path, target)
    for text, message in (("[]", "must hold a JSON object, got list"), ("{", "Expecting"), ("{}", "lacks block_size")):
        write_kdtr(path, good, {"block_drafter": text})
        with pytest.raises(ValueError, match=f"metadata 'block_drafter': .*{message}"):
            load_block_drafter(path, target)
