"""The supervisor's machine is gone, with its disk: nothing is left running elsewhere, and the run goes on."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from benchmarks.namespaces import NamespaceHost, Network, end_processes
from helpers.apart import NEEDS_NAMESPACES
from helpers.commands import command
from helpers.namespaces import network_of
from shoal.launch.engines.ssh import SSH_VARIABLE
from shoal.launch.owner import ZYGOTE_VARIABLE
from shoal.launch.runs import train
from shoal.observe.checkpoint_names import is_checkpoint, step_folders
from shoal.observe.jsonl import read_events
from shoal.observe.run_folder import RunFolder

pytestmark = [NEEDS_NAMESPACES, pytest.mark.long, pytest.mark.timeout(400)]
TASK = Path(__file__).parents[1] / "paced_tasks.py"
STEPS = 400
GUARD_S = 120.0


@pytest.fixture
def network() -> Iterator[Network]:
    with network_of(3) as made:
        yield made


class Machines:
    """Hosts of which each has a disk of its own where the runs lie."""

    def __init__(self, network: Network, folder: Path) -> None:
        self._folder = folder
        self._runs = folder / "runs"
        self._runs.mkdir()
        self._enter = folder / "enter"
        self._enter.write_text(
            "#!/bin/sh\n"
            f'exec ip netns exec "$1" env -u {ZYGOTE_VARIABLE} unshare -m --propagation private sh -c '
            f'\'mount --bind {folder}/disks/$0 {self._runs} && exec sh -c "exec $1"\' "$1" "$2"\n'
        )
        self._enter.chmod(0o755)
        for host in network.hosts:
            self.disk(host).mkdir(parents=True)

    def disk(self, host: NamespaceHost) -> Path:
        return self._folder / "disks" / host.name

    def shoal(self, host: NamespaceHost, on: list[NamespaceHost], *words: str) -> subprocess.Popen[bytes]:
        """`shoal train` on a host, with these as the hosts of the run."""
        listed = self._folder / f"hosts-of-{host.name}"
        listed.write_text("".join(f"{one.name} address={one.address}\n" for one in on))
        line = " ".join(command("train", *words, "--runs", str(self._runs), "--on", f"hosts:{listed}"))
        return subprocess.Popen(
            [self._enter, host.name, line],
            cwd=self._folder,
            env={**os.environ, SSH_VARIABLE: str(self._enter)},
            stdout=subprocess.DEVNULL,
        )


def wait_until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + GUARD_S
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def has_checkpoint(folder: Path) -> bool:
    return any(is_checkpoint(path) for path in step_folders(RunFolder(folder).checkpoints))


def test_a_run_goes_on_elsewhere(network: Network, tmp_path: Path) -> None:
    """Its checkpoints are made beside the supervisor, so copies of them go to another host."""
    machines = Machines(network, tmp_path)
    first, second, third = network.hosts
    words = ["--name", "left", "--arg", f"steps={STEPS}", "--threads", "1", "-w", "3", "--grace", "15"]
    supervisor = machines.shoal(
        first, [first, second, third], f"{TASK}:paced", *words, "--checkpoint", "every=20,keep=2"
    )
    wait_until(lambda: len(step_folders(RunFolder(machines.disk(first) / "left").checkpoints)) > 1)
    network.cut(first)  # nobody hears a farewell
    end_processes(first)
    supervisor.wait()
    wait_until(lambda: not (second.processes() or third.processes()))
    left = machines.disk(second) / "left"
    assert has_checkpoint(left) and not (machines.disk(third) / "left").exists()
    network.heal(first)
    assert machines.shoal(second, [second, third], "--resume", "left").wait(GUARD_S) == 0
    (resumed,) = [event.values["step"] for event in read_events(left) if event.kind == "resumed"]
    assert resumed >= 20
    done = RunFolder(left).read_result()
    args, here = {"steps": STEPS}, {"workers": 3, "threads": 1}
    quiet = train(f"{TASK}:paced", args=args, runs=tmp_path / "quiet", cluster=here, progress=False)
    assert done["digest"] == quiet.digest and done["audit"]["clean"]
