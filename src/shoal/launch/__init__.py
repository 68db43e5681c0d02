"""Starting processes and watching over them: engines, the zygote, the supervisor.

Names are loaded when they are first used: `start_zygote` should run before anything slow is imported, so
that the zygote's own imports go on meanwhile.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from shoal.lazy import found_in

if TYPE_CHECKING:
    from shoal.launch.engine import Engine, Host
    from shoal.launch.live import LiveRun
    from shoal.launch.local import LocalEngine, LocalHost
    from shoal.launch.owner import ZygoteProcess, start_zygote
    from shoal.launch.runs import start
    from shoal.launch.supervisor import Supervisor, run_job

__all__ = [
    "Engine",
    "Host",
    "LiveRun",
    "LocalEngine",
    "LocalHost",
    "Supervisor",
    "ZygoteProcess",
    "run_job",
    "start",
    "start_zygote",
]

_HOMES = {
    "Engine": "engine",
    "Host": "engine",
    "LiveRun": "live",
    "LocalEngine": "local",
    "LocalHost": "local",
    "Supervisor": "supervisor",
    "ZygoteProcess": "owner",
    "run_job": "supervisor",
    "start": "runs",
    "start_zygote": "owner",
}

__getattr__ = found_in(__name__, _HOMES)
