"""How a strategy would train a model that nobody has written a page about: what its facts say."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shoal.cli.plan.parts import Manner, without_successors
from shoal.layout import Parcel
from shoal.observe.wording import plural
from shoal.spec import Job


def plain_manner(job: Job, parcels: tuple[Parcel, ...], facts: Mapping[str, Any]) -> Manner:
    """Meaning and failures, from the job's conduct."""
    conduct, workers = job.conduct, job.cluster.places
    has = "a part of the model" if conduct.is_cut else "the whole model"
    pace = "all take the same step" if conduct.is_lockstep else "each goes at its own pace"
    return Manner(
        meaning=f"{plural(workers, 'worker')} with {has} fill {plural(conduct.slots, 'slot')}; {pace}.",
        on_failure=without_successors(job),
    )
