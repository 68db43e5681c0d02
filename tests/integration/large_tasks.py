"""A model that is large where memory is scarce: 40 MiB of parameters, 160 MiB with all that training keeps."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import shoal

WIDTH = 1146
DEPTH = 8


class Residual(nn.Module):
    """Adds to what it was given."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(x))


def _initialise(module: nn.Module) -> None:
    if isinstance(module, nn.Linear):
        nn.init.normal_(module.weight, std=0.01)


def _model(depth: int) -> nn.Module:
    blocks = [Residual(WIDTH) for _ in range(depth)]
    net = nn.Sequential(nn.Linear(16, WIDTH), *blocks, nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4))
    return net.apply(_initialise)


def task(steps: int = 2, depth: int = DEPTH) -> shoal.Task:
    generator = torch.Generator().manual_seed(5)
    inputs = torch.randn(64, 16, generator=generator)
    return shoal.Task(
        model=lambda: _model(depth),
        loss=F.cross_entropy,
        optimizer=lambda params: torch.optim.AdamW(params, lr=1e-4),
        train=TensorDataset(inputs, torch.randint(0, 4, (64,), generator=generator)),
        batch_size=16,
        max_steps=steps,
    )
