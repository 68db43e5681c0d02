"""What safety costs while nothing goes wrong: checkpoints, and what is counted and told, beside runs without."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from statistics import median

from benchmarks.bars import Bar, BarClaim, BarFinding, BarVerdict, Ceiling
from benchmarks.ordeal import throughput
from benchmarks.recorded import Recorded, record
from shoal.bench.laps import rotated
from shoal.spec import Cluster, Job

MODEL, WORKERS, STEPS = "mlp", 2, 210
"""Four checkpoints of 167 MB, some seconds apart."""
PLAIN, SAVING = "data", "data with checkpoint every=50"
CHECKPOINT_BAR = Bar(MODEL, SAVING, PLAIN, 0.965)
STALL = Ceiling(model=MODEL, subject="stall per checkpoint", peer="", unit="s")
QUIET = "data without ledger, beats and events"
BOOKS_BAR = Bar(MODEL, PLAIN, QUIET, 0.98)
BOOKS_STEPS = 60


def measure_checkpoints(
    rounds: int,
    *,
    model: str = MODEL,
    steps: int = STEPS,
    on_measured: Callable[[str, float], None] = lambda name, samples_per_s: None,
) -> list[BarVerdict | BarFinding | BarClaim]:
    """The speed with checkpoints over that without, round by round, and how long training stood still for each."""
    speeds: dict[str, list[float]] = {PLAIN: [], SAVING: []}
    stalls: list[float] = []
    for turn in range(rounds):
        for name in rotated([PLAIN, SAVING], turn):
            run = train(model, steps, checkpoint="every=50" if name == SAVING else "none")
            # All the time counts and not the median step: most steps are none in which anything is saved.
            speeds[name].append(throughput(run.timeline))
            on_measured(name, speeds[name][-1])
            stalls += [event.values["stall"] for event in run.of_kind("checkpoint")]
    if not stalls:
        return [BarClaim(model=model, subject=f"{SAVING}: saves any", met=False)]
    ratios = tuple(ours / theirs for ours, theirs in zip(speeds[SAVING], speeds[PLAIN], strict=True))
    return [
        BarVerdict(bar=CHECKPOINT_BAR, ratios=ratios),
        BarFinding(ceiling=STALL, values=tuple(stalls)),
    ]


def measure_books(
    rounds: int,
    *,
    model: str = MODEL,
    steps: int = BOOKS_STEPS,
    on_measured: Callable[[str, float], None] = lambda name, samples_per_s: None,
) -> BarVerdict:
    """The speed with the ledger, heartbeats and events over that without them, round by round."""
    speeds: dict[str, list[float]] = {PLAIN: [], QUIET: []}
    for turn in range(rounds):
        for name in rotated([PLAIN, QUIET], turn):
            run = train(model, steps, checkpoint="none", quiet=name == QUIET)
            # The median step: what the machine's other users cost in single ones would hide so little.
            speeds[name].append(1 / median(after - before for (before, _), (after, _) in pairwise(run.timeline)))
            on_measured(name, throughput(run.timeline))
    ratios = tuple(ours / theirs for ours, theirs in zip(speeds[PLAIN], speeds[QUIET], strict=True))
    return BarVerdict(bar=BOOKS_BAR, ratios=ratios)


def train(model: str, steps: int, checkpoint: str, *, quiet: bool = False) -> Recorded:
    """So many steps of two workers, with these checkpoints."""
    return record(
        Job(
            target="benchmarks.tasks:task",
            args={"model": model, "processes": WORKERS, "steps": steps},
            cluster=Cluster(workers=WORKERS, threads=1),
            checkpoint=checkpoint,
            options={"quiet": True} if quiet else {},
        )
    )
