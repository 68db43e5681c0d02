"""A job without servers: places in shared memory, the processes that host them, and spares. A light model of
`roles/training/training.py`, `roles/training/hosting.py` and the arena's counters."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

from helpers.run_sim.folder import SimFolder
from helpers.run_sim.processes import SimProcess
from helpers.run_sim.timeline import Action, Timeline
from shoal.comm.words import Adopt, Release, Stop, Takeover
from shoal.spec import World
from shoal.spec.told import Told

STEP_S = (0.002, 0.03)
WAIT_S = 0.02
SAVE_S = (0.01, 0.5)
RETRY_S = 0.3
MOST_TRIES = 60

Tell = Callable[[Told], None]


class PlacedJob:
    """The memory that all share: by place, how far its gradients and its updates are."""

    def __init__(self, places: int, steps: int, timeline: Timeline, folder: SimFolder, save_every: int) -> None:
        self.steps = steps
        self.timeline = timeline
        self.folder = folder
        self.save_every = save_every
        begun_at = max(folder.checkpoints, default=0)
        self.arrived, self.updated = [begun_at] * places, [begun_at] * places
        self.begun_at = begun_at
        self.applied: Counter[tuple[int, int]] = Counter()
        self.stops: set[int] = set()
        """Steps after which all leave."""
        self.processes: list[PlacedProcess] = []

    @property
    def committed(self) -> int:
        return min(self.updated)

    def make(self, number: int, world: World, tell: Tell) -> SimProcess:
        process = PlacedProcess(self, world, tell)
        self.processes.append(process)
        return process

    def may_lose(self, process: SimProcess) -> bool:
        """Whoever dies leaves all that it did in memory."""
        return True

    @property
    def may_fail(self) -> bool:
        """Whether something has happened that ends a run with a sentence."""
        return False

    def fail_disk(self, is_failing: bool) -> None:
        self.folder.is_failing = is_failing

    def check(self, results: dict[str, Any]) -> None:
        """What must be true after a clean end: every place was updated once in every step, and all is saved."""
        assert self.committed == self.steps, f"Only {self.committed} of {self.steps} steps were taken."
        expected = {
            (step, place)
            for step in range(self.begun_at + 1, self.steps + 1)
            for place in range(len(self.updated))
        }
        assert self.applied == Counter(expected), "A place was updated twice or never in a step."
        assert self.steps in self.folder.checkpoints | self.folder.torn, "The last state was not saved."


class PlacedProcess(SimProcess):
    """A worker or a spare."""

    def __init__(self, job: PlacedJob, world: World, tell: Tell) -> None:
        super().__init__(job.timeline, world, tell)
        self.job = job
        self.places: set[int] = set()
        self._wants_stop = False
        self._orders: list[Takeover | Adopt | Release] = []
        self._is_idle = False
        """It is a spare that waits for places."""
        self._tries = 0

    def work(self) -> None:
        if self.role == "worker":
            self._host(self.world.places)
            self.enter("ready")
            self._train()
        elif not self._orders:
            self.enter("ready")
            self._is_idle = True
        else:
            self._take_over(self._orders.pop(0))

    def hear(self, word: Told) -> None:
        match word:
            case Stop():
                self._wants_stop = True
                if self._is_idle:
                    self.end(0)
            case Takeover() if self._is_idle:
                self._is_idle = False
                self._take_over(word)
            case Takeover() | Adopt() | Release():
                self._orders.append(word)

    def _take_over(self, order: Takeover | Adopt | Release) -> None:
        self._host(order.places)
        self.role = "worker"
        self.say("adopted", places=order.places, generation=order.generation)
        self._train()

    def _host(self, places: Any) -> None:
        for other in self.job.processes:
            shared = set(places) & other.places
            assert other is self or not other.is_alive or not shared, f"Places {shared} have two hosts."
        self.places |= set(places)

    def _train(self) -> None:
        self.step = self.job.committed
        self.rank = min(self.places)
        self.enter("training")
        self._begin_step()

    # One step: compute, wait for all, update, wait for all.

    def _begin_step(self) -> None:
        """At the border between two steps places may go as well as come."""
        for order in self._take_orders(at_border=True):
            if isinstance(order, Release):
                self.places -= set(order.places)
                self.say("released", places=order.places, generation=order.generation)
        if not self.places:
            self.end(0)
        elif self.step >= self.job.steps or self.step in self.job.stops:
            self._finish()
        else:
            self.later(self.timeline.dice.uniform(*STEP_S), self._give_gradients)

    def _give_gradients(self) -> None:
        step = self.step + 1
        for place in self.places:
            if self._wants_stop and self.job.arrived[place] < step:
                self.job.stops.add(step)
            self.job.arrived[place] = max(self.job.arrived[place], step)
        self._await(self.job.arrived, self._update)

    def _update(self) -> None:
        step = self.step + 1
        for place in self.places:
            if self.job.updated[place] < step:
                self.job.applied[step, place] += 1
                self.job.updated[place] = step
        self._await(self.job.updated, self._commit)

    def _await(self, counters: list[int], then: Action) -> None:
        """Wait until all places have come so far; what comes to this process meanwhile is done as well."""
        if any(self._take_orders(at_border=False)):
            self.later(self.timeline.dice.uniform(*STEP_S), self._give_gradients)
        elif min(counters) > self.step:
            then()
        else:
            self.later(WAIT_S, lambda: self._await(counters, then))

    def _commit(self) -> None:
        self.step += 1
        if 0 in self.places:
            self.say("steps", steps=[[self.step, 0.1]], samples=self.step, total_steps=self.job.steps)
            if self.step % self.job.save_every == 0:
                self._save(self._begin_step)
                return
        self._begin_step()

    def _take_orders(self, *, at_border: bool) -> list[Takeover | Adopt | Release]:
        due = [order for order in self._orders if at_border or isinstance(order, Adopt)]
        self._orders = [order for order in self._orders if order not in due]
        for order in due:
            if isinstance(order, Adopt):
                self._host(order.places)
                self.say("adopted", places=order.places, generation=order.generation)
        return due

    def _finish(self) -> None:
        if 0 in self.places:
            self._save(self._leave)
        else:
            self._leave()

    def _save(self, then: Action) -> None:
        """Write a checkpoint, again where that fails; what was told to be there must be."""
        self.phase = "saving"

        def written() -> None:
            if self.job.folder.save(self.step):
                self.say("saved", path=str(self.step), digest="")
                self.phase, self._tries = "computing", 0
                then()
            elif self._tries < MOST_TRIES:
                self._tries += 1
                self.later(RETRY_S, written)
            else:
                self.fail(f"The checkpoint of step {self.step} cannot be written.")

        self.later(self.timeline.dice.uniform(*SAVE_S), written)

    def _leave(self) -> None:
        self.say("done", results={"rank": self.rank, "steps": self.step})
        self.later(self.timeline.dice.uniform(0.0, 0.05), lambda: self.end(0))
