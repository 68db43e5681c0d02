"""What averaging is worth over a slow link: `python -m benchmarks.slow_link [VARIANT …]`.

Two hosts, network namespaces of this machine (which needs root), have 100 Mbit/s and 20 ms between them. One
worker on each trains the perceptron of 20.9 M parameters; beside Shoal runs torch's DDP over gloo, which encrypts
nothing. All see the same samples in the same order. The speed is that of whole rounds after the first, or of steps
where all agree in each; the loss is compared after equal samples, and drawn over time. What DDP would come to in
so many steps, which takes it half an hour, is computed without the link, and put at the times that its first steps
take. With `--curves FILE` variants can be measured one by one: what lies there already is not measured again.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean

import torch
from rich.console import Console
from rich.table import Table
from torch import distributed
from torch.nn.parallel import DistributedDataParallel

from benchmarks.fresh import module_command, surroundings
from benchmarks.models import CYCLE, WORKLOADS
from benchmarks.namespaces import CABLE, Network, why_not
from benchmarks.peers import PEER_TIMEOUT
from shoal.cli.failures import show_failure
from shoal.errors import LaunchError, ShoalError
from shoal.launch.engines import engine_for
from shoal.launch.supervisor import Supervisor
from shoal.observe import Event
from shoal.observe.happenings import StepsTaken
from shoal.observe.wording import memory
from shoal.spec import Cluster, Job

MODEL, HOSTS, ROUND = "mlp", 2, 64
DDP_WARM_UP, WARM_UP = 2, 8
"""Steps that are not measured, where each counts."""
RATE, DELAY_S = "100mbit", 0.02
STRATEGIES = {
    "powersgd": "data:between=powersgd:4",
    "topk": "data:between=topk:0.01",
    "diloco": f"average:every={ROUND},outer=nesterov",
    "diloco_int8": f"average:every={ROUND},outer=nesterov,compress=int8",
    "streamed": f"average:every={ROUND},outer=nesterov,parts=4,delay=24",
    "streamed_int8": f"average:every={ROUND},outer=nesterov,parts=4,delay=8,compress=int8",
    "local_sgd": f"average:every={ROUND}",
    "local_sgd_int8": f"average:every={ROUND},compress=int8",
}
FLOORS = {"diloco": 25.0, "diloco_int8": 38.0, "streamed_int8": 38.0, "powersgd": 14.0, "topk": 10.0}
"""What is promised, in times DDP's samples/s."""


@dataclass(frozen=True, kw_only=True)
class Curve:
    """How one variant went."""

    name: str
    marks: list[tuple[float, int, float]]
    """By step: seconds since the first batch when it was known, its number, its loss. All of a round are known
    when it is over."""
    sent_bytes: int
    skipped: int
    """Marks in which it warmed up."""
    measured: int = 0
    """So many of the first marks were measured, where the others follow from them; 0: all."""

    @property
    def steps_per_s(self) -> float:
        """Over all that follows the warm-up."""
        (begin, first, _), (end, last, _) = self.marks[self.skipped - 1], self.marks[(self.measured or 0) - 1]
        return (last - first) / (end - begin)

    @property
    def final_loss(self) -> float:
        """The mean over the last steps, which have all samples once."""
        return self.smooth()[-1][1]

    def smooth(self) -> list[tuple[float, float]]:
        """By time: the mean over the last steps that were known then, which have all samples once."""
        losses = [loss for _, _, loss in self.marks]
        known = {when: step for when, step, _ in self.marks}
        return [(when, fmean(losses[step - CYCLE : step])) for when, step in known.items() if step >= CYCLE]


