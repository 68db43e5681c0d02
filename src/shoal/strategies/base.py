"""The contract between the training loop and a strategy."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, runtime_checkable

from shoal.checkpoint.model_stream import TensorStream
from shoal.ledger.shares import Sizes
from shoal.model.replica import Replica, call_model
from shoal.spec import Conduct, World
from shoal.step.compute import Sums
from shoal.step.work import Turn, Work

if TYPE_CHECKING:
    import numpy as np
    import torch

    from shoal.step.private import ClientProtection

Fill = Callable[["torch.Tensor", int], None]
"""Writes the rows of a table that belong to one lane."""
Report = Callable[[str], None]
"""Takes one line for the user: what a strategy decided and why."""


class Commit(Protocol):
    """A turn that was taken. What it came to may be known later: turns resolve in their order."""

    @property
    def is_known(self) -> bool:
        """Whether what it came to is known by now, so that nobody has to be waited for."""

    def result(self) -> StepResult:
        """Wait until it is committed. It may be left by whoever waits, and is then called again."""


@dataclass(frozen=True)
class StepResult:
    """What a turn came to; in lockstep the same on every process. It is a commit that has resolved."""

    loss: float
    weight: float
    stop: bool
    """Somebody asked that this step be the last."""
    save: bool = False
    """Somebody asked that the state be saved now."""
    skipped: float = 0.0
    """What those parts would have counted that were learnt already."""
    skipped_parts: int = 0
    """How many these were."""
    counts: Sequence[int] = ()
    """By slot: the samples that were used."""
    done: int | None = None
    """The last step that is done, as far as this process knows; None: that of the turn."""
    cells: int | None = None
    """How many slots of steps all workers have trained on, where they do not go in step with this one."""
    reason: str = "stopped"
    """Why this is the last, where it is."""
    is_whole: bool = True
    """Where all go in lockstep: whether the state is that of a step now, and of no other."""
    waited_s: float = 0.0
    """At a border: how long the others had to be waited for."""
    facts: Mapping[str, Any] = field(default_factory=dict)
    """What the run's results have to say besides, told with the last turn."""
    parts: Mapping[str, float] = field(default_factory=dict)
    """By name: the numbers that the loss is told with, which are means as it is."""

    @property
    def is_known(self) -> bool:
        """It is."""
        return True

    def result(self) -> StepResult:
        """It is known already."""
        return self


def step_result(
    sums: Sums, *, stop: bool, counts: Sequence[int], save: bool = False, names: Sequence[str] = ()
) -> StepResult:
    """What a step's sums are told as; `counts`: the samples of each slot; `names`: of the loss's parts."""
    total = sums.weight + sums.skipped
    return StepResult(
        loss=sums.mean_loss,
        weight=sums.weight,
        stop=stop,
        save=save,
        skipped=sums.skipped,
        skipped_parts=int(sums.skipped_parts),
        counts=tuple(counts),
        parts={name: part / total for name, part in zip(names, sums.parts, strict=False)},
    )


@dataclass(frozen=True, kw_only=True)
class Extent:
    """How long a run may get and how much it exchanges: what must be known before memory is shared."""

    total_steps: int = 0
    tables: int = 2
    table_rows: int = 0
    table_columns: int = 0
    accumulate: int = 1
    steps_per_epoch: int = 0
    batch_size: int = 0
    """Samples of a whole batch."""
    smallest_batch: int | None = None
    """Samples of the smallest batch of all steps, where that is known."""
    is_saved: bool = False
    """Whether the run leaves checkpoints."""
    is_kept: bool = False
    """Whether every worker goes on with the trained model, and not the first one alone."""


class Supply(Protocol):
    """Where a strategy gets data from, besides what its turns bring."""

    def sample(self) -> Any:
        """A batch as large as the pieces of a step, for whoever must see the model run before it trains."""

    def work(self, step: int, slots: Iterable[int], *, apart: bool = False) -> Work:
        """These slots' parts of a step; `apart`: each is a batch of its own."""


@dataclass(frozen=True, kw_only=True)
class Company:
    """Who listens to a strategy, and whom it asks, while it works."""

    report: Report = print
    warn: Report = print
    on_idle: Callable[[], None] | None = None
    """Called now and then while waiting for others; raises to give up."""
    on_block: Callable[[], None] | None = None
    """Called before waiting for others in a call from which `on_idle` cannot be called."""
    on_cuts: Callable[[int, Sizes], None] | None = None
    """Told from which step on the slots have which sizes, before anybody uses them."""
    wants_stop: Callable[[], bool] = lambda: False
    """Whether the run is to end, for those who must know it while they wait."""
    meet: Callable[[str, str], dict[int, str]] | None = None
    """Leaves a text for all workers under a name, and waits for theirs, by rank; None where nobody supervises."""
    moved_coordinator: Callable[[], str] = lambda: ""
    """Where the coordinator listens, once it has moved."""
    is_held: Callable[[], bool] = lambda: False
    """Whether a worker that is gone is about to be followed, so that those who miss it wait."""
    page: memoryview | None = None
    """What the first worker leaves for all of its host to read, which other hosts are told with every step: before
    anybody has the gradients of all."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """Where and in what company a strategy opens."""

    world: World
    conduct: Conduct
    extent: Extent = field(default_factory=Extent)
    company: Company = field(default_factory=Company)
    supply: Supply | None = None
    clip_norm: float | None = None
    port: int | None = None
    memory_bytes: int | None = None
    """The most that each worker may use, where that is limited."""
    protection: ClientProtection | None = None
    """What is to be done for the privacy of clients, where there are some."""

    @property
    def slots(self) -> int:
        """Parts of a global batch."""
        return self.conduct.slots

    def relay_owner(self, step: int) -> int:
        """Who takes this step where workers take turns: each has one block of consecutive steps in an epoch."""
        steps = self.extent.steps_per_epoch
        return (step - 1) % steps * self.world.world_size // steps

    def decider(self, step: int) -> int:
        """Who decides for all whether the state is saved after this step: somebody who takes part in it."""
        return self.relay_owner(step) if self.conduct.is_relay else 0

    def slots_at(self, step: int, place: int) -> range:
        """The slots that a worker's place fills in this step."""
        if not self.conduct.is_relay:
            return self.slots_of(place)
        return range(self.slots if self.relay_owner(step) == place else 0)

    def slots_of(self, place: int) -> range:
        """The slots that belong to a worker's place."""
        return self.conduct.fills[place]


