"""What workers that agree now and then talk through, and how much they agree on."""

from __future__ import annotations

from dataclasses import replace

from shoal.comm.group.regions import group_bytes
from shoal.model.blueprint import Blueprint
from shoal.spec import Average
from shoal.spec.averaging_inside import CutTeams
from shoal.spec.model_size import CutSize
from shoal.strategies.average.values import AgreedValues


def cut_size(spec: Average, blueprint: Blueprint, workers: int) -> CutSize:
    """Every worker has the whole model, or what its group's strategy leaves it; what all agree on are its values
    as long vectors."""
    talks = spec.via in ("auto", "memory") and not spec.shares_memory
    if (teams := CutTeams.of(spec, workers)) is not None:
        return _size_in_teams(teams, blueprint, talks=talks)
    return CutSize(talk=group_bytes(workers) if talks else 0, agreed=AgreedValues(blueprint).num_bytes)


def _size_in_teams(teams: CutTeams, blueprint: Blueprint, *, talks: bool) -> CutSize:
    from shoal.strategies.mesh.sizes import cut_size as size_in_team

    own = size_in_team(teams.mesh, blueprint, teams.size)
    among = group_bytes(teams.count * teams.size) + sum(group_bytes(len(row)) for row in teams.peers())
    return replace(own, talk=among + teams.count * own.talk if talks else 0)
