"""What a worker does to itself because a user asked for it: it takes longer, or raises."""

from __future__ import annotations

import pytest

from shoal.comm.words import Misbehave
from shoal.errors import InjectedFault
from shoal.feed.parts import Part
from shoal.roles.training.chaos import Sabotage
from shoal.spec import Cluster, Job


class Time:
    """A clock that only moves when somebody sleeps."""

    def __init__(self) -> None:
        self.now = 100.0

    def read(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def make(time: Time, chaos: str = "", **values: object) -> Sabotage:
    job = Job(target="x.py", cluster=Cluster(workers=2), slots=4, chaos=chaos, **values)
    return Sabotage(job, time.read, time.sleep)


def compute(sabotage: Sabotage, time: Time, *, step: int = 1, slot: int = 0) -> float:
    """Compute a part of two batches, a second each; how long it took."""
    begun = time.now
    part = Part(slot=slot, load=lambda: iter([("first", 1.0, 1), ("second", 1.0, 1)]), total_weight=2.0)
    for _ in sabotage.spoil(part, step).load():
        time.sleep(1.0)
    return time.now - begun


def test_a_slow_worker_takes_so_many_times_as_long_for_so_long():
    time = Time()
    sabotage = make(time)
    assert compute(sabotage, time) == 2.0
    sabotage.hear(Misbehave(fault="slow", factor=4.0, seconds=11.0))
    assert [compute(sabotage, time) for _ in range(3)] == [8.0, 3.0, 2.0]


def test_slowness_may_last_for_ever():
    time = Time()
    sabotage = make(time)
    sabotage.hear(Misbehave(fault="slow", factor=2.5, seconds=None))
    assert [compute(sabotage, time) for _ in range(20)] == [5.0] * 20


def test_a_worker_raises_once_when_told():
    time = Time()
    sabotage = make(time)
    sabotage.hear(Misbehave(fault="raise", factor=1.0, seconds=None))
    with pytest.raises(InjectedFault, match="slot 3 of step 7"):
        compute(sabotage, time, step=7, slot=3)
    assert compute(sabotage, time, step=7, slot=3) == 2.0


def test_a_poisoned_part_raises_in_whoever_computes_it_again_and_again():
    time = Time()
    for _ in range(2):  # one process, and its successor
        sabotage = make(time, "raise worker:1 at step 7 always; raise worker:0 at step 8")
        for slot in (2, 3):
            for _ in range(2):
                with pytest.raises(InjectedFault):
                    compute(sabotage, time, step=7, slot=slot)
        assert compute(sabotage, time, step=7, slot=1) == compute(sabotage, time, step=8, slot=0) == 2.0


def test_the_supervisor_hears_when_a_fault_is_near():
    sabotage = make(Time(), "kill worker:1 at step 5; raise worker:0 at step 9")
    assert [sabotage.reaches_fault(step) for step in range(1, 10)] == [step in (4, 8) for step in range(1, 10)]
    skipping = make(Time(), "kill worker:1 at step 5; raise worker:0 at step 9")
    assert [skipping.reaches_fault(step) for step in (2, 6, 7, 20, 21)] == [False, True, False, True, False]


@pytest.mark.parametrize(
    ("strategy", "expected"),
    [("data", [[0, 1], [2, 3]]), ("data:shares=1+3", [[0], [1, 2, 3]]), ("ps", [[0, 1], [2, 3]])],
)
def test_a_rank_stands_for_its_slots(strategy, expected):
    job = Job(target="x.py", strategy=strategy, cluster=Cluster(workers=2), slots=4)
    assert [list(job.conduct.fills[rank]) for rank in range(2)] == expected
