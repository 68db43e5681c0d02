"""What every process of a served job derives alike from the job: the cut of the model, and where it lies."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch

from shoal.arena import Segment
from shoal.comm.codec import MAX_FRAMES
from shoal.comm.compression import Compression, make_compression
from shoal.errors import SpecError
from shoal.layout import Placement, place_served
from shoal.model.blueprint import Blueprint, model_size
from shoal.model.buffers import MovingBuffers
from shoal.model.optimizer.kinds import ELEMENTWISE, StateSchema, state_schema
from shoal.model.replica import Replica
from shoal.optim import SAG
from shoal.ps.consistency import Consistency, parse_sync
from shoal.ps.rules import ShardRules, Together
from shoal.spec import ParameterServer, World
from shoal.spec.model_size import RunSize
from shoal.spec.vocabulary import Role
from shoal.step.clipping import cut_bytes
from shoal.strategies.ps.blocks import cut_of_blocks, lay_out, parcels_of
from shoal.strategies.ps.bulk import Bulk, FramedBulk, SharedBulk
from shoal.strategies.ps.hosts import HostBulk, HostStore, ScatterStore, host_of, rules_of_host
from shoal.strategies.ps.memory import ServedMemory
from shoal.strategies.ps.moving import KEEPER, MovingMean
from shoal.strategies.ps.store import ShardStore
from shoal.strategies.ps.whole_store import WholeStore

_FRAMES_BESIDES = 4
"""Of a block or piece: its values, flags and scalars, or what a compression makes of it; of a message: what else
it brings."""


@dataclass(kw_only=True)
class Served:
    """One process's view of a served model."""

    spec: ParameterServer
    replica: Replica
    placement: Placement
    memory: ServedMemory
    moving: MovingBuffers
    consistency: Consistency
    rules: ShardRules
    host: int | None = None
    """With a whole copy on each host: which of them is this process's."""
    before_update: Callable[[], None] = lambda: None
    """Called before the long work of an update: what others wait for can be sent."""

    @classmethod
    def open(cls, spec: ParameterServer, replica: Replica, world: World, *, slots: int, workers: int) -> Served:
        """Cut the model and map its memory."""
        schema, blueprint = schema_of(spec, replica), Blueprint.of(replica)
        placement = place_model(spec, blueprint)
        moving = MovingBuffers(replica.module)
        shared, by_host = spec.wire != "tcp", spec.servers == "host"
        grid, blocks = lay_out(placement, list(replica.trained.values()), cut_bytes(replica.task.clip_norm))
        run = RunSize(workers=workers, slots=slots)
        regions = spec.segment_regions(model_size(blueprint), run, cut_of_blocks(blocks))
        fd, copies = world.arena_fd if shared else None, spec.num_copies
        rooms = slots if spec.meets else 0
        pushed = None
        if not shared and world.role == Role.WORKER and spec.leaves_pushes:
            pushed = Segment(world.arena_fd)
            pushed.add_rooms(spec.room(slots, workers) * spec.kept_pushes)
        memory = ServedMemory(
            replica,
            schema,
            grid,
            blocks,
            regions,
            fd=fd,
            copies=copies,
            rooms=rooms,
            attempt=world.attempt,
            pushed=pushed,
        )
        if not shared:
            check_that_shards_travel(memory)
        consistency = parse_sync(spec.sync)
        clips = replica.task.clip_norm is not None and spec.push == "gradients"
        rules = ShardRules(
            consistency=consistency,
            slots=slots,
            workers=workers,
            leased=spec.is_leased,
            average=spec.push == "parameters",
            every=spec.every,
            rate_power=rate_power(spec, replica),
            damped=spec.damping == "staleness",
            together=Together.NORMS if clips else None,
        )
        host = None
        if by_host:
            number, is_server = world.global_rank, world.role == Role.SERVER
            host = number if is_server else host_of(number, spec.hosts, workers)
            rules = rules_of_host(rules, host, spec)
        return cls(
            spec=spec,
            replica=replica,
            placement=placement,
            memory=memory,
            moving=moving,
            consistency=consistency,
            rules=rules,
            host=host,
        )

    @cached_property
    def shares_memory(self) -> bool:
        """Whether the bulk goes through the host's memory."""
        return self.spec.wire != "tcp"

    def listens_at(self, world: World) -> str:
        """Where a process of this job listens."""
        return world.any_socket if self.shares_memory else world.any_port

    def make_values(self, shard: int, copy: int) -> ShardStore:
        """The values of a shard in one of its homes, whatever lies there."""
        if self.host is not None:
            shard, copy = 0, shard  # Each is all of the model, and lies in its host's home.
        moving = MovingMean(self.memory, self.moving) if shard == KEEPER and self.moving.nbytes else None
        bulk: Bulk = (
            (SharedBulk if self.host is None else HostBulk)(self.memory, shard)
            if self.shares_memory
            else FramedBulk(self.memory, shard, make_compression(self.spec.compress))
        )
        kind: type[ShardStore] = ScatterStore if self.rules.together is Together.CHANGES else HostStore
        if self.host is None:
            kind = WholeStore if works_on_the_whole(self.spec, self.replica) else ShardStore
        store = kind(
            self.memory,
            self.replica,
            shard,
            copy,
            bulk,
            moving,
            shared=self.shares_memory,
            pulls=pull_compression(self.spec),
            has_journal=outlives_servers(self.spec, self.replica),
            saves_blocks=self.spec.journal,
        )
        store.before_update = lambda: self.before_update()
        return store


