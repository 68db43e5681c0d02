"""What workers that share the state of training hold of it, measured."""

from __future__ import annotations

from pathlib import Path

import pytest

from helpers.training import Train
from shoal.launch.owner import ZygoteProcess

pytestmark = pytest.mark.alone

BOUND = 0.40


@pytest.mark.long
def test_four_workers_hold_little_each(tmp_path: Path, zygote: ZygoteProcess) -> None:
    """Parameters, gradients and AdamW's state at the worst moment, activations and messages included."""
    train = Train(Path(__file__).with_name("measured_tasks.py"), tmp_path, zygote)

    def most_bytes(workers: int, strategy: str) -> int:
        folder = tmp_path / strategy
        folder.mkdir()
        train("wide", workers=workers, strategy=strategy, folder=str(folder))
        told = [int(file.read_text(encoding="ascii")) for file in folder.iterdir()]
        assert len(told) == workers
        return max(told)

    # A process alone would keep what it frees for the next step; by what it uses, it is measured at its best.
    one, each = most_bytes(1, "data:via=backend"), most_bytes(4, "sharded:stage=3,via=backend")
    state = 4 * 4 * (8 * (1024 * 1024 + 1024) + 1024 * 10 + 10)
    assert one >= 0.9 * state, "the measure sees everything"
    assert each < BOUND * one, f"{each / one:.0%} of one process"
