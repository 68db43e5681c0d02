"""How strategies would train a model, in words."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from shoal.cli.plan.grid import grid_manner, team_points, teams_meaning
from shoal.cli.plan.parts import Manner, without_successors
from shoal.cli.plan.served import served_manner
from shoal.launch.worlds import can_replace
from shoal.layout import Parcel
from shoal.observe.wording import plural
from shoal.spec import Average, Data, Job, Layer, LayerForm
from shoal.spec.averaging_inside import CutTeams


def manner_of(job: Job, parcels: Sequence[Parcel], facts: Mapping[str, Any]) -> Manner:
    """How the job's strategy would train: what is written about it, or what its facts say."""
    if job.spec.name == "ps":
        return served_manner(job, parcels, facts)
    return _MANNERS.get(job.spec.name, _plain_manner)(job)


def _plain_manner(job: Job) -> Manner:
    """Of a strategy that nobody has written a page about."""
    conduct, workers = job.conduct, job.cluster.places
    has = "a part of the model" if conduct.is_cut else "the whole model"
    pace = "all take the same step" if conduct.is_lockstep else "each goes at its own pace"
    return Manner(
        meaning=f"{plural(workers, 'worker')} with {has} fill {plural(conduct.slots, 'slot')}; {pace}.",
        on_failure=without_successors(job),
    )


def _data_manner(job: Job) -> Manner:
    return Manner(meaning=_data_meaning(Data.of(job), job), on_failure=_data_on_failure(job))


def _data_meaning(spec: Data, job: Job) -> str:
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
    shares_memory = spec.shares_memory and (job.cluster.device == "cpu" or spec.via == "arena")
    how = "in shared memory" if shares_memory else f"via {spec.via}"
    return (
        f"{plural(workers, 'worker')} compute the gradients of their slots ({slots}), add them up {how}, and all "
        "take the same step."
    )


def _data_on_failure(job: Job) -> str:
    if not job.replaces or not can_replace(job):
        return without_successors(job)
    if job.on_failure == "shrink":
        return "When a worker dies, the others finish its step and do its work from then on; no bit changes."
    return f"A worker that dies is replaced by {_successor(job)}, which finishes its step; no bit changes."


def _successor(job: Job) -> str:
    spares = job.cluster.spares
    return f"one of {plural(spares, 'spare')}" if spares else "a fresh process"


def _layer_manner(job: Job) -> Manner:
    return Manner(meaning=_layer_meaning(Layer.of(job), job.cluster.places), on_failure=without_successors(job))


def _layer_meaning(spec: Layer, workers: int) -> str:
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


def _average_manner(job: Job) -> Manner:
    spec = Average.of(job)
    meaning = _average_meaning(spec, job.cluster.places)
    if (teams := CutTeams.of(spec, job.cluster.places)) is not None:
        return Manner(
            meaning=f"{meaning} {teams_meaning(teams, job)}",
            on_failure=without_successors(job),
            grid=tuple(team_points(teams)),
        )
    if job.cluster.is_elastic:
        meaning += (
            f" There are {job.cluster.places} models whoever trains them: a worker has one, or several in turn."
        )
    if not job.replaces or not can_replace(job):
        return Manner(meaning=meaning, on_failure=without_successors(job))
    again = "its steps since all met last again"
    if job.on_failure == "shrink":
        text = f"When a worker dies, the others take {again}, and train its model from then on; no bit changes."
        return Manner(meaning=meaning, on_failure=text)
    text = f"A worker that dies is replaced by {_successor(job)}, which takes {again}; no bit changes."
    return Manner(meaning=meaning, on_failure=text)


def _average_meaning(spec: Average, workers: int) -> str:
    first = f"After {plural(spec.after, 'synchronous step')}, " if spec.after else ""
    steps = plural(spec.every, "step")
    each = f"each of {_who_agrees(spec, workers)} takes {steps} on its own part of the batches"
    if (clients := spec.clients_on(workers)) is not None:
        each = (
            f"each of {plural(workers, 'worker')} simulates {clients.per_worker} of "
            f"{plural(spec.clients, 'client')} in turn, which take {steps} on samples of their own"
        )
        each += (
            f" and count the less the older the model is that they began from ({spec.buffer} are merged at a time)"
            * (spec.buffer > 0)
        )
        each += ", corrected by how their gradients differ from all clients'" * spec.scaffold
    match spec.with_:
        case "all":
            what = (
                "the mean of their models"
                if spec.outer == "mean"
                else f"a step of an outer optimizer ({spec.outer})"
            )
            then = f"then all agree on {what}"
        case "ring":
            then = "then it takes the mean of its model and its two neighbours'"
        case _:
            then = "then it takes the mean of its model and that of another worker, a new one each time"
    text = f"{first}{each}, {then}."
    return text[0].upper() + text[1:]


def _who_agrees(spec: Average, workers: int) -> str:
    """Workers, or groups of workers that train one model in lockstep."""
    if spec.inside == "none":
        return plural(workers, "worker")
    teams = CutTeams.of(spec, workers)
    count = spec.groups if teams is None else teams.count
    return (
        f"{plural(count, 'group')} of workers in lockstep" if count else "the hosts' groups of workers in lockstep"
    )


_MANNERS: Mapping[str, Callable[[Job], Manner]] = {
    "average": _average_manner,
    "data": _data_manner,
    "layer": _layer_manner,
    **dict.fromkeys(("sharded", "tensor", "pipeline", "mesh"), grid_manner),
}
"""By strategy: who explains it better than its facts do."""
