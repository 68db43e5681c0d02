"""Whether a worker of a served job may fetch a model part by part, found out by trying."""

from __future__ import annotations

import torch

from shoal.step.compute import seed_slot, task_loss
from shoal.strategies.base import Supply
from shoal.strategies.ps.client import PsClient
from shoal.strategies.ps.units import find_units, is_safe


def fetch_by_parts(client: PsClient, supply: Supply) -> None:
    """Where the model allows it, fetch each part of it just before it computes."""
    served, replica = client.served, client.served.replica
    spec = served.spec
    wanted = spec.overlap == "on" or (spec.overlap == "auto" and not served.shares_memory)
    if not wanted or spec.push == "parameters" or spec.pool != "none":
        return
    units = find_units(replica.module, served.memory)
    work = supply.work(1, range(1))

    @torch.no_grad()
    def compute() -> float:
        seed_slot(work, 0, replica.device)
        batch, *_ = next(iter(work.parts[0].load()))
        return float(task_loss(replica, batch).loss)

    if units and is_safe(units, served.memory.params, compute):
        client.puller.fetch_on_use(units)
