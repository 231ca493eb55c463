"""Recorded traces: what is in them, that a killed recording goes on, and that each damage is named."""

import json
import math
import re
import shutil
import signal
import subprocess
import sys
import textwrap
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest

from ddtree.analysis import trace as trace_module
from ddtree.analysis.record import record
from ddtree.analysis.trace import TraceChunk, TraceWriter, open_trace
from ddtree.drafters import NgramDrafter
from ddtree.engine import Engine
from ddtree.kdtr import KdtrError, KdtrFile, read_kdtr, write_kdtr
from ddtree.property_tests.compare import assert_same
from ddtree.property_tests.targets import VOCABULARY, AttentionTarget, RandomDrafter

PROMPTS = [[1, 2], [3], [4, 5, 6], [7, 7], [8]]
OPTIONS = {"depth": 3, "topk": 4, "max_new_tokens": 9, "stop_token_ids": [6]}


def recorded(folder, drafter=None, prompts=PROMPTS, **options):
    return record(AttentionTarget(), drafter or RandomDrafter(3), prompts, folder, **{**OPTIONS, **options})


def columns(chunks):
    """Every prompt's name, tokens, prompt length, log-probs and ids, whatever the chunks."""
    rows = []
    for chunk in chunks:
        for p in range(chunk.num_prompts):
            at = slice(chunk.position_offsets[p], chunk.position_offsets[p + 1])
            rows.append(
                (
                    chunk.names[p],
                    chunk.prompt_tokens(p).tolist(),
                    int(chunk.prompt_lens[p]),
                    chunk.log_probs[at].tobytes(),
                    chunk.draft_token_ids[at].tolist(),
                )
            )
    return rows


class Watching:
    """A drafter that notes what it drafted, by the number of tokens that its request had."""

    label = "watching"

    def __init__(self, drafter):
        self.drafter, self.seen = drafter, {}

    def __call__(self, context, depth, topk):
        log_probs, token_ids = self.drafter(context, depth, topk)
        for b, (request, tokens) in enumerate(zip(context.request_ids, context.tokens, strict=True)):
            self.seen[request, len(tokens)] = log_probs[b], token_ids[b]
        return log_probs, token_ids


@pytest.mark.parametrize("make", [lambda: RandomDrafter(3), NgramDrafter], ids=["random", "n-gram"])
def test_trace_holds_the_tokens_and_at_each_position_what_a_live_run_drafts_there(tmp_path, make):
    trace = recorded(tmp_path / "t", make(), prompts_a_chunk=2, names=list("abcde"))
    live = Watching(make())
    engine = Engine(AttentionTarget(), live, depth=3, topk=4, budget=6)
    generation = engine.generate(PROMPTS, 9, [6])
    assert generation.tau is not None
    assert generation.tau > 1  # positions are passed over, but what is drafted is the same
    seen = set()
    for chunk in trace.chunks():
        for p in range(chunk.num_prompts):
            number = chunk.first_prompt + p
            assert chunk.names[p] == "abcde"[number]
            assert chunk.prompt_tokens(p).tolist() == [*PROMPTS[number], *generation.tokens[number].tolist()]
            assert_same(chunk.new_tokens(p), generation.tokens[number])
            begin, end = chunk.position_offsets[p : p + 2]
            assert end - begin == len(generation.tokens[number]) - 1
            for i in range(end - begin):
                if (number, len(PROMPTS[number]) + i + 1) in live.seen:
                    values, ids = live.seen[number, len(PROMPTS[number]) + i + 1]
                    k = values.shape[1]
                    assert_same(chunk.log_probs[begin + i, :, :k], values)
                    drafted = np.logical_and.accumulate(values > -np.inf, axis=-1)
                    assert (chunk.draft_token_ids[begin + i, :, :k] == ids)[drafted].all()
                    assert not (chunk.log_probs[begin + i, :, k:] > -np.inf).any()
                    seen.add((number, i))
    assert len(seen) == generation.num_rounds > 8
    assert trace.summary() == {
        "prompts": 5,
        "new_tokens": sum(map(len, generation.tokens)),
        "positions": sum(len(t) - 1 for t in generation.tokens),
    }


@pytest.mark.parametrize("chunk", [1, 2, 16])
def test_drafter_keeps_nothing_of_what_was_recorded(tmp_path, chunk):
    drafter = NgramDrafter()
    recorded(tmp_path / "t", drafter, prompts_a_chunk=chunk)
    assert drafter._indices == {}