class Kept:
    """Curves by name, in a file where one is given."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        found = json.loads(path.read_text()) if path is not None and path.is_file() else []
        self.curves = {fields["name"]: Curve(**fields) for fields in found}

    def add(self, curve: Curve) -> None:
        """One that was measured."""
        self.curves[curve.name] = curve
        if self._path is not None:
            self._path.write_text(json.dumps([asdict(each) for each in self.curves.values()]))


def train_shoal(name: str, on: str, rounds: int, network: Network) -> Curve:
    """So many rounds under a strategy, in fresh processes."""
    steps, began = ROUND * rounds, [0.0]
    losses, heard_at = dict[int, float](), list[tuple[float, int]]()

    def on_event(event: Event) -> None:
        if isinstance(event.what, StepsTaken) and event.what.steps:
            losses.update({step: loss for step, loss in event.what.steps if loss is not None})
            heard_at.append((time.monotonic() - began[0], event.what.steps[-1][0]))
        elif event.kind == "world":
            began[0] = time.monotonic()

    carried = network.carried_bytes()
    job = Job(
        target="benchmarks.tasks:task",
        args={"model": MODEL, "processes": HOSTS, "steps": steps},
        strategy=STRATEGIES[name],
        cluster=Cluster(workers=HOSTS, threads=1, on=on),
    )
    engine = engine_for(job.cluster, None, tell=lambda text: print(text, file=sys.stderr))
    Supervisor(job, on_event, engine).run()
    by_step = STRATEGIES[name].startswith("data")
    times = _times_of_steps(heard_at) if by_step else _times_of_rounds([when for when, _ in heard_at], rounds)
    return Curve(
        name=name,
        marks=[(when, step, losses[step]) for step, when in enumerate(times, 1)],
        sent_bytes=network.carried_bytes() - carried,
        skipped=WARM_UP if by_step else ROUND,
    )


def _times_of_steps(heard_at: Sequence[tuple[float, int]]) -> list[float]:
    """When each step was known: several may be told at once."""
    times: list[float] = []
    for when, step in heard_at:
        times += [when] * (step - len(times))
    return times


def _times_of_rounds(heard_at: Sequence[float], rounds: int) -> list[float]:
    """The same where all of a round are known at its end, and told within a moment, the last of which counts."""
    ends = [when for when, after in zip(heard_at, [*heard_at[1:], math.inf], strict=True) if after - when > 1.0]
    if len(ends) != rounds:
        raise LaunchError(f"bench: {rounds} rounds were told at {len(ends)} moments; use longer ones.")
    return [when for when in ends for _ in range(ROUND)]


def train_ddp(steps: int, network: Network) -> tuple[list[tuple[float, int, float]], int]:
    """The same with torch's DDP, a process in each namespace: how it went, and the bytes that it sent."""
    carried = network.carried_bytes()
    with tempfile.TemporaryDirectory() as folder:
        command = module_command("slow_link", "--steps", str(steps), "--store", str(Path(folder, "store")))
        environment = surroundings(GLOO_SOCKET_IFNAME=CABLE)
        ranks = [
            subprocess.Popen(
                ["ip", "netns", "exec", host.name, *command, "--rank", str(rank)],
                env=environment,
                stdout=subprocess.PIPE,
                text=True,
            )
            for rank, host in enumerate(network.hosts)
        ]
        told = [process.communicate()[0] for process in ranks]
        if any(process.returncode for process in ranks):
            raise LaunchError("bench: DDP failed; see above.")
    columns = [json.loads(text.strip().splitlines()[-1]) for text in told]
    marks = [
        (when, step, sum(column[step - 1][1] for column in columns) / len(columns))
        for step, (when, _) in enumerate(columns[0], 1)
    ]
    return marks, network.carried_bytes() - carried


def curve_of_ddp(
    steps: int, rounds: int, link: Callable[[], AbstractContextManager[None]], network: Network
) -> Curve:
    """A few steps over the link, and the losses of as many as others take, which no link changes."""
    losses, _ = train_ddp(ROUND * rounds, network)
    with link():
        marks, sent_bytes = train_ddp(steps, network)
    step_s = (marks[-1][0] - marks[DDP_WARM_UP - 1][0]) / (steps - DDP_WARM_UP)
    marks += [(marks[-1][0] + (step - steps) * step_s, step, loss) for _, step, loss in losses[steps:]]
    return Curve(
        name="ddp",
        marks=marks,
        sent_bytes=sent_bytes * len(marks) // steps,
        skipped=DDP_WARM_UP,
        measured=steps,
    )


