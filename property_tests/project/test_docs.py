"""What the pages of `analysis/docs` say is true: their code runs, their commands exist, their links lead somewhere."""

from __future__ import annotations

import importlib.util
import re
import shlex
import subprocess
import sys
import tomllib
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import click
import pytest

from ddtree.cli import main
from ddtree.property_tests.project import pages
from ddtree.property_tests.project.pages import DOCS, PAGES, ROOT

README = ROOT / "README.md"
NAMES = [page.stem for page in PAGES]
MODEL_CARD = ROOT / "ddtree" / "pairs" / "python-5m" / "MODEL_CARD.md"
WITH_CODE = [page for page in (*PAGES, MODEL_CARD) if pages.blocks(page)]
COMMAND = re.compile(r"^    (?! )(.*\b(?:ddtree|pytest|make|pip|python) .*)$", re.M)
INLINE = re.compile(r"`((?:ddtree|make|pip install|python -m) [^`…]*)`")


def outside_fences(text: str) -> str:
    for fence in reversed(pages.fences(text)):
        text = text[: fence.start()] + text[fence.end() :]
    return text


def commands(page: Path) -> list[str]:
    """Every command that a page shows, on a line of its own or within one."""
    text = outside_fences(page.read_text(encoding="utf-8"))
    return [found.partition("  #")[0].strip() for found in COMMAND.findall(text)] + INLINE.findall(text)


@pytest.mark.parametrize("page", WITH_CODE, ids=[page.stem for page in WITH_CODE])
@pytest.mark.parametrize("optional", [False, True], ids=["plain", "with optional libraries"])
def test_the_code_of_a_page_runs_and_prints_what_stands_below_it(
    page: Path, optional: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    needed = {library for block in pages.blocks(page) for library in block.needs}
    if optional:
        if not needed:
            return  # "plain" has run it
        for library in pages.missing(tuple(sorted(needed))):
            pytest.skip(f"optional library {library} is not installed")
    monkeypatch.chdir(tmp_path)
    for block, printed in pages.run(page, optional=optional):
        if block.shown is not None:
            lines = [line.rstrip() for line in printed.splitlines()]
            assert lines == block.shown.splitlines(), f"{block.page}, line {block.line}"


def test_a_page_whose_code_prints_something_else_is_noticed(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("A\n\n```python\nprint(1)\n```\n\n```text\n2\n```\n\n```python\nimport torch\n```\n")
    first, second = pages.blocks(page)
    assert (first.line, first.source, first.shown, first.needs) == (4, "print(1)\n", "2\n", ())
    assert (second.shown, second.needs) == (None, ("torch",))
    assert [(block.line, printed) for block, printed in pages.run(page)] == [(4, "1\n")]


def test_most_blocks_need_no_optional_library() -> None:
    needed = [bool(block.needs) for page in PAGES for block in pages.blocks(page)]
    assert needed.count(False) >= 15
    assert 1 <= needed.count(True) <= 4


@pytest.mark.parametrize("page", [README, *PAGES], ids=["README", *NAMES])
def test_every_command_of_a_page_has_the_options_that_it_shows(page: Path) -> None:
    for command in commands(page):
        for part in re.split(r" \| |; ", command):
            words = [word for word in shlex.split(part) if word not in ("2>&1", "-")]
            while words and re.fullmatch(r"[A-Z_]+=\S+", words[0]):
                words.pop(0)
            check_command(words, command)


def check_command(words: list[str], shown: str) -> None:
    match words:
        case ["ddtree", *rest]:
            check_ddtree(rest, shown)
        case ["python", "-m", module, *rest]:
            check_module(module, rest, shown)
        case ["make", *rest]:
            check_make(rest, shown)
        case ["pytest", *rest]:
            check_pytest(rest, shown)
        case ["pip", "install", *rest]:
            check_extras(rest, shown)
        case ["docker", *_] | ["python", "-c" | "own_kernel.py", *_]:
            pass
        case _:
            pytest.fail(f"no test knows how to check {shown!r}")


def check_ddtree(words: list[str], shown: str) -> None:
    """Parse as the command line would, but for files, which need not be there."""
    group: click.Command = main
    while isinstance(group, click.Group) and words and "|" not in words[0]:
        assert words[0] in group.commands, f"{shown!r}: there is no {words[0]!r}"
        group = group.commands[words.pop(0)]
    if not words or "|" in words[0]:  # a family of commands, such as ls|verify
        names = words[0].split("|") if words else []
        assert all(isinstance(group, click.Group) and name in group.commands for name in names), shown
        return
    context = click.Context(group)
    try:
        given, left, _ = group.make_parser(context).parse_args(list(words))
        for parameter in group.params:
            if parameter.name in given and not isinstance(parameter.type, click.Path):
                parameter.type_cast_value(context, given[parameter.name])
    except click.UsageError as error:
        pytest.fail(f"{shown!r}: {error.format_message()}")
    assert not left, f"{shown!r}: too many arguments, {left}"


def check_module(module: str, words: list[str], shown: str) -> None:
    if module == "ddtree":
        return check_ddtree(words, shown)
    spec = importlib.util.find_spec(module)
    assert spec is not None, f"{shown!r}: there is no module {module}"
    source = Path(str(spec.origin)).read_text(encoding="utf-8")
    for option in (word for word in words if word.startswith("-")):
        assert re.search(rf'"{option}["/]', source), f"{shown!r}: {module} has no {option}"


def check_make(words: list[str], shown: str) -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for target in (word for word in words if "=" not in word):
        assert re.search(rf"^{target}:", makefile, re.M), f"{shown!r}: make has no {target}"


def check_pytest(words: list[str], shown: str) -> None:
    source = (ROOT / "ddtree" / "_pytest.py").read_text(encoding="utf-8")
    for option in (word for word in words if word.startswith("-")):
        known = option in ("--pyargs", "-x") or f'"{option}"' in source
        assert known, f"{shown!r}: the suite has no {option}"


def check_extras(words: list[str], shown: str) -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    for extra in re.findall(r"\[(\w+)\]", " ".join(words)):
        assert extra in extras, f"{shown!r}: there is no extra {extra!r}"


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("ddtree sweep --bugdets 8 --out x", "No such option"),
        ("ddtree record x.txt --out y --drafter oracle", "is not one of 'block', 'ngram'"),
        ("ddtree swep", "there is no 'swep'"),
        ("ddtree report a.kdtr b.kdtr", "too many arguments"),
        ("pytest --ddtree-backends x", "the suite has no"),
        ("pip install 'ddtree[cuda99]'", "there is no extra"),
        ("make documents", "make has no"),
        ("python -m ddtree.analysis.verify_on_gpu --bakend cupy", "has no --bakend"),
    ],
)
def test_a_wrong_command_is_noticed(command: str, message: str) -> None:
    with pytest.raises((AssertionError, pytest.fail.Exception), match=message):
        check_command(shlex.split(command), command)


