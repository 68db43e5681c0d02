"""A run's summary is what its events add up to."""

import pytest

from shoal.observe import Event, RunSummary
from shoal.observe.summary import Speed
from shoal.observe.wording import final_rows


def steps(time: float, step: int, total: int = 100) -> Event:
    values = {"steps": [[step, 1 / step]], "samples": 10 * step, "lr": 0.1, "total_steps": total, "epoch": 1}
    return Event.of("steps", 0, values, time)


def test_whole_run(run_events):
    summary = RunSummary()
    for event in run_events:
        summary.add(event)
    assert (summary.state, summary.step, summary.total_steps, summary.samples) == ("done", 200, 200, 12800)
    assert (summary.epoch, summary.spares, len(summary.evaluations)) == (4, 0, 4)
    assert summary.results == {"loss": 0.0104, "accuracy": 0.9817}
    assert [summary.workers[rank].replacements for rank in range(3)] == [0, 0, 1]
    assert summary.workers[1].peak_rss == 301_000_000


def test_speed_follows_the_last_seconds_only():
    speed = Speed(window_s=10)
    for second in range(20):
        speed.mark(second, step=second, samples=100 * second)
    assert speed.samples_per_s == pytest.approx(100)
    for second in range(20, 40):
        speed.mark(second, step=second, samples=1900 + 10 * (second - 19))
    assert speed.samples_per_s == pytest.approx(10)


def test_evaluating_does_not_count_as_slow_training():
    summary = RunSummary()
    for event in (steps(0, 1), steps(1, 11)):
        summary.add(event)
    summary.add(Event.of("state", 0, {"state": "evaluating", "step": 11}, time=1))
    summary.add(Event.of("state", 0, {"state": "training", "step": 11}, time=61))
    for event in (steps(61.1, 12), steps(62.1, 22)):
        summary.add(event)
    assert summary.speed.samples_per_s == pytest.approx(100)
    assert summary.seconds_left == pytest.approx(7.8)


def test_what_is_heard_at_once_has_no_speed():
    speed = Speed()
    for number in range(3):
        speed.mark(5 + number / 1000, step=10 * number, samples=100 * number)
    assert speed.samples_per_s is None
    speed.mark(6, step=30, samples=300)
    assert speed.samples_per_s == pytest.approx(300)


def test_steps_that_are_told_in_bursts_were_not_taken_in_bursts():
    summary = RunSummary()
    summary.add(Event.of("state", 0, {"state": "training", "step": 0}, time=0))
    for event in (steps(1, 1), steps(2, 11)):
        summary.add(event)
    summary.add(Event.of("state", 0, {"state": "evaluating", "step": 11}, time=2))
    summary.add(Event.of("state", 0, {"state": "training", "step": 11}, time=3))
    for event in (steps(4, 12), steps(4.001, 21)):
        summary.add(event)
    assert summary.speed.samples_per_s == pytest.approx(100, rel=0.01)


def test_spares_do_not_count_as_workers():
    summary = RunSummary()
    summary.add(Event.of("world", values={"workers": 2, "spares": 1}))
    summary.add(Event.of("state", 2, {"state": "ready", "step": 0}))
    summary.add(Event.of("beat", 2, {"step": 0, "rss": 1}))
    assert sorted(summary.workers) == [0, 1]


def test_results_fall_back_on_the_last_evaluation():
    summary = RunSummary()
    assert summary.results == {}
    summary.add(Event.of("evaluation", values={"step": 5, "results": {"loss": 0.5}}))
    summary.add(Event.of("stopped", values={"reason": "Ctrl-C"}))
    assert summary.results == {"loss": 0.5}


