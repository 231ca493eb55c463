"""What is fuzzed: each target takes bytes, and tells what came of them; anything undocumented is an exception.

A target's ``run`` returns "ok", or the kind of the documented error that it met. It raises :class:`CrashError` where
the error, its message, the memory taken or the files left are not as documented; whatever else it raises is a crash.
"""

from __future__ import annotations

import io
import json
import os
import tempfile
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import click
import numpy as np
from click.testing import CliRunner

from ddtree import reference
from ddtree.cli import main
from ddtree.kdtr import DTYPES, KdtrError, KdtrFile, dtype_named, read_kdtr, write_kdtr
from ddtree.model import ModelConfig, load_model
from ddtree.property_tests.cases import Case
from ddtree.property_tests.project.damaged_kdtr import DAMAGES, SOUND
from ddtree.property_tests.project.fuzz import mutations
from ddtree.property_tests.project.fuzz.mutations import Mutate, joined, parts
from ddtree.trees import tree_from_parents

TRACED = 4
"""One case in so many has its memory measured: that takes several times as long."""


class CrashError(AssertionError):
    """What a target did is not what is documented."""


@dataclass(frozen=True)
class Target:
    """Something that parses bytes.

    Attributes
    ----------
    name : str
        What it is called.
    run : callable
        ``(data, folder) -> outcome``, in an empty folder.
    seeds : callable
        Inputs to begin with.
    mutate : callable
        ``(data, largest, rng, mutate) -> data``, with knowledge of the format.
    largest : int
        Bytes of an input.
    share : float
        Of the budget of bytes.
    memory : int
        Bytes that it may take beside 64 times its input: caches at a first call, tables, a decoder.
    """

    name: str
    run: Callable[[bytes, Path], str]
    seeds: Callable[[], list[bytes]]
    mutate: Callable[[bytes, int, Random, Mutate], bytes]
    largest: int
    share: float
    memory: int = 8 << 20


def checked(target: Target, data: bytes, folder: Path) -> str:
    """Run a target on one input: its outcome, with what it leaves behind and (now and then) its memory checked."""
    traced = (len(data) + sum(data[-4:])) % TRACED == 0
    if traced:
        tracemalloc.start()
    try:
        outcome = target.run(data, folder)
        if traced:
            peak, allowed = tracemalloc.get_traced_memory()[1], target.memory + 64 * len(data)
            if peak > allowed:
                raise CrashError(f"took {peak:,} bytes of memory on {len(data):,}, {allowed:,} is allowed")
    finally:
        if traced:
            tracemalloc.stop()
    left = [name for name in os.listdir(folder) if name.endswith(".tmp")]
    if left:
        raise CrashError(f"left {left[0]}")
    return outcome


# KDTR


def _kdtr(data: bytes, folder: Path) -> str:
    """Read in both ways; what can be read is what would be written."""
    path = folder / "a.kdtr"
    path.write_bytes(data)
    try:
        arrays, metadata = read_kdtr(path)
    except KdtrError as error:
        _mapped_too(path, data, error)
        return "KdtrError"
    with KdtrFile(path) as mapped:
        mapped.verify()
        if any(mapped[name].tobytes() != array.tobytes() for name, array in arrays.items()):
            raise CrashError("a mapped array differs from the one that was read")
    write_kdtr(path, arrays, metadata)
    if path.read_bytes() != data:
        raise CrashError("the file that is read is not the one that would be written")
    return "ok"


def _mapped_too(path: Path, data: bytes, error: KdtrError) -> None:
    """The error is the format's, and a mapped file has the same."""
    if not 0 <= error.offset <= len(data):
        raise CrashError(f"the error's offset {error.offset} is not in the file of {len(data)}") from error
    if not str(error).startswith(f"{path}: ") or "\n" in str(error):
        raise CrashError(f"not one line that begins with the path: {error}") from error
    try:
        with KdtrFile(path) as mapped:
            for name in mapped:
                for _ in mapped.iter_chunks(name):
                    pass
    except KdtrError as other:
        if str(other) != str(error):
            raise CrashError(f"mapped: {other}; read: {error}") from other
    else:
        raise CrashError(f"nothing is wrong where it is mapped; read: {error}")


