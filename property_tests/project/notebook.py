"""Runs a notebook with the standard library alone, and keeps what its cells show in it.

python -m ddtree.property_tests.project.notebook analysis/examples/draw_tree.ipynb    # run it and write its outputs
"""

from __future__ import annotations

import ast
import contextlib
import io
import json
import sys
import types
from pathlib import Path
from typing import Any

from ddtree.kdtr import atomic_write


class SVG:
    """What ``IPython.display.SVG`` is to a cell: a picture of the given text."""

    def __init__(self, data: str) -> None:
        self.data = data

    def _repr_svg_(self) -> str:
        return self.data


def read(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


def code_cells(notebook: Any) -> list[Any]:
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


def run(notebook: Any) -> None:
    """Run the code cells in order, in one namespace, and put into each what it prints and what its last line is."""
    display = types.ModuleType("IPython.display")
    display.SVG = SVG  # type: ignore[attr-defined]
    ipython = types.ModuleType("IPython")
    ipython.version_info = (9, 0)  # type: ignore[attr-defined]  # matplotlib asks
    before = {name: sys.modules.get(name) for name in ("IPython", "IPython.display")}
    sys.modules |= {"IPython": ipython, "IPython.display": display}
    namespace: dict[str, Any] = {"__name__": "__main__"}
    try:
        for number, cell in enumerate(code_cells(notebook), 1):
            cell["execution_count"] = number
            cell["outputs"] = _outputs("".join(cell["source"]), number, namespace)
    finally:
        for name, module in before.items():
            if module is None:
                del sys.modules[name]
            else:
                sys.modules[name] = module


def _outputs(source: str, number: int, namespace: dict[str, Any]) -> list[Any]:
    body, shown = ast.parse(source).body, None
    last = body[-1] if body else None
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        if isinstance(last, ast.Expr):
            exec(compile(ast.Module(body[:-1], []), f"<cell {number}>", "exec"), namespace)
            shown = eval(compile(ast.Expression(last.value), f"<cell {number}>", "eval"), namespace)
        else:
            exec(compile(ast.Module(body, []), f"<cell {number}>", "exec"), namespace)
    outputs: list[Any] = []
    if printed.getvalue():
        outputs.append({"name": "stdout", "output_type": "stream", "text": _lines(printed.getvalue())})
    if shown is not None:
        data = {"text/plain": _lines(repr(shown))}
        if hasattr(shown, "_repr_svg_"):
            data = {"image/svg+xml": _lines(shown._repr_svg_()), "text/plain": _lines("<picture>")}
        outputs.append({"data": data, "execution_count": number, "metadata": {}, "output_type": "execute_result"})
    return outputs


def _lines(text: str) -> list[str]:
    return text.splitlines(keepends=True)


def write(path: Path, notebook: Any) -> None:
    with atomic_write(path) as file:
        file.write(json.dumps(notebook, indent=1, ensure_ascii=False).encode() + b"\n")


if __name__ == "__main__":
    for name in sys.argv[1:]:
        made = read(Path(name))
        run(made)
        write(Path(name), made)
