"""What the benchmark reads off a run under faults: costs of faults, promises, tables."""

import io
import itertools
from dataclasses import replace

import pytest
import torch
from rich.console import Console

from benchmarks import chaos, torchrun_script
from benchmarks.bars import BarClaim, BarFinding, BarVerdict
from benchmarks.models import CYCLE, WORKLOADS
from benchmarks.ordeal import Ordeal, Promise, judge_ordeal, throughput
from benchmarks.outages import AFTERMATH_S, Outage, Strike, find_outages
from benchmarks.recorded import Recorded
from benchmarks.table import ordeals_table, verdicts_table
from shoal.errors import LaunchError, WorkerFailed
from shoal.observe import Event
from shoal.observe.happenings import Hung
from shoal.roles.process.timeline import Timeline, read_timeline
from shoal.spec.chaos import parse_chaos
from shoal.spec.vocabulary import Role

BATCH = 10


def steady(begin: float, steps: int, first: int, step_s: float = 0.1) -> list[tuple[float, int]]:
    """So many steps from `begin` on, the first of which makes it `first` steps in all."""
    return [(begin + step_s * number, BATCH * (first + number)) for number in range(steps)]


def test_a_timeline_is_what_anyone_saw_first(tmp_path):
    path = tmp_path / "timeline"
    for one in (Timeline(path), Timeline(path)):
        for samples in (10, 20, 30):
            one.note(samples)
    marks = read_timeline(path)
    assert [samples for _, samples in marks] == [10, 20, 30]
    assert len(path.read_text().splitlines()) == 6
    path.write_text("5.0 20\n1.0 10\n3.0 10\n4.0 30\n")
    assert read_timeline(path) == [(1.0, 10), (4.0, 30)]


def test_a_fault_costs_the_gap_behind_it_less_a_step():
    timeline = [*steady(0.0, 11, 1), *steady(1.5, 50, 12)]
    (outage,) = find_outages(timeline, [Strike(time=1.02, kind="kill")], BATCH)
    assert outage.kind == "kill"
    assert outage.to_next_step_s == pytest.approx(0.48)
    assert outage.lost_s == pytest.approx(0.4)


def test_steps_that_nobody_told_of_are_not_lost():
    timeline = [*steady(0.0, 11, 1), *steady(1.5, 50, 14)]
    (outage,) = find_outages(timeline, [Strike(time=1.02, kind="kill")], BATCH)
    assert outage.lost_s == pytest.approx(0.2)


def test_a_step_that_was_done_before_the_kill_is_not_the_next_one():
    timeline = [*steady(0.0, 11, 1), (1.1, 120), *steady(1.6, 50, 13)]
    (outage,) = find_outages(timeline, [Strike(time=1.09, kind="kill")], BATCH)
    assert outage.to_next_step_s == pytest.approx(0.51)
    assert outage.lost_s == pytest.approx(0.4)


def test_slow_steps_count_as_long_as_a_fault_lasts_and_no_longer():
    slow = steady(1.4, 10, 12, step_s=0.4)
    late = AFTERMATH_S + 10
    timeline = [*steady(0.0, 11, 1), *slow, *steady(5.1, 100, 22), *steady(late + 5.1, 100, 122)]
    (outage,) = find_outages(timeline, [Strike(time=1.01, kind="slow", seconds=3.0)], BATCH)
    assert outage.lost_s == pytest.approx(10 * 0.3)


def test_what_slows_a_run_for_long_is_not_put_down_to_its_faults():
    slower = steady(100.2, 500, 1001, step_s=0.2)
    timeline = [*steady(0.0, 1000, 1), *slower]
    strikes = [Strike(time=when, kind="kill") for when in (50.01, 150.01)]
    assert [outage.lost_s for outage in find_outages(timeline, strikes, BATCH)] == pytest.approx([0.0, 0.0])


def test_every_fault_has_its_own_time_and_those_after_the_end_cost_nothing():
    timeline = [*steady(0.0, 11, 1), *steady(1.5, 11, 12), *steady(3.0, 11, 23)]
    strikes = [Strike(time=when, kind="kill") for when in (2.51, 1.01, 99.0)]
    found = find_outages(timeline, strikes, BATCH)
    assert [round(outage.lost_s, 6) for outage in found] == [0.4, 0.4]
    assert find_outages([(0.0, 10)], strikes, BATCH) == []


def test_throughput_counts_all_the_time_that_was_given():
    timeline = steady(0.0, 11, 1)
    assert throughput(timeline) == pytest.approx(100) and throughput(timeline, until=2.0) == pytest.approx(50)
    assert throughput(timeline, steady(9.0, 31, 1, step_s=0.2)) == pytest.approx(400 / 7)
    with pytest.raises(LaunchError, match="too few to measure"):
        throughput(timeline[:1])