def test_manifest_says_what_the_trace_is_of(tmp_path):
    recorded(tmp_path / "t", temperature=0.5, top_p=0.9, seed=7, vocabulary="digest", target_name="a model")
    manifest = json.loads((tmp_path / "t" / "manifest.json").read_text())
    assert re.fullmatch(r"[0-9a-f]{64}", manifest.pop("prompts"))
    assert manifest == {
        "format": "ddtree trace 1", "vocab_size": VOCABULARY, "vocabulary": "digest", "depth": 3, "topk": 4,
        "max_new_tokens": 9, "stop_token_ids": [6], "temperature": 0.5, "top_p": 0.9, "seed": 7, "target": "a model",
        "drafter": "RandomDrafter", "prompts_a_chunk": 16, "version": "0.1.0", "num_prompts": 5,
    }  # fmt: skip


@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.8, "seed": 3}])
def test_chunks_do_not_change_what_is_recorded(tmp_path, sampling):
    whole = columns(recorded(tmp_path / "a", prompts_a_chunk=16, **sampling).chunks())
    parts = recorded(tmp_path / "b", prompts_a_chunk=2, **sampling)
    assert len(parts) == 3
    assert columns(parts.chunks()) == whole == columns(parts.in_memory().chunks())


def test_recording_that_failed_is_readable_and_goes_on(tmp_path):
    class Failing(RandomDrafter):
        def __call__(self, context, depth, topk):
            if 3 in context.request_ids:
                raise RuntimeError("out of memory")
            return super().__call__(context, depth, topk)

    class Noting(RandomDrafter):
        requests: ClassVar[set[int]] = set()

        def __call__(self, context, depth, topk):
            self.requests.update(context.request_ids)
            return super().__call__(context, depth, topk)

    whole = columns(recorded(tmp_path / "whole").chunks())
    options = {"prompts_a_chunk": 2, "drafter_name": "random"}
    with pytest.raises(RuntimeError, match="out of memory"):
        recorded(tmp_path / "t", Failing(3), **options)
    half = open_trace(tmp_path / "t")
    assert (half.manifest.complete, columns(half.chunks())) == (False, whole[:2])
    assert "unfinished" in repr(half)
    counts: list[int] = []
    rest = recorded(tmp_path / "t", Noting(3), on_prompts=counts.append, **options)
    assert (Noting.requests, counts) == ({2, 3, 4}, [2, 4, 5])
    assert (rest.manifest.complete, columns(rest.chunks())) == (True, whole)


def test_killed_recording_is_readable_up_to_its_last_chunk_and_goes_on(tmp_path):
    code = textwrap.dedent(
        """
        import sys, time
        from ddtree.property_tests.project.test_trace import RandomDrafter, recorded
        def tell(count):
            print(count, flush=True)
            if count >= 4:
                time.sleep(60)
        recorded(sys.argv[1], prompts_a_chunk=2, on_prompts=tell)
        """
    )
    command = [sys.executable, "-c", code, str(tmp_path / "t")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        for line in process.stdout or []:
            if line == "4\n":
                process.send_signal(signal.SIGKILL)
    assert process.returncode == -signal.SIGKILL
    whole = columns(recorded(tmp_path / "whole").chunks())
    assert columns(open_trace(tmp_path / "t").chunks()) == whole[:4]
    assert columns(recorded(tmp_path / "t", prompts_a_chunk=2).chunks()) == whole


@pytest.mark.parametrize(
    "options, message",
    [
        (
            {"max_new_tokens": 8},
            r"manifest.json: max_new_tokens must be 9, as of the recording that is there, to go on with it, got 8",
        ),
        ({"depth": 2}, r"manifest.json: depth must be 3, .*, got 2"),
        ({"prompts_a_chunk": 3}, r"manifest.json: prompts_a_chunk must be 2, .*, got 3"),
        ({"seed": 4}, r"manifest.json: seed must be 3, .*, got 4"),
        (
            {"prompts": [*PROMPTS[:1], [9], *PROMPTS[2:]]},
            r"prompts must .*, got others \(prompts\[1\] has other tokens\)",
        ),
        (
            {"prompts": PROMPTS[:3]},
            r"prompts must .* \((3 instead of 5|3 instead of 4 or more), as far as they go the same\)",
        ),
        (
            {"prompts": [*PROMPTS, [9]]},
            r"prompts must .* \((6 instead of 5, as|the first 4 are the same, and behind them)",
        ),
    ],
)
def test_another_recording_does_not_go_on_in_the_same_folder(tmp_path, options, message):
    recorded(tmp_path / "t", prompts_a_chunk=2, seed=3)
    before = {path.name: path.read_bytes() for path in (tmp_path / "t").iterdir()}
    with pytest.raises(ValueError, match=message):
        recorded(tmp_path / "t", **{"prompts_a_chunk": 2, "seed": 3} | options)
    assert {path.name: path.read_bytes() for path in (tmp_path / "t").iterdir()} == before
    unfinish(tmp_path / "t")
    with pytest.raises(ValueError, match=message):
        recorded(tmp_path / "t", **{"prompts_a_chunk": 2, "seed": 3} | options)


def test_finished_recording_is_returned_and_nothing_is_recorded(tmp_path):
    def drafter(context, depth, topk):
        raise AssertionError("nothing is left to draft")

    first = recorded(tmp_path / "t", prompts_a_chunk=2, drafter_name="d")
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "t").iterdir()}
    counts: list[int] = []
    again = recorded(tmp_path / "t", drafter, prompts_a_chunk=2, drafter_name="d", on_prompts=counts.append)
    assert (again.manifest, columns(again.chunks()), counts) == (first.manifest, columns(first.chunks()), [5])
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "t").iterdir()} == before


