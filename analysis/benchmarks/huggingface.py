"""What decoding with a Hugging Face model costs beside the model: ``python -m ddtree.analysis.benchmarks.huggingface``.

Random models; an oracle among decoys drafts full trees, so that no pass is smaller than the budget says. A pass of the
model is everything in its ``forward``, the growing of its cache included; the rest is ours.

With ``--device cuda``, models of DeepSeek-V3's form on the GPU, beside transformers' ``generate``. Where the GPU is
waited for, before and after each forward, the rest of a round is all that is in the way of the next forward: an upper
bound, since without these waits the host's part hides behind the GPU's.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any, NamedTuple

import click
import numpy as np

from ddtree.drafters import NoiseLaw, OracleDrafter
from ddtree.interop.huggingface import DDTreeDecoder

__all__ = ["OnTheGpu", "Share", "measure", "measure_on_gpu", "random_deepseek", "random_llama"]

SIZES = {
    "0.1 M": {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 256},
    "16 M": {"hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 6, "vocab_size": 16_000},
    "134 M": {"hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 12, "vocab_size": 32_000},
}
"""Of the models, by their parameters."""
_DEEPSEEK = {
    "first_k_dense_replace": 1,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "max_position_embeddings": 4096,
}
DEEPSEEK_SIZES = {
    "8 M": {
        **_DEEPSEEK,
        **{"vocab_size": 4096, "hidden_size": 256, "intermediate_size": 512, "moe_intermediate_size": 128},
        **{"num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 8, "n_routed_experts": 16},
        **{"num_experts_per_tok": 2, "kv_lora_rank": 64, "q_lora_rank": 96, "qk_nope_head_dim": 32},
        **{"qk_rope_head_dim": 16, "v_head_dim": 32},
    },
    "0.7 B": {
        **_DEEPSEEK,
        **{"vocab_size": 32768, "hidden_size": 1024, "intermediate_size": 2816, "moe_intermediate_size": 512},
        **{"num_hidden_layers": 12, "num_attention_heads": 16, "num_key_value_heads": 16, "n_routed_experts": 32},
        **{"num_experts_per_tok": 4, "kv_lora_rank": 512, "q_lora_rank": 384, "qk_nope_head_dim": 128},
        **{"qk_rope_head_dim": 64, "v_head_dim": 128},
    },
}
"""Of the models on a GPU, by their parameters."""


class Share(NamedTuple):
    """Where the time of a generation went.

    Attributes
    ----------
    passes : int
        Calls of the model.
    inside, outside : float
        Milliseconds a pass in the model's forward, and outside of it, drafting included.
    """

    passes: int
    inside: float
    outside: float

    @property
    def percent(self) -> float:
        """Time outside the model, of that inside."""
        return 100 * self.outside / self.inside


def random_llama(**sizes: int) -> Any:
    """A model of Llama's form with random weights, in float32."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    heads = sizes["hidden_size"] // 64 or 1
    config = LlamaConfig(
        **sizes,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        max_position_embeddings=4096,
        bos_token_id=None,
        eos_token_id=None,
    )
    return LlamaForCausalLM(config).eval()


def measure(
    model: Any,
    *,
    budget: int = 64,
    prompt_len: int = 200,
    new_tokens: int = 64,
    repeats: int = 3,
    clock: Callable[[], float] = time.perf_counter,
    **options: Any,
) -> Share:
    """Decode one prompt ``repeats`` times, and return the shares of the fastest; ``options`` are the decoder's."""
    vocab_size = model.config.vocab_size
    prompt = np.random.default_rng(0).integers(0, vocab_size, prompt_len)
    known = DDTreeDecoder(model).generate([prompt], new_tokens, mode="autoregressive").tokens
    drafter = OracleDrafter(known, vocab_size, noise=NoiseLaw([[0.4, 0.3, 0.2]]))
    decoder = DDTreeDecoder(model, drafter, depth=8, budget=budget, **options)
    decoder.generate([prompt], 4)  # what is compiled when first called
    spent: list[float] = []
    forward = model.forward

    def timed(*args: Any, **kwargs: Any) -> Any:
        start = clock()
        result = forward(*args, **kwargs)
        spent.append(clock() - start)
        return result

    shares = []
    model.forward = timed
    try:
        for _ in range(repeats):
            spent.clear()
            start = clock()
            decoder.generate([prompt], new_tokens)
            whole, inside = clock() - start, sum(spent)
            shares.append(Share(len(spent), 1e3 * inside / len(spent), 1e3 * (whole - inside) / len(spent)))
    finally:
        model.forward = forward
    return min(shares, key=lambda share: share.inside + share.outside)


