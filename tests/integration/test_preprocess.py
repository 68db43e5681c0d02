"""Samples that are prepared in processes beside the stages: the same bits, ahead of time, and nothing is left."""

from __future__ import annotations

import time
from pathlib import Path

import psutil
import pytest
from preprocess_tasks import BATCH

from helpers.training import Train
from shoal.errors import LaunchError, ShoalError
from shoal.launch.owner import ZygoteProcess
from shoal.observe import Event

TASKS = Path(__file__).with_name("preprocess_tasks.py")
GRACE_S = 10.0
PIPELINE = "pipeline:split=3+2"


class Notes:
    """Who has read which samples."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def rows(self) -> list[tuple[int, int, int]]:
        """Reading process, its parent, number of the sample."""
        lines = (line.split() for line in self.path.read_text().splitlines())
        return [(int(pid), int(parent), int(number)) for pid, parent, number in lines]

    def read_beside(self, zygote: ZygoteProcess) -> list[tuple[int, int]]:
        """Process and worker of every sample that no worker has read itself."""
        return [(pid, parent) for pid, parent, _ in self.rows if parent != zygote.pid]

    def all_readers_have_ended(self) -> bool:
        """Waits a while for it."""
        deadline = time.monotonic() + GRACE_S
        while any(_is_alive(pid) for pid, _, _ in self.rows):
            if time.monotonic() > deadline:
                return False
            time.sleep(0.01)
        return True


def _is_alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.fixture
def train(tmp_path: Path, zygote: ZygoteProcess) -> Train:
    return Train(TASKS, tmp_path, zygote)


@pytest.fixture
def notes(tmp_path: Path) -> Notes:
    return Notes(tmp_path / "notes")


@pytest.mark.parametrize("strategy", [PIPELINE, pytest.param("mesh:data=2", marks=pytest.mark.long)])
def test_other_processes_prepare_the_same_bits(
    train: Train, zygote: ZygoteProcess, tmp_path: Path, notes: Notes, strategy: str
) -> None:
    usual = train("cropped", workers=2, strategy=strategy, notes=str(tmp_path / "usual"))
    separator = "," if ":" in strategy else ":"
    beside = train("cropped", workers=2, strategy=f"{strategy}{separator}preprocess=2", notes=str(notes.path))
    assert beside.digests() == usual.digests()
    assert beside.losses() == usual.losses()

    assert not Notes(tmp_path / "usual").read_beside(zygote)
    readers = notes.read_beside(zygote)
    lanes_read = 2 if strategy == PIPELINE else 1
    assert len(readers) == lanes_read * 6 * BATCH, "every sample of every step, and none twice"
    assert len({worker for _, worker in readers}) == 2 and len({pid for pid, _ in readers}) == 4
    assert notes.all_readers_have_ended()


def test_later_steps_are_prepared_while_one_computes(train: Train, notes: Notes) -> None:
    strategy = f"{PIPELINE},preprocess=1"
    trained = train("cropped", workers=2, strategy=strategy, notes=str(notes.path), patient=True)
    assert trained.results["steps"] == 6 and trained.results["audit"]["clean"]


def test_a_sample_that_raises_is_named(train: Train, notes: Notes) -> None:
    told: list[Event] = []
    with pytest.raises(LaunchError, match="image 13 is broken"):
        train(
            "cropped",
            workers=2,
            strategy=f"{PIPELINE},preprocess=2",
            notes=str(notes.path),
            broken=13,
            on_event=told.append,
        )
    raised = [event.values for event in told if event.kind == "raised"]
    assert raised and all(one["sample"] == 13 and "ValueError: image 13" in one["error"] for one in raised)
    assert notes.all_readers_have_ended()


def test_a_killed_worker_leaves_no_process(train: Train, notes: Notes) -> None:
    with pytest.raises(LaunchError, match="Worker 1 was killed"):
        train(
            "cropped",
            workers=2,
            strategy=f"{PIPELINE},preprocess=2",
            notes=str(notes.path),
            steps=100_000,
            chaos="kill worker:1 at step 3",
        )
    assert notes.all_readers_have_ended()


def test_a_killed_process_is_named(train: Train, notes: Notes) -> None:
    with pytest.raises(ShoalError, match=r"the process \d+, which prepares samples beside worker \d, was killed"):
        train("cropped", workers=2, strategy=f"{PIPELINE},preprocess=2", notes=str(notes.path), deadly=13)
    assert notes.all_readers_have_ended()


def test_data_that_one_worker_holds_is_refused(tmp_path: Path, zygote: ZygoteProcess) -> None:
    train = Train(TASKS.with_name("data_tasks.py"), tmp_path, zygote)
    with pytest.raises(ShoalError, match=r"preprocess=1 .* but it is Shipped"):
        train("shipped", workers=2, strategy="pipeline:preprocess=1", holder=str(tmp_path / "holders"))
