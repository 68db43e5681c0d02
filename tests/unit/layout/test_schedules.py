"""Schedules of a pipeline: complete, free of deadlock, and as idle as theory says, for any size."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from helpers.schedule_times import simulate
from shoal.errors import SpecError
from shoal.layout.schedules import Action, Actions, Kind, StageSchedule, make_schedule
from shoal.spec.model_parallel import SCHEDULES

names = st.sampled_from(SCHEDULES)
workers_drawn = st.integers(1, 6)
microbatches_drawn = st.integers(1, 24)
per_worker_drawn = st.integers(1, 4)
costs_drawn = st.fixed_dictionaries({kind: st.floats(0.1, 10.0) for kind in Kind})


def by_theory(workers: int, microbatches: int) -> float:
    return (workers - 1) / (microbatches + workers - 1)


@given(names, workers_drawn, microbatches_drawn, per_worker_drawn)
def test_every_stage_has_every_microbatch_once(
    name: str, workers: int, microbatches: int, per_worker: int
) -> None:
    schedule = make_schedule(name, workers=workers, per_worker=per_worker).actions(microbatches)
    back = (Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT) if name == "zero-bubble" else (Kind.BACKWARD,)
    for worker, actions in enumerate(schedule):
        assert Counter(actions) == {
            Action(kind, stage, microbatch): 1
            for kind in (Kind.FORWARD, *back)
            for stage in range(worker, workers * per_worker, workers)
            for microbatch in range(microbatches)
        }


@given(names, workers_drawn, microbatches_drawn, per_worker_drawn, costs_drawn)
def test_nobody_waits_for_ever_and_all_wait_for_what_they_need(
    name: str, workers: int, microbatches: int, per_worker: int, costs: dict[Kind, float]
) -> None:
    schedule = make_schedule(name, workers=workers, per_worker=per_worker).actions(microbatches)
    ends = simulate(schedule, costs).ends
    for action, end in ends.items():
        for needed in needs(action, workers * per_worker - 1):
            assert ends[needed] <= end - costs[action.kind] + 1e-9


def needs(action: Action, last: int) -> list[Action]:
    kind, stage, microbatch = action.kind, action.stage, action.microbatch
    if kind is Kind.FORWARD:
        return [Action(kind, stage - 1, microbatch)] if stage else []
    if kind is Kind.BACKWARD_WEIGHT:
        return [Action(Kind.BACKWARD_INPUT, stage, microbatch)]
    after = [Action(kind, stage + 1, microbatch)] if stage < last else []
    return [Action(Kind.FORWARD, stage, microbatch), *after]


@given(names, workers_drawn, microbatches_drawn, per_worker_drawn)
def test_every_stage_sees_microbatches_in_order(
    name: str, workers: int, microbatches: int, per_worker: int
) -> None:
    schedule = make_schedule(name, workers=workers, per_worker=per_worker).actions(microbatches)
    seen: dict[tuple[Kind, int], list[int]] = {}
    for actions in schedule:
        for action in actions:
            seen.setdefault((action.kind, action.stage), []).append(action.microbatch)
    assert all(order == list(range(microbatches)) for order in seen.values())


@given(workers_drawn, microbatches_drawn)
def test_bubbles(workers: int, microbatches: int) -> None:
    bubbles = {
        name: simulate(make_schedule(name, workers=workers).actions(microbatches)).bubble
        for name in ("gpipe", "1f1b", "zero-bubble")
    }
    assert bubbles["gpipe"] == pytest.approx(by_theory(workers, microbatches), abs=1e-12)
    assert bubbles["1f1b"] == pytest.approx(by_theory(workers, microbatches), abs=1e-12)
    assert bubbles["zero-bubble"] <= by_theory(workers, microbatches) + 1e-12


@given(workers_drawn, microbatches_drawn, st.integers(2, 4))
def test_several_stages_per_worker_wait_less(workers: int, microbatches: int, per_worker: int) -> None:
    schedule = make_schedule("interleaved", workers=workers, per_worker=per_worker).actions(microbatches)
    assert simulate(schedule).bubble <= by_theory(workers, microbatches) + 1e-12


@given(workers_drawn, microbatches_drawn)
def test_what_is_held(workers: int, microbatches: int) -> None:
    held = {
        name: simulate(make_schedule(name, workers=workers).actions(microbatches)).held
        for name in ("gpipe", "1f1b", "zero-bubble")
    }
    assert set(held["gpipe"]) == {microbatches}
    assert held["1f1b"] == tuple(min(microbatches, workers - worker) for worker in range(workers))
    assert max(held["zero-bubble"]) <= workers


def test_a_deadlock_is_found() -> None:
    forward: Actions = (Action(Kind.FORWARD, 0, 0), Action(Kind.BACKWARD, 0, 0))
    backward_first: Actions = (Action(Kind.BACKWARD, 1, 0), Action(Kind.FORWARD, 1, 0))
    with pytest.raises(ValueError, match="wait for each other"):
        simulate([forward, backward_first])


@pytest.mark.parametrize("wrong", [{"workers": 0}, {"per_worker": 0}, {"name": "gpip"}])
def test_what_cannot_be_is_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(SpecError):
        make_schedule(**{"name": "gpipe", "workers": 2, **wrong})  # type: ignore[arg-type]
    with pytest.raises(SpecError, match="microbatches"):
        make_schedule("gpipe", workers=2).actions(0)


def test_the_stages_of_a_pipeline_go_round() -> None:
    schedule = make_schedule("interleaved", workers=3, per_worker=2)
    assert (schedule.num_workers, schedule.num_stages) == (3, 6)
    assert [schedule.stages_of(worker) for worker in range(3)] == [[0, 3], [1, 4], [2, 5]]
    assert [schedule.worker_of(stage) for stage in range(6)] == [0, 1, 2, 0, 1, 2]


def test_stages_may_be_anywhere_where_all_go_forward_first() -> None:
    schedule = StageSchedule(name="gpipe", homes=(1, 0, 1), num_workers=3)
    visits = [[(one.kind, one.stage) for one in actions] for actions in schedule.actions()]
    assert visits == [
        [(Kind.FORWARD, 1), (Kind.BACKWARD, 1)],
        [(Kind.FORWARD, 0), (Kind.FORWARD, 2), (Kind.BACKWARD, 2), (Kind.BACKWARD, 0)],
        [],
    ]
