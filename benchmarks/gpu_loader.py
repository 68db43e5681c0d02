"""A loader that takes half a step's time, beside data that lies on the GPU: `python -m benchmarks.gpu_loader`.

GPT of the size of GPT-2, bf16, trained by `Trainer.fit`. The first line is a loop through the same steps
whose batches lie on the GPU; then the task's data set takes its time for every batch, in numpy (other threads run
meanwhile) or in Python alone, in a thread or in processes of its own. Every line is a process of its own.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch

from benchmarks.gpu_steps import BATCH, CONTEXT, TASKS
from shoal.feed.parts import Part
from shoal.roles.trainer.trainer import Trainer
from shoal.spec import StepForm
from shoal.spec.callback import Callback
from shoal.step.work import Work

WARM, STEPS = 20, 100
VARIANTS = ("on the gpu", "at hand", "numpy", "python", "python loaders")


class SlowRows:
    """Rows of tensors that take some time to read."""

    def __init__(self, tensors: Sequence[torch.Tensor], batch_s: float, kind: str) -> None:
        self._tensors = tensors
        self._batch_s = batch_s
        self._kind = kind
        self._noise = np.random.default_rng(1).standard_normal(200_000)

    def __len__(self) -> int:
        return len(self._tensors[0])

    def __getitem__(self, number: int) -> Any:
        return tuple(tensor[number] for tensor in self._tensors)

    def __getitems__(self, numbers: list[int]) -> list[Any]:
        until = time.perf_counter() + self._batch_s
        while time.perf_counter() < until:
            _ = np.sort(self._noise) if self._kind == "numpy" else sum(range(2000))
        return [self[number] for number in numbers]


class Marks(Callback):
    """When steps were done."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def on_step(self, context: Any) -> None:
        self.times.append(time.perf_counter())


def measure(variant: str, step_s: float) -> dict[str, Any]:
    """Seconds of a step."""
    torch.set_float32_matmul_precision("high")
    marks, task = Marks(), TASKS["gpt"]()
    kind, _, loaders = variant.partition(" ")
    if kind in ("numpy", "python"):
        task = replace(task, train=SlowRows(task.train.tensors, step_s / 2, kind), loaders=2 if loaders else 0)
    task = replace(task, callbacks=(marks,), max_steps=WARM + STEPS)
    form = StepForm()
    if variant == "on the gpu":
        with Trainer(replace(task, callbacks=()), device="cuda", precision="bf16", form=form) as trainer:
            tensors = [tensor.cuda() for tensor in TASKS["gpt"]().train.tensors]
            strategy, opened = trainer._training.strategy, []
            for step in range(1, WARM + STEPS + 1):
                rows = slice(step % 4 * BATCH, step % 4 * BATCH + BATCH)
                batch = tuple(tensor[rows] for tensor in tensors)
                part = Part(0, partial(iter, [(batch, float(BATCH), BATCH)]), float(BATCH))
                opened.append(strategy.take(Work(step, (part,), 0)))
                if len(opened) > 2:
                    opened.pop(0).result()
                marks.times.append(time.perf_counter())
    else:
        with Trainer(task, device="cuda", precision="bf16", form=form) as trainer:
            trainer.fit()
    found = (marks.times[-1] - marks.times[WARM - 1]) / (len(marks.times) - WARM)
    return {
        "variant": variant,
        "ms": round(found * 1e3, 2),
        "k_tokens_per_s": round(BATCH * CONTEXT / found / 1e3, 1),
    }


def main(argv: Sequence[str]) -> None:
    """All variants, each with the step time that the first one found."""
    if argv[:1] == ["--one"]:
        print(json.dumps(measure(argv[1], float(argv[2]))), flush=True)
        return
    step_s = 0.081
    for variant in argv or VARIANTS:
        command = [sys.executable, "-m", "benchmarks.gpu_loader", "--one", variant, str(step_s)]
        said = subprocess.run(command, check=False, stdout=subprocess.PIPE, text=True, timeout=240).stdout
        print(said.strip(), flush=True)
        if variant == VARIANTS[0] and said.strip():
            step_s = json.loads(said.splitlines()[-1])["ms"] / 1e3


if __name__ == "__main__":
    main(sys.argv[1:])
