"""The coordinator's process: the machine that decides, its durable memory, and whom it gives orders to."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from shoal.checkpoint.listing import read_manifest
from shoal.comm.channel import Channel
from shoal.comm.kernel import name_process
from shoal.comm.words import (
    TO_PROCESSES,
    Coordinate,
    MemberLeft,
    MemberLost,
    MembersLiving,
    Ordered,
    ScaleAnswered,
    ScaleWanted,
    Stop,
    understood,
)
from shoal.coordinator.etcd_store import EtcdStore
from shoal.coordinator.machine import Coordinator
from shoal.coordinator.plan import EarlierCells, JobPlan
from shoal.coordinator.store import DurableStore, SqliteStore, StoreError
from shoal.errors import LaunchError, PeerLost
from shoal.feed.shipping import open_dataset
from shoal.ledger import Schedule
from shoal.ledger.book import Book, audit
from shoal.observe.happenings import Decided, Done
from shoal.ps.node import Node, open_wire
from shoal.roles.loading.task import load_task
from shoal.roles.process.beat import Beat
from shoal.roles.process.pulse import Pulse
from shoal.roles.process.reporter import Reporter
from shoal.roles.server import make_replica
from shoal.roles.training.training import make_schedule
from shoal.spec import Job, ParameterServer, Task, World
from shoal.spec.checkpointing import CheckpointRule
from shoal.spec.store import StoreAddress
from shoal.spec.told import Told
from shoal.spec.vocabulary import Role, State
from shoal.strategies.ps.hosts import one_copy_each
from shoal.strategies.ps.served import outlives_servers, place_model

MAX_ROLLBACKS = 3
PATIENCE_S = 600.0
"""How long a member may be silent: it may be in the middle of a long step or evaluation. On one host the
supervisor tells of every death, and of every process that gives no sign of life, much sooner."""
_LOOK_EVERY_S = 0.25
_ROUTINE = frozenset({"joined", "formed", "filled", "backup", "mark", "start", "lost", "vacated", "finished"})
"""Decisions that are kept, but not shown while the run goes on."""


def run_coordinator(job: Job, world: World, channel: Channel) -> int:
    """What the `coordinator` process does from its first to its last line."""
    reporter = Reporter(world, channel)
    with Beat(channel, reporter.pulse):
        reporter.on_state(State.STARTING, 0)
        coordinate(make_plan(job, world), open_store(job, world), world, channel, reporter)
    return 0


def open_store(job: Job, world: World) -> DurableStore:
    """Where a run keeps what its coordinator has decided, for a successor."""
    if job.cluster.store:
        return EtcdStore.at(StoreAddress.parse(job.cluster.store), world.attempt)
    return SqliteStore(Path(job.run_dir or job.options["scratch"]) / "coordinator.sqlite", world.attempt)


def coordinate(plan: JobPlan, memory: DurableStore, world: World, channel: Channel, reporter: Reporter) -> None:
    """Decide about a run until told to stop; `memory`: where the decisions outlive this process. A standby waits
    until it is to."""
    if world.role == Role.STANDBY:
        reporter.on_state(State.READY, 0)
        if (called := await_call(world, channel, reporter.pulse)) is None:
            return
        world = called
        name_process(f"shoal-{world.role}-{world.global_rank}")
    store = PatientStore(memory, reporter.pulse)
    with open_wire(world, world.coordinator_address) as wire:
        wire.watch(channel)
        machine = Coordinator(plan, store, time.monotonic())
        reporter.on_state(State.READY, 0)
        _decide_all(Liaison(machine), Node(world.node, machine, wire), channel, reporter.pulse)
    if machine.finished is not None:
        store.forget()


def await_call(world: World, channel: Channel, pulse: Pulse) -> World | None:
    """A standby's world once it is to be the coordinator; None where the run ends before."""
    while True:
        try:
            message = channel.receive(_LOOK_EVERY_S)
        except PeerLost:
            return None
        pulse.sign()
        match None if message is None else understood(message, TO_PROCESSES):
            case Stop():
                return None
            case Coordinate(coordinator=coordinator):
                return replace(world, role=Role.COORDINATOR, coordinator=coordinator)


