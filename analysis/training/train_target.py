"""First command: the corpus, the target, and its own continuations, on which the drafter is trained.

    python -m ddtree.analysis.training.train_target --work WORK --out OUT

The target is trained on the first GPU; continuations are made on all of them. Its weights are rounded to half precision
before they continue anything, so that the drafter learns what the shipped target says.
"""

from __future__ import annotations

import argparse
import math
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 - its common name
from torch import Tensor

from ddtree.analysis.training.corpus import END_OF_TEXT, Corpus, load_corpus, make_corpus, write_json
from ddtree.analysis.training.loop import (
    Clock,
    compiled,
    cosine,
    half_weights,
    make_optimizer,
    on_every_device,
    prepare,
    rounded,
    say,
    synchronize,
)
from ddtree.analysis.training.models import TARGET, Target
from ddtree.model import save_bundle

LEARNING_RATE, WEIGHT_DECAY = 3e-3, 0.1
BALANCE_STEP, LAST_BALANCE_STEP = 1e-3, 1e-4
"""By which a router's bias follows an expert's load, and in the last tenth of the training."""
STEPS_A_RECORD = 500

CONTINUED_LENGTH = 256
PROMPT_LENGTHS = (32, 64, 96, 128)
TEMPERATURES = (0.0, 0.7)
"""Continuations are of this length, prompt included: half greedy, half sampled."""


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description="Train the target and continue prompts with it.")
    parser.add_argument("--work", type=Path, required=True, help="folder of what the next command needs")
    parser.add_argument("--out", type=Path, required=True, help="folder of the pair")
    parser.add_argument("--seconds", type=float, default=225, help="of the target's training")
    parser.add_argument("--continue-seconds", type=float, default=140, help="of making continuations")
    parser.add_argument("--batch", type=int, default=128, help="sequences a step")
    parser.add_argument("--length", type=int, default=512, help="tokens a sequence")
    parser.add_argument("--continue-batch", type=int, default=8192, help="prompts continued together")
    parser.add_argument("--max-steps", type=int, help="end the training after so many steps, to try it out")
    parser.add_argument("--max-batches", type=int, help="make so many batches of continuations a device, likewise")
    parser.add_argument("--processes", type=int, help="of making continuations on the CPU")
    arguments = parser.parse_args()
    for folder in (arguments.work, arguments.out):
        folder.mkdir(parents=True, exist_ok=True)

    made = (arguments.work / "corpus.json").is_file() and (arguments.out / "vocabulary.kdtr").is_file()
    corpus = load_corpus(arguments.work) if made else make_corpus(arguments.work, arguments.out, TARGET.vocab_size)
    say(f"corpus: {len(corpus.train):,} tokens of {corpus.record['train']['files']:,} files")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    prepare(device)
    torch.manual_seed(0)
    model, record = train(corpus, device, arguments)

    rounded(model).eval()
    torch.save(model.state_dict(), arguments.work / "target.pt")
    versions = {"torch": torch.__version__, "numpy": np.__version__, "seed": "0"}
    save_bundle(arguments.out / "target.kdtr", TARGET, half_weights(model), metadata=versions)
    windows = None if device.type == "cuda" else 16  # all of it takes minutes without a GPU
    record["held_out"] = evaluate(model, corpus, device, arguments.length, windows)
    say(f"held out: {record['held_out']}")
    record["versions"] = versions
    write_json(arguments.out / "target.json", record)
    model.cpu()
    if device.type == "cuda":
        torch.cuda.empty_cache()

    for stale in arguments.work.glob("continuations-*.npz"):
        stale.unlink()
    on_every_device(make_continuations, arguments, processes=arguments.processes)
    say("done")


