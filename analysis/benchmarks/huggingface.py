"""What decoding with a Hugging Face model costs beside the model: ``python -m ddtree.analysis.benchmarks.huggingface``.

Random models of Llama's form on the CPU; an oracle among decoys drafts full trees, so that no pass is smaller than the
budget says. A pass of the model is everything in its ``forward``, the growing of its cache included; the rest is ours.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NamedTuple

import click
import numpy as np

from ddtree.drafters import NoiseLaw, OracleDrafter
from ddtree.interop.huggingface import DDTreeDecoder

__all__ = ["Share", "measure", "random_llama"]

SIZES = {
    "0.1 M": {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 256},
    "16 M": {"hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 6, "vocab_size": 16_000},
    "134 M": {"hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 12, "vocab_size": 32_000},
}
"""Of the models, by their parameters."""


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


@click.command()
@click.option("--budget", default=64, show_default=True, type=click.IntRange(1), help="Nodes of a tree.")
@click.option(
    "--threads", default=1, show_default=True, type=click.IntRange(1), help="Of torch; with 1, CPU time counts."
)
@click.option("--cache", default="dynamic", show_default=True, type=click.Choice(["dynamic", "static"]))
def main(budget: int, threads: int, cache: str) -> None:
    """Measure models of several sizes and print a table."""
    import torch
    from rich.console import Console
    from rich.table import Table

    torch.set_num_threads(threads)
    table = Table("model", "passes", "inside, ms a pass", "outside, ms a pass", "outside, % of inside")
    for name, sizes in SIZES.items():
        # a thread's own time says the same beside other programs
        clock = time.thread_time if threads == 1 else time.perf_counter
        share = measure(random_llama(**sizes), budget=budget, cache=cache, clock=clock)
        table.add_row(name, str(share.passes), f"{share.inside:.2f}", f"{share.outside:.2f}", f"{share.percent:.1f}")
    Console().print(table)


if __name__ == "__main__":
    main()
