"""`shoal verify` on strategies that cut the model: what they are compared with, and what is judged."""

from __future__ import annotations

from pathlib import Path

import pytest

from shoal.launch.owner import ZygoteProcess
from shoal.verification import Row, Verdict, VerifyReport, verify

SMALL_TASKS = Path(__file__).parents[1] / "equivalence" / "small_tasks.py"


def rows(report: VerifyReport, title: str) -> dict[str, Row]:
    return {row.what: row for row in report.rows if row.comparison == title}


def test_batchnorm_in_a_pipeline_is_compared_with_the_same_micro_batches(zygote: ZygoteProcess) -> None:
    report = verify(f"{SMALL_TASKS}:conv", strategy="pipeline:microbatches=3", workers=2, steps=2, zygote=zygote)

    assert report.ok, report.mismatches
    first = rows(report, "one process, the same slots and micro-batches, first step")
    assert {row.verdict for row in first.values()} == {Verdict.EQUAL}
    in_double = rows(report, "one process in float64, the same slots and micro-batches")
    assert set(in_double) == {"parameters", "buffers", "optimizer state"}
    # Micro-batches' statistics make another function than the whole batch's.
    assert rows(report, "one process in float32, whole batch")["buffers"].measured > 1e-3


@pytest.mark.long
@pytest.mark.parametrize(
    ("strategy", "workers"),
    [
        ("sharded", 2),
        ("sharded:batchnorm=sync", 2),
        ("tensor", 2),
        ("pipeline:schedule=interleaved", 2),
        ("mesh:data=2,tensor=2", 4),
        ("mesh:shard=2,pipeline=2", 4),
    ],
)
@pytest.mark.parametrize("model", ["conv", "gpt", "mlp"])
def test_strategies_compute_what_one_process_computes(
    zygote: ZygoteProcess, strategy: str, workers: int, model: str
) -> None:
    report = verify(f"{SMALL_TASKS}:{model}", strategy=strategy, workers=workers, steps=3, zygote=zygote)

    assert report.ok, report.mismatches
    several_in_a_pass = "tensor" in strategy or "pipeline" in strategy
    judged = {row.verdict for row in report.rows if row.comparison.endswith("first step")}
    # Where several processes compute one pass, dropout draws other numbers.
    assert judged == {Verdict.NOT_JUDGED if several_in_a_pass and model != "conv" else Verdict.EQUAL}
    doubles = [row for row in report.rows if "float64" in row.comparison]
    assert doubles and all(row.verdict is Verdict.EQUAL for row in doubles)


@pytest.mark.long
@pytest.mark.parametrize("precision", ["bf16", "fp16", "adaptive"])
@pytest.mark.parametrize(
    ("strategy", "workers"),
    [
        ("data", 2),
        ("sharded", 2),
        ("tensor", 2),
        ("pipeline", 2),
        ("mesh:data=2,tensor=2", 4),
        ("layer:place=0@0+3@1", 2),
        ("layer:phases=2", 2),
    ],
)
def test_half_precision_is_stated_apart(
    zygote: ZygoteProcess, strategy: str, workers: int, precision: str
) -> None:
    report = verify(
        f"{SMALL_TASKS}:conv", strategy=strategy, workers=workers, steps=2, precision=precision, zygote=zygote
    )

    assert report.ok, report.mismatches
    assert report.precision == precision
    beside = rows(report, "the same workers in float32")
    assert any(row.measured for row in beside.values())