def make_plan(job: Job, world: World) -> JobPlan:
    """What the coordinator must know of a job that names its task."""
    resumed = job.options.get("resume")
    facts = read_manifest(Path(resumed)).facts if resumed else {}
    return plan_training(job, load_task(job), world, begun_at=int(job.options.get("resume_step", 0)), facts=facts)


def plan_training(job: Job, task: Task, world: World, *, begun_at: int, facts: Mapping[str, Any]) -> JobPlan:
    """How the model is cut, and how many parts the data has; `facts`: of the checkpoint that it begins from."""
    spec = ParameterServer.of(job)
    # Only sizes are wanted: the model goes again as soon as they are known.
    replica = make_replica(job, task, world)
    placement, outlives = place_model(spec, replica), outlives_servers(spec, replica)
    del replica
    if spec.servers == "host":
        placement = one_copy_each(placement, spec.hosts)
    schedule = make_schedule(task, open_dataset(task, "train", lambda: world), job.num_slots, job.cluster.workers)
    num_cells = (schedule.total_steps - begun_at) * job.num_slots
    return JobPlan(
        num_shards=len(placement.shards),
        shard_bytes=placement.shard_bytes,
        owners=placement.owners,
        backups=placement.backups,
        servers=spec.num_servers,
        replicas=spec.num_replicas,
        shares_memory=spec.wire != "tcp",
        outlives_servers=outlives,
        has_copies=spec.servers == "host",
        workers=world.world_size if job.cluster.hosts else job.cluster.workers,  # Others come with their hosts.
        most_workers=spec.room(job.num_slots, job.cluster.workers),
        num_cells=num_cells,
        num_samples=schedule.samples_after(schedule.total_steps) - schedule.samples_after(begun_at),
        past=earlier_cells(facts, begun_at, schedule),
        slots=job.num_slots,
        borders=planned_borders(job, begun_at, num_cells) if spec.is_leased else range(0),
        leased=spec.is_leased,
        why_workers_stay=spec.why_workers_stay,
        sync=spec.sync,
        adjust=_adjustments(spec),
        silent_after_s=PATIENCE_S,
        form_timeout_s=PATIENCE_S,
        start_timeout_s=PATIENCE_S,
        max_failures=max(job.max_failures, job.cluster.workers + spec.num_servers + 2),
        # Copies that change on their own cannot go back to the same state.
        max_rollbacks=MAX_ROLLBACKS if spec.diverging == "rollback" and spec.servers != "host" else 0,
    )


def earlier_cells(facts: Mapping[str, Any], step: int, schedule: Schedule) -> EarlierCells:
    """What led to the checkpoint that this run goes on from, by the book that was saved with it."""
    if facts.get("book") is None:
        return EarlierCells()
    book = Book.from_plain(facts["book"])
    found = audit(book, schedule, step)
    cells = (step - book.since) * schedule.slots
    return EarlierCells(cells=cells, samples=found["samples"], is_clean=found["clean"])


