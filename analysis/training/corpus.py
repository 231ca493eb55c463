"""The corpus: permissively licensed Python source that lies on this machine, some packages held out, as tokens.

The licence of a distribution is what its metadata say: ``License-Expression``, else its classifiers, else the first
line of ``License``. Files under folders of vendored code, and files that hold data more than code, are left out, and no
package gives more than a share, so that no one style rules.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import itertools
import json
import os
import random
import re
import sysconfig
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ddtree.kdtr import atomic_write
from ddtree.pair import save_prompts
from ddtree.vocabulary import Vocabulary

__all__ = ["END_OF_TEXT", "Corpus", "load_corpus", "make_corpus"]

END_OF_TEXT = 0
END_OF_TEXT_NAME = "<|endoftext|>"

HELD_OUT = {"networkx", "toolz", "stdlib:json", "stdlib:csv", "stdlib:argparse", "stdlib:heapq"}
"""Packages, and modules of the standard library, of which no file is trained on."""
LEFT_OUT = {"simplejson", "ddtree"}
"""Near copies of what is held out, and this project."""
LEFT_OUT_FILES = re.compile(r"_?(argparse|heapq|csv)\.py|test_(json|csv|argparse|heapq)\.py")
LEFT_OUT_FOLDERS = re.compile(r"/(_vendor|vendored|externals?|third_?party|extern|__pycache__|test_json)/")

PERMISSIVE = re.compile(
    r"\bMIT\b|BSD|Apache|PSF|Python Software Foundation|\bISC\b|HPND|Zlib|Unlicense|0BSD|matplotlib", re.I
)
NOT_PERMISSIVE = re.compile(r"GPL|MPL|Mozilla|Proprietary|NVIDIA|CC-BY-NC|EULA|SSPL|Commercial", re.I)

MOST_CHARACTERS = 20_000_000
"""That one package gives."""
TOKENIZER_CHARACTERS = 30_000_000
NUM_PROMPTS, PROMPT_TOKENS, FOLLOWING_TOKENS = 128, (64, 128), 72
"""Of the held-out prompts: how many, how long, and how many tokens of the file must follow."""


class Source(NamedTuple):
    """A file: its package ("stdlib" for the standard library), its name there, and its text."""

    package: str
    name: str
    text: str

    @property
    def label(self) -> str:
        return f"{self.package}:{self.name}"

    @property
    def is_held_out(self) -> bool:
        module = f"{self.package}:{self.name.split('/')[0].removesuffix('.py')}"
        return self.package in HELD_OUT or (self.package == "stdlib" and module in HELD_OUT)


class Corpus(NamedTuple):
    """Tokens of all files, ``END_OF_TEXT`` before each, and what :func:`make_corpus` wrote about them."""

    train: NDArray[np.uint16]
    held_out: NDArray[np.uint16]
    record: dict[str, Any]


def make_corpus(work: Path, out: Path, vocab_size: int) -> Corpus:
    """Collect and cut the corpus; tokens go to ``work``, vocabulary, held-out prompts and the record to ``out``."""
    rng = random.Random(0)
    sources, packages, refused = collect()
    rng.shuffle(sources)
    held_out = [source for source in sources if source.is_held_out]
    train = choose_training(sources, held_out)
    tokenizer = train_tokenizer(train, vocab_size)
    tokenizer_json = tokenizer.to_str().encode()
    Vocabulary(token_bytes(tokenizer), tokenizer_json).save(out / "vocabulary.kdtr")
    prompts = choose_prompts(tokenizer, held_out, rng)
    save_prompts(
        out / "prompts.kdtr",
        [np.array(ids, np.int32) for _, ids in prompts],
        [label for label, _ in prompts],
        metadata={"seed": "0"},
    )

    used = Counter(source.package for source in (*train, *held_out))
    lines = [long_lines(part) for part in (train, held_out)]
    record: dict[str, Any] = {
        "packages": {name: [*packages[name], used[name]] for name in sorted(used)},
        "refused": refused,
        "held_out": sorted(HELD_OUT),
        "train": {"files": len(train), "bytes": sum(len(s.text.encode()) for s in train)},
        "held": {"files": len(held_out), "bytes": sum(len(s.text.encode()) for s in held_out)},
        "held_long_lines": len(lines[1]),
        "held_long_lines_also_trained_on": len(lines[0] & lines[1]),
        "prompts": [label for label, _ in prompts],
    }
    for name, part in (("train", train), ("held", held_out)):
        ids = encode(tokenizer, [source.text for source in part])
        np.save(work / f"{name}.npy", ids)
        record[name]["tokens"] = len(ids)
    write_json(work / "corpus.json", record)
    write_json(out / "corpus.json", record)
    return load_corpus(work)


def load_corpus(work: Path) -> Corpus:
    """Load what :func:`make_corpus` wrote to ``work``."""
    record = json.loads((work / "corpus.json").read_text())
    return Corpus(np.load(work / "train.npy"), np.load(work / "held.npy"), record)


def collect() -> tuple[list[Source], dict[str, tuple[str, str]], dict[str, str]]:
    """All files that may be used; version and licence of their packages; and the licences that were refused."""
    packages, refused, places = {"stdlib": (sysconfig.get_python_version(), "PSF-2.0")}, {}, []
    library = sysconfig.get_paths()["stdlib"]
    for folder, folders, files in os.walk(library):
        folders[:] = sorted(set(folders) - {"site-packages", "dist-packages", "__pycache__"})
        paths = (os.path.join(folder, file) for file in sorted(files) if file.endswith(".py"))
        places += [("stdlib", os.path.relpath(path, library), path) for path in paths]
    for distribution in importlib.metadata.distributions():
        name = (distribution.metadata["Name"] or "").lower()
        if not name or name in packages or name in refused or name in LEFT_OUT:
            continue
        stated = licence(distribution.metadata)
        if not PERMISSIVE.search(stated) or NOT_PERMISSIVE.search(stated):
            refused[name] = stated
            continue
        packages[name] = (distribution.version, stated)
        files = [str(file) for file in distribution.files or [] if str(file).endswith(".py")]
        places += [(name, file, str(distribution.locate_file(file))) for file in files if not file.startswith("..")]
    places = [place for place in places if not LEFT_OUT_FOLDERS.search(f"/{place[1]}")]
    with ProcessPoolExecutor() as pool:
        texts = list(pool.map(read_source, [path for _, _, path in places], chunksize=64))
    found = [Source(p, name, text) for (p, name, _), text in zip(places, texts, strict=True) if text is not None]
    return found, packages, refused


def licence(metadata: Any) -> str:
    """What a distribution's metadata say of its licence, in one line."""
    if metadata["License-Expression"]:
        return str(metadata["License-Expression"])
    classifiers = [c.split("::")[-1].strip() for c in metadata.get_all("Classifier") or [] if c.startswith("License")]
    stated = "; ".join(c for c in classifiers if c != "OSI Approved")
    return stated or str(metadata["License"] or "").strip().split("\n")[0][:100]


