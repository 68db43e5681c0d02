"""The server: holds its shards of the model, applies what workers push, and keeps copies for other servers."""

from __future__ import annotations

import time

from shoal.arena import keep_freed_memory
from shoal.comm.channel import Channel
from shoal.comm.words import TO_PROCESSES, CoordinatorMoved, Stop, understood
from shoal.errors import PeerLost
from shoal.feed.feed import Feed
from shoal.feed.shipping import open_dataset
from shoal.ledger import make_order
from shoal.model.replica import Replica
from shoal.model.start import Start
from shoal.ps.node import Node, open_wire
from shoal.ps.server import ServerMachine
from shoal.roles.loading.start import read_start
from shoal.roles.loading.task import load_task
from shoal.roles.process.beat import Beat, rss_bytes
from shoal.roles.process.reporter import Reporter
from shoal.spec import Job, ParameterServer, Task, World
from shoal.spec.vocabulary import State
from shoal.strategies.ps.served import Served

_LOOK_EVERY_S = 0.5


def run_server(job: Job, world: World, channel: Channel) -> int:
    """What a `server` process does from its first to its last line."""
    keep_freed_memory()
    reporter = Reporter(world, channel)
    with Beat(channel, reporter.pulse):
        reporter.on_state(State.STARTING, 0)
        serve(open_served(job, load_task(job), read_start(job), world), world, channel, reporter)
    return 0


def open_served(job: Job, task: Task, start: Start, world: World) -> Served:
    """The model of a served job, as every process of the run cuts it."""
    replica = make_replica(job, task, world, start)
    return Served.open(ParameterServer.of(job), replica, world, slots=job.num_slots, workers=job.cluster.workers)


def serve(served: Served, world: World, channel: Channel, reporter: Reporter) -> None:
    """Hold this server's part of the model until told to stop."""
    with open_wire(world, served.listens_at(world)) as wire:
        machine = ServerMachine(
            node=world.node,
            number=world.global_rank,
            address=wire.address,
            rules=served.rules,
            make_values=served.make_values,
            now=time.monotonic(),
            host=world.host_number,
        )
        node = Node(world.node, machine, wire, world.coordinator_address)
        served.before_update = node.flush  # Backups work on a push while this server does.
        wire.watch(channel)
        reporter.on_state(State.READY, 0)
        _answer_all(node, machine, channel, reporter)


def make_replica(job: Job, task: Task, world: World, start: Start | None = None) -> Replica:
    """The task's model and optimizer, as workers lay them out in memory; its data is read only where lazy layers
    must see a sample."""

    def sample() -> object:
        train = open_dataset(task, "train", lambda: world)
        samples = make_order(task, train, task.batch_size).samples(0, 0, 1)
        return Feed(task, train, numerics=job.numerics).batch(samples)

    return Replica(task, numerics=job.numerics, sample=sample, start=start, form=job.form)


def _answer_all(node: Node, machine: ServerMachine, channel: Channel, reporter: Reporter) -> None:
    """Take in what comes until told to stop."""
    reporter.pulse.enter(State.SERVING)
    while not _is_told_to_stop(channel, node):
        node.pump(_LOOK_EVERY_S)
        machine.facts = {"rss": rss_bytes(), "refused": node.refused, "strangers": node.wire.strangers}
        reporter.pulse.lap(max((duty.shard.version for duty in machine.held.values() if duty.shard), default=0))


def _is_told_to_stop(channel: Channel, node: Node) -> bool:
    try:
        message = channel.poll()
    except PeerLost:
        return True
    word = None if message is None else understood(message, TO_PROCESSES)
    if isinstance(word, CoordinatorMoved):
        node.follow_coordinator(word.address)
    return isinstance(word, Stop)
