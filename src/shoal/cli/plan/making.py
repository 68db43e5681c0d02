"""From a job and what inspection found to its plan."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from shoal.cli.plan.manners import manner_of
from shoal.cli.plan.parts import ModelBytes, Plan
from shoal.launch.worlds import describe_world, explain_hosts
from shoal.layout import Parcel
from shoal.observe.wording import plural
from shoal.spec import Job
from shoal.spec.footprint import Footprint
from shoal.spec.host_facts import HostFacts


def make_plan(job: Job, facts: Mapping[str, Any], hosts: Sequence[HostFacts] = ()) -> Plan:
    """The plan of a training job; `facts` are what inspection found out about its task, `hosts` where it runs, if
    that is not this machine alone."""
    parcels = tuple(Parcel(**parcel) for parcel in facts["parcels"])
    sizes = ModelBytes(
        parameters=sum(parcel.num_bytes for parcel in parcels),
        state=facts["state_bytes"] or 0,
        fixed=facts["fixed_bytes"],
    )
    steps, slots = facts["total_steps"], job.num_slots
    return Plan(
        target=job.target,
        world=describe_world(job, hosts=hosts).text,
        hosts=tuple(explain_hosts(job, hosts)),
        strategy=job.strategy,
        manner=replace(manner_of(job, parcels, facts), width=tuple(facts.get("width", ()))),
        data=(
            f"{plural(steps, 'step')} of {facts['global_batch']:,} samples ({facts['num_samples']:,} in all), "
            f"each in {plural(slots, 'slot')}: {steps * slots:,} cells"
        ),
        steps=steps,
        slots=slots,
        optimizer=facts["optimizer"],
        sizes=sizes,
        parcels=parcels,
        footprint=Footprint.from_plain(facts["footprint"]),
        limited=Footprint.from_plain(facts["limited"]),
        process_bytes=facts["process_bytes"],
    )