def read_source(path: str) -> str | None:
    """A file's text, unless it is very short or long, is not UTF-8, or holds data more than code."""
    try:
        text = Path(path).read_bytes().decode().replace("\r\n", "\n")
    except (OSError, UnicodeDecodeError):
        return None
    lines = text.split("\n")
    if not 200 <= len(text) <= 300_000 or text.count("0x") > 400:
        return None
    return None if max(map(len, lines)) > 600 or len(text) / len(lines) > 90 else text


def choose_training(sources: list[Source], held_out: list[Source]) -> list[Source]:
    """What is trained on: no held-out file, no copy of a file, and of each package no more than its share."""
    seen = {digest(source) for source in held_out}
    characters: Counter[str] = Counter()
    chosen = []
    for source in sources:
        size = len(source.text)
        if source.is_held_out or LEFT_OUT_FILES.fullmatch(source.name.rpartition("/")[2]):
            continue
        if digest(source) in seen or characters[source.package] + size > MOST_CHARACTERS:
            continue
        seen.add(digest(source))
        characters[source.package] += size
        chosen.append(source)
    return chosen


def digest(source: Source) -> bytes:
    return hashlib.sha256(source.text.encode()).digest()


def long_lines(sources: list[Source]) -> set[str]:
    """The distinct lines of 40 characters and more, by which an overlap of two parts of the corpus shows."""
    return {line.strip() for source in sources for line in source.text.split("\n") if len(line.strip()) >= 40}


