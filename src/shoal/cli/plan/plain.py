"""How a strategy would train a model that nobody has written a page about: what its facts say."""

from __future__ import annotations

from shoal.cli.plan.parts import Holding, Manner, ModelBytes, without_successors
from shoal.layout import Parcel
from shoal.observe.wording import plural
from shoal.spec import Job


def plain_manner(job: Job, parcels: tuple[Parcel, ...], sizes: ModelBytes) -> Manner:
    """Meaning, memory and failures, from the job's conduct."""
    conduct, workers = job.conduct, job.cluster.places
    has = "a part of the model" if conduct.is_cut else "the whole model"
    pace = "all take the same step" if conduct.is_lockstep else "each goes at its own pace"
    holders = 1 if conduct.is_cut else workers
    return Manner(
        meaning=f"{plural(workers, 'worker')} with {has} fill {plural(conduct.slots, 'slot')}; {pace}.",
        memory=(
            Holding(
                what="parameters, gradients and optimizer state",
                num_bytes=2 * sizes.parameters + sizes.state,
                times=holders,
            ),
            Holding(what="buffers and frozen parameters of a worker", num_bytes=sizes.fixed, times=workers),
        ),
        on_failure=without_successors(job),
    )
