"""``ddtree generate``: continue a prompt, and show which round gave what."""

from __future__ import annotations

import codecs
import functools
import re
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ddtree.cli.limits import MOST_DEPTH, MOST_NEW_TOKENS, MOST_NODES

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from rich.console import Console
    from rich.text import Text
    from rich.tree import Tree

    from ddtree.engine import Emission, Engine, Generation, Round
    from ddtree.protocols import Drafter, Target
    from ddtree.vocabulary import Vocabulary

STYLES = tuple(f"#000000 on {colour}" for colour in ("#9cccff", "#ffcf87", "#a3e0b5", "#f3b3d6", "#c9bdfb", "#d9df8f"))
FEW_COLOURS = tuple(f"black on {colour}" for colour in ("cyan", "yellow", "green", "magenta"))
MODES = ("tree", "chain", "autoregressive")
DTYPES = ("float32", "bfloat16", "float64")


class _CannotGenerate(click.ClickException):
    exit_code = 2


def _devices(ctx: Any, param: Any, value: str | None) -> tuple[str, ...] | None:
    """The devices of ``--devices``: ("all",), or numbers and "cpu"."""
    if value is None:
        return None
    devices = tuple(part.strip() for part in value.split(","))
    if devices != ("all",) and not all(device == "cpu" or re.fullmatch(r"[0-9]{1,4}", device) for device in devices):
        raise click.BadParameter(f"{value!r} must be all, or GPUs' numbers or cpu, with commas between them: 0,1")
    return devices


