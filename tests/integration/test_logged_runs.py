"""Whole runs, logged: what loggers have is what the run has told, also where it was resumed or a logger fails."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from helpers.commands import SMALL_TASK
from helpers.installed import shoal_beside
from helpers.logged import read_csv, read_tensorboard
from helpers.warm_commands import WarmCommands
from shoal.launch.owner import ZygoteProcess
from shoal.launch.runs import train
from shoal.observe import Logger, read_events
from shoal.observe.loggers import Scalar
from shoal.observe.report import counted_losses

MODULE = Path(__file__).with_name("plain_logger.py")
TRAIN = ("train", str(SMALL_TASK), "--workers", "2", "--name", "mine", "--json")
Shoal = Callable[..., str]


@pytest.fixture
def shoal(tmp_path: Path, zygote: ZygoteProcess) -> Shoal:
    """`shoal("train", …)` beside a package that brings a logger."""
    return shoal_beside(tmp_path, MODULE, "plain = plain_logger:PlainLogger", zygote, "shoal.loggers")


def test_a_run_and_what_it_goes_on_with_are_in_one_record(shoal: Shoal, tmp_path: Path) -> None:
    log = ("--log", "csv", "--tensorboard")
    trained: dict[str, Any] = json.loads(shoal(*TRAIN, *log, "--checkpoint", "every=10"))
    run = tmp_path / "runs" / "mine"
    resumed: dict[str, Any] = json.loads(shoal("train", "--resume", "mine@10", "--json"))
    assert resumed["digest"] == trained["digest"]
    told = counted_losses(read_events(run))
    assert [step for step, _ in told] == list(range(1, 27))
    for found in (read_csv(run / "logged" / "csv"), read_tensorboard(run / "logged" / "tensorboard")):
        assert found.name == "mine" and found.settings["cluster.workers"] == "2"
        assert [step for step, _ in found.scalars["train/loss"]] == [step for step, _ in told]
        losses = [loss for _, loss in found.scalars["train/loss"]]
        assert losses == pytest.approx([loss for _, loss in told], rel=1e-6)
        step, accuracy = found.scalars["test/accuracy"][-1]
        assert (step, accuracy) == (26, pytest.approx(resumed["results"]["accuracy"], rel=1e-6))
        assert found.pictures["loss"] == (run / "loss.png").read_bytes()
        assert found.model == (run / "model.safetensors").read_bytes()
        assert found.digest == resumed["digest"]


def test_a_package_brings_a_logger_and_one_that_fails_ends_nothing(shoal: Shoal, tmp_path: Path) -> None:
    trained = json.loads(shoal(*TRAIN, "--log", "plain:whole", "--log", "plain:broken"))
    run = tmp_path / "runs" / "mine"
    heard = (run / "logged" / "plain" / "heard.txt").read_text().splitlines()
    assert heard[-2:] == [f"26 model.safetensors {trained['digest']}", "finished whole"]
    expected = [f"{step} train/loss {loss!r}" for step, loss in counted_losses(read_events(run))]
    assert [line for line in heard if "train/loss" in line] == expected
    warned = [event.values["text"] for event in read_events(run) if event.kind == "warning"]
    assert warned == ["plain-2 failed and is left out from here on: ConnectionError: no route"]
    assert "--log plain:whole --log plain:broken" in (run / "report.md").read_text()


def test_what_nobody_knows_is_refused_before_anything_is_made(warm_commands: WarmCommands, tmp_path: Path) -> None:
    answer = warm_commands(tmp_path, *TRAIN, "--log", "wandbb")
    assert answer.status == 2 and "Did you mean 'wandb'?" in answer.text
    assert not (tmp_path / "runs").exists()


class Losses(Logger):
    def __init__(self) -> None:
        self.heard: list[tuple[int, float]] = []

    def log(self, scalars: Sequence[Scalar]) -> None:
        self.heard += [(one.step, one.value) for one in scalars if one.name == "train/loss"]


def test_a_logger_may_be_handed_over(tmp_path: Path, zygote: ZygoteProcess) -> None:
    mine, how = Losses(), {"runs": tmp_path, "name": "mine", "output": io.StringIO(), "zygote": zygote}
    train(f"{SMALL_TASK}:task", max_steps=5, log=[mine, "csv"], **how)
    assert mine.heard == read_csv(tmp_path / "mine" / "logged" / "csv").scalars["train/loss"]
    assert [step for step, _ in mine.heard] == [1, 2, 3, 4, 5]
