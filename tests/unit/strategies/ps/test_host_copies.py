"""Copies of a model that add up what is pushed to them: after every round all are the same, bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

import pytest
import torch

from shoal.model.replica import Replica
from shoal.ps.messages import COORDINATOR, Push, ShardView, View, shard_rows
from shoal.ps.server import ServerMachine
from shoal.ps.shard import Shard
from shoal.spec import ParameterServer, Task, World
from shoal.strategies.ps.hosts import host_of, ranks_of_host
from shoal.strategies.ps.served import Served

WORKERS = 4


class Host:
    """One host's server, fed by hand."""

    def __init__(self, number: int, spec: ParameterServer, task: Task) -> None:
        world = World(role="server", global_rank=number)
        self.served = Served.open(spec, Replica(task), world, slots=WORKERS, workers=WORKERS)
        self.machine = ServerMachine(
            node=number + 1,
            number=number,
            address="",
            rules=self.served.rules,
            make_values=self.served.make_values,
            now=0.0,
        )

    def push(self, rank: int, step: int, seed: int) -> None:
        """A worker's gradient, in the memory that it shares with this server."""
        dice = torch.Generator().manual_seed(seed)
        for view in self.served.memory.views(f"gradients/{rank}"):
            view.copy_(torch.randn(view.shape, generator=dice))
        self.served.memory.touched(rank).fill_(1)
        number = host_of(rank, self.served.spec.hosts, WORKERS)
        push = Push(
            shard=number,
            generation=1,
            origin=100 + rank,
            sequence=step,
            clock_of=rank,
            clock=step,
            cells=[(step - 1) * WORKERS + rank],
            based_on=step - 1,
            weight=1.0,
            loss=1.0,
            buffer=rank,
        )
        self.machine.on_message(100 + rank, push, 0.0)

    @property
    def shard(self) -> Shard:
        (duty,) = self.machine.held.values()
        assert duty.shard is not None
        return duty.shard

    def values(self) -> torch.Tensor:
        """The copy's parameters, end to end."""
        views = self.served.memory.views(f"params/{self.served.host}")
        return torch.cat([view.reshape(-1) for view in views])


def make_task() -> Task:
    torch.manual_seed(3)
    return Task(
        model=lambda: torch.nn.Sequential(torch.nn.Linear(30, 50), torch.nn.BatchNorm1d(50)),
        loss=torch.nn.functional.mse_loss,
        optimizer=lambda params: torch.optim.AdamW(params),
        train=[0],
        batch_size=WORKERS,
        epochs=1,
        clip_norm=1.0,
    )


def form(agree: str, num_hosts: int) -> list[Host]:
    """Servers that know each other, at the beginning."""
    sync = "asp" if agree == "scatter-sum" else "bsp"
    spec, task = ParameterServer(servers="host", hosts=num_hosts, agree=agree, sync=sync), make_task()
    hosts = [Host(number, spec, task) for number in range(num_hosts)]
    shards = [ShardView(generation=1, primary=number + 1) for number in range(num_hosts)]
    view = View(term=1, number=1, shards=shard_rows(shards), addresses={}, workers={}, settings={})
    for host in hosts:
        host.machine.on_message(COORDINATOR, view, 0.0)
    return hosts


def push_all(hosts: list[Host], step: int) -> None:
    """Every worker pushes its gradient of a step to its host."""
    for rank in range(WORKERS):
        hosts[host_of(rank, len(hosts), WORKERS)].push(rank, step, seed=10 * step + rank)


def push_all_of(host: Host, hosts: list[Host], step: int) -> None:
    """One host's workers push their gradients of a step."""
    for rank in range(WORKERS):
        if hosts[host_of(rank, len(hosts), WORKERS)] is host:
            host.push(rank, step, seed=10 * step + rank)


def deliver(hosts: list[Host], now: float = 0.0, is_lost: Callable[[], bool] = lambda: False) -> None:
    """Carry what servers tell each other until nobody has anything to say."""
    while any(host.machine.outbox for host in hosts):
        for sender, host in enumerate(hosts):
            while host.machine.outbox:
                node, message = host.machine.outbox.popleft()
                if 1 <= node <= len(hosts) and not is_lost():
                    hosts[node - 1].machine.on_message(sender + 1, message, now)


@pytest.mark.parametrize("agree", ["allreduce", "ring"])
@pytest.mark.parametrize("num_hosts", [1, 2, 3])
def test_all_copies_are_the_same(agree: str, num_hosts: int) -> None:
    hosts = form(agree, num_hosts)
    seen = {host.shard.values.digest() for host in hosts}
    assert len(seen) == 1
    for step in (1, 2, 3):
        push_all(hosts, step)
        deliver(hosts)
        digests = {host.shard.values.digest() for host in hosts}
        assert len(digests) == 1 and not digests & seen
        seen |= digests


def test_a_ring_adds_in_the_order_of_hosts() -> None:
    found = set()
    for agree in ("allreduce", "ring"):
        hosts = form(agree, 3)
        push_all(hosts, 1)
        deliver(hosts)
        found |= {host.shard.values.digest() for host in hosts}
    assert len(found) == 1


@pytest.mark.parametrize("agree", ["allreduce", "ring", "scatter-sum"])
@pytest.mark.parametrize("seed", range(5))
def test_what_is_lost_is_told_again(agree: str, seed: int) -> None:
    hosts, dice = form(agree, 3), Random(seed)
    losses: list[float] = []

    def is_lost() -> bool:
        losses.append(dice.random())
        return losses[-1] < 0.4

    now = 0.0
    for step in (1, 2):
        push_all(hosts, step)
        while any(len(host.shard.cells) < step * WORKERS for host in hosts):
            deliver(hosts, now, is_lost)
            now += 0.5
            assert now < 60.0
            for host in hosts:
                host.machine.on_tick(now)
    assert min(losses) < 0.4
    assert [host.shard.tally["cells"] for host in hosts] == [2 * WORKERS] * 3
    first, *others = [host.values() for host in hosts]
    for other in others:
        assert torch.allclose(first, other, rtol=0.0, atol=0.0 if agree != "scatter-sum" else 1e-6)


@pytest.mark.parametrize("agree", ["allreduce", "ring"])
def test_one_lost_message_delays_one_round(agree: str) -> None:
    """Who is a round ahead does not tell its part of the next one again: it is kept until its turn comes."""
    hosts, parts = form(agree, 2), 0

    def is_lost() -> bool:
        nonlocal parts
        parts += 1
        return parts == 2  # One host has all of the round, the other has not.

    push_all(hosts, 1)
    deliver(hosts, is_lost=is_lost)
    assert sorted(host.shard.rounds for host in hosts) == [0, 1]
    for host in hosts:
        if host.shard.rounds == 1:
            push_all_of(host, hosts, 2)
    deliver(hosts)
    for host in hosts:
        host.machine.on_tick(10.0)
    deliver(hosts, 10.0)
    assert [host.shard.rounds for host in hosts] == [1, 1]
    for step in (2, 3):
        push_all(hosts, step)
        deliver(hosts, 10.0)
        assert [host.shard.rounds for host in hosts] == [step, step], "nobody has to ask"


def test_workers_are_neighbours_of_their_host() -> None:
    assert [ranks_of_host(host, 2, 5) for host in range(2)] == [range(2), range(2, 5)]
    assert [host_of(rank, 2, 5) for rank in range(5)] == [0, 0, 1, 1, 1]
