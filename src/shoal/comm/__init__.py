"""How bytes move: transports, the message codec and collectives.

Names are loaded when they are first used: a supervisor needs a `Channel`, and neither torch nor ZeroMQ.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from shoal.lazy import found_in

if TYPE_CHECKING:
    from shoal.comm.codec import Message, decode, encode
    from shoal.comm.collectives import COLLECTIVES, Collective, make_collective
    from shoal.comm.memory_transport import Faults, MemoryNetwork, MemoryTransport
    from shoal.comm.reliable import Reliability
    from shoal.comm.security import RunKey
    from shoal.comm.transport import Roster, Transport, TransportCounters
    from shoal.comm.zmq_transport import ZmqTransport
    from shoal.comm.zmq_wire import ZmqWire

__all__ = [
    "COLLECTIVES",
    "Collective",
    "Faults",
    "MemoryNetwork",
    "MemoryTransport",
    "Message",
    "Reliability",
    "Roster",
    "RunKey",
    "Transport",
    "TransportCounters",
    "ZmqTransport",
    "ZmqWire",
    "decode",
    "encode",
    "make_collective",
]

_HOMES = {
    "COLLECTIVES": "collectives",
    "Collective": "collectives",
    "TransportCounters": "transport",
    "Faults": "memory_transport",
    "MemoryNetwork": "memory_transport",
    "MemoryTransport": "memory_transport",
    "Message": "codec",
    "Reliability": "reliable",
    "Roster": "transport",
    "RunKey": "security",
    "Transport": "transport",
    "ZmqTransport": "zmq_transport",
    "ZmqWire": "zmq_wire",
    "decode": "codec",
    "encode": "codec",
    "make_collective": "collectives",
}

__getattr__ = found_in(__name__, _HOMES)
