"""Processes of others train a model on data of their own, over tcp and with a ticket."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import outside_tasks
import pytest
import torch

from helpers.commands import GUARD_S, command
from helpers.training import largest_difference
from shoal.checkpoint.model_file import load_tensors
from shoal.errors import CommTimeout, SpecError, TaskError
from shoal.federated import serve, take_part
from shoal.federated.alone import LoneTraining
from shoal.federated.ticket import ClientTicket

TASKS = Path(outside_tasks.__file__)


class Processes:
    """Servers and clients, each with what it says in a file."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._all: list[subprocess.Popen[bytes]] = []

    def start(self, name: str, *words: str) -> subprocess.Popen[bytes]:
        with (self.folder / f"{name}.log").open("ab") as log:
            self._all.append(
                subprocess.Popen(
                    command("federated", *words),
                    cwd=self.folder,
                    stdout=log,
                    stderr=log,
                    env={**os.environ, "OMP_NUM_THREADS": "1"},
                )
            )
        return self._all[-1]

    def said(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text()

    def wait_for(self, name: str, pattern: str) -> str:
        """What a process has said that looks so."""
        end = time.monotonic() + GUARD_S
        while (found := re.search(pattern, self.said(name))) is None:
            assert time.monotonic() < end, self.said(name)
            time.sleep(0.02)
        return found[0]

    def close(self) -> None:
        for process in self._all:
            process.kill()
            process.wait()


@pytest.fixture
def processes(tmp_path: Path) -> Iterator[Processes]:
    found = Processes(tmp_path)
    yield found
    found.close()


def test_one_client_is_what_a_loop_by_hand_is(processes: Processes, tmp_path: Path) -> None:
    """Its optimizer begins anew with every version; the server goes half of the way, and not far."""
    words = ("--versions", "4", "--steps", "5", "--rate", "0.5", "--clip", "0.4")
    served = processes.start("server", "serve", f"{TASKS}:task", *words)
    processes.wait_for("server", "the ticket")
    assert take_part(f"{TASKS}:client", tmp_path / "ticket", timeout_s=GUARD_S) == 4
    assert served.wait(GUARD_S) == 0

    lone = LoneTraining.of(f"{TASKS}:client", {}, tmp_path)
    torch.manual_seed(outside_tasks.task().seed)
    model = outside_tasks.task().model()
    agreed = {name: param.detach().clone() for name, param in model.named_parameters()}
    for version in range(4):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        for step in range(5 * version + 1, 5 * version + 6):
            (cut,) = lone.training.schedule.cuts(step, [0])
            inputs, targets = outside_tasks.client().train[cut.samples]
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(inputs), targets).backward()
            optimizer.step()
        with torch.no_grad():
            moved = {name: param - agreed[name] for name, param in model.named_parameters()}
            norm = torch.stack([each.norm() for each in moved.values()]).norm()
            for name, param in model.named_parameters():
                agreed[name] += 0.5 * moved[name] * min(1.0, 0.4 / float(norm))
                param.copy_(agreed[name])
    assert largest_difference(load_tensors(tmp_path / "federated" / "model.safetensors"), agreed) < 1e-5

    # Who goes on may ask for more than copies of the ticket were made for, and for longer turns.
    with pytest.raises(SpecError, match="has version 4 already"):
        serve(f"{TASKS}:task", tmp_path / "ticket", folder=tmp_path / "federated", versions=4, resume=True)
    copy = tmp_path / "copy"
    ClientTicket.load(tmp_path / "ticket").save(copy)
    more = processes.start("more", "serve", f"{TASKS}:task", "--versions", "6", "--steps", "3", "--resume")
    processes.wait_for("more", "the ticket")
    assert take_part(f"{TASKS}:client", copy, timeout_s=GUARD_S) == 2
    assert more.wait(GUARD_S) == 0


def test_files_that_cannot_be_are_told(tmp_path: Path) -> None:
    for names, why in (
        ((tmp_path / "nowhere" / "ticket", tmp_path / "out"), "name a file in a folder that is there"),
        ((tmp_path / "ticket", TASKS), "cannot be made"),
    ):
        with pytest.raises(SpecError, match=why):
            serve(f"{TASKS}:task", names[0], folder=names[1])


@pytest.mark.long
def test_clients_and_the_server_may_die(processes: Processes) -> None:
    words = ("--versions", "80", "--steps", "2", "--buffer", "2")
    first = processes.start("server", "serve", f"{TASKS}:task", *words)
    processes.wait_for("server", "the ticket")
    patient, lost = (
        processes.start(f"client{seed}", "join", "ticket", f"{TASKS}:client", "--arg", f"seed={seed}")
        for seed in (1, 2)
    )
    processes.wait_for("server", r"version \d\d:")
    os.kill(lost.pid, signal.SIGKILL)
    processes.wait_for("server", r"version [2-9]\d:")  # the other one goes on alone
    os.kill(first.pid, signal.SIGKILL)
    first.wait()
    assert patient.poll() is None
    second = processes.start("server again", "serve", f"{TASKS}:task", *words, "--resume")
    saved = int(processes.wait_for("server again", r"serving version \d+").split()[-1])
    told = int(re.findall(r"version (\d+):", processes.said("server"))[-1])
    assert 20 <= told <= saved <= told + 1
    assert second.wait(GUARD_S) == 0 and patient.wait(GUARD_S) == 0
    assert "joining again" in processes.said("client1") and "it is over" in processes.said("client1")
    accuracy = re.findall(r"version 80: loss \S+, accuracy (\S+)", processes.said("server again"))
    assert float(accuracy[0]) > 0.8


def test_what_cannot_take_part_is_told(processes: Processes, tmp_path: Path) -> None:
    processes.start("server", "serve", f"{TASKS}:task")
    processes.wait_for("server", "the ticket")
    ticket = tmp_path / "ticket"
    for args, error, why in (
        ({"width": 17}, SpecError, r"'0.bias' is float32 \[17\]"),
        ({"normalised": True}, TaskError, "buffers that move"),
        ({"ema": 0.9}, TaskError, "ema is for a whole run"),
    ):
        with pytest.raises(error, match=why):
            take_part(f"{TASKS}:client", ticket, args=args, timeout_s=GUARD_S)
    with pytest.raises(SpecError, match="is there already"):
        serve(f"{TASKS}:task", ticket, folder=tmp_path / "other")
    found = ClientTicket.load(ticket)
    stranger = tmp_path / "stranger"
    ClientTicket(address=found.address, key="0" * 64).save(stranger)
    with pytest.raises(CommTimeout, match="the key is not its key"):
        take_part(f"{TASKS}:client", stranger, timeout_s=1.0)
    stranger.write_text("{}")
    with pytest.raises(SpecError, match="is no ticket"):
        take_part(f"{TASKS}:client", stranger)
    stranger.chmod(0o644)
    with pytest.raises(SpecError, match="must be yours alone"):
        take_part(f"{TASKS}:client", stranger)
