"""A script for torchrun: the benchmark's small perceptron under DDP, with checkpoints written by hand.

What one writes to survive a killed worker without Shoal: every 50 steps the first rank saves model and optimizer
under another name and renames the file; after a restart all ranks load it and go on from there. Only torch is
imported. It trains until it is ended. Each line of the timeline says when how many samples were committed, as with
Shoal's workers.
"""

import itertools
import os
import sys
import time
from pathlib import Path
from typing import Any

WIDTHS = (256, *[1024] * 4, 100)
BATCH, BATCHES = 64, 8
LEARNING_RATE, MOMENTUM = 0.01, 0.9
CHECKPOINT_EVERY = 50


def train(folder: Path) -> None:
    """One rank's life between two restarts."""
    import torch
    from torch import distributed, nn
    from torch.nn.parallel import DistributedDataParallel

    torch.set_num_threads(1)
    distributed.init_process_group("gloo")
    rank = distributed.get_rank()
    torch.manual_seed(0)
    pairs = itertools.pairwise(WIDTHS)
    layers = [layer for sizes in pairs for layer in (nn.Linear(*sizes), nn.ReLU())][:-1]
    model = DistributedDataParallel(nn.Sequential(*layers))
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE, momentum=MOMENTUM)
    generator = torch.Generator().manual_seed(1000 + rank)
    batches = [
        (
            torch.randn(BATCH, WIDTHS[0], generator=generator),
            torch.randint(0, WIDTHS[-1], (BATCH,), generator=generator),
        )
        for _ in range(BATCHES)
    ]
    timeline = os.open(folder / "timeline", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    for step in itertools.count(load(folder, model, optimizer) + 1):
        inputs, target = batches[(step - 1) % BATCHES]
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), target).backward()
        optimizer.step()
        if rank == 0:
            samples = step * BATCH * distributed.get_world_size()
            os.write(timeline, f"{time.time():.6f} {samples}\n".encode())
            if step % CHECKPOINT_EVERY == 0:
                save(folder, model, optimizer, step)


def save(folder: Path, model: Any, optimizer: Any, step: int) -> None:
    """Write a checkpoint that is there as a whole or not at all."""
    import torch

    state = {"step": step, "model": model.state_dict(), "optimizer": optimizer.state_dict()}
    torch.save(state, folder / "checkpoint.new")
    os.replace(folder / "checkpoint.new", folder / "checkpoint.pt")


def load(folder: Path, model: Any, optimizer: Any) -> int:
    """Take up the last checkpoint, if there is one; its step."""
    import torch

    if not (folder / "checkpoint.pt").exists():
        return 0
    state = torch.load(folder / "checkpoint.pt", weights_only=True)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    return int(state["step"])


if __name__ == "__main__":
    train(Path(sys.argv[1]))
