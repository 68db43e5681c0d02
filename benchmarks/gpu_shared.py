"""Workers that share one GPU beside one that has it alone, with the same batch: `python -m benchmarks.gpu_shared
[gpt|mlp …]`.

Whole runs, as a user starts them, in turns; the steps' times are those of the run's own timeline. Prints one line
of JSON for each run.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.gpu_steps import TASKS
from shoal.launch.local import LocalEngine
from shoal.launch.owner import ZygoteProcess, start_zygote
from shoal.launch.supervisor import Supervisor
from shoal.roles.process.timeline import read_timeline
from shoal.spec import Cluster, Job

WAYS: dict[str, dict[str, Any]] = {
    "one worker": {},
    "two workers": {"workers": 2, "strategy": "data:via=arena"},
    "one worker, two slots": {"strategy": "data:via=arena", "slots": 2},
    "two workers, no shadow": {"workers": 2, "strategy": "data:via=arena,journal=off"},
    "two workers, gloo": {"workers": 2, "strategy": "data:via=backend"},
    "one worker, compiled": {"compile": True},
    "two workers, compiled": {"workers": 2, "strategy": "data:via=arena", "compile": True},
}
ROUNDS = {
    "gpt": ("one worker", "two workers", "one worker", "two workers"),
    "gpt-compiled": ("one worker, compiled", "two workers, compiled"),
    "mlp": ("one worker", "two workers", "one worker", "two workers", "two workers, gloo"),
}
STEPS = {"gpt": 60, "gpt-compiled": 60, "mlp": 2000}
SOURCE = Path(__file__).with_name("gpu_steps.py")


def measure(zygote: ZygoteProcess, model: str, way: str) -> dict[str, Any]:
    """One run."""
    asked, steps = dict(WAYS[way]), STEPS[model]
    with tempfile.TemporaryDirectory() as folder:
        timeline = Path(folder) / "timeline"
        job = Job(
            target=f"{SOURCE}:{model.partition('-')[0]}_task",
            cluster=Cluster(workers=asked.pop("workers", 1), device="cuda", threads=4),
            precision="bf16",
            overrides={"max_steps": steps},
            options={"timeline": str(timeline), "quiet": True},
            **asked,
        )
        loss = Supervisor(job, lambda event: None, LocalEngine(zygote)).run()["loss"]
        marks = [when for when, _ in read_timeline(timeline)]
    # The first steps make ready; of the last ones the losses are known before the steps are done.
    times = [after - before for before, after in pairwise(marks)][steps // 3 : -5]
    return {
        "model": model,
        "way": way,
        "ms": round(sum(times) / len(times) * 1e3, 3),
        "median_ms": round(median(times) * 1e3, 3),
        "loss": loss,
    }


def main(argv: Sequence[str]) -> None:
    """All ways of these models, in turns."""
    zygote = start_zygote()
    try:
        for model in argv or list(ROUNDS):
            assert model.partition("-")[0] in TASKS
            found = []
            for way in ROUNDS[model]:
                found.append(measure(zygote, model, way))
                print(json.dumps(found[-1]), flush=True)
            alone = [one["ms"] for one in found if one["way"].startswith("one")]
            shared = [one["ms"] for one in found if one["way"] in ("two workers", "two workers, compiled")]
            print(json.dumps({"model": model, "ratio": round(median(alone) / median(shared), 3)}), flush=True)
    finally:
        zygote.close()


if __name__ == "__main__":
    main(sys.argv[1:])
