"""What a process notes of its own movement."""

from __future__ import annotations

import timeit

import pytest

from shoal.roles.process.pulse import Pulse

BEAT_S = 0.2


class Process:
    """A pulse under a clock that the test moves."""

    def __init__(self) -> None:
        self.now = 50.0
        self.pulse = Pulse(clock=lambda: self.now)

    def take_steps(self, *seconds: float) -> None:
        for took in seconds:
            self.now += took
            self.pulse.lap(self.pulse.step + 1)

    def beat(self, after: float = BEAT_S) -> dict:
        self.now += after
        return self.pulse.read(BEAT_S)


@pytest.fixture
def process() -> Process:
    process = Process()
    process.pulse.enter("training")
    return process


def test_after_five_steps_it_is_known_what_is_usual(process):
    process.take_steps(0.1, 0.1, 0.1, 0.1)
    assert "p99" not in process.beat(after=0.0)
    process.take_steps(0.3)
    told = process.beat(after=0.0)
    assert told["p99"] == pytest.approx(0.3)
    assert (told["step"], told["phase"], told["still"]) == (5, "computing", 0.0)


def test_one_odd_step_in_a_hundred_is_not_usual(process):
    process.take_steps(*[0.1] * 60, 9.0, *[0.1] * 39)
    assert process.beat()["p99"] == pytest.approx(0.1)


def test_waiting_does_not_count_as_computing(process):
    for _ in range(5):
        process.now += 0.2
        for _ in range(100):
            process.now += 0.05
            process.pulse.idle()
        process.pulse.lap(1)
    assert process.beat(after=0.0)["p99"] == pytest.approx(0.25), "computing, and until it first looked up"


def test_who_waits_shows_signs_and_who_got_stuck_after_it_does_not(process):
    process.take_steps(*[0.1] * 5)
    for _ in range(10):
        process.pulse.idle()
        told = process.beat()
        assert (told["phase"], told["still"]) == ("waiting", 0.0)
    phases = [process.beat()["phase"] for _ in range(5)]
    assert phases[-1] == "computing"
    assert process.beat()["still"] == pytest.approx(6 * BEAT_S)


def test_in_a_call_that_cannot_look_up_it_waits_until_the_step_is_done(process):
    process.pulse.block()
    assert {process.beat()["phase"] for _ in range(20)} == {"waiting"}
    process.pulse.lap(1)
    assert process.beat()["phase"] == "computing"


def test_stillness_counts_only_while_the_reader_runs(process):
    process.take_steps(*[0.1] * 5)
    process.beat()
    told = process.beat(after=7.0)
    assert told["still"] == pytest.approx(2 * BEAT_S), "whatever held up one thread held up the other"
    assert told["gap"] == pytest.approx(7.0 - BEAT_S)


def test_an_evaluation_is_not_a_step(process):
    process.take_steps(*[0.1] * 5)
    process.pulse.enter("evaluating")
    told = process.beat(after=60.0)
    assert told["phase"] == "evaluating" and "p99" not in told
    process.pulse.enter("training")
    process.take_steps(0.1)
    assert process.beat()["p99"] == pytest.approx(0.1)


def test_a_sign_costs_next_to_nothing():
    pulse = Pulse("training")
    seconds = min(timeit.repeat(lambda: pulse.lap(1), number=1000, repeat=5)) / 1000
    assert seconds < 50e-6, "of steps that take a thousand times as long"


def test_time_in_a_state_of_its_own_is_nobodys_step(process):
    process.take_steps(*[0.1] * 10)
    with process.pulse.during("saving"):
        told = process.beat(after=20.0)
        assert told["phase"] == "saving" and "p99" not in told
        with process.pulse.during("auditing"):
            assert process.beat()["phase"] == "auditing"
        assert process.beat()["phase"] == "saving"
    told = process.beat()
    assert (told["phase"], told["still"], told["p99"]) == ("computing", 0.0, pytest.approx(0.1))
    process.take_steps(0.1)
    assert process.beat()["p99"] == pytest.approx(0.3), "beats and a step; nothing of the save"


def test_an_error_leaves_the_state_as_well(process):
    with pytest.raises(OSError), process.pulse.during("saving"):
        raise OSError
    assert process.beat()["phase"] == "computing"


def test_an_interlude_is_no_part_of_its_step(process):
    for _ in range(5):
        process.now += 0.1
        with process.pulse.interlude("script"):
            assert process.beat(after=3.0)["phase"] == "script"
        process.take_steps(0.0)
    told = process.beat(after=0.0)
    assert (told["phase"], told["p99"]) == ("computing", pytest.approx(0.1))