def test_writer_of_a_finished_trace_adds_nothing(tmp_path):
    for prompts, error in (
        ("digest", "t: the trace is complete, with 1 prompts: nothing"),
        ("", "this one is complete"),
    ):
        folder = tmp_path / prompts / "t"
        with writer(folder, prompts=prompts) as w:
            w.append([5, 1, 4, 2], 1, *DRAFT)
        with pytest.raises(ValueError, match=error):
            writer(folder, prompts=prompts).append([5, 1, 4, 2], 1, *DRAFT)
    with pytest.raises(
        ValueError, match=r"prompts must be those of the recording that is there, .*, got others: choose"
    ):
        writer(tmp_path / "digest/t", prompts="another")


def unfinish(folder, remove=(2,)):
    """As it was before the last chunk."""
    change_manifest(folder, num_prompts=-1)
    for i in remove:
        (folder / f"chunk-{i:05d}.kdtr").unlink()


def change_manifest(folder, **values):
    document = json.loads((folder / "manifest.json").read_text()) | values
    (folder / "manifest.json").write_text(json.dumps({k: v for k, v in document.items() if v != "gone"}))


def change_chunk(folder, change, index=0):
    path = folder / f"chunk-{index:05d}.kdtr"
    arrays, about = read_kdtr(path)
    change(arrays, about)
    write_kdtr(path, arrays, about)


def of_chunk(change, index=0):
    return lambda folder: change_chunk(folder, change, index)


def of_manifest(**values):
    return lambda folder: change_manifest(folder, **values)


def set_cell(name, place, value):
    return of_chunk(lambda arrays, about: arrays[name].__setitem__(place, value))


def set_array(name, change):
    return of_chunk(lambda arrays, about: arrays.__setitem__(name, change(arrays[name])))


def flip_byte(folder):
    path = folder / "chunk-00001.kdtr"
    raw = bytearray(path.read_bytes())
    with KdtrFile(path) as file:
        raw[file.entries["log_probs"].offset + 5] ^= 1
    path.write_bytes(raw)


