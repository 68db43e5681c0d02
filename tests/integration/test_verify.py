"""`shoal verify` on tasks that are right, wrong and odd, with real processes."""

from __future__ import annotations

import json
import textwrap
from pathlib import Path

import pytest

from shoal.cli.app import run
from shoal.errors import SpecError
from shoal.launch.owner import ZygoteProcess
from shoal.launch.runs import train
from shoal.verification import Row, Verdict, VerifyReport, replay_run, verify

EXAMPLES = Path(__file__).parents[2] / "examples"
SMALL = Path(__file__).parents[1] / "equivalence" / "small_tasks.py"

TASKS = """
import os
import torch
from torch import nn
import shoal


class Data:
    def __init__(self, *shape):
        generator = torch.Generator().manual_seed(1)
        self.inputs = torch.randn(96, *shape, generator=generator)
        self.targets = torch.randint(0, 4, (96,), generator=generator)

    def __len__(self):
        return 96

    def __getitem__(self, index):
        return self.inputs[index], self.targets[index]


def make(model, *shape, optimizer=lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9), **fields):
    loss = nn.functional.cross_entropy
    return shoal.Task(
        model=model, loss=loss, optimizer=optimizer, train=Data(*shape), batch_size=24, epochs=9, **fields
    )


def conv():
    layers = lambda: nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 36, 4)
    )
    return make(layers, 1, 8, 8)


def dropout():
    layers = lambda: nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.5), nn.ReLU(), nn.Linear(16, 4))
    return make(layers, 8, optimizer=lambda params: torch.optim.AdamW(params, lr=0.01), clip_norm=0.1)


class Augmented(Data):
    def __getitem__(self, index):
        return self.inputs[index] + torch.randn(8), self.targets[index]


def augmented():
    return shoal.Task(**{**vars(dropout()), "train": Augmented(8)})


class Unseeded(nn.Linear):
    def forward(self, x):
        return super().forward(x) * (1 + int.from_bytes(os.urandom(2), "little") / 65536)


def unseeded():
    return make(lambda: Unseeded(8, 4), 8)


class HalfUsed(nn.Module):
    def __init__(self):
        super().__init__()
        self.used = nn.Linear(8, 4)
        self.forgotten = nn.Linear(8, 4)
        self.frozen = nn.Parameter(torch.zeros(4), requires_grad=False)

    def forward(self, x):
        return self.used(x) + self.frozen


def half_used():
    return make(HalfUsed, 8, batch_per_worker=True)


class Fickle(nn.Linear):
    def forward(self, x):
        here = int(len(x) < 24)  # a model that computes something else on a part of a batch
        return super().forward(x) * (1 + here)


def depends_on_batch():
    return make(lambda: Fickle(8, 4), 8)
"""


@pytest.fixture
def tasks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    (tmp_path / "tasks.py").write_text(textwrap.dedent(TASKS))
    return "tasks.py"


def rows(report: VerifyReport, title: str) -> dict[str, Row]:
    return {row.what: row for row in report.rows if row.comparison == title}


@pytest.mark.parametrize(
    "target", ["tasks.py:dropout", pytest.param(str(EXAMPLES / "digits.py"), marks=pytest.mark.long, id="digits")]
)
def test_the_same_slots_pass_in_every_bit(
    tasks: str, zygote: ZygoteProcess, capfd: pytest.CaptureFixture[str], target: str
) -> None:
    status = run(["verify", target, "--workers", "2", "--steps", "5", "--json"], zygote)

    out, err = capfd.readouterr()
    report = json.loads(out)
    assert status == 0 and report["ok"]
    same_slots = [row for row in report["rows"] if row["comparison"] == "one process, the same slots"]
    assert {row["what"] for row in same_slots} == {"parameters", "optimizer state"}
    assert all(row["measured"] == row["bound"] == 0.0 for row in same_slots)
    assert "1 of 6: inspecting the task" in err and "6 of 6" in err


def test_batchnorm_of_each_slot(tasks: str, zygote: ZygoteProcess) -> None:
    report = verify(f"{tasks}:conv", slots=4, steps=5, zygote=zygote)

    assert report.ok
    assert {row.measured for row in rows(report, "one process, the same slots").values()} == {0.0}
    in_double = rows(report, "one process in float64, whole batch, BatchNorm synchronised")
    assert 0.0 < in_double["buffers"].measured < 1e-9
    # Half a batch's statistics make another function, which is why this is printed and not judged.
    printed = rows(report, "one process in float32, whole batch")["parameters"]
    assert printed.measured > 1e-4 and printed.verdict is Verdict.NOT_JUDGED


def test_batchnorm_of_the_whole_batch(tasks: str, zygote: ZygoteProcess) -> None:
    report = verify(f"{tasks}:conv", strategy="data:batchnorm=sync", steps=5, zygote=zygote)

    assert report.ok
    first = rows(report, "one process, BatchNorm over the whole batch, first step")
    assert set(first) == {"parameters", "buffers", "optimizer state"}
    assert all(row.verdict is Verdict.EQUAL and row.measured < 1e-3 for row in first.values())


