"""Steps, epochs and cuts: every sample exactly once per epoch, whatever the sizes."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from shoal.ledger import Order, Schedule


@st.composite
def schedules(draw: st.DrawFn) -> Schedule:
    length, batch_size, slots = draw(st.integers(1, 90)), draw(st.integers(1, 40)), draw(st.integers(1, 9))
    epochs = draw(st.integers(1, 3))
    return Schedule(length, batch_size, slots, epochs, None, Order(length, draw(st.integers(0, 99))))


@given(schedules())
def test_every_sample_once_per_epoch(schedule: Schedule) -> None:
    seen: list[list[int]] = [[] for _ in range(schedule.epochs)]
    for step in range(1, schedule.total_steps + 1):
        for cut in schedule.cuts(step, range(schedule.slots)):
            seen[schedule.epoch_of(step)] += cut.samples.tolist()
        assert sum(map(len, seen)) == schedule.samples_after(step)
    assert all(sorted(epoch) == list(range(schedule.length)) for epoch in seen)
    assert schedule.samples_after(0) == 0


@given(schedules(), st.data())
def test_cuts_are_the_batch_in_order(schedule: Schedule, data: st.DataObject) -> None:
    step = data.draw(st.integers(1, schedule.total_steps))
    cuts = list(schedule.cuts(step, range(schedule.slots)))
    assert [cut.slot for cut in cuts] == list(range(schedule.slots))
    sizes = [len(cut.samples) for cut in cuts]
    assert {cut.batch_samples for cut in cuts} == {sum(sizes)}
    assert 1 <= sum(sizes) <= schedule.batch_size
    assert max(sizes) - min(sizes) <= 1
    # A worker that asks for its own slots alone finds what it would find among all.
    for slot, cut in enumerate(cuts):
        (own,) = schedule.cuts(step, range(slot, slot + 1))
        assert own.samples.tolist() == cut.samples.tolist()


def test_the_last_batch_may_be_small_and_steps_may_be_limited() -> None:
    schedule = Schedule(10, 4, 2, 3, 7, Order(10, 0))
    assert (schedule.steps_per_epoch, schedule.total_steps) == (3, 7)
    assert [len(cut.samples) for cut in schedule.cuts(3, range(2))] == [1, 1]
    assert [schedule.samples_after(step) for step in (1, 2, 3, 4, 7)] == [4, 8, 10, 14, 24]
    assert [schedule.epoch_of(step) for step in (1, 3, 4, 7)] == [0, 0, 1, 2]
    assert Schedule(10, 4, 2, 1, 100, Order(10, 0)).total_steps == 3
