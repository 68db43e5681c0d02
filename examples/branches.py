"""Handwritten digits by two branches, one that looks at shapes and one that looks at single pixels, and by layers.

    shoal train examples/branches.py --workers 2 --strategy layer:place=shapes@0+pixels@1+judge@0
    shoal train examples/branches.py --workers 2 --strategy layer:decoupled=on
    shoal train examples/branches.py --workers 2 --strategy layer:phases=2,every=20

In the first, each branch runs on a worker of its own, at the same time; the numbers are those of one process.
In the second, the branches train by a head of their own, while the judge trains on what they send. In the third,
branches and judge take turns.

Expected: a test accuracy of about 0.97, 0.97 and 0.92 after 10 epochs, in seconds.
"""

import torch
from torch import Tensor, nn

import shoal


class Branches(nn.Module):
    """Both branches read the image; the judge reads what both of them found."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.shapes = nn.Sequential(
            nn.Conv2d(1, width, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(width, width, 3, stride=2, padding=1),
            nn.ReLU(),
            nn.Flatten(),
        )
        self.pixels = nn.Sequential(nn.Flatten(), nn.Linear(64, 8 * width), nn.ReLU())
        self.judge = nn.Sequential(nn.Linear(24 * width, 4 * width), nn.ReLU(), nn.Linear(4 * width, 10))

    def forward(self, image: Tensor) -> Tensor:
        return self.judge(torch.cat([self.shapes(image), self.pixels(image)], dim=1))


def task(width: int = 16, lr: float = 0.05) -> shoal.Task:
    """What to train. Who runs which layer is the strategy's business."""
    train, test = shoal.datasets.digits_images()
    return shoal.Task(
        model=lambda: Branches(width),
        loss=nn.functional.cross_entropy,
        optimizer=lambda params: torch.optim.SGD(params, lr=lr, momentum=0.9),
        train=train,
        test=test,
        batch_size=64,
        epochs=10,
        metrics={"accuracy": shoal.metrics.accuracy},
    )
