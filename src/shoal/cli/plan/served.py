"""How the `ps` strategy would train a model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from shoal.cli.plan.parts import Manner
from shoal.layout import Parcel, Placement, place_served
from shoal.observe.wording import plural
from shoal.ps.consistency import Mode, parse_sync
from shoal.spec import Job, ParameterServer


def served_manner(job: Job, parcels: Sequence[Parcel], facts: Mapping[str, Any]) -> Manner:
    """Meaning, failures and placement of a served model."""
    spec = ParameterServer.of(job)
    by_element = facts["by_element"] or spec.push == "parameters"
    placement = None
    if spec.servers != "host":
        placement = place_served(spec, parcels, by_element=by_element, cut_bytes=facts["cut_bytes"])
    return Manner(
        meaning=_meaning(spec, placement),
        on_failure=_on_failure(spec, by_element=by_element),
        placement=placement,
    )


def _meaning(spec: ParameterServer, placement: Placement | None) -> str:
    if placement is None:
        held = f"{plural(spec.num_servers, 'server')} hold a whole copy each, kept in step by {spec.agree}"
    else:
        holders = len(placement.capacities)  # one, where the optimizer works on the whole
        held = f"{plural(holders, 'server')} hold{'s' * (holders == 1)} the model"
        held += f" in {plural(len(placement.shards), 'shard')}"
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


def _on_failure(spec: ParameterServer, *, by_element: bool) -> str:
    if spec.via == "direct":
        others = "A worker or coordinator that dies is replaced."
    else:
        others = (
            f"A worker that dies ends the run, for via={spec.via} needs all of them; a coordinator is replaced."
        )
    if spec.num_replicas:
        return f"A server that dies is followed by its backups, which have every acknowledged update. {others}"
    if not spec.outlives_servers(by_element=by_element):
        return f"A server that dies ends the run, for nobody else has its part of the model. {others}"
    return f"A server that dies is followed by one that goes on with what lies in the host's memory. {others}"
