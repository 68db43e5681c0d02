"""What `average` has inside: teams of workers over which one model is cut, and which agree with each other."""

from __future__ import annotations

import re
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from shoal.errors import SpecError, unknown
from shoal.spec.cluster import Cluster
from shoal.spec.conduct import Conduct, StateHolder
from shoal.spec.cut_footprint import cut_footprint, updated_bytes
from shoal.spec.footprint import Flow, Footprint, Medium, Stay
from shoal.spec.model_parallel import Mesh, ModelParallel, as_mesh
from shoal.spec.model_size import CutSize, ModelSize, RunSize
from shoal.spec.strategy import parse_strategy
from shoal.spec.whole_footprint import of_worker

if TYPE_CHECKING:
    from shoal.spec.averaging import Average

WHOLE = ("none", "data")
"""Each worker has all of its team's model."""
CUT = ("sharded", "tensor", "pipeline", "mesh")
"""Each has a part of it."""


def written_inside(text: str) -> str:
    """The one way in which it is written as a key of `average`: with a colon between a key of its own and the
    value, since what has an equals sign behind a comma is a key of `average`."""
    name, _, keys = text.partition(":")
    if name not in (*WHOLE, *CUT):
        raise unknown("average: inside", name, (*WHOLE, *CUT))
    if name in WHOLE and keys:
        raise SpecError(f"average: inside={name} takes no keys of its own, found {keys!r}; leave them out.")
    items = [re.sub(r"^(\w+)=", r"\1:", item) for item in re.split(r",(?=\w+[:=])", keys)] if keys else []
    return f"{name}:{','.join(items)}" if items else name


@lru_cache(maxsize=64)
def cut_inside(text: str) -> ModelParallel | None:
    """The strategy that cuts a team's model; None where each worker has all of it."""
    name, _, keys = text.partition(":")
    if name in WHOLE:
        return None
    items = [re.sub(r"^(\w+):", r"\1=", item) for item in re.split(r",(?=\w+:)", keys)] if keys else []
    spec: Any = parse_strategy(f"{name}:{','.join(items)}" if items else name)
    found: ModelParallel = spec
    if found.via != "auto":
        raise SpecError(
            f"average: inside={text} says how workers talk, which they all do in one way; write via={found.via} "
            "as a key of average."
        )
    if getattr(found, "batchnorm", "local") != "local":
        raise SpecError(
            f"average: inside={text} wants every worker's samples in every pass, but a group's part of a small "
            "batch may be nothing; leave batchnorm out."
        )
    return found


