"""Gradients in memory that outlives its writer: what is inherited is whole, whenever the worker died."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from helpers.ps_sim import Cluster, Kill, NetFaults, Scenario, SimulationFailed, check
from helpers.ps_sim.scenario import COORDINATOR, SERVER, WORKER
from helpers.ps_sim.values import Gradients
from shoal.ps.buffers import BUFFER_SETS, BUFFERS_PER_SLOT, Buffers, Label
from shoal.ps.consistency import parse_sync
from shoal.ps.link import Offer
from shoal.ps.worker import WorkerMachine


def buffers_of(generation: int, labels: Gradients) -> Buffers:
    machine = WorkerMachine(node=1, rank=0, num_shards=2, consistency=parse_sync("ssp:2"), now=0.0)
    return Buffers(machine, labels, lambda slot: generation)


def test_a_label_is_there_only_while_the_buffer_is_whole():
    labels = Gradients()
    buffers, label = buffers_of(0, labels), Label(3, 7, 2.0, 1.0, True, 1.0)
    buffer = buffers.buffer_of(1, 3)
    buffers.begin(buffer)
    buffers.open(Offer(clock_of=1, clock=3, cells=[7], weight=2.0, loss=1.0, buffer=buffer), label)
    assert buffers_of(1, labels).left_by_another(1, 3, 7) is None, "its gradient is still being computed"
    assert buffers.complete() == [0, 1]
    assert buffers_of(1, labels).left_by_another(1, 3, 7) == (buffer, label)
    assert buffers_of(1, labels).left_by_another(0, 3, 7) is None, "of another slot"
    buffers.begin(buffer)
    assert buffers_of(1, labels).left_by_another(1, 3, 7) is None, "it is written to again"


def test_whoever_replaces_another_leaves_its_buffers_alone():
    sets = [{buffers_of(g, Gradients()).buffer_of(1, clock) for clock in (1, 2)} for g in range(BUFFER_SETS)]
    assert sorted(buffer for own in sets for buffer in own) == list(range(BUFFERS_PER_SLOT, 2 * BUFFERS_PER_SLOT))


def dying(seed: int) -> Scenario:
    """Workers die while they compute, and others with them."""
    dice = random.Random(seed)
    kills = [
        Kill(at=dice.randrange(30, 250), role=WORKER, rank=dice.randrange(2)) for _ in range(dice.randint(1, 2))
    ]
    if dice.random() < 0.4:
        kills.append(Kill(at=dice.randrange(30, 250), role=dice.choice([SERVER, COORDINATOR])))
    return Scenario(
        sync=dice.choice(["ssp:1", "ssp:2", "alternate:2", "asp", "bsp", "quorum:1/2"]),
        shards=dice.choice([2, 3]),
        steps=6,
        kills=tuple(kills),
        faults=dice.choice([NetFaults(), NetFaults(drop=0.05, duplicate=0.05, delay=0.1)]),
        in_memory=True,
    )


def die_while_computing(seeds: range) -> None:
    struck = Counter[str]()
    for seed in seeds:
        struck += check(Cluster(dying(seed), seed).run()).killed
    assert struck[WORKER] > len(seeds) and struck[SERVER] > len(seeds) / 20


def test_no_torn_gradient_is_ever_applied():
    die_while_computing(range(150))


@pytest.mark.long
@pytest.mark.parametrize("part", range(2))
def test_ten_times_as_many(part):
    die_while_computing(range(1000 + part * 1000, 2000 + part * 1000))


def test_the_simulation_finds_a_label_that_is_written_too_early(monkeypatch):
    open_push = Buffers.open

    def open_and_label(self: Buffers, offer: Offer, label: Label | None) -> None:
        open_push(self, offer, label)
        if label is not None:
            self._labels.put_label(self.buffer, label)

    monkeypatch.setattr(Buffers, "open", open_and_label)
    with pytest.raises(SimulationFailed, match="torn gradients were taken for those of cells"):
        die_while_computing(range(30))
