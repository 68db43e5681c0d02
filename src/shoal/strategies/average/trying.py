"""Whether groups of workers can cut a model that is averaged, found out by one process that trains nothing."""

from __future__ import annotations

from typing import Any

from shoal.model.replica import Replica
from shoal.spec import Average
from shoal.spec.averaging_inside import CutTeams


def try_inside(spec: Average, replica: Replica, batch: Any, workers: int) -> None:
    """Raises what a group would say of this model."""
    if (teams := CutTeams.of(spec, workers)) is not None:
        from shoal.strategies.mesh.trying import try_cut

        try_cut(teams.mesh, replica, batch, teams.size)
