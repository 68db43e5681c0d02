"""How the `layer` strategy would train a model."""

from __future__ import annotations

from collections.abc import Sequence

from shoal.cli.plan.parts import Holding, Manner, ModelBytes, without_successors
from shoal.layout import Parcel
from shoal.observe.wording import plural
from shoal.spec import Job, Layer, LayerForm


def layer_manner(job: Job, parcels: Sequence[Parcel], sizes: ModelBytes) -> Manner:
    """Meaning, memory and failures of training by layers."""
    spec, workers = Layer.of(job), job.cluster.places
    parts = workers if spec.cuts_model else 1
    whole = {"parameters": sizes.parameters, "gradients": sizes.parameters, "optimizer state": sizes.state}
    return Manner(
        meaning=_meaning(spec, workers),
        memory=(
            *(
                Holding(what=f"{what} of a worker", num_bytes=-(-num_bytes // parts), times=workers)
                for what, num_bytes in whole.items()
            ),
            Holding(what="buffers and frozen parameters of a worker", num_bytes=sizes.fixed, times=workers),
        ),
        on_failure=without_successors(job),
    )


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
