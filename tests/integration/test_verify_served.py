"""`shoal verify` and `--explain` for the parameter server, with real processes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from shoal.cli.app import run
from shoal.launch.owner import ZygoteProcess
from shoal.verification import ResultReport, Verdict, VerifyReport, verify

TESTS = Path(__file__).parents[1]
SMALL_TASK = TESTS / "integration" / "cli" / "small_task.py"
DIGITS = TESTS.parent / "examples" / "digits.py"
WILD_TASK = f"""
import runpy, time
from dataclasses import replace
from pathlib import Path
import torch

class Late(torch.nn.Linear):
    # The first worker is so slow to begin that the others leave it nothing to train on.

    def train(self, mode=True):
        is_first = Path("/proc/self/comm").read_text().strip() == "shoal-worker-0"
        if mode and is_first and Path(__file__).with_name("late").exists():
            time.sleep(3)
        return super().train(mode)

def task():
    small = runpy.run_path({str(SMALL_TASK)!r})["task"]()
    return replace(
        small,
        model=lambda: Late(4, 2),
        loss=lambda output, target: (output - target[:, None]).square().mean(),  # grows without end
        optimizer=lambda params: torch.optim.SGD(params, lr=0.6),
    )
"""


@pytest.fixture(autouse=True)
def one_thread_and_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("COLUMNS", "80")


def test_lockstep_is_one_process_in_every_bit(zygote: ZygoteProcess) -> None:
    target = f"{TESTS / 'equivalence' / 'small_tasks.py'}:conv"
    report = verify(target, strategy="ps:servers=2,sync=ssp:0", steps=4, zygote=zygote)

    assert isinstance(report, VerifyReport) and report.ok
    bits = {row.what: row for row in report.rows if row.comparison == "one process, the same slots"}
    assert set(bits) == {"parameters", "buffers", "optimizer state"}
    assert all(row.measured == row.bound == 0.0 for row in bits.values())
    # There is no BatchNorm over the whole batch here, so double precision is compared slot by slot.
    double = [row for row in report.rows if row.comparison == "one process in float64, the same slots"]
    assert len(double) == 3 and all(row.bound == 1e-9 for row in double)


def test_results_delays_and_a_verdict_where_timing_decides(
    zygote: ZygoteProcess, capfd: pytest.CaptureFixture[str]
) -> None:
    words = ["verify", str(SMALL_TASK), "--strategy", "ps:servers=2,sync=asp", "--seeds", "2", "--seed", "7"]
    status = run([*words, "--json"], zygote)

    out, err = capfd.readouterr()
    report = json.loads(out)
    assert status == (0 if report["ok"] else 1)
    assert [one["seed"] for one in report["ours"]] == [one["seed"] for one in report["references"]] == [7, 8]
    for one, other in zip(report["ours"], report["references"], strict=True):
        assert set(one["results"]) == {"test loss", "accuracy"}
        assert one["steps"] == other["steps"] == 26 and one["samples"] == other["samples"] == 400
        # Two workers have a part of each step, and push it to both shards.
        assert one["pushes"]["applied"] == 26 * 2 * 2 and one["pushes"]["clean"]
        assert 0 <= one["pushes"]["delay_mean"] <= one["pushes"]["delay_max"]
    judged = [contest["what"] for contest in report["contests"] if contest["verdict"] != Verdict.NOT_JUDGED.value]
    assert judged == ["accuracy"]
    assert "5 of 5: seed 8: data" in err


@pytest.mark.parametrize("is_late", [False, True], ids=["", "first worker late"])
def test_a_diverging_run_is_a_verdict_and_no_traceback(
    zygote: ZygoteProcess, capfd: pytest.CaptureFixture[str], is_late: bool
) -> None:
    Path("wild.py").write_text(WILD_TASK)
    if is_late:
        Path("late").touch()
    # Left alone, so that this run ends where its learning rate takes it.
    words = ["verify", "wild.py", "--strategy", "ps:sync=asp,diverging=ignore", "--seeds", "1", "--steps", "12"]
    status = run(words, zygote)

    out, err = capfd.readouterr()
    assert status == 1 and "Traceback" not in out + err
    text = " ".join(out.split())
    assert "seed 0, ps:sync=asp,diverging=ignore: The loss ran away" in text and "lower the learning rate" in text
    # Synchronous training diverges here as well, and that is said.
    assert "data itself did not train in 1 of 1 run" in text


def test_results_of_a_task_without_a_test_set(zygote: ZygoteProcess) -> None:
    target = f"{TESTS / 'equivalence' / 'small_tasks.py'}:padded"
    report = verify(target, strategy="ps:sync=ssp:2", seeds=1, steps=10, zygote=zygote)

    assert isinstance(report, ResultReport)
    assert [contest.what for contest in report.contests] == ["train loss"]
    assert report.contests[0].verdict is not Verdict.NOT_JUDGED


def test_explain_shows_the_plan_and_trains_nothing(
    zygote: ZygoteProcess, capfd: pytest.CaptureFixture[str]
) -> None:
    words = ["train", str(DIGITS), "--workers", "2", "--strategy", "ps:servers=3", "--explain"]

    assert run(words, zygote) == 0
    out = capfd.readouterr().out
    assert all(len(line) <= 80 for line in out.splitlines())
    assert "2 workers, 3 servers and a coordinator" in out and "115 steps of 64 samples" in out
    assert "backup of" in out and "0.weight*" in out and "its fair share" in out

    assert run([*words, "--json"], zygote) == 0
    plan = json.loads(capfd.readouterr().out)
    assert plan["cells"] == 230 and len(plan["servers"]) == 3
    # Momentum is one number for each of 64 x 256 + 256 + 256 x 10 + 10 parameters.
    assert plan["state"] == plan["parameters"] == 4 * 19_210
    assert not Path("runs").exists()
