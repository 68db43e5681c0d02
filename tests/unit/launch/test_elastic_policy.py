"""When a run gets one worker more or fewer."""

from __future__ import annotations

from dataclasses import replace

from shoal.launch import elastic
from shoal.launch.elastic import COOL_DOWN_S, RETRY_S, Autoscaler, Experience, Outlook, decide
from shoal.launch.messages import Load
from shoal.spec import Cluster

IDLE = Load(idle_cores=2.0, waiting=-2.0)
FULL = Load(idle_cores=0.0, waiting=0.0)
OVERRUN = Load(idle_cores=0.0, waiting=3.0)
TWO = Outlook(now=100.0, workers=2, least=1, most=4, speed=1000.0, load=IDLE)


def test_nothing_is_decided_before_it_is_measured() -> None:
    assert decide(replace(TWO, speed=None), Experience()) == (None, Experience())


def test_one_more_where_cores_are_idle_and_there_is_room() -> None:
    decision, past = decide(TWO, Experience())
    assert decision is not None and decision.workers == 3 and "2.0 cores are idle" in decision.reason
    assert past.speed_before == 1000.0
    assert decide(replace(TWO, load=FULL), Experience())[0] is None
    assert decide(replace(TWO, workers=4), Experience())[0] is None


def test_a_worker_that_gains_nothing_goes_again_and_is_not_tried_for_a_while() -> None:
    _, past = decide(TWO, Experience())
    back, past = decide(replace(TWO, workers=3, speed=1040.0), past)
    assert back is not None and back.workers == 2 and "+4%" in back.reason
    again, past = decide(replace(TWO, now=101.0), past)
    assert again is None
    later, _ = decide(replace(TWO, now=101.0 + RETRY_S), past)
    assert later is not None and later.workers == 3


def test_a_worker_that_gains_stays_and_another_follows() -> None:
    _, past = decide(TWO, Experience())
    more, past = decide(replace(TWO, workers=3, speed=1100.0), past)
    assert more is not None and more.workers == 4 and past.speed_before == 1100.0
    stay, past = decide(replace(TWO, workers=4, speed=1300.0, load=FULL), past)
    assert stay is None and past.speed_before is None


def test_one_fewer_where_others_need_the_cores() -> None:
    fewer, _ = decide(replace(TWO, load=OVERRUN), Experience())
    assert fewer is not None and fewer.workers == 1 and "wait for a core" in fewer.reason
    assert decide(replace(TWO, workers=1, load=OVERRUN), Experience())[0] is None


def test_a_number_of_workers_is_tried_before_it_is_judged() -> None:
    scaler = Autoscaler(Cluster(workers="1:4"))  # type: ignore[arg-type]
    scaler.note(0, 10.0)
    scaler.note(500, 10.0 + COOL_DOWN_S / 2)
    assert scaler.is_due(20.0)
    assert scaler.look(1, IDLE, 20.0) is None, "not yet"
    scaler.note(1000, 10.0 + COOL_DOWN_S)
    assert not scaler.is_due(20.1), "it has just looked"
    assert scaler.next_look() == 20.0 + elastic.LOOK_EVERY_S
    decision = scaler.look(1, IDLE, 40.0)
    assert decision is not None and decision.workers == 2
    scaler.begin_period()
    assert scaler.look(2, IDLE, 50.0) is None
    scaler.is_on = False
    assert scaler.next_look() is None and not scaler.is_due(60.0)
    assert Autoscaler(Cluster(workers=2)).next_look() is None
