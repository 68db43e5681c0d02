"""A disk with too little room: older checkpoints make way, the model is there, or the exit status says no."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from helpers.commands import SMALL_TASK

TRAIN = ("train", str(SMALL_TASK), "--workers", "2", "--name", "mine", "--arg", "width=20000")
MODEL_BYTES = 4 * (4 * 20_000 + 20_000 + 20_000 * 2 + 2)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk that takes two checkpoints and a model, and not three."""
    folder = tmp_path / "disk"
    folder.mkdir()
    size = f"size={int(3.5 * MODEL_BYTES) + (512 << 10)}"
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", size, "tmpfs", folder], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip(f"a small disk cannot be mounted here: {mounted.stderr.decode().strip()}")
    yield folder
    subprocess.run(["umount", "--lazy", folder], check=True)


@pytest.mark.parametrize("strategy", ["data", "ps:servers=2", "sharded"])
def test_older_checkpoints_make_room_for_newer_ones_and_for_the_model(shoal, tmp_path, small_disk, strategy):
    words = (*TRAIN, "--runs", str(small_disk), "--checkpoint", "every=6,keep=3", "--strategy", strategy)
    done = shoal(tmp_path, *words)
    run = small_disk / "mine"
    assert "was removed to make room on the disk" in done.text
    assert (run / "model.safetensors").is_file(), done.text
    kept = sorted(path.name for path in (run / "checkpoints").iterdir())
    assert kept[-1] == "step-000000026" and len(kept) < 3
    # Three were asked for.
    assert done.status == 1 and "lacks what was due after step" in done.text
    assert shoal(tmp_path, "checkpoint", "verify", "mine", "--runs", str(small_disk)).status == 0


def test_a_disk_that_stays_full_leaves_the_newest_whole_one(shoal, disk, tmp_path):
    """From the second checkpoint on nothing is taken; training goes on, and what there is can be resumed."""
    disk.watch(tmp_path, contains="/.step-", operations="write")
    disk.fail(4, 1 << 40)
    done = shoal(tmp_path, "train", str(SMALL_TASK), "--workers", "2", "--name", "mine", "--checkpoint", "every=6")
    assert disk.fired > 0
    assert "step 12 was not saved" in done.text and "the disk is full" in done.text
    assert done.status == 1 and "lacks what was due after step" in done.text
    disk.relent()
    again = shoal(tmp_path, "train", "--resume", "mine")
    assert again.status == 0 and "resuming mine after step 6" in again.text, again.text