@click.command()
@click.option("--prompt", "prompts", multiple=True, help="Text to continue. Again for more requests in one batch.")
@click.option(
    "--prompt-file",
    "files",
    type=click.Path(path_type=Path),
    multiple=True,
    help="A file whose text is a prompt. May be given again.",
)
@click.option(
    "--ids", multiple=True, help="Token ids of a prompt, such as 5,17,3: needs no tokenizer. May be repeated."
)
@click.option(
    "--model",
    type=click.Path(path_type=Path),
    help="The folder of a deepseek_v3 model as on the hub, a bundle, or a pair's folder. Other models than a pair's "
    "are drafted for by n-gram lookup. By default the pair that is installed.",
)
@click.option("--mode", type=click.Choice(MODES), default="tree", show_default=True, help="What is drafted a round.")
@click.option("--budget", type=click.IntRange(0, MOST_NODES), default=64, show_default=True, help="Nodes of a tree.")
@click.option(
    "--depth", type=click.IntRange(0, MOST_DEPTH), default=7, show_default=True, help="Most tokens of a path."
)
@click.option(
    "--max-new-tokens",
    type=click.IntRange(1, MOST_NEW_TOKENS),
    default=64,
    show_default=True,
    help="Most tokens of a request.",
)
@click.option(
    "--stop",
    "stops",
    type=click.IntRange(0),
    multiple=True,
    help="Id of a token that ends a request, beside the model's.",
)
@click.option("--temperature", type=click.FloatRange(0), default=0.0, show_default=True, help="0 is greedy.")
@click.option("--top-p", type=click.FloatRange(0, 1, min_open=True), default=1.0, show_default=True, help="Nucleus.")
@click.option("--seed", type=click.IntRange(0, 2**64 - 1), default=0, show_default=True, help="Of sampled tokens.")
@click.option(
    "--backend", metavar="NAME", help="Who does the operations, and so where the model lives: cupy is on the GPU."
)
@click.option(
    "--dtype",
    type=click.Choice(DTYPES),
    default="float32",
    show_default=True,
    help="Of weights, cache and arithmetic. bfloat16 is for a GPU.",
)
@click.option(
    "--max-batch",
    type=click.IntRange(1),
    help="Most requests at once; further ones take the place of those that have finished.",
)
@click.option(
    "--devices",
    metavar="all|N,…",
    callback=_devices,
    help="Spread the prompts over GPUs, a process each: all, or their numbers; the backend is then cupy, if none is "
    "given. cpu,cpu are two processes without a GPU.",
)
@click.option("--show-trees", is_flag=True, help="Show the tree of every round, with the accepted path.")
@click.option("--tree-nodes", type=click.IntRange(1), default=24, show_default=True, help="Of a tree that is shown.")
@click.option("--save", type=click.Path(path_type=Path), metavar="RUN", help="Write the run, for ddtree report.")
def generate(
    prompts: tuple[str, ...],
    files: tuple[Path, ...],
    ids: tuple[str, ...],
    model: Path | None,
    mode: str,
    budget: int,
    depth: int,
    max_new_tokens: int,
    stops: tuple[int, ...],
    temperature: float,
    top_p: float,
    seed: int,
    backend: str | None,
    dtype: str,
    max_batch: int | None,
    devices: tuple[str, ...] | None,
    show_trees: bool,
    tree_nodes: int,
    save: Path | None,
) -> None:
    """Continue prompts, and show what each round gave.

    The tokens are those of decoding one at a time, whatever is drafted. Each round's tokens have a colour of their own;
    the last of them, underlined, is the target's. Where there are no colours, bars stand between rounds.

    \b
      ddtree generate --prompt "def get(self, key, default=None):" --show-trees
      ddtree generate --prompt-file half_a_module.py --temperature 0.7 --save run.kdtr
      ddtree generate --model ~/my-deepseek --ids 0,128,17 --mode chain
      ddtree generate --prompt-file a.py --prompt-file b.py --backend cupy --dtype bfloat16 --devices all
    """  # noqa: D301 - click takes the backspace for "do not wrap"
    if not prompts and not files and not ids:
        raise _CannotGenerate("there is no prompt: give one with --prompt, --prompt-file or --ids")
    from rich.console import Console

    from ddtree.backends import BackendUnavailable
    from ddtree.cli.check import keep_inputs
    from ddtree.engine import FactoryFailedError, NonFiniteLogitsError, RequestsFailedError

    drafts = mode != "autoregressive"
    if backend is None and devices is not None and "cpu" not in devices:
        backend = "cupy"
    try:
        keep_inputs(files, () if save is None else (save,))
        _check_writable(save)
        # where processes of their own decode, this one only reads and writes text
        source = _load(model, drafts=drafts) if devices else _load(model, drafts=drafts, dtype=dtype, backend=backend)
        tokens = _tokens(source, prompts, files, ids)
        check_depth(source.drafter, depth)
        vocab_size = source.target.vocab_size
        for stop in stops:
            if stop >= vocab_size:
                raise ValueError(f"--stop must be in 0 … {vocab_size - 1} (the vocabulary), got {stop}")
        every_stop = sorted({*stops, *source.stops})
        options: dict[str, Any] = {
            "stop_token_ids": every_stop,
            "temperature": temperature,
            "top_p": top_p,
            "seed": seed,
            "mode": mode,
        }
        options["keep_rounds"] = True  # what each round gave is to be shown
        sizes: dict[str, Any] = {"depth": depth, "budget": budget, "backend": backend, "max_batch": max_batch}
        if devices:
            make_engine = functools.partial(_make_engine, model, drafts, dtype, sizes)
            generation = _spread(make_engine, tokens, max_new_tokens, devices, max_batch, options)
        else:
            generation = _with_bar(_engine(source, sizes), tokens, max_new_tokens, options)
        if save is not None:
            settings: dict[str, Any] = {
                "budget": budget,
                "depth": depth,
                "temperature": temperature,
                "top_p": top_p,
                "seed": seed,
            }
            settings |= {"mode": mode, "dtype": dtype, "backend": backend or "by the arrays"}
            _save(save, generation, tokens, source, settings)
    except (
        ValueError, TypeError, ImportError, BackendUnavailable, NonFiniteLogitsError, FactoryFailedError,
        RequestsFailedError,
    ) as error:  # fmt: skip
        raise _CannotGenerate(str(error)) from error
    except OSError as error:
        raise _CannotGenerate(f"{error.filename or 'a file'}: {error.strerror or error}") from error

    console = Console(highlight=False)
    writer = _Writer(console, source.vocabulary, tree_nodes)
    for request in range(len(tokens)):
        writer.show(request, tokens[request], generation, show_trees)
    _show_table(console, generation, source.drafter_name if drafts else "nothing", of_all=devices is not None)
    if save is not None:
        console.print(f"Written: {save}. Look at it with: ddtree report {save}", markup=False, soft_wrap=True)


