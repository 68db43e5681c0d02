"""A task whose loss notes, for one step in the middle of a run, in which files of Shoal a worker calls functions."""

import os
import sys
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import TensorDataset

import shoal

FIRST, LAST = 20, 21
"""Calls of the loss between which is noted: one whole step, long after all has been set up."""
SOURCE = str(Path(shoal.__file__).parent)
_calls = 0
_visited: set[str] = set()


def _note(frame, event, argument):
    if event == "call" and frame.f_code.co_filename.startswith(SOURCE):
        _visited.add(os.path.relpath(frame.f_code.co_filename, SOURCE))


def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    global _calls
    _calls += 1
    if _calls == FIRST:
        sys.setprofile(_note)
    elif _calls == LAST:
        sys.setprofile(None)
        (Path(os.environ["VISITED"]) / f"{os.getpid()}.txt").write_text("\n".join(sorted(_visited)))
    return nn.functional.cross_entropy(output, target)


def task() -> shoal.Task:
    inputs, target = torch.randn(256, 8), torch.randint(0, 4, (256,))
    return shoal.Task(
        model=lambda: nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)),
        loss=loss,
        optimizer=lambda params: torch.optim.AdamW(params, lr=1e-3),
        train=TensorDataset(inputs, target),
        batch_size=8,
        max_steps=40,
    )