DAMAGES = {
    "no JSON": (lambda f: (f / "manifest.json").write_text("{"), r"manifest.json: must be JSON, got"),
    "a deep manifest": (lambda f: (f / "manifest.json").write_text("[" * 10**5), r"manifest.json: must be JSON, got"),
    "no manifest": (lambda f: (f / "manifest.json").write_text("[]"), r"manifest.json: format must be 'ddtree"),
    "another format": (of_manifest(format="x"), r"manifest.json: format must be"),
    "a missing field": (of_manifest(depth="gone"), r"manifest.json: depth is missing"),
    "a wrong type": (of_manifest(depth="3"), r"manifest.json: depth must be of type int, got '3'"),
    "a truth value": (of_manifest(depth=True), r"manifest.json: depth must be of type int, got True"),
    "an unknown field": (of_manifest(more=1), r"manifest.json: more is no field of a manifest"),
    "a depth of 0": (of_manifest(depth=0), r"manifest.json: depth must be in 1 … \d+, got 0"),
    "too wide": (of_manifest(topk=12), r"manifest.json: topk must be at most vocab_size 11, got 12"),
    "a stop outside": (of_manifest(stop_token_ids=[11]), r"manifest.json: stop_token_ids\[0\] must be in 0 … 10 "),
    "a true stop": (of_manifest(stop_token_ids=[True]), r"manifest.json: stop_token_ids\[0\] must be an integer, got"),
    "no temperature": (of_manifest(temperature=math.nan), r"manifest.json: temperature must be finite and .*, got nan"),
    "cold": (of_manifest(temperature=-1.0), r"manifest.json: temperature must be finite and at least 0, got -1.0"),
    "no top-p": (of_manifest(top_p=math.inf), r"manifest.json: top_p must be finite, got inf"),
    "too much": (of_manifest(top_p=1.5), r"manifest.json: top_p must be over 0 and at most 1, got 1.5"),
    "no seed": (of_manifest(seed=-1), r"manifest.json: seed must be in 0 … \d+, got -1"),
    "another trace": (of_manifest(seed=5), r"chunk-00000.kdtr: trace must be '[0-9a-f]+', as in manifest.json, got"),
    "too few chunks": (lambda f: (f / "chunk-00001.kdtr").unlink(), r"chunk-00001.kdtr: is missing"),
    "too many chunks": (
        lambda f: shutil.copy(f / "chunk-00000.kdtr", f / "chunk-00003.kdtr"),
        r"chunk-00003.kdtr: must not be there, manifest.json says num_prompts 5",
    ),
    "far too few chunks": (of_manifest(num_prompts=2**31 - 1), r"chunk-00003.kdtr: is missing"),
    "no chunk": (lambda f: unfinish(f, remove=(0, 1, 2)), r"must have a chunk or more, got an empty trace"),
    "no prompt": (
        lambda f: (unfinish(f, remove=(0, 1, 2)), change_manifest(f, num_prompts=0)),
        r"must have a chunk or more, got an empty trace",
    ),
    "a chunk twice": (
        lambda f: shutil.copy(f / "chunk-00000.kdtr", f / "chunk-00001.kdtr"),
        r"chunk-00001.kdtr: first_prompt must be 2, got 0",
    ),
    "a wrong count": (of_manifest(num_prompts=6), r"t: num_prompts of the manifest must be what .* hold, 5, got 6"),
    "no chunk of a trace": (
        of_chunk(lambda arrays, about: about.clear()),
        r"chunk-00000.kdtr: format must be 'ddtree trace 1', .*, got None",
    ),
    "no names": (of_chunk(lambda a, about: about.pop("names")), r"chunk-00000.kdtr: first_prompt and names must be"),
    "deep names": (of_chunk(lambda a, about: about.update(names="[" * 10**5)), r"kdtr: first_prompt and names must be"),
    "names of others": (of_chunk(lambda a, about: about.update(names="[1]")), r"names must be 2 strings, .* got \[1\]"),
    "a missing array": (of_chunk(lambda a, about: a.pop("log_probs")), r"chunk-00000.kdtr: log_probs is missing"),
    "another type": (
        set_array("token_ids", lambda a: a.astype(np.int64)),
        r"chunk-00000.kdtr: token_ids must be of type uint16, got int64",
    ),
    "another L": (
        set_array("log_probs", lambda a: a[:, :2]),
        r"chunk-00000.kdtr: log_probs must have shape \(n, 3, 4\), got \(\d+, 2, 4\)",
    ),
    "fewer ids": (
        set_array("draft_token_ids", lambda a: a[1:]),
        r"chunk-00000.kdtr: draft_token_ids must have shape \(\d+, 3, 4\), got \(\d+, 3, 4\)",
    ),
    "nothing": (
        set_array("prompt_lens", lambda a: a[:0]),
        r"chunk-00000.kdtr: prompt_lens must have one entry or more, got none",
    ),
    "a prompt too few": (
        set_array("prompt_lens", lambda a: a[1:]),
        r"chunk-00000.kdtr: token_offsets must go from 0 to \d+ in 2 entries, got",
    ),
    "an offset beyond": (
        set_cell("token_offsets", -1, 99),
        r"chunk-00000.kdtr: token_offsets must go from 0 to \d+ in 3 entries, got",
    ),
    "offsets that fall": (set_cell("token_offsets", 1, -5), r"token_offsets\[1\] must be at least 3, got -5"),
    "drafts of others": (set_cell("position_offsets", 1, 2), r"position_offsets\[1\] must be \d+, got 2"),
    "an empty prompt": (set_cell("prompt_lens", 0, 0), r"chunk-00000.kdtr: prompt_lens must be 1 and up, got 0"),
    "a token outside": (set_cell("token_ids", 1, 11), r"chunk-00000.kdtr: token_ids must lie in 0 … 10, got 11"),
    "a draft outside": (
        lambda f: change_chunk(f, lambda a, _: (a["log_probs"].fill(-1.0), a["draft_token_ids"].fill(11))),
        r"chunk-00000.kdtr: draft_token_ids\[0, 0, 0\] must be in 0 … 10, got 11",
    ),
    "logits": (set_cell("log_probs", (0, 0, 0), 0.5), r"chunk-00000.kdtr: log_probs\[0, 0, 0\] must be at most 0"),
    "not sorted": (
        lambda f: change_chunk(f, lambda a, _: a["log_probs"].__setitem__((0, 0), [-2, -1, -3, -4])),
        r"chunk-00000.kdtr: log_probs\[0, 0, 1\] must not exceed its left neighbour -2.0, got -1.0",
    ),
    "a bit": (flip_byte, r"chunk-00001.kdtr: .*CRC-32"),
}  # fmt: skip


