"""What results over seeds mean, in numbers and on the screen."""

from __future__ import annotations

import io
import json

import pytest
from rich.console import Console

from shoal.verification import ResultReport
from shoal.verification.by_result import count_pushes
from shoal.verification.noise import contests
from shoal.verification.result_report import Pushes, SeedRun
from shoal.verification.result_table import result_table

GOOD, BAD = {"test loss": 0.2, "accuracy": 0.95}, {"test loss": 0.9, "accuracy": 0.70}


def report(ours: list[SeedRun], references: list[SeedRun] | None = None) -> ResultReport:
    references = references or [SeedRun(seed=run.seed, steps=9, samples=90, results=GOOD) for run in ours]
    pairs = [(one.results, two.results) for one, two in zip(ours, references, strict=True) if one.results]
    return ResultReport(
        target="digits.py",
        strategy="ps:sync=asp",
        reference="data",
        workers=2,
        ours=tuple(ours),
        references=tuple(references),
        contests=tuple(contests([one for one, _ in pairs], [two for _, two in pairs])),
    )


def shown(found: ResultReport) -> str:
    stream = io.StringIO()
    Console(file=stream, width=80).print(result_table(found))
    assert all(len(line) <= 80 for line in stream.getvalue().splitlines())
    return " ".join(stream.getvalue().split())


@pytest.mark.parametrize(
    ("run", "ending"),
    [
        (SeedRun(seed=0, results=GOOD), "trains as well as data: accuracy within 1 point."),
        (SeedRun(seed=0, results=BAD), "trains WORSE than data: accuracy worse by 25 points."),
        (
            SeedRun(seed=0, results=BAD, diverged="The loss ran away."),
            "DID NOT TRAIN in 1 of 1 run, where data did.",
        ),
        (SeedRun(seed=0, failed="Worker 1 failed."), "DID NOT TRAIN in 1 of 1 run, where data did."),
        (SeedRun(seed=0, results=GOOD, pushes=Pushes(clean=False)), "LOST or repeated updates in 1 of 1 run."),
    ],
    ids=["good", "worse", "diverged", "failed", "miscounted"],
)
def test_verdict_of_a_run(run: SeedRun, ending: str) -> None:
    found = report([run])

    assert found.ok is ("as well" in ending)
    assert shown(found).endswith(f"ps:sync=asp with 2 workers {ending}")
    assert json.loads(json.dumps(found.to_dict()))["ok"] is found.ok


def test_what_went_wrong_is_told_by_seed() -> None:
    found = report(
        [SeedRun(seed=3, results=GOOD, rollbacks=2), SeedRun(seed=4, diverged="The run diverges: lower it.")]
    )

    text = shown(found)
    assert "rolled back 2x" in text and "seed 4, ps:sync=asp: The run diverges: lower it." in text


def test_a_task_that_diverges_anyhow_is_no_fault_of_the_strategy() -> None:
    run = SeedRun(seed=0, diverged="The loss ran away.")
    found = report([run], [run])

    assert not found.ok and "cannot be judged: data itself did not train in 1 of 1 run" in shown(found)


def test_delays_and_pushes_come_from_the_audit() -> None:
    shard = {"delay_max": 1, "applied_pushes": 5, "duplicate_pushes": 1, "late_pushes": 0}
    audit = {"clean": True, "shards": [shard | {"delay_mean": 0.5}, shard | {"delay_mean": 1.5, "delay_max": 4}]}

    assert count_pushes(audit) == Pushes(delay_mean=1.0, delay_max=4, applied=10, duplicate=2)