class OnTheGpu(NamedTuple):
    """How fast a model on a GPU decodes one prompt, greedily.

    Attributes
    ----------
    generate : float
        Tokens a second of transformers' ``generate``.
    one_by_one : float
        Of ours, a token a pass.
    tree : float
        Of ours, trees that an oracle drafts.
    tau : float
        Tokens a round of these trees.
    inside : float
        Microseconds of a round in the model's forward, median, by the GPU's clock.
    outside : float
        Microseconds of a round outside of it, drafting included, likewise: from the end of the forward's last kernel
        until the next forward has been called and what it reads is there.
    drafting : float
        Of those, microseconds of the drafter.
    """

    generate: float
    one_by_one: float
    tree: float
    tau: float
    inside: float
    outside: float
    drafting: float


def random_deepseek(sizes: dict[str, int], *, dtype: str = "bfloat16", device: str = "cuda") -> Any:
    """A model of DeepSeek-V3's form with random weights."""
    import torch
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    torch.manual_seed(0)
    with torch.device(device):
        model = DeepseekV3ForCausalLM(
            DeepseekV3Config(**sizes, bos_token_id=None, eos_token_id=None, pad_token_id=None)
        )
    return model.eval().to(getattr(torch, dtype))


class Repeating:
    """Drafts the same tensors on the GPU each time: what a round costs beside a drafter that costs nothing."""

    def __init__(self, model: Any, depth: int, topk: int) -> None:
        import torch

        ids = torch.arange(topk, dtype=torch.int32, device=model.device).expand(1, depth, topk)
        falls = torch.linspace(1, 6, topk, device=model.device).expand(1, depth, topk)
        self.draft = (-falls).contiguous(), ids.contiguous()

    def __call__(self, context: Any, depth: int, topk: int) -> tuple[Any, Any]:
        """Return the draft."""
        return self.draft


def measure_on_gpu(
    model: Any,
    *,
    budget: int = 64,
    depth: int = 7,
    prompt_len: int = 32,
    new_tokens: int = 128,
    drafter: str = "oracle",
) -> OnTheGpu:
    """Decode one prompt in every way.

    Parameters
    ----------
    model : transformers.PreTrainedModel
        On a GPU.
    budget, depth : int
        Of the trees.
    prompt_len, new_tokens : int
        Of the prompt, and behind it.
    drafter : str
        "oracle", on the host, or "repeating", on the device: of the rounds whose parts are told apart. The rates are
        those of the oracle.
    """
    import torch

    rng = np.random.default_rng(0)
    prompt = rng.integers(0, model.config.vocab_size, prompt_len)
    ids = torch.from_numpy(prompt[None]).to(model.device)
    options = {"attention_mask": torch.ones_like(ids), "max_new_tokens": new_tokens, "do_sample": False}
    plain = DDTreeDecoder(model)
    known = plain.generate([prompt], new_tokens, mode="autoregressive").tokens
    oracle = DDTreeDecoder(model, OracleDrafter(known, model.config.vocab_size), depth=depth, budget=budget)
    ways: list[Callable[[], Any]] = [
        lambda: model.generate(ids, **options),
        lambda: plain.generate([prompt], new_tokens, mode="autoregressive"),
        lambda: oracle.generate([prompt], new_tokens),
    ]
    rates, result = [], None
    for way in ways:
        way()
        torch.cuda.synchronize()
        start = time.perf_counter()
        result = way()
        torch.cuda.synchronize()
        rates.append(new_tokens / (time.perf_counter() - start))
    decoder = oracle
    if drafter == "repeating":
        decoder = DDTreeDecoder(model, Repeating(model, depth, budget), depth=depth, budget=budget)
    assert result is not None
    return OnTheGpu(rates[0], rates[1], rates[2], result.tau, *_parts(decoder, prompt, new_tokens))