@pytest.fixture(scope="module")
def good_trace(tmp_path_factory):
    folder = tmp_path_factory.mktemp("good") / "t"
    recorded(folder, prompts_a_chunk=2)
    return folder


@pytest.mark.parametrize("name", DAMAGES)
def test_damage_is_named_with_file_and_field(tmp_path, good_trace, name):
    damage, message = DAMAGES[name]
    shutil.copytree(good_trace, tmp_path / "t")
    assert len(columns(open_trace(tmp_path / "t").chunks())) == 5
    damage(tmp_path / "t")
    with pytest.raises(ValueError, match=message):
        list(open_trace(tmp_path / "t").chunks())


def test_continuation_too_long_for_the_manifest_is_named(tmp_path):
    recorded(tmp_path / "t")
    change_chunk(tmp_path / "t", lambda a, about: None)
    manifest = replace(open_trace(tmp_path / "t").manifest, max_new_tokens=3)
    change_manifest(tmp_path / "t", max_new_tokens=3)
    change_chunk(tmp_path / "t", lambda a, about: about.update(trace=manifest.identity))
    with pytest.raises(ValueError, match=r"token_offsets must leave at most max_new_tokens = 3 to a prompt, got 9"):
        list(open_trace(tmp_path / "t").chunks())


def test_damaged_chunk_is_not_gone_on_from(tmp_path, good_trace):
    shutil.copytree(good_trace, tmp_path / "t")
    unfinish(tmp_path / "t")
    flip_byte(tmp_path / "t")
    with pytest.raises(KdtrError, match=r"chunk-00001.kdtr"):
        recorded(tmp_path / "t", prompts_a_chunk=2)
    (tmp_path / "t" / "chunk-00000.kdtr").unlink()
    with pytest.raises(ValueError, match=r"chunks must be numbered without a gap, got chunk-00001.kdtr as the last"):
        recorded(tmp_path / "t", prompts_a_chunk=2)
    (tmp_path / "t" / "manifest.json").unlink()
    with pytest.raises(ValueError, match=r"must be empty or a trace, got chunks without manifest.json"):
        recorded(tmp_path / "t", prompts_a_chunk=2)


def test_folder_that_is_none_or_has_no_manifest_is_named(tmp_path):
    for folder in (tmp_path / "nowhere", tmp_path):
        with pytest.raises(FileNotFoundError, match=r"manifest\.json"):
            open_trace(folder)


DRAFT = np.log(np.array([[[0.5, 0.25]] * 2] * 2, np.float32)), np.array([[[1, 2]] * 2] * 2, np.int32)


def writer(folder, **options):
    return TraceWriter(folder, **{"vocab_size": 10, "depth": 2, "topk": 2, "max_new_tokens": 4} | options)


def test_writer_keeps_what_it_is_given(tmp_path):
    with writer(tmp_path / "t", vocab_size=70_000, stop_token_ids=[9]) as w:
        w.append([5, 69_999, 4, 9], 1, *DRAFT, name="é")
        w.append([5, 9], 1, np.zeros((0, 2, 2)), np.zeros((0, 2, 2), int))
        assert w.num_prompts == 2
    [chunk] = open_trace(tmp_path / "t").chunks()
    assert isinstance(chunk, TraceChunk)
    assert columns([chunk]) == [
        ("é", [5, 69_999, 4, 9], 1, DRAFT[0].tobytes(), DRAFT[1].tolist()),
        ("", [5, 9], 1, b"", []),
    ]
    assert chunk.draft_token_ids.dtype == np.int32


def one_prompt(w, *new):
    values = np.full((len(new) - 1, 2, 2), -np.inf)
    w.append([5, *new], 1, values, np.zeros(values.shape, int))


