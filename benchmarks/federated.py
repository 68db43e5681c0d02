"""Federated averaging beside Flower: `python -m benchmarks.federated [CASE …]`.

The digits of scikit-learn, dealt out to clients by label (Dirichlet), of whom some are missing in every round.
Both sides begin with the same model, the same clients take the same steps on the same samples, and both try the
model on the test set after every round. Flower runs its own simulation, on Ray, in as many processes as we have
workers. Speeds are of all rounds after the first, so what it takes to begin is not counted; both take turns, and
the median counts. What our other ways of averaging come to in the same rounds is told beside.
"""

from __future__ import annotations

import argparse
import json
import runpy
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from io import StringIO
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from benchmarks.environment import FLOWER
from benchmarks.flower_peer import DATA_VARIABLE
from benchmarks.fresh import ROOT, module_command, surroundings
from shoal.checkpoint.model_file import load_tensors
from shoal.cli.failures import show_failure
from shoal.errors import LaunchError, ShoalError
from shoal.launch.runs import train
from shoal.observe import read_events
from shoal.observe.happenings import Evaluated
from shoal.roles.training.training import make_schedule
from shoal.spec import Average, Task, parse_strategy

EXAMPLE = ROOT / "examples" / "digits.py"
WORKERS, EVERY, WIDTH, RATE = 2, 10, 256, 0.05
FLOOR = 5.0
"""What is promised, in times Flower's rounds per second."""
LAST = 5
"""Rounds whose mean accuracy is compared: a single one goes up and down by a point."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """Who takes part."""

    clients: int
    per_round: int
    rounds: int
    alpha: float

    def strategy(self, more: str = "") -> str:
        share = self.per_round / self.clients
        skew = f"partition=dirichlet:{self.alpha:g}"
        return f"average:clients={self.clients},share={share:g},{skew},every={EVERY}{more}"

    @property
    def steps(self) -> int:
        """Of a round: each worker has one client after the other."""
        return self.per_round // WORKERS * EVERY

    @property
    def overrides(self) -> dict[str, Any]:
        """Of the task: there are enough epochs for all rounds, and an evaluation after each."""
        steps = self.rounds * self.steps
        return {"epochs": steps, "max_steps": steps, "evaluate_every": self.steps}


CASES = {
    "10-clients": Case(clients=10, per_round=8, rounds=40, alpha=0.3),
    "200-clients": Case(clients=200, per_round=20, rounds=20, alpha=0.3),
}
OTHERS = {"FedProx": ",prox=0.01", "FedYogi": ",outer=yogi", "SCAFFOLD": ",scaffold=on"}


@dataclass(frozen=True, kw_only=True)
class Course:
    """How one went."""

    name: str
    rounds_per_s: float
    accuracies: Sequence[float]
    """After each round."""
    model: Mapping[str, torch.Tensor]

    @classmethod
    def of(cls, name: str, ends: Sequence[float], accuracies: Sequence[float], model: Mapping[str, Any]) -> Course:
        """`ends`: when each round was over; the first one is not counted."""
        seconds = [last - first for first, last in pairwise(ends)]
        return cls(name=name, rounds_per_s=1 / fmean(seconds), accuracies=accuracies, model=model)

    @property
    def accuracy(self) -> float:
        """In the mean of the last rounds."""
        return fmean(self.accuracies[-LAST:])


def train_shoal(name: str, case: Case, more: str, folder: Path) -> Course:
    """All rounds under averaging."""
    run = train(
        f"{EXAMPLE}:task",
        cluster={"workers": WORKERS, "threads": 1},
        strategy=case.strategy(more),
        args={"width": WIDTH, "lr": RATE},
        runs=folder,
        progress=False,
        output=StringIO(),
        **case.overrides,
    )
    told = [
        (event.time, event.what.results["accuracy"])
        for event in read_events(run.folder)
        if isinstance(event.what, Evaluated)
    ]
    ends, accuracies = zip(*told, strict=True)
    return Course.of(name, ends, accuracies, load_tensors(run.folder / "model.safetensors"))


def train_flower(case: Case, folder: Path) -> Course:
    """The same in Flower's simulation."""
    data = folder / "course.npz"
    write_course(case, data)
    command = [str(FLOWER.require_python()), *module_command("flower_peer")[1:]]
    command += ["--clients", str(case.clients), "--processes", str(WORKERS)]
    environment = surroundings(
        **{DATA_VARIABLE: str(data), "FLWR_TELEMETRY_ENABLED": "0", "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
    )
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode or not lines:
        raise LaunchError(
            f"bench: Flower's simulation failed with status {done.returncode}:\n{done.stderr[-2000:]}"
        )
    told = json.loads(lines[-1])
    model = {name: torch.tensor(values) for name, values in told["model"].items()}
    return Course.of("Flower's FedAvg", told["ends"], told["accuracies"], model)


def write_course(case: Case, path: Path) -> None:
    """What Flower is to do: data, first model, and whose batches are whose in which round."""
    task: Task = replace(runpy.run_path(str(EXAMPLE))["task"](width=WIDTH, lr=RATE), **case.overrides)
    spec = parse_strategy(case.strategy())
    assert isinstance(spec, Average)
    rounds = spec.clients_on(WORKERS)
    schedule = make_schedule(task, task.dataset("train"), WORKERS, WORKERS, rounds)
    own = schedule.batch_size // WORKERS
    samples = np.empty((case.rounds, case.per_round, EVERY, own), dtype=np.int64)
    for step in range(schedule.total_steps):
        number, within = divmod(step, case.steps)
        for cut in schedule.cuts(step + 1, range(WORKERS)):
            samples[number, within // EVERY * WORKERS + cut.slot, within % EVERY] = cut.samples
    torch.manual_seed(task.seed)
    model = task.model()
    arrays = {f"initial {name}": one.numpy() for name, one in model.state_dict().items()}
    for prefix, name in (("", "train"), ("test_", "test")):
        dataset = task.dataset(name)
        arrays[f"{prefix}inputs"], arrays[f"{prefix}targets"] = (
            one.numpy() for one in dataset[np.arange(len(dataset))]
        )
    settings = {
        "clients": case.clients,
        "per_round": case.per_round,
        "rounds": case.rounds,
        "width": WIDTH,
        "lr": RATE,
    }
    np.savez(path, samples=samples, settings=json.dumps(settings), **arrays)


def table(case: Case, courses: Sequence[Course]) -> Table:
    """All of them beside the last, which is Flower's."""
    flower = courses[-1]
    shown = Table("variant", "rounds/s", "times Flower's", f"accuracy, last {LAST} rounds", "at the end", box=None)
    shown.title = f"{case.clients} clients, {case.per_round} in each of {case.rounds} rounds, alpha {case.alpha:g}"
    for course in courses:
        shown.add_row(
            course.name,
            f"{course.rounds_per_s:.1f}",
            f"{course.rounds_per_s / flower.rounds_per_s:.1f}",
            f"{course.accuracy:.4f}",
            f"{course.accuracies[-1]:.4f}",
        )
    return shown


def distance(left: Course, right: Course) -> float:
    """The largest difference of two models, relative to their largest value."""
    largest = max(float(one.abs().max()) for one in left.model.values())
    return max(float((one - right.model[name]).abs().max()) for name, one in left.model.items()) / largest


def median(courses: Sequence[Course]) -> Course:
    """That of median speed; all have trained the same."""
    return sorted(courses, key=lambda course: course.rounds_per_s)[len(courses) // 2]


def measure(name: str, repeats: int, console: Console) -> bool:
    """One case; whether what is promised is kept."""
    case = CASES[name]
    with tempfile.TemporaryDirectory(prefix="shoal-bench-") as text:
        folder = Path(text)
        pairs = [(train_shoal("FedAvg", case, "", folder), train_flower(case, folder)) for _ in range(repeats)]
        others = [train_shoal(title, case, more, folder) for title, more in OTHERS.items()]
    ours, flower = (median(courses) for courses in zip(*pairs, strict=True))
    console.print(table(case, [ours, *others, flower]))
    ratios = sorted(one.rounds_per_s / other.rounds_per_s for one, other in pairs)
    console.print(
        f"Times Flower's, by pair: {', '.join(f'{ratio:.1f}' for ratio in ratios)}. "
        f"Our FedAvg's model differs from Flower's by {distance(ours, flower):.1e}."
    )
    return ours.rounds_per_s >= FLOOR * flower.rounds_per_s and ours.accuracy >= flower.accuracy


def main(argv: Sequence[str]) -> int:
    """Measure and print; the exit status is 1 where a promise was not kept."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.federated", description=__doc__)
    parser.add_argument("cases", nargs="*", help=f"of {', '.join(CASES)}; default all")
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args(argv)
    console = Console(highlight=False)
    try:
        FLOWER.require_python()
        kept = [measure(name, arguments.repeats, console) for name in arguments.cases or CASES]
    except ShoalError as error:
        return show_failure(error)
    return 0 if all(kept) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