ORDEAL = Ordeal(
    name="data, workers killed",
    calm_samples_per_s=1000.0,
    samples_per_s=980.0,
    seconds=20.0,
    faults={"kill": 2},
    outages=(
        Outage(kind="kill", to_next_step_s=0.1, lost_s=0.3),
        Outage(kind="kill", to_next_step_s=0.3, lost_s=0.1),
    ),
    is_audit_clean=True,
    is_count_exact=True,
    has_same_bits=True,
)


def test_a_promise_is_judged_line_by_line():
    promise = Promise(kept=0.97, kept_by_timeline=0.99, lost_s=0.2, to_next_step_s=0.1)
    kept, by_timeline, lost, to_next, *claims = judge_ordeal("small_mlp", ORDEAL, promise)
    assert isinstance(kept, BarVerdict) and kept.ratio == pytest.approx(0.98) and kept.met
    assert isinstance(by_timeline, BarVerdict) and by_timeline.ratio == pytest.approx(0.98) and not by_timeline.met
    assert isinstance(lost, BarFinding) and lost.value == pytest.approx(0.2) and lost.met
    assert isinstance(to_next, BarFinding) and to_next.value == pytest.approx(0.2) and not to_next.met
    assert [(one.subject.split(": ")[1], one.met) for one in claims] == [
        ("finishes", True),
        ("audit clean", True),
        ("the weights count as the audit does", True),
        ("bits as without faults", True),
    ]


def test_what_a_slow_down_must_cost_is_deducted_from_both_measures():
    slow = Outage(kind="slow", to_next_step_s=0.1, lost_s=2.45, due_s=2.25)
    found = replace(ORDEAL, outages=(*ORDEAL.outages, slow), samples_per_s=840.0)
    assert found.kept_by_timeline == pytest.approx(1 - (2.85 - 2.25) / 20)
    assert found.kept == pytest.approx(0.84 * 20 / 17.75)


@pytest.mark.parametrize("flaw", ["is_audit_clean", "is_count_exact", "has_same_bits", "all_hung_named"])
def test_whatever_was_lost_or_changed_is_a_missed_promise(flaw):
    judged = judge_ordeal("small_mlp", replace(ORDEAL, **{flaw: False}), Promise())
    assert [one.met for one in judged].count(False) == 1


def test_a_run_without_faults_shows_nothing():
    judged = judge_ordeal("small_mlp", replace(ORDEAL, faults={}), Promise())
    assert [one.subject for one in judged if not one.met] == ["data, workers killed: finishes"]


def test_tables_name_faults_and_what_they_cost():
    console = Console(width=180, file=io.StringIO(), record=True)
    console.print(
        ordeals_table([ORDEAL, replace(ORDEAL, name="torchrun", is_audit_clean=None, has_same_bits=None)])
    )
    console.print(verdicts_table(judge_ordeal("small_mlp", replace(ORDEAL, has_same_bits=False), Promise())))
    text = console.export_text()
    assert "2 kill" in text and "98.0%" in text and "0.20 s" in text and "0.30 s" in text and "clean" in text
    assert "met" in text and "missed" in text


@pytest.mark.parametrize("scenario", chaos.SCENARIOS, ids=lambda scenario: scenario.name)
def test_both_runs_of_a_scenario_differ_in_the_faults_alone(scenario):
    calm, stormy = scenario.job(60), scenario.job(60, every_s=10)
    assert calm == replace(stormy, chaos="")
    wish = parse_chaos(stormy.chaos).random
    assert wish.fixed and wish.mean_s == 10


def fault(kind, rank, when, **values):
    usual = {"role": "worker", "rank": rank, "step": 1, "seconds": None, "factor": 1.0, "always": False}
    return Event.of("fault", rank, {"kind": kind, **usual, **values}, when)


def test_every_process_that_was_stopped_must_be_named():
    calm = Recorded(steady(0.0, 50, 1), {"digest": "a", "audit": {"clean": True}}, [])
    events = [fault("hang", 1, 1.0), fault("slow", 0, 2.0, seconds=3.0, factor=4.0), fault("hang", 1, 3.0)]
    events.append(fault("kill", 0, 3.5, role="server"))
    hung = Event(Hung(role=Role.WORKER, rank=1, step=1, seconds=1.0, reason="", where="", stacks=""), 1, 1.5)
    results = {"digest": "b", "audit": {"clean": True}}
    found = chaos.assess(chaos.SCENARIOS[1], calm, Recorded(calm.timeline, results, [*events, hung]), calm)
    assert found.all_hung_named is False and found.has_same_bits is False and found.is_audit_clean
    assert found.faults == {"hang": 2, "slow": 1, "kill server": 1} and found.due_s == pytest.approx(2.25)
    stormy = Recorded(calm.timeline, {"digest": "b"}, [*events, hung, hung])
    found = chaos.assess(chaos.SCENARIOS[2], calm, stormy, calm)
    assert found.all_hung_named and found.has_same_bits is None and not found.is_audit_clean