def files(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize("steps", ["aaaaA", "aaaabA", "aabbaaA", "abaB", "ababA", "bBaA"])
@pytest.mark.parametrize("seed", [0, 1])
def test_second_writer_of_a_folder_is_refused_and_changes_nothing(tmp_path, steps, seed):
    # a and b add a prompt, A and B close; who writes first goes on, whatever the other one is a recording of
    writers = {name: writer(tmp_path / "t", prompts_a_chunk=2, seed=s) for name, s in (("a", 0), ("b", seed))}
    counts, refused, first = dict.fromkeys("ab", 0), {}, ""
    for step in steps + "aabbAB":
        w, before = writers[step.lower()], files(tmp_path / "t") if (tmp_path / "t").exists() else {}
        if step in refused or w.num_prompts == 4:
            continue
        try:
            w.close() if step.isupper() else one_prompt(w, 1 + "ab".index(step), 3)
            counts[step.lower()] += step.islower()
        except ValueError as error:
            refused[step] = str(error)
            assert files(tmp_path / "t") == before
            continue
        if (tmp_path / "t").exists() and files(tmp_path / "t") != before:
            first = first or step.lower()
            assert step.lower() == first
    for said in refused.values():
        assert re.search(r"must have one writer at a time, another has changed|nothing can be added", said)
    rows = columns(open_trace(tmp_path / "t").chunks())
    assert len(rows) == writers[first].num_prompts == counts[first]
    assert {row[1][1] for row in rows} == {1 + "ab".index(first)}


def test_prompt_whose_chunk_cannot_be_written_is_not_added(tmp_path):
    w, other = (writer(tmp_path / "t", prompts_a_chunk=2) for _ in range(2))
    for each in (w, w, other):
        one_prompt(each, 1)
    for _ in range(2):
        with pytest.raises(ValueError, match=r"another has changed chunk-00000.kdtr: stop the others, or choose"):
            one_prompt(other, 1)
        assert other.num_prompts == 1


def test_closed_writer_takes_nothing_and_may_be_closed_again(tmp_path):
    with writer(tmp_path / "t") as w:
        one_prompt(w, 1)
        w.close()
    w.close()
    whole = files(tmp_path / "t")
    with pytest.raises(ValueError, match=r"the trace is complete, with 1 prompts: nothing can be added"):
        one_prompt(w, 1)
    with pytest.raises(RuntimeError), writer(tmp_path / "u") as failed:
        raise RuntimeError
    with pytest.raises(ValueError, match=r"must be open to be added to, its writer is closed: make another one"):
        one_prompt(failed, 1)
    failed.close()
    assert (files(tmp_path / "t"), (tmp_path / "u").exists()) == (whole, False)


def test_what_a_killed_recording_left_half_written_is_removed(tmp_path):
    code = textwrap.dedent(
        """
        import os, signal, sys
        from ddtree.property_tests.project.test_trace import recorded
        def kill(count):
            if count:
                os.replace = lambda *paths: os.kill(os.getpid(), signal.SIGKILL)
        recorded(sys.argv[1], prompts_a_chunk=2, on_prompts=kill)
        """
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path / "t")], check=False)
    assert done.returncode == -signal.SIGKILL
    for name in (".mine.tmp", "a.tmp"):
        (tmp_path / "t" / name).touch()
    assert sum(name.endswith(".tmp") for name in files(tmp_path / "t")) == 3
    recorded(tmp_path / "t", prompts_a_chunk=2)
    chunks = [f"chunk-0000{i}.kdtr" for i in range(3)]
    assert sorted(files(tmp_path / "t")) == [".mine.tmp", "a.tmp", *chunks, "manifest.json"]


@pytest.mark.parametrize(
    "options, error, message",
    [
        ({"vocab_size": 0}, ValueError, r"vocab_size must be in 1 … \d+, got 0"),
        ({"depth": 0}, ValueError, r"depth must be in 1 … \d+, got 0"),
        ({"topk": 11}, ValueError, r"topk must be in 1 … 10 \(the vocabulary size\), got 11"),
        ({"max_new_tokens": 0}, ValueError, r"max_new_tokens must be in 1 … \d+, got 0"),
        ({"stop_token_ids": [10]}, ValueError, r"stop_token_ids\[0\] must be in 0 … 9 \(the vocabulary\), got 10"),
        ({"temperature": -1}, ValueError, r"temperature must be .* at least 0, got -1"),
        ({"top_p": 0}, ValueError, r"top_p must be over 0 and at most 1, got 0"),
        ({"seed": -1}, ValueError, r"seed must be in 0 … \d+, got -1"),
        ({"prompts_a_chunk": 0}, ValueError, r"prompts_a_chunk must be in 1 … \d+, got 0"),
    ],
)
def test_writer_names_a_wrong_argument_and_writes_nothing(tmp_path, options, error, message):
    with pytest.raises(error, match=message):
        writer(tmp_path / "t", **options)
    assert not (tmp_path / "t").exists()


