"""How far a batch travels through the source: a newcomer who follows one must open few files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import shoal
from shoal.launch.owner import ZygoteProcess

TASK = Path(__file__).with_name("visiting_task.py")


@pytest.mark.parametrize(("strategy", "most"), [("data", 18), ("ps:sync=asp", 26), ("ps:sync=bsp", 26)])
def test_a_batch_visits_few_files(
    strategy: str, most: int, tmp_path: Path, zygote: ZygoteProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VISITED", str(tmp_path))  # Workers have the environment of who trains.
    shoal.train(f"{TASK}:task", workers=2, strategy=strategy, runs=tmp_path / "runs", zygote=zygote)
    workers = [json.loads(path.read_text()) for path in tmp_path.glob("*.json")]
    # Who goes at its own pace may have come less far than the other.
    assert len(workers) == 2 or (workers and "asp" in strategy), "each worker has come past these steps"
    for steps in workers:
        fewest = min(steps, key=len)
        assert len(fewest) <= most, "\n".join(fewest)
