"""What every process of a served job derives alike from the job: the cut of the model, and where it lies."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from shoal.comm.compression import Compression, make_compression
from shoal.errors import SpecError
from shoal.layout import Placement, place
from shoal.ps.consistency import Consistency, parse_sync
from shoal.ps.shard import ShardRules
from shoal.spec import ParameterServer, World
from shoal.strategies.clipping import cut_bytes
from shoal.strategies.data.buffers import MovingBuffers
from shoal.strategies.optimizers import ELEMENTWISE, StateSchema, state_schema
from shoal.strategies.ps.blocks import parcels_of
from shoal.strategies.ps.bulk import FramedBulk, SharedBulk
from shoal.strategies.ps.memory import BUFFERS_PER_SLOT, ServedMemory
from shoal.strategies.ps.moving import KEEPER, MovingMean
from shoal.strategies.ps.store import ShardStore
from shoal.strategies.ps.whole_store import WholeStore
from shoal.strategies.replica import Replica


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
    before_update: Callable[[], None] = lambda: None
    """Called before the long work of an update: what others wait for can be sent."""

    @classmethod
    def open(cls, spec: ParameterServer, replica: Replica, world: World, *, slots: int, workers: int) -> Served:
        """Cut the model and map its memory."""
        schema = schema_of(spec, replica)
        placement = place_model(spec, replica)
        moving = MovingBuffers(replica.module)
        shared = spec.wire != "tcp"
        memory = ServedMemory(
            replica,
            schema,
            placement,
            fd=world.arena_fd if shared else None,
            num_buffers=BUFFERS_PER_SLOT * room_for(spec, slots, workers),
            moving_bytes=moving.nbytes,
        )
        consistency = parse_sync(spec.sync)
        rules = ShardRules(
            consistency=consistency,
            slots=slots,
            workers=workers,
            average=spec.push == "parameters",
            every=spec.every,
            damped=spec.damping == "staleness",
            together=replica.task.clip_norm is not None and spec.push == "gradients",
        )
        return cls(
            spec=spec,
            replica=replica,
            placement=placement,
            memory=memory,
            moving=moving,
            consistency=consistency,
            rules=rules,
        )

    @property
    def shares_memory(self) -> bool:
        """Whether the bulk goes through the host's memory."""
        return self.spec.wire != "tcp"

    def make_values(self, shard: int, copy: int) -> ShardStore:
        """The values of a shard in one of its places, as the model begins."""
        moving = MovingMean(self.memory, self.moving) if shard == KEEPER and self.moving.nbytes else None
        bulk = (
            SharedBulk(self.memory, shard)
            if self.shares_memory
            else FramedBulk(self.memory, shard, make_compression(self.spec.compress))
        )
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
        )
        store.before_update = lambda: self.before_update()
        store.initialise()
        return store


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


def works_on_the_whole(spec: ParameterServer, replica: Replica) -> bool:
    """Whether one server must update the model as a whole."""
    return spec.push == "gradients" and type(replica.optimizer) not in ELEMENTWISE


def place_model(spec: ParameterServer, replica: Replica) -> Placement:
    """Which server holds what."""
    parcels = parcels_of(replica.module, replica.trained)
    if works_on_the_whole(spec, replica):
        whole = place(parcels, servers=1, shards=1)
        return replace(whole, backups=(1 if spec.num_replicas else None,))
    return place(
        parcels,
        servers=spec.num_servers,
        capacities=spec.server_capacities,
        policy=spec.placement,
        shards=spec.num_shards,
        replicas=spec.num_replicas,
        cut_bytes=cut_bytes(replica.task.clip_norm),
    )


def room_for(spec: ParameterServer, slots: int, workers: int) -> int:
    """How many slots, or ranks where workers may come and go, have buffers of their own."""
    return max(2 * workers, workers + 8) if spec.is_leased else slots
