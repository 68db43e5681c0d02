"""Workers that add up what they computed among themselves, so that one push brings it all to the servers."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import torch

from shoal.comm.codec import Message
from shoal.comm.collectives import Collective, make_collective
from shoal.comm.security import RunKey
from shoal.comm.zmq_transport import ZmqTransport
from shoal.errors import CommTimeout, LaunchError, PeerLost
from shoal.spec import ParameterServer, World
from shoal.spec.update_path import num_groups
from shoal.strategies.ps.client import PsClient

_PATIENCE_S = 300.0
"""For a peer that is busy; one that died is noticed at once."""
_LOOK_EVERY_S = 0.1
_AFTERTHOUGHT_S = 1.0
"""Whoever left may have been told to stop; then this worker is about to hear it, too."""


class PushGroup:
    """One worker's side of its group. Members find each other by what they post with the coordinator."""

    def __init__(self, spec: ParameterServer, world: World, client: PsClient) -> None:
        groups = num_groups(spec)
        assert groups is not None
        self.ranks = ranks_of_group(world.global_rank, world.world_size, groups)
        self._spec = spec
        self._rank = world.global_rank
        self._client = client
        self._transport = _AttentiveTransport(
            self._rank - self.ranks.start,
            key=RunKey.from_text(world.secret),
            address=client.served.listens_at(world),
            look=partial(client.hear, 0.0),
        )
        self._collective: Collective | None = None
        client.machine.facts["post"] = {"address": self._transport.address}

    def leads(self, clock: int) -> bool:
        """Whether this worker pushes for its group at this clock."""
        return self._transport.rank == self._leader(clock)

    def add_up(self, tensor: torch.Tensor) -> None:
        """Replace a flat tensor by its sum over the group, on every member."""
        with self._together() as collective:
            collective.allreduce_(tensor)

    def bring_together(self, tensor: torch.Tensor, clock: int) -> None:
        """Replace a flat tensor by its sum over the group, on the leader at least."""
        with self._together() as collective:
            if self._spec.via == "ring":
                collective.allreduce_(tensor)
            else:
                collective.reduce_(tensor, self._leader(clock))

    def close(self) -> None:
        """Leave."""
        self._transport.close()

    def _leader(self, clock: int) -> int:
        return clock % len(self.ranks) if self._spec.leader == "rotate" else 0

    @contextmanager
    def _together(self) -> Iterator[Collective]:
        if self._collective is None:
            self._collective = self._meet()
        try:
            yield self._collective
        except (PeerLost, CommTimeout):
            self._client.pause(_AFTERTHOUGHT_S)
            raise self._loss() from None

    def _meet(self) -> Collective:
        client = self._client
        while "posts" not in client.settings:
            client.hear(_LOOK_EVERY_S)
        addresses = {rank: post["address"] for rank, post in client.settings["posts"].items()}
        if addresses[self._rank] != self._transport.address:
            raise self._loss()  # Of the worker that had this rank before.
        self._transport.connect({index: addresses[rank] for index, rank in enumerate(self.ranks)})
        name = "ring" if self._spec.via == "ring" else "central"
        return make_collective(name, self._transport, self._transport.rank, len(self.ranks), timeout_s=_PATIENCE_S)

    def _loss(self) -> LaunchError:
        return LaunchError(
            f"A worker died, and via={self._spec.via} cannot replace it; use via=direct, which can."
        )


def ranks_of_group(rank: int, workers: int, groups: int) -> range:
    """The neighbours, this one among them, that push together."""
    borders = [workers * group // groups for group in range(groups + 1)]
    start = max(border for border in borders if border <= rank)
    return range(start, min(border for border in borders if border > rank))


class _AttentiveTransport(ZmqTransport):
    """Looks around while it waits for a peer: the coordinator wants signs of life, and may tell it to stop."""

    def __init__(self, rank: int, *, key: RunKey, address: str, look: Callable[[], None]) -> None:
        super().__init__(rank, key=key, address=address)
        self._look = look

    def receive(self, timeout_s: float, *, awaited: int | None = None) -> tuple[int, Message]:
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                return super().receive(_LOOK_EVERY_S, awaited=awaited)
            except CommTimeout:
                if time.monotonic() >= deadline:
                    raise
            self._look()
