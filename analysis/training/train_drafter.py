"""Second command: the drafter, on the target's own continuations that the first command left in its work folder.

    python -m ddtree.analysis.training.train_drafter --work WORK --out OUT

With several GPUs each takes a share of every step's sequences, and gradients are averaged.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812 - its common name
from torch import Tensor, nn

from ddtree.analysis.training.corpus import write_json
from ddtree.analysis.training.loop import (
    Clock,
    average_gradients,
    compiled,
    cosine,
    half_weights,
    make_optimizer,
    mean_of_processes,
    on_every_device,
    rounded,
    say,
    synchronize,
)
from ddtree.analysis.training.models import DRAFTER, Drafter, Target
from ddtree.drafters.block import save_block_drafter

LEARNING_RATE, WEIGHT_DECAY = 2e-3, 0.05
DEPTH_DECAY = 4.0
"""A depth's loss weighs exp(−(depth − 1) / this), as in DFlash for blocks of 8: the first depths decide most rounds."""
STEPS_A_RECORD, STEPS_A_SAVE = 500, 5000
HELD_BACK = 4096
"""Sequences that are not trained on."""
ROOT_SKEW = 1.5
"""Roots are drawn at uniform numbers to this power: more at the beginning, as later on greedy text often repeats."""


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description="Train the drafter on the target's own continuations.")
    parser.add_argument("--work", type=Path, required=True, help="folder of the first command's work")
    parser.add_argument("--out", type=Path, required=True, help="folder of the pair")
    parser.add_argument("--seconds", type=float, default=460, help="of the training")
    parser.add_argument("--batch", type=int, default=128, help="sequences a step and device")
    parser.add_argument("--roots", type=int, default=32, help="blocks a sequence")
    parser.add_argument("--max-steps", type=int, help="end the training after so many steps, to try it out")
    parser.add_argument("--processes", type=int, help="number of processes on the CPU")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    on_every_device(train, arguments, processes=arguments.processes)


class Step(nn.Module):
    """The loss of a batch of blocks, and what was drafted right: one function to compile."""

    def __init__(self, target: Target, drafter: Drafter) -> None:
        super().__init__()
        self.target, self.drafter = target, drafter
        depths = torch.arange(DRAFTER.block_size - 1)
        self.register_buffer("depths", depths + 1)
        self.register_buffer("weights", torch.exp(-depths / DEPTH_DECAY))

    def forward(self, ids: Tensor, roots: Tensor) -> Tensor:
        """Loss, share of right first guesses at each depth, and mean accepted length of a chain, the bonus left out."""
        with torch.no_grad(), torch.autocast(ids.device.type, torch.float16):
            features = self.target.features(ids, DRAFTER.target_layers)
        labels = ids.gather(1, (roots[..., None] + self.depths).flatten(1)).view(*roots.shape, -1)
        root_embeddings = self.target.model.embed_tokens(ids.gather(1, roots))
        with torch.autocast(ids.device.type, torch.bfloat16):
            logits = self.target.lm_head(self.drafter(features, root_embeddings, roots)).float()
        losses = F.cross_entropy(logits.flatten(0, 2), labels.flatten(), reduction="none").view_as(labels)
        right = (logits.argmax(-1) == labels).float()
        loss = (losses * self.weights).sum(-1).mean() / self.weights.sum()
        chain = right.cumprod(-1).sum(-1).mean()
        return torch.cat([loss[None], right.mean((0, 1)).detach(), chain[None].detach()])