@pytest.mark.parametrize(
    "arguments, error, message",
    [
        (([5, 1, 4, 10], 1, *DRAFT), ValueError, r"tokens of prompt 0\[3\] must be in 0 … 9, got 10"),
        (([5, 1, 4, 2], 0, *DRAFT), ValueError, r"prompt_len of prompt 0 must be in 1 … 3 .*, got 0"),
        (([5, 1, 4, 2], 4, *DRAFT), ValueError, r"prompt_len of prompt 0 must be in 1 … 3 \(one token must be new\)"),
        (([5] + [1] * 5, 1, *DRAFT), ValueError, r"tokens of prompt 0 must have at most 4 new ones, got 5"),
        (([5, 9, 4, 1], 1, *DRAFT), ValueError, r"tokens of prompt 0 must end at a stop token, got 2 behind one"),
        (([5, 1, 4, 2], 1, *DRAFT, "\ud800"), ValueError, r"name of prompt 0 must be text that UTF-8 can hold, got"),
        (([5, 1, 4, 2], 1, *DRAFT, None), TypeError, r"name of prompt 0 must be a string, got NoneType"),
        (([5, 1, 4], 1, *DRAFT), ValueError, r"log_probs and token_ids of prompt 0 must have shape \(1, 2, 2\), got"),
        (([5, 1, 4, 2], 1, DRAFT[0], DRAFT[1] * 1.0), TypeError, r"token_ids of prompt 0 must hold integers, got"),
        (([5, 1, 4, 2], 1, -DRAFT[0], DRAFT[1]), ValueError, r"prompt 0: log_probs\[0, 0, 0\] must be at most 0, got"),
        (([5, 1, 4, 2], 1, DRAFT[0], DRAFT[1] + 8), ValueError, r"draft_token_ids\[0, 0, 1\] must be in 0 … 9"),
        (
            ([5, 1, 4, 2], 1, DRAFT[0], DRAFT[1] * 0),
            ValueError,
            r"prompt 0: draft_token_ids\[0, 0, 1\] must be distinct within its depth, got 0",
        ),
    ],
)  # fmt: skip
def test_writer_names_a_wrong_prompt_and_adds_nothing(tmp_path, arguments, error, message):
    w = writer(tmp_path / "t", stop_token_ids=[9])
    with pytest.raises(error, match=message):
        w.append(*arguments)
    assert w.num_prompts == 0


@pytest.mark.parametrize(
    "options, error, message",
    [
        ({"prompts": []}, ValueError, r"prompts must hold one prompt or more, got none"),
        ({"prompts": [[1], [99]]}, ValueError, r"prompts\[1\]\[0\] must be in 0 … 10, got 99"),
        ({"names": [*"abcd", "\ud800"]}, ValueError, r"names\[4\] must be text that UTF-8 can hold, got '\\ud800'"),
        ({"names": [*range(5)]}, TypeError, r"names\[0\] must be a string, got int"),
        ({"stop_token_ids": 5}, TypeError, r"stop_token_ids must be a sequence, got int 5"),
        ({"names": ["a"]}, ValueError, r"names must have one entry a prompt, 5, got 1"),
        ({"topk": 12}, ValueError, r"topk must be in 1 … 11 \(the vocabulary size\), got 12"),
        ({"top_p": 2.0}, ValueError, r"top_p must be over 0 and at most 1, got 2.0"),
    ],
)
def test_record_names_a_wrong_argument_and_writes_nothing(tmp_path, options, error, message):
    with pytest.raises(error, match=message):
        recorded(tmp_path / "t", **options)
    assert not (tmp_path / "t").exists()


def test_record_needs_a_drafter(tmp_path):
    with pytest.raises(TypeError, match=r"drafter must be a drafter, got None"):
        record(AttentionTarget(), None, PROMPTS, tmp_path / "t")


def documented(name):
    """The function of that name in the module's page, as the page has it."""
    for block in re.findall(r"code-block:: python\n\n((?:    .*\n|\n)+)", trace_module.__doc__ or ""):
        if f"def {name}(" in block:
            return textwrap.dedent(block)
    raise AssertionError(f"{name} is not in the docstring")


