"""Values from worker to worker: sent as soon as they are there, taken when they are needed."""

from __future__ import annotations

from typing import Any

import torch

from shoal.comm.group import Group
from shoal.strategies.cut.packing import Form, MessageRoom, leaves, pack


class Post:
    """One worker's end. Every value has a tag, which its sender and its reader agree on; each is read once.

    On its way a value is a header, whose length comes first, and the message that the header tells of.
    """

    def __init__(self, group: Group, *, device: str = "cpu") -> None:
        self.rank = group.index
        self.size = group.size
        self._group = group
        self._device = device
        self._arrived: dict[tuple[int, str], Any] = {}
        self._rounds = 0

    def send(self, peer: int, tag: str, value: Any) -> None:
        """Put a value on its way, and go on. It arrives as it is now, whatever becomes of its memory."""
        form = Form.of([tag, value])
        header = form.to_bytes()
        self._group.send(torch.tensor([len(header)]), peer)
        self._group.send(header, peer)
        # A copy: a layer that works in place may change the original before it has left.
        self._group.send(pack(form, leaves(value), copies=True), peer)

    def take(self, peer: int, tag: str) -> Any:
        """The value that a peer sent under this tag; waits for it. Tensors that had a history begin a new one."""
        while (peer, tag) not in self._arrived:
            came, value = self._read(peer)
            self._arrived[peer, came] = value
        return self._arrived.pop((peer, tag))

    def _read(self, peer: int) -> tuple[str, Any]:
        """The next value of a peer, and its tag."""
        length = torch.zeros(1, dtype=torch.int64)
        self._group.receive(length, peer).wait()
        header = torch.empty(int(length), dtype=torch.uint8)
        self._group.receive(header, peer).wait()
        message = MessageRoom(Form.from_bytes(header))
        self._group.receive(message.room, peer).wait()
        tag, value = message.value(self._device)
        return tag, value

    def sum_(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum over all workers, in place, with the same bits everywhere. All call this in the same order."""
        return self._group.all_reduce_(tensor)

    def broadcast_(self, tensor: torch.Tensor) -> None:
        """Take the first worker's values."""
        self._group.broadcast_(tensor)

    def share(self, value: Any) -> list[Any]:
        """What every worker has, by rank. All call this in the same order."""
        tag = self._next_round("share")
        others = [peer for peer in range(self.size) if peer != self.rank]
        for peer in others:
            self.send(peer, tag, value)
        found = {peer: self.take(peer, tag) for peer in others}
        return [found.get(peer, value) for peer in range(self.size)]

    def bring(self, value: Any, owner: int) -> Any:
        """What one worker has, at the first; None elsewhere. All call this in the same order.

        It is sent once the first worker asks for it, who so has one value at a time, however many are brought.
        """
        tag = self._next_round("bring")
        if owner == self.rank == 0:
            return value
        if self.rank == owner:
            self.take(0, f"{tag} asked")
            self.send(0, tag, value)
        if self.rank:
            return None
        self.send(owner, f"{tag} asked", None)
        return self.take(owner, tag)

    def _next_round(self, what: str) -> str:
        self._rounds += 1
        return f"{what} {self._rounds}"

    def close(self) -> None:
        """Leave the others."""
        self._group.close()
