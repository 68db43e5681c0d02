"""What a run does for the privacy of its data: its noise, where it ends for it, and what it has spent."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from shoal.datasets import Stream
from shoal.datasets.iterated import ByPosition
from shoal.errors import CheckpointError, TaskError
from shoal.ledger import Schedule
from shoal.ledger.poisson import PoissonOrder, PoissonSchedule
from shoal.model.buffers import moving_buffers
from shoal.model.replica import Replica
from shoal.model.start import Start
from shoal.privacy import Budget, NoiseRounds
from shoal.spec import Conduct, Task
from shoal.spec.privacy import Privacy
from shoal.step.private import ClientProtection, GaussianNoise, PrivateCompute


@dataclass(frozen=True)
class Protection:
    """One run's, from the step that it begins with."""

    privacy: Privacy
    budget: Budget
    since: int
    """The step after which it begins."""
    round_steps: int
    """Steps of one round of noise."""

    @property
    def _noise(self) -> GaussianNoise:
        assert self.privacy.key is not None
        return GaussianNoise(self.budget.coming.noise * self.privacy.clip, self.privacy.key)

    def limited(self, schedule: Schedule) -> Schedule:
        """The steps that can be afforded."""
        if not self.budget.is_short:
            return schedule
        return replace(schedule, max_steps=self.since + self.budget.coming.count * self.round_steps)

    def protect(self, replica: Replica) -> ClientProtection | None:
        """Have gradients clipped and noised here; what the strategy is to do where clients are protected."""
        if self.budget.unit == "samples":
            replica.compute = PrivateCompute(replica, self.privacy.clip, self._noise)
            return None
        if any(True for _ in moving_buffers(replica.module)):
            raise TaskError(
                "Task: privacy clips and noises what clients have come to, but the model has buffers that move "
                "(BatchNorm's statistics, or counts), which are no parameters; use layers without, as GroupNorm."
            )
        return ClientProtection(self.privacy.clip, self._noise, self.budget.coming.chosen)

    def _taken(self, step: int) -> int:
        return (step - self.since) // self.round_steps

    def plain(self, step: int) -> dict[str, Any]:
        """What a checkpoint of this step keeps."""
        return self.budget.plain(self._taken(step))

    def facts(self, step: int) -> dict[str, Any]:
        """What the run's results say after its last step."""
        return {"privacy": self.budget.facts(self._taken(step))}


def check_private(task: Task, train: Any) -> None:
    """Whether what a task says of its samples leaves room for privacy."""
    if isinstance(train, (Stream, ByPosition)):
        raise TaskError(
            "Task: privacy draws the samples of each step by chance from all of them, but the train set is read "
            "forward only; use a data set that is read by index."
        )
    said = {
        "sampler": task.sampler is not None,
        "shuffle=False": not task.shuffle,
        "weight": task.weight is not None,
        "skip_loss_below": task.skip_loss_below is not None,
        "batch_per_worker": task.batch_per_worker,
    }
    for name, is_said in said.items():
        if is_said:
            raise TaskError(
                f"Task: privacy draws the samples of each step by itself, and each counts the same, but {name} "
                "says otherwise; leave it out."
            )


def drawn_schedule(task: Task, train: Any, slots: int, privacy: Privacy) -> Schedule:
    """The steps of a task whose samples each come in by their own chance."""
    assert privacy.key is not None
    count, batch_size = len(train), task.batch_size
    if batch_size > count:
        raise TaskError(
            f"Task: batch_size={batch_size} is more than the {count} samples of the train set, and privacy takes "
            "each at most once in a step; use a smaller batch_size."
        )
    order = PoissonOrder(count, batch_size, privacy.key)
    return PoissonSchedule(count, batch_size, slots, task.epochs, task.max_steps, order)


def make_protection(
    privacy: Privacy, schedule: Schedule, conduct: Conduct, start: Start, count: int
) -> Protection:
    """Plan a run's noise. `count`: samples of the train set."""
    saved = start.facts.get("privacy")
    if start.facts and saved is None:
        raise CheckpointError(
            "The checkpoint was trained without privacy, which nothing that follows could give it; begin anew."
        )
    steps, clients = schedule.total_steps - start.step, conduct.clients
    if clients is None:
        rounds = NoiseRounds(noise=1.0, chosen=schedule.batch_size, total=count, count=steps)
        return Protection(privacy, Budget.plan(privacy, rounds, "samples", saved), start.step, 1)
    rounds = NoiseRounds(
        noise=1.0,
        chosen=clients.per_round,
        total=clients.count,
        count=steps // clients.steps,
        sampling="fixed",
    )
    return Protection(privacy, Budget.plan(privacy, rounds, "clients", saved), start.step, clients.steps)


def refuse_unprotected(start: Start) -> None:
    """A run without privacy does not go on with one that has some."""
    if start.facts.get("privacy") is not None:
        raise CheckpointError(
            "The checkpoint was trained with privacy, which a run without would spend unseen; leave --privacy out "
            "to go on as before, or begin from its model with --from."
        )
