"""What safety costs while nothing goes wrong: checkpoints in the background, beside the same run without them."""

from __future__ import annotations

from collections.abc import Callable

from shoal.bench.bars import Bar, Ceiling, Claim, Finding, Verdict
from shoal.bench.compare import rotated
from shoal.bench.ordeal import throughput
from shoal.bench.recorded import Recorded, record
from shoal.spec import Cluster, Job

MODEL, WORKERS, STEPS = "mlp", 2, 210
"""Four checkpoints of 167 MB, some seconds apart."""
PLAIN, SAVING = "data", "data with checkpoint every=50"
CHECKPOINT_BAR = Bar(MODEL, SAVING, PLAIN, 0.965)
STALL = Ceiling(model=MODEL, subject="stall per checkpoint", peer="", unit="s")


def measure_checkpoints(
    rounds: int,
    *,
    model: str = MODEL,
    steps: int = STEPS,
    on_measured: Callable[[str, float], None] = lambda name, samples_per_s: None,
) -> list[Verdict | Finding | Claim]:
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
        return [Claim(model=model, subject=f"{SAVING}: saves any", met=False)]
    ratios = tuple(ours / theirs for ours, theirs in zip(speeds[SAVING], speeds[PLAIN], strict=True))
    return [
        Verdict(bar=CHECKPOINT_BAR, ratios=ratios),
        Finding(ceiling=STALL, values=tuple(stalls)),
    ]


def train(model: str, steps: int, checkpoint: str) -> Recorded:
    """So many steps of two workers, with these checkpoints."""
    return record(
        Job(
            target="shoal.bench.tasks:task",
            args={"model": model, "processes": WORKERS, "steps": steps},
            cluster=Cluster(workers=WORKERS, threads=1),
            checkpoint=checkpoint,
        )
    )
