"""The cluster: processes, their network, the launcher that replaces the dead, and time."""

from __future__ import annotations

import heapq
import itertools
import random
from collections import Counter, deque
from functools import partial

from helpers.ps_sim.network import Network
from helpers.ps_sim.processes import ServerProcess, WorkerProcess
from helpers.ps_sim.saving import Saved
from helpers.ps_sim.scenario import COORDINATOR, SERVER, WORKER, Kill, Scenario, SimulationFailed
from helpers.ps_sim.values import Gradients, Memory
from shoal.coordinator.machine import Coordinator
from shoal.coordinator.members import MemberOrder
from shoal.coordinator.plan import JobPlan
from shoal.coordinator.store import MemoryStore
from shoal.ps.messages import COORDINATOR as COORDINATOR_NODE
from shoal.ps.messages import NOBODY, PsMessage, View

NOTICED_AFTER_S = 0.02
STARTS_AFTER_S = 0.01
GIVES_UP_AFTER_S = 60.0
WAITS_FOR_AN_UPDATE = 60
"""Messages after which a server dies all the same that was to die in the middle of one."""

Process = ServerProcess | WorkerProcess | Coordinator


class DiedAtWork(Exception):
    """A process was killed while it took in a message; nobody hears the rest."""


def plan_of(scenario: Scenario) -> JobPlan:
    """The job as its coordinator sees it: shards in turn over the servers, each backed up by the next one."""
    shards = range(scenario.shards)
    has_backups = scenario.servers > 1 and scenario.replicas > 0
    return JobPlan(
        num_shards=scenario.shards,
        shard_bytes=(1,) * scenario.shards,
        owners=tuple(shard % scenario.servers for shard in shards),
        backups=tuple((shard + 1) % scenario.servers if has_backups else None for shard in shards),
        servers=scenario.servers,
        replicas=int(has_backups),
        workers=scenario.workers,
        num_cells=scenario.num_cells,
        slots=scenario.num_slots,
        most_workers=scenario.num_slots,
        borders=scenario.borders,
        leased=scenario.leased,
        sync=scenario.sync,
        shares_memory=scenario.shares_memory,
        outlives_servers=scenario.shares_memory,
        form_timeout_s=2.0,
        max_failures=max(len(scenario.kills), scenario.servers + scenario.workers + 2),
        start_timeout_s=GIVES_UP_AFTER_S if scenario.waits_for_newcomers else 0.5,
    )