def train(device: torch.device, rank: int, arguments: argparse.Namespace) -> None:
    """One device's part of the training."""
    torch.manual_seed(2)  # the same first weights everywhere
    generator = torch.Generator(device).manual_seed(200 + rank)
    ids, prompt_lens = load_continuations(arguments.work, device)
    target = Target().to(device).eval().requires_grad_(False)
    target.load_state_dict(torch.load(arguments.work / "target.pt", map_location=device))
    drafter = Drafter().to(device)
    with torch.no_grad():
        drafter.mask_embedding.copy_(target.model.embed_tokens.weight.mean(0))
    optimizer = make_optimizer(drafter, WEIGHT_DECAY, device)
    step_of = Step(target, drafter).to(device)
    run = compiled(step_of, device)
    order = torch.randperm(len(ids), generator=torch.Generator().manual_seed(3)).to(device)
    held_back = min(HELD_BACK, len(ids) // 10)
    held, order = order[:held_back], order[held_back:]

    def batch(which: Tensor) -> tuple[Tensor, Tensor]:
        rows, starts = ids[which].long(), prompt_lens[which].long()[:, None]
        last = rows.shape[1] - DRAFTER.block_size
        places = torch.rand(len(which), arguments.roots, device=device, generator=generator)
        return rows, (starts + (places**ROOT_SKEW * (last + 1 - starts)).long()).clamp(max=last)

    begun = time.monotonic()
    run(*batch(order[: arguments.batch]))[0].backward()  # compiles, outside the seconds of the training
    optimizer.zero_grad(set_to_none=True)
    synchronize(device)
    if rank == 0:
        size = sum(p.numel() for p in drafter.parameters())
        say(f"drafter: {size:,} parameters, {len(order):,} sequences, compiled in {time.monotonic() - begun:.0f} s")

    processes = dist.get_world_size()
    clock = Clock(arguments.seconds, device, arguments.max_steps)
    curve: list[dict[str, Any]] = []
    total = torch.zeros(DRAFTER.block_size + 1, device=device)
    place = rank * arguments.batch
    while clock.tick():
        for group in optimizer.param_groups:
            group["lr"] = LEARNING_RATE * cosine(clock)
        if place + arguments.batch > len(order):
            place = rank * arguments.batch
        result = run(*batch(order[place : place + arguments.batch]))
        place += processes * arguments.batch
        result[0].backward()
        average_gradients(drafter)
        torch.nn.utils.clip_grad_norm_(drafter.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        total += result.detach()
        if clock.step % STEPS_A_RECORD == 0:
            curve.append({"step": clock.step, "seconds": clock.elapsed, **named(total / STEPS_A_RECORD)})
            total.zero_()
            if rank == 0:
                say(f"drafter step {clock.step}: loss {curve[-1]['loss']:.4f}, chain {curve[-1]['chain']:.3f}")
        if clock.step % STEPS_A_SAVE == 0 and rank == 0:
            save(arguments.out, drafter)
    synchronize(device)
    seconds, steps = clock.elapsed, clock.step - 1

    rounded(drafter)
    parts = [
        held[i : i + arguments.batch] for i in range(rank * arguments.batch, held_back, processes * arguments.batch)
    ]
    with torch.no_grad():
        results = torch.stack([step_of(*batch(part)) for part in parts]) if parts else total[None]
    tested = named(mean_of_processes(results.mean(0)))
    if rank == 0:
        save(arguments.out, drafter)
        blocks = steps * processes * arguments.batch * arguments.roots
        record = {
            "parameters": sum(p.numel() for p in drafter.parameters()),
            "devices": processes,
            "continuations": len(order),
            "steps": steps,
            "seconds": seconds,
            "blocks": blocks,
            "epochs": steps * processes * arguments.batch / len(order),
            "held_back": {"sequences": held_back, **tested},
            "curve": curve,
        }
        write_json(arguments.out / "drafter.json", record)
        say(f"held back: {tested}; {record['epochs']:.1f} epochs, {blocks / seconds / 1e3:.0f} k blocks/s")


def named(result: Tensor) -> dict[str, Any]:
    """A step's result by name; τ of a chain counts the bonus."""
    loss, *top1, chain = result.tolist()
    return {"loss": loss, "top1": top1, "chain": 1 + chain}


def save(out: Path, drafter: Drafter) -> None:
    """Write the drafter in half precision."""
    versions = {"torch": torch.__version__, "numpy": np.__version__, "seed": "2"}
    save_block_drafter(out / "drafter.kdtr", DRAFTER, half_weights(drafter), metadata=versions)


def load_continuations(work: Path, device: torch.device) -> tuple[Tensor, Tensor]:
    """All devices' continuations: (n, length) ids and (n,) prompt lengths, as int16."""
    files = sorted(work.glob("continuations-*.npz"))
    if not files:
        raise FileNotFoundError(f"{work} has no continuations-*.npz: run ddtree.analysis.training.train_target first")
    loaded = [np.load(file) for file in files]
    ids, prompt_lens = (
        torch.as_tensor(np.concatenate([part[name] for part in loaded]).astype(np.int16), device=device)
        for name in ("ids", "prompt_lens")
    )
    return ids, prompt_lens


if __name__ == "__main__":
    main()
