"""Callbacks under every strategy, and whatever happens to workers: each event is told once, in order."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from told_tasks import DIARY, EVALUATES_AT, SAVES_AT, STEPS, STOPS_AT, told

import shoal
from shoal.launch.owner import ZYGOTE_VARIABLE, ZygoteProcess
from shoal.launch.runs import Run, train
from shoal.observe import read_events

TASKS = Path(__file__).with_name("told_tasks.py")
PLANNED = [10, 20, 30, 40]
RELAY, ASYNCHRONOUS = "data:partition=relay", "ps:servers=1,sync=asp"
LOCKSTEP = ["data", "data:via=ring", "sharded", "pipeline", "ps:servers=1"]
IN_EVERY_TEST = ["data", "sharded", "ps:servers=1", ASYNCHRONOUS]
WAYS = [
    one if one in IN_EVERY_TEST else pytest.param(one, marks=pytest.mark.long)
    for one in (*LOCKSTEP, RELAY, ASYNCHRONOUS)
]
WHENEVER = ("fault", "checkpoint")
"""What is told when it comes, which is between other steps each time."""


@dataclass
class Told:
    """What a run's callback wrote down."""

    run: Run

    @property
    def lines(self) -> list[list[str]]:
        return [line.split() for line in (self.run.folder / DIARY).read_text().splitlines()]

    def of(self, kind: str) -> list[list[str]]:
        return [words for first, *words in self.lines if first == kind]

    def steps(self, kind: str) -> list[int]:
        return [int(words[0]) for words in self.of(kind)]

    @property
    def kinds(self) -> Counter[str]:
        return Counter(line[0] for line in self.lines)

    def without(self, *kinds: str) -> list[list[str]]:
        return [line for line in self.lines if line[0] not in kinds]

    def events(self, kind: str) -> list[dict[str, Any]]:
        return [event.values for event in read_events(self.run.folder) if event.kind == kind]


@dataclass
class Runner:
    root: Path
    zygote: ZygoteProcess

    def __call__(self, name: str, strategy: str = "data", **asked: Any) -> Told:
        wanted: dict[str, Any] = {"checkpoint": "every=8,keep=99", "args": {}, **asked}
        if "resume" in wanted:
            wanted = {name: value for name, value in wanted.items() if name not in ("args", "checkpoint")}
        else:
            cluster = {"workers": 2, "threads": 1}
            wanted = {"cluster": cluster, **wanted}
            wanted |= {"target": f"{TASKS}:told", "name": name, "strategy": strategy}
        found = train(**wanted, runs=self.root, progress=False, output=StringIO(), zygote=self.zygote)
        return Told(found)


@pytest.fixture
def run(tmp_path: Path, zygote: ZygoteProcess) -> Runner:
    return Runner(tmp_path, zygote)


@pytest.mark.parametrize("strategy", WAYS)
def test_each_event_is_told_once_and_in_order(run: Runner, strategy: str) -> None:
    told = run("calm", strategy)
    assert told.lines[0] == ["start", "0"] and told.lines[-1] == ["end", "finished"]
    assert told.steps("step") == list(range(1, STEPS + 1))
    if strategy != ASYNCHRONOUS:  # else the first worker evaluates after the first step of its own that is due
        assert told.steps("evaluation") == PLANNED
    assert told.steps("checkpoint") == [one["step"] for one in told.events("checkpoint")]
    assert told.kinds["start"] == told.kinds["end"] == 1 and not told.kinds["fault"]
    evaluated = {one["step"]: one["results"]["loss"] for one in told.events("evaluation")}
    assert {int(step): float(loss) for step, loss, *_ in told.of("evaluation")} == evaluated
    losses = dict(pair for one in told.events("steps") for pair in one["steps"])
    heard = {int(step): float(loss) for step, loss, *_ in told.of("step")}
    assert {step: heard[step] for step in losses} == losses