def test_recorder_for_torch_in_the_documentation_records_what_the_models_say(tmp_path):
    torch = pytest.importorskip("torch", reason="optional library torch is not installed")

    class Model(torch.nn.Module):  # type: ignore[misc, name-defined]
        """Logits that follow from the last two tokens, as a language model of transformers returns them."""

        def __init__(self, seed):
            super().__init__()
            self.table = torch.randn(10, 10, 10, generator=torch.Generator().manual_seed(seed))
            self.config = type("Config", (), {"vocab_size": 10})

        def forward(self, ids):
            before = torch.nn.functional.pad(ids, (1, 0))[:, :-1]
            return type("Output", (), {"logits": self.table[before, ids]})

    page: dict[str, Any] = {}
    exec(documented("record_torch"), page)
    target, drafter = Model(0), Model(1)
    prompts = [[1, 2], [3], [4, 5]]
    page["record_torch"](target, drafter, prompts, tmp_path / "t", depth=3, topk=4, max_new_tokens=6, stop=(7,))
    trace = open_trace(tmp_path / "t")
    rows = columns(trace.chunks())
    assert [row[2] for row in rows] == [2, 1, 2]
    for prompt, (_, tokens, prompt_len, raw, ids) in zip(prompts, rows, strict=True):
        values = np.frombuffer(raw, np.float32).reshape(-1, 3, 4)
        assert tokens[:prompt_len] == prompt
        assert len(values) == len(tokens) - prompt_len - 1
        for end in range(prompt_len, len(tokens)):  # the target's greedy choice
            logits = target(torch.tensor([tokens[:end]])).logits[0, -1]
            assert tokens[end] == int(logits.argmax())
        for i, end in enumerate(range(prompt_len + 1, len(tokens))):
            drafted = tokens[:end]
            for d in range(3):
                expected = torch.log_softmax(drafter(torch.tensor([drafted])).logits[0, -1], -1)
                np.testing.assert_array_equal(values[i, d], expected[ids[i][d]].numpy())
                assert ids[i][d][0] == int(expected.argmax())
                drafted = [*drafted, ids[i][d][0]]


@pytest.mark.parametrize("name", ["record_torch", "record_vllm", "record_sglang"])
def test_recorders_in_the_documentation_are_python_and_short(name):
    page = documented(name)
    compile(page, name, "exec")
    assert len(page.strip().splitlines()) <= 34


class Serving:
    """Answers as vLLM's LLM and SGLang's Engine do, of a model whose log-probs follow from the last token."""

    def __init__(self, seed):
        logits = np.random.default_rng(seed).normal(size=(10, 10))
        self.log_probs = logits - np.log(np.exp(logits).sum(1, keepdims=True))
        self.llm_engine = SimpleNamespace(model_config=SimpleNamespace(get_vocab_size=lambda: 10))

    def generate(self, prompts=None, params=None, *, input_ids=None, sampling_params=None, **options):
        if sampling_params is None:
            answers = [self.continued(p["prompt_token_ids"], params["max_tokens"]) for p in prompts]
            k = params.get("logprobs", 1)
            return [
                SimpleNamespace(outputs=[SimpleNamespace(token_ids=ids, logprobs=[
                    {int(t): SimpleNamespace(logprob=float(row[t])) for t in np.argsort(-row)[:k]} for row in rows
                ])])
                for ids, rows in answers
            ]  # fmt: skip
        if isinstance(input_ids[0], int):
            return {"output_ids": self.continued(input_ids, sampling_params["max_new_tokens"])[0]}
        k = options["top_logprobs_num"]
        return [
            {"meta_info": {"output_top_logprobs": [
                [(float(row[t]), int(t), None) for t in np.argsort(-row)[:k]]
                for row in self.continued(ids, sampling_params["max_new_tokens"])[1]
            ]}}
            for ids in input_ids
        ]  # fmt: skip

    def continued(self, tokens, count):
        tokens, rows = list(tokens), []
        for _ in range(count):
            rows.append(self.log_probs[tokens[-1]])
            tokens.append(int(rows[-1].argmax()))
        return tokens[-count:], rows


@pytest.mark.parametrize("engine, more", [("vllm", ()), ("sglang", (10,))])
def test_recorders_for_serving_engines_in_the_documentation_run_as_they_stand(tmp_path, monkeypatch, engine, more):
    stand_in = SimpleNamespace(LLM=Serving, SamplingParams=dict, TokensPrompt=dict)
    monkeypatch.setitem(sys.modules, "vllm", stand_in)
    page: dict[str, Any] = {}
    exec(documented(f"record_{engine}"), page)
    target, drafter = Serving(0), Serving(1)
    page[f"record_{engine}"](target, drafter, *more, [[1, 2], [3]], tmp_path / "t", depth=2, topk=3, max_new_tokens=4)
    [chunk] = open_trace(tmp_path / "t").chunks()
    for p, prompt in enumerate([[1, 2], [3]]):
        assert chunk.prompt_tokens(p).tolist() == [*prompt, *target.continued(prompt, 4)[0]]
        for i, at in enumerate(range(*chunk.position_offsets[p : p + 2])):
            rows = np.array(drafter.continued(chunk.prompt_tokens(p)[: len(prompt) + i + 1], 2)[1])
            assert_same(chunk.draft_token_ids[at], np.argsort(-rows)[:, :3].astype(np.uint16))
            assert_same(chunk.log_probs[at], -np.sort(-rows)[:, :3].astype(np.float32))
