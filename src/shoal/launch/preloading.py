"""What a zygote imports before it forks the first process that needs it: once, and not in each of them."""

from __future__ import annotations

import gc
import importlib
import sys
from collections.abc import Sequence

from shoal.spec import Job, World
from shoal.spec.vocabulary import Purpose, Role

_OURS = "shoal."
_OF_ROLES = {
    Role.SERVER: "shoal.roles.server",
    Role.COORDINATOR: "shoal.roles.coordinator",
    Role.STANDBY: "shoal.roles.coordinator",
}
"""Workers' is in every zygote."""
_ON_DEMAND = {
    "shoal.strategies.data": "shoal.strategies.data.arena",
    "shoal.strategies.average": "shoal.strategies.average.strategy",
    "shoal.strategies.layer": "shoal.strategies.layer.strategy",
    "shoal.strategies.mesh": "shoal.strategies.mesh.strategy",
}
"""By the module that makes a strategy: what that imports first."""


def modules_for(job: Job, world: World) -> list[str]:
    """Modules of ours that this process of the job will import."""
    if job.purpose == Purpose.SCRIPT and not job.conduct.servers:
        return []  # It may train something, or nothing: only the script knows.
    role = _OF_ROLES.get(world.role)
    module = job.spec.made_by.partition(":")[0]
    return [name for name in (role, module, _ON_DEMAND.get(module)) if name is not None and name.startswith(_OURS)]


def preload(modules: Sequence[str]) -> None:
    """In a zygote: import what is not there yet. No code of others, which might start a thread."""
    missing = [name for name in modules if name.startswith(_OURS) and name not in sys.modules]
    for name in missing:
        try:
            importlib.import_module(name)
        except Exception:
            pass  # Who needs it meets the error, and can tell.
    if missing:
        gc.freeze()  # A child's collector does not visit it, so its pages stay shared.
