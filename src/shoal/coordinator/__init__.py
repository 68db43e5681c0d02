"""Membership, leases, fail-over and adjustment: the coordinator of a job, as a state machine without I/O."""

from shoal.coordinator.etcd_store import EtcdStore
from shoal.coordinator.machine import Coordinator
from shoal.coordinator.members import MemberOrder
from shoal.coordinator.plan import ADJUSTMENTS, JobPlan
from shoal.coordinator.store import DurableStore, MemoryStore, SqliteStore, StoreError, Superseded

__all__ = [
    "ADJUSTMENTS",
    "Coordinator",
    "DurableStore",
    "EtcdStore",
    "JobPlan",
    "MemberOrder",
    "MemoryStore",
    "SqliteStore",
    "StoreError",
    "Superseded",
]