@dataclass(frozen=True)
class _Source:
    """Who decodes, who drafts, and how tokens are read."""

    name: str
    target: Target
    drafter: Drafter | None
    drafter_name: str
    vocabulary: Vocabulary | None
    stops: tuple[int, ...]


def _load(path: Path | None, *, drafts: bool, dtype: str = "float32", backend: str | None = None) -> _Source:
    from ddtree.drafters import NgramDrafter
    from ddtree.model import load_model
    from ddtree.pair import TARGET, load_pair
    from ddtree.vocabulary import read_tokenizer_json

    if path is None or (path / TARGET).is_file():
        target, block_drafter, vocabulary = load_pair(path, dtype=dtype, backend=backend)
        name = "the installed pair" if path is None else path.name
        return _Source(
            name,
            target,
            block_drafter if drafts else None,
            block_drafter.label,
            vocabulary,
            target.config.eos_token_ids,
        )
    target = load_model(path, dtype=dtype, backend=backend)
    tokenizer = path / "tokenizer.json"
    return _Source(
        path.name,
        target,
        NgramDrafter() if drafts else None,
        NgramDrafter.label,
        read_tokenizer_json(tokenizer, target.vocab_size) if tokenizer.is_file() else None,
        target.config.eos_token_ids,
    )


def _tokens(
    source: _Source, prompts: Sequence[str], files: Sequence[Path], ids: Sequence[str]
) -> list[NDArray[np.int32]]:
    """The prompts as token ids: texts first, then files, then ids."""
    import numpy as np

    texts = [("--prompt", text) for text in prompts]
    for path in files:
        try:
            texts.append((str(path), path.read_text(encoding="utf-8")))
        except UnicodeDecodeError as error:
            raise ValueError(f"{path} must be UTF-8 text: {error.reason} at byte {error.start}") from error
    if texts and source.vocabulary is None:
        raise ValueError(f"{source.name} has no tokenizer.json beside it to read text with: give token ids with --ids")
    rows = []
    for name, text in texts:
        if not text.isascii() and any("\ud800" <= c <= "\udfff" for c in text):
            raise ValueError(f"{name} must be UTF-8 text, got bytes that are not")
        if not text:
            raise ValueError(f"{name} must have some text, got none")
        row = source.vocabulary.encode(text) if source.vocabulary is not None else np.zeros(0, np.int32)
        rows.append(row)
    for listed in ids:
        if not re.fullmatch(r"\s*\d{1,10}(?:[\s,]+\d{1,10})*\s*", listed):
            raise ValueError(f"--ids must be token ids, such as 5,17,3, got {listed!r}")
        rows.append(np.array([int(i) for i in re.findall(r"\d+", listed)], np.int64))
    return rows


def check_depth(drafter: Any, depth: int) -> None:
    """Refuse a ``--depth`` that is more than the drafter drafts, where it says how much that is."""
    most = getattr(drafter, "max_depth", None)
    if most is not None and depth > most:
        raise ValueError(f"--depth must be at most {most}, all that the {drafter.label} drafts, got {depth}")


def _check_writable(save: Path | None) -> None:
    """See that the run can be written before it is made."""
    from ddtree.kdtr import check_regular

    if save is None:
        return
    if save.exists():
        check_regular(save)
    try:
        tempfile.TemporaryFile(dir=save.parent).close()
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(save)) from error


def _engine(source: _Source, sizes: dict[str, Any]) -> Engine:
    from ddtree.engine import Engine

    return Engine(source.target, source.drafter, **sizes)


def _make_engine(model: Path | None, drafts: bool, dtype: str, sizes: dict[str, Any]) -> Engine:
    """What each process of ``--devices`` builds."""
    return _engine(_load(model, drafts=drafts, dtype=dtype, backend=sizes["backend"]), sizes)


