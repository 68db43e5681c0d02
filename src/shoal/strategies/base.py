"""The contract between the training loop and a strategy."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from shoal.spec import World
from shoal.strategies.replica import Replica

if TYPE_CHECKING:
    import torch

Fill = Callable[["torch.Tensor"], None]
"""Writes this process's rows of a table."""
Report = Callable[[str], None]
"""Takes one line for the user: what a strategy decided and why."""


@dataclass(frozen=True)
class Part:
    """One slot's part of a step."""

    slot: int
    load: Callable[[], Iterator[tuple[Any, float]]]
    """Reads the batches and what each counts; may be called again by a process that takes this slot over."""
    total_weight: float | None
    """What the batches of all slots count together, where that is known beforehand."""


@dataclass(frozen=True)
class Work:
    """What one process does in one step."""

    step: int
    parts: tuple[Part, ...]
    seed: int
    """With step and slot it decides every random number, whoever draws it."""
    stop: bool = False
    """This process asks that the step be the last."""
    all_parts: Callable[[], tuple[Part, ...]] | None = None
    """The parts of all slots, for optimizers that evaluate the loss again within a step."""


@dataclass(frozen=True)
class StepResult:
    """The same on every process."""

    loss: float
    weight: float
    stop: bool
    """Somebody asked that this step be the last."""


@dataclass(frozen=True, kw_only=True)
class Extent:
    """How long a run may get and how much it exchanges: what must be known before memory is shared."""

    total_steps: int = 0
    tables: int = 2
    table_rows: int = 0
    table_columns: int = 0
    accumulate: int = 1
    smallest_batch: int | None = None
    """Samples of the smallest batch of all steps, where that is known."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """Where and in what company a strategy opens."""

    world: World
    slots: int
    slots_per_worker: tuple[int, ...]
    extent: Extent = field(default_factory=Extent)
    clip_norm: float | None = None
    report: Report = print
    on_idle: Callable[[], None] | None = None
    """Called now and then while waiting for others; raises to give up."""
    port: int | None = None

    def slots_of(self, global_rank: int) -> range:
        """The slots that a worker fills."""
        start = sum(self.slots_per_worker[:global_rank])
        return range(start, start + self.slots_per_worker[global_rank])


class Strategy(Protocol):
    """One way for many processes to train one model."""

    def open(self, replica: Replica, setting: Setting) -> None:
        """Join the others. Afterwards the replica's parameters are the job's."""

    def step(self, work: Work) -> StepResult:
        """Forward, backward, agree, update. Returns once the step is committed."""

    def reform(self, world: World) -> int:
        """Take a place in a new generation; returns the last committed step of that place."""

    def losses(self, last_step: int) -> list[float]:
        """The losses of steps 1 to `last_step`, as far as they are kept."""

    def exchange(self, serial: int, shape: tuple[int, int], fill: Fill) -> torch.Tensor:
        """Every process fills its rows of a float64 table; then all have all rows. `serial` rises by call."""

    def settle(self) -> None:
        """Bring the replica's parameters and buffers to the last committed step."""

    def snapshot(self) -> dict[str, torch.Tensor]:
        """Optimizer state by whole-parameter names, `parameter/key`; parameters are the replica's own."""

    def close(self) -> None:
        """Leave; the replica keeps its last values."""
