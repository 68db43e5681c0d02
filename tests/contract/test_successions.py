"""One suite for every succession: what becomes of a run whose members come and go, with servers or without."""

from __future__ import annotations

import signal
from dataclasses import dataclass

import pytest

from helpers.supervised import Table, of, said_to, started
from shoal.errors import WorkerFailed
from shoal.launch.messages import Answer, ScaleRequest, StartProcess
from shoal.spec import Cluster, Job

KILLED = -signal.SIGKILL


@dataclass
class Stage(Table):
    """A table that knows its workers; `job` says which succession there is."""

    @property
    def workers(self) -> list[int]:
        return [number for number, hand in enumerate(self.machine.crew.hands) if hand.is_worker]

    @property
    def others(self) -> list[int]:
        return [number for number in range(len(self.machine.crew.hands)) if number not in self.workers]

    def finish(self, worker: int) -> None:
        """Let a worker do all its work and end."""
        self.say(worker, "done", results={"rank": self.machine.crew.hands[worker].global_rank, "loss": 0.5})
        self.end(worker)

    def finish_others(self) -> None:
        """Let servers and coordinator end, once they were asked to."""
        for process in self.others:
            self.say(process, "done", results={"clean": True})
        for process in self.others:
            self.end(process)


@pytest.fixture(params=["data", "data:via=ring", "ps:servers=2,sync=asp", "ps"])
def stage(request: pytest.FixtureRequest) -> Stage:
    return Stage(Job(target="toy.py", strategy=request.param, cluster=Cluster(workers=2, threads=1)))


def test_a_run_is_over_when_all_have_done_their_work(stage: Stage) -> None:
    stage.begin()
    first, second = stage.workers
    stage.finish(second)
    assert stage.machine.over is None
    stage.finish(first)
    assert stage.machine.over is None or not stage.others
    stage.finish_others()
    assert stage.machine.over is not None and stage.machine.over.error is None
    assert not of(StartProcess, stage.wait(100.0)), "nobody is started for a run that is over"


def test_who_dies_is_followed_or_ends_the_run(stage: Stage) -> None:
    """Never neither: a run that waits for somebody who is gone would wait for ever."""
    stage.begin()
    victim = stage.workers[1]
    asked = stage.end(victim, KILLED)
    told = [message["kind"] for process in stage.others for message in said_to(process, asked)]
    if not started(asked) and "lost" not in told:
        stage.wait(10.0)
        for process in (stage.workers[0], *stage.others):
            stage.end(process, KILLED)
        assert stage.machine.over is not None
        assert isinstance(stage.machine.over.error, WorkerFailed)


def test_time_that_passes_asks_for_nothing_by_itself(stage: Stage) -> None:
    stage.begin()
    stage.wait(0.0)
    assert not of(StartProcess, [*stage.wait(0.0), *stage.wait(1.0)])
    assert stage.machine.over is None


def test_how_many_there_are_is_answered(stage: Stage) -> None:
    stage.begin()
    (answer,) = of(Answer, stage.tell(ScaleRequest(number=7)))
    assert answer.request == 7


def test_a_failure_that_cannot_be_helped_ends_the_run_with_its_words(stage: Stage) -> None:
    """An error before the first step: the next process would meet it, too."""
    victim = stage.workers[0]
    stage.say(victim, "failed", message="my own fault", traceback="trace", clear=False)
    stage.end(victim, 1)
    stage.wait(10.0)
    for process in (stage.workers[1], *stage.others):
        stage.end(process, KILLED)
    assert stage.machine.over is not None and "my own fault" in str(stage.machine.over.error)
