"""Train a small task with real workers, and compare what is left."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from shoal.checkpoint.listing import read_manifest
from shoal.checkpoint.model_file import load_tensors
from shoal.launch.local import LocalEngine
from shoal.launch.owner import ZygoteProcess
from shoal.launch.resuming import resumed_job
from shoal.launch.supervisor import Supervisor
from shoal.observe import Event
from shoal.observe.checkpoint_names import find_checkpoint
from shoal.spec import Cluster, Job


@dataclass(frozen=True)
class Trained:
    """What a run left: model, optimizer state, and what it told."""

    model: dict[str, torch.Tensor]
    state: dict[str, torch.Tensor]
    results: dict[str, Any]
    events: list[Event]
    job: Job

    def digests(self) -> tuple[str, str]:
        return self.results["digest"], self.results["state_digest"]

    def told(self, kind: str) -> list[dict[str, Any]]:
        """What the events of a kind said."""
        return [dict(event.values) for event in self.events if event.kind == kind]

    def losses(self) -> dict[int, float]:
        """By step, as they were told."""
        return dict(pair for told in self.told("steps") for pair in told["steps"])


@dataclass
class Train:
    """Trains one of a file's tasks: `train("mlp", workers=2, slots=4, optimizer="adamw")`."""

    tasks: Path
    folder: Path
    zygote: ZygoteProcess
    runs: list[Path] = field(default_factory=list)
    made_once: dict[str, Trained] = field(default_factory=dict)
    """By how they were trained: runs that many are compared with."""

    def __call__(
        self,
        factory: str,
        *,
        workers: int = 1,
        slots: int | None = None,
        strategy: str = "data:via=arena",
        spares: int = 0,
        cluster: Cluster | None = None,
        numerics: str = "task",
        precision: str = "fp32",
        privacy: str = "none",
        checkpoint: str = "none",
        chaos: str = "",
        overrides: dict[str, Any] | None = None,
        on_event: Callable[[Event], None] = lambda event: None,
        **args: Any,
    ) -> Trained:
        job = Job(
            target=f"{self.tasks}:{factory}",
            args=args,
            strategy=strategy,
            cluster=cluster or Cluster(workers=workers, threads=1, spares=spares),
            slots=slots,
            numerics=numerics,
            precision=precision,
            privacy=privacy,
            overrides=overrides or {},
            checkpoint=checkpoint,
            chaos=chaos,
        )
        return self.run(job, on_event)

    def once(self, factory: str, **how: Any) -> Trained:
        """A run that others are compared with: trained by the first who asks for it, in a whole session."""
        written = f"{self.tasks}:{factory} {sorted(how.items())}"
        if written not in self.made_once:
            self.made_once[written] = self(factory, **how)
        return self.made_once[written]

    def resume(self, saved: Trained, step: int, *, args: dict[str, Any] | None = None, **changes: Any) -> Trained:
        """Go on after a step that a run has saved, in another folder; what is not changed stays as it was."""
        path = find_checkpoint(f"{saved.job.run_dir}@{step}")
        job = resumed_job(saved.job, path, read_manifest(path), changes)
        return self.run(replace(job, args={**job.args, **(args or {})}))

    def run(self, job: Job, on_event: Callable[[Event], None] = lambda event: None) -> Trained:
        """Run a job in a folder of its own."""
        folder = self.folder / f"run-{len(self.runs) + 1}"
        folder.mkdir()
        self.runs.append(folder)
        options = {**job.options, "state": str(folder / "state.safetensors")}
        job = replace(job, run_dir=str(folder), options=options)
        (folder / "job.json").write_text(job.to_json())
        events: list[Event] = []

        def listen(event: Event) -> None:
            events.append(event)
            on_event(event)

        results = Supervisor(job, listen, LocalEngine(self.zygote)).run()
        model = load_tensors(folder / "model.safetensors")
        return Trained(model, load_tensors(folder / "state.safetensors"), results, events, job)


def relative_distance(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    """Between two models as long vectors, beside the length of the other."""
    apart = sum(float((one[name].double() - tensor.double()).square().sum()) for name, tensor in other.items())
    length = sum(float(tensor.double().square().sum()) for tensor in other.values())
    return math.sqrt(apart / length)


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
