"""From the command to the end of the first step: `shoal train` beside torchrun with DDP."""

from __future__ import annotations

import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from benchmarks.bars import BarFinding, Ceiling
from benchmarks.fresh import surroundings
from shoal.errors import LaunchError
from shoal.observe import read_events

TIMEOUT_S = 120
CEILINGS = {
    2: Ceiling(model="digits", subject="first step, 2 workers", peer="torchrun", most=0.8, unit=""),
    4: Ceiling(model="digits", subject="first step, 4 workers", peer="torchrun", most=0.5, unit=""),
}


def measure_startup(
    processes: int, rounds: int, on_measured: Callable[[str, float], None] = lambda name, seconds: None
) -> BarFinding:
    """Shoal's time as a part of torchrun's, round by round."""
    ratios = []
    for turn in range(rounds):
        seconds: dict[str, float] = {}
        for name, start in (("shoal", shoal_seconds), ("torchrun", torchrun_seconds))[:: 1 if turn % 2 else -1]:
            seconds[name] = start(processes)
            on_measured(f"{name}, {processes} workers", seconds[name])
        ratios.append(seconds["shoal"] / seconds["torchrun"])
    return BarFinding(ceiling=CEILINGS[processes], values=tuple(ratios))


def shoal_seconds(processes: int) -> float:
    """`shoal train` to its first step, as its supervisor heard of it."""
    with tempfile.TemporaryDirectory(prefix="shoal-bench-") as folder:
        command = ["-m", "shoal.cli", "train", "benchmarks.tasks:task", "--workers", str(processes)]
        command += ["--runs", folder, "--name", "run", "--plain"]
        for argument in ("model=digits", f"processes={processes}", "steps=1"):
            command += ["--arg", argument]
        begin = _run(command)
        steps = next(event for event in read_events(Path(folder, "run")) if event.kind == "steps")
        return steps.time - begin


def torchrun_seconds(processes: int) -> float:
    """torchrun to the first step of a hand-written script, by the script's own clock."""
    with (
        tempfile.TemporaryDirectory(prefix="shoal-bench-") as folder,
        socket.create_server(("127.0.0.1", 0)) as probe,
    ):
        port, stamp = probe.getsockname()[1], Path(folder, "stamp")
        probe.close()
        command = ["-m", "torch.distributed.run", "--nproc-per-node", str(processes), "--master-addr", "127.0.0.1"]
        begin = _run([*command, "--master-port", str(port), first_step_script(), str(stamp)])
        return float(stamp.read_text()) - begin


def first_step_script() -> str:
    """Where torchrun's script is."""
    return str(Path(__file__).with_name("first_step.py"))


def _run(arguments: list[str]) -> float:
    """Run Python with these arguments; when it was started."""
    environment = surroundings(GLOO_SOCKET_IFNAME="lo")
    environment.pop("SHOAL_ZYGOTE", None)  # A warm zygote would be no fair start.
    begin = time.time()
    answer = subprocess.run(
        [sys.executable, *arguments],
        env=environment,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    if answer.returncode:
        last = "\n".join(answer.stderr.strip().splitlines()[-15:])
        raise LaunchError(f"bench: `python {' '.join(arguments)}` failed; it said:\n{last}")
    return begin
