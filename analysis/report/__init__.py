"""A saved run as one HTML file that shows every round: its tree, what was accepted, and the text as it grows.

The page needs no network and no library. What comes from the run goes into it as JSON in which no character can end a
script, is written to the page as text and never as markup, and the page's policy lets no other script run than its own.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
import os
from importlib import resources
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ddtree.analysis.acceptance import AcceptanceTable, acceptance_table
from ddtree.analysis.loops import loops_said
from ddtree.analysis.report.charts import chart_of_depths, chart_of_lengths
from ddtree.analysis.runs import Run
from ddtree.kdtr import atomic_write

__all__ = ["report_html", "token_label", "write_report"]

_ESCAPED = {"<": "\\u003c", ">": "\\u003e", "&": "\\u0026", "\u2028": "\\u2028", "\u2029": "\\u2029"}
_SHOWN = {"\n": "⏎", "\t": "⇥", "\r": "␍", " ": "·"}


def write_report(path: str | os.PathLike[str], run: Run, *, title: str = "A run, round by round") -> None:
    """Write the page of a run to a file, which is there entirely or not at all."""
    page = report_html(run, title=title).encode()
    with atomic_write(path) as file:
        file.write(page)


def report_html(run: Run, *, title: str = "A run, round by round") -> str:
    """Return the page of a run.

    Parameters
    ----------
    run : Run
        See :func:`ddtree.analysis.runs.load_run`.
    title : str
        Its heading; any text.

    Returns
    -------
    str
        HTML.
    """
    table = acceptance_table(run.generation)
    script = _part("page.js")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    parts = {
        "policy": f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'",
        "title": html.escape(title),
        "style": _part("page.css"),
        "summary": html.escape(_summary(run, table)),
        "loops": f'<p class="loops">{loops}</p>' if (loops := html.escape(loops_said(run.generation.tokens))) else "",
        "settings": "".join(
            f"<dt>{html.escape(name)}</dt><dd>{html.escape(_plain(value))}</dd>" for name, value in run.settings.items()
        ),
        "lengths": chart_of_lengths(_lengths(run)),
        "depths": chart_of_depths(table),
        "data": _json(_data(run)),
        "script": script,
    }
    pieces = _part("page.html").split("$$")  # text and names take turns: what is put in is not looked through again
    page = "".join(parts[piece] if i % 2 else piece for i, piece in enumerate(pieces))
    return page.encode(errors="backslashreplace").decode()  # half a surrogate pair is shown as its escape


def token_label(token: bytes) -> str:
    r"""Return a token as one line of visible characters.

    Examples
    --------
    >>> token_label(b" def\n"), token_label(b"\xc3"), token_label("é\x00".encode())
    ('·def⏎', '\\xc3', 'é\\x00')
    """
    text = token.decode(errors="backslashreplace")
    return "".join(_SHOWN.get(c, c if c.isprintable() else c.encode("unicode_escape").decode()) for c in text)


def _part(name: str) -> str:
    return (resources.files(__name__) / name).read_text(encoding="utf-8")


def _json(document: Any) -> str:
    text = json.dumps(document, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    for character, escaped in _ESCAPED.items():
        text = text.replace(character, escaped)
    return text


def _plain(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _lengths(run: Run) -> NDArray[np.int64]:
    """Tokens that each round of each request emitted."""
    return np.concatenate([np.zeros(0, np.int64), *run.generation.tokens_per_round])


def _summary(run: Run, table: AcceptanceTable) -> str:
    tokens = sum(map(len, run.generation.tokens))
    requests = len(run.prompts)
    text = f"{requests:,} {'request' if requests == 1 else 'requests'}, {tokens:,} tokens, {table.n_rounds:,} rounds"
    if table.n_rounds:
        text += f", τ = {table.tau:.2f}"
        if table.tau_low == table.tau_low:
            text += f" ({table.level:.0%} interval {table.tau_low:.2f} – {table.tau_high:.2f}, over requests)"
    return text


def _data(run: Run) -> dict[str, Any]:
    """The run as the page's script reads it: tokens by place in a list of those that occur, trees as packed columns."""
    rounds = run.generation.rounds
    rows = [(r, b) for r in rounds for b in range(r.tree.batch_size)]
    counts = [int(r.tree.node_counts[b]) for r, b in rows]

    def nodes(values: list[NDArray[Any]]) -> NDArray[Any]:
        return np.concatenate([np.zeros(0, np.int32), *(v[:n] for v, n in zip(values, counts, strict=True))])

    ids = nodes([r.tree.token_ids[b] for r, b in rows])
    choices = nodes([r.target_token_ids[b] for r, b in rows])
    scores = nodes([r.tree.scores[b] for r, b in rows])
    parents = nodes([r.tree.parents[b] for r, b in rows])
    ranks = nodes([r.tree.ranks[b] for r, b in rows])
    texts = [*run.prompts, *run.generation.tokens]
    used = np.unique(np.concatenate([np.zeros(0, np.int32), ids, choices[choices >= 0], *texts])).astype(np.int64)
    by_request: list[list[int]] = [[] for _ in run.prompts]
    for row, (r, b) in enumerate(rows):
        if r.acceptance.lengths[b] > 0:
            by_request[r.request_ids[b]].append(row)
    return {
        "tokens": _tokens(run, used),
        "requests": [
            {
                "prompt": np.searchsorted(used, prompt).tolist(),
                "first": int(np.searchsorted(used, tokens[0])),
                "finish": reason,
                "rows": those,
            }
            for prompt, tokens, reason, those in zip(
                run.prompts, run.generation.tokens, run.generation.finish_reasons, by_request, strict=True
            )
        ],
        "rows": {
            "start": _packed(np.cumsum([0, *counts])),
            "kept": [r.acceptance.node_indices[b, : r.acceptance.lengths[b]].tolist() for r, b in rows],
            "bonus": np.searchsorted(used, [max(int(r.acceptance.bonus_token_ids[b]), 0) for r, b in rows]).tolist(),
            "finished": [bool(r.acceptance.finished[b]) for r, b in rows],
        },
        "nodes": {
            "token": _packed(np.searchsorted(used, ids)),
            "parent": _packed(np.maximum(parents, 0)),
            "rank": _packed(np.maximum(ranks, 0)),
            "choice": _packed(np.where(choices >= 0, np.searchsorted(used, choices), len(used))),
            "score": _packed(scores.astype("<f4")),
        },
    }


def _tokens(run: Run, used: NDArray[np.int64]) -> dict[str, Any]:
    """Ids, labels and bytes of the tokens that occur, and a last label for none; without a vocabulary no bytes."""
    if run.vocabulary is None:
        return {"ids": used.tolist(), "labels": [*map(str, used.tolist()), "nothing"], "bytes": None}
    raw = [run.vocabulary.token_bytes[i] for i in used]
    return {
        "ids": used.tolist(),
        "labels": [*map(token_label, raw), "nothing"],
        "bytes": {
            "data": base64.b64encode(b"".join(raw)).decode(),
            "start": _packed(np.cumsum([0, *map(len, raw)])),
        },
    }


def _packed(values: Any) -> list[str]:
    """Type and little-endian bytes, in base64, of numbers: whole ones, 0 and up, in the narrowest type."""
    array = np.asarray(values)
    if array.dtype.kind != "f":
        most = int(array.max(initial=0))
        array = array.astype("<u1" if most < 1 << 8 else "<u2" if most < 1 << 16 else "<u4")
    return [array.dtype.str[1:], base64.b64encode(array.tobytes()).decode()]
