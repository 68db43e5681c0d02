"""A whole copy's server is killed, at every message and inside every update: another goes on with the copy."""

from __future__ import annotations

import os
from unittest import mock

import pytest
import torch

from shoal.model.optimizer.chunk import ChunkOptimizer
from shoal.model.replica import Replica
from shoal.ps.buffers import BUFFERS_PER_SLOT
from shoal.ps.messages import COORDINATOR, Ack, PsMessage, Push, ShardView, View, shard_rows
from shoal.ps.server import ServerMachine
from shoal.spec import ParameterServer, Task, World, served_footprint
from shoal.strategies.ps.hosts import host_of
from shoal.strategies.ps.served import Served

WORKERS, HOSTS, STEPS = 4, 2, 3


@pytest.fixture(autouse=True)
def small_journals(monkeypatch: pytest.MonkeyPatch) -> None:
    """What all have gathered has the size of the model, and is not for the journal."""
    monkeypatch.setattr(served_footprint, "JOURNAL_BYTES", 1 << 14)


class Killed(BaseException):
    """The process is gone."""


class Hosts:
    """Servers of two groups of workers, in one memory; messages are carried by hand, and one kills its hearer."""

    def __init__(self, agree: str) -> None:
        self._spec = ParameterServer(servers="host", hosts=HOSTS, agree=agree)
        self._fd = os.memfd_create("host")
        self._generations = [0] * HOSTS
        self._served: dict[int, Served] = {}
        self.machines: dict[int, ServerMachine] = {}
        self.number = 0
        self.told = 0
        self.deaths = 0
        self.dies_at = 0
        """The number of the message after which its hearer is killed; 0: none."""
        self._unanswered: dict[tuple[int, int], Push] = {}
        for host in range(HOSTS):
            self._start(host)

    def close(self) -> None:
        os.close(self._fd)

    def _start(self, host: int) -> None:
        torch.manual_seed(3)
        task = Task(
            model=lambda: torch.nn.Sequential(torch.nn.Linear(100, 100), torch.nn.BatchNorm1d(100)),
            loss=torch.nn.functional.mse_loss,
            optimizer=lambda params: torch.optim.AdamW(params),
            train=[0],
            batch_size=WORKERS,
            epochs=1,
            clip_norm=1.0,
        )
        world = World(role="server", global_rank=host, arena_fd=self._fd)
        served = Served.open(self._spec, Replica(task), world, slots=WORKERS, workers=WORKERS)
        self._served[host] = served
        self.number += 1
        self._generations[host] = self.number
        self.machines[host] = ServerMachine(
            node=host + 1,
            number=host,
            address="",
            rules=served.rules,
            make_values=served.make_values,
            now=0.0,
        )
        shards = [ShardView(generation=self._generations[one], primary=one + 1) for one in range(HOSTS)]
        view = View(term=1, number=self.number, shards=shard_rows(shards), addresses={}, workers={}, settings={})
        for machine in list(self.machines.values()):
            machine.on_message(COORDINATOR, view, 0.0)

    def _hear(self, host: int, sender: int, message: PsMessage) -> None:
        self.told += 1
        try:
            self.machines[host].on_message(sender, message, 0.0)
            if self.told == self.dies_at:
                raise Killed
        except Killed:
            self.deaths += 1
            self._start(host)

    def push(self, rank: int, step: int) -> None:
        buffer = BUFFERS_PER_SLOT * rank + step % 2
        dice, model = torch.Generator().manual_seed(10 * step + rank), self._served[0].memory
        for view in model.views(f"gradients/{buffer}"):
            view.copy_(torch.randn(view.shape, generator=dice))
        model.touched(buffer).fill_(1)
        model.moved(buffer).view(torch.uint8).fill_(step + rank)
        self._unanswered[rank, step] = Push(
            shard=host_of(rank, HOSTS, WORKERS),
            generation=0,
            origin=100 + rank,
            sequence=step,
            clock_of=rank,
            clock=step,
            cells=[(step - 1) * WORKERS + rank],
            based_on=step - 1,
            weight=1.0,
            loss=1.0,
            buffer=buffer,
        )

    def settle(self, step: int) -> None:
        """Workers repeat what was not answered, and servers what they wait for, until the round is closed."""
        for second in range(20):
            for push in list(self._unanswered.values()):
                message = Push(**{**push.__dict__, "generation": self._generations[push.shard]})
                self._hear(push.shard, push.origin, message)
            self._deliver()
            if not self._unanswered and all(shard.rounds >= step for shard in self.shards()):
                return
            for machine in self.machines.values():
                machine.on_tick(1000.0 * step + second)
            self._deliver()
        raise AssertionError("the round was never closed")

    def _deliver(self) -> None:
        while any(machine.outbox for machine in self.machines.values()):
            for host in range(HOSTS):
                if not (outbox := self.machines[host].outbox):
                    continue
                node, message = outbox.popleft()
                if isinstance(message, Ack):
                    self._unanswered.pop((node - 100, message.sequence), None)
                elif 1 <= node <= HOSTS:
                    self._hear(node - 1, host + 1, message)

    def shards(self) -> list:
        return [machine.held[host].shard for host, machine in self.machines.items()]


def train(agree: str, dies_at: int = 0) -> tuple[set[str], int, int]:
    """What the copies are in the end, how many messages that took, and how many died."""
    hosts = Hosts(agree)
    hosts.dies_at = dies_at
    try:
        for step in range(1, STEPS + 1):
            for rank in range(WORKERS):
                hosts.push(rank, step)
            hosts.settle(step)
        return {shard.values.digest() for shard in hosts.shards()}, hosts.told, hosts.deaths
    finally:
        hosts.close()


@pytest.mark.parametrize("agree", ["allreduce", "ring"])
def test_a_copy_outlives_its_server(agree: str) -> None:
    calm, told, _ = train(agree)
    assert len(calm) == 1
    for at in range(1, told + 1):
        found, _, deaths = train(agree, at)
        assert deaths == 1 and found == calm, f"death after message {at}"


@pytest.mark.parametrize("agree", ["allreduce", "ring"])
def test_a_copy_outlives_a_death_inside_an_update(agree: str) -> None:
    calm, step, steps, dies_at = train(agree)[0], ChunkOptimizer.step, 0, 0

    def dying_step(self: ChunkOptimizer) -> bool:
        nonlocal steps
        steps += 1
        if steps == dies_at:
            self.values[: len(self.values) // 2] = 77.0
            raise Killed
        return step(self)

    with mock.patch.object(ChunkOptimizer, "step", dying_step):
        assert train(agree)[0] == calm
        for dies_at in range(1, steps + 1):
            steps = 0
            found, _, deaths = train(agree)
            assert deaths == 1 and found == calm, f"death inside step {dies_at}"