def _parts(decoder: DDTreeDecoder, prompt: Any, new_tokens: int) -> tuple[float, float, float]:
    """Microseconds of a round inside the forward, outside, and in the drafter: medians, but of the first rounds.

    By the GPU's clock, on the model's stream: outside is what passes from the end of a forward's last kernel until the
    next forward has been called and all it reads is there. The drafter's, which is within that, is the host's time, of
    generations of their own.
    """
    import torch

    model, draft = decoder.target.model, decoder.drafter
    stream = torch.cuda.current_stream(next(model.parameters()).device)
    events = [torch.cuda.Event(enable_timing=True) for _ in range(2 * new_tokens + 4)]
    for event in events:
        event.record(stream)  # which makes it
    forward = model.forward
    marks: Iterator[Callable[[], None]] = iter(())
    drafting: list[float] = []

    def marked(*args: Any, **kwargs: Any) -> Any:
        next(marks)()
        result = forward(*args, **kwargs)
        next(marks)()
        return result

    def drafted(context: Any, depth: int, topk: int) -> Any:
        start = time.perf_counter()
        result = draft(context, depth, topk)  # type: ignore[misc]
        drafting.append(time.perf_counter() - start)
        return result

    model.forward = marked
    try:
        for _ in range(2):
            marks = iter([functools.partial(event.record, stream) for event in events])
            decoder.generate([prompt], new_tokens)
        model.forward, decoder.drafter = forward, drafted
        decoder.generate([prompt], new_tokens)
    finally:
        model.forward, decoder.drafter = forward, draft
    torch.cuda.synchronize()
    marked_events = events[: len(events) - len(list(marks))]
    if len(marked_events) < 10:
        raise ValueError(f"new_tokens must be enough for more rounds than are left out, got {new_tokens}")
    between = [1e3 * first.elapsed_time(second) for first, second in pairwise(marked_events)]
    # the first forward is the prompt's, and the next rounds are captured
    within, outside, drafts = (
        float(np.median(times[3:])) for times in (between[::2], between[1::2], 1e6 * np.array(drafting))
    )
    return within, outside, drafts


@click.command()
@click.option("--budget", default=64, show_default=True, type=click.IntRange(1), help="Nodes of a tree.")
@click.option(
    "--threads", default=1, show_default=True, type=click.IntRange(1), help="Of torch; with 1, CPU time counts."
)
@click.option("--cache", default="dynamic", show_default=True, type=click.Choice(["dynamic", "static"]))
@click.option("--device", default="cpu", show_default=True, type=click.Choice(["cpu", "cuda"]))
def main(budget: int, threads: int, cache: str, device: str) -> None:
    """Measure what decoding costs outside of a model's forward, for random models of several sizes.

    On the CPU Llama models of 0.1, 16 and 134 M parameters: milliseconds a pass inside and outside of the forward,
    which is drafting, trees, masks, acceptance and the cache. On a GPU DeepSeek-V3 models of 8 M and 0.7 B parameters,
    beside transformers' generate: microseconds a round. It takes half a minute on a CPU, some minutes on a GPU.
    """
    try:
        import torch
        import transformers  # noqa: F401 - of which the models are
    except ImportError as error:
        raise click.ClickException(f"{error}: pip install 'ddtree[huggingface]'") from error
    from rich.console import Console
    from rich.table import Table

    if device == "cuda":
        if not torch.cuda.is_available():
            raise click.ClickException("torch finds no GPU: leave out --device cuda")
        Console().print(_table_on_gpu(budget))
        return
    torch.set_num_threads(threads)
    table = Table("model", "passes", "inside, ms a pass", "outside, ms a pass", "outside, % of inside")
    for name, sizes in SIZES.items():
        # a thread's own time says the same beside other programs
        clock = time.thread_time if threads == 1 else time.perf_counter
        share = measure(random_llama(**sizes), budget=budget, cache=cache, clock=clock)
        table.add_row(name, str(share.passes), f"{share.inside:.2f}", f"{share.outside:.2f}", f"{share.percent:.1f}")
    Console().print(table)


def _table_on_gpu(budget: int) -> Any:
    from rich.progress import track
    from rich.table import Table

    table = Table(
        *("model", "type", "drafter", "generate, tokens/s", "ours one by one", "ours in trees", "τ"),
        *("inside, µs a round", "outside, µs a round", "of that drafting, µs"),
    )
    kinds = [(n, t, d) for n in DEEPSEEK_SIZES for t in ("float32", "bfloat16") for d in ("oracle", "repeating")]
    for name, dtype, drafter in track(kinds, "decoding"):
        share = measure_on_gpu(random_deepseek(DEEPSEEK_SIZES[name], dtype=dtype), budget=budget, drafter=drafter)
        figures = (share.generate, share.one_by_one, share.tree, share.tau, share.inside, share.outside, share.drafting)
        table.add_row(
            name, dtype, drafter, *(f"{figure:,.2f}" if figure < 10 else f"{figure:,.0f}" for figure in figures)
        )
    return table


if __name__ == "__main__":
    main()
