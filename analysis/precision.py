"""``python -m ddtree.analysis.precision MODEL``: what a model's type costs, layer by layer and in tokens.

One model in two types runs on the same texts. A row's relative error is the length of the difference of the two hidden
states, divided by the length of the wider type's; it holds what all layers below have added up. Tokens are compared
position by position on the same text, so that one that differs does not change those behind it, and where they differ
the float64 model says how near the two best logits were.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import numpy as np
from numpy.typing import ArrayLike, NDArray
from rich.console import Console
from rich.table import Table as RichTable

from ddtree.analysis.outputs import make_folder
from ddtree.analysis.progress import progress_bar
from ddtree.analysis.tables import Table
from ddtree.arrays import array_namespace, to_numpy
from ddtree.backends import BackendUnavailable
from ddtree.checks import INT32_MAX, integer, listed
from ddtree.engine import Engine
from ddtree.kdtr import atomic_write
from ddtree.model import DeepseekV3, ModelConfig, load_model, random_weights
from ddtree.model.deepseek_v3 import MODEL_DTYPES
from ddtree.protocols import KVCache, TargetOutput
from ddtree.tokens import token_row
from ddtree.trees import chain_tree

__all__ = ["DifferenceTable", "PrecisionTable", "main", "precision_table"]


@dataclass(frozen=True, eq=False)
class DifferenceTable(Table):
    """Positions at which two models choose different tokens.

    Attributes
    ----------
    text, position : array, int64, shape (rows,)
        Which text, and which of its tokens the choice follows, both counted from 0.
    token, wider_token : array, int64, shape (rows,)
        The two greedy choices.
    margin : array, float64, shape (rows,)
        The difference of the two best logits in float64.
    error : array, float64, shape (rows,)
        The largest difference of a logit of the narrower model from float64's. A margin over twice this would be a
        fault, not rounding.
    """

    text: NDArray[np.int64]
    position: NDArray[np.int64]
    token: NDArray[np.int64]
    wider_token: NDArray[np.int64]
    margin: NDArray[np.float64]
    error: NDArray[np.float64]

    columns = ("text", "position", "token", "wider_token", "margin", "error")


@dataclass(frozen=True, eq=False)
class PrecisionTable(Table):
    """How far one type's results are from a wider one's, by layer.

    Attributes
    ----------
    layer : tuple of str
        "embedding", the layers' outputs from "1" on, and "logits".
    worst, mean : array, float64, shape (layers + 2,)
        Relative error of the worst row and of the mean row.
    n_positions : int
        Rows of each layer.
    dtype, wider_dtype : str
        The two types.
    differences : DifferenceTable
        Positions at which the greedy tokens differ.
    """

    layer: tuple[str, ...]
    worst: NDArray[np.float64]
    mean: NDArray[np.float64]
    n_positions: int
    dtype: str
    wider_dtype: str
    differences: DifferenceTable

    columns = ("layer", "worst", "mean")


def precision_table(
    model: DeepseekV3,
    wider: DeepseekV3,
    texts: Iterable[ArrayLike],
    *,
    exact: DeepseekV3 | Callable[[], DeepseekV3] | None = None,
    chunk: int = 512,
    on_text: Callable[[int], None] | None = None,
) -> PrecisionTable:
    """Compare a model with the same weights in a wider type, on given texts.

    Parameters
    ----------
    model, wider : DeepseekV3
        The two, of one configuration; they may live in different places.
    texts : sequence of array, int, shape (n,)
        Token ids of each text, one or more.
    exact : DeepseekV3 or callable, optional
        The float64 model for margins, or what makes it; it is not made where no token differs. ``wider`` itself, if
        that is float64; else it must be given.
    chunk : int
        Tokens of a pass, 1 and up: what bounds the memory.
    on_text : callable, optional
        Called with the number of texts that are done.

    Returns
    -------
    PrecisionTable

    Raises
    ------
    ValueError, TypeError
        The models are of different shapes, the exact one is missing or not of float64, or a text is empty or not of
        the vocabulary.
    """
    if model.config != wider.config:
        raise ValueError("model and wider must have one configuration: load the same weights in two types")
    if exact is None and wider.dtype != np.float64:
        raise ValueError(f"exact must be the float64 model where wider is of {wider.dtype}, got None")
    chunk = integer("chunk", chunk, 1, INT32_MAX)
    rows = [token_row(f"texts[{i}]", text, model.vocab_size) for i, text in enumerate(listed("texts", texts))]
    if not rows or not all(len(row) for row in rows):
        raise ValueError(f"texts must hold one text or more, each of one token or more, got {[len(r) for r in rows]}")
    errors, differ = [], []
    for i, text in enumerate(rows):
        found = _compare(model, wider, text, chunk)
        errors.append(np.concatenate([error for error, _ in found], axis=1))
        choices = np.concatenate([pair for _, pair in found], axis=1)
        at = np.flatnonzero(choices[0] != choices[1])
        if at.size:
            exact = wider if exact is None else exact if isinstance(exact, DeepseekV3) else exact()
            if exact.dtype != np.float64:
                raise ValueError(f"exact must be a float64 model, got {exact.dtype}")
            differ.append(_differences(model, exact, text, i, at, choices[:, at], chunk))
        if on_text is not None:
            on_text(i + 1)
    every = np.concatenate(errors, axis=1)
    columns = [np.concatenate(column) for column in zip(*differ, strict=True)] or [
        np.zeros(0, np.int64 if k < 4 else np.float64) for k in range(6)
    ]
    return PrecisionTable(
        ("embedding", *map(str, range(1, len(every) - 1)), "logits"),
        every.max(1),
        every.mean(1),
        every.shape[1],
        str(model.dtype),
        str(wider.dtype),
        DifferenceTable(*columns),
    )


def _compare(
    model: DeepseekV3, wider: DeepseekV3, text: NDArray[np.int32], chunk: int
) -> list[tuple[NDArray[np.float64], NDArray[np.int64]]]:
    """Of each pass over a text: errors (layers + 2, n), and both models' choices (2, n)."""
    layers = tuple(range(model.config.num_hidden_layers + 1))
    found = []
    for narrow, wide in zip(_passes(model, text, chunk, layers), _passes(wider, text, chunk, layers), strict=True):
        pairs = [(narrow.hidden_states[i], wide.hidden_states[i]) for i in layers] + [(narrow.logits, wide.logits)]
        errors = [_relative_errors(*pair) for pair in pairs]
        choices = [to_numpy(output.logits)[0].argmax(-1) for output in (narrow, wide)]
        found.append((np.stack(errors), np.stack(choices)))
    return found


