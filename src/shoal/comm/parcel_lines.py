"""Lines for words that bulk goes with: in a memory file inside one host, in the message between two."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterable
from typing import Any, Protocol

from shoal.comm.channel import Channel
from shoal.comm.parcels import packed, unpacked
from shoal.comm.security import RunKey
from shoal.comm.tcp.stream_channel import StreamChannel
from shoal.errors import PeerLost
from shoal.spec.told import Told

_PARCEL = "parcel"
_LOOK_EVERY_S = 0.5
_NEVER = bool
"""Called without an argument, it is False."""


class ParcelLine(Protocol):
    """One end of a line. One thread uses it."""

    def send(self, word: Told, buffers: Iterable[Any] = ()) -> None:
        """Say something, with these buffers, whose sizes the word has."""

    def receive(self, is_over: Callable[[], bool] = _NEVER) -> tuple[dict[str, Any], list[memoryview]]:
        """What the other says, and the buffers that came with it, which may be written to. PeerLost where it is
        gone, or it `is_over` for this side."""

    def close(self) -> None:
        """Hang up."""


class MemoryLine:
    """Between two processes of one host."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel

    @classmethod
    def call(cls, path: str, peer: str) -> MemoryLine:
        """Call who listens at this Unix socket."""
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        sock.connect(path)
        return cls(Channel(sock, peer))

    def send(self, word: Told, buffers: Iterable[Any] = ()) -> None:
        content = list(buffers)
        if not content:
            self._channel.send(word.as_message())
            return
        with packed(content) as parcel:
            self._channel.send(word.as_message(), [parcel])

    def receive(self, is_over: Callable[[], bool] = _NEVER) -> tuple[dict[str, Any], list[memoryview]]:
        message, fds = self._channel.receive_with_fds()
        return message, unpacked(fds, message.get("sizes", ())) if fds else []

    def close(self) -> None:
        self._channel.close()


class StreamLine:
    """Between two hosts."""

    def __init__(self, channel: StreamChannel) -> None:
        self._channel = channel

    @classmethod
    def call(cls, address: str, key: RunKey) -> StreamLine:
        """Call who listens at this address, encrypted."""
        return cls(StreamChannel.call(address, key, encrypt=True))

    def send(self, word: Told, buffers: Iterable[Any] = ()) -> None:
        content = [bytes(memoryview(buffer).cast("B")) for buffer in buffers]
        self._channel.send({**word.as_message(), _PARCEL: content})

    def receive(self, is_over: Callable[[], bool] = _NEVER) -> tuple[dict[str, Any], list[memoryview]]:
        while (message := self._channel.receive(_LOOK_EVERY_S)) is None:
            if is_over():  # nobody tells when a cable is cut
                raise PeerLost("Nothing more is to be heard.")
        content = message.pop(_PARCEL, [])
        return message, [memoryview(bytearray(one)) for one in content]

    def close(self) -> None:
        self._channel.close()
