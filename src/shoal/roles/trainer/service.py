"""What `Trainer.fit` does in a run with servers: workers train, the others attend to them until all is over."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from shoal.errors import SpecError
from shoal.model.optimizer.state import by_parameter, restore_state
from shoal.model.replica import Replica
from shoal.model.start import Start
from shoal.roles.coordinator import coordinate, open_store, plan_training
from shoal.roles.process.reporter import Reporter
from shoal.roles.process.station import Station
from shoal.roles.server import open_served, serve
from shoal.roles.trainer.state import StepNotes
from shoal.roles.training.loop import Loop
from shoal.roles.training.observer import Outcome
from shoal.roles.training.training import Training
from shoal.spec import Job, Task
from shoal.spec.vocabulary import Role, State
from shoal.strategies.base import Setting, StepResult, Strategy


def service_of(job: Job, station: Station | None, *, may_serve: bool = False) -> Station | None:
    """The station of a Trainer whose run has servers; None where it needs none, or has to have its own. Refused
    where they differ, or where `shoal run` could have started processes for them, unless this may serve."""
    if station is not None and station.has_servers:
        if job.strategy != station.job.strategy:
            raise SpecError(
                f"Trainer: strategy={job.strategy} is not what `shoal run --strategy {station.job.strategy}` has "
                "started servers for; leave strategy= out, or change the flag."
            )
        return station
    if job.conduct.servers and station is not None and not may_serve:
        raise SpecError(
            f"Trainer: strategy={job.strategy} needs servers, and this run has none, for `shoal run` was not told "
            f"of them; write `shoal run --strategy {job.strategy}` before the script."
        )
    return None


class WatchedNotes(StepNotes):
    """Also for the supervisor, which ends a worker that hangs: another takes its place."""

    def __init__(self, start: Start, reporter: Reporter) -> None:
        super().__init__(start)
        self._reporter = reporter

    def on_state(self, state: State, step: int) -> None:
        self._reporter.on_state(state, step)

    def on_step(self, step: int, result: StepResult, *told: Any, **besides: Any) -> None:
        super().on_step(step, result, *told, **besides)
        self._reporter.pulse.lap(step)

    def on_taken(self, step: int) -> None:
        self._reporter.pulse.sign()

    def on_turn(self) -> None:
        self._reporter.pulse.sign()


def looking_up(look: Callable[[], None], reporter: Reporter) -> Callable[[], None]:
    """While a worker waits for others: `look`, and show that it lives."""

    def look_up() -> None:
        reporter.pulse.idle()
        look()

    return look_up


def train_served(
    on_state: Callable[[State, int], None], training: Training, setting: Setting, loop: Loop
) -> Outcome:
    """A worker's part. Afterwards it has all to itself: model and optimizer state as the servers had them.

    One that raises says no goodbye. It is gone, and others decide what follows.
    """
    strategy, replica = training.strategy, training.replica
    strategy.open(replica, setting)
    on_state(State.TRAINING, replica.start.step)
    outcome = loop.run()
    on_state(State.SCRIPT, outcome.step)  # no step shows any more that this process moves
    _take_home(strategy, replica)
    strategy.close()
    return outcome


def _take_home(strategy: Strategy, replica: Replica) -> None:
    """Give this worker's own optimizer what the servers keep for it."""
    replica.optimizer.state.clear()
    restore_state(replica.optimizer, replica.trained, by_parameter(dict(strategy.state_stream().tensors)))


def attend(station: Station, job: Job, task: Task, start: Start) -> None:
    """Be the server or the coordinator of those who train, as in a run that names its task; until that is over."""
    world, channel, reporter = station.meeting_world, station.channel, station.reporter
    if world.role == Role.SERVER:
        serve(open_served(job, task, start, world), world, channel, reporter)
    else:
        plan = plan_training(job, task, world, begun_at=start.step, facts=start.facts)
        coordinate(plan, open_store(station.job, world), world, channel, reporter)
