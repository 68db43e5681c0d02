"""What a Trainer saves, which is what a run's checkpoint holds: as a folder, or as a dictionary."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from shoal.checkpoint.folder import sync_folder
from shoal.checkpoint.model_stream import TensorStream
from shoal.checkpoint.snapshot import Snapshot
from shoal.checkpoint.streamed import StreamedFolder, StreamedState
from shoal.errors import CheckpointError, SpecError
from shoal.model.start import Start
from shoal.observe.checkpoint_names import is_checkpoint
from shoal.observe.disk import writing
from shoal.roles.training.hosting import MoveOrder
from shoal.roles.training.training import Training
from shoal.spec import World
from shoal.spec.vocabulary import State
from shoal.strategies.base import StepResult

_KEYS = ("step", "model", "optimizer", "losses", "facts")


class Unwatched:
    """Nobody looks on."""

    def on_state(self, state: State, step: int) -> None: ...

    def on_step(self, step: int, result: StepResult, *told: Any, **besides: Any) -> None: ...

    def on_taken(self, step: int) -> None: ...

    def on_turn(self) -> None: ...

    def on_evaluation(
        self, step: int, results: dict[str, float], by_client: dict[str, list[Any]] | None = None
    ) -> None: ...

    def wants_stop(self) -> bool:
        return False

    def take_orders(self, *, at_border: bool) -> tuple[MoveOrder, ...]:
        return ()

    def on_moved(self, order: MoveOrder, world: World | None) -> None: ...


class StepNotes(Unwatched):
    """What a saved state tells of the steps so far."""

    def __init__(self, start: Start) -> None:
        self.losses = list(start.losses)
        """Of all steps: a scheduler that sees them again is where it was."""
        self._evaluations = {step: dict(results) for step, results in start.evaluations.items()}

    def on_step(self, step: int, result: StepResult, *told: Any, **besides: Any) -> None:
        # Steps that a worker of its own pace had no part in count as this one.
        self.losses += [result.loss] * (step - len(self.losses))

    def on_evaluation(
        self, step: int, results: dict[str, float], by_client: dict[str, list[Any]] | None = None
    ) -> None:
        self._evaluations[step] = dict(results)

    def facts(self, training: Training) -> dict[str, Any]:
        """Which samples the steps refer to, and what else is no tensor."""
        schedule, replica = training.schedule, training.replica
        return {
            "slots": schedule.slots,
            "batch_size": schedule.batch_size,
            "length": schedule.length,
            "seed": replica.task.seed,
            "precision": list(replica.precision.state.values),
            "evaluations": {str(step): results for step, results in self._evaluations.items()},
            # Random numbers follow from the seed, the step and the slot, whoever draws them.
            "random": "by seed, step and slot",
        }


def write_state(path: Path, state: StreamedState) -> str:
    """Make a checkpoint's folder, whole or not at all, in the place of one that is there; the model's digest."""
    if path.exists() and not is_checkpoint(path):
        raise CheckpointError(f"{path} is there, and no checkpoint that may be replaced; choose another name.")
    draft, before = (path.with_name(f".{path.name}.{word}") for word in ("part", "old"))
    with writing(path.parent):
        shutil.rmtree(draft, ignore_errors=True)  # left by a process that was killed while it saved
        folder = StreamedFolder(draft, state.step)
        folder.take(state)
        manifest = folder.finish()
        if path.exists():
            shutil.rmtree(before, ignore_errors=True)
            path.rename(before)
        draft.rename(path)
        sync_folder(path.parent)
        shutil.rmtree(before, ignore_errors=True)
    return manifest.digest


def snapshot_of(state: Mapping[str, Any]) -> Snapshot:
    """The state that `Trainer.state_dict` gave."""
    if missing := [key for key in _KEYS if key not in state]:
        raise SpecError(
            f"Trainer: a state has {', '.join(_KEYS)}, but this one lacks {', '.join(missing)}; pass what "
            "state_dict() returned."
        )
    losses = torch.tensor(state["losses"], dtype=torch.float64)
    return Snapshot(
        step=state["step"],
        model=state["model"],
        optimizer=state["optimizer"],
        losses=losses,
        rng={},
        facts=state["facts"],
    )


def streamed(snapshot: Snapshot) -> StreamedState:
    """The same, as it is written."""
    return StreamedState(
        step=snapshot.step,
        model=TensorStream.of(snapshot.model),
        optimizer=TensorStream.of(snapshot.optimizer),
        losses=snapshot.losses,
        facts=snapshot.facts,
    )
