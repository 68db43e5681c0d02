"""Steps that are known only after later ones were taken: nothing that follows from them can tell."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from helpers.installed import shoal_beside
from shoal.launch.owner import ZygoteProcess

MODULE = Path(__file__).with_name("deferred_strategy.py")
TASK = """
import torch, shoal
from torch import nn
from torch.utils.data import TensorDataset

def samples(count, seed):
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.rand(count, 64, generator=generator)
    return TensorDataset(inputs, inputs[:, :10].argmax(1))

def task():
    return shoal.Task(
        model=lambda: nn.Sequential(nn.Linear(64, 16), nn.Dropout(0.2), nn.ReLU(), nn.Linear(16, 10)),
        loss=nn.functional.cross_entropy,
        optimizer=lambda params: torch.optim.AdamW(params, lr=0.01),
        scheduler=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 3, gamma=0.9),
        train=samples(1400, 1), test=samples(360, 2), batch_size=64, epochs=2, max_steps=38, evaluate_every=10,
        metrics={"accuracy": shoal.metrics.accuracy},
    )
"""
Shoal = Callable[..., str]
WORDS = ("train", "late.py", "--workers", "2", "--checkpoint", "every=15", "--json")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("open-commits")
    (folder / "late.py").write_text(TASK)
    return folder


@pytest.fixture(scope="module")
def shoal(folder: Path, zygote: ZygoteProcess) -> Shoal:
    return shoal_beside(folder, MODULE, "deferred = deferred_strategy:Deferred", zygote)


@pytest.fixture(scope="module")
def plain(shoal: Shoal) -> dict[str, Any]:
    """What comes out where every step is known when the next one begins."""
    found: dict[str, Any] = json.loads(shoal(*WORDS, "--name", "plain"))
    return found


def events(folder: Path, kind: str) -> list[dict[str, Any]]:
    lines = (folder / "events.jsonl").read_text().splitlines()
    return [event["values"] for event in map(json.loads, lines) if event["kind"] == kind]


@pytest.mark.parametrize(
    ("name", "faults"), [("calm", ()), ("kill", ("--spares", "1", "--chaos", "kill worker:1 at step 17"))]
)
def test_what_is_known_late_changes_nothing(
    shoal: Shoal, plain: dict[str, Any], folder: Path, name: str, faults: tuple[str, ...]
) -> None:
    late: dict[str, Any] = json.loads(shoal(*WORDS, "--name", name, "--strategy", "deferred", *faults))
    assert (late["digest"], late["steps"], late["results"]) == (plain["digest"], 38, plain["results"])
    assert late["audit"]["clean"]
    of_late, of_plain = folder / "runs" / name, folder / "runs" / "plain"
    for kind in ("evaluation", "steps"):
        told = [event.get("steps", event.get("step")) for event in events(of_late, kind)]
        expected = [event.get("steps", event.get("step")) for event in events(of_plain, kind)]
        if kind == "steps":
            told, expected = [one for each in told for one in each], [one for each in expected for one in each]
        assert told == expected, kind
    saved = [event["step"] for event in events(of_late, "checkpoint")]
    assert saved == [event["step"] for event in events(of_plain, "checkpoint")] == [15, 30, 38]
    assert len(events(of_late, "replaced")) == bool(faults)
    logs = [path.read_text() for path in (of_late / "logs").iterdir()]
    assert any("4 turns were open at once" in text for text in logs)
