"""Callbacks hear of each event once, in order, from whoever is first; what they raise and ask for."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from shoal.errors import TaskError
from shoal.ledger import Schedule
from shoal.ledger.order import Order
from shoal.observe import Event, RunFolder
from shoal.observe.happenings import Happening, ImageLogged, Lost, ScalarsLogged, TextLogged
from shoal.observe.told_marks import MOST_ASKED, Mark, ToldMarks
from shoal.roles.callbacks.telling import Callbacks, Outlet
from shoal.spec import Callback, CallbackContext
from shoal.spec.callback import Wish

SCHEDULE = Schedule(40, 4, 1, 2, None, Order(40, 0))


class Diary(Callback):
    """Writes down what it hears."""

    def __init__(self) -> None:
        self.told: list[Any] = []

    def on_start(self, context: CallbackContext) -> None:
        self.told.append(("start", context.step))

    def on_step(self, context: CallbackContext) -> None:
        self.told.append((context.step, context.loss, context.lr))

    def on_evaluation(self, context: CallbackContext) -> None:
        self.told.append(("evaluation", context.step, dict(context.results)))

    def on_checkpoint(self, context: CallbackContext, path: Path) -> None:
        self.told.append(("checkpoint", path.name))

    def on_fault(self, context: CallbackContext, mishap: Any) -> None:
        self.told.append(("fault", mishap.who))

    def on_end(self, context: CallbackContext, reason: str) -> None:
        self.told.append(("end", reason))

    @property
    def steps(self) -> list[int]:
        return [entry[0] for entry in self.told if isinstance(entry[0], int)]


@dataclass
class Process:
    """One process of a run, and what it says."""

    folder: Path
    is_first: bool = True
    start_step: int = 0
    callbacks: list[Callback] = field(default_factory=lambda: [Diary()])
    impossible: dict[Wish, str] = field(default_factory=dict)
    in_lockstep: bool = True
    said: list[str] = field(default_factory=list)
    warned: list[str] = field(default_factory=list)
    logged: list[Happening] = field(default_factory=list)

    def __post_init__(self) -> None:
        folder = RunFolder(self.folder)
        self.telling = Callbacks(
            self.callbacks,
            ToldMarks.open(folder.told),
            SCHEDULE,
            Outlet(say=self.said.append, warn=self.warned.append, log=self.logged.append),
            is_first=lambda: self.is_first,
            in_lockstep=self.in_lockstep,
            start_step=self.start_step,
            folder=folder,
            impossible=self.impossible,
        )

    @property
    def diary(self) -> Diary:
        assert isinstance(self.callbacks[0], Diary)
        return self.callbacks[0]

    def take(self, *steps: int) -> None:
        for step in steps:
            self.telling.begin_turn(step)
            self.telling.step_is_done(step, step / 10, 0.1)


def test_a_run_from_its_start_to_its_end(tmp_path: Path) -> None:
    one = Process(tmp_path)
    one.telling.begin(0)
    one.take(1, 2)
    one.telling.evaluated(2, {"loss": 0.5})
    one.telling.checkpoint_is_written(2)
    one.take(3)
    one.telling.checkpoint_is_written(3)
    one.telling.end("finished")
    assert one.diary.told == [
        ("start", 0),
        (1, 0.1, 0.1),
        (2, 0.2, 0.1),
        ("evaluation", 2, {"loss": 0.5}),
        (3, 0.3, 0.1),
        ("checkpoint", "step-000000002"),
        ("checkpoint", "step-000000003"),
        ("end", "finished"),
    ]
    assert not one.warned


def test_the_context_says_where_the_job_stands(tmp_path: Path) -> None:
    seen = []

    class Looks(Callback):
        def on_step(self, context: CallbackContext) -> None:
            seen.append((context.step, context.epoch, context.samples, context.total_steps, context.folder))

    Process(tmp_path, callbacks=[Looks()]).take(10, 11)
    assert seen == [(10, 1, 40, 20, tmp_path), (11, 2, 44, 20, tmp_path)]


def test_a_successor_tells_what_its_predecessor_did_not(tmp_path: Path) -> None:
    first, other = Process(tmp_path), Process(tmp_path, is_first=False)
    for process in (first, other):
        process.telling.begin(0)
        process.take(1, 2)
    other.take(3)
    other.telling.evaluated(3, {"loss": 0.25})
    assert other.diary.told == []
    other.is_first = True  # the first one died before it could tell of step 3
    other.take(4)
    assert [entry[0] for entry in first.diary.told] == ["start", 1, 2]
    assert other.diary.told == [(3, 0.3, 0.1), ("evaluation", 3, {"loss": 0.25}), (4, 0.4, 0.1)]


def test_what_is_replayed_after_a_restart_is_not_told_again(tmp_path: Path) -> None:
    first = Process(tmp_path)
    first.telling.begin(0)
    first.take(1, 2, 3, 4)
    first.telling.evaluated(3, {"loss": 1.0})
    again = Process(tmp_path, start_step=2)
    again.telling.begin(2)
    again.take(3)
    again.telling.evaluated(3, {"loss": 1.0})
    again.take(4, 5)
    assert again.diary.told == [(5, 0.5, 0.1)]


def test_a_checkpoint_that_was_written_and_not_told_is_told_by_the_next(tmp_path: Path) -> None:
    first = Process(tmp_path)
    first.take(1)
    (tmp_path / "checkpoints" / "step-000000001").mkdir(parents=True)
    first.telling.checkpoint_is_written(1)
    again = Process(tmp_path, start_step=1)
    again.telling.begin(1)
    assert again.diary.told == [("checkpoint", "step-000000001")]


def test_steps_of_an_earlier_run_are_not_told_to_callbacks_that_are_new(tmp_path: Path) -> None:
    one = Process(tmp_path, start_step=6)
    one.telling.begin(6)
    one.take(5, 6, 7)
    assert one.diary.told == [("start", 6), (7, 0.7, 0.1)]


class Stumbles(Callback):
    def on_step(self, context: CallbackContext) -> None:
        raise ValueError("no such file")


def test_an_exception_is_named_once_and_the_run_goes_on(tmp_path: Path) -> None:
    one = Process(tmp_path, callbacks=[Stumbles(), Diary()])
    one.take(1, 2, 3)
    assert one.warned == [
        "callback Stumbles.on_step failed after step 1: ValueError: no such file; the run goes on, and it is "
        "called again"
    ]
    assert isinstance(one.callbacks[1], Diary) and one.callbacks[1].steps == [1, 2, 3]
    one.telling.end("finished")
    assert one.warned[1:] == ["callback Stumbles.on_step failed 3 times in all"]


def test_one_that_says_so_ends_the_run(tmp_path: Path) -> None:
    class Strict(Stumbles):
        fatal = True

    with pytest.raises(TaskError, match=r"Strict.on_step failed after step 1: ValueError: no such file"):
        Process(tmp_path, callbacks=[Strict()]).take(1)


def test_who_was_killed_inside_a_call_is_told_of(tmp_path: Path) -> None:
    class Killed(Callback):
        def on_step(self, context: CallbackContext) -> None:
            raise SystemExit

    with pytest.raises(SystemExit):
        Process(tmp_path, callbacks=[Killed()]).take(1)
    after = Process(tmp_path)
    after.take(1, 2)
    assert after.diary.steps == [2], "at most once"
    assert "ended inside a callback, after step 1" in after.warned[0] and len(after.warned) == 1


class Wants(Callback):
    def __init__(self, *wishes: str) -> None:
        self.wishes = wishes

    def on_step(self, context: CallbackContext) -> None:
        for wish in self.wishes if context.step == 2 else ():
            getattr(context, wish)()


def test_what_is_asked_for_holds_from_the_next_step_on_in_every_process(tmp_path: Path) -> None:
    first, other = Process(tmp_path, callbacks=[Wants("stop", "save")]), Process(tmp_path, is_first=False)
    first.take(1)
    assert not first.telling.wants_stop and not other.telling.is_save_due(5, last_saved=0)
    first.take(2)
    assert not first.telling.wants_stop and not other.telling.wants_stop
    assert first.telling.stop_was_asked and other.telling.stop_was_asked
    assert not Process(tmp_path, is_first=False, in_lockstep=False).telling.wants_stop, "it is told by the first"
    assert [other.telling.is_stop_due(step) for step in (2, 3)] == [False, True]
    assert [other.telling.is_save_due(step, last_saved=0) for step in (2, 3)] == [False, True]
    assert not other.telling.is_save_due(4, last_saved=3), "it was"
    other.take(3)
    assert other.telling.wants_stop
    assert first.said == ["callback Wants.on_step asked to stop after step 2"]


def test_an_evaluation_is_asked_for_once(tmp_path: Path) -> None:
    one = Process(tmp_path, callbacks=[Wants("evaluate")])
    one.take(1, 2)
    assert not Process(tmp_path, is_first=False).telling.begin_turn(3), "the first one says when"
    assert Process(tmp_path).telling.begin_turn(3), "who follows one that was killed knows of it"
    assert one.telling.begin_turn(3)
    one.telling.ask_evaluation(99)
    assert not one.telling.begin_turn(4) and one.telling.marks.asked == [SCHEDULE.total_steps]


def test_what_cannot_be_is_refused_once(tmp_path: Path) -> None:
    one = Process(tmp_path, callbacks=[Wants("save"), Wants("save")], impossible={Wish.SAVE: "nobody keeps any"})
    one.take(1, 2)
    assert one.warned == ["a callback asks to save, which is left out: nobody keeps any"]
    assert one.telling.marks[Mark.SAVE] == 0
    for number in range(MOST_ASKED + 2):
        one.telling.marks.ask_evaluation(number + 1)
    one.telling.ask_evaluation(SCHEDULE.total_steps)
    assert f"at most {MOST_ASKED}" in one.warned[-1]


def test_what_is_logged(tmp_path: Path) -> None:
    class Logs(Callback):
        def on_step(self, context: CallbackContext) -> None:
            context.log("half", 0.5)
            context.log("tensor", torch.tensor(2))
            context.log("note", "a text")
            context.log("digit", np.zeros((4, 4)))

    one = Process(tmp_path, callbacks=[Logs()])
    one.take(3)
    assert one.logged == [
        ScalarsLogged(scalars=[[3, "half", 0.5]]),
        ScalarsLogged(scalars=[[3, "tensor", 2.0]]),
        TextLogged(name="note", text="a text", step=3),
        ImageLogged(name="digit", path="images/digit-3.png", step=3),
    ]
    assert (tmp_path / "images" / "digit-3.png").is_file()


def test_what_cannot_be_logged_is_named(tmp_path: Path) -> None:
    class Logs(Callback):
        def on_step(self, context: CallbackContext) -> None:
            context.log("nothing", None)
            context.log("late", 1.0)

    one = Process(tmp_path, callbacks=[Logs()])
    one.take(1)
    assert "Logs.on_step failed after step 1: TypeError" in one.warned[0] and one.logged == []


def test_faults_are_told_between_steps_and_once(tmp_path: Path) -> None:
    line = Event(Lost(rank=1, reason="killed"), 1).to_json() + "\n"
    (tmp_path / "events.jsonl").write_text(line)
    first = Process(tmp_path)
    first.telling.begin(0)
    assert first.diary.told == [("start", 0), ("fault", "worker 1")]
    again = Process(tmp_path)
    again.telling.begin(0)
    (tmp_path / "events.jsonl").write_text(line + line)
    again.telling.end("finished")
    assert again.diary.told == [("fault", "worker 1"), ("end", "finished")]
