"""A comparison without processes: who is measured when, who is left out and why, and what Ctrl-C leaves."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest

from shoal.bench.comparison import MOST_STEPS, BenchOrder, BenchSession
from shoal.bench.laps import LEAST_STEPS, Course, Lap
from shoal.bench.report import ONE_PROCESS
from shoal.bench.track import TaskFacts
from shoal.errors import Interrupted, SpecError, WorkerFailed
from shoal.spec import Cluster, Job

BATCH = 10


class PaperTrack:
    """Runs nothing, at the speed that it is told."""

    def __init__(self, *, refusals: Mapping[str, str] | None = None, per_worker: bool = False) -> None:
        self.refusals = refusals or {}
        self.per_worker = per_worker
        self.ran: list[str] = []
        self.jobs: list[Job] = []
        self.courses: list[Course] = []
        self.failing: dict[str, Exception] = {}
        """By what is run: what it raises."""
        self.step_s = 0.1

    def inspect(self, job: Job, strategies: list[str]) -> TaskFacts:
        known = {name: text for name, text in self.refusals.items() if name in strategies}
        return TaskFacts(batch_size=BATCH, batch_per_worker=self.per_worker, refusals=known)

    def run(self, job: Job, course: Course, on_part: Callable[[float], None]) -> Lap:
        name = ONE_PROCESS if job.cluster.workers == 1 else job.strategy
        self.ran.append(name)
        self.jobs.append(job)
        self.courses.append(course)
        if name in self.failing:
            raise self.failing[name]
        on_part(0.5)
        return Lap(samples_per_s=BATCH / self.step_s, first_step_s=0.1, peak_memory={0: 1}, loss=1.0)


def order(
    *strategies: str, rounds: int = 2, steps: int | None = 5, seconds: float = 3.0, workers: int = 2
) -> BenchOrder:
    return BenchOrder(
        target="digits.py:task",
        strategies=strategies,
        cluster=Cluster(workers=workers, threads=1),
        rounds=rounds,
        steps=steps,
        seconds=seconds,
    )


def compare(wanted: BenchOrder, track: PaperTrack, told: list[tuple[float, str]] | None = None):
    note = (lambda done, label: None) if told is None else (lambda done, label: told.append((done, label)))
    return BenchSession(wanted, track, note).run()  # type: ignore[arg-type]


def test_all_take_turns_and_each_round_starts_with_another():
    track = PaperTrack()
    report = compare(order("data", "ps", rounds=3), track)
    first, second, third = [ONE_PROCESS, "data", "ps"], ["data", "ps", ONE_PROCESS], ["ps", ONE_PROCESS, "data"]
    assert track.ran == first + second + third
    assert [row.strategy for row in report.rows] == ["data", "ps"] and report.alone.strategy == ONE_PROCESS
    assert all(len(row.laps) == 3 for row in report.all_rows)
    assert set(track.courses) == {Course(5)} and not report.left_out and not report.is_broken_off


def test_progress_only_rises_and_says_what_is_run():
    told: list[tuple[float, str]] = []
    compare(order("data", rounds=2, steps=None), PaperTrack(), told)
    parts = [done for done, _ in told]
    assert parts[0] == 0 and all(0 <= done <= 1 for done in parts)
    assert parts == sorted(parts) and parts[-1] > 0.85
    assert told[-1][1] == "round 2 of 2: one process"


def test_what_the_jobs_own_facts_refuse_is_left_out_with_the_sentence():
    track = PaperTrack()
    report = compare(order("data", "mesh:data=3"), track)
    assert "a grid of 3 workers, but the job has 2" in report.left_out["mesh:data=3"]
    assert "mesh:data=3" not in track.ran and [row.strategy for row in report.rows] == ["data"]


def test_what_cannot_train_the_task_is_left_out_with_the_sentence():
    track = PaperTrack(refusals={"pipeline": "Task: objective= does not go with it."})
    report = compare(order("data", "pipeline"), track)
    assert report.left_out == {"pipeline": "Task: objective= does not go with it."}
    assert "pipeline" not in track.ran


def test_a_strategy_that_fails_is_left_out_and_the_others_go_on():
    track = PaperTrack()
    track.failing["ps"] = WorkerFailed("Worker 1 failed: no.", global_rank=1)
    report = compare(order("data", "ps", rounds=2), track)
    assert report.left_out == {"ps": "Worker 1 failed: no."}
    assert track.ran.count("ps") == 1 and track.ran.count("data") == 2
    assert [row.strategy for row in report.rows] == ["data"]


def test_without_anybody_left_the_reasons_are_the_error():
    with pytest.raises(SpecError, match=r"^mesh: data=3 is a grid"):
        compare(order("mesh:data=3"), PaperTrack())
    refusals = {"tensor": "Task: no.", "layer": "Task: not either."}
    with pytest.raises(
        SpecError, match=r"none of the strategies(.|\n)*tensor: Task: no.\nlayer: Task: not either."
    ):
        compare(order("tensor", "layer"), PaperTrack(refusals=refusals))


def test_where_one_process_fails_the_task_is_at_fault():
    track = PaperTrack()
    track.failing[ONE_PROCESS] = WorkerFailed("Worker 0 failed: the loss.", details="Traceback")
    with pytest.raises(WorkerFailed, match="the loss"):
        compare(order("data"), track)


@pytest.mark.parametrize(
    "signal", [Interrupted("Stopped on request."), KeyboardInterrupt()], ids=["run", "between"]
)
def test_an_interrupt_leaves_what_was_measured(signal):
    track = PaperTrack()
    track.failing["ps"] = signal
    report = compare(order("data", "ps"), track)
    assert report.is_broken_off and [row.strategy for row in report.rows] == ["data"]
    assert not report.left_out and track.ran == [ONE_PROCESS, "data", "ps"]


def test_an_interrupt_before_anything_was_measured_is_one():
    track = PaperTrack()
    track.failing[ONE_PROCESS] = Interrupted("Stopped on request.")
    with pytest.raises(Interrupted):
        compare(order("data"), track)


@pytest.mark.parametrize(("step_s", "steps"), [(0.1, 30), (10.0, LEAST_STEPS), (1e-5, MOST_STEPS)])
def test_steps_follow_from_the_time_that_one_process_may_take(step_s, steps):
    track = PaperTrack()
    track.step_s = step_s
    report = compare(order("data", steps=None, seconds=3.0), track)
    assert report.course == Course(steps)
    assert track.ran[0] == ONE_PROCESS and track.courses[0] == Course(LEAST_STEPS)
    assert set(track.courses[1:]) == {Course(steps)}


@pytest.mark.parametrize(("per_worker", "overrides"), [(False, {}), (True, {"batch_size": BATCH})])
def test_one_process_trains_on_the_batches_of_all_workers(per_worker, overrides):
    track = PaperTrack(per_worker=per_worker)
    compare(order("data", rounds=1), track)
    alone, data = track.jobs
    assert alone.overrides == overrides and data.overrides == {}
    assert (alone.cluster.workers, data.cluster.workers) == (1, 2)


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        ({"workers": 1}, "beside one process, but workers=1; use 2 or more"),
        ({"rounds": 0}, "rounds must be a whole number of at least 1"),
        ({"steps": 4}, "steps must be a whole number of at least 5"),
        ({"seconds": 0.0}, "seconds must be above 0"),
    ],
)
def test_what_cannot_be_measured_is_refused(wrong, sentence):
    with pytest.raises(SpecError, match=sentence):
        order("data", **wrong)
