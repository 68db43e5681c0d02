"""How a strategy that cuts the model would train it, and who stands where."""

from __future__ import annotations

from collections.abc import Iterator

from shoal.arena import supported
from shoal.cli.plan.parts import GridPoint, Manner, without_successors
from shoal.observe.wording import plural
from shoal.spec import Job, Mesh, ModelParallel, as_mesh
from shoal.spec.averaging_inside import CutTeams
from shoal.spec.model_parallel import AXES


def grid_manner(job: Job) -> Manner:
    """Meaning, failures and grid of a model that is cut over workers."""
    mesh = as_mesh(ModelParallel.of(job), job.cluster.places)
    return Manner(
        meaning=" ".join(_meaning(mesh, shares_memory=supported() and mesh.shares_memory(job.cluster))),
        on_failure=without_successors(job, ", for nobody else has its part of the model" * (mesh.data == 1)),
        grid=tuple(_points(mesh)),
    )


def bubble(mesh: Mesh) -> float:
    """The part of a step in which a stage has nothing to do, where all take the same time: (p-1)/(m+p-1), with
    several stages per worker that many times more micro-batches."""
    waiting = mesh.pipeline - 1
    return waiting / (mesh.num_microbatches * mesh.stages_per_worker + waiting)


def _meaning(mesh: Mesh, *, shares_memory: bool) -> list[str]:
    sentences = [f"A grid of workers, {_axes_of(mesh)}."]
    per_lane = mesh.pipeline * mesh.tensor
    if mesh.lanes > 1:
        lanes = f"lane of {plural(per_lane, 'worker')}" if per_lane > 1 else "worker"
        sentences.append(
            f"Each batch is cut into {mesh.lanes} parts, one for each {lanes}; all take the same step."
        )
    else:
        sentences.append("All work on the same batch.")
    return [*sentences, *_cuts(mesh, shares_memory=shares_memory)]


def _axes_of(mesh: Mesh) -> str:
    return (
        " x ".join(f"{axis}={size}" for axis, size in zip(AXES, mesh.sizes, strict=True) if size > 1) or "data=1"
    )


def _cuts(mesh: Mesh, *, shares_memory: bool) -> list[str]:
    """What is cut, and over whom."""
    sentences = []
    if mesh.shard > 1:
        how = f"as {mesh.capacities}" if mesh.policy == "device" else f"by {mesh.policy}"
        held = _LEVELS[min(mesh.level, 2) if shares_memory else mesh.level]
        sentences.append(f"{held} cut over {plural(mesh.shard, 'worker')}, {how}.")
        if shares_memory:
            sentences.append("Parameters lie once in the host's memory, where all find them.")
    if mesh.tensor > 1:
        sentences.append(f"Layers are cut by width over {plural(mesh.tensor, 'worker')}.")
    if mesh.pipeline > 1:
        sentences += _pipeline(mesh)
    if mesh.preprocess:
        count = mesh.preprocess
        they = "a process reads and prepares" if count == 1 else f"{count} processes read and prepare"
        sentences.append(f"Beside each worker {they} the samples of the coming steps.")
    return sentences


_LEVELS = {
    1: "The optimizer's state is",
    2: "Gradients and the optimizer's state are",
    3: "Parameters, gradients and the optimizer's state are",
}


def _pipeline(mesh: Mesh) -> list[str]:
    at_most = "at most " if mesh.schedule == "zero-bubble" else ""
    return [
        f"Layers are cut by depth into {plural(mesh.num_stages, 'stage')} for {plural(mesh.pipeline, 'worker')}.",
        f"A lane's part of the batch passes them in {mesh.num_microbatches} micro-batches ({mesh.schedule}), so "
        f"that a worker has nothing to do for {at_most}{bubble(mesh):.0%} of a step.",
    ]


def teams_meaning(teams: CutTeams, job: Job) -> str:
    """What workers are to each other who hold a model together, beside others that hold another."""
    shares_memory = supported() and teams.mesh.shares_memory(job.cluster)
    group = f"Each group is a grid of {plural(teams.size, 'worker')}, {_axes_of(teams.mesh)}."
    with_others = "Who holds the same part of the model in all groups agrees on that."
    return " ".join([group, *_cuts(teams.mesh, shares_memory=shares_memory), with_others])


def team_points(teams: CutTeams) -> Iterator[GridPoint]:
    """Where each worker stands, and in which group."""
    for number, row in enumerate(teams.rows()):
        for point in _points(teams.mesh):
            at = {"group": number} | dict(point.coordinates)
            lane = number * teams.mesh.lanes + point.lane
            yield GridPoint(worker=row.start + point.worker, lane=lane, coordinates=at)


def _points(mesh: Mesh) -> list[GridPoint]:
    """Where each worker stands; the last axis turns fastest."""
    points = []
    for rank in range(mesh.num_workers):
        rest, coordinates = rank, {}
        for axis, size in reversed(list(zip(AXES, mesh.sizes, strict=True))):
            rest, coordinates[axis] = divmod(rest, size)
        shown = {axis: coordinates[axis] for axis, size in zip(AXES, mesh.sizes, strict=True) if size > 1}
        points.append(GridPoint(worker=rank, lane=mesh.lane_of(rank), coordinates=shown))
    return points