@pytest.mark.parametrize(("steps", "total", "told"), [(7, 20, True), (5, 20, False), (20, 20, False)])
def test_results_of_a_run_that_stopped_early_say_how_old_they_are(steps: int, total: int, told: bool) -> None:
    summary = RunSummary()
    summary.add(Event.of("evaluation", values={"step": 5, "results": {"loss": 0.5}}))
    summary.add(Event.of("steps", values={"steps": [[steps, 0.4]], "samples": 9, "total_steps": total}))
    summary.add(Event.of("stopped", values={"reason": "Ctrl-C"}))
    assert (("evaluated", "after step 5") in final_rows(summary)) == told


def test_servers_have_no_worker_s_place_but_count_when_replaced():
    summary = RunSummary()
    summary.add(Event.of("world", values={"workers": 1, "spares": 0, "servers": 2}))
    summary.add(Event.of("lost", values={"role": "server", "rank": 0, "node": 1, "reason": "killed"}))
    summary.add(Event.of("replaced", values={"role": "server", "rank": 0, "node": 4, "seconds": 0.5}))
    assert summary.workers[0].state == "starting" and summary.replaced == {"server": 1}
    assert ("replaced", "1 server") in final_rows(summary)


def test_a_world_with_servers_can_grow():
    summary = RunSummary()
    summary.add(Event.of("world", values={"workers": 1, "spares": 0, "servers": 1}))
    summary.add(Event.of("state", 1, {"state": "training", "step": 0}))
    assert summary.workers[1].state == "training"


def test_workers_come_and_go_with_the_places_they_host():
    summary = RunSummary()
    summary.add(Event.of("world", values={"workers": 2, "places": 4}))
    summary.add(Event.of("scaled", values={"workers": 3, "before": 2, "hosts": [[0], [1], [2, 3]], "reason": ""}))
    assert sorted(summary.workers) == [0, 1, 2]
    summary.add(Event.of("lost", 0, {"rank": 0, "reason": "killed"}))
    summary.add(Event.of("replaced", 0, {"rank": 0, "by": 1, "seconds": 0.1, "hosts": [[0, 1], [2, 3]]}))
    assert sorted(summary.workers) == [0, 2] and summary.replaced == {"worker": 1}
    summary.add(Event.of("beat", 1, {"rss": 5}))
    assert sorted(summary.workers) == [0, 2], "the last words of one that has left"


def test_what_a_worker_says_at_its_end_about_its_memory_counts():
    summary = RunSummary()
    summary.add(Event.of("beat", 0, {"rss": 300}))
    assert summary.workers[0].peak_rss == 300
    summary.add(Event.of("done", 0, {"results": {}, "memory": {"host": 310}}))
    summary.add(Event.of("memory", values={"peak_rss": [[0, 312]]}))
    assert summary.workers[0].peak_rss == 310, "a beat may tell of more pages than there ever were"


def test_what_was_undone_does_not_count():
    summary = RunSummary()
    summary.add(Event.of("world", None, {"workers": 2}))
    for step in (10, 20, 30):
        summary.add(steps(step, step))
        summary.add(Event.of("evaluation", 0, {"step": step, "results": {"loss": 1 / step}}))
    late = {**steps(31, 31).values, "skipped": [2, 9.0]}
    summary.add(Event.of("steps", 0, late, 31))
    summary.add(Event.of("audit", 0, {"clean": False}))
    told = {"reason": "killed", "step": 20, "samples": 200, "undone": 11, "seconds": 3.0}
    summary.add(Event.of("restarted", 1, told))
    assert (summary.step, summary.samples, summary.loss) == (20, 200, None)
    assert [step for step, _ in summary.evaluations] == [10, 20]
    assert (summary.skipped_parts, summary.audit, summary.state) == (0, None, "starting")
    assert {worker.state for worker in summary.workers.values()} == {"starting"}
    assert ("restarted", "1 time, 11 steps undone") in final_rows(summary)


def test_a_run_that_the_user_resumes_forgets_its_last_end():
    summary = RunSummary()
    for event in (
        steps(1, 30),
        Event.of("finished", None, {"results": {}}),
        Event.of("resumed", None, {"step": 20}),
    ):
        summary.add(event)
    assert summary.outcome is None and summary.step == 20 and not summary.restarts
