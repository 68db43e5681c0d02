"""A GPU and the processors beside it in one job: `python -m benchmarks.mixed_devices [processors|gpt]`.

A perceptron on parts of 256 samples, through a parameter server (`sync=asp`): the GPU alone, so many workers on
processors alone, and all of them. Each is a run of its own, whose samples per second are those of its middle part.
`gpt`: GPT of the size of GPT-2 under `data`, on the GPU alone, and with two workers on processors, which are
measured and left out.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Sequence
from io import StringIO
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from shoal.launch.local import LocalEngine
from shoal.launch.owner import ZygoteProcess, start_zygote
from shoal.launch.runs import train
from shoal.launch.supervisor import Supervisor
from shoal.roles.process.timeline import read_timeline
from shoal.spec import Cluster, Job, Task

CELL, WIDTH = 256, 512
SECONDS = 4.0


def task(workers: int, steps: int) -> Task:
    """The same parts for everybody: a global batch has one for each worker."""
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(32 * CELL, WIDTH, generator=generator)
    target = torch.randint(0, 10, (32 * CELL,), generator=generator)
    return Task(
        model=lambda: nn.Sequential(
            nn.Linear(WIDTH, WIDTH),
            nn.ReLU(),
            nn.Linear(WIDTH, WIDTH),
            nn.ReLU(),
            nn.Linear(WIDTH, WIDTH),
            nn.ReLU(),
            nn.Linear(WIDTH, 10),
        ),
        loss=F.cross_entropy,
        optimizer=lambda params: torch.optim.AdamW(params, lr=1e-4),
        train=torch.utils.data.TensorDataset(inputs, target),
        batch_size=CELL * workers,
        epochs=100_000,
        max_steps=steps,
    )


def measure(
    zygote: ZygoteProcess, name: str, strategy: str, workers: int, device: str, rate: float
) -> dict[str, Any]:
    """Samples per second of a run that takes about `SECONDS` at this rate."""
    steps = max(60, int(SECONDS * rate / (CELL * workers)))
    with tempfile.TemporaryDirectory(prefix="shoal-mixed-") as folder:
        path = Path(folder) / "timeline"
        job = Job(
            target="benchmarks.mixed_devices:task",
            args={"workers": workers, "steps": steps},
            strategy=strategy,
            cluster=Cluster(workers=workers, threads=1, device=device),
            options={"timeline": str(path), "evaluate": False},
        )
        Supervisor(job, lambda event: None, LocalEngine(zygote)).run()
        marks = read_timeline(path)
    first, last = len(marks) // 4, len(marks) * 9 // 10
    found = (marks[last][1] - marks[first][1]) / (marks[last][0] - marks[first][0])
    return {"variant": name, "workers": workers, "steps": steps, "samples_per_s": round(found)}


def measure_gpt(zygote: ZygoteProcess, strategy: str, workers: int, device: str) -> dict[str, Any]:
    """Samples per second over the last 30 of 40 steps, and what the run said of its devices."""
    told = StringIO()
    with tempfile.TemporaryDirectory(prefix="shoal-mixed-") as folder:
        path = Path(folder) / "timeline"
        job = Job(
            target="benchmarks.gpu_steps:gpt_task",
            strategy=strategy,
            precision="bf16",
            cluster=Cluster(workers=workers, device=device),
            overrides={"max_steps": 40},
            options={"timeline": str(path)},
        )
        train(job, runs=folder, output=told, zygote=zygote)
        marks = read_timeline(path)
    found = (marks[-1][1] - marks[9][1]) / (marks[-1][0] - marks[9][0])
    said = [line for line in told.getvalue().splitlines() if "cuda+cpu" in line and "processor" in line]
    return {"strategy": strategy, "device": device, "samples_per_s": round(found, 1), "said": said}


def main(argv: Sequence[str]) -> None:
    """Each way; the rates are guesses, from which follows how many steps it takes."""
    if argv[:1] == ["gpt"]:
        with start_zygote() as zygote:
            for strategy, workers, device in (("data", 1, "cuda"), ("data:shares=speed", 3, "cuda+cpu")):
                print(json.dumps(measure_gpt(zygote, strategy, workers, device)), flush=True)
        return
    beside = int(argv[0]) if argv else 8
    ways = (
        ("gpu", "ps:sync=asp", 1, "cuda", 60_000),
        ("processors", "ps:sync=asp", beside, "cpu", 5_000 * beside),
        ("both", "ps:sync=asp", beside + 1, "cuda+cpu", 60_000 + 4_000 * beside),
        ("gpu, data", "data", 1, "cuda", 60_000),
    )
    with start_zygote() as zygote:
        for name, strategy, workers, device, rate in ways:
            print(json.dumps(measure(zygote, name, strategy, workers, device, rate)), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