@dataclass(frozen=True, kw_only=True)
class CutTeams:
    """Teams of neighbouring workers, each of which is a grid of its own."""

    count: int
    mesh: Mesh
    """The grid that each of them is."""

    @classmethod
    def of(cls, average: Average, workers: int) -> CutTeams | None:
        """Those of so many workers; None where none cuts its model."""
        if (spec := cut_inside(average.inside)) is None:
            return None
        named = spec.asked_workers
        count = average.groups or (workers // named if named else 0)
        if not count and not named:
            raise SpecError(
                f"Job: inside={average.inside} cuts a model over the workers of a group, and must know how many "
                "groups there are; write groups=2, or as many as there are hosts."
            )
        if not count or workers % count or (named and workers != count * named):
            wanted = f"groups of {named} workers" if named else f"{count} groups of one size"
            raise SpecError(
                f"Job: inside={average.inside} makes {wanted}, but there are {workers} workers; use a number of "
                f"workers that is a multiple of {named or count}"
                + (f", and groups={max(1, workers // named)}." if named and average.groups else ".")
            )
        mesh = as_mesh(spec, workers // count)
        return cls(count=count, mesh=replace(mesh, via="backend") if average.via == "backend" else mesh)

    @property
    def size(self) -> int:
        """Workers in each."""
        return self.mesh.num_workers

    @property
    def num_parts(self) -> int:
        """Parts that the model is cut into, where copies of a part count once."""
        return self.size // self.mesh.data

    def rows(self) -> list[range]:
        """By team: its workers."""
        return [range(first, first + self.size) for first in range(0, self.count * self.size, self.size)]

    def peers(self) -> list[list[int]]:
        """By part of the model: those who hold it, in all teams."""
        workers = range(self.count * self.size)
        return [[rank for rank in workers if rank % self.num_parts == part] for part in range(self.num_parts)]

    def conduct(self, cluster: Cluster, average: Average) -> Conduct:
        """As that of a team, but for what teams do with each other."""
        one = self.mesh.conduct(replace(cluster, workers=self.size, min_workers=None, max_workers=None))
        lanes = self.mesh.lanes
        fills = tuple(
            range(team * lanes + fill.start, team * lanes + fill.stop)
            for team in range(self.count)
            for fill in one.fills
        )
        gone = f"with strategy={average} each group of workers has a model of its own, which nobody else has"
        return replace(
            one,
            fills=fills,
            is_cut=True,
            has_copies=self.count > 1 or self.mesh.data > 1,
            spans_hosts=cluster.device == "cpu" and average.via in ("auto", "sockets"),
            open_commits=average.every,
            meets=False,
            synchronises=False,
            state=StateHolder.EACH_WORKER,
            has_one_state=False,
            puts_aside="replica",
            why={
                **one.why,
                "has_places": gone,
                "hosts_several": gone,
                "slots": f"strategy={average} gives each lane of workers one part of every batch",
                "meets": f"with strategy={average} each group of workers takes steps of its own",
                "protects": f"strategy={average} has no clients whose differences are clipped; use "
                "clients=100,partition=own, or data",
            },
        )

    def footprint(self, model: ModelSize, run: RunSize, cut: CutSize, *, every: int, outer_kept: int) -> Footprint:
        """That of a worker's part in its team, and what it keeps to agree with others on its part."""
        one = cut_footprint(self.mesh, model, replace(run, workers=self.size), cut)
        part = updated_bytes(self.mesh, model, cut)
        rows = [region for region in one.shared if region.name.startswith(("row/", "found/"))]
        flow = Flow(
            what=f"parts of the parameters, agreed on by {self.count} groups every {every} steps",
            medium=Medium.MEMORY if cut.talk else Medium.NETWORK,
            num_bytes=2 * (self.count - 1) * part // self.count // every,
        )
        return Footprint(
            shared=(
                *one.shared,
                *(
                    replace(region, name=f"{region.name} of group {team}")
                    for team in range(1, self.count)
                    for region in rows
                ),
            ),
            worker=(
                *one.worker,
                of_worker("its part of what all agreed on last", part + model.moving, Stay.TRAINING),
                of_worker("the outer optimizer's state", outer_kept * part, Stay.TRAINING),
            ),
            workers=run.workers,
            flows=(flow, *one.flows),
        )


def key_of_inside(key: str) -> SpecError | None:
    """What is said of a key that is none of `average`, but of what may be inside."""
    if key not in {field.name for field in fields(Mesh)}:
        return None
    return SpecError(
        f"strategy average: {key} is a key of what is inside of it; write it there with a colon, as in "
        f"inside=mesh:{key}:2."
    )


def check_inside(average: Average) -> None:
    """Refuse what does not go with teams that cut their model."""
    if cut_inside(average.inside) is None:
        return
    others = {
        f"combine={average.combine}": average.is_ensemble,
        f"init={average.init}": average.begins_apart,
        f"after={average.after}": average.after > 0,
        f"prox={average.prox:g}": average.prox > 0,
        f"parts={average.parts}": average.parts > 1,
        f"delay={average.delay}": average.delay > 0,
    }
    if found := [written for written, is_set in others.items() if is_set]:
        raise SpecError(
            f"average: {found[0]} is for workers that have a whole model each, but inside={average.inside} cuts "
            f"it; leave {found[0].partition('=')[0]} out, or use inside=data."
        )
