"""`Trainer`: for people who own their process or their loop."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from shoal.arena import keep_freed_memory
from shoal.checkpoint import save_tensors
from shoal.errors import PeerLost, SpecError
from shoal.feed.parts import Part, Piece
from shoal.roles.devices import choose_device
from shoal.roles.hosting import MoveOrder
from shoal.roles.joining import share_segment
from shoal.roles.training import Outcome, Training
from shoal.spec import Cluster, Conduct, StrategySpec, Task, World, parse_strategy
from shoal.spec.checks import require_choice
from shoal.spec.cluster import DEVICES
from shoal.spec.features import check_task
from shoal.spec.precision import PRECISIONS
from shoal.spec.vocabulary import State
from shoal.strategies import make_strategy
from shoal.strategies.base import Setting, StepResult, Work


class Trainer:
    """Trains a task in this process, together with the others that torchrun or `shoal run` started beside it.

    Either `trainer.fit()` runs the whole task, or `trainer.step(batch)` takes one step on a batch of your own;
    with several processes each passes its own part.
    """

    def __init__(
        self,
        task: Task,
        *,
        strategy: str | StrategySpec = "data",
        device: str = "cpu",
        world: World | None = None,
        slots: int | None = None,
        precision: str = "fp32",
        recompute: bool = False,
    ) -> None:
        keep_freed_memory()
        spec = parse_strategy(strategy)
        if world is None or (world.arena_fd is None and world.world_size > 1):
            world, self._kept = share_segment(World.from_environment() if world is None else world)
        require_choice("Trainer", "device", device, DEVICES)
        self.world = world = replace(world, device=choose_device(device, world.local_rank))
        slots = world.world_size if slots is None else slots
        conduct = spec.conduct(Cluster(workers=world.world_size, device=device), slots)
        _check(spec, conduct)
        check_task(task, conduct, str(spec))
        if slots < world.world_size:
            raise SpecError(
                f"Trainer: slots={slots} is fewer than the {world.world_size} processes, so some would have "
                "nothing to do; use at least as many slots as processes."
            )
        self._strategy = make_strategy(spec, self.world, slots)
        require_choice("Trainer", "precision", precision, PRECISIONS)
        self._training = Training(
            task, self._strategy, self.world, conduct, precision=precision, recompute=recompute
        )
        self._setting = Setting(
            world=self.world,
            conduct=conduct,
            extent=self._training.extent,
            clip_norm=task.clip_norm,
            on_idle=_orphan_watch(),
        )
        self._strategy.open(self._training.replica, self._setting)
        self._training.replica.train_mode()
        self._own_slot = self._setting.slots_of(self.world.global_rank)[0]
        self._seed = task.seed
        self._weight = task.weight
        self._total_is_known = self.world.world_size == 1 and task.skip_loss_below is None
        self.steps = 0
        """Steps taken so far."""

    @property
    def model(self) -> torch.nn.Module:
        """The model; its parameters may lie in memory that other processes share."""
        return self._training.replica.module

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The task's optimizer. What it keeps may lie elsewhere: in memory that all share, a part at each."""
        return self._training.replica.optimizer

    @property
    def scheduler(self) -> Any:
        """The task's scheduler, which each step of the job advances; None where it has none."""
        return self._training.replica.scheduler

    @property
    def lr(self) -> float:
        """The learning rate of the next step."""
        return self._training.replica.learning_rate

    def step(self, batch: Any) -> float:
        """Forward, backward, agree, update. Returns the loss over all processes' batches."""
        if self._setting.slots != self.world.world_size:
            raise SpecError(
                f"Trainer: step(batch) is one part per process, but slots={self._setting.slots} for "
                f"{self.world.world_size}; leave slots at its default, or use fit()."
            )
        weight = float(_num_samples(batch)) if self._weight is None else float(self._weight(batch))

        def load() -> Iterator[Piece]:
            yield batch, weight, 0  # no book is kept of batches that the user has cut

        self.steps += 1
        part = Part(self._own_slot, load, weight if self._total_is_known else None)
        result = self._strategy.step(Work(self.steps, (part,), self._seed))
        self._training.replica.advance(result.loss)
        return result.loss

    def fit(self) -> Outcome:
        """Run the whole task, as `shoal train` would."""
        if self.steps:
            raise SpecError(
                f"Trainer: fit() begins at the first step, but {self.steps} were taken already; "
                "make a new Trainer."
            )
        try:
            outcome = self._training.run(self._setting, _Silent())
        finally:
            self._training.close()
        self.steps = outcome.step
        return outcome

    def evaluate(self) -> dict[str, float]:
        """Loss and metrics over the task's test set, spread over the processes."""
        if self._training.evaluator is None:
            raise SpecError("Trainer: there is nothing to evaluate on; give the task a test set with test=.")
        return self._training.evaluator.run(self._strategy, self.world)

    def save(self, path: str | Path) -> str:
        """Write the model as safetensors (the first process does) and return its digest there."""
        stream = self._strategy.model_stream(self._training.replica)
        return save_tensors(Path(path), dict(stream.tensors)) if self.world.is_first else ""

    def close(self) -> None:
        """Leave the others."""
        self._strategy.close()

    def __enter__(self) -> Trainer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _orphan_watch() -> Callable[[], None]:
    """While waiting for others: notice that whoever started us is gone, and nobody will end us."""
    parent = os.getppid()

    def look() -> None:
        if os.getppid() != parent:
            raise PeerLost(f"The process that started this one ({parent}) has ended, and perhaps others with it.")

    return look


class _Silent:
    """Nobody watches."""

    def on_state(self, state: State, step: int) -> None: ...

    def on_step(self, step: int, result: StepResult, samples: int, learning_rate: float, epoch: int) -> None: ...

    def on_evaluation(self, step: int, results: dict[str, float]) -> None: ...

    def wants_stop(self) -> bool:
        return False

    def take_orders(self, *, at_border: bool) -> tuple[MoveOrder, ...]:
        return ()

    def on_moved(self, order: MoveOrder, world: World | None) -> None: ...


def _check(spec: StrategySpec, conduct: Conduct) -> None:
    """Refuse strategies whose processes need more than the company of their like."""
    only = "which only `shoal train` and shoal.train(...)"
    if conduct.servers:
        why = f"needs processes besides those that train, {only} start"
    elif conduct.is_cut or conduct.is_never_whole:
        why = f"leaves each process a part of the model, {only} put together again"
    elif conduct.takes_turns or conduct.is_relay:
        why = f"lets processes or layers take turns, {only} arrange"
    else:
        return
    raise SpecError(f"Trainer: strategy={spec} {why}; use data here.")


def _num_samples(batch: Any) -> int:
    """Samples of a batch: the length of its first tensor."""
    while not isinstance(batch, torch.Tensor):
        batch = next(iter(batch.values())) if isinstance(batch, dict) else batch[0]
    return len(batch)
