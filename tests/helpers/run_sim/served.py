"""A job with servers: the real coordinator, server and worker machines in processes that start and end."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from helpers.ps_sim.cluster import plan_of
from helpers.ps_sim.network import FASTEST_S, SLOWEST_S
from helpers.ps_sim.processes import ServerProcess, WorkerProcess
from helpers.ps_sim.saving import Saved
from helpers.ps_sim.scenario import Scenario
from helpers.ps_sim.values import Gradients, Memory
from helpers.run_sim.folder import FlakyStore
from helpers.run_sim.processes import SimProcess
from helpers.run_sim.timeline import Alarm, Timeline
from shoal.comm.words import Stop
from shoal.coordinator.machine import Coordinator
from shoal.coordinator.store import StoreError, Superseded
from shoal.errors import LaunchError
from shoal.ps.messages import COORDINATOR, PsMessage, View
from shoal.roles.coordinator import PATIENCE_S, Liaison
from shoal.spec import World
from shoal.spec.told import Told

Tell = Callable[[Told], None]


class SimNetwork:
    """Keeps the order of messages between two nodes. What a process has under way when it ends may be lost."""

    def __init__(self, timeline: Timeline, drop: float) -> None:
        self.nodes: dict[int, NodeProcess] = {}
        self.view: View | None = None
        """The newest that any coordinator has sent."""
        self._timeline = timeline
        self._drop = drop
        self._last: defaultdict[tuple[int, int], float] = defaultdict(float)

    def send(self, sender: NodeProcess, receiver: int, message: PsMessage) -> None:
        dice, pair = self._timeline.dice, (sender.world.node, receiver)
        if isinstance(message, View) and (
            self.view is None or (message.term, message.number) > (self.view.term, self.view.number)
        ):
            self.view = message
        if dice.random() < self._drop:
            return
        arrives = max(self._last[pair], self._timeline.now + dice.uniform(FASTEST_S, SLOWEST_S))
        self._last[pair] = arrives
        self._timeline.after(arrives - self._timeline.now, lambda: self._arrive(sender, receiver, message))

    def is_covered(self) -> bool:
        """Whether every shard has two copies with those who live and run."""
        if self.view is None:
            return False
        here = {node for node, process in self.nodes.items() if process.is_alive and not process.is_stopped}
        return all(one.filled and {one.primary, one.backup} <= here for one in self.view.shard_views)

    def outlives(self, host: int) -> bool:
        """Whether somebody on another host has all of every shard, and lives and runs."""
        if self.view is None:
            return False
        here = {node for node, process in self.nodes.items() if process.is_alive and not process.is_stopped}
        apart = {node for node in here if self.nodes[node].world.host_number != host}
        return all(
            one.primary in apart or (one.filled and one.backup in apart and one.primary in here)
            for one in self.view.shard_views
        )

    def _arrive(self, sender: NodeProcess, receiver: int, message: PsMessage) -> None:
        process = self.nodes.get(receiver)
        if process is not None and (sender.is_alive or not sender.loses_tail):
            process.do(lambda: process.receive(sender.world.node, message))


class NodeProcess(SimProcess):
    """A process with a machine of the protocol, and its place in the network."""

    def __init__(self, job: ServedJob, world: World, tell: Tell) -> None:
        super().__init__(job.timeline, world, tell)
        self.job = job
        self.loses_tail = job.timeline.dice.random() < 0.5
        self._alarm = Alarm(job.timeline, self._next_tick, lambda: self.do(self._tick))

    @property
    def machine(self) -> Any:
        """What takes messages and lets time pass; None until it has loaded."""
        raise NotImplementedError

    @property
    def outbox(self) -> Any:
        raise NotImplementedError

    def receive(self, sender: int, message: PsMessage) -> None:
        self.machine.on_message(sender, message, self.timeline.now)
        self.pump()

    def pump(self) -> None:
        """Send what there is to send."""
        self.drain()
        self._alarm.set()

    def drain(self) -> None:
        while self.outbox:
            receiver, message = self.outbox.popleft()
            self.job.network.send(self, receiver, message)

    def join_network(self) -> None:
        self.job.network.nodes[self.world.node] = self
        self.pump()

    def _tick(self) -> None:
        self.machine.on_tick(self.timeline.now)
        self.pump()

    def _next_tick(self) -> float | None:
        return self.machine.wakeup if self.is_alive and not self.is_stopped else None

    def _go_on(self) -> None:
        super()._go_on()
        if self.is_alive and self.machine is not None:
            self._alarm.set()


class CoordinatorProcess(NodeProcess):
    """As `roles/coordinator.py`."""

    machine: Coordinator | None = None

    def __init__(self, job: ServedJob, world: World, tell: Tell) -> None:
        super().__init__(job, world, tell)
        self._unheard: list[Told] = []

    @property
    def outbox(self) -> Any:
        assert self.machine is not None
        return self.machine.outbox

    def work(self) -> None:
        try:
            self.machine = Coordinator(self.job.plan, self.job.store, self.timeline.now)
        except (StoreError, Superseded) as error:
            self.fail(str(error))
            return
        self._liaison = Liaison(self.machine)
        self.enter("ready")
        self.join_network()
        for word in self._unheard:
            self.do(lambda word=word: self.hear(word))

    def hear(self, word: Told) -> None:
        if self.machine is None:
            self._unheard.append(word)
        elif self._liaison.hear(word, self.timeline.now):
            self.pump()
        else:
            self.end(0)

    def drain(self) -> None:
        super().drain()
        try:
            for word in self._liaison.words():
                self._tell(word)
        except LaunchError as error:
            self.fail(str(error))


class ServingProcess(NodeProcess):
    """As `roles/server.py`."""

    machine: ServerProcess | None = None

    @property
    def outbox(self) -> Any:
        assert self.machine is not None
        return self.machine.machine.outbox

    def work(self) -> None:
        job, now = self.job, self.timeline.now
        node, memory, gradients = self.world.node, job.memory, job.gradients
        self.machine = ServerProcess(
            job.scenario,
            node,
            self.rank,
            now,
            memory,
            gradients,
            flush=self.drain,
            amid=lambda: None,
            host=self.world.host_number,
        )
        self.enter("ready")
        self.join_network()

    def hear(self, word: Told) -> None:
        if isinstance(word, Stop):
            self.end(0)


class TrainingProcess(NodeProcess):
    """As `strategies/ps/strategy.py`: trains, the first one evaluates and saves, says so, and really ends."""

    machine: WorkerProcess | None = None

    def __init__(self, job: ServedJob, world: World, tell: Tell) -> None:
        super().__init__(job, world, tell)
        self._is_finishing = False

    @property
    def outbox(self) -> Any:
        assert self.machine is not None
        return self.machine.machine.outbox

    def work(self) -> None:
        job, generation = self.job, self.world.generation
        self.machine = WorkerProcess(
            job.scenario,
            self.world.node,
            self.rank,
            self.timeline.now,
            self.timeline.dice,
            job.memory,
            job.gradients,
            lambda: True,
            generation=generation,
            saved=job.saved,
        )
        self.enter("ready")
        self.enter("training")
        self.join_network()

    def hear(self, word: Told) -> None:
        if isinstance(word, Stop) and not self._is_finishing:
            self._is_finishing = True
            self.later(self.timeline.dice.uniform(0.01, 0.6), lambda: self._finish("stopped"))

    def pump(self) -> None:
        assert self.machine is not None
        if not self._is_finishing:
            self.machine.machine.facts.pop("done", None)  # It says so when it leaves.
        self.step = max(self.step, self.machine.machine.reached)
        super().pump()
        if not self._is_finishing and self.machine.is_done:
            self._is_finishing = True
            takes_s = self.timeline.dice.uniform(0.01, 0.3) if self.rank == 0 else 0.002
            self.later(takes_s, lambda: self._finish("finished"))

    def _finish(self, reason: str) -> None:
        self.say("done", results={"rank": self.rank, "reason": reason})
        self.later(self.timeline.dice.uniform(0.0, 0.05), self._leave)

    def _leave(self) -> None:
        if self.machine is not None:
            self.machine.machine.say_done(self.timeline.now)
            self.drain()
        self.end(0)


class ServedJob:
    """All that the processes of a job with servers share."""

    def __init__(self, scenario: Scenario, timeline: Timeline, drop: float) -> None:
        self.scenario = scenario
        self.timeline = timeline
        # As a real job's: on one host the supervisor tells of everything sooner.
        patience = dict.fromkeys(("silent_after_s", "form_timeout_s", "start_timeout_s"), PATIENCE_S)
        self.plan = replace(plan_of(scenario), **patience)
        self.store = FlakyStore(timeline.dice)
        self.network = SimNetwork(timeline, drop)
        self.memory: Memory = {}
        self.gradients = Gradients()
        self.saved: list[Saved] = []

    def make(self, number: int, world: World, tell: Tell) -> SimProcess:
        roles = {"coordinator": CoordinatorProcess, "server": ServingProcess, "worker": TrainingProcess}
        assert (world.role == "coordinator") == (world.node == COORDINATOR)
        return roles[world.role](self, world, tell)

    def may_lose(self, process: SimProcess) -> bool:
        """Whether what this process holds is somewhere else: that is the guarantee."""
        return process.role != "server" or self.network.is_covered()

    @property
    def may_fail(self) -> bool:
        """Whether something has happened that ends a run with a sentence."""
        return self.store.failed_claims > 0

    def fail_disk(self, is_failing: bool) -> None:
        self.store.is_failing = is_failing

    def check(self, results: dict[str, Any]) -> None:
        """What must be true after a clean end: counted, and every cell once in every shard."""
        assert results.get("audit", {}).get("clean"), f"The audit is missing or not clean: {results}"
        assert self.network.view is not None
        everything = list(range(self.scenario.num_cells))
        for shard, holders in enumerate(self.network.view.shard_views):
            applied = sorted(self.memory[shard, holders.copy].cells)
            assert applied == everything, f"Shard {shard}: every cell once was expected, found {applied}"
        planned = [border // self.scenario.num_slots for border in self.scenario.borders]
        if self.scenario.leased:
            steps = [one.step for one in self.saved]
            assert sorted(set(steps)) == planned, f"Checkpoints were planned after {planned}, taken after {steps}."
        for one in self.saved:
            whole = list(range(one.step * self.scenario.num_slots))
            assert all(cells == whole for cells in one.cells), f"The checkpoint of step {one.step} is not of it."
