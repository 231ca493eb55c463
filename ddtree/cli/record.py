"""``ddtree record``: what a drafter drafts at every position of a target's continuations, as a trace."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ddtree.cli.check import CannotRun
from ddtree.cli.generate import check_depth
from ddtree.cli.limits import MOST_DEPTH, MOST_NEW_TOKENS

if TYPE_CHECKING:
    from numpy.typing import NDArray

_folder = click.Path(path_type=Path, file_okay=False)


@click.command()
@click.argument("prompts", type=click.Path(path_type=Path, dir_okay=False), nargs=-1, metavar="[PROMPTS]...")
@click.option("--out", type=_folder, required=True, metavar="DIR", help="Folder of the trace.")
@click.option("--held-out", is_flag=True, help="The pair's own prompts, which neither model was trained on.")
@click.option("--limit", type=click.IntRange(1), metavar="N", help="Only the first N prompts.")
@click.option("--pair", type=_folder, metavar="DIR", help="Folder of target, drafter and vocabulary.")
@click.option(
    "--drafter", type=click.Choice(["block", "ngram"]), default="block", show_default=True, help="Who drafts."
)
@click.option("--depth", type=click.IntRange(1, MOST_DEPTH), default=7, show_default=True, help="L, tokens of a path.")
@click.option("--topk", type=click.IntRange(1), default=16, show_default=True, help="K, candidates a depth.")
@click.option(
    "--max-new-tokens",
    type=click.IntRange(1, MOST_NEW_TOKENS),
    default=64,
    show_default=True,
    help="Of each prompt.",
)
@click.option("--temperature", type=float, default=0.0, show_default=True, help="0 is greedy.")
@click.option("--top-p", type=float, default=1.0, show_default=True, help="Nucleus, above temperature 0.")
@click.option("--seed", type=int, default=0, show_default=True, help="Of sampling.")
@click.option("--chunk", type=click.IntRange(1), default=16, show_default=True, help="Prompts that run together.")
@click.option("--dtype", type=click.Choice(["float32", "float64"]), default="float32", show_default=True)
def record(
    prompts: tuple[Path, ...],
    out: Path,
    held_out: bool,
    limit: int | None,
    pair: Path | None,
    drafter: str,
    depth: int,
    topk: int,
    max_new_tokens: int,
    temperature: float,
    top_p: float,
    seed: int,
    chunk: int,
    dtype: str,
) -> None:
    """Record a trace of a target and its drafter.

    Each file of PROMPTS is one prompt, as text; of a .jsonl file each line is one: a string, a list of token ids, or
    an object with "prompt" or "token_ids", and "name". Text needs the extra `text`. A recording that was interrupted
    goes on behind its last whole chunk when the command is run again; one that is complete is left as it is.
    """
    from rich.console import Console

    from ddtree.analysis.progress import progress_bar
    from ddtree.analysis.record import record as record_trace
    from ddtree.analysis.record import vocabulary_digest

    if held_out and prompts:
        raise click.UsageError("give PROMPTS or --held-out, got both: leave one of them out")
    if not held_out and not prompts:
        raise click.UsageError("give PROMPTS, or --held-out for the pair's own")
    try:
        models, tokens, names = _loaded(pair, dtype, prompts, limit)
        drafting: Any = models.drafter
        if drafter == "ngram":
            from ddtree.drafters import NgramDrafter

            drafting = NgramDrafter()
        check_depth(drafting, depth)
        counted: list[int] = []
        with progress_bar("recording", len(tokens)) as show:

            def on_prompts(count: int) -> None:
                counted.append(count)
                show(count)

            trace = record_trace(
                *(models.target, drafting, tokens, out),
                depth=depth,
                topk=topk,
                max_new_tokens=max_new_tokens,
                stop_token_ids=models.target.config.eos_token_ids,
                temperature=temperature,
                top_p=top_p,
                seed=seed,
                names=names,
                target_name=(pair or Path("python-5m")).name,
                vocabulary=vocabulary_digest(models.vocabulary.token_bytes),
                prompts_a_chunk=chunk,
                on_prompts=on_prompts,
            )
        counts = trace.summary()
    except (ValueError, TypeError, ImportError) as error:
        raise CannotRun(str(error)) from error
    size = sum(path.stat().st_size for path in out.iterdir()) / 1e6
    console = Console(highlight=False)
    if counted == [len(tokens)]:  # told once, and nothing since
        console.print(f"{out} is already complete: nothing was left to record", markup=False, soft_wrap=True)
    console.print(
        f"{counts['prompts']:,} prompt{'s' * (counts['prompts'] != 1)}, {counts['new_tokens']:,} new tokens, "
        f"{counts['positions']:,} drafts of "
        f"{depth} × {topk}, {size:.1f} MB in {out}",
        markup=False,
        soft_wrap=True,
    )
    console.print(f"replay it: ddtree sweep {out} --out sweep", markup=False, soft_wrap=True)


def _loaded(
    pair: Path | None, dtype: str, files: tuple[Path, ...], limit: int | None
) -> tuple[Any, list[NDArray[Any]], list[str]]:
    """The pair, and the prompts as token ids with their names; without files the pair's own."""
    from ddtree.analysis.record import read_prompts
    from ddtree.pair import PROMPTS, load_pair, load_prompts

    models = load_pair(pair, dtype=dtype)
    if files:
        tokens, names = read_prompts(files, models.vocabulary.encode)
    else:
        own = load_prompts(None if pair is None else pair / PROMPTS)
        tokens, names = list(own.tokens), list(own.sources)
    return models, tokens[:limit], names[:limit]
