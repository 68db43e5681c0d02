"""How bytes move: transports, the message codec and collectives."""

from shoal.comm.codec import Message, decode, encode
from shoal.comm.collectives import COLLECTIVES, Collective, make_collective
from shoal.comm.memory_transport import Faults, MemoryNetwork, MemoryTransport
from shoal.comm.reliable import Reliability
from shoal.comm.transport import Counters, Roster, Transport
from shoal.comm.zmq_transport import ZmqTransport

__all__ = [
    "COLLECTIVES",
    "Collective",
    "Counters",
    "Faults",
    "MemoryNetwork",
    "MemoryTransport",
    "Message",
    "Reliability",
    "Roster",
    "Transport",
    "ZmqTransport",
    "decode",
    "encode",
    "make_collective",
]
