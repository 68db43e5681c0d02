"""A run of Shoal with all that it leaves behind: its timeline, its results, its events."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from benchmarks.measurement import Timeline
from shoal.checkpoint.model_file import load_tensors
from shoal.launch.supervisor import run_job
from shoal.observe import Event, RunFolder
from shoal.roles.process.timeline import read_timeline
from shoal.spec import Job


@dataclass(frozen=True)
class Recorded:
    """A run that has come to its end."""

    timeline: Timeline
    results: dict[str, Any]
    events: Sequence[Event]
    model: Mapping[str, Any] = field(default_factory=dict)
    """What it has trained, by name."""

    def of_kind(self, kind: str) -> list[Event]:
        """The events of one kind, in order."""
        return [event for event in self.events if event.kind == kind]


def record(job: Job) -> Recorded:
    """Run a job in fresh processes to its end, in a folder that is gone afterwards."""
    events: list[Event] = []
    with tempfile.TemporaryDirectory(prefix="shoal-bench-") as folder:
        path = Path(folder) / "timeline"
        options = {**job.options, "timeline": str(path)}
        results = run_job(replace(job, run_dir=folder, options=options), events.append)
        return Recorded(read_timeline(path), results, events, load_tensors(RunFolder(Path(folder)).model))