def train_tokenizer(sources: list[Source], vocab_size: int) -> Any:
    """Byte-level BPE, whose only special token is the end of a text: no id is one that the target must not choose."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT_NAME],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        max_token_length=32,
        show_progress=False,
    )
    sizes = itertools.accumulate(len(source.text) for source in sources)
    count = sum(size <= TOKENIZER_CHARACTERS for size in sizes) or len(sources)
    tokenizer.train_from_iterator((source.text for source in sources[:count]), trainer, length=count)
    if tokenizer.get_vocab_size() != vocab_size:
        raise ValueError(f"the corpus must give {vocab_size} tokens, got {tokenizer.get_vocab_size()}: it is too small")
    return tokenizer


def token_bytes(tokenizer: Any) -> list[bytes]:
    """The bytes of every token: byte-level BPE writes a printable byte as its character, the others from U+0100 on."""
    shown = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = sorted(set(range(256)) - set(shown))
    byte_of = {chr(byte): byte for byte in shown} | {chr(256 + i): byte for i, byte in enumerate(others)}
    tokens = [tokenizer.id_to_token(i) for i in range(tokenizer.get_vocab_size())]
    return [t.encode() if t == END_OF_TEXT_NAME else bytes(byte_of[char] for char in t) for t in tokens]


def encode(tokenizer: Any, texts: list[str]) -> NDArray[np.uint16]:
    """Tokens of all texts, ``END_OF_TEXT`` before each."""
    batches = (tokenizer.encode_batch_fast(texts[i : i + 512]) for i in range(0, len(texts), 512))
    return np.concatenate([np.array([END_OF_TEXT, *e.ids], np.uint16) for batch in batches for e in batch])


def choose_prompts(tokenizer: Any, held_out: list[Source], rng: random.Random) -> list[tuple[str, list[int]]]:
    """Prompts that begin at a line of a held-out file: a quarter the standard library's, the others packages' own."""
    own = [s for s in held_out if s.package != "stdlib" and "/tests/" not in s.name] or held_out
    library = [s for s in held_out if s.package == "stdlib"] or own
    prompts: dict[tuple[int, ...], str] = {}
    while len(prompts) < NUM_PROMPTS:
        source = rng.choice(library if len(prompts) % 4 == 0 else own)
        starts = [0, *(i + 1 for i, char in enumerate(source.text) if char == "\n")]
        start = rng.choice(starts)
        length = rng.randint(*PROMPT_TOKENS)
        ids = tokenizer.encode(source.text[start : start + 1500]).ids
        if len(ids) >= length + FOLLOWING_TOKENS:
            prompts.setdefault(tuple(ids[:length]), source.label)
    return [(label, list(ids)) for ids, label in prompts.items()]


def packages_table(record: dict[str, Any]) -> str:
    """The packages of a corpus as Markdown, for a model card."""
    held_out = {name.partition(":")[0] for name in record["held_out"]} - {"stdlib"}
    lines = ["| package | version | licence, by its metadata | files |", "|---|---|---|--:|"]
    for name, (version, stated, files) in record["packages"].items():
        shown = f"{name} (held out)" if name in held_out else name
        lines.append(f"| {shown} | {version} | {stated} | {files:,} |")
    return "\n".join(lines)


def write_json(path: Path, value: Any) -> None:
    """Write JSON, entirely or not at all."""
    with atomic_write(path) as file:
        file.write((json.dumps(value, indent=1) + "\n").encode())