def _with_bar(engine: Engine, tokens: list[Any], max_new_tokens: int, options: dict[str, Any]) -> Generation:
    """Generate, with a bar where somebody looks."""
    with _bar(len(tokens) * max_new_tokens) as advance:

        def on_round(round_: Round) -> None:
            advance(int(round_.acceptance.lengths.sum()))

        return engine.generate(tokens, max_new_tokens, on_round=on_round, **options)


def _spread(
    make_engine: Callable[[], Engine],
    tokens: list[Any],
    max_new_tokens: int,
    devices: tuple[str, ...],
    max_batch: int | None,
    options: dict[str, Any],
) -> Generation:
    """Generate in a process a device; the bar moves as shares of the prompts are done."""
    from ddtree.engine import generate_many
    from ddtree.engine.spread import visible_devices

    if any(device != "cpu" for device in devices):
        try:
            visible = visible_devices()
        except ValueError as error:
            raise ValueError(
                f"--devices {','.join(devices)}: {error}; at the command line, --devices cpu,cpu"
            ) from error
        devices = tuple(visible) if devices == ("all",) else devices
    share = 8 if max_batch is None else 2 * max_batch  # so that finished requests are replaced
    with _bar(len(tokens) * max_new_tokens) as advance:

        def on_emission(emission: Emission) -> None:
            advance(max_new_tokens if emission.finish_reason else len(emission.token_ids))

        return generate_many(
            make_engine, tokens, max_new_tokens, devices=devices, share=share, on_emission=on_emission, **options
        )


@contextmanager
def _bar(total: int) -> Iterator[Callable[[int], None]]:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("tokens", total=total)
        yield lambda tokens: progress.advance(task, tokens)


def _save(path: Path, generation: Generation, tokens: list[Any], source: _Source, settings: dict[str, Any]) -> None:
    from ddtree import __version__
    from ddtree.analysis.runs import save_run

    drafter = source.drafter_name if source.drafter is not None else "none"
    settings = {"model": source.name, "drafter": drafter, **settings, "ddtree": __version__}
    save_run(path, generation, tokens, vocabulary=source.vocabulary, settings=settings)


class _Writer:
    """Texts and trees on a terminal."""

    def __init__(self, console: Console, vocabulary: Vocabulary | None, tree_nodes: int) -> None:
        self.console, self.vocabulary, self.tree_nodes = console, vocabulary, tree_nodes

    def show(self, request: int, prompt: Any, generation: Generation, show_trees: bool) -> None:
        """Write a request's prompt and what each round gave, its tree before it if asked for."""
        from rich.text import Text

        rounds = [(r, r.request_ids.index(request)) for r in generation.rounds if request in r.request_ids]
        pieces = self._pieces(prompt, generation.tokens[request], rounds, show_trees)
        if len(generation.tokens) > 1:
            self.console.rule(f"request {request}")
        if not show_trees:
            self.console.print(Text.assemble(*pieces), soft_wrap=True)
            return
        self.console.print(pieces[0], pieces[1], sep="", soft_wrap=True)
        for k, ((round_, b), piece) in enumerate(zip(rounds, pieces[2:], strict=True)):
            length = int(round_.acceptance.lengths[b])
            self.console.print()
            self.console.print(f"[bold]round {k + 1}[/], {length} {'token' if length == 1 else 'tokens'}: ", end="")
            self.console.print(piece, soft_wrap=True)
            self.console.print(self._tree(round_, b))

    def _pieces(self, prompt: Any, tokens: Any, rounds: list[tuple[Round, int]], in_a_line: bool) -> list[Text]:
        """The prompt, the prefill's token, and each round's tokens, the last of which is the target's own."""
        from rich.text import Text

        read = _reader(self.vocabulary, in_a_line)
        pieces = [Text(read(prompt), style="dim"), Text(read(tokens[:1]), style="underline")]
        begin, bar = 1, "" if self.console.color_system else "▏"
        styles = STYLES if self.console.color_system in ("256", "truecolor") else FEW_COLOURS
        for k, (round_, b) in enumerate(rounds):
            end = begin + int(round_.acceptance.lengths[b])
            style = styles[k % len(styles)]
            piece = Text(bar + read(tokens[begin : end - 1]), style=style)
            piece.append(read(tokens[end - 1 : end]), style="underline")
            pieces.append(piece)
            begin = end
        return pieces

    def _tree(self, round_: Round, b: int) -> Tree:
        """The likeliest nodes and the accepted path."""
        import numpy as np
        from rich.text import Text
        from rich.tree import Tree

        tree, kept = round_.tree, round_.acceptance
        path = kept.node_indices[b, : kept.lengths[b]].tolist()
        count = int(tree.node_counts[b])
        shown = sorted({*range(min(self.tree_nodes + 1, count)), *path})
        scores, parents = tree.scores[b], tree.parents[b]
        branches = {0: Tree(Text(self._label(tree.token_ids[b, 0]), style="bold"))}
        for i in shown[1:]:
            parent = int(parents[i])
            share = float(np.exp(min(scores[i] - scores[parent], 0.0)))
            label = Text(f"{self._label(tree.token_ids[b, i])} ").append(_percent(share), style="dim")
            if i in path:
                label.stylize("bold green")
                label.append(" ✓", style="bold green")
            branches[i] = branches[parent].add(label)
        own = self._label(kept.bonus_token_ids[b])
        ending = "ends the request" if kept.finished[b] else "the target's own"
        branches[path[-1]].add(Text(f"→ {own} ({ending})", style="bold red"))
        if len(shown) < count:
            branches[0].add(Text(f"… and {count - len(shown)} nodes less likely (--tree-nodes)", style="dim"))
        return branches[0]

    def _label(self, token: Any) -> str:
        from ddtree.analysis.report import token_label

        return str(int(token)) if self.vocabulary is None else token_label(self.vocabulary.token_bytes[int(token)])


