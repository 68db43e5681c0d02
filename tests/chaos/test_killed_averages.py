"""Workers killed while each trains a model of its own: others take their places, and not one bit changes."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from test_killed_workers import MLP, train

from helpers.killing import Killer
from helpers.observed import ObservedEngine
from shoal.launch.owner import ZygoteProcess
from shoal.observe import Event


def storm_and_calm(
    folder: Path, zygote: ZygoteProcess, kills: int, model: str, args: dict[str, Any], strategy: str, **job: Any
) -> list[Event]:
    """Train under fire and in peace: all kills must have fired, and all bits must agree. What the storm told."""
    workers, chance = job.pop("workers", 2), random.Random(3)
    killer = Killer(zygote, [(chance.randrange(workers), False) for _ in range(kills)])
    wanted = {"workers": workers, "strategy": strategy}
    stormy, events = train(folder / "stormy", killer, model, args, 100_000, **wanted, **job)
    calm, _ = train(folder / "calm", ObservedEngine(zygote), model, args, stormy["steps"], **wanted)
    assert killer.killed == kills
    assert sum(event.kind == "lost" for event in events) == kills
    assert sum(event.kind == "replaced" for event in events) == kills
    assert stormy["reason"] == "stopped" and stormy["audit"]["clean"] and calm["audit"]["clean"]
    assert (stormy["digest"], stormy["state_digest"]) == (calm["digest"], calm["state_digest"])
    assert stormy["loss"] == calm["loss"] and stormy["agreements"] == calm["agreements"]
    return events


@pytest.mark.parametrize(
    ("kills", "model", "args", "strategy", "job"),
    [
        (3, "mlp", {**MLP, "optimizer": "adamw"}, "average:every=7,outer=nesterov", {"spares": 1}),
        (
            3,
            "mlp",
            {**MLP, "optimizer": "momentum"},
            "average:clients=6,share=0.67,partition=own,every=4,scaffold=on",
            {"spares": 1},
        ),
        (
            3,
            "mlp",
            {**MLP, "optimizer": "adamw"},
            "average:clients=8,share=0.5,partition=own,every=4,buffer=2,oldest=4",
            {},
        ),
        pytest.param(20, "mlp", {**MLP, "optimizer": "momentum"}, "average:every=5", {}, marks=pytest.mark.long),
        pytest.param(20, "conv", {}, "average:every=3,clip=norm:1", {"spares": 1}, marks=pytest.mark.long),
        pytest.param(20, "mlp", MLP, "average:every=4,with=pairs", {"workers": 3}, marks=pytest.mark.long),
        pytest.param(
            20, "mlp", {**MLP, "optimizer": "muon_like"}, "average:every=6,outer=adam", {}, marks=pytest.mark.long
        ),
        pytest.param(
            20,
            "mlp",
            {**MLP, "optimizer": "momentum"},
            "average:clients=8,share=0.5,partition=own,every=5,outer=yogi",
            {"spares": 1},
            marks=pytest.mark.long,
        ),
        pytest.param(
            20,
            "mlp",
            {**MLP, "optimizer": "adamw"},
            "average:every=5,combine=ensemble",
            {},
            marks=pytest.mark.long,
        ),
        pytest.param(
            20,
            "mlp",
            {**MLP, "optimizer": "momentum"},
            "average:every=6,init=own,outer=nesterov",
            {"spares": 1},
            marks=pytest.mark.long,
        ),
        pytest.param(20, "gpt", {"optimizer": "adamw"}, "average:every=1", {"spares": 1}, marks=pytest.mark.long),
    ],
)
def test_many_kills_change_no_bit(
    tmp_path: Path, zygote: ZygoteProcess, kills: int, model: str, args: dict, strategy: str, job: dict
) -> None:
    storm_and_calm(tmp_path, zygote, kills, model, args, strategy, **job)


@pytest.mark.parametrize(
    ("model", "args", "strategy", "rounds"),
    [
        ("mlp", {**MLP, "optimizer": "adamw"}, "average:every=7,outer=nesterov", 2),
        ("conv", {}, "average:every=3,clip=norm:1", 1),
        pytest.param("gpt", {"optimizer": "adamw"}, "average:every=9", 6, marks=pytest.mark.long),
        pytest.param("mlp", {**MLP, "optimizer": "recalling"}, "average:every=40", 6, marks=pytest.mark.long),
    ],
)
def test_survivors_train_the_models_of_the_dead(
    tmp_path: Path, zygote: ZygoteProcess, model: str, args: dict, strategy: str, rounds: int
) -> None:
    """The first place's host dies, then who has followed it, then the last one there is; and so on."""
    plan = [(0, False), (0, False), (2, False)] * rounds
    killer = Killer(zygote, plan)
    shrink = {"workers": 3, "strategy": strategy, "on_failure": "shrink"}
    stormy, events = train(tmp_path / "stormy", killer, model, args, 100_000, **shrink)
    calm, _ = train(tmp_path / "calm", ObservedEngine(zygote), model, args, stormy["steps"], **shrink)
    assert killer.killed == sum(event.kind == "lost" for event in events) == len(plan)
    replaced = [event.values for event in events if event.kind == "replaced"]
    assert any("by" in values and len(values["hosts"]) == 2 for values in replaced), "nobody took a place over"
    assert any(values["places"] == [0, 1, 2] and "by" not in values for values in replaced), "one had them all"
    assert stormy["reason"] == "stopped" and stormy["audit"]["clean"] and calm["audit"]["clean"]
    assert (stormy["digest"], stormy["state_digest"]) == (calm["digest"], calm["state_digest"])
    assert stormy["loss"] == calm["loss"] and stormy["agreements"] == calm["agreements"]
