"""Groups: how the workers of a job compute together. One contract, and a form for each way to reach one another.

Names are loaded when they are first used: not every form is there on every machine.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from shoal.lazy import found_in

if TYPE_CHECKING:
    from shoal.comm.group.base import BegunSum, Group, Reduction, Transfer, sum_in_order
    from shoal.comm.group.hierarchical import HierarchicalGroup
    from shoal.comm.group.lone import LoneGroup
    from shoal.comm.group.memory import MemoryGroup
    from shoal.comm.group.regions import group_bytes
    from shoal.comm.group.sockets import SocketGroup
    from shoal.comm.group.threads import ThreadGroup, together
    from shoal.comm.group.torch_group import TorchGroup

__all__ = [
    "BegunSum",
    "Group",
    "HierarchicalGroup",
    "LoneGroup",
    "MemoryGroup",
    "Reduction",
    "SocketGroup",
    "ThreadGroup",
    "TorchGroup",
    "Transfer",
    "group_bytes",
    "sum_in_order",
    "together",
]

_HOMES = {
    "BegunSum": "base",
    "Group": "base",
    "HierarchicalGroup": "hierarchical",
    "LoneGroup": "lone",
    "MemoryGroup": "memory",
    "Reduction": "base",
    "SocketGroup": "sockets",
    "ThreadGroup": "threads",
    "TorchGroup": "torch_group",
    "Transfer": "base",
    "group_bytes": "regions",
    "sum_in_order": "base",
    "together": "threads",
}

__getattr__ = found_in(__name__, _HOMES)
