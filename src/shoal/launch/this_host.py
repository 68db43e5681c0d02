"""What this machine has to give to a run, and with which programs."""

from __future__ import annotations

import os
import platform
import re
import socket
from importlib.metadata import PackageNotFoundError, version

import psutil

from shoal.spec.host_facts import HostFacts
from shoal.spec.world import LOOPBACK


def facts_of_this_host(name: str = "", address: str = LOOPBACK, port: int = 0) -> HostFacts:
    """Cores that this process may use, memory, GPUs."""
    return HostFacts(
        name=name or socket.gethostname(),
        address=address,
        cores=len(os.sched_getaffinity(0)),
        gpus=_count_gpus(),
        memory_bytes=psutil.virtual_memory().total,
        port=port,
    )


def versions_here() -> dict[str, str]:
    """Of what must be the same on all hosts of a run."""
    found = {"Python": platform.python_version()}
    for name in ("torch", "shoal"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "none"
    return found


def _count_gpus() -> int:
    """As the driver lists them: asking CUDA in this process would break it in those that are forked from it."""
    if (visible := os.environ.get("CUDA_VISIBLE_DEVICES")) is not None:
        return len([one for one in visible.split(",") if one.strip() and one.strip() != "-1"])
    return sum(re.fullmatch(r"nvidia\d+", name) is not None for name in os.listdir("/dev"))
