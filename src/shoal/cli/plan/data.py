"""How the `data` strategy would train a model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from shoal.cli.plan.parts import Manner, without_successors
from shoal.launch.worlds import can_replace
from shoal.layout import Parcel
from shoal.observe.wording import plural
from shoal.spec import Data, Job


def data_manner(job: Job, parcels: Sequence[Parcel], facts: Mapping[str, Any]) -> Manner:
    """Meaning and failures of synchronous data parallel training."""
    return Manner(meaning=_meaning(Data.of(job), job), on_failure=_on_failure(job))


def _shares_memory(spec: Data, job: Job) -> bool:
    return spec.shares_memory and job.cluster.device == "cpu"


def _meaning(spec: Data, job: Job) -> str:
    workers = job.cluster.places
    if workers == 1:
        return "One process trains alone."
    if spec.partition == "relay":
        return (
            f"{plural(workers, 'worker')} take turns, each with a block of an epoch's batches, and hand the model "
            "and optimizer state on."
        )
    shares = job.conduct.slots_per_worker
    slots = " + ".join(map(str, shares)) if len(set(shares)) > 1 else f"{shares[0]} each"
    how = "in shared memory" if _shares_memory(spec, job) else f"via {spec.via}"
    return (
        f"{plural(workers, 'worker')} compute the gradients of their slots ({slots}), add them up {how}, and all "
        "take the same step."
    )


def _on_failure(job: Job) -> str:
    if not job.replaces or not can_replace(job):
        return without_successors(job)
    if job.on_failure == "shrink":
        return "When a worker dies, the others finish its step and do its work from then on; no bit changes."
    spares = job.cluster.spares
    successor = f"one of {plural(spares, 'spare')}" if spares else "a fresh process"
    return f"A worker that dies is replaced by {successor}, which finishes its step; no bit changes."