def test_the_weights_are_compared_with_the_audit_and_with_once_an_epoch():
    def exact(counts, audited):
        model = {"counts": torch.tensor(counts)}
        results = {"digest": "a", "steps": 3 * CYCLE, "audit": {"clean": True, "samples": audited}}
        run = Recorded(steady(0.0, 50, 1), results, [fault("kill", 0, 1.0)], model)
        return chaos.assess(chaos.SCENARIOS[0], run, run, run).is_count_exact

    assert exact([3.0, 3.0], 6)
    assert not exact([3.0, 4.0], 6) and not exact([3.0, 3.0], 5)
    assert not exact([4.0, 4.0], 8), "once too often, and audited so"


def test_bits_of_runs_of_different_lengths_say_nothing():
    runs = [Recorded(steady(0.0, 50, 1), {"digest": name, "steps": n}, []) for name, n in (("a", 40), ("b", 80))]
    assert chaos.assess(chaos.SCENARIOS[0], runs[0], runs[1], runs[0]).has_same_bits is None


def test_the_yardstick_is_what_went_before_and_after():
    slow_then_fast = [*steady(0.0, 100, 1, step_s=0.4), *steady(40.0, 50, 101)]
    calm = [Recorded(timeline, {"digest": "a"}, []) for timeline in (slow_then_fast, steady(90.0, 50, 1))]
    stormy = Recorded(steady(60.0, 50, 1, step_s=0.2), {"digest": "a"}, [])
    found = chaos.assess(chaos.SCENARIOS[0], calm[0], stormy, calm[1])
    assert found.calm_samples_per_s == pytest.approx(100) and found.kept == pytest.approx(0.5)


def test_a_run_that_fails_is_told_of_and_the_others_go_on(monkeypatch):
    tried = []

    def measure(scenario, seconds, every_s):
        tried.append(scenario.name)
        if len(tried) == 2:
            raise WorkerFailed("Worker 1 was killed from outside.", global_rank=1, details="", exit_code=137)
        return replace(ORDEAL, name=scenario.name)

    monkeypatch.setattr(chaos, "measure_chaos", measure)
    monkeypatch.setattr(chaos, "measure_torchrun", lambda seconds, every_s: replace(ORDEAL, name="torchrun"))
    told = []
    ordeals, judged = chaos.compare_under_faults(5.0, on_measured=told.append)
    assert tried == [scenario.name for scenario in chaos.SCENARIOS]
    assert [one.name for one in ordeals] == [tried[0], "torchrun", tried[2]] and told == ordeals
    (missed,) = [one for one in judged if isinstance(one, BarClaim) and not one.met]
    assert missed.subject.startswith(tried[1]) and "killed from outside" in missed.subject


def test_torchruns_workload_is_the_benchmarks_own():
    workload = WORKLOADS[chaos.MODEL]()
    shapes = [tuple(layer.weight.T.shape) for layer in workload.model() if isinstance(layer, torch.nn.Linear)]
    assert shapes == list(itertools.pairwise(torchrun_script.WIDTHS))
    group = workload.optimizer(workload.model().parameters()).param_groups[0]
    assert (group["lr"], group["momentum"]) == (torchrun_script.LEARNING_RATE, torchrun_script.MOMENTUM)
    assert (workload.batch_per_process, CYCLE) == (torchrun_script.BATCH, torchrun_script.BATCHES)


def test_torchruns_script_goes_on_from_its_checkpoint(tmp_path):
    def fresh():
        model = torch.nn.Linear(3, 2)
        return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    (model, optimizer), (other, its_optimizer) = fresh(), fresh()
    assert torchrun_script.load(tmp_path, other, its_optimizer) == 0
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    torchrun_script.save(tmp_path, model, optimizer, step=50)
    assert torchrun_script.load(tmp_path, other, its_optimizer) == 50
    assert torch.equal(model.weight, other.weight)
    momentum = [one.state_dict()["state"][0]["momentum_buffer"] for one in (optimizer, its_optimizer)]
    assert torch.equal(*momentum)
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint.pt"]
