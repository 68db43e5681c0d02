"""Training while things go wrong: a fault every ten seconds, beside the same run without any.

A run without faults takes as many steps right before it, so that the bits can be compared where a strategy goes in
lockstep; a shorter one follows. What they did next to the run under faults is one measure; what its own timeline
shows to be missing after each fault is the other. The model counts, beside the audit, how often each sample was
applied.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from benchmarks.bars import BarClaim, BarFinding, BarVerdict
from benchmarks.counting import times_applied
from benchmarks.models import CYCLE, WORKLOADS
from benchmarks.ordeal import CALM_PART, Ordeal, Promise, judge_ordeal, throughput
from benchmarks.outages import Strike, find_outages
from benchmarks.recorded import Recorded, record
from benchmarks.torchrun_peer import measure_torchrun
from shoal.errors import ShoalError
from shoal.observe import Event
from shoal.spec import Cluster, Job

MODEL, WORKERS = "small_mlp", 2
SECONDS, EVERY_S = 180.0, 10.0
CALIBRATION_STEPS = 150
LEAST_STEPS = 50
MOST_CALM_S = SECONDS
"""Longer runs without faults would tell no more; where they are shorter than the one with, bits say nothing."""


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """A way to train, and what is done to it."""

    key: str
    """What it is called for short."""
    name: str
    strategy: str
    faults: str
    """Kinds and targets of the faults, as `--chaos random:` takes them."""
    promise: Promise
    spares: int = 0
    in_lockstep: bool = True
    """Whether the bits must be those of the run without faults."""

    def job(self, steps: int, every_s: float | None = None) -> Job:
        """The run: with a fault every so many seconds, or with none."""
        return Job(
            target="benchmarks.tasks:task",
            args={"model": MODEL, "processes": WORKERS, "steps": steps, "counted": True},
            strategy=self.strategy,
            cluster=Cluster(workers=WORKERS, spares=self.spares, threads=1),
            chaos="" if every_s is None else f"random:every={every_s:g}s,{self.faults}",
        )


# A seed whose first three minutes have every kind of fault and every target about equally often.
SCENARIOS = (
    Scenario(
        key="kills",
        name="data, workers killed",
        strategy="data",
        faults="kinds=kill,seed=2",
        spares=1,
        promise=Promise(kept=0.97, kept_by_timeline=0.98, lost_s=0.4, to_next_step_s=0.3),
    ),
    Scenario(
        key="all",
        name="data, all kinds of faults",
        strategy="data",
        faults="kinds=kill+hang+slow+raise,seed=2",
        spares=1,
        promise=Promise(kept=0.85, kept_by_timeline=0.95),
    ),
    Scenario(
        key="servers",
        name="ps, anybody killed",
        strategy="ps:servers=2,sync=asp",
        faults="kinds=kill,targets=worker+server+coordinator,seed=2",
        promise=Promise(kept_by_timeline=0.93),
        in_lockstep=False,
    ),
)


TORCHRUN = "torchrun"
RUNS = ("kills", TORCHRUN, "all", "servers")
"""What can be asked for, in the order in which it is done."""


def compare_under_faults(
    seconds: float = SECONDS,
    *,
    every_s: float = EVERY_S,
    runs: Sequence[str] = RUNS,
    on_measured: Callable[[Ordeal], None],
) -> tuple[list[Ordeal], list[BarVerdict | BarFinding | BarClaim]]:
    """The scenarios of these names, and torchrun. A run that does not finish is a promise that is not kept."""
    ordeals, judged = list[Ordeal](), list[BarVerdict | BarFinding | BarClaim]()
    scenarios = {scenario.key: scenario for scenario in SCENARIOS}
    for name in (name for name in RUNS if name in runs):
        if name == TORCHRUN:
            ordeals.append(measure_torchrun(seconds, every_s))
            on_measured(ordeals[-1])
            continue
        scenario = scenarios[name]
        try:
            ordeals.append(measure_chaos(scenario, seconds, every_s))
        except ShoalError as error:
            judged.append(BarClaim(model=MODEL, subject=f"{scenario.name}: finishes ({error})", met=False))
        else:
            on_measured(ordeals[-1])
            judged += judge_ordeal(MODEL, ordeals[-1], scenario.promise)
    return ordeals, judged


def measure_chaos(scenario: Scenario, seconds: float, every_s: float) -> Ordeal:
    """The scenario for about so many seconds without its faults, as long with them, and then a part without."""
    speed = throughput(record(scenario.job(CALIBRATION_STEPS)).timeline)
    steps, calm_steps = (
        _whole_epochs(max(LEAST_STEPS, round(each * speed / _batch())))
        for each in (seconds, min(seconds, MOST_CALM_S))
    )
    before, stormy = record(scenario.job(calm_steps)), record(scenario.job(steps, every_s))
    return assess(scenario, before, stormy, record(scenario.job(calm_steps // CALM_PART)))


def assess(scenario: Scenario, before: Recorded, stormy: Recorded, after: Recorded) -> Ordeal:
    """A run under faults beside the one before it and the one after it; bits count where the first was as long."""
    faults = stormy.of_kind("fault")
    strikes = [_strike(fault, in_lockstep=scenario.in_lockstep) for fault in faults]
    stopped = Counter(_whom(fault) for fault in faults if fault.values["kind"] == "hang")
    named = Counter(_whom(event) for event in stormy.of_kind("hung"))
    has_twin = scenario.in_lockstep and before.results.get("steps") == stormy.results.get("steps")
    return Ordeal(
        name=scenario.name,
        calm_samples_per_s=throughput(before.timeline[-len(after.timeline) :], after.timeline),
        samples_per_s=throughput(stormy.timeline),
        faults=Counter(_name(fault) for fault in faults),
        outages=tuple(find_outages(stormy.timeline, strikes, _batch())),
        seconds=stormy.timeline[-1][0] - stormy.timeline[0][0],
        all_hung_named=named >= stopped if stopped else None,
        is_audit_clean=bool(stormy.results.get("audit", {}).get("clean")),
        is_count_exact=_counts_as_audited(stormy),
        has_same_bits=stormy.results["digest"] == before.results["digest"] if has_twin else None,
    )


def _counts_as_audited(run: Recorded) -> bool | None:
    """Whether by the weights every sample was applied once an epoch, and as often in all as the audit has it."""
    if (found := times_applied(run.model)) is None:
        return None
    return set(found) == {run.results["steps"] / CYCLE} and sum(found) == run.results["audit"]["samples"]


def _whole_epochs(steps: int) -> int:
    return -(-steps // CYCLE) * CYCLE


def _strike(fault: Event, *, in_lockstep: bool) -> Strike:
    """A slow worker does a part of its work; those who go in step with it do no more."""
    kind, seconds = fault.values["kind"], (fault.values["seconds"] or 0.0)
    if kind != "slow":
        return Strike(time=fault.time, kind=kind)
    missing = seconds * (1 - 1 / fault.values["factor"])
    return Strike(time=fault.time, kind=kind, seconds=seconds, due_s=missing if in_lockstep else missing / WORKERS)


def _whom(event: Event) -> tuple[str, int]:
    return event.values["role"], event.values["rank"]


def _name(fault: Event) -> str:
    kind, role = fault.values["kind"], fault.values["role"]
    return kind if role == "worker" else f"{kind} {role}"


def _batch() -> int:
    return WORKLOADS[MODEL]().batch_per_process * WORKERS
