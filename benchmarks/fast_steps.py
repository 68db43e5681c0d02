"""Steps in the form that `--fast` chooses, beside plain ones and DDP, in turns: `python -m benchmarks.fast_steps`.

The choice is made for a job of many steps, as a user's would be; what is measured are short runs of the job that
came out of it, in fresh processes.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from statistics import median

from benchmarks.compare import run_command
from benchmarks.models import WORKLOADS, warm_up_steps
from benchmarks.recorded import record
from benchmarks.variants import peer_command
from shoal.bench.laps import rotated
from shoal.launch.fast import in_fastest_form
from shoal.spec import Cluster, Job

MODELS = ("conv", "gpt", "mlp")
WORKERS = 2
LONG_STEPS = 20_000
PLAIN, FAST, DDP = "plain", "fast", "ddp"


def job_of(model: str, steps: int, *, precision: str, device: str, workers: int) -> Job:
    """So many plain steps."""
    return Job(
        target="benchmarks.tasks:task",
        args={"model": model, "processes": workers, "steps": steps},
        cluster=Cluster(workers=workers, threads=1, device=device),
        precision=precision if precision != "auto" else "fp32",
    )


def compare(model: str, given: argparse.Namespace) -> dict[str, object]:
    """How many times as fast the chosen form is, round by round; on CPUs also beside torch's DDP."""
    steps = given.steps or WORKLOADS[model]().steps
    plain = job_of(model, LONG_STEPS, precision=given.precision, device=given.device, workers=given.workers)
    chosen, text = in_fastest_form(replace(plain, fast=True, precision=given.precision))
    print(f"{model}: {text}", file=sys.stderr, flush=True)
    warm = warm_up_steps(steps) + 6
    short = {"model": model, "processes": given.workers, "steps": steps + warm}
    jobs = {PLAIN: replace(plain, args=short), FAST: replace(chosen, args=short)}
    names = [PLAIN, FAST, *[DDP] * (given.device == "cpu")]
    found: dict[str, list[float]] = {name: [] for name in names}
    losses: dict[str, float] = {}
    for turn in range(given.rounds):
        for name in rotated(names, turn):
            if name == DDP:
                found[DDP].append(run_command(peer_command(DDP, model, given.workers, steps)).step_s)
                continue
            run = record(jobs[name])
            times = [after - before for (before, _), (after, _) in pairwise(run.timeline)]
            found[name].append(median(times[-steps:]))
            losses[name] = run.results["loss"]
    ratios, beside_ddp = (
        [slow / quick for slow, quick in zip(found.get(name, ()), found[FAST], strict=False)]
        for name in (PLAIN, DDP)
    )
    return {
        "model": model,
        "chosen": str(chosen.form),
        "precision": chosen.precision,
        "ratio": round(median(ratios), 3),
        "ratios": [round(ratio, 3) for ratio in ratios],
        "times_ddp": [round(ratio, 3) for ratio in beside_ddp],
        "plain_ms": round(median(found[PLAIN]) * 1e3, 2),
        "fast_ms": round(median(found[FAST]) * 1e3, 2),
        "losses": losses,
    }


def main(argv: Sequence[str]) -> None:
    """Print one line of JSON for each model."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, help="measured steps of a run; default the model's own number")
    parser.add_argument("--workers", type=int, default=WORKERS)
    parser.add_argument("--precision", default="auto")
    parser.add_argument("--device", default="cpu")
    given = parser.parse_args(argv)
    for model in given.models.split(","):
        print(json.dumps(compare(model, given)), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
