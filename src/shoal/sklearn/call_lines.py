"""How calls and results travel: over a Unix socket of this host, or encrypted to another one."""

from __future__ import annotations

from multiprocessing.connection import Client, Connection, Listener
from typing import Any, Protocol

from shoal.comm.security import RunKey
from shoal.comm.tcp.stream_channel import ChannelDoor, StreamChannel
from shoal.errors import PeerLost

_PIECE_BYTES = 16 << 20
_PATIENCE_S = 60.0
"""For a piece to leave: a cable that was cut says nothing."""


class CallLine(Protocol):
    """One end of a line. PeerLost where the other is gone."""

    def fileno(self) -> int:
        """Readable, for a selector, when `take` may have something."""

    def send(self, content: bytes) -> None:
        """Send this, however large it is."""

    def take(self) -> bytes | None:
        """What has come; None where it is not all there."""

    def receive(self) -> bytes:
        """What comes next."""

    def close(self) -> None:
        """Hang up."""


class CallDoor(Protocol):
    """Where processes call that want something to do."""

    def fileno(self) -> int:
        """Readable, for a selector, when somebody calls."""

    def collect(self) -> list[CallLine]:
        """Lines to those who have come."""

    def close(self) -> None:
        """Let nobody in any more."""


class UnixLine:
    """Inside one host."""

    def __init__(self, connection: Connection[Any, Any]) -> None:
        self._connection = connection

    @classmethod
    def call(cls, path: str) -> UnixLine:
        """Call who listens there."""
        return cls(Client(path, "AF_UNIX"))

    def fileno(self) -> int:
        return self._connection.fileno()

    def send(self, content: bytes) -> None:
        try:
            self._connection.send_bytes(content)
        except OSError:
            raise PeerLost("The other end of a line is gone.") from None

    def take(self) -> bytes:
        return self.receive()

    def receive(self) -> bytes:
        try:
            return self._connection.recv_bytes()
        except (EOFError, OSError):
            raise PeerLost("The other end of a line is gone.") from None

    def close(self) -> None:
        self._connection.close()


class UnixDoor:
    """In a folder that no other user can enter: whoever calls there is one of ours."""

    def __init__(self, path: str, backlog: int) -> None:
        self._listener = Listener(path, "AF_UNIX", backlog=backlog)

    def fileno(self) -> int:
        fd: int = self._listener._listener._socket.fileno()  # type: ignore[attr-defined]
        return fd

    def collect(self) -> list[CallLine]:
        return [UnixLine(self._listener.accept())]

    def close(self) -> None:
        self._listener.close()


class NetworkLine:
    """Between two hosts, in pieces that a channel carries."""

    def __init__(self, channel: StreamChannel) -> None:
        self._channel = channel
        self._pieces: list[bytes] = []

    @classmethod
    def call(cls, address: str, key: RunKey) -> NetworkLine:
        """Call who listens there, and prove to each other that both have the key."""
        return cls(StreamChannel.call(address, key, encrypt=True))

    def fileno(self) -> int:
        return self._channel.fileno()

    def send(self, content: bytes) -> None:
        starts = range(0, max(1, len(content)), _PIECE_BYTES)
        for start in starts:
            piece = content[start : start + _PIECE_BYTES]
            self._channel.send({"kind": "call", "piece": piece, "is_last": start == starts[-1]})
            self._channel.drain(_PATIENCE_S)

    def take(self) -> bytes | None:
        while (message := self._channel.poll()) is not None:
            if (content := self._joined(message)) is not None:
                return content
        return None

    def receive(self) -> bytes:
        while True:
            message = self._channel.receive(None)
            if message is not None and (content := self._joined(message)) is not None:
                return content

    def _joined(self, message: dict[str, Any]) -> bytes | None:
        self._pieces.append(message["piece"])
        if not message["is_last"]:
            return None
        content, self._pieces = b"".join(self._pieces), []
        return content

    def close(self) -> None:
        self._channel.close()


class NetworkDoor:
    """At a port of the address that other hosts reach, for those who have the key."""

    def __init__(self, address: str, key: RunKey) -> None:
        self._door = ChannelDoor(address, key, encrypt=True)
        self.address = self._door.address

    def fileno(self) -> int:
        return self._door.fileno()

    def collect(self) -> list[CallLine]:
        return [NetworkLine(channel) for channel in self._door.collect()]

    def close(self) -> None:
        self._door.close()
