"""One warm zygote for all comparisons, and a short way to train a small task."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from shoal.checkpoint import load_tensors
from shoal.launch import LocalEngine, Supervisor, ZygoteProcess, start_zygote
from shoal.observe import Event
from shoal.spec import Cluster, Job

TASKS = Path(__file__).with_name("small_tasks.py")


@pytest.fixture(scope="session")
def zygote() -> Iterator[ZygoteProcess]:
    with start_zygote() as process:
        yield process


@dataclass(frozen=True)
class Trained:
    """What a run left: model, optimizer state, and what it told."""

    model: dict[str, torch.Tensor]
    state: dict[str, torch.Tensor]
    results: dict[str, Any]
    events: list[Event]

    def digests(self) -> tuple[str, str]:
        return self.results["digest"], self.results["state_digest"]


Train = Callable[..., Trained]


@pytest.fixture
def train(tmp_path: Path, zygote: ZygoteProcess) -> Train:
    """Train one of the small tasks: `train("mlp", workers=2, slots=4, optimizer="adamw")`."""
    count = 0

    def run(
        model: str,
        *,
        workers: int = 1,
        slots: int | None = None,
        strategy: str = "data:via=arena",
        spares: int = 0,
        numerics: str = "task",
        overrides: dict[str, Any] | None = None,
        on_event: Callable[[Event], None] = lambda event: None,
        **args: Any,
    ) -> Trained:
        nonlocal count
        count += 1
        folder = tmp_path / f"run-{count}"
        folder.mkdir()
        job = Job(
            target=f"{TASKS}:{model}",
            args=args,
            strategy=strategy,
            cluster=Cluster(workers=workers, threads=1, spares=spares),
            slots=slots,
            numerics=numerics,
            overrides=overrides or {},
            run_dir=str(folder),
            options={"state": str(folder / "state.safetensors")},
        )
        events: list[Event] = []

        def listen(event: Event) -> None:
            events.append(event)
            on_event(event)

        results = Supervisor(job, listen, LocalEngine(zygote)).run()
        model_tensors = load_tensors(folder / "model.safetensors")
        return Trained(model_tensors, load_tensors(folder / "state.safetensors"), results, events)

    return run


def largest_difference(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> float:
    """The largest difference, relative to the largest magnitude of its tensor."""
    assert left.keys() == right.keys()
    worst = 0.0
    for name, a in left.items():
        b = right[name]
        if a.is_floating_point() and a.numel():
            scale = max(float(a.abs().max()), float(b.abs().max()), 1e-12)
            worst = max(worst, float((a.double() - b.double()).abs().max()) / scale)
        else:
            assert torch.equal(a, b), name
    return worst
