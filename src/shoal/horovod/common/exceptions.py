"""What scripts written for Horovod catch."""

from __future__ import annotations


class HorovodInternalError(RuntimeError):
    """A collective failed on every rank: what was asked for does not fit, or a rank is gone."""


class HostsUpdatedInterrupt(RuntimeError):
    """Workers are about to come or go: an elastic script goes on in another world, with what it has."""

    def __init__(self, skip_sync: bool = False) -> None:
        super().__init__("workers are about to come or go")
        self.skip_sync = skip_sync
