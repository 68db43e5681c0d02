"""The envelope before every message on the wire: who sent it, its number, and what the sender has got."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from enum import IntEnum

from shoal.comm.codec import Buffer, checksum
from shoal.errors import ProtocolError

_FIELDS = struct.Struct("<4sBxxxiIQQ")
_CHECKSUM = struct.Struct("<Q")
_MAGIC = b"SHL1"


class PacketKind(IntEnum):
    """What a packet is."""

    MESSAGE = 1
    """A numbered message; its buffers follow."""
    GOODBYE = 2
    """Numbered like a message, the last one: the sender leaves."""
    ACKNOWLEDGE = 3
    """Only tells what has arrived."""
    REPEAT = 4
    """Asks for the packet of this number again."""


@dataclass(frozen=True)
class Envelope:
    """The first buffer of every packet."""

    kind: PacketKind
    sender: int
    generation: int
    sequence: int
    """The number of this message, or of the one asked for; from 1."""
    acknowledged: int
    """The sender has everything up to this number."""

    def pack(self) -> bytes:
        """This envelope as bytes, checksum last."""
        body = _FIELDS.pack(_MAGIC, self.kind, self.sender, self.generation, self.sequence, self.acknowledged)
        return body + _CHECKSUM.pack(checksum(body))

    @classmethod
    def unpack(cls, buffer: Buffer) -> Envelope:
        """The envelope that `pack` wrote; `ProtocolError` for anything else."""
        raw = bytes(memoryview(buffer)[: _FIELDS.size + _CHECKSUM.size + 1])
        if len(raw) != _FIELDS.size + _CHECKSUM.size:
            raise ProtocolError("An envelope has the wrong length.")
        body, (expected,) = raw[: _FIELDS.size], _CHECKSUM.unpack(raw[_FIELDS.size :])
        if checksum(body) != expected:
            raise ProtocolError("The checksum of an envelope does not match.")
        magic, kind, sender, generation, sequence, acknowledged = _FIELDS.unpack(body)
        if magic != _MAGIC or kind not in list(PacketKind):
            raise ProtocolError("An envelope is not one of Shoal's.")
        return cls(PacketKind(kind), sender, generation, sequence, acknowledged)