def _kdtr_seeds() -> list[bytes]:
    rng = np.random.default_rng(0)
    every = {name: (rng.random((2, 3)) * 2).astype(dtype_named(name)) for name in DTYPES}
    return [SOUND, _written(every, {"τ": "7½", "": ""}), _written({}, {})]


def _written(arrays: dict[str, Any], metadata: dict[str, str]) -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "a.kdtr"
        write_kdtr(path, arrays, metadata)
        return path.read_bytes()


# Checkpoints


def _loaded(path: Path) -> str:
    try:
        model = load_model(path, dtype="float32", backend="reference")
    except (FileNotFoundError, ValueError) as error:
        if not str(error):
            raise CrashError(f"{type(error).__name__} without a message") from error
        return type(error).__name__
    if not isinstance(model.config, ModelConfig):
        raise CrashError("no configuration")
    return "ok"


def _checkpoint(data: bytes, folder: Path) -> str:
    """A folder: the configuration, one file or the index, and shards."""
    for name, content in zip(("config.json", *_FILES), parts(data), strict=False):
        if content or name == "config.json":
            (folder / name).write_bytes(content)
    return _loaded(folder)


_FILES = ("model.safetensors", "model.safetensors.index.json", "b.safetensors")


def _checkpoint_mutated(data: bytes, largest: int, rng: Random, mutate: Mutate) -> bytes:
    pieces = parts(data)
    if not pieces or rng.randrange(20) == 0:
        return mutate(data, largest)
    i = rng.randrange(len(pieces))
    change = mutations.json_text if i in (0, 2) else mutations.safetensors
    pieces[i] = change(pieces[i], largest - sum(map(len, pieces)) + len(pieces[i]) - 32, rng, mutate)
    return joined(pieces)[:largest]


def tiny_models() -> list[tuple[ModelConfig, dict[str, np.ndarray]]]:
    """A dense layer alone, and with one of experts: the smallest that there are."""
    shape = {
        "vocab_size": 3, "hidden_size": 2, "intermediate_size": 1, "moe_intermediate_size": 1, "num_hidden_layers": 1,
        "first_k_dense_replace": 1, "num_attention_heads": 1, "q_lora_rank": None, "kv_lora_rank": 1,
        "qk_nope_head_dim": 1, "qk_rope_head_dim": 2, "v_head_dim": 1, "n_routed_experts": 2, "num_experts_per_tok": 1,
        "n_shared_experts": 1, "n_group": 1, "topk_group": 1, "norm_topk_prob": True, "routed_scaling_factor": 1.0,
        "rms_norm_eps": 1e-6, "rope_theta": 1e4, "rope_interleave": True, "tie_word_embeddings": False,
    }  # fmt: skip
    rng, models = np.random.default_rng(1), []
    for more in ({}, {"first_k_dense_replace": 0, "q_lora_rank": 1, "tie_word_embeddings": True}):
        config = ModelConfig(**(shape | more))
        names = config.tensor_shapes(fused_layers=[])
        models.append((config, {name: rng.standard_normal(s).astype(np.float32) for name, s in names.items()}))
    return models


def _checkpoint_seeds() -> list[bytes]:
    from safetensors.numpy import save

    seeds = []
    for config, weights in tiny_models():
        text = json.dumps(config.to_dict()).encode()
        half = {name: array.astype(np.float16) for name, array in weights.items()}
        names = sorted(weights)
        first = {name: weights[name] for name in names[::2]}
        second = {name: weights[name] for name in names[1::2]}
        files = {**dict.fromkeys(first, _FILES[0]), **dict.fromkeys(second, _FILES[2])}
        index = json.dumps({"weight_map": files}).encode()
        seeds += [joined([text, save(weights)]), joined([text, save(half)])]
        seeds += [joined([text, save(first), index, save(second)])]
    return seeds


def _bundle(data: bytes, folder: Path) -> str:
    """A model as one KDTR file."""
    path = folder / "model.kdtr"
    path.write_bytes(data)
    return _loaded(path)


