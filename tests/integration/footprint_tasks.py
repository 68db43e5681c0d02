"""A model of any size, whose workers leave a note of how much address space they begin with."""

import os
import resource
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import shoal

DEPTH = 8
KEPT = {"sgd": 0, "adamw": 2}


class Residual(nn.Module):
    """Adds to what it was given."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(x))


def task(folder: str = "", state_mb: int = 16, optimizer: str = "adamw", steps: int = 3) -> shoal.Task:
    """Parameters, gradients and what the optimizer keeps are so many megabytes together."""
    if folder and resource.getrlimit(resource.RLIMIT_AS)[0] != resource.RLIM_INFINITY:  # a worker
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
        (Path(folder) / str(os.getpid())).write_text(str(pages * resource.getpagesize()), encoding="ascii")
    parameters = state_mb * 1e6 / (2 + KEPT[optimizer])
    width = int((parameters / 4 / DEPTH) ** 0.5)
    generator = torch.Generator().manual_seed(5)
    makers = {
        "sgd": lambda params: torch.optim.SGD(params, lr=1e-3),
        "adamw": lambda params: torch.optim.AdamW(params, lr=1e-4),
    }
    return shoal.Task(
        model=lambda: nn.Sequential(
            nn.Linear(16, width), *(Residual(width) for _ in range(DEPTH)), nn.Linear(width, 4)
        ),
        loss=F.cross_entropy,
        optimizer=makers[optimizer],
        train=TensorDataset(
            torch.randn(64, 16, generator=generator), torch.randint(0, 4, (64,), generator=generator)
        ),
        batch_size=16,
        max_steps=steps,
    )