def planned_borders(job: Job, begun_at: int, num_cells: int) -> range:
    """After how many cells of this run the state is saved, where that follows from steps alone."""
    every = CheckpointRule.parse(job.checkpoint).every_steps
    if every is None or not job.run_dir:
        return range(0)
    first = (begun_at // every + 1) * every - begun_at
    return range(first * job.num_slots, num_cells, every * job.num_slots)


def _adjustments(spec: ParameterServer) -> tuple[str, ...]:
    """What the coordinator watches over. In lockstep nothing may depend on timing, so nothing is adjusted."""
    if spec.is_lockstep:
        return ()
    watched = () if spec.diverging == "ignore" else ("divergence",)
    return (*spec.adjustments, *watched, *(("shares",) if spec.shares == "speed" else ()))


class PatientStore:
    """A store whose coordinator waits for the disk in a state of its own, lest it be taken for hung."""

    def __init__(self, store: DurableStore, pulse: Pulse) -> None:
        self._store = store
        self._pulse = pulse

    def load(self) -> tuple[int, dict[str, Any] | None]:
        with self._pulse.during(State.SAVING):
            return self._store.load()

    def claim(self, term: int) -> bool:
        with self._pulse.during(State.SAVING):
            return self._store.claim(term)

    def save(self, term: int, state: dict[str, Any]) -> None:
        with self._pulse.during(State.SAVING):
            self._store.save(term, state)

    def forget(self) -> None:
        with self._pulse.during(State.SAVING), suppress(StoreError):  # What was wanted of it is done.
            self._store.forget()


def _decide_all(liaison: Liaison, node: Node, channel: Channel, pulse: Pulse) -> None:
    """Take in what comes, and say what follows, until told to stop."""
    pulse.enter(State.SERVING)
    try:
        while True:
            while (message := channel.poll()) is not None:
                if not liaison.hear(understood(message, TO_PROCESSES), time.monotonic()):
                    return
            node.pump(_LOOK_EVERY_S)
            for word in liaison.words():
                channel.send(word.as_message())
            pulse.lap(0)
    except PeerLost:
        pass  # Whoever supervised is gone, and the run with it.


class Liaison:
    """Between the machine and the supervisor: orders and decisions out, ends of others and wishes in. No I/O."""

    def __init__(self, machine: Coordinator) -> None:
        self._machine = machine
        self._answers: list[ScaleAnswered] = []
        self._told_end = False

    def hear(self, word: Told, now: float) -> bool:
        """The supervisor has said something; False where it was that this is the end."""
        match word:
            case Stop():
                return False
            case MemberLost():
                self._machine.on_lost(word.node, now, (word.role, word.rank))
            case MemberLeft():
                self._machine.on_left(word.node, word.rank, now)
            case MembersLiving():
                living = {one["node"]: (one["role"], one["rank"]) for one in word.members}
                self._machine.on_living(living, now, {one["node"]: one["rank"] for one in word.left})
            case ScaleWanted():
                self._scale(word, now)
        return True

    def _scale(self, wish: ScaleWanted, now: float) -> None:
        events = len(self._machine.events)
        self._machine.scale(workers=wish.workers, servers=wish.servers, now=now, why=wish.why)
        new = list(self._machine.events)[events:]
        refusals = [event["why"] for event in new if event.get("what") == "refused"]
        if refusals:
            self._answers.append(ScaleAnswered(text=f"Not scaled: {'; '.join(refusals)}.", is_refused=True))
        else:
            self._answers.append(ScaleAnswered(text="Scaling has begun; the run goes on meanwhile."))

    def words(self) -> Iterator[Told]:
        """What the supervisor is to hear; LaunchError where the job cannot go on."""
        machine = self._machine
        while self._answers:
            yield self._answers.pop(0)
        while machine.orders:
            yield Ordered(**asdict(machine.orders.popleft()))
        while machine.events:
            event = machine.events.popleft()
            text, is_routine = describe_decision(event), event["what"] in _ROUTINE
            yield Decided.from_plain({**event, "text": text, "routine": is_routine})
        if machine.failed is not None:
            raise LaunchError(machine.failed)
        if machine.finished is not None and not self._told_end:
            self._told_end = True
            yield Done(results=machine.finished)


def describe_decision(event: dict[str, Any]) -> str:
    """A decision in words: `promoted backups of node 3's shards: their primary is lost`."""
    what, why = event["what"], event["why"]
    match event:
        case {"what": "scale", "workers": after, "before": before}:
            return f"from {before} to {after} workers, {'as' if why == 'asked for' else 'because'} {why}"
        case {"what": "scale", "servers": after, "before": before}:
            return f"from {before} to {after} servers, as asked for"
        case {"what": "promoted", "node": node}:
            return f"the backups of node {node}'s shards serve now: {why}"
        case {"what": "rollback", "factor": factor}:
            return f"back to the last good state, the learning rate times {factor:g}: {why}"
        case {"what": "shares", "shares": shares}:
            parts = ", ".join(f"worker {rank} {share:.2f}" for rank, share in sorted(shares.items()))
            return f"shares of the data: {parts}, because {why}"
        case {"what": "reissued", "rank": rank}:
            return f"what worker {rank} held goes to others: {why}"
    numbers = ", ".join(
        f"{name.replace('_', ' ')} {value}"
        for name, value in event.items()
        if name not in ("what", "why") and not isinstance(value, (dict, list))
    )
    return f"{what} {numbers}".strip() + f": {why}"
