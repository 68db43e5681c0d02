"""How the `layer` strategy would train a model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from shoal.cli.plan.parts import Manner, without_successors
from shoal.layout import Parcel
from shoal.observe.wording import plural
from shoal.spec import Job, Layer, LayerForm


def layer_manner(job: Job, parcels: Sequence[Parcel], facts: Mapping[str, Any]) -> Manner:
    """Meaning and failures of training by layers."""
    return Manner(meaning=_meaning(Layer.of(job), job.cluster.places), on_failure=without_successors(job))


def _meaning(spec: Layer, workers: int) -> str:
    if spec.form is LayerForm.PHASED:
        return (
            f"{plural(spec.phases, 'group')} of layers take turns of {plural(spec.every, 'step')}: one trains, "
            f"the others are frozen; each batch is shared by {plural(workers, 'worker')}."
        )
    if spec.form is LayerForm.DECOUPLED:
        return (
            f"The model is cut by depth into {plural(workers, 'group')} of layers, one for each worker; each "
            "trains with a head of its own on what the one before it sends, and waits for no gradient."
        )
    where = "branches go to different workers" if spec.place == "auto" else f"as {spec.place} says"
    return (
        f"All work on the same batch, each of {plural(workers, 'worker')} on its layers, {where}; branches run at "
        "the same time."
    )
