"""Models that others have written, or compile."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from zoo_data import BATCH, CLASSES, COLUMNS, STEPS, classes_of, sgd, table, task

import shoal
from helpers.hugging_face import MODELS, samples

PADDING = -100


def _hugging_face(name: str, rows: list[dict[str, Any]], **fields: Any) -> shoal.Task:
    usual = {"optimizer": sgd, "batch_size": BATCH, "epochs": 100, "max_steps": STEPS}
    return shoal.Task.from_huggingface(MODELS[name], rows, **usual | fields)


def bert() -> shoal.Task:
    """Rows have a mask for what is padding, and a text, which no model reads."""
    rows = [{**row, "text": "as it was written"} for row in samples("bert", 48)]
    return _hugging_face("bert", rows, test=rows[:16])


def gpt2() -> shoal.Task:
    """Its loss is a mean over tokens, of which some do not count."""
    rows = samples("gpt2", 48)
    for number, row in enumerate(rows):
        row["labels"] = row["labels"].clone()
        row["labels"][: number % 5] = PADDING
    return _hugging_face("gpt2", rows)


def llama() -> shoal.Task:
    return _hugging_face("llama", samples("llama", 48))


def vit() -> shoal.Task:
    return _hugging_face("vit", samples("vit", 48))


def compiled() -> shoal.Task:
    """Followed by torch's compiler; what it would make of it for a processor takes too long here."""

    def model() -> nn.Module:
        layers = nn.Sequential(nn.Linear(COLUMNS, 16), nn.GELU(), nn.Linear(16, CLASSES))
        made: nn.Module = torch.compile(layers, backend="eager")
        return made

    inputs = table()
    return task(model, inputs, classes_of(inputs))