def check_that_shards_travel(memory: ServedMemory) -> None:
    """Over tcp all of a shard goes to a new copy as one message, and so does its part of each gradient."""
    for shard, blocks in enumerate(memory.blocks):
        pieces = sum(len(block.chunk.pieces) for block in blocks)
        frames = max(len(blocks) * (len(memory.schema.mirrored) + _FRAMES_BESIDES), pieces * _FRAMES_BESIDES)
        if frames > MAX_FRAMES - _FRAMES_BESIDES:
            raise SpecError(
                f"ps: with wire=tcp a shard travels in at most {MAX_FRAMES} frames, but shard {shard} of "
                f"{len(memory.blocks)} takes {frames}; cut the model into more, as in "
                f"shards={len(memory.blocks) * -(-2 * frames // MAX_FRAMES)}."
            )


def pull_compression(spec: ParameterServer) -> Compression:
    """How parameters travel to workers: rounded to 16 bits or packed without loss; anything coarser would harm."""
    return make_compression(
        spec.compress if spec.compress in ("bf16", "fp16", "zstd") else "none", error_feedback=False
    )


def schema_of(spec: ParameterServer, replica: Replica) -> StateSchema:
    """What servers keep for each element; nothing where the optimizer works on the whole, or on the workers."""
    if spec.push == "parameters":
        return StateSchema((), ())
    if isinstance(replica.optimizer, torch.optim.LBFGS):
        raise SpecError(
            "ps: LBFGS evaluates the loss several times per step, which servers cannot; use data, or another "
            "optimizer."
        )
    return state_schema(replica.optimizer) or StateSchema((), ())


def rate_power(spec: ParameterServer, replica: Replica) -> float:
    """How the learning rate follows the share of the batch: smaller batches mean noisier gradients."""
    adapts = not isinstance(replica.optimizer, (torch.optim.SGD, torch.optim.ASGD, SAG))
    rate = spec.rate if spec.rate != "auto" else "root" if adapts else "share"
    return {"share": 1.0, "root": 0.5, "full": 0.0}[rate]


def works_on_the_whole(spec: ParameterServer, replica: Replica | Blueprint) -> bool:
    """Whether one server must update the model as a whole."""
    return spec.push == "gradients" and type(replica.optimizer) not in ELEMENTWISE


def outlives_servers(spec: ParameterServer, replica: Replica) -> bool:
    """Whether a killed server's shards can be gone on with: all that they are lies in the host's memory."""
    return spec.outlives_servers(by_element=not works_on_the_whole(spec, replica))


def place_model(spec: ParameterServer, replica: Replica | Blueprint) -> Placement:
    """Which server holds what."""
    parcels = parcels_of(replica.module, replica.trained)
    if spec.servers == "host" and works_on_the_whole(spec, replica):
        raise SpecError(
            f"ps: servers=host needs an optimizer that works element by element, found "
            f"{type(replica.optimizer).__name__}; use another, or servers=N."
        )
    return place_served(
        spec,
        parcels,
        by_element=not works_on_the_whole(spec, replica),
        cut_bytes=cut_bytes(replica.task.clip_norm),
    )
