"""Saved runs: what is read is what was generated, and what contradicts itself is named by file and array."""

from dataclasses import fields, replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddtree.analysis.acceptance import acceptance_table
from ddtree.analysis.runs import _ARRAYS, load_run, save_run
from ddtree.drafters import NgramDrafter
from ddtree.engine import Engine, Generation, ScriptedTarget
from ddtree.kdtr import KdtrError, read_kdtr, write_kdtr
from ddtree.vocabulary import Vocabulary

VOCABULARY = Vocabulary([bytes([i]) for i in range(8)])


def generated(texts, prompt_lens, new=12, mode="tree", budget=6, stops=()):
    engine = Engine(ScriptedTarget(texts, vocab_size=8), NgramDrafter(), depth=4, budget=budget)
    prompts = [text[:n] for text, n in zip(texts, prompt_lens, strict=True)]
    return prompts, engine.generate(prompts, new, stops, mode=mode)


def repeating(period, length=40):
    return np.arange(length, dtype=np.int32) % period


@pytest.fixture
def saved(tmp_path):
    prompts, generation = generated([repeating(3), repeating(5)], [12, 7])
    path = tmp_path / "run.kdtr"
    save_run(path, generation, prompts, vocabulary=VOCABULARY, settings={"drafter": "n-gram", "budget": 6})
    return path


def assert_same(expected: Generation, got: Generation):
    assert got.finish_reasons == expected.finish_reasons
    assert got.seconds == expected.seconds
    assert got.prompt_lens == expected.prompt_lens
    for name in ("tokens", "tokens_per_round"):
        a, b = getattr(expected, name), getattr(got, name)
        assert [x.tolist() for x in a] == [x.tolist() for x in b]
        assert [x.dtype for x in a] == [x.dtype for x in b]
    assert len(got.rounds) == len(expected.rounds)
    for a, b in zip(expected.rounds, got.rounds, strict=True):
        assert a.request_ids == b.request_ids
        np.testing.assert_array_equal(a.target_token_ids, b.target_token_ids, strict=True)
        for x, y in ((a.tree, b.tree), (a.acceptance, b.acceptance)):
            for f in fields(x):
                np.testing.assert_array_equal(getattr(x, f.name), getattr(y, f.name), err_msg=f.name, strict=True)


@st.composite
def runs(draw):
    texts = [
        np.array(draw(st.lists(st.integers(0, 7), min_size=30, max_size=30)), np.int32)
        for _ in range(draw(st.integers(0, 3)))
    ]
    return generated(
        texts,
        [draw(st.integers(1, 12)) for _ in texts],
        new=draw(st.integers(1, 16)),
        mode=draw(st.sampled_from(["tree", "chain", "autoregressive"])),
        budget=draw(st.sampled_from([0, 1, 5, 40])),
        stops=draw(st.lists(st.integers(0, 7), max_size=1)),
    )


@given(runs(), st.booleans())
def test_what_is_read_is_what_was_generated(tmp_path_factory, run, with_vocabulary):
    prompts, generation = run
    path = tmp_path_factory.getbasetemp() / "drawn.kdtr"
    save_run(path, generation, prompts, vocabulary=VOCABULARY if with_vocabulary else None)
    read = load_run(path)
    assert [x.tolist() for x in read.prompts] == [x.tolist() for x in prompts]
    assert read.generation.prompt_lens == [len(prompt) for prompt in prompts]
    assert_same(generation, read.generation)
    assert (read.vocabulary is not None) == with_vocabulary
    expected, got = acceptance_table(generation), acceptance_table(read.generation)
    assert str(got) == str(expected)


def test_settings_and_vocabulary_come_back(saved):
    run = load_run(saved)
    assert run.settings == {"drafter": "n-gram", "budget": 6}
    assert run.vocabulary is not None
    assert run.vocabulary.token_bytes == VOCABULARY.token_bytes


