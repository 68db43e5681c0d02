"""`shoal verify` for workers that average, with real processes."""

from __future__ import annotations

from pathlib import Path

import pytest

from shoal.launch.owner import ZygoteProcess
from shoal.verification import ResultReport, VerifyReport, verify

TESTS = Path(__file__).parents[1]
DIGITS = TESTS.parent / "examples" / "digits.py"
SMALL_TASK = TESTS / "integration" / "cli" / "small_task.py"


@pytest.fixture(autouse=True)
def one_thread_and_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


@pytest.mark.parametrize(
    ("keys", "workers"),
    [
        ("every=1", 2),
        ("every=1,inside=mesh:shard:2", 4),
        pytest.param("every=1,inside=tensor,groups=2", 4, marks=pytest.mark.long),
        pytest.param("every=1,inside=pipeline,groups=2", 4, marks=pytest.mark.long),
    ],
)
def test_agreeing_after_every_step_of_plain_sgd_is_one_process(
    keys: str, workers: int, zygote: ZygoteProcess
) -> None:
    report = verify(str(SMALL_TASK), workers=workers, strategy=f"average:{keys}", steps=6, zygote=zygote)
    assert isinstance(report, VerifyReport) and report.ok
    double = [row for row in report.rows if row.comparison == "one process in float64, whole batch"]
    assert double and all(row.measured < row.bound == 1e-9 for row in double)


def judged(strategy: str, zygote: ZygoteProcess) -> ResultReport:
    report = verify(str(DIGITS), workers=2, strategy=strategy, seeds=3, zygote=zygote)
    assert isinstance(report, ResultReport)
    assert len(report.ours) == len(report.references) == 3 and not report.lost_runs
    return report


@pytest.mark.long
@pytest.mark.parametrize("keys", ["every=8", "every=8,parts=4,delay=2", "every=8,combine=ensemble,init=alike"])
def test_seldom_agreement_is_judged_by_its_results_over_seeds(keys: str, zygote: ZygoteProcess) -> None:
    """Beside synchronous training on the same samples, with the spread over seeds of both."""
    report = judged(f"average:{keys}", zygote)
    assert report.ok and {contest.what for contest in report.contests} >= {"test loss", "accuracy"}
    assert all(contest.ours.deviation > 0 and contest.reference.deviation > 0 for contest in report.contests)
