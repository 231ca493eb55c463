"""The pages of `analysis/docs`, read: their code, what is shown below it, their commands and their links."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import itertools
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "analysis" / "docs"
PAGES = sorted(DOCS.glob("*.md"))
OPTIONAL = ("torch", "transformers", "jax")
"""Libraries that a block may need and that need not be there."""

_FENCE = re.compile(r"^(`{3,}|:{3,})(\S*)[^\n]*\n(.*?)^\1$", re.M | re.S)


@dataclass(frozen=True)
class Block:
    """A block of Python on a page, and the text below it, which is what it prints; None where none stands there."""

    page: str
    line: int
    source: str
    shown: str | None

    @property
    def needs(self) -> tuple[str, ...]:
        """Libraries that need not be installed, and without which it cannot run."""
        return tuple(name for name in OPTIONAL if re.search(rf"\b{name}\b", self.source))


def fences(text: str) -> list[re.Match[str]]:
    """The fenced blocks of a page, in order: ``group(2)`` is the language or directive, ``group(3)`` the content."""
    return list(_FENCE.finditer(text))


def blocks(page: Path) -> list[Block]:
    text = page.read_text(encoding="utf-8")
    found = fences(text)
    made = []
    for fence, after in itertools.zip_longest(found, found[1:]):
        if fence.group(2) == "python":
            below = after and after.group(2) == "text" and not text[fence.end() : after.start()].strip()
            line = text.count("\n", 0, fence.start()) + 2
            made.append(Block(page.name, line, fence.group(3), after.group(3) if after and below else None))
    return made


def missing(needed: tuple[str, ...]) -> list[str]:
    return [name for name in needed if importlib.util.find_spec(name) is None]


def run(page: Path, *, optional: bool = False) -> Iterator[tuple[Block, str]]:
    """Run the blocks of a page in order, in one namespace and the current folder, and give what each prints.

    A block whose first line is a comment that names a file is written to that file. Blocks that need an optional
    library are passed over unless ``optional``.
    """
    namespace: dict[str, Any] = {"__name__": "__main__"}
    for block in blocks(page):
        if block.needs and not optional:
            continue
        named = re.match(r"# (\w+\.py)\n", block.source)
        if named:
            Path(named.group(1)).write_text(block.source, encoding="utf-8")
            yield block, ""
            continue
        code = compile("\n" * (block.line - 1) + block.source, str(page), "exec")  # errors name the page's line
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            exec(code, namespace)
        yield block, printed.getvalue()


def run_in(folder: Path, page: Path) -> None:
    """Run a page in a folder, for the files that it writes."""
    folder.mkdir(parents=True, exist_ok=True)
    before = Path.cwd()
    os.chdir(folder)
    try:
        for _ in run(page):
            pass
    finally:
        os.chdir(before)
