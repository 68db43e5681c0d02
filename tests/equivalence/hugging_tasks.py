"""Hugging Face's models, with a loss of output and target, or with their own."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional as F

import shoal
from helpers.hugging_face import MODELS, samples


def hugging(name: str, how: str = "objective", steps: int = 3) -> shoal.Task:
    rows = samples(name, 24)
    fields: dict[str, Any] = {
        "optimizer": lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9),
        "batch_size": 8,
        "max_steps": steps,
    }
    if how == "objective":
        return shoal.Task.from_huggingface(MODELS[name], rows, test=rows[:8], **fields)
    pairs = [({key: value for key, value in row.items() if key != "labels"}, row["labels"]) for row in rows]
    return shoal.Task(
        model=MODELS[name],
        loss=lambda output, target: F.cross_entropy(output.logits, target),
        train=pairs,
        test=pairs[:8],
        **fields,
    )