def run_rank(rank: int, steps: int, store: Path) -> list[tuple[float, float]]:
    """One process of DDP: after each step, seconds since the first and its own loss."""
    torch.set_num_threads(1)
    workload = WORKLOADS[MODEL]()
    distributed.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=HOSTS, timeout=PEER_TIMEOUT
    )
    model = DistributedDataParallel(workload.model())
    optimizer = workload.optimizer(model.parameters())
    found, began = [], time.monotonic()
    for step in range(steps):
        inputs, target = workload.batch(rank, step)
        optimizer.zero_grad()
        loss = workload.loss(model(inputs), target)
        loss.backward()
        optimizer.step()
        found.append((time.monotonic() - began, loss.item()))
    distributed.barrier()
    distributed.destroy_process_group()
    return found


def draw(curves: Sequence[Curve], path: Path) -> None:
    """The loss of each over time."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.2))
    axes = figure.subplots()
    for curve in curves:
        times, losses = zip(*curve.smooth(), strict=True)
        known = sum(when <= curve.marks[(curve.measured or 0) - 1][0] for when in times)
        style = "-" if STRATEGIES.get(curve.name, "data").startswith("data") else "o-"
        (line,) = axes.plot(times[:known], losses[:known], style, markersize=4, label=curve.name)
        axes.plot(times[known - 1 :], losses[known - 1 :], ":", color=line.get_color())
    axes.set_xscale("log")
    axes.set_xlabel("seconds (dotted: at the pace of the steps before)")
    axes.set_ylabel("training loss")
    axes.set_title(f"20.9 M parameters, 2 hosts, {RATE} and {DELAY_S * 1e3:.0f} ms between them")
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def table(curves: Sequence[Curve]) -> Table:
    """All of them beside DDP."""
    ddp, batch = curves[0], WORKLOADS[MODEL]().batch_per_process * HOSTS
    shown = Table("variant", "samples/s", "times DDP", "promised", "sent per step", "loss at the end", box=None)
    for curve in curves:
        speed, steps = curve.steps_per_s, curve.marks[-1][1]
        shown.add_row(
            curve.name,
            f"{speed * batch:,.1f}",
            f"{speed / ddp.steps_per_s:.1f}",
            str(FLOORS.get(curve.name, "")),
            memory(curve.sent_bytes // steps),
            f"{curve.final_loss:.4f} after {steps} steps, {curve.marks[-1][0]:.0f} s",
        )
    return shown


def main(argv: Sequence[str]) -> int:
    """Measure, print and draw; the exit status is 1 where a promise was not kept."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.slow_link", description=__doc__)
    parser.add_argument("variants", nargs="*", help=f"of {', '.join(STRATEGIES)}; default those with a promise")
    parser.add_argument("--steps", type=int, default=8, help="of DDP")
    parser.add_argument("--rounds", type=int, default=3, help="of each other variant; the first is not measured")
    parser.add_argument("--curves", type=Path, help="keep what was measured in this file")
    parser.add_argument("--plot", type=Path, default=Path("slow_link.png"))
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--store", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    if arguments.rank is not None:
        print(json.dumps(run_rank(arguments.rank, arguments.steps, arguments.store)))
        return 0
    if (reason := why_not()) is not None:
        return show_failure(LaunchError(f"bench: {reason}."))
    console = Console(highlight=False)
    try:
        with tempfile.TemporaryDirectory(prefix="shoal-bench-") as folder, Network(HOSTS) as network:

            @contextmanager
            def link() -> Iterator[None]:
                with network.long_cable(DELAY_S):
                    network.limit(RATE)
                    yield

            on, environment = network.reached_by_command(Path(folder))
            os.environ.update(environment)
            kept = Kept(arguments.curves)
            if "ddp" not in kept.curves:
                kept.add(curve_of_ddp(arguments.steps, arguments.rounds, link, network))
            for name in arguments.variants or FLOORS:
                if name not in kept.curves:
                    with link():
                        kept.add(train_shoal(name, on, arguments.rounds, network))
                console.print(table(curves := list(kept.curves.values())))
    except ShoalError as error:
        return show_failure(error)
    draw(curves, arguments.plot)
    console.print(f"drawn in {arguments.plot}")
    speeds = {curve.name: curve.steps_per_s / curves[0].steps_per_s for curve in curves}
    return 0 if all(speeds[name] >= floor for name, floor in FLOORS.items() if name in speeds) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