class Past(NamedTuple):
    """What a successor finds of the steps that were taken before it came."""

    counts: np.ndarray
    """By step and slot: the samples that were used."""
    sizes: np.ndarray | None
    """By step and slot: the samples that they were cut into; 0 for even."""
    was_stopped: bool
    """Whether all had agreed that the last of them is the run's last."""


class Handover(Protocol):
    """What only memory that outlives a process can do: another goes on where it was."""

    def reform(self, world: World) -> int:
        """Host `world.places` in a new generation; returns the last step that is committed in all of them.

        A spare does so once, when it takes over; a worker whenever places come to it or leave it, also in the
        middle of a step that it then takes again.
        """

    @property
    def may_release(self) -> bool:
        """Whether places may leave this process after the step that it has taken last."""

    def gather(self) -> bool:
        """Meet all others, where what the streams give is theirs too: none of these waits for anybody then. It is
        left where places come to this process, and called again. False where others have met before that: they no
        longer wait for what the streams of this process would give."""

    def committed(self) -> int:
        """The last step that is committed in all places by now."""

    def losses(self, first: int, last: int) -> list[float]:
        """The losses of these steps."""

    def sizes(self, step: int) -> Sizes | None:
        """Samples of each slot in the next step, or one before it, as all have agreed; None: even."""

    def past(self, first: int, last: int) -> Past:
        """Of steps that others took, which were all that are committed."""


@runtime_checkable
class HandsOver(Protocol):
    """A strategy in which a process can go on for another."""

    handover: Handover


def handover_of(strategy: Strategy) -> Handover | None:
    """How a process goes on for another under this strategy; None where none can."""
    # Asked for in every step: a protocol's own check takes longer than many a step on a GPU.
    found: Handover | None = getattr(strategy, "handover", None)
    return found


class Strategy(Protocol):
    """One way for many processes to train one model. Some also hand over (`HandsOver`)."""

    def open(self, replica: Replica, setting: Setting) -> None:
        """Join the others. Afterwards the replica's parameters are the job's."""

    def turns(self, first: int, last: int) -> Iterator[Turn]:
        """What this process does, one after the other, to bring the run from before step `first` to after `last`.

        The next one is asked for when the one before has been taken, and may be waited for.
        """

    def take(self, work: Work) -> Commit:
        """Forward, backward, agree, update. It may return before the step is committed, so that the next one can
        begin: at most as many are open as the conduct says."""

    def exchange(self, serial: int, shape: tuple[int, int], fill: Fill) -> torch.Tensor:
        """Every process fills the rows of its lanes in a float64 table; then all have all rows.

        The replica is at the last committed step when it fills them. `serial` rises by call; one that was left in
        the middle is made again with the same.
        """

    def infer(self, replica: Replica, inputs: Any) -> Any:
        """The model's output; None where another process has it.

        Where the conduct `gathers`, all call this together, and the streams below, which they consume.
        """

    def model_stream(self, replica: Replica) -> TensorStream:
        """The whole model's state after the last committed step, tensor by tensor, at the first worker."""

    def state_stream(self) -> TensorStream:
        """Likewise the optimizer's state, by `parameter/key`. What a strategy keeps besides is `put_aside`."""

    def close(self) -> None:
        """Leave; the replica keeps its last values."""


class Lockstep:
    """For strategies in which everybody has a part in every step."""

    def turns(self, first: int, last: int) -> Iterator[Turn]:
        """One step after the other."""
        return (Turn(step=step) for step in range(first, last + 1))


class WholeModel(Lockstep, ABC):
    """For strategies in which every process has the whole model."""

    def infer(self, replica: Replica, inputs: Any) -> Any:
        """What the replica makes of it."""
        return call_model(replica.module, inputs)

    def settle(self) -> None:
        """Bring the replica to the last committed step; where nothing else is said, it is always there."""
        return

    def model_stream(self, replica: Replica) -> TensorStream:
        """The replica's own."""
        self.settle()
        return TensorStream.of(replica.module.state_dict())

    @abstractmethod
    def snapshot(self) -> dict[str, torch.Tensor]:
        """The optimizer's state, which this process has, too."""

    def state_stream(self) -> TensorStream:
        """All of them are there."""
        return TensorStream.of(self.snapshot())
