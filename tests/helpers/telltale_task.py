"""Handwritten digits, by a model that leaves in files what it is made of: to look for it where it must not be."""

import os
from pathlib import Path

import torch
from torch import nn

import shoal


class Telltale(nn.Sequential):
    """Writes its first weights and their first gradient to `FOLDER/PART-NETWORK-PROCESS`."""

    def __init__(self, folder: str, *layers: nn.Module) -> None:
        super().__init__(*layers)
        weight = layers[0].weight
        assert isinstance(weight, torch.Tensor)
        network = os.stat("/proc/self/ns/net").st_ino

        def tell(gradient: torch.Tensor) -> None:
            for part, found in (("gradient", gradient), ("weight", weight)):
                file = Path(folder, f"{part}-{network}-{os.getpid()}")
                if not file.exists():
                    file.write_bytes(found.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes())

        if not weight.is_meta:
            weight.register_hook(tell)


def task(folder: str, steps: int = 12) -> shoal.Task:
    """The first worker sends the others their samples."""
    return shoal.Task(
        model=lambda: Telltale(folder, nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10)),
        loss=nn.functional.cross_entropy,
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
        train=shoal.datasets.Shipped(lambda: shoal.datasets.digits()[0]),
        batch_size=64,
        max_steps=steps,
    )
