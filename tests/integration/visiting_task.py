"""A task whose loss notes, for some steps in the middle of a run, in which files of Shoal functions are called."""

import json
import os
import sys
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import TensorDataset

import shoal

FIRST, LAST = 10, 110
"""Calls of the loss; from one to the next is a whole step. Now and then something else happens in one, too."""
SOURCE = str(Path(shoal.__file__).parent)
_calls = 0
_visited: list[set[str]] = []


def _note(frame, event, argument):
    if event == "call" and frame.f_code.co_filename.startswith(SOURCE):
        _visited[-1].add(os.path.relpath(frame.f_code.co_filename, SOURCE))


def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    global _calls
    _calls += 1
    if FIRST <= _calls < LAST:
        _visited.append(set())
        sys.setprofile(_note)
    elif _calls == LAST:
        sys.setprofile(None)
        steps = [sorted(files) for files in _visited]
        (Path(os.environ["VISITED"]) / f"{os.getpid()}.json").write_text(json.dumps(steps))
    return nn.functional.cross_entropy(output, target)


def task() -> shoal.Task:
    inputs, target = torch.randn(256, 8), torch.randint(0, 4, (256,))
    return shoal.Task(
        model=lambda: nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)),
        loss=loss,
        optimizer=lambda params: torch.optim.AdamW(params, lr=1e-3),
        train=TensorDataset(inputs, target),
        batch_size=8,
        epochs=12,
    )
