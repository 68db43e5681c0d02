"""How the `ps` strategy would train a model."""

from __future__ import annotations

from collections.abc import Sequence

from shoal.cli.plan.parts import Holding, Manner, ModelBytes
from shoal.layout import Parcel, Placement, place
from shoal.observe.wording import plural
from shoal.ps.consistency import Mode, parse_sync
from shoal.spec import Job, ParameterServer

_BUFFERS_PER_SLOT = 2
"""While servers read a gradient, the worker computes the next."""


def served_manner(job: Job, parcels: Sequence[Parcel], sizes: ModelBytes) -> Manner:
    """Meaning, memory, failures and placement of a served model."""
    spec = ParameterServer.of(job)
    placement = None if spec.servers == "host" else _place(spec, parcels)
    return Manner(
        meaning=_meaning(spec, placement),
        memory=_memory(spec, job, sizes),
        on_failure=_on_failure(spec),
        placement=placement,
    )


def _place(spec: ParameterServer, parcels: Sequence[Parcel]) -> Placement:
    return place(
        parcels,
        servers=spec.num_servers,
        capacities=spec.server_capacities,
        policy=spec.placement,
        shards=spec.num_shards,
        replicas=spec.num_replicas,
    )


def _meaning(spec: ParameterServer, placement: Placement | None) -> str:
    servers = plural(spec.num_servers, "server")
    if placement is None:
        held = f"{servers} hold a whole copy each, kept in step by {spec.agree}"
    else:
        held = (
            f"{servers} hold{'s' * (spec.num_servers == 1)} the model in {plural(len(placement.shards), 'shard')}"
        )
    pushed = f"workers push {spec.push}" + f" every {spec.every} steps" * (spec.every > 1)
    wire = "over tcp" if spec.wire == "tcp" else "through shared memory"
    packed = "" if spec.compress == "none" else f" ({spec.compress})"
    return f"{held}; {pushed} {wire}{packed}{_way(spec.via)}. {_pace(spec.sync)}"


def _way(via: str) -> str:
    """How gradients come together before they are pushed."""
    if via == "direct":
        return ""
    if via == "ring":
        return ", added up in a ring"
    return f", added up in {plural(int(via.removeprefix('router:')), 'group')}"


def _pace(sync: str) -> str:
    """Who waits for whom."""
    rule = parse_sync(sync)
    match rule.mode:
        case Mode.BSP:
            return "Each step waits for all workers, as in synchronous training."
        case Mode.QUORUM:
            k, n = rule.quorum
            return f"Each step waits for the first {k} of {n} pushes; the rest is dropped."
        case Mode.SSP:
            return f"Nobody is more than {plural(rule.bound, 'step')} ahead of the slowest; pushes may be stale."
        case Mode.ALTERNATE:
            return f"{plural(rule.bound, 'step')} in which nobody waits, then one in which all do."
        case Mode.ASP:
            return "Nobody waits: each push is applied as it comes, stale or not."


def _memory(spec: ParameterServer, job: Job, sizes: ModelBytes) -> tuple[Holding, ...]:
    copies = spec.num_servers if spec.servers == "host" else 1 + spec.num_replicas
    processes = job.cluster.workers + spec.num_servers
    return (
        Holding(
            what="parameters and optimizer state on servers",
            num_bytes=sizes.parameters + sizes.state,
            times=copies,
        ),
        Holding(
            what="gradients on their way", num_bytes=sizes.parameters, times=_BUFFERS_PER_SLOT * job.num_slots
        ),
        Holding(
            what="the model as a worker or server builds it",
            num_bytes=sizes.parameters + sizes.fixed,
            times=processes,
        ),
    )


def _on_failure(spec: ParameterServer) -> str:
    if spec.via == "direct":
        others = "A worker or coordinator that dies is replaced."
    else:
        others = (
            f"A worker that dies ends the run, for via={spec.via} needs all of them; a coordinator is replaced."
        )
    if spec.num_replicas:
        return f"A server that dies is followed by its backups, which have every acknowledged update. {others}"
    if spec.wire == "tcp" or spec.agree == "scatter-sum":
        return f"A server that dies ends the run, for nobody else has its part of the model. {others}"
    return (
        "A server that dies is followed by one that goes on with what lies in the host's memory, if the optimizer "
        f"works element by element. {others}"
    )