def test_options_listed_of_the_suite_are_all_that_it_has() -> None:
    source = (ROOT / "ddtree" / "_pytest.py").read_text(encoding="utf-8")
    text = (DOCS / "kernel-author.md").read_text(encoding="utf-8")
    assert set(re.findall(r'"(--ddtree-[\w-]+)"', source)) == set(re.findall(r"(--ddtree-[\w-]+)", text))


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, those of the files that it includes among them."""
    text = page.read_text(encoding="utf-8")
    headings = re.findall(r"^#+ (.*)$", outside_fences(text), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_links_and_included_files_are_there(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)\s]+)\)", outside_fences(text)):
        address = urlsplit(target)
        if address.scheme:
            continue
        leads_to = DOCS / address.path if address.path else page
        if leads_to.parent.name == "api":  # made from the docstrings
            assert importlib.util.find_spec(leads_to.stem), target
            continue
        assert leads_to.is_file(), target
        assert not address.fragment or address.fragment in anchors(leads_to), target
    for kind, file in re.findall(r"^[`:]{3}\{(include|literalinclude|figure)\} (\S+)$", text, re.M):
        assert (DOCS / file).is_file() or (kind == "figure" and file.startswith("figures/")), file


def test_included_parts_begin_and_end_where_files_say() -> None:
    """A text that is included up to a marker which is gone would be included to its end."""
    count = 0
    for page in PAGES:
        for fence in pages.fences(page.read_text(encoding="utf-8")):
            if fence.group(2) == "{include}":
                file = DOCS / fence.group(0).split()[1]
                for marker in re.findall(r':(?:start-after|end-before): "(.*)"', fence.group(3)):
                    assert file.read_text(encoding="utf-8").count(marker) == 1, (page.name, marker)
                    count += 1
    assert count >= 8


def test_every_page_is_in_the_contents() -> None:
    text = (DOCS / "index.md").read_text(encoding="utf-8")
    listed = [
        re.sub(r".*<(.*)>", r"\1", entry)
        for fence in pages.fences(text)
        if fence.group(2) == "{toctree}"
        for entry in fence.group(3).splitlines()
        if entry and not entry.startswith(":")
    ]
    assert sorted([*listed, "index"]) == sorted(NAMES)


def test_the_readme_names_the_command() -> None:
    assert re.search(r"^    make docs ", README.read_text(encoding="utf-8"), re.M)


class Ends(HTMLParser):
    """The ids of a page, and what it links to or shows."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.ids: set[str] = set()
        self.targets: list[str] = []
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.ids |= {value for name, value in attrs if name in ("id", "name") and value}
        self.targets += [value for name, value in attrs if name in ("href", "src") and value]


def test_the_site_is_built_without_a_warning_and_every_link_in_it_leads_somewhere(tmp_path: Path) -> None:
    for library, module in (("sphinx", "sphinx"), ("furo", "furo"), ("myst-parser", "myst_parser")):
        if importlib.util.find_spec(module) is None:
            pytest.skip(f"optional library {library} is not installed")
    html = tmp_path / "html"
    sphinx = [sys.executable, "-m", "sphinx", "--fail-on-warning", "--quiet", "-d", tmp_path / "doctrees", DOCS, html]
    done = subprocess.run([*map(str, sphinx)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    read = {path: Ends(path) for path in html.rglob("*.html")}
    assert len(read) > 40
    outside = set()
    for path, page in read.items():
        for target in page.targets:
            address = urlsplit(target)
            if address.scheme in ("http", "https"):
                outside.add(target)
            elif address.scheme == "":
                leads_to = (path.parent / unquote(address.path)).resolve() if address.path else path
                assert leads_to.exists(), f"{path.name}: {target}"
                if leads_to in read and address.fragment:
                    assert unquote(address.fragment) in read[leads_to].ids, f"{path.name}: {target}"
    listed = (html / "external_links.txt").read_text(encoding="utf-8").splitlines()
    assert any("arxiv.org" in uri for uri in listed)
    assert not [uri for uri in outside if "arxiv.org" in uri and uri not in listed]
