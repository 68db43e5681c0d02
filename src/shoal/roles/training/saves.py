"""When a process takes part in saving the run's state, and what it does for it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from shoal.roles.training.hosting import PlacesMoved
from shoal.roles.training.training import Training
from shoal.strategies.base import Setting


class Saves:
    """One process's part in the checkpoints of a run that has some."""

    def __init__(
        self, training: Training, setting: Setting, gather: Callable[[], bool], go_on: Callable[[], object]
    ) -> None:
        assert training.checkpoints is not None
        self._training = training
        self._setting = setting
        self._gather = gather
        """Meets the others, whoever is lost meanwhile."""
        self._go_on = go_on
        """Does what was ordered meanwhile."""
        self._checkpoints = training.checkpoints

    def note(self, step: int, loss: float) -> None:
        """A step is done."""
        self._checkpoints.note_step(step, loss)

    def note_past(self, losses: Sequence[float]) -> None:
        """These were the losses of all steps so far, whoever took them."""
        self._checkpoints.note_steps(losses)

    def is_wished(self, step: int) -> bool:
        """Whether to ask all, in this step, to save after it; only needed where they must do so together."""
        conduct = self._training.conduct
        if conduct.is_lockstep and not conduct.gathers:
            return False
        return self._training.world.global_rank == self._setting.decider(step) and self._checkpoints.is_due(step)

    def is_due(self, step: int) -> bool:
        """Whether this process saves after this step, which it decides by itself."""
        conduct = self._training.conduct
        decides = self._training.world.is_first and conduct.is_lockstep and not conduct.gathers
        return decides and self._checkpoints.is_due(step)

    def after(self, step: int, loss: float, *, is_agreed: bool, is_last: bool) -> None:
        """Save what is due. Nobody can go on before this process, which has a part in every step: the state stands
        still."""
        world = self._training.world
        self._checkpoints.failures = world.generation
        has_part = world.is_first or self._training.conduct.gathers
        is_missing = is_last and has_part and not self._checkpoints.has_saved(step)
        if is_agreed or is_missing or self.is_due(step):
            self.make(step, loss)

    def regret(self, step: int) -> None:
        """The run ends with this step, and what there is belongs to no one step: it cannot be saved."""
        checkpoints = self._checkpoints
        if self._training.world.is_first and not checkpoints.has_saved(step):
            self._setting.company.warn(
                f"the workers had not come to one step when the run ended, so step {step} is not saved; "
                f"--resume goes on after step {checkpoints.last_step}"
            )

    def make(self, step: int, loss: float, *, waited_s: float = 0.0) -> None:
        """Save the state after this step."""
        training, strategy, checkpoints = self._training, self._training.strategy, self._checkpoints
        if training.conduct.servers and training.book is not None:
            training.book.commit_whole(training.schedule, step)  # servers have all of these steps, and no other
        checkpoints.note_step(step, loss)
        if not self._gather():
            self._leave_out(step)
            return
        try:
            with checkpoints.at_the_disk():  # others, too, wait for the one who writes
                model, state = strategy.model_stream(training.replica), strategy.state_stream()
                if not training.world.is_first:
                    model.drain()
                    state.drain()
                    checkpoints.note_saved(step)
                elif training.conduct.gathers:
                    checkpoints.take(step, model, state)
                else:
                    checkpoints.save(step, lambda: dict(model.tensors), lambda: dict(state.tensors), waited_s)
        except PlacesMoved:  # what somebody was about to give is lost: what there is of it is no checkpoint
            self._leave_out(step)
            self._go_on()

    def _leave_out(self, step: int) -> None:
        if self._training.world.is_first:
            self._setting.company.warn(f"step {step} is not saved: a worker was lost that had a part of it")