@pytest.mark.parametrize("strategy", WAYS)
def test_what_is_asked_for_is_done_by_all(run: Runner, strategy: str) -> None:
    steps = STEPS if strategy in LOCKSTEP else 10 * STEPS  # what was handed out is done before all stop
    told = run("asked", strategy, args={"steps": steps, "asks": True, "logs": True}, checkpoint="every=1h,keep=99")
    asked = next(step for step in told.steps("evaluation") if step > EVALUATES_AT)
    saved, last = told.steps("checkpoint")[0], told.steps("step")[-1]
    assert told.of("end") == [["stopped"]] and told.run.results["reason"] == "stopped"
    assert told.steps("step") == list(range(1, last + 1))
    assert logged_steps(told) == list(range(1, last + 1))
    if strategy in LOCKSTEP:
        assert (asked, saved, last) == (EVALUATES_AT + 1, SAVES_AT + 1, STOPS_AT + 1)
    else:  # the others hear of it when they can, some steps later
        assert saved > SAVES_AT and last >= STOPS_AT


@pytest.mark.long
@pytest.mark.parametrize("chaos", ["", "kill worker:0 at step 3", "kill worker:2 at step 3"])
def test_several_hosts_do_what_is_asked_for_at_the_same_step(
    run: Runner, chaos: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They have no memory in common: what the first worker asks for comes with the step."""
    monkeypatch.setenv(ZYGOTE_VARIABLE, run.zygote.name)
    cluster = {"workers": 3, "threads": 1, "on": "local:2"}
    told = run(
        "asked", args={"asks": True, "logs": True}, checkpoint="every=1h,keep=99", cluster=cluster, chaos=chaos
    )
    asked = next(step for step in told.steps("evaluation") if step > EVALUATES_AT)
    saved, last = told.steps("checkpoint")[0], told.steps("step")[-1]
    assert (asked, saved, last) == (EVALUATES_AT + 1, SAVES_AT + 1, STOPS_AT + 1)
    assert told.steps("step") == logged_steps(told) == list(range(1, last + 1))
    assert told.of("end") == [["stopped"]] and told.kinds["start"] == 1
    assert len(told.events("replaced")) == len(told.events("fault")) == bool(chaos)


@pytest.mark.parametrize("strategy", ["data:via=ring", pytest.param("sharded", marks=pytest.mark.long)])
def test_what_is_trained_again_after_a_restart_is_told_once(run: Runner, strategy: str) -> None:
    calm = run("calm", strategy)
    told = run("killed", strategy, chaos="kill worker:0 at step 21", on_failure="restart")
    assert told.of("fault") == [["restarted"]] and len(told.events("restarted")) == 1
    assert_as_calm(told, calm)


def test_a_run_that_the_user_resumes_tells_what_comes_after_its_checkpoint_again(run: Runner) -> None:
    first = run("one")
    (first.run.folder / DIARY).rename(first.run.folder / "first.txt")
    again = run("one", resume="one@16")
    assert again.lines[0] == ["start", "16"] and again.of("end") == [["finished"]]
    assert again.steps("step") == list(range(17, STEPS + 1)) and again.steps("evaluation") == [20, 30, 40]


class Listens(shoal.Callback):
    def __init__(self) -> None:
        self.heard: list[Any] = []

    def on_step(self, context: shoal.CallbackContext) -> None:
        self.heard.append(context.step)
        if context.step == 3:
            context.evaluate()
        if context.step == 6:
            context.stop()

    def on_evaluation(self, context: shoal.CallbackContext) -> None:
        self.heard.append(f"evaluation {context.step}")

    def on_end(self, context: shoal.CallbackContext, reason: str) -> None:
        self.heard.append(reason)


def test_a_trainer_tells_the_same() -> None:
    listens = Listens()
    for _ in range(2):  # one after the other begins anew
        with shoal.Trainer(replace(told(), callbacks=[listens])) as trainer:
            assert trainer.fit().step == 7
    assert listens.heard == [1, 2, 3, 4, "evaluation 4", 5, 6, 7, "stopped"] * 2


def killed(run: Runner, strategy: str, kills: int, *, apart: int, **args: Any) -> Told:
    """A run whose two workers are killed in turn, so many steps apart; all of it has come to pass.

    Steps take a while, for nobody is to be killed who is dead already.
    """
    plan = "; ".join(f"kill worker:{number % 2} at step {4 + apart * number}" for number in range(kills))
    told = run("killed", strategy, args=args, evaluate_every=4, chaos=plan, max_failures=1000)
    assert len(told.events("fault")) == len(told.events("lost")) == told.kinds["fault"] == kills
    return told


@pytest.mark.parametrize("kills", [4, pytest.param(20, marks=pytest.mark.long)])
@pytest.mark.parametrize("strategy", ["data", "ps:servers=1"])
def test_kills_change_nothing_of_what_is_told_kept_and_averaged(run: Runner, strategy: str, kills: int) -> None:
    args = {"steps": 20 + 5 * kills, "best": "-loss", "ema": 0.9, "rate": 0.2, "logs": True, "pause_s": 0.01}
    calm, told = run("calm", strategy, args=args, evaluate_every=4), killed(run, strategy, kills, apart=5, **args)
    for what in ("digest", "average_digest", "best", "results"):
        assert told.run.results[what] == calm.run.results[what], what
    assert_told_once(told)
    assert_as_calm(told, calm, *([] if strategy == "data" else ["step"]))
    assert_logged(told)


@pytest.mark.parametrize("kills", [4, pytest.param(20, marks=pytest.mark.long)])
def test_kills_of_workers_that_wait_for_nobody(run: Runner, kills: int) -> None:
    """They need time: who was killed must be there again before the others have done all of it."""
    args = {"steps": 20 + 15 * kills, "best": "-loss", "ema": 0.9, "rate": 0.2, "pause_s": 0.025}
    told = killed(run, ASYNCHRONOUS, kills, apart=10, logs=True, **args)
    assert_told_once(told)
    assert_logged(told)
    assert told.steps("step")[-1] == args["steps"] and told.of("end") == [["finished"]]
    found = {one["step"]: one["results"] for one in told.events("evaluation")}
    assert set(told.steps("evaluation")) <= found.keys() and len(found) - told.kinds["evaluation"] <= cut_off(told)
    best = min(found, key=lambda step: found[step]["loss"])
    assert told.run.results["best"]["step"] == told.steps("best")[-1] == best
    assert told.run.results["average_digest"] != told.run.digest


def logged_steps(told: Told) -> list[int]:
    """Of what the callback logs in each."""
    logged = [scalar for one in told.events("scalars") for scalar in one["scalars"]]
    assert all((name, value) == ("double", 2.0 * step) for step, name, value in logged)
    return [step for step, *_ in logged]


def cut_off(told: Told) -> int:
    """How many workers were killed inside a call, as warnings say: each of them may have told one thing less."""
    return sum("inside a callback" in one["text"] for one in told.events("warning"))


def assert_told_once(told: Told) -> None:
    """No event twice, and none is missing but where a call was cut off."""
    steps = told.steps("step")
    assert max(Counter(tuple(line[:2]) for line in told.without("fault")).values()) == 1
    assert steps == sorted(steps) and steps[-1] - len(steps) <= cut_off(told)


def assert_logged(told: Told) -> None:
    """What a worker has logged is not lost with it, and comes once."""
    logged, heard = logged_steps(told), told.steps("step")
    assert len(set(logged)) == len(logged) and set(logged) <= set(heard)
    assert len(heard) - len(logged) <= cut_off(told)


def assert_as_calm(told: Told, calm: Told, *but_for: str) -> None:
    """Every loss, rate and result in their order, to the last bit, but for calls that were cut off.

    `but_for`: servers do not tell who comes later what the losses of others were.
    """
    heard, expected = (one.without(*WHENEVER, *but_for) for one in (told, calm))
    assert len(expected) - len(heard) <= cut_off(told)
    assert heard == [line for line in expected if line in heard]