def _passes(
    model: DeepseekV3, text: NDArray[np.int32], chunk: int, hidden_layers: tuple[int, ...] = ()
) -> Iterator[TargetOutput]:
    """Run over a text, some tokens at a time."""
    data = model.new_cache(1, len(text))
    xp = array_namespace(data)
    for start in range(0, len(text), chunk):
        cache = KVCache(data, xp.zeros((1, 1), np.int32), xp.full(1, start, np.int32))
        yield model.forward(chain_tree(text[None, start : start + chunk]), cache, hidden_layers=hidden_layers)


def _relative_errors(narrow: Any, wide: Any) -> NDArray[np.float64]:
    """Of each row of (1, n, D): shape (n,)."""
    one, other = (to_numpy(a)[0].astype(np.float64) for a in (narrow, wide))
    length = np.linalg.norm(other, axis=-1)
    difference = np.linalg.norm(one - other, axis=-1)
    errors: NDArray[np.float64] = np.where(difference > 0, np.inf, 0.0)
    np.divide(difference, length, out=errors, where=length > 0)
    return errors


def _differences(
    model: DeepseekV3,
    exact: DeepseekV3,
    text: NDArray[np.int32],
    index: int,
    at: NDArray[np.int64],
    choices: NDArray[np.int64],
    chunk: int,
) -> tuple[NDArray[Any], ...]:
    """The columns of a text's rows in a :class:`DifferenceTable`."""
    margins, errors = [], []
    for number, (narrow, wide) in enumerate(zip(_passes(model, text, chunk), _passes(exact, text, chunk), strict=True)):
        here = at[at // chunk == number] % chunk
        got, wanted = (to_numpy(output.logits)[0, here].astype(np.float64) for output in (narrow, wide))
        best = np.partition(wanted, -2, axis=-1)[:, -2:]
        margins.append(best[:, 1] - best[:, 0])
        errors.append(np.abs(got - wanted).max(-1, initial=0.0))
    return np.full(len(at), index), at, choices[0], choices[1], np.concatenate(margins), np.concatenate(errors)


def _show(table: PrecisionTable, console: Console) -> None:
    shown = RichTable(title=f"{table.dtype} against {table.wider_dtype}, {table.n_positions:,} positions")
    for name in ("after layer", "worst row", "mean row"):
        shown.add_column(name, justify="right")
    for row in table.records():
        shown.add_row(row["layer"], f"{row['worst']:.2e}", f"{row['mean']:.2e}")
    console.print(shown)
    differences = table.differences
    n = len(differences.margin)
    share = f"{n:,} of {table.n_positions:,} greedy tokens differ"
    if n == 0:
        console.print(share)
        return
    worst = int(np.argmax(differences.margin))
    console.print(
        f"{share}; the largest margin of the two best logits there, in float64, is {differences.margin[worst]:.2e} "
        f"(text {differences.text[worst]}, after position {differences.position[worst]}), where a logit of "
        f"{table.dtype} is up to {differences.error[worst]:.2e} off"
    )


@click.command()
@click.argument("path", metavar="MODEL", type=click.Path(exists=True, path_type=Path))
@click.option("--dtype", type=click.Choice(MODEL_DTYPES), default="bfloat16", show_default=True, help="The type.")
@click.option("--against", type=click.Choice(["float32", "float64"]), default="float32", show_default=True)
@click.option("--backend", help="Where the models live, as `ddtree info` names it: cupy for a GPU.")
@click.option("--random", "seed_of_weights", type=click.IntRange(0), help="MODEL is a config.json: random weights.")
@click.option("--texts", type=click.IntRange(1), default=8, show_default=True, help="Random prompts to go on from.")
@click.option("--prompt-tokens", type=click.IntRange(1), default=32, show_default=True, help="Of each.")
@click.option("--new-tokens", type=click.IntRange(1), default=64, show_default=True, help="Greedy ones behind them.")
@click.option("--seed", type=click.IntRange(0), default=0, show_default=True, help="Of the prompts.")
@click.option("--out", type=click.Path(file_okay=False, path_type=Path), help="Folder for precision.json and a figure.")
def main(
    path: Path,
    dtype: str,
    against: str,
    backend: str | None,
    seed_of_weights: int | None,
    texts: int,
    prompt_tokens: int,
    new_tokens: int,
    seed: int,
    out: Path | None,
) -> None:
    """Say how far MODEL in one type is from itself in a wider one: by layer, and in greedy tokens.

    MODEL is a folder or bundle as `ddtree.load_model` takes it. The texts are random prompts and what the wider model
    goes on with.
    """

    def load(kind: str) -> DeepseekV3:
        if seed_of_weights is None:
            return load_model(path, dtype=kind, backend=backend)
        config = _configuration(path)
        return DeepseekV3(config, random_weights(config, seed_of_weights, backend=backend), dtype=kind, backend=backend)

    if backend is None and "bfloat16" in (dtype, against):
        raise click.UsageError(
            "bfloat16 models are on a GPU alone: pass --backend cupy, or --dtype float32 --against float64"
        )
    if MODEL_DTYPES.index(against) < MODEL_DTYPES.index(dtype):
        raise click.UsageError(f"--against must be no narrower than --dtype {dtype}, got {against}")
    try:
        wider, model = load(against), load(dtype)
        make_folder(out, "--out", names=("precision.json", "precision.svg"))
        prompts = np.random.default_rng(seed).integers(0, model.vocab_size, (texts, prompt_tokens))
        with progress_bar("texts", texts) as show:
            run = Engine(wider, backend=backend).generate(prompts, new_tokens, mode="autoregressive")
            whole = [np.concatenate(parts) for parts in zip(prompts, run.tokens, strict=True)]
            exact = None if against == "float64" else lambda: load("float64")
            table = precision_table(model, wider, whole, exact=exact, on_text=show)
    except (OSError, ValueError, ImportError, MemoryError, BackendUnavailable) as error:
        raise click.ClickException(str(error)) from error
    _show(table, Console())
    if out is not None:
        from ddtree.analysis import figures

        record = {"dtype": table.dtype, "wider_dtype": table.wider_dtype, "n_positions": table.n_positions}
        record |= {"layers": table.records(), "differences": table.differences.records()}
        with atomic_write(out / "precision.json") as file:
            file.write((json.dumps(record, indent=1) + "\n").encode())
        figures.save(figures.plot_precision(table), out / "precision.svg")
        click.echo(f"written: {out / 'precision.json'} and {out / 'precision.svg'}")


def _configuration(path: Path) -> ModelConfig:
    """What a ``config.json`` says."""
    try:
        config = json.loads(path.read_text("utf-8"))
        if not isinstance(config, dict):
            raise ValueError(f"it holds {type(config).__name__}")
        return ModelConfig.from_dict(config)
    except (OSError, TypeError, ValueError) as error:
        raise ValueError(f"MODEL must be a config.json where --random is given, got {path}: {error}") from error


if __name__ == "__main__":
    main()
