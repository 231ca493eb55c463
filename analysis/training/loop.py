"""What both trainings share: time as the budget, one process a device, and records of what happened."""

from __future__ import annotations

import math
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from numpy.typing import NDArray
from rich.console import Console
from torch import Tensor, nn

__all__ = [
    "Clock",
    "average_gradients",
    "cosine",
    "half_weights",
    "make_optimizer",
    "on_every_device",
    "rounded",
    "say",
]

WARM_UP_STEPS = 200
STEPS_A_LOOK = 20
"""Steps between two looks at the clock, at which the device is waited for."""

_console = Console(stderr=True, highlight=False)
_start = time.monotonic()


def say(text: str) -> None:
    """One line of progress, with the seconds since the command began."""
    _console.print(f"[{time.monotonic() - _start:6.1f} s] {text}", soft_wrap=True, markup=False)


class Clock:
    """The share of a training's seconds that is over, the same on every device: that of the first.

    It is looked at every ``STEPS_A_LOOK`` steps. A limit of steps, for trying a script out, ends it sooner.
    """

    def __init__(self, seconds: float, device: torch.device, max_steps: int | None = None) -> None:
        self.seconds, self.device, self.max_steps = seconds, device, max_steps
        self.step, self.share, self.start = 0, 0.0, time.monotonic()

    @property
    def elapsed(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self.start

    def tick(self) -> bool:
        """Whether one more step is due."""
        if self.max_steps is not None:
            self.share = self.step / self.max_steps
        elif self.step % STEPS_A_LOOK == 0:
            synchronize(self.device)
            share = torch.tensor(self.elapsed / self.seconds, device=self.device)
            if dist.is_initialized():
                dist.broadcast(share, 0)
            self.share = share.item()
        self.step += 1
        return self.share < 1


def cosine(clock: Clock) -> float:
    """The learning rate as a share of the largest: a linear warm-up, then half a cosine down to 2 %."""
    return min(1.0, clock.step / WARM_UP_STEPS) * (0.02 + 0.49 * (1 + math.cos(math.pi * clock.share)))


def make_optimizer(model: nn.Module, weight_decay: float, device: torch.device) -> torch.optim.Optimizer:
    """AdamW; matrices decay, embeddings, gains and biases do not."""
    matrices: list[Tensor] = []
    others: list[Tensor] = []
    for name, parameter in model.named_parameters():
        (matrices if parameter.dim() >= 2 and "embed" not in name else others).append(parameter)
    groups = [{"params": matrices, "weight_decay": weight_decay}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, betas=(0.9, 0.95), fused=device.type == "cuda")


def average_gradients(model: nn.Module) -> None:
    """Give every process the mean of all processes' gradients, in one exchange; nothing where there is one."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    flat = torch.cat([gradient.flatten() for gradient in gradients])
    dist.all_reduce(flat)
    flat /= dist.get_world_size()
    for gradient, mean in zip(gradients, flat.split([g.numel() for g in gradients]), strict=True):
        gradient.copy_(mean.view_as(gradient))


def half_weights(model: nn.Module) -> dict[str, NDArray[np.float16]]:
    """All weights and buffers in half precision, as they are shipped."""
    return {name: tensor.half().cpu().numpy() for name, tensor in model.state_dict().items()}


def rounded(model: nn.Module) -> nn.Module:
    """The model itself, its weights and buffers rounded to half precision: what is shipped is what is used."""
    with torch.no_grad():
        for tensor in model.state_dict().values():
            tensor.copy_(tensor.half())
    return model


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def compiled(function: Callable[..., Any], device: torch.device) -> Callable[..., Any]:
    """The function, compiled for a GPU; as it is elsewhere."""
    return torch.compile(function, dynamic=False) if device.type == "cuda" else function


def on_every_device(work: Callable[..., None], *arguments: Any, processes: int | None = None) -> None:
    """Run ``work(device, rank, *arguments)`` in one process a GPU, or in ``processes`` on the CPU, as one group."""
    count = processes or max(1, torch.cuda.device_count())
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_worker, (count, f"file://{Path(folder) / 'group'}", work, arguments), nprocs=count)


def _worker(rank: int, count: int, meeting: str, work: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", rank) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // count))
    prepare(device)
    dist.init_process_group("nccl" if on_gpu else "gloo", init_method=meeting, rank=rank, world_size=count)
    try:
        work(device, rank, *arguments)
    finally:
        dist.destroy_process_group()


def prepare(device: torch.device) -> None:
    """TF32 where float32 products remain; autocast does most in 16 bits."""
    if device.type == "cuda":
        torch.set_float32_matmul_precision("high")


def mean_of_processes(value: Tensor) -> Tensor:
    """The mean of a tensor over all processes."""
    value = value.clone()
    dist.all_reduce(value)
    return value / dist.get_world_size()