def _percent(share: float) -> str:
    return f"{share:.0%}" if share >= 0.0095 else f"{share:.1%}" if share >= 0.0005 else "<0.1%"


def _reader(vocabulary: Vocabulary | None, in_a_line: bool) -> Any:
    """A function of token ids that gives text, where characters may begin in one call and end in another."""
    if vocabulary is None:
        return lambda tokens: "".join(f"{int(token)} " for token in tokens)
    decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def read(tokens: Any) -> str:
        text = _visible(decoder.decode(vocabulary.decode_bytes(tokens))) if len(tokens) else ""
        return text.replace("\n", "⏎") if in_a_line else text

    return read


def _visible(text: str) -> str:
    """Text that moves no cursor: what is neither printable nor white space is escaped."""
    return "".join(
        c if c.isprintable() or c in "\n\t" else c.encode("unicode_escape").decode() for c in text.replace("\r\n", "\n")
    )


def _show_table(console: Console, generation: Generation, drafter: str, *, of_all: bool) -> None:
    """Tokens, rounds and τ, and where the time went."""
    from rich import box
    from rich.table import Table

    from ddtree.analysis.loops import loops_said

    tokens, total = sum(map(len, generation.tokens)), sum(generation.seconds.values())
    table = Table("", "", "", box=box.SIMPLE_HEAD, show_header=False)
    table.columns[1].justify = table.columns[2].justify = "right"
    table.add_row("tokens", f"{tokens:,}", "")
    table.add_row("rounds", f"{generation.num_rounds:,}", "")
    table.add_row("τ, tokens emitted a round", "-" if generation.tau is None else f"{generation.tau:.3f}", "")
    table.add_row(
        "seconds of all processes" if of_all else "seconds",
        f"{total:.2f}",
        f"{tokens / total:,.1f} tokens/s" if total and not of_all else "",
        end_section=True,
    )
    for stage, seconds in generation.seconds.items():
        table.add_row(f"  {stage}", f"{seconds:.2f}", f"{seconds / total:.0%}" if total else "")
    console.print(table)
    console.print(f"Drafted by {drafter}; {', '.join(_endings(generation))}.", markup=False)
    loops = loops_said(generation.tokens)
    if loops:
        console.print(loops, markup=False)


def _endings(generation: Generation) -> Iterator[str]:
    for reason, words in (("stop", "ended with a stop token"), ("length", "ended with the last token allowed")):
        count = generation.finish_reasons.count(reason)  # type: ignore[arg-type]
        if count:
            yield f"{count} {words}"
