"""Workers killed at any moment: others take their places, and not one bit changes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from helpers.killing import Killer, anywhere
from helpers.observed import ObservedEngine
from shoal.errors import Interrupted
from shoal.launch.owner import ZygoteProcess
from shoal.observe import Event
from shoal.spec import Cluster, Job

TASKS = Path(__file__).parents[1] / "equivalence" / "small_tasks.py"
FEW, MANY = 20, 50
"""Kills: where all tests must be quick, and where they need not."""
MLP = {"width": 700}


def train(
    folder: Path, engine: ObservedEngine, model: str, args: dict[str, Any], steps: int, **job: Any
) -> tuple[dict[str, Any], list[Event]]:
    """Train until the end or until the killer has had enough; what the run left, and what it told."""
    folder.mkdir()
    cluster = Cluster(threads=1, **{key: job.pop(key) for key in ("workers", "spares") if key in job})
    asked = Job(
        target=f"{TASKS}:{model}",
        args=args,
        cluster=cluster,
        overrides={"evaluate_every": 100, "max_steps": steps, "epochs": steps},
        run_dir=str(folder),
        options={"state": str(folder / "state.safetensors")},
        max_failures=MANY,
        **job,
    )
    events: list[Event] = []

    def listen(event: Event) -> None:
        events.append(event)
        if isinstance(engine, Killer):
            engine.on_event(event)

    try:
        engine.run(asked, listen)
    except Interrupted:
        assert isinstance(engine, Killer)
    finally:
        if isinstance(engine, Killer):
            engine.finish()
    return next(e.values["results"] for e in events if e.kind == "done" and e.rank == 0), events


def storm_and_calm(
    folder: Path,
    zygote: ZygoteProcess,
    plan: Sequence[tuple[int, bool]],
    model: str,
    args: dict[str, Any],
    **job: Any,
) -> list[Event]:
    """Train under fire and in peace: all kills must have fired, and all bits must agree. What the storm told."""
    killer = Killer(zygote, plan)
    stormy, events = train(folder / "stormy", killer, model, args, 100_000, **job)
    calm, _ = train(folder / "calm", ObservedEngine(zygote), model, args, stormy["steps"], workers=job["workers"])
    assert killer.killed == len(plan)
    assert sum(event.kind == "lost" for event in events) == len(plan)
    assert stormy["reason"] == "stopped"
    assert (stormy["digest"], stormy["state_digest"]) == (calm["digest"], calm["state_digest"])
    assert stormy["loss"] == calm["loss"]
    return events


def torn(events: Sequence[Event]) -> int:
    """How many kills fell into a chunk's update."""
    return sum(event.kind == "line" and "put back" in event.values["text"] for event in events)


@pytest.mark.parametrize(
    ("kills", "model", "args", "least_torn"),
    [
        (FEW, "mlp", {**MLP, "optimizer": "momentum"}, 2),
        (FEW, "mlp", {**MLP, "optimizer": "adamw", "clip": 1.0}, 2),
        pytest.param(MANY, "mlp", {**MLP, "optimizer": "momentum"}, 5, marks=pytest.mark.long),
        pytest.param(MANY, "mlp", {**MLP, "optimizer": "adamw", "clip": 1.0}, 5, marks=pytest.mark.long),
        pytest.param(MANY, "conv", {"optimizer": "momentum"}, 1, marks=pytest.mark.long),
        pytest.param(MANY, "gpt", {"optimizer": "adamw"}, 1, marks=pytest.mark.long),
        pytest.param(MANY, "contrastive", {}, 0, marks=pytest.mark.long),  # whose workers meet in every pass
    ],
)
def test_many_kills_change_no_bit(
    tmp_path: Path, zygote: ZygoteProcess, kills: int, model: str, args: dict, least_torn: int
) -> None:
    events = storm_and_calm(tmp_path, zygote, anywhere(kills, 2), model, args, workers=2, spares=2)
    assert sum(event.kind == "replaced" for event in events) == kills
    assert all("spare" in event.values for event in events if event.kind == "replaced")
    assert torn(events) >= least_torn, "hardly any kill fell into a chunk's update"


def test_without_spares_fresh_processes_follow(tmp_path: Path, zygote: ZygoteProcess) -> None:
    kills = 8
    events = storm_and_calm(tmp_path, zygote, anywhere(kills, 2), "mlp", {**MLP, "clip": 1.0}, workers=2)
    replaced = [event.values for event in events if event.kind == "replaced"]
    assert len(replaced) == kills and not any("spare" in values for values in replaced)
    assert torn(events) >= 1


def test_survivors_adopt_the_places_of_the_dead(tmp_path: Path, zygote: ZygoteProcess) -> None:
    """The first place's host dies in an update, then its adopter, then the last one there is."""
    plan = [(0, True), (0, True), (2, False)]
    events = storm_and_calm(
        tmp_path,
        zygote,
        plan,
        "mlp",
        {**MLP, "optimizer": "adamw", "clip": 1.0},
        workers=3,
        on_failure="shrink",
    )
    replaced = [event.values for event in events if event.kind == "replaced"]
    assert next(len(values["hosts"]) for values in replaced if "by" in values) == 2
    assert replaced[-1]["places"] == [0, 1, 2] and "by" not in replaced[-1], (
        "nobody was left: a fresh one followed"
    )
    assert torn(events) >= 1


@pytest.mark.parametrize("optimizer", ["muon_like", "recalling"])
def test_an_update_of_the_whole_model_outlives_its_worker(
    tmp_path: Path, zygote: ZygoteProcess, optimizer: str
) -> None:
    """Worker 0, who makes it for all, dies in it, outside of it, and so does a successor."""
    plan = [(0, True), (0, False), (0, True), (1, False), (0, True)]
    args = {**MLP, "optimizer": optimizer, "clip": 1.0}
    events = storm_and_calm(tmp_path, zygote, plan, "mlp", args, workers=2, spares=1)
    assert torn(events) >= 1


def test_survivors_adopt_an_update_of_the_whole_model(tmp_path: Path, zygote: ZygoteProcess) -> None:
    args = {**MLP, "optimizer": "muon_like"}
    events = storm_and_calm(tmp_path, zygote, [(0, True), (0, True)], "mlp", args, workers=3, on_failure="shrink")
    assert any("by" in event.values for event in events if event.kind == "replaced")