# one wrong value an array, and what must be said of it
WRONG = {
    "prompt_token_ids": (0, 8, r"prompt_token_ids\[0\] must be in 0 … 7, got 8"),
    "prompt_offsets": (1, 99, r"prompt_offsets must rise from 0 to the 19 of prompt_token_ids, got \[0, 99, 19\]"),
    "new_token_ids": (0, -1, r"new_token_ids\[0\] must be in 0 … 7, got -1"),
    "new_offsets": (0, 1, "new_offsets must rise from 0"),
    "round_offsets": (1, -5, "round_offsets must rise from 0"),
    "round_slots": (0, 1, r"round_slots\[0\] must hold the nodes of each row, and at most 65536 slots besides, got 1"),
    "round_max_depths": (0, -1, r"round_max_depths\[0\] must be in 0 … 65536, got -1"),
    "round_num_candidates": (0, 0, r"node_ranks\[1\] must be −1 for a root and below round_num_candidates for others"),
    "row_requests": (0, 2, r"row_requests\[0\] must be in 0 … 1, got 2"),
    "row_bonus_token_ids": (0, 7, r"row_bonus_token_ids\[0\] must be the target's choice after the last kept node"),
    "node_offsets": (1, 0, r"node_offsets\[0\] must rise by one node or more a row"),
    "node_token_ids": (0, 7, r"node_token_ids\[0\] must be \d, the last token, got 7"),
    "node_parents": (1, 1, r"node_parents\[1\] must be −1 for a root and an earlier node of the same tree for others"),
    "node_ranks": (0, 0, r"node_ranks\[0\] must be −1 for a root"),
    "node_scores": (1, 0.5, r"node_scores\[1\] must be 0 for a root, and finite and at most the parent's"),
    "node_choices": (0, 9, r"node_choices\[0\] must be in -1 … 7, got 9"),
    "kept_offsets": (1, 999, "kept_offsets must rise from 0"),
    "kept_nodes": (0, 1, r"kept_nodes\[0\] must be a path from the root down, got 1"),
    "seconds": (0, -1.0, r"seconds\[0\] must be finite and at least 0, got -1.0"),
    "token_byte_offsets": (1, 9, "token_byte_offsets must rise from 0 to the 8 of token_bytes"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_value_is_named_by_file_and_array(saved, tmp_path, name):
    arrays, metadata = read_kdtr(saved)
    at, value, message = WRONG[name]
    arrays[name] = arrays[name].copy()
    arrays[name][at] = value
    write_kdtr(tmp_path / "wrong.kdtr", arrays, metadata)
    with pytest.raises(ValueError, match=r"wrong\.kdtr: " + message):
        load_run(tmp_path / "wrong.kdtr")


@pytest.mark.parametrize("name", [*_ARRAYS, "token_bytes", "token_byte_offsets"])
def test_an_array_that_is_missing_or_of_another_type_is_named(saved, tmp_path, name):
    arrays, metadata = read_kdtr(saved)
    for other in (None, arrays[name].astype(np.float32), arrays[name][None]):
        changed = {k: v for k, v in arrays.items() if k != name} | ({} if other is None else {name: other})
        write_kdtr(tmp_path / "wrong.kdtr", changed, metadata)
        with pytest.raises(ValueError, match=rf"wrong\.kdtr: {name} must be \w+ of shape \(\w+,\), got "):
            load_run(tmp_path / "wrong.kdtr")


@given(st.data())
def test_any_change_of_a_value_is_met_or_means_something_else(saved_arrays, data):
    """Never another error than ValueError, whatever stands in the arrays."""
    path, arrays, metadata = saved_arrays
    changed = dict(arrays)
    for _ in range(data.draw(st.integers(1, 3))):
        name = data.draw(st.sampled_from(sorted(arrays)), "name")
        array = changed[name].copy()
        if not len(array) or data.draw(st.booleans()):
            array = array[: data.draw(st.integers(0, len(array)))]
        elif array.dtype == np.bool_:
            array[data.draw(st.integers(0, len(array) - 1))] ^= True
        else:
            values = st.sampled_from([-(2**31), -1, 0, 1, 2, 5, 2**31 - 1] if array.dtype != np.uint8 else [0, 255])
            array[data.draw(st.integers(0, len(array) - 1))] = data.draw(values, "value")
        changed[name] = array
    write_kdtr(path, changed, metadata)
    message = f"{path}: "
    try:
        load_run(path)
    except ValueError as error:
        message = str(error)
    assert message.startswith(f"{path}: ")


@pytest.fixture(scope="module")
def saved_arrays(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    prompts, generation = generated([repeating(3), repeating(5)], [12, 7])
    save_run(folder / "run.kdtr", generation, prompts, vocabulary=VOCABULARY)
    return (folder / "changed.kdtr", *read_kdtr(folder / "run.kdtr"))


@pytest.mark.parametrize(
    "metadata, message",
    [
        ({}, r"is no saved run: its metadata 'format' must be 'ddtree run 1', got None"),
        ({"format": "ddtree run 1"}, r"metadata 'settings' must be an object, got NoneType"),
        ({"format": "ddtree run 1", "settings": "{"}, r"metadata 'settings' is not JSON: "),
        ({"format": "ddtree run 1", "settings": "[" * 9999}, r"metadata 'settings' is not JSON: "),
        ({"format": "ddtree run 1", "settings": "[]"}, r"metadata 'settings' must be an object, got list"),
    ],
)
def test_wrong_metadata_is_named(saved, tmp_path, metadata, message):
    write_kdtr(tmp_path / "wrong.kdtr", read_kdtr(saved)[0], metadata)
    with pytest.raises(ValueError, match=r"wrong\.kdtr:? " + message):
        load_run(tmp_path / "wrong.kdtr")


def test_a_damaged_file_is_met(saved):
    raw = saved.read_bytes()
    for damaged in (raw[:-100], raw[:200], b"", raw[:3000] + bytes([raw[3000] ^ 1]) + raw[3001:]):
        saved.write_bytes(damaged)
        with pytest.raises(KdtrError):
            load_run(saved)


def test_what_does_not_belong_together_is_not_written(tmp_path):
    prompts, generation = generated([repeating(3)], [12])
    path = tmp_path / "run.kdtr"
    with pytest.raises(ValueError, match=r"prompts must have one entry a request, 1, got 2"):
        save_run(path, generation, prompts * 2)
    for other in (prompts[0][:5], np.append(prompts[0], 1), prompts[0][:0]):
        with pytest.raises(ValueError, match=rf"prompts\[0\] must have the 12 tokens .*, got {len(other)}$"):
            save_run(path, generation, [other])
    with pytest.raises(ValueError, match=r"finish_reasons\[0\] must be 'length' or 'stop', to be kept, got 'error'"):
        save_run(path, replace(generation, finish_reasons=["error"]), prompts)
    with pytest.raises(ValueError, match=r"generation: node_token_ids\[\d+\] must be in 0 … 1, got 2|token_ids"):
        save_run(path, generation, prompts, vocabulary=Vocabulary([b"a", b"b"]))
    with pytest.raises(TypeError, match="settings must be what JSON can hold: "):
        save_run(path, generation, prompts, settings={"x": np.zeros(2)})
    with pytest.raises(ValueError, match="settings must be what JSON can hold: "):
        save_run(path, generation, prompts, settings={"x": float("nan")})
    nested: list[object] = []
    for _ in range(5_000):
        nested = [nested]
    with pytest.raises(ValueError, match="settings must be what JSON can hold: maximum recursion depth exceeded"):
        save_run(path, generation, prompts, settings={"x": nested})
    for text in ({"x": "\ud800"}, {"\ud800": 1}, {"x": ["\udfff"]}):
        with pytest.raises(ValueError, match=r"settings must be what JSON can hold: .*surrogates not allowed"):
            save_run(path, generation, prompts, settings=text)
    cut = replace(generation, rounds=generation.rounds[:-1])
    with pytest.raises(ValueError, match=r"generation: new_offsets must end where the rounds of request 0 do, got 12"):
        save_run(path, cut, prompts)
    assert list(tmp_path.iterdir()) == []


def test_every_array_has_a_wrong_value_above():
    assert set(_ARRAYS) - set(WRONG) == {"stopped", "row_finished"}  # any value will do
