"""How chunks of one operation's tensor move, and how ranks notice that they do not fit together."""

from __future__ import annotations

from collections import defaultdict, deque
from itertools import pairwise

import torch

from shoal.comm.codec import Message
from shoal.comm.transport import Transport
from shoal.errors import CommError, ProtocolError

Chunk = slice
"""A range of the tensor's elements."""

_CHUNK = "collective.chunk"
_FAILED = "collective.failed"


class Mailbox:
    """Messages by sender: a rank that is ahead may send before it is its turn."""

    def __init__(self, transport: Transport, timeout_s: float) -> None:
        self.transport = transport
        self._timeout_s = timeout_s
        self._early: defaultdict[int, deque[Message]] = defaultdict(deque)

    def take(self, peer: int) -> Message:
        """The next message from this peer; raises what another rank reported as its failure."""
        while not self._early[peer]:
            sender, message = self.transport.receive(self._timeout_s, awaited=peer)
            if message.kind == _FAILED:
                raise ProtocolError(f"Rank {sender} gave up: {message.fields['reason']}", peer=str(sender))
            self._early[sender].append(message)
        return self._early[peer].popleft()

    def tell_all(self, failure: CommError) -> None:
        """Tell every peer that waits for us not to."""
        for peer in self.transport.peers:
            try:
                self.transport.send(peer, Message(_FAILED, {"reason": str(failure)}))
            except CommError:
                continue  # It has left, and waits for nobody.


class Exchange:
    """One operation on one tensor: its chunks, sent and taken."""

    def __init__(self, mailbox: Mailbox, tensor: torch.Tensor, operation: str, chunk_bytes: int) -> None:
        self.numel = tensor.numel()
        self._mailbox = mailbox
        self._tensor = tensor
        self._chunk_numel = max(1, chunk_bytes // tensor.element_size())
        self._identity = {
            "operation": operation,
            "numel": self.numel,
            "dtype": str(tensor.dtype).removeprefix("torch."),
            "chunk_numel": self._chunk_numel,
        }

    def chunks(self, start: int, stop: int, *, count: int | None = None) -> list[Chunk]:
        """Cut a range into `count` even chunks; by default as many as its length asks for, at least one.

        A single empty chunk stands for an empty range, so that ranks meet and compare lengths all the same.
        """
        count = count or self.num_chunks(stop - start)
        bounds = [start + (stop - start) * index // count for index in range(count + 1)]
        return [slice(low, high) for low, high in pairwise(bounds)]

    def num_chunks(self, numel: int) -> int:
        """How many chunks a range of this length needs."""
        return max(1, -(-numel // self._chunk_numel))

    def view(self, chunk: Chunk) -> torch.Tensor:
        """This chunk of the tensor, in place."""
        return self._tensor[chunk]

    def send(self, peer: int, chunk: Chunk, content: torch.Tensor | None = None) -> None:
        """Send a chunk of the tensor from where it lies, or other `content` in its place."""
        content = self.view(chunk) if content is None else content
        fields = {**self._identity, "start": chunk.start}
        self._mailbox.transport.send(peer, Message(_CHUNK, fields, [content]))

    def take(self, peer: int, chunk: Chunk) -> torch.Tensor:
        """A peer's version of a chunk; `ProtocolError` where the peer does not do what we do."""
        message = self._mailbox.take(peer)
        expected = {**self._identity, "start": chunk.start}
        if message.kind != _CHUNK or message.fields != expected or len(message.frames) != 1:
            raise ProtocolError(self._disagreement(peer, message), peer=str(peer))
        content = message.frames[0]
        mine = self.view(chunk)
        if not isinstance(content, torch.Tensor) or (content.dtype, content.shape) != (
            mine.dtype,
            mine.shape,
        ):
            raise ProtocolError(f"Rank {peer} sent a chunk that is not the one announced.", peer=str(peer))
        return content

    def _disagreement(self, peer: int, message: Message) -> str:
        theirs = message.fields
        for name in self._identity:
            if theirs.get(name) != self._identity[name]:
                return (
                    f"Rank {self._mailbox.transport.rank} calls {_describe(self._identity)}, but rank {peer} "
                    f"calls {_describe(theirs)}; all ranks must do the same on tensors alike."
                )
        return f"Rank {peer} sent {message.kind} from {theirs.get('start')} out of turn."


def _describe(fields: dict[str, object]) -> str:
    return (
        f"{fields.get('operation')} of {fields.get('numel')} {fields.get('dtype')} "
        f"in chunks of {fields.get('chunk_numel')}"
    )