class Cluster:
    """One run. The same scenario and seed give the same run, message by message."""

    def __init__(self, scenario: Scenario, seed: int) -> None:
        self.scenario = scenario
        self.seed = seed
        self.now = 0.0
        self.view: View | None = None
        """The newest that any coordinator has sent."""
        self.formed_at = 0
        """The number of the message with which the first view was told."""
        self.killed: Counter[str] = Counter()
        """Deaths that really happened, by role."""
        self.deposed: Counter[str] = Counter()
        """The same of those that live on."""
        self.cut_off: Counter[str] = Counter()
        """The same of those whose packets vanish."""
        self._unreachable: set[int] = set()
        self.workers: list[WorkerProcess] = []
        """All that ever lived."""
        self._scales = deque(scenario.scales)
        self._dice = random.Random(seed)
        self.network = Network(scenario.faults, self._dice, through_codec=scenario.through_codec)
        self._memory: Memory = {}
        self._gradients = Gradients()
        self.saved: list[Saved] = []
        """The checkpoints, in the order in which they were taken."""
        self._lives: Counter[tuple[str, int]] = Counter()
        """By role and rank: how many have been started."""
        self._processes: dict[int, Process] = {}
        self._seats: dict[int, tuple[str, int]] = {}
        """Role and rank of those that are not taken for dead."""
        self._left: dict[int, tuple[str, int]] = {}
        """The same of those that are."""
        self._old_coordinators: list[Coordinator] = []
        self._kills = deque(sorted(scenario.kills, key=lambda kill: kill.at))
        self._plan = plan_of(scenario)
        self._store = MemoryStore()
        self._nodes = itertools.count(1)
        self._order = itertools.count()
        self._chores: list[tuple[float, int, str, tuple[int, ...]]] = []
        """What the launcher has to do: when, what, about whom."""
        self._start_coordinator()
        for rank in range(scenario.servers):
            self._start(SERVER, rank)
        for rank in range(scenario.workers):
            self._start(WORKER, rank)

    @property
    def coordinator(self) -> Coordinator | None:
        found = self._processes.get(COORDINATOR_NODE)
        return found if isinstance(found, Coordinator) else None

    def server(self, node: int) -> ServerProcess | None:
        """The server that lives under this number."""
        found = self._processes.get(node)
        return found if isinstance(found, ServerProcess) else None

    def run(self) -> Cluster:
        """Run until everything is trained on, everybody is replaced, and every backup is filled."""
        try:
            while not self._is_over():
                self._advance()
                if self.now > GIVES_UP_AFTER_S:
                    raise AssertionError(f"Not over after {GIVES_UP_AFTER_S:g} s: {self._state()}")
        except AssertionError as error:
            raise self.failure(str(error)) from error
        return self

    def failure(self, what: str) -> SimulationFailed:
        """An error that says how to repeat this run, and shows its end."""
        lines = [f"{at:8.4f} {a:>3} -> {b:<3} {fate:9} {m}" for at, a, b, m, fate in self.network.trace]
        return SimulationFailed(what, self.scenario, self.seed, lines)

    # Time.

    def _advance(self) -> None:
        """Let the next thing happen: a message arrives, the launcher acts, or a process wakes up."""
        wakeup, node = min((process.wakeup, node) for node, process in self._processes.items())
        chore_at = self._chores[0][0] if self._chores else float("inf")
        arrival = self.network.next_at
        self.now = max(self.now, min(wakeup, chore_at, arrival))
        try:
            if arrival <= wakeup and arrival <= chore_at:
                sender, node, message = self.network.take()
                self._tell_old_coordinators(sender, node, message)
                process = self._processes.get(node)
                if process is None:
                    return
                process.on_message(sender, message, self.now)
            elif chore_at <= wakeup:
                self._do_chore()
                return
            else:
                self._processes[node].on_tick(self.now)
            self._drain(node)
        except DiedAtWork:
            return
        self._check_hands()

    def _check_hands(self) -> None:
        """No slot is in two hands, of those that are not taken for dead."""
        workers = [self._processes[node] for node in self._living(WORKER) if node not in self._unreachable]
        holders = [one.machine.slots for one in workers if isinstance(one, WorkerProcess)]
        held = [slot for one in holders if one is not None for slot in one.held]
        assert len(held) == len(set(held)), f"A slot is in two hands: {held}"

    def _flush(self, node: int) -> None:
        """A process sends what it has to say in the middle of its work."""
        self._drain(node)
        if node not in self._processes:
            raise DiedAtWork

    def _amid(self, node: int) -> None:
        """A process is inside an update."""
        self._kill_whoever_is_due(amid=node)
        if node not in self._processes:
            raise DiedAtWork

    def _drain(self, node: int) -> None:
        """Send what a process has to say, unless it dies over it; do what the coordinator orders."""
        process = self._processes[node]
        outbox = process.outbox if isinstance(process, Coordinator) else process.machine.outbox
        while outbox:
            self._kill_whoever_is_due()
            self._scale_if_due()
            if node not in self._processes:
                return
            receiver, message = outbox.popleft()
            if self._is_cut_off(node, receiver) or self._unreachable & {node, receiver}:
                continue
            self._watch(message)
            self.network.send(node, receiver, message, self.now)
        if isinstance(process, Coordinator):
            while process.orders:
                self._obey(process.orders.popleft())

    def _is_cut_off(self, sender: int, receiver: int) -> bool:
        """Whether one is the coordinator and the other is taken for dead."""
        other = receiver if sender == COORDINATOR_NODE else sender
        return COORDINATOR_NODE in (sender, receiver) and other not in self._seats and other in self._processes

    def _tell_old_coordinators(self, sender: int, receiver: int, message: PsMessage) -> None:
        """A coordinator that was succeeded and does not know it hears everything too, and answers."""
        for old in self._old_coordinators if receiver == COORDINATOR_NODE else ():
            old.on_message(sender, message, self.now)
            while old.outbox:
                node, answer = old.outbox.popleft()
                self.network.send(COORDINATOR_NODE, node, answer, self.now)

    def _watch(self, message: PsMessage) -> None:
        if isinstance(message, View) and (
            self.view is None or (message.term, message.number) > (self.view.term, self.view.number)
        ):
            self.formed_at = self.formed_at or self.network.sent
            self.view = message

    # Deaths.

    def _kill_whoever_is_due(self, *, amid: int | None = None) -> None:
        """`amid`: a node that is inside an update; else nobody is."""
        while self._kills and self._kills[0].at <= self.network.sent and self._may_strike(self._kills[0]):
            kill = self._kills[0]
            node = self._victim(kill)
            assert node is not None
            if kill.amid and node != amid and self.network.sent < kill.at + WAITS_FOR_AN_UPDATE:
                return
            self._kills.popleft()
            if kill.cut_off:
                self.cut_off[kill.role] += 1
                self._unreachable.add(node)
                continue
            (self.deposed if kill.lives_on else self.killed)[kill.role] += 1
            self._take_for_dead(node)
            if kill.role == COORDINATOR or not kill.lives_on:
                process = self._processes.pop(node)
                if kill.lives_on and isinstance(process, Coordinator):
                    self._old_coordinators.append(process)

    def _may_strike(self, kill: Kill) -> bool:
        """Only the living die; a server only when all that it holds is somewhere else: that is the guarantee."""
        node = self._victim(kill)
        return node is not None and (kill.role != SERVER or self._can_lose(node))

    def _victim(self, kill: Kill) -> int | None:
        seats = sorted((rank, node) for node, (role, rank) in self._seats.items() if role == kill.role)
        nodes = [node for rank, node in seats if kill.rank in (None, rank)]
        return nodes[kill.at % len(nodes)] if nodes else None

    def _can_lose(self, node: int) -> bool:
        """Whether all shards have two living copies, or one and a journal, in memory that outlives its servers."""
        if self.is_covered or self.view is None or not self.scenario.shares_memory:
            return self.is_covered
        for shard, view in enumerate(self.view.shard_views):
            has_heir = view.filled and view.backup in self._seats
            if view.primary == node and not has_heir and not self._has_journal(shard, view.copy):
                return False
            if view.backup == node and view.filled and view.primary not in self._seats:
                return False
        return True

    def _has_journal(self, shard: int, copy: int) -> bool:
        home = self._memory.get((shard, copy))
        return home is None or not home.pages.is_void

    @property
    def is_covered(self) -> bool:
        """Whether every shard has two living copies, by the newest view."""
        return self.view is not None and all(
            filled and primary in self._seats and backup in self._seats
            for _, primary, backup, filled, _ in self.view.shards
        )

    def _scale_if_due(self) -> None:
        is_due = not self.is_scaled and self._scales[0].at <= self.network.sent
        if is_due and self.coordinator is not None and self.view is not None:
            due = self._scales.popleft()
            self.coordinator.scale(servers=due.servers, workers=due.workers, now=self.now)

    @property
    def is_scaled(self) -> bool:
        return not self._scales

    def _take_for_dead(self, node: int) -> None:
        self._left[node] = self._seats.pop(node)
        if node == COORDINATOR_NODE:
            self._plan_chore(NOTICED_AFTER_S, "succeed")
        else:
            self._plan_chore(NOTICED_AFTER_S, "report", node)

    # The launcher.

    def _plan_chore(self, after_s: float, what: str, *about: int) -> None:
        heapq.heappush(self._chores, (self.now + after_s, next(self._order), what, about))

    def _do_chore(self) -> None:
        _, _, what, about = heapq.heappop(self._chores)
        match what:
            case "succeed":
                living = {node: seat for node, seat in self._seats.items() if seat[0] != COORDINATOR}
                self._chores = [chore for chore in self._chores if chore[2] != "report"]  # told by who lives
                heapq.heapify(self._chores)
                self._start_coordinator().on_living(living, self.now)
            case "report" if self.coordinator is not None:
                self.coordinator.on_lost(about[0], self.now, self._left[about[0]])
            case "report":
                return  # Whoever succeeds the dead coordinator is told who lives.
            case "start server":
                self._follow(SERVER, about[0])
                return
            case "start worker":
                self._follow(WORKER, about[0])
                return
        self._drain(COORDINATOR_NODE)

    def _obey(self, order: MemberOrder) -> None:
        if order.action == "start":
            self._plan_chore(STARTS_AFTER_S, f"start {order.role}", order.rank)
        elif order.node in self._seats:
            self._take_for_dead(order.node)
            del self._processes[order.node]

    def _start_coordinator(self) -> Coordinator:
        coordinator = Coordinator(self._plan, self._store, self.now)
        self._processes[COORDINATOR_NODE] = coordinator
        self._seats[COORDINATOR_NODE] = (COORDINATOR, 0)
        return coordinator

    def _follow(self, role: str, rank: int) -> None:
        """Start who was ordered, unless one lives that has the seat or is on its way: its end would be told."""
        if (role, rank) not in self._seats.values():
            self._start(role, rank)

    def _start(self, role: str, rank: int) -> None:
        node = next(self._nodes)
        if role == SERVER:
            self._processes[node] = ServerProcess(
                self.scenario,
                node,
                rank,
                self.now,
                self._memory,
                self._gradients,
                partial(self._flush, node),
                partial(self._amid, node),
            )
        else:
            worker = WorkerProcess(
                self.scenario,
                node,
                rank,
                self.now,
                self._dice,
                self._memory,
                self._gradients,
                self._is_mended,
                generation=self._lives[role, rank],
                saved=self.saved,
            )
            self._processes[node] = worker
            self.workers.append(worker)
        self._seats[node] = (role, rank)
        self._lives[role, rank] += 1

    def _living(self, role: str) -> list[int]:
        return [node for node, (held, _) in self._seats.items() if held == role]

    # The end.

    def _is_over(self) -> bool:
        coordinator = self.coordinator
        if coordinator is None or (coordinator.finished is None and coordinator.failed is None):
            return False
        if coordinator.failed:
            raise AssertionError(f"The coordinator gave up: {coordinator.failed}")
        living = (self._processes[node] for node in self._living(WORKER) if node not in self._unreachable)
        all_done = all(isinstance(worker, WorkerProcess) and worker.is_done for worker in living)
        return all_done and self._is_mended() and self._is_quiet()

    def _is_mended(self) -> bool:
        """Whether everybody who was to die has died and been replaced, and every shard has two copies."""
        return (
            not self._kills
            and not self._chores
            and self.view is not None
            and sorted(self.view.workers.values()) == sorted(self._living(WORKER))
            and len(self.view.workers) == self.scenario.final_workers
            and self.is_scaled
            and sum(node in self.view.addresses for node in self._living(SERVER)) == self.scenario.final_servers
            and (self.is_covered or not self._plan.replicas or self.scenario.final_servers == 1)
            and all(row[1] in self._seats for row in self.view.shards)
        )

    def _is_quiet(self) -> bool:
        """Whether every copy has everything, and its holders know it."""
        for shard, view in enumerate(self.view.shard_views if self.view else []):
            primary = self.server(view.primary)
            duty = primary.machine.primary(shard) if primary else None
            if duty is None or duty.queued or duty.holders.generation != view.generation:
                return False
            if view.backup != NOBODY and not duty.holders.filled:
                return False
        return True

    def _state(self) -> str:
        done = [(worker.machine.node, worker.is_done) for worker in self.workers]
        return f"view {self.view}, workers done {done}, kills left {list(self._kills)}"
