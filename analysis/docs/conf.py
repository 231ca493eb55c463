"""How Sphinx makes the site. `make docs` runs it; all that is in it comes from this project, and nothing is fetched."""

from __future__ import annotations

import importlib
import os
import re
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx

import ddtree
from ddtree.property_tests.project import notebook, pages

project = "ddtree"
copyright = "the authors of ddtree; MIT licence"
release = ddtree.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.autosummary", "sphinx.ext.viewcode", "numpydoc"]
exclude_patterns = ["build"]
templates_path = ["templates"]
highlight_language = "text"  # of what names no language: commands, mostly
nitpicky = True  # a name in a docstring that leads nowhere is an error
nitpick_ignore_regex = [("py:.*", r"(matplotlib|collections|numpy)\..*")]  # other projects' pages are not fetched

html_theme = "furo"
html_title = f"ddtree {release}"
html_static_path = ["static"]
html_css_files = ["style.css"]
html_copy_source = False
html_show_sphinx = False
html_theme_options = {
    "light_css_variables": {"color-brand-primary": "#0b5d8f", "color-brand-content": "#0b5d8f"},
    "dark_css_variables": {"color-brand-primary": "#6cb8e6", "color-brand-content": "#6cb8e6"},
}
pygments_style = "friendly"
pygments_dark_style = "native"

myst_heading_anchors = 4
myst_enable_extensions = ["colon_fence", "deflist"]

autodoc_member_order = "bysource"
autodoc_typehints = "none"  # the docstrings say more: shapes, ranges, padding
autodoc_default_options = {"members": True}
toc_object_entries_show_parents = "hide"
numpydoc_show_class_members = False

PAGE_OF = {
    "analysis/benchmarks/results/h200/NOTES.md": "benchmarks.md#reading-these-figures",
    "analysis/benchmarks/results/h200/bench.md": "benchmarks.md#all-sizes",
    "analysis/benchmarks/results/h200/decoding.md": "benchmarks.md#whole-models",
    "ddtree/include/kdtr.hpp": "file-formats.md#kdtr",
    "ddtree/pairs/python-5m/MODEL_CARD.md": "model-card.md",
    "ddtree/pairs/python-5m/NOTICES.md": "model-card.md#notices",
    "ddtree/protocols.py": "api/ddtree.protocols.rst",
    "kernels/cupy/RESOURCES.md": "gpu.md#what-the-cuda-c-kernels-need",
    "property_tests/FIELD_CASES.md": "field-cases.md",
    "property_tests/project/mutants/EQUIVALENT.md": "mutants.md",
    "property_tests/project/mutants/RESULTS.md": "mutants.md",
    "reference": "api/ddtree.reference.rst",
}
"""Where the site has what a file of the project links to."""


def links_of_the_site(app: Sphinx, path: Path, page: str, content: list[str]) -> None:
    """Turn the links of an included file, which lead to files, into links to pages; pictures stay files."""
    folder = (Path(app.srcdir) / path).resolve().parent

    def moved(link: re.Match[str]) -> str:
        target = folder / link["target"]
        if not target.exists():
            return link[0]  # on the web, or no link at all; a link that leads nowhere is reported
        name = target.resolve().relative_to(pages.ROOT).as_posix()
        if link["picture"]:
            return f"![{link['text']}]({os.path.relpath(target.resolve(), app.srcdir)})"
        if target.resolve().parent == pages.DOCS:
            return f"[{link['text']}](/{target.name})"
        if name not in PAGE_OF:
            raise ValueError(f"{path} links to {name}: say in PAGE_OF which page of the site has it")
        return f"[{link['text']}](/{PAGE_OF[name]})"

    content[0] = re.sub(r"(?P<picture>!?)\[(?P<text>[^\]]*)\]\((?P<target>[^)\s#]+)\)", moved, content[0])


def documented_name(app: Sphinx, env: Any, node: Any, child: nodes.Node) -> nodes.Node | None:
    """Find what a docstring calls by another of its names, such as ``ddtree.Engine`` for ``ddtree.engine.Engine``."""
    if node.get("refdomain") != "py":
        return None
    thing = _thing(node["reftarget"]) or _thing(f"{node.get('py:module')}.{node['reftarget']}")
    if thing is None:
        return None
    domain = env.get_domain("py")
    last = node["reftarget"].rpartition(".")[2]
    for name, entry in domain.objects.items():
        if name.rpartition(".")[2] == last and _thing(name) is thing:
            return domain.resolve_xref(env, node["refdoc"], app.builder, entry.objtype, name, node, child)
    return None


def _thing(name: str) -> Any:
    """What a dotted name stands for; None if for nothing."""
    parts = name.split(".")
    for end in range(len(parts), 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:end]))
        except ImportError:
            continue
        for part in parts[end:]:
            found = getattr(found, part, None)
        return found
    return None


def skip_fields_of_tuples(app: Sphinx, what: str, name: str, thing: Any, skip: bool, options: Any) -> bool | None:
    """Leave out "Alias for field number 0": a named tuple's docstring has its fields."""
    return True if str(getattr(thing, "__doc__", None)).startswith("Alias for field number") else None


def drop_links_to_nothing(app: Sphinx, pagename: str, templatename: str, context: dict[str, Any], doctree: Any) -> None:
    """Take away a source page's links back to what is documented under another name or nowhere."""
    if not pagename.startswith("_modules/"):
        return
    documented = app.env.get_domain("py").objects

    def kept(link: re.Match[str]) -> str:
        entry = documented.get(link["name"])
        return link[0] if entry and f"{entry.docname}.html" in link["page"] else ""

    pattern = r'<a class="viewcode-back" href="(?P<page>[^"#]*)#(?P<name>[^"]*)">.*?</a>'
    context["body"] = re.sub(pattern, kept, context["body"])


def make_figures(app: Sphinx) -> None:
    """Make what pages show: what their own code writes, and the pictures of the notebook."""
    figures = Path(app.srcdir) / "figures"
    pages.run_in(figures, pages.DOCS / "decoding-researcher.md")
    drawn = [
        "".join(output["data"]["image/svg+xml"])
        for cell in notebook.code_cells(notebook.read(pages.ROOT / "analysis" / "examples" / "draw_tree.ipynb"))
        for output in cell["outputs"]
        if "data" in output
    ]
    for i, svg in enumerate(drawn):
        (figures / f"notebook_{i}.svg").write_text(svg, encoding="utf-8")


def list_external_links(app: Sphinx, error: Exception | None) -> None:
    """Write which pages of the web the site links to, one a line: they are listed, not fetched."""
    if error is None and app.builder.format == "html":
        found: set[str] = set()
        for name in app.env.found_docs:
            found |= {
                link["refuri"]
                for link in app.env.get_doctree(name).findall(nodes.reference)
                if link.get("refuri", "").startswith("http")
            }
        (Path(app.outdir) / "external_links.txt").write_text("".join(f"{uri}\n" for uri in sorted(found)))


def setup(app: Sphinx) -> None:
    """Connect the functions above."""
    app.connect("builder-inited", make_figures)
    app.connect("autodoc-skip-member", skip_fields_of_tuples)
    app.connect("include-read", links_of_the_site)
    app.connect("missing-reference", documented_name)
    app.connect("html-page-context", drop_links_to_nothing)
    app.connect("build-finished", list_external_links)
