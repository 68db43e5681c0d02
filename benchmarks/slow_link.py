"""What averaging is worth over a slow link: `python -m benchmarks.slow_link [VARIANT …]`.

Two hosts, network namespaces of this machine (which needs root), have 100 Mbit/s and 20 ms between them. One
worker on each trains the perceptron of 20.9 M parameters; beside Shoal runs torch's DDP over gloo, which encrypts
nothing. All see the same samples in the same order. The speed is that of whole rounds after the first; the loss is
compared after equal samples, and drawn over time.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from torch import distributed
from torch.nn.parallel import DistributedDataParallel

from benchmarks.fresh import module_command, surroundings
from benchmarks.models import WORKLOADS
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
RATE, DELAY_S = "100mbit", 0.02
STRATEGIES = {
    "diloco": f"average:every={ROUND},outer=nesterov",
    "diloco_int8": f"average:every={ROUND},outer=nesterov,compress=int8",
    "streamed": f"average:every={ROUND},outer=nesterov,parts=4,delay=24",
    "streamed_int8": f"average:every={ROUND},outer=nesterov,parts=4,delay=8,compress=int8",
    "local_sgd": f"average:every={ROUND}",
    "local_sgd_int8": f"average:every={ROUND},compress=int8",
}
FLOORS = {"diloco": 25.0, "diloco_int8": 38.0, "streamed_int8": 38.0}
"""What is promised, in times DDP's samples/s."""


@dataclass(frozen=True, kw_only=True)
class Curve:
    """How one variant went."""

    name: str
    marks: list[tuple[float, int, float]]
    """Seconds since the first batch, steps that were done by then, and their mean loss since the mark before."""
    sent_bytes: int
    skipped: int
    """Marks in which it warmed up."""

    @property
    def steps_per_s(self) -> float:
        """Over all that follows the warm-up."""
        (begin, first, _), (end, last, _) = self.marks[self.skipped - 1], self.marks[-1]
        return (last - first) / (end - begin)

    def loss_after(self, steps: int) -> float:
        """The mean loss of what the last mark up to then covers."""
        return [loss for _, done, loss in self.marks if done <= steps][-1]


def train_shoal(name: str, on: str, rounds: int, network: Network) -> Curve:
    """So many rounds under a strategy, in fresh processes."""
    steps, marks, began = ROUND * rounds, list[tuple[float, int, float]](), [0.0]

    def on_event(event: Event) -> None:
        if isinstance(event.what, StepsTaken) and event.what.steps:
            losses = [loss for _, loss in event.what.steps if loss is not None]
            marks.append((time.monotonic(), event.what.steps[-1][0], sum(losses) / len(losses)))
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
    timed = [(when - began[0], step, loss) for when, step, loss in marks]
    # Steps of one round are told within a moment of each other: the last tells when it was over.
    by_round = [
        (when, step, loss)
        for at, (when, step, loss) in enumerate(timed)
        if at + 1 == len(timed) or timed[at + 1][0] - when > 1.0
    ]
    return Curve(name=name, marks=by_round, sent_bytes=network.carried_bytes() - carried, skipped=1)


def train_ddp(steps: int, network: Network) -> Curve:
    """The same with torch's DDP, a process in each namespace."""
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
    return Curve(name="ddp", marks=marks, sent_bytes=network.carried_bytes() - carried, skipped=2)


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
        times, _, losses = zip(*curve.marks, strict=True)
        axes.plot(times, losses, marker="o", markersize=3, label=curve.name)
    axes.set_xlabel("seconds")
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
            f"{curve.marks[-1][2]:.4f} after {steps} steps, {curve.marks[-1][0]:.0f} s",
        )
    return shown


def main(argv: Sequence[str]) -> int:
    """Measure, print and draw; the exit status is 1 where a promise was not kept."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.slow_link", description=__doc__)
    parser.add_argument("variants", nargs="*", help=f"of {', '.join(STRATEGIES)}; default those with a promise")
    parser.add_argument("--steps", type=int, default=8, help="of DDP")
    parser.add_argument("--rounds", type=int, default=3, help="of each other variant; the first is not measured")
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
        with (
            tempfile.TemporaryDirectory(prefix="shoal-bench-") as folder,
            Network(HOSTS) as network,
            network.long_cable(DELAY_S),
        ):
            network.limit(RATE)
            on, environment = network.reached_by_command(Path(folder))
            os.environ.update(environment)
            curves = [train_ddp(arguments.steps, network)]
            for name in arguments.variants or FLOORS:
                curves.append(train_shoal(name, on, arguments.rounds, network))
                console.print(table(curves))
    except ShoalError as error:
        return show_failure(error)
    draw(curves, arguments.plot)
    console.print(f"drawn in {arguments.plot}")
    speeds = {curve.name: curve.steps_per_s / curves[0].steps_per_s for curve in curves}
    return 0 if all(speeds[name] >= floor for name, floor in FLOORS.items() if name in speeds) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
