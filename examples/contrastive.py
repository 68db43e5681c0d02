"""Which lower half of a digit belongs to which upper half? Two encoders that compare all halves of a batch.

    shoal train examples/contrastive.py
    shoal train examples/contrastive.py --workers 2
    shoal verify examples/contrastive.py --workers 2

Every worker has the pairs of its part alone; `shoal.gather` gives it those of all, so that two workers train what
one process trains. Without it each would learn to tell apart half as many.
"""

import torch
from torch import nn
from torch.nn import functional

import shoal

PIXELS = 32
"""Of half a digit."""


def encoder(width: int) -> nn.Sequential:
    """From half a digit to a direction in a space of 32 dimensions."""
    return nn.Sequential(nn.Linear(PIXELS, width), nn.ReLU(), nn.Linear(width, 32))


class Halves(nn.Module):
    """What the two encoders make of a digit's halves."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.upper, self.lower = encoder(width), encoder(width)

    def forward(self, digits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        upper, lower = self.upper(digits[:, :PIXELS]), self.lower(digits[:, PIXELS:])
        return functional.normalize(upper, dim=1), functional.normalize(lower, dim=1)


def contrast(halves: tuple[torch.Tensor, torch.Tensor], digit: torch.Tensor) -> torch.Tensor:
    """Each half must find its other half among those of the whole batch."""
    upper, lower = halves
    uppers, own = shoal.gather(upper, with_own=True)
    lowers = shoal.gather(lower)
    belongs = torch.arange(own.start, own.stop)
    found = functional.cross_entropy(upper @ lowers.T / 0.1, belongs)
    return (found + functional.cross_entropy(lower @ uppers.T / 0.1, belongs)) / 2


def matched(halves: tuple[torch.Tensor, torch.Tensor], digit: torch.Tensor) -> torch.Tensor:
    """How many upper halves of a batch find their own lower half."""
    upper, lower = halves
    return ((upper @ lower.T).argmax(1) == torch.arange(len(upper))).float().mean()


def task(width: int = 128, lr: float = 2e-3) -> shoal.Task:
    """What to train."""
    train, test = shoal.datasets.digits()
    return shoal.Task(
        model=lambda: Halves(width),
        loss=contrast,
        optimizer=lambda params: torch.optim.AdamW(params, lr=lr),
        train=train,
        test=test,
        batch_size=64,
        epochs=20,
        metrics={"matched": matched},
    )