def train(corpus: Corpus, device: torch.device, arguments: argparse.Namespace) -> tuple[Target, dict[str, Any]]:
    """Train on windows of the corpus at random places, until the seconds are over."""
    generator = torch.Generator(device).manual_seed(1)
    tokens = torch.as_tensor(corpus.train.astype(np.int16), device=device)  # ids are below 2,048
    model = Target().to(device)
    optimizer = make_optimizer(model, WEIGHT_DECAY, device)
    routers = [layer.mlp.gate for i, layer in enumerate(model.model.layers) if TARGET.is_moe(i)]
    loss_of = compiled(model.loss, device)

    def step_loss() -> tuple[Tensor, Tensor]:
        ids = windows(tokens, arguments.batch, arguments.length + 1, generator)
        with torch.autocast(device.type, torch.bfloat16):
            return loss_of(ids)

    begun = time.monotonic()
    step_loss()[0].backward()  # compiles, outside the seconds of the training
    optimizer.zero_grad(set_to_none=True)
    synchronize(device)
    parameters = sum(p.numel() for p in model.parameters())
    say(f"target: {parameters:,} parameters, compiled in {time.monotonic() - begun:.0f} s")

    clock = Clock(arguments.seconds, device, arguments.max_steps)
    curve, total = [], torch.zeros((), device=device)
    while clock.tick():
        for group in optimizer.param_groups:
            group["lr"] = LEARNING_RATE * cosine(clock)
        loss, loads = step_loss()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        balance = BALANCE_STEP if clock.share < 0.9 else LAST_BALANCE_STEP
        for router, load in zip(routers, loads, strict=True):  # auxiliary-loss-free balancing (arXiv 2408.15664)
            router.e_score_correction_bias += balance * torch.sign(load.mean() - load)
        total += loss.detach()
        if clock.step % STEPS_A_RECORD == 0:
            curve.append({"step": clock.step, "seconds": clock.elapsed, "loss": total.item() / STEPS_A_RECORD})
            total.zero_()
            rate = clock.step * arguments.batch * arguments.length / clock.elapsed
            say(f"target step {clock.step}: loss {curve[-1]['loss']:.4f}, {rate / 1e6:.2f} M tokens/s")
    synchronize(device)
    steps = clock.step - 1
    record = {
        "parameters": parameters,
        "steps": steps,
        "seconds": clock.elapsed,
        "tokens": steps * arguments.batch * arguments.length,
        "corpus_tokens": len(corpus.train),
        "busiest_expert_over_mean": (loads.amax(1) / loads.mean(1)).tolist() if steps else [],
        "curve": curve,
    }
    return model, record


def windows(tokens: Tensor, count: int, length: int, generator: torch.Generator) -> Tensor:
    """(count, length) ids from random places of the corpus."""
    starts = torch.randint(0, len(tokens) - length, (count, 1), device=tokens.device, generator=generator)
    return tokens[starts + torch.arange(length, device=tokens.device)].long()


@torch.no_grad()
def evaluate(
    model: Target, corpus: Corpus, device: torch.device, length: int, most_windows: int | None
) -> dict[str, float]:
    """Nats a token, bits a byte and the share of right first guesses on the held-out files, ends of texts not counted.

    In windows of ``length`` that do not overlap.
    """
    held = torch.as_tensor(corpus.held_out.astype(np.int64))
    count = (len(held) - 1) // length
    inputs, wanted = held[: count * length].view(count, length), held[1 : count * length + 1].view(count, length)
    nats = tokens = right = 0.0
    for start in range(0, min(count, most_windows or count), 64):
        rows = slice(start, min(start + 64, most_windows or count))
        logits, labels = model(inputs[rows].to(device)), wanted[rows].to(device)
        counted = labels != END_OF_TEXT
        loss = F.cross_entropy(logits.float().flatten(0, 1), labels.flatten(), reduction="none").view_as(labels)
        nats += loss[counted].double().sum().item()
        right += (logits.argmax(-1) == labels)[counted].sum().item()
        tokens += counted.sum().item()
    bytes_a_token = corpus.record["held"]["bytes"] / (len(held) - corpus.record["held"]["files"])
    return {
        "tokens": tokens,
        "nats_per_token": nats / tokens,
        "bits_per_byte": nats / tokens / math.log(2) / bytes_a_token,
        "top1": right / tokens,
    }


def make_continuations(device: torch.device, rank: int, arguments: argparse.Namespace) -> None:
    """Continue prompts from the corpus until the seconds are over; write ids and prompt lengths to the work folder."""
    generator = torch.Generator(device).manual_seed(100 + rank)
    tokens = torch.as_tensor(load_corpus(arguments.work).train.astype(np.int16), device=device)
    model = Target().to(device).eval()
    model.load_state_dict(torch.load(arguments.work / "target.pt", map_location=device))
    ids, prompt_lens = [], []
    begun, batch = time.monotonic(), 0
    while batch == 0 or (time.monotonic() - begun) * (1 + 1 / batch) < arguments.continue_seconds:
        if batch == arguments.max_batches:
            break
        length = PROMPT_LENGTHS[(batch + rank) % len(PROMPT_LENGTHS)]
        temperature = TEMPERATURES[(batch // len(PROMPT_LENGTHS)) % len(TEMPERATURES)]
        prompts = windows(tokens, arguments.continue_batch, length, generator)
        with torch.autocast(device.type, torch.float16):
            made = model.generate(prompts, CONTINUED_LENGTH, temperature=temperature, generator=generator)
        ids.append(made.cpu().numpy().astype(np.uint16))
        prompt_lens.append(np.full(len(made), length, np.int16))
        batch += 1
    np.savez(
        arguments.work / f"continuations-{rank}.npz", ids=np.concatenate(ids), prompt_lens=np.concatenate(prompt_lens)
    )
    seconds = time.monotonic() - begun
    say(f"device {rank}: {batch * arguments.continue_batch:,} continuations in {seconds:.0f} s")


if __name__ == "__main__":
    main()
