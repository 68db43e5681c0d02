"""Who hangs: beats and time in, findings out."""

from __future__ import annotations

import pytest

from shoal.launch.hangs import LOOK_EVERY_S, Finding, HangJudge, Life, Patience
from shoal.observe.happenings import Heartbeat, StateEntered
from shoal.spec.vocabulary import State

BEAT_S = 0.2


class Ward:
    """Processes that beat as the test says, under a clock that it moves."""

    def __init__(self, *names: str, p99: float | None = 0.01) -> None:
        self.now = 100.0
        self.judge = HangJudge()
        self.lives = {name: Life(self.now) for name in names}
        self.p99 = dict.fromkeys(names, p99)
        self.phases = dict.fromkeys(names, "computing")
        self.still_since: dict[str, float] = {}
        self.gaps: dict[str, float] = {}

    def pass_time(self, seconds: float, *, silent: tuple[str, ...] = ()) -> list[tuple[str, Finding]]:
        """Let time pass until somebody is found, or all of it; the silent do not beat."""
        until = self.now + seconds
        while self.now < until:
            self.now += BEAT_S
            for name in self.lives.keys() - set(silent):
                self._beat(name)
            if found := self.look():
                return found
        return []

    def look(self) -> list[tuple[str, Finding]]:
        names = {id(life): name for name, life in self.lives.items()}
        findings = self.judge.look(list(self.lives.values()), self.now)
        return [(names[id(finding.life)], finding) for finding in findings]

    def _beat(self, name: str) -> None:
        beat = Heartbeat(
            step=7,
            phase=State(self.phases[name]),
            still=self.now - self.still_since.get(name, self.now),
            p99=self.p99[name],
            gap=None if self.p99[name] is None else self.gaps.get(name, 0.0),
        )
        self.lives[name].hear(beat, self.now)


def names_of(found: list[tuple[str, Finding]]) -> list[str]:
    return [name for name, _ in found]


@pytest.mark.parametrize(
    ("p99", "limit_s"), [(0.001, 1.0), (0.1, 1.0), (0.3, 3.0), (0.9, 5.0), (1.0, 5.0), (2.0, 10.0), (30.0, 150.0)]
)
def test_ten_usual_steps_from_one_to_five_seconds_and_never_below_a_fourfold_one(p99, limit_s):
    found = Patience().stillness_s(p99)
    assert found == pytest.approx(limit_s)
    assert found > 4 * p99


@pytest.mark.parametrize(("p99", "limit_s"), [(0.001, 1.0), (0.3, 3.0), (2.0, 5.0), (None, 30.0)])
def test_one_that_falls_silent_is_found(p99, limit_s):
    ward = Ward("stopped", "waiting", p99=p99)
    ward.phases["waiting"] = "waiting"
    assert not ward.pass_time(1.0)
    (name, finding), *others = ward.pass_time(60.0, silent=("stopped",))
    assert (name, others, finding.is_silent) == ("stopped", [], True)
    assert limit_s <= finding.seconds <= limit_s + 2 * BEAT_S


def test_one_that_falls_silent_in_its_first_steps_is_found_once_others_have_taken_theirs():
    ward = Ward("new", "other")
    ward.p99["new"] = None
    ward.pass_time(1.0)
    assert not ward.pass_time(4.6, silent=("new",))
    assert names_of(ward.pass_time(1.0, silent=("new",))) == ["new"]


def test_in_an_evaluation_silence_is_long():
    ward = Ward("one", "two")
    ward.pass_time(1.0)
    ward.phases = dict.fromkeys(ward.phases, "evaluating")
    ward.pass_time(0.5)
    assert not ward.pass_time(29.0, silent=("one",))
    assert names_of(ward.pass_time(5.0, silent=("one",))) == ["one"]


def test_after_a_change_of_state_what_is_usual_is_still_known():
    ward = Ward("one", "two")
    ward.pass_time(1.0)
    ward.lives["one"].hear(StateEntered(state=State.TRAINING, step=8), ward.now)
    assert names_of(ward.pass_time(2.0, silent=("one",))) == ["one"]


