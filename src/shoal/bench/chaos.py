"""Training while things go wrong: a fault every ten seconds, beside the same run without any.

A run without faults takes as many steps right before it, so that the bits can be compared where a strategy goes in
lockstep; a shorter one follows. What they did next to the run under faults is the throughput it is measured by.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from shoal.bench.bars import Claim, Finding, Verdict
from shoal.bench.models import WORKLOADS
from shoal.bench.ordeal import CALM_PART, Ordeal, Promise, judge_ordeal, throughput
from shoal.bench.outages import Strike, find_outages
from shoal.bench.recorded import Recorded, record
from shoal.bench.torchrun_peer import measure_torchrun
from shoal.errors import ShoalError
from shoal.observe import Event
from shoal.spec import Cluster, Job

MODEL, WORKERS = "small_mlp", 2
SECONDS, EVERY_S = 180.0, 10.0
CALIBRATION_STEPS = 150
LEAST_STEPS = 50


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """A way to train, and what is done to it."""

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
            target="shoal.bench.tasks:task",
            args={"model": MODEL, "processes": WORKERS, "steps": steps},
            strategy=self.strategy,
            cluster=Cluster(workers=WORKERS, spares=self.spares, threads=1),
            chaos="" if every_s is None else f"random:every={every_s:g}s,{self.faults}",
        )


# A seed whose first three minutes have every kind of fault and every target about equally often.
SCENARIOS = (
    Scenario(
        name="data, workers killed",
        strategy="data",
        faults="kinds=kill,seed=2",
        spares=1,
        promise=Promise(kept=0.97, lost_s=0.4, to_next_step_s=0.3),
    ),
    Scenario(
        name="data, all kinds of faults",
        strategy="data",
        faults="kinds=kill+hang+slow+raise,seed=2",
        spares=1,
        promise=Promise(kept=0.85),
    ),
    Scenario(
        name="ps, workers and servers killed",
        strategy="ps:servers=2,sync=asp",
        faults="kinds=kill,targets=worker+server,seed=2",
        promise=Promise(),
        in_lockstep=False,
    ),
)


def compare_under_faults(
    seconds: float = SECONDS, *, every_s: float = EVERY_S, on_measured: Callable[[Ordeal], None]
) -> tuple[list[Ordeal], list[Verdict | Finding | Claim]]:
    """Every scenario, and torchrun beside the first. A run that does not finish is a promise that is not kept."""
    ordeals, judged = list[Ordeal](), list[Verdict | Finding | Claim]()
    for scenario in SCENARIOS:
        try:
            ordeals.append(measure_chaos(scenario, seconds, every_s))
        except ShoalError as error:
            judged.append(Claim(model=MODEL, subject=f"{scenario.name}: finishes ({error})", met=False))
        else:
            on_measured(ordeals[-1])
            judged += judge_ordeal(MODEL, ordeals[-1], scenario.promise)
        if scenario is SCENARIOS[0]:
            ordeals.append(measure_torchrun(seconds, every_s))
            on_measured(ordeals[-1])
    return ordeals, judged


def measure_chaos(scenario: Scenario, seconds: float, every_s: float) -> Ordeal:
    """The scenario for about so many seconds without its faults, as long with them, and then a part without."""
    speed = throughput(record(scenario.job(CALIBRATION_STEPS)).timeline)
    steps = max(LEAST_STEPS, round(seconds * speed / _batch()))
    before, stormy = record(scenario.job(steps)), record(scenario.job(steps, every_s))
    return assess(scenario, before, stormy, record(scenario.job(steps // CALM_PART)))


def assess(scenario: Scenario, before: Recorded, stormy: Recorded, after: Recorded) -> Ordeal:
    """A run under faults beside the one before it, which took as many steps, and the one after it."""
    faults = stormy.of_kind("fault")
    strikes = [Strike(time=one.time, kind=one.values["kind"], seconds=_lasts(one)) for one in faults]
    stopped = Counter(_whom(fault) for fault in faults if fault.values["kind"] == "hang")
    named = Counter(_whom(event) for event in stormy.of_kind("hung"))
    return Ordeal(
        name=scenario.name,
        calm_samples_per_s=throughput(before.timeline[-len(after.timeline) :], after.timeline),
        samples_per_s=throughput(stormy.timeline),
        faults=Counter(_name(fault) for fault in faults),
        outages=tuple(find_outages(stormy.timeline, strikes, _batch())),
        all_hung_named=named >= stopped if stopped else None,
        is_audit_clean=bool(stormy.results.get("audit", {}).get("clean")),
        has_same_bits=stormy.results["digest"] == before.results["digest"] if scenario.in_lockstep else None,
    )


def _whom(event: Event) -> tuple[str, int]:
    return event.values["role"], event.values["rank"]


def _name(fault: Event) -> str:
    kind, role = fault.values["kind"], fault.values["role"]
    return kind if role == "worker" else f"{kind} {role}"


def _lasts(fault: Event) -> float:
    return (fault.values["seconds"] or 0.0) if fault.values["kind"] == "slow" else 0.0


def _batch() -> int:
    return WORKLOADS[MODEL]().batch_per_process * WORKERS
