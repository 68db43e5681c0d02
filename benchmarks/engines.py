"""What an engine costs: `python -m benchmarks.engines [ENGINE …]`.

The digits example with 2 workers, as if on 2 hosts of this machine, under each engine that can be started here; in
turn, in fresh processes. All have to come to the same digest, and to as many samples/s as `ssh`. Clusters are
those of the tests (`tests/helpers`), also sshd, and run only while they are measured.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.fresh import ROOT, surroundings
from shoal.cli.failures import show_failure
from shoal.errors import LaunchError, ShoalError
from shoal.observe import RunFolder, read_events
from shoal.observe.happenings import Finished

GUARD_S = 600.0
BASELINE = "ssh"
FLOOR = 0.97
"""Of the baseline's samples/s: engines take no part in a step."""


@dataclass(frozen=True)
class EngineCall:
    """How a run is begun: the launchers of its processes, and what each of them says besides."""

    launchers: Sequence[Sequence[str]] = ((),)
    words: Sequence[str] = ()
    envs: Sequence[Mapping[str, str]] = ({},)


@dataclass(frozen=True)
class EngineRun:
    """One run under an engine."""

    start_s: float
    """From the command to the first step that was told of."""
    samples_per_s: float
    digest: str


@dataclass
class EngineRow:
    """All runs under one."""

    name: str
    runs: list[EngineRun] = field(default_factory=list)

    @property
    def start_s(self) -> float:
        return statistics.median(run.start_s for run in self.runs)

    @property
    def samples_per_s(self) -> float:
        return statistics.median(run.samples_per_s for run in self.runs)


def _helper(name: str) -> Any:
    """What tests start clusters with."""
    if (tests := str(ROOT / "tests")) not in sys.path:
        sys.path.insert(0, tests)
    return import_module(f"helpers.{name}")


@contextmanager
def _local(folder: Path) -> Iterator[EngineCall]:
    yield EngineCall(words=["-w", "2", "--on", "local:2"])


@contextmanager
def _ssh(folder: Path) -> Iterator[EngineCall]:
    with _helper("ssh_server").SshServer(folder / "sshd") as server:
        words = ["-w", "2", "--on", "ssh:127.0.0.1,localhost"]
        yield EngineCall(words=words, envs=[{"SHOAL_SSH": server.command()}])


@contextmanager
def _mpi(folder: Path) -> Iterator[EngineCall]:
    launchers = _helper("launchers")
    yield EngineCall([launchers.mpirun(folder, "--host", "n1:1,n2:1", "-np", "2")], envs=[launchers.AS_ROOT])


@contextmanager
def _torchrun(folder: Path) -> Iterator[EngineCall]:
    port = str(_helper("launchers").free_port())
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1"]
    launcher += ["--master-addr", "127.0.0.1", "--master-port", port, "--no-python"]
    yield EngineCall([[*launcher, "--node-rank", str(rank)] for rank in range(2)], envs=[{}, {}])


@contextmanager
def _tf_config(folder: Path) -> Iterator[EngineCall]:
    cluster = {"worker": ["127.0.0.2:1", "127.0.0.3:1"]}
    tasks = [{"cluster": cluster, "task": {"type": "worker", "index": index}} for index in range(2)]
    yield EngineCall([(), ()], envs=[{"TF_CONFIG": json.dumps(task)} for task in tasks])


@contextmanager
def _slurm(folder: Path) -> Iterator[EngineCall]:
    with _helper("slurm").TwoNodes(folder / "slurm") as nodes:
        srun = ["srun", "--nodes", "2", "--ntasks-per-node", "1"]
        yield EngineCall([srun], envs=[{name: nodes.env[name] for name in ("SLURM_CONF", "PATH")}])


@contextmanager
def _ray(folder: Path) -> Iterator[EngineCall]:
    with _helper("ray_nodes").RayNodes() as nodes:
        yield EngineCall(words=["-w", "2", "--on", f"ray:{nodes.address}"], envs=[nodes.env])


@contextmanager
def _spark(folder: Path) -> Iterator[EngineCall]:
    words = ["-w", "2", "--on", "spark:local-cluster[2,1,1024]"]
    yield EngineCall(words=words, envs=[{"SPARK_LOCAL_IP": "127.0.0.1"}])


ENGINE_WAYS: dict[str, Callable[[Path], Any]] = {
    "local": _local,
    "ssh": _ssh,
    "mpi": _mpi,
    "slurm": _slurm,
    "torchrun": _torchrun,
    "tf_config": _tf_config,
    "ray": _ray,
    "spark": _spark,
}