@pytest.mark.parametrize(
    ("target", "strategy"),
    [
        (f"{SMALL}:contrastive_plain", "data"),
        *(
            pytest.param(f"{EXAMPLES}/contrastive.py", s, marks=pytest.mark.long)
            for s in ("data", "ps", "sharded")
        ),
    ],
)
def test_a_loss_that_gathers_is_that_of_the_whole_batch(target: str, strategy: str, zygote: ZygoteProcess) -> None:
    report = verify(target, workers=2, strategy=strategy, steps=5, zygote=zygote)

    assert report.ok
    assert rows(report, "one process in float64, whole batch")["parameters"].measured < 1e-9
    if strategy != "sharded":
        assert {row.measured for row in rows(report, "one process, the same slots").values()} == {0.0}


def test_dropout_and_clipping_with_a_ring_stay_within_the_bound(tasks: str, zygote: ZygoteProcess) -> None:
    report = verify(f"{tasks}:dropout", workers=3, strategy="data:via=ring", steps=5, zygote=zygote)

    assert report.ok
    first = rows(report, "one process, the same slots, first step")
    assert 0.0 < first["optimizer state"].measured < first["optimizer state"].bound == 1e-3
    # Dropout draws other numbers for the whole batch than for its parts.
    assert rows(report, "one process in float32, whole batch")["parameters"].measured > 1e-3


def test_augmentation_is_compared_only_where_its_random_numbers_are_the_same(
    tasks: str, zygote: ZygoteProcess
) -> None:
    report = verify(f"{tasks}:augmented", steps=3, zygote=zygote)

    assert report.ok
    assert {row.measured for row in rows(report, "one process, the same slots").values()} == {0.0}
    assert {row.verdict for row in rows(report, "one process in float64, whole batch").values()} == {
        Verdict.NOT_JUDGED
    }


def test_random_numbers_without_a_seed_are_caught(
    tasks: str,
    zygote: ZygoteProcess,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("COLUMNS", "160")  # so that the table breaks no line that is looked for
    status = run(["verify", f"{tasks}:unseeded", "--steps", "3"], zygote)

    out = capfd.readouterr().out
    assert status == 1
    assert "the same step twice" in out and "does NOT compute what one process computes" in out


def test_a_model_that_computes_something_else_on_a_part_is_caught(tasks: str, zygote: ZygoteProcess) -> None:
    report = verify(f"{tasks}:depends_on_batch", steps=3, zygote=zygote)

    # Both runs cut the batch alike, so only the whole batch shows it.
    assert all(row.verdict is Verdict.EQUAL for row in rows(report, "one process, the same slots").values())
    assert {row.comparison for row in report.mismatches} == {"one process in float64, whole batch"}


def test_unused_and_frozen_parameters_are_named(tasks: str, zygote: ZygoteProcess) -> None:
    """Its batch is per worker; one process has the same global batch."""
    report = verify(f"{tasks}:half_used", steps=3, zygote=zygote)

    moved = rows(report, "moved from the start")
    assert report.ok
    assert moved["trained parameters"].verdict is Verdict.WARNING
    assert "forgotten.weight, forgotten.bias" in moved["trained parameters"].note
    assert moved["other parameters"].note.endswith("frozen")


def test_replay_repeats_a_run_and_notices_another_result(
    tasks: str, zygote: ZygoteProcess, capfd: pytest.CaptureFixture[str]
) -> None:
    finished = train(f"{tasks}:dropout", workers=2, slots=3, max_steps=6, seed=5, progress=False, zygote=zygote)

    report = replay_run(finished.folder.name, zygote=zygote)
    assert report.ok and report.rows[0].comparison == "one process, the same slots"

    recorded = finished.folder / "result.json"
    recorded.write_text(recorded.read_text().replace(finished.digest, "0" * 32))
    assert run(["verify", "--replay", str(finished.folder)], zygote) == 1
    assert "did NOT come out again" in capfd.readouterr().out


@pytest.mark.parametrize(
    ("workers", "strategy", "how"),
    [(1, "data", "one process"), (3, "data:via=ring", "3 workers as before")],
    ids=["one", "ring"],
)
def test_replay_of_other_ways_to_train(
    tasks: str, zygote: ZygoteProcess, workers: int, strategy: str, how: str
) -> None:
    finished = train(
        f"{tasks}:dropout", workers=workers, strategy=strategy, max_steps=6, progress=False, zygote=zygote
    )

    report = replay_run(finished.folder, zygote=zygote)
    assert report.ok and report.rows[0].comparison == how


def test_shares_that_follow_speed_are_compared_with_the_same_cuts(tasks: str, zygote: ZygoteProcess) -> None:
    report = verify(f"{tasks}:dropout", strategy="data:shares=speed", slots=3, steps=30, zygote=zygote)
    assert report.ok, report.rows
    assert all(row.measured == 0.0 for row in rows(report, "one process, the same slots").values())


def test_verify_wants_a_task_or_a_run(tasks: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert run(["verify"]) == 2
    assert "either a task" in capfd.readouterr().err


def test_noise_on_clients_has_nothing_to_be_compared_with() -> None:
    strategy = "average:clients=8,partition=own"
    with pytest.raises(SpecError, match="leave privacy out"):
        verify(f"{SMALL}:plain", strategy=strategy, privacy="noise=1")


@pytest.mark.long
def test_workers_draw_the_noise_of_one(zygote: ZygoteProcess) -> None:
    report = verify(f"{SMALL}:plain", workers=2, privacy="noise=1", zygote=zygote)
    assert isinstance(report, VerifyReport) and report.ok
