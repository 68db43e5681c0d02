"""Which way a worker's updates take, by what the user wrote."""

from __future__ import annotations

from shoal.spec import World
from shoal.spec.update_path import pooling_of
from shoal.strategies.ps.client import PsClient
from shoal.strategies.ps.contributions import Contribute, GradientMaker, MakeWork, ParameterMaker
from shoal.strategies.ps.group import PushGroup
from shoal.strategies.ps.grouped import GroupMaker
from shoal.strategies.ps.pool import PoolMaker
from shoal.strategies.ps.served import Served


def make_contribute(served: Served, client: PsClient, make_work: MakeWork, world: World) -> Contribute:
    """What a worker does with its cells."""
    spec = served.spec
    if spec.push == "parameters":
        return ParameterMaker(served, client, make_work)
    if spec.via != "direct":
        return GroupMaker(served, client, make_work, PushGroup(spec, world, client))
    if (pooling := pooling_of(spec)) is not None:
        return PoolMaker(served, client, make_work, pooling)
    return GradientMaker(served, client, make_work)