def why_not(name: str) -> str | None:
    """Why an engine cannot be started here; None where it can."""
    if name == "ssh":
        return _helper("ssh_server").why_not() or None
    if name == "slurm":
        return _helper("slurm").why_not() or None
    if name == "mpi" and shutil.which("mpirun") is None:
        return "mpirun is not installed"
    if name == "ray" and find_spec("ray") is None:
        return "Ray is not installed"
    if name == "spark" and (find_spec("pyspark") is None or shutil.which("java") is None):
        return "Spark needs pyspark and Java"
    return None


def measure(name: str, epochs: int) -> EngineRun:
    """Train once under an engine."""
    with tempfile.TemporaryDirectory(prefix="shoal-engine-") as made:
        folder = Path(made)
        with ENGINE_WAYS[name](folder) as call:
            begin = _train(name, call, folder, epochs)
        ended = RunFolder.open("run", folder / "runs")
        events = list(read_events(ended.path))
        first = next(event for event in events if event.kind == "steps")
        (finished,) = [event.what for event in events if isinstance(event.what, Finished)]
        assert finished.samples_per_s is not None
        return EngineRun(first.time - begin, finished.samples_per_s, str(ended.read_result()["digest"]))


def _train(name: str, call: EngineCall, folder: Path, epochs: int) -> float:
    """Run all of its processes; when they were started."""
    job = [
        str(ROOT / "examples" / "digits.py"),
        "--epochs",
        str(epochs),
        "--threads",
        "1",
        "--plain",
        "--name",
        "run",
    ]
    begin = time.time()
    started = [
        subprocess.Popen(
            [*launcher, sys.executable, "-m", "shoal.cli", "train", *job, *call.words],
            cwd=folder,
            env=surroundings(**env),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for launcher, env in zip(call.launchers, call.envs, strict=True)
    ]
    try:
        said = [one.communicate(timeout=GUARD_S)[0] for one in started]
    except subprocess.TimeoutExpired:
        raise LaunchError(f"bench: the run under {name} has not ended within {GUARD_S:.0f} s.") from None
    finally:
        for one in started:
            one.kill()
            one.wait()
    if any(one.returncode for one in started):
        raise LaunchError(f"bench: the run under {name} has failed: {''.join(said)[-2000:]}")
    return begin


def markdown(rows: Sequence[EngineRow]) -> str:
    """The table of the documentation."""
    base = next((row.samples_per_s for row in rows if row.name == BASELINE), None)
    lines = [f"| engine | first step after | samples/s | of `{BASELINE}` |", "|---|---|---|---|"]
    for row in rows:
        ratio = f"{row.samples_per_s / base:.2f}" if base else ""
        lines.append(f"| `{row.name}` | {row.start_s:.1f} s | {row.samples_per_s:,.0f} | {ratio} |")
    return "\n".join(lines)


def faults_of(rows: Sequence[EngineRow]) -> list[str]:
    """What was promised and is not so."""
    found = []
    digests = {row.name: sorted({run.digest for run in row.runs}) for row in rows}
    if len({digest for some in digests.values() for digest in some}) > 1:
        found.append(f"digests differ: {digests}")
    base = next((row.samples_per_s for row in rows if row.name == BASELINE), None)
    slow = [row.name for row in rows if base is not None and row.samples_per_s < FLOOR * base]
    return [*found, *(f"{name} has less than {FLOOR} of {BASELINE}'s samples/s" for name in slow)]


def main(argv: Sequence[str]) -> int:
    """Measure and print; the exit status is 1 where digests differ or an engine is slower than it may be."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.engines", description=__doc__)
    parser.add_argument("engines", nargs="*", help=f"of {', '.join(ENGINE_WAYS)}; default all")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=200, help="of 1,437 samples each; default 200")
    parser.add_argument("--json", action="store_true", help="every run of every engine, as one line of JSON")
    arguments = parser.parse_args(argv)
    console, rows = Console(highlight=False, soft_wrap=True, stderr=arguments.json), []
    for name in arguments.engines or ENGINE_WAYS:
        if (reason := why_not(name)) is None:
            rows.append(EngineRow(name))
        else:
            console.print(f"{name} is left out: {reason}", style="dim")
    try:
        for turn in range(arguments.rounds):
            for row in rows[:: -1 if turn % 2 else 1]:
                run = measure(row.name, arguments.epochs)
                row.runs.append(run)
                console.print(
                    f"  {row.name:<10} first step {run.start_s:5.1f} s  {run.samples_per_s:>8,.0f} samples/s  "
                    f"{run.digest[:12]}",
                    style="dim",
                )
    except ShoalError as error:
        return show_failure(error)
    faults = faults_of(rows)
    if arguments.json:
        print(
            json.dumps({"runs": {row.name: [asdict(run) for run in row.runs] for row in rows}, "faults": faults})
        )
    console.print(markdown(rows))
    for fault in faults:
        console.print(fault)
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