def _bundle_mutated(data: bytes, largest: int, rng: Random, mutate: Mutate) -> bytes:
    """The configuration in the metadata changed, and the file written anew; or the file's own fields."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "a.kdtr"
        path.write_bytes(data)
        try:
            arrays, metadata = read_kdtr(path)
        except KdtrError:
            return mutations.kdtr(data, largest, rng, mutate)
        if rng.randrange(3) == 0:
            return mutations.kdtr(data, largest, rng, mutate)
        text = mutations.json_text(metadata.get("config", "{}").encode(), largest // 2, rng, mutate)
        metadata["config"] = text.decode("utf-8", "replace")
        write_kdtr(path, arrays, metadata)
        return path.read_bytes()[:largest]


def _bundle_seeds() -> list[bytes]:
    return [
        _written(weights, {"config": json.dumps(config.to_dict(), sort_keys=True)}) for config, weights in tiny_models()
    ]


# Commands


def _called(arguments: list[str], folder: Path, *, quiet: bool = True) -> tuple[int, str]:
    """Run ``ddtree``: its status, and what it said; an exception that reaches the user is a crash."""
    with _inside(folder):
        result = CliRunner(env={"COLUMNS": "120", "NO_COLOR": "1"}).invoke(main, arguments)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    said = result.stderr
    if result.exit_code not in (0, 1, 2):
        raise CrashError(f"exit status {result.exit_code}: {said}")
    if result.exit_code == 2 and not (said.startswith(("Error: ", "Usage: "))):
        raise CrashError(f"status 2 without a reason: {said!r}")
    if "Traceback" in said + result.stdout:
        raise CrashError(said + result.stdout)
    return result.exit_code, said


@contextmanager
def _inside(folder: Path) -> Iterator[None]:
    before = Path.cwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)


def _import(data: bytes, folder: Path) -> str:
    """``ddtree kdtr import``: what it writes is whole, or nothing is."""
    suffix = "npz" if data[:2] == b"PK" else "safetensors"
    (folder / f"in.{suffix}").write_bytes(data)
    status, said = _called(["kdtr", "import", f"in.{suffix}", "out.kdtr"], folder)
    out = folder / "out.kdtr"
    if status != 0:
        if out.exists():
            raise CrashError(f"status {status}, and a file: {said}")
        if not said.startswith("Error: "):
            raise CrashError(f"status {status} without a reason: {said!r}")
        return "Error"
    with KdtrFile(out) as opened:
        opened.verify()
    for back in ("npz", "safetensors"):
        status, said = _called(["kdtr", "export", "out.kdtr", f"back.{back}"], folder)
        if (status == 0) != (folder / f"back.{back}").exists():
            raise CrashError(f"status {status} and the file do not agree: {said}")
    return "ok"


def _import_mutated(data: bytes, largest: int, rng: Random, mutate: Mutate) -> bytes:
    change = mutations.npz if data[:2] == b"PK" else mutations.safetensors
    return change(data, largest, rng, mutate)


def _import_seeds() -> list[bytes]:
    from safetensors.numpy import save

    arrays = {"a": np.arange(6, dtype=np.int32).reshape(2, 3), "b": np.ones(3, np.bool_), "c": np.zeros((0, 2))}
    note = np.array(json.dumps({"bfloat16": ["h"], "metadata": {"k": "v"}}))
    seeds = []
    for write, members in ((np.savez, arrays), (np.savez_compressed, {"h": np.ones(2, np.uint16), "__kdtr__": note})):
        file = io.BytesIO()
        write(file, **members)
        seeds.append(file.getvalue())
    return [*seeds, save(arrays, {"k": "v"})]


def _case(data: bytes, folder: Path) -> str:
    """``ddtree replay`` of a case on the reference, which meets whatever is in it without harm."""
    (folder / "case.kdtr").write_bytes(data)
    status, said = _called(["replay", "case.kdtr", "--backend", "reference"], folder)
    if status == 2 and len(said.splitlines()) != 1:
        raise CrashError(f"not one line: {said!r}")
    if status == 1:
        raise CrashError("the reference differs from itself")
    return "ok" if status == 0 else "Error"


def _case_mutated(data: bytes, largest: int, rng: Random, mutate: Mutate) -> bytes:
    """One argument's values or its place in the metadata changed, and the file written anew; or the file's fields."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "a.kdtr"
        path.write_bytes(data)
        try:
            arrays, metadata = read_kdtr(path)
        except KdtrError:
            return mutations.kdtr(data, largest, rng, mutate)
        kind = rng.randrange(4)
        if kind == 0:
            return mutations.kdtr(data, largest, rng, mutate)
        if kind == 1 or not arrays:
            key = rng.choice(("values", "op", "kind", "error", "between"))
            text = mutations.json_text(metadata.get(key, "{}").encode(), largest // 4, rng, mutate)
            metadata[key] = text.decode("utf-8", "replace")
        else:
            name = rng.choice(list(arrays))
            array = arrays[name]
            if kind == 2:
                raw = mutate(array.tobytes(), array.nbytes).ljust(array.nbytes, b"\0")
                most = np.uint8(1 if array.dtype == np.bool_ else 255)
                arrays[name] = (np.frombuffer(raw, np.uint8) & most).view(array.dtype).reshape(array.shape)
            else:
                other = rng.choice(list(arrays))
                arrays[name] = rng.choice((array[:1], array.reshape(-1), array.astype(np.float64), arrays[other]))
        write_kdtr(path, arrays, metadata)
        return path.read_bytes()[:largest]


def _case_seeds() -> list[bytes]:
    log_probs = np.log(np.array([[[0.5, 0.25], [0.5, 0.5]]], np.float32))
    drafted = {"log_probs": log_probs, "token_ids": np.array([[[1, 2], [3, 4]]], np.int32)}
    tree = tree_from_parents(np.array([[1, 2, 3]], np.int32), np.array([[-1, 0, 0]], np.int32))
    one, choices = np.zeros(1, np.int32), np.array([[2, 0, 0]], np.int32)
    kept = reference.accept_tree(tree, choices)
    cache = np.ones((1, 1, 4, 3), np.float32)
    pages = {"page_table": np.zeros((1, 1), np.int32), "prefix_lens": one}
    calls: dict[str, dict[str, Any]] = {
        "build_tree": drafted | {"root_token_ids": one, "budget": 3},
        "accept_tree": {"tree": tree, "target_token_ids": choices, "remaining": one + 5, "stop_token_ids": one},
        "visibility_words": {"parents": tree.parents, "node_counts": tree.node_counts},
        "tree_positions": {"depths": tree.depths, "prefix_lens": one},
        "topk_log_probs": {"logits": log_probs, "k": 2, "vocab_size": None},
        "choose_tokens": {"logits": log_probs[:, :1], "temperature": 0.5, "top_p": 0.5, "positions": one[None]},
        "compact_cache": {"kv_cache": cache} | pages | {"acceptance": kept},
        "verify_attention": {"q": np.ones((1, 3, 1, 3), np.float32), "kv_cache": cache[0]} | pages
        | {"tree": tree, "scale": 1.0, "kv_lora_rank": 2},
    }  # fmt: skip
    seeds = []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "case.kdtr"
        for op, arguments in calls.items():
            Case(op, "reference", arguments, about={"test": "t"}).write(path)
            seeds.append(path.read_bytes())
    return seeds


_WORDS = (
    "kdtr", "ls", "verify", "export", "import", "check", "replay", "info", "demo", "--help", "-h", "--version",
    "--json", "--force", "--backend", "--ops", "--examples", "--seed", "--output", "--quick", "--", "-", "", "0",
    "1", "-1", "2", "1e9", "99999999999999999999", "nan", "reference", "numba_cpu", "cupy", "nothing", "os",
    "os:path", "a.b:c", ":", "x.py", "./x", "build_tree", "accept_tree,tree_positions", ",", "a.kdtr", "d.kdtr",
    "c.kdtr", "t.npz", "i.safetensors", "o.npz", "o.safetensors", "o.kdtr", "no/o.kdtr", "folder", "nope", "τ",
    "\udcff", "a\0b", "--seed=x", "--ops=", "=",
)  # fmt: skip
_USUAL = (
    "kdtr ls a.kdtr", "kdtr verify a.kdtr d.kdtr", "kdtr export a.kdtr o.npz", "kdtr import t.npz o.kdtr --force",
    "check --backend reference --ops tree_positions --examples 2 --seed 1", "replay c.kdtr --backend reference",
    "info --json", "info", "demo --quick --output folder", "--version", "kdtr import i.safetensors o.kdtr",
    "replay a.kdtr",
)  # fmt: skip


def _arguments(data: bytes, folder: Path) -> str:
    """The command line, in a folder with files of every kind; long work is left out once it has been agreed to."""
    arguments = [os.fsdecode(word.replace(b"\0", b"")) for word in data.split(b"\x1f")]  # no system passes a NUL
    contents = {"a.kdtr": SOUND, "d.kdtr": DAMAGES["data"].data, "c.kdtr": _CASE(), "x.py": b"1/0"}
    npz, _, safetensors = _IMPORTS()
    for name, content in {**contents, "t.npz": npz, "i.safetensors": safetensors}.items():
        (folder / name).write_bytes(content)
    (folder / "folder").mkdir()
    before = {name: (folder / name).read_bytes() for name in contents}
    with _without_long_work():
        status, said = _called(arguments, folder)
    if status and not said and "replay" not in arguments:
        raise CrashError(f"status {status} without a word")
    if "--force" not in arguments and any((folder / name).read_bytes() != data for name, data in before.items()):
        raise CrashError("a file was changed without --force")
    for out in (folder / "o.kdtr", *folder.glob("**/o.kdtr")):
        if out.is_file():
            read_kdtr(out)
    return ("ok", "Error", "usage")[status]


def _once(make: Callable[[], Any]) -> Callable[[], Any]:
    found: list[Any] = []

    def get() -> Any:
        if not found:
            found.append(make())
        return found[0]

    return get


_CASE, _IMPORTS = _once(lambda: _case_seeds()[3]), _once(_import_seeds)


@contextmanager
def _without_long_work() -> Iterator[None]:
    """``demo`` and ``check`` end where their work would begin."""
    import sys

    def done(*_: Any, **__: Any) -> Any:
        raise click.exceptions.Exit(0)

    commands: list[Any] = [sys.modules[f"ddtree.cli.{name}"] for name in ("demo", "check")]
    kept = [command._run for command in commands]
    for command in commands:
        command._run = done
    try:
        yield
    finally:
        for command, run in zip(commands, kept, strict=True):
            command._run = run


def _arguments_mutated(data: bytes, largest: int, rng: Random, mutate: Mutate) -> bytes:
    words = [os.fsdecode(word) for word in data.split(b"\x1f")]
    for _ in range(rng.choice((1, 1, 2, 3))):
        at, kind = rng.randrange(len(words) + 1), rng.randrange(4)
        if kind == 0:
            words.insert(at, rng.choice(_WORDS))
        elif kind == 1 and at < len(words):
            words[at] = rng.choice(_WORDS)
        elif kind == 2 and at < len(words):
            del words[at]
        elif at < len(words):
            words[at] = os.fsdecode(mutate(os.fsencode(words[at]), 40))
    return b"\x1f".join(map(os.fsencode, words))[:largest]


def _arguments_seeds() -> list[bytes]:
    return ["\x1f".join(line.split()).encode() for line in _USUAL]


TARGETS = {
    target.name: target
    for target in (
        Target("kdtr", _kdtr, _kdtr_seeds, mutations.kdtr, 1 << 12, 0.25),
        Target("checkpoint", _checkpoint, _checkpoint_seeds, _checkpoint_mutated, 1 << 13, 0.45),
        Target("bundle", _bundle, _bundle_seeds, _bundle_mutated, 1 << 13, 0.15),
        Target("import", _import, _import_seeds, _import_mutated, 1 << 12, 0.1, 32 << 20),
        Target("case", _case, _case_seeds, _case_mutated, 1 << 12, 0.04, 256 << 20),
        Target("arguments", _arguments, _arguments_seeds, _arguments_mutated, 1 << 9, 0.01, 128 << 20),
    )
}