def test_who_does_not_move_while_another_waits_is_found_and_who_waits_never_is():
    ward = Ward("stuck", "waits")
    ward.phases["waits"] = "waiting"
    ward.still_since = {"stuck": ward.now, "waits": ward.now}
    (name, finding), *others = ward.pass_time(60.0)
    assert (name, others, finding.is_silent) == ("stuck", [], False)
    assert 1.0 <= finding.seconds <= 1.0 + 2 * BEAT_S


def test_who_does_not_move_while_another_goes_on_is_found():
    ward = Ward("stuck", "goes on")
    ward.still_since["stuck"] = ward.now
    assert names_of(ward.pass_time(2.0)) == ["stuck"]


@pytest.mark.parametrize(("p99", "limit_s"), [(0.01, 5.0), (1.0, 10.0)])
@pytest.mark.parametrize("names", [("one",), ("one", "two")])
def test_where_nobody_goes_on_there_is_more_time(names, p99, limit_s):
    ward = Ward(*names, p99=p99)
    ward.still_since = dict.fromkeys(names, ward.now)
    found = ward.pass_time(60.0)
    assert names_of(found) == list(names)
    assert limit_s <= found[0][1].seconds <= limit_s + 2 * BEAT_S


def test_a_slow_one_is_left_alone():
    ward = Ward("slow", "waits", p99=0.8)
    ward.phases["waits"] = "waiting"
    for _ in range(5):
        ward.still_since["slow"] = ward.now
        assert not ward.pass_time(4 * 0.8)


def test_before_steps_were_measured_nobody_is_found_stuck():
    ward = Ward("compiles", "waits", p99=None)
    ward.phases["waits"] = "waiting"
    ward.still_since["compiles"] = ward.now
    assert not ward.pass_time(300.0)


def test_a_server_that_does_not_move_is_found():
    ward = Ward("server", "worker")
    ward.phases = {"server": "serving", "worker": "waiting"}
    ward.still_since["server"] = ward.now
    found = ward.pass_time(60.0)
    assert names_of(found) == ["server"] and found[0][1].seconds >= 5.0


def test_all_silent_at_once_is_the_machine():
    ward = Ward("one", "two", "three")
    ward.pass_time(1.0)
    everybody = tuple(ward.lives)
    assert not ward.pass_time(25.0, silent=everybody)
    assert not ward.pass_time(1.0), "they are back"
    assert sorted(names_of(ward.pass_time(60.0, silent=everybody))) == sorted(everybody)


def test_two_of_three_silent_have_more_time():
    ward = Ward("one", "two", "three")
    ward.pass_time(1.0)
    assert not ward.pass_time(4.0, silent=("one", "two"))
    assert sorted(names_of(ward.pass_time(2.0, silent=("one", "two")))) == ["one", "two"]


def test_one_alone_that_falls_silent_has_five_seconds():
    ward = Ward("one")
    ward.pass_time(1.0)
    (_, finding), *_ = ward.pass_time(60.0, silent=("one",))
    assert 5.0 <= finding.seconds <= 5.5


def test_whose_beats_are_often_late_has_more_time():
    ward = Ward("late", "other")
    ward.gaps["late"] = 1.8
    ward.pass_time(1.0)
    assert not ward.pass_time(3.0, silent=("late",))
    assert names_of(ward.pass_time(2.0, silent=("late",))) == ["late"]


def test_the_judges_own_delay_is_nobodys_fault():
    ward = Ward("one", "two")
    ward.pass_time(1.0)
    ward.now += 20.0  # The judge did not run; what they said lies unread.
    assert not ward.look()
    assert not ward.pass_time(0.6, silent=("one",))
    assert names_of(ward.pass_time(2.0, silent=("one",))) == ["one"]


def test_it_wants_to_look_a_few_times_a_second():
    ward = Ward("one")
    assert ward.judge.next_look() is None
    ward.look()
    assert ward.judge.next_look() == ward.now + LOOK_EVERY_S
